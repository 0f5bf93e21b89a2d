"""What structure made on a GPU costs, and attention on it beside attention on lists that the host made before.

    python benchmarks/device_structure.py              # prints a line a row
    python benchmarks/device_structure.py --out FILE   # adds them to a file of results as well

Every time is of a captured graph, replayed: what the host does is not in it. `made` is a call that makes its structure,
transpose and work items; `kept` the same call on a layout that was made before; `host` on the layout of a pattern,
whose lists are made on the host. A call is a forward, or a forward and its backward. `lists` are the lists alone. The
layers of a step of decoding share one structure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.bench.measure import device_name, medians_in_turns
from gossamer.bench.results import append_records

CUDA = torch.device("cuda")
medians = partial(medians_in_turns, device=CUDA, budget_s=0.4)  # milliseconds of calls
LAYERS = 32  # of the model that a step of decoding is of


class Case(NamedTuple):
    """A call whose structure is made on the device, and the same call with lists of the host."""

    shapes: tuple[tuple[int, ...], ...]  # of q, k and v
    options: dict[str, Any]  # of `attention`, with tensors that the structure is made from
    host: dict[str, Any]  # the same by a pattern of the host
    gradients: bool


def documents(N: int, H: int) -> Case:
    """Packed causal documents of random lengths, about 1,500 tokens on average."""
    begins = torch.rand(N, generator=torch.Generator().manual_seed(0)) < 1 / 1500
    ids = begins.int().cumsum(0).int()
    return Case(
        ((1, H, N, 128),) * 3,
        {"pattern": gs.DocumentIds(ids.to(CUDA)) & gs.Causal()},
        {"pattern": gs.Document(ids.numpy()) & gs.Causal()},
        True,
    )


def decoding(B: int, K: int, window: gs.Pattern | None = None) -> Case:
    """A step of decoding over a static cache, sequences of random lengths."""
    lengths = torch.randint(K // 8, K + 1, (B,), generator=torch.Generator().manual_seed(1)).to(CUDA)
    host: dict[str, Any] = {"pattern": gs.Dense(), "key_lengths": lengths}
    if window is None:
        window = gs.Causal()
    else:
        host = {"pattern": gs.PerBatch([_seen_from(window, int(n), K) for n in lengths])}
    return Case(
        ((B, 32, 1, 128), (B, 8, K, 128), (B, 8, K, 128)),
        {"pattern": window, "q_offset": lengths - 1, "key_lengths": lengths},
        host,
        False,
    )


def _seen_from(window: gs.Pattern, length: int, K: int) -> gs.Pattern:
    """What the one query sees that stands at the end of so many keys, as a pattern of rows that are counted from 0."""
    (kept,) = window.materialize(1, K, length - 1)
    return gs.CSR([0, int(kept.sum())], kept.nonzero()[0], K)


def chosen(H: int, N: int, share: float) -> Case:
    """Blocks of 64 keys, chosen at random for each block of 64 queries and each head."""
    T = -(-N // 64)
    n = round(share * T)
    draw = torch.rand((1, H, T, T), generator=torch.Generator().manual_seed(2))
    lists = draw.topk(n).indices.int()
    keep = torch.zeros((H, T, T), dtype=torch.bool).scatter_(2, lists[0].long(), True)
    host = gs.PerHead([gs.BlockMask(one.numpy(), 64) for one in keep])
    return Case(((1, H, N, 128),) * 3, {"pattern": gs.BlockIndices(lists.to(CUDA), 64)}, {"pattern": host}, True)


CASES: dict[str, Callable[[], Case]] = {
    "documents_131072": lambda: documents(131072, 8),
    "decoding_32_8192": lambda: decoding(32, 8192),
    "decoding_32_8192_sinks": lambda: decoding(32, 8192, gs.SlidingWindow(1023, sinks=4)),
    "chosen_32768": lambda: chosen(8, 32768, 0.11),
    "chosen_131072": lambda: chosen(8, 131072, 0.029),
    "chosen_40768_h16": lambda: chosen(16, 40768, 0.10),
}


def kept(case: Case, x: list[Tensor]) -> dict[str, Any]:
    """The options with the layout that a call makes, made once."""
    return {"pattern": gs.device_layout(*x, **case.options)}


def measure(name: str) -> list[dict[str, Any]]:
    """The rows of a case."""
    case = CASES[name]()
    x = [torch.randn(s, device=CUDA, dtype=torch.bfloat16, requires_grad=case.gradients) for s in case.shapes]
    dout = torch.randn(case.shapes[0], device=CUDA, dtype=torch.bfloat16)
    calls = {"made": case.options, "kept": kept(case, x), "host": case.host}
    rows = []
    for direction in ("forward", "both")[: 1 + case.gradients]:
        graphs, outs = {}, {}
        for kind, options in calls.items():
            graphs[kind], outs[kind] = captured(partial(step, x, None if direction == "forward" else dout, options))
            graphs[kind].replay()
        torch.cuda.synchronize()
        for kind in ("made", "kept"):
            for a, b in zip(outs[kind], outs["host"], strict=True):
                assert torch.allclose(a.float(), b.float(), atol=0.02, rtol=0.02), f"{name}: {kind} differs from host"
        times = medians({kind: graph.replay for kind, graph in graphs.items()})
        row = {"case": name, "direction": direction} | {f"{kind}_ms": t for kind, t in times.items()}
        row |= {"structure_ms": times["made"] - times["kept"], "kept_over_host": times["kept"] / times["host"]}
        rows.append(row | {"structure_over_kept": row["structure_ms"] / times["kept"]})
    graph, _ = captured(lambda: kept(case, x))
    rows[0]["lists_ms"] = medians({"lists": graph.replay})["lists"]
    if not case.gradients:
        rows.append({"case": name, "direction": f"forward of {LAYERS} layers"} | layers(case, x))
    return rows


def step(x: list[Tensor], dout: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """out, and with dout the gradients."""
    with torch.set_grad_enabled(dout is not None):
        out = gs.attention(*x, **options)
    return (out,) if dout is None else (out, *torch.autograd.grad(out, x, dout))


def layers(case: Case, x: list[Tensor]) -> dict[str, float]:
    """A step of a model, whose layers share what is attended."""

    def every(options: Callable[[], dict[str, Any]]) -> Any:
        shared = options()
        return [step(x, None, shared) for _ in range(LAYERS)]

    graphs = {
        "made": captured(lambda: every(lambda: kept(case, x))),
        "host": captured(lambda: every(lambda: case.host)),
    }
    times = medians({kind: graph.replay for kind, (graph, _) in graphs.items()})
    return {f"{kind}_ms": t for kind, t in times.items()} | {"made_over_host": times["made"] / times["host"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    every = []
    for name in a.cases:
        rows = measure(name)
        for row in rows:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        every += rows
        torch.cuda.empty_cache()
    if a.out is not None:
        append_records([{"device": device_name(CUDA)} | row for row in every], a.out, ("device",))


if __name__ == "__main__":
    main()
