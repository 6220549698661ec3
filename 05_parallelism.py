"""05 - One model on many processes: what to cut, what to send, what it saves; who waits for whom; and who is lost.

The problem in one number
    Llama 3 70B in training takes 16 bytes a parameter (bf16 weights and gradients, AdamW in fp32): 1.1 TB, and a GPU
    has 0.08 to 0.14. So the model is cut: by batch, by weight, by layer, by token. Every cut here is a few lines of
    PyTorch over torch.distributed, and every one gives the gradients of the uncut model: in fp64 to 12 digits or more,
    where only the order of sums differs, and bit for bit where not even that does.

The maths                             n ranks; P parameters of w bytes, gradients of g, optimizer states of o; Psi = P w
    data (section 2)      sum over ranks of dW               2 Psi (n-1)/n bytes sent; ZeRO cuts o, then g, then w
    tensor (3)            Y = X [A1 A2], Z = [Y1 Y2] [B1; B2] = Y1 B1 + Y2 B2          one sum forward, one backward
    vocabulary (4)        lse = m + log sum_r exp(lse_r - m), m = max_r lse_r          one MAX, one SUM of 2 N numbers
    pipeline (6)          p stages, m micro-batches: idle time / work = (p - 1) / m, less with other orders of work
    context (7)           softmax over all keys from blocks of keys, merged by log-sum-exp as in 02
    documents (9)         s tokens cost a s + b s^2: equal tokens are not equal work
    planner (12)          time = FLOPs / speed + messages that nothing hides + bubble; energy = a FLOPs + b bytes + W t
  f: identity forward, sum over ranks backward. g: the reverse. All of (3) and (4) is: f before a matrix cut by its
  outputs, g after one cut by its inputs. Gather along the sequence and reduce-scatter are such a pair, too.

Sections 1 to 8 cut the model. Sections 9 to 12 decide: policies for uneven documents, for two models in one and for
stages that are skipped, all played by one small simulator (play, in section 6) and set beside real processes; and a
planner that asks the formulas of all sections. Section 13 goes on when a rank is killed, and names slow ones.

How to launch
    python 05_parallelism.py                     2 processes: one a GPU if there are two (NCCL), else on the CPU (gloo)
    python 05_parallelism.py --ranks 4
    torchrun --nproc-per-node 2 05_parallelism.py
    python 05_parallelism.py --plan "params=8e9 layers=32 dim=4096 vocab=128256 seq=8192 gpus=64 gib=141 link=400"
    python 05_parallelism.py --break no-f        plant a famous bug and watch its check fail (exit status 1)

References (numbers: arXiv)
    Megatron-LM 1909.08053 (tensor), 2104.04473 (pipelines), 2205.05198 (sequence, recomputation). ZeRO 1910.02054.
    Zero Bubble Pipeline Parallelism 2401.10241. Ring Attention 2310.01889. Cut cross-entropy 2411.09009. FORGE
    2606.22932. DistCA 2510.18121, FlexSP 2412.01523, SkipPipe 2502.19913, packet spraying 2407.00550.
    Of the following we know only the abstracts: what they name is here, how it is done is our own. SSDTrain 2408.10013,
    Zeppelin 2509.21841, FlowTrain (2026), ElasWave 2510.00606, C4 2406.04594, energy of fine-tuning 2606.23546,
    Frontier 2312.12705.

Left out on purpose: overlap of tensor-parallel sums with matrix products, 2-D and 3-D tensor parallelism, DualPipe and
V-shaped schedules, ZeRO with micro-batches; the solvers of the papers of sections 9 to 11, where ours are greedy;
losing a rank over NCCL, whose watchdog ends the others.
"""

import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import json
import logging
import math
import multiprocessing.connection
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")

TIMEOUT = 20  # seconds: of a collective, and for all ranks to come
MIB, require, must_raise, on_death = base.MIB, base.require, base.must_raise, base.on_death
triton, tl = cce.triton, cce.tl


# ==== 0. Processes: start them, and let them find each other ==========================================================

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


def _start_method(fn, device):
    """How processes begin: "spawn", each imports torch anew (4 seconds of a core), or as copies of one that has it."""
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    files = [] if base.HAS_CUDA else ["__main__", fn.__module__]  # which look for a GPU: CUDA does not survive a fork
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", *files])  # torch.optim imports the latter
    return "forkserver"


class _Family:
    """The processes of a spawn(), whose arguments these are. lost: the ranks that a signal has ended."""

    def __init__(self, fn, ranks, device, args, timeout, spare, late, replace):
        self.ranks, self.spare, self.late, self.replace = ranks, spare, late, replace
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.setup = fn, ranks, self.store.port, torch.device(device).type, timeout, args
        self.method = _start_method(fn, device)
        self.lost, self.contexts = [], []  # (processes started together, the first one's rank, whose place it takes)

    def start(self, first, count, seat=None):
        context = torch.multiprocessing.start_processes(
            _rank_main, (first, seat, *self.setup), count, join=False, daemon=True, start_method=self.method
        )
        self.contexts.append((context, first, seat))

    def processes(self):
        return [process for context, *_ in self.contexts for process in context.processes]

    def watch(self):
        """Until all have ended, or replacements alone are left and had their last moment."""
        deadline = math.inf
        while True:  # sentinels: those of a context that have not ended well yet
            running = {key: (*item, i) for item in self.contexts for key, i in item[0].sentinels.items()}
            if not running or time.monotonic() > deadline:
                break
            first_ones = self.contexts[0][0]
            if deadline == math.inf and not first_ones.sentinels and any(p.exitcode == 0 for p in first_ones.processes):
                deadline = time.monotonic() + LAST_MOMENT
            for sentinel in multiprocessing.connection.wait(list(running), timeout=1):
                self.ended(sentinel, *running[sentinel])

    def ended(self, sentinel, context, first, seat, index):
        """What to do about a process that has: note it, start another in its place, or raise its error."""
        context.processes[index].join()
        status = context.processes[index].exitcode
        if status == 0:
            del context.sentinels[sentinel]
        elif seat is not None and (status > 0 or len(self.lost) >= self.spare):  # the others do without it
            del context.sentinels[sentinel]
            self.store.set(f"gone/{first + index}", "")
            print(f"the replacement of process {seat} ended with status {status}", file=sys.stderr)
        elif status < 0 and len(self.lost) < self.spare:
            del context.sentinels[sentinel]
            self.lost.append(first + index)
            self.store.set(f"gone/{first + index}", "")
            if self.replace:
                self.start(self.ranks + self.late + len(self.lost) - 1, 1, first + index if seat is None else seat)
        else:
            context.join(timeout=0)  # raises the error of a rank that failed


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
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of each process that it ends
    family = _Family(fn, ranks, device, args, timeout, spare, late, replace)
    try:
        family.start(0, ranks + late)
        family.watch()
    except (KeyboardInterrupt, SystemExit):
        for process in family.processes():
            process.terminate()
        deadline = time.monotonic() + grace
        for process in family.processes():
            process.join(max(0, deadline - time.monotonic()))
        raise
    finally:
        for process in family.processes():
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return family.lost


# ==== 1. Groups: who talks to whom, and the few ways to talk ==========================================================


class Groups(NamedTuple):
    """The process groups of this rank along each axis, None where the axis has size 1. `data`: dp and cp together, all
    ranks that see other tokens through the same weights, so whose gradients are summed. wires: see section 6."""

    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    wires: dict


def make_groups(dp=1, pp=1, cp=1, tp=1, timeout=600):
    """Groups for a mesh of dp x pp x cp x tp ranks; all ranks call it. tp varies fastest: it talks most, so its ranks
    are neighbours on the fastest links; pp slowest. timeout: seconds, of every collective, and to wait for the others.
    ValueError when the world has another size, TimeoutError with their numbers when ranks do not come."""
    sizes = dict(dp=dp, pp=pp, cp=cp, tp=tp)
    if any(not isinstance(k, int) or k < 1 for k in sizes.values()):
        raise base.BadInput(f"sizes {sizes}: each must be a whole number of at least 1")
    world, wanted = (dist.get_world_size() if dist.is_initialized() else 1), math.prod(sizes.values())
    if world != wanted:
        plan = " x ".join(f"{name} {k}" for name, k in sizes.items())
        raise base.BadInput(f"{plan} needs {wanted} ranks, but {world} were started: change the sizes or the number")
    if world > 1:
        meet("make_groups", timeout)
    ranks = torch.arange(world).view(pp, dp, cp, tp)
    span = datetime.timedelta(seconds=timeout)

    def along(*axes):
        others = [a for a in range(4) if a not in axes]
        lines = ranks.permute(*others, *axes).reshape(-1, math.prod(ranks.shape[a] for a in axes))
        if lines.shape[1] == 1:
            return None
        return dist.new_subgroups_by_enumeration(lines.tolist(), timeout=span)[0]

    wires = {} if pp == 1 else {(kind, color): along(0) for kind in "FB" for color in range(2 + pp % 2)}
    DP, CP = along(1), along(2)
    data = DP if cp == 1 else CP if dp == 1 else along(1, 2)  # every group costs connections and, on a GPU, memory
    return Groups(DP, along(0), CP, along(3), data, wires)


arrivals = Counter()


def meet(where, timeout):
    """Wait until all ranks are here. After `timeout` seconds TimeoutError names those that are not: a collective would
    say that it waited, not for whom."""
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    arrivals[where] += 1
    keys = [f"{where}/{arrivals[where]}/{r}" for r in range(world)]
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"rank(s) {missing} of {world} did not come to {where} in {timeout} s: what did they "
                               "print?")
        time.sleep(0.005)


def size(group):
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group):
    return 0 if group is None else dist.get_rank(group)


sent = Counter()  # bytes that this rank sent, by operation, counted as rings send them: (n - 1) / n of what they carry
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named anew in torch 2.13
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count(kind, nbytes, group):
    n = size(group)
    sent[kind] += nbytes * (n - 1) // n


def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum over the group of x, any shape, as a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(out, op, group=group)
        count("all-reduce", 2 * out.nbytes, group)
    return out


def gather(x, group, dim=1):
    """The ranks' equal pieces, joined along dim."""
    if group is None:
        return x
    out = x.new_empty(size(group) * x.shape[0], *x.shape[1:])
    gather_single(out, x.contiguous(), group=group)
    count("all-gather", out.nbytes, group)
    return out if dim == 0 else torch.cat(out.chunk(size(group)), dim)


def scatter(x, group, dim=1):
    """This rank's piece, along dim, of the sum over the group. ValueError when it cannot be cut equally."""
    n = size(group)
    if x.shape[dim] % n:
        raise base.BadInput(f"{x.shape[dim]} positions over {n} ranks: pad the sequence to a multiple of {n}")
    if group is None:
        return x
    pieces = torch.cat(x.chunk(n, dim))  # one after the other, as the collective wants them
    out = torch.empty_like(pieces.chunk(n)[0])
    scatter_single(out, pieces, group=group)
    count("reduce-scatter", pieces.nbytes, group)
    return out


def shares(total, n):
    """[(start, stop)] of n pieces whose sizes differ by at most 1."""
    return [(total * r // n, total * (r + 1) // n) for r in range(n)]


# ==== 2. Data parallel: sum the gradients, while backward still makes the others; then shard what is repeated =========


class Buckets:
    """Gradients of lists of parameters, each list one flat vector (padded to a multiple of `multiple`), reduced as soon
    as backward has finished its last gradient and all lists before it: every rank must reduce in one order, also when a
    rank has no gradient for something. reduce(i, flat) starts the reduction and returns a handle to wait for. keep:
    finish() returns the flat vectors; else each is dropped when the next one has started."""

    def __init__(self, buckets, reduce, multiple=1, keep=True):
        self.buckets, self.reduce, self.multiple, self.keep, self.enabled = buckets, reduce, multiple, keep, True
        self.place = {
            p: (i, start) for i, bucket in enumerate(buckets) for p, start in zip(bucket, offsets(bucket), strict=True)
        }
        self.begin()
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in self.place]

    def begin(self):
        self.flat, self.works = {}, []
        self.missing = [set(bucket) for bucket in self.buckets]

    def close(self):
        """Leave the parameters alone from now on."""
        for hook in self.hooks:
            hook.remove()

    def ready(self, p):
        """Autograd's hook: this backward pass has added all that it will add to p.grad."""
        if not self.enabled:
            return
        if self.place[p][0] < len(self.works):
            raise RuntimeError("a second backward pass before finish(): set enabled to False for all but the last")
        self.take(p)
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.launch()

    def take(self, p):
        """Move p's gradient, zeros if it has none, to its place."""
        i, offset = self.place[p]
        if i not in self.flat:
            bucket = self.buckets[i]
            room = -(-sum(p.numel() for p in bucket) // self.multiple) * self.multiple
            self.flat[i] = torch.zeros(room, dtype=bucket[0].dtype, device=bucket[0].device)
        if p.grad is not None:
            self.flat[i][offset : offset + p.numel()].copy_(p.grad.reshape(-1))
            p.grad = None
        self.missing[i].discard(p)

    def launch(self):
        i = len(self.works)
        for p in list(self.missing[i]):  # of an earlier micro-batch, say
            self.take(p)
        self.works.append(self.reduce(i, self.flat[i]))
        if i and not self.keep:
            self.wait(i - 1)

    def wait(self, i):
        if self.works[i] is not None:
            self.works[i].wait()
        if not self.keep:
            del self.flat[i]

    def finish(self):
        """Reduce what backward did not reach, and wait for all; {i: flat vector}."""
        while len(self.works) < len(self.buckets):
            self.launch()
        for i in sorted(self.flat):
            self.wait(i)
        flat = self.flat
        self.begin()
        return flat


def offsets(parameters):
    """Where each begins in their flat vector."""
    return list(itertools.accumulate((p.numel() for p in parameters[:-1]), initial=0))


def views(flat, parameters):
    """Slices of the flat vector in the parameters' shapes."""
    return [flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets(parameters), strict=True)]


def global_count(kept, group):
    """kept (...) bool: tokens that count, over all ranks. A mean of the ranks' means is wrong when these differ."""
    return all_reduce(kept.sum(), group).clamp(min=1)


class DataParallel(Buckets):
    """What data_parallel returns. While `enabled` is False nothing is sent before finish(): for all but the last of a
    step's backward passes, and for run_pipeline, which adds to .grad behind autograd's back."""

    def __init__(self, parameters, group, bucket_mib):
        buckets, room = [], 0
        for p in reversed(parameters):  # backward makes the last layer's gradients first
            if room < p.nbytes or buckets[-1][0].dtype != p.dtype:
                buckets.append([])
                room = bucket_mib * MIB
            buckets[-1].append(p)
            room -= p.nbytes
        super().__init__(buckets, functools.partial(start_all_reduce, group=group))

    def finish(self):
        """After backward, before the optimizer: wait for the sums; every p.grad is a view into its bucket."""
        for i, flat in super().finish().items():
            for p, view in zip(self.buckets[i], views(flat, self.buckets[i]), strict=True):
                p.grad = view


def start_all_reduce(i, flat, group):
    if group is None:
        return None
    count("all-reduce", 2 * flat.nbytes, group)
    return dist.all_reduce(flat, group=group, async_op=True)


def data_parallel(model, group, bucket_mib=100):
    """Sum gradients over the group during backward. Returns a DataParallel, whose finish() has to be called after it.

    Gradients are SUMS over ranks: divide a rank's summed token losses by global_count. Parameters are taken from rank 0
    of the group, so that all start alike."""
    named = sorted(model.named_parameters(), key=lambda item: "." not in item[0])  # the classifier, GPT's own, last
    parameters = [p for _, p in named if p.requires_grad]
    if group is not None:
        for p in parameters:
            dist.broadcast(p.detach(), group=group, group_src=0)
    return DataParallel(parameters, group, bucket_mib)


def zero_bytes(P, n, stage, w=4, g=4, o=8):
    """Bytes a rank holds for P parameters over n ranks; mixed precision is w, g, o = 2, 2, 12. ZeRO, section 5."""
    return [P * (w + g + o), P * (w + g) + P * o // n, P * w + P * (g + o) // n, P * (w + g + o) // n][stage]


class Zero:
    """ZeRO stages 1, 2, 3 over flat shards: rank r owns the r-th of n equal parts of every unit (embedding, each block,
    the rest): its AdamW state (1), its gradient (2), its weights (3). With 16-bit weights, fp32 masters belong to
    the state.

    1 and 2 send what data parallelism sends: reduce-scatter of gradients and all-gather of new weights are the halves
    of an all-reduce. 3 gathers a block's weights before its forward, again before its backward, and drops them after
    each. Use: backward(); finish(); step(). Gradients are SUMS over ranks, of one backward pass a step. `adamw`: what
    torch.optim.AdamW takes. All ranks start from equal weights, all of them trained, a unit's all of one dtype."""

    def __init__(self, model, group, stage, **adamw):
        if stage not in (1, 2, 3):
            raise base.BadInput(f"stage is {stage!r}: use 1, 2 or 3 (0 is data_parallel)")
        self.group, self.stage, n = group, stage, size(group)
        modules = [model.embedding, *model.blocks]
        own = [list(module.parameters()) for module in modules]
        inside = {p for unit in own for p in unit}
        self.units = own + [[p for p in model.parameters() if p not in inside]]  # the last: norm and classifier
        self.flat, self.shards, self.own, self.gradients, self.whole = [], [], [], {}, {}
        for unit in self.units:
            room = -(-sum(p.numel() for p in unit) // n) * n
            flat = torch.zeros(room, dtype=unit[0].dtype, device=unit[0].device)
            for p, view in zip(unit, views(flat, unit), strict=True):
                view.copy_(p.detach())
                p.data = view  # the model's weights are views of the flat vector from now on
            mine = self.mine(flat).clone() if stage == 3 else self.mine(flat)
            self.flat.append(flat)
            self.own.append(mine)  # this rank's weights
            self.shards.append(nn.Parameter(mine.to(torch.promote_types(flat.dtype, torch.float32))))  # or its masters
        self.optimizers = [torch.optim.AdamW([shard], **adamw) for shard in self.shards]
        last = len(self.units) - 1  # backward finishes the units from the last to the first
        backwards = [self.units[last - k] for k in range(len(self.units))]
        self.buckets = Buckets(backwards, lambda k, flat: self.reduce(last - k, flat), n, keep=stage == 1)
        if stage == 3:
            for i, module in enumerate([*modules, model]):
                module.register_forward_pre_hook(lambda *_, i=i: self.fetch(i))
                if i < last:  # the loss, outside of any module, uses the classifier too: it stays until its gradient
                    module.register_forward_hook(lambda *_, i=i: self.drop(i))
                if 0 < i < last:  # an embedding's backward does not read the weights
                    module.register_full_backward_pre_hook(lambda *_, i=i: self.fetch(i))
                self.drop(i)

    def mine(self, flat):
        return flat.chunk(size(self.group))[rank_in(self.group)]

    def fetch(self, i):
        """Stage 3: gather the weights of unit i, unless they are there."""
        storage = self.flat[i].untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat[i].nbytes)
            self.collect(i)

    def collect(self, i):
        """All shards' weights into the flat vector: past autograd, which counts writes to what it saved."""
        if self.group is None:
            self.flat[i].copy_(self.own[i])
        else:
            gather_single(self.flat[i], self.own[i].clone(), group=self.group)
            count("all-gather", self.flat[i].nbytes, self.group)

    def drop(self, i):
        """Stage 3: give back the memory of unit i's weights. The views into it stay."""
        self.flat[i].untyped_storage().resize_(0)

    def reduce(self, i, flat):
        """Start the reduce-scatter of unit i's gradients."""
        if self.stage == 3:
            self.drop(i)
        shard = self.gradients[i] = torch.empty_like(self.mine(flat))
        if self.group is None:
            shard.copy_(flat)
            return None
        count("reduce-scatter", flat.nbytes, self.group)
        return scatter_single(shard, flat, group=self.group, async_op=True)

    def finish(self):
        """Wait for the sums of this rank's shards."""
        self.whole = self.buckets.finish()
        for k, flat in self.whole.items():  # stage 1 keeps all gradients; its own are sums now
            i = len(self.units) - 1 - k
            self.gradients[i] = self.mine(flat).copy_(self.gradients[i])

    def resident(self):
        """Bytes of weights, gradients and optimizer state that this rank holds, between finish() and step()."""
        total = lambda tensors: sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())  # noqa: E731
        weights = self.own if self.stage == 3 else self.flat
        gradients = self.whole.values() if self.stage == 1 else self.gradients.values()
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        moments = [t for state in states for t in state.values() if t.dim()]
        masters = [shard for shard, own in zip(self.shards, self.own, strict=True) if shard.dtype != own.dtype]
        return total(weights) + total(gradients) + total(moments) + total(masters)

    def step(self):
        """AdamW on this rank's shards; stages 1 and 2 gather the new weights now, 3 when they are used."""
        for i, (shard, optimizer) in enumerate(zip(self.shards, self.optimizers, strict=True)):
            shard.grad = self.gradients.pop(i).to(shard.dtype)  # of one unit at a time, where masters are wider
            optimizer.step()
            shard.grad = None
            self.own[i].copy_(shard.detach())  # the same memory, where they are of one dtype
            self.collect(i) if self.stage < 3 else self.drop(i)
        self.whole = {}


# ==== 3. Tensor parallel: a matrix is cut, the activations between two cuts are narrower ==============================


class _Conjugate(torch.autograd.Function):
    """there(x) forward, back(gradient) backward: two collectives that are each other's transposes."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None, None


def identity(x, group):
    return x.view_as(x)


def enter(x, group, sequence=False):
    """Before matrices that are cut over the group: f, of x (B, T, D), the same on all ranks; or with `sequence`,
    gather, of this rank's positions x (B, T/n, D)."""
    pair = (gather, scatter) if sequence else (identity, all_reduce)
    return x if group is None else _Conjugate.apply(x, group, *pair)


def leave(y, group, sequence=False):
    """After them: the sum over ranks of their parts y (B, T, D): g, the same for all; or scatter, (B, T/n, D)."""
    pair = (scatter, gather) if sequence else (all_reduce, identity)
    return y if group is None else _Conjugate.apply(y, group, *pair)


def as_product(x):
    """x in the dtype that autocast would give it for a matrix product: half the bytes to send."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype == torch.float32
    return x.to(torch.get_autocast_dtype(kind)) if cast else x


def cut(module, name, dim, group, origins, path):
    """Keep this rank's share of a parameter's dimension `dim`; its origin in the whole goes into `origins`."""
    weight = getattr(module, name)
    start, stop = shares(weight.shape[dim], size(group))[rank_in(group)]
    origins[path] = (start, 0) if dim == 0 else (0, start)
    mine = weight.detach().narrow(dim, start, stop - start).clone()
    setattr(module, name, nn.Parameter(mine, requires_grad=weight.requires_grad))
    getattr(module, name).cut = dim
    return start, stop


def column_linear(linear, group, sequence, **where):
    """Y = X A^T cut by outputs: rank r makes columns of Y. With `sequence` the gathered X is not kept for dW: its own
    positions are, and backward gathers them again (arXiv 2205.05198)."""
    cut(linear, "weight", 0, group, **where)

    def forward(x):
        x = as_product(x)
        full = enter(x, group, sequence)
        if not sequence:
            return type(linear).forward(linear, full)
        theirs = full.untyped_storage().data_ptr()
        pack = lambda t: t.shape if t.untyped_storage().data_ptr() == theirs else t  # noqa: E731
        unpack = lambda t: gather(x.detach(), group).view(t) if isinstance(t, torch.Size) else t  # noqa: E731
        with saved_tensors_hooks(pack, unpack):
            return type(linear).forward(linear, full)

    linear.forward = forward


def row_linear(linear, group, sequence, **where):
    """Z = Y B^T cut by inputs: rank r has columns of Y and makes a part of the sum Z."""
    cut(linear, "weight", 1, group, **where)
    linear.leave = functools.partial(leave, group=group, sequence=sequence)
    linear.forward = lambda y: linear.leave(type(linear).forward(linear, y))


def cut_embedding(embedding, group, sequence, **where):
    """Each rank looks up the tokens of its range of classes, 0 for others; the sum has one term that is not 0."""
    start, stop = cut(embedding, "weight", 0, group, **where)

    def forward(tokens):
        mine = (tokens >= start) & (tokens < stop)  # (B, T)
        x = type(embedding).forward(embedding, (tokens - start).where(mine, 0))  # (B, T, D)
        return leave(x * mine.unsqueeze(-1), group, sequence)

    embedding.forward = forward


def tensor_parallel(model, group, sequence=False):
    """Cut a GPT of 01 in place: every rank of the group keeps whole heads, a part of each MLP, a range of the classes
    of embedding and classifier (their sizes differ by at most one). All ranks start from equal weights.

    With `sequence`, what lies between the cut matrices (stream, norms) is cut along T: E comes out as (B, T/n, D). The
    loss is vocab_parallel_cross_entropy. Returns {name: (row, column)} of each cut matrix's first element in the whole:
    forge()'s `origins`. ValueError if the heads cannot be shared out. arXiv 1909.08053, 2205.05198."""
    n, heads, origins = size(group), model.config.heads, {}
    if heads % n:
        raise base.BadInput(f"{heads} heads over {n} tensor-parallel ranks: use a tp that divides the number of heads")
    if n == 1:
        return origins
    where = lambda path: dict(origins=origins, path=path)  # noqa: E731
    cut_embedding(model.embedding, group, sequence, **where("embedding.weight"))
    cut(model, "classifier", 0, group, **where("classifier"))
    for i, block in enumerate(model.blocks):
        for name, kind in (("qkv", column_linear), ("proj", row_linear), ("up", column_linear), ("down", row_linear)):
            if hasattr(block, name):  # 07's layers have experts instead of up and down
                kind(getattr(block, name), group, sequence, **where(f"blocks.{i}.{name}.weight"))
    if sequence:  # a norm saw only this rank's positions
        for name, p in model.named_parameters():
            if "norm" in name:
                p.register_hook(functools.partial(sum_norm_gradient, group=group))
    return origins


def sum_norm_gradient(gradient, group):
    return all_reduce(gradient, group)


def tensor_parallel_bytes(config, tokens, n, sequence, itemsize, fused_norm=False):
    """Bytes that the layers keep for backward. Of 18 tensors of D elements a token (01's activation_bytes), two of the
    stream and two of norms lie outside of the cuts, 14 inside; unfused norms keep two more outside."""
    outside, inside = (4 if fused_norm else 6) / (n if sequence else 1), 14 / n
    return tokens * config.dim * config.layers * itemsize * (outside + inside)


def tensor_parallel_traffic(config, tokens, n, sequence, itemsize):
    """Bytes a rank sends in a step: a layer's two cuts are two sums forward, two backward, each 2 (n-1)/n of an
    activation; in halves, gather and scatter, no more, and two gathers again for dW. The embedding is one g, the
    classifier one f, or their halves forward and backward."""
    return tokens * config.dim * itemsize * ((10 if sequence else 8) * config.layers + 4) * (n - 1) // n


# ==== 4. Vocabulary parallel: the classifier and its loss =============================================================


def join_slices(lse, target_logit, group):
    """lse (N,) over this rank's classes and the target's logit (N,), 0 where it is elsewhere -> those of the whole
    vocabulary: two all-reduces, one MAX and one SUM."""
    top = all_reduce(lse, group, dist.ReduceOp.MAX)  # (N,)
    total, target_logit = all_reduce(torch.stack(((lse - top).exp(), target_logit)), group)  # (2, N)
    return top + total.log(), target_logit


def vocab_parallel_cross_entropy(
    E, C, targets, group, vocab, *, sequence=False, loss=cce.linear_cross_entropy, **options
):
    """02's linear_cross_entropy of E (..., D), the same on all ranks of the group, for a classifier of `vocab` classes
    of which this rank holds C, rows shares(vocab, n)[rank]. targets (...), classes of the whole. The same loss on all
    ranks; dC of the own rows; dE whole. `sequence`: E is (B, T/n, D), as tensor_parallel(sequence=True) gives it.

    options: those of the loss (bias: of the own rows). loss: 02's; 03's, whose gradients "sparse" and "auto" take their
    head and their sample from one vocabulary, and are refused; or functools.partial(forging.forge_classifier,
    state=...), the step in backward. ValueError as there."""
    start, stop = shares(vocab, size(group))[rank_in(group)]
    if len(C) != stop - start:
        raise base.BadInput(f"C has {len(C)} rows: this rank's part of {vocab} classes is rows {start} to {stop}")
    join = functools.partial(join_slices, group=group)
    return loss(enter(E, group, sequence), C, targets, shard=cce.Shard(start, vocab, join), **options)


# ==== 5. FORGE under parallelism ======================================================================================

# Under tensor and sequence parallelism a rank has all tokens and so all of dW for its shard: forge() works as it is,
#     origins = tensor_parallel(model, group); forge(model, rule, layout, origins=origins, data_parallel=1)
# and the origins give every element the noise and the codes that it has in the whole model. Under data parallelism no
# rank has dW; but a sum over ranks is a sum over more tokens, and what dW is a product of can be gathered instead:


def factor_traffic(N, M, K, n, itemsize):
    """Bytes a rank sends to gather the factors dY (N, M) and X (N, K) of every rank: less than an all-reduce of dW in
    fp32, 8 M K (n-1)/n, while all ranks' tokens n N < 8 M K / ((M + K) itemsize)."""
    return n * N * (M + K) * itemsize * (n - 1) // n


def gather_factors(handle, group):
    """Between backward under handle.stash() and handle.release(): every weight's gradient becomes the sum over the
    group, whose ranks have equally many tokens, and all take the same step. Linear layers exchange factors, other
    weights gradients. The handle is made with data_parallel=1; ordinary parameters need data_parallel()."""
    for state in handle.states.values():
        products = [f for f in state.factors if isinstance(f, forging.Product)]
        if len(products) == len(state.factors):
            state.factors = [forging.Product(gather(f.dY, group, 0), gather(f.X, group, 0)) for f in products]
        else:
            whole = torch.zeros(state.weight.shape, device=state.weight.device)
            for factor in state.factors:
                factor.write(state, whole, 0, add=True)
            state.factors = [forging.Dense(all_reduce(whole, group))]
        state.seen = []


def ranks_of(p, group):
    """04's Ranks of a parameter that was cut over this group. Muon's update of the whole matrix is made by every rank,
    from their parts of the momentum's look ahead: muon_traffic. Adam-mini adds up the squares of a row whose columns
    are cut: an all-reduce of M numbers."""
    own_part = lambda whole: whole.chunk(size(group), p.cut)[rank_in(group)]  # noqa: E731
    columns = p.shape[1] * (size(group) if p.cut == 1 else 1)
    return forging.Ranks(columns, functools.partial(all_reduce, group=group),
                         functools.partial(gather, group=group, dim=p.cut), own_part)


def muon_traffic(M, K, n, itemsize=2):
    """Bytes a rank sends for Muon's step of a matrix (M, K) that is cut over n: its part, and a square of its norm."""
    return itemsize * M * K * (n - 1) // n + 2 * 4 * (n - 1) // n


# ==== 6. Pipeline: layers on different ranks, and lists of operations that decide when they wait ======================


class Op(NamedTuple):
    """F: forward; B: backward; W: where a schedule splits it off, the part of B that makes the linear layers' dW."""

    kind: str
    micro: int
    chunk: int = 0  # of this rank's layers: stage chunk * p + rank of p * chunks


def gpipe(p, m):
    """All forwards, then all backwards: m micro-batches in flight. arXiv 1811.06965."""
    return [[Op(kind, i) for kind in "FB" for i in range(m)] for _ in range(p)]


def one_f_one_b(p, m):
    """As soon as the last stage has a result, one backward for one forward: at most p - rank in flight. 2006.09503."""
    lists = []
    for rank in range(p):
        warm = min(m, p - rank - 1)
        ops = [Op("F", i) for i in range(warm)]
        for i in range(m):
            ops += [Op("F", i + warm)] * (i + warm < m) + [Op("B", i)]
        lists.append(ops)
    return lists


def interleaved(p, m, chunks=2):
    """1F1B over `chunks` thinner stages a rank: a bubble is one thin stage, for more to send. arXiv 2104.04473."""
    if m % p:
        raise base.BadInput(f"{m} micro-batches over {p} ranks: interleaving needs a multiple of {p}")

    def nth(kind, k):  # p micro-batches go through one chunk, then the same through the next
        round_, turn = divmod(k, p * chunks)
        chunk = turn // p if kind == "F" else chunks - 1 - turn // p
        return Op(kind, round_ * p + k % p, chunk)

    lists, total = [], m * chunks
    for rank in range(p):
        warm = min(total, 2 * (p - rank - 1) + (chunks - 1) * p)
        ops = [nth("F", k) for k in range(warm)]
        for k in range(total):
            ops += [nth("F", k + warm)] * (k + warm < total) + [nth("B", k)]
        lists.append(ops)
    return lists


def zero_bubble(p, m):
    """1F1B whose B makes only what the rank before waits for. W waits until nothing else can be done, `rank` turns
    later: every rank holds what 1F1B's first one does. ZB-H1 of arXiv 2401.10241."""
    lists = []
    for rank, ops in enumerate(one_f_one_b(p, m)):
        pairs_ = [(op, Op("W", op.micro - rank)) if op.kind == "B" and op.micro >= rank else (op,) for op in ops]
        lists.append([*itertools.chain(*pairs_), *(Op("W", i) for i in range(max(0, m - rank), m))])
    return lists


class Task(NamedTuple):
    """`seconds` of work that occupy everything in `on` (ranks, links) at once, after the tasks in `needs`."""

    name: tuple
    on: tuple
    seconds: float
    needs: tuple = ()


def play(tasks):
    """The simulator of this file: {name: (start, end)}, where every rank and link does its tasks in the list's order,
    each as early as it can. ValueError if they wait for each other for ever, or two have one name."""
    free, times, waiting = Counter(), {}, list(tasks)
    if len({task.name for task in waiting}) < len(waiting):
        raise base.BadInput("two tasks of one name")
    while waiting:
        held_up, left = set(), []
        for task in waiting:
            if held_up.isdisjoint(task.on) and all(name in times for name in task.needs):
                start = max([free[x] for x in task.on] + [times[name][1] for name in task.needs])
                times[task.name] = start, start + task.seconds
                for x in task.on:
                    free[x] = start + task.seconds
            else:
                held_up.update(task.on)
                left.append(task)
        if len(left) == len(waiting):
            raise base.BadInput(f"{len(left)} tasks wait for each other: one stands before what it needs: "
                                f"{left[0].name}")
        waiting = left
    return times


def span(tasks):
    """Seconds until all tasks are done."""
    return max((end for _, end in play(tasks).values()), default=0.0)


class Timeline(NamedTuple):
    """start {(rank, Op): time}, span of the whole, bubble: idle time / work of a rank, and the largest number of
    micro-batches (times chunks) that each rank held."""

    start: dict
    span: float
    bubble: float
    peak: list


def simulate(lists, cost):
    """A pipeline played: each rank does its list in order; an operation waits for the stage before (F) or after it (B).
    cost: {"F", "B", "W": time of one operation}. ValueError if the lists wait for each other for ever, or two ranks
    would send and receive in different orders."""
    p, tasks, peak = len(lists), [], []
    stages = p * (1 + max(op.chunk for ops in lists for op in ops))
    last = "W" if any(op.kind == "W" for ops in lists for op in ops) else "B"
    for source in range(p):
        for kind, step in (("F", 1), ("B", -1)):
            order = [(op.micro, op.chunk * p + source + step) for op in lists[source] if op.kind == kind]
            wanted = [(op.micro, op.chunk * p + (source + step) % p) for op in lists[(source + step) % p]
                      if op.kind == kind]
            both = set(order) & set(wanted)
            if [x for x in order if x in both] != [x for x in wanted if x in both]:
                raise base.BadInput(f"rank {source} sends results of {kind} in another order than they are received in")
    for rank, ops in enumerate(lists):
        for op in ops:
            stage = op.chunk * p + rank
            needs = {"F": (("F", op.micro, stage - 1),) * (stage > 0),
                     "B": (("F", op.micro, stage), *[("B", op.micro, stage + 1)] * (stage + 1 < stages)),
                     "W": (("B", op.micro, stage),)}[op.kind]
            tasks.append(Task((op.kind, op.micro, stage), (rank,), cost[op.kind], needs))
        held = itertools.accumulate((op.kind == "F") - (op.kind == last) for op in ops)
        peak.append(max(held))
    times = play(tasks)
    start = {(rank, op): times[op.kind, op.micro, op.chunk * p + rank][0]
             for rank, ops in enumerate(lists) for op in ops}
    total, work = max(end for _, end in times.values()), max(sum(cost[op.kind] for op in ops) for ops in lists)
    return Timeline(start, total, total / work - 1, peak)


def gantt(lists, cost):
    """A row a rank, a column a unit of time: forwards are digits, backwards letters, W is *, waiting is a dot."""
    rows = []
    timeline = simulate(lists, cost)
    for rank, ops in enumerate(lists):
        row = ["."] * round(timeline.span)
        for op in ops:
            sign = {"F": str(op.micro % 10), "B": chr(97 + op.micro % 26), "W": "*"}[op.kind]
            begin = round(timeline.start[rank, op])
            row[begin : begin + round(cost[op.kind])] = sign * round(cost[op.kind])
        rows.append("".join(row))
    return rows


def bubble_formula(name, p, m, chunks=2):
    """Idle time / work with F = 1, B = 2 (input and weights one each). arXiv 2104.04473, 2401.10241."""
    return {"gpipe": (p - 1) / m, "1f1b": (p - 1) / m, "interleaved": (p - 1) / (m * chunks),
            "zero-bubble": (p - 1) / (3 * m)}[name]


FORMULAS = {"gpipe": "(p-1)/m", "1f1b": "(p-1)/m", "interleaved": "(p-1)/(m v), v = 2",
            "zero-bubble": "(p-1)(F+B-W)/m(F+B+W)"}


def peak_formula(name, p, m, rank, chunks=2):
    """Micro-batches in flight at a rank; for interleaved, those of a thin stage."""
    return {"gpipe": m, "1f1b": min(m, p - rank), "zero-bubble": min(m, p),
            "interleaved": min(m * chunks, 2 * (p - rank - 1) + (chunks - 1) * p + 1)}[name]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero-bubble": zero_bubble}


class WeightQueue:
    """Where linear layers leave the weight half of their backward: open, it waits for W; else it is done at once."""

    def __init__(self):
        self.waiting = None

    def put(self, work):
        if self.waiting is None:
            work()
        else:
            self.waiting.append(work)


class _SplitLinear(torch.autograd.Function):
    """x W^T, whose backward gives dX, and dW to the queue."""

    @staticmethod
    def forward(ctx, x, W, queue):
        ctx.queue, ctx.weight, ctx.dtype = queue, W, x.dtype  # the parameter itself, for its .grad
        x = as_product(x)
        ctx.save_for_backward(x, W)
        return F.linear(x, W.to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        (x, W), weight = ctx.saved_tensors, ctx.weight
        dY, X = dy.flatten(0, -2), x.flatten(0, -2)  # (N, M), (N, K)

        def add():
            if weight.grad is None:
                weight.grad = (dY.T @ X).to(weight.dtype)
            elif X.dtype == weight.dtype:
                weight.grad.addmm_(dY.T, X)
            else:
                weight.grad += dY.T @ X

        ctx.queue.put(add)
        return (dy @ W.to(dy.dtype)).to(ctx.dtype), None, None


class Stage(nn.Module):
    """Stage `index` of `count` of a GPT: its share of the blocks; the first also embeds and normalises, the last
    normalises and has the classifier. Linear layers (01's, without bias) leave dW to `queue`."""

    def __init__(self, model, index, count, queue):
        super().__init__()
        start, stop = shares(len(model.blocks), count)[index]
        self.blocks = model.blocks[start:stop]
        self.cos, self.sin = model.cos, model.sin
        if index == 0:
            self.embedding = model.embedding
        if index == count - 1:
            self.norm, self.classifier = model.norm, model.classifier
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, linear=module: _SplitLinear.apply(x, linear.weight, queue)

    def forward(self, x):
        x = base.rms_norm(self.embedding(x)) if hasattr(self, "embedding") else x
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return self.norm(x) if hasattr(self, "norm") else x


def run_pipeline(ops, stages, queue, inputs, loss, groups, like):
    """Do this rank's list of operations: gradients are left in the parameters, and the sum of the losses is returned (0
    on ranks without the last stage).

    stages: [module] a chunk. inputs: [micro-batch] for the first stage. loss(y, i): scalar, of the last stage's output
    for micro-batch i, its share of the whole loss. groups: of make_groups(pp=...). like: an empty tensor of the shape,
    dtype and device of what stages hand on. A send waits for nobody; a receive waits, where its operation begins."""
    p, rank, total, sending, kept = size(groups.pp), rank_in(groups.pp), 0.0, [], {}
    split, ends = any(op.kind == "W" for op in ops), p * len(stages) - 1

    if p == 1 and len(stages) > 1:
        raise base.BadInput(f"{len(stages)} chunks on one rank: there is nobody to send to: pass one chunk")

    def wire(kind, source):
        """A group in which a rank only sends or only receives, in one order: NCCL does one thing after the other. So
        forwards and backwards have groups of their own, and even and odd senders, and the last of an odd number."""
        return groups.wires[kind, 2 if p % 2 and source == p - 1 else source % 2]

    def send(kind, tensor, to):
        tensor = tensor.contiguous()
        sending[:] = [pair for pair in sending if not pair[0].is_completed()]  # a tensor has to live until it is sent
        sending.append((dist.isend(tensor, group=wire(kind, rank), group_dst=to % p), tensor))
        sent["send"] += tensor.nbytes

    def receive(kind, source):
        tensor = torch.empty_like(like)
        dist.recv(tensor, group=wire(kind, source % p), group_src=source % p)
        return tensor

    for op in ops:
        stage, key = op.chunk * p + rank, (op.micro, op.chunk)
        if op.kind == "F":
            x = inputs[op.micro] if stage == 0 else receive("F", rank - 1).requires_grad_()
            y = stages[op.chunk](x)
            if stage == ends:
                y = loss(y, op.micro)
                total += y.detach()
            else:
                send("F", y.detach(), rank + 1)
            kept[key] = x, y
        elif op.kind == "B":
            x, y = kept.pop(key)
            queue.waiting = [] if split else None
            y.backward(None if stage == ends else receive("B", rank + 1))
            if stage:
                send("B", x.grad, rank - 1)
            if split:
                kept[key], queue.waiting = queue.waiting, None
            del x, y  # and what they keep
        else:
            works = kept.pop(key)
            while works:
                works.pop(0)()
    for work, _ in sending:
        work.wait()
    return total


# ==== 7. Context parallel: the positions of one sequence on different ranks ===========================================


def chunks_of(rank, n, zigzag):
    """The chunks of the sequence that a rank has: chunk `rank` of n; or, of 2 n, one from the front and its mirror
    image from the back: under a causal mask late positions have more keys, and so all ranks have equally many."""
    return [rank, 2 * n - 1 - rank] if zigzag else [rank]


def split_sequence(x, group, zigzag=True, dim=1):
    """This rank's positions of x (B, T, ...). ValueError if T cannot be cut into chunks of equal length."""
    n = size(group)
    pieces = n * (2 if zigzag else 1)
    if x.shape[dim] % pieces:
        raise base.BadInput(f"{x.shape[dim]} positions in {pieces} chunks: pad the sequence to a multiple of {pieces}")
    chunks = x.chunk(pieces, dim)
    return torch.cat([chunks[c] for c in chunks_of(rank_in(group), n, zigzag)], dim)


def attention_work(T, n, zigzag):
    """Pairs of query and key that each rank computes for a causal sequence of T positions."""
    width = T // (n * (2 if zigzag else 1))
    mine = [chunks_of(rank, n, zigzag) for rank in range(n)]
    return [sum(width * (width + 1) // 2 + c * width * width for c in chunks) for chunks in mine]


def library_kernel(q, k):
    """Which fused kernel of torch does a block of attention and gives its lse: cuDNN's on Hopper and later, twice as
    fast there as the flash kernel of earlier GPUs; None (the formula below) for other dtypes, for single queries or
    keys, which cuDNN's refuses, and on a CPU."""
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and min(q.shape[2], k.shape[2]) > 1):
        return None
    return "cudnn" if torch.cuda.get_device_capability(q.device)[0] >= 9 else "flash"


def block_attention(q, k, v, causal):
    """q (B, H, Tq, d), k, v (B, H, Tk, d) -> attention over these keys alone (B, H, Tq, d) and its lse (B, H, Tq)."""
    kernel = library_kernel(q, k)
    if kernel == "cudnn":
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)[:2]
        return out, lse.squeeze(-1)
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    q, k, v = wide(q, k, v)
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1)  # (B, H, Tq)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def wide(*tensors):
    """In fp32, or in fp64 if they are: what is merged over blocks must not be rounded in each."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def block_scores(q, k, causal):
    """(B, H, Tq, Tk); causal: of a block on the diagonal, whose queries and keys are the same positions."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores


def block_gradients(dout, q, k, v, out, lse, causal):
    """dq, dk, dv of one block of keys, given out and lse over ALL keys: probabilities are exp(score - lse) whatever
    block they are made in, and the softmax's correction sum(dout * out) is a number a query."""
    kernel, Tq, Tk = library_kernel(q, k), q.shape[2], k.shape[2]
    zero = torch.zeros((), dtype=torch.int64, device=q.device) if kernel else None  # the state of a dropout that is off
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), zero, zero, None, None, None, Tq, Tk, 0.0, causal)
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, Tq, Tk, 0.0, causal, zero, zero)
    dout, q, k, v, out = wide(dout, q, k, v, out)
    P = (block_scores(q, k, causal) - lse.unsqueeze(-1)).exp()  # (B, H, Tq, Tk)
    dS = P * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return dS @ k, dS.mT @ q, P.mT @ dout


