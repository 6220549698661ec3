"""Print tables, and draw README's pictures, from the files that .ci/figures leaves in a folder.

    python .ci/report.py WORK runs speed     a table of the runs whose names begin with "speed"
    python .ci/report.py WORK sizes          a table of the dry runs of .ci/figures sizes
    python .ci/report.py WORK pictures       .figures/memory.svg and .figures/loss.svg

A run has two files: NAME.txt is its output. NAME.jsonl is its log, if the program writes one.
"""

import itertools
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

if len(sys.argv) < 3:
    sys.exit(__doc__)
WORK = Path(sys.argv[1])
PICTURES = Path(__file__).resolve().parent.parent / ".figures"


# ---- What a run did ------------------------------------------------------------------------------


@dataclass
class Run:
    losses: list = ()              # of each step
    seconds: list = ()             # of each step
    untimed: int = 10              # so many steps at the beginning, because some of them compile
    late: int = 1                  # 0: the last step is timed, too
    tokens: float = math.nan       # in a step
    validation: float = math.nan   # loss at the end
    parameters: float = math.nan   # millions
    peak: float = math.nan         # MiB, the allocator's
    predicted: float = math.nan    # the same, by train.py
    sent: float = 0.0              # GB of a worker
    waited: float = 0.0            # seconds of a worker
    parts: dict = field(default_factory=dict)  # MiB of the peak, by .ci/peak.py or by train.py

    def timed(self):
        """Return the seconds of the steps that are timed."""
        return self.seconds[self.untimed : len(self.seconds) - self.late] or self.seconds

    @property
    def step(self):
        """The mean of the timed steps, in seconds.

        On a GPU, train.py reads a step when the next one is launched. So the log's last step seems
        to take no time.
        """
        return statistics.fmean(self.timed())

    @property
    def speed(self):
        """Tokens per second."""
        return self.tokens / self.step

    def elapsed(self):
        """Return the seconds at the end of each step. A step that is not timed takes the mean."""
        steps = [self.step] * self.untimed + self.timed() + [self.step] * self.late
        return list(itertools.accumulate(steps))


def first(pattern, text):
    """Return the first number that the pattern's group finds, or NaN."""
    found = re.search(pattern, text, re.M)
    return float(found[1].replace(",", "")) if found else math.nan


def measured(category, text):
    """Return the measured MiB of a category from the table that ends train.py's output, or NaN."""
    return first(rf"^{category} +[\d,]+ +([\d,]+)$", text)


def output_of(name):
    return (WORK / f"{name}.txt").read_text(errors="replace")


def read_run(name):
    """Read a run of train.py or .ci/nanochat.py, which write a log, or of nanoGPT."""
    text = output_of(name)
    log = WORK / f"{name}.jsonl"
    run = Run()
    run.parameters = first(r"([\d.,]+) ?M(?: parameters|$)", text)
    if name.startswith("gpus"):
        run.untimed = 30  # the first round of independent workers waits for the one that compiles

    if log.exists():
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [row for row in rows if "loss" in row]
        run.losses = [row["loss"] for row in steps]
        run.seconds = [row["seconds"] for row in steps]
        run.tokens = steps[0]["tok_s"] * run.seconds[0]
        run.validation = [row["val_loss"] for row in rows if "val_loss" in row][-1]
        run.peak = steps[-1].get("peak_mib", math.nan)
        run.predicted = first(r"predicted MiB.*peak ([\d,]+):", text)
        weights = measured("parameters", text) + measured("optimizer", text)
        logits = measured("loss", text)
        run.parts = dict(weights=weights, logits=logits, activations=run.peak - weights - logits)
        run.sent = steps[-1].get("sent_mb", 0.0) / 1e3
        if "blocked" in steps[-1]:  # an independent worker: it reads each step at once
            run.waited = steps[-1]["blocked"]
            run.late = 0
        if "ddp" in name:  # two workers: each sends an fp32 gradient once in each step
            run.sent = 4e-3 * run.parameters * len(steps)
    else:
        # nanoGPT ends with a step more than it was asked for.
        steps = re.findall(r"^iter \d+: loss (\S+), time ([\d.]+)ms", text, re.M)[:-1]
        run.losses = [float(loss) for loss, _ in steps]
        run.seconds = [float(time) / 1e3 for _, time in steps]
        run.tokens = first(r"tokens per iteration will be: ([\d,]+)", text)
        run.validation = first(r"^step [1-9]\d*: .*val loss ([\d.]+)", text)
        run.peak = first(r"^peak MiB ([\d.]+)", text)
    for part, size in re.findall(r"^peak of (\w+) ([\d.]+)", text, re.M):  # by .ci/peak.py
        run.parts[part] = float(size)
    return run


