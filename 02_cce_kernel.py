"""02 - Cut cross-entropy: the loss without the logits.

The problem in one number
    N = 8192 tokens, V = 256,000 classes, D = 2304 (Gemma 2 2B): the logits are 3.9 GiB in bf16, and a materialised loss
    holds 23 GiB of them at its peak. The loss needs two numbers a token. This file computes both, and the exact
    gradients, with 0.22 GiB beside the gradients themselves, and the loss in the time of one matrix product.

The maths                                                       E (N, D) embeddings, C (V, D) classifier, x (N,) targets
    loss[n] = lse[n] - E[n] . C[x[n]]            lse[n] = log sum_v exp(E[n] . C[v])
  A log-sum-exp can be taken piece by piece. For two pieces with maxima m1, m2 and sums s1, s2 of exp(logit - m):
    m = max(m1, m2)        s = s1 exp(m1 - m) + s2 exp(m2 - m)        lse = m + log s
  so a tile of logits can be made, folded into (m, s) and forgotten. Backward makes the tile again: with lse known,
    G[n, v] = d loss / d logit = g[n] (exp(logit - lse[n]) - [v == x[n]])        dE = G C        dC = G^T E
  which costs one more matrix pass than keeping the logits would: 2 N V D FLOP against 2 N V bytes written and read.

The ladder
    v1  blocked PyTorch: thirty lines, any device, any dtype. The algorithm, and the fast path on a CPU.
    v2  Triton, tile by tile: the paper's Algorithms 1 to 3 as four kernels, each the only writer of what it writes.
    v3  one operation: a kernel that makes partial (max, sum) and the target's logit per split of the vocabulary, merged
        without locks; backward by slices of the vocabulary, one kernel for G and two matrix products a slice.
    v4  the same on Hopper: tiles fetched by its copy engine, persistent programs. As fast as the matrix product alone.
    The exact gradient comes in two orders, over the vocabulary (four matrix passes, little memory) and over tokens
    (three, and an fp32 sum as large as C); gradient_plan chooses by shape and `workspace`, and says what it chose.

How to launch
    python 02_cce_kernel.py                      checks, then memory and time; a minute on a GPU, less on a CPU
    python 02_cce_kernel.py --break no-max       plant a famous bug and watch its check fail (exit status 1)
    python 02_cce_kernel.py --shape 8192 128256 4096

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009 (Algorithms 1 to 3).
    Fused output projection and loss prediction, arXiv 2511.17599 (one operation, splits of the vocabulary).
    Online normalizer calculation for softmax, arXiv 1805.02867.

Left out on purpose: the paper's gradient filtering and vocabulary sorting (03), warp-specialised kernels (in Gluon, a
second language), label smoothing.
"""

import functools
import importlib
import itertools
import math
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

base = importlib.import_module("01_logits_memory")
HAS_TRITON, INTERPRETED, MIB = base.HAS_TRITON, base.INTERPRETED, base.MIB

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:  # macOS, Windows: the kernels below are still defined, never run; backend="triton" says so
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=lambda value: value)

if INTERPRETED and HAS_TRITON:
    from triton.runtime import interpreter
if INTERPRETED and HAS_TRITON and hasattr(interpreter, "_patch_lang"):  # private: other versions may lack it

    def _patch_once(kernel, patch=interpreter._patch_lang):
        """The interpreter replaces all of Triton's language at each call of a function: a fifth of its time. While a
        kernel runs, what its launch has replaced still is, for the functions that it calls."""
        languages = [value for value in kernel.__globals__.values() if value is tl or value is tl.core]
        return patch(kernel) if any(tl.core.is_builtin(language.load) for language in languages) else None

    interpreter._patch_lang = _patch_once


# ==== 1. The cost model ===============================================================================================

WORKSPACE = 256 * MIB  # what backward may hold on a GPU beyond dE and dC, unless the caller says otherwise
CPU_BLOCK = 2**20  # elements of one block of logits on a CPU: 4 MiB in fp32, about the size of its cache


# Time, in matrix passes of 2 N V D FLOP for loss and gradients. G is needed in two products, and no (N, V) buffer may
# hold it, so it is made block by block. Which way the blocks are cut decides what else has to be kept:
#
#   over the vocabulary     lse needs a pass over all of C before the first block of G: logits, logits again, dE, dC.
#                           Four passes. dE, a sum over blocks, is kept in fp32: 4 N D. Each row of dC is written once.
#   over tokens             a row's lse is known once its own block is made, so its logits are used, not remade.
#                           Three passes. dC is the sum over blocks, in fp32: 4 V D. Each row of dE is written once.
#
# The second needs the upstream gradient before it is known. That of a mean or a sum is one number for all tokens, by
# which backward multiplies the finished gradients; a loss per token, or a gradient through lse, takes the first.


class Plan(NamedTuple):
    """How gradients are made: the order of the blocks, matrix passes for loss and gradients, columns (order
    "vocabulary") or rows (order "tokens") of G in a block, and the peak of bytes beyond dE and dC."""

    order: str
    passes: int
    block: int
    beyond: int