def merge(a, b):
    """Attention over two sets of keys, each (out, lse), as one over their union. Sums in fp32 or wider."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    weigh = lambda out, part: out * (part - lse).exp().unsqueeze(-1)  # noqa: E731
    return weigh(out_a, lse_a) + weigh(out_b, lse_b), lse


def pass_on(x, group):
    """Start to send x to the next rank of the ring and to receive the previous one's; (what will arrive, handles)."""
    n, rank = size(group), rank_in(group)
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    swap = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)]
    sent["send"] += x.nbytes
    return arriving, (dist.batch_isend_irecv(swap), x)


def wait(handles):
    for work in handles[0]:
        work.wait()


class _RingAttention(torch.autograd.Function):
    """Keys and values go round the ring while each rank computes with those it has; in backward they go round again,
    and their gradients with them, home."""

    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        n, rank = size(group), rank_in(group)
        mine = chunks_of(rank, n, zigzag)
        Q = q.chunk(len(mine), 2)  # (B, H, T/n or T/2n, d) each
        found = [None] * len(mine)
        kv = torch.stack((k, v))  # (2, B, H, T/n, d)
        for step in range(n):
            source = (rank - step) % n
            if step < n - 1:
                arriving, handles = pass_on(kv, group)
            for i, j, K, V in pairs(mine, chunks_of(source, n, zigzag), kv):
                out, lse = block_attention(Q[i], K, V, causal=mine[i] == j)
                found[i] = merge(found[i], (out, lse)) if found[i] else (*wide(out), lse)
            if step < n - 1:
                wait(handles)
                kv = arriving
        out = torch.cat([out for out, _ in found], 2).to(q.dtype)
        lse = torch.cat([lse for _, lse in found], 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        group, zigzag, sums = ctx.group, ctx.zigzag, torch.promote_types(q.dtype, torch.float32)
        n, rank = size(group), rank_in(group)
        mine = chunks_of(rank, n, zigzag)
        dout, Q, out, lse = (t.contiguous().chunk(len(mine), 2) for t in (dout, q, out, lse))
        dq = torch.zeros(q.shape, dtype=sums, device=q.device)
        dQ, kv, returning, travelling = dq.chunk(len(mine), 2), torch.stack((k, v)), None, None
        for step in range(n):
            theirs = chunks_of((rank - step) % n, n, zigzag)
            if step < n - 1:
                arriving, handles = pass_on(kv, group)
            made = torch.zeros(kv.shape, dtype=sums, device=kv.device)
            parts = made.chunk(len(theirs), 3)
            for i, j, K, V in pairs(mine, theirs, kv):
                dq_part, dk, dv = block_gradients(dout[i], Q[i], K, V, out[i], lse[i].contiguous(), causal=mine[i] == j)
                dQ[i].add_(dq_part)
                parts[theirs.index(j)].add_(torch.stack((dk, dv)))
            if travelling:  # the sum so far of these keys' gradients, from the rank that had them before
                wait(travelling)
                made += returning
            if n > 1:
                returning, travelling = pass_on(made, group)
            if step < n - 1:
                wait(handles)
                kv = arriving
        if n > 1:
            wait(travelling)
            made = returning
        return dq.to(q.dtype), *made.to(k.dtype).unbind(), None, None


def pairs(mine, theirs, kv):
    """(i, j, keys, values): my i-th chunk of queries sees chunk j of the keys (2, B, H, T, d) that are here now."""
    parts = kv.chunk(len(theirs), 3)
    for i, chunk in enumerate(mine):
        for j, (K, V) in zip(theirs, parts, strict=True):
            if j <= chunk:
                yield i, j, K.contiguous(), V.contiguous()


def ring_attention(q, k, v, group, zigzag=True):
    """Causal attention of this rank's positions (as split_sequence cuts them) over those of all ranks. q, k, v
    (B, H, T/n, d) -> (B, H, T/n, d). Differentiable once; every rank of the group calls it, and its backward."""
    return _RingAttention.apply(q, k, v, group, zigzag)


def context_parallel(model, group, zigzag=True):
    """Give a GPT of 01 ring attention and this rank's positions, in place: it then takes split_sequence(tokens) of
    whole sequences of config.seq tokens. A rank's gradients are of its tokens: sum them with data_parallel."""
    for name in ("cos", "sin"):
        setattr(model, name, split_sequence(getattr(model, name), group, zigzag, dim=0))

    def attend(q, k, v):
        if q.shape[2] != len(model.cos):
            raise base.BadInput(f"{q.shape[2]} positions on a rank, whose part of {model.config.seq} is "
                                f"{len(model.cos)}: pass split_sequence of sequences of that length")
        return ring_attention(q, k, v, group, zigzag)

    for block in model.blocks:
        block.attend = attend


# ==== 8. Memory instead of ranks: make it again, or put it somewhere else =============================================


def recompute(model):
    """Keep only each block's input for backward, and run the block's forward again there: a third more FLOPs, and 18 D
    elements a token and layer become one D. (Under sequence parallelism column_linear keeps its inputs besides.)
    arXiv 1604.06174."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# Between its matrices a layer does little arithmetic on much memory. Written as functions that become one kernel each,
# every one reads its inputs once and writes its outputs once; and what is so cheap to make (norms, activations)
# need not be kept for the next matrix's gradient: backward makes it again from what is kept anyhow.


def normed(x, weight, dtype):
    """RMSNorm of the stream x (B, T, D), in the dtype of the product that follows."""
    return F.rms_norm(x, weight.shape, weight).to(dtype)


def add_normed(x, branch, weight, dtype):
    """The stream with a layer's branch added, and the norm of that."""
    x = x + branch
    return x, normed(x, weight, dtype)


@triton.jit
def turn_kernel(
    qkv, q, k, v, turned_q, turned_k, scales, cos, sin, T, H, HALF, BACK: tl.constexpr, HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program is one token, whose q, k and v lie head by head in qkv (B, T, H, 3, D/H), and each in a tensor of its
    own (B, T, H, D/H). Forward copies there; q and k are divided by their root mean squares and turned by the angle of
    the position, and what they were multiplied by is written to scales (2, B, T, H). BACK makes of the gradients q, k,
    v that of qkv. With y = r x, of which the mean square is 1, dx = r (dy - y mean(y dy)), and turning both first
    changes no mean: turned_q and turned_k are all that is needed of x."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, COLS)[None, :]
    used, angle = (head < H) & (i < HALF), (token % T) * HALF + i
    c, s = tl.load(cos + angle, i < HALF), tl.load(sin + angle, i < HALF)
    for part in tl.static_range(3):
        place = (token * H + head) * 2 * HALF + i
        apart = (q if part == 0 else k if part == 1 else v) + place
        together = qkv + ((token * H + head) * 3 + part) * 2 * HALF + i
        source, target = (apart, together) if BACK else (together, apart)
        a, b = tl.load(source, used, 0.0).to(tl.float32), tl.load(source + HALF, used, 0.0).to(tl.float32)
        if part < 2:
            scale_at = scales + (part * tl.num_programs(0) + token) * H + head  # (HEADS, 1)
            if BACK:
                r, y = tl.load(scale_at, head < H, 0.0).to(tl.float32), (turned_q if part == 0 else turned_k) + place
                ya, yb = tl.load(y, used, 0.0).to(tl.float32), tl.load(y + HALF, used, 0.0).to(tl.float32)
                mean = tl.sum(a * ya + b * yb, 1)[:, None] / (2 * HALF)
                a, b = r * (a - ya * mean), r * (b - yb * mean)
                a, b = a * c + b * s, b * c - a * s
            else:
                r = tl.rsqrt(tl.sum(a * a + b * b, 1)[:, None] / (2 * HALF) + 1e-6)
                tl.store(scale_at, r.to(scales.dtype.element_ty), head < H)
                a, b = r * (a * c - b * s), r * (a * s + b * c)
        tl.store(target, a.to(target.dtype.element_ty), used)
        tl.store(target + HALF, b.to(target.dtype.element_ty), used)


def turn(qkv, parts, turned, scales, cos, sin, back):
    """Run turn_kernel between qkv (B, T, 3 D) and parts (q, k, v), each (B, T, H, D/H); all contiguous."""
    (B, T, H, _), half = parts[0].shape, parts[0].shape[-1] // 2
    sizes = dict(HEADS=triton.next_power_of_2(H), COLS=triton.next_power_of_2(half))
    turn_kernel[(B * T,)](qkv, *parts, *turned, scales, cos, sin, T, H, half, BACK=back, **sizes)


class Turned(torch.autograd.Function):
    """01's Block.heads in one kernel: qkv is not kept; q, k, v are one new tensor, of which attention keeps all."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, head):
        ctx.angles, (B, T, width) = (cos, sin), qkv.shape
        parts = torch.empty(3, B, T, width // (3 * head), head, dtype=qkv.dtype, device=qkv.device).unbind()
        scales = qkv.new_empty(2, *parts[0].shape[:3])  # (2, B, T, H)
        turn(qkv.contiguous(), parts, parts[:2], scales, *ctx.angles, back=False)
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, H, T, D/H)
        ctx.save_for_backward(q, k, scales)
        return q, k, v

    @staticmethod
    def backward(ctx, *gradients):
        *turned, scales = ctx.saved_tensors
        *parts, q, k = (t.transpose(1, 2).contiguous() for t in (*gradients, *turned))  # (B, T, H, D/H)
        B, T, H, head = q.shape
        dqkv = q.new_empty(B, T, 3 * H * head)
        turn(dqkv, parts, (q, k), scales, *ctx.angles, back=True)
        return dqkv, None, None, None


def after(linear, made, make, *inputs):
    """linear(made), where made = make(*inputs): for backward the inputs are kept, and it is made again."""
    inputs, place = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs], made.data_ptr()
    pack = lambda t: t.shape if t.data_ptr() == place else t  # noqa: E731
    unpack = lambda t: make(*inputs).view(t) if isinstance(t, torch.Size) else t  # noqa: E731
    with saved_tensors_hooks(pack, unpack):
        return linear(made)


def norm_back(x, gradient):
    """The gradient of x, of that of rms_norm(x)."""
    return torch.func.vjp(base.rms_norm, x)[1](gradient)[0]


class NormedEmbedding(torch.autograd.Function):
    """rms_norm of the tokens (B, T) that were looked up, x (B, T, D), which keeps the tokens: backward looks again."""

    @staticmethod
    def forward(ctx, x, tokens, look_up, back):
        ctx.save_for_backward(tokens)
        ctx.rest = look_up, back
        return base.rms_norm(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        look_up, back = ctx.rest
        return back(look_up(*ctx.saved_tensors), gradient), None, None, None


def gelu_back(h, gradient):
    """gelu(h), and the gradient of h, which takes the place of that of gelu(h): at the end of forward, when memory is
    fullest, these are the largest tensors of a layer."""
    made, back = torch.func.vjp(F.gelu, h)
    return made, gradient.copy_(*back(gradient))


class GeluLinear(torch.autograd.Function):
    """gelu(h) W^T for h (..., K), W (M, K), which keeps h: backward makes gelu(h) again in the kernel that needs h
    anyway. state: that of a forged weight (04), else None."""

    @staticmethod
    def forward(ctx, h, weight, gelu, gelu_back, state):
        ctx.save_for_backward(h, weight)
        ctx.rest = gelu_back, state, weight._version
        return F.linear(gelu(h), weight.to(h.dtype))

    @staticmethod
    @once_differentiable
    @cce.without_autocast
    def backward(ctx, dy):
        gelu_back, state, version = ctx.rest
        if state:
            state.on_backward(version)
        h, weight = ctx.saved_tensors
        dY = dy.reshape(-1, len(weight))  # (N, M)
        made, dh = gelu_back(h, (dY @ weight.to(dY.dtype)).view_as(h))  # dX is from before the step
        product = forging.Product(dY, made.reshape(-1, weight.shape[1]))
        if not cce.wanted(ctx, 1):
            return dh, *[None] * 4
        dW = forging.weight_update(state, product) if state else (product.dY.T @ product.X).to(weight.dtype)
        return dh, dW, *[None] * 3


def lean(model, compiled=True, remake=True, kernel=None):
    """Fuse what lies between the matrices of a GPT of 01, by torch.compile and turn_kernel, and with `remake` keep 10 D
    elements a token and layer in place of 18: the stream twice; q, k, v; attention's output; the MLP before its
    activation; and of the embedding, unless it is cut over ranks, the tokens alone. The stream travels from layer to
    layer with a branch that the next norm is to add.

    Together with recompute() or Offload pass remake=False: what `remake` keeps, they would not see. With it no hooks of
    `down` run. E comes out in the products' dtype. For training alone: without gradients, where shapes vary, the model
    runs as it was. 07's experts stay what they are. kernel: whether q and k are turned by turn_kernel (on GPUs with
    Triton)."""
    fuse = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda function: function
    norm, add_norm, gelu, back, from_norm = map(fuse, (normed, add_normed, F.gelu, gelu_back, norm_back))
    keep = after if remake else lambda linear, made, *_: linear(made)
    if kernel is None:
        kernel = base.HAS_TRITON and not base.INTERPRETED and model.cos.is_cuda

    def enter_norm(x, weight):
        """The stream, whole, and its norm."""
        if isinstance(x, tuple):
            return add_norm(*x, weight, forging.compute_dtype(x[0]))
        return x, norm(x, weight, forging.compute_dtype(x))

    def gelu_linear(linear, h):
        if not remake:
            return linear(gelu(h))
        state = getattr(linear, "forged", None)
        y = GeluLinear.apply(h, linear.weight, gelu, back, state)
        if state:
            state.on_forward(linear.weight)
        return linear.leave(y) if hasattr(linear, "leave") else y

    def onward(x, branch):
        return (x, branch) if remake else x + branch  # recompute() keeps what it is given

    def layer(block, plain, x, cos, sin):
        if not torch.is_grad_enabled():
            return plain(x, cos, sin)
        x, n = enter_norm(x, block.norm1.weight)
        qkv = keep(block.qkv, n, norm, x, block.norm1.weight, n.dtype)
        q, k, v = Turned.apply(qkv, cos, sin, block.head) if kernel else block.heads(qkv, cos, sin)
        branch = block.proj(block.attend(q, k, v).transpose(1, 2).flatten(2))
        if not hasattr(block, "up"):
            x = x + branch
            return onward(x, block.mlp(block.norm2(x)))
        x, n = enter_norm((x, branch), block.norm2.weight)
        h = keep(block.up, n, norm, x, block.norm2.weight, n.dtype)
        return onward(x, gelu_linear(block.down, h))

    def embed(plain, tokens):
        if not (remake and torch.is_grad_enabled()) or hasattr(model.embedding.weight, "cut"):
            return plain(tokens)
        return NormedEmbedding.apply(model.embedding(tokens), tokens, model.embedding, from_norm)

    def last(plain, x):
        return enter_norm(x, model.norm.weight)[1] if torch.is_grad_enabled() else plain(x)

    for block in model.blocks:
        block.forward = functools.partial(layer, block, block.forward)
    model.norm.forward = functools.partial(last, model.norm.forward)
    model.embed = functools.partial(embed, model.embed)


def lean_saving(config, tokens, width, experts=False, cut=1, kernel=True):
    """Bytes of 01's activation_bytes (with fused norms) that lean() does not keep, products being of `width` bytes: of
    a layer's numbers both norms (2 D a token), the activation (4), and by turn_kernel q and k before they are turned
    (2, less a number for each head of both); in layers with experts the first norm, q and k alone. Of E, what fp32 has
    more; and the embedding, if it is not cut. cut: tensor-parallel ranks, which share all but the norms."""
    turned = 2 - 2 * config.heads / config.dim if kernel else 0
    layer = (1 if experts else 2) + ((0 if experts else 4) + turned) / cut
    return int(tokens * config.dim * (width * layer * config.layers + 4 - width + 4 * (cut == 1)))


class Offload(saved_tensors_hooks):
    """A context for the forward pass: what autograd saves is copied elsewhere while forward goes on, and its memory
    given back; backward, which reads it in the reverse order, finds it prefetched.

        with Offload(model, folder) as offload:
            loss = model(x)...
        loss.backward()
        offload.close()

    Copies go to pinned host memory (GPU), or with `folder` to files there. Dedup: a storage goes once, whatever
    operations or views save it. Forwarding: what backward wants while its copy is still under way is used where it is.
    Weights stay, and what is smaller than `least` bytes. `ahead`: how many copies may wait to be written, and how many
    are fetched before they are asked for. counts: tensors saved, storages, bytes, forwarded, late. Use one a step: its
    copies live until close(). ValueError without a folder on a CPU. SSDTrain arXiv 2408.10013."""

    def __init__(self, model, folder=None, least=2**14, ahead=8):
        if folder is None and next(model.parameters()).device.type == "cpu":
            raise base.BadInput("offload on a CPU: pass a folder to write to: host memory is where everything is "
                                "already")
        self.stay = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.folder, self.least, self.ahead, self.counts = folder, least, ahead, Counter()
        self.copies, self.known, self.flying, self.stream = [], {}, [], None
        self.thread = ThreadPoolExecutor(1)  # one, so that copies are written and read in the order they are asked for
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.stay or storage.nbytes() < self.least:
            return tensor
        key = storage._cdata, tensor._version
        self.counts["tensors"] += 1
        if key not in self.known:
            self.known[key] = copy_ = StorageCopy(len(self.copies), tensor, self)
            on_death(storage, self.known.pop, key, None)  # before its address means something else
            self.copies.append(copy_)
            self.flying.append(copy_)
            self.counts["storages"] += 1
            self.counts["bytes"] += storage.nbytes()
        self.known[key].uses += 1
        while self.flying and (self.flying[0].written.done() or len(self.flying) > self.ahead):
            self.flying.pop(0).settle()
        return self.known[key], tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        saved, dtype, offset, shape, stride = packed
        storage = saved.get()
        for earlier in self.copies[max(0, saved.number - self.ahead) : saved.number]:
            earlier.prefetch()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)

    def on_stream(self, device):
        self.stream = self.stream or torch.cuda.Stream(device)  # the thread has no current device of its own
        return torch.cuda.stream(self.stream)

    def close(self):
        """Wait for copies that are still being made; delete the files, or give the host memory back."""
        self.thread.shutdown()
        for saved in self.copies:
            if saved.file:
                saved.file.unlink(missing_ok=True)
            saved.host = None


class StorageCopy:
    """One storage: in its own memory while it is written, then in host memory or a file, then fetched."""

    def __init__(self, number, tensor, owner):
        self.number, self.owner, self.uses, self.fetched = number, owner, 0, None
        self.original, self.device = bytes_of(tensor.untyped_storage()), tensor.device
        self.file = owner.folder and Path(owner.folder, f"{os.getpid()}.{id(owner)}.{number}.saved")
        self.size, self.host, event = len(self.original), None, mark(tensor.device)
        self.written = owner.thread.submit(self.write, self.original, event)

    def write(self, original, event):
        host = original
        if event:  # on a GPU: a stream of its own copies, while the others compute
            with self.owner.on_stream(self.device):
                event.wait()
                host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True).copy_(original, non_blocking=True)
                self.owner.stream.synchronize()
        if self.file:
            host.numpy().tofile(self.file)
        else:
            self.host = host

    def settle(self):
        """The copy is there: let go of the original."""
        self.written.result()
        self.original = None

    def prefetch(self):
        if self.uses > 0 and self.original is None and self.fetched is None:
            self.fetch()

    def fetch(self):
        target = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self.fetched = target, self.owner.thread.submit(self.read, target, mark(self.device))

    def read(self, target, event):
        host = self.host
        if self.file:
            host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True) if event else target
            with self.file.open("rb") as file:
                file.readinto(host.numpy())
        if event:
            with self.owner.on_stream(self.device):
                event.wait()
                target.copy_(host, non_blocking=True)
                self.owner.stream.synchronize()

    def get(self):
        """The storage, for one of those who saved it."""
        self.uses -= 1
        if self.original is not None:
            self.owner.counts["forwarded"] += 1
            found = self.original
        else:
            if self.fetched is None:
                self.owner.counts["late"] += 1
                self.fetch()
            found, arrived = self.fetched
            arrived.result()
        if self.uses <= 0:
            self.original = self.fetched = None
        return found.untyped_storage()


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark(device):
    """An event on the current stream of a GPU: what was asked for before it is done when it is."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


# ==== 9. Uneven documents: matrices cost by the token, attention by the square of its document ========================


class Rates(NamedTuple):
    """Seconds of a layer, forward and backward on one GPU, of a token in its matrices and of a pair of query and key;
    seconds of a byte to a rank of the same host, and of another; ranks of a host; bytes of a token's query (or output)
    and of its key (or value), which are narrower where query heads share them."""

    token: float
    pair: float
    inside: float
    between: float
    host: int
    width: int
    keys: int

    def byte(self, a, b):
        return self.inside if a // self.host == b // self.host else self.between


def rates_of(dim, shared=4, host=8, flops=4e14, inside=4e11, between=5e10):
    """Of matrices with 12 D^2 weights, 6 FLOPs each, and 12 D FLOPs a pair, in bf16: flops and bytes a second. shared:
    query heads that have one head of keys and values (4 in Llama 3 8B)."""
    return Rates(72 * dim**2 / flops, 12 * dim / flops, 1 / inside, 1 / between, host, 2 * dim, 2 * dim // shared)


def lognormal_lengths(tokens, seed, longest=65536, mu=8.0, sigma=1.2):
    """Lengths of documents, `tokens` in all, none above `longest`."""
    generator, lengths = torch.Generator().manual_seed(seed), []
    while sum(lengths) < tokens:
        length = int(torch.empty(()).log_normal_(mu, sigma, generator=generator).clamp(16, longest))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def pairs_of(start, stop):
    """Pairs of query and key of rows start to stop of a causal document, whose row i sees i + 1 keys."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class Split(NamedTuple):
    """What a policy makes of a batch over n ranks: tokens [n] in the matrices; pairs [n] that can begin at once, and
    those that wait for messages; bytes {(from, to)} there before attention and back after it."""

    tokens: list
    early: list
    late: list
    there: Counter
    back: Counter

    def pairs(self):
        return [a + b for a, b in zip(self.early, self.late, strict=True)]


def empty_split(n):
    return Split([0] * n, [0] * n, [0] * n, Counter(), Counter())


def layer_tasks(split, rates, routed=False):
    """A layer for play(): messages there, attention, messages back, matrices; forward and backward as one, although
    backward sends a part of them later. A rank sends and receives one message at a time; nothing is sent under the
    matrices. routed: a message between hosts goes by all adapters of both, not by those of its two ranks alone."""
    n, tasks = len(split.tokens), []

    def messages(kind, moves, needs):
        # In the order of an all-to-all: in turn k, every rank sends to the k-th after it.
        for (a, b), nbytes in sorted(moves.items(), key=lambda move: ((move[0][1] - move[0][0]) % n, move[0])):
            on, seconds = (("sends", a), ("receives", b)), nbytes * rates.byte(a, b)
            if routed and a // rates.host != b // rates.host:
                on = [(end, r) for end, rank in (("sends", a), ("receives", b)) for r in range(n)
                      if r // rates.host == rank // rates.host]
                seconds /= min(sum(end == kind for end, _ in on) for kind in ("sends", "receives"))
            tasks.append(Task((kind, a, b), tuple(on), seconds, needs(a)))

    messages("there", split.there, lambda a: ())
    for r in range(n):
        arrived = tuple(("there", a, b) for a, b in split.there if b == r)
        tasks.append(Task(("early", r), (r,), split.early[r] * rates.pair))
        tasks.append(Task(("late", r), (r,), split.late[r] * rates.pair, arrived))
    messages("back", split.back, lambda a: (("late", a),))
    for r in range(n):
        arrived = tuple(("back", a, b) for a, b in split.back if b == r)
        tasks.append(Task(("matrices", r), (r,), split.tokens[r] * rates.token, arrived))
    return tasks


class Queries(NamedTuple):
    """Rows start to stop of a document's queries, which are on rank `home`."""

    document: int
    start: int
    stop: int
    home: int


def end_to_end(lengths, n):
    """The documents one after the other, cut into n pieces of equally many tokens: [Queries]."""
    rows, at = [], 0
    cuts = shares(sum(lengths), n)
    for document, length in enumerate(lengths):
        for home, (start, stop) in enumerate(cuts):
            a, b = max(start, at), min(stop, at + length)
            if a < b:
                rows.append(Queries(document, a - at, b - at, home))
        at += length
    return rows


def add_keys(split, rows, earlier, rates):
    """These rows need keys and values of the ranks that have the rows before, and send back their gradients."""
    for other in earlier:
        nbytes = 2 * (other.stop - other.start) * rates.keys
        split.there[other.home, rows.home] += nbytes
        split.back[rows.home, other.home] += nbytes


def fixed_packing(rows, n, rates):
    """Queries stay where their tokens are; keys and values come to them. Equal tokens, unequal attention."""
    split, before = empty_split(n), {}
    for part in rows:
        earlier = before.setdefault(part.document, [])
        (split.late if earlier else split.early)[part.home] += pairs_of(part.start, part.stop)
        split.tokens[part.home] += part.stop - part.start
        add_keys(split, part, earlier, rates)
        earlier.append(part)
    return split


def disaggregate(rows, n, rates, tolerance=0.1, tile=1):
    """Core attention has no weights, so any rank can do any of it: [(Queries, to)] whose attention is to be done
    elsewhere. The rank that lacks most takes, from ranks with more than the mean, the last rows of whichever document
    can be sent fastest for their pairs, until it is within the tolerance. Nobody gives below the mean or takes above
    it, so the largest load never grows; but who has too much may keep some, when nobody lacks enough. tile: cuts are at
    multiples of it, as kernels work on tiles. DistCA 2510.18121 (which cuts off pairs of a row from the front and one
    from the back; we cut off rows)."""
    load, left, moves = [0] * n, list(rows), []
    for part in rows:
        load[part.home] += pairs_of(part.start, part.stop)
    mean = sum(load) / n
    for to in sorted(range(n), key=load.__getitem__):
        while mean - load[to] > tolerance * mean:
            best = None
            for i, part in enumerate(left):
                room = min(mean - load[to], load[part.home] - mean)
                start = max(part.start, math.ceil(first_row(part.stop, room) / tile) * tile)
                if start < part.stop:
                    seconds = moved_bytes(part._replace(start=start), rates) * rates.byte(part.home, to)
                    offer = seconds / pairs_of(start, part.stop), i, start
                    best = min(best or offer, offer)
            if best is None:
                break
            _, i, start = best
            part = left[i]
            moves.append((part._replace(start=start), to))
            left[i] = part._replace(stop=start)
            load[to] += pairs_of(start, part.stop)
            load[part.home] -= pairs_of(start, part.stop)
    return moves


def first_row(stop, room):
    """The smallest start for which rows start to stop have at most `room` pairs."""
    least = stop * (stop + 1) / 2 - room  # start (start + 1) / 2 is at least this
    return 0 if least <= 0 else math.ceil((math.sqrt(8 * least + 1) - 1) / 2 - 1e-9)


def moved_bytes(part, rates):
    """Bytes there, and as many back: queries and dO, keys and values; outputs and dq, dk and dv."""
    return 2 * (part.stop - part.start) * rates.width + 2 * part.stop * rates.keys


def with_moves(rows, n, moves, rates):
    """Fixed packing with the attention of some rows done elsewhere. (Keys that their home has to receive before it can
    hand them on are taken to be there.)"""
    split, begins = fixed_packing(rows, n, rates), {part.document: part.home for part in rows if part.start == 0}
    for part, to in moves:
        pairs = pairs_of(part.start, part.stop)
        (split.early if begins[part.document] == part.home else split.late)[part.home] -= pairs
        split.late[to] += pairs
        split.there[part.home, to] += moved_bytes(part, rates)
        split.back[to, part.home] += moved_bytes(part, rates)
    return split


def divisions(n, largest=None):
    """All ways to write n as a sum of powers of two, in descending order."""
    power = 1
    while power <= min(n, largest or n):
        for rest in divisions(n - power, power) if n > power else [()]:
            yield (power, *rest)
        power *= 2


def grouped(lengths, groups, rates, capacity):
    """Groups of ranks, each with whole documents, whose heads it shares out by all-to-all (Ulysses): the longest first,
    to the group that will be done first with it. None when a document finds no room for `capacity` tokens a rank."""
    n = sum(groups)
    tokens, pairs = [0] * len(groups), [0] * len(groups)
    for length in sorted(lengths, reverse=True):
        fits = [i for i, g in enumerate(groups) if tokens[i] + length <= g * capacity]
        if not fits:
            return None

        def seconds(i, length=length):
            g, total = groups[i], tokens[i] + length
            sends = 4 * total * (rates.width + rates.keys) * (g - 1) / g / g * rates.byte(0, g - 1)
            return ((pairs[i] + pairs_of(0, length)) * rates.pair + total * rates.token) / g + sends

        i = min(fits, key=seconds)
        tokens[i] += length
        pairs[i] += pairs_of(0, length)
    split, first = empty_split(n), 0
    for g, total, work in zip(groups, tokens, pairs, strict=True):
        ranks = range(first, first + g)
        for r in ranks:
            split.tokens[r] = total / g
            (split.late if g > 1 else split.early)[r] = work / g
        for a, b in itertools.permutations(ranks, 2):  # of a g-th of the heads, what moved_bytes() says
            split.there[a, b] = split.back[a, b] = 2 * total / g / g * (rates.width + rates.keys)
        first += g
    return split


def best_of(lengths, divisions_, rates, capacity):
    """(seconds of a layer, groups, Split) of the best division. ValueError when none has room for the documents."""
    splits = [(groups, grouped(lengths, groups, rates, capacity)) for groups in divisions_]
    found = [(span(layer_tasks(split, rates)), groups, split) for groups, split in splits if split]
    if not found:
        raise base.BadInput(f"{sum(lengths)} tokens, the longest document {max(lengths)}, find no room for "
                            f"{capacity} a rank: take more ranks, more tokens a rank, or several steps")
    return min(found, key=lambda item: item[:2])


def homogeneous(lengths, n, rates, capacity):
    """All groups of one size: what is usual, and the baseline of all that follows."""
    return best_of(lengths, [groups for groups in divisions(n) if len(set(groups)) == 1], rates, capacity)


def flexible(lengths, n, rates, capacity):
    """Long documents in large groups, short ones in small, where they send nothing. All divisions are tried, so it is
    never worse than homogeneous(). FlexSP arXiv 2412.01523 (whose solver is a MILP)."""
    return best_of(lengths, list(divisions(n)), rates, capacity)


def two_layouts(lengths, n, rates, finest=0.5):
    """Attention balanced by pairs, matrices by tokens, and a move between the layouts before and after attention. A
    document goes round a ring of as few ranks as make its share less than `finest` of a mean load; in the matrices all
    ranks have equally many tokens. Zeppelin 2509.21841, of which we know the abstract: the rest is our reading."""
    split, mean, tokens = empty_split(n), sum(pairs_of(0, s) for s in lengths) / n, [0.0] * n
    load = [0.0] * n
    for length in sorted(lengths, reverse=True):
        g, pairs = 1, pairs_of(0, length)
        while pairs / g > finest * mean and 2 * g <= n:
            g *= 2
        first = min(range(0, n - g + 1, g), key=lambda first: max(load[first : first + g]))
        for r in range(first, first + g):
            load[r] += pairs / g
            tokens[r] += length / g
            split.early[r] += pairs / g / g  # a ring's first block needs no message
            split.late[r] += pairs / g * (g - 1) / g
            if g > 1:  # keys and values, again in backward, and their gradients
                split.there[r, first + (r + 1 - first) % g] += 6 * (g - 1) * length / g * rates.keys
    split.tokens[:] = [sum(lengths) / n] * n
    surplus, lack = ([max(0.0, sign * (t - sum(lengths) / n)) for t in tokens] for sign in (1, -1))
    givers = [r for r in range(n) if lack[r] > 0]  # have more tokens in the matrices than in attention
    for r, giver in itertools.product(range(n), givers):
        moved = min(surplus[r], lack[giver])
        if moved > 0:
            split.there[giver, r] += 2 * moved * (rates.width + rates.keys)
            split.back[r, giver] += 2 * moved * (rates.width + rates.keys)
            surplus[r] -= moved
            lack[giver] -= moved
            split.late[r] += split.early[r]
            split.early[r] = 0
    return split


class _Exchange(torch.autograd.Function):
    """exchange(): backward sends the gradients back. What stays here is a copy, not a message."""

    @staticmethod
    def forward(ctx, x, give, take, group):
        ctx.give, ctx.take, ctx.group = give, take, group
        if group is None:
            return x.view_as(x)
        me, out = rank_in(group), x.new_empty(sum(take), x.shape[1])
        away, arriving = len(x) - give[me], len(out) - take[me]
        give, take = ([0 if r == me else count_ for r, count_ in enumerate(counts)] for counts in (give, take))
        travel = dist.all_to_all_single(out[:arriving], x[:away].contiguous(), take, give, group=group, async_op=True)
        out[arriving:] = x[away:]  # meanwhile
        travel.wait()
        sent["all-to-all"] += away * x.shape[1] * x.itemsize
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, ctx.take, ctx.give, ctx.group), None, None, None


def exchange(x, give, take, group):
    """Rows x (R, D) to the ranks, give[r] of them to rank r, and take[r] from it -> (sum(take), D), in the order of
    ranks, but that what stays here comes last, in x and in the result. All ranks call it, and its backward."""
    return _Exchange.apply(x, give, take, group)


class _RowAttention(torch.autograd.Function):
    """Causal attention of the last Tq of Tk positions, q (1, H, Tq, d), k, v (1, H, Tk, d): 7's blocks, one on the
    diagonal and one before it."""

    @staticmethod
    def forward(ctx, q, k, v):
        found = None
        for rows, causal in blocks_of(q, k):
            out, lse = block_attention(q, k[:, :, rows].contiguous(), v[:, :, rows].contiguous(), causal)
            found = merge(found, (out, lse)) if found else (*wide(out), lse)
        out = found[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, found[1])
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, parts = 0, []
        for rows, causal in blocks_of(q, k):
            K, V = k[:, :, rows].contiguous(), v[:, :, rows].contiguous()
            more, dK, dV = block_gradients(dout.contiguous(), q, K, V, out, lse.contiguous(), causal)
            dq = dq + more
            parts.insert(0, (dK, dV))  # the block before the diagonal comes second
        dk, dv = (torch.cat(pieces, 2).to(k.dtype) for pieces in zip(*parts, strict=True))
        return dq.to(q.dtype), dk, dv


def blocks_of(q, k):
    """(keys, whether they are on the diagonal) of the last rows of a document."""
    before = k.shape[2] - q.shape[2]
    return [(slice(before, None), True)] + [(slice(0, before), False)] * (before > 0)


def attend_rows(q, k, v):
    """Causal attention of the last queries of a document: q (Tq, H, d), k, v (Tk, H, d), Tq <= Tk -> (Tq, H, d)."""
    return _RowAttention.apply(*(x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q, k, v)))[0].transpose(0, 1)


