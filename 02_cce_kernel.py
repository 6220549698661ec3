"""02 - Cut cross-entropy: the loss without the logits.

The problem in one number
    N = 8192 tokens, V = 256,000 classes, D = 2304 (Gemma 2 2B): the logits are 3.9 GiB in bf16, and a
    materialised loss holds 23 GiB at its peak. The loss needs two numbers a token. This file computes both,
    and the exact gradients, with 0.25 GiB beside the gradients themselves; the loss in the time of one
    matrix product.

The maths                                    E (N, D) embeddings, C (V, D) classifier, x (N,) targets: as in 01
    loss[n] = lse[n] - E[n] . C[x[n]]        lse[n] = log sum_v exp(E[n] . C[v])
  A log-sum-exp can be taken piece by piece. Two pieces with maxima m1, m2 and sums s1, s2 of exp(logit - m):
    m = max(m1, m2)        s = s1 exp(m1 - m) + s2 exp(m2 - m)        lse = m + log s
  so a tile of logits can be made, folded into (m, s) and forgotten. Backward makes the tile again:
    G[n, v] = d loss / d logit = g[n] (exp(logit - lse[n]) - [v == x[n]])        dE = G C        dC = G^T E
  where g[n] is the upstream gradient of token n's loss, 1 / N for a mean. That is one more matrix product,
  2 N V D FLOP, than with the logits kept. Such a product is called a pass; time is told in passes.

The ladder                     a block or slice is a range of classes or tokens; a tile is what one program makes
    v1  blocked PyTorch: the whole algorithm on one page, any device.
    v2  the paper's Algorithms 1 to 3 in Triton: a program a tile, a lock for lse, atomic sums for dE and dC.
    v3  no locks: a partial lse per tile, merged in a fixed order; gradients by slices, two products a slice.
    v4  the same on Hopper: tiles fetched by its copy engine, persistent programs. As fast as the product alone.

How to launch
    python 02_cce_kernel.py                      checks, then memory and time; a minute on a GPU, less on a CPU
    python 02_cce_kernel.py --check orders       one check, no measurements; without a name, all of them
    python 02_cce_kernel.py --break no-max       plant a famous bug and watch its check fail (exit status 1)
    python 02_cce_kernel.py --shape 8192 128256 4096

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009 (Algorithms 1 to 3).
    Fused output projection and loss prediction, arXiv 2511.17599. Online softmax, arXiv 1805.02867.

Left out on purpose: filtering and sorting (03), warp-specialised kernels (a second language), label smoothing.
"""

import bisect
import functools
import importlib
import itertools
import math
import sys
from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

base = importlib.import_module("01_logits_memory")
HAS_TRITON, INTERPRETED, MIB = base.HAS_TRITON, base.INTERPRETED, base.MIB
add_to, set_to, block_logits = base.add_to, base.set_to, base.block_logits

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:  # macOS, Windows: the kernels below are still defined, never run; backend="triton" says so
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=lambda value: value)


# ==== 1. The cost model: three orders of the same sums ================================================================
#
# G (N, V) is needed in two products, dE = G C and dC = G^T E, and it is as large as the logits. What is done with
# it decides time, in passes for loss and gradients, and memory, in bytes beyond dE and dC:
#
#   order        passes   held beyond dE and dC      how
#   kept           3      2 N V                      forward leaves the softmax in 16 bits, backward turns it into G
#   tokens         3      4 V D, and a block of G    forward makes block after block of rows, and their gradients
#   vocabulary     4      4 N D, and a block of G    forward finds lse; backward makes blocks of columns again
#
#      tokens                     vocabulary
#      +--------------------+     +-----+--------------+    Rows know their lse as soon as they are made, so their
#      |////////////////////| N   |/////|              |    logits need not be made again. But every block of rows
#      +--------------------+     |/////|              |    adds to all of dC, a sum that is kept in fp32. Columns
#      |                    |     |/////|              |    write their rows of dC once, and add to dE, which is
#      +--------------------+     +-----+--------------+    smaller; they have to know lse before.
#                V
#
# Over tokens, gradients are formed before the upstream gradient is known. That of a mean or a sum is one number,
# by which backward multiplies; a loss per token, or a gradient through lse, takes another order. And the first two
# make G from the softmax alone: a softcap, whose slope needs the logits, takes the last one.
#
# Gemma 2 2B in bf16: kept 4,063 MiB; tokens 2,286 MiB in blocks of 2048; vocabulary 256 MiB in slices of 14,080. A
# GPU's backward may hold 256 MiB unless the caller says otherwise, so it is the last.

WORKSPACE = 256 * MIB
CPU_BLOCK = 2**20  # elements of one block of logits on a CPU: 4 MiB in fp32, about the size of its cache


# The order, its passes for loss and gradients, classes ("vocabulary") or tokens (the others) in a block of G, and the
# peak of bytes beyond dE and dC.
Plan = namedtuple("Plan", "order passes block beyond")


def lse_bytes(N, V):
    """Merging v4's partial lse, fp32, one a row and tile of 256 columns: they and their exponentials."""
    return 2 * 4 * N * math.ceil(V / 256)


def beyond_bytes(order, N, V, D, b, element, block):
    """Peak beyond dE and dC for inputs of b bytes and `block` rows or columns of G, whose elements have `element`."""
    if order == "kept":  # the softmax, while the partial lse are merged
        return b * N * V + lse_bytes(N, V)
    if order == "tokens":  # dE and the sum for dC; backward makes the results where the blocks were, so only what
        sums, results = b * N * D + max(4, b) * V * D, b * (N + V) * D  # exceeds them counts
        return sums + max(0, element * block * V + lse_bytes(block, V) - results)
    sum_E, later = (4 * N * D, b * N * D) if b == 2 else (0, 0)  # a 16-bit dE is made after the last block of G
    return sum_E + max(0, element * N * block - later)


