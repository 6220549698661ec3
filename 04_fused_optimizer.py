"""04 - The optimizer's step inside backward: of all matrices' gradients a slab is alive at a time, for Muon one matrix.

The problem in one number
    Between the end of backward and the optimizer's step every gradient is alive, only to be read a single time: 15 GiB
    in bf16 for Llama 3 8B, as much as its weights. But AdamW's new value of an element needs that element of the
    gradient and no other. So a step can be taken as soon as a part of dW is complete, and that part forgotten: a tile
    that is still in registers (FORGE), or some rows of it, a slab, in one buffer of 32 MiB that all weights share. From
    equal dW in fp32 that is an ordinary step, bit for bit. How much of dW has to be there is a question to the rule:

        rule        needs to see    so that of all gradients there are at a time
        AdamW, SGD  an element      a tile in registers, or a slab
        Adam-mini   a row           a slab of whole rows
        Muon        a matrix        ONE whole dW in fp32: 9 MiB in GPT-2 small, 256 MiB for 4096 x 16384

    Clipping and micro-batches need all of dW first. Then each weight keeps what is smaller: dW, or the X and dY that it
    is a product of (section 7). Muon needs no clipping; train.py steps by it, inside backward.

Symbols
    W (M, K) weight, X (N, K) its inputs for N tokens, dY (N, M) gradient of its outputs; g is dW or a part of it; m, v
    moments; lr rate, decay; t = 1, 2, ... counts steps. E, C, V, D as in 02: embeddings, classifier, classes, width.

The maths
    dX = dY W           with the OLD weight: it has to be formed before W is touched
    dW = dY^T X         a sum over all N tokens: a part of it is final only when all of them are in
    AdamW               m += (1 - b1) (dW - m)      v = b2 v + (1 - b2) dW^2
                        W = W (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
    Adam-mini           the same with one v for a row:      v = b2 v + (1 - b2) mean(dW^2 along the row)
    Muon                g = dW / |dW|      m += (1 - b) (g - m)      U S V^T = g + b (m - g), the momentum's look ahead
                        W = W (1 - lr decay) - lr sqrt(max(1, M / K)) U V^T     (nearly, by products of matrices)

The ladder
    v1  hook    autograd makes a layer's dW, a hook takes the step and drops it. One whole dW at a time (LOMO). It needs
                nothing but PyTorch, and is the path on a CPU.
    v2  slab    the library's matrix product makes some rows of dW, in fp32; one kernel makes their whole step.
    v3  fused   each program sums a tile of dW over all tokens in registers and takes the step there (FORGE).
    plan_step() chooses by shape, tokens and layout, from a table of what was measured.

How to launch
    python 04_fused_optimizer.py                         checks, bytes, times; half a minute on a CPU, three on a GPU
    python 04_fused_optimizer.py --break update-first    plant a famous bug and watch its check fail (exit status 1)
    python 04_fused_optimizer.py --table                 the table of times in all layouts (GPU, minutes)

References
    FORGE, arXiv 2606.22932: the step in the epilogue of the gradient's matrix product. We had its abstract only; what
    is below it (random numbers, codes, order of operations, slabs, factors) is our own derivation.
    LOMO, arXiv 2306.09782 (one gradient alive at a time). AdamW, arXiv 1711.05101. Adam-mini, arXiv 2406.16793. Muon:
    K. Jordan, 2024 (coefficients, Nesterov, the factor of the shape), and arXiv 2502.16982 (decay, large models).
    8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861. Philox: Parallel Random Numbers, SC 2011.

Left out on purpose: Lion (exercise 1); Adafactor, LAMB, LARS and Shampoo, which read columns or norms of dW, or more
than one matrix of its size; a warp-specialised v3; moments in bf16, Muon's products on a stream of their own, or of
several matrices as one stack (README, "What did not work").
"""

import copy
import functools
import importlib
import itertools
import json
import math
import numbers
import statistics
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
HAS_TRITON, INTERPRETED, MIB, must_raise = base.HAS_TRITON, base.INTERPRETED, base.MIB, base.must_raise
triton, tl = cce.triton, cce.tl
load_tile, dot, tile_at, UPCAST = cce.load_tile, cce.dot, cce.tile_at, cce.UPCAST
fused_multiply_add, listed_span = filtering.fused_multiply_add, filtering.listed_span
lists_of_rows, listed_tile = filtering.lists_of_rows, filtering.listed_tile

if HAS_TRITON:
    from triton.language.extra import libdevice


# ==== 1. The rules: functions of (weight, gradient, moments). The reference, and the path on a CPU ====================
#
# AdamW as its paper has it divides twice by something that is the same for all elements. Taken out of them,
#
#     sqrt(v / (1 - b2^t)) = sqrt(v) * unbias           unbias = (1 - b2^t)^(-1/2)
#     - lr * m / (1 - b1^t) = rate * m                  rate   = - lr / (1 - b1^t)
#     W - lr decay W = keep * W                         keep   = 1 - lr decay
#
# a step of an element is
#     m += fresh_m (g - m)      v = b2 v + fresh_v g^2      W = keep W + rate m / (sqrt(v) unbias + eps)
# with numbers that change from step to step. They are computed on the host, in fp64: in fp32, 1 - 0.999^t is off by
# 1e-5. The device reads them, as fp32, from one small tensor, so that no kernel is compiled anew for a new rate and a
# CUDA graph can be replayed.


class Scalars(NamedTuple):
    """What all elements of a step share; each rule fills in those that it has."""

    keep: float = 0.0  # of W: decoupled decay. All but SGD
    coupled: float = 0.0  # of W that is added to the gradient: coupled decay. SGD
    rate: float = 0.0  # with its sign
    b1: float = 0.0  # SGD, Muon
    fresh_m: float = 0.0  # 1 - b1. All but SGD
    b2: float = 0.0  # from here on: AdamW, Adam-mini
    fresh_v: float = 0.0  # 1 - b2
    unbias: float = 0.0
    eps: float = 0.0
    scale: float = 1.0  # of the gradient: clipping. All but Muon


def fma(a, b, c):
    """a b + c. GPUs round it once, as the kernels below do and torch's own optimizers there; on a CPU, twice."""
    return torch.addcmul(c, a, b) if isinstance(c, torch.Tensor) and c.is_cuda else a * b + c


def root(x):
    """Square root, correctly rounded: torch's own on a CPU may be off in the last place."""
    return x.double().sqrt().to(x.dtype)


@dataclass(frozen=True)
class Rule:
    """A rule has scalars(lr, step) and update(p, g, m, v, s) -> new p, m, v: tensors of one shape in fp32, s their
    Scalars; what a rule has no use for is None. needs: how much of dW it has to see to step one element."""

    moments = ("m",)
    needs = "element"

    def __post_init__(self):
        """ValueError unless decay rates of moments, eps and weight decay lie in their ranges."""
        decays = self.betas if hasattr(self, "betas") else (self.momentum,) * 2
        pair = isinstance(decays, tuple) and len(decays) == 2
        good = pair and all(isinstance(decay, numbers.Real) and 0 <= decay < 1 for decay in decays)
        if not (good and self.weight_decay >= 0 and getattr(self, "eps", 1.0) > 0):
            raise base.BadInput(f"{self}: betas (a pair) and momentum lie in 0 ... 1 (not 1), weight_decay is not "
                                "negative, eps is positive")


@dataclass(frozen=True)
class AdamW(Rule):
    """Decoupled weight decay, arXiv 1711.05101: bit for bit torch.optim.AdamW(foreach=False) on a GPU, in fp32."""

    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments = ("m", "v")

    def scalars(self, lr, step):
        b1, b2 = self.betas
        return Scalars(keep=1 - lr * self.weight_decay, rate=-lr / (1 - b1**step), fresh_m=1 - b1, b2=b2,
                       fresh_v=1 - b2, unbias=(1 - b2**step) ** -0.5, eps=self.eps)

    @staticmethod
    def update(p, g, m, v, s):
        m = fma(g - m, s.fresh_m, m)
        v = fma(g * g, s.fresh_v, v * s.b2)
        return AdamW.moved(p, m, v, s), m, v

    @staticmethod
    def moved(p, m, v, s):
        """New p, by moments that have moved already."""
        return fma(m / (root(v) * s.unbias + s.eps), s.rate, p * s.keep)


# In AdamW's update, m / sqrt(v), the second moment is a rate for each element. Adam-mini asks how many rates there have
# to be, and answers: one for each block of the Hessian, whose eigenvalues differ much less inside of a block than
# between blocks. Blocks are rows: of a matrix (M, K) the K weights of one output; of embedding and classifier one
# token's. v is then the mean of dW^2 along the row, M numbers instead of M K:
#
#     dW = [ .3  -.1   .2 ]      AdamW      dW^2 = [ .09  .01  .04 ]      Adam-mini   [ .0467 ]
#          [ 4.   0.   3. ]                        [ 16.  0.   9.  ]                  [ 8.33  ]
#
# (The paper groups q and k by heads; ours go by rows as all others.) Rates and decay are AdamW's.


@dataclass(frozen=True)
class AdamMini(AdamW):
    """AdamW with one second moment for a row, arXiv 2406.16793. The v (R, 1) that update() is given has moved already,
    by State.move_rows(), which sees whole rows."""

    moments = ("m",)
    needs = "row"

    @staticmethod
    def update(p, g, m, v, s):
        m = fma(g - m, s.fresh_m, m)
        return AdamW.moved(p, m, v, s), m, None


@dataclass(frozen=True)
class SGD(Rule):
    """Heavy-ball momentum, weight decay added to the gradient: torch.optim.SGD(foreach=False)."""

    momentum: float = 0.9
    weight_decay: float = 0.0

    def scalars(self, lr, step):
        return Scalars(coupled=self.weight_decay, rate=-lr, b1=self.momentum)

    @staticmethod
    def update(p, g, m, v, s):
        m = m * s.b1 + fma(p, s.coupled, g)
        return fma(m, s.rate, p), m, None


@dataclass(frozen=True)
class Muon(Rule):
    """Momentum, made orthogonal (section 2), decoupled decay: K. Jordan 2024, arXiv 2502.16982. One moment; for
    matrices of layers. Its update() is the second half of a step: g is what orthogonal() made of the first (section 5).
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    needs = "matrix"

    def scalars(self, lr, step):
        return Scalars(keep=1 - lr * self.weight_decay, rate=-lr, b1=self.momentum, fresh_m=1 - self.momentum)

    @staticmethod
    def update(p, g, m, v, s):
        return fma(g, s.rate, p * s.keep), None, None


# ==== 2. Muon: a rule that wants a whole matrix, and what it gives for that ===========================================
#
# What moves a layer is the matrix it multiplies by. A gradient dW = U S V^T is the sum of a few strong directions (its
# large singular values) and many weak ones, and so is its momentum: a step along it turns the strong ones only. Muon
# keeps the directions and makes all of them equally strong: the update is U V^T, the orthogonal matrix nearest to the
# momentum, times the rate. And each gradient is divided by its norm before it enters the momentum. (That is ours: a
# plain mean of the last twenty or so is ruled by its longest, at the start the oldest, later those of a burst.) So the
# size of a gradient does not matter at all: a batch whose gradient is a hundred times its neighbours' moves the weights
# no further than any other, nothing needs to be clipped, and the step can be taken as soon as dW is there, inside
# backward. There is no second moment either.
#
# An SVD would be slow on a GPU. Newton-Schulz makes (nearly) the same of matrix products alone. An odd polynomial of X,
#     p(X) = a X + b (X X^T) X + c (X X^T)^2 X = U p(S) V^T,     p(s) = a s + b s^3 + c s^5,
# acts on each singular value by itself. X is first divided by its norm, so that all of them lie in 0 ... 1. To settle
# at 1 without overshooting, p would need p(1) = 1 and p'(1) = 0, hence a slope at 0 of 1.875 at most: small values,
# most of them are below 0.01, would grow too slowly. Jordan's coefficients give up settling for the steepest start,
# 3.4445 each step. What was above 0.005 of the norm ends between 0.68 and 1.16, near enough to train with:
#
#     before      .001   .002   .005   .01    .02    .05    .1     .2     .5     1
#     1 step      .003   .007   .017   .034   .069   .172   .340   .651  1.189   .701
#     5 steps     .471   .860  1.154   .699   .682   .758   .712   .747   .765   .696
#
# It costs, in a matrix with m <= n of rows and columns, 5 (4 m^2 n + 2 m^3) FLOP however many tokens there are. For
# GPT-2 small that is 3 % of a step of 65,536 tokens; for a model of 7 billion parameters and 16,384 tokens as much as
# the rest of the step. In 16 bits it is off by 1.2 % (check_orthogonal), far less than what p itself leaves of 1.

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


def rate_of_shape(M, K):
    """Of the update's (M, K): with it a step changes the outputs as much for a tall matrix as for a square one, since
    an orthogonal matrix with M > K has columns of length 1, hence elements sqrt(K / M) smaller than a square's."""
    return math.sqrt(max(1, M / K))


@torch.no_grad()
@cce.without_autocast
def orthogonal(U):
    """U (M, K), or a stack (E, M, K) of which each is a matrix of its own; any float dtype, overwritten -> nearly U V^T
    of its singular vectors, times rate_of_shape. 0 stays 0 and NaN stays NaN. Peak: orthogonal_bytes(), U included."""
    M, K = U.shape[-2:]
    wide, multiply_add = torch.promote_types(U.dtype, torch.float32), torch.addmm if U.dim() == 2 else torch.baddbmm
    norm = torch.linalg.vector_norm(U, dim=(-2, -1), keepdim=True, dtype=wide)
    X, spare = U.div_(norm.clamp(min=torch.finfo(wide).tiny)), torch.empty_like(U)
    for step in range(1, STEPS + 1):
        scale = rate_of_shape(M, K) if step == STEPS else 1.0
        a, b, c = (scale * coefficient for coefficient in NEWTON_SCHULZ)
        A = X @ X.mT if M <= K else X.mT @ X  # (m, m), of the shorter side: X (X^T X) is (X X^T) X
        B = multiply_add(A, A, A, beta=b, alpha=c)
        X, spare = multiply_add(X, *((B, X) if M <= K else (X, B)), beta=a, out=spare), X
    return X


def orthogonal_flops(M, K):
    """FLOPs of orthogonal() of one matrix."""
    m, n = sorted((M, K))
    return STEPS * (4 * m * m * n + 2 * m**3)


def orthogonal_bytes(M, K, itemsize=2):
    """Bytes that Muon holds beside dW for its time: U, the next X, and A, B and the next A."""
    return itemsize * (2 * M * K + 3 * min(M, K) ** 2)


# ==== 3. The layouts, and the cost model: bytes a parameter, held and moved ===========================================
#
#     layout  W     master  m, v          bytes a parameter   AdamW   Adam-mini, Muon
#     fp32    fp32  -       fp32                               12      8
#     master  bf16  fp32    fp32                               14     10
#     int8    bf16  -       8-bit codes                         4.06   3.03
#
# master: products read the bf16 W, and the step moves an fp32 copy of it, in which small updates add up. int8: W itself
# moves, and is rounded stochastically, so that it is right on average; m and v are codes with a scale for each 128
# elements of a row (section 4).

GROUP = 128  # elements of a row that share the scales of their 8-bit codes
SLAB = 32 * MIB  # bytes of gradient alive at a time in v2: in fp32, two waves of 128 x 256 tiles on an H200
DTYPES = (torch.float32, torch.bfloat16)  # of weights and of products


class Layout(NamedTuple):
    """dtype of W, whether there is an fp32 master copy, dtypes of m and v."""

    weight: torch.dtype
    master: bool
    moments: tuple


LAYOUTS = {
    "fp32": Layout(torch.float32, False, (torch.float32, torch.float32)),
    "master": Layout(torch.bfloat16, True, (torch.float32, torch.float32)),
    "int8": Layout(torch.bfloat16, False, (torch.int8, torch.uint8)),
}
BORDERS = {"fp32": 1, "master": 1, "int8": GROUP}  # columns at whose multiples a weight can be cut into shards


def state_bytes(rule, layout):
    """Bytes a parameter that the optimizer holds beside W: master copy, moments, and the scales of 8-bit codes. (Not
    Adam-mini's 4 a row.)"""
    form = LAYOUTS[layout]
    moments = sum(dtype.itemsize for _, dtype in zip(rule.moments, form.moments, strict=False))
    return 4 * form.master + moments + (4 * len(rule.moments) / GROUP if layout == "int8" else 0)


def traffic_bytes(rule, layout, gradient):
    """Bytes a parameter read and written: all of the state both ways (W itself only written where there is a master
    copy), and a gradient of so many bytes, written and read (0: it stays in registers; 2: of four, it is only read)."""
    form = LAYOUTS[layout]
    return form.weight.itemsize * (1 if form.master else 2) + 2 * state_bytes(rule, layout) + 2 * gradient


# Which rung? v3 saves the gradient's way to memory and back, 8 bytes a parameter, but its matrix product is slower than
# the library's. An H200 moves 4.2 TB/s, on it the library multiplies at 700 TFLOP/s, v3 at 460. So for 4096 x 4096 with
# master copies it should take, in microseconds (and did take):
#
#                               N = 512                   N = 16,384
#     v2   34 B an element      136 + 25 = 161 (164)      136 +   785 =   921   (907)
#     v3   26 B                 104 + 37 = 141 (162)      104 + 1,195 = 1,299 (1,300)
#
# They meet where 8 / 4.2e12 = 2 N (1 / 460e12 - 1 / 700e12), at 1,280 tokens whatever the matrix; in fact earlier. And
# a matrix that is one slab stays in the L2 cache, where the gradient's way costs nothing: v2 is the faster at once.

# Tokens up to which v3 was faster, for matrices of more than 1 and up to 16 slabs, and of more (H200; --table). An
# H100, at 3.0 TB/s, would go on with it longer: at 4096 x 14336, master, 1,024 tokens v2 takes 10 % more than v3.
FUSED_UP_TO = {"fp32": (1024, 1024), "master": (512, 1024), "int8": (0, 0)}


class Plan(NamedTuple):
    """How a weight is stepped: "slab", "fused" or, with Muon, "matrix" ("hook": for forecasts; autograd does that);
    rows of dW at a time, their bytes."""

    rung: str
    rows: int
    bytes: int


