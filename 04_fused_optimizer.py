"""04 - The optimizer step inside the backward pass: of all gradients a tile, a slab or one matrix is there at a time.

The problem in one number
    Between the end of backward and the start of the optimizer's step every gradient is alive at once, only to be read
    a single time: for Llama 3 8B that is 15 GiB in bf16, as much as the weights. But AdamW's new value of an element
    needs that element of the gradient and no other. So the step can be taken tile by tile, while a tile of the
    gradient dW is still in registers (FORGE), or a slab at a time, in one small buffer. This file does both: from the
    same dW the same update, bit for bit in fp32, with at most 32 MiB of gradient on a GPU for a model of any size. And
    it has two rules with one moment in place of two: Adam-mini, for which whole rows of dW are there at a time, and
    Muon, which needs no clipping, for which one whole dW is.

The maths                                  W (M, K) weight, X (N, K) its inputs, dY (N, M) gradient of its outputs
    dX = dY W           with the OLD weight: it has to be formed before W is touched
    dW = dY^T X         a sum over all N tokens: a tile of it is final only when all of them are in
    AdamW               m += (1 - b1) (dW - m)      v = b2 v + (1 - b2) dW^2      the rest uses lr, step t and decay:
                        W = W (1 - lr decay) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
    Adam-mini           the same with one v for a row:      v = b2 v + (1 - b2) mean(dW^2 along the row)
    Muon                m += (1 - b) (dW / |dW| - m)        U V^T of the SVD of m, nearly, by products of matrices:
                        W = W (1 - lr decay) - lr sqrt(max(1, M / K)) U V^T
  Any rule whose new W[i, j] depends on dW[i, j] alone can be fused: SGD with momentum, AdamW, Lion (exercise 1).
  Adam-mini wants rows of dW, Muon all of dW of ONE matrix, and they get it: they are stepped inside backward, too.
  Adafactor, LAMB, LARS and Shampoo read columns or norms of dW, or more than one matrix of its size, and are not here.

The ladder
    v1  hook: autograd makes a layer's dW, a hook takes the step and drops it. One layer's gradient at a time (LOMO).
        It needs nothing but PyTorch, and is the path on a CPU.
    v2  slabs: the library's matrix product makes dW for a block of rows and columns, in fp32, in one small buffer that
        is used again and again; one kernel makes the whole step of that block in one pass.
    v3  FORGE: each program sums its tile of dW over all tokens in registers and takes the step there. dW is nowhere.
    plan_update chooses by shape, tokens and layout, from a table of what was measured; handle.plans says what it chose.
    Adam-mini's slabs are of whole rows (a tile of v3 would have to be made twice, first for its row's mean; v3's time
    and one more product's were longer in all 18 cases tried). Muon's plan is always one whole fp32 dW (of experts: as
    many as a slab holds), also where it is larger than a slab.
Beyond the paper
    The classifier   forge_classifier joins this with 02 and 03: a slice of the vocabulary's logits becomes G, G makes
                     its part of dE with the old classifier, and the step of that slice. Neither the logits nor dC, the
                     two largest tensors of a training step, are there.
    The factors      Clipping, micro-batches, tied weights and skipped steps need all of dW first. What waits for them
                     need not be dW: X and dY do, of which X is there anyway. stash(), then release().

State layouts (bytes a parameter with AdamW, without the gradient)
    fp32    W, m, v in fp32                                                                              12
    master  W in bf16 for the products, an fp32 master copy, m and v in fp32                             14
    bf16    W, m and v in bf16, rounded stochastically: right on average, or small updates would vanish   6
    int8    W in bf16, rounded stochastically; m and v as 8-bit codes with a scale per 128 elements       4.06
  With Muon, which has no v, and Adam-mini, which has 4 bytes of it a row, 8, 10, 4 and 3.03.

How to launch
    python 04_fused_optimizer.py                         checks, bytes, times; a minute on a CPU, three on a GPU
    python 04_fused_optimizer.py --break update-first    plant a famous bug and watch its check fail (exit status 1)
    python 04_fused_optimizer.py --table                 all shapes, token counts and layouts (GPU, minutes)

References
    FORGE, arXiv 2606.22932: the step in the epilogue of the gradient's matrix product. We had its abstract only; what
    is below it (random numbers, codes, order of operations, slabs) is our own derivation.
    LOMO, arXiv 2306.09782 (one gradient alive at a time). AdamW, arXiv 1711.05101. Adam-mini, arXiv 2406.16793. Muon:
    K. Jordan, 2024 (coefficients, Nesterov, the factor of the shape), and arXiv 2502.16982 (decay, large models).
    8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861. Philox: Parallel Random Numbers, SC 2011.

Left out on purpose: a warp-specialised v3 in Gluon (an interface that changes with every release); a classifier's
bias; ghost norms of weights with several uses; Muon's products on a stream of their own, or of several matrices as one
stack (README, "What did not work").
"""

import copy
import functools
import importlib
import itertools
import json
import math
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
from torch.utils._python_dispatch import TorchDispatchMode

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


# ==== 1. The rules: element-wise functions of (weight, gradient, moments). The reference, and the path on a CPU =======


def fma(a, b, c):
    """a b + c. GPUs round it once, as the kernels below do and torch's own optimizers there; on a CPU, twice."""
    return torch.addcmul(c, a, b) if isinstance(c, torch.Tensor) and c.is_cuda else a * b + c


def root(x):
    """Square root, correctly rounded: torch's own on a CPU may be off in the last place."""
    return x.double().sqrt().to(x.dtype)


def check_hyperparameters(rule, *decays):
    """ValueError unless decay rates, eps and weight decay lie in their ranges."""
    good = all(0 <= beta < 1 for beta in decays) and rule.weight_decay >= 0 and getattr(rule, "eps", 0) >= 0
    if not good:
        raise base.BadInput(f"{rule}: betas and momentum lie in 0 ... 1 (not 1), eps and weight_decay are not negative")


# A rule has scalars(lr, step), up to seven numbers s, and update(p, g, m, v, s) -> new p, m, v: tensors of one shape in
# fp32 (or fp64); v is None for rules with one moment. needs: how much of dW it has to see to step one element: that
# "element", its "row", or the whole "matrix".
#
# The numbers that change from step to step are computed on the host, in fp64: in fp32, 1 - 0.999^t is off by 1e-5. The
# device reads them from one small tensor, so that no kernel is compiled anew and a CUDA graph can be replayed.


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay, arXiv 1711.05101: bit for bit torch.optim.AdamW(foreach=False) on a GPU, in fp32."""

    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments = ("m", "v")
    code, needs = 0, "element"

    def __post_init__(self):
        check_hyperparameters(self, *self.betas)

    def scalars(self, lr, step):
        b1, b2 = self.betas
        unbias = (1 - b2**step) ** -0.5
        return 1 - lr * self.weight_decay, 1 - b1, b2, 1 - b2, unbias, self.eps, -lr / (1 - b1**step)

    @staticmethod
    def update(p, g, m, v, s):
        m = fma(g - m, s[1], m)
        v = fma(g * g, s[3], v * s[2])
        return AdamW.moved(p, m, v, s), m, v

    @staticmethod
    def moved(p, m, v, s):
        """New p, by moments that have moved already."""
        return fma(m / (root(v) * s[4] + s[5]), s[6], p * s[0])


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
    by move_rows(), which sees whole rows."""

    moments = ("m",)
    needs = "row"

    @staticmethod
    def update(p, g, m, v, s):
        m = fma(g - m, s[1], m)
        return AdamW.moved(p, m, v, s), m, None


@dataclass(frozen=True)
class SGD:
    """Heavy-ball momentum, weight decay added to the gradient: torch.optim.SGD(foreach=False)."""

    momentum: float = 0.9
    weight_decay: float = 0.0
    moments = ("m",)
    code, needs = 1, "element"

    def __post_init__(self):
        check_hyperparameters(self, self.momentum)

    def scalars(self, lr, step):
        return self.weight_decay, self.momentum, -lr

    @staticmethod
    def update(p, g, m, v, s):
        m = m * s[1] + fma(p, s[0], g)
        return fma(m, s[2], p), m, None


@dataclass(frozen=True)
class Muon:
    """Momentum, made orthogonal (section 2), decoupled decay: K. Jordan 2024, arXiv 2502.16982. One moment; for
    matrices of layers. Its update() is the second half of a step: g is what move_momentum() and orthogonal() made."""

    momentum: float = 0.95
    weight_decay: float = 0.0
    moments = ("m",)
    code, needs = 2, "matrix"

    def __post_init__(self):
        check_hyperparameters(self, self.momentum)

    def scalars(self, lr, step):
        return 1 - lr * self.weight_decay, 1 - self.momentum, self.momentum, -lr

    @staticmethod
    def update(p, g, m, v, s):
        return fma(g, s[3], p * s[0]), None, None


RULES = (AdamW, AdamMini, SGD, Muon)
NOT_HERE = {
    "adafactor": "sums over rows and columns of the squared gradient", "lamb": "scales by the norm of the update",
    "lars": "scales by the norm of the gradient", "shampoo": "multiplies by matrices made of the whole gradient",
}


def check_rule(rule):
    """ValueError unless `rule` is one of RULES."""
    if isinstance(rule, RULES):
        return
    name = rule if isinstance(rule, str) else getattr(rule, "__name__", type(rule).__name__)
    why = NOT_HERE.get(name.lower())
    if why:
        raise base.BadInput(f"rule {name} is not element-wise: it {why}, so no tile can be stepped alone: skip=... "
                            "those")
    raise base.BadInput(f"rule is {rule!r}: pass AdamW(...), AdamMini(...), SGD(...) or Muon(...) of this file")


# ==== 2. Muon: a rule that wants a whole matrix, and what it gives for that ===========================================

# What moves a layer is the matrix it multiplies by. A gradient dW = U S V^T is the sum of a few strong directions (its
# large singular values) and many weak ones, and so is its momentum: a step along it turns the strong ones only. Muon
# keeps the directions and makes all of them equally strong: the update is U V^T, the orthogonal matrix nearest to the
# momentum, times the rate. Two things follow. Its size does not depend on the gradient's: a batch whose gradient is a
# hundred times its neighbours' moves the weights no further than any other, so nothing needs to be clipped, and the
# step can be taken as soon as dW is there, inside backward. And it has no second moment.
#
# An SVD would be slow on a GPU. Newton-Schulz makes (nearly) the same of matrix products alone. An odd polynomial of X,
#     p(X) = a X + b (X X^T) X + c (X X^T)^2 X = U p(S) V^T,     p(s) = a s + b s^3 + c s^5,
# acts on each singular value by itself. X is first divided by its norm, so that all of them lie in 0 ... 1. To converge
# to 1 for good, p would need p(1) = 1 and p'(1) = 0, and then a slope at 0 of 1.875 at most: small values, most of them
# are below 0.01, would grow too slowly. Jordan's coefficients give up convergence for the steepest start: a = 3.4445
# each step, and what has arrived is kicked about between 0.68 and 1.16 instead of settling at 1. That is near enough to
# train with. Five steps bring whatever was above 0.005 of the norm there:
#
#     before      .001   .002   .005   .01    .02    .05    .1     .2     .5     1
#     1 step      .003   .007   .017   .034   .069   .172   .340   .651  1.189   .701
#     2 steps     .012   .024   .059   .118   .236   .567   .992  1.162   .896  1.114
#     3 steps     .041   .082   .203   .400   .751  1.202   .707   .815   .824   .721
#     4 steps     .140   .279   .661  1.093  1.050   .944  1.107   .953   .938  1.090
#     5 steps     .471   .860  1.154   .699   .682   .758   .712   .747   .765   .696
#
# (A run of this file plots a whole matrix's, before and after.)
#
# One thing is ours: the momentum is a mean of gradients that were divided by their norm. A plain mean is ruled by the
# longest of the last twenty or so; at the start, where gradients shrink from step to step, those are the oldest, and
# after a burst it is the burst. (For the same reason clipping at 1 helps a plain mean; but that needs the whole model's
# gradient first.)
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
    of its singular vectors, times rate_of_shape. 0 stays 0 and NaN stays NaN. Peak: U and orthogonal_bytes()."""
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
    """Bytes that Muon holds beside dW for its time: the momentum's look ahead, the next X, and A, B and the next A."""
    return itemsize * (2 * M * K + 3 * min(M, K) ** 2)


# ==== 3. The layouts, and the cost model: bytes a parameter, held and moved ===========================================

GROUP = 128  # elements of a row that share the scales of their 8-bit codes
SLAB = 32 * MIB  # bytes of gradient alive at a time in v2: in fp32, two waves of 128 x 256 tiles on an H200


class Layout(NamedTuple):
    """dtype of W, whether there is an fp32 master copy, dtypes of m and v."""

    weight: torch.dtype
    master: bool
    moments: tuple


LAYOUTS = {
    "fp32": Layout(torch.float32, False, (torch.float32, torch.float32)),
    "master": Layout(torch.bfloat16, True, (torch.float32, torch.float32)),
    "bf16": Layout(torch.bfloat16, False, (torch.bfloat16, torch.bfloat16)),
    "int8": Layout(torch.bfloat16, False, (torch.int8, torch.uint8)),
}
DTYPES = (torch.float32, torch.bfloat16)  # of weights and of products
# Columns at whose multiples a weight can be cut into blocks and shards: groups of codes, and of random numbers.
BORDERS = {"fp32": 1, "master": 1, "bf16": 8, "int8": GROUP}


def state_bytes(rule, layout):
    """Bytes a parameter that the optimizer holds beside W: master copy, moments, and the scales of 8-bit codes. (Not
    Adam-mini's 4 a row.)"""
    form = LAYOUTS[layout]
    moments = sum(dtype.itemsize for _, dtype in zip(rule.moments, form.moments, strict=False))
    return 4 * form.master + moments + (4 * len(rule.moments) / GROUP if layout == "int8" else 0)


def resident_bytes(rule, layout, fused):
    """Bytes a parameter alive between backward and step: W, state, and the gradient (in W's dtype) unless fused."""
    weight = LAYOUTS[layout].weight.itemsize
    return weight + state_bytes(rule, layout) + (0 if fused else weight)


def traffic_bytes(rule, layout, fused):
    """Bytes a parameter read and written: all of the state both ways (W itself only written where there is a master
    copy), and the gradient written and read unless fused."""
    form = LAYOUTS[layout]
    weight = form.weight.itemsize * (1 if form.master else 2)
    return weight + 2 * state_bytes(rule, layout) + (0 if fused else 2 * form.weight.itemsize)


class Plan(NamedTuple):
    """How a weight is updated: "hook", "slab", "fused" or, with Muon, "matrix"; rows and columns of dW that exist at a
    time; their bytes."""

    rung: str
    rows: int
    cols: int
    bytes: int


def classifier_bytes(N, V, D, gradient="exact", candidates=0, workspace=None, slab=SLAB):
    """Bytes that forge_classifier holds at its peak on a GPU with bf16 operands, dE (2 N D) and the slab included. For
    the sparse gradient: of a mean number of candidates a row."""
    dE = 2 * N * D
    rows = plan_update(V, D, N, "master", "slab", slab, by_rows=True).rows
    if gradient == "sparse":
        capacity = filtering.capacity_for(N, candidates)
        return 4 * rows * D + dE + filtering.sparse_bytes(N, V, D, torch.bfloat16, capacity, sink=True)
    block = cce.gradient_plan(N, V, D, "cuda", torch.bfloat16, workspace, orders=("vocabulary",)).block
    return 4 * rows * D + 2 * dE + max(dE, 2 * N * whole_slabs(block, rows))


def whole_slabs(block, rows):
    """Columns of G to make at a time: a rest would take as long as a slab."""
    return block if block < rows else block // rows * rows


# Tokens up to which v3 was faster, for matrices of more than 1 and up to 16 slabs in fp32, and of more (H200; --table).
FUSED_UP_TO = {"fp32": (1024, 1024), "master": (512, 1024), "bf16": (512, 1024), "int8": (0, 0)}


