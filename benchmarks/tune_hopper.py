"""Check and time the Hopper forward kernel on a GPU, each part in its own process with a time limit.

python benchmarks/tune_hopper.py check          # every case against the float64 oracle
python benchmarks/tune_hopper.py time           # rows beside FA4 (flash-attn-4) or cuDNN, numbers checked in the run
python benchmarks/tune_hopper.py all
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.hopper import launch, launch_backward
from gossamer.layouts import from_dense
from gossamer.patterns import BigBird, BlockMask, Causal, Dense, SlidingWindow
from gossamer.testing.cases import bigbird_matrix

DEVICE = "cuda"


def problem_of(q: Any, k: Any, v: Any) -> Problem:
    B, H, Q, D = q.shape
    _, G, K, E = v.shape
    return Problem(B, H, G, Q, K, D, E, str(q.dtype).removeprefix("torch."), "cuda", 90)


def oracle(q: Any, k: Any, v: Any, keep: Any, terms: Terms) -> tuple[Any, Any]:
    """(out, lse) in float64 from a dense mask."""
    ratio = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(ratio, 1), v.double().repeat_interleave(ratio, 1)
    s = terms.scale * q @ k.transpose(-1, -2)
    if terms.softcap is not None:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    s = s.masked_fill(~keep, -math.inf)
    top = s.amax(-1, keepdim=True)
    if terms.sink_logits is not None:
        top = torch.maximum(top, terms.sink_logits.double()[:, None, None])
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if terms.sink_logits is not None:
        total = total + torch.exp(terms.sink_logits.double()[:, None, None] - top)
    out = torch.where(total > 0, p @ v / total.clamp_min(1e-300), torch.zeros_like(p @ v))
    return out, (top + torch.log(total)).squeeze(-1)


def inputs(B: int, H: int, G: int, Q: int, K: int, D: int, E: int, dtype: Any, seed: int = 0) -> list[Any]:
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    return [
        torch.randn(shape, generator=g, device=DEVICE, dtype=torch.float32).to(dtype)
        for shape in ((B, H, Q, D), (B, G, K, D), (B, G, K, E))
    ]


def cases(sizes: tuple[int, ...]) -> list[tuple[str, Callable[[], float]]]:
    """(name, run) pairs; run returns the error over the bound (at most 1 passes)."""
    rng = np.random.default_rng(0)
    bf, fp = torch.bfloat16, torch.float16
    found: list[tuple[str, Callable[[], float]]] = []

    def add(name, B, H, G, Q, K, D, layout, dtype=bf, E=None, split=None, strided=False, repeat=1, tile=None, **terms):
        def run() -> float:
            made = layout(tile or (128, 128))
            q, k, v = inputs(B, H, G, Q, K, D, E or D, dtype)
            if strided:
                q, k, v = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
            t = Terms(scale=terms.get("scale", D**-0.5), q_offset=K - Q, softcap=terms.get("softcap"),
                      sink_logits=terms.get("sinks"))  # fmt: skip
            keep = torch.from_numpy(np.ascontiguousarray(made.expand())).to(DEVICE)
            want, want_lse = oracle(q, k, v, keep, t)
            on = made.to(DEVICE)
            worst, first = 0.0, None
            for _ in range(repeat):
                out, lse = launch.forward(problem_of(q, k, v), q, k, v, on, t, split=split)
                torch.cuda.synchronize()
                if first is None:
                    first = out.clone()
                    unit = 2**-8 if dtype is bf else 2**-10
                    error = (out.double() - want).abs().max().item() / max(1e-3, want.abs().max().item())
                    finite = torch.isfinite(want_lse)
                    gap = (lse.double() - want_lse)[finite].abs().max().item() if finite.any() else 0.0
                    same = bool((torch.isfinite(lse) == finite).all()) and not bool(lse.isnan().any())
                    bad = not bool(torch.isfinite(out).all()) or not same
                    worst = max(error / (2 * unit), gap / 1e-3, math.inf if bad else 0.0)
                elif not torch.equal(first, out):
                    worst = math.inf
            return worst

        found.append((name, run))

    def dense(mask):
        return lambda tile: from_dense(mask, block_q=tile[0], block_kv=tile[1])

    def pattern(p, Q, K):
        return lambda tile: p.layout(Q, K, block_q=tile[0], block_kv=tile[1])

    for D in sizes:
        add(f"full D{D}", 1, 2, 2, 512, 512, D, pattern(Dense(), 512, 512))
        add(f"causal ragged gqa D{D}", 2, 4, 2, 300, 777, D, pattern(Causal(), 300, 777))
        add(f"window ragged D{D}", 1, 3, 1, 1000, 1000, D, pattern(SlidingWindow(200), 1000, 1000))
        add(f"window two sides D{D}", 2, 2, 2, 1500, 1500, D, pattern(SlidingWindow(300, 90), 1500, 1500), dtype=fp)
        holes = rng.random((1, 3, 391, 517)) < 0.3
        holes[:, :, 40:60] = False
        holes[:, 1, 128:256] = False
        add(f"bits per head, empty rows D{D}", 2, 3, 3, 391, 517, D, dense(holes))
        add(f"bits per batch D{D}", 2, 2, 1, 200, 900, D, dense(rng.random((2, 1, 200, 900)) < 0.05))
        blocks = BlockMask(rng.random((12, 12)) < 0.4, 128)
        add(f"blocks D{D}", 1, 2, 2, 1500, 1500, D, pattern(blocks, 1500, 1500))
        mixed = np.zeros((1, 1, 640, 1664), dtype=bool)
        mixed[..., :384] = True
        mixed[..., 512:1000] = rng.random((1, 1, 640, 488)) < 0.5
        add(f"split D{D}", 2, 2, 1, 640, 1664, D, dense(mixed), split=2)
        sinks = torch.randn(2, device=DEVICE)
        add(f"split, sinks D{D}", 2, 2, 2, 640, 1664, D, dense(mixed), split=3, sinks=sinks)
        add(f"sinks D{D}", 1, 2, 2, 640, 1664, D, dense(mixed), sinks=sinks)
        add(f"one query D{D}", 2, 4, 2, 1, 3000, D, pattern(Causal(), 1, 3000), split=4)
        add(f"race D{D}", 1, 8, 4, 4000, 4000, D, pattern(SlidingWindow(700), 4000, 4000), repeat=50)
    D = sizes[0]
    add("strided", 2, 3, 3, 500, 500, D, pattern(Causal(), 500, 500), strided=True)
    add("softcap", 1, 2, 2, 500, 500, D, pattern(Causal(), 500, 500), softcap=5.0)
    add("negative scale", 1, 2, 2, 500, 500, D, pattern(Causal(), 500, 500), scale=-0.1)
    add("padded 40, 24", 1, 2, 2, 500, 500, 40, pattern(Causal(), 500, 500), E=24)
    add("odd 77, 33", 1, 2, 2, 500, 500, 77, pattern(Causal(), 500, 500), E=33)
    add("wide value 64, 128", 1, 2, 2, 500, 500, 64, pattern(Causal(), 500, 500), E=128)
    return found


def check(sizes: tuple[int, ...]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # and new memory is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    failed = 0
    for name, run in cases(sizes):
        print(f"  {name} ...", end=" ", flush=True)
        try:
            ratio = run()
        except Exception as error:
            ratio = math.inf
            print(type(error).__name__, str(error)[:300], end=" ")
        failed += not ratio <= 1
        print(f"{ratio:.3f}" + ("" if ratio <= 1 else "  FAILED"), flush=True)
    print(f"check D{sizes}: {failed} failed", flush=True)


def median_ms(run: Callable[[], Any], seconds: float = 0.25) -> float:
    """Device time of a call: several calls between two events, so that the host's share stays out."""
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    calls = max(1, round(0.01 / (time.perf_counter() - begin)))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def host_us(run: Callable[[], Any], calls: int = 200) -> float:
    """Host time of a call whose kernels are short."""
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * spent / calls