def gradient_plan(N, V, D, device, dtype, workspace=None, *, orders=("kept", "tokens", "vocabulary"), kernels=True):
    """The Plan of N tokens, V classes, width D: the first of `orders` whose bytes fit `workspace` (default WORKSPACE)
    in blocks that keep the device busy. "vocabulary" fits anything, down to its smallest block. kernels=False: blocked
    PyTorch, without "kept", whose G is in fp32 (what it copies from or to 16 bits comes on top of what is said)."""
    cpu, b, N = torch.device(device).type == "cpu", dtype.itemsize, max(N, 1)
    least = 128 if cpu else 1024  # in smaller blocks the time goes into the sums
    room = WORKSPACE if workspace is None else workspace
    cost = functools.partial(beyond_bytes, N=N, V=V, D=D, b=b, element=b if kernels else max(b, 4))

    cached = cpu and workspace is None  # blocks of CPU_BLOCK elements, which fit the cache

    def fitting(order, total, step):
        """The largest block, a multiple of step, that fits; 0 when none does."""
        sizes = range(step, total + step, step)
        return step * bisect.bisect_right(sizes, room, key=lambda block: cost(order, block=block))

    if kernels and "kept" in orders and cost("kept", block=N) <= room:
        return Plan("kept", 3, N, cost("kept", block=N))
    tokens = min(N, CPU_BLOCK // V if cached else fitting("tokens", N, 128))
    if "tokens" in orders and tokens >= min(N, least):
        tokens = min(N, 128 * math.ceil(N / math.ceil(N / tokens) / 128))  # equal shares, in whole tiles
        return Plan("tokens", 3, tokens, cost("tokens", block=tokens))
    classes = CPU_BLOCK // N // 128 * 128 if cached else fitting("vocabulary", V, 128 if cpu else 256)
    classes = min(V, max(least, classes))
    return Plan("vocabulary", 4, classes, cost("vocabulary", block=classes))


def pieces(total, size):
    """(start, stop) pairs that cover range(total), in a fixed order: sums in the same order are the same bits."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


# ==== 2. v1, blocked PyTorch: the whole algorithm. Everything after it is the same thing, faster ======================
#
#       vocabulary -->
#     +--------+--------+--------+--------+
#     | block  |        |        |        |     forward: make a block of logits, fold it into lse, forget it
#     +--------+--------+--------+--------+     backward: make it again, turn it into G, use it twice, forget it
#
# The target's logit is one row of C a token, and needs no block. Of the blocks that came before we keep lse alone:
# with a new one, whose own is l, it becomes log(exp(lse) + exp(l)). Logits 1, 2 | 3: the first block leaves
# log(e + e^2) = 2.313, the second log(e^2.313 + e^3) = 3.408. Backward makes G in the memory of the logits. dE is a
# sum over blocks; each block writes its own rows of dC: no sum, no order, no lock.


@torch.no_grad()
def blocked_loss_and_gradients(E, C, targets, block=4096):
    """v1: mean loss over targets >= 0, dE (N, D) and dC (V, D), of E (N, D), C (V, D), targets (N,) int64."""
    V, kept = C.shape[0], targets >= 0
    sums, narrow = base.product_dtypes(E)
    g = base.token_weights(kept.to(sums))  # (N,) one over the number of kept tokens, 0 for ignored ones

    lse = torch.full(targets.shape, -math.inf, dtype=sums, device=E.device)  # (N,)
    target_logit = (E.to(sums) * C[targets.clamp(min=0)]).sum(1)  # (N,)
    for start, stop in pieces(V, block):
        lse = torch.logaddexp(lse, base.exponentials_(block_logits(E, C[start:stop]))[0])  # of logits (N, W)
    loss = ((lse - target_logit) * g).sum()

    dE, dC = torch.zeros(E.shape, dtype=sums, device=E.device), torch.empty_like(C)
    for start, stop in pieces(V, block):
        G = block_logits(E, C[start:stop])  # (N, W) the logits, again
        G.sub_(lse[:, None]).exp_().mul_(g[:, None])  # now the softmax, times the upstream gradient
        here = (targets >= start) & (targets < stop)  # whose target is in this block?
        G[here, targets[here] - start] -= g[here]
        G = G.to(narrow)
        add_to(dE, G, C[start:stop])
        set_to(dC[start:stop], G.T, E)
        del G  # or it would be alive beside the next
    return loss, dE.to(E.dtype), dC


# ==== 3. What all kernels share: a tile of logits, its exponentials, its gradient =====================================
#
# A program makes a tile, (BLOCK_N tokens) x (BLOCK_V classes), whose logits stay in fp32 registers until they have
# become something small. E and C are fetched BLOCK_D columns at a time; num_stages times as many are in flight.
#
#                 C^T  |  . | c | . .                              shared memory of 128 x 128 tiles, three stages:
#                  ----+----+---+----     acc += e c^T,            (128 + 128) * 64 * 2 bytes * 3 = 96 KiB,
#          E   rows  e |    |acc|         64 of the depth D        which every GPU from Ampere on has.
#                                         at a time

TILES = {
    "16-bit": dict(BLOCK_N=128, BLOCK_V=128, BLOCK_D=64, num_warps=8, num_stages=3),
    "32-bit": dict(BLOCK_N=64, BLOCK_V=64, BLOCK_D=32, num_warps=4, num_stages=2),
    "interpreted": dict(BLOCK_N=64, BLOCK_V=128, BLOCK_D=64),
    "descriptors": dict(BLOCK_N=128, BLOCK_V=256, BLOCK_D=64, num_warps=8, num_stages=3),  # v4, on Hopper
}
if INTERPRETED:
    TILES["descriptors"] = dict(BLOCK_N=32, BLOCK_V=64, BLOCK_D=32)
LOG2E = tl.constexpr(math.log2(math.e))
UPCAST = tl.constexpr(INTERPRETED)  # the interpreter's bf16 is wrong in dots and truncates in casts: fp32 there


def tiles_for(E):
    """The tile sizes and launch options for inputs like E, as keyword arguments of a kernel."""
    return TILES["interpreted" if INTERPRETED else "16-bit" if E.element_size() == 2 else "32-bit"]


def kernel_inputs(E, C, *vectors):
    """The kernels take any row stride of E and C, but read a row, and each vector, as one run of memory. Vectors in
    one dtype, fp32 (or int64), so that fewer kernels have to be compiled."""
    vectors = (v.float() if v.is_floating_point() else v for v in vectors)
    return rows_contiguous(E), rows_contiguous(C), *(v.contiguous() for v in vectors)


def rows_contiguous(matrix):
    good = matrix.stride(-1) == 1 and matrix.stride(0) >= matrix.shape[1]  # expanded rows lie upon each other
    return matrix if good else matrix.contiguous()


@triton.jit
def load_tile(matrix, rows, cols, num_rows, num_cols, stride):
    """A (rows, cols) tile of a row-major matrix, 0 outside it. Offsets in 64 bits: V D and N V pass 2^31."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(matrix + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(matrix, tile, rows, cols, num_rows, num_cols, stride):
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    at = matrix + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(vector, rows, N, other):
    return tl.load(vector + rows, mask=rows < N, other=other)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 sums. a is rounded to the dtype of b; fp32 operands keep all their bits (no tf32)."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    else:
        a = a.to(b.dtype)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tile_logits(
    E, C, rows, cols, N, V, D, stride_e, stride_c, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One tile of E C^T, (BLOCK_N, BLOCK_V) fp32, in registers."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        e = load_tile(E, rows, depth, N, D, stride_e)  # (BLOCK_N, BLOCK_D)
        c = load_tile(C, cols, depth, V, D, stride_c)  # (BLOCK_V, BLOCK_D)
        acc = dot(e, tl.trans(c), acc)
    return acc


@triton.jit
def tanh(x):
    """1 - 2 / (exp(2x) + 1) cancels near 0, where three terms of the series are exact to fp32's last place."""
    series = x * (1 - x * x * (0.33333333 - 0.13333333 * x * x))
    return tl.where(tl.abs(x) < 0.1, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def cap(logits, softcap):
    """The softcap, where there is one."""
    if softcap is not None:
        logits = softcap * tanh(logits / softcap)
    return logits


@triton.jit
def mask_tail(logits, cols, V):
    """Columns right of V do not exist: exp(-inf) = 0 keeps them out of every sum."""
    return tl.where((cols < V)[None, :], logits, -float("inf"))


@triton.jit
def exponentials(logits):
    """Row maxima (BLOCK_N,), which are finite, since a tile has a class, and exp(logit - maximum). exp2 is the GPU's
    own instruction; the factor goes into an FMA."""
    top = tl.max(logits, 1)
    return top, tl.exp2(logits * LOG2E - (top * LOG2E)[:, None])


@triton.jit
def tile_softmax(logits, lse):
    return tl.exp2(logits * LOG2E - (lse * LOG2E)[:, None])


@triton.jit
def tile_gradient(softmax, logits, x, cols, g_softmax, g_target, softcap):
    """G (BLOCK_N, BLOCK_V) from a tile of softmax; x is the target's column. Rows past N come with zero gradients;
    columns past V are masked (v2), or never stored."""
    G = softmax * g_softmax[:, None] - tl.where(cols[None, :] == x[:, None], g_target[:, None], 0.0)
    if softcap is not None:
        G *= 1 - (logits / softcap) * (logits / softcap)  # the slope of the cap, from the capped logit
    return G


# ==== 4. v2, the paper's Algorithms 1 to 3: a program a tile, and everybody adds ======================================
#
#                 column tiles            A row of logits is made by V / BLOCK_V programs, in whatever order they come.
#              +----+----+----+----+      Each has a part of lse (N,), of dE (N, D) and of dC (V, D), none of them all:
#   row tiles  | p0 | p3 | p6 | .. |        lse   takes two numbers at once, a maximum and a sum: a lock for each row
#              | p1 | p4 | p7 |    |              tile, and whoever has it folds its part in (Algorithm 2);
#              | p2 | p5 | p8 |    |        dE += G C, dC += G^T E, atomic adds, BLOCK_D columns at a time (Alg. 3).
#              +----+----+----+----+      One kernel each for loss and gradients, no memory but the (fp32) results.
#
# Floating-point sums depend on their order, and here the order is that of a race: two runs give two gradients (the
# measurement below counts in how many elements of dC). And adding a tile's products to memory costs more than making
# them: (BLOCK_N + BLOCK_V) D numbers, which for Gemma 2 2B and tiles of 128 x 128 makes 75 billion atomic additions,
# where dE and dC have 0.6 billion elements. The paper's remedy is to skip: a tile with no |G| >= eps adds nothing. In
# a trained model nearly all are such, once classes are sorted by frequency; 03 asks what that does to training.


@triton.jit
def indexed_dot_kernel(E, C, targets, out, N, V, D, stride_e, stride_c, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Algorithm 1: out[n] = E[n] . C[x[n]]. Gathers one row of C a token; a target outside C reads nothing."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = load_rows(targets, rows, N, -1)
    x = tl.where((x >= 0) & (x < V), x, V)  # row V is past the end, so load_tile gives zeros
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        e = load_tile(E, rows, depth, N, D, stride_e).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        c = load_tile(C, x, depth, V, D, stride_c).to(tl.float32)  # (BLOCK_N, BLOCK_D)
        acc += tl.sum(e * c, 1)
    tl.store(out + rows, acc, mask=rows < N)


@triton.jit
def tile_of_program(N, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr):
    """(column tile, rows, cols) of this program; neighbours share their columns, which come from L2."""
    row_tile, col_tile = tl.program_id(0) % tl.cdiv(N, BLOCK_N), tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    return col_tile, row_tile * BLOCK_N + tl.arange(0, BLOCK_N), col_tile * BLOCK_V + tl.arange(0, BLOCK_V)


@triton.jit
def locked_lse_kernel(
    E, C, lse, locks, N, V, D, stride_e, stride_c,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Algorithm 2: fold each tile into lse (N,), -inf before, while holding the lock of its rows."""
    _, rows, cols = tile_of_program(N, BLOCK_N, BLOCK_V)
    lock = locks + tl.program_id(0) % tl.cdiv(N, BLOCK_N)
    logits = tile_logits(E, C, rows, cols, N, V, D, stride_e, stride_c, BLOCK_N, BLOCK_V, BLOCK_D)
    top, tile_exp = exponentials(mask_tail(logits, cols, V))
    here = top + tl.log(tl.sum(tile_exp, 1))  # (BLOCK_N,)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    before = load_rows(lse, rows, N, -float("inf"))
    larger = tl.maximum(before, here)
    tl.store(lse + rows, larger + tl.log(tl.exp(before - larger) + tl.exp(here - larger)), mask=rows < N)
    tl.debug_barrier()  # all threads have stored before one of them opens the lock
    tl.atomic_xchg(lock, 0)


@triton.jit
def atomic_gradient_kernel(
    E, C, targets, lse, g, dE, dC, eps, N, V, D, stride_e, stride_c,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Algorithm 3: make a tile of G once, add its products to dE (N, D) and dC (V, D), both fp32, 0 before."""
    _, rows, cols = tile_of_program(N, BLOCK_N, BLOCK_V)
    logits = tile_logits(E, C, rows, cols, N, V, D, stride_e, stride_c, BLOCK_N, BLOCK_V, BLOCK_D)
    logits = mask_tail(logits, cols, V)  # here, too: the filter looks at every |G| of the tile
    x, row_g = load_rows(targets, rows, N, -1), load_rows(g, rows, N, 0.0)
    G = tile_gradient(tile_softmax(logits, load_rows(lse, rows, N, 0.0)), logits, x, cols, row_g, row_g, None)
    if tl.max(tl.max(tl.abs(G), 1), 0) >= eps:  # the filter
        for start in range(0, D, BLOCK_D):
            depth = start + tl.arange(0, BLOCK_D)
            e = load_tile(E, rows, depth, N, D, stride_e)  # (BLOCK_N, BLOCK_D)
            c = load_tile(C, cols, depth, V, D, stride_c)  # (BLOCK_V, BLOCK_D)
            at = dE + rows.to(tl.int64)[:, None] * D + depth[None, :]
            part = dot(G, c, tl.zeros((BLOCK_N, BLOCK_D), tl.float32))
            tl.atomic_add(at, part, mask=(rows < N)[:, None] & (depth < D)[None, :], sem="relaxed")
            at = dC + cols.to(tl.int64)[:, None] * D + depth[None, :]
            part = dot(tl.trans(G), e, tl.zeros((BLOCK_V, BLOCK_D), tl.float32))
            tl.atomic_add(at, part, mask=(cols < V)[:, None] & (depth < D)[None, :], sem="relaxed")


@torch.no_grad()
def atomic_loss_and_gradients(E, C, targets, eps=0.0):
    """v2: mean loss over targets >= 0, dE (N, D) and dC (V, D); E, C of one dtype, fp32 or bf16. Tiles of G below eps
    are left out of dE and dC. Not repeatable to the bit on a GPU."""
    E, C, targets = kernel_inputs(E, C, targets)
    (N, D), V, tiles = E.shape, C.shape[0], tiles_for(E)
    shape, row_tiles = (N, V, D, E.stride(0), C.stride(0)), triton.cdiv(N, tiles["BLOCK_N"])
    g = base.token_weights(targets >= 0).float()  # (N,)
    lse = torch.full((N,), -math.inf, device=E.device)
    locks = torch.zeros(row_tiles, dtype=torch.int32, device=E.device)
    grid = (row_tiles * triton.cdiv(V, tiles["BLOCK_V"]),)
    locked_lse_kernel[grid](E, C, lse, locks, *shape, **tiles)
    dE, dC = (torch.zeros(t.shape, device=E.device) for t in (E, C))  # fp32: 2.2 GiB for a dC of 256,000 x 2304
    atomic_gradient_kernel[grid](E, C, targets, lse, g, dE, dC, eps, *shape, **tiles)
    return ((lse - indexed_logits(E, C, targets)) * g).sum(), dE.to(E.dtype), dC.to(C.dtype)


# ==== 5. v3, one writer for every address; v4, the same on Hopper =====================================================
#
# The loss. A program keeps what it finds of a tile, partial[t, n], the lse of row n over column tile t. Nobody else
# writes there: no lock. A second, tiny step merges V / BLOCK_V numbers a row, always in the same order: the same bits
# in every run. (Gemma 2 2B in tiles of 256 classes: 1,000 numbers for each of 8,192 rows, 31 MiB, and as much for
# their exponentials.) The target's logit comes from Algorithm 1.
#
# The gradients. A slice of G is written to memory in 16 bits, 2 N W bytes, and two library products make it dE and
# dC, again in a fixed order. The logits stay in fp32 registers until they have become G: rounding them to bf16 first,
# as a separate product would, puts an error of up to 2^-8 |logit| into the exponent.
#
# That is v3. It reaches two thirds of the rate of a matrix product. What holds it back is not arithmetic: every thread
# computes addresses, waits for its loads, and 128 x 128 tiles read each operand too often. v4 changes three things:
#   - tiles of 128 x 256: a quarter fewer bytes through shared memory for the same products;
#   - tensor descriptors: one thread asks Hopper's copy engine (TMA) for a whole tile, which arrives in the layout
#     that the matrix units want, with zeros for what lies outside the matrix. No addresses, no masks;
#   - persistent programs: one a multiprocessor, each walks over many tiles, and (flatten) the loads of the next tile
#     are under way while the exponentials of this one are computed.
# So a kernel is written once, as a walk over tiles, and FETCHED says how a tile comes and goes. The walk decides what
# is found in L2: groups of eight column tiles, each walked over all rows.
#
#        group 0: 8 column tiles       group 1
#      +--------------------------+  +---------
#      |  0  1  2  3  4  5  6  7  |  | 8 r ...      132 programs work on 17 rows of tiles at a time: they share 8 tiles
#      |  8  9 10 11 12 13 14 15  |  |              of C and 17 of E, where a walk along one row of tiles would share
#      | 16 17 ...       r rows   |  |              132 and 1


@functools.cache
def is_hopper(device):
    """The copy engine came with compute capability 9, Hopper's; three stages of these tiles and one of G fill 208 KiB
    of shared memory, which small chips of later generations lack."""
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
    """The descriptor by which the copy engine moves tiles of a matrix; rows, columns: v4's names of their sizes."""
    return TensorDescriptor.from_tensor(matrix, [TILES["descriptors"][size] for size in (rows, columns)])


def programs(E):
    """The grid of a persistent kernel: one program a multiprocessor (the interpreter: a few, to have several)."""
    return (3 if INTERPRETED else torch.cuda.get_device_properties(E.device).multi_processor_count,)


@triton.jit
def tile_at(index, row_tiles, col_tiles):
    """(row tile, column tile) of a running index: the walk that is drawn above."""
    group = index // (8 * row_tiles)
    width = tl.minimum(col_tiles - 8 * group, 8)  # of the last group
    index -= group * 8 * row_tiles
    return index // width, 8 * group + index % width


@triton.jit
def fetched_logits(E, C, row, col, D, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    """tile_logits, (BLOCK_N, BLOCK_V) fp32, from descriptors of E and C. Each tile starts a fresh accumulator: one that
    is carried from tile to tile does not stay in registers."""
    acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for depth in range(0, D, BLOCK_D):
        acc = dot(E.load([row, depth]), tl.trans(C.load([col, depth])), acc)
    return acc


@triton.jit
def next_logits(
    index, E, C, softcap, N, V, D, stride_e, stride_c, FETCHED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Tile `index` of the walk: its first row, its first column, its logits."""
    row_tile, col_tile = tile_at(index, tl.cdiv(N, BLOCK_N), tl.cdiv(V, BLOCK_V))
    row, col = row_tile * BLOCK_N, col_tile * BLOCK_V
    if FETCHED:
        logits = fetched_logits(E, C, row, col, D, BLOCK_N, BLOCK_V, BLOCK_D)
    else:
        rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
        logits = tile_logits(E, C, rows, cols, N, V, D, stride_e, stride_c, BLOCK_N, BLOCK_V, BLOCK_D)
    return row, col, cap(logits, softcap)


@triton.jit
def put_tile(G, tile, row, col, N, V, stride, FETCHED: tl.constexpr):
    if FETCHED:
        G.store([row, col], tile.to(G.dtype))
    else:
        rows, cols = row + tl.arange(0, tile.shape[0]), col + tl.arange(0, tile.shape[1])
        store_tile(G, tile, rows, cols, N, V, stride)


@triton.jit
def lse_kernel(
    E, C, S, softcap, partial, N, V, D, stride_e, stride_c, stride_s, FETCHED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """partial[t, n] = lse of row n over column tile t. S (N, V), if it is not None: the softmax within that tile."""
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_logits(
            index, E, C, softcap, N, V, D, stride_e, stride_c, FETCHED, BLOCK_N, BLOCK_V, BLOCK_D
        )
        top, tile_exp = exponentials(mask_tail(logits, col + tl.arange(0, BLOCK_V), V))
        total, rows = tl.sum(tile_exp, 1), row + tl.arange(0, BLOCK_N)
        tl.store(partial + (col // BLOCK_V).to(tl.int64) * N + rows, top + tl.log(total), mask=rows < N)
        if S is not None:
            put_tile(S, tile_exp / total[:, None], row, col, N, V, stride_s, FETCHED)


@triton.jit
def gradient_kernel(
    E, C, G, softcap, targets, lse, g_softmax, g_target, N, V, D, stride_e, stride_c, stride_g,
    FETCHED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """G (N, V) = g_softmax softmax - g_target onehot of a slice C (V, D)."""
    count = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_logits(
            index, E, C, softcap, N, V, D, stride_e, stride_c, FETCHED, BLOCK_N, BLOCK_V, BLOCK_D
        )
        rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
        tile = tile_gradient(
            tile_softmax(logits, load_rows(lse, rows, N, 0.0)), logits, load_rows(targets, rows, N, -1), cols,
            load_rows(g_softmax, rows, N, 0.0), load_rows(g_target, rows, N, 0.0), softcap,
        )
        put_tile(G, tile, row, col, N, V, stride_g, FETCHED)


def over_tiles(kernel, fetch, E, C, G, *arguments):
    """Launch a kernel on the tiles of E (N, D), C (V, D) and G (N, V) or None; v4 (fetch), or v3, a program a tile."""
    (N, D), V, tiles = E.shape, C.shape[0], TILES["descriptors"] if fetch else tiles_for(E)
    strides = E.stride(0), C.stride(0), 0 if G is None else G.stride(0)
    grid = (triton.cdiv(N, tiles["BLOCK_N"]) * triton.cdiv(V, tiles["BLOCK_V"]),)
    if fetch:
        grid, E, C = programs(E), fetched(E, "BLOCK_N", "BLOCK_D"), fetched(C, "BLOCK_V", "BLOCK_D")
        if G is not None:
            G = fetched(G, "BLOCK_N", "BLOCK_V")
        elif not INTERPRETED:
            tiles = tiles | dict(num_stages=4)  # no tile to store: room for a fourth stage, 1 %
    kernel[grid](E, C, G, *arguments, N, V, D, *strides, FETCHED=fetch, **tiles)


def merge(partial):
    """partial (pieces, N), each a log-sum-exp -> (N,), the log-sum-exp of all. Order fixed, so the bits are, too."""
    return partial.logsumexp(0)


def tile_lse(E, C, softcap=None, S=None, fetch=True):
    """partial (tiles, N) of lse_kernel; S (N, V), if given, receives the softmax within each tile."""
    width = (TILES["descriptors"] if fetch else tiles_for(E))["BLOCK_V"]
    partial = torch.empty(triton.cdiv(C.shape[0], width), E.shape[0], device=E.device)
    over_tiles(lse_kernel, fetch, E, C, S, softcap, partial)
    return partial


def indexed_logits(E, C, targets, softcap=None):
    """The target's logit (N,) by Algorithm 1, 0 where the target is none of C's classes."""
    out = torch.empty(len(E), device=E.device)
    shape = len(E), *C.shape, E.stride(0), C.stride(0)
    indexed_dot_kernel[(triton.cdiv(len(E), 16),)](E, C, targets, out, *shape, 16, 128)
    return out if softcap is None else softcap * torch.tanh(out / softcap)


def empty_gradient(E, columns):
    """Room for G (N, columns), in the dtype of the matrix products; rows start at multiples of 16 bytes."""
    dtype = E.dtype if E.is_cuda else torch.float32
    return torch.empty(E.shape[0], triton.cdiv(columns, 8) * 8, device=E.device, dtype=dtype)[:, :columns]


# ==== 6. The softmax that was kept ====================================================================================
#
# The orders "kept" and "tokens" begin with S, the softmax within each tile, which the loss's kernel has at hand before
# it forgets the tile. Once lse is known, a tile of S becomes G without another product:
#
#     softmax[n, v] = S[n, v] exp(partial[t, n] - lse[n])      G = g softmax - g [v is n's target]
#
# The example of v1 again, logits 1, 2 | 3 in two tiles: S is .269, .731 | 1, partial 2.313 | 3, lse 3.408. The tiles'
# shares are exp(2.313 - 3.408) = .335 and .665, so the softmax is .090, .245 | .665.
#
# A probability in bf16 is off by up to 2^-8 of itself, whatever the logit was, and G once more. Only where the
# target's probability is near 1 would that hurt: softmax - 1 cancels. That one entry a row is made from the target's
# logit in fp32.


@triton.jit
def rescale_kernel(
    S, partial, lse, targets, target_logit, g_softmax, g_target, N, V, stride,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """In place, S -> G, by the formula above."""
    tile, rows, cols = tile_of_program(N, BLOCK_N, BLOCK_V)
    row_lse, x = load_rows(lse, rows, N, 0.0), load_rows(targets, rows, N, -1)
    share = tl.exp(load_rows(partial + tile.to(tl.int64) * N, rows, N, 0.0) - row_lse)  # of the tile in its row
    softmax = load_tile(S, rows, cols, N, V, stride).to(tl.float32) * share[:, None]
    target = tl.exp(load_rows(target_logit, rows, N, 0.0) - row_lse)
    softmax = tl.where(cols[None, :] == x[:, None], target[:, None], softmax)
    row_g, row_g_target = load_rows(g_softmax, rows, N, 0.0), load_rows(g_target, rows, N, 0.0)
    store_tile(S, tile_gradient(softmax, softmax, x, cols, row_g, row_g_target, None), rows, cols, N, V, stride)


def kept_softmax(E, C, targets):
    """S (N, V), its partial (tiles, N), lse (N,) and the target's logit (N,)."""
    S = empty_gradient(E, C.shape[0])
    partial = tile_lse(E, C, S=S, fetch=takes_descriptors(E, C))
    return S, partial, merge(partial), indexed_logits(E, C, targets)


def rescale(S, partial, lse, targets, target_logit, g_softmax, g_target, E, C):
    """S (N, V), made of E and C, becomes G."""
    (N, V), tiles = S.shape, TILES["descriptors"] if takes_descriptors(E, C) else tiles_for(E)
    rows = 32 if INTERPRETED else 8  # a program: it does nothing but move bytes, and more of them hide more latency
    if INTERPRETED:  # S is in fp32 there: round it as a GPU's is (.data: autograd knows nothing of it)
        S.data.copy_(S.to(E.dtype))
    rescale_kernel[(triton.cdiv(N, rows) * partial.shape[0],)](
        S, partial, lse, targets, target_logit, g_softmax, g_target, N, V, S.stride(0), rows, tiles["BLOCK_V"]
    )
    return S


def rows_by_kernels(E, C, targets, g):
    """What 01's _ChunkedLoss asks for of a block of tokens: G (R, V), lse (R,) and the target's logit (R,)."""
    E, C, targets, g = kernel_inputs(E, C, targets, g)
    S, partial, lse, target_logit = kept_softmax(E, C, targets)
    return rescale(S, partial, lse, targets, target_logit, g, g, E, C), lse, target_logit


# ==== 7. The API: the loss and its gradients, differentiable ==========================================================
#
# Autograd sees one node, (E, C) -> (lse, target logit), and subtracts the two itself (a bias is a column of C by then,
# see with_bias). Backward then gets the
# upstream gradients of both, and each logit has
#
#     d lse[n] / d logit[n, v] = softmax[n, v]        d target_logit[n] / d logit[n, v] = [v is n's target]
#     G = g_softmax softmax - g_target onehot         g_softmax = grad_lse, g_target = -grad_target
#
# A loss whose upstream gradient is g has both equal to g. A z-loss, c lse^2, adds 2 c lse to g_softmax, and needs no
# code. Where one upstream number scales all tokens, 01's _ChunkedLoss may run instead:
#
#     order            node                  forward                        backward
#     "tokens"         01's _ChunkedLoss     rows_by_kernels, dE, dC        times one number
#     "kept"           _LseAndTarget         kept_softmax                   rescale, two products
#     "vocabulary"     _LseAndTarget         lse_and_target                 slice by slice: gradient_slice, two products


def choose_backend(backend, E, C):
    """"triton", "v3" or "torch" for inputs like E and C; BadInput when the wish cannot be met."""
    runs = HAS_TRITON and (E.is_cuda or INTERPRETED) and E.dtype != torch.float64
    why = f"but E is {E.dtype} on {E.device}" if HAS_TRITON else "which is not installed (Linux: pip install triton)"
    base.refuse(
        (E.dtype != C.dtype, f"E is {E.dtype} but C is {C.dtype}: cast one of them, or use autocast"),
        (backend not in ("auto", "triton", "v3", "torch"), f"backend is {backend!r}: use auto, triton, v3 or torch"),
        (backend in ("triton", "v3") and not runs, f"backend is {backend!r}, {why}: use 'torch'"),
    )
    if backend == "auto":
        return "triton" if runs and not INTERPRETED else "torch"
    return backend


def without_autocast(function):
    """Autocast would round the fp32 sums below to 16 bits, also when backward is called inside its region."""

    @functools.wraps(function)
    def run(*args, **options):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **options)

    return run


@without_autocast
def lse_and_target(E, C, targets, *, softcap=None, backend="auto"):
    """lse (N,) over the classes of C (W, D), and the target's logit (N,), 0 where the target is none of them; no
    gradients; fp32 (fp64 for fp64). C may be a slice of a vocabulary, targets (N,) int64 counted from its start: slices
    merge by logsumexp and by addition."""
    backend = choose_backend(backend, E, C)
    if backend != "torch":
        E, C, targets = kernel_inputs(E, C, targets)
        fetch = backend == "triton" and takes_descriptors(E, C)
        return merge(tile_lse(E, C, softcap, fetch=fetch)), indexed_logits(E, C, targets, softcap)
    lse = torch.full(E.shape[:1], -math.inf, dtype=base.product_dtypes(E)[0], device=E.device)  # (N,)
    target_logit = torch.zeros_like(lse)
    for start, stop in pieces(C.shape[0], max(128, CPU_BLOCK // max(len(E), 1))):
        logits = block_logits(E, C[start:stop], softcap=softcap)  # (N, W)
        target_logit += base.gather_targets(logits, targets - start)
        lse = torch.logaddexp(lse, base.exponentials_(logits)[0])
        del logits  # before the next block is made
    return lse, target_logit


@without_autocast
def gradient_slice(E, C, targets, lse, g_softmax, g_target, softcap, backend):
    """G (N, W) = g_softmax * softmax - g_target * onehot for a slice C (W, D), targets (N,) counted from its start."""
    backend = choose_backend(backend, E, C)
    if backend == "torch":
        G = gradient_from_logits(block_logits(E, C, softcap=softcap), targets, lse, g_softmax, g_target, softcap)
        return G.to(base.product_dtypes(E)[1])
    E, C, *rows = kernel_inputs(E, C, targets, lse, g_softmax, g_target)
    G = empty_gradient(E, C.shape[0])
    over_tiles(gradient_kernel, backend == "triton" and takes_descriptors(E, C), E, C, G, softcap, *rows)
    return G


def gradient_from_logits(logits, targets, lse, g_softmax, g_target, softcap=None):
    """G (N, W) in place of the logits (N, W)."""
    slope = None  # d cap(l) / d l, from the capped logit
    if softcap is not None:
        slope = logits.div(softcap).square_().neg_().add_(1)  # (N, W)
    G = base.subtract_onehot_(logits.sub_(lse[:, None]).exp_().mul_(g_softmax[:, None]), targets, g_target)
    return G if slope is None else G.mul_(slope)


def sliced_gradients(need, E, C, targets, lse, g_softmax, g_target, softcap, backend, block, sink=None):
    """dE (N, D), dC (V, D), or None where not needed, of G = g_softmax softmax - g_target onehot, `block` classes at a
    time. With a sink, see linear_cross_entropy, the slices of dC are its own affair, and dC is None."""
    dE = torch.zeros(E.shape, dtype=lse.dtype, device=E.device) if need[0] else None
    dC = torch.empty_like(C) if need[1] and sink is None else None
    if need[1] and sink is not None:
        sink.begin()
        sink.slices(E, targets, lse, g_softmax, g_target, softcap, backend, block)
    for start, stop in pieces(C.shape[0], block):
        rows = C[start:stop]  # (W, D)
        G = gradient_slice(E, rows, targets - start, lse, g_softmax, g_target, softcap, backend)  # (N, W)
        if need[0]:
            add_to(dE, G, rows)
        if dC is not None:
            set_to(dC[start:stop], G.T, E)  # written once, no accumulator
        elif need[1]:
            sink.rows(start, G, E)
        del G  # before the next is made
    return None if dE is None else dE.to(E.dtype), dC


How = namedtuple("How", "softcap backend plan sink join")  # the options, for backward


class _LseAndTarget(torch.autograd.Function):
    """(E, C) -> lse (N,) and the target's logit (N,). Keeps lse; in the order "kept" also S (N, V)."""

    @staticmethod
    @without_autocast
    def forward(ctx, E, C, targets, how):
        S = partial = None
        if how.plan.order == "kept":
            S, partial, lse, target_logit = kept_softmax(*kernel_inputs(E, C, targets))
        else:
            lse, target_logit = lse_and_target(E, C, targets, softcap=how.softcap, backend=how.backend)
        if how.join is not None:
            lse, target_logit = how.join(lse, target_logit)
        ctx.save_for_backward(E, C, targets, lse, target_logit, S, partial)
        ctx.how, ctx.spent = how, False
        return lse, target_logit

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_lse, grad_target):
        E, C, targets, lse, target_logit, S, partial = ctx.saved_tensors
        need, how = (wanted(ctx, 0), wanted(ctx, 1)), ctx.how
        if S is None:
            options = how.softcap, how.backend, how.plan.block, how.sink
            return *sliced_gradients(need, E, C, targets, lse, grad_lse, -grad_target, *options), None, None
        E, C, targets, g_softmax, g_target = kernel_inputs(E, C, targets, grad_lse, -grad_target)
        if ctx.spent:  # a second backward: the first one made G in the memory of S
            tile_lse(E, C, S=S, fetch=takes_descriptors(E, C))
        ctx.spent = True
        G = rescale(S, partial, lse, targets, target_logit, g_softmax, g_target, E, C)
        dE = set_to(torch.empty_like(E), G, C) if need[0] else None
        dC = set_to(torch.empty_like(C), G.T, E) if need[1] else None
        return dE, dC, None, None


def wanted(ctx, i):
    """Whether a backward pass is after the gradient of input i: torch.autograd.grad(loss, E) has no use for C's."""
    if not ctx.needs_input_grad[i]:
        return False
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[i][0])
    except RuntimeError:  # torch.autograd.grad(loss, C) itself, of a leaf C: not supported, it says
        return True


# C is only rows `start` and following of a classifier of `vocab` classes. join(lse, target_logit), (N,) each, of these
# rows gives those of all rows; the slices of C lie where join knows (05: on other ranks).
Shard = namedtuple("Shard", "start vocab join")


def linear_cross_entropy(
    E, C, targets, bias=None, *, ignore_index=-100, softcap=None, reduction="mean", return_lse=False,
    backend="auto", workspace=None, sink=None, shard=None,
):
    """Cross-entropy of E C^T against targets without the (N, V) logits. Meaning as in 01's reference.

    E (..., D), C (V, D) of one dtype: fp32, bf16 (sums in fp32), fp16 (taken as fp32: right, but slow), or fp64 (torch
    backend); under autocast they are cast first. targets (...) int64; bias (V,), rounded to their dtype. backend:
    "triton" (v4, else v3), "v3", "torch" (blocked, any device), or "auto": Triton for CUDA tensors, else torch.
    Differentiable once in E, C, bias, also through the lse (...) that return_lse adds, as often as retain_graph allows.
    Bitwise repeatable. workspace: bytes that gradients may take beyond dE and dC, see gradient_plan.

    All tokens ignored: loss 0, zero gradients. A target that is neither a class nor ignore_index is never read outside
    C: on the CPU BadInput; on CUDA, where looking would stall every step, its loss is NaN. Ignored tokens cost as much
    as others: drop them before if they are many (01, rung 1). BadInput on arguments that do not fit. arXiv 2411.09009
    and 2511.17599.

    Skip on a first reading:
    sink: takes dC instead of autograd, a slice at a time (04's optimizer step; no bias). align(block) says how many
    classes a slice should have. Backward calls begin(); slices(E, targets, lse, g_softmax, g_target, softcap, backend,
    block), of which gradient_slice makes G again; and rows(start, G, E) for each slice G (N, W) from class `start` on,
    whose rows of C were read for the last time. A sink always goes over the vocabulary.
    shard: see Shard; targets are those of the whole vocabulary, dE is the part that these rows are responsible for.
    """
    base.refuse((bias is not None and sink is not None, "a sink takes the rows of C as they are: pass it no bias"))
    E, C, backend = checked_inputs(E, C, targets, bias, ignore_index, softcap, reduction, backend, workspace, shard)
    shape, targets, E = targets.shape, targets.reshape(-1), E.reshape(-1, C.shape[1])
    E, C = with_bias(E, C, bias)
    E, C = kernel_inputs(E, C) if backend != "torch" else (E, C)  # before autograd keeps them
    differentiable = torch.is_grad_enabled() and (E.requires_grad or C.requires_grad)
    plan = plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink, shard, differentiable)
    if plan.order == "tokens":
        rows_of = rows_by_kernels if backend == "triton" else base.rows_of_logits
        return base._ChunkedLoss.apply(E, C, targets, ignore_index, reduction, plan.block, rows_of)
    start, vocab, join = shard or (0, C.shape[0], None)
    how = How(softcap, backend, plan, sink, join)
    lse, target_logit = _LseAndTarget.apply(E, C, targets - start if start else targets, how)
    loss = loss_from(lse, target_logit, targets, vocab, ignore_index, reduction, shape)
    return (loss, lse.view(shape)) if return_lse else loss


def with_bias(E, C, bias):
    """E (N, D + 8), C (V, D + 8): a bias is one more column of C, beside a column of ones. Kernels need not know of it
    (one peer's subtracted it once per BLOCK_D columns: apple/ml-cross-entropy issue 52). It costs a copy of E and C,
    which no workspace counts; seven columns of zeros keep rows at multiples of 16 bytes. What switches a class off,
    -inf or the least number, is made 16384 less than the largest: exp gives 0 as well, but 0 x -inf is NaN, and near
    1e38 the two products in `exponentials`, of which an FMA rounds one, differ by more than exp can bear."""
    if bias is None:
        return E, C
    ones, column = F.pad(E.new_ones(len(E), 1), (0, 7)), bias.to(C.dtype)  # (N, 8), (V,)
    column = column.clamp(min=column.detach().max() - 16384)
    return torch.cat((E, ones), 1), torch.cat((C, F.pad(column[:, None], (0, 7))), 1)


def plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink=None, shard=None, differentiable=True):
    """gradient_plan for a call with these arguments."""
    kernels, orders = backend != "torch", ["vocabulary"]
    if differentiable and softcap is None and sink is None and backend != "v3":  # G from softmax alone, dC whole
        one_number = reduction != "none" and not return_lse and shard is None
        orders = ["kept"] * kernels + ["tokens"] * one_number + orders
    plan = gradient_plan(E.shape[0], *C.shape, E.device, E.dtype, workspace, orders=orders, kernels=kernels)
    return plan if sink is None else plan._replace(block=sink.align(plan.block))


def loss_from(lse, target_logit, targets, V, ignore_index, reduction, shape):
    """The reduced loss, or with "none" one of the given shape, from lse, target logits and targets (N,)."""
    loss = base.token_losses(lse, target_logit, targets, V, ignore_index)
    return base.reduce_loss(loss.view(shape), (targets != ignore_index).view(shape), reduction)


def checked_inputs(E, C, targets, bias, ignore_index, softcap, reduction, backend, workspace, shard):
    """What each linear_cross_entropy does first: checks, autocast. Returns E, C and the backend."""
    base.check_arguments(E, C, targets, bias, reduction, softcap)
    base.refuse((workspace is not None and workspace < 0, f"workspace is {workspace} bytes: use 0 or more, or None"))
    device_type = E.device.type
    if torch.is_autocast_enabled(device_type) and E.dtype != torch.float64:
        E, C = (t.to(torch.get_autocast_dtype(device_type)) for t in (E, C))
    if E.dtype == C.dtype == torch.float16:  # a mean's G would vanish in its five exponent bits
        E, C = E.float(), C.float()
    if device_type == "cpu":
        base.check_target_range(targets, shard.vocab if shard else C.shape[0], ignore_index)
    return E, C, choose_backend(backend, E, C)


# ==== 8. Checks: what this file and the tests run =====================================================================
#
# Against what? The reference in fp64 is exact for our purposes. A gradient in bf16 cannot come nearer to it than a
# rounding, and which error is "a rounding" depends on the problem. So the rule has three parties: our error may exceed
# that of torch's obvious way in the same dtype by a hair (2e-6 in fp32, a few roundings; 1e-3 in bf16, below one of its
# roundings, 4e-3). The loss is summed in fp32 whatever comes in: 2e-6 for all.


def backends(device):
    """The backends that run on this device: the kernels are compiled for a GPU and interpreted on a CPU."""
    triton_runs = HAS_TRITON and (INTERPRETED or torch.device(device).type == "cuda")
    return ("torch", "triton") if triton_runs else ("torch",)


def gradients_of(loss_fn, E, C, bias, targets, weight=None, **options):
    """[loss, dE, dC, dbias] of loss_fn, detached; `weight` is the upstream gradient of the loss."""
    loss = loss_fn(E, C, targets, bias, **options)
    leaves = [t for t in (E, C, bias) if t is not None and t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, leaves, weight)]


def exact_gradients(E, C, bias, targets, loss=base.linear_cross_entropy_reference, **options):
    """gradients_of the reference in fp64."""
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (E, C, bias)]
    return gradients_of(loss, *exact, targets, **options)


def error(got, want):
    """Relative Frobenius error in fp64; NaN stays NaN, so that no comparison lets it pass."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def require_as_good(name, got, peer, want, slack):
    """The three-way rule: our error against the exact result may exceed that of torch's same-dtype way by `slack`."""
    ours, theirs = error(got, want), error(peer, want)
    base.require(ours <= theirs + slack, f"{name}: relative error {ours:.2e}, torch in the same dtype {theirs:.2e}")


def require_gradients(name, got, peer, want):
    """[loss, dE, dC, ...]: the loss to a few roundings of fp32, gradients by the three-way rule."""
    base.require(error(got[0], want[0]) < 2e-6, f"{name}: loss is off by {error(got[0], want[0]):.1e}")
    for part, g, p, w in zip(("dE", "dC", "dbias"), got[1:], peer[1:], want[1:], strict=False):
        require_as_good(f"{name}: {part}", g, p, w, 1e-3 if g.element_size() == 2 else 2e-6)


def same_dtype_loss(E, C, targets, bias=None, *, softcap=None, return_lse=False, **options):
    """The peer of the three-way rule: what torch gives when the logits are made in the dtype of E."""
    logits = E @ C.T if bias is None else E @ C.T + bias
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)).float()  # (..., V)
    loss = F.cross_entropy(logits.movedim(-1, 1), targets, **options)
    return (loss, logits.logsumexp(-1)) if return_lse else loss


