"""03 - Gradient filtering, vocabulary sorting, and sparse gradients: most of a trained softmax is too small to matter.

The problem in one number
    A trained model gives fewer than one word in a thousand a probability above 2^-12. Yet 02 takes four matrix passes
    over all N x V logits (forward, the logits again, dE, dC), or three where there are gigabytes to spare. The sparse
    gradient of section 6 takes the time of one and a half. At N = 8192, V = 256,000, D = 2304, on data with a Zipf law,
    it is off by 0.9 % in dE and 0.5 % in dC (12 % in dC's rows of classes that are no target, which are small);
    gradient="auto" does not use it where it is estimated to be off by more than 2 %.

The maths                                          p[n, v] = exp(E[n] . C[v] - lse[n]), G = p - onehot, eps a threshold
    rule "element" (the paper's)   drop a tile if every |G| in it is below eps
    rule "mass" (ours)             drop a tile if every row's sum of p over it is below eps, and it holds no target
    "sparse" (ours)                keep the likeliest 4096 classes whole, elsewhere the entries with p >= eps; what is
                                   dropped is replaced by (each row's dropped mass) x (one average tail)
  The paper has to make a tile to learn that it may be dropped. A row's mass in tile t is exp(partial[t, n] - lse[n]),
  and the forward pass of 02 has just written partial: the second rule costs nothing, and a dropped tile is not made
  again (unless dC is to stay exact). It also comes with a bound: of a row's probability at most (tiles dropped) * eps
  is lost. Both rules keep every tile with a target: its entry p - 1 is the signal.
  Small entries are scattered over all tiles unless the vocabulary is sorted. The order is that of the average logit,
    mean_n E[n] . C[v] = (mean_n E[n]) . C[v]
  one matrix-vector product. Only indices are sorted: a slice of C is gathered when its turn comes, C is never copied.
  Section 6 draws the third.

What is lost
    A dropped entry is invisible to bf16 beside a large one, but a quarter of a million of them may sum to a tenth of
    the gradient: with fp32 sums nothing forces us to drop them. All three are approximations. Their errors are printed.

How to launch
    python 03_grad_filter_sort.py                         trains a small model, shows the phenomenon, checks, measures
    python 03_grad_filter_sort.py --checkpoint out        shows the phenomenon and measures, on a model of train.py
    python 03_grad_filter_sort.py --break forget-targets  plant a bug and watch its check fail (exit status 1)
    python 03_grad_filter_sort.py --shape 8192 128256 4096

References
    Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009: filter and sorting, figure 3.

Left out on purpose: kernels for GPUs before Hopper (they run blocked PyTorch), orders and heads kept from an earlier
step (this step's own are cheap), softcaps in the sparse gradient.
"""

import functools
import importlib
import json
import math
import os
import platform
import statistics
import sys
import sysconfig
import zlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.autograd.function import once_differentiable

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
INTERPRETED, MIB = base.INTERPRETED, base.MIB
triton, tl = cce.triton, cce.tl

# Rows and columns of the tiles that are kept or dropped: those in which 02's forward leaves its partial sums.
TILE_N, TILE_V = cce.TILES["descriptors"]["BLOCK_N"], cce.TILES["descriptors"]["BLOCK_V"]


# ==== 1. The phenomenon: probability by rank (figure 3 of the paper) ==================================================


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
    E = 2 * torch.randn(N, D, **options) + 7 * torch.rand(N, 1, **options) * torch.nn.functional.normalize(C[x])
    E[:, 0] = 8
    return E.to(dtype).requires_grad_(), C.to(dtype).requires_grad_(), x


@torch.no_grad()
def probability_by_rank(E, C, eps=2**-12, block=256):
    """E (N, D), C (V, D) -> mean probability of the most probable class, the second, ... (V,), and the fraction of all
    entries above eps."""
    ranked, above = torch.zeros(C.shape[0], dtype=torch.float64, device=E.device), 0
    for start, stop in cce.pieces(E.shape[0], block):
        p = torch.softmax(cce.block_logits(E[start:stop], C), 1)  # (block, V)
        above += (p >= eps).sum().item()
        ranked += p.sort(1, descending=True).values.sum(0)
    return ranked / E.shape[0], above / E.shape[0] / C.shape[0]


def show_phenomenon(E, C, name):
    """The curve of figure 3 as a row of numbers, and what 16 bits make of its right end."""
    ranked, above = probability_by_rank(E, C)
    V = C.shape[0]
    ranks = [r for r in (1, 3, 10, 30, 100, 300, 1000, 10_000, 100_000) if r <= V]
    print(f"softmax of {name}: {100 * above:.2f} % of its N x V entries are above 2^-12")
    print("  rank             " + "".join(f"{r:>9,}" for r in ranks))
    print("  mean probability " + "".join(f"{ranked[r - 1].item():9.1e}" for r in ranks))
    small = (ranked < 2**-12).nonzero()
    if len(small):
        first = int(small[0])
        print(f"  the mean is below 2^-12 from rank {first + 1:,} on; in all they hold {ranked[first:].sum():.1%}")
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
        return base.GPTConfig(256**2, 256, 4, 8, 512), 32, 200
    return base.GPTConfig(128**2, 64, 1, 2, 64), 8, 40


def train_small(device, loss, seed=0):
    """Train the small model with `loss` -> E (N, D), its classifier C (V, D) and targets (N,) of the last step; over
    the last fifth of the steps, the mean loss and the share of C's rows without any gradient."""
    config, batch, steps = small_config(device)
    torch.manual_seed(seed)
    with device:
        model = base.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if device.type == "cuda" else 2e-2, fused=True)
    text, rng = corpus("bigrams", limit=16 * MIB).train, np.random.default_rng(seed)
    if config.vocab == 128**2:
        text = text[(text & 0x8080) == 0]
        text = (text >> 8) * 128 + (text & 0x7F)
    late = []
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
        optimizer.step()
        optimizer.zero_grad()
    return E.detach(), model.classifier.detach(), tokens[:, 1:].flatten(), *torch.stack(late).mean(0).tolist()