def plan_step(rule, M, K, N, layout, rung="auto", slab=SLAB, matrices=1):
    """The Plan for dW (M, K), a sum over N tokens (0: not known, or no product). slab: bytes; it is of fp32, and has at
    least one row. Muon has as many of the `matrices` that lie one below the other in W as a slab holds, and always one.
    """
    fitting, many = slab // (4 * K), 4 * M * K > 16 * slab  # rows
    if rule.needs == "matrix":
        rows = M // matrices
        rows *= max(1, min(matrices, fitting // rows))
        return Plan("matrix", rows, 4 * rows * K)
    if rung == "hook":
        return Plan("hook", M, LAYOUTS[layout].weight.itemsize * M * K)
    limit = FUSED_UP_TO[layout][many] if M > fitting else 0
    if rule.needs == "element" and (rung == "fused" or rung == "auto" and 0 < N <= limit):
        return Plan("fused", 0, 0)
    tiles = fitting // 128 * 128  # whole tiles of the library's product; 0 if not even one fits
    rows = M if M <= fitting else max(1, tiles or fitting)
    return Plan("slab", rows, 4 * rows * K)


# ==== 4. What int8 stores: bf16 by chance, and 8-bit codes ============================================================
#
# Stochastic rounding to bf16: the 16 bits that are dropped decide by chance whether the rest goes up, so that the mean
# of many roundings is the number itself. An update of a tenth of W's last place then moves W in one step of ten;
# rounded to nearest, in none.
#
#     fp32      s eeeeeeee mmmmmmm | 1010000000000000        dropped: 40960 of 65536
#     + noise   0 ... 65535 in the low 16 bits               carries into the last m with probability 40960 / 65536
#
# The bits come from Philox, a function of a key and a counter without memory:
#     key = the run's seed, counter = (column // 8, row, weight's number, step)
# with row and column counted in the WHOLE weight. Whatever tile, slab or shard an element is in, its noise is the same.
# A call gives four 32-bit words: 16 bits each for the eight elements of a counter.

ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass all of BigCrush; 10 is the cautious default elsewhere


def philox(seed, c0, c1, c2, c3):
    """Four 32-bit words, int64 tensors, for a 64-bit key and four 32-bit counters: what tl.philox gives."""
    low = 0xFFFFFFFF
    high_half = lambda a, x: ((x >> 16) * a + ((x & 0xFFFF) * a >> 16)) >> 16  # noqa: E731  of a 64-bit product
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(int(ROUNDS)):
        a, b = 0xD2511F53, 0xCD9E8D57
        c0, c1, c2, c3 = high_half(b, c2) ^ c1 ^ k0, b * c2 & low, high_half(a, c0) ^ c3 ^ k1, a * c0 & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0, c1, c2, c3


def random_bits(seed, step, number, row, col, R, C, device):
    """(R, C) int32 in 0 ... 65535 for the elements from (row, col) on; col is a multiple of 8."""
    octets = math.ceil(C / 8)
    rows = torch.arange(row, row + R, device=device).unsqueeze(1).expand(R, octets)
    cols = (torch.arange(octets, device=device) + col // 8).expand(R, octets)
    zero = torch.zeros_like(rows)
    words = torch.stack(philox(seed, cols, rows, zero + number, zero + (step & 0xFFFFFFFF)), -1)  # (R, octets, 4)
    return torch.stack((words & 0xFFFF, words >> 16), -1).reshape(R, -1)[:, :C].int()


def round_to_bf16(x, noise):
    """fp32 x, int32 noise in 0 ... 65535 -> bf16, up with the probability of the dropped bits. An infinity has none to
    drop; a GPU's NaN, 0x7FFFFFFF, would become -0 if noise were added to it."""
    bits = torch.where(x.isnan(), 0x7FC00000, x.contiguous().view(torch.int32) + noise)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


# 8-bit codes in groups of 128 elements of a row, relative to the largest of the group, `top`. Uniform codes would waste
# their range on the few large elements, so both moments are bent first:
#
#     m    y = 2 x / (1 + |x|), x = m / top     twice the resolution at 0        code = 127 y
#     v    y = sqrt(v / top)                    evenly in what AdamW divides by  code = 255 y, at least 1 if v > 0
#
#     m / top           1.000    .500    .100    .010    .001
#     code                127      85      23       3       0
#     back              1.000    .503    .0996   .0120      0        evenly spaced codes: 1.000, .504, .102, .008, 0
#
# A code of 0 for a v > 0 would divide m by almost nothing, hence the floor. Codes are rounded to nearest: rounded
# stochastically they were further from AdamW in each step (README, "What did not work").

V_FLOOR = tl.constexpr(1)


def grouped(x):
    """(R, C) -> (R, groups, GROUP), filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def encode_m(m):
    """fp32 (R, C) -> codes int8 (R, C), scales fp32 (R, groups)."""
    x = grouped(m)
    top = x.abs().amax(-1, keepdim=True)  # (R, groups, 1)
    y = 254 * x / (torch.where(top == 0, 1, top) + x.abs())
    return y.round().to(torch.int8).flatten(1)[:, : m.shape[1]], top.squeeze(-1)


def decode_m(code, scale):
    y = grouped(code.float())
    return (y * scale.unsqueeze(-1) / (254 - y.abs())).flatten(1)[:, : code.shape[1]]


def encode_v(v):
    """fp32 v >= 0 (R, C) -> codes uint8 (R, C), scales fp32 (R, groups)."""
    x = grouped(root(v))
    top = x.amax(-1, keepdim=True)  # (R, groups, 1)
    y = x * (255 * torch.where(top == 0, 1, top).reciprocal())
    code = torch.where(x > 0, y.round().clamp(min=int(V_FLOOR)), 0)
    return code.to(torch.uint8).flatten(1)[:, : v.shape[1]], top.squeeze(-1) / 255


def decode_v(code, scale):
    x = grouped(code.float()) * scale.unsqueeze(-1)
    return (x * x).flatten(1)[:, : code.shape[1]]


# ==== 5. The step of some rows: in PyTorch, then in one kernel ========================================================
#
#            read                            compute                       write
#     W or master, m, v  --> fp32 ---->  rule.update(p, g, m, v) --> rounded, coded --> master, W, m, v
#     g (a slab)  ---+-----> * scale ----'
#                    '-----> sum of g^2, for the norm that is logged
#
# The kernel makes one pass, in which every byte of the state is read and written once. The docstrings of its functions
# name their twins in PyTorch. On equal inputs fp32 and master make equal bits in both; in int8, where rounding hides
# the rest, compiled kernels divide faster and less exactly (and of a NaN they leave no trace in the codes, only in W).


class Fields(NamedTuple):
    """The tensors of a weight (M, K), as one argument of a kernel. Those that its rule or layout lacks are None; what
    would use them is not compiled. So they also tell the rule: m and v AdamW, m and row_v Adam-mini, m alone SGD or
    (given norms) Muon's first half; without m a kernel is given no gradient but a ready update, for Muon's second."""

    W: torch.Tensor  # (M, K)
    master: torch.Tensor | None  # (M, K)
    m: torch.Tensor | None  # (M, K)
    v: torch.Tensor | None  # (M, K)
    row_v: torch.Tensor | None  # (M,), of Adam-mini
    m_scale: torch.Tensor | None  # (M, groups)
    v_scale: torch.Tensor | None  # (M, groups)
    scalars: torch.Tensor  # of this step: Scalars
    key: torch.Tensor  # seed, step
    place: torch.Tensor  # the weight's number; row and column of its first element, if it is a shard of a larger one
    squares: torch.Tensor  # (SLOTS,) fp64: where the sum of g^2 goes
    K: int
    groups: int


PIECE = 2**16  # elements at a time: small enough for a CPU's cache, large enough for two threads
SLOTS = tl.constexpr(32)  # places for sums of g^2, so that thousands of programs do not queue for one


def read(moment, scale, decode, rows=slice(None)):
    """Rows of a moment, in fp32."""
    return moment[rows].float() if scale is None else decode(moment[rows], scale[rows])


def write(moment, scale, encode, rows, x):
    """Store them, as what they are kept as."""
    if scale is None:
        moment[rows] = x
    else:
        moment[rows], scale[rows] = encode(x)


@torch.no_grad()
def torch_step(state, f, gradient, row, norms=None, U=None):
    """The step of the rows from `row` on, of a State with Fields f, whose gradient is (R, K); piece by piece. Given the
    norm of each row's matrix (E,), Muon's first half: the momentum moves, and U (R, K) becomes the look ahead."""
    (R, K), handle, (top, left) = gradient.shape, state.handle, state.origin
    s = Scalars(*f.scalars.unbind())
    if norms is not None:
        norms = norms.where(norms != 0, 1).repeat_interleave(state.matrix_rows)  # (R,)
    for start, stop in cce.pieces(R, max(1, PIECE // K)):
        rows = slice(row + start, row + stop)
        g, m, v = gradient[start:stop].float(), None, None  # (r, K)
        if f.m is not None:  # else g is an update that is ready
            m = read(f.m, f.m_scale, decode_m, rows)
            f.squares[0] += g.square().sum()
            if norms is not None:
                g = g / norms[start:stop].unsqueeze(1)
                m = fma(g - m, s.fresh_m, m)
                write(f.m, f.m_scale, encode_m, rows, m)
                U[start:stop] = look_ahead_torch(g, m, s.b1)
                continue
            g = g * s.scale
        if f.row_v is not None:
            v = f.row_v[rows].unsqueeze(1)  # (r, 1)
        elif f.v is not None:
            v = read(f.v, f.v_scale, decode_v, rows)

        p = (f.W if f.master is None else f.master)[rows].float()
        p, m, v = state.rule.update(p, g, m, v, s)

        if f.master is not None:
            f.master[rows] = p
        elif f.W.dtype == torch.bfloat16:
            place = top + row + start, left, stop - start, K  # in the whole weight
            p = round_to_bf16(p, random_bits(handle.seed, handle.at_step, state.number, *place, p.device))
        f.W[rows] = p.to(f.W.dtype)
        if m is not None:
            write(f.m, f.m_scale, encode_m, rows, m)
        if v is not None:
            write(f.v, f.v_scale, encode_v, rows, v)


# Muon's first half moves the momentum and looks ahead: where will it be if this gradient comes once more (Nesterov)?
# What orthogonal() makes of that is then a ready update for torch_step, or for the kernel.


def look_ahead_torch(g, m, b1):
    return fma(m - g, b1, g)


# The same in Triton. Sizes of tiles. "step": the kernel only moves bytes, so that small tiles and many programs are
# best; "16-bit", "32-bit": of forge_kernel (section 6), by the dtype of dY and X. The interpreter pays by the program,
# and gets few. NO_FUSION: no contraction of a * b + c beyond those written: it rounds once where torch rounds twice.

TILES = {
    "step": dict(BLOCK_M=4, BLOCK_K=256, num_warps=4),
    "16-bit": dict(BLOCK_N=64, BLOCK_M=64, BLOCK_K=128, PARTS=4, num_warps=4, num_stages=3),
    "32-bit": dict(BLOCK_N=32, BLOCK_M=64, BLOCK_K=128, PARTS=2, num_warps=8, num_stages=2),
}
if INTERPRETED:
    TILES["step"] = dict(BLOCK_M=64, BLOCK_K=256)
    TILES["16-bit"] = TILES["32-bit"] = dict(BLOCK_N=32, BLOCK_M=64, BLOCK_K=128, PARTS=2)
NO_FUSION = {} if INTERPRETED else dict(enable_fp_fusion=False)
GROUP_OF_CODES = tl.constexpr(GROUP)
# Places of Scalars in the kernels' tuple of them.
KEEP, COUPLED, RATE, B1, FRESH_M, B2, FRESH_V, UNBIAS, EPS, SCALE = map(tl.constexpr, range(len(Scalars._fields)))


@triton.jit
def quotient(a, b, EXACT: tl.constexpr):
    """a / b, correctly rounded or, with a tenth of the instructions, within 2 units of the last place. (UPCAST, of 02:
    interpreted.)"""
    if EXACT or UPCAST:
        return tl.div_rn(a, b)
    return libdevice.fast_dividef(a, b)


@triton.jit
def constants(f):
    """What all tiles of a step share: Scalars, in their order, and what the random bits are keyed by."""
    a = f.scalars
    scalars = (tl.load(a), tl.load(a + 1), tl.load(a + 2), tl.load(a + 3), tl.load(a + 4), tl.load(a + 5),
               tl.load(a + 6), tl.load(a + 7), tl.load(a + 8), tl.load(a + 9))
    place = (tl.load(f.place).to(tl.int32), tl.load(f.place + 1).to(tl.int32), tl.load(f.place + 2).to(tl.int32))
    return scalars, (tl.load(f.key), tl.load(f.key + 1).to(tl.int32), place[0], place[1], place[2])


@triton.jit
def nearest_integer(y):
    """fp32 |y| < 2^22 -> int32 to nearest, ties to even, in the low 16 bits: they are those of 1.5 * 2^23 + y."""
    return (y + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def tile_bits(key, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """random_bits for the tile (ROWS, COLS) at (row, col)."""
    like = tl.zeros((ROWS, COLS // 8), tl.int32)  # a counter for eight elements
    seed, step, number, row_origin, col_origin = key
    rows = (row_origin + row + tl.arange(0, ROWS))[:, None] + like
    cols = ((col_origin + col) // 8 + tl.arange(0, COLS // 8))[None, :] + like
    a, b, c, d = tl.philox(seed, cols, rows, like + number, like + step, n_rounds=ROUNDS)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS // 2))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLS)).to(tl.int32)


@triton.jit
def to_bf16(x, noise):
    """round_to_bf16 of a tile."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True) + noise, 0x7FC00000)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def top_of_groups(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """x >= 0 (ROWS, COLS) -> the largest of each group (ROWS, groups)."""
    return tl.max(tl.reshape(x, (ROWS, COLS // GROUP_OF_CODES, GROUP_OF_CODES)), 2)


@triton.jit
def spread(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(ROWS, groups) -> (ROWS, COLS), each value for all elements of its group."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, COLS // GROUP_OF_CODES, GROUP_OF_CODES)), (ROWS, COLS))


@triton.jit
def spot(f, row, col, row_stop, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the elements of the tile (ROWS, COLS) at (row, col) are, and the scales of its groups; which there are."""
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    groups = col // GROUP_OF_CODES + tl.arange(0, COLS // GROUP_OF_CODES)
    inside = (rows < row_stop)[:, None] & (cols < f.K)[None, :]
    scaled = (rows < row_stop)[:, None] & (groups < f.groups)[None, :]
    rows = rows.to(tl.int64)[:, None]
    return rows * f.K + cols[None, :], inside, rows * f.groups + groups[None, :], scaled


@triton.jit
def load_moment(moment, scales, where, SIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """read() of a tile: of m (SIGNED) or v."""
    at, inside, scale_at, scaled = where
    x = tl.load(moment + at, mask=inside, other=0)
    if scales is not None:
        # To fp32, cheaper than by a conversion: 0x4B000000 is 2^23, whose last place is 1, so that it is 2^23 + 128 +
        # code with 128 + code in its low bits.
        code = ((x.to(tl.int32) + 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        x = code * spread(tl.load(scales + scale_at, mask=scaled, other=0.0), ROWS, COLS)
        x = quotient(x, 254.0 - tl.abs(code), False) if SIGNED else x * x
    return x.to(tl.float32)


@triton.jit
def store_m(f, m, where, ROWS: tl.constexpr, COLS: tl.constexpr):
    """write() of m's tile."""
    at, inside, scale_at, scaled = where
    if f.m_scale is not None:
        top = top_of_groups(tl.where(inside, tl.abs(m), 0.0), ROWS, COLS)
        wide = spread(top, ROWS, COLS)
        y = quotient(254.0 * m, tl.where(wide == 0.0, 1.0, wide) + tl.abs(m), False)
        tl.store(f.m + at, nearest_integer(y).to(tl.int8), mask=inside)
        tl.store(f.m_scale + scale_at, top, mask=scaled)
    else:
        tl.store(f.m + at, m, mask=inside)


@triton.jit
def store_v(f, v, where, ROWS: tl.constexpr, COLS: tl.constexpr):
    """write() of v's tile."""
    at, inside, scale_at, scaled = where
    if f.v_scale is not None:
        x = tl.where(inside, tl.sqrt(v), 0.0)
        top = top_of_groups(x, ROWS, COLS)
        y = x * spread(255.0 * tl.div_rn(1.0, tl.where(top == 0.0, 1.0, top)), ROWS, COLS)
        code = tl.where(x > 0, tl.maximum(nearest_integer(y) & 0xFFFF, V_FLOOR), 0)
        tl.store(f.v + at, code.to(tl.uint8), mask=inside)
        tl.store(f.v_scale + scale_at, tl.div_rn(top, 255.0), mask=scaled)
    else:
        tl.store(f.v + at, v, mask=inside)


@triton.jit
def update_tile(g, f, scalars, key, row, col, row_stop, ROWS: tl.constexpr, COLS: tl.constexpr):
    """torch_step of the tile (ROWS, COLS) at (row, col) of a weight with Fields f; g is its gradient, fp32, 0 from
    row_stop and from column f.K on, where the tile ends (of a weight without m: its update). In fused_multiply_add
    a b + c is rounded once."""
    where = spot(f, row, col, row_stop, ROWS, COLS)
    at, inside = where[0], where[1]
    if f.master is not None:
        p = tl.load(f.master + at, mask=inside, other=0.0)
    else:
        p = tl.load(f.W + at, mask=inside, other=0.0).to(tl.float32)

    if f.m is None:
        p = fused_multiply_add(g, scalars[RATE], p * scalars[KEEP])  # Muon.update
    else:
        EXACT: tl.constexpr = f.m_scale is None  # rounding to codes hides the rest
        g *= scalars[SCALE]
        m = load_moment(f.m, f.m_scale, where, True, ROWS, COLS)
        if f.v is None and f.row_v is None:  # SGD.update
            m = m * scalars[B1] + fused_multiply_add(p, scalars[COUPLED], g)
            p = fused_multiply_add(m, scalars[RATE], p)
        else:  # AdamW.update, AdamMini.update
            m = fused_multiply_add(g - m, scalars[FRESH_M], m)
            if f.row_v is not None:
                rows = row + tl.arange(0, ROWS)
                v = tl.load(f.row_v + rows, mask=rows < row_stop, other=1.0)[:, None]
            else:
                v = load_moment(f.v, f.v_scale, where, False, ROWS, COLS)
                v = fused_multiply_add(g * g, scalars[FRESH_V], v * scalars[B2])
            root = tl.sqrt_rn(v) if EXACT else tl.sqrt(v)  # of Adam-mini (ROWS, 1)
            denominator = tl.broadcast_to(root * scalars[UNBIAS] + scalars[EPS], m.shape)
            p = fused_multiply_add(quotient(m, denominator, EXACT), scalars[RATE], p * scalars[KEEP])  # AdamW.moved

    if f.master is not None:
        tl.store(f.master + at, p, mask=inside)
        # The noise that rounds to nearest, ties to even. (A cast truncates in the interpreter.)
        tl.store(f.W + at, to_bf16(p, 0x7FFF + ((p.to(tl.int32, bitcast=True) >> 16) & 1)), mask=inside)
    elif f.W.dtype.element_ty == tl.bfloat16:
        tl.store(f.W + at, to_bf16(p, tile_bits(key, row, col, ROWS, COLS)), mask=inside)
    else:
        tl.store(f.W + at, p, mask=inside)
    if f.m is not None:  # with the codes before the new W, int8 took up to 3 % longer
        store_m(f, m, where, ROWS, COLS)
    if f.v is not None:
        store_v(f, v, where, ROWS, COLS)


@triton.jit
def squares_of(g):
    return tl.sum(tl.sum(g * g, 1), 0)


@triton.jit
def record(f, squares):
    """A program's part of the sum of g^2. (relaxed: the default order makes every program wait for its stores, which
    doubled the time of narrow layouts. Once a program, not a tile: that took up to 8 % of a step by lists.)"""
    tl.atomic_add(f.squares + tl.program_id(0) % SLOTS, squares.to(tl.float64), sem="relaxed")


@triton.jit
def step_kernel(G, f, row, row_stop, stride, norms, U, matrix, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The step of the rows from `row` up to row_stop, whose gradient is G (R, K), in one pass; or, given norms, Muon's
    first half. matrix: rows of one."""
    across = tl.cdiv(f.K, BLOCK_K)
    down, col = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    raw = load_tile(G, rows, cols, row_stop - row, f.K, stride).to(tl.float32)  # (BLOCK_M, BLOCK_K)
    scalars, key = constants(f)
    if norms is None:
        update_tile(raw, f, scalars, key, row + down, col, row_stop, BLOCK_M, BLOCK_K)
    else:
        norm = tl.load(norms + rows // matrix, mask=rows < row_stop - row, other=1.0)
        g = tl.div_rn(raw, tl.broadcast_to(tl.where(norm == 0.0, 1.0, norm)[:, None], raw.shape))
        where = spot(f, row + down, col, row_stop, BLOCK_M, BLOCK_K)
        m = load_moment(f.m, f.m_scale, where, True, BLOCK_M, BLOCK_K)
        m = fused_multiply_add(g - m, scalars[FRESH_M], m)
        store_m(f, m, where, BLOCK_M, BLOCK_K)
        ahead = fused_multiply_add(m - g, scalars[B1], g).to(U.dtype.element_ty)
        tl.store(U + rows.to(tl.int64)[:, None] * f.K + cols[None, :], ahead, mask=where[1])
    if f.m is not None:  # or else they are no gradient's
        record(f, squares_of(raw))


# ==== 6. v3, FORGE: the tile of dW stays in registers =================================================================
#
#                  X (N, K)           a program owns a tile (i, j) of dW, W and the state
#                 +--+--+--+              acc = 0
#                 |  |j |  | N            for all tokens, BLOCK_N at a time:  acc += dY[:, i]^T X[:, j]
#     dY^T (M, N) +--+--+--+              update_tile(acc)      acc never leaves the registers
#       +------+  +--+--+--+
#     i |======|  |  |##|  | W (M, K)
#       +------+  +--+--+--+
#
# A program sums over ALL tokens: the update is not linear in dW, so that tokens cannot be split among programs and
# added up later, as libraries do when a matrix is small. And it keeps its sums until the end: a tile of 64 x 128 in
# fp32 is 64 registers of each of 128 threads, of the 255 that a thread may have. p, m and v of the tile at once would
# be 192 more, so that the step goes over it in four parts.


@triton.jit
def update_parts(g, f, scalars, key, row, col, row_stop, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):
    """update_tile in PARTS pieces, one after another: with all of a large tile's state at once, registers run out."""
    if PARTS == 1:
        update_tile(g, f, scalars, key, row, col, row_stop, ROWS, COLS)
    else:
        HALF: tl.constexpr = ROWS // 2
        upper, lower = tl.split(tl.permute(tl.reshape(g, (2, HALF, COLS)), (1, 2, 0)))
        update_parts(upper, f, scalars, key, row, col, row_stop, HALF, COLS, PARTS // 2)
        update_parts(lower, f, scalars, key, row + HALF, col, row_stop, HALF, COLS, PARTS // 2)


@triton.jit
def forge_kernel(
    dY, X, f, N, stride_dy, stride_x, row, row_stop, FETCHED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):
    """dW = dY^T X for the rows from `row` up to row_stop, and their step. FETCHED: dY and X are descriptors, by which
    Hopper's copy engine brings their tiles (2 to 8 % faster)."""
    down, col = tile_at(tl.program_id(0), tl.cdiv(row_stop - row, BLOCK_M), tl.cdiv(f.K, BLOCK_K))
    down, col = down * BLOCK_M, col * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        if FETCHED:
            dy, x = dY.load([start, down]), X.load([start, col])  # (BLOCK_N, BLOCK_M), (BLOCK_N, BLOCK_K)
        else:
            dy = load_tile(dY, tokens, rows, N, row_stop - row, stride_dy)
            x = load_tile(X, tokens, cols, N, f.K, stride_x)
        acc = dot(tl.trans(dy), x, acc)
    scalars, key = constants(f)
    update_parts(acc, f, scalars, key, row + down, col, row_stop, BLOCK_M, BLOCK_K, PARTS)
    record(f, squares_of(acc))


# The same for rows that come as lists, 03's ListedRows: a sparse gradient of a classifier, the tokens of an embedding.
# Rows that nobody lists have a gradient of 0: they decay, and go on with their momentum.


@triton.jit
def listed_kernel(c, f, M, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr, SPAN: tl.constexpr):
    """The step of SPAN tiles of W (M, K) from ListedRows c, each row's entries summed in registers."""
    row, first, stop = listed_span(f.K, ROWS, COLS, SPAN)
    lists = lists_of_rows(c, row + tl.arange(0, ROWS), M)
    scalars, key = constants(f)
    squares = 0.0
    for col in range(first, stop, COLS):
        g = listed_tile(c, lists, col, f.K, ROWS, COLS, ENTRIES)
        update_tile(g, f, scalars, key, row, col, M, ROWS, COLS)
        squares += squares_of(g)
    record(f, squares)


# ==== 7. Factors: a gradient that is not made until it is used ========================================================
#
# A step needs ALL of the gradient: of the micro-batches that are summed, of the two uses of a tied weight; and clipping
# needs the norm of everything before the first step. Fused schedules are said to lose all that. They need not: what has
# to wait is not dW but what it is a product of, X and dY, of which X is there anyway. Later, the same fused step runs
# over the factors of all micro-batches: "stash factors, not gradients".
#
# The norm of the sum does not need dW either. With x_n, y_n the rows of X and dY,
#
#     |dW|^2 = sum_ij (sum_n y_ni x_nj)^2 = sum_nl (y_n . y_l) (x_n . x_l)
#
# is made of inner products of tokens, N^2 (M + K) multiply-adds (a "ghost norm"); or of the product itself, slab by
# slab and not kept, N M K. The first wins up to N = M K / (M + K), 2,048 tokens of 4096 x 4096. What such a layer keeps
# of micro-batches of 512 tokens: at the ninth, factors would be more than dW, and keep() makes that, and adds to it.
#
#     after backward number       1      2      3     ...     8      9     10
#     factors in bf16, MiB        8     16     24            64      -      -
#     dW in fp32, MiB             -      -      -             -     64     64
#
# Of a classifier the factors are E and what makes G again, of an embedding the tokens and dX. All have
# write(state, out, top, add): out (R, K) = or += the gradient's rows from `top` on.


@cce.without_autocast
def weight_gradient(dY, X, out, add=False):
    """out (R, C) = or += dY^T X, from dY (N, R), X (N, C) in fp32 or bf16; the sums are in fp32, rounded as out is."""
    wide = dict(out_dtype=torch.float32) if X.is_cuda and out.dtype == torch.float32 != X.dtype else {}
    if X.dtype != out.dtype and not wide:
        product = dY.float().T @ X.float()
        out.copy_(out + product if add else product)
    elif add:
        torch.addmm(out, dY.T, X, **wide, out=out)
    else:
        torch.mm(dY.T, X, **wide, out=out)


class Product(NamedTuple):
    """Of a linear layer: dW = dY^T X, dY (N, M), X (N, K)."""

    dY: torch.Tensor
    X: torch.Tensor

    def write(self, state, out, top, add):
        weight_gradient(self.dY[:, top : top + len(out)], self.X, out, add)


class Listed(NamedTuple):
    """Of an embedding, or a classifier's sparse gradient: 03's ListedRows."""

    lists: filtering.ListedRows

    def write(self, state, out, top, add):
        filtering.write_rows(out, self.lists, top, add=add, backend=state.handle.backend)


# A classifier's factors cost as much work again as the loss, once for the norm and once for the step. They are kept
# only if they are this many times smaller than dC.
CLASSIFIER_PRICE = 4


class Classes(NamedTuple):
    """Of a classifier, exactly: dC = G^T E, and G (N, V) is made again, from E (N, D), targets, lse, g_softmax,
    g_target (N,) and the classifier itself, `block` columns at a time: the weight has to be as it was."""

    E: torch.Tensor
    targets: torch.Tensor
    lse: torch.Tensor
    g_softmax: torch.Tensor
    g_target: torch.Tensor
    softcap: float | None
    backend: str
    block: int

    def write(self, state, out, top, add):
        for start, stop in cce.pieces(len(out), self.block):
            C = state.weight.detach()[top + start : top + stop].to(self.E.dtype)  # (W, D)
            G = cce.gradient_slice(self.E, C, self.targets - (top + start), self.lse, self.g_softmax, self.g_target,
                                   self.softcap, self.backend)  # (N, W)
            weight_gradient(G, self.E.to(G.dtype), out[start:stop], add)


class Dense(NamedTuple):
    """A gradient (M, K) after all: the smaller one, beyond so many tokens; or one that autograd made."""

    gradient: torch.Tensor

    def write(self, state, out, top, add):
        rows = self.gradient[top : top + len(out)]
        out.add_(rows) if add else out.copy_(rows)


def merged(factors):
    """The products of several backward passes as one, over their concatenated tokens; the others as they are."""
    products = [f for f in factors if isinstance(f, Product)]
    if len(products) < 2:
        return factors
    joined = Product(*(torch.cat(parts) for parts in zip(*products, strict=True)))
    return [joined, *(f for f in factors if not isinstance(f, Product))]


def tensors_of(factor):
    return [t for t in (factor.lists if isinstance(factor, Listed) else factor) if isinstance(t, torch.Tensor)]


def factor_bytes(factors):
    """Bytes that these keep alive; storage that several share (the input of q, k, v) once."""
    storages = [t.untyped_storage() for factor in factors for t in tensors_of(factor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def stash_bytes(shapes, tokens, itemsize=2, inputs=None):
    """Predicted bytes of the factors of weights (M, K). inputs: widths of the distinct X, if some share theirs."""
    outputs, widths = zip(*shapes, strict=True)
    return itemsize * tokens * (sum(outputs) + sum(inputs or widths))


def crossover(shapes, itemsize=2, gradient=4, inputs=None):
    """Tokens up to which factors of weights (M, K) take less than gradients of `gradient` bytes an element."""
    return gradient * sum(M * K for M, K in shapes) / stash_bytes(shapes, 1, itemsize, inputs)


def ghost_square(dY, X):
    """||dY^T X||^2, fp64, from the tokens' inner products."""
    total = torch.zeros((), dtype=torch.float64, device=X.device)
    for start, stop in cce.pieces(len(X), 1024):
        gram = [torch.empty(stop - start, len(X), device=X.device) for _ in range(2)]  # (R, N)
        for out, factor in zip(gram, (dY, X), strict=True):
            weight_gradient(factor[start:stop].T, factor.T, out)
        total += (gram[0] * gram[1]).sum(dtype=torch.float64)
    return total.clamp(min=0)


# ==== 8. A weight with its state: the three rungs =====================================================================
#
# What backward makes of a gradient depends on the handle's phase (section 9), and a step on the plan:
#
#     a factor --+-- idle:      dW, for autograd
#                |                                      +-- a Dense: its rows are the slab, all at once             v1
#                +-- armed:     consume([factor]) ------+-- slab: for some rows: factor.write(slab), step(slab)     v2
#                |                                      +-- fused: forge_kernel on dY and X                         v3
#                '-- stashing:  keep(factor);           '-- matrix: slabs of whole matrices; norms, momentum,
#                    release(): consume(all factors)                orthogonal(), and then the update's step
#
# W changes behind autograd's back: a kernel gets a pointer. Whoever saved W for a backward pass must hear of it, or it
# would be read as if nothing had happened: each step raises the tensor's version, which autograd compares.


class Ranks(NamedTuple):
    """Of a matrix that is cut over ranks, of which each takes part in the step of a rule that needs more than elements:
    columns of the whole matrix; functions that sum a tensor over the ranks, join their parts to the whole matrix, and
    take this rank's part of that (05's ranks_of)."""

    columns: int
    total: Callable
    join: Callable
    own_part: Callable


def row_norms(gradient):
    """(R, K) -> (R,) fp32."""
    return torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float32)


def step_in_hook(state):
    """v1, LOMO's idea: as soon as autograd has a weight's whole gradient, take the step and drop it. Whatever made that
    gradient; after v2 or v3 there is none, unless the weight has a use outside its layer."""
    alive = weakref.ref(state)  # the weight holds the hook, and must not hold the state that holds the weight

    def hook(weight):
        state = alive()
        if state is None or weight.grad is None or state.handle.phase == "idle":  # None: torch calls after v2, v3, too
            return
        gradient, weight.grad = weight.grad, None
        if state.handle.phase == "stashing":
            return state.keep(Dense(gradient.float()))
        state.check_second()
        state.consume([Dense(gradient)])

    state.weight.register_post_accumulate_grad_hook(hook)


class State:
    """The optimizer's state of one weight (M, K), and its steps. Made by Forge; `weight` is changed in place. The
    methods that step raise ValueError when the handle is not armed, or rows do not lie in W or are less than the rule
    needs.

    tensors: what a checkpoint has to hold beside the weight itself: "master" (M, K) fp32, "m", "v" (M, K) in the
    layout's dtypes, "m_scale", "v_scale" (M, groups) fp32, "row_v" (M,) fp32, as far as rule and layout have them."""

    # Since arm(): forwarded, a use was counted; stepped, its step was taken. For the next refusal: version, that of W
    # when its master copy was last known to agree; seen, those of the tensors that factors refer to.

    def __init__(self, handle, names, weight, rule, scalars, squares, table, origin, matrices, ranks):
        self.handle, self.names, self.name, self.weight, self.rule = handle, names, names[0], weight, rule
        self.table = table  # an embedding or a classifier, whose gradient comes by rows
        self.experts = matrices is not None  # whose module takes their step itself, on every rung
        self.origin, self.ranks = origin, ranks
        self.number = zlib.crc32(names[0].encode()) >> 1  # other weights have other noise, whatever else there is
        (M, K), device, form = weight.shape, weight.device, LAYOUTS[handle.layout]
        by_rows = dict(memory_format=torch.contiguous_format)  # whatever the weight's strides are
        self.tensors = {"master": weight.detach().float().clone(**by_rows)} if form.master else {}
        self.dtype = weight.dtype  # of what an embedding returns
        weight.data = weight.data.to(form.weight).contiguous()
        for moment, dtype in zip(rule.moments, form.moments, strict=False):
            self.tensors[moment] = torch.zeros(M, K, dtype=dtype, device=device)
            if handle.layout == "int8":
                self.tensors[f"{moment}_scale"] = torch.zeros(M, math.ceil(K / GROUP), device=device)
        if rule.needs == "row":
            self.tensors["row_v"] = torch.zeros(M, device=device)
        self.fields = Fields(
            weight.detach(), *map(self.tensors.get, ("master", "m", "v", "row_v", "m_scale", "v_scale")), scalars,
            handle.key, torch.tensor([self.number, *origin], device=device), squares, K, math.ceil(K / GROUP))
        self.matrix_rows = M // (matrices or 1)
        self.version, self.forwarded, self.stepped, self.factors, self.seen = weight._version, False, False, [], []
        step_in_hook(self)

    @torch.no_grad()
    def step(self, gradient, row=0):
        """The step of the rows of W from `row` on whose gradient (R, K), any float dtype, this is: once a row and
        arm()."""
        self.check_block(row, gradient.shape)
        if self.rule.needs == "row":
            self.move_rows(row_norms(gradient), row)
        if self.rule.needs != "matrix":
            self.step_rows(self.fields, gradient, row)
        elif gradient.data_ptr() == self.handle.slab.data_ptr():  # always the same place: a graph will do
            self.handle.replayed((self.name, row, len(gradient)), lambda: self.step_matrices(gradient, row))
        else:
            self.step_matrices(gradient, row)
        self.written()

    def step_rows(self, fields, gradient, row, norms=None, U=None):
        if self.handle.backend == "torch":
            return torch_step(self, fields, gradient, row, norms, U)
        gradient, tiles = cce.rows_contiguous(gradient), TILES["step"]
        grid = (triton.cdiv(len(gradient), tiles["BLOCK_M"]) * triton.cdiv(fields.K, tiles["BLOCK_K"]),)
        step_kernel[grid](gradient, fields, row, row + len(gradient), gradient.stride(0), norms, U, self.matrix_rows,
                          **NO_FUSION, **tiles)

    def move_rows(self, norms, row):
        """Adam-mini's v moves in the rows from `row` on, whose gradient has these norms (R,). Where columns are cut
        over ranks, a row's mean is that of all its parts."""
        s = Scalars(*self.fields.scalars.unbind())
        squares, columns, ranks = (norms * s.scale).square_(), self.fields.K, self.ranks
        if ranks and ranks.columns != columns:
            squares, columns = ranks.total(squares), ranks.columns
        b2 = self.rule.betas[1]
        self.fields.row_v[row : row + len(norms)].mul_(b2).add_(squares, alpha=(1 - b2) / columns)

    def step_matrices(self, gradient, row):
        """Muon's step of the whole matrices whose rows begin at `row`, gradient (R, K). Of a matrix that is cut over
        ranks each moves its part of the momentum, and all of them make the whole update."""
        (R, K), ranks, gradient = gradient.shape, self.ranks, gradient.float().contiguous()
        norms = torch.linalg.vector_norm(gradient.view(-1, self.matrix_rows, K), dim=(1, 2))  # (E,)
        norms = ranks.total(norms**2).sqrt() if ranks else norms
        U = torch.empty(R, K, dtype=self.handle.narrow, device=gradient.device)
        self.step_rows(self.fields, gradient, row, norms, U)
        if ranks:
            update = ranks.own_part(orthogonal(ranks.join(U)))
        else:  # experts each by itself
            update = orthogonal(U if R == self.matrix_rows else U.view(-1, self.matrix_rows, K)).view(R, K)
        self.step_rows(self.fields._replace(m=None, m_scale=None), update, row)

    def slabs(self, factors, rows, row=0, M=None):
        """v2. Yield (slab, row): a gradient of M rows (by default all), a sum over factors, block by block. One buffer
        takes the slabs in turn; each is made after the step of those before it."""
        M, K = M or len(self.weight), self.weight.shape[1]
        buffer = self.handle.buffer(min(rows, M) * K)
        for top, bottom in cce.pieces(M, rows):
            slab = buffer[: (bottom - top) * K].view(bottom - top, K)
            for i, factor in enumerate(factors):
                factor.write(self, slab, top, add=i > 0)
            yield slab, row + top

    def step_in_slabs(self, factors, rows, row=0, M=None):
        """v2: the step of M rows of W from `row` on, so many at a time."""
        for slab, top in self.slabs(factors, rows, row, M):
            self.step(slab, top)

    def step_product(self, product, plan, row=0):
        """The step of the rows from `row` on that a product is the gradient of, by v2 or v3."""
        if plan.rung == "fused":
            self.step_fused(*product, row)
        else:
            self.step_in_slabs([product], plan.rows, row, product.dY.shape[1])

    def step_fused(self, dY, X, row=0):
        """v3. dY (N, R), X (N, K), fp32 or bf16: the step of R rows of W from `row` on, without their gradient. Needs
        Triton's kernels."""
        N, R = dY.shape
        self.check_block(row, (R, X.shape[1]), fused=True)
        dY, X = cce.rows_contiguous(dY), cce.rows_contiguous(X)
        tiles = TILES["16-bit" if X.element_size() == 2 else "32-bit"]
        grid = (triton.cdiv(R, tiles["BLOCK_M"]) * triton.cdiv(X.shape[1], tiles["BLOCK_K"]),)
        strides, fetched = (dY.stride(0), X.stride(0)), cce.takes_descriptors(dY, X)
        if fetched:
            dY = filtering.descriptor(dY, tiles["BLOCK_N"], tiles["BLOCK_M"])
            X = filtering.descriptor(X, tiles["BLOCK_N"], tiles["BLOCK_K"])
        forge_kernel[grid](dY, X, self.fields, N, *strides, row, row + R, FETCHED=fetched, **NO_FUSION, **tiles)
        self.written()

    def step_listed(self, lists):
        """The step of all of W by 03's ListedRows: each row's gradient is summed, and used, in registers."""
        self.check_block(0, self.weight.shape, fused=True)
        programs, options = filtering.listed_options(lists, *self.weight.shape)
        listed_kernel[(programs,)](lists, self.fields, len(self.weight), **NO_FUSION, **options)
        self.written()

    def check_block(self, row, shape, fused=False):
        """ValueError unless the handle is armed and rows of this shape can be stepped at `row`. fused: from tiles that
        see no more than themselves."""
        M, K = self.weight.shape
        if self.handle.phase != "armed":
            raise base.BadInput(f"step of {self.name}: not armed: call arm(lr, step) first")
        if len(shape) != 2 or row < 0 or row + shape[0] > M or shape[1] != K:
            raise base.BadInput(f"rows of {tuple(shape)} at {row}: they are not rows of {self.name}, {M} x {K}")
        needs = self.rule.needs
        rows = self.matrix_rows if needs == "matrix" else 1
        if needs != "element" and (fused or row % rows or shape[0] % rows):
            raise base.BadInput(f"rows of {tuple(shape)} at {row} of {self.name}: {type(self.rule).__name__} takes each"
                                f" {needs} as a whole, of {rows} x {K}: step() those, or give the weight "
                                "another rule")

    def written(self):
        """Autograd cannot see a kernel write: whoever saved W for a backward pass must hear of it."""
        increment_version(self.weight)
        self.version = self.weight._version

    def consume(self, factors):
        """The whole step of this weight, whose gradient is the sum of these factors: of one product by v2 or v3, of
        lists in registers, of a gradient as it is, of others in slabs of their sum."""
        factors, self.stepped = merged(factors), True
        only, element = factors[0] if len(factors) == 1 else None, self.rule.needs == "element"
        plan = self.handle.plan(self, len(only.X) if isinstance(only, Product) else 0)
        if isinstance(only, Product):
            self.step_product(only, plan)
        elif isinstance(only, Listed) and element and self.handle.backend == "triton":
            self.step_listed(only.lists)
        elif isinstance(only, Dense):
            M = len(self.weight)
            for start, stop in cce.pieces(M, plan.rows if plan.rung == "matrix" else M):
                self.step(only.gradient[start:stop], start)
        else:
            self.step_in_slabs(factors, plan.rows)

    def keep(self, factor, price=1):
        """A factor for later; or, once dW itself is smaller than `price` times the factors, a part of that."""
        if dense := self.dense_for(factor, price):
            return factor.write(self, dense.gradient, 0, add=True)
        self.factors.append(factor)
        if not isinstance(factor, Dense):  # later factors are added to that in place
            read = [*tensors_of(factor), *([self.weight] if isinstance(factor, Classes) else [])]
            self.seen += [(tensor, tensor._version) for tensor in read]

    def dense_for(self, factor, price=1):
        """None as long as factors pay, with this one: `price` times their bytes are at most those of dW in fp32. Else
        dW so far, to which this factor is still to be added."""
        dense = next((f for f in self.factors if isinstance(f, Dense)), None)
        if dense is None and price * factor_bytes([*self.factors, factor]) > 4 * self.weight.numel():
            self.check_tensors()
            dense = Dense(torch.zeros(self.weight.shape, device=self.weight.device))
            for earlier in self.factors:
                earlier.write(self, dense.gradient, 0, add=True)
            self.factors, self.seen = [dense], []
        return dense

    def square(self):
        """The squared norm of the gradient that the factors stand for, fp64; frees what it makes."""
        factors, (M, K) = merged(self.factors), self.weight.shape
        only = factors[0] if len(factors) == 1 else None
        if isinstance(only, Product) and len(only.X) * (M + K) < M * K:
            return ghost_square(*only)
        if isinstance(only, Dense):
            wide = None if only.gradient.is_cuda else torch.float64  # for which torch would copy it there
            return torch.linalg.vector_norm(only.gradient, dtype=wide).double() ** 2
        slabs = self.slabs(factors, self.handle.plan(self, 0).rows)
        return sum(torch.linalg.vector_norm(slab, dtype=torch.float64) ** 2 for slab, _ in slabs)

    @property
    def hooked(self):
        """Whether autograd makes its gradient, and sums over uses, before v1's hook takes the step: of layers."""
        return self.handle.rung == "hook" and self.rule.needs != "matrix" and not (self.table or self.experts)

    # What could go wrong, each with a line that says what to do. Whoever can notice it first does:
    #
    #     a .grad, or a hook that waits for one                    check(), as arm() and stash() begin
    #     W moved, cast, or loaded without its master copy         check_tensors(), as they do, and before steps
    #     another Parameter in its place; a second use             on_forward()
    #     W changed between forward and backward                   on_backward(), by its version
    #     inputs, targets or W changed before release()            check_tensors(), by theirs
    #     a second use in a graph from before arm()                on_backward(), after the first one's step
    #     a use outside the layer: a penalty on W                  step_in_hook(), after the layer's step

    def check(self, stashing):
        """ValueError if the next backward pass would go wrong."""
        weight = self.weight
        base.refuse(
            (weight.grad is not None, f"{self.name} has a gradient already, which no step would use: call arm() or "
             "stash() before backward()"),
            (not stashing and len(self.names) > 1 and not self.hooked, reused(self.name)),
            (weight._backward_hooks and (stashing or not self.hooked), f"{self.name} has a gradient hook, but no whole "
             "gradient: remove it (it would see one only with rung='hook', armed)"))
        self.check_tensors()

    def check_tensors(self):
        """ValueError if the parameter is no longer the tensor that is stepped, or was written to without its master
        copy, or what factors refer to is not what it was in backward. (What is written through .data is not seen.)"""
        weight, W, master = self.weight, self.fields.W, self.fields.master
        base.refuse((weight.data_ptr() != W.data_ptr() or weight.dtype != W.dtype,
                     f"{self.name} was moved or cast after forge(): do .to(...) before it"))
        if master is not None and weight._version != self.version:  # somebody else wrote: a look is worth its wait
            base.refuse((not torch.equal(W, master.to(W.dtype)), f"{self.name} was changed since its last step, but "
                         "not its master copy: load weights before forge(), or the handle's state with them"))
            self.version = weight._version
        base.refuse((any(tensor._version != version for tensor, version in self.seen),
                     f"{self.name}: a layer's input, the targets or the weight were changed in place between backward "
                     "and release(), which reads them: copy them before, or disarm()"))

    def check_second(self):
        """ValueError if this weight had its step."""
        if self.handle.phase == "armed" and self.stepped:
            raise base.BadInput(f"{self.name} already had its step: one backward pass an arm(lr, step), and no use "
                                "of the weight outside its layer (a penalty, say): skip it, or disarm()")

    def on_forward(self, weight):
        """A use of `weight` in a forward pass. ValueError if it is the second one since arm()."""
        waits = torch.is_grad_enabled() and weight.requires_grad and not inside_backward()
        counts = waits and self.handle.phase == "armed" and not self.hooked
        base.refuse((weight is not self.weight,
                     f"{self.name} was replaced after forge() (FSDP?): shard the model first, then forge it"),
                    (counts and self.forwarded, reused(self.name)))
        self.forwarded |= counts

    def on_backward(self, version):
        """Its backward pass. ValueError if the weight is not what it was in forward, where it had this version."""
        if self.weight._version != version:
            self.check_second()
            raise base.BadInput(f"{self.name} was changed between forward and backward: its dX would be wrong")

    # A copy of a forged model (for an average of weights, say), or one from a file, is an ordinary model: None.

    def __reduce__(self):
        return type(None), ()


def inside_backward():
    """Whether this is a forward pass that recomputation makes within backward; torch's checkpointing asks so, too."""
    return torch._C._current_graph_task_id() >= 0


def reused(name):
    return (f"{name} is used twice in a step (tied, recurrent, or two forward passes after one arm()): it would be "
            "updated under its second use: stash() and release() instead of arm(), or skip it")


# ==== 9. The handle: a model whose backward is its optimizer ==========================================================
#
# A handle is always in one of three phases. In each, backward does something else with a weight's gradient; a call that
# a phase does not have raises, and changes nothing.
#
#               arm                    stash
#     idle  ----------->  armed  ------------->  stashing
#       ^                   |                      ^  |
#       |------ disarm -----'                      |  |
#       |--------------------- stash --------------'  |
#       '---------------- release, disarm ------------'
#
#     phase     backward leaves          calls -> the phase after them; any other raises
#     idle      .grad                    arm -> armed       stash -> stashing   step_gradients, load_state_dict,
#                                                                               disarm -> idle
#     armed     nothing: it steps, once  arm -> armed       stash -> stashing   disarm -> idle
#     stashing  factors, many times      norm -> stashing   release, disarm -> idle
#     (state_dict and gradient_norms: always.)
#
# Clipping, and steps that may have to be left out, are lines of the caller's, who may want to sum norms over ranks, or
# not to wait for the device. `rest` are the parameters of an ordinary optimizer:
#
#     norm = handle.norm(rest)                        fp64, on the device
#     scale = clip_scale(norm, 1.0)                   a tensor, too
#     if norm.isfinite():                             (this waits for the device)
#         handle.release(lr, step, scale)
#         for p in rest:
#             p.grad.mul_(scale)
#         optimizer_of_the_rest.step()
#     else:
#         handle.disarm()


def clip_scale(norm, clip):
    """What a gradient of this norm (a tensor of one) is multiplied by, so that it is at most `clip`, above 0: as
    torch.nn.utils.clip_grad_norm_ does it."""
    base.refuse((not clip > 0, f"clip is {clip}: use a number above 0, or no clipping"))
    return (clip / (norm + 1e-6)).clamp(max=1.0)


class Forge:
    """The handle: weights with their states and rules, one layout, and the phase that they are in.

    weights: {name: Parameter (M, K)}, fp32 or bf16; they take the layout's dtype. rules: {name: its rule}, of those
    that have another than `rule`. matrices: {name: how many matrices lie in it, one below the other}, of experts.
    ranks: {name: Ranks} of what has Muon or Adam-mini and is cut over ranks. origins: {name: (row, column)} of a
    shard's first element in the whole weight, whose name it then carries: shards make the codes and the noise of the
    whole. data_parallel: number of processes whose gradients would have to be summed (default: all of
    torch.distributed); more than one is refused, as backward has no gradient to reduce. rung: "auto", or one of
    "hook", "slab", "fused". slab: bytes of v2's buffer. backend: "auto", "triton" or "torch". tables: names
    of embeddings and classifiers. aliases: {name: further names of the weight}, if it is tied. ValueError on arguments
    that do not fit."""

    def __init__(
        self, weights, rule, layout="fp32", *, seed=0, rung="auto", slab=SLAB, backend="auto", data_parallel=None,
        origins=None, tables=(), aliases=None, rules=None, matrices=None, ranks=None,
    ):
        weights, origins, matrices, ranks = dict(weights), dict(origins or {}), dict(matrices or {}), ranks or {}
        rules = dict.fromkeys(weights, rule) | dict(rules or {})
        check_forge(weights, rules, layout, rung, seed, origins, tables, matrices, ranks)
        device = next(iter(weights.values())).device
        self.layout, self.seed, self.slab_bytes = layout, seed, slab
        self.backend = cce.choose_backend(backend, *[next(iter(weights.values()))] * 2)
        base.refuse((rung == "fused" and self.backend == "torch",
                     "rung is 'fused', which needs Triton's kernels: use 'auto' or 'slab'"))
        self.rung = "hook" if rung == "auto" and self.backend == "torch" else rung
        self.data_parallel = data_parallel
        self.check_group()
        # Nothing was changed so far, and nothing below can be refused.
        self.phase, self.at_step, self.graphs = "idle", 0, {}
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.narrow = torch.bfloat16 if bf16 else torch.float32  # of Muon's products
        graphs = self.backend == "triton" and device.type == "cuda" and not ranks
        self.side, self.pool = (torch.cuda.Stream(device), torch.cuda.graph_pool_handle()) if graphs else (None, None)
        self.rules = list(dict.fromkeys(rules.values()))
        self.scalars = torch.zeros(len(self.rules), len(Scalars._fields), device=device)
        self.key = torch.tensor([seed, 0], device=device)
        self.squares = torch.zeros(len(weights), int(SLOTS), dtype=torch.float64, device=device)
        self.states = {
            name: State(self, [name, *(aliases or {}).get(name, [])], weight, rules[name],
                        self.scalars[self.rules.index(rules[name])], squares, name in tables,
                        origins.get(name, (0, 0)), matrices.get(name), ranks.get(name))
            for (name, weight), squares in zip(weights.items(), self.squares, strict=True)
        }
        wanted = [state for state in self.states.values()
                  if self.rung in ("auto", "slab") or state.table or state.rule.needs == "matrix"]
        elements = [self.plan(state, 0).rows * state.weight.shape[1] for state in wanted]
        self.slab = torch.empty(max(elements, default=0), device=device)

    def __getitem__(self, name):
        """The State of a weight, by any of its names."""
        return {alias: state for state in self.states.values() for alias in state.names}[name]

    def check_group(self):
        """Refuse more than one data-parallel process."""
        joined = dist.is_available() and dist.is_initialized()
        size = self.data_parallel or (dist.get_world_size() if joined else 1)
        base.refuse((size > 1, f"{size} data-parallel processes: the step happens before gradients could be summed "
                     "over them: use an ordinary optimizer; or pass data_parallel=1 if they never are (DiLoCo, tensor "
                     "parallel)"))

    def expect(self, call, *phases, do):
        if self.phase not in phases:
            raise base.BadInput(f"{call}: the handle is {self.phase}: {do}")

    def plan(self, state, N):
        """The Plan for a weight's gradient, of a linear layer's backward pass over N tokens, or (0) any other."""
        M, K = state.weight.shape
        rung = self.rung if N and self.rung != "hook" else "slab"
        return plan_step(state.rule, M, K, N, self.layout, rung, self.slab_bytes, M // state.matrix_rows)

    def buffer(self, elements):
        """Room for a slab: the one that is kept from step to step, where that will do."""
        return self.slab if elements <= len(self.slab) else torch.empty(elements, device=self.slab.device)

    def replayed(self, key, work):
        """work(), whose tensors have the same addresses each time. On a GPU it is a CUDA graph from the second time on:
        Muon's 22 launches a matrix take the host 0.5 ms and the GPU 0.17, so that the GPU would wait."""
        if self.side is None or torch.cuda.is_current_stream_capturing():
            return work()
        if key not in self.graphs:  # the first time compiles what cannot be compiled while it is captured
            self.graphs[key] = None
            return work()
        if self.graphs[key] is None:
            graph = self.graphs[key] = torch.cuda.CUDAGraph()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(self.side)
        self.graphs[key].replay()

    def arm(self, lr, step):
        """The next backward pass is step `step` (1, 2, ...; their order is the caller's affair) at rate lr, a number,
        or {rule: number} where rules have rates of their own. Replaying a CUDA graph of Triton's kernels takes the same
        call before each replay. One forward pass with gradients may follow (any number with v1, for nn.Linear: it
        sums). Does not wait for the device, but to compare master copies after somebody else wrote to a weight.
        ValueError, and nothing changed, when something is about to go wrong."""
        self.expect(f"arm(step={step})", "idle", "armed", do="release() or disarm() first")
        self.check_group()
        for state in self.states.values():
            state.check(stashing=False)
        self.prepare(lr, step)

    def prepare(self, lr, step, scale=1.0):
        """Arm, without looking at the weights; gradients are multiplied by scale, a number or a tensor of one."""
        rates = lr if isinstance(lr, dict) else dict.fromkeys(self.rules, lr)
        good = all(isinstance(rates.get(rule), numbers.Real) and 0 <= rates[rule] < math.inf for rule in self.rules)
        if not (isinstance(step, numbers.Integral) and step >= 1 and good):
            raise base.BadInput(f"lr={lr}, step={step}: pass a number of at least 0, or one for each of {self.rules}, "
                                "and steps that count from 1")
        table = torch.tensor([rule.scalars(rates[rule], int(step)) for rule in self.rules], dtype=torch.float64)
        self.scalars.copy_(table.float(), non_blocking=True)
        self.scalars[:, -1] = scale
        self.key.copy_(torch.tensor([self.seed, step]), non_blocking=True)
        self.squares.zero_()
        self.phase, self.at_step = "armed", int(step)
        for state in self.states.values():
            state.stepped = state.forwarded = False

    def stash(self):
        """The backward passes that follow keep each weight's factors, and change nothing until release() or disarm():
        for clipping, for the sum over micro-batches, for weights that are used more than once. Each weight holds its
        factors as long as they are smaller than its gradient in fp32 (a classifier's: CLASSIFIER_PRICE times), and then
        that. Factors refer to the inputs of layers and to targets, which must not be written over until then.
        ValueError as for arm."""
        self.expect("stash()", "idle", "armed", do="release() or disarm() first")
        self.check_group()
        for state in self.states.values():
            state.check(stashing=True)
        self.phase = "stashing"

    @torch.no_grad()
    def norm(self, others=()):
        """The norm of the whole gradient, fp64, on the device: of all factors, and of the .grad of the parameters in
        `others`: that of the sum over backward passes and uses, to rounding (of a kept gradient on a GPU in fp32)."""
        self.expect("norm()", "stashing", do="stash() before backward; of a step inside it gradient_norms() tells")
        squares = [torch.zeros((), dtype=torch.float64, device=self.key.device)]
        squares += [state.square() for state in self.states.values() if state.factors]
        squares += [torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2 for p in others if p.grad is not None]
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def release(self, lr, step, scale=1.0):
        """The step `step` at rate lr of every weight that has factors: its gradient is what they add up to, times
        scale, a number or a tensor of one (Muon has no use for it: to leave a step out, disarm()). Waits, as arm()
        does, only to look at master copies; after it the handle is idle. ValueError, and nothing changed, unless
        stash() came before, and if what the factors refer to has changed since; any other error is one midway, and
        leaves neither factors nor a phase."""
        self.expect("release()", "stashing", do="stash() before the backward passes")
        self.step_all(lr, step, scale)

    def step_gradients(self, lr, step):
        """The step as an ordinary optimizer takes it: of every weight that has a .grad, which is dropped. For gradients
        that were summed over processes or micro-batches first."""
        self.expect("step_gradients()", "idle", do="disarm() before backward, which left no gradients")
        self.step_all(lr, step)

    def step_all(self, lr, step, scale=1.0):
        """The step of each weight that has factors, or idle a .grad, which are then used up: by an error, too."""
        for state in self.states.values():
            state.check_tensors()
        ordinary = self.phase == "idle"
        self.prepare(lr, step, scale)
        try:
            for state in self.states.values():
                if ordinary and state.weight.grad is not None:
                    state.factors, state.weight.grad = [Dense(state.weight.grad)], None
                if state.factors:
                    state.consume(state.factors)
                state.factors = []
        finally:
            self.disarm()

    def disarm(self):
        """Backward passes give ordinary gradients again; factors that wait are dropped."""
        self.phase = "idle"
        for state in self.states.values():
            state.factors, state.seen = [], []

    def gradient_norms(self):
        """(weights,) fp64, on the device: norm of each weight's gradient in the last step, unscaled, in the order of
        `states`, a by-product of it; 0 if it had none. (A kernel sums the squares of a tile in fp32.)"""
        return self.squares.sum(1).sqrt()

    def state_dict(self):
        """Plain tensors (those in use, not copies), numbers and strings. The weights themselves belong to the model's
        own state_dict."""
        return dict(
            rules={name: dict(name=type(s.rule).__name__, **asdict(s.rule)) for name, s in self.states.items()},
            layout=self.layout, seed=self.seed, step=self.at_step,
            weights={name: dict(state.tensors) for name, state in self.states.items()},
        )

    def load_state_dict(self, saved):
        """ValueError, and nothing changed, when it is of another rule, layout or set of weights."""
        self.expect("load_state_dict()", "idle", do="disarm() first")
        mine = self.state_dict()
        if missing := mine.keys() - saved.keys():
            raise base.BadInput(f"the saved state has no {min(missing)!r}: pass what a handle's state_dict() gave")
        for what in ("layout", "rules", "weights"):
            theirs, ours = forms(saved[what]), forms(mine[what])
            for name in ours | theirs:
                if theirs.get(name) != ours.get(name):
                    raise base.BadInput(f"saved {what}, {name}: {theirs.get(name)}, this model has {ours.get(name)}: "
                                        "load it into the same model, forged with the same rules and layout")
        for name, tensors in saved["weights"].items():
            for key, tensor in tensors.items():
                self.states[name].tensors[key].copy_(tensor)
            self.states[name].version = None  # arm() looks whether a master copy belongs to its weight
        self.seed, self.at_step = saved["seed"], saved["step"]


def forms(part):
    """{name: what has to be equal} of a part of a state_dict; json, because a tuple may come back as a list."""
    shape = lambda t: [*t.shape, str(t.dtype)]  # noqa: E731
    return {name: json.dumps(value, default=shape, sort_keys=True) for name, value in (
        part if isinstance(part, dict) else {"": part}).items()}


def check_forge(weights, rules, layout, rung, seed, origins, tables, matrices, ranks):
    """ValueError unless a Forge can be made of these."""
    strangers, rungs = {*rules, *origins, *tables, *matrices, *ranks} - {*weights}, ("auto", "hook", "slab", "fused")
    base.refuse(
        (not weights, "no weight to update: the model has no nn.Linear that is trained and not skipped"),
        (strangers, f"{min(strangers, default='')} is no weight here: known are {', '.join([*weights][:8])}"),
        (layout not in LAYOUTS, f"layout is {layout!r}: use one of {', '.join(LAYOUTS)}"),
        (rung not in rungs, f"rung is {rung!r}: use one of {', '.join(rungs)}"),
        (not (isinstance(seed, int) and -(2**63) <= seed < 2**63), f"seed is {seed!r}: use a whole number of 64 bits"))
    for name, weight in weights.items():
        rule, count, (row, col) = rules[name], matrices.get(name, 1), origins.get(name, (0, 0))
        base.refuse((not isinstance(weight, nn.Parameter) or weight.dim() != 2 or weight.dtype not in DTYPES, f"{name} "
                     f"is a {type(weight).__name__} of {getattr(weight, 'dtype', '?')}: pass matrices in fp32 or bf16"))
        base.refuse(
            (not weight.requires_grad, f"{name} is frozen: leave it out, or thaw it (requires_grad_()) before"),
            (not isinstance(rule, Rule), f"rule is {rule!r}: pass AdamW(...), AdamMini(...), SGD(...) or Muon(...) of "
             "this file; for others, which need more of dW than these, skip=... the weights"),
            (isinstance(rule, Muon) and name in tables, f"{name}: Muon wants its gradient whole, that of an embedding "
             "or a classifier comes in rows: give it AdamW, by rules={...}"),
            (count < 1 or len(weight) % count, f"{name}: {count} matrices cannot be equally large"),
            (min(row, col) < 0 or col % BORDERS[layout], f"origin of {name}, ({row}, {col}): none is negative, the "
             f"column a multiple of {BORDERS[layout]} in layout {layout}"))
    base.refuse(
        (len({id(weight) for weight in weights.values()}) < len(weights),
         "one Parameter has two names: pass the second one as its alias"),
        (len({weight.device for weight in weights.values()}) > 1,
         "the weights are on several devices: forge each device's modules by themselves"))


# ==== 10. Layers, classifier, model ===================================================================================
#
# A forged layer is nn.Linear with a backward pass of its own, of three lines whose order is the point:
#
#     dX = dY W              reads W as forward did
#     step of W by dY^T X    from here on W is the next step's
#     return dX, None        autograd gets no dW
#
# The layers before it have not had their backward pass yet, and do not read this W. Who else reads it would be wrong: a
# second use of the same weight. In forward, armed, it is refused; what forward cannot see is found in backward: a graph
# made before arm() by the weight's version, a use outside the layer by the hook that gets a gradient after the step.


class ForgeLinear(nn.Linear):
    """nn.Linear whose weight is updated inside its backward pass, once forge() has given it a state and that is armed.
    Unarmed it is an nn.Linear, but for second derivatives, torch.func and dtypes: inputs are fp32 or bf16, and a weight
    of another dtype is cast to theirs. Its bias gets an ordinary gradient."""

    forged = None

    def forward(self, x):
        if self.forged is None:
            return super().forward(x)
        y = _ForgedLinear.apply(x.to(compute_dtype(x)), self.weight, self.bias, self.forged)
        self.forged.on_forward(self.weight)  # now that nothing can be refused any more
        return y


def compute_dtype(x):
    """That of autocast, or else of x: fp32 or bf16. ValueError on others."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
    if dtype not in DTYPES:
        raise base.BadInput(f"products in {dtype}: use bf16 or fp32" + (
            " (fp16's GradScaler would scale the step, too)" if dtype == torch.float16 else ""))
    return dtype


class _ForgedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state):
        ctx.save_for_backward(x)
        ctx.state, ctx.version, ctx.biased = state, weight._version, bias is not None
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, dy):
        x, state = ctx.saved_tensors[0].detach(), ctx.state  # a factor must not keep the graph
        state.on_backward(ctx.version)
        # Only a pass that is after the weight's gradient takes a step: not one that stops at x, nor if it is frozen.
        wanted = cce.wanted(ctx, 1)
        M, K = state.weight.shape
        dY, X = dy.reshape(-1, M), x.reshape(-1, K)  # (N, M), (N, K)
        dX, dW = dx_then_update(
            lambda: (dY @ state.weight.to(dY.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None,
            lambda: weight_update(state, Product(dY, X)) if wanted else None,
        )
        return dX, dW, dY.sum(0) if ctx.biased else None, None


def dx_then_update(input_gradient, update):
    """The one order that is right: dX = dY W reads the weight that forward used."""
    return input_gradient(), update()


def weight_update(state, factor):
    """What backward makes of a weight's gradient: the armed step; a factor for later; or, for autograd and v1's hook,
    the gradient itself."""
    handle = state.handle
    if handle.phase == "stashing":
        return state.keep(factor)
    if handle.phase == "idle" or state.hooked:
        return (factor.dY.T @ factor.X).to(state.weight.dtype)
    state.check_second()
    state.consume([factor])


class ForgeEmbedding(nn.Embedding):
    """nn.Embedding, the same way. Its output has the dtype that the weight had before forge()."""

    forged = None

    def forward(self, tokens):
        if self.forged is None:
            return super().forward(tokens)
        out = _ForgedEmbedding.apply(self.weight, tokens, self.forged)
        self.forged.on_forward(self.weight)
        return out


class _ForgedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens, state):
        ctx.save_for_backward(tokens)
        ctx.state, ctx.version = state, weight._version
        return F.embedding(tokens, weight).to(state.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        (tokens,), state = ctx.saved_tensors, ctx.state
        state.on_backward(ctx.version)
        M, K = state.weight.shape
        tokens, dX = tokens.reshape(-1), cce.rows_contiguous(dx.reshape(-1, K))  # (N,), (N, K)
        if state.handle.phase == "idle":
            return torch.ops.aten.embedding_dense_backward(dX, tokens, M, -1, False).to(state.weight.dtype), None, None
        lists = filtering.listed_rows(dX, torch.arange(len(tokens), device=dX.device), tokens, None, M)
        weight_update(state, Listed(lists))
        return None, None, None


# A classifier's gradient is the largest of a model, and 02 and 03 make it in slices of the vocabulary. Where they would
# write a slice of dC they call a sink in its place. Exactly:
#
#     for each slice of the vocabulary:  G (N, W)   --> dE += G C[slice]         with the old C
#                                                   --> sink.rows: G^T E, and the step of C[slice]
#
# Sparse: once, sink.listed, whose step sums each row of dC in registers (Adam-mini, which wants whole rows: in slabs).
# Neither logits nor dC are ever there.


def whole_slabs(block, rows):
    """Columns of a classifier's G to make at a time: a rest would take as long as a slab."""
    return block if block < rows else block // rows * rows


class Sink:
    """What takes a classifier's gradient from 02 and 03 in place of autograd. They call align(block) in forward,
    begin() in backward, and then slices(...) once and rows(...) for each slice, or listed(...) once."""

    def __init__(self, state):
        self.state, self.version = state, state.weight._version

    def align(self, block):
        return whole_slabs(block, self.state.handle.plan(self.state, 0).rows)

    def begin(self):
        state = self.state
        state.on_backward(self.version)
        if state.handle.phase == "idle":
            raise base.BadInput(f"{state.name}: disarmed between forward and backward, which has no gradient to give")
        state.stepped = True

    def slices(self, E, targets, lse, *others):
        """What the G of the rows() that follow is made of, with C."""
        # A factor must not keep the graph: what autograd saved comes back with its history.
        factor, stashing = Classes(E.detach(), targets, lse.detach(), *others), self.state.handle.phase == "stashing"
        self.dense = self.state.dense_for(factor, CLASSIFIER_PRICE) if stashing else None
        if stashing and not self.dense:
            self.state.keep(factor, CLASSIFIER_PRICE)

    def rows(self, start, G, E):
        """Step, or add, rows start ... start + W, from G (N, W) and E (N, D)."""
        state, handle = self.state, self.state.handle
        E = E.to(G.dtype)  # blocked PyTorch makes G of bf16 logits in fp32
        if handle.phase == "armed":
            state.step_product(Product(G, E), handle.plan(state, len(E)), start)
        elif self.dense:  # or else its time comes, with another G
            weight_gradient(G, E, self.dense.gradient[start : start + G.shape[1]], add=True)

    def listed(self, lists):
        """Step, or keep, all rows."""
        lists = lists._replace(E=lists.E.detach())
        if self.state.handle.phase == "armed":
            self.state.consume([Listed(lists)])
        else:  # kept without the room that was left for more entries
            count = int(lists.begin[-1])
            kept = dict(rows=lists.rows[:count].clone(), weights=lists.weights[:count].clone())
            self.state.keep(Listed(lists._replace(**kept)), CLASSIFIER_PRICE)


def forge_classifier(E, C, targets, state, *, gradient="auto", **options):
    """03's linear_cross_entropy(E, C, targets, gradient=..., **options), whose backward takes the classifier's step: C
    gets no gradient, E its ordinary one, made with the old C. Neither the logits nor, armed, dC are ever there.

    E (..., D) fp32 or bf16, C (V, D) the weight of `state`, targets (...); gradient "exact", "sparse" or "auto". On a
    stash()-ing handle C is left as it is. Kept is what makes dC (E, lse and targets; sparse: E and lists) or, if that
    is not CLASSIFIER_PRICE times smaller, dC itself. Unarmed, and without gradients: 03's own. Memory: what 02 and 03
    say, 4 N D bytes for dE, and a slab. A C in another dtype than E is cast to it first, whole.
    ValueError on what 03 refuses, a bias, fp16, and a second use in an armed step."""
    base.refuse(
        (options.get("bias") is not None, "bias: forge_classifier makes no gradient of it: use 03's loss"),
        (not state.table, f"{state.name} was forged as a layer's weight: pass classifier={state.name!r} to forge()"))
    dtype, handle = compute_dtype(E), state.handle
    sink = None if handle.phase == "idle" else Sink(state)
    options.setdefault("backend", "torch" if handle.backend == "torch" else "auto")
    result = filtering.linear_cross_entropy(E.to(dtype), C.to(dtype), targets, gradient=gradient, sink=sink, **options)
    if sink:
        state.on_forward(C)
    return result


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")
PLAIN_EMBEDDING = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def forge(model, rule, layout="fp32", *, skip=(), embeddings=False, classifier=None, **options):
    """Convert the nn.Linear modules of a model in place and return its Forge handle.

    rule: AdamW(...), AdamMini(...), SGD(...) or Muon(...), and as an option `rules`, {name of a weight: another};
    layout: "fp32", "master", "int8"; skip: names of modules to leave alone, with all that is in them; embeddings:
    nn.Embedding modules, too; classifier: the name of a parameter (V, D) that is only used in forge_classifier;
    options: those of Forge. Weights take the layout's dtype. handle.ordinary names every other trainable parameter
    (norms, biases): give those to an ordinary optimizer. ValueError when the model is wrapped for data parallelism or
    forged already, a weight is tied to something that is not converted, or a name does not exist; the model is then as
    it was. Weights tied to each other need stash() and release(), or rung="hook" (nn.Linear). Modules of derived
    classes, or whose weight is no Parameter of theirs (parametrized, pruned), are left to the ordinary optimizer; those
    with an attribute `forged` (07's experts) take their weight's step themselves.

        handle = forge(model, AdamW(weight_decay=0.1), "master", skip=["head"])  # or rules=dict.fromkeys(names, Muon())
        others = torch.optim.AdamW(handle.ordinary.values(), lr=lr)
        for step in range(1, steps + 1):
            handle.arm(lr, step)
            loss(model(x)).backward()
            others.step()
            others.zero_grad()

    With micro-batches, the loop's first two lines become
            handle.stash()
            for x in parts:
                (loss(model(x)) / len(parts)).backward()
            handle.release(lr, step)                              # clipped: see section 9
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # one that has two names is a tied weight
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, module in modules.items():
        base.refuse(({kind.__name__ for kind in type(module).__mro__} & set(WRAPPERS),
                     f"{name or 'the model'} is a {type(module).__name__}, which reduces gradients that forge never "
                     "makes: forge the bare model in one data-parallel process, or skip forge"))
    skip = [skip] if isinstance(skip, str) else list(skip)
    for what, known in [(name, modules) for name in skip] + [(classifier, parameters)] * bool(classifier):
        known = [n for n in known if n]  # the root has no name
        base.refuse((what not in known, f"{what!r} is not in the model: known are {', '.join(known[:9])}, ..."))

    def takes_part(name, module):
        kind = type(module) in (nn.Linear, nn.Embedding)[: 1 + embeddings] or hasattr(module, "forged")
        skipped = any(f"{name}.".startswith(f"{s}.") for s in skip)
        return kind and not skipped and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad

    converted = {f"{name}.weight".lstrip("."): m for name, m in modules.items() if takes_part(name, m)}
    for name, module in converted.items():
        unusual = [option for option, plain in PLAIN_EMBEDDING.items() if getattr(module, option, plain) != plain]
        base.refuse((getattr(module, "forged", None) is not None,
                     f"{name} is forged already: forge a model once, with all that it needs"),
                    (unusual, f"{name}: an nn.Embedding with {unusual} is not what is updated here: skip it"))

    weights, aliases, tables = {}, {}, []
    names = dict.fromkeys([*converted, *[classifier] * bool(classifier)])
    for name in names:
        # A tied weight has several names. It becomes one, under the first of them.
        first, *others = every = [other for other, p in parameters.items() if p is parameters[name]]
        left = [other for other in every if other not in names]
        base.refuse((left, f"{name} and {left} are one tensor: a tied weight is used twice: skip it, or have both "
                     "converted (embeddings=True, classifier=...)"))
        if first == name:
            weights[name], aliases[name] = parameters[name], others
            if any(n == classifier or isinstance(converted.get(n), nn.Embedding) for n in every):
                tables.append(name)
    matrices = {name: module.experts for name, module in converted.items() if hasattr(module, "experts")}
    handle = Forge(weights, rule, layout, tables=tables, aliases=aliases, matrices=matrices, **options)
    handle.ordinary = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in weights}
    for name, module in converted.items():
        module.__class__ = {nn.Linear: ForgeLinear, nn.Embedding: ForgeEmbedding}.get(type(module), type(module))
        module.forged = handle[name]
    return handle


# ==== 11. Two passes, two launches: a model as CUDA graphs ============================================================
#
# A step inside backward is many small works for the host: autograd calls Python for each matrix, Muon launches 22
# kernels for one, and where the host is late, or has other processes to serve, the GPU stands still. GPT-2 small,
# 65,536 tokens a step on an H200: the kernels take 108 ms of 124. But from step to step it is always the same kernels
# on the same memory. So the passes are recorded once, each as a CUDA graph, and from then on launched as one:
#
#     host      E = model(tokens)      loss(E)         loss.backward()
#                 |                    as before:        | makes dE; then
#     graph 1   tokens -> E            it reads          |
#     graph 2                          numbers back      dE -> every step of a matrix; gradients of all else
#
# What changes between steps, rates and their number, lies in tensors already (prepare()). What does not run again is
# Python: the handle's books (forwarded, stepped, versions) are kept by hand below, so that misuse is told as before.
#
# The memory of both passes is reserved for them from then on: what forward leaves, and what backward needs at a time.
# Only the loss, whose memory changes from step to step, takes its own beside it: where passes one after the other would
# share. Whoever runs without gradients in between, or waits for more than one pass, gets all of it back.


class Replay:
    """What replay() puts in place of model.forward, `plain`."""

    def __init__(self, model, handle):
        self.model, self.handle, self.plain, self.number = model, handle, model.forward, 0
        self.weights, self.most, self.held = [p for p in model.parameters() if p.requires_grad], 0, 0
        self.forget()

    def forget(self):
        """Free all that was recorded, and what it holds."""
        self.most = self.peak()
        self.met = self.graphs = self.tokens = self.E = self.gradients = self.begun = None
        if self.held:
            self.held = 0
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        """Peak bytes so far: of tensors, and of what the graphs hold, which the allocator does not count as such."""
        return max(self.most, self.held + torch.cuda.max_memory_allocated())

    def circumstances(self, tokens):
        """That in which a record is true."""
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return tokens.shape, tokens.dtype, cast, self.model.training, [p.data_ptr() for p in self.weights]

    def __call__(self, tokens):
        if not torch.is_grad_enabled() or self.handle.phase != "armed":
            self.forget()
            return self.plain(tokens)
        if (met := self.circumstances(tokens)) != self.met:
            self.forget()
            self.met = met
            return self.plain(tokens)  # compiles, which nothing that is recorded may do
        if not self.graphs:
            self.record(tokens)
        E = _Replayed.apply(self, tokens, *self.weights)
        for state in self.states:
            state.on_forward(state.weight)
        return E

    def record(self, tokens):
        """Both passes; nothing runs. Backward takes the memory of what it has used up, and of forward's own work."""
        states, pool = self.handle.states.values(), torch.cuda.graph_pool_handle()
        graphs, options = [torch.cuda.CUDAGraph() for _ in range(2)], dict(pool=pool, capture_error_mode="thread_local")
        # While a loss of the step before is alive, so are autograd's nodes for the parameters, and backward would wait
        # for their stream, which is not recorded. New parameters on the same memory have new nodes.
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        fresh = {name: nn.Parameter(p.detach()) for name, p in own.items()}
        torch.cuda.empty_cache()
        self.most, reserved = self.peak(), torch.cuda.memory_reserved()
        self.tokens = tokens.clone()
        torch.clear_autocast_cache()  # of tensors that may be freed
        try:
            self.put(fresh)
            with torch.cuda.graph(graphs[0], **options):
                E = self.plain(self.tokens)
            self.E, self.states = E.detach(), [state for state in states if state.forwarded]
            increment_version(E)  # its gradient will be put there: if backward wanted E, it would be told
            with torch.cuda.graph(graphs[1], **options):  # the gradients of matrices are None
                self.gradients = torch.autograd.grad(E, list(fresh.values()), self.E, allow_unused=True)
        finally:
            self.put(own)
            torch.clear_autocast_cache()
            for state in states:
                state.forwarded = state.stepped = False
        self.graphs, self.held = graphs, torch.cuda.memory_reserved() - reserved
        torch.cuda.reset_peak_memory_stats()  # while recorded, what they hold was counted as tensors

    def put(self, parameters):
        """Have the model, and the handle's states, these parameters {name: p}."""
        for name, p in parameters.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, p)
        for state in self.handle.states.values():
            state.weight = parameters[state.name]

    def launch(self, tokens):
        self.tokens.copy_(tokens, non_blocking=True)
        self.graphs[0].replay()
        self.number += 1

    def ahead(self, tokens):
        """Launch the pass that the next call with these `tokens` asks for, so that the GPU has work while the host
        looks at a step's numbers. It is launched again there if a weight was written to in between. (Not what goes
        through .data, which is not seen.)"""
        if self.graphs and tokens.shape == self.tokens.shape:
            self.launch(tokens)
            self.begun = tokens, [p._version for p in self.weights]

    def is_begun(self, tokens):
        begun, self.begun = self.begun, None
        return begun and begun[0] is tokens and begun[1] == [p._version for p in self.weights]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replay, tokens, *weights):
        if not replay.is_begun(tokens):
            replay.launch(tokens)
        ctx.replay, ctx.number = replay, replay.number
        ctx.versions = [state.weight._version for state in replay.states]
        return replay.E.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dE):
        replay = ctx.replay
        base.refuse((ctx.number != replay.number or not replay.graphs,
                     "another forward pass took the memory of this one: call backward() before it"))
        for state, version in zip(replay.states, ctx.versions, strict=True):
            state.on_backward(version)
            state.check_second()
        replay.E.copy_(dE)
        replay.graphs[1].replay()
        for state in replay.states:
            state.stepped = True
            state.written()
        return None, None, *replay.gradients


def replay(model, handle):
    """Have forward and backward of a forged model, tokens -> E, be CUDA graphs, recorded in the second of two armed
    passes alike. For models whose passes launch the same work each time, and read nothing back; all matrices should be
    the handle's, as gradients are copied once more. In any other phase, and without gradients, the model runs as it
    was. model.forward.ahead(tokens) starts the next pass early. ValueError where there is no GPU, or no kernels."""
    base.refuse((handle.side is None, "CUDA graphs need a GPU, Triton's kernels, and matrices that are not cut"),
                (handle.rung == "hook", "rung is 'hook', whose steps wait for autograd's gradients: use 'auto'"))
    model.forward = Replay(model, handle)


# ==== 12. Checks ======================================================================================================
#
# The data are small whole numbers wherever bits are compared: sums of them are exact in any order, so that every rung,
# tile and library makes one dW, and what differs is the step. eps is 0.5 there: with 1e-8 AdamW's update hardly depends
# on the size of the gradient, and a wrong scale would not show.


def rungs(device):
    """(rung, backend) pairs that run on this device."""
    pairs = [("hook", "torch"), ("slab", "torch")]
    return pairs + [(r, "triton") for r in ("hook", "slab", "fused") if "triton" in cce.backends(device)]


def is_slow(backend):
    return INTERPRETED and backend == "triton"


def forged(W, rule, layout="fp32", rung="slab", backend="torch", name="weight", **options):
    """A handle for one weight that starts as W (M, K), in slabs of 128 rows of 256: (Parameter, handle)."""
    weight = nn.Parameter(W.clone())
    options = dict(slab=4 * 128 * 256) | options
    return weight, Forge({name: weight}, rule, layout, rung=rung, backend=backend, **options)


def take_step(weight, handle, X, dY, lr, step):
    """One armed forward and backward pass of y = X W^T; returns dX."""
    x = X.clone().requires_grad_()
    handle.arm(lr, step)
    y = _ForgedLinear.apply(x, weight, None, next(iter(handle.states.values())))
    (1.0 * y).backward(dY)  # times 1: if cuBLAS comes first in autograd's thread, it warns of a missing context
    return x.grad


def take_stashed(weight, handle, X, dY, lr, step, scale=1.0):
    """The same step of factors that wait."""
    handle.stash()
    for part in (slice(0, 5), slice(5, None)):
        next(iter(handle.states.values())).keep(Product(dY[part], X[part]))
    handle.release(lr, step, scale)


def take_ordinary(weight, handle, X, dY, lr, step):
    """The same step of an ordinary gradient."""
    weight.grad = (dY.T @ X).to(weight.dtype)
    handle.step_gradients(lr, step)


def everything(weight, handle):
    """{name: tensor} of the weight and its state."""
    return next(iter(handle.states.values())).tensors | {"weight": weight.detach()}


def decoded(state):
    """{name: fp32} of what a step of this State moves: W (or its master copy), m, and v, as far as the rule has it."""
    f = state.fields
    found = dict(W=f.W if f.master is None else f.master, m=read(f.m, f.m_scale, decode_m))
    if f.row_v is not None:
        found["v"] = f.row_v
    elif f.v is not None:
        found["v"] = read(f.v, f.v_scale, decode_v)
    return {name: tensor.float() for name, tensor in found.items()}


def require_equal(title, got, want):
    for name, tensor in got.items():
        wrong = int((tensor != want[name]).sum())
        base.require(wrong == 0, f"{title}: {wrong} elements of {name} differ")


def whole_numbers(N, M, K, device, steps=3, seed=0, largest=2):
    """W (M, K), and for each step X (N, K), dY (N, M) of small whole numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-largest, largest + 1, shape, generator=generator).float().to(device)

    W = 0.02 * torch.randn(M, K, generator=generator).to(device)
    return W, [(draw(N, K), draw(N, M)) for _ in range(steps)]


def library_step(rule, weights):
    """What the rule is elsewhere: torch's optimizer."""
    if isinstance(rule, AdamW):
        options = dict(betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, foreach=False)
        return torch.optim.AdamW(weights, **options)
    return torch.optim.SGD(weights, lr=0.0, momentum=rule.momentum, weight_decay=rule.weight_decay, foreach=False)


# All paths have to make the same bits as each other. That these are the right ones is told by the rules written down
# once more, in fp64 and with no regard to speed: a page that can be compared with the papers.


def by_hand(rule, W, gradients, rate):
    """fp64: W, m (E, M, K) and v, that or Adam-mini's (E, M), after a rule's steps of E matrices with these gradients
    (E, M, K) at rates rate, 2 rate, ..."""
    W, rows = W.double(), rule.needs == "row"
    m, v = torch.zeros_like(W), torch.zeros_like(W[..., 0] if rows else W)
    for t, g in enumerate(gradients, 1):
        g, lr = g.double(), t * rate
        if isinstance(rule, SGD):
            m = rule.momentum * m + g + rule.weight_decay * W
            W = W - lr * m
            continue
        W = (1 - lr * rule.weight_decay) * W
        if rule.needs == "matrix":
            g = g / g.norm(dim=(1, 2), keepdim=True)
            m = rule.momentum * m + (1 - rule.momentum) * g
            ahead = rule.momentum * m + (1 - rule.momentum) * g
            W = W - lr * torch.stack([muon_update(one) for one in ahead])
        else:
            b1, b2 = rule.betas
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g.square().mean(2) if rows else g.square())
            W = W - lr / (1 - b1**t) * m / (((v[..., None] if rows else v) / (1 - b2**t)).sqrt() + rule.eps)
    return W, m, v


def muon_update(U):
    """What orthogonal() is to approximate for U (M, K), by an SVD in fp64: five times p of each singular value, times
    sqrt(max(1, M / K))."""
    left, s, right = torch.linalg.svd(U.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-300)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return max(1.0, U.shape[0] / U.shape[1]) ** 0.5 * (left * s) @ right


def check_orthogonal(device="cpu"):
    """In fp64 what an SVD gives: wide, tall, square, thin, alone and stacked, in fp32 however short; in bf16 as close
    to that as torch's Muon. (0 and NaN: check_muon_use.)"""
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24), (33, 33), (1, 7), (7, 1), (3, 16, 40), (3, 40, 16)):
        U = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        want = torch.stack([muon_update(one) for one in U.view(-1, *shape[-2:])]).view(shape)
        off = ((orthogonal(U.clone()) - want).abs().max() / want.abs().max()).item()
        base.require(off < 1e-12, f"{shape}: off by {off:.1e} from the SVD's")
        small = cce.error(orthogonal(1e-15 * U.float()), want)
        base.require(small < 3e-6, f"{shape}: a short one in fp32 is off by {small:.1e}")
    for shape in ((96, 160), (160, 96), (128, 128)):
        U = torch.randn(shape, generator=generator).to(device).bfloat16()
        theirs = nn.Parameter(torch.zeros(shape, device=device))
        theirs.grad = U.float()
        options = dict(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="original")
        torch.optim.Muon([theirs], **options).step()
        cce.require_as_good(f"{shape}, bf16", orthogonal(U.clone()), -theirs.detach(), muon_update(U), 1e-3)


WAYS = {"arm": take_step, "stash": take_stashed, "clip": functools.partial(take_stashed, scale=0.5),
        "gradients": take_ordinary}


def ways_of(rule, layout, device):
    """(rung, backend, way) that are worth a comparison: all ways by slabs, the first by all rungs. Not: gradients that
    autograd has rounded, and what only repeats slow kernels."""
    muon, adamw = rule.needs == "matrix", type(rule) is AdamW
    for (rung, backend), way in itertools.product(rungs(device), WAYS):
        again = way != "arm" and rung != "slab"
        rounded = layout != "fp32" and (way == "gradients" or rung == "hook" and not muon)
        slow = way != "arm" or rung == "hook" or not adamw and (rung == "fused" or layout == "master")
        if not (again or rounded or slow and is_slow(backend)):
            yield rung, backend, way


def examples():
    decay = dict(weight_decay=0.1)
    return AdamW(eps=0.5, **decay), SGD(**decay), AdamMini(eps=0.5, **decay), Muon(**decay)


def check_steps(device="cpu", E=3, M=100, K=264, N=130, seed=0, rules=None):
    """Every rule in every layout, from every way to its gradient: dX of the old W, the same bits, in several slabs;
    what fp64 by hand gives (a GPU's products for Muon are in bf16: check_orthogonal); the norm of the gradient as it
    came. dW's numbers have more digits than bf16: whoever rounds it is caught. For Muon W is E matrices, two of them in
    a slab, and N > M: of fewer tokens dW has singular values of 0, where its p raises the noise of bf16 to 15 % of the
    update, by chance."""
    W, data = whole_numbers(N, E * M, K, device, steps=2, seed=seed, largest=7)
    W = W.T.contiguous().T  # a weight may lie in memory by columns
    data = [(X, dY * torch.exp2(torch.arange(E * M, device=device) % 13 - 6.0)) for X, dY in data]  # still exact
    gradients, start, rate = [(dY.T @ X).view(E, M, K) for X, dY in data], W.reshape(E, M, K), 0.02
    for rule, layout in itertools.product(rules or examples(), LAYOUTS):
        first, muon, codes = {}, rule.needs == "matrix", layout == "int8"
        options = dict(matrices={"weight": E}, slab=4 * 2 * M * K) if muon else {}
        for rung, backend, way in ways_of(rule, layout, device):
            title = f"{type(rule).__name__}, {layout}, {rung}, {backend}, {way}"
            scale = 0.5 if way == "clip" and not muon else 1.0  # by its norm Muon's gradient is divided anyway
            weight, handle = forged(W, rule, layout, rung, backend, seed=3**39, **options)  # of both halves of a key
            for t, (X, dY) in enumerate(data, 1):
                X, dY = (x.to(weight.dtype if way == "arm" else x.dtype) for x in (X, dY))
                old, version = weight.detach().clone(), weight._version
                dX = WAYS[way](weight, handle, X, dY, rate * t, t)
                base.require(dX is None or torch.equal(dX, dY @ old), f"{title}: dX is not of the old W")
                base.require(weight._version > version, f"{title}: autograd was not told of the write")
            told = handle.gradient_norms().item() / gradients[-1].double().norm().item()
            base.require(abs(told - 1) < 3e-7, f"{title}: {told} times the gradient's norm")
            got, state = everything(weight, handle), decoded(handle["weight"])
            if scale == 1:
                require_equal(title, got, first.setdefault(backend if W.is_cuda else "all", got))
            base.require(torch.equal(weight, state["W"].to(weight.dtype)), f"{title}: W is not its master copy")
            exact, m, v = by_hand(rule, start, [g * scale for g in gradients], rate)
            exact = dict(W=exact - start, m=m, v=v)
            for name, found in state.items():
                limit = 2e-2 if codes else 6e-6 if muon else 4e-7
                if name == "W":
                    found, limit = found - W, 2.5e-2 if muon and W.is_cuda else limit
                off = cce.error(found.view(exact[name].shape), exact[name])
                base.require(off < limit or codes and name == "W", f"{title}: {name} is off by {off:.1e}")  # by chance


def check_library(device="cpu", M=150, K=300):
    """AdamW and SGD in fp32 are torch's: bit for bit on a GPU, elsewhere within 4 units in the last place a step. Rows
    without a gradient, too, decay and go on with their momentum."""
    W, data = whole_numbers(9, M, K, device)
    data[-1][1][:, ::7] = 0
    for rule, backend in itertools.product(examples()[:2], cce.backends(device)):
        weight, handle = forged(W, rule, backend=backend)
        theirs, scale = nn.Parameter(W.clone()), W.abs()
        library = library_step(rule, [theirs])
        for t, (X, dY) in enumerate(data, 1):
            handle.arm(1e-3 * t, t)
            library.param_groups[0]["lr"], theirs.grad = 1e-3 * t, dY.T @ X
            handle["weight"].step(theirs.grad)
            library.step()
            scale = scale.maximum(theirs.detach().abs())
        unit = torch.from_numpy(np.spacing(scale.cpu().numpy())).to(device)
        far = ((weight - theirs).abs() / unit).max().item()
        limit = 0 if W.is_cuda else 4 * len(data)
        base.require(far <= limit, f"{rule}, {backend}: {far:g} units in the last place from the library")


def check_muon_use(device="cpu"):
    """Without gradient and momentum a matrix decays and does no more; NaN is told and stays; parts of a matrix, and of
    Adam-mini's rows, are refused; two rules have rates of their own."""
    W = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(device)
    for rung, backend in rungs(device):
        weight, handle = forged(W, Muon(weight_decay=0.5), rung=rung, backend=backend, matrices={"weight": 2})
        state = handle["weight"]
        handle.arm(0.1, 1)
        state.step(torch.cat((torch.zeros_like(W[:20]), W[20:])))  # two experts, one without tokens
        moved = (weight - W * torch.tensor(0.95, device=device)).detach().abs().amax(1)
        base.require(not moved[:20].any() and moved[20:].min() > 1e-3, f"{rung}, {backend}: two experts, one idle")
        for rows, row in ((W[:8], 0), (W[:20], 10)):
            must_raise("matrix as a whole", functools.partial(state.step, rows, row))
        must_raise("matrix as a whole", functools.partial(state.step_fused, W[:20, :20], W[:20]))
        state.step(torch.full_like(W, math.nan))
        base.require(weight.isnan().all() and handle.gradient_norms().isnan().all(), f"{rung}, {backend}: NaN")
    zero, one, mini = torch.zeros(8, 8, device=device), torch.ones(8, 8, device=device, requires_grad=True), AdamMini()
    handle = Forge(dict(a=nn.Parameter(zero.clone()), b=nn.Parameter(zero)), SGD(), rules=dict(b=mini), rung="slab")
    must_raise("one for each of", lambda: handle.arm({SGD(): 0.1}, 1))
    handle.arm({SGD(): 0.5, mini: 0.25}, 1)
    must_raise("row as a whole", lambda: handle["b"].step_fused(zero, zero))
    for state, rate in zip(handle.states.values(), (0.5, 0.25), strict=True):
        state.step(one)
        base.require((state.weight + rate).abs().max() < 1e-6, f"rates of two rules: {state.weight}")
        base.require(not any(t.requires_grad for t in state.tensors.values()), "a state has a graph")


def check_checkpointing(device="cpu"):
    """A model under both kinds of activation checkpointing makes the same gradients and steps, bit for bit."""
    _, [(X, dY), *_] = whole_numbers(40, 48, 72, device)
    checkpoint, ends = torch.utils.checkpoint.checkpoint, []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(72, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
        handle, x = forge(model, AdamW(), rung="slab"), X.clone().requires_grad_()
        for step in (1, 2):
            handle.arm(0.01, step)
            (model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)).backward(dY)
        ends.append([x.grad, *copies(model)])
        same = all(map(torch.equal, ends[0], ends[-1]))
        base.require(same, f"checkpointing (use_reentrant={reentrant}) changes the step")


# Is a rounding stochastic? One number rounded once says nothing; 32,768 of them do. Where a part f of the last place is
# dropped, rounding up by chance has mean f and variance f (1 - f), so the sum of all errors over the root of all
# variances is a draw from a normal distribution: five deviations are one case in a million. Rounding to nearest passes
# that, since its errors cancel. But by two keys p and q are rounded alike but by chance, in 2 f (1 - f) of the cases
# not, and to nearest always.


def check_rounding(device="cpu", R=64, C=512):
    """Stochastic rounding to bf16: right on average (z-tests); other noise for another seed, step or weight, also of a
    name as long; NaN and infinities stay what they are."""
    generator = torch.Generator().manual_seed(0)
    W, dW = (torch.randn(R, C, generator=generator).to(device) for _ in range(2))
    W = W.bfloat16().float()
    for backend in cce.backends(device):
        weight, handle = forged(W, AdamW(), "fp32", "slab", backend)
        handle.arm(0.01, 1)
        handle["weight"].step(dW)
        exact, roundings = weight.detach(), []
        part = (exact.contiguous().view(torch.int32) & 0xFFFF).double() / 65536
        for name, seed, step in (("weight", 0, 1), ("weight", 1, 1), ("weight", 0, 2), ("height", 0, 1)):
            weight, handle = forged(W, AdamW(), "int8", "slab", backend, name, seed=seed)
            handle.arm(0.01, 1)
            handle.key[1] = handle.at_step = step  # the noise of another step, but not its rates
            handle[name].step(dW)
            roundings.append(weight.detach())
            up = (weight.detach().float().view(torch.int32) >> 16) - (exact.contiguous().view(torch.int32) >> 16)
            off = abs((up - part).sum() / (part * (1 - part)).sum().sqrt()).item()  # up: 0 or 1 units
            base.require(off < 5, f"{backend}: rounding is off by {off:.1f} deviations")
        for one, two in itertools.combinations(roundings, 2):
            share = (one != two).double().mean().item() / (2 * part * (1 - part)).mean().item()
            base.require(0.95 < share < 1.05, f"{backend}: roundings by two keys differ {share:.3f} of as often")
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-45, 3e38], device=device).repeat(64, 2)
        special.view(torch.int32)[:, 6] = 0x7FFFFFFF  # a GPU's NaN
        weight, handle = forged(torch.zeros(64, 12, device=device), SGD(), "int8", "slab", backend)
        handle.arm(1.0, 1)
        handle["weight"].step(-special)
        got = weight.detach().float()
        near = got.isfinite() & ((got - special).abs() <= special.abs() / 128 + 1e-40)
        kept = torch.where(special.isfinite(), near, (got == special) | (got.isnan() & special.isnan()))
        base.require(kept.all(), f"{backend}: {special[~kept][:1].tolist()} was rounded to {got[~kept][:1].tolist()}")


# Tensor parallelism cuts a matrix, a slab cuts it another way, a kernel's tiles a third. Noise that is keyed by a tile
# or a shard, or groups of codes that a cut divides, would give each another result: the run could not be repeated on
# another number of GPUs, and two ranks that hold the same row would drift apart.


def check_shards(device="cpu", M=56, K=264, N=24):
    """In a shard, by every rung, weight and codes are those of the whole, bit for bit."""
    W, data = whole_numbers(N, M, K, device, steps=2)
    cuts = [(0, 0, 40, K), (40, 0, M, 128), (40, 128, M, K)]  # one by rows, two by columns
    for rule in (AdamW(), SGD()):
        for rung, backend in rungs(device):
            if rung == "hook":
                continue
            weight, handle = forged(W, rule, "int8", rung, backend)
            shards = [(forged(W[a:c, b:d], rule, "int8", rung, backend, origins={"weight": (a, b)}), (a, b, c, d))
                      for a, b, c, d in cuts]
            for t, (X, dY) in enumerate(data, 1):
                take_step(weight, handle, X, dY, 1e-2, t)
                for (part, one), (a, b, c, d) in shards:
                    take_step(part, one, X[:, b:d], dY[:, a:c], 1e-2, t)
            got = everything(weight, handle)
            for shard, (a, b, c, d) in shards:
                spans = {True: slice(b // GROUP, math.ceil(d / GROUP)), False: slice(b, d)}
                whole = {name: tensor[a:c, spans["scale" in name]] for name, tensor in got.items()}
                require_equal(f"{rung}, {backend}, shard at {a}, {b}", everything(*shard), whole)


def check_codes(device="cpu"):
    """8-bit codes: round trips within half a code, no v > 0 stored as 0; a step without a gradient leaves every
    code as it is; updates of ordinary size where gradients are heavy-tailed (without the floor they reach thousands).
    """
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(8, 300, generator=generator).to(device) * torch.logspace(-6, 3, 8, device=device).unsqueeze(1)
    v = m.square()
    v[:, ::7] = 0
    m[3] = v[3] = 0  # a group of zeros
    top = grouped(m).abs().amax(-1, keepdim=True).expand(-1, -1, GROUP).flatten(1)[:, :300]
    half = top * (1 + m.abs() / top.clamp(min=1e-30)) ** 2 / (4 * 127) * 1.02
    off = (decode_m(*encode_m(m)) - m).abs()
    base.require((off <= half).all(), f"m is off by {(off / half.clamp(min=1e-30)).max().item():.2f} half codes")
    code, scale = encode_v(v)
    base.require(((code > 0) == (v > 0)).all(), "a v > 0 has code 0, or the reverse")
    off, large = (decode_v(code, scale).sqrt() - v.sqrt()).abs(), code > 1
    base.require((off[large] <= 1.02 * top[large] / 510).all(), "sqrt(v) is off by more than half a code")
    codes = dict(m=[*range(-127, 1), *range(128)], v=[*range(1, 256, 2), *range(0, 254, 2), 255])  # in two groups
    codes = {name: torch.tensor([values], device=device) for name, values in codes.items()}
    for backend in cce.backends(device):
        weight, handle = forged(torch.zeros(1, 256, device=device), AdamW(), "int8", "slab", backend)
        handle.arm(0.0, 1)
        tensors = handle["weight"].tensors
        for name, values in codes.items():
            tensors[name].copy_(values)
            tensors[f"{name}_scale"].fill_(3.0)
        handle["weight"].step(torch.zeros_like(weight))
        same = all(torch.equal(tensors[name].long(), values) for name, values in codes.items())
        base.require(same and tensors["m_scale"].max() < 3, f"{backend}: a step without a gradient changed codes")
        weight, handle = forged(torch.zeros(32, 256, device=device), AdamW(weight_decay=0.0), "int8", "slab", backend)
        largest = 0.0
        for t in range(1, 41):
            tail = torch.rand(32, 256, generator=generator).clamp(min=1e-4).pow(-1.0) * 1e-3  # infinite variance
            before = weight.detach().float()
            handle.arm(1.0, t)
            handle["weight"].step((torch.randn(32, 256, generator=generator) * tail).to(device))
            largest = max(largest, (weight.detach().float() - before).abs().max().item())
        base.require(largest < 6, f"{backend}: an element moved by {largest:.0f} rates in one step")
        base.require(handle["weight"].tensors["v"].min() > 0, f"{backend}: a v > 0 is stored as 0")


def check_linear(device="cpu"):
    """Unarmed, a forged layer is nn.Linear, bit for bit, bias included, and under autocast; armed, its bias still gets
    that gradient. A pass that nobody asked for dW takes no step."""
    W, [(X, dY), *_] = whole_numbers(30, 24, 24, device, largest=7)  # dW has more digits than bf16
    kind, make = torch.device(device).type, lambda: nn.Linear(24, 24).to(device)
    for rung, backend in rungs(device):
        plain, layer, title = make(), make(), f"{rung}, {backend}"
        layer.load_state_dict(plain.state_dict())
        handle = forge(layer, AdamW(), rung=rung, backend=backend)
        base.require(list(handle.ordinary) == ["bias"], f"{title}: left to others: {list(handle.ordinary)}")
        for autocast, armed in ((True, False), (False, False), (False, True)):
            results = []
            for module in (plain, layer):
                module.zero_grad()
                if armed and module is layer:
                    handle.arm(1e-3, 1)
                x = X.view(5, 6, 24).clone().requires_grad_()
                with torch.autocast(kind, torch.bfloat16, enabled=autocast):
                    y = module(x)
                y.backward(dY.view(5, 6, 24).to(y.dtype))
                results.append([y.detach(), x.grad, module.bias.grad, *([] if armed else [module.weight.grad])])
            base.require(all(map(torch.equal, *results)), f"{title}: a forged layer is not nn.Linear")
        done = layer.weight.grad is None and not torch.equal(layer.weight, plain.weight)
        base.require(done, f"{title}: an armed pass left a gradient, or changed nothing")
        before = layer.weight.detach().clone()
        for frozen in (False, True):
            handle.arm(1e-3, 2)
            layer.weight.requires_grad_(not frozen)
            torch.autograd.grad(layer(x).sum(), x)  # a saliency map, say
            base.require(torch.equal(layer.weight, before), f"{title}: stepped though nobody asked for dW")


def check_listed(device="cpu", V=40, N=90):
    """A step by lists is that of the rows that they stand for, in the bits of weight and state; so is the norm, where a
    row takes several tiles of a program and several programs. An embedding, armed or later, is that, and unarmed it is
    nn.Embedding. (Rows that nobody lists: check_library.)"""
    generator = torch.Generator().manual_seed(0)
    draw = lambda high, *size: torch.randint(high, size, generator=generator).to(device)  # noqa: E731
    K = 264 if torch.device(device).type == "cpu" else 1032  # LISTED's tiles are wider there
    W, E, weights = 0.02 * torch.randn(V, K, generator=generator).to(device), draw(5, N, K) - 2.0, draw(5, N) - 2.0
    for rule, layout, backend in itertools.product((AdamW(), AdamMini()), LAYOUTS, cce.backends(device)):
        if is_slow(backend) and layout == "master":
            continue
        title, model = f"{type(rule).__name__}, {layout}, {backend}", nn.Sequential(nn.Embedding(V, K)).to(device)
        model[0].weight.data.copy_(W)
        handle = forge(model, rule, layout, embeddings=True, rung="slab", backend=backend, slab=4 * 128 * 256)
        twin, other = forged(W, rule, layout, "slab", backend, "0.weight")
        weight, state = model[0].weight, handle["0.weight"]
        for step in (1, 2, 3):
            classes, values = (draw(V // 2, N) + 9 * step) % V, weights if step == 1 else torch.ones_like(weights)
            dense = torch.zeros(V, K, device=device).index_add_(0, classes, E * values[:, None])
            handle.stash() if step == 3 else handle.arm(0.01, step)
            version = weight._version
            if step == 1:
                state.consume([Listed(filtering.listed_rows(E, torch.arange(N, device=device), classes, values, V))])
            else:
                out = model(classes[None])
                same = out.dtype == torch.float32 and torch.equal(out, weight[classes][None].float())
                base.require(same, f"{title}: the output is not the rows of the weight")
                (1.0 * out).backward(E.T.contiguous().T[None])  # strided
            if step == 3:
                handle.release(0.01, step)
            other.arm(0.01, step)
            other["0.weight"].step(dense)
            base.require(weight._version > version, f"{title}: autograd was not told")
            require_equal(title, everything(weight, handle), everything(twin, other))
            for told in (handle.gradient_norms(), other.gradient_norms()):
                off = abs(told.item() / dense.double().norm().item() - 1)
                base.require(off < 3e-7, f"{title}: the norm is off by {off:.1e}")
        handle.disarm()
        model(classes).backward(E)
        base.require(torch.equal(weight.grad.float(), dense), f"{title}: unarmed gradient")


def check_resume(device="cpu"):
    """A state that was saved and loaded goes on with the same bits; one of another rule, layout or shape is refused."""
    W, data = whole_numbers(20, 24, 40, device, steps=4)
    for layout, rule in itertools.product(LAYOUTS, (Muon(), AdamW())):
        straight, handle = forged(W, rule, layout, seed=7)
        for t, (X, dY) in enumerate(data, 1):
            if t == 3:
                saved, middle = copy.deepcopy(handle.state_dict()), straight.detach().clone()
            take_step(straight, handle, X, dY, 1e-2, t)
        resumed, second = forged(W, rule, layout)
        resumed.data.copy_(middle)
        order = {name: dict(sorted(rule.items())) for name, rule in saved["rules"].items()}  # as a file may keep it
        second.load_state_dict(saved | dict(rules=order))
        base.require(second.at_step == 2, "the number of the step is lost")
        for t, (X, dY) in enumerate(data[2:], 3):
            take_step(resumed, second, X, dY, 1e-2, t)
        base.require(torch.equal(straight, resumed), f"{layout}: a resumed run ends with other weights")
    for other in (forged(W, AdamW(eps=0.1), "int8"), forged(W, AdamW(), "master"), forged(W[:8], AdamW(), "int8")):
        must_raise("saved", lambda other=other: other[1].load_state_dict(saved))
    handle.disarm()
    must_raise("has no 'layout'", lambda: handle.load_state_dict({k: v for k, v in saved.items() if k != "layout"}))


# The drawing of section 9 as a table. What a call does in each phase: the phase after it; None: it raises, and nothing
# has changed. The check walks through all of it, on every rung: it brings a model into the phase, lets one backward
# pass leave there what the phase says, makes the call, and compares weights, states and what waits with copies.
CALLS = {
    "arm": dict(idle="armed", armed="armed", stashing=None),
    "stash": dict(idle="stashing", armed="stashing", stashing=None),
    "norm": dict(idle=None, armed=None, stashing="stashing"),
    "release": dict(idle=None, armed=None, stashing="idle"),
    "step_gradients": dict(idle="idle", armed=None, stashing=None),
    "load_state_dict": dict(idle="idle", armed=None, stashing=None),
    "disarm": dict(idle="idle", armed="idle", stashing="idle"),
}


def check_phases(device="cpu"):
    """The state machine: every call in every phase, and what backward leaves there."""
    x, given = torch.ones(4, 8, device=device), dict.fromkeys(("arm", "release", "step_gradients"), (0.1, 1))
    for (rung, backend), (call, after) in itertools.product(rungs(device), CALLS.items()):
        for phase, wanted in after.items():
            model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)]).to(device)
            handle, start, title = forge(model, AdamW(), rung=rung, backend=backend), copies(model), f"{rung}, {phase}"
            given["load_state_dict"] = (copy.deepcopy(handle.state_dict()),)
            if phase != "idle":
                handle.arm(0.1, 1) if phase == "armed" else handle.stash()
            model(x).sum().backward()
            kept = lambda handle=handle: {len(state.factors) for state in handle.states.values()}  # noqa: E731
            left = {p.grad is not None for p in model.parameters()}, kept(), {*map(torch.equal, start, copies(model))}
            right = {"idle": (True, 0, True), "armed": (False, 0, False), "stashing": (False, 1, True)}[phase]
            base.require(left == tuple({one} for one in right), f"{title}: backward left {left}")
            action, before = functools.partial(getattr(handle, call), *given.get(call, ())), snapshot(model, handle)
            if phase == "idle" and call in ("arm", "stash"):
                must_raise("has a gradient already", action)
                model.zero_grad()
            if wanted is None:
                require_refused(f"{title}: {call}()", [(f"the handle is {phase}", action)], model, handle)
                continue
            action()
            stepped = call == "release" or (call, phase) == ("step_gradients", "idle")
            found = handle.phase, kept(), {*map(torch.equal, copies(model), before)}
            right = wanted, {1} if call == "norm" else {0}, {not stepped}
            base.require(found == right, f"{title}: {call}() went to {found}, not {right}")


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


def snapshot(model, handle):
    """Copies of all that a step changes, and of all that waits."""
    waiting = [t for state in handle.states.values() for factor in state.factors for t in tensors_of(factor)]
    states = [t for state in handle.states.values() for t in state.tensors.values()]
    return copies(model) + [t.clone() for t in (*states, *waiting)]


def misuses(handle, model, x, tokens):
    """(words, call) of what would train wrongly, one after another, with an embedding and a layer."""
    table, layer = model
    yield "not armed", lambda: handle["1.weight"].step(x)
    for step, lr in ((0, 0.1), (1.5, 0.1), (1, -1.0), (1, math.nan), (1, math.inf), (1, "fast")):
        yield f"step={step}", functools.partial(handle.arm, lr, step)
    yield "forged already", lambda: forge(model, AdamW())
    handle.data_parallel = 2
    yield "2 data-parallel", functools.partial(handle.arm, 0.1, 1)
    yield "2 data-parallel", handle.stash
    handle.data_parallel = 1
    hook = layer.weight.register_hook(lambda grad: grad)
    yield "gradient hook", handle.stash
    if handle.rung != "hook":
        yield "gradient hook", functools.partial(handle.arm, 0.1, 2)
    hook.remove()
    for module in model:
        loss = model(tokens).sum()
        with torch.no_grad():
            module.weight.mul_(2)
        yield "changed between", loss.backward
        model.zero_grad()

    handle.arm(0.1, np.int64(1))
    yield "fp16", lambda: layer(x.half())
    yield "shape", lambda: layer(x[:, :7]), RuntimeError
    model(tokens)  # what failed was no use
    yield "used twice", lambda: table(tokens)
    if handle.rung != "hook":
        yield "used twice", lambda: layer(x)
    for rows, row in ((x, 5), (x, -1), (x[:, :4], 0), (x[0], 0)):
        yield "are not rows of", functools.partial(handle["1.weight"].step, rows, row)

    y = 1.0 * x.clone().requires_grad_()
    handle.stash()
    layer(y).sum().backward()
    yield "lr=-1", functools.partial(handle.release, -1, 1)
    y.detach().zero_()
    yield "changed in place", functools.partial(handle.release, 0.1, 1)
    yield "changed in place", lambda: layer(x).sum().backward()  # factors become a gradient now
    handle.disarm()
    handle.stash()
    layer(x).sum().backward()
    layer.weight.data = layer.weight.detach().clone()
    yield "moved or cast", functools.partial(handle.release, 0.1, 1)


def require_refused(title, refusals, model, handle):
    """Each of these calls raises with these words, and leaves weights, states, factors and phase as they are."""
    for words, call, *kind in refusals:
        before = handle.phase, snapshot(model, handle)
        must_raise(words, call, *kind)
        same = handle.phase == before[0] and all(map(torch.equal, before[1], snapshot(model, handle)))
        base.require(same, f"{title}: what was refused ({words}) left a trace")


def check_misuse(device="cpu"):
    """What would train wrongly raises, and changes nothing. Two things come too late for that, and raise after a step:
    a use of the weight outside its layer, and a forward pass before arm() that uses a weight twice. (v1 takes them as
    they are meant: autograd sums.) An error midway leaves nothing behind that a later step would use."""
    x, tokens = torch.ones(4, 8, device=device), torch.arange(4, device=device)
    late = dict(twice=lambda table, layer: layer(layer(table(tokens))).sum(),
                penalty=lambda table, layer: layer(table(tokens)).sum() + layer.weight.square().sum())
    for rung, backend in rungs(device):
        model, title = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8, bias=False)).to(device), f"{rung}, {backend}"
        handle, layer = forge(model, AdamW(), rung=rung, backend=backend, embeddings=True), model[1]
        twin = copy.deepcopy(model)
        twin(tokens).sum().backward()
        plain = twin[1].forged is None and twin[1].weight.grad is not None
        base.require(plain, "a copy of a forged model is no ordinary model")
        for release in (True, False):
            handle.stash() if release else None
            layer(x).sum().backward()
            waiting = [t for factor in handle["1.weight"].factors for t in tensors_of(factor)]
            base.require(not any(t.requires_grad for t in waiting), f"{title}: a factor keeps the graph")
            before, step = copies(model), handle.release if release else handle.step_gradients
            with mock.patch.object(State, "consume", side_effect=MemoryError("none left")):
                must_raise("none left", functools.partial(step, 0.1, 1), MemoryError)
            base.require(handle.phase == "idle" and layer.weight.grad is None, f"{title}: an error left its gradient")
            base.require(not handle["1.weight"].factors and all(map(torch.equal, before, copies(model))), title)
        loss = model(tokens).sum()
        handle.arm(0.1, 1)
        loss.backward(retain_graph=True)
        after = copies(model)
        must_raise("already had its step", loss.backward)
        once = not any(map(torch.equal, before, after)) and all(map(torch.equal, after, copies(model)))
        base.require(once, f"{title}: not one step")
        for name, use in late.items():
            handle.arm(0.1, 2) if rung == "hook" else handle.disarm()
            loss = use(*model)
            handle.arm(0.1, 2)
            loss.backward() if rung == "hook" else must_raise("already had its step", loss.backward)
            base.require(layer.weight.grad is None, f"{title}, {name}: a gradient is left")
        handle.disarm()
        require_refused(title, misuses(handle, model, x, tokens), model, handle)
    _, handle = forged(x, AdamW(), rung="hook", matrices={"weight": 1})  # autograd does not sum for 07's experts
    handle.arm(0.1, 1)
    handle["weight"].on_forward(handle["weight"].weight)
    must_raise("used twice", lambda: handle["weight"].on_forward(handle["weight"].weight))
    loaded, other = (nn.Linear(8, 8, bias=False).to(device) for _ in range(2))
    handle, theirs = forge(loaded, AdamW(), "master"), forge(other, AdamW(), "master").state_dict()
    for change, fits in ((lambda: handle.load_state_dict(theirs), False),
                         (lambda: loaded.load_state_dict(other.state_dict()), True),
                         (lambda: loaded.load_state_dict(dict(weight=torch.ones(8, 8))), False)):
        change()
        for call in (handle.arm, handle.step_gradients):
            call(0.1, 1) if fits else must_raise("master copy", lambda call=call: call(0.1, 1))
            handle.disarm()
    loaded.double()
    for call in (handle.arm, handle.step_gradients):
        must_raise("moved or cast", lambda call=call: call(0.1, 2))


def check_bad_input(device="cpu"):
    """What cannot be forged is refused in one line, and the model is as it was."""
    make = lambda: nn.Linear(8, 8, bias=False).to(device)  # noqa: E731
    tied, bare, frozen = nn.Sequential(nn.Embedding(8, 8), make()), make(), nn.ModuleList([make(), make()])
    tied[1].weight = tied[0].weight
    frozen[1].weight.requires_grad_(False)
    weight = bare.weight.detach().clone()
    for words, action in {
        "reduces gradients": lambda: forge(type("DistributedDataParallel", (nn.Sequential,), {})(bare), AdamW()),
        "2 data-parallel": lambda: forge(bare, AdamW(), "int8", data_parallel=2),
        "pass AdamW": lambda: forge(bare, "Shampoo"),
        "betas (a pair)": lambda: forge(bare, AdamW(betas=(0.9, 1.0))),
        "AdamW(betas=0.9": lambda: AdamW(betas=0.9),
        "eps is positive": lambda: AdamW(eps=0),
        "weight_decay is not": lambda: Muon(weight_decay=-1),
        "other is no weight": lambda: forge(bare, AdamW(), "int8", ranks={"other": None}),
        "equally large": lambda: Forge(dict(a=bare.weight), Muon(), matrices=dict(a=3)),
        "comes in rows": lambda: forge(nn.Sequential(nn.Embedding(8, 8)), Muon(), embeddings=True),
        "layout is": lambda: forge(bare, AdamW(), "fp8"),
        "rung is": lambda: forge(bare, AdamW(), "int8", rung="v3"),
        "seed is": lambda: forge(bare, AdamW(), "int8", seed=2**64),
        "origin of": lambda: forge(bare, AdamW(), "int8", origins={"weight": (0, 64)}),
        "(-1, 0)": lambda: forge(bare, AdamW(), "int8", origins={"weight": (-1, 0)}),
        "(0, -1)": lambda: forge(bare, AdamW(), origins={"weight": (0, -1)}),
        "no weight": lambda: forge(nn.ReLU(), AdamW()),
        "known are 0, ": lambda: forge(nn.Sequential(bare), AdamW(), skip="head"),
        "'nothing' is not in": lambda: forge(bare, AdamW(), classifier="nothing"),
        "pass matrices": lambda: forge(make().half(), AdamW()),
        "a is a Tensor": lambda: Forge(dict(a=torch.zeros(())), AdamW()),
        "above 0": lambda: clip_scale(torch.ones(()), 0),
        "is frozen": lambda: forge(frozen, AdamW(), "int8", classifier="1.weight"),
        "is used twice": lambda: forge(tied, AdamW()),
        "two names": lambda: Forge(dict(a=bare.weight, b=bare.weight), AdamW()),
        "on several devices": lambda: Forge(
            dict(a=bare.weight, b=nn.Parameter(torch.zeros(8, 8, device="meta"))), AdamW()),
        **{option: lambda option=option: forge(nn.Embedding(8, 8, **{option: 1}), AdamW(), embeddings=True)
           for option in PLAIN_EMBEDDING},
    }.items():
        must_raise(words, action)
    plain = frozen[0].weight.dtype == torch.float32 and type(frozen[0]) is type(bare) is nn.Linear
    base.require(plain and torch.equal(bare.weight, weight), "a refused forge() changed the model")
    late = nn.ModuleList([make(), nn.Embedding(8, 8)])
    late[1].weight = late[0].weight
    handle = forge(late, AdamW(), rung="hook", embeddings=True)
    base.require(handle["1.weight"].table and list(handle.states) == ["0.weight"], "a tied embedding is a table")
    must_raise("used twice", lambda: handle.arm(0.1, 1))


# The dispatcher and the cost model have no results of their own that a wrong one would spoil: a plan that never fuses
# trains as well, only slower, and a forecast of bytes is believed. So their answers are worked out by hand, once:
#
#     4096 x 4096, slab of 32 MiB     a row is 16 KiB: 2,048 rows; v3 up to 1,024 tokens in fp32, 512 in master
#     50304 x 768                     a row is 3 KiB: 10,922 rows, cut to a multiple of 128
#     4096 x 131072                   a row is 512 KiB: 64 rows, fewer than 128, and taken as they are
#     4096 x 32768                    16 slabs: v3 up to 512 tokens in master; with a row more, up to 1,024
#     64 matrices of 768 x 768        2.25 MiB each: 14 fit


def check_plans():
    """The dispatcher and the cost model, against what the comments of section 3 and 7 say, worked out by hand."""
    adamw, mini, muon = AdamW(), AdamMini(), Muon()
    for (rule, *arguments), want in {
        (adamw, 4096, 4096, 1024, "fp32"): ("fused", 0), (adamw, 4096, 4096, 1025, "fp32"): ("slab", 2048),
        (adamw, 4096, 4096, 512, "master"): ("fused", 0), (adamw, 4096, 4096, 513, "master"): ("slab", 2048),
        (adamw, 4096, 4096, 128, "int8"): ("slab", 2048), (adamw, 4096, 4096, 0, "fp32"): ("slab", 2048),
        (adamw, 768, 3072, 16, "fp32"): ("slab", 768), (adamw, 2730, 3072, 16, "fp32"): ("slab", 2730),
        (adamw, 50304, 768, 0, "master"): ("slab", 10880), (adamw, 8, 2**24, 0, "int8"): ("slab", 1),
        (adamw, 4096, 2**17, 0, "fp32"): ("slab", 64), (adamw, 4096, 4096, 0, "fp32", "fused"): ("fused", 0),
        (adamw, 4096, 2**15, 1024, "master"): ("slab", 256), (adamw, 4097, 2**15, 1024, "master"): ("fused", 0),
        (adamw, 16384, 16384, 1025, "master"): ("slab", 512), (mini, 4096, 4096, 16, "fp32", "fused"): ("slab", 2048),
        (muon, 4096, 4096, 16, "fp32", "hook"): ("matrix", 4096),
        (muon, 8 * 768, 768, 16, "int8", "auto", SLAB, 8): ("matrix", 8 * 768),
        (muon, 64 * 768, 768, 16, "int8", "auto", SLAB, 64): ("matrix", 14 * 768),
        (muon, 64 * 4096, 4096, 16, "int8", "auto", SLAB, 64): ("matrix", 4096),
    }.items():
        got = plan_step(rule, *arguments)
        base.require(got == (*want, 4 * want[1] * arguments[1]), f"{rule}, {arguments}: {got}, not {want}")
    hook = plan_step(adamw, 64, 32, 16, "int8", "hook").bytes  # autograd's gradient has the weight's dtype
    base.require(hook == 2 * 64 * 32 and whole_slabs(5000, 2048) == 4096 and whole_slabs(500, 2048) == 500, "slabs")
    held = {layout: (state_bytes(adamw, layout), state_bytes(muon, layout)) for layout in LAYOUTS}
    base.require(held == {"fp32": (8, 4), "master": (12, 8), "int8": (2.0625, 1.03125)}, f"bytes held: {held}")
    moved = {layout: (traffic_bytes(adamw, layout, 0), traffic_bytes(adamw, layout, 4)) for layout in LAYOUTS}
    base.require(moved == {"fp32": (24, 32), "master": (26, 34), "int8": (8.125, 16.125)}, f"bytes moved: {moved}")
    factors = crossover([(4096, 4096)]), stash_bytes([(4096, 4096)] * 2, 512, inputs=[4096])
    base.require(factors == (4096, 12 * MIB), f"factors of 4096 x 4096: {factors}")
    flops, held = orthogonal_flops(2, 3), orthogonal_bytes(2, 3)
    base.require((flops, held) == (5 * (4 * 12 + 2 * 8), 2 * (2 * 6 + 3 * 4)), "Muon's products")


# Memory is a claim like any other. Six layers of 4 MiB: an ordinary step has 24 MiB of gradients at its peak, v1 one
# layer, v2 and v3 none beside the buffer that was there before. What else is alive is counted, too, so that the formula
# is right to a per cent, and a tensor more would show.


def peak_of_step(device, ordinary=False, **options):
    """Bytes that backward and the step, inside it or ordinary, hold at their peak beyond what is alive after forward,
    in the second step."""
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])
        x, handle = torch.randn(64, 1024), forge(model, AdamW(), **options)
    for step in (1, 2):
        handle.disarm() if ordinary else handle.arm(1e-3, step)
        loss = model(x).sum()
        work = [loss.backward, *[functools.partial(handle.step_gradients, 1e-3, step)] * ordinary]
        peak = base.peak_bytes(lambda work=work: [part() for part in work], device)
    return peak