def check_equal(N=70, V=203, D=72, dtype=torch.float32, device="cpu", seed=0, bias=True, softcap=None):
    """Loss and gradients of each backend; without bias and softcap also of v1, v2 (a filter that leaves all out gives
    zeros, and the same loss) and v3 on their own."""
    E, C, b, x = base.random_problem(N, V, D, dtype, device, seed, bias=bias)
    want = exact_gradients(E, C, b, x, softcap=softcap)
    peer = gradients_of(same_dtype_loss, E, C, b, x, softcap=softcap)
    got = {name: gradients_of(linear_cross_entropy, E, C, b, x, softcap=softcap, backend=name)
           for name in backends(device)}
    if not bias and softcap is None:
        got["v1"] = blocked_loss_and_gradients(E, C, x, block=64)
        if "triton" in got:
            got["v2"] = atomic_loss_and_gradients(E, C, x)
            got["v3"] = gradients_of(linear_cross_entropy, E, C, None, x, backend="v3")
            loss, dE, dC = atomic_loss_and_gradients(E, C, x, eps=2 / N)  # |G| <= 1 / kept, more than half are kept
            base.require(error(loss, want[0]) < 2e-6 and not dE.any() and not dC.any(), "v2: eps = 2 / N keeps a tile")
    for name, parts in got.items():
        require_gradients(f"{name} {dtype}", parts, peer, want)


