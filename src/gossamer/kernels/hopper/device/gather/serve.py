"""What the kernels of the backward over gathered rows share: the warp that takes items, and when a stage is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from gossamer.cute.common import ROWS, Opaque, Ring
from gossamer.cute.row_items import ITEM
from gossamer.cute.shell import ring_of, words
from gossamer.cute.tiles import Tma, packed_tma, tma
from gossamer.cute.work import ItemRing, WorkList
from gossamer.kernels.hopper.device.gather.rows import THREADS

AHEAD = 2  # descriptions of items for the warps that gather, which have their own


def items_to_gather(memory: Any) -> ItemRing:
    """The ring of descriptions for the warps that gather."""
    return ring_of(memory, "ahead", AHEAD, 1, THREADS // 32, ItemRing, words(memory.ahead, ITEM, AHEAD))


def item_rows(config: Any, tensor: Any, store: bool = False) -> Tma:
    """Loads or stores of the rows of an item of a tensor (B, H, Q, columns)."""
    if config.heads > 1:
        return packed_tma(tensor, config.heads, config.queries, config.size, store=store)
    return tma(tensor, ROWS, config.size, store=store)


def heads_of(x: Any) -> Any:
    """How many heads a tensor has, of TMA or (B, heads, rows, columns)."""
    return cute.size(x.tensor, mode=[2]) if isinstance(x, Tma) else cute.size(x, mode=[1])


@dataclass(frozen=True, eq=False)
class CopiedRing(Ring):
    """A ring that threads copy rows to: a fence lets products see what they have written."""

    @classmethod
    def of(cls, memory: Any, name: str, stages: int, fillers: int = THREADS, readers: int = 4) -> CopiedRing:
        return ring_of(memory, name, stages, fillers, readers, cls)

    def wait_full(self, stage: Any, phase: Any) -> None:
        """Wait until a stage was gathered, and make it visible to the products."""
        super().wait_full(stage, phase)
        cute.arch.fence_view_async_shared()


@dataclass(frozen=True, eq=False)
class Server(Opaque):
    """The warp that publishes items: to those that gather as soon as they listen, with tiles when there is room."""

    work: WorkList
    ahead: ItemRing | None  # of those that gather, where they have their own
    items: ItemRing
    tiles: Any  # what loads an item's own tiles
    valid: int  # the word that says whether an item is one

    @cute.jit
    def run(self):
        """Item after item."""
        item = self.items.item
        word = self.work.first()
        turn, running = Int32(0), Int32(1)
        while running != 0:
            if const_expr(self.ahead is not None):
                self.ahead.publish(turn, word)
            stage = self.items.describe(turn, word)
            running = item[self.valid, stage]
            if running != 0:
                self.tiles.load(turn, item)
                word = self.work.next()
            else:
                self.items.end(stage)
            turn += 1
