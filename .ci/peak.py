"""Run a script, and print what the GPU's memory held at its peak.

    python .ci/peak.py LOGITS SCRIPT ARGUMENTS

LOGITS is the number of tokens in a step, times classes, times 2: the bytes of its logits in bf16.
The allocator records each allocation. (With LOGITS = 0 it does not, and only the peak is printed.)
Each allocation that is alive at the peak belongs to one of these parts. The script has to train a
few steps more after the step that has the peak.

    weights      it is still alive when memory is lowest, before the next step's peak: weights and
                 the optimizer's states
    logits       it is at least 0.9 x LOGITS large: logits, and copies and gradients of them
    activations  all others
"""

import runpy
import sys
from pathlib import Path


def parts_at_peak(events, logits):
    """Return {part: MiB} at the peak of a trace.

    events  the allocator's: dicts with "action", "addr" and "size"
    logits  bytes of the logits in bf16
    """
    total = 0
    totals = []
    for event in events:
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        totals.append(total)

    # After the peak, memory falls until the step ends. The next step raises it almost to the peak.
    highest = max(totals)
    peak = totals.index(highest)
    lowest = peak
    for i in range(peak, len(totals)):
        if totals[i] < totals[lowest]:
            lowest = i
        if totals[lowest] < 0.7 * highest and totals[i] > 0.95 * highest:
            break

    alive = {}
    for event in events[: peak + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)  # if it was allocated before the trace began

    freed = set()
    for event in events[peak : lowest + 1]:
        if event["action"] == "free_completed":
            freed.add(event["addr"])

    parts = dict.fromkeys(("weights", "logits", "activations"), 0.0)
    for address, size in alive.items():
        if size >= 0.9 * logits:
            part = "logits"
        elif address in freed:
            part = "activations"
        else:
            part = "weights"
        parts[part] += size / 2**20
    return parts


def main():
    import torch

    logits = float(sys.argv.pop(1))
    sys.argv.pop(0)
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    on_gpu = torch.cuda.is_available()
    if on_gpu and logits:
        torch.cuda.memory._record_memory_history(context=None)  # None: without Python's stacks
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if on_gpu:
        print("peak MiB", torch.cuda.max_memory_allocated() / 2**20)
    if on_gpu and logits:
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        for part, size in parts_at_peak(events, logits).items():
            print("peak of", part, size)


if __name__ == "__main__":
    main()