def check_shapes(device="cpu"):
    """check_equal on awkward shapes: with bias, with a softcap, and of the rungs one by one. And in fp64 and fp16."""
    unwritten = lambda E, columns, right=empty_gradient: right(E, columns).fill_(math.nan)  # noqa: E731
    with mock.patch.object(sys.modules[__name__], "empty_gradient", unwritten):  # new memory may hold the right G
        for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
            check_equal(66, 130, 72, dtype, device, seed)
            check_equal(33, 65, 130, dtype, device, seed, softcap=2.0)
            check_equal(66, 130, 24, dtype, device, seed, bias=False)
    E, C, b, x = base.random_problem(20, 70, 8, device=device)
    for got, want in zip(gradients_of(linear_cross_entropy, E, C, b, x), exact_gradients(E, C, b, x), strict=True):
        base.require(error(got, want) < 1e-14, f"fp64: relative error {error(got, want):.1e}")
    check_equal(20, 70, 40, torch.float16, device)
    check_equal(20, 600, 8, torch.bfloat16, device)  # more than eight column tiles, where they are interpreted
    check_equal(20, 70, 8, torch.float32, device, softcap=1000.0)  # tanh near 0, where the textbook formula cancels


def check_strided(device="cpu"):
    """Transposed, cut and expanded tensors: the same as from contiguous copies."""
    for dtype, backend in itertools.product((torch.float32, torch.bfloat16), backends(device)):
        E, C, b, x = (t.detach() for t in base.random_problem(40, 161, 24, dtype, device))
        cut, spread = torch.cat((C, C), 1)[:, 1:25], x.repeat_interleave(2)[::2]
        if dtype == torch.bfloat16 and backend == "triton" and (INTERPRETED or is_hopper(E.device)):
            taken, moved = takes_descriptors(E, C), takes_descriptors(E, cut)  # which begins 2 bytes later
            base.require(taken and not moved, f"by the copy engine: {taken}; off its 16 bytes: {moved}")
        views = E.T.contiguous().T, E[:1].expand(40, 24), E.repeat_interleave(2, 1)[:, ::2]
        for rows, bias in itertools.product(views, (None, b[:1].expand(161))):  # a bias makes copies of the others
            leaves = [None if t is None else t.requires_grad_() for t in (rows, cut, bias)]
            plain = [None if t is None else t.detach().contiguous().requires_grad_() for t in leaves]
            both = (gradients_of(linear_cross_entropy, *t, spread, backend=backend) for t in (leaves, plain))
            for g, w in zip(*both, strict=True):
                base.require(error(g, w) < (1e-5 if dtype == torch.float32 else 3e-3), f"{backend} {dtype}: strides")