def peak_by_formula(rung, backend):
    """Those bytes: dX and dY; of torch_step g, m, v and the root's two fp64 of a piece; in v1, where dY is gone when
    the hook runs, a layer's dW; in an ordinary step the dW of all six (and by then, which only a GPU's allocator
    tells, the inputs of five of them, made in forward, are gone). v2's slab was there before."""
    dW, dX, pieces = 4 * 1024**2, 4 * 64 * 1024, 4 * 7 * PIECE * (backend == "torch")
    ordinary, hook = 6 * dW + (pieces or dX - 5 * dX), dW + dX + max(dX, pieces)
    return dict(ordinary=ordinary, hook=hook).get(rung, 2 * dX + pieces)


def check_memory(device="cpu"):
    """The gradients of six equal layers are never alive together: v1 holds one, v2 one slab, v3 none; a classifier's
    backward holds neither dC nor the logits."""
    for rung, backend in rungs(device):
        if is_slow(backend):
            continue  # the same buffers
        peak, limit = peak_of_step(device, rung=rung, backend=backend), peak_by_formula(rung, backend)
        base.require(peak <= 1.01 * limit, f"{rung}, {backend}: {peak} bytes at the peak, expected {limit}")
    N, V, D = 64, 2**16, 128
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.float32, device))
    for backend in cce.backends(device):
        if is_slow(backend):
            continue
        weight, handle = forged(C, AdamW(), rung="auto", backend=backend, tables=["weight"], slab=4 * MIB)
        e = E.requires_grad_()

        def step():
            handle.arm(1e-3, 1)  # noqa: B023
            options = dict(gradient="exact", workspace=MIB)
            forge_classifier(e, weight, x, handle["weight"], **options).backward()  # noqa: B023

        step()
        peak = base.peak_bytes(step, device)
        base.require(peak < C.nbytes / 4, f"{backend}: {peak / C.nbytes:.2f} of the gradient's bytes at the peak")


