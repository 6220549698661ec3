"""07 - Mixture of experts: tokens choose among many MLPs, and ranks must not wait for the one that all have chosen.

The problem in one number
    A layer with 128 experts on 8 GPUs, where 95 % of the tokens choose the same expert: its GPU has 7.65 times the mean
    work, and the 7 others wait for it. Training can forbid that (a loss, or a bias), at a price: experts that have to
    be used equally in every small batch specialise less. Or the work moves: a rank with time to spare borrows the
    popular expert's weights. This file does both. Expert parallelism, plain or least-loaded, gives the gradients of one
    process with all experts (but for a capacity, which each rank takes from its own tokens).

The maths                                          N tokens, E experts of width F, each token goes to the best K of them
    s = softmax(x R^T)  or  sigmoid(x R^T)                            router R (E, D); x (N, D)
    y[n] = sum_k w[n, k] down_e(gelu(up_e(x[n])))                     e = expert k of token n; up (F, D), down (D, F)
    w[n, k] = the K chosen scores over their sum; of a single one (K = 1) the score itself
    balance loss = E sum_e f_e p_e                                    f_e: share of the choices, p_e: mean score
  f counts, it has no gradient; p has one. Equal shares give 1. Taken over a micro-batch (Switch) every handful of
  sequences has to use all experts alike; taken over the global batch (f summed over ranks and micro-batches) only the
  whole has to. DeepSeek-V3's bias needs no loss: b_e += u sign(mean load - load_e), added where experts are chosen.
  In section 3, as in 04, a matrix is (M, K): M outputs, K inputs; R are rows, a token's choice each; n ranks.

What is where
    1 routing   2 balance   3 all experts' products in one launch   4 the layer   5 expert parallelism: rows travel
    6 least-loaded expert parallelism: weights travel   7 folding: attention and experts cut the same ranks differently
    8 a study of what experts learn   9 checks   10 measurements

How to use it, from elsewhere (train.py does)
    model = with_experts(base.GPT(GPTConfig(..., experts=8, top_k=2)))      every rank the same weights
    origins = expert_parallel(model, group)                                 None: one rank has all experts
    balance = Balance(model, "global", group)
    loss = part_of_the_mean_loss + balance.loss() * n_tokens_here / n_tokens_of_the_step
    loss.backward()                      experts' gradients are of all ranks' tokens; sum all others over the group
    optimizer.step(); balance.step()

How to launch
    python 07_moe_balance.py                     checks and, on the CPU, two processes; a GPU: speeds
    python 07_moe_balance.py --ranks 4           four processes: one a GPU if there are four (NCCL), else on the CPU
    python 07_moe_balance.py --study             specialisation and loss by kind of balance, three seeds (minutes)
    python 07_moe_balance.py --break local-f     plant a famous bug and watch its check fail (exit status 1)

References (numbers: arXiv)
    Switch Transformer 2101.03961 (loss, capacity). ST-MoE 2202.08906 (z-loss). Global-batch balance 2501.11873. Balance
    without a loss 2408.15664, 2412.19437. MegaBlocks 2211.15841 (dropless). Least-loaded expert parallelism 2601.17111.
    MoE Parallel Folding 2504.14960. BigMac 2502.16927: we had its abstract only; the details here are ours.

Left out on purpose: expert tensor parallelism, limits on the nodes a token may go to, shared experts, expert choice,
overlap of the token exchange with products, gathering rows inside the products.
"""

import ast
import base64
import copy
import dataclasses
import functools
import importlib
import itertools
import math
import os
import statistics
import sys
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
HAS_TRITON, INTERPRETED, MIB, require = base.HAS_TRITON, base.INTERPRETED, base.MIB, base.require
triton, tl, load_tile, dot, tile_at = cce.triton, cce.tl, cce.load_tile, cce.dot, cce.tile_at
on_ranks, in_ranks, here, mesh, Row = parallel.on_ranks, parallel.in_ranks, parallel.here, parallel.mesh, parallel.Row
size, rank_in, shares, sent = parallel.size, parallel.rank_in, parallel.shares, parallel.sent


# ==== 1. Routing: which experts a token goes to =======================================================================


class Routing(NamedTuple):
    """logits (N, E); scores (N, E), each row sums to 1 (sigmoid's are divided by their sum); experts (N, K) int64;
    weights (N, K) of their outputs."""

    logits: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def route(logits, top_k, gate="softmax", bias=None):
    """The Routing of logits (N, E) fp32 or fp64. gate "softmax" or "sigmoid" makes the scores; bias (E,) is added to
    them to choose, and to nothing else: it must not change what a chosen expert's output is worth. ValueError on
    another gate."""
    if gate not in ("softmax", "sigmoid"):
        raise base.BadInput(f"gate is {gate!r}: use 'softmax' or 'sigmoid'")
    scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()  # (N, E)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    experts = ranked.topk(top_k, -1).indices  # (N, K)
    weights = scores.gather(-1, experts)  # (N, K)
    if top_k > 1:  # of one expert the weight would be 1 whatever the router says, and the router would not learn
        weights = weights / weights.sum(-1, keepdim=True)
    if gate == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    return Routing(logits, scores, experts, weights)


class Order(NamedTuple):
    """The choices, numbered n K + k, sorted by expert: choice (R,) those that are computed; place (N, K) where each of
    a token's is in that order, -1 if it was dropped; begin (E + 1,) where each expert's begin (None: sorted in another
    way, to be sent). An expert's choices are in the order of tokens."""

    choice: torch.Tensor
    place: torch.Tensor
    begin: torch.Tensor


def order_by_expert(experts, E, capacity=None):
    """The Order of experts (N, K). With a capacity, an expert drops the choices beyond it, the last tokens' first (and
    the host waits for the device)."""
    key, choice = experts.flatten().sort(stable=True)  # (N K,)
    begin = torch.searchsorted(key, torch.arange(E + 1, device=key.device))  # (E + 1,)
    if capacity is not None:
        kept = torch.arange(len(key), device=key.device) - begin[key] < capacity  # (N K,)
        choice, begin = choice[kept], F.pad(begin.diff().clamp(max=capacity).cumsum(0), (1, 0))
    place = torch.full_like(key, -1)
    place[choice] = torch.arange(len(choice), device=key.device)
    return Order(choice, place.view(experts.shape), begin)


def capacity_of(factor, N, K, E):
    """Choices that an expert takes at most: `factor` times its fair share. arXiv 2101.03961."""
    return math.ceil(factor * N * K / E)


# ==== 2. Balance: two losses, two ways to count, and a bias ===========================================================


