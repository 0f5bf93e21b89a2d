"""Host and device time of every operation from torch, on a GPU: rows as lines of JSON.

python benchmarks/host_operations.py                      # all, forward and with the backward
python benchmarks/host_operations.py --only decode entmax # those whose names begin so
python benchmarks/host_operations.py --device cpu         # that every call runs, on a CPU

`host_us`: microseconds to enqueue a call, of sizes small enough that the queue never blocks. Of larger sizes `eager_ms`
is a call among many in a loop, `graph_ms` one of a replayed CUDA graph, which costs no host time. `launches` counts the
kernels, copies and fills of one call: lines of their own at the end, since what a profiler leaves behind makes later
launches slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from host_time import host_us
from torch import Tensor

import gossamer as gs
from gossamer import particles as gp
from gossamer.bench.latency import capture_stream, graph_ms

LOOP, ROUNDS = 20, 5


class Call(NamedTuple):
    """One call of an operation."""

    run: Callable[[], Tensor]
    leaves: list[Tensor]  # what gradients are taken of; none: it has none


def features(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def sdpa(device: str, large: bool) -> Call:
    x = features(device, *[(1, 8, 8192 if large else 512, 128)] * 3)
    return Call(lambda: F.scaled_dot_product_attention(*x, is_causal=True), x)


def window(device: str, large: bool) -> Call:
    x = features(device, *[(1, 8, 8192 if large else 512, 128)] * 3)
    pattern = gs.SlidingWindow(255)
    return Call(lambda: gs.attention(*x, pattern), x)


def decode(device: str, large: bool, pattern: gs.Pattern) -> Call:
    """One query of each sequence, behind as many keys as the device alone knows."""
    B, H, G, slots = (32, 32, 8, 8192) if large else (2, 8, 2, 512)
    q, k, v = (x.detach() for x in features(device, (B, H, 1, 128), *[(B, G, slots, 128)] * 2))
    lengths = torch.randint(slots // 4, slots, (B,), device=device)
    at = lengths - 1
    return Call(lambda: gs.attention(q, k, v, pattern, q_offset=at, key_lengths=lengths), [])


def documents(device: str, large: bool) -> Call:
    N = 131072 if large else 1024
    x = features(device, *[(1, 8, N, 128)] * 3)
    ids = torch.arange(N, device=device) // (N // 40)
    return Call(lambda: gs.attention(*x, gs.DocumentIds(ids) & gs.Causal()), x)


def varlen(device: str, large: bool, on_host: bool) -> Call:
    N = 32768 if large else 1024
    x = features(device, *[(N, 8, 128)] * 3)
    edges: Any = [0, N // 8, N // 2, N]
    edges = edges if on_host else torch.tensor(edges, device=device, dtype=torch.int32)
    return Call(lambda: gs.varlen(*x, edges, pattern=gs.Causal()), x)


def packed(device: str, large: bool) -> Call:
    N = 32768 if large else 1024
    x = features(device, *[(1, 8, N, 128)] * 3)
    edges = torch.tensor([0, N // 8, N // 2, N], device=device, dtype=torch.int32)
    return Call(lambda: gs.attention(*x, gs.PackedSequences(edges, pattern=gs.Causal())), x)


def chosen_blocks(device: str, large: bool) -> Call:
    x = features(device, *[(1, 8, 32768 if large else 1024, 128)] * 3)

    def run() -> Tensor:
        return gs.attention(*x, gs.topk_blocks(x[0], x[1], causal=True, block_size=64, topk=16) & gs.Causal())

    return Call(run, x)


def listed_keys(device: str, large: bool) -> Call:
    N = 8192 if large else 512
    x = features(device, *[(1, 8, N, 128)] * 3)
    indices = torch.randint(N, (1, 1, N, 64), device=device)
    return Call(lambda: gs.attention(*x, gs.Indices(indices)), x)


def layout(device: str, large: bool) -> Call:
    N = 131072 if large else 1024
    x = features(device, *[(1, 8, N, 128)] * 3)
    ids = torch.arange(N, device=device) // (N // 40)
    return Call(lambda: gs.device_layout(*x, gs.DocumentIds(ids) & gs.Causal()).rows.lo, [])


def entmax(device: str, large: bool, **options: Any) -> Call:
    x = features(device, *[(1, 16, 8192 if large else 512, 64)] * 3)
    return Call(lambda: gs.entmax_attention(*x, causal=True, **options), x)


def sparsek(device: str, large: bool) -> Call:
    N = 8192 if large else 512
    x = features(device, *[(1, 8, N, 64)] * 3)
    u = torch.randn(1, 8, N, device=device, requires_grad=True)
    return Call(lambda: gs.sparsek_attention(*x, u, k_keep=64, window=128), [*x, u])


def radial(device: str, large: bool, force: bool) -> Call:
    N = 64_000 if large else 1000
    x, values = torch.rand(N, 3, device=device, requires_grad=True), torch.rand(N, 1, device=device, requires_grad=True)
    radius = (747 / N / 4.18879) ** (1 / 3) if large else 0.2
    gravity, gaussian = gp.ShortRangeGravity(split=radius / 5.5), gp.Gaussian(radius / 3)

    def run() -> Tensor:
        cells = gp.Cells.build(x, radius, 1.0)
        return gp.radial_force(cells, values[:, 0], gravity) if force else gp.radial_sum(cells, values, gaussian)

    return Call(run, [x, values])


def neighbors(device: str, large: bool) -> Call:
    """Lists of particles that have moved."""
    N = 64_000 if large else 1000
    x = torch.rand(N, 3, device=device)
    lists = gp.Neighbors.allocate(x, radius=(32 / N / 4.18879) ** (1 / 3), box=1.0)
    return Call(lambda: lists.update(x).places, [])


def neighbor_attention(device: str, large: bool) -> Call:
    N = 64_000 if large else 1000
    x = torch.rand(N, 3, device=device)
    lists = gp.Neighbors.allocate(x, radius=(32 / N / 4.18879) ** (1 / 3), box=1.0)
    qkv = features(device, *[(N, 8, 64)] * 3)
    return Call(lambda: gp.neighbor_attention(*qkv, lists), qkv)


OPERATIONS: dict[str, Callable[[str, bool], Call]] = {
    "SDPA": sdpa,
    "window": window,
    "decode, causal": lambda *at: decode(*at, gs.Causal()),
    "decode, window 1024": lambda *at: decode(*at, gs.SlidingWindow(1023)),
    "documents": documents,
    "varlen, edges on the device": lambda *at: varlen(*at, False),
    "varlen, edges on the host": lambda *at: varlen(*at, True),
    "packed sequences": packed,
    "topk_blocks and attention": chosen_blocks,
    "indices": listed_keys,
    "device_layout of documents": layout,
    "entmax 1.5": entmax,
    "entmax top-k 8": lambda *at: entmax(*at, top_k=8),
    "sparsek_attention": sparsek,
    "radial_sum": lambda *at: radial(*at, False),
    "radial_force": lambda *at: radial(*at, True),
    "neighbors": neighbors,
    "neighbor_attention": neighbor_attention,
}


def runs_of(call: Call) -> dict[str, Callable[[], Any]]:
    """The forward without gradients, and the forward and backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call.run()

    if not call.leaves:
        return {"forward": call.run}
    dout = torch.randn_like(forward())
    return {"forward": forward, "and backward": lambda: torch.autograd.grad(call.run(), call.leaves, dout)}