# The classifier has three ways to the same step, and each is a check of the others: armed, with slices of G^T E, or
# lists, each stepped as soon as it is made; dC in fp32, kept, and stepped later; what makes dC, kept. The first two
# have to agree bit for bit, since they sum the same numbers in the same order; the third, which makes G again in slices
# of another size, to a few roundings. What is kept is set by the price of factors.


def classifier_ways(device, dtype, D):
    """(gradient, rung, backend) that run on this device."""
    ways = [("exact", rung, backend) for rung, backend in rungs(device) if rung != "hook"]  # of tables slab's
    if torch.device(device).type == "cpu":  # cuSPARSE does not promise the same bits twice
        ways.append(("sparse", "slab", "torch"))
    return ways + [("sparse", "slab", "triton")] * ("triton" in filtering.filter_backends(device, dtype, D))


CLASSIFIERS = (("fp32", torch.float32, None), ("fp32", torch.bfloat16, 5.0), ("master", torch.bfloat16, None),
               ("int8", torch.bfloat16, None))  # layout, dtype of E, softcap


KEPT = {"dC": math.inf, "armed": None, "factors": 0}  # CLASSIFIER_PRICE


def classifier_step(price, E, x, state, t, options):
    """One step: loss, dE, the norm of dC, what was kept of it."""
    leaf, handle = E.clone().requires_grad_(), state.handle
    handle.arm(1e-2, t) if price is None else handle.stash()
    with mock.patch.object(sys.modules[__name__], "CLASSIFIER_PRICE", price):
        loss = forge_classifier(1.0 * leaf, state.weight, x, state, **options)  # a factor must not keep this graph
        loss.backward()
    kept = state.factors
    norm = handle.gradient_norms() if price is None else handle.norm()
    handle.release(1e-2, t) if price is not None else None
    return loss, leaf.grad, norm, kept


