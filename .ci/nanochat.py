"""Train nanochat's model with nanochat's optimizer, on the batches of train.py.

    python .ci/nanochat.py ../nanochat train.bin val.bin --rate 8 --log out.jsonl

`.ci/figures headline` calls this. gpt.py and optim.py are nanochat's, as they are (tried with its
commit 92d63d4). What its scripts/base_train.py does around them is repeated here by its formulas
for 12 layers: rates and decay that depend on the batch, warm-up and warm-down, Muon's momentum and
decay over time. Its rates are tuned for longer runs; --rate multiplies those that base_train.py
sets. Attention sees the full context, because sliding windows need FlashAttention 3, which nanochat
downloads. The log has the rows of train.py's.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("nanochat", help="a checkout of github.com/karpathy/nanochat")
parser.add_argument("train", help="raw uint16 tokens")
parser.add_argument("val", help="the same, for validation")
parser.add_argument("--log", required=True)
parser.add_argument("--vocab", type=int, default=65536)
parser.add_argument("--batch", type=int, default=32, help="sequences per step")
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--depth", type=int, default=12, help="layers; the width is 64 times as much")
parser.add_argument("--rate", type=float, default=1.0, help="multiplies its rates")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--cudnn", action="store_true", help="attention by cuDNN")
args = parser.parse_args()

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
sys.path[:0] = [args.nanochat, str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from nanochat.gpt import GPT, GPTConfig  # noqa: E402

import train  # noqa: E402

torch.manual_seed(args.seed)
torch.set_float32_matmul_precision("high")
if args.cudnn and torch.cuda.is_available():
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dim = 64 * args.depth
heads = dim // 128
with torch.device("meta"):
    model = GPT(GPTConfig(args.seq, args.vocab, args.depth, heads, heads, dim, "L"))
model.to_empty(device=device)
model.init_weights()
compiled = torch.compile(model, dynamic=False)

# Its rates and its decay are tuned for steps of 2^19 tokens.
tokens = args.batch * args.seq
batch_scale = math.sqrt(tokens / 2**19)
decay = 0.28 * batch_scale
optimizer = model.setup_optimizer(
    unembedding_lr=0.008 * batch_scale * args.rate,
    embedding_lr=0.3 * batch_scale * args.rate,
    matrix_lr=0.02 * batch_scale * args.rate,
    scalar_lr=0.5 * batch_scale * args.rate,
    weight_decay=decay,
)
down = round(0.65 * args.steps)  # steps of the warm-down


def rate_at(step):
    """Return the share of the peak rates: a warm-up of 40 steps, and a line down to 0.05."""
    left = min(1.0, (args.steps - step) / down)
    return min(1.0, (step + 1) / 40, left + (1 - left) * 0.05)


def momentum_at(step):
    """Return Muon's momentum: up from 0.85 to 0.97 in 400 steps, later down to 0.90."""
    if step < 400:
        return 0.85 + (0.97 - 0.85) * step / 400
    progress = max(0.0, (step - args.steps + down) / down)
    return 0.97 + (0.90 - 0.97) * progress


def windows_of(path):
    return train.Tokens([train.open_shard(path, None)], args.seq, args.vocab)


def batch_of(data, numbers):
    """Return inputs and targets (B, T) of these windows, on the device."""
    return [part.contiguous().to(device) for part in data.windows(numbers)]


print(f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters", flush=True)
data = windows_of(args.train)
rows = []
for step in range(args.steps):
    sequences = range(step * args.batch, (step + 1) * args.batch)
    x, y = batch_of(data, data.shuffled(sequences, args.seed))

    began = time.perf_counter()  # reading the batch is not timed here; train.py's times include it
    loss = compiled(x, y)
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate_at(step)
        if group["kind"] == "muon":
            group["momentum"] = momentum_at(step)
            group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / args.steps))
    optimizer.step()
    model.zero_grad(set_to_none=True)
    loss = loss.item()  # waits for the device
    seconds = time.perf_counter() - began

    row = dict(step=step + 1, loss=loss, seconds=seconds, tok_s=tokens / seconds)
    row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    rows.append(row)
    if step % 10 == 0:
        print(row, flush=True)

# Validate on the windows of train.py. The model is not compiled here, because compiling would take
# longer than it saves.
held = windows_of(args.val)
count = min(len(held), train.VALIDATION_TOKENS[device.type] // args.seq)
total = 0.0
with torch.no_grad():
    for start in range(0, count, 8):
        numbers = range(count)[start : start + 8]
        total += model(*batch_of(held, numbers)).item() * len(numbers)
rows.append(dict(step=args.steps, val_loss=total / count))
print(rows[-1])
Path(args.log).write_text("".join(json.dumps(row) + "\n" for row in rows))