def launches(run: Callable[[], Any]) -> int:
    """Kernels, copies and fills of one call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())


def eager_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of a call in a loop."""
    spent = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LOOP):
            run()
        torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - begin) / LOOP)
    return statistics.median(spent)


def captured_ms(make: Callable[[str, bool], Call], direction: str) -> float | str:
    """Milliseconds of a call in a replayed graph; what the capture said where it failed."""
    with torch.cuda.stream(capture_stream()):  # a backward is captured on the stream of its leaves
        run = runs_of(make("cuda", True))[direction]
    try:
        return graph_ms(run)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="operations whose names begin so")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    a = parser.parse_args()
    counted: list[tuple[str, str, Callable[[], Any]]] = []
    for name, make in OPERATIONS.items():
        if not name.startswith(tuple(a.only)):
            continue
        torch.manual_seed(0)
        small = runs_of(make(a.device, False))
        if a.device == "cpu":
            for run in small.values():
                run()
            print(name, flush=True)
            continue
        large = runs_of(make("cuda", True))
        for direction, run in small.items():
            us, blocked = host_us(run)
            row = {"operation": name, "direction": direction, "host_us": round(us, 1), "device_bound": blocked}
            row |= {"eager_ms": round(eager_ms(large[direction]), 4)}
            found = captured_ms(make, direction)
            print(json.dumps(row | {"graph_ms": found if isinstance(found, str) else round(found, 4)}), flush=True)
            counted.append((name, direction, run))
    for name, direction, run in counted:
        print(json.dumps({"operation": name, "direction": direction, "launches": launches(run)}), flush=True)


if __name__ == "__main__":
    main()
