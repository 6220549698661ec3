"""03 - Gradient filtering, vocabulary sorting, and a sparse gradient: most of a trained softmax is too small to matter.

The problem in one number
    Of the N x V probabilities of the small model that is trained here, 0.22 % are above 2^-12. Yet 02 takes four passes
    over all logits (forward, the logits again, dE, dC), or three where there is room for it. Whose gradient is it? That
    of a few thousand frequent classes, of the targets, and of one probability here and there.

The maths                                       p[n, v] = exp(E[n] . C[v] - lse[n]), G = g (p - onehot), eps a threshold
    rule "element" (the paper's)  drop a tile of G, 128 tokens x 256 classes, if no p in it reaches eps, nor is a target
    rule "mass" (ours)            drop a tile if no row's SUM of p in it reaches eps, nor is a target in it
    sparse (ours)                 keep the likeliest 4096 classes whole, of the others the targets and the entries with
                                  p >= eps; for what is dropped put (each row's dropped mass) x (one average tail)

What comes out, on one H200 at N = 8192, V = 256,000, D = 2304, data with a Zipf law (the tables below say more)
    tiles, rule "mass"    3 passes in place of 4, dE is off by 9 %
    sparse                1.5 passes, dE is off by 0.9 %, dC by 0.5 % (12 % in its rows of classes that are no target)
    Where it LOSES: a small model (8192 x 65536 x 512) is done sooner by the exact gradient, since a sparse one launches
    over 200 kernels whatever its size; and if each part of a text has a tail of its own ("topics") dE is off by 5 %.
    gradient="auto" takes the exact gradient in both cases: the first it knows by the shape, for the second it looks at
    128 of the rows. With sums in fp32 nothing forces us to drop anything: approximations, which print their errors.

Symbols
    N, D, V  tokens, width, vocabulary      E (N, D), C (V, D), x (N,)  embeddings, classifier, targets
    lse (N,) log-sum-exp of a row's logits  g_softmax, g_target (N,)    upstream gradients of softmax and onehot (02)
    TILE_N, TILE_V  a tile's rows, columns  keep (row tiles, tiles)     which tiles are not dropped
    H, head  4096 likeliest classes         tail  all others            entry  a kept p[n, v] of the tail
    R, sample  128 rows, looked at whole    m (N,)  what a row drops    q (V,), q C (D,)  prior: the average tail

How to launch
    python 03_grad_filter_sort.py                         trains a small model, shows the phenomenon, checks, measures
    python 03_grad_filter_sort.py --break forget-targets  plant a bug and watch its check fail (exit status 1)
    python 03_grad_filter_sort.py --shape 8192 128256 4096

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009: filter and sorting, figure 3.

Left out on purpose: kernels for GPUs before Hopper (they run blocked PyTorch) and for the rule "element"; heads kept
from an earlier step (this step's own is cheap); softcaps, slices of a vocabulary and fp64 in the sparse gradient.
"""

import functools
import importlib
import math
import os
import platform
import statistics
import sys
import sysconfig
import types
import zlib
from collections import namedtuple
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.autograd.function import once_differentiable

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
INTERPRETED, MIB = base.INTERPRETED, base.MIB
triton, tl = cce.triton, cce.tl
fetched_logits, tile_softmax, tile_gradient, dot = cce.fetched_logits, cce.tile_softmax, cce.tile_gradient, cce.dot
next_logits, mask_tail, exponentials, load_rows = cce.next_logits, cce.mask_tail, cce.exponentials, cce.load_rows
LOG2E, UPCAST = cce.LOG2E, cce.UPCAST

# Rows and columns of the tiles that are kept or dropped: those in which 02's forward leaves its partial sums.
TILE_N, TILE_V = cce.TILES["descriptors"]["BLOCK_N"], cce.TILES["descriptors"]["BLOCK_V"]


# ==== 1. The phenomenon: probability by rank (figure 3 of the paper) ==================================================


def trained_problem(N, V, D, dtype, device, seed=0):
    """E, C, x whose softmax is as sparse as a trained model's (random data is flat): a Zipf law over a shuffled
    vocabulary in one column of C, context noise, and each token pulled by some amount towards its target's row of C."""
    generator = torch.Generator(device).manual_seed(seed)
    options = dict(device=device, generator=generator)
    frequency = 1 / (torch.arange(V, device=device) + 2.7) ** 1.07
    token = torch.randperm(V, **options)
    C = torch.randn(V, D, **options) / math.sqrt(D)
    C[token, 0] = (frequency / frequency.sum()).log() / 8
    x = token[torch.multinomial(frequency, N, replacement=True, generator=generator)]  # (N,)
    E = 2 * torch.randn(N, D, **options) + 7 * torch.rand(N, 1, **options) * torch.nn.functional.normalize(C[x])
    E[:, 0] = 8
    return E.to(dtype).requires_grad_(), C.to(dtype).requires_grad_(), x