def workspaces(E, C, bias, backend):
    """{order: bytes}: a workspace for each order that there is for these, of several blocks where there is room."""
    E, C = with_bias(E, C, bias)
    b = E.element_size()
    element, block = b if backend == "triton" else max(b, 4), 1024 if E.is_cuda else 128
    tokens = beyond_bytes("tokens", len(E), *C.shape, b, element, block)
    return {plan_for(E, C, None, "mean", False, backend, size).order: size for size in (WORKSPACE, tokens, 0)}


def check_orders(device="cpu", N=150, V=290, D=8, seed=0, dtypes=(torch.float32, torch.bfloat16)):
    """Each order of the gradient, in several blocks. Over tokens with an upstream gradient that is not 1; in the others
    every token has its own (a fused peer scaled all rows by the first row's: Liger Kernel pull 1298), and so has every
    lse (a z-loss), ignored or not. Then twice, and a second time from the same graph: the same bits."""
    if torch.device(device).type == "cuda":
        N, V = 3000, 3500  # the least blocks of a GPU are larger
    weight = torch.linspace(-1, 2, N, device=device).view(2, -1)

    def weighted(fn, one_number, E, C, targets, bias, **options):
        if one_number:
            return -4 * fn(E, C, targets, bias, reduction="sum", **options)
        losses, lse = fn(E, C, targets, bias, reduction="none", return_lse=True, **options)
        return (losses * weight).sum() + 0.1 * (lse**2).mean()

    for dtype, backend in itertools.product(dtypes, backends(device)):
        E, C, b, x = base.random_problem(N, V, D, dtype, device, seed)
        orders = workspaces(E, C, b, backend)  # "kept" where there are kernels, then the other two
        base.require([*orders][-2:] == ["tokens", "vocabulary"], f"{backend} {dtype}: {orders}")
        E, x = E.detach().view(2, -1, D).requires_grad_(), x.view(2, -1)
        for order, workspace in orders.items():
            exact, peers, ours = (functools.partial(weighted, fn, order == "tokens") for fn in (
                base.linear_cross_entropy_reference, same_dtype_loss, linear_cross_entropy))
            want, peer = exact_gradients(E, C, b, x, loss=exact), gradients_of(peers, E, C, b, x)
            runs = []
            for retain in ((True, False), (False,)):
                loss = ours(E, C, x, b, backend=backend, workspace=workspace)
                runs += [[loss.detach(), *torch.autograd.grad(loss, (E, C, b), retain_graph=again)] for again in retain]
            require_gradients(f"{backend} {order} {dtype}", runs[0], peer, want)
            same = all(torch.equal(first, other) for run in runs for first, other in zip(runs[0], run, strict=True))
            base.require(same, f"{backend} {order} {dtype}: two runs on the same input differ")