def check_classifier(device="cpu", N=24, V=300, D=40, cases=CLASSIFIERS):
    """forge_classifier makes 03's loss and dE and, from 03's dC, the bits of State.step, in several slices of the
    vocabulary, with ignored tokens. In fp32 that dC is 03's own; in bf16 03 would round it, so there it is the same sum
    in fp32 (v3's in registers is another, to the last places). What waits, as factors or as dC, is the same step."""
    if torch.device(device).type == "cuda":
        V = 10 * V  # the least blocks of a GPU are larger
    rule = AdamW(eps=0.5, weight_decay=0.1)
    for layout, dtype, softcap in cases:
        E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, dtype, device))
        x = x.where(torch.arange(N, device=device) % 7 > 0, -100)
        for gradient, rung, backend in classifier_ways(device, dtype, D):
            slow = is_slow(backend)
            if softcap and gradient == "sparse" or slow and layout != cases[-1][0]:
                continue
            options = dict(gradient=gradient, softcap=softcap, workspace=1 << 21 if gradient == "sparse" else 1)
            options |= dict(backend=backend, reduction="sum")
            way, states = dict(rung=rung, backend=backend, tables=["weight"], slab=4 * 1024 * D), {}
            norms, leaf, plain = {}, E.clone().requires_grad_(), nn.Parameter(C.clone())
            want = filtering.linear_cross_entropy(leaf, plain, x, **options)
            dE, dC = torch.autograd.grad(want, (leaf, plain))  # 03's own
            for kind, price in KEPT.items():
                title = f"{layout}, {dtype}, {gradient}, {rung}, {backend}, {kind}"
                _, handle = forged(C.float(), rule, layout, **way)
                state = states[kind] = handle["weight"]
                for t in (1, 2)[: 1 if slow else 2]:
                    loss, de, norm, kept = classifier_step(price, E, x, state, t, options)
                    if kind == "dC":
                        norms[t] = kept[0].gradient.double().norm()
                    right = {"dC": Dense, "factors": Listed if gradient == "sparse" else Classes}.get(kind)
                    base.require([type(factor) for factor in kept] == [right] * (right is not None), f"{title}: kept")
                    waiting = [tensor for factor in kept for tensor in tensors_of(factor)]
                    base.require(not any(t.requires_grad for t in waiting), f"{title}: a factor keeps the graph")
                    off = abs(norm / norms[t] - 1).item()
                    base.require(off < 3e-7, f"{title}: the norm is off by {off:.1e}")
                    if t == 1:
                        base.require(torch.equal(loss, want) and torch.equal(de, dE), f"{title}: loss or dE")
                        same = kind != "dC" or dtype != torch.float32 or torch.equal(kept[0].gradient, dC)
                        base.require(same, f"{title}: not 03's gradient")
            title = title.removesuffix(", factors")
            if rung != "fused":
                require_equal(title, *[everything(states[kind].weight, states[kind].handle)
                                       for kind in ("armed", "dC")])
            kept, limit = decoded(states["dC"]), 2e-2 if layout == "int8" else 1e-5
            if layout == "int8":
                del kept["W"]  # rounded by chance
            for (kind, state), (name, right) in itertools.product(states.items(), kept.items()):
                start = C.float() if name == "W" else 0
                off = cce.error(decoded(state)[name] - start, right - start)
                base.require(off < limit, f"{title}, {kind}: {name} is off by {off:.1e}")


