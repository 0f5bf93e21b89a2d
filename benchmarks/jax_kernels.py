"""The Hopper kernels from JAX beside torch, in one process: forward and backward of patterns, and what a call costs.

    python benchmarks/jax_kernels.py [NAME ...] [--turns FOLDER] [--kernels]

Where jax, jax-tvm-ffi and torch are installed, with a GPU of compute capability 9.0. Both read the same arrays, of
(batch, positions, heads, size) in bfloat16; their results are compared before they are timed, in turns. A row is a line
of JSON with the medians of some rounds of wall time, each of as many calls as take about 0.1 s. `--turns`: one name
alone, made and compiled beside other processes; FOLDER/NAME.ready says that it is, and it is timed when there is
FOLDER/NAME.go. `--kernels`: also, by torch's profiler, what the GPU does in a call of each, and how long it waits
between (us); and what a call takes the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gossamer as gs
import gossamer.jax as gsj
from gossamer.testing.graphs import power_law_graph, proximity_graph, random_graph

ROUNDS, SECONDS = 5, 0.1
LAYERS = 100  # of calls in one program, for what a call costs


class Case(NamedTuple):
    """A pattern, made when it is asked for, and sizes."""

    pattern: Callable[[], gs.Pattern]
    N: int
    H: int
    D: int


def blocks(N: int) -> gs.Pattern:
    """A tenth of all blocks of 128, and the diagonal."""
    n = N // 128
    mask = np.random.default_rng(0).random((1, 1, n, n)) < 0.1
    return gs.BlockMask(mask | np.eye(n, dtype=bool), 128)


CASES = {
    "window": Case(lambda: gs.SlidingWindow(4096), 131072, 8, 128),
    "bigbird": Case(lambda: gs.BigBird(64), 32768, 8, 128),
    "blocks": Case(lambda: blocks(32768), 32768, 8, 128),
    "dilated": Case(lambda: gs.Dilated(256, 0, dilation=8), 65541, 8, 64),
    "power_strided": Case(gs.PowerStrided, 32768, 8, 64),
    "proximity": Case(lambda: proximity_graph((6, 6, 5), 2.5), 131072, 8, 64),
    "random": Case(lambda: random_graph(131072, 32), 131072, 8, 64),
    "random_128": Case(lambda: random_graph(65536, 32), 65536, 8, 128),
    "power_law": Case(lambda: power_law_graph(169343, 1166243), 169343, 8, 64),
}


class Timed(NamedTuple):
    """What is timed of a case, each by both."""

    name: str
    runs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]]  # by jax and by torch, which may be asynchronous


def prepared(name: str, case: Case) -> Timed:
    """A case with everything made and compiled, whose results were compared."""
    pattern, (_, N, H, D) = case.pattern(), case
    torch.manual_seed(1)
    given = [torch.randn(1, N, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, dout = (jnp.from_dlpack(x) for x in given)
    plan = gsj.prepare(pattern, q, k)
    forward = jax.jit(lambda plan, q, k, v: gsj.attention(q, k, v, plan, implementation="hopper"))
    out, back = jax.jit(lambda plan, q, k, v: jax.vjp(lambda *x: gsj.attention(*x, plan), q, k, v))(plan, q, k, v)
    backward = jax.jit(lambda back, dout: back(dout))
    own = [x.requires_grad_() for x in given[:3]]
    theirs = gs.attention(*own, pattern, layout="bshd")
    gradients = torch.autograd.grad(theirs, own, given[3], retain_graph=True)
    for mine, other in zip((out, *backward(back, dout)), (theirs.detach(), *gradients), strict=True):
        largest = other.abs().max().item()
        off = (torch.from_dlpack(mine).float() - other.float()).abs().max().item()
        assert off <= 2**-6 * largest, f"{name}: off by {off} of {largest}"
    with torch.no_grad():
        gs.attention(*given[:3], pattern, layout="bshd")

    def of_torch() -> Any:
        with torch.no_grad():
            return gs.attention(*given[:3], pattern, layout="bshd")

    def gradients_of_torch() -> Any:
        return torch.autograd.grad(theirs, own, given[3], retain_graph=True)

    of_forward, of_backward = lambda: forward(plan, q, k, v), lambda: backward(back, dout)
    return Timed(name, {"forward": (of_forward, of_torch), "backward": (of_backward, gradients_of_torch)})


def dense(case: Case) -> Timed:
    """`jax.nn` with cuDNN: causal, with the same window, beside the window by kernels of torch."""
    N, H, D = case.N, case.H, case.D
    q, k, v = (jax.random.normal(jax.random.key(i), (1, N, H, D), jnp.bfloat16) for i in range(3))
    run = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=(4096, 0), implementation="cudnn"
        )
    )
    pattern = gs.SlidingWindow(4096)
    given = [torch.from_dlpack(x) for x in (q, k, v)]
    return Timed("cudnn", {"forward": (lambda: run(q, k, v), lambda: gs.attention(*given, pattern, layout="bshd"))})


def milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Of a call, of as many as take a while."""
    wait(run())
    start = time.perf_counter()
    wait(run())
    calls = max(3, int(SECONDS / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        made = run()
    wait(made)
    return 1e3 * (time.perf_counter() - start) / calls


def inside(run: Callable[[], Any], wait: Callable[[Any], Any], calls: int = 20) -> dict[str, Any]:
    """What the GPU does in one call after others: medians of each kernel and of the time before it, in us."""
    from torch.profiler import ProfilerActivity, profile

    wait(run())
    start = time.perf_counter()
    for _ in range(calls):
        made = run()
    host = 1e6 * (time.perf_counter() - start) / calls
    wait(made)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            made = run()
        wait(made)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = "kernel", "gpu_memcpy", "gpu_memset"
    there = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in kinds)
    each = len(there) // calls
    if not each or len(there) % calls:
        return {"host_us": host, "events": len(there)}
    gaps = [0.0, *(ts - (was + dur) for (was, dur, _), (ts, _, _) in pairwise(there))]
    rows = []
    for at in range(each):
        of_call = slice(at + each, None, each)  # the first call is left out
        (_, _, name), *_ = there[of_call]
        rows.append([name[:44], *(statistics.median(x) for x in ([d for _, d, _ in there[of_call]], gaps[of_call]))])
    return {"host_us": host, "kernel_us_and_before": rows}


def row(timed: Timed, kernels: bool = False) -> None:
    """Print the medians of both, in turns."""
    for direction, (ours, theirs) in timed.runs.items():
        found = [
            (milliseconds(ours, jax.block_until_ready), milliseconds(theirs, lambda _: torch.cuda.synchronize()))
            for _ in range(ROUNDS)
        ]
        mine, other = (statistics.median(x) for x in zip(*found, strict=True))
        tell(case=timed.name, direction=direction, jax_ms=mine, torch_ms=other, ratio=mine / other)
        if kernels:
            waits = jax.block_until_ready, lambda _: torch.cuda.synchronize()
            for name, run, wait in zip(("jax", "torch"), (ours, theirs), waits, strict=True):
                tell(case=timed.name, direction=direction, of=name, **inside(run, wait))


def tell(**what: Any) -> None:
    """Print a row."""
    rounded = {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in what.items()}
    print(json.dumps(rounded | {"device": jax.devices()[0].device_kind, "jax": jax.__version__}), flush=True)


def of_a_call() -> Callable[[], None]:
    """What a call takes the host, one after the other in a program and in a scan; the bits of a scan are compared."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 1, 128), jnp.bfloat16) for i in range(3))
    pattern = gs.SlidingWindow(100)
    plan = gsj.prepare(pattern, q, k)

    def layer(x: Any, _: Any = None) -> Any:
        return gsj.attention(x, k, v, plan, implementation="hopper"), None

    unrolled = jax.jit(lambda x: [x := layer(x)[0] for _ in range(LAYERS)][-1])
    scanned = jax.jit(lambda x: jax.lax.scan(layer, x, None, length=LAYERS)[0])
    large = [jax.random.normal(jax.random.key(i), (1, 8192, 8, 128), jnp.bfloat16) for i in range(3)]
    whole = gsj.prepare(pattern, large[0], large[1])

    def same(first: Any, q: Any, k: Any, v: Any) -> Any:
        def again(x: Any, _: Any) -> Any:
            return x, (gsj.attention(x, k, v, whole, implementation="hopper") == first).all()

        return jax.lax.scan(again, q, None, length=LAYERS)[1].all()

    first = gsj.attention(*large, whole, implementation="hopper")
    equal = bool(jax.jit(same)(first, *large))
    jax.block_until_ready((unrolled(q), scanned(q)))

    def run() -> None:
        times = {
            f"{name}_us": 1e3 * milliseconds(lambda f=f: f(q), jax.block_until_ready) / LAYERS
            for name, f in (("unrolled", unrolled), ("scanned", scanned))
        }
        tell(case="call", layers=LAYERS, equal_bits=equal, **times)

    return run


MAKERS: dict[str, Callable[[], Any]] = {name: partial(prepared, name, case) for name, case in CASES.items()}
MAKERS |= {"call": of_a_call, "cudnn": partial(dense, CASES["window"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; all")
    parser.add_argument("--turns", type=Path, metavar="FOLDER", help="wait there for the turn of the one that is named")
    parser.add_argument("--kernels", action="store_true", help="what the GPU does in a call, too")
    arguments = parser.parse_args()
    for name in arguments.names or MAKERS:
        start = time.perf_counter()
        try:
            made = MAKERS[name]()
        except Exception as error:  # the other rows are told all the same
            tell(case=name, failed=f"{type(error).__name__}: {str(error)[:600]}")
            continue
        tell(case=name, made_and_compiled_s=time.perf_counter() - start)
        if arguments.turns is not None:
            (arguments.turns / f"{name}.ready").touch()
            while not (arguments.turns / f"{name}.go").exists():
                time.sleep(0.05)
        row(made, arguments.kernels) if isinstance(made, Timed) else made()


if __name__ == "__main__":
    main()
