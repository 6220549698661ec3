"""06 - Synchronising rarely, partially, approximately: training over slow links, with workers that come and go.

The problem in one number
    Data parallelism sums the gradients of every step: a model of a billion parameters in fp32, two workers, a step a
    tenth of a second: 4 GB each way each step, 320 Gbit/s that never pause. Between two cities there is 1. DiLoCo lets
    each worker take H steps alone and then sends only how far it came: H = 30 to 500 times less. In four bits (and a
    scale for 128 of them) it is 236 times less at H = 30 for two workers; for eight 59, as codes that cannot be summed
    are gathered whole, 7 payloads each. Sent a third of the model at a time, the largest burst is a third.

A round on the time line                          o an inner step, by the worker's own optimizer
    steps of worker i   --o--o--o--o--o--o--|--o--o--o--|--o--o--o--o--|--o--o-->
                        H steps alone       launch      landing        launch of the next round
                                            Delta goes  |
                                            on the wire |
                                            <-- tau --->  steps that hide the transfer (0: the worker waits for it)

Symbols, in the code under the same names (M workers, P parameters, t counts a worker's inner steps)
    theta_i (P)  the weights worker i trains            phi_i (P)  its anchor: the weights last agreed on
    Delta_i = phi_i - theta_i     the pseudo-gradient: H inner steps, seen as one gradient
    sent_i  = C(Delta_i + beta e_i)      C compresses; e_i, the error feedback, is what was not sent
    D_i     = sum_j W2[i, j] sent_j      what comes over the wire
    bar_i   = sum_j W1[i, j] phi_j       anchors are mixed, too (gossip), or W1 = I
    phi_i, m_i = Outer(phi_i, bar_i, D_i, m_i)                    SGD, heavy ball or Nesterov, with momentum m
    theta_i = alpha theta_i + (1 - alpha) phi_i                   at landing, tau steps after the launch
    Shapes: L workers are in this process (of a simulation all M, else 1), J are heard, n numbers are in a fragment
  A method is a choice of W1, W2, C, beta, Outer, H, tau, alpha and of fragments, into which the weights are cut:
  METHODS in section 6 lists them, a line each.

A reading path
    Section 1 has every method as its paper writes it, in one to nine lines. 2 counts bytes. 3 to 7 build the one
    mechanism that covers the family: codes, the outer step, flat weights, the table of methods, rounds. 8 sends over
    torch.distributed. 9 is about losing and winning workers: skip it on a first reading. 10 is for the training loop.
    11 is Just One Byte, which sends no gradients at all. 12 checks the mechanism against section 1.

How to launch
    python 06_low_comm_sync.py                        methods over two processes, then checks; under a minute
    python 06_low_comm_sync.py --study 8              2: two workers; 8: eight; ablations (every GPU; minutes)
    python 06_low_comm_sync.py --break heavy-ball     plant a famous bug and watch its check fail (exit status 1)
    You will see each method's bytes and loss beside data parallelism's and beside NOT communicating; the bandwidth
    that a method needs beside a published table; what one round puts on the loopback device.

References ("our reading": only the abstract was available to us, the formula is ours)
    DiLoCo 2311.08105. Streaming DiLoCo 2501.18512. MuLoCo 2505.23725 (Muon inside). NoLoCo 2506.10911. CO2 2401.16265
    (penalty and clip: our reading). BAGUA 2107.01499. Factored Gossip DiLoCo 2606.22768 (our reading). SparseLoCo,
    after 2601.02360. A single merge 2507.06542 (our reading). Just One Byte 2306.10015. Slow Momentum, the ancestor:
    1910.00643.

Left out on purpose: outer state on the host (exercise 2); QAdam, which is C_LP_S over an Adam whose v is frozen;
workers of different sizes; survival of a lost worker under NCCL, whose watchdog ends the others (gloo goes on);
kernels (section 3 says why).
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import functools
import importlib
import io
import itertools
import math
import os
import re
import signal
import statistics
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
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
MIB, require, must_raise = base.MIB, base.require, base.must_raise


# ==== 1. The papers as written ========================================================================================
#
# Put the weights of M workers below each other: theta, phi, m are (M, P) matrices, and who hears whom is an (M, M)
# matrix W from the left. Its rows sum to 1, so that W x is for each worker a mean of what it hears:
#
#     all                          pair (0 with 2; 3 with 1)      ring
#     1/4 1/4 1/4 1/4              1/2  0  1/2  0                 1/3 1/3  0  1/3
#     1/4 1/4 1/4 1/4               0  1/2  0  1/2                1/3 1/3 1/3  0
#     1/4 1/4 1/4 1/4              1/2  0  1/2  0                  0  1/3 1/3 1/3
#     1/4 1/4 1/4 1/4               0  1/2  0  1/2                1/3  0  1/3 1/3
#     all alike after it           one partner, whatever M        two neighbours, whatever M
#
# Under pairs and rings workers never agree exactly, but their differences shrink: a round of random pairs leaves
# (M - 2) / (2 (M - 1)) of the squared distances, 3/7 for eight.
#
# Below, each paper's round k in its own algebra: state s with matrices theta, phi, m (zero at first), e and what is
# `flying`. theta was moved by H inner steps since the last round. s.W(kind, k) is W of round k, s.Q a code there and
# back, s.spans the columns of each fragment. Nothing here knows about layers, bytes, processes or failures. It is the
# lesson, and the oracle: check_papers holds the mechanism of sections 3 to 7 against it after every single step, to 12
# digits (SparseLoCo, whose code is of fp32, to 5).


def mixing(kind, number, live, seed=0):
    """W (M, M) fp64 for round `number`; row i is what worker i adds up. live (M,): 1, or 0 for who has nothing to say.

    all: the mean over the living, for everybody. pair: random pairs of the living, drawn from (seed, number), which all
    workers know; an odd one keeps its own. ring: thirds of oneself and of the neighbours."""
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
            for j in (alive[k - 1], i, alive[(k + 1) % len(alive)]):  # of two the neighbours are one and the same
                W[i, j] += 1 / 3
    return W


def pairing(seed, number, alive):
    return np.random.default_rng([seed, number]).permutation(alive)


# Slow Momentum, 1910.00643: the momentum m of pseudo-gradients, and a step along it. Nesterov's form looks ahead: it
# adds the gradient once more. With D = 1 in every round (eta = 0.7, mu = 0.9) m is 1, 1.9, 2.71, ... 10 and a step
# eta (D + mu m) is 1.33, 1.90, 2.41, ... 7: a gain of eta / (1 - mu), which needs some 20 rounds to build up, and which
# overshoots where H is small. That is why short runs want a smaller momentum (outer_for, in section 6).


def nesterov(s, D, eta=0.7, mu=0.9, part=slice(None)):
    s.m[:, part] = mu * s.m[:, part] + D
    return eta * (D + mu * s.m[:, part])


def local_sgd(s, k):  # and a single merge, 2507.06542: one such round at the very end
    s.theta = s.phi = s.theta.mean(0).expand_as(s.theta)


def diloco(s, k):  # 2311.08105, algorithm 1
    D = (s.phi - s.theta).mean(0)
    s.theta = s.phi = s.phi - nesterov(s, D)


def streaming(s, t, H=6, tau=1, alpha=0.5):  # 2501.18512, algorithm 2; after every step t
    for p, part in enumerate(s.spans):  # fragment p has a clock of its own, a third of H behind p - 1's
        clock = t - p * H // len(s.spans)
        if clock % H == 0:
            s.flying[p] = (s.phi - s.theta)[:, part].mean(0)
        if clock % H == tau and p in s.flying:
            phi = s.phi[:, part] - nesterov(s, s.flying[p], 0.4, 0.9, part)
            s.phi = torch.cat((s.phi[:, : part.start], phi, s.phi[:, part.stop :]), 1)
            s.theta = s.theta.clone()
            s.theta[:, part] = alpha * s.theta[:, part] + (1 - alpha) * phi


def noloco(s, k, mu=0.5, gain=0.7, pull=0.7):  # 2506.10911 (its alpha, beta, gamma): no collective, whatever M
    W = s.W("pair", k)
    s.m = mu * s.m + gain * W @ (s.theta - s.phi) - pull * (s.phi - W @ s.phi)
    s.theta = s.phi = s.phi + s.m


def gossip(s, k):  # 2606.22768, our reading. W1 phi is known when the round starts: it travels while steps are taken
    D = s.W("pair", k) @ (s.phi - s.theta)  # and this is what blocks. W1 = I, W2 = all would be DiLoCo
    s.theta = s.phi = s.W("ring", k) @ s.phi - nesterov(s, D)


def co2(s, k, mu=0.5, clip=0.05):  # 2401.16265: the whole next round hides the transfer. Penalty, clip: our reading
    D, s.flying = s.flying, (s.phi - s.theta).mean(0)
    if D is not None:  # of the round before. Since then phi took a step of its own, |m|; the staler, the shorter
        s.m = mu * s.m + D / (1 + s.m.norm(dim=1, keepdim=True) / D.norm())
        s.m = s.m * (clip / s.m.square().mean(1, keepdim=True).sqrt()).clamp(max=1)
        s.phi = s.phi - s.m
    s.theta = s.phi  # a round's progress is on its way: start over from the anchor


def sparseloco(s, k, beta=0.95):  # after 2601.02360: Q keeps the largest 1.6 %, in two bits each
    s.e = beta * s.e + s.phi - s.theta
    sent = s.Q(s.e)
    s.e = s.e - sent  # what was not sent is kept for later
    s.theta = s.phi = s.phi - sent.mean(0)


# BAGUA, 2107.01499: four relaxations of data parallelism. C_LP_S (centralised, low precision, synchronous) is a mean
# of 8-bit numbers after every step: local_sgd with H = 1 and a code.


def d_fp_s(s, k):  # decentralised, full precision, synchronous
    s.theta = s.phi = s.W("pair", k) @ s.theta


def bagua_async(s, k):  # a copy is averaged in the background; what the worker did meanwhile stays
    mine, s.flying = s.flying, s.theta
    if mine is not None:
        s.phi = mine.mean(0).expand_as(mine)
        s.theta = s.theta + (s.phi - mine)


def d_lp_s(x, w, L, R, Q, hear):
    """D_LP_S, a step of workers on a ring: rows x (.., P) after an inner step, w before it; L, R: the neighbours' w.

    Each keeps copies of its neighbours' weights, moves by what the ring's mean asks for, and tells in 8 bits how it
    moved. hear(q): the left and the right neighbour's q. Everybody adds what was SAID, to its own weights and to the
    copies of them that others keep, so that a copy and its original never differ by a bit. Returns w, L, R."""
    q = Q(x + L / 3 + R / 3 - 5 / 3 * w)  # the step x - w, and the ring's mean (L + w + R) / 3 less w
    left, right = hear(q)
    return w + q, L + left, R + right


# name: (round after so many steps, its function)
PAPERS = {
    "local-sgd": (4, local_sgd), "diloco": (4, diloco), "streaming": (1, streaming), "noloco": (4, noloco),
    "gossip": (4, gossip), "co2": (4, co2), "sparseloco": (4, sparseloco), "merge": (24, local_sgd),
    "bagua-c-lp-s": (1, local_sgd), "bagua-d-fp-s": (1, d_fp_s), "bagua-async": (5, bagua_async),
}


# ==== 2. What it costs: bytes on the wire, and the bandwidth that they need ===========================================
#
# A mean over all workers is a reduce-scatter and an all-gather: each worker adds up one chunk of everybody's, and tells
# the others the sum: it sends 2 (M - 1) / M payloads, never 2. That needs sums that can be coded again (fp32, uint8).
# Four bits are too coarse for it, and a sum of top-k's has not the same places: those are gathered whole, M - 1
# payloads. P = 1e9 and H = 30, in MB a step and worker, and how many times less than data parallelism:
#
#                            M = 2                      M = 8
#     data parallelism       4,000                      7,000
#     DiLoCo, fp32             133     30               233     30
#     streaming, e3m0           17    236               119     59
#     SparseLoCo, top-k          1  4,096                 7  1,024
#     NoLoCo, pairs            267     15               267     26     (Delta and the anchors)
#
# Gossip: Delta to the worker's partner, the anchor to both its neighbours on the ring, 12 P bytes a round.

BLOCK = 128  # numbers that share a scale; every parameter starts at a multiple of it
CHUNK, KEPT = 4096, 64  # top-k: of each CHUNK numbers the KEPT largest, 1.6 %
UNIT = {  # code: (numbers of a unit, its bytes). Payloads are whole units, so that a cut anywhere between two is easy
    "none": (BLOCK, 4 * BLOCK),
    "uint8": (BLOCK, BLOCK + 8),  # two fp32: least value, step
    "e3m0": (BLOCK, BLOCK // 2 + 1),  # one byte: the exponent of the largest
    "topk": (CHUNK, KEPT * 14 // 8 + 8),  # 12 bits say where, 2 bits what; two fp32 levels
}


def code_bytes(C, count, parts=1):
    """Bytes of one of `parts` equal chunks of `count` numbers."""
    numbers, size = UNIT[C]
    return math.ceil(math.ceil(count / numbers) / parts) * size


def round_bytes(method, sizes, workers):
    """Bytes that a worker sends in one round over all fragments (sizes: their lengths); of gossip a mean worker's."""
    total = 0
    for count in sizes:
        if method.reduces:
            total += 2 * (workers - 1) * code_bytes(method.C, count, workers)
        else:
            total += code_bytes(method.C, count) * receivers(method.W2, workers)
        if method.W1:
            total += code_bytes("none", count) * receivers(method.W1, workers)
    return total