N = 131072
ROUNDS = 5  # every kernel once in each; the first, on a chip that is not yet warm, is not counted
ROWS: dict[str, tuple[Any, ...]] = {
    # name: pattern, H, N, D, FA4's arguments or another peer's name; tile when not the first choice
    "window left 4096 D128": (lambda: SlidingWindow(4096), 8, N, 128, {"causal": True, "window_size": (4096, 0)}),
    "window +-4096 D128": (lambda: SlidingWindow(4096, 4096), 8, N, 128, {"window_size": (4096, 4096)}),
    "window left 512 D128": (lambda: SlidingWindow(512), 8, N, 128, {"causal": True, "window_size": (512, 0)}),
    "window left 4096 D64": (lambda: SlidingWindow(4096), 16, N, 64, {"causal": True, "window_size": (4096, 0)}),
    "128-blocks 3.1 % D128": (lambda: bigbird_matrix(N, 128), 8, N, 128, None),
    "64-blocks 2.9 % D128": (lambda: bigbird_matrix(N, 64), 8, N, 128, "cuDNN", (64, 64)),
    "64-blocks 11 % D128": (lambda: banded_matrix(32768, 64, 0.1), 16, 32768, 128, "cuDNN", (64, 64)),
    "64-blocks 2.9 % D64": (lambda: bigbird_matrix(N, 64), 16, N, 64, "cuDNN", (64, 64)),
    "dense causal 32768 D128": (lambda: Causal(), 16, 32768, 128, {"causal": True}),
    "BigBird(64) D128": (lambda: BigBird(64), 8, N, 128, "Triton", (64, 64)),
}


