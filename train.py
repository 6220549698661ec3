"""train.py - train a small GPT on real text, without a logits tensor, on any machine.

    python train.py                              a byte-level GPT in a minute or two on a CPU; GPT-2 small on a GPU
    python train.py --gpus 2                     two GPUs of this machine;   --device cpu --gpus 2: two CPU processes
    torchrun --nproc-per-node 8 -- train.py      the same under torchrun, also over several machines
    python train.py --resume                     go on after Ctrl-C, SIGTERM or a power cut
    python train.py --steps 0 --resume           only validate, and write a sample
    python train.py --data "data/*.bin" --val val.bin --vocab 50304            your own tokens
    python train.py --dry-run --batch 64         three steps, nothing kept: does it fit, how fast, what takes room

Measured: GPT-2 small's shape at 65,536 tokens a step trains in 0.43 of nanoGPT's memory, 1.13 times as fast (README).

Where to look. Seven lessons meet here:

    section 1   data: shards of tokens; a batch is a function of the step's number          01's corpus is 03's
    section 2   the step and the loop                                                       start here: train()
    section 3   the optimizer: when weights move, and by which rule                         04, inside backward
    section 4   the model: born matrix by matrix, cut, fused                                01, 05, 07
    section 5   memory, predicted before it is used
    section 6   checkpoints, whole or absent
    section 7   what the run says
    section 8   flags, and what is refused
    section 9   processes                                                                   05, 06

To make it yours:
    the model    01's Block and GPT, or what build() makes of make_config(): tokens (B, T) -> E (B, T, D), a matrix
                 `classifier` (V, D), the names of LAYERS and TABLES, .blocks, .config; section 5 counts its bytes
    the loss     loss_sum(): E and the classifier -> a sum over tokens
    the rule     rules_of(): a Rule of 04 for each matrix; schedule(): its rate
    the data     load_data(): two Tokens, a list of arrays each
    elsewhere    (of a model without experts; with importlib and torch imported)
                 base = importlib.import_module("01_logits_memory")
                 saved = torch.load("out/step_00000300.pt", weights_only=True)
                 sizes = (saved["flags"][name] for name in ("vocab", "seq", "layers", "heads", "dim"))
                 model = base.GPT(base.GPTConfig(*sizes))
                 model.load_state_dict(saved["model"])          # model(tokens) @ model.classifier.T: the logits

What stays the same whatever the number of processes: --batch counts the sequences of a step over ALL processes and
micro-batches. Sequence i of step s is number s * batch + i of a shuffled order that depends on --seed alone. So --accum
cuts the same step into parts, and so do, with --sync ddp, --gpus and --tp: losses agree to rounding. (Sparse gradients
agree to their error; --balance micro is about each process's own tokens; on a GPU the default of --batch is 64 for each
process.) A run that is resumed with the same flags and processes ends with the weights of one that was never stopped:
bit for bit on CPUs, and on one GPU with --deterministic.

Left out: models that are cut over pipelines or sequences (05 has both), tokenizers (bytes, pairs of bytes, or your own
shards), fp16, fine-tuning. Papers: 2411.09009 (cut cross-entropy), 2606.22932 (FORGE), 2502.16982 (Muon), 2311.08105
(DiLoCo); the others are named where their flags lead: 04 to 07.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
low_comm = importlib.import_module("06_low_comm_sync")
mixture = importlib.import_module("07_moe_balance")
MIB = base.MIB

# Presets. lr is AdamW's peak rate, by --rule (adam-mini takes adamw's). AdamW's first steps move every element by the
# rate. An output is a sum over as many inputs as the model is wide, so it moves by up to that many times the rate, and
# the outputs of all layers are added up. So beyond 1b it falls faster than 1 / (width x depth): at twice this, a first
# step of 7b raised its loss from 11.9 to 16.5, of 30b from 12.4 to 19.2. A step of Muon moves a layer's outputs by its
# rate, MUON_LR, whatever the width; then AdamW has embedding and classifier alone, and its rate falls as 1 / width.
# Where a batch is not asked for, it is of 64 sequences a process, or half of that, ..., so that it fits; on a CPU 8.
PRESETS = {
    "cpu": dict(layers=4, dim=128, heads=4, seq=128, steps=400, tokens="bytes",
                lr=dict(adamw=3e-3, muon=3e-3)),
    "gpt2-small": dict(layers=12, dim=768, heads=12, seq=1024, steps=300, tokens="bigrams",
                       lr=dict(adamw=1e-3, muon=4e-3)),
    "1b": dict(layers=16, dim=2048, heads=16, seq=1024, steps=300, tokens="bigrams",
               lr=dict(adamw=3e-4, muon=1.5e-3)),
    "7b": dict(layers=32, dim=4096, heads=32, seq=1024, steps=300, tokens="bigrams",
               lr=dict(adamw=5e-5, muon=7e-4)),
    "30b": dict(layers=48, dim=7168, heads=56, seq=1024, steps=300, tokens="bigrams",
                lr=dict(adamw=1e-5, muon=4e-4)),
}
BETAS, WEIGHT_DECAY, MIN_LR = (0.9, 0.95), 0.1, 0.1  # AdamW; the cosine ends at a tenth of the peak rate
# Muon. Its rate is 20 times AdamW's of a small model, so its decay, which is multiplied by the rate, is 20 times less.
MUON_LR, MUON_DECAY = 0.02, 1 / 20
# Steps, also in short runs: AdamW's second moment averages 20, and a full rate before that makes it spike. Where the
# layers have Muon a slow start only keeps large gradients for longer.
WARMUP = {"adamw": 50, "adam-mini": 50, "muon": 20}
BALANCE, BIAS_RATE = 3e-2, 3e-3  # of experts: the loss's coefficient, a bias's step; large ones, for short runs
SKIPS = 5  # steps that --on-nan skip leaves out in a row before it gives up
PATIENCE = 300  # seconds until workers apart go on without one that says nothing
KEEP = 2  # checkpoints on disk: if the newest is damaged, the one before it is tried
LOG_EVERY = 10  # steps between lines
VALIDATED = {"cpu": 1 << 16, "cuda": 1 << 20}  # tokens of a validation, at most
SAMPLE = dict(tokens=200, temperature=0.8, top=50)


# ==== 1. Data: shards of tokens, read by memory map; a batch is a function of the step ================================
#
# A shard is an array of tokens on the disk. It is cut into windows of seq + 1 tokens, which overlap by one: the last
# target of a window is the first input of the next. All windows of all shards, in an order shuffled anew each epoch,
# are one endless list, and step s takes numbers s * batch ... (s + 1) * batch - 1 of it:
#
#     shards      |-----------a-----------|--------b--------|             windows 0 1 2 3 | 4 5
#     epoch 0     3 0 5 1 4 2   epoch 1   1 4 2 0 3 5   ...               a permutation from (seed, epoch)
#     batch 4     [3 0 5 1] [4 2  1 4] [2 0 3 5]                          steps 0, 1, 2
#
# So the position in the data is the step's number. Nothing else is saved, and nothing depends on how many processes or
# micro-batches share a step out.
#
# What a file may be, by its name and its first numbers:
#
#     .txt                              bytes, or pairs of them (--tokens): no tokenizer, no download
#     .bin, begins with 20240520, 1     llm.c's header of 256 numbers, the third of them the count; then uint16
#     .bin, begins with 20240801, 7     the same, uint32
#     .bin, else                        uint16 from the first byte on: nanoGPT's
#
# A shard is never read whole, but by memory map: a window's tokens come from the disk when it is asked for. Therefore
# what a run relies on is looked at twice: when it begins (sizes, a hash of pieces, small shards' tokens), before each
# step (sizes and times of change), as a file that became shorter would end the process without a word.

SHARD_FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # (magic, version) of llm.c's files
HEADER_BYTES = 256 * 4


def open_shard(path, tokens):
    """A file as a read-only array of tokens. .txt: bytes or bigrams; .bin: llm.c's header, or raw uint16 (nanoGPT)."""
    size, kind = os.path.getsize(path), Path(path).suffix
    base.refuse((kind not in (".txt", ".bin"),
                 f"{path}: unknown kind of file: use .txt, or .bin with uint16 tokens or llm.c's header"))
    dtype, offset, promised = np.dtype("<u2"), 0, None
    if kind == ".txt":
        dtype = np.dtype("u1") if tokens == "bytes" else dtype
    else:
        header = np.fromfile(path, "<i4", 256)
        magic, version, count = (*map(int, header[:3]), 0, 0, 0)[:3]
        # A header is 256 numbers, nearly all of them 0; a KiB of nanoGPT's tokens is not.
        sparse = len(header) == 256 and magic > 0 and np.count_nonzero(header) < 32
        if sparse or magic in {known for known, _ in SHARD_FORMATS}:
            known = " or ".join(f"{m} version {v}" for m, v in SHARD_FORMATS)
            base.refuse(
                ((magic, version) not in SHARD_FORMATS,
                 f"{path}: magic {magic} version {version} is unknown: use {known}, or raw uint16"),
                (size < HEADER_BYTES or count < 0,
                 f"{path}: {size} bytes with a count of {count} are no whole header: it is truncated"))
            dtype, offset, promised = SHARD_FORMATS[magic, version], HEADER_BYTES, count
        base.refuse((offset == 0 and size % 2,
                     f"{path}: {size} bytes are no whole number of uint16 tokens: the file is truncated"))
    present = (size - offset) // dtype.itemsize
    base.refuse((promised is not None and present < promised,
                 f"{path}: its header promises {promised} tokens, the file holds {present}: it is truncated"))
    count = present if promised is None else promised
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def check_vocabulary(tokens, vocab, name):
    """ValueError when one of these tokens is no class."""
    top = int(tokens.max(initial=0))
    base.refuse((top >= vocab, f"{name}: token {top} is outside the vocabulary of {vocab}: pass --vocab {top + 1} or "
                 "more"))


