"""train.py - train a small GPT on real text, without a logits tensor, on any machine.

    python train.py                              a byte-level GPT in a minute or two on a CPU; GPT-2 small on a GPU
    python train.py --gpus 2                     two GPUs of this machine;   --device cpu --gpus 2: two CPU processes
    torchrun --nproc-per-node 8 -- train.py      the same under torchrun, also over several machines
    python train.py --resume                     go on after Ctrl-C, SIGTERM or a power cut
    python train.py --steps 0 --resume --sample "def "                         only generate
    python train.py --data "data/*.bin" --val val.bin --vocab 50304            your own tokens
    python train.py --dry-run --batch 64         three steps, nothing kept: does it fit, how fast is it, what takes room

What it shows
    The model ends in embeddings E (N, D). Its loss goes through 02's cut cross-entropy, so the (N, V) logits of the
    last layer never exist: doubling the vocabulary costs parameters, not activations. Its gradient is
    --loss cce: sparse (03, one pass over the logits) in steps where it is estimated to be within 2 %, else exact (the
    default where 03's kernels run); cce-exact: exact (the default elsewhere); cce-sparse: sparse wherever its entries
    fit; reference: of the materialised loss, for comparison.
    --rule says which step: muon (04, the default) for the layers' matrices, at --muon-lr, with AdamW for embedding,
    classifier, norms and routers, at --lr; adamw for all; or adam-mini for all matrices, AdamW for norms and routers.
    Muon divides by the gradient's own size and is not clipped by default. The others are, at 1: a batch of odd text can
    have a gradient many times as long as its neighbours'.
    --optimizer says when: forge-cce (04, the default): every matrix is updated inside backward, the classifier in the
    loss itself, so that of all matrices' gradients one is there at a time. --clip, --accum and --on-nan skip need the
    norm or the sum of all gradients first: until that is known each matrix keeps the factors of its gradient (04), or
    the gradient itself where that is smaller. forge: so the layers' matrices alone; ordinary: after backward, from
    gradients that are all kept (the default with --accum, and of several processes with --sync ddp). --states says in
    what precision forged weights and moments are kept.
    --sync diloco (06, the default of several processes): each is a worker that trains alone for --inner-steps steps and
    then sends how far it came; no gradient is ever summed, so forge works. The other methods of 06 send less, or later,
    or to fewer. Validation, sample and checkpointed model are the weights that the workers agree on; a step's loss is
    one worker's. On CPUs (gloo), with --gpus, a worker may be killed: the others go on, and a new one takes its place.
    ddp: gradients are summed each step, before an ordinary one.
    --moe E (07): E experts in place of each MLP, each token through its best --top-k, of a width at which it meets as
    many weights as in the dense model. --balance keeps their loads alike. With --sync ddp the experts are spread over
    the processes (--ep-policy); under any other --sync each process has all of them.
    --tp K (05): a worker is K neighbouring processes, each with a part of every matrix, of the classes too, and all of
    the worker's tokens; the loss is then cce-exact. Works under every --sync; experts are not cut so.
    --compile (05's lean(), the default on GPUs): one kernel each for what lies between matrices, and norms and
    activations are made again in backward instead of kept. --recompute and --offload leave less in memory for backward:
    each layer's input, from which it runs again; or all of it elsewhere. --plan LINK names the flags that train this
    model best on --gpus GPUs, present or not; --fit GIB what one card of that size can train, and with --dry-run it
    allows no more memory than that card has. Large models: no gradient is kept (--clip 0, one micro-batch), of one
    moment 8 bits (--states int8): 3.03 bytes a parameter, also while the model is made.

What happens to real runs
    A checkpoint is whole or absent, and the last two are kept. One run at a time writes into --out. A loss, a gradient
    or weights that are not finite end the run before they are saved, or with --on-nan skip the step is left out. Data
    that changes under the run, a full disk and a killed process end it with one line that says how to go on; what is
    lost are the steps since the last checkpoint (--save-every).

What stays the same whatever the number of processes
    --batch counts the sequences of one step over ALL processes and micro-batches. Sequence i of step s is number
    s * batch + i of a shuffled order that depends on --seed alone, so with the same --batch, --accum only cuts the
    same step into parts, and so do, with --sync ddp, --gpus and --tp: the losses agree to rounding. (Sparse gradients
    agree to their error; --balance micro is about each process's own tokens.) The position in the data is the step
    number.
    (Without --batch, a GPU run takes up to 64 sequences a process, so there two GPUs take larger steps than one.)

Defaults come from --preset, and that from the device. Checkpoints restore the flags they were made with, except those
that belong to one launch (--device, --gpus, --tp, --compile, --recompute, --offload, --ep-policy, --log, --sample). A
flag given beside --resume wins, unless it would change the model, which is refused. A resumed run ends with the weights
of one that was never stopped, bit for bit on one CPU process, and on one GPU with --deterministic.
"""

import argparse
import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
low_comm = importlib.import_module("06_low_comm_sync")
mixture = importlib.import_module("07_moe_balance")
MIB = base.MIB

# lr: AdamW's with --rule adamw (and Adam-mini's), and with muon, where the layers' matrices do not need it to be small.
# The first steps of AdamW move all K elements of a row by the rate, together, and an output by K times that; and the
# layers push the stream the same way, which they only write to. So the rate shrinks at least as 1 / (width x depth): at
# twice this one a first step of 7b raised its loss from 11.9 to 16.5, of 30b from 12.4 to 19.2. A step of Muon has
# singular values of 1: a layer's outputs move by the rate, whatever its width. Only tables are AdamW's then: 1 / width.
# batch None: the largest power of two, up to 64 sequences a process, whose predicted memory fits what is free.
PRESETS = {
    "cpu": dict(layers=4, dim=128, heads=4, seq=128, batch=8, steps=400, tokens="bytes",
                lr=dict(adamw=3e-3, muon=3e-3)),
    "gpt2-small": dict(layers=12, dim=768, heads=12, seq=1024, batch=None, steps=300, tokens="bigrams",
                       lr=dict(adamw=1e-3, muon=4e-3)),
    "gpt2-medium": dict(layers=24, dim=1024, heads=16, seq=1024, batch=None, steps=300, tokens="bigrams",
                        lr=dict(adamw=6e-4, muon=4e-3)),
    "1b": dict(layers=16, dim=2048, heads=16, seq=1024, batch=None, steps=300, tokens="bigrams",
               lr=dict(adamw=3e-4, muon=1.5e-3)),
    "7b": dict(layers=32, dim=4096, heads=32, seq=1024, batch=None, steps=300, tokens="bigrams",
               lr=dict(adamw=5e-5, muon=7e-4)),
    "30b": dict(layers=48, dim=7168, heads=56, seq=1024, batch=None, steps=300, tokens="bigrams",
                lr=dict(adamw=1e-5, muon=4e-4)),
}
MODEL_FLAGS = ("preset", "layers", "dim", "heads", "seq", "vocab", "tokens")  # fixed by a checkpoint,
STATE_FLAGS = ("rule", "optimizer", "states", "sync", "inner_steps", "outer", "moe", "top_k")  # as are these
BETAS, WEIGHT_DECAY, MIN_LR = (0.9, 0.95), 0.1, 0.1  # AdamW; the cosine ends at a tenth of the peak rate
MUON_LR = 0.02  # peak rate, of any width
BALANCE, BIAS_RATE = 3e-2, 3e-3  # of experts: the loss's coefficient, a bias's step; large ones, for short runs
# Steps, also in short runs: AdamW's second moment averages 20, and a full rate before that makes it spike. Where the
# layers have Muon a slow start only keeps large gradients for longer.
WARMUP = {"adamw": 50, "adam-mini": 50, "muon": 20}
SKIPS = 5  # steps that --on-nan skip leaves out in a row before it gives up
PATIENCE = 300  # seconds until workers apart go on without one that says nothing
KEEP = 2  # checkpoints on disk: if the newest is damaged, the one before it is tried


# ==== 1. Data: shards of tokens, read by memory map; a batch is a function of the step ================================

SHARD_FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # (magic, version) of llm.c's files
HEADER_BYTES = 256 * 4


def open_shard(path, tokens):
    """A file as a read-only array of tokens. .txt: bytes or bigrams; .bin: llm.c's header, or raw uint16 (nanoGPT)."""
    size = os.path.getsize(path)
    if Path(path).suffix == ".txt":
        dtype, offset, count = np.dtype("u1" if tokens == "bytes" else "<u2"), 0, None
    elif Path(path).suffix == ".bin":
        header = np.fromfile(path, "<i4", 256)
        magic, version, count = (*map(int, header[:3]), 0, 0, 0)[:3]
        # A header is 256 numbers, nearly all of them 0; a KiB of nanoGPT's tokens is not.
        sparse = len(header) == 256 and magic > 0 and np.count_nonzero(header) < 32
        if sparse or magic in {known for known, _ in SHARD_FORMATS}:
            if (magic, version) not in SHARD_FORMATS:
                known = " or ".join(f"{m} version {v}" for m, v in SHARD_FORMATS)
                raise base.BadInput(f"{path}: magic {magic} version {version} is unknown: use {known}, or raw uint16")
            if size < HEADER_BYTES or count < 0:
                raise base.BadInput(f"{path}: {size} bytes with a count of {count} are no whole header: it is "
                                    "truncated")
            dtype, offset = SHARD_FORMATS[magic, version], HEADER_BYTES
        else:
            dtype, offset, count = np.dtype("<u2"), 0, None
            if size % 2:
                raise base.BadInput(f"{path}: {size} bytes are no whole number of uint16 tokens: the file is truncated")
    else:
        raise base.BadInput(f"{path}: unknown kind of file: use .txt, or .bin with uint16 tokens or llm.c's header")
    present = (size - offset) // dtype.itemsize
    if count is not None and present < count:
        raise base.BadInput(f"{path}: its header promises {count} tokens, the file holds {present}: it is truncated")
    count = present if count is None else count
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def check_vocabulary(tokens, vocab, name):
    """ValueError when one of these tokens is no class."""
    if len(tokens) and int(tokens.max()) >= vocab:
        top = int(tokens.max())
        raise base.BadInput(f"{name}: token {top} is outside the vocabulary of {vocab}: pass --vocab {top + 1} or more")


class Tokens:
    """Windows of seq + 1 tokens over a list of arrays, read when asked for; each window lies in one shard."""

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

    def shuffled(self, start, count, seed):
        """Window numbers of sequences start ... start + count - 1 of an endless run of epochs, each shuffled anew."""
        result = []
        for i in range(start, start + count):
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
        """ValueError if a file is not what it was when the run began. A memory map of one that has become shorter would
        end the process without a word."""
        for name, stamp in self.stamps.items():
            now = stamp_of(name) if os.path.exists(name) else (-1, 0)
            if now == stamp:
                continue
            if now[0] < stamp[0] or fingerprint(self.train.shards + self.val.shards) != self.digest:
                raise base.BadInput(f"{name}: was changed while it was trained on: put it back as it was and go on "
                                    "with --resume, or start anew with another --out")
            self.stamps[name] = now


def stamp_of(path):
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def expand(pattern):
    """Files that a path or a glob names, sorted."""
    files = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern] * os.path.isfile(pattern)
    if not files:
        raise base.BadInput(f"{pattern}: no such file: check the path (quote a glob: --data 'dir/*.bin')")
    return files


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