def banded_matrix(n: int, block: int, share: float) -> BlockMask:
    """Three diagonals, two columns and a random share of the blocks, as in `testing.cases.bigbird_matrix`."""
    blocks, g = n // block, torch.Generator().manual_seed(0)
    mask = torch.rand(blocks, blocks, generator=g) < share
    i = torch.arange(blocks)
    for o in (-1, 0, 1):
        mask[i, (i + o).clamp(0, blocks - 1)] = True
    mask[:, :2] = True
    return BlockMask(mask, block)


def peer_of(name: str, what: Any, pattern: Any, q: Any, k: Any, v: Any) -> tuple[str, Callable[[], Any]] | None:
    """(name, call) of what a row is measured beside; a call returns out (B, H, Q, E)."""
    if what is None:
        return None
    n, D = q.shape[2:]
    if what == "Triton":
        from gossamer.kernels.triton import IMPLEMENTATION as triton

        layout = pattern.layout(n, n, block_q=64, block_kv=64).to(DEVICE)
        p, terms = problem_of(q, k, v), Terms(scale=D**-0.5, q_offset=0)
        return "Triton", lambda: triton.forward(p, q, k, v, layout, terms)[0]
    if what == "cuDNN":
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        matrix = torch.from_numpy(np.array(pattern.mask)).to(DEVICE).reshape(n // pattern.block, -1)
        counts = matrix.sum(1, dtype=torch.int32)
        order = matrix.int().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())].int()
        lists = {
            "q2k_block_index": order.expand(1, q.shape[1], -1, -1).contiguous(),
            "q2k_block_nums": counts.expand(1, q.shape[1], -1).contiguous(),
            "sparse_block_size": pattern.block,
            "softmax_scale": D**-0.5,
        }
        return "cuDNN", lambda: block_sparse_attention_forward(q, k, v, **lists)["o_tensor"]
    from flash_attn.cute.interface import flash_attn_func

    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def fa4() -> Any:
        out = flash_attn_func(*swapped, **what)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return "FA4", fa4