def load_checkpoint(folder, device):
    """E (N, D) on validation text, the classifier (V, D), the next tokens (N,) and the name of train.py's newest
    checkpoint in `folder`."""
    files = sorted(Path(folder).glob("step_*.json"), key=lambda file: int(file.stem[5:]))
    if not files:
        raise base.BadInput(f"--checkpoint {folder}: no step_*.json there: pass the --out directory of a train.py run")
    record = json.loads(files[-1].read_text())
    flags = record["flags"]
    if record.get("format") != base.GPT_FORMAT:
        raise base.BadInput(f"--checkpoint {folder}: it is of another version of train.py: train anew")
    if flags.get("moe"):
        raise base.BadInput(f"--checkpoint {folder}: a model with experts: pass a dense one")
    if flags.get("data"):
        raise base.BadInput(f"--checkpoint {folder}: trained on {flags['data']}: pass a model of the built-in corpus")
    model = base.GPT(base.GPTConfig(*(flags[name] for name in ("vocab", "seq", "layers", "heads", "dim"))))
    model.load_state_dict(torch.load(files[-1].with_suffix(".pt"), map_location="cpu", weights_only=True)["model"])
    text = corpus(flags["tokens"], packages=record["packages"]).val  # cut as train.py did
    wanted = 8192 if device.type == "cuda" else 1024  # tokens
    count = min(max(1, wanted // flags["seq"]), (len(text) - 1) // flags["seq"])
    tokens = torch.from_numpy(text[: count * flags["seq"] + 1].astype(np.int64)).to(device)
    with torch.no_grad():
        E = model.to(device)(tokens[:-1].view(count, -1)).flatten(0, 1)
    return E, model.classifier.detach(), tokens[1:], files[-1].stem


# ==== 2. The cost model ===============================================================================================

# In matrix passes of 2 N V D FLOP, k the share of tiles that are kept:
#                                     forward    logits again   dE   dC
#   exact (02), over the vocabulary      1            1          1    1
#   exact (02), over tokens              1            -          1    1     where its fp32 sum for dC fits
#   "element", both products             1            1          k    k
#   "mass", both products                1            k          k    k
#   either rule, only dE                 1            1          k    1     dC needs all of G
# and each pass over a sorted vocabulary gathers C: 2 V D bytes read and written, a twentieth of a pass at D = 2304. A
# filter of dE alone gains little, and nothing on the exact gradient over tokens.


def slice_width(N, D, device, dtype, workspace=None, which="both"):
    """Columns of a slice: what the workspace leaves beside dE's fp32 sum, for G (N, W) and the gathered rows of C
    (W, D); and, unless both products are filtered, their dC (W, D). On a CPU about a cache's worth."""
    if torch.device(device).type == "cpu" and workspace is None:
        columns = cce.CPU_BLOCK // max(N, 1)
    else:
        columns = (cce.WORKSPACE if workspace is None else workspace) - (4 * N * D if dtype.itemsize == 2 else 0)
        columns //= column_bytes(max(N, 1), D, dtype, which)
    return max(4 * TILE_V, columns // TILE_V * TILE_V)


def column_bytes(N, D, dtype, which):
    made = 0 if which == "both" else D * dtype.itemsize
    return dtype.itemsize * (N + D) + made


def filter_bytes(N, V, D, device, dtype, workspace=None, which="both"):
    """Bytes at the peak of loss and gradients beyond dE and dC, with the kernels: the order, dE's fp32 sum (beside
    which 16-bit dE comes when the slices are done), and the buffers of a slice."""
    buffers = min(V, slice_width(N, D, device, dtype, workspace, which)) * column_bytes(N, D, dtype, which)
    held = 4 * N * D if dtype.itemsize == 2 else 0
    return 8 * V + max(held, buffers + held // 2)


# And of the sparse gradient (section 6), beyond the one pass: four small ones over the head's columns, three over the
# survey's rows; for each candidate a row of C and one of E, fetched in what ENTRY_COST entries of a dense pass take;
# and 200 small kernels, FIXED_COST multiply-adds' worth of time (3 ms) on a GPU. Both were measured on an H200.
ENTRY_COST = 400
FIXED_COST = {"cuda": 1.2e12, "cpu": 0.0}


def sparse_passes(N, V, D, candidates, device):
    """Matrix passes' worth of time of loss and sparse gradient, for a mean number of candidates a row."""
    small = 4 * head_size(V) / V + 3 * min(SAMPLE, N) / N + FIXED_COST[device.type] / (N * V * D)
    return 1 + small + ENTRY_COST * candidates / V


ENTRY_BYTES = 48  # of an entry while it is sorted for the column pass


def sparse_room(V, D, dtype, workspace=None):
    """Entries that `workspace` has room for, beside dC of the head."""
    room = (cce.WORKSPACE if workspace is None else workspace) - dtype.itemsize * head_size(V) * D
    return max(0, room) // ENTRY_BYTES


def places(N, candidates):
    """Entries to make room for when a sample has this mean number of candidates a row: half as many again, and 32 each
    (targets, and rows of a kind too rare for a sample); in steps, so that the allocator sees few sizes."""
    return -(-math.ceil((1.5 * candidates + 32) * N) // 2**16) * 2**16


def sparse_bytes(N, V, D, dtype, capacity, sink=False):
    """Bytes at the peak of loss and gradients beyond dE and dC, with the kernels; with a sink there is no dC."""
    b, H = dtype.itemsize, head_size(V)
    results, lists = b * (N + (0 if sink else V)) * D, 8 * capacity
    surveyed = 5 * b * min(SAMPLE, N) * V // 2  # p, what is dropped of it, and pieces of both on top of each other
    forward = lists + min(BAND_BYTES, N * V // 8) + 2 * 4 * N * math.ceil(V / TILE_V)
    width = 4 if sink else b  # of the head's dC
    split = 0 if sink else 4 * H * D  # cuBLAS splits the sum for a 16-bit dC
    head = lists + 4 * N * D + b * H * (N + D) + width * H * D + split
    ordered = ENTRY_BYTES * capacity + width * H * D + b * N * D  # dE is finished, dC not begun
    column = 16 * capacity + 12 * V + width * H * D
    return max(column, *(size - results for size in (surveyed, forward, head, ordered)))


def default_eps(rule, dtype):
    """The paper's threshold for an element, finfo.eps / 32, 2^-12 for bf16; for the mass of a tile twice that, which on
    the Zipf data below (8192 x 256000 x 2304) makes about the same error."""
    return torch.finfo(dtype).eps / 32 * (2 if rule == "mass" else 1)


# ==== 3. Sorting: an order for the vocabulary, and slices of C in that order ==========================================


def vocabulary_order(E, C, counted=None):
    """Classes (V,) by falling average logit over the counted rows of E (N, D); ties keep their order. The average of a
    product with C is the product of the average: no logits are needed, where the paper gathers them in its forward.
    (A softcap is monotone and hardly changes an order: it is left out.)"""
    sums, narrow = base.product_dtypes(E)
    counted = torch.ones(E.shape[0], dtype=torch.bool, device=E.device) if counted is None else counted
    mean = weighted_rows(base.token_weights(counted), E)[None]  # (1, D)
    logits = torch.zeros(C.shape[0], dtype=sums, device=C.device)  # (V,)
    for start, stop in cce.pieces(C.shape[0], 2**16):
        cce.add_to(logits[None, start:stop], mean.to(narrow), C[start:stop].T)
    return torch.sort(logits, descending=True, stable=True).indices


def weighted_rows(weights, E):
    """weights (N,), E (N, D) -> sum of weights[n] E[n] (D,)."""
    sums, narrow = base.product_dtypes(E)
    return cce.add_to(torch.zeros(1, E.shape[1], dtype=sums, device=E.device), weights.to(narrow)[None], E)[0]


def inverse(order):
    """order (V,), a permutation of the classes -> the place of each class in it (V,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def slices(C, order, width):
    """Yield (start, stop, classes (W,), their rows of C (W, D)), slice by slice in the order (V,). One
    buffer takes the gathered rows of each slice in turn: 2 V D bytes read and written, a twentieth of a pass."""
    buffer = torch.empty(min(width, C.shape[0]), C.shape[1], dtype=C.dtype, device=C.device)
    for start, stop in cce.pieces(C.shape[0], width):
        classes = order[start:stop]
        rows = torch.index_select(C, 0, classes, out=buffer[: stop - start])
        yield start, stop, classes, rows


# ==== 4. The two rules, in plain PyTorch ==============================================================================


def any_row(flags):
    """flags (T, N) bool -> (row tiles, T): is one set in the TILE_N rows of a tile?"""
    T, N = flags.shape
    padded = torch.nn.functional.pad(flags, (0, -N % TILE_N))  # with False
    return padded.view(T, padded.shape[1] // TILE_N, TILE_N).any(2).T


def target_tiles(position, V):
    """position (N,) of each row's target in the order of the vocabulary, -1 for none -> (row tiles, tiles) bool."""
    row_tiles, tiles = -(-len(position) // TILE_N), -(-V // TILE_V)
    row_tile = torch.arange(len(position), device=position.device) // TILE_N
    held = torch.zeros(row_tiles * tiles + 1, dtype=torch.bool, device=position.device)
    nowhere = row_tiles * tiles
    held[torch.where(position >= 0, row_tile * tiles + position // TILE_V, nowhere)] = True
    return held[:-1].view(row_tiles, tiles)


def rows_reach(log_values, lse, counted, eps):
    """log_values (T, N): does any counted row of a tile reach eps? (row tiles, T) bool."""
    return any_row((log_values - lse >= math.log(eps)) & counted)


class FilterStats:
    """What a filter did, on the device (reading it waits for the GPU). Rule "element" fills it in during backward.

    keep (row tiles, tiles) bool, rows in tiles of TILE_N, the vocabulary in the order used, in tiles of TILE_V; eps;
    dropped (N,) the probability that each row lost; bound (N,) what the rule guarantees for it."""

    keep = dropped = bound = None

    def __init__(self, rule, eps):
        self.rule, self.eps = rule, eps

    def fill(self, keep, partial, lse, counted):
        """keep (row tiles, tiles), partial (tiles, N), lse (N,), counted (N,): others have no gradient to lose."""
        gone = ~keep.repeat_interleave(TILE_N, 0)[: len(lse)] & counted.unsqueeze(1)  # (N, tiles)
        self.keep, self.dropped = keep, ((partial - lse).exp_().T * gone).sum(1)
        self.bound = gone.sum(1) * self.eps * (TILE_V if self.rule == "element" else 1)

    def __str__(self):
        if self.keep is None:
            return f"rule {self.rule!r}: decided in backward"
        kept = 100 * self.keep.float().mean().item()
        return f"{kept:.1f} % of {self.keep.numel():,} tiles kept, {self.dropped.mean():.4f} of the probability lost"


# ==== 5. Kernels: make the listed tiles of G, multiply with the listed tiles ==========================================

PRODUCT = dict(BLOCK_M=128, BLOCK_W=128, BLOCK_K=64, num_warps=4, num_stages=3)  # two programs fit a multiprocessor
# Of the column pass: most classes list a few entries. One warp, whose threads fetch 16 bytes each of a row of E, makes
# SPAN tiles side by side: what it has to know of the row (up to a quarter of its instructions) serves all of them.
COLUMNS = dict(ROWS=1, COLS=256, ENTRIES=4, SPAN=3, num_warps=1)
if INTERPRETED:
    PRODUCT = dict(BLOCK_M=32, BLOCK_W=32, BLOCK_K=32)
    COLUMNS = dict(ROWS=32, COLS=128, ENTRIES=2, SPAN=3)

fetched_logits, tile_softmax, tile_gradient, dot = cce.fetched_logits, cce.tile_softmax, cce.tile_gradient, cce.dot
next_logits, cap, mask_tail, exponentials = cce.next_logits, cce.cap, cce.mask_tail, cce.exponentials
LOG2E, UPCAST = cce.LOG2E, cce.UPCAST


@triton.jit
def fused_multiply_add(a, b, c):
    """a b + c, rounded once, whatever the compiler does elsewhere. Interpreted it is written out and rounds twice:
    tl.fma there fuses in newer Triton only."""
    if UPCAST:
        return a * b + c
    return tl.fma(a, b, c)


@triton.jit
def listed_gradient_kernel(
    E, C, G, softcap, targets, lse, g_softmax, g_target, threshold, tiles, count, keep, N, V, D,
    DECIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """02's gradient_kernel for the first `count` of the listed tiles. How many there are is read from the
    device: the host never waits. DECIDE: the paper's rule; keep[tile] = some p >= its row's threshold, or a target."""
    col_tiles = tl.cdiv(V, BLOCK_V)
    for i in tl.range(tl.program_id(0), tl.load(count), tl.num_programs(0), flatten=True):
        tile = tl.load(tiles + i)
        row, col = tile // col_tiles * BLOCK_N, tile % col_tiles * BLOCK_V
        rows, cols = row + tl.arange(0, BLOCK_N), col + tl.arange(0, BLOCK_V)
        logits = cap(fetched_logits(E, C, row, col, D, BLOCK_N, BLOCK_V, BLOCK_D), softcap)
        inside = rows < N
        row_lse, x = tl.load(lse + rows, mask=inside, other=0.0), tl.load(targets + rows, mask=inside, other=-1)
        if DECIDE:
            logits = mask_tail(logits, cols, V)
        softmax = tile_softmax(logits, row_lse)
        if DECIDE:
            reach = softmax >= tl.load(threshold + rows, mask=inside, other=float("inf"))[:, None]
            hits = tl.sum(tl.sum((reach | (cols[None, :] == x[:, None])).to(tl.int32), 1), 0)
            tl.store(keep + tile, hits)
        g = tile_gradient(
            softmax, logits, x, cols, tl.load(g_softmax + rows, mask=inside, other=0.0),
            tl.load(g_target + rows, mask=inside, other=0.0), softcap,
        )
        G.store([row, col], g.to(G.dtype))


@triton.jit
def listed_product_kernel(
    A, B, out, lists, counts, classes, M, D, length, SCATTER: tl.constexpr, K_TILE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """A block (BLOCK_M, BLOCK_W) of a product A @ B whose sum over K runs over the listed tiles only: tile lists[o, i]
    stands for K_TILE columns of A and rows of B; BLOCKS blocks share a list o. Added to out (M, D), a descriptor; or,
    SCATTER, A is given as its transpose, and row m is written to row classes[m] of out (V, D)."""
    across = tl.cdiv(D, BLOCK_W)
    block, col = tl.program_id(0) // across, (tl.program_id(0) % across) * BLOCK_W
    row, owner = block * BLOCK_M, block // BLOCKS
    acc = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    for step in range(0, tl.load(counts + owner) * (K_TILE // BLOCK_K)):
        tile = tl.load(lists + owner * length + step // (K_TILE // BLOCK_K))
        k = tile * K_TILE + step % (K_TILE // BLOCK_K) * BLOCK_K
        if SCATTER:
            a = tl.trans(A.load([k, row]))  # (BLOCK_M, BLOCK_K)
        else:
            a = A.load([row, k])
        acc = dot(a, B.load([k, col]), acc)
    if SCATTER:
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_W)
        at = out + tl.load(classes + rows, mask=rows < M, other=0)[:, None] * D + cols[None, :]
        inside = (rows < M)[:, None] & (cols < D)[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
    else:
        out.store([row, col], acc + out.load([row, col]))


def kept_first(keep):
    """keep (A, B) bool -> the indices of the kept of each row first, in order, (A, B) int32, and their count (A,)."""
    keep = keep.byte().contiguous()
    return torch.sort(keep, dim=1, descending=True, stable=True).indices.int(), keep.sum(1, dtype=torch.int32)


def descriptor(matrix, *block):
    return cce.TensorDescriptor.from_tensor(matrix, list(block))


def listed_gradient(G, E, C, targets, lse, g_softmax, g_target, softcap, keep, threshold=None):
    """Fill those tiles of G (N, W) that keep (row tiles, tiles) lists. With a threshold (N,) also return the keep that
    the paper's rule decides for them."""
    (N, D), W, decide = E.shape, C.shape[0], threshold is not None
    tiles, count = kept_first(keep.reshape(1, -1))
    hits = torch.empty(keep.shape if decide else (1, 1), dtype=torch.int32, device=E.device)
    listed_gradient_kernel[cce.programs(E)](
        cce.fetched(E, "BLOCK_N", "BLOCK_D"), cce.fetched(C, "BLOCK_V", "BLOCK_D"),
        cce.fetched(G, "BLOCK_N", "BLOCK_V"), softcap, targets, lse, g_softmax, g_target,
        threshold, tiles, count, hits, N, W, D, DECIDE=decide, **cce.TILES["descriptors"],
    )
    return hits > 0 if decide else keep


def add_listed(dE, G, C, keep):
    """dE (N, D) fp32 += G (N, W) @ C (W, D) over the tiles that keep (row tiles, tiles) lists."""
    lists, counts = kept_first(keep)
    M, W, K = (PRODUCT[name] for name in ("BLOCK_M", "BLOCK_W", "BLOCK_K"))
    listed_product_kernel[(-(-dE.shape[0] // M) * -(-dE.shape[1] // W),)](
        descriptor(G, M, K), descriptor(C, K, W), descriptor(dE, M, W), lists, counts, lists, *dE.shape,
        lists.shape[1], SCATTER=False, K_TILE=TILE_V, BLOCKS=TILE_N // M, **PRODUCT,
    )


def scatter_listed(dC, classes, G, E, keep):
    """dC[classes] (W rows of (V, D)) = G.T @ E over the tiles that keep lists; 0 in rows of none."""
    lists, counts = kept_first(keep.T)
    M, W, K = (PRODUCT[name] for name in ("BLOCK_M", "BLOCK_W", "BLOCK_K"))
    listed_product_kernel[(-(-len(classes) // M) * -(-dC.shape[1] // W),)](
        descriptor(G, K, M), descriptor(E, K, W), dC, lists, counts, classes, len(classes), dC.shape[1],
        lists.shape[1], SCATTER=True, K_TILE=TILE_N, BLOCKS=TILE_V // M, **PRODUCT,
    )


# ==== 6. The sparse gradient: a dense head, a sparse tail, one pass over the logits ===================================

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
#   survey        some rows, all classes. Picks the head: the largest mean p. Says how dropped probability is spread
#                 over the tail, q, and where it points, q C; how much there will be, and what that leaves: a forecast
#   lower bound   lse over the head and, at least, the tail; the target's logit if larger. p < eps where logit is below
#                 bound + log eps
#   forward       ONE pass: partial lse, and a bit for each candidate, in bands of the vocabulary; a band's bits become
#                 lists of (row, class), row by row, and are forgotten
#   head          G, dE and dC of 4096 columns, by 02's functions
#   row pass      fetch the rows of C that a row lists: logit, p (now with lse), the entry of G, dE += entry * C[v].
#                 What was not kept is m[n], exactly; it adds g m[n] q C
#   verdict       the errors of dE and dC that follow from m, from the sample, and from another look at the rows that
#                 dropped most; the host reads it while the next pass runs, and has all made again, exactly, if need be
#   column pass   entries sorted by class: dC[v] = sum of entry * E[n], + q[v] sum_n g m[n] E[n], each row written once
#
# The last terms of the two passes are one matrix of rank 1, (g m) q^T, in place of the entries that were dropped. Those
# are many, small, and much alike in all rows: what they add up to is mostly their mean. Nobody adds to memory that
# another adds to, and sums have a fixed order: two runs give the same bits.
#
# The head alone is a poor bound for a row that spreads its bets: where it has 8 % of the probability, as in a fresh
# model, 22,000 of 50,304 classes are candidates, for each of which the row pass fetches a row of C. Of the tail, Gibbs'
# inequality says: for ANY distribution q over it,
#       log sum_v exp(l_v) = log sum_v q_v exp(l_v - log q_v) >= sum_v q_v (l_v - log q_v) = E[n] . (q C) + H(q),
# since log is concave; equal, if the row's tail is spread as q is. q C is there, H is q's entropy. It leaves hardly
# any of those candidates.

HEAD, SAMPLE, CHECKED = 4096, 128, 32  # classes of the head; rows of the survey, rows looked at again in backward
BAND_BYTES = 64 * MIB  # of bits alive at a time
SLACK = 1e-3  # of the lower bound: far more than logits made twice may differ by
SPARSE_EPS = 2**-12  # in any dtype: what is below is not thrown away but approximated
MAX_ERROR, MAX_DROPPED = 0.02, 0.5  # gradient="auto" goes so far; beyond a half, the correction IS the gradient


class Survey(NamedTuple):
    """head (H,) classes, ascending; prior q (V,), 0 in the head; mean_tail (D,) = q C; entropy () of q. What the
    correction leaves: of a row of dE, residual (), a length per unit of dropped probability; of dC, drift (2, R, R),
    what is left and the doubt about q (class_drift), for pairs of the sample's rows (R,). forecast (4,): of a row's
    candidates and dropped probability the mean; relative error of dE; 0, since that of dC is not known yet."""

    head: torch.Tensor
    prior: torch.Tensor
    mean_tail: torch.Tensor
    entropy: torch.Tensor
    residual: torch.Tensor
    rows: torch.Tensor
    drift: torch.Tensor
    forecast: torch.Tensor


def survey(E, C, x, counted, eps):
    """The Survey of E (N, D), C (V, D), targets x (N,) or -1, from SAMPLE of the rows counted (N,)."""
    V, (sums, narrow), rows = C.shape[0], base.product_dtypes(E), sample_rows(counted)
    e, target = E[rows], x[rows].unsqueeze(1)  # (R, D), (R, 1)
    p = probabilities(e, C)  # (R, V)
    head = torch.sort(p.mean(0, dtype=sums), descending=True, stable=True).indices[: head_size(V)].sort().values
    dropped = dropped_part(p, head, target, eps, narrow)  # (R, V)
    m = eps * dropped.sum(1, dtype=sums)  # (R,)
    total = m.sum().clamp(min=1e-30)
    lost, everything = times_rows(C, dropped, p.to(narrow)).split(len(rows))  # (R, D) each
    prior, mean_tail = eps * dropped.sum(0, dtype=sums) / total, eps * lost.sum(0) / total  # (V,), (D,)
    entropy = torch.special.entr(prior).sum().where(total > 1e-30, -math.inf)  # q sums to 1, or bounds nothing
    best = p.max(1)  # (R,): whose logit and p tell lse
    lse = class_logits(e, C, best.indices) - best.values.log()  # (R,)
    p_tail = (tail_at_least(e, mean_tail, entropy) - lse).exp().unsqueeze(1)  # (R, 1)
    p_head, p_target = p[:, head], p.gather(1, target.clamp(min=0)).where(target >= 0, 0.0)  # (R, H), (R, 1)
    bound = eps * torch.maximum(p_head.sum(1, keepdim=True) + p_tail, p_target)  # (R, 1)
    candidates = count_above(p, bound) - count_above(p_head, bound)  # (R,)
    left = (eps * lost - m.unsqueeze(1) * mean_tail).norm()
    of_target = C[target.squeeze(1).clamp(min=0)].where(target >= 0, 0.0)  # (R, D)
    error = left / (everything - of_target).norm().clamp(min=1e-30)
    return Survey(
        head, prior, mean_tail, entropy, left / m.norm().clamp(min=1e-30), rows, class_drift(dropped, m, e, eps),
        torch.stack((candidates.to(sums).mean(), m.mean(), error, torch.zeros_like(error))),
    )


def count_above(p, bound):
    """How many of each row of p (R, V) are above bound (R, 1), in pieces: torch adds bools as int64."""
    return sum((p[:, start:stop] > bound).sum(1) for start, stop in cce.pieces(p.shape[1], 2**15))


def sample_rows(counted):
    """Up to SAMPLE of the rows counted (N,). Spread evenly but not regularly: every 512th row would be the same place
    of each sequence. The golden ratio's multiples fall everywhere."""
    R = min(SAMPLE, len(counted))
    i = torch.arange(R, dtype=torch.float64, device=counted.device)
    first = torch.sort(counted.byte(), descending=True, stable=True).indices  # (N,) rows, those that count first
    return first[((i + i * 0.6180339887498949 % 1) * counted.sum().clamp(min=1) / R).long()]


def probabilities(E, C):
    """Softmax (R, V) of some rows E (R, D), for estimates: bf16 will do, fp16 will not (nothing below 6e-8)."""
    return torch.softmax(E @ C.T, 1, dtype=E.dtype if E.dtype == torch.bfloat16 else base.product_dtypes(E)[0])


def dropped_part(p, head, target, eps, dtype):
    """What is dropped of p (R, V) for targets (R, 1) or -1, as this dtype, in units of eps: fp16 would underflow."""
    dropped = p.where(p < eps, 0.0).div_(eps).to(dtype).index_fill_(1, head, 0.0)
    at = target.clamp(min=0)
    return dropped.scatter_(1, at, dropped.gather(1, at).where(target < 0, 0.0))


def times_rows(C, *parts):
    """Matrices (R, V), on top of each other, @ C (V, D), summed in fp32 (fp64)."""
    sums, rows = base.product_dtypes(C)[0], sum(map(len, parts))
    out = torch.zeros(rows, C.shape[1], dtype=sums, device=C.device)
    for start, stop in cce.pieces(C.shape[0], 2**16):
        cce.add_to(out, torch.cat([part[:, start:stop] for part in parts]), C[start:stop])
    return out


# Row n drops d_n (V,), in all m_n = sum(d_n); the correction puts m_n q there, so r_n = d_n - m_n q is left of it.
#   dC  is off by A = sum_n g_n r_n E_n^T, so ||A||_F^2 = sum_{n,n'} g_n g_n' (r_n . r_n') (E_n . E_n').
#       From a sample of R of N rows: N/R times the terms n = n', and (N/R)^2 times the others.
#       q comes from the sample, too. Its variance is estimated by that of its halves, ((q_even - q_odd) / 2)^2, which
#       adds (N/R)^2 ||(q_even - q_odd) / 2||^2 sum_{n,n'} g_n g_n' m_n m_n' (E_n . E_n').
#   dE  is off by g_n r_n C in row n, whose length is taken as |g_n| m_n residual.


def class_drift(dropped, m, e, eps):
    """The two terms of ||A||^2, but for g, of pairs of the sample's rows, (2, R, R): what is left, (r . r') (E . E'),
    and the doubt about q, ||(q_even - q_odd) / 2||^2 m m' (E . E'). dropped (R, V) is d / eps; m (R,), e (R, D)."""
    K, alike, m = eps**2 * times_rows(dropped.T, dropped).double(), e.double() @ e.double().T, m.double()  # (R, R) each
    a, total = K.sum(0), m.sum().clamp(min=1e-30)  # a = total * (q . dropped)
    left = K - (torch.outer(m, a) + torch.outer(a, m)) / total + torch.outer(m, m) * a.sum() / total**2
    even = torch.arange(len(m), device=m.device) % 2 == 0
    halves = torch.where(even, 1 / (m * even).sum().clamp(min=1e-30), -1 / (m * ~even).sum().clamp(min=1e-30))
    return torch.stack((left * alike, (halves @ K @ halves) / 4 * torch.outer(m, m) * alike))


def head_size(V):
    return min(HEAD, -(-V // 16))


def class_logits(E, C, classes):
    """The logit (N,) of one of the classes (N,) for each row of E (N, D)."""
    sums, _ = base.product_dtypes(E)
    return (E.to(sums) * C[classes].to(sums)).sum(1)


def tail_at_least(E, mean_tail, entropy):
    """What lse over the tail is at least (N,), by Gibbs' inequality; in pieces: E (N, D) in fp32 would be large."""
    rows = max(1, 2**23 // E.shape[1])
    return torch.cat([E[i:j].to(mean_tail.dtype) @ mean_tail for i, j in cce.pieces(len(E), rows)]) + entropy


def lower_bound(E, C, x, counted, found, eps, backend):
    """lse over the head (N,), the target's logit (N,), and the logit (N,) up to which p is certainly below eps."""
    lse_head, _ = cce.lse_and_target(E, C[found.head], torch.full_like(x, -1), backend=backend)
    if backend == "triton":
        target_logit = cce.indexed_logits(E, C, x)
    else:
        target_logit = class_logits(E, C, x.clamp(min=0))
    lse_tail = tail_at_least(E, found.mean_tail, found.entropy)
    floor = torch.maximum(torch.logaddexp(lse_head, lse_tail), target_logit.where(x >= 0, -math.inf))
    return lse_head, target_logit, (floor + math.log(eps) - SLACK).where(counted, math.inf)


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


class Entries(NamedTuple):
    """Candidates of the tail: rows, classes (capacity,) int32 (unused places: class V), in bands of the vocabulary, row
    by row; first, last (bands, N): where a row's begin and end; count (): how many there are, or would be with more
    room. In blocked PyTorch their logits instead of first and last."""

    rows: torch.Tensor
    classes: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor | None = None
    last: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Columns(NamedTuple):
    """A gradient of C as lists: of its row v, sum of weights[i] * E[rows[i]] over i in begin[v] ... begin[v + 1], plus
    prior[v] * lost_E, plus head[place[v]] where place[v] >= 0. None: no such terms; weights None: all are 1.

    E (N, D), its stride; rows (entries,), begin (V + 1,) int32, weights (entries,); prior (V,), lost_E (D,);
    head (H, D), place (V,) int32."""

    E: torch.Tensor
    stride: int
    rows: torch.Tensor
    weights: torch.Tensor | None
    begin: torch.Tensor
    prior: torch.Tensor | None = None
    lost_E: torch.Tensor | None = None
    head: torch.Tensor | None = None
    place: torch.Tensor | None = None


def columns_of(E, rows, classes, values, V, **others):
    """Columns of entries (entries,); those of class V are ignored. The sort is stable: a class lists its rows in the
    order in which they came."""
    classes, order = torch.sort(classes, stable=True)
    begin = torch.searchsorted(classes, torch.arange(V + 1, dtype=classes.dtype, device=E.device), out_int32=True)
    values = None if values is None else values[order]
    return Columns(E, E.stride(0), rows[order].int(), values, begin, **others)


def column_options(columns, R, D):
    """Programs, and their constants, for R rows of Columns. Where a list can be very long, as that of an embedding's
    commonest token, the tiles of a row should not wait for one another."""
    options = COLUMNS | (dict(SPAN=1) if columns.weights is None else {})
    return triton.cdiv(R, options["ROWS"]) * triton.cdiv(D, options["COLS"] * options["SPAN"]), options


@cce.without_autocast
def write_columns(out, columns, top=0, add=False, backend="torch"):
    """out (R, D) = or += rows top ... top + R of what Columns stand for. Fixed order of sums, in fp32 (fp64)."""
    if backend == "triton":
        programs, options = column_options(columns, *out.shape)
        columns_kernel[(programs,)](
            out, columns, top, top + len(out), out.shape[1], out.stride(0), ADD=add, **options
        )
        return
    for start, stop in cce.pieces(len(out), max(1, cce.CPU_BLOCK // out.shape[1])):
        part = blocked_columns(columns, top + start, top + stop)  # (W, D)
        if add:
            out[start:stop] += part
        else:
            out[start:stop] = part


# The twin in blocked PyTorch: what the kernels below do, with sparse matrices.


def blocked_entries(E, C, x, threshold, head):
    """lse (N,), and the Entries."""
    lse, found = torch.full_like(threshold, -math.inf), []
    in_head = torch.zeros(C.shape[0], dtype=torch.bool, device=C.device).index_fill_(0, head, True)
    for start, stop in cce.pieces(C.shape[0], max(256, cce.CPU_BLOCK // len(E))):
        logits = cce.block_logits(E, C[start:stop])  # (N, W)
        lse = cce.merge(torch.stack((lse, logits.logsumexp(1))))
        wanted = logits > threshold.unsqueeze(1)
        inside = (x >= start) & (x < stop)
        wanted[inside, x[inside] - start] = True
        wanted[:, in_head[start:stop]] = False
        rows, columns = wanted.nonzero(as_tuple=True)
        found.append((rows, columns + start, logits[rows, columns]))
        del logits, wanted
    rows, classes, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return lse, Entries(rows, classes, torch.tensor(len(rows), device=E.device), logits=logits)


def entry_matrix(entries, values, N, V):
    """G (N, V), sparse."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said explicitly, or torch 2.11 warns
        return torch.sparse_coo_tensor(torch.stack((entries.rows, entries.classes)), values, (N, V)).coalesce()


def blocked_row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries, eps):
    """dE (N, D) += what the tail contributes. Returns the entries' values of G and m (N,), the probability dropped."""
    rows, sums = entries.rows, dE.dtype
    p, hit = (entries.logits - lse[rows]).exp(), entries.classes == x[rows]
    p = p.where((p >= eps) | hit, 0.0)
    values = p * g_softmax[rows] - g_target[rows].where(hit, 0.0)
    m = (1 - (lse_head - lse).exp() - torch.zeros_like(lse).index_add_(0, rows, p)).clamp(min=0)
    dE += torch.sparse.mm(entry_matrix(entries, values, len(E), len(C)), C.to(sums))
    dE.addr_(g_softmax * m, mean_tail)
    return values, m


def blocked_columns(c, top, bottom):
    """Rows top ... bottom of what Columns c stand for, in fp32 (fp64)."""
    begin, sums = c.begin[top : bottom + 1], base.product_dtypes(c.E)[0]
    rows = c.rows[begin[0] : begin[-1]].long()
    values = torch.ones_like(rows, dtype=sums) if c.weights is None else c.weights[begin[0] : begin[-1]].to(sums)
    classes = torch.repeat_interleave(begin.diff()).long()  # 0 as often as the first class lists a row, ...
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said explicitly, or torch 2.11 warns
        at = torch.stack((classes, rows))
        G = torch.sparse_coo_tensor(at, values, (bottom - top, len(c.E)), is_coalesced=True)
    out = torch.sparse.mm(G, c.E.to(sums))
    if c.prior is not None:
        out.addr_(c.prior[top:bottom], c.lost_E)
    if c.head is not None:
        inside = (c.place[top:bottom] >= 0).nonzero().squeeze(1)
        out[inside] += c.head[c.place[top:bottom][inside]]
    return out


# The kernels.


@triton.jit
def popcount(bits):
    """Set bits of each uint32: sums of neighbouring bits, pairs, nibbles, bytes."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def candidate_kernel(
    E, C, partial, words, counts, targets, threshold, head_words, N, V, D,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """02's lse_kernel, which also writes a bit per entry, 32 columns a word, words (N, V / 32): above the row's
    threshold or the target, and not in the head; and counts (column tiles, N) of them."""
    count, width = tl.cdiv(N, BLOCK_N) * tl.cdiv(V, BLOCK_V), tl.cdiv(V, BLOCK_V) * (BLOCK_V // 32)
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        row, col, logits = next_logits(index, E, C, None, N, V, D, 0, 0, True, BLOCK_N, BLOCK_V, BLOCK_D)
        logits = mask_tail(logits, col + tl.arange(0, BLOCK_V), V)
        top, tile_exp = exponentials(logits)
        rows, word = row + tl.arange(0, BLOCK_N), col // 32 + tl.arange(0, BLOCK_V // 32)
        inside = rows < N
        at = (col // BLOCK_V).to(tl.int64) * N + rows
        tl.store(partial + at, top + tl.log(tl.sum(tile_exp, 1)), mask=inside)
        bit = tl.full((BLOCK_V,), 1, tl.int32) << (tl.arange(0, BLOCK_V) % 32)
        above = logits > tl.load(threshold + rows, mask=inside, other=float("inf"))[:, None]
        found = tl.sum(tl.reshape(tl.where(above, bit[None, :], 0), (BLOCK_N, BLOCK_V // 32, 32)), 2)
        x = tl.load(targets + rows, mask=inside, other=-1).to(tl.int32)
        target_bit = tl.full((BLOCK_N,), 1, tl.int32) << (x & 31)
        found = tl.where(word[None, :] == (x >> 5)[:, None], found | target_bit[:, None], found)
        found = found & ~tl.load(head_words + word)[None, :]
        tl.store(words + rows.to(tl.int64)[:, None] * width + word[None, :], found, mask=inside[:, None])
        tl.store(counts + at, tl.sum(popcount(found.to(tl.uint32, bitcast=True)), 1), mask=inside)


@triton.jit
def list_kernel(
    words, first, rows, classes, N, width, start, capacity, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """The bits of ROWS rows, words (N, width), as entries from place first[row] on, by class; `start` is the class of
    the first bit. Beyond the capacity nothing is written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(first + row, mask=row < N, other=0)
    for i in range(0, width, WORDS):
        word = i + tl.arange(0, WORDS)
        at = words + row.to(tl.int64)[:, None] * width + word[None, :]
        bits = tl.load(at, mask=(row < N)[:, None] & (word < width)[None, :], other=0).to(tl.uint32, bitcast=True)
        count = popcount(bits)
        place = begin[:, None] + tl.cumsum(count, 1) - count
        begin += tl.sum(count, 1)
        for _ in range(tl.max(tl.max(count, 1), 0)):  # each word gives its lowest bit, as long as it has any
            write = (bits != 0) & (place < capacity)
            v = start + word[None, :] * 32 + popcount((bits & (~bits + 1)) - 1)
            tl.store(classes + place, v, mask=write)
            tl.store(rows + place, tl.zeros_like(v) + row[:, None], mask=write)
            bits = bits & (bits - 1)
            place += 1


@triton.jit
def row_pass_kernel(
    dE, E, C, targets, lse, lse_head, g_softmax, g_target, mean_tail, classes, first, last, values, dropped,
    N, D, stride_e, stride_c, bands, capacity, eps, BLOCK_D: tl.constexpr, ENTRIES: tl.constexpr, STAGES: tl.constexpr,
):
    """Row program_id(0) of dE (N, D), values of its entries, and dropped (N,). An entry's row of C, in registers, gives
    the logit and, a moment later, its part of dE: it is fetched once."""
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_D)
    inside = depth < D
    e = tl.load(E + row * stride_e + depth, mask=inside, other=0.0).to(tl.float32)
    acc = tl.load(dE + row * D + depth, mask=inside, other=0.0)  # the head's part
    row_lse, x = tl.load(lse + row), tl.load(targets + row)
    row_g, row_target = tl.load(g_softmax + row), tl.load(g_target + row)
    kept = tl.zeros((ENTRIES,), tl.float32)
    for band in range(bands):
        stop = tl.minimum(tl.load(last + band * N + row), capacity)
        for i in tl.range(tl.load(first + band * N + row), stop, ENTRIES, num_stages=STAGES):
            place = i + tl.arange(0, ENTRIES)
            v = tl.load(classes + place, mask=place < stop, other=0)
            at = C + v.to(tl.int64)[:, None] * stride_c + depth[None, :]
            c = tl.load(at, mask=(place < stop)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            p = tl.exp2((tl.sum(c * e[None, :], 1) - row_lse) * LOG2E)
            hit = (v == x) & (place < stop)
            p = tl.where(((p >= eps) & (place < stop)) | hit, p, 0.0)
            g = p * row_g - tl.where(hit, row_target, 0.0)
            kept += p
            acc += tl.sum(c * g[:, None], 0)
            tl.store(values + place, g, mask=place < stop)
    m = tl.maximum(1.0 - tl.exp2((tl.load(lse_head + row) - row_lse) * LOG2E) - tl.sum(kept, 0), 0.0)
    acc += row_g * m * tl.load(mean_tail + depth, mask=inside, other=0.0)
    tl.store(dE + row * D + depth, acc, mask=inside)
    tl.store(dropped + row, m)


@triton.jit
def column_span(D, ROWS: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr):
    """Which tiles are this program's: the first of ROWS rows, the first column, and where its columns stop."""
    across = tl.cdiv(D, SPAN * COLS)
    first = tl.program_id(0) % across * SPAN * COLS
    return tl.program_id(0) // across * ROWS, first, tl.minimum(first + SPAN * COLS, D)


@triton.jit
def column_lists(c, rows, stop):
    """Of rows (ROWS,) of Columns up to `stop`: prior, place in the head, beginning of the list and its length."""
    valid = rows < stop
    begin = tl.load(c.begin + rows, mask=valid, other=0)
    count = tl.load(c.begin + rows + 1, mask=valid, other=0) - begin
    prior, place = 0.0, begin.to(tl.int64)  # not used, unless there are some
    if c.prior is not None:
        prior = tl.load(c.prior + rows, mask=valid, other=0.0)
    if c.head is not None:
        place = tl.load(c.place + rows, mask=valid, other=-1).to(tl.int64)
    return prior, place, begin, count


@triton.jit
def column_tile(c, lists, col, D, ROWS: tl.constexpr, COLS: tl.constexpr, ENTRIES: tl.constexpr):
    """What Columns c stand for at some rows, whose column_lists these are, and columns col ... col + COLS, in fp32."""
    prior, place, begin, count = lists
    cols = col + tl.arange(0, COLS)
    inside = cols < D
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if c.prior is not None:
        acc += prior[:, None] * tl.load(c.lost_E + cols, mask=inside, other=0.0)[None, :]
    if c.head is not None:  # 0 in the lists' classes
        head_at = c.head + place[:, None] * D + cols[None, :]
        acc += tl.load(head_at, mask=(place >= 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for i in range(0, tl.max(count, 0), ENTRIES):
        for j in tl.static_range(ENTRIES):  # their rows of E are fetched together
            listed = i + j < count  # (ROWS,)
            n = tl.load(c.rows + begin + i + j, mask=listed, other=0).to(tl.int64)
            e_at = c.E + n[:, None] * c.stride + cols[None, :]
            e = tl.load(e_at, mask=listed[:, None] & inside[None, :], other=0.0).to(tl.float32)
            if c.weights is None:
                acc += e
            else:  # fused by name, not as the compiler likes, so that each kernel makes the same bits
                w = tl.load(c.weights + begin + i + j, mask=listed, other=0.0)
                acc = fused_multiply_add(e, tl.broadcast_to(w[:, None], (ROWS, COLS)), acc)
    return acc


@triton.jit
def columns_kernel(
    out, c, top, bottom, D, stride, ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ENTRIES: tl.constexpr, SPAN: tl.constexpr,
):
    """Rows top ... bottom of what Columns c stand for, written or added to out (bottom - top, D)."""
    row, first, stop = column_span(D, ROWS, COLS, SPAN)
    rows = row + tl.arange(0, ROWS)
    lists = column_lists(c, top + rows, bottom)
    for col in range(first, stop, COLS):
        acc = column_tile(c, lists, col, D, ROWS, COLS, ENTRIES)
        cols = col + tl.arange(0, COLS)
        at = out + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        inside = (top + rows < bottom)[:, None] & (cols < D)[None, :]
        if ADD:
            acc += tl.load(at, mask=inside, other=0.0)
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def listed_entries(E, C, x, threshold, head, capacity):
    """lse (N,), and the Entries, as far as there is room for them."""
    N, V, device, ints = E.shape[0], C.shape[0], E.device, dict(dtype=torch.int32, device=E.device)
    tiles = cce.TILES["descriptors"] | ({} if INTERPRETED else dict(num_stages=4))  # no tile of G, room for a fourth
    in_head = torch.zeros(-(-V // TILE_V) * TILE_V, **ints).index_fill_(0, head, 1)
    head_words = (in_head.view(-1, 32) << torch.arange(32, **ints)).sum(1, dtype=torch.int32)  # (V / 32,)
    rows, classes = torch.empty(capacity, **ints), torch.full((capacity,), V, **ints)
    width = max(TILE_V, 8 * BAND_BYTES // N // TILE_V * TILE_V)
    count, partial, first, last = torch.zeros((), dtype=torch.int64, device=device), [], [], []
    for start, stop in cce.pieces(V, width):
        tall = -(-(stop - start) // TILE_V)
        partial.append(torch.empty(tall, N, device=device))
        counts, words = torch.empty(tall, N, **ints), torch.empty(N, tall * TILE_V // 32, **ints)
        candidate_kernel[cce.programs(E)](
            cce.fetched(E, "BLOCK_N", "BLOCK_D"), cce.fetched(C[start:stop], "BLOCK_V", "BLOCK_D"), partial[-1], words,
            counts, x - start, threshold, head_words[start // 32 :], N, stop - start, E.shape[1], **tiles,
        )
        counts = counts.sum(0)  # (N,) int64
        last.append(count + counts.cumsum(0))
        first.append(last[-1] - counts)
        count = last[-1][-1]
        across = min(1024, triton.next_power_of_2(words.shape[1]))
        list_kernel[(triton.cdiv(N, 1024 // across),)](
            words, first[-1], rows, classes, N, words.shape[1], start, capacity, ROWS=1024 // across, WORDS=across
        )
        del words, counts
    return cce.merge(torch.cat(partial)), Entries(rows, classes, count, torch.stack(first), torch.stack(last))


def pass_options(D):
    """A row of D elements in registers, at most 32 a thread; two rows added, two more pairs on their way."""
    block = triton.next_power_of_2(D)
    if INTERPRETED:
        return dict(BLOCK_D=block, ENTRIES=16, STAGES=1)
    return dict(BLOCK_D=block, ENTRIES=2, STAGES=3, num_warps=max(2, block // 1024))


def listed_row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries, eps):
    """blocked_row_pass, of kernels."""
    (N, D), values, m = E.shape, torch.empty(entries.rows.shape, device=E.device), torch.empty_like(lse)
    row_pass_kernel[(N,)](
        dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, entries.classes, entries.first, entries.last,
        values, m, N, D, E.stride(0), C.stride(0), len(entries.first), len(values), eps, **pass_options(D),
    )
    return values, m


# When to use it, and the gradient itself.


class Sparse(NamedTuple):
    """gradient "sparse" or "auto"; threshold of an entry; what auto allows dE to be off by; matrix passes of the exact
    gradient, and columns in its blocks; places for entries; kernels or blocked PyTorch; where the statistics go, and
    dC, if not to autograd."""

    gradient: str
    eps: float
    max_error: float
    passes: int
    block: int
    capacity: int
    backend: str
    stats: "SparseStats"
    sink: object = None


class SparseStats:
    """What became of a call, or of several when passed to each of them.

    Of the last call: decision "sparse" or "exact" (final after backward) and reason; forecast (4,) from the sample and,
    after a sparse backward, measured (4,): a row's mean number of candidates and probability dropped, the relative
    errors of dE and dC (0 in the forecast: not known); dropped (N,), the probability that each row lost; survey, the
    Survey. Tensors are on the device; those that do not apply are None.
    calls, sparse: how many calls wanted a gradient, and got a sparse one."""

    def __init__(self):
        self.calls = self.sparse = self.serial = 0
        self.reset("exact", "no call yet")

    def reset(self, decision, reason):
        self.decision, self.reason, self.serial = decision, reason, self.serial + 1
        self.forecast = self.measured = self.dropped = self.survey = None

    def decide(self, refused):
        """Count a call: a sparse one, if there is no reason to refuse."""
        self.reset("exact" if refused else "sparse", refused or "the forecast is within its limits")
        self.calls, self.sparse = self.calls + 1, self.sparse + (not refused)

    @property
    def share(self):
        return self.sparse / max(self.calls, 1)

    def __str__(self):
        said = f"{self.decision} ({self.reason}); {self.sparse} of {self.calls} calls sparse"
        if self.forecast is None:
            return said
        if self.measured is None:
            numbers = "{:.1f} candidates and {:.4f} dropped a row, error of dE {:.4f}"
            return f"{said}; forecast: {numbers.format(*self.forecast[:3].tolist())}"
        numbers = "{:.1f} candidates and {:.4f} dropped a row, errors of dE {:.4f}, of dC {:.4f}"
        return f"{said}; measured: {numbers.format(*self.measured.tolist())}"


def refusal(candidates, dropped, error_E, error_C, E, V, how):
    """Why not to use the sparse gradient, for numbers that were forecast or measured (a row's means, relative errors);
    None if nothing is against it. NaN counts as too large."""
    if not candidates * len(E) <= how.capacity:
        return f"{candidates:.0f} candidates a row, places for {how.capacity // len(E)}"
    if how.gradient == "sparse":
        return None
    passes = sparse_passes(len(E), V, E.shape[1], candidates, E.device)
    if not passes < how.passes:
        return f"{candidates:.0f} candidates a row, {passes:.1f} matrix passes' worth of time: exact takes {how.passes}"
    if not dropped <= MAX_DROPPED:
        return f"{dropped:.2f} of the probability would be dropped, more than {MAX_DROPPED}"
    for what, error in (("dE", error_E), ("dC", error_C)):
        if not error <= how.max_error:
            return f"{what} would be off by {error:.3f}, more than {how.max_error}"
    return None


class _SparseCrossEntropy(torch.autograd.Function):
    """(E, C) -> lse (N,) and the target's logit (N,), both exact; their gradients sparse."""

    @staticmethod
    @cce.without_autocast
    def forward(ctx, E, C, x, counted, how, found, lse_head, target_logit, threshold):
        if how.backend == "triton":
            lse, entries = listed_entries(E, C, x, threshold, found.head, how.capacity)
        else:
            lse, entries = blocked_entries(E, C, x, threshold, found.head)
        ctx.save_for_backward(E, C, x, counted, lse, lse_head, *found, *entries)
        ctx.how, ctx.call, ctx.revoked = how, how.stats.serial, False
        return lse, target_logit.clone()

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, grad_lse, grad_target):
        E, C, x, counted, lse, lse_head, *others = ctx.saved_tensors
        found, entries, how = Survey(*others[: len(Survey._fields)]), Entries(*others[len(Survey._fields) :]), ctx.how
        kernels, (N, V), stats, sink = how.backend == "triton", (len(E), len(C)), how.stats, how.sink
        wanted = [cce.wanted(ctx, 0), cce.wanted(ctx, 1), False]
        g_softmax, g_target = grad_lse, -grad_target  # (N,): of softmax and onehot, as in 02
        dE, head = torch.zeros(E.shape, dtype=lse.dtype, device=E.device), found.head
        place = torch.full((V,), -1, device=E.device).index_copy_(0, head, torch.arange(len(head), device=E.device))
        C_head, x_head = C[head], place[x.clamp(min=0)].where(x >= 0, -1)  # (H, D); (N,) targets as places in the head
        dC_head = torch.empty_like(C_head, dtype=lse.dtype if sink else None)
        G = cce.gradient_slice(E, C_head, x_head, lse, g_softmax, g_target, None, how.backend)  # (N, H)
        cce.add_to(dE, G, C_head)
        cce.set_to(dC_head, G.T, E)
        del G
        del C_head
        values, m = (listed_row_pass if kernels else blocked_row_pass)(
            dE, E, C, x, lse, lse_head, g_softmax, g_target, found.mean_tail, entries, how.eps
        )
        m, weight = m.where(counted, 0.0), g_softmax * m  # (N,), (N,)
        norm_C = dC_head.to(lse.dtype).norm()
        errors = errors_left(E, C, x, counted, g_softmax, weight, found, how.eps, dE, norm_C)
        measured = torch.stack((entries.count / N, m.sum() / counted.sum().clamp(min=1), *errors))
        answer = Readback(measured)  # travels while the work below goes on
        dE = dE.to(E.dtype)
        columns = dC = None
        if wanted[1]:
            tail = dict(prior=found.prior, lost_E=weighted_rows(weight, E), head=dC_head, place=place.int())
            columns = columns_of(E, entries.rows, entries.classes, values, V, **tail)
            del entries, values, others
        if wanted[1] and not sink:  # a sink's is not undone, so it waits for the verdict
            dC = torch.empty(C.shape, dtype=lse.dtype if INTERPRETED and kernels else C.dtype, device=C.device)
            write_columns(dC, columns, backend=how.backend)
            dC = dC.to(C.dtype)
        last = stats.serial == ctx.call  # else the statistics speak of a later call
        refused = refusal(*answer.read(), E, V, how._replace(passes=math.inf))  # inf: its time is spent already
        if refused is None:
            if last:
                stats.measured, stats.dropped = measured, m
            if columns is not None and sink:
                sink.begin()
                sink.columns(columns)
            return dE, dC, *[None] * 7
        if not ctx.revoked:  # by an earlier backward through this call
            ctx.revoked, stats.sparse = True, stats.sparse - 1
        if last:
            stats.reset("exact", refused)
        del dE, dC, dC_head, columns
        return *cce.sliced_gradients(
            wanted, E, C, x, lse, g_softmax, g_target, None, how.backend, how.block, sink
        ), *[None] * 7


def errors_left(E, C, x, counted, g_softmax, weight, found, eps, dE, norm_C):
    """Relative errors of dE (N, D), and of dC, of length norm_C or more. g is g_softmax (N,), weight (N,) is g m.

    The formulas stand above class_drift. dE's residual is measured again on the rows that lose most, which the sample
    may have missed."""
    most = torch.sort(weight.abs(), descending=True, stable=True).indices[:CHECKED]  # (R,)
    p = probabilities(E[most], C)  # (R, V)
    dropped = dropped_part(p, found.head, x[most].unsqueeze(1), eps, base.product_dtypes(E)[1])  # (R, V)
    m = eps * dropped.sum(1, dtype=dE.dtype)  # (R,)
    left = eps * times_rows(C, dropped) - m.unsqueeze(1) * found.mean_tail  # (R, D)
    left *= g_softmax[most].unsqueeze(1)
    residual = torch.maximum(found.residual, left.norm() / (g_softmax[most] * m).norm().clamp(min=1e-30))
    g, (pairs, doubt), share = g_softmax[found.rows].double(), found.drift, counted.sum() / len(found.rows)
    itself = (pairs.diag() * g**2).sum()
    square = share * itself + share**2 * ((g @ pairs @ g - itself).clamp(min=0) + g @ doubt @ g)
    drift = square.clamp(min=0).sqrt().to(dE.dtype)
    return residual * weight.norm() / dE.norm().clamp(min=1e-30), drift / norm_C.clamp(min=1e-30)


# ==== 7. The API ======================================================================================================


class Filter(NamedTuple):
    """How to filter: the rule and its threshold, of which products ("both", "dE", "none"), in which order, by which
    kernels (fetched: Hopper's; else blocked PyTorch), in slices of how many columns; where to put the statistics."""

    rule: str
    eps: float
    which: str
    sort: bool
    fetched: bool
    width: int
    stats: FilterStats | None
    join: Callable | None  # of 02's Shard


class _FilteredCrossEntropy(torch.autograd.Function):
    """(E, C) -> lse (N,) and the target's logit (N,), both exact; their gradients filtered."""

    @staticmethod
    @cce.without_autocast
    def forward(ctx, E, C, targets, counted, softcap, how):
        V = C.shape[0]
        order = vocabulary_order(E, C, counted) if how.sort else torch.arange(V, device=C.device)  # (V,)
        valid = counted & (targets >= 0) & (targets < V)
        position = inverse(order)[targets.where(valid, 0)].where(valid, -1)  # (N,) of each target, -1 for none
        partial, target_logit = [], torch.zeros_like(position, dtype=torch.promote_types(E.dtype, torch.float32))
        for start, _, _, rows in slices(C, order, how.width):
            if how.fetched:
                partial.append(cce.tile_lse(E, rows, softcap))
            else:
                logits = cce.block_logits(E, rows, softcap=softcap)  # (N, W)
                partial.append(torch.stack([tile.logsumexp(1) for tile in logits.split(TILE_V, 1)]))
                target_logit += base.gather_targets(logits, position - start)
                del logits
        partial = torch.cat(partial)  # (tiles, N)
        lse, keep = cce.merge(partial), None
        if how.fetched:
            target_logit = cce.indexed_logits(E, C, targets.where(valid, -1), softcap)
        if how.join is not None:
            lse, target_logit = how.join(lse, target_logit)
        if how.which == "none":
            keep = torch.ones_like(target_tiles(position, V))
        elif how.rule == "mass":
            keep = target_tiles(position, V) | rows_reach(partial, lse, counted, how.eps)
        if how.stats and keep is not None:
            how.stats.fill(keep, partial, lse, counted)
        partial = partial if how.stats and keep is None else None
        ctx.save_for_backward(E, C, order, position, counted, lse, keep, partial)
        ctx.how, ctx.softcap = how, softcap
        return lse, target_logit

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, grad_lse, grad_target):
        E, C, order, position, counted, lse, keep, partial = ctx.saved_tensors
        how, softcap, decided = ctx.how, ctx.softcap, []
        g_softmax, g_target = grad_lse, -grad_target  # (N,): of softmax and onehot, as in 02
        need_E, need_C = ctx.needs_input_grad[:2]
        dE = torch.zeros(E.shape, dtype=lse.dtype, device=E.device) if need_E else None
        dC = torch.empty_like(C) if need_C else None
        if need_C and how.fetched and INTERPRETED:
            dC = dC.float()  # the interpreter truncates what it stores as bf16
        buffer = cce.empty_gradient(E, min(how.width, C.shape[0])) if how.fetched else None
        whole = how.which != "both" and need_C  # somebody reads the dropped tiles, too
        for start, stop, classes, rows in slices(C, order, how.width):
            G = buffer[:, : stop - start] if how.fetched else None
            part_keep = None if keep is None else keep[:, start // TILE_V : -(-stop // TILE_V)]
            row_values = position - start, lse, g_softmax, g_target
            G, part_keep = slice_of_gradient(G, E, rows, *row_values, softcap, counted, part_keep, whole, how)
            decided.append(part_keep)
            #           blocked PyTorch (G dense)                       kernels (G made where listed)
            #   both    zero what is dropped, two dense products        two products over listed tiles
            #   dE      dC dense, then zero, dE dense                   dC dense, dE over listed tiles
            #   none    two dense products                              two dense products
            if how.which == "both" and not how.fetched:
                zero_dropped(G, part_keep)
            if need_C and how.which == "both" and how.fetched:
                scatter_listed(dC, classes, G, E, part_keep)
            elif need_C:
                out = torch.empty(rows.shape, dtype=dC.dtype, device=dC.device)
                dC.index_copy_(0, classes, cce.set_to(out, G.T, E))
                del out
            if need_E and how.which != "none" and how.fetched:
                add_listed(dE, G, rows, part_keep)
            elif need_E:
                cce.add_to(dE, G if how.which == "none" else zero_dropped(G, part_keep), rows)
        if how.stats and keep is None:
            how.stats.fill(torch.cat(decided, 1), partial, lse, counted)
        del buffer, G, rows  # before dE in 16 bits is made
        dE, dC = None if dE is None else dE.to(E.dtype), None if dC is None else dC.to(C.dtype)
        return dE, dC, *[None] * 4


def slice_of_gradient(G, E, C, targets, lse, g_softmax, g_target, softcap, counted, keep, whole, how):
    """G (N, W) of a slice C (W, D), and its tiles to keep (row tiles, tiles): given by the forward (rule "mass"), or
    None and decided here (rule "element"). With kernels, only those tiles are made, unless the whole of G is wanted."""
    decide = keep is None
    if not how.fetched:
        logits = cce.block_logits(E, C, softcap=softcap)  # (N, W)
        if decide:
            peaks = torch.stack([tile.amax(1) for tile in logits.split(TILE_V, 1)])  # (tiles, N)
            here = targets.where(targets < C.shape[0], -1)
            keep = target_tiles(here, C.shape[0]) | rows_reach(peaks, lse, counted, how.eps)
        return cce.gradient_from_logits(logits, targets, lse, g_softmax, g_target, softcap), keep
    every = torch.ones(-(-E.shape[0] // TILE_N), -(-C.shape[0] // TILE_V), dtype=torch.bool, device=E.device)
    threshold = torch.full_like(lse, how.eps).where(counted, math.inf) if decide else None
    listed = every if decide or whole else keep
    decision = listed_gradient(G, E, C, targets, lse, g_softmax, g_target, softcap, listed, threshold)
    return G, decision if decide else keep


def tile_mask(keep, N, V):
    """keep (row tiles, tiles) -> (N, V) bool, classes in the order."""
    return keep.repeat_interleave(TILE_N, 0)[:N].repeat_interleave(TILE_V, 1)[:, :V]


def zero_dropped(G, keep):
    """G (N, W), in place, 0 in the tiles that keep (row tiles, tiles) does not list."""
    return G.masked_fill_(~tile_mask(keep, *G.shape), 0.0)


def linear_cross_entropy(
    E, C, targets, bias=None, *, gradient="exact", filter="both", rule="mass", filter_eps="auto", sort=True,
    max_error=MAX_ERROR, return_stats=False, ignore_index=-100, softcap=None, reduction="mean",
    return_lse=False, backend="auto", workspace=None, sink=None, shard=None,
):
    """02's linear_cross_entropy, whose arguments mean the same, with a choice of gradient. The loss is always exact.

    gradient: "exact" (02), "filter", "sparse", or "auto".
    "filter": leave out the tiles of G, (TILE_N tokens) x (TILE_V classes), in which no row matters. rule: "element",
    the paper's: |softmax - onehot| < filter_eps everywhere; or "mass": each row's softmax sums to less than filter_eps
    over the tile. Tiles with a target stay; rows that are ignored (and have no gradient through lse) do not count.
    filter_eps: "auto" is finfo.eps / 32 for "element" (bf16: 2^-12), twice that for "mass". filter: which product
    leaves them out. "both"; "dE", which keeps dC exact, as pretraining needs; or "none".
    sort: tiles are cut from the vocabulary sorted by average logit, else from its own order.
    "sparse": of the classes outside the head, only entries with softmax >= filter_eps ("auto": 2^-12) and targets; the
    rest by a correction of rank 1. Exact only if the entries do not fit `workspace`. No softcap.
    "auto": "sparse" if a sample of this very call's rows says that it is faster than "exact" (by figures of an H200),
    drops at most half of the probability, and leaves an error of dE (relative, Frobenius) of at most max_error; else
    "exact". Backward knows what every row dropped, estimates the errors of dE and dC from that, the sample, and another
    look at the rows that dropped most, and remakes the gradient exactly if one is above max_error: estimates, no proof.
    Both read numbers back, with work queued behind them so that the device does not wait; a CUDA graph cannot capture
    them. In forward, where dC is not there yet, the survey takes 8 bytes (fp32: 16) x 128 x V beyond `workspace`.
    shard: as in 02. Every slice of the vocabulary can filter its tiles, since all know the whole log-sum-exp; "sparse"
    and "auto" take their head and sample from one vocabulary, and are refused.
    sink: as in 02; a sparse gradient calls begin() and columns(Columns), all of dC at once.
    return_stats adds a FilterStats, or for "sparse" and "auto" a SparseStats; pass one in its place to go on counting.
    Returns loss[, lse][, stats].

    Kernels for 16-bit inputs on Hopper (rows of whole 16 bytes), blocked PyTorch otherwise, the same rules in both.
    Bitwise repeatable ("sparse" in blocked PyTorch: on a CPU).
    ValueError for arguments that do not fit, or that the chosen gradient would ignore, and for "sparse" and "auto" in
    the capture of a CUDA graph. arXiv 2411.09009."""
    for name, value, known in (("gradient", gradient, ("exact", "filter", "sparse", "auto")),
                               ("filter", filter, ("both", "dE", "none")), ("rule", rule, ("mass", "element"))):
        if value not in known:
            raise base.BadInput(f"{name} is {value!r}: use {' or '.join(map(repr, known))}")
    for name, value, word in (("filter_eps", filter_eps, "'auto' or "), ("max_error", max_error, "")):
        if not (value == "auto" and word) and not (isinstance(value, (int, float)) and 0 < value < 1):
            raise base.BadInput(f"{name} is {value!r}: use {word}a number between 0 and 1")
    approximate = ("filter", "sparse", "auto")
    for name, value, default, users in (("filter", filter, "both", ("filter",)), ("rule", rule, "mass", ("filter",)),
                                        ("sort", sort, True, ("filter",)),
                                        ("max_error", max_error, MAX_ERROR, ("auto",)),
                                        ("filter_eps", filter_eps, "auto", approximate),
                                        ("return_stats", return_stats, False, approximate)):
        if value != default and gradient not in users:
            raise base.BadInput(f"{name}={value!r} goes with gradient={' or '.join(map(repr, users))}, not "
                                f"{gradient!r}")
    reused = isinstance(return_stats, SparseStats) and gradient in ("sparse", "auto")
    if not (isinstance(return_stats, bool) or reused):
        raise base.BadInput(f"return_stats is {return_stats!r}: use True, False, or a SparseStats for 'sparse' and "
                            "'auto'")
    if gradient == "filter" and sink:
        raise base.BadInput("gradient is 'filter', which leaves no slice of dC whole: a sink takes the others")
    if gradient == "sparse" and softcap is not None:
        raise base.BadInput("gradient is 'sparse', which takes no softcap: use 'exact' or 'filter'")
    if gradient in ("sparse", "auto") and shard:
        raise base.BadInput(f"gradient is {gradient!r}, but C is a slice of the vocabulary: use 'exact' or 'filter'")
    wish = backend
    E, C, backend = cce.checked_inputs(E, C, targets, bias, ignore_index, softcap, reduction, backend, workspace, shard)
    exact = functools.partial(
        cce.linear_cross_entropy, E, C, targets, bias, ignore_index=ignore_index, softcap=softcap, reduction=reduction,
        return_lse=return_lse, backend=wish, workspace=workspace, sink=sink, shard=shard,
    )
    if gradient == "exact":
        return exact()
    shape, x = targets.shape, targets.reshape(-1)
    E, C = cce.kernel_inputs(*cce.with_bias(E.reshape(-1, C.shape[1]), C, bias))
    fetched = backend == "triton" and cce.takes_descriptors(E, C)
    if wish == "triton" and not fetched and E.numel():
        raise base.BadInput(f"backend is 'triton' but E is {E.dtype}, {E.shape[1]} wide: the kernels of 03 need Hopper "
                            "and 16-bit rows of whole 16 bytes: use 'auto' or 'torch'")
    kept = x != ignore_index  # (N,)
    counted = torch.ones_like(kept) if return_lse else kept  # an ignored row matters if its lse may have a gradient
    start, vocab, join = shard or (0, C.shape[0], None)
    if gradient == "filter":
        eps = default_eps(rule, E.dtype) if filter_eps == "auto" else filter_eps
        stats = FilterStats(rule, eps) if return_stats else None
        width = slice_width(*E.shape, E.device, E.dtype, workspace, filter)
        how = Filter(rule, eps, filter, sort, fetched, width, stats, join)
        pair = _FilteredCrossEntropy.apply(E, C, x - start if start else x, counted, softcap, how)
    else:
        plan = cce.plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink)
        backend = "triton" if fetched else "torch"
        block = cce.plan_for(E, C, softcap, reduction, return_lse, backend, workspace, sink, differentiable=False).block
        stats = return_stats if reused else SparseStats()
        how = Sparse(gradient, SPARSE_EPS if filter_eps == "auto" else filter_eps, max_error, plan.passes, block,
                     sparse_room(*C.shape, E.dtype, workspace), backend, stats, sink)
        pair = sparse_lse(E, C, x, counted, softcap, how)
    if pair is None:
        results = exact()
        results = list(results) if return_lse else [results]
    else:
        lse, target_logit = pair
        loss = cce.loss_from(lse, target_logit, x, vocab, ignore_index, reduction, shape)
        results = [loss, lse.view(shape)] if return_lse else [loss]
    results += [stats] if return_stats else []
    return tuple(results) if len(results) > 1 else results[0]


def sparse_lse(E, C, targets, counted, softcap, how):
    """lse (N,) and the target's logit (N,), with sparse gradients; or None, and the reason in the statistics."""
    (N, _), V, stats = E.shape, C.shape[0], how.stats
    if not (torch.is_grad_enabled() and (E.requires_grad or C.requires_grad)) or N == 0:
        stats.reset("exact", "no gradient is wanted")
        return None
    if E.is_cuda and torch.cuda.is_current_stream_capturing():
        raise base.BadInput(f"gradient is {how.gradient!r}, which reads numbers back to decide: a CUDA graph cannot "
                            "capture it: use 'exact'")
    refused = None
    if how.gradient == "auto":  # what needs no look at the numbers
        if softcap is not None:
            refused = "a softcap, which the sparse gradient does not take"
        elif E.is_cuda and how.backend == "torch":
            refused = "no kernels for these inputs: they need Hopper, and 16-bit rows of whole 16 bytes"
        elif not sparse_passes(N, V, E.shape[1], 0.0, E.device) < how.passes:
            refused = "too few tokens or classes to gain anything"
    found = None
    if refused is None:
        x = targets.where(counted & (targets >= 0) & (targets < V), -1)
        with torch.no_grad(), torch.autocast(E.device.type, enabled=False):
            found = survey(E, C, x, counted, how.eps)
            forecast = Readback(found.forecast)
            bounds = lower_bound(E, C, x, counted, found, how.eps, how.backend)  # the device goes on meanwhile
        numbers = forecast.read()
        refused = refusal(*numbers, E, V, how)
    stats.decide(refused)
    stats.survey, stats.forecast = found, found and found.forecast
    if refused:
        return None
    how = how._replace(capacity=min(how.capacity, places(N, numbers[0])))
    return _SparseCrossEntropy.apply(E, C, x, counted, how, found, *bounds)


# ==== 8. Checks =======================================================================================================


def filter_backends(device, dtype, D):
    """Where the filter runs for such inputs: blocked PyTorch anywhere, kernels if their terms are met."""
    fits = dtype.itemsize == 2 and D % 8 == 0 and (INTERPRETED or cce.is_hopper(torch.device(device)))
    return cce.backends(device) if fits else ("torch",)


def sparse_problem(device, dtype=torch.float32, seed=0, D=40, row_tiles=3, tiles=11):
    """A problem of a few tiles and odd ends whose softmax is like a trained model's: E, C, bias, targets. The rows of a
    tile share a few targets, so that some tiles hold none; the bias gives the vocabulary's own order some structure."""
    E, C, x = trained_problem(row_tiles * TILE_N - 6, tiles * TILE_V - 4, D, dtype, device, seed)
    n = torch.arange(len(x), device=device)
    bias = torch.linspace(-2, 2, C.shape[0], device=device, dtype=dtype).requires_grad_()
    x, ignored = x[n // TILE_N * TILE_N + n % 5], n % 7 == 0
    rare = (8 * C[:, 0] + bias).argsort()
    x[1::TILE_N] = rare[0]  # a target of hardly any probability: nothing else keeps its tile
    with torch.no_grad():  # ignored rows would keep a tile that no other row wants
        E[ignored] = 30 * torch.nn.functional.normalize(C[rare[len(rare) // 4]], dim=0)
    return E, C, bias, x.where(~ignored, -100)


def tile_statistics(p, order, counted):
    """Softmax p (N, V) -> per tile (row tiles, tiles) of the order: {"element": the largest probability, "mass": the
    largest sum over the tile} of a row that counts."""
    columns = (p * counted.unsqueeze(1))[:, order].split(TILE_V, 1)
    by_rows = lambda values: torch.stack([v.amax(0) for v in torch.stack(values, 1).split(TILE_N)])  # noqa: E731
    return dict(element=by_rows([c.amax(1) for c in columns]), mass=by_rows([c.sum(1) for c in columns]))


def dense_filtered(E, C, bias, x, keep, order, which, g, h, softcap):
    """The filter on dense logits made in the dtype of E: [loss (N,), dE, dC, dbias] for upstream gradients g (N,) of
    the losses and h of lse, and the softmax (N, V)."""
    logits, slope = (E @ C.T + bias.to(E.dtype)).to(torch.promote_types(E.dtype, torch.float32)), 1.0
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
        slope = 1 - (logits / softcap) ** 2
    p, kept = logits.softmax(1), x >= 0
    onehot = torch.nn.functional.one_hot(x.clamp(min=0), C.shape[0]) * kept.unsqueeze(1)
    G = (((g * kept + h).unsqueeze(1) * p - g.unsqueeze(1) * onehot) * slope).to(E.dtype)  # (N, V)
    filtered = torch.empty_like(G).index_copy_(1, order, G[:, order] * tile_mask(keep, *G.shape))
    for_E, for_C = (filtered if which in names else G for names in (("both", "dE"), ("both",)))
    loss = (logits.logsumexp(1) - (logits * onehot).sum(1)) * kept
    return [loss, for_E @ C, for_C.T @ E, for_C.sum(0)], p


def check_filter(device="cpu", dtype=torch.float32, rule="mass", which="both", sort=True, softcap=None, lse_weight=0.0,
                 seed=0):
    """Loss, gradients and kept tiles against the same rule on dense logits in fp64, by 02's three-way rule; two runs
    give the same bits. The threshold drops half of the tiles without a target; some are kept only for their target."""
    E, C, bias, x = sparse_problem(device, dtype, seed)
    weight = torch.linspace(0.5, 1.5, len(x), device=device)
    counted = torch.ones_like(x, dtype=torch.bool) if lse_weight else x >= 0
    order = vocabulary_order(*cce.with_bias(E, C, bias), counted) if sort else torch.arange(C.shape[0], device=device)
    position = inverse(order)[x.clamp(min=0)]
    held = torch.zeros(-(-len(x) // TILE_N), -(-len(order) // TILE_V), dtype=torch.bool, device=device)
    for row in (x >= 0).nonzero().flatten().tolist():
        held[row // TILE_N, position[row] // TILE_V] = True
    exact = [t.detach().double() for t in (E, C, bias)]
    options = order, which, weight, lse_weight, softcap
    tiles = tile_statistics(dense_filtered(*exact, x, held, *options)[1], order, counted)[rule]
    eps = tiles[~held].median().item()
    for backend in filter_backends(device, dtype, E.shape[1]):
        runs = []
        for _ in range(2):
            loss, *lse, stats = linear_cross_entropy(
                E, C, x, bias, gradient="filter", rule=rule, filter=which, filter_eps=eps, sort=sort, return_stats=True,
                reduction="none", softcap=softcap, backend=backend, return_lse=lse_weight > 0, workspace=0,
            )  # no workspace: the smallest slices, three of them
            total = (loss * weight).sum() + lse_weight * sum(part.sum() for part in lse)
            runs.append([loss.detach(), *torch.autograd.grad(total, (E, C, bias))])
        name = f"{backend} {dtype} rule {rule}, filter {which}, sort {sort}, softcap {softcap}, lse {lse_weight}"
        keep = held | (tiles >= eps)
        near = (tiles / eps).log().abs() < (1e-3 if dtype == torch.float32 else 5e-2)  # rounding may decide these
        if which == "none":
            keep = torch.ones_like(keep)
        base.require(((stats.keep == keep) | near).all().item(), f"{name}: other tiles are kept than the rule says")
        lone = (held & (tiles < eps)).any() or not sort  # kept for a target alone; unsorted there may be none
        base.require(which == "none" or lone and not keep.all(), f"{name}: {stats} tests nothing")
        want, p = dense_filtered(*exact, x, stats.keep, *options)
        peer, _ = dense_filtered(*(t.detach() for t in (E, C, bias)), x, stats.keep, *options)
        gone = ~tile_mask(stats.keep, *p.shape)
        dropped = (p[:, order] * gone).sum(1) * counted
        off = (stats.dropped - dropped).abs().max().item()
        base.require(off < 1e-3, f"{name}: the lost probability is off by {off:.1e}")
        base.require((stats.dropped <= stats.bound * 1.001).all().item(), f"{name}: more is lost than the bound allows")
        tiles_gone = (~stats.keep).sum(1).repeat_interleave(TILE_N)[: len(x)] * counted
        bound = tiles_gone * eps * (TILE_V if rule == "element" else 1)
        base.require((stats.bound - bound).abs().max() < 1e-3, f"{name}: the bound is not {bound.max().item()}")
        for part, g, p, w in zip(("loss", "dE", "dC", "dbias"), runs[0], peer, want, strict=True):
            cce.require_as_good(f"{name}: {part}", g, p, w, 2e-6 if dtype == torch.float32 else 1e-3)
        base.require(all(map(torch.equal, *runs)), f"{name}: two runs on the same input differ")


def check_kernels(device="cpu"):
    """check_filter in 16 bits, where the kernels run."""
    for rule in ("mass", "element"):
        check_filter(device, torch.bfloat16, rule)


def check_autograd_modes(device="cpu"):
    """02's check of frozen inputs, second backward, no_grad and autocast, on the filter."""
    loss = functools.partial(linear_cross_entropy, gradient="filter", filter_eps=0.05)
    cce.check_autograd_modes(device, loss, ("torch",))


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


def dense_sparse(E, C, x, found, keep, g, h):
    """The sparse gradient on dense logits made in the dtype of E: [loss (N,), dE, dC] for upstream gradients g (N,) of
    the losses and h of lse, entries (N, V) of the tail to keep given; and m (N,), the probability dropped."""
    logits = (E @ C.T).to(torch.promote_types(E.dtype, torch.float32))
    p, counts = logits.softmax(1), x >= 0
    onehot = torch.nn.functional.one_hot(x.clamp(min=0), C.shape[0]).bool() & counts.unsqueeze(1)
    G = ((g * counts + h).unsqueeze(1) * p - g.unsqueeze(1) * onehot) * keep  # (N, V)
    m = (p * ~keep).sum(1)  # (N,)
    weight, mean_tail, prior = ((g * counts + h) * m).to(E.dtype), found.mean_tail.to(E.dtype), found.prior.to(E.dtype)
    dE = G.to(E.dtype) @ C + torch.outer(weight, mean_tail)
    dC = G.to(E.dtype).T @ E + torch.outer(prior, weight @ E)
    return [(logits.logsumexp(1) - (logits * onehot).sum(1)) * counts, dE, dC], m


def check_sparse(device="cpu", dtype=torch.float32, lse_weight=0.0, seed=0, names=None):
    """Loss, gradients and dropped probability of what is hard, against the same rule on dense logits in fp64, by 02's
    three-way rule: rows that lie in the tail, a class that every row lists, classes that no row lists, entries that lie
    on the threshold, ignored rows. In several bands; two runs give the same bits."""
    for name, (E, C, x, eps) in adversarial_problems(device, dtype, seed=seed).items():
        if names and name not in names:
            continue
        weight = torch.linspace(0.5, 1.5, len(x), device=device)
        exact = [t.detach().double() for t in (E, C)]
        p = (exact[0] @ exact[1].T).softmax(1)  # (N, V)
        counted = torch.ones_like(x, dtype=torch.bool) if lse_weight else x >= 0
        for backend in filter_backends(device, dtype, E.shape[1]):
            runs = []
            for _ in range(1 if backend == "triton" and INTERPRETED and name != "a Zipf law" else 2):
                with mock.patch.dict(globals(), BAND_BYTES=1):
                    loss, *lse, stats = linear_cross_entropy(
                        E, C, x, gradient="sparse", filter_eps=eps, return_stats=True, reduction="none",
                        backend=backend, return_lse=lse_weight > 0,
                    )
                total = (loss * weight).sum() + lse_weight * sum(part.sum() for part in lse)
                runs.append([loss.detach(), *torch.autograd.grad(total, (E, C))])
            title = f"{backend} {dtype}, {name}, lse {lse_weight}"
            base.require(stats.decision == "sparse", f"{title}: {stats}")
            keep = torch.zeros_like(p, dtype=torch.bool).index_fill_(1, stats.survey.head, True)
            keep[x >= 0, x[x >= 0]] = True
            # Rounding decides ties, for all of them alike: the dropped probability tells how.
            lower = 1 - 1e-5 if stats.dropped.max() < 0.1 else 1 + 1e-5
            keep |= p >= eps * (lower if name == "ties" else 1)
            want, m = dense_sparse(*exact, x, stats.survey, keep, weight.double(), lse_weight)
            peer, _ = dense_sparse(*(t.detach() for t in (E, C)), x, stats.survey, keep, weight, lse_weight)
            base.require((stats.dropped - m * counted).abs().max() < 1e-4, f"{title}: other entries are dropped")
            base.require(stats.measured.isfinite().all().item(), f"{title}: {stats}")
            for part, g, q, w in zip(("loss", "dE", "dC"), runs[0], peer, want, strict=True):
                # m = 1 - head - kept is off by a few 2^-24 whatever its size; one lost entry would be 2^-9.
                cce.require_as_good(f"{title}: {part}", g, q, w, 1e-5 if dtype.itemsize > 2 else 1e-3)
            same = all(map(torch.equal, runs[0], runs[-1]))  # cuSPARSE promises nothing
            base.require(same or backend == "torch" and E.is_cuda, f"{title}: two runs on the same input differ")


def check_sparse_kernels(device="cpu"):
    """check_sparse in 16 bits, where the kernels run; interpreted, they are slow, and two of its problems must do."""
    check_sparse(device, torch.bfloat16, names=("a Zipf law", "a class of every row") if INTERPRETED else None)


def check_survey(device="cpu"):
    """The head has the largest mean p over the rows that count; q is how what is dropped spreads, 0 in the head; the
    forecast is what the approximation then does to these rows."""
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        E, C, x = (t.detach() for t in trained_problem(SAMPLE, 50 * TILE_V, 24, dtype, device))
        eps, x[::5] = 2**-9, -1  # these rows count for lse alone
        met, target = (x >= 0).unsqueeze(1), x.clamp(min=0).unsqueeze(1)  # (R, 1)
        found = survey(E, C, x, torch.ones_like(x, dtype=torch.bool), eps)
        e, c = E.double(), C.double()
        p, head = (e @ c.T).softmax(1), found.head
        mean = p.mean(0)
        base.require(len(head) == head_size(len(C)) and bool((head.diff() > 0).all()), f"{dtype}: head {head}")
        others = mean.index_fill(0, head, 0.0)
        base.require(mean[head].min() > (1 - close) * others.max(), f"{dtype}: the head is not the likeliest classes")
        dropped = p.where(p < eps, 0.0).index_fill_(1, head, 0.0)
        dropped = dropped.scatter(1, target, 0.0).where(met, dropped)
        m, prior = dropped.sum(1), dropped.sum(0) / dropped.sum()
        left = dropped @ c - m.unsqueeze(1) * (prior @ c)
        relative = left.norm() / (p @ c - c[x] * met).norm()
        logits, tail = e @ c.T, others > 0  # (R, V), (V,)
        entropy = torch.special.entr(prior).sum()
        least = (logits @ prior + entropy - logits.logsumexp(1)).exp()  # (R,) of p, in the tail
        bound = torch.maximum((p[:, head].sum(1) + least).unsqueeze(1), p.gather(1, target) * met)
        candidates = ((p > eps * bound) & tail).sum(1).double().mean()
        *_, threshold = lower_bound(E, C, x, torch.ones_like(x, dtype=torch.bool), found, eps, "torch")
        listed = ((logits > threshold.unsqueeze(1) + SLACK) & tail).sum(1).double().mean()
        base.require(abs(listed / candidates - 1) < close, f"{dtype}: {listed} candidates, not {candidates}")
        pairs = {"prior": (found.prior, prior), "entropy": (found.entropy, entropy),
                 "mean tail": (found.mean_tail, prior @ c), "residual": (found.residual, left.norm() / m.norm()),
                 "candidates": (found.forecast[0], candidates), "dropped": (found.forecast[1], m.mean()),
                 "error of dE": (found.forecast[2], relative)}
        for what, (got, want) in pairs.items():
            base.require(cce.error(got, want) < close, f"{dtype}: {what} is off by {cce.error(got, want):.1e}")
        base.require(found.forecast[3] == 0, f"{dtype}: dC's error is not known yet")


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
        found = survey(E, C, x, counted, eps)
        lse_head, target_logit, threshold = lower_bound(E, C, x, counted, found, eps, "torch")
        below = logits.logsumexp(1) + math.log(eps) - threshold
        base.require((below > 0).all().item(), f"{scale}: the bound is {-below.min()} too high")
        if scale == 0.1:
            alone = torch.maximum(lse_head, target_logit) + math.log(eps)
            many, few = ((logits > bound.unsqueeze(1)).sum(1).double().mean().item() for bound in (alone, threshold))
            base.require(many > V / 2 and few < V / 100, f"fresh: {few} candidates, {many} by the head alone")
        sure = (threshold - target_logit - math.log(eps)).min()
        base.require(sure > -2e-3, f"{scale}: a target's logit is above the bound by {-sure}")
    E, C, H = torch.zeros(N, 8, device=device), torch.zeros(V, 8, device=device), head_size(V)
    E[:, 0], C[:, 0], C[:H, 0] = 1, -190, -100
    far = min(set(range(N)) - set(sample_rows(counted).tolist()))
    E[far, 1], C[-1, 1] = 1, 90  # its logit is -100, too
    found = survey(E, C, x % H, counted, eps)
    lse_head, _, threshold = lower_bound(E, C, x % H, counted, found, eps, "torch")
    off = (threshold - lse_head - math.log(eps)).abs().max()
    base.require(found.entropy == -math.inf and off < 2e-3, f"without a tail the bound is off by {off}")


def check_pieces(device="cpu"):
    """Counts and products over more classes than one piece has."""
    p, C = torch.rand(2, 2**16 + 70, device=device), torch.rand(2**16 + 70, 3, device=device)
    base.require(torch.equal(count_above(p, p[:, :1]), (p > p[:, :1]).sum(1)), "counts in pieces")
    base.require(cce.error(times_rows(C, p, p), torch.cat((p, p)) @ C) < 1e-5, "products in pieces")


def check_auto(device="cpu"):
    """gradient="auto" is exact for an untrained model, for a tail that depends on the context, for what it would gain
    nothing on, and if what backward measures is not what the sample promised; sparse otherwise, within its bound."""
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    N, V, D, eps = 1024, 16384, 32, 2**-9
    E, C, x = trained_problem(N, V, D, dtype, device)
    fresh = torch.randn(V, D, device=device).mul_(0.02).to(dtype).requires_grad_()
    seen = torch.zeros(N, 1, dtype=torch.bool, device=device).index_fill_(0, sample_rows(x >= 0), True)
    flat = E.detach().where(seen, 0.3 * E.detach()).requires_grad_()
    # A few flat rows among sure ones: most of the gradient is theirs, and the sample has none of them.
    few = (~seen.squeeze(1)).nonzero().squeeze(1)[:4]
    sure = (500 * torch.nn.functional.normalize(C.detach().float()[x])).to(dtype)
    sure[few] = torch.randn(4, D, device=device).div(2).to(dtype)
    sure.requires_grad_()
    # Two groups of rows, each with its half of a tail whose rows of C differ little: dE does not mind, dC does.
    n, v = torch.arange(N, device=device), torch.arange(V, device=device)
    sign, half = (1 - 2 * (n % 2)).float(), (1 - 2 * (v % 2)).float()
    halves_E, halves_C = torch.zeros(N, D, device=device), torch.randn(V, D, device=device).mul_(0.002)
    halves_C[:, 0] += 1
    halves_C[:, 1] += 0.01 * half
    halves_C[:64] = torch.randn(64, D, device=device).mul_(0.002)
    halves_C[:64, 0] += 1
    halves_C[:64, 3] += 1
    halves_E[:, 1], halves_E[:, 2], halves_E[:, 3] = 200 * sign, 5 * sign, 7
    halves_E, halves_C = (t.to(dtype).requires_grad_() for t in (halves_E, halves_C))
    cases = {
        "sharp": (E, C, 0.1, eps, "sparse", "forecast"),
        "untrained": (E, fresh, 0.1, 2**-5, "exact", "would be dropped"),
        "topics": (*topic_problem(N, V, D, dtype, device)[:2], 0.02, eps, "exact", "off by"),
        "dense": (E, C, 0.1, 1e-5, "exact", "candidates"),
        "flat where not looked": (flat, C, 0.1, eps, "exact", ""),
        "few flat rows": (sure, C, 0.02, eps, "exact", "dE would be off"),
        "two halves": (halves_E, halves_C, 0.02, eps, "exact", "dC would be off"),
    }
    stats = SparseStats()
    free = mock.patch.dict(FIXED_COST, cuda=0.0)  # these problems are small
    for calls, (name, (e, c, most, threshold, decision, reason)) in enumerate(cases.items(), 1):
        target = n % 64 if name == "two halves" else x
        options = dict(gradient="auto", filter_eps=threshold, max_error=most)
        with free:
            loss, same = linear_cross_entropy(e, c, target, return_stats=stats, **options)
        got = torch.autograd.grad(loss, (e, c))
        base.require(stats.decision == decision and reason in stats.reason, f"{name}: {stats}")
        base.require(same is stats and (stats.calls, stats.sparse) == (calls, 1), f"{name}: {stats}")
        want = cce.gradients_of(cce.linear_cross_entropy, e, c, None, target)
        base.require(cce.error(loss, want[0]) < 1e-5, f"{name}: loss")
        for part, g, w in zip(("dE", "dC"), got, want[1:], strict=True):
            limit = most if decision == "sparse" else 1e-5 if dtype == torch.float32 else 6e-3
            base.require(cce.error(g, w) < limit, f"{name}: {part} is off by {cce.error(g, w):.1e}")
        if name == "sharp":
            for part, g, w, promised in zip(("dE", "dC"), got, want[1:], stats.measured[2:].tolist(), strict=True):
                found = cce.error(g, w)
                base.require(0.5 < found / promised < 1.5, f"{part} is off by {found:.1e}, measured as {promised:.1e}")
    for _ in range(2):
        with torch.no_grad():
            linear_cross_entropy(E, C, x, gradient="auto", return_stats=stats)
    base.require((stats.calls, stats.share) == (len(cases), 1 / len(cases)), f"calls without gradients count: {stats}")


def check_room(device="cpu"):
    """More candidates than places: nothing is written outside, and the gradient is the exact one."""
    for dtype in (torch.float32, torch.bfloat16):
        E, C, x, eps = adversarial_problems(device, dtype)["a Zipf law"]
        for backend in filter_backends(device, dtype, E.shape[1]):
            options = dict(gradient="sparse", filter_eps=eps, backend=backend, return_stats=True)
            want = cce.gradients_of(cce.linear_cross_entropy, E, C, None, x, backend=backend, workspace=0)
            with mock.patch.dict(globals(), places=lambda N, candidates: 64):
                loss, stats = linear_cross_entropy(E, C, x, **options)
            base.require(stats.decision == "sparse", f"before backward: {stats}")
            got = [loss, *torch.autograd.grad(loss, (E, C))]
            base.require(stats.decision == "exact" and "places for" in stats.reason, f"after backward: {stats}")
            late, stats = linear_cross_entropy(E, C, x, workspace=0, **options)
            base.require(stats.decision == "exact" and "places for 0" in stats.reason, f"without workspace: {stats}")
            for values in (got, [late, *torch.autograd.grad(late, (E, C))]):
                for g, w in zip(values, want, strict=True):
                    base.require(cce.error(g, w) < (1e-5 if dtype == torch.float32 else 6e-3), f"{backend}: not exact")


def check_order(device="cpu"):
    """The order is that of the average logit over the rows that count, and each class appears once."""
    for dtype in (torch.float32, torch.bfloat16):
        E, C, bias, x = (t.detach() for t in sparse_problem(device, dtype))
        order = vocabulary_order(*cce.with_bias(E, C, bias), x >= 0)
        average = (E[x >= 0].double() @ C.double().T + bias).mean(0)[order]  # (V,)
        base.require(torch.equal(order.sort().values, torch.arange(len(order), device=device)), "order: no permutation")
        climb = (average - average.cummin(0).values).max().item()
        slack = 1e-5 if dtype == torch.float32 else 2**-8 * average.abs().max().item()  # a GPU rounds the mean to bf16
        base.require(climb <= slack, f"{dtype}: the average logit climbs by {climb:.1e} along the order")


def check_permutation(device="cpu"):
    """Sorted, a filter does not care how the vocabulary is numbered; unsorted, it does."""
    E, C, bias, x = sparse_problem(device)
    shuffle = torch.randperm(C.shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    x2 = inverse(shuffle)[x.clamp(min=0)].where(x >= 0, -100)
    C2, bias2 = (t.detach()[shuffle].requires_grad_() for t in (C, bias))
    for sort in (True, False):
        options = dict(gradient="filter", filter_eps=0.2, sort=sort, return_stats=True)
        (loss, stats), (loss2, stats2) = (
            linear_cross_entropy(E, c, t, b, **options) for c, t, b in ((C, x, bias), (C2, x2, bias2)))
        dE, dC = torch.autograd.grad(loss, (E, C))
        dE2, dC2 = torch.autograd.grad(loss2, (E, C2))
        close = cce.error(dE2, dE) < 1e-5 and cce.error(dC2, dC[shuffle]) < 1e-5
        changed = not (close and torch.equal(stats.keep, stats2.keep))
        base.require(changed != sort, f"sort={sort}: renumbering {'changes' if changed else 'does not change'} it")


def check_nothing_dropped(device="cpu"):
    """filter="none", and a threshold that no tile is below, give 02's exact gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        E, C, bias, x = sparse_problem(device, dtype)
        for backend in filter_backends(device, dtype, E.shape[1]):
            want = cce.gradients_of(cce.linear_cross_entropy, E, C, bias, x, backend=backend)
            for options in (dict(filter="none"), dict(filter="none", sort=False), dict(filter_eps=1e-30, workspace=0)):
                loss = functools.partial(linear_cross_entropy, gradient="filter", backend=backend, **options)
                got = cce.gradients_of(loss, E, C, bias, x)
                for g, w in zip(got, want, strict=True):
                    limit = 1e-5 if dtype == torch.float32 else 6e-3  # both are within a rounding of bf16 of the truth
                    base.require(cce.error(g, w) < limit, f"{backend} {dtype} {options}: not the exact gradient")


def check_reductions(device="cpu"):
    """mean, sum and leading shapes give what "none" gives; all tokens ignored: zero."""
    E, C, bias, x = sparse_problem(device)
    x = x.where(x >= 0, -100)[: len(x) // 4 * 4].view(4, -1)
    E3 = E.detach()[: x.numel()].view(*x.shape, -1).requires_grad_()
    options = dict(gradient="filter", filter_eps=0.05)
    kept = x >= 0
    for reduction, weight in (("sum", kept.float()), ("mean", kept / kept.sum())):
        want = cce.gradients_of(linear_cross_entropy, E3, C, bias, x, weight.float(), reduction="none", **options)
        got = cce.gradients_of(linear_cross_entropy, E3, C, bias, x, reduction=reduction, **options)
        torch.testing.assert_close(got[0], (want[0] * weight).sum(), rtol=1e-5, atol=1e-6)
        for g, w in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
    for value in cce.gradients_of(linear_cross_entropy, E3, C, bias, torch.full_like(x, -100), **options):
        base.require(not value.any(), "all tokens ignored: not zero")


def check_bad_input(device="cpu"):
    """Each wrong argument: ValueError whose one line names it."""
    E, C, b, x = base.random_problem(6, 10, 4, torch.float32, device)
    cases = {"gradient is 'dense'": dict(gradient="dense"), "filter is 'dC'": dict(filter="dC"),
             "rule is 'max'": dict(rule="max"), "filter_eps is 2": dict(filter_eps=2),
             "return_stats": dict(gradient="exact", return_stats=True), "sort": dict(gradient="exact", sort=False),
             "filter_eps is 'small'": dict(filter_eps="small"), "softcap": dict(softcap=-1.0),
             "backend is 'triton'": dict(backend="triton"), "workspace": dict(workspace=-1),
             "max_error": dict(max_error=0.1), "max_error is 0": dict(gradient="auto", max_error=0),
             "no softcap": dict(gradient="sparse", softcap=2.0),
             "rule": dict(gradient="auto", rule="element")}
    for words, options in cases.items():
        base.must_raise(words, functools.partial(linear_cross_entropy, E, C, x, **{"gradient": "filter"} | options))


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


CHECKS = [check_corpus, check_filter, check_kernels, check_autograd_modes, check_order, check_permutation]
CHECKS += [check_nothing_dropped, check_sparse, check_sparse_kernels, check_survey, check_lower_bound, check_pieces]
CHECKS += [check_auto, check_room, check_reductions, check_bad_input]

# The bugs of --break.


def _after_scaling(log_values, lse, counted, eps):
    return any_row((log_values - lse - math.log(len(lse)) >= math.log(eps)) & counted)


def _no_targets(position, V):
    return torch.zeros(-(-len(position) // TILE_N), -(-V // TILE_V), dtype=torch.bool, device=position.device)


def _first_tiles(keep):
    """The right number of tiles, but always the first."""
    return torch.arange(keep.shape[1], device=keep.device, dtype=torch.int32).expand(keep.shape).contiguous(), \
        keep.sum(1, dtype=torch.int32)


def _by_row_norm(E, C, counted=None):
    return torch.sort(C.float().norm(dim=1), descending=True, stable=True).indices


def _ignored_rows_count(log_values, lse, counted, eps):
    return any_row(log_values - lse >= math.log(eps))


def _without_correction(dE, E, C, x, lse, lse_head, g_softmax, g_target, mean_tail, *rest):
    return _blocked_row_pass(dE, E, C, x, lse, lse_head, g_softmax, g_target, torch.zeros_like(mean_tail), *rest)


def _bound_too_high(*args):
    lse_head, target_logit, threshold = _lower_bound(*args)
    return lse_head, target_logit, threshold + 0.5


_blocked_row_pass, _lower_bound, _blocked_entries = blocked_row_pass, lower_bound, blocked_entries
_tail_at_least = tail_at_least


_popcount = popcount


@triton.jit
def _lowest_bits_only(bits):
    return _popcount(bits & 0x7FFFFFFF)


BREAKS = {
    "no-correction": (check_sparse, "blocked_row_pass", _without_correction),
    "bound-too-high": (check_sparse, "lower_bound", _bound_too_high),
    "entropy-twice": (check_lower_bound, "tail_at_least", lambda E, q_C, entropy: _tail_at_least(E, q_C, 2 * entropy)),
    "rare-targets": (check_sparse, "blocked_entries", lambda E, C, x, *rest: _blocked_entries(E, C, x * 0 - 1, *rest)),
    "always-sparse": (check_auto, "refusal", lambda *numbers: None),
    "eps-after-scaling": (check_filter, "rows_reach", _after_scaling),
    "forget-targets": (check_filter, "target_tiles", _no_targets),
    "ignored-rows-count": (check_filter, "rows_reach", _ignored_rows_count),
    "wrong-order": (check_order, "vocabulary_order", _by_row_norm),
    "never-drop": (check_filter, "zero_dropped", lambda G, keep: G),
}
_listed_gradient = listed_gradient


def _kernel_counts_ignored(*args):
    *rest, threshold = args
    return _listed_gradient(*rest, None if threshold is None else threshold.amin().expand_as(threshold).contiguous())


if base.HAS_TRITON:
    BREAKS["lost-bit"] = (check_sparse_kernels, "popcount", _lowest_bits_only)
    BREAKS["first-tiles"] = (check_kernels, "kept_first", _first_tiles)
    BREAKS["kernel-counts-ignored"] = (check_kernels, "listed_gradient", _kernel_counts_ignored)


# ==== 9. Measurements =================================================================================================


def compare_training(device):
    """What the paper warns of: dC, filtered, leaves the classifier's rows of rare tokens where they are. By the mass
    rule this comes later, when tiles as a whole have become improbable. Returns E, C and the targets of the model that
    the exact gradient trained."""
    print(f"  {'gradient':<18}{'loss at the end':>16}{'rows of C without gradient':>28}")

    def train(name, **options):
        *problem, late, without = train_small(device, functools.partial(linear_cross_entropy, **options))
        print(f"  {name:<18}{late:16.3f}{100 * without:26.1f} %")
        return problem

    problem = train("exact")
    for rule, which in (("element", "both"), ("element", "dE"), ("mass", "both")):
        eps = default_eps(rule, torch.bfloat16)
        train(f"{rule}, {which}", gradient="filter", rule=rule, filter=which, filter_eps=eps)
    return problem


def tiles_kept(E, C, x):
    """Shares of tiles that each rule keeps in the vocabulary's own order, shuffled, and sorted by average logit."""
    shuffle = torch.randperm(C.shape[0], generator=torch.Generator().manual_seed(0)).to(C.device)
    for rule in ("element", "mass"):
        eps, shares = default_eps(rule, torch.bfloat16), []
        for classes, targets, sort in ((C, x, False), (C[shuffle], inverse(shuffle)[x], False), (C, x, True)):
            loss, stats = linear_cross_entropy(
                E.detach().requires_grad_(), classes.detach(), targets, gradient="filter", rule=rule, filter_eps=eps,
                sort=sort, return_stats=True,
            )
            loss.backward()  # rule "element" decides here
            shares.append(100 * stats.keep.float().mean().item())
        print("  {:<7} < 2^{:.0f}: {:.1f} % in its own order, {:.1f} % shuffled, {:.1f} % sorted".format(
            rule, math.log2(eps), *shares))


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


def measure(device, ledger, E, C, x, name, only=None):
    """What is kept, time, memory and errors of the approximations beside the exact gradient, of all or `only` some."""
    (N, D), V, b, cuda = E.shape, C.shape[0], E.element_size(), device.type == "cuda"
    tiles = -(-N // TILE_N) * -(-V // TILE_V)
    print(f"{name}: N = {N}, V = {V}, D = {D}, {E.dtype}; {tiles:,} tiles of {TILE_N} x {TILE_V}")
    if only is None:
        tiles_kept(E, C, x)
    E, C = (t.detach().requires_grad_() for t in (E, C))
    want = cce.gradients_of(cce.linear_cross_entropy, *(t.detach().float().requires_grad_() for t in (E, C)), None, x,
                            backend="torch")
    element, mass = (functools.partial(dict, gradient="filter", rule=rule) for rule in ("element", "mass"))
    rows = {"exact (02)": {}, "sorted, nothing dropped": mass(filter="none"),
            "element 2^-12": element(filter_eps=2**-12),
            "element 2^-12, only dE": element(filter_eps=2**-12, filter="dE"),
            **{f"mass 2^-{k}": mass(filter_eps=2.0**-k) for k in (12, 11, 10)},
            "mass 2^-11, only dE": mass(filter_eps=2**-11, filter="dE"),
            "sparse": dict(gradient="sparse"), "auto": dict(gradient="auto")}
    rows = {row: options for row, options in rows.items() if only is None or row in only}
    units, lines = [], []
    titles = f"{'kept':>11}{'lost p':>8}{'loss+grad ms':>17}{'passes':>8}{'beyond MiB':>11}"
    print(f"{'':<24}{titles}  error of dE, dC, its rows of no target")
    others = torch.ones(V, dtype=torch.bool, device=device).index_fill_(0, x, False)  # (V,)
    beyonds, bounds, decisions, measured = {}, {}, {}, {}
    for row, options in rows.items():
        loss, kept = functools.partial(linear_cross_entropy, **options), ""

        def both(loss=loss):
            E.grad = C.grad = None
            loss(E, C, x).backward()

        if options:
            value, stats = loss(E, C, x, return_stats=True)
            value.backward()
            if options["gradient"] != "filter":
                decisions[row] = stats
                if stats.decision == "sparse":
                    kept = "{:7.0f}/row{:8.4f}".format(*stats.measured.tolist())
            else:
                kept = f"{100 * stats.keep.float().mean().item():9.1f} %{stats.dropped.mean().item():8.4f}"
                base.require((stats.dropped <= stats.bound * 1.001).all().item(), f"{row}: lost more than the bound")
                bounds[row] = stats.dropped.max().item(), stats.bound.max().item()
        else:
            both()
        errors = measured[row] = [cce.error(*pair) for pair in (
            (E.grad, want[1]), (C.grad, want[2]), (C.grad[others], want[2][others]))]
        timing = base.bench(both, device) if cuda else None
        if cuda:
            units.append(cce.one_pass(E, C))  # after each row: the clocks drift, the mean is the fair unit
        E.grad = C.grad = None
        beyond = base.peak_bytes(both, device) - b * (N + V) * D
        E.grad = C.grad = None
        beyonds[row] = beyond
        said = f"{beyond / MIB:11.1f}  " + ", ".join(f"{e:.1e}" for e in errors)
        lines.append((f"{row:<24}{kept:<19}", timing, said))
    for start, timing, said in lines:
        times = f"{'needs a GPU':>25}"  # the filters in blocked PyTorch make every tile and zero some: no time is saved
        if timing:
            times = f"{timing.median:8.2f} +- {timing.spread:<5.2f}{timing.median / statistics.mean(units):8.2f}"
        print(start + times + said)
    if cuda:
        print(f"one matrix pass of 2 N V D FLOP in cuBLAS, timed after each row: {statistics.mean(units):.2f} ms, "
              f"from {min(units):.2f} to {max(units):.2f}")
    if "auto" in decisions:
        print(f"auto: {decisions['auto'].decision}: {decisions['auto'].reason}")
    kernels = cuda and cce.takes_descriptors(E, C)
    for row, which in (("mass 2^-10", "both"), ("mass 2^-11, only dE", "dE")):
        if row in beyonds:
            predicted = filter_bytes(N, V, D, "cuda", torch.bfloat16, which=which)
            found = beyonds[row] / MIB if kernels else None  # the kernels' bytes
            ledger.row(f"{row}: beyond dE, dC", "filter_bytes", predicted / MIB, found, band=(0.9, 1.1))
    if "mass 2^-10" in bounds:
        lost, bound = bounds["mass 2^-10"]
        ledger.row("mass 2^-10: most that a row lost", "tiles dropped * eps", bound or None, lost, "", (0, 1))
    if decisions["sparse"].decision == "sparse":
        candidates, _, left, _ = decisions["sparse"].forecast.tolist()
        predicted = sparse_bytes(N, V, D, torch.bfloat16, places(N, candidates)) / MIB
        ledger.row("sparse: beyond dE, dC", "sparse_bytes", predicted, beyonds["sparse"] / MIB if kernels else None,
                   band=(0.8, 1.2))
        # The sample's rows that lose most count double, so it errs upwards: six seeds of the small model: 0.59 to 1.01.
        ledger.row("sparse: error of dE", "sample, rounding", math.hypot(left, measured["exact (02)"][0]) or None,
                   measured["sparse"][0], "", (0.5, 1.4))
        drift = math.hypot(decisions["sparse"].measured[3].item(), measured["exact (02)"][1])
        ledger.row("sparse: error of dC", "the same, at most", drift or None, measured["sparse"][1], "", (0.3, 1.4))
    print()


def body(device, ledger, args):
    shape = cce.asked_shape(args, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.checkpoint:
        E, C, x, name = load_checkpoint(args.checkpoint, device)
        show_phenomenon(E, C, name)
        measure(device, ledger, E.to(dtype), C.to(dtype), x, f"{name} on held-out text")
        return
    base.run_checks(CHECKS, device)
    print()
    config, batch, steps = small_config(device)
    print(f"a model of {config.parameters() / 1e6:.1f} M parameters, {steps} steps of {batch * config.seq} tokens")
    E, C, x = compare_training(device)
    show_phenomenon(E, C, "the model of the exact gradient")
    print()
    measure(device, ledger, E.to(dtype), C.to(dtype), x, "that model")
    if shape:
        measure(device, ledger, *trained_problem(*shape, dtype, device), "data with a Zipf law (02)")
        few = ("exact (02)", "mass 2^-11", "sparse", "auto")
        measure(device, ledger, *topic_problem(*shape, dtype, device), "the same, with topics", few)
    else:
        print("data with a Zipf law (02), without and with topics, 8192 x 256000 x 2304: needs a GPU")


def add_arguments(parser):
    cce.add_arguments(parser)
    parser.add_argument("--checkpoint", metavar="DIR", help="no training, no checks: show the phenomenon and measure "
                        "on a model that train.py saved there")


if __name__ == "__main__":
    sys.exit(base.run_stage(globals(), "python 04_fused_optimizer.py"))


# Exercises
#   1. Tiles of 128 x 256 are what 02's forward leaves its partial sums in. Which shares of tiles would be kept with 64
#      or 512 columns, and what would the products lose or gain? Predict, then change TILES["descriptors"] and measure.
#   2. A pilot of 128 rows gives the average PROBABILITY of each class. Sort by that instead of the average logit. Where
#      do the two orders differ, and which keeps fewer tiles?
#   3. The sparse gradient puts one tail, q, in place of what all rows drop. Topics make it err (the table's last rows):
#      give each block of rows a q of its own. What does the error of dE become, and what does the column pass cost?
