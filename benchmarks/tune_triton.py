"""Time every candidate tile configuration of the Triton kernels, each direction apart, beside compiled FlexAttention.

    python benchmarks/tune_triton.py --out results/tune            # under 6 minutes on one H200
    python benchmarks/tune_triton.py --out results/tune --quick    # under 2 minutes

Each timed kernel is checked in the same run: sampled rows (forward, dQ) and sampled keys (dK, dV) against float64.
Useful TFLOP/s: 4 D for each kept pair forward, 10 D backward; dq and dkdv alone count the products they execute,
6 D and 8 D. A table is printed last, `tune.jsonl` is written under --out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.triton import launch
from gossamer.kernels.triton.config import BUCKETS, CANDIDATES, DIRECTIONS, Direction, TileConfig, config, padded
from gossamer.layouts import BlockLayout, build
from gossamer.patterns import BigBird, Pattern, SlidingWindow
from gossamer.testing.cases import bigbird_matrix

PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
SAMPLES = 24
TOLERANCE = 2e-2


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
    """One case: its pattern, layout and tensors on the GPU."""

    name: str
    pattern: Pattern
    layout: BlockLayout
    problem: Problem
    terms: Terms
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def setting(name: str, H: int, N: int, D: int) -> Setting:
    torch.manual_seed(0)
    pattern = PATTERNS[name](N)
    layout = build(pattern, N, N, block_q=128, block_kv=128)
    assert layout.columns.rows == N  # the transpose is built before the copy
    tensors = [torch.randn(1, H, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    capability = torch.cuda.get_device_capability()
    problem = Problem(1, H, H, N, N, D, D, "bfloat16", "cuda", capability[0] * 10 + capability[1], backward=True)
    return Setting(name, pattern, layout.to("cuda"), problem, Terms(scale=D**-0.5, q_offset=0), *tensors)


def milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """The median of `repeats` runs by device events, after two runs that are not counted."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


class Oracle:
    """float64 values of sampled rows and keys; dK and dV use the forward's lse, itself checked on the rows."""

    def __init__(self, s: Setting) -> None:
        self.s = s
        N = s.problem.Q
        generator = torch.Generator().manual_seed(1)
        self.at = torch.randint(N, (SAMPLES,), generator=generator).sort().values
        self.at[0], self.at[-1] = 0, N - 1
        positions = torch.arange(N).numpy()
        at = self.at.numpy()
        self.rows = torch.from_numpy(s.pattern.keep(at[:, None], positions[None, :], N, N)).cuda()
        self.columns = torch.from_numpy(s.pattern.keep(positions[None, :], at[:, None], N, N)).cuda()
        self.at = self.at.cuda()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, lse, dq) of the sampled rows, (H, SAMPLES, ...)."""
        s = self.s
        outs, lses, dqs = [], [], []
        for h in range(s.problem.H):
            q, k, v = s.q[0, h, self.at].double(), s.k[0, h].double(), s.v[0, h].double()
            dout = s.dout[0, h, self.at].double()
            score = (q @ k.mT * s.terms.scale).masked_fill(~self.rows, -torch.inf)
            lse = torch.logsumexp(score, -1)
            p = torch.exp(score - lse[:, None])
            out = p @ v
            ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
            outs.append(out)
            lses.append(lse)
            dqs.append(ds @ k * s.terms.scale)
        return torch.stack(outs), torch.stack(lses), torch.stack(dqs)

    def backward(self, lse: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(dk, dv) of the sampled keys, (H, SAMPLES, ...)."""
        s = self.s
        dks, dvs = [], []
        for h in range(s.problem.H):
            q, dout = s.q[0, h].double(), s.dout[0, h].double()
            k, v = s.k[0, h, self.at].double(), s.v[0, h, self.at].double()
            score = (k @ q.mT * s.terms.scale - lse[0, h].double()).masked_fill(~self.columns, -torch.inf)
            p = torch.exp(score)
            ds = p * (v @ dout.mT - delta[0, h].double())
            dvs.append(p @ dout)
            dks.append(ds @ q * s.terms.scale)
        return torch.stack(dks), torch.stack(dvs)


def runner(
    s: Setting,
    direction: Direction,
    tiles: TileConfig | None,
    rows: torch.Tensor,
    split: int | None,
) -> Callable[[], Any]:
    problem, layout, terms = s.problem, s.layout, s.terms
    if direction == "forward":
        return lambda: launch.forward(problem, s.q, s.k, s.v, layout, terms, tiles=tiles, split=split)
    gradient = launch.query_gradient if direction == "dq" else launch.key_gradients
    return lambda: gradient(problem, s.q, s.k, s.v, s.dout, rows, layout, terms, tiles=tiles, split=split)


@cache
def warm_setting(name: str, H: int, D: int) -> Setting:
    return setting(name, H, WARM_N, D)


def warm(task: tuple[str, Direction, TileConfig, int, int]) -> str:
    """Compile one configuration in a worker process, into the cache that the timing process reads."""
    name, direction, tiles, H, D = task
    try:
        s = warm_setting(name, H, D)
        rows = torch.zeros(2, 1, H, WARM_N, device="cuda")
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


