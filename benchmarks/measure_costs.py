"""What work takes on this device, measured: the numbers of `src/gossamer/plan/devices`, beside those that are there.

python benchmarks/measure_costs.py --write /tmp/costs            # of the GPU, after `gossamer compile`: some minutes
python benchmarks/measure_costs.py --device cpu --write /tmp/costs

Prints each number with the one that the plan takes now and the ratio of both. The file in the folder of `--write` has
what was measured, and what is committed of everything else and of numbers that timed choices corrected: their source
begins with "corrected". What it changes is shown by `tests/support/choices.py`.
Times of kernels are those of replayed CUDA graphs; the implementations' results of the same inputs are compared in the
run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bound import bound
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import graph_ms
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Direction
from gossamer.layouts import cached_gather, cached_layout
from gossamer.layouts.gather import WIDTHS
from gossamer.plan.capability import reasons
from gossamer.plan.costs import ANY, COMMAND, DEVICE, HEADS, Cost, DeviceCosts, File, costs_of, files
from gossamer.plan.estimate import Sample
from gossamer.plan.problem import Problem
from gossamer.plan.table import available, load
from gossamer.testing.graphs import proximity_graph, random_graph
from gossamer.torch.planning import chip_of

GUESS = "a guess"  # how the source of a number begins that nothing measures
CORRECTED = "corrected"  # and of one that leads to slower choices as it is measured
LOOSE = 2**-5  # of the largest result, between two implementations
HEADS_AT_ONCE = 8
STEPS = 2, 7  # of lists that no schedule cuts, on a device where few programs run
LENGTHS = {"cuda": 16384, "cpu": 4096}
SMALL = 1024
UNITS = {
    "value": "seconds of the device with all its processors; of start, combine, step and step_pair, of one; of bytes, "
    "bytes a second; by direction and head size, the larger of D and E",
    "step": "a step of a list alone: step + step_pair for each pair of a tile",
    "by": "benchmarks/measure_costs.py where it is missing",
}

Counts = dict[str, float]


class Kind(NamedTuple):
    """Problems whose costs are alike."""

    dtype: str
    head: int
    direction: Direction

    def cost(self, of: str, name: str, value: float) -> Cost:
        return Cost(of, name, value, COMMAND, 16 if self.dtype == "bfloat16" else 32, self.direction, self.head)


def text(file: File) -> str:
    """A file as it is written: a line for the numbers of one kind and source, of 5 digits."""
    head = dict(vars(file))
    costs = head.pop("costs")
    lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in (head | {"units": UNITS}).items()]
    rows = (_row(list(group)) for _, group in groupby(costs, lambda cost: (cost.of, cost.cost, cost.by, cost.bits)))
    return "{\n" + "".join(lines) + '"costs": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]\n}\n"


def _row(costs: Sequence[Cost]) -> dict[str, Any]:
    """Costs of one kind: what they share, and their numbers by direction and head size where they have these."""
    first, *_ = costs
    values: dict[str, dict[str, float]] = {}
    for cost in costs:
        values.setdefault(cost.direction, {})[str(cost.head)] = float(f"{cost.value:.5g}")
    row: dict[str, Any] = {"of": first.of, "cost": first.cost}
    if first.by != COMMAND:
        row["by"] = first.by
    if first.bits is None:
        return row | {"value": values[first.direction][str(first.head)]}
    return row | {"bits": first.bits, "value": values}


def replaced(file: File, measured: Sequence[Cost]) -> File:
    """A file with what was measured in its place, new numbers last; corrected ones stay."""

    def key(cost: Cost) -> tuple[Any, ...]:
        return cost._replace(value=0.0, by="")

    new = {key(cost): cost for cost in measured}
    kept = [(cost, new.pop(key(cost), cost)) for cost in file.costs]
    costs = (before if before.by.startswith(CORRECTED) else now for before, now in kept)
    return File(**vars(file) | {"costs": (*costs, *new.values())})


def fit(measured: Sequence[tuple[Counts, float]]) -> Counts:
    """What each thing takes, by their counts and the seconds of some calls: least squares of relative errors.

    None is negative: one that would be is left out.
    """
    names = list(dict.fromkeys(name for counts, _ in measured for name in counts))
    found = dict.fromkeys(names, 0.0)
    while names:
        a = np.array([[counts.get(name, 0.0) / seconds for name in names] for counts, seconds in measured])
        size = np.abs(a).max(0)
        x = np.linalg.lstsq(a / size, np.ones(len(measured)), rcond=None)[0] / size
        if x.min() >= 0:
            return found | dict(zip(names, x.tolist(), strict=True))
        del names[int(np.argmin(x * size))]
    return found


class Bench:
    """Prepared calls on one device, their seconds, and the results that they are compared by."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = torch.device(device), small
        self.chip = chip_of(torch.device(device, 0))._asdict() if device == "cuda" else {}
        self.results: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        self.N = SMALL if small else LENGTHS[device]

    def problem(self, kind: Kind, Q: int, K: int, heads: int = HEADS_AT_ONCE) -> Problem:
        H, D = heads, kind.head
        return Problem(
            1, H, H, Q, K, D, D, kind.dtype, self.device.type, **self.chip, backward=kind.direction == "backward"
        )

    def seconds(self, name: str, p: Problem, pattern: gs.Pattern, tile: tuple[int, int] | int) -> float:
        """Of one call of an implementation over a tile, or over groups of as many rows."""
        implementation = load(name)
        assert not isinstance(implementation, str), implementation
        sizes = {"q_offset": p.K - p.Q, "device": self.device}
        layout: Any
        if isinstance(tile, int):
            layout = cached_gather(pattern, p.Q, p.K, block_q=tile, **sizes)
        else:
            layout = cached_layout(pattern, p.Q, p.K, block_q=tile[0], block_kv=tile[1], **sizes)
        g = torch.Generator(self.device).manual_seed(0)
        dtype, scoring = getattr(torch, p.dtype), Scoring(p.D**-0.5, p.K - p.Q)

        def drawn(rows: int) -> Tensor:
            return torch.randn((1, p.H, rows, p.D), device=self.device, generator=g).to(dtype)

        given = {"q": drawn(p.Q), "k": drawn(p.K), "v": drawn(p.K)}
        results: tuple[Tensor, ...] = ()
        for direction in ("forward", "backward")[: 1 + p.backward]:
            if direction == "backward":
                given = {"dout": drawn(p.Q), **given, "out": results[0], "lse": results[1]}
            call = bound(partial(implementation.prepare, p, layout, direction, scoring), given)  # type: ignore[attr-defined]
            results = call()
        key = (pattern, p)
        for one, other in zip(results, self.results.setdefault(key, results), strict=False):
            error = float((one.float() - other.float()).abs().nan_to_num(0).max() / other.float().abs().max())
            assert error <= LOOSE, f"{name} {tile} {p}: off by {error:.3f}"
        return self.time(call, graph=name != "blocked")

    def time(self, call: Callable[[], object], graph: bool = True) -> float:
        """Seconds of a call: on the device alone, on a CPU the least of some."""
        if self.device.type == "cuda" and graph:
            return graph_ms(call) / 1e3
        call()
        times = []
        for _ in range(3 if self.small else 7):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) if self.device.type == "cuda" else min(times)

    def bytes_a_second(self) -> float:
        """Of three passes over float32 numbers."""
        x, y = (torch.zeros(2**14 if self.small else 2**26, device=self.device) for _ in range(2))
        out = torch.empty_like(x)
        return 12 * x.numel() / self.time(lambda: torch.add(x, y, out=out))

    # -- costs ----------------------------------------------------------------------------------------------------

    def of_device(self) -> Iterator[Cost]:
        """Memory; of a GPU, beginning and joining launches, by chains of few programs."""
        yield Cost(DEVICE, "bytes", self.bytes_a_second())
        if self.device.type == "cpu":
            return
        kind = Kind("bfloat16", 128, "forward")
        yield Cost(DEVICE, "start", self.chain("hopper", kind, (128, 128))[0])
        # Lists of 32 tiles are cut in two, those of 16 are not; the parts run side by side.
        cut, whole = (
            self.seconds("triton", self.problem(kind, 128, 128 * n, heads=4), gs.Dense(), (128, 128)) for n in (32, 16)
        )
        yield Cost(DEVICE, "combine", max(cut - whole, 0.0))

    def chain(self, name: str, kind: Kind, tile: tuple[int, int] | int) -> tuple[float, float]:
        """Seconds of a launch beside its steps, and of a step, where few programs run."""
        rows, width, least = (128, WIDTHS[tile], 32) if isinstance(tile, int) else (*tile, 1)
        keys = [n * max(width, least) for n in STEPS]
        seconds = [self.seconds(name, self.problem(kind, rows, K, heads=4), gs.Dense(), tile) for K in keys]
        step = (seconds[1] - seconds[0]) * width / (keys[1] - keys[0])
        return seconds[0] - keys[0] // width * step, step

    def of_tiles(self, name: str, kind: Kind, tile: tuple[int, int], start: float) -> Counts:
        """What pairs, pairs of tiles with bits, and rows take: full tiles, narrow windows, and tiles of bits alone."""
        N, measured = self.N, []
        p = self.problem(kind, N, N)
        for pattern in (gs.Causal(), gs.SlidingWindow(N // 64), gs.SlidingWindow(N // 16), gs.Dilated(N // 16, 0, 2)):
            work = Sample(pattern, pattern._sizes(N, N)).tiles(*tile)
            counts = {"pair": p.H * work.executed, "bits": p.H * work.bits, "row": float(p.H * N)}
            measured.append((counts, max(self.seconds(name, p, pattern, tile) - start, 1e-9)))
        return fit(measured)

    def of_gather(self, name: str, kind: Kind, block_q: int, column: float | None, start: float) -> Counts:
        """What columns and rows take, and pairs where the columns' are known: both are in one ratio in every list."""
        N, measured = SMALL if self.small else 2**14, []
        p, box = self.problem(kind, N, N), (4, 3, 3) if self.small else (5, 5, 4)
        graphs = [random_graph(N, degree) for degree in (4, 16, 64)]
        if block_q > 1:
            graphs = [proximity_graph(box, radius) for radius in (1.2, 1.8, 2.5)]
        for pattern in graphs:
            work = Sample(pattern, pattern._sizes(N, N)).gathers(block_q)
            counts = {"column": p.H * work.columns, "row": float(p.H * N)}
            known = start
            if column is not None:
                known += column * counts.pop("column")
                counts["pair"] = p.H * work.executed
            measured.append((counts, max(self.seconds(name, p, pattern, block_q) - known, 1e-9)))
        return fit(measured) | ({} if column is None else {"column": column})


def of_gpu(bench: Bench) -> Iterator[Cost]:
    """Every number of a GPU that is measured."""
    found = list(bench.of_device())
    yield from found
    start = next(cost.value for cost in found if cost.cost == "start")
    for dtype, heads in (("bfloat16", HEADS), ("float32", HEADS[:2])):
        for head in heads:
            for direction in ("forward", "backward"):
                kind = Kind(dtype, head, direction)  # type: ignore[arg-type]
                yield from of_kind(bench, kind, start)


def of_kind(bench: Bench, kind: Kind, start: float) -> Iterator[Cost]:
    """The costs of every tile and gather layout that is offered for problems of a kind."""
    p = bench.problem(kind, bench.N, bench.N)
    bench.results.clear()
    column: float | None = None  # of groups of one row, which `triton` alone reads
    for name in ("triton", "hopper"):
        missing, implementation = available(name), load(name)
        if missing or isinstance(implementation, str):
            raise SystemExit(f"{name} does not run here: {', '.join(missing)}")
        if not reasons(p, implementation.capability):
            yield from of_tiles(bench, name, kind, (implementation.tile(p), *implementation.tile_choices(p)), start)
        for choice in implementation.capability.gathers:
            if choice.reads(p):
                found = bench.of_gather(name, kind, choice.block_q, column, start)
                column = found["column"]
                of = f"{name} gather {choice.block_q}"
                yield from (kind.cost(of, cost, value) for cost, value in found.items())
                if kind.direction == "forward":
                    yield kind.cost(of, "step", bench.chain(name, kind, choice.block_q)[1])


def of_tiles(bench: Bench, name: str, kind: Kind, tiles: tuple[tuple[int, int], ...], start: float) -> Iterator[Cost]:
    """The costs of the tiles of an implementation, the preferred one first."""
    steps = [bench.chain(name, kind, tile)[1] for tile in tiles] if kind.direction == "forward" else []
    areas = [block_q * block_kv for block_q, block_kv in tiles]
    for at, tile in enumerate(tiles):
        of = f"{name} {tile[0]} x {tile[1]}" if at else name
        found = bench.of_tiles(name, kind, tile, start)
        yield kind.cost(of, "pair", found["pair"])
        of = ANY if of == "triton" else of
        yield kind.cost(of, "bits", found["bits"])
        if of == ("hopper" if kind.dtype == "bfloat16" else ANY):
            yield kind.cost(ANY, "row", found["row"])
        if len(steps) > 1:  # one tile alone does not say how much of its step its pairs are
            each = max(0.0, (steps[0] - steps[1]) / (areas[0] - areas[1]))
            yield kind.cost(of, "step", steps[at] - each * areas[at])
            yield kind.cost(of, "step_pair", each)


def of_cpu(bench: Bench) -> Iterator[Cost]:
    """Every number of a CPU that is measured."""
    yield from bench.of_device()
    one = bench.problem(Kind("float32", 64, "forward"), 64, 64, heads=1)
    call = bench.seconds("blocked", one, gs.Dense(), (64, 64))
    for direction in ("forward", "backward"):
        kind = Kind("float32", 64, direction)  # type: ignore[arg-type]
        tile = bench.of_tiles("blocked", kind, (64, 64), call)
        yield kind.cost("blocked", "pair", tile["pair"])
        if direction == "forward":
            yield from (kind.cost(ANY, cost, tile[cost]) for cost in ("bits", "row"))
        gather = bench.of_gather("blocked", kind, 1, None, call)
        yield from (kind.cost("blocked gather 1", cost, value) for cost, value in gather.items())
        if direction == "forward":  # a tile that takes less for each kept pair is never behind a gathered column
            yield kind.cost(ANY, "gathers_from", gather["column"])


def now(bench: Bench, cost: Cost, file: File) -> float:
    """What the plan takes for a cost today, measured or scaled."""
    if cost.bits is None:
        return next(c.value for c in file.costs if (c.of, c.cost) == (cost.of, cost.cost))
    known = DeviceCosts(file, cost.bits, cost.direction, cost.head, file.processors, measured=False)
    return known._one((cost.of, cost.of.split(" ")[0], ANY), cost.cost)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", type=Path, help="folder of the file; by default nothing is written")
    parser.add_argument("--small", action="store_true", help="sizes that say little, for a test of the command")
    a = parser.parse_args(arguments)
    bench = Bench(a.device, a.small)
    file = costs_of(bench.problem(Kind("float32", 64, "forward"), 64, 64)).file
    name = next(name for name, other in files().items() if other is file)
    if a.device == "cuda" and bench.chip["sm"] != file.sm:
        raise SystemExit(f"no file is of compute capability {bench.chip['sm']}: copy that of the nearest device first")
    measured = []
    with torch.no_grad():
        for cost in (of_gpu if a.device == "cuda" else of_cpu)(bench):
            before, where = now(bench, cost, file), f"{cost.bits or ''} {cost.direction} {cost.head}"
            ratio = f"{cost.value / before:.2f}" if before else "-"
            print(f"{cost.of:18s} {cost.cost:10s} {where:20s} {before:.4g} -> {cost.value:.4g}  x {ratio}", flush=True)
            measured.append(cost)
    if a.write is not None:
        a.write.mkdir(parents=True, exist_ok=True)
        (a.write / f"{name}.json").write_text(text(replaced(file, measured)))


if __name__ == "__main__":
    main()
