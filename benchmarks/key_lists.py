"""Attention over lists of keys, one for each query, which all heads share: what `Indices` reaches on a GPU.

    python benchmarks/key_lists.py              # prints a line a row
    python benchmarks/key_lists.py --out FILE   # adds them to a file of results as well
    python benchmarks/key_lists.py --budget 0.2 # seconds of a call, where there is little time

32,768 queries list 2048 keys each, D 128, 16 or 64 heads a list. Lists are drawn at random, or drift: from one query
to the next 5 % of the keys are others, and the overlap is that of neighbours. `made` makes the structure in the call,
`kept` has it before; a call is a forward, or a forward and its backward, of a captured graph that is replayed. A rate
is of useful products: 4 n D of a query and a head forward, and 2.5 times as many backward. Beside it stands what the
level-2 cache would allow if every query read its keys and values alone, once for all of its heads in each direction, at
9.3 TB/s, and added its shares of their gradients as float32, at 3.7 TB/s (docs/kernels/gather.md). Some rows are
compared with float64 first.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.bench.measure import device_name, medians_in_turns
from gossamer.bench.results import append_records

N, LISTED, D = 32768, 2048, 128
L2, L2_SUMS = 9.3e12, 3.7e12  # bytes a second, read and added
DRIFT = 0.05


def random_lists(queries: int, keys: int, listed: int, device: torch.device) -> Tensor:
    """(queries, listed) int32, all different."""
    g = torch.Generator(device).manual_seed(0)
    rows = [
        torch.rand((1024, keys), device=device, generator=g).topk(listed).indices for _ in range(-(-queries // 1024))
    ]
    return torch.cat(rows)[:queries].int()


def drifting_lists(queries: int, keys: int, listed: int, device: torch.device) -> Tensor:
    """(queries, listed) int32: each place of a list has keys of its own, and holds one until it takes another."""
    g = torch.Generator(device).manual_seed(1)
    own = keys // listed
    query = torch.arange(queries, device=device)[:, None]
    taken = torch.where(torch.rand((queries, listed), device=device, generator=g) < DRIFT, query, 0).cummax(0).values
    drawn = torch.randint(own, (queries, listed), device=device, generator=g)
    return (torch.arange(listed, device=device) * own + drawn.gather(0, taken)).int()


LISTS = {"random": random_lists, "drifting": drifting_lists}


def overlap(lists: Tensor) -> float:
    """The share of a query's keys that the query before lists too, of some of them."""
    some = torch.arange(1, len(lists), max(1, len(lists) // 64), device=lists.device)
    return sum(float(torch.isin(lists[i], lists[i - 1]).float().mean()) for i in some) / len(some)


def check(x: list[Tensor], lists: Tensor, out: Tensor) -> None:
    """Some rows of a result against float64."""
    q, k, v = (y[0].double() for y in x)
    for i in range(0, len(lists), max(1, len(lists) // 16)):
        kept = lists[i].long().unique()
        p = torch.softmax(q[:, i] @ k[0, kept].mT * q.shape[-1] ** -0.5, -1)
        assert torch.allclose(out[0, :, i].double(), p @ v[0, kept], atol=0.01, rtol=0.02), f"query {i} is wrong"


def measure(heads: int, kind: str, budget: float) -> list[dict[str, Any]]:
    """The rows of one case; `budget`: seconds of a call."""
    device = torch.device("cuda")
    lists = LISTS[kind](N, N, LISTED, device)
    x = [torch.randn((1, h, N, D), device=device, dtype=torch.bfloat16, requires_grad=True) for h in (heads, 1, 1)]
    dout = torch.randn_like(x[0])
    made = gs.Indices(lists)
    rows = []
    for direction in ("forward", "both"):
        graphs = {}
        for name, pattern in (("made", made), ("kept", gs.device_layout(*x, made))):
            graphs[name], results = captured(partial(step, x, None if direction == "forward" else dout, pattern))
            graphs[name].replay()
            torch.cuda.synchronize()
            out, *_ = results
            check([y.detach() for y in x], lists, out.detach())
        calls = {name: graph.replay for name, graph in graphs.items()}
        times = medians_in_turns(calls, device, budget_s=budget)
        pairs = float(N * LISTED * heads)
        flops = pairs * 4 * D * (1.0 if direction == "forward" else 3.5)
        keys = N * LISTED * 2 * D  # numbers of K and V, of all lists
        seconds = 2 * keys / L2 if direction == "forward" else 4 * keys / L2 + 4 * keys / L2_SUMS
        rows.append({
            "heads": heads, "lists": kind, "overlap": overlap(lists), "direction": direction,
            **{f"{name}_ms": t for name, t in times.items()}, "kept_tflops": flops / times["kept"] / 1e9,
            "l2_bound_tflops": flops / seconds / 1e12,
        })  # fmt: skip
    return rows


def step(x: list[Tensor], dout: Tensor | None, pattern: Any) -> tuple[Tensor, ...]:
    """out, and with dout the gradients."""
    with torch.set_grad_enabled(dout is not None):
        out = gs.attention(*x, pattern)
    return (out,) if dout is None else (out, *torch.autograd.grad(out, x, dout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=2.0)
    a = parser.parse_args()
    every = []
    for heads in (16, 64):
        for kind in LISTS:
            for row in measure(heads, kind, a.budget):
                print(
                    "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                    flush=True,
                )
                every.append(row)
            torch.cuda.empty_cache()
    if a.out is not None:
        append_records([{"device": device_name(torch.device("cuda"))} | row for row in every], a.out, ("device",))


if __name__ == "__main__":
    main()