def runs(beginning):
    names = sorted(path.stem for path in WORK.glob(f"{beginning} *.txt"))
    print(
        "| run | tokens/s | by the median step | beside the first | peak MiB | predicted "
        "| validation loss | steps | in seconds | GB sent | s waited |"
    )
    base = None
    for name in names:
        run = read_run(name)
        base = base or run.speed
        print(
            f"| {name} | {run.speed:,.0f} | {run.tokens / statistics.median(run.timed()):,.0f} "
            f"| {run.speed / base:.2f} x | {run.peak:,.0f} "
            f"| {run.predicted:,.0f} | {run.validation:.4f} | {len(run.losses)} "
            f"| {run.elapsed()[-1]:.1f} | {run.sent:.1f} | {run.waited:.2f} |"
        )


def sizes():
    print("| run | billion parameters | peak MiB | predicted | speed |")
    rows = []
    for path in WORK.glob("size *.txt"):
        text = output_of(path.stem)
        size = first(r"([\d.,]+) M parameters", text) / 1e3
        predicted = first(r"^peak +([\d,]+)", text)
        speed = re.search(r"^speed +(.*?)(?: \(.*)?$", text, re.M)
        peaks = f"{measured('peak', text):,.0f} | {predicted:,.0f}"
        row = f"{size:.2f} | {peaks} | {speed[1] if speed else ''} |"
        rows.append((size, f"| {path.stem[5:]} | {row}"))
    for _, row in sorted(rows):
        print(row)


# ---- Pictures ------------------------------------------------------------------------------------

# Colours of a picture on a light page and on a dark one. A browser takes those of its own setting.
STYLE = """
  text { fill: #1f2328; font: 15px system-ui, -apple-system, "Segoe UI", Arial, sans-serif }
  .title { font-size: 19px; font-weight: 600 }
  .small { font-size: 14px; fill: #59636e }
  .strong { font-weight: 600 }
  .inside { fill: #ffffff; font-weight: 600 }
  .page { fill: #ffffff; stroke: #d1d9e0 }
  .grid { fill: none; stroke: #d1d9e0 }
  .weights { fill: #8250df } .logits { fill: #cf222e } .activations { fill: #6e7781 }
  .line { fill: none; stroke-width: 2.5; stroke-linejoin: round }
  .nanoGPT { stroke: #9a6700; stroke-dasharray: 8 4 }
  .nanochat { stroke: #1a7f37; stroke-dasharray: 2 4 }
  .bytewise { stroke: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .small { fill: #9aa4af }
    .page { fill: #0d1117; stroke: #3d444d }
    .grid { stroke: #30363d }
    .nanoGPT { stroke: #d29922 } .nanochat { stroke: #3fb950 } .bytewise { stroke: #58a6ff }
  }
"""


def write(name, title, description, height, body):
    """Write a picture of 800 x height. Title and description are what a screen reader says."""
    PICTURES.mkdir(exist_ok=True)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{height}" '
        f'viewBox="0 0 800 {height}" role="img" aria-labelledby="title text">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="text">{escape(description)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="799" height="{height - 1}" rx="8"/>',
        text(24, 36, title, "title"),
        *body,
        "</svg>",
    ]
    path = PICTURES / f"{name}.svg"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.name}: {description}")


def text(x, y, words, style="", anchor="start"):
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x, y, width, height, style):
    return f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'


