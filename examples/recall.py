"""Recall over byte text: which share of the keys does attention need, to answer as well as over all of them?

    python -m examples.recall                                # from the root of the repository; 3 minutes on a CPU
    python -m examples.recall --device cuda --batch 32 --keys 256 --seeds 0 1 2 \\
        --lengths 24 192 1024 4096 --steps 450 80 40 80

Text is source of the Python standard library. In it 8 pairs are planted at random distances up to its length, each a
byte that marks it, a key and a value; after the text all keys are asked, in random order, and the model says the
values. It has one causal convolution over four bytes, one layer of attention and one MLP; what differs is which keys
attention sees. On texts of at most `--keys` bytes every choice sees them all, so that each seed begins with one model,
trained on these; each kind goes on from it on longer texts by its own choice of `--keys` keys, and answers about texts
of other files, by several numbers of keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer as gs
from examples.language_model.data import Text, load_text
from examples.language_model.train import learning_rate, optimizer, precision

KINDS = ("dense", "sparsek", "blocks", "window", "random")
PAIRS, ASKED, SYMBOLS = 8, 8, 64
MARK, QUESTION = 1, 2  # bytes that text does not hold
BLOCK = 64  # of queries and keys, of "blocks"
WINDOW = 15  # keys before a query, of "sparsek" and "random"


class Batch(NamedTuple):
    """Tokens (B, length + 3 * ASKED) int64; where the keys are asked, the values (B, ASKED), and their distances."""

    tokens: Tensor
    values: Tensor
    distances: Tensor


def draw(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Texts with planted pairs and the questions behind them."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
    body = text[starts + torch.arange(length)].long()
    slots = torch.rand(batch, length // 3, generator=generator).argsort(1)[:, :PAIRS] * 3
    symbols = torch.rand(batch, SYMBOLS, generator=generator).argsort(1)[:, :PAIRS] + 48
    values = torch.randint(48, 48 + SYMBOLS, (batch, PAIRS), generator=generator)
    for offset, planted in enumerate((torch.full_like(values, MARK), symbols, values)):
        body.scatter_(1, slots + offset, planted)
    asked = slice(0, ASKED)  # the pairs lie in random order
    questions = torch.stack((torch.full_like(values, QUESTION), symbols, values), 2)[:, asked].flatten(1)
    at = length + 3 * torch.arange(ASKED) + 1
    return Batch(torch.cat((body, questions), 1), values[:, asked], at - (slots[:, asked] + 2))


class Attention(nn.Module):
    """Attention over all keys before, the last ones, blocks that are chosen by their scores, or random keys."""

    def __init__(self, kind: str, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.kind, self.keys, self.heads, self.kv_heads = kind, 0, heads, kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // heads * kv_heads, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads)
        q, k, v = (linear(x).unflatten(-1, (n, -1)).transpose(1, 2) for linear, n in heads)
        if self.kind == "dense":
            out = gs.attention_forward(q, k, v, causal=True)
        elif self.kind == "window":
            out = gs.attention(q, k, v, gs.SlidingWindow.of_size(self.keys))
        elif self.kind == "blocks":
            topk = max(1, self.keys // BLOCK)
            out = gs.attention(q, k, v, gs.topk_blocks(q, k, causal=True, topk=topk, block_size=BLOCK, first=0))
        else:
            u = torch.rand(k.shape[:3], device=x.device)
            out = gs.sparsek_attention(q, k, v, u, k_keep=self.keys - WINDOW - 1, window=WINDOW, gate=None)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Logits (B, ASKED, 256) of the values that are asked, from tokens (B, N)."""

    def __init__(self, kind: str, o: argparse.Namespace) -> None:
        super().__init__()
        width = o.width
        self.embedding = nn.Embedding(256, width)
        self.convolution = nn.Conv1d(width, width, 4, groups=width)
        self.attention: Attention | gs.nn.SparseKAttention
        if kind == "sparsek":
            self.attention = gs.nn.SparseKAttention(width, o.heads, o.kv_heads, k_keep=1, window=WINDOW)
        else:
            self.attention = Attention(kind, width, o.heads, o.kv_heads)
        hidden = nn.Linear(width, 4 * width, bias=False), nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(*hidden, nn.Linear(4 * width, width, bias=False))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.head = nn.Linear(width, 256, bias=False)

    def see(self, keys: int) -> None:
        """From now on a question attends so many keys; in dense attention all."""
        if isinstance(self.attention, Attention):
            self.attention.keys = keys
        else:
            self.attention.k_keep = keys - WINDOW - 1

    def forward(self, tokens: Tensor) -> Tensor:
        norms = iter(self.norms)
        x = self.embedding(tokens)
        x = x + self.convolution(F.pad(next(norms)(x).mT, (3, 0))).mT
        x = x + self.attention(next(norms)(x))
        x = x[:, 1 - 3 * ASKED :: 3]  # the keys that are asked
        x = x + self.mlp(next(norms)(x))
        return self.head(next(norms)(x))


class Row(NamedTuple):
    """What one model answered by one number of keys."""

    kind: str
    seed: int
    keys: int  # that a question attends
    length: int
    share: float  # of the keys before a question
    accuracy: float
    by_distance: list[float]  # of four equal ranges of distances, nearest first
    seconds: float  # of the training


def fits(length: int, o: argparse.Namespace) -> bool:
    """Whether each question sees a whole text, whatever is chosen."""
    return length + 3 * ASKED <= o.keys