def misuses_of_classifier(handle, weight, loss, e, x):
    """(words, call) of what would train wrongly, one after another, with a classifier."""
    plain, linear = forged(weight.detach(), AdamW())
    handle.arm(0.1, 1)
    with torch.no_grad():
        loss(e)  # no use
    torch.autograd.grad(loss(e), e)  # not after C's gradient: no step
    other = nn.Parameter(weight.detach().clone())
    yield "used twice", lambda: loss(e)
    yield "bias", lambda: loss(e, bias=torch.zeros(len(weight), device=e.device))
    yield "gradient is", lambda: loss(e, gradient="filter")
    yield "fp16", lambda: loss(e.half())
    yield "was replaced", lambda: loss(e, C=other)
    yield "pass classifier=", lambda: forge_classifier(e, plain, x, linear["weight"])
    for gradient in ("exact", "sparse"):
        handle.arm(0.1, 2)
        total = loss(e, gradient=gradient)
        handle.disarm()
        yield "disarmed", total.backward
    handle.arm(0.1, 2)
    total = loss(e.bfloat16())
    with torch.no_grad():
        weight.mul_(1)
    yield "changed between", total.backward
    handle.stash()
    loss(e).backward()
    with torch.no_grad():
        weight.mul_(1)
    yield "changed in place", functools.partial(handle.release, 0.1, 2)


