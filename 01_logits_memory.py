"""01 - Where the memory goes, and how we measure it.

The puzzle
    Train on 65,536 tokens with a vocabulary of 65,536 classes, and the model's last layer writes

        65536 tokens x 65536 classes x 2 bytes = 8 GiB

    of logits. The loss reads ONE number per row (the target's logit) and one sum; the rest is read once more in
    backward and thrown away. In fp32, with the copies that a straightforward loss makes, the step holds 48 GiB.
    02 removes the buffer. Here we count: what takes memory, how we know, how far PyTorch alone gets.

The maths                                    N tokens, D hidden width, V vocabulary, x (N,) targets
    logits[n, v] = E[n] . C[v] + bias[v]     E (N, D) final hidden states (the paper: embeddings)
    lse[n]  = log sum_v exp(logits[n, v])    C (V, D) classifier (the output embedding, lm_head)
    loss[n] = lse[n] - logits[n, x[n]]
    d loss[n] / d logits[n, v] = softmax(logits[n])[v] - [v == x[n]]

How to launch
    python 01_logits_memory.py                  GPU if there is one, else CPU; a minute
    python 01_logits_memory.py --break no-max   plant a famous bug and watch its check fail
    python 01_logits_memory.py --check          the checks alone, without measurements

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009 (Figure 1, Table A3).
    Chunks of tokens, gradient formed in forward: torchtune and Liger Kernel, arXiv 2410.10989.

Left out on purpose: checkpointing, label smoothing, z-loss (add c * lse^2 of the returned lse to the loss).
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
import re
import statistics
import sys
import textwrap
import time
import weakref
from collections import Counter, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Triton reads TRITON_INTERPRET when a kernel is defined, so we choose before any file of this series imports it. No
# other question is asked of the driver at import.
HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run as NumPy, slowly, for tests and checks
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

MIB = 2**20


class BadInput(ValueError):
    """A user's mistake, in one line that names the fix; the command lines end with it and status 2."""


def refuse(*cases):
    """cases (wrong, text): BadInput with the text of the first that is wrong. All are looked at before."""
    for wrong, text in cases:
        if wrong:
            raise BadInput(text)


# ==== 1. The reference: everything materialised, obviously correct ====================================================
#
# The maths above, line by line: the yardstick of every faster version. One thing needs care: exp(89) overflows in
# fp32. The largest logit of a row can be taken out first, since it cancels:
#
#     log sum exp(l) = m + log sum exp(l - m)       logits 1000, 1001:  1001 + log(e^-1 + e^0) = 1001.313
#
# The derivative falls out of autograd; section 3 writes it down: softmax - onehot, times what comes from above.


def log_sum_exp(logits):
    """(..., V) -> (...). The maximum cancels, so no gradient runs through it."""
    top = logits.detach().amax(-1, keepdim=True)  # (..., 1)
    return top.squeeze(-1) + (logits - top).exp().sum(-1).log()


def token_losses(lse, target_logit, targets, V, ignore_index=-100):
    """Each (...) -> loss (...): 0 for ignored tokens, NaN for targets that are no class."""
    loss = (lse - target_logit).where((targets >= 0) & (targets < V), math.nan)
    return loss.where(targets != ignore_index, 0.0)