def counts_of(experts, E):
    """(..., N, K) -> (..., E) int64, how often each was chosen."""
    chosen = experts.flatten(-2)
    counts = torch.zeros(*chosen.shape[:-1], E, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(-1, chosen, torch.ones_like(chosen))


def balance_loss(routing, counts=None):
    """E sum_e f_e p_e, a scalar; 1 if all is equal. f from `counts` (E,), p the mean score of these tokens. Tensors of
    several layers, stacked: their sum.

    counts None: of these tokens, Switch's loss of a micro-batch. Counts of all ranks' tokens (global_counts) make it
    the loss of the global batch: ranks with equally many tokens then have gradients whose mean is its gradient."""
    N, E = routing.scores.shape[-2:]
    counts = counts_of(routing.experts, E) if counts is None else counts
    share = counts.to(routing.scores.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)  # (..., E)
    return E * (share * routing.scores.sum(-2)).sum() / max(1, N)


def z_loss(routing):
    """Mean of logsumexp(logits)^2, which keeps them small, a scalar; of several layers the sum. arXiv 2202.08906."""
    return routing.logits.logsumexp(-1).square().sum() / max(1, routing.logits.shape[-2])


def global_counts(counts, group):
    """(..., E) of this rank -> of all ranks."""
    return parallel.all_reduce(counts, group)


def max_violation(counts):
    """(..., E) -> (...): the fullest expert's load over the mean, less 1."""
    return counts.amax(-1) / counts.double().mean(-1).clamp(min=1e-9) - 1


class Balance:
    """What a training loop calls: loss() after each forward pass, step() after the optimizer's step.

    kind "global", "micro": balance_loss with that f, times `coefficient`; "bias": none, but step() moves each layer's
    bias by `rate`; "none". All of them add z times z_loss. With several micro-batches a step, the global f is that of
    those so far (arXiv 2501.11873): the exact one is known after the last, when the others' backward passes are over.
    group: the ranks whose tokens make the global batch; all of them make the same calls. ValueError on another kind,
    and a model without experts."""

    KINDS = ("global", "micro", "bias", "none")

    def __init__(self, model, kind="global", group=None, coefficient=1e-2, z=1e-3, rate=1e-3):
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        if kind not in self.KINDS:
            raise base.BadInput(f"kind is {kind!r}: use one of {', '.join(self.KINDS)}")
        if not self.layers:
            raise base.BadInput("the model has no experts to balance: with_experts(model) first")
        if kind == "bias" and self.layers[0].bias.dtype.itemsize < 4:
            raise base.BadInput(f"kind is 'bias', but biases are {self.layers[0].bias.dtype}, which lose steps of "
                                f"{rate}: keep the model in fp32")
        self.kind, self.group, self.coefficient, self.z, self.rate = kind, group, coefficient, z, rate
        self.seen = None  # (layers, E) choices of the step so far, of all ranks

    def loss(self):
        """A scalar, the sum over layers of each one's mean over the tokens of its last forward pass, on this rank.
        ValueError if there was none since the last call."""
        routings = [layer.take_routing() for layer in self.layers]
        counts = torch.stack([counts_of(r.experts, r.scores.shape[1]) for r in routings])  # (layers, E)
        everywhere = global_counts(counts, self.group)
        self.seen = everywhere if self.seen is None else self.seen + everywhere
        logits, scores = (torch.stack(parts) for parts in zip(*((r.logits, r.scores) for r in routings), strict=True))
        routing = Routing(logits, scores, None, None)  # of all layers at once: fewer kernels, larger ones
        total = self.z * z_loss(routing)
        if self.kind in ("global", "micro"):
            total = total + self.coefficient * balance_loss(routing, self.seen if self.kind == "global" else counts)
        return total

    def step(self, move=True):
        """Move the biases, unless the step is left out; returns its max_violation of each layer, (layers,) fp64.
        ValueError before loss()."""
        if self.seen is None:
            raise base.BadInput("no loss() since the last step(): call it after each forward pass")
        seen, self.seen = self.seen, None
        if move and self.kind == "bias":
            for layer, counts in zip(self.layers, seen, strict=True):
                layer.bias += self.rate * (counts.double().mean() - counts).sign()
        return max_violation(seen)


# ==== 3. The experts' products: rows sorted by expert, one launch for all experts =====================================

# Rows begin[e] ... begin[e + 1] of x (R, K) belong to expert e, whose matrix is rows e M ... (e + 1) M of W (E M, K).
# A loop over experts launches E products, needs their sizes on the host (a wait), and leaves multiprocessors idle at
# the end of each. Padding to a capacity wastes or drops. Here a program finds its tile through a table that is made on
# the device: the tiles of all experts, one after another, each with its expert, first row and last. An expert without
# tokens has no tile; a last tile computes up to 127 rows too many and stores none of them.
#
# What it costs: 2 R M K FLOPs whatever the routing, and all matrices once: E M K elements read, or, as gradients,
# written: 2 R / E FLOPs an element. With 256 rows an expert that is 256 a byte in bf16, about what an H200's products
# need to be kept busy (206: 989 TFLOP/s over 4.8 TB/s). So small experts' gradients are fast only where a tile is
# written while others are summed.

TILES = {
    "16-bit": dict(BLOCK_R=128, BLOCK_M=256, BLOCK_K=64, num_warps=8, num_stages=4),
    "32-bit": dict(BLOCK_R=64, BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=2),
    "16-bit gradient": dict(BLOCK_R=32, BLOCK_M=128, BLOCK_K=128, num_warps=4, num_stages=5),
    "32-bit gradient": dict(BLOCK_R=32, BLOCK_M=64, BLOCK_K=64, num_warps=4, num_stages=2),
}
if INTERPRETED:
    TILES = dict.fromkeys(TILES, dict(BLOCK_R=16, BLOCK_M=32, BLOCK_K=32))


def loop_is_faster(R, M, K, E, gradient):
    """Whether to take the library's product for each of E experts with R / E rows, by what both take on an H200.

    One launch of all products is as fast, and nobody waits for sizes; above 1e11 FLOPs an expert the library is faster
    (a fifth at 5e11). A gradient takes the library 22 us, or its FLOPs at 720 TFLOP/s and 0.75 ps an element of it; the
    kernel makes 264 tiles at a time, each in 3.3 us and 12.9 ns a row."""
    rows = R / E
    flops = 2 * rows * M * K
    if not gradient:
        return flops >= 1e11
    return max(22e-6, flops / 7.2e14 + 7.5e-13 * M * K) < M * K / (128 * 128 * 264) * (3.3e-6 + 12.9e-9 * rows)


class Tiles(NamedTuple):
    """The row tiles of all experts: expert, row, stop (most,) int32; count () of them are there."""

    expert: torch.Tensor
    row: torch.Tensor
    stop: torch.Tensor
    count: torch.Tensor


class Rows:
    """Where each expert's rows are: begin (E + 1,) int64 on the device. The same on the host (bounds), and as tiles, is
    made when somebody asks, once. Bounds set out for the host at once: whoever wants them in backward need not wait."""

    def __init__(self, begin, bounds=None):
        self.begin, self.experts, self.on_host, self.tables = begin, len(begin) - 1, bounds, {}
        if bounds is None:
            self.copy, self.copied = begin.to("cpu", non_blocking=True), begin.is_cuda and torch.cuda.Event()
            if self.copied:
                self.copied.record()

    @property
    def bounds(self):
        if self.on_host is None:
            if self.copied:
                self.copied.synchronize()
            self.on_host = tuple(self.copy.tolist())
        return self.on_host

    @functools.cached_property
    def by_size(self):
        """(E,) int64, the experts, that with most rows first."""
        return self.begin.diff().argsort(descending=True)

    def spans(self):
        """(expert, slice of its rows)."""
        return [(e, slice(*span)) for e, span in enumerate(itertools.pairwise(self.bounds))]

    def tiles(self, R, block):
        """Tiles of `block` rows, R rows in all. Reads nothing back."""
        if block not in self.tables:
            begin = self.begin
            tiles = (begin.diff() + block - 1) // block  # (E,)
            ends = tiles.cumsum(0)
            index = torch.arange(R // block + len(tiles), device=begin.device)  # each expert adds a tile at most
            expert = torch.searchsorted(ends, index, right=True).clamp(max=len(tiles) - 1)
            row = begin[expert] + (index - (ends - tiles)[expert]) * block
            self.tables[block] = Tiles(expert.int(), row.int(), begin[expert + 1].int(), ends[-1].int())
        return self.tables[block]


def product_by_loop(x, W, rows, transposed, out):
    """out (R, M) = x_e W_e^T for the rows of each expert e, W (E M, K); transposed: x (R, M), out (R, K) = x_e W_e."""
    matrices = W.view(rows.experts, -1, W.shape[1])  # (E, M, K)
    for e, span in rows.spans():
        torch.mm(x[span], matrices[e] if transposed else matrices[e].T, out=out[span])
    return out


def gradient_by_loop(dy, x, rows, dtype):
    """dy (R, M), x (R, K) -> (E M, K): dy_e^T x_e of each expert; zeros for one without rows."""
    out = x.new_empty(rows.experts, dy.shape[1], x.shape[1], dtype=dtype)
    for e, span in rows.spans():
        forging.weight_gradient(dy[span], x[span], out[e])
    return out.flatten(0, 1)


@triton.jit
def product_kernel(
    X, W, out, tiles, M, K, stride_x, stride_w, TRANSPOSED: tl.constexpr, FETCHED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out (R, M) = X (R, K) W_e^T, W (E M, K); TRANSPOSED: X W_e, W (E K, M), since here M are the columns of `out`.
    Persistent programs, as in 02; `tiles` is a Tiles."""
    row_tiles = tl.load(tiles.count)
    for index in tl.range(tl.program_id(0), row_tiles * tl.cdiv(M, BLOCK_M), tl.num_programs(0), flatten=True):
        row_tile, col_tile = tile_at(index, row_tiles, tl.cdiv(M, BLOCK_M))
        e, row, stop = tl.load(tiles.expert + row_tile), tl.load(tiles.row + row_tile), tl.load(tiles.stop + row_tile)
        col = col_tile * BLOCK_M
        rows, cols = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for start in range(0, K, BLOCK_K):
            depth = start + tl.arange(0, BLOCK_K)
            if FETCHED:  # rows of the next expert may come along: they are not stored
                x = X.load([row, start])  # (BLOCK_R, BLOCK_K)
                w = W.load([e * K + start, col]) if TRANSPOSED else tl.trans(W.load([e * M + col, start]))
            else:
                x = load_tile(X, rows, depth, stop, K, stride_x)
                if TRANSPOSED:
                    w = load_tile(W + e.to(tl.int64) * K * stride_w, depth, cols, K, M, stride_w)
                else:
                    w = tl.trans(load_tile(W + e.to(tl.int64) * M * stride_w, cols, depth, M, K, stride_w))
            acc = dot(x, w, acc)
        inside = (rows < stop)[:, None] & (cols < M)[None, :]
        at = rows.to(tl.int64)[:, None] * M + cols[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    dY, X, out, begin, order, M, K, stride_dy, stride_x, FETCHED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out (E M, K): dY_e^T X_e. A program makes one tile of an expert, a sum over its rows; those of the fullest expert
    take longest and are started first (order). Tiles are small enough for two programs to share a multiprocessor: while
    one stores, the other multiplies. FETCHED: dY and X are descriptors, which know nothing of experts: in the block
    that crosses an expert's last row, dY is 0 for the next one's (an infinite x of theirs still spoils the sum, and
    the step is lost). A descriptor that ends there, made here, took up to a fifth longer where experts are small."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    e = tl.load(order + tl.program_id(0) // tiles)
    start, stop = tl.load(begin + e).to(tl.int32), tl.load(begin + e + 1).to(tl.int32)
    down, right = tile_at(tl.program_id(0) % tiles, tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K))
    down, right = down * BLOCK_M, right * BLOCK_K
    rows, cols = down + tl.arange(0, BLOCK_M), right + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if FETCHED:
        whole = stop - (stop - start) % BLOCK_R
        for at in range(start, whole, BLOCK_R):
            acc = dot(tl.trans(dY.load([at, down])), X.load([at, right]), acc)
        if whole < stop:
            dy, mine = dY.load([whole, down]), (whole + tl.arange(0, BLOCK_R) < stop)[:, None]  # (BLOCK_R, BLOCK_M)
            acc = dot(tl.trans(tl.where(mine, dy, 0.0).to(dy.dtype)), X.load([whole, right]), acc)
    else:
        for at in range(start, stop, BLOCK_R):
            tokens = at + tl.arange(0, BLOCK_R)
            dy = load_tile(dY, tokens, rows, stop, M, stride_dy)  # (BLOCK_R, BLOCK_M)
            acc = dot(tl.trans(dy), load_tile(X, tokens, cols, stop, K, stride_x), acc)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    to = (e.to(tl.int64) * M + rows)[:, None] * K + cols[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


def choose_backend(a, b, backend, *sizes):
    """The backend, "triton" or "torch", as in 02; "auto" asks loop_is_faster(*sizes); no rows, no launch."""
    found = cce.choose_backend(backend, a, b)
    return "torch" if not len(a) or backend == "auto" and sizes and loop_is_faster(*sizes) else found


def tile_options(x, suffix=""):
    return TILES[("16-bit" if x.element_size() == 2 else "32-bit") + suffix]


def experts_product(x, W, rows, transposed=False, backend="auto", out=None):
    """x (R, K) sorted by expert, W (E M, K), rows: Rows -> (R, M), each expert's rows times W_e^T; transposed: x (R, M)
    -> (R, K), times W_e. Sums in fp32 (fp64 of fp64). x and W of one dtype: fp32, bf16 or fp16 by the kernel, any by
    the loop. backend: "triton", "torch" (the loop), "auto". out: where to, contiguous. ValueError on dtypes or backends
    that do not fit."""
    E, x = rows.experts, cce.rows_contiguous(x)
    M, K = (W.shape[1], len(W) // E) if transposed else (len(W) // E, W.shape[1])
    out = x.new_empty(len(x), M) if out is None else out
    if choose_backend(x, W, backend, len(x), M, K, E, False) == "torch":
        return product_by_loop(x, W, rows, transposed, out)
    options = tile_options(x)
    # A block of K that crossed an expert's last row of W would bring the next one's weights, times 0: NaN if infinite.
    fetched = cce.takes_descriptors(x, W) and K % options["BLOCK_K"] == 0
    operands = x, W
    if fetched:
        block = [options["BLOCK_K"], options["BLOCK_M"]] if transposed else [options["BLOCK_M"], options["BLOCK_K"]]
        operands = (cce.TensorDescriptor.from_tensor(x, [options["BLOCK_R"], options["BLOCK_K"]]),
                    cce.TensorDescriptor.from_tensor(W, block))
    product_kernel[cce.programs(x)](
        *operands, out, rows.tiles(len(x), options["BLOCK_R"]), M, K, x.stride(0), W.stride(0),
        TRANSPOSED=transposed, FETCHED=fetched, **options
    )
    return out


def experts_gradient(dy, x, rows, dtype=None, backend="auto"):
    """dy (R, M), x (R, K) sorted by expert -> dW (E M, K) in `dtype` (that of x): dy_e^T x_e, 0 for an expert without
    rows. Sums in fp32. ValueError as for experts_product."""
    E, M, K, dtype = rows.experts, dy.shape[1], x.shape[1], dtype or x.dtype
    if choose_backend(dy, x, backend, len(x), M, K, E, True) == "torch":
        return gradient_by_loop(dy, x, rows, dtype)
    dy, x, options = cce.rows_contiguous(dy), cce.rows_contiguous(x), tile_options(x, " gradient")
    out = torch.empty(E * M, K, dtype=dtype, device=x.device)
    operands, fetched = (dy, x), cce.takes_descriptors(dy, x)
    if fetched:
        operands = (cce.TensorDescriptor.from_tensor(dy, [options["BLOCK_R"], options["BLOCK_M"]]),
                    cce.TensorDescriptor.from_tensor(x, [options["BLOCK_R"], options["BLOCK_K"]]))
    tiles = triton.cdiv(M, options["BLOCK_M"]) * triton.cdiv(K, options["BLOCK_K"])  # of an expert
    gradient_kernel[(E * tiles,)](
        *operands, out, rows.begin, rows.by_size, M, K, dy.stride(0), x.stride(0), FETCHED=fetched, **options
    )
    return out


# Between the products rows are moved: copied to their experts, summed on the way back, and the same for gradients.


@triton.jit
def gather_kernel(source, index, weights, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = sum_k weights[n, k] source[index[n, k]] (weights None: 1); an index of -1 adds nothing."""
    n, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(index + n * K + k)
        width = tl.where(row < 0, 0, D)
        x = tl.load(source + row * D + cols, mask=cols < width, other=0.0).to(tl.float32)
        if weights is not None:
            x *= tl.load(weights + n * K + k)
        acc += x
    tl.store(out + n * D + cols, acc.to(out.dtype.element_ty), mask=cols < D)


@triton.jit
def dots_kernel(source, index, dy, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[n, k] = source[index[n, k]] . dy[n]."""
    n = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        row, acc = tl.load(index + n * K + k), tl.zeros((BLOCK,), tl.float32)
        width = tl.where(row < 0, 0, D)
        for start in range(0, D, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(source + row * D + cols, mask=cols < width, other=0.0).to(tl.float32)
            acc += x * tl.load(dy + n * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        tl.store(out + n * K + k, tl.sum(acc, 0))


def gather_rows(source, index, weights=None, backend="auto"):
    """source (S, D), index (N, K) int64, weights (N, K) fp32 or None -> (N, D) in source's dtype: sum over k of
    weights[n, k] source[index[n, k]], where an index of -1 adds nothing."""
    (N, K), D = index.shape, source.shape[1]
    if choose_backend(source, source, backend) == "triton" and N and len(source):
        source, out = source.contiguous(), source.new_empty(N, D)
        block = min(1024, triton.next_power_of_2(D))
        weights = None if weights is None else weights.contiguous()
        gather_kernel[(N, triton.cdiv(D, block))](source, index.contiguous(), weights, out, D, K, block)
        return out
    rows = rows_at(source, index)  # (N, K, D)
    wide = torch.promote_types(source.dtype, torch.float32)
    rows = rows if weights is None else rows.to(wide) * weights.unsqueeze(-1)
    return rows.sum(1).to(source.dtype) if K > 1 or weights is not None else rows.squeeze(1)


def rows_at(source, index):
    """source[index], zeros for an index of -1."""
    source = F.pad(source, (0, 0, 0, 1)) if (index < 0).any() else source
    return source.index_select(0, index.flatten() % max(1, len(source))).view(*index.shape, source.shape[1])


def dot_rows(source, index, dy, backend="auto"):
    """source (S, D), index (N, K), dy (N, D) -> (N, K) fp32 (fp64): source[index[n, k]] . dy[n], 0 for index -1."""
    (N, K), D = index.shape, source.shape[1]
    wide = torch.promote_types(source.dtype, torch.float32)
    if choose_backend(source, dy, backend) == "triton" and N and len(source):
        out = torch.empty(N, K, device=source.device)
        block = min(1024, triton.next_power_of_2(D))
        dots_kernel[(N,)](source.contiguous(), index.contiguous(), dy.contiguous(), out, D, K, block)
        return out
    return torch.linalg.vecdot(rows_at(source, index).to(wide), dy.to(wide).unsqueeze(1))


class _Take(torch.autograd.Function):
    """x (N, D) -> rows x[index] (R, D). place (N, K): where the rows went that are row n's, or -1."""

    @staticmethod
    def forward(ctx, x, index, place):
        ctx.save_for_backward(place)
        return gather_rows(x, index.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return gather_rows(g, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """rows (R, D), weights (N, K) -> y[n] = sum_k weights[n, k] rows[place[n, k]]; choice (R,) as in Order."""

    @staticmethod
    def forward(ctx, rows, weights, choice, place):
        ctx.save_for_backward(rows, weights, choice, place)
        return gather_rows(rows, place, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows, weights, choice, place = ctx.saved_tensors
        token = choice // place.shape[1]  # (R,)
        drows = gather_rows(dy, token.unsqueeze(1), weights.flatten()[choice].unsqueeze(1))
        return drows, dot_rows(rows, place, dy).to(weights.dtype), None, None


# FORGE, 04: forge(model) gives a weight a state. After arm(lr, step) backward takes the optimizer's step itself and
# leaves no gradient; after stash() it keeps what dW is a product of (a factor). Here dW is complete only when the parts
# of section 6 have come home, so the step is taken at the end of backward.


class Experts(nn.Module):
    """One matrix of each of E experts, (M, K), one below the other: weight (E M, K). So a rank's experts are a range of
    its rows, and so is each expert for 04, which keeps the optimizer's state of the whole in `forged`."""

    forged = None

    def __init__(self, experts, M, K):
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts * M, K))
        nn.init.normal_(self.weight, std=0.02)


class Work:
    """What a rank computes in one pass through a layer's experts: own, the Rows of its experts, the first `count` ones;
    section 6 has a Work with rows of borrowed experts behind them."""

    part_of = ()  # the (own) expert that each gradient belongs to that comes home

    def __init__(self, own, count):
        self.own, self.count = own, count

    def start(self, weights):
        """Called with the matrices, in the dtype of the products, as soon as it is known who computes what. loaned: for
        each, those of borrowed experts, and what to wait for."""
        self.weights, self.loaned = weights, [(w.new_empty(0, w.shape[1]), []) for w in weights]

    def give_back(self, dY, X, dtype):
        """(gradients that come home (S, M, K), what to wait for), from dY and X of the borrowed experts' rows."""
        return X.new_empty(0, dY.shape[1], X.shape[1]), []


class ExpertFactor(NamedTuple):
    """04's factor of a gradient (E M, K): of expert e dY_e^T X_e over rows bounds[e] ... bounds[e + 1] of dY (R, M) and
    X (R, K), and parts (S, M, K), gradients of experts part_of[s] from other ranks."""

    dY: torch.Tensor
    X: torch.Tensor
    parts: torch.Tensor
    bounds: tuple
    part_of: tuple

    def of_expert(self, e):
        rows = slice(self.bounds[e], self.bounds[e + 1])
        mine = [part for part, of in zip(self.parts, self.part_of, strict=True) if of == e]
        return [forging.Product(self.dY[rows], self.X[rows]), *map(forging.Dense, mine)]

    def write(self, state, out, top, add):
        """out (R, K) = or += the gradient's rows from `top` on."""
        M, bottom = self.dY.shape[1], top + len(out)
        for e in range(top // M, (bottom - 1) // M + 1):
            first, last = max(top, e * M), min(bottom, (e + 1) * M)
            for i, factor in enumerate(self.of_expert(e)):
                factor.write(state, out[first - top : last - top], first - e * M, add or i > 0)


def expert_update(state, dY, X, work, parts, arriving, dtype):
    """What backward makes of the gradient of Experts.weight, with the parts of it that are arriving: dW (E M, K), if
    the weight is not forged or not armed. Else None: its factor is kept, or the step is taken, as 04 plans it: in slabs
    of the whole weight (with Muon: of whole experts); or, if experts are larger than a slab or have parts, each by
    itself, in slabs or fused."""
    M, K, handle = dY.shape[1], X.shape[1], state and state.handle
    if not state or handle.phase == "idle":
        gradient = experts_gradient(dY, X, work.own, dtype)  # (E M, K)
        wait_for(arriving)
        for part, e in zip(parts, work.part_of, strict=True):
            gradient[e * M : (e + 1) * M] += part
        return gradient
    wait_for(arriving)
    factor = ExpertFactor(dY, X, parts, work.own.bounds, work.part_of)
    if handle.phase == "stashing":
        return state.keep(factor)
    state.check_second()
    state.stepped, plan = True, handle.plan(state, 0)
    several = 4 * M * K <= handle.slab_bytes and handle.rung != "fused" and not work.part_of
    if plan.rung == "matrix" or several:  # of the whole weight: a slab holds several experts, or cuts one
        return state.step_in_slabs([factor], plan.rows)
    for e in range(len(factor.bounds) - 1):
        product, *others = factors = factor.of_expert(e)
        rung = "slab" if others or handle.rung == "hook" else handle.rung  # a sum cannot be fused
        plan = forging.plan_step(state.rule, M, K, len(product.X), handle.layout, rung, handle.slab_bytes)
        if plan.rung == "fused":
            state.step_fused(*product, row=e * M)
        else:
            state.step_in_slabs(factors, plan.rows, e * M, M)


class _ExpertMLP(torch.autograd.Function):
    """x (R, D), sorted by expert -> (R, D): down_e(gelu(up_e(x))), by the Work: own experts' rows first, borrowed
    experts' behind them. up (E F, D), down (E D, F); states: 04's of both, or None.

    Keeps x and the hidden rows before gelu, which is made again: R F elements less than autograd would."""

    @staticmethod
    def forward(ctx, x, up, down, work, states):
        ctx.work, ctx.states = work, states
        ctx.versions = [w._version for w in (up, down)]
        hidden = products(x, work.weights[0], *work.loaned[0], work)  # (R, F)
        out = products(F.gelu(hidden), work.weights[1], *work.loaned[1], work)  # (R, D)
        ctx.save_for_backward(x, hidden, up, down, *(buffer for buffer, _ in work.loaned))
        work.weights = work.loaned = None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, hidden, up, down, *borrowed = (t.detach() for t in ctx.saved_tensors)
        work, own = ctx.work, ctx.work.count
        for state, version in zip(ctx.states, ctx.versions, strict=True):
            if state:
                state.on_backward(version)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            weights, active, dy = [w.to(x.dtype) for w in (up, down)], F.gelu(hidden), dy.contiguous()
            # Gradients of borrowed experts are made as early as they can be, and travel home while this rank goes on.
            # A step sums them in fp32.
            forged = [state and state.handle.phase != "idle" for state in ctx.states]
            dtypes = [torch.float32 if f else w.dtype for f, w in zip(forged, (up, down), strict=True)]
            of_down = work.give_back(dy[own:], active[own:], dtypes[1])
            dhidden = products(dy, weights[1], borrowed[1], [], work, transposed=True)  # (R, F)
            dhidden = torch.ops.aten.gelu_backward(dhidden, hidden)
            of_up = work.give_back(dhidden[own:], x[own:], dtypes[0])
            dx = products(dhidden, weights[0], borrowed[0], [], work, transposed=True)  # (R, D): before the update
            updates = [None, None]
            for i, d, a, home in (1, dy, active, of_down), (0, dhidden, x, of_up):
                if cce.wanted(ctx, 1 + i):
                    updates[i] = expert_update(ctx.states[i], d[:own], a[:own], work, *home, (up, down)[i].dtype)
                else:
                    wait_for(home[1])
        return dx, *updates, None, None


def wait_for(handles):
    for handle in handles:
        handle.wait()


def products(x, own, borrowed, handles, work, transposed=False):
    """experts_product over the rows of own experts; then, when their matrices are here, over those of borrowed ones."""
    M = own.shape[1] if transposed else len(own) // work.own.experts
    out = x.new_empty(len(x), M)
    experts_product(x[: work.count], own, work.own, transposed, out=out[: work.count])
    wait_for(handles)
    if len(borrowed):
        experts_product(x[work.count :], borrowed, work.borrowed, transposed, out=out[work.count :])
    return out


# ==== 4. The layer ====================================================================================================


def recording():
    """Whether this forward pass counts: not one without gradients, nor one that recomputation makes in backward, which
    would count every token twice."""
    inside_backward = torch._C._current_graph_task_id() >= 0
    return torch.is_grad_enabled() and not inside_backward


class MoE(nn.Module):
    """x (..., D) fp32, bf16 or fp64 -> (..., D): E experts of width `hidden`, each token through its best top_k.

    Parameters router (E, D), up.weight (E hidden, D), down.weight (E D, hidden); buffer bias (E,), which needs fp32 to
    hear of small changes. gate: "softmax" or "sigmoid". capacity: factor of the fair share of this rank's choices
    beyond which an expert drops them (the residual stream goes on without); None: none is dropped. bottleneck: BigMac's
    width d: rows are narrowed from D to d before they are sent and widened after they have come back, so that experts
    work, and ranks talk, at width d. After a forward pass with gradients, take_routing() gives its Routing, once;
    dropped: the share of choices that the last pass dropped. ValueError on sizes that do not fit."""

    def __init__(self, dim, hidden, experts, top_k=2, gate="softmax", capacity=None, bottleneck=None):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise base.BadInput(f"top_k {top_k} of {experts} experts: use 1 to {experts}")
        if capacity is not None and not capacity > 0:
            raise base.BadInput(f"capacity is {capacity}: use None, or a factor above 0")
        route(torch.zeros(1, experts), top_k, gate)  # refuses a gate that it does not know
        width = bottleneck or dim
        self.experts, self.top_k, self.gate, self.capacity = experts, top_k, gate, capacity
        self.router = nn.Parameter(torch.empty(experts, dim))
        nn.init.normal_(self.router, std=0.02)
        self.register_buffer("bias", torch.zeros(experts))
        self.up, self.down = Experts(experts, hidden, width), Experts(experts, width, hidden)
        self.narrow = nn.Linear(dim, width, bias=False) if bottleneck else nn.Identity()
        self.widen = nn.Linear(width, dim, bias=False) if bottleneck else nn.Identity()
        self.exchange, self.routing, self.dropped = run_here, None, 0.0  # run_here: or an ExpertParallel

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])  # (N, D)
        with torch.autocast(x.device.type, enabled=False):  # a rounded score may choose another expert
            wide = torch.promote_types(x.dtype, torch.float32)
            routing = route(x.to(wide) @ self.router.to(wide).T, self.top_k, self.gate, self.bias)
        if recording():
            self.routing = routing
        return self.mix(x, routing).view(shape)

    def mix(self, x, routing):
        """x (N, D) -> (N, D): the sum of the experts' outputs."""
        capacity = self.capacity and capacity_of(self.capacity, len(x), self.top_k, self.experts)
        order = order_by_expert(routing.experts, self.experts, capacity)
        self.dropped = 1 - len(order.choice) / max(1, order.place.numel())
        rows, order = self.exchange(self.narrow(parallel.as_product(x)), order, self)  # (R, D)
        return self.widen(_Combine.apply(rows, routing.weights, order.choice, order.place))

    def matrices(self, dtype):
        """This rank's experts, for products in this dtype."""
        return [experts.weight.detach().to(dtype) for experts in (self.up, self.down)]

    def take_routing(self):
        """The Routing of the last forward pass that counted. ValueError if there was none since."""
        if self.routing is None:
            raise base.BadInput("no forward pass with gradients since the last call: call it once after each")
        routing, self.routing = self.routing, None
        return routing


def take(x, order):
    """x (N, D) -> a row for each choice, in their order (R, D)."""
    return _Take.apply(x, order.choice // order.place.shape[1], order.place)


def run_here(x, order, moe):
    """All experts on this rank: (rows (R, D) of outputs, their Order)."""
    rows = take(x, order)
    work = Work(Rows(order.begin), len(rows))
    work.start(moe.matrices(x.dtype))
    return expert_mlp(rows, moe, work), order


def expert_mlp(rows, moe, work):
    """_ExpertMLP with the layer's weights, of whose use 04 has to know."""
    weights, states = (moe.up.weight, moe.down.weight), (moe.up.forged, moe.down.forged)
    if torch.is_grad_enabled() and not rows.requires_grad:  # a rank without tokens still has to come to the exchanges
        rows.requires_grad_()
    out = _ExpertMLP.apply(rows, *weights, work, states)
    for state, weight in zip(states, weights, strict=True):
        if state:
            state.on_forward(weight)
    return out


class Block(base.Block):
    """01's layer with experts in place of its MLP."""

    def mlp(self, x):
        return self.moe(x)


@dataclasses.dataclass(frozen=True)
class GPTConfig(base.GPTConfig):
    """01's, with experts. hidden: width of an expert; 0: 4 dim / top_k, so that a token meets as many weights as in the
    dense model."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 0

    def width(self):
        return self.hidden or max(1, 4 * self.dim // self.top_k)

    def layer_change(self, active):
        """Parameters of a layer's router and `active` experts, less those of the dense MLP."""
        return self.experts * self.dim + 2 * active * self.dim * self.width() - 8 * self.dim**2

    def parameters(self):
        return super().parameters() + self.layers * self.layer_change(self.experts)

    def flops_per_token(self):
        """Of the experts that a token meets."""
        return super().flops_per_token() + 6 * self.layers * self.layer_change(self.top_k)


def activation_change(config, tokens, autocast):
    """Bytes that the layers keep for backward, less those of dense ones (01's activation_bytes): instead of 8 D numbers
    a token, rows (before and after) and hidden rows of the experts that it meets; in fp32 logits and scores, and the
    router's input; four 64-bit numbers a choice. Autocast's 16-bit copies of experts are made twice instead."""
    D, K, E, width = config.dim, config.top_k, config.experts, 2 if autocast else 4
    token = width * (K * (2 * D + config.width()) - 8 * D) + 4 * 2 * E + 8 * 4 * K + (2 * D if autocast else 0)
    return config.layers * (tokens * token - (2 * 8 * D**2 if autocast else 0))


def with_experts(model, **options):
    """Replace the MLPs of a GPT of 01 in place by experts with new random weights: those of its GPTConfig, or of
    `options`, MoE's arguments (hidden and experts are needed if the config has none). Before any cut. Returns it."""
    config = model.config
    if isinstance(config, GPTConfig):
        options = dict(hidden=config.width(), experts=config.experts, top_k=config.top_k) | options
    for block in model.blocks:
        block.__class__ = Block  # the same module with another mlp()
        like = block.norm2.weight  # the matrices may still be without a place
        del block.up, block.down
        with like.device:
            block.moe = MoE(config.dim, **options).to(like.dtype)
        into_stream = block.moe.widen if options.get("bottleneck") else block.moe.down
        nn.init.normal_(into_stream.weight, std=0.02 / math.sqrt(2 * config.layers))  # as in 01
    return model


# ==== 5. Expert parallelism: experts on different ranks, rows travel to them and back =================================

# Ranks hold equal ranges of the experts. All know all counts (one gather of E numbers a rank), hence the same table
#     rows[s, d, e]   rows of expert e that source rank s has and rank d computes
# from which everything follows: what to send, what comes, in which order it lies. Plain expert parallelism and section
# 6 differ in that table alone. A rank without tokens sends and receives nothing, but it comes to every exchange,
# forward and backward: one that leaves out an exchange of nothing leaves the others waiting.


def owners(E, n):
    """(E,) the rank of each expert."""
    return np.repeat(np.arange(n), [stop - start for start, stop in shares(E, n)])


def at_home(loads, n):
    """Plain expert parallelism. loads (E,) rows of each expert -> (n, E), how many of them each rank computes."""
    plan = np.zeros((n, len(loads)), np.int64)
    plan[owners(len(loads), n), np.arange(len(loads))] = loads
    return plan


def table(counts, plan):
    """counts (n, E) rows of each expert that each rank has, plan (n, E) that each computes -> rows (n, n, E). Where a
    rank computes an expert it takes its own rows first: those need not travel. The rest in order of ranks."""
    rows = np.zeros((len(plan), *plan.shape), np.int64)
    kept = np.minimum(counts, plan)  # (n, E)
    diagonal = np.arange(len(plan))
    rows[diagonal, diagonal] = kept
    left, room = counts - kept, plan - kept
    have, take = left.cumsum(0), room.cumsum(0)  # both are cut from one line of an expert's remaining rows
    overlap = np.minimum(have[:, None], take[None]) - np.maximum((have - left)[:, None], (take - room)[None])
    return rows + overlap.clip(0)


def spans(starts, lengths, device):
    """start, start + 1, ... of each span, one after the other: (sum of lengths,) int64."""
    starts, lengths = starts.ravel(), lengths.ravel()
    total = int(lengths.sum())
    both = to_device(np.stack((starts - before(lengths), lengths)), device)
    first = torch.repeat_interleave(both[0], both[1], output_size=total)
    return first + torch.arange(total, device=device)


def to_device(numbers, device):
    """A tensor of a few numbers. The host goes on at once; else it would wait for all that the device has to do."""
    return torch.as_tensor(numbers).to(device, non_blocking=True)


def before(x, axis=0):
    """Sums of what comes before each along the axis."""
    return x.cumsum(axis) - x


def permute(x, starts, lengths):
    """The rows of x (R, D) at these spans, one after the other, which cover it; and the function that undoes it."""
    if in_a_line(starts, lengths):
        return x, lambda y: y
    index = spans(starts, lengths, x.device)  # (R,)
    place = torch.empty_like(index)
    place[index] = torch.arange(len(index), device=x.device)
    return _Take.apply(x, index, place.unsqueeze(1)), lambda y: _Take.apply(y, place, index.unsqueeze(1))


class ExpertParallel:
    """What expert_parallel puts into a layer for run_here: x (N, D), an Order -> the rows of outputs, and their Order.

    policy(loads (E,), n) -> (n, E), which rank computes how many of each expert's rows. plan: the last one. wires: a
    group of the same ranks for what must not wait for the exchange of rows, nor hold it up: matrices that are lent."""

    def __init__(self, group, policy):
        self.group, self.policy, self.plan = group, policy, None
        self.wires = None if policy is at_home else twin(group)

    def __call__(self, x, order, moe):
        n, me = size(self.group), rank_in(self.group)
        # The host waits for the device: a collective of uneven parts wants their sizes.
        counts = parallel.gather(order.begin.diff().unsqueeze(0), self.group, 0).cpu().numpy()  # (n, E)
        self.plan = self.policy(counts.sum(0), n)
        cube, owner = table(counts, self.plan), owners(moe.experts, n)
        mine, borrowed = np.flatnonzero(owner == me), np.flatnonzero(self.plan[me] * (owner != me))
        give, arriving = cube[me].sum(1).tolist(), cube[:, me].sum(1).tolist()
        ranks = [r for r in range(n) if r != me] + [me]  # exchange() wants last what stays here
        # Sent by rank, then expert; an expert's rows for earlier ranks come first.
        starts = before(counts[me]) + before(cube[me])  # (n, E)
        order = reordered(order, starts[ranks], cube[me][ranks])
        rows = take(x, order)
        work = Loans(self.plan, me, mine, borrowed, self.wires, x.device)
        work.start(moe.matrices(x.dtype))  # while the device copies rows
        rows = parallel.exchange(rows, give, arriving, self.group)
        # They arrive by source, then expert, and are wanted by expert, own ones before borrowed ones, then source.
        lengths, wanted = cube[ranks, me], np.concatenate((mine, borrowed))  # (n, E)
        starts = before(lengths.ravel()).reshape(n, -1)
        rows, as_arrived = permute(rows, starts.T[wanted], lengths.T[wanted])
        rows = as_arrived(expert_mlp(rows, moe, work))
        return parallel.exchange(rows, arriving, give, self.group), order


@functools.cache
def twin(group):
    """Another group of the same ranks. All of them call it."""
    if group is None:
        return None
    options = None
    if dist.get_backend(group) == "nccl":  # 16 blocks send as fast as the usual 32, and a block takes 36 MiB of memory
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = 16
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True, pg_options=options)


def in_a_line(starts, lengths):
    """Whether the spans follow each other from 0 on."""
    return (starts.ravel() == before(lengths.ravel()))[lengths.ravel() > 0].all()


def reordered(order, starts, lengths):
    """The Order whose choices are those at these spans of the given one."""
    if in_a_line(starts, lengths):
        return order
    choice, place = order.choice[spans(starts, lengths, order.choice.device)], torch.full_like(order.place, -1)
    place.view(-1)[choice] = torch.arange(len(choice), device=choice.device)
    return Order(choice, place, None)


def expert_parallel(model, group, policy="ep"):
    """Cut the experts of every MoE in the model in place: each rank of the group keeps an equal range. All ranks start
    from equal weights. policy: "ep", or "llep" (section 6), or a function as in ExpertParallel.

    A rank's gradients of its experts are those of all ranks' tokens, and need no further sum; those of all other
    parameters are of its own tokens. Returns {name: (row, 0)} of each cut weight's first element in the whole:
    forge()'s `origins`. group None: one rank. ValueError on another policy, if the experts cannot be shared out
    equally, or were cut before."""
    n, origins = size(group), {}
    if isinstance(policy, str) and policy not in POLICIES:
        raise base.BadInput(f"policy is {policy!r}: use one of {', '.join(POLICIES)}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, moe in layers.items():
        if moe.experts % n:
            raise base.BadInput(f"{moe.experts} experts over {n} ranks: use a number of experts that {n} divides")
        if moe.exchange is not run_here:
            raise base.BadInput(f"{name}: its experts are cut already: call expert_parallel once")
    for name, moe in layers.items():
        moe.exchange = ExpertParallel(group, POLICIES.get(policy, policy))
        for part in ("up", "down") if n > 1 else ():
            experts = getattr(moe, part)
            parallel.cut(experts, "weight", 0, group)
            origins[f"{name}.{part}.weight".lstrip(".")] = experts.weight.origin
            experts.experts //= n
    return origins


def exchange_bytes(N, K, D, n, itemsize):
    """Bytes that a rank sends forward, for N tokens with even routing: rows for the other ranks' experts, and as many
    outputs back. Backward: as much again."""
    return 2 * N * K * D * itemsize * (n - 1) // n


# ==== 6. Least-loaded expert parallelism: where rows cannot be spread, weights travel =================================

# All rows of a popular expert go to one rank. That rank can lend the expert's weights to ranks that have less to do,
# and part of the rows goes there; their gradients of the weights come home and are added. An expert's arithmetic over R
# rows is 12 R D F FLOPs, forward and backward; its weights and their gradients are 4 D F numbers. So a chunk must be
# large to be worth it (`least` rows). 2601.17111; where the paper leaves it open, or differs from its code, we take:
#   - the imbalance that decides whether to act is that of the ranks' loads, which is what one waits for (not experts');
#   - an excess that fits nowhere goes to the least loaded other rank, even beyond its limit (not: stays at home);
#   - a plan that is not below the plain one's largest load is dropped for that.


def least_loaded(loads, n, alpha=1.0, least=1024, imbalance=1.3):
    """loads (E,) int64, rows of each expert -> (n, E), how many of them each of n ranks computes; every rank makes the
    same plan. Plain while the fullest rank has less than `imbalance` times the mean. alpha: a rank's limit over the
    mean; least: fewer rows than that are lent only if they are all that is left of an expert's excess."""
    plain, owner = at_home(loads, n), owners(len(loads), n).tolist()
    filled = loads_at_first(plain)  # (n,) rows that each rank has, or may keep of experts whose turn has not come
    if max(filled) < imbalance * loads.sum() / n:
        return plain
    limit, plan = math.ceil(alpha * loads.sum() / n), np.zeros_like(plain)
    for e in np.argsort(-loads, kind="stable").tolist():
        home, load = owner[e], int(loads[e])
        filled[home] -= load
        plan[home, e] = kept = min(max(0, limit - filled[home]), load)
        filled[home] += kept
        rest = load - kept
        others = sorted((r for r in range(n) if r != home), key=filled.__getitem__) if rest else []
        for r in others:
            chunk = min(rest, limit - filled[r])
            if chunk > 0 and (chunk >= least or chunk == rest):
                plan[r, e] = chunk
                filled[r] += chunk
                rest -= chunk
        if rest:  # it fits nowhere
            r = min(others, key=filled.__getitem__)
            plan[r, e] += rest
            filled[r] += rest
    return plan if plan.sum(1).max() < plain.sum(1).max() else plain


def loads_at_first(plain):
    return plain.sum(1).tolist()


POLICIES = {"ep": at_home, "llep": least_loaded}


class Loans(Work):
    """The Work of rank `me` by a plan (n, E): rows of its own experts `mine`, then of those that it borrows. Owner and
    borrower send matrices to each other over the group, nobody else takes part."""

    def __init__(self, plan, me, mine, borrowed, group, device):
        self.group = group
        bounds = [(0, *plan[me, experts].cumsum().tolist()) for experts in (mine, borrowed)]
        begin = to_device([*bounds[0], *bounds[1]], device).split([len(mine) + 1, len(borrowed) + 1])
        own, self.borrowed = map(Rows, begin, bounds)
        super().__init__(own, bounds[0][-1])
        owner = owners(plan.shape[1], len(plan))
        # (which of my experts, who borrows it), and the owners of what I borrow.
        self.borrowers = [(i, int(r)) for i, e in enumerate(mine) for r in np.flatnonzero(plan[:, e]) if r != me]
        self.lenders = owner[borrowed].tolist()
        self.part_of = tuple(i for i, _ in self.borrowers)

    def send(self, away, back, kind):
        """Send each (matrix, rank) of away while receiving into each (matrix, rank) of back; what to wait for."""
        there = [dist.P2POp(dist.isend, x, group=self.group, group_peer=rank) for x, rank in away]
        here_ = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=rank) for x, rank in back]
        sent[kind] += sum(x.nbytes for x, _ in away)
        return dist.batch_isend_irecv(there + here_) if there or here_ else []

    def start(self, weights):
        self.weights, self.loaned = weights, [self.lend(w) for w in weights]

    def lend(self, weight):
        own = weight.view(self.own.experts, -1, weight.shape[1])  # (E, M, K)
        buffer = weight.new_empty(len(self.lenders), *own.shape[1:])
        away, back = [(own[e], r) for e, r in self.borrowers], list(zip(buffer, self.lenders, strict=True))
        return buffer.flatten(0, 1), self.send(away, back, "weights")

    def give_back(self, dY, X, dtype):
        M, K, S = dY.shape[1], X.shape[1], len(self.lenders)
        gradients = X.new_empty(0, dtype=dtype) if not S else experts_gradient(dY, X, self.borrowed, dtype)
        parts = torch.empty(len(self.borrowers), M, K, dtype=dtype, device=X.device)
        away = list(zip(gradients.view(S, M, K), self.lenders, strict=True)) if S else []
        back = [(part, r) for part, (_, r) in zip(parts, self.borrowers, strict=True)]
        handles = self.send(away, back, "gradients")
        return parts, handles


# ==== 7. Folding: attention and experts cut the same ranks in different ways ==========================================


def fold(tp=1, cp=1, dp=1, ep=1, pp=1):
    """Lists of ranks of each group: attention on a mesh of pp x dp x cp x tp ranks (05's order), experts on one of
    pp x edp x ep over the same ranks: {"tp": [[0, 1], ...], ..., "ep": ..., "edp": ...}.

    Experts need not follow attention's cut: ep may span tp and cp, so that it is not limited by dp. edp is what is left
    of a stage's ranks: copies of the same experts, whose gradients are summed. fold(tp=2, cp=2, dp=2, ep=4)["ep"] is
    [[0, 1, 2, 3], [4, 5, 6, 7]]. ValueError if ep does not divide them. arXiv 2504.14960."""
    inner = dp * cp * tp
    if inner % ep:
        raise base.BadInput(f"ep {ep}: dp {dp} x cp {cp} x tp {tp} = {inner} ranks of a stage are no multiple of it")
    attention = np.arange(pp * inner).reshape(pp, dp, cp, tp)
    experts = attention.reshape(pp, inner // ep, ep)
    along = lambda mesh, axis: np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist()  # noqa: E731
    groups = {name: along(attention, axis) for axis, name in enumerate(("pp", "dp", "cp", "tp"))}
    return groups | {"edp": along(experts, 1), "ep": along(experts, 2)}


def folded_groups(**sizes):
    """{name: this rank's process group} of fold(**sizes), None where it has size 1. All ranks call it."""
    return {name: dist.new_subgroups_by_enumeration(lists)[0] if len(lists[0]) > 1 else None
            for name, lists in fold(**sizes).items()}


# ==== 8. Study: do experts specialise? ================================================================================

DOMAINS = ("source", "documentation", "numbers", "base64")


@functools.cache
def domain_texts(size_=2**18, seed=0):
    """{domain: bytes (size_,) uint8}: the standard library's source without its documentation strings, those strings,
    decimal numbers, and random bytes in base64."""
    generator = np.random.default_rng(seed)
    source, documentation = [], []
    for path in filtering.source_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = [ast.get_docstring(node, clean=False) for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        for part in filter(None, found):
            text = text.replace(part, "")
            documentation.append(part)
        source.append(text)
        if min(sum(map(len, source)), sum(map(len, documentation))) > size_:
            break
    numbers = ", ".join(str(x) for x in np.round(generator.lognormal(3, 3, size_ // 5), 3))
    texts = "\n".join(source), "\n".join(documentation), numbers, base64.b64encode(generator.bytes(size_)).decode()
    return {name: np.frombuffer(text.encode()[:size_], np.uint8) for name, text in zip(DOMAINS, texts, strict=True)}


def windows(text, count, T, generator):
    """count windows of T + 1 bytes at random places: inputs and targets (count, T) int64."""
    starts = generator.integers(0, len(text) - T - 1, count)
    block = torch.from_numpy(text[starts[:, None] + np.arange(T + 1)].astype(np.int64))
    return block[:, :-1], block[:, 1:]


def mixed_batch(texts, count, T, generator):
    """count windows of each domain, one domain after the other: inputs, targets (domains count, T)."""
    pairs = [windows(text, count, T, generator) for text in texts]
    return [torch.cat(side) for side in zip(*pairs, strict=True)]


def mutual_information(counts):
    """(domains, E) -> bits that a token's expert tells of its domain; 2 for four domains told apart."""
    p = counts.double() / counts.sum()
    independent = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return (p * (p / independent).log2()).nan_to_num(0).sum().item()


def of_micro_batches(routing, count):
    """The Routing of each of `count` equal parts of the tokens."""
    return [Routing(*parts) for parts in zip(*(t.chunk(count) for t in routing), strict=True)]


class Found(NamedTuple):
    """Of a run of the study, on text that it was not trained on: nats a byte; bits of mutual information and
    max_violation (MaxVio, arXiv 2408.15664), means over layers; and its parameters."""

    loss: float
    bits: float
    violation: float
    parameters: int


def train_on_domains(kind, seed, steps, batch=4, T=64, **options):
    """Train a small GPT with experts on four domains, a micro-batch of each in every step; a Found.

    kind: how Balance counts. The micro-batches go through the model as one batch, so that the two kinds of counting see
    the same numbers: "micro" is the mean of their losses, each with its own f."""
    torch.manual_seed(seed)
    config = base.GPTConfig(256, T, 2, 4, 64)
    model = with_experts(base.GPT(config), **dict(hidden=64, experts=8, top_k=2) | options)
    balance = Balance(model, "none" if kind == "micro" else kind, coefficient=3e-2, rate=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = np.random.default_rng(seed)
    texts = [text[: len(text) * 3 // 4] for text in domain_texts().values()]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (steps - step) / (steps / 2))
        x, y = mixed_batch(texts, batch, T, generator)
        loss = cce.linear_cross_entropy(model(x), model.classifier, y)
        if kind == "micro":
            parts = [part for layer in balance.layers for part in of_micro_batches(layer.routing, len(texts))]
            loss = loss + balance.coefficient * sum(map(balance_loss, parts)) / len(texts)
        (loss + balance.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        balance.step()
    generator, others = np.random.default_rng(1), [text[len(text) * 3 // 4 :] for text in domain_texts().values()]
    x, y = mixed_batch(others, 64, T, generator)
    loss = cce.linear_cross_entropy(model(x), model.classifier, y).item()  # with gradients, so that routings are kept
    tables = []
    for layer in balance.layers:
        experts = layer.take_routing().experts.view(len(others), -1, layer.top_k)  # (domains, tokens, K)
        tables.append(counts_of(experts, layer.experts))  # (domains, E)
    bits, uneven = map(mutual_information, tables), (max_violation(t.sum(0)).item() for t in tables)
    return Found(loss, statistics.mean(bits), statistics.mean(uneven), sum(map(torch.numel, model.parameters())))


# ==== 9. Checks =======================================================================================================


def written_out(x, router, up, down, top_k, gate="softmax", kept=None):
    """The layer as a sum over tokens: x (N, D), router (E, D), up (E F, D), down (E D, F) -> (N, D). kept (N, K) bool:
    which choices are not dropped."""
    E, D = router.shape
    up, down = up.view(E, -1, D), down.view(E, D, -1)
    rows = []
    for n, token in enumerate(x):
        scores = (router @ token).softmax(0) if gate == "softmax" else (router @ token).sigmoid()  # (E,)
        worth, best = scores.topk(top_k)
        worth = worth / worth.sum() if top_k > 1 else worth
        rows.append(0 * token)
        for k, e in enumerate(best.tolist()):
            if kept is None or kept[n, k]:
                rows[-1] = rows[-1] + worth[k] * (down[e] @ F.gelu(up[e] @ token))
    return torch.stack(rows)


def check_routing(N=40, E=7, seed=0):
    """Gates by their formulas; a bias changes who is chosen, not what it is worth; capacity drops the last; the losses
    by theirs, 1 if all is equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, E, generator=generator, dtype=torch.float64)
    bias = torch.randn(E, generator=generator, dtype=torch.float64)
    for gate, K in itertools.product(("softmax", "sigmoid"), (1, 3)):
        for b in (None, bias):
            routing = route(logits, K, gate, b)
            scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
            want = (scores if b is None else scores + b).topk(K).indices
            require(torch.equal(routing.experts, want), f"{gate}, top {K}: other experts than the best")
            worth = scores.gather(1, want)
            worth = worth / worth.sum(1, keepdim=True) if K > 1 else worth
            torch.testing.assert_close(routing.weights, worth)
            torch.testing.assert_close(routing.scores.sum(1), torch.ones(N, dtype=torch.float64))
    share = torch.stack([(routing.experts == e).double().sum() for e in range(E)]) / routing.experts.numel()
    torch.testing.assert_close(balance_loss(routing), E * (share * routing.scores.mean(0)).sum())
    torch.testing.assert_close(z_loss(routing), logits.exp().sum(1).log().square().mean())
    even = Routing(logits, torch.full((E, E), 1 / E), torch.arange(E).unsqueeze(1), None)
    torch.testing.assert_close(balance_loss(even), torch.tensor(1.0))
    experts = torch.randint(E, (N, 2), generator=generator)
    for capacity in (None, 5):
        order, taken = order_by_expert(experts, E, capacity), [0] * E
        for choice, e in enumerate(experts.flatten().tolist()):  # as they come
            kept = capacity is None or taken[e] < capacity
            place = order.place.flatten()[choice].item()
            require(place == (order.begin[e] + taken[e] if kept else -1), f"capacity {capacity}: choice {choice}")
            require(not kept or order.choice[place] == choice, f"capacity {capacity}: choice {choice} is not there")
            taken[e] += kept
        require(order.begin.diff().tolist() == taken, f"capacity {capacity}: wrong counts")


def check_products(device="cpu", dtypes=(torch.float32, torch.bfloat16), seed=0):
    """The kernels, where Triton is, against the loop in fp64, by the three-way rule: experts without rows and with more
    than a tile, sizes that no tile divides; rows that are copied, summed, left out."""
    if not HAS_TRITON:
        return
    generator = torch.Generator().manual_seed(seed)
    sizes = [((0, 5, 33, 1, 0, 40), 40, 72), ((19, 0, 0), 32, 64), ((64, 64), 64, 32)]
    sizes += [] if INTERPRETED else [((130, 0, 70), 256, 320)]  # whole tiles of a GPU, by descriptors
    for counts, M, K in sizes:
        rows = Rows(torch.tensor((0, *itertools.accumulate(counts)), device=device))
        R, E = sum(counts), len(counts)
        random = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
        x, dy, W, weights, dz = random(R, K), random(R, M), random(E * M, K), random(25, 2), random(25, K)
        index = torch.randint(-1, R, (25, 2), generator=generator).to(device)
        for dtype in dtypes:
            x_, dy_, W_, dz_ = (t.to(dtype) for t in (x, dy, W, dz))
            cases = {
                "product": (experts_product, (x_, W_, rows)),
                "transposed": (functools.partial(experts_product, transposed=True), (dy_, W_, rows)),
                "gradient": (experts_gradient, (dy_, x_, rows)), "gather": (gather_rows, (x_, index)),
                "weighted gather": (gather_rows, (x_, index, weights)), "dots": (dot_rows, (x_, index, dz_)),
            }
            for name, (function, arguments) in cases.items():
                wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
                exact = function(*wide, backend="torch")
                got, peer = (function(*arguments, backend=backend) for backend in ("triton", "torch"))
                # As in 02; the interpreter truncates to bf16, which is a rounding more.
                slack = 2e-6 if dtype == torch.float32 else 4e-3 if INTERPRETED else 1e-3
                cce.require_as_good(f"{name}, {dtype}, rows {counts}", got, peer, exact, slack)


def check_layer(N=30, D=8, E=5, seed=0):
    """Output and all gradients equal the written-out sum in fp64, with each gate; BigMac's layer is that at its width;
    with a large capacity nothing changes, with a small one exactly the dropped choices are missing."""
    torch.manual_seed(seed)
    for K, gate, bottleneck in ((1, "softmax", None), (2, "sigmoid", None), (2, "softmax", 4)):
        moe, x = MoE(D, 12, E, K, gate, bottleneck=bottleneck).double(), torch.randn(N, D, dtype=torch.float64)
        for p in moe.parameters():
            p.data.normal_()
        x.requires_grad_()
        leaves, dy = [x, *moe.parameters()], torch.randn(N, D, dtype=torch.float64)
        for capacity in (None, float(E), 0.7):
            moe.capacity = capacity
            got = moe(x)
            chosen, limit = moe.take_routing().experts, capacity and capacity_of(capacity, N, K, E)
            kept = order_by_expert(chosen, E, limit).place >= 0
            gone = 1 - kept.double().mean().item()
            require((gone > 0) == (capacity == 0.7) and abs(moe.dropped - gone) < 1e-12,
                    f"capacity {capacity}: {moe.dropped:.3f} reported as dropped, {gone:.3f} were")
            if bottleneck:  # the router sees x, experts what is narrowed: one wide input, with zeros in the matrices
                narrow, router = torch.cat((moe.narrow(x), x), 1), F.pad(moe.router, (bottleneck, 0))
                up = F.pad(moe.up.weight, (0, D))
                down = F.pad(moe.down.weight.view(E, bottleneck, -1), (0, 0, 0, D)).flatten(0, 1)
                want = moe.widen(written_out(narrow, router, up, down, K, gate, kept)[:, :bottleneck])
            else:
                want = written_out(x, moe.router, moe.up.weight, moe.down.weight, K, gate, kept)
            pair = [dict(enumerate((y, *torch.autograd.grad(y, leaves, dy)))) for y in (got, want)]
            parallel.compare(f"layer, top {K}, {gate}, capacity {capacity}", *pair)
    parallel.must_raise("top_k 3 of 2", lambda: MoE(8, 8, 2, 3))
    parallel.must_raise("no forward pass", MoE(8, 8, 2).take_routing)
    parallel.must_raise("no loss()", Balance(MoE(8, 8, 2)).step)


# Loads that test expert parallelism: ({expert: bias of the choice}, top_k, tokens of a rank by its number and theirs).
CASES = {
    "uniform": ({}, 2, lambda r, n: 9 + r),
    "a hot expert": ({0: 0.15}, 2, lambda r, n: 12),
    "an expert without tokens": ({3: -9.0}, 2, lambda r, n: 10),
    "a rank without tokens": ({}, 2, lambda r, n: 0 if r == n - 1 else 11),
    "all tokens to one expert": ({1: 9.0}, 1, lambda r, n: 8 + 2 * r),
    "no tokens at all": ({}, 2, lambda r, n: 0),
}
LLEP = functools.partial(least_loaded, least=2, imbalance=1.05)  # for loads as small as those of the checks


def as_in_bf16(x):
    """Values that every dtype has: routing in bf16 chooses what it chooses in fp64."""
    return x.bfloat16().double()


def layer_of_ranks(case, dtype, policy, group=None, D=8, hidden=12, E=8):
    """(serial, parallel) {name: tensor} of this rank's output, gradients of its tokens, of its experts, and of the
    router summed over ranks; and the parallel layer."""
    n, me, group = dist.get_world_size(), dist.get_rank(), group or mesh(dp=dist.get_world_size()).dp
    bias, K, tokens = CASES[case]
    torch.manual_seed(0)
    counts = [tokens(r, n) for r in range(n)]
    x, dy = (as_in_bf16(torch.randn(sum(counts), D)) for _ in range(2))
    weights = [as_in_bf16(torch.randn(*shape)) for shape in ((E, D), (E * hidden, D), (E * D, hidden))]
    mine = slice(sum(counts[:me]), sum(counts[: me + 1]))
    found = []
    for cut in (False, True):
        moe = MoE(D, hidden, E, K).to(here(), dtype)
        for p, value in zip((moe.router, moe.up.weight, moe.down.weight), weights, strict=True):
            p.data.copy_(value)
        for e, value in bias.items():
            moe.bias[e] = value
        if cut:
            expert_parallel(moe, group, policy)
        part = mine if cut else slice(None)
        inputs = x[part].to(here(), dtype).requires_grad_()
        y = moe(inputs)
        y.backward(dy[part].to(here(), dtype))
        up, down = moe.up.weight.grad, moe.down.weight.grad
        if cut:
            router = parallel.all_reduce(moe.router.grad, group)
            found.append(dict(y=y.detach(), dx=inputs.grad, up=up, down=down, router=router))
        else:
            found.append(dict(y=y[mine].detach(), dx=inputs.grad[mine], up=up.chunk(n)[me], down=down.chunk(n)[me],
                              router=moe.router.grad))
    return *found, moe


@on_ranks
def check_expert_parallel():
    """Plain and least-loaded expert parallelism equal the serial layer: y, dX, dW to 1e-12 in fp64 for each of CASES,
    and with a hot expert by the three-way rule in fp32 and bf16 (kernels, on a GPU). Plain lends nothing, least-loaded
    lends where an expert is hot."""
    worst = 0.0
    for policy, case in itertools.product(("ep", LLEP), CASES):
        name = f"{'EP' if policy == 'ep' else 'LLEP'}, {case}"
        sent.clear()
        serial, mine, moe = layer_of_ranks(case, torch.float64, policy)
        worst = max(worst, parallel.compare(name, nonempty(mine), nonempty(serial)))
        if policy == "ep" or case in ("a hot expert", "all tokens to one expert"):
            require(lends(moe) == (policy != "ep"), f"{name}: weights are lent: {lends(moe)}")
        if case == "a hot expert":
            for dtype in (torch.float32, torch.bfloat16):
                peer, got, _ = layer_of_ranks(case, dtype, policy)
                parallel.as_good(name, dtype, got, peer, serial)
    parallel.must_raise("over", lambda: expert_parallel(MoE(8, 8, 2 * dist.get_world_size() + 1), mesh(
        dp=dist.get_world_size()).dp))
    parallel.must_raise("policy is", lambda: expert_parallel(moe, None, "best"))
    return worst


def lends(moe):
    """Whether the layer's last plan had a rank compute an expert of another."""
    plan = moe.exchange.plan
    return bool((plan > at_home(plan.sum(0), len(plan))).any())


def nonempty(tensors):
    return {name: t for name, t in tensors.items() if t.numel()}


def lone_rank():
    """A rank without tokens beside others, forward and backward."""
    layer_of_ranks("a rank without tokens", torch.float64, "ep", dist.group.WORLD)


def check_empty_rank():
    """A rank without tokens takes part in every exchange: else the others wait for it."""
    try:
        in_ranks("lone_rank", 2, device="cpu", timeout=5, stage=globals())
    except OSError as error:
        raise AssertionError(f"a rank waits for one without tokens: {error}") from None


@on_ranks
def check_balance():
    """The mean over ranks of the gradients of the global-batch loss is the serial loss's gradient; that of Switch's
    loss of each rank's tokens is another. Two micro-batches: the second sees all counts. Biases: alike everywhere."""
    n, me, E, D, N = dist.get_world_size(), dist.get_rank(), 6, 8, 20
    torch.manual_seed(1)
    x = torch.randn(n, N, D, dtype=torch.float64) + torch.randn(n, 1, D, dtype=torch.float64)  # ranks' texts differ
    moe = MoE(D, 8, E, 2).double()
    moe.router.data.normal_()
    x, moe = x.to(here()), moe.to(here())

    def gradient(loss):
        return torch.autograd.grad(loss, moe.router)[0]

    routing = lambda part: route(part @ moe.router.T, 2)  # noqa: E731
    want = gradient(balance_loss(routing(x.flatten(0, 1))))
    results = {}
    for kind in ("global", "micro"):
        balance = Balance(moe, kind, mesh(dp=n).dp, coefficient=1.0, z=0.0)
        moe(x[me])
        results[kind] = parallel.all_reduce(gradient(balance.loss()), mesh(dp=n).dp) / n
    worst = parallel.compare("balance", dict(router=results["global"]), dict(router=want))
    apart = (results["micro"] - want).norm() / want.norm()
    require(apart > 0.05, f"Switch's loss of each rank differs by {apart:.2f} only: this proves nothing")
    balance = Balance(moe, "global", mesh(dp=n).dp, coefficient=1.0, z=0.0)
    halves = x[me].chunk(2)
    for i, half in enumerate(halves):
        moe(half)
        seen = x[:, : N // 2 * (i + 1)].flatten(0, 1)
        expected = balance_loss(routing(half), counts_of(routing(seen).experts, E))
        torch.testing.assert_close(balance.loss(), expected)
    torch.testing.assert_close(balance.step(), max_violation(counts_of(routing(x.flatten(0, 1)).experts, E)[None]))
    moe(x[me])  # another step counts anew
    torch.testing.assert_close(balance.loss(), balance_loss(routing(x[me]), counts_of(routing(
        x.flatten(0, 1)).experts, E)))
    balance = Balance(moe, "bias", mesh(dp=n).dp, z=0.25, rate=0.5)
    moe(x[me])
    torch.testing.assert_close(balance.loss(), 0.25 * z_loss(routing(x[me])))
    balance.step()
    loads = counts_of(routing(x.flatten(0, 1)).experts, E).double()
    torch.testing.assert_close(moe.bias, 0.5 * (loads.mean() - loads).sign())
    return worst


def hot_loads(E, share, hot, total=10**6):
    """(E,) rows when `hot` experts, the first ones, get `share` of all, evenly, and the others the rest."""
    loads = np.full(E, round((1 - share) * total / (E - hot)))
    loads[:hot] = round(share * total / hot)
    return loads


# 128 experts on 8 GPUs, one of them hot: its share of the tokens, and the paper's measured speed-up of the layer.
PUBLISHED = {0.3: 2.41, 0.5: 3.48, 0.8: 5.26, 0.95: 6.11}


def load_ratio(loads, n, **options):
    """Largest load of a rank by plain expert parallelism over that by least_loaded."""
    return at_home(loads, n).sum(1).max() / least_loaded(loads, n, **options).sum(1).max()


def check_least_loaded(seeds=60):
    """Over random loads: every row is computed once; never a larger load than plain EP's; nothing moves when balanced;
    where chunks may be small, no load is above the limit, and no rank lends that is within it. The table of who sends
    what adds up, and sends no row away that its rank could compute. The ratios of loads for one hot expert."""
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        n = int(generator.choice([2, 4, 8]))
        E = n * int(generator.integers(1, 9))
        chances = generator.dirichlet(np.full(E, 10 ** generator.uniform(-1.5, 1.5)))
        counts = np.stack([generator.multinomial(generator.integers(0, 5000), chances) for _ in range(n)])
        loads = counts.sum(0)
        plain = at_home(loads, n)
        for least in (1, 64, 1024):
            plan = least_loaded(loads, n, least=least)
            top, mean = plan.sum(1).max(), loads.sum() / n
            require((plan.sum(0) == loads).all() and (plan >= 0).all(), f"seed {seed}: rows are lost, or done twice")
            require(top <= plain.sum(1).max(), f"seed {seed}: a load of {top}, plain EP's is {plain.sum(1).max()}")
            acts = plain.sum(1).max() >= 1.3 * mean
            require(acts or (plan == plain).all(), f"seed {seed}: weights move although loads are even")
            if acts and least == 1:
                lending = ((plain > plan).any(1) & (plain.sum(1) <= math.ceil(mean))).any()
                require(top <= math.ceil(mean), f"seed {seed}: a load of {top}, the mean is {mean}")
                require(not lending, f"seed {seed}: a rank lends that has not too much")
            rows = table(counts, plan)
            require((rows.sum(1) == counts).all() and (rows.sum(0) == plan).all() and (rows >= 0).all(),
                    f"seed {seed}: the table does not add up")
            diagonal = rows[np.arange(n), np.arange(n)]
            require((diagonal == np.minimum(counts, plan)).all(), f"seed {seed}: rows travel that need not")
    ratios = [load_ratio(hot_loads(128, share, 1), 8) for share in PUBLISHED]
    require(np.allclose(ratios, (3.06, 4.47, 6.59, 7.65), atol=0.01), f"one hot expert of 128 on 8 GPUs: {ratios}")


def train_forged(policy, layout=None, dtype=torch.float32, steps=3, stash=False, D=8, hidden=12, rule=None, **options):
    """{name: this rank's experts' weights after some steps of SGD (or a rule) on all ranks' tokens; dx: the last step's
    gradient of its tokens}. layout None: by torch, on one process; policy None: forged, on one process."""
    n, me = dist.get_world_size(), dist.get_rank()
    group, E = mesh(dp=n).dp, 8
    torch.manual_seed(0)
    moe = MoE(D, hidden, E, 2).to(here(), dtype)
    for p in moe.parameters():
        p.data.copy_(as_in_bf16(torch.randn(p.shape)))
    moe.bias[0] = 0.15  # a hot expert
    x, dy = (as_in_bf16(torch.randn(steps, n, 14, D)).to(here(), dtype) for _ in range(2))
    moe.router.requires_grad_(False)  # of this rank's tokens alone
    origins = expert_parallel(moe, group, policy) if policy else {}
    if layout:
        rule = rule or forging.SGD(momentum=0.9)
        handle = forging.forge(moe, rule, layout, origins=origins, data_parallel=1, **options)
    else:
        optimizer = torch.optim.SGD([moe.up.weight, moe.down.weight], 0.1, momentum=0.9)
    mine, lent = me if policy else slice(None), 0
    for t in range(steps):
        if layout:
            handle.stash() if stash else handle.arm(0.1, t + 1)
        inputs = x[t, mine].flatten(0, -2).clone().requires_grad_()
        moe(inputs).backward(dy[t, mine].flatten(0, -2))
        if not layout:
            optimizer.step()
            optimizer.zero_grad()
        elif stash:
            handle.release(0.1, t + 1)
        require(moe.up.weight.grad is None, "a gradient is left")
        lent += bool(policy) and lends(moe)
    require(bool(lent) == (policy is LLEP), f"weights were lent in {lent} steps")
    masters = [handle[f"{name}.weight"].tensors.get("master") for name in ("up", "down")] if layout else [None, None]
    weights = [moe.up.weight.detach(), moe.down.weight.detach()]
    found = {name: w if m is None else m for name, w, m in zip(("up", "down"), weights, masters, strict=True)}
    if policy:
        return found | dict(dx=inputs.grad)
    return {name: w.chunk(n)[me] for name, w in found.items()} | dict(dx=inputs.grad.chunk(n)[me])


@on_ranks
def check_forged_experts():
    """FORGE on experts, plain and least-loaded: armed, by each of 04's rungs, and by kept factors. Three steps of SGD
    in fp32, and the last dX (which must be of the old weights), are as close to fp64's as torch's on one process; with
    fp32 masters of bf16 weights as close as those of one forged process. Adam-mini, of experts larger than a slab, by
    any rung, is as in one slab."""
    exact, peer = (train_forged(None, dtype=dtype) for dtype in (torch.float64, torch.float32))
    masters = train_forged(None, "master")
    for policy, stash in itertools.product(("ep", LLEP), (False, True)):
        name = f"forged experts, {'EP' if policy == 'ep' else 'LLEP'}, stash {stash}"
        parallel.as_good(name, torch.float32, train_forged(policy, "fp32", stash=stash), peer, exact)
        parallel.as_good(f"{name}, masters", torch.float32, train_forged(policy, "master", stash=stash), masters, exact)
    for rung, backend in forging.rungs(here()):
        found = train_forged("ep", "fp32", rung=rung, backend=backend)
        parallel.as_good(f"forged experts, {rung}, {backend}", torch.float32, found, peer, exact)
    wide = dict(D=128, hidden=320)  # larger than a slab; one of twice its rows ends within an expert
    exact, peer = train_forged(None, dtype=torch.float64, **wide), train_forged("ep", "fp32", **wide)
    for rows in (128, 256):
        found = train_forged("ep", "fp32", rung="slab", slab=4 * rows * 256, **wide)
        parallel.as_good(f"forged experts, slabs of {rows} rows", torch.float32, found, peer, exact)
    wide |= dict(layout="fp32", rule=forging.AdamMini(weight_decay=0.1), steps=1)
    want = train_forged("ep", **wide)
    for rung, backend in forging.rungs(here()):
        found = train_forged("ep", **wide, rung=rung, backend=backend, slab=4 * 128 * 256)
        parallel.compare(f"Adam-mini of experts, {rung}, {backend}", found, want, 1e-5)


def check_recompute():
    """Recomputed layers: the same gradients, and every token counted once."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = with_experts(parallel.tiny(1), hidden=16, experts=4, top_k=2).double()
        tokens, targets = parallel.tiny_tokens(model)
        if again:
            parallel.recompute(model)
        balance = Balance(model)
        loss = parallel.serial_loss(model, tokens, targets) + balance.loss()
        loss.backward()
        left = [layer.routing for layer in balance.layers]
        require(left == [None] * len(left), "tokens were counted again in backward")
        found.append(parallel.gradients(model))
    parallel.compare("recomputed", *reversed(found))


@on_ranks
def check_folding():
    """Lists of ranks by hand; then a GPT whose attention is cut by tensor, sequence (and, from 4 ranks on, context)
    parallelism while its experts are spread over all of these ranks: gradients equal the serial model's."""
    groups = fold(tp=2, cp=2, dp=2, ep=4)
    require(groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]] and groups["cp"][0] == [0, 2], f"attention: {groups}")
    require(groups["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and groups["edp"][0] == [0, 4], f"experts: {groups}")
    require(fold(tp=2, dp=2, ep=2, pp=2)["edp"] == [[0, 2], [1, 3], [4, 6], [5, 7]], "a stage's copies of experts")
    parallel.must_raise("no multiple", lambda: fold(tp=2, dp=3, ep=4))
    n = dist.get_world_size()
    cp = 2 if n % 4 == 0 else 1
    build = lambda: with_experts(parallel.tiny(n), hidden=16, experts=2 * n, top_k=2)  # noqa: E731
    tokens, targets = parallel.tiny_tokens(parallel.tiny(n), 1)
    want = build()
    parallel.serial_loss(want, tokens, targets).backward()
    model, attention = build(), mesh(tp=n // cp, cp=cp)
    experts = folded_groups(tp=n // cp, cp=cp, ep=n)["ep"]
    parallel.tensor_parallel(model, attention.tp, sequence=True)
    if cp > 1:
        parallel.context_parallel(model, attention.cp)
    expert_parallel(model, experts)
    part = functools.partial(parallel.split_sequence, group=attention.cp)
    loss = parallel.vocab_parallel_cross_entropy(
        model(part(tokens)), model.classifier, part(targets), attention.tp, model.config.vocab, sequence=True,
        reduction="sum")
    (loss / parallel.global_count(part(targets) != -100, attention.cp)).backward()
    found = {}
    for name, p in model.named_parameters():
        expert = ".moe.up." in name or ".moe.down." in name
        group = None if expert else experts if "router" in name else attention.cp
        gradient = parallel.all_reduce(p.grad, group)
        pieces = [gradient]
        if hasattr(p, "cut"):
            over = experts if expert else attention.tp
            pieces = [None] * size(over)
            dist.all_gather_object(pieces, gradient.cpu(), group=over)
        found[name] = torch.cat(pieces, getattr(p, "cut", 0)).to(here())
    worst = parallel.compare("folded", found, parallel.gradients(want))
    if n % 4 == 0:  # two copies of the experts, each spread over half of the ranks
        groups, serial = folded_groups(dp=n, ep=n // 2), MoE(8, 12, 2 * n, 2).to(here()).double()
        moe = copy.deepcopy(serial)
        expert_parallel(moe, groups["ep"])
        torch.manual_seed(1)
        x, dy = torch.randn(2, n, 9, 8, dtype=torch.float64).to(here())
        for layer, part in ((serial, slice(None)), (moe, dist.get_rank())):
            layer(x[part]).backward(dy[part])
        start, half = rank_in(groups["ep"]), n // 2
        for name in ("up", "down"):
            gradient = parallel.all_reduce(getattr(moe, name).weight.grad, groups["edp"])
            mine = getattr(serial, name).weight.grad.chunk(half)[start]
            worst = max(worst, parallel.compare("copies of experts", dict(w=gradient), dict(w=mine)))
    return worst


def _biased_weights(logits, top_k, gate="softmax", bias=None, route=route):
    """The bias that balances also scales the outputs."""
    routing = route(logits, top_k, gate, bias)
    return routing if bias is None else routing._replace(weights=routing.weights + bias[routing.experts])


def _always_normalised(logits, top_k, gate="softmax", bias=None, route=route):
    """With one expert a token the weight is 1, and the router learns nothing."""
    routing = route(logits, top_k, gate, bias)
    return routing._replace(weights=routing.weights / routing.weights.sum(1, keepdim=True))


class _KeptGradients(Loans):
    def give_back(self, dY, X, dtype):
        """A borrower sends zeros."""
        return super().give_back(torch.zeros_like(dY), X, dtype)


class _LeavesEarly(ExpertParallel):
    def __call__(self, x, order, moe):
        """No tokens, nothing to do."""
        return super().__call__(x, order, moe) if len(x) else (x, order)


def _changed_weight(x, own, borrowed, handles, work, transposed=False, make=products):
    """dX is made with the new weights, or what comes to the same: with other ones than forward used."""
    return make(x, own if not transposed else own * 1.001, borrowed, handles, work, transposed)


def _before_the_others(state, dY, X, work, parts, arriving, dtype, update=expert_update):
    """The step is taken before the borrowers' gradients are there."""
    wait_for(arriving)
    return update(state, dY, X, Work(work.own, work.count), parts[:0], [], dtype)


class _FirstExpert(ExpertFactor):
    def write(self, state, out, top, add):
        """Of a slab with several experts only the first one's gradient is made."""
        M = self.dY.shape[1]
        super().write(state, out.zero_()[: M - top % M], top, add)


def _in_order(counts, plan, table=table):
    """Rows are dealt out by rank, wherever they are."""
    return np.stack([table(np.roll(counts, 1, 0), plan)[(r + 1) % len(plan)] for r in range(len(plan))])


def _of_attention(fold=fold, **sizes):
    """Experts are spread over the tensor-parallel ranks only."""
    groups = fold(**sizes)
    return groups | {"ep": groups["tp"], "edp": groups["cp"]}


# name: (the check that must catch it, what is replaced, the bug). loads_at_first, global_counts and recording are
# functions so that a bug can take their place.
BREAKS = {
    "biased-weights": (check_routing, "route", _biased_weights),
    "always-normalised": (check_routing, "route", _always_normalised),
    "unweighted": (check_layer, "gather_rows", lambda source, index, weights=None, gather=gather_rows:
                   gather(source, index)),
    "ignore-pending": (check_least_loaded, "loads_at_first", lambda plain: [0] * len(plain)),
    "in-order": (check_least_loaded, "table", _in_order),
    "counted-twice": (check_recompute, "recording", torch.is_grad_enabled),
    "leaves-early": (check_empty_rank, "ExpertParallel", _LeavesEarly),
    "local-f": (check_balance, "global_counts", lambda counts, group: counts),
    "kept-gradients": (check_expert_parallel, "Loans", _KeptGradients),
    "new-weight": (check_forged_experts, "products", _changed_weight),
    "first-expert": (check_forged_experts, "ExpertFactor", _FirstExpert),
    "early-step": (check_forged_experts, "expert_update", _before_the_others),
    "unfolded": (check_folding, "fold", _of_attention),
}
CHECKS = [check_expert_parallel, check_balance, check_forged_experts, check_folding]  # on ranks
BY_ONE = [check_routing, check_layer, check_least_loaded, check_recompute, check_empty_rank]
BY_ONE += [check_products] * HAS_TRITON


# ==== 10. Measurements ================================================================================================


def routing_of(experts, E):
    """A Routing to these experts (N, K), all of equal weight."""
    weights = torch.full(experts.shape, 1 / experts.shape[1], device=experts.device)
    return Routing(None, experts.new_zeros(len(experts), E, dtype=torch.float32), experts, weights)


def even_choice(N, K, E):
    """(N, K): every expert equally often."""
    return torch.arange(N * K, device=here()).view(N, K) % E


def hot_choice(N, K, E, share, hot, seed):
    """(N, K) random, `share` of it among the first `hot` experts, evenly; the rest among all others."""
    generator = torch.Generator(here()).manual_seed(seed)
    random = lambda low, high: torch.randint(low, high, (N, K), generator=generator, device=here())  # noqa: E731
    is_hot = torch.rand(N, K, generator=generator, device=here()) < share
    return torch.where(is_hot, random(0, hot), random(hot, E))


def measure_bytes(N=64, K=2, D=32, F_=48, d=8):
    """What a rank sends in a step: rows forward and back, and their gradients; less of them through a bottleneck; lent
    matrices and their gradients."""
    n, rows = dist.get_world_size(), []
    group, E = mesh(dp=n).dp, 4 * n
    size_ = 4
    even, one = even_choice(N, K, E), torch.zeros(N, 1, dtype=torch.int64, device=here())
    lent, loans, tokens = n - 1, ["weights", "gradients"], ["all-to-all"]  # expert 0 goes to all others
    cases = [
        ("EP: rows sent", "4 N K D b (n-1)/n", "ep", {}, even, 2 * exchange_bytes(N, K, D, n, size_), tokens),
        (f"  at BigMac's width D / {D // d}", "d / D of that", "ep", dict(bottleneck=d), even,
         2 * exchange_bytes(N, K, d, n, size_), tokens),
        ("EP, all to one: rows sent", "4 N D b of n - 1 ranks", "ep", {}, one, 4 * lent * N * D * size_, tokens),
        ("LLEP, all to one: rows sent", "none: they stay", LLEP, {}, one, 0, tokens),
        ("  matrices and gradients", "4 D F b a loan", LLEP, {}, one, 4 * D * F_ * size_ * lent, loans)]
    for claim, formula, policy, options, experts, predicted, kinds in cases:
        torch.manual_seed(0)
        moe = MoE(D, F_, E, experts.shape[1], **options).to(here())
        expert_parallel(moe, group, policy)
        x = torch.randn(N, D, device=here(), requires_grad=True)
        sent.clear()
        moe.mix(x, routing_of(experts, E)).sum().backward()
        mine = torch.tensor(sum(sent[kind] for kind in kinds), device=here())
        total = parallel.all_reduce(mine, group).item()
        whole = total if "to one" in claim or "gradients" in claim else total // n
        require(predicted or not whole, f"{claim}: {whole} bytes")  # the ledger has no ratio to 0
        rows.append(Row(claim, formula, predicted / 1024 or None, whole / 1024, "KiB", (1, 1)))
    return rows


def measure_policies(D=4096, F_=4096, hots=(1, 4, 8), E=32, N=16384, K=2):
    """Forward and backward of a layer of E experts, N tokens a rank: plain and least-loaded expert parallelism, and
    what the loads promise."""
    n, rows = dist.get_world_size(), []
    group, options = mesh(dp=n).dp, dict(device=here(), dtype=torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    x, dy = torch.randn(N, D, **options, requires_grad=True), torch.randn(N, D, **options)
    moe = MoE(D, F_, E, K).to(here(), torch.bfloat16)
    expert_parallel(moe, group, "llep")
    notes = [f"{E} experts of {D} x {F_}, {N} tokens a rank, top {K}, bf16, hot ones on rank 0; forward and backward",
             "(choices are drawn one by one: loads, not a routing; ratio: EP's largest load over the mean)",
             "of choices, on experts            ratio   EP ms   LLEP ms   speed-up   of the ratio   peak memory"]
    for share, hot in [(None, 0), *itertools.product((0.3, 0.5, 0.8, 0.95), hots)]:
        experts = even_choice(N, K, E) if share is None else hot_choice(N, K, E, share, hot, dist.get_rank())
        routing = routing_of(experts, E)
        counts = parallel.all_reduce(counts_of(experts, E), group).cpu().numpy()
        ratio = at_home(counts, n).sum(1).max() / (counts.sum() / n)
        times, peaks = [], []
        for policy in POLICIES.values():
            moe.exchange.policy = policy

            def step(routing=routing):
                moe.zero_grad()
                x.grad = None
                moe.mix(x, routing).backward(dy)

            median = base.bench(step, here(), warmup=2, runs=7).median
            times.append(parallel.all_reduce(torch.tensor(median, device=here()), group, dist.ReduceOp.MAX).item())
            moe.zero_grad()
            x.grad = None
            peak = torch.tensor(float(base.peak_bytes(step, here())), device=here())
            peaks.append(parallel.all_reduce(peak, group, dist.ReduceOp.MAX).item())
        gain, label = times[0] / times[1], "even" if share is None else f"{share:.0%} on {hot}"
        notes.append(f"{label:>23}{ratio:17.2f}{times[0]:8.2f}{times[1]:10.2f}{gain:11.2f}{gain / ratio:15.0%}"
                     f"{peaks[1] / peaks[0]:14.2f}")
        if share is None or share >= 0.8:  # what the loads promise, and what is got of it
            rows.append(Row(f"LLEP, F {F_}, {label}: time", "EP / ratio of loads", times[0] / ratio, times[1], "ms",
                            (0.9, 1.6)))
    return rows, notes


def all_checks(only=None):
    """{check: its fp64 error, if it has one}, on the ranks of this world; of all checks, or of one name."""
    parallel.meet("the first check", parallel.TIMEOUT)
    return {name.replace("_", " "): check() for check, name in base.named(CHECKS, only).items()}


def everything():
    """All checks and measurements of the ranks: (where they ran, fp64 errors, rows, notes)."""
    errors, rows, notes = all_checks(), measure_bytes(), []
    for width in (4096, 14336) if here().type == "cuda" else ():
        more, lines = measure_policies(F_=width)
        rows, notes = rows + more, notes + lines
        torch.cuda.empty_cache()
    return "GPUs, NCCL" if here().type == "cuda" else "the CPU, gloo", errors, rows, notes


def in_turn(ways, rounds=5, calls=4):
    """{way: milliseconds a call}, the median of rounds in which each way has its turn, several calls in a row: clocks
    drift, and the host launches ahead of the device."""
    times = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            several = functools.partial(lambda way: [way() for _ in range(calls)], way)
            times[name].append(base.bench(several, "cuda", warmup=0, runs=2).median / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_products(ledger, R=32768):
    """TFLOP/s of the products over all experts: one launch, the loop, torch's grouped_mm, and one dense product of as
    many FLOPs; on the way forward, for dX and for dW. A star: what experts_product and experts_gradient choose."""
    device, on, worst, slowest = torch.device("cuda"), functools.partial, [0.0] * 3, 0.0
    print(f"\nTFLOP/s of {R} rows over E experts, D = F, bf16; X W^T, dY W, dY^T X; share: of dense, what is taken (*)")
    print(f"{'D':>5}{'E':>5}  {'rows':<10}{'dense':>15}{'grouped_mm':>15}{'loop':>17}{'one launch':>17}{'share':>17}")
    for D in (2048, 4096):
        torch.manual_seed(0)
        x, dy = (torch.randn(R, D, device=device, dtype=torch.bfloat16) for _ in range(2))
        for E, kind in itertools.product((8, 32, 64, 128), ("even", "random", "80 % hot")):
            W = torch.randn(E * D, D, device=device, dtype=torch.bfloat16) * 0.02
            chances = torch.full((E,), 1 / E)
            if kind == "80 % hot":
                chances = torch.tensor([0.8] + [0.2 / (E - 1)] * (E - 1))
            counts = torch.full((E,), R // E) if kind == "even" else torch.bincount(
                torch.multinomial(chances, R, True, generator=torch.Generator().manual_seed(0)), minlength=E)
            begin = F.pad(counts.cumsum(0), (1, 0)).to(device)
            ends, cube, rows = begin[1:].int(), W.view(E, D, D), Rows(begin)
            ways = {
                "dense": (on(torch.mm, x, W[:D].T), on(torch.mm, dy, W[:D]), on(torch.mm, dy.T, x)),
                **{name: (on(experts_product, x, W, rows, backend=backend),
                          on(experts_product, dy, W, rows, True, backend=backend),
                          on(experts_gradient, dy, x, rows, backend=backend))
                   for name, backend in (("loop", "torch"), ("one launch", "triton"))},
            }
            if hasattr(F, "grouped_mm"):
                ways["grouped_mm"] = (on(F.grouped_mm, x, cube.transpose(1, 2), offs=ends),
                                      on(F.grouped_mm, dy, cube, offs=ends), on(F.grouped_mm, dy.T, x, offs=ends))
            times = [in_turn({name: three[i] for name, three in ways.items()}) for i in range(3)]
            chosen = ["loop" if loop_is_faster(R, D, D, E, gradient=i == 2) else "one launch" for i in range(3)]
            cell = lambda name, D=D, times=times, chosen=chosen: " ".join(  # noqa: E731
                f"{2 * R * D * D / 1e9 / t[name]:.0f}{'*' * (name == choice)}" if name in t else "-"
                for t, choice in zip(times, chosen, strict=True))
            over = [t[choice] / t["dense"] for t, choice in zip(times, chosen, strict=True)]
            print(f"{D:>5}{E:>5}  {kind:<10}{cell('dense'):>15}{cell('grouped_mm'):>15}{cell('loop'):>17}"
                  f"{cell('one launch'):>17}{' '.join(f'{1 / ratio:.0%}' for ratio in over):>17}")
            slowest = max(slowest, *(t[choice] / t["loop"] for t, choice in zip(times, chosen, strict=True)))
            if kind == "even":
                worst = [max(pair) for pair in zip(worst, over, strict=True)]
    print()
    for name, ratio, band in zip(("X W^T", "dY W", "dY^T X"), worst, ((0.8, 1.34), (0.8, 1.34), None), strict=True):
        ledger.row(f"even rows, worst {name}: time", "one dense product", 1.0, ratio, "", band)
    ledger.row("all rows, worst product: time", "the loop", 1.0, slowest, "", (0, 1.05))


def study(jobs):
    """{job: Found}, the jobs (label, kind, seed, steps, options) dealt out to the ranks."""
    mine = {job[:3]: train_on_domains(*job[1:4], **job[4]) for job in jobs[dist.get_rank() :: dist.get_world_size()]}
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {job: found for part in parts for job, found in part.items()}


FINE, SMALL = dict(hidden=64, experts=8), dict(bottleneck=16, hidden=248, experts=8)  # of as many parameters


def print_study(seeds, steps, all_kinds):
    """Loss and specialisation by kind of balance, and BigMac's layer beside one of as many parameters."""
    labels = {"no balance": ("none", FINE), "micro-batch": ("micro", FINE), "global batch": ("global", FINE),
              "bias": ("bias", FINE), "  BigMac, global batch": ("global", SMALL)}
    chosen = labels if all_kinds else {name: labels[name] for name in ("micro-batch", "global batch")}
    jobs = [(name, kind, seed, steps, options) for name, (kind, options) in chosen.items() for seed in seeds]
    found = in_ranks("study", min(len(jobs), os.cpu_count() or 1), jobs, device="cpu", timeout=3600, stage=globals())
    print(f"\nstudy: 8 experts, top 2, 2 layers, {steps} steps, seeds {', '.join(map(str, seeds))}; text: "
          f"{', '.join(DOMAINS)}; a micro-batch has one of them")
    print(f"{'balance':<24}{'nats a byte':>20}{'bits of domain':>20}{'MaxVio':>10}{'parameters':>12}")
    for name in chosen:
        runs = [run for (label, *_), run in found.items() if label == name]
        cell = lambda values: f"{statistics.mean(values):.3f} +- {statistics.pstdev(values):.3f}"  # noqa: E731
        print(f"{name:<24}{cell([r.loss for r in runs]):>20}{cell([r.bits for r in runs]):>20}"
              f"{statistics.mean(r.violation for r in runs):>10.2f}{runs[0].parameters:>12,}")
    bits = {name: statistics.mean(run.bits for (label, *_), run in found.items() if label == name) for name in chosen}
    return bits["micro-batch"], bits["global batch"]


def number_of_ranks(args):
    """--ranks. BadInput if nothing is parallel there."""
    if args.ranks < 2:
        raise base.BadInput(f"--ranks {args.ranks}: nothing is parallel there: use 2 or more")
    return args.ranks


def check_all(device, only, args):
    """--check."""
    parallel.check_both(CHECKS, BY_ONE, only, number_of_ranks(args), None, stage=globals())


def body(device, ledger, args):
    ranks = number_of_ranks(args)
    where, errors, rows, notes = in_ranks("everything", ranks, stage=globals())
    for check in (alone := base.named(BY_ONE)):
        base.call_check(check, device)
    names = [*errors, *(name.replace("_", " ") for name in alone.values())]
    print(f"{ranks} processes on {where}; checks passed: {', '.join(names)}\n")
    for name, error in errors.items():
        if error is not None:
            ledger.row(f"{name}: error", "fp64, against serial", 1e-12, error, "", (0, 1))
    for row in rows:
        ledger.row(*row)
    for line in notes:
        print(line)
    print("\n128 experts on 8 GPUs, one expert hot    ratio of EP's largest load to LLEP's   speed-up, published")
    for share, published in PUBLISHED.items():
        ratio = load_ratio(hot_loads(128, share, 1), 8)
        print(f"  {share:.0%} of the choices{ratio:>40.2f}{published:>27.2f} ({published / ratio:.0%})")
    micro, whole = print_study((0, 1, 2) if args.study else (0,), 300 if args.study else 80, args.study)
    ledger.row("bits of domain: global batch", "more than micro-batch", micro, whole, "", (1, math.inf))
    if device.type == "cuda":
        measure_products(ledger)
    else:
        ledger.row("even rows, worst X W^T: time", "one dense product", 1.0, None, "")


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--study", action="store_true", help="all kinds of balance, three seeds: minutes")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python train.py"))


# Exercises
#   1. Let the product kernel gather its rows itself (an index instead of a range): what does it save, and cost?
#   2. Give least_loaded a price for lending: FLOPs saved against bytes sent (4 D F numbers). When is 1024 rows wrong?
#   3. Cut each expert, too (expert tensor parallelism): which collectives join the exchange, and what does fold() say?