def check_classifier_use(device="cpu", N=24, V=300, D=128):
    """Unarmed, C gets 03's gradient, and another C will do. What would go wrong raises, and changes nothing; a second
    backward pass raises after the first. Factors of micro-batches that no longer pay become dC; a sparse gradient that
    backward takes back is the exact step, at once or later."""
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.float32, device))
    e, other = E.clone().requires_grad_(), nn.Parameter(C.clone())
    weight, handle = forged(C, SGD(), tables=["weight"])
    loss = functools.partial(forge_classifier, C=weight, targets=x, state=handle["weight"], gradient="exact")
    total = loss(e)
    total.backward()
    dE, dC = torch.autograd.grad(filtering.linear_cross_entropy(e, weight, x, backend="torch"), (e, weight))
    same = torch.equal(e.grad, dE), torch.equal(weight.grad, dC), torch.equal(loss(e, C=other), total)
    base.require(all(same), f"unarmed: not the gradients of 03's loss: {same}")
    weight.grad = None
    handle.arm(1.0, 1)
    total = loss(e.bfloat16())  # C is cast: else autograd would notice
    total.backward(retain_graph=True)
    must_raise("already had its step", total.backward)
    base.require(cce.error(weight.detach() - C, -dC) < 0.012, "twice backward: not one step")
    handle.disarm()
    require_refused("classifier", misuses_of_classifier(handle, weight, loss, e, x), nn.ParameterList([weight]), handle)

    for later, passes, gradient in ((False, 1, "sparse"), (True, 1, "sparse"), (True, 5, "exact")):
        weight, handle = forged(C, SGD(), tables=["weight"])
        handle.stash() if later else handle.arm(1.0, 1)
        kinds = []
        for _ in range(passes):
            with mock.patch.object(filtering, "refusal", lambda *numbers: "refused"):
                e = E.clone().requires_grad_()
                forge_classifier(e, weight, x, handle["weight"], gradient=gradient).backward()
            kinds.append([type(factor) for factor in handle["weight"].factors])
        want = [[[Classes] * n for n in (1, 2, 3)] + [[Dense]] * 2, [[]]][not later][:passes]
        base.require(kinds == want, f"{passes} backward passes, {gradient}: {kinds} are kept")
        handle.release(1.0, 1) if later else None
        off = cce.error(weight.detach() - C, -passes * dC)
        base.require(off < 8e-7, f"{passes} backward passes, {gradient}: the step is off by {off:.1e}")


# What waits has no bits to compare with: micro-batches are summed in another order than a whole batch. There the
# three-way rule holds: our weights may be as far from those of fp64 as torch's in fp32 are, and not further.


