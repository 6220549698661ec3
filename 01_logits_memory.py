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
    python 01_logits_memory.py --readme         write the results into README.md

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009 (Figure 1, Tables A1 and A3).
    Chunking over tokens with the gradient formed in forward: torchtune and Liger Kernel, arXiv 2410.10989.

Left out on purpose: activation checkpointing, label smoothing, z-loss (add it to the returned lse).
"""

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import math
import multiprocessing.connection
import os
import platform
import re
import signal
import statistics
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
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


# ==== 1. The reference: two stages, everything materialised, obviously correct ========================================


def check_arguments(E, C, targets, bias=None, reduction="mean", shift=0, softcap=None):
    """Raise ValueError with one line that names the argument, its value and the fix."""
    if C.dim() != 2 or not C.numel():
        raise ValueError(f"C has shape {tuple(C.shape)}: pass the classifier as (V, D), neither of them 0")
    if E.dim() < 2 or E.shape[-1] != C.shape[1]:
        raise ValueError(f"E has shape {tuple(E.shape)}: pass (..., {C.shape[1]}), one row a token, as wide as C")
    if targets.shape != E.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}: pass one per row of E, {tuple(E.shape[:-1])}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets has dtype {targets.dtype}: pass targets.long()")
    if bias is not None and bias.shape != C.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: pass one value per class, ({C.shape[0]},)")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: use 'mean', 'sum' or 'none'")
    if not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift is {shift!r}: use 0 for aligned targets, 1 to predict the next token")
    if shift and shift >= targets.shape[-1]:
        raise ValueError(f"shift is {shift} but a sequence has {targets.shape[-1]} tokens: pass longer sequences")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap!r}: use None or a positive number")
    for name, tensor in (("C", C), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != E.device:
            raise ValueError(f"{name} is on {tensor.device} but E is on {E.device}: move {name} there")


def check_target_range(targets, vocab, ignore_index):
    """Raise ValueError when a target is neither a class nor ignore_index. Reads the targets back: stalls a GPU."""
    bad = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab))]
    if bad.numel():
        raise ValueError(f"targets holds {int(bad[0])}: use 0 to {vocab - 1}, or ignore_index = {ignore_index}")


def shift_tokens(E, targets, shift):
    """Pair position t of E (..., T, D) with target t + shift of targets (..., T), as far as both exist."""
    return (E[..., :-shift, :], targets[..., shift:]) if shift else (E, targets)


def log_sum_exp(logits):
    """(..., V) -> (...). Subtracting the maximum keeps exp() finite; it cancels, so no gradient runs through it."""
    top = logits.detach().amax(-1, keepdim=True)  # (..., 1)
    return top.squeeze(-1) + (logits - top).exp().sum(-1).log()


def reduce_loss(loss, kept, reduction):
    """loss, kept (...): "mean" divides by the number of kept tokens, or by 1 when a micro-batch is all padding."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum().clamp(min=1)


def linear_cross_entropy_reference(
    E, C, targets, bias=None, *, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False
):
    """Cross-entropy of E C^T against targets, the obvious way: the yardstick of every faster version.

    E (..., D), C (V, D), bias (V,): any float dtype; computed in fp32, or in fp64 when E is fp64. targets (...) int64.
    softcap s replaces a logit l by s tanh(l / s). shift=k predicts the token k ahead: the last k positions of E and the
    first k of targets drop out. Tokens with ignore_index have loss 0; if all are ignored, the loss is 0 and every
    gradient is zero (torch's mean would be NaN). Returns the loss, scalar or (...) for reduction="none"; with
    return_lse also the log-sum-exp (...) of every token. ValueError on arguments that do not fit, targets included.
    """
    check_arguments(E, C, targets, bias, reduction, shift, softcap)
    check_target_range(targets, C.shape[0], ignore_index)
    E, targets = shift_tokens(E, targets, shift)
    dtype = torch.float64 if E.dtype == torch.float64 else torch.float32
    with torch.autocast(E.device.type, enabled=False):
        logits = E.to(dtype) @ C.to(dtype).T  # (..., V): the buffer that this series is about
        if bias is not None:
            logits = logits + bias.to(dtype)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        kept = targets != ignore_index  # (...)
        lse = log_sum_exp(logits)  # (...)
        target_logit = logits.gather(-1, targets.where(kept, 0).unsqueeze(-1)).squeeze(-1)  # (...)
        loss = reduce_loss((lse - target_logit).where(kept, 0.0), kept, reduction)
    return (loss, lse) if return_lse else loss


# ==== 2. The cost model: bytes, before anything is measured ===========================================================