def check_hard(device="cpu", dtypes=(torch.float32, torch.bfloat16)):
    """What overflows, cancels or divides by zero, in each order: logits around +-1000 (all strongly negative catches a
    maximum that starts at 0); classes switched off by a bias of -inf or the least number, whole tiles of them (padded
    vocabularies), beside others far down; tokens predicted with probability 0.99, whose softmax - 1 cancels; and
    nothing but padding: loss and gradients are 0."""
    for dtype, backend in itertools.product(dtypes, backends(device)):
        V = 200 if INTERPRETED else 600  # several tiles
        E, C, b, x = (t.detach() for t in base.random_problem(40, V, 16, dtype, device, ignored=0.1))
        b[100:], b[150:], off = -math.inf, torch.finfo(dtype).min, torch.arange(V, device=device) >= 100
        sure = (30 * F.normalize(C[x.clamp(min=0)].float(), dim=1)).to(dtype)
        far, one = torch.full_like(E[:, :8], 125), torch.ones_like(C[:, :8])  # eight columns that add 1000
        for name, e, c, bias, targets in (
            ("logits of 1000", torch.cat((E, far), 1), torch.cat((C, one), 1), None, x),
            ("logits of -1000", torch.cat((E, far), 1), torch.cat((C, -one), 1), None, x),
            ("padding", E, C, None, x * 0 - 100), ("confident", sure, C, None, x),
            ("classes off, others near -30000", E, C, b - 30000, x.where(x < 100, x % 100)),
        ):
            e, c = e.requires_grad_(), c.requires_grad_()  # and not the bias, whose gradient is NaN in the reference
            want = exact_gradients(e, c, bias, targets)
            limit = 8e-3 if dtype == torch.bfloat16 else 1e-3 if "000" in name else 2e-5
            for order, workspace in workspaces(e, c, bias, backend).items():
                got = gradients_of(linear_cross_entropy, e, c, bias, targets, backend=backend, workspace=workspace)
                base.require(all(error(g, w) < limit for g, w in zip(got, want, strict=True)),
                             f"{backend} {order} {dtype}: {name}: loss {got[0]:.6g}, not {want[0]:.6g}, or gradients")
                base.require(bias is None or not got[2][off].any(), f"{backend} {dtype}: gradients of classes off")