def load_data(args, packages):
    """Training and validation windows by the flags. Without --val, 1 % of the tokens are held out. ValueError on data
    that cannot be used, or that a resumed run was not trained on."""
    if args.data is None:
        text = filtering.corpus(args.tokens, packages)
        names, shards, val_names, val_shards = ["corpus"], [text.train], ["corpus"], [text.val]
        bytes_per_token, origin = text.bytes_per_token, text.origin
    else:
        names = expand(args.data)
        if len({Path(name).suffix for name in names}) > 1:
            raise base.BadInput(f"{args.data}: names files of several kinds: use .txt or .bin, not both")
        shards = [open_shard(name, args.tokens) for name in names]
        bytes_per_token = {"bytes": 1, "bigrams": 2}[args.tokens] if has_text(args) else None
        origin = f"{len(names)} file(s) of {args.data}"
        if args.val is not None:
            val_names = expand(args.val)
            val_shards = [open_shard(name, args.tokens) for name in val_names]
        else:  # the tail of the longest shard, whole windows
            i = max(range(len(shards)), key=lambda i: len(shards[i]))
            held = min(sum(map(len, shards)) // 100, len(shards[i]) // 2)
            held = max(1, held // args.seq) * args.seq + 1
            val_names, val_shards = names[i : i + 1], [shards[i][-held:]]
            shards[i] = shards[i][:-held]
    for what, group in (("training", shards), ("validation", val_shards)):
        if max(map(len, group)) <= args.seq:
            raise base.BadInput(
                f"{origin}: the {what} part has at most {max(map(len, group))} tokens in a file, one sequence needs "
                f"{args.seq + 1}: pass more data or a smaller --seq"
            )
    for name, shard in zip(names + val_names, shards + val_shards, strict=True):
        if shard.nbytes <= 256 * MIB:  # a look at every token of larger shards would take longer than it is worth here
            check_vocabulary(shard, args.vocab, name)
    train, val = Tokens(names, shards, args.seq, args.vocab), Tokens(val_names, val_shards, args.seq, args.vocab)
    if args.ep_policy and len(val) < args.processes:
        raise base.BadInput(f"{origin}: validation has {len(val)} window(s) of {args.seq} tokens, {args.processes} "
                            "processes that share experts need one each: pass more with --val, or a smaller --seq")
    digest = fingerprint(shards + val_shards)
    if args.data_digest not in (None, digest):
        raise base.BadInput(
            f"the data's hash is {digest}, the checkpoint was trained on {args.data_digest}: pass the same --data (the "
            "embedded corpus changes with the Python version and the packages), or start anew with --out"
        )
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
    if tokens == "bigrams":
        return np.frombuffer(b"\n" * (len(raw) % 2) + raw, "<u2").tolist()
    return list(raw)


def decode(ids, tokens):
    """list of tokens -> str, undecodable bytes replaced."""
    return np.array(ids, "u1" if tokens == "bytes" else "<u2").tobytes().decode(errors="replace")


# ==== 2. The step: loss, gradient, update =============================================================================


class World:
    """This process's place among all of them. One process is a world of its own, without torch.distributed.

    A worker is one process, or `tp` neighbours that share a model's matrices and see the same tokens: the group `tp`,
    of which this process is number `place`. seat: the number by which a worker takes its share of a step's sequences:
    its own, or, of a late one, started in the place of a worker that was killed, that one's. data: the processes, one a
    worker, that have the same part of the model. parts: the group over which parameters with a `cut` (05, 07) are
    spread: `tp`, or for experts everybody; else None. sync: 06's Sync of workers that train apart, who may get fewer;
    else None. balance: 07's Balance, else None. scratch: the folder of --offload on a CPU, else None."""

    def __init__(self, device, tp=1):
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        joined = dist.is_available() and dist.is_initialized()
        self.late = not joined and rank >= size
        self.rank, self.size = (rank, size) if joined or self.late else (0, 1)
        self.worker, self.place, self.workers = self.rank // tp, self.rank % tp, self.size // tp
        self.seat = int(os.environ["LOCAL_RANK"]) if self.late else self.worker
        groups = parallel.make_groups(dp=self.workers, tp=tp) if tp > 1 else None
        self.tp, self.data = (groups.tp, groups.dp) if groups else (None, None)
        self.device, self.parts, self.sync, self.balance, self.scratch = device, self.tp, None, None, None

    @property
    def members(self):
        """Workers at work."""
        return self.sync.transport.members if self.sync else tuple(range(self.workers))

    @property
    def main(self):
        """Whether this process speaks and saves for all."""
        return self.members[:1] == (self.worker,) and self.place == 0

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


def make_config(args):
    """The shape of the model."""
    shape = args.vocab, args.seq, args.layers, args.heads, args.dim
    return mixture.GPTConfig(*shape, args.moe, args.top_k) if args.moe else base.GPTConfig(*shape)


FORGED = {"cce": "auto", "cce-exact": "exact", "cce-sparse": "sparse"}  # losses whose classifier can be forged
LOSSES = {name: functools.partial(filtering.linear_cross_entropy, gradient=how) for name, how in FORGED.items()}
LOSSES["reference"] = base.linear_cross_entropy_reference
DECIDING = ("cce", "cce-sparse")  # have statistics of what they decided
CANDIDATES = 32  # entries of the tail that a row lists, for the prediction of memory
# What the cut losses may take on a GPU beyond dE and dC. A few per cent of a step's memory; with it the gradient goes
# over tokens and saves a matrix pass. On a CPU (None) their blocks are as large as its cache.
LOSS_WORKSPACE = {"cuda": 768 * MIB, "cpu": None}


def loss_sum(model, x, y, args, stats):
    """Summed loss of the tokens y (B, T), predicted from x (B, T). stats: a SparseStats of 03, for the losses that
    decide how to make their gradient. With --optimizer forge-cce, Optimizer has left the classifier's State in `head`,
    and backward takes its step."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
        E, head, loss = model(x), getattr(model, "head", None), LOSSES[args.loss]  # (B, T, D)
        options = {} if args.loss == "reference" else dict(workspace=LOSS_WORKSPACE[x.device.type])
        options |= dict(stats=stats) if args.loss in DECIDING else {}
        if head is not None:
            loss = functools.partial(forging.forge_classifier, state=head, gradient=FORGED[args.loss])
        if getattr(model, "group", None):  # this process has a part of the classes
            options |= dict(group=model.group, vocab=args.vocab, loss=loss)
            loss = parallel.vocab_parallel_cross_entropy
        return loss(E, model.classifier, y, reduction="sum", **options)


@contextlib.contextmanager
def scratch(args, world):
    """A block in which --offload on a CPU has a folder for its files: in --out, or elsewhere for a dry run."""
    if args.offload and args.device == "cpu":
        world.scratch = Path(tempfile.mkdtemp() if args.dry_run else args.out, f"offload.{world.rank}")
        shutil.rmtree(world.scratch, ignore_errors=True)  # of a run that was killed
        world.scratch.mkdir()
    try:
        yield
    finally:
        if world.scratch:
            shutil.rmtree(world.scratch.parent if args.dry_run else world.scratch, ignore_errors=True)


def cut_dtype(args):
    return torch.bfloat16 if args.dtype == "bf16" else torch.float32


def loss_plan(N, V, D, args, device):
    """02's plan for the exact gradient of one micro-batch."""
    kernels, orders = has_kernels(device), ["vocabulary"]
    if args.optimizer != "forge-cce":  # which makes a slice of dC at a time
        orders = ["kept"] * kernels + ["tokens"] * (args.tp == 1) + orders
    return cce.gradient_plan(
        N, V // args.tp, D, device, cut_dtype(args), LOSS_WORKSPACE[device.type], orders=orders, kernels=kernels
    )


def has_kernels(device):
    """Whether Triton's kernels run there. A GPU that is not present, of --plan, is taken for one with all of them."""
    present = torch.cuda.is_available()
    return device.type == "cuda" and (not present or base.HAS_TRITON and not base.INTERPRETED)


def fetches(device, D, args):
    """Whether Hopper's kernels run: 02's v4, and those of 03."""
    hopper = has_kernels(device) and (not torch.cuda.is_available() or cce.is_hopper(device))
    return hopper and args.dtype == "bf16" and D % 8 == 0


def share(count, world, accum, micro):
    """Which of a step's `count` sequences this worker takes in micro-batch `micro`."""
    size = count // (world.workers * accum)
    start = (micro * world.workers + world.seat) * size  # a micro-batch is the same whatever the number of workers
    return range(start, start + size)


class Feed:
    """Micro-batches of this worker, in order. The next one is read from the disk and sent while the device still has
    the backward pass of this one to do."""

    def __init__(self, data, world, args, device):
        self.data, self.world, self.args, self.device, self.ready = data, world, args, device, {}

    def read(self, step, micro):
        """Inputs and targets (B, T), on the device."""
        self.data.check()
        order = self.data.train.shuffled(step * self.args.batch, self.args.batch, self.args.seed)
        x, y = self.data.train.windows([order[i] for i in share(self.args.batch, self.world, self.args.accum, micro)])
        if self.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def take(self, step, micro):
        return self.ready.pop((step, micro), None) or self.read(step, micro)

    def prepare(self, step, micro):
        """What comes after this micro-batch; not after the last step."""
        following = (step, micro + 1) if micro + 1 < self.args.accum else (step + 1, 0)
        if following[0] < self.args.steps:
            self.ready = {following: self.read(*following)}


def allocated(device):
    """Bytes of tensors alive on a GPU; NaN elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else math.nan


def accumulate_gradients(model, feed, step, world, args, device, stats, alive):
    """Fill .grad with the gradient of the mean loss over the step's tokens, summed over micro-batches and, with --sync
    ddp, processes; otherwise the tokens are those of this process.

    Each part divides its SUM by the tokens of the whole step, so parts add up whatever their size. Returns the part of
    the mean loss that this process saw, and notes in `alive` the bytes before the first forward pass and after it, and
    after the last backward pass."""
    alive["before"], total = allocated(device), torch.zeros((), device=device)
    tokens = args.batch * args.seq // (1 if args.sync == "ddp" else world.workers)
    for micro in range(args.accum):
        x, y = feed.take(step, micro)
        offload = parallel.Offload(model, world.scratch) if args.offload else None
        with offload or contextlib.nullcontext():
            loss = loss_sum(model, x, y, args, stats) / tokens
            total += loss.detach()
            if world.balance:  # a mean over x, of which the step's mean gets its share
                loss = loss + world.balance.loss() * (x.numel() / tokens)
        alive["forward"] = allocated(device) if micro == 0 else alive["forward"]
        loss.backward()
        del loss
        if offload:
            offload.close()
        feed.prepare(step, micro)
    alive["backward"] = allocated(device)
    if args.sync == "ddp":
        all_reduce_gradients(model, world)
    return total


def all_reduce_gradients(model, world):
    """Data parallelism: every worker gets the sum of all gradients, hence makes the same update. Those of experts that
    are spread over the processes are sums already."""
    if world.workers > 1:
        experts = world.parts is not world.tp  # what is spread are they
        world.sum(*(p.grad for p in model.parameters() if not (experts and spread(p))), group=world.data)


def check_replicas(model, world):
    """ConnectionError unless the workers of --sync ddp still have the same weights, bit for bit: each makes every step
    for itself, and a GPU that computes wrongly would go its own way."""
    total, experts = 0, world.parts is not world.tp
    for p in model.parameters():
        if not (experts and spread(p)):
            total = zlib.crc32(p.detach().cpu().view(-1).view(torch.uint8).numpy(), total)
    ends = torch.tensor([total, -total], dtype=torch.float64, device=world.device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=world.data)
    if ends.sum():
        raise ConnectionError("the processes of --sync ddp have come to different weights: nothing was saved; go on "
                              "from the checkpoint before with --resume, on other hardware if it happens again")


def spread(p):
    """Whether this process has a part of the parameter only: an equal one of its dimension p.cut."""
    return hasattr(p, "cut")


ADAMW, MUON = forging.AdamW(BETAS, 1e-8, WEIGHT_DECAY), forging.Muon(weight_decay=0.005)  # 0.005 x 0.02, 0.1 x 0.001
MINI = forging.AdamMini(BETAS, 1e-8, WEIGHT_DECAY)
LAYERS, TABLES = ("qkv.weight", "proj.weight", "up.weight", "down.weight"), ("embedding.weight", "classifier")


def rules_of(args):
    """(rule of the layers' matrices, rule of embedding and classifier). Routers are matrices, too, but always AdamW's,
    as are norms. The rows of tables are tokens, which nothing should make orthogonal: with Muon they are AdamW's."""
    layers = {"muon": MUON, "adam-mini": MINI, "adamw": ADAMW}[args.rule]
    return layers, MINI if args.rule == "adam-mini" and args.optimizer != "forge" else ADAMW


def matrices_with_rules(model, args):
    """{name: parameter}, {name: rule} of the matrices whose rule is not AdamW."""
    layers, tables = rules_of(args)
    rules = {name: layers if name.endswith(LAYERS) else tables for name, _ in model.named_parameters()
             if name.endswith(LAYERS) or name in TABLES}
    rules = {name: rule for name, rule in rules.items() if rule != ADAMW}
    return {name: model.get_parameter(name) for name in rules}, rules


class Optimizer:
    """The rules for every parameter, AdamW's decay on matrices only. With --optimizer forge the step of the layers'
    matrices is 04's, inside the backward pass that follows begin(), with forge-cce also embedding's and classifier's;
    where it waits() for all of a gradient, in finish(). The rest of AdamW is torch's, in finish(), where an ordinary
    Muon steps, too. group: over which parameters with a `cut` are spread. origins: {name: first element} of what tensor
    parallelism cut."""

    def __init__(self, model, args, group=None, origins=None):
        self.forged, self.group, model.head = None, group, None
        others, rules = matrices_with_rules(model, args)
        options = dict(rules=rules, seed=args.seed)
        if args.tp > 1:  # experts that are spread are whole
            options |= dict(ranks={name: parallel.ranks_of(p, group) for name, p in others.items()})
        self.inside = args.optimizer != "ordinary"
        if self.inside:
            whole = dict(embeddings=True, classifier="classifier") if args.optimizer == "forge-cce" else {}
            origins = {name: place for name, place in (origins or {}).items() if whole or name.startswith("blocks")}
            summed = args.processes // args.tp if args.sync == "ddp" else 1  # had to be, if several: 04 refuses
            self.forged = forging.forge(model, ADAMW, args.states, data_parallel=summed, origins=origins, **whole,
                                        **options)
            model.head = self.forged["classifier"] if whole else None
            if whole:  # the stream is in fp32, whatever the embedding was born in
                self.forged["embedding.weight"].dtype = torch.float32
        elif others:
            experts = {name: model.get_submodule(name.rpartition(".")[0]) for name in others}
            experts = {name: module.experts for name, module in experts.items() if hasattr(module, "experts")}
            self.forged = forging.Forge(others, ADAMW, data_parallel=1, matrices=experts, **options)
        stepped = self.forged.states if self.forged else {}
        rest = {name: p for name, p in model.named_parameters() if name not in stepped}
        self.parameters = list((rest if self.inside else dict(model.named_parameters())).values())  # have a .grad
        decayed, not_decayed = ([p for p in rest.values() if (p.dim() >= 2) == wanted] for wanted in (True, False))
        groups = [dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=not_decayed, weight_decay=0.0)]
        self.ordinary = torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, fused=True)  # one kernel, no temporaries
        self.clip, self.waits, self.device = args.clip, waits(args), next(model.parameters()).device
        self.skips, self.peaks = args.on_nan == "skip", {ADAMW: args.lr, MINI: args.lr, MUON: args.muon_lr or 0.0}

    def begin(self, step, share):
        """What the backward passes that follow belong to: step 1, 2, ... at this share of the peak rates."""
        rates = {rule: peak * share for rule, peak in self.peaks.items()}
        self.at = rates, step
        for group in self.ordinary.param_groups:
            group["lr"] = rates[ADAMW]
        if self.waits:
            self.forged.stash()
        elif self.inside:
            self.forged.arm(rates, step)

    def finish(self, norm, *values):
        """The rest of the step, after all gradients, whose norm this is. Returns 03's Readback of `values`, tensors of
        one number, and of the norm: its copy starts before the weights are written (those that were stepped inside
        backward are by then). With --on-nan skip, which waits for it, nothing is written if a number is not finite:
        `taken`."""
        reading = filtering.Readback(torch.stack([v.detach().double() for v in (*values, norm)]))
        self.taken = not self.skips or all(map(math.isfinite, reading.read()))
        if self.taken:
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
        return reading

    def norm(self):
        """Of the whole model's gradient, fp64: what is spread counts with its other parts, all else once."""
        zero = torch.zeros((), device=self.device)  # torch's norm of nothing is on the CPU: its copy would wait
        own, common = [zero], [zero]
        for p in self.parameters:
            if p.grad is not None:
                (own if spread(p) else common).append(p.grad)
        own, common = (torch.nn.utils.get_total_norm(gradients).double() for gradients in (own, common))
        if self.inside:  # where anything is spread, all of these are
            forged = self.forged.norm() if self.waits else self.forged.gradient_norms().norm()
            own = torch.stack((own, forged)).norm()
        return torch.stack((self.over_parts(own), common)).norm()

    def over_parts(self, norm):
        """The norm of what is spread over the group, of which this process's part has this one."""
        return parallel.all_reduce(norm**2, self.group).sqrt() if self.group else norm

    def states(self, state, change):
        """torch's state {number of a parameter: tensors}, with change(tensor, parameter) made of each matrix."""
        parameters = [p for group in self.ordinary.param_groups for p in group["params"]]
        return {i: {k: change(v, parameters[i]) if v.dim() else v for k, v in tensors.items()}
                for i, tensors in state.items()}

    def forged_states(self, saved, change):
        """04's state, with change(tensor, weight) made of each tensor: all are cut where their weight is."""
        weights = {name: state.weight for name, state in self.forged.states.items()}
        return saved | dict(weights={name: {key: change(t, weights.get(name)) for key, t in tensors.items()}
                                     for name, tensors in saved["weights"].items()})

    def state_dict(self, whole=True):
        """The same whatever the number of processes: what is spread is collected; all processes call it. Not `whole`:
        this process's part."""
        change = functools.partial(collected, group=self.group if whole else None)
        ordinary = self.states(self.ordinary.state_dict()["state"], change)
        return dict(ordinary=ordinary, forged=self.forged and self.forged_states(self.forged.state_dict(), change))

    def load_state_dict(self, saved, whole=True):
        """The state of torch's AdamW follows the order of its parameters."""
        groups = self.ordinary.state_dict()["param_groups"]
        part = functools.partial(own_part, group=self.group if whole else None)
        self.ordinary.load_state_dict(dict(state=self.states(saved["ordinary"], part), param_groups=groups))
        if self.forged:
            self.forged.load_state_dict(self.forged_states(saved["forged"], part))


def parted(tensor, p):
    """Whether this process has a part only of a tensor that belongs to p; not of what goes by rows (04's row_v) where
    p's columns are cut."""
    return spread(p) and p.cut < tensor.dim()


def collected(tensor, p, group):
    """All of a tensor like p, of which each process of the group has a part: on the host (devices may lack the room for
    whole models) of the first process."""
    if not parted(tensor, p):
        return tensor
    whole = parallel.gather(tensor.detach(), group, p.cut)
    return whole.cpu() if parallel.rank_in(group) == 0 else tensor


def own_part(tensor, p, group):
    """This process's part of a whole tensor like p."""
    if not parted(tensor, p):
        return tensor
    return tensor.chunk(parallel.size(group), p.cut)[parallel.rank_in(group)].clone()


def sync_method(args):
    """06's Method, with the flags applied; None where workers do not synchronise now and then."""
    if args.sync not in low_comm.METHODS:
        return None
    method = low_comm.METHODS[args.sync]
    if args.inner_steps:
        method = dataclasses.replace(method, H=args.inner_steps)
    if args.outer:
        lr, momentum = args.outer
        method = dataclasses.replace(method, outer=dataclasses.replace(method.outer, lr=lr, momentum=momentum))
    return method


def waits(args):
    """Whether forged steps wait for the end of all backward passes of a step."""
    return args.optimizer != "ordinary" and (args.clip > 0 or args.accum > 1 or args.on_nan == "skip")


def schedule(step, args):
    """The share of the peak rates: linear warm-up, then a cosine down to MIN_LR."""
    warm_up = WARMUP[args.rule]
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, args.steps - warm_up)
    return MIN_LR + (1 - MIN_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def validate(model, data, world, args, device):
    """Mean loss over a fixed set: the first windows of the validation part, up to 65,536 tokens (1 Mi on a GPU)."""
    count = min(len(data.val), max(1, (1 << 20 if device.type == "cuda" else 1 << 16) // args.seq))
    if args.ep_policy:  # all processes have to come to each exchange, with as many windows
        count = max(1, count // world.size) * world.size
    size = max(1, args.batch // (world.workers * args.accum))
    mine = range(count)[world.members.index(world.worker) :: len(world.members)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    data.check()
    for start in range(0, len(mine), size):
        x, y = data.val.windows(mine[start : start + size])
        total += loss_sum(model, x.to(device), y.to(device), args, filtering.SparseStats())
    total, windows = world.totals(total.item(), len(mine))
    return total / (windows * args.seq)


@torch.no_grad()
def generate(model, prompt, args, device):
    """Append --sample-tokens sampled tokens to the prompt. Sampling needs ONE row of logits, so here they are made."""
    ids = list(prompt)
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.sample_tokens):
        context = ids[-model.config.seq :]
        # Of few lengths, as a GPU's attention library takes tens of milliseconds to plan for each new one. No position
        # sees what comes after it.
        padding = min(-len(context) % 64, model.config.seq - len(context))
        x = torch.tensor([context + [0] * padding], device=device)  # (1, T)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
            E = model(x)[0, len(context) - 1]  # (D,)
            logits = E @ model.classifier.T.to(E.dtype)  # (V,), or of this process's classes
            logits = parallel.gather(logits, getattr(model, "group", None), 0).float().cpu()
        best, index = (logits / max(args.temperature, 1e-6)).topk(min(args.sample_top, len(logits)))
        ids.append(index[torch.multinomial(best.softmax(0), 1, generator=generator)].item())
    return ids


# ==== 3. Memory, before it is used ====================================================================================


class Shape(NamedTuple):
    """Matrices (M, K) of a layer: how many there are, and how many of them a token meets."""

    M: int
    K: int
    count: int = 1
    met: int = 1


def layer_shapes(config, tp=1):
    """Shapes of the matrices of all layers that a forged step can be taken of, as one of `tp` processes has them."""
    D = config.dim
    mlp = [Shape(4 * D // tp, D), Shape(D, 4 * D // tp)]
    if isinstance(config, mixture.GPTConfig):
        F, sizes = config.width(), (config.experts, config.top_k)
        mlp = [Shape(F, D, *sizes), Shape(D, F, *sizes)]
    return [Shape(3 * D // tp, D), Shape(D, D // tp), *mlp] * config.layers


def matrix_elements(config, tp=1):
    return sum(s.M * s.K * s.count for s in layer_shapes(config, tp))


def factor_sizes(config, tokens, args):
    """Bytes of what forged weights hold until all of a step's tokens were seen: of the layers' factors, of the same as
    gradients, of what is kept (for each weight the smaller), and that of embedding and classifier, if forged."""
    size = cut_dtype(args).itemsize
    pairs = [(forging.stash_bytes([(s.M, s.K)], tokens * s.met, size), 4 * s.M * s.K * s.count)
             for s in layer_shapes(config, args.tp)]
    table, lists = 4 * config.vocab // args.tp * config.dim, 4 * tokens + 4 * args.accum * (config.vocab + 1)
    tables = min(4 * tokens * config.dim + lists, table) + held_for_classifier(config, tokens, args)
    factors, gradients = (sum(column) for column in zip(*pairs, strict=True))
    return factors, gradients, sum(map(min, pairs)), tables if args.optimizer == "forge-cce" else 0


def held_for_classifier(config, tokens, args):
    """Bytes of what a forged classifier holds until all of a step's tokens were seen: its gradient in fp32; or E and
    targets, if those are enough smaller."""
    gradient, factors = 4 * config.vocab // args.tp * config.dim, (cut_dtype(args).itemsize * config.dim + 20) * tokens
    return factors if forging.CLASSIFIER_PRICE * factors <= gradient else gradient


def predict_memory(config, batch, accum, args, device, processes=1):
    """Bytes by category for one process that puts `batch` sequences through the model at a time, and their peak."""
    N, V, D, tp = batch * config.seq, config.vocab // args.tp, config.dim, args.tp
    cuda, autocast, both = device.type == "cuda", args.dtype == "bf16", args.optimizer == "forge-cce"
    if args.moe and args.sync == "ddp":  # a process has a part of the experts
        config = dataclasses.replace(config, experts=config.experts // processes)
    layers = matrix_elements(config, tp)
    uncut = config.parameters() - matrix_elements(config) - 2 * config.vocab * D  # norms, routers
    forged = (layers if args.optimizer != "ordinary" else 0) + (2 * V * D if both else 0)
    others = layers + 2 * V * D + uncut - forged
    weight, (rule, table_rule), muon = forging.LAYOUTS[args.states].weight.itemsize, rules_of(args), args.rule == "muon"
    states = layers * forging.state_bytes(rule, args.states)
    states += 2 * V * D * forging.state_bytes(table_rule, args.states if both else "fp32") + 8 * uncut
    # Of the forged weights' gradients one layer's is alive, or a slab of it, which is kept from step to step.
    rung = "auto" if has_kernels(device) else "hook"
    mini = args.rule == "adam-mini" and rung == "auto"  # has slabs also where gradients are kept
    plans = [forging.plan_step(rule, s.M * s.count if muon else s.M, s.K, N * s.met // s.count, args.states, rung,
                               matrices=s.count) for s in layer_shapes(config, tp)]
    layer = max(plan.bytes for plan in plans)
    rows = forging.plan_step(table_rule, V, D, 0, args.states)
    layer = max(layer, rows.bytes if both else 0) if forged or muon or mini else 0
    work = muon * max(muon_bytes(s, plan, device, tp) for s, plan in zip(layer_shapes(config, tp), plans, strict=True))
    dtype = cut_dtype(args)
    if args.loss == "reference":
        loss = base.materialised_bytes(N, V)
    else:
        plan, beyond = loss_plan(N, config.vocab, D, args, device), 0
        if args.loss == "cce-sparse":  # a fresh model lists too much and begins with the exact gradient, as with cce
            capacity = filtering.capacity_for(N, CANDIDATES)
            beyond = filtering.sparse_bytes(N, V, D, dtype, capacity, sink=both)
        beyond = max(beyond, plan.beyond)
        # 04 keeps dC in fp32, or what it is made of, or neither; else autograd has it.
        held = held_for_classifier(config, N * accum, args) if waits(args) and both else 0
        held = held if accum == 1 and held == 4 * V * D else 0  # with accum it is there before
        results = dtype.itemsize * (N + (0 if both else V)) * D + held
        copied = (0 if args.compile else N) + (V if weight == 4 or not both else 0)  # rows of E, C in bf16
        copies = 2 * copied * D if autocast else 0
        loss = results + beyond + copies
    parts = dict(parameters=4 * others + weight * forged, gradients=4 * others + layer, optimizer=states)
    # Autocast keeps a 16-bit copy of each weight from forward to backward; of a forged one it is made twice instead,
    # and of the matrix after an activation that lean() makes again.
    leaned = args.compile and not (args.recompute or args.offload)
    twice = 12 if args.optimizer != "ordinary" else 4 if leaned and not args.moe else 0
    remade = 2 * twice * config.layers * D**2 // tp if autocast else 0
    activations = base.activation_bytes(config, N, autocast, fused_norm=cuda) - remade
    if leaned:
        activations -= parallel.lean_saving(config, N, dtype.itemsize, args.moe, tp, has_kernels(device))
    if tp > 1:  # 14 of a layer's 18 tensors are cut (05), and the copies of matrices
        inside = config.layers * (14 * (2 if autocast else 4) * N * D + (2 * 12 * D**2 if autocast else 0))
        activations -= inside * (tp - 1) // tp
    if args.moe:
        activations += mixture.activation_change(config, N, autocast) + (2 * 8 * config.layers * D**2 if remade else 0)
    # The last norm and E come after the layers. Recomputed, a layer keeps its input and is there whole once at a time;
    # offloaded, about a layer's tensors are on their way at any time.
    last = N * D * (4 + (dtype.itemsize if args.compile else 4 if cuda else 8))
    first = 0 if leaned and tp == 1 else 4 * N * D  # what was looked up
    layer_kept = (activations - last - first) // config.layers
    # In backward an MLP's activation is made again, or still there, beside its gradient.
    again = 0 if args.moe or args.offload else 2 * 4 * dtype.itemsize * N * D // tp
    if args.recompute:
        activations, again = 4 * N * D * config.layers + last + first, layer_kept
    if args.offload:
        activations = min(activations, layer_kept + last)
    parts |= dict(activations=activations, loss=loss)
    kept = sum(factor_sizes(config, N * accum, args)[2:]) if waits(args) else 0
    parts["gradients"] += kept
    if method := sync_method(args):
        copied = 0 if args.states == "fp32" else 4 * forged  # of weights in bf16 the sync has a copy in fp32
        parts["sync"] = low_comm.resident_bytes(method, others + forged) + copied
    # The peak is either early in backward, in the loss or the last layer, where activations are complete and gradients
    # (unless micro-batches before left theirs) are not there yet, or at its end, with all gradients and no activations.
    slab = layer if rung == "auto" or muon else 0
    early = activations + max(loss, again, work) + (parts["gradients"] if accum > 1 else slab)
    late = parts["gradients"] + work
    return parts, parts["parameters"] + parts["optimizer"] + parts.get("sync", 0) + max(early, late)


def muon_bytes(shape, plan, device, tp):
    """What Muon holds beside the gradients of the Plan: its products', and of a matrix that is cut the whole."""
    width, count = 2 if device.type == "cuda" else 4, plan.rows // shape.M
    held = forging.orthogonal_bytes(shape.M, shape.K, width)
    return count * held if tp == 1 else tp * held + width * shape.M * shape.K


def room_of(gib):
    """Bytes for tensors on a card of so many GiB: the rest is CUDA's, its libraries' and lies between tensors."""
    return (gib - min(1.0, gib / 16)) * 2**30


def largest_batch(config, args, device, room):
    """The most sequences that a process can put through the model at a time in `room` bytes, 0 if not even one; up to
    4,096. (Predictions are within 2 %.)"""
    fits = lambda batch: predict_memory(config, batch, args.accum, args, device, args.processes)[1] <= 0.98 * room  # noqa: E731
    low, high = 0, 4097
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fitting_batch(config, world, args, device):
    """The default of --batch: with --fit what fits; else, on a GPU, for each process a power of two, at most 64, whose
    micro-batches fit."""
    if args.fit is not None:
        each = largest_batch(config, args, device, room_of(args.fit))
        if not each:
            raise base.BadInput(f"--fit {args.fit:g}: one sequence takes more: see --fit without --dry-run for flags")
        return each * args.accum * world.workers
    free = torch.cuda.mem_get_info(device)[0]
    per_process = 64
    while per_process > args.accum and (
        predict_memory(config, per_process // args.accum, args.accum, args, device, world.size)[1] > 0.85 * free
    ):
        per_process //= 2
    return world.smallest(per_process) * world.workers


def check_batch(args):
    workers, noun = args.processes // args.tp, "processes" if args.tp == 1 else "workers"
    if args.batch % (workers * args.accum):
        raise base.BadInput(
            f"--batch {args.batch} counts sequences over all {noun}: it must be a multiple of "
            f"{workers} {noun} x {args.accum} micro-batches"
        )


def used_peak_mib(device):
    """Peak MiB: of the allocator on a GPU, of the whole process, libraries included, elsewhere; NaN where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024  # macOS counts bytes, Linux KiB


# ==== 4. Checkpoints: whole or absent =================================================================================


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


def checkpoint_files(out):
    """JSON files of DIR's checkpoints, newest first. The JSON is written last: without it there is no checkpoint."""
    return sorted(Path(out).glob("step_*.json"), reverse=True)


def worker_file(path, worker):
    """step_N.pt for the first process, step_N.worker1.pt, ... for the others."""
    return path.with_suffix(f".worker{worker}.pt") if worker else path.with_suffix(".pt")


def save_checkpoint(out, step, model, optimizer, args, data, world):
    """step_N.pt: tensors (model, optimizer, generators). step_N.json: flags, step, data, a checksum over both.

    Workers that train apart save at the same step: each process its optimizer and 06's state, in a file of its own; the
    model in the first is the whole, synchronised one. The JSON has checksums of all. Otherwise there is one state, of
    which nothing depends on the number of processes."""
    name, members = Path(out) / f"step_{step:08d}", world.members
    needed = world.worker == members[0] or args.ep_policy  # the whole model is in one worker; or in all, with experts
    if not (needed or world.sync):
        return
    state = dict(optimizer=optimizer.state_dict(whole=not world.sync), model={})
    with synchronised(world):
        own = dict(model.named_parameters())
        for key, tensor in model.state_dict().items() if needed else ():
            state["model"][key] = collected(tensor, own.get(key), world.parts)
            if world.sync:  # which is about to change
                state["model"][key] = state["model"][key].clone() if world.main else None
    if not (world.main or world.sync):
        return
    if world.main:
        for leftover in Path(out).glob("step_*.tmp"):  # of a process that was killed while it saved
            leftover.unlink()
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    state["generators"] = generators
    if world.sync:
        state["sync"] = world.sync.state_dict()
    buffer, others = io.BytesIO(), []
    torch.save(state, buffer)
    if world.sync:
        world.barrier()  # the leftovers are gone
    number = members.index(world.worker) * args.tp + world.place
    replace_atomically(worker_file(name, number), buffer.getbuffer())
    if world.sync:
        sums = torch.tensor([[float(zlib.crc32(buffer.getbuffer()))]], dtype=torch.float64, device=world.device)
        sums = world.sync.collect(parallel.gather(sums, world.tp))  # (workers, tp)
        others = [int(value) for value in sums.flatten()[1:]]
        if world.members != members:  # somebody was lost meanwhile, and files are numbered by who is left
            return save_checkpoint(out, step, model, optimizer, args, data, world)
    if world.main:
        saved = {k: v for k, v in vars(args).items() if k not in NOT_SAVED}
        record = dict(step=step, flags=saved, data=data.digest, packages=world.device.type == "cuda", workers=others,
                      tp=args.tp, format=base.GPT_FORMAT)
        record["crc32"] = checksum(record, buffer.getbuffer())
        replace_atomically(name.with_suffix(".json"), json.dumps(record, indent=1).encode())
        files = checkpoint_files(out)
        kept = [file for file in files if file.stem <= name.stem][:KEEP]  # newer ones are damaged: this run fell back
        for old in set(files) - set(kept):
            old.unlink()
            for file in [old.with_suffix(".pt"), *Path(out).glob(f"{old.stem}.worker*.pt")]:
                file.unlink(missing_ok=True)


def checksum(record, tensors):
    """Over the record (less its own checksum) and the bytes of the tensors: one number for the pair."""
    rest = {k: record[k] for k in ("step", "flags", "data", "packages", "workers", "tp", "format")}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode(), zlib.crc32(tensors))


def find_checkpoint(out):
    """(record, path of the tensors) of the newest checkpoint in DIR that is whole; a line for each damaged one."""
    files = checkpoint_files(out)
    if not files:
        raise base.BadInput(f"{out}: no checkpoint to resume from: drop --resume, or name its directory with --out")
    for file in files:
        path = file.with_suffix(".pt")
        try:
            record = json.loads(file.read_text())
            if record.get("format") != base.GPT_FORMAT:
                break
            others = [zlib.crc32(worker_file(path, i).read_bytes()) for i in range(1, 1 + len(record["workers"]))]
            if checksum(record, path.read_bytes()) == record["crc32"] and others == record["workers"]:
                break
            problem = "its checksum differs"
        except (ValueError, KeyError, TypeError, OSError) as error:
            problem = error
        print(f"{path}: damaged ({problem}): trying the one before it", file=sys.stderr)
    else:
        raise base.BadInput(f"{out}: no checkpoint is whole: start anew with another --out")
    if record.get("format") != base.GPT_FORMAT:
        raise base.BadInput(f"{path}: it is of another version of this program: start anew with another --out")
    return record, path


def restore(path, model, optimizer, world, start, only_model):
    """Load what save_checkpoint stored at step `start`; of workers that train apart each process from its own file."""
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    own = dict(model.named_parameters())
    model.load_state_dict({k: own_part(t, own.get(k), world.parts) for k, t in tensors["model"].items()})
    if only_model:  # to look at, by any number of processes
        return world.sync and world.sync.restart(start)
    apart = world.sync and "sync" in tensors  # a checkpoint of --sync none or ddp has one state for all
    if apart and world.rank:
        tensors = torch.load(worker_file(Path(path), world.rank), weights_only=True, map_location="cpu")
    optimizer.load_state_dict(tensors["optimizer"], whole=not apart)
    torch.set_rng_state(tensors["generators"]["cpu"])
    if "cuda" in tensors["generators"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["generators"]["cuda"])
    if apart:
        world.sync.load_state_dict(tensors["sync"])
    elif world.sync:
        world.sync.restart(start)


def synchronised(world):
    """A block in which the model has the weights that the workers agree on."""
    return world.sync.synchronised() if world.sync else contextlib.nullcontext()


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


def set_aside(out):
    """A fresh run into a directory that holds checkpoints moves them away first: nothing is lost."""
    if checkpoint_files(out):
        home = Path(out).resolve()
        aside = next(p for i in range(1, 10**6) if not (p := home.with_name(f"{home.name}.{i}")).exists())
        aside.mkdir()
        for file in [*home.glob("step_*"), *home.glob("*.jsonl")]:
            file.rename(aside / file.name)
        size = sum(file.stat().st_size for file in aside.iterdir()) / MIB
        print(f"kept the earlier run of {out} in {aside.name} ({size:.0f} MiB; delete it when you do not need it)")


# ==== 5. The run ======================================================================================================


class StopSignal:
    """Inside the block, Ctrl-C or SIGTERM asks for an end after the current step; a second Ctrl-C ends at once."""

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


def rows_to_keep(args, start):
    """Of the file of --log: a resumed run repeats the steps after its checkpoint, whose old rows go, and a torn one.
    ValueError on another program's file."""
    path, kept = Path(args.log), []
    for row in path.read_text().splitlines(True) if path.exists() else ():
        torn = not row.endswith("\n")
        try:
            if torn and kept or json.loads(row)["step"] > start or torn or not args.resume:
                break
        except (ValueError, KeyError, TypeError):
            raise base.BadInput(f"--log {path}: holds other rows than this program's: name another") from None
        kept.append(row)
    return kept


# Dense bf16 peaks in TFLOP/s from NVIDIA's data sheets (without sparsity). A GPU that is not listed is "unknown".
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}


def peak_flops(device, dtype):
    """FLOP/s that the data sheet promises for dense matrix products on this device in bf16 or fp16; None if unknown."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * t for key, t in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), None)


class Log:
    """What the run says. Step lines: one that is rewritten on a terminal, one per --log-every elsewhere; rows of --log
    as JSON lines."""

    def __init__(self, args, world, config, data, device):
        self.args, self.config, self.device, self.terminal = args, config, device, sys.stdout.isatty()
        self.world, self.file, self.open_line, self.path = world, None, False, args.log
        size = data.bytes_per_token
        self.bits = None if size is None else 1 / (math.log(2) * size)  # bits a byte that a nat a token is
        self.peak_flops = peak_flops(device, cut_dtype(args))
        # Seconds of each step; since the last line that stays: steps, and the sum of their sparse shares.
        self.seconds, self.since, self.sparse_steps = [], 0, 0.0
        self.told = set()  # decisions of the loss that have been reported

    def begin(self, rows):
        """A new file of --log, which begins with these rows."""
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, "".join(rows).encode())
        self.file = path.open("a")

    def row(self, **values):
        if self.path and self.world.main and not self.file:  # the first worker was lost: go on for it
            self.file = Path(self.path).open("a")
        if self.file:
            self.file.write(json.dumps({k: v for k, v in values.items() if v is not None}) + "\n")
            self.file.flush()

    def line(self, text, step, final=False):
        if self.world.main and self.terminal:
            width = shutil.get_terminal_size().columns - 1  # a longer line would wrap, and "\r" leave its first part
            print("\r" + text[:width].ljust(width), end="", flush=True)
            self.open_line = True
        elif self.world.main and (step % self.args.log_every == 0 or final):
            print(text, flush=True)

    def say(self, text, every_worker=False):
        """A line of its own, by one process, or by one of each worker."""
        if self.world.main or every_worker and self.world.place == 0:
            who = "" if self.world.main else f"worker {self.world.worker}, "
            print(("\n" if self.open_line else "") + who + text, flush=True)
            self.open_line = False

    def per_byte(self, loss):
        return None if self.bits is None else loss * self.bits

    def speed(self, seconds):
        """Tokens/s of steps that take so long, and the share of the devices' peak, or None."""
        tok_s = self.args.batch * self.args.seq / seconds
        flops = tok_s * self.config.flops_per_token()
        return tok_s, None if self.peak_flops is None else flops / (self.peak_flops * self.world.size)

    def step(self, done, loss, lr, norm, sparse, stats, uneven, good):
        """Line and row of a step that has ended. sparse: the share of sparse gradients, or None; good: is finite."""
        self.since, self.sparse_steps = self.since + 1, self.sparse_steps + (sparse or 0.0)
        tok_s, mfu = self.speed(statistics.fmean(self.seconds[-self.since :]))
        peak, sync = used_peak_mib(self.device), self.world.sync
        eta = int((self.args.steps - done) * self.args.batch * self.args.seq / tok_s)
        more = "" if sparse is None else f"  sparse {self.sparse_steps / self.since:.0%}"
        more += "" if uneven is None else f"  MaxVio {uneven:.2f}"
        more += f"  sent {sync.bytes_sent / 1e6:,.2f} MB  blocked {sync.blocked_seconds:.2f} s" if sync else ""
        self.line(
            f"step {done}/{self.args.steps}  loss {loss:.4f}"
            + ("" if self.bits is None else f"  bpb {self.per_byte(loss):.3f}")
            + f"  lr {lr:.2e}  norm {norm:.2f}  {tok_s:,.0f} tok/s  mfu {'unknown' if mfu is None else f'{mfu:.1%}'}  "
            f"peak {peak:,.0f} MiB{more}  eta {eta // 60}:{eta % 60:02d}",
            done, final=done == self.args.steps,
        )
        if good:  # NaN is no JSON
            self.row(step=done, loss=loss, bpb=self.per_byte(loss), lr=lr, grad_norm=norm, tok_s=tok_s, mfu=mfu,
                     peak_mib=None if math.isnan(peak) else peak, seconds=self.seconds[-1], sparse=sparse,
                     why=None if sparse is None else stats.reason, sent=sync and sync.bytes_sent,
                     blocked=sync and sync.blocked_seconds, max_violation=uneven)
        if done % self.args.log_every == 0:
            self.since, self.sparse_steps = 0, 0.0
        if sparse is not None and stats.decision not in self.told:
            self.told.add(stats.decision)
            self.say(f"step {done}: gradient of the loss {stats.decision}: {stats.reason}")

    def validation(self, step, loss):
        bpb = "" if self.bits is None else f"  bpb {self.per_byte(loss):.4f}"
        self.say(f"step {step}/{self.args.steps}  validation loss {loss:.4f}{bpb}")
        if math.isfinite(loss):
            self.row(step=step, val_loss=loss, val_bpb=self.per_byte(loss))

    def summary(self, val_loss):
        """At the end; the memory follows it."""
        if not self.args.dry_run:
            self.say(f"saved   {self.args.out}, step {self.args.steps}")
        tok_s, mfu = self.speed(statistics.median(self.seconds[10:] or self.seconds))  # the first compile and warm up
        mfu = "" if mfu is None else f", MFU {mfu:.1%}"
        total = f"{len(self.seconds)} steps in {sum(self.seconds):,.1f} s"
        self.say(f"\nspeed   {tok_s:,.0f} tokens/s{mfu} (median step); {total}")
        if val_loss is not None:
            bpb = "" if self.bits is None else f", {self.per_byte(val_loss):.4f} bits a byte"
            self.say(f"loss    {val_loss:.4f} on validation{bpb}")
        if sync := self.world.sync:
            self.say(f"sync    {sync.bytes_sent / 1e6:,.2f} MB sent by a worker, blocked for "
                     f"{sync.blocked_seconds:.2f} s in all")


def describe_run(config, data, world, args, device, start):
    """What a reader wants to know before step 0, from formulas alone."""
    micro = args.batch // (world.workers * args.accum)
    tokens = args.batch * args.seq
    epochs = max(0, args.steps - start) * args.batch / len(data.train)
    size, held = (sum(s.nbytes for s in part.shards) / MIB for part in (data.train, data.val))
    parts, peak = predict_memory(config, micro, args.accum, args, device, world.size)
    plan = loss_plan(micro * args.seq, config.vocab, args.dim, args, device)
    exact = f", order of its gradient: {plan.order}, {plan.passes} matrix passes, blocks of {plan.block}"
    auto = f"{exact}; sparse, one pass, while dE and dC are estimated within {filtering.MAX_ERROR}"
    how = {"cce-exact": exact, "cce": auto}
    yield base.describe_device(device) + (f" | {world.size} processes" if world.size > 1 else "")
    yield f"data    {data.origin}: {size:.1f} MiB to train, {held:.2f} to validate"
    yield f"        {epochs:.2f} epochs, hash {data.digest}"
    yield f"model   {config.parameters() / 1e6:.1f} M parameters: {args.layers} layers, width {args.dim}, " + (
        f"{args.heads} heads, vocabulary {config.vocab}, {config.flops_per_token() / 1e6:.1f} MFLOP a token"
    )
    if args.moe:
        where = f"spread over {world.size} processes by {args.ep_policy}" if args.ep_policy else "all in each process"
        yield f"        {args.moe} experts of width {config.width()} a layer, {where}; a token meets {args.top_k}; " + (
            f"balance: {args.balance}")
    yield f"        {args.dtype} ({args.why_dtype}), loss {args.loss} ({args.why_loss}{how.get(args.loss, '')})"
    when = "after the last backward pass" if waits(args) else "inside backward"
    forged = {"forge": f", 04's step {when} for the layers' matrices, states in {args.states}",
              "ordinary": ", a step after it from gradients that are kept",
              "forge-cce": f", 04's step {when} for all matrices, states in {args.states}"}
    rule = f"AdamW for all, peak rate {args.lr:g}"
    if args.rule == "muon":
        rule = f"Muon for the layers' matrices, peak rate {args.muon_lr:g}; AdamW for the rest, {args.lr:g}"
        products = sum(s.count * forging.orthogonal_flops(s.M, s.K) for s in layer_shapes(config))
        products /= tokens * config.flops_per_token()
        rule += f"; its products add {products:.1%} to a step's FLOPs"
    if args.rule == "adam-mini":
        which = "the layers' matrices" if args.optimizer == "forge" else "all matrices but routers"
        rule = f"Adam-mini for {which}, AdamW for the rest, peak rate {args.lr:g}"
    yield f"        rule    {rule}" + (f"; clipped at {args.clip:g}" if args.clip else "")
    yield f"        optimizer {args.optimizer} ({args.why_optimizer}){forged[args.optimizer]}"
    if waits(args):
        mine = tokens // world.workers
        factors, gradients, _, _ = factor_sizes(config, mine, args)
        enough = mine * gradients / factors
        yield f"        a step's factors {factors / MIB:,.0f} MiB, gradients {gradients / MIB:,.0f} MiB (layers): " + (
            f"factors are kept, which are smaller up to {enough:,.0f} tokens" if mine <= enough else
            f"gradients are kept, smaller beyond {enough:,.0f} tokens; with --clip 0 and --accum 1 neither is"
        )
    if args.recompute:
        yield "        a layer keeps its input only and runs again in backward: a third more of its FLOPs"
    if args.offload:
        where = "pinned host memory" if device.type == "cuda" else "files" if args.dry_run else f"files in {args.out}"
        yield f"        what backward needs waits in {where}; weights, small tensors and about a layer under way stay"
    who = "process(es)" if args.tp == 1 else f"worker(s), each of {args.tp} processes,"
    yield f"step    {tokens:,} tokens = {args.batch} sequences of {args.seq} = " + (
        f"{world.workers} {who} x {args.accum} micro-batch(es) x {micro}"
    )
    if method := sync_method(args):
        yield describe_sync(method, world, args)
    categories = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items())
    yield f"memory  predicted MiB of tensors, peak {peak / MIB:,.0f}: {categories}"


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


def resume_command(args, world):
    """What to type to go on: the flags that belong to the launch, the checkpoint holds the others."""
    words = ["python"]
    if args.torchrun:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        nodes = f"--nnodes {world.size // local} (rendezvous as before) " if world.size > local else ""
        words = [f"torchrun {nodes}--nproc-per-node {local} --"]
    words += [shlex.quote(os.path.relpath(__file__)), "--resume --out", shlex.quote(args.out)]
    processes = len(world.members) * args.tp  # workers may have been lost
    words += [f"--gpus {processes}"] * (processes > 1 and not args.torchrun)
    words += [f"--device {args.device}"] * (args.device == "cpu")
    words += [f"--tp {args.tp}"] * (args.tp > 1)
    words += [f"--{name}" for name in ("recompute", "offload") if getattr(args, name)]
    words += [f"--{'' if args.compile else 'no-'}compile"] * (args.compile != has_kernels(torch.device(args.device)))
    words += [f"--ep-policy {args.ep_policy}"] * (args.ep_policy not in (None, "ep"))
    words += ["--log", shlex.quote(args.log)] if args.log else []
    return " ".join(words)


class Unborn(TorchDispatchMode):
    """A block in which a model is made without its matrices. They have shapes, but no memory; what would have filled
    them with random numbers is noted. Afterwards, when it is known what part of a matrix this process keeps and in what
    dtype, bear() makes one after the other: a model that is trained in 3 bytes a parameter is never there in 4. Numbers
    are those of a model that is made at once, since the same draws are made in the same order."""

    def __enter__(self):
        self.draws = []  # (matrix, operation, its arguments)
        bodiless = lambda module, name, p: nn.Parameter(p.to("meta")) if p is not None and p.dim() == 2 else None  # noqa: E731
        self.registered = register_module_parameter_registration_hook(bodiless)
        return super().__enter__()

    def __exit__(self, *error):
        self.registered.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default) and args[0].is_meta:
            self.draws.append((args[0], operation, args[1:]))
            return args[0]
        return operation(*args, **(kwargs or {}))

    @torch.no_grad()
    def bear(self, names, model, world, args):
        """names: {id of a matrix: its name}, from before the model was cut."""
        last = {id(matrix): i for i, (matrix, *_) in enumerate(self.draws)}
        for i, (matrix, operation, numbers) in enumerate(self.draws):
            whole = operation(torch.empty(matrix.shape, device=world.device), *numbers)
            if last[id(matrix)] > i or id(matrix) not in names:
                continue  # drawn again, or left out: experts take the place of MLPs
            if world.size > 1 and not world.late:
                dist.broadcast(whole, 0)  # the same seed gives the same weights; other machines may round otherwise
            name = names[id(matrix)]
            bodiless = model.get_parameter(name)
            p = nn.Parameter(own_part(whole, bodiless, world.parts).to(born_dtype(name, args)))
            p.__dict__ |= bodiless.__dict__  # where it was cut
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, p)


def born_dtype(name, args):
    """Of a matrix: that in which 04 keeps it. (A master copy is in fp32 and has the numbers; 04 makes the other.)"""
    layout = forging.LAYOUTS[args.states]
    forged = args.optimizer == "forge-cce" and name in TABLES or args.optimizer != "ordinary" and name.endswith(LAYERS)
    return layout.weight if forged and not layout.master else torch.float32


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
        if counter.peak > room_of(args.fit):
            raise base.BadInput(f"--fit {args.fit:g}: out of memory, tensors took {counter.peak / MIB:,.0f} MiB of "
                                f"{room_of(args.fit) / MIB:,.0f}: use a smaller --batch, or see --fit without "
                                "--dry-run")


def run(args):
    """One process of the run, from the first line to the last; returns its exit status."""
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    with limited(args, device):
        return run_on(args, device)


def run_on(args, device):
    world = World(device, args.tp)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    config = make_config(args)
    torch.manual_seed(args.seed)
    with device, Unborn() as unborn:
        model = base.GPT(config)
        if args.moe:
            mixture.with_experts(model)
    names = {id(p): name for name, p in model.named_parameters() if p.is_meta}
    if args.batch is None:
        args.batch = fitting_batch(config, world, args, device)
    check_batch(args)
    origins, model.group = parallel.tensor_parallel(model, world.tp), world.tp
    if args.compile:
        parallel.lean(model, remake=not (args.recompute or args.offload))
    if args.recompute:
        parallel.recompute(model)
    method = sync_method(args)
    if args.moe:
        everybody = dist.group.WORLD if args.sync == "ddp" and world.size > 1 else None
        world.balance = mixture.Balance(model, args.balance, everybody, BALANCE, rate=BIAS_RATE)
        if everybody:
            world.parts = everybody
            mixture.expert_parallel(model, everybody, args.ep_policy)
    unborn.bear(names, model, world, args)
    flat = low_comm.Flat([model], method.fragments) if method else None  # before forge(), which keeps where weights lie
    optimizer = Optimizer(model, args, world.parts, origins)
    start = args.start
    if method:
        several = world.workers > 1
        number = world.rank if world.late else None
        transport = low_comm.Dist(device, PATIENCE, rank=number, group=world.data) if several else low_comm.Sim(1)
        if optimizer.forged:
            states = optimizer.forged.states.values()
            flat.adopt((s.weight, s.tensors["master"]) for s in states if "master" in s.tensors)
        world.sync = low_comm.make_sync(args.sync, flat, transport, seed=args.seed, companion=optimizer,
                                        H=method.H, outer=method.outer)
    if args.resume and not world.late:
        restore(args.checkpoint, model, optimizer, world, start, only_model=not args.steps)
    status = 0
    if args.steps:
        data = load_data(args, packages=device.type == "cuda")
        with StopSignal() as stop, scratch(args, world):
            status = train(model, optimizer, data, config, world, args, device, start, stop)
    if status == 0 and args.sample and not args.dry_run:
        with synchronised(world):
            needed = world.main or world.parts  # where a model is spread, all make the same text
            ids = generate(model, encode(args.sample, args.tokens), args, device) if needed else None
        if world.main:
            untrained = "" if args.steps or args.resume else ", from random weights (no --resume)"
            print(f"\nsample  temperature {args.temperature:g}, top {args.sample_top}{untrained}")
            print(decode(ids, args.tokens))
    world.barrier()
    if world.sync:
        world.sync.transport.close()
    return status


def train(model, optimizer, data, config, world, args, device, start, stop):
    """Steps start ... --steps; 0, 1 on a non-finite loss, 128 + signal when asked to stop."""
    log = Log(args, world, config, data, device)
    rows = rows_to_keep(args, start) if args.log and world.main else ()  # refuses before anything is moved
    if start == 0 and world.main and not args.dry_run:
        set_aside(args.out)
    if args.log and world.main:
        log.begin(rows)
    for text in describe_run(config, data, world, args, device, start):
        log.say(text)
    log.row(step=start, flags={k: v for k, v in vars(args).items() if k not in NOT_SAVED}, processes=world.size,
            parameters=config.parameters(), flops_per_token=config.flops_per_token(),
            device=base.describe_device(device))
    saved = start if args.resume else None
    stats = filtering.SparseStats()  # of this process's losses

    def validation(step):
        with synchronised(world):
            loss = validate(model, data, world, args, device)
        log.validation(step, loss)
        return loss

    def diverged(step, what):
        last = "no checkpoint yet" if saved is None else f"the last good checkpoint is step {saved} in {args.out}"
        log.say(f"step {step}: {what}: stopped, {last}; try a lower --lr or a --clip")
        return 1

    def save(step):
        nonlocal saved
        if saved != step and not args.dry_run:
            if args.sync == "ddp" and world.workers > 1:
                check_replicas(model, world)
            try:
                save_checkpoint(args.out, step, model, optimizer, args, data, world)
            except ConnectionError:
                raise
            except OSError as error:
                last = "none before it" if saved is None else f"the last one is of step {saved}"
                raise OSError(f"step {step} could not be saved ({error}), {last}: make room, and go on with "
                              f"{resume_command(args, world)}") from None
            saved = step
            world.barrier()

    alive, feed, val_loss = {}, Feed(data, world, args, device), None  # alive: bytes at some points of the last step
    if start == 0 and not (args.dry_run or world.late):
        validation(0)
    if start >= args.steps:
        log.say(f"nothing to do: {args.out} is at step {start} of {args.steps}: raise --steps to go on")
    step, wrong, announced, skipped, most = start, None, False, 0, SKIPS if args.on_nan == "skip" else 0
    while step < args.steps:
        began = time.perf_counter()
        share_of_rates = schedule(step, args)
        lr = args.lr * share_of_rates
        optimizer.begin(step + 1, share_of_rates)
        before = stats.calls, stats.sparse
        loss = accumulate_gradients(model, feed, step, world, args, device, stats, alive)
        done, sync = step + 1, world.sync
        loss = loss.double()
        norm = optimizer.norm()
        # A fill, as a copy from here would wait; and 0, or NaN if a gradient is not finite.
        values = torch.stack((loss, torch.full_like(loss, stop.number), norm - norm))
        if not sync:
            world.sum(values)  # the loss over all processes, and whether any of them was told to stop, or is spoilt
        reading = optimizer.finish(norm, *values)
        uneven = world.balance.step(optimizer.taken).max() if world.balance else None  # the worst layer's MaxVio
        loss, stopped, spoilt, norm = reading.read()  # the step's one wait, but for experts' exchanges
        bad = not (math.isfinite(loss) and math.isfinite(spoilt))
        skipped = skipped + 1 if bad else 0
        if not sync:
            loss /= world.size if args.sync == "none" else args.tp  # with ddp workers' losses are parts of a sum
        elsewhere = " (of another process it is not finite)" if bad and math.isfinite(norm) else ""
        what = f"step {step + 1}: loss {loss}, gradient norm {norm}{elsewhere}"
        if bad and skipped <= most:
            log.say(f"{what}: skipped", every_worker=bool(sync))
        if sync:  # nothing is asked of the others between rounds; a round tells all of them who wants to stop
            if wrong or bad and skipped > most:  # in each step until the halt: moments and weights stay NaN
                wrong = wrong or f"worker {world.worker}, {what}"
                sync.surrender(wrong)
            if stop.number and not announced:
                announced = True
                log.say("stopping after the next round")
                sync.transport.ask("stop", str(int(stop.number)))
            if world.late:  # what it did so far gives way to what the others have, who are in their sync.step() now
                sync.join()
                print(f"worker {world.worker} goes on for {world.seat}, from step {sync.steps}", flush=True)
                world.late = False
            else:
                if step == start:  # the step is compiled: who was done first waits for the others here, not in the
                    blocked = sync.blocked_seconds  # first round, where it would count as blocked
                    world.barrier()
                    sync.blocked_seconds = blocked
                sync.step()
                if sync.method.H is None and sync.steps % 50 == 0:  # with no rounds to ask in, now and then
                    world.barrier()
            done = sync.steps  # the others', where this worker has just joined them
            if done == args.steps:
                sync.finish()
        elif bad and skipped > most:
            return diverged(done, f"loss {loss}, gradient norm {norm}{elsewhere}")
        log.seconds.append(time.perf_counter() - began)
        sparse = (stats.sparse - before[1]) / (stats.calls - before[0]) if args.loss in DECIDING else None
        log.step(done, loss, lr, norm, sparse, stats, uneven if uneven is None else uneven.item(), not (wrong or bad))
        if sync and "halt" in sync.notes:
            return diverged(done, sync.notes["halt"])
        stopped = int(sync.notes.get("stop", 0)) if sync else stopped
        evaluate = done == args.steps or args.eval_every and done % args.eval_every == 0
        evaluate = evaluate and not args.dry_run
        keep = done == args.steps or args.save_every and done % args.save_every == 0
        if stopped or keep:
            # The largest element is infinite or NaN if any is; isfinite() would make a copy of each matrix.
            finite = all(torch.linalg.vector_norm(p, math.inf).isfinite() for p in model.parameters())
            if world.totals(bool(wrong) or not finite)[0]:
                return diverged(done, wrong or "the update left weights that are not finite")
        if stopped:
            save(done)
            go_on = "" if args.dry_run else f"; go on with: {resume_command(args, world)}"
            log.say(f"stopped after step {done}{go_on}")
            return 128 + int(stop.number or (stopped if sync else signal.SIGTERM))
        if evaluate and not math.isfinite(val_loss := validation(done)):
            return diverged(done, f"validation loss {val_loss}")
        if keep:
            save(done)
        step = done
    if start < args.steps:
        log.summary(val_loss)
        for text in compare_memory(config, model, optimizer, alive, world, args, device):
            log.say(text)
    return 0


def compare_memory(config, model, optimizer, alive, world, args, device):
    """Lines: predicted and measured MiB by category, after some steps."""
    micro = args.batch // (world.workers * args.accum)
    parts, peak = predict_memory(config, micro, args.accum, args, device, world.size)
    weights = sum(p.nbytes for p in model.parameters())
    slab = optimizer.forged.slab.nbytes if optimizer.forged else 0
    held = sum(t.nbytes for t in world.sync.resident()) if world.sync else 0
    measured = dict(
        sync=held, parameters=weights, gradients=alive["backward"] - alive["before"] + slab,
        optimizer=alive["before"] - weights - slab - held, activations=alive["forward"] - alive["before"],
    )
    top = used_peak_mib(device) * MIB if device.type == "cuda" else math.nan
    measured["loss"] = top - alive["forward"]
    yield f"{'MiB':<12}{'predicted':>11}{'measured':>13}"
    for name, size in (parts | dict(peak=peak)).items():
        seen = (measured | dict(peak=top))[name]
        yield f"{name:<12}{size / MIB:>11,.0f}{'needs a GPU' if math.isnan(seen) else f'{seen / MIB:,.0f}':>13}"


# ==== 6. A plan, for GPUs that need not be here =======================================================================


PLANNED = ("plan", "gpus", "batch", "accum", "preset", "device", "dry_run")  # flags that a plan's own replace


def print_plan(args, argv):
    """--plan: the fastest plans of 05's planner; then the flags of the fastest that this program can carry out, which
    cuts by batch and by matrix alone, with the way to synchronise that 06 says the link bears."""
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 141
    config, batch = make_config(args), args.batch or 64 * args.gpus
    text = (f"params={config.parameters()} layers={args.layers} dim={args.dim} vocab={args.vocab} seq={args.seq} "
            f"heads={args.heads} batch={batch} gpus={args.gpus} gib={gib} link={args.plan}"
            + " muon=1" * (args.rule == "muon"))
    model, gpus, gib, links, batch, chip = parallel.parse_plan(text)
    hosts = -(-gpus // links.host)
    if hosts > 1 and gpus % links.host:
        raise base.BadInput(f"--gpus {gpus}: hosts have {links.host}: use --gpus {hosts * links.host}")
    parallel.print_plans(text)
    speed = links.between * 8 if hosts > 1 else links.inside * 8  # bits a second of a GPU
    # What workers send each other is 06's affair: here a mesh is as fast as if that took no time.
    plans = parallel.plan(model, gpus, gib, links._replace(between=math.inf), batch, chip)
    heading = f"\nGPUs that compute, of {gpus}, if each sends {speed / 1e9:,.0f} Gbit/s; and what 90 % would need\n"
    # Gradients and weights are sent in fp32, streaming's in 4 bits: a quarter, by 06, of 2 bytes.
    for sync, way, size in ("ddp", "data parallel", 4), ("diloco", "DiLoCo", 4), ("streaming", "+ 4 bit", 2):
        one, accum = feasible(plans, config, batch, gib, args, sync)
        if one.dp == 1:
            break
        step = parallel.step_flops(model, batch * model.seq, one.recompute) / (gpus * chip.peak * chip.reach)
        sizes = dict(P=model.params / one.tp, step=step, bits=8 * low_comm.data_parallel_bytes(1, one.dp, size))
        sizes |= dict(H=low_comm.METHODS[sync].H, fragments=3) if sync != "ddp" else {}
        share, needed = low_comm.utilisation(speed, way, **sizes), low_comm.needed_bandwidth(way, 0.9, **sizes)
        mesh = f"dp {one.dp} x tp {one.tp}{', recomputed' * one.recompute}"
        print(f"{heading}--sync {sync:<10}{share:>5.0%}  {needed / 1e9:>6,.1f} Gbit/s  ({mesh})")
        heading = ""
        if share >= 0.9:
            break
    words = [f"python {shlex.quote(os.path.relpath(__file__))} --gpus {gpus}"]
    if hosts > 1:
        words = [f"torchrun --nnodes {hosts} --nproc-per-node {links.host} --rdzv-backend c10d",
                 f"--rdzv-endpoint HOST:29500 -- {shlex.quote(os.path.relpath(__file__))}"]
    words += [f"--sync {sync}"] * (one.dp > 1) + [f"--tp {one.tp}"] * (one.tp > 1) + ["--recompute"] * one.recompute
    words += [f"--batch {batch}"] + [f"--accum {accum}"] * (accum > 1) + [f"--preset {args.preset}"]
    for name, value in asked_for(argv).items():
        words += [] if name in PLANNED else typed(name, value)
    print("type:", *words)
    return 0


def asked_for(argv):
    """{name: value} of the flags of a command line."""
    parser = make_parser()
    return {name: v for name, v in vars(parser.parse_args(argv)).items() if v != parser.get_default(name)}


def typed(name, value):
    """A flag as words."""
    values = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
    return [f"--{'no-' * (value is False)}{name.replace('_', '-')}", *(shlex.quote(str(v)) for v in values)]


def feasible(plans, config, batch, gib, args, sync):
    """(Plan, micro-batches) of the first of these Plans that this program can carry out, in the fewest micro-batches
    whose memory, as predicted here, fits. ValueError when there is none."""
    for one in plans:
        if one.pp > 1 or one.cp > 1 or one.zero or config.vocab % one.tp:
            continue
        each = batch // one.dp
        for accum in (k for k in range(1, each + 1) if each % k == 0):
            summed = accum > 1 or sync == "ddp" and one.dp > 1
            flags = vars(args) | dict(tp=one.tp, recompute=one.recompute, accum=accum, states="fp32", sync=sync,
                                      optimizer="ordinary" if summed else "forge-cce")
            flags = argparse.Namespace(**flags)
            if predict_memory(config, each // accum, accum, flags, torch.device("cuda"))[1] < 0.85 * gib * 2**30:
                return one, accum
    raise base.BadInput(f"--plan: cut by batch and by matrix alone nothing fits {args.gpus} GPU(s) of {gib:.0f} GiB: "
                        "use more --gpus, or a smaller --seq")


# For --fit, from the most comfortable to the least. Muon is the better rule where a step has tokens enough to pay for
# its products: of 7b they are as many FLOPs as 15,000 tokens', whatever the batch. Below some 65,000 take Adam-mini,
# which makes none, and needs no whole gradient of a matrix.
SMALLEST = dict(states="int8", rule="adam-mini", clip=0)  # clipped, all gradients would be kept
FRUGAL = ({}, dict(states="int8"), SMALLEST, SMALLEST | dict(recompute=True),
          SMALLEST | dict(recompute=True, offload=True))


def print_fits(args, argv):
    """--fit: for each preset (or the one that was asked for) and FRUGAL flags, beside those that were asked for, the
    largest batch on a card of that size; then what to type for the largest model: the first flags with which four
    sequences fit, or the last."""
    room, device, asked, best = room_of(args.fit), torch.device(args.device), asked_for(argv), None
    print(f"a card of {args.fit:g} GiB: {room / MIB:,.0f} MiB for tensors; batch: sequences a step, predicted to fit\n")
    print(f"{'preset':<12}{'parameters':>11}  {'flags':<62}{'batch':>6}{'peak MiB':>10}")
    for preset in [asked["preset"]] if "preset" in asked else [name for name in PRESETS if name != "cpu"]:
        enough = False
        rest = [[word for name, v in (frugal | asked).items() if name not in asked for word in typed(name, v)]
                for frugal in FRUGAL]  # what was asked for stays as it is
        for flags in dict.fromkeys(map(" ".join, rest)):
            one = parse([*argv, "--preset", preset, *flags.split()])
            config, workers = make_config(one), one.processes // one.tp
            batch = largest_batch(config, one, device, room)
            peak = predict_memory(config, max(1, batch), one.accum, one, device, one.processes)[1]
            count = f"{batch * one.accum * workers}" if batch else "none"
            print(f"{preset:<12}{config.parameters() / 1e9:>9.2f} B  {flags:<62}{count:>6}{peak / MIB:>10,.0f}")
            if batch and not enough:
                best, enough = f"--preset {preset} {flags} --batch {count}".replace("  ", " "), batch >= 4
    if best is None:
        raise base.BadInput(f"--fit {args.fit:g}: nothing fits: use a smaller --seq, fewer --layers, or --preset cpu")
    words = [word for name, v in asked.items() if name not in ("fit", "preset", "batch") for word in typed(name, v)]
    print(f"\ntype: python {shlex.quote(os.path.relpath(__file__))} {' '.join([*words, best])}\n"
          f"      (with --dry-run --fit {args.fit:g}: three steps in the memory of that card, on a larger one)")
    return 0


# ==== 7. The command line =============================================================================================

NOT_SAVED = ("resume", "dry_run", "out", "sample", "gpus", "tp", "compile", "recompute", "offload", "plan", "fit",
             "ep_policy", "device", "log", "checkpoint", "start", "data_digest", "processes", "torchrun", "why_dtype",
             "why_loss", "why_optimizer")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"train.py: {message} (--help lists the flags)\n")


def make_parser():
    p = Parser(description="Train a small GPT through cut cross-entropy.", allow_abbrev=False)
    add = p.add_argument
    add("--preset", choices=list(PRESETS), help="model size and schedule (default: gpt2-small on a GPU, else cpu)")
    for name in ("layers", "dim", "heads", "seq", "batch", "steps"):
        what = "sequences a step, over all processes and micro-batches; " if name == "batch" else ""
        add(f"--{name}", type=int, help=f"{what}from the preset")
    add("--accum", type=int, default=1, help="micro-batches a step")
    add("--lr", type=float, help="AdamW's peak learning rate (from the preset)")
    add("--rule", choices=("muon", "adam-mini", "adamw"),
        help="which step: Muon for the layers' matrices and AdamW for the rest; Adam-mini; or AdamW for all (muon)")
    add("--muon-lr", type=float, help=f"Muon's peak learning rate ({MUON_LR})")
    add("--optimizer", choices=("forge-cce", "forge", "ordinary"),
        help="when: inside backward, of all matrices; of the layers'; or after it (forge-cce; ordinary with --accum, "
             "or --sync ddp of several)")
    add("--sync", choices=("none", "ddp", *low_comm.METHODS),
        help="of several processes: none; gradients summed each step; weights by 06's methods (diloco)")
    add("--inner-steps", type=int, metavar="H", help="steps that workers take alone between rounds (from --sync)")
    add("--outer", type=float, nargs=2, metavar=("LR", "MOMENTUM"),
        help="of a round's own step (06's; another below 200 rounds of diloco, gossip, streaming)")
    add("--moe", type=int, metavar="E", help="experts in place of each MLP (0: none)")
    add("--top-k", type=int, metavar="K", help="experts that a token goes to (2)")
    add("--balance", choices=mixture.Balance.KINDS,
        help="of experts: loss of the global batch, of each micro-batch, a bias without a loss, none (global)")
    add("--ep-policy", choices=list(mixture.POLICIES),
        help="of experts spread over processes, with --sync ddp: fixed places, or least loaded (ep)")
    add("--states", choices=list(forging.LAYOUTS), help="of forged weights: fp32; bf16 with fp32 master; int8 moments")
    add("--clip", type=float,
        help="largest gradient norm; 0: do not clip, and forged steps inside backward (0; 1 without Muon)")
    add("--on-nan", choices=("stop", "skip"), default="stop",
        help=f"of a loss or gradient that is not finite: end the run (stop), or leave out up to {SKIPS} steps in a row")
    add("--dtype", choices=("bf16", "fp32"), help="of the matrix products (bf16 where the GPU has it, else fp32)")
    add("--loss", choices=list(LOSSES),
        help="gradient of the loss: sparse while that is close, else exact; exact; sparse; through logits")
    add("--tokens", choices=("bytes", "bigrams"), help="what a token of text is (from the preset)")
    add("--data", help="file or quoted glob of .txt or .bin shards (default: Python source on this machine)")
    add("--val", help="the same for validation (default: the last 1%% of --data)")
    add("--vocab", type=int, help="classes (from the data)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--gpus", type=int, help="processes on this machine, one a GPU (1)")
    add("--tp", type=int, default=1, metavar="K",
        help="neighbouring processes that share a worker's matrices (05); processes = workers x K (1)")
    add("--recompute", action="store_true", help="keep each layer's input only, and run it again in backward (05)")
    add("--offload", action="store_true",
        help="keep what backward needs in host memory (of a GPU), or in files in --out (CPU) (05)")
    add("--plan", type=float, metavar="LINK",
        help="print how --gpus GPUs, present or not, would best train this, LINK Gbit/s a GPU between hosts (05, 06)")
    add("--fit", type=float, metavar="GIB",
        help="print what a card of so many GiB can train, and how; with --dry-run: allow no more memory than it has")
    add("--seed", type=int, default=0, help="of weights, order of data and sample (0)")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="one kernel each for what lies between matrices, and less kept for backward (on GPUs with Triton)")
    add("--deterministic", action="store_true", help="bitwise repeatable on a GPU, slower")
    add("--out", default="out", help="directory of checkpoints (out)")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint in --out")
    add("--save-every", type=int, default=100, help="steps between checkpoints; 0: at the end only (100)")
    add("--eval-every", type=int, default=0, help="steps between validations; 0: first and last only (0)")
    add("--log-every", type=int, default=10, help="steps between lines when not on a terminal (10)")
    add("--dry-run", action="store_true", help="3 steps (or --steps), nothing written; then memory by category")
    add("--log", metavar="FILE", help="JSON lines, one object a step and a validation")
    add("--sample", help="prompt to go on from at the end (text tokens only; default 'def ')")
    add("--sample-tokens", type=int, default=200, help="tokens to generate (200)")
    add("--temperature", type=float, default=0.8, help="of the sample; 0: always the likeliest (0.8)")
    add("--sample-top", type=int, default=50, metavar="K", help="candidates for each sampled token (50)")
    return p


def parse(argv):
    """Flags, completed from the checkpoint (with --resume), the preset and the device. ValueError on what cannot be."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.start, args.checkpoint, args.data_digest = 0, None, None
    trial = 3 if args.steps is None else args.steps  # steps of a dry run
    if args.plan is not None and args.resume:
        raise base.BadInput("--plan with --resume: a plan is for a new run: drop --resume")
    fit = args.fit is not None
    if fit and (not 0 < args.fit < 2**20 or not args.dry_run and (args.resume or args.plan is not None)):
        raise base.BadInput(f"--fit {args.fit:g}: GiB of a card, above 0, for a new run: drop --resume and --plan")
    if args.resume:
        record, path = find_checkpoint(args.out)
        asked = args
        parser.set_defaults(**record["flags"])
        args = parser.parse_args(argv)
        args.start, args.checkpoint, args.data_digest = record["step"], str(path), record["data"]
        for name, known in (("states", forging.LAYOUTS), ("loss", LOSSES)):
            base.refuse((getattr(args, name) not in known, f"the checkpoint in --out {args.out} has --{name} "
                         f"{getattr(args, name)}, which is gone: start anew with another --out"))
        args.sync = asked.sync if record["flags"]["sync"] == "none" else args.sync
        alone = record["flags"]["sync"] in ("none", "ddp")
        for name in (*MODEL_FLAGS, *STATE_FLAGS):
            wish, has = getattr(asked, name), record["flags"][name]
            if alone and name in ("sync", "inner_steps", "outer"):
                continue  # such a checkpoint has one set of weights: workers may go on from it in any way
            if wish not in (None, has):
                raise base.BadInput(f"--{name} {wish}: the checkpoint has {has}: drop the flag, or use another --out")
    if args.dry_run and trial == 0:
        raise base.BadInput("--dry-run --steps 0: there would be nothing to see: use at least one step")
    if args.dry_run:
        args.steps, args.log = args.start + trial, None
    args.torchrun = "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
    if args.torchrun and args.gpus is not None:
        raise base.BadInput("--gpus: under torchrun, its --nproc-per-node says how many processes there are: drop "
                            "--gpus")
    present = torch.cuda.device_count()
    args.gpus = args.gpus if args.gpus is not None else 1 if args.torchrun else max(1, args.tp)
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if args.torchrun else args.gpus
    planned = only_planned(args)
    on_gpus = planned or args.device == "cuda" or args.device is None and (present > 0 or args.gpus > 1)
    chosen = [f"--{name}" for name in ("sync", "optimizer", "tp", "recompute", "offload", "moe")
              if args.plan is not None and getattr(args, name) not in (None, False, 1, 0)]
    if chosen:
        raise base.BadInput(f"--plan with {', '.join(chosen)}: it chooses flags, for a dense model: drop {chosen[0]}")
    if on_gpus and wanted > present and not planned:
        raise base.BadInput(
            f"{wanted} process(es) on GPUs, but this machine has {present} GPU(s): use "
            f"{f'--gpus {present}, or ' if present else ''}processes on the CPU with --device cpu"
        )
    args.device = "cuda" if on_gpus else "cpu"
    if args.tokens and not (args.resume or has_text(args)):
        raise base.BadInput(f"--tokens {args.tokens}: says how text is cut, but {args.data} holds tokens: drop the "
                            "flag")
    args.preset = args.preset or ("gpt2-small" if args.device == "cuda" else "cpu")
    args.rule = args.rule or "muon"
    if args.muon_lr is not None and args.rule != "muon":
        raise base.BadInput(f"--muon-lr {args.muon_lr:g} with --rule {args.rule}: there is no Muon: drop one of them")
    if args.rule == "muon" and args.muon_lr is None:
        args.muon_lr = MUON_LR
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value["muon" if args.rule == "muon" else "adamw"] if name == "lr" else value)
    if args.batch is None and args.device == "cpu" and args.fit is None:
        args.batch = 8
    for name in ("layers", "dim", "heads", "seq", "batch", "accum", "gpus", "tp", "log_every", "vocab", "sample_top",
                 "top_k"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise base.BadInput(f"--{name.replace('_', '-')} {value}: must be at least 1")
    processes = args.processes = int(os.environ.get("WORLD_SIZE", 1)) if args.torchrun else args.gpus
    args.vocab = args.vocab or default_vocab(args)
    check_tensor_parallel(args, wanted)
    workers = processes // args.tp
    args.dtype, args.why_dtype = choose_dtype(args)
    if args.loss is None:  # the sparse gradient's kernels need Hopper; elsewhere there is nothing to decide
        args.loss = "cce" if args.tp == 1 and fetches(torch.device(args.device), args.dim, args) else "cce-exact"
    args.sync = choose_sync(args, workers, record if args.resume else None)
    args.outer = choose_outer(args, args.resume and record["flags"]["sync"] in low_comm.METHODS)
    args.optimizer, args.why_optimizer = choose_optimizer(args, workers)
    args.clip = float(args.rule != "muon") if args.clip is None else args.clip
    args.states = args.states or "fp32"
    choose_experts(args, processes)
    if args.compile is None:
        args.compile = has_kernels(torch.device(args.device))
    for name in ("steps", "save_every", "eval_every", "clip", "lr", "muon_lr", "temperature", "sample_tokens", "seed"):
        if not 0 <= (getattr(args, name) or 0) < 2**63:
            raise base.BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative (nor past "
                                "2^63)")
    if args.dim % (2 * args.heads):
        raise base.BadInput(f"--dim {args.dim} --heads {args.heads}: dim must be a multiple of 2 * heads")
    if args.val and not args.data:
        raise base.BadInput("--val: goes with --data: the embedded corpus has its own validation files")
    args.data, args.val = (pattern and os.path.abspath(pattern) for pattern in (args.data, args.val))
    if args.sample is None and has_text(args):
        args.sample = "def "
    if args.sample and not has_text(args):
        raise base.BadInput(f"--sample: no decoder for the tokens of {args.data}: use text data")
    if args.sample and max(encode(args.sample, args.tokens)) >= args.vocab:
        raise base.BadInput(f"--sample {args.sample!r}: a token is outside the vocabulary of {args.vocab}: use another")
    if not args.steps and not args.sample:
        raise base.BadInput("--steps 0: nothing to train, and no text to sample: raise --steps")
    args.why_loss = "materialised logits"
    if args.loss != "reference":
        args.why_loss = "blocked PyTorch" if args.device == "cpu" or base.INTERPRETED else "Triton kernels"
        if not base.HAS_TRITON:
            args.why_loss = "blocked PyTorch: Triton is not installed"
    return args


def only_planned(args):
    """Whether nothing runs, on a device that need not be here: --plan, or --fit without --dry-run."""
    return args.plan is not None or args.fit is not None and not args.dry_run


def check_tensor_parallel(args, local):
    """ValueError for what --tp cannot do. local: processes on this machine."""
    K, asked = args.tp, f"--tp {args.tp}"
    if K == 1:
        return
    if local % K:
        raise base.BadInput(f"{asked} with {local} process(es) on this machine: a worker is {K} of them: use --gpus "
                            f"{-(-local // K) * K} (or as many under torchrun)")
    if args.heads % K:
        fits = [k for k in range(1, args.heads + 1) if args.heads % k == 0]
        raise base.BadInput(f"{asked} --heads {args.heads}: a process has whole heads: use --tp "
                            f"{min(fits, key=lambda k: abs(k - K))}")
    if args.vocab % K:
        raise base.BadInput(f"{asked} --vocab {args.vocab}: its processes have equal parts of the classes: use --vocab "
                            f"{-(-args.vocab // K) * K}")
    if args.loss in ("cce", "cce-sparse", "reference"):
        why = "makes all logits" if args.loss == "reference" else "takes its sample from one whole vocabulary"
        raise base.BadInput(f"{asked} with --loss {args.loss}, which {why}: use --loss cce-exact")
    if args.moe:
        raise base.BadInput(f"{asked} with --moe {args.moe}: experts would not be cut, every process would run them "
                            "all: spread them with --sync ddp, without --tp")
    border = forging.BORDERS[args.states or "fp32"]
    if args.dim // K % border:
        raise base.BadInput(f"{asked} --states {args.states} --dim {args.dim}: groups of {border} columns would be "
                            f"cut: use a --dim that {K * border} divides, or --states fp32")


def choose_optimizer(args, workers):
    """(optimizer, reason): forge-cce unless something needs gradients; ValueError for what cannot be together."""
    narrow = args.states not in (None, "fp32")
    asked = f"--optimizer {args.optimizer}" if args.optimizer else f"--states {args.states}"
    forging_asked = args.optimizer in ("forge", "forge-cce") or args.optimizer is None and narrow
    if narrow and args.optimizer == "ordinary":
        raise base.BadInput(f"--states {args.states} goes with --optimizer forge-cce or forge: drop --optimizer "
                            "ordinary")
    summed = workers > 1 and args.sync == "ddp"
    if summed and forging_asked:
        raise base.BadInput(f"{asked} with --sync ddp, which sums gradients that forge never makes: use --sync diloco"
                            + (", or start anew with another --out" if args.resume else
                            ", or --optimizer ordinary" if args.optimizer else ", or drop --states"))
    if args.optimizer == "forge-cce" and args.loss not in FORGED:
        raise base.BadInput(f"--optimizer forge-cce with --loss {args.loss}: it takes {', '.join(FORGED)}: use forge")
    if args.optimizer:
        return args.optimizer, "as asked, or in the checkpoint"
    name = "forge-cce" if args.loss in FORGED else "forge"
    if forging_asked:
        return name, f"for {asked}"
    for needs, reason in ((summed, "--sync ddp"), (args.accum > 1, f"--accum {args.accum}")):
        if needs:
            return "ordinary", f"{reason}, which needs the sum of all gradients first"
    return name, "no sum of gradients over processes or micro-batches"


def choose_sync(args, workers, record):
    """The flag, completed: diloco for several workers, none for one. ValueError for what cannot be."""
    sync = args.sync or ("diloco" if workers > 1 else "none")
    if args.inner_steps is not None and sync not in low_comm.METHODS:
        raise base.BadInput(f"--inner-steps {args.inner_steps}: with --sync {sync} there are no rounds: drop it, or "
                            "use another --sync")
    if args.inner_steps is not None:
        method = low_comm.METHODS[sync]
        least = max(1, method.fragments, method.tau or 0)
        if args.inner_steps < least:
            raise base.BadInput(f"--inner-steps {args.inner_steps}: --sync {sync} needs at least {least}")
    if record and record["flags"]["sync"] in low_comm.METHODS:
        saved, tp = 1 + len(record["workers"]), record["tp"]
        idle = args.steps <= (record["step"] if tp == args.tp else 0)
        if (saved, tp) != (args.processes, args.tp) and not idle:
            there, here = (f"{n // k} worker(s)" + f" of {k} processes each" * (k > 1)
                           for n, k in ((saved, tp), (args.processes, args.tp)))
            flags = f"--gpus {saved}" + f" --tp {tp}" * (tp > 1 or args.tp > 1)
            raise base.BadInput(f"the checkpoint is of {there} that train apart (--sync {sync}), this launch has "
                                f"{here}: use {flags} (or as many processes under torchrun)")
    if args.steps and args.tp > 1 and (sync == "none") != (workers == 1) and sync != "ddp":
        raise base.BadInput(f"--sync {sync} with --tp {args.tp} and {workers} worker(s): use --sync "
                            f"{'none' if workers == 1 else 'diloco or ddp'}")
    return sync


def choose_experts(args, processes):
    """--top-k, --balance and --ep-policy, completed. ValueError for what cannot be."""
    args.moe = args.moe or 0
    if not 0 <= args.moe <= 2**16:
        raise base.BadInput(f"--moe {args.moe}: use 0 (none) to {2**16} experts")
    asked = dict(top_k=args.top_k, balance=args.balance, ep_policy=args.ep_policy)
    if not args.moe:
        for name, value in asked.items():
            if value is not None:
                raise base.BadInput(f"--{name.replace('_', '-')} {value}: there are no experts: pass --moe E, or "
                                    "drop it")
        return
    args.top_k, args.balance = args.top_k or min(2, args.moe), args.balance or "global"
    if args.top_k > args.moe:
        raise base.BadInput(f"--top-k {args.top_k} --moe {args.moe}: a token cannot go to more experts than there are")
    spread_out = processes > 1 and args.sync == "ddp"
    if args.ep_policy and not spread_out:
        raise base.BadInput(f"--ep-policy {args.ep_policy}: every process has all experts: use --gpus N --sync ddp, or "
                            "drop it")
    if spread_out and args.moe % processes:
        raise base.BadInput(f"--moe {args.moe}: {processes} processes cannot share them equally: use a multiple of "
                            f"{processes}")
    if args.balance == "bias" and processes > 1 and not spread_out:
        raise base.BadInput(f"--balance bias with --sync {args.sync}: each worker's biases would go their own way: use "
                            "--balance global, or --sync ddp")
    args.ep_policy = args.ep_policy or ("ep" if spread_out else None)


def choose_outer(args, going_on):
    """The flag, completed: None for 06's own values. going_on: from a checkpoint that has rounds behind it."""
    method = low_comm.METHODS.get(args.sync)
    if args.outer is None:
        if args.sync not in low_comm.SHORT_OUTER or going_on:
            return None
        return low_comm.outer_for(args.sync, (args.steps - args.start) // (args.inner_steps or method.H))
    if not (method and method.outer.momentum):
        raise base.BadInput(f"--outer: with --sync {args.sync} there is no outer momentum: drop it, or use --sync "
                            "diloco")
    if not (0 < args.outer[0] and 0 <= args.outer[1] < 1):
        raise base.BadInput(f"--outer {args.outer[0]} {args.outer[1]}: a rate above 0 and a momentum in 0 ... 1 (not "
                            "1)")
    return args.outer


def choose_dtype(args):
    """(dtype, reason)."""
    if only_planned(args):
        return args.dtype or "bf16", "to plan with"
    if args.device == "cpu" and args.dtype is None:
        return "fp32", "fastest on most CPUs"
    if args.device == "cpu":
        return args.dtype, "as asked, or in the checkpoint"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if args.dtype == "bf16" and not has_bf16:
        raise base.BadInput(f"--dtype bf16: {torch.cuda.get_device_name()} has none (Ampere and later do): use fp32")
    if args.dtype:
        return args.dtype, "as asked, or in the checkpoint"
    if has_bf16:
        return "bf16", "this GPU has it; master weights, norms and sums in fp32"
    return "fp32", f"{torch.cuda.get_device_name()} is older than bf16"


def run_replaceable(args):
    """run(args). Where the others have gone on without this worker, and start_processes() replaces those that a signal
    ends, that is how it ends."""
    try:
        return run(args)
    except low_comm.Missed:
        if args.torchrun or args.device != "cpu":
            raise
        print(f"worker {os.environ['RANK']}: the others have gone on without it: it ends, for another to take its "
              "place", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(args):
    """The body of one process of several: what went wrong becomes its exit status, not a traceback."""
    try:
        status = guarded(run_replaceable, args)
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


def guarded(function, *args):
    """function(*args), with the errors that a user can mend as one line and status 2."""
    try:
        return function(*args)
    except (base.BadInput, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        print("train.py: out of memory: use a smaller --batch, the same with more --accum, or see what fits: --fit GIB",
              file=sys.stderr)
    return 2


def launch(argv):
    # Read when CUDA starts. Without it up to 4 % of a full card's memory lies in pieces that are too small to be used.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    args = parse(argv)
    argv = sys.argv[1:] if argv is None else argv
    if args.plan is not None:
        return print_plan(args, argv)
    if only_planned(args):
        return print_fits(args, argv)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    writes = args.steps and not args.dry_run and (not args.torchrun or os.environ["RANK"] == "0")
    if writes:
        Path(args.out).mkdir(parents=True, exist_ok=True)  # fails now rather than when there is something to lose
    with locked(args.out) if writes else contextlib.nullcontext():
        return start_processes(args)


def start_processes(args):
    """The processes that these flags ask for, or this one's part under torchrun; the exit status."""
    if args.torchrun:
        parallel.join_group(args.device)
        seen = not args.steps or args.dry_run or Path(args.out).is_dir()  # which rank 0 has made
        if not World(args.device).smallest(int(seen)):
            raise base.BadInput(f"--out {args.out}: a machine does not see the directory that another has made there: "
                                "name one that all of them share")
        run_rank(args)  # other machines' torchruns do not end this process when theirs is lost
        dist.destroy_process_group()
        return 0
    if args.gpus == 1:
        return run(args)
    # Over gloo workers that train apart survive the loss of one; NCCL's watchdog ends them all.
    grace = 600 if args.sync in low_comm.METHODS else 30  # seconds to stop in: they stop after a round
    spare = args.gpus - 1 if args.device == "cpu" and args.sync in low_comm.METHODS and args.tp == 1 else 0
    if args.batch is not None:
        check_batch(args)
    if args.steps:
        load_data(args, packages=args.device == "cuda")  # what is wrong with the data is said once, before any process
    try:
        lost = parallel.spawn(run_rank, args.gpus, args.device, (args,), grace=grace, spare=spare, replace=True)
        if lost:
            print(f"train.py: process(es) {lost} were lost, the others went on", file=sys.stderr)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code >= 0:
            return error.exit_code  # the process has said why
        saved = checkpoint_files(args.out)
        go_on = f"go on with --resume --out {shlex.quote(args.out)}" if saved else "there is no checkpoint yet"
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
