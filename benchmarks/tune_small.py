"""Times the tiles of the `small` implementation beside SDPA and the other implementations, by replayed CUDA graphs.

    python benchmarks/tune_small.py >> results/tune_dense.jsonl

One line for each head size and number of positions (B 1, H 8, bfloat16; the pattern is a causal window of a quarter of
the positions, which `small` computes whole): microseconds of one call. Tiles are R x C, warps, stages. The numbers of
`small` are checked first, on sizes that fit no tile. The committed rows were taken before the times of the host were
part of a row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bound import bound
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gossamer as gs
from gossamer.bench.latency import call_ms, capture_stream, graph_ms
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.reference import oracle
from gossamer.kernels.small import MOST_PAIRS
from gossamer.kernels.small.launch_small import Tile, backward, forward
from gossamer.plan.problem import Problem
from gossamer.torch.mask_layouts import packed_mask_of

HEADS = 8
SIZES = {128: (26, 128, 200, 512, 1024, 2048), 64: (26, 200, 1024)}
FORWARD = [Tile(*t) for t in (
    (16, 32, 4, 2), (16, 64, 4, 2), (16, 64, 4, 3), (16, 128, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 4, 2),
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2),
)]  # fmt: skip
BACKWARD = [Tile(*t) for t in (
    (16, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 2), (32, 64, 4, 2), (32, 64, 8, 2), (64, 32, 4, 2), (64, 64, 4, 2),
    (64, 64, 8, 2),
)]  # fmt: skip


def check() -> None:
    """Forward and backward, with a gradient of lse, against float64."""
    for D, N in ((128, 200), (64, 77)):
        q, k, v = (torch.randn(2, HEADS, N, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        mask = torch.rand(1, HEADS, N, N, device="cuda") < 0.3
        terms = Terms(scale=D**-0.5, q_offset=0)
        out, lse = gs.attention(q, k, v, mask, return_lse=True, implementation="small")
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        found = [out, *torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])]
        exact, exact_lse = oracle(q, k, v, mask, terms)
        wanted = [exact, *torch.autograd.grad([exact, exact_lse], [q, k, v], [dout.double(), dlse.double()])]
        for a, b in zip(found, wanted, strict=True):
            assert (a.double() - b).norm() < 6e-3 * b.norm()


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return call


def row(D: int, N: int) -> dict[str, float]:
    """Microseconds of every contender at one size."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    problem = Problem(1, HEADS, HEADS, N, N, D, D, "bfloat16", "cuda", sm=90, processors=processors, backward=True)
    q, k, v, dout = (torch.randn(1, HEADS, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    pattern, scoring = gs.SlidingWindow(max(8, N // 4)), Scoring(D**-0.5, 0)
    mask = torch.from_numpy(pattern.materialize(N, N)).cuda()
    packed_mask = packed_mask_of(mask, N, N)
    calls: dict[str, Callable[[], object]] = {
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v),
        "sdpa mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "triton": lambda: gs.attention(q, k, v, pattern, implementation="triton"),
        "hopper": lambda: gs.attention(q, k, v, pattern, implementation="hopper"),
    }
    given = {"q": q, "k": k, "v": v}
    for tile in FORWARD:
        calls[f"forward {tuple(tile)}"] = bound(
            lambda operands, tile=tile: forward(problem, packed_mask, scoring, operands, tile), given
        )
    out, lse = bound(lambda operands: forward(problem, packed_mask, scoring, operands), given)()
    given = {"dout": dout, **given, "out": out, "lse": lse}
    for tile in BACKWARD:
        calls[f"backward {tuple(tile)}"] = bound(
            lambda operands, tile=tile: backward(problem, packed_mask, scoring, operands, tile), given
        )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    for name, attend in (
        ("backward sdpa flash", sdpa(SDPBackend.FLASH_ATTENTION, *leaves)),
        ("backward triton", lambda: gs.attention(*leaves, pattern, implementation="triton")),
    ):
        with torch.cuda.stream(capture_stream()):
            result = attend()
        calls[name] = lambda result=result: torch.autograd.grad(result, leaves, dout, retain_graph=True)
    found = {name: 1000 * graph_ms(call) for name, call in calls.items()}
    found["host sdpa"] = 1000 * call_ms(calls["sdpa flash"])
    for name in ("hopper", "triton") + (("small",) if MOST_PAIRS[0] >= HEADS * N * N else ()):
        found[f"host {name}"] = 1000 * call_ms(lambda name=name: gs.attention(q, k, v, pattern, implementation=name))
    return found


def main() -> None:
    check()
    for D, sizes in SIZES.items():
        for N in sizes:
            print(json.dumps({"D": D, "N": N, "device": torch.cuda.get_device_name()} | row(D, N)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