def attention_elsewhere(documents, moves, group):
    """Attention of this rank's documents {number: (q, k, v)}, one at least, each whole, (T, H, d), with the rows of
    `moves`, of disaggregate(), done by other ranks: {number: (T, H, d)}. Every rank calls it, with all moves, and its
    backward.

    Queries, keys and values travel there and outputs back; autograd sends their gradients the other way."""
    n, me = size(group), rank_in(group)
    q = next(iter(documents.values()))[0]
    H, d = q.shape[1:]
    nothing = q.flatten(1)[:0]  # of no rows, but in the graph: every rank has to come to both exchanges in backward

    def swap(pieces, give, take):
        return exchange(torch.cat([*pieces, nothing]), give, take, group)

    def rows_there(part):
        return part.stop - part.start + 2 * part.stop

    ask = [[part for part, to in moves if (part.home, to) == (me, r)] for r in range(n)]  # by the rank they go to
    serve = [[part for part, to in moves if (part.home, to) == (r, me)] for r in range(n)]
    count_rows = lambda lists, rows: [sum(map(rows, parts)) for parts in lists]  # noqa: E731
    packed, asked = [], list(itertools.chain(*ask))
    for part in asked:
        q, k, v = documents[part.document]
        packed.append(torch.cat((q[part.start : part.stop], k[: part.stop], v[: part.stop])).flatten(1))
    arrived = swap(packed, count_rows(ask, rows_there), count_rows(serve, rows_there))
    done, at = [arrived[:0]], 0
    for part in itertools.chain(*serve):
        Q, K, V = arrived[at : at + rows_there(part)].view(-1, H, d).split([part.stop - part.start, *[part.stop] * 2])
        done.append(attend_rows(Q, K, V).flatten(1))
        at += rows_there(part)
    pieces = {number: [] for number in documents}  # [(first row, output)]: own rows, while others do the rest of them
    for number, (q, k, v) in documents.items():
        at = 0
        for part in sorted(x for x in asked if x.document == number) + [Queries(number, len(q), len(q), me)]:
            if at < part.start:
                pieces[number].append((at, attend_rows(q[at : part.start], k[: part.start], v[: part.start])))
            at = part.stop
    rows_back = lambda part: part.stop - part.start  # noqa: E731
    returned = swap(done, count_rows(serve, rows_back), count_rows(ask, rows_back))
    for part, output in zip(asked, returned.split([rows_back(part) for part in asked]), strict=True):
        pieces[part.document].append((part.start, output.view(-1, H, d)))
    in_graph = returned[:0].view(0, H, d)
    return {number: torch.cat([in_graph, *(output for _, output in sorted(found, key=lambda item: item[0]))])
            for number, found in pieces.items()}


# ==== 10. Two models in one: an encoder feeds a backbone ==============================================================


class Sample(NamedTuple):
    """Seconds of a sample in the encoder (of images, say) and in the backbone, forward and backward."""

    encode: float
    backbone: float


def lock_step(samples, n):
    """Each rank has both models and every n-th sample, and all wait for the slowest after each, as they do where
    weights are gathered for every micro-batch (ZeRO-3)."""
    tasks, before = [], ()
    for i in range(0, len(samples), n):
        batch = [Task(("both", j), (j - i,), samples[j].encode + samples[j].backbone, before)
                 for j in range(i, min(i + n, len(samples)))]
        tasks += batch
        before = tuple(task.name for task in batch)
    return tasks


def by_cost(samples, n):
    """Each rank has both models; samples go, the longest first, to who will be done first: the honest baseline."""
    tasks, load = [], [0.0] * n
    for i in sorted(range(len(samples)), key=lambda i: -samples[i].encode - samples[i].backbone):
        rank = load.index(min(load))
        load[rank] += samples[i].encode + samples[i].backbone
        tasks.append(Task(("both", i), (rank,), samples[i].encode + samples[i].backbone))
    return tasks


def allocate(samples, n):
    """How many of n ranks should encode: throughput matching, max over g of min(g / encode, (n - g) / backbone)."""
    encode, backbone = sum(s.encode for s in samples), sum(s.backbone for s in samples)
    return max(range(1, n), key=lambda g: min(g / max(encode, 1e-12), (n - g) / max(backbone, 1e-12)))