def materialised_bytes(N, V):
    """Peak of a materialised loss, beyond its inputs: in backward, three fp32 (N, V) buffers are alive at once:
    the log-probabilities kept from forward, their gradient, and the gradient of the logits."""
    return 3 * 4 * N * V


def chunked_bytes(N, V, D, chunk, itemsize):
    """Peak of the chunked loss: dE and an fp32 accumulator for dC, and of the chunk either three fp32 copies of its
    logits (inside log_sum_exp) or its gradient, a 16-bit copy of that, and the product that is added to dC."""
    narrow = itemsize if itemsize < 4 else 0
    return itemsize * N * D + 4 * V * D + max(12 * chunk * V, (4 + narrow) * chunk * V + itemsize * V * D)


class ModelShape(NamedTuple):
    """A published model: vocabulary V, hidden width D, layers L; params as the paper counts them, buffers included
    (GPT-2: 124,439,808 and 12 causal masks of 1024^2); and, where we have it, what its Table A3 prints: tokens a batch
    with and without logits."""

    name: str
    vocab: int
    hidden: int
    layers: int
    params: int
    printed: tuple | None = None


MODELS = [
    ModelShape("GPT-2", 50257, 768, 12, 137_022_720, (5_866_190, 69_845_595)),
    ModelShape("GPT-Neo 1.3B", 50257, 2048, 24, 1_365_907_456, (4_268_047, 12_996_042)),
    ModelShape("GPT-Neo 2.7B", 50257, 2560, 32, 2_718_416_384),
    ModelShape("Gemma 2B", 256000, 2048, 18, 2_506_172_416, (1_155_515, 17_204_330)),
    ModelShape("Gemma 2 2B", 256000, 2304, 26, 2_614_341_888, (1_108_206, 10_580_057)),
    ModelShape("Gemma 2 27B", 256000, 4608, 46, 27_227_128_320),
    ModelShape("Llama 2 7B", 32000, 4096, 32, 6_738_415_616, (3_164_429, 4_709_560)),
    ModelShape("Llama 2 13B", 32000, 5120, 40, 13_015_864_320),
    ModelShape("Llama 3 8B", 128256, 4096, 32, 8_030_261_248, (1_579_333, 4_670_136)),
    ModelShape("Llama 3 70B", 128256, 8192, 80, 70_553_706_496),
    ModelShape("Mistral 7B", 32000, 4096, 32, 7_241_732_096, (3_154_108, 4_694_200)),
    ModelShape("Mixtral 8x7B", 32000, 4096, 32, 46_702_792_704),
    ModelShape("Phi 1.5", 50295, 2048, 24, 1_418_270_720, (4_264_482, 12_991_781)),
    ModelShape("Phi 3 Medium", 32011, 5120, 40, 13_960_238_080),
    ModelShape("Qwen 1.5 7B", 151646, 4096, 32, 7_721_324_544),
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


def materialised_loss(E, C, targets):
    """Rung 0, what most people write: logits in the dtype of E, then a cross-entropy in fp32."""
    return F.cross_entropy((E @ C.T).float(), targets)


def drop_ignored(loss, E, C, targets, ignore_index=-100):
    """Rung 1: ignored tokens cost as much as others until they are dropped before the classifier. Works with every
    loss(E, C, targets) of this series; the boolean mask reads a count back, which stalls a GPU once."""
    kept = targets != ignore_index  # (N,)
    return loss(E[kept], C, targets[kept])


class _ChunkedLoss(torch.autograd.Function):
    """The gradient of a mean needs nothing from backward but one scalar, so it can be formed chunk by chunk in forward,
    while the chunk's logits are at hand: three matrix products of 2 N V D FLOP (logits, dE, dC), as many as with the
    logits kept. Making them again in backward would take four (02)."""

    @staticmethod
    def forward(ctx, E, C, targets, chunk, ignore_index):
        kept = targets != ignore_index  # (N,)
        scale = token_weights(kept)  # (N,)
        loss = torch.zeros((), device=E.device)
        dE = torch.empty_like(E)  # (N, D)
        dC = torch.zeros_like(C, dtype=torch.float32)  # (V, D): the price, an accumulator as large as C in fp32
        for start in range(0, E.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (E[rows] @ C.T).float()  # (chunk, V)
            lse = log_sum_exp(logits)  # (chunk,)
            index = targets[rows].where(kept[rows], 0).unsqueeze(-1)  # (chunk, 1)
            loss += ((lse - logits.gather(-1, index).squeeze(-1)) * scale[rows]).sum()
            G = logits.sub_(lse.unsqueeze(-1)).exp_()  # (chunk, V) softmax, in place of the logits
            G.scatter_add_(-1, index, -torch.ones_like(index, dtype=G.dtype)).mul_(scale[rows].unsqueeze(-1))
            G = G.to(E.dtype)
            dE[rows] = G @ C
            dC += G.T @ E[rows]
            del logits, G  # or the next chunk's logits would be alive beside this one's
        ctx.save_for_backward(dE, dC.to(C.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dE, dC = ctx.saved_tensors
        return dE * grad, dC * grad, None, None, None


def token_weights(kept):
    """kept (N,) -> (N,): each token's share of the mean, counted over ALL tokens, not over those of a chunk."""
    return kept / kept.sum().clamp(min=1)


def chunked_linear_cross_entropy(E, C, targets, *, chunk=1024, ignore_index=-100):
    """Mean loss with `chunk` rows of logits alive at a time. E (N, D), C (V, D), targets (N,); scalar fp32.

    Differentiable once. The approach of torchtune and Liger Kernel (arXiv 2410.10989). ValueError on arguments that do
    not fit."""
    check_arguments(E, C, targets)
    check_target_range(targets, C.shape[0], ignore_index)
    if E.dim() != 2 or E.dtype != C.dtype:
        raise ValueError(f"E is {E.dtype} of shape {tuple(E.shape)}: pass (N, D) in the dtype of C, {C.dtype}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: use at least 1 row")
    return _ChunkedLoss.apply(E, C, targets, chunk, ignore_index)


# ==== 4. The machine whose memory we count: a GPT, and text to train it on ============================================


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
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)). How many heads there are, forward
    reads from the shape of qkv, where a head's q, k and v lie together: any range of heads is a range of its rows (05
    gives each rank one). 05 also puts another function of the same shapes into `attend`, and 07 has another mlp."""

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


GPT_FORMAT = 4  # of saved weights and what is saved with them


class GPT(nn.Module):
    """A decoder-only transformer that stops before its classifier: forward(tokens (B, T)) -> E (B, T, D).

    Two norms have no parameters. Embeddings begin with elements of 0.02. Without a norm behind them, so would the
    stream, and the first layer's norm would multiply by 50, in forward and then their gradient in backward: training
    bursts at the first odd batch. And q and k, normalised, cannot make scores that grow with the weights. `classifier`
    is a plain (V, D) parameter, not tied to the embedding, so that any loss can be put on top."""

    def __init__(self, config):
        super().__init__()
        if config.dim % (2 * config.heads):
            raise ValueError(f"dim {config.dim} with {config.heads} heads: dim must be a multiple of 2 * heads")
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
            raise ValueError(f"tokens has {T} positions: this model was built for seq = {self.config.seq}")
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
        skip = {"test", "tests", "idle_test", "__pycache__"}
        skip |= {"site-packages", "dist-packages"} if kind == "stdlib" else set()
        folders[:] = sorted(set(folders) - skip)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def corpus(tokens="bytes", packages=False, limit=256 * MIB):
    """Text that is on every machine: the source of the Python standard library (`packages`: and of what is installed).

    tokens="bytes": V = 256. tokens="bigrams": two bytes are one token, V = 65,536, a large vocabulary without a
    tokenizer. Files are sorted, tests left out, cut at `limit` bytes. Whole files go to validation, chosen by a
    checksum of their name, until they make 1 % and at least 64 KiB. ValueError when there is too little text."""
    if tokens not in ("bytes", "bigrams"):
        raise ValueError(f"tokens is {tokens!r}: use 'bytes' or 'bigrams'")
    paths = sysconfig.get_paths()
    files, size = [], 0
    for kind in ("stdlib", "purelib") if packages else ("stdlib",):
        for path in source_files(kind):
            if size < limit:
                files.append((zlib.crc32(str(path.relative_to(paths[kind])).encode()), path.read_bytes()))
                size += len(files[-1][1])
    if size < MIB:
        raise ValueError(f"only {size} bytes of Python source under {paths['stdlib']}: pass a text with --data FILE")
    held, val_size = set(), 0
    for i in sorted(range(len(files)), key=lambda i: files[i][0]):
        if val_size >= max(64 * 1024, size // 100):
            break
        held.add(i)
        val_size += len(files[i][1])
    parts = [b"".join(text for i, (_, text) in enumerate(files) if (i in held) == side) for side in (False, True)]
    width = 1 if tokens == "bytes" else 2
    train, val = (np.frombuffer(part[: len(part) // 2 * 2], np.dtype(f"<u{width}")) for part in parts)
    origin = f"standard library of Python {platform.python_version()}" + (" and installed packages" if packages else "")
    return Corpus(train, val, 256**width, width, f"{origin}, {len(files)} files")


def activation_bytes(config, tokens, autocast=False, fused_norm=False):
    """What the forward pass over `tokens` tokens keeps for backward.

    A layer keeps, in multiples of D elements a token: the stream before each half 2, norm outputs 2, q k v 3, turned q
    and k 2, attention 1, MLP 4 + 4, in all 18; a norm that is not one fused kernel also keeps its normalised input, 2
    more. (The norms of q and k keep these, which are there, and a number a head; unfused under autocast both again, in
    fp32.) Before the layers: what is looked up, for its norm. After them: the last stream, E, and the last norm
    likewise. Autocast keeps the stream, the unfused norms and E in fp32, the rest in bf16, and with it a bf16 copy of
    every matrix."""
    norms = 1 if fused_norm else 2  # fp32 tensors that a norm keeps
    layer = 2 * norms * 4 + 16 * (2 if autocast else 4) + 2 * 4 * (autocast and not fused_norm)
    copies = 2 * 12 * config.layers * config.dim**2 if autocast else 0
    return tokens * config.dim * (config.layers * layer + (norms + 2) * 4) + copies


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
            quotient = measured / predicted
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
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(runs):
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
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, (high - low) / 2)


on_death = weakref.finalize


class LiveBytes(TorchDispatchMode):
    """Follows every storage made inside the block from its birth to its death, on any device.

    Bytes are filed under the `phase` in which they were made; `at_peak` keeps the files as they were at the peak. Two
    things to know: what a library call takes and gives back within itself is not seen, and autograd, while it is
    watched, adds two gradients that meet into a third buffer where it would otherwise add in place."""

    def __init__(self):
        super().__init__()
        self.phase, self.live, self.phases = "workspace", 0, Counter()
        self.peak, self.at_peak, self.files = 0, Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {storage._cdata for storage in self.storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in self.storages(out):
            if storage._cdata not in inputs and storage._cdata not in self.files:  # else a view, or written in place
                self.born(storage)
        return out

    @staticmethod
    def storages(tree):
        tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        parts = [[t._indices(), t._values()] if t.layout is torch.sparse_coo else [t] for t in tensors]
        return [part.untyped_storage() for part in sum(parts, []) if not part.is_meta]  # which is a shape alone

    def born(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self.files[key] = self.phase
        self.live += size
        self.phases[self.phase] += size
        on_death(storage, self.died, key, size)  # when the last tensor that uses the storage is gone
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.phases.copy()

    def died(self, key, size):
        self.live -= size
        self.phases[self.files.pop(key)] -= size

    def refile(self, tensor, phase):
        """File a storage under another phase than that of its birth: a gradient is known as one when it is done."""
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if key in self.files:
            self.phases[self.files[key]] -= size
            self.files[key] = phase
            self.phases[phase] += size


def peak_bytes(fn, device="cpu"):
    """Bytes that fn() holds at its peak beyond what was alive before: on a GPU those asked of the allocator, whose
    blocks may each be 1 MiB larger; on a CPU LiveBytes'. What fn leaves behind (its result, .grad of leaves) counts."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = fn()  # held, since what fn returns counts
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    else:
        with LiveBytes() as follow:
            result = fn()
        peak = follow.peak
    del result
    return peak


# Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets (without sparsity). A GPU that is not listed is "unknown".
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


def peak_flops(device, dtype):
    """FLOP/s that the data sheet promises for dense matrix products on this device in bf16 or fp16; None if unknown."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * t for key, t in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)


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


# ==== 6. Several processes (first used by 05; skip it on a first reading) =============================================

LAST_MOMENT = 10  # seconds to end in: of a replacement when all others have, of all when the parent is gone


def join_group(device, timeout=600):
    """Join the torch.distributed group of the environment (RANK, WORLD_SIZE, ...): NCCL on "cuda", gloo on "cpu"."""
    options = dict(timeout=datetime.timedelta(seconds=timeout))
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu, **options)
    else:
        dist.init_process_group("gloo", **options)


def _follow_parent():
    """End this process when its parent has ended, even by SIGKILL."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_MOMENT)  # for who only notes the signal: without the parent's store no round can end any more
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(index, first, seat, fn, ranks, port, device, timeout, args):
    """Runs in each child: join the process group, call fn(*args), leave. seat: the rank whose place it takes."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    rank, seat = first + index, first + index if seat is None else seat
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(seat), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is the parent's, as under torchrun: rank 0 may die
    # Beside a GPU the host only launches kernels: more threads would spin on the cores that the other ranks need.
    torch.set_num_threads(1 if device == "cuda" else max(1, (os.cpu_count() or 1) // ranks))
    if rank < ranks:
        join_group(device, timeout)
    fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()  # not after an error: the others may be inside a collective


def spawn(fn, ranks, device="cpu", args=(), timeout=300, grace=30, spare=0, late=0, replace=False):
    """Run fn(*args) in `ranks` new processes that form one torch.distributed group, gloo or NCCL by device.

    fn must be importable (defined at the top of a file). A collective that waits longer than `timeout` seconds fails.
    When one rank fails, the others are ended and its error is raised; but the first `spare` of those that a signal ends
    are only noted, under gone/RANK in the store that this process keeps. late: further processes, which fn has to
    bring into the group. replace: start another one for each that was lost, under a new RANK, with the LOCAL_RANK of
    the old one; whether it joins or fails, the others go on, and when they have done their work it has 10 seconds
    left. Ctrl-C and SIGTERM are passed on; ranks that have not left after `grace` seconds are killed, and
    KeyboardInterrupt or SystemExit(143) is raised. Returns the ranks that were lost."""

    def terminated(signum, frame):
        raise SystemExit(128 + signum)

    handlers = {signal.SIGTERM: terminated, signal.SIGINT: signal.default_int_handler}  # ignored after a script's `&`
    previous, lost = {number: signal.signal(number, handler) for number, handler in handlers.items()}, []
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of each process that it ends
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setup = (fn, ranks, store.port, torch.device(device).type, timeout, args)
    method = "spawn"  # each process imports torch anew: 4 seconds of a core
    if device != "cuda" and "forkserver" in multiprocessing.get_all_start_methods():  # a copy of one that has it
        method = "forkserver"
        files = [] if HAS_CUDA else ["__main__", fn.__module__]  # which look for a GPU: CUDA does not survive a fork
        multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", *files])  # torch.optim imports the latter
    contexts = []  # (processes started together, the first one's rank, the rank whose place it takes)

    def start(first, count, seat=None):
        context = torch.multiprocessing.start_processes(
            _rank_main, (first, seat, *setup), count, join=False, daemon=True, start_method=method
        )
        contexts.append((context, first, seat))

    def processes():
        return [process for context, *_ in contexts for process in context.processes]

    try:
        start(0, ranks + late)
        deadline = math.inf
        while True:  # sentinels: those of a context that have not ended well yet
            running = {key: (*item, i) for item in contexts for key, i in item[0].sentinels.items()}
            if not running or time.monotonic() > deadline:
                break
            first_ones = contexts[0][0]
            if deadline == math.inf and not first_ones.sentinels and any(p.exitcode == 0 for p in first_ones.processes):
                deadline = time.monotonic() + LAST_MOMENT
            for sentinel in multiprocessing.connection.wait(list(running), timeout=1):
                context, first, seat, index = running[sentinel]
                context.processes[index].join()
                status = context.processes[index].exitcode
                if status == 0:
                    del context.sentinels[sentinel]
                elif seat is not None and (status > 0 or len(lost) >= spare):  # the others do without it
                    del context.sentinels[sentinel]
                    store.set(f"gone/{first + index}", "")
                    print(f"the replacement of process {seat} ended with status {status}", file=sys.stderr)
                elif status < 0 and len(lost) < spare:
                    del context.sentinels[sentinel]
                    lost.append(first + index)
                    store.set(f"gone/{first + index}", "")
                    if replace:
                        start(ranks + late + len(lost) - 1, 1, first + index if seat is None else seat)
                else:
                    context.join(timeout=0)  # raises the error of a rank that failed
    except (KeyboardInterrupt, SystemExit):
        for process in processes():
            process.terminate()
        deadline = time.monotonic() + grace
        for process in processes():
            process.join(max(0, deadline - time.monotonic()))
        raise
    finally:
        for process in processes():
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return lost


# ==== 7. The command line of a stage ==================================================================================


class _Tee(io.StringIO):
    """Keeps what it passes on to the terminal."""

    def write(self, text):
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def replace_atomically(path, data):
    """Write bytes to a temporary file beside `path`, push them to the disk, and only then give them the name."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is safe from a power cut once the directory is on the disk, too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def chosen_lines(text, headlines, about=""):
    """The lines of `text` that begin with one of `headlines`, in their order. headlines: {word: (beginning, ...)}. A
    beginning that no line has is a ValueError, so that it cannot go stale; but those of a word that is neither in
    `about` nor in the text (a GPU, a flag) may be missing. The word "" is everywhere."""
    lines, wanted = text.splitlines(), [start for starts in headlines.values() for start in starts]
    for word, starts in headlines.items():
        missing = [start for start in starts if not any(line.startswith(start) for line in lines)]
        if missing and word in about + text:
            raise ValueError(f"HEADLINES: no line begins with {missing[0]!r}: name one that is printed")
    return "\n".join(line for line in lines if line.startswith(tuple(wanted)))


def publish(stage, text, command, device, path, headlines):
    """Put the chosen lines of `text` between <!-- stage --> and <!-- /stage --> in the file `path`, with provenance."""
    page = Path(path).read_text(encoding="utf-8")
    before, begin, rest = page.partition(f"<!-- {stage} -->")
    _, end, after = rest.partition(f"<!-- /{stage} -->")
    if not (begin and end):
        raise ValueError(f"{path} has no lines '<!-- {stage} -->' and '<!-- /{stage} -->': add them where results go")
    about = f"`{command}`, {datetime.date.today()}, {describe_device(device)}"
    block = f"\n{about}\n```text\n{chosen_lines(text, headlines, about)}\n```\n"
    replace_atomically(path, (before + begin + block + end + after).encode())


def run_break(namespace, name):
    """Plant bug `name` of namespace["BREAKS"] and run the one check that must catch it; 1 when it does, 0 when not, 2
    when anything but the check fails."""
    check, attribute, bug = namespace["BREAKS"][name]
    namespace[attribute] = bug
    on_device = "device" in inspect.signature(check).parameters
    try:
        check(**({"device": default_device()} if on_device else {}))
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


def stage_parser(doc, namespace, add_arguments=None):
    parser = argparse.ArgumentParser(description=doc.strip().splitlines()[0])
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--break", dest="bug", choices=list(namespace["BREAKS"]), help="plant this bug: exit status 1")
    either.add_argument("--readme", nargs="?", const="README.md", metavar="FILE", help="write the main lines into FILE")
    if add_arguments:
        add_arguments(parser)
    return parser


def run_stage(file, doc, namespace, body, following, add_arguments=None):
    """The command line of a stage: --break, --readme, and body(device, ledger, args); returns the exit status.

    0 when every check and claim holds, 1 when one fails (or a planted bug is caught), 2 for bad input (or when
    anything but the check fails)."""
    stage = Path(file).stem
    args = stage_parser(doc, namespace, add_arguments).parse_args()
    if args.bug:
        return run_break(namespace, args.bug)
    device, ledger, output = default_device(), Ledger(), _Tee()
    print(describe_device(device))
    try:
        # The interpreter is NumPy, which warns where a GPU silently makes the inf that the kernels then handle.
        with contextlib.redirect_stdout(output), np.errstate(all="ignore"):
            body(device, ledger, args)
        if args.readme and ledger.ok:
            options = [a for a in sys.argv[1:] if a not in ("--readme", args.readme, f"--readme={args.readme}")]
            command = " ".join(["python", Path(file).name, *options])
            publish(stage, output.getvalue(), command, device, args.readme, namespace["HEADLINES"])
    except AssertionError as error:
        print(f"CHECK FAILED: {error}")
        return 1
    except (ValueError, OSError) as error:
        print(f"{Path(file).name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"next: {following}" if ledger.ok else "A CLAIM FAILED: see the rows marked NO")
    return 0 if ledger.ok else 1


# ==== 8. Checks: what main() and the tests run. Each --break plants one bug that one of them must catch ===============


def require(condition, message):
    """A check that `python -O` does not remove."""
    if not condition:
        raise AssertionError(message)


def must_raise(words, action, kind=ValueError):
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


def check_shift():
    """shift=2 on (B, T) equals pairing E[:, :-2] with targets[:, 2:] by hand."""
    E, C, _, x = random_problem(24, 31, 8)
    E, x = E.view(2, 12, 8), x.view(2, 12)
    got = linear_cross_entropy_reference(E, C, x, shift=2)
    want = F.cross_entropy((E[:, :-2] @ C.T).flatten(0, 1), x[:, 2:].flatten())
    torch.testing.assert_close(got, want)


def check_extreme_logits():
    """Logits around +-1000 overflow exp() in any precision unless the maximum is subtracted first."""
    for offset in (1000.0, -1000.0):
        E, C, b, x = random_problem(16, 40, 8, dtype=torch.float32)
        want = linear_cross_entropy_reference(E.double(), C.double(), x, b.double() + offset)
        got = linear_cross_entropy_reference(E, C, x, b + offset)
        require(torch.isfinite(got), f"loss is {got.item()} with logits around {offset:g}")
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)


def check_all_ignored():
    """A micro-batch of padding alone: loss 0 and zero gradients, not NaN."""
    E, C, b, x = random_problem(9, 12, 4, ignored=1.1)
    for loss in (linear_cross_entropy_reference(E, C, x, b), chunked_linear_cross_entropy(E, C, x, chunk=4)):
        gradients = torch.autograd.grad(loss, (E, C, b), allow_unused=True)
        require(loss.item() == 0, f"loss is {loss.item()}")
        require(all(g is None or not g.any() for g in gradients), "a gradient is not zero")


def check_chunked(N=50, V=61, D=16, chunk=16, seed=0):
    """The chunked loss equals the reference, with a shorter last chunk and ignored tokens that are unevenly spread."""
    E, C, _, x = random_problem(N, V, D, dtype=torch.float32, seed=seed)
    x[: chunk - 3] = -100
    got = chunked_linear_cross_entropy(E, C, x, chunk=chunk)
    want = linear_cross_entropy_reference(E, C, x)
    torch.testing.assert_close(got, want)
    for g, w in zip(torch.autograd.grad(2 * got, (E, C)), torch.autograd.grad(2 * want, (E, C)), strict=True):
        torch.testing.assert_close(g, w)


def check_table():
    """Every batch size that the paper's Table A3 prints, to the digit."""
    for shape in MODELS:
        got = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        require(shape.printed in (None, got), f"{shape.name}: {got}, the paper prints {shape.printed}")


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


def check_model():
    """The parameter count by formula, causality (a later token changes no earlier E), and rotary relativity."""
    config = GPTConfig(vocab=50, seq=16, layers=2, heads=2, dim=16)
    model = GPT(config).double()
    count = sum(p.numel() for p in model.parameters())
    require(count == config.parameters(), f"{count} parameters, the formula says {config.parameters()}")
    tokens = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 50
    same = (model(tokens) == model(changed)).all(-1)[0]
    require(same[:9].all() and not same[9:].any(), "token 9 must change E from position 9 on, and only there")
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = lambda x, p: rotate(x, model.cos[p : p + 1], model.sin[p : p + 1])  # noqa: E731
    torch.testing.assert_close((at(q, 7) * at(k, 4)).sum(), (at(q, 12) * at(k, 9)).sum())


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "no-max": (check_extreme_logits, "log_sum_exp", lambda logits: logits.exp().sum(-1).log()),
    "count-ignored": (check_reference, "reduce_loss", lambda loss, kept, how: getattr(loss, how, lambda: loss)()),
    "divide-by-zero": (check_all_ignored, "reduce_loss", lambda loss, kept, how: loss.sum() / kept.sum()),
    "chunk-mean": (check_chunked, "token_weights", lambda kept: kept / len(kept)),
    "shift-wrong-end": (check_shift, "shift_tokens", lambda E, x, k: (E[..., k:, :], x[..., :-k])),
    "narrow-logits": (check_table, "LOGIT_BYTES", 2),
    "immortal-tensors": (check_peak_bytes, "on_death", lambda s, died, key, size: weakref.finalize(s, died, key, 0)),
    "rotate-one-way": (check_model, "rotate", lambda x, cos, sin: x * cos.repeat(1, 1, 2)),
}