def train(
    model: Model, kind: str, seed: int, lengths: list[tuple[int, int]], text: Text, o: argparse.Namespace
) -> float:
    """Trains in place on (length, steps), prints a line for each, and returns the seconds."""
    device, generator = torch.device(o.device), torch.Generator().manual_seed(seed)
    adam, total, done, started = optimizer(model, o.lr), sum(steps for _, steps in lengths), 0, time.perf_counter()
    for length, steps in lengths:
        losses: list[Tensor] = []
        for _ in range(steps):
            for group in adam.param_groups:
                group["lr"] = learning_rate(done, total, o.lr)
            batch = draw(text.train, o.batch, length, generator)
            with precision(device):
                logits = model(batch.tokens.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.values.flatten().to(device))
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            losses.append(loss.detach())
            done += 1
        last = torch.stack(losses[-20:]).mean().item() if losses else float("nan")
        told = f"{kind:8} seed {seed}  length {length:5}  {steps:4} steps  loss {last:.3f}"
        print(f"{told}  {time.perf_counter() - started:5.0f} s", flush=True)
    return time.perf_counter() - started


@torch.no_grad()
def ask(model: Model, text: Text, length: int, o: argparse.Namespace) -> tuple[float, list[float]]:
    """The share of right answers about texts of other files, of all and by distance."""
    device, generator = torch.device(o.device), torch.Generator().manual_seed(12345)  # the same for every model
    right, far = [], []
    for _ in range(o.texts // o.batch):
        batch = draw(text.validation, o.batch, length, generator)
        with precision(device):
            answers = model(batch.tokens.to(device)).argmax(-1).cpu()
        right.append((answers == batch.values).double().flatten())
        far.append(batch.distances.flatten() * 4 // (length + 3 * ASKED))
    hits, quarter = torch.cat(right), torch.cat(far)
    return hits.mean().item(), [hits[quarter == i].mean().item() for i in range(4)]


def rows_of(seed: int, text: Text, o: argparse.Namespace) -> Iterator[Row]:
    """A model on short texts, what becomes of it by each kind, and the answers by every number of keys."""
    lengths = list(zip(o.lengths, o.steps, strict=True))
    torch.manual_seed(seed)
    first = Model("dense", o).to(o.device)
    train(first, "all", seed, [(length, steps) for length, steps in lengths if fits(length, o)], text, o)
    everything = o.lengths[-1] + 3 * ASKED
    for kind in o.kinds:
        torch.manual_seed(seed)
        model = Model(kind, o).to(o.device)
        new = model.load_state_dict(first.state_dict(), strict=False)
        assert not new.unexpected_keys and all("score" in name or "slope" in name for name in new.missing_keys)
        model.see(o.keys)
        seconds = train(model, kind, seed, [(n, steps) for n, steps in lengths if not fits(n, o)], text, o)
        numbers = {o.keys // 4, o.keys // 2, o.keys, 3 * o.keys // 2}
        if kind == "dense":
            numbers = {everything}
        elif kind == "blocks":
            numbers = {max(1, n // BLOCK) * BLOCK for n in numbers}
        for keys in sorted((n for n in numbers if n > WINDOW + 1), key=lambda n: (n != o.keys, n)):
            model.see(keys)
            accuracy, by_distance = ask(model, text, o.lengths[-1], o)
            share = min(1.0, keys / everything)
            yield Row(kind, seed, keys, o.lengths[-1], share, accuracy, by_distance, seconds)


def table(rows: Sequence[Row]) -> str:
    """The median of the seeds for each kind and number of keys, in Markdown, with a bar of the accuracy."""
    lines = ["| keys by | attended | share | accuracy | lowest, highest | seeds | |", "|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        for keys in sorted({row.keys for row in rows if row.kind == kind}):
            found = [row for row in rows if (row.kind, row.keys) == (kind, keys)]
            of = sorted(row.accuracy for row in found)
            middle = statistics.median(of)
            ends = f"{of[0]:.3f}, {of[-1]:.3f} | {len(of)}"
            lines.append(
                f"| {kind} | {keys} | {found[0].share:.1%} | {middle:.3f} | {ends} | {'#' * round(20 * middle)} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Trains, asks, and prints the table."""
    parser = argparse.ArgumentParser(
        "python -m examples.recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    numbers = {"keys": 48, "width": 128, "heads": 2, "batch": 16, "texts": 128, "lr": 0.003}
    helps = {
        "length": "bytes of a text",
        "keys": "that a question attends in training",
        "texts": "that are asked about",
    }
    for name, value in (numbers | {"kv_heads": 1}).items():
        told = f"{helps.get(name, name)}; {value} by default"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=told)
    lengths = "bytes of the texts, ascending: the last are those of the questions"
    parser.add_argument("--lengths", type=int, nargs="+", default=[24, 512], help=lengths)
    parser.add_argument("--steps", type=int, nargs="+", default=[600, 100], help="of training, for each length")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--rows", type=Path, help="a file of rows (JSON lines): these are added, and all are in the table"
    )
    options = parser.parse_args(arguments)
    if len(options.steps) != len(options.lengths) or options.lengths[0] < 3 * PAIRS:
        parser.error(f"--steps must be as many as --lengths, and the first length at least {3 * PAIRS}")
    text, rows = load_text(), []
    for seed in options.seeds:
        for row in rows_of(seed, text, options):
            rows.append(row)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row._asdict()) + "\n")
    if options.rows:
        rows = [Row(**json.loads(line)) for line in options.rows.read_text().splitlines()]
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
