"""Time every candidate tile configuration of the Triton kernels, each direction apart, beside compiled FlexAttention.

    python benchmarks/tune_triton.py --out results/tune            # under 6 minutes on one H200
    python benchmarks/tune_triton.py --out results/tune --quick    # under 2 minutes

Each timed kernel is checked in the same run: sampled rows (forward, dQ) and sampled keys (dK, dV) against float64.
Useful TFLOP/s: 4 D for each kept pair forward, 10 D backward; dq and dkdv alone count the products they execute,
6 D and 8 D. A table is printed last, `tune.jsonl` is written under --out. (The committed rows were taken with other
samples for the check, `errors`, and without clearing the level-2 cache before each call.)
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from bound import bound, rows_of

from gossamer.bench.check import compare, draw_samples
from gossamer.bench.measure import matmul_rate, time_call
from gossamer.bench.peer import backward_call
from gossamer.bench.peers import PEERS
from gossamer.bench.results import append_records
from gossamer.bench.run import forward_call
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.launch import Operand, Prepared
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.block import launch_block as launch
from gossamer.kernels.triton.block.config import CANDIDATES, TileConfig, config
from gossamer.kernels.triton.config import BUCKETS, DIRECTIONS, Direction
from gossamer.layouts import BlockLayout
from gossamer.layouts.build import build
from gossamer.patterns import BigBird, Pattern, SlidingWindow
from gossamer.plan.problem import Problem
from gossamer.testing.cases import bigbird_matrix
from gossamer.testing.inputs import Inputs

DEVICE = torch.device("cuda")
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
RESULTS = {"forward": ("out", "lse"), "dq": ("dq",), "dkdv": ("dk", "dv")}

PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "window": lambda N: SlidingWindow(4096),
    "both": lambda N: SlidingWindow(4096, 4096),
    "blocks": lambda N: bigbird_matrix(N, 128),
    "bigbird": lambda N: BigBird(64),
}
# No split of rows in small problems, so that they compile the kernels of the large ones.
WARM_SPLIT = {"window": 10**9, "both": 10**9, "blocks": 10**9, "bigbird": None}
WARM_N = 16384


@dataclass
class Setting:
    """One case: its tensors and layout on the GPU."""

    name: str
    inputs: Inputs
    layout: BlockLayout
    problem: Problem


def setting(name: str, H: int, N: int, D: int) -> Setting:
    torch.manual_seed(0)
    pattern = PATTERNS[name](N)
    layout = build(pattern, N, N, block_q=128, block_kv=128)
    assert layout.columns.rows == N  # the transpose is built before the copy
    q, k, v, dout = (torch.randn(1, H, N, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    capability = torch.cuda.get_device_capability()
    problem = Problem(
        1, H, H, N, N, D, D, "bfloat16", "cuda", sm=capability[0] * 10 + capability[1],
        processors=torch.cuda.get_device_properties(DEVICE).multi_processor_count, backward=True,
    )  # fmt: skip
    inputs = Inputs(pattern, q, k, v, Terms(scale=D**-0.5, q_offset=0), dout)
    return Setting(name, inputs, layout.to("cuda"), problem)


def runner(
    s: Setting, direction: Direction, tiles: TileConfig | None, rows: torch.Tensor, limit: int | None
) -> Callable[[], dict[str, torch.Tensor]]:
    """A call of one kernel, its results by name."""
    x, scoring = s.inputs, scoring_of(s.inputs.terms)
    given = {"q": x.q, "k": x.k, "v": x.v}

    def prepare(operands: Mapping[str, Operand]) -> Prepared:
        if direction == "forward":
            return launch.forward(s.problem, s.layout, scoring, operands, tiles=tiles, limit=limit)
        return launch.backward(s.problem, s.layout, scoring, operands, tiles=tiles, limit=limit, walks=(direction,))

    run = bound(prepare, given if direction == "forward" else given | {"dout": x.dout, "row_terms": rows})
    return lambda: dict(zip(RESULTS[direction], run(), strict=True))


def scoring_of(terms: Terms) -> Scoring:
    return Scoring(terms.scale, terms.q_offset, terms.softcap)


@cache
def warm_setting(name: str, H: int, D: int) -> Setting:
    return setting(name, H, WARM_N, D)


def warm(task: tuple[str, Direction, TileConfig, int, int]) -> str:
    """Compile one configuration in a worker process, into the cache that the timing process reads."""
    name, direction, tiles, H, D = task
    try:
        s = warm_setting(name, H, D)
        rows = torch.zeros(2, 1, H, WARM_N, device=DEVICE)
        runner(s, direction, tiles, rows, WARM_SPLIT[name])()
        torch.cuda.synchronize()
    except Exception as error:  # a configuration that a GPU cannot hold is a result, not a failure of the run
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def candidates(direction: Direction, D: int, sm: int, quick: bool) -> list[TileConfig]:
    """The shipped configuration first, then the others."""
    bucket = next(b for b in BUCKETS if padded(D) <= b)
    found = [config(direction, 16, D, D, sm)]
    found += [c for c in CANDIDATES[direction, bucket] if c not in found]
    return found[:4] if quick else found


def tune(s: Setting, quick: bool, peers: bool, record: Callable[[dict[str, Any]], None]) -> None:
    p, x = s.problem, s.inputs
    pairs = round(x.pattern.density(p.Q, p.K) * p.Q * p.K) * p.H
    samples = draw_samples(x)
    scoring, inputs = scoring_of(x.terms), {"q": x.q, "k": x.k, "v": x.v}
    out, lse = bound(partial(launch.forward, p, s.layout, scoring), inputs)()
    results = {"dout": x.dout, "out": out, "lse": lse}
    make_rows = rows_of(p, s.layout.rows.tiles * s.layout.block_q, results)
    (rows,) = make_rows()

    def milliseconds(run: Callable[[], Any]) -> float:
        return time_call(run, DEVICE, budget_s=0.05 if quick else 0.1).p50

    best: dict[str, float] = {}
    for direction in DIRECTIONS:
        for tiles in candidates(direction, p.D, p.sm or 90, quick):
            row: dict[str, Any] = {"case": s.name, "direction": direction, **asdict(tiles)}
            try:
                run = runner(s, direction, tiles, rows, None)
                error, wrong = compare(samples, run(), group=1)
            except Exception as refusal:  # as in `warm`
                record(row | {"error": f"{type(refusal).__name__}: {str(refusal)[:80]}"})
                continue
            ms = milliseconds(run)
            tflops = pairs * 2 * PRODUCTS[direction] * p.D / ms / 1e9
            record(row | {"ms": ms, "tflops": tflops, "check": error, "wrong": wrong})
            if not wrong:
                best[direction] = min(best.get(direction, ms), ms)
    if len(best) < len(DIRECTIONS):
        return
    terms_ms = milliseconds(make_rows)
    whole = milliseconds(bound(partial(launch.backward, p, s.layout, scoring), results | inputs))
    backward = best["dq"] + best["dkdv"] + terms_ms
    useful = {"forward": pairs * 4 * p.D / 1e9, "backward": pairs * 10 * p.D / 1e9}
    for name, ms in (("best forward", best["forward"]), ("best backward", backward), ("shipped backward", whole)):
        record({"case": s.name, "direction": name, "ms": ms, "tflops": useful[name.split()[1]] / ms})
    record({"case": s.name, "direction": "row terms", "ms": terms_ms, "tflops": 0.0})
    if peers:
        flex = next(peer for peer in PEERS if peer.name == "FlexAttention Triton")
        prepared = flex.prepare(x, matmul_rate(x.q.dtype, DEVICE))
        for name, start in (("forward", forward_call), ("backward", backward_call)):
            ms = milliseconds(start(prepared, x))
            record({"case": s.name, "direction": f"flex {name}", "ms": ms, "tflops": useful[name] / ms})


def line(row: dict[str, Any]) -> str:
    tiles = (
        f"{row['rows']}x{row['columns']} w{row['warps']} s{row['stages']}{' tma' * row['tma']}" if "rows" in row else ""
    )
    if "error" in row:
        return f"{row['case']:8s} {row['direction']:16s} {tiles:19s} {row['error']}"
    check = f"check {row['check']:.2f} {'; '.join(row['wrong'])}" if "check" in row else ""
    return f"{row['case']:8s} {row['direction']:16s} {tiles:19s} {row['ms']:8.3f} ms {row['tflops']:7.1f} {check}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=list(PATTERNS), default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("-H", "--heads", type=int, default=8)
    parser.add_argument("-N", "--length", type=int, default=131072)
    parser.add_argument("-D", "--size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    names = options.cases or (["window", "blocks"] if options.quick else list(PATTERNS))
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    capability = torch.cuda.get_device_capability()
    sm = capability[0] * 10 + capability[1]
    # `both` compiles the same kernels as `window`.
    tasks = [
        (name, direction, tiles, options.heads, options.size)
        for name in names
        if not (name == "both" and "window" in names)
        for direction in DIRECTIONS
        for tiles in candidates(direction, options.size, sm, options.quick)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for task, error in zip(tasks, pool.map(warm, tasks), strict=True):
            if error:
                print("compile", *task[:3], error, flush=True)
    print(f"compiled {len(tasks)} kernels in {time.time() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "H": options.heads,
        "N": options.length,
        "D": options.size,
    }
    for name in names:
        of_case: list[dict[str, Any]] = []
        s = setting(name, options.heads, options.length, options.size)
        tune(s, options.quick, not options.no_peers, of_case.append)
        append_records([row | facts for row in of_case], options.out / "tune.jsonl", facts)
        rows += of_case
        print(f"{name} done at {time.time() - started:.0f} s", flush=True)
    print("\n".join(line(row) for row in rows))
    wrong = [row for row in rows if row.get("wrong")]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {time.time() - started:.0f} s")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
