"""Items that a warp of a block draws, and describes to the others in shared memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def take(counter):
    """The number of the next item that nobody has taken. `counter`: a pointer to how many are; zero before."""
    n = Int32(0)
    if cute.arch.lane_idx() == 0:
        n = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(n, 0)


@cute.jit
def publish(block, turn, words):
    """Describe the item of a turn to those that wait for it, by its words in their order."""
    stage = block.items.wait_empty_at(turn)
    if cute.arch.lane_idx() == 0:
        for i, word in enumerate(words):
            block.s_item[i, stage] = word
        cute.arch.mbarrier_arrive(block.items.full + stage)
    cute.arch.sync_warp()