def check_autograd_modes(device="cpu", linear_cross_entropy=linear_cross_entropy, names=None):
    """Frozen E or C gets no gradient and changes none; a second backward gives the same bits; no_grad; autocast, with
    backward inside its region and outside. Also for the losses of later stages, and the backends that they have."""
    E, C, b, x = base.random_problem(40, 97, 16, torch.float32, device)
    for backend, workspace in itertools.product(names or backends(device), (None, 0)):
        loss_of = functools.partial(linear_cross_entropy, backend=backend, workspace=workspace)
        loss, *both = gradients_of(loss_of, E, C, b, x)
        for frozen in (0, 1):
            other = loss_of(*(t.detach() if i == frozen else t for i, t in enumerate((E, C))), x, b)
            for again in (True, False):
                got = torch.autograd.grad(other, (C, E)[frozen], retain_graph=again)[0]
                base.require(torch.equal(got, both[1 - frozen]), f"{backend}: a frozen partner changes the gradient")
        with torch.no_grad():
            value = loss_of(E, C, x, b)
        base.require(not value.requires_grad and torch.equal(value, loss), f"{backend}: no_grad changes the loss")
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            mixed = loss_of(E, C, x, b)
            inside = torch.autograd.grad(mixed, (E, C), retain_graph=True)
        outside = torch.autograd.grad(mixed, (E, C))
        want = gradients_of(loss_of, *(t.detach().bfloat16().requires_grad_() for t in (E, C)), b, x)
        base.require(torch.equal(mixed, want[0]), f"{backend}: autocast is not the same as casting E and C")
        for g, other, w in zip(outside, inside, want[1:], strict=False):
            same = torch.equal(g, other) and g.dtype == torch.float32 and torch.equal(g, w.float())
            base.require(same, f"{backend}: gradients under autocast, inside its region or outside")


def check_plan():
    """The plan keeps to its workspace, and more of it is never slower; what it says of four cases."""
    for N, V, D, size, order, block in (
        (8192, 256000, 2304, 256, ("vocabulary", 4), 14080), (8192, 256000, 2304, 4096, ("kept", 3), 8192),
        (65536, 50304, 768, 256, ("tokens", 3), 1792), (4096, 128256, 4096, 1024, ("kept", 3), 4096),
    ):
        plans = {k: gradient_plan(N, V, D, "cuda", torch.bfloat16, k * MIB) for k in (256, 512, 1024, 2048, 4096)}
        base.require(all(plan.beyond <= k * MIB for k, plan in plans.items()), f"more than was given: {plans}")
        passes = [plan.passes for plan in plans.values()]
        base.require(passes == sorted(passes, reverse=True), f"slower in more memory: {plans}")
        base.require(plans[size][:3] == (*order, block), f"{plans[size]}, not {block} of {order}")
        base.require("kept" not in order or plans[size].beyond == 2 * N * V + 8 * N * V // 256, f"{plans[size]}")


def check_memory(device="cpu"):
    """No (N, V) buffer: loss and gradients stay far below one fp32 copy of the logits, and at what was planned."""
    # On a GPU backward works in WORKSPACE, so the logits have to be larger than that to be missed.
    shapes = [(512, 32768, 16), (1024, 8192, 64)] if torch.device(device).type == "cpu" else [(4096, 131072, 16)]
    for N, V, D in shapes:
        E, C, _, x = base.random_problem(N, V, D, torch.float32, device, bias=False)
        loss = torch.no_grad()(functools.partial(linear_cross_entropy, E, C, x))
        both = functools.partial(gradients_of, linear_cross_entropy, E, C, None, x)
        peaks = base.peak_bytes(loss, device), base.peak_bytes(both, device)
        for got in (loss(), both()[0]):  # in many blocks, as nowhere above
            off = error(got, base.chunked_linear_cross_entropy(E.detach(), C, x))
            base.require(off < 2e-6, f"{N} x {V} x {D}: the loss is off by {off:.1e}")
        base.require(max(peaks) < 2 * N * V, f"peaks of {peaks} bytes, the logits are {4 * N * V}")
        plan = plan_for(E, C, None, "mean", False, choose_backend("auto", E, C), None)
        ratio = (peaks[1] - 4 * (N + V) * D) / plan.beyond
        base.require(0.95 < ratio < 1.05, f"{plan}: {ratio:.2f} of that, beyond the gradients")


def check_bad_input(device="cpu"):
    """Each wrong argument: BadInput whose one line names it. A target that is no class: NaN, never a wild read."""
    E, C, b, x = base.random_problem(6, 10, 4, torch.float32, device)
    far = torch.tensor([0, 1, -100, 3, -7, 10], device=device)
    cases = {
        "one per row": dict(targets=x[:5]), "softcap is inf": dict(softcap=math.inf),
        "as wide as C": dict(C=C[:, :3]), "bias": dict(bias=b[:3]), "bfloat16": dict(C=C.bfloat16()),
        "softcap is 0": dict(softcap=0.0), "reduction": dict(reduction="max"), "workspace": dict(workspace=-1),
        "backend is 'cuda'": dict(backend="cuda"), "pass it no bias": dict(bias=b, sink=mock.Mock()),
        "'triton'": dict(E=E.double(), C=C.double(), backend="triton"),
    } | ({} if E.is_cuda else {"targets holds -7": dict(targets=far)})
    for words, wrong in cases.items():
        base.must_raise(words, functools.partial(linear_cross_entropy, **dict(E=E, C=C, targets=x) | wrong))
    auto = "triton" if E.is_cuda and HAS_TRITON and not INTERPRETED else "torch"
    for backend, chosen in [("auto", auto), *zip(backends(device), backends(device), strict=True)]:
        base.require(choose_backend(backend, E, C) == chosen, f"{backend} is not {chosen}")
    base.require(choose_backend("auto", E.double(), C.double()) == "torch", "kernels in fp64")
    for backend in backends(device):
        losses = loss_from(*lse_and_target(E, C, far, backend=backend), far, 10, -100, "none", far.shape)
        over_tokens = base._ChunkedLoss.apply(E, C, far, -100, "none", 4, base.rows_of_logits)
        for got in (losses, over_tokens):
            base.require(got.isnan().tolist() == 4 * [False] + 2 * [True] and got[2] == 0, f"{backend}: losses {got}")


CHECKS = [check_shapes, check_strided, check_orders, check_hard, check_autograd_modes, check_plan]
CHECKS += [check_memory, check_bad_input]


# ==== 9. The bugs of --break ==========================================================================================


@triton.jit
def _no_max(logits):
    return tl.zeros((logits.shape[0],), tl.float32), tl.exp(logits)


@triton.jit
def _no_tail_mask(logits, cols, V):
    return logits


@triton.jit
def _no_onehot(softmax, logits, x, cols, g_softmax, g_target, softcap):
    return softmax * g_softmax[:, None]


def _reversed_pieces(total, size, calls=itertools.count(), right=pieces):  # noqa: B008
    """Backwards in every third call, so that no two runs of one, two or four calls agree."""
    return right(total, size)[:: -1 if next(calls) % 3 == 0 else 1]


def _unscaled(S, partial, *rest, right=rescale):
    lse = rest[0].expand_as(partial).contiguous()  # as if every tile had all of its row: never scaled
    return right(S, lse, *rest)


def _one_row_for_all(need, E, C, targets, lse, g_softmax, g_target, *rest, right=sliced_gradients):
    return right(need, E, C, targets, lse, g_softmax[:1].expand_as(lse), g_target[:1].expand_as(lse), *rest)


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "uniform-gradient": (check_orders, "sliced_gradients", _one_row_for_all),
    "unordered-sums": (check_orders, "pieces", _reversed_pieces),
    "keep-logits": (check_memory, "pieces", lambda total, size: [(0, total)]),
    "bias-per-block": (check_shapes, "with_bias", lambda E, C, bias, right=with_bias: right(E, C, 2 * bias)),
}
if HAS_TRITON:
    BREAKS |= {
        "zero-max": (check_hard, "merge", lambda partial: partial.exp().sum(0).log()),
        "lost-tile": (check_shapes, "merge", lambda partial: partial.amax(0)),
        "no-max": (check_hard, "exponentials", _no_max),
        "no-tail-mask": (check_shapes, "mask_tail", _no_tail_mask),
        "no-onehot": (check_shapes, "tile_gradient", _no_onehot),
        "unscaled-tiles": (check_orders, "rescale", _unscaled),
    }


