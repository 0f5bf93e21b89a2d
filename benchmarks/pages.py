"""Attention over caches in pages on a GPU: time, rate of memory and host time, beside FA4 and torch's varlen_attn.

    python benchmarks/pages.py                       # prints a line a row
    python benchmarks/pages.py decode_32_p64 --out FILE  # one case, added to a file of results

Times on the device are of a replayed graph, of calls that have a cache each, together larger than the level-2 cache: no
key is there before it is read, and nothing waits to be written. `tb_s` counts each key and value that a query sees
once. `copy_tb_s` is the rate of a copy in the same run, `host_us` the time to enqueue an eager call of `varlen`,
`shared_us` of `attention` over a `device_layout` of the step, `structure_us` of making that. Numbers are checked
against float64 before anything is timed. A peer that does not take a case is left out, with its reason.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from host_time import host_us
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.bench.measure import device_name, medians_in_turns
from gossamer.bench.results import append_records

CUDA = torch.device("cuda")
H, G, D = 32, 8, 128
ROUNDS = 25
LEVEL_2 = 60e6  # bytes of the level-2 cache, at most


class Case(NamedTuple):
    """A step of sequences that have as many new tokens each."""

    sequences: int
    keys: int  # of each
    page: int
    tokens: int = 1  # new ones of each
    window: int | None = None  # keys that a query sees
    invariant: bool = False  # the bits of a sequence do not depend on its batch
    topk: int | None = None  # pages that a sequence and a key head attend to


CASES = {
    "decode_32_p64": Case(32, 4096, 64),
    "decode_32_p16": Case(32, 4096, 16),
    "decode_32_p1": Case(32, 4096, 1),
    "decode_1_131072": Case(1, 131072, 64),
    "decode_1_1024": Case(1, 1024, 16),
    "decode_32_window": Case(32, 131072, 64, window=4096),
    "decode_32_topk": Case(32, 131072, 64, topk=64),
    "drafts_32": Case(32, 4096, 16, tokens=4),
    "decode_32_invariant": Case(32, 4096, 64, invariant=True),
    "chunk_2048_p16": Case(1, 32768, 16, tokens=2048),
    "chunk_2048_p64": Case(1, 32768, 64, tokens=2048),
}


class Cache:
    """Queries, and keys in pages that lie in a random order."""

    def __init__(self, c: Case) -> None:
        pages = -(-c.keys // c.page)
        table = torch.randperm(c.sequences * pages, device=CUDA).view(c.sequences, pages)
        new = {"device": CUDA, "dtype": torch.bfloat16}
        self.q = torch.randn(c.sequences * c.tokens, H, D, **new)
        self.k, self.v = (torch.randn(c.sequences * pages, c.page, G, D, **new) for _ in range(2))
        self.table = table.int()
        self.edges = torch.arange(c.sequences + 1, device=CUDA, dtype=torch.int32) * c.tokens
        self.used = torch.full((c.sequences,), c.keys, device=CUDA, dtype=torch.int32)
        self.out = torch.empty_like(self.q)

    def contiguous(self) -> list[Tensor]:
        """k and v of (sequences, keys, G, D)."""
        return [x[self.table.long()].flatten(1, 2) for x in (self.k, self.v)]


def pattern_of(c: Case) -> gs.Pattern:
    return gs.Causal() if c.window is None else gs.SlidingWindow(c.window - 1)


def of_chosen(
    c: Case, x: Cache, bounds: gs.PageBounds, newest: Tensor, mass: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, mass that is kept, or lse): bounds take in the newest keys, pages are chosen and attended to."""
    assert c.topk is not None
    bounds.update(x.k, newest)
    few = gs.topk_pages(x.q, bounds, x.edges, x.table, x.used, c.page, topk=c.topk)
    found, lse = gs.varlen(
        x.q, x.k, x.v, x.edges, max_q=c.tokens, pattern=pattern_of(c), block_table=few.block_table,
        seqused_k=few.seqused_k, out=x.out, return_lse=True,
    )  # fmt: skip
    return found, lse, few.kept_mass(lse) if mass else lse


def measure_chosen(name: str) -> dict[str, Any]:
    """The row of a case in which pages are chosen, beside attention to all of them."""
    c = CASES[name]
    caches = [Cache(c) for _ in range(2)]
    calls = []
    for x in caches:
        newest = x.table[:, -1] * c.page + (c.keys - 1) % c.page
        calls.append(partial(of_chosen, c, x, gs.PageBounds.of(x.k), newest))
    x, every = caches[0], c._replace(topk=None)
    _, lse, mass = calls[0](mass=True)
    given: dict[str, Any] = {"block_table": x.table, "seqused_k": x.used, "return_lse": True}
    _, of_all = gs.varlen(x.q, x.k, x.v, x.edges, pattern=gs.Causal(), **given)
    true = (lse - of_all).exp()
    assert bool((mass <= true * 1.001).all()), "more is certified than is kept"
    graphs = {"gossamer": graph_of(calls), "all_pages": graph_of(partial(ours, every, each) for each in caches)}
    times = time_in_turns({kind: graph.replay for kind, graph in graphs.items()})
    row: dict[str, Any] = {"case": name} | {f"{kind}_us": 1e3 * t / len(caches) for kind, t in times.items()}
    row["times_faster"] = row["all_pages_us"] / row["gossamer_us"]
    row["host_us"], _ = host_us(calls[0])
    return row | {"kept_mass": float(mass.mean()), "true_mass": float(true.mean())}