def rows(names: list[str], variants: list[str], once: bool = False) -> None:
    from gossamer.kernels.hopper import IMPLEMENTATION

    for name in names:
        make, H, n, D, what, *tile = ROWS[name]
        q, k, v = inputs(1, H, H, n, n, D, D, torch.bfloat16)
        p, pattern = problem_of(q, k, v), make()
        block_q, block_kv = tile[0] if tile else IMPLEMENTATION.tile(p)
        pairs = pattern.density(n, n) * n * n * H
        on, terms = (
            pattern.layout(n, n, block_q=block_q, block_kv=block_kv).to(DEVICE),
            Terms(scale=D**-0.5, q_offset=0),
        )
        out, _ = launch.forward(p, q, k, v, on, terms)
        if once:
            out, lse = launch.forward(p, q, k, v, on, terms)
            launch_backward.backward(p, torch.randn_like(out), None, q, k, v, out, lse, on, terms)
            torch.cuda.synchronize()
            continue
        result: dict[str, Any] = {"row": name}
        peer = peer_of(name, what, pattern, q, k, v)
        calls: dict[str, Callable[[], Any]] = {} if peer is None else dict([peer])
        for text in variants:
            fields = fields_of(text)
            rows_, columns = fields.pop("block_q", block_q), fields.pop("block_kv", block_kv)
            layout = pattern.layout(n, n, block_q=rows_, block_kv=columns).to(DEVICE)
            call = functools.partial(launch.forward, p, q, k, v, layout, terms)
            calls[text or "shipped"] = functools.partial(with_variant, fields, call)
        for text, run in calls.items():
            other = run()
            other = other[0] if isinstance(other, tuple) else other
            result["difference " + text] = (other.float() - out.float()).abs().max().item()
        times: dict[str, list[float]] = {text: [] for text in calls}
        for _ in range(ROUNDS):
            for text, run in calls.items():
                times[text].append(median_ms(run, 0.06))
        best = {text: statistics.median(t[1:]) for text, t in times.items()}
        rate = 4 * D * pairs / 1e9
        for text, ms in best.items():
            result[text] = {"ms": round(ms, 4), "TFLOP/s": round(rate / ms, 1)}
            if peer is not None and text != peer[0]:
                result[text]["ratio"] = round(best[peer[0]] / ms, 3)
        result["rounds"] = {text: [round(x, 3) for x in t] for text, t in times.items()}
        print(json.dumps(result), flush=True)


def fields_of(text: str) -> dict[str, int]:
    """Fields of a configuration: "hold=2,stages=3"."""
    return {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}


def with_variant(fields: dict[str, int], run: Callable[[], Any]) -> Any:
    """Run with fields of the configuration replaced."""
    if not fields:
        return run()
    shipped = launch.forward_config
    launch.forward_config = variant(shipped, tuple(fields.items()))
    try:
        return run()
    finally:
        launch.forward_config = shipped


@functools.cache
def variant(shipped: Callable[..., Any], fields: tuple[tuple[str, int], ...]) -> Callable[..., Any]:
    """The choice of configurations with fields replaced; one object each, by which a launch keeps what it prepares."""
    return lambda *a: dataclasses.replace(shipped(*a), **dict(fields))


def host() -> None:
    """Host time of a call on a small problem, beside FA4's."""
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = inputs(1, 8, 8, 512, 512, 128, 128, torch.bfloat16)
    p, terms = problem_of(q, k, v), Terms(scale=0.1, q_offset=0)
    on = Causal().layout(512, 512, block_q=128, block_kv=128).to(DEVICE)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    result = {
        "hopper": host_us(lambda: launch.forward(p, q, k, v, on, terms)),
        "FA4": host_us(lambda: flash_attn_func(*swapped, causal=True)),
        "SDPA": host_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
    }
    print("host us", json.dumps({name: round(x, 1) for name, x in result.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["check", "time", "all", "check-child", "time-child", "once", "host"])
    parser.add_argument("--sizes", default="128,64")
    parser.add_argument("--rows", default="")
    parser.add_argument("--variants", default="", help="configurations to compare: 'hold=0;hold=1'")
    parser.add_argument("--limit", type=float, default=60)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sizes = tuple(int(x) for x in a.sizes.split(","))
    names = [n for n in ROWS if not a.rows or any(part in n for part in a.rows.split(","))]
    if a.what == "check-child":
        return check(sizes)
    if a.what == "time-child":
        return rows(names, a.variants.split(";"))
    if a.what == "host":
        return host()
    if a.what == "once":
        return rows(names, [""], once=True)
    for part in ("check", "time"):
        if a.what in (part, "all"):
            command = [sys.executable, os.path.abspath(__file__), part + "-child", "--sizes", a.sizes, "--rows", a.rows]
            command += ["--variants", a.variants]
            start = time.perf_counter()
            try:
                code: Any = subprocess.run(command, timeout=a.limit).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {a.limit:.0f} s: a kernel hangs?"
            print(f"{part}: exit {code}, {time.perf_counter() - start:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    main()