# ==== 9. Measurements =================================================================================================


def measure_ladder(device, ledger, N, V, D):
    """Each remedy on the same problem, half of whose tokens are ignored (prompts and padding): bytes and time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, chunk = dtype.itemsize, N // 8
    E, C, _, x = random_problem(N, V, D, dtype, device, ignored=0.0, bias=False)
    x[::2] = -100
    rungs = [
        ("materialised", materialised_loss, "12 N V", materialised_bytes(N, V)),
        ("  ignored dropped first", partial(drop_ignored, materialised_loss), "12 (N/2) V + N D b/2",
         materialised_bytes(N // 2, V) + size * N // 2 * D),
        ("  in 8 chunks", partial(chunked_linear_cross_entropy, chunk=chunk), "dC + product + chunk",
         chunked_bytes(N, V, D, chunk, size)),
    ]
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13 and later
        own = partial(F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
        rungs.append(("  torch's own, chunked", own, "library", None))
    compiled = torch.compile(materialised_loss) if device.type == "cuda" else None  # elsewhere it needs a C++ compiler
    rungs.append(("  torch.compile", compiled, "library", None))
    print(f"\nladder: loss and gradients of N = {N} tokens (half ignored), V = {V}, D = {D}, {dtype}")
    for name, loss, formula, predicted in rungs:

        def step(loss=loss):
            E.grad = C.grad = None
            loss(E, C, x).backward()

        if loss is None:
            ledger.row(f"{name}: peak", formula, None, None)
            continue
        timing = bench(step, device, runs=5)
        E.grad = C.grad = None
        measured = peak_bytes(step, device)
        ledger.row(f"{name}: peak", formula, predicted and predicted / MIB, measured / MIB)
        print(f"{'':<34} | time {timing}")
    E.grad = C.grad = None


def measure_step(device, ledger, config, batch):
    """One AdamW step through materialised logits, every byte at its peak filed under what it is for."""
    autocast = device.type == "cuda"
    follow = LiveBytes()
    tokens = torch.randint(config.vocab, (batch, config.seq + 1), device=device)

    def steps():
        with follow, torch.device(device):
            follow.phase = "parameters"
            model = GPT(config)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: follow.refile(p.grad, "gradients"))
            for _ in range(2):  # the first step makes the optimizer's state, the second has everything
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    follow.phase = "activations"
                    E = model(tokens[:, :-1]).flatten(0, 1)  # (N, D)
                    follow.phase = "logits"
                    leaf = E.detach().requires_grad_()  # split the graph, so that the loss's backward is a phase too
                    loss = materialised_loss(leaf, model.classifier, tokens[:, 1:].flatten())
                loss.backward()
                follow.phase = "workspace"
                E.backward(leaf.grad)
                follow.phase = "optimizer"
                optimizer.step()

    total, N = peak_bytes(steps, device) if autocast else (steps(), follow.peak)[1], batch * config.seq
    explained = {
        "parameters": 4 * config.parameters(),
        "gradients": 0,  # the peak comes early in backward, before the first gradient is finished
        "optimizer": 8 * config.parameters(),
        "activations": activation_bytes(config, N, autocast, fused_norm=autocast),
        "logits": materialised_bytes(N, config.vocab) + 2 * (N + config.vocab) * config.dim * autocast,  # bf16 E and C
        "workspace": 0,
    }
    size = f"{config.parameters() / 1e6:.1f} M parameters, {N} tokens, V = {config.vocab}"
    print(f"\none training step: {size}; MiB at the peak")
    for name, predicted in explained.items():
        bar = "#" * round(40 * follow.at_peak[name] / total)
        print(f"  {name:<12} predicted {predicted / MIB:9.1f}  measured {follow.at_peak[name] / MIB:9.1f}  {bar}")
    unexplained = total - sum(explained.values())
    bar = "#" * round(40 * abs(unexplained) / total)
    print(f"  {'unexplained':<12} {'':19}  measured {unexplained / MIB:9.1f}  {bar}")
    predicted = sum(explained.values()) / MIB
    ledger.row("whole step: peak", "sum of the categories", predicted, total / MIB, band=(0.95, 1.05))


CHECKS = [check_reference, check_shift, check_extreme_logits, check_all_ignored, check_chunked, check_table]
CHECKS += [check_model]


HEADLINES = {  # what README shows of a run: the lines that begin so (chosen_lines)
    "": (
        "tokens a batch on 16 GPUs", "  GPT-2", "  Gemma 2 2B", "  Llama 3 8B", "ladder: ", "materialised: peak",
        "  ignored dropped first: peak", "  in 8 chunks: peak", "one training step: ", "  optimizer", "  activations",
        "  logits", "whole step: peak",
    ),
}


def body(device, ledger, args):
    for check in CHECKS:
        check()
    check_peak_bytes(device)
    print("checks passed: " + ", ".join(check.__name__[6:] for check in [*CHECKS, check_peak_bytes]) + "\n")
    print(f"tokens a batch on 16 GPUs of 75 GiB   {'with logits':>12} {'without':>12}   gain")
    for shape in MODELS:
        before, after = max_batch_tokens(shape), max_batch_tokens(shape, logits=False)
        print(f"  {shape.name:<36}{before:>12,} {after:>12,} {after / before:>5.1f}x")
    print()
    puzzle = torch.empty(65536, 65536, dtype=torch.bfloat16, device="meta")
    ledger.row("the puzzle: bf16 logits", "65536 * 65536 * 2", 8, puzzle.nbytes / 2**30, "GiB", (1, 1))
    if device.type == "cuda":
        smaller = 1 if torch.cuda.mem_get_info()[0] > 20 * 2**30 else 8
        measure_ladder(device, ledger, 16384 // smaller, 65536, 768)
        measure_step(device, ledger, GPTConfig(65536, 1024, 12, 12, 768), 8 // smaller)
    else:
        measure_ladder(device, ledger, 1024, 8192, 64)
        measure_step(device, ledger, GPTConfig(8192, 128, 4, 4, 128), 8)


if __name__ == "__main__":
    sys.exit(run_stage(__file__, __doc__, globals(), body, "python 02_cce_kernel.py"))


# Exercises
#   1. Add a rung that chunks over the vocabulary instead of the tokens. What has to be known before the first gradient
#      can be formed, and how many matrix passes does that cost? (02 is the answer.)
#   2. The chunked rung keeps dC in fp32. Accumulate it in bf16 instead, and find the chunk count at which check_chunked
#      fails on random data. Why does the error grow with the number of chunks?
#   3. max_batch_tokens assumes checkpointing. Replace its activations by activation_bytes: which model gains least now?