# ==== 10. Measurements ================================================================================================


def gpu_shape():
    """N, V, D: Gemma 2 2B's classifier, if the card has room for the materialised loss."""
    return (8192, 256000, 2304) if torch.cuda.mem_get_info()[0] > 40 * 2**30 else (2048, 65536, 1024)


def asked_shape(args, device):
    """N, V, D of --shape or, on a GPU, gpu_shape(), else None. BadInput if one of them is below 1."""
    base.refuse((args.shape and min(args.shape) < 1, f"--shape {args.shape}: N, V and D must be at least 1"))
    return args.shape or (gpu_shape() if device.type == "cuda" else None)


def one_pass(E, C):
    """Milliseconds of E C^T in cuBLAS, slice by slice into one buffer: the unit in which other times are told. All of
    it, as often as other things are timed: a short burst would run at a higher clock than what it is compared with."""
    out = torch.empty(E.shape[0], min(C.shape[0], 32768), dtype=E.dtype, device=E.device)

    def passes():
        for start, stop in pieces(C.shape[0], out.shape[1]):
            torch.mm(E.detach(), C.detach()[start:stop].T, out=out[:, : stop - start])

    return base.bench(passes, E.device).median


def rungs_for(E, C, device):
    """[(name, loss, predicted peak beyond dE and dC, its formula)]. loss(E, C, x) is differentiable; v1's and v2's
    return (loss, dE, dC) instead."""
    cuda, (N, D), V, b = device.type == "cuda", E.shape, C.shape[0], E.element_size()
    logits, block = base.materialised_bytes(N, V) - b * (N + V) * D, N * min(V, 4096) * (4 + b % 4) + b % 4 * N * D
    found = [("materialised (01)", base.materialised_loss, logits, "12 N V - dE, dC")]
    if cuda:  # elsewhere it needs a C++ compiler
        found += [("torch.compile", torch.compile(base.materialised_loss), None, "")]
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13 and later
        options = torch.nn.LinearCrossEntropyOptions()
        found += [("torch's own, chunked", functools.partial(F.linear_cross_entropy, options=options), None, "")]
    chunked = functools.partial(base.chunked_linear_cross_entropy, chunk=max(1, N // 8))
    found += [("in 8 chunks (01)", chunked, None, "")]
    found += [("v1 blocked PyTorch", blocked_loss_and_gradients, block, "4 N W; bf16 6 N W + 2 N D")]
    if cuda and HAS_TRITON:
        v3, fetch = functools.partial(linear_cross_entropy, backend="v3"), takes_descriptors(E, C)
        found += [("v2 atomics", atomic_loss_and_gradients, None, ""), ("v3 one writer each", v3, None, "")]
        tokens = beyond_bytes("tokens", N, V, D, b, b, max(1024, N // 4))
        for size in (WORKSPACE, tokens, beyond_bytes("kept", N, V, D, b, b, N)):
            plan = plan_for(E, C, None, "mean", False, "triton", size)
            loss, rung = functools.partial(linear_cross_entropy, workspace=size), "v4" if fetch else "v3"
            predicted = plan.beyond if fetch else None  # in v4's tiles
            found += [(f"{rung} {plan.order}, {size / MIB:.0f} MiB", loss, predicted, "gradient_plan")]
    return found


def measure(device, ledger, N, V, D):
    """Every rung beside its peers on one problem: times, peak bytes, errors, and whether a second run is the same."""
    cuda, dtype = device.type == "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, device=device, dtype=dtype, generator=generator)  # there: 590 M numbers
    E, C = draw(N, D).requires_grad_(), draw(V, D).div_(D**0.5).requires_grad_()
    x = torch.randint(V, (N,), device=device, generator=generator)
    if cuda:  # v1 in fp32, checked against fp64 above: it fits where fp64 logits do not
        want = blocked_loss_and_gradients(E.float(), C.float(), x)
    else:
        want = exact_gradients(E, C, None, x)
    results, unit, claims = dtype.itemsize * (N + V) * D, one_pass(E, C), []
    print(f"N = {N}, V = {V}, D = {D}, {dtype}; dE and dC: {results / MIB:.0f} MiB; a pass of torch: {unit:.2f} ms")
    print(f"{'':<24}{'loss ms':>9} {'MiB':>8} |{'loss+grad ms':>14}  passes  beyond MiB | error of dE, dC  | differ")
    for name, loss, predicted, formula in rungs_for(E, C, device):

        def both(loss=loss):
            out = loss(E, C, x)
            return out[1:] if isinstance(out, tuple) else torch.autograd.grad(out, (E, C))

        (dE, dC), (_, again) = both(), both()
        differ = (dC != again).sum().item()  # elements; v2 adds in the order of a race
        base.require(name[:2] == "v2" or not differ, f"two runs of {name} differ in {differ} elements of dC")
        errors = f"{error(dE, want[1]):.1e}, {error(dC, want[2]):.1e}"
        del dE, dC, again
        row = f"{name:<24}{'':>9} {'':>8} |"
        if name[:2] not in ("v1", "v2"):  # which have no loss alone
            forward = torch.no_grad()(functools.partial(loss, E, C, x))
            lse_peak = base.peak_bytes(forward, device)
            row = f"{name:<24}{base.bench(forward, device).median:9.2f} {lse_peak / MIB:8.1f} |"
            claims += [(f"{name}: loss", "8 N V / 256", lse_bytes(N, V), lse_peak)] * (name[:2] == "v4")
        timing, beyond = base.bench(both, device), base.peak_bytes(both, device) - results
        print(f"{row}{timing.median:7.2f} +- {timing.spread:<4.2f}{timing.median / unit:8.2f} {beyond / MIB:11.1f}"
              f" | {errors} | {differ:,}")
        claims += [(f"{name}: beyond", formula, predicted, beyond)] * (predicted is not None)
    print()
    large = 4 * N * V > (64 if cuda else 16) * MIB  # a few blocks at least, else what no formula counts weighs too much
    for claim, formula, predicted, measured in claims if large else ():
        ledger.row(claim, formula, predicted / MIB, measured / MIB, band=(0.9, 1.1))


def body(device, ledger, args):
    shape = asked_shape(args, device) or (1024, 8192, 64)
    base.run_checks(CHECKS, device)
    measure(device, ledger, *shape)


def add_arguments(parser):
    parser.add_argument("--shape", nargs=3, type=int, metavar=("N", "V", "D"), help="shape of the measured problem")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 03_grad_filter_sort.py"))


# Exercises
#   1. Let tile_at walk along one row of tiles after the other. How many tiles of E and of C do 132 programs share then?
#      Predict from the bytes what that costs the loss, and time it.
#   2. From what workspace on is the softmax kept, for N = 65,536 and V = 50,257, for N = 2048 and V = 256,000? When
#      does the order over tokens need less? Derive it from the bytes that each holds, then ask gradient_plan.
#   3. Derive the gradient of a z-loss, c * lse^2, and check that nothing in this file has to change for it.
