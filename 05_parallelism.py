"""05 - One model on many processes: what to cut, what to send, what it saves; who waits for whom; and who is lost.

The problem in one number
    Llama 3 70B in training takes 16 bytes a parameter (bf16 weights and gradients, AdamW in fp32): 1.1 TB, and a GPU
    has 0.08 to 0.14. So the model is cut: by batch, by weight, by layer, by token. Every cut here is a few lines of
    PyTorch over torch.distributed, and every one gives the gradients of the uncut model: in fp64 to 12 digits or more,
    where only the order of sums differs, and bit for bit where not even that does.

What is cut          n ranks, P parameters, Psi their bytes      what a rank sends in a step          in production
    2 data           tokens; ZeRO: states, gradients, weights    2 Psi (n-1)/n; ZeRO-3: 3 for 2       DDP, FSDP2
    3 tensor         every matrix, by outputs, then by inputs    4 activations a layer x 2 (n-1)/n    DTensor
    4 vocabulary     the classifier                              MAX of N, SUM of 2 N numbers; dE     loss_parallel
    6 pipeline       layers; idle time / work = (p - 1) / m      an activation a cut, each way        pipelining
    7 context        positions of one sequence                   keys, values and their gradients     context_parallel
    8 memory         nothing: make it again, or put it away      nothing                              save_on_cpu
    9 documents      uneven work: s tokens cost a s + b s^2      whatever evens it out
    12 planner       all of it: time = FLOPs / speed + messages that nothing hides + bubble

A reading path
    Sections 1 to 3 first, in order: processes, sums, and f and g, of which nearly all else is made. Then 6 (lists of
    operations, simulated and executed alike), 7 (attention by blocks), 8 (three ways to keep less). 4 and 5 join 02, 03
    and 04 to the cuts. 9 to 12 decide: policies for uneven documents, two models in one and skipped stages, played by
    6's simulator; a planner. 13 goes on when a rank is killed. train.py uses 1, 3, 4, 5 and 8; 06 the harness and
    section 13; 07 all cuts.

Symbols
    n ranks of a group; B sequences, T positions, N = B T tokens; D width, L layers, V classes, H heads of d = D/H.
    In section 6: p stages, m micro-batches, F, B, W the times of a forward and the two halves of a backward.

How to launch
    python 05_parallelism.py                     2 processes: one a GPU if there are two (NCCL), else on the CPU (gloo)
    python 05_parallelism.py --ranks 4
    python 05_parallelism.py --plan "params=8e9 layers=32 dim=4096 vocab=128256 seq=8192 gpus=64 gib=141 link=400"
    python 05_parallelism.py --break no-f        plant a famous bug and watch its check fail (exit status 1)
    You will see the schedules of section 6 as charts; errors against the serial model; bytes kept and sent beside their
    formulas; on GPUs times of the cuts, and what each plan takes; policies beside what a perfect one would gain.

References (numbers: arXiv)
    Megatron-LM 1909.08053 (tensor), 2104.04473 (pipelines), 2205.05198 (sequence, recomputation). ZeRO 1910.02054.
    GPipe 1811.06965, PipeDream-Flush 2006.09503, Zero Bubble Pipeline Parallelism 2401.10241. Ring Attention
    2310.01889. Recomputation 1604.06174. Cut cross-entropy 2411.09009. FORGE 2606.22932. DistCA 2510.18121, FlexSP
    2412.01523, SkipPipe 2502.19913, packet spraying 2407.00550.
    Of the following we know only the abstracts: what they name is here, how it is done is our own. SSDTrain 2408.10013,
    Zeppelin 2509.21841, FlowTrain (2026), ElasWave 2510.00606, C4 2406.04594, energy of fine-tuning 2606.23546,
    Frontier 2312.12705.

Left out on purpose: overlap of tensor-parallel sums with matrix products, 2-D and 3-D tensor parallelism, DualPipe and
V-shaped schedules, ZeRO with micro-batches, its stage 1 (of which we keep the formula) and its prefetching; the solvers
of the papers of sections 9 to 11, where ours are greedy; losing a rank over NCCL, whose watchdog ends the others.
"""

import contextlib
import ctypes
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
import statistics
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import zlib
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
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
filtering = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")

TIMEOUT = 20  # seconds: of a collective, and for all ranks to come
MIB, require, must_raise, on_death = base.MIB, base.require, base.must_raise, base.on_death
triton, tl = cce.triton, cce.tl


# ==== 1. Processes, and who talks to whom =============================================================================
#
# One program runs in n processes, one a GPU. A process, a rank, learns from its number what to do otherwise. They share
# no memory: what one has and another needs is sent, by collectives that all ranks of a group enter in the same order.
# Collectives have no names. One rank in another collective than the rest, or in none, means that all wait until a
# timeout, or, worse, that tensors of equal size are added that have nothing to do with each other. Most bugs of
# parallel programs are of that kind, so what starts the processes here is built for things that go wrong:
#
#     spawn        n processes with a common store, none of which outlives the others' failure, or its parent
#       fleet      + by a function's name, with the bugs that --break plants, results and errors brought home
#         in_ranks + the first rank's result         on_ranks: a check that starts two ranks unless it is in some
#
# In production torchrun starts one agent a machine, which starts the ranks, lets machines find each other (rendezvous)
# and starts all again when one dies. train.py takes both ways in: join_group reads the same environment.
# (spare, replace, seat and gone/RANK below are for section 13, where ranks are killed: skip them on a first reading.)

LAST_MOMENT = 10  # seconds to end in: of a replacement when all others have, of all when the parent is gone


def join_group(device, timeout=600):
    """Join the torch.distributed group of the environment (RANK, WORLD_SIZE, ...): NCCL on "cuda", gloo on "cpu"."""
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo" if gpu is None else "nccl", timeout=timeout, device_id=gpu)


def _follow_parent():
    """End this process when its parent has ended, even by SIGKILL."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_MOMENT)  # for who only notes the signal: without the parent's store no round can end any more
    os.kill(os.getpid(), signal.SIGKILL)


def _rank_main(index, places, fn, ranks, port, device, timeout, args):
    """Runs in each child: join the process group, call fn(*args), leave. places: _Family.start()'s."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    rank, seat = places[index]
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

    def __init__(self, fn, ranks, device, args, timeout, spare, replace):
        self.ranks, self.spare, self.replace = ranks, spare, replace
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.setup = fn, ranks, self.store.port, torch.device(device).type, timeout, args
        self.method = _start_method(fn, device)
        self.lost, self.processes, self.running = [], [], {}  # running: by sentinel, what ended() takes

    def start(self, places):
        """A process for each place: (its rank, the rank whose seat it takes: its own but for a replacement)."""
        context = torch.multiprocessing.start_processes(
            _rank_main, (places, *self.setup), len(places), join=False, daemon=True, start_method=self.method)
        self.processes += context.processes
        for process, place in zip(context.processes, places, strict=True):
            self.running[process.sentinel] = context, process, *place

    def watch(self):
        """Until all have ended, or replacements alone are left and had their last moment."""
        deadline = math.inf
        while self.running and time.monotonic() <= deadline:
            alone = all(rank != seat for *_, rank, seat in self.running.values())
            if alone and any(process.exitcode == 0 for process in self.processes[: self.ranks]):
                deadline = min(deadline, time.monotonic() + LAST_MOMENT)
            for sentinel in multiprocessing.connection.wait(list(self.running), timeout=1):
                self.ended(*self.running[sentinel])

    def ended(self, context, process, rank, seat):
        """What to do about a process that has: raise its error, or note it and start another in its place."""
        process.join()
        status, spared = process.exitcode, len(self.lost) < self.spare
        if status and rank == seat and (status > 0 or not spared):
            context.join(timeout=0)  # raises the error of a rank that failed; at times only when called again
            return
        del self.running[process.sentinel]
        context.sentinels.pop(process.sentinel, None)  # so that join() tells of others
        if status:
            self.store.set(f"gone/{rank}", "")
        if status < 0 and spared:
            self.lost.append(rank)
            if self.replace:
                self.start([(self.ranks + len(self.lost) - 1, seat)])
        elif status:  # the others do without it
            print(f"the replacement of process {seat} ended with status {status}", file=sys.stderr)


def spawn(fn, ranks, device="cpu", args=(), timeout=300, grace=30, spare=0, replace=False):
    """Run fn(*args) in `ranks` new processes that form one torch.distributed group, gloo or NCCL by device.

    fn must be importable (defined at the top of a file). A collective that waits longer than `timeout` seconds fails.
    When one rank fails, the others are ended and its error is raised; but the first `spare` of those that a signal ends
    are only noted, under gone/RANK in the store that this process keeps. replace: start another one for each of them,
    under a new RANK, with the LOCAL_RANK of the old one, which fn has to bring into the group; whether it joins or
    fails, the others go on, and when they have done their work it has 10 seconds left. Ctrl-C and SIGTERM are passed
    on; ranks that have not left after `grace` seconds are killed, and KeyboardInterrupt or SystemExit(143) is raised.
    Returns the ranks that were lost."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of each process that it ends
    family = _Family(fn, ranks, device, args, timeout, spare, replace)
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)),
                signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}  # ignored after a script's `&`
    try:
        family.start([(rank, rank) for rank in range(ranks)])
        family.watch()
    except (KeyboardInterrupt, SystemExit):
        for process in family.processes:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in family.processes:
            process.join(max(0, deadline - time.monotonic()))
        raise
    finally:
        for process in family.processes:
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return family.lost


def device_for(ranks):
    """"cuda" when every rank can have a GPU of its own, else "cpu"."""
    return "cuda" if base.HAS_CUDA and torch.cuda.device_count() >= ranks else "cpu"


def enough_queues():
    """A GPU has 8 queues by default, over which streams are spread: a kernel that waits for another rank's message
    would hold up what shares its queue, perhaps what that rank waits for. Read when a process starts CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Torch warns that messages of one group wait for each other: as they should, on a wire of section 6.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def fleet(function, ranks, *arguments, stage, device=None, timeout=TIMEOUT, **options):
    """{rank: what function(*arguments) returned there} of new processes, by rank. function: a name in `stage`, a file's
    globals(), whose planted bugs (of its BREAKS, near the end of this file) the processes have, too. options: as in
    spawn(). What went wrong is raised here, in one line: AssertionError or ValueError as there, else OSError."""
    planted = [name for name, (_, attribute, bug) in stage["BREAKS"].items() if stage[attribute] is bug]
    enough_queues()
    with tempfile.TemporaryDirectory() as folder:
        what = Path(stage["__file__"]).stem, function, planted, folder, arguments
        try:
            spawn(run_in_fleet, ranks, device or device_for(ranks), what, timeout, **options)
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise error_of_ranks(folder, error) from None
        files = {int(file.stem): file for file in Path(folder).glob("*.pt")}
        if not files:
            raise OSError(f"none of {ranks} ranks is left")
        return {rank: torch.load(files[rank], weights_only=False) for rank in sorted(files)}


def error_of_ranks(folder, error):
    """What the ranks said, as one error. A rank that fails makes others fail otherwise: its error is what counts."""
    said = sorted((int(file.stem), *file.read_text().split(":", 1)) for file in Path(folder).glob("*.error"))
    if not said:
        return OSError(f"a rank ended before its work: {str(error).strip().splitlines()[-1]}")
    known = {"AssertionError": AssertionError, "BadInput": base.BadInput, "ValueError": ValueError}
    kinds = [kind for _, kind, _ in said]
    worst, texts = next((kind for kind in known if kind in kinds), kinds[0]), {}
    for rank, kind, text in said:
        if kind == worst:
            texts.setdefault(text, []).append(str(rank))
    return known.get(worst, OSError)("; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in texts.items()))


def run_in_fleet(stage, function, planted, folder, arguments):
    """The body of a fleet's process."""
    torch.set_num_threads(1)
    names = globals() if stage == Path(__file__).stem else vars(importlib.import_module(stage))
    for name in planted:
        _, attribute, bug = names["BREAKS"][name]
        names[attribute] = bug
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
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


def in_ranks(function, ranks, *arguments, stage=None, **options):
    """fleet()'s result of the first rank that is left; function: of this file, if no `stage` is given."""
    return next(iter(fleet(function, ranks, *arguments, stage=stage or globals(), **options).values()))


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


# The mesh. A rank has a place in a box whose edges are the ways to cut, and talks to those on the lines through it.
# pp 2 x dp 2 x tp 2 = 8 ranks, rank = 4 pp + 2 dp + tp:
#
#                tp 0    tp 1                  tp 0    tp 1
#        dp 0      0 ----- 1           dp 0      4 ----- 5            rank 5 is in three groups:
#                  |       |                     |       |              tp [4, 5]   four sums a layer: fastest links 
#        dp 1      2 ----- 3           dp 1      6 ----- 7              dp [5, 7]   sums gradients once a step
#               pp 0: first layers            pp 1: last layers         pp [1, 5]   hands on an activation: slowest
#
# The axis that varies fastest has neighbours in its groups, on one machine; the slowest spans machines. Making a group
# is a collective, too: all ranks make all groups, in one order, and keep those that they are in. torch's DeviceMesh
# (init_device_mesh) is this with names, and with slices that FSDP2 and DTensor take.


class Groups(NamedTuple):
    """The process groups of this rank along each axis, None where the axis has size 1. `data`: dp and cp together, all
    ranks that see other tokens through the same weights, whose gradients are summed. mesh: (pp, dp, cp, tp), ranks.
    wires: section 6's, once they are made."""

    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    mesh: torch.Tensor
    wires: dict


def make_groups(dp=1, pp=1, cp=1, tp=1, timeout=600):
    """Groups for a mesh of dp x pp x cp x tp ranks; all ranks call it. timeout: seconds, of every collective, and to
    wait for the others. ValueError when the world has another size, TimeoutError with their numbers when ranks do not
    come."""
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
    lines = functools.partial(along, ranks, timeout=timeout)
    DP, CP = lines(1), lines(2)
    data = DP if cp == 1 else CP if dp == 1 else lines(1, 2)  # every group costs connections and, on a GPU, memory
    return Groups(DP, lines(0), CP, lines(3), data, ranks, {})


def along(mesh, *axes, timeout=600):
    """A new group of the ranks on this rank's line (or plane) of the mesh along these axes; None if it is alone."""
    others = [a for a in range(mesh.dim()) if a not in axes]
    lines = mesh.permute(*others, *axes).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    if lines.shape[1] == 1:
        return None
    return dist.new_subgroups_by_enumeration(lines.tolist(), timeout=datetime.timedelta(seconds=timeout))[0]


@functools.cache
def mesh(dp=1, pp=1, cp=1, tp=1):
    """make_groups, once for each mesh."""
    return make_groups(dp, pp, cp, tp, TIMEOUT)


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
            raise TimeoutError(f"rank(s) {missing} of {world} did not come to {where} in {timeout} s: see their output")
        time.sleep(0.005)


def size(group):
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group):
    return 0 if group is None else dist.get_rank(group)


# What a collective costs. In a ring of n ranks each sends the next one a piece at a time; after n - 1 turns every
# piece has been everywhere. A reduce-scatter (each ends with the sum of one piece) sends (n-1)/n of the tensor, an
# all-gather (each ends with all pieces) the same; an all-reduce is one after the other, 2 (n-1)/n. `sent` counts so, by
# which every cut's formula is checked.

sent = Counter()  # bytes that this rank sent, by operation
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named anew in torch 2.13
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count(kind, nbytes, group):
    sent[kind] += nbytes * (size(group) - 1) // size(group)


def all_reduce(x, group, op=dist.ReduceOp.SUM):
    """The sum (or what `op` says) over the group of x, any shape, as a new tensor."""
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


# Parameters of which a rank has a part carry its dimension as `cut` (tensor_parallel below; 07's experts). Checkpoints
# want them whole, and tensors like them, the moments of an optimizer. A number for each row is whole where columns are
# cut.


def is_part(p):
    return hasattr(p, "cut")


def collected(tensor, p, group):
    """All of a tensor like p, on the host (devices may lack the room for whole models) of the group's first rank;
    elsewhere, and if group is None or nothing is cut, the tensor itself. All ranks call it."""
    if group is None or not is_part(p) or p.cut >= tensor.dim():
        return tensor
    whole = gather(tensor.detach(), group, p.cut)
    return whole.cpu() if rank_in(group) == 0 else tensor


def own_part(tensor, p, group):
    """This rank's part of a whole tensor like p."""
    if group is None or not is_part(p) or p.cut >= tensor.dim():
        return tensor
    return tensor.chunk(size(group), p.cut)[rank_in(group)].clone()


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


# ==== 2. Data parallel: sum the gradients; then shard what is repeated ================================================
#
# Ranks have equal weights and other tokens. The loss is a sum over tokens, so dW is a sum over ranks: one all-reduce,
# after which all take the same step. v1 does that after backward. But backward makes gradients from the last layer to
# the first, and one that is made is only waited for. v2 sends it while backward makes the others:
#
#     v1   GPU     |- L4 -|- L3 -|- L2 -|- L1 -|                                      |step|
#          links                               |-- 4 --|-- 3 --|-- 2 --|-- 1 --|
#     v2   GPU     |- L4 -|- L3 -|- L2 -|- L1 -|              |step|
#          links          |-- 4 --|-- 3 --|-- 2 --|-- 1 --|          only what is left after L1 is waited for
#
# Small messages are slow, so gradients go in buckets, flat vectors of many parameters. And collectives have no names:
# ranks that reduce bucket 3 and bucket 2 at the same time, because a layer was skipped on one of them, wait for ever or
# add what does not belong together. So bucket i starts when it AND all before it are complete, on every rank alike.
#
# A sum, not a mean: a rank divides its tokens' losses by the number of tokens of ALL ranks. The mean of the ranks'
# means is another number when they have unequally many (padding, masks): --break mean-of-means.
#
# In production: DistributedDataParallel does v2 with a reducer in C++, may let .grad be views of its buckets, finds
# parameters that a rank did not use, and takes hooks that compress. It divides the sum by n, FSDP2 does, too.


def sum_gradients(parameters, group):
    """v1, after backward: p.grad becomes the sum over the group, where a rank has none of its own, too."""
    for p in parameters:
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group)


