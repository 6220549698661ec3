"""07 - Mixture of experts: each token chooses a few of many MLPs, and a popular one must not hold up all GPUs.

The problem in one number
    A layer with 128 experts on 8 GPUs, where 95 % of the tokens choose the same expert: its GPU has 7.65 times the mean
    work, and the 7 others wait for it. Training can forbid that (a loss, or a bias), at a price: experts that have to
    be used equally in every small batch specialise less. Or the work moves: a rank with time to spare borrows the
    popular expert's weights. This file does both. Experts on many ranks, at home or lent, give the gradients of one
    process that has them all.

The maths                                N tokens of width D, E experts of H hidden units, each token goes to its best K
    s = softmax(W_r x)                                                router W_r (E, D); x (N, D)
    y[n] = sum_k w[n, k] down_e(gelu(up_e(x[n])))                     e: choice k of token n; up_e (H, D), down_e (D, H)
    w[n, k] = the K chosen scores over their sum; where K = 1 the score itself
    balance loss = E sum_e f_e p_e                                    f_e: share of the choices, p_e: mean score of e
  f is a count and has no gradient; p has one. Equal shares give 1.

    n       ranks (above, and in sections 1 to 4: a token)              R       rows: one for each choice, a token's x
    choice  n K + k, the k-th of token n                                place   (N, K), which row a choice has become
    begin   (E + 1,), the first row of each expert, and at the end R    load    rows of an expert, or of a rank
    plan    (n, E), how many rows of each expert each rank computes     (M, C)  a matrix: M outputs, C inputs
    w       weights, in a Routing; all other weights are matrices       NCCL    NVIDIA's messages between GPUs (05)

What is where
    1 the layer, written out, and sorted   2 balance   3 the layer   4 the products of all experts in one launch
    5 expert parallelism: rows travel   6 least-loaded: weights travel   7 the experts' backward pass, and FORGE (04:
    the optimizer's step inside it)   8 folding: attention and experts cut the same ranks differently   9 checks   10 a
    study of what experts learn   11 measurements

How to use it, from elsewhere (train.py does)
    model = with_experts(base.GPT(GPTConfig(..., experts=8, top_k=2)))      every rank the same weights
    origins = expert_parallel(model, group)              group None: one rank has all experts; origins: for 04's forge()
    balance = Balance(model, "global", group)
    loss = part_of_the_mean_loss + balance.loss() * n_tokens_here / n_tokens_of_the_step
    loss.backward()                      experts' gradients are of all ranks' tokens; sum all others over the group
    optimizer.step(); balance.step()

How to launch
    python 07_moe_balance.py                     checks and a study, on two GPUs (NCCL) or two processes of the CPU
    python 07_moe_balance.py --ranks 4           four of them
    python 07_moe_balance.py --study             the study with all kinds of balance, three seeds (on a CPU: minutes)
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
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
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
low_comm = importlib.import_module("06_low_comm_sync")
HAS_TRITON, INTERPRETED, require = base.HAS_TRITON, base.INTERPRETED, base.require
triton, tl, load_tile, dot, tile_at = cce.triton, cce.tl, cce.load_tile, cce.dot, cce.tile_at
on_ranks, in_ranks, here, mesh, Row = parallel.on_ranks, parallel.in_ranks, parallel.here, parallel.mesh, parallel.Row
size, rank_in, sent = parallel.size, parallel.rank_in, parallel.sent


# ==== 1. The layer, written out, and sorted ===========================================================================
#
# A dense MLP puts every token through all of its weights. A mixture has E MLPs, its experts, and a small matrix, the
# router, that picks K of them for each token: weights grow with E, the work of a token with K.
#
#     scores of a token   .50  .30  .15  .05      K = 2: experts 0 and 1, weights .50 / .80 = .625 and .30 / .80 = .375
#                                                 K = 1: expert 0, weight .50
#
# With K = 1 dividing would make the weight 1 whatever the router says: its gradient would be 0, and it would not learn.
# (DeepSeek-V3 takes a sigmoid of each logit instead of the softmax. The rest is similar, but all scores of a token may
# underflow, and then the division is 0 / 0.)


def written_out(x, router, up, down, top_k, kept=None):
    """x (N, D), router (E, D), up (E H, D), down (E D, H) -> (N, D). kept (N, K) bool: not dropped; None: all."""
    E, D = router.shape
    up, down = up.view(E, -1, D), down.view(E, D, -1)
    rows = []
    for n, token in enumerate(x):
        scores = (router @ token).softmax(0)  # (E,)
        w, best = scores.topk(top_k)  # (K,)
        if top_k > 1:
            w = w / w.sum()
        rows.append(0 * token)
        for k, e in enumerate(best.tolist()):
            if kept is None or kept[n, k]:
                rows[n] = rows[n] + w[k] * (down[e] @ F.gelu(up[e] @ token))
    return torch.stack(rows)


class Routing(NamedTuple):
    """logits, scores (N, E); experts (N, K) int64, the best first; weights (N, K), what their outputs are worth."""

    logits: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def route(logits, top_k, bias=None):
    """The Routing of logits (N, E) fp32 or fp64. bias (E,): added where experts are chosen, not in their weights."""
    scores = logits.softmax(-1)  # (N, E)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    experts = ranked.topk(top_k, -1).indices  # (N, K)
    weights = scores.gather(-1, experts)  # (N, K)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(logits, scores, experts, weights)


# A GPU wants few large products, not one for each token. So the choices are sorted by expert: then an expert's rows lie
# together, and all that follows (products, exchanges, loans) works on ranges of rows. Three tokens, K = 2, E = 3:
#
#     chosen        token 0: e2 e0    token 1: e0 e1    token 2: e0 e2       these are choices 0 1, 2 3, 4 5
#     row           0  1  2  3  4  5
#     expert        e0 e0 e0 e1 e2 e2
#     choice        1  2  4  3  0  5                                         sorted by expert; of one, by token
#     begin         0        3  4     6
#     place         token 0: 4 0      token 1: 1 3      token 2: 2 5         the inverse: choice 0 is in row 4
#
# An expert may have a capacity (Switch): choices beyond it are dropped, and the residual stream goes on without. Here a
# capacity of 2 drops choice 4: choice = 1 2 | 3 | 0 5, begin = 0 2 3 5, place = 3 0, 1 2, -1 4.


def order_by_expert(experts, E, capacity=None):
    """experts (N, K) -> choice (R,), the choices that are computed, sorted by expert, and begin (E + 1,). With a
    capacity, an expert drops the choices beyond it, the last tokens' first (and the host waits for the device)."""
    key, choice = experts.flatten().sort(stable=True)  # (N K,)
    begin = torch.searchsorted(key, torch.arange(E + 1, device=key.device))  # (E + 1,)
    if capacity is not None:
        kept = torch.arange(len(key), device=key.device) - begin[key] < capacity  # (N K,)
        choice, begin = choice[kept], F.pad(begin.diff().clamp(max=capacity).cumsum(0), (1, 0))
    return choice, begin


def place_of(choice, experts):
    """choice (R,) of experts (N, K), in any order -> place (N, K), its inverse, -1 for a choice that was dropped."""
    place = experts.new_full((experts.numel(),), -1)
    return place.scatter_(0, choice, torch.arange(len(choice), device=choice.device)).view(experts.shape)


def capacity_of(factor, N, K, E):
    """Choices that an expert takes at most: `factor` times its fair share. arXiv 2101.03961."""
    return math.ceil(round(factor * N * K / E, 9))  # 1.1 x 50 is a little more than 55 in fp64


# ==== 2. Balance: two losses, two ways to count, and a bias ===========================================================
#
# Left alone, a router sends more and more to the experts that learned first. The balance loss E sum_e f_e p_e falls
# when scores p move away from experts whose share f of the choices is large. f may be counted over a micro-batch
# (Switch) or over the global batch, all ranks and micro-batches. Eight tokens, two experts, K = 1; rank 0 happens to
# have source code, rank 1 prose, and each kind of text has found its expert:
#
#               tokens     expert 0's score p_0   chosen     micro-batch's f, loss              global f, loss
#     rank 0    4, code            .8             0 0 0 0    1 0: 2 (1 x .8 + 0 x .2) = 1.6     .5 .5: 2 (.4 + .1) = 1
#     rank 1    4, prose           .2             1 1 1 1    0 1: 2 (0 x .2 + 1 x .8) = 1.6     .5 .5: 2 (.1 + .4) = 1
#
# Over both ranks the loads are even: there is nothing to mend, and the global loss is at 1. The micro-batch's pushes
# code away from the expert that knows code. To do better costs little: f has no gradient, so only E counts have to be
# summed over the ranks, and p may stay local. The mean over ranks of these gradients is that of the global loss.
#
# DeepSeek-V3 hardly needs one: after each step b_e += rate sign(mean load - load_e), a bias added where experts are
# chosen. And the z-loss, mean (log sum exp logits)^2, keeps logits small: where a router works in 16 bits, of large
# ones the differences are lost.


def counts_of(experts, E):
    """(..., N, K) -> (..., E) int64, how often each was chosen."""
    chosen = experts.flatten(-2)
    counts = torch.zeros(*chosen.shape[:-1], E, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(-1, chosen, torch.ones_like(chosen))


def balance_loss(scores, counts):
    """E sum_e f_e p_e, a scalar: f from counts (E,), of these or more tokens, p the mean of scores (N, E). Stacked ones
    (of several layers) are summed. arXiv 2101.03961, 2501.11873."""
    N, E = scores.shape[-2:]
    share = counts.to(scores.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)  # (..., E)
    return E * (share * scores.sum(-2)).sum() / max(1, N)


def z_loss(logits):
    """Mean of logsumexp(logits)^2 of logits (N, E), a scalar; of several layers the sum. arXiv 2202.08906."""
    return logits.logsumexp(-1).square().sum() / max(1, logits.shape[-2])


def global_counts(counts, group):
    """counts (..., E) of this rank -> their sum over the group."""
    return parallel.all_reduce(counts, group)


def max_violation(counts):
    """counts (..., E) -> (...): the fullest expert's load over the mean, less 1 (MaxVio, arXiv 2408.15664)."""
    return counts.amax(-1) / counts.double().mean(-1).clamp(min=1e-9) - 1


class Balance:
    """What a training loop calls: loss() after each forward pass, step() after the optimizer's step.

    kind "global", "micro": balance_loss with f over that batch, times `coefficient`; "bias": no such loss, but step()
    moves each layer's bias by `rate`; "none": neither. All add z times z_loss. With several micro-batches a step, the
    global f is that of those so far: the exact one is known after the last, when the others' backward passes are over.
    group: the ranks whose tokens make the global batch; all of them make the same calls. ValueError on another kind,
    "bias" in 16 bits, and a model without experts."""

    KINDS = ("global", "micro", "bias", "none")

    def __init__(self, model, kind="global", group=None, coefficient=1e-2, z=1e-3, rate=1e-3):
        self.layers = layers_with_experts(model)
        dtype = self.layers[0].bias.dtype
        base.refuse((kind not in self.KINDS, f"kind is {kind!r}: use one of {', '.join(self.KINDS)}"),
                    (kind == "bias" and dtype.itemsize < 4, f"kind is 'bias', but biases are {dtype}, which lose "
                     f"steps of {rate}: keep the model in fp32"))
        self.kind, self.group, self.coefficient, self.z, self.rate = kind, group, coefficient, z, rate
        self.seen = None  # (layers, E) choices of the step so far, of all ranks

    def loss(self):
        """A scalar, the sum over layers of each one's mean over the tokens of its last forward pass, on this rank.
        ValueError if there was none since the last call."""
        routings = [layer.take_routing() for layer in self.layers]  # stacked: fewer kernels, larger ones
        logits, scores, experts, _ = map(torch.stack, zip(*routings, strict=True))  # (layers, N, E), (layers, N, K)
        counts = counts_of(experts, scores.shape[-1])  # (layers, E)
        everywhere = global_counts(counts, self.group)
        self.seen = everywhere if self.seen is None else self.seen + everywhere
        total = self.z * z_loss(logits)
        if self.kind in ("global", "micro"):
            total = total + self.coefficient * balance_loss(scores, self.seen if self.kind == "global" else counts)
        return total

    def step(self, move=True):
        """The end of a step. move: whether the optimizer took it; if not, biases stay. Returns the step's max_violation
        of each layer, (layers,) fp64. ValueError before loss()."""
        base.refuse((self.seen is None, "no loss() since the last step(): call it after each forward pass"))
        seen, self.seen = self.seen, None
        if move and self.kind == "bias":
            for layer, counts in zip(self.layers, seen, strict=True):
                layer.bias += self.rate * (counts.double().mean() - counts).sign()
        return max_violation(seen)


# ==== 3. The layer ====================================================================================================
#
# A forward pass is four steps, and parallelism replaces the third:
#
#     route       x (N, D) -> experts, weights (N, K)         in fp32: rounding a score may change the choice
#     sort        experts -> choice, begin                    section 1
#     exchange    x -> rows of outputs, and their place       run_here(), or section 5's ExpertParallel; within it
#                                                             expert_mlp(), down_e(gelu(up_e(row))): sections 4 and 7
#     combine     y[n] = sum_k w[n, k] row[place[n, k]]       section 4
#
# The matrices of all experts lie one below the other in one parameter: the experts of a rank are a range of its rows.
#
# BigMac (2502.16927) asks why rows travel at width D. It narrows them to d before they are sent and widens what comes
# back: 2 D d weights more a layer, for d / D of the bytes, and experts that work at width d.
#
# Recomputation (05) runs a layer's forward pass again inside backward. Its routing must not be counted a second time.


def recording():
    """Whether this forward pass counts: not one without gradients, nor one that recomputation makes in backward."""
    return torch.is_grad_enabled() and not forging.inside_backward()


class Experts(nn.Module):
    """One matrix (M, C) of each of E experts, of this rank's once they are cut, one below the other: weight (E M, C).
    forged: 04's state, or None."""

    forged = None

    def __init__(self, experts, M, C):
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts * M, C))
        nn.init.normal_(self.weight, std=0.02)