def memory():
    """Draw a bar per program: what is alive at the peak of a training step."""
    programs = {
        "nanoGPT": read_run("memory 0 nanoGPT"),
        "nanochat": read_run("memory 1 nanochat"),
        "bytewise": read_run("speed 1 default"),
    }
    labels = {
        "weights": "weights and optimizer",
        "logits": "logits, or what the loss needs instead",
        "activations": "activations and the rest",
    }
    left, top, height = 110, 78, 52
    scale = 560 / max(run.peak for run in programs.values())  # pixels per MiB
    tokens = round(programs["nanoGPT"].tokens)
    words = f"12 layers of width 768, {tokens:,} tokens, 50,304 classes. M: million parameters."
    body = [text(24, 59, words, "small")]

    said = []
    for row, (name, run) in enumerate(programs.items()):
        y = top + height * row
        x = left
        body += [text(24, y + 15, name), text(24, y + 32, f"{run.parameters:.0f} M", "small")]
        for part in labels:
            width = run.parts[part] * scale
            body.append(bar(x, y, width, 32, part))
            if width > 60:
                middle = f"{x + width / 2:.1f}"
                body.append(text(middle, y + 21, f"{run.parts[part]:,.0f}", "inside", "middle"))
            x += width
        body.append(text(f"{x + 8:.1f}", y + 21, f"{run.peak:,.0f} MiB", "strong"))
        parts = ", ".join(f"{part} {run.parts[part]:,.0f}" for part in labels)
        said.append(f"{name} {run.peak:,.0f} MiB ({parts}).")

    y = top + height * len(programs) + 8
    for x, (part, label) in zip((24, 214, 520), labels.items(), strict=True):
        body += [bar(x, y, 14, 14, part), text(x + 21, y + 12, label, "small")]
    write("memory", "Memory at the peak of a training step", " ".join(said), y + 38, body)


def loss():
    """Draw training loss, as means of ten steps, against seconds without compilation."""
    chats = [read_run(path.stem) for path in WORK.glob("loss * nanochat *.jsonl")]
    programs = {
        "nanoGPT": read_run("loss 0 nanoGPT"),
        "nanochat": min(chats, key=lambda run: run.validation),
        "bytewise": read_run("loss 1 default"),
    }
    left, right, top, bottom = 62, 690, 84, 344
    seconds = max(run.elapsed()[-1] for run in programs.values())
    curves = {}
    for name, run in programs.items():
        elapsed = run.elapsed()
        curves[name] = []
        for i in range(10, len(run.losses) + 1, 10):
            curves[name].append((elapsed[i - 1], statistics.fmean(run.losses[i - 10 : i])))
    highest = max(y for curve in curves.values() for _, y in curve)
    lowest = 0.85 * min(y for curve in curves.values() for _, y in curve)  # room for a label

    def x_of(second):
        return left + (right - left) * second / seconds

    def y_of(value):  # logarithmic
        share = (math.log(value) - math.log(lowest)) / (math.log(highest) - math.log(lowest))
        return bottom - (bottom - top) * share

    steps = len(programs["bytewise"].losses)
    tokens = round(programs["bytewise"].tokens)
    words = f"{steps} steps of {tokens:,} tokens of Python code. Lower is better. Log scale."
    body = [text(24, 59, words, "small")]
    for value in (1.5, 2, 3, 4, 6, 8, 11):
        if lowest <= value <= highest:
            body.append(f'<path class="grid" d="M{left} {y_of(value):.1f}H{right}"/>')
            body.append(text(left - 9, f"{y_of(value) + 5:.1f}", f"{value:g}", "small", "end"))
    for second in range(0, math.ceil(seconds), 5):
        body.append(f'<path class="grid" d="M{x_of(second):.1f} {bottom + 10}v6"/>')
        body.append(text(f"{x_of(second):.1f}", bottom + 33, f"{second}", "small", "middle"))
    body.append(text((left + right) // 2, bottom + 54, "seconds", "small", "middle"))

    said = []
    target = curves["nanoGPT"][-1][1]  # where nanoGPT ends
    for name, curve in curves.items():
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)
        body.append(f'<polyline class="line {name}" points="{points}"/>')
        x, y = curve[-1]
        if name == "bytewise":  # below the line, because nanochat's name is beside it
            body.append(text(f"{x_of(x):.1f}", f"{y_of(y) + 22:.1f}", name, "strong", "end"))
        else:
            body.append(text(f"{x_of(x) + 8:.1f}", f"{y_of(y) + 5:.1f}", name, "strong"))
        for passed, value in curve:
            if value <= target:
                said.append(f"{name} is at {target:.2f} after {passed:.1f} s.")
                break
        said.append(f"{name} ends at {y:.2f} after {x:.1f} s.")
    write("loss", "Training loss against seconds", " ".join(said), bottom + 70, body)


if __name__ == "__main__":
    what = sys.argv[2]
    if what == "runs" and len(sys.argv) > 3:
        runs(sys.argv[3])
    elif what == "sizes":
        sizes()
    elif what == "pictures":
        memory()
        loss()
    else:
        sys.exit(__doc__)
