"""01 - Where the memory goes, and how we measure it.

The puzzle
    Train on 65,536 tokens with a vocabulary of 65,536 classes, and the last layer of the model writes

        65536 tokens x 65536 classes x 2 bytes = 8 GiB

    of logits. The loss then reads ONE number per row (the target's logit) and one sum per row (the normaliser).
    Everything else in those 8 GiB exists only to be read once more in backward and thrown away. In fp32, with the
    copies that a straightforward loss makes, the same step holds 48 GiB. 02 removes the buffer. This file counts
    first: what takes memory, how we know, and how far PyTorch alone gets.

The maths                                          N tokens, D hidden width, V vocabulary, x (N,) targets
    logits[n, v] = E[n] . C[v] + bias[v]           E (N, D) final hidden states (the paper: embeddings)
    lse[n]       = log sum_v exp(logits[n, v])     C (V, D) classifier (the output embedding, lm_head)
    loss[n]      = lse[n] - logits[n, x[n]]
    d loss[n] / d logits[n, v] = softmax(logits[n])[v] - [v == x[n]]

What you will see
    A ladder of remedies that need nothing but PyTorch, with predicted and measured peak memory; a training step
    taken apart by category; and the batch sizes of published models with and without logits. A prediction outside
    its band makes the script fail.

How to launch
    python 01_logits_memory.py                  GPU if there is one, otherwise the CPU; under a minute
    python 01_logits_memory.py --break no-max   plant a famous bug and watch its check fail (exit status 1)
    python 01_logits_memory.py --check          the checks alone, without measurements

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009 (Figure 1, Tables A1 and A3).
    Chunking over tokens with the gradient formed in forward: torchtune and Liger Kernel, arXiv 2410.10989.

Left out on purpose: activation checkpointing, label smoothing, z-loss (add c * lse^2 of the returned lse to the loss).
"""

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import inspect
import io
import math
import os
import platform
import statistics
import sys
import sysconfig
import textwrap
import time
import weakref
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The one place that decides how Triton runs. Triton reads TRITON_INTERPRET when a kernel is defined, so the choice has
# to stand before any file of this series imports triton; this is the only question we ask the driver at import.
HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # no GPU to compile for: kernels run as NumPy, slowly, for tests and checks
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

MIB = 2**20


class BadInput(ValueError):
    """A user's mistake: one line that names the fix. run_stage and train.py turn it, and OSError, into that line and
    status 2; any other error keeps its traceback."""

# ==== 1. The reference: two stages, everything materialised, obviously correct ========================================
#
# The maths above, line by line, and the yardstick of every faster version. One thing needs care: exp(89) overflows in
# fp32. The largest logit of a row can be taken out first, since it cancels:
#
#     log sum exp(l) = m + log sum exp(l - m)       logits 1000, 1001:  1001 + log(e^-1 + e^0) = 1001.313, no overflow
#
# In torch a row's derivative falls out by itself; 02 will write it down: softmax - onehot, times what comes from above.


def log_sum_exp(logits):
    """(..., V) -> (...). The maximum cancels, so no gradient runs through it."""
    top = logits.detach().amax(-1, keepdim=True)  # (..., 1)
    return top.squeeze(-1) + (logits - top).exp().sum(-1).log()


def token_losses(lse, target_logit, targets, V, ignore_index=-100):
    """lse, target_logit, targets (...) -> loss (...): 0 for ignored tokens, NaN for targets that are no class."""
    loss = (lse - target_logit).where((targets >= 0) & (targets < V), math.nan)
    return loss.where(targets != ignore_index, 0.0)