def gradient_plan(N, V, D, device, dtype, workspace=None, *, tokens=True, backend="triton"):
    """The Plan for N tokens, V classes of width D: "tokens" if it is allowed and fits `workspace` (bytes, default
    WORKSPACE) in blocks that keep a GPU busy, else "vocabulary", which fits anything down to its smallest block. The
    bytes are those of the kernels; blocked PyTorch on 16-bit inputs makes fp32 copies on top of them."""
    cpu, b = torch.device(device).type == "cpu", dtype.itemsize
    G = b if backend == "triton" and not cpu else max(b, 4)  # bytes of an element of G
    N = max(N, 1)
    least = 128 if cpu else 1024  # rows or columns: fewer would spend the time on reading and writing the sum
    room = WORKSPACE if workspace is None else workspace
    results = b * (N + V) * D
    # Over tokens: dE, the sum for dC and a block of G in forward; in backward dE and the sum, and the results of both.
    held = b * N * D + max(4, b) * V * D
    row = G * V + 2 * 4 * V // 256  # and its partial lse
    rows = CPU_BLOCK // V if cpu and workspace is None else (room + results - held) // row
    fits = (cpu and workspace is None) or held <= room
    if tokens and fits and rows >= min(N, least):
        blocks = 1 if rows >= N else math.ceil(N / (rows // 128 * 128))
        block = min(N, math.ceil(N / blocks / 128) * 128)  # equal shares, in whole tiles
        return Plan("tokens", 3, block, max(held, held + row * block - results))
    held = 4 * N * D if b == 2 else 0  # over the vocabulary: the sum for dE (in fp32 it becomes the result), and G
    column = G * N + (4 * D if dtype == torch.float16 else 0)  # an fp16 block also needs its dC in fp32, see set_to
    columns = CPU_BLOCK // N if cpu and workspace is None else (room - held) // column
    block = min(V, max(256 if cpu else least, columns // 256 * 256))
    return Plan("vocabulary", 4, block, max(held, column * block + (held - b * N * D if b == 2 else 0)))


def pieces(total, size):
    """(start, stop) pairs that cover range(total), in a fixed order: sums in the same order are the same bits."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def forward_bytes(N, V):
    """Peak of v4's loss alone, when the partial lse of each row and tile are merged: those, and their exp."""
    return 2 * 4 * N * math.ceil(V / TILES["descriptors"]["BLOCK_V"])


# ==== 2. v1, blocked PyTorch: the whole algorithm. Everything after it is the same thing, faster ======================


def block_logits(E, C, bias, softcap):
    """E (N, D), C (W, D) a block of classes, bias (W,) -> (N, W), in fp32 or fp64 whatever the inputs are."""
    dtype = torch.promote_types(E.dtype, torch.float32)
    logits = E.to(dtype) @ C.to(dtype).T  # (N, W)
    if bias is not None:
        logits += bias
    return logits if softcap is None else torch.tanh_(logits.div_(softcap)).mul_(softcap)


def blocked_lse_and_target(E, C, targets, bias, softcap):
    """lse (N,) and the target's logit (N,), 0 where the target is none of C's classes. One block alive at a time."""
    N, V = E.shape[0], C.shape[0]
    lse = torch.full((N,), -math.inf, dtype=torch.promote_types(E.dtype, torch.float32), device=E.device)
    target_logit = torch.zeros_like(lse)
    for start, stop in pieces(V, max(256, CPU_BLOCK // max(N, 1))):
        logits = block_logits(E, C[start:stop], None if bias is None else bias[start:stop], softcap)  # (N, W)
        lse = merge(torch.stack((lse, logits.logsumexp(1))))  # online: what came before, and this block
        target_logit += gather_targets(logits, targets - start)
        del logits  # before the next block is made
    return lse, target_logit


def gather_targets(logits, targets):
    """logits (N, W), targets (N,) -> (N,): the target's logit, 0 where the target is none of the W columns."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    return logits.gather(1, targets.where(inside, 0).unsqueeze(1)).squeeze(1).where(inside, 0.0)


def blocked_gradient(E, C, targets, lse, g_softmax, g_target, bias, softcap):
    """G (N, W) for the block C (W, D): g_softmax * softmax - g_target * onehot, through the softcap."""
    return gradient_from_logits(block_logits(E, C, bias, softcap), targets, lse, g_softmax, g_target, softcap)


def gradient_from_logits(logits, targets, lse, g_softmax, g_target, softcap=None):
    """G (N, W) in place of the logits (N, W)."""
    slope = None if softcap is None else 1 - (logits / softcap) ** 2  # d cap(l) / d l, from the capped logit
    G = logits.sub_(lse.unsqueeze(1)).exp_().mul_(g_softmax.unsqueeze(1))
    inside = (targets >= 0) & (targets < G.shape[1])
    G.scatter_add_(1, targets.where(inside, 0).unsqueeze(1), -g_target.where(inside, 0.0).unsqueeze(1).to(G.dtype))
    return G if slope is None else G.mul_(slope)


def blocked_rows(E, C, targets, g, bias):
    """Some rows E (R, D) and all of C (V, D): G (R, V) = g * (softmax - onehot), lse (R,), the target's logit (R,)."""
    logits = block_logits(E, C, bias, None)  # (R, V)
    lse, target_logit = logits.logsumexp(1), gather_targets(logits, targets)
    return gradient_from_logits(logits, targets, lse, g, g), lse, target_logit


def merge(partial):
    """partial (pieces, N), each a log-sum-exp -> (N,), the log-sum-exp of all. Order fixed, so the bits are, too."""
    return partial.logsumexp(0)


# ==== 3. v2, Triton tile by tile: Algorithms 1 to 3 of the paper ======================================================

# Tiles. BLOCK_D columns of E and C are fetched at a time, num_stages times as many are in flight. 128 x 128 needs
# (128 + 128) * 64 * 2 bytes * 3 stages = 96 KiB of shared memory: it fits every GPU from Ampere on. The interpreter has
# neither registers nor stages: small tiles there make small tests cross many edges.
TILES = {
    "16-bit": dict(BLOCK_N=128, BLOCK_V=128, BLOCK_D=64, num_warps=8, num_stages=3),
    "32-bit": dict(BLOCK_N=64, BLOCK_V=64, BLOCK_D=32, num_warps=4, num_stages=2),
    "interpreted": dict(BLOCK_N=64, BLOCK_V=64, BLOCK_D=64),
    "descriptors": dict(BLOCK_N=128, BLOCK_V=256, BLOCK_D=64, num_warps=8, num_stages=3),  # v4, on Hopper
}
if INTERPRETED:
    TILES["descriptors"] = dict(BLOCK_N=32, BLOCK_V=64, BLOCK_D=32)
SPLIT = 128 if INTERPRETED else 2048  # columns whose partial lse one program of v3 makes: a multiple of each BLOCK_V
LOG2E = tl.constexpr(math.log2(math.e))
UPCAST = tl.constexpr(INTERPRETED)  # the interpreter's bf16 is wrong in dots and truncates in casts: fp32 there


def tiles_for(E):
    """The tile sizes and launch options for inputs like E, as keyword arguments of a kernel."""
    return TILES["interpreted" if INTERPRETED else "16-bit" if E.element_size() == 2 else "32-bit"]


@triton.jit
def load_tile(matrix, rows, cols, num_rows, num_cols, stride):
    """A (rows, cols) tile of a row-major matrix, 0 outside it. Offsets in 64 bits: V D and N V pass 2^31."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(matrix + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def fused_multiply_add(a, b, c):
    """a b + c, rounded once, whatever the compiler does elsewhere (first used in 03). Interpreted it is written out and
    rounds twice: tl.fma there fuses in newer Triton only."""
    if UPCAST:
        return a * b + c
    return tl.fma(a, b, c)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 sums. a is rounded to the dtype of b; fp32 operands keep all their bits (no tf32)."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    else:
        a = a.to(b.dtype)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def mask_tail(logits, cols, V):
    """Columns right of V do not exist: exp(-inf) = 0 keeps them out of every sum."""
    return tl.where((cols < V)[None, :], logits, -float("inf"))


@triton.jit
def tanh(x):
    """1 - 2 / (exp(2x) + 1) cancels near 0, where three terms of the series are exact to fp32's last place."""
    series = x * (1 - x * x * (0.33333333 - 0.13333333 * x * x))
    return tl.where(tl.abs(x) < 0.1, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def tile_logits(
    E, C, bias, rows, cols, N, V, D, stride_e, stride_c, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """One tile of logits, (BLOCK_N, BLOCK_V) fp32, in registers."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        e = load_tile(E, rows, depth, N, D, stride_e)  # (BLOCK_N, BLOCK_D)
        c = load_tile(C, cols, depth, V, D, stride_c)  # (BLOCK_V, BLOCK_D)
        acc = dot(e, tl.trans(c), acc)
    return bias_and_cap(acc, bias, cols, V, softcap, HAS_BIAS, HAS_SOFTCAP)


@triton.jit
def bias_and_cap(acc, bias, cols, V, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """What follows the products: the bias, added once, after the loop over D, and the softcap."""
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if HAS_SOFTCAP:
        acc = softcap * tanh(acc / softcap)
    return acc


@triton.jit
def exponentials(logits):
    """Row maxima (BLOCK_N,) and exp(logit - maximum). A row of nothing but -inf (a bias can switch classes off) has no
    finite maximum: `where` avoids -inf - -inf = NaN. exp2 is the GPU's own instruction, its factor goes into an FMA."""
    top = tl.max(logits, 1)
    finite = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.exp2(logits * LOG2E - (finite * LOG2E)[:, None])


@triton.jit
def online_step(top, total, logits):
    """Fold a tile (BLOCK_N, BLOCK_V) into the running maximum and sum (BLOCK_N,), -inf and 0 before the first."""
    tile_top, tile_exp = exponentials(logits)
    new_top = tl.maximum(top, tile_top)
    finite = tl.where(new_top == -float("inf"), 0.0, new_top)
    return new_top, total * tl.exp(top - finite) + tl.sum(tile_exp, 1) * tl.exp(tile_top - finite)


@triton.jit
def tile_softmax(logits, lse):
    return tl.exp2(logits * LOG2E - (lse * LOG2E)[:, None])


@triton.jit
def tile_gradient(softmax, logits, x, cols, g_softmax, g_target, softcap, HAS_SOFTCAP: tl.constexpr):
    """G (BLOCK_N, BLOCK_V) from a tile of softmax; x is the target's column. Rows past N come with zero gradients;
    columns past V hold anything, and are multiplied by rows of zeros, or never stored."""
    G = softmax * g_softmax[:, None] - tl.where(cols[None, :] == x[:, None], g_target[:, None], 0.0)
    if HAS_SOFTCAP:
        G *= 1 - (logits / softcap) * (logits / softcap)  # the slope of the cap, from the capped logit
    return G


@triton.jit
def indexed_dot_kernel(E, C, targets, out, N, V, D, stride_e, stride_c, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Algorithm 1: out[n] = E[n] . C[x[n]]. Gathers one row of C a token; a target outside C reads nothing."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(targets + rows, mask=rows < N, other=-1)
    x = tl.where((x >= 0) & (x < V), x, V)  # row V is past the end, so load_tile gives zeros
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        e = load_tile(E, rows, depth, N, D, stride_e).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        c = load_tile(C, x, depth, V, D, stride_c).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        acc += tl.sum(e * c, 1)
    tl.store(out + rows, acc, mask=rows < N)


@triton.jit
def linear_lse_kernel(
    E, C, out, N, V, D, stride_e, stride_c, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Algorithm 2: out[n] = log sum_v exp(E[n] . C[v]). The paper gives each tile a program of its own and merges into
    out under a lock, in whatever order they arrive. Here a program owns its rows and walks the whole vocabulary: no
    lock and a fixed order, but only N / BLOCK_N programs, too few to fill a GPU. v3 mends that."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        logits = tile_logits(
            E, C, E, rows, cols, N, V, D, stride_e, stride_c, 1.0, False, False, BLOCK_N, BLOCK_V, BLOCK_D
        )
        top, total = online_step(top, total, mask_tail(logits, cols, V))
    tl.store(out + rows, top + tl.log(total), mask=rows < N)


# Algorithm 3 has one program per tile add G C to dE and G^T E to dC. Many tiles share each row of dE and of dC, so the
# paper locks every read-modify-write, and the order, hence the rounding, changes from run to run. The price of never
# locking is to make each tile twice: once by the program that owns its rows of dE, once by the owner of its rows of dC.
# An owner's sum, BLOCK x D in fp32, exceeds the registers: it lives in memory (in practice in L2) and is updated
# BLOCK_D columns at a time. The barrier makes an update visible to the whole program before the next one reads it.


@triton.jit
def add_product(out, G, matrix, rows, inner, num_rows, num_inner, D, stride, BLOCK_D: tl.constexpr):
    """out[rows] (fp32, D columns) += G (rows, inner) @ matrix[inner]."""
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        m = load_tile(matrix, inner, depth, num_inner, D, stride)  # (inner, BLOCK_D)
        at = out + rows.to(tl.int64)[:, None] * D + depth[None, :]
        inside = (rows < num_rows)[:, None] & (depth < D)[None, :]
        tl.store(at, dot(G, m, tl.load(at, mask=inside, other=0.0)), mask=inside)
    tl.debug_barrier()


@triton.jit
def gradient_e_kernel(
    E, C, targets, lse, g, dE, N, V, D, stride_e, stride_c,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Algorithm 3, the half that owns BLOCK_N rows of dE (N, D) fp32, zeroed before."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_lse = tl.load(lse + rows, mask=rows < N, other=0.0)
    row_g = tl.load(g + rows, mask=rows < N, other=0.0)
    x = tl.load(targets + rows, mask=rows < N, other=-1)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        logits = tile_logits(
            E, C, E, rows, cols, N, V, D, stride_e, stride_c, 1.0, False, False, BLOCK_N, BLOCK_V, BLOCK_D
        )  # (BLOCK_N, BLOCK_V)
        G = tile_gradient(tile_softmax(logits, row_lse), logits, x, cols, row_g, row_g, 1.0, False)
        add_product(dE, G, C, rows, cols, N, V, D, stride_c, BLOCK_D)


@triton.jit
def gradient_c_kernel(
    E, C, targets, lse, g, dC, N, V, D, stride_e, stride_c,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Algorithm 3, the half that owns BLOCK_V rows of dC (V, D) fp32, zeroed before."""
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        row_lse = tl.load(lse + rows, mask=rows < N, other=0.0)
        row_g = tl.load(g + rows, mask=rows < N, other=0.0)
        x = tl.load(targets + rows, mask=rows < N, other=-1)
        logits = tile_logits(
            E, C, E, rows, cols, N, V, D, stride_e, stride_c, 1.0, False, False, BLOCK_N, BLOCK_V, BLOCK_D
        )
        G = tile_gradient(tile_softmax(logits, row_lse), logits, x, cols, row_g, row_g, 1.0, False)
        add_product(dC, tl.trans(G), E, cols, rows, V, N, D, stride_e, BLOCK_D)


def tiled_loss_and_gradients(E, C, targets):
    """v2 as a whole: per-token loss (N,), and dE, dC of the mean over kept tokens, in the dtypes of E and C.

    E (N, D), C (V, D) of one dtype, targets (N,), ignored or out of range when negative."""
    E, C, targets = kernel_inputs(E, C, targets)
    (N, D), V, tiles = E.shape, C.shape[0], tiles_for(E)
    kept = targets >= 0  # (N,)
    g = base.token_weights(kept).float()  # (N,)
    lse, target_logit = torch.empty(2, N, device=E.device)
    dE, dC = (torch.zeros(t.shape, device=E.device) for t in (E, C))  # fp32: 2.2 GiB for a dC of 256,000 x 2304
    shape = (N, V, D, E.stride(0), C.stride(0))
    over_rows, over_cols = (triton.cdiv(N, tiles["BLOCK_N"]),), (triton.cdiv(V, tiles["BLOCK_V"]),)
    indexed_dot_kernel[over_rows](E, C, targets, target_logit, *shape, tiles["BLOCK_N"], tiles["BLOCK_D"])
    linear_lse_kernel[over_rows](E, C, lse, *shape, **tiles)
    gradient_e_kernel[over_rows](E, C, targets, lse, g, dE, *shape, **tiles)
    gradient_c_kernel[over_cols](E, C, targets, lse, g, dC, *shape, **tiles)
    return (lse - target_logit).where(kept, 0.0), dE.to(E.dtype), dC.to(C.dtype)


# ==== 4. v3, one operation: partial sums per split of the vocabulary; gradients by slices of it =======================


def kernel_inputs(E, C, *vectors):
    """The kernels take any row stride of E and C, but read a row, and each vector, as one run of memory. Vectors in one
    dtype, fp32 (or int64), so that fewer kernels have to be compiled."""
    single = lambda v: v.float() if v.is_floating_point() else v  # noqa: E731
    return rows_contiguous(E), rows_contiguous(C), *(None if v is None else single(v).contiguous() for v in vectors)


def rows_contiguous(matrix):
    good = matrix.stride(-1) == 1 and matrix.stride(0) >= matrix.shape[1]  # expanded rows lie upon each other
    return matrix if good else matrix.contiguous()


@triton.jit
def split_lse_kernel(
    E, C, bias, targets, partial, target_logit, N, V, D, stride_e, stride_c, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """partial[s, n] = lse of row n over split s of the vocabulary; target_logit[n] by the split that holds the target.

    One program per (rows, split): (N / BLOCK_N) (V / SPLIT) programs fill any GPU. Neighbours share a split, so SPLIT
    rows of C are fetched from memory once and then served from L2 to all rows of E. Every address has one writer."""
    row_blocks = tl.cdiv(N, BLOCK_N)
    split = tl.program_id(0) // row_blocks
    rows = (tl.program_id(0) % row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(targets + rows, mask=rows < N, other=-1)  # (BLOCK_N,)
    top = tl.full((BLOCK_N,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    found = tl.zeros((BLOCK_N,), tl.float32)
    first, last = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, V)
    for start in range(first, last, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        logits = tile_logits(
            E, C, bias, rows, cols, N, V, D, stride_e, stride_c, softcap,
            HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D,
        )
        found += tl.sum(tl.where(cols[None, :] == x[:, None], logits, 0.0), 1)
        top, total = online_step(top, total, mask_tail(logits, cols, V))
    tl.store(partial + split.to(tl.int64) * N + rows, top + tl.log(total), mask=rows < N)
    tl.store(target_logit + rows, found, mask=(rows < N) & (x >= first) & (x < last))


@triton.jit
def gradient_kernel(
    E, C, bias, targets, lse, g_softmax, g_target, G, N, V, D, stride_e, stride_c, stride_g, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """G (N, V) of a slice C (V, D). The logits stay in fp32 registers until they have become G: rounding them to bf16
    first, as a separate matrix product would, puts an error of up to 2^-8 |logit| into the exponent."""
    row_blocks = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) % row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = (tl.program_id(0) // row_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tile_logits(
        E, C, bias, rows, cols, N, V, D, stride_e, stride_c, softcap,
        HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D,
    )
    tile = tile_gradient(
        tile_softmax(logits, tl.load(lse + rows, mask=rows < N, other=0.0)), logits,
        tl.load(targets + rows, mask=rows < N, other=-1), cols,
        tl.load(g_softmax + rows, mask=rows < N, other=0.0),
        tl.load(g_target + rows, mask=rows < N, other=0.0),
        softcap, HAS_SOFTCAP,
    )
    inside = (rows < N)[:, None] & (cols < V)[None, :]
    tl.store(G + rows.to(tl.int64)[:, None] * stride_g + cols[None, :], tile.to(G.dtype.element_ty), mask=inside)


def split_lse_and_target(E, C, targets, bias, softcap):
    """The Triton form of blocked_lse_and_target: one kernel, then a merge of (V / SPLIT, N) numbers."""
    E, C, targets, bias = kernel_inputs(E, C, targets, bias)
    if takes_descriptors(E, C):
        return merge(tile_lse(E, C, bias, softcap)), indexed_logits(E, C, targets, bias, softcap)
    (N, D), V, tiles = E.shape, C.shape[0], tiles_for(E)
    partial = torch.empty(triton.cdiv(V, SPLIT), N, device=E.device)
    target_logit = torch.zeros(N, device=E.device)
    grid = (triton.cdiv(N, tiles["BLOCK_N"]) * partial.shape[0],)
    split_lse_kernel[grid](
        E, C, E if bias is None else bias, targets, partial, target_logit,
        N, V, D, E.stride(0), C.stride(0), softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None, SPLIT=SPLIT, **tiles,
    )
    return merge(partial), target_logit


def slice_gradient(E, C, targets, lse, g_softmax, g_target, bias, softcap):
    """The Triton form of blocked_gradient. G (N, W) has the dtype of E on a GPU, where the matrix products want it."""
    E, C, targets, bias, lse, g_softmax, g_target = kernel_inputs(E, C, targets, bias, lse, g_softmax, g_target)
    (N, D), W, G = E.shape, C.shape[0], empty_gradient(E, C.shape[0])
    flags = dict(HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None)
    rows = (E if bias is None else bias, targets, lse, g_softmax, g_target)
    if takes_descriptors(E, C):
        tiles = TILES["descriptors"]
        operands = fetched(E, "BLOCK_N", "BLOCK_D"), fetched(C, "BLOCK_V", "BLOCK_D"), fetched(G, "BLOCK_N", "BLOCK_V")
        persistent_gradient_kernel[programs(E)](*operands, *rows, N, W, D, softcap or 1.0, **flags, **tiles)
        return G
    tiles = tiles_for(E)
    gradient_kernel[(triton.cdiv(N, tiles["BLOCK_N"]) * triton.cdiv(W, tiles["BLOCK_V"]),)](
        E, C, *rows, G, N, W, D, E.stride(0), C.stride(0), G.stride(0), softcap or 1.0, **flags, **tiles
    )
    return G


def empty_gradient(E, columns):
    """Room for G (N, columns), in the dtype of the matrix products; rows start at multiples of 16 bytes."""
    dtype = E.dtype if E.is_cuda else torch.float32
    return torch.empty(E.shape[0], triton.cdiv(columns, 8) * 8, device=E.device, dtype=dtype)[:, :columns]


# ==== 5. v4, Hopper: the same two kernels, fed by the copy engine =====================================================

# v3 reaches two thirds of the rate of a matrix product. What holds it back is not arithmetic: every thread computes
# addresses, waits for its loads, and 128 x 128 tiles read each operand too often. Three changes:
#   - tiles of 128 x 256: a quarter fewer bytes through shared memory for the same products;
#   - tensor descriptors: one thread asks Hopper's copy engine (TMA) for a whole tile, which arrives in the layout that
#     the matrix units want, with zeros for what lies outside the matrix. No addresses, no masks;
#   - persistent programs: one a multiprocessor, each walks over many tiles, and (flatten) the loads of the next tile
#     are under way while the exponentials of this one are computed.
# A tile is now one piece of the log-sum-exp: partial has V / 256 rows, 31 MiB for 256,000 classes and 8192 tokens.


@functools.cache
def is_hopper(device):
    """The copy engine came with compute capability 9; three stages of these tiles and one of G fill 208 KiB."""
    gpu = torch.cuda.get_device_properties(device)
    return gpu.major >= 9 and gpu.shared_memory_per_block_optin >= 216 * 1024


def takes_descriptors(*matrices):
    """The copy engine's terms: 16-bit matrices whose start and rows lie on multiples of 16 bytes. Else v3 runs."""
    return (INTERPRETED or is_hopper(matrices[0].device)) and all(
        m.element_size() == 2 and m.numel() > 0 and m.stride(1) == 1 and m.stride(0) >= m.shape[1]
        and m.stride(0) % 8 == 0 and m.data_ptr() % 16 == 0
        for m in matrices
    )


def fetched(matrix, rows, columns):
    """The descriptor by which the copy engine moves (TILES[rows], TILES[columns]) tiles of a matrix."""
    tiles = TILES["descriptors"]
    return TensorDescriptor.from_tensor(matrix, [tiles[rows], tiles[columns]])


def programs(E):
    """The grid of a persistent kernel: one program a multiprocessor (the interpreter: a few, to have several)."""
    return (3 if INTERPRETED else torch.cuda.get_device_properties(E.device).multi_processor_count,)


@triton.jit
def tile_at(index, row_tiles, col_tiles):
    """(row tile, column tile) of a running index. Eight column tiles are a group, walked over all rows: the programs
    that run at the same time then share few rows of E and of C, and find them in L2."""
    group = index // (8 * row_tiles)
    width = tl.minimum(col_tiles - 8 * group, 8)  # of the last group
    index -= group * 8 * row_tiles
    return index // width, 8 * group + index % width


@triton.jit
def fetched_logits(
    E, C, bias, row, col, V, D, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """tile_logits, (BLOCK_N, BLOCK_V) fp32, from descriptors of E and C. Each tile starts a fresh accumulator: one that
    is carried from tile to tile does not stay in registers."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for depth in range(0, D, BLOCK_D):
        acc = dot(E.load([row, depth]), tl.trans(C.load([col, depth])), acc)
    return bias_and_cap(acc, bias, col + tl.arange(0, BLOCK_V), V, softcap, HAS_BIAS, HAS_SOFTCAP)


@triton.jit
def next_tile(
    index, E, C, bias, N, V, D, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Tile `index` of the walk over all tiles: its first row, its first column, its logits."""
    row_tile, col_tile = tile_at(index, tl.cdiv(N, BLOCK_N), tl.cdiv(V, BLOCK_V))
    row, col = row_tile * BLOCK_N, col_tile * BLOCK_V
    return row, col, fetched_logits(
        E, C, bias, row, col, V, D, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D
    )


@triton.jit
def tile_lse_kernel(
    E, C, bias, partial, S, N, V, D, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STORE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """partial[t, n] = lse of row n over column tile t; with STORE also S[n, v], the softmax within that tile."""
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_tile(
            index, E, C, bias, N, V, D, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D
        )
        top, tile_exp = exponentials(mask_tail(logits, col + tl.arange(0, BLOCK_V), V))
        total = tl.sum(tile_exp, 1)
        rows = row + tl.arange(0, BLOCK_N)
        tl.store(partial + (col // BLOCK_V).to(tl.int64) * N + rows, top + tl.log(total), mask=rows < N)
        if STORE:
            S.store([row, col], (tile_exp / tl.where(total == 0.0, 1.0, total)[:, None]).to(S.dtype))


@triton.jit
def persistent_gradient_kernel(
    E, C, G, bias, targets, lse, g_softmax, g_target, N, V, D, softcap, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """gradient_kernel, G (N, V) of a slice C (V, D), by descriptors."""
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_tile(
            index, E, C, bias, N, V, D, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D
        )
        rows = row + tl.arange(0, BLOCK_N)
        inside = rows < N
        tile = tile_gradient(
            tile_softmax(logits, tl.load(lse + rows, mask=inside, other=0.0)), logits,
            tl.load(targets + rows, mask=inside, other=-1), col + tl.arange(0, BLOCK_V),
            tl.load(g_softmax + rows, mask=inside, other=0.0),
            tl.load(g_target + rows, mask=inside, other=0.0),
            softcap, HAS_SOFTCAP,
        )
        G.store([row, col], tile.to(G.dtype))


def tile_lse(E, C, bias, softcap, softmax=None):
    """partial (tiles, N) of tile_lse_kernel; `softmax` (N, V), if given, receives S."""
    (N, D), V, tiles = E.shape, C.shape[0], TILES["descriptors"]
    partial = torch.empty(triton.cdiv(V, tiles["BLOCK_V"]), N, device=E.device)
    e, c = fetched(E, "BLOCK_N", "BLOCK_D"), fetched(C, "BLOCK_V", "BLOCK_D")
    tile_lse_kernel[programs(E)](
        e, c, E if bias is None else bias, partial, c if softmax is None else fetched(softmax, "BLOCK_N", "BLOCK_V"),
        N, V, D, softcap or 1.0, HAS_BIAS=bias is not None, HAS_SOFTCAP=softcap is not None,
        STORE=softmax is not None, **tiles | ({} if INTERPRETED or softmax is not None else dict(num_stages=4)),
    )  # without a tile to store there is room for a fourth stage: 1 %
    return partial


def indexed_logits(E, C, targets, bias, softcap):
    """The target's logit (N,) by Algorithm 1, 0 where the target is none of C's classes."""
    (N, D), V = E.shape, C.shape[0]
    out = torch.empty(N, device=E.device)
    indexed_dot_kernel[(triton.cdiv(N, 16),)](E, C, targets, out, N, V, D, E.stride(0), C.stride(0), 16, 128)
    inside = (targets >= 0) & (targets < V)
    if bias is not None:
        out += bias[targets.where(inside, 0)]
    return (out if softcap is None else softcap * torch.tanh(out / softcap)).where(inside, 0.0)


@triton.jit
def rescale_kernel(
    G, partial, lse, targets, target_logit, g, N, V, stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr
):
    """In place, softmax within a tile -> g (softmax - onehot). A probability in bf16 is off by up to 2^-8 of it, a
    logit by up to 2^-8 |logit|, in the exponent. The target's entry, where softmax - 1 may cancel, is from fp32."""
    row_tiles = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) % row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) // row_tiles
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    row_lse = tl.load(lse + rows, mask=rows < N, other=0.0)
    x = tl.load(targets + rows, mask=rows < N, other=-1)
    row_g = tl.load(g + rows, mask=rows < N, other=0.0)
    in_tile = tl.exp(tl.load(partial + tile.to(tl.int64) * N + rows, mask=rows < N, other=0.0) - row_lse)
    softmax = load_tile(G, rows, cols, N, V, stride).to(tl.float32) * in_tile[:, None]
    target = tl.exp(tl.load(target_logit + rows, mask=rows < N, other=0.0) - row_lse)
    softmax = tl.where(cols[None, :] == x[:, None], target[:, None], softmax)
    out = tile_gradient(softmax, softmax, x, cols, row_g, row_g, 1.0, False)
    at = G + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, out.to(G.dtype.element_ty), mask=(rows < N)[:, None] & (cols < V)[None, :])


def fetched_rows(E, C, targets, g, bias):
    """The Triton form of blocked_rows: one pass makes the softmax, a second over its 16-bit values makes G of it."""
    E, C, targets, bias, g = kernel_inputs(E, C, targets, bias, g)
    R, V, G, width = E.shape[0], C.shape[0], empty_gradient(E, C.shape[0]), TILES["descriptors"]["BLOCK_V"]
    partial = tile_lse(E, C, bias, None, softmax=G)  # (tiles, R)
    lse, target_logit = merge(partial), indexed_logits(E, C, targets, bias, None)
    rows = 32 if INTERPRETED else 8  # a program: it does nothing but move bytes, and more of them hide more latency
    rescale_kernel[(triton.cdiv(R, rows) * partial.shape[0],)](
        G, partial, lse, targets, target_logit, g, R, V, G.stride(0), BLOCK_N=rows, BLOCK_V=width
    )
    return G, lse, target_logit


# ==== 6. The API: two building blocks, and the differentiable loss made of them =======================================


def choose_backend(backend, E, C):
    """"triton" or "torch" for inputs like E and C; ValueError when the wish cannot be met."""
    if E.dtype != C.dtype:
        raise ValueError(f"E is {E.dtype} but C is {C.dtype}: cast one of them, or use autocast")
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend is {backend!r}: use 'auto', 'triton' or 'torch'")
    takes = E.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if backend == "triton":
        if not HAS_TRITON:
            raise ValueError("backend is 'triton', which is not installed (Linux: pip install triton): use 'torch'")
        if not takes:
            raise ValueError(f"backend is 'triton' but E is {E.dtype}: use 'torch', which also takes fp64")
        if not (E.is_cuda or INTERPRETED):
            raise ValueError(f"backend is 'triton' but E is on {E.device}: use 'torch', or set TRITON_INTERPRET=1")
        return "triton"
    worth_it = HAS_TRITON and E.is_cuda and takes and not INTERPRETED
    return "triton" if backend == "auto" and worth_it else "torch"


def without_autocast(function):
    """Autocast would round the fp32 sums below to 16 bits, also when backward is called inside its region."""

    @functools.wraps(function)
    def run(*args, **options):
        device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **options)

    return run


@without_autocast
def lse_and_target(E, C, targets, vocab_start=0, *, bias=None, softcap=None, backend="auto"):
    """What a slice C (W, D) of the vocabulary, starting at class vocab_start, contributes to the loss; no gradients.

    E (N, D), targets (N,) int64 over the whole vocabulary, bias (W,). Returns lse (N,) over the slice and the target's
    logit (N,), 0 where the target lies elsewhere; fp32 (fp64 for fp64). Slices merge by logsumexp and by addition."""
    run = split_lse_and_target if choose_backend(backend, E, C) == "triton" else blocked_lse_and_target
    return run(E, C, targets - vocab_start, bias, softcap)


@without_autocast
def gradient_chunk(
    E, C_chunk, targets, lse, vocab_start, grad, *, grad_lse=None, bias=None, softcap=None, backend="auto"
):
    """Gradients that the slice C_chunk (W, D), starting at class vocab_start, is responsible for.

    E (N, D), targets (N,), lse (N,) over the WHOLE vocabulary, grad (N,) upstream gradient of each token's loss (0 for
    ignored tokens), grad_lse (N,) that of its lse. Returns the slice's part of dE (N, D), fp32 (fp64 for fp64), to be
    summed over slices, and dC of the slice (W, D) in the dtype of C."""
    g_softmax, g_target, unit = row_gradients(grad, torch.zeros_like(grad) if grad_lse is None else grad_lse, E.dtype)
    dE, dC = torch.zeros(E.shape, dtype=lse.dtype, device=E.device), torch.empty_like(C_chunk)
    fill_gradients(
        dE, dC, None, E, C_chunk, targets - vocab_start, lse, g_softmax, g_target, unit, bias, softcap, backend
    )
    return dE.mul_(unit), dC


def row_gradients(grad_loss, grad_lse, dtype):
    """loss = lse - target_logit: each ROW's factors of softmax and of the one-hot (N,), (N,), and a unit for both.

    fp16 has five exponent bits: softmax / N would vanish in G. So G is made in units of a power of two (exact), the
    size of the largest factor, as a tensor: reading it on the host would stall a GPU."""
    g_softmax, g_target, unit = grad_loss + grad_lse, grad_loss, torch.ones((), device=grad_loss.device)
    if dtype == torch.float16 and len(g_target):
        largest = torch.maximum(g_softmax.abs(), g_target.abs()).max()
        unit = torch.exp2(largest.clamp(min=1e-30).log2().round())
    return g_softmax / unit, g_target / unit, unit


def fill_gradients(dE, dC, db, E, C, targets, lse, g_softmax, g_target, unit, bias, softcap, backend):
    """One slice C (W, D) of backward, of those results that are wanted (not None): dE (N, D) is added to, in units;
    dC (W, D) and db (W,) are written. dC may be a function instead: it gets G and E, whose product G^T E would be dC,
    once C has been read for the last time. G (N, W) is the only large buffer, gone on return."""
    G = gradient_slice(E, C, targets, lse, g_softmax, g_target, bias, softcap, backend)
    if dE is not None:
        add_to(dE, G, C)
    if callable(dC):
        dC(G, E)
    elif dC is not None:
        set_to(dC, G.T, E, unit)  # written once, no accumulator
    if db is not None:
        db.copy_(G.sum(0, dtype=lse.dtype).mul_(unit))


@without_autocast
def gradient_slice(E, C, targets, lse, g_softmax, g_target, bias, softcap, backend):
    """G (N, W) = g_softmax * softmax - g_target * onehot for a slice C (W, D), targets (N,) counted from its start."""
    run = slice_gradient if choose_backend(backend, E, C) == "triton" else blocked_gradient
    return run(E, C, targets, lse, g_softmax, g_target, bias, softcap)


def add_to(total, A, B):
    """total += A @ B, summed in the dtype of total whatever the operands are."""
    if A.dtype == total.dtype:
        return total.addmm_(A, B.to(A.dtype))
    return torch.addmm(total, A, B, out_dtype=total.dtype, out=total)  # 16-bit operands, fp32 sum: one cuBLAS call


def set_to(out, A, B, unit):
    """out = unit * A @ B, rounded at most once. An fp16 product in units may need more range than fp16 has."""
    if A.dtype == B.dtype == out.dtype != torch.float16:
        return torch.mm(A, B, out=out)  # their unit is 1
    wide = torch.promote_types(A.dtype, torch.float32)
    if out.dtype == wide:
        return add_to(out.zero_(), A, B).mul_(unit)
    return out.copy_(add_to(torch.zeros(out.shape, dtype=wide, device=out.device), A, B).mul_(unit))


def token_losses(lse, target_logit, targets, V, ignore_index):
    """Per-token loss (N,): 0 for ignored tokens, NaN for targets that are no class."""
    loss = (lse - target_logit).where((targets >= 0) & (targets < V), math.nan)
    return loss.where(targets != ignore_index, 0.0)


def sliced_gradients(need, E, C, bias, targets, lse, grad_lse, grad_target, softcap, backend, block, sink=None):
    """dE (N, D), dC (V, D), dbias (V,), or None where not needed, from the gradients (N,) of lse and target logit.
    With a sink, see linear_cross_entropy, the slices of dC are its own affair, and dC is None."""
    g_softmax, g_target, unit = row_gradients(-grad_target, grad_lse + grad_target, E.dtype)
    to_sink = need[1] and sink is not None
    dE = torch.zeros(E.shape, dtype=lse.dtype, device=E.device) if need[0] else None
    dC = torch.empty_like(C) if need[1] and not to_sink else None
    db = torch.empty_like(bias) if need[2] else None
    part_of = lambda tensor, part: None if tensor is None else tensor[part]  # noqa: E731
    if to_sink:
        sink.begin()
        sink.slices(E, targets, lse, g_softmax, g_target, softcap, backend, block)
    for start, stop in pieces(C.shape[0], block):
        part = slice(start, stop)
        part_C = functools.partial(sink.rows, start) if to_sink else part_of(dC, part)
        fill_gradients(
            dE, part_C, part_of(db, part), E, C[part], targets - start, lse, g_softmax, g_target, unit,
            part_of(bias, part), softcap, backend,
        )
    return None if dE is None else dE.mul_(unit).to(E.dtype), dC, db


class Shard(NamedTuple):
    """C is only rows `start` and following of a classifier of `vocab` classes. join(lse, target_logit), (N,) each, of
    these rows gives those of all rows; the slices of C lie where join knows (05: on other ranks)."""

    start: int
    vocab: int
    join: Callable


class _VocabularyOrder(torch.autograd.Function):
    """(E, C, bias) -> lse (N,) and the target's logit (N,). Keeps lse alone: O(N) from forward to backward."""

    @staticmethod
    def forward(ctx, E, C, bias, targets, softcap, backend, block, sink, join=None):
        lse, target_logit = lse_and_target(E, C, targets, bias=bias, softcap=softcap, backend=backend)
        if join is not None:
            lse, target_logit = join(lse, target_logit)
        ctx.save_for_backward(E, C, bias, targets, lse)
        ctx.options = softcap, backend, block, sink
        return lse, target_logit

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_lse, grad_target):
        E, C, bias, targets, lse = ctx.saved_tensors
        need = [wanted(ctx, i) for i in range(3)]
        return *sliced_gradients(need, E, C, bias, targets, lse, grad_lse, grad_target, *ctx.options), *[None] * 6


def wanted(ctx, i):
    """Whether a backward pass is after the gradient of input i: torch.autograd.grad(loss, E) has no use for C's."""
    if not ctx.needs_input_grad[i]:
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    except RuntimeError:  # torch.autograd.grad(loss, C) itself, of a leaf C: not supported, it says
        return True


class _TokenOrder(torch.autograd.Function):
    """(E, C, bias) -> the mean or sum of the losses. Its gradients are finished in forward, while each block's softmax
    is there, but for the upstream gradient, one number. (If that is no power of two, a 16-bit dE is rounded again; the
    mean's own division is already in.)"""

    @staticmethod
    @without_autocast
    def forward(ctx, E, C, bias, targets, ignore_index, reduction, backend, block):
        kept = targets != ignore_index  # (N,)
        sums = torch.promote_types(E.dtype, torch.float32)
        g = base.token_weights(kept.to(sums)) if reduction == "mean" else kept.to(sums)
        g = g.where((targets >= 0) & (targets < C.shape[0]), 0.0)  # a target that is no class: NaN loss, no gradient
        g, _, unit = row_gradients(g, torch.zeros_like(g), E.dtype)
        rows_of = fetched_rows if backend == "triton" else blocked_rows
        need_E, need_C, need_bias = ctx.needs_input_grad[:3]
        dE = torch.empty_like(E) if need_E else None
        dC = torch.zeros(C.shape, dtype=sums, device=E.device) if need_C else None
        db = torch.zeros(bias.shape, dtype=sums, device=E.device) if need_bias else None
        losses = torch.empty(E.shape[0], dtype=sums, device=E.device)
        for start, stop in pieces(E.shape[0], block):
            part = slice(start, stop)
            G, lse, target_logit = rows_of(E[part], C, targets[part], g[part], bias)  # (R, V), (R,), (R,)
            losses[part] = token_losses(lse, target_logit, targets[part], C.shape[0], ignore_index)
            if need_E:
                set_to(dE[part], G, C, 1)  # in units
            if need_C:
                add_to(dC, G.T, E[part])
            if need_bias:
                db += G.sum(0, dtype=sums)
            del G  # before the next is made
        ctx.save_for_backward(dE, dC, db, unit)
        ctx.dtypes = E.dtype, C.dtype, None if bias is None else bias.dtype
        return base.reduce_loss(losses, kept, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *gradients, unit = ctx.saved_tensors
        scaled = lambda g, dtype: torch.mul(g, grad * unit, out=torch.empty_like(g, dtype=dtype))  # noqa: E731
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if g is None else scaled(g, dtype) for g, dtype in pairs), None, None, None, None, None


def linear_cross_entropy(
    E, C, targets, bias=None, *, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False,
    backend="auto", workspace=None, check_targets=False, sink=None, shard=None,
):
    """Cross-entropy of E C^T against targets without the (N, V) logits. Meaning as in 01's reference.

    E (..., D), C (V, D) of one dtype: fp32, fp16, bf16 (sums in fp32), or fp64 (torch backend). targets (...) int64,
    bias (V,). Under autocast E and C are cast first. backend: "triton", "torch" (blocked, any device), or "auto":
    Triton for CUDA tensors where it is installed, else torch. Differentiable once in E, C, bias, also through the lse
    (...) that return_lse adds, as often as retain_graph allows. Bitwise repeatable: no atomics, fixed order of sums.

    workspace: bytes that the gradients may take beyond dE and dC, see gradient_plan. It goes over tokens (faster) where
    a mean or sum without softcap and return_lse allows it, and its sum for dC, 4 V D bytes, fits; else over V.

    All tokens ignored: loss 0, zero gradients. A target that is neither a class nor ignore_index is never read outside
    C: on the CPU ValueError; on CUDA, where looking would stall every step, its loss is NaN unless check_targets=True
    asks for the ValueError. Ignored tokens cost as much as others: drop them before if they are many (01, rung 1).

    sink: takes dC instead of autograd, a slice at a time (04's optimizer step). In backward it is called as begin();
    slices(E, targets, lse, g_softmax, g_target, softcap, backend, block), of which gradient_slice makes G again; and
    rows(start, G, E) for each slice G (N, W) from class `start` on, whose rows of C were read for the last time. Before
    all, align(block) says how many columns a slice should have. With a sink the gradient goes over the vocabulary.
    shard: see Shard; targets are those of the whole vocabulary, dE is the part that these rows are responsible for, and
    the gradient goes over the vocabulary.
    ValueError on arguments that do not fit. arXiv 2411.09009 and 2511.17599.
    """
    E, C, targets, backend = checked_inputs(
        E, C, targets, bias, ignore_index, softcap, reduction, shift, backend, workspace, check_targets, sink, shard
    )
    shape, targets, E = targets.shape, targets.reshape(-1), E.reshape(-1, C.shape[1])
    E, C = kernel_inputs(E, C) if backend == "triton" else (E, C)
    plan = plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink, shard)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (E, C, bias))
    if plan.order == "tokens" and differentiable:
        return _TokenOrder.apply(E, C, bias, targets, ignore_index, reduction, backend, plan.block)
    start, vocab, join = shard or (0, C.shape[0], None)
    local = targets - start if start else targets  # (N,)
    lse, target_logit = _VocabularyOrder.apply(E, C, bias, local, softcap, backend, plan.block, sink, join)
    loss = loss_from(lse, target_logit, targets, vocab, ignore_index, reduction, shape)
    return (loss, lse.view(shape)) if return_lse else loss


def plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink=None, shard=None):
    """gradient_plan for a call with these arguments."""
    tokens = reduction != "none" and not return_lse and softcap is None  # one upstream number, and G from softmax alone
    tokens = tokens and sink is None and shard is None and (backend == "torch" or takes_descriptors(E, C))
    plan = gradient_plan(E.shape[0], *C.shape, E.device, E.dtype, workspace, tokens=tokens, backend=backend)
    return plan if sink is None else plan._replace(block=sink.align(plan.block))


def loss_from(lse, target_logit, targets, V, ignore_index, reduction, shape):
    """The reduced loss, or with "none" one of the given shape, from lse, target logits and targets (N,)."""
    loss = token_losses(lse, target_logit, targets, V, ignore_index)
    return base.reduce_loss(loss.view(shape), (targets != ignore_index).view(shape), reduction)


def checked_inputs(
    E, C, targets, bias, ignore_index, softcap, reduction, shift, backend, workspace, check_targets, sink, shard
):
    """What each linear_cross_entropy does first: checks, autocast, shift. Returns E, C, targets and the backend."""
    base.check_arguments(E, C, targets, bias, reduction, shift, softcap)
    if workspace is not None and workspace < 0:
        raise ValueError(f"workspace is {workspace} bytes: use 0 or more, or None for the default")
    device_type = E.device.type
    if torch.is_autocast_enabled(device_type) and E.dtype != torch.float64:
        E, C = (t.to(torch.get_autocast_dtype(device_type)) for t in (E, C))
    backend = choose_backend(backend, E, C)
    if check_targets or device_type == "cpu":
        base.check_target_range(targets, shard.vocab if shard else C.shape[0], ignore_index)
    if sink is not None and E.dtype == torch.float16:
        raise ValueError("a sink takes no fp16, whose gradients are made in units: use bf16 or fp32")
    E, targets = base.shift_tokens(E, targets, shift)
    return E, C, targets, backend


# ==== 7. Checks =======================================================================================================


def backends(device):
    """The backends that run on this device: the kernels are compiled for a GPU and interpreted on a CPU."""
    triton_runs = HAS_TRITON and (INTERPRETED or torch.device(device).type == "cuda")
    return ("torch", "triton") if triton_runs else ("torch",)


def gradients_of(loss_fn, E, C, bias, targets, weight=None, **options):
    """[loss, dE, dC, dbias] of loss_fn, detached; `weight` is the upstream gradient of an unreduced loss."""
    leaves = [t for t in (E, C, bias) if t is not None]
    loss = loss_fn(E, C, targets, bias, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, weight)]


def error(got, want):
    """Relative Frobenius error in fp64; NaN stays NaN, so that no comparison lets it pass."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def require_as_good(name, got, peer, want, slack):
    """The three-way rule: our error against the exact result may exceed that of torch's same-dtype way by `slack`."""
    ours, theirs = error(got, want), error(peer, want)
    base.require(ours <= theirs + slack, f"{name}: relative error {ours:.2e}, torch in the same dtype {theirs:.2e}")


def same_dtype_loss(E, C, targets, bias=None, *, softcap=None, **options):
    """The peer of the three-way rule: what torch gives when the logits are made in the dtype of E."""
    logits = E @ C.T if bias is None else E @ C.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.float(), targets, **options)


def check_equal(N=70, V=203, D=72, dtype=torch.float32, device="cpu", seed=0, bias=True, softcap=None, scale=1.0):
    """Loss and all gradients, as good as torch's own in the same dtype against the reference in fp64."""
    E, C, b, x = base.random_problem(N, V, D, dtype, device, seed, bias=bias, scale=scale)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (E, C, b)]
    want = gradients_of(base.linear_cross_entropy_reference, *exact, x, softcap=softcap)
    peer = gradients_of(same_dtype_loss, E, C, b, x, softcap=softcap)
    for backend in backends(device):
        got = gradients_of(linear_cross_entropy, E, C, b, x, softcap=softcap, backend=backend)
        for name, g, p, w in zip(("loss", "dE", "dC", "dbias"), got, peer, want, strict=False):
            slack = 2e-6 if dtype == torch.float32 else 1e-3  # a few roundings of fp32; below one of bf16 (4e-3)
            require_as_good(f"{backend} {dtype} {name}", g, p, w, slack)


def check_ladder(N=70, V=203, D=72, dtype=torch.float32, device="cpu", seed=0):
    """v2, whose kernels share the tile but nothing else with v3, against the reference."""
    if "triton" not in backends(device):
        return
    E, C, _, x = base.random_problem(N, V, D, dtype, device, seed, bias=False)
    want = gradients_of(base.linear_cross_entropy_reference, E.detach().double().requires_grad_(),
                        C.detach().double().requires_grad_(), None, x)
    peer = gradients_of(same_dtype_loss, E, C, None, x)
    loss, dE, dC = tiled_loss_and_gradients(E.detach(), C.detach(), x)
    got = [loss.sum() / (x >= 0).sum(), dE, dC]
    for name, g, p, w in zip(("loss", "dE", "dC"), got, peer, want, strict=True):
        require_as_good(f"v2 {dtype} {name}", g, p, w, 2e-6 if dtype == torch.float32 else 1e-3)


def check_reductions(device="cpu"):
    """sum and none, shift and leading shapes; with "none", every token has an upstream gradient of its own (a fused
    peer scaled all rows by the first row's: Liger Kernel issue 1298)."""
    E, C, b, x = base.random_problem(60, 131, 24, torch.float32, device)
    E3, x2 = E.detach().view(3, 20, 24).requires_grad_(), x.view(3, 20)
    weight = torch.linspace(-1, 2, 54, device=device).view(3, 18)
    for backend in backends(device):
        for reduction, w in (("sum", None), ("mean", None), ("none", weight)):
            options = dict(reduction=reduction, shift=2)
            want = gradients_of(base.linear_cross_entropy_reference, E3, C, b, x2, w, **options)
            got = gradients_of(linear_cross_entropy, E3, C, b, x2, w, backend=backend, **options)
            for g, r in zip(got, want, strict=True):
                torch.testing.assert_close(g, r, rtol=1e-4, atol=1e-5)


def check_returned_lse(device="cpu", dtype=torch.float32):
    """A z-loss through the returned lse reaches E, C and bias, also from ignored tokens."""
    E, C, b, x = base.random_problem(40, 97, 16, dtype, device)

    def z_loss(fn, **options):
        loss, lse = fn(E, C, x, b, return_lse=True, **options)
        return torch.autograd.grad(loss + 0.1 * (lse**2).mean(), (E, C, b))

    want = z_loss(base.linear_cross_entropy_reference)
    for backend in backends(device):
        for g, w in zip(z_loss(linear_cross_entropy, backend=backend), want, strict=True):
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            base.require(error(g, w) < limit, f"{backend} {dtype}: a gradient of lse is off by {error(g, w):.1e}")


def check_extreme_logits(device="cpu", dtype=torch.float32):
    """Logits around +-1000: finite and right. All strongly negative catches a maximum that starts at 0."""
    for offset in (1000.0, -1000.0):
        E, C, b, x = base.random_problem(33, 150, 16, dtype, device)
        b = (b.detach() + offset).requires_grad_()
        exact = [t.detach().double().requires_grad_() for t in (E, C, b)]
        want = gradients_of(base.linear_cross_entropy_reference, *exact, x)
        for backend in backends(device):
            got = gradients_of(linear_cross_entropy, E, C, b, x, backend=backend)
            good = all(error(g, w) < (1e-3 if dtype == torch.float32 else 1e-2) for g, w in zip(got, want, strict=True))
            base.require(good, f"{backend} {dtype}: loss {got[0]} with logits around {offset:g}, not {want[0]:.4f}")


def check_switched_off_classes(device="cpu", dtype=torch.float32):
    """A bias of -inf switches classes off, whole tiles of them too (padded vocabularies): no NaN, no gradient."""
    E, C, _, x = base.random_problem(20, 600, 16, dtype, device)
    x = x.where(x < 100, x % 100)
    b = torch.zeros(600, device=device)
    b[100:] = -math.inf
    exact = [t.detach().double().requires_grad_() for t in (E, C[:100])]
    want = gradients_of(base.linear_cross_entropy_reference, *exact, None, x)
    for backend in backends(device):
        for workspace in (None, 0):
            loss = linear_cross_entropy(E, C, x, b, backend=backend, workspace=workspace)
            dE, dC = torch.autograd.grad(loss, (E, C))
            for g, w in zip((loss, dE, dC[:100]), want, strict=True):
                limit = 1e-5 if dtype == torch.float32 else 1e-2
                base.require(error(g, w) < limit, f"{backend} {dtype}: classes that are switched off change the others")
            base.require(not dC[100:].any(), f"{backend} {dtype}: a class that is switched off has a gradient")


def check_all_ignored(device="cpu"):
    """A micro-batch of padding alone: loss 0, gradients 0, where dividing by the count gives NaN."""
    E, C, b, x = base.random_problem(20, 50, 8, torch.float32, device, ignored=1.1)
    for backend in backends(device):
        for value in gradients_of(linear_cross_entropy, E, C, b, x, backend=backend):
            base.require(not value.any(), f"{backend}: {value.flatten()[0].item()} instead of 0")


def check_autograd_modes(device="cpu", linear_cross_entropy=linear_cross_entropy, names=None):
    """Frozen E or C gets no gradient and changes none; a second backward gives the same bits; no_grad; autocast, with
    backward inside its region and outside. Also for the losses of later stages, and the backends that they have."""
    E, C, b, x = base.random_problem(40, 97, 16, torch.float32, device)
    for backend in names or backends(device):
        loss, dE, dC, db = gradients_of(linear_cross_entropy, E, C, b, x, backend=backend)
        for frozen in (0, 1):
            leaves = [E.detach() if frozen == 0 else E, C.detach() if frozen == 1 else C]
            other = linear_cross_entropy(*leaves, x, b, backend=backend)
            got = torch.autograd.grad(other, leaves[1 - frozen], retain_graph=True)[0]
            again = torch.autograd.grad(other, leaves[1 - frozen])[0]
            base.require(torch.equal(got, (dE, dC)[1 - frozen]), f"{backend}: a frozen partner changes the gradient")
            base.require(torch.equal(got, again), f"{backend}: the second backward differs from the first")
        with torch.no_grad():
            value = linear_cross_entropy(E, C, x, b, backend=backend)
        base.require(not value.requires_grad and torch.equal(value, loss), f"{backend}: no_grad changes the loss")
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            mixed = linear_cross_entropy(E, C, x, b, backend=backend)
            inside = torch.autograd.grad(mixed, (E, C), retain_graph=True)
        got = torch.autograd.grad(mixed, (E, C))
        base.require(all(map(torch.equal, got, inside)), f"{backend}: backward inside autocast differs")
        want = gradients_of(linear_cross_entropy, *(t.detach().bfloat16().requires_grad_() for t in (E, C)), b, x,
                            backend=backend)
        base.require(torch.equal(mixed, want[0]), f"{backend}: autocast is not the same as casting E and C")
        for g, w in zip(got, want[1:], strict=False):
            base.require(g.dtype == torch.float32 and torch.equal(g, w.float()), f"{backend}: autocast: gradients")


def workspaces(E, C, backend):
    """{order: bytes}: the least workspace that gives each order, which is also the one of the most blocks."""
    found, tokens = {}, backend == "torch" or takes_descriptors(E, C)
    for size in range(0, 2**26, 2**14):
        plan = gradient_plan(len(E), *C.shape, E.device, E.dtype, size, tokens=tokens, backend=backend)
        if plan.order not in found:
            few = plan.block >= (len(E) if plan.order == "tokens" else len(C))
            base.require(not few, f"one block of {plan} is all there is")
            found[plan.order] = size
    base.require(len(found) == 1 + tokens, f"{backend}: only {found}")
    return found


def check_orders(device="cpu", dtype=torch.float32, N=160, V=600, D=40, seed=0):
    """Both orders of the gradient, in several blocks each and with an upstream gradient that is not 1, against the
    reference; then twice, and a second time from the same graph: the same bits."""
    if torch.device(device).type == "cuda":
        N, V = 3000, 3500  # the least blocks of a GPU are larger
    E, C, b, x = base.random_problem(N, V, D, dtype, device, seed)
    exact = [t.detach().double().requires_grad_() for t in (E, C, b)]
    upstream = torch.tensor(-4.0, device=device)  # a power of two: others cost dE over tokens a second rounding
    want = gradients_of(base.linear_cross_entropy_reference, *exact, x, upstream.double())
    peer = gradients_of(same_dtype_loss, E, C, b, x, upstream)
    for backend in backends(device):
        for order, workspace in workspaces(E, C, backend).items():
            runs = []
            for _ in range(2):
                loss = linear_cross_entropy(E, C, x, b, backend=backend, workspace=workspace)
                ran = "tokens" if "TokenOrder" in loss.grad_fn.name() else "vocabulary"
                base.require(ran == order, f"{backend}: {ran} order ran, {order} was planned")
                for again in (True, False):
                    runs.append([loss.detach(), *torch.autograd.grad(loss, (E, C, b), upstream, retain_graph=again)])
            for name, g, p, w in zip(("loss", "dE", "dC", "dbias"), runs[0], peer, want, strict=True):
                slack = 2e-6 if dtype == torch.float32 else 1e-3
                require_as_good(f"{backend} over {order} {dtype} {name}", g, p, w, slack)
            same = all(torch.equal(first, other) for run in runs for first, other in zip(runs[0], run, strict=True))
            base.require(same, f"{backend} over {order}: two runs on the same input differ")


def check_confident(device="cpu", dtype=torch.bfloat16):
    """Tokens predicted with probability 0.99: softmax - 1 cancels, and what remains is right to a rounding."""
    E, C, _, x = base.random_problem(140, 300, 64, dtype, device, ignored=0.0, bias=False)
    E = (9 * F.normalize(C.detach()[x].float(), dim=1)).to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (E, C)]
    want = gradients_of(base.linear_cross_entropy_reference, *exact, None, x)
    base.require(want[0] < 0.1, f"loss {want[0]:.3f}: these tokens are not predicted")
    for backend in backends(device):
        for workspace in (None, 0):
            loss = functools.partial(linear_cross_entropy, backend=backend, workspace=workspace)
            for name, g, w in zip(("loss", "dE", "dC"), gradients_of(loss, E, C, None, x), want, strict=True):
                base.require(error(g, w) < 1e-2, f"{backend}, workspace {workspace}: {name} off by {error(g, w):.1e}")


def check_fetched(device="cpu"):
    """v4 where the GPU (or the interpreter) has it: 16-bit rows of whole 16 bytes, in both orders, and what is hard."""
    for check in (check_orders, check_extreme_logits, check_switched_off_classes, check_returned_lse):
        check(device, torch.bfloat16)


def check_plan():
    """The plan keeps to its workspace, takes more rows or columns where it may, and the faster order where it fits."""
    for N, V, D in [(8192, 256000, 2304), (65536, 50304, 768), (8192, 151936, 1024), (8192, 128256, 4096)]:
        before = None
        for workspace in (256 * MIB, 512 * MIB, 1024 * MIB, 4096 * MIB):
            plan = gradient_plan(N, V, D, "cuda", torch.bfloat16, workspace)
            base.require(plan.beyond <= workspace, f"{plan} takes more than {workspace / MIB:.0f} MiB")
            good = before is None or plan.passes < before.passes or plan.block >= before.block
            base.require(good, f"{plan} is worse than {before} in less memory")
            before = plan
    orders = [gradient_plan(8192, 256000, 2304, "cuda", torch.bfloat16, size).order for size in (256 * MIB, 4096 * MIB)]
    base.require(orders == ["vocabulary", "tokens"], f"8192 x 256000 x 2304 in 256 MiB and in 4 GiB: {orders}")


def check_building_blocks(device="cpu"):
    """A vocabulary cut unevenly in three, as over three ranks: lse, target logit and gradients add up to the whole."""
    E, C, b, x = (t.detach() for t in base.random_problem(50, 143, 24, torch.float32, device))
    x = x.clamp(min=0)
    grad, grad_lse = torch.rand(2, 50, device=device)
    for backend in backends(device):
        options = dict(backend=backend, softcap=3.0)
        whole_lse, whole_target = lse_and_target(E, C, x, bias=b, **options)
        cuts = [(0, 17), (17, 100), (100, 143)]
        parts = [lse_and_target(E, C[i:j], x, i, bias=b[i:j], **options) for i, j in cuts]
        torch.testing.assert_close(merge(torch.stack([lse for lse, _ in parts])), whole_lse)
        torch.testing.assert_close(sum(target for _, target in parts), whole_target)
        chunk = functools.partial(gradient_chunk, grad=grad, grad_lse=grad_lse, **options)
        dE, dC = chunk(E, C, x, whole_lse, 0, bias=b)
        parts = [chunk(E, C[i:j], x, whole_lse, i, bias=b[i:j]) for i, j in cuts]
        torch.testing.assert_close(sum(e for e, _ in parts), dE, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([c for _, c in parts]), dC, rtol=1e-4, atol=1e-5)


def check_memory(device="cpu"):
    """No (N, V) buffer: loss and gradients stay far below one fp32 copy of the logits."""
    # On a GPU backward works in WORKSPACE, so the logits have to be larger than that to be missed.
    N, V = (512, 32768) if torch.device(device).type == "cpu" else (4096, 131072)
    E, C, _, x = base.random_problem(N, V, 16, torch.float32, device, bias=False)

    def step():
        E.grad = C.grad = None
        linear_cross_entropy(E, C, x).backward()

    logits = 4 * N * V
    for part, fn in (("loss", lambda: linear_cross_entropy(E, C, x)), ("loss and gradients", step)):
        peak = base.peak_bytes(fn, device)
        base.require(peak < logits / 2, f"{part}: {peak / MIB:.1f} MiB at the peak, logits are {logits / MIB:.0f} MiB")
    E.grad = C.grad = None
    backend = choose_backend("auto", E, C)
    plan = gradient_plan(N, V, 16, device, E.dtype, tokens=backend == "torch", backend=backend)
    beyond, planned = peak - 4 * (N + V) * 16, plan.beyond
    base.require(0.9 < beyond / planned < 1.1, f"{plan}: {beyond / MIB:.2f} MiB beyond the gradients")


def check_bad_input(device="cpu"):
    """Each wrong argument: ValueError whose one line names it. On CUDA a wrong target gives NaN, not a wild read."""
    E, C, b, x = base.random_problem(6, 10, 4, torch.float32, device)
    wide, far = torch.randn(10, 5, device=device), torch.tensor([0, 1, 2, 3, 4, 10], device=device)
    cases = {
        "as wide as C": (E, wide, x, {}),
        "targets": (E, C, x[:5], {}), "bias": (E, C, x, dict(bias=b[:3])),
        "reduction": (E, C, x, dict(reduction="max")), "backend": (E, C, x, dict(backend="cuda")),
        "shift": (E, C, x, dict(shift=-1)), "softcap": (E, C, x, dict(softcap=0.0)),
        "workspace": (E, C, x, dict(workspace=-1)),
        "bfloat16": (E, C.bfloat16(), x, {}), "targets holds 10": (E, C, far, dict(check_targets=True)),
    }
    if "triton" not in backends(device):
        cases["'triton'"] = (E, C, x, dict(backend="triton"))
    for words, (e, c, t, options) in cases.items():
        base.must_raise(words, functools.partial(linear_cross_entropy, e, c, t, **options))
    if torch.device(device).type == "cuda":
        losses = linear_cross_entropy(E, C, far, reduction="none")
        base.require(losses.isnan().tolist() == [False] * 5 + [True], f"targets past the end: losses {losses.tolist()}")


def check_large_offsets(device="cuda"):
    """V D > 2^31 elements: the last classes are read and their gradients written where they belong (GPU only)."""
    N, V, D = 128, 540_000, 4096
    E = torch.randn(N, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    C = torch.randn(V, D, device=device, dtype=torch.bfloat16).div_(D**0.5).requires_grad_()
    x = torch.arange(V - N, V, device=device)
    loss = linear_cross_entropy(E, C, x)
    dE, dC = torch.autograd.grad(loss, (E, C))
    want = sum(F.cross_entropy(E[i : i + 16].float() @ C.float().T, x[i : i + 16], reduction="sum") for i in (0, 16))
    got = linear_cross_entropy(E[:32], C, x[:32], reduction="sum")
    base.require(error(got, want) < 1e-3, f"loss of the last classes is off by {error(got, want):.1e}")
    with torch.no_grad():
        p = torch.softmax(E.float() @ C.float().T, 1)[:, -N:] - torch.eye(N, device=device)  # (N, N) last classes
        want = p.T @ E.float() / N
    base.require(error(dC[-N:], want) < 1e-2, f"dC of the last classes is off by {error(dC[-N:], want):.1e}")


# The bugs of --break; where one was shipped, its issue is named.


@triton.jit
def _no_max(top, total, logits):
    return tl.zeros_like(top), total + tl.sum(tl.exp(logits), 1)


@triton.jit
def _no_tail_mask(logits, cols, V):
    return logits


@triton.jit
def _no_onehot(softmax, logits, x, cols, g_softmax, g_target, softcap, HAS_SOFTCAP: tl.constexpr):
    return softmax * g_softmax[:, None]


@triton.jit
def _bias_per_block(
    E, C, bias, rows, cols, N, V, D, stride_e, stride_c, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        e, c = load_tile(E, rows, depth, N, D, stride_e), load_tile(C, cols, depth, V, D, stride_c)
        acc = dot(e, tl.trans(c), acc)
        if HAS_BIAS:  # inside the loop: once per BLOCK_D columns (apple/ml-cross-entropy issue 52)
            acc += tl.load(bias + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    return acc


_calls = itertools.count()


def _reversed_pieces(total, size):
    """Backwards in every third call, so that no two runs of one, two or four calls agree."""
    slices = [(start, min(start + size, total)) for start in range(0, total, size)]
    return slices[::-1] if next(_calls) % 3 == 0 else slices


@triton.jit
def _first_group_only(index, row_tiles, col_tiles):
    group = index // (8 * row_tiles)
    width = tl.minimum(col_tiles - 8 * group, 8)
    index -= group * 8 * row_tiles
    return index // width, index % width  # without 8 * group: the other groups' tiles are never made


@triton.jit
def _softmax_of_its_tile(
    G, partial, lse, targets, target_logit, g, N, V, stride, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr
):
    rows = (tl.program_id(0) % tl.cdiv(N, BLOCK_N)) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = (tl.program_id(0) // tl.cdiv(N, BLOCK_N)) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(targets + rows, mask=rows < N, other=-1)
    row_g = tl.load(g + rows, mask=rows < N, other=0.0)
    softmax = load_tile(G, rows, cols, N, V, stride).to(tl.float32)  # never brought to the scale of the whole row
    out = tile_gradient(softmax, softmax, x, cols, row_g, row_g, 1.0, False)
    at = G + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, out.to(G.dtype.element_ty), mask=(rows < N)[:, None] & (cols < V)[None, :])


BREAKS = {
    "zero-max": (check_extreme_logits, "merge", lambda partial: partial.exp().sum(0).log()),
    "uniform-gradient": (check_reductions, "row_gradients", lambda g, h, dtype: (
        (g + h)[:1].expand_as(g), g[:1].expand_as(g), torch.ones((), device=g.device))),
    "unordered-sums": (check_orders, "pieces", _reversed_pieces),
    "keep-logits": (check_memory, "pieces", lambda total, size: [(0, total)]),
    "lost-slice": (check_building_blocks, "merge", lambda partial: partial.amax(0)),
}
if HAS_TRITON:
    BREAKS |= {
        "no-max": (check_extreme_logits, "online_step", _no_max),
        "no-tail-mask": (check_equal, "mask_tail", _no_tail_mask),
        "no-onehot": (check_equal, "tile_gradient", _no_onehot),
        "bias-per-block": (check_equal, "tile_logits", _bias_per_block),
        "first-group-only": (check_fetched, "tile_at", _first_group_only),
        "unscaled-tiles": (check_fetched, "rescale_kernel", _softmax_of_its_tile),
    }


# ==== 8. Measurements =================================================================================================


def trained_problem(N, V, D, dtype, device, seed=0):
    """Data whose softmax is as sparse as a trained model's (random data is flat): a Zipf law over a shuffled vocabulary
    in one column of C, context noise, and each token pulled by a varying amount towards its target's row of C."""
    generator = torch.Generator(device).manual_seed(seed)
    options = dict(device=device, generator=generator)
    frequency = 1 / (torch.arange(V, device=device) + 2.7) ** 1.07
    token = torch.randperm(V, **options)
    C = torch.randn(V, D, **options) / math.sqrt(D)
    C[token, 0] = (frequency / frequency.sum()).log() / 8
    x = token[torch.multinomial(frequency, N, replacement=True, generator=generator)]  # (N,)
    E = 2 * torch.randn(N, D, **options) + 7 * torch.rand(N, 1, **options) * F.normalize(C[x])
    E[:, 0] = 8
    return E.to(dtype).requires_grad_(), C.to(dtype).requires_grad_(), x


def gpu_shape():
    """N, V, D: Gemma 2 2B's classifier, if the card has room for the materialised loss."""
    return (8192, 256000, 2304) if torch.cuda.mem_get_info()[0] > 40 * 2**30 else (2048, 65536, 1024)


def asked_shape(args, device):
    """N, V, D of --shape or, on a GPU, gpu_shape(), else None. ValueError if one of them is below 1."""
    if args.shape and min(args.shape) < 1:
        raise ValueError(f"--shape {args.shape}: N, V and D must be at least 1")
    return args.shape or (gpu_shape() if device.type == "cuda" else None)


def one_pass(E, C):
    """Milliseconds of E C^T in cuBLAS, slice by slice into one buffer: the unit in which other times are told. All of
    it, as often as other things are timed: a short burst would run at a higher clock than what it is compared with."""
    out = torch.empty(E.shape[0], min(C.shape[0], 32768), dtype=E.dtype, device=E.device)

    def product():
        for start, stop in pieces(C.shape[0], out.shape[1]):
            torch.mm(E.detach(), C.detach()[start:stop].T, out=out[:, : stop - start])

    return base.bench(product, E.device).median


def measure(device, ledger, N, V, D):
    """Every rung beside its peers on one problem: forward, forward and backward, peak bytes, errors against fp32."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    E, C, x = trained_problem(N, V, D, dtype, device)
    # v1 in fp32 (checked against the fp64 reference above) is the yardstick: it fits where fp32 logits do not.
    want = gradients_of(linear_cross_entropy, *(t.detach().float().requires_grad_() for t in (E, C)), None, x,
                        backend="torch")
    ours = functools.partial(linear_cross_entropy, backend="triton") if cuda else None
    fetched = ours if cuda and takes_descriptors(E, C) else None
    plans = {f"v4 over {plan.order}": (plan, size) for size in (4096 * MIB, WORKSPACE)  # the default comes last, wins
             for plan in [gradient_plan(N, V, D, "cuda", torch.bfloat16, size)]}
    rungs = {
        "materialised (01)": base.materialised_loss,
        "torch.compile": torch.compile(base.materialised_loss) if cuda else None,
        "chunked over tokens (01)": functools.partial(base.chunked_linear_cross_entropy, chunk=max(1, N // 8)),
        "v1 blocked PyTorch": functools.partial(linear_cross_entropy, backend="torch"),
        "v2 Triton, tile by tile": None,
        "v3 Triton, one operation": ours,
        **{name: fetched and functools.partial(fetched, workspace=size) for name, (_, size) in reversed(plans.items())},
    }
    print(f"N = {N}, V = {V}, D = {D}, {dtype}; gradients alone: {dtype.itemsize * (N + V) * D / MIB:.0f} MiB")
    for name, (plan, size) in reversed(plans.items()):
        unit = "columns" if plan.order == "vocabulary" else "rows"
        print(f"{name}: {plan.passes} matrix passes, {plan.block} {unit} of G at a time, in {size / MIB:.0f} MiB")
    print(f"{'':<26}{'loss ms':>9} {'MiB':>8} |{'loss+grad ms':>14} {'MiB':>8} {'beyond dE, dC':>14} | error of dE, dC")
    peaks, times = {}, {}
    for name, loss in rungs.items():

        def forward(loss=loss):
            with torch.no_grad():
                return loss(E, C, x)

        def both(loss=loss):
            E.grad = C.grad = None
            loss(E, C, x).backward()

        if loss is None and not (cuda and name.startswith("v2")):
            print(f"{name:<26}  needs a {'Hopper ' if name.startswith('v4') else ''}GPU")
            continue
        replaced = dict(takes_descriptors=lambda *matrices: False) if name.startswith("v3") else {}
        with mock.patch.dict(globals(), replaced):
            if name.startswith("v2"):
                both = functools.partial(tiled_loss_and_gradients, E.detach(), C.detach(), x)
                dE, dC = both()[1:]
            else:
                both()
                dE, dC = E.grad, C.grad
            if name.startswith("v4"):
                both()
                base.require(torch.equal(dE, E.grad) and torch.equal(dC, C.grad), "two runs of v4 differ at this shape")
            errors = error(dE, want[1]), error(dC, want[2])
            del dE, dC
            E.grad = C.grad = None
            row = f"{name:<26}"
            if loss is None:
                row += f"{'':>9} {'':>8} |"
            else:
                peaks[name, "loss"] = base.peak_bytes(forward, device)
                times[name, "loss"] = base.bench(forward, device).median
                row += f"{times[name, 'loss']:9.2f} {peaks[name, 'loss'] / MIB:8.1f} |"
            timing = base.bench(both, device, runs=3 if name[:2] in ("v1", "v2") else 7)  # up to a second each
            times[name, "both"] = timing.median
            E.grad = C.grad = None
            peaks[name, "both"] = base.peak_bytes(both, device)
        beyond = peaks[name, "both"] - dtype.itemsize * (N + V) * D
        row += f"{timing.median:7.2f} +- {timing.spread:<4.2f}{peaks[name, 'both'] / MIB:8.0f} {beyond / MIB:14.1f}"
        print(f"{row} | {errors[0]:.1e}, {errors[1]:.1e}")
    E.grad = C.grad = None
    if cuda:
        one_pass_ms = one_pass(E, C)
        print(f"one matrix pass of 2 N V D FLOP in cuBLAS: {one_pass_ms:.2f} ms. In passes, loss | loss and gradients:")
        for name in rungs:
            passes = [f"{times[name, part] / one_pass_ms:6.2f}" if (name, part) in times else f"{'':6}"
                      for part in ("loss", "both")]
            print(f"  {name:<26} {passes[0]} | {passes[1]}")
    print()
    mib = lambda size: size and size / MIB  # noqa: E731
    naive = peaks["materialised (01)", "both"]
    ledger.row("materialised: peak", "12 N V", mib(base.materialised_bytes(N, V)), mib(naive))
    name = next(reversed(plans))
    loss_peak = mib(peaks.get((name, "loss")))
    ledger.row("v4, loss: peak", "8 N V / 256", mib(forward_bytes(N, V)), loss_peak, band=(0.9, 1.1))
    for name, (plan, _) in reversed(plans.items()):
        beyond = peaks.get((name, "both"))
        beyond = beyond and beyond - 2 * (N + V) * D  # dE and dC in bf16
        ledger.row(f"{name}: beyond dE, dC", "gradient_plan", mib(plan.beyond), mib(beyond), band=(0.9, 1.1))
    ledger.row("v1 against logits: peak", "less than 4 N V", mib(4 * N * V), mib(peaks["v1 blocked PyTorch", "both"]),
               band=(0, 0.9) if N * V > 4 * CPU_BLOCK else None)  # smaller logits are a block or two


HEADLINES = {  # what README shows of a run: 01's chosen_lines
    "": (
        "N = ", f"{'':<28}loss ms", "materialised (01)", "torch.compile", "v1 ", "v2 ", "v3 ", "v4 over tokens  ",
    ),
    "NVIDIA": ("v4 over vocabulary  ", "one matrix pass"),
}


def body(device, ledger, args):
    shape = asked_shape(args, device) or (1024, 8192, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_equal(70, 203, 72, dtype, device)
    for seed, (N, V, D) in enumerate([(64, 256, 64), (33, 65, 130)]):
        check_equal(N, V, D, torch.float32, device, seed, softcap=2.0)
        check_ladder(N, V, D, torch.float32, device, seed)
    check_plan()
    checks = [check_orders, check_fetched, check_confident, check_reductions, check_returned_lse, check_extreme_logits]
    checks += [check_switched_off_classes, check_all_ignored, check_autograd_modes, check_building_blocks, check_memory]
    checks += [check_bad_input] + ([check_large_offsets] if device.type == "cuda" else [])
    for check in checks:
        check(device)
    names = ", ".join(check.__name__[6:] for check in [check_equal, check_ladder, check_plan, *checks])
    print(textwrap.fill(f"checks passed on backends {' and '.join(backends(device))}: {names}", 110) + "\n")
    measure(device, ledger, *shape)


def add_arguments(parser):
    parser.add_argument("--shape", nargs=3, type=int, metavar=("N", "V", "D"), help="shape of the measured problem")


if __name__ == "__main__":
    sys.exit(base.run_stage(__file__, __doc__, globals(), body, "python 03_grad_filter_sort.py", add_arguments))


# Exercises
#   1. linear_lse_kernel has N / BLOCK_N programs. For N = 8192, how many of an H200's 132 multiprocessors work? Time it
#      beside split_lse_kernel while you vary SPLIT; where is the best SPLIT, and why is it not the smallest?
#   2. From what workspace on does gradient_plan go over tokens, for N = 65,536 and V = 50,257, for N = 2048 and
#      V = 256,000? Derive it from the bytes that each order holds, then ask gradient_plan.
#   3. Derive the gradient of a z-loss, c * lse^2, and check that nothing in this file has to change for it.
