"""06 - Synchronising rarely, partially, approximately: training over slow links.

The problem in one number
    Data parallelism sums the gradients of every step: a model of a billion parameters in fp32, two workers, a step a
    tenth of a second: 4 GB each way each step, 320 Gbit/s that never pause. Between two cities there is 1. DiLoCo lets
    each worker take H steps alone and then sends only how far it came: 30 to 500 times less. In four bits (and a scale
    for 128 of them) it is 236 times less at H = 30; sent a third of the model at a time, the largest burst is a third.

The maths                                   M workers, P parameters, fp32; t counts a worker's inner steps
    theta_i (P)  live weights of worker i, moved by its own optimizer         phi_i (P)  anchor: weights last agreed on
    Delta_i = phi_i - theta_i                the pseudo-gradient: H inner steps, seen as one gradient
  One mechanism covers the family. Every H steps, for each fragment of the weights (a slice of the flat vectors):
    sent_i = C(Delta_i + beta e_i)           C compresses;  e_i = Delta_i + beta e_i - sent_i is the error feedback
    D_i    = sum_j W2[i, j] sent_j           what comes over the wire, at launch
    bar_i  = sum_j W1[i, j] phi_j            anchors are mixed, too (gossip), or W1 = I
    phi_i, m_i = Outer(phi_i, bar_i, D_i, m_i)                          SGD, heavy ball or Nesterov; at landing, tau
    theta_i = alpha theta_i + (1 - alpha) phi_i                         steps after the launch
  A method is a choice of W1, W2, C, Outer, H, fragments, tau and alpha: METHODS lists them, one line each.

What you will see
    The identities that tie the family together, each bitwise or to rounding; losses and bytes of five methods over two
    real processes; a worker killed in the middle of a round; bandwidth against utilisation beside a published table.

How to launch
    python 06_low_comm_sync.py                        checks, then five methods over two processes; under a minute
    python 06_low_comm_sync.py --all                  every method, M = 2 and 8, in one process (minutes)
    python 06_low_comm_sync.py --study                seeds, M = 8, ablations (an hour of one core)
    python 06_low_comm_sync.py --break heavy-ball     plant a famous bug and watch its check fail (exit status 1)

References ("our reading": only the abstract was available to us, the formula is ours)
    DiLoCo 2311.08105. Streaming DiLoCo 2501.18512. NoLoCo 2506.10911. CO2 2401.16265 (penalty and clip: our reading).
    BAGUA 2107.01499. Factored Gossip DiLoCo 2606.22768 (our reading). SparseLoCo, after 2601.02360. A single merge
    2507.06542 (our reading). Just One Byte 2306.10015. Slow Momentum, the ancestor: 1910.00643.

Left out on purpose: outer state on the host (exercise 2); QAdam, which is C_LP_S over an Adam whose v is frozen;
workers of different sizes; survival of a lost worker under NCCL, whose watchdog ends the others (gloo goes on).
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import importlib
import io
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
HAS_TRITON, MIB, require, must_raise = base.HAS_TRITON, base.MIB, base.require, base.must_raise
triton, tl, fma = cce.triton, cce.tl, forging.fma
fused_multiply_add, nearest_integer = forging.fused_multiply_add, forging.nearest_integer

BLOCK = 128  # numbers that share a scale; every parameter starts at a multiple of it
CHUNK, KEPT = 4096, 64  # top-k: of each CHUNK numbers the KEPT largest, 1.6 %


# ==== 1. The reference: DiLoCo as its paper writes it =================================================================


def diloco_round(thetas, phi, m, lr=0.7, momentum=0.9):
    """One synchronisation of DiLoCo, arXiv 2311.08105 algorithm 1. thetas: list of M tensors (P,); phi, m (P,).

    Returns the new phi and m; every worker goes on from theta = phi."""
    D = torch.stack([phi - theta for theta in thetas]).mean(0)  # (P,)
    m = momentum * m + D
    return phi - lr * (D + momentum * m), m


# ==== 2. What it costs: bytes on the wire, and the bandwidth that they need ===========================================


def block_bytes(name, count):
    """Bytes of `count` numbers (a multiple of the compressor's grain), codes and scales."""
    if name == "topk":  # 12 bits say where in the chunk, 2 bits the value: sign, and which of two levels a chunk
        return count // CHUNK * (KEPT * 14 // 8 + 8)
    bits, scales = {"none": (32, 0), "fp16": (16, 0), "int8": (8, 4), "uint8": (8, 8), "e3m0": (4, 1)}[name]
    return count * bits // 8 + count // BLOCK * scales


def grain(name):
    return CHUNK if name == "topk" else BLOCK


def chunk_size(name, count, parts):
    """Numbers in each of `parts` equal chunks of `count`, padded to whole blocks."""
    return math.ceil(count / parts / grain(name)) * grain(name)


def round_bytes(method, sizes, workers):
    """Bytes that a worker sends in one round over all fragments (sizes: their lengths), arrivals of others not counted.

    A sum over all is a reduce-scatter and an all-gather of compressed chunks, 2 (M - 1) / M payloads, where a sum can
    be compressed again; codes that cannot are gathered whole, M - 1 payloads. Gossip sends one or two payloads to
    whom it concerns, and the anchors in fp32 where they are mixed, too (a worker without a partner sends nothing)."""
    total = 0
    for count in sizes:
        if method.reduces:
            total += 2 * (workers - 1) * block_bytes(method.compressor, chunk_size(method.compressor, count, workers))
        else:
            payload = block_bytes(method.compressor, chunk_size(method.compressor, count, 1))
            total += payload * receivers(method.sums, workers)
        if method.mixes and not method.replicas:
            total += block_bytes("none", chunk_size("none", count, 1)) * receivers(method.mixes, workers)
    return total


def launches(method, steps):
    """Rounds of each fragment in so many inner steps, and the last one at their end."""
    H, count = method.inner_steps, method.fragments
    turns = [[t for t in range(1, steps + 1) if H and (t - f * H // count) % H == 0] for f in range(count)]
    return [len(t) + (not t or t[-1] < steps) for t in turns]


def receivers(kind, workers):
    """To how many others a worker sends (on average: an odd worker has no partner)."""
    return {"all": workers - 1, "pair": workers // 2 * 2 / workers, "ring": min(2, workers - 1)}[kind]


def data_parallel_bytes(P, workers, itemsize=4):
    """Bytes that a worker sends each step in a ring all-reduce of the gradient."""
    return 2 * (workers - 1) / workers * P * itemsize


def resident_bytes(method, P):
    """Bytes beyond the weights themselves: anchor, momentum, error feedback, replicas."""
    vectors = 1 + bool(method.outer.momentum) + (method.feedback is not None) + 2 * method.replicas
    return 4 * P * vectors


def exposed_seconds(volume, bandwidth, window, pieces=1):
    """Seconds that `pieces` transfers of volume / pieces bits each stick out of the time that hides each of them."""
    return pieces * max(0.0, volume / pieces / bandwidth - window)


def utilisation(bandwidth, way, P=1e9, step=0.1, H=100, fragments=8, bits=16):
    """Share of the time that is compute, at so many bits a second. A step is a third forward, two thirds backward.

    Whatever is sent hides behind the backward pass that makes it; streaming sends a fragment every H / fragments
    steps, with overlap it has one whole step more, and "4 bit" sends a quarter of the bits."""
    volume, backward = P * bits, step * 2 / 3
    if way == "data parallel":
        return step / (step + exposed_seconds(volume, bandwidth, backward))
    wait = {
        "DiLoCo": exposed_seconds(volume, bandwidth, backward),
        "streaming": exposed_seconds(volume, bandwidth, backward, fragments),
        "+ overlap": exposed_seconds(volume, bandwidth, backward + step, fragments),
        "+ 4 bit": exposed_seconds(volume / 4, bandwidth, backward + step, fragments),
    }[way]
    return H * step / (H * step + wait)


BANDWIDTHS = 1e9 * np.logspace(-1, 3, 50)  # on whose points the published figures lie
# Streaming DiLoCo, its table of a 1 B model with steps of 0.1 s: Gbit/s for a utilisation of 50, 80, 90, 95, 99 %.
PUBLISHED = {
    "data parallel": (86.8, 152.6, 184.2, 222.3, 569), "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "streaming": (1.4, 5.2, 9.1, 16.0, 28.1), "+ overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
    "+ 4 bit": (0.4, 0.9, 1.7, 2.0, 3.0),
}


def needed_bandwidth(way, target, **sizes):
    """Smallest of BANDWIDTHS, in bits a second, with at least this utilisation; sizes: those of utilisation."""
    return next((b for b in BANDWIDTHS if utilisation(b, way, **sizes) >= target), math.inf)


# ==== 3. Compressors in PyTorch: the reference of the kernels, and the path on a CPU ==================================

REDUCIBLE = ("none", "fp16", "int8", "uint8")  # a sum of these is compressed again; of the others it is too coarse
CODES = {"none": torch.float32, "fp16": torch.float16, "int8": torch.int8, "uint8": torch.uint8, "e3m0": torch.uint8}
SCALES = {"int8": torch.float32, "uint8": torch.float32, "e3m0": torch.uint8}
COMPRESSORS = (*CODES, "topk")


def quantise(name, x):
    """x (..., BLOCK) fp32 -> codes (..., BLOCK or BLOCK / 2 packed), scales (..., 0, 1 or 2).

    int8: the largest magnitude of a block is 127. uint8: its least value is 0, its largest 255. e3m0: sign and three
    bits of exponent, a power of two each: 2^0 ... 2^-6 of the block's top, or 0; the scale is the top's exponent."""
    if name in ("none", "fp16"):
        return x.to(CODES[name]), x[..., :0]
    if name == "int8":
        top = x.abs().amax(-1, keepdim=True)  # (..., 1)
        most = torch.full_like(top, 127)  # a tensor: by a number torch multiplies with its reciprocal, off by a bit
        inverse = torch.where(top > 0, most / top, 0.0).clamp(max=3e38)
        return (x * inverse).round().to(torch.int8), top / most
    if name == "uint8":
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        most = torch.full_like(low, 255)
        inverse = torch.where(high > low, most / (high - low), 0.0).clamp(max=3e38)
        return ((x - low) * inverse).round().to(torch.uint8), torch.cat((low, (high - low) / most), -1)
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    nearest = (magnitude + 0x400000) >> 23  # exponent (biased) of the nearest power of two: from 1.5 on, the next
    top = nearest.amax(-1, keepdim=True)
    code = nearest - top + 7
    code = torch.where(code >= 1, code, ((magnitude >> 23) >= top - 7).int()) * (magnitude > 0)  # halfway to 0
    code = (code | ((bits >> 28) & 8)).to(torch.uint8)  # the sign is the fourth bit
    half = BLOCK // 2  # low four bits: first half of the block; high four: second half
    return code[..., :half] | (code[..., half:] << 4), top.to(torch.uint8)


def dequantise(name, codes, scales):
    """The inverse: fp32 (..., BLOCK)."""
    if name in ("none", "fp16"):
        return codes.float()
    if name == "int8":
        return codes.float() * scales
    if name == "uint8":
        return fma(codes.float(), scales[..., 1:], scales[..., :1].expand(codes.shape))
    code = torch.cat((codes & 15, codes >> 4), -1).int()
    exponent = (code & 7) - 7 + scales.int()  # below 1 fp32 has no normal number: such a block is all but zero
    power = (exponent.clamp(min=0) << 23).view(torch.float32)
    return torch.where(code & 7 > 0, power, 0.0) * (1 - ((code & 8) >> 2))


def views(name, payload):
    """Codes and scales (..., numbers) inside payload (..., bytes) uint8: first the ones, then the others."""
    if name not in SCALES:
        return payload.view(CODES[name]), None
    blocks = payload.shape[-1] // block_bytes(name, BLOCK)
    codes = blocks * (BLOCK // 2 if name == "e3m0" else BLOCK)
    width = SCALES[name].itemsize  # the codes are whole fours, so the view of all as scales is aligned
    return payload[..., :codes].view(CODES[name]), payload.view(SCALES[name])[..., codes // width :]


def top_k(x):
    """x (..., CHUNK) -> payload (..., bytes): 12-bit places in order, 2-bit values, two fp32 levels a chunk.

    Of the kept magnitudes those above their mean become the mean of such, the others theirs: SparseLoCo's two bits."""
    place = x.abs().topk(KEPT, -1).indices.sort(-1).values  # (..., KEPT)
    value = x.gather(-1, place)
    size = value.abs()
    big = size >= size.mean(-1, keepdim=True)
    mean = lambda mask: (size * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)  # noqa: E731
    levels = torch.cat((mean(~big), mean(big)), -1)  # (..., 2)
    a, b = place[..., ::2], place[..., 1::2]  # two places are three bytes
    places = torch.stack((a & 255, (a >> 8) | ((b & 15) << 4), b >> 4), -1).to(torch.uint8).flatten(-2)
    codes = ((value < 0).int() | (big.int() << 1)).unflatten(-1, (-1, 4))
    codes = (codes << torch.arange(0, 8, 2, device=x.device)).sum(-1).to(torch.uint8)
    return torch.cat((places, codes, levels.float().contiguous().view(torch.uint8)), -1)


def from_top_k(payload):
    """The inverse: fp32 (..., CHUNK), zero where nothing was kept."""
    triples = payload[..., : KEPT * 3 // 2].int().unflatten(-1, (-1, 3))
    a, b = triples[..., 0] | ((triples[..., 1] & 15) << 8), (triples[..., 1] >> 4) | (triples[..., 2] << 4)
    place = torch.stack((a, b), -1).flatten(-2).long()  # (..., KEPT)
    codes = payload[..., KEPT * 3 // 2 : KEPT * 14 // 8].int().unsqueeze(-1)
    codes = ((codes >> torch.arange(0, 8, 2, device=payload.device)) & 3).flatten(-2)
    levels = payload[..., KEPT * 14 // 8 :].contiguous().view(torch.float32)  # (..., 2)
    value = levels.gather(-1, (codes >> 1).long()) * (1 - 2 * (codes & 1))
    return torch.zeros(*payload.shape[:-1], CHUNK, device=payload.device).scatter_(-1, place, value)


# ==== 4. Triton kernels: the passes that touch every parameter ========================================================
#
# A round reads phi, theta, e and writes codes; reads M codes and writes D; reads D, phi, m, theta and writes three of
# them. Written as single operations of PyTorch that is 10 to 15 passes over the weights, here it is three. A program
# takes GROUP blocks of BLOCK numbers, as two halves because e3m0 packs two codes in a byte. With one block a program,
# most of the time would go into starting a million programs.

GROUP = 16


@triton.jit
def load_half(pointer, at, count, USED: tl.constexpr):
    if not USED:
        return tl.zeros(at.shape, tl.float32)
    return tl.load(pointer + at, at < count, other=0.0)


@triton.jit
def product(a, b):
    """a b, rounded by itself: the compiler would fuse a plain product with the addition that follows it, where PyTorch
    rounds twice."""
    return fused_multiply_add(a, b, 0.0)


@triton.jit
def power_code(x, top):
    """e3m0's four bits of x, given the block's top exponent; see quantise."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = ((magnitude + 0x400000) >> 23) - top + 7
    code = tl.where(code >= 1, code, ((magnitude >> 23) >= top - 7).to(tl.int32)) * (magnitude > 0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def power_value(code, top):
    exponent = tl.maximum((code & 7) - 7 + top, 0)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where((code & 7) > 0, power, 0.0) * (1 - ((code & 8) >> 2)).to(tl.float32)


@triton.jit
def encode_kernel(
    phi, theta, e, residual, codes, scales, count, blocks, beta, phi_row, theta_row, e_row, rest_row, code_row,
    code_chunk, scale_row, scale_chunk, KIND: tl.constexpr, DELTA: tl.constexpr, FEEDBACK: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
):
    """GROUP blocks of row `program_id(1)`: x = phi - theta + beta e, codes and scales of x, residual x - sent.
    BLOCKS: blocks in a chunk, each of which has its own place for codes and scales; blocks: in all chunks."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)[:, None]  # (GROUP, 1)
    chunk, inside, real = (block // BLOCKS).to(tl.int64), block % BLOCKS, block < blocks
    lane = tl.arange(0, HALF)[None, :]
    at, bt = block * (2 * HALF) + lane, block * (2 * HALF) + HALF + lane  # (GROUP, HALF): the blocks' two halves
    a, b = load_half(phi + row * phi_row, at, count, True), load_half(phi + row * phi_row, bt, count, True)
    a -= load_half(theta + row * theta_row, at, count, DELTA)
    b -= load_half(theta + row * theta_row, bt, count, DELTA)
    if FEEDBACK:
        a = fused_multiply_add(load_half(e + row * e_row, at, count, True), beta, a)
        b = fused_multiply_add(load_half(e + row * e_row, bt, count, True), beta, b)
    codes += row * code_row + chunk * code_chunk  # (GROUP, 1)
    scales += row * scale_row + chunk * scale_chunk
    place = inside * (2 * HALF) + lane
    if KIND == "none" or KIND == "fp16":
        p, q = a.to(codes.dtype.element_ty), b.to(codes.dtype.element_ty)
        tl.store(codes + place, p, real)
        tl.store(codes + place + HALF, q, real)
        p, q = p.to(tl.float32), q.to(tl.float32)
    elif KIND == "int8":
        top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1, keep_dims=True)  # (GROUP, 1)
        inverse = tl.minimum(tl.where(top > 0, tl.div_rn(127.0, tl.where(top > 0, top, 1.0)), 0.0), 3e38)
        p, q = nearest_integer(product(a, inverse)).to(tl.int8), nearest_integer(product(b, inverse)).to(tl.int8)
        scale = tl.div_rn(top, 127.0)
        tl.store(codes + place, p, real)
        tl.store(codes + place + HALF, q, real)
        tl.store(scales + inside, scale, real)
        p, q = product(p.to(tl.float32), scale), product(q.to(tl.float32), scale)
    elif KIND == "uint8":
        low = tl.min(tl.minimum(a, b), 1, keep_dims=True)  # (GROUP, 1)
        high = tl.max(tl.maximum(a, b), 1, keep_dims=True)
        width = high - low
        inverse = tl.minimum(tl.where(width > 0, tl.div_rn(255.0, tl.where(width > 0, width, 1.0)), 0.0), 3e38)
        p = nearest_integer(product(a - low, inverse)) & 255
        q = nearest_integer(product(b - low, inverse)) & 255
        step = tl.div_rn(width, 255.0)
        tl.store(codes + place, p.to(tl.uint8), real)
        tl.store(codes + place + HALF, q.to(tl.uint8), real)
        tl.store(scales + 2 * inside, low, real)
        tl.store(scales + 2 * inside + 1, step, real)
        p, q = fused_multiply_add(p.to(tl.float32), step, low), fused_multiply_add(q.to(tl.float32), step, low)
    else:  # e3m0
        top = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1, keep_dims=True)
        top = (top.to(tl.int32, bitcast=True) + 0x400000) >> 23
        p, q = power_code(a, top), power_code(b, top)
        tl.store(codes + inside * HALF + lane, (p | (q << 4)).to(tl.uint8), real)
        tl.store(scales + inside, top.to(tl.uint8), real)
        p, q = power_value(p, top), power_value(q, top)
    if FEEDBACK:
        tl.store(residual + row * rest_row + at, a - p, at < count)
        tl.store(residual + row * rest_row + bt, b - q, bt < count)


@triton.jit
def decode_kernel(
    codes, scales, weights, out, count, blocks, senders, out_row, code_row, code_chunk, scale_row, scale_chunk,
    KIND: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
):
    """GROUP blocks of row i = `program_id(1)`: out = sum over j of weights[i, j] x decoded j, j = 0, 1, ..."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)[:, None]  # (GROUP, 1)
    chunk, inside, real = (block // BLOCKS).to(tl.int64), block % BLOCKS, block < blocks
    lane = tl.arange(0, HALF)[None, :]
    codes += chunk * code_chunk  # (GROUP, 1)
    scales += chunk * scale_chunk
    place = inside * (2 * HALF) + lane
    a, b = tl.zeros((GROUP, HALF), tl.float32), tl.zeros((GROUP, HALF), tl.float32)
    for sender in range(senders):
        weight = tl.load(weights + row * senders + sender)
        if weight != 0:  # what has no weight may be anything
            if KIND == "e3m0":
                packed = tl.load(codes + inside * HALF + lane, real, other=0).to(tl.int32)
                top = tl.load(scales + inside, real, other=0).to(tl.int32)
                p, q = power_value(packed & 15, top), power_value(packed >> 4, top)
            else:
                p = tl.load(codes + place, real, other=0).to(tl.float32)
                q = tl.load(codes + place + HALF, real, other=0).to(tl.float32)
            if KIND == "int8":
                scale = tl.load(scales + inside, real, other=0)
                p, q = p * scale, q * scale
            if KIND == "uint8":
                low = tl.load(scales + 2 * inside, real, other=0)
                step = tl.load(scales + 2 * inside + 1, real, other=0)
                p, q = fused_multiply_add(p, step, low), fused_multiply_add(q, step, low)
            a, b = fused_multiply_add(p, weight, a), fused_multiply_add(q, weight, b)
        codes += code_row
        scales += scale_row
    at, bt = block * (2 * HALF) + lane, block * (2 * HALF) + HALF + lane
    tl.store(out + row * out_row + at, a, at < count)
    tl.store(out + row * out_row + bt, b, bt < count)


@triton.jit
def outer_kernel(
    phi, theta, m, D, bar, numbers, count, phi_row, theta_row, m_row, D_row, bar_row, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BAR: tl.constexpr, PULL: tl.constexpr, SIZE: tl.constexpr,
):
    """outer_step of a tile of SIZE numbers: see there."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    momentum, gain, pull = tl.load(numbers + row * 5), tl.load(numbers + row * 5 + 1), tl.load(numbers + row * 5 + 2)
    rate, keep = tl.load(numbers + row * 5 + 3), tl.load(numbers + row * 5 + 4)
    anchor = load_half(phi + row * phi_row, at, count, True)
    mixed = load_half(bar + row * bar_row, at, count, True) if BAR else anchor
    g = load_half(D + row * D_row, at, count, True) * gain
    if PULL:
        g = fused_multiply_add(anchor - mixed, pull, g)
    u = g
    if MOMENTUM:
        u = fused_multiply_add(load_half(m + row * m_row, at, count, True), momentum, g)
        tl.store(m + row * m_row + at, u, at < count)
        if NESTEROV:
            u = fused_multiply_add(u, momentum, g)
    anchor = fused_multiply_add(u, -rate, anchor if PULL else mixed)
    live = load_half(theta + row * theta_row, at, count, True)
    tl.store(phi + row * phi_row + at, anchor, at < count)
    tl.store(theta + row * theta_row + at, fused_multiply_add(live, keep, (1.0 - keep) * anchor), at < count)


# ==== 5. One round's three operations, by kernels or by PyTorch =======================================================


def by_kernels(x, backend):
    """Whether Triton's kernels take this tensor. "auto": on a GPU; "triton": also in the interpreter."""
    if backend == "triton" and not HAS_TRITON:
        raise base.BadInput("backend is 'triton', which is not installed: use 'torch', or pip install triton (Linux)")
    return x.dtype == torch.float32 and (backend == "triton" or backend == "auto" and x.is_cuda and HAS_TRITON)


def padded(x, parts, size):
    """x (L, n) -> (L, parts, size), zeros at the end."""
    return F.pad(x, (0, parts * size - x.shape[1])).unflatten(1, (parts, size))


def encode(name, phi, theta=None, e=None, beta=1.0, parts=1, size=None, backend="auto"):
    """Compress x = phi - theta + beta e, all (L, n) fp32, theta and e optional, in `parts` chunks of `size` numbers.

    Returns payload (L, parts, bytes) uint8, and what is left of x, (L, n), None without e. "none" takes fp64, too."""
    L, n = phi.shape
    size = size or chunk_size(name, n, parts)
    if name in CODES and by_kernels(phi, backend):
        payload = torch.empty(L, parts, block_bytes(name, size), dtype=torch.uint8, device=phi.device)
        codes, scales = views(name, payload)
        residual = None if e is None else torch.empty(L, n, device=phi.device)
        scales = codes if scales is None else scales
        theta, feedback, e = phi if theta is None else theta, e is not None, phi if e is None else e
        rest = phi if residual is None else residual
        blocks = parts * size // BLOCK
        encode_kernel[(triton.cdiv(blocks, GROUP), L)](
            phi, theta, e, rest, codes, scales, n, blocks, float(beta), phi.stride(0), theta.stride(0), e.stride(0),
            rest.stride(0), codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), KIND=name,
            DELTA=theta is not phi, FEEDBACK=feedback, BLOCKS=size // BLOCK, GROUP=GROUP, HALF=BLOCK // 2,
        )
        return payload, residual
    x = phi if theta is None else phi - theta
    x = x if e is None else fma(e, torch.full_like(x, beta), x)
    if x.dtype == torch.float64:  # only to check identities more sharply than fp32 can
        return padded(x, parts, size).contiguous().view(torch.uint8), None
    if name == "topk":
        payload = top_k(padded(x, parts, size).unflatten(2, (-1, CHUNK))).flatten(2)
    else:
        codes, scales = quantise(name, padded(x, parts, size).unflatten(2, (-1, BLOCK)))
        pieces = [codes.flatten(2).contiguous().view(torch.uint8)]
        payload = torch.cat(pieces + [scales.flatten(2).contiguous().view(torch.uint8)] * (name in SCALES), 2)
    sent = decode(name, payload, n) if e is not None else None
    return payload.contiguous(), None if e is None else x - sent


def decode(name, payload, n, dtype=torch.float32):
    """payload (J, parts, bytes) -> (J, n) by PyTorch."""
    if dtype == torch.float64:
        return payload.view(torch.float64).flatten(1)[:, :n]
    if name == "topk":
        return from_top_k(payload.unflatten(2, (-1, block_bytes(name, CHUNK)))).flatten(1)[:, :n]
    codes, scales = views(name, payload)
    codes = codes.unflatten(2, (-1, BLOCK // 2 if name == "e3m0" else BLOCK))
    scales = None if scales is None else scales.unflatten(2, (codes.shape[2], -1))
    return dequantise(name, codes, scales).flatten(1)[:, :n]


def decode_sum(name, payload, weights, n, backend="auto", dtype=torch.float32):
    """sum over j of weights[i, j] x what payload[j] holds: (L, n). payload (J, parts, bytes), weights (L, J) fp32.

    The order of the sum is that of j, by rank: every worker, and every transport, gets the same bits."""
    L, J = weights.shape
    if name in CODES and dtype == torch.float32 and by_kernels(weights, backend):
        out = torch.empty(L, n, device=payload.device)
        codes, scales = views(name, payload)
        scales = codes if scales is None else scales
        per_chunk, blocks = payload.shape[2] // block_bytes(name, BLOCK), triton.cdiv(n, BLOCK)
        decode_kernel[(triton.cdiv(blocks, GROUP), L)](
            codes, scales, weights, out, n, blocks, J, n, codes.stride(0), codes.stride(1), scales.stride(0),
            scales.stride(1), KIND=name, BLOCKS=per_chunk, GROUP=GROUP, HALF=BLOCK // 2,
        )
        return out
    out = torch.zeros(L, n, dtype=dtype, device=payload.device)
    rows = weights.tolist()
    for j in range(J):
        x = decode(name, payload[j : j + 1], n, dtype)[0] if any(row[j] for row in rows) else None  # (n,)
        for i in range(L):
            if rows[i][j]:
                out[i] = fma(x, weights[i, j].expand(n), out[i])
    return out


@dataclass(frozen=True)
class Outer:
    """The outer optimizer. lr, momentum and nesterov as in torch.optim.SGD; gain multiplies D. pull: NoLoCo's gamma,
    which draws the anchors of a pair together through the momentum (without it a mixed anchor is simply taken).
    penalty and clip are CO2's (our reading): D shrinks by 1 + |step since it was sent| / |D|, and the root mean square
    of the momentum's elements stays below clip."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    gain: float = 1.0
    pull: float | None = None
    penalty: bool = False
    clip: float = 0.0


def staleness_penalty(outer, m, D):
    """CO2's Lambda, our reading, (L,): between launch and landing the anchor moved by one outer step, lr m. The larger
    that is beside D, the older D's starting point."""
    return 1 + outer.lr * m.norm(dim=1) / D.norm(dim=1).clamp(min=1e-30)


def clip_factor(outer, m, D):
    """(L,) by which the new momentum m + D is shortened to CO2's limit, our reading."""
    return (outer.clip / ((outer.momentum * m + D).square().mean(1).sqrt() + 1e-30)).clamp(max=1.0)


def outer_step(outer, phi, theta, m, D, bar=None, keep=0.0, backend="auto"):
    """In place, all (L, n), m and bar optional:

        g     = gain D + pull (phi - bar)
        m     = momentum m + g
        phi   = (bar, or with pull phi) - lr (m, or with nesterov g + momentum m)
        theta = keep theta + (1 - keep) phi
    """
    L, n = phi.shape
    like = dict(dtype=phi.dtype, device=phi.device)
    gain, momentum = torch.full((L,), outer.gain, **like), torch.full((L,), outer.momentum, **like)
    if outer.penalty:
        gain = gain / staleness_penalty(outer, m, D)
    if outer.clip:
        factor = clip_factor(outer, m, D * gain[:, None])
        gain, momentum = gain * factor, momentum * factor
    constants = torch.tensor([outer.pull or 0.0, outer.lr, keep], **like).expand(L, 3)
    numbers = torch.cat((momentum[:, None], gain[:, None], constants), 1)  # (L, 5)
    if by_kernels(phi, backend):
        tensors = [phi, theta, phi if m is None else m, D, phi if bar is None else bar]
        outer_kernel[(triton.cdiv(n, 1024), L)](
            *tensors, numbers, n, *(t.stride(0) for t in tensors), MOMENTUM=m is not None, NESTEROV=outer.nesterov,
            BAR=bar is not None, PULL=outer.pull is not None, SIZE=1024,
        )
        return
    momentum, gain, pull, rate, keep = (column[:, None].expand(L, n) for column in numbers.T)
    mixed = phi if bar is None else bar
    g = D * gain
    if outer.pull is not None:
        g = fma(phi - mixed, pull, g)
    u = g
    if m is not None:
        u = fma(m, momentum, g)
        m.copy_(u)
        u = nesterov(u, momentum, g) if outer.nesterov else u
    phi.copy_(fma(u, -rate, mixed if outer.pull is None else phi))
    theta.copy_(blend(theta, phi, keep))


def blend(theta, phi, keep):
    """alpha theta + (1 - alpha) phi: exactly phi for alpha = 0, exactly theta for 1."""
    return fma(theta, keep, (1 - keep) * phi)


def nesterov(m, momentum, g):
    """Where m is about to carry the weights: the gradient, and the momentum once more."""
    return fma(m, momentum, g)


# ==== 6. Who hears whom: mixing matrices ==============================================================================


def mixing(kind, number, live, seed=0):
    """W (M, M) fp64 for round `number`; row i is what worker i adds up. live (M,): 1, or 0 for who has nothing to say.

    all: the mean over the living, for everybody. pair: random pairs of the living, drawn from (seed, number), which all
    workers know; an odd one keeps its own. ring: thirds of oneself and of the neighbours. None: one's own."""
    M, alive = len(live), np.flatnonzero(live)
    W = np.eye(M)
    if kind == "all" and len(alive):
        W = np.tile(np.asarray(live, float) / sum(live), (M, 1))
    elif kind == "pair":
        order = pairing(seed, number, alive)
        for a, b in zip(order[::2], order[1::2], strict=False):
            W[[a, b]] = 0
            W[[[a], [b]], [a, b]] = 0.5
    elif kind == "ring" and len(alive) > 1:
        for k, i in enumerate(alive):
            W[i] = 0
            for j in (alive[k - 1], i, alive[(k + 1) % len(alive)]):
                W[i, j] += 1 / 3
    return W


def pairing(seed, number, alive):
    return np.random.default_rng([seed, number]).permutation(alive)


# ==== 7. Two transports: torch.distributed, and M workers in one process ==============================================


class Part(NamedTuple):
    """What a round sends: payload (L, parts, bytes) uint8; W (M, M): who needs whose. combine: None, or a function
    (stack (J, parts, bytes)) -> (1, parts, bytes) that adds up one chunk of all: then each worker does that for its
    own chunk, and the result is gathered. counted: whether bytes_sent counts it."""

    payload: torch.Tensor
    W: np.ndarray
    combine: object = None
    counted: bool = True


class Arrived(NamedTuple):
    """senders: ranks of the rows of stack (J, parts, bytes), in order; (None,) for a sum."""

    senders: tuple
    stack: torch.Tensor


class Outcome(NamedTuple):
    """What a launch led to: an Arrived for each Part, and what the workers agreed on with it: join, stop, halt."""

    parts: list
    notes: dict


def destinations(W, rank, members):
    return [k for k in members if k != rank and W[k, rank] != 0]


class Sim:
    """M workers in this process: every rank's rows are here, a launch has arrived when it returns. silent(number):
    ranks that take no part in round `number`: their anchors, weights and error feedback stay as they are.

    bytes_sent is that of a mean worker, by the sizes of what Dist would have handed over."""

    def __init__(self, size, silent=None):
        if size < 1:
            raise base.BadInput(f"size is {size}: use at least 1 worker")
        self.size, self.silent, self.bytes_sent = size, silent, 0.0
        self.ranks = self.members = tuple(range(size))
        self.wishes = {"join": []}

    def live(self, number, step):
        """(M,): 1, or 0 for the silent of a round; number -1 is no round."""
        quiet = self.silent(number) if self.silent and number >= 0 else ()
        return np.array([float(rank not in quiet) for rank in self.ranks])

    def launch(self, parts):
        arrived = []
        for payload, W, combine, counted in parts:
            chunk = payload[0, 0].nbytes * counted
            if combine:
                arrived.append(Arrived((None,), combine(payload)))
                self.bytes_sent += 2 * (self.size - 1) * chunk
            else:
                arrived.append(Arrived(self.ranks, payload))
                sends = sum(len(destinations(W, rank, self.members)) for rank in self.ranks)
                self.bytes_sent += sends * payload.shape[1] * chunk / self.size
        done = concurrent.futures.Future()
        done.set_result(Outcome(arrived, dict(self.wishes)))
        return done

    def ask(self, what, text):
        self.wishes[what] = text

    def reform(self, step, joining=()):
        raise RuntimeError("workers of one process do not get lost")

    def close(self):
        pass


class Dist(parallel.Membership):
    """One worker of a torch.distributed group (gloo or NCCL), which may shrink and grow again over gloo.

    One thread of its own runs everything that waits for others, in the order of the launches, while the caller goes on
    computing. What arrived counts only when ALL have it, by 05's vote, so that no round is ever applied by half of
    them. After an abort the survivors form a new group, in which the round is launched again.

    timeout, grace: 05's; timeout includes the slowest worker's way to a round. rank: given only by a worker that joins
    a group at work, under a number of its own, after as many Dist objects as the others made before. group: the workers
    are this part of all processes: 05's tensor parallelism cuts each worker over several, and there is a group for each
    cut. The verdict is then of all processes, so that no cut is a round ahead of another, and after an abort the run
    ends: a worker that lost a part is of no use."""

    silent = None

    def __init__(self, device="cpu", timeout=60.0, grace=None, rank=None, group=None):
        late, self.group = rank is not None, group
        rank, size = (rank, 0) if late else (dist.get_rank(group), dist.get_world_size(group))
        super().__init__(rank, range(size), timeout, grace, device)
        self.ranks, self.size = (rank,), max(size, rank + 1)
        self.joined = {r: -1 for r in self.members}  # rank: step at which it came
        self.bytes_sent, self.broken, self.handled = 0.0, False, 0
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.thread = concurrent.futures.ThreadPoolExecutor(1, initializer=self.begin)
        if not late and group is None and self.stream is None:  # the same, but its calls end after our timeout
            dist.barrier()  # or who is still connecting would see us leave
            dist.destroy_process_group()
            self.connect()

    def begin(self):
        if self.stream is not None:
            torch.cuda.set_device(self.device)

    def live(self, number, step):
        """A worker that joined in this very step has no progress of its own: it hears, and is not counted."""
        return np.array([float(r in self.members and self.joined[r] < step) for r in range(self.size)])

    def launch(self, parts):
        """Start to send; .result() is an Outcome, or None if the round was aborted."""
        ready = None
        if self.stream is not None:
            ready = torch.cuda.current_stream().record_event()
        return self.thread.submit(self.exchange, parts, ready)

    def exchange(self, parts, ready):
        if self.broken:
            return None
        arrived, good = [], True
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            try:
                if ready is not None:
                    self.stream.wait_event(ready)
                for part in parts:
                    arrived.append(self.reduce(part) if part.combine else self.gather(part))
                if self.stream is not None:
                    self.stream.synchronize()  # it has arrived, or the vote would be about nothing
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a connection broke, or waited too long
                good = False
        notes = self.vote(good)
        self.broken = notes is None
        return None if self.broken else Outcome(arrived, notes)

    def gather(self, part):
        """The payloads that this worker needs: by an all-gather if everybody needs all, else point to point."""
        payload, members = part.payload[0], self.members
        if (part.W[np.ix_(members, members)] != 0).all():
            stack = payload.new_empty(len(members), *payload.shape)
            self.done(dist.all_gather(list(stack), payload, group=self.group, async_op=True))
            self.bytes_sent += part.counted * (len(members) - 1) * payload.numel()
            return Arrived(members, stack)
        to = destinations(part.W, self.rank, members)
        senders = tuple(j for j in members if j == self.rank or part.W[self.rank, j] != 0)
        stack = payload.new_empty(len(senders), *payload.shape)
        stack[senders.index(self.rank)] = payload
        index = {rank: i for i, rank in enumerate(members)}  # ranks of the present group
        op = functools.partial(dist.P2POp, group=self.group)
        calls = [op(dist.isend, payload, group_peer=index[k]) for k in to]
        calls += [op(dist.irecv, stack[i], group_peer=index[j]) for i, j in enumerate(senders) if j != self.rank]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            self.done(work)
        self.bytes_sent += part.counted * len(to) * payload.numel()
        return Arrived(senders, stack)

    def reduce(self, part):
        """Each worker gets its chunk of all, adds up, compresses the sum, and all gather the sums."""
        payload, J = part.payload[0], len(self.members)  # (J, bytes)
        mine = torch.empty_like(payload)
        self.done(dist.all_to_all_single(mine, payload, group=self.group, async_op=True))
        total = part.combine(mine[:, None])[0, 0]  # (bytes,)
        sums = torch.empty_like(payload)
        self.done(dist.all_gather(list(sums), total, group=self.group, async_op=True))
        self.bytes_sent += part.counted * 2 * (J - 1) * total.numel()
        return Arrived((None,), sums[None])

    def done(self, work):
        """gloo: wait for it, no longer than `timeout`. NCCL: have the stream wait; its watchdog keeps the time."""
        if self.stream is None:
            work.wait(datetime.timedelta(seconds=self.timeout))
        else:
            work.wait()

    def vote(self, good):
        """None if the round is aborted, else what was agreed on with it."""
        notes = self.agreed(good, range(dist.get_world_size()) if self.group else self.members, self.terms)
        if notes is not None:
            self.handled = notes["handled"]
            for ticket in notes["tickets"]:
                self.store.set(f"{self.prefix}/invitation/{ticket}", str(self.epoch + 1))
        return notes

    def terms(self):
        """By the last to arrive: wishes that came in since the last round become part of the verdict."""
        asked = self.store.add(f"{self.prefix}/requests", 0)
        names = {n: f"{self.prefix}/request/{n}" for n in range(self.handled + 1, asked + 1)}
        join = {n: int(self.store.get(name)) for n, name in names.items() if self.store.check([name])}
        notes = dict(handled=asked, tickets=list(join), join=sorted(join.values()))
        for what in ("stop", "halt"):
            if self.store.check([f"{self.prefix}/{what}"]):
                notes[what] = self.store.get(f"{self.prefix}/{what}").decode()
        return notes

    def ask(self, what, text):
        """Have `what` ("stop", "halt") in the notes of the next round, for all workers alike."""
        self.thread.submit(self.store.set, f"{self.prefix}/{what}", text)

    def reform(self, step, joining=()):
        """A new group of whoever is there, and of those who join. True when this worker is in it."""
        if self.group is not None:
            raise ConnectionError(f"step {step}: a process was lost, and with it a part of a worker: use --resume "
                                  "to go on with as many processes as before")
        return self.thread.submit(self.regroup, step, joining).result()

    def regroup(self, step, joining, patience=None):
        def news(members):  # for those who join, and so that all say the same
            joined = [self.joined.get(r, step) for r in members]
            donor = min((r for r in members if r in self.joined), key=lambda r: (self.joined[r], r))
            return dict(joined=joined, donor=donor, handled=self.handled)

        for _ in range(self.size + 3):  # somebody else may fall while the group forms
            told = self.meet(joining, news, patience)
            if told is None:
                return False
            self.joined = dict(zip(self.members, told["joined"], strict=True))
            self.donor, self.handled = told["donor"], told["handled"]
            self.size = max(self.size, *(r + 1 for r in self.members))
            try:
                self.connect()
            except RuntimeError:
                continue
            self.broken = False
            return True
        raise RuntimeError(f"no group could be formed in {self.size + 3} attempts: check the network between workers")

    def enter(self, patience=600.0):
        """Ask to join a group at work, and wait for its next round."""
        self.thread.submit(self.request, patience).result()

    def request(self, patience):
        deadline = time.monotonic() + patience
        while (left := deadline - time.monotonic()) > 0:  # again, if the group went on without us after all
            ticket = self.store.add(f"{self.prefix}/requests", 1)
            self.store.set(f"{self.prefix}/request/{ticket}", str(self.rank))
            invitation = f"{self.prefix}/invitation/{ticket}"
            try:
                self.store.wait([invitation], datetime.timedelta(seconds=left))
                self.epoch, self.members = int(self.store.get(invitation)) - 1, ()
                if self.regroup(0, (), max(1.0, deadline - time.monotonic())):
                    return
            except RuntimeError:
                break
        raise RuntimeError(f"not admitted to the group within {patience:.0f} s: is anybody left in it?")

    def give(self, blob, to):
        """Send bytes to the ranks `to`."""
        data = torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(self.device)
        size = torch.tensor([len(blob)], device=self.device)

        def send():
            for rank in to:
                with contextlib.suppress(RuntimeError):  # it fell again: the next round will notice
                    dist.send(size, self.members.index(rank))
                    dist.send(data, self.members.index(rank))

        self.thread.submit(send).result()

    def take(self):
        """Bytes from the donor, or None if it fell."""

        def receive():
            with contextlib.suppress(RuntimeError):
                size = torch.zeros(1, dtype=torch.int64, device=self.device)
                dist.recv(size, self.members.index(self.donor))
                data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
                dist.recv(data, self.members.index(self.donor))
                return data.cpu().numpy().tobytes()

        return self.thread.submit(receive).result()

    def close(self):
        self.thread.shutdown()


# ==== 8. The mechanism ================================================================================================


def fragments_of(sizes, count):
    """{name: numbers} -> `count` lists of names, each name in exactly one.

    Layers (equal names up to the first number) are dealt out in turn, so that each fragment has early and late ones, as
    Streaming DiLoCo advises; what is in no layer goes, largest first, to the lightest fragment."""
    layers, loose = {}, []
    for name in sizes:
        layer = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        if layer:
            layers.setdefault(layer[0], []).append(name)
        else:
            loose.append(name)
    fragments = [sum(list(layers.values())[i::count], []) for i in range(count)]
    for name in sorted(loose, key=sizes.get, reverse=True):
        min(fragments, key=lambda names: sum(map(sizes.get, names))).append(name)
    return fragments


def trainable(model):
    """{name: parameter} of what is trained; a tied one under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Flat:
    """Trainable weights of L models of one shape as rows of `theta` (L, P), in fp32 (fp64, if they all are).

    Parameters of that dtype become views into it, so an optimizer that steps in place moves theta. Make it before 04's
    forge(); others (bf16 weights that forge makes) are copied, see adopt(). A tied weight is there once; buffers and
    frozen parameters are not: they stay as they are. spans: a slice of P for each fragment."""

    def __init__(self, models, fragments=1):
        self.named = [trainable(model) for model in models]
        sizes = {name: p.numel() for name, p in self.named[0].items()}
        if not sizes:
            raise base.BadInput("the model has no trainable parameter: there is nothing to synchronise")
        self.place, self.spans, end = {}, [], 0  # {name: its slice of P}
        for names in fragments_of(sizes, fragments):
            if not names:
                raise base.BadInput(f"fragments is {fragments}: the model has not enough layers for so many: use fewer")
            begin = end
            for name in names:
                self.place[name] = slice(end, end + sizes[name])
                end += math.ceil(sizes[name] / BLOCK) * BLOCK  # what lies between stays zero
            self.spans.append(slice(begin, end))
        first = list(self.named[0].values())
        double = all(p.dtype == torch.float64 for p in first)
        dtype = torch.float64 if double else torch.float32
        self.theta = torch.zeros(len(self.named), end, dtype=dtype, device=first[0].device)
        for p, view in self.pairs():
            view.copy_(p.detach())
            if p.dtype == dtype:
                p.data = view
        self.adopt()

    def pairs(self):
        """(parameter, its part of theta) of all models."""
        for row, parameters in zip(self.theta, self.named, strict=True):
            for name, p in parameters.items():
                yield p, row[self.place[name]].view(p.shape)

    def adopt(self, masters=()):
        """Look again at what is no view of theta: forge() gives some layouts weights in bf16. masters: (weight, fp32
        copy) pairs; a weight that has one is read from it, so that small differences are not lost."""
        masters = {id(weight): master for weight, master in masters}
        self.copied = [(p, view, masters.get(id(p))) for p, view in self.pairs() if p.data_ptr() != view.data_ptr()]

    @torch.no_grad()
    def gather(self):
        for p, view, master in self.copied:
            view.copy_(p if master is None else master)

    @torch.no_grad()
    def scatter(self):
        for p, view, master in self.copied:
            p.copy_(view)
            if master is not None:
                master.copy_(view)


@dataclass(frozen=True)
class Method:
    """A member of the family; symbols as at the top of this file.

    sums, mixes: W2 and W1, kinds of mixing() (mixes None: I). early: the anchors are mixed while the round computes.
    compressor: C. feedback: beta, or None. inner_steps: H, or None for one round at the very end. delay: tau, or None
    for a whole round. keep: alpha. anchored: what is sent is Delta; otherwise the weights themselves, and their mix is
    the new anchor. shift: at landing theta keeps what it did since the launch. replicas: D_LP_S, see land_replicas."""

    sums: str = "all"
    mixes: str | None = None
    early: bool = False
    compressor: str = "none"
    feedback: float | None = None
    outer: Outer = Outer()
    inner_steps: int | None = 30
    fragments: int = 1
    delay: int | None = 0
    keep: float = 0.0
    anchored: bool = True
    shift: bool = False
    replicas: bool = False

    @property
    def reduces(self):
        """Whether a sum is formed chunk by chunk on the way, and compressed again, for which no error feedback could
        account; otherwise everybody gets all payloads."""
        return self.sums == "all" and self.compressor in REDUCIBLE and self.feedback is None


NESTEROV = Outer(0.7, 0.9, nesterov=True)
METHODS = {
    # Weights are averaged every H steps: D's mean with an outer rate of 1.
    "local-sgd": Method(),
    # The mean pseudo-gradient is the gradient of an outer Nesterov step.
    "diloco": Method(outer=NESTEROV),
    # A third of the layers at a time, in four bits, landing a step later, half blended in.
    "streaming": Method(compressor="e3m0", outer=Outer(0.4, 0.9, nesterov=True), fragments=3, delay=1, keep=0.5),
    # Random pairs. delta = .5 delta + .7 mean(theta - phi) - .7 (phi - mean phi): no collective, whatever M.
    "noloco": Method("pair", "pair", outer=Outer(1.0, 0.5, gain=0.7, pull=0.7)),
    # Our reading: phi = W1 phi - Nesterov(W2 Delta). phi is known when the round starts, so W1 phi (a ring) travels
    # while it computes and is not stale; W2 (pairs) blocks. W1 = I, W2 = all is DiLoCo.
    "gossip": Method("pair", "ring", early=True, outer=NESTEROV),
    # One round late, everything hidden. m = .5 m + D / Lambda, clipped; Lambda and clip are our reading.
    "co2": Method(outer=Outer(1.0, 0.5, penalty=True, clip=0.05), delay=None),
    # 1.6 % of Delta in 14 bits each; what is not sent is kept for later.
    "sparseloco": Method(compressor="topk", feedback=0.95),
    # Alone to the end, then averaged once.
    "merge": Method(inner_steps=None),
    # BAGUA's relaxations of data parallelism, every step. C_LP_S: sums in 8 bits. D_FP_S: pairs average weights.
    "bagua-c-lp-s": Method(compressor="uint8", inner_steps=1),
    "bagua-d-fp-s": Method("pair", anchored=False, inner_steps=1),
    # D_LP_S: a ring; what changed against the neighbours' copies of oneself is sent in 8 bits.
    "bagua-d-lp-s": Method("ring", "ring", compressor="uint8", inner_steps=1, replicas=True),
    # Asynchronous: a copy is averaged in the background, then x += mean(copies) - copy.
    "bagua-async": Method(anchored=False, shift=True, inner_steps=5, delay=None),
}


@dataclass
class Round:
    """A launch that has not landed: fragment, step of launch and landing, the payload (L, parts, bytes), what it left
    of Delta, who counts, (W2, W1) and the future of its arrival."""

    fragment: int
    step: int
    due: int
    payload: torch.Tensor
    residual: torch.Tensor | None
    live: np.ndarray = None
    W: tuple = ()
    future: object = None


class Rejoined(Exception):
    """This worker had been given up and is back, with a donor's weights and steps: go on from there. Raised by what is
    not step(), since the others are no longer doing it."""


class Sync:
    """The mechanism: call step() after every inner step. Made by make_sync, whose docstring describes it."""

    def __init__(self, method, flat, transport, seed=0, backend="auto", companion=None):
        self.method, self.flat, self.transport, self.backend = method, flat, transport, backend
        self.seed, self.companion, self.theta = seed, companion, flat.theta
        flat.gather()
        self.phi = self.theta.clone()
        self.m = torch.zeros_like(self.phi) if method.outer.momentum else None
        self.e = torch.zeros_like(self.phi) if method.feedback is not None else None
        self.replicas = self.phi.unsqueeze(1).repeat(1, 2, 1) if method.replicas else None  # (L, 2, P): left, right
        count = len(flat.spans)
        self.steps, self.launched, self.numbers = 0, [0] * count, [0] * count
        self.pending, self.early, self.blocked_seconds = [], [None] * count, 0.0
        self.aborted, self.entered = 0, 0  # launches in a row that were; times that we joined a group at work
        self.notes, self.joining = {}, []  # what the rounds so far have agreed on; who asked to join
        if transport.members:
            self.mix_early()

    @property
    def bytes_sent(self):
        """Bytes that this worker has sent (Sim: a mean worker)."""
        return int(self.transport.bytes_sent)

    # -- launching -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self):
        """After every inner step. Launches the fragments whose turn it is, then lands what is due."""
        self.steps += 1
        turns = [f for f in range(len(self.flat.spans)) if self.has_turn(f)]
        if turns or any(r.due <= self.steps for r in self.pending):
            self.flat.gather()
            for fragment in turns:
                self.begin(fragment)
            self.land_due()
            self.flat.scatter()

    def has_turn(self, fragment):
        H = self.method.inner_steps
        return H is not None and (self.steps - fragment * H // len(self.flat.spans)) % H == 0

    def begin(self, fragment):
        """Compress how far the live weights came, and launch it."""
        method, span = self.method, self.flat.spans[fragment]
        phi, theta = self.phi[:, span], self.theta[:, span]  # (L, n)
        if not bool(theta.sum().isfinite()):
            raise base.BadInput(f"step {self.steps}: weights are not finite: go on from the last checkpoint, with a "
                                "lower rate")
        if method.replicas:  # z = theta - phi + (mean of the ring - phi), and D = -z
            phi = 2 * phi - self.ring_mean(span)
        sources = (phi, theta) if method.anchored else (theta, None)
        e = None if self.e is None else self.e[:, span]
        payload, residual = self.encode(span, *sources, e)
        late = method.delay is None
        due = self.steps + (method.inner_steps if late else method.delay)
        if late and method.anchored and not any(r.fragment == fragment for r in self.pending):
            theta.copy_(phi)  # nothing lands after the first round, yet its progress is on its way: start over
        self.pending.append(Round(fragment, self.steps, due, payload, residual))
        self.launched[fragment] = self.steps
        self.launch(self.pending[-1])

    def encode(self, span, x, theta=None, e=None):
        method = self.method
        parts, size = self.cut(span)
        beta = 0.0 if method.feedback is None else method.feedback
        return encode(method.compressor, x, theta, e, beta, parts, size, self.backend)

    def cut(self, span):
        """(chunks, numbers in each) of a payload: one for each member that will add one up, or one."""
        method = self.method
        parts = len(self.transport.members) if method.reduces else 1
        return parts, chunk_size(method.compressor, span.stop - span.start, parts)

    def launch(self, r):
        """Hand a round to the transport, over whoever lives now."""
        method, span = self.method, self.flat.spans[r.fragment]
        number = self.numbers[r.fragment] * len(self.flat.spans) + r.fragment  # the same for all workers
        self.numbers[r.fragment] += 1
        r.live = self.transport.live(number, r.step)
        W2 = mixing(method.sums, number, r.live, self.seed)
        parts = [Part(r.payload, W2, self.adder(method.compressor, W2) if method.reduces else None)]
        W1 = None
        if method.mixes and not method.early and not method.replicas:
            W1 = mixing(method.mixes, number, r.live, self.seed)
            parts.append(self.anchor_part(span, W1))
        r.W, r.future = (W2, W1), self.transport.launch(parts)

    def adder(self, name, W):
        """combine() with the weights of a sum that is the same for all members: a row of W."""
        members = list(self.transport.members)
        return functools.partial(self.combine, name, self.tensor(W[members[0], members][None]))  # (1, J)

    def combine(self, name, weights, stack):
        """The weighted sum over workers of stack (J, parts, bytes), compressed again: (1, parts, bytes)."""
        _, parts, width = stack.shape
        size = width // self.theta.element_size() if name == "none" else width * BLOCK // block_bytes(name, BLOCK)
        total = decode_sum(name, stack, weights, parts * size, self.backend, self.theta.dtype)  # (1, parts * size)
        return encode(name, total, parts=parts, size=size, backend=self.backend)[0]

    def anchor_part(self, span, W):
        """The anchors themselves, as they are now."""
        phi = self.phi[:, span]
        return Part(encode("none", phi, backend=self.backend)[0], W)

    def mix_early(self):
        """W1 phi of the round that begins, sent while it computes."""
        if self.method.early:
            for fragment in range(len(self.flat.spans)):
                self.launch_early(fragment)

    def launch_early(self, fragment):
        number = self.numbers[fragment] * len(self.flat.spans) + fragment
        W = mixing(self.method.mixes, number, self.transport.live(number, self.steps + 1), self.seed)
        self.early[fragment] = W, self.transport.launch([self.anchor_part(self.flat.spans[fragment], W)])

    # -- landing -------------------------------------------------------------------------------------------------

    def land_due(self):
        while (r := next((r for r in self.pending if r.due <= self.steps), None)) is not None:
            self.land(r)

    def receive(self, future):
        """The Outcome of a launch; the wait for it counts as blocked. None if it was aborted: the group is another
        now, and everything in flight has been launched again."""
        began = time.perf_counter()
        outcome = future.result()
        self.blocked_seconds += time.perf_counter() - began
        if outcome is None:
            self.recover()
        else:
            self.aborted = 0
            self.notes |= {what: text for what, text in outcome.notes.items() if what in ("stop", "halt")}
            self.joining += outcome.notes["join"]
        return outcome

    def land(self, r):
        """The outer step of a fragment. Nothing is touched before all of it is here."""
        outcome = self.receive(r.future)
        bar = early = None
        if outcome is not None and self.method.early:
            early = self.early[r.fragment]
            mixed = self.receive(early[1])
            outcome = outcome if mixed is not None else None
        if outcome is None:
            return
        method, span = self.method, self.flat.spans[r.fragment]
        n = span.stop - span.start
        self.pending.remove(r)
        if early:
            bar = self.add_up("none", mixed.parts[0], early[0], n)
        elif r.W[1] is not None:
            bar = self.add_up("none", outcome.parts[1], r.W[1], n)
        if method.replicas:
            self.land_replicas(outcome.parts[0], r, span)
        else:
            D = self.add_up(method.compressor, outcome.parts[0], r.W[0], n)  # (L, n)
            if r.live.any():  # not everybody was silent
                self.apply(self.landing_rows(r), span, D, bar, r)
        if method.early:
            self.launch_early(r.fragment)
        self.admit()

    def landing_rows(self, r):
        """Rows of this process that take part: all, as a slice, or (Sim) those that were not silent."""
        quiet = isinstance(self.transport, Sim) and not r.live.all()
        return np.flatnonzero(r.live) if quiet else slice(None)

    def apply(self, rows, span, D, bar, r):
        """phi, m, theta and e of these rows take the step."""
        method = self.method
        phi, theta, D = self.phi[rows, span], self.theta[rows, span], D[rows]
        m = None if self.m is None else self.m[rows, span]
        if not method.anchored:
            new = D
            if method.shift:  # what this worker did since it sent its copy stays
                new = theta + (D - decode("none", r.payload, D.shape[1], self.theta.dtype)[rows])
            phi.copy_(D)
            theta.copy_(new)
        else:
            outer_step(method.outer, phi, theta, m, D, None if bar is None else bar[rows], method.keep, self.backend)
        if not isinstance(rows, slice):  # they were copies
            self.phi[rows, span], self.theta[rows, span] = phi, theta
            if m is not None:
                self.m[rows, span] = m
        if r.residual is not None:
            self.e[rows, span] = r.residual[rows]

    def add_up(self, name, arrived, W, n):
        """Decode and sum what arrived, by this process's rows of W: (L, n)."""
        stack = arrived.stack
        if stack.is_cuda:
            stack.record_stream(torch.cuda.current_stream())
        if arrived.senders == (None,):
            weights = self.tensor([[1.0]])
            return decode_sum(name, stack, weights, n, self.backend, self.theta.dtype).expand(len(self.theta), n)
        weights = self.tensor(W[np.ix_(self.transport.ranks, arrived.senders)])  # (L, J)
        return decode_sum(name, stack, weights, n, self.backend, self.theta.dtype)

    def tensor(self, array):
        return torch.tensor(array, dtype=self.theta.dtype, device=self.theta.device)

    def ring(self, live):
        """Ranks to the left and right of each of this process's rows."""
        alive = np.flatnonzero(live)
        place = {rank: k for k, rank in enumerate(alive)}
        return [(alive[place[i] - 1], alive[(place[i] + 1) % len(alive)]) for i in self.transport.ranks]

    def ring_mean(self, span):
        left, right = self.replicas[:, 0, span], self.replicas[:, 1, span]
        return (self.phi[:, span] + left + right) / 3

    def land_replicas(self, arrived, r, span):
        """D_LP_S: everybody takes off what everybody said: each worker from its own anchor, and its neighbours from
        their replicas of it. The same operation on the same bits, so that replica and anchor never differ."""
        n = span.stop - span.start
        own = np.eye(len(r.live))
        for side in (0, 1):
            W = own.copy()
            for rank, neighbours in zip(self.transport.ranks, self.ring(r.live), strict=True):
                W[rank] = own[neighbours[side]]
            replica = self.replicas[:, side, span]
            replica.copy_(replica - self.add_up(self.method.compressor, arrived, W, n))
        phi = self.phi[:, span]
        phi.copy_(phi - self.add_up(self.method.compressor, arrived, own, n))
        self.theta[:, span].copy_(phi)

    def refresh_replicas(self):
        """After the ring has changed: neighbours tell their anchors in full, once."""
        live = self.transport.live(0, self.steps + 1)
        W = mixing("ring", 0, live)
        everything = slice(0, self.phi.shape[1])
        outcome = self.receive(self.transport.launch([self.anchor_part(everything, W)]))
        if outcome is None:
            return  # recover() has been here again
        for side in (0, 1):
            pick = np.zeros_like(W)
            for rank, neighbours in zip(self.transport.ranks, self.ring(live), strict=True):
                pick[rank, neighbours[side]] = 1
            self.replicas[:, side] = self.add_up("none", outcome.parts[0], pick, self.phi.shape[1])

    # -- losing and winning workers ------------------------------------------------------------------------------

    def recover(self):
        """A round was aborted: go on with whoever is left. If that is not this worker, come back as a new one."""
        self.aborted += 1
        if self.aborted > 3 + self.transport.size:
            raise RuntimeError(f"step {self.steps}: {self.aborted} launches in a row were aborted: do all workers call "
                               "step(), collect(), synchronised() and finish() in the same order?")
        if self.transport.reform(self.steps):
            self.send_again()
        else:
            self.join()

    def send_again(self):
        """Launch everything in flight over the present members: the same numbers, cut for as many as there are now."""
        if self.replicas is not None:
            self.refresh_replicas()
        self.mix_early()
        for r in self.pending:
            span = self.flat.spans[r.fragment]
            mine = decode(self.method.compressor, r.payload, span.stop - span.start, self.theta.dtype)
            r.payload = self.encode(span, mine)[0]
            self.launch(r)

    def admit(self):
        """All members come here after the same landing, and nowhere else, so that a newcomer knows what comes next; if
        somebody asked to join, the donor gives them what they need."""
        joining, self.joining = self.joining, []
        if not joining:
            return
        if not self.transport.reform(self.steps, joining):
            self.join()
            return
        here = [rank for rank in joining if rank in self.transport.members]
        if self.transport.donor == self.transport.rank and here:
            flight = [(r.fragment, r.step, r.due) for r in self.pending]
            state = dict(steps=self.steps, numbers=self.numbers, launched=self.launched, flight=flight, phi=self.phi,
                         m=self.m, notes=self.notes, companion=self.companion and self.companion.state_dict())
            buffer = io.BytesIO()
            torch.save(state, buffer)
            self.transport.give(buffer.getvalue(), here)
        self.send_again()

    def join(self, patience=600.0):
        """Become a member of a group at work: from the donor's anchors, counted from the next round on."""
        self.entered += 1
        blob = None
        while blob is None:  # the donor may fall, too
            self.transport.enter(patience)
            blob = self.transport.take()
        state = torch.load(io.BytesIO(blob), weights_only=True, map_location=self.theta.device)
        self.steps, self.numbers, self.launched = state["steps"], state["numbers"], state["launched"]
        self.notes |= state["notes"]  # what the round that admits us has agreed on, a stop for example
        self.phi.copy_(state["phi"])
        self.theta.copy_(self.phi)
        if self.m is not None:
            self.m.copy_(state["m"])
        if self.e is not None:
            self.e.zero_()
        if self.companion is not None:
            self.companion.load_state_dict(state["companion"])
        self.flat.scatter()
        self.pending = []
        for fragment, step, due in state["flight"]:  # rounds that began without us: nothing to say, but we listen
            span = self.flat.spans[fragment]
            nothing = torch.zeros_like(self.phi[:, span])
            residual = None if self.e is None else nothing
            self.pending.append(Round(fragment, step, due, self.encode(span, nothing)[0], residual))
        self.send_again()

    # -- for the training loop -----------------------------------------------------------------------------------

    @torch.no_grad()
    def restart(self, steps):
        """The models have other weights, the same for all workers, of step `steps`: they are the anchor now."""
        self.flat.gather()
        self.steps, self.launched = steps, [steps] * len(self.launched)
        self.phi.copy_(self.theta)
        if self.replicas is not None:
            self.replicas.copy_(self.phi[:, None])
        if self.method.early:
            self.forget_early()

    def forget_early(self):
        """What was launched when this was made spoke of other anchors."""
        for _, future in self.early:
            future.result()
        self.mix_early()

    def resident(self):
        """Tensors that this holds from step to step, beyond views of parameters."""
        own = [t for t in (self.phi, self.m, self.e, self.replicas) if t is not None]
        return own + [view for _, view, _ in self.flat.copied]

    def surrender(self, text):
        """This worker's weights are of no use: go back to the anchor, and have all workers stop after the next round,
        with `text` in their notes."""
        self.theta.copy_(self.phi)
        self.flat.scatter()
        self.transport.ask("halt", text)

    @torch.no_grad()
    def collect(self, values):
        """values (L, k) of any numeric dtype -> (members, k) fp64 on the CPU, the same for all, by rank."""
        payload = values.detach().double().to(self.theta.device).contiguous().view(torch.uint8)[:, None]
        outcome = self.insist(lambda: Part(payload, np.ones((self.transport.size,) * 2)))
        return outcome.parts[0].stack.cpu().contiguous().view(torch.float64).flatten(1)

    @torch.no_grad()
    def finish(self):
        """At the end of training: land what is in flight, then one last round of everything that moved since."""
        self.flat.gather()
        while self.pending:
            self.land(self.pending[0])
        for fragment in range(len(self.flat.spans)):
            if self.launched[fragment] < self.steps:
                self.begin(fragment)
                while self.pending:
                    self.land(self.pending[0])
        self.flat.scatter()

    @contextlib.contextmanager
    def synchronised(self):
        """Inside the block the models hold the synchronised weights: the mean of the anchors over all workers. Where
        these differ they are sent, which bytes_sent does not count: it is only looked at."""
        entered = self.entered
        with torch.no_grad():
            self.flat.gather()
            live, mean = self.theta.clone(), self.mean_anchor()
            self.theta.copy_(mean)
            self.flat.scatter()
        try:
            yield
        finally:
            if entered == self.entered:  # else a donor has given us other weights
                with torch.no_grad():
                    self.theta.copy_(live)
                    self.flat.scatter()

    def mean_anchor(self):
        method = self.method
        if not method.inner_steps:  # the last round has been, or will be
            return self.phi if self.launched[0] == self.steps > 0 else self.mean_of(self.theta)
        alike = method.sums == "all" and not method.mixes and not self.transport.silent
        return self.phi if alike else self.mean_of(self.phi)

    def insist(self, part):
        """Launch what part() returns until it arrives, over whoever is left by then."""
        while True:
            entered = self.entered
            outcome = self.receive(self.transport.launch([part()]))
            if outcome is not None:
                return outcome
            if entered != self.entered:
                raise Rejoined(f"back at step {self.steps}")

    def mean_of(self, x):
        def part():
            count = len(self.transport.members)
            W = mixing("all", 0, self.transport.live(-1, self.steps + 1))
            size = chunk_size("none", x.shape[1], count)
            payload = encode("none", x, parts=count, size=size, backend=self.backend)[0]
            return Part(payload, W, self.adder("none", W), counted=False)

        return self.add_up("none", self.insist(part).parts[0], None, x.shape[1])

    def state_dict(self):
        """All that a bitwise continuation needs beyond model and optimizer: tensors in use, not copies. Rounds in
        flight are there as what this worker sent; loading launches them again."""
        self.flat.gather()
        flight = [dict(fragment=r.fragment, step=r.step, due=r.due, payload=r.payload, residual=r.residual)
                  for r in self.pending]
        return dict(method=repr(self.method), steps=self.steps, numbers=self.numbers, launched=self.launched,
                    theta=self.theta, phi=self.phi, m=self.m, e=self.e, replicas=self.replicas, flight=flight,
                    bytes_sent=self.transport.bytes_sent, blocked_seconds=self.blocked_seconds)

    @torch.no_grad()
    def load_state_dict(self, saved):
        """By all workers at once, before their first step(). ValueError, and nothing changed, if it is of another
        method or shape."""
        if saved["method"] != repr(self.method):
            raise base.BadInput(f"saved by {saved['method']}, this is {self.method!r}: use the same method and "
                                "settings")
        if saved["theta"].shape != self.theta.shape:
            raise base.BadInput(f"saved weights {tuple(saved['theta'].shape)}, these are {tuple(self.theta.shape)}: "
                                "load them into the same model and number of workers")
        self.steps, self.numbers, self.launched = saved["steps"], list(saved["numbers"]), list(saved["launched"])
        for name in ("theta", "phi", "m", "e", "replicas"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(saved[name])
        self.transport.bytes_sent, self.blocked_seconds = saved["bytes_sent"], saved["blocked_seconds"]
        self.flat.scatter()
        if self.method.early:
            self.forget_early()
        device = self.theta.device
        for r in saved["flight"]:
            residual = None if r["residual"] is None else r["residual"].to(device)
            self.pending.append(Round(r["fragment"], r["step"], r["due"], r["payload"].to(device), residual))
            self.numbers[r["fragment"]] -= 1  # the launch counts it again
        for r in self.pending:
            self.launch(r)


def make_sync(method, model, transport, *, seed=0, backend="auto", companion=None, **overrides):
    """The synchronisation of a model by a method of METHODS.

    model: a module, a list of modules (one for each rank of a Sim), or a Flat with as many fragments as the method.
    transport: Sim(M), or Dist() in each of M processes. seed: of the pairs, the same for all workers. companion:
    something with state_dict and load_state_dict (the optimizer) that a worker who joins takes over from its donor.
    overrides: fields of Method, say inner_steps=100, compressor="int8", outer=Outer(0.4, 0.9, nesterov=True).

    step() after every inner step; synchronised(): a block in which the model has the weights to evaluate; finish() at
    the end; state_dict() and load_state_dict(); bytes_sent, blocked_seconds; notes: "stop" or "halt", if somebody
    asked for it (transport.ask) before the last round. ValueError on arguments that do not fit.

        sync = make_sync("streaming", model, Dist(), inner_steps=30)
        for x in data:
            train_step(model, x)
            sync.step()
    """
    if method not in METHODS:
        raise base.BadInput(f"method is {method!r}: use one of {', '.join(METHODS)}")
    unknown = set(overrides) - {field.name for field in dataclasses.fields(Method)}
    if unknown:
        raise base.BadInput(f"{sorted(unknown)[0]}: no part of a method: they have "
                            + ", ".join(field.name for field in dataclasses.fields(Method)))
    method = dataclasses.replace(METHODS[method], **overrides)
    flat = model
    if not isinstance(model, Flat):
        flat = Flat(model if isinstance(model, (list, tuple)) else [model], method.fragments)
    check_method(method, flat, transport)
    return Sync(method, flat, transport, seed, backend, companion)


def check_method(method, flat, transport):
    """ValueError for what cannot be."""
    H = method.inner_steps
    if H is not None and not (isinstance(H, int) and H >= 1):
        raise base.BadInput(f"inner_steps is {H}: use a whole number of at least 1, or None for one round at the end")
    if method.compressor not in COMPRESSORS:
        raise base.BadInput(f"compressor is {method.compressor!r}: use one of {', '.join(COMPRESSORS)}")
    if flat.theta.dtype == torch.float64 and method.compressor != "none":
        raise base.BadInput(f"compressor is {method.compressor!r} and the weights are fp64: use 'none', or fp32 "
                            "weights")
    if len(flat.spans) != method.fragments:
        raise base.BadInput(f"{len(flat.spans)} fragments in Flat, {method.fragments} in the method: make them the "
                            "same")
    if H is not None and method.fragments > H:
        raise base.BadInput(f"fragments is {method.fragments}, more than inner_steps {H}: use fewer")
    if method.delay is not None and not 0 <= method.delay <= (H or 0):
        raise base.BadInput(f"delay is {method.delay}: a round lands before the next is launched: use 0 to {H}")
    if not 0 <= method.keep <= 1 or (method.feedback is not None and not 0 <= method.feedback <= 1):
        raise base.BadInput(f"keep {method.keep}, feedback {method.feedback}: both lie in 0 ... 1")
    if len(flat.theta) != len(transport.ranks):
        raise base.BadInput(f"{len(flat.theta)} models for {len(transport.ranks)} ranks of this transport: pass one "
                            "each")
    if method.replicas and transport.silent:
        raise base.BadInput("silent workers: a method with replicas would lose what they are replicas of: use another")
    for kind in (method.sums, method.mixes):
        if kind not in (None, "all", "pair", "ring"):
            raise base.BadInput(f"{kind!r} is no mixing: use 'all', 'pair' or 'ring'")


# ==== 9. Just One Byte: no gradients on the wire at all ===============================================================


class OneByte:
    """Shared-randomness SPSA, arXiv 2306.10015: one byte a sample is all that workers tell each other.

    g = (L(theta + eps z) - L(theta - eps z)) / (2 eps), with z ~ N(0, 1)^P drawn from (seed, step, rank, sample), so
    that everybody can draw everybody's z. g is sent as a byte, of `scale`; all apply -lr mean(g z). Who comes later
    replays the bytes. Workers have the same weights always; flat: as for make_sync."""

    def __init__(self, flat, transport, lr, eps=1e-3, scale=1.0, seed=0):
        self.flat, self.transport, self.lr, self.eps, self.scale, self.seed = flat, transport, lr, eps, scale, seed
        self.history = []  # (ranks, bytes (J, samples) int8) of every step

    def direction(self, step, rank, sample):
        """z (P,)."""
        words = np.random.SeedSequence([self.seed, step, rank, sample]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0] >> 1))
        return torch.randn(self.flat.theta.shape[1], generator=generator).to(self.flat.theta.device)

    @torch.no_grad()
    def step(self, loss, samples=1):
        """loss(row, sample) -> scalar: of the model of this process's `row`, on one of its samples of this step."""
        step, codes = len(self.history), torch.zeros(len(self.flat.theta), samples, dtype=torch.int8)
        for row, rank in enumerate(self.transport.ranks):
            theta, kept = self.flat.theta[row], self.flat.theta[row].clone()
            for sample in range(samples):
                z, values = self.direction(step, rank, sample), []
                for sign in (1, -1):
                    theta.copy_(kept + sign * self.eps * z)
                    values.append(loss(row, sample).item())
                theta.copy_(kept)
                g = (values[0] - values[1]) / (2 * self.eps)
                codes[row, sample] = int(max(-127, min(127, round(127 * g / self.scale))))
        payload = codes.to(self.flat.theta.device).view(torch.uint8)[:, None]
        outcome = self.transport.launch([Part(payload, np.ones((self.transport.size,) * 2))]).result()
        if outcome is None:
            raise RuntimeError("a worker was lost: start again, and replay history")
        arrived = outcome.parts[0]
        self.replay([(arrived.senders, arrived.stack[:, 0].view(torch.int8).cpu())])

    @torch.no_grad()
    def replay(self, history):
        """Apply steps from their bytes alone."""
        for ranks, codes in history:
            step = len(self.history)
            for rank, row in zip(ranks, codes.tolist(), strict=True):
                for sample, code in enumerate(row):
                    rate = self.lr * self.scale * code / 127 / codes.numel()
                    self.flat.theta.sub_(rate * self.direction(step, rank, sample))
            self.history.append((ranks, codes))

    def fingerprint(self):
        """A hash of the weights of each row."""
        return [hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest() for row in self.flat.theta]


# ==== 10. Checks ======================================================================================================


class Toy(nn.Module):
    """Awkward on purpose: sizes that are no whole blocks, a head tied to the embedding, a frozen weight."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)).flatten(0, -2)


def toys(count, device="cpu", dtype=torch.float32):
    return [Toy(dtype).to(device) for _ in range(count)]


def wander(sync, step, scale=0.01):
    """An inner step without a model: each worker's weights move by noise of (step, rank)."""
    for row, rank in zip(sync.theta, sync.transport.ranks, strict=True):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for place in sync.flat.place.values():
            noise = torch.randn(place.stop - place.start, generator=generator, dtype=torch.float64)
            row[place] += (scale * noise).to(row)


def short(method):
    """Overrides that make rounds of a method short, for checks."""
    return dict(inner_steps=4) if (METHODS[method].inner_steps or 0) > 5 else {}


def travel(method, M=4, steps=13, device="cpu", transport=None, models=None, **overrides):
    """A Sync after `steps` steps of wander."""
    transport = transport or Sim(M)
    sync = make_sync(method, models or toys(len(transport.ranks), device), transport, **short(method) | overrides)
    for step in range(steps):
        wander(sync, step)
        sync.step()
    return sync


def worst(a, b):
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def check_reference(device="cpu"):
    """The mechanism makes DiLoCo's rounds as its paper writes them, and the outer step is torch's own Nesterov."""
    M, H = 3, 4
    sync = make_sync("diloco", toys(M, device, torch.float64), Sim(M), inner_steps=H)
    phi = sync.phi[0].clone()
    m, parameter = torch.zeros_like(phi), nn.Parameter(phi.clone())
    outer = torch.optim.SGD([parameter], 0.7, momentum=0.9, nesterov=True)
    for step in range(1, 3 * H + 1):
        wander(sync, step)
        thetas = sync.theta.clone()
        sync.step()
        if step % H == 0:
            parameter.grad = (phi - thetas).mean(0)
            outer.step()
            phi, m = diloco_round(thetas, phi, m)
            for row in range(M):
                require(worst(sync.phi[row], phi) <= 1e-12, f"round {step // H}: not DiLoCo's anchor")
                require(worst(sync.phi[row], parameter.detach()) <= 1e-12, f"round {step // H}: not torch's Nesterov")
            require(torch.equal(sync.theta, sync.phi), "the workers do not go on from the anchor")
        else:
            require(torch.equal(sync.theta, thetas), f"step {step}: weights changed in the middle of a round")


def check_data_parallel(device="cpu", M=3):
    """DiLoCo with inner SGD, H = 1, outer rate 1 and no momentum is data parallelism (fp64)."""
    models, whole = toys(M, device, torch.float64), Toy(torch.float64).to(device)
    sync = make_sync("diloco", models, Sim(M), inner_steps=1, outer=Outer())
    step = [torch.optim.SGD(model.parameters(), 0.3) for model in (*models, whole)]
    for t in range(20):
        generator, losses = torch.Generator().manual_seed(t), []
        for rank in range(M):
            tokens = torch.randint(37, (2, 6, 8), generator=generator).to(device)
            loss = lambda model, x=tokens: F.cross_entropy(model(x[0]), x[1].flatten())  # noqa: E731
            loss(models[rank]).backward()
            losses.append(loss(whole) / M)
        sum(losses).backward()
        for optimizer in step:
            optimizer.step()
            optimizer.zero_grad()
        sync.step()
    for name, p in whole.named_parameters():
        for model in models:
            error = worst(dict(model.named_parameters())[name].detach(), p.detach())
            require(error <= 1e-12, f"{name}: {error:.1e} from data parallelism")


def check_identities(device="cpu"):
    """What members of the family become at the ends of their ranges, bit for bit."""
    diloco = travel("diloco", device=device)
    streaming = travel("streaming", device=device, fragments=1, delay=0, keep=0.0, compressor="none", outer=NESTEROV)
    require(torch.equal(diloco.theta, streaming.theta), "streaming with one fragment, tau = 0, alpha = 0 is not DiLoCo")
    factored = travel("gossip", device=device, mixes=None, sums="all")
    require(torch.equal(diloco.theta, factored.theta), "gossip with W1 = I and W2 = the mean is not DiLoCo")
    alone = make_sync("merge", toys(4, device), Sim(4), fragments=3)
    for step in range(13):
        wander(alone, step)
    for backend in ("torch", "auto"):
        kept = travel("streaming", device=device, keep=1.0, backend=backend)
        require(torch.equal(alone.theta, kept.theta), "streaming with alpha = 1 is not training alone")
    mean = alone.theta.double().mean(0)
    alone.steps = 13
    alone.finish()
    require(worst(alone.phi[2].double(), mean) <= 1e-6, "the single merge is not the mean of the workers")
    diloco.finish()
    for name in METHODS:
        sync = travel(name, device=device)
        sync.finish()
        same = (sync.phi == sync.phi[0]).all()
        require(same or METHODS[name].sums != "all", f"{name}: anchors differ between workers")
        require(not torch.equal(sync.phi[0], diloco.phi[0]) or name == "diloco", f"{name} is just DiLoCo")


def check_compressors(device="cpu", n=5000, parts=3):
    """Kernels and PyTorch make the same bytes and the same sums; payloads have the predicted size; errors are within
    what the codes allow; what was sent and what is left add up."""
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(3, n, generator=generator).to(device) * 10.0 ** torch.arange(-2, 1, device=device)[:, None]
    phi[0, 128:256], phi[0, 256:384], phi[1, :128], phi[1, 200] = 0, 1e-42, 0.125, 3e30
    theta, e = (torch.randn(3, n, generator=generator).to(device) * 0.1 for _ in range(2))
    theta[0, 128:384] = e[0, 128:384] = 0
    weights = torch.tensor([[0.2, 0.0, 0.8], [1.0, 0.0, 0.0]], device=device)
    for name in COMPRESSORS:
        data = (phi, theta, e) if name != "fp16" else (phi.clamp(-1e4, 1e4), theta, e)
        size = chunk_size(name, n, parts)
        payload, left = encode(name, *data, 0.5, parts, size, "torch")
        require(payload.shape == (3, parts, block_bytes(name, size)), f"{name}: payload of {tuple(payload.shape)}")
        x, sent = data[0] - data[1] + 0.5 * e, decode(name, payload, n)
        require(worst(sent + left, x) <= 1e-6, f"{name}: what was sent and what is left do not add up")
        block = F.pad(x, (0, -n % BLOCK)).unflatten(1, (-1, BLOCK))
        top = block.abs().amax(2).repeat_interleave(BLOCK, 1)[:, :n]
        spread = (block.amax(2) - block.amin(2)).repeat_interleave(BLOCK, 1)[:, :n]
        limit = {"none": 0 * x, "fp16": x.abs() * 2**-11 + 2**-25, "int8": top / 253,
                 "uint8": spread / 509 + top * 1e-6, "e3m0": torch.maximum(x.abs() / 3, top / 96),
                 "topk": torch.full_like(x, math.inf)}[name]
        require(((sent - x).abs() <= limit * 1.0001 + 1e-37).all(), f"{name}: an error beyond its codes' step")
        if name == "topk":
            for row, told in zip(*(padded(t, 1, size).flatten(0, 1) for t in (x, sent)), strict=True):
                mask = told != 0
                require(mask.sum() == KEPT, f"topk keeps {mask.sum()} of {KEPT}")
                require(row[mask].abs().min() >= row[~mask].abs().max(), "topk keeps a small one")
                require(torch.equal(row[mask].sign(), told[mask].sign()), "topk loses a sign")
        again = encode(name, sent, parts=parts, size=size, backend="torch")[0]
        require(worst(decode(name, again, n), sent) <= 1e-6, f"{name}: coding what was decoded changes it")
        total = decode_sum(name, payload, weights, n, "torch")
        require(worst(total, weights @ sent) <= 1e-5, f"{name}: not the weighted sum")
        if name in CODES and HAS_TRITON:
            by_kernel, rest = encode(name, *data, 0.5, parts, size, "triton")
            require(torch.equal(payload, by_kernel), f"{name}: the kernel's payload differs from PyTorch's")
            require(torch.equal(left, rest), f"{name}: the kernel leaves another rest than PyTorch")
            sums = decode_sum(name, payload, weights, n, "triton")
            require(torch.equal(total, sums), f"{name}: the kernel's sum differs from PyTorch's")


def check_outer(device="cpu", n=1500):
    """The kernel's outer step is PyTorch's, bit for bit, in all its forms."""
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(2, n, generator=generator).to(device) for _ in range(5)]
    for outer in (Outer(), NESTEROV, Outer(1.0, 0.5, gain=0.7, pull=0.7), Outer(1.0, 0.5, penalty=True, clip=0.5)):
        for keep in (0.0, 0.3):
            results = []
            for backend in ("torch", "triton") if HAS_TRITON else ("torch",):
                phi, theta, m, D, bar = (v.clone() for v in vectors)
                m = m if outer.momentum else None
                outer_step(outer, phi, theta, m, D, bar if outer.pull else None, keep, backend)
                results.append([t for t in (phi, theta, m) if t is not None])
            for a, b in zip(results[0], results[-1], strict=True):
                require(torch.equal(a, b), f"{outer}: the kernel's step differs from PyTorch's")


def check_bytes():
    """What the transport counts is what round_bytes predicts, scales, indices and the collective's factor included."""
    for name, method in METHODS.items():
        for M in (2, 5):
            sync = travel(name, M, steps=12)
            sync.finish()
            spans = [span.stop - span.start for span in sync.flat.spans]
            counts = launches(sync.method, 12)
            predicted = sum(k * round_bytes(sync.method, [n], M) for k, n in zip(counts, spans, strict=True))
            if method.early:  # the anchors for the round that never came
                predicted += sum(block_bytes("none", n) for n in spans) * receivers(method.mixes, M)
            require(sum(counts) > 0 and abs(sync.bytes_sent - predicted) <= 1,
                    f"{name}, M = {M}: {sync.bytes_sent} bytes counted, {predicted:.0f} predicted")


def check_fragments():
    """Every trainable parameter is in exactly one fragment, a tied one once; parameters are views; padding stays 0."""
    for count in (1, 2, 3, 5):
        model = Toy()
        flat = Flat([model], count)
        covered = torch.zeros(flat.theta.shape[1], dtype=torch.int32)
        for span in flat.spans:
            covered[span] += 1
        require((covered == 1).all(), f"{count} fragments do not cover the weights once")
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        require(sorted(flat.place) == sorted(names) and "head.weight" not in names, "a parameter is missing, or twice")
        inside = torch.zeros(flat.theta.shape[1], dtype=torch.bool)
        for name, p in model.named_parameters():
            if p.requires_grad:
                place = flat.place[name]
                require(not inside[place].any() and place.stop - place.start == p.numel(), f"{name} overlaps another")
                require(p.data_ptr() == flat.theta[0, place].data_ptr(), f"{name} is no view of theta")
                inside[place] = True
        require((flat.theta[0, ~inside] == 0).all(), "there is something between the parameters")
        require(all(span.stop > span.start for span in flat.spans), "a fragment is empty")
    layers = fragments_of({f"blocks.{i}.weight": 1 for i in range(6)} | {"head": 5}, 3)
    require([sorted(f)[0] for f in layers] == [f"blocks.{i}.weight" for i in range(3)], "layers are not dealt in turn")


def check_feedback(device="cpu"):
    """Error feedback loses nothing: with beta = 1, all that was sent and what is left is all that there was."""
    for compressor in ("topk", "e3m0", "int8"):
        sync = make_sync("sparseloco", toys(2, device), Sim(2), inner_steps=1, feedback=1.0, compressor=compressor)
        start, moved = sync.phi.double().clone(), torch.zeros_like(sync.phi, dtype=torch.float64)
        for step in range(8):
            before = sync.theta.clone()
            wander(sync, step)
            moved += sync.theta.double() - before
            sync.step()
        told = sync.phi.double() - start - sync.e.double().mean(0)  # e holds what phi - theta was not told
        error = worst(told, moved.mean(0).expand_as(told))
        require(error <= 1e-5, f"{compressor}: sent and rest are {error:.1e} from the sum of all pseudo-gradients")


def check_co2(device="cpu"):
    """CO2's penalty and clip, as we read them: the formula, and that both act."""
    generator, n, clip = torch.Generator().manual_seed(2), 500, 0.05
    phi, theta, m, D = (torch.randn(2, n, generator=generator).to(device) * s for s in (1, 1, 0.02, 0.03))
    for penalty in (False, True):
        for size in (1.0, 10.0):
            a, b, c, d = phi.clone(), theta.clone(), m.clone(), size * D
            outer_step(Outer(1.0, 0.5, penalty=penalty, clip=clip), a, b, c, d)
            scale = 1 + m.double().norm(dim=1) / d.double().norm(dim=1) if penalty else torch.ones(2).to(device)
            new = 0.5 * m.double() + d.double() / scale[:, None]
            size_of = new.square().mean(1).sqrt()[:, None]
            new = torch.where(size_of > clip, new * clip / size_of, new)
            require(worst(c.double(), new) <= 1e-5, f"penalty {penalty}, x {size}: not the momentum of the formula")
            require(worst(a.double(), phi.double() - new) <= 1e-5, "the anchor does not follow the momentum")
            rms = c.square().mean(1).sqrt()
            require((rms <= clip * 1.001).all(), f"the momentum's mean square is {rms.max():.3f}, clip {clip}")
            require(size > 1 or (rms < clip * 0.99).all(), "the clip acts on a small momentum, too")


def variance_factor(alpha, gamma, M):
    """By what the squared distance between anchors grows or shrinks a round under NoLoCo without progress: the largest
    eigenvalue of the recursion of (|x|^2, x.d, |d|^2), x an anchor less the mean, d its momentum; a random partner
    leaves h = M / (2 (M - 1)) of a distance."""
    h = M / (2 * (M - 1))
    dd = np.array([gamma**2 * h, -2 * alpha * gamma * h, alpha**2])
    xd = np.array([-gamma * h, alpha, 0]) + dd
    xx = np.array([1 - 2 * gamma * h, 2 * alpha, 0]) + dd
    return abs(np.linalg.eigvals(np.array([xx, xd, dd]))).max()


def check_noloco(trials=40, M=8):
    """Anchors of NoLoCo draw together as fast as predicted at (alpha, gamma) = (.5, .7), and apart at (.9, .7)."""
    for alpha, rounds in ((0.5, 8), (0.9, 8)):
        squares = torch.zeros(rounds + 1, dtype=torch.float64)
        for trial in range(trials):
            models = [nn.Linear(BLOCK, 1, bias=False) for _ in range(M)]
            outer = Outer(1.0, alpha, gain=0.7, pull=0.7)
            sync = make_sync("noloco", models, Sim(M), seed=trial, inner_steps=1, outer=outer)
            sync.phi.copy_(torch.randn(M, BLOCK, generator=torch.Generator().manual_seed(trial)))
            for number in range(rounds + 1):
                sync.theta.copy_(sync.phi)
                squares[number] += sync.phi.double().var(0, correction=0).sum()
                sync.step()
        factor = (squares[-1] / squares[3]).item() ** (1 / (rounds - 3))
        predicted = variance_factor(alpha, 0.7, M)
        good = abs(factor / predicted - 1) <= 0.05
        require(good, f"alpha {alpha}: variance times {factor:.3f} a round, predicted {predicted:.3f}")
        require((factor > 1) == (alpha > 0.5), f"alpha {alpha}: a factor of {factor:.3f}")


def check_replicas(device="cpu"):
    """BAGUA's D_LP_S: each copy of a neighbour's weights has the neighbour's bits, and the ring draws together."""
    for M in (2, 3, 5):
        sync = make_sync("bagua-d-lp-s", toys(M, device), Sim(M))
        for step in range(6):
            wander(sync, step)
            sync.step()
            for row in range(M):
                for side, neighbour in ((0, row - 1), (1, (row + 1) % M)):
                    same = torch.equal(sync.replicas[row, side], sync.phi[neighbour])
                    require(same, "a replica is not the neighbour")
        apart = sync.phi.std(0).norm().item()
        for _ in range(10 * M):
            sync.step()
        require(sync.phi.std(0).norm().item() < 0.1 * apart, f"M = {M}: the ring does not draw together")


def check_silent(device="cpu"):
    """A silent worker is not averaged in, nor changed; the others' mean is over those who spoke."""
    quiet = lambda number: (1,) if number == 1 else ()  # noqa: E731
    sync = make_sync("local-sgd", toys(4, device), Sim(4, quiet), inner_steps=2)
    for step in range(6):
        wander(sync, step)
        before = sync.theta.clone()
        sync.step()
        if step == 3:
            mean = before[[0, 2, 3]].double().mean(0)
            require(worst(sync.phi[3].double(), mean) <= 1e-6, "the mean counts who did not speak")
            require(torch.equal(sync.theta[1], before[1]), "the silent worker was changed")
    require(torch.equal(sync.phi[0], sync.phi[2]), "anchors of those who spoke differ")
    group = SimpleNamespace(size=4, members=(0, 1, 3), joined={0: -1, 1: -1, 3: 8})
    require(Dist.live(group, 0, 8).tolist() == [1, 1, 0, 0], "who joins is averaged in as zeros")
    require(Dist.live(group, 0, 9).tolist() == [1, 1, 0, 1], "who joined a step ago is not counted")


def check_state(device="cpu"):
    """A run that is saved in the middle of a round and of a transfer, and goes on anew, ends with the same bits."""
    for name in METHODS:
        whole, part = travel(name, device=device, steps=15), travel(name, device=device, steps=9)
        require(bool(part.pending) == (name in RESENT), f"{name}: {len(part.pending)} rounds in flight")
        buffer = io.BytesIO()
        torch.save(part.state_dict(), buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        resumed = make_sync(name, toys(4, device), Sim(4), **short(name))
        resumed.load_state_dict(saved)
        for step in range(9, 15):
            wander(resumed, step)
            resumed.step()
        require(torch.equal(whole.theta, resumed.theta), f"{name}: other bits after going on in the middle of a round")
        require(whole.bytes_sent <= resumed.bytes_sent, f"{name}: bytes are forgotten")


def check_one_byte(device="cpu", M=3):
    """Workers that tell each other a byte a sample keep the same weights, learn, and a latecomer replays to them."""
    models = [nn.Linear(20, 1, bias=False).to(device) for _ in range(M + 1)]
    for model in models:
        nn.init.ones_(model.weight)
    flat = Flat(models[:M])
    spsa = OneByte(flat, Sim(M), lr=0.01, scale=40.0)
    loss = lambda row, sample: models[row].weight.square().sum()  # noqa: E731
    first = loss(0, 0).item()
    for _ in range(60):
        spsa.step(loss, samples=2)
        hashes = spsa.fingerprint()
        require(len(set(hashes)) == 1, "weights differ between workers")
    require(loss(0, 0).item() < 0.5 * first, f"no progress: loss {loss(0, 0).item():.2f} from {first:.2f}")
    require(spsa.transport.bytes_sent == 60 * 2 * (M - 1), f"{spsa.transport.bytes_sent} bytes, not one a sample")
    late = OneByte(Flat(models[M:]), Sim(1), lr=0.01, scale=40.0)
    late.replay(spsa.history)
    require(late.fingerprint()[0] == hashes[0], "who replays the bytes gets other weights")


def check_misuse():
    """Bad input is one clear line, and changes nothing."""
    one = lambda method="diloco", **options: make_sync(method, Toy(), Sim(1), **options)  # noqa: E731
    must_raise("use one of local-sgd, diloco", lambda: one("dilco"))
    must_raise("no part of a method", lambda: one(every=3))
    must_raise("inner_steps is 0", lambda: one(inner_steps=0))
    must_raise("compressor is 'int4'", lambda: one(compressor="int4"))
    must_raise("fragments is 9", lambda: one(fragments=9, inner_steps=8))
    must_raise("use fewer", lambda: one(fragments=3, inner_steps=2))
    must_raise("delay is 31", lambda: one("streaming", delay=31))
    must_raise("both lie in 0 ... 1", lambda: one(keep=1.5))
    must_raise("1 models for 2 ranks", lambda: make_sync("diloco", Toy(), Sim(2)))
    must_raise("at least 1 worker", lambda: Sim(0))
    must_raise("fp64", lambda: make_sync("diloco", Toy(torch.float64), Sim(1), compressor="int8"))
    must_raise("would lose what they are replicas of",
               lambda: make_sync("bagua-d-lp-s", toys(2), Sim(2, lambda number: (1,))))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    must_raise("no trainable parameter", lambda: make_sync("diloco", frozen, Sim(1)))
    sync, other = one(), one("local-sgd")
    before = other.theta.clone()
    must_raise("saved by", lambda: other.load_state_dict(sync.state_dict()))
    require(torch.equal(before, other.theta), "a refused state changed weights")
    sync = one(inner_steps=1)
    sync.theta[0, 5] = math.nan
    must_raise("not finite", sync.step)
    if not HAS_TRITON:
        must_raise("not installed", lambda: encode("int8", torch.ones(1, 128), backend="triton"))


# -- real processes --


fleet = functools.partial(parallel.fleet, stage=globals(), device="cpu", timeout=300)


def all_methods_by_dist(names):
    """{method: (weights, anchors, bytes, what collect and synchronised say)} of this process's worker."""
    results = {}
    for name in names:
        sync = travel(name, transport=Dist(timeout=60))
        if sync.pending:  # save in the middle of a transfer, and go on from there in a new Sync
            buffer, old = io.BytesIO(), sync
            torch.save(old.state_dict(), buffer)
            old.transport.close()  # which lets it arrive first: one process group carries one transport at a time
            sync = make_sync(name, toys(1), Dist(timeout=60), **short(name))
            sync.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
        for step in range(13, 16):
            wander(sync, step)
            sync.step()
        sync.finish()
        values = sync.collect(torch.tensor([[sync.transport.rank, 0.5]]))
        sent = sync.bytes_sent
        with sync.synchronised():
            mean = sync.theta.clone()
        require(sent == sync.bytes_sent, "evaluation counts as traffic")
        results[name] = sync.theta, sync.phi, sent, values, mean
        sync.transport.close()
    return results


def check_processes(ranks=3, names=tuple(METHODS)):
    """Every method over real processes: the same bits as M workers in one process, and the predicted bytes on the wire;
    some of them saved in the middle of a transfer."""
    results = fleet("all_methods_by_dist", ranks, names)
    require(len(results) == ranks, "a process left no result")
    for name in names:
        sim = travel(name, ranks, steps=16)
        sim.finish()
        with sim.synchronised():
            mean = sim.theta.clone()
        sent = []
        for rank, result in results.items():
            theta, phi, count, values, average = result[name]
            require(torch.equal(phi[0], sim.phi[rank]), f"{name}: rank {rank} has other anchors than the simulation")
            require(torch.equal(theta[0], sim.theta[rank]), f"{name}: rank {rank} has other weights")
            require(torch.equal(average[0], mean[rank]), f"{name}: the synchronised weights differ")
            require(values.tolist() == [[r, 0.5] for r in range(ranks)], f"collect() gave {values.tolist()}")
            sent.append(count - 16 * (ranks - 1))  # collect sends two numbers of 8 bytes to everybody
        again = round_bytes(sim.method, [span.stop - span.start for span in sim.flat.spans], ranks)
        most = again if name in RESENT else 0
        require(-1 <= sum(sent) / ranks - sim.bytes_sent <= 1 + most,
                f"{name}: {sum(sent) / ranks} bytes by processes, {sim.bytes_sent} by the simulation")


RESENT = ("streaming", "co2", "bagua-async")  # saved in the middle of a transfer, which is then made again


class TinyWorker:
    """A small GPT on text and its AdamW, trained as one of several workers."""

    def __init__(self, rank, seed=0, layers=3, dim=64, count=4, steps=100, lr=3e-3):
        self.config = base.GPTConfig(256, 64, layers, 4, dim)
        torch.manual_seed(seed)
        self.rank, self.seed, self.count, self.steps, self.lr = rank, seed, count, steps, lr
        self.model = base.GPT(self.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, tokens):
        E = self.model(tokens[:, :-1])  # (B, T, D)
        return F.cross_entropy(E.flatten(0, 1) @ self.model.classifier.T, tokens[:, 1:].flatten())

    def batch(self, t, rank=None):
        """(count, T + 1) tokens, a function of (seed, rank, t)."""
        generator = np.random.default_rng([self.seed, self.rank if rank is None else rank, t])
        return windows(text().train, generator, self.count, self.config.seq)

    def gradient(self, tokens):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def update(self, t):
        progress = max(0, t - 20) / max(1, self.steps - 20)
        rate = self.lr * min((t + 1) / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def validate(self, count=128):
        tokens = windows(text().val, np.random.default_rng(1), count, self.config.seq)
        return statistics.fmean(self.loss(part).item() for part in tokens.split(64))


@functools.cache
def text():
    return filtering.corpus(limit=4 * MIB)


def windows(data, generator, count, seq):
    starts = generator.integers(0, len(data) - seq - 1, count)
    return torch.from_numpy(np.stack([data[s : s + seq + 1] for s in starts]).astype(np.int64))


def survive(event, steps, H):
    """One of four workers of a run in which something happens to rank 2 in the middle of the fourth round; rank 4, if
    there is one, waits until rank 2 is gone and joins."""
    rank, late = int(os.environ["RANK"]), int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"])
    when = 3 * H + H // 2
    worker = TinyWorker(rank, layers=1, dim=32, steps=steps, lr=1e-2)
    timeout, grace = (6, 4) if event == "silent" else (30, None)
    transport = Dist(timeout=timeout, grace=grace, rank=rank if late else None)
    if event == "connection" and rank == 2:
        transport.reduce = functools.partial(break_once, transport, transport.reduce)
    sync = make_sync("diloco", worker.model, transport, inner_steps=H, compressor="int8", companion=worker.optimizer)
    if late:
        transport.store.wait(["gone/2"], datetime.timedelta(seconds=120))
        sync.join()
    while sync.steps < steps and "halt" not in sync.notes:
        t = sync.steps
        if t % 5 == 0:  # something else that all do together
            try:
                sync.collect(torch.zeros(1, 1))
            except Rejoined:
                continue
        if rank == 2 and t == when and event == "nan":
            sync.surrender("not a number")
        if rank == 2 and t == when and event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2 and t == when and event == "silent":
            subprocess.Popen(["sh", "-c", f"sleep 13; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank != 2 and t == when and event == "kill":  # or a fast machine's three would go on alone for longer
            transport.store.wait([f"{transport.prefix}/request/1"], datetime.timedelta(seconds=120))
        if rank == 2 and t == when - H and event == "connection":
            time.sleep(1)
        if t > when and event == "silent":
            time.sleep(0.2)  # or the others would be done before it wakes
        worker.gradient(worker.batch(t))
        worker.update(t)
        sync.step()
    if "halt" in sync.notes:
        transport.close()
        return dict(halt=sync.notes["halt"], steps=sync.steps)
    sync.finish()
    with sync.synchronised():
        loss = worker.validate()
    blocked = sync.blocked_seconds
    transport.close()
    return dict(phi=sync.phi, loss=loss, members=transport.members, groups=transport.epoch, blocked=blocked)


def check_surrender():
    """A worker whose weights are of no use has all of them stop, at the same step: the next time that they agree on
    anything, which is two steps later (step 28 of 8 a round, something is collected before the thirty-first)."""
    results = fleet("survive", 4, "nan", 40, 8)
    require(len(results) == 4, "a worker left no result")
    for rank, result in results.items():
        require(result == dict(halt="not a number", steps=31), f"rank {rank} ends with {result}")


def break_once(transport, reduce, part):
    """All of the fourth round is in hand when the connection breaks; the others have it, too."""
    result = reduce(part)
    transport.reduces = getattr(transport, "reduces", 0) + 1
    if transport.reduces == 4:
        raise RuntimeError("the connection broke")
    return result


def in_one_process(steps, H, killed=False):
    """Loss and anchor of the same run, in one process: with nothing happening or, `killed`, with what is to happen:
    the fourth round is without rank 2, whose place rank 4 takes then, with the donor's anchor, momentum and moments."""
    workers = [TinyWorker(rank, layers=1, dim=32, steps=steps, lr=1e-2) for rank in range(4)]
    silent = (lambda number: (2,) if number == 3 else ()) if killed else None
    sync = make_sync("diloco", [w.model for w in workers], Sim(4, silent), inner_steps=H, compressor="int8")
    for t in range(steps):
        if killed and t == 4 * H:
            workers[2].rank = 4
            workers[2].optimizer.load_state_dict(copy.deepcopy(workers[0].optimizer.state_dict()))
            sync.phi[2], sync.theta[2], sync.m[2] = sync.phi[0], sync.phi[0], sync.m[0]
            sync.flat.scatter()
        for worker in workers:
            worker.gradient(worker.batch(t))
            worker.update(t)
        sync.step()
    sync.finish()
    with sync.synchronised():
        return workers[0].validate(), sync.phi[0]


def check_failures(event="kill", steps=80, H=8):
    """Four processes; rank 2 is killed, or falls silent for longer than anybody waits, or is slow once and then loses
    its connection when the others have all they need. Training goes on, no round is applied by half of the workers, a
    newcomer (or the silent one, awake again) catches up. After a kill the weights are those of the same story told in
    one process, but for roundings. How far the loss is from a run without the event's is luck: over seven seeds 0.0 %
    in the mean and 1.0 % of standard deviation; it must be within three of those."""
    results = fleet("survive", 4, event, steps, H, spare=event == "kill", replace=event == "kill")
    loss, phi = in_one_process(steps, H)
    expected = {"kill": (0, 1, 3, 4)}.get(event, (0, 1, 2, 3))
    require(tuple(sorted(results)) == expected, f"{event}: results of ranks {sorted(results)}")
    first = results[0]
    for rank, result in results.items():
        require(torch.equal(result["phi"], first["phi"]), f"{event}: rank {rank} has another anchor than rank 0")
        require(tuple(result["members"]) == expected, f"{event}: rank {rank} ends among {result['members']}")
        require(abs(result["loss"] / loss - 1) <= 0.03, f"{event}: loss {result['loss']:.4f}, undisturbed {loss:.4f}")
    groups = 1 if event == "connection" else 2  # one without the lost worker, one with the newcomer
    require(first["groups"] >= groups, f"{event}: {first['groups']} new groups were formed, {groups} expected")
    if event == "connection":
        require(torch.equal(first["phi"][0], phi), f"{event}: other bits than without it")
        require(first["blocked"] >= 0.5, "a second of waiting for the slow one is not counted as blocked")
    if event == "kill":
        _, told = in_one_process(steps, H, killed=True)
        off, undisturbed = cce.error(first["phi"][0], told), cce.error(phi, told)
        require(off < 1e-2, f"{event}: weights are off by {off:.1e}, those of an undisturbed run by {undisturbed:.1e}")
    return first["loss"], loss


def check_votes(timeout=1.0):
    """All read the same verdict: the same wishes, if all have everything; none, if one has not or never says so."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def vote(rank, good, name):
        worker = object.__new__(Dist)  # without a process group: nothing is sent
        worker.store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        worker.prefix, worker.members, worker.timeout, worker.group = name, (0, 1, 2), timeout, None
        worker.epoch, worker.votes, worker.handled = 0, 0, 0
        if rank == 1:
            worker.store.set(f"{name}/stop", "15")
        return worker.vote(good)

    for name, goods in (("all", (True, True, True)), ("one not", (True, True, False)), ("one silent", (True, True))):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            verdicts = list(pool.map(vote, range(3), goods, [name] * len(goods)))
        same = all(verdict == verdicts[0] for verdict in verdicts)
        require(same and (verdicts[0] is None) == (name != "all"), f"{name} have it: the verdicts are {verdicts}")


# The bugs of --break, each easy to ship.


def _mean_over_all(kind, number, live, seed=0, _mixing=mixing):
    """Divides by M, whoever is silent."""
    return _mixing(kind, number, live, seed) * (np.sum(live) / len(live) if kind == "all" else 1)


def _halves_swapped(name, codes, scales, _dequantise=dequantise):
    return _dequantise(name, (codes >> 4) | (codes << 4) if name == "e3m0" else codes, scales)


class _NoFeedback(Sync):
    def apply(self, rows, span, D, bar, r):
        r.residual = None
        super().apply(rows, span, D, bar, r)


class _StaleReplicas(Sync):
    def land_replicas(self, arrived, r, span):
        """The anchor is rounded once more than its replicas: it moves by what was meant, not by what was sent."""
        super().land_replicas(arrived, r, span)
        self.phi[:, span] *= 1 + 1e-7


class _NothingInFlight(Sync):
    def load_state_dict(self, saved):
        super().load_state_dict(saved | dict(flight=[]))


class _Unseeded(OneByte):
    def direction(self, step, rank, sample):
        return torch.randn(self.flat.theta.shape[1], device=self.flat.theta.device)


class _OwnFirst(Dist):
    def gather(self, part):
        """Adds up from its own payload on: the same sum, in another order on each worker."""
        senders, stack = super().gather(part)
        turn = senders.index(self.rank)
        return Arrived(senders[turn:] + senders[:turn], stack.roll(-turn, 0))


class _NoVote(Dist):
    def vote(self, good):
        self.votes += 1
        return dict(handled=0, join=[]) if good else None


class _ZerosCount(Dist):
    def live(self, number, step):
        return np.array([float(r in self.members) for r in range(self.size)])


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "heavy-ball": (check_reference, "nesterov", lambda m, momentum, g: m),
    "no-average": (check_data_parallel, "mixing", lambda kind, number, live, seed=0: np.eye(len(live))),
    "alpha-swapped": (check_identities, "blend", lambda theta, phi, keep: fma(phi, keep, (1 - keep) * theta)),
    "halves-swapped": (check_compressors, "dequantise", _halves_swapped),
    "one-payload": (check_bytes, "receivers", lambda kind, workers: 1),
    "tied-twice": (check_fragments, "trainable", lambda model: {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}),
    "no-feedback": (check_feedback, "Sync", _NoFeedback),
    "no-penalty": (check_co2, "staleness_penalty", lambda outer, m, D: torch.ones(len(D), device=D.device)),
    "no-clip": (check_co2, "clip_factor", lambda outer, m, D: torch.ones(len(D), device=D.device)),
    "same-pairs": (check_noloco, "pairing", lambda seed, number, alive: alive),
    "stale-replicas": (check_replicas, "Sync", _StaleReplicas),
    "dead-counted": (check_silent, "mixing", _mean_over_all),
    "joiner-as-zeros": (check_silent, "Dist", _ZerosCount),
    "nothing-in-flight": (check_state, "Sync", _NothingInFlight),
    "unseeded": (check_one_byte, "OneByte", _Unseeded),
    "own-first": (check_processes, "Dist", _OwnFirst),
    "no-vote": (check_votes, "Dist", _NoVote),
}
if HAS_TRITON:

    @triton.jit
    def _unsigned(code, top):
        return tl.where((code & 7) > 0, (tl.maximum((code & 7) - 7 + top, 0) << 23).to(tl.float32, bitcast=True), 0.0)

    BREAKS["unsigned"] = (check_compressors, "power_value", _unsigned)
CHECKS = [
    check_reference, check_data_parallel, check_identities, check_compressors, check_outer, check_feedback, check_co2,
    check_replicas, check_silent, check_state, check_one_byte,
]  # on a device
PLAIN_CHECKS = [check_bytes, check_fragments, check_noloco, check_votes, check_misuse]


# ==== 11. Measurements ================================================================================================


def train_toy(name, transport, steps, H, seed=0, **overrides):
    """Train TinyWorkers by a method, or "ddp", or "single" (one worker, its own share of the data alone).

    Returns loss (of the synchronised weights), worker (mean loss of the live weights), spread (standard deviation of an
    anchor's elements between workers), bytes a worker sent, seconds blocked and seconds in all."""
    M, began = transport.size, time.perf_counter()
    alone = name in ("ddp", "single")
    workers = [TinyWorker(rank, seed, steps=steps) for rank in transport.ranks[: 1 if alone else None]]
    sync = None
    if not alone:
        own = METHODS[name].inner_steps
        H = dict(inner_steps=H) if own not in (None, 1, 5) else {}  # those have steps of their own
        sync = make_sync(name, [w.model for w in workers], transport, seed=seed, **H | overrides)
    blocked = sent = 0.0
    for t in range(steps):
        for worker in workers:
            tokens = worker.batch(t)
            if name == "ddp" and isinstance(transport, Sim):  # one model, everybody's sequences: the same sum
                tokens = torch.cat([worker.batch(t, rank) for rank in range(M)])
            worker.gradient(tokens)
            if name == "ddp" and isinstance(transport, Dist):
                blocked += all_reduce_gradients(worker)
            worker.update(t)
        if name == "ddp":
            sent += data_parallel_bytes(worker.config.parameters(), M)
        if sync:
            sync.step()
    if sync:
        sync.finish()
        sent, blocked = sync.bytes_sent, sync.blocked_seconds
    seconds = time.perf_counter() - began
    alive = statistics.fmean(w.validate() for w in workers)
    with sync.synchronised() if sync else contextlib.nullcontext():
        loss = workers[0].validate()
    spread = sync.phi.std(0, correction=0).square().mean().sqrt().item() if sync else 0.0
    return dict(loss=loss, worker=alive, spread=spread, bytes=sent, blocked=blocked, seconds=seconds)


def all_reduce_gradients(worker):
    """Data parallelism's own traffic, in one piece; the seconds that it took."""
    began, parameters = time.perf_counter(), list(worker.model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = mean.view_as(p)
    return time.perf_counter() - began


FIVE = ("diloco", "streaming", "noloco", "co2", "sparseloco")


def five_methods(steps, H):
    """In each process: data parallelism, then five methods, over gloo; and wire_bytes()."""
    results = {"wire": wire_bytes() if Path("/proc/net/dev").exists() else None}
    for name in ("ddp", *FIVE):
        transport = Dist()
        results[name] = train_toy(name, transport, steps, H)
        transport.close()
    return results


def wire_bytes(P=2**23):
    """What went over the loopback device while one DiLoCo round of P fp32 weights was sent; predicted, measured."""
    model = nn.Linear(P // BLOCK, BLOCK, bias=False)
    sync = make_sync("diloco", model, Dist(), inner_steps=1)
    sync.collect(torch.zeros(1, 1))
    before = loopback()
    sync.step()
    sync.collect(torch.zeros(1, 1))  # all have it
    after = loopback()
    sync.transport.close()
    return sync.transport.size * round_bytes(sync.method, [P], sync.transport.size), after - before


def loopback():
    """Bytes that this machine has sent to itself; Linux."""
    row = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(row.split(":")[1].split()[8])


def table(results, M, steps, H):
    """method | bytes per worker | x fewer than DDP | loss | gap | blocked s."""
    reference = results["ddp"]
    title = f"M = {M}, {steps} steps, H = {H}"
    print(f"{title:<26}{'bytes a worker':>15} {'x fewer':>9} {'loss':>7} {'gap':>8} {'blocked':>9}")
    for name, r in results.items():
        fewer = f"{reference['bytes'] / r['bytes']:,.1f}" if r["bytes"] else "-"
        gap = f"{100 * (r['loss'] / reference['loss'] - 1):+.1f} %"
        blocked = f"{r['blocked']:.2f} s" if r["blocked"] else "-"
        print(f"  {name:<24}{r['bytes']:>15,.0f} {fewer:>9} {r['loss']:>7.4f} {gap:>8} {blocked:>9}")
    print()


def utilisation_table(ledger):
    """Gbit/s for a share of compute: ours, and Streaming DiLoCo's table (1 B parameters, steps of 0.1 s)."""
    targets = (0.5, 0.8, 0.9, 0.95, 0.99)
    print("Gbit/s for a utilisation of" + "".join(f"{target:>17.0%}" for target in targets) + "   (ours / published)")
    ratios = []
    for way, published in PUBLISHED.items():
        ours = [needed_bandwidth(way, target) / 1e9 for target in targets]
        ratios += [a / b for a, b in zip(ours, published, strict=True)]
        cells = (f"{a:.1f} / {b:g} = {a / b:.2f}" for a, b in zip(ours, published, strict=True))
        print(f"  {way:<24}" + "".join(f"{cell:>21}" for cell in cells))
    print()
    middle = statistics.geometric_mean(ratios)
    ledger.row("utilisation, ours / published", "25 bandwidths, mean ratio", 1, middle, "", (0.8, 1.25))


MILD = Outer(0.9, 0.5, nesterov=True)  # what train.py takes in runs of DiLoCo of 15 to 200 rounds
# What the study trains: (label, method, M, steps, H, overrides, share of silent workers).
STUDY = [
    *((label, name, 2, 2000, 30, more, 0) for label, name, more in (
        ("ddp", "ddp", {}), ("single", "single", {}), ("diloco", "diloco", {}),
        ("diloco, outer 0.9 0.5", "diloco", dict(outer=MILD)), ("streaming, e3m0", "streaming", {}),
        ("streaming, e3m0, outer 0.7 0.9", "streaming", dict(outer=NESTEROV)),
        ("streaming, e3m0, outer 0.9 0.5", "streaming", dict(outer=MILD)),
        ("streaming, fp32", "streaming", dict(compressor="none")))),
    *((label, name, 8, 600, 20, more, 0) for label, name, more in (
        ("ddp", "ddp", {}), ("single", "single", {}), ("diloco, fp32", "diloco", {}),
        ("diloco, fp32, outer 0.9 0.5", "diloco", dict(outer=MILD)),
        ("diloco, fp16", "diloco", dict(compressor="fp16")),
        ("diloco, int8", "diloco", dict(compressor="int8")), ("diloco, e3m0", "diloco", dict(compressor="e3m0")),
        ("streaming, e3m0", "streaming", {}), ("noloco", "noloco", {}),
        ("noloco, gamma = 0", "noloco", dict(outer=Outer(1.0, 0.5, gain=0.7, pull=0.0))), ("gossip", "gossip", {}),
        ("co2", "co2", {}), ("sparseloco", "sparseloco", {}),
        ("sparseloco, no feedback", "sparseloco", dict(feedback=0.0)), ("merge", "merge", {}))),
    ("diloco, 20 % silent", "diloco", 8, 600, 20, {}, 0.2),
    ("diloco + W1 = pair, 20 % silent", "diloco", 8, 600, 20, dict(mixes="pair"), 0.2),
]


def measure_kernels(device, n=2**27):
    """ms and GB/s of a round's three passes over n weights, by kernels and by PyTorch (GPU)."""
    phi, theta, m, D = (torch.randn(1, n, device=device) for _ in range(4))
    weights = torch.tensor([[0.5, 0.5]], device=device)
    print(f"{n / 2**20:.0f} Mi weights{'':<12}{'kernels':>20} {'GB/s':>7} {'PyTorch':>20}")

    def row(what, size, work):
        fast, slow = (base.bench(functools.partial(work, backend=way), device) for way in ("triton", "torch"))
        print(f"  {what:<24}{str(fast):>20} {size / fast.median / 1e6:>7,.0f} {str(slow):>20}")

    for name in CODES:
        payload = encode(name, phi, theta, backend="triton")[0]
        row(f"{name}: phi - theta, code", 8 * n + payload.nbytes, functools.partial(encode, name, phi, theta))
        both = torch.cat((payload, payload))
        row(f"{name}: sum of two", 4 * n + both.nbytes, functools.partial(decode_sum, name, both, weights, n))
    row("outer step, blend", 7 * 4 * n, functools.partial(outer_step, NESTEROV, phi, theta, m, D, None, 0.5))
    print()


def silent_workers(M, share, seed):
    """A function of the round: who says nothing in it, drawn anew each time."""
    def silent(number):
        return tuple(np.flatnonzero(np.random.default_rng([seed, 7, number + 1]).random(M) < share))

    return silent if share else None


def study_cell(cell):
    (_, name, M, steps, H, overrides, share), seed = cell
    torch.set_num_threads(1)
    return train_toy(name, Sim(M, silent_workers(M, share, seed)), steps, H, seed, **overrides)


def study(seeds=range(3), scale=1.0):
    """Every cell of STUDY for every seed, side by side on all cores, as a table. scale: of the number of steps."""
    rows = [(*row[:3], max(2 * row[4], int(row[3] * scale)), *row[4:]) for row in STUDY]
    cells = [(row, seed) for row in rows for seed in seeds]
    with concurrent.futures.ProcessPoolExecutor(mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        results = dict(zip(((row[2], row[0], seed) for row, seed in cells), pool.map(study_cell, cells), strict=True))
    print(f"{len(seeds)} seeds{'':<28}{'loss: mean, least, most':>24} {'gap to ddp':>11} {'fewer bytes':>13}  spread")
    means = {}
    for label, _, M, steps, H, _, _ in rows:
        of = lambda what, label=label, M=M: [results[M, label, seed][what] for seed in seeds]  # noqa: E731
        loss, reference = of("loss"), statistics.fmean(results[M, "ddp", seed]["loss"] for seed in seeds)
        means[M, label] = statistics.fmean(loss)
        fewer = results[M, "ddp", seeds[0]]["bytes"] / of("bytes")[0] if of("bytes")[0] else math.nan
        losses = f"{means[M, label]:.4f} {min(loss):.4f} {max(loss):.4f}"
        print(f"M = {M}, {label:<32}{losses:>22} {100 * (means[M, label] / reference - 1):>+9.2f} % {fewer:>13,.1f} "
              f"{statistics.fmean(of('spread')):>8.4f}   {steps} steps, H = {H}")
    spread = lambda label: statistics.fmean(results[8, label, seed]["spread"] for seed in seeds)  # noqa: E731
    ratio = lambda a, b, M=8: means[M, a] / means[M, b]  # noqa: E731
    print("\naimed at, and found")
    for text_, aim, found in (
        ("M = 2: streaming with e3m0 over ddp, loss", "<= 1.03", ratio("streaming, e3m0", "ddp", 2)),
        ("    with DiLoCo's outer step, 0.7 0.9", "<= 1.03", ratio("streaming, e3m0, outer 0.7 0.9", "ddp", 2)),
        ("M = 8: diloco, e3m0 over fp32, loss", "<= 1.005", ratio("diloco, e3m0", "diloco, fp32")),
        ("M = 8: diloco, int8 over fp32, loss", "<= 1.002", ratio("diloco, int8", "diloco, fp32")),
        ("M = 8: diloco, fp16 over fp32, loss (chance alone)", "<= 1.002", ratio("diloco, fp16", "diloco, fp32")),
        ("M = 8: noloco over diloco, loss", "<= 1.015", ratio("noloco", "diloco, fp32")),
        ("M = 8: noloco's spread, gamma = 0 over 0.7", ">= 4", spread("noloco, gamma = 0") / spread("noloco")),
        ("M = 8: sparseloco without feedback over with, loss", "> 1", ratio("sparseloco, no feedback", "sparseloco")),
        ("M = 8: 20 % silent, W1 = pair over W1 = I, loss", "< 1",
         ratio("diloco + W1 = pair, 20 % silent", "diloco, 20 % silent")),
        ("M = 8: 20 % silent, W1 = pair over W1 = I, spread", "< 1",
         spread("diloco + W1 = pair, 20 % silent") / spread("diloco, 20 % silent")),
    ):
        limit = float(aim.split()[1])
        good = found >= limit if ">" in aim else found <= limit
        print(f"  {text_:<54} {aim:>8} {found:>8.4f} {'yes' if good else 'NO'}")


def check_all(device, only, args):
    """--check. (--all and --study go without.) {name: what the check returned}."""
    return base.run_checks([*CHECKS, *PLAIN_CHECKS, check_processes, check_failures], device, only)


def body(device, ledger, args):
    if args.study:
        return study(scale=args.scale)
    if args.all:
        for M in (2, 8):
            table({name: train_toy(name, Sim(M), 200, 20) for name in ("ddp", "single", *METHODS)}, M, 200, 20)
        return None
    disturbed, loss = check_all(device, None, args)["failures"]
    print()
    steps, H = 80, 20
    results = fleet("five_methods", 2, steps, H)[0]
    wire = results.pop("wire")
    table(results, 2, steps, H)
    if device.type == "cuda" and HAS_TRITON:
        measure_kernels(device)
    utilisation_table(ledger)
    parameters = TinyWorker(0).config.parameters()
    for name in FIVE:
        sync = make_sync(name, TinyWorker(0).model, Sim(1), inner_steps=H)
        sizes = [span.stop - span.start for span in sync.flat.spans]
        counts = zip(launches(sync.method, steps), sizes, strict=True)
        predicted = sum(k * round_bytes(sync.method, [n], 2) for k, n in counts)
        ledger.row(f"{name}: bytes a worker", "rounds x round_bytes", predicted / 1e6, results[name]["bytes"] / 1e6,
                   "MB", (1, 1))
    ledger.row("ddp: bytes a worker", "2 (M-1)/M P 4 steps", steps * data_parallel_bytes(parameters, 2) / 1e6,
               results["ddp"]["bytes"] / 1e6, "MB", (1, 1))
    if wire:
        sizes = (size / 1e6 for size in wire)
        ledger.row("one round on the loopback device", "M x round_bytes", *sizes, "MB", (1, 1.25))
    ledger.row("killed worker: loss beside none", "undisturbed run", loss, disturbed, "", (0.97, 1.03))


def add_arguments(parser):
    parser.add_argument("--all", action="store_true", help="every method, M = 2 and 8, simulated (minutes)")
    parser.add_argument("--study", action="store_true", help="seeds, M = 8, ablations (all cores, an hour of one)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the study's steps")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 07_moe_balance.py"))


# Exercises
#   1. Send only every other layer's Delta in a round, the others in the next, without fragments: which W2 does that?
#   2. Keep phi and m on the host (OpenDiLoCo does): what does a round then cost, and what does tau = 1 hide of it?
#   3. Let inner_steps grow as the learning rate falls. Where is the same loss reached with the fewest bytes?
#   4. Write QAdam: freeze AdamW's v after a warm-up and send its momentum through "bagua-c-lp-s".
