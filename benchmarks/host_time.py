"""Host time of a call on a GPU, beside torch's SDPA and FA4 (flash-attn-4, where installed), on one tiny problem.

python benchmarks/host_time.py                 # B1 H8 N512 D128, causal, bfloat16
python benchmarks/host_time.py --length 4096   # past the sizes that `dense` takes

Microseconds per call: the median of 25 queues of 40 calls, each queue empty when it begins. The kernels are short, so
that the host is what is measured; a row whose kernels take longer than its calls says "device" instead of a number.
Results are compared with SDPA's first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gossamer as gs
from gossamer.kernels.table import available, load

CALLS, SAMPLES = 40, 25
LOOSE = 2**-5  # of the largest result: two roundings of bfloat16 and their order


def host_us(run: Callable[[], Any]) -> tuple[float, bool]:
    """(microseconds of a call, whether the device was still at work for longer than that when the host was done)."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    spent, drained = [], []
    for _ in range(SAMPLES):
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
        return (out, *torch.autograd.grad(out, x, dout))

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
    for name in ("hopper", "triton", "dense"):
        if not available(name):
            found[f"gossamer {name}"] = lambda *x, name=name: gs.attention(*x, pattern, implementation=name), False
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-N", "--length", type=int, default=512)
    parser.add_argument("-H", "--heads", type=int, default=8)
    parser.add_argument("-D", "--size", type=int, default=128)
    a = parser.parse_args()
    g = torch.Generator("cuda").manual_seed(0)
    shape = (1, a.heads, a.length, a.size)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=g).bfloat16() for _ in range(4))
    want: tuple[Tensor, ...] = ()
    print(f"{'':20s}{'forward':>12s}{'with grad':>12s}{'and backward':>14s}   microseconds of a call on the host")
    for name, (call, swapped) in (peers() | ours()).items():
        tensors = [x.transpose(1, 2).contiguous() if swapped else x for x in (q, k, v, dout)]
        x = [y.clone().requires_grad_() for y in tensors[:3]]
        own = load(name.split()[1]) if " " in name else None
        both = gradients(call, x, tensors[3])
        runs: dict[str, Callable[..., Any]] = {
            "forward": lambda call=call, t=tensors: call(*t[:3]),
            "with grad": lambda call=call, x=x: call(*x),
        }
        if own is None or (not isinstance(own, str) and own.capability.backward):
            runs["and backward"] = both
            found = tuple(y.transpose(1, 2) if swapped else y for y in both())
            want = want or found
            for result, right in zip(found, want, strict=True):
                error = (result.float() - right.float()).abs().max() / right.float().abs().max()
                assert error <= LOOSE, f"{name}: error {error:.3f}"
        else:
            del runs["with grad"]
        cells = []
        for what in ("forward", "with grad", "and backward"):
            us, device = host_us(runs[what]) if what in runs else (float("nan"), False)
            cells.append("device" if device else f"{us:.1f}")
        print(f"{name:20s}{cells[0]:>12s}{cells[1]:>12s}{cells[2]:>14s}", flush=True)


if __name__ == "__main__":
    main()
