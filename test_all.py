"""Every check of every stage on more shapes and seeds, every planted bug, and train.py from end to end.

    pytest test_all.py          on a CPU the Triton kernels run interpreted, on a GPU compiled
    pytest test_all.py -k 04    what belongs to one stage
    pytest test_all.py -n 2     two tests at a time, where pytest-xdist is installed

What a stage checks when it is run is not repeated here: it is run, last. The tests of known bugs name who once shipped
them. What tells that two things are equal has a twin that breaks one: the stages' --break, or a test that says so.
"""

import ast
import concurrent.futures
import contextlib
import functools
import gc
import importlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

# Several processes share the cores here. Where threads of one wait for each other, that makes it many times slower.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

STAGES = {name: importlib.import_module(name) for name in (
    "01_logits_memory", "02_cce_kernel", "03_grad_filter_sort", "04_fused_optimizer", "05_parallelism",
    "06_low_comm_sync", "07_moe_balance")}
base, cce, gfs, forging, parallel, low_comm, moe = STAGES.values()
train = importlib.import_module("train")

ROOT = Path(__file__).resolve().parent
DEVICE = base.default_device()
FP32, BF16 = DTYPES = [torch.float32, torch.bfloat16]
HOPPER = base.INTERPRETED or cce.is_hopper(DEVICE)  # where 03's lost-bit is in a kernel that runs
BUGS = {stage: [bug for bug in module.BREAKS if HOPPER or bug != "lost-bit"] for stage, module in STAGES.items()}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, where a GPU makes an inf
needs_gpu = pytest.mark.skipif(not base.HAS_CUDA, reason="needs a GPU")

interpreter = importlib.import_module("triton.runtime.interpreter") if base.INTERPRETED and base.HAS_TRITON else None
if hasattr(interpreter, "_patch_lang"):  # private: other versions may lack it

    def patch_once(kernel, patch=interpreter._patch_lang):
        """The interpreter replaces all of Triton's language at each call of a function: a quarter of its time. While a
        kernel runs, what its launch has replaced still is, for the functions that it calls."""
        languages = [value for value in kernel.__globals__.values() if value in (cce.tl, cce.tl.core)]
        return patch(kernel) if any(cce.tl.core.is_builtin(language.load) for language in languages) else None

    interpreter._patch_lang = patch_once


# ==== Helpers =========================================================================================================


def python(*arguments):
    """Run the interpreter in this folder; its status, output and errors."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=900)


def in_process(stage, *arguments):
    """A stage's command line in this process, which has torch already: what python() returns."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [f"{stage}.py", *map(str, arguments)])
        try:
            status = base.run_stage(vars(STAGES[stage]), "")
        except SystemExit as left:  # argparse
            status = left.code
    return SimpleNamespace(returncode=status, stdout=output.getvalue(), stderr=errors.getvalue())


def refused(result, message):
    """Bad input: status 2, and one line that says this."""
    return result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1


def near(got, want, limit):
    return all(cce.error(*pair) < limit for pair in zip(got, want, strict=True))