def producer_consumer(samples, n, micro=4):
    """The first ranks encode, in the order of the samples; the others have the backbone. As samples come out of the
    encoders they are packed into micro-batches of equal cost (a `micro`-th of a rank's share), not of equal count, and
    each goes to who can begin it first. What travels takes no time here, and a backbone that has a rank to itself is no
    faster and needs no less memory, which is what would speak for two pools. ValueError for one rank. FlowTrain (2026),
    of which we know the abstract: the rest is our reading."""
    if n < 2:
        raise base.BadInput(f"{n} rank: encoder and backbone need one each: use 2 or more")
    g, tasks = allocate(samples, n), []
    free, done = [0.0] * g, {}
    for i, sample in enumerate(samples):
        rank = free.index(min(free))
        done[i] = free[rank] = free[rank] + sample.encode
        tasks.append(Task(("encode", i), (rank,), sample.encode))
    room = sum(s.backbone for s in samples) / (n - g) / micro
    batches, cost = [[]], 0.0
    for i in sorted(done, key=done.get):
        if batches[-1] and cost + samples[i].backbone > room:
            batches.append([])
            cost = 0.0
        batches[-1].append(i)
        cost += samples[i].backbone
    free = [0.0] * (n - g)
    for batch in batches:
        cost, ready = sum(samples[i].backbone for i in batch), max(done[i] for i in batch)
        rank = min(range(n - g), key=lambda r: max(free[r], ready))  # noqa: B023
        free[rank] = max(free[rank], ready) + cost
        tasks.append(Task(("backbone", *batch), (g + rank,), cost, tuple(("encode", i) for i in batch)))
    return tasks


def random_samples(count, seed):
    """Images of very different sizes, texts of rather equal ones; some tens of milliseconds each."""
    generator = np.random.default_rng(seed)
    encode, text = generator.lognormal(-4.0, 1.0, count), generator.lognormal(-3.5, 0.4, count)
    return [Sample(e, t + 0.5 * e) for e, t in zip(encode, text, strict=True)]


# ==== 11. SkipPipe: micro-batches that leave out stages ===============================================================


def skip_pipe(p, m, k, cost, most):
    """m micro-batches, each through k of p stages, in order: (paths, tasks for play(), seconds of what is reserved).

    One micro-batch after the other takes the path whose forward is done first among what is already reserved, and goes
    back the same way. Conflicts that are avoided: two micro-batches at one stage (time), a stage that is visited more
    often than the others (quota: m k / p visits each), more than `most` micro-batches in flight (p, say, as in 1F1B).
    Greedy: what is reserved stays. SkipPipe arXiv 2502.19913 instead searches all micro-batches' paths together, by
    conflict-based search. Embedding and loss are no stages here. cost: {"F", "B": seconds}."""
    if not 1 <= k <= p or m < 1 or most < 1:
        raise base.BadInput(f"{m} micro-batches, {most} at once, through {k} of {p} stages: between 1 and all of them")
    quota = [stop - start for start, stop in shares(m * k, p)]
    busy, ends, paths, tasks = [[] for _ in range(p)], [], [], []

    for i in range(m):
        done = sorted((end, j) for j, end in enumerate(ends))[: max(0, i + 1 - most)]  # before this one begins
        begin = done[-1][0] if done else 0.0
        best = {0: (begin, ())}  # visits: (when the last is done, path)
        for stage in range(p):
            reached = {} if quota[stage] == m - i else dict(best)  # all that are left have to come here
            for visits, (ready, path) in best.items():
                if quota[stage] and visits < k:
                    found = earliest(busy[stage], ready, cost["F"]) + cost["F"], (*path, stage)
                    reached[visits + 1] = min(found, reached.get(visits + 1, found))
            best = reached
        path, now = best[k][1], begin
        needs = tuple(("B", j, paths[j][0]) for _, j in done)
        for kind, order in (("F", path), ("B", path[::-1])):
            for stage in order:
                start = earliest(busy[stage], now, cost[kind])
                now = start + cost[kind]
                busy[stage].append((start, now))
                tasks.append((start, Task((kind, i, stage), (stage,), cost[kind], needs)))
                needs = ((kind, i, stage),)
        for stage in path:
            quota[stage] -= 1
        ends.append(now)
        paths.append(path)
    return paths, [task for _, task in sorted(tasks, key=lambda item: item[0])], max(ends)


def earliest(busy, ready, seconds):
    """The first time, not before `ready`, at which nothing of busy [(start, end)] falls into the next `seconds`."""
    for start, end in sorted(busy):
        if ready + seconds <= start:
            break
        ready = max(ready, end)
    return ready


# ==== 12. A planner: what fits, how long it takes, what it sends and burns ============================================


class Model(NamedTuple):
    """causal=False: attention computes the masked half as well, as kernels did until 2022. heads: 0 for dim / 128.
    muon: 1 if the layers' matrices are stepped by Muon, 04, of which each rank steps all that it has a part of."""

    params: float
    layers: int
    dim: int
    vocab: int
    seq: int
    heads: int = 0
    causal: bool = True
    muon: int = 0


class Links(NamedTuple):
    """Bytes a second out of each GPU: inside a host of `host` GPUs, and between hosts. Defaults: what an all-reduce
    over H200s' NVLink gets, and an adapter of 400 Gbit/s a GPU. hidden: the largest share of a message's time that is
    hidden under computation; measure_overlap finds half."""

    host: int = 8
    inside: float = 2.8e11
    between: float = 5e10
    hidden: float = 0.5


class Chip(NamedTuple):
    """peak: FLOP/s of dense bf16, and the shares of it that a large matrix product gets (product) and the FLOPs of a
    training step (reach); memory: bytes/s; joules of a FLOP and of a byte of memory traffic, and watts besides.
    Defaults: an H200's, peak by its data sheet, the rest as measure_plans and measure_energy find them."""

    peak: float = 989e12
    product: float = 0.68
    reach: float = 0.48
    memory: float = 4.2e12
    flop: float = 8.2e-13
    byte: float = 6.6e-11
    watts: float = 120.0


HOSTS, H200 = Links(), Chip()


class Plan(NamedTuple):
    """One way to train: the mesh, sequences of a micro-batch, whether layers are recomputed, ZeRO's stage over dp x cp;
    micro-batches a step; GiB a GPU; seconds a step, bubble as a share of work; {kind: bytes that a rank sends}, of the
    last stage but for "pipeline", where a middle stage sends most; joules of all GPUs."""

    dp: int
    pp: int
    cp: int
    tp: int
    micro: int
    recompute: bool
    zero: int
    count: int
    gib: float
    seconds: float
    bubble: float
    sent: dict
    joules: float


def attention_flops(model, tokens):
    """Forward: two products of 2 D FLOPs for every key, of which a causal token sees half of the sequence."""
    return 4 * tokens * model.dim * model.seq / (2 if model.causal else 1)


def step_flops(model, tokens, again=0):
    """Forward and backward of all tokens; again=1: layers run forward twice. The embedding is looked up."""
    V, D, L = model.vocab, model.dim, model.layers
    body = model.params - 2 * V * D
    return (3 + again) * (2 * body * tokens + L * attention_flops(model, tokens)) + 6 * tokens * V * D


def predict(model, links, chip, batch, dp, pp, cp, tp, micro, recompute, zero, state=(2, 2, 12), itemsize=2):
    """The Plan of one choice: 1F1B, tensor with sequence parallelism, activations of `itemsize` bytes, `state` bytes of
    weight, gradient and optimizer. Formulas are those of sections 2 to 8, for ranks that do what is done there, except
    that ZeRO-3's gathers come ahead of their use, and that ZeRO has micro-batches."""
    V, D, L, (w, g, o) = model.vocab, model.dim, model.layers, state
    layers, m, shards, again = -(-L // pp), batch // (dp * micro), dp * cp, int(recompute)
    N, body = micro * model.seq // cp, model.params - 2 * V * D  # tokens of a micro-batch on a rank; layers' weights
    layer, head = body / L / tp, V * D / tp  # on a rank
    P = layers * layer + head * (2 if pp == 1 else 1)
    rate = lambda ranks, stride: links.inside if ranks * stride <= links.host else links.between  # noqa: E731
    exposed = lambda message, under: max(message - under, (1 - links.hidden) * message)  # noqa: E731  seconds

    # Memory: what ZeRO leaves, gathered weights and unreduced gradients of units at work, activations, E and dE.
    stream, kept = itemsize * N * D / tp, tensor_parallel_bytes(model._replace(layers=1), N, tp, True, itemsize, True)
    inputs = stream * (3 if tp > 1 else 1)  # of a recomputed layer: under sequence parallelism also of its cut matrices
    activations = min(m, pp) * layers * inputs + kept if recompute else min(m, pp) * layers * kept
    units = (zero == 3) * w * (head + max(head, layer)) + (zero > 1) * g * (head + layer)
    memory = zero_bytes(P, shards, zero, w, g, o) + units + activations + (2 + (pp == 1)) * stream  # and the embedding
    if model.muon:  # one moment fewer; of the largest matrix, whole, what its products hold
        memory += forging.orthogonal_bytes(4 * D, D) - 4 * layers * layer

    # What a rank sends, a micro-batch (tensor, ring, pipe) and a step (reduced, gathered).
    tensor = tensor_parallel_traffic(model._replace(layers=layers), N, tp, True, itemsize)
    more = 3 * layers * again - 2 * (pp > 1)  # gathers and scatters; the last stage has no embedding
    tensor += more * N * D * itemsize * (tp - 1) / tp
    ring = layers * 2 * N * D / tp * ((2 + again) * (cp - 1) * itemsize + 4 * cp * (cp > 1))  # gradients are in fp32
    pipe = stream * min(pp - 1, 2)  # forward, and where there is a stage before, backward
    weights, gradients = (x * P * (shards - 1) / shards for x in (w, g))
    twice = 2 * weights - 2 * w * head * (shards - 1) / shards  # the first and the last unit are gathered once
    reduced, gathered = [2, 1, m, m][zero] * gradients, [0, weights, weights, m * twice][zero]

    # Time: the slowest stage, the last, and what it waits for.
    speed, attention = chip.peak * chip.reach, layers * attention_flops(model, N) / tp
    compute = ((3 + again) * (2 * N * layers * layer + attention) + 6 * N * head) / speed
    one = compute + tensor / rate(tp, 1) + exposed(ring / rate(cp, tp), (3 + again) * attention / speed)
    one += pipe / rate(pp, dp * cp * tp)
    bubble, data = bubble_formula("1f1b", pp, m), rate(dp, cp * tp) if dp > 1 else rate(cp, tp)
    under = 2 / 3 * one * (m if zero > 1 else 1) * (1 - 1 / layers)  # backward of all but the last unit
    reducing = exposed(reduced / data, under) if pp == 1 else reduced / data  # run_pipeline leaves it to finish()
    gathering = exposed(gathered / data, m * one) if zero == 3 else gathered / data
    copies = shards if zero == 0 else 1
    update = 2 * P * (w + g + o) * copies / shards / chip.memory
    if model.muon:
        update += layers * sum(forging.orthogonal_flops(k * D, D) for k in (3, 1, 4, 4)) / (chip.peak * chip.product)
    seconds = m * one * (1 + bubble) + reducing + gathering + update

    # Energy of all GPUs. Where a step is slower than its products would be alone, it moves bytes (a roofline).
    flops = step_flops(model, batch * model.seq, again)
    traffic = flops / chip.peak * (1 / chip.reach - 1 / chip.product) * chip.memory
    traffic += 2 * model.params * (w + g + o) * copies
    joules = chip.flop * flops + chip.byte * traffic + chip.watts * seconds * dp * pp * cp * tp
    sent_ = dict(tensor=m * tensor, ring=m * ring, pipeline=m * pipe, data=reduced + gathered)
    return Plan(dp, pp, cp, tp, micro, recompute, zero, m, memory / 2**30, seconds, bubble, sent_, joules)


def choices(model, gpus, links, batch):
    """All (dp, pp, cp, tp, micro, recompute, zero) that divide what they have to, with tp inside of hosts."""
    heads = model.heads or max(1, model.dim // 128)
    divisors = [k for k in range(1, gpus + 1) if gpus % k == 0]
    for tp, pp, cp in itertools.product((k for k in divisors if links.host % k == heads % k == 0), divisors, divisors):
        if gpus % (tp * pp * cp) or pp > model.layers or model.seq % (cp * tp) or cp > 1 and model.seq % (2 * cp):
            continue
        dp = gpus // (tp * pp * cp)
        for micro in (1, 2, 4, 8):
            if batch % (dp * micro) == 0:
                stages = (0,) if dp * cp == 1 or model.muon else (0, 1, 2, 3) if pp == 1 else (0, 1)
                for recompute, zero in itertools.product((False, True), stages):
                    yield dp, pp, cp, tp, micro, recompute, zero


def plan(model, gpus, memory, links=HOSTS, batch=1024, chip=H200):
    """All Plans for `batch` sequences a step on `gpus` GPUs with `memory` GiB each, the fastest first, and of equally
    fast ones the smallest. ValueError that says what is missing when there is none."""
    if min(*model[:5], gpus, memory, batch) <= 0:
        raise base.BadInput(f"{model}, gpus={gpus}, memory={memory}, batch={batch}: all sizes must be positive")
    if model.params <= 2 * model.vocab * model.dim:
        raise base.BadInput(f"params={model.params:.3g}: embedding and classifier alone, 2 x vocab x dim, are "
                            f"{2 * model.vocab * model.dim:.3g}: correct one of the three")

    def predictions(gpus):
        return (predict(model, links, chip, batch, *choice) for choice in choices(model, gpus, links, batch))

    found = list(predictions(gpus))
    if not found:
        raise base.BadInput(f"{batch} sequences of {model.seq} and {model.layers} layers cannot be shared out over "
                            f"{gpus} GPUs: take a batch that the number of GPUs divides, or another number of GPUs")
    fits = [one for one in found if one.gib <= memory]
    if not fits:
        least = min(found, key=lambda one: one.gib)
        enough = next((k * gpus for k in (2, 4, 8, 16, 32, 64)
                       if any(one.gib <= memory for one in predictions(k * gpus))), None)
        raise base.BadInput(
            f"no plan fits {gpus} GPUs of {memory:g} GiB: the smallest (dp {least.dp}, pp {least.pp}, cp {least.cp}, "
            f"tp {least.tp}, ZeRO-{least.zero}{', recomputed' * least.recompute}) takes {least.gib:.1f} GiB a GPU: "
            + (f"{enough} GPUs of {memory:g} GiB would do" if enough else "more memory a GPU is needed, or a larger "
               f"batch for more GPUs: not even {64 * gpus} do with batch={batch}"))
    return sorted(fits, key=lambda one: (one.seconds, one.gib))


def fabric_load(flows, spines, way):
    """Equal flows between two leaves of a network over `spines` links: (flows on the fullest link, flows whose packets
    can overtake each other). "single-path": a flow on one link; "spray": every packet on the next link; "split": as
    single-path, but the flows that are left over, flows mod spines, are sprayed. arXiv 2407.00550."""
    sprayed = {"single-path": 0, "spray": flows, "split": flows % spines}[way]
    load = [sprayed / spines] * spines
    for flow in range(flows - sprayed):
        load[flow % spines] += 1
    return max(load), sprayed


# Published steps: (name, Model, gpus, batch, tp, pp, their share of peak). On A100s (312 TFLOP/s; hosts of 8; layers
# recomputed): 2104.04473, table 1, whose larger runs also interleave, and whose larger matrices reach more than what is
# fitted to the first row. On Frontier (half an MI250X: 191.5 TFLOP/s, 64 GiB): 2312.12705, whose abstract has neither
# mesh nor sizes nor batch: the planner chooses the first, Megatron's models and 8 sequences a GPU are our assumption.
def gpt(layers, dim, heads, vocab=51200):
    return Model(12 * layers * dim**2 + 2 * vocab * dim, layers, dim, vocab, 2048, heads, False)


PUBLISHED = [("Megatron 1.7B", gpt(24, 2304, 24), 32, 512, 1, 1, 0.44),
             ("Megatron 18B", gpt(40, 6144, 48), 256, 1024, 8, 1, 0.43),
             ("Megatron 76B", gpt(60, 10240, 80), 1024, 1792, 8, 4, 0.45),
             ("Megatron 310B", gpt(96, 16384, 128), 1920, 2160, 8, 16, 0.50),
             ("Megatron 1T", gpt(128, 25600, 160), 3072, 3072, 8, 64, 0.52),
             ("Frontier 22B", gpt(48, 6144, 48), 1024, 8192, None, None, 0.3838),
             ("Frontier 175B", gpt(96, 12288, 96), 1024, 8192, None, None, 0.3614),
             ("Frontier 1T", gpt(128, 25600, 160), 3072, 24576, None, None, 0.3196)]
A100 = Chip(312e12, memory=2e12), Links(8, 2.4e11, 2.5e10)
MI250X = Chip(191.5e12, memory=1.6e12), Links(8, 5e10, 1.25e10)


def share_of_peak(row, reach):
    """The planner's of a published row, FLOPs counted as there: recomputation is work."""
    _, model, gpus, batch, tp, pp, _ = row
    chip, links = A100 if tp else MI250X
    chip = chip._replace(reach=reach)
    if tp:
        one = predict(model, links, chip, batch, gpus // (tp * pp), pp, 1, tp, 1, True, 0)
    else:
        one = next(x for x in plan(model, gpus, 64, links, batch, chip) if x.recompute)
    return step_flops(model, batch * model.seq, again=1) / (one.seconds * gpus * chip.peak)


def published_rows():
    """[(name, share of peak predicted, published)]: `reach` is what makes the first row of each machine right."""
    rows, fitted = [], None
    for row in PUBLISHED:
        machine, share = bool(row[4]), row[-1]
        if fitted != machine:
            fitted, reach = machine, share
            for _ in range(12):
                reach *= share / share_of_peak(row, reach)
        rows.append((row[0], share_of_peak(row, reach), share))
    return rows


REQUIRED = ["params", "layers", "dim", "vocab", "seq", "gpus", "gib"]
OPTIONAL = dict(batch="sequences a step (4 million tokens)", heads="(dim / 128)", host="GPUs of a host (8)",
                nvlink="GB/s a GPU in it (280)", link="Gbit/s a GPU between hosts (400)",
                tflops="dense bf16 peak (989)", reach="share of it that a step gets (0.48)",
                muon="1: Muon for the layers, without ZeRO (AdamW)")
USAGE = (f"{' '.join(REQUIRED)} (seq: tokens of a sequence, gib: GiB a GPU), and if you like "
         + ", ".join(f"{name}: {what}" for name, what in OPTIONAL.items()))


def parse_plan(text):
    """The Model, GPUs, GiB, Links, batch and Chip of "params=8e9 layers=32 ...": keys and units are those of USAGE,
    defaults stand in brackets. ValueError names what is missing, not known, or no such number."""
    numbers = {}
    for item in text.split():
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise base.BadInput(f"--plan: {item!r} is not of the form name=number: it takes {USAGE}") from None
        if name not in (*REQUIRED, *OPTIONAL) or name in numbers:
            what = "is given twice" if name in numbers else "is unknown"
            raise base.BadInput(f"--plan: {name} {what}: it takes {USAGE}")
        whole_number = name not in ("params", "gib", "nvlink", "link", "tflops", "reach")
        if not 0 < number < 1e18 or whole_number and (number != int(number) or number > 1e9):
            raise base.BadInput(f"--plan: {item}: give a positive{' whole' * whole_number} number")
        numbers[name] = int(number) if whole_number else number
    if missing := [name for name in REQUIRED if name not in numbers]:
        raise base.BadInput(f"--plan: missing {', '.join(missing)}: it takes {USAGE}")
    if numbers["gpus"] > 2**17:
        raise base.BadInput(f"--plan: gpus={numbers['gpus']}: plans are made for up to {2**17}")
    links = HOSTS._replace(host=numbers.get("host", HOSTS.host), inside=numbers.get("nvlink", HOSTS.inside / 1e9) * 1e9,
                           between=numbers.get("link", HOSTS.between * 8e-9) / 8e-9)
    chip = H200._replace(peak=numbers.get("tflops", H200.peak / 1e12) * 1e12, reach=numbers.get("reach", H200.reach))
    if chip.reach >= chip.product:
        raise base.BadInput(f"--plan: reach={chip.reach}: a step cannot get what a large product gets, {chip.product}")
    model = Model(*(numbers.get(k, 0) for k in ("params", "layers", "dim", "vocab", "seq", "heads")),
                  muon=numbers.get("muon", 0))
    batch = numbers.get("batch") or -(-max(1, 2**22 // model.seq) // numbers["gpus"]) * numbers["gpus"]
    return model, numbers["gpus"], numbers["gib"], links, batch, chip


def print_plans(text, best=12):
    """One screen: what was asked, the fastest plan of each mesh, and what the columns are."""
    model, gpus, gib, links, batch, chip = parse_plan(text)
    found = plan(model, gpus, gib, links, batch, chip)
    tokens = batch * model.seq
    print(f"{model.params:.3g} parameters, {model.layers} layers, D = {model.dim}; a step: {batch} sequences of "
          f"{model.seq}, {tokens:,} tokens")
    print(f"{gpus} GPUs of {gib:g} GiB, {chip.peak / 1e12:g} TFLOP/s of which {chip.reach:.0%} are reached; "
          f"{links.inside / 1e9:g} GB/s in a host of {links.host}, {links.between * 8e-9:g} Gbit/s a GPU between hosts")
    print(f"{len(found)} plans fit; the fastest of each mesh:\n")
    line = "{:>4}{:>4}{:>4}{:>4}{:>6}{:>10}{:>5} |{:>6}{:>8}{:>7}{:>10}{:>6} |{:>8}{:>8}{:>7}{:>8} |{:>8}"
    print(line.format("dp", "pp", "cp", "tp", "micro", "recompute", "ZeRO", "GiB", "s/step", "bubble", "tok/s", "peak",
                      "tensor", "ring", "pipe", "data", "MJ"))
    flops, shown = step_flops(model, tokens), set()
    for one in found:
        if one[:4] in shown or len(shown) == best:
            continue
        shown.add(one[:4])
        print(line.format(*one[:5], "yes" if one.recompute else "no", one.zero, f"{one.gib:.0f}", f"{one.seconds:.3f}",
                          f"{one.bubble:.2f}", f"{tokens / one.seconds / gpus:,.0f}",
                          f"{flops / one.seconds / gpus / chip.peak:.0%}",
                          *(f"{x / 1e9:.1f}" for x in one.sent.values()), f"{one.joules / 1e6:.3f}"))
    print("micro: sequences of a micro-batch. Of a GPU: GiB, tokens/s, share of the peak (recomputation is not work),\n"
          "and GB that it sends a step, by reason. MJ: energy of a step, all GPUs.")


# ==== 13. Losing a rank, and finding a slow one =======================================================================


def keyed_dropout(x, chance, *key):
    """Dropout of one sample x (T, D) whose mask depends on `key` (seed, step, sample, layer) alone: the same on
    whatever rank, in whatever micro-batch, however often it is made."""
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed))) >= chance
    return x * mask.to(x) / (1 - chance)


class Membership:
    """Who is alive, and what all of them have. A broken connection does not say who died, as survivors break theirs to
    each other, too, when they leave the old group. So ranks agree through a store in a process that outlasts them, that
    of MASTER_ADDR and MASTER_PORT: their parent's, if 01's spawn started them, which also notes there whose end it has
    seen; or torchrun's (which ends all ranks with the first).

    rank: this one's number, which it keeps in every group. members: those of the present group, this one too, or none
    if it is to join a group at work. timeout: seconds that anything may take. grace: seconds that survivors wait for
    each other (timeout), but not for those whose end was seen. All must make their Memberships in the same order."""

    numbers = itertools.count()  # of this process's Memberships: each has its own keys

    def __init__(self, rank, members, timeout, grace=None, device="cpu"):
        self.rank, self.members, self.device = rank, tuple(members), torch.device(device)
        self.timeout, self.grace = timeout, timeout if grace is None else grace
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*place, is_master=False, timeout=datetime.timedelta(seconds=timeout))
        self.epoch, self.votes = 0, 0  # groups before this one; votes in it
        self.prefix = f"members/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(self.numbers)}"

    def gone(self, rank):
        """Whether the parent process has seen its end."""
        return self.store.check([f"gone/{rank}"])

    def agreed(self, good, voters=None, terms=lambda: True):
        """What terms() (JSON) gave the last to come here, if all voters (the members) came with `good`, else None. Who
        has an error, sees that somebody is gone, or waits too long, says no. The store keeps what came first, so all
        read the same."""
        voters, deadline = voters or self.members, time.monotonic() + self.timeout
        key, before = (f"{self.prefix}/{self.epoch}/vote/{n}" for n in (self.votes, self.votes - 1))
        self.votes += 1
        if not good:
            self.store.compare_set(key, "", "null")
        elif self.store.add(f"{key}/yes", 1) == len(voters):
            self.store.compare_set(key, "", json.dumps(terms()))
            for name in (before, f"{before}/yes"):  # all have voted here, so all have read that one
                self.store.delete_key(name)
        while not self.store.check([key]):
            if any(map(self.gone, voters)) or time.monotonic() > deadline:
                self.store.compare_set(key, "", "null")
            with contextlib.suppress(RuntimeError):  # not yet
                self.store.wait([key], datetime.timedelta(seconds=0.2))
        return json.loads(self.store.get(key))

    def meet(self, joining=(), news=lambda members: True, patience=None):
        """The members of the next group: those who are left, and of `joining` who came. Each says that it is here, and
        waits until every other is, or is gone; who joins waits for them, `patience` seconds (timeout). Leaving the old
        group closes its connections: who waits in a receive then gets an error, and comes here, too. What
        news(members) (JSON) gave the first to have them all; None when the others have gone on without this rank."""
        self.epoch, self.votes = self.epoch + 1, 0
        if dist.is_initialized():
            dist.destroy_process_group()
        arrivals.clear()
        key, deadline = f"{self.prefix}/{self.epoch}", time.monotonic() + self.grace
        here = lambda r: self.store.check([f"{key}/here/{r}"])  # noqa: E731
        self.store.set(f"{key}/here/{self.rank}", "")
        if self.members:
            expected = sorted({*self.members, *joining})
            while time.monotonic() < deadline and not all(here(r) or self.gone(r) for r in expected):
                time.sleep(0.01)
            seen = [r for r in expected if here(r) and not self.gone(r)]
            self.store.compare_set(f"{key}/members", "", json.dumps([seen, news(seen)]))  # the first is everybody's
        self.store.wait([f"{key}/members"], datetime.timedelta(seconds=patience or self.timeout))
        members, told = json.loads(self.store.get(f"{key}/members"))
        self.members = tuple(members) if self.rank in members else ()
        return told if self.members else None

    def connect(self):
        """The default group of the members. RuntimeError when one of them was lost."""
        cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=dist.PrefixStore(f"{self.prefix}/{self.epoch}/group", self.store),
            rank=self.members.index(self.rank), world_size=len(self.members),
            timeout=datetime.timedelta(seconds=self.timeout), device_id=self.device if cuda else None)


def reshape_mesh(n, pp, layers):
    """(dp, pp) for n ranks that are left: as few stages as can be, but not fewer than before, so that nobody has to
    hold more; where n has no such divisor, as many as can be."""
    fits = [k for k in range(1, min(n, layers) + 1) if n % k == 0]
    stages = min((k for k in fits if k >= pp), default=max(fits))
    return n // stages, stages


def units_on(stage, stages, layers):
    """What Stage gives to a stage, in units that travel as a whole: 0 the embedding, then the blocks, last the head."""
    start, stop = shares(layers, stages)[stage]
    return [0] * (stage == 0) + list(range(1 + start, 1 + stop)) + [1 + layers] * (stage == stages - 1)


