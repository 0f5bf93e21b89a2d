"""Compiles the kernels of the sweeps in parallel processes, so that `gossamer bench --tag breakeven` does not wait.

python benchmarks/warm_sweeps.py
"""

from __future__ import annotations

import multiprocessing
import os

PROCESSES = max(1, min(12, (os.cpu_count() or 1) - 2))
LONGEST = 8192  # longer cases take kernels that shorter ones have compiled


def warm(part: int) -> list[str]:
    """One call of every PROCESSES-th case; what failed, in words."""
    import torch

    import gossamer as gs
    from gossamer.testing.sweeps import BREAKEVEN, LADDER

    failed = []
    for case in [c for c in (*BREAKEVEN, *LADDER) if c.Q <= LONGEST][part::PROCESSES]:
        shape = (case.B, case.H, case.Q, case.D)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        try:
            gs.attention(q, k, v, case.pattern())
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{case.name}: {error!r}")
    return failed


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for failed in pool.map(warm, range(PROCESSES)):
            print(*failed, sep="\n", end="\n" if failed else "")


if __name__ == "__main__":
    main()
