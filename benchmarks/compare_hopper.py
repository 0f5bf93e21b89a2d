"""One case by the Hopper kernels alone: configurations in turns, beside peers; or one launch, for a profiler.

    python benchmarks/compare_hopper.py window_512_causal                                     # beside FA4
    python benchmarks/compare_hopper.py window_512_causal --variants "" "hold=0" "stages=3"   # "" is the shipped one
    python benchmarks/compare_hopper.py bigbird_matrix_64 --kernel backward --variants "" "block_q=128,block_kv=128"
    python benchmarks/compare_hopper.py window_512_causal --kernel backward --rest 0.15       # single calls, rested
    python benchmarks/compare_hopper.py window_512_causal --once                              # benchmarks/profile.sh

Cases are those of gossamer.testing.cases. Sampled rows and keys are checked against float64 before anything is timed;
then everything runs once in each round, and the first round, on a chip that is not yet warm, is not counted. With
--rest a round is one call, behind so many seconds in which the chip cools. A line of JSON for each case: milliseconds
(medians), useful TFLOP/s, and each peer's time over that of a configuration.
`benchmarks/tune.py` tries all configurations that are valid and keeps the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tune import CHOOSERS, Group, caller

import gossamer
from gossamer.bench.check import compare, draw_samples
from gossamer.bench.measure import matmul_rate, time_call
from gossamer.bench.peer import Refusal, backward_call
from gossamer.bench.peers import PEERS
from gossamer.bench.rows import BACKWARD_WORK
from gossamer.bench.run import forward_call, ours
from gossamer.bench.workload import Workload, find, make_inputs
from gossamer.testing.inputs import Inputs
from gossamer.torch.explain import Explanation

DEVICE = torch.device("cuda")
ROUNDS = 5
OURS = ("triton",)  # implementations of this package that can stand as peers

Call = Callable[[], dict[str, torch.Tensor]]


def plan_of(inputs: Inputs, kernel: str) -> Explanation:
    """What a call of the direction would do by the Hopper kernels: its problem and its tile."""
    q, scale = inputs.q.detach().requires_grad_(kernel != "forward"), inputs.terms.scale
    return gossamer.explain(q, inputs.k, inputs.v, inputs.pattern, scale=scale, implementation="hopper")


def layout_of(inputs: Inputs, tile: tuple[int, int]) -> Any:
    """The layout of the pattern on the GPU."""
    sizes = inputs.q.shape[2], inputs.k.shape[2]
    return inputs.pattern.layout(*sizes, block_q=tile[0], block_kv=tile[1]).to("cuda")


def variant(inputs: Inputs, kernel: str, text: str) -> Call:
    """A configuration with fields replaced, "hold=2,stages=3"; block_q and block_kv replace the tile of the layout."""
    fields = {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}
    plan = plan_of(inputs, kernel)
    tile = fields.pop("block_q", plan.tile[0]), fields.pop("block_kv", plan.tile[1])
    p = plan.problem
    choice = dataclasses.replace(Group(kernel, p.D, p.E, tile, ()).shipped(), **fields) if fields else None
    return caller(kernel, inputs, p, layout_of(inputs, tile), choice)


def peer(inputs: Inputs, kernel: str, name: str) -> Call:
    """A peer of `gossamer bench`, or another implementation of this package. Raises Refusal."""
    known = {p.name: p for p in PEERS} | {own: ours(own) for own in OURS}
    prepared = known[name].prepare(inputs, matmul_rate(inputs.q.dtype, DEVICE))
    call = forward_call(prepared, inputs) if kernel == "forward" else backward_call(prepared, inputs)
    names = ("out",) if kernel == "forward" else ("dq", "dk", "dv")
    return lambda: dict(zip(names, call(), strict=True))


def rested(run: Call, seconds: float) -> float:
    """Milliseconds of one call on a chip that has done nothing for so long."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    time.sleep(seconds)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(work: Workload, kernel: str, variants: list[str], peers: list[str], rest: float = 0.0) -> dict[str, Any]:
    """The line of a case."""
    inputs = make_inputs(work, DEVICE)
    entries = {text or "shipped": variant(inputs, kernel, text) for text in variants}
    line: dict[str, Any] = {"case": work.name, "kernel": kernel} | ({"rest_s": rest} if rest else {})
    beside = []
    for name in peers:
        try:
            entries[name] = peer(inputs, kernel, name)
            beside.append(name)
        except Refusal as refusal:
            line[name] = f"refused: {refusal}"
    samples = draw_samples(inputs)
    for name, run in entries.items():
        error, wrong = compare(samples, run(), group=work.case.H // work.case.G)
        if wrong:
            raise SystemExit(f"{work.name}, {name}: {'; '.join(wrong)}")
        line[name] = {"error": round(error, 3)}
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(ROUNDS):
        for name, run in entries.items():
            times[name].append(rested(run, rest) if rest else time_call(run, DEVICE, budget_s=0.06).p50)
    gflop = 2 * (work.case.D + work.case.E) * work.pairs / 1e9 * (1 if kernel == "forward" else BACKWARD_WORK)
    best = {name: statistics.median(rounds[1:]) for name, rounds in times.items()}
    for name, ms in best.items():
        rounds = [round(t, 3) for t in times[name]]
        line[name] |= {"ms": round(ms, 4), "TFLOP/s": round(gflop / ms, 1), "rounds": rounds}
        if name not in beside:
            line[name] |= {f"of {other}": round(best[other] / ms, 3) for other in beside}
    return line


def launch_once(work: Workload, kernel: str) -> None:
    """The shipped kernel, after one launch that warms up."""
    run = variant(make_inputs(work, DEVICE), kernel, "")
    run()
    run()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="names of cases, tags hopper and dilated of gossamer.testing.cases")
    parser.add_argument("--kernel", choices=list(CHOOSERS), default="forward")
    parser.add_argument("--variants", nargs="*", default=[""], help='configurations: "hold=0" "hold=1,stages=3"')
    parser.add_argument("--peers", nargs="*", default=["FA4", "cuDNN block sparse"])
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS", help="before each call, which is alone")
    parser.add_argument("--once", action="store_true", help="launch the kernel twice, and check and time nothing")
    a = parser.parse_args()
    for name in a.cases:
        work = find(name, "cuda")
        if a.once:
            launch_once(work, a.kernel)
        else:
            print(json.dumps(measure(work, a.kernel, a.variants, a.peers, a.rest)), flush=True)


if __name__ == "__main__":
    main()