class TinyLM(nn.Module):
    """What is hard for a fused schedule: one matrix is embedding and classifier, another has two names and uses."""

    def __init__(self, V, D, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding, self.twice, self.out = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.again = self.twice
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / (5 if p.dim() == 2 else 10)
        self.classifier = self.embedding.weight
        self.head = None  # a State, once it is forged

    def forward(self, tokens, targets):
        E = self.embedding(tokens)  # (N, D)
        E = self.out(F.gelu(self.again(F.gelu(self.twice(E)))))
        if self.head is None:
            return base.linear_cross_entropy_reference(E, self.classifier, targets)
        return forge_classifier(E, self.classifier, targets, self.head, gradient="exact", workspace=1)


def check_stash(device="cpu", sizes=(4, 24, 200), V=300, D=32):
    """Micro-batches, clipping, a tied and a reused weight: against clip_grad_norm_ and AdamW on the whole batch, by the
    three-way rule; with factors that give the norm by inner products, by slabs, and that turn into gradients. Before
    each step a micro-batch of NaN: the norm tells, and after disarm() not a bit has changed."""
    rule = AdamW(eps=0.5, weight_decay=0.1)
    for tokens in sizes:
        generator = torch.Generator().manual_seed(tokens)
        steps = [torch.randint(V, (2, 4 * tokens), generator=generator).to(device) for _ in range(3)]
        for clip in (math.inf, 1e-2, 100.0):
            ends, norms = [], []
            for dtype in (torch.float64, torch.float32):
                model = TinyLM(V, D).to(device, dtype)
                optimizer = library_step(rule, list(model.parameters()))
                for step, (x, y) in enumerate(steps, 1):
                    optimizer.zero_grad()
                    model(x, y).backward()
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
                    optimizer.param_groups[0]["lr"] = 1e-2 * step
                    optimizer.step()
                ends.append([p.detach() for p in model.parameters()])
            for rung, backend in rungs(device):
                if is_slow(backend) and (tokens, clip, rung) != (sizes[0], 1e-2, "fused"):
                    continue
                title = f"{4 * tokens} tokens, clip {clip}, {rung}, {backend}"
                model = TinyLM(V, D).to(device)
                handle = forge(model, rule, rung=rung, backend=backend, embeddings=True, classifier="classifier")
                model.head, others = handle["classifier"], list(handle.ordinary.values())
                optimizer = library_step(rule, others)
                must_raise("stash() and release()", lambda: handle.arm(1e-2, 1))  # noqa: B023
                for step, (x, y) in enumerate(steps, 1):
                    optimizer.param_groups[0]["lr"] = 1e-2 * step
                    for bad in (True, False):
                        before = snapshot(model, handle)
                        optimizer.zero_grad()
                        handle.stash()
                        for part in range(4):
                            i = slice(part * tokens, (part + 1) * tokens)
                            (0.25 * model(x[i], y[i]) * (math.nan if bad and part == 2 else 1.0)).backward()
                        norm = handle.norm(others)
                        base.require(bool(norm.isfinite()) != bad, f"{title}: a norm of {norm} (NaN: {bad})")
                        if bad:
                            handle.disarm()
                            same = all(map(torch.equal, before, snapshot(model, handle)))
                            base.require(same, f"{title}: a step that was left out changed something")
                    scale = clip_scale(norm, clip)
                    handle.release(1e-2 * step, step, scale)
                    for p in others:
                        p.grad.mul_(scale)
                    optimizer.step()
                off = abs(norm.item() / norms[2] - 1)
                limit = abs(norms[5] / norms[2] - 1) + 3e-7
                base.require(off <= limit, f"{title}: the norm is off by {off:.1e}, torch's by {limit:.1e}")
                for (name, p), peer, want in zip(model.named_parameters(), ends[1], ends[0], strict=True):
                    cce.require_as_good(f"{title}: {name}", p.detach(), peer, want, 1e-7)


def check_factors(device="cpu", M=160, K=600):
    """The norm from factors, by inner products where they are cheaper; the sum over factors of all kinds, in several
    slabs; that the smaller of factors and gradient is what is kept; uses outside the layer, in several passes."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    more = draw(M, K)
    for N, (rung, backend) in itertools.product((16, 120, 135, 300), rungs(device)):
        X, dY = draw(N, K).bfloat16(), draw(N, M).bfloat16()
        dW, title = dY.double().T @ X.double(), f"{N} tokens, {rung}, {backend}"
        weight, handle = forged(torch.zeros(M, K, device=device), SGD(), "fp32", rung, backend)
        state = handle["weight"]
        handle.stash()
        base.require(handle.norm() == 0, f"{title}: a norm of nothing")
        for part in (slice(0, N // 2), slice(N // 2, N)):
            state.keep(Product(dY[part], X[part]))
        held, smaller = factor_bytes(state.factors), min(2 * N * (M + K), 4 * M * K)
        base.require(held == smaller, f"{title}: {held} bytes kept, not {smaller}")
        ghost, buffer = N * (M + K) < M * K, handle.buffer
        with mock.patch.object(handle, "buffer", side_effect=buffer) as made:
            off = abs(handle.norm().item() / dW.norm().item() - 1)
        base.require(off < 2e-6, f"{title}: the norm is off by {off:.1e}")
        slabs = made.called or isinstance(state.factors[0], Dense)
        base.require(slabs != ghost, f"{title}: the norm was made {'by slabs' if slabs else 'by inner products'}")
        for scale in (2.0, 3.0):  # uses outside the layer, in two passes
            (scale * weight * more).sum().backward()
        dW += 5 * more.double()
        off = abs(handle.norm().item() / dW.norm().item() - 1)
        base.require(off < 7e-7, f"{title}: the norm of several kinds is off by {off:.1e}")
        if isinstance(state.factors[0], Dense):
            X.zero_()  # which nobody needs any more
        handle.release(1.0, 1)
        base.require(cce.error(weight.detach(), -dW) < 5e-7, f"{title}: another update")
        base.require(handle.phase == "idle" and not (state.factors or state.seen), f"{title}: factors are left")
    a, b = draw(1500, 3), draw(1500, 5)
    off = cce.error(ghost_square(a, b), (a.double().T @ b.double()).square().sum())
    base.require(off < 3e-7, f"a ghost norm in pieces is off by {off:.1e}")


def check_graph(device="cuda"):
    """A captured CUDA graph, armed anew before each replay, makes the bits of eager steps, and nothing is compiled
    for a new step or rate (GPU only)."""
    W, data = whole_numbers(64, 256, 512, device, steps=4)
    for layout, (rung, kernel) in itertools.product(LAYOUTS, dict(slab=step_kernel, fused=forge_kernel).items()):
        eager, handle = forged(W, AdamW(), layout, rung, "triton")
        counts = set()
        for t, (X, dY) in enumerate(data, 1):
            take_step(eager, handle, X, dY, 1e-3 * t, t)
            counts.add(sum(len(cache[0]) for cache in kernel.device_caches.values()))
        base.require(len(counts) == 1, f"{layout}, {rung}: a step compiled a kernel")
        weight, handle = forged(W, AdamW(), layout, rung, "triton")
        X, dY = (t.clone() for t in data[0])
        handle.arm(0.0, 1)  # capture runs nothing
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weight_update(handle["weight"], Product(dY, X))
        for t, (x, dy) in enumerate(data, 1):
            X.copy_(x)
            dY.copy_(dy)
            handle.arm(1e-3 * t, t)
            graph.replay()
        base.require(torch.equal(eager, weight), f"{layout}, {rung}: the graph's steps differ")


class Stack(nn.Module):
    """What replay() takes: tokens -> E; a table, matrices and a norm. Its loss is forge_classifier."""

    def __init__(self, V, D):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding, self.norm = nn.Embedding(V, D), nn.RMSNorm(D)
        self.up, self.down = nn.Linear(D, 3 * D, bias=False), nn.Linear(3 * D, D)
        self.classifier = nn.Parameter(torch.empty(V, D))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 5

    def forward(self, tokens):
        x = self.embedding(tokens)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def check_replay(device="cuda", V=300, D=64, N=500, layouts=("fp32", "int8")):
    """Replayed passes make the bits of eager ones, and are not taken for others: after one without gradients, after one
    of another shape, after weights were changed while a pass was begun. Misuse is told (GPU only)."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(V, (2, N), generator=generator).to(device).unbind() for _ in range(10)]
    ends = {}
    for layout, way in itertools.product(layouts, ("eager", "replayed")):
        model = Stack(V, D).to(device)
        handle = forge(model, AdamW(), layout, embeddings=True, classifier="classifier",
                       rules={"up.weight": Muon(), "down.weight": Muon()})
        if way == "replayed":
            replay(model, handle)
        others, run = torch.optim.AdamW(handle.ordinary.values()), model.forward
        loss = lambda E, y: forge_classifier(E, model.classifier, y, handle["classifier"], workspace=1)  # noqa: E731,B023
        for step, (x, y) in enumerate(data, 1):
            if step == 5:
                with torch.no_grad():
                    model(x[:7])
            if step == 9:
                with torch.no_grad():
                    model.norm.weight.mul_(2)
            handle.arm(1e-3 * step, step)
            with torch.autocast("cuda", torch.bfloat16):
                if way == "replayed" and step == 7:
                    E = model(x)
                    must_raise("is used twice", lambda: model(x))  # noqa: B023
                    must_raise("another forward pass", E.sum().backward)
                    handle.arm(1e-3 * step, step)
                total, version = loss(model(x), y), model.up.weight._version
            recorded = way == "replayed" and bool(run.graphs)
            base.require(recorded == (way == "replayed" and step not in (1, 5)), f"{way}, step {step}: {recorded}")
            total.backward()
            told = model.up.weight._version > version and all(state.stepped for state in handle.states.values())
            base.require(told, f"{way}, step {step}: nobody was told of the step")
            others.step()
            others.zero_grad()
            if way == "replayed" and step < len(data):
                run.ahead(data[0 if step == 3 else step][0])
        kept = {name: t for s in handle.states.values() for name, t in s.tensors.items()}
        # 2 and 6 record; ahead are 7 (of 3, 4, 5, 7, 8, 9, 10); again come 4, other tokens, twice 7, and 9.
        launched = run.number if way == "replayed" else 13
        base.require(launched == 13, f"{launched} passes were launched")
        ends[layout, way] = {**dict(model.named_parameters()), **kept, "norms": handle.gradient_norms()}
    for layout in layouts:
        require_equal(f"replayed, {layout}", ends[layout, "replayed"], ends[layout, "eager"])


CHECKS = [check_steps, check_library, check_orthogonal, check_muon_use, check_checkpointing]
CHECKS += [check_rounding, check_shards, check_codes, check_linear, check_listed, check_resume]
CHECKS += [check_phases, check_misuse, check_bad_input, check_plans, check_memory, check_classifier]
CHECKS += [check_classifier_use, check_stash, check_factors]
CHECKS += [check_graph, check_replay] * (base.HAS_CUDA and HAS_TRITON)


# ==== 13. The bugs of --break =========================================================================================
#
# Each of these is easily made. update-first: dX from the new weights, the classic of steps inside backward.
# fp32-scalars: bias corrections on the device. truncate: a cast that rounds towards 0, so that weights shrink.
# shard-noise: random numbers that belong to a rank. no-floor: a v > 0 stored as 0. old-slab: a buffer that still holds
# the slab before. listed-rows-only: "lazy" Adam, which forgets the decay and momentum of rows that were not met.
# last-micro-batch, ghost-of-each-token: what accumulation and clipping get wrong. deaf: a tied weight stepped twice.
# down-the-columns, one-stack, no-nesterov, wrong-side: a rule that sees rows or matrices is given others.
# all-gradients: steps inside backward, and yet nothing forgotten. local-rows: a slice that takes itself for the first.


class _Fp32Scalars(AdamW):
    def scalars(self, lr, step):
        """1 - b2^t from an fp32 b2^t."""
        unbias = float(1 / np.sqrt(np.float32(1) - np.float32(self.betas[1]) ** np.float32(step)))
        return super().scalars(lr, step)._replace(unbias=unbias)


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "fp32-scalars": (check_steps, "AdamW", _Fp32Scalars),
    "old-slab": (check_steps, "weight_gradient", lambda dY, X, out, add=False: out.add_(dY.float().T @ X.float())),
    "down-the-columns": (check_steps, "row_norms", lambda G: torch.linalg.vector_norm(G, dim=0).repeat(4)[: len(G)]),
    "one-stack": (check_steps, "orthogonal", lambda U, of=orthogonal: of(U.view(-1, U.shape[-1]))),
    "no-nesterov": (check_steps, "look_ahead_torch", lambda g, m, b1: m),
    "wrong-side": (check_orthogonal, "rate_of_shape", lambda M, K: math.sqrt(max(1, K / M))),
    "update-first": (check_steps, "dx_then_update", lambda dx, update: (update(), dx())[::-1]),
    "truncate": (check_rounding, "round_to_bf16", lambda x, noise: (x.view(torch.int32) & -65536).view(torch.float32)),
    "shard-noise": (check_shards, "random_bits", lambda seed, step, number, row, col, *size, bits=random_bits: (
        bits(seed, step, number, 0, 0, *size))),
    "no-floor": (check_codes, "V_FLOOR", tl.constexpr(0)),
    "listed-rows-only": (check_library, "torch_step", lambda state, f, gradient, row, *muon, step=torch_step: [
        step(state, f, gradient[i : i + 1], row + i) for i in gradient.any(1).nonzero().flatten().tolist()]),
    "deaf": (check_misuse, "State", type("State", (State,), dict(on_forward=lambda self, weight: None))),
    "all-gradients": (check_memory, "step_in_hook", lambda state, kept=[], hook=step_in_hook: (  # noqa: B006  for good
        state.weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad)), hook(state))),
    "local-rows": (check_classifier, "Sink", type("Sink", (Sink,), dict(
        rows=lambda self, start, G, E, rows=Sink.rows: rows(self, 0, G, E)))),
    "last-micro-batch": (check_stash, "State", type("State", (State,), dict(
        keep=lambda self, *factor, keep=State.keep: (self.factors.clear(), keep(self, *factor))[1]))),
    "ghost-of-each-token": (check_factors, "ghost_square", lambda dY, X: (
        dY.double().square().sum(1) @ X.double().square().sum(1))),
}


# ==== 14. Measurements ================================================================================================
#
# Three questions. What is held (bytes, which are predicted to a few per cent on either device); what moves (bytes
# again, read off the time of a step at the rate at which the same GPU copies); and when is it worth it: dW and step
# beside torch's fused optimizer by shape and tokens, in one table, and a classifier's whole step beside the same in two
# parts.


def measure_bytes(device, ledger):
    """Bytes a parameter by layout, and what backward and step hold beyond what is alive after forward."""
    for rule, layout in (*((AdamW(), layout) for layout in LAYOUTS), (Muon(), "fp32")):
        weight, handle = forged(torch.zeros(512, 1024, device=device), rule, layout)
        measured = sum(t.nbytes for t in everything(weight, handle).values()) / weight.numel()
        held = LAYOUTS[layout].weight.itemsize + state_bytes(rule, layout)
        ledger.row(f"{type(rule).__name__}, {layout}: held", "W + state", held, measured, "B", (1, 1))
    _, handle = forged(torch.zeros(768, 3072, device=device), Muon(), backend="auto")
    gradient = handle.buffer(768 * 3072).view(768, 3072).normal_()
    work = functools.partial(handle["weight"].step_matrices, gradient, 0)
    handle.arm(0.0, 1)
    work()
    predicted = orthogonal_bytes(768, 3072, handle.narrow.itemsize)
    ledger.row("Muon, 768 x 3072: beside dW", "2 M K + 3 m^2", predicted / MIB, base.peak_bytes(work, device) / MIB)
    backend = "triton" if device.type == "cuda" and HAS_TRITON else "torch"
    formulas = {"ordinary step": "dW of six layers", "v1, hook": "dW of one, dX, dY", "v2, slab": "dX, dY"}
    for name, formula in (formulas | {"v3, fused": "dX, dY"} if backend == "triton" else formulas).items():
        rung = name.split()[-1] if name[0] == "v" else "ordinary"
        options = dict(ordinary=True) if rung == "ordinary" else dict(rung=rung)
        ledger.row(f"{name}: beyond forward", formula + ", blocks" * (backend == "torch"),
                   peak_by_formula(rung, backend) / MIB, peak_of_step(device, **options) / MIB, band=(0.95, 1.05))


def measure_gpt(ledger, tokens=16):
    """What a whole step of a GPT of GPT-2 small's layers holds beyond weights and states, with few tokens."""
    config = base.GPTConfig(256, tokens, 12, 12, 768)
    x = torch.randint(256, (1, tokens), device="cuda")
    for layout, name in (("fp32", "fused"), ("fp32", "forge"), ("master", "forge")):
        dtype = LAYOUTS[layout].weight
        activations = base.activation_bytes(config, tokens, fused_norm=True) * dtype.itemsize / 4
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = base.GPT(config).to(dtype)
        model.embedding.requires_grad_(False)
        model.classifier.requires_grad_(False)
        size = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
        handle = forge(model, AdamW(), layout) if name == "forge" else None
        rest = handle.ordinary.values() if handle else [p for p in model.parameters() if p.requires_grad]
        others = torch.optim.AdamW(rest, fused=not handle)

        def train_step(step, model=model, handle=handle, others=others):
            if handle:
                handle.arm(1e-3, step)
            model(x).float().square().mean().backward()
            others.step()
            others.zero_grad()

        train_step(1)
        peak = base.peak_bytes(functools.partial(train_step, 2), "cuda")
        if handle:
            ledger.row(f"GPT, {layout}, forge", "slab + activations", (handle.slab.nbytes + activations) / MIB,
                       (peak + handle.slab.nbytes) / MIB, band=(0.95, 1.05))
        else:
            ledger.row(f"GPT, {layout}, AdamW({name})", "gradients", size / MIB, peak / MIB, band=(0.95, 1.05))


# A step of one matrix takes tens of microseconds, as much as its launches. In training the host runs ahead and hides
# them; a CUDA graph does so here. And it is short enough that its state would stay in the L2 cache from one replay to
# the next, as it does not in a model: so a graph steps several matrices, together larger than the cache.


def in_graph(work):
    """Median microseconds of each of the functions in `work`, in a CUDA graph, which leaves no launch gaps: pass
    several with buffers of their own, so that nothing is in cache that would not be."""
    time = triton.testing.do_bench_cudagraph(lambda: [fn() for fn in work], rep=20, return_mode="median")
    return 1e3 * time / len(work)


def measure_traffic(device, ledger, M=8192, K=8192):
    """Bytes a parameter that the step moves, at the rate at which the same GPU copies: dW is read, not written."""
    a = torch.empty(2**28, device=device)
    rate = 2 * a.nbytes / in_graph([functools.partial(torch.add, a, 1.0, out=torch.empty_like(a))])  # a microsecond
    del a
    print(f"\na copy moves {rate / 1e6:.2f} TB/s. The step of {M} x {K} from an fp32 dW, as bytes at that rate:")
    dW = 1e-3 * torch.randn(M, K, device=device)
    for layout in LAYOUTS:
        _, handle = forged(0.02 * torch.randn(M, K, device=device), AdamW(), layout, backend="triton")
        handle.arm(1e-3, 1)
        moved = in_graph([functools.partial(handle["weight"].step, dW)]) * rate / M / K
        band = (0.95, 1.5 if layout == "int8" else 1.05)  # int8: random numbers and codes take longer than its bytes
        predicted = traffic_bytes(AdamW(), layout, 2)
        ledger.row(f"{layout}: moved by the step", "2 state + W + dW", predicted, moved, "B", band)


def library_way(dY, X, layout):
    """A function that makes dW and step with torch alone: dW as autograd would leave it, AdamW(fused=True), and for the
    master layout the copies between bf16 and fp32. (For 8 bits torch has none.)"""
    M, K = dY.shape[1], X.shape[1]
    p, narrow = nn.Parameter(0.02 * torch.randn(M, K, device="cuda")), torch.empty(M, K, dtype=X.dtype, device="cuda")
    p.grad, W = torch.empty_like(p), p.detach().bfloat16()
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True, capturable=True)

    def step():
        p.grad.copy_(torch.mm(dY.T, X, out=narrow))
        optimizer.step()
        if layout == "master":
            W.copy_(p.detach())

    return step


def measure_step(M, K, N, layout):
    """{way: microseconds} of dW and step for a weight (M, K) and N tokens in bf16."""
    X, dY = (torch.randn(N, width, device="cuda").bfloat16() for width in (K, M))
    buffers = range(max(1, min(12, 1 + int(160e6 / (M * K * traffic_bytes(AdamW(), layout, 0))))))  # more than L2 holds
    ways = {}
    if layout != "int8":
        ways["torch"] = in_graph([library_way(dY, X, layout) for _ in buffers])
    states = []
    for _ in buffers:
        _, handle = forged(0.02 * torch.randn(M, K, device="cuda"), AdamW(weight_decay=0.1), layout, "slab", "triton",
                           slab=SLAB)
        handle.arm(1e-3, 1)
        states.append(handle["weight"])
        handle.slab = states[0].handle.slab
    rows = plan_step(AdamW(), M, K, 0, layout).rows
    ways["slab"] = in_graph([functools.partial(s.step_in_slabs, [Product(dY, X)], rows) for s in states])
    ways["fused"] = in_graph([functools.partial(s.step_fused, dY, X) for s in states])
    return ways


TABLE_SHAPES, TABLE_TOKENS = [(768, 3072), (4096, 4096), (4096, 14336)], [128, 512, 1024, 4096, 16384, 65536]


def step_table(ledger, layouts):
    """Where steps inside backward win, and where not: dW and step by shape, tokens and layout, in time and in bytes."""
    print("\ndW and AdamW's step, microseconds by tokens (CUDA graphs; X, dY in bf16; *: what plan_step takes)\n"
          f"{'M x K':>13}  layout  way   " + "".join(f"{N:>8} " for N in TABLE_TOKENS) + "  MiB of gradient")
    slowest = 0.0
    for (M, K), layout in itertools.product(TABLE_SHAPES, layouts):
        found = [measure_step(M, K, N, layout) for N in TABLE_TOKENS]
        plans = [plan_step(AdamW(), M, K, N, layout).rung for N in TABLE_TOKENS]
        chosen = list(zip(found, plans, strict=True))
        slowest = max(slowest, *(got[rung] / min(got["slab"], got["fused"]) for got, rung in chosen))
        held = dict(torch=4 * M * K, slab=plan_step(AdamW(), M, K, 0, layout).bytes, fused=0)
        for way in found[0]:
            cells = "".join(f"{got[way]:>8.0f}{'*' if way == rung else ' '}" for got, rung in chosen)
            print(f"{M:>5} x {K:<5}  {layout:<7} {way:<6}{cells}{held[way] / MIB:>8.0f}", flush=True)
    ledger.row("plan_step's choice: time", "the faster of v2 and v3", 1.0, slowest, "x", band=(0, 1.15))


# A classifier's step is hundreds of kernels, many of them shorter than a launch, and how many it needs depends on what
# it finds (03), so that it cannot be replayed as a graph. It is timed as in training: between other work, which hides
# the launches, and less the time of that work alone.


def in_a_row(step, between, count=3):
    """Milliseconds of a step as in training: several in a row, each followed by what stands for the other layers. While
    the GPU works at those, the host launches the next step, most of whose kernels are too short to hide a launch."""
    return base.bench(lambda: [(step(), between()) for _ in range(count)], "cuda", runs=2).median / count


def classifier_bytes(N, V, D, gradient, candidates):
    """Bytes that forge_classifier holds at its peak on a GPU with bf16 operands, dE (2 N D) and the slab included. For
    the sparse gradient: of a mean number of candidates a row."""
    dE, plan = 2 * N * D, plan_step(AdamW(), V, D, 0, "master")
    if gradient == "sparse":
        capacity = filtering.capacity_for(N, candidates)
        return plan.bytes + dE + filtering.sparse_bytes(N, V, D, torch.bfloat16, capacity, sink=True)
    block = cce.gradient_plan(N, V, D, "cuda", torch.bfloat16, None, orders=("vocabulary",)).block
    return plan.bytes + 2 * dE + max(dE, 2 * N * whole_slabs(block, plan.rows))


def ways_to_step(E, C, x, gradient, stats):
    """(handle, functions that make loss, dE and a classifier's step: in backward; 03's gradients, and then it). The
    rate is 0: the same work, and the same problem each time."""
    rule, tables = AdamW(weight_decay=0.1), ["weight"]
    weight, handle = forged(C.float(), rule, "master", "auto", "triton", tables=tables, slab=SLAB)
    options = dict(gradient=gradient) | (dict(stats=stats) if stats else {})

    def inside():
        handle.arm(0.0, 1)
        forge_classifier(E.detach().requires_grad_(), weight, x, handle["weight"], **options).backward()

    def after():
        e = E.detach().requires_grad_()
        loss = filtering.linear_cross_entropy(e, weight, x, **options)
        _, dC = torch.autograd.grad(loss, (e, weight))
        handle.arm(0.0, 1)
        handle["weight"].step(dC)

    return handle, (inside, after)


def measure_classifier(ledger, N, V, D):
    """One step of a classifier: loss, dE and AdamW, against 03's gradients and then the step."""
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.bfloat16, "cuda"))
    A = torch.randn(8192, 8192, device="cuda").bfloat16()
    B = torch.empty_like(A)
    layers = lambda: [torch.mm(A, A, out=B) for _ in range(5)]  # noqa: E731  5.5 TFLOP
    print(f"\na classifier's step, N = {N}, V = {V}, D = {D}, bf16: loss, dE and AdamW. dC alone: "
          f"{2 * V * D / MIB:,.0f} MiB; the logits in fp32: {4 * N * V / MIB:,.0f} MiB")
    for gradient in ("exact", "sparse"):
        stats = filtering.SparseStats() if gradient == "sparse" else None
        handle, ways = ways_to_step(E, C, x, gradient, stats)
        for way in ways:
            way()
        held, rounds = base.peak_bytes(ways[0], "cuda") + handle.slab.nbytes, []
        for _ in range(5):  # in turn: clocks drift
            alone = in_a_row(layers, layers) / 2
            rounds.append([in_a_row(way, layers) - alone for way in ways])
        ours, apart = (statistics.median(column) for column in zip(*rounds, strict=True))
        predicted = classifier_bytes(N, V, D, gradient, stats and stats.measured[0].item())
        name = f"master, {gradient}"
        ledger.row(f"{name}: beyond states", "classifier_bytes", predicted / MIB, held / MIB, band=(0.95, 1.05))
        ledger.row(f"{name}: time", "03, then the step", apart, ours, "ms", (0, 1.05))
        del handle, ways


def body(device, ledger, args):
    base.run_checks(CHECKS, device)
    eight = next(shape for shape in base.MODELS if shape.name == "Llama 3 8B")
    print(f"\nbetween backward and step, {eight.name} has {2 * eight.params / 2**30:.1f} GiB of gradients in bf16")
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    inputs = [4096, 4096, 4096, 14336]  # of q, k and v; of the output; of gate and up; of down
    print(f"factors instead, of its 32 layers: {32 * stash_bytes(shapes, 1, 2, inputs) / 1e6:.2f} MB a token, less than"
          f" those gradients up to {crossover(shapes, 2, 2, inputs):,.0f} tokens\n")
    measure_bytes(device, ledger)
    if device.type == "cuda" and HAS_TRITON:
        measure_gpt(ledger)
        measure_traffic(device, ledger)
        measure_classifier(ledger, *cce.gpu_shape())
        step_table(ledger, LAYOUTS if args.table else ["master"])


def add_arguments(parser):
    parser.add_argument("--table", action="store_true", help="the last table in all layouts (GPU)")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 05_parallelism.py"))


# Exercises
#   1. Add Lion, arXiv 2302.06675 (the sign of b1 m + (1 - b1) g is the update, then m = b2 m + (1 - b2) g), or RMSProp:
#      a rule class, its tile, and what tells it from SGD, which has the same moments. Which checks does it get for
#      nothing, and what does it need in library_step?
#   2. A slab of whole rows of 4096 x 14336 has 512 of them: 4 x 56 tiles of 128 x 256 for 132 multiprocessors, two
#      waves, the second not full. Cut the columns, too, so that fewer waves make the matrix; how much is it worth at
#      512 tokens, and at 16,384, and what does Adam-mini say to it?
#   3. Store v in 8 bits without the square root, or without the floor, and let check_codes tell what happens to the
#      largest update. Why is it v's smallest elements, not its largest, that need care?