def plan_update(M, K, N, layout, rung="auto", slab=SLAB, itemsize=4, by_rows=False):
    """The Plan for dW (M, K), a sum over N tokens, with elements of `itemsize` bytes in a slab. by_rows: it comes row
    by row, that of an embedding or a classifier: slabs of whole rows, also where no kernels run."""
    if rung == "hook" and not by_rows:
        return Plan("hook", M, K, LAYOUTS[layout].weight.itemsize * M * K)
    slabs = itemsize * M * K / slab
    limit = FUSED_UP_TO[layout][slabs > 16] if slabs > 1 and itemsize == 4 else 0
    if rung == "fused" or (rung == "auto" and 0 < N <= limit):
        return Plan("fused", 0, 0, 0)
    if by_rows:
        rows, cols = min(M, max(128, slab // itemsize // K // 128 * 128)), K
    else:
        rows, cols = slab_shape(M, K, slab // itemsize)
    return Plan("slab", rows, cols, itemsize * rows * cols)


def plan_matrices(M, K, matrices, slab=SLAB):
    """The Plan for Muon, of a weight (M, K) in which so many matrices lie: as many of them at a time as a slab holds,
    and always one."""
    rows = M // matrices
    rows *= max(1, min(matrices, slab // (4 * rows * K)))
    return Plan("matrix", rows, K, 4 * rows * K)


def plan_step(rule, M, K, N, layout, rung="auto", slab=SLAB, itemsize=4, by_rows=False, matrices=1):
    """plan_update, or what a rule that needs more than elements takes in its place: Adam-mini slabs of whole rows also
    where a tile could be fused, Muon so many matrices, of which a weight (M, K) has `matrices`."""
    if rule.needs == "matrix":
        return plan_matrices(M, K, matrices, slab)
    if rule.needs == "row" and rung != "hook":
        rung, by_rows = "slab", True
    return plan_update(M, K, N, layout, rung, slab, itemsize, by_rows)


@functools.cache
def slab_shape(M, K, elements, multiprocessors=132):
    """Rows and columns of the slabs of at most `elements` that cover (M, K) with the fewest waves of 128 x 256 tiles,
    the unit in which the library's matrix product fills a GPU; of several, that with the fewest slabs."""
    if M * K <= elements:
        return M, K
    best = None
    for pieces in range(1, math.ceil(M / 128) + 1):
        rows = math.ceil(M / pieces / 128) * 128
        cols = elements // rows // 256 * 256
        if not cols:
            continue
        cols = min(K, math.ceil(K / math.ceil(K / cols) / 256) * 256)
        slabs = math.ceil(M / rows) * math.ceil(K / cols)
        waves = slabs * math.ceil(math.ceil(rows / 128) * math.ceil(cols / 256) / multiprocessors)
        if best is None or (waves, slabs) < best[0]:
            best = (waves, slabs), (min(M, rows), cols)
    if best is None:
        raise base.BadInput(f"a slab of {elements} elements: the smallest has 128 x 256 (slab=131072 bytes in fp32)")
    return best[1]


# ==== 4. Rounding: random bits that belong to the element, and 8-bit codes ============================================

# Stochastic rounding to bf16: the 16 bits that are dropped decide by chance whether the rest goes up, so that the mean
# of many roundings is the number itself. The bits come from Philox, a function of a key and a counter without memory:
#     key = the run's seed, counter = (column // 8, row, weight's number, step)
# with row and column counted in the WHOLE weight. Whatever tile or shard an element is in, its noise is the same.
# A call gives four 32-bit words: 16 bits each for the eight elements of a counter.
ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass all of BigCrush; 10 is the cautious default elsewhere
# m and v of the bf16 layout take odd multiples of W's bits, modulo 2^16: each is uniform, and the triples (r, a r, b r)
# are a lattice that fills the cube evenly: nearly independent for the price of a multiplication.
NOISE_M, NOISE_V = tl.constexpr(40503), tl.constexpr(48271)


def philox(seed, c0, c1, c2, c3):
    """Four 32-bit words, int64 tensors, for a 64-bit key and four 32-bit counters: what tl.philox gives."""
    low = 0xFFFFFFFF
    high_half = lambda a, x: ((x >> 16) * a + ((x & 0xFFFF) * a >> 16)) >> 16  # noqa: E731  of a 64-bit product
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(as_int(ROUNDS)):
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


# 8-bit codes in groups of 128 elements of a row, relative to the largest of the group. Uniform codes would waste their
# range on the few large elements, so both moments are bent first: m by y = 2x / (1 + |x|), which doubles the resolution
# at 0, v by a square root. A code of 0 for a v > 0 would divide m by almost nothing: the floor is 1. Codes are rounded
# to nearest: rounded stochastically they were further from AdamW in each step (README, "What did not work").
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
    code = torch.where(x > 0, y.round().clamp(min=as_int(V_FLOOR)), 0)
    return code.to(torch.uint8).flatten(1)[:, : v.shape[1]], top.squeeze(-1) / 255


def decode_v(code, scale):
    x = grouped(code.float()) * scale.unsqueeze(-1)
    return (x * x).flatten(1)[:, : code.shape[1]]


def read_m(f, at, scale_at):
    """The elements `at` of m of Fields f, in fp32."""
    return f.m[at].float() if f.m_scale is None else decode_m(f.m[at], f.m_scale[scale_at])


def write_m(f, at, scale_at, m, noise):
    """Store them, in f's form. noise: that of W, for bf16."""
    if f.m_scale is not None:
        f.m[at], f.m_scale[scale_at] = encode_m(m)
    else:
        f.m[at] = round_to_bf16(m, noise * as_int(NOISE_M) & 0xFFFF) if f.m.dtype == torch.bfloat16 else m


def as_int(constant):
    """The number in a tl.constexpr."""
    return getattr(constant, "value", constant)


# ==== 5. The step of a block in Triton: one pass, every byte of state read and written once ===========================

SLOTS = tl.constexpr(32)  # places for by-products, so that thousands of programs do not queue for one

# Elements of a program. It only moves bytes: small tiles, many programs. The interpreter: few programs.
TILES = {
    "step": dict(BLOCK_M=4, BLOCK_K=256, num_warps=4),
    "16-bit": dict(BLOCK_N=64, BLOCK_M=64, BLOCK_K=128, PARTS=4, num_warps=4, num_stages=3),
    "32-bit": dict(BLOCK_N=32, BLOCK_M=64, BLOCK_K=128, PARTS=2, num_warps=8, num_stages=2),
}
if INTERPRETED:
    TILES["step"] = dict(BLOCK_M=64, BLOCK_K=256)
    TILES["16-bit"] = TILES["32-bit"] = dict(BLOCK_N=32, BLOCK_M=64, BLOCK_K=128, PARTS=2)


# No contraction of a * b + c beyond those written: they would round once where torch rounds twice.
NO_FUSION = {} if INTERPRETED else dict(enable_fp_fusion=False)


class Fields(NamedTuple):
    """What the kernels need of a weight (M, K), as one argument. Fields that its rule or layout lacks are None, and
    what would use them is not compiled. Without m, a kernel is given no gradient but a ready update, Muon's."""

    W: torch.Tensor  # (M, K)
    master: torch.Tensor | None  # (M, K)
    m: torch.Tensor | None  # (M, K)
    v: torch.Tensor | None  # (M, K)
    row_v: torch.Tensor | None  # (M,), of Adam-mini
    m_scale: torch.Tensor | None  # (M, groups)
    v_scale: torch.Tensor | None  # (M, groups)
    scalars: torch.Tensor  # of this step: up to seven of the rule, and a factor for the gradient
    key: torch.Tensor  # seed, step
    place: torch.Tensor  # the weight's number; row and column of its first element, if it is a shard of a larger one
    telemetry: torch.Tensor  # (2, SLOTS)
    K: int
    groups: int


@triton.jit
def quotient(a, b, EXACT: tl.constexpr):
    """a / b, correctly rounded or, with a tenth of the instructions, within 2 units of the last place."""
    if EXACT or UPCAST:
        return tl.div_rn(a, b)
    return libdevice.fast_dividef(a, b)


@triton.jit
def square_root(x, EXACT: tl.constexpr):
    return tl.sqrt_rn(x) if EXACT else tl.sqrt(x)


@triton.jit
def constants(s):
    """What all tiles of a step share: the rule's scalars, and what the random bits are keyed by."""
    scalars = (
        tl.load(s.scalars), tl.load(s.scalars + 1), tl.load(s.scalars + 2), tl.load(s.scalars + 3),
        tl.load(s.scalars + 4), tl.load(s.scalars + 5), tl.load(s.scalars + 6), tl.load(s.scalars + 7),
    )
    place = (tl.load(s.place).to(tl.int32), tl.load(s.place + 1).to(tl.int32), tl.load(s.place + 2).to(tl.int32))
    return scalars, (tl.load(s.key), tl.load(s.key + 1).to(tl.int32), place[0], place[1], place[2])


@triton.jit
def adamw_tile(p, g, m, v, a, EXACT: tl.constexpr):
    m = fused_multiply_add(g - m, a[1], m)
    v = fused_multiply_add(g * g, a[3], v * a[2])
    return moved_tile(p, m, v, a, EXACT), m, v


@triton.jit
def mini_tile(p, g, m, v, a, EXACT: tl.constexpr):
    """v (ROWS, 1), moved already."""
    m = fused_multiply_add(g - m, a[1], m)
    return moved_tile(p, m, v, a, EXACT), m


@triton.jit
def moved_tile(p, m, v, a, EXACT: tl.constexpr):
    """v (ROWS, COLS), or (ROWS, 1)."""
    denominator = tl.broadcast_to(square_root(v, EXACT) * a[4] + a[5], m.shape)
    return fused_multiply_add(quotient(m, denominator, EXACT), a[6], p * a[0])


@triton.jit
def sgd_tile(p, g, m, a):
    m = m * a[1] + fused_multiply_add(p, a[0], g)
    return fused_multiply_add(m, a[2], p), m


@triton.jit
def look_ahead(g, m, momentum):
    """Nesterov's: where the momentum will be if this gradient comes once more."""
    return fused_multiply_add(m - g, momentum, g)


@triton.jit
def from_code(code):
    """8-bit integers -> fp32. 2^23 + n has n in its low bits: cheaper than a conversion."""
    return ((code.to(tl.int32) + 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


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
def nearest(x):
    """The noise that rounds to nearest, ties to even. (A cast truncates in the interpreter.)"""
    return 0x7FFF + ((x.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit
def top_of_groups(x, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """x >= 0 (ROWS, COLS) -> the largest of each group (ROWS, groups)."""
    return tl.max(tl.reshape(x, (ROWS, COLS // GROUP, GROUP)), 2)


@triton.jit
def spread(x, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """(ROWS, groups) -> (ROWS, COLS), each value for all elements of its group."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, COLS // GROUP, GROUP)), (ROWS, COLS))


@triton.jit
def places_of_scales(s, row, col, row_stop, col_stop, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Where the scales of the tile's codes are (ROWS, groups), and which of them there are."""
    rows, group = row + tl.arange(0, ROWS), col // GROUP + tl.arange(0, COLS // GROUP)
    mask = (rows < row_stop)[:, None] & (group * GROUP < col_stop)[None, :]
    return rows.to(tl.int64)[:, None] * s.groups + group[None, :], mask


@triton.jit
def load_m(
    s, at, inside, row, col, row_stop, col_stop, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """read_m of the tile (ROWS, COLS) at (row, col), whose elements are `at`."""
    m = tl.load(s.m + at, mask=inside, other=0)
    if s.m_scale is not None:
        scale_at, scaled = places_of_scales(s, row, col, row_stop, col_stop, GROUP, ROWS, COLS)
        y = from_code(m)
        scale = spread(tl.load(s.m_scale + scale_at, mask=scaled, other=0.0), ROWS, COLS, GROUP)
        m = quotient(y * scale, 254.0 - tl.abs(y), False)
    return m.to(tl.float32)


@triton.jit
def store_m(
    s, m, at, inside, noise, row, col, row_stop, col_stop, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """write_m of that tile. noise: for bf16, else anything."""
    if s.m_scale is not None:
        scale_at, scaled = places_of_scales(s, row, col, row_stop, col_stop, GROUP, ROWS, COLS)
        top = top_of_groups(tl.where(inside, tl.abs(m), 0.0), ROWS, COLS, GROUP)
        wide = spread(top, ROWS, COLS, GROUP)
        y = quotient(254.0 * m, tl.where(wide == 0.0, 1.0, wide) + tl.abs(m), False)
        tl.store(s.m + at, nearest_integer(y).to(tl.int8), mask=inside)
        tl.store(s.m_scale + scale_at, top, mask=scaled)
    elif s.m.dtype.element_ty == tl.bfloat16:
        tl.store(s.m + at, to_bf16(m, noise * NOISE_M & 0xFFFF), mask=inside)
    else:
        tl.store(s.m + at, m, mask=inside)


@triton.jit
def update_tile(
    g, s, scalars, key, row, col, row_stop, col_stop, RULE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The step of the tile (ROWS, COLS) at (row, col) of a weight with Fields s; g is its gradient, fp32, 0 from
    row_stop and col_stop on, where the tile ends (of a weight without m: its update). Returns each element's |change|,
    infinite if it is not finite."""
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    inside = (rows < row_stop)[:, None] & (cols < col_stop)[None, :]
    at = rows.to(tl.int64)[:, None] * s.K + cols[None, :]
    if s.master is not None:
        old = tl.load(s.master + at, mask=inside, other=0.0)
    else:
        old = tl.load(s.W + at, mask=inside, other=0.0).to(tl.float32)

    if s.m is None:
        p = fused_multiply_add(g, scalars[3], old * scalars[0])
    else:
        EXACT: tl.constexpr = s.m.dtype.element_ty == tl.float32  # rounding to 16 or 8 bits hides the rest
        m = load_m(s, at, inside, row, col, row_stop, col_stop, GROUP, ROWS, COLS)
        if s.v is not None:
            v = tl.load(s.v + at, mask=inside, other=0)
            if s.v_scale is not None:
                scale_at, scaled = places_of_scales(s, row, col, row_stop, col_stop, GROUP, ROWS, COLS)
                root = from_code(v) * spread(tl.load(s.v_scale + scale_at, mask=scaled, other=0.0), ROWS, COLS, GROUP)
                v = root * root
            v = v.to(tl.float32)
        g *= scalars[7]  # clipping
        if s.row_v is not None:
            v = tl.load(s.row_v + rows, mask=rows < row_stop, other=1.0)[:, None]
            p, m = mini_tile(old, g, m, v, scalars, EXACT)
        elif RULE == 0:
            p, m, v = adamw_tile(old, g, m, v, scalars, EXACT)
        else:
            p, m = sgd_tile(old, g, m, scalars)

    noise = 0
    if s.master is not None:
        tl.store(s.master + at, p, mask=inside)
        tl.store(s.W + at, to_bf16(p, nearest(p)), mask=inside)
    elif s.W.dtype.element_ty == tl.bfloat16:
        noise = tile_bits(key, row, col, ROWS, COLS)
        tl.store(s.W + at, to_bf16(p, noise), mask=inside)
    else:
        tl.store(s.W + at, p, mask=inside)

    if s.m is not None:
        store_m(s, m, at, inside, noise, row, col, row_stop, col_stop, GROUP, ROWS, COLS)
    if s.v is not None:
        if s.v_scale is not None:
            root = tl.where(inside, square_root(v, EXACT), 0.0)
            top = top_of_groups(root, ROWS, COLS, GROUP)
            y = root * spread(255.0 * tl.div_rn(1.0, tl.where(top == 0.0, 1.0, top)), ROWS, COLS, GROUP)
            code = tl.where(root > 0, tl.maximum(nearest_integer(y) & 0xFFFF, V_FLOOR), 0)
            tl.store(s.v + at, code.to(tl.uint8), mask=inside)
            tl.store(s.v_scale + scale_at, tl.div_rn(top, 255.0), mask=scaled)
        elif s.v.dtype.element_ty == tl.bfloat16:
            tl.store(s.v + at, to_bf16(v, noise * NOISE_V & 0xFFFF), mask=inside)
        else:
            tl.store(s.v + at, v, mask=inside)
    change = tl.abs(p - old)  # a maximum need not keep a NaN, so what is not finite counts as infinite
    return tl.where(inside, tl.where(change < float("inf"), change, float("inf")), 0.0)


@triton.jit
def add_totals(squares, change, g, changes):
    """By-products of a tile: the sum of squares of its gradient, added, and the largest change so far."""
    return squares + tl.sum(tl.sum(g * g, 1), 0), tl.maximum(change, tl.max(tl.max(changes, 1), 0))


@triton.jit
def record(s, squares, change):
    """A program's totals. (relaxed: the default order makes every program wait for its stores, which doubled the time
    of the 16- and 8-bit layouts. Once a program, not a tile: that took up to 8 % of a step by lists.)"""
    slot = s.telemetry + tl.program_id(0) % SLOTS
    if s.m is not None:  # or else they are no gradient's
        tl.atomic_add(slot, squares.to(tl.float64), sem="relaxed")
    tl.atomic_max(slot + SLOTS, change.to(tl.float64), sem="relaxed")


@triton.jit
def step_kernel(
    G, s, row, col, row_stop, col_stop, stride, RULE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """The step of the block from (row, col) up to (row_stop, col_stop), whose gradient is G, in one pass."""
    across = tl.cdiv(col_stop - col, BLOCK_K)
    down, right = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), right + tl.arange(0, BLOCK_K)
    g = load_tile(G, rows, cols, row_stop - row, col_stop - col, stride).to(tl.float32)  # (BLOCK_M, BLOCK_K)
    scalars, key = constants(s)
    row, col = row + down, col + right
    changes = update_tile(g, s, scalars, key, row, col, row_stop, col_stop, RULE, GROUP, BLOCK_M, BLOCK_K)
    squares, change = add_totals(0.0, 0.0, g, changes)
    record(s, squares, change)


@triton.jit
def momentum_kernel(
    G, norms, U, s, matrix, row, row_stop, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """move_momentum of the rows from `row` up to row_stop, whose gradient is G (R, K), fp32. matrix: rows of one."""
    across = tl.cdiv(s.K, BLOCK_K)
    down, col = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    inside = (rows < row_stop - row)[:, None] & (cols < s.K)[None, :]
    here = rows.to(tl.int64)[:, None] * s.K + cols[None, :]  # in G and U
    at = (row + rows).to(tl.int64)[:, None] * s.K + cols[None, :]
    scalars, key = constants(s)
    raw, norm = tl.load(G + here, mask=inside, other=0.0), tl.load(norms + rows // matrix, rows < row_stop - row, 1.0)
    g = tl.div_rn(raw, tl.broadcast_to(tl.where(norm == 0.0, 1.0, norm)[:, None], raw.shape))
    m = load_m(s, at, inside, row + down, col, row_stop, s.K, GROUP, BLOCK_M, BLOCK_K)
    m = fused_multiply_add(g - m, scalars[1], m)
    noise = 0
    if s.m.dtype.element_ty == tl.bfloat16:
        noise = tile_bits(key, row + down, col, BLOCK_M, BLOCK_K)
    store_m(s, m, at, inside, noise, row + down, col, row_stop, s.K, GROUP, BLOCK_M, BLOCK_K)
    tl.store(U + here, look_ahead(g, m, scalars[2]).to(U.dtype.element_ty), mask=inside)
    squares = tl.sum(tl.sum(raw * raw, 1), 0)
    record(s, squares, tl.where(squares < float("inf"), 0.0, float("inf")))


# ==== 6. v3, FORGE: the tile of dW stays in registers =================================================================


@triton.jit
def update_parts(
    g, s, scalars, key, row, col, row_stop, col_stop, RULE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, PARTS: tl.constexpr,
):
    """update_tile in PARTS pieces, one after another: with all of a large tile's state at once, registers run out."""
    if PARTS == 1:
        return update_tile(g, s, scalars, key, row, col, row_stop, col_stop, RULE, GROUP, ROWS, COLS)
    else:
        HALF: tl.constexpr = ROWS // 2
        upper, lower = tl.split(tl.permute(tl.reshape(g, (2, HALF, COLS)), (1, 2, 0)))
        above = update_parts(
            upper, s, scalars, key, row, col, row_stop, col_stop, RULE, GROUP, HALF, COLS, PARTS // 2
        )
        below = update_parts(
            lower, s, scalars, key, row + HALF, col, row_stop, col_stop, RULE, GROUP, HALF, COLS, PARTS // 2
        )
        return tl.maximum(above, below)


@triton.jit
def forge_kernel(
    dY, X, s, N, stride_dy, stride_x, row, col, row_stop, col_stop, RULE: tl.constexpr, GROUP: tl.constexpr,
    FETCHED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):
    """dW = dY^T X for the block from (row, col) on, and its step. A program sums its tile over ALL tokens: the update
    is not linear in dW, so tokens cannot be split among programs and added up later. FETCHED: dY and X are descriptors,
    by which Hopper's copy engine brings their tiles (2 to 8 % faster)."""
    down, right = tile_at(tl.program_id(0), tl.cdiv(row_stop - row, BLOCK_M), tl.cdiv(col_stop - col, BLOCK_K))
    down, right = down * BLOCK_M, right * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), right + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, N, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        if FETCHED:
            dy, x = dY.load([start, down]), X.load([start, right])  # (BLOCK_N, BLOCK_M), (BLOCK_N, BLOCK_K)
        else:
            dy = load_tile(dY, tokens, rows, N, row_stop - row, stride_dy)
            x = load_tile(X, tokens, cols, N, col_stop - col, stride_x)
        acc = dot(tl.trans(dy), x, acc)
    scalars, key = constants(s)
    changes = update_parts(
        acc, s, scalars, key, row + down, col + right, row_stop, col_stop, RULE, GROUP, BLOCK_M, BLOCK_K, PARTS
    )
    squares, change = add_totals(0.0, 0.0, acc, changes)
    record(s, squares, change)


# The same for rows that come as lists, 03's ListedRows: a sparse gradient of a classifier, the tokens of an embedding.
# Rows that nobody lists have a gradient of 0: they decay, and go on with their momentum.


@triton.jit
def listed_kernel(
    c, s, M, K, RULE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The step of SPAN tiles of W (M, K) from ListedRows c, each row's entries summed in registers."""
    row, first, stop = listed_span(K, ROWS, COLS, SPAN)
    lists = lists_of_rows(c, row + tl.arange(0, ROWS), M)
    scalars, key = constants(s)
    squares, change = 0.0, 0.0
    for col in range(first, stop, COLS):
        g = listed_tile(c, lists, col, K, ROWS, COLS, ENTRIES)
        changes = update_tile(g, s, scalars, key, row, col, M, K, RULE, GROUP, ROWS, COLS)
        squares, change = add_totals(squares, change, g, changes)
    record(s, squares, change)


# Adam-mini's v of a row has to move before its first tile is stepped: a first pass over the lists sums their squares.


@triton.jit
def listed_squares_kernel(
    c, squares, M, K, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr, SPAN: tl.constexpr,
):
    """squares (M, programs a row): of the gradient that ListedRows c stand for, the sum of squares of SPAN tiles."""
    row, first, stop = listed_span(K, ROWS, COLS, SPAN)
    rows, across = row + tl.arange(0, ROWS), tl.cdiv(K, SPAN * COLS)
    lists, total = lists_of_rows(c, rows, M), tl.zeros((ROWS,), tl.float32)
    for col in range(first, stop, COLS):
        g = listed_tile(c, lists, col, K, ROWS, COLS, ENTRIES)
        total += tl.sum(g * g, 1)
    tl.store(squares + rows * across + first // (SPAN * COLS), total, mask=rows < M)


# ==== 7. A weight with its state: the three rungs ====================================================================


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


class State:
    """The optimizer's state of one weight (M, K), and its steps. Made by Forge; `weight` is changed in place.

    tensors: what a checkpoint has to hold beside the weight itself: "master" (M, K) fp32, "m", "v" (M, K) in the
    layout's dtypes, "m_scale", "v_scale" (M, groups) fp32, "row_v" (M,) fp32, as far as rule and layout have them."""

    def __init__(self, handle, name, weight, rule, scalars, origin, telemetry, matrices=1, ranks=None):
        self.handle, self.name, self.weight, self.rule = handle, name, weight, rule
        self.origin, self.telemetry, self.ranks = origin, telemetry, ranks
        self.number = zlib.crc32(name.encode()) >> 1  # another weight has other noise, whatever else is in the model
        (M, K), device, form = weight.shape, weight.device, LAYOUTS[handle.layout]
        self.rows = M // matrices  # of one matrix
        self.tensors = {"master": weight.detach().float().clone()} if form.master else {}
        self.dtype = weight.dtype  # of what an embedding returns
        weight.data = weight.data.to(form.weight).contiguous()
        for moment, dtype in zip(rule.moments, form.moments, strict=False):
            self.tensors[moment] = torch.zeros(M, K, dtype=dtype, device=device)
            if handle.layout == "int8":
                self.tensors[f"{moment}_scale"] = torch.zeros(M, math.ceil(K / GROUP), device=device)
        if rule.needs == "row":
            self.tensors["row_v"] = torch.zeros(M, device=device)
        optional = {key: self.tensors.get(key) for key in ("master", "m", "v", "row_v", "m_scale", "v_scale")}
        self.fields = Fields(
            W=weight.detach(), **optional, scalars=scalars, key=handle.key, telemetry=telemetry,
            place=torch.tensor([self.number, *origin], device=device), K=K, groups=math.ceil(K / GROUP),
        )
        self.version, self.updated, self.uses, self.plan = weight._version, False, weakref.WeakSet(), None
        self.by_rows, self.names, self.factors, self.versions = False, [name], [], []
        step_in_hook(self)

    def check(self, name, stash=False):
        """ValueError if the next backward pass would go wrong."""
        weight, W, master = self.weight, self.fields.W, self.fields.master
        if weight.grad is not None:
            raise base.BadInput(f"{name} has a gradient already, which no step would use: call arm() or stash() before "
                                "backward()")
        if not stash and (len(self.uses) > 1 or len(self.names) > 1):
            raise base.BadInput(reused(name))
        if self.factors:
            raise base.BadInput(f"{name} has factors of an earlier backward pass: call release() or disarm() first")
        if weight._backward_hooks and (stash or self.by_rows or self.handle.rung != "hook"):
            raise base.BadInput(f"{name} has a gradient hook, but no whole gradient: remove it (a layer's weight has "
                                "one with rung='hook', armed)")
        self.check_place()
        if master is not None and weight._version != self.version:  # somebody else wrote: a look is worth its wait
            if not torch.equal(W, master.to(W.dtype)):
                raise base.BadInput(f"{name} was changed since its last step, but not its master copy: load weights "
                                    "before forge(), or the handle's state with them")
            self.version = weight._version

    def check_place(self):
        """ValueError if the parameter is no longer the tensor that is stepped."""
        if self.weight.data_ptr() != self.fields.W.data_ptr() or self.weight.dtype != self.fields.W.dtype:
            raise base.BadInput(f"{self.name} was moved or cast after forge(): do .to(...) before it")

    def __deepcopy__(self, memo):
        """A copy of a forged model (for an average of weights, say), or one from a file, is an ordinary model."""

    def __reduce__(self):
        return type(None), ()

    def step(self, gradient, row=0, col=0):
        """One step of the block of W at (row, col) that `gradient` (R, C), any float dtype, belongs to: with Adam-mini
        whole rows, with Muon whole matrices.

        Blocks of a step must not overlap. ValueError when it is not armed, or the block does not lie in W on a border
        of 128 columns (int8) or 8 (bf16), or is less than the rule needs."""
        self.check_block(row, col, gradient.shape)
        if self.rule.needs == "row":
            self.move_rows(row_norms(gradient), row)
        if not isinstance(self.rule, Muon):
            self.step_block(self.fields, gradient, row, col)
        elif gradient.data_ptr() == self.handle.slab.data_ptr():
            self.handle.replayed((self.name, row, len(gradient)), lambda: self.step_matrices(gradient, row))
        else:
            self.step_matrices(gradient, row)
        self.written()

    def step_matrices(self, gradient, row):
        """Muon's step of the whole matrices whose rows begin at `row`."""
        update = self.orthogonal_update(gradient, row)
        self.step_block(self.fields._replace(m=None, m_scale=None), update, row, 0)

    def step_block(self, fields, gradient, row, col):
        if self.handle.backend == "torch":
            return torch_step(self, fields, gradient, row, col)
        (R, C), gradient, tiles = gradient.shape, cce.rows_contiguous(gradient), TILES["step"]
        grid = (triton.cdiv(R, tiles["BLOCK_M"]) * triton.cdiv(C, tiles["BLOCK_K"]),)
        step_kernel[grid](
            gradient, fields, row, col, row + R, col + C, gradient.stride(0), **self.options(), **tiles
        )

    def move_rows(self, norms, row=0):
        """Adam-mini's v moves in the rows from `row` on, whose gradient has these norms (R,). Where columns are cut
        over ranks, a row's mean is that of all its parts."""
        squares, columns, ranks = (norms * self.fields.scalars[7]).square_(), self.fields.K, self.ranks
        if ranks and ranks.columns != columns:
            squares, columns = ranks.total(squares), ranks.columns
        b2 = self.rule.betas[1]
        self.fields.row_v[row : row + len(norms)].mul_(b2).add_(squares, alpha=(1 - b2) / columns)

    def orthogonal_update(self, gradient, row):
        """Muon's first half, for the whole matrices whose rows begin at `row`: moves their momentum by their gradient
        (R, K) and returns the update (R, K). Of a matrix that is cut over ranks each moves its part of the momentum,
        and all of them make the whole update."""
        (R, K), ranks, gradient = gradient.shape, self.ranks, gradient.contiguous()
        parts = gradient.view(-1, self.rows, K)  # (E, rows, K)
        norms = torch.linalg.vector_norm(parts, dim=(1, 2), dtype=torch.float32)  # (E,)
        norms = ranks.total(norms**2).sqrt() if ranks else norms
        U = torch.empty(R, K, dtype=self.handle.narrow, device=gradient.device)
        if self.handle.backend == "torch":
            move_momentum(self, gradient, norms, U, row)
        else:
            tiles = TILES["step"]
            grid = (triton.cdiv(R, tiles["BLOCK_M"]) * triton.cdiv(K, tiles["BLOCK_K"]),)
            momentum_kernel[grid](
                gradient.float(), norms, U, self.fields, self.rows, row, row + R, GROUP=GROUP, **NO_FUSION, **tiles
            )
        if ranks:
            return ranks.own_part(orthogonal(ranks.join(U)))
        return orthogonal(matrices_of(U, self.rows)).view(R, K)

    def consume(self, factors):
        """The whole step of this weight, whose gradient is the sum of these factors."""
        factors, self.updated = merged(factors), True
        only = factors[0] if len(factors) == 1 else None
        if isinstance(only, Whole):
            self.plan = None
            size = self.handle.plan(self, None).rows if self.rule.needs == "matrix" else len(self.weight)
            for start, stop in cce.pieces(len(self.weight), size):
                self.step(only.gradient[start:stop], start)
            return
        plan = self.plan = self.handle.plan(self, len(only.X) if isinstance(only, Product) else None)
        if isinstance(only, Listed) and self.handle.backend == "triton":
            self.step_listed(only.lists)
        elif isinstance(only, Product) and plan.rung == "fused":
            self.step_fused(*only)
        else:
            self.step_in_slabs(factors, plan.rows, plan.cols)

    def keep(self, factor, price=1):
        """A factor for later; or, once dW itself is smaller than `price` times the factors, a part of that."""
        first = not self.factors
        if whole := self.whole(factor, price):
            factor.write(self, whole.gradient, 0, 0, add=not first)
        else:
            self.factors.append(factor)
            read = [*tensors_of(factor), self.weight] if isinstance(factor, Classes) else tensors_of(factor)
            read = [] if isinstance(factor, Whole) else read  # later factors are added to it in place
            self.versions += [(tensor, tensor._version) for tensor in read if not tensor.is_inference()]

    def whole(self, factor, price=1):
        """The Whole that is to take what this factor stands for; None while dW is larger than `price` times it and the
        factors so far, of which the Whole begins."""
        whole = next((f for f in self.factors if isinstance(f, Whole)), None)
        if whole is None and price * factor_bytes([*self.factors, factor]) > 4 * self.weight.numel():
            self.check_factors()
            whole = Whole(torch.zeros(self.weight.shape, device=self.weight.device))
            for earlier in self.factors:
                earlier.write(self, whole.gradient, 0, 0, add=True)
            self.factors, self.versions = [whole], []
        return whole

    def check_factors(self):
        """ValueError if what the factors refer to is not what it was in backward."""
        self.check_place()
        if any(tensor._version != version for tensor, version in self.versions):
            raise base.BadInput(f"{self.name}: a layer's input, the targets or the weight were changed in place "
                                "between backward and release(), which reads them: copy them before, or disarm()")

    def square(self):
        """The squared norm of the gradient that the factors stand for, fp64, which leaves nothing behind."""
        factors, (M, K) = merged(self.factors), self.weight.shape
        only = factors[0] if len(factors) == 1 else None
        if isinstance(only, Product) and len(only.X) * (M + K) < M * K:
            return ghost_square(*only)
        plan, norm = self.handle.plan(self, None), torch.linalg.vector_norm
        slabs = self.slabs(factors, plan.rows, plan.cols, dtype=torch.float32)
        return sum(norm(slab, dtype=torch.float64) ** 2 for slab, _, _ in slabs)

    def used(self, use, version):
        """A forward pass, at this version of the weight, has come to its backward."""
        self.uses.discard(use)
        if self.weight._version != version:
            self.refuse_second()
            raise base.BadInput(f"{self.name} was changed between forward and backward: its dX would be wrong")

    def refuse_second(self):
        """ValueError if this weight had its step."""
        if self.handle.armed and self.updated:
            raise base.BadInput(f"{self.name} already had its step: one backward pass an arm(lr, step), and no use "
                                "of the weight outside its layer (a penalty, say): skip it, or disarm()")

    def written(self):
        """Autograd cannot see a kernel write: whoever saved W for a backward pass must hear of it."""
        increment_version(self.weight)
        self.version = self.weight._version

    def options(self):
        return dict(RULE=self.rule.code, GROUP=GROUP, **NO_FUSION)

    def slabs(self, factors, rows, cols, M=None, dtype=None):
        """v2. Yield (slab, row, column): a gradient (M, K), by default of all of W, a sum over factors (section 8),
        block by block. One buffer takes the slabs in turn; each is made after the step of those before it."""
        M, K = M or len(self.weight), self.weight.shape[1]
        once = len(factors) == 1 and not isinstance(self.rule, Muon)
        dtype = dtype or (self.handle.gradient if once else torch.float32)  # rounded once, if at all
        buffer = self.handle.buffer(min(rows, M) * min(cols, K), dtype)
        for top, bottom in cce.pieces(M, rows):
            for left, right in cce.pieces(K, cols):
                slab = buffer[: (bottom - top) * (right - left)].view(bottom - top, right - left)
                for i, factor in enumerate(factors):
                    factor.write(self, slab, top, left, add=i > 0)
                yield slab, top, left

    def step_in_slabs(self, factors, rows, cols, row=0, M=None):
        """v2: the step of M rows of W from `row` on (by default all), for `rows` x `cols` elements at a time.
        ValueError as for step."""
        for slab, top, left in self.slabs(factors, rows, cols, M):
            self.step(slab, row + top, left)

    def step_fused(self, dY, X, row=0, col=0):
        """v3. dY (N, R), X (N, C), fp32 or bf16: the step of the block (R, C) at (row, col) of W, without its gradient.
        Needs Triton's kernels. ValueError as for step."""
        (N, R), C = dY.shape, X.shape[1]
        self.check_block(row, col, (R, C), fused=True)
        if dY.dtype != X.dtype:  # blocked PyTorch makes G of bf16 logits in fp32
            dY, X = dY.float(), X.float()
        dY, X = cce.rows_contiguous(dY), cce.rows_contiguous(X)
        tiles = TILES["16-bit" if X.element_size() == 2 else "32-bit"]
        grid = (triton.cdiv(R, tiles["BLOCK_M"]) * triton.cdiv(C, tiles["BLOCK_K"]),)
        strides, fetched = (dY.stride(0), X.stride(0)), cce.takes_descriptors(dY, X)
        if fetched:
            dY = filtering.descriptor(dY, tiles["BLOCK_N"], tiles["BLOCK_M"])
            X = filtering.descriptor(X, tiles["BLOCK_N"], tiles["BLOCK_K"])
        forge_kernel[grid](
            dY, X, self.fields, N, *strides, row, col, row + R, col + C, FETCHED=fetched, **self.options(), **tiles
        )
        self.written()

    def step_listed(self, lists):
        """The step of all of W by 03's ListedRows: the gradient of each row is summed, and used, in registers. Needs
        Triton's kernels. ValueError as for step."""
        self.check_block(0, 0, self.weight.shape, fused=self.rule.needs == "matrix")
        (M, K), (programs, options) = self.weight.shape, filtering.listed_options(lists, *self.weight.shape)
        if self.rule.needs == "row":
            across = triton.cdiv(K, options["COLS"] * options["SPAN"])
            squares = torch.empty(M, across, device=self.weight.device)
            listed_squares_kernel[(programs,)](lists, squares, M, K, **options)
            self.move_rows(root(squares.sum(1)))
        listed_kernel[(programs,)](lists, self.fields, M, K, **self.options(), **options)
        self.written()

    def check_block(self, row, col, shape, fused=False):
        """ValueError unless the handle is armed and a block of this shape can be stepped at (row, col). fused: from
        tiles that see no more than themselves."""
        M, K = self.weight.shape
        if not self.handle.armed:
            raise base.BadInput(f"step of {self.name}: not armed: call arm(lr, step) first")
        if len(shape) != 2 or row < 0 or col < 0 or row + shape[0] > M or col + shape[1] > K:
            raise base.BadInput(f"block of {tuple(shape)} at ({row}, {col}): does not lie in {self.name}, {M} x {K}")
        rows = {"element": 0, "row": 1, "matrix": self.rows}[self.rule.needs]
        if rows and (row % rows or shape[0] % rows or shape[1] != K or fused):
            takes = {"row": f"Adam-mini takes rows of {K}", "matrix": f"Muon takes matrices of {rows} x {K}"}
            raise base.BadInput(f"block of {tuple(shape)} at ({row}, {col}) of {self.name}: {takes[self.rule.needs]} "
                                "as a whole: step() those, or give the weight another rule")
        border, stop = BORDERS[self.handle.layout], col + shape[1]
        if col % border or (stop % border and stop < K):
            raise base.BadInput(f"columns {col} to {stop}: {self.handle.layout} can be cut at multiples of {border}")


@cce.without_autocast
def weight_gradient(dY, X, out, add=False):
    """out (R, C) = or += dY^T X, from dY (N, R), X (N, C) in fp32 or bf16; the sums are in fp32, rounded as out is."""
    if dY.dtype != X.dtype:  # blocked PyTorch makes G of bf16 logits in fp32
        dY, X = dY.float(), X.float()
    wide = dict(out_dtype=torch.float32) if X.is_cuda and out.dtype == torch.float32 != X.dtype else {}
    if X.dtype != out.dtype and not wide:
        product = dY.float().T @ X.float()
        out.copy_(out + product if add else product)
    elif add:
        torch.addmm(out, dY.T, X, **wide, out=out)
    else:
        torch.mm(dY.T, X, **wide, out=out)


PIECE = 2**16  # elements at a time: few enough for a CPU's cache, as many as torch takes two threads for


@torch.no_grad()
def torch_step(state, f, gradient, row, col):
    """State.step in PyTorch, piece by piece, of a weight with Fields f. On equal inputs it makes the kernels' bits."""
    handle, (R, C) = state.handle, gradient.shape
    scalars, cols = f.scalars.unbind(), slice(col, col + C)
    groups = slice(col // GROUP, math.ceil((col + C) / GROUP))
    for start, stop in cce.pieces(R, max(1, PIECE // C)):
        at, scale_at = (slice(row + start, row + stop), cols), (slice(row + start, row + stop), groups)
        g = gradient[start:stop].float()
        old, m, v = (f.W if f.master is None else f.master)[at].float(), None, None
        noise = noise_of(state, row + start, col, stop - start, C) if f.W.dtype == torch.bfloat16 else None
        if f.m is not None:  # else g is an update that is ready
            m = read_m(f, at, scale_at)
            state.telemetry[0, 0] += torch.linalg.vector_norm(g).double() ** 2
            plain = isinstance(handle.scale, float) and handle.scale == 1  # a tensor of a GPU is not looked at
            g = g if plain else g * scalars[7]
        if f.v is not None:
            v = f.v[at].float() if f.v_scale is None else decode_v(f.v[at], f.v_scale[scale_at])
        if f.row_v is not None:
            v = f.row_v[at[0]].unsqueeze(1)  # (R, 1)
        p, m, v = state.rule.update(old, g, m, v, scalars)
        state.telemetry[1, 0] = torch.maximum(state.telemetry[1, 0], (p - old).abs().max())  # keeps a NaN
        if f.master is not None:
            f.master[at] = p
            f.W[at] = p.to(f.W.dtype)
        else:
            f.W[at] = p if noise is None else round_to_bf16(p, noise)
        if f.m is not None:
            write_m(f, at, scale_at, m, noise)
        if f.v_scale is not None:
            f.v[at], f.v_scale[scale_at] = encode_v(v)
        elif f.v is not None:
            f.v[at] = v if f.v.dtype == torch.float32 else round_to_bf16(v, noise * as_int(NOISE_V) & 0xFFFF)


@torch.no_grad()
def move_momentum(state, gradient, norms, U, row):
    """Muon's momentum moves by the gradient (R, K) of the rows from `row` on, in PyTorch: g is the gradient over its
    matrix's norm, norms (E,); m += (1 - b) (g - m); and U (R, K) = g + b (m - g), Nesterov's look ahead: where m will
    be if this gradient comes once more."""
    f, (R, K) = state.fields, gradient.shape
    scalars, norms = f.scalars.unbind(), norms.where(norms != 0, 1).repeat_interleave(state.rows)  # (R,)
    for start, stop in cce.pieces(R, max(1, PIECE // K)):
        at = slice(row + start, row + stop)
        raw = gradient[start:stop].float()
        state.telemetry[0, 0] += torch.linalg.vector_norm(raw).double() ** 2
        g, m = raw / norms[start:stop].unsqueeze(1), read_m(f, at, at)
        m = fma(g - m, scalars[1], m)
        write_m(f, at, at, m, noise_of(state, row + start, 0, stop - start, K) if f.m.dtype == torch.bfloat16 else None)
        U[start:stop] = look_ahead_torch(g, m, scalars[2])


def look_ahead_torch(g, m, momentum):
    return fma(m - g, momentum, g)


def noise_of(state, row, col, R, C):
    """Random bits of the block (R, C) at (row, col) of a weight, counted in the whole one."""
    handle, (top, left) = state.handle, state.origin
    return random_bits(handle.seed, handle.at_step, state.number, top + row, left + col, R, C, state.weight.device)


def matrices_of(U, rows):
    """U (R, K) -> the matrices in it, (rows, K) or (E, rows, K): experts are orthogonalised each by itself."""
    return U if len(U) == rows else U.view(-1, rows, U.shape[1])


# ==== 8. Factors: a gradient that is not made until it is used ========================================================

# A rule needs ALL of the gradient: of the micro-batches that are summed, of the two uses of a tied weight; and clipping
# needs the norm of everything before the first step. Fused schedules are said to lose all that. They need not: what has
# to wait is not dW but what it is a product of, X and dY, of which X is there anyway. Later, the same fused step runs
# over the factors of all micro-batches: "stash factors, not gradients". Factors of N tokens take (M + K) N elements
# where dW takes M K: less up to N = M K / (M + K), in equal precision.
#
# The norm of the sum does not need dW either. Squared it is sum (X X^T) * (dY dY^T), N^2 (M + K) multiply-adds (a
# "ghost norm"), or the product itself, slab by slab and not kept: N M K. The first wins up to the same N.


class Product(NamedTuple):
    """Of a linear layer: dW = dY^T X, dY (N, M), X (N, K)."""

    dY: torch.Tensor
    X: torch.Tensor

    def write(self, state, out, top, left, add):
        """out (R, C) = or += the block of dW at (top, left)."""
        R, C = out.shape
        weight_gradient(self.dY[:, top : top + R], self.X[:, left : left + C], out, add)


class Listed(NamedTuple):
    """Of an embedding, or a classifier's sparse gradient: 03's ListedRows."""

    lists: filtering.ListedRows

    def write(self, state, out, top, left, add):
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

    def write(self, state, out, top, left, add):
        for start, stop in cce.pieces(len(out), self.block):
            C = state.weight.detach()[top + start : top + stop].to(self.E.dtype)  # (W, D)
            G = cce.gradient_slice(self.E, C, self.targets - (top + start), *self[2:7])  # (N, W)
            weight_gradient(G, self.E, out[start:stop], add)


class Whole(NamedTuple):
    """A gradient (M, K) in fp32 after all: the smaller one, beyond so many tokens; or one that autograd made."""

    gradient: torch.Tensor

    def write(self, state, out, top, left, add):
        block = self.gradient[top : top + out.shape[0], left : left + out.shape[1]]
        out.add_(block) if add else out.copy_(block)


def merged(factors):
    """The products of several backward passes as one, over their concatenated tokens; the others as they are."""
    products = [f for f in factors if isinstance(f, Product)]
    if len(products) < 2:
        return factors
    joined = Product(*(torch.cat(parts) for parts in zip(*products, strict=True)))
    return [joined, *(f for f in factors if not isinstance(f, Product))]


def tensors_of(factor):
    """The tensors of a factor."""
    fields = factor.lists if isinstance(factor, Listed) else factor
    return [t for t in fields if isinstance(t, torch.Tensor)]


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


# ==== 9. The API: a model whose backward is its optimizer =============================================================


class Telemetry(NamedTuple):
    """Of the last armed step, per weight in the order of `names`, on the device (reading them waits for it). A weight
    that got no gradient has norm 0. The squares are fp32: a gradient above 1e19 counts as not finite."""

    names: tuple
    gradient_norm: torch.Tensor  # (weights,) fp64
    largest_change: torch.Tensor  # (weights,) fp64, of an element
    not_finite: torch.Tensor  # (weights,) bool: gradient or weight


class Forge:
    """The handle: weights with their states and rules, one layout, and the step that they are armed for.

    weights: {name: Parameter (M, K)}, fp32 or bf16; they take the layout's dtype. rules: {name: its rule}, of those
    that have another than `rule`. matrices: {name: how many matrices lie in it, one below the other}, for Muon (1).
    ranks: {name: Ranks} of what has Muon or Adam-mini and is cut over ranks. origins: {name: (row, column)} of a
    shard's first element in the whole weight, whose name it then carries: shards make the codes and the noise of the
    whole. data_parallel: number of processes whose gradients would have to be summed (default: all of
    torch.distributed); more than one is refused, as backward has no gradient to reduce. rung: "auto", or one of
    "hook", "slab", "fused". slab, gradient: bytes and dtype of v2's slabs; torch.bfloat16 rounds dW as autograd would,
    and is faster at few tokens. backend: "auto", "triton" or "torch". ordinary: {name: Parameter} of what is left to
    another optimizer. by_rows: names of embeddings and classifiers. aliases: {name: further names of the weight}, if it
    is tied. ValueError on arguments that do not fit."""

    def __init__(
        self, weights, rule, layout="fp32", *, seed=0, rung="auto", slab=SLAB, gradient=torch.float32, backend="auto",
        data_parallel=None, origins=None, ordinary=None, by_rows=(), aliases=None, rules=None, matrices=None,
        ranks=None,
    ):
        weights, origins, matrices = dict(weights), dict(origins or {}), dict(matrices or {})
        rules = {name: (rules or {}).get(name, rule) for name in weights} | dict(rules or {})
        check_rules(rules, weights, by_rows)
        if layout not in LAYOUTS:
            raise base.BadInput(f"layout is {layout!r}: use one of {', '.join(LAYOUTS)}")
        if rung not in ("auto", "hook", "slab", "fused"):
            raise base.BadInput(f"rung is {rung!r}: use 'auto', 'hook', 'slab' or 'fused'")
        if gradient not in (torch.float32, torch.bfloat16):
            raise base.BadInput(f"gradient is {gradient}: use torch.float32 or torch.bfloat16")
        if not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
            raise base.BadInput(f"seed is {seed!r}: use a whole number of 64 bits")
        if not weights:
            raise base.BadInput("no weight to update: the model has no nn.Linear that is trained and not skipped")
        for name, weight in weights.items():
            if isinstance(weight, nn.Parameter) and not weight.requires_grad:
                raise base.BadInput(f"{name} is frozen: leave it out, or thaw it (requires_grad_()) before")
            if not (isinstance(weight, nn.Parameter) and weight.dim() == 2) or weight.dtype not in DTYPES:
                raise base.BadInput(f"{name} is {weight.dtype}, {tuple(weight.shape)}: pass matrices in fp32 or bf16")
        if len({id(weight) for weight in weights.values()}) < len(weights):
            raise base.BadInput("one Parameter has two names: pass the second one as its alias")
        device = next(iter(weights.values())).device
        if any(weight.device != device for weight in weights.values()):
            raise base.BadInput("the weights are on several devices: forge each device's modules by themselves")
        for name, (row, col) in origins.items():
            if name not in weights or row < 0 or col < 0 or col % BORDERS[layout]:
                raise base.BadInput(f"origin of {name}, ({row}, {col}): name a weight, and a column that is a "
                                    f"multiple of {BORDERS[layout]} in layout {layout}")
        self.layout, self.seed, self.slab_bytes, self.gradient = layout, seed, slab, gradient
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.narrow = torch.bfloat16 if bf16 else torch.float32  # of Muon's products
        self.backend = cce.choose_backend(backend, *[next(iter(weights.values()))] * 2)
        if rung == "fused" and self.backend == "torch":
            raise base.BadInput("rung is 'fused', which needs Triton's kernels: use 'auto' or 'slab'")
        self.rung = "hook" if rung == "auto" and self.backend == "torch" else rung
        self.data_parallel, self.ordinary = data_parallel, dict(ordinary or {})
        self.check_group()
        largest = 0
        for name, weight in weights.items():
            plan = plan_step(rules[name], *weight.shape, 0, layout, self.rung, slab, gradient.itemsize, name in by_rows,
                             matrices.get(name, 1))
            if self.rung != "hook" or plan.rung == "matrix":
                largest = max(largest, plan.rows * plan.cols)
        # Nothing was changed so far, and nothing below can be refused.
        self.armed, self.stashing, self.at_step, self.scale, self.clipped_norm = False, False, 0, 1.0, None
        self.graphs, graphs = {}, self.backend == "triton" and device.type == "cuda" and not ranks
        self.side, self.pool = (torch.cuda.Stream(device), torch.cuda.graph_pool_handle()) if graphs else (None, None)
        self.rules = list(dict.fromkeys(rules.values()))
        self.scalars, self.key = torch.zeros(len(self.rules), 8, device=device), torch.tensor([seed, 0], device=device)
        self.slab = torch.empty(largest, dtype=gradient, device=device)
        self.records = torch.zeros(len(weights), 2, as_int(SLOTS), dtype=torch.float64, device=device)
        self.states = {
            name: State(self, name, weight, rules[name], self.scalars[self.rules.index(rules[name])],
                        origins.get(name, (0, 0)), record, matrices.get(name, 1), (ranks or {}).get(name))
            for (name, weight), record in zip(weights.items(), self.records, strict=True)
        }
        for name, others in (aliases or {}).items():
            self.states[name].names += others
        for name in by_rows:
            self.states[name].by_rows = True

    @property
    def param_groups(self):
        raise base.BadInput("no GradScaler: gradients are used before they could be unscaled: use bf16 instead of fp16")

    def __getitem__(self, name):
        """The State of a weight, by any of its names."""
        return {alias: state for state in self.states.values() for alias in state.names}[name]

    def check_group(self):
        """Refuse more than one data-parallel process."""
        joined = dist.is_available() and dist.is_initialized()
        size = self.data_parallel or (dist.get_world_size() if joined else 1)
        if size > 1:
            raise base.BadInput(
                f"{size} data-parallel processes: the step happens before gradients could be summed over them: use an "
                "ordinary optimizer; or pass data_parallel=1 if they never are (DiLoCo, tensor parallel), or if their "
                "factors are gathered (05's gather_factors, for few tokens)"
            )

    def plan(self, state, N):
        """The Plan for a linear layer's backward pass over N tokens, None for other gradients, and several."""
        M, K = state.weight.shape
        rung = "slab" if N is None and self.rung != "hook" else self.rung
        sizes = self.slab_bytes, self.gradient.itemsize
        return plan_step(state.rule, M, K, N, self.layout, rung, *sizes, state.by_rows, M // state.rows)

    def buffer(self, elements, dtype):
        """Room for a slab: the one that is kept from step to step, where that will do."""
        if elements <= len(self.slab) and dtype == self.slab.dtype:
            return self.slab
        return torch.empty(elements, dtype=dtype, device=self.slab.device)

    def replayed(self, key, work):
        """work(), launches on what is always at the same places. On a GPU it is a CUDA graph from the second time on:
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

    @property
    def plans(self):
        """{name: Plan of its last backward pass, None if that was not armed}."""
        return {name: state.plan for name, state in self.states.items()}

    def arm(self, lr, step):
        """The next backward pass is step `step` (1, 2, ...; their order is the caller's affair) at rate lr, a number,
        or {rule: number} where rules have rates of their own. Replaying a CUDA graph of Triton's kernels takes the same
        call before each replay. Does not wait for the device, but to compare master copies after somebody else wrote to
        a weight. ValueError when something is about to go wrong."""
        self.check_group()
        for name, state in self.states.items():
            state.check(name)
        self.prepare(lr, step)
        self.stashing = False

    def prepare(self, lr, step, scale=1.0):
        """Arm, without looking at the weights; gradients are multiplied by scale, a number or a tensor of one."""
        rates = lr if isinstance(lr, dict) else dict.fromkeys(self.rules, lr)
        good = all(0 <= rates.get(rule, -1) < math.inf for rule in self.rules)
        if not (isinstance(step, int) and step >= 1 and good):
            raise base.BadInput(f"arm(lr={lr}, step={step}): pass a rate of at least 0, or one for each of "
                                f"{self.rules}, and steps that count from 1")
        table = [rule.scalars(rates[rule], step) for rule in self.rules]
        table = torch.tensor([[*row, *[0.0] * (8 - len(row))] for row in table], dtype=torch.float64).float()
        self.scalars.copy_(table, non_blocking=True)
        self.scalars[:, 7:] = scale
        self.key.copy_(torch.tensor([self.seed, step]), non_blocking=True)
        self.records.zero_()
        self.armed, self.at_step, self.scale = True, step, scale
        for state in self.states.values():
            state.updated = False

    def stash(self):
        """The backward passes that follow keep each weight's factors, and change nothing until release() or disarm():
        for clipping, for the sum over micro-batches, for weights that are used more than once. Each weight holds its
        factors as long as they are smaller than its gradient in fp32 (a classifier's: CLASSIFIER_PRICE times), and then
        that. Factors refer to the inputs of layers and to targets, which must not be written over until then.
        ValueError as for arm."""
        self.check_group()
        for name, state in self.states.items():
            state.check(name, stash=True)
        self.armed, self.stashing = False, True

    @torch.no_grad()
    def norm(self, others=()):
        """The norm of the whole gradient, fp64, on the device: of all factors, and of the .grad of the parameters in
        `others`: that of the sum over backward passes and uses, to rounding (of a kept gradient on a GPU in fp32)."""
        squares, wholes = [torch.zeros((), device=self.key.device)], []
        others = [p.grad for p in others if p.grad is not None]
        for state in self.states.values():
            if len(state.factors) == 1 and isinstance(state.factors[0], Whole):
                wholes.append(state.factors[0].gradient)
            elif state.factors:
                squares.append(state.square())
        if wholes and wholes[0].is_cuda:  # in one call; in fp64 torch would copy them all
            squares.append(nn.utils.get_total_norm(wholes).double() ** 2)
            wholes = []
        squares += [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in (*wholes, *others)]
        return torch.stack([square.to(self.key.device, torch.float64) for square in squares]).sum().sqrt()

    @torch.no_grad()
    def release(self, lr, step, clip=0.0, others=(), norm=None):
        """The step `step` at rate lr of every weight that has factors, whose gradient is what they add up to. Waits for
        the device once, before it, and returns whether the step was taken.

        norm: what norm(others) returned, or the same of all parts of a cut model. Then nothing waits, the step is
        always taken, clipped_norm is that tensor, and it is for the caller to look whether it was finite: if not,
        neither are the weights any more.

        clip: the largest norm of the gradient of the weights and of `others`, ordinary parameters whose .grad is scaled
        with them, as by clip_grad_norm_ (0: no limit). clipped_norm is then the norm before that, else None. If it, or
        without clip any factor or gradient, is not finite, nothing changes: factors and gradients of `others` are
        dropped. ValueError unless stash() came before, and if what the factors refer to has changed since."""
        if not self.stashing:
            raise base.BadInput("release(): nothing was kept: call stash() before the backward passes")
        if not (0 <= clip < math.inf):
            raise base.BadInput(f"release(clip={clip}): pass a norm, or 0 not to clip")
        states = [state for state in self.states.values() if state.factors]
        others, self.clipped_norm = [p for p in others if p.grad is not None], None
        for state in states:
            state.check_factors()
        if norm is not None:
            self.clipped_norm, good = norm, True
            scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0
        elif clip:
            self.clipped_norm = norm = self.norm(others).item()
            good, scale = math.isfinite(norm), min(1.0, clip / (norm + 1e-6))
        else:
            parts = [t for state in states for factor in state.factors for t in tensors_of(factor)]
            good, scale = all_finite([*parts, *(p.grad for p in others)]), 1.0
        if not good:
            self.disarm()
            for p in others:
                p.grad = None
            return False
        self.prepare(lr, step, scale)
        try:
            for state in states:
                state.consume(state.factors)
                state.factors = []
        finally:  # after an error, too, this gradient is used up
            self.disarm()
        for p in others:
            p.grad.mul_(scale)
        return True

    def step_gradients(self, lr, step):
        """The step as an ordinary optimizer takes it: of every weight that has a .grad, which is dropped. For gradients
        that were summed over processes or micro-batches first."""
        self.prepare(lr, step)
        try:
            for state in self.states.values():
                gradient, state.weight.grad = state.weight.grad, None
                if gradient is not None:
                    state.consume([Whole(gradient)])
        finally:
            self.disarm()

    def disarm(self):
        """Backward passes give ordinary gradients again; factors that wait are dropped."""
        self.armed = self.stashing = False
        for state in self.states.values():
            state.factors, state.versions = [], []

    def telemetry(self):
        """By-products of the last armed step, without waiting for the device."""
        squares, largest = self.records[:, 0].sum(1), self.records[:, 1].amax(1)  # (weights,)
        return Telemetry(tuple(self.states), squares.sqrt(), largest, ~(squares.isfinite() & largest.isfinite()))

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
        mine = self.state_dict()
        missing = mine.keys() - saved.keys()
        if missing:
            raise base.BadInput(f"the saved state has no {sorted(missing)[0]!r}: pass what a handle's state_dict() "
                                "gave")
        plain = lambda value: json.loads(json.dumps(value))  # noqa: E731  a tuple may come back as a list
        if saved["layout"] != self.layout:
            raise base.BadInput(f"saved layout {saved['layout']}, this model has {self.layout}: forge it with the same")
        shapes = lambda weight: {key: (t.shape, t.dtype) for key, t in weight.items()}  # noqa: E731
        for name in saved["weights"].keys() | mine["weights"].keys():
            if shapes(saved["weights"].get(name, {})) != shapes(mine["weights"].get(name, {})):
                raise base.BadInput(f"{name}: the saved state has other weights or shapes: load it into the same model")
            if plain(saved["rules"][name]) != plain(mine["rules"][name]):
                raise base.BadInput(f"{name}: the saved rule is {saved['rules'][name]}, this model has "
                                    f"{mine['rules'][name]}: forge it with the same")
        for name, tensors in saved["weights"].items():
            for key, tensor in tensors.items():
                self.states[name].tensors[key].copy_(tensor)
            self.states[name].version = None  # arm() looks whether a master copy belongs to its weight
        self.seed, self.at_step = saved["seed"], saved["step"]


def check_rules(rules, weights, by_rows):
    """ValueError unless each weight has a rule that it can be stepped by."""
    for name, rule in rules.items():
        check_rule(rule)
        if name not in weights:
            raise base.BadInput(f"rules has {name!r}, which is no weight here: known are "
                                f"{', '.join(list(weights)[:8])}")
        if isinstance(rule, Muon) and name in by_rows:
            raise base.BadInput(f"{name}: Muon wants its gradient whole, that of an embedding or a classifier comes in "
                                "rows: give it AdamW, by rules={...}")


def all_finite(tensors):
    """Whether no element of any tensor is infinite or NaN; waits for the device once."""
    values = [t._values() if t.is_sparse else t for t in tensors]
    return bool(torch.stack([t.isfinite().all() for t in values]).all()) if tensors else True


def reused(name):
    return (
        f"{name} is used twice before one backward pass (tied, recurrent, or an older graph is still alive): it would "
        "be updated under its second use: stash() and release() instead of arm(), skip it, or drop the other graph"
    )


class Use:
    """A forward pass that still waits for its backward; gone with its graph."""


class ForgeLinear(nn.Linear):
    """nn.Linear whose weight is updated inside its backward pass, once forge() has given it a state and that is armed.
    Unarmed it is an nn.Linear, but for second derivatives, torch.func and dtypes: inputs are fp32 or bf16, and a weight
    of another dtype is cast to theirs. Its bias gets an ordinary gradient."""

    forged = None

    def forward(self, x):
        if self.forged is None:
            return super().forward(x)
        return forged_linear(x, self.weight, self.bias, self.forged)


def compute_dtype(x):
    """That of autocast, or else of x: fp32 or bf16. ValueError on others."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
    if dtype not in DTYPES:
        raise base.BadInput(f"products in {dtype}: use bf16 or fp32" + (
            " (fp16's GradScaler would scale the step, too)" if dtype == torch.float16 else ""))
    return dtype


def has_backward(weight, state):
    """Whether this use of the weight, in a forward pass, will have a backward pass. ValueError on a second one."""
    if weight is not state.weight:
        raise base.BadInput(f"{state.name} was replaced after forge() (FSDP?): shard the model first, then forge it")
    inside_backward = torch._C._current_graph_task_id() >= 0  # torch.utils.checkpoint, recomputing, asks the same way
    if not torch.is_grad_enabled() or not weight.requires_grad or inside_backward:
        return False
    if state.uses and state.handle.armed:
        raise base.BadInput(reused(state.name))
    return True


def counted(function, weight, state, *inputs):
    """function.apply(*inputs, state, Use), a use of the weight that is noted once it has worked."""
    use, waits = Use(), has_backward(weight, state)
    result = function.apply(*inputs, state, use)
    if waits:
        state.uses.add(use)
    return result


def forged_linear(x, weight, bias, state):
    """x (..., K), weight (M, K), bias (M,) or None -> (..., M), in the dtype of autocast, or else of x: fp32 or bf16. A
    weight in another dtype is cast to it here, and again in backward. ValueError on other dtypes, and on a second use
    before backward."""
    return counted(_ForgedLinear, weight, state, x.to(compute_dtype(x)), weight, bias)


class _ForgedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, use):
        ctx.save_for_backward(x)
        ctx.state, ctx.use, ctx.seen, ctx.biased = state, use, weight._version, bias is not None
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, state = ctx.saved_tensors[0].detach(), ctx.state  # a factor must not keep the graph
        state.used(ctx.use, ctx.seen)
        # Only a pass that is after the weight's gradient takes a step: not one that stops at x, nor if it is frozen.
        wanted = cce.wanted(ctx, 1)
        M, K = state.weight.shape
        dY, X = dy.reshape(-1, M), x.reshape(-1, K)  # (N, M), (N, K)
        with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
            dX, dW = dx_then_update(
                lambda: (dY @ state.weight.to(dY.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None,
                lambda: weight_update(state, Product(dY, X)) if wanted else None,
            )
            db = dY.sum(0) if ctx.biased else None
        return dX, dW, db, None, None


def dx_then_update(input_gradient, update):
    """The one order that is right: dX = dY W reads the weight that forward used."""
    return input_gradient(), update()


def weight_update(state, factor):
    """What backward makes of a weight's gradient: the armed step; a factor for later; or, for autograd and v1's hook,
    the gradient itself."""
    handle = state.handle
    if handle.stashing:
        state.keep(factor)
    elif handle.armed and not (handle.rung == "hook" and isinstance(factor, Product) and state.rule.needs != "matrix"):
        state.refuse_second()
        state.consume([factor])
    else:
        state.plan = handle.plan(state, len(factor.dY)) if handle.armed else None
        return (factor.dY.T @ factor.X).to(state.weight.dtype)


class ForgeEmbedding(nn.Embedding):
    """nn.Embedding, the same way. Its output has the dtype that the weight had before forge()."""

    forged = None

    def forward(self, tokens):
        if self.forged is None:
            return super().forward(tokens)
        return counted(_ForgedEmbedding, self.weight, self.forged, self.weight, tokens)


class _ForgedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens, state, use):
        ctx.save_for_backward(tokens)
        ctx.state, ctx.use, ctx.seen = state, use, weight._version
        return F.embedding(tokens, weight).to(state.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        (tokens,), state = ctx.saved_tensors, ctx.state
        state.used(ctx.use, ctx.seen)
        M, K = state.weight.shape
        tokens, dX = tokens.reshape(-1), dx.reshape(-1, K)  # (N,), (N, K)
        if not (state.handle.armed or state.handle.stashing):
            return torch.ops.aten.embedding_dense_backward(dX, tokens, M, -1, False).to(state.weight.dtype), *[None] * 3
        dX = cce.rows_contiguous(dX)
        lists = filtering.listed_rows(dX, torch.arange(len(tokens), device=dX.device), tokens, None, M)
        weight_update(state, Listed(lists))
        return None, None, None, None


def step_in_hook(state):
    """v1, LOMO's idea: as soon as autograd has a weight's whole gradient, take the step and drop it. Whatever made that
    gradient; after v2 or v3 there is none, unless the weight has a second use that nobody counted."""
    alive = weakref.ref(state)  # the weight holds the hook, and must not hold the state that holds the weight

    def hook(weight):
        state = alive()
        if state is None or weight.grad is None:
            return
        if state.handle.stashing:
            gradient, weight.grad = weight.grad, None
            state.keep(Whole((gradient.to_dense() if gradient.is_sparse else gradient).float()))
        elif state.handle.armed:
            gradient, weight.grad = weight.grad, None
            state.refuse_second()
            state.consume([Whole(gradient)])

    state.weight.register_post_accumulate_grad_hook(hook)


class Sink:
    """What takes a classifier's gradient from 02 and 03 in place of autograd: each slice of rows, G^T E, as soon as G
    has been used for dE; or all rows at once, as lists."""

    def __init__(self, state):
        self.state, self.use, self.seen = state, Use(), state.weight._version

    def align(self, block):
        return whole_slabs(block, self.state.handle.plan(self.state, None).rows)

    def begin(self):
        state = self.state
        state.used(self.use, self.seen)
        if not (state.handle.armed or state.handle.stashing):
            raise base.BadInput(f"{state.name}: disarmed between forward and backward, which has no gradient to give")
        if state.handle.armed:
            state.refuse_second()
            state.updated = True

    def slices(self, E, targets, lse, *others):
        """What the G of the rows() that follow is made of, with C."""
        # A factor must not keep the graph: what autograd saved comes back with its history.
        factor, self.whole = Classes(E.detach(), targets, lse.detach(), *others), None
        if self.state.handle.stashing:
            self.whole = self.state.whole(factor, CLASSIFIER_PRICE)
            if not self.whole:
                self.state.keep(factor)

    def rows(self, start, G, E):
        """The step of rows start ... start + W, from G (N, W) and E (N, D)."""
        state, handle = self.state, self.state.handle
        if handle.stashing:
            if self.whole:
                weight_gradient(G, E, self.whole.gradient[start : start + G.shape[1]], add=True)
            return  # or else its time comes, with another G
        plan = state.plan = handle.plan(state, len(E))
        if plan.rung == "fused":
            state.step_fused(G, E, start)
        else:
            state.step_in_slabs([Product(G, E)], plan.rows, plan.cols, start, G.shape[1])

    def listed(self, lists):
        """The step of all rows."""
        lists = lists._replace(E=lists.E.detach())
        if self.state.handle.armed:
            self.state.consume([Listed(lists)])
        else:  # kept without the room that was left for more entries
            count = int(lists.begin[-1])
            kept = dict(rows=lists.rows[:count].clone(), weights=lists.weights[:count].clone())
            self.state.keep(Listed(lists._replace(**kept)), CLASSIFIER_PRICE)


def forge_classifier(E, C, targets, state, *, gradient="auto", **options):
    """03's linear_cross_entropy(E, C, targets, gradient=..., **options), whose backward takes the classifier's step: C
    gets no gradient, E its ordinary one, made with the old C. Neither the logits nor, armed, dC are ever there.

    E (..., D) fp32 or bf16, C (V, D) the weight of `state`, targets (...); gradient "exact", "sparse" or "auto". Exact:
    for each slice of the vocabulary G, dE += G C, then the step of that slice. Sparse: the same pass that would write a
    row of dC takes its step, in registers. On a stash()-ing handle C is left as it is. Kept is what makes dC (E, lse
    and targets; sparse: E and lists) or, if that is not CLASSIFIER_PRICE times smaller, dC itself. Unarmed, and without
    gradients: 03's own. Beyond what 02 and 03 say, and 4 N D bytes for dE: a slab. A C in another dtype than E is cast
    to it first, whole.
    ValueError on what 03 refuses, a bias, fp16, and a second use before backward."""
    if gradient not in ("exact", "sparse", "auto"):
        raise base.BadInput(f"gradient is {gradient!r}: use 'exact', 'sparse' or 'auto'")
    if options.get("bias") is not None:
        raise base.BadInput("bias: an ordinary parameter, of which forge_classifier makes no gradient: use 03's loss")
    if not state.by_rows:
        raise base.BadInput(f"{state.name} was forged as a layer's weight: pass classifier={state.name!r} to forge()")
    dtype, handle = compute_dtype(E), state.handle
    sink = Sink(state) if handle.armed or handle.stashing else None
    waits = sink and has_backward(C, state)
    options.setdefault("backend", "torch" if handle.backend == "torch" else "auto")
    result = filtering.linear_cross_entropy(E.to(dtype), C.to(dtype), targets, gradient=gradient, sink=sink, **options)
    if waits:
        state.uses.add(sink.use)
    return result


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")


def forge(model, rule, layout="fp32", *, skip=(), embeddings=False, classifier=None, **options):
    """Convert the nn.Linear modules of a model in place and return its Forge handle.

    rule: AdamW(...), AdamMini(...), SGD(...) or Muon(...), and as an option `rules`, {name of a weight: another};
    layout: "fp32", "master", "bf16", "int8"; skip: names of modules to leave alone, with all that is in them;
    embeddings: nn.Embedding modules, too; classifier: the name of a parameter (V, D) that is only used in
    forge_classifier; options: those of Forge. Weights take the layout's dtype. handle.ordinary names every other
    trainable parameter (norms, biases): give those to an ordinary optimizer. ValueError when the model is wrapped for
    data parallelism or forged already, a weight is tied to something that is not converted, or a name does not exist;
    the model is then as it was. Weights tied to each other need stash() and release(), see there. Modules of derived
    classes, or whose weight is no Parameter of theirs (parametrized, pruned), are left to the ordinary optimizer; those
    with an attribute `forged` (07's experts) take their weight's step themselves.

        handle = forge(model, AdamW(weight_decay=0.1), "master", skip=["head"])  # or rules=dict.fromkeys(names, Muon())
        others = torch.optim.AdamW(handle.ordinary.values(), lr=lr)
        for step in range(1, steps + 1):
            handle.arm(lr, step)
            loss(model(x)).backward()
            others.step()
            others.zero_grad()

    With micro-batches and clipping, the loop's first two lines become
            handle.stash()
            for x in parts:
                (loss(model(x)) / len(parts)).backward()
            handle.release(lr, step, clip=1.0, others=handle.ordinary.values())
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # one that has two names is a tied weight
    for name, module in modules.items():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & set(WRAPPERS):
            raise base.BadInput(f"{name or 'the model'} is a {type(module).__name__}, which reduces gradients that "
                                "forge never makes: forge the bare model in one data-parallel process, or skip forge")
    skip = [skip] if isinstance(skip, str) else list(skip)
    unknown = set(skip) - set(modules)
    if unknown:
        raise base.BadInput(f"skip={sorted(unknown)[0]!r} is no module: known are {', '.join(list(modules)[1:9])}, ...")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if classifier is not None and classifier not in parameters:
        raise base.BadInput(f"classifier={classifier!r} is no parameter: known are "
                            f"{', '.join(list(parameters)[:8])}, ...")
    skipped = lambda name: any(name == s or name.startswith(f"{s}.") for s in skip)  # noqa: E731
    dotted = lambda name: f"{name}.weight" if name else "weight"  # noqa: E731
    kinds = (nn.Linear, ForgeLinear, *([nn.Embedding, ForgeEmbedding] if embeddings else []))
    ready = lambda m: hasattr(m, "forged") and not isinstance(m, (ForgeLinear, ForgeEmbedding))  # noqa: E731
    converted = {
        dotted(name): m for name, m in modules.items()
        if (type(m) in kinds or ready(m)) and not skipped(name)
        and isinstance(m.weight, nn.Parameter) and m.weight.requires_grad
    }
    for name, module in converted.items():
        if getattr(module, "forged", None) is not None:
            raise base.BadInput(f"{name} is forged already: forge a model once, with all that it needs")
        unusual = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
        for option, plain in unusual.items():
            if getattr(module, option, plain) != plain:
                raise base.BadInput(f"{name}: an nn.Embedding with {option} is not what is updated here: skip it")
    names = list(dict.fromkeys([*converted, *([classifier] if classifier else [])]))
    weights, aliases = {}, {}
    for name in names:
        same = [other for other, p in parameters.items() if p is parameters[name]]
        left = [other for other in same if other not in names]
        if left:
            raise base.BadInput(f"{name} and {left[0]} are one tensor: a tied weight is used twice: skip it, or have "
                                "both converted (embeddings=True, classifier=...)")
        if same[0] == name:
            weights[name], aliases[name] = parameters[name], same[1:]
    ordinary = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in weights}
    by_rows = [name for name in weights if any(
        other == classifier or isinstance(converted.get(other), nn.Embedding) for other in [name, *aliases[name]])]
    matrices = {name: getattr(module, "experts", 1) for name, module in converted.items() if name in weights}
    handle = Forge(weights, rule, layout, ordinary=ordinary, by_rows=by_rows, aliases=aliases, matrices=matrices,
                   **options)
    for name, module in converted.items():
        if not ready(module):
            module.__class__ = ForgeLinear if isinstance(module, nn.Linear) else ForgeEmbedding
        module.forged = handle[name]
    return handle


# ==== 10. Checks ======================================================================================================


def rungs(device):
    """(rung, backend) pairs that run on this device."""
    pairs = [("hook", "torch"), ("slab", "torch")]
    return pairs + [(r, "triton") for r in ("hook", "slab", "fused") if "triton" in cce.backends(device)]


def forged(W, rule, layout="fp32", rung="slab", backend="torch", name="weight", **options):
    """A handle for one weight that starts as W (M, K), in slabs of 128 x 256: (Parameter, handle)."""
    weight = nn.Parameter(W.clone())
    options = dict(slab=4 * 128 * 256) | options
    return weight, Forge({name: weight}, rule, layout, rung=rung, backend=backend, **options)


def take_step(weight, handle, X, dY, lr, step):
    """One armed forward and backward pass of y = X W^T; returns dX."""
    x = X.clone().requires_grad_()
    handle.arm(lr, step)
    y = forged_linear(x, weight, None, next(iter(handle.states.values())))
    (1.0 * y).backward(dY)  # times 1: if cuBLAS comes first in autograd's thread, it warns of a missing context
    return x.grad


def whole_numbers(N, M, K, device, steps=3, seed=0):
    """W (M, K), and for each step X (N, K), dY (N, M) of small whole numbers: every order of summing gives one dW."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float().to(device)  # noqa: E731
    W = 0.02 * torch.randn(M, K, generator=generator).to(device)
    return W, [(draw(N, K), draw(N, M)) for _ in range(steps)]


def library_step(rule, weight):
    """What the rule is elsewhere: torch's optimizer. (AdamW: also of a list.)"""
    if isinstance(rule, AdamW):
        options = dict(betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, foreach=False)
        return torch.optim.AdamW(weight if isinstance(weight, list) else [weight], **options)
    options = dict(momentum=rule.momentum, weight_decay=rule.weight_decay, foreach=False)
    return torch.optim.SGD([weight], lr=0.0, **options)


def check_exact(device="cpu", M=150, K=300, N=50, seed=0, dtype=torch.float32):
    """fp32 and master: every rung and rule makes the bits of the written-out rule, with changing rates, decay, ragged
    shapes and several slabs (products in dtype; in bf16 the whole numbers must stay below 256, hence N below 65).
    AdamW and SGD are also torch's: bit for bit on a GPU, elsewhere within 4 units in the last place a step."""
    W, data = whole_numbers(N, M, K, device, seed=seed)
    for rule in (AdamW(eps=0.5, weight_decay=0.1), SGD(weight_decay=0.1)):
        name = type(rule).__name__.strip("_")
        p, m, v = W, torch.zeros_like(W), torch.zeros_like(W)
        theirs = nn.Parameter(W.clone())
        library, scale = library_step(rule, theirs), W.abs()
        for t, (X, dY) in enumerate(data, 1):
            dW, lr = dY.T @ X, 1e-3 * t
            scalars = torch.tensor(rule.scalars(lr, t), dtype=torch.float64).float().to(device).unbind()
            moved = lr * dW.abs() if isinstance(rule, SGD) else torch.full_like(dW, lr)
            scale = scale.maximum(p.abs()).maximum(moved)  # a unit is that of the largest term
            p, m, v = rule.update(p, dW, m, v, scalars)
            library.param_groups[0]["lr"], theirs.grad = lr, dW
            library.step()
        exact = torch.device(device).type == "cuda"
        far = ((p - theirs).abs() / torch.from_numpy(np.spacing(scale.cpu().numpy())).to(device)).max().item()
        limit = 0 if exact else 4 * len(data)
        base.require(far <= limit, f"{name}: {far:g} units in the last place from the library")
        for layout in ("fp32", "master") if isinstance(rule, AdamW) else ("fp32",):
            want = dict(zip(rule.moments, (m, v), strict=False), master=p)
            want["weight"] = p.bfloat16() if layout == "master" else p
            for rung, backend in rungs(device):
                if (layout, rung) == ("master", "hook"):
                    continue  # autograd rounds a bf16 weight's gradient
                weight, handle = forged(W, rule, layout, rung, backend)
                for t, (X, dY) in enumerate(data, 1):
                    take_step(weight, handle, X.to(dtype), dY.to(dtype), 1e-3 * t, t)
                for key, tensor in (handle["weight"].tensors | {"weight": weight}).items():
                    wrong = int((tensor != want[key]).sum())
                    base.require(wrong == 0, f"{name}, {layout}, {rung}, {backend}: {wrong} elements of {key} differ")


def mini_by_hand(W, gradients, rate, rule):
    """fp64: W (M, K), m, v (M,) after steps with these gradients (M, K) at rates rate, 2 rate, ..."""
    (b1, b2), W = rule.betas, W.double()
    m, v = torch.zeros_like(W), torch.zeros_like(W[:, 0])
    for t, g in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * g.double()
        v = b2 * v + (1 - b2) * g.double().square().mean(1)
        unbiased = (v / (1 - b2**t)).sqrt().unsqueeze(1)
        W = (1 - t * rate * rule.weight_decay) * W - t * rate / (1 - b1**t) * m / (unbiased + rule.eps)
    return W, m, v


def check_mini(device="cpu", M=150, K=136, N=50, seed=0):
    """Adam-mini in all layouts: in fp32 and master as fp64 by hand gives it, to 1e-5, also of a clipped gradient; all
    ways make the same bits; slabs are of whole rows in every rung, and what is less is refused."""
    W, data = whole_numbers(N, M, K, device, seed=seed)
    data = [(X, dY * torch.logspace(-2, 1, M, device=device)) for X, dY in data]
    gradients, rule, rate = [dY.T @ X for X, dY in data], AdamMini(eps=0.5, weight_decay=0.1), 0.02
    for layout in LAYOUTS:
        first = {}
        for (rung, backend), way in itertools.product(rungs(device), ("arm", "stash", "gradients", "clip")):
            title = f"Adam-mini, {layout}, {rung}, {backend}, {way}"
            slow = INTERPRETED and backend == "triton"
            if (rung != "slab" and (way != "arm" or slow and layout != "fp32")) or slow and way != "arm":
                continue  # the same
            if LAYOUTS[layout].weight == torch.bfloat16 and (way == "gradients" or rung == "hook"):
                continue  # there autograd rounds the gradient
            weight, handle = forged(W, rule, layout, rung, backend)
            state = handle["weight"]
            for t, (X, dY) in enumerate(data, 1):
                if way == "arm":
                    take_step(weight, handle, X, dY, rate * t, t)
                elif way == "gradients":
                    weight.grad = gradients[t - 1]
                    handle.step_gradients(rate * t, t)
                else:
                    handle.stash()
                    state.keep(Product(dY, X))
                    clip = 0.5 * gradients[t - 1].double().norm().item() if way == "clip" else 0.0
                    base.require(handle.release(rate * t, t, clip), f"{title}: no step")
            if way == "arm" and rung != "hook":
                whole = state.plan == Plan("slab", 128, K, 4 * 128 * K)
                base.require(whole, f"{title}: {state.plan} is not of whole rows")
            got = state.tensors | {"weight": weight.detach()}
            if way != "clip":
                same = first.setdefault(backend if torch.device(device).type == "cuda" else "all", got)
                for name, tensor in got.items():
                    base.require(torch.equal(tensor, same[name]), f"{title}: {name} differs")
            exact = mini_by_hand(W, [g * (0.5 if way == "clip" else 1.0) for g in gradients], rate, rule)
            m, result = read_m(state.fields, ..., ...), got.get("master", weight.detach())
            pairs = dict(m=(m, exact[1]), v=(state.fields.row_v, exact[2]), W=(result - W, exact[0] - W))
            for name, (a, b) in pairs.items():
                narrow, off = layout in ("bf16", "int8"), cce.error(a, b)  # W rounds by chance there
                limit = {"m": 2e-2, "v": 1e-5, "W": math.inf}[name] if narrow else 1e-5
                base.require(off < limit, f"{title}: {name} is off by {off:.1e}")
            handle.arm(rate, 9)
            for block, col in ((W[:, :8], 0), (W[:8, 8:], 8)):
                must_raise(f"rows of {K} as a whole", lambda block=block, col=col: state.step(block, 0, col))  # noqa: B023
            must_raise(f"rows of {K} as a whole", lambda: state.step_fused(W[:8, :8], W[:8]))  # noqa: B023


def muon_update(U):
    """What orthogonal() is to approximate for U (M, K), by an SVD in fp64: five times p of each singular value, times
    sqrt(max(1, M / K))."""
    left, s, right = torch.linalg.svd(U.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-300)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return max(1.0, U.shape[0] / U.shape[1]) ** 0.5 * (left * s) @ right


def library_muon(weight, momentum=0.0, nesterov=False):
    """torch's Muon, whose products are in bf16."""
    options = dict(lr=1.0, momentum=momentum, nesterov=nesterov, weight_decay=0.0, adjust_lr_fn="original")
    return torch.optim.Muon([weight], **options)


class Products(TorchDispatchMode):
    """Counts the matrix products inside the block."""

    made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made += function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm")
        return function(*args, **(kwargs or {}))


def check_orthogonal(device="cpu"):
    """In fp64 what an SVD gives, to 1e-9: wide, tall, square, thin, alone and stacked; in bf16 as close to that as
    torch's Muon; 0 stays 0, NaN stays NaN, and nothing hangs on the size of the gradient."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24), (33, 33), (1, 7), (7, 1), (3, 16, 40), (3, 40, 16)):
        U = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        want = torch.stack([muon_update(one) for one in U.view(-1, *shape[-2:])]).view(shape)
        off = ((orthogonal(U.clone()) - want).abs().max() / want.abs().max()).item()
        base.require(off < 1e-9, f"{shape}: off by {off:.1e} from the SVD's")
        small = cce.error(orthogonal(1e-15 * U.float()), want)
        base.require(small < 1e-4, f"{shape}: a short one in fp32 is off by {small:.1e}")
        base.require(not orthogonal(0 * U.float()).any(), f"{shape}: of 0 it made something")
        U.view(-1)[0] = math.nan
        with Products() as count:
            base.require(orthogonal(U)[..., -1].isnan().any(), f"{shape}: a NaN is lost")
        base.require(count.made == 3 * STEPS, f"{shape}: {count.made} products, not {3 * STEPS}")
    for shape in ((96, 160), (160, 96), (128, 128)):
        U = torch.randn(shape, generator=generator).to(device).bfloat16()
        theirs = nn.Parameter(torch.zeros(shape, device=device))
        theirs.grad = U.float()
        library_muon(theirs).step()
        cce.require_as_good(f"{shape}, bf16", orthogonal(U.clone()), -theirs.detach(), muon_update(U), 1e-3)


def muon_by_hand(W, gradients, rate, decay, momentum=0.95, nesterov=True):
    """fp64: the weights (E, M, K) after steps with these gradients (E, M, K) at rates rate, 2 rate, ..., momentum."""
    W, m = W.double(), torch.zeros_like(W, dtype=torch.float64)
    for t, dW in enumerate(gradients, 1):
        g = dW.double() / dW.double().norm(dim=(1, 2), keepdim=True)
        m = momentum * m + (1 - momentum) * g
        U = momentum * m + (1 - momentum) * g if nesterov else m
        update = torch.stack([muon_update(one) for one in U])
        W = (1 - t * rate * decay) * W - t * rate * update
    return W, m


def check_muon(device="cpu", E=2, M=250, K=136, N=300, seed=0):
    """Steps of a weight in which E matrices lie, in all layouts and ways: fp32 and master are as close to fp64 by hand
    as torch's Muon is (on a CPU, whose products are not in bf16, within 1e-4); all ways make the same bits; so do
    release() after stash(), and step_gradients(); the norm that is told is of the gradient as it came. N > K: of fewer
    tokens dW has singular values of 0, where p raises the noise of bf16 to 15 % of the update, by chance."""
    W, data = whole_numbers(N, E * M, K, device, steps=2, seed=seed)
    data = [(X, dY * torch.logspace(-2, 2, E, device=device).repeat_interleave(M)) for X, dY in data]
    gradients = [(dY.T @ X).view(E, M, K) for X, dY in data]
    rule, rate = Muon(weight_decay=0.1), 0.02
    exact, momentum = muon_by_hand(W.view(E, M, K), gradients, rate, 0.1)
    peers = []
    for e in range(E):
        peer = nn.Parameter(W.view(E, M, K)[e].clone())
        library = library_muon(peer, 0.95, True)
        for t, dW in enumerate(gradients, 1):
            library.param_groups[0].update(lr=rate * t, weight_decay=0.1)
            peer.grad = dW[e] / dW[e].norm()
            library.step()
        peers.append(peer.detach())
    start, limit = W.view(E, M, K), torch.device(device).type == "cpu"
    for layout in LAYOUTS:
        first = {}
        for (rung, backend), way in itertools.product(rungs(device), ("arm", "stash", "gradients")):
            title = f"Muon, {layout}, {rung}, {backend}, {way}"
            slow = INTERPRETED and backend == "triton"
            if rung != "slab" and (slow or way != "arm") or slow and way != "arm":
                continue  # the same
            weight, handle = forged(W, rule, layout, rung, backend, matrices={"weight": E}, slab=16 * 128 * 256)
            state = handle["weight"]
            for t, (X, dY) in enumerate(data, 1):
                if way == "arm":
                    take_step(weight, handle, X, dY, rate * t, t)
                elif way == "stash":
                    handle.stash()
                    state.keep(Product(dY, X))
                    base.require(handle.release(rate * t, t), f"{title}: no step")
                else:
                    weight.grad = gradients[t - 1].view(E * M, K).to(weight.dtype)
                    handle.step_gradients(rate * t, t)
            told = handle.telemetry().gradient_norm.item() / gradients[-1].double().norm().item()
            rounded = way == "gradients" and weight.dtype == torch.bfloat16
            base.require(abs(told - 1) < (1e-2 if rounded else 1e-5), f"{title}: {told} times the gradient's norm")
            got = state.tensors | {"weight": weight.detach()}
            if not rounded:
                same = first.setdefault(backend if torch.device(device).type == "cuda" else "all", got)
                for name, tensor in got.items():
                    base.require(torch.equal(tensor, same[name]), f"{title}: {name} differs")
            m = read_m(state.fields, ..., ...).view(E, M, K)
            close = dict(fp32=1e-5, master=1e-5, bf16=2e-2, int8=2e-2)[layout]
            base.require(cce.error(m, momentum) < close + rounded, f"{title}: m is off by {cce.error(m, momentum):.1e}")
            result = got.get("master", weight.detach()).float().view(E, M, K)
            for e in range(E if layout in ("fp32", "master") and not rounded else 0):
                moved = [(w - start[e]).double() for w in (result[e], peers[e], exact[e])]
                if limit:
                    off = cce.error(moved[0], moved[2])
                    base.require(off < 1e-4, f"{title}: matrix {e} is off by {off:.1e}")
                else:
                    cce.require_as_good(f"{title}: matrix {e}", *moved, 1e-3)


def check_muon_use(device="cpu"):
    """Without gradient and momentum a weight decays and does no more; NaN is told and stays; parts of a matrix, and
    gradients that come in tiles or lists, are refused; one whole fp32 dW is alive, however large, in any rung."""
    W = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(device)
    for rung, backend in rungs(device):
        weight, handle = forged(W, Muon(weight_decay=0.5), rung=rung, backend=backend)
        state = handle["weight"]
        handle.arm(0.1, 1)
        state.step(torch.zeros_like(W))
        base.require(torch.equal(weight, W * torch.tensor(0.95, device=device)), f"{rung}, {backend}: more than decay")
        for block, row in ((W[:8], 0), (W[:, :8], 0), (W[:39], 1)):
            must_raise("as a whole", lambda block=block, row=row: state.step(block, row))  # noqa: B023
        must_raise("as a whole", lambda: state.step_fused(W[:8], W[:8]))  # noqa: B023
        pair, stack = forged(W, Muon(weight_decay=0.5), rung=rung, backend=backend, matrices={"weight": 2})
        stack.arm(0.1, 1)
        stack["weight"].step(torch.cat((torch.zeros_like(W[:20]), W[20:])))  # an expert without a token
        still = torch.equal(pair[:20], W[:20] * torch.tensor(0.95, device=device))
        base.require(still and (pair[20:] - W[20:]).abs().max() > 0.01, f"{rung}, {backend}: two experts")
        state.step(torch.full_like(W, math.nan))
        base.require(weight.isnan().all() and handle.telemetry().not_finite[0], f"{rung}, {backend}: NaN is not told")
        _, large = forged(torch.zeros(512, 1024, device=device), Muon(), rung=rung, backend=backend)
        plan = large.plan(large["weight"], 64)
        one = plan == Plan("matrix", 512, 1024, 2**21) and large.slab.nbytes == 2**21
        base.require(one, f"{rung}, {backend}: {plan}, {large.slab.nbytes} bytes")
    base.require(plan_matrices(8 * 64, 256, 8, 2 * 4 * 64 * 256).rows == 128, "experts beyond a slab at a time")
    must_raise("known are weight", lambda: forged(W, AdamW(), rules={"other": Muon()}))
    W, A = torch.zeros(8, 8, device=device), AdamW()
    weights = {name: nn.Parameter(W.clone()) for name in ("a", "b")}
    handle = Forge(weights, A, rules={"b": Muon()}, rung="slab", backend="torch")
    must_raise("one for each of", lambda: handle.arm({A: 0.1}, 1))
    handle.arm({A: 0.5, Muon(): 0.25}, 1)
    for state in handle.states.values():
        state.step(torch.eye(8, device=device))
    spread = weights["a"].detach().abs().max().item(), weights["b"].detach().abs().max().item()
    base.require(abs(spread[0] - 0.5) < 1e-5 and 0.15 < spread[1] < 0.31, f"rates of two rules: {spread}")


def check_fidelity(device="cpu", N=600, M=96, K=160):
    """Random inputs: the update is as good as torch's in fp32, and from bf16 inputs better than through a bf16 dW."""
    generator = torch.Generator().manual_seed(1)
    X, dY = (torch.randn(N, width, generator=generator).to(device) for width in (K, M))
    zero = torch.zeros(M, K, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = X.to(dtype), dY.to(dtype)
        want = -0.1 * (dy.double().T @ x.double())
        peer = -0.1 * (dy.T @ x).float()
        for rung, backend in rungs(device):
            weight, handle = forged(zero, SGD(), "fp32", rung, backend)
            if dtype == torch.bfloat16 and rung == "hook":
                continue  # v1 uses the gradient as autograd makes it
            take_step(weight, handle, x, dy, 0.1, 1)
            got = cce.error(weight.detach(), want)
            limit = cce.error(peer, want) + 2e-6 if dtype == torch.float32 else cce.error(peer, want) / 10
            base.require(got <= limit, f"{rung}, {backend}, {dtype}: error of the update {got:.1e}, limit {limit:.1e}")


def check_input_gradient(device="cpu"):
    """dX is dY W with the old W, bit for bit; also for a model under both kinds of activation checkpointing."""
    W, [(X, dY), *_] = whole_numbers(40, 48, 72, device)
    for layout, rule in itertools.product(LAYOUTS, (AdamW(), Muon())):
        for rung, backend in rungs(device):
            weight, handle = forged(W, rule, layout, rung, backend)
            want, version = dY @ weight.detach().clone().float(), weight._version
            got = take_step(weight, handle, X, dY, 0.1, 1)
            base.require(weight._version > version, f"{layout}, {rung}, {backend}: autograd was not told of the write")
            base.require(torch.equal(got, want), f"{layout}, {rung}, {backend}: dX is not dY W with the old W")
            base.require(not torch.equal(dY @ weight.detach().float(), want), "the step changed nothing")
    checkpoint = torch.utils.checkpoint.checkpoint
    gradients = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(72, 64), nn.GELU(), nn.Linear(64, 48)).to(device)
        handle, x = forge(model, AdamW()), X.clone().requires_grad_()
        for step in (1, 2):
            handle.arm(0.01, step)
            x.grad = None
            (model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)).backward(dY)
        gradients.append([x.grad, *(p.detach() for p in model.parameters())])
        if reentrant is not None:
            same = all(torch.equal(a, b) for a, b in zip(gradients[0], gradients[-1], strict=True))
            base.require(same, f"checkpointing (use_reentrant={reentrant}) changes the step")


def rounding_scores(rounded, exact):
    """Standard deviations by which roundings of exact (fp32) to bf16 are off: on average, and in proportion to the part
    that was dropped (rounding to nearest is right on average, too). Also each rounding's own error, normalised."""
    bits, got = (x.contiguous().view(torch.int32).long() for x in (exact, rounded.float()))
    part = (bits & 0xFFFF).double() / 65536
    off = ((got >> 16) - (bits >> 16)).double() - part  # 1 - part if rounded away from 0, else -part
    variance = part * (1 - part)
    mean, slope = off.sum() / variance.sum().sqrt(), (off * (part - 0.5)).sum() / (
        variance * (part - 0.5) ** 2).sum().sqrt()
    return mean.item(), slope.item(), off / variance.clamp(min=1e-6).sqrt()


def check_rounding(device="cpu", R=64, C=512):
    """Stochastic rounding to bf16 of W, m and v: right on average (z-tests); other noise for another seed, step or
    weight, and for W, m and v; NaN and infinities stay what they are."""
    generator = torch.Generator().manual_seed(0)
    W, dW = (torch.randn(R, C, generator=generator).to(device) for _ in range(2))
    W = W.bfloat16().float()
    for backend in cce.backends(device):
        weight, handle = forged(W, AdamW(), "fp32", "slab", backend)
        handle.arm(0.01, 1)
        handle["weight"].step(dW)
        exact = dict(W=weight.detach(), **handle["weight"].tensors)
        noises, roundings = {}, []
        for layout, name, seed, step in (
            ("bf16", "weight", 0, 1), ("bf16", "weight", 1, 1), ("bf16", "weight", 0, 2), ("bf16", "other", 0, 1),
            ("int8", "weight", 0, 1),
        ):
            weight, handle = forged(W, AdamW(), layout, "slab", backend, name, seed=seed)
            handle.arm(0.01, 1)
            handle.key[1] = handle.at_step = step  # the noise of another step, but not its rates
            handle[name].step(dW)
            for what, tensor in {"W": weight.detach(), **handle[name].tensors}.items():
                if tensor.dtype == torch.bfloat16:
                    mean, slope, noises[what] = rounding_scores(tensor, exact[what])
                    worst = max(abs(mean), abs(slope))
                    base.require(worst < 5, f"{backend}, {layout}: rounding of {what} is off by {worst:.1f} deviations")
            if layout == "bf16":
                roundings.append(weight.detach().clone())
                for one, two in (("W", "m"), ("W", "v"), ("m", "v")):
                    shared = (noises[one] * noises[two]).mean().item() * math.sqrt(R * C)
                    base.require(abs(shared) < 6, f"{backend}: the roundings of {one} and {two} are one, {shared:.1f}")
        for other in roundings[1:]:
            part = (exact["W"].contiguous().view(torch.int32) & 0xFFFF).double() / 65536
            share = (roundings[0] != other).double().mean().item() / (2 * part * (1 - part)).mean().item()
            base.require(0.9 < share < 1.1, f"{backend}: two keys' roundings differ {share:.3f} times as often as due")
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-45, 3e38], device=device).repeat(64, 2)
        special.view(torch.int32)[:, 6] = 0x7FFFFFFF  # a GPU's NaN
        weight, handle = forged(torch.zeros(64, 12, device=device), SGD(), "bf16", "slab", backend)
        handle.arm(1.0, 1)
        handle["weight"].step(-special)
        got = weight.detach().float()
        near = got.isfinite() & ((got - special).abs() <= special.abs() / 128 + 1e-40)
        kept = torch.where(special.isfinite(), near, (got == special) | (got.isnan() & special.isnan()))
        base.require(kept.all(), f"{backend}: {special[~kept][:1].tolist()} was rounded to {got[~kept][:1].tolist()}")


def check_shards(device="cpu", M=56, K=264, N=24):
    """Whatever rung, tile, block or shard an element is in, its new weight and codes are the same, bit for bit."""
    W, data = whole_numbers(N, M, K, device, steps=2)
    cuts = [(0, 0, 40, K), (40, 0, M, 128), (40, 128, M, K)]  # one by rows, two by columns
    for layout in ("bf16", "int8"):
        for rule in (AdamW(), SGD()):
            want = {}  # compiled kernels divide and take roots faster than PyTorch in these layouts, and less exactly
            for rung, backend in rungs(device)[1:]:
                if (rung, backend) == ("hook", "triton"):
                    continue
                weight, handle = forged(W, rule, layout, rung, backend)
                shards = [(forged(W[a:c, b:d], rule, layout, rung, backend, origins={"weight": (a, b)}), (a, b, c, d))
                          for a, b, c, d in cuts]
                for t, (X, dY) in enumerate(data, 1):
                    take_step(weight, handle, X, dY, 1e-2, t)
                    for (part, one), (a, b, c, d) in shards:
                        take_step(part, one, X[:, b:d], dY[:, a:c], 1e-2, t)
                got = handle["weight"].tensors | {"weight": weight.detach()}
                reference = want.setdefault(backend if torch.device(device).type == "cuda" else "all", got)
                for name, tensor in got.items():
                    base.require(torch.equal(tensor, reference[name]), f"{layout}, {rung}, {backend}: {name} differs")
                    for (part, one), (a, b, c, d) in shards:
                        piece = one["weight"].tensors.get(name, part.detach())
                        span = slice(b // GROUP, math.ceil(d / GROUP)) if "scale" in name else slice(b, d)
                        whole = tensor[a:c, span]
                        base.require(torch.equal(piece, whole), f"{layout}, {rung}, {backend}: shard's {name} differs")


def check_codes(device="cpu"):
    """8-bit codes: round trips within half a code, no v > 0 stored as 0, and updates of ordinary size where gradients
    are heavy-tailed (without the floor they reach thousands)."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(8, 300, generator=generator).to(device) * torch.logspace(-6, 3, 8, device=device).unsqueeze(1)
    v = m.square()
    v[:, ::7] = 0
    m[3] = v[3] = 0  # a group of zeros
    top = grouped(m).abs().amax(-1, keepdim=True).expand(-1, -1, GROUP).flatten(1)[:, :300]
    worst = top * (1 + m.abs() / top.clamp(min=1e-30)) ** 2 / (4 * 127) * 1.02
    off = (decode_m(*encode_m(m)) - m).abs()
    base.require((off <= worst).all(), f"m is off by {(off / worst.clamp(min=1e-30)).max().item():.2f} half codes")
    code, scale = encode_v(v)
    base.require(((code > 0) == (v > 0)).all(), "a v > 0 has code 0, or the reverse")
    off = (decode_v(code, scale).sqrt() - v.sqrt()).abs()
    large = code > 1
    base.require((off[large] <= 1.02 * top[large] / 510).all(), "sqrt(v) is off by more than half a code")
    for backend in cce.backends(device):
        weight, handle = forged(torch.zeros(32, 256, device=device), AdamW(weight_decay=0.0), "int8", "slab", backend)
        largest = 0.0
        for t in range(1, 41):
            tail = torch.rand(32, 256, generator=generator).clamp(min=1e-4).pow(-1.0) * 1e-3  # infinite variance
            handle.arm(1.0, t)
            handle["weight"].step((torch.randn(32, 256, generator=generator) * tail).to(device))
            largest = max(largest, handle.telemetry().largest_change.item())
        base.require(largest < 20, f"{backend}: an element moved by {largest:.0f} rates in one step")
        smallest = handle["weight"].tensors["v"].min().item()
        base.require(smallest > 0, f"{backend}: a v > 0 is stored as 0")


def check_linear(device="cpu"):
    """Unarmed, a forged layer is nn.Linear, bit for bit, bias included, and under autocast; armed, its bias still gets
    that gradient. A pass that is not after the weight's gradient takes no step."""
    W, [(X, dY), *_] = whole_numbers(30, 24, 40, device)
    shaped, kind = X.view(5, 6, 40), torch.device(device).type
    for rung, backend in rungs(device):
        plain, layer = nn.Linear(40, 24).to(device), nn.Linear(40, 24).to(device)
        layer.load_state_dict(plain.state_dict())
        handle = forge(layer, AdamW(), rung=rung, backend=backend)
        base.require(list(handle.ordinary) == ["bias"], f"left to another optimizer: {list(handle.ordinary)}")
        for autocast in (True, False):
            results = []
            for module, armed in ((plain, False), (layer, False), (layer, True)):
                if armed and autocast:
                    continue
                module.zero_grad()
                if armed:
                    handle.arm(1e-3, 1)
                x = shaped.clone().requires_grad_()
                with torch.autocast(kind, torch.bfloat16, enabled=autocast):
                    y = module(x)
                y.backward(dY.view(5, 6, 24).to(y.dtype))
                results.append((y.detach(), x.grad, module.bias.grad.clone(), module.weight.grad))
            for got in results[1:]:
                for a, b in zip(got[:3], results[0][:3], strict=True):
                    base.require(torch.equal(a, b), f"{rung}, {backend}: a forged layer is not nn.Linear")
            base.require(torch.equal(results[1][3], results[0][3]), "the gradient of an unarmed pass differs")
            layer.zero_grad()
        base.require(layer.weight.grad is None, "an armed pass left a gradient")
        base.require(not torch.equal(layer.weight, plain.weight), "an armed pass changed nothing")
        before = layer.weight.detach().clone()
        handle.arm(1e-3, 2)
        torch.autograd.grad(layer(x).sum(), x)  # a saliency map, say
        layer.weight.requires_grad_(False)
        layer(x).sum().backward()
        base.require(torch.equal(layer.weight, before), f"{rung}, {backend}: stepped by a pass that asked for no dW")


def check_telemetry(device="cpu", M=70):
    """Gradient norm, largest change and the flag, by-products of each step, against what they are."""
    W, [(X, dY), *_] = whole_numbers(30, M, 72, device)
    for rung, backend in rungs(device):
        weight, handle = forged(W, SGD(), "fp32", rung, backend)
        for step, row in enumerate((0, M // 2, M - 1), 1):  # the row with the largest change
            before, dy = weight.detach().clone(), dY.clone()
            dy[:, row] *= 8
            take_step(weight, handle, X, dy, 1e-2, step)
            told = handle.telemetry()
            torch.testing.assert_close(told.gradient_norm[0], (dy.T @ X).double().norm(), rtol=1e-6, atol=0)
            torch.testing.assert_close(told.largest_change[0].float(), (weight.detach() - before).abs().max())
            base.require(not told.not_finite[0], f"{rung}, {backend}: flagged without a reason")
        dy[3, 5] = math.inf
        take_step(weight, handle, X, dy, 1e-2, 4)
        base.require(handle.telemetry().not_finite[0], f"{rung}, {backend}: an infinite gradient was not noticed")


def check_resume(device="cpu"):
    """A state that was saved and loaded goes on with the same bits; one of another rule or shape is refused."""
    W, data = whole_numbers(20, 24, 40, device, steps=4)
    for layout, rule in itertools.product(LAYOUTS, (Muon(), AdamW())):
        straight, handle = forged(W, rule, layout, "slab", "torch", seed=7)
        for t, (X, dY) in enumerate(data, 1):
            if t == 3:
                saved, middle = copy.deepcopy(handle.state_dict()), straight.detach().clone()
            take_step(straight, handle, X, dY, 1e-2, t)
        resumed, second = forged(W, rule, layout, "slab", "torch")
        resumed.data.copy_(middle)
        second.load_state_dict(saved)
        for t, (X, dY) in enumerate(data[2:], 3):
            take_step(resumed, second, X, dY, 1e-2, t)
        base.require(torch.equal(straight, resumed), f"{layout}: a resumed run ends with other weights")
    others = AdamW(eps=0.1), "int8"
    for other in (forged(W, *others)[1], forged(W, AdamW(), "bf16")[1], forged(W[:8], AdamW(), "int8")[1]):
        must_raise("saved", lambda other=other: other.load_state_dict(saved))


def check_misuse(device="cpu"):
    """What would train wrongly raises, and changes nothing. (Two things come too late to change nothing: a use of the
    weight outside its layer, and a second one inside a reentrant checkpoint. They raise, after a step.)"""
    x, make = torch.ones(4, 8, device=device), lambda: nn.Linear(8, 8, bias=False).to(device)
    for rung, backend in rungs(device):
        model = nn.Sequential(make(), make())
        handle = forge(model, AdamW(), rung=rung, backend=backend)
        copies = lambda model=model: [p.detach().clone() for p in model.parameters()]  # noqa: E731
        changed = lambda old, new: any(not torch.equal(a, b) for a, b in zip(old, new, strict=True))  # noqa: E731
        before = copies()
        must_raise("not armed", lambda: handle["0.weight"].step(torch.ones(8, 8, device=device)))  # noqa: B023
        model(x).sum().backward()
        must_raise("has a gradient already", lambda: handle.arm(0.1, 1))  # noqa: B023
        model.zero_grad()
        first = model(x)
        must_raise("used twice", lambda: (handle.arm(0.1, 1), model(x)))  # noqa: B023
        del first
        handle.disarm()
        two = model[0](model[0](x))
        must_raise("used twice", lambda: handle.arm(0.1, 1))  # noqa: B023
        del two
        for step, lr in ((0, 0.1), (1, -1.0), (1, math.nan), (1, math.inf)):
            must_raise("arm(lr=", lambda step=step, lr=lr: handle.arm(lr, step))  # noqa: B023
        must_raise("fp16", lambda: model(x.half()))  # noqa: B023
        must_raise("forged already", lambda: forge(model, AdamW()))  # noqa: B023
        base.require(not changed(before, copies()), f"{rung}, {backend}: a refusal left a trace")
        handle.arm(0.1, 1)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        after = copies()
        must_raise("one backward pass", loss.backward)
        base.require(changed(before, after) and not changed(after, copies()), f"{rung}, {backend}: not one step")
        handle.disarm()
        loss = model(x).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        must_raise("changed between", loss.backward)
        del loss
        model.zero_grad()
        twin = copy.deepcopy(model)
        twin(x).sum().backward()
        base.require(twin[0].weight.grad is not None, "a copy of a forged model is no ordinary model")
        if rung != "hook":
            model[0].weight.register_hook(lambda grad: grad)
            must_raise("gradient hook", lambda: handle.arm(0.1, 2))  # noqa: B023
    scaler = torch.amp.GradScaler(torch.device(device).type)
    scaler.scale(torch.ones((), device=device))
    must_raise("unscaled", lambda: scaler.unscale_(handle))
    loaded = make()
    handle = forge(loaded, AdamW(), "master")
    loaded.load_state_dict(dict(weight=torch.ones(8, 8)))
    must_raise("master copy", lambda: handle.arm(0.1, 1))
    loaded.double()
    must_raise("moved or cast", lambda: handle.arm(0.1, 2))

    class DistributedDataParallel(nn.Module):  # the name is what counts
        def __init__(self, module):
            super().__init__()
            self.module = module

    tied = nn.Sequential(nn.Embedding(8, 8), make())
    tied[1].weight = tied[0].weight
    bare = make()
    weight = bare.weight.detach().clone()
    for words, action in {
        "reduces gradients": lambda: forge(DistributedDataParallel(bare), AdamW()),
        "tied": lambda: forge(tied, AdamW()),
        "2 data-parallel": lambda: forge(bare, AdamW(), "bf16", data_parallel=2),
        "not element-wise": lambda: forge(bare, "Shampoo"),
        "is no weight here": lambda: forge(bare, AdamW(), "bf16", rules={"bias": Muon()}),
        "comes in rows": lambda: forge(nn.Sequential(nn.Embedding(8, 8)), Muon(), embeddings=True),
        "pass AdamW": lambda: forge(bare, torch.optim.SGD),
        "betas and momentum": lambda: forge(bare, AdamW(betas=(0.9, 1.0))),
        "layout is": lambda: forge(bare, AdamW(), "fp8"),
        "rung is": lambda: forge(bare, AdamW(), "bf16", rung="v3"),
        "gradient is": lambda: forge(bare, AdamW(), "bf16", gradient=torch.float16),
        "seed is": lambda: forge(bare, AdamW(), "bf16", seed=2**64),
        "origin of": lambda: forge(bare, AdamW(), "bf16", origins={"weight": (0, 4)}),
        "the smallest has": lambda: forge(nn.Linear(512, 512, device=device), AdamW(), "bf16", rung="slab", slab=9),
        "no weight": lambda: forge(nn.ReLU(), AdamW()),
        "is no module": lambda: forge(nn.Sequential(bare), AdamW(), skip="head"),
        "pass matrices": lambda: forge(make().half(), AdamW()),
    }.items():
        must_raise(words, action)
    base.require(torch.equal(bare.weight, weight) and type(bare) is nn.Linear, "a refused forge() changed the model")
    for option in (dict(padding_idx=0), dict(max_norm=1.0), dict(scale_grad_by_freq=True), dict(sparse=True)):
        unusual = nn.Sequential(nn.Embedding(8, 8, **option))
        must_raise(*option, lambda unusual=unusual: forge(unusual, AdamW(), embeddings=True))
    must_raise("is no parameter", lambda: forge(bare, AdamW(), classifier="nothing"))
    frozen = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    frozen[1].weight.requires_grad_(False)
    must_raise("is frozen", lambda: forge(frozen, AdamW(), "bf16", classifier="1.weight"))
    base.require(frozen[0].weight.dtype == torch.float32, "a refused forge() changed the model")
    late = nn.ModuleList([nn.Linear(1024, 512, bias=False), nn.Embedding(512, 1024)])
    late[1].weight = late[0].weight
    handle = forge(late, AdamW(), embeddings=True, slab=4 * 128 * 256)
    whole = handle["1.weight"].by_rows and handle.plan(handle["0.weight"], None).cols == 1024
    base.require(whole, "a tied embedding needs slabs of whole rows")
    handle = forge(nn.ModuleList([make()] * 3), AdamW())
    base.require(list(handle.states) == ["0.weight"] and handle["2.weight"] is handle["0.weight"], "a module's names")
    must_raise("used twice", lambda: handle.arm(0.1, 1))
    W = torch.zeros(8, 256, device=device)
    _, handle = forged(W, AdamW(), "int8")
    handle.arm(0.1, 1)
    must_raise("does not lie", lambda: handle["weight"].step(W, row=1))
    must_raise("multiples of 128", lambda: handle["weight"].step(W[:, :64], col=64))


def check_plans():
    """Slabs cover the matrix, keep to their bytes, and start on borders that every layout can be cut at."""
    for M, K in ((4096, 4096), (768, 3072), (2304, 256000), (256000, 2304), (50257, 768), (77, 300), (1, 10**8)):
        for size in (4 * 128 * 256, 8 * MIB, SLAB):
            rows, cols = slab_shape(M, K, size // 4)
            fits = 4 * rows * cols <= max(size, 4 * 128 * 256)
            base.require(fits and rows <= M and cols <= K, f"{M} x {K}: a slab of {rows} x {cols} in {size} bytes")
            base.require(cols == K or cols % GROUP == 0, f"{M} x {K}: slabs start at multiples of {cols} columns")
    must_raise("smallest", lambda: slab_shape(1000, 1000, 1000))


def stack(device, width=1024, layers=6):
    """(a model of square linears, its input): the gradients of all layers are much more than one layer's."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]), torch.randn(64, width)


def peak_of_step(device, optimizer, layout="fp32", rung="auto", **options):
    """Bytes that backward and step hold at their peak beyond what is alive after forward, in the second step."""
    model, x = stack(device)
    if optimizer == "forge":
        handle = forge(model, AdamW(), layout, rung=rung, **options)
    else:
        model.to(LAYOUTS[layout].weight)
        other = torch.optim.AdamW(model.parameters(), fused=optimizer == "fused", foreach=optimizer == "foreach")
    for step in (1, 2):
        y = model(x.to(next(model.parameters()).dtype))

        def backward_and_step(y=y, step=step):
            if optimizer == "forge":
                handle.arm(1e-3, step)
            y.sum().backward()
            if optimizer != "forge":
                other.step()
                model.zero_grad()

        peak = base.peak_bytes(backward_and_step, device)
        del y
    return peak


def check_memory(device="cpu"):
    """The gradients of six equal layers are never alive together: v1 holds one, v2 one slab, v3 none."""
    layer = 4 * 1024**2
    pieces = 20 * 4 * PIECE  # temporaries of torch_step, whatever the layer's size
    for rung, backend in rungs(device):
        if backend == "triton" and torch.device(device).type == "cpu":
            continue  # the same buffers, much slower
        peak = peak_of_step(device, "forge", rung=rung, backend=backend)
        base.require(peak < 2 * layer + pieces, f"{rung}, {backend}: {peak / layer:.1f} layers of gradient at the peak")


def classifier_handle(C, layout, rung, backend, slab, rule=None, seed=0):
    """(Parameter, handle) for a classifier that starts as C (V, D)."""
    weight = nn.Parameter(C.float().clone())
    options = dict(rung=rung, backend=backend, slab=slab, by_rows=["weight"], seed=seed)
    return weight, Forge({"weight": weight}, rule or AdamW(eps=0.5, weight_decay=0.1), layout, **options)


def classifier_ways(device, dtype, D):
    """(gradient, rung, backend) that run on this device."""
    ways = [("exact", "hook", "torch"), ("exact", "slab", "torch")]
    if torch.device(device).type == "cpu":  # cuSPARSE does not promise the same bits twice
        ways.append(("sparse", "slab", "torch"))
    if "triton" in cce.backends(device):
        ways += [("exact", "slab", "triton"), ("exact", "fused", "triton")]
    if "triton" in filtering.filter_backends(device, dtype, D):
        ways.append(("sparse", "slab", "triton"))
    return ways


class Unfused(Sink):
    """Writes the gradient down, in fp32."""

    def __init__(self, state):
        super().__init__(state)
        self.dC = torch.zeros(state.weight.shape, device=state.weight.device)

    def rows(self, start, G, E):
        weight_gradient(G, E, self.dC[start : start + G.shape[1]])

    def listed(self, lists):
        filtering.write_rows(self.dC, lists, backend=self.state.handle.backend)


def check_classifier(device="cpu", N=40, V=300, D=40, layouts=("fp32", "master", "int8"), softcap=None):
    """forge_classifier makes 03's loss and dE and, from 03's dC, the bits of State.step: weight, master copy, moments
    and codes; in several slices of the vocabulary, with ignored tokens. In fp32 that dC is 03's own; in bf16 03 would
    round it, so there it is the same sum in fp32 (v3's in registers is another, to the last places)."""
    if torch.device(device).type == "cuda":
        V = 10 * V  # the least blocks of a GPU are larger
    for layout in layouts:
        dtype = LAYOUTS[layout].weight
        E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, dtype, device))
        x = x.where(torch.arange(N, device=device) % 7 > 0, -100)
        for gradient, rung, backend in classifier_ways(device, dtype, D):
            if softcap and gradient == "sparse":
                continue
            title = f"{layout}, {gradient}, {rung}, {backend}"
            options = dict(gradient=gradient, softcap=softcap, workspace=1 << 21 if gradient == "sparse" else 1)
            options |= dict(backend=backend, reduction="sum")
            pair = [classifier_handle(C, layout, rung, backend, 4 * 1024 * D) for _ in range(2)]
            slow = INTERPRETED and backend == "triton"
            if slow and layout != layouts[-1]:
                continue
            for step in (1,) if slow else (1, 2):
                results = []
                for (weight, handle), fused in zip(pair, (True, False), strict=True):
                    state, e = handle["weight"], E.clone().requires_grad_()
                    handle.arm(1e-2 * step, step)
                    if fused:
                        loss = forge_classifier(e, weight, x, state, **options)
                        loss.backward()
                    else:
                        sink = Unfused(state)
                        loss = filtering.linear_cross_entropy(e, weight, x, sink=sink, **options)
                        loss.backward()
                        if dtype == torch.float32:
                            plain = filtering.linear_cross_entropy(e, weight, x, **options)
                            dC = torch.autograd.grad(plain, weight)[0]
                            base.require(torch.equal(dC, sink.dC), f"{title}: the sink's gradient is not 03's")
                        state.updated = False
                        state.step(sink.dC)
                    results.append([loss.detach(), e.grad])
                for what, a, b in zip(("loss", "dE"), *results, strict=True):
                    base.require(torch.equal(a, b), f"{title}: {what} is not 03's")
                ours, theirs = (h["weight"].tensors | {"weight": w.detach()} for w, h in pair)
                for name, tensor in ours.items():
                    wrong = int((tensor != theirs[name]).sum())
                    if rung == "fused":
                        wrong = max(0, wrong - tensor.numel() // 20) if tensor.dtype != torch.float32 else int(
                            cce.error(tensor, theirs[name]) > 1e-5)
                    base.require(wrong == 0, f"{title}: {wrong} elements of {name} differ")
                if rung == "fused":  # go on from the same bits
                    pair[1][1].load_state_dict(copy.deepcopy(pair[0][1].state_dict()))
                    pair[1][0].data.copy_(pair[0][0])


def check_classifier_use(device="cpu", N=24, V=300, D=128):
    """A pass without gradients, or one that is not after C's, takes no step; unarmed, C gets 03's gradient; what would
    go wrong raises."""
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.float32, device))
    e = E.clone().requires_grad_()
    weight, handle = classifier_handle(C, "fp32", "auto", "auto", SLAB)
    state = handle["weight"]
    loss = functools.partial(forge_classifier, targets=x, state=state, gradient="exact")
    loss(e, weight).backward()
    want = torch.autograd.grad(filtering.linear_cross_entropy(e, weight, x), (e, weight))
    base.require(all(map(torch.equal, (e.grad, weight.grad), want)), "unarmed: not the gradients of 03's loss")
    weight.grad = None
    handle.arm(0.1, 1)
    with torch.no_grad():
        base.require(torch.equal(loss(e, weight), loss(E, weight)), "no_grad: another loss")
    before = weight.detach().clone()
    torch.autograd.grad(loss(e, weight), e)
    base.require(torch.equal(before, weight), "a pass that is after dE alone took a step")
    total = loss(e, weight)
    must_raise("used twice", lambda: loss(e, weight))
    total.backward(retain_graph=True)
    base.require(not torch.equal(before, weight) and weight.grad is None, "an armed pass took no step")
    after = weight.detach().clone()
    must_raise("modified by an inplace operation", total.backward, RuntimeError)
    del total
    handle.arm(0.1, 2)
    total = loss(e, weight)
    handle.disarm()
    must_raise("disarmed", total.backward)
    del total
    for gradient in ("exact", "sparse"):  # what waits is the same step, and notices when it no longer can be
        pair = [classifier_handle(C, "fp32", "slab", "torch", 4 * 128 * 256) for _ in range(2)]
        for (w, h), wait in zip(pair, (False, True), strict=True):
            h.stash() if wait else h.arm(0.1, 1)
            total = forge_classifier(e, w, x, h["weight"], gradient=gradient)
            total.backward()
            kept = [t for factor in h["weight"].factors for t in tensors_of(factor)]
            base.require(not any(t.requires_grad for t in kept), f"{gradient}: a factor keeps the graph")
            base.require(not wait or h.release(0.1, 1), f"{gradient}: no step")
        off = cce.error((pair[1][0] - C).detach(), (pair[0][0] - C).detach())
        base.require(off < 1e-5, f"{gradient}: a step that waited differs by {off:.1e}")
    targets = x.clone()
    for spoil in (targets.zero_, lambda: w.detach().mul_(2)):
        h.stash()
        forge_classifier(e, w, targets, h["weight"], gradient="exact").backward()
        spoil()
        must_raise("changed in place", lambda: h.release(0.1, 2))
        h.disarm()
    plain, linear = forged(C, AdamW())
    must_raise("pass classifier=", lambda: forge_classifier(e, plain, x, linear["weight"]))
    weight, handle = classifier_handle(C, "fp32", "auto", "auto", SLAB)
    ways = [g for g, _, backend in classifier_ways(device, torch.float32, D) if backend == "torch"]
    for gradient in dict.fromkeys(ways):
        again = functools.partial(forge_classifier, C=weight, targets=x, state=handle["weight"], gradient=gradient,
                                  backend="torch")
        handle.arm(0.1, 1)
        again(e).backward()
        must_raise("already had its step", lambda: again(e).backward())  # noqa: B023
        total = again(e)
        handle.disarm()
        must_raise("disarmed", total.backward)
        del total
        handle.arm(0.1, 2)
        total = again(e.bfloat16())  # C is cast: autograd does not watch the weight
        with torch.no_grad():
            weight.mul_(2)
        must_raise("changed between", total.backward)
        del total
    for later in (False, True) if "sparse" in ways else ():  # a sparse gradient that backward takes back
        ends = []
        for gradient in ("exact", "sparse"):
            w, h = classifier_handle(C, "fp32", "slab", "torch", 4 * 128 * 256, SGD())
            h.stash() if later else h.arm(1.0, 1)
            leaf = E.clone().requires_grad_()
            total = forge_classifier(leaf, w, x, h["weight"], gradient=gradient)
            with mock.patch.object(filtering, "refusal", lambda *numbers: "refused"):
                total.backward()
            kinds = [type(factor) for factor in h["weight"].factors]
            base.require(not later or kinds == [Classes] and h.release(1.0, 1), f"refused: {kinds} are kept")
            ends.append((w.detach() - C, leaf.grad))
        same = all(cce.error(b, a) < 1e-5 for a, b in zip(*ends, strict=True))
        base.require(same, "refused in backward: not the exact step")
    weight, handle = classifier_handle(C, "fp32", "auto", "auto", SLAB)
    state, loss = handle["weight"], functools.partial(loss, state=handle["weight"])
    after = weight.detach().clone()
    must_raise("bias", lambda: loss(e, weight, bias=torch.zeros(V, device=device)))
    must_raise("gradient is", lambda: forge_classifier(e, weight, x, state, gradient="filter"))
    must_raise("fp16", lambda: loss(e.half(), weight))
    must_raise("was replaced", lambda: (handle.arm(0.1, 2), loss(e, nn.Parameter(C.clone()))))
    base.require(torch.equal(after, weight), "a refusal left a trace")


def check_embedding(device="cpu", N=90, V=50, K=136):
    """An embedding's step is that of its whole gradient, bit for bit, also in rows of tokens that did not come; unarmed
    and in its output it is nn.Embedding."""
    generator = torch.Generator().manual_seed(0)
    W = 0.02 * torch.randn(V, K, generator=generator).to(device)
    for layout, rule in [*((layout, AdamW(weight_decay=0.1)) for layout in LAYOUTS), ("int8", AdamMini())]:
        for rung, backend in [("slab", backend) for backend in cce.backends(device)]:
            model = nn.Sequential(nn.Embedding(V, K)).to(device)
            model[0].weight.data.copy_(W)
            options = dict(rung=rung, backend=backend, slab=4 * 128 * 256)
            handle = forge(model, rule, layout, embeddings=True, **options)
            twin, other = forged(W, rule, layout, "slab", backend, "0.weight")
            theirs = nn.Parameter(W.clone())
            library = library_step(AdamW(weight_decay=0.1), theirs)
            for step in (1, 2):
                tokens = torch.randint(V // 2, (1, N), generator=generator).to(device)
                dX = torch.randint(-2, 3, (1, K, N), generator=generator).float().mT.to(device)  # strided
                handle.arm(1e-2, step)
                other.arm(1e-2, step)
                out = model(tokens)
                same = out.dtype == torch.float32 and torch.equal(out, twin.detach()[tokens].float())
                base.require(same, f"{layout}, {rung}, {backend}: the output is not the rows of the weight")
                version = model[0].weight._version
                (1.0 * out).backward(dX)
                base.require(model[0].weight._version > version, f"{layout}, {backend}: autograd was not told")
                dense = torch.zeros(V, K, device=device).index_add_(0, tokens.flatten(), dX.flatten(0, 1))
                other["0.weight"].step(dense)
                told = zip(handle.telemetry()[1:], other.telemetry()[1:], strict=True)
                alike = all(torch.allclose(a.double(), b.double()) for a, b in told)
                base.require(alike, f"{layout}, {backend}: other telemetry")
                library.param_groups[0]["lr"], theirs.grad = 1e-2, dense
                library.step()
                pairs = zip((handle["0.weight"].tensors | {"weight": model[0].weight}).items(),
                            (other["0.weight"].tensors | {"weight": twin}).values(), strict=True)
                for (name, a), b in pairs:
                    base.require(torch.equal(a, b), f"{layout}, {rung}, {backend}: {name} differs")
                for rows in (slice(V // 2), slice(V // 2, V)) if layout in ("fp32", "master") else ():
                    moved = (handle["0.weight"].tensors.get("master", model[0].weight) - W)[rows].detach()
                    off = cce.error(moved, (theirs.detach() - W)[rows])
                    base.require(off < 1e-3, f"{layout}, {backend}: torch's AdamW moves other than this by {off:.1e}")
            handle.disarm()
            model(tokens).backward(dX)
            base.require(torch.equal(model[0].weight.grad.float(), dense), f"{rung}, {backend}: unarmed gradient")


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
    three-way rule; with factors that give the norm by inner products, by slabs, and that turn into gradients. Then a
    micro-batch of NaN: not a bit changes, and the next step is as if it had not been."""
    rule = AdamW(eps=0.5, weight_decay=0.1)
    for tokens in sizes:
        generator = torch.Generator().manual_seed(tokens)
        steps = [torch.randint(V, (2, 4 * tokens), generator=generator).to(device) for _ in range(3)]
        for clip in (0.0, 1e-2, 100.0):
            ends, norms = [], []
            for dtype in (torch.float64, torch.float32):
                model = TinyLM(V, D).to(device, dtype)
                optimizer = library_step(rule, list(model.parameters()))
                for step, (x, y) in enumerate(steps, 1):
                    optimizer.zero_grad()
                    model(x, y).backward()
                    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
                    optimizer.param_groups[0]["lr"] = 1e-2 * step
                    optimizer.step()
                ends.append([p.detach() for p in model.parameters()])
                norms.append(norm.item())
            for rung, backend in rungs(device):
                if INTERPRETED and backend == "triton" and (tokens, clip, rung) != (sizes[0], 1e-2, "fused"):
                    continue
                title = f"{4 * tokens} tokens, clip {clip}, {rung}, {backend}"
                model = TinyLM(V, D).to(device)
                handle = forge(model, rule, rung=rung, backend=backend, embeddings=True, classifier="classifier")
                model.head = handle["classifier"]
                others = library_step(rule, list(handle.ordinary.values()))
                must_raise("stash() and release()", lambda: handle.arm(1e-2, 1))  # noqa: B023
                for step, (x, y) in enumerate(steps, 1):
                    others.param_groups[0]["lr"] = 1e-2 * step
                    for bad in (True, False):
                        before = [t.clone() for t in (*model.parameters(), *every_tensor(handle))]
                        others.zero_grad()
                        handle.stash()
                        for part in range(4):
                            i = slice(part * tokens, (part + 1) * tokens)
                            weight = math.nan if bad and part == 2 else 0.25
                            (weight * model(x[i], y[i])).backward()
                        kept = [t for s in handle.states.values() for f in s.factors for t in tensors_of(f)]
                        base.require(not any(t.requires_grad for t in kept), f"{title}: a factor keeps the graph")
                        parameters = list(handle.ordinary.values())
                        # Without waiting, in every second step.
                        early = dict(norm=handle.norm(parameters)) if step % 2 and not bad else {}
                        taken = handle.release(1e-2 * step, step, clip, parameters, **early)
                        base.require(taken != bad, f"{title}: a step was {'taken' if taken else 'not taken'}")
                        same = all(map(torch.equal, before, (*model.parameters(), *every_tensor(handle))))
                        base.require(same == bad, f"{title}: a step that was skipped changed something")
                    others.step()
                if clip:
                    off = abs(handle.clipped_norm / norms[0] - 1)
                    base.require(off <= abs(norms[1] / norms[0] - 1) + 1e-6, f"{title}: the norm is off by {off:.1e}")
                for (name, p), peer, want in zip(model.named_parameters(), ends[1], ends[0], strict=True):
                    cce.require_as_good(f"{title}: {name}", p.detach(), peer, want, 1e-6)


def every_tensor(handle):
    return [t for state in handle.states.values() for t in state.tensors.values()]


def check_factors(device="cpu", M=96, K=160):
    """The norm from factors, and the sum over factors of all kinds, against the gradient; and that the smaller of
    factors and gradient is what is kept."""
    generator = torch.Generator().manual_seed(0)
    for N in (16, 57, 100, 300):
        X, dY = (torch.randn(N, width, generator=generator).bfloat16().to(device) for width in (K, M))
        dW = dY.double().T @ X.double()
        for rung, backend in rungs(device):
            weight, handle = forged(torch.zeros(M, K, device=device), SGD(), "fp32", rung, backend)
            handle.stash()
            state = handle["weight"]
            for part in (slice(0, N // 2), slice(N // 2, N)):
                state.keep(Product(dY[part], X[part]))
            held, whole = factor_bytes(state.factors), 4 * M * K
            base.require(held == min(2 * N * (M + K), whole), f"{N} tokens: {held} bytes are kept")
            predicted = min(stash_bytes([(M, K)], N), whole)
            base.require(held == predicted, f"{N} tokens: {held} bytes are kept, {predicted} were predicted")
            state.factors = merged(state.factors)
            for factors in (state.factors, [*state.factors, Whole(torch.zeros(M, K, device=device))]):
                state.factors = factors
                off = abs(handle.norm().item() / dW.norm().item() - 1)
                base.require(off < 1e-6, f"{N} tokens, {rung}, {backend}: the norm is off by {off:.1e}")
            base.require(handle.release(1.0, 1), "finite factors, and no step")
            base.require(cce.error(weight.detach(), -dW) < 2e-6, f"{N} tokens, {rung}, {backend}: another update")
            base.require(not state.factors and not handle.stashing, "factors are left")


def check_release(device="cpu", M=160, K=600):
    """Factors of several kinds, in several slabs of rows and of columns; what is not finite, in any of them; and the
    states between stash(), release(), arm() and disarm()."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    X, dY, more = draw(20, K), draw(20, M), draw(M, K)
    for rung, backend in rungs(device):
        title = f"{rung}, {backend}"
        weight, handle = forged(torch.zeros(M, K, device=device), SGD(), "fp32", rung, backend)
        state = handle["weight"]
        handle.arm(0.0, 1)
        handle.stash()
        base.require(handle.stashing and not handle.armed, f"{title}: stash() after arm()")
        state.factors = [Product(dY[:7], X[:7]), Whole(more), Product(dY[7:], X[7:])]
        must_raise("factors of an earlier", handle.stash)
        dW = dY.T @ X + more
        base.require(abs(handle.norm() / dW.norm() - 1) < 1e-5, f"{title}: norm of several kinds of factors")
        base.require(handle.release(1.0, 1) and cce.error(weight.detach(), -dW) < 1e-5, f"{title}: several kinds")
        base.require(not (state.factors or handle.stashing or handle.armed), f"{title}: release() left something")
        before, other = weight.detach().clone(), nn.Parameter(torch.zeros(3, device=device))
        bad = Whole(torch.full((M, K), math.inf, device=device))
        for factors, g in (([Product(dY, X), bad], 1.0), ([Product(dY, X)], math.nan)):
            handle.stash()
            state.factors, other.grad = factors, torch.full((3,), g, device=device)
            taken = handle.release(1.0, 2, others=[other])
            base.require(not taken and torch.equal(before, weight), f"{title}: stepped by what is not finite")
            base.require(other.grad is None and not (state.factors or handle.stashing), f"{title}: a refusal's rest")
        handle.stash()
        for scale in (2.0, 3.0):  # uses outside the layer, in two passes
            (scale * weight).sum().backward()
        base.require(abs(handle.norm() - 5 * math.sqrt(M * K)) < 2e-3, f"{title}: a use outside its layer is lost")
        base.require(handle.release(0.0, 2), f"{title}: two uses outside the layer are refused")
        handle.stash()
        base.require(handle.norm() == 0 and handle.release(0.1, 2, 1.0), f"{title}: nothing was kept")
        base.require(handle.clipped_norm == 0 and not handle.stashing, f"{title}: after an empty step")
        handle.stash()
        handle.arm(0.0, 3)
        base.require(handle.armed and not handle.stashing, f"{title}: arm() after stash()")
    a, b = draw(1500, 3), draw(1500, 5)
    base.require(cce.error(ghost_square(a, b), (a.T @ b).square().sum()) < 1e-5, "a ghost norm in pieces")


def check_slices(device="cpu", V=300, D=256, kernels=not INTERPRETED):
    """Armed, and from what waited, factors of 8 tokens and dC of 80: the gradient that is written down, in several
    slabs of rows, with operands narrower than the weight, and a softcap. The factors keep no graph."""
    for N, dtype, cap in ((8, torch.float32, 5.0), (8, torch.bfloat16, None), (80, torch.float32, None)):
        E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, dtype, device))
        for gradient, rung, backend in classifier_ways(device, dtype, D):
            if backend == "triton" and not (kernels and (gradient == "sparse" or not INTERPRETED)):
                continue  # slow
            options = dict(gradient=gradient, softcap=None if gradient == "sparse" else cap, backend=backend)
            title, changes = f"{N} tokens, {dtype}, {gradient}, {rung}, {backend}", []
            for way in ("stash", "arm", "written down"):
                weight, handle = classifier_handle(C, "fp32", rung, backend, 4 * 128 * 256, SGD())
                state, e, old = handle["weight"], E.clone().requires_grad_(), weight.detach().clone()
                handle.stash() if way == "stash" else handle.arm(1.0, 1)
                if way == "written down":
                    sink = Unfused(state)
                    filtering.linear_cross_entropy(
                        e, weight.to(dtype), x, sink=sink, reduction="sum", **options).backward()
                    changes.append(-sink.dC)
                    continue
                forge_classifier(1.0 * e, weight, x, state, reduction="sum", **options).backward()  # E has a graph
                if way == "stash":
                    kinds = [type(factor) for factor in state.factors]
                    small = Listed if gradient == "sparse" else Classes
                    base.require(kinds == [small if N == 8 else Whole], f"{title}: kept {kinds}")
                    kept = [t for factor in state.factors for t in tensors_of(factor)]
                    base.require(not any(t.requires_grad for t in kept), f"{title}: a factor keeps the graph")
                    norm = handle.norm()
                    handle.release(1.0, 1)
                changes.append(weight.detach() - old)
            for change in changes[:2]:
                off = cce.error(change, changes[2])
                base.require(off < 1e-4, f"{title}: another update, by {off:.1e}")
            base.require(abs(norm / changes[2].norm() - 1) < 1e-5, f"{title}: another norm")


def check_classifier_memory(device="cpu", N=64, V=2**16, D=128):
    """Backward of a classifier holds neither dC nor the logits."""
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.float32, device))
    for backend in cce.backends(device):
        if backend == "triton" and torch.device(device).type == "cpu":
            continue  # the same buffers, much slower
        weight, handle = classifier_handle(C, "fp32", "auto", backend, 4 * MIB)
        e = E.requires_grad_()

        def step():
            handle.arm(1e-3, 1)  # noqa: B023
            loss = forge_classifier(e, weight, x, handle["weight"], gradient="exact", workspace=MIB)  # noqa: B023
            loss.backward()

        step()
        peak = base.peak_bytes(step, device)
        base.require(peak < C.nbytes / 2, f"{backend}: {peak / C.nbytes:.2f} of the gradient's bytes at the peak")


def check_graph(device="cuda"):
    """A captured CUDA graph, armed anew before each replay, makes the bits of eager steps, and nothing is compiled
    for a new step or rate (GPU only)."""
    W, data = whole_numbers(64, 256, 512, device, steps=4)
    for layout in LAYOUTS:
        for rung in ("slab", "fused"):
            eager, handle = forged(W, AdamW(), layout, rung, "triton")
            kernel, variants = (forge_kernel if rung == "fused" else step_kernel), None
            for t, (X, dY) in enumerate(data, 1):
                take_step(eager, handle, X, dY, 1e-3 * t, t)
                count = sum(len(cache[0]) for cache in kernel.device_caches.values())
                base.require(variants in (None, count), f"{layout}, {rung}: step {t} compiled a kernel")
                variants = count
            weight, handle = forged(W, AdamW(), layout, rung, "triton")
            X, dY = (t.clone() for t in data[0])
            state = handle["weight"]
            handle.arm(0.0, 1)  # capture runs nothing
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                weight_update(state, Product(dY, X))
            for t, (x, dy) in enumerate(data, 1):
                X.copy_(x)
                dY.copy_(dy)
                handle.arm(1e-3 * t, t)
                graph.replay()
            base.require(torch.equal(eager, weight), f"{layout}, {rung}: the graph's steps differ")


# The bugs of --break.


def _one_noise(*arguments, _bits=random_bits):
    return _bits(*arguments[:2], 0, *arguments[3:])


def _noise_of_the_shard(seed, step, number, row, col, *size, _bits=random_bits):
    return _bits(seed, step, number, 0, 0, *size)


class _Fp32Scalars(AdamW):
    def scalars(self, lr, step):
        """1 - b2^t from an fp32 b2^t."""
        a = list(super().scalars(lr, step))
        a[4] = float(1 / np.sqrt(np.float32(1) - np.float32(self.betas[1]) ** np.float32(step)))
        return a


class _MeanOfM(State):
    def move_rows(self, norms, row=0):
        """By the momentum's squares, as it was before this step."""
        rows = slice(row, row + len(norms))
        super().move_rows(row_norms(read_m(self.fields, rows, rows)), row)


class _WithoutDecay(AdamW):
    def scalars(self, lr, step):
        return 1.0, *super().scalars(lr, step)[1:]


def _keep_gradients(state):
    kept = []

    def hook(weight):
        state.step(weight.grad)
        kept.append(weight.grad)
        weight.grad = None

    state.weight.register_post_accumulate_grad_hook(hook)


def _add_to_slab(dY, X, out, add=False):
    out.add_(dY.float().T @ X.float())


class _LocalRows(Sink):
    """Forgets where in the vocabulary its slice lies."""

    def rows(self, start, G, E):
        super().rows(0, G, E)


class _DecayFirst(Sink):
    """Decays all of W at once, before dE has been made from it."""

    def begin(self):
        super().begin()
        self.state.weight.data.mul_(0.999)


class _LastMicroBatch(State):
    def keep(self, factor, *price):
        self.factors = []
        super().keep(factor, *price)


class _NormOfTheForged(Forge):
    def norm(self, others=()):
        return super().norm()


def _listed_rows_only(state, fields, gradient, row, col, _step=torch_step):
    """The step of a sparse Adam: rows without a gradient keep weight and moments as they were."""
    rows, cols = slice(row, row + len(gradient)), slice(col, col + gradient.shape[1])
    tensors = [fields.W, fields.m, fields.v]
    before, none = [t[rows, cols].clone() for t in tensors], (gradient == 0).all(1, keepdim=True)
    _step(state, fields, gradient, row, col)
    for tensor, old in zip(tensors, before, strict=True):
        tensor[rows, cols] = torch.where(none, old, tensor[rows, cols])


def _never_turned_back(U, make=orthogonal):
    """Of a tall matrix the transpose is orthogonalised, and taken for the matrix."""
    return make(U.mT.contiguous()).reshape(U.shape) if U.shape[-2] > U.shape[-1] else make(U)


def _codes_stay(f, at, scale_at, m, noise, write=write_m):
    """8-bit momentum is read and moved, but not written back."""
    if f.m_scale is None:
        write(f, at, scale_at, m, noise)


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "down-the-columns": (check_mini, "row_norms", lambda G: torch.linalg.vector_norm(G, dim=0).repeat(2)[: len(G)]),
    "mean-of-m": (check_mini, "State", _MeanOfM),
    "one-stack": (check_muon, "matrices_of", lambda U, rows: U),
    "never-turned-back": (check_orthogonal, "orthogonal", _never_turned_back),
    "no-nesterov": (check_muon, "look_ahead_torch", lambda g, m, momentum: m),
    "codes-stay": (check_muon, "write_m", _codes_stay),
    "wrong-side": (check_orthogonal, "rate_of_shape", lambda M, K: math.sqrt(max(1, K / M))),
    "update-first": (check_input_gradient, "dx_then_update", lambda dx, update: (update(), dx())[::-1]),
    "truncate": (check_rounding, "round_to_bf16", lambda x, noise: (x.view(torch.int32) & -65536).view(torch.float32)),
    "noisy-nan": (check_rounding, "round_to_bf16", lambda x, noise: (
        (x.contiguous().view(torch.int32) + noise) >> 16).to(torch.int16).view(torch.bfloat16)),
    "one-noise": (check_rounding, "random_bits", _one_noise),
    "shard-noise": (check_shards, "random_bits", _noise_of_the_shard),
    "no-floor": (check_codes, "V_FLOOR", tl.constexpr(0)),
    "fp32-scalars": (check_exact, "AdamW", _Fp32Scalars),
    "no-decay": (check_exact, "AdamW", _WithoutDecay),
    "old-slab": (check_exact, "weight_gradient", _add_to_slab),
    "rounded-gradient": (check_fidelity, "weight_gradient", lambda dY, X, out, add: out.copy_((dY.T @ X).bfloat16())),
    "all-gradients": (check_memory, "step_in_hook", _keep_gradients),
    "deaf": (check_misuse, "reused", lambda name: ""),
    "local-rows": (check_classifier, "Sink", _LocalRows),
    "decay-first": (check_classifier, "Sink", _DecayFirst),
    "listed-rows-only": (check_embedding, "torch_step", _listed_rows_only),
    "last-micro-batch": (check_stash, "State", _LastMicroBatch),
    "norm-of-the-forged": (check_stash, "Forge", _NormOfTheForged),
    "nan-is-fine": (check_stash, "all_finite", lambda tensors: True),
    "ghost-of-each-token": (check_factors, "ghost_square", lambda dY, X: (
        dY.double().square().sum(1) @ X.double().square().sum(1))),
}
if HAS_TRITON:

    @triton.jit
    def _bits_of_the_tile(key, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
        index = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        return (tl.randint(key[0], index) & 0xFFFF).to(tl.int32)

    @triton.jit
    def _decay_in_gradient(p, g, m, v, a, EXACT: tl.constexpr):
        return adamw_tile_of_this_file(p, g + (1.0 - a[0]) * p, m, v, (1.0, a[1], a[2], a[3], a[4], a[5], a[6]), EXACT)

    adamw_tile_of_this_file = adamw_tile
    BREAKS |= {
        "tile-noise": (check_shards, "tile_bits", _bits_of_the_tile),
        "coupled-decay": (check_exact, "adamw_tile", _decay_in_gradient),
    }


# ==== 11. Measurements ================================================================================================


def plot_spectrum(M=192, K=128, shown=(1, 2, 4, 8, 16, 32, 64, 128)):
    """The singular values of a matrix like a gradient, few of them large, before orthogonal() and after."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, K, generator=generator, dtype=torch.float64))[0] for n in (M, K))
    G = (left / torch.arange(1, K + 1)) @ right.T  # the i-th is 1 / i
    after = (torch.linalg.svdvals(orthogonal(G.clone())) / rate_of_shape(M, K)).tolist()
    before = (1 / torch.arange(1, K + 1) / torch.linalg.vector_norm(G)).tolist()
    made = [p_of(value) for value in before]  # in the order of before
    print(f"singular values of a matrix over its norm, and of Muon's update ({min(after):.2f} to {max(after):.2f})")
    for i in shown:
        print(f"  {i:>4}. {before[i - 1]:.4f} {'#' * round(30 * before[i - 1]):<22}-> {made[i - 1]:.2f} "
              f"{'#' * round(30 * made[i - 1])}")
    base.require(abs(sum(after) - sum(made)) < 1e-6, "orthogonal() made others")


def p_of(value):
    """Newton-Schulz of one singular value."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        value = a * value + b * value**3 + c * value**5
    return value


def measure_bytes(device, ledger):
    """Resident bytes a parameter by layout, and what backward and step hold beyond what is alive after forward."""
    print("bytes a parameter with AdamW   held: gradient apart | fused   moved: unfused | fused")
    for layout in LAYOUTS:
        held, moved = ([f(AdamW(), layout, fused) for fused in (False, True)] for f in (resident_bytes, traffic_bytes))
        print(f"  {layout:<28} {held[0]:>19.2f} | {held[1]:>5.2f} {moved[0]:>16.2f} | {moved[1]:>5.2f}")
    print()
    for rule, layout in itertools.product((AdamW(), Muon()), LAYOUTS):
        weight, handle = forged(torch.zeros(512, 1024, device=device), rule, layout)
        tensors, name = [weight, *handle["weight"].tensors.values()], f"{type(rule).__name__}, {layout}: held, fused"
        measured = sum(t.nbytes for t in tensors) / weight.numel()
        ledger.row(name, "W + state", resident_bytes(rule, layout, True), measured, "B", (1, 1))
    ours = nn.Parameter(torch.zeros(768, 3072, device=device))
    handle = Forge({"weight": ours}, Muon())
    gradient = handle.buffer(ours.numel(), torch.float32)[: ours.numel()].view_as(ours).normal_()
    work = functools.partial(handle["weight"].orthogonal_update, gradient, 0)
    handle.prepare(0.0, 1)
    work()
    width = handle.narrow.itemsize
    ledger.row("Muon, 768 x 3072: beside dW", "2 M K + 3 m^2", orthogonal_bytes(768, 3072, width) / MIB,
               base.peak_bytes(work, device) / MIB)
    model, x = stack(device)
    handle = forge(model, AdamW())
    handle.stash()
    model(x).square().sum().backward()
    shapes = [p.shape for p in model.parameters()]
    ledger.row("factors of 64 tokens, 6 layers", "(M + K) N a layer", stash_bytes(shapes, len(x), 4) / MIB,
               factor_bytes(f for state in handle.states.values() for f in state.factors) / MIB, band=(1, 1))
    model, _ = stack("meta")
    sizes = [p.numel() for p in model.parameters()]
    gradients, largest = 4 * sum(sizes), 4 * max(sizes)
    for name, formula, predicted in (
        ("fused", "gradients", gradients), ("foreach", "gradients + temporaries", 2 * gradients),
    ):
        ledger.row(f"AdamW({name}): beyond forward", formula, predicted / MIB, peak_of_step(device, name) / MIB,
                   band=(0.9, 1.1))
    hook = peak_of_step(device, "forge", rung="hook") / MIB
    ledger.row("v1, hook: beyond forward", "one layer + blocks", largest / MIB, hook, band=(0.9, 2))
    for name, rung in (("v2, slabs", "slab"), ("v3, FORGE", "fused")):
        compiled = device.type == "cuda" and HAS_TRITON
        measured = peak_of_step(device, "forge", rung=rung) / MIB if compiled else None
        ledger.row(f"{name}: beyond forward", "dX, slab allocated before", None, measured)


def measure_gpt(ledger, tokens=16):
    """What a whole step of a GPT of GPT-2 small's layers holds beyond weights and states, with few tokens."""
    config = base.GPTConfig(256, tokens, 12, 12, 768)
    x = torch.randint(256, (1, tokens), device="cuda")
    for layout in LAYOUTS:
        dtype = LAYOUTS[layout].weight
        activations = base.activation_bytes(config, tokens, fused_norm=True) * dtype.itemsize / 4
        for name in ("fused", "foreach", "forge"):
            if layout in ("master", "int8") and name != "forge":
                continue  # torch has neither
            torch.manual_seed(0)
            with torch.device("cuda"):
                model = base.GPT(config).to(dtype)
            model.embedding.requires_grad_(False)
            model.classifier.requires_grad_(False)
            size = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
            if name == "forge":
                handle = forge(model, AdamW(), layout)
                others = torch.optim.AdamW(handle.ordinary.values())
            else:
                handle = None
                others = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **{name: True})

            def train_step(step, model=model, handle=handle, others=others):
                if handle:
                    handle.arm(1e-3, step)
                model(x).float().square().mean().backward()
                others.step()
                others.zero_grad()

            train_step(1)
            peak = base.peak_bytes(functools.partial(train_step, 2), "cuda")
            if handle:
                held = handle.slab.nbytes
                ledger.row(f"GPT, {layout}, forge", "slab + activations", (held + activations) / MIB,
                           (peak + held) / MIB, band=(0.9, 1.2))
                ledger.row("  beyond activations", "at most 32 MiB", SLAB / MIB, (peak + held - activations) / MIB,
                           band=(0, 1))
            else:
                ledger.row(f"GPT, {layout}, AdamW({name})", "gradients" + " + as much" * (name == "foreach"),
                           size * (1 + (name == "foreach")) / MIB, peak / MIB, band=(0.9, 1.1))


def in_a_row(step, between, count=3):
    """Milliseconds of a step as in training: several in a row, each followed by what stands for the other layers. While
    the GPU works at those, the host launches the next step, most of whose kernels are too short to hide a launch."""
    return base.bench(lambda: [(step(), between()) for _ in range(count)], "cuda", runs=2).median / count


def measure_classifier(ledger, N, V, D):
    """One step of a classifier: loss, dE and AdamW, against 03's gradients and then the step."""
    E, C, x = (t.detach() for t in filtering.trained_problem(N, V, D, torch.bfloat16, "cuda"))
    dC, logits, rows = 2 * V * D / MIB, 4 * N * V / MIB, []
    print(f"\na classifier's step, N = {N}, V = {V}, D = {D}, bf16: loss, dE and AdamW. dC alone: {dC:,.0f} MiB; the "
          f"logits in fp32: {logits:,.0f} MiB\n{'layout':<8}{'gradient':<9}{'MiB beyond weights and states':>30}"
          f"{'03, then the step':>20}{'ms':>8}{'03, then the step':>20}{'03, then torch':>16}")
    A = torch.randn(8192, 8192, device="cuda").bfloat16()
    B = torch.empty_like(A)

    def layers():
        for _ in range(5):  # 5.5 TFLOP
            torch.mm(A, A, out=B)

    for layout in ("master", "int8"):
        weight, handle = classifier_handle(C, layout, "auto", "triton", SLAB, AdamW(weight_decay=0.1))
        state, e, stats = handle["weight"], E.clone().requires_grad_(), filtering.SparseStats()
        if layout == "master":
            theirs = nn.Parameter(C.float())
            theirs.grad = torch.empty_like(theirs)
            library = torch.optim.AdamW([theirs], lr=0.0, fused=True)
        for gradient in ("exact", "sparse"):
            count = dict(stats=stats) if gradient == "sparse" else {}

            def fused(gradient=gradient, count=count, handle=handle, state=state, weight=weight, e=e):
                e.grad = None
                handle.arm(0.0, 1)  # a rate of 0: the same work, and the same problem each time
                forge_classifier(e, weight, x, state, gradient=gradient, **count).backward()

            def gradients(gradient=gradient, weight=weight, e=e):
                return torch.autograd.grad(filtering.linear_cross_entropy(e, weight, x, gradient=gradient), (e, weight))

            def unfused(handle=handle, state=state, gradients=gradients):
                _, dC = gradients()
                handle.arm(0.0, 1)
                state.step(dC)

            def with_library(gradients=gradients, theirs=theirs, library=library, weight=weight):
                theirs.grad.copy_(gradients()[1])
                library.step()
                weight.data.copy_(theirs.detach())

            ways, peaks = (fused, unfused, *([with_library] if layout == "master" else [])), []
            for way in ways:
                way()
                e.grad = None
                peaks.append(base.peak_bytes(way, "cuda") / MIB)
            rounds = []
            for _ in range(5):  # in turn: clocks drift
                alone = in_a_row(layers, layers) / 2
                rounds.append([in_a_row(way, layers) - alone for way in ways])
            times = [statistics.median(column) for column in zip(*rounds, strict=True)]
            ratio = statistics.median(ours / theirs for ours, theirs, *_ in rounds)
            fused()
            sparse = stats.decision == "sparse" and count
            held = handle.slab.nbytes / MIB
            candidates = stats.measured[0].item() if sparse else 0
            predicted = classifier_bytes(N, V, D, gradient, candidates) / MIB
            print(f"{layout:<8}{gradient:<9}{peaks[0] + held:>30.0f}{peaks[1]:>20.0f}{times[0]:>8.1f}{times[1]:>20.1f}"
                  + "".join(f"{time:>16.1f}" for time in times[2:]))
            rows.append((layout, gradient, predicted, peaks[0] + held, ratio))
        del weight, handle, state, e
    for layout, gradient, predicted, measured, ratio in rows:
        limit = 1.05 if gradient == "exact" else 1.0
        name = f"{layout}, {gradient}"
        ledger.row(f"{name}: beyond states", "classifier_bytes", predicted, measured, band=(0.85, 1.15))
        ledger.row(f"{name}: at most", "dE + 330 MiB", 2 * N * D / MIB + 330, measured, band=(0, 1))
        ledger.row(f"{name}: time", "03, then the step", 1.0, ratio, "x", band=(0, limit))


def bench_graph(work, runs=5, target=10.0):
    """Median microseconds of each of the functions in `work`, replayed as one CUDA graph, which leaves no launch gaps:
    pass several with buffers of their own, so that nothing is in cache that would not be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for fn in work:
            fn()
        once = base.bench(work[0], "cuda", runs=3).median
        rounds = max(1, min(40, int(target / max(once, 0.01) / len(work))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(rounds):
                for fn in work:
                    fn()
        time = base.bench(graph.replay, "cuda", runs=runs).median
    torch.cuda.current_stream().wait_stream(side)
    return 1e3 * time / rounds / len(work)


def library_way(dY, X, layout):
    """A function that makes dW and step with torch alone: dW as autograd would leave it, AdamW(fused=True), and for the
    master layout the copies between bf16 and fp32. (For 8 bits torch has none.)"""
    M, K = dY.shape[1], X.shape[1]
    dtype = torch.bfloat16 if layout == "bf16" else torch.float32
    p = nn.Parameter(0.02 * torch.randn(M, K, device="cuda").to(dtype))
    W = p.detach().bfloat16() if layout == "master" else None
    p.grad, narrow = torch.empty_like(p), torch.empty(M, K, dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True, capturable=True)

    def step():
        if layout == "bf16":
            torch.mm(dY.T, X, out=p.grad)
        else:
            p.grad.copy_(torch.mm(dY.T, X, out=narrow))
        optimizer.step()
        if W is not None:
            W.copy_(p.detach())

    return step


def measure_speed(M, K, N, layout, fused=True):
    """{way: microseconds} of dW and step for a weight (M, K) and N tokens in bf16."""
    X, dY = (torch.randn(N, width, device="cuda").bfloat16() for width in (K, M))
    copies = max(1, min(12, 1 + int(160e6 / (M * K * traffic_bytes(AdamW(), layout, True)))))  # more than L2 holds
    ways = {}
    if layout != "int8":
        peers = [library_way(dY, X, layout) for _ in range(copies)]
        ways["torch"] = bench_graph(peers)
        del peers
    states = []
    for _ in range(copies):
        weight = nn.Parameter(0.02 * torch.randn(M, K, device="cuda"))
        handle = Forge({"weight": weight}, AdamW(weight_decay=0.1), layout, backend="triton", rung="slab")
        handle.arm(1e-3, 1)
        states.append(handle["weight"])
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)[6:].replace("float", "")  # b16, 32
        dW = torch.empty(M, K, dtype=dtype, device="cuda")

        def whole(state, dW=dW):
            weight_gradient(dY, X, dW)
            state.step(dW)

        ways[f"dW{name} + step"] = bench_graph([functools.partial(whole, state) for state in states])
        del dW, whole
        rows, cols = slab_shape(M, K, SLAB // dtype.itemsize)
        slab = torch.empty(rows * cols, dtype=dtype, device="cuda")
        for state in states:
            state.handle.slab, state.handle.gradient = slab, dtype
        factors = [Product(dY, X)]
        ways[f"slabs {name}"] = bench_graph([functools.partial(s.step_in_slabs, factors, rows, cols) for s in states])
    if fused:
        ways["fused"] = bench_graph([functools.partial(s.step_fused, dY, X) for s in states])
    return ways


TABLE_SHAPES = [(4096, 4096), (4096, 14336), (768, 3072), (2304, 256000)]
TABLE_TOKENS = [128, 512, 1024, 2048, 4096, 16384]


def speed_table(shapes, tokens):
    """dW and step side by side, and how far the rung that plan_update chooses is from the others."""
    ways = ("torch", "dWb16 + step", "dW32 + step", "slabs b16", "slabs 32", "fused")
    print(f"\ndW and step, microseconds (CUDA graphs; X, dY in bf16; 32, b16: dtype of dW)\n{'M x K':>14} {'N':>6} "
          f"{'layout':<7}" + "".join(f"{way:>13}" for way in ways) + "   torch/auto, b16")
    worst, gain = {}, {}
    for M, K in shapes:
        for N in tokens:
            for layout in LAYOUTS:
                got = measure_speed(M, K, N, layout, fused=N <= 1024)
                auto = got["fused" if plan_update(M, K, N, layout).rung == "fused" else "slabs 32"]
                mine = {"auto": auto, "slabs b16": got["slabs b16"]}
                for own, peer in (("auto", "dW32 + step"), ("auto", "dWb16 + step"), ("slabs b16", "dWb16 + step")):
                    worst[own, peer] = max(worst.get((own, peer), (0,)), (mine[own] / got[peer], M, K, N, layout))
                ratios = [got["torch"] / time for time in mine.values()] if "torch" in got else []
                if layout == "master" and N <= 1024 and (M, K) == (4096, 4096):
                    for own, ratio in zip(mine, ratios, strict=True):
                        gain[own] = min(gain.get(own, math.inf), ratio)
                cells = "".join(f"{got[way]:>13.1f}" if way in got else f"{'':>13}" for way in ways)
                print(f"{M:>6} x {K:<6}{N:>6} {layout:<7}{cells}" + "".join(f"{r:>8.2f}" for r in ratios), flush=True)
    for (own, peer), (ratio, M, K, N, layout) in worst.items():
        print(f"{own} against {peer}: at most {ratio:.2f} of its time ({M} x {K}, N = {N}, {layout})")
    for own, ratio in gain.items():
        print(f"{own} against torch, 4096 x 4096, master, up to 1024 tokens: at least {ratio:.2f} times as fast")


def measure_traffic(device, ledger, M=8192, K=8192):
    """Bytes a parameter that the step moves, at the rate at which the same GPU copies."""
    a = torch.empty(2**28, device=device)
    b = torch.empty_like(a)
    rate = 2 * a.nbytes / bench_graph([functools.partial(torch.add, a, 1.0, out=b)])  # bytes a microsecond
    del a, b
    print(f"\na copy moves {rate / 1e6:.2f} TB/s. The step of {M} x {K} from an fp32 dW, as bytes at that rate:")
    dW = 1e-3 * torch.randn(M, K, device=device)
    for layout in LAYOUTS:
        _, handle = forged(0.02 * torch.randn(M, K, device=device), AdamW(), layout, backend="triton")
        handle.arm(1e-3, 1)
        moved = bench_graph([functools.partial(handle["weight"].step, dW)]) * rate / M / K
        predicted = traffic_bytes(AdamW(), layout, True) + 4
        ledger.row(f"{layout}: moved by the step", "2 state + W + dW", predicted, moved, "B", None)


CHECKS = [check_exact, check_mini, check_orthogonal, check_muon, check_muon_use, check_fidelity, check_input_gradient]
CHECKS += [check_rounding, check_shards, check_codes, check_linear]
CHECKS += [check_telemetry, check_resume, check_misuse, check_memory, check_classifier, check_classifier_use]
CHECKS += [check_slices, check_embedding, check_stash, check_factors, check_release, check_classifier_memory]
CHECKS += [check_plans] + [check_graph] * (base.HAS_CUDA and HAS_TRITON)


def body(device, ledger, args):
    base.run_checks(CHECKS, device)
    print()
    compiled = device.type == "cuda" and HAS_TRITON
    eight = next(shape for shape in base.MODELS if shape.name == "Llama 3 8B")
    print(f"between backward and step, {eight.name} has {2 * eight.params / 2**30:.1f} GiB of gradients in bf16")
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    inputs = [4096, 4096, 4096, 14336]  # of q, k and v; of the output; of gate and up; of down
    print(f"factors instead, of its 32 layers: {32 * stash_bytes(shapes, 1, 2, inputs) / 1e6:.2f} MB a token, less than"
          f" those gradients up to {crossover(shapes, 2, 2, inputs):,.0f} tokens\n")
    plot_spectrum()
    print()
    measure_bytes(device, ledger)
    if compiled:
        measure_gpt(ledger)
        measure_traffic(device, ledger)
        measure_classifier(ledger, *cce.gpu_shape())
        if args.table:
            speed_table(TABLE_SHAPES, TABLE_TOKENS)
        else:
            speed_table([(4096, 4096), (768, 3072)], [1024])


def add_arguments(parser):
    parser.add_argument("--table", action="store_true", help="time all shapes, token counts and layouts (GPU, minutes)")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 05_parallelism.py"))


# Exercises
#   1. Add Lion, arXiv 2302.06675 (the sign of b1 m + (1 - b1) g is the update, then m = b2 m + (1 - b2) g), or RMSProp:
#      a rule class, its tile, and a line where tiles are chosen. Which checks does it get for nothing, and what does it
#      need in library_step?
#   2. slab_shape counts waves of 128 x 256 tiles. Print slab_shape(4096, 14336, 2**23) and the waves of two other cuts
#      of the same size; then time them. How much does the cut matter at 512 tokens, and at 16,384?
#   3. Store v in 8 bits without the square root, or without the floor, and let check_codes tell what happens to the
#      largest update. Why is it v's smallest elements, not its largest, that need care?