def reduce_loss(loss, kept, reduction):
    """loss, kept (...): "mean" is over kept tokens; of a micro-batch that is all padding it is 0."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy_reference(
    E, C, targets, bias=None, *, ignore_index=-100, softcap=None, reduction="mean", return_lse=False
):
    """Cross-entropy of E C^T against targets, the obvious way, in fp32 or, when E is, fp64.

    E (..., D), C (V, D), bias (V,) of any float dtype, targets (...) int64. softcap s replaces a logit l by
    s tanh(l / s). Tokens with ignore_index have loss 0, so have micro-batches of them (torch's mean is NaN). Returns
    the loss, a scalar, or (...) for reduction="none"; with return_lse also lse (...). BadInput."""
    check_arguments(E, C, targets, bias, reduction, softcap)
    V, dtype = C.shape[0], torch.promote_types(E.dtype, torch.float32)
    check_target_range(targets, V, ignore_index)
    with torch.autocast(E.device.type, enabled=False):
        logits = E.to(dtype) @ C.to(dtype).T  # (..., V): the buffer that this series is about
        logits = logits if bias is None else logits + bias.to(dtype)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        lse = log_sum_exp(logits)  # (...)
        index = targets.clamp(0, V - 1).unsqueeze(-1)  # any class will do for an ignored token
        losses = token_losses(lse, logits.gather(-1, index).squeeze(-1), targets, V, ignore_index)  # (...)
        loss = reduce_loss(losses, targets != ignore_index, reduction)
    return (loss, lse) if return_lse else loss


def check_arguments(E, C, targets, bias=None, reduction="mean", softcap=None):
    """BadInput that names the argument, its value and the fix."""
    e, c, x, b = (None if t is None else tuple(t.shape) for t in (E, C, targets, bias))
    places = {str(t.device) for t in (E, C, targets, bias) if t is not None}
    refuse(
        (len(c) != 2 or 0 in c, f"C has shape {c}: pass the classifier as (V, D), neither of them 0"),
        (len(e) < 2 or e[-1:] != c[1:], f"E has shape {e}: pass (..., D), a row a token, as wide as C"),
        (x != e[:-1], f"targets has shape {x}: pass one per row of E, {e[:-1]}"),
        (targets.dtype != torch.int64, f"targets has dtype {targets.dtype}: pass targets.long()"),
        (bias is not None and b != c[:1], f"bias has shape {b}: pass one value per class, {c[:1]}"),
        (reduction not in ("mean", "sum", "none"), f"reduction is {reduction!r}: use mean, sum or none"),
        (softcap is not None and not 0 < softcap < math.inf, f"softcap is {softcap!r}: use a positive number"),
        (len(places) > 1, f"tensors on {' and '.join(places)}: move them to one device"),
    )


def check_target_range(targets, vocab, ignore_index):
    """BadInput when a target is neither a class nor ignore_index. Reads them back: stalls a GPU."""
    bad = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab))]
    if bad.numel():
        raise BadInput(f"targets holds {int(bad[0])}: use 0 to {vocab - 1}, or ignore_index = {ignore_index}")


# ==== 2. The cost model: bytes, before anything is measured ===========================================================
#
# A prediction is a formula that was written down before the measurement. Of section 3's losses, with G the gradient of
# the logits, b the bytes of an element of E, and on the right the puzzle's numbers, V = N, D = 768, in bf16 (b = 2):
#
#   materialised   In backward three fp32 (N, V) buffers are alive at once: the log-probabilities kept
#                  from forward, their gradient, and G.                                                    MiB
#                      3 buffers of 4 N V                                3 x 16,384 = 49,152, or 48 GiB
#   in chunks      The results grow, dE in b bytes, the sum for dC in fp32; beside them `chunk` rows of
#                  logits in fp32, which become G in place, for 16-bit inputs also in 16 bits. At the end
#                  backward makes the results, b (N + V) D, of those two.
#                      dE + dC + a chunk + its copy         96 + 192 + 2,048 + 1,024 = 3,360, or 3.3 GiB


def materialised_bytes(N, V):
    """Peak of a materialised loss and its gradients, beyond its inputs."""
    return 3 * 4 * N * V


def chunked_bytes(N, V, D, chunk, itemsize):
    """The same of the chunked loss."""
    narrow = itemsize if itemsize < 4 else 0
    blocks = max((max(4, itemsize) + narrow) * chunk * V, itemsize * (N + V) * D)
    return itemsize * N * D + max(4, itemsize) * V * D + blocks


# params as the paper counts them, buffers included; printed: tokens a batch with and without logits, its Table A3
ModelShape = namedtuple("ModelShape", "name vocab hidden layers params printed")
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
    """Largest batch, in tokens, when a layer keeps only its (D,) input in bf16 (checkpointing): 8 bytes a parameter for
    weights, gradients, optimizer; a token 2 D L and, with logits, 4 V. Table A3 (its digits say: 75 GiB a GPU)."""
    budget = gpus * gib_per_gpu * 2**30 - 8 * shape.params
    return round(budget / (2 * shape.hidden * shape.layers + LOGIT_BYTES * shape.vocab * logits))


# ==== 3. The ladder of remedies inside PyTorch ========================================================================
#
# Rung 0 is what most people write. Rung 1 drops the tokens that have no loss before the classifier sees them. Rung 2
# cuts the tokens into chunks, and uses that the gradient of a mean needs nothing from backward but one scalar: so it
# can be formed in forward, while the chunk's logits are at hand.
#
#         V classes        for each chunk:   logits = E C^T                  2 chunk V D FLOP
#     +---------------+                      softmax in their place, minus the onehot: G
#     |///////////////| chunk                dE of these rows = G C          2 chunk V D
#     +---------------+                      dC += G^T E                     2 chunk V D
#     |               |    Three matrix passes over all, as many as with the logits kept. The price
#     +---------------+    is dC: a sum over chunks, in fp32, so that small terms are not lost.


def materialised_loss(E, C, targets):
    """Rung 0: logits in the dtype of E, a cross-entropy in fp32. (N, D), (V, D), (N,) -> mean."""
    return F.cross_entropy((E @ C.T).float(), targets)


def drop_ignored(loss, E, C, targets, ignore_index=-100):
    """Rung 1, for every loss(E, C, targets) of this series. The mask's counts stall a GPU."""
    kept = targets != ignore_index  # (N,)
    if not kept.any():
        return (E[:0].sum() + C[:0].sum()).float()  # 0, and so are the gradients
    return loss(E[kept], C, targets[kept])


# What a product is made of, for inputs in bf16. Its sum is in fp32 everywhere, or small terms would be lost in it:
#
#           factors   sum    result
#
#     CPU   fp32      fp32   fp32 (addmm), or rounded to bf16 at the end (copy_)
#     GPU   bf16      fp32   bf16 (addmm, beta = 0), or fp32: the same with out_dtype, one cuBLAS call


def product_dtypes(E):
    """The dtypes of sums of products with E and of their factors, which a GPU's matrix units want in 16 bits."""
    sums = torch.promote_types(E.dtype, torch.float32)
    return sums, E.dtype if E.is_cuda else sums


def add_to(total, A, B, beta=1):
    """total = beta total + A @ B, summed in the dtype of total whatever the factors are."""
    if A.dtype == total.dtype:
        return total.addmm_(A, B.to(A.dtype), beta=beta)
    return torch.addmm(total, A, B, beta=beta, out_dtype=total.dtype, out=total)


def set_to(out, A, B):
    """out = A @ B, summed in fp32 (fp64), rounded once (cuBLAS may cut a product and round each part)."""
    if out.dtype in (A.dtype, torch.promote_types(A.dtype, torch.float32)):
        return add_to(out, A, B, beta=0)  # which does not read what was there, not even NaN
    return out.copy_(A @ B.to(A.dtype))


def block_logits(E, C, softcap=None):
    """E (N, D), C (W, D) a block of classes -> (N, W), in fp32 or fp64."""
    sums, narrow = product_dtypes(E)
    logits = E.to(sums) @ C.to(sums).T if narrow == sums else torch.mm(E, C.T, out_dtype=sums)  # (N, W)
    return logits if softcap is None else torch.tanh_(logits.div_(softcap)).mul_(softcap)


def exponentials_(logits):
    """logits (N, W) -> lse (N,) and row sums (N, 1) of what is now in their place, exp(logit - maximum)."""
    top = logits.amax(1, keepdim=True)  # (N, 1)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)  # (N, 1)
    return (top + total.log()).squeeze(1), total


def gather_targets(logits, targets):
    """(N, W), (N,) -> (N,): the target's logit, 0 where the target is none of the W columns."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    return logits.gather(1, targets.where(inside, 0).unsqueeze(1)).squeeze(1).where(inside, 0.0)


def subtract_onehot_(G, targets, g):
    """G (N, W) -= g (N,) at each row's target, where that is one of the W columns."""
    inside = (targets >= 0) & (targets < G.shape[1])
    return G.scatter_add_(1, targets.where(inside, 0).unsqueeze(1), -g.where(inside, 0.0).unsqueeze(1).to(G.dtype))


def rows_of_logits(E, C, targets, g):
    """Rows E (R, D), all of C: G (R, V) = g (softmax - onehot), lse (R,), the target's logit (R,)."""
    logits = block_logits(E, C)  # (R, V)
    target_logit = gather_targets(logits, targets)
    lse, total = exponentials_(logits)
    G = subtract_onehot_(logits.mul_(g.unsqueeze(1) / total), targets, g)  # in place of the logits
    return G.to(product_dtypes(E)[1]), lse, target_logit


class _ChunkedLoss(torch.autograd.Function):
    """(E, C) -> the mean or sum of the losses. Gradients are finished in forward but for one number, by which backward
    multiplies. rows_of makes G of a chunk, as rows_of_logits does (02 has a faster one)."""

    @staticmethod
    def forward(ctx, E, C, targets, ignore_index, reduction, chunk, rows_of):
        with torch.autocast(E.device.type, enabled=False):
            (N, V), sums, kept = (len(E), len(C)), product_dtypes(E)[0], targets != ignore_index  # (N,)
            g = token_weights(kept.to(sums), reduction)  # (N,) d result / d loss[n]
            g = g.where((targets >= 0) & (targets < V), 0.0)  # no class: NaN, no gradient
            need_E, need_C = ctx.needs_input_grad[:2]
            losses = torch.empty(N, dtype=sums, device=E.device)
            dE = torch.empty_like(E) if need_E else None
            dC = torch.zeros(C.shape, dtype=sums, device=C.device) if need_C else None  # the price
            for start in range(0, N, chunk):
                rows = slice(start, start + chunk)
                G, lse, target_logit = rows_of(E[rows], C, targets[rows], g[rows])  # (R, V), (R,), (R,)
                losses[rows] = token_losses(lse, target_logit, targets[rows], V, ignore_index)
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
    """kept (N,) -> (N,): a token's share of the result; of a mean one over ALL kept, not a chunk's."""
    return kept / kept.sum().clamp(min=1) if reduction == "mean" else kept


def chunked_linear_cross_entropy(E, C, targets, *, chunk=1024, ignore_index=-100):
    """Rung 2: mean loss, `chunk` rows of logits alive at a time; differentiable once. E (N, D), C (V, D), targets (N,).
    BadInput, also on fp16: a mean's gradients vanish in its five exponent bits. arXiv 2410.10989."""
    check_arguments(E, C, targets)
    check_target_range(targets, C.shape[0], ignore_index)
    fits = E.dim() == 2 and E.dtype == C.dtype and E.dtype != torch.float16
    refuse(
        (not fits, f"E {tuple(E.shape)} is {E.dtype}, C {C.dtype}: pass E (N, D), both in bf16, fp32 or fp64"),
        (chunk < 1, f"chunk is {chunk}: use at least 1 row"),
    )
    return _ChunkedLoss.apply(E, C, targets, ignore_index, "mean", chunk, rows_of_logits)


# ==== 4. The machine whose memory we count: a GPT =====================================================================
#
#     tokens (B, T) -> embedding, normalised -> L blocks -> norm -> E (B, T, D)
#
#     a block:  x -+-> norm1 -> q, k normalised, turned; v -> attention -> proj -(+)-+-> norm2 -> MLP -(+)->
#                  +---------------------------------------------------------------^  +------------------^
#
# The model stops before its classifier, a plain parameter of its own, so that any loss can be put on top. What a layer
# keeps from forward to backward, in multiples of D elements a token:
#
#     the stream, before each half      2       in fp32 also under autocast (kept for the norms)
#     the outputs of both norms         2
#     q, k and v                        3
#     q and k, normalised and turned    2
#     the output of attention           1
#     the MLP before and after gelu     4 + 4   in all 18
#
# A norm that is not one fused kernel also keeps its normalised input: 2 more; and under autocast the norms of q and k
# then keep an fp32 copy of each.
#
# GPT-2's width, D = 768: 18 x 768 x 4 = 55,296 bytes a token and layer in fp32, 30,720 under autocast (the stream in
# 4 bytes, 16 others in 2). Twelve layers, 8,192 tokens: 2.8 GiB. Their loss, V = 65,536: 6.


@dataclass(frozen=True)
class GPTConfig:
    """vocab V, seq T tokens, layers L, heads H, dim D (a multiple of 2 H: rotary positions turn pairs)."""

    vocab: int = 256
    seq: int = 128
    layers: int = 4
    heads: int = 4
    dim: int = 128

    def parameters(self):
        """Embedding, classifier: V D each; a layer: 4 D^2 attention, 8 D^2 MLP, 2 D norms; last norm D."""
        return 2 * self.vocab * self.dim + self.layers * (12 * self.dim + 2) * self.dim + self.dim

    def flops_per_token(self):
        """Forward and backward: 6 a parameter of a matrix (the embedding is a look-up), 12 T D a layer for attention,
        uncut by causality (PaLM, arXiv 2204.02311 appendix B)."""
        return 6 * (12 * self.layers * self.dim + self.vocab) * self.dim + 12 * self.layers * self.seq * self.dim


def activation_bytes(config, tokens, autocast=False, fused_norm=False):
    """What forward keeps: the table's layers; beside them, in D elements a token, 1 for the embedding's norm, `norms`
    for the last one, 1 for E. Autocast: the stream, unfused norms, E in fp32; the rest, copies of matrices in bf16."""
    norms = 1 if fused_norm else 2  # fp32 tensors that a norm keeps: its input, the normalised one
    layer = 2 * norms * 4 + 16 * (2 if autocast else 4) + (2 * 4 if autocast and not fused_norm else 0)
    copies = 2 * 12 * config.layers * config.dim**2 if autocast else 0
    return tokens * config.dim * (config.layers * layer + (norms + 2) * 4) + copies


def rotate(x, cos, sin):
    """x (B, T, H, D/H), cos, sin (T, 1, D/H/2): turn pairs (i, i + half) by the position's angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)  # arXiv 2104.09864


def rms_norm(x):
    """x (..., D) over the root of its mean square, in the dtype of x; without a gain."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype)  # torch's own eps hangs on the dtype


def causal_attention(q, k, v):
    """q, k, v (B, H, T, D/H) -> the same shape; each position sees itself and those before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """One pre-norm transformer layer. A head's q, k and v lie together in qkv, so a range of heads is a range of its
    rows; how many there are, forward reads from its shape. `attend` can be replaced."""

    def __init__(self, config):
        super().__init__()
        D = config.dim
        self.head, self.attend = D // config.heads, causal_attention
        linear = partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.proj = linear(D, 3 * D), linear(D, D)
        self.up, self.down = linear(D, 4 * D), linear(4 * D, D)

    def forward(self, x, cos, sin):
        q, k, v = self.heads(self.qkv(self.norm1(x)), cos, sin)
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def heads(self, qkv, cos, sin):
        """qkv (B, T, 3 D) -> q and k, normalised and turned, and v, each (B, H, T, D/H)."""
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head)).unbind(3)  # (B, T, H, D/H)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)  # or bf16 would grow to fp32 here
        return tuple(t.transpose(1, 2) for t in (*(rotate(rms_norm(t), cos, sin) for t in (q, k)), v))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))


GPT_FORMAT = 5  # of saved weights and what is saved with them: files of another are refused


class GPT(nn.Module):
    """A decoder-only transformer that stops before its classifier: tokens (B, T) -> E (B, T, D).

    Embeddings begin with elements of 0.02. If the stream did, the first norm would multiply it, and on the way back its
    gradient, by 50: so they are normalised. Normalised q and k cannot make scores that grow with the weights."""

    def __init__(self, config):
        super().__init__()
        D, half = config.dim, config.dim // config.heads // 2
        refuse((D % (2 * config.heads), f"dim {D} with {config.heads} heads: dim must be a multiple of 2 * heads"))
        self.config = config
        self.embedding = nn.Embedding(config.vocab, D)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(D)
        self.classifier = nn.Parameter(torch.empty(config.vocab, D))
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.seq), frequencies).unsqueeze(1)  # (T, 1, half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # as in GPT-2, what writes into the stream is scaled by its depth
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
        """tokens (B, T) -> the stream's beginning (B, T, D)."""
        return rms_norm(self.embedding(tokens))


# ==== 5. Predictions beside measurements: ledger, clock, byte counter, device =========================================


class Ledger:
    """Claims, printed as they are settled. A ratio measured / predicted outside `band` fails the ledger; measured=None
    prints "needs a GPU"; predicted=None or band=None reports without a verdict."""

    ok, started = True, False

    def row(self, claim, formula, predicted, measured, unit="MiB", band=(0.98, 1.02)):
        show = lambda *cells: print("{:<34} | {:<25} | {:>11} | {:>11} | {:>5} | {:<10} | {}".format(*cells))  # noqa: E731
        number = lambda x, none="-": none if x is None else f"{x:.5g} {unit}".strip()  # noqa: E731
        if not self.started:
            show("claim", "formula", "predicted", "measured", "ratio", "band", "ok")
            self.started = True
        ratio, verdict, limits = "", "-", "-"
        if None not in (measured, predicted, band):
            quotient = measured / predicted if predicted else 1 + measured  # of nothing: 1 when it is nothing
            good = band[0] <= quotient <= band[1]  # NaN is not good
            self.ok &= good
            ratio, verdict, limits = f"{quotient:.3f}", "yes" if good else "NO", f"{band[0]:g}..{band[1]:g}"
        show(claim, formula, number(predicted), number(measured, "needs a GPU"), ratio, limits, verdict)


Timing = namedtuple("Timing", "median spread")  # in milliseconds; spread: half the distance of the quartiles


def bench(fn, device="cpu", warmup=1, runs=7):
    """The Timing of fn() after `warmup` calls. Events on a GPU, whose work is asynchronous."""
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
            began = time.perf_counter()
            fn()
            times.append(1e3 * (time.perf_counter() - began))
    low, median, high = statistics.quantiles(times[warmup:], n=4)
    return Timing(median, (high - low) / 2)


# A byte counter for any device. Torch lets us stand between the program and every operation. What an operation returns
# is a tensor; behind it is a storage, the memory itself, which views share. A storage that neither came in nor is known
# has just been born:
#
#     a = zeros(n)        a new storage: born, n bytes under the phase that the program is in
#     b = a.view(2, -1)   the storage came in: nothing
#     b.add_(1)           the same
#     del a, b            the last tensor is gone, Python finalises the storage: died
#
# weakref.finalize(object, function, ...) calls the function at that moment. _cdata, the address of the storage's C++
# object, is its name while it lives. What a library call takes and gives back within itself is not seen; and autograd,
# watched, adds two gradients that meet into a third buffer where it would otherwise add in place.

on_death = weakref.finalize  # by a name of ours, which --break can replace


class LiveBytes(TorchDispatchMode):
    """Follows every storage made inside the block, counted for the `phase` of its birth. phases: bytes now by phase,
    live in all; peak, at_peak: the same when there were most since begin()."""

    def __init__(self):
        super().__init__()
        self.live, self.phases, self.born_in = 0, Counter(), {}
        self.begin("workspace")

    def begin(self, phase):
        """A new phase, and a new peak."""
        self.phase, self.peak, self.at_peak = phase, self.live, self.phases.copy()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {storage._cdata for storage in self.storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in self.storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key not in inputs and key not in self.born_in:  # else a view, or written in place
                self.born_in[key] = self.phase
                self.live += size
                self.phases[self.phase] += size
                on_death(storage, self.died, key, size)
                if self.live > self.peak:
                    self.peak, self.at_peak = self.live, self.phases.copy()
        return out

    @staticmethod
    def storages(tree):
        for t in tree_leaves(tree):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                for part in (t._indices(), t._values()) if t.layout is torch.sparse_coo else (t,):
                    yield part.untyped_storage()

    def died(self, key, size):
        self.live -= size
        self.phases[self.born_in.pop(key)] -= size


def peak_bytes(fn, device="cpu"):
    """Bytes that fn() holds at its peak beyond what was alive before, its result and new .grad among them: on a GPU
    those asked of the allocator, on a CPU LiveBytes'."""
    gc.collect()
    if torch.device(device).type != "cuda":
        with LiveBytes() as follow:
            _ = fn()  # held, since what fn returns counts
        return follow.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    _ = fn()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def describe_device(device="cpu"):
    """One line: the device, the versions, and whether Triton kernels are compiled or interpreted."""
    name, kernels = f"{platform.machine()} CPU, {torch.get_num_threads()} threads", "no triton"
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if HAS_TRITON:
        kernels = f"triton {importlib.metadata.version('triton')} {'interpreted' if INTERPRETED else 'compiled'}"
    return f"{name} | python {platform.python_version()} | torch {torch.__version__} | {kernels}"


# Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets (without sparsity). A GPU that is not listed is "unknown".
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


def peak_flops(device, dtype):
    """FLOP/s that the data sheet promises for dense matrix products on this device in bf16 or fp16; None if unknown."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * t for key, t in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)


def allocated(device):
    """Bytes of tensors alive on a GPU; NaN elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else math.nan


def used_peak(device):
    """Peak bytes: of the allocator on a GPU; of the whole process, libraries included, elsewhere; NaN where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def free_memory(device):
    """Bytes that a GPU has left, or that the machine has; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows
        return math.inf


def default_device():
    """torch.device: the current GPU, or the CPU."""
    return torch.device("cuda" if HAS_CUDA else "cpu")


# ==== 6. Checks. Each --break plants one bug that one of them must catch ==============================================
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
    message = "no error"
    try:
        action()
    except kind as error:
        message = str(error)
    require(words in message and "\n" not in message, f"expected an error about {words!r}, got: {message}")


def random_problem(N, V, D, dtype=torch.float64, device="cpu", seed=0, ignored=0.25, bias=True, scale=1.0):
    """E (N, D), C (V, D), bias (V,) or None as leaves that need gradients; targets (N,), some ignored."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    leaves = draw(N, D) * scale, draw(V, D) / math.sqrt(D), draw(V) if bias else None
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    return *(None if t is None else t.to(device, dtype).requires_grad_() for t in leaves), targets.to(device)


def check_reference(N=37, V=53, D=19, seed=0):
    """In fp64 the reference equals torch's: each reduction, bias, softcap, ignored tokens, gradients."""
    E, C, b, x = random_problem(N, V, D, seed=seed)
    for reduction in ("mean", "sum", "none"):
        for softcap in (None, 1.5):
            logits = E @ C.T + b
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            want = F.cross_entropy(logits, x, reduction=reduction)
            got, lse = linear_cross_entropy_reference(E, C, x, b, softcap=softcap, reduction=reduction, return_lse=True)
            torch.testing.assert_close((got, lse), (want, logits.logsumexp(-1)))
            weight = torch.rand_like(want)
            torch.testing.assert_close(*(torch.autograd.grad(loss, (E, C, b), weight) for loss in (got, want)))


def check_chunked(N=50, V=61, D=16, chunk=16, seed=0):
    """The chunked loss, alone and behind rung 1, equals the reference: a shorter last chunk, ignored tokens unevenly
    spread. In bf16 gradients are off by a rounding of the sums, the loss not even by that."""
    in_chunks = partial(chunked_linear_cross_entropy, chunk=chunk)
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        E, C, _, x = random_problem(N, V, D, dtype, seed=seed)
        x[: chunk - 3] = -100
        want = linear_cross_entropy_reference(E.double(), C.double(), x)
        wants = torch.autograd.grad(2 * want, (E, C))
        for loss in (in_chunks, partial(drop_ignored, in_chunks)):
            got = loss(E, C, x)
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
            for g, w in zip(torch.autograd.grad(2 * got, (E, C)), wants, strict=True):
                torch.testing.assert_close(g.double(), w.double(), rtol=close, atol=close * w.abs().max().item())


def check_extremes():
    """Logits around +-1000 overflow or vanish in exp(), in any precision, unless the maximum is subtracted first. And a
    micro-batch of padding alone has loss 0 and zero gradients, not NaN."""
    E, C, b, x = random_problem(16, 40, 8, torch.float32)
    for offset in (1000.0, -1000.0):
        want = linear_cross_entropy_reference(E.double(), C.double(), x, b.double() + offset)
        got = linear_cross_entropy_reference(E, C, x, b + offset)
        require(abs(got - want) < 1e-3 * want, f"loss is {got.item()} with logits around {offset:g}")
    got = chunked_linear_cross_entropy(torch.full((8, 4), 30.0), torch.full((40, 4), 10.0), torch.arange(8), chunk=3)
    require(abs(got - math.log(40)) < 1e-4, f"in chunks: loss {got.item()} with equal logits of 1200, not log 40")
    x[0], x[1:] = 3, -100  # one token alone, in a chunk of its own
    for loss in (linear_cross_entropy_reference, partial(chunked_linear_cross_entropy, chunk=1)):
        got, want = loss(E, C, x), F.cross_entropy(E @ C.T, x)
        torch.testing.assert_close(*((value, *torch.autograd.grad(value, (E, C))) for value in (got, want)))
    x.fill_(-100)
    for loss in (linear_cross_entropy_reference(E, C, x, b), chunked_linear_cross_entropy(E, C, x, chunk=4),
                 drop_ignored(materialised_loss, E, C, x)):
        gradients = torch.autograd.grad(loss, (E, C, b), allow_unused=True)
        require(loss == 0 and not any(g.any() for g in gradients if g is not None), f"loss {loss}, {gradients}")


def check_bad_input():
    """Each wrong argument, in one line that names it."""
    E, C, b, x = random_problem(6, 10, 4, torch.float32)
    for loss, cases in (
        (linear_cross_entropy_reference, {
            "neither of them 0": dict(C=C[:0]), "as (V, D)": dict(C=C.sum()), "a row a token": dict(E=E[:, :3]),
            "one per row": dict(targets=x[1:]),
            "targets.long()": dict(targets=x.int()), "one value per class": dict(bias=b[1:]),
            "targets holds -1:": dict(targets=x * 0 - 1), "reduction is": dict(reduction="max"), "softcap is 0":
            dict(softcap=0.0), "softcap is inf": dict(softcap=math.inf), "one device": dict(bias=b.to("meta"))}),
        (chunked_linear_cross_entropy, {
            "targets holds 10:": dict(targets=x * 0 + 10), "torch.float16": dict(E=E.half(), C=C.half()),
            "one per row": dict(targets=x[1:]), "chunk is 0": dict(chunk=0)}),
    ):
        for words, wrong in cases.items():
            must_raise(words, partial(loss, **dict(E=E, C=C, targets=x) | wrong))
    must_raise("a multiple of 2", partial(GPT, GPTConfig(dim=12, heads=4)))
    must_raise("tokens has 9 positions", partial(GPT(GPTConfig(seq=8)), x.new_zeros(1, 9)))


def check_table():
    """Every batch size that the paper's Table A3 prints, to the digit."""
    for shape in MODELS:
        got = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        require(shape.printed == got, f"{shape.name}: {got}, the paper prints {shape.printed}")


def check_peak_bytes(device="cpu"):
    """Two buffers at once, then a third after one has died: a peak of two. Views and in-place work add nothing."""

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
    """What GPT says of tokens (B, T), from its weights alone, as in a textbook, in complex numbers."""
    (B, T), H, D = tokens.shape, model.config.heads, model.config.dim
    norm = lambda x, gain=1, eps=2**-52: x * gain / (x.square().mean(-1, keepdim=True) + eps).sqrt()  # noqa: E731
    half = D // H // 2
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)  # (T, half)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    x = norm(model.embedding.weight[tokens], eps=1e-6)
    for block in model.blocks:
        qkv = norm(x, block.norm1.weight) @ block.qkv.weight.T
        q, k, v = qkv.view(B, T, H, 3, D // H).permute(3, 0, 2, 1, 4)  # (B, H, T, D/H) each
        q, k = (torch.complex(*norm(t, eps=1e-6).split(half, -1)) * turn for t in (q, k))
        scores = (q @ k.mH).real / math.sqrt(D // H)  # (B, H, T, T)
        p = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        x = x + (p @ v).transpose(1, 2).reshape(B, T, D) @ block.proj.weight.T
        x = x + F.gelu(norm(x, block.norm2.weight) @ block.up.weight.T) @ block.down.weight.T
    return norm(x, model.norm.weight)


def check_model():
    """GPT against explicit_gpt, its parameters and FLOPs against torch's counts; how its matrices begin."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton: not before TRITON_INTERPRET is set

    config = GPTConfig(vocab=50, seq=16, layers=2, heads=2, dim=16)
    torch.manual_seed(0)
    model = GPT(config)
    for part, want in ((model.blocks[0].up, 0.02), (model.blocks[0].down, 0.01)):  # 0.02 / sqrt(2 layers)
        torch.testing.assert_close(part.weight.std().item(), want, rtol=0.1, atol=0)
    model = model.double()
    for p in model.parameters():
        p.data += torch.rand_like(p) / 4  # gains that are not 1, and scores that are not flat
    tokens = torch.randint(50, (3, 12))
    torch.testing.assert_close(model(tokens), explicit_gpt(model, tokens))
    for block in model.blocks:  # attention as two products, which FlopCounterMode sees
        block.attend = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    with FlopCounterMode(display=False) as counter:
        (model(torch.randint(50, (1, 16))) @ model.classifier.T).sum().backward()
    got = sum(p.numel() for p in model.parameters()), counter.get_total_flops() / 16
    want = config.parameters(), config.flops_per_token()
    require(got == want, f"parameters, FLOP a token: {got}, the formulas say {want}")


def check_predictions():
    """The measurements below in small. A ratio outside its band, or NaN, fails a ledger; a row that needs a GPU not."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cpu, ledger = torch.device("cpu"), Ledger()
        for D in (16, 32):  # the chunk, then the results make the peak
            measure_ladder(cpu, ledger, 256, 2048, D)
        for autocast in (False, True):
            measure_step(cpu, ledger, GPTConfig(2048, 64, 3, 2, 128), 2, autocast)
        require(ledger.ok and "\nclaim  " in printed.getvalue(), printed.getvalue())
        for predicted, measured, ok in (
            (1, 1, True), (1, 1.5, False), (1, math.nan, False), (1, None, True), (0, 0, True), (0, 1, False),
        ):
            ledger.ok = True
            ledger.row("claim", "formula", predicted, measured)
            row = printed.getvalue().splitlines()[-1]
            said = "needs a GPU" if measured is None else f" {measured:g} MiB"
            require(ledger.ok is ok and row.endswith("| NO") is not ok and said in row, row)


CHECKS = [check_reference, check_chunked, check_extremes, check_bad_input, check_table]
CHECKS += [check_peak_bytes, check_model, check_predictions]

# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "no-max": (check_extremes, "log_sum_exp", lambda logits: logits.exp().sum(-1).log()),
    "count-ignored": (check_reference, "reduce_loss", lambda loss, kept, how: getattr(loss, how, lambda: loss)()),
    "divide-by-zero": (check_extremes, "reduce_loss", lambda loss, kept, how: loss.sum() / kept.sum()),
    "chunk-mean": (check_chunked, "token_weights", lambda kept, how: kept / len(kept)),
    "narrow-logits": (check_table, "LOGIT_BYTES", 2),
    "immortal-tensors": (check_peak_bytes, "on_death", lambda s, died, key, size: weakref.finalize(s, died, key, 0)),
    "rotate-one-way": (check_model, "rotate", lambda x, cos, sin: x * cos.repeat(1, 1, 2)),
    "one-norm": (check_model, "rms_norm", lambda x: x),
}


# ==== 7. Measurements =================================================================================================


def measure_ladder(device, ledger, N, V, D):
    """Each remedy, with half of the tokens ignored (prompts, padding). Dropping them copies the rows that are left."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, chunk = dtype.itemsize, N // 8
    E, C, _, x = random_problem(N, V, D, dtype, device, ignored=0.0, bias=False)
    x[::2] = -100
    print(f"\nladder: loss and gradients of N = {N} tokens (half ignored), V = {V}, D = {D}, {dtype}")
    for name, loss, formula, predicted in (
        ("materialised", materialised_loss, "12 N V", materialised_bytes(N, V)),
        ("  ignored dropped first", partial(drop_ignored, materialised_loss), "12 (N/2) V + N D b/2",
         materialised_bytes(N // 2, V) + size * N // 2 * D),
        ("  in 8 chunks", partial(chunked_linear_cross_entropy, chunk=chunk), "dE + 4 V D + chunk",
         chunked_bytes(N, V, D, chunk, size)),
    ):
        step = lambda loss=loss: torch.autograd.grad(loss(E, C, x), (E, C))  # noqa: E731
        timing, measured = bench(step, device, runs=5), peak_bytes(step, device)
        ledger.row(f"{name}: peak", formula, predicted / MIB, measured / MIB)
        print(f"{'':<34} | time {timing.median:.2f} +- {timing.spread:.2f} ms")


def measure_step(device, ledger, config, batch, autocast):
    """One AdamW step through materialised logits, by phase. It has two peaks: the loss's backward, when all activations
    are alive; and the optimizer's step, when all gradients are: 16 P in all."""
    follow, V, N = LiveBytes(), config.vocab, batch * config.seq
    tokens = torch.randint(V, (batch, config.seq + 1), device=device)
    with follow, torch.device(device):
        follow.begin("parameters")
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):  # the first step makes the optimizer's state, the second has everything
            optimizer.zero_grad()
            follow.begin("activations")
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                E = model(tokens[:, :-1]).flatten(0, 1)  # (N, D)
                follow.phase = "logits"
                leaf = E.detach().requires_grad_()  # cut the graph: the loss's backward is a phase, too
                loss = materialised_loss(leaf, model.classifier, tokens[:, 1:].flatten())
            loss.backward()
            at_loss = follow.at_peak  # begin() makes a new one
            E.backward(leaf.grad)
            del E, leaf, loss
            follow.begin("optimizer")
            optimizer.step()
    P, copies = config.parameters(), 2 * (N + V) * config.dim * autocast  # of E and C in bf16
    print(f"\none training step: {P / 1e6:.1f} M parameters, {N} tokens, V = {V}")
    for name, formula, predicted, measured in (
        ("  parameters, at the loss", "4 P", 4 * P, at_loss["parameters"]),
        ("  optimizer, at the loss", "8 P", 8 * P, at_loss["optimizer"]),
        ("  activations, at the loss", "18 D a token and layer",
         activation_bytes(config, N, autocast, device.type == "cuda"), at_loss["activations"]),
        ("  logits, at the loss", "12 N V, copies of E, C", materialised_bytes(N, V) + copies, at_loss["logits"]),
        ("at the optimizer's step", "16 P", 16 * P, follow.peak),
    ):
        ledger.row(name, formula, predicted / MIB, measured / MIB, band=(0.99, 1.01))


def body(device, ledger, args):
    run_checks(CHECKS, device)
    print(f"\ntokens a batch on 16 GPUs of 75 GiB   {'with logits':>12} {'without':>12}   gain")
    for shape in MODELS:
        before, after = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        print(f"  {shape.name:<36}{before:>12,} {after:>12,} {after / before:>5.1f}x")
    if device.type == "cuda":
        smaller = 1 if torch.cuda.mem_get_info()[0] > 20 * 2**30 else 8
        measure_ladder(device, ledger, 16384 // smaller, 65536, 768)
        measure_step(device, ledger, GPTConfig(65536, 1024, 12, 12, 768), 8 // smaller, autocast=True)
    else:
        measure_ladder(device, ledger, 1024, 8192, 64)
        measure_step(device, ledger, GPTConfig(8192, 128, 4, 4, 128), 8, autocast=False)


# ==== 8. The command line of a stage ==================================================================================
#
# Each file of this series is run in the same way, and says by its exit status what came of it:
#
#     (no flags)       checks, then measurements       0 all holds      1 a check or a claim fails
#     --check [NAME]   checks only, or one of them     0                1
#     --break NAME     one check, with a bug planted   0 not caught     1 caught, as a real one would be
#
# and in each case 2 for a user's mistake, in one line. A programmer's mistake keeps its traceback.


def named(checks, only=None):
    """{check: its name}, of all of them or those named `only`. BadInput names the choices."""
    names = {check: getattr(check, "func", check).__name__.removeprefix("check_") for check in checks}
    found = {check: name for check, name in names.items() if not only or name == only.removeprefix("check_")}
    refuse((not found, f"--check {only}: no such check: use one of {', '.join(dict.fromkeys(names.values()))}"))
    return found


def call_check(check, device):
    """check(), or check(device=device) if it takes one."""
    return check(**({"device": device} if "device" in inspect.signature(check).parameters else {}))


def run_checks(checks, device, only=None):
    """Run these checks, or those named `only`, and say so. {name: what the check returned}."""
    found = {name: call_check(check, device) for check, name in named(checks, only).items()}
    print(textwrap.fill("checks passed: " + ", ".join(found), 110))
    return found


def run_break(stage, name):
    """Plant bug `name` of stage["BREAKS"], by replacing a global that all callers look up, and run the one check that
    must catch it. 1 when it does, 0 when not, 2 when anything but the check fails."""
    check, attribute, bug = stage["BREAKS"][name]
    called = f"check_{named([check])[check]}"
    stage[attribute] = bug
    try:
        call_check(check, default_device())
    except Exception as error:
        caught, first = isinstance(error, AssertionError), (str(error).strip() or "assertion").splitlines()[0]
        said = f"caught by {called}" if caught else f"{called} broke down: {type(error).__name__}"
        print(f"--break {name}: {said}: {first}", file=sys.stdout if caught else sys.stderr)
        return 1 if caught else 2
    print(f"--break {name}: NOT caught by {called}")
    return 0


def stage_parser(stage):
    parser = argparse.ArgumentParser(description=stage["__doc__"].strip().splitlines()[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--break", dest="bug", choices=list(stage["BREAKS"]), help="plant this bug: exit status 1")
    either.add_argument("--check", nargs="?", const="", metavar="NAME", help="checks only, no measurements")
    if "add_arguments" in stage:
        stage["add_arguments"](parser)
    return parser


@np.errstate(all="ignore")  # interpreted kernels are NumPy, which warns of the inf that a GPU makes in silence
def run_stage(stage, following):
    """The command line of a stage, whose globals() are given; returns the exit status. --check runs CHECKS, or where
    they need more than a device check_all(device, only, args); else body(device, ledger, args)."""
    args, device, ledger = stage_parser(stage).parse_args(), default_device(), Ledger()
    if args.bug:
        return run_break(stage, args.bug)
    print(describe_device(device))
    try:
        if args.check is None:
            stage["body"](device, ledger, args)
        elif "check_all" in stage:
            stage["check_all"](device, args.check, args)
        else:
            run_checks(stage["CHECKS"], device, args.check)
    except AssertionError as error:
        print(f"CHECK FAILED: {error}")
        return 1
    except (BadInput, OSError, RuntimeError) as error:
        no_memory = isinstance(error, RuntimeError)
        if no_memory and "allocate" not in str(error):  # as torch's allocators say it, on either device
            raise
        said = "no memory for this shape: " * no_memory + str(error).partition("\n")[0]
        print(f"{Path(stage['__file__']).name}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.check is None:
        print(f"next: {following}" if ledger.ok else "A CLAIM FAILED: see the rows marked NO")
    return 0 if ledger.ok else 1


if __name__ == "__main__":
    sys.exit(run_stage(globals(), "python 02_cce_kernel.py"))


# Exercises
#   1. Add a rung that chunks over the vocabulary instead of the tokens. What has to be known before the first gradient
#      can be formed, and how many matrix passes does that cost? (02 is the answer.)
#   2. The chunked rung keeps dC in fp32. Keep it in bf16, dC += (G.T @ E[rows].float()).bfloat16(), and find the chunk
#      count at which check_chunked fails. Why does the error grow with it?