def receivers(kind, workers):
    """To how many others a worker sends (on average: an odd worker has no partner)."""
    return {"all": workers - 1, "pair": workers // 2 * 2 / workers, "ring": min(2, workers - 1)}[kind]


def data_parallel_bytes(P, workers, itemsize=4):
    """Bytes that a worker sends each step in a ring all-reduce of the gradient."""
    return 2 * (workers - 1) / workers * P * itemsize


def resident_bytes(method, P):
    """Bytes beyond the weights themselves: anchor, momentum, error feedback."""
    return 4 * P * (1 + bool(method.outer.momentum) + (method.beta is not None))


# What of a transfer is not hidden is waited for. A step is a third forward, two thirds backward, and whatever is sent
# can hide behind the backward pass that makes it. At 10 Gbit/s, P = 1e9, 16 bits, steps of 0.1 s, H = 100 (10 s of
# steps), 8 fragments:
#
#     data parallelism   1.6 s to send less 0.067 s, each step                   0.1 / (0.1 + 1.53)  =  6 %
#     DiLoCo             the same, once in H steps                               10 / (10 + 1.53)    = 87 %
#     streaming          8 times 0.2 s less 0.067 s                              10 / (10 + 1.07)    = 90 %
#     + overlap          8 times 0.2 s less 0.167 s: tau = 1, a step more        10 / (10 + 0.27)    = 97 %
#     + 4 bit            8 times 0.05 s: hidden whole                                                 100 %


def utilisation(bandwidth, way, P=1e9, step=0.1, H=100, fragments=8, bits=16):
    """Share of the time that is compute, at so many bits a second; way: a row of the table above."""
    H = 1 if way == "data parallel" else H
    pieces = 1 if way in ("data parallel", "DiLoCo") else fragments
    send = P * bits / pieces / bandwidth / (4 if way == "+ 4 bit" else 1)  # seconds of each piece
    hidden = step * (5 / 3 if way in ("+ overlap", "+ 4 bit") else 2 / 3)
    return H * step / (H * step + pieces * max(0.0, send - hidden))


BANDWIDTHS = 1e9 * np.logspace(-1, 3, 50)  # on whose points the published figures lie
# Streaming DiLoCo, its table of a 1 B model with steps of 0.1 s: Gbit/s for a utilisation of 50, 80, 90, 95, 99 %.
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
PUBLISHED = {
    "data parallel": (86.8, 152.6, 184.2, 222.3, 569), "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "streaming": (1.4, 5.2, 9.1, 16.0, 28.1), "+ overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
    "+ 4 bit": (0.4, 0.9, 1.7, 2.0, 3.0),
}


def needed_bandwidth(way, target, **sizes):
    """Smallest of BANDWIDTHS, in bits a second, with at least this utilisation; sizes: those of utilisation."""
    return next((b for b in BANDWIDTHS if utilisation(b, way, **sizes) >= target), math.inf)


# ==== 3. Three codes, and what of a number they keep ==================================================================
#
#     uint8   the least of 128 numbers is 0, the largest 255, evenly between; half a step of error
#     e3m0    a sign and three bits of exponent, no mantissa: powers of two. The nearest one is off by a third at most.
#             A block has one scale, the power nearest to its largest number; codes 7 ... 1 are that power and 1/2 ...
#             1/64 of it, 0 is zero. For instance, a block whose largest number is 0.9:
#
#                   number     0.9      -0.4     0.1      0.02     0.01      0.003      -0.003
#                   nearest    2^0     -2^-1     2^-3     2^-6     2^-6      0          0
#                   code       7        6 + 8    4        1        1         0          8     (8: the sign's bit)
#
#             Below 2^-6 a number goes to what is nearer of that and 0: to 2^-6 from 2^-7 = 0.0078 on.
#     top-k   of 4096 numbers the 64 largest: 12 bits say where; 2 bits the sign, and whether it is above the mean of
#             the 64. Those above become their mean, the others theirs.
#
# A unit of each on the wire, in bytes, so that a payload can be cut between any two units, for any number of workers:
#
#     uint8   | 128 codes                     | least, fp32 | step, fp32 |             136 for 512
#     e3m0    | 64: two codes each, the first in the low bits | top |                   65 for 512
#     top-k   | 96: two places in three bytes | 16: four codes each | two levels |     120 for 16,384
#
# Streaming DiLoCo found that pseudo-gradients, sums of many steps, bear such rounding, as means are formed in fp32.
# What C loses can be kept for the next round (e, error feedback): then nothing is lost, only late (check_feedback).
#
# How fast must this be? At 162 M parameters one round of e3m0 by the operations below, the outer step included, takes
# 21 ms on an H100 (fp32 9, uint8 and top-k 15), and the 30 steps between two rounds take 3.9 s (train.py's): 0.5 %.
# Kernels that fuse each pass would take 3 ms, and a quarter of this file.
# Every operation rounds alike wherever a number lies (no fused multiply-add), and sums run in the order of ranks: so
# all workers get the same bits, and M workers in one process the bits of M processes.


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


def encode_uint8(x):
    low, high = x.aminmax(dim=-1, keepdim=True)  # (L, units, 1)
    step = (high - low) / 255
    codes = ((x - low) / step.clamp(min=1e-38)).round().clamp(max=255)  # (a block of equal numbers has a step of 0)
    return torch.cat((codes.to(torch.uint8), as_bytes(low), as_bytes(step)), -1)


def decode_uint8(payload):
    low, step = as_bytes(payload[..., BLOCK:]).view(torch.float32).split(1, -1)
    return payload[..., :BLOCK] * step + low


def encode_e3m0(x):
    size, exponent = torch.frexp(x)  # x = size 2^exponent, 1/2 <= |size| < 1
    exponent = torch.where(x == 0, -200, exponent)
    nearest = exponent - (size.abs() < 0.75).int()  # the nearest power of two is 2^nearest
    top = nearest.amax(-1, keepdim=True).clamp(-126, 127)  # (L, units, 1)
    code = torch.where(exponent <= top - 7, 0, (nearest - top + 7).clamp(1, 7))  # |x| < 2^(top - 7): 0
    code |= (x < 0).int() << 3
    code = code[..., ::2] | code[..., 1::2] << 4  # two in a byte
    return torch.cat((code, top + 127), -1).to(torch.uint8)


@functools.cache
def e3m0_pairs(device):
    """The two numbers (256, 2) that a byte stands for, in units of the scale."""
    levels = [0.0] + [2.0 ** (code - 7) for code in range(1, 8)]
    levels += [-level for level in levels]
    return torch.tensor([[levels[byte & 15], levels[byte >> 4]] for byte in range(256)], device=device)


def decode_e3m0(payload):
    scale = payload[..., BLOCK // 2 :].int() << 23  # the exponent's bits of an fp32, whose others are 0: 2^top
    pairs = F.embedding(payload[..., : BLOCK // 2].int(), e3m0_pairs(payload.device))  # (L, units, BLOCK / 2, 2)
    return pairs.flatten(-2) * scale.view(torch.float32)


def encode_topk(x):
    place = x.abs().topk(KEPT, -1).indices.sort(-1).values  # (L, units, KEPT)
    value = x.gather(-1, place)
    size = value.abs()
    big = size >= size.mean(-1, keepdim=True)
    levels = [(size * group).sum(-1, keepdim=True) / group.sum(-1, keepdim=True).clamp(min=1) for group in (~big, big)]
    a, b = place[..., ::2], place[..., 1::2]  # two places are three bytes
    places = torch.stack((a & 255, a >> 8 | (b & 15) << 4, b >> 4), -1).to(torch.uint8).flatten(-2)
    codes = ((value < 0).int() | big.int() << 1).unflatten(-1, (-1, 4))  # four codes are one
    codes = (codes << torch.arange(0, 8, 2, device=x.device)).sum(-1).to(torch.uint8)
    return torch.cat((places, codes, *map(as_bytes, levels)), -1)


def decode_topk(payload):
    places, codes, levels = payload.split((KEPT * 3 // 2, KEPT // 4, 8), -1)
    x, y, z = places.int().unflatten(-1, (-1, 3)).unbind(-1)
    place = torch.stack((x | (y & 15) << 8, y >> 4 | z << 4), -1).flatten(-2).long()  # (L, units, KEPT)
    codes = (codes.int().unsqueeze(-1) >> torch.arange(0, 8, 2, device=payload.device) & 3).flatten(-2)
    value = as_bytes(levels).view(torch.float32).gather(-1, (codes >> 1).long()) * (1 - 2 * (codes & 1))
    return torch.zeros(*payload.shape[:-1], CHUNK, device=payload.device).scatter_(-1, place, value)


def encode(C, x):
    """x (L, n) fp32 -> payload (L, units, bytes) uint8, a copy. "none" takes fp64, too."""
    x = F.pad(x, (0, -x.shape[1] % UNIT[C][0])).unflatten(1, (-1, UNIT[C][0]))  # (L, units, numbers)
    return {"none": as_bytes, "uint8": encode_uint8, "e3m0": encode_e3m0, "topk": encode_topk}[C](x)


def decode(C, payload, n, dtype=torch.float32):
    """payload (L, units, bytes) -> (L, n)."""
    if C == "none":
        return payload.view(dtype).flatten(1)[:, :n]
    return {"uint8": decode_uint8, "e3m0": decode_e3m0, "topk": decode_topk}[C](payload).flatten(1)[:, :n]


def weighted_sum(C, stack, weights, n, dtype=torch.float32):
    """sum over j of weights[i, j] x what stack[j] holds: (L, n). stack (J, units, bytes), weights (L, J) NumPy. What
    nobody gives a weight is not decoded: it may be anything."""
    out = torch.zeros(len(weights), n, dtype=dtype, device=stack.device)
    for j in np.flatnonzero(weights.any(0)):
        column = torch.tensor(weights[:, j, None], dtype=dtype, device=stack.device)  # (L, 1)
        out += column * decode(C, stack[j : j + 1], n, dtype)
    return out


# ==== 4. The outer step ===============================================================================================
#
# One optimizer covers the papers of section 1. With momentum mu and rate eta:
#
#     g   = gain D / Lambda + pull (phi - bar)        gain, pull: NoLoCo's beta and gamma. Lambda: CO2's penalty
#     m   = mu m + g, shortened to clip               clip: CO2's, on the root mean square of m's elements
#     phi = start - eta (m, or with nesterov g + mu m)
#
# start is bar, the mixed anchors, where gossip takes them as they are; with `pull` it is phi, and NoLoCo draws the
# anchors of a pair together through the momentum instead: more slowly, but it damps.
#
# One weight, two workers, DiLoCo (eta 0.7, mu 0.9): phi = 1, and H steps later theta = 0.8 and 0.9.
#
#     Delta = 0.2, 0.1    D = 0.15    m = 0.15           phi = 1 - 0.7 (0.15 + 0.135) = 0.8005   both go on from it
#     next: theta = 0.7005, 0.7405    D = 0.08           m = 0.135 + 0.08 = 0.215
#                                     phi = 0.8005 - 0.7 (0.08 + 0.1935) = 0.609               beyond both of them
#
# The workers moved by 0.15 and 0.08, the anchor by 0.2 and 0.19: that is the outer momentum. With local SGD's step
# (eta 1, mu 0) the anchor is the workers' mean, 0.85; heavy ball (no look ahead) would make it 0.895, then 0.7445.


@dataclass(frozen=True)
class Outer:
    """The outer optimizer. lr (eta), momentum (mu) and nesterov as in torch.optim.SGD; the others as above."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    gain: float = 1.0
    pull: float | None = None
    penalty: bool = False
    clip: float | None = None


def outer_step(outer, phi, m, D, bar):
    """In place: phi, and m where there is momentum; all (L, n), bar may be phi."""
    g = D * outer.gain if outer.gain != 1 else D
    if outer.penalty:
        g = g / staleness_penalty(outer, m, D)
    if outer.pull is not None:
        g = g + outer.pull * (phi - bar)
    if m is not None:
        m.mul_(outer.momentum).add_(g)
        if outer.clip is not None:
            m.mul_(clip_factor(outer, m))
        g = look_ahead(outer, m, g) if outer.nesterov else m
    start = bar if outer.pull is None else phi
    phi.copy_(start - outer.lr * g)


def look_ahead(outer, m, g):
    return g + outer.momentum * m


def staleness_penalty(outer, m, D):
    """CO2's Lambda, our reading, (L, 1): between launch and landing the anchor moved by one outer step, eta m. The
    larger that is beside D, the older D's starting point."""
    return 1 + outer.lr * m.norm(dim=1, keepdim=True) / D.norm(dim=1, keepdim=True).clamp(min=1e-30)


def clip_factor(outer, m):
    """(L, 1) by which m is shortened to CO2's limit, our reading."""
    return (outer.clip / m.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)).clamp(max=1.0)


def blend(theta, phi, alpha):
    """In place: alpha theta + (1 - alpha) phi; exactly phi for alpha = 0, exactly theta for 1."""
    if alpha:
        theta.mul_(alpha).add_((1 - alpha) * phi)
    else:
        theta.copy_(phi)


# ==== 5. The weights as one vector, in fragments ======================================================================
#
# All that a round does is elementwise, so a model's weights are moved into one vector and its parameters become views
# of it: an optimizer that steps in place moves theta, a landing that writes theta moves the model. (theta itself asks
# for no gradient, so that autograd sees nothing of this.)
#
#     theta (P)   | block 0 | block 3 | embedding  || block 1 | block 4 | classifier || block 2 | block 5 | norm |
#     fragments   <-------------- 0 --------------><--------------- 1 --------------><------------ 2 ----------->
#
# Layers are dealt out in turn, so that each fragment has early and late ones, as Streaming DiLoCo advises; what is in
# no layer (embedding, classifier) goes, largest first, to the fragment that is lightest.


def fragments_of(sizes, count):
    """{name: numbers} -> `count` lists of names, each name in exactly one. A layer: equal names up to a number."""
    layers, loose = {}, []
    for name in sizes:
        layer = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        (layers.setdefault(layer[0], []) if layer else loose).append(name)
    fragments = [sum(list(layers.values())[i::count], []) for i in range(count)]
    for name in sorted(loose, key=sizes.get, reverse=True):
        min(fragments, key=lambda names: sum(map(sizes.get, names))).append(name)
    return fragments


def trainable(model):
    """{name: parameter} of what is trained; a tied one once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# Two kinds of weights cannot be views of an fp32 vector: bf16 ones, and those that an optimizer holds elsewhere, like
# the fp32 master copies of 04's layout "master". These are copied, in before a round, out after it (gather, scatter).
# From the master where there is one: a round's Delta is often smaller than bf16 can tell (at 0.07 steps of 0.0005).


class Flat:
    """Trainable weights of L models of one shape as rows of `theta` (L, P), in fp32 (fp64, if they all are).

    Parameters of that dtype become views into it. Make it before 04's forge(); others (bf16 weights that forge makes)
    are copied, see adopt(). Buffers and frozen parameters stay as they are. place: {name: its slice of P}; spans: a
    slice for each fragment. ValueError where there is nothing to train, or are not enough layers for the fragments."""

    def __init__(self, models, fragments=1):
        self.named = [trainable(model) for model in models]
        sizes = {name: p.numel() for name, p in self.named[0].items()}
        groups = fragments_of(sizes, fragments) if isinstance(fragments, int) and fragments > 0 else []
        base.refuse(
            (not sizes, "the model has no trainable parameter: there is nothing to synchronise"),
            (not groups, f"fragments is {fragments}: use a whole number of at least 1"),
            (not all(groups), f"fragments is {fragments}: the model has not enough layers for so many: use fewer"),
        )
        self.place, self.spans, end = {}, [], 0
        for names in groups:
            begin = end
            for name in names:
                self.place[name] = slice(end, end + sizes[name])
                end += math.ceil(sizes[name] / BLOCK) * BLOCK  # what lies between stays zero
            self.spans.append(slice(begin, end))
        first = list(self.named[0].values())
        dtype = torch.float64 if all(p.dtype == torch.float64 for p in first) else torch.float32
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
        """Into theta, what is no view of it."""
        for p, view, master in self.copied:
            view.copy_(p if master is None else master)

    @torch.no_grad()
    def scatter(self):
        """Out of it."""
        for p, view, master in self.copied:
            p.copy_(view)
            if master is not None:
                master.copy_(view)


# ==== 6. A method is a row of a table; M workers in one process =======================================================
#
# The mechanism of section 7 takes the formulas of the docstring literally. A row of METHODS says what is particular to
# a paper, in its symbols; compare section 1. What a worker sends in a round follows from W2, W1 and C: round_bytes.


@dataclass(frozen=True)
class Method:
    """A member of the family; symbols as at the top of this file.

    W2, W1: kinds of mixing() of what is sent and of the anchors (None: W1 = I). early: W1 phi travels while the round
    computes. C: a code of UNIT. beta: of the error feedback, or None. H: None for one round at the very end. tau: None
    for a whole round. sends: "progress" Delta, or the "weights" themselves: phi = W2 theta, and theta goes on from it,
    but keeps what it did since the launch."""

    W2: str = "all"
    W1: str | None = None
    early: bool = False
    C: str = "none"
    beta: float | None = None
    outer: Outer = Outer()
    H: int | None = 30
    fragments: int = 1
    tau: int | None = 0
    alpha: float = 0.0
    sends: str = "progress"

    @property
    def reduces(self):
        """Whether a sum is formed chunk by chunk on the way, and coded again, for which no error feedback could
        account; otherwise payloads go whole to whom W2 names."""
        return self.W2 == "all" and self.C in ("none", "uint8") and self.beta is None


NESTEROV = Outer(0.7, 0.9, nesterov=True)
METHODS = {
    "local-sgd": Method(),  # the mean of weights: D's mean with an outer rate of 1
    "diloco": Method(outer=NESTEROV),
    "streaming": Method(C="e3m0", outer=Outer(0.4, 0.9, nesterov=True), fragments=3, tau=1, alpha=0.5),
    "noloco": Method("pair", "pair", outer=Outer(1.0, 0.5, gain=0.7, pull=0.7)),
    "gossip": Method("pair", "ring", early=True, outer=NESTEROV),  # W1 phi is not stale, and W2 blocks
    "co2": Method(outer=Outer(1.0, 0.5, penalty=True, clip=0.05), tau=None),  # everything hidden
    "sparseloco": Method(C="topk", beta=0.95),  # 1.6 % of Delta in 14 bits each
    "merge": Method(H=None),  # alone to the end, then averaged once
    "bagua-c-lp-s": Method(C="uint8", H=1),
    "bagua-d-fp-s": Method("pair", H=1, sends="weights"),
    "bagua-async": Method(H=5, tau=None, sends="weights"),  # theta += the mean less what it was at launch
}
# {method: {n: (eta, mu)}}: what trained better than the method's own in runs of fewer than n rounds.
SHORT_OUTER = {"diloco": {15: (1.0, 0.0), 200: (0.9, 0.5)}, "streaming": {30: (0.9, 0.5), 200: (0.7, 0.9)}}
SHORT_OUTER["gossip"] = SHORT_OUTER["diloco"]


def outer_for(name, rounds):
    """(eta, mu) for a run of so few rounds, or None: those of the method itself."""
    return next((pair for fewer, pair in SHORT_OUTER.get(name, {}).items() if rounds < fewer), None)


def check_method(method, flat, transport):
    """ValueError for what cannot be."""
    H, outer, one = method.H, method.outer, method.H is None
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool)  # noqa: E731
    share = lambda x: isinstance(x, (int, float)) and 0 <= x <= 1  # noqa: E731
    base.refuse(
        (not (one or whole(H) and H >= 1), f"H is {H}: use a whole number of at least 1, or None for one round at the "
         "end"),
        *((getattr(method, name) not in known, f"{name} is {getattr(method, name)!r}: use one of {known}")
          for name, known in dict(C=tuple(UNIT), W2=("all", "pair", "ring"), W1=(None, "all", "pair", "ring"),
                                  sends=("progress", "weights")).items()),
        (flat.theta.dtype == torch.float64 and method.C != "none", f"C is {method.C!r} and the weights are fp64: use "
         "'none', or fp32 weights"),
        (len(flat.spans) != method.fragments, f"{len(flat.spans)} fragments in Flat, {method.fragments} in the method: "
         "make them the same"),
        (not one and whole(H) and method.fragments > H, f"fragments is {method.fragments}, more than H {H}: use fewer"),
        (one and (method.tau != 0 or method.early), "H is None, one round that lands at once: use tau=0, early=False"),
        (not one and whole(H) and method.tau is not None and not (whole(method.tau) and 0 <= method.tau < H), f"tau is "
         f"{method.tau}: a round lands before the next is launched: use a whole number below H {H}, or None for all "
         "of a round"),
        (method.early and not method.W1, "early is about mixed anchors: use W1, too"),
        (not share(method.alpha), f"alpha is {method.alpha}: use 0 to 1"),
        (not (method.beta is None or share(method.beta)), f"beta is {method.beta}: use 0 to 1, or None"),
        (not isinstance(outer, Outer), f"outer is {outer!r}: use Outer(lr, momentum, nesterov=True)"),
        (isinstance(outer, Outer) and (outer.penalty or outer.clip is not None) and not outer.momentum, "penalty and "
         "clip speak of the momentum: use a momentum above 0"),
        (len(flat.theta) != len(transport.ranks), f"{len(flat.theta)} models for {len(transport.ranks)} ranks of this "
         "transport: pass one each"),
    )


class Part(NamedTuple):
    """What a round sends: payload (L, units, bytes) uint8; W (M, M): who needs whose. combine: None, or a function
    (stack (J, units, bytes)) -> (1, units, bytes) that adds up all: then each worker does that for its own chunk, and
    the result is gathered. counted: whether bytes_sent counts it."""

    payload: torch.Tensor
    W: np.ndarray
    combine: object = None
    counted: bool = True


class Arrived(NamedTuple):
    """stack (J, units, bytes) of the senders, or of their sum; weights (L, J): what this process's rows take of it."""

    stack: torch.Tensor
    weights: np.ndarray


class Outcome(NamedTuple):
    """What a launch led to: an Arrived for each Part, and what the workers agreed on with it: join, stop, halt."""

    parts: list
    notes: dict


class Sim:
    """M workers in this process: every rank's rows are here, a launch has arrived when it returns. silent(step): ranks
    that take no part in rounds of that step: their theta, phi, m and e stay as they are.

    bytes_sent is that of a mean worker, by the sizes of what Dist would have handed over."""

    def __init__(self, size, silent=None):
        base.refuse((size < 1, f"size is {size}: use at least 1 worker"))
        self.size, self.silent, self.bytes_sent = size, silent, 0.0
        self.ranks = self.members = tuple(range(size))
        self.wishes = {"join": []}

    def live(self, step=math.inf):
        """(M,): 1, or 0 for who is silent in the rounds of a step; inf: asked for something else than a round."""
        quiet = self.silent(step) if self.silent and step < math.inf else ()
        return np.array([float(rank not in quiet) for rank in self.ranks])

    def launch(self, parts):
        arrived = []
        for payload, W, combine, counted in parts:
            _, units, size = payload.shape
            if combine:
                arrived.append(Arrived(combine(payload), np.ones((self.size, 1))))
                self.bytes_sent += 2 * (self.size - 1) * math.ceil(units / self.size) * size * counted
            else:
                arrived.append(Arrived(payload, W))
                sends = int((W != 0).sum() - (np.diag(W) != 0).sum())
                self.bytes_sent += sends * units * size * counted / self.size
        done = concurrent.futures.Future()
        done.set_result(Outcome(arrived, dict(self.wishes)))
        return done

    def ask(self, what, text):
        self.wishes[what] = text

    def close(self):
        pass


# ==== 7. The mechanism, as long as nobody is lost =====================================================================
#
#     step()      t += 1; begin() the fragments whose turn it is; land() what is due
#     begin(f)    x = Delta + beta e of fragment f -> payload, and what it leaves of x       phi, m, e are not touched
#     launch(r)   draw W2 and W1 of this round; hand the payload (and the anchors) to the transport, which sends it
#                 while the caller goes on with its inner steps
#     land(r)     wait for what is not here yet (blocked_seconds); D = W2 sent, bar = W1 phi; outer step; blend
#
# A fragment's turn comes every H steps, the fragments' turns spread evenly: of three with H = 30 the first has the
# steps 30, 60, ..., the second 10, 40, ..., the third 20, 50, ... Nothing of phi, m, e is changed before all of a round
# is here: a round that fails (section 9) leaves no trace, and is launched again with the same payload.


@dataclass
class Round:
    """A launch that has not landed: fragment, step of launch and landing, the number that its pairs are drawn from, the
    payload (L, units, bytes), what that left of x (with error feedback), who is counted (M,), the future Outcome."""

    fragment: int
    step: int
    due: int
    number: int
    payload: torch.Tensor
    left: torch.Tensor | None
    live: np.ndarray = None
    future: object = None


class Mechanism:
    """Rounds without losses; make_sync makes a Sync of it, and has the description."""

    def __init__(self, method, flat, transport, seed=0, companion=None):
        self.method, self.flat, self.transport = method, flat, transport
        self.seed, self.companion, self.theta = seed, companion, flat.theta
        flat.gather()
        self.phi = self.theta.clone()
        self.m = torch.zeros_like(self.phi) if method.outer.momentum else None
        self.e = torch.zeros_like(self.phi) if method.beta is not None else None
        count = len(flat.spans)
        self.steps, self.launched, self.rounds = 0, [0] * count, [0] * count
        self.pending, self.early, self.blocked_seconds = [], [None] * count, 0.0
        self.aborted, self.notes, self.joining = 0, {}, []  # launches in a row; what rounds agreed on; who asked

    @property
    def bytes_sent(self):
        """Bytes that this worker has sent (Sim: a mean worker)."""
        return int(self.transport.bytes_sent)

    def step(self):
        """After every inner step. Launches the fragments whose turn it is, then lands what is due."""
        self.steps += 1
        turns = [f for f in range(len(self.flat.spans)) if self.turn(f, self.steps - 1) == self.steps]
        if turns or any(r.due <= self.steps for r in self.pending):
            self.flat.gather()
            for fragment in turns:
                self.begin(fragment)
            for r in [r for r in self.pending if r.due <= self.steps]:
                self.land(r)
            self.flat.scatter()

    def turn(self, fragment, after):
        """The first step after step `after` at which a fragment is launched."""
        H = self.method.H
        return after + 1 + (fragment * H // len(self.flat.spans) - after - 1) % H if H else math.inf

    def begin(self, fragment):
        method, span = self.method, self.flat.spans[fragment]
        phi, theta = self.phi[:, span], self.theta[:, span]  # (L, n)
        if not theta.sum().isfinite():
            raise base.BadInput(f"step {self.steps}: weights are not finite: go on from the last checkpoint, with a "
                                "lower rate")
        x = phi - theta if method.sends == "progress" else theta
        if self.e is not None:
            x = x + method.beta * self.e[:, span]
        payload = encode(method.C, x)
        left = None if self.e is None else x - decode(method.C, payload, x.shape[1], x.dtype)
        tau = method.H if method.tau is None else method.tau
        if method.tau is None and method.sends == "progress" and not self.in_flight(fragment):
            theta.copy_(phi)  # nothing lands after the first round, yet its progress is on its way: start over
        self.pending.append(Round(fragment, self.steps, self.steps + tau, self.number(fragment), payload, left))
        if self.early[fragment] is None:  # before the first round nothing was mixed
            self.mix_early(fragment)
        self.launched[fragment], self.rounds[fragment] = self.steps, self.rounds[fragment] + 1
        self.launch(self.pending[-1])

    def number(self, fragment):
        """Of the fragment's next round: the same for all workers."""
        return self.rounds[fragment] * len(self.flat.spans) + fragment

    def in_flight(self, fragment):
        """The first Round of the fragment that has not landed, or None."""
        return next((r for r in self.pending if r.fragment == fragment), None)

    def launch(self, r):
        """Hand a round to the transport, over whoever lives now."""
        method = self.method
        r.live = self.transport.live(r.step)
        W2 = mixing(method.W2, r.number, r.live, self.seed)
        parts = [Part(r.payload, W2, self.adder(method.C, W2) if method.reduces else None)]
        if method.W1 and not method.early:
            parts.append(self.anchors(r.fragment, r.number, r.live))
        r.future = self.transport.launch(parts)

    def anchors(self, fragment, number, live):
        """The anchors themselves, as they are now, for W1."""
        W1 = mixing(self.method.W1, number, live, self.seed)
        return Part(encode("none", self.phi[:, self.flat.spans[fragment]]), W1)

    def adder(self, C, W):
        """combine() of a mean that is the same for all: of a row of W, in the order of ranks."""
        row = W[self.transport.members[0], list(self.transport.members)][None]  # (1, J)
        return lambda stack: encode(C, self.decoded(C, Arrived(stack, row), stack.shape[1] * UNIT[C][0]))

    def decoded(self, C, arrived, n):
        if arrived.stack.is_cuda:  # it was made on the thread's stream
            arrived.stack.record_stream(torch.cuda.current_stream())
        return weighted_sum(C, *arrived, n, self.theta.dtype)  # (L, n)

    def mix_early(self, *fragments):
        """W1 phi (of all fragments) for the round in flight, or else the next one, is sent while that computes."""
        for fragment in (fragments or range(len(self.flat.spans))) if self.method.early else ():
            r = self.in_flight(fragment)
            number, step = (r.number, r.step) if r else (self.number(fragment), self.turn(fragment, self.steps))
            part = self.anchors(fragment, number, self.transport.live(step))
            self.early[fragment] = self.transport.launch([part])

    def land(self, r):
        """The outer step of a fragment. Nothing is touched before all of it is here. (receive, admit: section 9's.)"""
        method, span = self.method, self.flat.spans[r.fragment]
        arrived = self.receive(r)
        self.pending.remove(r)
        D = self.decoded(method.C, arrived[0], span.stop - span.start)
        bar = [self.decoded("none", part, D.shape[1]) for part in arrived[1:]]
        if r.live.any():  # not everybody was silent
            self.apply(r, span, D, *bar)
        self.mix_early(r.fragment)
        self.admit()

    def apply(self, r, span, D, bar=None):
        """phi, m, theta and e of this process's rows take the step; rows of a Sim that were silent do not."""
        method, phi, theta = self.method, self.phi[:, span], self.theta[:, span]  # (L, n)
        quiet = np.flatnonzero(r.live == 0) if self.transport.silent else ()
        states = [x for x in (self.phi, self.m, self.theta, self.e) if x is not None and len(quiet)]
        kept = [x[quiet, span] for x in states]
        if method.sends == "progress":
            m = None if self.m is None else self.m[:, span]
            outer_step(method.outer, phi, m, D, phi if bar is None else bar)
            blend(theta, phi, method.alpha)
        else:
            phi.copy_(D)
            theta.add_(D - decode(method.C, r.payload, D.shape[1], D.dtype))
        if r.left is not None:
            self.e[:, span] = r.left
        for x, before in zip(states, kept, strict=True):
            x[quiet, span] = before


# ==== 8. Over torch.distributed =======================================================================================
#
# One worker is one process. A thread of its own does everything that waits for others, in the order of the launches,
# while the caller computes on; so calls of all processes meet in the same order, which gloo and NCCL both demand.
#
#     caller    --o--o--launch--o--o--o--land            on GPUs the thread has a stream of its own, which waits
#                          \             /  result()     for an event: what the caller had computed at launch
#     thread                move | vote
#
# Why not simply all_reduce? Codes cannot be added as they are, and the order of a library's sum depends on the number
# of ranks, on sizes, on the network. Here whoever adds up does so in the order of ranks, and tells the result to all:
# they have the same bits, whatever the transport, and after a loss the bits of a group that had always been so small.
#
# Three ways to move a Part: all to all and back (`combine`: each adds up its chunk), one all-gather (everybody needs
# all), or messages between those whom W joins. What arrived counts only when ALL have it, by 05's vote: a connection
# that breaks may have delivered to one and not to the other, and no round may be applied by half of the workers.


class Wire(parallel.Membership):
    """One worker's end of the group. (Dist, below, lets workers come and go; it has the arguments' description.)"""

    def __init__(self, device="cpu", timeout=60.0, grace=None, rank=None, group=None):
        late, self.group = rank is not None, group
        rank, size = (rank, 0) if late else (dist.get_rank(group), dist.get_world_size(group))
        super().__init__(rank, range(size), timeout, grace, device)
        self.ranks, self.size = (rank,), max(size, rank + 1)
        self.bytes_sent, self.broken, self.error = 0.0, False, ""
        # Section 9's: {rank: step at which it came, if later than we}; requests dealt with; how often we have asked.
        self.joined, self.handled, self.asked = {}, 0, 0
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        enter = dict(initializer=torch.cuda.set_device, initargs=(self.device,)) if cuda else {}
        self.thread = concurrent.futures.ThreadPoolExecutor(1, **enter)
        if cuda:  # NCCL connects at the first message of a kind, which takes it half a second: now
            ones, add_up = np.ones((self.size,) * 2), lambda stack: stack[:1]
            payload = torch.zeros(1, self.size, BLOCK, dtype=torch.uint8, device=device)
            self.launch([Part(payload, ones, add_up, False), Part(payload, ones, None, False)]).result()
        elif not late and group is None:  # the same group, but its calls end after our timeout
            dist.barrier()  # or who is still connecting would see us leave
            dist.destroy_process_group()
            self.connect()

    def launch(self, parts):
        """Start to send; .result() is an Outcome, or None if the round was aborted."""
        ready = None if self.stream is None else torch.cuda.current_stream().record_event()
        return self.thread.submit(self.exchange, parts, ready)

    def exchange(self, parts, ready):
        if self.broken:
            return None
        arrived, good = [], True
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            try:
                if self.stream is not None:
                    self.stream.wait_event(ready)
                arrived = [self.move(part) for part in parts]
                if self.stream is not None:
                    self.stream.synchronize()  # it has arrived, or the vote would be about nothing
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a connection broke, or waited too long
                good, self.error = False, str(error)  # (its traceback would keep the old group's connections open)
        notes = self.vote(good)
        self.broken = notes is None
        return None if self.broken else Outcome(arrived, notes)

    def move(self, part):
        """The Arrived of a Part; senders in the order of ranks."""
        if part.combine:
            return Arrived(self.reduce(part), np.ones((1, 1)))
        members = list(self.members)
        senders = [j for j in members if j == self.rank or part.W[self.rank, j] != 0]
        to = [k for k in members if k != self.rank and part.W[k, self.rank] != 0]
        payload = part.payload[0]  # (units, bytes)
        stack = payload.new_empty(len(senders), *payload.shape)
        if (part.W[np.ix_(members, members)] != 0).all():
            self.done(dist.all_gather(list(stack), payload, group=self.group, async_op=True))
        else:
            stack[senders.index(self.rank)] = payload
            op = functools.partial(dist.P2POp, group=self.group)  # which counts the present members
            calls = [op(dist.isend, payload, group_peer=members.index(k)) for k in to]
            calls += [op(dist.irecv, x, group_peer=members.index(j)) for j, x in zip(senders, stack, strict=True)
                      if j != self.rank]
            for work in dist.batch_isend_irecv(calls) if calls else ():
                self.done(work)
        self.bytes_sent += part.counted * len(to) * payload.numel()
        return Arrived(stack, part.W[[self.rank]][:, senders])

    def reduce(self, part):
        """Each worker gets its chunk of all, adds up, codes the sum, and all gather the sums: (1, units, bytes)."""
        payload, J = part.payload[0], len(self.members)
        chunks = F.pad(payload, (0, 0, 0, -len(payload) % J)).unflatten(0, (J, -1))  # (J, units / J, bytes)
        mine, sums = torch.empty_like(chunks), torch.empty_like(chunks)
        self.done(dist.all_to_all_single(mine, chunks, group=self.group, async_op=True))
        total = part.combine(mine)[0]
        self.done(dist.all_gather(list(sums), total, group=self.group, async_op=True))
        self.bytes_sent += part.counted * 2 * (J - 1) * total.numel()
        return sums.flatten(0, 1)[None, : len(payload)]

    def done(self, work):
        """gloo: wait for it, no longer than `timeout`. NCCL: have the stream wait; its watchdog keeps the time."""
        work.wait(**dict(timeout=datetime.timedelta(seconds=self.timeout)) if self.stream is None else {})

    def close(self):
        self.thread.shutdown()


# ==== 9. Losing and winning a worker (skip on a first reading) ========================================================
#
# Workers that meet only at rounds can do without one of them: a round is a mean, and a mean of three will do. 05's
# section 13 has the agreement, through a store that outlives them: the vote on each launch, meet() for who is left,
# connect() for a group of those. On top of it, the story of worker 2 that is killed, and of worker 4 in its place:
#
#     worker 0, 1, 3                                      worker 2          worker 4
#     o  o  o  launch                                     o  o  x killed
#              no message from 2, or gone/2 in the store:
#              the vote says null, for all alike                            starts with the weights of step 0
#     recover  meet, connect: a group of 0, 1, 3                            requests += "4.0": its first try
#              launch again all that is in flight,                          (waits for invitation/4.0)
#              the same payloads: means of three
#              the vote reads requests, says join: [4]
#              and writes invitation/4.0 = the next group
#     land     outer step
#     admit    meet with 4 expected, connect  <-----------------------------  meet, connect
#              the donor (who has been there longest)  -- steps, phi, m, optimizer -->  theta = phi, e = 0
#              launch again what is in flight;                              takes part, with no progress of its own
#     o  o  o  from the next launch on 4 is counted                         in what began before it
#
# Three rules keep it exact. A round is landed by all or by none (the vote). Whoever joins does so where all have just
# landed the same round (admit), so that it knows what comes next. And who joins is not counted in rounds that began
# without it: its zeros in the mean would pull all others back to the anchor (--break joiner-as-zeros).
#
# A worker that was only silent for too long finds that the others have gone on without it: Missed. It cannot come back
# as itself, only be replaced like one that was killed. And one whose own weights are of no use (NaN) can say so:
# surrender() puts "halt" into the next verdict, and all stop at the same step.


class Missed(ConnectionError):
    """The others have gone on without this worker."""


class Dist(Wire):
    """One worker of a torch.distributed group (gloo or NCCL), which may shrink and grow again over gloo.

    timeout, grace: 05's; timeout includes the slowest worker's way to a round. rank: given only by a worker that joins
    a group at work, under a number of its own, after as many Dist objects as the others made before. group: the workers
    are this part of all processes: 05's tensor parallelism cuts each worker over several, and there is a group for each
    cut. The verdict is then of all processes, so that no cut is a round ahead of another, and after an abort the run
    ends: a worker that lost a part is of no use."""

    silent = None

    def live(self, step=math.inf):
        """(M,): 1 for members, but for who joined at this step or later: it hears, and is not counted."""
        return np.array([float(r in self.members and self.joined.get(r, -1) < step) for r in range(self.size)])

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
        requests = f"{self.prefix}/requests"  # "4.0 5.0 4.1 ": tickets, worker and attempt, in the order of asking
        asked = self.store.get(requests).decode().split() if self.store.check([requests]) else []
        tickets = asked[self.handled :]
        join = sorted({int(ticket.split(".")[0]) for ticket in tickets})
        notes = dict(handled=len(asked), tickets=tickets, join=join)
        for what in ("stop", "halt"):
            if self.store.check([f"{self.prefix}/{what}"]):
                notes[what] = self.store.get(f"{self.prefix}/{what}").decode()
        return notes

    def ask(self, what, text):
        """Have `what` ("stop", "halt") in the notes of the next round, for all workers alike."""
        self.thread.submit(self.store.set, f"{self.prefix}/{what}", text)

    def reform(self, step, joining=()):
        """A new group of whoever is there, and of those who join. Missed when this worker is not in it."""
        if self.group is not None:
            raise ConnectionError(f"step {step}: a process was lost, and with it a part of a worker: use --resume "
                                  "to go on with as many processes as before")
        if not self.thread.submit(self.regroup, step, joining).result():
            raise Missed(f"step {step}: the other workers have gone on without this one: start another in its place")

    def regroup(self, step, joining, patience=None):
        """Whether this worker is in the new group. On the thread, like all that waits."""
        def news(members):  # for those who join, and so that all say the same
            donor = min((r for r in members if r not in joining), key=lambda r: (self.joined.get(r, -1), r))
            joined = {r: step for r in joining} | self.joined
            return dict(joined=[(r, joined[r]) for r in members if r in joined], donor=donor, handled=self.handled)

        for _ in range(self.size + 3):  # somebody else may fall while the group forms
            told = self.meet(joining, news, patience)
            if told is None:
                return False
            self.joined, self.donor, self.handled = dict(told["joined"]), told["donor"], told["handled"]
            self.size, self.broken = max(self.size, *(r + 1 for r in self.members)), False
            with contextlib.suppress(RuntimeError):
                self.connect()
                return True
        raise RuntimeError(f"no group could be formed in {self.size + 3} attempts: check the network between workers")

    def enter(self, patience=600.0):
        """Ask to join a group at work, and wait for its next round. On the thread."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):  # the store's, of a wait that took too long
            while (left := deadline - time.monotonic()) > 0:  # again, if the group went on without us after all
                ticket, self.asked = f"{self.rank}.{self.asked}", self.asked + 1
                self.store.append(f"{self.prefix}/requests", f"{ticket} ")  # at once: no half of a request can be seen
                invitation = f"{self.prefix}/invitation/{ticket}"
                self.store.wait([invitation], datetime.timedelta(seconds=left))
                self.epoch, self.members = int(self.store.get(invitation)) - 1, ()
                if self.regroup(0, (), max(1.0, deadline - time.monotonic())):
                    return
        raise RuntimeError(f"not admitted to the group within {patience:.0f} s: is anybody left in it?")

    def give(self, state, to):
        """Send an object to those of the ranks `to` that have come."""
        for rank in set(to) & set(self.members):
            with contextlib.suppress(RuntimeError):  # it fell again: the next round will notice
                self.thread.submit(dist.send_object_list, [state], self.members.index(rank)).result()

    def take(self):
        """The donor's object, or None if it fell."""
        state = [None]
        with contextlib.suppress(RuntimeError):
            self.thread.submit(dist.recv_object_list, state, self.members.index(self.donor)).result()
        return state[0]


class Survivor(Mechanism):
    """The mechanism, with workers that come and go."""

    def outcome(self, future):
        """The Outcome, or None if it was aborted: the group is another then, and all in flight launched again."""
        began = time.perf_counter()
        outcome = future.result()
        self.blocked_seconds += time.perf_counter() - began
        if outcome is None:
            self.recover()
        else:
            self.aborted = 0
            self.notes |= outcome.notes
            self.joining += outcome.notes["join"]
        return outcome

    def futures(self, r):
        """What a landing waits for."""
        return [r.future, self.early[r.fragment]] if self.method.early else [r.future]

    def receive(self, r):
        """The Arrived of a round, from whoever is left by then."""
        while True:
            parts = []
            for future in self.futures(r):
                if (outcome := self.outcome(future)) is None:
                    break  # r has other futures now
                parts += outcome.parts
            else:
                return parts

    def insist(self, part):
        """The Arrived of a Part that part() makes for the members there are, whoever is left by then."""
        while (outcome := self.outcome(self.transport.launch([part()]))) is None:
            pass
        return outcome.parts[0]

    def recover(self):
        """A round was aborted: go on with whoever is left."""
        self.aborted += 1
        if self.aborted > 3 + self.transport.size:
            raise RuntimeError(f"step {self.steps}: {self.aborted} launches in a row were aborted: do all workers call "
                               "step(), collect(), synchronised() and finish() in the same order? Or else: "
                               f"{self.transport.error}")
        self.joining = []  # they were invited to the group that forms now without them, and will ask again
        self.transport.reform(self.steps)
        self.launch_again()

    def launch_again(self):
        """Everything in flight, over the present members: the same payloads, of which other chunks are cut."""
        self.mix_early()
        for r in self.pending:
            self.launch(r)

    def admit(self):
        """All members come here after the same landing, and nowhere else, so that a newcomer knows what comes next; if
        somebody asked to join, the donor gives them what they need."""
        joining, self.joining = self.joining, []
        if not joining:
            return
        self.transport.reform(self.steps, joining)
        if self.transport.donor == self.transport.rank:
            flight = [(r.fragment, r.step, r.due, r.number) for r in self.pending]
            self.transport.give(dict(
                steps=self.steps, rounds=self.rounds, launched=self.launched, flight=flight, phi=self.phi, m=self.m,
                notes=self.notes, companion=self.companion and self.companion.state_dict()), joining)
        self.launch_again()

    def join(self):
        """Become a member of a group at work: from the donor's anchors, counted from the next launch on."""
        state = None
        while state is None:  # the donor may fall, too
            self.transport.thread.submit(self.transport.enter).result()
            state = self.transport.take()
        self.steps, self.rounds, self.launched = state["steps"], state["rounds"], state["launched"]
        self.notes |= state["notes"]  # what the round that admits us has agreed on, a stop for example
        for mine, theirs in ((self.phi, state["phi"]), (self.theta, state["phi"]), (self.m, state["m"])):
            if mine is not None:
                mine.copy_(theirs)
        if self.companion is not None:
            self.companion.load_state_dict(state["companion"])
        self.flat.scatter()
        for fragment, *rest in state["flight"]:  # rounds that began without us: nothing to say, but we listen
            phi = self.phi[:, self.flat.spans[fragment]]
            nothing = torch.zeros_like(phi) if self.method.sends == "progress" else phi
            left = None if self.e is None else nothing
            self.pending.append(Round(fragment, *rest, encode(self.method.C, nothing), left))
        self.launch_again()

    def surrender(self, text):
        """This worker's weights are of no use: go back to the anchor, and have all workers stop after the next round,
        with `text` in their notes."""
        self.theta.copy_(self.phi)
        self.flat.scatter()
        self.transport.ask("halt", text)


# ==== 10. For a training loop =========================================================================================
#
# What differs between workers, and what must not, at a checkpoint in the middle of a round:
#
#     theta, the inner optimizer's moments, e     each worker's own            steps, rounds, launched    alike
#     phi, m    alike, to the bit; under pairs and rings each worker's own     pairs of rounds to come    from the seed
#
# A checkpoint may fall between a launch and its landing. What is in flight belongs to the state: this worker's payload,
# which is launched again when the state is loaded. Each worker has a state of its own, as theta differs; at the end,
# after finish(), phi is the same for all, or for gossip nearly so, and synchronised() has the mean of all.


class Sync(Survivor):
    """What make_sync returns, which has the description."""

    def restart(self, steps):
        """Before any step(): the models have other weights, alike and of step `steps`; they are the anchor now."""
        self.flat.gather()
        self.steps, self.launched = steps, [steps] * len(self.launched)
        self.phi.copy_(self.theta)

    def resident(self):
        """Tensors that this holds from step to step, beyond views of parameters."""
        return [t for t in (self.phi, self.m, self.e) if t is not None] + [view for _, view, _ in self.flat.copied]

    def collect(self, values):
        """values (L, k) of any numeric dtype -> (members, k) fp64 on the CPU, the same for all, by rank."""
        payload = as_bytes(values.detach().double().to(self.theta.device))[:, None]
        arrived = self.insist(lambda: Part(payload, np.ones((self.transport.size,) * 2)))
        return arrived.stack.cpu().view(torch.float64).flatten(1)

    def finish(self):
        """At the end of training: land what is in flight, then one last round of everything that moved since."""
        self.flat.gather()
        self.land_all()
        for fragment in range(len(self.flat.spans)):
            if self.launched[fragment] < self.steps:
                self.begin(fragment)
                self.land_all()
        self.flat.scatter()

    def land_all(self):
        while self.pending:
            self.land(self.pending[0])

    @contextlib.contextmanager
    def synchronised(self):
        """Inside the block the models hold the synchronised weights: the mean of the anchors over all workers. Where
        these differ they are sent, which bytes_sent does not count: it is only looked at."""
        self.flat.gather()
        kept, mean = self.theta.clone(), self.mean_anchor()
        self.theta.copy_(mean)
        self.flat.scatter()
        try:
            yield
        finally:
            self.theta.copy_(kept)
            self.flat.scatter()

    def mean_anchor(self):
        method = self.method
        if not method.H:  # the last round has been, or will be
            return self.phi if self.launched[0] == self.steps > 0 else self.mean_of(self.theta)
        alike = method.W2 == "all" and not method.W1 and not self.transport.silent
        return self.phi if alike else self.mean_of(self.phi)

    def mean_of(self, x):
        def part():
            W = mixing("all", 0, self.transport.live())
            return Part(encode("none", x), W, self.adder("none", W), counted=False)

        return self.decoded("none", self.insist(part), x.shape[1])

    def state_dict(self):
        """All that a bitwise continuation needs beyond model and optimizer: tensors in use, not copies."""
        self.flat.gather()
        flight = [{name: x for name, x in vars(r).items() if name not in ("live", "future")} for r in self.pending]
        return dict(method=repr(self.method), steps=self.steps, rounds=self.rounds, launched=self.launched,
                    theta=self.theta, phi=self.phi, m=self.m, e=self.e, flight=flight,
                    bytes_sent=self.transport.bytes_sent, blocked_seconds=self.blocked_seconds)

    def load_state_dict(self, saved):
        """By all workers at once, before their first step(). ValueError, and nothing changed, if it is of another
        method or shape."""
        base.refuse(
            (saved["method"] != repr(self.method), f"saved by {saved['method']}, this is {self.method!r}: use the same "
             "method and settings"),
            (saved["theta"].shape != self.theta.shape, f"saved weights {tuple(saved['theta'].shape)}, these are "
             f"{tuple(self.theta.shape)}: load them into the same model and number of workers"),
        )
        self.steps, self.rounds, self.launched = saved["steps"], list(saved["rounds"]), list(saved["launched"])
        for name in ("theta", "phi", "m", "e"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(saved[name])
        self.transport.bytes_sent, self.blocked_seconds = saved["bytes_sent"], saved["blocked_seconds"]
        self.flat.scatter()
        to = lambda x: x.to(self.theta.device) if isinstance(x, torch.Tensor) else x  # noqa: E731
        self.pending = [Round(**{name: to(value) for name, value in r.items()}) for r in saved["flight"]]
        self.launch_again()


def make_sync(method, model, transport, *, seed=0, companion=None, **overrides):
    """The synchronisation of a model by a method of METHODS.

    model: a module, a list of modules (one for each rank of a Sim), or a Flat with as many fragments as the method.
    transport: Sim(M), or Dist() in each of M processes. seed: of the pairs, the same for all workers. companion:
    something with state_dict and load_state_dict (the optimizer) that a worker who joins takes over from its donor.
    overrides: fields of Method, say H=100, C="uint8", outer=Outer(0.4, 0.9, nesterov=True).

    step() after every inner step; synchronised(): a block in which the model has the weights to evaluate; finish() at
    the end; state_dict() and load_state_dict(); bytes_sent, blocked_seconds; notes: "stop" or "halt", if somebody
    asked for it (transport.ask) before the last round. ValueError on arguments that do not fit; Missed (a
    ConnectionError) in a worker that the others went on without.

        sync = make_sync("streaming", model, Dist(), H=30)
        for x in data:
            train_step(model, x)
            sync.step()
    """
    fields = [field.name for field in dataclasses.fields(Method)]
    unknown = sorted(set(overrides) - set(fields))
    base.refuse(
        (method not in METHODS, f"method is {method!r}: use one of {', '.join(METHODS)}"),
        (unknown, f"{', '.join(unknown)}: no part of a method: use {', '.join(fields)}"),
    )
    method = dataclasses.replace(METHODS[method], **overrides)
    models = model if isinstance(model, (list, tuple)) else [model]
    flat = model if isinstance(model, Flat) else Flat(models, method.fragments)
    check_method(method, flat, transport)
    return Sync(method, flat, transport, seed, companion)


# ==== 11. Just One Byte: no gradients on the wire at all ==============================================================
#
# Two forward passes at theta + eps z and theta - eps z, with a random direction z, estimate the slope along z:
#
#     g = (L(theta + eps z) - L(theta - eps z)) / (2 eps)          and g z is, in the mean over z, the gradient (SPSA)
#
# z is drawn from (seed, step, rank, sample): whoever knows these can draw everybody's z. So all that workers need of
# each other is the number g, here a byte of it; then all apply - lr mean(g z), and stay alike to the bit. Who comes
# later replays the bytes: a run of a million steps of 8 workers is 8 MB. The price is noise, sqrt(P) times a gradient.


class OneByte:
    """Shared-randomness SPSA, arXiv 2306.10015. Workers have the same weights always, in a Flat, and ranks from 0 on. g
    is sent as a byte, 127 for `scale` and beyond."""

    def __init__(self, flat, transport, lr, eps=1e-3, scale=1.0, seed=0):
        self.flat, self.transport, self.lr, self.eps, self.scale, self.seed = flat, transport, lr, eps, scale, seed
        self.history = []  # bytes (ranks, samples) int8 of every step

    def direction(self, step, rank, sample):
        """z (P,)."""
        words = np.random.SeedSequence([self.seed, step, rank, sample]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0] >> 1))
        return torch.randn(self.flat.theta.shape[1], generator=generator).to(self.flat.theta.device)

    def slope(self, loss, row, z):
        """g of a row of theta."""
        theta = self.flat.theta[row]
        kept, values = theta.clone(), []
        for sign in (1, -1):
            theta.copy_(kept + sign * self.eps * z)
            values.append(loss().item())
        theta.copy_(kept)
        return (values[0] - values[1]) / (2 * self.eps)

    @torch.no_grad()
    def step(self, loss, samples=1):
        """loss(row, sample) -> scalar: of the model of this process's `row`, on one of its samples of this step."""
        step, codes = len(self.history), torch.zeros(len(self.flat.theta), samples, dtype=torch.int8)
        for row, rank in enumerate(self.transport.ranks):
            for sample in range(samples):
                z = self.direction(step, rank, sample)
                g = self.slope(functools.partial(loss, row, sample), row, z)
                codes[row, sample] = int(max(-127, min(127, round(127 * g / self.scale))))
        payload = as_bytes(codes.to(self.flat.theta.device))[:, None]
        outcome = self.transport.launch([Part(payload, np.ones((self.transport.size,) * 2))]).result()
        if outcome is None:
            raise ConnectionError("a worker was lost: start again, and replay history")
        self.replay([outcome.parts[0].stack[:, 0].view(torch.int8).cpu()])

    def replay(self, history):
        """Apply steps from their bytes alone."""
        for codes in history:
            step = len(self.history)
            for rank, row in enumerate(codes.tolist()):
                for sample, code in enumerate(row):
                    rate = self.lr * self.scale * code / 127 / codes.numel()
                    self.flat.theta.sub_(rate * self.direction(step, rank, sample))
            self.history.append(codes)


# ==== 12. Checks ======================================================================================================
#
# Most checks need no model and no training: an inner step is anything that moves theta, here noise of (step, rank), in
# wander(). Three oracles, each for what the one before cannot see: section 1's matrices for the mechanism's algebra, in
# fp64; M workers in one process for M processes, bit for bit; and for a run whose workers are killed, the same story
# told to a Sim, bit for bit, too. Codes are held against their own error bounds, transports against section 2's bytes.


def toys(count, device="cpu", dtype=torch.float32):
    """GPTs, alike and awkward: sizes that are no whole blocks, classifier and embedding tied, a weight frozen."""
    torch.manual_seed(0)
    model = base.GPT(base.GPTConfig(vocab=37, seq=8, layers=3, heads=2, dim=12)).to(device, dtype)
    model.classifier = model.embedding.weight
    model.blocks[0].norm1.requires_grad_(False)
    return [copy.deepcopy(model) for _ in range(count)]


def wander(sync, step, scale=0.01):
    """An inner step without a model: the weights move by noise of (step, rank), what lies between them does not."""
    inside = torch.cat([torch.arange(place.start, place.stop) for place in sync.flat.place.values()])
    for row, rank in zip(sync.theta, sync.transport.ranks, strict=True):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        row[inside] += (scale * torch.randn(len(inside), generator=generator, dtype=torch.float64)).to(row)


SHORT = {name: dict(H=4) if (method.H or 0) > 5 else {} for name, method in METHODS.items()}  # rounds, for checks
IN_FLIGHT = ("streaming", "co2", "bagua-async")  # methods with rounds in flight after 8, 9 or 13 steps
fleet = functools.partial(parallel.fleet, stage=globals(), device="cpu", timeout=300)


def travel(method, M=4, steps=13, device="cpu", transport=None, saved=None, **overrides):
    """A Sync after `steps` steps of wander; after `saved` of them its state goes to a file, and from there to a new
    one, in the middle of a round, or even of a transfer."""
    transport, overrides = transport or Sim(M), SHORT[method] | overrides
    sync = make_sync(method, toys(len(transport.ranks), device), transport, **overrides)
    for step in range(steps):
        wander(sync, step)
        sync.step()
        if step + 1 == saved:
            for r in sync.pending:
                r.future.result()  # its bytes are counted now
            file = io.BytesIO()
            torch.save(sync.state_dict(), file)
            file.seek(0)
            transport.bytes_sent = 0.0
            sync = make_sync(method, toys(len(transport.ranks), device), transport, **overrides)
            sync.load_state_dict(torch.load(file, weights_only=True))
    return sync


def worst(a, b):
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def check_papers(device="cpu", M=5, steps=24):
    """After every step the mechanism has the weights and anchors of section 1's matrices; at the end their mean."""
    special = {"streaming": dict(H=6, alpha=0.3), "merge": dict(H=None), "sparseloco": dict(C="topk")}
    for name, (every, paper) in PAPERS.items():
        overrides = dict(H=every, C="none") | special.get(name, {})
        streams, exact = name == "streaming", overrides["C"] == "none"  # codes take fp32
        dtype, limit = (torch.float64, 1e-12) if exact else (torch.float32, 1e-5)
        sync = make_sync(name, toys(M, device, dtype), Sim(M), **overrides)
        s = SimpleNamespace(theta=sync.theta.clone(), phi=sync.phi.clone(), m=torch.zeros_like(sync.phi), e=0,
                            flying={} if streams else None, spans=sync.flat.spans)
        s.W = lambda kind, k: torch.tensor(mixing(kind, k, np.ones(M)), device=device)
        s.Q = lambda x: decode("topk", encode("topk", x), x.shape[1])
        for t in range(1, steps + 1):
            before = sync.theta.clone()
            wander(sync, t, 0.2 if t <= steps // 2 else 0.002)  # so that CO2's clip acts, and does not
            s.theta = s.theta + (sync.theta - before)
            sync.step()
            if t == steps and name == "merge":
                sync.finish()
            if streams:
                paper(s, t, alpha=0.3)  # not the paper's half, its own mirror image
            elif t % every == 0:
                paper(s, t // every - 1)
            for what in ("theta", "phi"):
                error = worst(getattr(sync, what), getattr(s, what))
                require(error <= limit, f"{name}, step {t}: {what} is {error:.0e} from the paper")
        with sync.synchronised():
            error = worst(sync.theta[0], s.phi.mean(0))
        require(error <= limit, f"{name}: synchronised() is {error:.0e} from the mean")


def check_data_parallel(device="cpu", M=3):
    """DiLoCo with inner SGD, H = 1, outer rate 1 and no momentum is data parallelism (fp64)."""
    *models, whole = toys(M + 1, device, torch.float64)
    sync = make_sync("diloco", models, Sim(M), H=1, outer=Outer())
    sgd = torch.optim.SGD([p for model in (*models, whole) for p in model.parameters()], 0.3)
    loss = lambda model, x: F.cross_entropy((model(x[0]) @ model.classifier.T).mT, x[1])  # noqa: E731
    for t in range(8):
        tokens = torch.randint(37, (M, 2, 6, 8), generator=torch.Generator().manual_seed(t)).to(device)
        sgd.zero_grad()
        sum(loss(model, x) + loss(whole, x) / M for model, x in zip(models, tokens, strict=True)).backward()
        sgd.step()
        sync.step()
    error = worst(sync.theta, Flat([whole]).theta)
    require(error <= 1e-12, f"{error:.1e} from data parallelism")


def check_codes(device="cpu", n=5000):
    """Payloads have the predicted size; errors are within what the codes allow; coding what was decoded changes
    nothing; sums are weighted sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, n, generator=generator).to(device) * 10.0 ** torch.arange(-2, 1, device=device)[:, None]
    x[0, 128:256], x[0, 256:384], x[1, :128], x[1, 200] = 0, 1e-42, 0.125, 3e30
    x[2, :8] = torch.tensor([0.9, -0.4, 0.1, 0.02, 0.01, 0.003, -0.003, 0.0078125])  # e3m0's example, and the half
    x[2, 8:128] = 0
    weights = np.array([[0.2, 0.0, 0.8], [1.0, 0.0, 0.0]])
    for C, (numbers, _) in UNIT.items():
        payload = encode(C, x)
        require(payload.shape[0] == 3 and payload[0].numel() == code_bytes(C, n), f"{C}: {tuple(payload.shape)}")
        told = decode(C, payload, n)
        groups, error = (F.pad(t, (0, -n % numbers)).unflatten(1, (-1, numbers)) for t in (x, told - x))
        top, spread = groups.abs().amax(2, True), groups.amax(2, True) - groups.amin(2, True)
        limit = {"none": 0, "uint8": spread / 509 + top * 1e-6, "e3m0": torch.maximum(groups.abs() / 3, top / 96),
                 "topk": math.inf}[C]
        require((error.abs() <= limit * 1.0001 + 1e-37).all(), f"{C}: an error beyond its codes' step")
        require(C == "uint8" or (told * x.sign() >= 0).all(), f"{C}: another sign")
        require(worst(decode(C, encode(C, told), n), told) <= 1e-6, f"{C}: coding what was decoded changes it")
        stack = payload.clone()
        stack[1] = 255  # anything, NaN for example
        total = weighted_sum(C, stack, weights, n)
        require(worst(total, torch.tensor(weights, dtype=x.dtype, device=device) @ told) <= 1e-5, f"{C}: not the sum")
    example = decode("e3m0", encode("e3m0", x), n)[2, :8].tolist()
    require(example == [1, -0.5, 2**-3, 2**-6, 2**-6, 0, 0, 2**-6], f"e3m0's example is {example}")
    for row, told in zip(x[2:].split(CHUNK, 1), decode("topk", encode("topk", x), n)[2:].split(CHUNK, 1), strict=True):
        kept = row.abs() >= row.abs().topk(KEPT).values[0, -1]
        mean = row[kept].abs().mean()
        for group in (kept & (row.abs() >= mean), kept & (row.abs() < mean)):
            require(worst(told[group], row[group].abs().mean() * row[group].sign()) <= 1e-6, "topk: not the two means")
        require((told[~kept] == 0).all(), "topk keeps a small one")


def check_mixing(M=5):
    """Rows are means of who speaks; nobody hears the silent, who keep their own; pairs and rings are what they say."""
    for live in np.eye(M + 1, M)[[M, 0, 3]] == 0:  # all speak; one does not
        for kind, heard in (("all", live.sum()), ("pair", 2), ("ring", 3)):
            W = mixing(kind, 7, live.astype(float))
            require(np.allclose(W, (W != 0) / (W != 0).sum(1, keepdims=True)), f"{kind}: no mean of those heard")
            own = W[:, ~live] == np.eye(M)[:, ~live]
            require((kind == "all" or own.all()) and not W[live][:, ~live].any(), f"{kind}: the silent are heard")
            odd = kind == "pair" and live.sum() % 2
            counts = sorted((W[live] != 0).sum(1))
            require(counts == [1] * odd + [heard] * (live.sum() - odd), f"{kind}: heard are {counts}")
            require(np.allclose(W[live][:, live], W[live][:, live].T), f"{kind}: who is heard does not hear")
    require(np.allclose(mixing("ring", 0, np.ones(2)), [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]), "a ring of two")
    require((mixing("all", 0, np.zeros(2)) == np.eye(2)).all(), "nobody speaks")


def check_bytes():
    """What the transport counts is what round_bytes predicts, scales, indices and the collective's factor included; to
    look at the mean is free."""
    require(travel("local-sgd", steps=0).blocked_seconds == 0, "blocked before it began")
    for name, method in METHODS.items():
        for M in (2, 5):
            sync, predicted = travel(name, M, 12), 0
            sync.finish()
            with sync.synchronised():
                pass
            early = receivers(method.W1, M) if method.early else 0  # the anchors for the round that never came
            for rounds, span in zip(sync.rounds, sync.flat.spans, strict=True):
                n = span.stop - span.start
                predicted += rounds * round_bytes(method, [n], M) + early * code_bytes("none", n)
            off = sync.bytes_sent - predicted
            require(predicted > 0 and abs(off) <= 1, f"{name}, M = {M}: {off} bytes more than {predicted:.0f}")


def check_utilisation():
    """Section 2's example, by hand: 1.6 s a transfer, 10 s of steps, 0.067 or 0.167 s of each piece hidden."""
    waits = 100 * (1.6 - 0.2 / 3), 1.6 - 0.2 / 3, 1.6 - 8 * 0.2 / 3, 1.6 - 8 * 0.5 / 3, 0
    for way, wait in zip(PUBLISHED, waits, strict=True):
        found = utilisation(1e10, way)
        require(abs(found * (10 + wait) / 10 - 1) < 1e-9, f"{way}: {found:.1%} of the time computes")
        least = needed_bandwidth(way, found)
        require(utilisation(least, way) >= found > utilisation(least / 1.21, way), f"{way}: {least / 1e9:.1f} Gbit/s")


def check_fragments():
    """Every trainable parameter is in exactly one fragment, a tied one once; parameters are views; padding stays 0."""
    for count in (1, 2, 3, 5):
        model = toys(1)[0]
        flat = Flat([model], count)
        inside, ends = torch.zeros(flat.theta.shape[1]), [0, *(span.stop for span in flat.spans)]
        require(flat.spans == [slice(*pair) for pair in itertools.pairwise(ends)] and ends == sorted(set(ends)),
                f"{count} fragments do not cover the weights once")
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        require(ends[-1] == len(inside) and set(flat.place) == names, "a parameter is missing, or twice")
        for name, place in flat.place.items():
            p = model.get_parameter(name)
            require(place.stop - place.start == p.numel() and place.start % BLOCK == 0, f"{name} has no room")
            require(p.data_ptr() == flat.theta[0, place].data_ptr(), f"{name} is no view of theta")
            inside[place] += 1
        require((inside <= 1).all(), "parameters overlap")
        require((flat.theta[0, inside == 0] == 0).all(), "there is something between the parameters")
    layers = fragments_of({f"blocks.{i}": 1 for i in range(6)} | {"head": 5, "norm": 1}, 3)
    require(layers == [["blocks.0", "blocks.3", "head"], ["blocks.1", "blocks.4", "norm"], ["blocks.2", "blocks.5"]],
            f"layers are dealt as {layers}")


def check_masters(device="cpu"):
    """Of a weight that an optimizer keeps in bf16, with a master copy in fp32, the master is synchronised, whatever is
    called; within synchronised() both have the anchor."""
    model = nn.Linear(200, 3, bias=False).to(device)
    flat, master = Flat([model]), model.weight.detach().clone()
    model.weight.data = master.bfloat16()
    flat.adopt([(model.weight, master)])
    sync = make_sync("local-sgd", flat, Sim(1), H=2)
    anchor = sync.phi[:, :600].view(3, 200)
    both_are = lambda told: torch.equal(master, told) and torch.equal(model.weight, told.bfloat16())  # noqa: E731
    for call in (lambda: (sync.step(), sync.step()), lambda: (sync.step(), sync.finish()), lambda: sync.restart(8)):
        told = master.add_(1e-4).clone()  # less than bf16 can tell at 0.07
        model.weight.data.copy_(master)
        call()
        require(worst(anchor, told) <= 1e-6, "the bf16 weight was synchronised")
        require(both_are(anchor), "master and weight did not get the anchor")
    told = master.add_(1).clone()
    model.weight.data.copy_(master)
    with sync.synchronised():
        require(both_are(anchor), "not the anchor's weights")
    require(both_are(told), "own weights are lost")
    master += 1
    require(torch.equal(sync.state_dict()["theta"][0, :600], master.flatten()), "the state lacks the master")


def check_feedback(device="cpu"):
    """Error feedback loses nothing: with beta = 1, all that was sent and what is left is all that there was."""
    alone = travel("merge", 2, 8, device)  # goes the same ways, and tells nobody
    start, end = alone.phi.double(), alone.theta.double().mean(0)
    for C in ("topk", "e3m0", "uint8"):
        sync = travel("sparseloco", 2, 8, device, H=1, beta=1.0, C=C)
        told = sync.phi.double() - sync.e.double().mean(0)  # e holds what phi - theta was not told
        error = worst(told - start, end - start)
        require(error <= 1e-5, f"{C}: sent and rest are {error:.1e} from the sum of all pseudo-gradients")


# NoLoCo's anchors never agree exactly. Without progress, let x be an anchor less the mean of all, d its momentum:
#
#     d' = mu d - pull (x - its pair's mean),  x' = x + d'              a linear recursion of (|x|^2, x.d, |d|^2)
#
# x less its pair's mean is h x on average, of squared length h |x|^2, where h = M / (2 (M - 1)). The largest eigenvalue
# is the factor a round. At (mu, pull) = (.5, .7) and M = 8 it is 0.67: anchors draw together; at (.9, .7) 1.07: they
# drift apart. (mu = .9 is stable for two workers, 0.90, and not for four, 1.04.)


def check_noloco(trials=40, M=8, rounds=8):
    """Anchors of NoLoCo draw together as fast as predicted at (mu, pull) = (.5, .7), and apart at (.9, .7)."""
    h, pull = M / (2 * (M - 1)), 0.7
    for mu in (0.5, 0.9):
        dd = np.array([pull**2 * h, -2 * mu * pull * h, mu**2])
        xd = np.array([-pull * h, mu, 0]) + dd
        xx = np.array([1 - 2 * pull * h, 2 * mu, 0]) + dd
        predicted = abs(np.linalg.eigvals(np.array([xx, xd, dd]))).max()
        squares = torch.zeros(rounds + 1, dtype=torch.float64)
        for trial in range(trials):
            models = [nn.Linear(BLOCK, 1, bias=False) for _ in range(M)]
            sync = make_sync("noloco", models, Sim(M), seed=trial, H=1, outer=Outer(1.0, mu, gain=0.7, pull=pull))
            sync.phi.copy_(torch.randn(M, BLOCK, generator=torch.Generator().manual_seed(trial)))
            for number in range(rounds + 1):
                sync.theta.copy_(sync.phi)
                squares[number] += sync.phi.double().var(0, correction=0).sum()
                sync.step()
        factor = (squares[-1] / squares[3]).item() ** (1 / (rounds - 3))
        require(abs(factor / predicted - 1) <= 0.05 and (factor > 1) == (mu > 0.5),
                f"momentum {mu}: variance times {factor:.3f} a round, predicted {predicted:.3f}")


def ring_steps(transport, steps):
    """D_LP_S for some steps of noise: w, L, R of this process's workers."""
    M, rows, heard = transport.size, list(transport.ranks), []
    read = lambda payload: decode("uint8", payload, 300)  # noqa: E731

    def Q(z):
        payload = encode("uint8", z)  # goes to all, for short: it is the neighbours' that a ring would send
        stack = transport.launch([Part(payload, np.ones((M, M)))]).result().parts[0].stack
        heard[:] = (read(stack.roll(side, 0)[rows]) for side in (1, -1))
        return read(payload)

    w = L = R = torch.zeros(len(rows), 300)
    for step in range(steps):
        noise = [torch.randn(300, generator=torch.Generator().manual_seed(100 * step + i)) for i in rows]
        w, L, R = d_lp_s(w + torch.stack(noise) * (step < 6), w, L, R, Q, lambda q: heard)
    return w, L, R


def check_ring():
    """D_LP_S: a copy of a neighbour's weights has the neighbour's bits, and the ring draws together."""
    for M in (2, 3, 5):
        w, L, R = ring_steps(Sim(M), 6)
        require(torch.equal(L, w.roll(1, 0)) and torch.equal(R, w.roll(-1, 0)), "a copy is not the neighbour")
        apart, later = (x.std(0).norm() for x in (w, ring_steps(Sim(M), 6 + 10 * M)[0]))
        require(0 < later < 0.1 * apart, f"M = {M}: the ring does not draw together: {later / apart:.2f}")


def check_silent(device="cpu"):
    """A silent worker is not averaged in, nor changed; the others' mean is over those who spoke."""
    sync = travel("local-sgd", 4, 3, device, Sim(4, lambda step: (1,) if step == 4 else ()), H=2)
    wander(sync, 3)
    before = sync.theta.clone()
    sync.step()
    require(torch.equal(sync.theta[1], before[1]), "the silent worker was changed")
    error = worst(sync.phi[[0, 2, 3]].double(), before[[0, 2, 3]].double().mean(0))
    require(error <= 1e-6, "the mean counts who did not speak")
    require(torch.equal(sync.phi[0], sync.phi[2]), "anchors of those who spoke differ")


def check_state(device="cpu"):
    """A run that is saved in the middle of a round and of a transfer, or just after a launch, and goes on anew, ends
    after as many rounds with the same bits."""
    for name, (steps, saved) in itertools.product(METHODS, ((12, 9), (8, 8))):
        whole, resumed = (travel(name, 4, steps, device, saved=when) for when in (None, saved))
        for sync in (whole, resumed):
            sync.finish()
        require(whole.rounds == resumed.rounds, f"{name}: {resumed.rounds} rounds, not {whole.rounds}")
        require(torch.equal(whole.theta, resumed.theta), f"{name}: other bits after going on from a state")
        again = resumed.bytes_sent - whole.bytes_sent  # what was in flight is sent again
        require((again > 0) == (name in (*IN_FLIGHT, "gossip")) and again >= 0, f"{name}: {again} more bytes")


def quadratic(transport, device="cpu"):
    """Just One Byte on |w|^2, whose slope along z is 2 w.z, exactly; and that loss."""
    flat = Flat([nn.Linear(20, 1, bias=False).to(device) for _ in transport.ranks])
    flat.theta[:, :20] = 1
    spsa = OneByte(flat, transport, lr=0.01, scale=40.0)
    return spsa, lambda row, sample: flat.theta[row, :20].double().square().sum()


def check_one_byte(device="cpu", M=3, samples=2):
    """The first step is the formula's; workers that tell each other a byte a sample keep the same weights, and learn;
    a latecomer replays to them."""
    spsa, loss = quadratic(Sim(M), device)
    w, first, unit = spsa.flat.theta[0].clone(), loss(0, 0).item(), 40 / 127
    z = torch.stack([spsa.direction(0, rank, sample) for rank in range(M) for sample in range(samples)])
    g = unit * (2 * z @ w / unit).round()
    spsa.step(loss, samples)
    error = worst(spsa.flat.theta[0], w - 0.01 * (g @ z) / len(z))
    require(error <= 1e-5, f"the first step is {error:.0e} from the formula")
    for _ in range(59):
        spsa.step(loss, samples)
    theta = spsa.flat.theta
    require(torch.equal(theta, theta[:1].expand_as(theta)), "weights differ between workers")
    require(loss(0, 0).item() < 0.5 * first, f"no progress: loss {loss(0, 0).item():.2f} from {first:.2f}")
    require(spsa.transport.bytes_sent == 60 * samples * (M - 1), f"{spsa.transport.bytes_sent} bytes, not one a sample")
    late, _ = quadratic(Sim(1), device)
    late.replay(spsa.history)
    require(torch.equal(late.flat.theta, theta[:1]), "who replays the bytes gets other weights")


def check_misuse():
    """Bad input is one clear line, and changes nothing."""
    def one(method="diloco", model=None, transport=None, **options):
        return make_sync(method, model or toys(1)[0], transport or Sim(1), **options)

    for words, options in (
        ("use one of local-sgd, diloco", dict(method="dilco")), ("no part of a method", dict(every=3)),
        ("H is 0", dict(H=0)), ("H is 2.5", dict(H=2.5)), ("C is 'int4'", dict(C="int4")),
        ("not enough layers", dict(fragments=9)), ("fragments is 0", dict(fragments=0)),
        ("more than H 2", dict(fragments=3, H=2)), ("tau is 30", dict(method="streaming", tau=30)),
        ("tau is 1.5", dict(tau=1.5)), ("use tau=0", dict(method="co2", H=None)), ("alpha is 1.5", dict(alpha=1.5)),
        ("use W1, too", dict(early=True)),
        ("beta is -1", dict(beta=-1)), ("W2 is None", dict(W2=None)), ("W1 is 'star'", dict(W1="star")),
        ("sends is 'theta'", dict(sends="theta")), ("use Outer(lr", dict(outer=(0.7, 0.9))),
        ("a momentum above 0", dict(outer=Outer(penalty=True))), ("a momentum above 0", dict(outer=Outer(clip=0.1))),
        ("1 models for 2 ranks", dict(transport=Sim(2))), ("fp64", dict(model=toys(1, dtype=torch.float64), C="uint8")),
        ("2 fragments in Flat", dict(model=Flat(toys(1), 2))),
        ("no trainable parameter", dict(model=nn.Linear(2, 2).requires_grad_(False))),
    ):
        must_raise(words, functools.partial(one, **options))
    must_raise("at least 1 worker", lambda: Sim(0))
    sync, other, two = one(H=1), one("local-sgd"), one(model=toys(2), transport=Sim(2), H=1)
    before = other.theta.clone()
    must_raise("saved by", lambda: other.load_state_dict(sync.state_dict()))
    must_raise("the same model", lambda: two.load_state_dict(sync.state_dict()))
    require(torch.equal(before, other.theta), "a refused state changed weights")
    sync.theta[0, 5] = math.nan
    must_raise("not finite", sync.step)


def across(transport=None):
    """What check_processes compares, of the workers of this process: {what: a row for each}; bytes by methods."""
    transport = transport or Dist(timeout=60, grace=5)
    found, sent = {}, {}
    for name in METHODS:
        sync = travel(name, steps=16, transport=transport, saved=13 if name in IN_FLIGHT else None)
        sync.finish()
        told = sync.collect(torch.tensor([[rank, 0.5] for rank in transport.ranks])).tolist()
        require(told == [[rank, 0.5] for rank in range(transport.size)], f"collect() gave {told}")
        found |= {f"{name}: theta": sync.theta.clone(), f"{name}: phi": sync.phi}
        with sync.synchronised():
            found[f"{name}: synchronised weights"] = sync.theta.clone()
        sent[name], transport.bytes_sent = sync.bytes_sent, 0.0
    spsa, loss = quadratic(transport)
    for _ in range(3):
        spsa.step(loss, 2)
    found["Just One Byte: weights"] = spsa.flat.theta
    found |= zip(("D_LP_S: w", "D_LP_S: L", "D_LP_S: R"), ring_steps(transport, 6), strict=True)
    if transport.ranks == (1,):
        transport.move = functools.partial(break_once, transport, transport.move)
    found["the broken round: phi"] = travel("local-sgd", steps=1, transport=transport, H=1).phi
    transport.close()
    return found, sent


def check_processes(ranks=3):
    """Every method over real processes: the same bits as M workers in one process, and as many bytes on the wire; some
    of them saved in the middle of a transfer. Just One Byte and D_LP_S, too; and a round in which one worker's
    connection breaks when it has everything."""
    results, (told, predicted) = fleet("across", ranks), across(Sim(ranks))
    require(len(results) == ranks, "a process left no result")
    for name, size in predicted.items():
        more = statistics.fmean(sent[name] for _, sent in results.values()) - size
        require(abs(more) <= 1, f"{name}: {more} bytes more than the simulation")
    for rank, (found, _) in results.items():
        for what, rows in told.items():
            require(torch.equal(found[what][0], rows[rank]), f"rank {rank} has other {what} than the simulation")


# One run that has it all, told twice: by four processes, to which it happens, and by a Sim that is told what happened.
#
#     step  3   worker 3 is late by a second            (the others' wait counts as blocked)
#           6   its connection will break in the next round, when all of that is in hand: all launch it again
#          10   it is killed, SIGKILL, with nothing in flight that has not arrived
#          16   the other three have gone on for six steps: their anchors must be the Sim's to the bit
#          16   worker 4, in its place, asks to join; the three wait for that, or they would be too fast for it. They
#               collect() something, and have read the request, when worker 2's connection breaks: it has to ask again
#          26   worker 2 surrenders: all stop at the same step
LATE, BREAK, KILL, ALONE, GIVE_UP, LAST = 3, 6, 10, 16, 26, 40


def survive(name):
    """One of the four workers, or worker 4: what survival_told tells, and more."""
    rank = int(os.environ["RANK"])
    worker, transport = TinyWorker(rank, steps=LAST), Dist(timeout=30, rank=rank if rank == 4 else None)
    store, prefix, found = transport.store, transport.prefix, {}
    sync = make_sync(name, worker.model, transport, companion=worker, **SHORT[name])
    if rank == 4:
        store.wait([f"{prefix}/alone"], datetime.timedelta(seconds=120))
        sync.join()
        found["joined"] = sync.steps
    while sync.steps < LAST and "halt" not in sync.notes:
        t = sync.steps
        if t == ALONE and rank != 4:
            found["alone"], found["blocked"] = sync.phi.clone(), sync.blocked_seconds
            store.set(f"{prefix}/alone", "")
            store.wait([f"{prefix}/requests"], datetime.timedelta(seconds=120))
            sync.collect(torch.zeros(1, 1))
        if (t, rank) in ((BREAK, 3), (ALONE, 2)):
            transport.move = functools.partial(break_once, transport, transport.move)
        if (t, rank) == (LATE, 3):
            time.sleep(1)
        if (t, rank) == (KILL, 3):
            for future in [future for r in sync.pending for future in sync.futures(r)] + sync.early:
                future and future.result()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.train(t)
        if (t, rank) == (GIVE_UP, 2):
            sync.surrender("not a number")
        sync.step()
    transport.close()
    end = sync.steps, sync.notes.get("halt"), transport.members, transport.epoch
    return found | dict(phi=sync.phi, theta=sync.theta, end=end)


def break_once(transport, move, part):
    """This worker has all of the round when its connection breaks; the others have it, too."""
    move(part)
    transport.move = move
    raise RuntimeError("the connection broke")


def survival_told(name, last, joined):
    """Anchors after step ALONE, anchors and weights after step `last` of the four, in one process."""
    torch.set_num_threads(1)  # as in a fleet
    workers = [TinyWorker(rank, steps=LAST) for rank in range(4)]
    last_heard = BREAK if METHODS[name].tau is None else KILL  # a late round breaks, and is not landed before the kill
    sim = Sim(4, lambda step: (3,) if last_heard < step <= joined else ())
    sync = make_sync(name, [w.model for w in workers], sim, **SHORT[name])
    for t in range(last):
        if t == ALONE:
            alone = sync.phi.clone()
        if t == joined:  # worker 4, with the donor's anchor, momentum and moments
            workers[3].rank = 4
            workers[3].load_state_dict(copy.deepcopy(workers[0].state_dict()))
            sync.theta[3] = sync.phi[3] = sync.phi[0]
            if sync.m is not None:
                sync.m[3] = sync.m[0]
            if sync.e is not None:
                sync.e[3] = 0
            for r in sync.pending:  # it listens. (Nobody heard what it said; a copy of its own weights is the anchor)
                r.live[3] = 1
                r.payload[3] = encode(sync.method.C, sync.phi[3:, sync.flat.spans[r.fragment]])[0]
            sync.mix_early()
        for worker in workers:
            worker.train(t)
        if t == GIVE_UP:
            sync.theta[2] = sync.phi[2]
        sync.step()
    return dict(alone=alone, phi=sync.phi, theta=sync.theta)


def check_survival(name="diloco"):
    """The story above: to the bit what a Sim makes of it."""
    results = fleet("survive", 4, name, spare=1, replace=True)
    require(tuple(results) == (0, 1, 2, 4), f"{name}: results of ranks {list(results)}")
    steps, joined = results[0]["end"][0], results[4]["joined"]
    told = survival_told(name, steps, joined)
    groups = {0: 4, None: 2}.get(METHODS[name].tau, 3)  # a late landing notices two events as one
    for rank, result in results.items():
        require(result["end"] == (steps, "not a number", (0, 1, 2, 4), groups) and GIVE_UP < steps < LAST,
                f"{name}: rank {rank} ends with {result['end']}")
        for what, rows in told.items():
            require((what, rank) == ("alone", 4) or torch.equal(result[what][0], rows[min(rank, 3)]),
                    f"{name}: rank {rank} has other weights ({what}) than the simulation")
    require(results[0]["blocked"] >= 0.5 or METHODS[name].tau != 0, f"{name}: the wait for the slow one is not counted")


# The bugs of --break, each easy to ship. Hardly one raises an error, and with most of them the loss still falls: an
# outer step without the look ahead, an error that is not fed back, a sum in another order on each worker, which lets
# replicas drift apart by roundings until somebody compares them. Four workers that never synchronise may end a short
# run within 1 % of four that do. So checks compare weights, not losses, and to the bit where operations are the same.


def own_first(self, part, move=Dist.move):
    """Adds up from its own payload on: the same sum, in another order on each worker."""
    stack, weights = move(self, part)
    return Arrived(stack.roll(-self.rank, 0), np.roll(weights, -self.rank, 1))


def said_and_meant(x, w, L, R, Q, hear, right=d_lp_s):
    """The worker's own weights move by what was meant, not by what was said: off from their copies by a rounding."""
    z = x + L / 3 + R / 3 - 5 / 3 * w
    _, *copies = right(x, w, L, R, Q, hear)
    return w + z, *copies


changed = parallel.changed
in_flight_at_joining = functools.partial(check_survival, "streaming")  # its newcomer comes while a fragment travels
BREAKS = {  # name: (the check that must catch it, what is replaced, the bug)
    "heavy-ball": (check_papers, "look_ahead", lambda outer, m, g: m),
    "no-penalty": (check_papers, "staleness_penalty", lambda outer, m, D: 1),
    "no-clip": (check_papers, "clip_factor", lambda outer, m: 1),
    "own-anchor": (check_papers, "Sync", changed(Sync, mean_anchor=lambda self: self.phi)),
    "no-average": (check_data_parallel, "mixing", lambda kind, number, live, seed=0: np.eye(len(live))),
    "alpha-swapped": (check_papers, "blend", lambda theta, phi, alpha, blend=blend: blend(theta, phi, 1 - alpha)),
    "halves-swapped": (check_codes, "e3m0_pairs", lambda device, pairs=e3m0_pairs: pairs(device).flip(1)),
    "one-payload": (check_bytes, "receivers", lambda kind, workers: 1),
    "tied-twice": (check_fragments, "trainable", lambda model: {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}),
    "no-masters": (check_masters, "Flat", changed(Flat, adopt=lambda self, masters=(), adopt=Flat.adopt: adopt(self))),
    "no-feedback": (check_feedback, "Sync", changed(Sync, apply=lambda self, r, *rest: Mechanism.apply(
        self, dataclasses.replace(r, left=None), *rest))),
    "same-pairs": (check_noloco, "pairing", lambda seed, number, alive: alive),
    "said-and-meant": (check_ring, "d_lp_s", said_and_meant),
    "dead-counted": (check_silent, "mixing", lambda kind, number, live, seed=0, mixing=mixing: (
        mixing(kind, number, live, seed) * (np.mean(live) if kind == "all" else 1))),
    "nothing-in-flight": (check_state, "Sync", changed(Sync, load_state_dict=lambda self, saved, load=(
        Sync.load_state_dict): load(self, saved | dict(flight=[])))),
    "unseeded": (check_processes, "OneByte", changed(OneByte, direction=lambda self, *which: torch.randn_like(
        self.flat.theta[0]))),
    "own-first": (check_processes, "Dist", changed(Dist, move=own_first)),
    "no-vote": (check_processes, "Dist", changed(
        Dist, vote=lambda self, good: dict(handled=0, join=[]) if good else None)),
    "joiner-as-zeros": (in_flight_at_joining, "Dist", changed(Dist, live=lambda self, step=None: np.array(
        [float(r in self.members) for r in range(self.size)]))),
}
CHECKS = [check_papers, check_data_parallel, check_codes, check_masters, check_feedback, check_silent, check_state]
CHECKS += [check_one_byte, check_mixing, check_bytes, check_utilisation, check_fragments, check_noloco, check_ring]
CHECKS += [check_misuse, check_processes, check_survival, in_flight_at_joining]


# ==== 13. Training, side by side ======================================================================================
#
# What does talking less cost in loss? The honest scale has two ends: `ddp`, which talks every step (of M times the
# sequences), and `single`, a worker alone with its own share of the data: a method that does worse than `single` had
# better not talk at all. Three things decide on which side of it a method falls:
#
#     rounds      outer momentum needs some 20 to build up. Below that, plainer outer steps (outer_for)
#     lateness    CO2 corrects the weights of one round by the progress of the round before. If a round nearly converges
#                 by itself, that is a correction for something already done: it swings about the optimum
#     density     1.56 % of Delta a round and worker: after 20 rounds two have told at most 63 % of the weights. Of two
#                 workers SparseLoCo draws level with `single` after some 300 rounds, of eight before 66 are over
#
# What --study found (four H200s, 3.3 M parameters, 2,000 steps, H = 30): loss beside ddp's, and how many times fewer
# bytes a worker sends. Three seeds; of eight workers' rows below the line one.
#
#                              two workers         eight workers
#     single                    + 13.3 %            + 27.9 %              not talking at all
#     diloco                    +  3.1 %   30 x     +  4.2 %    30 x
#     streaming                 +  2.8 %  234 x     +  5.3 %    59 x
#     noloco                    +  2.8 %   15 x     +  7.8 %    26 x      pairs instead of a mean over all
#     sparseloco                + 19.6 % 4073 x     + 24.2 %  1018 x
#     --------------------------------------------------------------
#     diloco, paper's step      + 10.9 %            +  7.5 %              outer 0.7 0.9: of too few rounds
#     streaming, fp32           +  3.6 %   30 x     +  5.0 %    30 x      the four bits cost nothing
#     AdamW: diloco             +  5.3 %            + 22.4 %              beside ddp with AdamW
#     noloco, pull = 0                              +  135 %              anchors that nothing draws together
#     gossip                                        +  8.2 %    17 x
#     co2                                           + 30.4 %
#     merge                                         +  401 %  2000 x      weights so far apart have no useful mean
#     sparseloco, no feedback                       +   54 %
#     a fifth silent: diloco                        + 12.0 %              who was silent is off by more than a round
#       anchors mixed in pairs                      +  6.2 %              ... which W1 draws back
#
# What ddp gains from eight times the sequences, eight workers that talk 66 times gain, too, but for 4 or 5 %. More
# rounds close the gap, tuning hardly does: in 30 rounds of 20 steps it was 18 and 21 %, while eleven other outer steps,
# and Muon's rate times 0.7 and 1.5, ended, for one seed, within 2 % of the table's (alpha = 0, no blending: + 1.3 %).
#
# The inner optimizer is train.py's default, Muon for the layers' matrices (04's rule, written out) and AdamW for the
# rest. MuLoCo, 2505.23725, advises it, as Muon's pseudo-gradients point the same way whatever the number of workers;
# here, too, it is with eight of them that AdamW inside falls behind.

TINY = dict(layers=1, dim=64, seq=64, batch=2, lr=1e-2)  # shape of a toy, sequences a worker, AdamW's rate
SMALL = dict(layers=4, dim=256, seq=256, batch=8, lr=4e-3)  # for --study on a GPU


class TinyWorker:
    """A small GPT on text, trained as one of several workers: by Muon and AdamW, or all of it by AdamW, clipped."""

    def __init__(self, rank, seed=0, steps=100, shape=TINY, muon=0.02, device="cpu"):
        self.rank, self.seed, self.steps, self.shape, self.muon, self.device = rank, seed, steps, shape, muon, device
        self.config = base.GPTConfig(256, shape["seq"], shape["layers"], 4, shape["dim"])
        torch.manual_seed(seed)
        self.model = base.GPT(self.config).to(device)
        matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2 and muon]
        self.momentum = {p: torch.zeros_like(p) for p in matrices}
        self.adamw = torch.optim.AdamW([p for p in self.model.parameters() if p not in self.momentum], shape["lr"],
                                       betas=(0.9, 0.95), weight_decay=0.1)

    def state_dict(self):
        return dict(adamw=self.adamw.state_dict(), momentum=list(self.momentum.values()))

    def load_state_dict(self, state):
        self.adamw.load_state_dict(state["adamw"])
        for mine, theirs in zip(self.momentum.values(), state["momentum"], strict=True):
            mine.copy_(theirs)

    def loss(self, tokens):
        E = self.model(tokens[:, :-1])  # (B, T, D)
        return F.cross_entropy(E.flatten(0, 1) @ self.model.classifier.T, tokens[:, 1:].flatten())

    def tokens(self, t, rank=None):
        """(B, T + 1), a function of (seed, rank, t)."""
        generator = np.random.default_rng([self.seed, self.rank if rank is None else rank, t])
        return windows(text(self.device).train, generator, self.shape["batch"], self.config.seq).to(self.device)

    def train(self, t, tokens=None, reduce=None):
        """One step; reduce: called with the parameters between backward and the optimizer."""
        self.model.zero_grad()
        self.loss(self.tokens(t) if tokens is None else tokens).backward()
        if reduce:
            reduce(list(self.model.parameters()))
        progress = max(0, t - 20) / max(1, self.steps - 20)
        share = min((t + 1) / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))  # of the peak rates
        if not self.momentum:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.param_groups[0]["lr"] = self.shape["lr"] * share
        self.adamw.step()
        with torch.no_grad():
            for p, m in self.momentum.items():
                g = p.grad / p.grad.norm()
                m.lerp_(g, 0.05)
                p.mul_(1 - 0.005 * self.muon * share).sub_(self.muon * share * forging.orthogonal(g.lerp(m, 0.95)))

    @torch.no_grad()
    def validate(self):
        tokens = windows(text(self.device).val, np.random.default_rng(1), 128, self.config.seq).to(self.device)
        return statistics.fmean(self.loss(part).item() for part in tokens.split(64))


@functools.cache
def text(device):
    return filtering.corpus(limit=(4 if device == "cpu" else 32) * MIB)


def windows(data, generator, count, seq):
    starts = generator.integers(0, len(data) - seq - 1, count)
    return torch.from_numpy(np.stack([data[s : s + seq + 1] for s in starts]).astype(np.int64))


def train_toy(name, transport, steps, H, seed=0, worker=None, **overrides):
    """Train TinyWorkers (worker: their arguments) by a method, or as "ddp" or "single". The method's outer step is that
    of outer_for, unless overrides have another.

    Returns loss (of the synchronised weights), spread (standard deviation of an anchor's elements between workers),
    bytes a worker sent, seconds blocked."""
    M, alone = transport.size, name in ("ddp", "single")
    workers = [TinyWorker(rank, seed, steps, **worker or {}) for rank in transport.ranks[: 1 if alone else None]]
    sync, blocked, sent = None, [], 0.0
    if not alone:
        method = METHODS[name]
        H = dict(H=H) if method.H not in (None, 1, 5) else {}  # those have steps of their own
        if H and (pair := outer_for(name, steps // H["H"])):
            overrides = dict(outer=dataclasses.replace(method.outer, lr=pair[0], momentum=pair[1])) | overrides
        sync = make_sync(name, [w.model for w in workers], transport, seed=seed, **H | overrides)
    elif name == "ddp":
        sent = steps * data_parallel_bytes(workers[0].config.parameters(), M)
    for t in range(steps):
        for w in workers:
            if name == "ddp" and isinstance(transport, Sim):  # one model, everybody's sequences: the same sum
                w.train(t, torch.cat([w.tokens(t, rank) for rank in range(M)]))
            else:
                w.train(t, reduce=functools.partial(mean_gradients, blocked) if name == "ddp" else None)
        if sync:
            sync.step()
    if sync:
        sync.finish()
        sent, blocked = sync.bytes_sent, [sync.blocked_seconds]
    with sync.synchronised() if sync else contextlib.nullcontext():
        loss = workers[0].validate()
    spread = sync.phi.std(0, correction=0).square().mean().sqrt().item() if sync else 0.0
    return dict(loss=loss, spread=spread, bytes=sent, blocked=sum(blocked))


def mean_gradients(blocked, parameters):
    """Data parallelism's own traffic, in one piece; the seconds that it took are noted."""
    began = time.perf_counter()
    flat = nn.utils.parameters_to_vector(p.grad for p in parameters)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), [p.grad for p in parameters])
    blocked.append(time.perf_counter() - began)


def side_by_side(steps, H):
    """In each process: the methods over gloo; and wire_bytes()."""
    results = {"wire": wire_bytes() if Path("/proc/net/dev").exists() else None}
    for name in ("ddp", "single", "diloco", "streaming", "noloco", "co2", "sparseloco"):
        transport = Dist()
        results[name] = train_toy(name, transport, steps, H)
        transport.close()
    return results


def wire_bytes(P=2**23):
    """What went over the loopback device while one DiLoCo round of P fp32 weights was sent; predicted, measured."""
    sync = make_sync("diloco", nn.Linear(P // BLOCK, BLOCK, bias=False), Dist(), H=1)
    loopback = lambda: int(Path("/proc/net/dev").read_text().split("lo:")[1].split()[8])  # noqa: E731 - bytes sent
    sync.collect(torch.zeros(1, 1))
    before = loopback()
    sync.step()
    sync.collect(torch.zeros(1, 1))  # all have it
    after = loopback()
    sync.transport.close()
    return sync.transport.size * round_bytes(sync.method, [P], sync.transport.size), after - before


def table(results, title):
    print(f"{title:<26}{'bytes a worker':>15} {'x fewer':>9}    loss   to ddp  to single   blocked")
    for name, r in results.items():
        fewer = f"{results['ddp']['bytes'] / r['bytes']:,.1f}" if r["bytes"] else "-"
        to_ddp, to_single = (f"{100 * (r['loss'] / results[other]['loss'] - 1):+.1f} %" for other in ("ddp", "single"))
        blocked = f"{r['blocked']:.2f} s" if r["blocked"] else "-"
        print(f"  {name:<24}{r['bytes']:>15,.0f} {fewer:>9} {r['loss']:>7.4f} {to_ddp:>8} {to_single:>10} {blocked:>9}")
    print("(single: no communication, which every method has to beat)\n")


def utilisation_table(ledger):
    """Gbit/s for a share of compute: ours, and Streaming DiLoCo's table (1 B parameters, steps of 0.1 s). A factor of
    1.21 is one point of BANDWIDTHS; the worst cell, 0.47, is data parallelism at 99 %, where ours hides more."""
    print("Gbit/s for a utilisation of" + "".join(f"{target:>17.0%}" for target in TARGETS) + "   (ours / published)")
    off = []
    for way, published in PUBLISHED.items():
        ratios = [needed_bandwidth(way, target) / 1e9 / there for target, there in zip(TARGETS, published, strict=True)]
        off += [max(ratio, 1 / ratio) for ratio in ratios]
        cells = (f"{r * there:.1f} / {there:g} = {r:.2f}" for r, there in zip(ratios, published, strict=True))
        print(f"  {way:<24}" + "".join(f"{cell:>21}" for cell in cells))
    print()
    middle = statistics.geometric_mean(off)
    ledger.row("utilisation, ours off published by", "mean factor of 25 cells", 1, middle, "", (1, 1.25))


# --study, three tables, each {label: (method, overrides of it, arguments of the workers, share of silent workers)}. All
# runs have 2,000 steps in rounds of H = 30; the outer step is outer_for's where nothing else is said.
STUDY_STEPS, STUDY_H, ADAMW = 2000, 30, dict(muon=0)
MAIN = {name: (name, {}, {}, 0) for name in ("ddp", "single", "diloco", "streaming", "noloco", "sparseloco")}
VARIANTS = {
    "ddp": MAIN["ddp"], "single": MAIN["single"],
    "diloco, outer 0.7 0.9": ("diloco", dict(outer=NESTEROV), {}, 0),
    "streaming, fp32": ("streaming", dict(C="none"), {}, 0),
    "AdamW: ddp": ("ddp", {}, ADAMW, 0), "AdamW: single": ("single", {}, ADAMW, 0),
    "AdamW: diloco": ("diloco", {}, ADAMW, 0), "AdamW: streaming": ("streaming", {}, ADAMW, 0),
}
FOR_EIGHT = {
    "noloco, pull = 0": ("noloco", dict(outer=Outer(1.0, 0.5, gain=0.7, pull=0.0)), {}, 0),
    "gossip": ("gossip", {}, {}, 0), "co2": ("co2", {}, {}, 0), "merge": ("merge", {}, {}, 0),
    "sparseloco, no feedback": ("sparseloco", dict(beta=0.0), {}, 0),
    "diloco, 20 % silent": ("diloco", {}, {}, 0.2),
    "diloco, W1 = pair, 20 % silent": ("diloco", dict(W1="pair"), {}, 0.2),
}
STUDY = {"2": (2, 3, MAIN | VARIANTS), "8": (8, 3, MAIN), "ablations": (8, 1, VARIANTS | FOR_EIGHT)}  # M, seeds, rows


def study_cell(cell):
    (name, overrides, worker, share), M, seed, device = cell
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    if device != "cpu":
        worker = worker | dict(shape=SMALL | (dict(lr=2e-3) if "muon" in worker else {}), device=device)
    silent = lambda step: np.flatnonzero(np.random.default_rng([seed, 7, step]).random(M) < share)  # noqa: E731
    sim = Sim(M, silent if share else None)
    return train_toy(name, sim, STUDY_STEPS, STUDY_H, seed, worker=worker, **overrides)


def study(which):
    """A table of STUDY, every row for every seed: eight runs side by side on each GPU, else one on each core."""
    M, seeds, rows = STUDY[which]
    gpus = torch.cuda.device_count()
    quick = lambda job: rows[job[0]][0] in ("ddp", "single")  # noqa: E731 - one model, not M: they come last
    jobs = sorted(((label, seed) for seed in range(seeds) for label in rows), key=quick)
    cells = [(rows[label], M, seed, f"cuda:{i % gpus}" if gpus else "cpu") for i, (label, seed) in enumerate(jobs)]
    context = torch.multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(8 * gpus or None, mp_context=context) as pool:
        found = dict(zip(jobs, pool.map(study_cell, cells), strict=True))

    def values(label, what="loss"):
        return [found[label, seed][what] for seed in range(seeds)]

    print(f"M = {M}, {STUDY_STEPS} steps, seeds: {seeds:<8} loss: mean, least, most"
          "     to ddp  to single  x fewer   spread")
    for label in rows:
        loss, sent, inner = values(label), values(label, "bytes")[0], "AdamW: " * label.startswith("AdamW")
        to_ddp, to_single = (100 * (statistics.fmean(loss) / statistics.fmean(values(inner + other)) - 1)
                             for other in ("ddp", "single"))
        fewer = f"{values('ddp', 'bytes')[0] / sent:,.1f}" if sent else "-"
        print(f"  {label:<31} {statistics.fmean(loss):>8.4f} {min(loss):.4f} {max(loss):.4f} {to_ddp:>+8.2f} % "
              f"{to_single:>+7.2f} % {fewer:>8} {statistics.fmean(values(label, 'spread')):>8.4f}")


def body(device, ledger, args):
    if args.study:
        return study(args.study)
    steps, H = 320, 16
    results = fleet("side_by_side", 2, steps, H)[0]
    wire = results.pop("wire")
    table(results, f"M = 2, {steps} steps, H = {H}")
    utilisation_table(ledger)
    if wire:
        told, found = (size / 1e6 for size in wire)
        ledger.row("one round on the loopback device", "M x round_bytes", told, found, "MB", (1, 1.25))
    base.run_checks(CHECKS, device)


def add_arguments(parser):
    parser.add_argument("--study", choices=STUDY, help="loss of two or eight workers, or variants (every GPU; minutes)")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 07_moe_balance.py"))


# Exercises
#   1. Send only every other layer's Delta in a round, the others in the next, without fragments: which C does that, and
#      which beta does it need?
#   2. Keep phi and m on the host (OpenDiLoCo does): what does a round then cost, and what does tau = 1 hide of it?
#   3. Let H grow as the learning rate falls. Where is the same loss reached with the fewest bytes?
#   4. Write QAdam: freeze AdamW's v after a warm-up and send its momentum through "bagua-c-lp-s".