def wait_until(condition, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def session_members(session):
    """Processes of a session (field 6 of Linux's /proc/PID/stat) that are not zombies."""
    members = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its = file.read_text().rpartition(")")[2].split()[:4]
            members += int(its) == session and state != "Z"
    return members


def plant(stage):
    """What --break says of each of a stage's bugs, and its status. All are planted in one process, but where kernels
    are compiled, which keep what they were compiled with: there each has a process."""
    groups = [[bug] for bug in BUGS[stage]] if base.HAS_CUDA else [BUGS[stage]]
    runs = [python("-c", f"import test_all; test_all.plant_here({stage!r}, {group})") for group in groups]
    return "".join(run.stdout + run.stderr for run in runs)


def plant_here(stage, bugs):
    names = vars(STAGES[stage])
    for bug in bugs:
        attribute = names["BREAKS"][bug][1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(names, attribute, names[attribute])  # it is put back afterwards
            result = in_process(stage, "--break", bug)
        print(f"{result.stdout}{result.stderr}{bug}: status {result.returncode}")


def lose_ranks(ranks, faults, mesh, timeout, spare, **wanted):
    """What is told by those of 05's ranks that are left of a run in which others are lost, or too slow."""
    arguments = f"'train_elastic', {ranks}, {faults}, *{mesh}, {timeout}, device='cpu', spare={spare}"
    return python("-c", f"import test_all; print(test_all.parallel.in_ranks({arguments}))")


def stop(flags, number, status):
    """05 runs until it fails, or a signal comes. Its status and output, once none of its processes is left."""
    process = subprocess.Popen([sys.executable, "05_parallelism.py", *flags], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        if number:  # the script, a server to fork from, its tracker, two ranks
            wait_until(lambda: session_members(process.pid) > 4)
            process.send_signal(number)
        output = process.communicate(timeout=200)[0]
        wait_until(lambda: not session_members(process.pid))
        return process.returncode, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# What needs processes of its own anyway, by the name of its test. In none of them does a clock decide.
JOBS = {"test_stage_runs": lambda stage: python(f"{stage}.py"), "test_planted_bugs_are_caught": plant,
        "test_05_ranks_may_be_lost": lose_ranks, "test_05_no_process_is_left_behind": stop}


@pytest.fixture(scope="session", autouse=True)
def beside(request, tmp_path_factory):
    """place(test): the file where its job's outcome is, or will be. The tests mostly keep one core busy; beside them
    two jobs run at a time, whose processes often wait. Each worker of pytest-xdist has all tests in its session, of
    which it runs some: the first one has the jobs of all."""
    worker, folder = os.environ.get("PYTEST_XDIST_WORKER"), tmp_path_factory.getbasetemp()
    folder = folder.parent if worker else folder
    place = lambda item: folder / re.sub(r"\W", "_", item.name)  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for item in request.session.items if worker in (None, "gw0") else ():
            if item.originalname in JOBS:
                pool.submit(work, item, place(item))
        yield place
        pool.shutdown(cancel_futures=worker is None)


def work(item, file):
    try:
        result = JOBS[item.originalname](**item.callspec.params)
    except Exception as error:
        result = error
    raw(file.with_suffix(".part"), pickle.dumps(result)).rename(file)


@pytest.fixture
def outcome(request, beside):
    file = beside(request.node)
    wait_until(file.exists, 900)
    result = pickle.loads(file.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def fail_on_rank_1(file):
    """In a rank: rank 0 goes on, and would say so in the end."""
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("rank 1 fell over")
    time.sleep(120)
    file.touch()


def verdict_without_one_part(folder):
    """In a rank: two workers of two ranks each. The exchange of one part breaks; the other must not land its round."""
    groups, rank = parallel.make_groups(dp=2, tp=2), int(os.environ["RANK"])
    transport = low_comm.Dist(timeout=30, group=groups.dp)
    sync = low_comm.make_sync("local-sgd", low_comm.toys(1), transport, H=1)
    if rank == 1:
        transport.reduce = lambda part: exec("raise RuntimeError('the connection broke')")
    before = sync.phi.clone()
    sync.theta += rank
    with pytest.raises(ConnectionError, match="--resume"):
        sync.step()
    transport.close()
    assert torch.equal(sync.phi, before)
    Path(folder, str(rank)).touch()


def forged_layer(E, C, x):
    layer = torch.nn.Linear(*C.T.shape, bias=False, device=C.device)
    forging.forge(layer, forging.AdamW())
    return torch.nn.functional.cross_entropy(layer(E), x)


# ==== All stages: 01's command line and clock, checks on more shapes and seeds ========================================


def test_01_command_line_of_a_stage(monkeypatch):
    """Status 1: a check or a claim fails, a planted bug is caught. 2: a user's mistake, in one line; a bug that breaks
    more than its check. A programmer's mistake keeps its traceback."""

    def run(flags, outcome):  # an error, or what is measured where 1 was predicted
        def check_it(*given):
            if isinstance(outcome, BaseException):
                raise outcome
            for ledger in given[1:2]:
                ledger.row("claim", "formula", 1, outcome)

        monkeypatch.setitem(STAGES, "stage", SimpleNamespace(
            __file__="stage.py", __doc__="A stage.", BREAKS={"bug": (check_it, "anything", None)}, body=check_it,
            CHECKS=[check_it, base.check_table], add_arguments=lambda parser: parser.add_argument("--more")))
        return in_process("stage", *flags.split())

    fails, bug, full = AssertionError("it fails"), RuntimeError("a bug"), RuntimeError("can't allocate 9 TB")
    for flags, outcome, status, said in (
        ("", 1, 0, "next: "), ("", 2, 1, "A CLAIM FAILED"), ("", base.BadInput("use two"), 2, "stage.py: use two\n"),
        ("", full, 2, "stage.py: no memory"), ("", KeyboardInterrupt(), 130, ""), ("", fails, 1, "CHECK FAILED: it f"),
        ("--check it --more 1", 1, 0, "checks passed: it\n"), ("--check", fails, 1, "CHECK FAILED: it fails"),
        ("--check other", 1, 2, "use one of it, table"), ("--break bug", bug, 2, "broke down: RuntimeError: a bug"),
        ("--break bug", 1, 0, "NOT caught by check_it"), ("--break bug", fails, 1, "caught by check_it: it fails"),
    ):
        result = run(flags, outcome)
        assert result.returncode == status and said in result.stdout + result.stderr, (flags, result)
        assert result.stderr.count("\n") == (status == 2), result
    assert run("--break other", 1).returncode == 2
    for outcome in (bug, ValueError("a bug")):
        with pytest.raises(type(outcome), match="a bug"):
            run("", outcome)


def test_01_bench_takes_the_median_after_a_warm_up(monkeypatch):
    clock, calls = iter([-99, 0, 0, 1, 10, 12, 20, 23, 30, 34, 40, 45, 50, 56, 60, 67]), []  # seven runs: 1 s to 7 s
    monkeypatch.setattr(base, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert (*base.bench(lambda: calls.append(1)), len(calls)) == (4000, 2000, 8)


@pytest.mark.parametrize("stage, name", list(zip(
    STAGES, ("table", "plan", "bad_input", "plans", "flow", "bytes", "routing"), strict=True)))
def test_checks_by_name(stage, name):
    for asked in (name, f"check_{name}"):
        result = in_process(stage, "--check", asked)
        assert result.returncode == 0 and result.stdout.endswith(f"\nchecks passed: {name}\n"), result
    assert refused(in_process(stage, "--check", "nothing"), name)
    if stage in ("02_cce_kernel", "03_grad_filter_sort"):
        assert refused(in_process(stage, "--shape", 8, 0, 8), f"{stage}.py: --shape [8, 0, 8]: N, V and D must be at")


@pytest.mark.parametrize("loss", [
    base.chunked_linear_cross_entropy, cce.linear_cross_entropy,
    functools.partial(cce.linear_cross_entropy, reduction="sum", workspace=0),
    functools.partial(gfs.linear_cross_entropy, gradient="sparse"), forged_layer,
], ids=["01 chunked", "02 over tokens", "02 over the vocabulary", "03 sparse", "04 layer"])
def test_second_derivatives_raise(loss):
    """Where backward is written by hand, they would lack what it takes for constant."""
    E, C, _, x = base.random_problem(20, 31, 8, FP32, DEVICE, bias=False)
    dE = torch.autograd.grad(loss(E, C, x).square(), E, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dE.sum().backward()


# {check: what it is called with}. Known bugs among them: apple/ml-cross-entropy issue 52 counted the bias once per
# block of D, of which D = 300 has several; rows of D = 9 cannot be fetched by descriptors. 05 loses its first rank in
# the first step; one that has all sums but has not voted; one of four that have all layers; two of six at once.
LOST = [([(0, 0, "forward")], 2, 2, (1, 3), [3]), ([(3, 6, "done")], 2, 2, (1, 3), [4]),
        ([(1, 2, "forward")], 4, 1, (3, 1), []),
        ([(0, 2, "forward"), (1, 2, "forward")], 3, 2, (2, 2), [0, 1, 2, 3])]
ONE_IS_ENOUGH = base.INTERPRETED and len(gfs.filter_backends(DEVICE, BF16, 24)) > 1
MORE = {
    base.check_reference: [dict(N=20 + s, V=7 + 30 * s, D=5 + s, seed=s) for s in range(3)],
    base.check_chunked: [dict(N=33, V=40 + s, D=9, chunk=8 + s, seed=s) for s in range(3)],
    cce.check_equal: [dict(N=N, V=V, D=D, dtype=dtype, seed=N if bias else V, bias=bias)
                      for N, V, D in ((252, 507, 123), (128, 256, 64), (3, 2, 1), (65, 129, 200), (40, 90, 300))
                      for dtype in DTYPES for bias in (True, False)],
    cce.check_orders: [dict(D=9, seed=33)],
    gfs.check_filter: [dict(dtype=dtype, seed=1, **options) for dtype in DTYPES for options in (
        {}, dict(rule="element"), dict(only_dE=True), dict(rule="element", only_dE=True), dict(sort=False))],
    gfs.check_sparse: [dict(lse_weight=0.3, seed=1, dtype=FP32),
                       dict(lse_weight=0.3, seed=1, dtype=BF16, names=["a Zipf law"] * ONE_IS_ENOUGH)],
    forging.check_classifier: [dict(N=N, V=V, D=D, cases=[case]) for N, V, D, *case in (
        (33, 270, 24, "fp32", FP32, None), (34, 140, 136, "master", BF16, None), (20, 300, 16, "fp32", FP32, 5.0))],
    forging.check_stash: [dict(sizes=(3, 50), V=130, D=24)],
    forging.check_steps: [dict(E=1, M=M, K=K, N=N, seed=M, rules=forging.examples()[:3])
                          for M, K, N in ((128, 256, 64), (1, 8, 1), (65, 392, 33), (40, 129, 7))],
    forging.check_shards: [dict(M=41, K=384, N=9)],
    parallel.check_simulator: [dict(seeds=100)], parallel.check_uneven: [dict(seeds=20, n=8), dict(seeds=3, n=24)],
    parallel.check_flow: [dict(seeds=80)], parallel.check_skip: [dict(seeds=150)],
    parallel.check_planner: [dict(seeds=40)],
    parallel.check_elastic: [dict(cases=[case]) for case in LOST],
    low_comm.check_data_parallel: [dict(M=5)], low_comm.check_codes: [dict(n=257)],
    low_comm.check_one_byte: [dict(M=5)], low_comm.check_processes: [dict(ranks=2)],
    low_comm.check_survival: [dict(name=name) for name in low_comm.METHODS  # 06 itself has two; merge has no rounds
                              if name not in ("diloco", "streaming", "merge")],
    moe.check_routing: [dict(N=17 + s, E=4 + 3 * s, seed=s) for s in range(3)],
    moe.check_layer: [dict(N=9, D=8 + 4 * s, E=3 + s, seed=s) for s in range(3)],
    moe.check_products: [dict(dtypes=[BF16], seed=1)] * base.HAS_TRITON,
    moe.check_least_loaded: [dict(seeds=400)],
}


@pytest.mark.filterwarnings("ignore:.*overflow.*")
@pytest.mark.parametrize("check, options", [
    pytest.param(check, options, id=f"{check.__module__} {check.__name__}")
    for check, cases in MORE.items() for options in cases])
def test_on_more_shapes_and_seeds(check, options):
    base.call_check(functools.partial(check, **options), DEVICE)


@pytest.mark.parametrize("stage, ranks, only, errors", [
    ("05_parallelism", 3, None, 6), ("05_parallelism", 4, "mesh", 1), ("07_moe_balance", 4, None, 3)])
def test_on_more_ranks(stage, ranks, only, errors):
    """Three, where nothing is a power of two; four: data or context with tensor parallelism, two by two."""
    found = parallel.in_ranks("all_checks", ranks, only, stage=vars(STAGES[stage]))
    found = [error for error in found.values() if error is not None]
    assert len(found) == errors and max(found) < 1e-12


# ==== 02: cut cross-entropy against the reference =====================================================================


@pytest.mark.parametrize("order", ["vocabulary", "kept"])
def test_02_kernels_start_where_a_slice_of_a_larger_matrix_starts(order):
    """Views whose rows are cut from wider ones: aligned (descriptors), and not (pointers)."""
    E, C, b, x = (t.detach() for t in base.random_problem(140, 400, 48, BF16, DEVICE))
    loss = functools.partial(cce.linear_cross_entropy, workspace=0 if order == "vocabulary" else None)
    for first, backend in ((first, backend) for first in (8, 3) for backend in cce.backends(DEVICE)):
        views = [t[:, first : first + 40].requires_grad_() for t in (E, C)]
        plain = [t.detach().clone().requires_grad_() for t in views]
        got, want = (cce.gradients_of(loss, *pair, b.requires_grad_(), x, backend=backend) for pair in (views, plain))
        assert near(got, want, 3e-3)  # within a rounding of bf16


@needs_gpu
def test_02_offsets_beyond_32_bits():
    """V D > 2^31 elements: the last classes are read and their gradients written where they belong."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    N, V, D = 128, 540_000, 4096
    E = torch.randn(N, D, device=DEVICE, dtype=BF16, requires_grad=True)
    C = torch.randn(V, D, device=DEVICE, dtype=BF16).div_(D**0.5).requires_grad_()
    loss = cce.linear_cross_entropy(E, C, torch.arange(V - N, V, device=DEVICE))
    dC = torch.autograd.grad(loss, C)[0][-N:]
    with torch.no_grad():
        p = torch.softmax(E.float() @ C.float().T, 1)[:, -N:]  # (N, N) of the last classes
        assert cce.error(loss, -p.diag().log().mean()) < 1e-3
        assert cce.error(dC, (p - torch.eye(N, device=DEVICE)).T @ E.float() / N) < 1e-2


@pytest.mark.parametrize("backend", cce.backends(DEVICE))
def test_02_no_tokens_and_vectors_that_are_expanded_or_strided(backend):
    """The gradient of a mean is one number expanded to N; a kernel that reads it as N numbers reads past its end."""
    for dtype in DTYPES:
        E, C, b, x = base.random_problem(0, 20, 8, dtype, DEVICE)
        assert not any(map(torch.any, cce.gradients_of(cce.linear_cross_entropy, E, C, b, x, backend=backend)))
    E, C, b, x = (t.detach() for t in base.random_problem(40, 61, 24, FP32, DEVICE, ignored=0.0))
    grad, wide = torch.tensor(1 / 40, device=DEVICE).expand(40), lambda t: t.repeat_interleave(2)[::2]
    lse, target = cce.lse_and_target(E, C, x, backend=backend)
    again = cce.lse_and_target(E, C, wide(x), backend=backend)
    assert torch.equal(lse, again[0]) and torch.equal(target, again[1])
    want = cce.gradient_slice(E, C, x, lse, grad.clone(), grad.clone(), None, backend)
    assert torch.equal(cce.gradient_slice(E, C, wide(x), wide(lse), grad, grad, None, backend), want)


def test_02_without_triton_the_blocked_backend_takes_over():
    """macOS and Windows: everything imports, "auto" works, and asking for Triton says how to get it."""
    result = python("-c", """
import importlib, importlib.util, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
base, cce = importlib.import_module("01_logits_memory"), importlib.import_module("02_cce_kernel")
assert not base.HAS_TRITON and "no triton" in base.describe_device()
E, C, b, x = base.random_problem(10, 20, 4)
torch.testing.assert_close(cce.linear_cross_entropy(E, C, x, b), base.linear_cross_entropy_reference(E, C, x, b))
cce.linear_cross_entropy(E, C, x, backend="triton")
""")
    assert ": backend is 'triton', which is not installed" in result.stderr, result.stderr


# ==== 03: filtering and sorting =======================================================================================

sparse = functools.partial(gfs.linear_cross_entropy, gradient="sparse")
CLOSE = {FP32: 1e-5, BF16: 3e-3}


def test_03_filter_and_sparse_gradient_on_awkward_shapes():
    """Fewer rows, classes and columns than a tile has, no tokens, all ignored; thresholds that nothing is below: the
    exact gradient."""
    for N, V, D in [(1, 2, 8), (5, 70, 24), (0, 20, 8), (40, 3, 16)]:
        for dtype in DTYPES:
            E, C, _, x = base.random_problem(N, V, D, dtype, DEVICE, bias=False)
            for backend in gfs.filter_backends(DEVICE, dtype, D):
                if N and dtype == BF16:
                    *got, _ = gfs.filtered_cross_entropy(E, C, x, eps=1e-9, backend=backend)
                    assert near(got, cce.gradients_of(base.linear_cross_entropy_reference, E, C, None, x), 1e-2)
                for targets in (x, torch.full_like(x, -100)):
                    want = cce.gradients_of(cce.linear_cross_entropy, E, C, None, targets)
                    for gradient in ("sparse", "auto"):
                        loss = functools.partial(gfs.linear_cross_entropy, gradient=gradient, backend=backend)
                        assert near(cce.gradients_of(loss, E, C, None, targets), want, 2 * CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_03_sparse_gradient_from_strided_and_expanded_inputs(dtype):
    """Rows that lie apart in memory: a kernel that takes D for their distance reads other rows. A bias is a column.
    The upstream gradient of lse.sum() is one number: a kernel that takes it for N numbers reads past it."""
    E, C, x, eps = gfs.adversarial_problems(DEVICE, dtype)["a Zipf law"]
    wide = [torch.cat((t.detach(), t.detach()), 1)[:, : t.shape[1]].requires_grad_() for t in (E, C)]
    bias = torch.zeros(len(C), device=DEVICE, dtype=dtype)
    for backend in gfs.filter_backends(DEVICE, dtype, E.shape[1]):
        loss = functools.partial(sparse, eps=eps, backend=backend)
        runs = [(loss(*pair, x, b), pair) for pair, b in (((E, C), None), (wide, None), ((E, C), bias))]
        want, *others = ([value, *torch.autograd.grad(value, pair)] for value, pair in runs)
        assert all(near(got, want, CLOSE[dtype]) for got in others)
        _, lse = loss(E, C, x, reduction="none", return_lse=True)
        want = torch.autograd.grad(lse, (E, C), torch.ones_like(lse), retain_graph=True)
        assert near(torch.autograd.grad(lse.sum(), (E, C)), want, CLOSE[dtype])


def test_03_what_is_told_is_of_the_rows_that_count():
    """Nine of ten tokens are ignored and list nothing: the forecast speaks of a mean over all. And every second row has
    a gradient, and those have a tail of their own: an estimate of the error over all rows says less."""
    E, C, x = gfs.trained_problem(1024, 16384, 32, FP32, "cpu")  # the same numbers on every device
    E, C, x, n, v = (t.detach().to(DEVICE) for t in (E, C, x, torch.arange(1024), torch.arange(16384)))
    few, stats = x.where(n % 10 == 0, -100), gfs.SparseStats()
    options, leaves = dict(backend="torch", reduction="none"), (E.requires_grad_(), C.requires_grad_())
    sparse(E, C, few, eps=2**-9, stats=stats, backend="torch").backward()
    assert stats.forecast[0] == pytest.approx(stats.measured[0].item(), rel=0.2)
    with torch.no_grad():
        E[:, 1], C[:, 1] = 1.5 - 3.0 * (n % 2), 1.0 - 2.0 * (v % 2)
    found = []
    for weight in (torch.ones_like(n), 1 - n % 2):
        losses = sparse(E, C, x, eps=2**-9, stats=stats, **options), cce.linear_cross_entropy(E, C, x, **options)
        got, want = (torch.autograd.grad((loss * weight).sum(), leaves) for loss in losses)
        found.append([cce.error(*pair) for pair in zip(got, want, strict=True)])
        told = stats.measured[2:].tolist()
        assert all(0.8 < said / true < 1.25 for true, said in zip(found[-1], told, strict=True))
    assert found[1][1] > 1.1 * found[0][1]  # dC is worse where one kind of row is alone


def test_03_statistics_of_several_calls():
    """Two calls before their backwards, backward thrice through one that is refused there, a call without gradients."""
    E, C, x, eps = gfs.adversarial_problems(DEVICE, FP32)["a Zipf law"]
    stats = gfs.SparseStats()
    call = functools.partial(sparse, E, C, x, eps=eps, stats=stats, backend="torch")
    for loss in (call(), call()):
        loss.backward()
    assert (stats.calls, stats.sparse) == (2, 2) and stats.measured is not None
    with gfs.patched(capacity_for=lambda N, candidates: 8):
        third = call()
        for _ in range(3):
            third.backward(retain_graph=True)
    assert (stats.calls, stats.sparse, stats.decision) == (3, 2, "exact") and "places for" in stats.reason
    with torch.no_grad():
        call()
    assert stats.calls == 3 and stats.measured is None and "no gradient" in stats.reason


@needs_gpu
def test_03_sparse_gradient_refuses_a_cuda_graph():
    E, C, _, x = base.random_problem(256, 1024, 64, BF16, DEVICE, bias=False)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        sparse(E, C, x, backend="torch")


# ==== 04: the step inside backward ====================================================================================
#
# Most of its tests are its checks, run above on more shapes. Here is what those take for granted.


def test_04_noise_is_the_published_generator():
    """Philox 4x32 of 7 rounds: its authors' known answer for key and counter 0. And its 16-bit halves are even."""
    words = forging.philox(0, *[torch.tensor([0])] * 4)
    assert [int(word) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    bits = forging.random_bits(1, 2, 3, 0, 0, 512, 512, "cpu")
    counts = torch.bincount(bits.flatten() >> 8, minlength=256).double()
    chi2 = ((counts - 1024) ** 2 / 1024).sum().item()  # 255 degrees of freedom: mean 255, deviation 22.6
    assert 150 < chi2 < 370
    assert all(abs(((bits >> i) & 1).double().mean() - 0.5) < 5 * 0.5 / 512 for i in range(16))


def test_04_forged_model_keeps_what_is_skipped_frozen_or_no_plain_linear():
    """And when it goes, no memory."""
    nn = torch.nn
    model = nn.ModuleDict(dict(
        a=nn.Linear(8, 8), head=nn.Sequential(nn.Linear(8, 4)), header=nn.Linear(8, 8),
        frozen=nn.Linear(8, 8).requires_grad_(False), attention=nn.MultiheadAttention(8, 2), norm=nn.LayerNorm(8)))
    handle = forging.forge(model, forging.AdamW(), skip="head")
    assert list(handle.states) == ["a.weight", "header.weight"] and type(model["a"]) is forging.ForgeLinear
    assert {"a.bias", "head.0.weight", "attention.out_proj.weight", "norm.weight"} <= set(handle.ordinary)
    assert not any(name.startswith("frozen") for name in handle.ordinary)
    weight = weakref.ref(model["a"].weight)
    del model, handle
    gc.collect()
    assert weight() is None


# ==== 05: one model on many processes =================================================================================


def test_05_spawn_ends_the_others_when_one_fails(tmp_path):
    with pytest.raises(Exception, match="rank 1 fell over"):
        parallel.spawn(fail_on_rank_1, 2, "cpu", (tmp_path / "rank 0 has slept",))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's table of processes")
@pytest.mark.parametrize("flags, number, status", [
    ([], signal.SIGINT, 130), ([], signal.SIGKILL, -signal.SIGKILL), (["--break", "no-f"], None, 1),
], ids=["Ctrl-C", "killed parent", "failure"])
def test_05_no_process_is_left_behind(flags, number, status, outcome):
    assert outcome[0] == status, outcome


def test_05_what_cannot_be_is_one_line_for_all_ranks():
    """The rank count does not divide; another world than planned; sizes that are none; the last copy of a layer."""
    for sizes in ((1, 1, 1, 3), (2, 2, 1, 1)):
        with pytest.raises(base.BadInput, match="rank 0, 1: dp .* needs . ranks, but 2 were started"):
            parallel.in_ranks("make_groups", 2, *sizes)
    for tp, message in ((0, "at least 1"), (2, "needs 2 ranks, but 1 were started")):
        with pytest.raises(ValueError, match=message):
            parallel.make_groups(tp=tp)
    with pytest.raises(OSError, match="no copy of units .* start again from a checkpoint"):
        parallel.in_ranks("train_elastic", 4, [(2, 3, "forward")], 1, 4, 8, device="cpu", spare=1)


def test_05_one_process_needs_no_groups():
    """With groups of None everything is the serial model."""
    E, C, _, x = base.random_problem(20, 31, 8, bias=False)
    assert torch.equal(parallel.vocab_parallel_cross_entropy(E, C, x, None, 31), cce.linear_cross_entropy(E, C, x))
    model = parallel.tiny(1)
    batch = parallel.tiny_tokens(model)
    want = parallel.serial_loss(model, *batch).detach()
    assert parallel.make_groups().tp is None and parallel.tensor_parallel(model, None) == {}
    parallel.context_parallel(model, None)
    handle = parallel.data_parallel(model, None)
    loss = parallel.part_of_loss(model, *batch, None)
    loss.backward()
    handle.finish()
    assert abs(loss - want) < 1e-12 and all(p.grad is not None for p in model.parameters())


WISH = "params=8e9 layers=32 dim=4096 vocab=128256 seq=8192 gpus=64 gib=141 link=400"


@pytest.mark.parametrize("message, flags", [
    ("nothing is parallel", ["--ranks", 1]), ("without torchrun", []), ("without torchrun", ["--check"]),
    ("no plan fits 2 GPUs of 24 GiB", ["--plan", WISH.replace("gpus=64 gib=141", "gpus=2 gib=24")]),
    ("missing layers, gib", ["--plan", "params=8e9 dim=4096 vocab=128256 seq=8192 gpus=64"]),
    ("not of the form", ["--plan", "8B on 64 GPUs"]),
    *([] if base.HAS_CUDA else [("as many ranks", ["--device", "cuda"])]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_05_bad_flags(message, flags, monkeypatch):
    if message == "without torchrun":
        monkeypatch.setenv("RANK", "0")
    assert refused(in_process("05_parallelism", *flags), message)


def test_05_planner_answers_in_one_screen():
    result = in_process("05_parallelism", "--plan", WISH)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) <= 25 and max(map(len, lines)) <= 140, result
    assert any(line.split()[:4] == ["64", "1", "1", "1"] for line in lines), result


@pytest.mark.parametrize("ranks, faults, mesh, timeout, spare, members, left", [
    (4, [(1, 2, "slow")], (2, 2), 6, 0, (0, 2, 3), (1, 3)),
    (6, [(2, 1, "forward"), (4, 1, "repair")], (3, 2), 8, 2, (0, 1, 3, 5), (2, 2)),
], ids=["one is too slow", "another during repair"])
def test_05_ranks_may_be_lost(ranks, faults, mesh, timeout, spare, members, left, outcome):
    """The others go on without them, as if there had always been one process."""
    assert outcome.returncode == 0, outcome.stderr
    losses, *found, _, _, forgotten = ast.literal_eval(outcome.stdout)
    assert found == [members, left] and forgotten
    assert losses == pytest.approx(parallel.in_ranks("undisturbed", 1, device="cpu"), rel=1e-12, abs=0)


# ==== 06: workers that synchronise now and then =======================================================================


def test_06_a_verdict_is_of_all_parts(tmp_path):
    parallel.spawn(verdict_without_one_part, 4, "cpu", (tmp_path,))
    assert len(list(tmp_path.iterdir())) == 4


# ==== 07: experts =====================================================================================================


@needs_gpu
def test_07_products_of_experts_with_large_tiles():
    """Descriptors, several tiles an expert, multiprocessors left to others."""
    counts, product = (700, 0, 1, 130, 200, 128, 256, 0, 64), moe.experts_product
    rows = moe.Rows(torch.tensor((0, *np.cumsum(counts)), device=DEVICE))
    sizes = (sum(counts), 320), (sum(counts), 256), (256 * len(counts), 320)
    x, dy, W = (torch.randn(*size, device=DEVICE, dtype=BF16) for size in sizes)
    for fast, function, *given in (
        ("triton", product, x, W, rows), ("triton", functools.partial(product, spare=500), x, W, rows),
        ("triton", product, dy, W, rows, True), ("grouped", moe.experts_gradient, dy, x, rows),
    ):
        assert cce.error(*(function(*given, backend=backend) for backend in (fast, "torch"))) < 5e-3, function


@pytest.mark.parametrize("rate", [3e-3, -3e-3], ids=["right", "twin"])
def test_07_biases_even_out_the_loads(rate):
    """Without a loss, without a gradient: a router that likes some experts better gets all used. The twin's biases have
    the wrong sign, and feed the fullest expert."""
    torch.manual_seed(0)
    layer = moe.MoE(16, 16, 8, 2)
    layer.router.data.normal_(std=0.2)
    x, found = torch.randn(2048, 16) + 1, []
    balance = moe.Balance(layer, "bias", rate=rate)
    for _ in range(100):
        layer(x)
        balance.loss()
        found.append(balance.step().item())
    assert found[0] > 0.5 and (found[-1] < 0.1) == (rate > 0)


def test_07_by_hand():
    """Plans of one rank, and of no tokens. A second use of forged experts is refused. The study's tables of counts: 2
    bits for four domains with experts of their own, none if all use all alike; batches have the domains one after the
    other, or in turn."""
    assert moe.least_loaded(np.array([1000, 10]), 1, least=1).tolist() == [[1000, 10]]
    assert moe.least_loaded(np.zeros(4, int), 2).sum() == 0
    layer = moe.MoE(8, 8, 4)
    forging.forge(layer, forging.AdamW()).arm(1e-3, 1)
    with pytest.raises(ValueError, match="used twice"):
        layer(layer(torch.randn(5, 8)))
    assert moe.mutual_information(torch.eye(4) * 100) == pytest.approx(2)
    assert moe.mutual_information(torch.full((4, 8), 9)) == pytest.approx(0, abs=1e-9)
    of_domain = [np.full(9, domain, np.uint8) for domain in range(3)]
    for mixed, want in ((False, [0, 0, 1, 1, 2, 2]), (True, [0, 1, 2, 0, 1, 2])):
        assert moe.batch_of(of_domain, 2, 4, np.random.default_rng(0), mixed)[0][:, 0].tolist() == want
    texts = moe.domain_texts()
    assert list(texts) == list(moe.DOMAINS) and {len(text) for text in texts.values()} == {2**18}


# ==== train.py ========================================================================================================
#
# Nearly all of these run train.py's own main() on a model of one layer, six steps long, in a tenth of a second, and
# compare what is left: the losses and norms of its log, the weights of its last checkpoint. They come in three kinds:
#
#     two ways to the same end      --accum 4, two processes, --recompute, killed and resumed: alike(), or same() bits
#     predicted, then measured      bytes of weights and states to the byte, peaks within a tenth
#     what must be refused          one line that names the mend, status 2, and nothing written
#
# A comparison could hold because both runs do nothing. So each has a twin in which the thing under test is left out by
# a monkeypatch (or, where processes are started, by a name of RUN_BUGS): that one must run to its end, and differ.

TINY = "--layers 1 --dim 32 --heads 2 --seq 32 --batch 8 --steps 6 --lr 3e-3 --dtype fp32 --preset cpu".split()
ON_CPU, TWO, CPU = ["--device", "cpu"], ["--device", "cpu", "--gpus", "2"], torch.device("cpu")
EXACT = ["--deterministic"] if base.HAS_CUDA else []


def alike(found, expected, losses=1e-5, norms=1e-4):
    """Whether two runs, which both must have come to their end, have the same losses and gradient norms. (Clipping and
    AdamW hide a wrong gradient from the loss.)"""
    assert (found.status, expected.status) == (0, 0) and found.losses.keys() == expected.losses.keys() != set()
    assert found.weights.keys() == expected.weights.keys()
    near = pytest.approx(expected.losses, abs=losses), pytest.approx(expected.norms, rel=norms)
    return (found.losses, found.norms) == near


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


def farthest(one, other):
    return max((one.weights[name] - p).abs().max().item() for name, p in other.weights.items())


class Tiny:
    """tiny(*flags, out=NAME): train.py in this process, which has torch already; tiny.launch(): in several. What is
    left: status, rows of the log, {step: value} of their columns, weights of the last checkpoint or None."""

    def __init__(self, folder, text):
        self.folder, self.text, self.out = folder, text, folder / "out"

    def argv(self, *flags, out="out"):
        data = [] if "--data" in flags else ["--data", self.text, "--val", self.text.with_name("val.txt")]
        files = ["--sample", "", "--out", self.folder / out, "--log", self.folder / f"{out}.jsonl"]
        return [str(word) for word in (*TINY, *data, *files, *flags)]

    def ran(self, out="out", status=None):
        log, files = self.folder / f"{out}.jsonl", train.checkpoint_files(self.folder / out)
        if status is None:  # the processes of a launch must have ended with the same one
            (status,) = {int(file.read_text()) for file in (self.folder / out).glob("status.*")}
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        weights = torch.load(files[0], weights_only=True)["model"] if files else None
        column = lambda name: {row["step"]: row[name] for row in rows if name in row}  # noqa: E731
        return SimpleNamespace(status=status, rows=rows, column=column, losses=column("loss"),
                               norms=column("grad_norm"), weights=weights)

    def __call__(self, *flags, out="out"):
        return self.ran(out, train.main(self.argv(*flags, out=out)))

    def launch(self, count, runs):
        """{name: (flags, a bug or None)} of so many processes, in turn in one launch: {name: Ran}. "+": it goes on."""
        if count == 1:
            return {name: self(*flags, *ON_CPU, out=name) for name, (flags, _) in runs.items()}
        asked = [(self.argv(*flags, *ON_CPU, "--gpus", count, out=name.strip("+")), bug)
                 for name, (flags, bug) in runs.items()]
        parallel.spawn(run_in_turn, count, "cpu", (asked,), timeout=200)
        return {name: self.ran(name.strip("+")) for name in runs}

    def said(self, out, rank=0):
        return (self.folder / out / f"said.{rank}").read_text()

    def saved(self, out="out"):
        return [int(file.stem[5:]) for file in train.checkpoint_files(self.folder / out)]

    def drop_last(self, out="out"):
        """Forget the newest checkpoint: a run goes on from the one before."""
        train.checkpoint_files(self.folder / out)[0].unlink()

    def copy(self, one, other):
        shutil.copytree(self.folder / one, self.folder / other)
        shutil.copy(self.folder / f"{one}.jsonl", self.folder / f"{other}.jsonl")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A quarter of a MiB of source text: enough to train on, little to load."""
    path, content = tmp_path_factory.mktemp("data") / "text.txt", gfs.corpus(limit=2 * base.MIB).train.tobytes()
    raw(path.with_name("val.txt"), content[-513:])
    return raw(path, content[: 2**18])


@pytest.fixture
def tiny(tmp_path, text):
    return Tiny(tmp_path, text)


def raw(path, content):
    path.write_bytes(content)
    return path


def at_step(number, act):
    """train.py's Optimizer.begin(), which does something else first in that step."""
    begin = train.Optimizer.begin
    return lambda self, step, share: (act() if step == number else None, begin(self, step, share))[1]


def build_run(text, *flags, device=CPU, folder=None):
    """A Run of these flags before its first step, without log."""
    args = train.parse([str(word) for word in (*TINY, "--device", device.type, "--data", text, *flags)])
    run = train.build(args, device)
    run.data, run.scratch = train.load_data(args), folder
    run.feed, run.log = train.Feed(run), SimpleNamespace(validation=lambda step, loss: None)
    return run


def bytes_of(run):
    """{category: [predicted, true]} of this process, between steps."""
    optimizer, sync, args = run.optimizer, run.world.sync, run.args
    forged = optimizer.forged.states.values() if optimizer.forged else ()
    held = [t for state in [*optimizer.ordinary.state.values(), *(state.tensors for state in forged)]
            for name, t in state.items() if name != "step"]
    parts, _ = train.predict_memory(run.config, train.micro_batch(args), args, run.device, run.world.size)
    true = dict(parameters=run.model.parameters(), optimizer=held, sync=sync.resident() if sync else ())
    return {name: [parts.get(name, 0), sum(t.nbytes for t in tensors)] for name, tensors in true.items()}


def norm_of_all(self):
    """Of what every process has, too, each copy counts."""
    ordinary = torch.nn.utils.get_total_norm([p.grad for p in self.parameters])
    return self.over_parts(torch.stack((ordinary.double(), self.forged.norm())).norm())


SUM, NORM, BACKWARD, RULES = train.World.sum, train.Optimizer.norm, train.accumulate_gradients, train.rules_of
NO_SUM = train.World, "sum", lambda self, *t, group=None: SUM(self, *t, group=group) if len(t) == 1 else None
RUN_BUGS = {  # of processes: [(where, what, what it becomes)]
    "a part's norm": [(train.Optimizer, "over_parts", lambda self, norm: norm)],
    "a norm of copies": [(train.Optimizer, "norm", norm_of_all)],
    "no sum in backward": [(parallel, "enter", lambda x, group, sequence=False: x)], "no sum": [NO_SUM],
    "no sum over workers": [NO_SUM, (parallel, "require_same_replicas", lambda *_: None)],  # which would speak first
    "nan": [(train, "accumulate_gradients", lambda run, step: BACKWARD(run, step) * (
        math.nan if os.environ["RANK"] == "1" and step == 3 else 1))],
    "inf": [(train.Optimizer, "norm", lambda self: NORM(self) * (
        math.inf if os.environ["RANK"] == "1" and self.at[1] == 3 else 1))],
    "memory": [(train, "compare_memory", lambda run: [run.log.row(step=0, memory=bytes_of(run))][1:])],
}
NO_DECAY = train, "rules_of", lambda args: RULES(SimpleNamespace(rule=args.rule, weight_decay=0.0))
NO_CLIP = forging.Forge, "release", lambda self, lr, step, scale, real=forging.Forge.release: real(self, lr, step, 1.0)


def run_and_say(args, function=train.run_rank):
    with Path(args.out, f"said.{os.environ['RANK']}").open("a", 1) as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return function(args)


def run_in_turn(runs):
    """In each of some processes: train.py's runs [(argv, a bug or None)]. Each leaves what it said, and its status."""
    rank = os.environ["RANK"]
    for argv, bug in runs:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RANK")  # or parse() takes this for torchrun's
            args = train.parse(argv)
            patch.setenv("RANK", rank)
            for change in RUN_BUGS.get(bug, ()):
                patch.setattr(*change)
            Path(args.out).mkdir(exist_ok=True)  # launch() would have
            status = run_and_say(args, functools.partial(train.guarded, train.process))
            Path(args.out, f"status.{rank}").write_text(str(status))


def test_train_learns_and_logs(tiny, capsys, monkeypatch):
    """Rates: a warm-up of 4 steps, a cosine to a tenth; as the optimizer is told, and the log."""
    monkeypatch.setattr(base, "peak_flops", lambda device, dtype: 1e12)
    told, begin = [], train.Optimizer.begin
    monkeypatch.setattr(train.Optimizer, "begin", lambda self, *now: told.append(now) or begin(self, *now))
    ran = tiny(*"--steps 60 --warmup 4 --eval-every 20 --lr 1e-2 --sample".split(), "def ")
    said, first, row, val, rates = capsys.readouterr().out, *ran.rows[0:3:2], ran.column("val_bpb"), ran.column("lr")
    assert ran.status == 0 and list(val) == [0, 20, 40, 60] and abs(val[0] - 8) < 0.24 and val[20] > val[60] < 5.5
    assert list(ran.losses) == list(range(1, 61)) and tiny.saved() == [60] and row["peak_mib"] > 50
    assert first["flags"]["lr"] == 1e-2 and first["parameters"] == base.GPTConfig(256, 32, 1, 2, 32).parameters()
    speed = 256 / row["seconds"]
    assert [row[name] for name in ("bpb", "tok_s", "mfu")] == pytest.approx(
        [row["loss"] / math.log(2), speed, speed * first["flops_per_token"] / 1e12])
    assert re.findall(r"^step (\d+)/60  loss", said, re.M) == "1 2 3 10 20 30 40 50 60".split()
    for words in ("0.0 M parameters", "predicted MiB", "top 50\ndef ", "256 tokens = 8 sequences", "60 steps in",
                  "eta 0:00", f"step 60/60  validation loss {ran.column('val_loss')[60]:.4f}"):
        assert words in said, said
    last = 0.001 + 0.0045 * (1 + math.cos(math.pi * 55 / 56))
    want = {1: 0.0025, 2: 0.005, 4: 0.01, 5: 0.01, 33: 0.0055, 60: last}
    assert {step: rates[step] for step in want} == pytest.approx(want)
    assert told == [(step, pytest.approx(rate * 100)) for step, rate in rates.items()]
    for flags, warmup in (("muon", 20), ("adamw", 50), ("adam-mini --warmup 0", 0)):
        args = train.parse([*ON_CPU, "--rule", *flags.split()])
        shares = [train.schedule(step, args) for step in (0, warmup, args.steps + 9)]
        assert args.warmup == warmup and shares == pytest.approx([1 / max(1, warmup), 1, 0.1])


@pytest.mark.parametrize("accum, balance", [(1, "global"), (2, "global"), (2, "micro"), (1, "none")])
def test_train_gradient_of_a_step(text, monkeypatch, accum, balance):
    """Of the mean loss over the step's own sequences, and of experts' balance; validation is a mean over windows."""
    run = build_run(text, "--moe", 4, "--balance", balance, "--accum", accum, "--optimizer", "ordinary")
    data, model, rule = run.data, run.model, moe.Balance(run.model, balance, None, train.BALANCE)

    def loss_of(x, y):
        return torch.nn.functional.cross_entropy((model(x) @ model.classifier.T).flatten(0, 1), y.flatten())

    total, mean = train.accumulate_gradients(run, 3).item(), 0.0
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for numbers in torch.arange(24, 32).chunk(accum):
        loss = loss_of(*data.train.windows(data.train.shuffled(numbers.tolist(), 0)))
        ((loss + rule.loss()) / accum).backward()
        mean += loss.item() / accum
    assert total == pytest.approx(mean, rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-6, msg=name)
    for limit, count in ((10**6, len(data.val)), (100, 3)):
        monkeypatch.setattr(train, "VALIDATED", {"cpu": limit})
        with torch.no_grad():
            wanted = loss_of(*data.val.windows(range(count))).item()
        assert count % 8 and train.validation(run, 0) == pytest.approx(wanted)  # the last part is a smaller one
    for workers in (1, 2, 4):  # a micro-batch is the same of however many workers
        worlds = [SimpleNamespace(workers=workers, seat=seat) for seat in range(workers)]
        args = SimpleNamespace(batch=16, accum=2, workers=workers)
        parts = [[i for world in worlds for i in train.sequences(args, world, micro)] for micro in (0, 1)]
        assert parts == [list(range(8)), list(range(8, 16))]


def test_train_accumulation_equals_one_big_batch(tiny, monkeypatch):
    """With any loss, too. Twins: a gradient three times too large, which norms alone show; the same sequences again."""
    rule = ["--rule", "adamw"] if DEVICE.type == "cuda" else []  # there Muon's bf16 makes more of a rounding than that
    whole, parts = tiny("--optimizer", "ordinary", *rule, out="whole"), tiny("--accum", 4, *rule, out="parts")
    assert alike(parts, whole) and farthest(parts, whole) < 1e-4
    for loss in ("reference", "cce"):
        other = tiny("--loss", loss, *rule, out=loss)
        assert alike(other, whole, 5e-4, 1e-3)
    assert list(other.column("sparse").values()) == [0.0] * 6 and all(other.column("why").values())  # it is too early
    with monkeypatch.context() as patch:
        patch.setattr(train, "loss_sum", lambda *args, real=train.loss_sum: 3 * real(*args))
        assert not alike(tiny("--accum", 4, *rule, out="large"), parts, 99)
    monkeypatch.setattr(train, "sequences", lambda args, world, micro: range(args.batch // args.accum))
    assert not alike(tiny("--accum", 4, *rule, out="again"), parts)


@pytest.mark.parametrize("optimizer", ["forge", "ordinary"])
def test_train_sparse_gradients(tiny, optimizer):
    """Of 4,096 classes, once most of them are known never to come, gradients are sparse, and the run stays close."""
    flags = [*"--vocab 4096 --steps 30 --lr 3e-2 --warmup 8 --optimizer".split(), optimizer, *ON_CPU, "--loss"]
    exact, sparse = (tiny(*flags, loss, out=loss) for loss in ("cce-exact", "cce"))
    taken = sparse.column("sparse")
    assert taken[1] == 0 and sum(taken.values()) >= 8 and alike(sparse, exact, 2e-3, 0.02)
    assert sparse.losses != exact.losses


@pytest.mark.parametrize("optimizer", ["forge", "ordinary"])
@pytest.mark.parametrize("rule", ["muon", "adamw", "adam-mini"])
def test_train_which_parameter_has_which_rule(text, rule, optimizer):
    """And rate, and decay: norms and biases have none."""
    run = build_run(text, *f"--moe 4 --weight-decay 0.5 --lr 0.01 --rule {rule} --optimizer {optimizer}".split())
    adamw, mini = forging.AdamW((0.9, 0.95), 1e-8, 0.5), forging.AdamMini((0.9, 0.95), 1e-8, 0.5)
    layers = {"muon": forging.Muon(weight_decay=0.025), "adamw": adamw, "adam-mini": mini}[rule]
    tables = mini if rule == "adam-mini" else adamw
    run.optimizer.begin(3, 0.5)
    assert run.optimizer.at == ({tables: 0.005, adamw: 0.005, layers: 0.01 if rule == "muon" else 0.005}, 3)
    states = run.optimizer.forged.states if run.optimizer.forged else {}
    told = {id(p): (group["weight_decay"], group["lr"], group["betas"]) for group in
            run.optimizer.ordinary.param_groups for p in group["params"]}
    for name, p in run.model.named_parameters():
        wanted = tables if name in ("embedding.weight", "classifier") else layers
        wanted = adamw if p.dim() < 2 or name.endswith("router") else wanted
        if name in states:
            assert states[name].rule == wanted and id(p) not in told
        else:
            assert wanted == adamw and told[id(p)] == (0.5 * (p.dim() > 1), 0.005, (0.9, 0.95)), name
    assert len(states) == (6 if optimizer == "forge" else dict(muon=4, adamw=0).get(rule, 6))


@pytest.mark.parametrize("flags, tolerance, twin", [
    *((f"--steps 30 --warmup 10 --clip 0 --rule {rule}", tolerance, NO_DECAY)
      for rule, tolerance in (("adamw", 1e-3), ("muon", 1e-5), ("adam-mini", 1e-5))),
    *((f"--steps 20 --clip 0.02 --accum 2 --rule adamw {size}", 1e-4, NO_CLIP) for size in ("", "--batch 4 --seq 4")),
    *((f"--moe 5 --top-k 1 --warmup 1 --clip {how}", 1e-5, NO_DECAY) for how in ("0", "1 --accum 2"))])
def test_train_forged_equals_ordinary(tiny, monkeypatch, flags, tolerance, twin):
    """Inside backward, after it from gradients or factors; in fp32 (04 has the bits of bf16). Weights notice first."""
    flags = [*flags.split(), *ON_CPU, "--optimizer"]
    after, forged = tiny(*flags, "ordinary", out="after"), tiny(*flags, "forge", out="forged")
    assert alike(forged, after, 1e-4, 1e-2) and farthest(forged, after) < tolerance
    if "--warmup 10" in flags:
        assert farthest(tiny(*flags, "forge", "--accum", 2, out="parts"), after) < tolerance
    monkeypatch.setattr(*twin)
    other = tiny(*flags, "forge", out="twin")
    assert alike(other, after, 99, 99) and farthest(other, after) > tolerance


def test_train_completes_flags():
    """The optimizer is what the others allow, the outer step that of the number of rounds."""
    after = "--accum 2", "--loss reference", "--gpus 2 --sync ddp"
    for flags, batch in {"": 8, "--accum 3": 9, "--gpus 3 --accum 2": 12}.items():  # eight, or what can be shared out
        assert train.parse([*ON_CPU, *flags.split()]).batch == batch
    inside = "", "--clip 0.5", "--rule adamw", "--on-nan skip", "--tp 2", "--gpus 2", "--states int8 --accum 2"
    for flags in (*inside, *after):
        args = train.parse([*TINY, *ON_CPU, *flags.split()])
        assert args.optimizer == ("ordinary" if flags in after else "forge"), flags
        assert args.clip == {"--clip 0.5": 0.5, "--rule adamw": 1}.get(flags, 0), flags
        assert train.waits(args) == (flags not in after and bool(re.search("clip|adamw|nan|accum", flags))), flags
    for sync, steps, outer in (
            ("diloco", 449, (1, 0)), ("gossip", 450, (0.9, 0.5)), ("streaming", 6000, None), ("ddp", 449, None)):
        args = train.parse([*TWO, "--sync", sync, "--steps", str(steps)])
        method = train.sync_method(args)
        assert args.outer == outer and (not outer or (method.outer.lr, method.outer.momentum) == outer), sync


def test_train_a_model_is_born_matrix_by_matrix():
    """Its numbers are those of a model that is made at once, in the dtypes that 04 keeps; the draws after it, too."""
    config, args = moe.GPTConfig(256, 16, 2, 2, 32, 4, 2), SimpleNamespace(states="int8", optimizer="forge")
    torch.manual_seed(0)
    at_once, following = moe.with_experts(base.GPT(config)), torch.rand(1)
    torch.manual_seed(0)
    with parallel.Unborn() as unborn:
        model = moe.with_experts(base.GPT(config))
    names = {id(p): name for name, p in model.named_parameters() if p.is_meta}
    assert len(names) == 2 + 2 * 5 and not model.cos.is_meta
    unborn.bear(model, names, functools.partial(train.born_dtype, args=args), CPU)
    assert torch.equal(torch.rand(1), following)
    for (name, p), (other, q) in zip(model.named_parameters(), at_once.named_parameters(), strict=True):
        narrow = p.dim() == 2 and not name.endswith("router")
        assert name == other and p.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert p.requires_grad and torch.equal(p, q.to(p.dtype))


def test_train_two_processes_equal_one(tiny):
    """Also with experts, which are spread; validation, and going on with another number. Twins that do not sum."""
    clipped, lent = ["--moe", 4, "--steps", 8, "--clip", 1], ["--moe", 4, "--steps", 8, "--accum", 2]
    one = {name: tiny(*ON_CPU, *flags, "--optimizer", "ordinary", out=name) for name, flags in (
        ("dense", ["--steps", 20]), ("clipped", clipped), ("lent", lent))}
    ddp, more = ["--sync", "ddp"], ["--resume", "--steps", 12]
    two = tiny.launch(2, {
        "two dense": (["--steps", 20, *ddp], None), "unsummed": (["--steps", 20, *ddp], "no sum over workers"),
        "two clipped": ([*clipped, *ddp], None), "two lent": ([*lent, *ddp, "--ep-policy", "llep"], None),
        "refused": (ddp, "no sum"), "alone": (["--sync", "none"], None),
        "clipped+": ([*more, *ddp], None), "lent+": ([*more, *ddp], None)})
    for name, ran in one.items():
        found = two[f"two {name}"]
        assert alike(found, ran) and found.column("val_loss") == pytest.approx(ran.column("val_loss"), rel=1e-5)
        assert found.column("max_violation") == pytest.approx(ran.column("max_violation"), abs=1e-2)
        assert {k: t.shape for k, t in found.weights.items()} == {k: t.shape for k, t in ran.weights.items()}
        assert name == "dense" or alike(tiny(*more, *ON_CPU, out=f"two {name}"), two[f"{name}+"])
    assert not alike(two["unsummed"], two["two dense"]) and (two["refused"].status, tiny.saved("refused")) == (2, [])
    assert "come to different weights" in tiny.said("refused")  # which are compared before a save
    alone, again = two["alone"], tiny(*ON_CPU, "--steps", 0, "--resume", out="alone")  # validates the first's
    assert alone.status == 0 and alone.losses[1] == pytest.approx(one["dense"].losses[1], abs=1e-5)
    assert alone.column("val_loss")[6] == pytest.approx(again.column("val_loss")[6])


def sync_states(out):
    """06's state of each process in the newest checkpoint."""
    path = train.checkpoint_files(out)[0]
    files = [path, *sorted(path.parent.glob(f"{path.stem}.worker*.pt"))]
    return [torch.load(file, weights_only=True)["sync"] for file in files]


def test_train_workers_apart(tiny):
    """The default of two processes. Streaming goes on with a fragment in flight, bit for bit; workers with all experts
    learn; any number goes on from one process's checkpoint; NaN of one stops all, and inf where nobody synchronises."""
    tiny(*ON_CPU, "--steps", 4, out="single")
    streaming, none = ["--sync", "streaming", "--inner-steps", 3, "--steps", 8], ["--sync", "none"]
    ran = tiny.launch(2, {
        "diloco": (["--inner-steps", 3, "--steps", 8, "--save-every", 5], None), "whole": (streaming, None),
        "parts": ([*streaming, "--save-every", 5], None), "moe": (["--moe", 4, "--inner-steps", 3], None),
        "master": (["--states", "master", "--inner-steps", 3], None),
        "single": (["--resume", "--inner-steps", 2, "--steps", 8], None), "skips": ([*none, "--on-nan", "skip"], "inf"),
        "inf": (none, "inf"), "nan": (["--inner-steps", 6, "--steps", 30, "--save-every", 2], "nan")})
    assert [some.status for some in ran.values()] == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    flags, (first, second) = ran["diloco"].rows[0]["flags"], sync_states(tiny.folder / "diloco")
    model = base.GPT(base.GPTConfig(256, 32, 1, 2, 32))
    low_comm.Flat([model]).theta.copy_(first["phi"])  # at the end both hold the anchor, which is the model
    assert torch.equal(first["phi"], second["phi"]) and same(ran["diloco"].weights, model.state_dict())
    method, sent = train.dataclasses.replace(low_comm.METHODS["diloco"], H=3), ran["diloco"].column("sent")
    size = low_comm.round_bytes(method, [first["phi"].shape[1]], 2)
    told = 16 + 8  # the first validation: loss and windows of one worker, to the other; and that its step is compiled
    assert (flags["sync"], flags["optimizer"], sent[2], sent[3]) == ("diloco", "forge", told, told + size)
    assert sent[8] >= 3 * size and ran["diloco"].column("blocked")[8] > 0
    tiny.drop_last("diloco")  # before it, in the middle of a round,
    first, second = sync_states(tiny.folder / "diloco")
    assert torch.equal(first["phi"], second["phi"]) and not torch.equal(first["theta"], second["theta"])
    tiny.drop_last("parts")
    again = tiny(*TWO, "--resume", "--steps", 8, out="parts")
    assert again.status == 0 and same(again.weights, ran["whole"].weights)
    val, (saved, _) = ran["moe"].column("val_loss"), train.find_checkpoint(tiny.folder / "single")
    assert [row["step"] for row in ran["single"].rows if "loss" in row] == list(range(1, 9)) and saved["workers"] == 2
    assert saved["flags"]["sync"] == "diloco" and tuple(saved["flags"]["outer"] or ()) == (1, 0) and val[6] < val[0]
    files = (tiny.folder / "master").glob("step_00000006*.pt")  # what is synchronised are the master copies
    one, two = (torch.load(f, weights_only=True)["optimizer"]["forged"]["weights"]["classifier"] for f in files)
    assert torch.equal(one["master"], two["master"]) and not torch.equal(one["m"], two["m"])
    assert "of another process it is not finite" in tiny.said("inf") and list(ran["skips"].losses) == [1, 2, 4, 5, 6]
    assert tiny.saved("nan") == [2] and "weights that are not finite" in tiny.said("nan")  # at step 4, before a save


def apart(tiny, function, *flags, workers=2, **options):
    """train.py's workers by `function`; what spawn returns."""
    args = train.parse(tiny.argv(*ON_CPU, "--gpus", workers, *flags))
    tiny.out.mkdir()
    return parallel.spawn(function, workers, "cpu", (args,), **options)


def run_and_die(args):
    if os.environ["RANK"] == "1":
        train.Optimizer.begin = at_step(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if int(os.environ["RANK"]) >= args.processes:
        wait_until(lambda: train.checkpoint_files(args.out))  # it comes too late
    train.run_rank(args)


@pytest.mark.parametrize("flags, workers", [("--sync diloco", 2), ("--sync gossip --batch 6", 3)])
def test_train_goes_on_without_a_killed_worker(tiny, monkeypatch, flags, workers):
    """The one in its place is late, and ends with the others. Of pairs, one has lost its other half, and the
    third worker does not wait for it until the transport gives up."""
    monkeypatch.setattr(parallel, "LAST_MOMENT", 2)  # seconds that the late one has left
    started, flags = time.monotonic(), [*flags.split(), "--inner-steps", 3, "--steps", 9]
    assert apart(tiny, run_and_die, *flags, workers=workers, spare=1, replace=workers == 2) == [1]
    saved, _ = train.find_checkpoint(tiny.out)
    assert saved["step"] == 9 and saved["workers"] == workers - 1 and time.monotonic() - started < train.PATIENCE


def run_and_be_replaced(args, silent=False):
    """Worker 1 is killed, or silent until the other has gone on without it, which waits for the one in its place."""
    rank, step, join, joined = os.environ["RANK"], low_comm.Sync.step, low_comm.Sync.join, Path(args.out, "joined")
    sequences, seats = train.sequences, []

    def step_or_leave(sync):
        if rank == "1" and sync.steps == 5:  # before a round
            if not silent:
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until(lambda: sync.transport.store.check([f"{sync.transport.prefix}/1/members"]))
        step(sync)
        time.sleep(0 if sync.steps < 6 or joined.exists() else 0.4)

    def join_and_say(sync):
        join(sync)
        joined.write_text(f"{sync.steps} {rank} {seats[-1]}")

    train.sequences = lambda *rest: seats.append(rest[1].seat) or sequences(*rest)
    low_comm.Sync.step, low_comm.Sync.join = step_or_leave, join_and_say
    run_and_say(args)


def run_and_be_missed(args):
    train.PATIENCE = 6
    run_and_be_replaced(args, silent=True)


@pytest.mark.parametrize("function", [run_and_be_replaced, run_and_be_missed])
def test_train_replaces_a_lost_worker(tiny, function):
    """And the new one is among those who save at the end; it trained on the share of the one that was lost."""
    assert apart(tiny, function, "--inner-steps", 3, "--steps", 150, spare=1, replace=True) == [1]
    saved, (step, *who) = train.find_checkpoint(tiny.out)[0], map(int, (tiny.out / "joined").read_text().split())
    assert (saved["step"], saved["workers"]) == (150, 2) and 4 < step < 150 and who == [2, 1]
    assert ("worker 1: the others have gone on" in tiny.said("out", 1)) == (function is run_and_be_missed)


def test_train_ends_when_a_part_of_a_worker_is_lost(tiny, monkeypatch, capsys):
    monkeypatch.setattr(train, "run_rank", run_and_die)
    flags = [*ON_CPU, "--gpus", 4, "--tp", 2, "--inner-steps", 2, "--steps", 9, "--save-every", 2]
    status, error = tiny(*flags).status, capsys.readouterr().err
    assert status == 128 + signal.SIGKILL and tiny.saved()[0] == 4
    assert re.fullmatch("train.py: process 1 was ended by signal 9; go on with: python .* --resume\n", error), error


def test_train_on_two_machines(tiny, monkeypatch, capsys):
    """Two agents of torchrun train what --gpus 2 does (where a MASTER_PORT that is taken does not matter: workers meet
    at one that the system has just given to their parent). Machines that share no directory say so."""
    torchrun, flags = importlib.import_module("torch.distributed.run").main, [*ON_CPU, "--inner-steps", 3]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        one = tiny(*flags, "--gpus", 2, out="one")
    said, words = tiny.folder / "said", "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --local-addr 127.0.0.1"
    argv = [*words.split(), "--rdzv-endpoint", f"127.0.0.1:{port}", "--redirects", "3", "--log-dir", str(said), "--",
            str(ROOT / "train.py"), *tiny.argv(*flags, out="two")]
    context = torch.multiprocessing.get_context("forkserver")  # which has torch already
    agents = [context.Process(target=torchrun, args=(argv,), daemon=True) for _ in range(2)]
    try:
        for agent in agents:
            agent.start()
        for agent, seconds in zip(agents, (150, 30), strict=True):
            agent.join(seconds)
    finally:
        for agent in agents:
            agent.terminate()  # it ends its process, too
    output = [file.read_text(errors="replace") for file in said.glob("*/*/0/std*.log")]
    assert [agent.exitcode for agent in agents] == [0, 0], output
    two, left, right = tiny.ran("two", 0), *({f.name for f in (tiny.folder / out).iterdir()} for out in ("one", "two"))
    assert one.status == 0 and two.losses == one.losses and same(two.weights, one.weights) and left == right
    assert len(two.rows) == len(one.rows) and sum("2 processes" in words for words in output) == 1  # one speaks
    for name, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "join_group", lambda device: None)
    monkeypatch.setattr(train.World, "smallest", lambda world, seen: seen - 1)  # another does not see it
    ran, error = tiny(*ON_CPU), capsys.readouterr().err
    assert ran.status == 2 and not ran.rows and "name one that all of them share" in error and error.count("\n") == 1


def run_and_kill_all(args):
    if os.environ["RANK"] == "1":
        train.Optimizer.begin = at_step(int(os.environ["KILLED_IN"]), lambda: os.killpg(0, signal.SIGKILL))
    train.run_rank(args)


def killed_in(step, argv):
    """train.py in a session of its own, which gets SIGKILL in the middle of that step."""
    os.setsid()
    os.environ["KILLED_IN"] = str(step)
    train.Optimizer.begin = at_step(step, lambda: os.killpg(0, signal.SIGKILL))
    train.run_rank = run_and_kill_all
    train.main(argv)


@pytest.mark.parametrize("flags, forgets", [
    ("--optimizer forge", (forging.Forge, "load_state_dict", lambda self, state: None)),
    ("--optimizer ordinary", (torch.optim.AdamW, "load_state_dict", lambda *_: None)),
    ("--device cpu --gpus 2 --inner-steps 3", None)], ids=["forge", "ordinary", "two workers"])
def test_train_killed_resumes_bitwise(tiny, monkeypatch, flags, forgets):
    """SIGKILL at a random step, to both workers and their parent, with half of a row and checkpoint: the resumed run
    ends with the weights and rows of one that was never touched. In the twin it forgets the optimizer's moments."""
    flags, killed = [*flags.split(), "--steps", 24, *EXACT], tiny.folder / "killed"
    step, whole = random.randrange(5, 24), tiny(*flags, out="whole")
    process = torch.multiprocessing.get_context("forkserver").Process(
        target=killed_in, args=(step, tiny.argv(*flags, "--save-every", 1, out="killed")))
    process.start()
    process.join(200)
    saved = tiny.saved("killed")
    assert process.exitcode == -signal.SIGKILL and saved[0] in (step - 1, step - 2), f"killed in step {step}"
    with (tiny.folder / "killed.jsonl").open("a") as log:
        log.write('{"step": 9')
    raw(killed / "step_00000099.pt.1.tmp", b"of the process that was killed")
    tiny.copy("killed", "twin")
    again = tiny("--resume", *flags, out="killed")
    assert again.status == 0 and again.losses == whole.losses and same(again.weights, whole.weights)
    assert not list(killed.glob("*.tmp"))
    if forgets:
        monkeypatch.setattr(*forgets)
        tiny.drop_last("twin")
        twin = tiny("--resume", *flags, out="twin")
        assert alike(twin, whole, 99, 99) and not same(twin.weights, whole.weights)
        assert sum("loss" in row for row in twin.rows) == 24  # old rows of a step that is repeated are gone


@pytest.mark.parametrize("flags", [
    "--states master", "--states int8 --rule adam-mini", "--states int8 --clip 0.5 --accum 2",
    "--moe 4 --balance bias --on-nan skip", "--rule adam-mini --accum 2", "--sync sparseloco --states master",
    "--sync gossip --optimizer ordinary", "--sync co2 --states int8"])
def test_train_checkpoint_has_all(tiny, monkeypatch, flags):
    """Bitwise from step 4 of 8, with any optimizer, and in the middle of a round. In the twin the sync starts anew."""
    flags = [*flags.split(), "--steps", 8, "--save-every", 4, *EXACT, *["--inner-steps", 3] * ("sync" in flags)]
    whole, load = tiny(*flags), low_comm.Sync.load_state_dict
    tiny.drop_last()
    tiny.copy("out", "twin")
    again = tiny("--resume", "--steps", 8, *EXACT)
    assert again.status == 0 and same(again.weights, whole.weights) and again.losses == whole.losses
    if "--sync" in flags:
        monkeypatch.setattr(low_comm.Sync, "load_state_dict", lambda sync, saved: load(sync, saved) or sync.restart(4))
        twin = tiny("--resume", "--steps", 8, *EXACT, out="twin")
        assert alike(twin, whole, 99, 99) and not same(twin.weights, whole.weights)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_train_stopped_saves_and_says_how_to_go_on(tiny, monkeypatch, capsys, number):
    """One process finishes its step; a second Ctrl-C ends it at once. Two, whom their parent tells, finish a round, and
    have a state each."""
    log, over, again = tiny.folder / "two.jsonl", threading.Event(), ["--resume", "--steps"]
    previous = {some: signal.signal(some, signal.SIG_IGN) for some in (signal.SIGINT, signal.SIGTERM)}  # as after `&`

    def stop_the_parent():
        wait_until(lambda: over.is_set() or log.exists() and '"step": 2, "loss"' in log.read_text())
        if not over.is_set():
            os.kill(os.getpid(), number)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(train.Optimizer, "begin", at_step(5, lambda: signal.raise_signal(number)))
            status = [tiny("--save-every", 2, *EXACT).status]
            assert signal.getsignal(number) == signal.SIG_IGN  # as it was
            patch.setattr(train.Optimizer, "begin", at_step(5, lambda: signal.raise_signal(signal.SIGINT)))
            status += [tiny(out="twice").status] if number == signal.SIGINT else [130]
        monkeypatch.setattr(train, "run_rank", run_and_say)
        threading.Thread(target=stop_the_parent).start()
        status += [tiny(*TWO, "--inner-steps", 4, "--steps", 10**5, out="two").status]
    except SystemExit as left:  # SIGTERM's
        status += [left.code]
    finally:
        over.set()
        for some, handler in previous.items():
            signal.signal(some, handler)
    assert status == [128 + number, 130, 128 + number] and tiny.saved() == [5, 4] and not tiny.saved("twice")
    words = shlex.split(re.search("stopped after step 5; go on with: python (.*)", capsys.readouterr().out)[1])
    assert words[0].endswith("train.py") and words[-1] == "--resume" and train.main(words[1:]) == 0
    assert same(tiny.ran("out", 0).weights, tiny(*EXACT, out="whole").weights)
    step = tiny.saved("two")[0]
    assert step % 4 == 0 and f"stopped after step {step}; go on with" in tiny.said("two")
    assert tiny.said("two").count("stopping after the next round") <= 1  # none if the round tells it first
    assert tiny(*again, step + 2, *ON_CPU, out="two").status == 2 and "use --gpus 2" in capsys.readouterr().err
    assert tiny(*again, step + 2, *TWO, out="two").status == 0
    with pytest.raises(base.BadInput, match="use --gpus 2"):  # also where nothing is left to do
        train.parse(tiny.argv(*again, step + 2, *ON_CPU, "--gpus", 4, out="two"))


def test_train_damaged_checkpoint_falls_back_to_the_older(tiny, capsys):
    """Cut short; one byte is another; the second worker's file is cut, or missing."""
    whole = tiny("--save-every", 3)
    newest, older = train.checkpoint_files(tiny.out)
    content, second = newest.read_bytes(), train.worker_file(newest, 1)
    place = content.index(whole.weights["classifier"].numpy().tobytes())
    other = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    torch.save(torch.load(newest, weights_only=True) | dict(workers=2, sync={}), newest)
    pair = newest.read_bytes()
    for first, its in ((content[:-100], b""), (other, b""), (pair, content[:-100]), (pair, None)):
        newest.write_bytes(first)
        second.unlink(missing_ok=True) if its is None else second.write_bytes(its)
        assert train.find_checkpoint(tiny.out)[1] == older
        assert re.fullmatch(".*_00000006.pt: damaged .*: trying the one before it\n", capsys.readouterr().err)
    second.write_bytes(content)
    assert train.find_checkpoint(tiny.out)[1] == newest
    newest.write_bytes(other)
    raw(tiny.out / "step_00000099.pt", b"{")  # newer, and damaged: it is not one of the two to keep
    assert train.main(tiny.argv("--resume", "--save-every", 1, *EXACT)) == 0 and tiny.saved() == [6, 5]
    ran = tiny.ran("out", 0)
    assert same(ran.weights, whole.weights) and list(ran.losses) == [1, 2, 3, 4, 5, 6]
    for file in train.checkpoint_files(tiny.out):
        file.write_text("{")
    assert train.main(tiny.argv("--resume")) == 2 and "no checkpoint is whole" in capsys.readouterr().err


def test_train_checkpoint_beside_a_gpu_is_named_later(tiny, monkeypatch):
    run, slow = build_run(tiny.text, "--out", tiny.out), threading.Event()
    tiny.out.mkdir()
    run.device = torch.device("meta")  # as if it were a GPU
    with monkeypatch.context() as patch:  # a slow disk
        patch.setattr(train, "write", lambda *args, write=train.write: slow.wait() and write(*args))
        train.save(run, 3, now=False)
    train.commit(run, wait=False)
    slow.set()
    run.pending.writing.result()
    assert not tiny.saved() and run.saved is None and len(list(tiny.out.iterdir())) == 1
    train.commit(run, wait=False)
    assert tiny.saved() == [3] and run.saved == 3 and len(list(tiny.out.iterdir())) == 1


def test_train_something_else_is_refused(tiny, capsys):
    """A checkpoint of another optimizer, model, data or version, a log of another program: one line, and all stays."""
    tiny("--states", "master")
    files, log = sorted(tiny.out.iterdir()), tiny.folder / "out.jsonl"
    other = raw(tiny.folder / "other.txt", b"spam " * 9999)

    def refused(flags, said):
        assert train.main(tiny.argv(*flags.split())) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and sorted(tiny.out.iterdir()) == files, error

    for flags, said in (("--states int8", "--states int8: the checkpoint has master"),
                        ("--optimizer ordinary", "the checkpoint has forge"), ("--rule adamw", "checkpoint has muon"),
                        ("--loss reference", "--optimizer forge with --loss reference"),
                        ("--layers 2", "--layers 2: the checkpoint has 1"), ("--top-k 1", "the checkpoint has None"),
                        (f"--data {other} --steps 9", "the checkpoint was trained on")):
        refused(f"--resume {flags}", said)
    for content, flags in (('{"step": 1}\nmine\n', "--resume --steps 9"), ("mine\n", ""), ("mine", "")):
        log.write_text(content)
        refused(flags, "holds other rows")
        assert log.read_text() == content
    torch.save(torch.load(files[-1], weights_only=True) | dict(format=base.GPT_FORMAT - 1), files[-1])
    refused("--resume --steps 9", "another version")


def test_train_runs_in_one_directory(tiny, monkeypatch, capsys):
    """One at a time; a fresh one moves the earlier one's files aside; --offload removes its own, and a killed run's."""
    found, theirs, close = [], tiny.out / "offload.0", parallel.Offload.close
    monkeypatch.setattr(parallel.Offload, "close", lambda self: close(self) or found.append(self.folder))
    theirs.mkdir(parents=True)
    raw(theirs / "7.7.7.saved", b"of a run that was killed")
    first = tiny("--offload", *ON_CPU)
    assert first.status == 0 and found == [theirs] * 6 and not theirs.exists()
    with train.locked(tiny.out):
        theirs.mkdir()  # of a run at work
        assert tiny().status == 2 and "another run is writing there" in capsys.readouterr().err
        assert tiny("--dry-run", "--offload", *ON_CPU).status == 0 and theirs.exists()
    mine, theirs = raw(tiny.out / "mine.txt", b"not a checkpoint"), raw(tiny.out / "log.jsonl", b"")
    second = tiny("--seed", 1, "--log", tiny.folder / "out.jsonl", out="out/")
    rows = (tiny.folder / "out.1" / "out.jsonl").read_text()
    assert "kept the earlier run" in capsys.readouterr().out and mine.exists() and not theirs.exists()
    assert [json.loads(row) for row in rows.splitlines()] == first.rows
    assert same(tiny.ran("out.1", 0).weights, first.weights) and not same(second.weights, first.weights)


@pytest.mark.parametrize("event", ["full disk", "shorter", "other", "touched"])
def test_train_disk_fails_or_data_changes(tiny, text, monkeypatch, capsys, event):
    """Where files may not grow any more, or data is another or less, a run ends with one line, leaves no half of a
    checkpoint, and goes on from the one before to the weights of one that was not disturbed."""
    resource, mine = pytest.importorskip("resource"), raw(tiny.folder / "mine.txt", text.read_bytes())
    flags, limits = ["--data", mine, "--save-every", 2, *EXACT], resource.getrlimit(resource.RLIMIT_FSIZE)

    def meddle():
        if event == "full disk":
            return resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        if event == "shorter":
            os.truncate(mine, 1000)
        with mine.open("r+b") as file:
            file.write(b"#" if event == "other" else text.read_bytes()[:1])
        return os.utime(mine, (1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(train.Optimizer, "begin", at_step(5, meddle))
        try:
            status = train.main(tiny.argv(*flags))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said, error = "mine.txt: was changed while it was trained on", capsys.readouterr().err
    if event == "full disk":
        said = r"step 6 could not be saved \(.*\), the last one is of step 4: make room, and go on with .* --resume"
    if event != "touched":  # a new date alone does not matter
        assert status == 2 and re.fullmatch(f"train.py: .*{said}.*\n", error), error
        assert tiny.saved() == [4, 2] and not list(tiny.out.glob("*.tmp"))
        raw(mine, text.read_bytes())
        status = train.main(tiny.argv("--resume", *flags))
    assert status == 0 and same(tiny.ran("out", 0).weights, tiny(*flags, out="whole").weights)


@pytest.mark.parametrize("optimizer", ["forge", "ordinary"])
def test_train_micro_batch_of_nan_stops_or_is_skipped(tiny, monkeypatch, capsys, optimizer):
    """stop: the last checkpoint is good. skip: a bad step changes nothing, and those after it are taken; the sixth in a
    row ends the run all the same."""
    real, seen, bad = train.loss_sum, [], ()

    def poisoned(model, *rest):
        seen.extend([{k: v.clone() for k, v in model.state_dict().items()}] * torch.is_grad_enabled())
        return real(model, *rest) * (np.nan if len(seen) in bad else 1)

    def run(*flags, out):
        seen.clear()
        return tiny("--optimizer", optimizer, *flags, out=out), capsys.readouterr().out

    monkeypatch.setattr(train, "loss_sum", poisoned)
    flags, bad = ["--clip", 1, "--accum", 2, "--save-every", 1], [7]  # the first half of step 4
    ran, said = run(*flags, out="stop")
    assert ran.status == 1 and "step 4: loss nan" in said and "last good checkpoint is step 3" in said
    assert same(seen[6], ran.weights)
    ran, said = run(*flags, "--on-nan", "skip", out="skip")
    assert ran.status == 0 and "step 4: loss nan, gradient norm nan: skipped" in said
    assert list(ran.losses) == [1, 2, 3, 5, 6] and same(seen[6], seen[8]) and not same(seen[8], seen[10])
    bad = range(7, 99)
    ran, said = run(*flags, "--on-nan", "skip", "--steps", 12, out="long")
    assert ran.status == 1 and "step 8: loss nan, gradient norm nan: skipped" in said and same(seen[6], ran.weights)
    assert "step 9: loss nan" in said and "step 10" not in said
    bad = [2, 4, 5, 6, 7, 8]
    ran, said = run("--on-nan", "skip", "--steps", 9, out="unclipped")
    assert ran.status == 0 and list(ran.losses) == [1, 3, 9] and same(seen[3], seen[8]) and not same(seen[2], seen[3])


@pytest.mark.parametrize("share", [1e33, 3e40])
def test_train_diverges_and_keeps_the_last_checkpoint(tiny, capsys, monkeypatch, share):
    """At rates at which the next loss is not finite, or weights after a finite loss. A step left out moves no bias."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "schedule", lambda step, args: share if step == 4 else 1)
        ran = tiny("--save-every", 1 if share > 1e38 else 2)
    assert ran.status == 1 and "last good checkpoint is step 4" in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in ran.weights.values())
    monkeypatch.setattr(train, "loss_sum", lambda *args, real=train.loss_sum: real(*args) * np.nan)
    ran = tiny(*"--moe 4 --balance bias --on-nan skip --steps 2 --save-every 1".split(), out="bias")
    biases = [tensor for name, tensor in ran.weights.items() if name.endswith("bias")]
    assert biases and not any(bias.any() for bias in biases)


def test_train_sample_is_of_few_shapes(monkeypatch):
    """The likeliest token after each prefix, found without padding, before and beyond the longest context (80);
    with a vocabulary of more than bytes."""
    torch.manual_seed(0)
    model, prompt = base.GPT(base.GPTConfig(300, 80, 2, 2, 32)).to(DEVICE), list(range(60))
    for p in model.parameters():
        p.data.normal_(std=0.2)  # so that no two tokens are alike
    want, args, shapes = list(prompt), SimpleNamespace(seed=0, dtype="fp32", ep_policy=None, tokens="bytes"), set()
    with torch.no_grad():
        for _ in range(30):
            E = model(torch.tensor([want[-80:]], device=DEVICE))[0, -1]
            want.append((model.classifier[:256] @ E).argmax().item())
    model.register_forward_pre_hook(lambda module, inputs: shapes.add(tuple(inputs[0].shape)))
    for temperature, top in ((1e-6, 64), (9.0, 1)):
        monkeypatch.setattr(train, "SAMPLE", dict(tokens=30, temperature=temperature, top=top))
        assert train.generate(model, prompt, args, DEVICE) == want
    assert len(set(want[60:])) > 5 and shapes == {(1, 64), (1, 80)}


def test_train_samples_alone_and_tries(tiny, capsys, monkeypatch):
    """--steps 0 --resume validates, samples, and trains nothing; --dry-run writes nothing."""
    monkeypatch.setattr(train, "SAMPLE", train.SAMPLE | dict(tokens=20))
    log, whole, texts = raw(tiny.folder / "dry.jsonl", b"mine"), tiny(), []
    for _ in range(2):
        capsys.readouterr()
        ran, said = tiny("--steps", 0, "--resume", "--sample", "import "), capsys.readouterr().out
        texts.append(said.partition("\nsample")[2])
        assert ran.status == 0 and same(ran.weights, whole.weights) and tiny.saved() == [6]
        assert f"validation loss {whole.column('val_loss')[6]:.4f}" in said and "\nimport " in texts[-1]
    assert texts[0] == texts[1] and tiny("--steps", 0, "--sample", "a").status == 0
    assert "from random weights" in capsys.readouterr().out and tiny.saved() == [6]  # nothing is moved aside
    status, said = train.main(tiny.argv("--dry-run", "--steps", 2, out="dry")), capsys.readouterr().out
    assert status == 0 and not (tiny.folder / "dry").exists() and log.read_text() == "mine"
    assert "tokens/s" in said and "2 steps in" in said and "validation loss" not in said
    names = [line.split()[0] for line in said.splitlines()[-7:]]
    assert names == ["MiB", "parameters", "gradients", "optimizer", "activations", "loss", "peak"], said
    assert tiny("--dry-run", "--resume").status == 0 and "step 12/12" in capsys.readouterr().out
    assert tiny.saved() == [6]


def test_train_what_fits_a_card_and_what_to_type(capsys, monkeypatch):
    """Predictions grow with the batch, and less frugal flags fit fewer sequences; what is to be typed can be. A batch
    that was not asked for is a power of two for each process."""
    assert train.main(["--fit", "24"]) == 0
    lines, cuda = capsys.readouterr().out.splitlines(), torch.device("cuda")
    rows = [line.split() for line in lines if line.startswith("7b ")]
    assert [row[-2] for row in rows][:2] == ["none", "none"] and 1 <= int(rows[3][-2]) <= int(rows[4][-2])
    words = shlex.split(next(line for line in lines if line.startswith("type:")))
    args = train.parse(["--fit", "24", *words[words.index("python") + 2 :]])
    assert args.preset == "7b" and args.recompute and args.batch == int(rows[3][-2])
    peak = functools.partial(train.predict_memory, train.make_config(args), args=args, device=cuda)
    assert peak(args.batch)[1] <= 0.98 * 23 * 2**30 < peak(args.batch + 1)[1]
    for flags, said in (("--preset 7b", "nothing fits"), ("--dry-run --device cpu --preset 7b", "one sequence takes"),
                        ("--dry-run --device cpu --preset cpu --batch 32", "--fit 0.1: out of memory, tensors took")):
        assert train.main(["--fit", "0.1", *flags.split()]) == 2 and said in capsys.readouterr().err
    for free, batch in ((2**50, 128), (peak(4)[1] / 0.85 + 1, 8), (peak(4)[1] / 0.85 - 1, 4)):
        monkeypatch.setattr(base, "free_memory", lambda device, free=free: free)
        args.batch, args.fit, args.workers = None, None, 2
        train.choose_batch(train.make_config(args), SimpleNamespace(size=2, smallest=int), args, cuda)
        assert args.batch == batch


def shard(path, tokens, magic=20240520, version=1, dtype="<u2", promised=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if promised is None else promised
    return raw(path, header.tobytes() + np.asarray(tokens, dtype).tobytes())


def test_train_data_formats_hold_the_same_tokens(tmp_path):
    tokens, d = np.random.default_rng(0).integers(1, 200, 1000), tmp_path
    files = [raw(d / "raw.bin", tokens.astype("<u2").tobytes()), raw(d / "plain.txt", tokens.astype("u1").tobytes()),
             shard(d / "a.bin", tokens), shard(d / "b.bin", tokens, 20240801, 7, "<u4")]
    for file, size in zip(files, (50304, 256, 50304, 128256), strict=True):
        assert np.array_equal(train.open_shard(file, "bytes"), tokens), file.name
        assert train.parse([*ON_CPU, "--data", str(file)]).vocab == size
    assert np.array_equal(train.open_shard(raw(d / "c.bin", files[0].read_bytes()[:800]), "bytes"), tokens[:400])
    assert np.array_equal(train.open_shard(shard(d / "d.bin", tokens, promised=900), "bytes"), tokens[:900])
    assert np.array_equal(train.open_shard(files[1], "bigrams"), tokens[::2] + 256 * tokens[1::2])
    for kind, words in (("bigrams", "\nodd"), ("bytes", "\u00e9ven")):
        assert train.decode(train.encode(words.strip(), kind), kind) == words
    parts = [np.arange(100, 135), np.arange(99, 109), np.arange(200, 221)]  # windows: three, none, two
    data = train.Tokens(["a", "b", "c"], parts, 10, 256)
    x, y = data.windows(range(len(data)))
    assert x.tolist() == [list(range(s, s + 10)) for s in (100, 110, 120, 200, 210)] and torch.equal(y, x + 1)
    order = data.shuffled(range(40), seed=3)
    epochs = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and len(set(epochs)) > 4
    assert order != data.shuffled(range(40), seed=4) and order[3:8] == data.shuffled(range(3, 8), seed=3)
    data.vocab = 220
    with pytest.raises(base.BadInput, match="c: token 220 is outside the vocabulary of 220: pass --vocab 221"):
        data.windows([4])


def test_train_holds_out_what_it_validates_on(tiny, monkeypatch, capsys):
    """A hundredth, the longest shard's tail in whole windows; with --val nothing; the corpus' own files. Other data has
    another hash. A run on shards is without bits a byte; of pairs of bytes a token is two."""
    files = shard(tiny.folder / "a.bin", range(3000)), shard(tiny.folder / "b.bin", range(3000, 10000))
    flags = ["--vocab", "10000", "--data", str(tiny.folder / "*.bin")]
    load = lambda *flags: train.load_data(train.parse([*TINY, *ON_CPU, *flags]))  # noqa: E731
    data, with_val = load(*flags), load(*flags, "--val", str(files[0]))
    assert [s.tolist() for s in data.train.shards] == [list(range(3000)), list(range(3000, 9903))]
    assert data.val.shards[0].tolist() == list(range(9903, 10000)) and len(data.val) == 3
    seen = [set(part.windows(range(len(part)))[1].flatten().tolist()) for part in (data.train, data.val)]
    assert len(seen[0]) > 9800 and not seen[0] & seen[1] and data.bytes_per_token is None
    assert [list(map(len, part.shards)) for part in (with_val.train, with_val.val)] == [[3000, 7000], [3000]]
    monkeypatch.setattr(gfs, "corpus", functools.partial(gfs.corpus, limit=2 * base.MIB))
    data = load()
    trained, held = (part.shards[0].tobytes() for part in (data.train, data.val))
    lines = [line for line in held.split(b"\n") if len(line) > 60]
    assert len(trained) > 9 * len(held) and len(lines) > 50 and sum(line in trained for line in lines) < len(lines) / 5
    zeros = np.zeros(5 * base.MIB, "u1")
    known = {train.fingerprint([some]) for some in (zeros, zeros[1:], zeros.view("<u2"))}
    for place in (0, len(zeros) // 2, len(zeros) - 1):
        known.add(train.fingerprint([np.where(np.arange(len(zeros)) == place, np.uint8(1), zeros)]))
    assert len(known) == 6
    ran, pairs = tiny(*flags), tiny("--tokens", "bigrams", "--steps", 2, out="bigrams")
    assert ran.status == 0 and "bpb" not in ran.rows[2] and abs(ran.column("val_loss")[0] - np.log(10000)) < 0.3
    assert pairs.rows[0]["flags"]["vocab"] == 2**16
    assert pairs.column("bpb")[1] == pytest.approx(pairs.losses[1] / (2 * math.log(2)))


BAD_DATA = {
    "unknown: use 20240520": lambda d: shard(d / "x.bin", range(500), magic=20250101),
    "magic 20240520 version 3 is unknown": lambda d: shard(d / "x.bin", range(500), version=3),
    "600 bytes with a count of 500": lambda d: os.truncate(shard(d / "x.bin", range(500)), 600) or d / "x.bin",
    "with a count of -1 are no whole header": lambda d: shard(d / "x.bin", range(500), promised=-1),
    "promises 501 tokens": lambda d: shard(d / "x.bin", range(500), promised=501),
    "token 400 is outside the vocabulary of 400: pass --vocab 401": lambda d: shard(d / "x.bin", [*range(401)] * 2),
    "pass more data or a smaller --seq": lambda d: shard(d / "x.bin", range(20)),
    "the training part has at most 0 tokens": lambda d: raw(d / "x.txt", b""),
    "no such file": lambda d: d / "missing.bin", "no whole number of uint16": lambda d: raw(d / "x.bin", b"abc"),
    "unknown kind of file": lambda d: raw(d / "x.csv", b"1,2"),
    "files of several kinds": lambda d: raw(raw(d / "x.txt", b"ab" * 99).with_suffix(".bin"), b"ab").with_name("x.*"),
}
BAD_FLAGS = {
    "--fit is about GPUs": "--fit 24", "must be a multiple of 1 processes x 3": "--accum 3",
    "must be a multiple of 3 processes": "--gpus 3",
    "--seed -1: must not be negative": "--seed -1", "drop the flag": "--tokens bytes --data tokens.bin",
    "a token is outside the vocabulary of 100": "--vocab 100 --sample ~", "decoder": "--data tokens.bin --sample x",
    "dim must be a multiple of 2 * heads": "--heads 5", "--batch 0: must be at least 1": "--batch 0",
    "--gpus 0: must be at least 1": "--gpus 0", "--lr -1.0: must not be negative": "--lr -1",
    "--batch 100000000000: takes": "--batch 100000000000", "no checkpoint to resume from": "--resume",
    "with --sync none there are no rounds": "--inner-steps 3", "--top-k 1: there are no experts": "--top-k 1",
    "--moe -1: use 0 (none)": "--moe -1", "cannot go to more experts": "--moe 4 --top-k 5",
    "every process has all experts": "--moe 4 --ep-policy llep", "but this machine has": "--gpus 99 --device cuda",
    "use a multiple of 2": "--moe 5 --gpus 2 --sync ddp --batch 8", "would be nothing to see": "--dry-run --steps 0",
    "--sync streaming needs at least 3": "--sync streaming --inner-steps 2",
    "--fit -1.0: use the GiB of a card, above 0": "--fit -1", "it is for a new run": "--fit 24 --resume",
    "a process has whole heads: use --tp 2": "--tp 4", "use --vocab 258": "--tp 2 --vocab 257",
    "a worker is 2 of them: use --gpus 4": "--tp 2 --gpus 3",
    "use a --dim that 256 divides": "--tp 2 --states int8 --dim 64",
    "and 2 worker(s): use --sync diloco or ddp": "--tp 2 --gpus 4 --sync none",
    "and 1 worker(s): use --sync none": "--tp 2 --sync diloco", "invalid choice": "--rule sgd",
    "must be a multiple of 3 workers": "--tp 2 --gpus 6 --sync ddp", "is of another kind": "--val tokens.bin",
    "validation has 1 window(s)": "--data small.txt --gpus 2 --sync ddp --moe 4", "arguments: --plan": "--plan 1",
}


@pytest.mark.parametrize("message", [*BAD_DATA, *BAD_FLAGS])
def test_train_bad_input_is_one_clear_line(tiny, capsys, monkeypatch, message):
    """And nothing is written, let alone trained: a batch of 10^11 would take all memory."""
    monkeypatch.setattr(train, "train", lambda *_: 0)
    files = {name: raw(tiny.folder / name, b"abcdefgh " * 100) for name in ("tokens.bin", "small.txt")}
    words = BAD_FLAGS.get(message, "").split() or ["--vocab", 400, "--data", BAD_DATA[message](tiny.folder)]
    try:
        status = train.main(tiny.argv(*ON_CPU, *(files.get(word, word) for word in words)))
    except SystemExit as left:  # argparse
        status = left.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1, error
    assert not tiny.saved() and not (tiny.folder / "out.jsonl").exists()


def test_train_only_bad_input_is_one_line(capsys, monkeypatch):
    """Any other error is a mistake in the code, and keeps its traceback."""

    def fail(error):
        raise error

    for error, said in ((base.BadInput("use another"), "use another\n"), (OSError("full"), "full\n"),
                        (RuntimeError("can't allocate memory: 9 TB"), "out of memory: use a smaller --batch"),
                        (ValueError("a bug"), ""), (RuntimeError("a bug"), "")):
        with contextlib.nullcontext() if said else pytest.raises(type(error), match="a bug"):
            assert train.guarded(fail, error) == 2 and capsys.readouterr().err.startswith(f"train.py: {said}")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for flags, said in ((["--gpus", "2"], "drop --gpus"), (["--val", "x.txt"], "--val: goes with --data")):
        assert train.main([*ON_CPU, *flags]) == 2 and said in capsys.readouterr().err


FEATURES = {
    "adamw": dict(rule="adamw"), "mini": dict(rule="adam-mini"), "accum": dict(accum=2), "clip": dict(clip=0.5),
    "forge": dict(optimizer="forge"), "states": dict(states="master"), "ddp": dict(sync="ddp"),
    "diloco": dict(sync="diloco", inner_steps=1), "noloco": dict(sync="noloco", inner_steps=1), "tp": dict(tp=2),
    "moe": dict(moe=4), "ep": dict(moe=4, ep_policy="llep"), "bias": dict(moe=4, balance="bias"),
    "recompute": dict(recompute=True), "offload": dict(offload=True), "cce": dict(loss="cce"),
    "reference": dict(loss="reference"),
}
REFUSED = {  # what is said: pairs. All others work, or are the same flag twice.
    "sums gradients that forge never makes: use --sync diloco": "forge-ddp states-ddp forge-ep states-ep",
    "experts would not be cut": "tp-moe tp-ep tp-bias", "every process has all experts": "diloco-ep noloco-ep",
    "biases would go their own way: use --balance": "diloco-bias noloco-bias",
    "use --loss cce-exact": "tp-cce tp-reference", "use --optimizer ordinary": "forge-reference",
    "goes with --optimizer forge": "states-reference",
}
BROKEN = {"a part's norm": dict(tp=2, clip=0.5), "a norm of copies": dict(tp=2, clip=0.5),
          "no sum in backward": dict(tp=2, recompute=True), "no sum over workers": dict(tp=2, sync="ddp")}
OTHERS = {method: dict(sync=method, inner_steps=3, tp=2)
          for method in ("gossip", "streaming", "sparseloco", "bagua-c-lp-s", "co2")}


def merged(one, other):
    """Flags of two features, or None of the same flag twice. Experts can be spread where gradients are summed."""
    both = FEATURES[one] | FEATURES[other]
    if both == FEATURES[other] or any(both[flag] != value for flag, value in FEATURES[one].items()):
        return None
    return dict(sync="ddp") | both if "ep_policy" in both else both


def plain(flags):
    """Flags of the run that must have the same losses: all that backward needs is kept, of the whole batch (not where
    experts' balance is over the micro-batches so far, or workers apart share them out); matrices are whole, and stepped
    after backward; where workers sum gradients there is one."""
    gone = {"tp", "recompute", "offload", "loss", *(() if "moe" in flags or "inner_steps" in flags else ("accum",))}
    gone |= {"sync", "ep_policy"} if flags.get("sync") == "ddp" else set()
    rest = {flag: value for flag, value in flags.items() if flag not in gone}
    return rest | dict(optimizer="forge" if "states" in flags else "ordinary")


def processes(flags):
    return (2 if "sync" in flags else 1) * flags.get("tp", 1)


def typed(flags):
    words = [(f"--{flag.replace('_', '-')}", str(value)) for flag, value in sorted(flags.items())]
    return " ".join(word for pair in words for word in pair if word != "True")


PAIRS = {f"{one}-{two}": merged(one, two) for one, two in itertools.combinations(FEATURES, 2) if merged(one, two)}
NO_PAIRS = {pair: said for said, pairs in REFUSED.items() for pair in pairs.split()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_train_two_features_compose(tiny, count):
    """What only changes where things are, when, or who computes them leaves losses and norms as they were. So do cut
    workers with other methods: each process sends its part; what compresses does so in other blocks. With twins."""
    some = {name: flags for name, flags in (PAIRS | BROKEN | OTHERS).items() if processes(flags) == count}
    some = {name: flags for name, flags in some.items() if name not in NO_PAIRS}
    runs, ran = {}, {}
    for flags, bug in [*((flags, None) for pair in some.values() for flags in (plain(pair), pair)),
                       *((some[bug], bug) for bug in BROKEN if bug in some)]:
        words = ["--seq", 16, "--steps", 2, *typed(flags).split()]
        runs.setdefault(processes(flags), {})[f"{typed(flags)} {bug}"] = words, bug
    for number, asked in runs.items():
        ran |= tiny.launch(number, asked)
    for name, flags in some.items():
        found, expected = ran[f"{typed(flags)} None"], ran[f"{typed(plain(flags))} None"]
        assert alike(found, expected, 1e-5, 2e-3 if "states" in flags else 2e-5), (name, found.rows, expected.rows)
        assert found.column("val_loss") == pytest.approx(expected.column("val_loss"), abs=2e-3), name
        assert name not in BROKEN or not alike(ran[f"{typed(flags)} {name}"], found, 99, 2e-5), name


def test_train_two_features_are_refused(tiny):
    for pair, said in NO_PAIRS.items():
        with pytest.raises(base.BadInput, match=said):
            train.parse(tiny.argv(*typed(PAIRS[pair]).split(), *ON_CPU, "--gpus", processes(PAIRS[pair])))


@pytest.mark.parametrize("flags", ["--dim 256 --states int8 --rule adam-mini --clip 0", "--optimizer ordinary"])
def test_train_cut_runs_go_on_uncut_and_the_other_way(tiny, monkeypatch, flags):
    """A checkpoint is of the whole model, with the whole optimizer's state. The twin drops that state."""
    flags, tp = [*flags.split(), "--save-every", 3], ["--tp", 2]
    whole, _ = tiny(*ON_CPU, *flags, out="whole"), tiny.launch(2, {"parts": ([*tp, *flags], None)})
    tiny.drop_last("whole")
    tiny.drop_last("parts")
    tiny.copy("parts", "twin")
    flags = ["--resume", *flags]
    assert alike(tiny.launch(2, {"whole": ([*flags, *tp], None)})["whole"], whole, 2e-5, 1e-3)
    assert alike(tiny(*ON_CPU, *flags, out="parts"), whole, 2e-5, 1e-3)
    monkeypatch.setattr(train.Optimizer, "load_state_dict", lambda self, saved, whole: None)
    assert not alike(tiny(*ON_CPU, *flags, out="twin"), whole, 2e-5, 99)


def test_train_cut_workers_resume_in_the_middle_of_a_round(tiny, capsys):
    """Bit for bit, with a file for each process; norms are the same in all processes of a worker; one can look."""
    flags = ["--tp", 2, "--inner-steps", 3, "--steps", 5, "--save-every", 4]
    whole = tiny.launch(4, {"whole": (flags, None)})["whole"]
    shutil.copytree(tiny.folder / "whole", tiny.folder / "parts")
    tiny.drop_last("parts")
    one, its_part, other, _ = (state["theta"] for state in sync_states(tiny.folder / "parts"))
    norms = sum(t.numel() for t in whole.weights.values() if t.dim() == 1)
    assert norms == 3 * 32 and ((one == its_part) & (one != other)).sum() > 0.9 * norms
    parts = tiny.launch(4, {"parts": (["--resume", *flags], None)})["parts"]
    assert parts.status == 0 and same(parts.weights, whole.weights)
    assert tiny("--resume", "--steps", 0, *ON_CPU, out="whole").status == 0
    for words in ([], ["--tp", 2]):
        assert tiny("--resume", "--steps", 8, *TWO, *words, out="whole").status == 2
        assert re.fullmatch("train.py: .*: use --gpus 4 --tp 2 .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("flags", [
    "", "--optimizer ordinary", "--optimizer ordinary --rule adamw", "--optimizer ordinary --rule adam-mini",
    "--states master", "--states int8", "--rule adamw --clip 0 --states int8",
    "--rule adam-mini --clip 0 --states master", "--moe 4", "--moe 4 --optimizer ordinary",
    "--moe 4 --states int8 --rule adamw", "--sync diloco --states int8", "--sync streaming", "--sync sparseloco"])
def test_train_predicted_bytes_of_weights_and_optimizer(text, flags):
    """To the byte, as of gradients that do not wait, and of a sync. By default no matrix has a gradient: the one buffer
    that all of them pass through is as large as the largest, Muon's whole or a slab of the tables."""
    run = build_run(text, "--dim", 128, "--layers", 2, *flags.split())
    optimizer, args, before = run.optimizer, run.args, [p.detach().clone() for p in run.model.parameters()]
    optimizer.begin(1, 1.0)
    train.accumulate_gradients(run, 0)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    held = sum(t.nbytes for t in [*gradients, *([optimizer.forged.slab] if optimizer.forged else [])])
    assert train.waits(args) or held == train.predict_memory(run.config, args.batch, args, CPU)[0]["gradients"]
    if not flags:
        assert (args.rule, args.optimizer, args.clip) == ("muon", "forge", 0) and held == 4 * (5 * 128 + 128 * 512)
        assert all((p.dim() < 2) == torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))
    optimizer.finish(optimizer.norm(), None)
    assert all(predicted == true for predicted, true in bytes_of(run).values()), bytes_of(run)


def test_train_predicted_bytes_of_processes(tiny):
    """The same of one of two, each with a part of the matrices, or of the experts, or of the rounds."""
    ran = tiny.launch(2, {flags: (flags.split(), "memory") for flags in (
        "--tp 2", "--tp 2 --states master", "--tp 2 --optimizer ordinary --rule adamw", "--moe 4 --sync ddp",
        "--inner-steps 3 --states int8 --dim 128")})
    for name, found in ran.items():
        told = found.rows[-1]["memory"]
        assert found.status == 0 and all(predicted == true for predicted, true in told.values()), (name, told)


@pytest.mark.parametrize("accum, experts", [(1, 0), (2, 0), (1, 4)])
@pytest.mark.parametrize("tokens", [4, 32, 512])
def test_train_predicted_bytes_of_what_waits(text, accum, experts, tokens):
    """Factors of few tokens of a micro-batch, gradients in fp32 of many, and at 32 some of both."""
    flags = f"--layers 2 --dim 128 --seq 4 --clip 1 --optimizer forge --accum {accum} --moe {experts}"
    run = build_run(text, *flags.split())
    run.feed = SimpleNamespace(prepare=lambda *_: None, take=lambda *_: tuple(
        torch.randint(256, (tokens // 4, 4)) for _ in "xy"))
    run.optimizer.begin(1, 1.0)
    train.accumulate_gradients(run, 0)
    kept = forging.factor_bytes(f for state in run.optimizer.forged.states.values() for f in state.factors)
    assert kept == train.kept_bytes(run.config, tokens * accum, run.args)


def peak_of(text, words, device, folder=None):
    """Bytes of two steps of a new model, from its birth, measured beside predicted."""
    def steps():
        run = build_run(text, *words.split(), device=device, folder=folder)
        for step in (0, 1):
            run.optimizer.begin(step + 1, 1e-3)
            train.accumulate_gradients(run, step)
            run.optimizer.finish(run.optimizer.norm(), None)
        steps.predicted = train.predict_memory(run.config, run.args.batch, run.args, device)[1]
        steps.graphs = run.model.forward.held if run.args.replay else 0  # which the allocator does not count

    return (base.peak_bytes(steps, device) + steps.graphs) / steps.predicted


@pytest.mark.parametrize("optimizer", ["ordinary", "forge"])
def test_train_predicted_peak_on_a_cpu(text, tmp_path, monkeypatch, optimizer):
    """Of what is kept for backward; of logits, which the materialised loss alone has (on a CPU autograd adds them up in
    a fourth buffer); of a model in three bytes a parameter, whose twin is born in four."""
    words = f"--layers 6 --dim 64 --seq 128 --vocab 256 --loss cce-exact --optimizer {optimizer}"
    for way in ("", "--recompute", "--offload", "--recompute --offload", "--vocab 8192"):
        assert abs(peak_of(text, f"{words} {way}", CPU, tmp_path) - 1) < 0.1, way
    if optimizer == "ordinary":
        assert 0.9 < peak_of(text, f"{words} --vocab 8192 --loss reference", CPU) < 1.35
        return
    words += " --dim 512 --seq 32 --batch 1 --states int8 --rule adam-mini --clip 0 --recompute"
    assert 0.9 < peak_of(text, words, CPU) < 1.15
    monkeypatch.setattr(train, "born_dtype", lambda name, args: torch.float32)
    assert peak_of(text, words, CPU) > 1.25


@needs_gpu
@pytest.mark.parametrize("flags", [
    *(f"--optimizer ordinary --loss {loss}" for loss in train.LOSSES), "--optimizer ordinary --rule adamw",
    "--rule adamw --clip 0", *(f"--states {states}" for states in forging.LAYOUTS), "--clip 1 --states master",
    "--optimizer ordinary --moe 8", "--moe 8 --states master"])
def test_train_predicted_peak_on_a_gpu(text, flags):
    torch.compiler.reset()  # or all these models together are more than it compiles one function for
    words = "--preset gpt2-small --dtype bf16 --layers 4 --dim 768 --heads 12 --seq 512 --vocab 65536 --tokens bytes"
    assert abs(peak_of(text, f"{words} --loss cce-exact {flags}", DEVICE) - 1) < 0.1


# ==== README: what it tells one to type can be typed, and what it names exists ========================================
#
# Its figures cannot be checked here. Its commands, files and flags can, and its length: it is what is read first.

MOST_LINES, MOST_WORDS = 220, 3500
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARSERS = {f"{stage}.py": base.stage_parser(vars(module)) for stage, module in STAGES.items()}
PARSERS["train.py"] = train.make_parser()


def readme_errors(text):
    """Commands that their script's parser refuses, files that are not there, flags of train.py that are not told."""
    for command in re.findall(r"^(?:python|torchrun) .*|(?<=`)(?:python|torchrun) [^`]*", text, re.M):
        words = shlex.split(command, comments=True)
        script = next((word for word in words if word in PARSERS), None)
        try:
            PARSERS[script].parse_args(words[words.index(script) + 1 :])
        except (KeyError, SystemExit):
            yield f"cannot be typed: {command}"
    for file in set(re.findall(r"[\w./-]*\w\.(?:py|md|txt)\b", text)):
        if not (ROOT / file).exists():
            yield f"no such file: {file}"
    told = set(re.findall(r"--[a-z][a-z-]*", text)) | {"--help"}
    flags = [flag for flag in PARSERS["train.py"]._option_string_actions if flag.startswith("--")]
    yield from (f"not mentioned: {flag}" for flag in flags if flag not in told)
    if text.count("\n") > MOST_LINES or len(text.split()) > MOST_WORDS:
        yield f"too long: {text.count(chr(10))} lines, {len(text.split())} words"


def test_readme():
    assert not list(readme_errors(README))
    for old, new, error in (  # its twins
        ("", "`torchrun --nproc-per-node 2 -- train.py --ranks 2`", "cannot be typed: torchrun"),
        ("", "```bash\npython 01_logits_memory.py --break nothing  # a bug\n```\n", "cannot be typed: python 01"),
        ("", "`python 08_more.py`", "cannot be typed: python 08"), ("", "`pytest tests.py`", "no such file: tests.py"),
        ("--on-nan", "--on-none", "not mentioned: --on-nan"),
        ("", "\n" * MOST_LINES, "too long"), ("", " word" * MOST_WORDS, "too long"),
    ):
        found = list(readme_errors(README.replace(old, new) if old else README + new))
        assert any(one.startswith(error) for one in found), (new, found)


# ==== Last, what has been running beside all these: the stages' scripts, and their planted bugs =======================


@pytest.mark.parametrize("stage", STAGES)
def test_stage_runs(stage, outcome):
    """Whatever the clock says: who runs the tests may use the machine for more than them."""
    printed = outcome.stdout.splitlines()
    missed = [line.split("|")[0] for line in printed if line.endswith("| NO")]
    assert all(claim.rstrip().endswith(": time") for claim in missed), outcome
    assert outcome.returncode == bool(missed) and ("next: python" in outcome.stdout) != bool(missed), outcome
    # README's block may be of a GPU, which prints more; but one line of it begins as one does here.
    block = README.partition(f"<!-- {stage} -->\n")[2].partition(f"<!-- /{stage} -->")[0].splitlines()
    here, there = ({line[:12] for line in lines[2:]} - {" " * 12, "claim       "} for lines in (printed, block))
    assert here & there, block


@pytest.mark.parametrize("stage", STAGES)
def test_planted_bugs_are_caught(stage, outcome):
    for bug in BUGS[stage]:
        assert f"--break {bug}: caught by check_" in outcome and f"\n{bug}: status 1\n" in outcome, (bug, outcome)
