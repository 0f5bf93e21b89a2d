"""How fast the tiles of a row reach shared memory: the forward kernel with consumers that only wait and release.

python benchmarks/traffic_hopper.py                        # the cases with 64-blocks
python benchmarks/traffic_hopper.py window_512_causal      # cases of gossamer.testing.cases
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from bound import bound
from compare_hopper import DEVICE, layout_of, plan_of
from cutlass import Int32

from gossamer.bench.measure import time_call
from gossamer.bench.workload import find, make_inputs
from gossamer.cute.common import WARPGROUP, Barrier, computing_thread
from gossamer.cute.row_items import RowItem
from gossamer.kernels.contract import Scoring
from gossamer.kernels.hopper import compiled
from gossamer.kernels.hopper.choice import TileCall, forward_config
from gossamer.kernels.hopper.device import entries
from gossamer.kernels.hopper.device.forward.kernel import Forward
from gossamer.kernels.hopper.device.forward.masks import tiles_of
from gossamer.kernels.hopper.launch.forward import forward
from gossamer.layouts.work_list import row_lengths


class Traffic(Forward):
    """The forward kernel without products: same items, same loads in the same order, outputs of no meaning."""

    @cute.jit
    def compute(self, block):
        items, item, me = block.items, block.items.item, computing_thread().warpgroup
        turn, kv = Int32(0), Int32(0)
        items.wait_full(0, 0)
        running = item[RowItem.VALID, 0]
        while running != 0:
            stage = items.place(turn)[0]
            cute.arch.barrier(barrier_id=Barrier.BOUNDS + me, number_of_threads=WARPGROUP + 32)
            for _ in cutlass.range(tiles_of(item, stage) * (self.config.block_kv // self.config.step), unroll=1):
                at, phase = block.k_ring.place(kv)
                for ring in (block.k_ring, block.v_ring):
                    ring.wait_full(at, phase)
                    ring.release(at)
                kv += 1
            cute.arch.barrier_arrive(barrier_id=Barrier.OUTPUT + me, number_of_threads=WARPGROUP + 32)
            turn += 1
            following, phase = items.place(turn)
            items.wait_full(following, phase)
            running = item[RowItem.VALID, following]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["bigbird_matrix_64", "random_matrix_64"])
    shipped: Any = compiled.forward
    for name in parser.parse_args().cases:
        x = make_inputs(find(name, "cuda"), DEVICE)
        plan = plan_of(x, "forward")
        p, (block_q, block_kv) = plan.problem, plan.tile
        layout = layout_of(x, plan.tile)
        # Not by the store of compiled kernels: this one is not the shipped one.
        entries.Forward = Traffic
        made = shipped.build(forward_config(TileCall(p.dtype, p.D, p.E, block_q, block_kv, "fold")))
        compiled.forward = lambda config, made=made: made
        scoring, given = Scoring(x.terms.scale, x.terms.q_offset), {"q": x.q, "k": x.k, "v": x.v}
        run = bound(functools.partial(forward, p, layout, scoring), given)
        ms = time_call(run, DEVICE, budget_s=0.25).p50
        tiles = int(row_lengths(layout.host.rows).sum()) * p.H
        loaded = 2 * (p.D + p.E) * block_kv * tiles / ms / 1e9
        rate = 2 * (p.D + p.E) * tiles * block_q * block_kv / ms / 1e9
        print(f"{name}: {ms:.3f} ms, {loaded:.2f} TB/s, {rate:.0f} TFLOP/s at most", flush=True)


if __name__ == "__main__":
    main()