class Elastic:
    """Training of a GPT of 01 on dp x pp CPU ranks (gloo) that goes on, with the same losses, when ranks are killed.

    The whole batch, the scale of its gradients and every sample's random numbers stay as they were. Groups are formed
    anew, layers are cut anew into stages, and a rank fetches the weights and AdamW's state of layers that are new to it
    from a copy that is left; OSError when none is. The model must start alike on all ranks; what a rank does not own is
    filled with NaN. ElasWave 2510.00606, of which we know the abstract: it also keeps pipelines of unequal length."""

    def __init__(self, model, dp, pp, lr=1e-3, chance=0.1, seed=0, timeout=TIMEOUT):
        self.model, self.timeout = model, timeout
        self.membership = Membership(dist.get_rank(), range(dist.get_world_size()), timeout)
        self.chance, self.seed, self.queue, self.moved, self.place = chance, seed, WeightQueue(), 0, None
        for i, block in enumerate(model.blocks):
            block.register_forward_hook(functools.partial(self.drop, i))
        self.units = self.units_of(model)
        self.optimizers = [torch.optim.AdamW(unit, lr=lr) for unit in self.units]
        self.arrange(dp, pp)
        self.settle()

    @staticmethod
    def units_of(model):
        units = [list(module.parameters()) for module in (model.embedding, *model.blocks, model.norm)]
        units[-1].append(model.classifier)
        return units

    def drop(self, layer, block, inputs, y):
        return keyed_dropout(y[0], self.chance, self.seed, *self.place, layer).unsqueeze(0) if block.training else y

    def arrange(self, dp, pp):
        """Groups, this rank's stage, and the ranks that own each unit."""
        layers, world, self.dp, self.pp = len(self.model.blocks), dist.get_world_size(), dp, pp
        self.groups = make_groups(dp=dp, pp=pp, timeout=self.timeout)
        held = [units_on(rank // dp, pp, layers) for rank in range(world)]  # pp varies slowest
        self.owners = [[rank for rank in range(world) if unit in held[rank]] for unit in range(layers + 2)]
        self.mine = held[dist.get_rank()]
        self.stage = Stage(self.model, dist.get_rank() // dp, pp, self.queue)

    def settle(self):
        """Forget what others own, so that no mistake can read it, and sum gradients over the new groups."""
        for unit in set(range(len(self.units))) - set(self.mine):
            self.optimizers[unit].state.clear()
            for p in self.units[unit]:
                p.data.fill_(math.nan)
        self.sums = DataParallel(list(self.stage.parameters()), self.groups.dp, bucket_mib=100)
        self.sums.enabled = False  # run_pipeline adds to gradients itself

    def state(self, unit):
        """All tensors of a unit: weights and AdamW's state, made if it is not there."""
        tensors = []
        for p in self.units[unit]:
            state = self.optimizers[unit].state[p]
            if not state:
                state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            tensors += [p.data, *state.values()]
        return tensors

    def recover(self):
        """Go on with who is left. Who is lost meanwhile costs a timeout. False when the others go on without this."""
        before, owners, pp = self.membership.members, self.owners, self.pp  # true until settle()
        self.model.zero_grad()
        self.sums.close()
        for _ in before:  # one more may be lost each time
            self.groups = self.sums = None  # a group keeps its connections as long as anybody holds it
            try:
                if not self.membership.meet():
                    return False
                self.membership.connect()
                self.restore(before, owners, pp)
                good = True
            except (RuntimeError, TimeoutError):  # a connection broke
                good = False
            if self.membership.agreed(good):
                self.settle()
                return True
        raise OSError(f"ranks {self.membership.members} could not form a group: check the network between them")

    def restore(self, before, owners, pp):
        """A new cut of the layers; what this rank owns now and did not, from the first of those who own it."""
        now = self.membership.members
        owners = [[now.index(before[r]) for r in ranks if before[r] in now] for ranks in owners]
        if lost := [unit for unit, ranks in enumerate(owners) if not ranks]:
            raise OSError(f"no copy of units {lost} is left on ranks {now}: start again from a checkpoint")
        self.arrange(*reshape_mesh(len(now), pp, len(self.model.blocks)))
        for unit, (old, new) in enumerate(zip(owners, self.owners, strict=True)):
            for to in sorted(set(new) - set(old)):
                for tensor in self.state(unit) if dist.get_rank() in (old[0], to) else ():
                    if dist.get_rank() == to:
                        dist.recv(tensor, old[0])
                    else:
                        dist.send(tensor, to)
                        self.moved += tensor.nbytes

    def gradient(self, step, tokens, targets):
        """The sums over all ranks of the gradients of the batch (B, T), a sample a micro-batch; its loss, on all."""
        start, stop = shares(len(tokens), self.dp)[rank_in(self.groups.dp)]
        kept, C, samples = (targets != -100).sum(), self.model.classifier, itertools.count(start)

        def stage(x):  # is called for one sample after the other
            self.place = step, next(samples)
            return self.stage(x)

        def loss(y, i):
            targets_ = targets[start + i].unsqueeze(0)
            return base.linear_cross_entropy_reference(y, C, targets_, reduction="sum") / kept

        like = torch.empty(1, tokens.shape[1], C.shape[1], dtype=C.dtype)
        ops = one_f_one_b(self.pp, stop - start)[rank_in(self.groups.pp)]
        mine = run_pipeline(ops, [stage], self.queue, tokens[start:stop].split(1), loss, self.groups, like)
        self.sums.finish()
        return all_reduce(torch.as_tensor(mine, dtype=torch.float64), dist.group.WORLD).item()

    def step(self, step, tokens, targets):
        """Step number `step` on the batch tokens, targets (B, T), the same on all ranks; its loss. When ranks are lost,
        the same step again with those who are left; None when they have gone on without this one, which was too slow.
        RuntimeError when the same ranks fail twice: then nobody was lost."""
        failed = None
        while True:
            try:
                loss, good = self.gradient(step, tokens, targets), True
            except RuntimeError:  # a connection broke, or else it will fail again
                if self.membership.members == failed:
                    raise
                loss, good = None, False
            if self.membership.agreed(good):
                break
            if self.membership.members == failed:
                raise RuntimeError(f"step {step} failed twice with ranks {failed}: is one slower than "
                                   f"{self.timeout} s?")
            failed = self.membership.members
            if not self.recover():
                return None
        for unit in self.mine:
            self.optimizers[unit].step()
            self.optimizers[unit].zero_grad()
        return loss


def message_delays(slow=(), repeats=2):
    """(n, n) seconds from a barrier until a message from rank i (row) has arrived at rank j (column), the least of
    `repeats`, on all ranks (gloo). In turn k, each rank sends to the k-th after it. slow: {("sender", i),
    ("receiver", j) or ("link", i, j): seconds} that are waited there, for a test."""
    n, me, slow = dist.get_world_size(), dist.get_rank(), dict(slow)
    delays = torch.full((n, n), math.inf)

    def send(to):
        time.sleep(slow.get(("sender", me), 0) + slow.get(("link", me, to), 0))
        dist.send(torch.zeros(1), to)

    for k in list(range(1, n)) * repeats:
        to, source = (me + k) % n, (me - k) % n
        sender = threading.Thread(target=send, args=(to,))  # so that a slow sender is no slow receiver
        dist.barrier()
        start = time.perf_counter()
        sender.start()
        time.sleep(slow.get(("receiver", me), 0))
        dist.recv(torch.zeros(1), source)
        delays[source, me] = min(delays[source, me].item(), time.perf_counter() - start)
        sender.join()
    dist.all_reduce(delays, dist.ReduceOp.MIN)
    return delays


def find_slow(delays, factor=3.0, least=0.02):
    """What a delay matrix (n, n), sender by receiver, says: [("sender", i)] of rows and [("receiver", j)] of columns
    that are slow throughout, and [("link", i, j)] of other slow cells. Slow: `factor` times a usual one, and
    `least` seconds above that. ValueError for fewer than 3 ranks. C4 2406.04594, of which we know the abstract."""
    n = len(delays)
    if n < 3:
        raise base.BadInput(f"{n} ranks: a slow sender and a slow link look alike: 3 are needed")
    others = ~torch.eye(n, dtype=torch.bool)
    # Not the median: more than half are slow where one rank of three is, as sender and receiver.
    usual = delays[others].quantile(0.25, interpolation="lower")
    slow = (delays > max(factor * usual, usual + least)) & others
    rows, columns = ((slow | ~others).all(dim).nonzero().flatten().tolist() for dim in (1, 0))
    cells = [(i, j) for i, j in slow.nonzero().tolist() if i not in rows and j not in columns]
    return [*(("sender", i) for i in rows), *(("receiver", j) for j in columns), *(("link", *cell) for cell in cells)]


# ==== 14. Checks: most run on all ranks at once; alone, they start two ================================================


def device_for(ranks):
    """"cuda" when every rank can have a GPU of its own, else "cpu"."""
    return "cuda" if base.HAS_CUDA and torch.cuda.device_count() >= ranks else "cpu"


def in_ranks(function, ranks, *arguments, device=None, timeout=TIMEOUT, spare=0, stage=None):
    """What function(*arguments) returns on the first of `ranks` new processes that is left: `spare` of them may be
    killed. function: a name in this file, or in that of `stage`, globals(). They have the bugs that are planted there;
    their errors are raised here, as one."""
    names = stage or globals()
    planted = [name for name, (_, attribute, bug) in names["BREAKS"].items() if names[attribute] is bug]
    enough_queues()
    with tempfile.TemporaryDirectory() as folder:
        what = Path(names["__file__"]).stem, function, planted, folder, arguments
        try:
            spawn(one_rank, ranks, device or device_for(ranks), what, timeout, spare=spare)
        except (ProcessExitedException, ProcessRaisedException) as error:
            said = {}
            for file in sorted(Path(folder).glob("*.error")):
                kind, _, text = file.read_text().partition(":")
                said.setdefault((kind, text), []).append(file.stem)
            if not said:
                raise OSError(f"a rank ended before its work: {str(error).strip().splitlines()[-1]}") from None
            kinds = [kind for kind, _ in said]  # a rank that failed makes others fail otherwise: its error counts
            known = {"AssertionError": AssertionError, "BadInput": base.BadInput, "ValueError": ValueError}
            first = next((kind for kind in known if kind in kinds), kinds[0])
            text = "; ".join(f"rank {', '.join(who)}: {text}" for (kind, text), who in said.items() if kind == first)
            raise known.get(first, OSError)(text) from None
        left = {int(file.stem): file for file in Path(folder).glob("*.pt")}
        if not left:
            raise OSError(f"none of {ranks} ranks is left")
        return torch.load(left[min(left)], weights_only=False)


def enough_queues():
    """A GPU has 8 queues by default, over which streams are spread: a kernel that waits for another rank's message
    would hold up what shares its queue, perhaps what that rank waits for. Read when a process starts CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Torch warns that messages of one group wait for each other: as they should, on a wire of section 6.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def one_rank(stage, function, planted, folder, arguments):
    """The body of a process of in_ranks."""
    torch.set_num_threads(1)
    names = globals() if stage == Path(__file__).stem else vars(importlib.import_module(stage))
    for name in planted:
        _, attribute, bug = names["BREAKS"][name]
        names[attribute] = bug
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        torch.save(names[function](*arguments), Path(folder, f"{rank}.pt"))
    except Exception as error:
        if not isinstance(error, (AssertionError, base.BadInput, RuntimeError, OSError)):
            traceback.print_exc()  # a mistake in here, not of the user
        text = " ".join(str(error).split())[:500]
        Path(folder, f"{rank}.tmp").write_text(f"{type(error).__name__}:{text}")
        Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.error"))
        deadline = time.monotonic() + 3  # the first to leave ends the others: let them speak
        while len(list(Path(folder).glob("*.error"))) < world and time.monotonic() < deadline:
            time.sleep(0.05)
        os._exit(1)


def on_ranks(check):
    """Inside a world of ranks a check runs as it is; outside it starts two ranks for itself."""

    @functools.wraps(check)
    def run(ranks=2):
        return check() if dist.is_initialized() else in_ranks(check.__name__, ranks, stage=check.__globals__)

    return run


def here():
    """This rank's device."""
    gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


meshes = {}


def mesh(dp=1, pp=1, cp=1, tp=1):
    """make_groups, once for each mesh."""
    sizes = dp, pp, cp, tp
    if sizes not in meshes:
        meshes[sizes] = make_groups(*sizes, timeout=TIMEOUT)
    return meshes[sizes]


def tiny(n, dtype=torch.float64, layers=2, vocab=103, seed=0):
    """The same small GPT on every rank, whose heads n divides, and whose vocabulary n does not."""
    heads = n if n > 2 else 4
    torch.manual_seed(seed)
    model = base.GPT(base.GPTConfig(vocab, 8 * n, layers, heads, 8 * heads)).to(here(), dtype)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-6  # by default it depends on the dtype, and dtypes are compared here
    return model


def tiny_tokens(model, count=2, seed=0, ignored=0.3):
    """tokens (B, T), targets (B, T): ignored ones more often the later the sequence, so that ranks count unequally."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    tokens = torch.randint(config.vocab, (count, config.seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    chance = torch.linspace(0, 2 * ignored, count).unsqueeze(1)
    targets[torch.rand(targets.shape, generator=generator) < chance] = -100
    return tokens[:, :-1].to(here()), targets.to(here())


def serial_loss(model, tokens, targets):
    return base.linear_cross_entropy_reference(model(tokens), model.classifier, targets)


def part_of_loss(model, tokens, targets, group):
    """A rank's part of the mean over all ranks' tokens."""
    total = base.linear_cross_entropy_reference(model(tokens), model.classifier, targets, reduction="sum")
    return total / global_count(targets != -100, group)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def whole(model, tensors, group):
    """{name: the ranks' pieces of a cut parameter (or its gradient), joined}; what is not cut, as it is."""
    joined = {}
    for name, p in model.named_parameters():
        tensor = tensors[name]
        if hasattr(p, "cut"):
            pieces = [None] * size(group)
            dist.all_gather_object(pieces, tensor.cpu(), group=group)
            tensor = torch.cat(pieces, p.cut).to(tensor.device)
        joined[name] = tensor
    return joined


def compare(name, got, want, tolerance=1e-12):
    """The largest error of any tensor, in units of that tensor's largest element; fails above the tolerance."""
    worst = 0.0
    for key in want:
        require(got[key] is not None, f"{name}: {key} has none")
        error = ((got[key] - want[key]).abs().max() / want[key].abs().max().clamp(min=1e-300)).item()
        require(error <= tolerance, f"{name}: {key} differs from the serial model's by {error:.1e}")
        worst = max(worst, error)
    return worst


def equal_to_serial(name, parallel, serial, more=0.0):
    """parallel(dtype), serial(dtype) -> {name: tensor}. In fp64 equal to 1e-12. In fp32 and bf16 the three-way rule:
    the error against fp64 exceeds that of the serial model in that dtype by a rounding a rank at most, since every
    rank's part of a sum is rounded, and by `more`. Returns fp64's error."""
    exact = serial(torch.float64)
    worst = compare(name, parallel(torch.float64), exact)
    for dtype in (torch.float32, torch.bfloat16):
        as_good(name, dtype, parallel(dtype), serial(dtype), exact, more)
    return worst


def as_good(name, dtype, got, peer, exact, more=0.0):
    for key, want in exact.items():
        slack = torch.finfo(dtype).eps * dist.get_world_size() + more
        cce.require_as_good(f"{name}, {dtype}: {key}", got[key], peer[key], want, slack)


@on_ranks
def check_groups():
    """Every axis of every mesh of two factors has its ranks; bad sizes and absent ranks are named."""
    world, rank = dist.get_world_size(), dist.get_rank()
    axes = ("pp", "dp", "cp", "tp")
    for k in (k for k in range(1, world + 1) if world % k == 0):
        for outer, inner in itertools.combinations(axes, 2):
            groups = mesh(**{outer: world // k, inner: k})
            for axis, length, stride in ((outer, world // k, k), (inner, k, 1)):
                group = getattr(groups, axis)
                start = rank % k if axis == outer else rank // k * k
                want = [start + i * stride for i in range(length)]
                got = [rank] if group is None else dist.get_process_group_ranks(group)
                require(got == want, f"{outer} {world // k} x {inner} {k}: {axis} of rank {rank} is {got}, not {want}")
            require(all(getattr(groups, axis) is None for axis in axes if axis not in (outer, inner)), "more groups")
            require(size(groups.data) == size(groups.dp) * size(groups.cp), "data is not dp x cp")
    must_raise("were started", lambda: make_groups(tp=world + 1))
    must_raise("at least 1", lambda: make_groups(tp=0))
    if rank < world - 1:
        must_raise(f"rank(s) [{world - 1}] of {world} did not come", lambda: meet("nowhere", 0.5), TimeoutError)


def train_steps(model, batches, step, loss):
    """5 optimizer steps."""
    for tokens, targets in batches:
        loss(model, tokens, targets).backward()
        step()
        model.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def serial_steps(batches, n):
    model = tiny(n)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train_steps(model, batches, optimizer.step, serial_loss)


def batches_of(model, n, steps=5):
    """Whole batches, and the rows of them that are this rank's."""
    whole_batches = [tiny_tokens(model, 2 * n, seed) for seed in range(steps)]
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    return whole_batches, [(tokens[mine], targets[mine]) for tokens, targets in whole_batches]


@on_ranks
def check_data_parallel():
    """5 AdamW steps with gradients summed in several buckets equal the serial ones; gradients also over micro-batches,
    and when a layer is not always, or not by all ranks, used."""
    n = dist.get_world_size()
    model, group = tiny(n), mesh(dp=n).data
    batches, mine = batches_of(model, n)
    handle = data_parallel(model, group, bucket_mib=0.01)
    require(len(handle.buckets) > 3, "too few buckets to test their order")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        handle.finish()
        optimizer.step()

    got = train_steps(model, mine, step, functools.partial(part_of_loss, group=group))
    worst = compare("data parallel", got, serial_steps(batches, n))
    (tokens, targets), parameters, blocks = mine[0], dict(model.named_parameters()), model.blocks
    total = global_count(targets != -100, group)

    def backward(rows, layers):
        model.blocks = blocks[:layers]
        E = model(tokens[rows])
        (base.linear_cross_entropy_reference(E, model.classifier, targets[rows], reduction="sum") / total).backward()

    # Two micro-batches, of which the second does not use the last block; and a block that only rank 0 uses.
    for passes in ([(slice(0, 1), 2), (slice(1, 2), 1)], [(slice(0, 2), 1 if dist.get_rank() else 2)]):
        found = []
        for enabled in (None, False, True):  # None: summed here; False: all at finish(); True: during the last backward
            model.blocks = blocks
            model.zero_grad()
            for i, (rows, layers) in enumerate(passes):
                handle.enabled = bool(enabled) and i == len(passes) - 1
                backward(rows, layers)
            if enabled is not None:
                handle.finish()
                found.append({name: p.grad for name, p in parameters.items()})
            else:
                own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
                found.append({name: all_reduce(gradient, group) for name, gradient in own.items()})
        for got in found[1:]:
            compare("data parallel, parts of a step", got, found[0])
    handle.enabled, model.blocks = True, blocks
    model.zero_grad()
    backward(slice(0, 2), 2)
    must_raise("before finish()", lambda: backward(slice(0, 2), 2), RuntimeError)
    handle.finish()
    return worst


@on_ranks
def check_zero():
    """Stages 1, 2 and 3: 6 AdamW steps equal the serial ones; bytes held and sent are the formulas'."""
    n, worst, bytes_ = dist.get_world_size(), 0.0, []
    group = mesh(dp=n).data
    for stage in (1, 2, 3):
        model, held = tiny(n), []
        batches, mine = batches_of(model, n)
        zero = Zero(model, group, stage, lr=1e-3)
        sent.clear()

        def step(zero=zero, held=held):
            zero.finish()
            held.append(zero.resident())
            zero.step()

        loss = functools.partial(part_of_loss, group=group)
        train_steps(model, mine, step, loss)
        units = [len(flat) for flat in zero.flat]  # with their padding
        P, once = sum(units), units[0] + units[-1]  # stage 3 gathers twice, but the first and the last unit once
        volume = 5 * (2 * P if stage < 3 else 3 * P - once)
        bytes_ += [(stage, "holds", held[-1], zero_bytes(P, n, stage, 8, 8, 16)),
                   (stage, "sends", sent["reduce-scatter"] + sent["all-gather"], 8 * volume * (n - 1) // n)]
        loss(model, *mine[0]).backward()
        zero.finish()
        with torch.no_grad():
            model(mine[0][0])  # a look at the old weights, which must not stay
        zero.step()
        for i in range(len(units)):
            zero.fetch(i)
        got = {name: p.detach() for name, p in model.named_parameters()}
        worst = max(worst, compare(f"ZeRO-{stage}", got, serial_steps([*batches, batches[0]], n)))
    for stage, what, counted, predicted in bytes_:
        require(abs(counted - predicted) <= 50, f"ZeRO-{stage} {what} {counted} bytes, the formula says {predicted}")
    return worst


@on_ranks
def check_tensor_parallel():
    """Loss and all gradients, without and with sequence parallelism; the bytes sent by the formula; bad sizes."""
    n, worst, traffic = dist.get_world_size(), [], []
    group = mesh(tp=n).tp
    tokens, targets = tiny_tokens(tiny(n))

    def serial(dtype):
        model = tiny(n, dtype)
        loss = serial_loss(model, tokens, targets)
        loss.backward()
        return gradients(model) | dict(loss=loss.detach())

    def parallel(dtype, sequence, again=False):
        model = tiny(n, dtype)
        tensor_parallel(model, group, sequence)
        if again:
            recompute(model)
        sent.clear()
        E = model(tokens)
        loss = vocab_parallel_cross_entropy(
            E, model.classifier, targets, group, model.config.vocab, sequence=sequence)
        loss.backward()
        counted = sum(sent.values())
        wide = torch.promote_types(dtype, torch.float32).itemsize
        norms = 2 * (2 * model.config.layers + 1) * model.config.dim * dtype.itemsize * sequence
        small = (6 * tokens.numel() * wide + norms) * (n - 1) // n
        predicted = tensor_parallel_traffic(model.config, tokens.numel(), n, sequence, dtype.itemsize) + small
        traffic.append((sequence, counted, predicted))
        return whole(model, gradients(model), group) | dict(loss=loss.detach())

    for sequence in (False, True):
        name = "sequence parallel" if sequence else "tensor parallel"
        worst.append(equal_to_serial(name, functools.partial(parallel, sequence=sequence), serial))
        recomputed = parallel(torch.float64, sequence, again=True)
        compare(f"{name}, recomputed", recomputed, serial(torch.float64))
        traffic.pop()
    for sequence, counted, predicted in traffic:
        require(abs(counted - predicted) <= 100, f"sequence={sequence}: {counted} bytes sent, predicted {predicted}")
    if n > 1:
        odd = base.GPT(base.GPTConfig(50, 8, 1, n + 1, 2 * (n + 1)))
        must_raise("divides the number of heads", lambda: tensor_parallel(odd, group))
        must_raise("pad the sequence", lambda: scatter(torch.zeros(1, n + 1, 2, device=here()), group))
    return worst


@on_ranks
def check_vocabulary():
    """A classifier cut unevenly: bias, softcap, ignored tokens, reductions, shift, lse; refusals."""
    n, rank, worst = dist.get_world_size(), dist.get_rank(), 0.0
    group = mesh(tp=n).tp

    def both(V, gradient="exact", bias=True, weigh=False, dtype=torch.float64, **options):
        E, C, b, x = base.random_problem(46, V, 24, dtype, here(), bias=bias)
        x = x.where(x != -100, options.get("ignore_index", -100))
        E2, x2 = E.view(2, 23, 24), x.view(2, 23)
        start, stop = shares(V, n)[rank]
        mine = [E2.detach().clone().requires_grad_(), C[start:stop].detach().clone().requires_grad_()]
        mine += [b[start:stop].detach().clone().requires_grad_()] if bias else []
        results = []
        for one in (True, False):
            leaves = ([E2, C] + ([b] if bias else [])) if one else mine
            call = functools.partial(filtering.linear_cross_entropy, leaves[0], leaves[1], x2) if one else (
                functools.partial(
                    vocab_parallel_cross_entropy, leaves[0], leaves[1], x2, group, V,
                    loss=filtering.linear_cross_entropy))
            loss = call(bias=leaves[2] if bias else None, gradient=gradient, **options)
            if weigh:  # through the lse as well
                loss = (loss[0] + 0.1 * loss[1].square().mean())
            weight = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
            grads = torch.autograd.grad((loss * weight).sum(), leaves)
            results.append(dict(loss=loss.detach(), **dict(zip(("dE", "dC", "db"), grads, strict=False))))
        want, got = results
        for key in ("dC", "db"):
            if key in want:
                want[key] = want[key][start:stop]
        return got, want

    for options in (dict(), dict(softcap=3.0), dict(reduction="none"), dict(reduction="sum", bias=False),
                    dict(return_lse=True, weigh=True), dict(ignore_index=7)):
        worst = max(worst, compare(f"vocabulary {options}", *both(103, **options)))
    exact = both(103)[1]
    for dtype in (torch.float32, torch.bfloat16):  # by the kernels, on a GPU
        as_good("vocabulary", dtype, *both(103, dtype=dtype), exact)
    for gradient in ("sparse", "auto"):
        must_raise("use 'exact'", lambda g=gradient: both(103, gradient=g, bias=False))
    E, C, _, x = base.random_problem(4, 103, 8, device=here())
    must_raise("is rows", lambda: vocab_parallel_cross_entropy(E, C, x, group, 103))
    return worst


def forged_layer(kind, layout, group, n, sequence, W, data):
    """Steps of one linear layer (M, K) on whole numbers: its weight and states, as in the whole model."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False, device=here())
    layer.weight.data.copy_(W)
    holder, origins = nn.ModuleDict(dict(layer=layer)), {}
    if group is not None:
        kind(layer, group, sequence, origins=origins, path="layer.weight")
    handle = forging.forge(holder, forging.AdamW(weight_decay=0.1), layout, data_parallel=1, origins=origins)
    dtype = layer.weight.dtype
    for t, (X, dY) in enumerate(data, 1):
        x, dy = X.to(here(), dtype), dY.to(here(), dtype)  # (B, T, K), (B, T, M), of which this rank has a part
        if group is not None:
            pick = lambda tensor, dim: tensor.chunk(n, dim)[rank_in(group)]  # noqa: E731
            if kind is column_linear:
                x, dy = (pick(x, 1) if sequence else x), pick(dy, 2)
            else:
                x, dy = pick(x, 2), (pick(dy, 1) if sequence else dy)
        handle.arm(1e-2, t)
        layer(x.requires_grad_()).backward(dy)
    return dict(weight=layer.weight.detach(), **handle["layer.weight"].tensors)


@on_ranks
def check_forge():
    """FORGE on shards under tensor and sequence parallelism: the update of the whole matrix, bit for bit, in all
    layouts (whole numbers make every sum exact). Under data parallelism: refused, or by factors, again bit for bit."""
    n = dist.get_world_size()
    group = mesh(tp=n).tp
    M, K, T = 8 * n, 128 * n, 4 * n
    W, data = forging.whole_numbers(2 * T, M, K, "cpu", steps=2)
    data = [(X.view(2, T, K), dY.view(2, T, M)) for X, dY in data]
    for layout in forging.LAYOUTS:
        for kind in (column_linear, row_linear):
            want = forged_layer(kind, layout, None, 1, False, W, data)
            for sequence in (False, True):
                got = forged_layer(kind, layout, group, n, sequence, W, data)
                start, stop = shares(M if kind is column_linear else K, n)[rank_in(group)]
                for name, tensor in got.items():
                    scale = forging.GROUP if "scale" in name and kind is row_linear else 1
                    part = slice(start // scale, stop // scale)
                    mine = want[name][part] if kind is column_linear else want[name][:, part]
                    where = f"{layout}, {kind.__name__}, sequence={sequence}"
                    require(torch.equal(tensor, mine), f"{where}: {name} differs")
    # Data parallel: the batch's rows over the ranks.
    for layout in ("fp32", "int8"):
        results = []
        for parts in (slice(None), slice(dist.get_rank(), None, n)):
            layer = nn.Linear(K, M, bias=False, device=here())
            layer.weight.data.copy_(W)
            handle = forging.forge(layer, forging.AdamW(), layout, data_parallel=1)
            for t, (X, dY) in enumerate(data, 1):
                x, dy = (v.flatten(0, 1)[parts].to(here(), layer.weight.dtype, copy=True) for v in (X, dY))
                handle.stash()
                layer(x.requires_grad_()).backward(dy)
                if parts != slice(None):
                    sent.clear()
                    gather_factors(handle, mesh(dp=n).data)
                    traffic = sent["all-gather"], factor_traffic(len(x), M, K, n, x.element_size())
                handle.release(1e-2, t)
            results.append(dict(weight=layer.weight.detach(), **handle["weight"].tensors))
        for name, tensor in results[0].items():
            require(torch.equal(tensor, results[1][name]), f"factors gathered over ranks, {layout}: {name} differs")
        require(traffic[0] == traffic[1], f"factors: {traffic[0]} bytes sent, predicted {traffic[1]}")
    if n > 1:
        must_raise("gather_factors", lambda: forging.forge(nn.Linear(4, 4), forging.AdamW()))


@on_ranks
def check_wide_rules():
    """Muon and Adam-mini of a matrix that is cut by rows or columns. In fp64 Muon's joined update is that of the whole
    matrix, bit for bit; steps in fp32 (products on a GPU in bf16) are as close to fp64 by hand as those of the whole
    matrix; the bytes sent are those of the formulas."""
    n = dist.get_world_size()
    group = mesh(tp=n).tp
    M, K, T, muon, mini = 8 * n, 24 * n, 16, forging.Muon(weight_decay=0.1), forging.AdamMini(weight_decay=0.1)
    W, data = forging.whole_numbers(T, M, K, "cpu", steps=3)
    gradients = [dY.T @ X for X, dY in data]
    by_hand = functools.partial(forging.by_hand, W=W[None], gradients=[g[None] for g in gradients], rate=0.02)
    exact = {rule: by_hand(rule)[0][0].to(here()) for rule in (muon, mini)}

    def trained(rule, dim, group):
        holder = nn.Linear(K, M, bias=False, device=here())
        holder.weight.data.copy_(W)
        if group is not None:
            cut(holder, "weight", dim, group, {}, "weight")
        ranks = {"weight": ranks_of(holder.weight, group)} if group is not None else {}
        handle = forging.forge(holder, rule, data_parallel=1, ranks=ranks)
        sent.clear()
        for t, tensors in enumerate(data, 1):
            X, dY = (x.to(here()) if x_dim != dim or group is None else x.chunk(n, 1)[rank_in(group)].to(here())
                     for x, x_dim in zip(tensors, (1, 0), strict=True))
            handle.arm(0.02 * t, t)
            holder(X.requires_grad_()).backward(dY)
        return holder.weight.detach()

    whole_matrix = {rule: trained(rule, 0, None) for rule in exact}
    for dim in (0, 1) if n > 1 else ():
        part = nn.Parameter(W)
        part.cut, U = dim, W.double().to(here())
        ranks = ranks_of(part, group)
        pick = lambda tensor, dim=dim: tensor.chunk(n, dim)[rank_in(group)]  # noqa: E731
        joined = ranks.own_part(forging.orthogonal(ranks.join(pick(U))))
        require(torch.equal(joined, pick(forging.orthogonal(U.clone()))), f"cut {dim}: another update in fp64")
        start = pick(W.to(here())).double()
        a_step = {muon: muon_traffic(M, K, n, 2 if here().type == "cuda" else 4), mini: dim * 2 * 4 * M * (n - 1) // n}
        for rule in exact:
            got, name = trained(rule, dim, group), f"{type(rule).__name__}, cut {dim}"
            moved = [w.double() - start for w in (got, pick(whole_matrix[rule]), pick(exact[rule]))]
            cce.require_as_good(name, *moved, 1e-5)
            traffic, planned = sum(sent.values()), len(data) * a_step[rule]
            require(traffic == planned, f"{name}: {traffic} bytes sent, predicted {planned}")


@on_ranks
def check_forged_model():
    """A whole model, cut and forged: embedding, layers, and the classifier inside its loss; 3 steps of SGD in fp32
    against torch's in fp64, by the three-way rule."""
    n = dist.get_world_size()
    group, rule = mesh(tp=n).tp, forging.SGD(momentum=0.9)
    tokens, targets = tiny_tokens(tiny(n))

    def forged(group, sequence=False):
        model = tiny(n, torch.float32)
        origins = tensor_parallel(model, group, sequence)
        handle = forging.forge(
            model, rule, embeddings=True, classifier="classifier", origins=origins, data_parallel=1)
        others = torch.optim.SGD(handle.ordinary.values(), 0.1, momentum=0.9)
        loss = functools.partial(forging.forge_classifier, state=handle["classifier"], gradient="exact")
        for step in range(1, 4):
            handle.arm(0.1, step)
            vocab_parallel_cross_entropy(model(tokens), model.classifier, targets, group, model.config.vocab,
                                         sequence=sequence, loss=loss).backward()
            others.step()
            others.zero_grad()
        return whole(model, {name: p.detach() for name, p in model.named_parameters()}, group)

    model = tiny(n)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    exact = train_steps(model, [(tokens, targets)] * 3, optimizer.step, serial_loss)
    moved = lambda weights: {name: w - start[name] for name, w in weights.items()}  # noqa: E731
    for sequence in (False, True):
        as_good("forged model", torch.float32, moved(forged(group, sequence)), moved(forged(None)), moved(exact))


def check_schedules():
    """Bubbles and micro-batches in flight of every schedule, simulated, are those of the formulas; lists that cannot
    end are refused."""
    cost = dict(F=1, B=2, W=0)
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 3, p, 2 * p, 4 * p):
            for name, schedule in SCHEDULES.items():
                if name == "interleaved" and m % p:
                    must_raise("needs a multiple", lambda s=schedule, p=p, m=m: s(p, m))
                    continue
                if name == "zero-bubble" and m < p:
                    simulate(schedule(p, m), dict(F=1, B=1, W=1))  # ends; too few micro-batches for its formula
                    continue
                lists = schedule(p, m)
                found = simulate(lists, dict(F=1, B=1, W=1) if name == "zero-bubble" else cost)
                bubble = bubble_formula(name, p, m)
                good = abs(found.bubble - bubble) < 1e-12
                require(good, f"{name}, p={p}, m={m}: bubble {found.bubble}, not {bubble}")
                want = [peak_formula(name, p, m, rank) for rank in range(p)]
                require(found.peak == want, f"{name}, p={p}, m={m}: {found.peak} in flight, not {want}")
    must_raise("wait for each other", lambda: simulate([[Op("B", 0), Op("F", 0)]], cost))
    must_raise("another order", lambda: simulate([[Op("F", 0), Op("F", 1)], [Op("F", 1), Op("F", 0)]], cost))


@on_ranks
def check_pipeline():
    """Every schedule gives the gradients of the same stages one after the other bit for bit, also with fewer
    micro-batches than stages, and the plain model's to 1e-12; so does a weight that the first and last stage share."""
    p = dist.get_world_size()
    groups = mesh(pp=p)
    rank, queue = rank_in(groups.pp), WeightQueue()

    def serial(model, run, parts, loss):
        total = 0.0
        for i, part in enumerate(parts):
            one = loss(run(part), i, model.classifier)
            one.backward()
            total += one.detach()
        return total

    for m in (max(1, p - 1), 2 * p):
        tokens, targets = tiny_tokens(tiny(p), 2 * m)
        parts, goals, total = tokens.chunk(m), targets.chunk(m), global_count(targets != -100, None)

        def loss(y, i, C, goals=goals, total=total):
            return base.linear_cross_entropy_reference(y, C, goals[i], reduction="sum") / total

        plain, whole_model = tiny(p, layers=2 * p), tiny(p, layers=2 * p)
        serial(plain, plain, parts, loss)
        want_loss = serial(whole_model, Stage(whole_model, 0, 1, queue), parts, loss)
        for name, schedule in SCHEDULES.items():
            chunks = 2 if name == "interleaved" else 1
            if chunks > 1 and m < p:
                continue  # interleaving needs a multiple of p
            model = tiny(p, layers=2 * p)
            stages = [Stage(model, c * p + rank, chunks * p, queue) for c in range(chunks)]
            like = torch.empty(*parts[0].shape, model.config.dim, dtype=torch.float64, device=here())
            got_loss = run_pipeline(
                schedule(p, m)[rank], stages, queue, parts, functools.partial(loss, C=model.classifier), groups, like)
            held = {q for stage in stages for q in stage.parameters()}
            mine = {key: q for key, q in model.named_parameters() if q in held}
            require({q for q in model.parameters() if q.grad is not None} == held, f"{name}: gradients elsewhere")
            for key, q in mine.items():
                same = torch.equal(q.grad, whole_model.get_parameter(key).grad)
                require(same, f"{name}, {m} micro-batches: gradient of {key} differs")
            compare(name, gradients(model), {key: plain.get_parameter(key).grad for key in mine})
            require(rank < p - 1 or torch.equal(got_loss, want_loss), f"{name}: the loss differs")
    # Tied: one weight, of which the first and the last stage have a copy each, whose gradients are summed.
    plain, model = tiny(p, layers=2 * p), tiny(p, layers=2 * p)
    plain.classifier = plain.embedding.weight
    model.classifier.data.copy_(model.embedding.weight.data)
    serial(plain, plain, parts, loss)
    run_pipeline(one_f_one_b(p, m)[rank], [Stage(model, rank, p, queue)], queue, parts,
                 functools.partial(loss, C=model.classifier), groups, like)
    ends = [torch.zeros_like(model.classifier) if q.grad is None else q.grad
            for q in (model.embedding.weight, model.classifier)]
    compare("tied", dict(weight=all_reduce(ends[0] + ends[1], groups.pp)), dict(weight=plain.classifier.grad))


@on_ranks
def check_context():
    """Ring attention in a whole model, both ways of cutting: loss and gradients, work a rank, refusals."""
    n, worst = dist.get_world_size(), 0.0
    group = mesh(cp=n).data
    tokens, targets = tiny_tokens(tiny(n))

    def serial(dtype):
        model = tiny(n, dtype)
        serial_loss(model, tokens, targets).backward()
        return gradients(model)

    def parallel(dtype, zigzag):
        model = tiny(n, dtype)
        context_parallel(model, group, zigzag)
        handle = data_parallel(model, group)
        part_of_loss(model, *(split_sequence(x, group, zigzag) for x in (tokens, targets)), group).backward()
        handle.finish()
        return gradients(model)

    def attention(dtype, zigzag, parallel):
        """out, dq, dk, dv at this rank's positions, of scores up to 5. (An untrained model's are nearly 0, and its dq
        and dk, too.)"""
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(2, 3, 8 * n, 16, generator=generator, dtype=torch.float64) for _ in range(4)]
        mine = functools.partial(split_sequence, group=group, zigzag=zigzag, dim=2)
        *qkv, dout = (t.to(here(), dtype) for t in tensors)
        if parallel:
            qkv, dout = [mine(t) for t in qkv], mine(dout)
        qkv = [t.requires_grad_() for t in qkv]
        out = ring_attention(*qkv, group, zigzag) if parallel else base.causal_attention(*qkv)
        dq, dk, dv = torch.autograd.grad(out, qkv, dout)
        results = dict(out=out.detach(), dq=dq, dk=dk, dv=dv)
        return results if parallel else {name: mine(t) for name, t in results.items()}

    for zigzag in (False, True):
        name = "zigzag" if zigzag else "contiguous"
        worst = max(worst, equal_to_serial(name, functools.partial(parallel, zigzag=zigzag), serial))
        ways = [functools.partial(attention, zigzag=zigzag, parallel=cut_) for cut_ in (True, False)]
        rounded = 5 * n * torch.finfo(torch.float32).eps  # a score of 5, rounded, is off by 5 roundings after exp()
        worst = max(worst, equal_to_serial(f"{name} attention", *ways, rounded))
    T = 32 * n
    work = [attention_work(T, n, zigzag) for zigzag in (False, True)]
    require(sum(work[0]) == sum(work[1]) == T * (T + 1) // 2, f"pairs are lost: {work}")
    require(len(set(work[1])) == 1, f"zigzag is not balanced: {work[1]}")
    if n > 1:
        must_raise("pad the sequence", lambda: split_sequence(torch.zeros(1, 2 * n + 1), group))
        model = tiny(n)
        context_parallel(model, group)
        must_raise("positions on a rank", lambda: model(split_sequence(tokens[:, : 4 * n], group)))
    return worst


@on_ranks
def check_mesh():
    """Two cuts at once, of an even number of ranks: data or context with tensor (and sequence) parallelism."""
    world, worst = dist.get_world_size(), 0.0
    tokens, targets = tiny_tokens(tiny(world), world)
    want_model = tiny(world)
    serial_loss(want_model, tokens, targets).backward()
    for axis in ("dp", "cp"):
        groups = mesh(**{axis: 2, "tp": world // 2})
        model = tiny(world)
        tensor_parallel(model, groups.tp, sequence=axis == "dp")
        if axis == "cp":
            context_parallel(model, groups.cp)
        handle = data_parallel(model, groups.data)
        part = functools.partial(split_sequence, group=groups.cp) if axis == "cp" else (
            lambda x, groups=groups: x.chunk(2)[rank_in(groups.dp)])
        mine = part(tokens), part(targets)
        loss = vocab_parallel_cross_entropy(
            model(mine[0]), model.classifier, mine[1], groups.tp, model.config.vocab, sequence=axis == "dp",
            reduction="sum")
        (loss / global_count(mine[1] != -100, groups.data)).backward()
        handle.finish()
        worst = max(worst, compare(f"{axis} x tp", whole(model, gradients(model), groups.tp), gradients(want_model)))
    return worst


def small_model(device, layers=4, dim=64, seq=64):
    torch.manual_seed(0)
    return base.GPT(base.GPTConfig(64, seq, layers, 4, dim)).to(device)


def check_memory_instead():
    """Recomputed and offloaded (to files; on a GPU to host memory, too): the same gradients bit for bit; a storage goes
    once, what is in flight is forwarded, no file is left."""
    device = here() if dist.is_initialized() else base.default_device()
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    exact = sdpa_kernel(SDPBackend.MATH)  # others may add up in any order on a GPU
    with tempfile.TemporaryDirectory() as folder, exact:
        results = {}
        for way in ("plain", "recompute", "file", "in flight", *(["host"] if device.type == "cuda" else [])):
            model, offload, held_up = small_model(device), None, threading.Event()
            if way == "recompute":
                recompute(model)
            elif way != "plain":
                offload = Offload(model, None if way == "host" else folder, ahead=10**6 if way == "in flight" else 4)
            if way == "in flight":  # nothing is written before backward is over
                offload.thread.submit(held_up.wait)
            try:
                for _ in range(2):
                    with offload or contextlib.nullcontext():
                        loss = model(tokens).square().mean()
                    loss.backward()
            except RuntimeError as error:  # a storage of another size, say
                raise AssertionError(f"{way}: {error}") from None
            finally:
                held_up.set()
            if offload:
                offload.close()
                counts = offload.counts
                require(counts["tensors"] > counts["storages"] > 20, f"{way}: nothing was saved twice: {counts}")
                forwarded = counts["forwarded"] == counts["tensors"]
                require(forwarded or way != "in flight", f"what was still in flight was waited for: {counts}")
            results[way] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for way, got in results.items():
            for name, gradient in got.items():
                require(torch.equal(gradient, results["plain"][name]), f"{way}: gradient of {name} differs")
        require(not list(Path(folder).iterdir()), "files are left")
    must_raise("pass a folder", lambda: Offload(small_model("cpu")))


def check_lean():
    """lean(), uncompiled: the same gradients, bit for bit but for the kernel's; as many bytes fewer as its formula
    says. The kernel turns, and turns back, as 01 does, also where heads and their halves are no powers of two."""
    device, T, layers, dim = base.default_device(), 12, 2, 96
    tokens = torch.randint(64, (2, T), generator=torch.Generator().manual_seed(0)).to(device)
    results, kept = {}, {}
    for way in ("plain", "kept", "lean", "forged", *(["kernel"] if base.HAS_TRITON else [])):
        model = small_model(device, layers, dim, T)
        if way != "plain":
            lean(model, compiled=False, remake=way != "kept", kernel=way == "kernel")
        if way == "forged":
            forging.forge(model, forging.SGD(), data_parallel=1)  # not armed: gradients come out
        # Flash attention may add up in any order on a GPU; the plain one keeps other things.
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext():
            kept[way], (E, _) = kept_bytes(lambda: (model(tokens), gc.collect()))  # noqa: B023  a kernel's cycles
            (E * torch.arange(dim, device=device).cos()).sin().sum().backward()
        results[way] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in results[way].items():
            error = cce.error(gradient, results["plain"][name])
            require(error <= (1e-6 if way == "kernel" else 0), f"{way}: gradient of {name} is off by {error:.1e}")
    if base.HAS_TRITON:
        saved, formula = kept["kept"] - kept["kernel"], lean_saving(model.config, tokens.numel(), 4)
        right = device.type == "cuda" or abs(saved / formula - 1) < 0.01
        require(right, f"saves {saved} bytes, the formula says {formula}")
        saved, formula = kept["kept"] - kept["lean"], lean_saving(model.config, tokens.numel(), 4, kernel=False)
        right = device.type == "cuda" or abs(saved / formula - 1) < 0.01
        require(right, f"without the kernel saves {saved} bytes, the formula says {formula}")
        block, angles = model.blocks[0], (model.cos, model.sin, model.blocks[0].head)
        for heads in (4, 5):
            x = torch.randn(2, T, 3 * heads * block.head, generator=torch.Generator().manual_seed(1)).to(device)
            x, outs, gradients = x.requires_grad_(), [], []
            for parts in (Turned.apply(x, *angles), block.heads(x, *angles[:2])):
                outs.append(torch.stack(parts))  # (3, B, H, T, D/H)
                loss = outs[-1].sin().sum()
                gradients.append(torch.autograd.grad(loss, x)[0])
            require(cce.error(*outs) < 1e-6, f"{heads} heads: q, k, v are off by {cce.error(*outs):.1e}")
            require(cce.error(*gradients) < 1e-6, f"{heads} heads: the gradient is off by {cce.error(*gradients):.1e}")


def check_simulator(seeds=30):
    """Random tasks with needs, some on several resources: all are done, each resource's in the list's order, and each
    starts exactly when the last of what it waits for has ended; lists that cannot end are refused."""
    for seed in range(seeds):
        generator, tasks, free = np.random.default_rng(seed), [], Counter()
        for i in range(40):
            on = tuple(generator.choice(5, generator.integers(1, 3), replace=False).tolist())
            needs = tuple((j,) for j in generator.choice(i, min(i, 2), replace=False).tolist()) if i else ()
            tasks.append(Task((i,), on, float(generator.random()), needs))
        times = play(tasks)
        require(len(times) == 40, "tasks are lost")
        for task in tasks:  # the list is sorted by needs, so in its order all is known
            start = max([free[x] for x in task.on] + [times[need][1] for need in task.needs])
            right = times[task.name] == (start, start + task.seconds)
            require(right, f"{task.name} is at {times[task.name]}, should start at {start}")
            free.update({x: start + task.seconds - free[x] for x in task.on})
    must_raise("wait for each other", lambda: play([Task((0,), (0,), 1, ((1,),)), Task((1,), (0,), 1)]))
    must_raise("of one name", lambda: play([Task((0,), (0,), 1), Task((0,), (1,), 1)]))


def tally(what, ratios):
    """One line about times relative to a baseline that promises nothing."""
    return f"{what}: slower in {sum(x > 1 for x in ratios)} of {len(ratios)}, median {statistics.median(ratios):.2f} x"


def check_uneven(seeds=12, n=16):
    """Every policy: all tokens and all pairs, once. Disaggregation: no row twice, the largest load never above fixed
    packing's, nobody lacks while another has too much. FlexSP: within its capacity, never slower than the best
    homogeneous division. Others promise no such thing: how often they are slower. Then one batch by hand."""
    ratios, rates = {}, rates_of(4096)
    for seed in range(seeds):
        tokens = (1 + seed % 3) * 4096 * n
        lengths = lognormal_lengths(tokens, seed, longest=tokens // 8, mu=6.0 + seed % 3)
        pairs, capacity, rows = sum(pairs_of(0, s) for s in lengths), 2 * tokens // n, end_to_end(lengths, n)
        moves = disaggregate(rows, n, rates)
        times, splits = {}, {"fixed": fixed_packing(rows, n, rates), "disaggregated": with_moves(rows, n, moves, rates),
                             "two layouts": two_layouts(lengths, n, rates)}
        for name, search in (("homogeneous", homogeneous), ("FlexSP", flexible)):
            times[name], groups, splits[name] = search(lengths, n, rates, capacity)
            require(sum(groups) == n and max(splits[name].tokens) <= capacity, f"{name}: {groups} hold too much")
        for name, split in splits.items():
            exact = 1e-9 * pairs
            require(abs(sum(split.tokens) - tokens) <= 1e-6, f"{name}: {sum(split.tokens)} of {tokens} tokens")
            require(abs(sum(split.pairs()) - pairs) <= exact, f"{name}: {sum(split.pairs())} of {pairs} pairs")
            require(min(split.early + split.late) >= -exact, f"{name}: less than no work")
            times[name] = span(layer_tasks(split, rates))
        seen = Counter()
        for part, to in moves:
            require(part.home != to and 0 <= part.start < part.stop <= lengths[part.document], f"{part} to {to}")
            seen.update((part.document, row) for row in range(part.start, part.stop))
        require(max(seen.values(), default=1) == 1, "a row is done twice")
        before, after = splits["fixed"].pairs(), splits["disaggregated"].pairs()
        require(max(after) <= max(before), f"disaggregation makes the largest load larger: {max(before)}, {max(after)}")
        lack, surplus = pairs / n - min(after), max(after) - pairs / n  # both only where no single row is small enough
        require(lack <= max(0.1 * pairs / n, max(lengths)) or surplus <= max(lengths), "one lacks, another has more")
        require(times["FlexSP"] <= times["homogeneous"], f"FlexSP {times['FlexSP']}: a division was missed")
        for name, baseline in (("disaggregated", "fixed"), ("disaggregated", "homogeneous"),
                               ("two layouts", "homogeneous")):
            ratios.setdefault(f"{name} against {baseline}", []).append(times[name] / times[baseline])
    must_raise("find no room", lambda: homogeneous([100, 900], 4, rates, 200))

    # Documents of 6 and 2 tokens over two ranks, by hand. A query has 3 bytes, a key 1; 21 and 3 pairs.
    lengths, rates = [6, 2], Rates(10, 1, 2, 4, 2, 3, 1)
    rows = end_to_end(lengths, 2)
    moves = disaggregate(rows, 2, rates)
    require(moves == [(Queries(1, 1, 2, 1), 0)], f"of [10, 14] pairs 2 are moved, not {moves}")
    for name, got, want in (
        ("fixed", fixed_packing(rows, 2, rates), ([4, 4], [10, 3], [0, 11], {(0, 1): 8}, {(1, 0): 8})),
        ("moved", with_moves(rows, 2, moves, rates),
         ([4, 4], [10, 1], [2, 11], {(0, 1): 8, (1, 0): 10}, {(1, 0): 8, (0, 1): 10})),
        ("apart", grouped(lengths, (1, 1), rates, 6), ([6, 2], [21, 3], [0, 0], {}, {})),
        ("together", grouped(lengths, (2,), rates, 6),
         ([4, 4], [0, 0], [12, 12], {(0, 1): 16, (1, 0): 16}, {(0, 1): 16, (1, 0): 16})),
        ("two layouts", two_layouts(lengths, 2, rates),
         ([4, 4], [0, 5.25], [13.5, 5.25], {(0, 1): 18, (1, 0): 26}, {(0, 1): 8})),
    ):
        require(tuple(got) == want, f"{name}, by hand: {tuple(got)}, not {want}")
    fixed = fixed_packing(rows, 2, rates)
    far = Split([0] * 4, [0] * 4, [0] * 4, Counter({(0, 2): 8}), Counter())
    for split, host, routed, want in ((fixed, 2, False, 83), (fixed, 1, False, 115),
                                      (far, 2, False, 32), (far, 2, True, 16)):
        got = span(layer_tasks(split, rates._replace(host=host), routed))
        require(got == want, f"hosts of {host}, routed {routed}: {got} s, by hand {want}")
    return [tally(*item) for item in ratios.items()]


@on_ranks
def check_elsewhere():
    """Rows of queries done by other ranks: outputs and gradients are the serial ones, the bytes those of the plan; also
    when only one rank has anything to give."""
    n, me, worst, moved = dist.get_world_size(), dist.get_rank(), 0.0, 0
    group, H, d = mesh(dp=n).data, 2, 8
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 40, (n + 2,), generator=generator).tolist()
        homes = [*range(n), *([0, 0] if seed % 2 else [n - 1, 0])]  # each rank has one at least, some more
        random = [[torch.randn(s, H, d, generator=generator, dtype=torch.float64) for _ in range(4)] for s in lengths]
        rows = [Queries(i, 0, s, home) for i, (s, home) in enumerate(zip(lengths, homes, strict=True))]
        rates = Rates(1, 1, 1, 1, n, H * d * 8, H * d * 8)
        moves = disaggregate(rows, n, rates, tolerance=0.0)
        moved += len(moves)

        def attention(dtype, elsewhere, random=random, homes=homes, moves=moves, rows=rows, rates=rates):
            """{document and name: out, dq, dk, dv} of this rank's documents."""
            mine = {i: [x.to(here(), dtype, copy=True).requires_grad_() for x in tensors[:3]]
                    for i, tensors in enumerate(random) if homes[i] == me}
            sent.clear()
            if elsewhere:
                outputs = attention_elsewhere(mine, moves, group)
            else:
                swap = lambda x: x.transpose(0, 1).unsqueeze(0)  # noqa: E731
                outputs = {i: base.causal_attention(*map(swap, qkv))[0].transpose(0, 1) for i, qkv in mine.items()}
            torch.autograd.backward([outputs[i] for i in mine], [random[i][3].to(here(), dtype) for i in mine])
            if elsewhere and dtype == torch.float64:
                split = with_moves(rows, n, moves, rates)
                planned = sum(v for way in (split.there, split.back) for (a, _), v in way.items() if a == me)
                require(sent["all-to-all"] == planned, f"{sent['all-to-all']} bytes sent, {planned} planned")
            names = ("out", "dq", "dk", "dv")
            return {f"{name} of document {i}": x for i, qkv in mine.items()
                    for name, x in zip(names, (outputs[i].detach(), *(t.grad for t in qkv)), strict=True)}

        ways = [functools.partial(attention, elsewhere=elsewhere) for elsewhere in (True, False)]
        rounded = 5 * n * torch.finfo(torch.float32).eps  # a score of 5, rounded, is off by 5 roundings after exp()
        worst = max(worst, equal_to_serial("elsewhere", *ways, rounded))
    require(moved >= 4, f"only {moved} pieces were moved")
    return worst


def check_flow(seeds=20):
    """Every sample is encoded and trained on once, the latter after the former; the allocation is the best of all;
    micro-batches are as large as they may be and no larger; time between bounds. Against one pool: how often slower."""
    ratios = []
    for seed in range(seeds):
        n = 2 + seed % 7
        samples = random_samples(12 * n, seed)
        tasks = producer_consumer(samples, n)
        batches = [task.name[1:] for task in tasks if task.name[0] == "backbone"]
        encoded = [task.name[1] for task in tasks if task.name[0] == "encode"]
        require(sorted(encoded) == sorted(sum(batches, ())) == list(range(len(samples))), "samples are lost, or twice")
        require(all({("encode", i) for i in t.name[1:]} == set(t.needs) for t in tasks if t.name[0] == "backbone"),
                "a micro-batch does not wait for its samples")
        encode, backbone = sum(s.encode for s in samples), sum(s.backbone for s in samples)
        g = allocate(samples, n)
        slowest = min(max(encode / a, backbone / (n - a)) for a in range(1, n))
        require(abs(max(encode / g, backbone / (n - g)) - slowest) < 1e-12, f"{g} of {n} ranks encode: not the best")
        room, cost = backbone / (n - g) / 4, [sum(samples[i].backbone for i in batch) for batch in batches]
        largest = max(room, *(s.backbone for s in samples))
        require(max(cost) <= largest + 1e-12, "a micro-batch is too large")
        require(all(c + samples[after[0]].backbone > room for c, after in zip(cost, batches[1:], strict=False)),
                "a micro-batch could have been larger")
        apart, by_cost_, step = (span(f(samples, n)) for f in (producer_consumer, by_cost, lock_step))
        last = max(end for name, (_, end) in play(tasks).items() if name[0] == "encode")
        require(slowest - 1e-9 <= apart <= last + backbone / (n - g) + largest, "two pools take another time")
        mean = (encode + backbone) / n
        require(mean - 1e-9 <= by_cost_ <= mean + max(s.encode + s.backbone for s in samples), "shared out badly")
        rounds = [samples[i : i + n] for i in range(0, len(samples), n)]
        require(abs(step - sum(max(s.encode + s.backbone for s in part) for part in rounds)) < 1e-9, "no lock step")
        ratios.append((apart / by_cost_, apart / step))
    must_raise("one each", lambda: producer_consumer(samples, 1))
    return [tally(f"two pools against {name}", x) for name, x in
            zip(("samples shared out by cost", "lock step"), zip(*ratios, strict=True), strict=True)]


def check_skip(seeds=60):
    """Random p, m, k, costs: each micro-batch goes through k different stages in order, every stage has its quota, no
    more than allowed are in flight, the path is the best of all (up to 5 stages); played, it takes what was reserved.
    Greedy promises no more: how often the same work in thinner stages, none skipped, is faster."""
    ratios = []
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        p, m = int(generator.integers(2, 9)), int(generator.integers(1, 25))
        k, most = int(generator.integers(1, p)), p if seed % 3 else int(generator.integers(1, p + 1))
        cost = dict(F=1.0, B=float(generator.integers(1, 4)), W=0.0)
        paths, tasks, reserved = skip_pipe(p, m, k, cost, most)
        require(all(len(path) == k and list(path) == sorted(set(path)) for path in paths), f"seed {seed}: {paths}")
        visits = [sum(s in path for path in paths) for s in range(p)]
        require(len(paths) == m and max(visits) - min(visits) <= 1, f"seed {seed}: visits {visits}")
        require(len(tasks) == 2 * m * k, f"seed {seed}: work is lost")
        times = play(tasks)
        require(abs(span(tasks) - reserved) < 1e-9, f"seed {seed}: {span(tasks)} s, but {reserved} are reserved")
        lives = [(min(times["F", i, s][0] for s in path), max(times["B", i, s][1] for s in path))
                 for i, path in enumerate(paths)]
        flight = max(sum(a <= t < b for a, b in lives) for t, _ in lives)
        require(flight <= most, f"seed {seed}: {flight} in flight, {most} allowed")
        busy, quota = [[] for _ in range(p)], list(visits)
        for i, path in enumerate(paths if p <= 5 else ()):
            ends = {}
            for other in itertools.combinations(range(p), k):
                now = sorted(end for _, end in lives[:i])[i - most] if i >= most else 0.0
                if all(quota[s] for s in other) and all(s in other for s in range(p) if quota[s] == m - i):
                    for s in other:
                        now = earliest(busy[s], now, cost["F"]) + cost["F"]
                    ends[other] = now
            require(ends[path] == min(ends.values()), f"seed {seed}: {i} takes {path}, of {ends}")
            for s in path:
                quota[s] -= 1
                busy[s] += [times["F", i, s], times["B", i, s]]
        if most == p:
            ratios.append(span(tasks) / (simulate(one_f_one_b(p, m), cost).span * k / p))
    must_raise("between 1 and all", lambda: skip_pipe(4, 4, 5, cost, 4))
    return [tally("SkipPipe against as much work in thin stages", ratios)]


def check_planner(seeds=12):
    """Plans use all GPUs, fit, are sorted. Any choice: with infinitely fast links it takes what its FLOPs, its bubble
    and its update take; with others, what it says that it sends besides; its energy is that of the model's FLOPs, in
    any mesh; its memory what sections 2 and 3 say. Impossible wishes are refused with what is missing."""
    chip = H200._replace(byte=0.0)
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        model = gpt(int(generator.integers(2, 40)), 128 * int(generator.integers(2, 40)), 0)
        gpus, batch, gib = 2 ** int(generator.integers(0, 8)), 2 ** int(generator.integers(7, 11)), 80.0
        every, slow = list(choices(model, gpus, HOSTS, batch)), Links(8, 1e11, 1e11, 0.0)
        V, D, L, T = model.vocab, model.dim, model.layers, model.seq
        for i in generator.choice(len(every), min(40, len(every)), replace=False):
            dp, pp, cp, tp, micro, recompute, zero = every[i]
            here_, there_ = (predict(model, links, chip, batch, *every[i]) for links in
                             (Links(8, math.inf, math.inf), slow))
            layers, m, passes = math.ceil(L / pp), batch // dp // micro, 4 if recompute else 3
            flops = micro * T / cp / tp * (layers * passes * (24 * D * D + 4 * D * T) + 6 * V * D)
            params = (12 * D * D * layers + V * D * (2 if pp == 1 else 1)) / tp
            update = 32 * params / (dp * cp if zero else 1) / chip.memory
            want = (m + pp - 1) * flops / (chip.peak * chip.reach) + update
            require(abs(here_.seconds / want - 1) < 1e-9, f"{every[i]}: {here_.seconds} s without messages, not {want}")
            sent_ = here_.sent
            often = (1 + (pp - 1) / m) * (sent_["tensor"] + sent_["ring"] + sent_["pipeline"])
            more = (often + sent_["data"]) / 1e11
            require(abs(there_.seconds / (want + more) - 1) < 1e-9, f"{every[i]}: messages take another time")
            work = batch * T * (L * passes * (24 * D * D + 4 * D * T) + 6 * V * D)
            joules = chip.flop * work + chip.watts * gpus * here_.seconds
            require(abs(here_.joules / joules - 1) < 1e-9, f"{every[i]}: {here_.joules} J, not {joules}")
        for zero, recompute, tp in itertools.product(range(4), (False, True), (1, 2)):
            one = predict(model, HOSTS, chip, 8, 4, 1, 1, tp, 2, recompute, zero)
            P, head, layer, N = (model.params / tp, V * D / tp, 12 * D * D / tp, 2 * T)
            states = zero_bytes(P, 4, zero, 2, 2, 12) + 2 * (head + max(head, layer)) * (zero == 3) + (
                2 * (head + layer) * (zero > 1))
            kept = tensor_parallel_bytes(model, N, tp, True, 2, True)
            again = 2 * N * D / tp * L * (3 if tp > 1 else 1) + kept / L
            held = states + (again if recompute else kept) + 6 * N * D / tp
            require(abs(one.gib * 2**30 / held - 1) < 1e-9, f"ZeRO-{zero}: {one.gib} GiB, not {held / 2**30}")
            if zero == 0:
                orthogonal = predict(model._replace(muon=1), HOSTS, chip, 8, 4, 1, 1, tp, 2, recompute, zero)
                more = 2 * (8 + 3) * D * D - 4 * L * layer
                require(abs((orthogonal.gib - one.gib) * 2**30 / more - 1) < 1e-6, f"Muon: {orthogonal.gib} GiB")
                more = L * 5 * (4 * 12 + 2 * 4) * D**3 / (chip.peak * chip.product)
                require(abs((orthogonal.seconds - one.seconds) / more - 1) < 1e-6, "Muon takes another time")
        deep = [predict(model, HOSTS, chip, 64, 1, 2, 1, 1, micro, False, 0).gib for micro in (1, 2)]
        half = math.ceil(L / 2) * tensor_parallel_bytes(model._replace(layers=1), T, 1, True, 2, True)
        require(abs(deep[1] - deep[0] - (2 * half + 4 * T * D) / 2**30) < 1e-6, "two stages hold two micro-batches")
        try:
            found, more = plan(model, gpus, gib, batch=batch), plan(model, gpus, 2 * gib, batch=batch)
        except base.BadInput as error:
            require("would do" in str(error) or "is needed" in str(error), str(error))
            continue
        require(all(x.dp * x.pp * x.cp * x.tp == gpus and x.gib <= gib for x in found), "a plan does not fit")
        require([x.seconds for x in found] == sorted(x.seconds for x in found), "not sorted")
        require(len(more) >= len(found) and more[0].seconds <= found[0].seconds, "more memory makes it slower")
    small = gpt(4, 256, 2)
    must_raise("GPUs of 0.1 GiB would do", lambda: plan(small, 1, 0.1))
    must_raise("more memory a GPU is needed", lambda: plan(gpt(4, 25600, 0), 1, 1))
    must_raise("cannot be shared out", lambda: plan(small, 7, 80, batch=6))
    must_raise("embedding and classifier alone", lambda: plan(Model(1e6, 4, 256, 50000, 64), 1, 80))
    must_raise("must be positive", lambda: plan(small, 0, 80))
    wish = "params=1e9 layers=2 dim=256 vocab=100 gpus=8 gib=1 seq=8"
    for words, text in (("missing gib", wish.replace(" gib=1", "")), ("gibs is unknown", wish + " gibs=2"),
                        ("gpus is given twice", wish + " gpus=8"), ("not of the form", "params=1e9 layers"),
                        ("positive whole number", wish.replace("=8", "=8.5")), ("positive number", wish + " link=-1"),
                        ("positive number", wish + " reach=nan"), ("positive whole number", wish + " batch=inf"),
                        ("plans are made for", wish.replace("gpus=8", "gpus=1e8")),
                        ("cannot get", wish + " reach=0.9")):
        must_raise(words, lambda text=text: parse_plan(text))
    for flows, spines in itertools.product(range(1, 40), range(1, 17)):
        single, spray, split = (fabric_load(flows, spines, way) for way in ("single-path", "spray", "split"))
        require(abs(split[0] - flows / spines) < 1e-9 and split[1] == flows % spines, f"{flows}, {spines}: {split}")
        require(single == (math.ceil(flows / spines), 0) and abs(spray[0] - split[0]) < 1e-9, f"{flows}, {spines}")


def elastic_batches(model, steps=8, count=6):
    return [tiny_tokens(model, count, seed) for seed in range(steps)]


def train_elastic(faults, dp, pp, timeout):
    """One of dp x pp ranks, with faults [(rank, step, when)]: the rank is killed in the "forward" of its second sample
    of that step, when all is "done" but the vote, or in the "repair" of another's loss; or lives, but its "connection"
    breaks when all is done, or it is "slow" to vote. Returns losses; numbers of the ranks that are left; their mesh;
    bytes that all sent to restore states; the longest step's seconds; whether all that this rank does not own is NaN.
    """
    trainer, me, losses, times, samples, faults = (
        Elastic(tiny(4, layers=6), dp, pp, timeout=timeout), dist.get_rank(), [], [], Counter(), set(faults))
    gradient, restore = trainer.gradient, trainer.restore

    def strike(when):
        if (me, len(losses), when) in faults:
            faults.remove((me, len(losses), when))
            if when == "slow":
                return time.sleep(3 * timeout)
            if when == "connection":
                raise RuntimeError("the connection broke")
            os.kill(os.getpid(), signal.SIGKILL)

    def before_block(*inputs):
        samples[trainer.place] += 1
        if sum(step == len(losses) for step, _ in samples) == 2:
            strike("forward")

    def all_but_the_vote(*arguments):
        loss = gradient(*arguments)
        for when in ("done", "connection", "slow"):
            strike(when)
        return loss

    def repair(*arguments):
        strike("repair")
        restore(*arguments)

    trainer.gradient, trainer.restore = all_but_the_vote, repair
    for block in trainer.stage.blocks:
        block.register_forward_pre_hook(before_block)
    for step, batch in enumerate(elastic_batches(trainer.model)):
        start = time.perf_counter()
        losses.append(trainer.step(step, *batch))
        times.append(time.perf_counter() - start)
        if losses[-1] is None:
            return None
    moved = all_reduce(torch.tensor(trainer.moved), dist.group.WORLD).item()
    forgotten = all(p.isnan().all() for unit in set(range(8)) - set(trainer.mine) for p in trainer.units[unit])
    return losses, trainer.membership.members, (trainer.dp, trainer.pp), moved, max(times), forgotten


def undisturbed():
    """Losses of the same steps in one process, by a loop that knows nothing of ranks."""
    model = tiny(4, layers=6)
    optimizer, losses, place = torch.optim.AdamW(model.parameters(), lr=1e-3), [], SimpleNamespace(key=None)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda b, x, y, i=i: keyed_dropout(y[0], 0.1, 0, *place.key, i).unsqueeze(0))
    for step, (tokens, targets) in enumerate(elastic_batches(model)):
        total = 0.0
        for sample in range(len(tokens)):
            place.key = step, sample
            one = slice(sample, sample + 1)
            loss = base.linear_cross_entropy_reference(
                model(tokens[one]), model.classifier, targets[one], reduction="sum") / (targets != -100).sum()
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_keys():
    """Random numbers are the same whenever they are made, and others for any other key."""
    x, key = torch.ones(8, 16, dtype=torch.float64), (0, 1, 2, 3)
    require(torch.equal(keyed_dropout(x, 0.5, *key), keyed_dropout(x, 0.5, *key)), "a mask is not made again")
    others = [keyed_dropout(x, 0.5, *key[:i], 9, *key[i + 1 :]) for i in range(4)]
    require(not any(torch.equal(other, keyed_dropout(x, 0.5, *key)) for other in others), "a number is not in the key")


# Faults, dp, pp; what has to become of it, by hand: the mesh, and the units that are new to a rank. (Six layers are
# units 1 to 6. The first case: ranks 0, 1, 3 become stages of units 0 to 2, 3 and 4, 5 to 7, and rank 1 had 0 to 3.)
ONE_KILLED = [(2, 3, "forward")], 2, 2, (1, 3), [4]
ONE_DISCONNECTED = [(1, 2, "connection")], 2, 2, (2, 2), []


def check_elastic(cases=(ONE_KILLED, ONE_DISCONNECTED)):
    """Processes that are killed (SIGKILL) in the middle of a step, or lose their connection: the losses of all steps
    are those of one undisturbed process to 1e-12, what was sent is what had to be, nobody waited for a timeout."""
    results, want = [], in_ranks("undisturbed", 1, device="cpu")
    sizes = [sum(3 * p.nbytes + 4 for p in unit) for unit in Elastic.units_of(tiny(4, layers=6).cpu())]
    for faults, dp, pp, shape, units in cases:
        killed = [rank for rank, _, when in faults if when != "connection"]
        timeout = TIMEOUT if killed else 8  # nobody should wait for it; without a vote, ranks do
        try:
            found = in_ranks("train_elastic", dp * pp, faults, dp, pp, timeout, device="cpu", spare=len(killed))
        except OSError as error:
            raise AssertionError(f"{faults}: {error}") from None
        losses, members, mesh_, moved, seconds, forgotten = found
        left = tuple(rank for rank in range(dp * pp) if rank not in killed)
        require(members == left and mesh_ == shape, f"{faults}: ranks {members} go on as {mesh_}")
        errors = [abs(a / b - 1) for a, b in zip(losses, want, strict=True)]
        worst = max(errors)
        require(worst <= 1e-12, f"{faults}: the loss of step {errors.index(worst)} is off by {worst:.1e}")
        expected = sum(sizes[unit] for unit in units)
        require(moved == expected, f"{faults}: {moved} bytes were restored, {expected} were missing")
        require(seconds < TIMEOUT / 2, f"{faults}: a step took {seconds:.1f} s")
        require(forgotten, f"{faults}: a rank kept what it does not own")
        results.append((worst, moved, expected, seconds))
    return results


SLOW = [(), [("sender", 1)], [("receiver", 2)], [("link", 3, 0)], [("sender", 3), ("receiver", 3)]]


def name_slow(seconds=0.15):
    """What find_slow names for each entry of SLOW, while processes sleep there."""
    return [find_slow(message_delays({fault: seconds for fault in faults}), least=seconds / 3) for faults in SLOW]


def check_slow(seeds=30):
    """Injected slow senders, receivers and links are named, and nothing else: in random matrices, by 4 processes."""
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        n = int(generator.integers(4, 12))
        delays = torch.from_numpy(generator.uniform(1.0, 1.5, (n, n)))
        i, j, a, b = generator.choice(n, 4, replace=False).tolist()
        faults = [("sender", i), ("receiver", j), ("link", a, b)][seed % 4 : seed % 4 + 2]
        faults = [("sender", i), ("receiver", i)] if seed % 5 == 0 else faults
        for kind, *at in faults:
            where = {"sender": (at[0], slice(None)), "receiver": (slice(None), at[0]), "link": tuple(at)}
            delays[where[kind]] *= 5
        require(sorted(find_slow(delays)) == sorted(faults), f"seed {seed}: {find_slow(delays)}, not {faults}")
    one = torch.tensor([[0.0, 5, 5], [5, 0, 1], [5, 1, 0]])
    require(find_slow(one) == [("sender", 0), ("receiver", 0)], f"of three: {find_slow(one)}")
    must_raise("3 are needed", lambda: find_slow(torch.ones(2, 2)))
    for found, faults in zip(in_ranks("name_slow", 4, device="cpu"), SLOW, strict=True):
        require(sorted(found) == sorted(faults), f"{found} is named, {list(faults)} was slow")


# The bugs of --break, each easy to ship.


def _no_f(x, group, sequence=False):
    """Forward is right; backward lacks the other ranks' part of the input's gradient."""
    return _Conjugate.apply(x, group, gather, scatter) if sequence else x


def _each_its_own(p, group, ranks=ranks_of):
    """Each rank orthogonalises its part of the matrix."""
    return ranks(p, group)._replace(join=lambda part: part.clone(), own_part=lambda update: update)


def _own_means(p, group, ranks=ranks_of):
    """Adam-mini's means are over each rank's own columns."""
    return ranks(p, group)._replace(columns=p.shape[1])


def _no_mask(embedding, group, sequence, **where):
    """Every rank looks up something for every token."""
    start, stop = cut(embedding, "weight", 0, group, **where)
    last, lookup = stop - start - 1, type(embedding).forward
    embedding.forward = lambda tokens: leave(lookup(embedding, (tokens - start).clamp(0, last)), group, sequence)


def _first_bucket_only(i, flat, group, start=start_all_reduce):
    return start(i, flat, group) if i == 0 else None


class _NeverGathered(Zero):
    def collect(self, i):
        """Every rank goes on with what it had."""


def _no_origin(module, name, dim, group, origins, path, cut=cut):
    span = cut(module, name, dim, group, origins, path)
    origins[path] = (0, 0)
    return span


class _LastOnly(WeightQueue):
    def put(self, work):
        """A queue as long as one layer."""
        if self.waiting:
            self.waiting.clear()
        super().put(work)


def _axes_swapped(dp=1, pp=1, cp=1, tp=1, timeout=TIMEOUT, make=make_groups):
    groups = make(dp, pp, cp, tp, timeout)
    return groups._replace(dp=groups.tp, tp=groups.dp)


def _unweighted(a, b):
    return (a[0] + b[0]) / 2, torch.logaddexp(a[1], b[1])


def _no_correction(dout, q, k, v, out, lse, causal, gradients=block_gradients):
    return gradients(dout, q, k, v, torch.zeros_like(out), lse, causal)


def _upper_left(q, k):
    """The mask's corner is at the first key, not at the last."""
    return [(slice(0, q.shape[2]), True)] + [(slice(q.shape[2], None), False)] * (q.shape[2] < k.shape[2])


class _NoVote(Membership):
    def agreed(self, good):
        """Who has all sums takes the step."""
        return good


class _NoMoments(Elastic):
    def state(self, unit):
        """A checkpoint of the weights alone."""
        return [p.data for p in self.units[unit]]


# name: (the check that must catch it, what is replaced, the bug)
BREAKS = {
    "axes-swapped": (check_groups, "make_groups", _axes_swapped),
    "mean-of-means": (check_data_parallel, "global_count", lambda kept, group: kept.sum().clamp(min=1) * size(group)),
    "first-bucket-only": (check_data_parallel, "start_all_reduce", _first_bucket_only),
    "never-gathered": (check_zero, "Zero", _NeverGathered),
    "no-f": (check_tensor_parallel, "enter", _no_f),
    "no-norm-sum": (check_tensor_parallel, "sum_norm_gradient", lambda gradient, group: gradient),
    "own-lse": (check_vocabulary, "join_slices", lambda lse, target, group: (lse, all_reduce(target, group))),
    "no-origin": (check_forge, "cut", _no_origin),
    "own-factors": (check_forge, "gather_factors", lambda handle, group: None),
    "each-its-own": (check_wide_rules, "ranks_of", _each_its_own),
    "own-means": (check_wide_rules, "ranks_of", _own_means),
    "no-mask": (check_forged_model, "cut_embedding", _no_mask),
    "forwards-first": (check_schedules, "SCHEDULES", SCHEDULES | {"1f1b": gpipe}),
    "lost-weights": (check_pipeline, "WeightQueue", _LastOnly),
    "unweighted-merge": (check_context, "merge", _unweighted),
    "no-correction": (check_context, "block_gradients", _no_correction),
    "unnormed-input": (check_lean, "after", lambda linear, made, make, *inputs, after=after: after(
        linear, made, lambda first, *others: first, *inputs)),
    "relu-back": (check_lean, "gelu_back", lambda h, gradient: (F.gelu(h), gradient * (h > 0))),
    "turned-on": (check_lean, "turn", lambda qkv, parts, turned, scales, cos, sin, back, turn=turn: turn(
        qkv, parts, turned, scales, cos, -sin if back else sin, back)),
    "address-reused": (check_memory_instead, "on_death", lambda *arguments: None),
    "whole-documents": (check_uneven, "first_row", lambda stop, room: 0),
    "upper-left": (check_elsewhere, "blocks_of", _upper_left),
    "half-and-half": (check_flow, "allocate", lambda samples, n: max(1, n // 2)),
    "double-booked": (check_skip, "earliest", lambda busy, ready, seconds: ready),
    "unsharded": (check_planner, "zero_bytes", lambda P, n, stage, w, g, o: P * (w + g + o)),
    "transposed": (check_slow, "find_slow", lambda delays, find=find_slow: find(delays.T)),
    "unkeyed": (check_elastic, "keyed_dropout", lambda x, chance, *key: F.dropout(x, chance)),
    "no-moments": (check_elastic, "Elastic", _NoMoments),
    "no-vote": (check_elastic, "Membership", _NoVote),
}


# ==== 15. Measurements ================================================================================================


def built(*config, dtype=torch.float32):
    """A GPT of this configuration, made on this rank's device, the same on all ranks."""
    torch.manual_seed(0)
    with here():
        return base.GPT(base.GPTConfig(*config)).to(dtype)


class Row(NamedTuple):
    """A row of the ledger, made on the ranks."""

    claim: str
    formula: str
    predicted: float | None
    measured: float | None
    unit: str = "MiB"
    band: tuple | None = (0.98, 1.02)


def measure_zero():
    """Bytes that a rank holds between backward and step: fp32, and on a GPU bf16 with fp32 masters and moments."""
    n, rows = dist.get_world_size(), []
    kinds = [("fp32", torch.float32, (4, 4, 8))] + [("bf16", torch.bfloat16, (2, 2, 12))] * (here().type == "cuda")
    for label, dtype, (w, g, o) in kinds:
        formulas = f"P ({w} + {g} + {o}/n)", f"P ({w} + {g + o}/n)", f"P {w + g + o}/n"
        for stage, formula in enumerate(formulas, 1):
            model = tiny(n, dtype, layers=4)
            zero = Zero(model, mesh(dp=n).data, stage)
            for _ in range(2):  # the first step makes the optimizer's state
                part_of_loss(model, *tiny_tokens(model), None).backward()
                zero.finish()
                held = zero.resident()
                zero.step()
            predicted = zero_bytes(sum(p.numel() for p in model.parameters()), n, stage, w, g, o)
            rows.append(Row(f"ZeRO-{stage}, {label}: held", formula, predicted / MIB, held / MIB))
    return rows


def kept_bytes(work):
    """Bytes that work() leaves alive, and its result."""
    if here().type == "cuda":
        before = torch.cuda.memory_allocated()
        result = work()
        return torch.cuda.memory_allocated() - before, result
    with base.LiveBytes() as follow:
        result = work()
    return follow.live, result


def run_blocks(model, x):
    for block in model.blocks:
        x = block(x, model.cos, model.sin)
    return x


def measure_activations():
    """What the layers keep for backward, and what they send, cut over the ranks."""
    n, rows = dist.get_world_size(), []
    group = mesh(tp=n).tp
    config = 64, 64 * n, 4, 2 * n, 32 * n
    _, T, L, _, D = config
    fused = here().type == "cuda"  # one kernel a norm, which does not keep its normalised input
    for name, sequence in (("TP", False), ("TP + SP", True)):
        model = built(*config)
        tensor_parallel(model, group, sequence)
        x = torch.zeros(2, T // (n if sequence else 1), D, device=here()).requires_grad_()
        sent.clear()
        held, out = kept_bytes(functools.partial(run_blocks, model, x))
        out.sum().backward()
        N, outside = 2 * T, 4 if fused else 6
        predicted = tensor_parallel_bytes(model.config, N, n, sequence, 4, fused)
        formula = f"4 L N D ({outside}{'/n' if sequence else ''} + 14/n)"
        rows.append(Row(f"{name}: layers keep", formula, predicted / MIB, held / MIB, band=(0.95, 1.08)))
        ends, norms = 4 * N * D * 4, 2 * 2 * L * D * 4 * sequence  # less embedding and classifier, which did not run
        predicted = tensor_parallel_traffic(model.config, N, n, sequence, 4) + (norms - ends) * (n - 1) // n
        formula = f"{10 if sequence else 8} (n-1)/n 4 L N D" + (" + norms" if sequence else "")
        rows.append(Row(f"{name}: layers send", formula, predicted / MIB, sum(sent.values()) / MIB))
    return rows


class _Sleep(torch.autograd.Function):
    """A layer that computes by waiting: seconds of forward, of the input's gradient and of the weights'."""

    @staticmethod
    def forward(ctx, x, seconds, queue):
        ctx.seconds, ctx.queue = seconds, queue
        time.sleep(seconds["F"])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds["B"])
        ctx.queue.put(lambda: time.sleep(ctx.seconds["W"]))
        return gradient, None, None


def costs_of(name, F=1.0, B=1.0, W=1.0):
    """What simulate takes, of times of a forward, an input gradient and a weight gradient of a rank's layers."""
    thin = 2 if name == "interleaved" else 1
    return dict(F=F / thin, B=B, W=W) if name == "zero-bubble" else dict(F=F / thin, B=(B + W) / thin, W=0.0)


def measure_bubbles():
    """Idle time / work of every schedule: formula and simulation; and of real processes. On a CPU, where ranks share
    cores, their layers sleep; on GPUs they compute, and the simulation has their measured times."""
    p, rows, queue, gpu = dist.get_world_size(), [], WeightQueue(), here().type == "cuda"
    groups, m = mesh(pp=p), 2 * p if gpu else p * max(1, 8 // p)
    rank, unit, times = rank_in(groups.pp), 0.015, {}
    if gpu:
        model = built(256, 1024, 4 * p, 32, 4096, dtype=torch.bfloat16)
        like = torch.empty(4, 1024, 4096, device=here(), dtype=torch.bfloat16)
        tokens = [torch.zeros(4, 1024, dtype=torch.int64, device=here())] * m
        times = stage_times(Stage(model, rank, p, queue), queue, tokens[0] if rank == 0 else torch.randn_like(like))
    for name, schedule in SCHEDULES.items():
        chunks = 2 if name == "interleaved" else 1
        lists = schedule(p, m)
        simulated = simulate(lists, costs_of(name)).bubble
        rows.append(Row(f"{name}: bubble", FORMULAS[name], bubble_formula(name, p, m), simulated, "", (0.999, 1.001)))
        rows.append(Row(f"{name}: in flight", "at the first rank", peak_formula(name, p, m, 0),
                        simulate(lists, costs_of(name)).peak[0], "", (1, 1)))
        if gpu:
            stages = [Stage(model, c * p + rank, chunks * p, queue) for c in range(chunks)]
            loss, work = (lambda y, i: y.float().square().mean()), sum(times.values()) * m / 1e3
        else:
            seconds = {key: unit / chunks for key in "FBW"}
            stages = [lambda x, seconds=seconds: _Sleep.apply(x, seconds, queue)] * chunks
            like, loss, work = torch.zeros(1, 8), (lambda y, i: y.sum()), 3 * unit * m
        spans = []
        for _ in range(6 if gpu else 3):
            inputs = tokens if gpu else [torch.zeros(1, 8, requires_grad=True) for _ in range(m)]
            everybody()
            start = time.perf_counter()
            run_pipeline(lists[rank], stages, queue, inputs, loss, groups, like)
            everybody()
            spans.append(time.perf_counter() - start)
        predicted = simulate(lists, costs_of(name, **times)).bubble
        what = "simulated, with times" if gpu else "the same, ranks sleep"
        if times and name == "gpipe":
            notes.append("a stage's " + ", ".join(f"{key} {value:.2f} ms" for key, value in times.items()))
        bubble = statistics.median(spans[1:]) / work - 1
        rows.append(Row(f"{name}: by {p} processes", what, predicted, bubble, "", None))
    return rows


def stage_times(stage, queue, x):
    """Milliseconds of forward, input gradient and weight gradients of a stage on this GPU: {"F", "B", "W"}."""
    found = []
    for _ in range(6):
        marks = [time_mark()]
        y = stage(x.requires_grad_() if x.is_floating_point() else x)
        marks.append(time_mark())
        queue.waiting = []
        y.backward(y.detach())
        marks.append(time_mark())
        waiting, queue.waiting = queue.waiting, None
        for work in waiting:
            work()
        marks.append(time_mark())
        torch.cuda.synchronize()
        found.append([a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)])
    stage.zero_grad()
    return dict(zip("FBW", torch.tensor(found[1:]).median(0).values.tolist(), strict=True))


def time_mark():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def everybody():
    """A barrier, at which this rank's GPU, too, has finished."""
    if here().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if here().type == "cuda":
        torch.cuda.synchronize()


def measure_memory_instead():
    """Peak and time of forward and backward with everything kept, recomputed, offloaded."""
    rows, gpu = [], here().type == "cuda"
    shape = (256, 2048, 12, 16, 2048) if gpu else (64, 128, 6, 4, 128)
    config = base.GPTConfig(*shape)
    tokens = torch.randint(64, (4, config.seq), generator=torch.Generator().manual_seed(0)).to(here())
    kept = base.activation_bytes(config, tokens.numel(), gpu, fused_norm=gpu)
    stream = 4 * config.layers * tokens.numel() * config.dim
    weights = 4 * 12 * config.layers * config.dim**2  # gradients grow as the kept streams shrink
    middle = 4 * (2 if gpu else 4) * tokens.numel() * config.dim  # the first gradient inside a layer
    again = max(stream, weights) + kept / config.layers + middle
    formulas = dict(kept=("01's activation_bytes", kept, (0.95, 1.05)), offloaded=("what is in flight", None, None),
                    recomputed=("max(4 L N D, dW) + a layer", again, (0.9, 1.1)))
    with tempfile.TemporaryDirectory() as folder:
        for way, (formula, predicted, band) in formulas.items():
            model, counts = built(*shape), Counter()
            if way == "recomputed":
                recompute(model)

            def step(model=model, way=way, counts=counts):
                offload = Offload(model, None if gpu else folder) if way == "offloaded" else None
                with offload or contextlib.nullcontext(), torch.autocast(here().type, torch.bfloat16, enabled=gpu):
                    loss = model(tokens).square().mean()
                loss.backward()
                if offload:
                    offload.close()
                    counts.update(offload.counts)
                model.zero_grad()

            step()
            counts.clear()
            peak = base.peak_bytes(step, here())
            if counts:
                notes.append(
                    f"offloaded: {counts['bytes'] / MIB:.0f} MiB in {counts['storages']} storages, saved "
                    f"{counts['tensors']} times; {counts['forwarded']} forwarded, {counts['late']} not yet there")
            timing = base.bench(step, here(), warmup=0, runs=3 if gpu else 2)
            rows.append(Row(f"{way}: peak of a step", formula, predicted and predicted / MIB, peak / MIB, band=band))
            rows.append(Row(f"{way}: time of a step", "-", None, timing.median, "ms", None))
    return rows


def measure_overlap():
    """GPUs: backward of 0.6 billion parameters, whose gradients in fp32 are summed never, after it, during it; and
    torch's DistributedDataParallel."""
    group = mesh(dp=dist.get_world_size()).data

    def build():
        model = built(256, 1024, 12, 16, 2048)
        model.classifier.requires_grad_(False)
        return model

    def backward_time(model, finish=lambda: None):
        tokens, times = torch.zeros(8, 1024, dtype=torch.int64, device=here()), []
        for _ in range(8):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens).float().square().mean()
            everybody()
            start = time_mark()
            loss.backward()
            finish()
            stop = time_mark()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return sorted(times[1:])[3]

    model = build()
    handle = data_parallel(model, group)
    during = backward_time(model, handle.finish)
    handle.enabled = False
    never, after = backward_time(model), backward_time(model, handle.finish)
    ddp = backward_time(nn.parallel.DistributedDataParallel(build(), process_group=group, gradient_as_bucket_view=True))
    counts = [sum(p.numel() for p in bucket) for bucket in handle.buckets]
    last = counts[-1] / sum(counts)
    hidden = (after - during) / (after - never)
    return [
        Row("backward alone", "t", None, never, "ms", None),
        Row("backward, then the sum", "t + s", None, after, "ms", None),
        Row("the sum during backward", "t + s last bucket/all", never + (after - never) * last, during, "ms", None),
        Row("  hidden share of the sum", "1 - last bucket/all", 1 - last, hidden, "", None),
        Row("  torch's DDP", "t + s last bucket/all", None, ddp, "ms", None),
    ]


def subgroups():
    """(k, groups with tp = k) for 1, 2, 4, ... ranks: the world as several groups of k, all at work."""
    n, k = dist.get_world_size(), 1
    while n % k == 0:
        yield k, mesh(dp=n // k, tp=k)
        k *= 2


def measure_tensor():
    """GPUs: one layer forward and backward, D = 4096, 8192 tokens, bf16, over 1, 2, 4 GPUs."""
    rows, alone = [], None
    for k, groups in subgroups():
        for sequence in (False, True)[: 1 + (k > 1)]:
            model = built(256, 1024, 1, 32, 4096, dtype=torch.bfloat16)
            tensor_parallel(model, groups.tp, sequence)
            x = torch.randn(8, 1024 // (k if sequence else 1), 4096, device=here(), dtype=torch.bfloat16)
            x.requires_grad_()

            def step(model=model, x=x):
                y = run_blocks(model, x)
                y.backward(y.detach())

            everybody()
            time_ = base.bench(step, here(), warmup=5, runs=15).median
            if k == 1:
                alone = time_
                rows.append(Row("a layer on 1 GPU", "-", None, alone, "ms", None))
                continue
            message = torch.zeros(8, 1024, 4096, device=here(), dtype=torch.bfloat16)
            everybody()
            one_sum = base.bench(lambda m=message, g=groups: dist.all_reduce(m, group=g.tp), here(), 5, 15).median
            name = f"a layer, TP = {k}" + (" + SP" if sequence else "")
            formula = "t/n + 5 all-reduces" if sequence else "t/n + 4 all-reduces"
            rows.append(Row(name, formula, alone / k + (5 if sequence else 4) * one_sum, time_, "ms", None))
            rows.append(Row(f"{name}: speed-up", "-", None, alone / time_, "", None))
    return rows


def measure_vocabulary(N=8192, V=256000, D=2304):
    """GPUs: cut cross-entropy, loss and exact gradients, over 1, 2, 4 GPUs: time, and bytes beyond inputs."""
    rows, alone, alone_bytes = [], None, None
    for k, groups in subgroups():
        start, stop = shares(V, k)[rank_in(groups.tp)]
        torch.manual_seed(0)
        E, x = torch.randn(N, D, device=here(), dtype=torch.bfloat16), torch.randint(V, (N,), device=here())
        C = torch.randn(stop - start, D, device=here(), dtype=torch.bfloat16) / math.sqrt(D)
        E, C = E.requires_grad_(), C.requires_grad_()

        def step(E=E, C=C, x=x, groups=groups):
            E.grad = C.grad = None
            vocab_parallel_cross_entropy(E, C, x, groups.tp, V).backward()

        everybody()
        time_ = base.bench(step, here(), warmup=3, runs=9).median
        E.grad = C.grad = None
        peak = base.peak_bytes(step, here()) / MIB
        if k == 1:
            alone, alone_bytes = time_, peak
        rows.append(Row(f"loss and gradients, {k} GPU(s)", "t/n", alone / k, time_, "ms", None))
        rows.append(Row(f"their peak, {k} GPU(s)", "peak/n", alone_bytes / k, peak, "MiB", None))
    return rows


def measure_ring(B=1, H=16, T=65536, d=128):
    """GPUs: causal attention of one sequence forward and backward, over all ranks."""
    n, rows, alone = dist.get_world_size(), [], None
    group = mesh(cp=n).cp
    for name, ways in (("on 1 GPU", None), ("contiguous", False), ("zigzag", True)):
        torch.manual_seed(0)
        shape = (B, H, T if ways is None else T // n, d)
        q, k, v = (torch.randn(shape, device=here(), dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

        def step(q=q, k=k, v=v, ways=ways):
            out = base.causal_attention(q, k, v) if ways is None else ring_attention(q, k, v, group, ways)
            out.backward(q.detach())

        everybody()
        time_ = base.bench(step, here(), warmup=2, runs=7).median
        alone = time_ if ways is None else alone
        share = 1.0 if ways is None else max(attention_work(T, n, ways)) / (T * (T + 1) // 2)
        rows.append(Row(f"attention, {T:,} keys, {name}", "t x most pairs of a rank", alone * share, time_, "ms", None))
    return rows


def perform(tasks):
    """What play() simulates, done: this rank sleeps through its tasks, each of which is on one rank, and tells ranks
    whose tasks need them (gloo). Seconds until all are done."""
    me, home = dist.get_rank(), {task.name: task.on[0] for task in tasks}
    tag, heard, telling = {task.name: i for i, task in enumerate(tasks)}, set(), []
    told = {name: {home[task.name] for task in tasks if name in task.needs} - {home[name]} for name in home}
    everybody()
    start = time.perf_counter()
    for task in tasks:
        if home[task.name] == me:
            for name in task.needs:
                if home[name] != me and name not in heard:
                    dist.recv(torch.zeros(1), home[name], tag=tag[name])
                    heard.add(name)
            time.sleep(task.seconds)
            telling += [dist.isend(torch.zeros(1), rank, tag=tag[task.name]) for rank in told[task.name]]
    for work in telling:
        work.wait()
    everybody()
    return time.perf_counter() - start


def measure_sleepers():
    """Simulated schedules beside four real processes that compute by sleeping."""
    n, samples, cost = dist.get_world_size(), random_samples(32, 0), dict(F=0.02, B=0.04)
    skips, full = (skip_pipe(n, 2 * n, k, cost, n)[1] for k in (n - 1, n))
    schedules = {f"all of {n} stages": full, f"SkipPipe, {n - 1} of {n} stages": skips,
                 "encoder + backbone, in lock step": lock_step(samples, n), "  shared out by cost": by_cost(samples, n),
                 "  two pools (FlowTrain)": producer_consumer(samples, n)}
    return [Row(name, f"simulated; {n} processes", 1e3 * span(tasks), 1e3 * perform(tasks), "ms", None)
            for name, tasks in schedules.items()]


def planned_step(config, batch, micro, groups, dtype, again=False, zero=0):
    """A function that does a training step of a GPT over these groups, AdamW included, on random tokens. ValueError for
    a pipeline of stages that are cut themselves: Stage has linear layers of its own."""
    model, queue, p = built(*config, dtype=dtype), WeightQueue(), size(groups.pp)
    V, T = model.config.vocab, model.config.seq
    if p > 1 and (groups.tp or groups.cp):
        raise base.BadInput("pp with tp or cp: the planner counts it, this file does not run it: use pp with dp alone")
    tensor_parallel(model, groups.tp, sequence=True)
    if groups.cp is not None:
        context_parallel(model, groups.cp)
    if again:
        recompute(model)
    stage = Stage(model, rank_in(groups.pp), p, queue) if p > 1 else model
    if zero:
        handle = optimizer = Zero(model, groups.data, zero, lr=1e-4)
    else:
        handle = data_parallel(stage, groups.data)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=here().type == "cuda")
    mine = batch // size(groups.dp)
    tokens = torch.randint(V, (mine, T), generator=torch.Generator().manual_seed(0)).to(here())
    parts = [split_sequence(part, groups.cp) if groups.cp else part for part in tokens.split(micro)]
    loss = lambda y, i: vocab_parallel_cross_entropy(  # noqa: E731
        y, model.classifier, parts[i], groups.tp, V, sequence=groups.tp is not None, reduction="sum") / (batch * T)
    like = torch.empty(micro, T, model.config.dim, device=here(), dtype=dtype)

    def step():
        handle.enabled = False
        if p > 1:
            run_pipeline(one_f_one_b(p, len(parts))[rank_in(groups.pp)], [stage], queue, parts, loss, groups, like)
        for i, part in enumerate(parts if p == 1 else ()):
            handle.enabled = i == len(parts) - 1
            loss(model(part), i).backward()
        handle.finish()
        optimizer.step()
        model.zero_grad()

    return step


PLANNED = 16384, 4096, 8, 16, 2048  # vocabulary, T, layers, heads, D of what GPUs train here: half a billion weights


def planned_model(V, T, L, heads, D):
    """What the planner is told of 01's GPT."""
    return Model(12 * L * D**2 + 2 * V * D, L, D, V, T, heads)


def measure_plans():
    """Training steps by several plans, and what predict() says of them: the most bytes that a rank sends, and on GPUs
    GiB and seconds, with `reach` from one GPU alone and the speed of links from an all-reduce."""
    n, gpu, rows = dist.get_world_size(), here().type == "cuda", []
    config = PLANNED if gpu else (128, 32 * n, 2 * n, 2 * n, 16 * n)
    dtype, state = (torch.bfloat16, (2, 2, 4)) if gpu else (torch.float32, (4, 4, 8))
    batch, chip, links, model = 2 * n, H200, HOSTS, planned_model(*config)
    options = dict(state=state, itemsize=dtype.itemsize)
    if gpu:
        step = planned_step(config, batch // n, batch // n, Groups(None, None, None, None, None, {}), dtype)
        alone = base.bench(step, here(), warmup=3, runs=9).median / 1e3
        guess = predict(model, links, chip, batch // n, 1, 1, 1, 1, batch // n, False, 0, **options)
        update = 2 * model.params * sum(state) / chip.memory
        chip = chip._replace(reach=chip.reach * (guess.seconds - update) / (alone - update))
        message, world = torch.zeros(2**27, device=here(), dtype=torch.bfloat16), mesh(dp=n).data
        everybody()
        ms = base.bench(lambda: dist.all_reduce(message, group=world), here(), 3, 9).median
        links = links._replace(inside=2 * (n - 1) / n * message.nbytes / ms * 1e3)
        del step, message
        notes.append(f"plans: one GPU reaches {chip.reach:.0%} of {chip.peak / 1e12:g} TFLOP/s; an all-reduce of "
                     f"256 MiB runs at {links.inside / 1e9:.0f} GB/s")
    ways = [(dict(dp=n), False, 0), (dict(tp=n), False, 0), (dict(pp=n), False, 0), (dict(cp=n), False, 0)]
    ways += [(dict(dp=2, tp=2), False, 0), (dict(dp=2, pp=2), False, 0)] * (n == 4)
    ways += [(dict(dp=n), False, 2), (dict(dp=n), True, 3), (dict(tp=n), True, 0), (dict(cp=n), True, 0)]
    for shape, again, zero in ways:
        name = " x ".join(f"{axis} {k}" for axis, k in shape.items())
        name += f", ZeRO-{zero}" * (zero > 0) + ", recomputed" * again
        sizes = {axis: shape.get(axis, 1) for axis in ("dp", "pp", "cp", "tp")}
        micro = 1 if "pp" in shape else batch // sizes["dp"]
        one = predict(model, links, chip, batch, **sizes, micro=micro, recompute=again, zero=zero, **options)
        held = torch.cuda.memory_allocated() if gpu else 0
        step = planned_step(config, batch, micro, mesh(**sizes), dtype, again, zero)
        step()
        sent.clear()
        step()
        most = all_reduce(torch.tensor(sum(sent.values()), device=here()), dist.group.WORLD, dist.ReduceOp.MAX).item()
        planned = sum(one.sent.values())
        rows.append(Row(f"plan {name}: sends", "predict()", planned / MIB, most / MIB))
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            everybody()
            times = base.bench(step, here(), warmup=2, runs=9)
            peak = (torch.cuda.max_memory_allocated() - held) / 2**30
            rows.append(Row("  a step", "predict()", 1e3 * one.seconds, times.median, "ms", None))
            rows.append(Row("  at the peak", "predict()", one.gib, peak, "GiB", None))
        del step
        if gpu:
            torch.cuda.empty_cache()
    return rows


@contextlib.contextmanager
def watts_of(device, samples):
    """Fills `samples` with (seconds, watts) of a GPU, 20 a second, as nvidia-smi reads them; with none if it cannot."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", gpu, "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits", "-lms", "50"]
    meter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read():
        for line in meter.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]"
                samples.append((time.perf_counter(), float(line)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        time.sleep(1)
        yield
    finally:
        meter.terminate()
        reader.join()


def measure_energy(seconds=3.0):
    """GPUs: power of waiting, of matrix products and of copies gives predict()'s coefficients; with them, and the time
    of a step, the energy of training on all GPUs, data parallel, predicted and measured: nvidia-smi's readings,
    integrated."""
    n, samples = dist.get_world_size(), []
    A = torch.randn(8192, 8192, device=here(), dtype=torch.bfloat16)
    train, long = planned_step(PLANNED, 2 * n, 2, mesh(dp=n), torch.bfloat16), torch.zeros(2**29, device=here())
    largest = lambda x: all_reduce(  # noqa: E731  what all ranks agree on
        torch.tensor(x, device=here()), dist.group.WORLD, dist.ReduceOp.MAX).item()

    def repeat(work):
        """Watts, and times a second, of doing work() for `seconds`, after a third of that: clocks, and the meter, take
        a while. Every rank does it equally often."""
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times = math.ceil(seconds / largest(time.perf_counter() - start))
        for count in (times // 3, times):
            start = time.perf_counter()
            for _ in range(count):
                work()
            torch.cuda.synchronize()
        stop = time.perf_counter()
        readings = [(t, watts) for t, watts in samples if start <= t <= stop]
        joules = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(readings))
        return joules / (readings[-1][0] - readings[0][0]), times / (stop - start)

    with watts_of(here(), samples):
        if largest(float(not samples)):
            notes.append("energy: nvidia-smi does not answer questions about power here")
            return []
        idle, _ = repeat(lambda: time.sleep(0.2))
        busy, products = repeat(lambda: A @ A)
        copying, additions = repeat(lambda: long.add_(1))
        training, steps = repeat(train)
    byte = (copying - idle) / (2 * long.nbytes * additions)
    flop = (busy - idle - byte * 3 * A.nbytes * products) / (2 * 8192**3 * products)
    model = planned_model(*PLANNED)
    chip = H200._replace(product=2 * 8192**3 * products / H200.peak, memory=2 * long.nbytes * additions, flop=flop,
                         byte=byte, watts=idle)
    for _ in range(3):  # `reach` that makes the time that of this run
        one = predict(model, HOSTS, chip, 2 * n, n, 1, 1, 1, 2, False, 0, state=(2, 2, 4))
        chip = chip._replace(reach=chip.reach * one.seconds * steps)
    measured = all_reduce(torch.tensor(training / steps, device=here()), dist.group.WORLD).item()
    notes.append(f"energy, a GPU: {idle:.0f} W waiting, {busy:.0f} W in matrix products "
                 f"({chip.product:.0%} of the peak), {copying:.0f} W in copies ({chip.memory / 1e12:.1f} TB/s), "
                 f"{training:.0f} W in training: {flop * 1e12:.2f} pJ a FLOP, {byte * 1e12:.1f} pJ a byte")
    return [Row(f"energy of a training step, {n} GPUs", "a FLOPs + b bytes + W t", one.joules, measured, "J", None)]


def measure_uneven(total=32768, H=32, d=128):
    """GPUs: attention of one long document on the first rank and short ones on the others, forward and backward, where
    it is and disaggregated: simulated, with the first's speed, and done."""
    n, rows, group = dist.get_world_size(), [], mesh(dp=dist.get_world_size()).data
    lengths = [total] + [total // 4] * 4 * (n - 1)
    homes = [0] + [1 + i // 4 for i in range(4 * (n - 1))]
    parts = [Queries(i, 0, s, home) for i, (s, home) in enumerate(zip(lengths, homes, strict=True))]
    rates = rates_of(H * d, shared=1, inside=HOSTS.inside)._replace(token=0.0)
    torch.manual_seed(dist.get_rank())
    mine = {part.document: [torch.randn(part.stop, H, d, device=here(), dtype=torch.bfloat16, requires_grad=True)
                            for _ in "qkv"] for part in parts if part.home == dist.get_rank()}
    for name, moves in (("where it is", []), ("disaggregated", disaggregate(parts, n, rates, tile=128))):

        def step(moves=moves):
            outputs = attention_elsewhere(mine, moves, group)
            torch.autograd.backward(list(outputs.values()), [out.detach() for out in outputs.values()])

        everybody()
        time_ = base.bench(step, here(), warmup=2, runs=7).median
        slowest = all_reduce(torch.tensor(time_, device=here()), dist.group.WORLD, dist.ReduceOp.MAX).item()
        split = with_moves(parts, n, moves, rates)
        rates = rates if moves else rates._replace(pair=slowest / 1e3 / max(split.pairs()))
        predicted = 1e3 * span(layer_tasks(split, rates))
        rows.append(Row(f"uneven attention, {name}", "simulated", predicted if moves else None, slowest, "ms", None))
    return rows


notes = []  # lines that are printed after the rows
CHECKS = [check_groups, check_data_parallel, check_zero, check_tensor_parallel, check_vocabulary, check_forge]
CHECKS += [check_wide_rules, check_forged_model, check_schedules, check_pipeline, check_context, check_memory_instead]
CHECKS += [check_elsewhere]
BY_ONE = [check_lean, check_simulator, check_uneven, check_flow, check_skip, check_planner, check_slow, check_keys,
          check_elastic]
MEASUREMENTS = [measure_zero, measure_activations, measure_bubbles, measure_memory_instead, measure_plans]
ON_GPUS = [measure_overlap, measure_tensor, measure_vocabulary, measure_ring, measure_uneven, measure_energy]


def rank_checks(world):
    """Those that need ranks, or take them where they are."""
    return CHECKS + [check_mesh] * (world > 2 and world % 2 == 0)


def all_checks(only=None):
    """{check: its fp64 error, if it has one}, on the ranks of this world; of all checks, or of one name."""
    meet("the first check", TIMEOUT)
    checks = base.named(rank_checks(dist.get_world_size()), only)
    return {name.replace("_", " "): check() for check, name in checks.items()}


def check_both(together, alone, only, ranks, device, stage=None):
    """--check of a stage whose all_checks(only) runs the checks `together`, in ranks; those `alone` start the processes
    that they need. device: of the ranks, or None."""
    checks = base.named([*together, *alone], only)
    if any(check in together for check in checks):
        in_ranks("all_checks", ranks, only, device=device, stage=stage)
    for check in checks:
        if check in alone:
            base.call_check(check, base.default_device())
    print(textwrap.fill("checks passed: " + ", ".join(checks.values()), 110))


def check_all(device, only, args):
    """--check."""
    ranks = number_of_ranks(args)
    check_both(rank_checks(ranks), BY_ONE, only, ranks, args.device)


def everything():
    """All checks and measurements: (where they ran, fp64 errors, rows, notes)."""
    errors, rows = all_checks(), []
    for measure in MEASUREMENTS + ON_GPUS * (here().type == "cuda"):
        rows += measure()
        if here().type == "cuda":
            torch.cuda.empty_cache()
    return "GPUs, NCCL" if here().type == "cuda" else "the CPU, gloo", errors, rows, notes


def under_torchrun(device):
    """This process as one rank of torchrun's. OSError, with one line, when the others do not come."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    where = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    deadline = time.monotonic() + TIMEOUT
    while rank != "0":  # rank 0, or torchrun itself, keeps the store at which ranks meet: torch would try for 40 s
        try:
            socket.create_connection(where, TIMEOUT).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} of {world}: nobody listens at {':'.join(where)} ({error}): start rank 0, "
                              "or correct MASTER_ADDR and MASTER_PORT") from None
            time.sleep(0.2)
    try:
        join_group(device, TIMEOUT)
        result = everything()
        dist.destroy_process_group()
        return result
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise OSError(f"rank {rank} of {world}: others did not come, or went: {reason}") from None


def print_policies(n=16, tokens=16384):
    """What each policy makes of the same uneven documents; the planner beside published runs; flows over a network."""
    rates, seed = rates_of(4096), 0
    lengths = lognormal_lengths(n * tokens, seed)
    rows = end_to_end(lengths, n)
    fixed, two = fixed_packing(rows, n, rates), two_layouts(lengths, n, rates)
    moved = with_moves(rows, n, disaggregate(rows, n, rates), rates)
    found = {name: search(lengths, n, rates, 2 * tokens) for name, search in
             (("best homogeneous groups", homogeneous), ("FlexSP", flexible))}
    best = found["best homogeneous groups"][0]
    policies = [("fixed packing", fixed, False), ("core attention disaggregated", moved, False),
                ("  messages by all adapters", moved, True), ("two layouts (Zeppelin)", two, False),
                ("  messages by all adapters", two, True),
                *((f"{name}: {', '.join(map(str, groups))}", split, False)
                  for name, (_, groups, split) in found.items())]
    print(f"\na layer, D = 4096, {n} GPUs in hosts of 8, simulated: {len(lengths)} documents, {sum(lengths):,} tokens, "
          f"the longest {max(lengths):,}")
    print(f"{'':<52}max/mean of tokens  of pairs  GB sent      ms  of the best homogeneous")
    for name, split, routed in policies:
        uneven = [max(x) / (sum(x) / n) for x in (split.tokens, split.pairs())]
        sent_, ms = (split.there.total() + split.back.total()) / 1e9, span(layer_tasks(split, rates, routed))
        print(f"{name:<52}{uneven[0]:18.2f}{uneven[1]:10.2f}{sent_:9.2f}{1e3 * ms:8.1f}{ms / best:10.2f}")
    print("\nshare of peak, published and by the planner (reach fitted to the first of each machine):")
    print("; ".join(f"{name} {share:.1%}, {got:.1%} (x {got / share:.2f})" for name, got, share in published_rows()))
    print("9 flows over 8 links, flows on the fullest (flows out of order): " + ", ".join(
        "{} {:g} ({})".format(way, *fabric_load(9, 8, way)) for way in ("single-path", "spray", "split")))


def number_of_ranks(args):
    """What the flags, or torchrun, say. BadInput if it cannot be."""
    torchrun = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if torchrun else 2 if args.ranks is None else args.ranks
    if torchrun and args.ranks not in (None, ranks):
        raise base.BadInput(f"--ranks {args.ranks}: torchrun has started {ranks}: leave --ranks out")
    if ranks < 2:
        raise base.BadInput(f"--ranks {ranks}: nothing is parallel there: use 2 or more")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if args.device == "cuda" and device_for(local) == "cpu":
        raise base.BadInput(f"--device cuda: {local} ranks, but {torch.cuda.device_count()} GPUs here: use as many "
                            "ranks, or --device cpu")
    return ranks


def body(device, ledger, args):
    if args.plan is not None:
        return print_plans(args.plan)
    torchrun, ranks = "RANK" in os.environ, number_of_ranks(args)
    if torchrun:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        where, errors, rows, said = under_torchrun(args.device or device_for(local))
        single = {}
    else:
        where, errors, rows, said = in_ranks("everything", ranks, device=args.device)
        single = {check.__name__[6:]: check() for check in BY_ONE}  # these start processes as they need them
        rows += in_ranks("measure_sleepers", 4, device="cpu")
    print(f"{ranks} processes on {where}; checks passed: {', '.join([*errors, *single])}\n")
    if torchrun:
        print(f"not under torchrun, as they start processes themselves: {', '.join(x.__name__[6:] for x in BY_ONE)}\n")
    errors["tensor parallel"], errors["sequence parallel"] = errors["tensor parallel"]
    for what, found in zip(("killed", "disconnected"), single.get("elastic", ()), strict=False):
        error, moved, expected, seconds = found
        errors[f"a rank {what}"] = error
        if expected:
            rows.append(Row(f"a rank {what}: sent", "layers new to a rank", expected / MIB, moved / MIB, band=(1, 1)))
        rows.append(Row(f"a rank {what}: step", "-", None, 1e3 * seconds, "ms", None))
    for name, error in errors.items():
        if error is not None:
            ledger.row(f"{name}: error", "fp64, against serial", 1e-12, error, "", (0, 1))
    for row in rows:
        ledger.row(*row)
    print()
    for line in said:
        print(line)
    for zigzag in (False, True):
        print(f"ring attention, {'zigzag' if zigzag else 'contiguous'}: pairs that each rank computes for "
              f"{32 * ranks} positions {attention_work(32 * ranks, ranks, zigzag)}")
    print_policies()
    for line in itertools.chain(*(single.get(name, ()) for name in ("uneven", "flow", "skip"))):
        print(f"random cases: {line}")
    p, m = 4, 8
    print(f"\nschedules, {p} ranks, {m} micro-batches: digits forward, letters backward, * weights, . waiting")
    for name, schedule in SCHEDULES.items():
        for rank, line in enumerate(gantt(schedule(p, m), costs_of(name, 2, 2, 2))):
            print(f"  {name if rank == 0 else '':<12} {line}")


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, help="processes (default: 2)")
    parser.add_argument("--plan", metavar="WISH", help=f"plan a training and stop; each as name=number: {USAGE}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where every rank can have a GPU")


if __name__ == "__main__":
    enough_queues()
    if "RANK" in os.environ and any(flag.startswith(("--break", "--check")) for flag in sys.argv):
        print("05_parallelism.py: --break and --check are for one process: leave torchrun out", file=sys.stderr)
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":  # one process of torchrun's speaks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(base.run_stage(globals(), "python 06_low_comm_sync.py"))


# Exercises
#   1. Let data_parallel send bf16 (reduce a copy of each bucket): which check tells? What would 06's feedback do?
#   2. Write the V-shaped schedule: two chunks a rank, the second in reverse order, as a list, and simulate its bubble.
#   3. Hide tensor parallelism's sums: cut the batch in two, and let one half's sum run under the other's products.
#   4. Give layer_tasks a forward and a backward, each with its messages: which policy gains, and by how much?
#   5. Let the planner's `reach` depend on the width of the matrices. Can one curve explain all of PUBLISHED?
