"""Every check of every stage with more shapes and seeds, every planted bug, and train.py from end to end.

    pytest test_all.py                 on a CPU the Triton kernels run interpreted, on a GPU compiled

The tests of known bugs name who once shipped them. The checks that two things are equal have twins that break one of
them and must see the difference: the --break options of the stages, and the tests of train.py that say twin.
"""

import concurrent.futures
import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import io
import json
import math
import os
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

# OpenMP's idle threads spin by default. Where tests share two cores with other work, sleeping ones are far faster.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

base = importlib.import_module("01_logits_memory")
cce = importlib.import_module("02_cce_kernel")
gfs = importlib.import_module("03_grad_filter_sort")
forging = importlib.import_module("04_fused_optimizer")
parallel = importlib.import_module("05_parallelism")
low_comm = importlib.import_module("06_low_comm_sync")
moe = importlib.import_module("07_moe_balance")
train = importlib.import_module("train")

if base.INTERPRETED and base.HAS_TRITON:
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang"):  # private: other versions may lack it

        def patch_once(kernel, patch=interpreter._patch_lang):
            """The interpreter replaces all of Triton's language at each call of a function: a fifth of its time. While
            a kernel runs, what its launch has replaced still is, for the functions that it calls."""
            tl = cce.tl
            languages = [value for value in kernel.__globals__.values() if value is tl or value is tl.core]
            return patch(kernel) if any(tl.core.is_builtin(language.load) for language in languages) else None

        interpreter._patch_lang = patch_once

ROOT = Path(__file__).resolve().parent
DEVICE = base.default_device()
STAGES = {"01_logits_memory": base, "02_cce_kernel": cce, "03_grad_filter_sort": gfs, "04_fused_optimizer": forging,
          "05_parallelism": parallel, "06_low_comm_sync": low_comm, "07_moe_balance": moe}
LOADER = importlib.machinery.SourceFileLoader("figures", str(ROOT / ".ci" / "figures"))
figures = importlib.util.module_from_spec(importlib.util.spec_from_loader("figures", LOADER))
LOADER.exec_module(figures)
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, where a GPU makes an inf
needs_gpu = pytest.mark.skipif(not base.HAS_CUDA, reason="needs a GPU")
# Bugs in the kernels of 03.
NEED_HOPPER = {"first-tiles", "kernel-counts-ignored", "lost-bit"}
needs_triton = pytest.mark.skipif(not base.HAS_TRITON, reason="needs Triton")


def python(*arguments, timeout=300, **options):
    """Run the interpreter on a script of this folder; its status, output and errors."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, **options)


def in_process(stage, *arguments):
    """A stage's command line in this process, which has torch already: what python() returns."""
    names, errors = vars(STAGES[stage]), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", [f"{stage}.py", *map(str, arguments)])
        patch.setattr(sys, "stdout", output := io.StringIO())
        try:
            status = base.run_stage(names, "")
        except SystemExit as left:  # argparse
            status = left.code
    return SimpleNamespace(returncode=status, stdout=output.getvalue(), stderr=errors.getvalue())


# ==== Stages: command lines, planted bugs, checks =====================================================================