def reduce_loss(loss, kept, reduction):
    """loss, kept (...): "mean" divides by the number of kept tokens, or by 1 when a micro-batch is all padding."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy_reference(
    E, C, targets, bias=None, *, ignore_index=-100, softcap=None, reduction="mean", return_lse=False
):
    """Cross-entropy of E C^T against targets, the obvious way.

    E (..., D), C (V, D), bias (V,): any float dtype; computed in fp32, or in fp64 when E is fp64. targets (...) int64.
    softcap s replaces a logit l by s tanh(l / s). Tokens with ignore_index have loss 0; if all are ignored, the loss is
    0 and every gradient is zero (torch's mean would be NaN). Returns the loss, scalar or (...) for reduction="none";
    with return_lse also the log-sum-exp (...) of every token. BadInput on arguments that do not fit, targets included.
    """
    check_arguments(E, C, targets, bias, reduction, softcap)
    check_target_range(targets, C.shape[0], ignore_index)
    dtype = torch.float64 if E.dtype == torch.float64 else torch.float32
    with torch.autocast(E.device.type, enabled=False):
        logits = E.to(dtype) @ C.to(dtype).T  # (..., V): the buffer that this series is about
        if bias is not None:
            logits = logits + bias.to(dtype)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        lse = log_sum_exp(logits)  # (...)
        index = targets.clamp(0, C.shape[0] - 1)  # any class will do for an ignored token
        target_logit = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)  # (...)
        loss = token_losses(lse, target_logit, targets, C.shape[0], ignore_index)
        loss = reduce_loss(loss, targets != ignore_index, reduction)
    return (loss, lse) if return_lse else loss


def check_arguments(E, C, targets, bias=None, reduction="mean", softcap=None):
    """Raise BadInput with one line that names the argument, its value and the fix."""
    if C.dim() != 2 or not C.numel():
        raise BadInput(f"C has shape {tuple(C.shape)}: pass the classifier as (V, D), neither of them 0")
    if E.dim() < 2 or E.shape[-1] != C.shape[1]:
        raise BadInput(f"E has shape {tuple(E.shape)}: pass (..., {C.shape[1]}), one row a token, as wide as C")
    if targets.shape != E.shape[:-1]:
        raise BadInput(f"targets has shape {tuple(targets.shape)}: pass one per row of E, {tuple(E.shape[:-1])}")
    if targets.dtype != torch.int64:
        raise BadInput(f"targets has dtype {targets.dtype}: pass targets.long()")
    if bias is not None and bias.shape != C.shape[:1]:
        raise BadInput(f"bias has shape {tuple(bias.shape)}: pass one value per class, ({C.shape[0]},)")
    if reduction not in ("mean", "sum", "none"):
        raise BadInput(f"reduction is {reduction!r}: use 'mean', 'sum' or 'none'")
    if softcap is not None and not 0 < softcap < math.inf:
        raise BadInput(f"softcap is {softcap!r}: use None or a positive number")
    for name, tensor in (("C", C), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != E.device:
            raise BadInput(f"{name} is on {tensor.device} but E is on {E.device}: move {name} there")


def check_target_range(targets, vocab, ignore_index):
    """Raise BadInput when a target is neither a class nor ignore_index. Reads the targets back: stalls a GPU."""
    bad = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab))]
    if bad.numel():
        raise BadInput(f"targets holds {int(bad[0])}: use 0 to {vocab - 1}, or ignore_index = {ignore_index}")


# ==== 2. The cost model: bytes, before anything is measured ===========================================================
#
# A prediction is a formula that was written down before the measurement. These are ours for the losses of section 3.
# G is the gradient of the logits, softmax - onehot times what comes from above.
#
#   materialised    in backward three fp32 (N, V) buffers are alive at once: the log-probabilities kept from forward,
#                   their gradient, and G                                                                   12 N V
#   in chunks       one fp32 buffer of `chunk` rows of logits, which becomes G in place, and for 16-bit inputs a copy
#                   of G in 16 bits for the matrix products; beside them dE, b bytes an element, and the sum for dC in
#                   fp32. When the chunks are gone, backward makes the two results, b (N + V) D, of those two.
#
# The puzzle's numbers, N = V = 65,536 and D = 768 in bf16 (b = 2), MiB:
#
#   materialised    3 buffers of 16,384                                                 49,152, or 48 GiB
#   in 8 chunks     dE 96, the sum for dC 192, a chunk 2,048 and its copy 1,024          3,360, or 3.3 GiB


def materialised_bytes(N, V):
    """Peak of a materialised loss and its gradients, beyond its inputs."""
    return 3 * 4 * N * V


def chunked_bytes(N, V, D, chunk, itemsize):
    """Peak of the chunked loss and its gradients, beyond its inputs."""
    narrow = itemsize if itemsize < 4 else 0
    return itemsize * N * D + max(4, itemsize) * V * D + max((4 + narrow) * chunk * V, itemsize * (N + V) * D)


class ModelShape(NamedTuple):
    """A published model: vocabulary V, hidden width D, layers L; params as the paper counts them, buffers included
    (GPT-2: 124,439,808 and 12 causal masks of 1024^2); what its Table A3 prints: tokens a batch with and without
    logits."""

    name: str
    vocab: int
    hidden: int
    layers: int
    params: int
    printed: tuple


MODELS = [
    ModelShape("GPT-2", 50257, 768, 12, 137_022_720, (5_866_190, 69_845_595)),
    ModelShape("GPT-Neo 1.3B", 50257, 2048, 24, 1_365_907_456, (4_268_047, 12_996_042)),
    ModelShape("Gemma 2B", 256000, 2048, 18, 2_506_172_416, (1_155_515, 17_204_330)),
    ModelShape("Gemma 2 2B", 256000, 2304, 26, 2_614_341_888, (1_108_206, 10_580_057)),
    ModelShape("Llama 2 7B", 32000, 4096, 32, 6_738_415_616, (3_164_429, 4_709_560)),
    ModelShape("Llama 3 8B", 128256, 4096, 32, 8_030_261_248, (1_579_333, 4_670_136)),
    ModelShape("Mistral 7B", 32000, 4096, 32, 7_241_732_096, (3_154_108, 4_694_200)),
    ModelShape("Phi 1.5", 50295, 2048, 24, 1_418_270_720, (4_264_482, 12_991_781)),
]
LOGIT_BYTES = 4  # the paper counts logits in fp32


def max_batch_tokens(shape, gpus=16, gib_per_gpu=75, logits=True):
    """Largest batch in tokens that fits when each layer keeps only its (D,) input in bf16 (checkpointing).

    weights, gradients and optimizer take 8 bytes a parameter; a token takes 2 D L bytes of activations and, with
    logits=True, 4 V bytes of logits. arXiv 2411.09009, Table A3 (75 GiB a GPU is inferred from its digits)."""
    budget = gpus * gib_per_gpu * 2**30 - 8 * shape.params
    per_token = 2 * shape.hidden * shape.layers + (LOGIT_BYTES * shape.vocab if logits else 0)
    return round(budget / per_token)


# ==== 3. The ladder of remedies inside PyTorch ========================================================================
#
# Rung 0 is what most people write. Rung 1 drops the tokens that have no loss before the classifier sees them. Rung 2
# cuts the tokens into chunks, and uses that the gradient of a mean needs nothing from backward but one scalar: so it
# can be formed in forward, while the chunk's logits are at hand.
#
#            V classes               for each chunk:  logits = E C^T                 2 chunk V D FLOP
#        +-----------------+                          softmax in place of the logits, minus the onehot: G
#        |/////////////////|  chunk                   dE of these rows = G C         2 chunk V D
#        +-----------------+                          dC += G^T E                    2 chunk V D
#        |                 |         Three matrix passes over all, as many as with the logits kept; what it costs is dC,
#        +-----------------+         now a sum over chunks, in fp32 so that small terms are not lost in it.


def materialised_loss(E, C, targets):
    """Rung 0: logits in the dtype of E, then a cross-entropy in fp32. E (N, D), C (V, D), targets (N,) -> mean."""
    return F.cross_entropy((E @ C.T).float(), targets)


def drop_ignored(loss, E, C, targets, ignore_index=-100):
    """Rung 1, for every loss(E, C, targets) of this series. The boolean mask reads a count back, which stalls a GPU
    once. With nothing left the loss is 0, and so are the gradients."""
    kept = targets != ignore_index  # (N,)
    if not kept.any():
        return (E[:0].sum() + C[:0].sum()).float()
    return loss(E[kept], C, targets[kept])


# What a product's factors and its sum are made of, for inputs in bf16:
#
#             factors    their sum     the result
#     CPU     fp32       fp32          fp32 (addmm), or rounded to bf16 at the end (copy_)
#     GPU     bf16       fp32          bf16 (addmm, beta = 0), or fp32: the same with out_dtype, one cuBLAS call


def product_dtypes(E):
    """The dtype of sums of products with E, and that of their factors: on a GPU its own, since matrix units take 16
    bits and sum in fp32; on a CPU fp32, since it has no such units."""
    sums = torch.promote_types(E.dtype, torch.float32)
    return sums, E.dtype if E.is_cuda else sums


def add_to(total, A, B, beta=1):
    """total = beta total + A @ B, summed in the dtype of total whatever the factors are."""
    if A.dtype == total.dtype:
        return total.addmm_(A, B.to(A.dtype), beta=beta)
    return torch.addmm(total, A, B, beta=beta, out_dtype=total.dtype, out=total)


def set_to(out, A, B):
    """out = A @ B, summed in fp32 (fp64), rounded once (of a product cut into parts, cuBLAS may round each part)."""
    if out.dtype in (A.dtype, torch.promote_types(A.dtype, torch.float32)):
        return add_to(out, A, B, beta=0)  # which does not read what was there, not even NaN
    return out.copy_(A @ B.to(A.dtype))


def block_logits(E, C, bias=None, softcap=None):
    """E (N, D), C (W, D) a block of classes, bias (W,) -> (N, W), in fp32 or fp64 whatever the inputs are."""
    sums, narrow = product_dtypes(E)
    logits = E.to(sums) @ C.to(sums).T if narrow == sums else torch.mm(E, C.T, out_dtype=sums)  # (N, W)
    if bias is not None:
        logits += bias
    return logits if softcap is None else torch.tanh_(logits.div_(softcap)).mul_(softcap)


def exponentials_(logits):
    """logits (N, W) -> lse (N,) and the sums (N, 1) of what is now in their place, exp(logit - the row's maximum). The
    clamp is for rows of nothing but -inf (02: a bias switches a whole block of classes off), whose lse is -inf."""
    top = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)  # (N, 1)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)  # (N, 1)
    return (top + total.log()).squeeze(1), total


def gather_targets(logits, targets):
    """logits (N, W), targets (N,) -> (N,): the target's logit, 0 where the target is none of the W columns."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    return logits.gather(1, targets.where(inside, 0).unsqueeze(1)).squeeze(1).where(inside, 0.0)


def subtract_onehot_(G, targets, g):
    """G (N, W) -= g (N,) at each row's target, where that is one of the W columns."""
    inside = (targets >= 0) & (targets < G.shape[1])
    return G.scatter_add_(1, targets.where(inside, 0).unsqueeze(1), -g.where(inside, 0.0).unsqueeze(1).to(G.dtype))


def rows_of_logits(E, C, targets, g):
    """Some rows E (R, D) and all of C (V, D): G (R, V) = g * (softmax - onehot), lse (R,), the target's logit (R,)."""
    logits = block_logits(E, C)  # (R, V)
    target_logit = gather_targets(logits, targets)  # (R,)
    lse, total = exponentials_(logits)
    G = subtract_onehot_(logits.mul_(g.unsqueeze(1) / total), targets, g)  # in place of the logits
    return G.to(product_dtypes(E)[1]), lse, target_logit


class _ChunkedLoss(torch.autograd.Function):
    """(E, C) -> the mean or sum of the losses, their gradients finished in forward but for one number, by which
    backward multiplies. (If that is no power of two, a 16-bit dE is rounded again; the mean's own division is in g.)
    rows_of makes G of a chunk, as rows_of_logits does; 02 has a faster one, and does not look at targets before."""

    @staticmethod
    def forward(ctx, E, C, targets, ignore_index, reduction, chunk, rows_of):
        with torch.autocast(E.device.type, enabled=False):
            sums, kept = product_dtypes(E)[0], targets != ignore_index  # (N,)
            g = token_weights(kept.to(sums), reduction)  # (N,) d result / d loss[n]: of a mean, one over their number
            g = g.where((targets >= 0) & (targets < C.shape[0]), 0.0)  # a target that is no class: NaN, no gradient
            need_E, need_C = ctx.needs_input_grad[:2]
            losses = torch.empty(E.shape[0], dtype=sums, device=E.device)  # (N,)
            dE = torch.empty_like(E) if need_E else None
            dC = torch.zeros(C.shape, dtype=sums, device=C.device) if need_C else None  # the price of this rung
            for start in range(0, E.shape[0], chunk):
                rows = slice(start, start + chunk)
                G, lse, target_logit = rows_of(E[rows], C, targets[rows], g[rows])  # (R, V), (R,), (R,)
                losses[rows] = token_losses(lse, target_logit, targets[rows], C.shape[0], ignore_index)
                if need_E:
                    set_to(dE[rows], G, C)
                if need_C:
                    add_to(dC, G.T, E[rows])
                del G  # or the next chunk's logits would be alive beside it
        ctx.save_for_backward(dE, dC)
        ctx.dtype = E.dtype
        return reduce_loss(losses, kept, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        scaled = lambda g: torch.mul(g, grad, out=torch.empty_like(g, dtype=ctx.dtype))  # noqa: E731
        return *(None if g is None else scaled(g) for g in ctx.saved_tensors), None, None, None, None, None


def token_weights(kept, reduction="mean"):
    """kept (N,) -> (N,): each token's share of the result, of a mean counted over ALL tokens, not those of a chunk."""
    return kept / kept.sum().clamp(min=1) if reduction == "mean" else kept


def chunked_linear_cross_entropy(E, C, targets, *, chunk=1024, ignore_index=-100):
    """Rung 2: mean loss with `chunk` rows of logits alive at a time. E (N, D), C (V, D), targets (N,); scalar fp32.

    Differentiable once. The approach of torchtune and Liger Kernel (arXiv 2410.10989). BadInput on arguments that do
    not fit, fp16 among them: a mean's gradients vanish in its five exponent bits."""
    check_arguments(E, C, targets)
    check_target_range(targets, C.shape[0], ignore_index)
    if E.dim() != 2 or E.dtype != C.dtype or E.dtype == torch.float16:
        raise BadInput(f"E is {E.dtype} {tuple(E.shape)}, C is {C.dtype}: pass E as (N, D), both in bf16, fp32 or fp64")
    if chunk < 1:
        raise BadInput(f"chunk is {chunk}: use at least 1 row")
    return _ChunkedLoss.apply(E, C, targets, ignore_index, "mean", chunk, rows_of_logits)


# ==== 4. The machine whose memory we count: a GPT, and text to train it on ============================================
#
#     tokens (B, T) -> embedding, normalised -> L blocks -> norm -> E (B, T, D)      the classifier C (V, D) comes later
#
#     a block:  x -+-> norm1 -> qkv -> q, k normalised, turned -> attention -> proj -(+)-+-> norm2 -> MLP -(+)->
#                  +-----------------------------------------------------------------^   +------------------^
#
# The model stops before its classifier, a plain parameter of its own, so that any loss can be put on top. What a layer
# keeps from forward to backward, in multiples of D elements a token:
#
#     the stream, before each half     2      in fp32 also under autocast (kept for the norms)
#     the outputs of both norms        2
#     q, k and v                       3
#     q and k, normalised and turned   2
#     the output of attention          1
#     the MLP before and after gelu    4 + 4      in all 18
#
# Where a norm is not one fused kernel it also keeps its normalised input: 2 more. The norms of q and k keep q and k,
# which are counted above; but unfused and under autocast, a copy of each in fp32.
#
# A layer of GPT-2's size, D = 768, keeps 18 x 768 x 4 = 55,296 bytes a token in fp32 and 30,720 under autocast (the
# stream in 4 bytes, 16 others in 2); twelve of them and 8,192 tokens, 2.8 GiB. Their loss, V = 65,536, takes 6 GiB.


@dataclass(frozen=True)
class GPTConfig:
    """vocab V, seq T tokens, layers L, heads H, dim D (a multiple of 2 H, because rotary positions turn pairs)."""

    vocab: int = 256
    seq: int = 128
    layers: int = 4
    heads: int = 4
    dim: int = 128

    def parameters(self):
        """Embedding and classifier V D each; per layer 3 D^2 + D^2 attention, 8 D^2 MLP, 2 D norms; the last norm D."""
        return 2 * self.vocab * self.dim + self.layers * (12 * self.dim**2 + 2 * self.dim) + self.dim

    def flops_per_token(self):
        """Forward and backward: 6 per matrix parameter (the embedding is a look-up) and 12 T D a layer for attention,
        uncut by causality as in the PaLM paper's convention, arXiv 2204.02311 appendix B."""
        matrices = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        return 6 * matrices + 12 * self.layers * self.seq * self.dim


def activation_bytes(config, tokens, autocast=False, fused_norm=False):
    """What the forward pass over `tokens` tokens keeps for backward: a layer as in the table above. Outside of them, in
    D elements a token: 1 for the embedding's norm, `norms` for the last one, 1 for E. Autocast keeps the stream, the
    unfused norms and E in fp32, the rest in bf16, and with it a bf16 copy of every matrix."""
    norms = 1 if fused_norm else 2  # fp32 tensors that a norm keeps: its input, and unfused the normalised one
    stream, others = 2 * norms * 4, 16 * (2 if autocast else 4)
    qk_again = 2 * 4 if autocast and not fused_norm else 0
    copies = 2 * 12 * config.layers * config.dim**2 if autocast else 0
    return tokens * config.dim * (config.layers * (stream + others + qk_again) + (norms + 2) * 4) + copies


def rotate(x, cos, sin):
    """x (B, T, H, D/H), cos, sin (T, 1, D/H/2): turn pairs (i, i + half) by the position's angle, arXiv 2104.09864."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def rms_norm(x):
    """x (..., D) over the root of its mean square, (..., D), in the dtype of x; without a gain."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype)  # a fixed eps: torch's default hangs on the dtype


def causal_attention(q, k, v):
    """q, k, v (B, H, T, D/H) -> the same shape; each position sees itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)). A head's q, k and v lie together
    in qkv, so any range of heads is a range of its rows; how many there are, forward reads from its shape. `attend` is
    an attribute, so that another function of the same shapes can take its place."""

    def __init__(self, config):
        super().__init__()
        D = config.dim
        self.head, self.attend = D // config.heads, causal_attention
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.heads(self.qkv(self.norm1(x)), cos, sin)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def heads(self, qkv, cos, sin):
        """qkv (B, T, 3 D) -> q and k, normalised and turned, and v, each (B, H, T, D/H)."""
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head)).unbind(3)  # (B, T, H, D/H)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)  # or bf16 would grow to fp32 here
        turned = (rotate(rms_norm(t), cos, sin) for t in (q, k))
        return tuple(t.transpose(1, 2) for t in (*turned, v))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


GPT_FORMAT = 4  # of saved weights and what is saved with them: train.py and 03 refuse files of another


class GPT(nn.Module):
    """A decoder-only transformer that stops before its classifier: forward(tokens (B, T)) -> E (B, T, D).

    The norms of the embedding and of q and k have no parameters. Embeddings begin with elements of 0.02: if the stream
    began with them, the first layer's norm would multiply them by 1 / 0.02 = 50, and their gradient on its way back,
    too. And q and k, normalised, cannot make scores that grow with the weights."""

    def __init__(self, config):
        super().__init__()
        if config.dim % (2 * config.heads):
            raise BadInput(f"dim {config.dim} with {config.heads} heads: dim must be a multiple of 2 * heads")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.classifier = nn.Parameter(torch.empty(config.vocab, config.dim))
        half = config.dim // config.heads // 2
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.seq), frequencies).unsqueeze(1)  # (T, 1, half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # GPT-2's initialisation: what writes into the residual stream is scaled by its depth
                into_stream = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if into_stream else 0.02)

    def forward(self, tokens):
        T = tokens.shape[1]
        if T > self.config.seq:
            raise BadInput(f"tokens has {T} positions: this model was built for seq = {self.config.seq}")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.norm(x)

    def embed(self, tokens):
        """tokens (B, T) -> the stream's beginning (B, T, D), each token's embedding normalised."""
        return rms_norm(self.embedding(tokens))


