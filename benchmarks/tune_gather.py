"""Time the gather kernels on the graph cases: every group of rows and configuration, each direction apart.

    python benchmarks/tune_gather.py                                  # all of it: about 80 s on one H200
    python benchmarks/tune_gather.py --cases graph_power_law --rows 1 16 --dtypes bfloat16

Sampled rows and keys of each configuration are checked against float64 in the same run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from bound import bound, rows_of
from torch import Tensor

from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import IMPLEMENTATION as HOPPER
from gossamer.kernels.hopper.choice import gather_config
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.launch import gather as hopper
from gossamer.kernels.launch import Builder, Operand, Prepared
from gossamer.kernels.triton.config import WALKS
from gossamer.kernels.triton.gather import launch_gather as launch
from gossamer.kernels.triton.gather.config import GroupConfig, RowConfig
from gossamer.layouts.gather import GatherLayout, GatherWalk, build_gather
from gossamer.plan.problem import Problem
from gossamer.testing.cases import case, tagged


@dataclass(frozen=True)
class Rings:
    """How the Hopper kernels are run: in the place of what each direction is shipped with, where not 0."""

    stages: int = 0
    blocks: int = 0  # of a multiprocessor


CONFIGURATIONS: dict[int, list[Any]] = {
    1: [RowConfig(4, 4, 1, registers) for registers in (None, 80, 96, 112, 128)]
    + [RowConfig(8, 4, 2, 96), RowConfig(8, 4, 2, 128), RowConfig(16, 4, 4, 96), RowConfig(4, 2, 1, 96),
       RowConfig(4, 8, 1, 128), RowConfig(2, 4, 1, 128)],
    16: [GroupConfig(1, 3), GroupConfig(2, 2), GroupConfig(2, 3)],
    32: [GroupConfig(2, 3), GroupConfig(4, 2)],
    64: [GroupConfig(4, 2), GroupConfig(4, 3), Rings(), Rings(2), Rings(3), Rings(blocks=2)],
}  # fmt: skip
SAMPLES = 16
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-6}
WORKERS = 12


def milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def listed(walk: GatherWalk, row: int, like: Tensor) -> Tensor:
    """The columns of one row of a walk with groups of one row."""
    start, count = int(walk.starts[0, 0, row]), int(walk.counts[0, 0, row])
    return torch.from_numpy(walk.indices[start : start + count].astype(np.int64)).to(like.device)


def worst(rows: GatherWalk, columns: GatherWalk, scale: float, q, k, v, dout, out, lse, dq, dk, dv) -> float:  # type: ignore[no-untyped-def]
    """The largest relative error, against float64, of all results on some rows and keys."""
    rng, found = np.random.default_rng(0), dict[str, list[float]]()

    def add(name: str, got: Tensor, exact: Tensor) -> None:
        error, size = found.setdefault(name, [0.0, 0.0])
        found[name] = [error + float((got.double() - exact).square().sum()), size + float(exact.square().sum())]

    for i in rng.choice(rows.rows, SAMPLES, replace=False):
        j = listed(rows, i, q)
        one, keys, values, g = q[0, :, i].double(), k[0, :, j].double(), v[0, :, j].double(), dout[0, :, i].double()
        s = torch.einsum("hd,hcd->hc", one, keys) * scale
        p = torch.softmax(s, 1)
        o = torch.einsum("hc,hcd->hd", p, values)
        ds = p * (torch.einsum("hd,hcd->hc", g, values) - (g * o).sum(1)[:, None])
        add("out", out[0, :, i], o)
        add("lse", lse[0, :, i], torch.logsumexp(s, 1))
        add("dq", dq[0, :, i], torch.einsum("hc,hcd->hd", ds, keys) * scale)
    for j in rng.choice(columns.rows, SAMPLES, replace=False):
        i = listed(columns, j, q)
        one, queries, g = k[0, :, j].double(), q[0, :, i].double(), dout[0, :, i].double()
        p = torch.exp(torch.einsum("hcd,hd->hc", queries, one) * scale - lse[0, :, i].double())
        delta = (g * out[0, :, i].double()).sum(-1)
        ds = p * (torch.einsum("hcd,hd->hc", g, v[0, :, j].double()) - delta)
        add("dv", dv[0, :, j], torch.einsum("hc,hcd->hd", p, g))
        add("dk", dk[0, :, j], torch.einsum("hc,hcd->hd", ds, queries) * scale)
    return max((error / size) ** 0.5 if size else 0.0 for error, size in found.values())


def triton_calls(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: GatherLayout, terms: Terms, config: Any,
    limit: int | None,
) -> list[Callable[[], Any]]:  # fmt: skip
    """What computes (out, lse), dq, and (dk, dv); the last two from results of the first."""
    options: dict[str, Any] = {"config": config, "limit": limit}
    scoring, inputs = Scoring(terms.scale, terms.q_offset, terms.softcap), {"q": q, "k": k, "v": v}
    forward = bound(partial(launch.forward, problem, layout, scoring, **options), inputs)
    out, lse = forward()
    (rows,) = rows_of(problem, launch.padded_rows(problem.Q), {"dout": dout, "out": out, "lse": lse})()
    backward, given = partial(launch.backward, problem, layout, scoring, **options), inputs | {"dout": dout}
    dq, dkdv = (bound(partial(backward, walks=(walk,)), given | {"row_terms": rows}) for walk in WALKS)
    return [forward, lambda: dq()[0], dkdv]


def hopper_configs(problem: Problem, rings: Rings) -> list[GatherConfig]:
    """The configuration of each direction; ValueError where one does not fit the chip."""
    shipped = [
        gather_config(way, problem.dtype, problem.D, problem.E, "fold") for way in ("forward", "query", "columns")
    ]
    return [replace(one, stages=rings.stages or one.stages, blocks=rings.blocks or one.blocks) for one in shipped]


def hopper_calls(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: GatherLayout, terms: Terms,
    config: list[GatherConfig], split: int | None,
) -> list[Callable[[], Any]]:  # fmt: skip
    """As `triton_calls`, of the Hopper kernels."""
    forward, query, columns = config
    scoring, inputs = Scoring(terms.scale, terms.q_offset, terms.softcap), {"q": q, "k": k, "v": v}
    run = bound(partial(hopper.forward, problem, layout, scoring, config=forward, split=split), inputs)
    out, lse = run()

    def row_terms(operands: Mapping[str, Operand]) -> Prepared:
        b = Builder(operands)
        return b.done(hopper.row_terms(b, problem, "out", "dout", query.size, query.size)[0])

    def by(one: GatherConfig, results: dict[str, Tensor], operands: Mapping[str, Operand]) -> Prepared:
        b = Builder(operands)
        for name, like in results.items():
            b.array(name, problem.dtype, tuple(like.shape))
        end = hopper.unread(b, "no_lengths", "int32", 1)
        hopper.gradients_by(one, b, problem, layout, scoring, tuple(operands), end, tuple(results), split)
        return b.done(*results)

    (rows,) = bound(row_terms, {"dout": dout, "out": out, "lse": lse})()
    given = inputs | {"dout": dout, "terms": rows}
    dq, dkdv = bound(partial(by, query, {"dq": q}), given), bound(partial(by, columns, {"dk": k, "dv": v}), given)
    return [run, lambda: dq()[0], dkdv]


def tune(name: str, dtype: str, rows: list[int], size: int | None) -> None:
    """Time one case; `size` compiles its kernels on a random graph of so many nodes instead."""
    c = case(name)
    N, kind = size or c.Q, getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(1, c.H, N, c.D, device="cuda", generator=generator).to(kind) for _ in range(4))
    if size is None:
        pattern = c.pattern()
    else:
        from gossamer.testing.graphs import random_graph

        pattern = random_graph(N, 16)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    problem = Problem(1, c.H, c.H, N, N, c.D, c.D, dtype, "cuda", sm=90, processors=processors, backward=True)
    terms = Terms(c.D**-0.5, 0)
    single = build_gather(pattern, N, N, block_q=1)
    for block_q in rows:
        host = single if block_q == 1 else build_gather(pattern, N, N, block_q=block_q)
        layout = host.to("cuda")
        for config in CONFIGURATIONS[block_q]:
            if isinstance(config, GroupConfig) and dtype == "float32":
                config = GroupConfig(config.warps, config.stages, "tf32x3")
            if isinstance(config, Rings) and (dtype == "float32" or HOPPER.unavailable()):
                continue
            make, made = triton_calls, config
            if isinstance(config, Rings):
                try:
                    make, made = hopper_calls, hopper_configs(problem, config)
                except ValueError as refused:
                    print(name, dtype, f"rows {block_q}", config, refused, flush=True)
                    continue
            for split in (32, None) if size else (None,):
                calls = make(problem, q, k, v, dout, layout, terms, made, split)
                (out, lse), dq, (dk, dv) = (call() for call in calls)
            if size:
                continue
            times = [milliseconds(call) for call in calls]
            error = worst(single.rows, single.columns, terms.scale, q, k, v, dout, out, lse, dq, dk, dv)
            found = f"error {error:.2e}", "" if error < TOLERANCE[dtype] else "WRONG"
            print(name, dtype, f"rows {block_q}", config, *(f"{t:.3f} ms" for t in times), *found, flush=True)
        if not size:
            fill = f"fill {host.stats.fill:.4f}, {host.stats.gathered / N:.2f} columns a row"
            print(name, dtype, f"rows {block_q}", fill, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[c.name for c in tagged("graph") if c.Q < 2**20])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--rows", nargs="*", type=int, default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--size", type=int, help="compile alone, on a random graph of so many nodes")
    options = parser.parse_args()
    jobs = [(name, dtype) for name in options.cases for dtype in options.dtypes if dtype in case(name).dtypes]
    if options.size is None:
        # Compile in parallel first: kernels depend on types and head sizes, not on the graph.
        waiting = [(name, dtype, rows) for name, dtype in jobs for rows in options.rows]
        for at in range(0, len(waiting), WORKERS):
            some = [
                [sys.executable, __file__, "--size", "4096", "--cases", name, "--dtypes", dtype, "--rows", str(rows)]
                for name, dtype, rows in waiting[at : at + WORKERS]
            ]
            for process in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in some]:
                process.wait()
    for name, dtype in jobs:
        tune(name, dtype, options.rows, options.size)


if __name__ == "__main__":
    main()