class MoE(nn.Module):
    """x (..., D) of the weights' dtype (fp32, bf16, fp64), or under autocast -> (..., D): E experts of `hidden` units,
    each token through its best top_k.

    Parameters router (E, D), up.weight (E hidden, D), down.weight (E D, hidden); buffer bias (E,), Balance's. capacity:
    how many times its fair share of this rank's choices an expert takes, before it drops them; None: all; may be set
    later. bottleneck: BigMac's d, below D, and then the width of up and down; 0: none. After a forward pass with
    gradients take_routing() gives its Routing, once; until then, or the next pass, it keeps that pass's graph. dropped:
    the share of choices that the last pass dropped. ValueError on what does not fit."""

    def __init__(self, dim, hidden, experts, top_k=2, capacity=None, bottleneck=0):
        super().__init__()
        good = capacity is None or 0 < capacity < math.inf
        base.refuse((hidden < 1, f"hidden is {hidden}: use 1 or more"),
                    (not 1 <= top_k <= experts, f"top_k {top_k} of {experts} experts: use 1 to {experts}"),
                    (not good, f"capacity is {capacity}: use None, or a finite factor above 0"),
                    (not 0 <= bottleneck < dim, f"bottleneck is {bottleneck}: use a width from 1 to {dim - 1}, or 0"))
        width = bottleneck or dim
        self.experts, self.top_k, self.capacity = experts, top_k, capacity
        self.router = nn.Parameter(torch.empty(experts, dim))
        nn.init.normal_(self.router, std=0.02)
        self.register_buffer("bias", torch.zeros(experts))
        self.up, self.down = Experts(experts, hidden, width), Experts(experts, width, hidden)
        self.narrow = nn.Linear(dim, width, bias=False) if bottleneck else nn.Identity()
        self.widen = nn.Linear(width, dim, bias=False) if bottleneck else nn.Identity()
        self.exchange, self.routing, self.dropped = run_here, None, 0.0

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])  # (N, D)
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            routing = route(x.to(wide) @ self.router.to(wide).T, self.top_k, self.bias)
        if recording():
            self.routing = routing
        return self.mix(x, routing).view(shape)

    def mix(self, x, routing):
        """x (N, D) -> (N, D): the weighted sum of the experts' outputs."""
        capacity = self.capacity and capacity_of(self.capacity, len(x), self.top_k, self.experts)
        choice, begin = order_by_expert(routing.experts, self.experts, capacity)
        self.dropped = 1 - len(choice) / routing.experts.numel() if len(x) else 0.0
        x = self.narrow(parallel.as_product(x))
        rows, choice, place = self.exchange(x, choice, begin, routing.experts, self)  # (R, D)
        return self.widen(_Combine.apply(rows, routing.weights, choice, place))

    def __getstate__(self):  # a copy (of weights to be averaged, say) has no pass behind it
        return self.__dict__ | dict(routing=None)

    def take_routing(self):
        """The Routing of the last forward pass that counted. ValueError if there was none since."""
        base.refuse((self.routing is None, "no forward pass with gradients since the last call: call once after each"))
        routing, self.routing = self.routing, None
        return routing


