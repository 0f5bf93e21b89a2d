"""What SparseK attention takes on a GPU, thresholds and lists included, beside dense causal attention.

    python benchmarks/sparsek.py                          # prints a line a row
    python benchmarks/sparsek.py 131072 --peers           # one length, beside SDPA's fastest and FA4 where it is there
    python benchmarks/sparsek.py --slope 1e-4 --out FILE  # scores that rise; rows are added to a file of results

bfloat16, 8 heads of 128, 1024 keys kept, a window of 512; scores are normal, plus a slope times the position. Before it
is timed a call is held against its definition in float64, in one head: out and dq of some rows, whose thresholds and
largest scores are found from the scores before them alone, and dk and dv of some keys. The limit is twice the rounding
of bfloat16. Times are medians of CUDA events: forwards of replayed graphs, backwards called one by one. The last line
is the exponent of N that fits the times of all lengths.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.bench.measure import device_name
from gossamer.bench.results import append_records

CUDA = torch.device("cuda")
H, D, K_KEEP, WINDOW = 8, 128, 1024, 512
LENGTHS = (32768, 65536, 131072, 262144, 524288)


def inputs(N: int, slope: float) -> list[Tensor]:
    """q, k, v and u."""
    draw = torch.Generator(CUDA).manual_seed(0)
    x = [torch.randn(1, H, N, D, device=CUDA, dtype=torch.bfloat16, generator=draw) for _ in range(3)]
    u = torch.randn(1, H, N, device=CUDA, generator=draw) + slope * torch.arange(N, device=CUDA)
    return [t.requires_grad_() for t in (*x, u)]


def attend(x: list[Tensor], **more: Any) -> Any:
    return gs.sparsek_attention(*x, k_keep=K_KEEP, window=WINDOW, **more)


def error(x: list[Tensor], dout: Tensor) -> float:
    """The largest error of the sampled rows and keys of head 1, over its limit."""
    out, lse = attend(x, return_lse=True)
    found = torch.autograd.grad(out, x, dout)
    q, k, v, u, o, do, l, dq, dk, dv = (t[0, 1].detach().double() for t in (*x, out, dout, lse, *found[:3]))
    delta = (do * o).sum(-1)
    N, scale = len(u), D**-0.5
    worst = 0.0

    def compare(a: Tensor, b: Tensor, cancelled: Tensor | None = None) -> None:
        """`cancelled`: what was taken off, whose rounding counts too: the first row's dq is 0."""
        nonlocal worst
        assert bool(torch.isfinite(a).all()), "not finite"
        size = b.norm() if cancelled is None else b.norm() + cancelled.norm()
        worst = max(worst, float((a - b).norm() / size) / (2 * 2**-8))

    for i in [0, N - 1, *torch.randint(0, N, (14,)).tolist()]:
        keys = torch.arange(i + 1, device=CUDA)
        m = gs.sparsek(u[: i + 1], K_KEEP).m
        largest = u[: i + 1].sort(descending=True, stable=True).indices[:K_KEEP]
        kept = torch.zeros(i + 1, dtype=torch.bool, device=CUDA).index_fill_(0, largest, True)
        near = keys >= i - WINDOW
        m = torch.where(near, 1, m)
        s = torch.where(near | kept, scale * (k[: i + 1] @ q[i]), -torch.inf)
        p = s.softmax(0)
        compare(o[i], (p * m) @ v[: i + 1])
        ds = p * (m * (v[: i + 1] @ do[i]) - delta[i])
        compare(dq[i], scale * (ds @ k[: i + 1]), scale * delta[i] * (p @ k[: i + 1]))
    tau, last = gs.sparsek_causal(u, K_KEEP).tau, gs.last_topk(u, K_KEEP)
    for j in [0, N - 1, *torch.randint(0, N, (6,)).tolist()]:
        rows = slice(j, max(int(last[j]), min(j + WINDOW, N - 1)) + 1)
        m = torch.where(torch.arange(j, rows.stop, device=CUDA) <= j + WINDOW, 1, (u[j] - tau[rows]).clamp(0, 1))
        p = (scale * (q[rows] @ k[j]) - l[rows]).exp()
        compare(dv[j], (p * m) @ do[rows])
        taken = p * delta[rows]
        compare(dk[j], scale * ((p * m * (do[rows] @ v[j]) - taken) @ q[rows]), scale * (taken @ q[rows]))
    return worst


def median(call: Callable[[], Any], repeats: int = 5) -> float:
    """Milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def measure(N: int, slope: float) -> Iterator[dict[str, Any]]:
    """The rows of a length."""
    x = inputs(N, slope)
    *_, u = x
    dout = torch.randn_like(x[0])
    checked = error(x, dout)
    assert checked <= 1, f"N {N}, slope {slope}: {checked} times the limit"
    case = {"N": N, "slope": slope, "k_keep": K_KEEP, "window": WINDOW, "H": H, "D": D, "check": checked}
    with torch.no_grad():
        forward, _ = captured(lambda: attend(x))
        thresholds, _ = captured(lambda: torch.ops.gossamer.sparsek_kept(u, K_KEEP))
        times = {"ms": median(forward.replay), "thresholds_ms": median(thresholds.replay)}
    yield {**case, "direction": "forward", **times}
    out = attend(x)
    yield {**case, "direction": "backward", "ms": median(lambda: torch.autograd.grad(out, x, dout, retain_graph=True))}


def peers(N: int) -> Iterator[dict[str, Any]]:
    """Dense causal attention."""
    *x, _ = inputs(N, 0.0)
    calls: dict[str, Callable[[], Tensor]] = {
        "SDPA cuDNN": lambda: F.scaled_dot_product_attention(*x, is_causal=True),
    }
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        pass
    else:
        turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in x]
        calls["FA4"] = lambda: flash_attn_func(*turned, causal=True)[0]
    for name, call in calls.items():
        given = turned if name == "FA4" else x
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with torch.no_grad():
                yield {"N": N, "peer": name, "direction": "forward", "ms": median(call, 3)}
            out = call()
            dout = torch.randn_like(out)
            backward = median(lambda: torch.autograd.grad(out, given, dout, retain_graph=True), 3)  # noqa: B023
            yield {"N": N, "peer": name, "direction": "backward", "ms": backward}


def exponents(rows: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of each direction, by least squares of logarithms."""
    for direction in ("forward", "backward"):
        points = [(math.log(r["N"]), math.log(r["ms"])) for r in rows if r["direction"] == direction and "k_keep" in r]
        if len(points) > 1:
            x, y = (torch.tensor(part, dtype=torch.float64) for part in zip(*points, strict=True))
            x = x - x.mean()
            yield direction, float((x * y).sum() / (x * x).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--slope", type=float, default=0.0)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows = []
    for N in a.lengths:
        for row in [*measure(N, a.slope), *(peers(N) if a.peers else ())]:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
    for direction, exponent in exponents(rows):
        print(f"{direction}: time grows with N to the power {exponent:.3f}")
    if a.out is not None:
        append_records([{"device": device_name(CUDA)} | row for row in rows], a.out, ("device",))


if __name__ == "__main__":
    main()