@pytest.fixture(scope="session", autouse=True)
def beside(request):
    """What needs a process of its own anyway, one after the other, beside the tests, which mostly keep one core busy:
    {what: future of python()'s result}. In them no clock decides. The tests that wait for them are this file's last."""
    bugs, futures = {}, {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = functools.partial(pool.submit, python, timeout=900)
        for item in request.session.items:
            if item.originalname == "test_stage_runs":
                stage = item.callspec.params["stage"]
                futures[stage] = run(f"{stage}.py")
            elif item.originalname == "test_planted_bug_is_caught":
                bugs.setdefault(item.callspec.params["stage"], []).append(item.callspec.params["bug"])
        for stage, names in bugs.items():  # compiled kernels keep what they were compiled with: there each bug is alone
            alone, together = (names, []) if base.HAS_CUDA else (names[:1], names[1:])
            futures |= {(stage, bug): run(f"{stage}.py", "--break", bug) for bug in alone}
            if together:
                future = run("-c", f"import test_all; test_all.plant({stage!r}, {together})")
                futures |= {(stage, bug): future for bug in together}
        yield futures
        pool.shutdown(cancel_futures=True)


def plant(stage, bugs):
    """Plant bugs of a stage in this process, one after the other, and print what catches each."""
    names = vars(STAGES[stage])
    for bug in bugs:
        attribute = names["BREAKS"][bug][1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(names, attribute, names[attribute])  # it is put back afterwards
            base.run_break(names, bug)


def test_command_line_of_a_stage(monkeypatch):
    """Status 1: a check or a claim fails, a planted bug is caught. 2: a user's mistake, in one line; a bug that breaks
    more than its check. A programmer's mistake keeps its traceback."""

    def run(flags, outcome):  # an error, or what is measured where 1 was predicted
        def check_it(*given):
            if isinstance(outcome, BaseException):
                raise outcome
            if given:
                given[1].row("claim", "formula", 1, outcome)

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


def test_bench_takes_the_median_after_a_warm_up(monkeypatch):
    clock, calls = iter([-99, 0, 0, 1, 10, 12, 20, 23, 30, 34, 40, 45, 50, 56, 60, 67]), []  # seven runs: 1 s to 7 s
    monkeypatch.setattr(base, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert (*base.bench(lambda: calls.append(1)), len(calls)) == (4000, 2000, 8)


CHEAP_CHECKS = {"01_logits_memory": "table", "02_cce_kernel": "plan", "03_grad_filter_sort": "bad_input",
                "04_fused_optimizer": "plans",
                "05_parallelism": "flow", "06_low_comm_sync": "bytes", "07_moe_balance": "routing"}


@pytest.mark.parametrize("stage", CHEAP_CHECKS)
def test_checks_by_name(stage):
    name = CHEAP_CHECKS[stage]
    for asked in (name, f"check_{name}"):
        result = in_process(stage, "--check", asked)
        assert result.returncode == 0 and result.stdout.endswith(f"\nchecks passed: {name}\n"), result
    result = in_process(stage, "--check", "nothing")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and name in result.stderr, result


def test_only_bad_input_is_one_line(capsys):
    """Any other ValueError is a mistake in the code, and keeps its traceback."""

    def fail(error):
        raise error

    assert train.guarded(fail, base.BadInput("use another")) == 2
    assert capsys.readouterr().err == "train.py: use another\n"
    with pytest.raises(ValueError, match="a bug"):
        train.guarded(fail, ValueError("a bug"))


@pytest.mark.parametrize("stage", ["02_cce_kernel", "03_grad_filter_sort"])
def test_shape_of_nothing_is_bad_input(stage):
    result = in_process(stage, "--shape", 8, 0, 8)
    assert result.returncode == 2 and result.stderr == f"{stage}.py: --shape [8, 0, 8]: N, V and D must be at least 1\n"


@pytest.mark.parametrize("seed", range(3))
def test_reference_and_chunked_on_more_shapes(seed):
    base.check_reference(N=20 + seed, V=7 + 30 * seed, D=5 + seed, seed=seed)
    base.check_chunked(N=33, V=40 + seed, D=9, chunk=8 + seed, seed=seed)


def forged_layer(E, C, x):
    layer = torch.nn.Linear(*C.T.shape, bias=False, device=C.device)
    forging.forge(layer, forging.AdamW())
    return torch.nn.functional.cross_entropy(layer(E), x)


@pytest.mark.parametrize("loss", [
    base.chunked_linear_cross_entropy, cce.linear_cross_entropy,
    functools.partial(cce.linear_cross_entropy, reduction="sum", workspace=0),
    functools.partial(gfs.linear_cross_entropy, gradient="sparse"), forged_layer,
], ids=["chunked", "over tokens", "over the vocabulary", "sparse", "layer"])
def test_second_derivatives_raise(loss):
    """Where backward is written by hand, they would lack what it takes for constant."""
    E, C, _, x = base.random_problem(20, 31, 8, torch.float32, DEVICE, bias=False)
    dE = torch.autograd.grad(loss(E, C, x).square(), E, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dE.sum().backward()


def test_publish_replaces_only_its_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- stage -->old<!-- /stage -->\nafter\n")
    heads = {"": ("new ",), "--long": ("rare ",)}
    figures.publish("stage", "new cpu\ntitle\nnew rows\na newer row\nnew ones", "python stage.py", page, heads)
    text = page.read_text()
    assert text.startswith("before\n<!-- stage -->\n`python stage.py`, 20") and ", new cpu\n" in text
    assert text.endswith("<!-- /stage -->\nafter\n")
    assert "\n```text\nnew rows\nnew ones\n```\n<!-- /stage" in text and "old" not in text
    assert list(tmp_path.iterdir()) == [page]
    with pytest.raises(ValueError, match="<!-- other -->"):
        figures.publish("other", "cpu\nnew rows", "python other.py", page, heads)
    for output, command in (("rows", "python stage.py"), ("new rows", "python stage.py --long")):
        with pytest.raises(ValueError, match="no line begins with"):
            figures.publish("stage", f"cpu\n{output}", command, page, heads)
    assert page.read_text() == text


# ==== README: all that it names exists, and its blocks are what the scripts would write ===============================

README = (ROOT / "README.md").read_text(encoding="utf-8")
PARSERS = {f"{stage}.py": base.stage_parser(vars(module)) for stage, module in STAGES.items()}
PARSERS["train.py"] = train.make_parser()


def flag_errors(words, scripts):
    """The flags among these words that none of the scripts has, or not with the value that follows (a CAPITAL stands
    for any)."""
    for name, value in zip(words, [*words, "..."][1:], strict=True):
        if name[:2] != "--":
            continue
        actions = [PARSERS[script]._option_string_actions.get(name) for script in scripts]
        choices = [action.choices for action in actions if action]
        if not choices:
            yield f"{name}: no flag of {', '.join(scripts)}"
        given = not (value[:2] == "--" or value.isupper() or value == "...")
        if choices and given and all(some and value not in some for some in choices):
            yield f"{name} {value}: no choice of {', '.join(scripts)}"


def readme_errors(text):
    """Every wrong command, flag, choice, file, block or length of a README."""
    for stage in STAGES:
        begin, end = f"<!-- {stage} -->\n", f"\n```\n<!-- /{stage} -->\n"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            yield f"{stage}: no block of results"
            continue
        about, _, rows = text.split(begin)[1].split(end)[0].partition("\n```text\n")
        try:
            if figures.chosen_lines(rows, figures.HEADLINES[stage], about) != rows:
                yield f"{stage}: its block has lines that HEADLINES does not name"
        except ValueError as error:
            yield f"{stage}: {error}"
    if text.count("\n") > 400:
        yield f"{text.count(chr(10))} lines, 400 at most"
    flags = set(PARSERS["train.py"]._option_string_actions) - {"-h", "--help"}
    for name in sorted(flags - set(re.findall("--[a-z][a-z-]*", text))):
        yield f"{name}: a flag of train.py that is not mentioned"

    typed = "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)).splitlines()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    inside = re.search(r"^## train.py\n(.*?)^## ", prose, re.M | re.S)
    inside = inside[1] if inside else ""
    for part, scripts in ((inside, ["train.py"]), (prose.replace(inside, ""), list(PARSERS))):
        for code in [*re.findall("`([^`]+)`", part), *(typed if part is not inside else [])]:
            words = shlex.split(code, comments=True)
            for word in words:
                if re.fullmatch(r"[\w./-]*\w\.(py|md|txt)", word) and not (ROOT / word).exists():
                    yield f"{word}: no such file"
            if words[:1] in (["python"], ["torchrun"]):
                script = next((i for i, word in enumerate(words) if word in PARSERS), None)
                if script is None:
                    yield f"{code}: runs none of the scripts"
                    continue
                yield from flag_errors(words[script + 1 :], [words[script]])
                if code in typed:
                    try:
                        PARSERS[words[script]].parse_args(words[script + 1 :])
                    except SystemExit:
                        yield f"{code}: bad input"
            elif words[:1] not in (["pip"], ["apt"]):
                yield from flag_errors(words, scripts)
        for name, more in re.findall(r"`(--[a-z-]+) [^`]+`((?:, `[^`-][^`]*`)+)", part):
            for value in re.findall("`([^`]+)`", more):
                yield from flag_errors([name, value], scripts)


def test_readme_names_what_exists():
    assert not list(readme_errors(README))


@pytest.mark.parametrize("old, new, error", [
    ("", "`python train.py --gpu 2`", "--gpu: no flag of train.py"),
    ("", "`torchrun --nproc-per-node 2 -- train.py --ranks 2`", "--ranks: no flag of train.py"),
    ("", "`python 01_logits_memory.py --break nothing`", "--break nothing: no choice"),
    ("", "`python 08_more.py`", "08_more.py: no such file"),
    ("", "`pytest tests.py`", "tests.py: no such file"),
    ("", "`--speed`", "--speed: no flag"),
    ("", "`--loss cce`, `exactly`", "--loss exactly: no choice"),
    ("```bash\n", "```bash\npython train.py --steps many\n", "bad input"),
    ("--on-nan", "--on-none", "--on-nan: a flag of train.py that is not mentioned"),
    ("## train.py\n", "## train.py\n`--check`\n", "--check: no flag of train.py"),
    ("<!-- 03_grad_filter_sort -->", "", "03_grad_filter_sort: no block"),
    ("materialised: peak ", "materialized: peak ", "no line begins with 'materialised: peak'"),
    ("materialised: peak ", "a row by hand\nmaterialised: peak ", "01_logits_memory: its block has lines"),
    ("", "\n" * 400, "lines, 400 at most"),
])
def test_twin_of_the_readme(old, new, error):
    wrong = README.replace(old, new, 1) if old else README + new
    assert wrong != README and any(error in found for found in readme_errors(wrong)), list(readme_errors(wrong))


# ==== 02: cut cross-entropy against the reference =====================================================================


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, V, D", [(252, 507, 123), (128, 256, 64), (3, 2, 1), (65, 129, 200)])
def test_equal_to_the_reference(N, V, D, dtype):
    cce.check_equal(N, V, D, dtype, DEVICE, seed=N)
    cce.check_equal(N, V, D, dtype, DEVICE, seed=V, bias=False)


def test_bias_is_added_once_when_D_has_several_blocks():
    """apple/ml-cross-entropy issue 52: the bias counted once per block of D."""
    cce.check_equal(40, 90, 300, torch.float32, DEVICE, bias=True)


def test_orders_where_rows_do_not_start_at_multiples_of_16_bytes():
    """Rows of 9 elements cannot be fetched by descriptors: pointers, in 16 bits, too."""
    cce.check_orders(DEVICE, D=9, seed=33)


@pytest.mark.parametrize("order", ["vocabulary", "kept"])
def test_kernels_start_where_a_slice_of_a_larger_matrix_starts(order):
    """Views whose rows are cut from wider ones: aligned (descriptors), and not (pointers)."""
    E, C, b, x = (t.detach() for t in base.random_problem(140, 400, 48, torch.bfloat16, DEVICE))
    b.requires_grad_()
    loss = functools.partial(cce.linear_cross_entropy, workspace=0 if order == "vocabulary" else None)
    for first in (8, 3):
        views = [t[:, first : first + 40].requires_grad_() for t in (E, C)]
        plain = [t.detach().clone().requires_grad_() for t in views]
        for backend in cce.backends(DEVICE):
            got, want = (cce.gradients_of(loss, *pair, b, x, backend=backend) for pair in (views, plain))
            for g, w in zip(got, want, strict=True):
                assert cce.error(g, w) < 3e-3  # within a rounding of bf16


# ==== 03: filtering and sorting =======================================================================================


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [
    dict(rule="mass"), dict(rule="element"), dict(rule="mass", only_dE=True), dict(rule="element", only_dE=True),
    dict(rule="mass", sort=False)], ids=str)
def test_filter_equals_its_rule_on_dense_logits(options, dtype):
    gfs.check_filter(DEVICE, dtype, seed=1, **options)


def test_filter_on_awkward_shapes():
    """Fewer rows, classes and columns than a tile has; a threshold that nothing is below: the exact gradient."""
    for N, V, D in [(1, 2, 8), (5, 70, 24), (40, 3, 16)]:
        E, C, _, x = base.random_problem(N, V, D, torch.bfloat16, DEVICE, bias=False)
        for backend in gfs.filter_backends(DEVICE, torch.bfloat16, D):
            *got, _ = gfs.filtered_cross_entropy(E, C, x, eps=1e-9, backend=backend)
            want = cce.gradients_of(base.linear_cross_entropy_reference, E, C, None, x)
            assert all(cce.error(*pair) < 1e-2 for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_gradient_equals_its_rule_on_dense_logits(dtype):
    """Adversarial rows: all mass in the tail, a class that all rows list, empty classes, ties, ignored rows. The stage
    itself has another seed and no gradient of lse."""
    slow = base.INTERPRETED and dtype.itemsize == 2 and len(gfs.filter_backends(DEVICE, dtype, 24)) > 1
    gfs.check_sparse(DEVICE, dtype, lse_weight=0.3, seed=1, names=["a Zipf law"] if slow else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_gradient_from_strided_inputs(dtype):
    """Rows that lie apart in memory: a kernel that takes D for their distance reads other rows. A bias is a column."""
    E, C, x, eps = gfs.adversarial_problems(DEVICE, dtype)["a Zipf law"]
    wide = [torch.cat((t.detach(), t.detach()), 1)[:, : t.shape[1]].requires_grad_() for t in (E, C)]
    bias = torch.zeros(len(C), device=DEVICE, dtype=dtype)
    for backend in gfs.filter_backends(DEVICE, dtype, E.shape[1]):
        loss = functools.partial(gfs.linear_cross_entropy, gradient="sparse", eps=eps, backend=backend)
        runs = [(loss(*pair, x, b), pair) for pair, b in (((E, C), None), (wide, None), ((E, C), bias))]
        want, *others = ([value, *torch.autograd.grad(value, pair)] for value, pair in runs)
        for got in others:
            for g, w in zip(got, want, strict=True):
                assert cce.error(g, w) < (1e-5 if dtype == torch.float32 else 3e-3)


def test_sparse_gradient_of_the_lse_alone():
    """Its upstream gradient is one number, expanded to all rows: a kernel that takes it for N numbers reads past it."""
    E, C, x, eps = gfs.adversarial_problems(DEVICE, torch.bfloat16)["a Zipf law"]
    results = []
    for backend in ("torch", *gfs.filter_backends(DEVICE, torch.bfloat16, E.shape[1])):
        _, lse = gfs.linear_cross_entropy(
            E, C, x, gradient="sparse", eps=eps, backend=backend, reduction="none", return_lse=True)
        results.append(torch.autograd.grad(lse.sum(), (E, C)))
    for pair in zip(*results, strict=True):
        assert all(cce.error(got, pair[0]) < 3e-3 for got in pair)


def test_sparse_room_is_counted_in_rows_that_count():
    """Nine of ten tokens are ignored and list nothing: the forecast speaks of a mean over all."""
    E, C, x = gfs.trained_problem(1024, 16384, 32, torch.float32, DEVICE)
    x = x.where(torch.arange(1024, device=DEVICE) % 10 == 0, -100)
    stats = gfs.SparseStats()
    gfs.linear_cross_entropy(E, C, x, gradient="sparse", eps=2**-9, stats=stats, backend="torch").backward()
    assert stats.forecast[0] == pytest.approx(stats.measured[0].item(), rel=0.2)


def test_sparse_gradient_on_awkward_shapes():
    """One row, two classes, no tokens, all ignored: as the exact gradient, since nothing is below 2^-12."""
    for N, V, D in [(1, 2, 8), (5, 70, 24), (0, 20, 8), (40, 3, 16)]:
        for dtype in (torch.float32, torch.bfloat16):
            E, C, _, x = base.random_problem(N, V, D, dtype, DEVICE, bias=False)
            for targets in (x, torch.full_like(x, -100)):
                want = cce.gradients_of(cce.linear_cross_entropy, E, C, None, targets)
                for backend in gfs.filter_backends(DEVICE, dtype, D):
                    for gradient in ("sparse", "auto"):
                        loss = functools.partial(gfs.linear_cross_entropy, gradient=gradient, backend=backend)
                        for g, w in zip(cce.gradients_of(loss, E, C, None, targets), want, strict=True):
                            assert cce.error(g, w) < (1e-5 if dtype == torch.float32 else 6e-3)


def test_errors_are_those_of_the_rows_that_have_a_gradient():
    """Every second row counts in the loss, and those have a tail of their own: an estimate over all rows says less."""
    N, V, D = 1024, 16384, 32
    E, C, x = gfs.trained_problem(N, V, D, torch.float32, "cpu")  # the same numbers on every device
    E, C, x = (t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in (E, C, x))
    half = torch.arange(N, device=DEVICE) % 2
    kind = torch.where(torch.arange(V, device=DEVICE) % 2 == 0, 1.0, -1.0)
    with torch.no_grad():
        C[:, 1] = kind
        E[:, 1] = torch.where(half == 0, 1.5, -1.5)
    stats = gfs.SparseStats()
    found = []
    for weight in (torch.ones_like(half), 1 - half):
        loss = gfs.linear_cross_entropy(
            E, C, x, gradient="sparse", eps=2**-9, reduction="none", stats=stats, backend="torch")
        got = torch.autograd.grad((loss * weight).sum(), (E, C))
        exact = cce.linear_cross_entropy(E, C, x, reduction="none", backend="torch")
        want = torch.autograd.grad((exact * weight).sum(), (E, C))
        found.append([(cce.error(*pair), said) for *pair, said in zip(
            got, want, stats.measured[2:].tolist(), strict=True)])
        for true, said in found[-1]:
            assert 0.4 < said / true < 2.5
    assert found[1][1][0] > 1.1 * found[0][1][0]  # dC is worse where one kind of row is alone


def test_statistics_of_several_calls():
    """Two calls before their backwards, backward thrice through one that is refused there, a call without gradients."""
    E, C, x, eps = gfs.adversarial_problems(DEVICE, torch.float32)["a Zipf law"]
    stats = gfs.SparseStats()
    call = functools.partial(
        gfs.linear_cross_entropy, E, C, x, gradient="sparse", eps=eps, stats=stats, backend="torch")
    first, second = call(), call()
    first.backward()
    second.backward()
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
def test_sparse_gradient_refuses_a_cuda_graph():
    E, C, _, x = base.random_problem(256, 1024, 64, torch.bfloat16, DEVICE, bias=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="CUDA graph"), torch.cuda.graph(graph):
        gfs.linear_cross_entropy(E, C, x, gradient="sparse", backend="torch")


@needs_gpu
def test_offsets_beyond_32_bits():
    """V D > 2^31 elements: the last classes are read and their gradients written where they belong."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    N, V, D = 128, 540_000, 4096
    E = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    C = torch.randn(V, D, device=DEVICE, dtype=torch.bfloat16).div_(D**0.5).requires_grad_()
    x = torch.arange(V - N, V, device=DEVICE)
    loss = cce.linear_cross_entropy(E, C, x)
    dC = torch.autograd.grad(loss, C)[0][-N:]
    with torch.no_grad():
        p = torch.softmax(E.float() @ C.float().T, 1)[:, -N:]  # (N, N) of the last classes
        assert cce.error(loss, -p.diag().log().mean()) < 1e-3
        assert cce.error(dC, (p - torch.eye(N, device=DEVICE)).T @ E.float() / N) < 1e-2


def test_fp64_takes_the_torch_backend():
    E, C, b, x = base.random_problem(30, 47, 11)
    want = cce.gradients_of(base.linear_cross_entropy_reference, E, C, b, x)
    for got, exact in zip(cce.gradients_of(cce.linear_cross_entropy, E, C, b, x), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    if base.HAS_TRITON:
        with pytest.raises(ValueError, match="float64"):
            cce.linear_cross_entropy(E, C, x, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens_at_all(dtype):
    E, C, b, x = base.random_problem(0, 20, 8, dtype, DEVICE)
    for backend in cce.backends(DEVICE):
        assert not any(value.any() for value in cce.gradients_of(cce.linear_cross_entropy, E, C, b, x, backend=backend))


@pytest.mark.parametrize("backend", cce.backends(DEVICE))
def test_building_blocks_take_expanded_and_strided_vectors(backend):
    """The gradient of a mean is one number expanded to N; a kernel that reads it as N numbers reads past its end."""
    E, C, b, x = (t.detach() for t in base.random_problem(40, 61, 24, torch.float32, DEVICE, ignored=0.0))
    wide = lambda t: t.repeat_interleave(2)[::2]  # noqa: E731
    lse, target = cce.lse_and_target(E, C, x, backend=backend)
    again = cce.lse_and_target(E, C, wide(x), backend=backend)
    assert torch.equal(lse, again[0]) and torch.equal(target, again[1])
    grad = torch.tensor(1 / 40, device=DEVICE).expand(40)
    want = cce.gradient_slice(E, C, x, lse, grad.clone(), grad.clone(), None, backend)
    got = cce.gradient_slice(E, C, wide(x), wide(lse), grad, grad, None, backend)
    assert torch.equal(got, want)


def test_without_triton_the_blocked_backend_takes_over():
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


# ==== Processes =======================================================================================================


def fail_on_rank_1():
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("rank 1 fell over")
    time.sleep(120)


def test_spawn_ends_the_others_when_one_fails():
    start = time.monotonic()
    with pytest.raises(Exception, match="rank 1 fell over"):
        parallel.spawn(fail_on_rank_1, 2)
    assert time.monotonic() - start < 100  # rank 0 alone would have slept longer


def say_pid_and_sleep(folder):
    Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(120)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's table of processes")
def test_workers_end_with_their_parent(tmp_path):
    code = f"import test_all; test_all.parallel.spawn(test_all.say_pid_and_sleep, 2, 'cpu', ({str(tmp_path)!r},))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(Path(f"/proc/{file.stem}").exists() for file in tmp_path.iterdir()))


def wait_until(condition, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


# ==== 05: one model on many processes =================================================================================


@pytest.mark.parametrize("ranks", [3, 4])
def test_parallel_equals_serial(ranks):
    """Three, where nothing is a power of two; four: also data or context with tensor parallelism, two by two."""
    errors = [error for error in parallel.in_ranks("all_checks", ranks).values() if error is not None]
    assert len(errors) == 6 + (ranks == 4) and max(errors) < 1e-12  # with two cuts at once


def test_mesh_that_does_not_fit_is_one_line_for_all_ranks():
    """The rank count does not divide; another world than planned; sizes that are none."""
    for sizes in ((1, 1, 1, 3), (2, 2, 1, 1)):
        with pytest.raises(base.BadInput, match="rank 0, 1: dp .* needs . ranks, but 2 were started"):
            parallel.in_ranks("make_groups", 2, *sizes)
    with pytest.raises(ValueError, match="at least 1"):
        parallel.make_groups(tp=0)
    with pytest.raises(ValueError, match="needs 2 ranks, but 1 were started"):
        parallel.make_groups(tp=2)
    assert parallel.make_groups().tp is None


def test_one_process_needs_no_groups():
    """With groups of None everything is the serial model."""
    E, C, _, x = base.random_problem(20, 31, 8, bias=False)
    want = cce.linear_cross_entropy(E, C, x)
    assert torch.equal(parallel.vocab_parallel_cross_entropy(E, C, x, None, 31), want)
    model = parallel.tiny(1)
    tokens, targets = parallel.tiny_tokens(model)
    want = parallel.serial_loss(model, tokens, targets).detach()
    assert parallel.tensor_parallel(model, None) == {}
    parallel.context_parallel(model, None)
    handle = parallel.data_parallel(model, None)
    loss = parallel.part_of_loss(model, tokens, targets, None)
    loss.backward()
    handle.finish()
    assert abs(loss - want) < 1e-12 and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("message, flags", [
    ("nothing is parallel", ["--ranks", 1]), ("without torchrun", []), ("without torchrun", ["--check"]),
    *([] if base.HAS_CUDA else [("as many ranks", ["--device", "cuda"])]),
])
def test_bad_flags_of_parallelism(message, flags, monkeypatch):
    if message == "without torchrun":
        monkeypatch.setenv("RANK", "0")
    result = in_process("05_parallelism", *flags)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_scheduling_on_more_random_cases():
    parallel.check_simulator(100)
    parallel.check_uneven(20, n=8)
    parallel.check_uneven(3, n=24)
    parallel.check_flow(80)
    parallel.check_skip(150)
    parallel.check_planner(40)


def test_any_rank_may_be_lost():
    """The first, in the first step; one that has all sums but has not voted; one of four that have all layers; two of
    six at once, after which two pipelines are left."""
    parallel.check_elastic([([(0, 0, "forward")], 2, 2, (1, 3), [3]), ([(3, 6, "done")], 2, 2, (1, 3), [4]),
                            ([(1, 2, "forward")], 4, 1, (3, 1), []),
                            ([(0, 2, "forward"), (1, 2, "forward")], 3, 2, (2, 2), [0, 1, 2, 3])])


def test_another_rank_may_be_lost_during_repair():
    found = parallel.in_ranks("train_elastic", 6, [(2, 1, "forward"), (4, 1, "repair")], 3, 2, 8, device="cpu", spare=2)
    losses, members, mesh, _, _, forgotten = found
    want = parallel.in_ranks("undisturbed", 1, device="cpu")
    assert members == (0, 1, 3, 5) and mesh == (2, 2) and forgotten
    assert max(abs(a / b - 1) for a, b in zip(losses, want, strict=True)) <= 1e-12


def test_a_rank_that_is_too_slow_is_left_behind():
    losses, members, mesh, *_ = parallel.in_ranks("train_elastic", 4, [(1, 2, "slow")], 2, 2, 6, device="cpu")
    want = parallel.in_ranks("undisturbed", 1, device="cpu")
    assert members == (0, 2, 3) and mesh == (1, 3)
    assert max(abs(a / b - 1) for a, b in zip(losses, want, strict=True)) <= 1e-12


def test_last_copy_of_a_layer_is_lost():
    with pytest.raises(OSError, match="no copy of units .* start again from a checkpoint"):
        parallel.in_ranks("train_elastic", 4, [(2, 3, "forward")], 1, 4, 8, device="cpu", spare=1)


WISH = "params=8e9 layers=32 dim=4096 vocab=128256 seq=8192 gpus=64 gib=141 link=400"


def test_planner_answers_in_one_screen():
    result = python("05_parallelism.py", "--plan", WISH)
    lines = result.stdout.splitlines()
    assert result.returncode == 0 and len(lines) <= 25 and max(map(len, lines)) <= 140, result.stdout + result.stderr
    assert any(line.split()[:4] == ["64", "1", "1", "1"] for line in lines), result.stdout


@pytest.mark.parametrize("message, wish", [
    ("no plan fits 2 GPUs of 24 GiB", WISH.replace("gpus=64 gib=141", "gpus=2 gib=24")),
    ("missing layers, gib", "params=8e9 dim=4096 vocab=128256 seq=8192 gpus=64"), ("not of the form", "8B on 64 GPUs"),
])
def test_planner_says_what_is_missing(message, wish):
    result = in_process("05_parallelism", "--plan", wish)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def session_members(session):
    """Processes of a session (field 6 of Linux's /proc/PID/stat) that are not zombies."""
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its = file.read_text().rpartition(")")[2].split()[:4]
            if int(its) == session and state != "Z":
                members.append(file.parent.name)
    return members


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's table of processes")
@pytest.mark.parametrize("flags", [[], ["--break", "no-f"]], ids=["Ctrl-C", "failure"])
def test_no_process_is_left_behind(flags):
    command = [sys.executable, "05_parallelism.py", *flags]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        if not flags:  # the script, a server to fork from, its tracker, two ranks
            wait_until(lambda: len(session_members(process.pid)) > 4)
            process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=200)[0]
        assert process.returncode == (1 if flags else 130), output
        wait_until(lambda: not session_members(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# ==== 06: workers that synchronise now and then =======================================================================


def test_sync_on_more_shapes():
    low_comm.check_data_parallel(DEVICE, M=5)
    low_comm.check_codes(DEVICE, n=257)
    low_comm.check_one_byte(DEVICE, M=5)


def test_two_workers_equal_the_simulation():
    low_comm.check_processes(2)


@pytest.mark.parametrize("method", sorted(set(low_comm.METHODS) - {"merge", "diloco", "streaming"}))  # in 06's checks
def test_workers_survive(method):
    low_comm.check_survival(method)


# ==== 04: the step inside backward ====================================================================================


@pytest.mark.parametrize("N, V, D, layout, dtype, softcap", [
    (33, 270, 24, "fp32", torch.float32, None), (60, 290, 136, "master", torch.bfloat16, None),
    (20, 300, 16, "fp32", torch.float32, 5.0),
])
def test_forged_classifier_of_more_shapes(N, V, D, layout, dtype, softcap):
    forging.check_classifier(DEVICE, N, V, D, [(layout, dtype, softcap)])


def test_stash_of_more_shapes():
    forging.check_stash(DEVICE, sizes=(3, 50), V=130, D=24)


@pytest.mark.parametrize("M, K, N", [(128, 256, 64), (1, 8, 1), (65, 392, 33), (40, 129, 7)])
def test_forged_steps_are_the_written_out_ones(M, K, N):
    forging.check_steps(DEVICE, 1, M, K, N, seed=M, rules=forging.examples()[:3])


def test_forged_shards_of_more_shapes():
    forging.check_shards(DEVICE, 41, 384, 9)


@needs_gpu
def test_memory_of_forged_steps():
    ledger = base.Ledger()
    forging.measure_gpt(ledger)
    assert ledger.ok


def test_noise_is_the_published_generator():
    """Philox 4x32 of 7 rounds: its authors' known answer for key and counter 0. And its 16-bit halves are even."""
    words = forging.philox(0, *[torch.tensor([0])] * 4)
    assert [int(word) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    bits = forging.random_bits(1, 2, 3, 0, 0, 512, 512, "cpu")
    counts = torch.bincount(bits.flatten() >> 8, minlength=256).double()
    chi2 = ((counts - 1024) ** 2 / 1024).sum().item()  # 255 degrees of freedom: mean 255, deviation 22.6
    assert 150 < chi2 < 370
    one_bit = [((bits >> i) & 1).double().mean().item() for i in range(16)]
    assert all(abs(share - 0.5) < 5 * 0.5 / 512 for share in one_bit)


def test_default_training_holds_one_matrix_of_gradients():
    """What 04's first line says is what train.py does: after backward no matrix has a gradient, and the one buffer that
    all of them passed through is as large as the largest of them, Muon's whole or a slab of the tables."""
    args = train.parse("--layers 2 --dim 64 --heads 2 --seq 16 --vocab 512 --device cpu".split())
    assert (args.rule, args.optimizer, args.clip) == ("muon", "forge-cce", 0)
    model, optimizer = model_and_optimizer(args, torch.device("cpu"))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.begin(1, 1.0)
    x = torch.randint(512, (2, 16))
    train.loss_sum(model, x, x, args, gfs.SparseStats()).backward()
    for p, old in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) == (p.dim() == 2) and torch.equal(p, old) == (p.dim() < 2)
    assert optimizer.forged.slab.nbytes == 4 * max(64 * 256, 64 * 512)


def test_forged_models_leave_no_memory_behind():
    gone = []
    for _ in range(2):
        model = torch.nn.Linear(64, 64)
        forging.forge(model, forging.AdamW())
        gone.append(weakref.ref(model.weight))
        del model
        gc.collect()
    assert all(weight() is None for weight in gone)


def test_forged_model_keeps_what_is_skipped_frozen_or_no_plain_linear():
    nn = torch.nn
    model = nn.ModuleDict(dict(
        a=nn.Linear(8, 8), head=nn.Sequential(nn.Linear(8, 4)), header=nn.Linear(8, 8), frozen=nn.Linear(8, 8),
        attention=nn.MultiheadAttention(8, 2), norm=nn.LayerNorm(8),
    ))
    model["frozen"].requires_grad_(False)
    handle = forging.forge(model, forging.AdamW(), skip="head")
    assert list(handle.states) == ["a.weight", "header.weight"] and type(model["a"]) is forging.ForgeLinear
    assert {"a.bias", "head.0.weight", "attention.out_proj.weight", "norm.weight"} <= set(handle.ordinary)
    assert not any(name.startswith("frozen") for name in handle.ordinary)


# ==== train.py ========================================================================================================

TINY = "--layers 1 --dim 32 --heads 2 --seq 32 --batch 8 --steps 6 --lr 3e-3 --sample-tokens 4 --dtype fp32".split()


# ==== 07: experts =====================================================================================================


@pytest.mark.parametrize("seed", range(3))
def test_routing_and_layer_on_more_sizes(seed):
    moe.check_routing(N=17 + seed, E=4 + 3 * seed, seed=seed)
    moe.check_layer(N=9, D=8 + 4 * seed, E=3 + seed, seed=seed)


@needs_triton
@pytest.mark.filterwarnings("ignore:.*overflow.*")
def test_products_of_experts_by_kernels():
    moe.check_products(DEVICE, (torch.bfloat16,), seed=1)


@needs_gpu
def test_products_of_experts_with_large_tiles():
    """Descriptors, several tiles an expert, multiprocessors left to others."""
    for counts in ((700, 0, 1, 130, 200), (128, 256, 0, 64)):
        rows = moe.Rows(torch.tensor((0, *np.cumsum(counts)), device=DEVICE))
        x, dy, W = (torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)
                    for size in ((sum(counts), 320), (sum(counts), 256), (256 * len(counts), 320)))
        for fast, function, arguments in (("triton", moe.experts_product, (x, W, rows)),
                                          ("triton", functools.partial(moe.experts_product, spare=500), (x, W, rows)),
                                          ("triton", moe.experts_product, (dy, W, rows, True)),
                                          ("grouped", moe.experts_gradient, (dy, x, rows))):
            got, want = (function(*arguments, backend=backend) for backend in (fast, "torch"))
            assert cce.error(got, want) < 5e-3, (counts, function)


def test_experts_over_four_ranks():
    errors = parallel.in_ranks("all_checks", 4, stage=vars(moe))
    found = [error for error in errors.values() if error is not None]
    assert len(found) == 3 and max(found) < 1e-12


def test_least_loaded_over_more_loads():
    moe.check_least_loaded(400)
    assert moe.least_loaded(np.array([1000, 10]), 1, least=1).tolist() == [[1000, 10]]
    assert moe.least_loaded(np.zeros(4, int), 2).sum() == 0


def test_biases_even_out_the_loads():
    """Without a loss, without a gradient: a router that likes some experts better gets all used."""
    torch.manual_seed(0)
    layer = moe.MoE(16, 16, 8, 2)
    layer.router.data.normal_(std=0.2)
    x = torch.randn(2048, 16) + 1
    balance = moe.Balance(layer, "bias", rate=3e-3)
    found = []
    for _ in range(100):
        layer(x)
        balance.loss()
        found.append(balance.step().item())
    assert found[0] > 0.5 and found[-1] < 0.1


def test_bias_twin(monkeypatch):
    """A bias of the wrong sign feeds the fullest expert."""
    update = moe.Balance.step

    def wrong(self):
        for layer in self.layers:
            layer.bias.neg_()
        found = update(self)
        for layer in self.layers:
            layer.bias.neg_()
        return found

    monkeypatch.setattr(moe.Balance, "step", wrong)
    with pytest.raises(AssertionError):
        test_biases_even_out_the_loads()


def test_study_tells_domains_apart():
    """Of tables of counts: 2 bits for four domains with experts of their own, none if all use all alike. Batches have
    the domains one after the other, or in turn."""
    assert moe.mutual_information(torch.eye(4) * 100) == pytest.approx(2)
    assert moe.mutual_information(torch.full((4, 8), 9)) == pytest.approx(0, abs=1e-9)
    of_domain = [np.full(9, domain, np.uint8) for domain in range(3)]
    for mixed, want in ((False, [0, 0, 1, 1, 2, 2]), (True, [0, 1, 2, 0, 1, 2])):
        assert moe.batch_of(of_domain, 2, 4, np.random.default_rng(0), mixed)[0][:, 0].tolist() == want
    texts = moe.domain_texts()
    assert list(texts) == list(moe.DOMAINS) and {len(text) for text in texts.values()} == {2**18}



@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A quarter of a MiB of source text: enough to train on, little to load."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(gfs.corpus(limit=2 * base.MIB).train[: 256 * 1024].tobytes())
    return path


@pytest.fixture
def tiny(tmp_path, text):
    """tiny(*flags, out=NAME) runs train.py here; returns (status, rows of the log, the last checkpoint's weights)."""

    def run(*flags, out="out"):
        log = tmp_path / f"{out}.jsonl"
        argv = [*TINY, "--data", text, "--preset", "cpu", "--out", tmp_path / out, "--log", log, *flags]
        status = train.main([str(a) for a in argv])
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return status, rows, weights(tmp_path / out)

    run.folder = tmp_path
    return run


def weights(out):
    """The model's tensors in the newest checkpoint of a directory, or None."""
    files = train.checkpoint_files(out)
    return torch.load(files[0].with_suffix(".pt"), weights_only=True)["model"] if files else None


def losses(rows):
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def norms(rows):
    """Gradient norms by step. Clipping and AdamW hide a gradient of the wrong size from the loss; these show it."""
    return {row["step"]: row["grad_norm"] for row in rows if "grad_norm" in row}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].cpu(), b[k].cpu()) for k in a)


def test_learns_and_logs(tiny, capsys):
    status, rows, _ = tiny("--steps", 120, "--eval-every", 60, "--lr", 1e-2)
    text = capsys.readouterr().out
    val = [row["val_bpb"] for row in rows if "val_bpb" in row]
    assert rows[0]["flags"]["lr"] == 1e-2 and rows[0]["parameters"] and "speed   " in text and "bits a byte" in text
    assert status == 0 and abs(val[0] - 8) < 0.24 and val[0] > val[1] > val[2] and val[2] < 5
    assert {"step", "loss", "bpb", "lr", "grad_norm", "tok_s", "seconds"} <= rows[2].keys()
    assert all(word in text for word in ("parameters", "MFLOP", "predicted MiB", "hash", "sample", "def "))


@pytest.mark.parametrize("loss", ["cce-sparse", "cce"])
def test_approximate_losses_train(tiny, loss):
    """Of 256 bytes none is below a threshold so early, so the approximations' own paths give the exact run."""
    exact, other = (tiny("--loss", name, out=name)[1] for name in ("cce-exact", loss))
    assert losses(exact) == pytest.approx(losses(other), rel=1e-4)
    assert norms(exact) == pytest.approx(norms(other), rel=1e-3)
    shares = [row["sparse"] for row in other if "sparse" in row]
    assert shares and shares == {"cce-sparse": [1.0], "cce": [0.0]}[loss] * len(shares)
    assert all(row["why"] for row in other if "sparse" in row)


def test_cut_and_materialised_losses_train_alike(tiny):
    cut, full = (tiny("--loss", name, out=name)[1] for name in ("cce-exact", "reference"))
    assert losses(cut) == pytest.approx(losses(full), rel=1e-4) and norms(cut) == pytest.approx(norms(full), rel=1e-3)


def test_accumulation_equals_one_big_batch(tiny):
    rule = ["--rule", "adamw"] if DEVICE.type == "cuda" else []  # there Muon's bf16 makes more of a rounding than that
    whole, parts = tiny("--optimizer", "ordinary", *rule, out="a"), tiny("--accum", 4, *rule, out="b")
    assert losses(parts[1]) == pytest.approx(losses(whole[1]), rel=1e-5)
    assert norms(parts[1]) == pytest.approx(norms(whole[1]), rel=1e-4)
    for name, w in whole[2].items():
        torch.testing.assert_close(parts[2][name], w, rtol=1e-3, atol=1e-4)


def test_gradient_size_twin(tiny, monkeypatch):
    """A gradient three times too large: the losses hardly notice, the norms must."""
    whole = tiny(out="a")
    loss_sum = train.loss_sum
    monkeypatch.setattr(train, "loss_sum", lambda *args: 3 * loss_sum(*args))
    assert norms(tiny(out="b")[1]) != pytest.approx(norms(whole[1]), rel=1e-4)


def test_accumulation_twin(tiny, monkeypatch):
    """Each micro-batch sees the same sequences: the loss must differ."""
    whole = tiny("--optimizer", "ordinary", out="a")
    monkeypatch.setattr(train, "share", lambda count, world, accum, micro: range(count // accum))
    parts = tiny("--accum", 4, out="b")
    assert losses(parts[1]) != pytest.approx(losses(whole[1]), rel=1e-5)


def test_two_processes_equal_one(tiny):
    flags = ["--device", "cpu", "--steps", 20]
    one, two = tiny(*flags, "--optimizer", "ordinary", out="a"), tiny(*flags, "--gpus", 2, "--sync", "ddp", out="b")
    assert one[0] == two[0] == 0 and len(losses(one[1])) == 20
    assert losses(two[1]) == pytest.approx(losses(one[1]), abs=1e-5)
    assert norms(two[1]) == pytest.approx(norms(one[1]), rel=1e-4)
    assert two[1][-1]["val_loss"] == pytest.approx(one[1][-1]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("flags", [["--clip", 1], ["--ep-policy", "llep", "--accum", 2]], ids=str)
def test_spread_experts_equal_those_of_one_process(tiny, flags):
    """Also clipping, validation, the checkpoint, and going on with another number of processes."""
    flags = ["--device", "cpu", "--moe", 4, "--steps", 8, *flags]
    plain = [flag for flag in flags if flag not in ("--ep-policy", "llep")]
    one, two = tiny(*plain, "--optimizer", "ordinary", out="a"), tiny(*flags, "--gpus", 2, "--sync", "ddp", out="b")
    assert one[0] == two[0] == 0 and len(losses(one[1])) == 8
    assert losses(two[1]) == pytest.approx(losses(one[1]), abs=1e-5)
    assert norms(two[1]) == pytest.approx(norms(one[1]), rel=1e-4)
    uneven = [[row["max_violation"] for row in run[1] if "max_violation" in row] for run in (one, two)]
    assert len(uneven[0]) == 8 and uneven[0] == pytest.approx(uneven[1], abs=1e-2)
    assert one[2].keys() == two[2].keys() and all(one[2][k].shape == two[2][k].shape for k in one[2])
    more = ["--device", "cpu", "--steps", 12, "--resume"]
    one, two = tiny(*more, "--gpus", 2, "--sync", "ddp", out="a"), tiny(*more, out="b")
    assert one[0] == two[0] == 0 and len(losses(one[1])) == 12
    assert losses(one[1]) == pytest.approx(losses(two[1]), abs=1e-5)


def run_without_all_reduce(args):
    train.all_reduce_gradients = lambda model, world: None
    train.run_rank(args)


def test_two_processes_twin(tiny, text, tmp_path):
    """Without the all-reduce each process follows its own half of the batch: the losses must differ, and the weights,
    which are compared before they are saved."""
    one = tiny("--device", "cpu", out="a")
    argv = [*TINY, "--data", text, "--preset", "cpu", "--out", tmp_path / "b", "--log", tmp_path / "b.jsonl"]
    args = train.parse([str(a) for a in (*argv, "--device", "cpu", "--gpus", 2, "--sync", "ddp")])
    (tmp_path / "b").mkdir()  # launch() would have
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        parallel.spawn(run_without_all_reduce, 2, "cpu", (args,))
    assert weights(tmp_path / "b") is None
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert losses(rows) != pytest.approx(losses(one[1]), rel=1e-5)


def sync_states(out):
    """06's state of each worker in the newest checkpoint."""
    path = train.checkpoint_files(out)[0].with_suffix(".pt")
    files = [path, *sorted(path.parent.glob(f"{path.stem}.worker*.pt"))]
    return [torch.load(file, weights_only=True)["sync"] for file in files]


def test_two_processes_train_apart_by_default(tiny):
    status, rows, weights_ = tiny("--device", "cpu", "--gpus", 2, "--inner-steps", 3, "--steps", 8, "--save-every", 5)
    method = train.dataclasses.replace(low_comm.METHODS["diloco"], H=3)
    record, _ = train.find_checkpoint(tiny.folder / "out")
    assert status == 0 and record["flags"]["sync"] == "diloco" and record["flags"]["optimizer"] == "forge-cce"
    first, second = sync_states(tiny.folder / "out")
    assert torch.equal(first["phi"], second["phi"])  # at the end both hold the anchor, which is the model
    assert same(weights_, train_weights(first["phi"], tiny.folder / "out"))
    steps = [row for row in rows if "loss" in row]
    size = low_comm.round_bytes(method, [first["phi"].shape[1]], 2)
    told = 16 + 8  # the first validation: loss and windows of one worker, to the other; and that its step is compiled
    assert steps[2]["sent"] - told == size and steps[1]["sent"] == told
    assert steps[-1]["sent"] >= 3 * size and steps[-1]["blocked"] > 0
    os.remove(train.checkpoint_files(tiny.folder / "out")[0])  # the last: before it, in the middle of a round,
    first, second = sync_states(tiny.folder / "out")
    assert torch.equal(first["phi"], second["phi"]) and not torch.equal(first["theta"], second["theta"])


def train_weights(phi, out):
    """The named tensors of a model whose flat weights are phi (1, P)."""
    record, _ = train.find_checkpoint(out)
    flags = record["flags"]
    model = base.GPT(base.GPTConfig(*(flags[k] for k in ("vocab", "seq", "layers", "heads", "dim"))))
    flat = low_comm.Flat([model], low_comm.METHODS[flags["sync"]].fragments)
    flat.theta.copy_(phi)
    return model.state_dict()


@pytest.mark.parametrize("flags", [
    ["--sync", "streaming", "--device", "cpu", "--gpus", 2], ["--sync", "sparseloco", "--states", "master"],
    ["--sync", "gossip", "--optimizer", "ordinary"], ["--sync", "co2", "--states", "int8"]], ids=lambda flags: flags[1])
def test_resume_in_the_middle_of_a_round_is_bitwise(tiny, flags):
    """Streaming over two processes with a fragment in flight; the others by one worker."""
    exact = ["--deterministic"] if base.HAS_CUDA else []
    flags = [*flags, "--inner-steps", 3, "--steps", 8, *exact]
    whole = tiny(*flags, out="whole")[2]
    tiny(*flags, "--save-every", 5 if "streaming" in flags else 4, out="parts")
    os.remove(train.checkpoint_files(tiny.folder / "parts")[0])
    shutil.copytree(tiny.folder / "parts", tiny.folder / "twin")
    again = ["--resume", *exact, *(flags[2:6] if "--gpus" in flags else [])]
    assert tiny(*again, "--steps", 8, out="parts")[0] == 0
    assert same(weights(tiny.folder / "parts"), whole)
    if "--gpus" not in flags:  # the twin: the sync starts anew
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(low_comm.Sync, "load_state_dict", lambda self, saved: self.restart(saved["steps"]))
            tiny(*again, "--steps", 8, out="twin")
        assert not same(weights(tiny.folder / "twin"), whole)


def test_workers_go_on_from_one_process(tiny):
    """A checkpoint of one process has one set of weights, from which any number of workers may go on apart."""
    tiny("--device", "cpu", "--steps", 4, out="parts")
    flags = ["--resume", "--device", "cpu", "--gpus", 2, "--inner-steps", 2, "--steps", 8]
    status, rows, _ = tiny(*flags, out="parts")
    assert status == 0 and [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    record, _ = train.find_checkpoint(tiny.folder / "parts")
    flags = record["flags"]
    assert flags["sync"] == "diloco" and flags["outer"] == [1.0, 0.0] and len(record["workers"]) == 1


@pytest.mark.parametrize(
    "sync, start, steps, outer",
    [("diloco", 0, 449, (1.0, 0.0)), ("gossip", 0, 450, (0.9, 0.5)), ("streaming", 5101, 6000, (0.9, 0.5)),
     ("streaming", 5100, 6000, (0.7, 0.9)), ("diloco", 0, 6000, None), ("noloco", 0, 449, None), ("ddp", 0, 449, None)],
)
def test_outer_step_by_the_number_of_rounds(sync, start, steps, outer):
    flags = SimpleNamespace(sync=sync, outer=None, inner_steps=None, start=start, steps=steps)
    assert train.choose_outer(flags, going_on=False) == outer
    assert train.choose_outer(flags, going_on=True) is None  # a run that has begun without keeps its method's own


def run_and_die(args):
    if os.environ["RANK"] == "1":
        rate = train.schedule
        train.schedule = lambda step, args: os.kill(os.getpid(), 9) if step == 4 else rate(step, args)
    train.run_rank(args)


def run_into_nan(args):
    if os.environ["RANK"] == "1":
        work = train.accumulate_gradients
        train.accumulate_gradients = lambda *args: work(*args) * (math.nan if args[2] == 3 else 1)
    with Path(args.out, f"said.{os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        train.run_rank(args)


def apart(tiny, text, function, *flags, workers=2, **options):
    """train.py's workers by `function`; what spawn returns."""
    out = tiny.folder / "apart"
    argv = [*TINY, "--data", text, "--preset", "cpu", "--out", out, "--device", "cpu", "--gpus", workers, *flags]
    out.mkdir()
    return parallel.spawn(function, workers, "cpu", (train.parse([str(a) for a in argv]),), **options)


def test_a_killed_worker_does_not_end_the_run(tiny, text):
    assert apart(tiny, text, run_and_die, "--inner-steps", 3, "--steps", 9, spare=1) == [1]
    record, _ = train.find_checkpoint(tiny.folder / "apart")
    assert record["step"] == 9 and record["workers"] == []


def test_a_killed_worker_is_not_waited_for_by_those_it_had_nothing_for(tiny, text):
    """Of pairs, one has lost its other half; the third worker does not wait for it until the transport's timeout."""
    started = time.monotonic()
    flags = "--sync", "gossip", "--inner-steps", 3, "--steps", 9, "--batch", 6
    assert apart(tiny, text, run_and_die, *flags, workers=3, spare=1) == [1]
    assert time.monotonic() - started < 200  # of 300


def run_with_inf(args):
    """Worker 1's gradients are spoilt once."""
    work = train.Optimizer.norm
    spoils = lambda opt: os.environ["RANK"] == "1" and opt.at[1] == 3  # noqa: E731
    train.Optimizer.norm = lambda opt: work(opt) * (math.inf if spoils(opt) else 1)
    with Path(args.out, f"said.{os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        train.run_rank(args)


def test_inf_of_one_process_is_heard_by_all(tiny, text):
    """Also where processes do not synchronise: they stop, or skip, together."""
    with pytest.raises(Exception, match="exit code 1"):
        apart(tiny, text, run_with_inf, "--sync", "none")
    assert "step 3: loss" in Path(tiny.folder, "apart", "said.0").read_text()


def run_and_be_replaced(args, silent=False):
    """Worker 1 is killed, or silent until the other has gone on without it. That one takes its time until the one in
    its place has joined."""
    rank, step, join, joined = os.environ["RANK"], low_comm.Sync.step, low_comm.Sync.join, Path(args.out, "joined")

    def step_or_leave(sync):
        if rank == "1" and sync.steps == 5:  # before a round
            if not silent:
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until(lambda: sync.transport.store.check([f"{sync.transport.prefix}/1/members"]))
        step(sync)
        time.sleep(0 if sync.steps < 6 or joined.exists() else 0.4)

    def join_and_say(sync):
        join(sync)
        joined.write_text(f"{sync.steps} {rank} {os.environ['LOCAL_RANK']}")

    low_comm.Sync.step, low_comm.Sync.join = step_or_leave, join_and_say
    with Path(args.out, f"said.{rank}").open("w", 1) as file, contextlib.redirect_stderr(file):
        train.run_rank(args)


def run_and_be_missed(args):
    train.PATIENCE = 4
    run_and_be_replaced(args, silent=True)


@pytest.mark.parametrize("function", [run_and_be_replaced, run_and_be_missed])
def test_a_lost_worker_is_replaced(tiny, text, function):
    """And the new one is among those who save at the end; it trained on the share of the one that was lost."""
    assert apart(tiny, text, function, "--inner-steps", 3, "--steps", 150, spare=1, replace=True) == [1]
    out = tiny.folder / "apart"
    record, _ = train.find_checkpoint(out)
    step, rank, seat = map(int, (out / "joined").read_text().split())
    assert record["step"] == 150 and len(record["workers"]) == 1 and 4 < step < 150 and (rank, seat) == (2, 1)
    assert ("worker 1: the others have gone on" in (out / "said.1").read_text()) == (function is run_and_be_missed)


def test_a_replacement_that_comes_too_late_ends_with_the_others(tiny, text):
    started = time.monotonic()
    assert apart(tiny, text, run_and_die, "--inner-steps", 3, "--steps", 9, spare=1, replace=True) == [1]
    assert train.find_checkpoint(tiny.folder / "apart")[0]["step"] == 9 and time.monotonic() - started < 200


def test_nan_of_one_worker_stops_all(tiny, text):
    with pytest.raises(Exception, match="exit code 1"):
        apart(tiny, text, run_into_nan, "--inner-steps", 6, "--steps", 30, "--save-every", 2)
    record, _ = train.find_checkpoint(tiny.folder / "apart")  # it is noticed at step 4: by all, who are about to save
    said = Path(tiny.folder, "apart", "said.0").read_text()
    assert record["step"] == 2 and "weights that are not finite" in said


def test_two_machines(tiny, text, monkeypatch):
    """Two agents of torchrun train what --gpus 2 does (where a MASTER_PORT that is taken does not matter: workers meet
    at one that the system has just given to their parent). One process speaks and saves."""
    torchrun, flags = importlib.import_module("torch.distributed.run").main, ["--device", "cpu", "--inner-steps", 3]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        status, rows, whole = tiny(*flags, "--gpus", 2, out="one")
    out, log, said = tiny.folder / "two", tiny.folder / "two.jsonl", tiny.folder / "said"
    argv = [*"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --local-addr 127.0.0.1 --rdzv-endpoint".split(),
            f"127.0.0.1:{port}", "--redirects", 3, "--log-dir", said, "--", ROOT / "train.py", *TINY, *flags, "--data",
            text, "--preset", "cpu", "--out", out, "--log", log]
    context = torch.multiprocessing.get_context("forkserver")  # which has torch already
    agents = [context.Process(target=torchrun, args=([str(a) for a in argv],), daemon=True) for _ in range(2)]
    try:
        for agent in agents:
            agent.start()
        for agent, seconds in zip(agents, (80, 20), strict=True):
            agent.join(seconds)
    finally:
        for agent in agents:
            agent.terminate()  # it ends its process, too
    output = {name: [file.read_text(errors="replace") for file in said.glob(f"*/*/0/{name}.log")]
              for name in ("stdout", "stderr")}
    assert [status, *(agent.exitcode for agent in agents)] == [0, 0, 0], output
    silent, speaks = sorted(output["stdout"])
    assert not silent and "2 processes" in speaks and speaks.count("step 6/6  validation") == 1, output
    again = [json.loads(line) for line in log.read_text().splitlines()]
    assert losses(again) == losses(rows) and len(again) == len(rows) and same(weights(out), whole)
    assert {file.name for file in out.iterdir()} == {file.name for file in (tiny.folder / "one").iterdir()}


def test_machines_that_share_no_directory(tiny, monkeypatch, capsys):
    """One line for all, before anything is trained."""
    for name, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(parallel, "join_group", lambda device: None)
    monkeypatch.setattr(train.World, "smallest", lambda world, seen: seen - 1)  # another does not see it
    status, rows, _ = tiny("--device", "cpu")
    error = capsys.readouterr().err
    assert status == 2 and not rows and "name one that all of them share" in error and error.count("\n") == 1


def start_and_wait(flags, line, timeout=120):
    """Start train.py and return its process and output so far, once a line that starts with `line` has come."""
    process = subprocess.Popen([sys.executable, "train.py", *map(str, flags)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    timer, output = threading.Timer(timeout, process.kill), ""  # a killed process ends its output
    timer.start()
    while got := process.stdout.readline():
        output += got
        if got.startswith(line):
            timer.cancel()
            return process, output
    timer.cancel()
    raise RuntimeError(f"train.py ended, or took {timeout} s, before '{line}':\n{output}")


@pytest.fixture
def long_run(text, tmp_path):
    """Flags of a run that lasts until it is stopped, for a machine of any speed."""
    out = tmp_path / "killed"
    return [*TINY, "--data", text, "--preset", "cpu", "--out", out, "--steps", 10**5, "--log-every", 1]


@pytest.mark.parametrize("optimizer", ["ordinary", "forge-cce"])
def test_killed_run_resumes_bitwise(tiny, long_run, tmp_path, optimizer):
    """SIGKILL at a random step; the resumed run ends with the weights of one that was never touched."""
    exact = ["--deterministic"] if base.HAS_CUDA else []
    schedule = ["--steps", 40, "--save-every", 3, "--optimizer", optimizer, *exact]
    step = random.randrange(4, 38)
    result = python("-c", f"""
import os, signal, train
share = train.schedule
train.schedule = lambda step, args: os.kill(os.getpid(), signal.SIGKILL) if step == {step} else share(step, args)
train.main({[str(flag) for flag in (*long_run, *schedule)]})
""")
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    record, _ = train.find_checkpoint(tmp_path / "killed")
    assert record["step"] == step // 3 * 3, f"killed in step {step}"
    whole = tiny(*schedule, out="whole")[2]
    shutil.copytree(tmp_path / "killed", tmp_path / "twin")
    assert train.main(["--resume", "--out", str(tmp_path / "killed"), *exact]) == 0
    assert same(weights(tmp_path / "killed"), whole)
    load = torch.optim.AdamW.load_state_dict
    with pytest.MonkeyPatch.context() as patch:  # the twin: resume forgets the optimizer's moments
        if optimizer == "forge-cce":
            patch.setattr(forging.Forge, "load_state_dict", lambda self, state: None)
        else:
            patch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: load(self, state | {"state": {}}))
        assert train.main(["--resume", "--out", str(tmp_path / "twin"), *exact]) == 0
    assert not same(weights(tmp_path / "twin"), whole)


@pytest.mark.parametrize("number, flags", [
    (signal.SIGINT, []), *((number, ["--device", "cpu", "--gpus", 2]) for number in (signal.SIGINT, signal.SIGTERM)),
], ids=["Ctrl-C", "Ctrl-C, two processes", "SIGTERM, two processes"])
def test_stopped_run_saves_and_says_how_to_go_on(long_run, tmp_path, number, flags):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a child inherits, as from a script's `&`
    try:
        process, output = start_and_wait([*long_run, *flags], "step 2/")
    finally:
        signal.signal(signal.SIGINT, previous)
    process.send_signal(number)
    try:
        output += process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + number, output
    record, _ = train.find_checkpoint(tmp_path / "killed")
    assert f"stopped after step {record['step']}" in output and "train.py --resume --out" in output
    again = ["--resume", "--out", str(tmp_path / "killed"), "--steps", str(record["step"] + 2)]
    if flags:  # workers that train apart have a state each
        assert train.main(again) == 2
    assert train.main([*again, *map(str, flags)]) == 0


@pytest.mark.parametrize("states", [
    "fp32", "master", "int8 --rule adam-mini", "int8", "fp32 --optimizer forge", "int8 --clip 0.5 --accum 2"])
def test_stopped_forge_resumes_bitwise(tiny, states):
    states, *more = states.split()
    flags = ["--states", states, *more, *(["--deterministic"] if base.HAS_CUDA else [])]
    whole = tiny(*flags, "--steps", 8, out="whole")[2]
    tiny(*flags, "--steps", 8, "--save-every", 3, out="parts")
    os.remove(train.checkpoint_files(tiny.folder / "parts")[0])  # the last one: go on from step 6
    status, _, resumed = tiny("--resume", *(["--deterministic"] if base.HAS_CUDA else []), "--steps", 8, out="parts")
    assert status == 0 and same(whole, resumed)


def test_validation_too_small_to_share_is_one_clear_line(tiny, tmp_path, capsys):
    (tmp_path / "small.txt").write_bytes(b"abcdefgh " * 100)
    status = tiny("--data", tmp_path / "small.txt", "--device", "cpu", "--gpus", 2, "--sync", "ddp", "--moe", 4)[0]
    error = capsys.readouterr().err
    assert status == 2 and "validation has 1 window(s)" in error and error.count("\n") == 1, error


def test_a_second_use_of_forged_experts_is_refused():
    layer = moe.MoE(8, 8, 4)
    handle = forging.forge(layer, forging.AdamW())
    handle.arm(1e-3, 1)
    with pytest.raises(ValueError, match="used twice"):
        layer(layer(torch.randn(5, 8)))


def test_experts_train_apart(tiny):
    """--sync diloco: workers that have all experts."""
    status, rows, _ = tiny("--device", "cpu", "--gpus", 2, "--moe", 4, "--inner-steps", 3, "--steps", 6)
    assert status == 0 and len(losses(rows)) == 6 and rows[-1]["val_loss"] < rows[1]["val_loss"]


@pytest.mark.parametrize("flags", [[], ["--clip", 1, "--accum", 2]], ids=["in backward", "after it"])
def test_forged_experts_train_like_ordinary_ones(tiny, flags):
    """Also an odd number of experts, of which some may get no token."""
    runs = [tiny("--moe", 5, "--top-k", 1, "--optimizer", name, "--clip", 0, *flags, out=name)
            for name in ("ordinary", "forge-cce")]
    for step, loss in losses(runs[0][1]).items():
        assert losses(runs[1][1])[step] == pytest.approx(loss, rel=2e-3 if step < 20 else 0.02)
    assert all("max_violation" in row for row in runs[1][1] if "loss" in row)


def test_forge_trains_like_adamw(tiny):
    """60 steps from one seed: the same losses. The twin trains without decay and must be told apart."""
    flags = ["--steps", 60, "--save-every", 0, "--clip", 0, "--rule", "adamw"]
    adamw = tiny(*flags, "--optimizer", "ordinary", out="adamw")
    for name in ("forge", "forge-cce"):
        forge = tiny(*flags, "--optimizer", name, out=name)
        assert len(losses(forge[1])) == 60 and losses(forge[1]) == pytest.approx(losses(adamw[1]), abs=1e-4)
        assert norms(forge[1]) == pytest.approx(norms(adamw[1]), rel=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "ADAMW", forging.AdamW(train.BETAS, 1e-8, 0.0))
        twin = tiny(*flags, "--optimizer", name, out="twin")
    assert losses(twin[1]) != pytest.approx(losses(adamw[1]), abs=1e-4)


def test_muon_trains_alike_inside_backward_and_after_it(tiny):
    """Also from micro-batches. The twin trains without Muon's decay, which is a two-hundredth of the rate. In fp32: the
    roundings of a GPU's bf16 grow from step to step; that all ways make the same bits there, 04 checks."""
    flags = ["--steps", 30, "--save-every", 0, "--device", "cpu"]
    after = losses(tiny(*flags, "--optimizer", "ordinary", out="after")[1])
    for more in (["--optimizer", "forge-cce"], ["--optimizer", "forge", "--accum", 2]):
        assert losses(tiny(*flags, *more, out=more[1])[1]) == pytest.approx(after, abs=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "MUON", forging.Muon(weight_decay=0.0))
        assert losses(tiny(*flags, out="twin")[1]) != pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize("name", ["forge", "forge-cce"])
@pytest.mark.parametrize("size", [[], ["--batch", 4, "--seq", 4]], ids=["gradients are kept", "factors are kept"])
def test_forge_clips_and_accumulates_like_adamw(tiny, monkeypatch, name, size):
    """Norms that change from step to step and are cut hard: AdamW does notice, in its weights first. The twin does not
    clip."""
    far = lambda one, other: max((one[2][k] - other[2][k]).abs().max().item() for k in one[2])  # noqa: E731
    monkeypatch.setattr(train, "validate", lambda *_: 0.0)  # of sequences of 4 it takes longer than the steps
    flags = ["--steps", 20, "--clip", 0.02, "--accum", 2, "--rule", "adamw", *size]
    adamw, forge = (tiny(*flags, "--optimizer", optimizer, out=optimizer) for optimizer in ("ordinary", name))
    assert losses(forge[1]) == pytest.approx(losses(adamw[1]), abs=1e-4)
    assert norms(forge[1]) == pytest.approx(norms(adamw[1]), rel=1e-3)
    release = forging.Forge.release
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forging.Forge, "release", lambda self, lr, step, scale: release(self, lr, step, 1.0))
        twin = tiny(*flags, "--optimizer", name, out="twin")
    assert far(forge, adamw) < 1e-4 < far(twin, adamw)


@pytest.mark.parametrize("optimizer", ["forge-cce", "ordinary"])
def test_a_micro_batch_of_nan_stops_or_is_skipped(tiny, monkeypatch, capsys, optimizer):
    """stop: the last checkpoint is good. skip: a bad step changes nothing, and those after it are taken; one that goes
    on for too long ends the run all the same."""
    real, seen, bad = train.loss_sum, [], range(7, 8)  # the first half of step 4

    def poisoned(model, *rest):
        seen.extend([{k: v.clone() for k, v in model.state_dict().items()}] * torch.is_grad_enabled())
        return real(model, *rest) * (np.nan if len(seen) in bad else 1)

    monkeypatch.setattr(train, "loss_sum", poisoned)
    flags = ["--optimizer", optimizer, "--clip", 1, "--accum", 2, "--save-every", 1]
    status, _, kept = tiny(*flags)
    assert status == 1 and "step 4: loss nan" in capsys.readouterr().out and same(seen[6], kept)
    seen.clear()
    status, rows, kept = tiny(*flags, "--on-nan", "skip", out="skip")
    assert status == 0 and "step 4: loss nan, gradient norm nan: skipped" in capsys.readouterr().out
    assert same(seen[6], seen[8]) and not same(seen[8], seen[10]) and all(p.isfinite().all() for p in kept.values())
    assert sorted(losses(rows)) == [1, 2, 3, 5, 6]
    seen.clear()
    bad = range(7, 99)
    status, _, kept = tiny(*flags, "--on-nan", "skip", "--steps", 12, out="long")
    assert status == 1 and "step 9: loss nan" in capsys.readouterr().out and same(seen[6], kept)
    seen.clear()
    bad = range(4, 5)
    assert tiny("--optimizer", optimizer, "--on-nan", "skip", out="unclipped")[0] == 0
    assert "step 4: loss nan" in capsys.readouterr().out and same(seen[3], seen[4]) and not same(seen[4], seen[5])


def test_a_skipped_step_moves_no_bias(tiny, monkeypatch):
    real = train.loss_sum
    monkeypatch.setattr(train, "loss_sum", lambda *args: real(*args) * np.nan)
    tiny("--moe", 4, "--balance", "bias", "--on-nan", "skip", "--steps", 2, "--save-every", 1)
    biases = [tensor for name, tensor in weights(tiny.folder / "out").items() if name.endswith("bias")]
    assert biases and not any(bias.any() for bias in biases)


def test_a_log_that_is_another_file_is_refused(tiny, capsys):
    """And the run that is there stays where it is."""
    tiny("--steps", 2)
    log = tiny.folder / "out.jsonl"
    for text in ("mine\n", "mine"):
        log.write_text(text)
        with pytest.raises(json.JSONDecodeError):  # it is still no log
            tiny()
        assert "holds other rows" in capsys.readouterr().err and log.read_text() == text
    assert train.find_checkpoint(tiny.folder / "out")[0]["step"] == 2


def test_dry_run_writes_nothing(tiny, capsys):
    log = tiny.folder / "out.jsonl"
    log.write_text("mine\n")
    status, kept = train.main([str(a) for a in (*TINY, "--dry-run", "--steps", 2, "--out", tiny.folder / "out", "--log",
                                                log)]), weights(tiny.folder / "out")
    text = capsys.readouterr().out
    assert status == 0 and kept is None and not (tiny.folder / "out").exists() and log.read_text() == "mine\n"
    assert "tokens/s" in text and "steps in" in text
    names = [line.split()[0] for line in text.splitlines()[-7:]]
    assert names == ["MiB", "parameters", "gradients", "optimizer", "activations", "loss", "peak"], text
    log.unlink()
    tiny()
    assert tiny("--dry-run", "--resume", "--steps", 2)[0] == 0 and "step 8/8" in capsys.readouterr().out
    assert tiny("--dry-run", "--steps", 0)[0] == 2 and "nothing to see" in capsys.readouterr().err


@pytest.mark.parametrize("rule, optimizer, layers, tables", [
    ("muon", "forge-cce", train.MUON, train.ADAMW), ("adamw", "forge-cce", train.ADAMW, train.ADAMW),
    ("adam-mini", "forge-cce", train.MINI, train.MINI), ("adam-mini", "forge", train.MINI, train.ADAMW)])
def test_which_matrices_have_which_rule(rule, optimizer, layers, tables):
    model = moe.with_experts(base.GPT(moe.GPTConfig(256, 16, 1, 2, 32, 4, 2)))
    matrices, rules = train.matrices_with_rules(model, SimpleNamespace(rule=rule, optimizer=optimizer))
    for name, p in model.named_parameters():
        wanted = tables if name in ("embedding.weight", "classifier") else layers
        wanted = train.ADAMW if p.dim() < 2 or name.endswith("router") else wanted
        assert rules.get(name, train.ADAMW) == wanted and (name in matrices) == (wanted != train.ADAMW)


def test_adam_mini_trains_alike_inside_backward_and_after_it(tiny):
    """The twin trains without decay."""
    flags = ["--steps", 20, "--save-every", 0, "--clip", 0, "--rule", "adam-mini"]
    after = losses(tiny(*flags, "--optimizer", "ordinary", out="after")[1])
    assert losses(tiny(*flags, out="inside")[1]) == pytest.approx(after, abs=1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "MINI", forging.AdamMini(train.BETAS, 1e-8, 0.0))
        assert losses(tiny(*flags, out="twin")[1]) != pytest.approx(after, abs=1e-5)


def test_a_model_is_born_matrix_by_matrix():
    """Its numbers are those of a model that is made at once, in the dtypes that 04 keeps; the draws after it, too."""
    config, cpu = moe.GPTConfig(256, 16, 2, 2, 32, 4, 2), torch.device("cpu")
    args = SimpleNamespace(states="int8", optimizer="forge-cce")
    world = SimpleNamespace(device=cpu, size=1, late=False, parts=None)
    torch.manual_seed(0)
    at_once, following = moe.with_experts(base.GPT(config)), torch.rand(1)
    torch.manual_seed(0)
    with train.Unborn() as unborn:
        model = moe.with_experts(base.GPT(config))
    names = {id(p): name for name, p in model.named_parameters() if p.is_meta}
    assert len(names) == 2 + 2 * 5 and not model.cos.is_meta
    unborn.bear(names, model, world, args)
    assert torch.equal(torch.rand(1), following)
    for (name, p), (other, q) in zip(model.named_parameters(), at_once.named_parameters(), strict=True):
        narrow = p.dim() == 2 and not name.endswith("router")
        assert name == other and p.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert p.requires_grad and torch.equal(p, q.to(p.dtype))


def test_twenty_million_parameters_in_three_bytes_each(tiny, capsys, monkeypatch):
    """Made and trained within 71 MiB of tensors, less than the model has in fp32. The twin is born in that, and only
    that."""
    flags = ["--layers", 6, "--dim", 512, "--heads", 4, "--batch", 1, "--steps", 1, "--states", "int8", "--rule",
             "adam-mini", "--clip", 0, "--recompute", "--device", "cpu", "--dry-run", "--fit", 0.074]
    assert 4 * base.GPTConfig(256, 32, 6, 4, 512).parameters() > train.room_of(0.074)
    assert tiny(*flags)[0] == 0 and "19.1 M parameters" in capsys.readouterr().out
    monkeypatch.setattr(train, "born_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(train, "train", lambda *_: 0)
    assert tiny(*flags)[0] == 2 and "--fit 0.074: out of memory, tensors took" in capsys.readouterr().err


def test_what_fits_a_card_and_what_to_type(capsys):
    """Predictions grow with the batch, and less frugal flags fit fewer sequences; what is to be typed can be."""
    assert train.main(["--fit", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("7b ")]
    assert [row[-2] for row in rows][:2] == ["none", "none"] and 1 <= int(rows[3][-2]) <= int(rows[4][-2])
    typed = shlex.split(next(line for line in lines if line.startswith("type:")))
    args = train.make_parser().parse_args(typed[typed.index("python") + 2 :])
    assert args.preset == "7b" and args.recompute and args.batch == int(rows[3][-2])
    found = train.parse(["--fit", "24", *typed[typed.index("python") + 2 :]])
    peaks = [train.predict_memory(train.make_config(found), batch, 1, found, torch.device("cuda"))[1]
             for batch in (args.batch, args.batch + 1)]
    assert peaks[0] <= 0.98 * 23 * 2**30 < peaks[1]
    assert train.main(["--fit", "0.5", "--preset", "7b"]) == 2 and "nothing fits" in capsys.readouterr().err
    flags = "--fit 0.5 --dry-run --preset 7b --device cpu --layers 1 --dim 2048 --heads 16"
    assert train.main(flags.split()) == 2 and "one sequence takes more" in capsys.readouterr().err


def test_narrow_states_train(tiny):
    runs = {name: losses(tiny("--states", name, "--steps", 40, out=name)[1]) for name in forging.LAYOUTS}
    for name, narrow in runs.items():
        assert narrow[40] == pytest.approx(runs["fp32"][40], abs=0.1), name
        assert narrow[40] < narrow[1] - 1, name


@pytest.mark.parametrize("rule, warm_up", [("muon", 20), ("adamw", 50), ("adam-mini", 50)])
def test_rates_warm_up_and_end_at_a_tenth(rule, warm_up):
    args = SimpleNamespace(rule=rule, steps=warm_up + 100)
    shares = [train.schedule(step, args) for step in range(args.steps + 10)]
    assert shares[:warm_up] == pytest.approx([(step + 1) / warm_up for step in range(warm_up)])
    assert shares[warm_up] == 1 and shares[warm_up + 50] == pytest.approx(0.55)
    assert shares[warm_up + 100 :] == pytest.approx([0.1] * 10)
    assert all(a > b for a, b in zip(shares[warm_up : args.steps], shares[warm_up + 1 :], strict=False))


def test_default_optimizer_is_what_the_other_flags_allow(tiny, capsys):
    for flags, words in (([], "optimizer forge-cce (no sum"), (["--clip", 0.5], "optimizer forge-cce (no sum"),
                         (["--accum", 2], "optimizer ordinary (--accum 2"),
                         (["--rule", "adamw"], "optimizer forge-cce (no sum"),
                         (["--rule", "adam-mini"], "optimizer forge-cce (no sum"),
                         (["--on-nan", "skip"], "optimizer forge-cce (no sum"),
                         (["--tp", 2, "--device", "cpu"], "optimizer forge-cce (no sum"),
                         (["--loss", "reference"], "optimizer forge (no sum"),
                         (["--states", "int8", "--clip", 0.5], "optimizer forge-cce (for --states int8"),
                         (["--gpus", 2, "--device", "cpu"], "optimizer forge-cce (no sum"),
                         (["--gpus", 2, "--device", "cpu", "--sync", "ddp"], "optimizer ordinary (--sync ddp")):
        args = train.parse([str(flag) for flag in (*TINY, *flags)])
        assert f"optimizer {args.optimizer} ({args.why_optimizer}".startswith(words)
        assert args.clip == ("--rule" in flags) or "--clip" in flags
        assert train.waits(args) == (args.optimizer != "ordinary" and (args.clip > 0 or args.on_nan == "skip"))


def test_checkpoint_of_another_optimizer_is_refused(tiny, capsys, monkeypatch):
    tiny("--states", "master")
    assert tiny("--resume", "--states", "int8")[0] == 2 and "the checkpoint has master" in capsys.readouterr().err
    assert tiny("--resume", "--optimizer", "ordinary")[0] == 2 and "checkpoint has forge-cce" in capsys.readouterr().err
    assert tiny("--resume", "--rule", "adamw")[0] == 2 and "the checkpoint has muon" in capsys.readouterr().err
    assert tiny("--resume", "--loss", "reference")[0] == 2 and "forge-cce with --loss ref" in capsys.readouterr().err

    def older(out, find=train.find_checkpoint):
        record, path = find(out)
        return record | dict(flags=record["flags"] | dict(states="bf16")), path

    monkeypatch.setattr(train, "find_checkpoint", older)
    assert tiny("--resume")[0] == 2 and "--states bf16, which is gone" in capsys.readouterr().err


def test_checkpoint_of_another_version_is_refused(tiny, tmp_path, capsys):
    tiny("--steps", 2)
    for file in train.checkpoint_files(tmp_path / "out"):
        record = json.loads(file.read_text())
        record["format"] -= 1
        record["crc32"] = train.checksum(record, file.with_suffix(".pt").read_bytes())
        file.write_text(json.dumps(record))
    files = sorted((tmp_path / "out").iterdir())
    assert tiny("--resume", "--steps", 4)[0] == 2 and "another version" in capsys.readouterr().err
    assert sorted((tmp_path / "out").iterdir()) == files  # it is not damaged: nothing takes its place


def test_damaged_checkpoint_falls_back_to_the_older(tiny, tmp_path, capsys):
    tiny("--save-every", 3)
    newest, older = (file.with_suffix(".pt") for file in train.checkpoint_files(tmp_path / "out"))
    newest.write_bytes(newest.read_bytes()[:-100])
    status, rows, _ = tiny("--resume")
    assert status == 0 and "damaged" in capsys.readouterr().err and list(losses(rows)) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "out" / "step_00000099.json").write_text("{")  # newer, and damaged: it is not one of the two to keep
    assert tiny("--resume", "--steps", 8, "--save-every", 1)[0] == 0
    assert [int(file.stem[5:]) for file in train.checkpoint_files(tmp_path / "out")] == [8, 7]
    for file in train.checkpoint_files(tmp_path / "out"):
        file.write_text("{")
    assert tiny("--resume")[0] == 2 and "no checkpoint is whole" in capsys.readouterr().err


def test_checkpoint_of_another_model_or_data_is_refused(tiny, tmp_path, capsys):
    tiny()
    assert tiny("--resume", "--layers", 2)[0] == 2 and "--layers 2: the checkpoint has 1" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_bytes(b"spam and eggs " * 10000)
    assert tiny("--resume", "--data", other, "--steps", 9)[0] == 2 and "hash" in capsys.readouterr().err


def test_fresh_run_keeps_the_earlier_one(tiny, tmp_path, capsys):
    first = tiny()[2]
    (tmp_path / "out" / "mine.txt").write_text("not a checkpoint")
    tiny("--seed", 1, out="out/")
    assert "kept the earlier run" in capsys.readouterr().out and (tmp_path / "out" / "mine.txt").exists()
    assert same(weights(tmp_path / "out.1"), first) and not same(weights(tmp_path / "out"), first)


def test_a_full_disk_loses_nothing_that_was_saved(tiny, monkeypatch, capsys):
    """Files may not grow beyond what the checkpoint of step 3 took: the next one says what to do, leaves no half of
    itself, and the run goes on from the one before, to the weights of one that was not disturbed."""
    resource = pytest.importorskip("resource")
    whole, rate, limits = tiny("--save-every", 2, out="whole")[2], train.schedule, resource.getrlimit(1)

    def fill(step, args):
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return rate(step, args)

    assert resource.RLIMIT_FSIZE == 1
    with monkeypatch.context() as patch:
        patch.setattr(train, "schedule", fill)
        try:
            status = tiny("--save-every", 2)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error, out = capsys.readouterr().err, tiny.folder / "out"
    assert status == 2 and "step 6 could not be saved" in error and "go on with python train.py --resume" in error
    assert train.find_checkpoint(out)[0]["step"] == 4 and not list(out.glob("*.tmp"))
    assert tiny("--resume")[0] == 0 and same(weights(out), whole)


def test_two_runs_do_not_share_a_directory(tiny, capsys):
    (tiny.folder / "out").mkdir()
    with train.locked(tiny.folder / "out"):
        assert tiny()[0] == 2 and "another run is writing there" in capsys.readouterr().err
        assert tiny("--dry-run")[0] == 0
    assert tiny()[0] == 0


@pytest.mark.parametrize("change", ["shorter", "other", "touched"])
def test_data_that_changes_under_the_run(tiny, text, monkeypatch, capsys, change):
    """Other bytes, or fewer, end it with one line; a new date alone does not."""
    mine, rate = tiny.folder / "mine.txt", train.schedule
    mine.write_bytes(text.read_bytes())

    def meddle(step, args):
        if step == 4:
            if change == "shorter":
                os.truncate(mine, 1000)
            with mine.open("r+b") as file:
                file.write(b"#" if change == "other" else text.read_bytes()[:1])
            os.utime(mine, (1, 1))
        return rate(step, args)

    monkeypatch.setattr(train, "schedule", meddle)
    status, rows, _ = tiny("--data", mine, "--save-every", 2)
    error = capsys.readouterr().err
    if change == "touched":
        assert status == 0 and len(losses(rows)) == 6
    else:
        assert status == 2 and "mine.txt: was changed while it was trained on" in error and error.count("\n") == 1
        assert train.find_checkpoint(tiny.folder / "out")[0]["step"] == 4


def test_all_workers_killed_at_once_go_on_bitwise(tiny, text):
    """SIGKILL to the parent and both workers, at whatever they do: the resumed run ends with the weights of one that
    was never disturbed."""
    flags, out = ["--device", "cpu", "--gpus", 2, "--inner-steps", 3, "--steps", 90], tiny.folder / "killed"
    whole = tiny(*flags, out="whole")[2]
    command = [sys.executable, "train.py", *TINY, *flags, "--data", text, "--preset", "cpu", "--save-every", 4,
               "--out", out]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not train.checkpoint_files(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 4 <= train.find_checkpoint(out)[0]["step"] < 90
    assert train.main(["--resume", "--device", "cpu", "--gpus", "2", "--out", str(out)]) == 0
    assert same(weights(out), whole)


def test_non_finite_loss_stops_and_keeps_the_last_checkpoint(tiny, tmp_path, capsys, monkeypatch):
    real = train.schedule
    monkeypatch.setattr(train, "schedule", lambda step, args: 1e33 if step == 4 else real(step, args))
    status, _, kept = tiny("--save-every", 2)
    assert status == 1 and "last good checkpoint is step 4" in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_weights_that_are_not_finite_are_never_saved(tiny, capsys, monkeypatch):
    """The update after a finite loss can overflow: that checkpoint would be of no use."""
    monkeypatch.setattr(train, "schedule", lambda step, args: 3e40 if step == 4 else 1)
    status, rows, kept = tiny("--save-every", 1)
    assert status == 1 and "last good checkpoint is step 4" in capsys.readouterr().out
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_the_sample_is_of_few_shapes():
    """The likeliest token after each prefix, found without padding, before and beyond the longest context (80)."""
    torch.manual_seed(0)
    model, prompt = base.GPT(base.GPTConfig(64, 80, 2, 2, 32)).to(DEVICE), list(range(60))
    for p in model.parameters():
        p.data.normal_(std=0.2)  # so that no two tokens are alike
    want = list(prompt)
    with torch.no_grad():
        for _ in range(30):
            E = model(torch.tensor([want[-80:]], device=DEVICE))[0, -1]
            want.append((model.classifier @ E).argmax().item())
    shapes = set()
    model.register_forward_pre_hook(lambda module, inputs: shapes.add(tuple(inputs[0].shape)))
    args = SimpleNamespace(seed=0, sample_tokens=30, sample_top=64, temperature=1e-6, dtype="fp32")
    assert train.generate(model, prompt, args, torch.device(DEVICE)) == want
    assert len(set(want[60:])) > 5 and shapes == {(1, 64), (1, 80)}


def test_sampling_alone(tiny, capsys):
    tiny()
    capsys.readouterr()
    assert tiny("--steps", 0, "--resume", "--sample", "import ")[0] == 0
    first = capsys.readouterr().out
    assert "import " in first and "step" not in first
    tiny("--steps", 0, "--resume", "--sample", "import ")
    assert capsys.readouterr().out == first  # the same seed, the same text
    assert train.decode(train.encode("odd", "bigrams"), "bigrams") == "\nodd"


# --- data ---


def shard(path, tokens, magic=20240520, version=1, dtype="<u2", promised=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if promised is None else promised
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def test_data_formats_hold_the_same_tokens(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 200, 1000)
    raw = tmp_path / "raw.bin"
    raw.write_bytes(tokens.astype("<u2").tobytes())
    plain = tmp_path / "plain.txt"
    plain.write_bytes(tokens.astype("u1").tobytes())
    files = [raw, plain, shard(tmp_path / "a.bin", tokens), shard(tmp_path / "b.bin", tokens, 20240801, 7, "<u4")]
    for file in files:
        assert np.array_equal(train.open_shard(file, "bytes"), tokens), file.name


def test_shards_are_cut_into_windows_that_cover_them(tmp_path):
    parts = [np.arange(100, 135), np.arange(200, 221)]
    data = train.Tokens(["a", "b"], parts, 10, 256)
    x, y = data.windows(range(len(data)))
    assert x.tolist() == [list(range(s, s + 10)) for s in (100, 110, 120, 200, 210)] and torch.equal(y, x + 1)
    order = data.shuffled(0, 10, seed=3)
    assert sorted(order[:5]) == sorted(order[5:]) == list(range(5)) and order == data.shuffled(0, 10, seed=3)
    assert order[3:8] == data.shuffled(3, 5, seed=3)


def test_training_on_a_glob_of_shards_without_bits_per_byte(tiny, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(2):
        shard(tmp_path / f"part{i}.bin", rng.integers(0, 300, 5000))
    status, rows, _ = tiny("--data", tmp_path / "part*.bin", "--vocab", 300)
    assert status == 0 and "bpb" not in rows[2] and abs(rows[1]["val_loss"] - np.log(300)) < 0.2
    assert tiny("--data", tmp_path / "part*.bin", "--vocab", 300, "--val", tmp_path / "part1.bin")[0] == 0
    assert tiny("--data", tmp_path / "part*.bin", "--sample", "x")[0] == 2 and "decoder" in capsys.readouterr().err


BAD_DATA = {
    "unknown: use 20240520": lambda d: shard(d / "x.bin", range(500), magic=20250101),
    "magic 20240520 version 3 is unknown": lambda d: shard(d / "x.bin", range(500), version=3),
    "no whole header": lambda d: os.truncate(shard(d / "x.bin", range(500)), 600) or d / "x.bin",
    "promises 9999 tokens": lambda d: shard(d / "x.bin", range(500), promised=9999),
    "token 499 is outside the vocabulary of 400: pass --vocab 500": lambda d: shard(d / "x.bin", [*range(500)] * 2),
    "pass more data or a smaller --seq": lambda d: shard(d / "x.bin", range(20)),
    "no such file": lambda d: d / "missing.bin",
    "no whole number of uint16": lambda d: (d / "x.bin").write_bytes(b"abc") and d / "x.bin",
    "unknown kind of file": lambda d: (d / "x.csv").write_bytes(b"1,2") and d / "x.csv",
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_bad_data_is_one_clear_line(tiny, tmp_path, capsys, message):
    status = tiny("--data", BAD_DATA[message](tmp_path), "--vocab", 400)[0]
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1, error


BAD_FLAGS = {
    "must be a multiple of 1 processes x 3": ["--accum", 3],
    "must be a multiple of 3 processes": ["--gpus", 3, "--device", "cpu"],
    "--seed -1: must not be negative": ["--seed", -1],
    "drop the flag": ["--tokens", "bytes", "--data", __file__],
    "--steps 0: nothing to train": ["--steps", 0, "--sample", ""],
    "a token is outside the vocabulary of 100": ["--vocab", 100, "--sample", "~"],
    "dim must be a multiple of 2 * heads": ["--heads", 5],
    "--batch 0: must be at least 1": ["--batch", 0], "--gpus 0: must be at least 1": ["--gpus", 0],
    "a plan is for a new run": ["--plan", 1, "--resume"],
    "--lr -1.0: must not be negative": ["--lr", -1],
    "no checkpoint to resume from": ["--resume"],
    "--optimizer forge-cce with --loss reference": ["--optimizer", "forge-cce", "--loss", "reference"],
    "--states int8 with --sync ddp": ["--states", "int8", "--gpus", 2, "--device", "cpu", "--sync", "ddp"],
    "--optimizer forge with --sync ddp": ["--optimizer", "forge", "--gpus", 2, "--device", "cpu", "--sync", "ddp"],
    "with --sync none there are no rounds": ["--inner-steps", 3],
    "--top-k 1: there are no experts": ["--top-k", 1],
    "--moe -1: use 0 (none)": ["--moe", -1],
    "cannot go to more experts": ["--moe", 4, "--top-k", 5],
    "every process has all experts": ["--moe", 4, "--ep-policy", "llep"],
    "use a multiple of 2": ["--moe", 5, "--gpus", 2, "--device", "cpu", "--sync", "ddp", "--batch", 8],
    "biases would go their own way": ["--moe", 4, "--balance", "bias", "--gpus", 2, "--device", "cpu"],
    "--sync streaming needs at least 3": ["--sync", "streaming", "--inner-steps", 2],
    "--states int8 goes with --optimizer forge": ["--optimizer", "ordinary", "--states", "int8"],
    "--muon-lr 0.1 with --rule adamw: there is no Muon": ["--muon-lr", 0.1, "--rule", "adamw"],
    "--fit -1: GiB of a card, above 0": ["--fit", -1], "for a new run: drop --resume": ["--fit", 24, "--resume"],
    "a process has whole heads: use --tp 2": ["--tp", 4, "--device", "cpu"],
    "use --vocab 258": ["--tp", 2, "--vocab", 257, "--device", "cpu"],
    "a worker is 2 of them: use --gpus 4": ["--tp", 2, "--gpus", 3, "--device", "cpu"],
    "use a --dim that 256 divides": ["--tp", 2, "--states", "int8", "--device", "cpu"],
    "and 2 worker(s): use --sync diloco or ddp": ["--tp", 2, "--gpus", 4, "--sync", "none", "--device", "cpu"],
    "and 1 worker(s): use --sync none": ["--tp", 2, "--sync", "diloco", "--device", "cpu"],
    "must be a multiple of 3 workers": ["--tp", 2, "--gpus", 6, "--sync", "ddp", "--device", "cpu"],
    "it chooses flags, for a dense model: drop --tp": ["--plan", 400, "--tp", 2],
    "link=0.0: give a number from": ["--plan", 0], "hosts have 8: use --gpus 16": ["--plan", 1, "--gpus", 12],
    "GiB would do": ["--plan", 1, "--gpus", 4, "--layers", 80, "--dim", 8192, "--heads", 64, "--batch", 64],
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_bad_flags_are_one_clear_line(tiny, capsys, message):
    status = tiny(*BAD_FLAGS[message])[0]
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1, error


def test_more_gpus_than_present_is_one_clear_line(tiny, capsys):
    for flags in (["--gpus", 99], ["--gpus", 99, "--device", "cuda"]):
        assert tiny(*flags)[0] == 2
        error = capsys.readouterr().err
        assert "99 process(es) on GPUs, but this machine has" in error and "--device cpu" in error


# --- train.py: flags that cut or remake ---

FEATURES = {
    "adamw": dict(rule="adamw"), "mini": dict(rule="adam-mini"), "accum": dict(accum=2), "clip": dict(clip=0.5),
    "forge": dict(optimizer="forge"), "forge-cce": dict(optimizer="forge-cce"), "states": dict(states="master"),
    "ddp": dict(sync="ddp"), "diloco": dict(sync="diloco", inner_steps=1), "noloco": dict(sync="noloco", inner_steps=1),
    "tp": dict(tp=2), "moe": dict(moe=4), "ep": dict(moe=4, ep_policy="llep"), "bias": dict(moe=4, balance="bias"),
    "recompute": dict(recompute=True), "offload": dict(offload=True), "cce": dict(loss="cce"),
    "cce-sparse": dict(loss="cce-sparse"), "reference": dict(loss="reference"),
}
# A row's feature with those above it, in their order. "." works, "=" is the same flag twice, a letter is a refusal.
COMPOSES = """
adamw
mini       =
accum      . .
clip       . . .
forge      . . . .
forge-cce  . . . . =
states     . . . . . .
ddp        . . . . s s s
diloco     . . . . . . . =
noloco     . . . . . . . = =
tp         . . . . . . . . . .
moe        . . . . . . . . . . e
ep         . . . . s s s . p p e .
bias       . . . . . . . . b b e . .
recompute  . . . . . . . . . . . . . .
offload    . . . . . . . . . . . . . . .
cce        . . . . . . . . . . v . . . . .
cce-sparse . . . . . . . . . . v . . . . . =
reference  . . . . . f . . . . l . . . . . = =
"""
REFUSALS = {
    "s": "sums gradients that forge never makes: use --sync diloco", "e": "experts would not be cut",
    "p": "every process has all experts: use --gpus N --sync ddp", "b": "biases would go their own way: use --balance",
    "v": "from one whole vocabulary: use --loss cce-exact", "l": "makes all logits: use --loss cce-exact",
    "f": "it takes cce, cce-exact, cce-sparse: use forge",
}
PAIRS = {(row.split()[0], other): sign for row in COMPOSES.split("\n")[1:-1]
         for other, sign in zip(FEATURES, row.split()[1:], strict=False)}
OTHERS = [dict(sync=method, inner_steps=3, tp=2)
          for method in ("gossip", "streaming", "sparseloco", "bagua-c-lp-s", "co2")]
SMALL = "--layers 1 --dim 32 --heads 2 --seq 16 --batch 8 --steps 2 --lr 3e-3 --dtype fp32 --preset cpu --device cpu"


def merged(*features):
    """The flags of these features. Experts can be spread where gradients are summed."""
    flags = {flag: value for feature in features for flag, value in FEATURES[feature].items()}
    return dict(sync="ddp") | flags if "ep_policy" in flags else flags


def uncut(flags):
    """Flags of the run that must have the same losses: all that backward needs is kept, workers are whole, and where
    they sum gradients there is one."""
    rest = {flag: value for flag, value in flags.items() if flag not in ("tp", "recompute", "offload")}
    if rest.get("sync") == "ddp":
        rest = {flag: value for flag, value in rest.items() if flag not in ("sync", "ep_policy")}
        rest["optimizer"] = "ordinary"
    return rest


def processes(flags):
    return (2 if "sync" in flags else 1) * flags.get("tp", 1)


def norm_of_all(self):
    """Of what every process has, too, each copy counts."""
    ordinary = torch.nn.utils.get_total_norm([p.grad for p in self.parameters])
    return self.over_parts(torch.stack((ordinary.double(), self.forged.norm())).norm())


# name: (where, what, the bug, flags whose run must differ from the uncut one's)
CUT_BUGS = {
    "a part's norm": (train.Optimizer, "over_parts", lambda self, norm: norm, merged("tp", "clip")),
    "a norm of copies": (train.Optimizer, "norm", norm_of_all, merged("tp", "clip")),
    "no sum in backward": (parallel, "enter", lambda x, group, sequence=False: x, merged("tp", "recompute")),
    "no sum over workers": (train, "all_reduce_gradients", lambda model, world: None, merged("tp", "ddp")),
}


def run_in_turn(runs):
    """In each of some processes: train.py's runs [(args, a bug or None)], one after the other."""
    for args, bug in runs:
        with pytest.MonkeyPatch.context() as patch:
            if bug:
                patch.setattr(*CUT_BUGS[bug][:3])
                patch.setattr(train, "check_replicas", lambda *replicas: None)  # it would speak first
            if train.run(args):
                sys.exit(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory, text):
    """small(flags, bug=None): rows of that run's log; (parse=True) its flags alone. All runs of several processes are
    made at once, in one launch for each number of processes: a launch takes longer than ten of them."""
    folder, rows = tmp_path_factory.mktemp("small"), {}
    (folder / "val.txt").write_bytes(text.read_bytes()[:65])

    def key(flags, bug=None):
        return (*sorted(flags.items()), bug)

    def parse(flags):
        out = folder / str(len(list(folder.iterdir())))
        out.mkdir()
        words = [word for flag, value in flags.items() for word in (f"--{flag.replace('_', '-')}", value)
                 if word is not True]
        argv = [*SMALL.split(), "--data", text, "--val", folder / "val.txt", "--sample", "", "--out", out, "--log",
                out / "log", "--gpus", processes(flags), *words]
        return train.parse([str(a) for a in argv])

    def read(args):
        return [json.loads(line) for line in Path(args.log).read_text().splitlines()]

    launches = {}
    for pair, sign in PAIRS.items():
        for flags in (merged(*pair), uncut(merged(*pair))) if sign == "." else ():
            launches.setdefault(processes(flags), {})[key(flags)] = flags, None
    for flags in [flags for cut in OTHERS for flags in (cut, uncut(cut))]:
        launches[processes(flags)][key(flags)] = flags, None
    for bug, (*_, flags) in CUT_BUGS.items():
        launches[processes(flags)][key(flags, bug)] = flags, bug
    for count in (2, 4):
        asked = {name: (parse(flags), bug) for name, (flags, bug) in launches[count].items()}
        parallel.spawn(run_in_turn, count, "cpu", (list(asked.values()),))
        rows |= {name: read(args) for name, (args, _) in asked.items()}

    def run(flags, bug=None):
        if key(flags, bug) not in rows:
            args = parse(flags)
            assert train.run(args) == 0
            rows[key(flags)] = read(args)
        return rows[key(flags, bug)]

    run.parse = parse
    return run


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_features_compose_or_are_refused(small, pair):
    """What only changes where things are or who computes them leaves losses and norms as they were."""
    sign, flags = PAIRS[pair], merged(*pair)
    if sign == "=":
        return
    if sign != ".":
        with pytest.raises(ValueError, match=REFUSALS[sign]):
            small.parse(flags)
        return
    found, expected = small(flags), small(uncut(flags))
    assert len(losses(found)) == 2 and losses(found) == pytest.approx(losses(expected), abs=1e-5)
    narrow = flags.get("states") == "master"
    assert norms(found) == pytest.approx(norms(expected), rel=2e-3 if narrow else 2e-5)


@pytest.mark.parametrize("flags", OTHERS, ids=lambda flags: flags["sync"])
def test_cut_workers_synchronise_by_other_methods(small, flags):
    """Each process sends its part; a method that compresses does so in other blocks."""
    found, expected = small(flags), small(uncut(flags))
    assert losses(found) == pytest.approx(losses(expected), abs=1e-5)
    assert found[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], abs=2e-3)


@pytest.mark.parametrize("bug", CUT_BUGS)
def test_cut_twin(small, bug):
    flags = CUT_BUGS[bug][3]
    assert norms(small(flags, bug)) != pytest.approx(norms(small(uncut(flags))), rel=2e-5)


@pytest.mark.parametrize("flags", [
    ["--dim", 256, "--states", "int8", "--rule", "adam-mini", "--clip", 0],
    ["--dim", 32, "--optimizer", "ordinary", "--accum", 2]], ids=["int8", "kept"])
def test_cut_runs_go_on_uncut_and_the_other_way(tiny, capsys, flags):
    """A checkpoint is of the whole model, with the whole optimizer's state. The twin drops that state."""
    flags = ["--device", "cpu", "--save-every", 3, "--log-every", 1, *flags]
    whole = losses(tiny(*flags, out="whole")[1])
    tiny(*flags, "--tp", 2, out="parts")
    for out in ("whole", "parts"):
        os.remove(train.checkpoint_files(tiny.folder / out)[0])
    shutil.copytree(tiny.folder / "parts", tiny.folder / "twin")
    shutil.copy(tiny.folder / "parts.jsonl", tiny.folder / "twin.jsonl")
    more = ["--device", "cpu", "--resume", "--steps", 6, *flags[6:8]]
    assert losses(tiny(*more, out="parts")[1]) == pytest.approx(whole, abs=2e-5)
    assert losses(tiny(*more, "--tp", 2, out="whole")[1]) == pytest.approx(whole, abs=2e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Optimizer, "load_state_dict", lambda self, saved, whole: None)
        assert losses(tiny(*more, out="twin")[1]) != pytest.approx(whole, abs=2e-5)


def test_cut_workers_resume_in_the_middle_of_a_round(tiny, capsys):
    """Bit for bit, with a file for each process; what is not cut is the same in all processes of a worker; and one
    process can look at the model."""
    flags = ["--device", "cpu", "--gpus", 4, "--tp", 2, "--inner-steps", 3, "--steps", 5, "--save-every", 4]
    whole = tiny(*flags, out="whole")[2]
    shutil.copytree(tiny.folder / "whole", tiny.folder / "parts")
    os.remove(train.checkpoint_files(tiny.folder / "parts")[0])
    states = sync_states(tiny.folder / "parts")
    model = base.GPT(base.GPTConfig(256, 32, 1, 2, 32))
    for block in model.blocks:  # a process's part, for the places of parameters in its flat weights
        for name, (rows, columns) in dict(qkv=(2, 1), proj=(1, 2), up=(2, 1), down=(1, 2)).items():
            linear = getattr(block, name)
            part = linear.weight[: linear.out_features // rows, : linear.in_features // columns]
            linear.weight = torch.nn.Parameter(part)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight[:128])
    model.classifier = torch.nn.Parameter(model.classifier[:128])
    places = [place for name, place in low_comm.Flat([model]).place.items() if "norm" in name]
    assert len(states) == 4 and len(places) == 3
    for place in places:
        first, second, third, _ = (state["theta"][:, place] for state in states)
        assert torch.equal(first, second) and not torch.equal(first, third)
    assert tiny("--resume", "--steps", 5, *flags[:6], out="parts")[0] == 0
    assert same(weights(tiny.folder / "parts"), whole)
    capsys.readouterr()
    assert tiny("--resume", "--steps", 0, "--device", "cpu", "--sample", "import ", out="whole")[0] == 0
    assert "import " in capsys.readouterr().out
    for other in (["--gpus", 2], ["--gpus", 2, "--tp", 2]):
        assert tiny("--resume", "--steps", 8, "--device", "cpu", *other, out="whole")[0] == 2
        error = capsys.readouterr().err
        assert "use --gpus 4 --tp 2" in error and error.count("\n") == 1, error


def test_a_lost_part_of_a_worker_ends_the_run(tiny, monkeypatch, capsys):
    monkeypatch.setattr(train, "run_rank", run_and_die)
    flags = ["--device", "cpu", "--gpus", 4, "--tp", 2, "--inner-steps", 2, "--steps", 9, "--save-every", 2]
    assert tiny(*flags)[0] == 128 + signal.SIGKILL
    error = capsys.readouterr().err
    assert "process 1 was ended by signal 9; go on with --resume" in error and error.count("\n") == 1, error
    assert train.find_checkpoint(tiny.folder / "out")[0]["step"] == 4


def verdict_without_one_part(folder):
    """Two workers of two processes each. The exchange of one part breaks; the other part must not land its round."""
    groups = parallel.make_groups(dp=2, tp=2)
    rank, transport = int(os.environ["RANK"]), low_comm.Dist(timeout=30, group=groups.dp)
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


def test_a_verdict_is_of_all_parts(tmp_path):
    parallel.spawn(verdict_without_one_part, 4, "cpu", (tmp_path,))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("way", [[], ["--recompute"], ["--offload"], ["--recompute", "--offload"]], ids="".join)
@pytest.mark.parametrize("optimizer", ["ordinary", "forge-cce"])
def test_predicted_peak_without_what_is_kept(tmp_path, optimizer, way):
    args = train.parse([*"--layers 6 --dim 64 --heads 2 --vocab 256 --preset cpu --device cpu --loss cce-exact".split(),
                        "--optimizer", optimizer, *way])
    config, x = train.make_config(args), torch.zeros(8, 128, dtype=torch.int64)

    def steps():
        model = base.GPT(config)
        if args.recompute:
            parallel.recompute(model)
        optimizer = train.Optimizer(model, args)
        for step in (1, 2):
            optimizer.begin(step, 1e-3)
            offload = parallel.Offload(model, tmp_path) if args.offload else None
            with offload or contextlib.nullcontext():
                loss = train.loss_sum(model, x, x, args, gfs.SparseStats())
            loss.backward()
            if offload:
                offload.close()
            optimizer.finish(optimizer.norm())

    predicted = train.predict_memory(config, 8, 1, args, torch.device("cpu"))[1]
    assert base.peak_bytes(steps, "cpu") == pytest.approx(predicted, rel=0.1)
    assert predicted < 12 * base.MIB or not way


def test_offload_removes_its_files(tiny, monkeypatch):
    found = []
    close = parallel.Offload.close
    monkeypatch.setattr(parallel.Offload, "close", lambda self: (
        close(self), found.append((self.counts["storages"], self.folder))))
    (tiny.folder / "out" / "offload.0").mkdir(parents=True)
    (tiny.folder / "out" / "offload.0" / "7.7.7.saved").write_text("of a run that was killed")
    assert tiny("--offload", "--device", "cpu")[0] == 0
    assert len(found) == 6 and found[0][0] > 10 and found[0][1] == tiny.folder / "out" / "offload.0"
    assert not list((tiny.folder / "out").glob("offload*"))
    assert tiny("--offload", "--device", "cpu", "--dry-run", out="dry")[0] == 0 and not (tiny.folder / "dry").exists()
    (tiny.folder / "out" / "offload.0").mkdir()  # of a run at work: a trial beside it is no reason to remove them
    assert tiny("--offload", "--device", "cpu", "--dry-run")[0] == 0 and (tiny.folder / "out" / "offload.0").exists()


PLANS = {  # link, GPUs, more flags: what is printed
    (400, 64, ""): "--sync ddp --batch 4096 --preset gpt2-small", (25, 16, ""): "--sync diloco --batch 1024",
    (1, 16, "--outer 0.9 0.5"): "--sync streaming --batch 1024 --preset gpt2-small --outer 0.9 0.5",
    (100, 1, "--no-compile --device cpu"): "--gpus 1 --batch 64 --preset gpt2-small --no-compile",
    (400, 1, "--seq 2048"): "--gpus 1 --batch 64 --preset gpt2-small --seq 2048",
    (400, 8, "--layers 24 --dim 4096 --heads 32 --seq 32768 --batch 8"): "--sync ddp --tp 2 --batch 8 --accum 2",
    (400, 8, "--layers 48 --dim 4096 --heads 32 --seq 65536 --batch 4"): "--sync ddp --tp 2 --recompute --batch 4",
}


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_plan_says_what_to_type(capsys, case):
    """Flags that train.py takes, for GPUs that need not be here."""
    link, gpus, more = case
    assert train.main(["--plan", str(link), "--gpus", str(gpus), *more.split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert PLANS[case] in last and last.startswith("type: torchrun --nnodes" if gpus > 8 else "type: python "), last
    train.parse([*last.split("train.py", 1)[1].split(), "--device", "cpu", *(["--gpus", str(gpus)] * (gpus > 8))])


# --- memory ---


def model_and_optimizer(args, device):
    """Of these flags, uncompiled."""
    with device:
        model = base.GPT(train.make_config(args))
    if args.moe:
        moe.with_experts(model)
    return model, train.Optimizer(model, args)


def loss_peak(loss, V, N=1024, D=16):
    """(measured, predicted) bytes of the loss and its backward in train.py's own code, beyond model and activations."""
    args = train.parse(["--loss", loss, "--vocab", str(V), "--device", "cpu", "--dim", str(D), "--heads", "1",
                        "--optimizer", "forge"])
    args.device = DEVICE.type
    x = torch.zeros(8, N // 8, dtype=torch.int64, device=DEVICE)
    E = torch.randn(8, N // 8, D, device=DEVICE)
    model = torch.nn.Module()
    model.classifier = torch.nn.Parameter(torch.randn(V, D, device=DEVICE))
    model.forward = lambda tokens: E.requires_grad_()
    config = base.GPTConfig(V, N // 8, 1, 1, D)

    def step():
        model.classifier.grad = E.grad = None
        train.loss_sum(model, x, x, args, gfs.SparseStats()).backward()

    step()
    model.classifier.grad = E.grad = None
    return base.peak_bytes(step, DEVICE), train.predict_memory(config, 8, 1, args, DEVICE)[0]["loss"]


def test_doubling_the_vocabulary_adds_logits_only_to_the_materialised_loss(monkeypatch):
    monkeypatch.setitem(train.LOSS_WORKSPACE, "cuda", 64 * base.MIB)
    V = 16384 if DEVICE.type == "cpu" else 262144  # on a GPU the cut losses then fill their workspace
    buffer = 4 * 1024 * V  # one more (N, V) buffer in fp32, what doubling V adds to each
    growth = {}
    for loss in ("cce-exact", "reference"):
        (small, predicted_small), (large, predicted_large) = loss_peak(loss, V), loss_peak(loss, 2 * V)
        growth[loss] = large - small, predicted_large - predicted_small
    assert growth["cce-exact"][0] < 0.1 * buffer
    if DEVICE.type == "cpu":  # a GPU's workspace hides what so small a D adds
        assert growth["cce-exact"][0] == pytest.approx(growth["cce-exact"][1], rel=0.1)
    # Watched by LiveBytes, autograd adds in a buffer of its own: four where the prediction and a GPU have three.
    assert 2.9 * buffer < growth["reference"][0] < 4.2 * buffer and growth["reference"][1] > 2.9 * buffer


@pytest.mark.parametrize("flags", [
    "--optimizer ordinary", "--optimizer ordinary --rule adamw", "--rule adamw --optimizer forge --states int8",
    *(f"--optimizer {name} --states {states}" for name in ("forge", "forge-cce") for states in forging.LAYOUTS),
    "--moe 4", "--moe 4 --optimizer ordinary", "--moe 4 --optimizer forge --states int8 --rule adamw",
])
def test_predicted_bytes_of_weights_and_optimizer(flags):
    """To the byte: nothing is estimated in them."""
    args = train.parse([*"--layers 2 --dim 128 --heads 2 --seq 16 --vocab 256 --device cpu".split(), *flags.split()])
    device, x = torch.device("cpu"), torch.zeros(2, 16, dtype=torch.int64)
    model, optimizer = model_and_optimizer(args, device)
    optimizer.begin(1, 1.0)
    train.loss_sum(model, x, x, args, gfs.SparseStats()).backward()
    optimizer.finish(optimizer.norm())
    held = [t for state in optimizer.ordinary.state.values() for name, t in state.items() if name != "step"]
    forged = optimizer.forged.states if optimizer.forged else {}
    held += [t for state in forged.values() for t in state.tensors.values()]
    parts = train.predict_memory(train.make_config(args), 2, 1, args, device)[0]
    assert parts["parameters"] == sum(p.nbytes for p in model.parameters())
    assert parts["optimizer"] == sum(t.nbytes for t in held)


@pytest.mark.parametrize("tokens", [4, 32, 512])  # of a micro-batch
@pytest.mark.parametrize("accum", [1, 2])
def test_predicted_bytes_of_what_waits(tokens, accum):
    """Factors of few tokens, gradients in fp32 of many, and at 32 some of both."""
    flags = "--layers 2 --dim 128 --heads 2 --seq 4 --vocab 256 --device cpu --clip 1 --optimizer forge-cce --accum"
    args = train.parse([*flags.split(), str(accum)])
    model, optimizer = model_and_optimizer(args, torch.device("cpu"))
    optimizer.begin(1, 1.0)
    for _ in range(accum):
        x = torch.randint(256, (tokens // 4, 4))
        train.loss_sum(model, x, x, args, gfs.SparseStats()).backward()
    kept = forging.factor_bytes(f for state in optimizer.forged.states.values() for f in state.factors)
    assert kept == sum(train.factor_sizes(train.make_config(args), tokens * accum, args)[2:])


@needs_gpu
@pytest.mark.parametrize("loss, optimizer, states", [
    *((loss, "ordinary", "fp32") for loss in train.LOSSES), ("cce-exact", "ordinary --rule adamw", "fp32"),
    ("cce-exact", "forge-cce --rule adamw --clip 0", "fp32"), ("cce-exact", "forge --rule adamw", "int8"),
    *(("cce-exact", optimizer, states) for optimizer in ("forge", "forge-cce") for states in forging.LAYOUTS),
    ("cce-sparse", "forge-cce", "int8"), ("cce-exact", "forge --clip 1", "fp32"),
    ("cce-exact", "forge-cce --clip 1", "master"), ("cce-exact", "ordinary --moe 8", "fp32"),
    ("cce-exact", "forge-cce --moe 8", "master"),
])
def test_predicted_peak_of_a_training_step(loss, optimizer, states):
    args = train.parse(["--loss", loss, "--batch", "8", "--layers", "4", "--seq", "512", "--states", states,
                        "--optimizer", *optimizer.split()])
    config = train.make_config(args)
    x = torch.zeros(8, 512, dtype=torch.int64, device=DEVICE)
    torch.compiler.reset()  # or all these models together are more than it compiles one function for

    def steps():
        model, optimizer = model_and_optimizer(args, DEVICE)
        if args.compile:
            parallel.lean(model)
        for step in (1, 2):
            optimizer.begin(step, 1e-3)
            train.loss_sum(model, x, x, args, gfs.SparseStats()).backward()
            optimizer.finish(optimizer.norm())

    predicted = train.predict_memory(config, 8, 1, args, DEVICE)[1]
    if loss == "cce-sparse":  # predicted with room for an exact step, which tokens that are all the same never need
        shape = 8 * args.seq, args.vocab, args.dim
        capacity = gfs.capacity_for(shape[0], train.CANDIDATES)
        sparse = gfs.sparse_bytes(*shape, torch.bfloat16, capacity, sink=optimizer == "forge-cce")
        predicted -= train.loss_plan(*shape, args, DEVICE).beyond - sparse
    assert base.peak_bytes(steps, DEVICE) == pytest.approx(predicted, rel=0.1)


# ==== Last, what has been running beside all these: the stages' scripts, and their planted bugs =======================


@pytest.mark.parametrize("stage", STAGES)
def test_stage_runs(stage, beside):
    """Whatever the clock says: who runs the tests may use the machine for more than them."""
    result = beside[stage].result()
    missed = [line.split("|")[0] for line in result.stdout.splitlines() if line.endswith("| NO")]
    assert all(claim.rstrip().endswith(": time") for claim in missed), result.stdout + result.stderr
    assert result.returncode == bool(missed), result.stdout + result.stderr
    assert ("next: python" in result.stdout) != bool(missed)
    figures.chosen_lines(result.stdout, {"": figures.HEADLINES[stage][""]})  # raises if one is not printed


@pytest.mark.parametrize("stage, bug", [(stage, bug) for stage, module in STAGES.items() for bug in module.BREAKS])
def test_planted_bug_is_caught(stage, bug, beside):
    if bug in NEED_HOPPER and not (base.INTERPRETED or cce.is_hopper(DEVICE)):
        pytest.skip("needs a Hopper GPU, or the interpreter")
    result = beside[stage, bug].result()
    output = result.stdout + result.stderr
    assert f"--break {bug}: caught by check_" in output, output
    assert result.returncode == ("--break" in result.args), output
