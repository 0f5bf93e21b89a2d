"""What SparseK and entmax take on a CPU, thresholds and lists included, beside SDPA over all keys before the query.

    python benchmarks/selected_cpu.py                         # prints a line a row
    python benchmarks/selected_cpu.py 256 1024 --threads 1 --out FILE  # rows are added to a file of results

float32, 8 heads of 64, 64 keys kept and a window of 64; entmax at alpha 1.5. Results and gradients are held against
their definitions in float64 before anything is timed. A time is the median of calls that all take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gossamer as gs
from gossamer.bench.measure import device_name
from gossamer.bench.results import append_records

H, D, K_KEEP, WINDOW, ALPHA = 8, 64, 64, 64, 1.5
LENGTHS = (256, 512, 1024, 4096)
SECONDS = 10.0  # of the rounds of a direction
CHECKED = 256  # positions


def inputs(N: int) -> list[Tensor]:
    """q, k, v and u."""
    torch.manual_seed(0)
    return [torch.randn(1, H, N, *size, requires_grad=True) for size in ((D,), (D,), (D,), ())]


def sdpa(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sparsek(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    out: Tensor = gs.sparsek_attention(q, k, v, u, k_keep=K_KEEP, window=WINDOW)
    return out


def entmax(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    out: Tensor = gs.entmax_attention(q, k, v, alpha=ALPHA, causal=True)
    return out


def sparsek_by_definition(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """Each row's gates and largest scores from the scores before it alone."""
    N = q.shape[2]
    m, attended = [], torch.zeros(1, H, N, N, dtype=torch.bool)
    for i in range(N):
        m.append(F.pad(gs.sparsek(u[..., : i + 1], K_KEEP).m, (0, N - 1 - i)))
        largest = u[..., : i + 1].sort(dim=-1, descending=True, stable=True).indices[..., :K_KEEP]
        attended[:, :, i].scatter_(-1, largest, True)
    distance = torch.arange(N)[:, None] - torch.arange(N)
    near = (distance >= 0) & (distance <= WINDOW)
    s = ((q * D**-0.5) @ k.mT).masked_fill(~(attended | near), -torch.inf)
    return (s.softmax(-1) * torch.where(near, 1.0, torch.stack(m, -2))) @ v


def entmax_by_definition(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """Of sorted scores: tau of the largest support whose least score is over it."""
    s = ((q * D**-0.5) @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -1e9) / 2
    ordered = s.sort(-1, descending=True).values
    count = torch.arange(1, s.shape[-1] + 1)
    mean = ordered.cumsum(-1) / count
    variance = (ordered**2).cumsum(-1) / count - mean**2
    tau = mean - (1 / count - variance).clamp(min=0).sqrt()
    tau = tau.gather(-1, (tau <= ordered).sum(-1, keepdim=True) - 1)
    return (s - tau).clamp(min=0) ** 2 @ v


def error(call: Callable[..., Tensor], definition: Callable[..., Tensor]) -> float:
    """The largest difference of out and gradients, in units of rounding of the largest number of each."""
    x = inputs(CHECKED)
    wide = [t.detach().double().requires_grad_() for t in x]
    dout = torch.randn(1, H, CHECKED, D)
    worst = 0.0
    results = []
    for function, given in ((call, x), (definition, wide)):
        out = function(*given)
        found = torch.autograd.grad(out, given, dout.to(out.dtype), allow_unused=True)
        results.append([out.detach(), *(g for g in found if g is not None)])
    for a, b in zip(*results, strict=True):
        worst = max(worst, float((a.double() - b).abs().max() / b.abs().max()) / torch.finfo(torch.float32).eps)
    return worst


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = perf_counter() + SECONDS
    while perf_counter() < end or len(next(iter(found.values()))) < 5:
        for name, call in calls.items():
            start = perf_counter()
            call()
            found[name].append(1e3 * (perf_counter() - start))
    return {name: median(of_call) for name, of_call in found.items()}


def rows(N: int) -> Iterator[dict[str, Any]]:
    x = inputs(N)
    dout = torch.randn(1, H, N, D)
    every = {"SDPA": sdpa, "SparseK": sparsek, "entmax": entmax}
    ends = [t.detach() for t in x]
    for direction in ("forward", "forward and backward"):
        calls: dict[str, Callable[[], Any]] = {}
        for name, function in every.items():
            if direction == "forward":
                calls[name] = lambda function=function: function(*ends)
            else:
                calls[name] = lambda function=function: function(*x).backward(dout)
        found = times(calls)
        for name, ms in found.items():
            yield {"N": N, "direction": direction, "name": name, "ms": ms, "of_sdpa": ms / found["SDPA"]}
    found = times({"thresholds": lambda: torch.ops.gossamer.sparsek_kept(ends[3], K_KEEP)})
    yield {"N": N, "direction": "forward", "name": "thresholds", "ms": found["thresholds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--threads", type=int, help="of torch; by default as many as it takes")
    parser.add_argument("--out", type=Path, help="add rows to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name, pair in {"SparseK": (sparsek, sparsek_by_definition), "entmax": (entmax, entmax_by_definition)}.items():
        off = error(*pair)
        assert off < 64, (name, off)
        print(f"{name}: {off:.1f} units of rounding from its definition", flush=True)
    run = {"device": device_name(torch.device("cpu")), "torch": torch.__version__}
    found = []
    for N in options.lengths:
        for row in rows(N):
            found.append(run | row)
            of_sdpa = f"{row['of_sdpa']:6.2f} of SDPA" if "of_sdpa" in row else ""
            print(f"{row['N']:6} {row['name']:10} {row['direction']:20} {row['ms']:9.2f} ms {of_sdpa}", flush=True)
    if options.out:
        append_records(found, options.out, run)


if __name__ == "__main__":
    main()