class Tokens:
    """Windows over a list of arrays, read when asked for; each window lies in one shard."""

    def __init__(self, names, shards, seq, vocab):
        self.names, self.shards, self.seq, self.vocab = names, shards, seq, vocab
        self.ends = np.cumsum([max(0, (len(s) - 1) // seq) for s in shards])  # windows up to and with each shard
        self.order = (None, None)  # (epoch, permutation) in use

    def __len__(self):
        return int(self.ends[-1])

    def windows(self, indices):
        """Inputs and targets (n, seq) int64 of these windows; ValueError on a token that the vocabulary lacks."""
        rows = []
        for i in indices:
            shard = int(np.searchsorted(self.ends, i, side="right"))
            start = (int(i) - (int(self.ends[shard - 1]) if shard else 0)) * self.seq
            row = self.shards[shard][start : start + self.seq + 1].astype(np.int64)
            check_vocabulary(row, self.vocab, self.names[shard])
            rows.append(row)
        block = torch.from_numpy(np.stack(rows))  # (n, seq + 1)
        return block[:, :-1], block[:, 1:]

    def shuffled(self, numbers, seed):
        """Windows of these sequences of an endless run of epochs, each shuffled anew."""
        result = []
        for i in numbers:
            epoch = i // len(self)
            if self.order[0] != epoch:
                self.order = epoch, np.random.default_rng([seed, epoch]).permutation(len(self))
            result.append(self.order[1][i % len(self)])
        return result


@dataclasses.dataclass
class Data:
    train: Tokens
    val: Tokens
    bytes_per_token: int | None  # None: unknown, so no bits per byte
    origin: str
    digest: str  # of the data; a checkpoint remembers it
    stamps: dict  # {file: its size and time of change}

    def check(self):
        """Before each step: ValueError if a file is not what it was when the run began. (Reading beyond the end of one
        that has become shorter would end the process without a word: it is a memory map.)"""
        for name, stamp in self.stamps.items():
            now = stamp_of(name) if os.path.exists(name) else (-1, 0)
            if now != stamp:
                same = now[0] >= stamp[0] and fingerprint(self.train.shards + self.val.shards) == self.digest
                base.refuse((not same, f"{name}: was changed while it was trained on: put it back as it was and go on "
                             "with --resume, or start anew with another --out"))
                self.stamps[name] = now


def stamp_of(path):
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def fingerprint(arrays):
    """Sixteen hex digits over each array's length and up to 1 MiB from its start, middle and end: enough to notice
    other data, little enough for a terabyte of shards."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{len(array)} {array.dtype}".encode())
        step = MIB // array.dtype.itemsize
        for start in {0, max(0, len(array) // 2 - step // 2), max(0, len(array) - step)}:
            digest.update(array[start : start + step].tobytes())
    return digest.hexdigest()[:16]


def expand(pattern):
    """Files that a path or a glob names, sorted. ValueError if there is none, or they are of several kinds."""
    files = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
    base.refuse((not files, f"{pattern}: no such file: check the path (quote a glob: --data 'dir/*.bin')"),
                (len({Path(file).suffix for file in files}) > 1,
                 f"{pattern}: names files of several kinds: use .txt or .bin, not both"))
    return files


def shards_of(args):
    """(names, arrays to train on, names, arrays to validate on, bytes per token, origin) by --data and --val. Without
    --val, 1 % of the tokens are held out: the tail of the longest shard, in whole windows."""
    if args.data is None:
        text = filtering.corpus(args.tokens, packages=args.device == "cuda")
        return ["corpus"], [text.train], ["corpus"], [text.val], text.bytes_per_token, text.origin
    names, val_names = expand(args.data), expand(args.val) if args.val else []
    base.refuse((args.val and Path(names[0]).suffix != Path(val_names[0]).suffix,
                 f"--val {args.val}: is of another kind than --data {args.data}: use .txt or .bin for both"))
    shards, val = ([open_shard(name, args.tokens) for name in group] for group in (names, val_names))
    if not val:
        i = max(range(len(shards)), key=lambda i: len(shards[i]))
        held = min(sum(map(len, shards)) // 100, len(shards[i]) // 2)
        held = max(1, held // args.seq) * args.seq + 1
        val_names, val, shards[i] = names[i : i + 1], [shards[i][-held:]], shards[i][:-held]
    bytes_per_token = {"bytes": 1, "bigrams": 2}[args.tokens] if has_text(args) else None
    return names, shards, val_names, val, bytes_per_token, f"{len(names)} file(s) of {args.data}"


def load_data(args):
    """Data by the flags. ValueError on what cannot be used, or what a resumed run was not trained on."""
    names, shards, val_names, val_shards, bytes_per_token, origin = shards_of(args)
    for what, group in (("training", shards), ("validation", val_shards)):
        longest = max(map(len, group))
        base.refuse((longest <= args.seq, f"{origin}: the {what} part has at most {longest} tokens in a file, one "
                     f"sequence needs {args.seq + 1}: pass more data or a smaller --seq"))
    for name, shard in zip(names + val_names, shards + val_shards, strict=True):
        if shard.nbytes <= 256 * MIB:  # a look at every token of larger shards would take longer than it is worth here
            check_vocabulary(shard, args.vocab, name)
    train, val = Tokens(names, shards, args.seq, args.vocab), Tokens(val_names, val_shards, args.seq, args.vocab)
    digest, known = fingerprint(shards + val_shards), args.data_digest if args.steps else None
    base.refuse(
        (args.ep_policy and len(val) < args.processes,
         f"{origin}: validation has {len(val)} window(s) of {args.seq} tokens, {args.processes} processes that share "
         "experts need one each: pass more with --val, or a smaller --seq"),
        (known not in (None, digest),
         f"the data's hash is {digest}, the checkpoint was trained on {known}: pass the same --data (the embedded "
         "corpus changes with the Python version and the packages), or start anew with --out"))
    stamps = {} if args.data is None else {name: stamp_of(name) for name in {*names, *val_names}}
    return Data(train, val, bytes_per_token, origin, digest, stamps)


def has_text(args):
    """Whether the tokens are text, which can be decoded: the corpus or .txt files."""
    return args.data is None or expand(args.data)[0].endswith(".txt")


def default_vocab(args):
    """Classes of the data: 256 bytes, 65,536 bigrams, or the padded vocabularies that go with the .bin formats."""
    if has_text(args):
        return {"bytes": 256, "bigrams": 65536}[args.tokens]
    return 50304 if open_shard(expand(args.data)[0], args.tokens).dtype.itemsize == 2 else 128256


def encode(text, tokens):
    """str -> list of tokens. An odd number of bytes gets a newline in front, to make whole bigrams."""
    raw = text.encode(errors="surrogateescape")  # as typed, also what is no text
    return np.frombuffer(b"\n" * (len(raw) % 2) + raw, "<u2").tolist() if tokens == "bigrams" else list(raw)


def decode(ids, tokens):
    """list of tokens -> str, undecodable bytes replaced."""
    return np.array(ids, "u1" if tokens == "bytes" else "<u2").tobytes().decode(errors="replace")


# ==== 2. The step, and the loop =======================================================================================
#
# A step in time. The host launches kernels and runs ahead of the device; it waits once, for four numbers:
#
#     host     | begin | forward | loss | backward | norm | vote | finish | forward of the next step | wait | begin ...
#     device       ...   | forward   | loss | backward: weights move here | norm | finish | forward ...
#                                                                                  ^ loss, norm, who wants to stop
#
# Where every matrix moves inside backward and each step is the same work, forward and backward are a CUDA graph each
# (04's replay): one launch in place of hundreds, so that the host is never late, and the next forward pass is begun
# before the host reads the numbers of this step.
#
# What processes have to agree on goes into one exchange a step, the vote: the mean loss; whether a gradient anywhere is
# not finite; and whether anybody was told to stop (Ctrl-C reaches processes at different steps). (A model that is cut
# sums its norm, too; steps that save look at all weights; --on-nan skip waits before weights move.) Workers that train
# apart (06) send nothing in between: their rounds carry the wishes to stop and to halt.
#
#     --sync      a step's gradient is        a step ends for all when              validated and saved are
#     none        this process's own          the vote says so                      process 0's weights
#     ddp         the sum over processes      the vote says so                      the same in all, compared bit by bit
#     others      this worker's own           a round has carried the wish          what the workers agree on
#
# A worker is one process, or with --tp K neighbours that hold a part of every matrix and see the same tokens. Four
# processes with --tp 2, and 16 sequences a step in 2 micro-batches:
#
#     process            0         1         2         3
#     worker, place      0, 0      0, 1      1, 0      1, 1          tp:   {0, 1}, {2, 3}: parts of one model
#     micro-batch 0      0 ... 3   0 ... 3   4 ... 7   4 ... 7       replicas: {0, 2}, {1, 3}: the same part
#     micro-batch 1      8 ... 11  8 ... 11  12 .. 15  12 .. 15
#
# A loss or gradient that is not finite ends the run. The weights have moved by then, inside backward: what remains is
# the checkpoint before. With --on-nan skip they wait for the vote, and the step is left out, up to SKIPS in a row.


@dataclasses.dataclass
class Run:
    """What the parts of a run share. stats: 03's, of this process's losses; saved: step of the last checkpoint."""

    args: argparse.Namespace
    device: torch.device
    world: "World"
    config: base.GPTConfig
    model: nn.Module
    optimizer: "Optimizer"
    balance: mixture.Balance | None = None
    scratch: Path | None = None  # folder of --offload on a CPU
    data: Data = None
    feed: "Feed" = None
    log: "Log" = None
    stats: filtering.SparseStats = dataclasses.field(default_factory=filtering.SparseStats)
    saved: int | None = None
    pending: SimpleNamespace | None = None  # a checkpoint that save() has begun
    alive: dict = dataclasses.field(default_factory=dict)  # bytes at some points of the first step

    def note(self, step, point):
        """Bytes that are alive now: of the first step, as later ones may be CUDA graphs, with memory of their own."""
        if step == self.args.start:
            self.alive[point] = base.allocated(self.device)

    def peak(self):
        """Peak bytes of this process."""
        return self.model.forward.peak() if self.args.replay else base.used_peak(self.device)


def train(run, stop):
    """Steps start ... --steps; returns 0, 1 on what is not finite, 128 + signal when asked to stop."""
    args, world, optimizer, log = run.args, run.world, run.optimizer, run.log
    step, val_loss = args.start, None
    if step == 0 and not (args.dry_run or world.late):
        validation(run, 0)
    while step < args.steps:
        began = time.perf_counter()
        optimizer.begin(step + 1, schedule(step, args))
        loss = accumulate_gradients(run, step)
        norm = optimizer.norm()
        vote = world.vote(loss, norm, stop)
        taken = optimizer.finish(norm, vote)
        run.feed.begin()
        uneven = run.balance.step(taken).max() if run.balance else None  # MaxVio (07), worst layer
        verdict = world.verdict(vote, step)  # the step's one wait, but for experts' exchanges
        if verdict.skipped:
            log.say(f"{verdict.what}: skipped", every_worker=bool(world.sync))
        done = world.synchronise(step, verdict, stop, log)  # another worker's step, if this one has just joined
        log.step(done, verdict, schedule(step, args), uneven, time.perf_counter() - began)
        step = done

        halt, stopped = world.outcome(verdict)
        keep = stopped or due(step, args.save_every, args.steps)
        if not halt and keep and world.totals(bool(world.wrong) or not finite_weights(run.model))[0]:
            halt = world.wrong or "weights that are not finite, of this worker or another"
        if halt:
            return diverged(run, step, halt)
        if stopped:
            save(run, step)
            log.say(f"stopped after step {step}" + ("" if args.dry_run else f"; go on with: {resume_command(args)}"))
            return 128 + int(stop.number or stopped)
        if due(step, args.eval_every, args.steps) and not args.dry_run:
            val_loss = validation(run, step)
            if not math.isfinite(val_loss):
                return diverged(run, step, f"validation loss {val_loss}")
        if keep:
            save(run, step, now=step == args.steps)
        elif due(step, LOG_EVERY, args.steps):
            commit(run, wait=False)
    log.summary(val_loss)
    return 0


def due(step, every, last):
    return step == last or every > 0 and step % every == 0


def diverged(run, step, what):
    commit(run)
    last = f"the last good checkpoint is step {run.saved} in {run.args.out}" if run.saved else "no checkpoint yet"
    run.log.say(f"step {step}: {what}: stopped, {last}; try a lower --lr or a --clip")
    return 1


def finite_weights(model):
    """Whether all are. The largest element is infinite or NaN if any is; isfinite() would copy each matrix."""
    norms = [torch.linalg.vector_norm(p, math.inf) for p in model.parameters()]
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def schedule(step, args):
    """The share of the peak rates: linear warm-up, then a cosine down to MIN_LR. Of 100 steps, 20 of them warm-up:

        step     0      9      19     20     60     99
        share    0.05   0.5    1      1      0.55   0.1
    """
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return MIN_LR + (1 - MIN_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


# Sums, not means. The loss of a part is a sum over its tokens, over the number of tokens of the whole step. So parts of
# any size add up to the gradient of the step's mean loss. 8 sequences of 128, in
#
#     one process, --accum 2         sum of 512 / 1024, then sum of 512 / 1024 onto it
#     two processes, --sync ddp      the same two, added by an all-reduce
#     two workers apart              sum of 512 / 512 in each: two steps, of half the tokens each


def accumulate_gradients(run, step):
    """Backward passes of all micro-batches of a step: forged weights move (or keep what their gradient is made of), the
    others get .grad, the gradient of the mean loss over the step's tokens, with --sync ddp summed over processes.

    Each micro-batch divides its SUM by the tokens of the whole step, so parts add up whatever their size. Returns the
    part of the mean loss that this process saw."""
    args, world, total = run.args, run.world, torch.zeros((), device=run.device)
    run.note(step, "before")
    tokens = args.batch * args.seq // (1 if args.sync == "ddp" else world.workers)
    for micro in range(args.accum):
        x, y = run.feed.take(step, micro)
        offload = parallel.Offload(run.model, run.scratch) if args.offload else None
        with offload or contextlib.nullcontext():
            loss = loss_sum(run.model, x, y, args, run.stats) / tokens
            total += loss.detach()
            if run.balance:  # a mean over x, of which the step's mean gets its share
                loss = loss + run.balance.loss() * (x.numel() / tokens)
        if micro == 0:
            run.note(step, "forward")
        loss.backward()
        del loss
        if offload:
            offload.close()
        run.feed.prepare(step, micro)
    run.note(step, "backward")
    if args.sync == "ddp" and world.workers > 1:  # gradients of experts that are spread are sums already
        world.sum(*(p.grad for p in run.model.parameters() if not world.spread_experts(p)), group=world.replicas)
    return total


# Losses. cce (the default where 03's kernels run): the sparse gradient in steps where it is estimated to be within 2 %,
# else the exact one; cce-exact: always exact; reference: of logits that are there, for comparison.
FORGED = {"cce": "auto", "cce-exact": "exact"}  # losses whose classifier can be forged
LOSSES = {name: functools.partial(filtering.linear_cross_entropy, gradient=how) for name, how in FORGED.items()}
LOSSES["reference"] = base.linear_cross_entropy_reference
# What cce may take on a GPU beyond dE and dC. A few per cent of a step's memory; with it the gradient goes over tokens
# and saves a matrix pass. On a CPU (None) blocks are as large as its cache.
LOSS_WORKSPACE = {"cuda": 768 * MIB, "cpu": None}


def loss_sum(model, x, y, args, stats):
    """Summed loss of the tokens y (B, T), predicted from x (B, T). stats: a SparseStats of 03. With --optimizer forge,
    Optimizer has left the classifier's State in `head`, and backward takes its step."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
        E, head, loss = model(x), getattr(model, "head", None), LOSSES[args.loss]  # (B, T, D)
        options = {} if args.loss == "reference" else dict(workspace=LOSS_WORKSPACE[x.device.type])
        options |= dict(stats=stats) if args.loss == "cce" else {}
        if head is not None:
            loss = functools.partial(forging.forge_classifier, state=head, gradient=FORGED[args.loss])
        if getattr(model, "group", None):  # --tp: this process has a part of the classes
            options |= dict(group=model.group, vocab=args.vocab, loss=loss)
            loss = parallel.vocab_parallel_cross_entropy
        return loss(E, model.classifier, y, reduction="sum", **options)


def sequences(args, world, micro):
    """Which of a step's sequences this worker takes in micro-batch `micro`."""
    size = micro_batch(args)
    start = (micro * world.workers + world.seat) * size  # a micro-batch is the same whatever the number of workers
    return range(start, start + size)


def micro_batch(args):
    """Sequences that a worker puts through the model at a time."""
    return args.batch // (args.workers * args.accum)


class Feed:
    """Micro-batches of this worker, in order. The next one is read from the disk and sent while the device still has
    the backward pass of this one to do.

        host      backward 7 launched | read 8, pin, send | norm, vote, finish | launch forward 8
        device      backward 7 ..........................   finish               forward 8
    """

    def __init__(self, run):
        self.run, self.ready = run, {}

    def read(self, step, micro):
        """Inputs and targets (B, T), on the device."""
        args, data, device = self.run.args, self.run.data, self.run.device
        if micro == 0:
            data.check()
        numbers = (step * args.batch + i for i in sequences(args, self.run.world, micro))
        x, y = data.train.windows(data.train.shuffled(numbers, args.seed))
        if device.type == "cuda":
            x, y = x.contiguous().pin_memory(), y.contiguous().pin_memory()  # else the copy would wait for the device
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def take(self, step, micro):
        return self.ready.pop((step, micro), None) or self.read(step, micro)

    def prepare(self, step, micro):
        """What comes after this micro-batch; not after the last step."""
        args = self.run.args
        following = (step, micro + 1) if micro + 1 < args.accum else (step + 1, 0)
        if following[0] < args.steps:
            self.ready = {following: self.read(*following)}

    def begin(self):
        """Start the next step's forward pass, where that is a CUDA graph, so that the device has work while the host
        reads the vote."""
        if self.ready and self.run.args.replay:
            ((x, _),) = self.ready.values()
            self.run.model.forward.ahead(x)


class Verdict(NamedTuple):
    """What a vote has come to. good: loss and all gradients are finite; skipped: they are not, and the step was left
    out; stop: a signal's number, or 0; what: the step, loss and norm in words."""

    loss: float
    norm: float
    good: bool
    skipped: bool
    stop: int
    what: str


class World:
    """This process's place among all of them. One process is a world of its own, without torch.distributed.

    worker, place: number of this process's worker, and its own within that. seat: the share of a step's sequences that
    the worker takes: its number, unless it was started in place of a killed worker (late): then that one's. tp: the
    group of a worker's processes; replicas: those, one a worker, that have the same part of the model; split: the
    group over which parameters are spread (they have .cut, the dimension along which: 05, 07): tp, or for experts
    everybody; else None. sync: 06's Sync of workers that train apart, who may get fewer; else None."""

    def __init__(self, device, args):
        rank, size, tp = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), args.tp
        joined = dist.is_available() and dist.is_initialized()
        self.late = not joined and rank >= size
        self.rank, self.size = (rank, size) if joined or self.late else (0, 1)
        self.worker, self.place, self.workers = self.rank // tp, self.rank % tp, self.size // tp
        self.seat = int(os.environ["LOCAL_RANK"]) if self.late else self.worker
        groups = parallel.make_groups(dp=self.workers, tp=tp) if tp > 1 else None
        self.tp, self.replicas = (groups.tp, groups.dp) if groups else (None, None)
        self.device, self.args, self.split, self.sync = device, args, self.tp, None
        self.wrong, self.stopping, self.bad = None, False, 0  # why it gave up; asked to stop; bad steps

    @property
    def members(self):
        """Workers at work."""
        return self.sync.transport.members if self.sync else tuple(range(self.workers))

    @property
    def is_main(self):
        """Whether this process speaks and saves for all."""
        return self.members[:1] == (self.worker,) and self.place == 0

    def spread_experts(self, p):
        return self.split is not self.tp and parallel.is_part(p)

    def totals(self, *values):
        """Sums of numbers over all processes."""
        values = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.sync:
            return self.sync.collect(parallel.all_reduce(values, self.tp)[None]).sum(0).tolist()
        self.sum(values)
        return values.tolist()

    def sum(self, *tensors, group=None):
        """All-reduce in place; the calls overlap, one wait at the end."""
        if self.size > 1:
            for work in [dist.all_reduce(t, group=group, async_op=True) for t in tensors]:
                work.wait()

    def smallest(self, value):
        """The least of the processes' values of a whole number."""
        value = torch.tensor(value, device=self.device)
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def barrier(self):
        self.totals(0)

    # The vote. Three numbers a process are summed; the norm, alike or each worker's own, rides along:
    #
    #     loss          stop      norm - norm      sum over processes:   loss / processes; anybody's wish to stop;
    #     2.31          0         0                                      0, or NaN if any gradient was not finite
    #     2.29          15        NaN              ->  4.60, 15, NaN
    #
    # It starts when the gradient's norm is known and is read after finish(), so that weights move meanwhile.

    def vote(self, loss, norm, stop):
        """Start the exchange; returns 03's Readback of the sums and the norm. (full_like writes the signal's number on
        the device; a copy of it would wait.)"""
        loss = loss.double()
        values = torch.stack((loss, torch.full_like(loss, stop.number), norm - norm))
        if not self.sync:
            self.sum(values)
        return filtering.Readback(torch.cat((values, norm[None])))

    def verdict(self, vote, step):
        loss, stop, spoilt, norm = vote.read()
        if not self.sync:  # with ddp workers' losses are parts of a sum
            loss /= self.size if self.args.sync == "none" else self.args.tp
        good = math.isfinite(loss) and math.isfinite(spoilt)
        self.bad = 0 if good else self.bad + 1
        skipped = not good and self.bad <= (SKIPS if self.args.on_nan == "skip" else 0)
        elsewhere = "" if good or not math.isfinite(norm) else " (of another process it is not finite)"
        what = f"step {step + 1}: loss {loss}, gradient norm {norm}{elsewhere}"
        if not (good or skipped) and self.wrong is None:
            self.wrong = what.partition(": ")[2] if self.sync is None else f"worker {self.worker}, {what}"
        return Verdict(loss, norm, good and self.wrong is None, skipped, int(stop), what)

    def synchronise(self, step, verdict, stop, log):
        """Of workers apart: what 06 does after a step. Returns the number of the next step. Nothing is asked of the
        others between rounds; a round tells all of them who wants to stop."""
        sync = self.sync
        if not sync:
            return step + 1
        if self.wrong:  # in each step until the halt: moments and weights stay NaN
            sync.surrender(self.wrong)
        if stop.number and not self.stopping:
            self.stopping = True
            log.say("stopping after the next round")
            sync.transport.ask("stop", str(int(stop.number)))
        if self.late:  # what it did so far gives way to what the others have, who are in their sync.step() now
            sync.join()
            print(f"worker {self.worker} goes on for {self.seat}, from step {sync.steps}", flush=True)
            self.late = False
            return sync.steps
        if step == self.args.start:  # it compiled: the slowest is waited for here, uncounted
            blocked = sync.blocked_seconds
            self.barrier()
            sync.blocked_seconds = blocked
        sync.step()
        if sync.method.H is None and sync.steps % 50 == 0:  # with no rounds to ask in, now and then
            self.barrier()
        if sync.steps == self.args.steps:
            sync.finish()
        return sync.steps

    def outcome(self, verdict):
        """(why the run has to end, or None; a signal's number, or 0), the same for all."""
        if self.sync:
            return self.sync.notes.get("halt"), int(self.sync.notes.get("stop", 0))
        return self.wrong, verdict.stop and signal.SIGTERM  # a sum of signals' numbers: which ones is lost

    def synchronised(self):
        """A block in which the model has the weights that the workers agree on."""
        return self.sync.synchronised() if self.sync else contextlib.nullcontext()


@torch.no_grad()
def validation(run, step):
    """Mean loss over a fixed set, the first windows of the validation part, which is shared out; reported. Of seven,
    two workers take 0 2 4 6 and 1 3 5, at most a micro-batch at a time; sums and counts are added: each counts once."""
    args, world, data = run.args, run.world, run.data
    count = min(len(data.val), max(1, VALIDATED[run.device.type] // args.seq))
    if args.ep_policy:  # all processes have to come to each exchange, with as many windows
        count = max(1, count // world.size) * world.size
    size = micro_batch(args)
    sharers = world.members[:1] if args.sync == "none" else world.members  # else each would judge weights of its own
    mine = range(count)[sharers.index(world.worker) :: len(sharers)] if world.worker in sharers else range(0)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    data.check()
    with world.synchronised():
        for start in range(0, len(mine), size):
            x, y = data.val.windows(mine[start : start + size])
            total += loss_sum(run.model, x.to(run.device), y.to(run.device), args, filtering.SparseStats())
        total, windows = world.totals(total.item(), len(mine))
    loss = total / (windows * args.seq)
    run.log.validation(step, loss)
    return loss


@torch.no_grad()
def generate(model, prompt, args, device):
    """Append sampled tokens to the prompt. Sampling needs ONE row of logits, so here they are made. There is no cache
    of keys and values: each token runs the whole context again, for which 01's model serves as it is."""
    ids, generator, group = list(prompt), torch.Generator().manual_seed(args.seed), getattr(model, "group", None)

    def logits(x, last):
        """x (1, T), last (1,): the position whose logits (V,) are wanted."""
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
            E = model(x)[0].index_select(0, last)[0]  # (D,)
            return parallel.gather(E @ model.classifier.T.to(E.dtype), group, 0).float()

    replays = {}  # by T: of few lengths, as a GPU's attention library takes tens of milliseconds to plan for a new one
    for _ in range(SAMPLE["tokens"]):
        context = ids[-model.config.seq :]
        padding = min(-len(context) % 64, model.config.seq - len(context))  # no position sees what comes after it
        x, last = (torch.tensor(t, device=device) for t in ([context + [0] * padding], [len(context) - 1]))
        if x.shape[1] not in replays:  # a CUDA graph: hundreds of small kernels in one launch, but no exchange
            alone = device.type == "cuda" and not (group or args.ep_policy)
            replays[x.shape[1]] = torch.cuda.make_graphed_callables(logits, (x, last)) if alone else logits
        known = min(model.config.vocab, 256 if args.tokens == "bytes" else 65536)  # --vocab may have spare classes
        best, index = (replays[x.shape[1]](x, last).cpu()[:known] / SAMPLE["temperature"]).topk(
            min(SAMPLE["top"], known))
        ids.append(index[torch.multinomial(best.softmax(0), 1, generator=generator)].item())
    return ids


# ==== 3. The optimizer: when weights move, and by which rule ==========================================================
#
# --optimizer forge, the default: every matrix moves inside backward (04), as soon as its gradient is known; the
# classifier's in the loss itself. So of all matrices' gradients one is there at a time, a slab or a whole matrix. What
# needs the whole gradient first (its norm, to clip; the sum over micro-batches; whether all of it is finite, to leave a
# step out) makes the matrices wait: each keeps the factors of its gradient until finish(), or the gradient itself where
# that is smaller. ordinary: after backward, from kept gradients (the default with --accum unless --states, with
# --loss reference, and of several processes with --sync ddp, whose gradients must be summed).
#
#                        backward leaves           finish()
#     forge              nothing                   AdamW of norms and routers
#     forge, waiting     factors                   clip, the matrices' steps, AdamW of the rest
#     ordinary           .grad                     clip, Muon's or Adam-mini's steps, AdamW of the rest
#
# --rule: muon, for the layers' matrices, with AdamW for embedding, classifier, norms and routers (the rows of tables
# are tokens, which nothing should make orthogonal); adamw for all; adam-mini for all matrices but routers. Muon divides
# by the gradient's own size and is not clipped by default. The others are, at 1: a batch of odd text can have a
# gradient many times as long as its neighbours'. Who steps what:
#
#     --optimizer                 forge                      ordinary
#     the layers' matrices        04, by --rule              04, by --rule; adamw: torch
#     embedding, classifier       04, AdamW or Adam-mini     torch; adam-mini: 04
#     norms, experts' routers     torch's AdamW              torch's AdamW
#
# The norm that is told, and clipped by, is of the whole gradient, which nobody has at once. 04 keeps the square of each
# matrix's as that goes by. What is cut over processes adds its parts' squares; what all have alike counts once:
#
#     norm^2 = sum over parts of |forged, .grad of what is cut|^2  +  |.grad of all else|^2

LAYERS, TABLES = ("qkv.weight", "proj.weight", "up.weight", "down.weight"), ("embedding.weight", "classifier")


def rules_of(args):
    """(rule of the layers' matrices, of embedding and classifier, of the rest)."""
    adamw = forging.AdamW(BETAS, 1e-8, args.weight_decay)
    mini = forging.AdamMini(BETAS, 1e-8, args.weight_decay)
    muon = forging.Muon(weight_decay=args.weight_decay * MUON_DECAY)
    return {"muon": (muon, adamw, adamw), "adam-mini": (mini, mini, adamw), "adamw": (adamw,) * 3}[args.rule]


def waits(args):
    """Whether forged steps wait for the end of all backward passes of a step."""
    return args.optimizer == "forge" and (args.clip > 0 or args.accum > 1 or args.on_nan == "skip")


def can_replay(args, device):
    """Whether the passes can be CUDA graphs (04's replay): every matrix moves inside backward, and each step launches
    the same work as the last. (Of workers apart they could be, too. But a round's buffers then lie beside the memory of
    the graphs, not in it: 22,100 MiB in place of 17,800, for 2 % of the time.)"""
    other = args.moe or args.tp > 1 or args.recompute or args.offload or waits(args) or args.sync in low_comm.METHODS
    return args.optimizer == "forge" and not other and has_kernels(device)


class Optimizer:
    """The rules for every parameter; decay on matrices only. forged: 04's handle, of all matrices or, ordinary, of
    those whose rule is not AdamW, which is torch's. group: over which parameters with a `cut` are spread. origins:
    {name: first element} of what tensor parallelism cut."""

    def __init__(self, model, args, group=None, origins=None):
        self.forged, self.group, model.head = None, group, None
        layers, tables, adamw = rules_of(args)
        ruled = {name: p for name, p in model.named_parameters()  # not AdamW's
                 if layers != adamw and name.endswith(LAYERS) or tables != adamw and name in TABLES}
        rules = {name: layers if name.endswith(LAYERS) else tables for name in ruled}
        options = dict(rules=rules, seed=args.seed)
        if args.tp > 1:  # experts that are spread are whole
            options |= dict(ranks={name: parallel.ranks_of(p, group) for name, p in ruled.items()})
        self.inside = args.optimizer == "forge"
        if self.inside:
            self.forged = forging.forge(model, adamw, args.states, embeddings=True, classifier="classifier",
                                        data_parallel=1, origins=origins, **options)
            model.head = self.forged["classifier"]
            self.forged["embedding.weight"].dtype = torch.float32  # of what is looked up, also from bf16
        elif ruled:
            experts = {name: model.get_submodule(name.rpartition(".")[0]) for name in ruled}
            experts = {name: module.experts for name, module in experts.items() if hasattr(module, "experts")}
            self.forged = forging.Forge(ruled, adamw, data_parallel=1, matrices=experts, **options)
        stepped = self.forged.states if self.forged else {}
        rest = [p for name, p in model.named_parameters() if name not in stepped]
        self.parameters = rest if self.inside else list(model.parameters())  # have a .grad
        decayed, not_decayed = ([p for p in rest if (p.dim() >= 2) == wanted] for wanted in (True, False))
        groups = [dict(params=decayed, weight_decay=args.weight_decay), dict(params=not_decayed, weight_decay=0.0)]
        self.ordinary = torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, fused=True)  # one kernel, no temporaries
        self.clip, self.waits, self.device = args.clip, waits(args), next(model.parameters()).device
        self.skips, self.adamw = args.on_nan == "skip", adamw
        self.peaks = {rule: MUON_LR if isinstance(rule, forging.Muon) else args.lr for rule in rules_of(args)}

    def begin(self, step, share):
        """What the backward passes that follow belong to: step 1, 2, ... at this share of the peak rates."""
        rates = {rule: peak * share for rule, peak in self.peaks.items()}
        self.at = rates, step
        for group in self.ordinary.param_groups:
            group["lr"] = rates[self.adamw]
        if self.waits:
            self.forged.stash()
        elif self.inside:
            self.forged.arm(rates, step)

    def finish(self, norm, vote):
        """The rest of the step, after all gradients, whose norm this is. Returns whether it was taken: with --on-nan
        skip, which waits for the vote, nothing is written if a number of it is not finite."""
        taken = not self.skips or all(map(math.isfinite, vote.read()))
        if taken:
            if self.clip:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
            if self.waits:
                self.forged.release(*self.at, forging.clip_scale(norm, self.clip) if self.clip else 1.0)
            if self.forged and not self.inside:
                self.forged.step_gradients(*self.at)
            self.ordinary.step()
        if self.inside:
            self.forged.disarm()  # the step is over: between steps, states may be loaded
        for p in self.parameters:
            p.grad = None
        return taken

    def norm(self):
        """Of the whole model's gradient, fp64: what is spread counts with its other parts, all else once."""
        zero = torch.zeros((), device=self.device)  # torch's norm of nothing is on the CPU: its copy would wait
        had = [(p.grad, parallel.is_part(p)) for p in self.parameters if p.grad is not None]
        own, common = (torch.nn.utils.get_total_norm([zero, *(g for g, part in had if part == cut)]).double()
                       for cut in (True, False))
        if self.inside:  # with --tp all of these are cut
            forged = self.forged.norm() if self.waits else self.forged.gradient_norms().norm()
            own = torch.stack((own, forged)).norm()
        return torch.stack((self.over_parts(own), common)).norm()

    def over_parts(self, norm):
        """The norm of what is spread over the group, of which this process's part has this one."""
        return parallel.all_reduce(norm**2, self.group).sqrt() if self.group else norm

    # A checkpoint has whole tensors, so that any number of processes can go on with it: changed() walks over the states
    # of both optimizers, and has each tensor collected, or this process's part of it cut out, where its weight is cut.

    def changed(self, saved, change):
        """A state_dict(), with change(tensor, parameter) made of each tensor that is no single number."""
        parameters = [p for group in self.ordinary.param_groups for p in group["params"]]
        ordinary = {i: {k: change(v, parameters[i]) if v.dim() else v for k, v in tensors.items()}
                    for i, tensors in saved["ordinary"].items()}
        forged = saved["forged"]
        if forged:  # all of a weight's tensors are cut where it is
            weights = {name: {key: change(t, self.forged.states[name].weight) for key, t in tensors.items()}
                       for name, tensors in forged["weights"].items()}
            forged = forged | dict(weights=weights)
        return dict(ordinary=ordinary, forged=forged)

    def state_dict(self, whole=True):
        """The same whatever the number of processes: what is spread is collected; all processes call it. Not `whole`:
        this process's part."""
        mine = dict(ordinary=self.ordinary.state_dict()["state"], forged=self.forged and self.forged.state_dict())
        return self.changed(mine, functools.partial(parallel.collected, group=self.group if whole else None))

    def load_state_dict(self, saved, whole=True):
        """Of state_dict(); torch's AdamW goes by the parameters' order."""
        groups = self.ordinary.state_dict()["param_groups"]
        part = self.changed(saved, functools.partial(parallel.own_part, group=self.group if whole else None))
        self.ordinary.load_state_dict(dict(state=part["ordinary"], param_groups=groups))
        if self.forged:
            self.forged.load_state_dict(part["forged"])


def sync_method(args):
    """06's Method, with the flags applied; None where workers do not synchronise now and then. In short runs the outer
    step is another (06's SHORT_OUTER), by the rounds that the run was started with: DiLoCo's rate and momentum are 1, 0
    (the workers' mean) below 15 rounds, 0.9, 0.5 below 200, else the paper's."""
    if not (method := low_comm.METHODS.get(args.sync)):
        return None
    lr, momentum = args.outer or (method.outer.lr, method.outer.momentum)
    outer = dataclasses.replace(method.outer, lr=lr, momentum=momentum)
    return dataclasses.replace(method, H=args.inner_steps or method.H, outer=outer)


# ==== 4. The model: born matrix by matrix, cut, fused =================================================================
#
# A model that is trained in 3 bytes a parameter must never be there in 4. So its matrices are born (05) when it is
# known what part of each this process keeps, and in what dtype. What happens to the model until then, in this order:
#
#     GPT(config)              01's, without memory for matrices; with_experts(): 07's in place of MLPs
#     tensor_parallel()        --tp: parts of matrices, and sums where their outputs meet (05)
#     lean() | recompute()     what backward needs is made again: between matrices, or all of a layer (05)
#     expert_parallel()        --sync ddp: each process has some of the experts (07)
#     bear()                   now there is memory
#     Flat, Optimizer          what workers exchange, as one list of numbers (06); steps inside backward (04)
#     replay()                 both passes as CUDA graphs, where they may be (04)
#     restore()                --resume


def born_dtype(name, args):
    """Of a matrix: that in which 04 keeps it. (A master copy is in fp32 and has the numbers; 04 makes the other.)"""
    layout = forging.LAYOUTS[args.states]
    forged = args.optimizer == "forge" and name.endswith(LAYERS + TABLES)
    return layout.weight if forged and not layout.master else torch.float32


def make_config(args):
    """The shape of the model."""
    shape = args.vocab, args.seq, args.layers, args.heads, args.dim
    return mixture.GPTConfig(*shape, args.moe, args.top_k) if args.moe else base.GPTConfig(*shape)


def build(args, device):
    """The Run of these flags: model and optimizer, as this process has them, at the checkpoint's step."""
    world, config = World(device, args), make_config(args)
    torch.use_deterministic_algorithms(args.deterministic)
    choose_batch(config, world, args, device)
    torch.manual_seed(args.seed)
    with device, parallel.Unborn() as unborn:
        model = base.GPT(config)
        if args.moe:
            mixture.with_experts(model)
    names = {id(p): name for name, p in model.named_parameters() if p.is_meta}
    origins, model.group = parallel.tensor_parallel(model, world.tp), world.tp
    if args.compile:  # one kernel each for what lies between matrices; norms, activations are made again in backward
        parallel.lean(model, remake=not (args.recompute or args.offload))
    if args.recompute:
        parallel.recompute(model)
    balance = None
    if args.moe:
        everybody = dist.group.WORLD if args.sync == "ddp" and world.size > 1 else None
        balance = mixture.Balance(model, args.balance, everybody, BALANCE, rate=BIAS_RATE)
        if everybody:
            world.split = everybody
            mixture.expert_parallel(model, everybody, args.ep_policy)
    unborn.bear(model, names, functools.partial(born_dtype, args=args), device, world.split,
                sent=world.size > 1 and not world.late)
    method = sync_method(args)
    flat = low_comm.Flat([model], method.fragments) if method else None  # before forge(), which keeps where weights lie
    run = Run(args, device, world, config, model, Optimizer(model, args, world.split, origins), balance)
    if args.replay:
        forging.replay(model, run.optimizer.forged)
    if method:
        world.sync = make_sync(run, flat, method)
    if args.resume and not world.late:
        restore(run)
    return run


def make_sync(run, flat, method):
    """06's Sync of this worker."""
    args, world, transport = run.args, run.world, low_comm.Sim(1)
    if args.workers > 1:
        rank = world.rank if world.late else None
        transport = low_comm.Dist(run.device, PATIENCE, rank=rank, group=world.replicas)
    if run.optimizer.forged:
        states = run.optimizer.forged.states.values()
        flat.adopt((s.weight, s.tensors["master"]) for s in states if "master" in s.tensors)
    return low_comm.make_sync(args.sync, flat, transport, seed=args.seed, companion=run.optimizer, H=method.H,
                              outer=method.outer)


# ==== 5. Memory, before it is used ====================================================================================
#
# Bytes by category, and when they are largest. A step's peak is early in backward, in the loss or the last layer,
# when all activations are there and hardly a gradient, or at its end, with all gradients and no activations:
#
#     early = activations + max(loss, one layer made again, Muon's products) + slab      (--accum: + all gradients)
#     late  = gradients + Muon's products
#     peak  = parameters + optimizer + sync + max(early, late)
#
# CUDA graphs keep what both passes need, and the loss has its memory beside it: early has the sum of the loss and the
# larger of the other two. So there are graphs only where that fits.
#
# Bytes a parameter of a matrix, weight and states, by --states and rule (04's table; int8 has a scale for each group):
#
#                 fp32            master          int8
#     AdamW       4 + 8           2 + 4 + 8       2 + 2.06
#     Muon        4 + 4           2 + 4 + 4       2 + 1.03          (no second moment)
#     Adam-mini   4 + 4           2 + 4 + 4       2 + 1.03          (one number a row)
#
# Activations are counted in 01 (18 D elements a token and layer), what lean() makes again in 05 (8 of them), experts in
# 07, the loss in 02 and 03. What is particular to this program is written here. On a GPU predictions are within 5 %.
#
# GPT-2 small with --vocab 50304, 64 sequences of 1,024 (N = 65,536 tokens), D = 768, 12 layers; in MiB:
#
#     parameters       619    162 M in fp32: 85 M of the layers, 2 V D of embedding and classifier
#     optimizer        914    Muon 4 bytes for each of the layers' (324), AdamW 8 for each of the tables' (590)
#     activations   14,148    a token and layer: 10 D elements of 2 bytes (11,520), 2 of them in 4 (2,304); E (288)
#     loss             938    dE (96), a workspace of 768, bf16's copy of the classifier (74)
#     slab              32    the one gradient of a matrix that is there at a time
#     layer again      768    an MLP's activation, made again in backward, and its gradient
#
# early = 14,148 + (938 + 768: graphs) + 32, peak = 619 + 914 + early = 17,418. Logits would add 2 N V bytes in bf16,
# 6,288 MiB, and their softmax and gradient several times that (01).


class Shape(NamedTuple):
    """Matrices (M, K) of a layer: how many there are, and how many of them a token meets."""

    M: int
    K: int
    count: int = 1
    met: int = 1


def layer_shapes(config, tp=1):
    """Shapes of the matrices of all layers, as one of `tp` processes has them."""
    D = config.dim
    mlp = [Shape(4 * D // tp, D), Shape(D, 4 * D // tp)]
    if isinstance(config, mixture.GPTConfig):
        F, sizes = config.width(), (config.experts, config.top_k)
        mlp = [Shape(F, D, *sizes), Shape(D, F, *sizes)]
    return [Shape(3 * D // tp, D), Shape(D, D // tp), *mlp] * config.layers


def matrix_elements(config, tp=1):
    return sum(s.M * s.K * s.count for s in layer_shapes(config, tp))


def product_dtype(args):
    return torch.bfloat16 if args.dtype == "bf16" else torch.float32


def has_kernels(device):
    """Whether Triton's kernels run there. A GPU that is not present, of --fit, is taken for one with all of them."""
    present = torch.cuda.is_available()
    return device.type == "cuda" and (not present or base.HAS_TRITON and not base.INTERPRETED)


def loss_plan(N, config, args, device):
    """02's plan for the exact gradient of one micro-batch of N tokens."""
    kernels, orders = has_kernels(device), ["vocabulary"]
    if args.optimizer == "ordinary":  # 04's makes a slice of dC at a time
        orders = ["kept"] * kernels + ["tokens"] * (args.tp == 1) + orders
    return cce.gradient_plan(N, config.vocab // args.tp, config.dim, device, product_dtype(args),
                             LOSS_WORKSPACE[device.type], orders=orders, kernels=kernels)


# What waits. The gradient of a matrix, dW (M, K) = dY^T X over N tokens, is M K elements of 4 bytes, or as its factors
# N (M + K) of 2. For GPT-2 small's `up`, 3,072 x 768:
#
#     N           128       1,229      65,536
#     factors     0.9       9          480          MiB
#     gradient    9         9          9
#
# So a step that trains keeps gradients, one that tunes on a few sequences factors.


def kept_bytes(config, tokens, args):
    """Of what forged weights hold until all of a step's tokens were seen. A matrix: the factors of its gradient, or the
    gradient, the smaller; the embedding: rows of its gradient, and where they belong, or all of it."""
    size, VD = product_dtype(args).itemsize, config.vocab // args.tp * config.dim
    layers = sum(min(forging.stash_bytes([(s.M, s.K)], tokens * s.met, size), 4 * s.M * s.K * s.count)
                 for s in layer_shapes(config, args.tp))
    rows = 4 * tokens * config.dim + 4 * tokens + 4 * args.accum * (config.vocab + 1)
    return layers + min(rows, 4 * VD) + held_for_classifier(config, tokens, args)


def held_for_classifier(config, tokens, args):
    """Bytes of what a forged classifier holds until all of a step's tokens were seen: its gradient in fp32; or E and
    targets, if those are enough smaller."""
    gradient = 4 * config.vocab // args.tp * config.dim
    factors = (product_dtype(args).itemsize * config.dim + 20) * tokens
    return factors if forging.CLASSIFIER_PRICE * factors <= gradient else gradient


def weight_bytes(config, args, whole):
    """(parameters, optimizer's states, elements that are forged, others)."""
    layers, VD = matrix_elements(config, args.tp), config.vocab // args.tp * config.dim
    uncut = whole.parameters() - matrix_elements(whole) - 2 * config.vocab * config.dim  # norms, routers
    layer_rule, table_rule, _ = rules_of(args)
    inside = args.optimizer == "forge"
    forged = layers + 2 * VD if inside else 0
    others = layers + 2 * VD + uncut - forged
    states = layers * forging.state_bytes(layer_rule, args.states)
    states += 2 * VD * forging.state_bytes(table_rule, args.states if inside else "fp32") + 8 * uncut
    if args.rule == "adam-mini":  # beside them, a number for each row
        states += 4 * (sum(s.M * s.count for s in layer_shapes(config, args.tp)) + 2 * config.vocab // args.tp)
    return 4 * others + forging.LAYOUTS[args.states].weight.itemsize * forged, states, forged, others


def slab_bytes(config, N, args, device):
    """(largest gradient of forged weights that is alive, a matrix or a slab of it; what Muon's products hold beside
    it). Where rules take slabs they have them also if gradients are kept."""
    layer_rule, table_rule, _ = rules_of(args)
    rung, muon, inside = "auto" if has_kernels(device) else "hook", args.rule == "muon", args.optimizer == "forge"
    shapes = layer_shapes(config, args.tp)
    plans = [forging.plan_step(layer_rule, s.M * s.count if muon else s.M, s.K, N * s.met // s.count, args.states, rung,
                               matrices=s.count) for s in shapes]
    tables = forging.plan_step(table_rule, config.vocab // args.tp, config.dim, 0, args.states).bytes if inside else 0
    used = inside or muon or args.rule == "adam-mini" and rung == "auto"
    slab = max(tables, *(plan.bytes for plan in plans)) if used else 0
    return slab, max(muon_bytes(*pair, device, args.tp) for pair in zip(shapes, plans, strict=True)) if muon else 0


def muon_bytes(shape, plan, device, tp):
    """What Muon holds beside the gradients of the Plan: its products', and of a matrix that is cut the whole."""
    width, count = 2 if device.type == "cuda" else 4, plan.rows // shape.M
    held = forging.orthogonal_bytes(shape.M, shape.K, width)
    return count * held if tp == 1 else tp * held + width * shape.M * shape.K


def loss_bytes(config, N, args, device):
    """Of the loss and its backward pass: dE and (unless forged) dC, what 02 takes beyond, copies of E and C in bf16."""
    V, D, dtype, inside = config.vocab // args.tp, config.dim, product_dtype(args), args.optimizer == "forge"
    if args.loss == "reference":
        return base.materialised_bytes(N, V)
    held = waits(args) and args.accum == 1 and held_for_classifier(config, N, args) == 4 * V * D  # by 04: dC in fp32
    results = dtype.itemsize * (N + (0 if inside else V)) * D + 4 * V * D * held  # (with --accum it is there before)
    copied = (0 if args.compile else N) + (V if not inside or forging.LAYOUTS[args.states].weight.itemsize == 4 else 0)
    copies = 2 * copied * D if args.dtype == "bf16" else 0
    return results + loss_plan(N, config, args, device).beyond + copies  # a fresh model begins with the exact gradient


def activation_bytes(config, N, args, device):
    """(activations of N tokens, what is there besides while one layer runs backward)."""
    D, L, tp, autocast, size = config.dim, config.layers, args.tp, args.dtype == "bf16", product_dtype(args).itemsize
    leaned = args.compile and not (args.recompute or args.offload)
    # Autocast keeps a 16-bit copy of each weight from forward to backward. Of forged ones, and of the matrix after an
    # activation that lean() makes again, it is made twice instead: so many of a layer's 12 D^2 elements, of 2 bytes.
    twice = 12 if args.optimizer == "forge" else 4 if leaned and not args.moe else 0
    remade = 2 * twice * L * D**2 // tp if autocast else 0
    total = base.activation_bytes(config, N, autocast, fused_norm=device.type == "cuda") - remade
    if leaned:
        total -= parallel.lean_saving(config, N, size, args.moe, tp, has_kernels(device))
    if tp > 1:  # 14 of a layer's 18 tensors are cut (05), and the copies of matrices
        total -= L * (14 * size * N * D + (2 * 12 * D**2 if autocast else 0)) * (tp - 1) // tp
    if args.moe:
        total += mixture.activation_change(config, N, autocast) + (2 * 8 * L * D**2 if remade else 0)
    # The last norm and E come after the layers. Recomputed, a layer keeps its input and is there whole once at a time;
    # offloaded, about a layer's tensors are on their way at any time.
    last = N * D * (4 + (size if args.compile else 4 if device.type == "cuda" else 8))
    first = 0 if leaned and tp == 1 else 4 * N * D  # what was looked up
    layer = (total - last - first) // L
    # In backward an MLP's activation is made again, or still there, beside its gradient.
    again = 0 if args.moe or args.offload else 2 * 4 * size * N * D // tp
    if args.recompute:
        total, again = 4 * N * D * L + last + first, layer
    return (min(total, layer + last) if args.offload else total), again


def predict_memory(config, batch, args, device, processes=1):
    """Bytes by category for one process that puts `batch` sequences through the model at a time, and their peak."""
    N, whole = batch * config.seq, config
    if args.moe and args.sync == "ddp":  # a process has a part of the experts
        config = dataclasses.replace(config, experts=config.experts // processes)
    parameters, states, forged, others = weight_bytes(config, args, whole)
    slab, products = slab_bytes(config, N, args, device)
    activations, again = activation_bytes(config, N, args, device)
    loss = loss_bytes(config, N, args, device)
    kept = kept_bytes(config, N * args.accum, args) if waits(args) else 0
    parts = dict(parameters=parameters, gradients=4 * others + slab + kept, optimizer=states, activations=activations,
                 loss=loss)
    if method := sync_method(args):
        copied = 0 if args.states == "fp32" else 4 * forged  # of weights in bf16 the sync has a copy in fp32
        parts["sync"] = low_comm.resident_bytes(method, others + forged) + copied
    # Early in backward gradients are not there yet, unless micro-batches before left theirs.
    buffer = slab if has_kernels(device) or args.rule == "muon" else 0
    beside = loss + max(again, products) if args.replay else max(loss, again, products)
    early = activations + beside + (parts["gradients"] if args.accum > 1 else buffer)
    late = parts["gradients"] + products
    return parts, parameters + states + parts.get("sync", 0) + max(early, late)


# How full may it be? Predictions are within 5 %, and not all memory is for tensors. What is decided by the peak:
#
#     a batch that was not asked for     0.85 of what is free: libraries and compilers want some, too
#     a batch that was asked for         1.05: beyond that it cannot be right, and is refused
#     the batch for a card, --fit        0.98 of its room for tensors, in which the rest is left out already
#     CUDA graphs                        0.9: they reserve memory in whole segments, of which they use nearly all


def room_of(gib):
    """Bytes for tensors on a card of so many GiB: the rest is CUDA's, its libraries' and lies between tensors."""
    return (gib - min(1.0, gib / 16)) * 2**30


def largest_batch(config, args, device, room):
    """The most sequences that a process can put through the model at a time in `room` bytes, 0 if not even one; up to
    4,096."""
    low, high = 0, 4097
    while high - low > 1:
        middle = (low + high) // 2
        fits = predict_memory(config, middle, args, device, args.processes)[1] <= 0.98 * room
        low, high = (middle, high) if fits else (low, middle)
    return low


def choose_batch(config, world, args, device):
    """--batch, if it was not given: with --fit what fits; on a GPU 64 for each process, or half of that, ..., so that
    micro-batches fit. Then whether there are CUDA graphs. ValueError if what was given cannot fit, or be shared out."""
    memory = base.free_memory(device)
    if args.batch is None and args.fit is not None:
        each = largest_batch(config, args, device, room_of(args.fit))
        base.refuse((not each, f"--fit {args.fit:g}: one sequence takes more: see --fit without --dry-run for flags"))
        args.batch = each * args.accum * args.workers
    elif args.batch is None:
        micro = max(1, 64 // args.accum)
        while micro > 1 and predict_memory(config, micro, args, device, world.size)[1] > 0.85 * memory:
            micro //= 2
        args.batch = world.smallest(micro) * args.accum * args.workers
    check_batch(args)
    peak = predict_memory(config, micro_batch(args), args, device, world.size)[1]
    base.refuse((peak > 1.05 * memory, f"--batch {args.batch}: takes {peak / MIB:,.0f} MiB, {memory / MIB:,.0f} are "
                 "free: use a smaller --batch, the same with more --accum, or see what fits: --fit GIB"))
    args.replay, room = can_replay(args, device), memory if args.fit is None else room_of(args.fit)
    args.replay = args.replay and predict_memory(config, micro_batch(args), args, device, world.size)[1] < 0.9 * room


def check_batch(args):
    noun = "processes" if args.tp == 1 else "workers"
    base.refuse((args.batch % (args.workers * args.accum),
                 f"--batch {args.batch} counts sequences over all {noun}: it must be a multiple of {args.workers} "
                 f"{noun} x {args.accum} micro-batches"))


@contextlib.contextmanager
def limited(args, device):
    """A block with no more memory for tensors than a card of --fit GiB has: a GPU's allocator refuses more; on a CPU
    tensors are counted, and in the end too many refused."""
    if args.fit is None:
        yield
    elif device.type == "cuda":
        share = min(1.0, room_of(args.fit) / torch.cuda.get_device_properties(device).total_memory)
        torch.cuda.set_per_process_memory_fraction(share, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        with base.LiveBytes() as counter:
            yield
        base.refuse((counter.peak > room_of(args.fit),
                     f"--fit {args.fit:g}: out of memory, tensors took {counter.peak / MIB:,.0f} MiB of "
                     f"{room_of(args.fit) / MIB:,.0f}: use a smaller --batch, or see --fit without --dry-run"))


# For --fit, from the most comfortable to the least. Muon is the better rule where a step has tokens enough to pay for
# its products: of 7b they are as many FLOPs as 15,000 tokens', whatever the batch. Below some 65,000 take Adam-mini,
# which makes none, and needs no whole gradient of a matrix (unless it is clipped). Of the table for 24 GiB:
#
#     preset       parameters  flags                                                          batch  peak MiB
#     7b               6.98 B  --states int8                                                   none    24,415
#     7b               6.98 B  --states int8 --rule adam-mini --clip 0                         none    23,455
#     7b               6.98 B  --states int8 --rule adam-mini --clip 0 --recompute                4    23,060
SMALLEST = "--states int8 --rule adam-mini --clip 0"
FRUGAL = "", "--states int8", SMALLEST, f"{SMALLEST} --recompute", f"{SMALLEST} --recompute --offload"


def print_fits(args):
    """--fit: of each preset (or the one asked for) the largest batch on a card of that size, by FRUGAL flags; then what
    to type for the largest model: the first flags with which four sequences fit, or the last."""
    splitter, room, best, seen = Parser(allow_abbrev=False), room_of(args.fit), None, set()
    for name in ("--fit", "--preset", "--batch"):
        splitter.add_argument(name)
    asked, others = splitter.parse_known_args(args.argv)
    print(f"a card of {args.fit:g} GiB: {room / MIB:,.0f} MiB for tensors; batch: sequences a step, predicted to fit\n")
    print(f"{'preset':<12}{'parameters':>11}  {shlex.join(['flags', *others]):<62}{'batch':>6}{'peak MiB':>10}")
    for preset in [asked.preset] if asked.preset else [name for name in PRESETS if name != "cpu"]:
        enough = False
        for frugal in FRUGAL:
            words = ["--preset", preset, *frugal.split(), *others]  # what was asked for comes last, and wins
            try:
                one = parse([*words, "--fit", str(args.fit)])
            except base.BadInput:  # the frugal ones do not go with it
                continue
            how = preset, one.states, one.rule, one.clip, one.recompute, one.offload
            if how in seen:
                continue
            seen.add(how)
            config, device = make_config(one), torch.device(one.device)
            batch = largest_batch(config, one, device, room)
            peak = predict_memory(config, max(1, batch), one, device, one.processes)[1]
            count = batch * one.accum * one.workers
            print(f"{preset:<12}{config.parameters() / 1e9:>9.2f} B  {frugal:<62}{count or 'none':>6}"
                  f"{peak / MIB:>10,.0f}")
            if batch and not enough:
                best, enough = [*words, "--batch", str(count)], batch >= 4
    base.refuse((best is None, f"--fit {args.fit:g}: nothing fits: use a smaller --seq, fewer --layers, or --preset "
                 "cpu"))
    print(f"\ntype: python {shlex.quote(os.path.relpath(__file__))} {shlex.join(best)}\n"
          f"      (with --dry-run --fit {args.fit:g}: three steps in the memory of that card, on a larger one)")
    return 0


# ==== 6. Checkpoints: whole or absent =================================================================================
#
#     step_00000100.pt             format, step, flags, hash of the data, number of workers;
#                                  model, optimizer, and of workers apart 06's state
#     step_00000100.worker1.pt     of workers apart: optimizer and 06's state of each further process
#
# Each is written under another name, pushed to the disk, and only then renamed: the first process's last, when all
# others have theirs. So a checkpoint of which step_N.pt is there is whole, whenever the power goes, unless the disk
# loses bits: each tensor's checksum is part of torch's format, and is compared before a run goes on. The last KEEP are
# kept. No weight or state in a checkpoint of one state (--sync none, ddp) is cut by processes: any number can go on.
# Workers apart have a state each, and as many have to go on (or none: --steps 0 takes the model that they agree on).
# A run without --sync may go on as several workers, who then all begin with its weights. GPT-2 small with 65,536
# classes, two workers with DiLoCo, in GB:
#
#                  model   momentum, moments   own weights and anchor   file
#     first        0.7     1.1                 1.5                      3.4
#     second       -       1.1                 1.5                      2.6
#
# Beside a GPU training does not wait for the disk. save() copies what there is to the host, a thread writes it, and
# commit() gives it its name at a later tenth step, when all processes have written theirs: who is killed before that
# goes on from the checkpoint before.
#
#     step     100             101 ... 110 ... 120           at the end, on a stop, and on CPUs: both at once
#     host     save | copy     train           commit | rename
#     thread          | write, fsync      |


def write(path, state):
    """And wait until the disk has it."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def rename(old, new):
    """The new name is safe from a power cut once the directory is on the disk, too."""
    os.replace(old, new)
    if os.name == "posix":
        folder = os.open(new.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def checkpoint_files(out):
    """Files of the first process, newest first."""
    return sorted((file for file in Path(out).glob("step_*.pt") if ".worker" not in file.name), reverse=True)


def worker_file(path, number):
    """step_N.pt for the first process, step_N.worker1.pt, ... for the others."""
    return path.with_suffix(f".worker{number}.pt") if number else path


def save(run, step, now=True):
    """Begin a checkpoint of this step, by all processes at once, unless there is one. now: and end it."""
    args, world = run.args, run.world
    if args.dry_run or run.saved == step:
        return
    commit(run)
    if args.sync == "ddp" and world.workers > 1:
        alike = [p for p in run.model.parameters() if not world.spread_experts(p)]
        parallel.require_same_replicas(alike, world.replicas)
    members, state = world.members, content(run, step)
    number = members.index(world.worker) * args.tp + world.place
    target = worker_file(Path(args.out) / f"step_{step:08d}.pt", number)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    if world.is_main:
        for leftover in Path(args.out).glob("step_*.tmp"):  # of a process that was killed while it saved
            leftover.unlink()
    world.barrier()  # they are gone
    writing = WRITER.submit(write, temporary, state) if state else None
    run.pending = SimpleNamespace(step=step, members=members, target=target, temporary=temporary, writing=writing)
    if now or run.device.type == "cpu":
        commit(run)
        if world.members != members:  # somebody was lost meanwhile, and files are numbered by who is left
            save(run, step)


WRITER = concurrent.futures.ThreadPoolExecutor(1)


def content(run, step):
    """What this process has to write, on the host; None if nothing."""
    args, world, model = run.args, run.world, run.model
    needed = world.worker == world.members[0] or args.ep_policy  # a whole model is in one worker; with experts, in all
    if not (needed or world.sync):
        return None
    state = dict(format=base.GPT_FORMAT, step=step, flags=saved_flags(args), data=run.data.digest,
                 workers=len(world.members), tp=args.tp, model={})
    with world.synchronised():
        own = dict(model.named_parameters())
        for key, tensor in model.state_dict().items() if needed else ():
            tensor = parallel.collected(tensor, own.get(key), world.split)
            if world.is_main:  # a copy, as the sync's weights are about to change
                state["model"][key] = tensor.to("cpu", copy=bool(world.sync))
    state["optimizer"] = run.optimizer.state_dict(whole=not world.sync)
    if world.sync:
        state["sync"] = world.sync.state_dict()
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, state) if world.is_main or world.sync else None


def commit(run, wait=True):
    """The end of a checkpoint that save() has begun, by all processes at once; not `wait`: if all have written theirs.
    OSError with what to do."""
    pending, world, args = run.pending, run.world, run.args
    if pending is None:
        return
    if not wait and world.totals(bool(pending.writing and not pending.writing.done()))[0]:
        return
    run.pending = None
    try:
        if pending.writing:
            pending.writing.result()
            if not world.is_main:
                rename(pending.temporary, pending.target)
        world.barrier()
        if world.members == pending.members:
            run.saved = pending.step
            if world.is_main:
                rename(pending.temporary, pending.target)
                drop_old_ones(args.out, pending.target)
    except (OSError, RuntimeError) as error:
        full = error if isinstance(error, OSError) else error.__context__  # torch's writer fails once more on its way
        if isinstance(error, ConnectionError) or not isinstance(full, OSError):
            raise
        last = "none before it" if run.saved is None else f"the last one is of step {run.saved}"
        raise OSError(f"step {pending.step} could not be saved ({full}), {last}: make room, and go on with "
                      f"{resume_command(args)}") from None
    finally:
        pending.temporary.unlink(missing_ok=True)
    world.barrier()


def drop_old_ones(out, newest):
    """All but the last KEEP. Those that are newer are damaged: this run fell back behind them."""
    files = checkpoint_files(out)
    for old in set(files) - set([file for file in files if file.name <= newest.name][:KEEP]):
        for file in [old, *Path(out).glob(f"{old.stem}.worker*.pt")]:
            file.unlink(missing_ok=True)


# A torn one is passed over, not an end: of
#
#     out/   step_00000300.pt   cut short by a full disk, or a byte is another   "damaged: trying the one before it"
#            step_00000200.pt   whole                                            the run goes on from here, and to 300


def find_checkpoint(out):
    """(content, path) of the newest checkpoint in DIR that is whole; a line for each damaged one."""
    files = checkpoint_files(out)
    base.refuse((not files, f"{out}: no checkpoint to resume from: drop --resume, or name its directory with --out"))
    for path in files:
        try:
            saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
            if saved.get("format") != base.GPT_FORMAT:
                raise base.BadInput(f"{path}: it is of another version of this program: start anew with another --out")
            saved["flags"], saved["step"], saved["data"]  # raises if it is no checkpoint
            count = saved["workers"] * saved["tp"] if "sync" in saved else 1
            damaged = [zipfile.ZipFile(worker_file(path, i)).testzip() for i in range(count)]
            if not any(damaged):
                return saved, path
            problem = "a checksum differs"
        except base.BadInput:
            raise
        except Exception as error:  # torch and zipfile have many for a file that is cut or overwritten
            problem = str(error).partition("\n")[0][:60]
        print(f"{path}: damaged ({problem}): trying the one before it", file=sys.stderr)
    raise base.BadInput(f"{out}: no checkpoint is whole: start anew with another --out")


def restore(run):
    """Load what save() stored; of workers that train apart each process from its own file."""
    args, world, model = run.args, run.world, run.model
    load = functools.partial(torch.load, weights_only=True, map_location="cpu")
    saved = load(args.checkpoint)
    own = dict(model.named_parameters())
    model.load_state_dict({k: parallel.own_part(t, own.get(k), world.split) for k, t in saved["model"].items()})
    apart = world.sync and "sync" in saved  # a checkpoint of --sync none or ddp has one state for all
    if world.sync and not (apart and args.steps):
        world.sync.restart(args.start)
    if not args.steps:  # to look at, by any number of processes
        return
    if apart and world.rank:
        saved = load(worker_file(Path(args.checkpoint), world.rank))
    run.optimizer.load_state_dict(saved["optimizer"], whole=not apart)
    if apart:
        world.sync.load_state_dict(saved["sync"])
    run.saved = args.start


@contextlib.contextmanager
def locked(out):
    """A block in which no other run can use DIR; ValueError if one does. The system gives the lock back, however the
    process ends. (Windows has no such lock: there nothing is checked.)"""
    if fcntl is None:
        yield
        return
    with Path(out, ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise base.BadInput(f"{out}: another run is writing there: wait for its end, or name another "
                                "--out") from None
        except OSError:
            pass  # a file system without locks: nothing is checked
        yield


def set_aside(out, log):
    """A fresh run into a directory that holds checkpoints moves them and their log away first: nothing is lost."""
    if checkpoint_files(out):
        home = Path(out).resolve()
        aside = next(p for i in itertools.count(1) if not (p := home.with_name(f"{home.name}.{i}")).exists())
        aside.mkdir()
        logs = {*home.glob("*.jsonl"), *([Path(log).resolve()] if log and Path(log).exists() else [])}
        for file in [*home.glob("step_*"), *logs]:
            shutil.move(file, aside / file.name)
        size = sum(file.stat().st_size for file in aside.iterdir()) / MIB
        print(f"kept the earlier run of {out} in {aside.name} ({size:.0f} MiB; delete it when you do not need it)")


# ==== 7. What the run says ============================================================================================
#
# A line for the first three steps and every tenth; with --log a row of JSON for each step. What they say:
#
#     step 20/33  loss 3.8275  bpb 2.761  lr 4.00e-03  norm 1.34  1,082,130 tok/s  mfu 50.6%  peak 17,791 MiB  ...
#
#     bpb      bits a byte of text, loss / (ln 2 x bytes a token), comparable whatever a token is; of text alone
#     lr       AdamW's rate; Muon's is MUON_LR times the same share of its peak
#     norm     of the whole gradient, before it was clipped. A spike: a batch unlike its neighbours
#     mfu      FLOPs of the model (01: 6 a parameter and token, attention uncut) over the data sheet's peak: what is
#              made twice, Muon's products and the optimizer do not count
#     peak     of the allocator on a GPU; of the process, libraries included, on a CPU
#     sparse   the share of the step's losses whose gradient was sparse (03)
#     MaxVio   of the worst layer: how much more than its even share of tokens the fullest expert got (07)
#     sent     MB that this worker has sent so far; blocked: seconds that it waited for the others in rounds (06)
#
# A row of --log has the same under names that do not change, and what a line has no room for. The first row has the
# flags; rows of validations have val_loss:
#
#     {"step": 20, "loss": 3.8275, "bpb": 2.761, "lr": 0.004, "grad_norm": 1.34, "tok_s": 1082130, "mfu": 0.506,
#      "peak_mib": 17791, "seconds": 0.121, "sparse": 1.0, "why": "the forecast is within its limits", "sent": 0, ...}


# Who hears of a wish to stop, and when all of them have ended:
#
#     one process              itself                                                   after its step
#     several, none or ddp     of Ctrl-C all, of SIGTERM the parent, who passes it on   after the step whose vote has it
#     workers apart            the same; who has heard tells the others                 after the next round


class StopSignal:
    """Inside the block, Ctrl-C or SIGTERM asks for an end after the current step. Ctrl-C, twice: at once."""

    def __enter__(self):
        self.number = 0
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number, frame):
        if self.number == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number


def rows_to_keep(args):
    """Of the file of --log: a resumed run repeats the steps after its checkpoint, whose old rows go, and a torn one.
    ValueError on another program's file."""
    path, kept = Path(args.log), []
    base.refuse((path.exists() and not path.is_file(), f"--log {path}: is no ordinary file: name another"))
    for row in path.read_text().splitlines(True) if path.exists() else ():
        torn = not row.endswith("\n")
        try:
            if torn and kept or (json.loads(row)["step"] > args.start or not args.resume) and args.steps or torn:
                break
        except (ValueError, KeyError, TypeError):
            raise base.BadInput(f"--log {path}: holds other rows than this program's: name another") from None
        kept.append(row)
    return kept


class Log:
    """Lines for people, by one process, and the rows of --log, JSON, one a step and a validation."""

    def __init__(self, run):
        self.run, self.args, self.world, self.file = run, run.args, run.world, None
        size = run.data.bytes_per_token
        self.bits = None if size is None else 1 / (math.log(2) * size)  # bits a byte that a nat a token is
        self.peak_flops = base.peak_flops(run.device, product_dtype(run.args))
        self.seconds, self.told = [], set()  # of each step; decisions of the loss that have been reported
        self.before = (0, 0)  # calls and sparse ones of the loss, before this step

    def begin(self):
        """The file of --log, refused before an earlier run is moved aside; and what a reader wants to know first."""
        args, main = self.args, self.world.is_main
        rows = rows_to_keep(args) if args.log and main else ()
        if args.start == 0 and args.steps and main and not args.dry_run:
            set_aside(args.out, args.log)
        if args.log and main:
            path = Path(args.log)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", newline="\n")
            self.file.truncate(len("".join(rows).encode()))  # what is kept is the file's beginning
        for text in describe_run(self.run):
            self.say(text)
        config = self.run.config
        self.row(step=args.start, flags=saved_flags(args), processes=self.world.size, parameters=config.parameters(),
                 flops_per_token=config.flops_per_token(), device=base.describe_device(self.run.device))

    def row(self, **values):
        if self.args.log and self.world.is_main and not self.file:  # the first worker was lost: go on for it
            self.file = Path(self.args.log).open("a", newline="\n")
        if self.file:
            self.file.write(json.dumps({k: v for k, v in values.items() if v is not None}) + "\n")
            self.file.flush()

    def say(self, text, every_worker=False):
        """A line by one process, or by one of each worker."""
        if self.world.is_main or every_worker and self.world.place == 0:
            print(("" if self.world.is_main else f"worker {self.world.worker}, ") + text, flush=True)

    def per_byte(self, loss):
        return None if self.bits is None else loss * self.bits

    def speed(self, seconds):
        """Tokens/s of steps that take so long, and the share of the devices' peak, or None."""
        tok_s = self.args.batch * self.args.seq / seconds
        flops = tok_s * self.run.config.flops_per_token()
        return tok_s, None if self.peak_flops is None else flops / (self.peak_flops * self.world.size)

    def step(self, done, verdict, share, uneven, seconds):
        """Row of a step that has ended, and sometimes a line, with the mean speed of up to ten steps."""
        self.seconds.append(seconds)
        sync, stats, lr, steps = self.world.sync, self.run.stats, self.args.lr * share, self.args.steps
        calls, sparse = stats.calls - self.before[0], stats.sparse - self.before[1]
        self.before = stats.calls, stats.sparse
        sparse = sparse / calls if calls and self.args.loss == "cce" else None
        uneven = None if uneven is None else uneven.item()
        shown = done <= 3 or due(done, LOG_EVERY, steps)
        peak = self.run.peak() / MIB if shown or self.file else math.nan
        if verdict.good:  # NaN is no JSON
            tok_s, mfu = self.speed(seconds)
            self.row(step=done, loss=verdict.loss, bpb=self.per_byte(verdict.loss), lr=lr, grad_norm=verdict.norm,
                     tok_s=tok_s, mfu=mfu, peak_mib=None if math.isnan(peak) else peak, seconds=seconds, sparse=sparse,
                     why=None if sparse is None else stats.reason, sent=sync and sync.bytes_sent,
                     blocked=sync and sync.blocked_seconds, max_violation=uneven)
        if shown:
            tok_s, mfu = self.speed(statistics.fmean(self.seconds[-LOG_EVERY:]))
            eta = int((steps - done) * self.args.batch * self.args.seq / tok_s)
            words = [f"step {done}/{steps}  loss {verdict.loss:.4f}",
                     "" if self.bits is None else f"bpb {self.per_byte(verdict.loss):.3f}",
                     f"lr {lr:.2e}  norm {verdict.norm:.2f}  {tok_s:,.0f} tok/s",
                     "" if mfu is None else f"mfu {mfu:.1%}", "" if math.isnan(peak) else f"peak {peak:,.0f} MiB",
                     "" if sparse is None else f"sparse {sparse:.0%}", "" if uneven is None else f"MaxVio {uneven:.2f}",
                     f"sent {sync.bytes_sent / 1e6:,.2f} MB  blocked {sync.blocked_seconds:.2f} s" if sync else "",
                     f"eta {eta // 60}:{eta % 60:02d}"]
            self.say("  ".join(filter(None, words)))
        if sparse is not None and stats.decision not in self.told:
            self.told.add(stats.decision)
            self.say(f"step {done}: gradient of the loss {stats.decision}: {stats.reason}")

    def validation(self, step, loss):
        bpb = "" if self.bits is None else f"  bpb {self.per_byte(loss):.4f}"
        self.say(f"step {step}{f'/{self.args.steps}' if self.args.steps else ''}  validation loss {loss:.4f}{bpb}")
        if math.isfinite(loss):
            self.row(step=step, val_loss=loss, val_bpb=self.per_byte(loss))

    def summary(self, val_loss):
        """At the end. The first steps compile and warm up: the median leaves ten out."""
        if not self.seconds:
            return self.say(f"nothing to do: {self.args.out} is at step {self.args.start} of {self.args.steps}: raise "
                            "--steps to go on")
        if not self.args.dry_run:
            self.say(f"saved   {self.args.out}, step {self.args.steps}")
        tok_s, mfu = self.speed(statistics.median(self.seconds[10:] or self.seconds))
        mfu = "" if mfu is None else f", MFU {mfu:.1%}"
        total = f"{len(self.seconds)} steps in {sum(self.seconds):,.1f} s"
        self.say(f"\nspeed   {tok_s:,.0f} tokens/s{mfu} (median step); {total}")
        if val_loss is not None:
            bpb = "" if self.bits is None else f", {self.per_byte(val_loss):.4f} bits a byte"
            self.say(f"loss    {val_loss:.4f} on validation{bpb}")
        if sync := self.world.sync:
            self.say(f"sync    {sync.bytes_sent / 1e6:,.2f} MB sent by a worker, blocked for "
                     f"{sync.blocked_seconds:.2f} s in all")
        for text in compare_memory(self.run):
            self.say(text)


def describe_run(run):
    """What a reader wants to know before step 0, from formulas alone."""
    args, world, config, data = run.args, run.world, run.config, run.data
    micro, tokens = micro_batch(args), args.batch * args.seq
    epochs = max(0, args.steps - args.start) * args.batch / len(data.train)
    size, held = (sum(s.nbytes for s in part.shards) / MIB for part in (data.train, data.val))
    yield base.describe_device(run.device) + (f" | {world.size} processes" if world.size > 1 else "")
    yield f"data    {data.origin}: {size:.1f} MiB to train, {held:.2f} to validate"
    yield f"        {epochs:.2f} epochs, hash {data.digest}"
    yield f"model   {config.parameters() / 1e6:.1f} M parameters: {args.layers} layers, width {args.dim}, " + (
        f"{args.heads} heads, vocabulary {config.vocab}, {config.flops_per_token() / 1e6:.1f} MFLOP a token")
    if args.moe:
        where = f"spread over {world.size} processes by {args.ep_policy}" if args.ep_policy else "all in each process"
        yield (f"        {args.moe} experts of width {config.width()} a layer, {where}; a token meets {args.top_k}; "
               f"balance: {args.balance}")
    how = "materialised logits"
    if args.loss != "reference":
        plan = loss_plan(micro * args.seq, config, args, run.device)
        how = "Triton kernels" if has_kernels(run.device) else "blocked PyTorch"
        how += "" if base.HAS_TRITON else ": Triton is not installed"
        how += f"; exact gradient: {plan.order}, {plan.passes} matrix passes, blocks of {plan.block}"
        how += f"; sparse while dE and dC are estimated within {filtering.MAX_ERROR}" if args.loss == "cce" else ""
    yield f"        {args.dtype}, loss {args.loss} ({how})"
    yield from describe_optimizer(run)
    who = "process(es)" if args.tp == 1 else f"worker(s), each of {args.tp} processes,"
    yield f"step    {tokens:,} tokens = {args.batch} sequences of {args.seq} = " + (
        f"{world.workers} {who} x {args.accum} micro-batch(es) x {micro}")
    if method := sync_method(args):
        yield describe_sync(method, world, args)
    parts, peak = predict_memory(config, micro, args, run.device, world.size)
    categories = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items())
    yield f"memory  predicted MiB of tensors, peak {peak / MIB:,.0f}: {categories}"


def describe_optimizer(run):
    args, config, tokens = run.args, run.config, run.args.batch * run.args.seq
    rule = {"adamw": f"AdamW for all, peak rate {args.lr:g}",
            "adam-mini": f"Adam-mini for all matrices but routers, AdamW for the rest, peak rate {args.lr:g}",
            "muon": f"Muon for the layers' matrices, peak rate {MUON_LR:g}; AdamW for the rest, {args.lr:g}"}[args.rule]
    if args.rule == "muon":
        products = sum(s.count * forging.orthogonal_flops(s.M, s.K) for s in layer_shapes(config))
        rule += f"; its products add {products / (tokens * config.flops_per_token()):.1%} to a step's FLOPs"
    yield f"        rule    {rule}" + (f"; clipped at {args.clip:g}" if args.clip else "")
    when = "a step after backward from gradients that are kept"
    if args.optimizer == "forge":
        when = "steps after the last backward pass, from what was kept" if waits(args) else "steps inside backward"
        when += f", states in {args.states}"
    yield f"        optimizer {args.optimizer}: {when}"


def describe_sync(method, world, args):
    """Who talks to whom, when, and how much, beside data parallelism."""
    H, flat = method.H, world.sync.flat
    size = low_comm.round_bytes(method, [span.stop - span.start for span in flat.spans], world.workers)
    own = sum(place.stop - place.start for place in flat.place.values())  # numbers that this process has
    ddp = low_comm.data_parallel_bytes(own, world.workers) * (H or args.steps)
    fewer = f", {ddp / size:,.0f} times less than summing gradients" if world.workers > 1 else ""
    when = f"every {H} steps" if H else "once, at the end"
    outer = f" (outer rate {method.outer.lr:g}, momentum {method.outer.momentum:g})" if method.outer.nesterov else ""
    who = "worker" if args.tp == 1 else "process"
    return f"sync    {args.sync}{outer}: {when}, {size / 1e6:,.2f} MB a {who} and round{fewer}; steps show one worker"


# The last table of a run. What is alive at three points of the first step is told apart by subtraction:
#
#     before                parameters, optimizer's states, the sync's buffers, the slab
#     forward - before      activations
#     backward - before     gradients that are kept
#     peak - forward        the loss, and what else is largest early in backward


def compare_memory(run):
    """Lines: predicted MiB by category, and measured: of the first step, the peak of all."""
    args, world, device, alive, forged = run.args, run.world, run.device, run.alive, run.optimizer.forged
    parts, peak = predict_memory(run.config, micro_batch(args), args, device, world.size)
    weights = sum(p.nbytes for p in run.model.parameters())
    slab, held = forged.slab.nbytes if forged else 0, sum(t.nbytes for t in world.sync.resident()) if world.sync else 0
    measured = dict(
        sync=held, parameters=weights, gradients=alive["backward"] - alive["before"] + slab,
        optimizer=alive["before"] - weights - slab - held, activations=alive["forward"] - alive["before"])
    top = run.peak() if device.type == "cuda" else math.nan
    measured |= dict(loss=top - alive["forward"], peak=top)
    yield f"{'MiB':<12}{'predicted':>11}{'measured':>13}"
    for name, size in (parts | dict(peak=peak)).items():
        seen = measured[name]
        yield f"{name:<12}{size / MIB:>11,.0f}{'needs a GPU' if math.isnan(seen) else f'{seen / MIB:,.0f}':>13}"


def resume_command(args):
    """What to type to go on: the same again, and --resume."""
    words = [word for word in args.argv if word != "--resume"]
    start = "torchrun ... -- (as before)" if args.torchrun else "python"
    return " ".join([start, shlex.quote(os.path.relpath(__file__)), *map(shlex.quote, words), "--resume"])


# ==== 8. Flags, and what is refused ===================================================================================
#
# A flag that is not given is completed in this order: by the checkpoint (--resume), by the preset, by the device. What
# belongs to one launch is not in a checkpoint; a flag beside --resume wins, unless it would change the model or the
# optimizer's state. What cannot be is refused in one line that says what to use instead, before anything is written:
#
#     parse():  as typed -> going_on(), by the checkpoint -> processes and device -> complete(), the rest -> refusals()
#
#     python train.py --gpus 2 --rule adamw       typed       checkpoint   preset, device      becomes
#     layers                                      -           -            12 (gpt2-small)     12
#     rule                                        adamw       -            -                   adamw
#     lr                                          -           -            adamw's: 1e-3       1e-3
#     clip                                        -           -            1, but 0 for muon   1
#     sync                                        -           -            diloco              diloco
#     ... --resume --sync none --lr 5e-4
#     rule, layers                                -           adamw, 12    -                   as they were
#     lr                                          5e-4        1e-3         -                   5e-4
#     sync                                        none        diloco       -                   refused
#
# A new flag is a row in FLAGS. If it must not change within a run, its name goes into FIXED; if it is about where and
# how to run, not what is trained, into LAUNCH. What it cannot be combined with is a yield in refusals().

INT, FLOAT, choices = dict(type=int), dict(type=float), lambda *names: dict(choices=names)  # noqa: E731
FLAGS = {
    "model": {
        "preset": (choices(*PRESETS), "model and schedule (gpt2-small on a GPU, else cpu)"),
        "layers": (INT, "from the preset"), "dim": (INT, "width, from the preset"),
        "heads": (INT, "from the preset"), "seq": (INT, "tokens of a sequence, from the preset"),
        "vocab": (INT, "classes (from the data)"),
        "moe": (INT, "experts in place of each MLP, 07 (0: none)"),
        "top_k": (INT, "experts that a token goes to (2)")},
    "data": {
        "data": ({}, "file or quoted glob of .txt or .bin shards (Python source on this machine)"),
        "val": ({}, "the same for validation (the last 1%% of --data)"),
        "tokens": (choices("bytes", "bigrams"), "what a token of text is (from the preset)")},
    "optimisation": {
        "steps": (INT, "from the preset; 0: only validate, and sample"),
        "batch": (INT, "sequences a step, over all processes and micro-batches (8 on a CPU; on a GPU what fits)"),
        "accum": (INT | dict(default=1), "micro-batches a step (1)"),
        "lr": (FLOAT, "AdamW's peak rate (from the preset)"),
        "warmup": (INT, "steps until the peak rates (20; 50 without Muon)"),
        "weight_decay": (FLOAT | dict(default=WEIGHT_DECAY), f"of matrices ({WEIGHT_DECAY}; of Muon's a twentieth)"),
        "rule": (choices("muon", "adam-mini", "adamw"), "Muon for the layers' matrices, AdamW for the rest; Adam-mini; "
                 "AdamW for all (muon)"),
        "optimizer": (choices("forge", "ordinary"), "when matrices move: inside backward, 04; after it (forge; "
                      "ordinary with --accum unless --states, --loss reference, --sync ddp)"),
        "clip": (FLOAT, "largest gradient norm; 0: do not clip, and move inside backward (0; 1 without Muon)"),
        "states": (choices(*forging.LAYOUTS), "forged weights and moments: fp32; bf16 with fp32 master; int8 moments"),
        "loss": (choices(*LOSSES), "gradient sparse while that is close, else exact; exact; through logits"),
        "balance": (choices(*mixture.Balance.KINDS), "of experts: loss of the global batch, of each micro-batch, a "
                    "bias without a loss, none (global)"),
        "on_nan": (choices("stop", "skip") | dict(default="stop"), f"end the run, or leave up to {SKIPS} steps in a "
                   "row out, at a loss or gradient that is not finite (stop)")},
    "several processes": {
        "gpus": (INT, "processes on this machine, one a GPU (1); under torchrun that says how many"),
        "sync": (choices("none", "ddp", *low_comm.METHODS), "nothing; gradients summed each step; weights by 06's "
                 "methods (diloco)"),
        "inner_steps": (INT, "H, steps that workers take alone between rounds (from --sync)"),
        "tp": (INT | dict(default=1), "neighbouring processes that share a worker's matrices, 05 (1)"),
        "ep_policy": (choices(*mixture.POLICIES), "of experts that --sync ddp spreads: fixed, or least loaded (ep)")},
    "run": {
        "device": (choices("cuda", "cpu"), "cuda where there is a GPU"),
        "dtype": (choices("bf16", "fp32"), "of matrix products (bf16 where the GPU has it)"),
        "compile": (dict(action=argparse.BooleanOptionalAction), "one kernel each for what lies between matrices, less "
                    "kept for backward, 05 (on GPUs with Triton)"),
        "recompute": (dict(action="store_true"), "keep each layer's input only, and run it again in backward, 05"),
        "offload": (dict(action="store_true"), "keep what backward needs in host memory, or (CPU) in files, 05"),
        "deterministic": (dict(action="store_true"), "bitwise repeatable on a GPU, slower"),
        "seed": (INT | dict(default=0), "of weights, order of data and sample (0)"),
        "out": (dict(default="out"), "directory of checkpoints (out)"),
        "resume": (dict(action="store_true"), "go on from the newest whole checkpoint in --out"),
        "save_every": (INT | dict(default=100), "steps between checkpoints; 0: at the end only (100)"),
        "eval_every": (INT | dict(default=0), "steps between validations; 0: first and last only (0)"),
        "log": ({}, "file of JSON lines, one object a step and a validation"),
        "dry_run": (dict(action="store_true"), "3 steps (or --steps), nothing written; then memory by category"),
        "fit": (FLOAT, "print what a card of so many GiB can train, and how; with --dry-run: in no more memory"),
        "sample": ({}, "prompt to go on from at the end (text only; 'def ')")},
}
LAUNCH = {"resume", "dry_run", "out", "sample", "gpus", "tp", "compile", "recompute", "offload", "fit", "ep_policy",
          "device", "log", "deterministic"}  # not in a checkpoint
SAVED = {name for group in FLAGS.values() for name in group} - LAUNCH | {"outer"}
FIXED = ("preset", "layers", "dim", "heads", "seq", "vocab", "tokens", "moe", "top_k")  # the model, by a checkpoint;
FIXED += ("rule", "optimizer", "states", "sync", "inner_steps")  # its optimizer


def flag(name):
    """As it is typed."""
    return "--" + name.replace("_", "-")


def saved_flags(args):
    return {name: value for name, value in vars(args).items() if name in SAVED}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"train.py: {message} (--help lists the flags)\n")


def make_parser():
    parser = Parser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (options, text) in flags.items():
            group.add_argument(flag(name), help=text, **options)
    return parser


def parse(argv):
    """Flags, completed. ValueError on what cannot be."""
    asked, record = make_parser().parse_args(argv), {}
    args = argparse.Namespace(**vars(asked))
    args.start, args.checkpoint, args.data_digest, args.outer, args.going_on = 0, None, None, None, False
    if args.resume and not only_planned(args):
        args, record = going_on(asked, argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    args.torchrun = "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
    present = torch.cuda.device_count()
    if args.dry_run:
        args.steps, args.log = args.start + (3 if asked.steps is None else asked.steps), None
    base.refuse((args.torchrun and args.gpus is not None, "--gpus: under torchrun, its --nproc-per-node says how many "
                 "processes there are: drop --gpus"))
    args.gpus = args.gpus if args.gpus is not None else 1 if args.torchrun else max(1, args.tp)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if args.torchrun else args.gpus
    args.processes = int(os.environ.get("WORLD_SIZE", 1)) if args.torchrun else args.gpus
    on_gpus = only_planned(args) or args.device == "cuda" or args.device is None and (present > 0 or args.gpus > 1)
    fewer = f"--gpus {present}, or " if present else ""
    base.refuse((on_gpus and local > present and not only_planned(args),
                 f"{local} process(es) on GPUs, but this machine has {present} GPU(s): use {fewer}processes on the CPU "
                 "with --device cpu"))
    args.device, args.workers = "cuda" if on_gpus else "cpu", args.processes // max(1, args.tp)
    complete(args)
    for wrong, text in refusals(args, asked, record, local):  # one after the other: a later one may need an earlier one
        base.refuse((wrong, text))
    return args


def going_on(asked, argv):
    """Flags beside --resume, completed by the checkpoint's; and what else it says."""
    saved, path = find_checkpoint(asked.out)
    flags, parser = saved["flags"], make_parser()
    parser.set_defaults(**flags)
    args = parser.parse_args(argv)
    args.start, args.checkpoint, args.data_digest = saved["step"], str(path), saved["data"]
    alone = flags["sync"] in ("none", "ddp")  # one set of weights: workers may go on from it in any way
    args.going_on = not alone  # with the rounds that there were
    if alone:
        args.sync, args.outer = asked.sync or ("ddp" if flags["sync"] == "ddp" else None), None
    for name in FIXED:
        wish, has = getattr(asked, name), flags[name]
        if not (alone and name in ("sync", "inner_steps")):
            base.refuse((wish not in (None, has), f"{flag(name)} {wish}: the checkpoint has {has}: drop the flag, or "
                         "use another --out"))
    return args, saved


def complete(args):
    """What neither flags nor checkpoint say: from the preset, the data and the device."""
    args.preset = args.preset or ("gpt2-small" if args.device == "cuda" else "cpu")
    args.rule, args.states, args.moe = args.rule or "muon", args.states or "fp32", args.moe or 0
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value["muon" if args.rule == "muon" else "adamw"] if name == "lr" else value)
    if args.batch is None and args.device == "cpu" and args.fit is None:  # eight, or what can be shared out
        unit = max(1, args.workers * args.accum)
        args.batch = -(-8 // unit) * unit
    args.warmup = WARMUP[args.rule] if args.warmup is None else args.warmup
    args.clip = float(args.rule != "muon") if args.clip is None else args.clip
    args.vocab = default_vocab(args) if args.vocab is None else args.vocab
    args.data, args.val = (pattern and os.path.abspath(pattern) for pattern in (args.data, args.val))
    args.sample = "def " if args.sample is None and has_text(args) else args.sample
    device, several = torch.device(args.device), args.workers > 1
    args.sync = args.sync or ("diloco" if several else "none")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" and has_bf16(args) else "fp32")
    args.compile = has_kernels(device) if args.compile is None else args.compile
    if args.loss is None:  # the sparse gradient's kernels need Hopper; elsewhere there is nothing to decide
        hopper = has_kernels(device) and (not torch.cuda.is_available() or cce.is_hopper(device))
        args.loss = "cce" if hopper and args.tp == 1 and args.dtype == "bf16" and args.dim % 8 == 0 else "cce-exact"
    if args.moe:
        args.top_k, args.balance = args.top_k or min(2, args.moe), args.balance or "global"
        args.ep_policy = args.ep_policy or ("ep" if several and args.sync == "ddp" else None)
    if args.outer is None and not args.going_on and args.sync in low_comm.SHORT_OUTER:
        rounds = (args.steps - args.start) // (args.inner_steps or low_comm.METHODS[args.sync].H)
        args.outer = low_comm.outer_for(args.sync, rounds)
    args.replay = False  # whether there are CUDA graphs: choose_batch() may say so
    if args.optimizer is None:  # what forge cannot do, or (in fp32) does not do with less memory
        summed = several and args.sync == "ddp" or args.accum > 1 and args.states == "fp32"
        args.optimizer = "ordinary" if summed or args.loss == "reference" else "forge"


def has_bf16(args):
    """Whether the GPU has such units; one that need not be here is taken for one that does."""
    return only_planned(args) or torch.cuda.is_bf16_supported(including_emulation=False)


def only_planned(args):
    """Whether nothing runs, on a device that need not be here: --fit without --dry-run."""
    return args.fit is not None and not args.dry_run


# Refusals: generators of (whether it is wrong, what to say), in an order in which a later one may rely on all before
# it. What to say names the flag as it is typed, and what to use in its place.


def refusals(args, asked, record, local):
    """(wrong, text) of everything that cannot be. asked: flags as typed; record: of the checkpoint."""
    text, moe, sync, given = has_text(args), args.moe, args.sync, args.processes
    yield not 0 <= moe <= 2**16, f"--moe {moe}: use 0 (none) to {2**16} experts"
    yield args.layers > 4096, f"--layers {args.layers}: use at most 4096"
    for name, what in dict(log="file", out="directory", val="file").items():
        yield getattr(args, name) == "", f"--{name} '': is no name of a {what}: name one, or drop the flag"
    for name in ("layers", "dim", "heads", "seq", "batch", "accum", "gpus", "tp", "vocab", "top_k", "inner_steps"):
        value = getattr(args, name)
        yield value is not None and value < 1, f"{flag(name)} {value}: must be at least 1"
    for name in ("steps", "warmup", "save_every", "eval_every", "clip", "lr", "weight_decay", "seed"):
        value = getattr(args, name)
        yield not 0 <= value < 2**63, f"{flag(name)} {value}: must not be negative (nor past 2^63)"
    workers, several = args.workers, args.workers > 1
    yield args.dim % (2 * args.heads), (f"--dim {args.dim} --heads {args.heads}: dim must be a multiple of 2 * heads")
    yield args.fit is not None and not 0 < args.fit < 2**20, f"--fit {args.fit}: use the GiB of a card, above 0"
    yield only_planned(args) and args.resume, "--fit with --resume: it is for a new run: drop one of them"
    yield only_planned(args) and asked.device == "cpu", "--fit is about GPUs: drop --device cpu, or add --dry-run"
    yield args.dry_run and asked.steps == 0, "--dry-run --steps 0: there would be nothing to see: use at least one step"
    yield args.val and not args.data, "--val: goes with --data: the embedded corpus has its own validation files"
    yield asked.tokens and not text, (f"--tokens {asked.tokens}: says how text is cut, but {args.data} holds tokens: "
                                      "drop the flag")
    yield args.sample and not text, f"--sample: no decoder for the tokens of {args.data}: use text data"
    yield args.sample and max(encode(args.sample, args.tokens)) >= args.vocab, (
        f"--sample {args.sample!r}: a token is outside the vocabulary of {args.vocab}: use another")
    yield args.dtype == "bf16" and args.device == "cuda" and not has_bf16(args), (
        "--dtype bf16: this GPU has none (Ampere and later do): use fp32")

    yield from refused_optimizers(args, several)
    yield from refused_workers(args, record, workers, local)
    for name in ("top_k", "balance", "ep_policy"):
        yield not moe and getattr(asked, name) is not None, (
            f"{flag(name)} {getattr(asked, name)}: there are no experts: pass --moe E, or drop it")
    spread_out = several and sync == "ddp"
    yield moe and args.top_k > moe, (
        f"--top-k {args.top_k} --moe {moe}: a token cannot go to more experts than there are")
    yield moe and args.ep_policy and not spread_out, (
        f"--ep-policy {args.ep_policy}: every process has all experts: use --gpus N --sync ddp, or drop it")
    yield moe and spread_out and moe % given, (
        f"--moe {moe}: {given} processes cannot share them equally: use a multiple of {given}")
    yield moe and args.balance == "bias" and several and not spread_out, (
        f"--balance bias with --sync {sync}: each worker's biases would go their own way: use --balance global, or "
        "--sync ddp")


def refused_optimizers(args, several):
    forge, narrow = args.optimizer == "forge", args.states != "fp32"
    asked = f"--states {args.states}" if narrow else "--optimizer forge"
    hint = "use --sync diloco, or start anew with another --out" if args.resume else "use --sync diloco, or drop it"
    yield (forge or narrow) and several and args.sync == "ddp", (
        f"{asked} with --sync ddp, which sums gradients that forge never makes: {hint}")
    yield narrow and not forge, (
        f"--states {args.states} goes with --optimizer forge, not with ordinary or --loss reference: drop one of them")
    yield forge and args.loss not in FORGED, (
        f"--optimizer forge with --loss {args.loss}: it takes {', '.join(FORGED)}: use "
        + ("one of them" if args.resume else "--optimizer ordinary"))


def refused_workers(args, record, workers, local):
    """What --sync and --tp cannot do. local: processes on this machine."""
    K, sync, method = args.tp, args.sync, low_comm.METHODS.get(args.sync)
    least = max(1, method.fragments, method.tau or 0) if method else 1
    yield args.inner_steps is not None and not method, (
        f"--inner-steps {args.inner_steps}: with --sync {sync} there are no rounds: drop it, or use another --sync")
    yield (args.inner_steps or least) < least, f"--inner-steps {args.inner_steps}: --sync {sync} needs at least {least}"
    if record and record["flags"]["sync"] in low_comm.METHODS:
        saved, tp = record["workers"] * record["tp"], record["tp"]
        there, here = (f"{n // k} worker(s)" + f" of {k} processes each" * (k > 1)
                       for n, k in ((saved, tp), (args.processes, K)))
        flags = f"--gpus {saved}" + f" --tp {tp}" * (tp > 1 or K > 1)
        idle = not args.steps or args.steps <= record["step"] and tp == K and args.processes <= saved
        yield (saved, tp) != (args.processes, K) and not idle, (
            f"the checkpoint is of {there} that train apart (--sync {sync}), this launch has {here}: use {flags} (or "
            "as many processes under torchrun)")
    if K == 1:
        return
    yield local % K, (f"--tp {K} with {local} process(es) on this machine: a worker is {K} of them: use --gpus "
                      f"{-(-local // K) * K} (or as many under torchrun)")
    fits = min((k for k in range(1, args.heads + 1) if args.heads % k == 0), key=lambda k: abs(k - K))
    yield args.heads % K, f"--tp {K} --heads {args.heads}: a process has whole heads: use --tp {fits}"
    yield args.vocab % K, (f"--tp {K} --vocab {args.vocab}: its processes have equal parts of the classes: use --vocab "
                           f"{-(-args.vocab // K) * K}")
    why = "makes all logits" if args.loss == "reference" else "takes its sample from one whole vocabulary"
    yield args.loss != "cce-exact", f"--tp {K} with --loss {args.loss}, which {why}: use --loss cce-exact"
    yield args.moe, (f"--tp {K} with --moe {args.moe}: experts would not be cut, every process would run them all: "
                     "spread them with --sync ddp, without --tp")
    border = forging.BORDERS[args.states]
    yield args.dim // K % border, (f"--tp {K} --states {args.states} --dim {args.dim}: groups of {border} columns "
                                   f"would be cut: use a --dim that {K * border} divides, or --states fp32")
    yield args.steps and (sync == "none") != (workers == 1) and sync != "ddp", (
        f"--sync {sync} with --tp {K} and {workers} worker(s): use --sync "
        f"{'none' if workers == 1 else 'diloco or ddp'}")


# ==== 9. Processes ====================================================================================================
#
#     python train.py             this process                                    launch -> start -> process
#     python train.py --gpus 2    two of its own (05's spawn), which it watches   launch -> start -> run_rank -> process
#     torchrun ... -- train.py    torchrun's: each is launched by itself          launch -> start -> run_rank -> process
#
# On CPUs a worker that trains apart may be killed: the others go on, and a new process takes its place. Over NCCL the
# loss of one ends all.
#
#     worker 0     step  step  round        step  step  round        step  step  round with process 2
#     worker 1     step  KILLED    its parent tells of the loss: the round is worker 0's alone
#     process 2          starts, loads the libraries, joins at a round: 0's weights, 1's sequences
#
# How a run ends, and what its shell sees:
#
#     0           all steps are done, or there was nothing to do
#     1           a loss, gradient or weight was not finite; the last checkpoint is from before
#     2           bad input, or a mishap that a line explains: a full disk, no memory, lost neighbours
#     128 + n     signal n: saved, at the end of a step or round; n = 9: a process was killed, nothing could be saved
#     traceback   anything else: a mistake in this program, or in what you made of it


def process(args):
    """One process, from the first line to the last; returns its exit status."""
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    with limited(args, device):
        run, status = build(args, device), 0
        run.data = load_data(args)
        run.feed, run.log = Feed(run), Log(run)
        run.log.begin()
        if args.steps:
            with StopSignal() as stop, scratch(run):
                status = train(run, stop)
        else:
            validation(run, args.start)
        if status == 0 and args.sample and not args.dry_run:
            write_sample(run)
        run.world.barrier()
        if run.world.sync:
            run.world.sync.transport.close()
    return status


def write_sample(run):
    args, world = run.args, run.world
    with world.synchronised():
        needed = world.is_main or world.split  # where a model is spread, all make the same text
        ids = generate(run.model, encode(args.sample, args.tokens), args, run.device) if needed else None
    if world.is_main:
        untrained = "" if args.steps or args.resume else ", from random weights (no --resume)"
        print(f"\nsample  temperature {SAMPLE['temperature']}, top {SAMPLE['top']}{untrained}")
        print(decode(ids, args.tokens))


@contextlib.contextmanager
def scratch(run):
    """A block in which --offload on a CPU has a folder for its files: in --out, or elsewhere for a dry run."""
    args = run.args
    if args.offload and args.device == "cpu":
        run.scratch = Path(tempfile.mkdtemp() if args.dry_run else args.out, f"offload.{run.world.rank}")
        shutil.rmtree(run.scratch, ignore_errors=True)  # of a run that was killed
        run.scratch.mkdir()
    try:
        yield
    finally:
        if run.scratch:
            shutil.rmtree(run.scratch.parent if args.dry_run else run.scratch, ignore_errors=True)


def run_rank(args):
    """The body of one process of several: what went wrong becomes its exit status, not a traceback."""
    try:
        status = guarded(process, args)
    except RuntimeError as error:
        if "gloo" not in str(error).lower() and "nccl" not in str(error).lower():
            raise
        time.sleep(5)  # the process that failed first speaks; it has ended, so ours is about to be ended, too
        print(f"train.py: rank {os.environ['RANK']} lost the others ({' '.join(str(error).split())[:100]}): go on with "
              "--resume", file=sys.stderr)
        sys.exit(2)
    if status:
        if status != 2:  # all processes end alike; after an error, the others may be inside a collective
            dist.destroy_process_group()
        sys.exit(status)


# Errors, by who can mend them:
#
#     BadInput, OSError           the user: one line, status 2
#     out of memory               the user: one line, with flags that need less
#     Missed                      nobody: the others went on without this worker, which came too late. It ends itself by
#                                 SIGKILL, as only a process that a signal ended is replaced
#     gloo's, NCCL's              whoever was lost says why; this process ends a little later (run_rank)
#     any other                   the programmer: its traceback


def guarded(function, *args):
    """function(*args), with its errors as above."""
    try:
        return function(*args)
    except low_comm.Missed as error:
        args = args[0]
        if not args.torchrun and args.device == "cpu":
            print(f"worker {os.environ['RANK']}: the others have gone on without it: it ends, for another to take its "
                  "place", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"train.py: {error}", file=sys.stderr)
    except (base.BadInput, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        print("train.py: out of memory: use a smaller --batch, the same with more --accum, or see what fits: --fit GIB",
              file=sys.stderr)
    return 2


def launch(argv):
    # Read when CUDA starts. Segments that cannot grow lose up to 4 % of a full card to pieces too small to be used.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    args = parse(argv)
    if only_planned(args):
        return print_fits(args)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    writes = args.steps and not args.dry_run and (not args.torchrun or os.environ["RANK"] == "0")
    if writes:
        try:  # now rather than when there is something to lose
            Path(args.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise base.BadInput(f"--out {args.out}: {error.strerror}: name a directory that can be written") from None
    with locked(args.out) if writes else contextlib.nullcontext():
        return start(args)


def start(args):
    """The processes that these flags ask for, or this one's part under torchrun; the exit status."""
    if args.torchrun:
        parallel.join_group(args.device)
        seen = not args.steps or args.dry_run or Path(args.out).is_dir()  # which rank 0 has made
        base.refuse((not World(args.device, SimpleNamespace(tp=1)).smallest(int(seen)),
                     f"--out {args.out}: a machine does not see the directory that another has made there: name one "
                     "that all of them share"))
        run_rank(args)  # other machines' torchruns do not end this process when theirs is lost
        dist.destroy_process_group()
        return 0
    if args.gpus == 1:
        return process(args)
    apart = args.sync in low_comm.METHODS
    grace = 600 if apart else 30  # seconds to stop in: workers apart stop after a round
    spare = args.gpus - 1 if args.device == "cpu" and apart and args.tp == 1 else 0
    if args.batch is not None:
        check_batch(args)
    load_data(args)  # what is wrong with the data is said once, before any process
    try:
        lost = parallel.spawn(run_rank, args.gpus, args.device, (args,), grace=grace, spare=spare, replace=True)
        if lost:
            print(f"train.py: process(es) {lost} were lost, the others went on", file=sys.stderr)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code >= 0:
            return error.exit_code  # the process has said why
        go_on = f"go on with: {resume_command(args)}" if checkpoint_files(args.out) else "there is no checkpoint yet"
        print(f"train.py: process {error.error_index} was ended by signal {-error.exit_code}; {go_on}", file=sys.stderr)
        return 128 - error.exit_code
    return 0


def main(argv=None):
    """The program; returns its exit status: 0, 1 (diverged), 2 (bad input), 128 + signal (saved, if training)."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal's encoding lacks
    try:
        return guarded(launch, argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