def run_here(x, choice, begin, experts, moe):
    """All experts on this rank. x (N, D), choice (R,), begin (E + 1,), experts (N, K) -> rows (R, D) of outputs, and
    choice and place of the order that they are in (here the one that came in)."""
    place, loans = place_of(choice, experts), Loans(matrices(moe, x.dtype), Rows(begin), len(choice))  # no loans (6)
    return expert_mlp(_Take.apply(x, choice // experts.shape[1], place), moe, loans), choice, place


def matrices(moe, dtype):
    """up (E H, D) and down (E D, H) of this rank's experts, for products in this dtype."""
    return [part.weight.detach().to(dtype) for part in (moe.up, moe.down)]


def layers_with_experts(model):
    """The MoE modules of a model. ValueError if it has none."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    base.refuse((not layers, "the model has no experts: with_experts(model) first"))
    return layers


class Block(base.Block):
    """01's layer with experts in place of its MLP."""

    def mlp(self, x):
        return self.moe(x)


@dataclasses.dataclass(frozen=True)
class GPTConfig(base.GPTConfig):
    """01's, with experts. hidden: units of an expert; 0: 4 dim / top_k, so that a token meets as many weights as in the
    dense model (without a bottleneck). bottleneck: BigMac's width; 0: none."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 0
    bottleneck: int = 0

    def width(self):
        return self.hidden or max(1, 4 * self.dim // max(1, self.top_k))

    def layer_change(self, active):
        """Parameters of a layer's router, `active` of its experts and bottleneck, less those of the dense MLP."""
        weights = 2 * active * (self.bottleneck or self.dim) * self.width()
        return self.experts * self.dim + weights + 2 * self.dim * self.bottleneck - 8 * self.dim**2

    def parameters(self):
        return super().parameters() + self.layers * self.layer_change(self.experts)

    def flops_per_token(self):
        """Of the experts that a token meets."""
        return super().flops_per_token() + 6 * self.layers * self.layer_change(self.top_k)


def activation_change(config, tokens, autocast):
    """Bytes that layers without a bottleneck keep for backward, less those of dense ones (01). Instead of 8 D numbers
    a token: K rows before, within and after an expert; logits, scores and log-sum-exp in fp32; expert, choice and place
    in 64 bits and the weight, with K > 1 also as it was, and their sum. Under autocast the router's input in 32 bits,
    not 16, and no copies of the matrices: backward makes the experts' again."""
    D, K, E, width = config.dim, config.top_k, config.experts, 2 if autocast else 4
    token = width * (K * (2 * D + config.width()) - 8 * D) + 8 * E + 4 + (3 * 8 + 4) * K + (2 * D if autocast else 0)
    token += 4 * (K + 1) if K > 1 else 0
    return config.layers * (tokens * token - (2 * 8 * D**2 if autocast else 0))


def with_experts(model, **options):
    """Put experts of new random weights in place of the MLPs of 01's GPT, once, before any cut. options: fields of its
    config, which becomes a GPTConfig. Returns the model. ValueError, and nothing changed, on what MoE refuses."""
    base.refuse((any(not hasattr(block, "up") for block in model.blocks), "the model has experts already"))
    config = model.config if isinstance(model.config, GPTConfig) else GPTConfig(**vars(model.config))
    config = dataclasses.replace(config, **options)
    moes = []
    for block in model.blocks:
        like = block.norm2.weight  # has the model's device and dtype, even where matrices have no memory yet (train.py)
        with like.device:
            moes.append(MoE(config.dim, config.width(), config.experts, config.top_k,
                            bottleneck=config.bottleneck).to(like.dtype))
        into_stream = moes[-1].widen if config.bottleneck else moes[-1].down
        nn.init.normal_(into_stream.weight, std=0.02 / math.sqrt(2 * config.layers))  # as in 01
    model.config = config
    for block, moe in zip(model.blocks, moes, strict=True):
        block.__class__, block.moe = Block, moe  # the same module with another mlp()
        del block.up, block.down
    return model


# ==== 4. The products of all experts in one launch ====================================================================
#
# Rows begin[e] to begin[e + 1] of x (R, C) belong to expert e, whose matrix is rows e M to (e + 1) M of W (E M, C).
#
# Rung 1, a loop over the experts with the library's product. It launches E kernels, needs their sizes on the host, so
# that the host waits for the device, and leaves multiprocessors idle at the end of each. Padding all experts to one
# capacity would be one batched product, and waste or drop.
#
# Rung 2, one launch for all experts. The tiles of all experts are numbered one after another, and a program finds its
# own in a table, which the device can make itself. Tiles of 128 rows; e0 has rows 0 to 299, e1 none, e2 300 to 399:
#
#     tile      0     1     2     3
#     expert    e0    e0    e0    e2        an expert without rows has no tile
#     row       0     128   256   300       the tile's first one
#     stop      300   300   300   400       where the expert's rows end
#
# Tile 2 computes rows 256 to 383, the last 84 of which are e2's, with e0's weights. The mask at the kernel's end keeps
# it from storing those (--break no-tail).
#
# Cost: 2 R M C FLOPs whatever the routing, and all E M C weights are read: 2 R / E FLOPs a weight. With 256 rows an
# expert that is 256 FLOPs a byte in bf16, a little more than an H200 needs (989 TFLOP/s over 4.8 TB/s: 206). With fewer
# rows the weights' bytes are the bound, and no kernel helps.
#
# Gradients of weights, dW_e = dY_e^T X_e, are sums over an expert's rows. torch's grouped_mm makes all of them in one
# launch, in 16 bits (for X W^T it is slower than ours where one expert is hot). The loop is as good or better in fp32
# (gradients of master weights), in fp64, and for large experts.

TILES = {
    "16-bit": dict(BLOCK_R=128, BLOCK_M=256, BLOCK_C=64, num_warps=8, num_stages=4),
    "32-bit": dict(BLOCK_R=64, BLOCK_M=64, BLOCK_C=32, num_warps=4, num_stages=2),
}
if INTERPRETED:
    TILES = dict.fromkeys(TILES, dict(BLOCK_R=16, BLOCK_M=32, BLOCK_C=32))

# FLOPs an expert from which the loop is as fast as one launch of ours, and of grouped_mm; measured on H100 and H200.
LOOP_FROM, GRADIENT_LOOP_FROM = 1e11, 1e10


class Tiles(NamedTuple):
    """The table drawn above, int32, with room for as many tiles as there can be; the first count[0] are real."""

    expert: torch.Tensor
    row: torch.Tensor
    stop: torch.Tensor
    count: torch.Tensor


class Rows:
    """Where each expert's rows are: begin (E + 1,) int64, on the device; bounds, the same as a list. If not given, it
    sets out from the device at once: when backward asks for it, it need not wait."""

    def __init__(self, begin, bounds=None):
        self.begin, self.experts, self.tables = begin, len(begin) - 1, {}
        if bounds is None:
            self.coming = filtering.Readback(begin)
        else:
            self.bounds = bounds  # hides the property

    @functools.cached_property
    def bounds(self):
        return self.coming.read()

    def spans(self):
        """(expert, slice of its rows)."""
        return [(e, slice(*span)) for e, span in enumerate(itertools.pairwise(self.bounds))]

    def tiles(self, R, block):
        """Tiles of `block` rows, R rows in all."""
        if block not in self.tables:
            begin = self.begin
            tiles = (begin.diff() + block - 1) // block  # (E,)
            ends = tiles.cumsum(0)
            index = torch.arange(R // block + len(tiles), device=begin.device)  # each expert adds a tile at most
            expert = torch.searchsorted(ends, index, right=True).clamp(max=len(tiles) - 1)
            row = begin[expert] + (index - (ends - tiles)[expert]) * block
            columns = torch.stack((expert, row, begin[expert + 1], ends[-1].expand_as(row))).int()
            self.tables[block] = Tiles(*columns)
        return self.tables[block]


@triton.jit
def product_kernel(
    X, W, out, tiles, M, C, stride_x, stride_w, TRANSPOSED: tl.constexpr, FETCHED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """out (R, M) = X (R, C) W_e^T, W (E M, C); TRANSPOSED: X W_e, W (E C, M): here M are always the columns of `out`.
    Persistent programs, as in 02; `tiles` is a Tiles. FETCHED: X and W are descriptors, of all experts' rows."""
    row_tiles = tl.load(tiles.count)
    for index in tl.range(tl.program_id(0), row_tiles * tl.cdiv(M, BLOCK_M), tl.num_programs(0), flatten=True):
        row_tile, col_tile = tile_at(index, row_tiles, tl.cdiv(M, BLOCK_M))
        e, row, stop = tl.load(tiles.expert + row_tile), tl.load(tiles.row + row_tile), tl.load(tiles.stop + row_tile)
        col = col_tile * BLOCK_M
        rows, cols = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for start in range(0, C, BLOCK_C):
            depth = start + tl.arange(0, BLOCK_C)
            if FETCHED:
                x = X.load([row, start])  # (BLOCK_R, BLOCK_C)
                w = W.load([e * C + start, col]) if TRANSPOSED else tl.trans(W.load([e * M + col, start]))
            else:
                x = load_tile(X, rows, depth, stop, C, stride_x)
                if TRANSPOSED:
                    w = load_tile(W + e.to(tl.int64) * C * stride_w, depth, cols, C, M, stride_w)
                else:
                    w = tl.trans(load_tile(W + e.to(tl.int64) * M * stride_w, cols, depth, M, C, stride_w))
            acc = dot(x, w, acc)
        inside = (rows < stop)[:, None] & (cols < M)[None, :]
        at = rows.to(tl.int64)[:, None] * M + cols[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


def choose_backend(a, b, backend):
    """"triton" or "torch", as in 02; no rows, no launch."""
    base.refuse((backend == "v3", "backend is 'v3': use auto, triton or torch"))
    found = cce.choose_backend(backend, a, b)
    return found if len(a) and len(b) else "torch"


def experts_product(x, W, rows, transposed=False, backend="auto", out=None, spare=0):
    """x (R, C) sorted by expert, W (E M, C), rows: Rows -> (R, M), each expert's rows times W_e^T; transposed: x (R, M)
    -> (R, C), times W_e. Sums in fp32 (fp64 of fp64). x and W of one dtype: fp32, bf16 or fp16 by the kernel, any by
    the loop. backend: "triton", "torch" (the loop), "auto". out: where to, contiguous. spare: multiprocessors that the
    kernel leaves to others. ValueError on dtypes or backends that do not fit."""
    E, x = rows.experts, cce.rows_contiguous(x)
    M, C = (W.shape[1], len(W) // E) if transposed else (len(W) // E, W.shape[1])  # outputs, and what is summed over
    out = x.new_empty(len(x), M) if out is None else out
    large = backend == "auto" and 2 * len(x) * M * C >= LOOP_FROM * E
    if choose_backend(x, W, backend) == "torch" or large:
        W = W.view(E, -1, W.shape[1])
        for e, span in rows.spans():
            torch.mm(x[span], W[e] if transposed else W[e].T, out=out[span])
        return out
    options = TILES["16-bit" if x.element_size() == 2 else "32-bit"]
    # Transposed, C runs down W's rows: a tile across the end of an expert would multiply the next one's weights by 0,
    # which is NaN if they are infinite.
    fetched = cce.takes_descriptors(x, W) and C % options["BLOCK_C"] == 0
    operands = x, W
    if fetched:
        block_r, block_m, block_c = (options[f"BLOCK_{edge}"] for edge in "RMC")
        block = (block_c, block_m) if transposed else (block_m, block_c)
        operands = filtering.descriptor(x, block_r, block_c), filtering.descriptor(W, *block)
    product_kernel[(max(1, cce.programs(x)[0] - spare),)](
        *operands, out, rows.tiles(len(x), options["BLOCK_R"]), M, C, x.stride(0), W.stride(0),
        TRANSPOSED=transposed, FETCHED=fetched, **options
    )
    return out


def experts_gradient(dy, x, rows, dtype=None, backend="auto"):
    """dy (R, M), x (R, C) sorted by expert -> dW (E M, C) in `dtype` (that of x): dy_e^T x_e, 0 for an expert without
    rows. Sums in fp32 (fp64 of fp64). backend: "torch" (the loop), "grouped" (torch's grouped_mm), "auto"."""
    E, M, C, dtype = rows.experts, dy.shape[1], x.shape[1], dtype or x.dtype
    base.refuse((backend not in ("auto", "torch", "grouped"), f"backend is {backend!r}: use auto, torch or grouped"))
    fits = x.is_cuda and dtype == x.dtype and x.element_size() == 2 and M % 8 == C % 8 == 0  # rows of 16 bytes
    if backend == "grouped" or backend == "auto" and fits and 2 * len(x) * M * C < GRADIENT_LOOP_FROM * E:
        return F.grouped_mm(dy.contiguous().T, x.contiguous(), offs=rows.begin[1:].int()).flatten(0, 1).to(dtype)
    out = x.new_empty(E, M, C, dtype=dtype)
    for e, span in rows.spans():
        forging.weight_gradient(dy[span], x[span], out[e])
    return out.flatten(0, 1)


# Around the products rows are moved: a token's row is taken once for each of its choices, and what comes back is
# combined. Each is the other's gradient, but for the weights w, which have one, too:
#
#     take       rows[r] = x[token of r]                          dx[n] = sum_k drows[place[n, k]]
#     combine    y[n] = sum_k w[n, k] rows[place[n, k]]           drows[r] = w[choice of r] dy[token of r]
#                                                                 dw[n, k] = rows[place[n, k]] . dy[n]
#
# So one kernel sums up to K rows, weighted or not, and one makes dot products. A place of -1 (dropped) adds nothing.


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
    """source (S, D), index (N, K) int64, weights (N, K) fp32 or None -> (N, D) in source's dtype, as gather_kernel."""
    (N, K), D = index.shape, source.shape[1]
    if choose_backend(source, source, backend) == "triton" and N:
        source, out = source.contiguous(), source.new_empty(N, D)
        block = min(1024, triton.next_power_of_2(D))
        weights = None if weights is None else weights.contiguous()
        gather_kernel[(N, triton.cdiv(D, block))](source, index.contiguous(), weights, out, D, K, block)
        return out
    rows = rows_at(source, index)  # (N, K, D)
    if weights is not None:
        rows = rows.to(torch.promote_types(source.dtype, torch.float32)) * weights.unsqueeze(-1)
    return rows.sum(1).to(source.dtype)


def rows_at(source, index):
    """source[index], zeros for an index of -1."""
    source = F.pad(source, (0, 0, 0, 1)) if (index < 0).any() else source
    return source.index_select(0, index.flatten() % max(1, len(source))).view(*index.shape, source.shape[1])


def dot_rows(source, index, dy, backend="auto"):
    """source (S, D), index (N, K), dy (N, D) -> (N, K) fp32 (fp64): source[index[n, k]] . dy[n], 0 for index -1."""
    (N, K), D = index.shape, source.shape[1]
    if choose_backend(source, dy, backend) == "triton":
        out = torch.empty(N, K, device=source.device)
        block = min(1024, triton.next_power_of_2(D))
        dots_kernel[(N,)](source.contiguous(), index.contiguous(), dy.contiguous(), out, D, K, block)
        return out
    wide = torch.promote_types(source.dtype, torch.float32)
    return torch.linalg.vecdot(rows_at(source, index).to(wide), dy.to(wide).unsqueeze(1))


class _Take(torch.autograd.Function):
    """x (N, D) -> rows x[index] (R, D). place (N, K): the rows that x[n] has become, or -1: index's inverse."""

    @staticmethod
    def forward(ctx, x, index, place):
        ctx.save_for_backward(place)
        return gather_rows(x, index.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return gather_rows(g, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    """rows (R, D), weights (N, K), choice (R,), place (N, K) -> y[n] = sum_k weights[n, k] rows[place[n, k]]."""

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


# ==== 5. Expert parallelism: experts on different ranks, rows travel to them and back =================================
#
# Ranks hold equal ranges of the experts, and each has tokens of its own. All know all counts (one gather of E numbers a
# rank), hence all make the same plan, who computes how many rows of which expert, and from both the same table
#
#     rows[s, d, e]     how many rows of expert e source rank s has and rank d computes
#
# from which everything follows: what to send, what comes, in which order it lies. Two ranks, four experts:
#
#                      e0 e1 | e2 e3                     computed on rank 0     on rank 1
#     counts  rank 0    3  1 |  0  2         rows  of rank 0    3 1 0 0          0 0 0 2
#             rank 1    2  1 |  2  1               of rank 1    2 1 0 0          0 0 2 1
#
#     rank 0's choices, sorted by expert          e0 e0 e0 e1 e3 e3
#     sorted by the rank they go to, own last     e3 e3 | e0 e0 e0 e1         leave   4 5 0 1 2 3
#     what rank 0 has after the exchange          e0 e0 e1 | e0 e0 e0 e1      of rank 1, and its own
#     sorted by expert, to be computed            e0 e0 e0 e0 e0 e1 e1        arrive  0 1 3 4 5 2 6
#
# Rows lie in runs of one expert, whose lengths the table has. Each run gets a label, the rank or the expert to sort by.
# The host sorts the runs, which are few, as the device has nothing to do meanwhile; the device then lists their rows.
# What comes out goes the same way back: the inverse of the second sort, an exchange, and the places of the first.
#
# A rank without tokens sends and receives no rows, but it comes to every exchange, forward and backward: else the
# others would wait for it (--break leaves-early).
#
# Cost: a rank sends N K rows of D forward, less what stays, and as many outputs back; and the same in backward.
#     N = 16,384, K = 2, D = 4096, two ranks, bf16: 4 x 134 MB, 0.4 ms each at 330 GB/s
# And from the counts to the first product the device waits for the host, over 1 ms a layer: some fifty small calls.


@functools.cache
def owners(E, n):
    """(E,) the rank of each expert."""
    return np.repeat(np.arange(n), E // n)


def at_home(loads, n):
    """Plain expert parallelism: loads (E,) -> plan (n, E), in which each expert's rows are computed by its owner."""
    plan = np.zeros((n, len(loads)), np.int64)
    plan[owners(len(loads), n), np.arange(len(loads))] = loads
    return plan


def table(counts, plan):
    """counts (n, E) rows of each expert that each rank has, plan (n, E) that each computes -> rows (n, n, E).

    A rank computes its own rows of an expert first: those need not travel. What is left of them lies on a line, source
    by source, and what is left to compute lies on another, rank by rank. Source s sends to rank d what their pieces
    have in common:
                  source 0       source 1
        left     |--------------|-----------|                      rows[0, 2] = 5, rows[0, 3] = 10,
        room     |----|----------------|----|                      rows[1, 3] = 7, rows[1, 4] = 5
                 rank 2     rank 3     rank 4
    """
    kept = np.minimum(counts, plan)  # (n, E)
    left, room = counts - kept, plan - kept
    left_end, room_end = left.cumsum(0), room.cumsum(0)
    # What two pieces share is the lesser end less the greater start; below 0: nothing. For all s and d at once:
    rows = np.minimum(left_end[:, None], room_end) - np.maximum((left_end - left)[:, None], room_end - room)
    rows = rows.clip(0)  # (n, n, E)
    rows[np.arange(len(plan)), np.arange(len(plan))] += kept
    return rows


def sorted_runs(labels, lengths):
    """Run (a, b), lengths[a, b] rows, lies behind run (a, b - 1). Sorts runs by labels[b], equal ones stay in order:
    (A B,) each, where a run ends then, and `moved`: row i then is row i + moved of before. The drawing's second sort:
    runs e0 2, e0 3, e1 1, e1 1 end at 2, 5, 6, 7 and have moved 0, 1, -3, 0."""
    order = np.broadcast_to(labels, lengths.shape).ravel().argsort(kind="stable")
    ends, lengths = lengths.ravel().cumsum()[order], lengths.ravel()[order]
    new_ends = lengths.cumsum()
    return new_ends, ends - new_ends


def rows_of(ends, moved, total):
    """sorted_runs() of `total` rows, on a device -> the order (R,) int64 that they stand for."""
    row = torch.arange(total, device=ends.device)
    return row + moved[torch.bucketize(row, ends, right=True)]


def to_device(device, *arrays):
    """Arrays int64 -> tensors, in one copy; from pinned memory, or the host would wait for all that the device has
    still to do."""
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return flat.split([*map(len, arrays)])


MESSAGE_BLOCKS = 16  # thread blocks of a loan's messages: as fast as NCCL's usual 32, and a block takes 36 MiB


class ExpertParallel:
    """What expert_parallel puts in run_here's place; arguments and results as there.

    policy(loads (E,), n) -> plan (n, E). plan: the last one. wires: another group of the same ranks, for lent matrices
    (section 6), which must neither wait for the exchange of rows nor hold it up."""

    def __init__(self, group, policy):
        self.group, self.policy, self.plan = group, policy, None
        self.wires = None if policy is at_home else twin(group)

    def __call__(self, x, choice, begin, experts, moe):
        n, me = size(self.group), rank_in(self.group)
        # cpu() waits for the device: the host has to know how much to send. Then the device idles until the rows leave,
        # so only what that needs comes before.
        counts = parallel.gather(begin.diff().unsqueeze(0), self.group, 0).cpu().numpy()  # (n, E)
        self.plan = plan = self.policy(counts.sum(0), n)
        base.refuse(((plan.sum(0) != counts.sum(0)).any(), "the policy's plan is not of as many rows as there are"))
        rows = table(counts, plan)
        give, arriving = rows[me].sum(1).tolist(), rows[:, me].sum(1).tolist()
        ranks = [r for r in range(n) if r != me] + [me]  # 05's exchange() wants what stays here last
        # Runs (e, d), as choices lie: of an expert's the first ones are for rank 0. argsort(ranks)[d] is d's turn.
        leave = rows_of(*to_device(x.device, *sorted_runs(np.argsort(ranks), rows[me].T)), sum(give))
        choice = choice[leave]
        place = place_of(choice, experts)
        arrived = parallel.exchange(_Take.apply(x, choice // experts.shape[1], place), give, arriving, self.group)

        loans = borrow(plan, me, matrices(moe, x.dtype), self.wires)
        turn = np.arange(moe.experts) + moe.experts * (owners(moe.experts, n) != me)  # own ones first, then borrowed
        # Runs (s, e), as rows have come: source by source, own ones last.
        arrive = rows_of(*to_device(x.device, *sorted_runs(turn, rows[ranks, me])), sum(arriving))
        back = filtering.inverse(arrive)  # (R,)
        out = expert_mlp(_Take.apply(arrived, arrive, back.unsqueeze(1)), moe, loans)
        out = _Take.apply(out, back, arrive.unsqueeze(1))
        return parallel.exchange(out, arriving, give, self.group), choice, place


@functools.cache
def twin(group):
    """Another group of the same ranks, which all of them make together."""
    options = None
    if dist.get_backend(group) == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = MESSAGE_BLOCKS
        options.config.cga_cluster_size = 1  # on any multiprocessors that are free, not on 4 neighbours
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True, pg_options=options)


def expert_parallel(model, group, policy="ep"):
    """Cut the experts of every MoE in the model in place: each rank of the group keeps an equal range. All ranks start
    from equal weights. policy: "ep", "llep" (section 6), or a function as in ExpertParallel. One rank, None: no change.

    A rank's gradients of its experts are those of all ranks' tokens, and need no further sum; those of all other
    parameters are of its own tokens. Returns {name: (row, 0)}, where each cut weight begins in the whole one, for 04's
    forge(). ValueError, and nothing changed, on another policy, a model without experts, or if they cannot be shared
    out equally or were cut before."""
    n, origins, layers = size(group), {}, layers_with_experts(model)
    base.refuse((not callable(policy) and policy not in POLICIES,
                 f"policy is {policy!r}: use one of {', '.join(POLICIES)}"))
    for moe in layers:
        base.refuse((moe.experts % n, f"{moe.experts} experts over {n} ranks: use a number that {n} divides"),
                    (moe.exchange is not run_here, "the experts are cut already: call expert_parallel once"))
    if n == 1:
        return {}
    for moe in layers:
        moe.exchange = ExpertParallel(group, POLICIES.get(policy, policy))
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            parallel.cut(module, "weight", 0, group)
            module.experts //= n
            origins[f"{name}.weight"] = module.weight.origin
    return origins


def exchange_bytes(N, K, D, n, itemsize):
    """Bytes that a rank of N tokens sends forward, with even routing: rows, and as many outputs. Backward: as many."""
    return 2 * N * K * D * itemsize * (n - 1) // n


# ==== 6. Least-loaded expert parallelism: where rows cannot be spread, weights travel =================================
#
# All rows of a popular expert go to one rank. That rank can lend the expert's weights to ranks that have less to do,
# and part of the rows goes there; their gradients of the weights come home and are added. An expert's arithmetic over R
# rows is 12 R D H FLOPs, forward and backward; its weights and their gradients are 4 D H numbers. In bf16, at 600
# TFLOP/s and 330 GB/s, these travel as long as 1,200 rows compute: what leaves, a chunk, has to be some `least` rows.
#
# The plan (2601.17111, its names): experts come in order of load, the heaviest first. A rank's `assigned` are rows that
# have been given to it, its `pending` are those of its own experts whose turn has not come; together they may reach
# `limit`, the mean load. An expert stays at home as far as there is room, and the rest goes to the least loaded others.
# Four experts, two ranks, chunks of any size:
#                                                              assigned    pending
#     loads  e0 70  e1 10 | e2 12  e3 8      limit 50            0   0      80   20
#     e0: home has 50 - 0 - 10 = 40; the other 30 go to rank 1  40  30      10   20
#     e2: stays, home has 50 - 30 - 8 = 12                      40  42      10    8
#     e1, e3: stay                                              50  50       0    0
#
# Without `pending` e0 would keep 50, and then e1 would have to leave: two loans, not one (--break ignore-pending).
# Where the paper leaves it open, or differs from its code, we take:
#   - the imbalance that decides whether to act is that of the ranks' loads, which is what one waits for (not experts');
#   - an excess that fits nowhere goes to the least loaded other rank, even beyond its limit (not: stays at home);
#   - the mean itself is the limit (its alpha is 1).


def least_loaded(loads, n, least=1024, imbalance=1.3):
    """loads (E,) int64 -> plan (n, E); every rank makes the same. It is the plain one while the fullest rank has less
    than `imbalance` times the mean. least: the fewest rows of a chunk, unless it is all that is left of an expert, 1 or
    more. arXiv 2601.17111."""
    plan, owner = at_home(loads, n), owners(len(loads), n).tolist()
    assigned, pending = [0] * n, plan.sum(1).tolist()  # (n,) rows
    if plan.sum(1).max() < imbalance * loads.sum() / n:
        return plan
    limit = math.ceil(loads.sum() / n)
    load_of = lambda r: committed(assigned[r], pending[r])  # noqa: E731
    for e in np.argsort(-loads, kind="stable").tolist():
        home, rest = owner[e], int(loads[e])
        pending[home] -= rest
        plan[home, e] = kept = min(max(0, limit - load_of(home)), rest)
        assigned[home] += kept
        rest -= kept
        # Only r's own load grows below, so that the order stays right.
        others = sorted((r for r in range(n) if r != home), key=load_of) if rest else []
        for r in others:
            chunk = min(rest, limit - load_of(r))
            if chunk >= least:
                plan[r, e] = chunk
                assigned[r] += chunk
                rest -= chunk
        if rest:  # it fits nowhere, or is too small a chunk
            r = min(others, key=load_of)
            plan[r, e] += rest
            assigned[r] += rest
    return plan


def committed(assigned, pending):
    """The load that a rank has by now, or will have from its own experts."""
    return assigned + pending


POLICIES = {"ep": at_home, "llep": least_loaded}


# A loan is four messages between owner and borrower. Matrices travel behind the rows, while each rank computes its own
# experts; their gradients go home while the next product is made:
#
#                 forward                                         | backward
#     borrower    own rows up   borrowed rows up    down ...      | dW_down  dhidden          dW_up  dX
#     messages    |-- up --||-- down --| from the owner           |          |-- dW_down --|         |-- dW_up --| home
#     owner       own rows up       own rows down                 | dW_down  dhidden          dW_up  dX, adds parts
#
# Owner and borrower have equal loads, so both come to their messages at about the same time. That matters: an NCCL
# message occupies MESSAGE_BLOCKS multiprocessors, also while it waits for its other end. A persistent kernel (02) has a
# program for each multiprocessor; those that found theirs occupied would begin when the message is over, and all would
# wait for them. So a product beside messages starts that many programs fewer (`spare`).


class Loans:
    """What a rank computes in one pass through a layer's experts, and with whom. weights: its matrices up (E H, D) and
    down (E D, H) in the dtype of the products. own: Rows of its experts, which are the first `count` rows; borrowed:
    Rows of those that it borrows, which come behind (None: none).

    borrowers: for each rank the own experts that it borrows, by their numbers here; lenders: how many experts each rank
    lends to this one. group: of these messages, to which all of its ranks come; None: nobody lends."""

    def __init__(self, weights, own, count, borrowed=None, borrowers=(), lenders=(), group=None):
        self.weights, self.own, self.count, self.borrowed, self.group = weights, own, count, borrowed, group
        self.leaving = list(itertools.chain(*borrowers))  # own experts, once for each loan, rank by rank
        self.lending, self.borrowing = [*map(len, borrowers)], list(lenders)
        self.theirs = [w.new_empty(0, w.shape[1]) for w in weights]  # up and down of S borrowed experts (S M, C)
        self.arriving, self.returning = ([], []), []  # messages under way: of up, of down; of gradients

    def send(self, matrices, give, take, kind):
        """Send matrices (S, M, C), give[r] of them to rank r, counted by kind in `sent`, and receive take[r] from it.
        Returns what comes, (sum(take), M, C), and what to wait for."""
        out = matrices.new_empty(sum(take), *matrices.shape[1:])
        sent[kind] += matrices.nbytes
        return out, dist.all_to_all_single(out, matrices, take, give, group=self.group, async_op=True)

    def lend(self):
        """Send matrices to all borrowers, receive them from all lenders."""
        for i, weight in enumerate(self.weights if self.group else ()):
            home = weight.view(self.own.experts, -1, weight.shape[1])  # (E, M, C)
            away = torch.cat([home[:0], *(home[e : e + 1] for e in self.leaving)])  # (S, M, C)
            found, message = self.send(away, self.lending, self.borrowing, "weights")
            self.arriving[i].append(message)
            self.theirs[i] = found.flatten(0, 1)

    @property
    def spare(self):
        """Multiprocessors that messages of this rank occupy by now."""
        under_way = any(self.arriving) or self.returning
        return MESSAGE_BLOCKS if under_way and any(self.lending + self.borrowing) else 0

    def product(self, x, W, theirs, arriving=(), transposed=False):
        """experts_product of own experts' rows with W; then, when it has arrived, of borrowed ones' with `theirs`."""
        out, count = x.new_empty(len(x), W.shape[1] if transposed else len(W) // self.own.experts), self.count
        experts_product(x[:count], W, self.own, transposed, out=out[:count], spare=self.spare)
        wait_for(arriving)  # and for what leaves: its memory must not be used again before
        if count < len(x):
            experts_product(x[count:], theirs, self.borrowed, transposed, out=out[count:], spare=self.spare)
        return out

    def give_back(self, dY, X, dtype):
        """Send home the gradients of borrowed experts, and receive those of lent ones: parts (S, M, C), one for each of
        `leaving`; they are there when wait_for(self.returning) is over."""
        M, C = dY.shape[1], X.shape[1]
        if not self.group:
            return torch.empty(0, M, C)
        made = experts_gradient(dY[self.count :], X[self.count :], self.borrowed, dtype)
        parts, message = self.send(made.view(-1, M, C), self.borrowing, self.lending, "gradients")
        self.returning.append(message)
        return parts


def wait_for(messages):
    """Until all have arrived; empties the list."""
    while messages:
        messages.pop().wait()


def lends(plan):
    """Whether by a plan (n, E) any rank computes an expert of another."""
    return bool((plan > at_home(plan.sum(0), len(plan))).any())


def borrow(plan, me, weights, group):
    """The Loans of rank `me` by a plan (n, E), with matrices `weights` on their way. group: of their messages."""
    owner, lending = owners(plan.shape[1], len(plan)), lends(plan)
    base.refuse((lending and not group, "the policy lends: give it to expert_parallel, which prepares that"))
    mine, others = np.flatnonzero(owner == me), np.flatnonzero((plan[me] > 0) & (owner != me))
    bounds = [np.append(0, plan[me, experts].cumsum()) for experts in (mine, others)]
    own, borrowed = map(Rows, to_device(weights[0].device, *bounds), [numbers.tolist() for numbers in bounds])
    borrowers = [np.flatnonzero(rows[mine]).tolist() if r != me else [] for r, rows in enumerate(plan)]
    # Owners have ranges of experts: in order they are lender by lender, as all_to_all_single delivers them.
    lenders = np.bincount(owner[others], minlength=len(plan)).tolist()
    loans = Loans(weights, own, own.bounds[-1], borrowed, borrowers, lenders, group if lending else None)
    loans.lend()
    return loans


# ==== 7. The experts' backward pass, and FORGE ========================================================================
#
# For the rows x of an expert, with up (H, D) and down (D, H):
#
#     forward     hidden = x up^T           active = gelu(hidden)                y = active down^T
#     backward    dW_down = dy^T active     dhidden = (dy down) gelu'(hidden)    dW_up = dhidden^T x    dx = dhidden up
#
# x and hidden are kept; active is made again, which is R H elements less than autograd would keep.
#
# Skip ExpertFactor and step_experts on a first reading, and in Gradient what is `forged`. With FORGE (04) backward does
# not leave dW, it takes the optimizer's step. forge(model) gives a weight a state, and the model a handle, which has a
# phase: idle (dW as usual), armed (take the step), stashing (keep a factor, what dW is a product of, for later). Two
# things differ with experts. A weight is E matrices, so its factor writes any range of its rows from several experts'
# rows of dY and X. And dW is complete only when what borrowers computed has come home: so the step is taken at the end
# of backward. By then dx has been made, with the weights of forward (--break new-weight).


class ExpertFactor(NamedTuple):
    """04's factor of a gradient (E M, C): of expert e dY_e^T X_e over rows bounds[e] to bounds[e + 1] of dY (R, M) and
    X (R, C), and parts (S, M, C), what other ranks computed for the gradients of experts part_of[s]."""

    dY: torch.Tensor
    X: torch.Tensor
    parts: torch.Tensor
    bounds: list
    part_of: list

    def of_expert(self, e):
        rows = slice(self.bounds[e], self.bounds[e + 1])
        mine = [part for part, of in zip(self.parts, self.part_of, strict=True) if of == e]
        return [forging.Product(self.dY[rows], self.X[rows]), *map(forging.Dense, mine)]

    def write(self, state, out, top, add):
        """out (any number of rows, C) = or += the gradient's rows from `top` on."""
        M, bottom = self.dY.shape[1], top + len(out)
        for e in range(top // M, (bottom - 1) // M + 1):
            first, last = max(top, e * M), min(bottom, (e + 1) * M)
            for i, factor in enumerate(self.of_expert(e)):
                factor.write(state, out[first - top : last - top], first - e * M, add or i > 0)


def step_experts(state, factor):
    """The armed step of a weight of experts: with Muon as many whole matrices at a time as a slab (04's buffer for a
    piece of dW) holds; else each expert by itself, fused or in slabs, as 04 plans it."""
    handle, (M, C) = state.handle, (factor.dY.shape[1], factor.X.shape[1])
    state.check_second()
    state.stepped, plan = True, handle.plan(state, 0)
    if plan.rung == "matrix":
        return state.step_in_slabs([factor], plan.rows)
    for e in range(len(factor.bounds) - 1):
        product, *others = factors = factor.of_expert(e)
        rung = "slab" if others or handle.rung == "hook" else handle.rung  # a sum cannot be fused
        plan = forging.plan_step(state.rule, M, C, len(product.X), handle.layout, rung, handle.slab_bytes)
        if plan.rung == "fused":
            state.step_fused(*product, row=e * M)
        else:
            state.step_in_slabs(factors, plan.rows, e * M, M)


class Gradient:
    """The gradient of weight (E M, C), own experts' up or down, on its way through backward: made, and borrowers' parts
    awaited; then finish(). state: 04's, or None; dY (R, M), X (R, C): of own and borrowed experts' rows."""

    def __init__(self, weight, state, dY, X, loans):
        self.state, self.loans, own = state, loans, loans.count
        self.forged = state is not None and state.handle.phase != "idle"
        dtype = torch.float32 if self.forged else weight.dtype  # a step sums parts in fp32
        # dW, or what it is a product of, never both: dhidden and dx can use the memory.
        self.factors = (dY[:own], X[:own]) if self.forged else None
        self.dW = None if self.forged else experts_gradient(dY[:own], X[:own], loans.own, dtype)
        self.parts = loans.give_back(dY, X, dtype)

    def finish(self):
        """dW (E M, C) with all parts; if it is forged None: the step is taken, or the factor kept."""
        wait_for(self.loans.returning)
        if self.forged:
            factor = ExpertFactor(*self.factors, self.parts, self.loans.own.bounds, self.loans.leaving)
            stash = self.state.handle.phase == "stashing"
            return self.state.keep(factor) if stash else step_experts(self.state, factor)
        dW = self.dW.view(self.loans.own.experts, -1, self.dW.shape[1])  # (E, M, C)
        for part, e in zip(self.parts, self.loans.leaving, strict=True):
            dW[e] += part
        return self.dW


class _ExpertMLP(torch.autograd.Function):
    """x (R, D), rows of own experts, then of borrowed ones (`loans`) -> (R, D), down_e(gelu(up_e(x))). up (E H, D),
    down (E D, H); states: 04's of both, or None."""

    @staticmethod
    def forward(ctx, x, up, down, loans, states):
        ctx.loans, ctx.states, ctx.versions = loans, states, [up._version, down._version]
        hidden = loans.product(x, loans.weights[0], loans.theirs[0], loans.arriving[0])  # (R, H)
        out = loans.product(F.gelu(hidden), loans.weights[1], loans.theirs[1], loans.arriving[1])  # (R, D)
        ctx.save_for_backward(x, hidden, up, down, *loans.theirs)
        loans.weights = loans.theirs = None  # ctx keeps the Loans
        return out

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, dy):
        for state, version in zip(ctx.states, ctx.versions, strict=True):
            if state:
                state.on_backward(version)  # before autograd looks at versions, too: its error names no remedy
        x, hidden, up, down, up_theirs, down_theirs = (t.detach() for t in ctx.saved_tensors)
        (state_up, state_down), loans, dy = ctx.states, ctx.loans, dy.contiguous()
        gradients = [None, None]
        if cce.wanted(ctx, 2):
            gradients[1] = Gradient(down, state_down, dy, F.gelu(hidden), loans)
        dhidden = loans.product(dy, down.to(x.dtype), down_theirs, transposed=True)  # (R, H)
        dhidden = torch.ops.aten.gelu_backward(dhidden, hidden)
        if cce.wanted(ctx, 1):
            gradients[0] = Gradient(up, state_up, dhidden, x, loans)
        dx = loans.product(dhidden, up.to(x.dtype), up_theirs, transposed=True)  # (R, D): before the step
        return dx, *(gradient and gradient.finish() for gradient in gradients), None, None


def expert_mlp(rows, moe, loans):
    """rows (R, D) of inputs -> (R, D) of outputs, by the layer's experts. 04 wants to know of each use of a weight."""
    weights, states = (moe.up.weight, moe.down.weight), (moe.up.forged, moe.down.forged)
    out = _ExpertMLP.apply(rows, *weights, loans, states)
    for state, weight in zip(states, weights, strict=True):
        if state:
            state.on_forward(weight)
    return out


# ==== 8. Folding: attention and experts cut the same ranks in different ways ==========================================
#
# Attention has a mesh of pp x dp x cp x tp ranks: pipeline, data, context and tensor parallelism (05). Experts need not
# follow it: of a pipeline stage's dp x cp x tp ranks any ep may share one set of experts, across tp and cp. There are
# edp = dp cp tp / ep such sets, copies whose gradients are summed. So ep is not limited by dp. tp 2, cp 2, dp 2, ep 4:
#
#     attention, tp      [0   1] [2   3] [4   5] [6   7]        a layer's heads are cut over these ranks,
#     experts, ep        [0   1   2   3] [4   5   6   7]        and its experts over these
#     copies, edp        [0 4] [1 5] [2 6] [3 7]


def fold(tp=1, cp=1, dp=1, ep=1, pp=1):
    """Lists of ranks of each group: {"tp": [[0, 1], ...], ..., "ep": ..., "edp": ...}. ValueError on a size below 1, or
    an ep that does not divide a stage's ranks. arXiv 2504.14960."""
    inner, sizes = dp * cp * tp, dict(tp=tp, cp=cp, dp=dp, ep=ep, pp=pp)
    base.refuse((min(sizes.values()) < 1, f"sizes {sizes}: use 1 or more each"))
    base.refuse((inner % ep, f"ep {ep}: dp {dp} x cp {cp} x tp {tp} = {inner} ranks of a stage are no multiple of it"))
    lists = {}
    for axes in (dict(pp=pp, dp=dp, cp=cp, tp=tp), dict(pp=pp, edp=inner // ep, ep=ep)):
        box = np.arange(pp * inner).reshape(*axes.values())
        for axis, name in enumerate(axes):
            lists[name] = np.moveaxis(box, axis, -1).reshape(-1, axes[name]).tolist()
    return lists


def folded_groups(**sizes):
    """{name: this rank's process group} of fold(**sizes), None where it has size 1. All ranks call it."""
    return {name: dist.new_subgroups_by_enumeration(lists)[0] if len(lists[0]) > 1 else None
            for name, lists in fold(**sizes).items()}


# ==== 9. Checks =======================================================================================================
#
# The layer is compared with itself, written out; experts on many ranks with one process that has them all, rank by rank
# through the same tokens. In fp64 all that differs is the order of sums: 1e-12. In 16 bits a rounding may move a token
# to another expert, and nothing could be compared: so tokens and the router's weights have values that bf16 has, too.

close = torch.testing.assert_close


def check_routing(N=40, E=7, seed=0):
    """Weights by their formula; a bias changes who is chosen, not what it is worth; capacity drops the last; the losses
    by theirs, 1 if all is equal, and the table of section 2; of several layers, stacked, the sum."""
    generator = torch.Generator().manual_seed(seed)
    logits, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, E), (E,)))
    scores = logits.softmax(-1)
    for K, b in itertools.product((1, 3), (0 * bias, bias)):
        routing, best = route(logits, K, b), (scores + b).topk(K).indices
        require(torch.equal(routing.experts, best), f"top {K}: other experts than the best")
        worth = scores.gather(1, best)
        close(routing.weights, worth / worth.sum(1, keepdim=True) if K > 1 else worth)
    counts = counts_of(routing.experts, E)
    parallel.expect("choices", counts.tolist(), routing.experts.flatten().bincount(minlength=E).tolist())
    close(balance_loss(routing.scores, counts), E * (counts / (3 * N) * scores.mean(0)).sum())
    close(z_loss(logits.expand(2, N, E)), 2 * logits.exp().sum(1).log().square().mean())
    code, prose = (torch.tensor([[p, 1 - p]]).expand(4, 2) for p in (0.8, 0.2))
    scores, counts = torch.stack((code, prose, code, prose)), torch.tensor([[4, 0], [0, 4], [4, 4], [4, 4]])
    losses = [*map(balance_loss, scores, counts), balance_loss(scores, counts)]
    close(torch.stack(losses), torch.tensor([1.6, 1.6, 1.0, 1.0, 5.2]))
    close(max_violation(torch.tensor([[4, 0], [3, 5]])), torch.tensor([1, 0.25]).double())
    experts = torch.randint(E, (N, 2), generator=generator)
    for capacity in (None, 5):
        choice, begin = order_by_expert(experts, E, capacity)
        of_expert = [(experts.flatten() == e).nonzero().flatten().tolist()[:capacity] for e in range(E)]
        want = sum(of_expert, []), [0, *itertools.accumulate(map(len, of_expert))]
        parallel.expect(f"capacity {capacity}: choice, begin", (choice.tolist(), begin.tolist()), want)
    parallel.expect("capacities", (capacity_of(1.25, 10, 2, 8), capacity_of(1.1, 50, 1, 1)), (4, 55))


def check_products(device="cpu", dtypes=(torch.float32, torch.bfloat16), seed=0):
    """The kernels, where Triton is, against the loop in fp64, by the three-way rule: experts without rows and with more
    than a tile, sizes that no tile divides; rows that are copied, summed, left out. Weights that no row meets may be
    infinite. On a GPU also grouped_mm."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [((0, 5, 33, 1, 0, 40), 40, 72), ((19, 0, 0), 32, 64), ((64, 0, 64), 24, 64)]
    sizes += [] if INTERPRETED else [((130, 0, 70), 256, 320)]  # whole tiles of a GPU, by descriptors
    for (counts, M, C), dtype in itertools.product(sizes, dtypes):
        rows, R, E = Rows(torch.tensor((0, *itertools.accumulate(counts)), device=device)), sum(counts), len(counts)
        x, dy, W, dz = (torch.randn(*shape, generator=generator).to(device, dtype)
                        for shape in ((R, C), (R, M), (E * M, C), (25, C)))
        W.view(E, M, C)[[not count for count in counts]] = math.inf
        index = torch.randint(-1, R, (25, 2), generator=generator).to(device)
        weights = torch.randn(25, 2, generator=generator).to(device)
        cases = [("product", "triton", experts_product, (x, W, rows)), ("dots", "triton", dot_rows, (x, index, dz)),
                 ("transposed product", "triton", experts_product, (dy, W, rows, True)),
                 ("gather", "triton", gather_rows, (x, index)),
                 ("weighted gather", "triton", gather_rows, (x, index, weights))]
        if torch.device(device).type == "cuda" and dtype == torch.bfloat16:
            cases.append(("gradient", "grouped", experts_gradient, (dy, x, rows)))
        for name, fast, function, arguments in cases:
            wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
            exact = function(*wide, backend="torch")
            got, peer = (function(*arguments, backend=backend) for backend in (fast, "torch"))
            # As in 02; the interpreter truncates to bf16, which is a rounding more.
            slack = 2e-6 if dtype == torch.float32 else 4e-3 if INTERPRETED else 1e-3
            cce.require_as_good(f"{name}, {dtype}, rows {counts}", got, peer, exact, slack)


def as_in_bf16(*shape):
    """Random numbers that bf16 has, too, in fp64."""
    return torch.randn(shape).bfloat16().double()


def random_layer(dtype, *sizes, **options):
    """A MoE with weights of a size that matters, on this rank's device."""
    moe = MoE(*sizes, **options).to(here(), dtype)
    for p in moe.parameters():
        p.data.copy_(as_in_bf16(*p.shape))
    return moe


def check_layer(N=30, D=8, E=5, seed=0):
    """Output and all gradients equal the written-out sum in fp64, in BigMac's layer that of products of matrices; with
    a large capacity nothing changes, with a small one exactly the dropped choices are missing. A model has the
    parameters that its config says, and begins as 01's (0.02 over the root of twice two layers). What cannot be is
    refused."""
    torch.manual_seed(seed)
    for K, bottleneck in ((1, 0), (2, 0), (2, 4)):
        moe = random_layer(torch.float64, D, 12, E, K, bottleneck=bottleneck)
        x, dy = torch.randn(2, N, D, dtype=torch.float64)
        leaves, up, down = [x.requires_grad_(), *moe.parameters()], moe.up.weight, moe.down.weight
        for capacity in (None, float(E), 0.7):
            moe.capacity = capacity
            got, _ = moe(x), copy.deepcopy(moe)  # also with a pass behind it
            chosen = moe.take_routing().experts
            choice, _ = order_by_expert(chosen, E, capacity and capacity_of(capacity, N, K, E))
            kept = place_of(choice, chosen) >= 0  # (N, K)
            gone = 1 - kept.double().mean().item()
            require((gone > 0) == (capacity == 0.7) and abs(moe.dropped - gone) < 1e-12,
                    f"capacity {capacity}: {moe.dropped:.3f} reported as dropped, {gone:.3f} were")
            if bottleneck:
                up = moe.up.weight @ moe.narrow.weight  # (E H, D)
                down = (moe.widen.weight @ moe.down.weight.view(E, bottleneck, -1)).flatten(0, 1)  # (E D, H)
            want = written_out(x, moe.router, up, down, K, kept)
            pair = [dict(enumerate((y, *torch.autograd.grad(y, leaves, dy)))) for y in (got, want)]
            parallel.compare(f"layer, top {K}, bottleneck {bottleneck}, capacity {capacity}", *pair)
    layer, dense = MoE(8, 8, 2), base.GPT(base.GPTConfig(64, 8, 2, 2, 32))
    for options in ({}, dict(hidden=24, experts=6, top_k=3), dict(bottleneck=16)):
        model = with_experts(copy.deepcopy(dense), **options)
        found = sum(map(torch.numel, model.parameters()))
        parallel.expect(f"parameters with {options}", found, model.config.parameters())
        moe = model.blocks[0].moe
        into_stream = (moe.widen if "bottleneck" in options else moe.down).weight
        parallel.expect(f"what is added to the stream, with {options}", into_stream.std().item(), 0.01, 0.1)
    of_router = GPTConfig(64, 8, 2, 2, 32, 8, 2).flops_per_token() - dense.config.flops_per_token()
    parallel.expect("FLOPs beside those of a dense MLP of as many weights", of_router, 6 * 2 * 8 * 32)
    parallel.expect("weights cut for one rank", expert_parallel(model, None), {})
    x, index = torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.int64)
    for words, action in {
        "top_k 3 of 2": lambda: MoE(8, 8, 2, 3), "hidden is 0": lambda: MoE(8, 0, 2),
        "bottleneck is 8": lambda: MoE(8, 8, 2, bottleneck=8),
        "capacity is inf": lambda: MoE(8, 8, 2, capacity=math.inf),
        "capacity is 0": lambda: MoE(8, 8, 2, capacity=0), "policy is 'x'": lambda: expert_parallel(layer, None, "x"),
        "no forward pass": layer.take_routing, "no loss()": Balance(layer).step, "no experts": lambda: Balance(dense),
        "top_k 0": lambda: with_experts(dense, top_k=0), "experts already": lambda: with_experts(model),
        "top_k 9": lambda: with_experts(dense, top_k=9), "is 'v3'": lambda: gather_rows(x, index, backend="v3"),
        "use auto, torch": lambda: experts_gradient(x, x, Rows(torch.tensor([0, 2])), backend="loop"),
        "policy is None": lambda: expert_parallel(layer, None, None),
        "no multiple": lambda: fold(tp=2, dp=3, ep=4), "use 1 or more": lambda: fold(ep=0),
    }.items():
        parallel.must_raise(words, action)
    require(hasattr(dense.blocks[0], "up"), "a refusal has cost the model its MLP")


# Experts on many ranks. Each rank builds the whole layer, too, and takes it through all ranks' tokens, rank by rank.
# Then it knows what its own part has to be:
#
#     output, dX             those of its own tokens
#     dW of its experts      its rows of the whole one, of all tokens: other ranks' rows have come here
#     all other gradients    of its own tokens only: summed over the ranks they are the whole layer's
#
# Loads that test it: (expert, bias of its choice, top_k, tokens of a rank by its number and the number of ranks).
CASES = {
    "uniform": (0, 0.0, 2, lambda r, n: 9 + r),
    "a hot expert": (0, 0.15, 2, lambda r, n: 12),
    "an expert without tokens": (3, -9.0, 2, lambda r, n: 10),
    "a rank without tokens": (0, 0.0, 2, lambda r, n: 0 if r == n - 1 else 11),
    "all tokens to one expert": (1, 9.0, 1, lambda r, n: 8 + 2 * r),
    "no tokens at all": (0, 0.0, 2, lambda r, n: 0),
}
LLEP = functools.partial(least_loaded, least=2, imbalance=1.05)  # for loads as small as those of the checks
TESTED = {"EP": "ep", "LLEP": LLEP}
SGD = forging.SGD(momentum=0.9)


def gradients_of_ranks(model, whole, groups):
    """Two {name: gradient}: of the whole model this rank's part; of the model that is cut what it has, summed over a
    group. groups: {a part of the name: group}, of which the first that fits counts."""
    want, got = {}, {}
    for name, p in model.named_parameters():
        over = next(group for word, group in groups.items() if word in name)
        got[name], want[name] = parallel.all_reduce(p.grad, over), whole.get_parameter(name).grad
        if hasattr(p, "cut"):
            want[name] = want[name].narrow(p.cut, p.origin[p.cut], p.shape[p.cut])
    return want, got


def layers_of_ranks(case, dtype, policy, groups=None, **options):
    """(serial, parallel) {name: tensor} of this rank's output, gradients of its tokens, of its experts, and of all
    other parameters summed over ranks; whether weights were lent; and the share of choices that were dropped. groups:
    folded_groups(), if experts have copies."""
    n, me, outputs = dist.get_world_size(), dist.get_rank(), []
    everyone, (expert, bias, K, tokens) = mesh(dp=n).dp, CASES[case]
    groups = groups or dict(ep=everyone, edp=None)
    torch.manual_seed(0)
    whole = random_layer(dtype, 8, 12, 8, K, **options)
    whole.bias[expert] = bias
    mine = copy.deepcopy(whole)
    expert_parallel(mine, groups["ep"], policy)
    data = [as_in_bf16(2, tokens(r, n), 8).to(here(), dtype) for r in range(n)]  # x, dy
    for moe, ranks in ((whole, range(n)), (mine, [me])):
        for r in ranks:
            x, dy = data[r][0].clone().requires_grad_(), data[r][1]
            y = moe(x)
            y.backward(dy)
            if r == me:
                outputs.append(dict(y=y.detach(), dx=x.grad))
    found = gradients_of_ranks(mine, whole, {"up.": groups["edp"], "down.": groups["edp"], "": everyone})
    return outputs[0] | found[0], outputs[1] | found[1], lends(mine.exchange.plan), mine.dropped


@on_ranks
def check_expert_parallel():
    """Plain and least-loaded expert parallelism equal the serial layer: y, dX, dW to 1e-12 in fp64 for each of CASES,
    with a capacity, and BigMac; with a hot expert by the three-way rule in fp32 and bf16 (kernels, on a GPU). Plain
    lends nothing, least-loaded lends where an expert is hot."""
    worst, n, hot = 0.0, dist.get_world_size(), ("a hot expert", "all tokens to one expert")
    cases = [(case, {}) for case in CASES] + [(hot[0], dict(capacity=0.7)), (hot[0], dict(bottleneck=4))]
    for (kind, policy), (case, options) in itertools.product(TESTED.items(), cases):
        name = f"{kind}, {case} {options or ''}"
        serial, mine, lent, dropped = layers_of_ranks(case, torch.float64, policy, **options)
        worst = max(worst, parallel.compare(name, mine, serial))
        require((dropped > 0) == ("capacity" in options), f"{name}: dropped {dropped}")
        if kind == "EP" or case in hot and not options:
            require(lent == (kind == "LLEP"), f"{name}: weights are lent: {lent}")
        for dtype in (torch.float32, torch.bfloat16) if case == hot[0] and not options else ():
            peer, got, *_ = layers_of_ranks(case, dtype, policy)
            parallel.as_good(name, dtype, got, peer, serial)
    moe, group, x = MoE(8, 8, 2 * n, 1).to(here()), mesh(dp=n).dp, torch.ones(9, 8, device=here())
    expert_parallel(moe, group)
    parallel.must_raise("over", lambda: expert_parallel(MoE(8, 8, 2 * n + 1), group))
    parallel.must_raise("cut already", lambda: expert_parallel(moe, group))
    for words, policy in {"as many rows": lambda *loads: at_home(*loads) + 1, "policy lends": LLEP}.items():
        moe.exchange.policy = policy
        parallel.must_raise(words, lambda: moe(x))
    return worst


def check_empty_rank():
    """A rank without tokens takes part in every exchange, forward and backward: else the others wait for it."""
    case = "a rank without tokens", torch.float64, "ep"
    try:
        in_ranks("layers_of_ranks", 2, *case, device="cpu", stage=globals())
    except OSError as error:
        raise AssertionError(f"a rank waits for one without tokens: {error}") from None


@on_ranks
def check_balance():
    """The mean over ranks of the gradients of the global-batch loss is the serial loss's gradient; Switch's loss is a
    mean of each rank's, and has another. Two micro-batches: the second sees all counts. Biases: alike everywhere."""
    n, me, E, D, N = dist.get_world_size(), dist.get_rank(), 6, 8, 20
    group = mesh(dp=n).dp
    torch.manual_seed(1)
    moe = MoE(D, 8, E, 2).to(here()).double()
    moe.router.data.normal_()
    x = (torch.randn(n, N, D) + torch.randn(n, 1, D)).double().to(here())  # ranks' texts differ
    routing = route((x @ moe.router.T).flatten(0, 1), 2)
    logits, scores, experts = (t.view(n, N, -1) for t in routing[:3])  # by rank
    loads = counts_of(routing.experts, E)
    micro, found, want = balance_loss(scores, counts_of(experts, E)) / n, {}, {}
    for kind, loss in ("micro", micro), ("global", balance_loss(routing.scores, loads)):
        moe(x[me])
        part = Balance(moe, kind, group, coefficient=0.5, z=0.0).loss()
        found[kind] = parallel.all_reduce(torch.autograd.grad(part, moe.router)[0], group) / n
        want[kind] = torch.autograd.grad(0.5 * loss, moe.router, retain_graph=True)[0]
    worst = parallel.compare("balance", found, want)
    apart = (want["micro"] - want["global"]).norm() / want["global"].norm()
    require(apart > 0.05, f"Switch's loss of each rank differs by {apart:.2f} only: this proves nothing")
    moe(x)
    close(micro_loss(Balance(moe, "none", coefficient=0.5), n), 0.5 * micro)  # of the study
    balance = Balance(moe, "global", group, coefficient=1.0, z=0.0)
    for stop in (N // 2, N):
        rows = slice(stop - N // 2, stop)
        moe(x[me, rows])
        close(balance.loss(), balance_loss(scores[me, rows], counts_of(experts[:, :stop].flatten(0, 1), E)))
    close(balance.step(), max_violation(loads[None]))
    moe(x[me])  # another step counts anew
    close(balance.loss(), balance_loss(scores[me], loads))
    balance = Balance(moe, "bias", group, z=0.25, rate=0.5)
    for move in (False, True):
        moe(x[me])
        close(balance.loss(), 0.25 * z_loss(logits[me]))
        balance.step(move)
        close(moe.bias, 0.5 * move * (loads.double().mean() - loads).sign())
    return worst


# 128 experts on 8 GPUs, one of them hot: its share of the tokens, and the paper's measured speed-up of the layer.
PUBLISHED = {0.3: 2.41, 0.5: 3.48, 0.8: 5.26, 0.95: 6.11}
# Plans by hand: (loads, ranks, least, plan). The first is section 6's. In the second, 25 of the 35 rows that leave
# expert 0 go first to rank 3, which has nothing to do, and expert 1's find room on rank 2. In the last, 55 leave expert
# 0, and where only 20 or more may be lent, 20 fit nowhere: rank 3 has to take them, and 5 of its own expert's 30 leave.
BY_HAND = [
    ((70, 10, 12, 8), 2, 1, [[40, 10, 0, 0], [30, 0, 12, 8]]),
    ((60, 36, 4, 0), 4, 1, [[25, 0, 0, 0], [0, 25, 0, 0], [10, 11, 4, 0], [25, 0, 0, 0]]),
    ((100, 40, 10, 30), 4, 20, [[45, 0, 0, 0], [0, 40, 0, 5], [35, 0, 10, 0], [20, 0, 0, 25]]),
]


def hot_loads(E, share, hot, total=10**6):
    """(E,) rows when `hot` experts, the first ones, get `share` of all, evenly, and the others the rest."""
    loads = np.full(E, int((1 - share) * total / (E - hot)))
    loads[:hot] = int(share * total / hot)
    loads[-1] += total - loads.sum()
    return loads


def check_least_loaded(seeds=60):
    """Three plans by hand; over random loads what holds of any plan, and of the table of who sends what; and, which it
    returns, the largest load by plain expert parallelism over that by least_loaded, for PUBLISHED's hot expert."""
    for loads, n, least, want in BY_HAND:
        parallel.expect(f"plan of {loads}", least_loaded(np.array(loads), n, least).tolist(), want)
    for seed, least in itertools.product(range(seeds), (1, 64, 1024)):
        generator = np.random.default_rng(seed)
        n = int(generator.choice([2, 4, 8]))
        E = n * int(generator.integers(1, 9))
        chances = generator.dirichlet(np.full(E, 10 ** generator.uniform(-1.5, 1.5)))
        counts = np.stack([generator.multinomial(generator.integers(0, 5000), chances) for _ in range(n)])
        loads = counts.sum(0)
        plain, plan, mean = at_home(loads, n), least_loaded(loads, n, least), loads.sum() / n
        rows, before, after, limit = table(counts, plan), plain.sum(1), plan.sum(1), math.ceil(mean)
        acts, lending = before.max() >= 1.3 * mean, (plain > plan).any(1)
        small = acts and least == 1  # chunks of any size, so that loads can be even
        for rule, holds in {
            "every row is computed once": (plan.sum(0) == loads).all() and (plan >= 0).all(),
            "no load is larger than plain EP's": after.max() <= before.max(),
            "nothing moves if loads are even": acts or (plan == plain).all(),
            "no load is above the mean": not small or after.max() <= limit,
            "only who has too much lends": not small or not (lending & (before <= limit)).any(),
            "the table adds up": (rows.sum(1) == counts).all() and (rows.sum(0) == plan).all() and (rows >= 0).all(),
            "no row travels that need not": (rows.diagonal().T == np.minimum(counts, plan)).all(),
        }.items():
            require(holds, f"seed {seed}, {n} ranks, {E} experts, least {least}: not so: {rule}")
    hot = {share: hot_loads(128, share, 1) for share in PUBLISHED}
    ratios = {share: at_home(x, 8).sum(1).max() / least_loaded(x, 8).sum(1).max() for share, x in hot.items()}
    require(np.allclose(list(ratios.values()), (3.06, 4.47, 6.59, 7.65), atol=0.01), f"128 experts, 8 GPUs: {ratios}")
    return ratios


# Forged experts leave no gradient to be compared. So weights are compared, after steps in which momentum builds up,
# with those of the whole layer on one process that torch's optimizer has trained; and dX of the last step: one that is
# made after the weights have moved is of other weights.


def train_experts(policy, way, layout="fp32", dtype=torch.float32, steps=3, D=8, hidden=12, rule=SGD, **options):
    """{name: this rank's experts' weights after some steps on all ranks' tokens; dx: the last step's gradient of its
    tokens}. policy None: on one process. way: "torch" (SGD), or forged: "armed", "stash", or "after" backward, from
    gradients."""
    n, me, forged = dist.get_world_size(), dist.get_rank(), way in ("armed", "stash")
    torch.manual_seed(0)
    moe = random_layer(dtype, D, hidden, 8, 2)
    moe.bias[0] = 0.15  # a hot expert
    moe.router.requires_grad_(False)  # of this rank's tokens alone
    tokens = as_in_bf16(steps, 2, n, 14, D).to(here(), dtype)  # x, dy
    origins = expert_parallel(moe, mesh(dp=n).dp, policy) if policy else {}
    weights, mine = dict(up=moe.up.weight, down=moe.down.weight), me if policy else slice(None)
    if way == "torch":
        optimizer = torch.optim.SGD(weights.values(), 0.1, momentum=0.9)
    else:
        handle = forging.forge(moe, rule, layout, origins=origins, data_parallel=1, **options)
        parallel.expect("rows of an expert's up", handle["up.weight"].matrix_rows, hidden)
        if handle.rung == "fused" and rule is SGD:
            handle.buffer = None  # a slab, which nobody should ask for
    for t, (x, dy) in enumerate(tokens[:, :, mine].flatten(2, -2), 1):
        if forged:
            handle.stash() if way == "stash" else handle.arm(0.1, t)
        x = x.clone().requires_grad_()
        moe(x).backward(dy)
        require((moe.up.weight.grad is None) == forged, f"{way}: a gradient is left, or missing")
        if way == "torch":
            optimizer.step()
            optimizer.zero_grad()
        elif way != "armed":
            handle.release(0.1, t) if way == "stash" else handle.step_gradients(0.1, t)
        lent = policy is not None and lends(moe.exchange.plan)
        require(lent == (policy is LLEP), f"{way}: weights are lent: {lent}")
    if layout == "master":
        weights = {name: handle[f"{name}.weight"].tensors["master"] for name in weights}
    found = {name: value.detach() for name, value in (weights | dict(dx=x.grad)).items()}
    return found if policy else {name: value.chunk(n)[me] for name, value in found.items()}


@on_ranks
def check_forged_experts():
    """FORGE on experts, plain and least-loaded: armed, by each of 04's rungs, and by kept factors. Three steps of SGD
    in fp32, and the last dX (which must be of the old weights), are as close to fp64's as torch's on one process; with
    fp32 masters of bf16 weights as close as those of one forged process. Of experts larger than a slab, too. Adam-mini
    by any rung, and Muon, several matrices at a time and one, step as from whole gradients."""
    fp64, f32 = torch.float64, torch.float32
    exact, peer = (train_experts(None, "torch", dtype=dtype) for dtype in (fp64, f32))
    masters, whole = train_experts(None, "armed", "master"), train_experts(None, "after", rule=forging.Muon())
    for (kind, policy), way in itertools.product(TESTED.items(), ("armed", "stash")):
        name = f"forged experts, {kind}, {way}"
        parallel.as_good(name, f32, train_experts(policy, way), peer, exact)
        parallel.as_good(f"{name}, masters", f32, train_experts(policy, way, "master"), masters, exact)
    for (kind, policy), matrices_ in itertools.product(TESTED.items(), (1, 3)):
        found = train_experts(policy, "armed", rule=forging.Muon(), slab=4 * 12 * 8 * matrices_)
        tolerance = 2e-2 if here().type == "cuda" else 1e-4  # there in bf16
        parallel.compare(f"Muon of experts, {kind}, {matrices_} at a time", found, whole, tolerance)
    wide = dict(D=128, hidden=320, slab=4 * 128 * 256)  # an expert is larger than a slab
    mini = dict(rule=forging.AdamMini(weight_decay=0.1), steps=1, **wide)
    whole = train_experts("ep", "after", **mini)
    for rung, backend in forging.rungs(here()):
        name, how = f"experts, {rung}, {backend}", dict(rung=rung, backend=backend)
        parallel.as_good(f"forged {name}", f32, train_experts("ep", "armed", **how), peer, exact)
        parallel.compare(f"Adam-mini of {name}", train_experts("ep", "armed", **mini, **how), whole, 1e-5)
    exact, peer = (train_experts(None, "torch", dtype=dtype, **wide) for dtype in (fp64, f32))
    found = train_experts("ep", "armed", rung="slab", **wide)
    more = 2 * dist.get_world_size() * torch.finfo(f32).eps  # of so wide an expert each of three steps rounds anew
    parallel.as_good("forged experts, several slabs each", f32, found, peer, exact, more)
    moe = random_layer(f32, 8, 12, 8)
    forging.forge(moe, SGD, data_parallel=1).arm(0.1, 1)
    y = moe(torch.ones(4, 8, device=here()))
    with torch.no_grad():
        moe.down.weight.mul_(1)
    parallel.must_raise("changed between forward and backward", y.sum().backward)


def check_recompute():
    """Recomputed layers: the same gradients, and every token counted once."""
    found = []
    for again in (False, True):
        model = with_experts(parallel.tiny(1), hidden=16, experts=4, top_k=2)
        if again:
            parallel.recompute(model)
        balance = Balance(model)
        loss = parallel.serial_loss(model, *parallel.tiny_tokens(model)) + balance.loss()
        loss.backward()
        parallel.expect("routings left by backward", [layer.routing for layer in balance.layers], [None] * 2)
        found.append(parallel.gradients(model))
    parallel.compare("recomputed", *reversed(found))


def check_activations():
    """What a model with experts and its balance loss leave alive for backward, less what a dense one does, is as
    predicted to a thousandth, in fp32 and with autocast."""
    tokens, shape = torch.zeros(64, 32, dtype=torch.int64), (64, 32, 2, 2, 64)
    dense = base.GPT(base.GPTConfig(*shape))

    def forward(model, autocast, loss=lambda: None):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens), loss()

    for autocast, (E, K) in itertools.product((False, True), ((8, 2), (4, 1))):
        model = with_experts(base.GPT(GPTConfig(*shape, E, K)))
        works = (dense, autocast), (model, autocast, Balance(model).loss)
        less, more = (parallel.kept_bytes(functools.partial(forward, *work))[0] for work in works)
        predicted = activation_change(model.config, tokens.numel(), autocast)
        parallel.expect(f"bytes of {E} experts, top {K}, autocast {autocast}", more - less, predicted, 1e-3)


@on_ranks
def check_folding():
    """Lists of ranks by hand; then a GPT whose attention is cut by tensor, sequence (and, from 4 ranks on, context)
    parallelism while its experts are spread over all of these ranks: gradients equal the serial model's. From 4 ranks
    on also a layer whose experts have two copies, each spread over half of the ranks, and lent there."""
    parallel.expect("groups", fold(tp=2, cp=2, dp=2, ep=4), dict(
        tp=[[0, 1], [2, 3], [4, 5], [6, 7]], cp=[[0, 2], [1, 3], [4, 6], [5, 7]], dp=[[0, 4], [1, 5], [2, 6], [3, 7]],
        pp=[[rank] for rank in range(8)], ep=[[0, 1, 2, 3], [4, 5, 6, 7]], edp=[[0, 4], [1, 5], [2, 6], [3, 7]]))
    parallel.expect("a stage's copies", fold(tp=2, dp=2, ep=2, pp=2)["edp"], [[0, 2], [1, 3], [4, 6], [5, 7]])
    n = dist.get_world_size()
    cp = 2 if n % 4 == 0 else 1
    attention, everyone = mesh(tp=n // cp, cp=cp), folded_groups(tp=n // cp, cp=cp, ep=n)["ep"]
    whole = with_experts(parallel.tiny(n), hidden=16, experts=2 * n, top_k=2)
    model, (tokens, targets) = copy.deepcopy(whole), parallel.tiny_tokens(whole, 1)
    parallel.serial_loss(whole, tokens, targets).backward()
    parallel.tensor_parallel(model, attention.tp, sequence=True)
    if cp > 1:
        parallel.context_parallel(model, attention.cp)
    expert_parallel(model, everyone)
    tokens, targets = (parallel.split_sequence(x, attention.cp) for x in (tokens, targets))
    loss = parallel.vocab_parallel_cross_entropy(
        model(tokens), model.classifier, targets, attention.tp, model.config.vocab, sequence=True, reduction="sum")
    (loss / parallel.global_count(targets != -100, attention.cp)).backward()
    groups = {"moe.up": None, "moe.down": None, "moe.router": everyone, "": attention.cp}
    want, found = gradients_of_ranks(model, whole, groups)
    worst = parallel.compare("folded", found, want)
    if cp > 1:
        want, found, *_ = layers_of_ranks("a hot expert", torch.float64, LLEP, folded_groups(dp=n, ep=n // 2))
        worst = max(worst, parallel.compare("copies of experts", found, want))
    return worst


# Bugs to plant. All but leaves-early, for which the others wait, run to their end: only a comparison tells.


def _step_at_once(*arguments, gradient=Gradient):
    """The step is taken as soon as there is a gradient: what comes after it in backward reads the new weights."""
    made = gradient(*arguments)
    found = made.finish()
    made.finish = lambda: found
    return made


# name: (the check that must catch it, what is replaced, the bug). committed, global_counts and recording are functions
# so that a bug can take their place. A default argument keeps the original.
BREAKS = {
    # With one expert a token the weight is 1, and the router learns nothing.
    "always-normalised": (check_routing, "Routing", lambda logits, scores, experts, weights, routing=Routing: routing(
        logits, scores, experts, weights / weights.sum(1, keepdim=True))),
    "unweighted": (check_layer, "gather_rows", lambda source, index, weights=None, gather=gather_rows: gather(
        source, index)),
    "ignore-pending": (check_least_loaded, "committed", lambda assigned, pending: assigned),
    "counted-twice": (check_recompute, "recording", torch.is_grad_enabled),
    # No tokens, nothing to do.
    "leaves-early": (check_empty_rank, "ExpertParallel", parallel.changed(
        ExpertParallel, __call__=lambda it, x, choice, begin, experts, moe, call=ExpertParallel.__call__: (
            call(it, x, choice, begin, experts, moe) if len(x) else (x, choice, experts)))),
    "local-f": (check_balance, "global_counts", lambda counts, group: counts),
    # A borrower sends zeros.
    "kept-gradients": (check_expert_parallel, "Loans", parallel.changed(
        Loans, give_back=lambda it, dY, X, dtype, give=Loans.give_back: give(it, torch.zeros_like(dY), X, dtype))),
    "new-weight": (check_forged_experts, "Gradient", _step_at_once),
}
if HAS_TRITON:  # a tile stores all of its rows, also the next expert's
    BREAKS["no-tail"] = check_products, "Tiles", lambda expert, row, stop, count, tiles=Tiles: tiles(
        expert, row, torch.full_like(stop, stop.max().item()), count)
CHECKS = [check_expert_parallel, check_balance, check_forged_experts, check_folding]  # on ranks
BY_ONE = [check_routing, check_layer, check_activations, check_least_loaded, check_recompute, check_empty_rank]
BY_ONE += [check_products] * HAS_TRITON


# ==== 10. Study: do experts specialise? ===============================================================================
#
# A small GPT learns four kinds of text, its domains. The loss counts f in three ways:
#
#     micro-batch, one domain     over four sequences of one kind: it forbids each kind of text experts of its own
#     micro-batch, mixed          over one sequence of each kind: it can be even though each kind has its own experts
#     global batch                over all sequences of a step
#
# "Bits of domain" are what a token's expert tells of its domain: their mutual information, 2 if it tells all apart. The
# first way is the condition of the paper's claim (2501.11873), and of large runs, whose micro-batch is a sequence or a
# few, of one document each. The second is the best that a micro-batch's f can be: 256 tokens are still few to count.

DOMAINS = ("source", "documentation", "numbers", "base64")


@functools.cache
def domain_texts():
    """{domain: 2^18 bytes, uint8}: the standard library's source without its documentation strings, those strings,
    decimal numbers, and random bytes in base64."""
    length, generator = 2**18, np.random.default_rng(0)
    source, documentation = [], []
    for path in filtering.source_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found = [ast.get_docstring(node, clean=False) for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        for part in filter(None, found):
            text = text.replace(part, "")
            documentation.append(part)
        source.append(text)
        if min(sum(map(len, source)), sum(map(len, documentation))) > length:
            break
    numbers = ", ".join(str(x) for x in np.round(generator.lognormal(3, 3, length // 5), 3))
    texts = "\n".join(source), "\n".join(documentation), numbers, base64.b64encode(generator.bytes(length)).decode()
    return {name: np.frombuffer(text.encode()[:length], np.uint8) for name, text in zip(DOMAINS, texts, strict=True)}


def batch_of(texts, count, T, generator, mixed=False):
    """Inputs, targets (texts count, T): `count` windows of each text, text by text; mixed: one of each text in turn."""
    windows = torch.stack([low_comm.windows(text, generator, count, T) for text in texts])  # (texts, count, T + 1)
    rows = (windows.transpose(0, 1) if mixed else windows).flatten(0, 1)
    return rows[:, :-1], rows[:, 1:]


def mutual_information(counts):
    """counts (domains, E) -> bits that a token's expert tells of its domain."""
    p = counts.double() / counts.sum()
    independent = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
    return (p * (p / independent).log2()).nan_to_num(0).sum().item()


def micro_loss(balance, count):
    """The mean of the balance losses of `count` micro-batches, each with its own f, that the model had as one batch."""
    total = 0.0
    for layer in balance.layers:
        scores, experts = (x.unflatten(0, (count, -1)) for x in (layer.routing.scores, layer.routing.experts))
        total += balance_loss(scores, counts_of(experts, layer.experts))  # a sum over the micro-batches
    return balance.coefficient * total / count


def train_on_domains(kind, seed, steps, options):
    """Train a small GPT with experts on four domains, four windows of each a step. kind: Balance's, but "micro" with
    four micro-batches of one domain each, "mixed" with four of a window of each. These go through the model as one
    batch, so that all kinds see the same numbers. options: with_experts()'s, beside hidden=64. Returns, of text that is
    not trained on, nats a byte, bits of domain and max_violation, means over layers, and the number of parameters."""
    torch.manual_seed(seed)
    T = 64
    model = with_experts(base.GPT(base.GPTConfig(256, T, 2, 4, 64)), **dict(hidden=64) | options)
    balance = Balance(model, "none" if kind in ("micro", "mixed") else kind, coefficient=3e-2, rate=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    texts, generator = list(domain_texts().values()), np.random.default_rng(seed)
    train, held_out = [text[: len(text) * 3 // 4] for text in texts], [text[len(text) * 3 // 4 :] for text in texts]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 20, (steps - step) / (steps / 2))
        x, y = batch_of(train, 4, T, generator, kind == "mixed")
        loss = cce.linear_cross_entropy(model(x), model.classifier, y)
        if kind in ("micro", "mixed"):
            loss = loss + micro_loss(balance, len(texts))
        (loss + balance.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        balance.step()
    x, y = batch_of(held_out, 64, T, np.random.default_rng(1))
    loss = cce.linear_cross_entropy(model(x), model.classifier, y).item()  # with gradients, so that routings are kept
    tables = []
    for layer in balance.layers:
        experts = layer.take_routing().experts.view(len(texts), -1, layer.top_k)  # (domains, tokens, K)
        tables.append(counts_of(experts, layer.experts))  # (domains, E)
    bits, uneven = map(mutual_information, tables), (max_violation(t.sum(0)).item() for t in tables)
    return loss, statistics.mean(bits), statistics.mean(uneven), model.config.parameters()


# ==== 11. Measurements ================================================================================================
#
# What is predicted: bytes, to the byte; and that least-loaded experts bring what the loads promise, the time of plain
# ones over the ratio of loads (largest over mean), at best: that ratio would also make the exchanges shorter, and the
# reading of weights that have hardly any rows, which it does not. On two H200s, H = 4096, 95 % of the choices for one
# expert: the ratio is 1.95, plain experts take 24.7 ms. But even loads take 15.0: 84 % of the ratio is all there is.
#
# Routings are made up here: every expert equally often, or a share of all choices for a few hot experts, which are
# drawn one by one, so that a token may have one twice. Loads count here, and not which token goes where.


def made_up_routing(N, K, E, share=None, hot=0):
    """A Routing of N tokens, all weights equal. share: of the choices for the first `hot` experts; None: even."""
    experts = torch.arange(N * K, device=here()) % E
    if share is not None:
        chances = torch.tensor(hot_loads(E, share, hot), dtype=torch.float32, device=here())
        experts = chances.multinomial(N * K, replacement=True)
    return Routing(None, None, experts.view(N, K), torch.full((N, K), 1 / K, device=here()))


def measure_bytes(N=64, D=32, H=48, d=8, b=4):
    """What is sent in a step, rows, matrices and their gradients: by a rank, if loads are even; by all of them, if all
    tokens choose expert 0. Then plain experts send all tokens but one rank's, least-loaded ones that expert alone."""
    n, rows = dist.get_world_size(), []
    group, E, others = mesh(dp=n).dp, 4 * n, n - 1
    for claim, formula, policy, to_one, options, predicted in (
        ("EP: rows sent", "4 N K D b (n-1)/n", "ep", None, {}, 2 * exchange_bytes(N, 2, D, n, b)),
        (f"  at BigMac's width D / {D // d}", "d / D of that", "ep", None, dict(bottleneck=d),
         2 * exchange_bytes(N, 2, d, n, b)),
        ("EP, all to one: rows sent", "4 N D b of n - 1 ranks", "ep", 1.0, {}, 4 * N * D * b * others),
        ("  matrices and gradients", "4 D H b a loan", LLEP, 1.0, {}, 4 * D * H * b * others),
    ):
        K = 1 if to_one else 2
        moe = MoE(D, H, E, K, **options).to(here())
        expert_parallel(moe, group, policy)
        x = torch.ones(N, D, device=here(), requires_grad=True)
        sent.clear()
        moe.mix(x, made_up_routing(N, K, E, to_one, 1)).sum().backward()
        mine = torch.tensor(sum(sent[kind] for kind in ("all-to-all", "weights", "gradients")), device=here())
        measured = parallel.all_reduce(mine, group).item() / (1 if to_one else n)
        rows.append(Row(claim, formula, predicted / 1024, measured / 1024, "KiB", (1, 1)))
    return rows


def in_turn(ways, rounds=5, calls=4):
    """{way: milliseconds a call}, the median of rounds in which each way has its turn, several calls in a row: clocks
    drift, and the host launches ahead of the device."""
    times = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _, (name, way) in itertools.product(range(rounds), ways.items()):
        several = lambda way=way: [way() for _ in range(calls)]  # noqa: E731
        times[name].append(base.bench(several, "cuda", warmup=0, runs=2).median / calls)
    return {name: statistics.median(found) for name, found in times.items()}


HOT = [(None, 0), (0.5, 1), (0.8, 1), (0.8, 8), (0.95, 1), (0.95, 8)]  # share of the choices on so many experts
POLICY_TABLE = """GPUs, 32 experts of 4096 x H, 16384 tokens a rank, top 2, bf16; hot ones on rank 0
     H   choices, on   ratio   EP ms   LLEP ms   speed-up   of the ratio   peak memory"""


def measure_policies(H, D=4096, E=32, N=16384, K=2):
    """Forward and backward of a layer of E experts, N tokens a rank: plain and least-loaded expert parallelism, and
    what the loads promise. (a Row of the worst case, lines of POLICY_TABLE)."""
    n, cases, lines = dist.get_world_size(), [], []
    group = mesh(dp=n).dp
    torch.manual_seed(dist.get_rank())
    with here():  # billions of random numbers
        moe, x, dy = MoE(D, H, E, K).bfloat16(), torch.randn(N, D).bfloat16(), torch.randn(N, D).bfloat16()
    expert_parallel(moe, group, "llep")
    leaves = x.requires_grad_(), moe.up.weight, moe.down.weight
    largest = lambda number: parallel.all_reduce(  # noqa: E731
        torch.tensor(float(number), device=here()), group, dist.ReduceOp.MAX).item()
    for share, hot in HOT:
        routing, times, peaks = made_up_routing(N, K, E, share, hot), [], []

        def step(policy, routing=routing):
            moe.exchange.policy = policy
            return torch.autograd.grad(moe.mix(x, routing), leaves, dy)

        ways = {name: functools.partial(step, policy) for name, policy in POLICIES.items()}
        for name, time in in_turn(ways, rounds=3).items():
            times.append(largest(time))
            peaks.append(largest(base.peak_bytes(ways[name], here())))
        loads = moe.exchange.plan.sum(0)
        ratio = at_home(loads, n).sum(1).max() / (loads.sum() / n)
        gain, label = times[0] / times[1], "even" if share is None else f"{share:.0%} on {hot}"
        lines.append(f"{H:>6}{label:>14}{ratio:8.2f}{times[0]:8.2f}{times[1]:10.2f}{gain:11.2f}{gain / ratio:15.0%}"
                     f"{peaks[1] / peaks[0]:14.2f}")
        cases.append((ratio / gain, label, times[0] / ratio, times[1]))
    _, label, *times = max(cases)
    return Row(f"LLEP, H = {H}, worst: {label}", "EP / ratio of loads", *times, "ms", (0.9, 1.6)), lines


def all_checks(only=None):
    """{check: its fp64 error, if it has one}, on the ranks of this world; of all checks, or of one name."""
    parallel.meet("the first check", parallel.TIMEOUT)
    return {name.replace("_", " "): check() for check, name in base.named(CHECKS, only).items()}


def everything():
    """All checks and measurements of the ranks: (where they ran, fp64 errors, rows, lines)."""
    errors, rows, lines, on_gpus = all_checks(), measure_bytes(), [], here().type == "cuda"
    for width in (4096, 14336) if on_gpus else ():
        worst, more = measure_policies(width)
        rows, lines = [*rows, worst], lines + more
        torch.cuda.empty_cache()
    return "GPUs, NCCL" if on_gpus else "the CPU, gloo", errors, rows, lines


# The products of section 4 are compared with a dense one of as many FLOPs, the most that can be hoped for, and with
# torch's grouped_mm. X W^T and dY W of even rows should come near the former if they are so many that weights' bytes
# are no bound; of all the ways, what "auto" takes (a star) must never lose more than a quarter to the loop.


def products_of(R, M, C, E, loads):
    """{way: (X W^T, dY W, dY^T X), to be called}; "one launch" has no third."""
    x, dy, W = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((R, C), (R, M), (E * M, C)))
    begin = torch.tensor([0, *loads.cumsum().tolist()], device="cuda")
    ends, cube, rows, on = begin[1:].int(), W.view(E, M, C), Rows(begin), functools.partial
    both = lambda way: tuple(  # noqa: E731
        on(experts_product, *operands, backend=way) for operands in ((x, W, rows), (dy, W, rows, True)))
    gradient = on(experts_gradient, dy, x, rows)
    return {
        "dense": (on(torch.mm, x, W[:M].T), on(torch.mm, dy, W[:M]), on(torch.mm, dy.T, x)),
        "grouped_mm": (on(F.grouped_mm, x, cube.transpose(1, 2), offs=ends), on(F.grouped_mm, dy, cube, offs=ends),
                       on(gradient, backend="grouped")),
        "loop": (*both("torch"), on(gradient, backend="torch")),
        "one launch": both("triton"),
    }


def measure_products(ledger):
    """TFLOP/s of the products over all experts: one launch, the loop, torch's grouped_mm, and one dense product of as
    many FLOPs; on the way forward, for dX and for dW."""
    share_of_dense, over_loop, line = [], [], "{:>6}{:>6}{:>6}{:>5}  {:<10}{:>13}{:>15}{:>15}{:>13}{:>17}"
    print("\nTFLOP/s of R rows over E experts (M, C), bf16; X W^T, dY W, dY^T X; share: of dense, what is taken (*)")
    print(line.format("R", "M", "C", "E", "rows", "dense", "grouped_mm", "loop", "one launch", "share"))
    shapes = [(65536, 1536, 768, 8), (32768, 4096, 4096, 8), (32768, 4096, 4096, 32), (32768, 4096, 4096, 128)]
    for (R, M, C, E), kind in itertools.product(shapes, ("even", "80 % hot")):
        torch.manual_seed(0)
        ways, flops = products_of(R, M, C, E, hot_loads(E, 1 / E if kind == "even" else 0.8, 1, R)), 2 * R * M * C
        times = [in_turn({name: three[i] for name, three in ways.items() if i < len(three)}) for i in range(3)]
        chosen = ["loop" if flops >= LOOP_FROM * E else "one launch"] * 2
        chosen.append("loop" if flops >= GRADIENT_LOOP_FROM * E else "grouped_mm")
        taken = list(zip(times, chosen, strict=True))
        cells = [" ".join(f"{flops / 1e9 / t[name]:.0f}{'*' * (name == choice)}" for t, choice in taken if name in t)
                 for name in ways]
        of_dense = [t["dense"] / t[choice] for t, choice in taken]
        print(line.format(R, M, C, E, kind, *cells, " ".join(f"{share:.0%}" for share in of_dense)))
        over_loop += [t[choice] / t["loop"] for t, choice in taken]
        share_of_dense += of_dense[:2] if kind == "even" and R >= 1024 * E else []
    print()
    ledger.row("even, 1024 rows or more: time", "one dense product", 1.0, 1 / min(share_of_dense), "", (0.8, 1.34))
    ledger.row("all rows, worst product: time", "the loop", 1.0, max(over_loop), "", (0, 1.25))


# Kinds of balance: train_on_domains()'s, and what differs from its layer. BigMac's has as many parameters.
STUDY = {"no balance": ("none", {}), "micro-batch, one domain": ("micro", {}), "micro-batch, mixed": ("mixed", {}),
         "global batch": ("global", {}), "bias": ("bias", {}),
         "  BigMac, global batch": ("global", dict(bottleneck=16, hidden=248))}


def print_study(ledger, names, seeds, steps):
    """Loss and specialisation by kind of balance, and BigMac's layer beside one of as many parameters."""
    print(f"\nstudy: 8 experts, top 2, 2 layers, {steps} steps of 4 x 4 windows, seeds {', '.join(map(str, seeds))}; "
          f"text: {', '.join(DOMAINS)}")
    bits, line = {}, "{:<26}{:>18}{:>18}{:>8}{:>12}"
    print(line.format("balance", "nats a byte", "bits of domain", "MaxVio", "parameters"))
    jobs = [(STUDY[name][0], seed, steps, STUDY[name][1]) for name in names for seed in seeds]
    # A core each: so small a model keeps no GPU busy.
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count()), multiprocessing.get_context("spawn"),
                             torch.set_num_threads, (1,)) as pool:
        runs = pool.map(train_on_domains, *zip(*jobs, strict=True))
    for name in names:
        losses, found, uneven, parameters = zip(*itertools.islice(runs, len(seeds)), strict=True)
        cells = (f"{statistics.mean(values):.3f} +- {statistics.pstdev(values):.3f}" for values in (losses, found))
        print(line.format(name, *cells, f"{statistics.mean(uneven):.2f}", f"{parameters[0]:,}"))
        bits[name] = statistics.mean(found)
    ledger.row("bits of domain: global batch", "3 x micro-batch's", 3 * bits["micro-batch, one domain"],
               bits["global batch"], "", (1, math.inf))


def check_all(device, only, args):
    """--check."""
    parallel.check_both(CHECKS, BY_ONE, only, args.ranks, None, stage=globals())


def body(device, ledger, args):
    where, errors, rows, lines = in_ranks("everything", args.ranks, stage=globals())
    alone = {name: base.call_check(check, device) for check, name in base.named(BY_ONE).items()}
    print("\n128 experts on 8 GPUs, one expert hot    ratio of EP's largest load to LLEP's   speed-up, published")
    for share, published in PUBLISHED.items():
        ratio = alone["least_loaded"][share]
        print(f"  {share:.0%} of the choices{ratio:>40.2f}{published:>27.2f} ({published / ratio:.0%})")
    if lines:
        print("", f"{args.ranks} {POLICY_TABLE}", *lines, sep="\n")
    short = ["micro-batch, one domain", "micro-batch, mixed", "global batch"]
    print_study(ledger, *(STUDY, (0, 1, 2), 300) if args.study else (short, (0,), 60))
    for name, error in errors.items():
        if error is not None:
            ledger.row(f"{name}: error", "fp64, against serial", 1e-12, error, "", (0, 1))
    for row in rows:
        ledger.row(*row)
    if device.type == "cuda":
        measure_products(ledger)
    names = ", ".join([*errors, *alone]).replace("_", " ")
    print(f"{args.ranks} processes on {where}; checks passed: {names}")


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2, help="processes, of which each has some of "
                        "the 8 experts of the checks (2)")
    parser.add_argument("--study", action="store_true", help="all kinds of balance, three seeds: minutes on a CPU")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python train.py"))


# Exercises
#   1. Let the product kernel gather its rows itself (an index instead of a range): what does it save, and cost?
#   2. Give least_loaded a price for lending: FLOPs saved against bytes sent (4 D H numbers). When is 1024 rows wrong?
#   3. Cut each expert, too (expert tensor parallelism): which collectives join the exchange, and what does fold() say?
