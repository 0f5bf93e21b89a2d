"""Host and device time of small calls on a GPU, beside torch's SDPA and FA4 (flash-attn-4, where installed).

python benchmarks/host_time.py                  # B1 H8 N 26, 200, 512 and 1024, D128, causal, bfloat16
python benchmarks/host_time.py --lengths 4096   # others
python benchmarks/host_time.py --kinds          # with score terms, in parts, gathered, of a pattern made for each call
python benchmarks/host_time.py --points 4096    # the break-even points of a length, forward, in turns with SDPA

Microseconds per call. Host: the median of 25 queues of 40 calls, each queue empty when it begins. The kernels are
short, so that the host is what is measured; a row whose kernels take longer than its calls says "device" instead.
Device: of one call among several in a replayed CUDA graph; of FA4 not taken. Results are compared with SDPA's first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import capture_stream, graph_ms
from gossamer.plan.problem import Unsupported
from gossamer.plan.table import available
from gossamer.testing.graphs import proximity_graph, random_graph
from gossamer.testing.sweeps import DENSITIES, KINDS

CALLS, SAMPLES, TURNS = 40, 25, 5
LOOSE = 2**-5  # of the largest result: two roundings of bfloat16 and their order


def host_us(run: Callable[[], Any], samples: int = SAMPLES) -> tuple[float, bool]:
    """(microseconds of a call, whether the device was still at work for longer than that when the host was done)."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    spent, drained = [], []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        spent.append(middle - begin)
        drained.append(time.perf_counter() - middle)
    return 1e6 * statistics.median(spent) / CALLS, statistics.median(drained) > statistics.median(spent)


def gradients(forward: Callable[..., Any], x: list[Tensor], dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        out = forward(*x)
        out = out[0] if isinstance(out, tuple) else out
        return (out.detach(), *torch.autograd.grad(out, x, dout))

    return run


def peers() -> dict[str, tuple[Callable[..., Any], bool]]:
    """Name -> (call, whether it takes (B, N, H, D))."""
    found: dict[str, tuple[Callable[..., Any], bool]] = {
        "SDPA": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), False)
    }
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        print(f"FA4 is not here: {error}")
    else:
        found["FA4"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True), True
    return found


def ours() -> dict[str, tuple[Callable[..., Any], bool]]:
    pattern = gs.Causal()
    found: dict[str, tuple[Callable[..., Any], bool]] = {"gossamer": (lambda *x: gs.attention(*x, pattern), False)}
    for name in ("hopper", "triton", "small"):
        if not available(name):
            found[f"gossamer {name}"] = lambda *x, name=name: gs.attention(*x, pattern, implementation=name), False
    return found