def ours(c: Case, x: Cache) -> Tensor:
    """A call of `varlen`, into memory that is there."""
    found = gs.varlen(
        x.q, x.k, x.v, x.edges, max_q=c.tokens, pattern=pattern_of(c), block_table=x.table, seqused_k=x.used, out=x.out,
        batch_invariant=c.invariant,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def structure(c: Case, x: Cache) -> Any:
    """What the layers of a step share."""
    pages = gs.Pages(x.table, x.used, c.page, batch_invariant=c.invariant)
    packed = gs.PackedSequences(x.edges, pages=pages, pattern=pattern_of(c))
    return gs.device_layout(x.q, x.k, x.v, packed, layout="bshd")


def over_contiguous_keys(c: Case, x: Cache) -> Callable[[], Any]:
    """The same over keys that lie behind one another, one (batch) element a sequence."""
    q = x.q.view(c.sequences, c.tokens, H, D)
    k, v = x.contiguous()
    return lambda: gs.attention(q, k, v, pattern_of(c), q_offset=c.keys - c.tokens, layout="bshd")


def fa4(c: Case, x: Cache) -> Callable[[], Any]:
    """FA4 over the table."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    window = (None, None) if c.window is None else (c.window - 1, 0)
    given = {"page_table": x.table, "seqused_k": x.used, "cu_seqlens_q": x.edges, "max_seqlen_q": c.tokens}
    return lambda: flash_attn_varlen_func(x.q, x.k, x.v, causal=True, window_size=window, **given)


def torch_varlen(c: Case, x: Cache) -> Callable[[], Any]:
    """torch's varlen_attn over the table."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if c.window is None else (c.window - 1, 0)
    given: dict[str, Any] = {"seqused_k": x.used, "block_table": x.table, "window_size": window, "enable_gqa": True}
    return lambda: varlen_attn(x.q, x.k, x.v, x.edges, None, c.tokens, c.keys, **given)


PEERS = {"FA4": fa4, "varlen_attn": torch_varlen}


def exact(c: Case, x: Cache, sequence: int, head: int) -> Tensor:
    """(tokens, D) in float64: the definition, for one head of one sequence."""
    k, v = (y[x.table[sequence].long(), :, head // (H // G)].flatten(0, 1)[: c.keys].double() for y in (x.k, x.v))
    q = x.q[sequence * c.tokens : (sequence + 1) * c.tokens, head].double()
    at = torch.arange(c.keys - c.tokens, c.keys, device=CUDA)[:, None]
    j = torch.arange(c.keys, device=CUDA)
    keep = (j <= at) & (j > at - (c.window or c.keys))
    return ((q @ k.T) / D**0.5).masked_fill(~keep, -torch.inf).softmax(-1) @ v


def check(c: Case, x: Cache, out: Tensor) -> float:
    """The largest error of a few heads, Euclidean, as a share of the result."""
    worst = 0.0
    for sequence, head in ((0, 0), (c.sequences - 1, H - 1), (c.sequences // 2, 5)):
        wanted = exact(c, x, sequence, head)
        found = out.view(c.sequences, c.tokens, H, D)[sequence, :, head].double()
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


def copy_tb_s() -> float:
    """The rate of a copy of 1 GiB: bytes read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    y = torch.empty_like(x)
    return 2 * x.numel() / medians_in_turns({"copy": lambda: y.copy_(x)}, CUDA, budget_s=0.2)["copy"] * 1e-9


def graph_of(calls: Iterable[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """Calls behind one another as a graph."""
    every = list(calls)
    return captured(lambda: [call() for call in every])[0]


def time_in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of calls by their name: the median of ROUNDS, in which each has its turn."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            spent[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in spent.items()}


def measure(name: str) -> dict[str, Any]:
    """The row of a case."""
    c = CASES[name]
    seen = min(c.keys, c.window + c.tokens - 1) if c.window else c.keys
    read = c.sequences * seen * G * 2 * D * 2
    caches = [Cache(c) for _ in range(max(2, math.ceil(2 * LEVEL_2 / read)))]
    x = caches[0]
    call_ours = partial(ours, c, x)
    x.out.fill_(torch.nan)
    error = check(c, x, call_ours())
    assert error < 0.01, f"{name}: the error is {error:.2g}"
    graphs = {"gossamer": graph_of(partial(ours, c, each) for each in caches)}
    if c.tokens > 64:
        graphs["contiguous"] = graph_of(over_contiguous_keys(c, each) for each in caches)
    refused = {}
    for peer, make in PEERS.items():
        try:
            found = make(c, x)()
            off = check(c, x, found[0] if isinstance(found, tuple) else found)
            assert off < 0.02, f"its error is {off:.2g}"
            graphs[peer] = graph_of(make(c, each) for each in caches)
        except Exception as reason:  # a peer may be missing, or take no such case: the row says so
            refused[peer] = f"{type(reason).__name__}: {reason}"[:200]
    times = time_in_turns({kind: graph.replay for kind, graph in graphs.items()})
    row = {"case": name, "error": error} | {f"{kind}_us": 1e3 * t / len(caches) for kind, t in times.items()}
    row["tb_s"] = read / row["gossamer_us"] * 1e-6
    shared = structure(c, x)
    enqueued = {
        "host": call_ours,
        "shared": lambda: gs.attention(x.q, x.k, x.v, shared, layout="bshd"),
        "structure": lambda: structure(c, x),
    }
    for kind, call in enqueued.items():
        row[f"{kind}_us"], _ = host_us(call)
    return row | ({"refused": refused} if refused else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.manual_seed(0)
    rate = copy_tb_s()
    rows = []
    for name in a.cases:
        row = (measure if CASES[name].topk is None else measure_chosen)(name) | {"copy_tb_s": rate}
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        rows.append({"device": device_name(CUDA)} | row)
        torch.cuda.empty_cache()
    if a.out is not None:
        append_records(rows, a.out, ("device",))


if __name__ == "__main__":
    main()