class Corpus(NamedTuple):
    """train, val: 1-d arrays of tokens (uint8 or uint16); vocab; bytes a token stands for; where it came from."""

    train: np.ndarray
    val: np.ndarray
    vocab: int
    bytes_per_token: int
    origin: str


def source_files(kind="stdlib"):
    """Paths of the Python source in a folder of this installation ("stdlib", "purelib"), sorted, without tests."""
    for folder, folders, names in os.walk(sysconfig.get_paths()[kind]):
        skip = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
        folders[:] = sorted(set(folders) - skip)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def corpus(tokens="bytes", packages=False, limit=256 * MIB):
    """Text that is on every machine: the source of the Python standard library (`packages`: and of what is installed).

    tokens="bytes": V = 256. tokens="bigrams": two bytes are one token, V = 65,536, a large vocabulary without a
    tokenizer. Files are sorted, tests left out, at most `limit` bytes. Whole files go to validation, chosen by a
    checksum of their name, until they make 1 % and at least 64 KiB. BadInput when there is too little text."""
    if tokens not in ("bytes", "bigrams"):
        raise BadInput(f"tokens is {tokens!r}: use 'bytes' or 'bigrams'")
    files, size = {}, 0  # name: text
    for kind in ("stdlib", "purelib") if packages else ("stdlib",):
        for path in source_files(kind):
            if size + path.stat().st_size <= limit:
                files[path.relative_to(sysconfig.get_paths()[kind])] = text = path.read_bytes()
                size += len(text)
    if size < MIB:
        raise BadInput(f"only {size} bytes of Python source are installed here: pass a text with --data FILE")
    order = sorted(files, key=lambda name: zlib.crc32(str(name).encode()))
    sizes = np.cumsum([len(files[name]) for name in order])
    held = set(order[: 1 + np.searchsorted(sizes, max(64 * 1024, size // 100))])
    parts = (b"".join(text for name, text in files.items() if (name in held) is side) for side in (False, True))
    width = 1 if tokens == "bytes" else 2  # of an even number of bytes, so that both stand for the same text
    train, val = (np.frombuffer(part[: len(part) // 2 * 2], f"<u{width}") for part in parts)
    origin = f"standard library of Python {platform.python_version()}" + (" and installed packages" if packages else "")
    return Corpus(train, val, 256**width, width, f"{origin}, {len(files)} files")


# ==== 5. Predictions beside measurements: ledger, clock, byte counter, device =========================================


class Ledger:
    """Claims, printed as they are settled: claim | formula | predicted | measured | ratio | band | ok.

    The prediction comes from a cost model. A ratio measured / predicted outside `band` fails the ledger; measured=None
    prints "needs a GPU" and predicted=None or band=None reports without a verdict."""

    def __init__(self):
        self.ok, self.started = True, False

    def row(self, claim, formula, predicted, measured, unit="MiB", band=(0.98, 1.02)):
        if not self.started:
            print(f"{'claim':<34} | {'formula':<25} | {'predicted':>11} | {'measured':>11} | ratio | band       | ok")
            self.started = True
        number = lambda x: "-" if x is None else f"{x:.5g} {unit}".strip()  # noqa: E731
        ratio, verdict, limits = "", "-", "-"
        if None not in (measured, predicted, band):
            quotient = measured / predicted if predicted else 1 + measured  # of nothing: 1 when it is nothing
            good = band[0] <= quotient <= band[1]  # NaN is not good
            self.ok = self.ok and good
            ratio, verdict, limits = f"{quotient:.3f}", "yes" if good else "NO", f"{band[0]:g}..{band[1]:g}"
        measured = "needs a GPU" if measured is None else number(measured)
        numbers = f"{number(predicted):>11} | {measured:>11} | {ratio:>5} | {limits:<10}"
        print(f"{claim:<34} | {formula:<25} | {numbers} | {verdict}")


class Timing(NamedTuple):
    """Milliseconds: the median of the runs, and their spread, half the distance between the quartiles."""

    median: float
    spread: float

    def __str__(self):
        return f"{self.median:.2f} +- {self.spread:.2f} ms"


def bench(fn, device="cpu", warmup=1, runs=7):
    """Time fn() after `warmup` calls. CUDA events on a GPU, whose work is asynchronous; the host clock elsewhere."""
    times = []
    for _ in range(warmup + runs):
        if torch.device(device).type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            start = time.perf_counter()
            fn()
            times.append(1e3 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(times[warmup:], n=4)
    return Timing(median, (high - low) / 2)


# A byte counter that works on any device. Torch lets us stand between the program and every operation it runs. What an
# operation returns is a tensor; behind it is a storage, the memory itself, which views share. A storage that neither
# came in nor is known has just been born:
#
#     a = zeros(n)       a new storage: born, n bytes under the phase that the program is in
#     b = a.view(2, -1)  the storage came in: nothing
#     b.add_(1)          the same
#     del a, b           the last tensor is gone, Python finalises the storage: died
#
# weakref.finalize(object, function, ...) calls the function at that moment. _cdata is the address of the storage's C++
# object: its name for as long as it lives, and no longer, so it is forgotten when it dies. Two things to know: what
# a library call takes and gives back within itself is not seen, and autograd, while it is watched, adds two gradients
# that meet into a third buffer where it would otherwise add in place.

on_death = weakref.finalize  # by a name of ours, which --break can replace


class LiveBytes(TorchDispatchMode):
    """Follows every storage made inside the block from its birth to its death, counted for the `phase` of its birth.
    live, phases: bytes now, in all and by phase; peak, at_peak: as they were when there were most."""

    def __init__(self):
        super().__init__()
        self.phase, self.live, self.phases = "workspace", 0, Counter()
        self.peak, self.at_peak, self.born_in = 0, Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {storage._cdata for storage in self.storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in self.storages(out):
            if storage._cdata not in inputs and storage._cdata not in self.born_in:  # else a view, or written in place
                self.born(storage)
        return out

    @staticmethod
    def storages(tree):
        tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        parts = [[t._indices(), t._values()] if t.layout is torch.sparse_coo else [t] for t in tensors]
        return [part.untyped_storage() for part in sum(parts, []) if not part.is_meta]  # which is a shape alone

    def born(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.born_in[key] = self.phase
        self.live += size
        self.phases[self.phase] += size
        on_death(storage, self.died, key, size)  # when the last tensor that uses the storage is gone
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.phases.copy()

    def died(self, key, size):
        self.live -= size
        self.phases[self.born_in.pop(key)] -= size

    def begin(self, phase):
        """A new phase, and a new peak."""
        self.phase, self.peak, self.at_peak = phase, self.live, self.phases.copy()


def peak_bytes(fn, device="cpu"):
    """Bytes that fn() holds at its peak beyond what was alive before: on a GPU those asked of the allocator, whose
    blocks may each be 1 MiB larger; on a CPU LiveBytes'. What fn leaves behind (its result, .grad of leaves) counts."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        _ = fn()  # held, since what fn returns counts
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    else:
        with LiveBytes() as follow:
            _ = fn()
        peak = follow.peak
    return peak


def describe_device(device="cpu"):
    """One line: the device, the versions, and whether Triton kernels are compiled or interpreted."""
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    kernels = "no triton"
    if HAS_TRITON:
        kernels = f"triton {importlib.metadata.version('triton')} {'interpreted' if INTERPRETED else 'compiled'}"
    return f"{name} | python {platform.python_version()} | torch {torch.__version__} | {kernels}"


def default_device():
    """torch.device: the current GPU, or the CPU."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


# ==== 6. The command line of a stage ==================================================================================
#
# Each file of this series is run in the same way, and says by its exit status what came of it:
#
#     (no flags)        checks, then measurements            0 all holds       1 a check or a claim fails
#     --check [NAME]    checks only, or one of them          0                 1
#     --break NAME      one check, with a bug planted        0 not caught      1 caught, as a real bug would be
#
# and in each case 2 for a user's mistake, in one line that names the fix. A programmer's mistake keeps its traceback.


def named(checks, only=None):
    """{check: its name}, of all of them or those named `only`. BadInput names the choices."""
    names = {check: getattr(check, "func", check).__name__.removeprefix("check_") for check in checks}
    if only and only.removeprefix("check_") not in names.values():
        raise BadInput(f"--check {only}: no such check: use one of {', '.join(dict.fromkeys(names.values()))}")
    return {check: name for check, name in names.items() if not only or name == only.removeprefix("check_")}


def call_check(check, device):
    """check(), or check(device=device) if it takes one."""
    return check(**({"device": device} if "device" in inspect.signature(check).parameters else {}))


def run_checks(checks, device, only=None):
    """Run these checks, or those of them that are named `only`, and say so. {name: what the check returned}."""
    found = {name: call_check(check, device) for check, name in named(checks, only).items()}
    print(textwrap.fill("checks passed: " + ", ".join(found), 110))
    return found


def run_break(namespace, name):
    """Plant bug `name` of namespace["BREAKS"], by replacing a global that all callers look up, and run the one check
    that must catch it. 1 when it does, as a real one would end; 0 when not; 2 when anything but the check fails."""
    check, attribute, bug = namespace["BREAKS"][name]
    namespace[attribute] = bug
    try:
        call_check(check, default_device())
    except AssertionError as error:
        lines = str(error).strip().splitlines()
        print(f"--break {name}: caught by {check.__name__}: {lines[0] if lines else 'assertion'}")
        return 1
    except Exception as error:
        said = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        print(f"--break {name}: {check.__name__} broke down: {': '.join(said)}", file=sys.stderr)
        return 2
    print(f"--break {name}: NOT caught by {check.__name__}")
    return 0


def stage_parser(namespace):
    parser = argparse.ArgumentParser(description=namespace["__doc__"].strip().splitlines()[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--break", dest="bug", choices=list(namespace["BREAKS"]), help="plant this bug: exit status 1")
    either.add_argument("--check", nargs="?", const="", metavar="NAME", help="checks only, no measurements")
    if "add_arguments" in namespace:
        namespace["add_arguments"](parser)
    return parser


@np.errstate(all="ignore")  # interpreted kernels are NumPy, which warns of the inf that a GPU makes in silence
def run_stage(namespace, following):
    """The command line of a stage, whose globals() are given; returns the exit status. --check: CHECKS, or where they
    need more than a device check_all(device, only, args). Otherwise body(device, ledger, args), which checks, too."""
    args, script = stage_parser(namespace).parse_args(), Path(namespace["__file__"]).name
    if args.bug:
        return run_break(namespace, args.bug)
    device, ledger = default_device(), Ledger()
    print(describe_device(device))
    try:
        if args.check is None:
            namespace["body"](device, ledger, args)
        elif "check_all" in namespace:
            namespace["check_all"](device, args.check, args)
        else:
            run_checks(namespace["CHECKS"], device, args.check)
    except AssertionError as error:
        print(f"CHECK FAILED: {error}")
        return 1
    except (BadInput, OSError, RuntimeError) as error:
        full = isinstance(error, RuntimeError)
        if full and "allocate" not in str(error):  # as torch's allocators say it, on either device
            raise
        said = f"no memory for this shape: {str(error).splitlines()[0]}" if full else error
        print(f"{script}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.check is None:
        print(f"next: {following}" if ledger.ok else "A CLAIM FAILED: see the rows marked NO")
    return 0 if ledger.ok else 1


# ==== 7. Checks. Each --break plants one bug that one of them must catch ==============================================
#
# A check is worth what it can fail on. So each compares with something that was made in another way (torch's own
# function, the paper's digits, the same model in complex numbers), on shapes that do not divide evenly, in fp64 where
# rounding would hide an error, and with tolerances of a few roundings of the dtype, not of the size of the values.


def require(condition, message):
    """A check that `python -O` does not remove."""
    if not condition:
        raise AssertionError(message)


def must_raise(words, action, kind=BadInput):
    """action() has to raise an error of this kind, one line with these words."""
    try:
        action()
    except kind as error:
        message = str(error)
    else:
        message = "no error"
    require(words in message and "\n" not in message, f"expected an error about {words!r}, got: {message}")


def random_problem(N, V, D, dtype=torch.float64, device="cpu", seed=0, ignored=0.25, bias=True, scale=1.0):
    """E (N, D), C (V, D), bias (V,) or None as leaves that need gradients, and targets (N,) with ignored tokens."""
    generator = torch.Generator().manual_seed(seed)
    E = torch.randn(N, D, generator=generator, dtype=torch.float64) * scale
    C = torch.randn(V, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
    b = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    leaves = [None if t is None else t.to(device, dtype).requires_grad_() for t in (E, C, b)]
    return *leaves, targets.to(device)


def check_reference(N=37, V=53, D=19, seed=0):
    """In fp64 the reference equals torch's cross-entropy: each reduction, bias, softcap, ignored tokens, gradients."""
    for reduction in ("mean", "sum", "none"):
        for softcap in (None, 1.5):
            E, C, b, x = random_problem(N, V, D, seed=seed)
            logits = E @ C.T + b
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            want = F.cross_entropy(logits, x, reduction=reduction)
            got, lse = linear_cross_entropy_reference(E, C, x, b, softcap=softcap, reduction=reduction, return_lse=True)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(lse, logits.logsumexp(-1))
            weight = torch.rand_like(want)
            for g, w in zip(*(torch.autograd.grad(loss, (E, C, b), weight) for loss in (got, want)), strict=True):
                torch.testing.assert_close(g, w)


def check_chunked(N=50, V=61, D=16, chunk=16, seed=0):
    """The chunked loss equals the reference, with a shorter last chunk and ignored tokens that are unevenly spread; and
    so does a dropped-first one. bf16: the fp32 sums are rounded once."""
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        E, C, _, x = random_problem(N, V, D, dtype, seed=seed)
        x[: chunk - 3] = -100
        want = linear_cross_entropy_reference(E.double(), C.double(), x)
        wants = torch.autograd.grad(2 * want, (E, C))
        in_chunks = partial(chunked_linear_cross_entropy, chunk=chunk)
        for loss in (in_chunks, partial(drop_ignored, in_chunks)):
            got = loss(E, C, x)
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
            for g, w in zip(torch.autograd.grad(2 * got, (E, C)), wants, strict=True):
                torch.testing.assert_close(g.double(), w.double(), rtol=close, atol=close * w.abs().max().item())


def check_products():
    """set_to and add_to on a CPU, whatever comes in: the sum is rounded once, to the dtype of the result. (Those of a
    GPU are checked by the gradients of 02.)"""
    A, wide = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 70), (70, 9)))
    for B in (wide, wide.bfloat16()):
        want = A.double() @ B.double()
        for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
            got = set_to(torch.full((5, 9), math.nan, dtype=dtype), A, B)
            torch.testing.assert_close(got, want.to(dtype), rtol=close, atol=1e-5)
        torch.testing.assert_close(add_to(want.float(), A, B), 2 * want.float(), rtol=1e-5, atol=1e-5)


def check_extreme_logits():
    """Logits around +-1000 overflow exp() in any precision unless the maximum is subtracted first."""
    for offset in (1000.0, -1000.0):
        E, C, b, x = random_problem(16, 40, 8, dtype=torch.float32)
        want = linear_cross_entropy_reference(E.double(), C.double(), x, b.double() + offset)
        got = linear_cross_entropy_reference(E, C, x, b + offset)
        require(torch.isfinite(got), f"loss is {got.item()} with logits around {offset:g}")
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    got = chunked_linear_cross_entropy(torch.full((8, 4), 30.0), torch.full((40, 4), 10.0), torch.arange(8), chunk=3)
    require(abs(got - math.log(40)) < 1e-4, f"in chunks: loss {got.item()} with equal logits of 1200, not log 40")


def check_all_ignored():
    """A micro-batch of padding alone: loss 0 and zero gradients, not NaN."""
    E, C, b, x = random_problem(9, 12, 4, ignored=1.1)
    for loss in (linear_cross_entropy_reference(E, C, x, b), chunked_linear_cross_entropy(E, C, x, chunk=4),
                 drop_ignored(materialised_loss, E, C, x)):
        gradients = torch.autograd.grad(loss, (E, C, b), allow_unused=True)
        require(loss.item() == 0, f"loss is {loss.item()}")
        require(all(g is None or not g.any() for g in gradients), "a gradient is not zero")


def check_bad_input():
    """Each wrong argument, in one line that names it."""
    E, C, b, x = random_problem(6, 10, 4, torch.float32)
    cases = {
        "neither of them 0": (E, C[:0], x, b), "one row a token": (E[:, :3], C, x, b), "one per row": (E, C, x[1:], b),
        "targets.long()": (E, C, x.int(), b), "one value per class": (E, C, x, b[1:]),
        "targets holds -1:": (E, C, x * 0 - 1, b), "targets holds 10:": (E, C, x * 0 + 10, b),
    }
    for words, arguments in cases.items():
        must_raise(words, partial(linear_cross_entropy_reference, *arguments))
    must_raise("targets holds 10:", partial(chunked_linear_cross_entropy, E, C, x * 0 + 10))
    must_raise("torch.float16", partial(chunked_linear_cross_entropy, E.half(), C.half(), x))
    must_raise("one row a token", partial(chunked_linear_cross_entropy, E[:, :3], C, x))
    must_raise("chunk is 0", partial(chunked_linear_cross_entropy, E, C, x, chunk=0))
    must_raise("must be a multiple", partial(GPT, GPTConfig(dim=12, heads=4)))
    must_raise("tokens has 9 positions", partial(GPT(GPTConfig(seq=8)), torch.zeros(1, 9, dtype=torch.int64)))
    for options in (dict(reduction="max"), dict(softcap=0.0), dict(softcap=math.inf)):
        must_raise(f"{next(iter(options))} is ", partial(linear_cross_entropy_reference, E, C, x, b, **options))


def check_table():
    """Every batch size that the paper's Table A3 prints, to the digit."""
    for shape in MODELS:
        got = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        require(shape.printed == got, f"{shape.name}: {got}, the paper prints {shape.printed}")


def check_peak_bytes(device="cpu"):
    """Two buffers at once, then a third after one has died: a peak of two. Views and in-place work add nothing. Both
    counters are checked: LiveBytes, and the allocator where there is a GPU."""

    def work(where):
        a = torch.zeros(MIB, dtype=torch.uint8, device=where)
        b = a + 1
        a.view(2, -1).add_(1)
        del a
        return b.clone()

    for where in {"cpu", torch.device(device).type}:
        got = peak_bytes(partial(work, where), where)
        require(got == 2 * MIB, f"{where}: peak of two buffers of 1 MiB measured as {got / MIB:g} MiB")


def explicit_gpt(model, tokens):
    """What GPT says of tokens (B, T), from its weights alone, written as it stands in a textbook: (B, T, D)."""
    w, config = dict(model.named_parameters()), model.config
    (B, T), H, D = tokens.shape, config.heads, config.dim
    norm = lambda x, gain=1, eps=2**-52: x * gain / (x.square().mean(-1, keepdim=True) + eps).sqrt()  # noqa: E731
    half = D // H // 2
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)  # (T, half)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    x = norm(w["embedding.weight"][tokens], eps=1e-6)
    for i in range(config.layers):
        layer = {name.split(".", 2)[2]: value for name, value in w.items() if name.startswith(f"blocks.{i}.")}
        qkv = norm(x, layer["norm1.weight"]) @ layer["qkv.weight"].T
        q, k, v = qkv.view(B, T, H, 3, D // H).permute(3, 0, 2, 1, 4)  # (B, H, T, D/H) each
        q, k = (torch.complex(*norm(t, eps=1e-6).split(half, -1)) * turn for t in (q, k))
        scores = (q @ k.mH).real / math.sqrt(D // H)  # (B, H, T, T)
        p = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        x = x + (p @ v).transpose(1, 2).reshape(B, T, D) @ layer["proj.weight"].T
        x = x + F.gelu(norm(x, layer["norm2.weight"]) @ layer["up.weight"].T) @ layer["down.weight"].T
    return norm(x, w["norm.weight"])


def check_model():
    """GPT against the same written out with complex numbers for the turns; its parameters and FLOPs against torch's own
    counts; and the spread of its initialisation."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, so not before TRITON_INTERPRET is set

    config = GPTConfig(vocab=50, seq=16, layers=2, heads=2, dim=16)
    torch.manual_seed(0)
    model = GPT(config)
    for name, want in (("up", 0.02), ("down", 0.01)):  # into the stream: 0.02 / sqrt(2 layers)
        std = model.blocks[0].get_submodule(name).weight.std().item()
        require(abs(std / want - 1) < 0.1, f"{name} begins with elements of {std:.4f}, not {want}")
    model = model.double()
    for p in model.parameters():
        p.data += torch.rand_like(p) / 4  # gains that are not 1, and scores that are not flat
    tokens = torch.randint(50, (3, 12))
    torch.testing.assert_close(model(tokens), explicit_gpt(model, tokens))
    count = sum(p.numel() for p in model.parameters())
    require(count == config.parameters(), f"{count} parameters, the formula says {config.parameters()}")
    for block in model.blocks:  # attention as two products, which FlopCounterMode sees
        block.attend = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as counter:
        E = model(tokens := torch.randint(50, (1, 16)))
        (E @ model.classifier.T).sum().backward()
    got, want = counter.get_total_flops() / tokens.numel(), config.flops_per_token()
    require(got == want, f"{got} FLOP a token, the formula says {want}")


def check_ledger():
    """A ratio outside its band, and NaN, fail a ledger; what is not measured does not; nothing is divided by zero."""
    cases = (1, 1, True), (1, 1.5, False), (1, math.nan, False), (1, None, True), (0, 0, True), (0, 1, False)
    for predicted, measured, ok in cases:
        ledger = Ledger()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ledger.row("claim", "formula", predicted, measured)
        require(ledger.ok is ok, f"predicted {predicted}, measured {measured}: {ledger.ok}")
        text = printed.getvalue()
        require(("needs a GPU" if measured is None else f" {measured:g} MiB") in text, f"{measured} is not in {text}")
        require(text.endswith("| NO\n") is not ok, f"the verdict of {text}")


def check_corpus():
    """At most `limit` bytes, the same every time; whole files, none of them in both parts; 1 % to validate on."""
    one, again = corpus("bytes", limit=2 * MIB), corpus("bigrams", limit=2 * MIB)
    require((one.vocab, again.vocab, again.bytes_per_token) == (256, 65536, 2), f"{one[2:]}, {again[2:]}")
    require(bytes(one.train)[: again.train.nbytes] == again.train.tobytes(), "other text in bigrams than in bytes")
    sizes = one.train.nbytes, one.val.nbytes
    require(1.9 * MIB < sum(sizes) <= 2 * MIB and 64 * 1024 <= sizes[1] < sizes[0] / 8, f"{sizes} bytes")
    require(bytes(one.val[:5000]) not in bytes(one.train), "a text to validate on is in the text to train on")
    must_raise("--data", partial(corpus, limit=1000))
    must_raise("tokens is 'words'", partial(corpus, "words"))


def check_bench():
    """On the host's clock: one call to warm up, then the median of seven and half the distance of their quartiles."""
    clock, calls = iter([-99, 0, 0, 1, 10, 12, 20, 23, 30, 34, 40, 45, 50, 56, 60, 67]), []  # runs of 1 to 7 seconds
    with mock.patch.object(time, "perf_counter", lambda: next(clock)):
        timing = bench(lambda: calls.append(1))
    require((*timing, len(calls)) == (4000, 2000, 8), f"{timing} of {len(calls)} calls")


def check_command_line():
    """What run_stage says, and its exit status: all is well; a check, a claim, a user, memory fails; a bug is planted.
    A programmer's error keeps its traceback."""

    def check_nothing():
        pass

    def check_fails():
        raise AssertionError("this one fails")

    def check_ends():
        raise RuntimeError("a bug")

    wrong = lambda device, ledger, args: ledger.row("claim", "formula", 1, 2)  # noqa: E731
    full = RuntimeError("can't allocate 9 TB")
    for flags, check, work, status, said in (
        ("", check_nothing, mock.Mock(), 0, "next: the next one"), ("", check_nothing, wrong, 1, "A CLAIM FAILED"),
        ("--check nothing --more 1", check_nothing, None, 0, "checks passed: nothing"),
        ("--check", check_fails, None, 1, "CHECK FAILED: this one fails"),
        ("--check other", check_nothing, None, 2, "no such check: use one of nothing"),
        ("", check_nothing, mock.Mock(side_effect=BadInput("use two")), 2, "stage.py: use two"),
        ("", check_nothing, mock.Mock(side_effect=full), 2, "stage.py: no memory"),
        ("", check_nothing, mock.Mock(side_effect=KeyboardInterrupt()), 130, ""),
        ("", check_nothing, mock.Mock(side_effect=ValueError("a bug")), None, "a bug"),
        ("", check_nothing, mock.Mock(side_effect=RuntimeError("a bug")), None, "a bug"),
        ("--break bug", check_nothing, None, 0, "NOT caught by check_nothing"),
        ("--break bug", check_fails, None, 1, "caught by check_fails: this one fails"),
        ("--break bug", check_ends, None, 2, "check_ends broke down: RuntimeError: a bug"),
    ):
        names = dict(__file__="stage.py", __doc__="A stage.", BREAKS={"bug": (check, "anything", None)}, body=work,
                     add_arguments=lambda parser: parser.add_argument("--more"),
                     CHECKS=[check, check_fails] if "nothing" in flags else [check])
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            with mock.patch.object(sys, "argv", ["stage.py", *flags.split()]):
                try:
                    got = run_stage(names, "the next one")
                except (ValueError, RuntimeError) as error:
                    got = print(error)  # None
        require(got == status and said in output.getvalue(), f"{flags}: status {got}, {output.getvalue()}")


def check_predictions():
    """The measurements below in small, by LiveBytes: each prediction within its band."""
    cpu, ledger = torch.device("cpu"), Ledger()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for N, V, D in ((256, 2048, 16), (256, 2048, 32)):  # the chunk, then the results make the peak
            measure_ladder(cpu, ledger, N, V, D)
        for autocast in (False, True):
            measure_step(cpu, ledger, GPTConfig(2048, 64, 3, 2, 128), 2, autocast)
    require(ledger.ok, printed.getvalue())


CHECKS = [check_reference, check_chunked, check_products, check_extreme_logits, check_all_ignored, check_bad_input]
CHECKS += [check_table, check_peak_bytes, check_model, check_corpus, check_ledger]
CHECKS += [check_bench, check_command_line, check_predictions]

# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "no-max": (check_extreme_logits, "log_sum_exp", lambda logits: logits.exp().sum(-1).log()),
    "count-ignored": (check_reference, "reduce_loss", lambda loss, kept, how: getattr(loss, how, lambda: loss)()),
    "divide-by-zero": (check_all_ignored, "reduce_loss", lambda loss, kept, how: loss.sum() / kept.sum()),
    "chunk-mean": (check_chunked, "token_weights", lambda kept, how: kept / len(kept)),
    "narrow-logits": (check_table, "LOGIT_BYTES", 2),
    "immortal-tensors": (check_peak_bytes, "on_death", lambda s, died, key, size: weakref.finalize(s, died, key, 0)),
    "rotate-one-way": (check_model, "rotate", lambda x, cos, sin: x * cos.repeat(1, 1, 2)),
    "one-norm": (check_model, "rms_norm", lambda x: x),
}


# ==== 8. Measurements =================================================================================================


def measure_ladder(device, ledger, N, V, D):
    """Each remedy on the same problem, half of whose tokens are ignored (prompts and padding): bytes and time. Dropping
    them first copies the rows of E that are left, b bytes for each of N D / 2."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, chunk = dtype.itemsize, N // 8
    E, C, _, x = random_problem(N, V, D, dtype, device, ignored=0.0, bias=False)
    x[::2] = -100
    rungs = [
        ("materialised", materialised_loss, "12 N V", materialised_bytes(N, V)),
        ("  ignored dropped first", partial(drop_ignored, materialised_loss), "12 (N/2) V + N D b/2",
         materialised_bytes(N // 2, V) + size * N // 2 * D),
        ("  in 8 chunks", partial(chunked_linear_cross_entropy, chunk=chunk), "dE + 4 V D + chunk",
         chunked_bytes(N, V, D, chunk, size)),
    ]
    print(f"\nladder: loss and gradients of N = {N} tokens (half ignored), V = {V}, D = {D}, {dtype}")
    for name, loss, formula, predicted in rungs:
        step = lambda loss=loss: torch.autograd.grad(loss(E, C, x), (E, C))  # noqa: E731
        timing, measured = bench(step, device, runs=5), peak_bytes(step, device)
        ledger.row(f"{name}: peak", formula, predicted / MIB, measured / MIB)
        print(f"{'':<34} | time {timing}")


def measure_step(device, ledger, config, batch, autocast):
    """One AdamW step through materialised logits. A phase says who asked for a buffer, begin() also starts a new peak,
    of which there are two: in the loss's backward, when every activation is still there; and in the optimizer's step,
    when the gradients are: 4 bytes a parameter for itself, 8 for AdamW, 4 for its gradient make 16 P."""
    follow = LiveBytes()
    tokens, N = torch.randint(config.vocab, (batch, config.seq + 1), device=device), batch * config.seq
    with follow, torch.device(device):
        follow.phase = "parameters"
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):  # the first step makes the optimizer's state, the second has everything
            optimizer.zero_grad()
            follow.begin("activations")
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                E = model(tokens[:, :-1]).flatten(0, 1)  # (N, D)
                follow.phase = "logits"
                leaf = E.detach().requires_grad_()  # split the graph, so that the loss's backward is a phase too
                loss = materialised_loss(leaf, model.classifier, tokens[:, 1:].flatten())
            loss.backward()
            at_loss = follow.at_peak  # begin() makes a new one
            E.backward(leaf.grad)
            del E, leaf, loss
            follow.begin("optimizer")
            optimizer.step()
    print(f"\none training step: {config.parameters() / 1e6:.1f} M parameters, {N} tokens, V = {config.vocab}")
    copies = 2 * (N + config.vocab) * config.dim * autocast  # of E and C in bf16
    for name, formula, predicted in (
        ("parameters", "4 P", 4 * config.parameters()),
        ("optimizer", "8 P", 8 * config.parameters()),
        ("activations", "18 D a token and layer", activation_bytes(config, N, autocast, device.type == "cuda")),
        ("logits", "12 N V, copies of E, C", materialised_bytes(N, config.vocab) + copies),
    ):
        ledger.row(f"  {name}, at the loss", formula, predicted / MIB, at_loss[name] / MIB, band=(0.99, 1.01))
    ledger.row("at the optimizer's step", "16 P", 16 * config.parameters() / MIB, follow.peak / MIB, band=(0.99, 1.01))


def body(device, ledger, args):
    run_checks(CHECKS, device)
    print(f"\ntokens a batch on 16 GPUs of 75 GiB   {'with logits':>12} {'without':>12}   gain")
    for shape in MODELS:
        before, after = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        print(f"  {shape.name:<36}{before:>12,} {after:>12,} {after / before:>5.1f}x")
    print()
    if device.type == "cuda":
        smaller = 1 if torch.cuda.mem_get_info()[0] > 20 * 2**30 else 8
        measure_ladder(device, ledger, 16384 // smaller, 65536, 768)
        measure_step(device, ledger, GPTConfig(65536, 1024, 12, 12, 768), 8 // smaller, autocast=True)
    else:
        measure_ladder(device, ledger, 1024, 8192, 64)
        measure_step(device, ledger, GPTConfig(8192, 128, 4, 4, 128), 8, autocast=False)


if __name__ == "__main__":
    sys.exit(run_stage(globals(), "python 02_cce_kernel.py"))


# Exercises
#   1. Add a rung that chunks over the vocabulary instead of the tokens. What has to be known before the first gradient
#      can be formed, and how many matrix passes does that cost? (02 is the answer.)
#   2. The chunked rung keeps dC in fp32. Keep it in bf16, dC += (G.T @ E[rows].float()).bfloat16(), and find the chunk
#      count at which check_chunked fails on random data. Why does the error grow with the number of chunks?
#   3. max_batch_tokens assumes checkpointing. Replace its activations by activation_bytes: which model gains least now?
