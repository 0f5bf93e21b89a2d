"""How fast the tiles of a row reach shared memory: the forward kernel with consumers that only wait and release.

python benchmarks/traffic_hopper.py             # the rows of tune_hopper.py with 64-blocks
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
import tune_hopper
from cutlass import Int32

import gossamer.kernels.hopper.forward.kernel as forward_kernel
from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper import compile as compiled
from gossamer.kernels.hopper import launch
from gossamer.kernels.hopper.common import BITSES, BOUNDS, FULLS, INTERVALS, OUT, VALID, WARPGROUP, ring
from gossamer.layouts.schedule import row_lengths


class Traffic(forward_kernel.Forward):
    """The forward kernel without products: same items, same loads in the same order, outputs of no meaning."""

    @cute.jit
    def consume(
        self, mma_qk, mma_pv, mma_half, s_q, s_k, s_v, s_o, bars, item, bounds, lists, pool, sinks, lse,
        part_out, part_lse, lengths, before, exponent, slots, has_sinks, rows,
    ):  # fmt: skip
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        me = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        turn, kv = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        running = item[VALID, 0]
        while running != 0:
            stage = ring(turn, c.q_stages)[0]
            count = item[FULLS, stage] + item[INTERVALS, stage] + item[BITSES, stage]
            cute.arch.barrier(barrier_id=BOUNDS + me, number_of_threads=WARPGROUP + 32)
            for _ in cutlass.range(count * self.parts, unroll=1):
                at, phase = ring(kv, c.stages)
                for full, empty in ((bars.k_full, bars.k_empty), (bars.v_full, bars.v_empty)):
                    cute.arch.mbarrier_wait(full + at, phase)
                    if cute.arch.lane_idx() == 0:
                        cute.arch.mbarrier_arrive(empty + at)
                kv += 1
            cute.arch.barrier_arrive(barrier_id=OUT + me, number_of_threads=WARPGROUP + 32)
            turn += 1
            following, phase = ring(turn, c.q_stages)
            cute.arch.mbarrier_wait(bars.q_full + following, phase)
            running = item[VALID, following]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="64-blocks")
    wanted = parser.parse_args().rows.split(",")
    shipped: Any = compiled.forward
    for name in (n for n in tune_hopper.ROWS if any(part in n for part in wanted)):
        make, H, n, D, _, *tile = tune_hopper.ROWS[name]
        q, k, v = tune_hopper.inputs(1, H, H, n, n, D, D, torch.bfloat16)
        p, terms = tune_hopper.problem_of(q, k, v), Terms(scale=D**-0.5, q_offset=0)
        block_q, block_kv = tile[0] if tile else launch_tile(p)
        layout = make().layout(n, n, block_q=block_q, block_kv=block_kv)
        # Not by the store of compiled kernels: this one is not the shipped one.
        forward_kernel.Forward = Traffic
        made = shipped.build(launch.forward_config("bfloat16", D, D, block_q, block_kv, "fold"))
        compiled.forward = lambda config, made=made: made
        on = layout.to(tune_hopper.DEVICE)
        ms = tune_hopper.median_ms(functools.partial(launch.forward, p, q, k, v, on, terms))
        tiles = int(row_lengths(layout.rows).sum()) * H
        rate = 4 * D * tiles * block_q * block_kv / ms / 1e9
        print(
            f"{name}: {ms:.3f} ms, {4 * D * block_kv * tiles / ms / 1e9:.2f} TB/s, {rate:.0f} TFLOP/s at most",
            flush=True,
        )


def launch_tile(p: Any) -> tuple[int, int]:
    from gossamer.kernels.hopper import IMPLEMENTATION

    return IMPLEMENTATION.tile(p)


if __name__ == "__main__":
    main()