def flex(s: Setting) -> tuple[float, float] | None:
    """(forward, forward and backward together) milliseconds of compiled FlexAttention with the same mask."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    N = s.problem.Q
    if s.name == "blocks":
        matrix = torch.from_numpy(bigbird_matrix(N, 128).mask.copy()).cuda()
        counts = matrix.sum(-1, dtype=torch.int32)[None, None]
        order = torch.argsort(matrix.int(), dim=-1, descending=True, stable=True).int()[None, None].contiguous()
        mask = FlexMask.from_kv_blocks(torch.zeros_like(counts), order, counts, order, BLOCK_SIZE=128)
    elif s.name in ("window", "both"):
        right = 0 if s.name == "window" else 4096

        def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j >= i - 4096) & (j <= i + right)

        mask = create_block_mask(keep, None, None, N, N, device="cuda", _compile=True)
    else:
        return None
    call = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.detach().clone().requires_grad_() for x in (s.q, s.k, s.v))
    with torch.no_grad():
        forward = milliseconds(lambda: call(q, k, v, block_mask=mask))
    out = call(q, k, v, block_mask=mask)
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), s.dout, retain_graph=True))
    return forward, backward


def tune(s: Setting, quick: bool, peers: bool, record: Callable[[dict[str, Any]], None]) -> None:
    p = s.problem
    pairs = round(s.pattern.density(p.Q, p.K) * p.Q * p.K) * p.H
    oracle = Oracle(s)
    out, lse = launch.forward(p, s.q, s.k, s.v, s.layout, s.terms)
    rows = launch.row_terms(p, s.dout, None, out, lse, s.layout.rows.tiles * s.layout.block_q)
    want_out, want_lse, want_dq = oracle.forward()
    want_dk, want_dv = oracle.backward(lse, rows[1])
    at = oracle.at
    best: dict[str, float] = {}
    for direction in DIRECTIONS:
        for tiles in candidates(direction, p.D, p.sm or 90, quick):
            row: dict[str, Any] = {"case": s.name, "direction": direction, **asdict(tiles)}
            run = runner(s, direction, tiles, rows, None)
            try:
                result = run()
                torch.cuda.synchronize()
            except Exception as error:  # as in `warm`
                record(row | {"error": f"{type(error).__name__}: {str(error)[:80]}"})
                continue
            if direction == "forward":
                errors = {
                    "out": relative(result[0][0][:, at], want_out),
                    "lse": float((result[1][0][:, at].double() - want_lse).abs().max()),
                }
            elif direction == "dq":
                errors = {"dq": relative(result[0][:, at], want_dq)}
            else:
                errors = {
                    "dk": relative(result[0][0][:, at], want_dk),
                    "dv": relative(result[1][0][:, at], want_dv),
                }
            ms = milliseconds(run, 5 if quick else 10)
            good = all(e < TOLERANCE for e in errors.values())
            tflops = pairs * 2 * PRODUCTS[direction] * p.D / ms / 1e9
            record(row | {"ms": ms, "tflops": tflops, "errors": errors, "correct": good})
            if good:
                best[direction] = min(best.get(direction, ms), ms)
    if len(best) < len(DIRECTIONS):
        return
    terms_ms = milliseconds(lambda: launch.row_terms(p, s.dout, None, out, lse, s.layout.rows.tiles * s.layout.block_q))
    whole = milliseconds(lambda: launch.backward(p, s.dout, None, s.q, s.k, s.v, out, lse, s.layout, s.terms))
    backward = best["dq"] + best["dkdv"] + terms_ms
    useful = {"forward": pairs * 4 * p.D / 1e9, "backward": pairs * 10 * p.D / 1e9}
    for name, ms in (("best forward", best["forward"]), ("best backward", backward), ("shipped backward", whole)):
        record({"case": s.name, "direction": name, "ms": ms, "tflops": useful[name.split()[1]] / ms})
    record({"case": s.name, "direction": "row terms", "ms": terms_ms, "tflops": 0.0})
    peer = flex(s) if peers else None
    if peer is not None:
        for name, ms in zip(("forward", "backward"), peer, strict=True):
            record({"case": s.name, "direction": f"flex {name}", "ms": ms, "tflops": useful[name] / ms})


def line(row: dict[str, Any]) -> str:
    tiles = (
        f"{row['rows']}x{row['columns']} w{row['warps']} s{row['stages']}{' tma' * row['tma']}" if "rows" in row else ""
    )
    if "error" in row:
        return f"{row['case']:8s} {row['direction']:16s} {tiles:19s} {row['error']}"
    errors = " ".join(f"{name} {value:.1e}" for name, value in row.get("errors", {}).items())
    wrong = "" if row.get("correct", True) else "  WRONG"
    return (
        f"{row['case']:8s} {row['direction']:16s} {tiles:19s} {row['ms']:8.3f} ms {row['tflops']:7.1f} {errors}{wrong}"
    )


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
    with (options.out / "tune.jsonl").open("a") as file:

        def record(row: dict[str, Any]) -> None:
            rows.append(row)
            file.write(json.dumps(row | facts) + "\n")
            file.flush()

        for name in names:
            tune(
                setting(name, options.heads, options.length, options.size), options.quick, not options.no_peers, record
            )
            print(f"{name} done at {time.time() - started:.0f} s", flush=True)
    print("\n".join(line(row) for row in rows))
    wrong = [row for row in rows if not row.get("correct", True)]
    print(f"{len(rows)} rows, {len(wrong)} wrong, {time.time() - started:.0f} s")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