def topic_problem(N, V, D, dtype, device, topics=32, seed=0):
    """trained_problem, whose tail is alike in all rows, plus a tail that depends on the context: each class has one
    of the topics, each block of N / topics rows too, and a row's logits of its own topic's classes are log 4 higher."""
    E, C, x = trained_problem(N, V, D, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    directions = torch.randn(topics, D, device=device, generator=generator)
    directions[:, 0] = 0  # holds the frequencies
    directions = (math.log(4) ** 0.5 * torch.nn.functional.normalize(directions)).to(dtype)  # (topics, D)
    with torch.no_grad():
        C += directions[torch.randint(topics, (V,), device=device, generator=generator)]
        E += directions[torch.arange(N, device=device) * topics // N]
    return E, C, x


@torch.no_grad()
def show_phenomenon(E, C, name, eps=2**-12, block=256):
    """The curve of figure 3, mean probability of the most probable class, of the second, ..., as a row of numbers; and
    what 16 bits make of its right end."""
    V, ranked, above = C.shape[0], torch.zeros(C.shape[0], dtype=torch.float64, device=E.device), 0
    for start, stop in cce.pieces(E.shape[0], block):
        p = torch.softmax(cce.block_logits(E[start:stop], C), 1)  # (block, V)
        above += (p >= eps).sum().item() / E.shape[0] / V
        ranked += p.sort(1, descending=True).values.sum(0) / E.shape[0]
    ranks = [r for r in (1, 3, 10, 30, 100, 300, 1000, 10_000, 100_000) if r <= V]
    print(f"softmax of {name}: {100 * above:.2f} % of its N x V entries are above 2^{math.log2(eps):.0f}")
    print("  rank             " + "".join(f"{r:>9,}" for r in ranks))
    print("  mean probability " + "".join(f"{ranked[r - 1].item():9.1e}" for r in ranks))
    first = int((ranked >= eps).sum())
    print(f"  the mean is below from rank {first + 1:,} on; in all they hold {ranked[first:].sum():.1%}")
    one, half = torch.tensor([2.0**-5, 2.0**-13], dtype=torch.bfloat16)
    print(f"  bf16 keeps 8 significant bits: 2^-5 + 2^-13 == 2^-5 is {bool(one + half == one)}; in fp32 it is "
          f"{bool(one.float() + half.float() == one.float())}")


# Text to train on, here and in later files, has to be on every machine: it is the source of Python's own library, ten
# or twenty MiB (`packages`: and of what else is installed). There are two ways to cut it, neither of which needs a
# tokenizer; the second has a vocabulary as large as that of a real one:
#
#     "bytes"     "defs" -> 100, 101, 102, 115                     V = 256
#     "bigrams"   "defs" -> 100 + 256 * 101, 102 + 256 * 115       V = 65,536
#
# To validate on, whole files are held out, so that no text is in both parts, until they make 1 % and at least 64 KiB.
# A checksum of their names picks them: all over the library, and the same ones when a run is resumed.

# train, val: 1-d arrays of tokens (uint8 or uint16); bytes that a token stands for; where the text came from
Corpus = namedtuple("Corpus", "train val vocab bytes_per_token origin")


def source_files(kind="stdlib"):
    """Python source in a folder of this installation ("stdlib", "purelib"), sorted, without tests."""
    for folder, folders, names in os.walk(sysconfig.get_paths()[kind]):
        skip = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
        folders[:] = sorted(set(folders) - skip)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def corpus(tokens="bytes", packages=False, limit=256 * MIB):
    """The text, or the first `limit` bytes of it in whole files, as tokens. BadInput when there is too little."""
    base.refuse((tokens not in ("bytes", "bigrams"), f"tokens is {tokens!r}: use 'bytes' or 'bigrams'"))
    files, size = {}, 0  # {name: text}
    for kind in ("stdlib", "purelib") if packages else ("stdlib",):
        for path in source_files(kind):
            if size + path.stat().st_size <= limit:
                files[path.relative_to(sysconfig.get_paths()[kind])] = text = path.read_bytes()
                size += len(text)
    base.refuse((size < MIB, f"only {size} bytes of Python source are installed here: pass a text with --data FILE"))
    order = sorted(files, key=lambda name: zlib.crc32(str(name).encode()))
    sizes = np.cumsum([len(files[name]) for name in order])
    held = set(order[: 1 + np.searchsorted(sizes, max(64 * 1024, size // 100))])
    parts = (b"".join(text for name, text in files.items() if (name in held) is side) for side in (False, True))
    width = 1 if tokens == "bytes" else 2  # of an even number of bytes: both stand for the same text
    train, val = (np.frombuffer(part[: len(part) // 2 * 2], f"<u{width}") for part in parts)
    origin = f"standard library of Python {platform.python_version()}" + " and installed packages" * packages
    return Corpus(train, val, 256**width, width, f"{origin}, {len(files)} files")


def small_config(device):
    """(configuration, sequences a step, steps) for seconds of training on pairs of bytes, on a CPU of ASCII bytes."""
    if device.type == "cuda":
        return base.GPTConfig(256**2, 256, 4, 8, 512), 32, 120
    return base.GPTConfig(128**2, 64, 1, 2, 64), 4, 30


def train_small(device, text, loss, seed=0):
    """Train the small model with loss(E, C, x) -> E (N, D), classifier C (V, D) and targets (N,) of the last step; and
    over the last fifth of the steps, the mean loss and the share of C's rows without any gradient."""
    config, batch, steps = small_config(device)
    torch.manual_seed(seed)
    with device:
        model = base.GPT(config)
    rate = 2e-3 if device.type == "cuda" else 2e-2
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rng, late = np.random.default_rng(seed), []
    for step in range(steps):
        starts = rng.integers(0, len(text) - config.seq - 1, batch)
        windows = np.stack([text[s : s + config.seq + 1] for s in starts]).astype(np.int64)
        tokens = torch.from_numpy(windows).to(device)  # (B, T + 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            E = model(tokens[:, :-1]).flatten(0, 1)  # (N, D)
            value = loss(E, model.classifier, tokens[:, 1:].flatten())
        value.backward()
        if step >= 0.8 * steps:
            without = (model.classifier.grad == 0).all(1).float().mean()
            late.append(torch.stack((value.detach(), without)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / (0.2 * steps))  # warm-up
        optimizer.step()
        optimizer.zero_grad()
    return E.detach(), model.classifier.detach(), tokens[:, 1:].flatten(), *torch.stack(late).mean(0).tolist()


def filtered(E, C, x, **options):
    """filtered_cross_entropy for autograd: a number whose value is the loss, and whose gradients are dE and dC."""
    loss, dE, dC, _ = filtered_cross_entropy(E, C, x, **options)
    known = (E * dE).sum() + (C * dC).sum()
    return loss + known - known.detach()


def measure_training(device):
    """What the paper warns of: dC, filtered, leaves the classifier's rows of rare tokens where they are. By the mass
    rule this comes later, when tiles as a whole have become improbable. Returns E, C, targets of the last exact model,
    and {gradient: share of rows without gradient}."""
    text = corpus("bigrams", limit=16 * MIB).train
    if device.type == "cpu":
        text = text[(text & 0x8080) == 0]
        text = (text >> 8) * 128 + (text & 0x7F)
    sparse = functools.partial(linear_cross_entropy, gradient="sparse")
    ways = {"exact": (cce.linear_cross_entropy, 3), "sparse": (sparse, 3)}  # and how many seeds
    for rule, only_dE in (("element", False), ("element", True), ("mass", False)):
        loss = functools.partial(filtered, rule=rule, only_dE=only_dE)
        ways[f"{rule}, {'only dE' if only_dE else 'both'}"] = loss, 1
    print(f"  {'gradient':<18}{'loss at the end, by seed':>28}{'rows of C without gradient':>28}")
    problems, starved = {}, {}
    for name, (loss, seeds) in ways.items():
        runs = [train_small(device, text, loss, seed) for seed in range(seeds)]
        problems[name], starved[name] = runs[-1][:3], statistics.mean(run[4] for run in runs)
        print(f"  {name:<18}{'  '.join(f'{run[3]:.3f}' for run in runs):>28}{100 * starved[name]:26.1f} %")
    return problems["exact"], starved


# ==== 2. The paper's idea, in PyTorch: drop tiles, and sort the vocabulary first ======================================
#
# A tile whose entries are all tiny adds next to nothing to dE = G C and to dC = G^T E: leave it out of both products.
#
#     vocabulary as it is numbered             sorted by average logit
#     +---+---+---+---+---+---+                +---+---+---+---+---+---+
#     |.x.|...|..x|.x.|x..|..T|                |xxx|x.x|.T.|   |   |   |     x  p >= eps      T  the target
#     +---+---+---+---+---+---+      -->       +---+---+---+---+---+---+     .  below: tiles of dots alone are dropped
#     |..x|x.T|.x.|...|.x.|x..|                |xxx|.xx|...|   |.T.|   |
#     +---+---+---+---+---+---+                +---+---+---+---+---+---+
#       100 % of the tiles are kept              a half or less
#
# Small entries are scattered over all tiles until the frequent classes stand together. The order is that of the average
# logit, which the paper gathers in its forward pass. It is one matrix-vector product, since
#     mean_n E[n] . C[v] = (mean_n E[n]) . C[v]
# Only indices are sorted: a slice of C is gathered when its turn comes, 2 V D bytes read and written, a twentieth of a
# pass at D = 2304.
#
# Which tiles? "element" looks at the largest p of a tile, which 02's forward does not write: in the paper's backward a
# tile is made to learn that it may be dropped. For "mass" a row's sum over tile t is exp(partial[t, n] - lse[n]), and
# 02's forward has just written partial: the rule costs nothing, a dropped tile is not made again, and it comes with a
# bound: a row loses at most (tiles dropped) x eps of its probability. For "element" the bound is TILE_V times that.
# Tiles with a target are kept: p - 1 is the signal.
#
# In matrix passes of 2 N V D FLOP, k the share of tiles that are kept (lists run at two thirds of cuBLAS's speed, so
# that k = 0.46 takes 1.1 + 1.5 x 3 k = 3.2 passes' worth of time):
#                                     forward    logits again   dE   dC
#     exact (02), over the vocabulary    1            1          1    1
#     "element", both products           1            1          k    k
#     "mass", both products              1            k          k    k
#     either rule, only dE               1            1          k    1     dC needs all of G
#
# Only dE? A class that is nobody's target has no gradient but its p's. Filter dC, and the classifier's rows of rare
# classes never move: they starve, which pretraining does not forgive. With dC exact the gain is small.

SLICE = 32 * TILE_V  # classes gathered, and columns of G alive, at a time
PAPER_EPS = {"element": 2**-12, "mass": 2**-11}  # the paper's for bf16; twice that makes about the same error here
# keep (row tiles, tiles) bool, tiles in the order used; dropped (N,) the probability that each row lost; bound (N,)
# what the rule guarantees for it; order (V,)
FilterStats = namedtuple("FilterStats", "keep dropped bound order")


def vocabulary_order(E, C, counted):
    """Classes (V,) by falling average logit over the counted rows of E (N, D); ties keep their order."""
    sums, narrow = base.product_dtypes(E)
    mean = weighted_rows(base.token_weights(counted), E)[None].to(narrow)  # (1, D)
    logits = cce.set_to(torch.empty(1, C.shape[0], dtype=sums, device=C.device), mean, C.T)[0]  # (V,)
    return torch.sort(logits, descending=True, stable=True).indices


def weighted_rows(weights, E):
    """weights (N,), E (N, D) -> sum of weights[n] E[n] (D,)."""
    sums, narrow = base.product_dtypes(E)
    return cce.set_to(torch.empty(1, E.shape[1], dtype=sums, device=E.device), weights.to(narrow)[None], E)[0]


def inverse(order):
    """order (V,), a permutation of the classes -> the place of each class in it (V,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def target_tiles(position, V):
    """position (N,) of each row's target in the order, -1 for none -> (row tiles, tiles) bool: is one in the tile?"""
    N, tiles = len(position), -(-V // TILE_V)
    held = torch.zeros(-(-N // TILE_N), tiles + 1, dtype=torch.bool, device=position.device)  # the last: for none
    column = torch.where(position >= 0, position // TILE_V, tiles)
    held[torch.arange(N, device=position.device) // TILE_N, column] = True
    return held[:, :tiles]


def reached(log_values, lse, counted, eps):
    """log_values (tiles, N): does a counted row of the tile reach eps of its exp(lse)? (row tiles, tiles) bool."""
    flags = (log_values - lse >= math.log(eps)) & counted  # (tiles, N)
    padded = torch.nn.functional.pad(flags, (0, -len(counted) % TILE_N))  # with False
    return padded.unflatten(1, (-1, TILE_N)).any(2).T


def tile_mask(keep, N, V):
    """keep (row tiles, tiles) -> (N, V) bool, classes in the order."""
    return keep.repeat_interleave(TILE_N, 0)[:N].repeat_interleave(TILE_V, 1)[:, :V]


def kept_tiles(E, C, x, rule, eps, sort, kernels):
    """order (V,); each target's position in it (N,), -1: none; partial (tiles, N), log-sum-exp of each row over each
    tile; lse (N,); keep (row tiles, tiles). One pass over the logits, slice by slice."""
    V, counted = C.shape[0], (x >= 0) & (x < C.shape[0])  # what is no class is left out, too
    order = vocabulary_order(E, C, counted) if sort else torch.arange(V, device=C.device)
    position = inverse(order)[x.where(counted, 0)].where(counted, -1)
    partial, peaks = [], []
    for start, stop in cce.pieces(V, SLICE):
        rows = C[order[start:stop]]  # (W, D)
        if kernels:
            partial.append(cce.tile_lse(E, rows))
            continue
        tiles = cce.block_logits(E, rows).split(TILE_V, 1)
        partial.append(torch.stack([tile.logsumexp(1) for tile in tiles]))
        peaks.append(torch.stack([tile.amax(1) for tile in tiles]))
    partial = torch.cat(partial)
    lse, values = cce.merge(partial), partial if rule == "mass" else torch.cat(peaks)
    return order, position, partial, lse, target_tiles(position, V) | reached(values, lse, counted, eps)


def filtered_gradients(E, C, x, rule, eps, sort, only_dE, kernels):
    """What filtered_cross_entropy returns, once its arguments are checked."""
    order, position, partial, lse, keep = kept_tiles(E, C, x, rule, eps, sort, kernels)
    counted, (sums, narrow) = position >= 0, base.product_dtypes(E)
    g = base.token_weights(counted)  # (N,): 1 / how many are counted
    dE, dC = torch.zeros(E.shape, dtype=sums, device=E.device), torch.empty_like(C)
    for start, stop in cce.pieces(C.shape[0], SLICE):
        classes, part_keep = order[start:stop], keep[:, start // TILE_V : -(-stop // TILE_V)]
        rows = C[classes]  # (W, D)
        if kernels:
            dC[classes] = listed_products(dE, E, rows, position - start, lse, g, part_keep)
            continue
        logits = cce.block_logits(E, rows)  # (N, W)
        G = cce.gradient_from_logits(logits, position - start, lse, g, g).to(narrow)  # (N, W)
        part = G.masked_fill(~tile_mask(part_keep, *G.shape), 0.0)
        cce.add_to(dE, part, rows)
        dC[classes] = cce.set_to(torch.empty_like(rows), (G if only_dE else part).T, E)

    loss = ((lse - class_logits(E, C, x.where(counted, 0))) * g).sum()
    gone = ~keep.repeat_interleave(TILE_N, 0)[: len(E)] & counted[:, None]  # (N, tiles)
    dropped, bound = ((partial - lse).exp().T * gone).sum(1), gone.sum(1) * eps * (1 if rule == "mass" else TILE_V)
    return loss, dE.to(E.dtype), dC, FilterStats(keep, dropped, bound, order)


def class_logits(E, C, classes):
    """The logit (N,) of one of the classes (N,) for each row of E (N, D), in fp32 (fp64)."""
    sums = base.product_dtypes(E)[0]
    return (E.to(sums) * C[classes].to(sums)).sum(1)


@torch.no_grad()
def filtered_cross_entropy(E, C, x, rule="mass", eps=None, sort=True, only_dE=False, backend="auto"):
    """A lesson, not a layer: mean cross-entropy () of E (N, D) @ C.T, C (V, D), against x (N,) int64 (-100: ignored),
    which is exact; dE (N, D) and dC (V, D) without the tiles that `rule`, "mass" or "element", drops at eps (None:
    PAPER_EPS; only_dE: dC is exact); and FilterStats. fp32, or bf16 as under autocast. Kernels for "mass", both
    products, bf16 on Hopper; else blocked PyTorch, which makes every tile and zeroes some: no time is saved. BadInput.
    arXiv 2411.09009."""
    base.refuse((rule not in PAPER_EPS, f"rule is {rule!r}: use 'mass' or 'element'"),
                (eps is not None and not 0 < eps < 1, f"eps is {eps!r}: use a number between 0 and 1"),
                (E.dim() != 2, f"E is {tuple(E.shape)}: flatten it to (tokens, width)"))
    E, C, wish = cce.checked_inputs(E, C, x, None, -100, None, "mean", backend, None, None)
    E, C = cce.kernel_inputs(E, C)
    kernels = wish == "triton" and cce.takes_descriptors(E, C) and rule == "mass" and not only_dE
    with torch.autocast(E.device.type, enabled=False):
        return filtered_gradients(E, C, x, rule, eps or PAPER_EPS[rule], sort, only_dE, kernels)


# ==== 3. The same with kernels: make the listed tiles of G, multiply with the listed tiles ============================
#
# A sieve saves time only if what it drops is not made. Each kernel walks a list of the tiles to keep:
#
#     G           the kept tiles, of all row and column tiles            one program after the other takes the next
#     dE += G C   a row of tiles sums over its kept columns              one list per row tile
#     dC = G^T E  a column of tiles sums over its kept rows              one list per column tile
#
# A list is a sort of a row of the table by kept or not; one sort makes those of all rows (kept_first):
#
#     keep    0 1 0 0 1        lists   1 4 | 0 2 3         counts   2     a program's loop over k stops after
#             1 0 0 1 0                0 3 | 1 2 4                  2     counts[row] x TILE_V columns of G
#
# How many there are is read on the device: the host never waits. The rest of G's memory holds anything and is not read.

PRODUCT = dict(BLOCK_M=128, BLOCK_W=128, BLOCK_K=64, num_warps=4, num_stages=3)  # two programs fit a multiprocessor
if INTERPRETED:
    PRODUCT = dict(BLOCK_M=32, BLOCK_W=32, BLOCK_K=32)


@triton.jit
def listed_gradient_kernel(
    E, C, G, targets, lse, g, tiles, count, N, V, D,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """02's gradient_kernel for the first `count` of the listed tiles."""
    col_tiles = tl.cdiv(V, BLOCK_V)
    for i in tl.range(tl.program_id(0), tl.load(count), tl.num_programs(0), flatten=True):
        tile = tl.load(tiles + i)
        row, col = tile // col_tiles * BLOCK_N, tile % col_tiles * BLOCK_V
        rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
        logits = fetched_logits(E, C, row, col, D, BLOCK_N, BLOCK_V, BLOCK_D)
        row_g, x = load_rows(g, rows, N, 0.0), load_rows(targets, rows, N, -1)
        softmax = tile_softmax(logits, load_rows(lse, rows, N, 0.0))
        G.store([row, col], tile_gradient(softmax, logits, x, cols, row_g, row_g, None).to(G.dtype))


@triton.jit
def listed_product_kernel(
    A, B, out, lists, counts, D, length, TRANSPOSED: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A block of out += A @ B, or TRANSPOSED of out = A^T @ B, over the listed tiles: TILE columns of A, rows of B.
    BLOCKS blocks of rows share one of the lists (lists, length)."""
    block, col = tl.program_id(0) // tl.cdiv(D, BLOCK_W), tl.program_id(0) % tl.cdiv(D, BLOCK_W) * BLOCK_W
    own, row = block // BLOCKS, block * BLOCK_M
    acc = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    for step in range(0, tl.load(counts + own) * (TILE // BLOCK_K)):
        tile = tl.load(lists + own * length + step // (TILE // BLOCK_K))
        k = tile * TILE + step % (TILE // BLOCK_K) * BLOCK_K
        if TRANSPOSED:
            a = tl.trans(A.load([k, row]))
        else:
            a = A.load([row, k])
        acc = dot(a, B.load([k, col]), acc)
    if not TRANSPOSED:
        acc += out.load([row, col])
    out.store([row, col], acc.to(out.dtype))


def kept_first(keep):
    """keep (A, B) bool -> the indices of the kept of each row first, in order, (A, B) int32, and their count (A,)."""
    keep = keep.byte().contiguous()
    return torch.sort(keep, dim=1, descending=True, stable=True).indices.int(), keep.sum(1, dtype=torch.int32)


def descriptor(matrix, *block):
    return cce.TensorDescriptor.from_tensor(matrix, list(block))


def listed_products(dE, E, C, targets, lse, g, keep):
    """dE (N, D) fp32 += G C, and G^T E (W, D), of a slice C (W, D), over the tiles that keep lists."""
    (N, D), W, (M, S, K) = E.shape, C.shape[0], (PRODUCT[name] for name in ("BLOCK_M", "BLOCK_W", "BLOCK_K"))
    G, across = cce.empty_gradient(E, W), triton.cdiv(D, S)  # G (N, W)
    dC = torch.empty(W, D, device=E.device, dtype=torch.float32 if INTERPRETED else C.dtype)  # it truncates to bf16
    listed_gradient_kernel[cce.programs(E)](
        cce.fetched(E, "BLOCK_N", "BLOCK_D"), cce.fetched(C, "BLOCK_V", "BLOCK_D"),
        cce.fetched(G, "BLOCK_N", "BLOCK_V"), targets, lse, g, *kept_first(keep.reshape(1, -1)), N, W, D,
        **cce.TILES["descriptors"],
    )
    listed_product_kernel[(triton.cdiv(N, M) * across,)](
        descriptor(G, M, K), descriptor(C, K, S), descriptor(dE, M, S), *kept_first(keep), D, keep.shape[1],
        TRANSPOSED=False, BLOCKS=TILE_N // M, TILE=TILE_V, **PRODUCT,
    )
    listed_product_kernel[(triton.cdiv(W, M) * across,)](
        descriptor(G, K, M), descriptor(E, K, S), descriptor(dC, M, S), *kept_first(keep.T), D, keep.shape[0],
        TRANSPOSED=True, BLOCKS=TILE_V // M, TILE=TILE_N, **PRODUCT,
    )
    return dC.to(C.dtype)


# ==== 4. The sparse gradient: a dense head, a sparse tail, one pass over the logits ===================================
#
# Tiles are a coarse sieve: one entry that matters keeps 32,768. A sieve for entries needs lse, to know which matter,
# BEFORE the pass that makes them. A lower bound will do; the head of the vocabulary and a look at the tail give one:
#
#                  head: 4096 classes          tail: all others
#                +---------------------+-------------------------------------+   x  listed: p >= eps, or the target
#                |                     |      x           .                  |   .  a candidate: above eps by the bound,
#      N tokens  |   dense and exact   |  .                        x         |      below it once lse is known
#                |                     |               x                .    |       blank: certainly below eps
#                |                     |        .               x            |   each row loses the probability m[n]
#                +---------------------+-------------------------------------+   of its . and blanks
#
#   survey        128 rows, all classes. Picks the head: the largest mean p. Says how dropped probability is spread over
#                 the tail, q, and where it points, q C. Forecasts candidates, m and the error of dE
#   lower bound   lse over the head and, at least, the tail; the target's logit if larger. p < eps where logit is below
#                 bound + log eps
#   forward       ONE pass: lse, and lists of the candidates, (row, class)
#   head          G, dE and dC of 4096 columns, by 02's functions
#   row pass      fetch the rows of C that a row lists: logit, p (now with lse), the entry of G, dE += entry * C[v].
#                 What was not kept is m[n], exactly; it adds g m[n] q C
#   verdict       the errors of dE and dC that follow from m and the sample; the host reads it while the next pass runs,
#                 and has all made again, exactly, if need be
#   column pass   entries sorted by class: dC[v] = sum of entry * E[n], + q[v] sum_n g m[n] E[n], each row written once
#
# The last terms of the two passes are one matrix of rank 1, (g m) q^T, in place of the entries that were dropped. Those
# are many, small, and much alike in all rows: what they add up to is mostly their mean. In numbers, on the Zipf data:
# 113 candidates a row, 24 % of the probability dropped; dE is off by 0.9 %, without the correction by 38 % (a
# prototype's figure; --break no-correction leaves it out in a check).
#
# Nobody adds to memory that another adds to, and sums have a fixed order: two runs give the same bits.
#
# First the whole of it in PyTorch, which is what runs where there are no kernels. The candidates are kept as lists:

# rows, classes (capacity,): candidates, row by row in each band, a range of the vocabulary that is done in one go
# (unused places: class V); count (): how many there are, or would be with more room. Kernels: int32, and begin, end
# (bands, N) int64, where a row's lie. PyTorch: int64, and their logits (entries,); bands are not kept apart.
Entries = namedtuple("Entries", "rows classes count begin end logits", defaults=3 * [None])

# The gradient of C as lists: of its row v, the sum of weights[i] * E[rows[i]] over i in begin[v] ... begin[v + 1]; plus
# prior[v] * lost_E, the correction, q[v] times sum_n g m[n] E[n]; plus head_gradient[place[v]] where place[v] >= 0.
# None: no such terms; weights None: all are 1. E (N, D), its stride; rows (entries,), begin (V + 1,) int32, weights
# (entries,); prior (V,), lost_E (D,); head_gradient (H, D), place (V,) int32.
ListedRows = namedtuple(
    "ListedRows", "E stride rows weights begin prior lost_E head_gradient place", defaults=4 * [None])

HEAD, SPARSE_EPS = 4096, 2**-12  # eps in any dtype: what is below is not thrown away but approximated


def head_size(V):
    """Classes in the head; of a small vocabulary a sixteenth, so that its four products take a quarter of a pass."""
    return min(HEAD, -(-V // 16))


def blocked_entries(E, C, x, threshold, place):
    """Forward: lse (N,), and as Entries what is above threshold (N,) or the target x (N,), but not in the head, where
    place (V,) >= 0."""
    lse, parts = torch.full_like(threshold, -math.inf), []
    for start, stop in cce.pieces(C.shape[0], max(256, cce.CPU_BLOCK // len(E))):
        logits = cce.block_logits(E, C[start:stop])  # (N, W)
        lse = torch.logaddexp(lse, logits.logsumexp(1))
        wanted = logits > threshold[:, None]
        inside = (x >= start) & (x < stop)
        wanted[inside, x[inside] - start] = True
        wanted[:, place[start:stop] >= 0] = False
        rows, columns = wanted.nonzero(as_tuple=True)
        parts.append((rows, columns + start, logits[rows, columns]))
        del logits, wanted
    rows, classes, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    return lse, Entries(rows, classes, torch.tensor(len(rows), device=E.device), logits=logits)


def blocked_row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries, eps):
    """dE (N, D) += what the tail contributes. Returns the entries' values of G and m (N,), the probability dropped."""
    rows, sums = entries.rows, dE.dtype
    p, hit = (entries.logits - lse[rows]).exp(), entries.classes == x[rows]
    p = p.where((p >= eps) | hit, 0.0)
    values = p * g_softmax[rows] - g_target[rows].where(hit, 0.0)
    m = (1 - (lse_head - lse).exp() - torch.zeros_like(lse).index_add_(0, rows, p)).clamp(min=0)
    dE += torch.sparse.mm(sparse_matrix(rows, entries.classes, values, (len(E), len(C))).coalesce(), C.to(sums))
    dE.addr_(g_softmax * m, mean_tail)
    return values, m


def sparse_matrix(rows, columns, values, shape, **options):
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said explicitly, or torch 2.11 warns
        return torch.sparse_coo_tensor(torch.stack((rows, columns)), values, shape, **options)


def listed_rows(E, rows, classes, values, V, **others):
    """ListedRows of entries (entries,); those of class V are ignored. The sort is stable: a class lists its rows in the
    order in which they came."""
    classes, order = torch.sort(classes, stable=True)
    begin = torch.searchsorted(classes, torch.arange(V + 1, dtype=classes.dtype, device=E.device), out_int32=True)
    values = None if values is None else values[order]
    return ListedRows(E, E.stride(0), rows[order].int(), values, begin, **others)


def blocked_rows(c, top, bottom):
    """Rows top ... bottom of what ListedRows c stand for, in fp32 (fp64)."""
    begin, sums = c.begin[top : bottom + 1], base.product_dtypes(c.E)[0]
    rows = c.rows[begin[0] : begin[-1]].long()
    values = torch.ones_like(rows, dtype=sums) if c.weights is None else c.weights[begin[0] : begin[-1]].to(sums)
    classes = torch.repeat_interleave(begin.diff()).long()  # 0 as often as the first class lists rows, then 1, ...
    G = sparse_matrix(classes, rows, values, (bottom - top, len(c.E)), is_coalesced=True)
    out = torch.sparse.mm(G, c.E.to(sums))
    if c.prior is not None:
        out.addr_(c.prior[top:bottom], c.lost_E)
    if c.head_gradient is not None:
        inside = (c.place[top:bottom] >= 0).nonzero().squeeze(1)
        out[inside] += c.head_gradient[c.place[top:bottom][inside]]
    return out


@cce.without_autocast
def write_rows(out, listed, top=0, add=False, backend="torch"):
    """out (R, D) = or += rows top ... top + R of what ListedRows stand for. Fixed order of sums, in fp32 (fp64)."""
    if backend == "triton":
        grid, options = listed_options(listed, *out.shape)
        listed_rows_kernel[(grid,)](out, listed, top, top + len(out), out.shape[1], out.stride(0), ADD=add, **options)
        return
    for start, stop in cce.pieces(len(out), max(1, cce.CPU_BLOCK // out.shape[1])):
        part = blocked_rows(listed, top + start, top + stop)  # (W, D)
        out[start:stop] = part + out[start:stop] if add else part


# ==== 5. The survey: what 128 rows tell about all =====================================================================
#
# Row n drops d[n] (V,), in all m[n] = sum_v d[n, v]. Of the sample's rows, R of them, we know d. Their average tail
#
#     q = sum_n d[n] / sum_n m[n]      (V,), sums to 1           q C = the row of C that a dropped word stands for, on
#                                                                average: (D,)
# is what the correction puts in place of each row's own: m[n] q for d[n]. Left of it is r[n] = d[n] - m[n] q, for the
# sample's rows together r = P d with P = I - m 1^T / sum m.
#
# Two rows, three classes, m = 0.3 and 0.1:
#     d = [[0.20, 0.10, 0.00], [0.00, 0.05, 0.05]]          q = [0.20, 0.15, 0.05] / 0.4 = [0.5, 0.375, 0.125]
#     r = [[0.05, -0.0125, -0.0375], [-0.05, 0.0125, 0.0375]]                          whose columns add up to 0
# What matters is how r points: if C's rows are alike in the tail, r C is small though r is not.
#
# The lower bound. lse over the head alone is a poor one for a row that spreads its bets: where the head has 8 % of the
# probability, as in a fresh model, 22,000 of 50,304 classes are candidates, for each of which the row pass fetches a
# row of C. Of the tail, Gibbs' inequality says: for ANY distribution q over it,
#     log sum_v exp(l_v) = log sum_v q_v exp(l_v - log q_v) >= sum_v q_v (l_v - log q_v) = E[n] . (q C) + H(q),
# since log is concave; equal, if the row's tail is spread as q is. q C is there, H(q) = -sum_v q_v log q_v is q's
# entropy. It leaves hardly any of those candidates.
#
# The error of dE. It is off by g[n] r[n] C in row n. The sample's lengths, per unit of dropped probability,
#     residual = sqrt(sum_n |r[n] C|^2 / sum_n m[n]^2)           tell of all rows:  |error of dE| = residual |g m|
# where m is known of every row after the row pass. Before, for the forecast, the sample's own error has to do.
#
# The error of dC is the matrix A = sum_n g[n] r[n] E[n]^T, and
#     |A|^2 = sum over pairs n, n' of g g' (r . r') (E . E')
# From R of N rows: N/R times the terms n = n' (random errors, which add up like a random walk), and (N/R)^2 times the
# others (errors that rows have in common: they are what hurts). Third, q is itself an estimate, and by its own error
# all rows are off together. Each half of the sample has a q; the difference of the two tells its variance:
#     doubt = ((q_even - q_odd) / 2)^2,    adding (N/R)^2 |(q_even - q_odd) / 2|^2 sum of g g' m m' (E . E')
# (A sample cannot show it otherwise: its own r add up to 0, by the choice of q.)
#
# The blind spot. What the sample does not have, it cannot tell. A kind of row rarer than one in R may be missed: its
# tail may point elsewhere, its rows be all wrong, and the estimate still be small. 2 % of such rows, which one sample
# in 13 misses (0.98^128), are enough for an error above the limit, reported as below it (check_blind_spot). A
# second look, at 32 fresh rows after the pass, reads C twice more: 0.9 ms on an H100, 3 to 6 % of a call; and every
# second such look would miss them, too (0.98^32). It is not taken. A training run samples other rows in each step.

SAMPLE, SLACK = 128, 1e-3  # rows; of the bound: far more than logits made twice may differ by

# What the correction takes: head (H,) classes; place (V,) int32 of a class in it, -1 for others; prior q (V,), 0 in the
# head; mean_tail q C (D,)
Survey = namedtuple("Survey", "head place prior mean_tail")
# What the estimate takes: of the sample, rows (R,), e (R, D), m (R,), K (R, R) = d d^T, length () = |r C|. And what it
# makes of them: residual (); of pairs of rows, but for g, left (R, R) = (r . r') (E . E') and doubt (R, R)
Sample = namedtuple("Sample", "rows e m K length")
Left = namedtuple("Left", "rows residual left doubt")


@functools.cache
def golden_places(R, device):
    """R numbers in [0, 1): spread evenly but not regularly. Every 512th row would be the same place of each sequence;
    the golden ratio's multiples fall everywhere."""
    i = np.arange(R)
    return torch.tensor((i + i * 0.6180339887498949 % 1) / R, dtype=torch.float32, device=device)


def sample_rows(counted):
    """Up to SAMPLE of the rows counted (N,) -> (R,), and how many there are ()."""
    so_far = counted.cumsum(0)  # (N,): the k-th counted row is the first to have k
    k = (golden_places(min(SAMPLE, len(counted)), counted.device) * so_far[-1]).long()
    return torch.searchsorted(so_far, k, right=True).clamp(max=len(counted) - 1), so_far[-1]


def survey(E, C, x, counted, eps, backend):
    """Look at SAMPLE of the rows counted (N,) of E (N, D), C (V, D), x (N,) or -1. -> the Survey, the Sample,
    lower_bound's three, and on their way to the host: how many rows count; of the sample's, the sums of candidates and
    of m, the lengths of dE and of what it is off by, as if all g were 1.

    The device waits for the host here, so that a small kernel costs its launch, 5 to 15 us: one product with C serves p
    and d, memory is used again (p becomes p - onehot, then the candidates; d C becomes r C), no mask is made."""
    V, (sums, narrow), (rows, counts) = C.shape[0], base.product_dtypes(E), sample_rows(counted)
    e, R, target = E[rows].to(narrow), len(rows), x[rows]  # (R, D)
    logits = e @ C.T.to(narrow)  # (R, V)
    both = torch.empty(2 * R, V, dtype=narrow, device=E.device)
    p = torch.softmax(logits, 1, out=both[:R])
    head = torch.sort(p.mean(0, dtype=sums), descending=True, stable=True).indices[: head_size(V)]
    d = torch.threshold_(torch.neg(p, out=both[R:]), -eps, 0.0).neg_()  # what is dropped: below eps (-p > -eps),
    d.index_fill_(1, head, 0.0)  # not in the head,
    met = target >= 0
    at = target.where(met, head[0])[:, None]  # where there is no target, in the head, where it does no harm
    d.scatter_(1, at, 0.0)  # and not the target
    p.scatter_add_(1, at, met.to(narrow).neg_()[:, None])  # p - onehot
    products = cce.set_to(torch.empty(2 * R, C.shape[1], dtype=sums, device=E.device), both, C)
    lost = products[R:]  # (R, D) d C; before it, dE
    m, K = d.sum(1, dtype=sums), cce.set_to(torch.empty(R, R, dtype=sums, device=E.device), d, d.T)  # (R,), (R, R)
    numbers = torch.empty(5, dtype=sums, device=E.device)
    total = torch.sum(m, 0, out=numbers[2])
    at_least = total.clamp(min=1e-30)
    prior, mean_tail = d.sum(0, dtype=sums) / at_least, lost.sum(0) / at_least  # (V,), (D,)
    entropy = torch.special.entr(prior).sum().masked_fill_(total <= 1e-30, -math.inf)  # q sums to 1, or bounds nothing
    bounds = lower_bound(E, C, x, counted, head, mean_tail, entropy, eps, backend)
    above = torch.gt(logits.index_fill_(1, head, -math.inf), bounds[2][rows, None], out=p)  # (R, V), 0 or 1
    lost.addcmul_(m[:, None], mean_tail, value=-1)  # r C
    torch.linalg.vector_norm(products.view(2, -1), dim=1, out=numbers[3:])
    torch.sum(above, (0, 1), dtype=sums, out=numbers[1])
    numbers[0] = counts
    forecast = Readback(numbers)
    place = torch.full((V,), -1, dtype=torch.int32, device=E.device)  # made while the numbers travel
    place[head] = torch.arange(len(head), dtype=torch.int32, device=E.device)
    return Survey(head, place, prior, mean_tail), Sample(rows, e, m, K, numbers[4]), bounds, forecast


def left_over(sample):
    """Left, by the formulas above. K = d . d' gives all that is of V. (q_even - q_odd) / 2 is the sum of h[n] d[n] with
    h = s / (sum of m + s sum of s m), s = 1, -1, 1, ...: the bracket is twice the sum of m over a half."""
    m, total = sample.m, sample.m.sum()
    P = torch.eye(len(m), dtype=m.dtype, device=m.device).sub_((m / total.clamp(min=1e-30))[:, None])  # (R, R)
    signs = torch.ones_like(m)
    signs[1::2] = -1
    h = signs / torch.addcmul(total, signs, signs @ m).clamp(min=1e-30)  # (R,)
    e = sample.e.to(m.dtype)
    alike, doubt = e @ e.T, torch.outer(m, m) * (h @ sample.K @ h)  # (R, R) each
    residual = sample.length / m.norm().clamp(min=1e-30)
    return Left(sample.rows, residual, P @ sample.K @ P.T * alike, doubt * alike)


def error_of_dC(left, g, share):
    """|A| from Left and g (R,) of the sample, which is one in `share` of the rows."""
    itself = (left.left.diag() * g**2).sum()
    others = (g @ left.left @ g - itself).clamp(min=0)
    return (share * itself + share**2 * (others + g @ left.doubt @ g)).clamp(min=0).sqrt()


def lower_bound(E, C, x, counted, head, mean_tail, entropy, eps, backend):
    """lse over the head (N,), the target's logit (N,), and the logit (N,) up to which p is certainly below eps."""
    if backend == "triton":
        partial, (N, D), out = cce.tile_lse(E, C[head]), E.shape, torch.empty(3, len(E), device=E.device)
        bound_kernel[(triton.cdiv(N, 16),)](
            E, C, partial, x, counted, mean_tail, entropy, *out, math.log(eps) - SLACK, N, D, E.stride(0), C.stride(0),
            len(partial), ROWS=16, BLOCK_D=128,
        )
        return tuple(out)
    lse_head, target_logit = cce.block_logits(E, C[head]).logsumexp(1), class_logits(E, C, x.clamp(min=0))
    tail = E.to(mean_tail.dtype) @ mean_tail + entropy  # (N,)
    floor = torch.maximum(torch.logaddexp(lse_head, tail), target_logit.masked_fill(x < 0, -math.inf))
    return lse_head, target_logit, (floor + (math.log(eps) - SLACK)).masked_fill_(~counted, math.inf)


class Readback:
    """Numbers on their way from the device. read() waits until they are there, not until the device is idle: with work
    queued behind them, the host learns them while the device goes on."""

    def __init__(self, numbers):
        self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self.numbers.copy_(numbers, non_blocking=True)
        self.there = torch.cuda.Event() if numbers.is_cuda else None
        if self.there:
            self.there.record(torch.cuda.current_stream(numbers.device))

    def read(self):
        if self.there:
            self.there.synchronize()
        return self.numbers.tolist()


# ==== 6. The kernels ==================================================================================================
#
# From a tile of logits to lists, without a wait for the host. What a tile has to say is one bit an entry:
#
#     candidate_kernel   logits > threshold     0 0 1 0 0 0 1 0 ...   32 columns a word: N V / 8 bytes, in bands
#                        how many in a tile     2                     counts (tiles, N)
#     cumulative sum     rows' counts           [0, 2, 5, 5, ...]     where each row's list begins: no lock, no race
#     list_kernel        words -> (row, class)  (0, 2) (0, 6) ...     a word gives its lowest bit as long as it has one
#     row_pass_kernel    a program a row        C[v] in registers gives the logit and, a moment later, its part of dE
#     listed_rows_kernel a program a class      the sum over its entries of weight * E[row]: one writer, fixed order
#
# The row pass is where a sparse gradient pays: 8192 rows with 113 candidates each fetch 925,000 rows of C of 4.6 kB,
# 4.3 GB in 1.4 ms on an H200. Each is used twice, for the logit and for dE, while it is in registers.
#
# The lists' room is fixed before they are filled, from the forecast. What does not fit is not written, only counted,
# and the verdict has it made exactly.

BAND_BYTES, LIST_WORDS = 64 * MIB, 1024  # of bits alive at a time; words of a row that list_kernel looks at at once
# Of listed_rows_kernel: most classes list a few entries. One warp, whose threads fetch 16 bytes each of a row of E,
# makes SPAN tiles side by side: what it has to know of the row (up to a quarter of its instructions) serves all.
LISTED = dict(ROWS=1, COLS=256, ENTRIES=4, SPAN=3, num_warps=1)
# Of an embedding: the commonest token (two blanks, in source code) is one of ten, 6,500 entries of 65,536, summed by a
# program when the others are long done: 2.6 ms. So 32 are fetched at a time, and summed as a tree.
TOKENS = dict(COLS=128, ENTRIES=32, SPAN=1)
if INTERPRETED:
    LISTED = dict(ROWS=32, COLS=128, ENTRIES=2, SPAN=3)
    TOKENS = dict(SPAN=1)


@triton.jit
def fused_multiply_add(a, b, c):
    """a b + c, rounded once, whatever the compiler does elsewhere. Interpreted it is written out and rounds twice:
    tl.fma there fuses in newer Triton only."""
    if UPCAST:
        return a * b + c
    return tl.fma(a, b, c)


@triton.jit
def bound_kernel(
    E, C, partial, targets, counted, mean_tail, entropy, lse_head, target_logit, threshold, log_eps,
    N, D, stride_e, stride_c, tiles, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """lower_bound from partial (tiles, N), the log-sum-exp of the head's tiles: one kernel in place of thirty."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, x = rows < N, load_rows(targets, rows, N, -1)
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for t in range(tiles):
        part = load_rows(partial + t * N, rows, N, 0.0)
        higher = tl.maximum(top, part)
        total = total * tl.exp(top - higher) + tl.exp(part - higher)
        top = higher
    head = top + tl.log(total)
    tail, hit = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, D, BLOCK_D):
        cols = first + tl.arange(0, BLOCK_D)
        within = inside[:, None] & (cols < D)[None, :]
        e = tl.load(E + rows.to(tl.int64)[:, None] * stride_e + cols[None, :], mask=within, other=0.0).to(tl.float32)
        at = C + x[:, None] * stride_c + cols[None, :]
        hit += tl.sum(e * tl.load(at, mask=within & (x >= 0)[:, None], other=0.0).to(tl.float32), 1)
        tail += tl.sum(e * tl.load(mean_tail + cols, mask=cols < D, other=0.0)[None, :], 1)
    tail += tl.load(entropy)
    top = tl.maximum(head, tail)
    floor = top + tl.log(tl.exp(head - top) + tl.exp(tail - top))
    floor = tl.where(x >= 0, tl.maximum(floor, hit), floor)
    counts = load_rows(counted, rows, N, 0) != 0
    tl.store(lse_head + rows, head, mask=inside)
    tl.store(target_logit + rows, hit, mask=inside)
    tl.store(threshold + rows, tl.where(counts, floor + log_eps, float("inf")), mask=inside)


@triton.jit
def popcount(bits):
    """Set bits of each uint32: sums of neighbouring bits, pairs, nibbles, bytes."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def packed(flags, ROWS: tl.constexpr, COLS: tl.constexpr):
    """flags (ROWS, COLS) bool as words (ROWS, COLS / 32)."""
    bit = tl.full((COLS,), 1, tl.int32) << (tl.arange(0, COLS) % 32)
    return tl.sum(tl.reshape(tl.where(flags, bit[None, :], 0), (ROWS, COLS // 32, 32)), 2)


@triton.jit
def candidate_kernel(
    E, C, partial, words, counts, targets, threshold, head_place, N, V, D,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """02's lse_kernel, which also writes a bit per entry, 32 columns a word, words (N, V / 32): above the row's
    threshold or the target, and not in the head; and counts (column tiles, N) of them."""
    count, width = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V), tl.cdiv(V, BLOCK_V) * (BLOCK_V // 32)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_logits(index, E, C, None, N, V, D, 0, 0, True, BLOCK_N, BLOCK_V, BLOCK_D)
        cols = col + tl.arange(0, BLOCK_V)
        logits = mask_tail(logits, cols, V)
        top, tile_exp = exponentials(logits)
        rows, word = row + tl.arange(0, BLOCK_N), col // 32 + tl.arange(0, BLOCK_V // 32)
        inside = rows < N
        at = (col // BLOCK_V).to(tl.int64) * N + rows
        tl.store(partial + at, top + tl.log(tl.sum(tile_exp, 1)), mask=inside)
        bits = packed(logits > load_rows(threshold, rows, N, float("inf"))[:, None], BLOCK_N, BLOCK_V)
        # The target's word is x >> 5, its bit x & 31; where there is none, or it is in another band, no word here.
        x = load_rows(targets, rows, N, -1).to(tl.int32)
        target_bit = tl.full((BLOCK_N,), 1, tl.int32) << (x & 31)
        bits = tl.where(word[None, :] == (x >> 5)[:, None], bits | target_bit[:, None], bits)
        bits = bits & packed((load_rows(head_place, cols, V, 0) < 0)[None, :], 1, BLOCK_V)
        tl.store(words + rows.to(tl.int64)[:, None] * width + word[None, :], bits, mask=inside[:, None])
        tl.store(counts + at, tl.sum(popcount(bits.to(tl.uint32, bitcast=True)), 1), mask=inside)


@triton.jit
def list_kernel(
    words, begins, rows, classes, N, width, start, capacity, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """The bits of ROWS rows, words (N, width), as entries from place begins[row] on, by class; `start` is the class of
    the first bit. Beyond the capacity nothing is written.

    All words at once give away their lowest bit, as often as the fullest of them has one:
        bits 01101000    bits & -bits, the lowest: 00001000    less 1, its zeros below are ones: 00000111, three of
        them, so it is class 3 of the word    bits & (bits - 1), what is left: 01100000"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = load_rows(begins, row, N, 0)
    for i in range(0, width, WORDS):
        word = i + tl.arange(0, WORDS)
        at = words + row.to(tl.int64)[:, None] * width + word[None, :]
        bits = tl.load(at, mask=(row < N)[:, None] & (word < width)[None, :], other=0).to(tl.uint32, bitcast=True)
        count = popcount(bits)
        place = begin[:, None] + tl.cumsum(count, 1) - count  # after the row's so far and those of the words before
        begin += tl.sum(count, 1)
        for _ in range(tl.max(tl.max(count, 1), 0)):
            write = (bits != 0) & (place < capacity)
            v = start + word[None, :] * 32 + popcount((bits & (~bits + 1)) - 1)  # zeros below the lowest bit
            tl.store(classes + place, v, mask=write)
            tl.store(rows + place, tl.zeros_like(v) + row[:, None], mask=write)
            bits = bits & (bits - 1)
            place += 1


@triton.jit
def row_pass_kernel(
    dE, E, C, targets, lse, lse_head, g_softmax, g_target, mean_tail, classes, begin, end, values, dropped,
    N, D, stride_e, stride_c, bands, capacity, eps, BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):
    """blocked_row_pass: row program_id(0) of dE (N, D), values of its entries, and dropped (N,)."""
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_D)
    inside = depth < D
    e = tl.load(E + row * stride_e + depth, mask=inside, other=0.0).to(tl.float32)
    acc = tl.load(dE + row * D + depth, mask=inside, other=0.0)  # the head's part
    row_lse, x = tl.load(lse + row), tl.load(targets + row)
    row_g, row_target = tl.load(g_softmax + row), tl.load(g_target + row)
    kept = tl.zeros((ENTRIES,), tl.float32)
    for band in range(bands):
        stop = tl.minimum(tl.load(end + band * N + row), capacity)
        for i in tl.range(tl.load(begin + band * N + row), stop, ENTRIES, num_stages=STAGES):
            place = i + tl.arange(0, ENTRIES)
            v = tl.load(classes + place, mask=place < stop, other=0)
            at = C + v.to(tl.int64)[:, None] * stride_c + depth[None, :]
            c = tl.load(at, mask=(place < stop)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            p = tl.exp2((tl.sum(c * e[None, :], 1) - row_lse) * LOG2E)
            hit = (v == x) & (place < stop)  # beyond the list v is 0, which may be x; p is exp(-lse), maybe large
            p = tl.where(((p >= eps) & (place < stop)) | hit, p, 0.0)
            g = p * row_g - tl.where(hit, row_target, 0.0)
            kept += p
            acc += tl.sum(c * g[:, None], 0)
            tl.store(values + place, g, mask=place < stop)
    # m is what is left of 1. (Too much if the list was cut, but then the verdict refuses.)
    m = tl.maximum(1.0 - tl.exp2((tl.load(lse_head + row) - row_lse) * LOG2E) - tl.sum(kept, 0), 0.0)
    acc += row_g * m * tl.load(mean_tail + depth, mask=inside, other=0.0)
    tl.store(dE + row * D + depth, acc, mask=inside)
    tl.store(dropped + row, m)


@triton.jit
def listed_span(D, ROWS: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr):
    """Which tiles are this program's: the first of ROWS rows, the first column, and where its columns stop."""
    across = tl.cdiv(D, SPAN * COLS)
    first = tl.program_id(0) % across * SPAN * COLS
    return tl.program_id(0) // across * ROWS, first, tl.minimum(first + SPAN * COLS, D)


@triton.jit
def lists_of_rows(c, rows, stop):
    """Of rows (ROWS,) of ListedRows up to `stop`: prior, place in the head, beginning of the list and its length."""
    valid = rows < stop
    begin = tl.load(c.begin + rows, mask=valid, other=0)
    count = tl.load(c.begin + rows + 1, mask=valid, other=0) - begin
    prior, place = 0.0, begin.to(tl.int64)  # not used, unless there are some
    if c.prior is not None:
        prior = tl.load(c.prior + rows, mask=valid, other=0.0)
    if c.head_gradient is not None:
        place = tl.load(c.place + rows, mask=valid, other=-1).to(tl.int64)
    return prior, place, begin, count


@triton.jit
def listed_tile(c, lists, col, D, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr):
    """What ListedRows c stand for, fp32, at rows whose lists_of_rows these are and columns col ... col + COLS."""
    prior, place, begin, count = lists
    cols = col + tl.arange(0, COLS)
    inside = cols < D
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if c.prior is not None:
        acc += prior[:, None] * tl.load(c.lost_E + cols, mask=inside, other=0.0)[None, :]
    if c.head_gradient is not None:
        head_at = c.head_gradient + place[:, None] * D + cols[None, :]
        acc += tl.load(head_at, mask=(place >= 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for i in range(0, tl.max(count, 0), ENTRIES):
        if c.weights is None:
            j = i + tl.arange(0, ENTRIES)[None, :]
            listed = j < count[:, None]  # (ROWS, ENTRIES)
            n = tl.load(c.rows + begin[:, None] + j, mask=listed, other=0).to(tl.int64)
            e_at = c.E + n[:, :, None] * c.stride + cols[None, None, :]
            e = tl.load(e_at, mask=listed[:, :, None] & inside[None, None, :], other=0.0).to(tl.float32)
            acc += tl.sum(e, 1)
        else:
            for j in tl.static_range(ENTRIES):  # their rows of E are fetched together
                listed = i + j < count  # (ROWS,)
                n = tl.load(c.rows + begin + i + j, mask=listed, other=0).to(tl.int64)
                e_at = c.E + n[:, None] * c.stride + cols[None, :]
                e = tl.load(e_at, mask=listed[:, None] & inside[None, :], other=0.0).to(tl.float32)
                w = tl.load(c.weights + begin + i + j, mask=listed, other=0.0)
                # fused by name, not as the compiler likes, so that each kernel makes the same bits
                acc = fused_multiply_add(e, tl.broadcast_to(w[:, None], (ROWS, COLS)), acc)
    return acc


@triton.jit
def listed_rows_kernel(
    out, c, top, bottom, D, stride, ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ENTRIES: tl.constexpr, SPAN: tl.constexpr,
):
    """Rows top ... bottom of what ListedRows c stand for, written or added to out (bottom - top, D)."""
    row, first, stop = listed_span(D, ROWS, COLS, SPAN)
    rows = row + tl.arange(0, ROWS)
    lists = lists_of_rows(c, top + rows, bottom)
    for col in range(first, stop, COLS):
        acc = listed_tile(c, lists, col, D, ROWS, COLS, ENTRIES)
        cols = col + tl.arange(0, COLS)
        at = out + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        inside = (top + rows < bottom)[:, None] & (cols < D)[None, :]
        if ADD:
            acc += tl.load(at, mask=inside, other=0.0)
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def listed_options(listed, R, D):
    """Programs, and their constants, for R rows of ListedRows."""
    options = LISTED | (TOKENS if listed.weights is None else {})
    return triton.cdiv(R, options["ROWS"]) * triton.cdiv(D, options["COLS"] * options["SPAN"]), options


def bands_of(N, V):
    """(start, stop) of the classes that are done in one go."""
    return cce.pieces(V, max(TILE_V, 8 * BAND_BYTES // N // TILE_V * TILE_V))


def band_entries(E, C, x, threshold, place, start, stop):
    """Classes start ... stop: partial lse (tiles, N), bits (N, words), how many in a tile (tiles, N)."""
    (N, D), ints = E.shape, dict(dtype=torch.int32, device=E.device)
    tiles = cce.TILES["descriptors"] | ({} if INTERPRETED else dict(num_stages=4))  # no tile of G, room for a fourth
    tall = -(-(stop - start) // TILE_V)
    partial, words = torch.empty(tall, N, device=E.device), torch.empty(N, tall * TILE_V // 32, **ints)
    counts = torch.empty(tall, N, **ints)
    candidate_kernel[cce.programs(E)](
        cce.fetched(E, "BLOCK_N", "BLOCK_D"), cce.fetched(C[start:stop], "BLOCK_V", "BLOCK_D"), partial, words,
        counts, x - start if start else x, threshold, place[start:], N, stop - start, D, **tiles,
    )
    return partial, words, counts


def listed_entries(E, C, x, threshold, place, capacity, begun):
    """blocked_entries by kernels: lse (N,), and the Entries, as far as there is room for them. begun: the first band's
    band_entries, if they are made already; the list is emptied."""
    N, V, ints = len(E), len(C), dict(dtype=torch.int32, device=E.device)
    rows, classes = torch.empty(capacity, **ints), torch.full((capacity,), V, **ints)
    count, partial, begin, end = 0, [], [], []
    for start, stop in bands_of(N, V):
        part, words, counts = begun.pop() if begun else band_entries(E, C, x, threshold, place, start, stop)
        counts = counts.sum(0)  # (N,) int64
        partial.append(part)
        end.append(count + counts.cumsum(0))
        begin.append(end[-1] - counts)
        count = end[-1][-1]
        across = min(LIST_WORDS, triton.next_power_of_2(words.shape[1]))
        list_kernel[(triton.cdiv(N, 1024 // across),)](  # 1024 words in registers: some rows, or a part of one
            words, begin[-1], rows, classes, N, words.shape[1], start, capacity, ROWS=1024 // across, WORDS=across
        )
        del words, counts
    return cce.merge(torch.cat(partial)), Entries(rows, classes, count, torch.stack(begin), torch.stack(end))


def listed_row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries, eps):
    """blocked_row_pass by kernels. A row of D elements in registers, at most 32 a thread; two rows of C added, two more
    pairs on their way."""
    (N, D), values, m = E.shape, torch.empty(entries.rows.shape, device=E.device), torch.empty_like(lse)
    options = dict(BLOCK_D=triton.next_power_of_2(D), ENTRIES=16, STAGES=1)
    if not INTERPRETED:
        options |= dict(ENTRIES=2, STAGES=3, num_warps=max(2, options["BLOCK_D"] // 1024))
    row_pass_kernel[(N,)](
        dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries.classes, entries.begin, entries.end,
        values, m, N, D, E.stride(0), C.stride(0), len(entries.begin), len(values), eps, **options,
    )
    return values, m


# ==== 7. What it costs, whether to use it, and the gradient itself ====================================================
#
# Time, in matrix passes of 2 N V D FLOP. What is dense counts its FLOP, what is fetched is told as dense entries that
# take as long, and there is what a call pays whatever its size. The two constants were measured on an H200.
#
#     1                              the pass over the logits
#     4 H / V                        the head: logits for the bound, logits again, dE, dC
#     3 R / N                        the survey: logits, and two products of (R, V) with C
#     ENTRY_COST candidates / V      a candidate: a row of C and one of E, where a dense pass has multiply-adds
#     FIXED_COST / (N V D)           over 200 small kernels, of which those before the pass are waited for: 1 to 2 ms
#
#     8192 x 256000 x 2304, 113 candidates a row:    1 + 0.06 + 0.05 + 0.18 + 0.19 = 1.48     the exact gradient: 4
#     8192 x 65536 x 512, none:                      1 + 0.25 + 0.05 + 0    + 3.27 = 4.57     better exact

ENTRY_COST, FIXED_COST = 400, 0.9e12


def sparse_passes(N, V, D, candidates, device):
    """Matrix passes' worth of time of loss and sparse gradient, for a mean number of candidates a row."""
    fixed = FIXED_COST / (N * V * D) if device.type == "cuda" else 0
    return 1 + 4 * head_size(V) / V + 3 * min(SAMPLE, N) / N + ENTRY_COST * candidates / V + fixed


# Bytes, as 02 counts them: at the peak, beyond dE and dC. Candidates are two int32 (8 bytes) when they are listed; when
# the column pass sorts them, with their order in int64, in and out, and the values beside them: 48. What is alive:
#
#     survey       logits, p and d of 128 rows, (R, V) each; C of the head         neither dE nor dC is there yet, so
#     pass         lists, bits of a band; partial sums of all tiles, joined        the room that they will take is free
#     head         lists, dE in fp32, G and C of the head, its dC
#     sort         lists and their order twice, the head's dC, dE                  now dE is there,
#     column pass  rows, classes as listed; rows, weights as sorted: 16 bytes      and dC is being written

ENTRY_BYTES = 48


def sparse_room(V, D, dtype, workspace=None):
    """Entries that `workspace` has room for, beside dC of the head."""
    room = (cce.WORKSPACE if workspace is None else workspace) - dtype.itemsize * head_size(V) * D
    return max(0, room) // ENTRY_BYTES


def capacity_for(N, candidates):
    """Entries to make room for when a sample has this mean number of candidates a row: half as many again, and 32 each
    (targets, and rows of a kind too rare for a sample); in steps, so that the allocator sees few sizes."""
    return -(-math.ceil((1.5 * candidates + 32) * N) // 2**16) * 2**16


def sparse_bytes(N, V, D, dtype, capacity, sink=False):
    """Bytes at the peak of loss and gradients beyond dE and dC, with the kernels; with a sink there is no dC."""
    b, H, R = dtype.itemsize, head_size(V), min(SAMPLE, N)
    results, lists = b * (N + (0 if sink else V)) * D, 8 * capacity
    surveyed = 3 * b * R * V + b * H * D + 8 * R * D + 8 * V  # logits, p, d; C of the head; two products; prior, place
    forward = lists + min(BAND_BYTES, N * V // 8) + 2 * 4 * N * math.ceil(V / TILE_V)  # bits; partial, twice
    width = 4 if sink else b  # of the head's dC
    split = 0 if sink else 4 * H * D  # cuBLAS splits the sum for a 16-bit dC
    head = lists + 4 * N * D + b * H * (N + D) + width * H * D + split  # dE in fp32, G and C of the head, its dC
    ordered = ENTRY_BYTES * capacity + width * H * D + b * N * D  # dE is finished, dC not begun
    column = 16 * capacity + 12 * V + width * H * D
    return max(column, *(size - results for size in (surveyed, forward, head, ordered)))


# "auto" goes so far: an error, as |error| / |gradient|, of 2 % in dE and in dC; beyond a half, the correction would be
# the gradient. "sparse" goes everywhere, unless the lists are too short. The question is asked twice: in forward for
# what the sample promises; in backward for what was measured, when the time is spent already.

MAX_ERROR, MAX_DROPPED = 0.02, 0.5

# gradient "sparse" or "auto"; threshold of an entry; what auto allows dE and dC to be off by; matrix passes of the
# exact gradient, classes in its blocks; entries that fit; "triton" or "torch"; a SparseStats; what takes dC or None
Sparse = namedtuple("Sparse", "gradient eps max_error passes block capacity backend stats sink")


def refusal(candidates, dropped, error_E, error_C, N, how):
    """Why not to use the sparse gradient, for numbers that were forecast or measured: candidates, a mean over all N
    rows; probability dropped, over those that count; relative errors. None if nothing is against it. NaN is too
    large."""
    if not candidates * N <= how.capacity:
        return f"{candidates:.0f} candidates a row, places for {how.capacity // N}"
    if how.gradient == "sparse":
        return None
    if not dropped <= MAX_DROPPED:
        return f"{dropped:.2f} of the probability would be dropped, more than {MAX_DROPPED}"
    for what, error in (("dE", error_E), ("dC", error_C)):
        if not error <= how.max_error:
            return f"{what} would be off by {error:.3f}, more than {how.max_error}"
    return None


class SparseStats(types.SimpleNamespace):
    """What became of a call, or of several when passed to each of them.

    calls, sparse: how many wanted a gradient; backwards that gave a sparse one. Of the last: decision, "sparse" or
    "exact" (final after backward), and reason; forecast, three numbers, and after a sparse backward measured (4,): a
    row's mean number of candidates and probability dropped, the relative errors of dE and (measured) dC; dropped (N,),
    the probability that each row lost; survey. Tensors are on the device; what does not apply is None."""

    def __init__(self):
        super().__init__(calls=0, sparse=0)
        self.reset("exact", "no call yet")

    def reset(self, decision, reason):
        self.decision, self.reason = decision, reason
        self.forecast = self.measured = self.dropped = self.survey = None

    def __str__(self):
        return f"{self.decision} ({self.reason}); {self.sparse} of {self.calls} calls sparse; forecast {self.forecast}"


# The gradient itself is one node for autograd. Time runs to the right; the host is ahead of the device but for two
# waits:
#
#     host     survey, bound | wait | pass, lists, left_over | head, row pass, verdict, column pass | wait |
#     device     survey, bound      | PASS PASS PASS PASS lists, left_over, head, row pass, verdict, column pass
#                            ^ forecast                                                         ^ measured
#
# The first wait is real: nothing is queued behind the forecast but a few small kernels, so all that comes before it is
# kept short, and what only backward needs (left_over) comes after. Unless the last call was sparse: so will this be,
# and the pass begins with its first band while the host reads. (If not, that band was for nothing.) The second is not:
# the column pass is running, and if the verdict is "exact", its dC is thrown away. A sink's step is not undone, so
# there the column pass waits, too.


class _SparseCrossEntropy(torch.autograd.Function):
    """(E, C) -> lse (N,) and the target's logit (N,), both exact; their gradients sparse."""

    @staticmethod
    @cce.without_autocast
    def forward(ctx, E, C, x, counted, how, found, sample, begun, lse_head, target_logit, threshold):
        if how.backend == "triton":
            lse, entries = listed_entries(E, C, x, threshold, found.place, how.capacity, begun)
        else:
            lse, entries = blocked_entries(E, C, x, threshold, found.place)
        left = left_over(sample)
        ctx.save_for_backward(E, C, x, counted, lse, lse_head, *found, *left, *entries)
        ctx.how = how
        return lse, target_logit.clone()

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, grad_lse, grad_target):
        E, C, x, counted, lse, lse_head, *others = ctx.saved_tensors
        found, left, entries, how = Survey(*others[:4]), Left(*others[4:8]), Entries(*others[8:]), ctx.how
        # (N,): of softmax and onehot, as in 02; a gradient may come as one number, expanded
        g_softmax, g_target = grad_lse.contiguous(), -grad_target.contiguous()
        rows = E, C, x, lse, g_softmax, g_target
        need, stats = (cce.wanted(ctx, 0), cce.wanted(ctx, 1)), how.stats

        # dE is made even if only dC is wanted: the verdict needs its length.
        dE, dC_head, values, m = sparse_dE(*rows, lse_head, found, entries, how)
        measured, m = verdict(dE, dC_head, g_softmax, m, counted, left, entries)
        answer = Readback(measured)  # travels while the work below goes on
        dE = dE.to(E.dtype)
        listed = dC = None
        if need[1]:
            listed = sparse_dC(E, g_softmax * m, values, dC_head, found, entries)
            del values
        if need[1] and not how.sink:  # a sink's step is not undone, so it waits for the verdict
            narrow = lse.dtype if INTERPRETED and how.backend == "triton" else C.dtype  # it truncates to bf16
            dC = torch.empty(C.shape, dtype=narrow, device=C.device)
            write_rows(dC, listed, backend=how.backend)
            dC = dC.to(C.dtype)

        refused = refusal(*answer.read(), len(E), how)
        if refused is None:
            stats.sparse, stats.measured, stats.dropped = stats.sparse + 1, measured, m
            if need[1] and how.sink:
                how.sink.begin()
                how.sink.listed(listed)
        else:
            stats.reset("exact", refused)
            del dE, dC, listed, dC_head
            dE, dC = cce.sliced_gradients(need, *rows, None, how.backend, how.block, how.sink)
        return dE, dC, *[None] * 9


def sparse_dE(E, C, x, lse, g_softmax, g_target, lse_head, found, entries, how):
    """dE (N, D) in fp32; of the head dC (H, D); values (entries,) of G; and what each row drops, m (N,)."""
    dE, C_head = torch.zeros(E.shape, dtype=lse.dtype, device=E.device), C[found.head]  # (H, D)
    x_head = found.place[x.clamp(min=0)].where(x >= 0, -1).long()  # (N,) targets as places in the head
    G = cce.gradient_slice(E, C_head, x_head, lse, g_softmax, g_target, None, how.backend)  # (N, H)
    cce.add_to(dE, G, C_head)
    dC_head = cce.set_to(torch.empty_like(C_head, dtype=lse.dtype if how.sink else None), G.T, E)
    del G, C_head  # before the lists are read
    row_pass = listed_row_pass if how.backend == "triton" else blocked_row_pass
    return dE, dC_head, *row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, found.mean_tail, entries, how.eps)


def verdict(dE, dC_head, g_softmax, m, counted, left, entries):
    """measured (4,), see SparseStats, by the formulas of section 5; and m (N,) of the rows that count. dC's length is
    at least that of its head."""
    N, norm = len(m), functools.partial(torch.linalg.vector_norm, dtype=dE.dtype)
    m = m.where(counted, 0.0)  # the others list nothing: all that is not in the head seemed dropped
    counts, g = counted.sum().clamp(min=1), g_softmax[left.rows]
    error_E = left.residual * norm(g_softmax * m) / norm(dE).clamp(min=1e-30)
    error_C = error_of_dC(left, g, counts / len(g)) / norm(dC_head).clamp(min=1e-30)
    return torch.stack([t.double() for t in (entries.count.double() / N, m.sum() / counts, error_E, error_C)]), m


def sparse_dC(E, weight, values, dC_head, found, entries):
    """dC (V, D) as ListedRows: the entries, sorted by class; the correction, weight (N,) = g m; the head."""
    others = dict(prior=found.prior, lost_E=weighted_rows(weight, E), head_gradient=dC_head, place=found.place)
    return listed_rows(E, entries.rows, entries.classes, values, len(found.place), **others)


# ==== 8. The API ======================================================================================================


def linear_cross_entropy(
    E, C, targets, bias=None, *, gradient="exact", eps=SPARSE_EPS, max_error=MAX_ERROR, stats=None, ignore_index=-100,
    softcap=None, reduction="mean", return_lse=False, backend="auto", workspace=None, sink=None, shard=None,
):
    """02's linear_cross_entropy, whose arguments mean the same, with a choice of gradient. The loss is always exact.

    gradient: "exact" (02), "sparse", or "auto".
    "sparse": of the classes outside the head, only entries with softmax >= eps, and targets; the rest by a correction
    of rank 1. Exact only if the entries do not fit `workspace`. No softcap, no shard. fp32 and bf16.
    "auto": "sparse" if a sample of this very call's rows says that it is faster than "exact" (by figures of an H200),
    drops at most half of the probability, and leaves an error of dE (relative, Frobenius) of at most max_error; else
    "exact". Backward knows what every row dropped, estimates the errors of dE and dC from that and the sample, and
    remakes the gradient exactly if one is above max_error. These are estimates, no proof: a kind of row rarer than one
    in 128 may be missed, and its error with it.
    Both read numbers back, in forward before the pass, in backward with work queued behind them; a CUDA graph cannot
    capture them. In forward, while there is no dC, the survey takes 6 bytes (fp32: 12) x 128 x V and the head's rows of
    C beyond `workspace`.
    sink: as in 02; a sparse gradient calls begin() and listed(ListedRows), all of dC at once.
    stats: a SparseStats, which is filled in (and read without waiting, but for its tensors).
    Returns loss[, lse].

    Kernels for bf16 on Hopper (rows of whole 16 bytes), blocked PyTorch otherwise. Bitwise repeatable ("sparse" in
    blocked PyTorch: on a CPU). ValueError for arguments that do not fit, or that the chosen gradient would ignore, and
    for "sparse" and "auto" in the capture of a CUDA graph. arXiv 2411.09009."""
    base.refuse(
        (gradient not in ("exact", "sparse", "auto"), f"gradient is {gradient!r}: use 'exact', 'sparse' or 'auto'"),
        (not 0 < eps < 1, f"eps is {eps!r}: use a number between 0 and 1"),
        (not 0 < max_error < 1, f"max_error is {max_error!r}: use a number between 0 and 1"),
        (max_error != MAX_ERROR and gradient != "auto", f"max_error goes with gradient='auto', not {gradient!r}"),
        (eps != SPARSE_EPS and gradient == "exact", "eps goes with gradient='sparse' or 'auto', not 'exact'"),
        (stats is not None and gradient == "exact", "stats go with gradient='sparse' or 'auto', not 'exact'"),
        (gradient == "sparse" and softcap is not None, "gradient is 'sparse', which takes no softcap: use 'exact'"),
        (bias is not None and sink is not None, "a sink takes the rows of C as they are: pass it no bias"),
        (gradient != "exact" and shard, f"gradient is {gradient!r}, but C is a slice of the vocabulary: use 'exact'"),
    )
    wish, stats = backend, stats or SparseStats()
    E, C, backend = cce.checked_inputs(E, C, targets, bias, ignore_index, softcap, reduction, backend, workspace, shard)
    results, shape, x = None, targets.shape, targets.reshape(-1)
    if gradient != "exact":
        flat = cce.kernel_inputs(*cce.with_bias(E.reshape(-1, C.shape[1]), C, bias))
        plan = functools.partial(cce.plan_for, *flat, softcap, reduction, return_lse, backend, workspace, sink)
        passes, block = plan().passes, plan(differentiable=False).block
        fetched = backend == "triton" and cce.takes_descriptors(*flat)
        base.refuse((gradient == "sparse" and wish in ("triton", "v3") and not fetched and E.numel(),
                     f"backend is {wish!r} but E is {E.dtype}, {E.shape[-1]} wide: the kernels of 03 need 'triton', "
                     "Hopper and bf16 rows of whole 16 bytes: use 'auto'"))
        room = sparse_room(*flat[1].shape, E.dtype, workspace)
        how = Sparse(gradient, eps, max_error, passes, block, room, "triton" if fetched else "torch", stats, sink)
        counted = torch.ones_like(x, dtype=torch.bool) if return_lse else x != ignore_index  # lse may have a gradient
        results = sparse_lse(*flat, x, counted, softcap, how)
        del flat, plan  # with a bias, copies
    if results is None:
        return cce.linear_cross_entropy(
            E, C, targets, bias, ignore_index=ignore_index, softcap=softcap, reduction=reduction,
            return_lse=return_lse, backend=wish, workspace=workspace, sink=sink, shard=shard,
        )
    loss = cce.loss_from(*results, x, C.shape[0], ignore_index, reduction, shape)
    return (loss, results[0].view(shape)) if return_lse else loss


def sparse_lse(E, C, targets, counted, softcap, how):
    """lse (N,) and the target's logit (N,), with sparse gradients; or None, and the reason in the statistics."""
    (N, D), V, stats = E.shape, C.shape[0], how.stats
    if not (torch.is_grad_enabled() and (E.requires_grad or C.requires_grad)) or N == 0:
        stats.reset("exact", "no gradient is wanted")
        return None
    base.refuse(
        (E.is_cuda and torch.cuda.is_current_stream_capturing(), f"gradient is {how.gradient!r}, which reads numbers "
         "back to decide: a CUDA graph cannot capture it: use 'exact'"),
        (how.gradient == "sparse" and E.dtype == torch.float64, "gradient is 'sparse', for fp32 and bf16: use 'exact'"),
    )
    refused = found = numbers = None
    begun = []
    if how.gradient == "auto":  # what needs no look at the numbers
        if softcap is not None or E.dtype == torch.float64:
            refused = "a softcap, or fp64, which the sparse gradient does not take"
        elif E.is_cuda and how.backend == "torch":
            refused = "no kernels: they need backend 'triton' or 'auto', Hopper, and bf16 rows of whole 16 bytes"
        elif not sparse_passes(N, V, D, 0.0, E.device) < how.passes:
            refused = "too few tokens or classes to gain anything"
    if refused is None:
        x = targets.where(counted & (targets >= 0) & (targets < V), -1)
        with torch.no_grad(), torch.autocast(E.device.type, enabled=False):
            found, sample, bounds, sums = survey(E, C, x, counted, how.eps, how.backend)
            if how.backend == "triton" and stats.decision == "sparse":
                begun = [band_entries(E, C, x, bounds[2], found.place, *bands_of(N, V)[0])]
        counts, candidates, dropped, whole, length = sums.read()
        R = len(sample.m)  # rows that do not count have no candidates; 0.0 below: dC's error is not known yet
        numbers = candidates / R * counts / N, dropped / R, length / max(whole, 1e-30)
        refused, passes = refusal(*numbers, 0.0, N, how), sparse_passes(N, V, D, numbers[0], E.device)
        if how.gradient == "auto" and not refused and not passes < how.passes:
            refused = f"{numbers[0]:.0f} candidates a row, {passes:.1f} passes' worth of time: exact takes {how.passes}"
    stats.reset("exact" if refused else "sparse", refused or "the forecast is within its limits")
    stats.calls, stats.survey, stats.forecast = stats.calls + 1, found, numbers
    if refused:
        return None
    how = how._replace(capacity=min(how.capacity, capacity_for(N, numbers[0])))
    return _SparseCrossEntropy.apply(E, C, x, counted, how, found, sample, begun, *bounds)


# ==== 9. Checks and planted bugs ======================================================================================
#
# Each approximation is compared with the same rule on dense logits in fp64, by 02's three-way rule: that all agree on
# what is dropped shows the algorithm to be right, whatever its error is. The error is another question, and what is
# checked of it is the estimate.
#
#     filter     which tiles are kept, what each row lost, its bound; loss, dE, dC with those tiles: both rules
#     sparse     which entries are kept, what each row lost; loss, dE, dC: rows that are hard to list (see there)
#     survey, lower_bound, error_of_dC     each term beside its formula, or beside the truth for all rows, dense
#     auto, blind_spot, room               what is decided, and that the promised error is the true one, or is not


patched = functools.partial(mock.patch.multiple, sys.modules[__name__])  # with patched(SLICE=8): ...


def filter_backends(device, dtype, D):
    """Where 03 runs for such inputs: blocked PyTorch anywhere, kernels if their terms are met."""
    backends, fits = cce.backends(device), dtype.itemsize == 2 and D % 8 == 0
    runs = fits and "triton" in backends and (INTERPRETED or cce.is_hopper(torch.device(device)))
    return backends if runs else ("torch",)


def filter_problem(device, dtype=torch.float32, seed=0, D=40):
    """E, C, x of a few tiles and odd ends. The rows of a tile share a few targets, so that some tiles hold none; one
    target a tile has hardly any probability: nothing else keeps its tile; ignored rows would keep tiles anywhere."""
    E, C, x = trained_problem(3 * TILE_N - 6, 11 * TILE_V - 4, D, dtype, device, seed)
    n = torch.arange(len(x), device=device)
    x, ignored, rare = x[n // TILE_N * TILE_N + n % 5], n % 7 == 0, C[:, 0].argsort()
    x[1::TILE_N] = rare[0]
    with torch.no_grad():
        E[ignored] = 30 * torch.nn.functional.normalize(C[997 * n[ignored] % len(C)])
    return E, C, x.where(~ignored, -100)


def dense_gradients(E, C, x, keep, g, h=0.0, found=None):
    """On dense logits made in the dtype of E: losses (N,), dE and dC for upstream gradients g (N,) of the losses and h
    of lse, from the entries where keep (N, V); and m (N,), the probability dropped, for which `found` has a tail."""
    logits = (E @ C.T).to(torch.promote_types(E.dtype, torch.float32))
    p, counts = logits.softmax(1), x >= 0
    onehot = torch.nn.functional.one_hot(x.clamp(min=0), C.shape[0]).bool() & counts[:, None]
    G = (((g * counts + h)[:, None] * p - g[:, None] * onehot) * keep).to(E.dtype)  # (N, V)
    m, dE, dC = (p * ~keep).sum(1), G @ C, G.T @ E
    if found is not None:
        weight, mean_tail, prior = (t.to(E.dtype) for t in ((g * counts + h) * m, found.mean_tail, found.prior))
        dE, dC = dE + torch.outer(weight, mean_tail), dC + torch.outer(prior, weight @ E)
    return [(logits.logsumexp(1) - (logits * onehot).sum(1)) * counts, dE, dC], m


def check_filter(device="cpu", dtype=torch.float32, rule="mass", only_dE=False, sort=True, seed=0):
    """Loss, gradients, kept tiles and bound. The threshold drops half of the tiles without a target; some are kept only
    for their target (if sorted); several slices; two runs give the same bits."""
    E, C, x = filter_problem(device, dtype, seed)
    exact, counted = [t.detach().double() for t in (E, C)], x >= 0
    logits, order = exact[0] @ exact[1].T, torch.arange(len(C), device=device)  # (N, V), (V,)
    if sort:
        order = vocabulary_order(E.detach(), C.detach(), counted)
        average = logits[counted].mean(0)[order]  # (V,)
        # climb: how far an average is above the smallest before it; in a falling order only by rounding
        climb, slack = (average - average.cummin(0).values).max(), 1e-5 if dtype == torch.float32 else 2**-8
        base.require(len(order.unique()) == len(C), f"{dtype}: the order is no permutation")
        base.require(climb <= slack * average.abs().max(), f"{dtype}: the average logit climbs by {climb:.1e}")
    p, rows = logits.softmax(1), counted.nonzero().flatten()
    held = torch.zeros(-(-len(x) // TILE_N), -(-len(C) // TILE_V), dtype=torch.bool, device=device)
    held[rows // TILE_N, inverse(order)[x[rows]] // TILE_V] = True
    columns = (p * counted[:, None])[:, order].split(TILE_V, 1)
    values = torch.stack([c.amax(1) if rule == "element" else c.sum(1) for c in columns], 1)  # (N, tiles)
    tiles = torch.stack([v.amax(0) for v in values.split(TILE_N)])  # (row tiles, tiles)
    eps, weights = tiles[~held].median().item(), counted / counted.sum(dtype=torch.float64)

    def dense(E, C):
        (losses, dE, dC), _ = dense_gradients(E, C, x, mask, weights)
        if only_dE:
            (_, _, dC), _ = dense_gradients(E, C, x, torch.ones_like(mask), weights)
        return (losses * weights).sum(), dE, dC

    for backend in filter_backends(device, dtype, E.shape[1]):
        name = f"{backend} {dtype} rule {rule}, only_dE {only_dE}, sort {sort}"
        with patched(SLICE=4 * TILE_V):
            *got, stats = filtered_cross_entropy(E, C, x, rule, eps, sort, only_dE, backend)
            again = filtered_cross_entropy(E, C, x, rule, eps, sort, only_dE, backend)
        base.require(torch.equal(stats.order, order), f"{name}: another order")
        near = (tiles / eps).log().abs() < (1e-3 if dtype == torch.float32 else 5e-2)  # rounding may decide these
        base.require(((stats.keep == (held | (tiles >= eps))) | near).all(), f"{name}: other tiles are kept")
        base.require(not sort or (held & (tiles < eps)).any(), f"{name}: no tile is kept for its target alone")
        mask = torch.empty_like(p, dtype=torch.bool).index_copy_(1, order, tile_mask(stats.keep, *p.shape))
        dropped, gone = (p * ~mask).sum(1), (~stats.keep).sum(1).repeat_interleave(TILE_N)[: len(x)]  # (N,) each
        base.require((stats.dropped - dropped * counted).abs().max() < 1e-3, f"{name}: another probability is lost")
        base.require((stats.dropped <= stats.bound * 1.001).all(), f"{name}: more is lost than the bound allows")
        bound = gone * counted * eps * (TILE_V if rule == "element" else 1)
        base.require((stats.bound - bound).abs().max() < 1e-3, f"{name}: the bound is not {bound.max().item()}")
        for part, *values in zip(("loss", "dE", "dC"), got, dense(E.detach(), C.detach()), dense(*exact), strict=True):
            slack = 2e-6 if dtype == torch.float32 or part == "loss" else 1e-3
            cce.require_as_good(f"{name}: {part}", *values, slack)
        base.require(all(map(torch.equal, got, again)), f"{name}: two runs on the same input differ")


def adversarial_problems(device, dtype, D=24, seed=0):
    """{name: (E, C, targets, eps)}, each with ignored rows, small enough for the interpreter."""
    N, V = TILE_N + 8, 5 * TILE_V - 4
    generator = torch.Generator().manual_seed(seed)
    n, ignored = torch.arange(N), torch.arange(N) % 7 == 3

    def problem(E, C, x, eps):
        leaves = [t.to(device, dtype).requires_grad_() for t in (E, C)]
        return *leaves, x.where(~ignored, -100).to(device), eps

    E, C, x = (t.detach() for t in trained_problem(N, V, D, torch.float32, "cpu", seed))
    found = {"a Zipf law": problem(E, C, x, 2**-9)}
    # Every row bets on a class of its own: there are more of them than the head takes.
    own = torch.randperm(V, generator=generator)[:N]
    C = torch.nn.functional.normalize(torch.randn(V, D, generator=generator))
    found["all in the tail"] = problem(40 * C[own], C, own.where(n % 2 == 0, (own + 1) % V), 2**-9)
    # All rows alike: 0.9 for the head's classes, 0.05 for one more, and a quarter of eps for each of the others.
    p = torch.full((V,), 0.05 / V)
    p[-1], p[: head_size(V)] = 0.05, 0.9 / head_size(V)
    C = torch.randn(V, D, generator=generator) / 8
    C[:, 0] = p.log()
    E = torch.randn(N, D, generator=generator) / 8
    E[:, 0] = 1
    found["a class of every row"] = problem(E, C, n % V, 0.2 / V)
    found["ties"] = problem(torch.zeros(N, D), C, n % V, 1 / V)
    return found


def check_sparse(device="cpu", dtype=torch.float32, lse_weight=0.0, seed=0, names=None):
    """Loss, gradients and dropped probability of what is hard: rows that lie in the tail, a class that every row lists,
    classes that no row lists, entries that lie on the threshold, ignored rows. In several bands; two runs give the same
    bits."""
    for name, (E, C, x, eps) in adversarial_problems(device, dtype, seed=seed).items():
        if names and name not in names:
            continue
        N, weight = len(x), torch.linspace(0.5, 1.5, len(x), device=device)
        exact = [t.detach().double() for t in (E, C)]
        p = (exact[0] @ exact[1].T).softmax(1)  # (N, V)
        counted = x >= (-100 if lse_weight else 0)
        for backend in filter_backends(device, dtype, E.shape[1]):
            runs, title = [], f"{backend} {dtype}, {name}, lse {lse_weight}"
            # (Interpreted, the slow ones run once, and are compared with themselves.)
            for _ in range(1 if backend == "triton" and INTERPRETED and name != "a Zipf law" else 2):
                stats = SparseStats()
                few = patched(BAND_BYTES=N * 2 * TILE_V // 8, LIST_WORDS=2)  # bands of two tiles; two words at a time
                with few, mock.patch.object(cce, "CPU_BLOCK", 100 * E.shape[1]):
                    result = linear_cross_entropy(E, C, x, gradient="sparse", eps=eps, stats=stats, backend=backend,
                                                  reduction="none", return_lse=lse_weight > 0)
                    loss, lse = result if lse_weight else (result, torch.zeros(()))
                    total = (loss * weight).sum() + (lse_weight * lse).sum()
                    runs.append([loss.detach(), *torch.autograd.grad(total, (E, C))])
            base.require(stats.decision == "sparse" and stats.measured.isfinite().all(), f"{title}: {stats}")
            keep = torch.zeros_like(p, dtype=torch.bool).index_fill_(1, stats.survey.head, True)
            keep[x >= 0, x[x >= 0]] = True
            # Where all p are eps exactly, m tells on which side of it rounding has put them.
            lower = 1 - 1e-5 if stats.dropped.max() < 0.1 else 1 + 1e-5
            keep |= p >= eps * (lower if name == "ties" else 1)
            want, m = dense_gradients(*exact, x, keep, weight.double(), lse_weight, stats.survey)
            peer, _ = dense_gradients(E.detach(), C.detach(), x, keep, weight, lse_weight, stats.survey)
            base.require((stats.dropped - m * counted).abs().max() < 1e-4, f"{title}: other entries are dropped")
            for part, g, q, w in zip(("loss", "dE", "dC"), runs[0], peer, want, strict=True):
                # m = 1 - head - kept is off by a few 2^-24 whatever its size; one lost entry would be 2^-9.
                cce.require_as_good(f"{title}: {part}", g, q, w, 1e-5 if dtype.itemsize > 2 else 1e-3)
            same = all(map(torch.equal, runs[0], runs[-1]))  # cuSPARSE promises nothing
            base.require(same or backend == "torch" and E.is_cuda, f"{title}: two runs on the same input differ")


def check_listed_rows(device="cpu"):
    """The kernel beside its twin where a row takes several programs: all terms, some of the rows, written, added."""
    D, N, V, H = LISTED["COLS"] * LISTED["SPAN"] + 8, 20, 70, 5
    rows, classes, weights = torch.arange(90) * 7 % N, torch.arange(90) ** 2 % (V + 1), torch.linspace(-1, 1, 90)
    E, head, prior, lost = (base.random_problem(m, 2, D, torch.float32)[0].detach() for m in (N, H, V, 1))
    place = torch.full((V,), -1, dtype=torch.int32).index_copy_(0, torch.arange(H) * 9, torch.arange(H).int())
    full = dict(prior=prior[:, 0].contiguous(), lost_E=lost[0], head_gradient=head, place=place)
    for values, others in ((weights, full), (None, {})):
        parts = {key: t.to(device) for key, t in others.items()}
        values = None if values is None else values.to(device)
        listed = listed_rows(E.to(device), rows.to(device), classes.to(device), values, V, **parts)
        for add in (False, True):
            out = [torch.ones(V - 30, D, device=device) for _ in range(2)]
            for part, backend in zip(out, ("torch", cce.backends(device)[-1]), strict=True):
                write_rows(part, listed, 20, add, backend)
            base.require(cce.error(*out) < 1e-6, f"add {add}: rows differ by {cce.error(*out):.1e}")


def check_survey(device="cpu"):
    """All that the survey says of its rows, beside the same from dense fp64; all rows count, so the sample is all."""
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        E, C, x = (t.detach() for t in trained_problem(SAMPLE, 50 * TILE_V, 24, dtype, device))
        eps, x[::5], counted = 2**-9, -1, torch.ones_like(x, dtype=torch.bool)  # these rows count for lse alone
        found, sample, (*_, threshold), forecast = survey(E, C, x, counted, eps, "torch")
        left, rows = left_over(sample), sample.rows
        e, c, met, target = E.double()[rows], C.double(), (x >= 0)[rows, None], x[rows, None]
        base.require(len(set(rows.tolist())) == SAMPLE, f"{dtype}: the sample has rows twice")
        logits, head = e @ c.T, found.head  # (R, V), (H,)
        p, hit = logits.softmax(1), torch.zeros(logits.shape, dtype=torch.bool, device=device)
        others, hit = p.mean(0).index_fill(0, head, 0.0), hit.scatter_(1, target.clamp(min=0), met)
        right = len(set(head.tolist())) == head_size(len(C)) and p.mean(0)[head].min() > (1 - close) * others.max()
        base.require(right, f"{dtype}: the head is not the likeliest classes")
        d = p.masked_fill((p >= eps) | hit, 0.0).index_fill_(1, head, 0.0)
        m, q = d.sum(1), d.sum(0) / d.sum()
        r, q_C, entropy, alike = d - m[:, None] * q, q @ c, torch.special.entr(q).sum(), e @ e.T
        half = (d[::2].sum(0) / m[::2].sum() - d[1::2].sum(0) / m[1::2].sum()) / 2  # (V,)
        # exp(lower bound - lse): a candidate has p > eps * least, but for SLACK, which is put back in `less`
        least = torch.maximum(p[:, head].sum(1) + (e @ q_C + entropy - logits.logsumexp(1)).exp(), (p * hit).sum(1))
        candidates = ((p > eps * least[:, None]) & (others > 0)).sum(1).double().mean()
        listed, less = (((logits > threshold[rows, None] + slack) & (others > 0)).sum(1).double().mean()
                        for slack in (0, SLACK))
        values = {
            "prior": (found.prior, q), "mean tail": (found.mean_tail, q_C),
            "residual": (left.residual, (r @ c).norm() / m.norm()), "left": (left.left, r @ r.T * alike),
            "doubt": (left.doubt, half @ half * torch.outer(m, m) * alike), "threshold": (less, candidates),
        }
        for what, (got, want) in values.items():
            base.require(cce.error(got, want) < close, f"{dtype}: {what} is off by {cce.error(got, want):.1e}")
        told, said = forecast.numbers.double(), torch.stack((
            (x >= -1).sum(), listed * SAMPLE, m.sum(), (p @ c - c[x[rows]] * met).norm(), (r @ c).norm())).cpu()
        base.require(((told / said - 1).abs() < close).all(), f"{dtype}: forecast {told}, not {said}")


def check_sample(device="cpu"):
    """Only rows that count are looked at, none twice while there are enough; all over the sequence, at no period."""
    counted = torch.arange(4096, device=device) % 3 > 0
    rows, _ = sample_rows(counted)
    base.require(bool(counted[rows].all()) and len(set(rows.tolist())) == SAMPLE, "rows that do not count, or twice")
    places = torch.histc((rows % 64).float(), 8, 0, 64)
    base.require(places.min() >= SAMPLE / 16 and (rows.diff() > 0).all(), f"places in sequences of 64: {places}")
    rows, counts = sample_rows(torch.arange(300, device=device) == 7)
    base.require(counts == 1 and (rows == 7).all(), "one row counts, others are looked at")
    base.require(sample_rows(torch.zeros(300, device=device) > 0)[0].max() < 300, "no row counts")


def check_lower_bound(device="cpu"):
    """The bound is below lse for flat, uneven and steep tails; of a fresh model, whose tail is flat, it leaves no
    candidates where the head alone would leave half of the classes; where next to nothing is dropped, it is the head's:
    all rows bet on the head, but for one that the sample does not have."""
    generator, eps = torch.Generator().manual_seed(0), 2**-9
    N, V, D = 2 * SAMPLE, 2048, 24
    counted, x = torch.ones(N, dtype=torch.bool, device=device), torch.arange(N, device=device)
    for scale in (0.1, 1.0, 3.0):
        E, C = (torch.randn(size, D, generator=generator).to(device) for size in (N, V))
        C *= scale
        logits = E @ C.T
        _, _, (lse_head, target_logit, threshold), _ = survey(E, C, x, counted, eps, "torch")
        below = logits.logsumexp(1) + math.log(eps) - threshold
        base.require((below > 0).all().item(), f"{scale}: the bound is {-below.min()} too high")
        if scale == 0.1:
            alone = torch.maximum(lse_head, target_logit) + math.log(eps)
            many, few = ((logits > bound[:, None]).sum(1).double().mean().item() for bound in (alone, threshold))
            base.require(many > V / 2 and few < V / 100, f"fresh: {few} candidates, {many} by the head alone")
        for backend in filter_backends(device, torch.bfloat16, D):
            bounds = [survey(E.bfloat16(), C.bfloat16(), x - 2, counted, eps, b)[2] for b in ("torch", backend)]
            for twin, kernel in zip(*bounds, strict=True):
                off = (twin - kernel)[2:].abs().max()  # the first two rows have no target
                base.require(off < 1e-3 * twin.abs().max(), f"{scale}, {backend}: the bound is {off} from the twin's")
        sure = (threshold - target_logit - math.log(eps)).min()
        base.require(sure > -2e-3, f"{scale}: a target's logit is above the bound by {-sure}")
    E, C, H = torch.zeros(N, 8, device=device), torch.zeros(V, 8, device=device), head_size(V)
    E[:, 0], C[:, 0], C[:H, 0] = 1, -190, -100
    far = min(set(range(N)) - set(sample_rows(counted)[0].tolist()))
    E[far, 1], C[-1, 1] = 1, 90  # its logit is -100, too
    _, _, (lse_head, _, threshold), _ = survey(E, C, x % H, counted, eps, "torch")
    off = (threshold - lse_head - math.log(eps)).abs().max()
    base.require(off < 2e-3, f"without a tail the bound is off by {off}")


def check_error_of_dC(device="cpu"):
    """The estimate beside |A| of all rows, for three kinds of data, in each of which another of its terms is most."""
    N, V, D, generator = 1024, 512, 16, torch.Generator().manual_seed(0)
    noise, n = torch.randn(N, D, generator=generator), torch.arange(N)
    own = torch.nn.functional.one_hot(torch.randint(V, (N,), generator=generator), V).float()  # (N, V)
    kind, half = (torch.rand(N, generator=generator) < 0.5).float(), (torch.arange(V) % 2).float()
    of_kind = (kind[:, None] == half).float() / V  # (N, V): each kind of row has its half of the tail
    one = torch.nn.functional.one_hot(torch.zeros(N, dtype=torch.int64), D).float()  # (N, D)
    problems = {"each row for itself": (noise, own), "two kinds of rows": ((2 * kind - 1)[:, None] * one, of_kind),
                "an average that is off": (one + 0.1 * noise, own)}
    for name, (E, d) in problems.items():
        d = d * torch.linspace(0.1, 0.3, N)[:, None]
        g, m, rows = (1 + n % 3) / N, d.sum(1), sample_rows(n >= 0)[0]
        q, of_sample = d[rows].sum(0) / m[rows].sum(), (rows, E[rows], m[rows], d[rows] @ d[rows].T, m[0])
        true = ((g[:, None] * (d - m[:, None] * q)).T @ E).norm()
        left = left_over(Sample(*(t.to(device) for t in of_sample)))  # dE's part, |r C|, is not looked at
        said = error_of_dC(left, g[rows].to(device), N / len(rows)).item()
        base.require(0.8 < said / true < 1.25, f"{name}: the error of dC is {true:.3e}, estimated as {said:.3e}")


def auto_cases(E, C, x, eps):
    """{name: (E, C, targets, max_error, eps, decision, reason)} around a sharp problem E (N, D), C (V, D), x."""
    (N, D), V, dtype, device = E.shape, len(C), E.dtype, E.device
    fresh = torch.randn(V, D, device=device).mul_(0.02).to(dtype).requires_grad_()
    seen = torch.zeros(N, 1, dtype=torch.bool, device=device).index_fill_(0, sample_rows(x >= 0)[0], True)
    flat = E.detach().where(seen, 0.3 * E.detach()).requires_grad_()
    return {
        "sharp": (E, C, x, 0.1, eps, "sparse", "forecast"),
        "untrained": (E, fresh, x, 0.1, 2**-5, "exact", "would be dropped"),
        "topics": (*topic_problem(N, V, D, dtype, device)[:2], x, 0.02, eps, "exact", "off by"),
        "dense": (E, C, x, 0.1, 1e-5, "exact", "passes' worth"),
        "flat where not looked": (flat, C, x, 0.1, eps, "exact", "would be"),
    }


def check_auto(device="cpu"):
    """gradient="auto" is exact for an untrained model, for a tail that depends on the context, for what it would gain
    nothing on, and if what backward measures is not what the sample promised; sparse otherwise, within its bound."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    E, C, x = trained_problem(1024, 16384, 32, dtype, device)
    stats = SparseStats()
    for calls, (name, case) in enumerate(auto_cases(E, C, x, 2**-9).items(), 1):
        e, c, target, most, eps, decision, reason = case
        with patched(FIXED_COST=0):  # these problems are small
            loss = linear_cross_entropy(e, c, target, gradient="auto", eps=eps, max_error=most, stats=stats)
        got = torch.autograd.grad(loss, (e, c))
        base.require(stats.decision == decision and reason in stats.reason, f"{name}: {stats}")
        base.require((stats.calls, stats.sparse) == (calls, 1), f"{name}: {stats}")
        want = cce.gradients_of(cce.linear_cross_entropy, e, c, None, target)
        base.require(cce.error(loss, want[0]) < 1e-5, f"{name}: loss")
        for i, (part, g, w) in enumerate(zip(("dE", "dC"), got, want[1:], strict=True), 2):
            off, limit = cce.error(g, w), most if decision == "sparse" else 1e-5 if dtype == torch.float32 else 6e-3
            base.require(off < limit, f"{name}: {part} is off by {off:.1e}")
            said = stats.measured[i].item() if decision == "sparse" else off
            base.require(0.8 * said <= off <= 1.25 * said, f"{name}: {part} is off by {off:.1e}, measured: {said:.1e}")
    early = {"softcap": (E, C, dict(softcap=5.0)), "fp64": (E.double(), C.double(), {}), "too few": (E[:32], C, {})}
    for reason, (e, c, options) in early.items():
        linear_cross_entropy(e, c, x[: len(e)], gradient="auto", stats=stats, **options)
        base.require(stats.decision == "exact" and reason in stats.reason, f"{reason}: {stats}")
    with torch.no_grad():
        linear_cross_entropy(E, C, x, gradient="auto", stats=stats)
    base.require(stats.calls == calls + len(early) and "no gradient" in stats.reason, f"no gradient: {stats}")
    how = Sparse("auto", 0.1, 0.02, 4, 1, 1000, "torch", stats, None)
    nothing, dC, dE = (refusal(1, 0, *off, 1000, how) for off in ((0, 0), (0, 0.03), (math.nan, 0)))
    base.require(nothing is None and "dC would" in dC and "dE would" in dE, f"refusals {nothing}, {dC}, {dE}")


def check_blind_spot(device="cpu"):
    """The documented limit: 2 % of the rows have a tail of their own, a random half of the classes. Where the sample
    misses them all, the error is above the limit and reported as below; where it has three of them, it is seen."""
    N, V, generator = 1024, 16384, torch.Generator().manual_seed(0)
    E, C, x = (t.detach().to(device) for t in trained_problem(N, V, 128, torch.float32, "cpu"))
    seen, _ = sample_rows(x >= 0)
    unseen = torch.ones(N, dtype=torch.bool, device=device).index_fill_(0, seen, False).nonzero()[:, 0]
    with torch.no_grad():
        C[:, 1] = (2 * (torch.rand(V, generator=generator) < 0.5) - 1).to(device)
        E[:, 1] = 0
    for rare, known in ((unseen[:20], False), (torch.cat((unseen[:17], seen[::50])), True)):
        e, stats = E.detach().clone(), SparseStats()
        e[rare, 1] = 3
        e.requires_grad_()
        ours = linear_cross_entropy(e, C, x, gradient="sparse", eps=2**-11, stats=stats)
        off = cce.error(*(torch.autograd.grad(loss, e)[0] for loss in (ours, cce.linear_cross_entropy(e, C, x))))
        said = stats.measured[2].item()
        base.require(off > MAX_ERROR and (said > MAX_ERROR) is known, f"rare rows, {known}: off by {off}, said {said}")


def check_room(device="cpu"):
    """More candidates than places: the gradient is the exact one."""
    for dtype in (torch.float32, torch.bfloat16):
        E, C, x, eps = adversarial_problems(device, dtype)["a Zipf law"]
        rows = len(x)
        for backend in filter_backends(device, dtype, E.shape[1]):
            stats = SparseStats()
            options = dict(gradient="sparse", eps=eps, backend=backend, stats=stats)
            want = cce.gradients_of(cce.linear_cross_entropy, E, C, None, x, backend=backend, workspace=0)
            with patched(capacity_for=lambda N, candidates, rows=rows: 64 if N == rows else 2**30):
                loss = linear_cross_entropy(E, C, x, **options)
            base.require(stats.decision == "sparse", f"before backward: {stats}")
            got = [loss, *torch.autograd.grad(loss, (E, C))]
            base.require(stats.decision == "exact" and "places for" in stats.reason, f"after backward: {stats}")
            late = linear_cross_entropy(E, C, x, workspace=0, **options)
            base.require("places for 0" in stats.reason, f"without workspace: {stats}")
            for values in (got, [late, *torch.autograd.grad(late, (E, C))]):
                for g, w in zip(values, want, strict=True):
                    base.require(cce.error(g, w) < (1e-5 if dtype == torch.float32 else 6e-3), f"{backend}: not exact")


def check_costs():
    """Section 7's worked examples; bytes for a forecast of 95 candidates a row, without and with a sink, and for the
    small model, of none. (An H200 took 42.0 and 26.4 MiB without.)"""
    shape, cuda, cpu = (8192, 256000, 2304), torch.device("cuda"), torch.device("cpu")
    small = sparse_passes(8192, 65536, 512, 0, cuda)
    passes = [sparse_passes(*shape, 113, cuda), small, sparse_passes(*shape, 113, cpu)]
    base.require(all(abs(a - b) < 0.01 for a, b in zip(passes, (1.475, 4.571, 1.288), strict=True)), f"passes {passes}")
    capacity = capacity_for(8192, 95)
    base.require(capacity == 22 * 2**16 and capacity_for(2**16, 0) == 32 * 2**16, f"room for {capacity} entries")
    with patched(TILE_V=256):  # a GPU's
        beyond = [sparse_bytes(*shape, torch.bfloat16, capacity, sink) / MIB for sink in (False, True)]
        beyond.append(sparse_bytes(8192, 65536, 512, torch.bfloat16, capacity_for(8192, 0)) / MIB)
    right = all(abs(a - b) < 0.1 for a, b in zip(beyond, (42.93, 173.70, 26.0), strict=True))
    base.require(right, f"{beyond} MiB beyond dE, dC")
    room = sparse_room(256000, 2304, torch.bfloat16, 100 * MIB)
    base.require(room == (100 * MIB - 2 * 4096 * 2304) // 48, f"workspace for {room} entries")


def check_bad_input(device="cpu"):
    """Each wrong argument: ValueError whose one line names it."""
    E, C, _, x = base.random_problem(6, 10, 4, torch.float32, device)
    cases = {"gradient is 'dense'": dict(gradient="dense"), "eps is 2": dict(eps=2), "softcap": dict(softcap=-1.0),
             "stats go": dict(gradient="exact", stats=SparseStats()), "workspace": dict(workspace=-1),
             "eps goes": dict(gradient="exact", eps=0.1), "max_error goes": dict(max_error=0.1),
             "max_error is 0": dict(gradient="auto", max_error=0), "no softcap": dict(softcap=2.0),
             "a slice": dict(shard=cce.Shard(0, 10, None)), "pass it no bias": dict(bias=C[:, 0], sink=1),
             "backend is 'triton'": dict(backend="triton")}
    for words, options in cases.items():
        call = functools.partial(linear_cross_entropy, E, C, x, **{"gradient": "sparse"} | options)
        base.must_raise(words, call)
    base.must_raise("fp32 and bf16", lambda: linear_cross_entropy(E.double(), C.double(), x, gradient="sparse"))


def check_training(device="cpu"):
    """The small model learns to repeat; rows without a gradient are counted, of one step: with a gradient of targets
    alone, all but the few that a batch holds."""
    text = np.arange(20_000) // 2000
    *_, late, without = train_small(torch.device(device), text, cce.linear_cross_entropy)
    base.require(late < 2 and without == 0, f"loss {late}, {without} of the rows without a gradient")
    E, C, x, _, without = train_small(torch.device(device), text, lambda E, C, x: -(E * C[x]).sum(1).mean())
    found = (1 - without) * len(C)
    base.require(len(E) == len(x) and 1 <= found <= 8 + 8 * (len(E) > 256), f"{found} rows with a gradient")


def check_corpus():
    """At most `limit` bytes, the same every time; whole files, none of them in both parts; 1 % to validate on."""
    one, again = corpus("bytes", limit=2 * MIB), corpus("bigrams", limit=2 * MIB)
    base.require((one.vocab, again.vocab, again.bytes_per_token) == (256, 65536, 2), f"{one[2:]}, {again[2:]}")
    base.require(bytes(one.train)[: again.train.nbytes] == again.train.tobytes(), "other text in bigrams than in bytes")
    sizes = one.train.nbytes, one.val.nbytes
    base.require(1.9 * MIB < sum(sizes) <= 2 * MIB and 64 * 1024 <= sizes[1] < sizes[0] / 8, f"{sizes} bytes")
    base.require(bytes(one.val[:5000]) not in bytes(one.train), "a text to validate on is in the text to train on")
    base.must_raise("--data", functools.partial(corpus, limit=1000))
    base.must_raise("tokens is 'words'", functools.partial(corpus, "words"))


# In 16 bits the kernels run; interpreted, they are slow, and two of check_sparse's problems must do.
few = ("a Zipf law", "a class of every row") if INTERPRETED else None
sparse_kernels = functools.partial(check_sparse, dtype=torch.bfloat16, names=few)
filter_kernels = [functools.partial(check_filter, dtype=torch.bfloat16, rule=rule) for rule in PAPER_EPS]
CHECKS = [check_corpus, check_training, check_filter, functools.partial(check_filter, rule="element"), *filter_kernels]
CHECKS += [check_sample, check_survey, check_lower_bound, check_error_of_dC, check_listed_rows, check_sparse]
CHECKS += [sparse_kernels, check_auto, check_blind_spot, check_room, check_costs, check_bad_input]


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "no-correction": (check_sparse, "blocked_row_pass", lambda *args, right=blocked_row_pass: right(
        *args[:-3], 0 * args[-3], *args[-2:])),  # mean_tail
    "bound-too-high": (check_sparse, "lower_bound", lambda *args, right=lower_bound: [
        bound + shift for bound, shift in zip(right(*args), (0, 0, 0.5), strict=True)]),
    "always-sparse": (check_auto, "refusal", lambda *numbers: None),
    "forget-targets": (check_filter, "target_tiles", lambda x, V, right=target_tiles: right(0 * x - 1, V)),
    "ignored-rows-count": (check_filter, "reached", lambda values, lse, counted, eps, right=reached: right(
        values, lse, torch.ones_like(counted), eps)),
    "wrong-order": (check_filter, "vocabulary_order", lambda E, C, counted: C.float().norm(dim=1).argsort()),
}
if base.HAS_TRITON:
    _popcount = popcount

    @triton.jit
    def _all_but_one_bit(bits):
        return _popcount(bits & 0x7FFFFFFF)

    BREAKS["lost-bit"] = (sparse_kernels, "popcount", _all_but_one_bit)


# ==== 10. Measurements ================================================================================================
#
# On the model that was just trained, on data with a Zipf law, and on the same with topics. kept: the share of tiles, or
# a row's candidates; lost p: the mean probability that a row drops; passes: time over that of one product E C^T in
# cuBLAS; beyond: bytes at the peak, less dE and dC. Errors are |ours - exact| / |exact| against fp32, of dE, dC, and
# dC's rows of classes that are no target, the rows that starve: small ones, which is why "sparse" is off by 12 % there.


def tiles_kept(E, C, x):
    """Shares of tiles that each rule keeps in the vocabulary's own order, shuffled, and sorted by average logit."""
    shuffle = torch.randperm(C.shape[0], generator=torch.Generator().manual_seed(0)).to(C.device)
    for rule, eps in PAPER_EPS.items():
        orders = ((C, x, False), (C[shuffle], inverse(shuffle)[x], False), (C, x, True))
        shares = [100 * kept_tiles(E, *problem, rule, eps, sort, False)[-1].float().mean().item()
                  for *problem, sort in orders]
        print("  {:<7} < 2^{:.0f}: {:.1f} % in its own order, {:.1f} % shuffled, {:.1f} % sorted".format(
            rule, math.log2(eps), *shares))


# A row of the table: errors of dE, dC and dC's rows of no target; bytes beyond dE and dC; on a GPU, time in passes; of
# a filter, the share of tiles kept
Seen = namedtuple("Seen", "errors beyond passes kept")


def measure_row(device, row, loss, stats, E, C, x, want):
    """Run loss(E, C, x), print its row of the table -> Seen. want: dE and dC of the exact gradient in fp32."""
    (N, D), V, cuda = E.shape, C.shape[0], device.type == "cuda"

    def both():
        value = loss(E, C, x)  # a filter's with dE, dC and FilterStats
        return value[1:] if isinstance(value, tuple) else torch.autograd.grad(value, (E, C))

    dE, dC, *said = both()
    others = torch.ones(V, dtype=torch.bool, device=device).index_fill_(0, x, False)  # (V,)
    errors = [cce.error(*pair) for pair in ((dE, want[0]), (dC, want[1]), (dC[others], want[1][others]))]
    text, kept = "", None
    if said:
        kept = said[0].keep.float().mean().item()
        text = f"{100 * kept:9.1f} %{said[0].dropped.mean():8.4f}"
    elif stats and stats.decision == "sparse":
        text = "{:7.0f}/row{:8.4f}".format(*stats.measured.tolist())
    del dE, dC, said
    beyond, passes = base.peak_bytes(both, device) - E.element_size() * (N + V) * D, None
    times = f"{'needs a GPU':>25}"
    if "element" in row or "only" in row:  # blocked PyTorch makes every tile and zeroes some
        times = f"{'saves no time':>25}"
    elif cuda:
        timing, unit = base.bench(both, device), cce.one_pass(E, C)  # after each row: the clocks drift
        passes = timing.median / unit
        times = f"{timing.median:8.2f} +- {timing.spread:<5.2f}{passes:8.2f}"
    print(f"{row:<22}{text:<19}{times}{beyond / MIB:11.1f}  " + ", ".join(f"{e:.1e}" for e in errors))
    return Seen(errors, beyond, passes, kept)


def measure(device, ledger, E, C, x, name, readme=False):
    """What is kept, errors, time and memory of the approximations beside the exact gradient; and the claims about them:
    from formulas, and if `readme` those that README makes."""
    (N, D), V, kernels = E.shape, C.shape[0], device.type == "cuda" and cce.takes_descriptors(E, C)
    print(f"{name}: N = {N}, V = {V}, D = {D}, {E.dtype}; {-(-N // TILE_N) * -(-V // TILE_V):,} tiles")
    tiles_kept(E.detach(), C.detach(), x)
    E, C, stats = E.detach().requires_grad_(), C.detach().requires_grad_(), {}
    _, *want = cce.gradients_of(cce.linear_cross_entropy, *(t.detach().float().requires_grad_() for t in (E, C)), None,
                                x, backend="torch")
    ways = {"exact (02)": cce.linear_cross_entropy}
    for rule, only_dE in (("element", False), ("mass", False), ("mass", True)):
        way = functools.partial(filtered_cross_entropy, rule=rule, only_dE=only_dE)
        ways[f"{rule} 2^{math.log2(PAPER_EPS[rule]):.0f}{', only dE' * only_dE}"] = way
    for gradient in ("sparse", "auto"):
        stats[gradient] = SparseStats()
        ways[gradient] = functools.partial(linear_cross_entropy, gradient=gradient, stats=stats[gradient])
    print(f"{'':<22}{'kept':>11}{'lost p':>8}{'loss+grad ms':>17}{'passes':>8}{'beyond MiB':>11}"
          "  error of dE, dC, its rows of no target")
    seen = {row: measure_row(device, row, loss, stats.get(row), E, C, x, want) for row, loss in ways.items()}
    print(f"auto: {stats['auto'].decision}: {stats['auto'].reason}")

    exact, mass, sparse = (seen[row] for row in ("exact (02)", "mass 2^-11", "sparse"))
    if stats["sparse"].decision == "sparse":
        candidates, _, *left = stats["sparse"].measured.tolist()
        capacity = capacity_for(N, stats["sparse"].forecast[0])
        ledger.row("sparse: beyond dE, dC", "sparse_bytes", sparse_bytes(N, V, D, torch.bfloat16, capacity) / MIB,
                   sparse.beyond / MIB if kernels else None, band=(0.8, 1.2))
        left = [math.hypot(*pair) for pair in zip(left, exact.errors, strict=False)]  # and rounding
        low, high = (0.8, 1.25) if N >= 1024 else (0.6, 1.6)  # on a CPU, N = 256: 0.73 to 1.37 over eight seeds
        ledger.row("sparse: error of dE", "sample, rounding", left[0], sparse.errors[0], "", (low, high))
        ledger.row("sparse: error of dC", "at most (head's length)", left[1], sparse.errors[1], "", (0, high))
        passes, busy = sparse_passes(N, V, D, candidates, device), N * V * D > 2 * FIXED_COST  # else the host decides
        ledger.row("sparse: passes", "sparse_passes", passes, sparse.passes, "", (0.8, 1.2) if busy else None)
    if readme:
        predicted = 1.1 + 1.5 * 3 * mass.kept  # C is gathered twice, a twentieth of a pass each time
        ledger.row("mass: passes", "1.1 + 3 k, lists at 2/3", predicted, mass.passes, "", (0.85, 1.15))
        ledger.row("mass: error of dE", "README: a tenth", 0.1, mass.errors[0], "", (0.5, 1.5))
        ledger.row("sparse: error of dE", "README: a hundredth", 0.01, sparse.errors[0], "", (0.5, 1.5))
        ledger.row("sparse: time of exact's", "README: under a half", 0.5, sparse.passes / exact.passes, "", (0, 1))
    print()


def body(device, ledger, args):
    shape, dtype = cce.asked_shape(args, device), torch.bfloat16 if device.type == "cuda" else torch.float32
    base.run_checks(CHECKS, device)
    config, batch, steps = small_config(device)
    print(f"\na model of {config.parameters() / 1e6:.1f} M parameters, {steps} steps of {batch * config.seq} tokens")
    (E, C, x), starved = measure_training(device)
    show_phenomenon(E, C, "the model of the exact gradient")
    for name in ("exact", "sparse", "element, only dE"):
        ledger.row(f"{name}: rows that starve", "README: none", 0, 100 * starved[name], "%", (1, 1.001))
    ledger.row("element, both: rows that starve", "README: over half", 50, 100 * starved["element, both"], "%", (1, 2))
    print()
    measure(device, ledger, E.to(dtype), C.to(dtype), x, "that model")
    if shape:
        readme = device.type == "cuda" and tuple(shape) == (8192, 256000, 2304)  # the shape that README speaks of
        measure(device, ledger, *trained_problem(*shape, dtype, device), "data with a Zipf law", readme)
        measure(device, ledger, *topic_problem(*shape, dtype, device), "the same, with topics")
    else:
        print("data with a Zipf law, without and with topics, 8192 x 256000 x 2304: needs a GPU")


add_arguments = cce.add_arguments

if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 04_fused_optimizer.py"))


# Exercises
#   1. Tiles of 128 x 256 are what 02's forward leaves its partial sums in. Which shares of tiles would be kept with 64
#      or 512 columns, and what would the products lose or gain? Predict, then change TILES["descriptors"] and measure.
#   2. The sparse gradient puts one tail, q, in place of what all rows drop. Topics make it err (the table's last rows):
#      give each block of rows a q of its own. What does the error of dE become, and what does the column pass cost?
#   3. Close the blind spot. Let the pass over the logits also sum p[n, v] z[v] for a random z = C w: minus the head's
#      and the entries' part, each row then knows how much of what it dropped lies along w, without a sample. What does
#      it cost, and how many w does it take?