class Buckets:
    """Lists of parameters whose gradients are reduced, list by list in this order, while backward goes on.

    reduce(i, flat) starts to reduce the flat vector of list i (padded with zeros to a multiple of `multiple`) and
    returns what is being made and a handle to wait for, or None. bounded: the reduction before is waited for when one
    starts, so that two flat vectors are alive at most. `enabled` False: hooks do nothing, finish() does all."""

    def __init__(self, lists, reduce, multiple=1, bounded=False):
        self.lists, self.reduce, self.multiple, self.bounded, self.enabled = lists, reduce, multiple, bounded, True
        self.list_of = {p: i for i, parameters in enumerate(lists) for p in parameters}
        self.begin()
        self.hooks = [p.register_post_accumulate_grad_hook(self.ready) for p in self.list_of]

    def begin(self):
        self.next = 0  # the list that is reduced next
        self.flat, self.made, self.handles = {}, [], []
        self.missing = [dict(zip(ps, offsets(ps), strict=True)) for ps in self.lists]  # {p: where its gradient goes}

    def close(self):
        """Leave the parameters alone from now on."""
        for hook in self.hooks:
            hook.remove()

    def ready(self, p):
        """Autograd's hook: this backward pass has added all that it will add to p.grad."""
        if not self.enabled:
            return
        if p not in self.missing[self.list_of[p]]:
            raise RuntimeError("a second backward pass before finish(): the first one's gradients are on their way")
        self.take(p)
        while self.next < len(self.lists) and not self.missing[self.next]:
            self.launch()

    def take(self, p):
        """Move p's gradient, zeros if it has none, to its place."""
        i = self.list_of[p]
        at = self.missing[i].pop(p)
        if i not in self.flat:
            numbers = sum(p.numel() for p in self.lists[i])
            self.flat[i] = p.new_zeros(-(-numbers // self.multiple) * self.multiple)
        if p.grad is not None:
            self.flat[i][at : at + p.numel()].copy_(p.grad.reshape(-1))
            p.grad = None

    def launch(self):
        for p in list(self.missing[self.next]):  # not used in this pass; of an earlier micro-batch, perhaps
            self.take(p)
        made, handle = self.reduce(self.next, self.flat.pop(self.next))
        self.made.append(made)
        if self.bounded:
            self.wait()
        if handle is not None:
            self.handles.append(handle)
        self.next += 1

    def wait(self):
        """For what was started. A handle holds its flat vector, and so is let go."""
        while self.handles:
            self.handles.pop(0).wait()

    def finish(self):
        """Reduce what backward did not reach, wait for all; what reduce() made, by list."""
        while self.next < len(self.lists):
            self.launch()
        self.wait()
        made = self.made
        self.begin()
        return made


def offsets(parameters):
    """Where each begins in their flat vector."""
    return list(itertools.accumulate((p.numel() for p in parameters[:-1]), initial=0))


def views(flat, parameters):
    """Slices of the flat vector in the parameters' shapes."""
    return [flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets(parameters), strict=True)]


def global_count(kept, group):
    """kept (...) bool: tokens that count, over all ranks, at least 1."""
    return all_reduce(kept.sum(), group).clamp(min=1)


def data_parallel(model, group, bucket_mib=100):
    """v2: sum gradients over the group during backward. Returns a DataParallel, whose finish() has to be called after
    it. Gradients are SUMS over ranks: divide a rank's summed token losses by global_count. Parameters are taken from
    rank 0 of the group, so that all start alike. The two halves of its all-reduces send 2 Psi (n-1)/n bytes."""
    named = sorted(model.named_parameters(), key=lambda item: "." not in item[0])  # the classifier, GPT's own, last
    parameters = [p for _, p in named if p.requires_grad]
    if group is not None:
        for p in parameters:
            dist.broadcast(p.detach(), group=group, group_src=0)
    return DataParallel(parameters, group, bucket_mib)


class DataParallel(Buckets):
    """What data_parallel returns. Set `enabled` to False for all but the last backward pass of a step, and under
    run_pipeline, which adds to .grad behind autograd's back."""

    def __init__(self, parameters, group, bucket_mib):
        lists, room = [], 0
        for p in reversed(parameters):  # backward makes the last layer's gradients first
            if not lists or room < p.nbytes or lists[-1][0].dtype != p.dtype:
                lists.append([])
                room = bucket_mib * MIB
            lists[-1].append(p)
            room -= p.nbytes
        super().__init__(lists, functools.partial(start_all_reduce, group=group))

    def finish(self):
        """After backward, before the optimizer: wait for the sums; every p.grad is a view into its bucket."""
        for parameters, flat in zip(self.lists, super().finish(), strict=True):
            for p, view in zip(parameters, views(flat, parameters), strict=True):
                p.grad = view


def start_all_reduce(i, flat, group):
    if group is None:
        return flat, None
    count("all-reduce", 2 * flat.nbytes, group)
    return flat, dist.all_reduce(flat, group=group, async_op=True)


# ZeRO. Under data parallelism all ranks hold the same weights, the same sums, the same optimizer states: n copies of
# everything. An all-reduce is a reduce-scatter and an all-gather, and between the two each rank has one part of the
# sums, which is all that is needed to step one part of the weights. So rank r keeps states and sums of part r alone,
# steps it, and the second half gathers new weights in place of sums: as many bytes sent, a fraction held.
#
#     bytes a rank holds, P parameters        mixed precision (w 2, g 2, o 12), n = 8, 7 billion: GiB
#     0   P (w + g + o)                       104      all repeated
#     1   P (w + g + o/n)                      36      states
#     2   P (w + (g + o)/n)                    24      and gradients
#     3   P (w + g + o)/n                      13      and weights: whole only while their layer computes
#
# One layer under stage 3, whose weights travel three times (forward, backward, and as gradients) where they travel
# twice in stages 0 to 2:
#
#                forward                         backward                                        step
#     links      | gather |                      | gather |               | reduce-scatter |
#     weights    part     | WHOLE  | part ..............  | WHOLE         | part ............... | new part
#     GPU                 | x -> y |                      | dy -> dx, dW  |
#     gradients                                           | grow          | WHOLE          | part | none
#
# In production: FSDP2's fully_shard(block) cuts each parameter for itself (a DTensor, which optimizers and checkpoints
# know how to handle), and gathers the next layer's weights while this one computes; ours are waited for.


def zero_bytes(P, n, stage, w=4, g=4, o=8):
    """Bytes a rank holds for P parameters over n ranks; mixed precision is w, g, o = 2, 2, 12. ZeRO, section 5."""
    return [P * (w + g + o), P * (w + g) + P * o // n, P * w + P * (g + o) // n, P * (w + g + o) // n][stage]


class Unit:
    """Parameters of one dtype that are gathered together: views of one flat vector, of which this rank owns a part.
    With `drops` (stage 3) the part has memory of its own, and the flat vector's comes and goes."""

    def __init__(self, parameters, group, drops, options):
        self.parameters, self.group, self.drops = parameters, group, drops
        n = size(group)
        padded = -(-sum(p.numel() for p in parameters) // n) * n
        self.flat = parameters[0].new_zeros(padded)
        for p, view in zip(parameters, views(self.flat, parameters), strict=True):
            view.copy_(p.detach())
            p.data = view
        part = self.flat.chunk(n)[rank_in(group)]
        self.part = part.clone() if drops else part
        # What the optimizer steps: the part itself, or its fp32 master where weights are narrower.
        self.master = nn.Parameter(self.part.to(torch.promote_types(self.part.dtype, torch.float32)))
        self.optimizer = torch.optim.AdamW([self.master], **options)
        self.gradient = None  # (padded / n), a sum over ranks, between finish() and step()
        self.drop()

    def fetch(self):
        """Stage 3: the whole weights, gathered unless they are there."""
        storage = self.flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat.nbytes)
            self.collect()

    def collect(self):
        """All parts into the flat vector: past autograd, which counts writes to what it saved."""
        if self.group is None:
            self.flat.copy_(self.part)
        else:
            part = self.part if self.drops else self.part.clone()  # which lies in the flat vector
            gather_single(self.flat, part, group=self.group)
            count("all-gather", self.flat.nbytes, self.group)

    def drop(self):
        """Stage 3: give back the whole weights' memory. The views into it stay."""
        if self.drops:
            self.flat.untyped_storage().resize_(0)

    def reduce(self, gradients):
        """Start the reduce-scatter of the flat gradients: (this rank's part to be, handle)."""
        self.drop()
        part = torch.empty_like(self.part)
        if self.group is None:
            return part.copy_(gradients), None
        count("reduce-scatter", gradients.nbytes, self.group)
        return part, scatter_single(part, gradients, group=self.group, async_op=True)

    def step(self):
        """AdamW on this rank's part."""
        self.master.grad, self.gradient = self.gradient.to(self.master.dtype), None
        self.optimizer.step()
        self.master.grad = None
        self.part.copy_(self.master.detach())  # the same memory, where they are of one dtype
        if self.drops:
            self.drop()  # who looked at the old weights since would keep them
        else:
            self.collect()


class Zero:
    """ZeRO stages 2 and 3 of a GPT of 01. Its units are the embedding, each block, and the rest: last norm, classifier.

    Use: backward(); finish(); step(). Gradients are SUMS over ranks, of one backward pass a step. `adamw`: what
    torch.optim.AdamW takes. All ranks start from equal weights. ValueError for another stage, frozen weights, a unit of
    two dtypes, and in stage 3 a classifier tied to the embedding, which would be dropped before the loss reads it."""

    def __init__(self, model, group, stage, **adamw):
        if stage not in (2, 3):
            raise base.BadInput(f"stage is {stage!r}: use 2 or 3 (0 is data_parallel)")
        if stage == 3 and model.classifier is model.embedding.weight:
            raise base.BadInput("stage 3 with a classifier tied to the embedding: use stage 2, or a copy of the weight")
        if not all(p.requires_grad for p in model.parameters()):
            raise base.BadInput("a frozen parameter: ZeRO steps all of them: train it, or use data_parallel")
        modules = [model.embedding, *model.blocks, model]
        owner = {p: module for module in reversed(modules) for p in module.parameters()}  # the first that has it
        lists = [[p for p in module.parameters() if owner[p] is module] for module in modules]
        if any(len({p.dtype for p in parameters}) > 1 for parameters in lists):
            raise base.BadInput("ZeRO's units are flat vectors, of one dtype each: cast the model to one")
        self.units = [Unit(parameters, group, stage == 3, adamw) for parameters in lists]
        backwards = self.units[::-1]  # the order in which backward finishes them
        self.buckets = Buckets([unit.parameters for unit in backwards],
                               lambda i, flat: backwards[i].reduce(flat), size(group), bounded=True)
        for module, unit in zip(modules, self.units, strict=True) if stage == 3 else ():
            module.register_forward_pre_hook(lambda *_, unit=unit: unit.fetch())
            if module is not model:  # the loss, outside of any module, reads the classifier, which stays for it
                module.register_forward_hook(lambda *_, unit=unit: unit.drop())
            if module in modules[1:-1]:  # an embedding's backward does not read the weights
                module.register_full_backward_pre_hook(lambda *_, unit=unit: unit.fetch())

    def finish(self):
        """Wait for the sums of this rank's parts."""
        for unit, part in zip(reversed(self.units), self.buckets.finish(), strict=True):
            unit.gradient = part

    def step(self):
        """AdamW on this rank's parts; stage 2 gathers the new weights now, 3 when they are used."""
        for unit in self.units:
            unit.step()

    def resident(self):
        """Bytes of weights, gradients and optimizer state that this rank holds: of every storage once."""
        tensors = list(self.buckets.flat.values())
        for unit in self.units:
            tensors += [unit.flat, unit.part, unit.master, unit.gradient, *(p.grad for p in unit.parameters)]
            tensors += [t for state in unit.optimizer.state.values() for t in state.values() if t.dim()]
        storages = [t.untyped_storage() for t in tensors if t is not None]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def require_same_replicas(parameters, group=None):
    """ConnectionError unless these are the same in all ranks, bit for bit. Under plain data parallelism each rank makes
    every step for itself, and one that computes wrongly would go its own way, unseen."""
    total = 0
    for p in parameters:
        total = zlib.crc32(p.detach().cpu().view(-1).view(torch.uint8).numpy(), total)
    ends = torch.tensor([total, -total], dtype=torch.float64, device=p.device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)  # the largest, and minus the smallest
    if ends.sum():
        raise ConnectionError("the replicas of the model have come to different weights: nothing was saved; go on from "
                              "the checkpoint before, on other hardware if it happens again")


# ==== 3. Tensor parallel: a matrix is cut, the activations between two cuts are narrower ==============================
#
# Two matrices with anything elementwise between them, z = B act(A x): cut A by outputs and B by inputs,
#
#         x --f--+--> A1 --> act --> B1 --+                A = [A1]      B = [B1 B2]
#                |                        +--g--> z            [A2]
#                +--> A2 --> act --> B2 --+                z = B1 act(A1 x) + B2 act(A2 x)
#
# and nothing has to be said in the middle. At both ends stands one sum, and calculus says where:
#
#     1. z is a sum over ranks of what each made:       g, forward:  all-reduce.
#     2. dz is the same on all ranks, as z is, and what a term of a sum gets is dz itself: g, backward: nothing.
#     3. Forward, x is the same on all ranks:           f, forward:  nothing.
#     4. But x feeds all of them, so dx is a sum over its uses, A1^T dy1 + A2^T dy2: f, backward: all-reduce.
#     5. So f and g are each other's transposes. Leave f's sum out and loss and all gradients of THIS layer are right;
#        those of the layers before lack the other ranks' part: --break no-f.
#     6. A layer has two such pairs (qkv and proj around attention: heads are independent; up and down): 4 sums.
#
# Sequence parallelism. Between g and the next f, all ranks do the same to the same stream: norms, additions. Cut it
# along T instead: an all-reduce is a reduce-scatter and an all-gather, so g becomes the first and f the second, for as
# many bytes (and two gathers a layer more, as the gathered X is not kept), and each rank keeps 1/n of the stream. Only
# a norm's weight then sees a part of the positions: its gradient is summed over ranks: --break no-norm-sum.
#
#     activations kept, elements a token and layer (01's 18 D):    outside    inside the cuts
#     one GPU                                                       4 D        14 D
#     tensor parallel                                               4 D        14 D / n
#     and sequence parallel                                         4 D / n    14 D / n
#
# In production: DTensor with parallelize_module and the plans ColwiseParallel, RowwiseParallel, SequenceParallel, whose
# placements are checked and converted, and which hides part of the sums under the products ("async TP").


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


def saved_as(tensor, remake):
    """A context: autograd, asked to save `tensor` or a row-major view of it for backward, keeps the shape alone, and
    calls remake() when backward wants it. Autograd lets us stand between it and what it saves by a pair of functions:
    pack, whose result is kept (a shape, here, stands for the tensor), and unpack, which gets that back."""
    place = tensor.untyped_storage().data_ptr()
    pack = lambda t: t.shape if t.untyped_storage().data_ptr() == place else t  # noqa: E731
    unpack = lambda t: remake().view(t) if isinstance(t, torch.Size) else t  # noqa: E731
    return saved_tensors_hooks(pack, unpack)


def cut(module, name, dim, group):
    """Keep this rank's share of a parameter's dimension `dim`: (start, stop), which is returned. The weight notes its
    `cut`, dim, and its `origin`, (row, column) of its first element in the whole."""
    weight = getattr(module, name)
    start, stop = shares(weight.shape[dim], size(group))[rank_in(group)]
    mine = nn.Parameter(weight.detach().narrow(dim, start, stop - start).clone(), weight.requires_grad)
    mine.cut, mine.origin = dim, (start, 0) if dim == 0 else (0, start)
    setattr(module, name, mine)
    return start, stop


def refuse_bias(linear):
    """A bias would have to be cut with its outputs, and added once to a sum of parts, not by every rank."""
    if linear.bias is not None:
        raise base.BadInput("a linear layer with a bias cannot be cut here: use bias=False, as 01's GPT does")


def column_linear(linear, group, sequence):
    """Y = X A^T cut by outputs: rank r makes columns of Y. With `sequence` the gathered X is not kept for dW: its own
    positions are, and backward gathers them again (arXiv 2205.05198). ValueError if the layer has a bias."""
    refuse_bias(linear)
    cut(linear, "weight", 0, group)

    def forward(x):
        x = as_product(x)  # (B, T or T/n, K)
        full = enter(x, group, sequence)  # (B, T, K)
        with saved_as(full, lambda: gather(x.detach(), group)) if sequence else contextlib.nullcontext():
            return type(linear).forward(linear, full)

    linear.forward = forward


def row_linear(linear, group, sequence):
    """Z = Y B^T cut by inputs: rank r has columns of Y and makes a part of the sum Z. ValueError as above."""
    refuse_bias(linear)
    cut(linear, "weight", 1, group)
    linear.leave = functools.partial(leave, group=group, sequence=sequence)
    linear.forward = lambda y: linear.leave(type(linear).forward(linear, y))


def cut_embedding(embedding, group, sequence):
    """Each rank looks up the tokens of its range of classes, 0 for others; the sum has one term that is not 0."""
    start, stop = cut(embedding, "weight", 0, group)

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
    forge()'s `origins`. ValueError if the heads cannot be shared out, or the classifier is tied. arXiv 1909.08053,
    2205.05198."""
    n, heads = size(group), model.config.heads
    if heads % n:
        raise base.BadInput(f"{heads} heads over {n} tensor-parallel ranks: use a tp that divides the number of heads")
    if model.classifier is model.embedding.weight:
        raise base.BadInput("a classifier tied to the embedding would be cut twice: give it a copy of the weight")
    if n == 1:
        return {}
    cut_embedding(model.embedding, group, sequence)
    cut(model, "classifier", 0, group)
    for block in model.blocks:
        for name, kind in (("qkv", column_linear), ("proj", row_linear), ("up", column_linear), ("down", row_linear)):
            if hasattr(block, name):  # 07's layers have experts instead of up and down
                kind(getattr(block, name), group, sequence)
    if sequence:  # a norm saw only this rank's positions
        for name, p in model.named_parameters():
            if "norm" in name:
                p.register_hook(functools.partial(sum_norm_gradient, group=group))
    return {name: p.origin for name, p in model.named_parameters() if hasattr(p, "origin")}


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


# A model that no rank could hold is made without its matrices: they have shapes, but no memory, and what would have
# filled them with random numbers is noted. When it is known what part of a matrix a rank keeps, and in what dtype, they
# are made one after the other. Their numbers are those of a model that is made at once, since the same draws are made
# in the same order:
#
#     Unborn()     Linear(...): draw a, b          draw c, for GPT-2's initialisation, in place of a
#     bear()       a into a matrix, forgotten; b -> cut, kept; c -> cut, kept


class Unborn(TorchDispatchMode):
    """A block in which a model is made without its matrices (vectors are small). Afterwards bear() makes them."""

    def __enter__(self):
        self.draws = []  # (matrix, operation, its arguments)

        def bodiless(module, name, p):
            return nn.Parameter(p.to("meta")) if p is not None and p.dim() == 2 else None

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
    def bear(self, model, names, dtype_of, device, group=None, sent=False):
        """names: {id of a matrix: its name}, from before the model was cut over the group; dtype_of(name). sent: from
        rank 0, as the same seed gives the same numbers, but other machines may round otherwise."""
        last = {id(matrix): i for i, (matrix, *_) in enumerate(self.draws)}
        for i, (matrix, operation, numbers) in enumerate(self.draws):
            whole = operation(torch.empty(matrix.shape, device=device), *numbers)
            if last[id(matrix)] > i or id(matrix) not in names:
                continue  # drawn again, or left out: experts take the place of MLPs
            if sent:
                dist.broadcast(whole, 0)
            name = names[id(matrix)]
            bodiless = model.get_parameter(name)
            p = nn.Parameter(own_part(whole, bodiless, group).to(dtype_of(name)))
            p.__dict__ |= bodiless.__dict__  # where it was cut
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, p)


# ==== 4. Vocabulary parallel: the classifier and its loss =============================================================
#
# The classifier is a matrix cut by outputs, so f stands before it. Behind it no logits are gathered, (N, V) of them:
# softmax needs a token's log-sum-exp and its target's logit, and both join like this, as blocks do in 02:
#
#     rank 0: classes 0 .. 49     lse 3    target's logit 2        m = max(3, 5) = 5
#     rank 1: classes 50 .. 99    lse 5    not mine:      0        lse = 5 + log(e^-2 + e^0) = 5.13    logit 2 + 0
#
# One MAX, so that no exponential overflows (--break no-max), and one SUM of 2 N numbers. With the true lse each rank
# makes the gradients of its own classes; dE is a sum over classes, hence over ranks, which is f's backward.
# In production: torch's loss_parallel does it for logits that are DTensors; the logits do exist there.


def join_slices(lse, target_logit, group):
    """lse (N,) over this rank's classes and the target's logit (N,), 0 where it is elsewhere -> those of the whole
    vocabulary: two all-reduces, one MAX and one SUM."""
    top = all_reduce(lse, group, dist.ReduceOp.MAX)  # (N,)
    total, target_logit = all_reduce(torch.stack(((lse - top).exp(), target_logit)), group)  # (2, N)
    return top + total.log(), target_logit


def vocab_parallel_cross_entropy(E, C, targets, group, vocab, *, sequence=False, loss=cce.linear_cross_entropy,
                                 **options):
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
#
# FORGE (04) steps a weight inside backward, so a rank must have all of the weight's gradient there.
#
# Tensor and sequence parallel: it has all tokens, and so all of dW for its shard. forge() works as it is, with the
# origins that tensor_parallel returns, so that each element has the noise and the codes that it has in the whole model.
# Data parallel: it has not, dW is a sum over ranks; forge() refuses. Or factors are gathered, dW being dY^T X of ALL
# n N tokens: n N (M + K) (n-1)/n numbers sent, fewer than a sum's 2 M K (n-1)/n while n N < 2 M K / (M + K):
# exercise 6.
# Rules that look at more than an element, Muon and Adam-mini, need the whole matrix, or the whole row:


def ranks_of(p, group):
    """04's Ranks of a parameter that was cut over this group. Muon's update of the whole matrix is made by every rank,
    from their parts of the momentum's look ahead: muon_traffic. Adam-mini adds up the squares of a row whose columns
    are cut: an all-reduce of M numbers."""
    columns = p.shape[1] * (size(group) if p.cut == 1 else 1)
    return forging.Ranks(columns, functools.partial(all_reduce, group=group),
                         functools.partial(gather, group=group, dim=p.cut),
                         lambda whole: whole.chunk(size(group), p.cut)[rank_in(group)])


def muon_traffic(M, K, n, itemsize=2):
    """Bytes a rank sends for Muon's step of a matrix (M, K) that is cut over n: its part, and a square of its norm."""
    return itemsize * M * K * (n - 1) // n + 2 * 4 * (n - 1) // n


# ==== 6. Pipeline: layers on different ranks, and lists of operations that decide when they wait ======================
#
# Rank r has the r-th part of the layers, a stage. A batch that goes through as a whole leaves p - 1 of p ranks idle at
# any time; so it is cut into m micro-batches, which follow each other. What is left of the waiting, the bubble, is a
# matter of order alone. A schedule here is nothing but a list of operations for each rank; simulate() plays the lists,
# run_pipeline() executes the same lists, and a new schedule is a new list. Below, p = 3 and m = 6, a row a rank, to the
# right time: digits are forwards (F = 1) and letters backwards (B + W = 2) of micro-batches 0, 1, ... and a, b, ...
#
# In production: torch.distributed.pipelining splits models by tracing, or takes stages cut by hand, infers what is
# sent, and has GPipe, 1F1B, interleaved, and zero-bubble schedules of several chunks a rank, as lists, too.


class Op(NamedTuple):
    """F: forward; B: backward; W: where a schedule splits it off, the part of B that makes the linear layers' dW."""

    kind: str
    micro: int
    chunk: int = 0  # of this rank's layers: stage chunk * p + rank of p * chunks


# GPipe. Each rank waits for p - 1 forwards and backwards and does m: (p - 1) / m. All m micro-batches' activations are
# alive at once.
#
#     012345......aabbccddeeff
#     .012345...aabbccddeeff..
#     ..012345aabbccddeeff....


def gpipe(p, m):
    """All forwards, then all backwards: m micro-batches in flight. arXiv 1811.06965."""
    return [[Op(kind, i) for kind in "FB" for i in range(m)] for _ in range(p)]


# 1F1B. The same bubble in another place, and p - rank micro-batches alive instead of m: rank r has done p - r forwards
# when the first backward comes back to it, and from then on does one for one.
#
#     012....aa3bb4cc5dd.ee.ff
#     .01..aa2bb3cc4dd5ee.ff..
#     ..0aa1bb2cc3dd4ee5ff....


def one_f_one_b(p, m):
    """As soon as the last stage has a result, one backward for one forward: at most p - rank in flight. 2006.09503."""
    forwards, backwards = ([Op(kind, i) for i in range(m)] for kind in "FB")
    return [in_turn(forwards, backwards, p - rank - 1) for rank in range(p)]


def in_turn(forwards, backwards, warm):
    """`warm` forwards, then one forward and one backward in turn, then what is left of the backwards."""
    pairs = itertools.zip_longest(forwards[warm:], backwards)
    return forwards[:warm] + [op for pair in pairs for op in pair if op]


# Interleaved. Rank r has v thin stages, r, r + p, ...: it waits for thin ones, so the bubble is (p - 1) / (v m), for v
# times the messages. p micro-batches go through a rank's first chunk, then the same p through the next. Of rank 0, with
# v = 2, forwards (micro-batch, chunk) are 00 10 20, 01 11 21, 30 40 50, 31 41 51; backwards begin with chunk 1. In this
# chart, of thin stages, a column is half as long as above:
#
#     01201234..aa5bb3cc4aa5bb.cc.dd.ee.ffddeeff
#     .012012.aa3bb4cc5aa3bb4cc5dd.ee.ffddeeff..
#     ..0120aa1bb2cc3aa4bb5cc3dd4ee5ffddeeff....


def interleaved(p, m, chunks=2):
    """1F1B over `chunks` thin stages a rank. ValueError unless m is a multiple of p. arXiv 2104.04473."""
    if m % p:
        raise base.BadInput(f"{m} micro-batches over {p} ranks: interleaving needs a multiple of {p}")

    laps = range(0, m, p)  # in a lap, p micro-batches go through all chunks
    forwards = [Op("F", lap + i, chunk) for lap in laps for chunk in range(chunks) for i in range(p)]
    backwards = [Op("B", op.micro, chunks - 1 - op.chunk) for op in forwards]
    return [in_turn(forwards, backwards, 2 * (p - rank - 1) + (chunks - 1) * p) for rank in range(p)]


# Zero bubble. The rank before waits for a backward's dX, nobody for its dW. Split them (B, W = 1 each; W is * below),
# hand dX on at once, and fill the waiting with W. ZB-H1 lets rank r make each W r turns later, so that none holds more
# than 1F1B's first rank does. Idle: (p - 1)(F + B - W), in work m (F + B + W), while W is no longer than F or than B,
# and m >= p.
#
#     012..a*3b*4c*5d*e*f*
#     .01.a2b*3c*4d*5e*f**
#     ..0a1b2c*3d*4e*5f***


def zero_bubble(p, m):
    """1F1B whose B makes only what the rank before waits for, and whose W comes `rank` turns later. 2401.10241."""
    lists = []
    for rank, ops in enumerate(one_f_one_b(p, m)):
        later = []
        for op in ops:
            later.append(op)
            if op.kind == "B" and op.micro >= rank:
                later.append(Op("W", op.micro - rank))
        lists.append(later + [Op("W", i) for i in range(max(0, m - rank), m)])
    return lists


class Schedule(NamedTuple):
    """lists(p, m): the operations of each rank. bubble(p, m): idle time / work with F = B = W = 1 (zero-bubble's for
    m >= p). peak(p, m, rank): micro-batches (times chunks) in flight. chunks: thin stages a rank."""

    lists: object
    bubble: object
    peak: object
    chunks: int = 1


SCHEDULES = {
    "gpipe": Schedule(gpipe, lambda p, m: (p - 1) / m, lambda p, m, rank: m),
    "1f1b": Schedule(one_f_one_b, lambda p, m: (p - 1) / m, lambda p, m, rank: min(m, p - rank)),
    "interleaved": Schedule(interleaved, lambda p, m: (p - 1) / (2 * m),
                            lambda p, m, rank: min(2 * m, 2 * (p - rank - 1) + p + 1), 2),
    "zero-bubble": Schedule(zero_bubble, lambda p, m: (p - 1) / (3 * m), lambda p, m, rank: min(m, p)),
}


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
            raise base.BadInput(f"{len(left)} tasks wait for each other, the first is {left[0].name}: put it later")
        waiting = left
    return times


def span(tasks):
    """Seconds until all tasks are done."""
    return max((end for _, end in play(tasks).values()), default=0.0)


class Timeline(NamedTuple):
    """times {(kind, micro-batch, stage): (start, end)}, span of the whole, bubble: idle time / work of a rank, and the
    largest number of micro-batches (times chunks) that each rank held."""

    times: dict
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
    for rank, ops in enumerate(lists):
        for op in ops:
            stage = op.chunk * p + rank
            needs = {"F": (("F", op.micro, stage - 1),) * (stage > 0),
                     "B": (("F", op.micro, stage), *[("B", op.micro, stage + 1)] * (stage + 1 < stages)),
                     "W": (("B", op.micro, stage),)}[op.kind]
            tasks.append(Task((op.kind, op.micro, stage), (rank,), cost[op.kind], needs))
        held = itertools.accumulate((op.kind == "F") - (op.kind == last) for op in ops)
        peak.append(max(held))
    # A wire has no names either: what a rank receives must come in the order in which the sender makes it.
    made = {task.name: i for i, task in enumerate(tasks)}
    for rank, (kind, step) in itertools.product(range(p), dict(F=-1, B=+1).items()):
        received = [made[need] for task in tasks if task.on == (rank,) and task.name[0] == kind
                    for need in task.needs if need[0] == kind and need in made]
        if received != sorted(received):
            raise base.BadInput(f"rank {(rank + step) % p} sends results of {kind} in another order than is wanted")
    times = play(tasks)
    total, work = max(end for _, end in times.values()), max(sum(cost[op.kind] for op in ops) for ops in lists)
    return Timeline(times, total, total / work - 1, peak)


def chart(lists, cost):
    """A row a rank, a column a unit of time: forwards are digits, backwards letters, W is *, waiting is a dot."""
    timeline = simulate(lists, cost)
    rows = [["."] * round(timeline.span) for _ in lists]
    for (kind, micro, stage), times in timeline.times.items():
        begin, end = map(round, times)
        sign = {"F": str(micro % 10), "B": chr(97 + micro % 26), "W": "*"}[kind]
        rows[stage % len(lists)][begin:end] = sign * (end - begin)
    return ["".join(row) for row in rows]


# Now for the real thing. A stage's linear layers do not make dW in backward themselves, they leave the product to a
# queue, which does it at once, or holds it until W. The sums are the same in the same order: gradients come out equal
# bit for bit whatever the schedule.


class WeightQueue:
    """Where linear layers leave the weight half of their backward: it is done at once, or put in the list `waiting`."""

    waiting = None

    def put(self, work):
        work() if self.waiting is None else self.waiting.append(work)


class _SplitLinear(torch.autograd.Function):
    """x W^T, whose backward gives dX, and dW to the queue."""

    @staticmethod
    def forward(ctx, x, W, queue):
        ctx.queue, ctx.weight, ctx.dtype = queue, W, x.dtype  # the parameter itself, for its .grad
        x = as_product(x)
        ctx.save_for_backward(x, W)
        return F.linear(x, W.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, W), weight = ctx.saved_tensors, ctx.weight
        dY, X = dy.flatten(0, -2), x.flatten(0, -2)  # (N, M), (N, K)

        def add():
            if weight.grad is None:
                weight.grad = (dY.T @ X).to(weight.dtype)
            elif X.dtype == weight.dtype:
                weight.grad.addmm_(dY.T, X)
            else:  # 16-bit products of fp32 weights
                weight.grad += dY.T @ X

        if ctx.needs_input_grad[1]:
            ctx.queue.put(add)
        return (dy @ W.to(dy.dtype)).to(ctx.dtype), None, None


class Stage(nn.Module):
    """Stage `index` of `count` of a GPT: its share of the blocks; the first also embeds and normalises, the last
    normalises and has the classifier. Linear layers leave dW to `queue`. A tied classifier is two copies here, whose
    gradients somebody has to sum. ValueError for layers with a bias, and for those that lean() or tensor_parallel
    changed: Stage replaces their forward, and with it their sums."""

    def __init__(self, model, index, count, queue):
        super().__init__()
        start, stop = shares(len(model.blocks), count)[index]
        self.blocks = model.blocks[start:stop]
        self.cos, self.sin = model.cos, model.sin
        if index == 0:
            self.embedding = model.embedding
        if index == count - 1:
            self.norm, self.classifier = model.norm, model.classifier
        linears = [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]
        if any(hasattr(linear.weight, "cut") for linear in linears):
            raise base.BadInput("a stage of layers that are cut (tensor_parallel): use pp with dp alone")
        if any(isinstance(block.forward, LeanLayer) for block in self.blocks):
            raise base.BadInput("a stage of lean layers: they hand on a stream and a branch: leave lean() out")
        for linear in linears:
            refuse_bias(linear)
            linear.forward = lambda x, linear=linear: _SplitLinear.apply(x, linear.weight, queue)

    def forward(self, x):
        if x.shape[1] > len(self.cos):
            raise base.BadInput(f"{x.shape[1]} positions: this model was built for seq = {len(self.cos)}")
        x = base.GPT.embed(self, x) if hasattr(self, "embedding") else x  # of tokens (B, T), the stream (B, T, D)
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return self.norm(x) if hasattr(self, "norm") else x


# Wires. NCCL does what is asked of one group in that order, one thing after the other: if rank 0 waits in "receive B of
# micro-batch 0", its own send behind that does not start, and rank 1, which waits for it, never sends B. So a rank
# must only send, or only receive, on each group that it has, in the lists' order. Ranks alternate:
#
#     p = 4   F, even senders    0 -> 1      2 -> 3          p = 3   F, even senders    0 -> 1
#             F, odd senders          1 -> 2      3 -> 0             F, odd senders          1 -> 2
#             B  the same, the other way                             F, the last one             2 -> 0
#
# (p - 1 -> 0 is for interleaved chunks. With p odd, rank 0 would both send and receive on the even wire.)


def wires_of(groups):
    """{(kind, 0, 1 or 2 for even, odd, last senders): a group of the whole pipeline}. Made once, by all ranks."""
    if not groups.wires:
        colors = range(2 + size(groups.pp) % 2)
        groups.wires.update({(kind, color): along(groups.mesh, 0) for kind in "FB" for color in colors})
    return groups.wires


class Neighbours:
    """What a rank sends to the stages before and after, and receives. A send waits for nobody."""

    def __init__(self, groups, like):
        self.wires, self.p, self.rank = wires_of(groups), size(groups.pp), rank_in(groups.pp)
        self.like, self.sending = like, []

    def wire(self, kind, source):
        return self.wires[kind, 2 if self.p % 2 and source == self.p - 1 else source % 2]

    def send(self, kind, tensor, to):
        tensor = tensor.contiguous()
        self.sending = [pair for pair in self.sending if not pair[0].is_completed()]  # tensors live until they are sent
        self.sending.append((dist.isend(tensor, group=self.wire(kind, self.rank), group_dst=to % self.p), tensor))
        sent["send"] += tensor.nbytes

    def receive(self, kind, source):
        tensor = torch.empty_like(self.like)
        dist.recv(tensor, group=self.wire(kind, source % self.p), group_src=source % self.p)
        return tensor

    def wait(self):
        for work, _ in self.sending:
            work.wait()


def run_pipeline(ops, stages, queue, inputs, loss, groups, like):
    """Do this rank's list of operations: gradients are left in the parameters, and the sum of the losses is returned (0
    on ranks without the last stage).

    stages: [module] a chunk. inputs: [micro-batch] for the first stage, all of one shape. loss(y, i): scalar, of the
    last stage's output for micro-batch i, its share of the whole loss. groups: of make_groups(pp=...). like: an empty
    tensor of the shape, dtype and device of what stages hand on. A receive waits, where its operation begins.
    ValueError for chunks on one rank, and for inputs of several shapes."""
    p, rank, total = size(groups.pp), rank_in(groups.pp), 0.0
    split, ends = any(op.kind == "W" for op in ops), p * len(stages) - 1
    alive, weights = {}, {}  # {(micro-batch, chunk): what its F leaves for B; what its B leaves for W}
    if p == 1 and len(stages) > 1:
        raise base.BadInput(f"{len(stages)} chunks on one rank: there is nobody to send to: pass one chunk")
    if len(shapes := {tuple(x.shape) for x in inputs}) > 1:
        raise base.BadInput(f"micro-batches of shapes {sorted(shapes)}: stages hand on one shape: make them equal")
    others = Neighbours(groups, like)

    for op in ops:
        stage, key = op.chunk * p + rank, (op.micro, op.chunk)
        if op.kind == "F":
            x = inputs[op.micro] if stage == 0 else others.receive("F", rank - 1).requires_grad_()
            y = stages[op.chunk](x)
            if stage == ends:
                y = loss(y, op.micro)
                total += y.detach()
            else:
                others.send("F", y.detach(), rank + 1)
            alive[key] = x, y
        elif op.kind == "B":
            x, y = alive.pop(key)
            queue.waiting = [] if split else None
            y.backward(None if stage == ends else others.receive("B", rank + 1))
            if stage:
                others.send("B", x.grad, rank - 1)
            weights[key], queue.waiting = queue.waiting, None
            del x, y  # and what they keep
        else:
            works = weights.pop(key)
            while works:
                works.pop(0)()  # each lets go of its factors
    others.wait()
    return total


# ==== 7. Context parallel: the positions of one sequence on different ranks ===========================================
#
# A sequence of a million tokens does not fit, so its positions are cut over n ranks. All of a layer is a matter of one
# position, except attention, where each query needs the keys and values of all positions before it. These go round a
# ring: n - 1 times a rank sends on the block it has and computes with it meanwhile. No rank ever has all.
#
#     step 0    rank 0: q0 with kv0    rank 1: q1 with kv1    rank 2: q2 with kv2
#     step 1            q0 with kv2            q1 with kv0            q2 with kv1      each block moves one rank on
#     step 2            q0 with kv1            q1 with kv2            q2 with kv0
#
# Formulas. A block of keys gives a softmax over these keys alone, and its log-sum-exp; two such are one over both
# (merge): out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse), lse = log(e^lse_a + e^lse_b), as 02 joins blocks of
# classes. (Of lse 1 and lse 3: 12 % of the one, 88 % of the other, and lse 3.13.)
# Backward, with S = Q K^T / sqrt(d), P = e^(S - lse) of the FINAL lse, and dO the gradient of out:
#     dV = P^T dO     dP = dO V^T     dS = P (dP - rowsum(dO out))     dQ = dS K / sqrt(d)     dK = dS^T Q / sqrt(d)
# Every block's part follows from its own keys and two numbers a query, lse and rowsum(dO out). Keys and values go round
# again, and dK, dV with them, growing, until they are home.
#
# Zigzag. Under a causal mask position t has t + 1 keys, so the rank with the last positions has most of the work, and
# all others wait for it. Cut into 2 n chunks and give each rank one from the front and its mirror image from the back:
#
#     n = 4, chunks          0  1  2  3  4  5  6  7      pairs of chunks, of 36         slowest / mean
#     contiguous, ranks      0  0  1  1  2  2  3  3      3   7   11  15                 1.67
#     zigzag, ranks          0  1  2  3  3  2  1  0      9   9   9   9                  1
#
# In production: torch's context_parallel() swaps attention, under a context manager, for one that gathers keys and
# values, or passes them on (set_rotate_method), in zigzag order; TransformerEngine has kernels that merge in place.


def chunks_of(rank, n, zigzag):
    """The chunks of the sequence that a rank has: chunk `rank` of n; or, of 2 n, one and its mirror image."""
    return [rank, 2 * n - 1 - rank] if zigzag else [rank]


def split_sequence(x, group, zigzag=True, dim=1):
    """This rank's positions of x (B, T, ...). ValueError if T cannot be cut into chunks of equal length."""
    if group is None:
        return x
    n = size(group)
    pieces = n * (2 if zigzag else 1)
    if x.shape[dim] % pieces:
        raise base.BadInput(f"{x.shape[dim]} positions in {pieces} chunks: pad the sequence to a multiple of {pieces}")
    chunks = x.chunk(pieces, dim)
    return torch.cat([chunks[c] for c in chunks_of(rank_in(group), n, zigzag)], dim)


def attention_work(T, n, zigzag):
    """Pairs of query and key that each rank computes for a causal sequence of T positions."""
    width = T // (n * (2 if zigzag else 1))
    return [sum(width * (width + 1) // 2 + c * width * width for c in chunks_of(rank, n, zigzag)) for rank in range(n)]


def block_scores(q, k, causal):
    """(B, H, Tq, Tk); causal: of a block on the diagonal, whose queries and keys are the same positions."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf) if causal else scores


def block_attention(q, k, v, causal):
    """q (B, H, Tq, d), k, v (B, H, Tk, d) -> attention over these keys alone (B, H, Tq, d) and its lse (B, H, Tq)."""
    if has_kernel(q, k):
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)[:2]
        return out, lse.squeeze(-1)
    q, k, v = wide(q, k, v)
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1)  # (B, H, Tq)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def block_gradients(dout, q, k, v, out, lse, causal):
    """dq, dk, dv of one block of keys, given out and lse over ALL keys."""
    if has_kernel(q, k):
        no_seed, lengths = torch.zeros((), dtype=torch.int64, device=q.device), (q.shape[2], k.shape[2])
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, *lengths, 0.0, causal)
    dout, q, k, v, out = wide(dout, q, k, v, out)
    P = (block_scores(q, k, causal) - lse.unsqueeze(-1)).exp()  # (B, H, Tq, Tk)
    dS = P * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return dS @ k, dS.mT @ q, P.mT @ dout


def has_kernel(q, k):
    """Whether cuDNN's attention does a block: torch's public function does not give the lse, so the private one of its
    fused kernels is called, by all of its arguments (no mask, dropout 0 and the seeds it would have had). In 16 bits,
    and not for single queries or keys, which it refuses."""
    fits = q.dtype in (torch.bfloat16, torch.float16) and min(q.shape[2], k.shape[2]) > 1
    return q.is_cuda and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def sum_dtype(tensor):
    """Of what is summed or merged over blocks: fp32, or fp64 as it is, since a rounding in each would add up."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wide(*tensors):
    return [t.to(sum_dtype(t)) for t in tensors]


def merge(a, b):
    """Attention over two sets of keys, each (out, lse), the first in fp32 or wider, as one over their union."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    share = (lse_b - lse).exp().unsqueeze(-1)  # of b; a has the rest
    return torch.lerp(out_a, *(t.to(out_a.dtype) for t in (out_b, share))), lse


def pass_on(x, group):
    """Start to send x to the next rank of the ring and to receive the previous one's; (what will arrive, handles)."""
    n, rank = size(group), rank_in(group)
    x, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    swap = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % n)]
    sent["send"] += x.nbytes
    return arriving, (dist.batch_isend_irecv(swap), x)


def arrive(handles):
    for work in handles[0]:
        work.wait()


def in_chunks(k, v, count):
    """Keys and values (B, H, T/n, d) as (count, 2, B, H, T/n / count, d): each chunk in one piece of memory, where
    kernels need no strides."""
    chunks = itertools.chain(*zip(k.chunk(count, 2), v.chunk(count, 2), strict=True))
    return torch.stack(tuple(chunks)).unflatten(0, (count, 2))


def pairs(mine, theirs):
    """(i, j): my i-th chunk of queries sees their j-th chunk of keys, which is here now."""
    return [(i, j) for i, a in enumerate(mine) for j, b in enumerate(theirs) if b <= a]


class _RingAttention(torch.autograd.Function):
    """Keys and values go round the ring while each rank computes with those it has; in backward they go round again,
    and their gradients with them, home."""

    @staticmethod
    def forward(ctx, q, k, v, group, zigzag):
        n, rank = size(group), rank_in(group)
        mine = chunks_of(rank, n, zigzag)
        Q = q.chunk(len(mine), 2)  # (B, H, T/n or T/2n, d) each
        found = [None] * len(mine)
        kv = in_chunks(k, v, len(mine))
        for step in range(n):
            theirs = chunks_of((rank - step) % n, n, zigzag)  # whose keys are here now
            if step < n - 1:
                arriving, handles = pass_on(kv, group)
            for i, j in pairs(mine, theirs):
                out, lse = block_attention(Q[i], *kv[j], causal=mine[i] == theirs[j])
                found[i] = merge(found[i], (out, lse)) if found[i] else (*wide(out), lse)
            if step < n - 1:
                arrive(handles)
                kv = arriving
        out = torch.cat([out for out, _ in found], 2).to(q.dtype)
        lse = torch.cat([lse for _, lse in found], 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        group, zigzag, sums = ctx.group, ctx.zigzag, sum_dtype(q)
        n, rank = size(group), rank_in(group)
        mine = chunks_of(rank, n, zigzag)
        dout, Q, out, lse = (t.contiguous().chunk(len(mine), 2) for t in (dout, q, out, lse))
        dQ = [torch.zeros(part.shape, dtype=sums, device=q.device) for part in Q]
        kv, returning, travelling = in_chunks(k, v, len(mine)), None, None
        for step in range(n):
            theirs = chunks_of((rank - step) % n, n, zigzag)
            if step < n - 1:
                arriving, handles = pass_on(kv, group)
            dkv = torch.zeros(kv.shape, dtype=sums, device=kv.device)  # my queries' part of their keys' gradients
            for i, j in pairs(mine, theirs):
                causal = mine[i] == theirs[j]
                parts = block_gradients(dout[i], Q[i], *kv[j], out[i], lse[i].contiguous(), causal)
                for total, part in zip((dQ[i], *dkv[j]), parts, strict=True):
                    total.add_(part)
            if travelling:  # what the ranks before have made of it
                arrive(travelling)
                dkv += returning
            if n > 1:
                returning, travelling = pass_on(dkv, group)
            if step < n - 1:
                arrive(handles)
                kv = arriving
        if n > 1:
            arrive(travelling)
            dkv = returning
        dk, dv = dkv.to(k.dtype).unbind(1)  # (chunks, B, H, T, d) each
        return *(torch.cat(tuple(x), 2) for x in ([part.to(q.dtype) for part in dQ], dk, dv)), None, None


def ring_attention(q, k, v, group, zigzag=True):
    """Causal attention of this rank's positions (as split_sequence cuts them) over those of all ranks. q, k, v
    (B, H, T/n, d) -> (B, H, T/n, d). Differentiable once; every rank of the group calls it, and its backward."""
    return _RingAttention.apply(q, k, v, group, zigzag)


def context_parallel(model, group, zigzag=True):
    """Give a GPT of 01 ring attention and this rank's positions, in place: it then takes split_sequence(tokens) of
    whole sequences of config.seq tokens. A rank's gradients are of its tokens: sum them with data_parallel."""
    model.cos, model.sin = (split_sequence(angles, group, zigzag, dim=0) for angles in (model.cos, model.sin))

    def attend(q, k, v):
        if q.shape[2] != len(model.cos):
            raise base.BadInput(f"{q.shape[2]} positions on a rank, not {len(model.cos)}: pass split_sequence of "
                                f"sequences of {model.config.seq}")
        return ring_attention(q, k, v, group, zigzag)

    for block in model.blocks:
        block.attend = attend


# ==== 8. Memory instead of ranks: make it again, keep less, or put it somewhere else ==================================
#
# What forward keeps for backward, 18 D elements a token and layer (01), is most of training's memory. Three ways to
# have less of it on one GPU, and what they cost:
#
#     recompute    keep each layer's input, run its forward again in backward      1 D          a third more FLOPs
#     lean         make again only what costs next to nothing: norms, gelu         10 D         none: it is faster
#     Offload      copy it to host memory while forward goes on, fetch it back     in flight    the link's time
#
# In production: torch.utils.checkpoint (used here) and its selective policies; torch.compile's partitioner, which
# chooses what to make again by a minimum cut of the graph; save_on_cpu, which copies without prefetching.


def recompute(model):
    """Keep only each block's input for backward, and run the block's forward again there. (Under sequence parallelism
    column_linear keeps its inputs besides.) arXiv 1604.06174."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


# Lean layers. Between its matrices a layer does little arithmetic on much memory. 01's layer beside the lean one; in
# brackets, what a line leaves for backward, in D elements a token:
#
#     x = x + branch              [1]      x, n = add_normed(x, branch)      [x 1]            one kernel
#     n = norm1(x)                [1]
#     y = qkv(n)                           y = qkv(n)                        [n is made from x again]
#     q, k, v = split(y)          [3]      q, k, v = Turned(y)               [q, k, v 3]      one kernel
#     q, k = turn(normalise(q, k))[2]
#     a = attention(q, k, v)      [1]      a = attention(q, k, v)            [1]
#     branch = proj(a)                     branch = proj(a)                  its sum is the next line's
#     x = x + branch              [1]      x, n = add_normed(x, branch)      [x 1]            one kernel
#     n = norm2(x)                [1]
#     h = up(n)                   [4]      h = up(n)                         [h 4]
#     g = gelu(h)                 [4]
#     branch = down(g)                     branch = GeluLinear(h)            [gelu(h) is made again]
#                            18                                          10
#
# So between lean layers the stream travels as x and a branch that the next norm adds. What torch.compile can fuse, it
# fuses; the turning of q and k, which cuts y into heads, has a kernel of its own.


class Pending(NamedTuple):
    """A stream x (B, T, D), to which a branch (B, T, D) has yet to be added."""

    x: torch.Tensor
    branch: torch.Tensor


def normed(x, weight, dtype):
    """RMSNorm of the stream x (B, T, D), in the dtype of the product that follows."""
    return F.rms_norm(x, weight.shape, weight).to(dtype)


def add_normed(x, branch, weight, dtype):
    """The stream with a layer's branch added, and the norm of that."""
    x = x + branch
    return x, normed(x, weight, dtype)


# Turning. With y = r x of one head, r = 1 / root mean square of x, the mean square of y is 1 and
#     dx = r (dy - y mean(y dy)).
# Turning rotates pairs, which changes no mean and is undone by the opposite angle. So backward takes y and dy as they
# are, turned, and needs nothing of x but r: the kernel keeps one number a head, and x dies.


@triton.jit
def turn_kernel(
    qkv, q, k, v, turned_q, turned_k, scales, cos, sin, T, H, HALF, BACK: tl.constexpr, HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program is one token, whose q, k and v lie head by head in qkv (B, T, H, 3, D/H), and each in a tensor of its
    own (B, T, H, D/H). Forward copies there; q and k are divided by their root mean squares and turned by the angle of
    the position, and what they were multiplied by is written to scales (2, B, T, H). BACK makes of the gradients q, k,
    v that of qkv, by turned_q and turned_k, what forward made."""
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
    @once_differentiable
    def backward(ctx, *gradients):
        *turned, scales = ctx.saved_tensors
        *parts, q, k = (t.transpose(1, 2).contiguous() for t in (*gradients, *turned))  # (B, T, H, D/H)
        B, T, H, head = q.shape
        dqkv = q.new_empty(B, T, 3 * H * head)
        turn(dqkv, parts, (q, k), scales, *ctx.angles, back=True)
        return dqkv, None, None, None


# GELU, x Phi(x), of 16 bits. What F.gelu takes is not the memory's time but erf's, some 40 instructions an element:
# 0.29 ms for 0.8 GB, which the memory moves in 0.19. A shorter formula for the tail of the normal distribution is off
# by 1e-7, where bf16 rounds at 4e-3 (Abramowitz and Stegun 7.1.26; F.gelu, in fp32, is off by 6e-8 in the tails):
#     1 - Phi(x) = bell t (a1 + a2 t + ... + a5 t^4) / 2         t = 1 / (1 + 0.23164 x),  bell = exp(-x^2/2),  x >= 0
#     x Phi(x)   = max(x, 0) - |x| (1 - Phi(|x|))                of either sign
# Bell over sqrt(2 pi) is the density phi, which the gradient, Phi + x phi, needs as well. Some of the time is to be had
# by how it is written: a division takes ten instructions, a root's reciprocal, squared, two; (s + a) t two, s t + a one
# (0.23 ms; the gradient's kernel is the memory's anyway).

TAIL = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def tail_and_bell(x):
    """1 - Phi(|x|) of the normal distribution, and exp(-x^2/2)."""
    root, bell = torch.rsqrt(1 + 0.3275911 / math.sqrt(2) * x.abs()), torch.exp(-0.5 * x * x)
    t, series = root * root, TAIL[-1] / 2
    for a in reversed(TAIL[:-1]):
        series = series * t + a / 2
    return series * t * bell, bell


def gelu(h):
    x = h.float()
    return (x.relu() - x.abs() * tail_and_bell(x)[0]).to(h.dtype) if h.dtype == torch.bfloat16 else F.gelu(h)


def gelu_back(h, gradient):
    """gelu(h), and the gradient of h, in the memory of h and of the gradient of gelu(h): at the end of forward, when
    memory is fullest, these are the largest tensors of a layer."""
    if h.dtype == torch.bfloat16:
        x = h.float()
        tail, bell = tail_and_bell(x)
        below = torch.where(x < 0, tail, 1 - tail)
        made, dh = x * below, gradient.float() * (below + x * bell * (1 / math.sqrt(2 * math.pi)))
    else:
        made, back = torch.func.vjp(F.gelu, h)
        (dh,) = back(gradient)
    return h.copy_(made), gradient.copy_(dh)


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
        h, dY = h.detach(), dy.reshape(-1, len(weight))  # (N, M); a second backward pass is told that h was used
        made, dh = gelu_back(h, (dY @ weight.to(dY.dtype)).view_as(h))  # dX is from before the step
        product = forging.Product(dY, made.reshape(-1, weight.shape[1]))
        if not cce.wanted(ctx, 1):
            return dh, *[None] * 4
        dW = forging.weight_update(state, product) if state else (product.dY.T @ product.X).to(weight.dtype)
        return dh, dW, *[None] * 3


class LeanLayer:
    """What lean() puts in place of block.forward, `plain`. fused: functions that are one kernel each."""

    def __init__(self, block, fused, remake, kernel):
        self.block, self.plain, self.fused, self.remake, self.kernel = block, block.forward, fused, remake, kernel

    def __call__(self, stream, cos, sin):
        block = self.block
        if not torch.is_grad_enabled():  # nothing to keep, and shapes that vary
            return self.plain(stream, cos, sin)
        x, qkv = self.norm_linear(stream, block.norm1.weight, block.qkv)
        q, k, v = Turned.apply(qkv, cos, sin, block.head) if self.kernel else block.heads(qkv, cos, sin)
        branch = block.proj(block.attend(q, k, v).transpose(1, 2).flatten(2))
        if not hasattr(block, "up"):  # 07's experts stay what they are
            x = x + branch
            return self.onward(x, block.mlp(block.norm2(x)))
        x, h = self.norm_linear(Pending(x, branch), block.norm2.weight, block.up)
        return self.onward(x, self.gelu_linear(h, block.down))

    def norm_linear(self, stream, weight, linear):
        """The stream x, whole, and linear(n) of its norm n, which is made again from x for the gradient of linear."""
        x, n = add_or_norm(self.fused, stream, weight)
        if not self.remake:
            return x, linear(n)
        kept, gain, dtype = x.detach(), weight.detach(), n.dtype
        with saved_as(n, lambda: self.fused.norm(kept, gain, dtype)):
            return x, linear(n)

    def gelu_linear(self, h, linear):
        if not self.remake:
            return linear(self.fused.gelu(h))
        state = getattr(linear, "forged", None)
        y = GeluLinear.apply(h, linear.weight, self.fused.gelu, self.fused.gelu_back, state)
        if state:
            state.on_forward(linear.weight)
        return linear.leave(y) if hasattr(linear, "leave") else y

    def onward(self, x, branch):
        return Pending(x, branch) if self.remake else x + branch  # recompute() keeps what it is given: one tensor


def add_or_norm(fused, stream, weight):
    """A stream, whole or Pending: (x, its norm in the dtype of the product that follows)."""
    if isinstance(stream, Pending):
        return fused.add_norm(*stream, weight, forging.compute_dtype(stream.x))
    return stream, fused.norm(stream, weight, forging.compute_dtype(stream))


def lean(model, compiled=True, remake=True, kernel=None):
    """Fuse what lies between the matrices of a GPT of 01, by torch.compile and turn_kernel, and with `remake` keep 10 D
    elements a token and layer in place of 18; of the embedding, unless it is cut over ranks, the tokens alone.

    Together with recompute() or Offload pass remake=False: what `remake` keeps, they would not see. With it no hooks of
    `down` run. Under sequence parallelism column_linear keeps the norms. E comes out in the products' dtype. For
    training alone: without gradients, where shapes vary, the model runs as it was. kernel: whether q and k are turned
    by turn_kernel (on GPUs with Triton)."""
    fuse = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda function: function
    fused = SimpleNamespace(norm=fuse(normed), add_norm=fuse(add_normed), gelu=fuse(gelu), gelu_back=fuse(gelu_back))
    if kernel is None:
        kernel = base.HAS_TRITON and not base.INTERPRETED and model.cos.is_cuda

    def embed(plain, tokens):
        if not (remake and torch.is_grad_enabled()) or hasattr(model.embedding.weight, "cut"):
            return plain(tokens)
        x = model.embedding(tokens)  # (B, T, D)
        with saved_as(x, lambda: model.embedding(tokens)):  # backward looks them up again
            return base.rms_norm(x)

    def last(plain, stream):
        return add_or_norm(fused, stream, model.norm.weight)[1] if torch.is_grad_enabled() else plain(stream)

    for block in model.blocks:
        block.forward = LeanLayer(block, fused, remake, kernel)
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


# Offload. Backward wants what forward saved in the reverse order: what is saved first is wanted last, and has all the
# time to go away and come back. One thread copies, in order, in both directions:
#
#     GPU   | forward 1 | forward 2 | forward 3 | backward 3        | backward 2        | backward 1        |
#     link        | out 1     | out 2     | out 3     | in 2      | in 1      |
#                                               `--- out 3 is still on its way when backward asks: used where it is
#
# It loses here: 384 ms for a step of 12 layers of D = 2048 that takes 76 without it, 98 recomputed (README), as 9 GB
# go out and come back over a link that the GPU outruns by far. It pays where there is no choice, or the GPU is slow.
#
# In-place edits. A copy is of the tensor as it was saved. If somebody writes to it while the copy is being made, the
# copy may be half old, half new. Autograd counts writes (tensor._version) for the same reason; so do we, and raise.


class Offload(saved_tensors_hooks):
    """A context for the forward pass: what autograd saves is copied elsewhere while forward goes on, and its memory
    given back; backward, which reads it in the reverse order, finds it prefetched.

        offload = Offload(model, folder)
        with offload:
            loss = model(x)...
        loss.backward()
        offload.close()

    On a GPU copies go to pinned host memory; on a CPU, whose memory that is, to files in `folder`. A storage goes once,
    whatever operations or views save it. Weights stay, and what is smaller than LEAST bytes. ahead: how many copies may
    wait to be written before forward does, and how many are fetched before they are asked for. counts: tensors saved,
    storages, bytes, forwarded (used before they were away), late (not yet asked for when backward wanted them). Use one
    a step: its copies live until close(). ValueError for a folder on a GPU, or none on a CPU. RuntimeError, in backward
    or at a later save, if a tensor was written to while its original was still there; and for a second backward pass.
    SSDTrain arXiv 2408.10013."""

    LEAST = 2**14

    def __init__(self, model, folder=None, ahead=8):
        device = next(model.parameters()).device
        on_cpu = device.type == "cpu"
        if on_cpu and (folder is None or not Path(folder).is_dir()):
            raise base.BadInput(f"offload on a CPU: {folder} is no folder: make one to write to, and pass it")
        if folder is not None and not on_cpu:
            raise base.BadInput("offload on a GPU goes to host memory: leave the folder out")
        self.stay = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.folder, self.ahead, self.counts = folder, ahead, Counter()
        self.stream = None if on_cpu else torch.cuda.Stream(device)  # beside the one that computes
        self.copies, self.known, self.flying = [], {}, []  # all; by storage and version; those not yet settled
        self.thread = ThreadPoolExecutor(1)  # one, so that copies are written and read in the order they are asked for
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.stay or storage.nbytes() < self.LEAST:
            return tensor
        key = storage._cdata, tensor._version
        self.counts["tensors"] += 1
        if key not in self.known:
            self.known[key] = copy_ = StorageCopy(len(self.copies), tensor, self)
            on_death(storage, self.known.pop, key, None)  # before its address means something else
            self.copies.append(copy_)
            self.flying.append(copy_)
            self.counts.update(storages=1, bytes=storage.nbytes())
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

    def close(self):
        """Wait for copies that are still being made; delete the files, or give the host memory back."""
        self.thread.shutdown()
        for saved in self.copies:
            if isinstance(saved.away, Path):
                saved.away.unlink(missing_ok=True)
            saved.away, saved.uses = None, 0


class StorageCopy:
    """One storage: in its own memory while it is written, then in host memory or a file, then fetched."""

    def __init__(self, number, tensor, owner):
        self.number, self.owner, self.uses, self.fetched, self.device = number, owner, 0, None, tensor.device
        self.original, self.version = tensor.detach(), tensor._version  # detached, but writes are counted in both
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.size = whole.nbytes
        self.away = owner.folder and Path(owner.folder, f"{os.getpid()}.{id(owner)}.{number}.saved")
        self.written = owner.thread.submit(self.write, whole, mark(tensor.device))

    def write(self, original, event):
        if self.device.type == "cpu":
            original.numpy().tofile(self.away)
            return
        with torch.cuda.stream(self.owner.stream):
            event.wait()
            self.away = torch.empty(self.size, dtype=torch.uint8, pin_memory=True).copy_(original, non_blocking=True)
            self.owner.stream.synchronize()

    def same(self):
        if self.original._version != self.version:
            raise RuntimeError("a saved tensor was written to before it was copied: use no operation in place")

    def settle(self):
        """The copy is there: let go of the original."""
        self.written.result()
        self.same()
        self.original = None

    def prefetch(self):
        if self.uses > 0 and self.original is None and self.fetched is None:
            target = torch.empty(self.size, dtype=torch.uint8, device=self.device)
            self.fetched = self.owner.thread.submit(self.read, target, mark(self.device))

    def read(self, target, event):
        if self.device.type == "cpu":
            with self.away.open("rb") as file:
                file.readinto(target.numpy())
        else:
            with torch.cuda.stream(self.owner.stream):
                event.wait()
                target.copy_(self.away, non_blocking=True)
                self.owner.stream.synchronize()
        return target

    def get(self):
        """The storage, for one of those who saved it."""
        if self.uses < 1:
            raise RuntimeError("Offload keeps what one backward pass needs: a second one needs another forward pass")
        if self.original is not None:
            self.same()
            self.owner.counts["forwarded"] += 1
            found = self.original
        else:
            self.owner.counts["late"] += self.fetched is None
            self.prefetch()
            found = self.fetched.result()
        self.uses -= 1
        if self.uses == 0:
            self.original = self.fetched = None
        return found.untyped_storage()


def mark(device):
    """An event on the current stream of a GPU: what was asked for before it is done when it is."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


# ==== 9. Uneven documents: matrices cost by the token, attention by the square of its document ========================
#
# A batch is documents of very different lengths. With a seconds for a token in the matrices, and b for a pair of query
# and key, a layer takes the rank that has them
#     tokens a + pairs b          pairs of a document of s tokens: s (s + 1) / 2, as row i sees i + 1 keys
# Equal tokens for all are easy: lay the documents end to end, and cut. But 64 documents of 1k tokens have 1/64 of the
# pairs of one of 64k: with equal tokens attention is uneven, and all ranks wait for the one with the longest document.
# Of 6 and 2 tokens over two ranks:
#
#     rank 0   rows 0..3 of document 0     1 + 2 + 3 + 4 = 10 pairs
#     rank 1   rows 4, 5 of document 0     5 + 6 = 11 pairs; and the keys of rows 0..3, from rank 0
#              rows 0, 1 of document 1     1 + 2 = 3
#
# The ceiling. No policy does better than (all tokens a + all pairs b) / n, with messages that cost nothing. How much
# that is below what is usual says what there is to win: with documents of similar lengths 3 to 5 %, with groups as
# large as the longest document needs 5 % in the median. It is more where these are limited. The usual way, Ulysses,
# shares out a document's heads over a group by all-to-all, and there is nothing left to share out when each rank has
# one head of keys and values: Llama 3 has 8 of them, and with tensor parallelism over 2 ranks 4. So the arena below has
# 16 GPUs, groups of at most 8 (or 4), room for 65,536 tokens on each, and documents of up to all 262,144 tokens of a
# batch (lognormal, sigma = 2).
#
#     policy          in the matrices            in attention                        sends
#     fixed packing   n equal pieces, cut        the same rows                       keys, to the rows after
#     equal groups    groups of g; each takes    each rank a g-th of the heads       heads, in the group
#                     whole documents            of its group's documents
#     FlexSP          the same, but groups of several sizes: short documents in small ones, which send little or nothing
#     DistCA          n equal pieces, cut        its rows, but the last rows of      queries, keys; outputs back
#                                                documents go where work is lacking
#     Zeppelin        n equal pieces             rings, as many ranks as a document  rows, there and back; keys round
#                                                needs                               the ring
#
# "Equal groups", of the best size for the batch at hand, is the honest baseline. All policies are played by section 6's
# simulator with the same costs. A message between hosts uses all adapters of both hosts, not only those of its two
# ranks: that is one of Zeppelin's ideas, and we let all policies have it (without, DistCA is 11 % slower, and behind
# groups of 8).


class Links(NamedTuple):
    """Bytes a second out of each GPU: inside a host of `host` GPUs, and between hosts. Defaults: what an all-reduce
    over H200s' NVLink gets, and an adapter of 400 Gbit/s a GPU. hidden: the largest share of a message's time that is
    hidden under computation; measure_overlap finds half."""

    host: int = 8
    inside: float = 2.8e11
    between: float = 5e10
    hidden: float = 0.5

    def together(self, a, b):
        """Whether two ranks are in one host."""
        return a // self.host == b // self.host

    def seconds(self, nbytes, a, b):
        return nbytes / (self.inside if self.together(a, b) else self.between)


class Chip(NamedTuple):
    """peak: FLOP/s of dense bf16, and the shares of it that a large matrix product gets (product) and the FLOPs of a
    training step (reach); memory: bytes/s; joules of a FLOP and of a byte of memory traffic, and watts besides.
    Defaults: an H200's; peak by its data sheet, product and memory as measured alone, the rest by measure_plans."""

    peak: float = 989e12
    product: float = 0.68
    reach: float = 0.48
    memory: float = 4.2e12
    flop: float = 8.8e-13
    byte: float = 1.24e-10
    watts: float = 124.0


HOSTS, H200 = Links(), Chip()


class Costs(NamedTuple):
    """Seconds of a layer, forward and backward on one GPU: of a token in its matrices (a), and of a pair (b). Bytes of
    a token's query (or output), and of its key (or value), which are fewer where query heads share them."""

    token: float
    pair: float
    query: int
    key: int
    links: Links


def costs_of_layer(dim, shared=4):
    """Matrices of 12 D^2 weights, 6 FLOPs each; 12 D FLOPs a pair; bf16. shared: query heads a head of keys (Llama 3:
    4)."""
    speed = H200.peak * H200.reach
    return Costs(72 * dim**2 / speed, 12 * dim / speed, 2 * dim, 2 * dim // shared, HOSTS)


def lognormal_lengths(tokens, seed, longest, mu=8.0, sigma=2.0):
    """Lengths of documents, `tokens` in all, none above `longest`."""
    generator, lengths = torch.Generator().manual_seed(seed), []
    while sum(lengths) < tokens:
        length = int(torch.empty(()).log_normal_(mu, sigma, generator=generator).clamp(16, longest))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


def pairs_of(start, stop):
    """Pairs of rows start to stop of a causal document."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class Split(NamedTuple):
    """What a policy makes of a batch over n ranks: tokens [n] in the matrices; pairs [n] that can begin at once, early,
    and that wait for messages, late; moves {(from, to): bytes}, before attention, and as many back after it."""

    tokens: list
    early: list
    late: list
    moves: Counter

    def pairs(self):
        return [a + b for a, b in zip(self.early, self.late, strict=True)]


def empty_split(n):
    return Split([0] * n, [0] * n, [0] * n, Counter())


def layer_tasks(split, costs):
    """A layer for play(): messages there, attention, messages back, matrices; forward and backward as one. A rank sends
    and receives one message at a time; nothing is sent under the matrices."""
    n, links, tasks = len(split.tokens), costs.links, []

    def adapters(end, rank, far):
        return [(end, r) for r in range(n) if links.together(r, rank)] if far else [(end, rank)]

    def messages(kind, moves, needs):
        # In the order of an all-to-all: in turn k, every rank sends to the k-th after it.
        for (a, b), nbytes in sorted(moves.items(), key=lambda move: ((move[0][1] - move[0][0]) % n, move[0])):
            ends = [adapters(end, rank, not links.together(a, b)) for end, rank in (("sends", a), ("receives", b))]
            seconds = links.seconds(nbytes, a, b) / min(map(len, ends))
            tasks.append(Task((kind, a, b), (*ends[0], *ends[1]), seconds, needs(a)))

    def arrived(kind, rank):
        return tuple(task.name for task in tasks if task.name[0] == kind and task.name[2] == rank)

    messages("there", split.moves, lambda a: ())
    for r in range(n):
        tasks.append(Task(("early", r), (r,), split.early[r] * costs.pair))
        tasks.append(Task(("late", r), (r,), split.late[r] * costs.pair, arrived("there", r)))
    messages("back", {(b, a): nbytes for (a, b), nbytes in split.moves.items()}, lambda a: (("late", a),))
    for r in range(n):
        tasks.append(Task(("matrices", r), (r,), split.tokens[r] * costs.token, arrived("back", r)))
    return tasks


def layer_time(split, costs):
    return span(layer_tasks(split, costs))


# Fixed packing, and DistCA on top of it. Core attention, softmax(Q K^T) V, has no weights, so any rank can do any rows
# of it, if it is sent these queries and all keys up to them. The last rows of a document have the most pairs for their
# bytes: half of the pairs are in the last 30 % of the rows.
#
# Of 6 and 2 tokens over two ranks, as above, with 10 and 14 pairs, the mean is 12, so rank 1 can give 2. A row of
# document 0 is too much (6 pairs), and so are both of document 1 (3), but its last one is just right: its query, two
# keys and two values go to rank 0, its output comes back, and both have 12.


class Queries(NamedTuple):
    """Rows start to stop of a document's queries, which are on rank `home`."""

    document: int
    start: int
    stop: int
    home: int


def end_to_end(lengths, n):
    """The documents one after the other, cut into n pieces of equally many tokens: [Queries]."""
    rows, at = [], 0
    for document, length in enumerate(lengths):
        for home, (start, stop) in enumerate(shares(sum(lengths), n)):
            a, b = max(start, at), min(stop, at + length)
            if a < b:
                rows.append(Queries(document, a - at, b - at, home))
        at += length
    return rows


def fixed_packing(rows, n, costs):
    """Queries stay where their tokens are; keys and values come to them, and their gradients go back."""
    split, before = empty_split(n), {}
    for part in rows:
        earlier = before.setdefault(part.document, [])
        (split.late if earlier else split.early)[part.home] += pairs_of(part.start, part.stop)
        split.tokens[part.home] += part.stop - part.start
        for other in earlier:
            split.moves[other.home, part.home] += 2 * (other.stop - other.start) * costs.key
        earlier.append(part)
    return split


def disaggregate(rows, n, costs, tolerance=0.1, tile=1):
    """[(Queries, to)] whose attention is to be done elsewhere. Who lacks most takes first, until it is within the
    tolerance of the mean, and always the offer that is sent fastest for its pairs. Nobody gives below the mean or takes
    above it, so the largest load never grows. tile: cuts are at multiples of it, as kernels work on tiles. DistCA
    2510.18121 (which cuts off pairs of rows, one from the front and one from the back; we cut off last rows)."""
    load, left, moves = [0] * n, list(rows), []
    for part in rows:
        load[part.home] += pairs_of(part.start, part.stop)
    mean = sum(load) / n
    for to in sorted(range(n), key=load.__getitem__):
        while mean - load[to] > tolerance * mean:
            offers = []
            for i, part in enumerate(left):
                room = min(mean - load[to], load[part.home] - mean)
                start = max(part.start, math.ceil(first_row(part.stop, room) / tile) * tile)
                if start < part.stop:
                    piece, pairs = part._replace(start=start), pairs_of(start, part.stop)
                    offers.append((costs.links.seconds(moved_bytes(piece, costs), part.home, to) / pairs, i, piece))
            if not offers:
                break
            _, i, piece = min(offers)
            moves.append((piece, to))
            left[i] = left[i]._replace(stop=piece.start)
            load[to] += pairs_of(piece.start, piece.stop)
            load[piece.home] -= pairs_of(piece.start, piece.stop)
    return moves


def first_row(stop, room):
    """The smallest start for which rows start to stop have at most `room` pairs."""
    least = stop * (stop + 1) / 2 - room  # start (start + 1) / 2 is at least this
    return 0 if least <= 0 else math.ceil((math.sqrt(8 * least + 1) - 1) / 2 - 1e-9)


def moved_bytes(part, costs):
    """Bytes there, and as many back: queries and dO, keys and values; outputs and dq, dk and dv."""
    return 2 * (part.stop - part.start) * costs.query + 2 * part.stop * costs.key


def with_moves(rows, n, moves, costs):
    """Fixed packing with the attention of some rows done elsewhere. (Keys that their home has to receive before it can
    hand them on are taken to be there.)"""
    split, begins = fixed_packing(rows, n, costs), {part.document: part.home for part in rows if part.start == 0}
    for part, to in moves:
        pairs = pairs_of(part.start, part.stop)
        (split.early if begins[part.document] == part.home else split.late)[part.home] -= pairs
        split.late[to] += pairs
        split.moves[part.home, to] += moved_bytes(part, costs)
    return split


def only_what_helps(rows, n, moves, costs):
    """The first so many of `moves` that make the layer fastest: never slower than fixed packing, which is none."""
    some = [moves[:k] for k in range(len(moves) + 1)]
    return min(some, key=lambda moves: layer_time(with_moves(rows, n, moves, costs), costs))


# Groups of ranks, equal ones and FlexSP's. Documents of 20, 14 and 14 tokens, 210, 105 and 105 pairs, on four ranks of
# a host; a pair, a token and a byte take 1 s each, queries have 3 bytes and keys 1:
#
#     groups 1 1 1 1     the long one alone, 210 + 20                                   230 s
#     groups 2 2         both short ones by two, (210 + 28) / 2 and 112 of messages     231
#     groups 4           all by four, (420 + 48) / 4 and 144 of messages                261
#     groups 2 1 1       the long one by two, (210 + 20) / 2 and 80 of messages         195: FlexSP's way


def divisions(n, largest):
    """All ways to write n as a sum of powers of two up to `largest`, in descending order."""
    power = 1
    while power <= min(n, largest):
        for rest in divisions(n - power, power) if n > power else [()]:
            yield (power, *rest)
        power *= 2


def grouped(lengths, groups, costs, capacity):
    """Groups of ranks, each with whole documents, whose heads it shares out by all-to-all (Ulysses): the longest first,
    to the group that will be done first with it. None when a document finds no room for `capacity` tokens a rank."""
    tokens, pairs = [0] * len(groups), [0] * len(groups)
    each = costs.query + costs.key

    def seconds(i, length):
        """Of group i with one more document: its share of the work, and of the messages."""
        g, total = groups[i], tokens[i] + length
        sends = costs.links.seconds(4 * total * each * (g - 1) / g / g, 0, g - 1)
        return ((pairs[i] + pairs_of(0, length)) * costs.pair + total * costs.token) / g + sends

    for length in sorted(lengths, reverse=True):
        fits = [i for i, g in enumerate(groups) if tokens[i] + length <= g * capacity]
        if not fits:
            return None
        i = min(fits, key=lambda i: seconds(i, length))  # noqa: B023
        tokens[i] += length
        pairs[i] += pairs_of(0, length)
    split, first = empty_split(sum(groups)), 0
    for g, total, work in zip(groups, tokens, pairs, strict=True):
        ranks = range(first, first + g)
        for r in ranks:
            split.tokens[r] = total / g
            (split.late if g > 1 else split.early)[r] = work / g
        for a, b in itertools.permutations(ranks, 2):  # of a g-th of the heads, what moved_bytes() says
            split.moves[a, b] = 2 * total / g / g * each
        first += g
    return split


def best_groups(lengths, n, costs, capacity, largest, equal):
    """(seconds of a layer, groups, Split) of the best way to divide n ranks into groups of up to `largest`, of one size
    (equal) or of several. As all divisions are tried, the latter is never worse. ValueError when no division has room
    for the documents. FlexSP arXiv 2412.01523 (whose solver is a MILP)."""
    found = []
    for groups in divisions(n, largest):
        split = grouped(lengths, groups, costs, capacity) if len(set(groups)) == 1 or not equal else None
        if split:
            found.append((layer_time(split, costs), groups, split))
    if not found:
        raise base.BadInput(f"{sum(lengths)} tokens, the longest document {max(lengths)}, find no room for "
                            f"{capacity} a rank in groups of {largest}: take more ranks, more tokens a rank, or "
                            "several steps")
    return min(found, key=lambda item: item[:2])


# Zeppelin's two layouts: attention balanced by pairs, matrices by tokens, and a move from one to the other and back. Of
# 6 and 2 tokens over two ranks, 21 and 3 pairs, the long document goes round a ring of both, 10.5 pairs each, and the
# short one is rank 0's. In attention rank 0 then has 3 + 2 tokens, rank 1 has 3; in the matrices each has 4. So a row
# goes from rank 1 to rank 0 before attention, and back after it.


def two_layouts(lengths, n, costs, finest=0.5):
    """A document goes round a ring of as few ranks as make its share `finest` of a mean load at most, or of all, where
    least is to be done yet; in the matrices all ranks have equally many tokens. Zeppelin 2509.21841, of which we
    know the abstract: the rest is our reading."""
    split, mean, tokens = empty_split(n), sum(pairs_of(0, s) for s in lengths) / n, [0.0] * n
    load = [0.0] * n
    for length in sorted(lengths, reverse=True):
        g, pairs = 1, pairs_of(0, length)
        while pairs / g > finest * mean and 2 * g <= n:
            g *= 2
        first = min(range(0, n - g + 1, g), key=lambda first: max(load[first : first + g]))
        for r in range(first, first + g):
            load[r] += pairs / g
            tokens[r] += length / g  # in attention
            split.early[r] += pairs / g / g  # a ring's first block needs no message
            split.late[r] += pairs / g * (g - 1) / g
            if g > 1:  # keys and values, again in backward, and their gradients: three passes, half of it before
                split.moves[r, first + (r + 1 - first) % g] += 3 * (g - 1) * length / g * costs.key
    split.tokens[:] = [sum(lengths) / n] * n  # in the matrices
    more, fewer = ([max(0.0, sign * (t - sum(lengths) / n)) for t in tokens] for sign in (1, -1))
    for taker, giver in itertools.product(range(n), range(n)):  # who has more, fewer tokens in attention
        moved = min(more[taker], fewer[giver])
        if moved > 0:
            split.moves[giver, taker] += 2 * moved * (costs.query + costs.key)
            more[taker] -= moved
            fewer[giver] -= moved
            split.late[taker] += split.early[taker]
            split.early[taker] = 0
    return split


class Contest(NamedTuple):
    """A system in its arena, seed by seed: how much faster than `baseline` it is, and how much a perfect policy would
    be; the paper's figure."""

    system: str
    baseline: str
    ours: list
    ceiling: list
    paper: str


def uneven_contests(largest):
    """[Contest] of DistCA, Zeppelin and FlexSP against equal groups of at most `largest`, and of DistCA against fixed
    packing: 8 seeds of the arena above, a layer of D = 4096."""
    n, tokens, costs, times = 16, 16384, costs_of_layer(4096), []
    for seed in range(8):
        lengths = lognormal_lengths(n * tokens, seed, longest=n * tokens)
        rows, pairs = end_to_end(lengths, n), sum(pairs_of(0, s) for s in lengths)
        moves = only_what_helps(rows, n, disaggregate(rows, n, costs), costs)
        times.append(dict(
            perfect=tokens * costs.token + pairs / n * costs.pair,
            fixed=layer_time(fixed_packing(rows, n, costs), costs),
            equal=best_groups(lengths, n, costs, 4 * tokens, largest, equal=True)[0],
            FlexSP=best_groups(lengths, n, costs, 4 * tokens, largest, equal=False)[0],
            DistCA=layer_time(with_moves(rows, n, moves, costs), costs),
            Zeppelin=layer_time(two_layouts(lengths, n, costs), costs)))
    over = lambda a, b: [time_[a] / time_[b] for time_ in times]  # noqa: E731
    return [Contest(name, than, over(slow, name), over(slow, "perfect"), paper) for name, slow, than, paper in (
        ("DistCA", "fixed", "fixed packing", "1.35 on 512 H200"),
        ("DistCA", "equal", f"groups <= {largest}", "1.35 on 512 H200"),
        ("Zeppelin", "equal", f"groups <= {largest}", "2.80, mean"),
        ("FlexSP", "equal", f"groups <= {largest}", "up to 1.98"))]


# DistCA for real: attention of rows that are elsewhere, in three steps. A rank packs what it gives away and sends it;
# does the rows that it was given; and puts together what comes back and the rows that it kept. Autograd goes back the
# same way: an exchange of outputs is, backward, one of their gradients.
#
#     rank 0   q of rows 26..32, k and v of rows 0..32 ---->  rank 1   attention of these rows
#              rows 0..26 itself
#              rows 26..32                             <----           outputs


class _Exchange(torch.autograd.Function):
    """exchange(): backward sends the gradients back. What stays here is a copy, not a message."""

    @staticmethod
    def forward(ctx, x, give, take, group):
        ctx.give, ctx.take, ctx.group = give, take, group
        if group is None:
            return x.view_as(x)
        me, out = rank_in(group), x.new_empty(sum(take), x.shape[1])
        away, arriving = len(x) - give[me], len(out) - take[me]
        give, take = ([0 if r == me else rows for r, rows in enumerate(counts)] for counts in (give, take))
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
    ranks, but that what stays here (07 keeps rows, a move does not) comes last, in x and in the result. All ranks call
    it, and its backward."""
    return _Exchange.apply(x, give, take, group)


class _RowAttention(torch.autograd.Function):
    """attend_rows() by section 7's blocks of keys: one on the diagonal and one before it. (torch has the same mask,
    causal_lower_right, but for other kernels than cuDNN's: 1.9 times as slow on an H200.)"""

    @staticmethod
    def forward(ctx, q, k, v):
        found = None
        for rows, causal in blocks_of(q, k):
            out, lse = block_attention(q, k[:, :, rows], v[:, :, rows], causal)
            found = merge(found, (out, lse)) if found else (*wide(out), lse)
        out = found[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, found[1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = 0, torch.empty_like(k), torch.empty_like(v)
        for rows, causal in blocks_of(q, k):
            more, dk[:, :, rows], dv[:, :, rows] = block_gradients(dout, q, k[:, :, rows], v[:, :, rows], out, lse,
                                                                   causal)
            dq = dq + more
        return dq.to(q.dtype), dk, dv


def blocks_of(q, k):
    """(keys, whether they are on the diagonal) of the last rows of a document."""
    before = k.shape[2] - q.shape[2]
    return [(slice(before, None), True)] + [(slice(0, before), False)] * (before > 0)


def attend_rows(q, k, v):
    """Causal attention of the last queries of a document: q (Tq, H, d), k, v (Tk, H, d), Tq <= Tk -> (Tq, H, d)."""
    return _RowAttention.apply(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))[0].transpose(0, 1)


def attention_elsewhere(documents, moves, group):
    """Attention of this rank's documents {number: (q, k, v)}, one at least, each whole, (T, H, d), with the rows of
    `moves`, of disaggregate(), done by other ranks: {number: (T, H, d)}. Every rank calls it, with all moves, and its
    backward."""
    n, me, q = size(group), rank_in(group), next(iter(documents.values()))[0]
    H, d = q.shape[1:]
    asked = [[part for part, to in moves if (part.home, to) == (me, r)] for r in range(n)]  # of rank r, by this one
    served = [[part for part, to in moves if (part.home, to) == (r, me)] for r in range(n)]
    mine, theirs = list(itertools.chain(*asked)), list(itertools.chain(*served))
    nothing = q.flatten(1)[:0]  # no rows, but in the graph: so that a rank comes to both exchanges in backward

    def swap(pieces, give, take, rows):
        counts = [[sum(map(rows, parts)) for parts in lists] for lists in (give, take)]
        return exchange(torch.cat([*pieces, nothing]), *counts, group)

    there = lambda part: part.stop - part.start + 2 * part.stop  # noqa: E731  queries; keys and values
    back = lambda part: part.stop - part.start  # noqa: E731
    arrived = swap(pack(documents, mine), asked, served, there)
    results = serve(theirs, arrived.split([there(part) for part in theirs]), H, d) if theirs else [arrived[:0]]
    kept = own_rows(documents, mine, me)
    returned = swap(results, served, asked, back)
    outputs = returned.split([back(part) for part in mine]) if mine else ()
    in_graph = returned[:0].view(0, H, d)
    for part, output in zip(mine, outputs, strict=True):
        kept[part.document].append((part.start, output.view(-1, H, d)))
    return {number: torch.cat([in_graph, *(output for _, output in sorted(found, key=lambda item: item[0]))])
            for number, found in kept.items()}


def pack(documents, parts):
    """What travels of each part: its queries, and the keys and values up to them, each (rows, H d)."""
    for part in parts:
        q, k, v = documents[part.document]
        yield from (x.flatten(1) for x in (q[part.start : part.stop], k[: part.stop], v[: part.stop]))


def serve(parts, packages, H, d):
    """Attention of other ranks' rows, as pack() packed them: [(rows, H d)]."""
    results = []
    for part, package in zip(parts, packages, strict=True):
        q, k, v = package.view(-1, H, d).split([part.stop - part.start, part.stop, part.stop])
        results.append(attend_rows(q, k, v).flatten(1))
    return results


def own_rows(documents, parts, me):
    """{document: [(first row, output)]} of the rows that no part takes away."""
    kept = {number: [] for number in documents}
    for number, (q, k, v) in documents.items():
        at = 0
        for part in sorted(x for x in parts if x.document == number) + [Queries(number, len(q), len(q), me)]:
            if at < part.start:
                kept[number].append((at, attend_rows(q[at : part.start], k[: part.start], v[: part.start])))
            at = part.stop
    return kept


# ==== 10. Two models in one: an encoder feeds a backbone ==============================================================
#
# A model that reads images has an encoder in front of its backbone, and what a sample costs in the two has little to do
# with each other: images of very different sizes, texts of rather equal length. Three ways over n ranks:
#
#     lock step     every rank has both models, one sample each, then all wait (as they do where ZeRO-3 gathers weights)
#     by cost       every rank has both models; the longest sample left to who is done first: the honest baseline
#     two pools     g ranks encode, n - g have the backbone, and samples flow from the first to the second (FlowTrain)
#
# Of three samples, 2, 1 and 1 s in the encoder and 1 s each in the backbone, on two ranks, a digit a second:
#
#     encoder     0012                encoder     0012
#     backbone    ..012     5 s       backbone    ....012     7 s, as one micro-batch
#
# so the backbone should get small micro-batches, and of equal cost, or all wait for the longest.
#
# The ceiling is the mean of all work over n ranks. Two pools cannot beat sharing by cost on time: a whole rank is the
# smallest step in g, and the backbone's ranks wait for the first samples. What speaks for them is what this model has
# not got: memory (a rank holds one model instead of two), and other widths of tensor parallelism for each. So the row
# says both: faster than lock step, slower than sharing.


class Sample(NamedTuple):
    """Seconds of a sample in the encoder (of images, say) and in the backbone, forward and backward."""

    encode: float
    backbone: float


def lock_step(samples, n):
    """Rank r has samples r, r + n, ..., and all wait for the slowest after each."""
    tasks, before = [], ()
    for i in range(0, len(samples), n):
        batch = [Task(("both", j), (j - i,), sum(samples[j]), before) for j in range(i, min(i + n, len(samples)))]
        tasks += batch
        before = tuple(task.name for task in batch)
    return tasks


def by_cost(samples, n):
    """The longest first, to who will be done first."""
    tasks, load = [], [0.0] * n
    for i in sorted(range(len(samples)), key=lambda i: -sum(samples[i])):
        rank = load.index(min(load))
        load[rank] += sum(samples[i])
        tasks.append(Task(("both", i), (rank,), sum(samples[i])))
    return tasks


def allocate(samples, n):
    """How many of n ranks should encode: throughput matching, the least max(encode / g, backbone / (n - g))."""
    encode, backbone = map(sum, zip(*samples, strict=True))
    return min(range(1, n), key=lambda g: max(encode / g, backbone / (n - g)))


def producer_consumer(samples, n, micro=16):
    """The first ranks encode, in the order of the samples. As they come out they are packed into micro-batches of equal
    cost (a `micro`-th of a backbone rank's share), not of equal count, and each goes to who can begin it first. What
    travels takes no time here. ValueError for one rank or no samples. FlowTrain (2026), of which we know the abstract:
    the rest is our reading."""
    if n < 2 or not samples:
        raise base.BadInput(f"{len(samples)} samples on {n} ranks: use one sample or more, and a rank for each model")
    g, tasks, done = allocate(samples, n), [], {}
    free = [0.0] * g
    for i, sample in enumerate(samples):
        rank = free.index(min(free))
        done[i] = free[rank] = free[rank] + sample.encode
        tasks.append(Task(("encode", i), (rank,), sample.encode))
    room, cost, batches = sum(s.backbone for s in samples) / (n - g) / micro, math.inf, []
    for i in sorted(done, key=done.get):
        if cost + samples[i].backbone > room:
            batches.append([])
            cost = 0.0
        batches[-1].append(i)
        cost += samples[i].backbone
    free = [0.0] * (n - g)
    for batch in batches:
        ready = max(done[i] for i in batch)
        rank = free.index(min(free))  # who is free first can begin it first, whenever it is ready
        seconds = sum(samples[i].backbone for i in batch)
        free[rank] = max(free[rank], ready) + seconds
        tasks.append(Task(("backbone", *batch), (g + rank,), seconds, tuple(("encode", i) for i in batch)))
    return tasks


def random_samples(count, seed):
    """Images of very different sizes, texts of rather equal ones; some tens of milliseconds each."""
    generator = np.random.default_rng(seed)
    encode, text = generator.lognormal(-4.0, 1.0, count), generator.lognormal(-3.5, 0.4, count)
    return [Sample(e, t + 0.5 * e) for e, t in zip(encode, text, strict=True)]


def flow_contests(n=8):
    """[Contest] of two pools against lock step and against sharing by cost: 48 samples a rank, 8 seeds."""
    contests, batches = [], [random_samples(48 * n, seed) for seed in range(8)]
    pools = [span(producer_consumer(samples, n)) for samples in batches]
    perfect = [sum(map(sum, samples)) / n for samples in batches]
    for name, way in (("lock step", lock_step), ("by cost", by_cost)):
        times = np.array([span(way(samples, n)) for samples in batches])
        contests.append(Contest("FlowTrain", name, list(times / pools), list(times / perfect), "1.7"))
    return contests


# ==== 11. SkipPipe: micro-batches that leave out stages ===============================================================
#
# A residual network still works when a block is left out. So let each micro-batch go through k of p stages, others for
# each: a step then has k / p of the work, and who waits for a busy stage may take another one. p = 4, k = 3, m = 4, as
# skip_pipe() below makes them (F = 1, B = 2):
#
#     stage 0   0   2 3     micro-batch 0 leaves out stage 3,
#     stage 1   0 1 2       1 stage 0,
#     stage 2   0 1   3     2 stage 2,
#     stage 3     1 2 3     3 stage 1: each stage has m k / p = 3 visits, its quota
#
# What is won? Against 1F1B through all stages, up to p / k (1 + bubble) times as fast. But k / p of the work can be had
# without any skipping, in a model with thinner stages: only what the freedom of paths saves in bubbles beyond that is
# SkipPipe's. The ceiling of both is a schedule without a bubble, m k / p (F + B). And what a model learns from a step
# with holes is a matter of training: see below.


def skip_pipe(p, m, k, cost, most):
    """m micro-batches, each through k of p stages, in order: (paths, tasks for play(), time of the last's end).

    One micro-batch after the other takes the path whose forward is done first among what is already reserved, and goes
    back the same way. Three conflicts are avoided: two micro-batches at one stage at a time; a stage with more visits
    than its quota; more than `most` micro-batches in flight (p, say, as in 1F1B). Greedy: what is reserved stays;
    SkipPipe arXiv 2502.19913 instead searches all paths together (conflict-based search). Embedding and loss are no
    stages here. cost: {"F", "B": time}, in whole units, as times are compared. ValueError for what cannot be."""
    if not 1 <= k <= p or m < 1 or most < 1 or any(cost[kind] != int(cost[kind]) for kind in "FB"):
        raise base.BadInput(f"{m} micro-batches, {most} at once, through {k} of {p} stages, F and B of {cost['F']} and "
                            f"{cost['B']}: use 1 or more of each, k of up to p stages, and whole units of time")
    quota = [stop - start for start, stop in shares(m * k, p)]
    busy, ends, paths, tasks = [[] for _ in range(p)], [], [], []
    for i in range(m):
        done = sorted((end, j) for j, end in enumerate(ends))[: max(0, i + 1 - most)]  # before this one begins
        begin = done[-1][0] if done else 0
        path = quickest_path(busy, quota, m - i, k, cost["F"], begin)
        needs, now = tuple(("B", j, paths[j][0]) for _, j in done), begin
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


def quickest_path(busy, quota, left, k, F, begin):
    """The k stages in which a micro-batch, the first of `left`, is done forward first. Stage by stage: of all ways to
    have made 0, 1, ... visits so far only the one that is ready first can be part of the best. A stage whose quota is
    as large as `left` must be visited, now and by all that follow, or its quota would not be used up."""
    best = {0: (begin, ())}  # visits: (when the last is done, path)
    for stage in range(len(busy)):
        reached = {} if quota[stage] == left else dict(best)  # stepping over it
        for visits, (ready, path) in best.items():
            if quota[stage] and visits < k:
                found = earliest(busy[stage], ready, F) + F, (*path, stage)
                reached[visits + 1] = min(found, reached.get(visits + 1, found))
        best = reached
    return best[k][1]


def earliest(busy, ready, length):
    """The first time, not before `ready`, at which nothing of busy [(start, end)] falls into the next `length`."""
    for start, end in sorted(busy):
        if ready + length <= start:
            break
        ready = max(ready, end)
    return ready


def skip_contests():
    """[Contest] against 1F1B through all stages, and through as many, thinner, that none leaves out: five (p, m, k)."""
    cost, whole = dict(F=1, B=2, W=0), Contest("SkipPipe", "1F1B", [], [], "up to 2.2")
    thin = Contest("SkipPipe", "1F1B, k/p of each stage", [], [], "up to 2.2")
    for p, m, k in ((4, 8, 3), (4, 16, 3), (8, 16, 6), (8, 32, 6), (8, 24, 4)):
        all_stages, skipping = simulate(one_f_one_b(p, m), cost).span, skip_pipe(p, m, k, cost, p)[2]
        for one, seconds in ((whole, all_stages), (thin, all_stages * k / p)):
            one.ours.append(seconds / skipping)
            one.ceiling.append(seconds / (m * k / p * 3))  # no bubble
    return [whole, thin]


# Does a model learn from steps with holes? 01's GPT, one block a stage, trained whole, and by skip_pipe's paths for the
# same simulated time, in which it takes 61 steps for 50. It is then run whole. A rival skips nothing: a model of k
# blocks, spread evenly over the same p ranks. Of such beginnings one must not conclude much: 50 steps are few, and more
# steps are worth more than more blocks. Loss relative to the whole model's, on a CPU, D = 32:
#
#     steps of the whole model        50 (10 seeds)       400 (3 seeds)      1600 (3 seeds)
#     skipping, run whole             0.94 to 0.99        0.99 to 1.01       1.02 to 1.04
#     k blocks, none skipped          0.90 to 0.98        0.96 to 0.98       0.97 to 1.00
#
# So at equal time skipping gains at first, then nothing, then it loses, and the smaller model is the better use of the
# time. What stays is something else: a model trained by paths can be run by paths, 1 or 2 % worse, where one that was
# trained whole and is cut to k blocks loses 20 to 28 %.


def through(model, tokens, path):
    """01's GPT through the blocks of `path` alone: tokens (B, T) -> E (B, T, D)."""
    T, x = tokens.shape[1], model.embed(tokens)  # (B, T, D)
    for stage in path:
        x = model.blocks[stage](x, model.cos[:T], model.sin[:T])
    return model.norm(x)


def train_by_paths(text, layers, paths, steps, rate=1e-2, seed=0):
    """Loss on held-out text of a small GPT of `layers` blocks, run whole, after so many steps of a micro-batch of two
    sequences by each of `paths`."""
    torch.manual_seed(seed)
    T, rng, model = 32, np.random.default_rng(seed), base.GPT(base.GPTConfig(text.vocab, 32, layers, heads=2, dim=32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_of(part, starts, path):
        tokens = torch.from_numpy(np.stack([part[i : i + T + 1] for i in starts]).astype(np.int64))  # (B, T + 1)
        E = through(model, tokens[:, :-1], path)  # (B, T, D)
        return base.linear_cross_entropy_reference(E, model.classifier, tokens[:, 1:])

    for step in range(steps):
        starts = rng.integers(0, len(text.train) - T - 1, (len(paths), 2))
        for path in set(paths):  # micro-batches of one path as one: the same gradient in fewer calls
            mine = starts[[other == path for other in paths]]
            (loss_of(text.train, mine.flatten(), path) * len(mine) / len(paths)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return loss_of(text.val, np.linspace(0, len(text.val) - T - 1, 128, dtype=int), range(layers)).item()


# ==== 12. A planner: what fits, how long it takes, what it sends and burns ============================================
#
# Sections 2 to 8 each gave a formula for what a cut keeps and sends. Here they are added up, for every way to write the
# number of GPUs as dp x pp x cp x tp, and the fastest that fits is the plan. For one GPU, of the last stage, which has
# most to do (in memory with as many micro-batches as the first: a bound):
#
#     memory   weights + optimizer + max(activations of p micro-batches, gradients) + what a layer needs at work
#              As backward goes on, activations go and gradients come: with one micro-batch the larger counts, with
#              several, which add to gradients that are there from the first on, both.
#     time     (m + p - 1) (FLOPs / speed + messages that nothing hides) + sums of gradients, as far as they are not
#              hidden + the update, bytes / memory's speed        speed: `reach` of the peak, what one GPU alone gets
#     energy   e_flop FLOPs + e_byte bytes + watts seconds            bytes: all time that products do not need, at
#                                                                     the full speed of memory
# What hides a message? Sums of gradients go under backward, keys and values under attention; at most half of them, as
# measured, hide. Tensor parallelism's sums hide under nothing. Pipelines pay (p - 1) / m of their work, section 6.
#
# The choice is then a table of trade-offs that one can read off the formulas: tp first, inside of a host, as it sends
# most; cp for sequences whose activations do not fit; pp across hosts, as it sends least; dp for all the rest. So for
# 70 billion weights (80 layers, D = 8192, T = 8192, 512 sequences a step) on 64 H200s, of 141 GiB each:
#
#     dp pp cp tp                           GiB     s/step    what it pays
#     64  1  1  1                          1,225      64.8    it would be the fastest: it does not fit
#     64  1  1  1   ZeRO-3, recomputed       131      85.9    a third more work; 409 GB of weights and gradients sent
#      8  1  1  8   ZeRO-1                    68      83.6    6,043 GB for sums of activations, under nothing
#     16  1  1  4   ZeRO-1                   123      71.8    2,590 GB
#      8  4  1  2   ZeRO-1                   137      71.2    868 GB, and a bubble of 5 %: the plan
#
# Its 137 GiB are 29 of weights and optimizer (a GPU has 9 billion of the weights), 17 of gradients, and 90 of
# activations, of 4 micro-batches in 20 layers. Its 71.2 s are 64 micro-batches of 1.05 s (products 0.93, attention
# 0.07, sums of activations 0.05), 3.2 s of bubble, and 0.6 s to sum gradients and gather weights.
#
# Where a planner is wrong is as instructive: with the `reach` of the smallest published run of each, Megatron's larger
# ones are up to 1.4 times as fast as it promises, as larger matrices are, and Frontier's largest 0.8 times
# (published_rows).


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
    weight, gradient and optimizer. For ranks that do what is done in sections 2 to 8, except that ZeRO-3's gathers come
    ahead of their use, and that ZeRO has micro-batches."""
    layers, again = -(-model.layers // pp), int(recompute)
    layer = (model.params - 2 * model.vocab * model.dim) / model.layers / tp
    head = model.vocab * model.dim / tp
    # What the functions below share: parameters of a layer, the classifier, and all that a rank has; tokens of a
    # micro-batch; how many ranks share gradients; bytes of a tensor of the stream (N, D), as cut by tp.
    it = SimpleNamespace(
        dp=dp, pp=pp, cp=cp, tp=tp, recompute=recompute, again=again, zero=zero, layers=layers, layer=layer, head=head,
        P=layers * layer + head * (2 if pp == 1 else 1), N=micro * model.seq // cp, m=batch // (dp * micro),
        shards=dp * cp, state=state, itemsize=itemsize, stream=itemsize * micro * model.seq // cp * model.dim / tp)
    sent_ = traffic(model, it)
    seconds, bubble = step_seconds(model, it, sent_, links, chip)
    joules = step_joules(model, it, seconds, batch, chip)
    counted = {kind: it.m * sent_[kind] for kind in ("tensor", "ring", "pipeline")}
    counted["data"] = sent_["reduced"] + sent_["gathered"]
    return Plan(dp, pp, cp, tp, micro, recompute, zero, it.m, held_bytes(model, it) / 2**30, seconds, bubble, counted,
                joules)


def held_bytes(model, it):
    """Bytes of a rank at the peak."""
    w, g, o = it.state
    states, gradients = (zero_bytes(it.P, it.shards, it.zero, *sizes) for sizes in ((w, 0, o), (0, g, 0)))
    if it.zero == 3:  # gathered weights of two units at work: the classifier, and the one that comes next
        states += w * (it.head + max(it.head, it.layer))
    if it.zero > 1:  # gradients that are not reduced yet
        states += g * (it.head + it.layer)
    if model.muon:  # one moment fewer; of the largest matrix, whole, what its products hold
        states += forging.orthogonal_bytes(4 * model.dim, model.dim) - 4 * it.layers * it.layer
    kept = tensor_parallel_bytes(model._replace(layers=1), it.N, it.tp, True, it.itemsize, True)
    # A recomputed layer keeps its input; under sequence parallelism also those of its two matrices that are cut first.
    stored = min(it.m, it.pp) * it.layers * (it.stream * (3 if it.tp > 1 else 1) if it.recompute else kept)
    changing = stored + gradients if it.m > 1 else max(stored, gradients)
    # At work, in tensors of the stream: a layer made again; the gradients of the MLP's two inner tensors, 4 each; or,
    # for a ring, when the MLP's 10 are gone, copies of q and dO, kv twice, dq, and dk and dv thrice, in fp32: 24; E,
    # dE; on one stage the first stream.
    work = 14 if it.cp > 1 else 8
    return states + changing + it.recompute * kept + (work + 2 + (it.pp == 1)) * it.stream


def traffic(model, it):
    """Bytes that a rank sends: a micro-batch for "tensor", "ring", of it "home" (gradients' last hop), "pipeline"; a
    step for "reduced" and "gathered". And "blocks": what a micro-batch's ring moves in its own memory."""
    D, (w, g, _) = model.dim, it.state
    tensor = tensor_parallel_traffic(model._replace(layers=it.layers), it.N, it.tp, True, it.itemsize)
    more = 3 * it.layers * it.again - 2 * (it.pp > 1)  # gathers and scatters; the last stage has no embedding
    tensor += more * it.N * D * it.itemsize * (it.tp - 1) / it.tp
    # Keys and values go round forward and backward, their gradients in fp32 once more, and home.
    home = it.layers * 2 * it.N * D / it.tp * 4 * (it.cp > 1)
    ring = it.layers * 2 * it.stream * (2 + it.again) * (it.cp - 1) + it.cp * home
    # Reads and writes of a ring, in tensors of the stream; where kernels cast or broadcast, which halves their speed,
    # doubled. A block (zigzag: 2 cp + 1 of half a rank's rows): forward widen out, 6, and merge, 12; backward three
    # sums, 30. A step of it: zeros for dk and dv, 4, and add those that came, 12. A pass: forward cut kv in chunks, 4,
    # join out, 10; backward kv again, q and dO, 8, zeros for dq, 2, narrow and join three gradients, 24.
    forwards = 1 + it.again
    blocks = (2 * it.cp + 1) / 2 * (18 * forwards + 30) + 16 * it.cp + 14 * forwards + 34
    blocks *= it.layers * it.stream * (it.cp > 1)
    pipeline = it.stream * min(it.pp - 1, 2)  # forward, and where there is a stage before, backward
    weights, gradients = (x * it.P * (it.shards - 1) / it.shards for x in (w, g))
    twice = 2 * weights - 2 * w * it.head * (it.shards - 1) / it.shards  # first and last unit are gathered once
    return dict(tensor=tensor, ring=ring, home=home, blocks=blocks, pipeline=pipeline,
                reduced=[2, 1, it.m, it.m][it.zero] * gradients,
                gathered=[0, weights, weights, it.m * twice][it.zero])


def step_seconds(model, it, sent_, links, chip):
    """Seconds of a step, and the bubble: the slowest stage, the last, and what it waits for."""

    def rate(ranks, stride):
        """Of a group of ranks that are `stride` apart: does it stay in a host?"""
        return links.inside if ranks * stride <= links.host else links.between

    def exposed(message, under):
        return max(message - under, (1 - links.hidden) * message)

    speed, passes = chip.peak * chip.reach, 3 + it.again
    attention = passes * it.layers * attention_flops(model, it.N) / it.tp / speed
    one = (passes * 2 * it.N * it.layers * it.layer + 6 * it.N * it.head) / speed + attention
    one += sent_["tensor"] / rate(it.tp, 1) + sent_["pipeline"] / rate(it.pp, it.dp * it.cp * it.tp)
    ring = rate(it.cp, it.tp)
    one += exposed((sent_["ring"] - sent_["home"]) / ring, attention) + sent_["home"] / ring
    one += sent_["blocks"] / chip.memory
    bubble = SCHEDULES["1f1b"].bubble(it.pp, it.m)

    data = rate(it.dp, it.cp * it.tp) if it.dp > 1 else rate(it.cp, it.tp)
    under = 2 / 3 * one * (it.m if it.zero > 1 else 1) * (1 - 1 / it.layers)  # backward of all but the last unit
    reducing, gathering = sent_["reduced"] / data, sent_["gathered"] / data
    reducing = exposed(reducing, under) if it.pp == 1 else reducing  # run_pipeline leaves it to finish()
    gathering = exposed(gathering, it.m * one) if it.zero == 3 else gathering
    update = 2 * it.P * sum(it.state) / (it.shards if it.zero else 1) / chip.memory  # all is read and written
    if model.muon:  # qkv, proj, up and down
        products = sum(forging.orthogonal_flops(k * model.dim, model.dim) for k in (3, 1, 4, 4))
        update += it.layers * products / (chip.peak * chip.product)
    return it.m * one * (1 + bubble) + reducing + gathering + update, bubble


def step_joules(model, it, seconds, batch, chip):
    """Of all GPUs."""
    gpus, flops = it.dp * it.pp * it.cp * it.tp, step_flops(model, batch * model.seq, it.again)
    return chip.flop * flops + gpus * (chip.byte * bytes_beside(flops / gpus, seconds, chip) + chip.watts * seconds)


def bytes_beside(flops, seconds, chip):
    """What a GPU is taken to move: in all time that products do not need, at the full speed of memory."""
    return chip.memory * max(0.0, seconds - flops / (chip.peak * chip.product))


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


# One question about the network below all this: which of its links does a flow take? A hash fills some twice.


def fabric_load(flows, spines, way):
    """Equal flows between two leaves of a network over `spines` links: (flows on the fullest link, flows whose packets
    can overtake each other). "single-path": a flow on one link; "spray": every packet on the next link; "split": as
    single-path, but the flows that are left over, flows mod spines, are sprayed. arXiv 2407.00550."""
    if flows < 1 or spines < 1:
        raise base.BadInput(f"{flows} flows over {spines} links: use 1 or more of each")
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
FITTED = "Megatron 1.7B", "Frontier 22B"  # the first of each machine


def share_of_peak(model, gpus, batch, tp, pp, reach):
    """The planner's, of a published run, FLOPs counted as there: recomputation is work."""
    chip, links = A100 if tp else MI250X
    chip = chip._replace(reach=reach)
    if tp:
        one = predict(model, links, chip, batch, gpus // (tp * pp), pp, 1, tp, 1, True, 0)
    else:
        one = next(x for x in plan(model, gpus, 64, links, batch, chip) if x.recompute)
    return step_flops(model, batch * model.seq, again=1) / (one.seconds * gpus * chip.peak)


@functools.cache
def published_rows():
    """[(name, share of peak predicted, published)]: `reach` is what makes the first row of each machine right."""
    rows = []
    for name, *run, share in PUBLISHED:
        if name in FITTED:
            reach = share
            for _ in range(12):
                reach *= share / share_of_peak(*run, reach)
        rows.append((name, share_of_peak(*run, reach), share))
    return rows


# name: (least, most, whether whole, default, what it is); no default: required
KEYS = dict(
    params=(1e3, 1e15, False, None, "weights"), layers=(1, 1e4, True, None, "layers"),
    dim=(2, 1e6, True, None, "width"), vocab=(2, 1e7, True, None, "classes"),
    seq=(1, 1e8, True, None, "tokens of a sequence"), gpus=(1, 2**17, True, None, "GPUs"),
    gib=(0.01, 1e4, False, None, "GiB a GPU"), batch=(1, 1e8, True, 0, "sequences a step (4 million tokens)"),
    heads=(1, 1e5, True, 0, "(dim / 128)"), host=(1, 1e4, True, HOSTS.host, "GPUs of a host (8)"),
    nvlink=(1, 1e5, False, HOSTS.inside / 1e9, "GB/s a GPU in it (280)"),
    link=(0.01, 1e6, False, HOSTS.between * 8e-9, "Gbit/s a GPU between hosts (400)"),
    tflops=(0.1, 1e6, False, H200.peak / 1e12, "dense bf16 peak (989)"),
    reach=(0.001, H200.product, False, H200.reach, "share of it that a step gets (0.48; a large product: 0.68)"),
    muon=(0, 1, True, 0, "1: Muon for the layers, without ZeRO (AdamW)"))
REQUIRED = [name for name, key in KEYS.items() if key[3] is None]
USAGE = (f"{' '.join(REQUIRED)} (seq: tokens of a sequence, gib: GiB a GPU), and if you like "
         + ", ".join(f"{name}: {key[4]}" for name, key in KEYS.items() if name not in REQUIRED))


def parse_plan(text):
    """The Model, GPUs, GiB, Links, batch and Chip of "params=8e9 layers=32 ...": KEYS. ValueError names what is
    missing, unknown, out of range, or does not fit together."""
    asked = {}
    for item in text.split():
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise base.BadInput(f"--plan: {item!r} is not of the form name=number: it takes {USAGE}") from None
        if name not in KEYS or name in asked:
            what = "is given twice" if name in asked else "is unknown"
            raise base.BadInput(f"--plan: {name} {what}: it takes {USAGE}")
        least, most, whole_number, *_ = KEYS[name]
        if not least <= number <= most or whole_number and number != int(number):
            raise base.BadInput(f"--plan: {item}: give a{' whole' * whole_number} number from {least:g} to {most:g}")
        asked[name] = int(number) if whole_number else number
    if missing := [name for name in REQUIRED if name not in asked]:
        raise base.BadInput(f"--plan: missing {', '.join(missing)}: it takes {USAGE}")
    one = SimpleNamespace(**{name: asked.get(name, key[3]) for name, key in KEYS.items()})
    blocks, usual = one.params - 2 * one.vocab * one.dim, 12 * one.layers * one.dim**2
    if one.heads and one.dim % one.heads:
        raise base.BadInput(f"--plan: heads={one.heads} does not divide dim={one.dim}: correct one of them")
    if not usual / 4 <= blocks <= usual * 4:
        raise base.BadInput(f"--plan: params={one.params:g} leaves {blocks:.3g} for {one.layers} layers of "
                            f"dim={one.dim} (2 x vocab x dim are embedding and classifier), where 12 dim^2 "
                            f"each, {usual:.3g}, are usual: correct one of the four")
    model = Model(one.params, one.layers, one.dim, one.vocab, one.seq, one.heads, muon=one.muon)
    links = HOSTS._replace(host=one.host, inside=one.nvlink * 1e9, between=one.link / 8e-9)
    batch = one.batch or -(-max(1, 2**22 // one.seq) // one.gpus) * one.gpus
    return model, one.gpus, one.gib, links, batch, H200._replace(peak=one.tflops * 1e12, reach=one.reach)


def print_plans(text):
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
    flops, fastest = step_flops(model, tokens), {}
    for one in found:  # the fastest first
        fastest.setdefault(one[:4], one)
    for one in list(fastest.values())[:12]:
        print(line.format(*one[:5], "yes" if one.recompute else "no", one.zero, f"{one.gib:.0f}", f"{one.seconds:.3f}",
                          f"{one.bubble:.2f}", f"{tokens / one.seconds / gpus:,.0f}",
                          f"{flops / one.seconds / gpus / chip.peak:.0%}",
                          *(f"{x / 1e9:.1f}" for x in one.sent.values()), f"{one.joules / 1e6:.3f}"))
    print("micro: sequences of a micro-batch. Of a GPU: GiB, tokens/s, share of the peak (recomputation is not work),\n"
          "and GB that it sends a step, by reason. MJ: energy of a step, all GPUs.")


# ==== 13. Losing a rank, and finding a slow one =======================================================================
#
# Of 16,000 GPUs one fails every three hours (Llama 3's report). To start all again from a checkpoint costs minutes of
# all; the copies that data parallelism has of everything would do. What is hard is not the copying but the agreement:
# who is still there, did the step that was going on count, and from whom does one get what. Ranks cannot ask each other
# over connections that may be broken, so they agree through a store, in a process that outlives them. It keeps values
# by key, and has one operation that decides: compare_set(key, "", x) writes x only if nothing is there yet, so whoever
# comes first is heard, and all read the same.
#
#     rank 0              rank 1              rank 2   (killed in the step)
#     step                step                x
#     error, or done      error, or done          the parent sees its end and writes gone/2
#       |                   |
#     1 the vote, "did all have all sums?"  Who has them adds 1 to E/vote/K/yes; who makes it n writes the terms under
#       |  E/vote/K. Who has an error, sees gone/R of a voter, or waits too long, writes "null" there. First come, only
#       |  heard: the step counts for all or for none. --break no-vote: who has all sums steps, and is a step ahead.
#     2 meet, when it was "null". All leave the old group: that closes connections, so that who still waits in a
#       |  receive gets an error, and comes, too. Each writes E+1/here/R and waits until every other is here or gone.
#       |  Then the first writes the members under E+1/members, and all read them there.
#     3 connect: a new group of the members, numbered by the epoch E+1, so that no message of the old one is taken
#       |  for one of the new.
#     4 restore: layers are cut anew, and who owns a layer that it had not gets weights and optimizer state from the
#       |  first that had it. Then they vote again, whether all have all: if one more was lost meanwhile, back to 2.
#     the same step again, with the same batch, scale and random numbers
#
# E, the epoch, counts groups, K votes in one. So a step is taken with all its sums or not at all, and the losses are,
# digit by digit, those of a run that lost nobody. (06 uses Membership, too: its ranks come and go at rounds instead of
# steps; that is what joining, news, voters, terms, patience and grace are for. Skip them on a first reading.)


def keyed_dropout(x, chance, *key):
    """Dropout of one sample x (T, D) whose mask depends on `key` (seed, step, sample, layer) alone: the same on
    whatever rank, in whatever micro-batch, however often it is made."""
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed))) >= chance
    return x * mask.to(x) / (1 - chance)


class Membership:
    """The protocol above: who is alive, and what all of them have. The store is that of MASTER_ADDR and MASTER_PORT:
    the parent's, if spawn() started the ranks, which also notes there whose end it has seen; or torchrun's (which ends
    all ranks with the first).

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
            time.sleep(0.005)  # (a wait of the store's own prints a warning when it times out)
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
                good = False  # (the error is not kept: its traceback would hold on to the old group's connections)
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


# A slow rank makes no error, it makes all others wait, and from inside a collective all look equally late. Messages
# between pairs tell them apart: in the matrix of delays, sender by receiver, a slow sender is a slow row, a slow
# receiver a slow column, a slow link a cell. With rank 1 slow to send, and 3 -> 0 a bad link:
#
#              to 0  1  2  3
#     from 0      .  1  1  1
#          1      9  .  9  9     a row: sender 1
#          2      1  1  .  1
#          3      9  1  1  .     a cell: link 3 -> 0
#
# It can be ambiguous: when all ranks but one are slow senders, that one's column is slow throughout, too. Then the rows
# explain the column, and it is not accused. Nor is the usual delay the median one: that one rank has n - 1 cells that
# are not slow, so the (n - 1)-th fastest is taken.


def message_delays():
    """(n, n) seconds from a barrier until a message from rank i (row) has arrived at rank j (column), the least of
    two, on all ranks (gloo). In turn k, each rank sends to the k-th after it."""
    n, me = dist.get_world_size(), dist.get_rank()
    delays = torch.full((n, n), math.inf)
    for k in list(range(1, n)) * 2:
        to, source = (me + k) % n, (me - k) % n
        sender = threading.Thread(target=dist.send, args=(torch.zeros(1), to))  # or a slow sender would receive late
        dist.barrier()
        start = time.perf_counter()
        sender.start()
        dist.recv(torch.zeros(1), source)
        delays[source, me] = min(delays[source, me].item(), time.perf_counter() - start)
        sender.join()
    dist.all_reduce(delays, dist.ReduceOp.MIN)
    return delays


def find_slow(delays, factor=3.0, least=0.0):
    """What a delay matrix (n, n), sender by receiver, says: [("sender", i)] of rows and [("receiver", j)] of columns
    that are slow throughout, if no others explain it, and [("link", i, j)] of other slow cells. Slow: `factor` times a
    usual one, and `least` seconds above it, for who knows how noisy the clock is. ValueError for fewer than 3 ranks. C4
    2406.04594, of which we know the abstract."""
    n = len(delays)
    if n < 3:
        raise base.BadInput(f"{n} ranks: a slow sender and a slow link look alike: 3 are needed")
    others = ~torch.eye(n, dtype=torch.bool)
    usual = delays[others].kthvalue(n - 1).values
    slow = (delays > max(factor * usual, usual + least)) & others
    rows, columns = (set((slow | ~others).all(dim).nonzero().flatten().tolist()) for dim in (1, 0))
    explained = lambda accused, by: {x for x in accused if by >= set(range(n)) - {x}}  # noqa: E731
    rows, columns = sorted(rows - explained(rows, columns)), sorted(columns - explained(columns, rows))
    cells = [(i, j) for i, j in slow.nonzero().tolist() if i not in rows and j not in columns]
    return [*(("sender", i) for i in rows), *(("receiver", j) for j in columns), *(("link", *cell) for cell in cells)]


# ==== 14. Checks: most run on all ranks at once; alone, they start two ================================================
#
# All follow one pattern: build the same small model twice, cut one, run both, compare. In fp64 the cut changes nothing
# but the order of sums, so what differs by more than 1e-12 is a bug. In fp32 and bf16 each rank's part of a sum is
# rounded, and no fixed number tells a bug from that. So three are compared (the three-way rule): the cut model's error
# against fp64 may exceed the uncut model's error, in the same dtype, by one rounding a rank. Bytes sent and bytes kept
# have formulas, which must hold exactly or to a per cent.
#
# Such comparisons easily pass for the wrong reason, as what is small or even hides most bugs of parallel programs:
#
#     what would hide it                     the bug                                      so here
#     all ranks start from one seed          weights are not sent to the others           each has its own
#     equally many tokens on all ranks       the mean of the ranks' means                 later rows ignore more of them
#     one bucket                             buckets go in another order than gradients   several, of 10 KiB
#     sizes that n divides                   padding is left out                          a parameter of one number
#     a step with every layer                who waits for a gradient that never comes    a block that one rank uses
#     logits of an untrained model           an exponential without its maximum           logits up to 160
#     scores near 0                          wrong dq, dk, which are near 0, too          scores up to 5
#     links of equal speed                   a message between hosts is priced as inside  10 times slower between
#     a fast disk                            memory is given back too early, or never     the writer is held up


def tiny(n, dtype=torch.float64, layers=2, seed=0):
    """The same small GPT on every rank, whose heads n divides, and whose vocabulary n does not."""
    heads = n if n > 2 else 4
    torch.manual_seed(seed)
    model = base.GPT(base.GPTConfig(103, 8 * n, layers, heads, 8 * heads)).to(here(), dtype)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-6  # by default it depends on the dtype, and dtypes are compared here
    return model


def tiny_tokens(model, count=2, seed=0):
    """tokens (B, T), targets (B, T): ignored ones more often the later the sequence, so that ranks count unequally."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab, (count, model.config.seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < torch.linspace(0, 0.6, count).unsqueeze(1)] = -100
    return tokens[:, :-1].to(here()), targets.to(here())


def serial_loss(model, tokens, targets):
    return base.linear_cross_entropy_reference(model(tokens), model.classifier, targets)


def part_of_loss(model, tokens, targets, group):
    """A rank's part of the mean over all ranks' tokens."""
    total = base.linear_cross_entropy_reference(model(tokens), model.classifier, targets, reduction="sum")
    return total / global_count(targets != -100, group)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def expect(what, found, want, within=0.0):
    """What was counted is what its formula says, exactly or to a part `within`."""
    good = math.isclose(found, want, rel_tol=within, abs_tol=1e-12) if within else found == want
    require(good, f"{what}: {found}, not {want}")


def compare(name, got, want, tolerance=1e-12):
    """The largest error of any tensor, in units of that tensor's largest element; fails above the tolerance. 0: the
    tensors must be equal bit for bit."""
    worst = 0.0
    for key in want:
        require(got[key] is not None, f"{name}: {key} has none")
        if not torch.equal(got[key], want[key]):
            error = ((got[key] - want[key]).abs().max() / want[key].abs().max().clamp(min=1e-300)).item()
            require(tolerance and error <= tolerance, f"{name}: {key} differs from the serial model's by {error:.1e}")
            worst = max(worst, error)
    return worst


def as_good(name, dtype, got, peer, exact, more=0.0):
    """The three-way rule, with a rounding a rank and `more` slack."""
    for key, want in exact.items():
        slack = torch.finfo(dtype).eps * dist.get_world_size() + more
        cce.require_as_good(f"{name}, {dtype}: {key}", got[key], peer[key], want, slack)


def equal_to_serial(name, parallel, serial, more=0.0):
    """parallel(dtype), serial(dtype) -> {name: tensor}: in fp64 equal to 1e-12, in fp32 and bf16 as good. Returns
    fp64's error."""
    exact = serial(torch.float64)
    worst = compare(name, parallel(torch.float64), exact)
    for dtype in (torch.float32, torch.bfloat16):
        as_good(name, dtype, parallel(dtype), serial(dtype), exact, more)
    return worst


def mishap():
    raise AssertionError("it fails") if dist.get_rank() else RuntimeError("the others are gone")


def check_harness():
    """Of errors of several ranks the one counts that made the others fail."""
    must_raise("rank 1, 2: it fails", lambda: in_ranks("mishap", 3, device="cpu"), AssertionError)


@on_ranks
def check_groups():
    """In every mesh of two factors a group is of those ranks whose places differ along its axes alone; bad sizes and
    absent ranks are named."""
    world, rank, axes = dist.get_world_size(), dist.get_rank(), ("pp", "dp", "cp", "tp")
    factors = [(world // k, k) for k in range(1, world + 1) if world % k == 0]
    for pair, lengths in itertools.product(itertools.combinations(axes, 2), factors):
        sizes = dict(zip(pair, lengths, strict=True))
        groups, places = mesh(**sizes), list(itertools.product(*(range(sizes.get(axis, 1)) for axis in axes)))
        of = lambda group: group and dist.get_process_group_ranks(group)  # noqa: E731
        for name, moving in dict(pp=["pp"], dp=["dp"], cp=["cp"], tp=["tp"], data=["dp", "cp"]).items():
            still = [i for i, axis in enumerate(axes) if axis not in moving]
            line = [r for r in range(world) if all(places[r][i] == places[rank][i] for i in still)]
            expect(f"{name} of rank {rank} in {sizes}", of(getattr(groups, name)), line if len(line) > 1 else None)
        for wire in wires_of(groups).values() if groups.pp else ():
            expect(f"a wire of rank {rank}", of(wire), of(groups.pp))
    must_raise("were started", lambda: make_groups(tp=world + 1))
    must_raise("at least 1", lambda: make_groups(tp=0))
    if rank < world - 1:
        must_raise(f"rank(s) [{world - 1}] of {world} did not come", lambda: meet("nowhere", 0.5), TimeoutError)


def adamw_steps(model, batches, loss=serial_loss, finish=lambda: None, **adamw):
    """The weights after a step for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    for batch in batches:
        loss(model, *batch).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def batches_of(model, n):
    """5 whole batches, and the rows of them that are this rank's."""
    batches = [tiny_tokens(model, 2 * n, seed) for seed in range(5)]
    return batches, [[x.chunk(n)[dist.get_rank()] for x in batch] for batch in batches]


@on_ranks
def check_data_parallel():
    """5 AdamW steps with gradients summed in several buckets equal the serial ones, though ranks began with different
    weights; a step's gradients equal v1's over micro-batches, and when a layer is not always, or not by all ranks,
    used; all buckets but the last are on their way before backward is over."""
    n, rank = dist.get_world_size(), dist.get_rank()
    model, group, started = tiny(n, seed=rank), mesh(dp=n).data, []
    batches, mine = batches_of(model, n)
    handle = data_parallel(model, group, bucket_mib=0.01)
    model.embedding.weight.register_hook(lambda gradient: started.append(handle.next))
    found = adamw_steps(model, mine, functools.partial(part_of_loss, group=group), handle.finish, lr=1e-3)
    worst = compare("data parallel", found, adamw_steps(tiny(n), batches, lr=1e-3))
    parameters, buckets = list(model.parameters()), len(handle.lists)
    require(3 < buckets < len(parameters), f"{buckets} buckets: too few to test their order, or one a parameter")
    expect("the bucket of the classifier, whose gradient is there first", handle.list_of[model.classifier], 0)
    late = buckets - min(started)
    require(late <= 2, f"{late} of {buckets} buckets had not begun when backward came to its last gradient")
    (tokens, targets), blocks = mine[0], model.blocks

    def backward(rows, layers):
        model.blocks = blocks[:layers]
        loss = part_of_loss(model, tokens[rows], targets[rows], group)
        model.blocks = blocks
        loss.backward()

    # Two micro-batches, of which the second does not use the last block; and a block that only rank 0 uses.
    for passes in ([(slice(0, 1), 2), (slice(1, 2), 1)], [(slice(0, 2), 1 if rank else 2)]):
        found = []
        for way in ("v1, after backward", "all at finish()", "during the last backward"):
            model.zero_grad()
            for rows, layers in passes:
                handle.enabled = way.startswith("during") and (rows, layers) == passes[-1]
                backward(rows, layers)
            sum_gradients(parameters, group) if way.startswith("v1") else handle.finish()
            found.append(gradients(model))
            compare(f"data parallel, {way}", found[-1], found[0])
    handle.close()
    one = data_parallel(model, group)  # nothing of its one bucket is sent before all of it is there
    backward(slice(0, 2), 1)
    must_raise("before finish()", lambda: backward(slice(0, 2), 1), RuntimeError)
    one.finish()
    expect("buckets of a small model", len(one.lists), 1)
    alone = DataParallel(parameters, None, 300 / MIB)  # less than two of the smallest
    expect("buckets of one parameter", len(alone.lists), len(parameters))
    expect("what to divide by where no token counts", global_count(targets == -7, group).item(), 1)
    return worst


def odd_gpt(n):
    """With a number more, so that n ranks do not divide its last unit."""
    model = tiny(n, layers=4)
    model.odd = nn.Parameter(torch.ones(1, dtype=torch.float64, device=here()))
    model.register_forward_hook(lambda model, _, E: E * model.odd)
    return model


@on_ranks
def check_zero():
    """Stages 2 and 3, also recomputed: 6 AdamW steps equal the serial ones; bytes held and sent are the formulas'; in
    stage 3 never are more than three units whole. 16-bit weights have fp32 masters. Refusals."""
    n, worst, group = dist.get_world_size(), 0.0, mesh(dp=dist.get_world_size()).data
    adamw, (batches, mine) = dict(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.3), batches_of(tiny(n), n)
    exact = adamw_steps(odd_gpt(n), [*batches, batches[0]], **adamw)
    for stage, again in ((2, False), (3, False), (3, True)):
        name, model, seen = f"ZeRO-{stage}{', recomputed' * again}", odd_gpt(n), []
        if again:
            recompute(model)
        zero = Zero(model, group, stage, **adamw)
        look = lambda *_, units=zero.units, seen=seen: seen.append(  # noqa: E731
            sum(unit.flat.untyped_storage().nbytes() > 0 for unit in units))
        for block in model.blocks:
            block.register_forward_pre_hook(look)
            block.register_full_backward_pre_hook(look)
        sent.clear()
        for batch in mine:
            part_of_loss(model, *batch, group).backward()
            zero.finish()
            held = zero.resident()
            zero.step()
        counted = sent.total() - sent["all-reduce"]  # by which tokens are counted
        part_of_loss(model, *mine[0], group).backward()
        must_raise("before finish()", part_of_loss(model, *mine[0], group).backward, RuntimeError)
        zero.finish()
        with torch.no_grad():
            model(mine[0][0])  # a look at the old weights, which must not stay
        zero.step()
        for unit in zero.units:
            unit.fetch()
        worst = max(worst, compare(name, weights_of(model), exact))
        units = [len(unit.flat) for unit in zero.units]  # with their padding
        P, once = sum(units), units[0] + units[-1]  # stage 3 gathers twice, but the first and the last unit once
        expect(f"{name}, bytes held", held, zero_bytes(P, n, stage, 8, 8, 16))
        expect(f"{name}, bytes sent", counted, 8 * 5 * (2 * P if stage < 3 else 3 * P - once) * (n - 1) // n)
        require(stage == 2 or max(seen) <= 3, f"{name}: {max(seen)} of {len(units)} units are whole at once")
    expect("bytes a rank by ZeRO's stages", [zero_bytes(8, 4, k, 2, 2, 12) for k in range(4)], [128, 56, 44, 32])
    # A rate that is half a rounding of these weights: in bf16 alone they would not move.
    weight = nn.Parameter(torch.full((7,), 0.5, dtype=torch.bfloat16, device=here()))
    unit = Unit([weight], group, False, dict(lr=1e-3, weight_decay=0.0))
    for _ in range(40):
        unit.gradient = torch.ones_like(unit.part)
        unit.step()
    require((weight - 0.46).abs().max() < 0.003, f"bf16 weights came to {weight.tolist()}, their masters to 0.46")
    model = tiny(n)
    model.classifier = model.embedding.weight
    must_raise("tied to the embedding", lambda: Zero(model, group, 3))
    must_raise("would be cut twice", lambda: tensor_parallel(model, group))
    must_raise("use 2 or 3", lambda: Zero(model, group, 1))
    model.blocks[0].norm1.to(torch.float32)
    must_raise("cast the model to one", lambda: Zero(model, group, 2))
    model.norm.requires_grad_(False)
    must_raise("a frozen parameter", lambda: Zero(model, group, 2))
    return worst


@functools.cache
def uncut(dtype=torch.float64, count=2, autocast=False):
    """{name: gradient, "loss": ...} of the tiny model on `count` sequences."""
    model = tiny(dist.get_world_size(), dtype)
    tokens, targets = tiny_tokens(model, count)
    with torch.autocast(here().type, torch.bfloat16, enabled=autocast):
        E = model(tokens)
    loss = base.linear_cross_entropy_reference(E, model.classifier, targets)
    loss.backward()
    return gradients(model) | dict(loss=loss.detach())


def trained(groups, dtype=torch.float64, count=2, sequence=False, zigzag=True, again=False, autocast=False):
    """The same of the model cut over the groups, its parts joined. again: recomputed."""
    model = tiny(dist.get_world_size(), dtype)
    tensor_parallel(model, groups.tp, sequence)
    if groups.cp is not None:
        context_parallel(model, groups.cp, zigzag)
    if again:
        recompute(model)
    handle = data_parallel(model, groups.data)
    tokens, targets = (split_sequence(x.chunk(size(groups.dp))[rank_in(groups.dp)], groups.cp, zigzag)
                       for x in tiny_tokens(model, count))
    total = global_count(targets != -100, groups.data)
    sent.clear()
    with torch.autocast(here().type, torch.bfloat16, enabled=autocast):
        E = model(tokens)
    loss = vocab_parallel_cross_entropy(E, model.classifier, targets, groups.tp, model.config.vocab, sequence=sequence,
                                        reduction="sum") / total
    loss.backward()
    handle.finish()
    joined = gradients(model)
    for name, p in model.named_parameters():
        if hasattr(p, "cut"):
            pieces = [None] * size(groups.tp)
            dist.all_gather_object(pieces, p.grad.cpu(), group=groups.tp)
            joined[name] = torch.cat(pieces, p.cut).to(here())
    return joined | dict(loss=all_reduce(loss.detach(), groups.data))


@on_ranks
def check_tensor_parallel():
    """Loss and all gradients, without and with sequence parallelism, recomputed, and under autocast; the bytes sent by
    the formula; refusals."""
    n, worst, groups = dist.get_world_size(), 0.0, mesh(tp=dist.get_world_size())
    config = tiny(n).config

    def expect_sent(name, sequence, itemsize, autocast=False):
        """Beside the cuts' the loss sends 6 N sums, norms their gradients; under autocast embedding and E are fp32."""
        N, norms = 2 * config.seq, 2 * (2 * config.layers + 1) * config.dim * sequence
        more = (6 * N * 4 + norms * (4 if autocast else itemsize) + 4 * 2 * N * config.dim * autocast) * (n - 1) // n
        predicted = tensor_parallel_traffic(config, N, n, sequence, itemsize) + more
        require(abs(sent.total() - predicted) <= 100, f"{name}: {sent.total()} bytes sent, not {predicted}")

    for name, sequence in (("tensor parallel", False), ("sequence parallel", True)):
        run = functools.partial(trained, groups, sequence=sequence)
        worst = max(worst, equal_to_serial(name, run, uncut))
        expect_sent(f"{name}, bf16", sequence, 2)  # its last run
        compare(f"{name}, recomputed", run(again=True), uncut())
        half = run(torch.float32, autocast=True)
        expect_sent(f"{name}, autocast", sequence, 2, autocast=True)
        as_good(f"{name}, autocast", torch.bfloat16, half, uncut(torch.float32, autocast=True), uncut())
    odd = base.GPT(base.GPTConfig(50, 8, 1, n + 1, 2 * (n + 1)))
    must_raise("divides the number of heads", lambda: tensor_parallel(odd, groups.tp))
    must_raise("pad the sequence", lambda: scatter(torch.zeros(1, n + 1, 2, device=here()), groups.tp))
    for kind in (column_linear, row_linear):
        must_raise("bias=False", functools.partial(kind, nn.Linear(4, 4), groups.tp, False))
    return worst


@on_ranks
def check_vocabulary():
    """A classifier cut unevenly: bias, softcap, ignored tokens, reductions, shift, lse, logits whose exponentials
    overflow; refusals."""
    n, worst, V = dist.get_world_size(), 0.0, 103
    group, span = mesh(tp=n).tp, slice(*shares(V, n)[dist.get_rank()])

    def run(cut, dtype=torch.float64, gradient="exact", bias=True, weigh=False, scale=1.0, **options):
        """The loss and, of this rank's classes, its gradients."""
        E, C, b, x = base.random_problem(46, V, 24, dtype, here(), bias=bias, scale=scale)
        x = x.where(x != -100, options.get("ignore_index", -100)).view(2, 23)
        tensors = (E.view(2, 23, 24), *(t[span] if cut else t for t in (C, b) if t is not None))
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        one = functools.partial(filtering.linear_cross_entropy, gradient=gradient, bias=leaves[2] if bias else None)
        loss = (vocab_parallel_cross_entropy(*leaves[:2], x, group, V, loss=one, **options) if cut
                else one(*leaves[:2], x, **options))
        if weigh:  # through the lse as well
            loss = loss[0] + 0.1 * loss[1].square().mean()
        upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
        dE, *rest = torch.autograd.grad((loss * upstream).sum(), leaves)
        rest = [t if cut else t[span] for t in rest]
        return dict(loss=loss.detach(), dE=dE, **dict(zip(("dC", "db"), rest, strict=False)))

    for options in (dict(), dict(softcap=3.0), dict(reduction="none"), dict(reduction="sum", bias=False),
                    dict(return_lse=True, weigh=True), dict(ignore_index=7)):
        worst = max(worst, compare(f"vocabulary {options}", run(True, **options), run(False, **options)))
    # By the kernels, on a GPU. 40: logits up to some 160, whose exponentials fp32 has not, and which it rounds.
    for dtype, scale in itertools.product((torch.float32, torch.bfloat16), (1.0, 40.0)):
        three = (True, dtype), (False, dtype), (False, torch.float64)
        as_good(f"vocabulary, scale {scale:g}", dtype, *(run(*two, scale=scale) for two in three), 160 * 2**-24)
    must_raise("use 'exact'", lambda: run(True, gradient="auto", bias=False))
    E, C, _, x = base.random_problem(4, V, 8, device=here())
    must_raise("is rows", lambda: vocab_parallel_cross_entropy(E, C, x, group, V))
    return worst


def forged_layer(rule, layout, kind, group, sequence, W, data):
    """Steps of one linear layer (M, K), cut by `kind`, or (kind and group None) whole: its weight and states."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False, device=here())
    layer.weight.data.copy_(W)
    origins, ranks = {}, {}
    if group is not None:
        kind(layer, group, sequence)
        origins = dict(weight=layer.weight.origin)
        ranks = dict(weight=ranks_of(layer.weight, group)) if rule.needs != "element" else {}
    handle = forging.forge(layer, rule, layout, data_parallel=1, origins=origins, ranks=ranks)
    along_in, along_out = (1, 2) if kind is column_linear else (2, 1)  # what x and dy are cut along; 1: by sequence
    pick = lambda x, dim: x.chunk(size(group), dim)[rank_in(group)] if dim == 2 or sequence else x  # noqa: E731
    for t, (X, dY) in enumerate(data, 1):
        x, dy = pick(X.to(here()), along_in), pick(dY.to(here()), along_out)  # parts of (B, T, K), (B, T, M)
        handle.arm(1e-2 * t, t)
        layer(x.requires_grad_()).backward(dy)
    return dict(weight=layer.weight.detach(), **handle["weight"].tensors)


@on_ranks
def check_forge():
    """FORGE on shards under tensor and sequence parallelism: the update of the whole matrix, bit for bit, in all
    layouts (whole numbers make every sum exact). Under data parallelism it is refused."""
    n, group = dist.get_world_size(), mesh(tp=dist.get_world_size()).tp
    M, K, T, rule = 8 * n, 128 * n, 4 * n, forging.AdamW(weight_decay=0.1)
    W, data = forging.whole_numbers(2 * T, M, K, "cpu", steps=2)
    data = [(X.view(2, T, K), dY.view(2, T, M)) for X, dY in data]
    for layout in forging.LAYOUTS:
        alone = forged_layer(rule, layout, None, None, False, W, data)
        for (dim, kind), sequence in itertools.product(enumerate((column_linear, row_linear)), (False, True)):
            want = {name: tensor.chunk(n, dim)[rank_in(group)] for name, tensor in alone.items()}
            got = forged_layer(rule, layout, kind, group, sequence, W, data)
            compare(f"{layout}, {kind.__name__}, {sequence=}", got, want, 0)
    must_raise("data-parallel processes", lambda: forging.forge(nn.Linear(4, 4), forging.AdamW()))


@on_ranks
def check_wide_rules():
    """Muon and Adam-mini of a matrix that is cut by rows or columns. In fp64 Muon's joined update is that of the whole
    matrix, bit for bit; steps in fp32 (products on a GPU in bf16) are as close to fp64 by hand as those of the whole
    matrix; the bytes sent are those of the formulas."""
    n, group = dist.get_world_size(), mesh(tp=dist.get_world_size()).tp
    M, K, T, muon, mini = 8 * n, 24 * n, 16, forging.Muon(weight_decay=0.1), forging.AdamMini(weight_decay=0.1)
    W, data = forging.whole_numbers(T, M, K, "cpu", steps=3)
    summed, data = [(dY.T @ X)[None] for X, dY in data], [(X[None], dY[None]) for X, dY in data]
    start = W.double().to(here())
    for kind, dim in ((column_linear, 0), (row_linear, 1)):
        pick = lambda tensor, dim=dim: tensor.chunk(n, dim)[rank_in(group)]  # noqa: E731
        ranks = ranks_of(SimpleNamespace(cut=dim, shape=W.shape), group)
        joined = ranks.own_part(forging.orthogonal(ranks.join(pick(start))))
        compare(f"update in fp64, cut {dim}", dict(Muon=joined), dict(Muon=pick(forging.orthogonal(start.clone()))), 0)
        a_step = {muon: muon_traffic(M, K, n, 2 if here().type == "cuda" else 4), mini: dim * 2 * 4 * M * (n - 1) // n}
        for rule, bytes_ in a_step.items():
            alone = forged_layer(rule, "fp32", None, None, False, W, data)["weight"]
            exact = forging.by_hand(rule, W=W[None], gradients=summed, rate=0.01)[0][0].to(here())
            sent.clear()
            got = forged_layer(rule, "fp32", kind, group, False, W, data)["weight"]
            traffic = sent.total() - len(data) * 2 * 4 * T * (M if dim else K) * (n - 1) // n  # of f or g
            moved = [w.double() - pick(start) for w in (got, pick(alone), pick(exact))]
            cce.require_as_good(f"{type(rule).__name__}, cut {dim}", *moved, 1e-5)
            expect(f"{type(rule).__name__}, cut {dim}, bytes sent", traffic, len(data) * bytes_)


def check_schedules():
    """Bubbles and micro-batches in flight of every schedule, simulated, are those of the formulas; lists that cannot
    end are refused."""
    cost = dict(F=1, B=2, W=0)
    for p, times, (name, schedule) in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), SCHEDULES.items()):
        for m in (times, times * p):
            if name == "interleaved" and m % p:
                continue
            found = simulate(schedule.lists(p, m), dict(F=1, B=1, W=1) if name == "zero-bubble" else cost)
            if name == "zero-bubble" and m < p:
                continue  # it ends; too few micro-batches for its formula
            expect(f"{name}, p={p}, m={m}, bubble", found.bubble, schedule.bubble(p, m), 1e-12)
            expect(f"{name}, p={p}, m={m}, in flight", found.peak, [schedule.peak(p, m, rank) for rank in range(p)])
    must_raise("needs a multiple", lambda: interleaved(2, 3))
    must_raise("wait for each other", lambda: simulate([[Op("B", 0), Op("F", 0)]], cost))
    # Two ranks of two chunks: from the second back to the first micro-batches would go as 0, 1 and be wanted as 1, 0.
    turned = [Op("F", 0), Op("F", 1), Op("F", 1, 1), Op("F", 0, 1)]
    must_raise("rank 1 sends results of F in another order", lambda: simulate([turned, turned], cost))
    expect("the chart of 1F1B", chart(one_f_one_b(2, 2), cost), ["01..aa.bb", ".0aa1bb.."])


# Pipelines. Whatever the schedule, all micro-batches go through the same kernels, and a weight's products are added in
# the order of micro-batches. So gradients are those of the stages one after the other bit for bit, also under autocast,
# where a tolerance could not tell a product that was left out from rounding.


def piped(m, schedule=None, tied=False, plain=False, autocast=False):
    """(model, its loss) after a backward of m micro-batches: this rank's part by a schedule, or all, in order."""
    groups, queue, p = mesh(pp=dist.get_world_size()), WeightQueue(), dist.get_world_size()
    rank, model = rank_in(groups.pp), tiny(p, torch.float32 if autocast else torch.float64, layers=2 * p)
    tokens, targets = tiny_tokens(model, 2 * m)
    parts, goals, total = tokens.chunk(m), targets.chunk(m), global_count(targets != -100, None)
    if tied:
        model.classifier = model.embedding.weight if plain else nn.Parameter(model.embedding.weight.detach().clone())
    loss = lambda y, i: base.linear_cross_entropy_reference(  # noqa: E731
        y, model.classifier, goals[i], reduction="sum") / total
    with torch.autocast(here().type, torch.bfloat16, enabled=autocast):
        if schedule is None:
            one = model if plain else Stage(model, 0, 1, queue)
            losses = [loss(one(part), i) for i, part in enumerate(parts)]
            for each in losses:
                each.backward()
            return model, sum(each.detach() for each in losses)
        stages = [Stage(model, c * p + rank, schedule.chunks * p, queue) for c in range(schedule.chunks)]
        like = torch.empty(*parts[0].shape, model.config.dim, dtype=model.classifier.dtype, device=here())
        sent.clear()
        found = run_pipeline(schedule.lists(p, m)[rank], stages, queue, parts, loss, groups, like)
    neighbours = 2 * schedule.chunks - (rank == 0) - (rank == p - 1)  # every chunk's, but for both ends
    expect("bytes sent to other stages", sent["send"], neighbours * m * like.nbytes)
    held, given = {q for s in stages for q in s.parameters()}, {q for q in model.parameters() if q.grad is not None}
    require(given == held, "gradients of what the stages do not hold")
    return model, found


@on_ranks
def check_pipeline():
    """Every schedule gives the gradients of the same stages one after the other bit for bit, also with fewer
    micro-batches than stages, and under autocast; in fp64 the plain model's to 1e-12, also of a weight that the first
    and last stage share."""
    p, groups = dist.get_world_size(), mesh(pp=dist.get_world_size())
    for m, autocast in ((max(1, p - 1), False), (2 * p, False), (2 * p, True)):
        (serial, want), (plain, _) = (piped(m, plain=plain, autocast=autocast) for plain in (False, True))
        for name, schedule in SCHEDULES.items():
            if name == "interleaved" and m < p:
                continue  # it needs a multiple of p
            model, loss = piped(m, schedule, autocast=autocast)
            mine = {key: gradient for key, gradient in gradients(model).items() if gradient is not None}
            for like, tolerance in ((serial, 0), (plain, 2**-6 if autocast else 1e-12)):
                exact = {key: like.get_parameter(key).grad for key in mine}
                compare(f"{name}, {m} micro-batches, {autocast=}", mine, exact, tolerance)
            require(rank_in(groups.pp) < p - 1 or torch.equal(loss, want), f"{name}: the loss differs")
    # Tied: one weight, of which the first and the last stage have a copy each, whose gradients are summed.
    model, plain = piped(m, SCHEDULES["1f1b"], tied=True)[0], piped(m, tied=True, plain=True)[0]
    ends = [torch.zeros_like(q) if q.grad is None else q.grad for q in (model.embedding.weight, model.classifier)]
    compare("tied", dict(weight=all_reduce(ends[0] + ends[1], groups.pp)), dict(weight=plain.classifier.grad))


@on_ranks
def check_stage():
    """What cannot be a stage, or go through one, is refused; frozen weights get no gradient."""
    groups, queue, model = mesh(pp=dist.get_world_size()), WeightQueue(), tiny(2)
    must_raise("make them equal", lambda: run_pipeline([], [0], queue, torch.arange(3).split(2), None, groups, None))
    must_raise("pass one chunk", lambda: run_pipeline([], [1, 2], queue, [], None, SimpleNamespace(pp=None), None))
    long = torch.zeros(1, model.config.seq + 1, dtype=torch.int64, device=here())
    must_raise("was built for seq", lambda: Stage(model, 0, 1, queue)(long))
    lean(model, compiled=False)
    must_raise("leave lean() out", lambda: Stage(model, 0, 1, queue))
    tensor_parallel(model := tiny(dist.get_world_size()), groups.pp)
    must_raise("layers that are cut", lambda: Stage(model, 0, 1, queue))
    frozen = tiny(2).requires_grad_(False)
    frozen.embedding.requires_grad_(True)
    Stage(frozen, 0, 1, queue)(long[:, 1:]).sum().backward()
    require(all(q.grad is None for q in frozen.blocks.parameters()), "a frozen weight has a gradient")


@on_ranks
def check_context():
    """Ring attention in a whole model, both ways of cutting: loss and gradients; alone also in bf16, whose
    results are one rounding from exact (a GPU's, one from torch's); work a rank; refusals."""
    n, worst, groups = dist.get_world_size(), 0.0, mesh(cp=dist.get_world_size())
    group, T, generator = groups.cp, 32 * n, torch.Generator().manual_seed(0)
    # Scores up to 5. (An untrained model's are nearly 0, and its dq and dk, too.)
    *tensors, upstream = (torch.randn(2, 3, T, 16, generator=generator).bfloat16().to(here()) for _ in range(4))

    def attention(dtype, zigzag=None):
        """out, dq, dk, dv of all positions; zigzag None: torch's."""
        mine = functools.partial(split_sequence, group=group if zigzag is not None else None, zigzag=zigzag, dim=2)
        *qkv, dout = (mine(t).to(dtype) for t in (*tensors, upstream))
        qkv = [t.requires_grad_() for t in qkv]
        out = base.causal_attention(*qkv) if zigzag is None else ring_attention(*qkv, group, zigzag)
        found = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
        if zigzag is not None:  # put the positions back in order
            order = gather(mine(torch.arange(T, device=here()).view(1, 1, -1)), group, 2).flatten().argsort()
            found = [gather(t, group, 2)[:, :, order] for t in found]
        return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))

    exact, peer = attention(torch.float64), {dtype: attention(dtype) for dtype in (torch.float32, torch.bfloat16)}
    # In bf16 backward has out rounded, as torch's has. What it makes of that, exactly:
    q, k, v, dout = (t.double() for t in (*tensors, upstream))
    out, lse = block_attention(q, k, v, True)
    narrow = dict(zip(exact, (out, *block_gradients(dout, q, k, v, out.bfloat16(), lse, True)), strict=True))
    for zigzag, name in ((False, "contiguous"), (True, "zigzag")):
        worst = max(worst, equal_to_serial(name, functools.partial(trained, groups, zigzag=zigzag), uncut))
        name += " attention"
        sent.clear()
        worst = max(worst, compare(name, attention(torch.float64, zigzag), exact))
        block = 2 * q.nbytes // n  # keys and values go n - 1 times, twice, and their gradients n times
        expect(f"{name}, bytes sent", sent["send"], (3 * n - 2) * block)
        got = attention(torch.float32, zigzag)  # a score of 5, rounded, is off by 5 roundings after exp()
        as_good(name, torch.float32, got, peer[torch.float32], exact, 5 * n * 2**-23)
        for key, tensor in attention(torch.bfloat16, zigzag).items():
            want, limit = narrow[key], 1.05 * cce.error(narrow[key].bfloat16(), narrow[key])
            if here().type == "cuda":  # a kernel rounds what it makes of each block: once more than torch's one kernel
                want, theirs = exact[key], cce.error(peer[torch.bfloat16][key], exact[key])
                limit = 1.1 * math.hypot(theirs, cce.error(want.bfloat16(), want))
            ours = cce.error(tensor, want)
            require(ours <= limit, f"{name}, bf16: error of {key} {ours:.2e}, over {limit:.2e}")
        work = attention_work(T, n, zigzag)
        expect(f"{name}, pairs", sum(work), T * (T + 1) // 2)
        require(not zigzag or len(set(work)) == 1, f"zigzag is not balanced: {work}")
    must_raise("pad the sequence", lambda: split_sequence(torch.zeros(1, 2 * n + 1), group))
    require(split_sequence(torch.zeros(1, 3), None).shape == (1, 3), "one process can have any number of positions")
    context_parallel(model := tiny(n), group)
    must_raise("positions on a rank", lambda: model(torch.zeros(1, 4, dtype=torch.int64, device=here())))
    return worst


@on_ranks
def check_mesh():
    """Two cuts at once, of an even number of ranks: data or context with tensor (and sequence) parallelism."""
    world, worst = dist.get_world_size(), 0.0
    for axis in ("dp", "cp"):
        found = trained(mesh(**{axis: 2, "tp": world // 2}), count=world, sequence=axis == "dp")
        worst = max(worst, compare(f"{axis} x tp", found, uncut(count=world)))
    return worst


def small_model(device, layers=4, dim=64, seq=64):
    torch.manual_seed(0)
    return base.GPT(base.GPTConfig(64, seq, layers, 4, dim)).to(device)


# That memory is given back is no matter of results: they are right as well if nothing ever is. So bytes are counted
# after forward, while an event holds up the thread that writes, and when all is in flight; and each way's gradients are
# compared bit for bit, as a storage that comes back as another one need not look wrong.


def check_memory_instead():
    """Recomputed and offloaded, while copies are slow to go and while they are on their way: the same gradients bit
    for bit; what forward leaves is a layer's input, or what may be in flight; a storage goes once; no file is left.
    What is written to while it is copied raises."""
    device = here() if dist.is_initialized() else base.default_device()
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    kept, stream, ahead, want, fetched = {}, 2 * 64 * 64 * 4, 2, {}, []
    with tempfile.TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):  # others may add up in any order
        place = folder if device.type == "cpu" else None
        for way in ("kept", "recomputed", "offloaded", "in flight"):
            model, offload, may_write = small_model(device), None, threading.Event()
            if way == "recomputed":
                recompute(model)
            elif way != "kept":  # nothing is written for a while, or before backward is over
                offload = Offload(model, place, 10**6 if way == "in flight" else ahead)
                offload.thread.submit(may_write.wait)
                for p in model.parameters():  # at each gradient, how many copies are fetched
                    p.register_hook(lambda _, copies=offload.copies: fetched.append(
                        sum(copy_.fetched is not None for copy_ in copies)))
            if way == "offloaded":
                threading.Timer(0.3, may_write.set).start()
            try:
                with offload or contextlib.nullcontext():
                    kept[way], E = kept_bytes(lambda: model(tokens))  # noqa: B023
                    loss = E.square().mean()
                loss.backward()
            except RuntimeError as error:  # a storage of another size, say
                raise AssertionError(f"{way}: {error}") from None
            finally:
                may_write.set()
            want = want or {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
            compare(way, gradients(model), want, 0)
            if offload:
                offload.close()
                counts = offload.counts
                require(counts["tensors"] > counts["storages"] > 20, f"{way}: nothing was saved twice: {counts}")
                require(counts["late"] <= 1, f"{way}: only the first may be asked for when it is wanted: {counts}")
        expect("what was in flight and used there", counts["forwarded"], counts["tensors"])  # of the last way
        require(not list(Path(folder).iterdir()), "files are left")
        most = stream * (1 + 4 * (ahead + 1)) + 2**16  # E, copies in flight of up to 4 D a token each, small tensors
        require(kept["offloaded"] <= most < kept["kept"] / 4, f"{kept} bytes after forward: offloaded, at most {most}")
        # Beside those ahead: what is in use, and what a layer's beginning wants, too.
        require(0 < max(fetched) <= ahead + 4, f"{max(fetched)} copies are fetched at once, not 1 to {ahead + 4}")
        inputs = stream * (4 + (3 if device.type == "cuda" else 4))  # of layers; the ends: first norm, last norm, E
        expect("recomputed, bytes after forward", kept["recomputed"], inputs, 0.05)
        check_edits(device, place)
        for wrong in (None if place else folder, Path(folder, "missing")):
            must_raise("offload on a", functools.partial(Offload, small_model(device), wrong))


def check_edits(device, place):
    """What is written to after it was saved has its old value in backward, if it was copied by then, or raises."""
    layer, x, may_write = nn.Linear(64, 64, device=device), torch.ones(64, 64, device=device), threading.Event()

    def forward(context, plus_one=lambda a: a.add_(1)):
        with context:
            a = layer(x)
            return a.sin().sum() + plus_one(a).cos().sum()

    want = torch.autograd.grad(forward(contextlib.nullcontext(), lambda a: a + 1), layer.weight)[0]
    with contextlib.closing(Offload(layer, place, ahead=0)) as offload:  # every copy is waited for
        b = forward(offload)
        got = torch.autograd.grad(b, layer.weight, retain_graph=True)[0]
        must_raise("a second one needs", b.backward, RuntimeError)
    require(torch.equal(got, want), "what was written to after its copy was made comes back changed")
    with contextlib.closing(Offload(layer, place)) as offload:
        offload.thread.submit(may_write.wait)
        try:
            must_raise("written to before it was copied", forward(offload).backward, RuntimeError)
        finally:  # or its thread would never end
            may_write.set()


def check_lean():
    """lean(), uncompiled: the same gradients, and forged steps, bit for bit but for the kernel's; as many bytes fewer
    as its formula says. The kernel turns, and turns back, as 01 does, also where heads and their halves are no powers
    of two."""
    device, T, layers, dim = base.default_device(), 12, 2, 96
    tokens = torch.randint(64, (2, T), generator=torch.Generator().manual_seed(0)).to(device)
    results, kept = {}, {}
    for way in ("plain", "kept", "lean", *["kernel"] * base.HAS_TRITON, "forged", "lean, forged", "recomputed",
                "kept, recomputed"):
        model = small_model(device, layers, dim, T)
        if way not in ("plain", "forged", "recomputed"):
            lean(model, compiled=False, remake=not way.startswith("kept"), kernel=way == "kernel")
        if way.endswith("recomputed"):
            recompute(model)
        if way.endswith("forged"):
            forging.forge(model, forging.SGD(), data_parallel=1).arm(0.1, 1)
        # Flash attention may add up in any order on a GPU; the plain one keeps other things.
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext():
            kept[way], (E, _) = kept_bytes(lambda: (model(tokens), gc.collect()))  # noqa: B023  a kernel's cycles
            (E * torch.arange(dim, device=device).cos()).sin().sum().backward()
        results[way] = weights_of(model) | {f"gradient of {name}": g for name, g in gradients(model).items()}
        like = results["forged" if way.endswith("forged") else "plain"]
        for name, tensor in results[way].items():
            error = 0 if tensor is None and like[name] is None else cce.error(tensor, like[name])
            require(error <= (1e-6 if way == "kernel" else 0), f"{way}: {name} is off by {error:.1e}")
    for way in ("lean", "kernel") if device.type == "cpu" and base.HAS_TRITON else ():
        formula = lean_saving(model.config, tokens.numel(), 4, kernel=way == "kernel")
        expect(f"bytes that {way} saves", kept["kept"] - kept[way], formula, 0.01)
    expect("bytes that recomputed lean layers leave", kept["kept, recomputed"], kept["recomputed"])
    check_lean_state(small_model(device, layers, dim, T))
    check_gelu(device)
    block, angles = model.blocks[0], (model.cos, model.sin)
    for heads in (4, 5) if base.HAS_TRITON else ():
        x = torch.randn(2, T, 3 * heads * block.head, generator=torch.Generator().manual_seed(1)).to(device)
        x, outs, found = x.requires_grad_(), [], []
        for parts in (Turned.apply(x, *angles, block.head), block.heads(x, *angles)):
            outs.append(torch.stack(parts))  # (3, B, H, T, D/H)
            found.append(torch.autograd.grad(outs[-1].sin().sum(), x)[0])
        for what, pair in (("q, k, v", outs), ("the gradient", found)):
            require(cce.error(*pair) < 1e-6, f"{heads} heads: {what} off by {cce.error(*pair):.1e}")


def check_gelu(device):
    """Of every bf16 number up to 2^10: off by a rounding, and 1e-6. In place."""
    h = torch.arange(2**16, device=device).to(torch.int16).view(torch.bfloat16)
    h = h[h.abs() <= 2**10]
    x, g = h.double().requires_grad_(), torch.linspace(-1, 1, len(h), device=device).bfloat16()
    want = F.gelu(x)
    want.backward(g.double())
    room, gradient = h.clone(), g.clone()
    made, dh = gelu_back(room, gradient)
    require(made.data_ptr() == room.data_ptr() and dh.data_ptr() == gradient.data_ptr(), "gelu_back took new memory")
    for what, got, exact in (("gelu", gelu(h), want), ("gelu again", made, want), ("its gradient", dh, x.grad)):
        over = ((got.double() - exact).abs() - 2.0**-8 * exact.abs()).max().item()
        require(over < 1e-6, f"{what} is off by a rounding and {over:.1e}")


def check_lean_state(model):
    """A forged weight behind the activation keeps factors when it is to wait, and is guarded as 04's layers are."""
    handle = forging.forge(model, forging.SGD(), data_parallel=1, rung="slab")
    lean(model, compiled=False)
    down, state = model.blocks[0].down, handle["blocks.0.down.weight"]
    h = torch.randn(2, 3, down.in_features, device=down.weight.device, requires_grad=True)
    use = lambda: model.blocks[0].forward.gelu_linear(h, down).sum()  # noqa: E731
    handle.stash()
    use().backward()
    require(isinstance(state.factors[0], forging.Product), "a stashed weight has its gradient whole")
    handle.release(0.1, 1)
    y = use()
    with torch.no_grad():
        down.weight.mul_(2)
    must_raise("changed between forward and backward", y.backward)
    handle.arm(0.1, 2)
    use()
    must_raise("is used twice", use)


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
    require(span([]) == 0, "nothing to do takes time")
    must_raise("wait for each other", lambda: play([Task((0,), (0,), 1, ((1,),)), Task((1,), (0,), 1)]))
    must_raise("of one name", lambda: play([Task((0,), (0,), 1), Task((0,), (1,), 1)]))


# Checks of policies. What holds for every batch, that nothing is lost, or done twice, or more than fits, is tried on
# random ones. That a policy is the one it says, and not a worse one, only a batch shows that was worked out by hand, or
# an arena where the worse one gains less.


def check_uneven(seeds=8, n=16):
    """Random batches. Every policy: all tokens and all pairs, once. DistCA: no row twice, the largest load never above
    fixed packing's, and nobody lacks while another has too much. Groups: within capacity and limit. Then by hand."""
    costs = costs_of_layer(4096)
    for seed in range(seeds):
        tokens = (1 + seed % 3) * 4096 * n
        lengths = lognormal_lengths(tokens, seed, tokens // 4, 6.0 + seed % 3, 1.0 + seed % 2)
        pairs, capacity, rows = sum(pairs_of(0, s) for s in lengths), 2 * tokens // n, end_to_end(lengths, n)
        moves = disaggregate(rows, n, costs)
        splits = {"fixed": fixed_packing(rows, n, costs), "DistCA": with_moves(rows, n, moves, costs),
                  "Zeppelin": two_layouts(lengths, n, costs)}
        for name, equal in (("equal groups", True), ("FlexSP", False)):
            _, groups, splits[name] = best_groups(lengths, n, costs, capacity, 8, equal)
            fits = max(splits[name].tokens) <= capacity and max(groups) <= 8 and (len(set(groups)) == 1 or not equal)
            require(sum(groups) == n and fits, f"{name}: {groups}")
        for name, split in splits.items():
            expect(f"{name}: tokens", sum(split.tokens), tokens, 1e-12)
            expect(f"{name}: pairs", sum(split.pairs()), pairs, 1e-9)
            require(min(split.early + split.late) >= -1e-9 * pairs, f"{name}: less than no work")
        seen = Counter((part.document, row) for part, _ in moves for row in range(part.start, part.stop))
        require(max(seen.values(), default=1) == 1, "a row is done twice")
        before, after = splits["fixed"].pairs(), splits["DistCA"].pairs()
        require(max(after) <= max(before), f"DistCA makes the largest load larger: {max(before)}, {max(after)}")
        lack, surplus = pairs / n - min(after), max(after) - pairs / n  # both only where no single row is small enough
        require(lack <= max(0.1 * pairs / n, max(lengths)) or surplus <= max(lengths), "one lacks, another has more")
    for capacity, largest in ((200, 4), (240, 2)):
        must_raise("find no room", lambda: best_groups([100, 900], 4, costs, capacity, largest, True))  # noqa: B023
    check_uneven_by_hand()


def check_uneven_by_hand():
    """Documents of 6 and 2 tokens over two ranks, 21 and 3 pairs; a pair takes 1 s, a token 10; a query has 3 bytes, a
    key 1, and a byte takes 2 s in a host and 4 between hosts."""
    # D = 4096, bf16: 12 D^2 weights x 6 FLOPs, 12 D a pair, 48 % of 989 TFLOP/s; 8 KiB a query, a quarter a key.
    real = costs_of_layer(4096)
    for name, got, want in (("token, us", 1e6 * real.token, 2.5446), ("pair, us", 1e6 * real.pair, 1.0354e-4),
                            ("query", real.query, 8192), ("key", real.key, 2048)):
        expect(f"a layer's costs, {name}", got, want, 1e-4)
    costs = Costs(10, 1, 3, 1, Links(2, 1 / 2, 1 / 4))
    lengths, rows = [6, 2], end_to_end([6, 2], 2)
    moves = disaggregate(rows, 2, costs)
    expect("moves, of [10, 14] pairs", moves, [(Queries(1, 1, 2, 1), 0)])
    fixed, fast = fixed_packing(rows, 2, costs), costs._replace(links=Links(2, 1e9, 1e9))
    for some, want in ((costs, []), (fast, moves)):
        expect("moves that help", only_what_helps(rows, 2, moves, some), want)
    for name, got, want in (
        ("fixed", fixed, ([4, 4], [10, 3], [0, 11], {(0, 1): 8})),
        ("moved", with_moves(rows, 2, moves, costs), ([4, 4], [10, 1], [2, 11], {(0, 1): 8, (1, 0): 10})),
        ("apart", grouped(lengths, (1, 1), costs, 6), ([6, 2], [21, 3], [0, 0], {})),
        ("together", grouped(lengths, (2,), costs, 6), ([4, 4], [0, 0], [12, 12], {(0, 1): 16, (1, 0): 16})),
        ("two layouts", two_layouts(lengths, 2, costs), ([4, 4], [0, 5.25], [13.5, 5.25], {(0, 1): 9, (1, 0): 17})),
        # 6 tokens take 81 s on one rank; on two, (21 + 60) / 2 and 24 bytes of messages, of 1 s or of 2.
        ("done first by two", grouped([6], (2, 1), costs._replace(links=Links(2, 1, 1)), 9),
         ([3, 3, 0], [0, 0, 0], [10.5, 10.5, 0], {(0, 1): 12, (1, 0): 12})),
        ("done first by one", grouped([6], (2, 1), costs, 9),
         ([0, 0, 6], [0, 0, 21], [0, 0, 0], {(0, 1): 0, (1, 0): 0})),
    ):
        expect(name, tuple(got), want)
    expect("two rings of two ranks", two_layouts([6, 6], 4, costs, finest=1.0).pairs(), [10.5] * 4)
    far = Split([0] * 4, [0] * 4, [0] * 4, Counter({(0, 2): 8}))
    fan = far._replace(moves=Counter({(0, 1): 8, (0, 2): 8}))  # one sends to two, and they to it: one at a time
    for split, host, want in ((fixed, 2, 83), (fixed, 1, 115), (far, 2, 32), (far, 1, 64), (far, 4, 32), (fan, 4, 64)):
        expect(f"a layer, hosts of {host}", layer_time(split, costs._replace(links=Links(host, 1 / 2, 1 / 4))), want)
    expect("2 s a pair: 16, 22 of attention, 16, 40", layer_time(fixed, costs._replace(pair=2)), 94)
    # What is cheapest for its pairs is taken: of a long document before a short one, of the same host before another.
    for n, want, *rows in ((2, (Queries(1, 5, 8, 0), 1), (0, 0, 4, 0), (1, 0, 8, 0), (2, 0, 2, 1)),
                           (4, (Queries(1, 7, 8, 1), 0), (0, 0, 8, 2), (1, 0, 8, 1), (2, 0, 6, 3))):
        expect("what is moved first", disaggregate([Queries(*row) for row in rows], n, costs)[0], want)
    expect("divisions of 4", sorted(divisions(4, 2)), [(1, 1, 1, 1), (2, 1, 1), (2, 2)])
    for largest, want in ((4, (4,)), (2, (2, 2))):
        expect(f"groups of at most {largest}", best_groups([20], 4, fast, 48, largest, equal=True)[1], want)
    costs = Costs(1, 1, 3, 1, Links(4, 1, 1))  # the example before divisions()
    for groups, want in {(1, 1, 1, 1): 230, (2, 2): 231, (4,): 261, (2, 1, 1): 195}.items():
        expect(f"20, 14 and 14 tokens by {groups}", layer_time(grouped([20, 14, 14], groups, costs, 48), costs), want)
    for equal, want in ((True, (230, (1, 1, 1, 1))), (False, (195, (2, 1, 1)))):
        expect("20, 14 and 14 tokens", best_groups([20, 14, 14], 4, costs, 48, 4, equal)[:2], want)


def check_arena():
    """What each policy is worth where something can be won: [Contest]. Nobody beats the ceiling, what is promised is
    kept in each case, and no policy is replaced by a worse one."""
    eight, four, flow, skip = uneven_contests(8), uneven_contests(4), flow_contests(), skip_contests()
    contests = [*eight, *four[1:], *flow, *skip]
    # 1F1B of 4 stages and 16 micro-batches takes 19 x 3, its work with 3 stages 16 x 3/4 x 3.
    expect("SkipPipe's ceilings", [one.ceiling[1] for one in skip], [57 / 36, 57 * 3 / 4 / 36])
    for one in contests:
        require(all(ours <= most + 1e-9 for ours, most in zip(one.ours, one.ceiling, strict=True)),
                f"{one.system} is faster than perfect")
    never = [one for one in contests if one.system == "FlexSP" or one.baseline in ("fixed packing", "lock step")]
    require(all(min(one.ours) >= 1 for one in never), "DistCA, FlexSP and FlowTrain are slower than nothing at all")
    for one, least, best in ((eight[0], 1.6, 1.7), (eight[1], 1.05, 1.6), (eight[2], 0.9, 1.7), (four[1], 1.9, 3.3),
                             (four[2], 1.6, 3.4), (flow[0], 1.9, 2.1), (flow[1], 0.9, 0.93), (skip[0], 1.1, 1.7),
                             (skip[1], 0.8, 0.9)):
        median, most = statistics.median(one.ours), max(one.ours)
        good = median >= least and most >= best
        require(good, f"{one.system} against {one.baseline}: {median:.2f}, at best {most:.2f}")
    return contests


@on_ranks
def check_elsewhere():
    """Rows of queries done by other ranks: outputs and gradients are the serial ones, the bytes those of the plan; also
    when only one rank has anything to give."""
    n, me, worst, moved = dist.get_world_size(), dist.get_rank(), 0.0, 0
    group, H, d = mesh(dp=n).data, 2, 8
    costs = Costs(1, 1, 8 * H * d, 8 * H * d, HOSTS)  # fp64
    rounded = 5 * n * torch.finfo(torch.float32).eps  # a score of 5, rounded, is off by 5 roundings after exp()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 40, (n + 2,), generator=generator).tolist()
        homes = [*range(n), *([0, 0] if seed % 2 else [n - 1, 0])]  # each rank has one at least, some more
        random = [[torch.randn(s, H, d, generator=generator, dtype=torch.float64) for _ in range(4)] for s in lengths]
        rows = [Queries(i, 0, s, home) for i, (s, home) in enumerate(zip(lengths, homes, strict=True))]
        moves = disaggregate(rows, n, costs, tolerance=0.0)
        moved += len(moves)

        def attention(dtype, elsewhere, random=random, homes=homes, moves=moves):
            """{document and name: out, dq, dk, dv} of this rank's documents."""
            mine = {i: [x.to(here(), dtype, copy=True).requires_grad_() for x in tensors[:3]]
                    for i, tensors in enumerate(random) if homes[i] == me}
            swap = lambda x: x.transpose(0, 1).unsqueeze(0)  # noqa: E731
            outputs = attention_elsewhere(mine, moves, group) if elsewhere else {
                i: base.causal_attention(*map(swap, qkv))[0].transpose(0, 1) for i, qkv in mine.items()}
            torch.autograd.backward([outputs[i] for i in mine], [random[i][3].to(here(), dtype) for i in mine])
            return {f"{name} of document {i}": x for i, qkv in mine.items() for name, x in zip(
                ("out", "dq", "dk", "dv"), (outputs[i].detach(), *(t.grad for t in qkv)), strict=True)}

        sent.clear()
        worst = max(worst, equal_to_serial("elsewhere", *(functools.partial(attention, elsewhere=way)
                                                          for way in (True, False)), rounded))
        planned = sum(v for pair, v in with_moves(rows, n, moves, costs).moves.items() if me in pair)
        planned += planned // 2 + planned // 4  # in fp64, fp32 and bf16
        expect("bytes sent", sent["all-to-all"], planned)
    require(moved >= 4, f"only {moved} pieces were moved")
    return worst


def check_flow(seeds=20):
    """Every sample is encoded and trained on once, the latter after the former; micro-batches are as large as they may
    be, and no larger; allocations and times by hand."""
    for seed in range(seeds):
        n, micro = 2 + seed % 7, (4, 16)[seed % 2]
        samples = random_samples(12 * n, seed)
        tasks = producer_consumer(samples, n, micro)
        batches = [task for task in tasks if task.name[0] == "backbone"]
        encoded = sorted(task.name for task in tasks if task.name[0] == "encode")
        trained_on = sorted(need for task in batches for need in task.needs)
        require(encoded == trained_on == [("encode", i) for i in range(12 * n)], "samples are lost, or done twice")
        lengths = [sample.backbone for sample in samples]
        room = sum(lengths) / (n - allocate(samples, n)) / micro
        require(max(task.seconds for task in batches) <= max(room, *lengths) + 1e-12, "a micro-batch is too large")
        full = [task.seconds + lengths[after.name[1]] > room for task, after in itertools.pairwise(batches)]
        require(all(full), "a micro-batch could have been larger")
    for encode, backbone, n, want in ((1, 3, 4, 1), (2, 1, 6, 4), (9, 1, 2, 1)):
        expect(f"ranks of {n} for {encode} : {backbone} s", allocate([Sample(encode, backbone)] * 5, n), want)
    # Two pools: section 10's example, each sample alone or all together; and four of 1 + 1 s, two ranks of each kind.
    pools = [Sample(2, 1), Sample(1, 1), Sample(1, 1)]
    half = lambda *seconds: [Sample(0.5, s - 0.5) for s in seconds]  # noqa: E731
    for way, samples, sizes, want in (
        (lock_step, half(1, 1, 2, 3, 1), (2,), 5), (by_cost, half(1, 1, 2), (2,), 2), (by_cost, half(2, 3), (3,), 3),
        (by_cost, half(3, 3, 2, 2, 2), (2,), 7), (producer_consumer, pools, (2, 3), 5),
        (producer_consumer, pools, (2, 1), 7), (producer_consumer, [Sample(1, 1)] * 4, (4, 2), 3)
    ):
        expect(f"{way.__name__}, ranks, micro-batches {sizes}", span(way(samples, *sizes)), want)
    must_raise("a rank for each model", lambda: producer_consumer(samples, 1))
    must_raise("use one sample or more", lambda: producer_consumer([], 2))


def check_skip(seeds=60):
    """The chart of section 11. Random p, m, k, costs: each micro-batch goes through k different stages in order, every
    stage has its quota, no more than allowed are in flight; played, it takes what was reserved."""
    paths = skip_pipe(4, 4, 3, dict(F=1, B=2), 4)[0]
    expect("paths of four micro-batches", paths, [(0, 1, 2), (1, 2, 3), (0, 1, 3), (0, 2, 3)])
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        p, m = int(generator.integers(2, 9)), int(generator.integers(1, 25))
        k, most = int(generator.integers(1, p)), p if seed % 3 else int(generator.integers(1, p + 1))
        paths, tasks, reserved = skip_pipe(p, m, k, dict(F=1, B=int(generator.integers(1, 4))), most)
        require(all(len(path) == k and list(path) == sorted(set(path)) for path in paths), f"seed {seed}: {paths}")
        visits = [sum(s in path for path in paths) for s in range(p)]
        require(len(paths) == m and max(visits) - min(visits) <= 1, f"seed {seed}: visits {visits}")
        times = play(tasks)
        expect(f"seed {seed}: tasks, and their time", (len(times), span(tasks)), (2 * m * k, reserved))
        lives = [(times["F", i, path[0]][0], times["B", i, path[0]][1]) for i, path in enumerate(paths)]
        flight = max(sum(a <= t < b for a, b in lives) for t, _ in lives)
        require(flight <= most, f"seed {seed}: {flight} in flight, {most} allowed")
    model, tokens = tiny(2, layers=3), torch.arange(8).view(1, 8)
    require(torch.equal(through(model, tokens, range(3)), model(tokens)), "all blocks are not the model")
    without = through(model, tokens, (0, 2))
    del model.blocks[1]
    require(torch.equal(without, model(tokens)), "another block is left out")
    must_raise("k of up to p stages", lambda: skip_pipe(4, 4, 5, dict(F=1, B=2), 4))
    must_raise("whole units", lambda: skip_pipe(4, 4, 3, dict(F=0.02, B=0.04), 4))


# Five plans of a small model by hand: 4 layers of 200 parameters, D = 4, 10 classes, T = 8. Speed 500 FLOP/s (half of
# 1000; products get 800), memory 100 B/s; 2 J a FLOP, 3 J a byte, 5 W. Links 50 B/s in hosts of 4, 5 B/s between.
# (arguments of predict after the batch; more of the model; state, itemsize): bytes held, seconds, what is sent, joules.
#
# 1  A rank has P = 4 x 100 + 2 x 20 = 440, micro-batches of N = 16 tokens, 2 of them; a stream has 64 bytes.
#    Held: 440 x 14 / 4 = 1540; units 2 (20 + 100), twice, = 480; inputs 4 x 3 x 64 = 768 and gradients 220 (both,
#    as m > 1); a layer 16 x 4 x 2 x 9 = 1152; 11 x 64 = 704: 4864.
#    Sends: tensor 16 x 4 x 2 (44 + 12) / 2 = 3584 a micro-batch; data: 2 x 660 reduced, 2 (1320 - 60) gathered.
#    Seconds of a micro-batch: products 53120 / 500 = 106.24, attention 4 x 4 x 1024 / 2 / 500 = 16.384, 3584 / 50 =
#    71.68: 194.304. Reduced 1320 / 5 = 264, of which half (132) hides; gathered 504, of which half; update 35.2.
# 2  P = 220, N = 4, 4 micro-batches, a stream of 16 bytes. Held: 440 + 1320; 2 x 2 x 288 = 1152 and 440; 16 x 16: 3608.
#    A micro-batch: 5280 / 500 = 10.56; 1.536; tensor 352 / 50 = 7.04; pipe 16 / 5 = 3.2; ring 256 / 50 less 1.536 =
#    3.584, home 128 / 50 = 2.56; blocks 2 (2.5 x 48 + 32 + 48) 16 / 100 = 64: 92.48, x 4 x 1.25; data 4.4 + 4.4;
#    update 35.2.
# 3  The same, not causal: attention takes 3.072, and half of the ring's messages, 2.56, are more than what it leaves.
# 4  P = 880, N = 64, one micro-batch, a stream of 1024 bytes; attention is not causal. Held: 3520 + 3520 + 960; the
#    larger of 4 x 18432 and 1760; 11 x 1024. Seconds: 645.12 + 196.608; 35.2 / 2 + 35.2; 140.8.
# 5  The same by Muon on 8 ranks: 10560 + 352 - 3200. Reduced 6160 / 5 = 1232, of which what fits under backward of
#    three layers, 2/3 x 841.728 x 3/4 = 420.864, hides; update 281.6; products 4 x 5 x 3584 / 800 = 89.6. Joules (all
#    plans likewise): 2 x 3366912 FLOPs + 8 (3 x 100 (2024.064 - 420864 / 800) + 5 x 2024.064).
SMALL = Model(2 * 10 * 4 + 4 * 200, 4, 4, 10, 8, 2)
BY_HAND = [
    ((16, 4, 1, 1, 2, 2, True, 3), {}, (2, 2, 12), 2, 4864, 807.808, (7168, 0, 0, 3840), 3565163.52),
    ((4, 1, 2, 2, 2, 1, False, 1), {}, (2, 2, 12), 2, 3608, 506.4, (1408, 1536, 64, 440), 1537632),
    ((4, 1, 2, 2, 2, 1, False, 1), dict(causal=False), (2, 2, 12), 2, 3608, 508.96, (1408, 1536, 64, 440), 1583814.4),
    ((16, 2, 1, 1, 1, 8, False, 2), dict(causal=False), (4, 4, 8), 4, 92992, 1035.328, (0, 0, 0, 3520), 1999358.08),
    ((64, 8, 1, 1, 1, 8, False, 0), dict(causal=False, muon=1), (4, 4, 8), 4, 92704, 2024.064, (0, 0, 0, 6160),
     10409948.16),
]


def check_planner(seeds=12):
    """Five plans by hand. Plans use all GPUs, fit, are sorted; tensor parallelism stays in hosts; more memory is never
    slower. Published runs are as near as README says. What cannot be is refused in one line that says what is missing.
    """
    links, chip = Links(4, 50.0, 5.0, 0.5), Chip(1000.0, 0.8, 0.5, 100.0, 2.0, 3.0, 5.0)
    for choice, more, state, itemsize, held, seconds, sent_, joules in BY_HAND:
        one = predict(SMALL._replace(**more), links, chip, *choice, state=state, itemsize=itemsize)
        got = (one.gib * 2**30, one.seconds, *one.sent.values(), one.joules)
        for name, a, b in zip(("bytes", "seconds", "tensor", "ring", "pipeline", "data", "joules"), got,
                              (held, seconds, *sent_, joules), strict=True):
            expect(f"{choice}: {name}", a, b, 1e-9)
    middle = predict(SMALL, links, chip, 4, 1, 4, 1, 1, 1, False, 0)  # 4 micro-batches of 64 bytes, both ways
    expect("a middle stage sends", middle.sent["pipeline"], 512)
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        model = gpt(int(generator.integers(2, 40)), 128 * int(generator.integers(2, 40)), 0)
        gpus, batch, gib = 2 ** int(generator.integers(0, 8)), 2 ** int(generator.integers(7, 11)), 80.0
        every = list(choices(model, gpus, HOSTS, batch))
        require(len(set(every)) == len(every) and all(math.prod(one[:4]) == gpus for one in every), "other GPUs")
        require(all(tp <= 8 and dp * micro * (batch // (dp * micro)) == batch for dp, _, _, tp, micro, *_ in every),
                "tensor parallelism between hosts, or another batch")
        try:
            found, more = plan(model, gpus, gib, batch=batch), plan(model, gpus, 2 * gib, batch=batch)
        except base.BadInput as error:
            require("would do" in str(error) or "is needed" in str(error), str(error))
            continue
        require(all(x.gib <= gib for x in found), "a plan does not fit")
        expect("seconds", [x.seconds for x in found], sorted(x.seconds for x in found))
        require(len(more) >= len(found) and more[0].seconds <= found[0].seconds, "more memory makes it slower")
    short = {(cp, tp) for _, _, cp, tp, *_ in choices(gpt(4, 4096, 32)._replace(seq=8), 32, HOSTS, 32)}
    expect("cp, tp of 8 positions", short, {(c, t) for c in (1, 2, 4) for t in (1, 2, 4, 8) if c * t <= 8})
    expect("the largest tp", max(tp for _, _, _, tp, *_ in choices(gpt(4, 4096, 32), 32, HOSTS, 32)), 8)
    for name, got, share in published_rows():
        expect(f"share of the peak, {name}", got, share, 1e-3 if name in FITTED else 0.3)
    refused_wishes()
    for flows, want in ((7, [(1, 0), (7 / 8, 7), (7 / 8, 7)]), (17, [(3, 0), (17 / 8, 17), (17 / 8, 1)])):
        found = [fabric_load(flows, 8, way) for way in ("single-path", "spray", "split")]
        expect(f"{flows} flows over 8 links", found, want)


def refused_wishes():
    small = gpt(4, 256, 2)
    must_raise("GPUs of 0.1 GiB would do", lambda: plan(small, 1, 0.1))
    must_raise("more memory a GPU is needed", lambda: plan(gpt(4, 25600, 0), 1, 1))
    must_raise("cannot be shared out", lambda: plan(small, 7, 80, batch=6))
    must_raise("embedding and classifier alone", lambda: plan(Model(1e6, 4, 256, 50000, 64), 1, 80))
    must_raise("must be positive", lambda: plan(small, 0, 80))
    must_raise("1 or more of each", lambda: fabric_load(9, 0, "spray"))
    wish = "params=8e9 layers=32 dim=4096 vocab=128256 seq=8192 gpus=8 gib=141"
    for words, text in (("missing gib", wish.replace(" gib=141", "")), ("gibs is unknown", wish + " gibs=2"),
                        ("gpus is given twice", wish + " gpus=8"), ("not of the form", "params=1e9 layers"),
                        ("a whole number", wish.replace("gpus=8", "gpus=8.5")), ("give a number", wish + " reach=nan"),
                        ("give a whole number", wish + " batch=inf"), ("to 0.68", wish + " reach=0.9"),
                        ("from 0.01", wish + " link=1e-300"), ("heads=31 does not divide", wish + " heads=31"),
                        ("are usual", wish.replace("dim=4096", "dim=100")), ("are usual", wish.replace("=32", "=320"))):
        must_raise(words, lambda text=text: parse_plan(text))


def elastic_batches(model, steps=8, count=6):
    return [tiny_tokens(model, count, seed) for seed in range(steps)]


# Ranks are lost in all places where the protocol could go wrong:
#
#     "forward"       killed in a step: others wait for its messages
#     "done"          killed when all have all sums, but have not voted: who steps now is a step ahead
#     "connection"    alive, but it has an error then: all take the step again, and it, too
#     "repair"        killed while the states of another's layers travel: once more from the meeting
#     "slow"          alive, but late to vote: the others go on without it


def train_elastic(faults, dp, pp, timeout):
    """One of dp x pp ranks, with faults [(rank, step, when)], as above. Returns losses; numbers of the ranks that are
    left; their mesh; bytes that all sent to restore states; the longest step's seconds; whether this rank kept nothing
    that it does not own, and the store none of the votes before the last."""
    trainer, me = Elastic(tiny(4, layers=6), dp, pp, timeout=timeout), dist.get_rank()
    losses, times, faults, gradient, restore = [], [], set(faults), trainer.gradient, trainer.restore

    def strike(when):
        if (me, len(losses), when) in faults:
            faults.remove((me, len(losses), when))
            if when == "slow":
                return time.sleep(3 * timeout)
            if when == "connection":
                raise RuntimeError("the connection broke")
            os.kill(os.getpid(), signal.SIGKILL)

    def before_block(*inputs):
        if trainer.place[1] % 2:  # of two samples one is odd
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
        arrivals["a step"] += not step  # as if there had been a meeting
        losses.append(trainer.step(step, *batch))
        times.append(time.perf_counter() - start)
        if losses[-1] is None:
            return None
    moved = all_reduce(torch.tensor(trainer.moved), dist.group.WORLD).item()
    member, others = trainer.membership, set(range(8)) - set(trainer.mine)
    old_votes = [f"{member.prefix}/{member.epoch}/vote/{k}" for k in range(member.votes - 1)]
    kept = [trainer.optimizers[unit].state for unit in others] + [member.store.check([vote]) for vote in old_votes]
    kept += [not p.isnan().all().item() for unit in others for p in trainer.units[unit]]
    kept.append(arrivals["a step"])  # section 1's count of meetings, which a new group begins anew
    return losses, member.members, (trainer.dp, trainer.pp), moved, max(times), not any(kept)


def undisturbed():
    """Losses of the same steps in one process, by a loop that knows nothing of ranks."""
    model, losses = tiny(4, layers=6), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda block, x, y, i=i: torch.stack(
            [keyed_dropout(one, 0.1, 0, len(losses), sample, i) for sample, one in enumerate(y)]))
    for batch in elastic_batches(model):
        loss = serial_loss(model, *batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_keys():
    """Random numbers are the same whenever they are made, and others for any other key."""
    x, key = torch.ones(8, 16, dtype=torch.float64), (0, 1, 2, 3)
    require(torch.equal(keyed_dropout(x, 0.5, *key), keyed_dropout(x, 0.5, *key)), "a mask is not made again")
    expect("what is left of ones, of mean 1", keyed_dropout(x, 0.5, *key).unique().tolist(), [0, 2])
    others = [keyed_dropout(x, 0.5, *key[:i], 9, *key[i + 1 :]) for i in range(4)]
    require(not any(torch.equal(other, keyed_dropout(x, 0.5, *key)) for other in others), "a number is not in the key")


# Faults, dp, pp; what has to become of it, by hand: the mesh, and the units that are new to a rank. (Six layers are
# units 1 to 6. Ranks 0, 1, 3 become stages of units 0 to 2, 3 and 4, 5 to 7, and rank 1 had 0 to 3.)
DISCONNECTED_THEN_KILLED = [(1, 2, "connection"), (2, 5, "done")], 2, 2, (1, 3), [4]


def check_elastic(cases=(DISCONNECTED_THEN_KILLED,)):
    """Processes that lose their connection, or are killed (SIGKILL) when they have all sums but have not voted: the
    losses of all steps are those of one undisturbed process to 1e-12, what was sent is what had to be, nobody waited
    for a timeout."""
    for stages in (1, 2, 3, 4):
        held = [units_on(stage, stages, 6) for stage in range(stages)]
        expect(f"units of {stages} stages", sum(held, []), list(range(8)))
    results, want = [], in_ranks("undisturbed", 1, device="cpu")
    sizes = [sum(3 * p.nbytes + 4 for p in unit) for unit in Elastic.units_of(tiny(4, layers=6).cpu())]
    for faults, dp, pp, shape, units in cases:
        killed = [rank for rank, _, when in faults if when != "connection"]
        try:  # nobody should wait for the timeout; without a vote, ranks do
            found = in_ranks("train_elastic", dp * pp, faults, dp, pp, 8, device="cpu", spare=len(killed))
        except OSError as error:
            raise AssertionError(f"{faults}: {error}") from None
        losses, members, mesh_, moved, seconds, forgotten = found
        left = tuple(rank for rank in range(dp * pp) if rank not in killed)
        expect(f"{faults}: who goes on, and how", (members, mesh_), (left, shape))
        errors = [abs(a / b - 1) for a, b in zip(losses, want, strict=True)]
        worst = max(errors)
        require(worst <= 1e-12, f"{faults}: the loss of step {errors.index(worst)} is off by {worst:.1e}")
        expected = sum(sizes[unit] for unit in units)
        expect(f"{faults}: bytes restored", moved, expected)
        require(seconds < 7.5, f"{faults}: a step took {seconds:.1f} s")
        require(forgotten, f"{faults}: a rank kept what it does not own, or the store kept old votes")
        results.append((worst, moved, expected, seconds))
    return results


SLOW = [(), [("sender", 1)], [("receiver", 2)], [("link", 3, 0)], [("sender", 3), ("receiver", 3)]]


def name_slow(seconds=0.15):
    """What find_slow names for each entry of SLOW, while processes sleep before they send or receive."""
    found, me, send, receive = [], dist.get_rank(), dist.send, dist.recv
    for faults in SLOW:
        wait = lambda *places, faults=faults: time.sleep(seconds * any(x in faults for x in places))  # noqa: E731
        dist.send = lambda x, to: (wait(("sender", me), ("link", me, to)), send(x, to))  # noqa: B023
        dist.recv = lambda x, source: (wait(("receiver", me)), receive(x, source))  # noqa: B023
        found.append(find_slow(message_delays(), least=seconds / 3))
    return found


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
        expect(f"seed {seed}: slow", sorted(find_slow(delays)), sorted(faults))
    one = torch.tensor([[0.0, 5, 5], [5, 0, 1], [5, 1, 0]])
    expect("slow of three", find_slow(one), [("sender", 0), ("receiver", 0)])
    most = torch.full((4, 4), 1e-4)
    most[:3] = 15e-3  # three senders of four, 150 times slower
    for delays, kind in ((most, "sender"), (most.T, "receiver")):
        expect(f"three of four {kind}s", find_slow(delays), [(kind, i) for i in range(3)])
    expect("15 ms, where 20 are slow", find_slow(most, least=0.02), [])
    for n in range(3, 9):
        most = torch.ones(n, n)
        most[:-1] = 5.0
        expect(f"slow of {n}, but one", find_slow(most), [("sender", i) for i in range(n - 1)])
    must_raise("3 are needed", lambda: find_slow(torch.ones(2, 2)))
    for found, faults in zip(in_ranks("name_slow", 4, device="cpu"), SLOW, strict=True):
        expect("who was slow", sorted(found), sorted(faults))


# The bugs of --break, each easy to ship. A check that has never failed proves little: planted here, in all processes,
# each must make its check fail.


def changed(class_, **methods):
    """A class of which some methods are others."""
    return type(class_.__name__, (class_,), methods)


def _no_mask(embedding, group, sequence):
    """Every rank looks up something for every token."""
    start, stop = cut(embedding, "weight", 0, group)
    last, lookup = stop - start - 1, type(embedding).forward
    embedding.forward = lambda tokens: leave(lookup(embedding, (tokens - start).clamp(0, last)), group, sequence)


def _no_origin(module, name, dim, group, cut=cut):
    span = cut(module, name, dim, group)
    getattr(module, name).origin = (0, 0)
    return span


# name: (the check that must catch it, what is replaced, the bug). A default argument keeps the original.
BREAKS = {
    "axes-swapped": (check_groups, "make_groups", lambda dp, pp, cp, tp, timeout, make=make_groups: make(
        tp, pp, cp, dp, timeout)),
    "mean-of-means": (check_data_parallel, "global_count", lambda kept, group: kept.sum().clamp(min=1) * size(group)),
    "first-bucket-only": (check_data_parallel, "start_all_reduce", lambda i, flat, group, start=start_all_reduce: start(
        i, flat, None if i else group)),
    "never-gathered": (check_zero, "Unit", changed(Unit, collect=lambda it: None)),
    # Stage 3 by name: weights that were whole once stay so.
    "never-dropped": (check_zero, "Unit", changed(Unit, drop=lambda it: None)),
    # Forward is right; backward lacks the other ranks' part of the input's gradient.
    "no-f": (check_tensor_parallel, "enter", lambda x, group, sequence=False: (
        _Conjugate.apply(x, group, gather, scatter) if sequence else x)),
    "no-norm-sum": (check_tensor_parallel, "sum_norm_gradient", lambda gradient, group: gradient),
    "own-lse": (check_vocabulary, "join_slices", lambda lse, target, group: (lse, all_reduce(target, group))),
    "no-max": (check_vocabulary, "join_slices", lambda lse, target, group: (
        all_reduce(lse.exp(), group).log(), all_reduce(target, group))),
    "no-origin": (check_forge, "cut", _no_origin),
    # Muon: each rank orthogonalises its part of the matrix. Adam-mini: means are over each rank's own columns.
    "each-its-own": (check_wide_rules, "ranks_of", lambda p, group, ranks=ranks_of: ranks(p, group)._replace(
        join=torch.clone, own_part=lambda update: update)),
    "own-means": (check_wide_rules, "ranks_of", lambda p, group, ranks=ranks_of: ranks(p, group)._replace(
        columns=p.shape[1])),
    "no-mask": (check_tensor_parallel, "cut_embedding", _no_mask),
    "forwards-first": (check_schedules, "SCHEDULES", SCHEDULES | {"1f1b": SCHEDULES["1f1b"]._replace(lists=gpipe)}),
    # A queue that has room for one layer.
    "lost-weights": (check_pipeline, "WeightQueue", changed(
        WeightQueue, put=lambda queue, work, put=WeightQueue.put: queue.waiting or put(queue, work))),
    "unweighted-merge": (check_context, "merge", lambda a, b: ((a[0] + b[0]) / 2, torch.logaddexp(a[1], b[1]))),
    "no-correction": (check_context, "block_gradients", lambda dout, q, k, v, out, *rest, gradients=block_gradients: (
        gradients(dout, q, k, v, torch.zeros_like(out), *rest))),
    "narrow-sums": (check_context, "sum_dtype", lambda tensor: tensor.dtype),
    # As with a dropout that draws another mask in backward.
    "remade-otherwise": (check_lean, "saved_as", lambda tensor, remake, saved_as=saved_as: saved_as(
        tensor, lambda: F.dropout(remake(), 0.1))),
    "relu-back": (check_lean, "gelu_back", lambda h, gradient: (F.gelu(h), gradient * (h > 0))),
    # Backward turns by the same angle, not by its opposite.
    "turned-on": (check_lean, "turn", lambda qkv, parts, turned, scales, cos, sin, back, turn=turn: turn(
        qkv, parts, turned, scales, cos, -sin if back else sin, back)),
    "address-reused": (check_memory_instead, "on_death", lambda *arguments: None),
    # Copied, and kept as well; and nobody looks whether a tensor was written to.
    "never-freed": (check_memory_instead, "StorageCopy", changed(StorageCopy, settle=lambda it: it.written.result())),
    "edited-in-place": (check_memory_instead, "StorageCopy", changed(StorageCopy, same=lambda it: None)),
    "whole-documents": (check_uneven, "first_row", lambda stop, room: 0),
    # The mask's corner is at the first key, not at the last.
    "upper-left": (check_elsewhere, "blocks_of", lambda q, k: [
        (slice(0, q.shape[2]), True), *[(slice(q.shape[2], None), False)] * (q.shape[2] < k.shape[2])]),
    "all-moves": (check_uneven, "only_what_helps", lambda rows, n, moves, costs: moves),
    "half-and-half": (check_flow, "allocate", lambda samples, n: max(1, n // 2)),
    "double-booked": (check_skip, "earliest", lambda busy, ready, seconds: ready),
    "unsharded": (check_planner, "zero_bytes", lambda P, n, stage, w, g, o: P * (w + g + o)),
    "transposed": (check_slow, "find_slow", lambda delays, find=find_slow: find(delays.T)),
    "unkeyed": (check_elastic, "keyed_dropout", lambda x, chance, *key: F.dropout(x, chance)),
    # A checkpoint of the weights alone; and who has all sums takes the step.
    "no-moments": (check_elastic, "Elastic", changed(Elastic, state=lambda it, unit: [p.data for p in it.units[unit]])),
    "no-vote": (check_elastic, "Membership", changed(Membership, agreed=lambda it, good: good)),
}


# ==== 15. Measurements ================================================================================================
#
# A row sets what was predicted beside what was measured, and fails outside of its band. Predictions are formulas of the
# sections above, or times made of other times of the same run; what something is fitted to is never what it is tested
# on: the reach of a chip comes from one GPU alone, the speed of links from a gather, joules from every other plan.
#
# Times of several ranks are easily wrong. Who comes late to a collective measures that it was late, so all begin
# together, and a step is over when the last has done it (everybody, timed). NCCL makes its connections when they are
# first used, so a first call is never timed. And a GPU lowers its clock under load: whole training steps, whose seconds
# and joules are compared, are done for seconds on end (repeated).


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


def kept_bytes(work):
    """Bytes that work() leaves alive, and its result."""
    if here().type == "cuda":
        gc.collect()  # cycles of a model before, which would be freed meanwhile
        before = torch.cuda.memory_allocated()
        result = work()
        return torch.cuda.memory_allocated() - before, result
    with base.LiveBytes() as follow:
        result = work()
        time.sleep(0.01 * dist.is_initialized())  # gloo's threads let go of a tensor a moment after its sum is there
    return follow.live, result


def everybody():
    """A barrier, at which this rank's GPU, too, has finished."""
    if here().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if here().type == "cuda":
        torch.cuda.synchronize()


def timed(step, warmup=2, runs=7):
    """Median milliseconds of a step that all ranks do, until the last of them has done it."""
    everybody()
    return base.bench(lambda: (step(), everybody()), here(), warmup, runs).median


def run_blocks(model, x):
    for block in model.blocks:
        x = block(x, model.cos, model.sin)
    return x


def measure_activations():
    """What the layers keep for backward, cut over the ranks."""
    n, rows, group = dist.get_world_size(), [], mesh(tp=dist.get_world_size()).tp
    config, fused = base.GPTConfig(64, 64 * n, 4, 2 * n, 32 * n), here().type == "cuda"  # one kernel a norm
    for name, sequence in (("TP", False), ("TP + SP", True)):
        model = built(*vars(config).values())
        tensor_parallel(model, group, sequence)
        x = torch.zeros(2, config.seq // (n if sequence else 1), config.dim, device=here()).requires_grad_()
        held, out = kept_bytes(functools.partial(run_blocks, model, x))
        out.sum().backward()
        predicted = tensor_parallel_bytes(config, 2 * config.seq, n, sequence, 4, fused)
        formula = f"4 L N D ({4 if fused else 6}{'/n' if sequence else ''} + 14/n)"
        rows.append(Row(f"{name}: layers keep", formula, predicted / MIB, held / MIB))
    return rows


def costs_of(schedule, F=1.0, B=1.0, W=1.0):
    """What simulate takes, of times of a forward, an input gradient and a weight gradient of a rank's layers."""
    thin = schedule.chunks
    return dict(F=F, B=B, W=W) if schedule is SCHEDULES["zero-bubble"] else dict(F=F / thin, B=(B + W) / thin, W=0.0)


def measure_bubbles():
    """GPUs: every schedule by real stages, beside the simulation with their measured times."""
    p, rows, queue, m = dist.get_world_size(), [], WeightQueue(), 2 * dist.get_world_size()
    groups, model = mesh(pp=p), built(256, 1024, 4 * p, 32, 4096, dtype=torch.bfloat16)
    rank, like = rank_in(groups.pp), torch.empty(4, 1024, 4096, device=here(), dtype=torch.bfloat16)
    tokens = [torch.zeros(4, 1024, dtype=torch.int64, device=here())] * m
    times = stage_times(Stage(model, rank, p, queue), queue, tokens[0] if rank == 0 else torch.randn_like(like))
    notes.append("a stage's " + ", ".join(f"{key} {value:.2f} ms" for key, value in times.items()))
    for name, schedule in SCHEDULES.items():
        lists = schedule.lists(p, m)
        stages = [Stage(model, c * p + rank, schedule.chunks * p, queue) for c in range(schedule.chunks)]
        measured = timed(functools.partial(run_pipeline, lists[rank], stages, queue, tokens,
                                           lambda y, i: y.float().square().mean(), groups, like), 1, 5)
        rows.append(Row(f"{name}, {p} GPUs: time", f"simulated; {m} micro-batches",
                        simulate(lists, costs_of(schedule, **times)).span, measured, "ms", (0.95, 1.15)))
    return rows


def stage_times(stage, queue, x):
    """Milliseconds of forward, input gradient and weight gradients of a stage on this GPU: {"F", "B", "W"}."""

    def step(backward, weights):
        y = stage(x.requires_grad_() if x.is_floating_point() else x)
        queue.waiting = []
        if backward:
            y.backward(y.detach())
        for work in queue.waiting if weights else ():
            work()
        queue.waiting = None

    F_, FB, FBW = (base.bench(functools.partial(step, *what), here(), 2, 7).median
                   for what in ((False, False), (True, False), (True, True)))
    stage.zero_grad()
    return dict(F=F_, B=FB - F_, W=FBW - FB)


def measure_memory_instead():
    """Peak and time of forward and backward with everything kept, recomputed, offloaded."""
    rows, gpu, peaks, times, counts = [], here().type == "cuda", {}, {}, None
    shape = (256, 2048, 12, 16, 2048) if gpu else (64, 128, 6, 4, 128)
    config = base.GPTConfig(*shape)
    tokens = torch.randint(64, (4, config.seq), generator=torch.Generator().manual_seed(0)).to(here())
    with tempfile.TemporaryDirectory() as folder:
        for way in ("kept", "recomputed", "offloaded"):
            model = built(*shape)
            if way == "recomputed":
                recompute(model)

            def step(model=model, way=way):
                nonlocal counts
                offload = Offload(model, None if gpu else folder) if way == "offloaded" else None
                with offload or contextlib.nullcontext(), torch.autocast(here().type, torch.bfloat16, enabled=gpu):
                    loss = model(tokens).square().mean()
                loss.backward()
                model.zero_grad()
                if offload:
                    offload.close()
                    counts = offload.counts

            step()
            peaks[way] = base.peak_bytes(step, here()) / MIB
            times[way] = base.bench(step, here(), warmup=0, runs=3).median if gpu else None
    kept = base.activation_bytes(config, tokens.numel(), gpu, fused_norm=gpu)
    stream = 4 * config.layers * tokens.numel() * config.dim
    weights = 4 * 12 * config.layers * config.dim**2  # gradients grow as the kept streams shrink
    middle = 4 * (2 if gpu else 4) * tokens.numel() * config.dim  # the first gradient inside a layer
    again = max(stream, weights) + kept / config.layers + middle
    rows += [Row("kept: peak", "01's activation_bytes", kept / MIB, peaks["kept"], band=(0.95, 1.05)),
             Row("recomputed: peak", "max(4 L N D, dW) + a layer", again / MIB, peaks["recomputed"], band=(0.9, 1.1)),
             Row("offloaded: peak", "under half of kept", peaks["kept"] / 2, peaks["offloaded"], band=(0, 1))]
    notes.append(f"offloaded: {counts['bytes'] / MIB:.0f} MiB in {counts['storages']} storages, saved "
                 f"{counts['tensors']} times; {counts['forwarded']} forwarded, {counts['late']} not yet there")
    if gpu:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=here())
        both_ways = base.bench(lambda: (host.copy_(there, non_blocking=True), there.copy_(host, non_blocking=True)),
                               here(), 2, 5).median * counts["bytes"] / 2**28
        rows += [Row("kept: time", "-", None, times["kept"], "ms", None),
                 Row("recomputed: time", "4/3, as 4 passes to 3", times["kept"] * 4 / 3, times["recomputed"], "ms",
                     (0.85, 1.05)),
                 Row("offloaded: time", "out and in by the link", both_ways, times["offloaded"], "ms", (0.8, 1.5))]
    return rows


def measure_overlap():
    """GPUs: forward and backward of 0.6 billion parameters, whose gradients in fp32 are summed never, after it, during
    it; and torch's DistributedDataParallel."""
    group = mesh(dp=dist.get_world_size()).data

    def build():
        model = built(256, 1024, 12, 16, 2048)
        model.classifier.requires_grad_(False)
        return model

    def time_of(model, finish=lambda: None):
        tokens = torch.zeros(8, 1024, dtype=torch.int64, device=here())

        def step():
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens).float().square().mean()
            loss.backward()
            finish()

        return timed(step)

    model = build()
    handle = data_parallel(model, group)
    during = time_of(model, handle.finish)
    handle.enabled = False
    never, after = time_of(model), time_of(model, handle.finish)
    handle.close()
    ddp = time_of(nn.parallel.DistributedDataParallel(build(), process_group=group, gradient_as_bucket_view=True))
    numbers = [sum(p.numel() for p in parameters) for parameters in handle.lists]
    notes.append(f"sums of gradients: a step without {never:.1f} ms, after backward {after:.1f}, during it "
                 f"{during:.1f}: {(after - during) / (after - never):.0%} of the sum is hidden (but the last bucket, "
                 f"{1 - numbers[-1] / sum(numbers):.0%})")
    return [Row("sums during backward: time", "sums after backward", after, during, "ms", (0, 1)),
            Row("sums during backward: time", "torch's DDP", ddp, during, "ms", (0, 1.05))]


def subgroups():
    """(k, groups with tp = k) for k = 2, 4, ...: the world as several groups of k, all at work."""
    n, k = dist.get_world_size(), 2
    while n % k == 0:
        yield k, mesh(dp=n // k, tp=k)
        k *= 2


def measure_tensor():
    """GPUs: one layer forward and backward, D = 4096, 8192 tokens, bf16, over 1, 2, 4 GPUs."""

    def time_of(group, sequence=False):
        model = built(256, 1024, 1, 32, 4096, dtype=torch.bfloat16)
        tensor_parallel(model, group, sequence)
        x = torch.randn(8, 1024 // (size(group) if sequence else 1), 4096, device=here(), dtype=torch.bfloat16)
        x.requires_grad_()

        def step():
            y = run_blocks(model, x)
            y.backward(y.detach())

        return timed(step, 5, 15)

    alone = time_of(None)
    rows = [Row("a layer on 1 GPU: time", "-", None, alone, "ms", None)]
    for k, groups in subgroups():
        message = torch.zeros(8, 1024, 4096, device=here(), dtype=torch.bfloat16)
        one_sum = timed(functools.partial(dist.all_reduce, message, group=groups.tp), 5, 15)
        for sequence, sums in ((False, 4), (True, 5)):
            rows.append(Row(f"a layer, TP = {k}{' + SP' * sequence}: time", f"t/n + {sums} all-reduces",
                            alone / k + sums * one_sum, time_of(groups.tp, sequence), "ms", (0.85, 1.25)))
    return rows


def measure_vocabulary(N=8192, V=256000, D=2304):
    """GPUs: cut cross-entropy, loss and exact gradients, over 1, 2, 4 GPUs: time, and bytes beyond inputs."""

    def time_and_peak(group):
        start, stop = shares(V, size(group))[rank_in(group)]
        torch.manual_seed(0)
        E, x = torch.randn(N, D, device=here(), dtype=torch.bfloat16), torch.randint(V, (N,), device=here())
        C = torch.randn(stop - start, D, device=here(), dtype=torch.bfloat16) / math.sqrt(D)
        E, C = E.requires_grad_(), C.requires_grad_()

        def step():
            E.grad = C.grad = None
            vocab_parallel_cross_entropy(E, C, x, group, V).backward()

        time_ = timed(step, 3, 9)
        E.grad = C.grad = None
        return time_, base.peak_bytes(step, here()) / MIB

    (alone, peak), dC = time_and_peak(None), 2 * V * D / MIB
    rows = [Row("loss, gradients, 1 GPU: time", "-", None, alone, "ms", None),
            Row("  their peak", "-", None, peak, band=None)]
    for k, groups in subgroups():
        time_, less = time_and_peak(groups.tp)
        rows += [Row(f"loss, gradients, {k} GPUs: time", "t/n", alone / k, time_, "ms", (0.95, 1.25)),
                 Row("  their peak", "dC/n + all else", dC / k + peak - dC, less)]
    return rows


def measure_ring(B=1, H=16, T=65536, d=128):
    """GPUs: causal attention of one sequence forward and backward, over all ranks."""
    n, group = dist.get_world_size(), mesh(cp=dist.get_world_size()).cp

    def time_of(attention, T):
        torch.manual_seed(0)
        q, k, v = (torch.randn(B, H, T, d, device=here(), dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        return timed(lambda: attention(q, k, v).backward(q.detach()))

    alone = time_of(base.causal_attention, T)
    rows = [Row(f"{T:,} keys, on 1 GPU: time", "-", None, alone, "ms", None)]
    for name, zigzag in (("contiguous", False), ("zigzag", True)):
        share = max(attention_work(T, n, zigzag)) / (T * (T + 1) // 2)
        measured = time_of(functools.partial(ring_attention, group=group, zigzag=zigzag), T // n)
        rows.append(Row(f"{T:,} keys, {name}: time", "t x most pairs of a rank", alone * share, measured, "ms",
                        (0.9, 1.5)))
    return rows


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
    stage, C = Stage(model, rank_in(groups.pp), p, queue) if p > 1 else model, model.classifier
    options, D = dict(lr=1e-4, fused=here().type == "cuda"), model.config.dim
    if zero:
        handle = optimizer = Zero(model, groups.data, zero, **options)
    else:
        handle, optimizer = data_parallel(stage, groups.data), torch.optim.AdamW(stage.parameters(), **options)
    del model  # of which a stage needs a part
    mine = batch // size(groups.dp)
    tokens = torch.randint(V, (mine, T), generator=torch.Generator().manual_seed(0)).to(here())
    parts = [split_sequence(part, groups.cp) if groups.cp else part for part in tokens.split(micro)]
    loss = lambda y, i: vocab_parallel_cross_entropy(  # noqa: E731
        y, C, parts[i], groups.tp, V, sequence=groups.tp is not None, reduction="sum") / (batch * T)
    like = torch.empty(micro, T, D, device=here(), dtype=dtype)

    def step():
        handle.enabled = False
        if p > 1:
            run_pipeline(one_f_one_b(p, len(parts))[rank_in(groups.pp)], [stage], queue, parts, loss, groups, like)
        for i, part in enumerate(parts if p == 1 else ()):
            handle.enabled = i == len(parts) - 1
            loss(stage(part), i).backward()
        handle.finish()
        optimizer.step()
        stage.zero_grad()

    return step


PLANNED = 16384, 4096, 8, 16, 2048  # vocabulary, T, layers, heads, D of what GPUs train here: half a billion weights


def planned_model(V, T, L, heads, D):
    """What the planner is told of 01's GPT."""
    return Model(12 * L * D**2 + 2 * V * D, L, D, V, T, heads)


@functools.cache
def joules_read(device):
    """A function that reads the joules which a GPU has taken so far (NVML's counter, renewed ten times a second), or
    None where NVML does not count."""
    with contextlib.suppress(OSError):
        nvml, handle, millijoules = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))  # noqa: E731
        if not (nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) or read()):
            return lambda: (read(), millijoules.value / 1e3)[1]
    return None


def repeated(work, seconds=2.0):
    """(seconds, joules of a GPU, both the mean of all ranks) of one work(), done as often as takes `seconds`, after a
    third of that, while clocks rise. Every rank does it equally often; joules are NaN where they are not counted."""
    read = joules_read(here()) or (lambda: math.nan)
    work()  # the first makes connections, and memory
    everybody()
    start = time.perf_counter()
    work()
    everybody()
    times = torch.tensor(seconds / (time.perf_counter() - start), device=here())
    times = math.ceil(all_reduce(times, dist.group.WORLD, dist.ReduceOp.MIN).item())
    for count in (1 + times // 3, times):
        everybody()
        start, joules = time.perf_counter(), read()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        mean = torch.tensor([(time.perf_counter() - start) / count, (read() - joules) / count], device=here())
    return (all_reduce(mean, dist.group.WORLD) / dist.get_world_size()).tolist()


def measured_machine(model, config, batch, options):
    """The Chip and Links of these GPUs: what a step on one of them reaches; links by what tensor parallelism sends."""
    n, chip = dist.get_world_size(), H200
    step = planned_step(config, batch // n, batch // n, Groups(*[None] * 6, {}), torch.bfloat16)
    alone = repeated(step, 1.0)[0]
    del step
    guess = predict(model, HOSTS, chip, batch // n, 1, 1, 1, 1, batch // n, False, 0, **options)
    update = 2 * model.params * sum(options["state"]) / chip.memory
    chip = chip._replace(reach=chip.reach * (guess.seconds - update) / (alone - update))
    group = mesh(dp=n).data
    whole, part = (torch.zeros(batch * model.seq // k * model.dim, device=here(), dtype=torch.bfloat16) for k in (1, n))
    seconds = repeated(lambda: dist.all_gather_into_tensor(whole, part, group=group), 0.5)[0]
    links = HOSTS._replace(inside=(n - 1) * part.nbytes / seconds)
    return chip, links


# The planner's turn. Of each cut of a model of half a billion weights a step is predicted, and done:
#
#     predicted         from                                                          tested on
#     bytes sent        formulas alone                                                a counter in each collective
#     GiB               formulas alone                                                the allocator's peak
#     seconds           the reach of a step on one GPU, the speed of a gather         two seconds of steps
#     joules            what waiting and every other plan take, by least squares      NVML's counter, the other plans
#
# and of all plans the worst is a row. What one learns from the lines of all: a cut costs what its messages cost, but a
# ring nearly as much again, to read and write what it merges.


def measure_plans():
    """Training steps by every cut that the planner can choose here, and what predict() says of them: the most bytes
    that a rank sends; on GPUs seconds, GiB and joules, with the reach of one GPU alone, the speed of links from a
    gather, and joules by what FLOPs, bytes and seconds take in every other plan, tested on the others."""
    n, gpu = dist.get_world_size(), here().type == "cuda"
    config = PLANNED if gpu else (128, 32 * n, 2 * n, 2 * n, 16 * n)
    dtype, state = (torch.bfloat16, (2, 2, 4)) if gpu else (torch.float32, (4, 4, 8))
    batch, chip, links, model = (4 if gpu else 2) * n, H200, HOSTS, planned_model(*config)
    options = dict(state=state, itemsize=dtype.itemsize)
    if gpu:
        chip, links = measured_machine(model, config, batch, options)
    ways = [(dict(dp=n), False, 0), (dict(tp=n), False, 0), (dict(pp=n), False, 0), (dict(cp=n), False, 0)]
    ways += [(dict(dp=2, tp=2), False, 0), (dict(dp=2, pp=2), False, 0)] * (n == 4)
    ways += [(dict(dp=n), True, 0), (dict(dp=n), False, 2), (dict(dp=n), True, 3), (dict(tp=n), True, 0)]
    ways += [(dict(cp=n), True, 0)]
    found = {}
    for shape, again, zero in ways:
        name = " x ".join(f"{axis} {k}" for axis, k in shape.items())
        name += f", ZeRO-{zero}" * (zero > 0) + ", recomputed" * again
        sizes = {axis: shape.get(axis, 1) for axis in ("dp", "pp", "cp", "tp")}
        choice = dict(sizes, micro=1 if "pp" in shape else batch // sizes["dp"], recompute=again, zero=zero)
        options["state"] = (2, 2, 12) if zero and gpu else state  # Zero's own weights are fp32
        predicted = functools.partial(predict, model, links, batch=batch, **choice, **options)
        held = torch.cuda.memory_allocated() if gpu else 0
        step = planned_step(config, batch, choice["micro"], mesh(**sizes), dtype, again, zero)
        step()
        sent.clear()
        step()
        most = all_reduce(torch.tensor(sum(sent.values()), device=here()), dist.group.WORLD, dist.ReduceOp.MAX)
        measured = [most.item() / MIB]
        found[name] = predicted, again, measured
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            seconds, joules = repeated(step)
            measured += [1e3 * seconds, (torch.cuda.max_memory_allocated() - held) / 2**30, n * joules]
            del step
            torch.cuda.empty_cache()
    return plan_rows(found, model, links, chip, batch)


def fitted_energy(runs, model, batch, chip):
    """The Chip whose flop, byte and watts fit best, in relative error, to waiting and to runs of training, as plan_rows
    has them."""
    seconds, joules = repeated(lambda: time.sleep(0.2))
    rows, n = [(joules, 0, 0, seconds)], dist.get_world_size()
    for again, (_, milliseconds, _, joules) in runs:
        flops, seconds = step_flops(model, batch * model.seq, again) / n, milliseconds / 1e3
        rows.append((joules / n, flops, bytes_beside(flops, seconds, chip), seconds))
    rows = np.array(rows)
    fitted = np.linalg.lstsq(rows[:, 1:] / rows[:, :1], np.ones(len(rows)), rcond=None)[0].tolist()
    return chip._replace(**dict(zip(("flop", "byte", "watts"), fitted, strict=True)))


def plan_rows(found, model, links, chip, batch):
    """Rows of the worst of found {plan: (its predict(chip=), whether recomputed, what was measured: MiB sent, and on
    GPUs ms, GiB, J)}; and there a line of each."""
    kinds, fitted, table, rows = [("sent", "MiB", (0.98, 1.02))], list(found)[::2], {}, []
    if here().type == "cuda":
        kinds += [("time", "ms", (0.9, 1.15)), ("peak", "GiB", (0.9, 1.1))]
        if joules_read(here()):
            kinds.append(("energy", "J", (0.75, 1.25)))
            chip = fitted_energy([found[name][1:] for name in fitted], model, batch, chip)
        notes.append(f"a GPU: {chip.reach:.0%} of {chip.peak / 1e12:g} TFLOP/s, {links.inside / 1e9:.0f} GB/s sent; "
                     f"{chip.flop * 1e12:.2f} pJ a FLOP, {chip.byte * 1e12:.0f} pJ a byte, {chip.watts:.0f} W. "
                     "Plans, predicted -> measured:")
    for name, (predicted, _, measured) in found.items():
        one = predicted(chip=chip)
        promised = sum(one.sent.values()) / MIB, 1e3 * one.seconds, one.gib, one.joules
        table[name] = {kind: pair for kind, *pair in zip(kinds, promised, measured, strict=False)}
        if len(kinds) > 1:
            line = ", ".join(f"{a:.4g} -> {b:.4g} {unit}" for (_, unit, _), (a, b) in table[name].items())
            notes.append(f"  {name:<26}{line}{' (fitted)' * (name in fitted)}")
    for kind, unit, band in kinds:
        pairs = {name: row[kind, unit, band] for name, row in table.items() if kind != "energy" or name not in fitted}
        worst = max(pairs, key=lambda name: abs(math.log(pairs[name][1] / pairs[name][0])))  # noqa: B023
        rows.append(Row(f"{kind}, worst of {len(pairs)} plans", worst, *pairs[worst], unit, band))
    return rows


def measure_uneven(total=32768, H=32, d=128):
    """GPUs: attention of one long document on the first rank and short ones on the others, forward and backward, where
    it is and disaggregated. Predicted by section 9's costs: of a pair and a token by what ranks need for their own, of
    messages by an exchange of zeros. (attention_elsewhere waits for messages before all attention: none is early.)"""
    n, group = dist.get_world_size(), mesh(dp=dist.get_world_size()).data
    lengths = [total] + [total // 4] * 4 * (n - 1)
    homes = [0] + [1 + i // 4 for i in range(4 * (n - 1))]
    parts = [Queries(i, 0, s, home) for i, (s, home) in enumerate(zip(lengths, homes, strict=True))]
    torch.manual_seed(dist.get_rank())
    mine = {part.document: [torch.randn(part.stop, H, d, device=here(), dtype=torch.bfloat16, requires_grad=True)
                            for _ in "qkv"] for part in parts if part.home == dist.get_rank()}

    def step(moves=()):
        outputs = attention_elsewhere(mine, moves, group)
        torch.autograd.backward(list(outputs.values()), [out.detach() for out in outputs.values()])

    def alone():
        outputs = [attend_rows(*qkv) for qkv in mine.values()]
        torch.autograd.backward(outputs, [out.detach() for out in outputs])

    costs = costs_of_layer(H * d, shared=1)
    moves = disaggregate(parts, n, costs, tile=128)
    seconds = torch.tensor(base.bench(alone, here(), 2, 7).median / 1e3, device=here())
    long, short = gather(seconds.view(1), group, 0)[:2].tolist()  # equally many tokens, other pairs
    work = fixed_packing(parts, n, costs).pairs()
    pair = (long - short) / (work[0] - work[1])
    away = sum(moved_bytes(part, costs) for part, to in moves if (part.home, to) == (0, 1))
    rows = away // (2 * H * d)
    give, take = ([rows if dist.get_rank() == r and k == 1 - r else 0 for k in range(n)] for r in (0, 1))
    zeros = torch.zeros(sum(give), H * d, device=here(), dtype=torch.bfloat16)
    travel = timed(lambda: exchange(zeros, give, take, group)) / 1e3
    inside = 1 / (travel / away + 4 / H200.memory)  # a byte is also read and written when it is packed and unpacked
    costs = costs._replace(pair=pair, token=(long - work[0] * pair) / total, links=HOSTS._replace(inside=inside))
    at_home, elsewhere = timed(step), timed(functools.partial(step, moves))
    notes.append(f"uneven attention: {at_home:.1f} ms where it is; messages of {away / MIB:.0f} MiB each way: "
                 f"{away / travel / 1e9:.0f} GB/s")
    split = with_moves(parts, n, moves, costs)
    predicted = 1e3 * layer_time(split._replace(early=[0] * n, late=split.pairs()), costs)
    return [Row("uneven attention, disaggregated", "simulated", predicted, elsewhere, "ms", (0.9, 1.15))]


def measure_skipping(p=4, k=3, m=8, steps=50):
    """Rows: held-out loss beside the whole model's at equal simulated time. Bands: section 11's table of seeds,
    with room for another text."""
    text, cost = filtering.corpus(limit=2 * MIB), dict(F=1, B=2, W=0)
    paths, _, skipping = skip_pipe(p, m, k, cost, p)
    time_ = steps * simulate(one_f_one_b(p, m), cost).span
    whole = train_by_paths(text, p, [tuple(range(p))] * m, steps)
    skips = train_by_paths(text, p, paths, int(time_ / skipping))
    fewer = train_by_paths(text, k, [tuple(range(k))] * m, steps * p // k)
    return [Row("loss, skipping one stage of four", "whole model, equal time", whole, skips, "", (0.9, 1.01)),
            Row("loss, three quarters of the layers", "whole model, equal time", whole, fewer, "", (0.8, 1.0))]


notes = []  # lines that are printed after the rows
CHECKS = [check_groups, check_data_parallel, check_zero, check_tensor_parallel, check_vocabulary, check_forge]
CHECKS += [check_wide_rules, check_schedules, check_pipeline, check_stage, check_context, check_memory_instead]
CHECKS += [check_elsewhere]
BY_ONE = [check_harness, check_lean, check_simulator, check_uneven, check_arena, check_flow, check_skip]
BY_ONE += [check_planner, check_slow, check_keys, check_elastic]
MEASUREMENTS = [measure_activations, measure_memory_instead, measure_plans]
ON_GPUS = [measure_bubbles, measure_overlap, measure_tensor, measure_vocabulary, measure_ring, measure_uneven]


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


def print_arena(contests):
    """The table of sections 9 to 11; the planner beside published runs; flows over a network."""
    print("simulated, times as fast as ..., of what a perfect policy would be: median (least .. most); published:")
    for system in dict.fromkeys(one.system for one in contests):
        cells = []
        for one in (one for one in contests if one.system == system):
            ours, most, paper = statistics.median(one.ours), statistics.median(one.ceiling), one.paper
            cells.append(f"{one.baseline} {ours:.2f} of {most:.2f} ({min(one.ours):.2f} .. {max(one.ours):.2f})")
        print(f"  {system:<11}{'; '.join(cells)}; {paper}")
    print("share of the peak, planner / published, reach fitted to the first of each machine:\n  " + "; ".join(
        f"{name} {got:.2f} / {share:.2f}" for name, got, share in published_rows()))
    print("9 flows over 8 links, flows on the fullest (flows out of order): " + ", ".join(
        "{} {:g} ({})".format(way, *fabric_load(9, 8, way)) for way in ("single-path", "spray", "split")))


def number_of_ranks(args):
    """What the flags say. BadInput if it cannot be."""
    if "RANK" in os.environ:
        raise base.BadInput("without torchrun: this file starts its processes: python 05_parallelism.py --ranks N")
    ranks = args.ranks
    if ranks < 2:
        raise base.BadInput(f"--ranks {ranks}: nothing is parallel there: use 2 or more")
    if args.device == "cuda" and device_for(ranks) == "cpu":
        raise base.BadInput(f"--device cuda: {ranks} ranks, but {torch.cuda.device_count()} GPUs here: use as many "
                            "ranks, or --device cpu")
    return ranks


def print_charts(p=3, m=6):
    print(f"schedules, {p} ranks, {m} micro-batches: digits forward, letters backward, * weights, . waiting")
    for name, schedule in SCHEDULES.items():
        for rank, line in enumerate(chart(schedule.lists(p, m), costs_of(schedule, 2, 2, 2))):
            print(f"  {name if rank == 0 else '':<12} {line}")


def body(device, ledger, args):
    if args.plan is not None:
        return print_plans(args.plan)
    ranks = number_of_ranks(args)
    print_charts()
    where, errors, rows, said = in_ranks("everything", ranks, device=args.device)
    single = {check.__name__[6:]: check() for check in BY_ONE}  # these start processes as they need them
    print(f"{ranks} processes on {where}; checks passed: {', '.join([*errors, *single])}")
    (error, moved, expected, seconds), = single["elastic"]
    errors["a rank killed"] = error
    rows += measure_skipping()
    rows.append(Row("a rank killed: sent", "layers new to a rank", expected / MIB, moved / MIB, band=(1, 1)))
    said.append(f"the longest step, in which a rank was killed or lost its connection: {1e3 * seconds:.0f} ms")
    errors = [error for error in errors.values() if error is not None]
    ledger.row(f"largest error of {len(errors)} checks", "fp64, against serial", 1e-12, max(errors), "", (0, 1))
    for row in rows:
        ledger.row(*row)
    for line in said:
        print(line)
    print_arena(single["arena"])


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--plan", metavar="WISH", help=f"plan a training and stop; each as name=number: {USAGE}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where every rank can have a GPU")


if __name__ == "__main__":
    enough_queues()
    sys.exit(base.run_stage(globals(), "python 06_low_comm_sync.py"))


# Exercises
#   1. Let data_parallel send bf16 (reduce a copy of each bucket): which check tells? What would 06's feedback do?
#   2. Write the V-shaped schedule: two chunks a rank, the second in reverse order, as a list, and simulate its bubble.
#   3. Hide tensor parallelism's sums: cut the batch in two, and let one half's sum run under the other's products.
#   4. Give layer_tasks a forward and a backward, each with its messages: which policy gains, and by how much?
#   5. Let the planner's `reach` depend on the width of the matrices. Can one curve explain all of PUBLISHED?
#   6. FORGE under data parallelism: between backward under handle.stash() and handle.release(), gather every Product's
#      dY and X over the group. Check the step bit for bit on whole numbers, and the bytes by section 5's formula.