def measure(length: int, heads: int, size: int) -> None:
    """Prints the rows of one number of positions."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn((1, heads, length, size), device="cuda", generator=g).bfloat16() for _ in range(4))
    want: tuple[Tensor, ...] = ()
    columns = f"{'forward':>12s}{'with grad':>12s}{'and backward':>14s}{'device: forward':>18s}{'and backward':>14s}"
    print(f"N {length:<18d}{columns}")
    for name, (call, swapped) in (peers() | ours()).items():
        tensors = [x.transpose(1, 2).contiguous() if swapped else x for x in (q, k, v, dout)]
        x = [y.clone().requires_grad_() for y in tensors[:3]]
        both = gradients(call, x, tensors[3])
        runs: dict[str, Callable[..., Any]] = {
            "forward": lambda call=call, t=tensors: call(*t[:3]),
            "with grad": lambda call=call, x=x: call(*x),
            "and backward": both,
        }
        try:
            found = tuple(y.transpose(1, 2) if swapped else y for y in both())
        except Unsupported:  # forward alone, or not this many pairs
            del runs["with grad"], runs["and backward"]
            try:
                found = (runs["forward"](),)
            except Unsupported:
                continue
        want = want or found
        for result, right in zip(found, want, strict=False):
            error = (result.float() - right.float()).abs().max() / right.float().abs().max()
            assert error <= LOOSE, f"{name}: error {error:.3f}"
        cells = []
        for row in ("forward", "with grad", "and backward"):
            us, device = host_us(runs[row]) if row in runs else (float("nan"), False)
            cells.append("device" if device else f"{us:.1f}")
        # A backward is captured on the stream of its leaves.
        with torch.cuda.stream(capture_stream()):
            leaves = [y.clone().requires_grad_() for y in tensors[:3]]
        if "and backward" in runs:
            runs["and backward"] = gradients(call, leaves, tensors[3])
        for row in ("forward", "and backward"):
            captured = row in runs and name != "FA4"
            cells.append(f"{1000 * graph_ms(runs[row]):.1f}" if captured else "-")
        print(f"{name:20s}{cells[0]:>12s}{cells[1]:>12s}{cells[2]:>14s}{cells[3]:>18s}{cells[4]:>14s}", flush=True)


def kinds(heads: int, size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls without gradients of every kind that is bound, and SDPA's."""
    causal = gs.Causal()
    lengths = torch.full((1,), 20, device="cuda", dtype=torch.int32)
    sinks, slopes = (torch.rand(heads, device="cuda") for _ in range(2))
    terms: dict[str, dict[str, Any]] = {
        "nothing": {}, "key_lengths": {"key_lengths": lengths}, "sink_logits": {"sink_logits": sinks},
        "softcap": {"softcap": 20.0}, "alibi_slopes": {"alibi_slopes": slopes},
    }  # fmt: skip
    for N in (26, 512):
        x = [torch.randn((1, heads, N, size), device="cuda").bfloat16() for _ in range(3)]
        yield f"SDPA, N {N}", lambda x=x: F.scaled_dot_product_attention(*x, is_causal=True)  # type: ignore[misc]
        for name, more in terms.items():
            yield f"with {name}, N {N}", lambda x=x, more=more: gs.attention(*x, causal, **more)  # type: ignore[misc]
        yield f"a pattern made for each call, N {N}", lambda x=x: gs.attention(*x, gs.Causal())  # type: ignore[misc]
        yield f"three dimensions, N {N}", lambda x=[y[0] for y in x]: gs.attention(*x, causal)  # type: ignore[misc]
    for N, pattern in (
        (1024, gs.BigBird(16, random_blocks=1)), (2048, random_graph(2048, 20)), (2048, gs.Dilated(28, 0, 4)),
        (4096, gs.Dilated(28, 0, 16)), (2048, proximity_graph((4, 4, 3), 2.5)),
    ):  # fmt: skip
        x = [torch.randn((1, heads, N, size), device="cuda").bfloat16() for _ in range(3)]
        yield f"{pattern}, N {N}", lambda x=x, pattern=pattern: gs.attention(*x, pattern)  # type: ignore[misc]


def points(length: int, heads: int, size: int, names: list[str]) -> None:
    """Prints calls and device times of the break-even points of a length, and what SDPA's take in the same turns."""
    q, k, v = (torch.randn((1, heads, length, size), device="cuda").bfloat16() for _ in range(3))
    print(f"{'N ' + str(length):26s}{'layout':>24s}{'call':>8s}{'SDPA':>8s}{'more':>8s}{'device':>10s}{'SDPA':>8s}")
    for kind in names:
        for density in DENSITIES:
            pattern = KINDS[kind](length, density)
            if pattern is None:
                continue
            causal = kind in ("window", "dilated")
            runs = {
                "ours": lambda p=pattern: gs.attention(q, k, v, p),
                "SDPA": lambda c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
            }
            spent: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(TURNS):
                for name, run in runs.items():
                    spent[name].append(host_us(run, SAMPLES // TURNS)[0])
            ours, sdpa = (statistics.median(x) for x in spent.values())
            device = [1000 * graph_ms(run) for run in runs.values()]
            plan = gs.explain(q, k, v, pattern)
            way = f"{plan.implementation} {plan.tile[0]} x {plan.tile[1]}" + " in parts" * bool(plan.parts)
            print(
                f"{kind + ' ' + format(density, 'g'):18s}{way:>32s}{ours:8.1f}{sdpa:8.1f}"
                f"{ours - sdpa:+8.1f}{device[0]:10.1f}{device[1]:8.1f}", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-N", "--lengths", type=int, nargs="+", default=[26, 200, 512, 1024])
    parser.add_argument("-H", "--heads", type=int, default=8)
    parser.add_argument("-D", "--size", type=int, default=128)
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--points", type=int, nargs="+", default=[])
    parser.add_argument("--patterns", nargs="+", choices=list(KINDS), default=list(KINDS), help="of --points")
    a = parser.parse_args()
    if a.kinds:
        with torch.no_grad():
            for name, run in kinds(a.heads, a.size):
                us, device = host_us(run)
                print(f"{name:60s}{'device' if device else f'{us:.1f}':>8s}", flush=True)
        return
    if a.points:
        with torch.no_grad():
            for length in a.points:
                points(length, a.heads, a.size, a.patterns)
        return
    print("microseconds of a call on the host, and on the device")
    for length in a.lengths:
        measure(length, a.heads, a.size)


if __name__ == "__main__":
    main()
