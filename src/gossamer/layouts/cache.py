"""A bounded cache of layouts by pattern, sizes, tile and device, and the choice among layouts."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from gossamer.layouts.block import BlockLayout
from gossamer.layouts.build import build
from gossamer.layouts.estimate import Sample
from gossamer.layouts.gather import WIDTHS, GatherLayout, build_gather
from gossamer.layouts.kept import Kept
from gossamer.patterns.base import Pattern

# Layouts that are kept: these many in any case, and these many that hold no more than these bytes.
LEAST_KEPT, MOST_KEPT, KEPT_BYTES = 64, 1024, 2**28
# A tile that executes no more than this for each useful pair is not compared with others.
WORTH_A_LOOK = 1.25
# Nor are gather layouts where the best tile takes no more than this, in pairs at rate 1, for each useful pair: the
# cheapest of them takes as much when 64 rows keep the same keys.
WORTH_A_GATHER = 3.0
# What a query row costs with tiles, in the same unit: fetching and storing it, beginning and ending its loop.
TILE_ROW = 400.0
# What a pair of a bits tile costs above one of a full tile.
BITS_PAIR = 0.28
# Of one processor, in the same unit: beginning and ending a launch, a second launch that joins the parts of long rows
# with them, and a tile beside its pairs, while it follows another. Measured on an H200 at 512 to 4096 positions, D 128.
START, JOIN, TILE_STEP, STEP_PAIR = 5e4, 4.5e4, 4500.0, 0.7
# Columns of the longest item that gathers.
LONGEST_ITEM = 1024

_layouts: Kept[Any] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)
_costs: Kept[tuple[float, ...]] = Kept(MOST_KEPT)


def cached_layout(
    pattern: Pattern, Q: int, K: int, *, block_q: int, block_kv: int, q_offset: int, device: Any
) -> BlockLayout:
    """The layout of a pattern as torch tensors on `device`; those used last are kept, device copies with them."""
    key = (pattern, Q, K, q_offset, block_q, block_kv)
    return _kept(key, lambda: build(pattern, Q, K, block_q=block_q, block_kv=block_kv, q_offset=q_offset)).to(device)


def cached_gather(pattern: Pattern, Q: int, K: int, *, block_q: int, q_offset: int, device: Any) -> GatherLayout:
    """The gather layout of a pattern as torch tensors on `device`, kept with the others."""
    key = (pattern, Q, K, q_offset, block_q)
    return _kept(key, lambda: build_gather(pattern, Q, K, block_q=block_q, q_offset=q_offset)).to(device)


def bytes_of(layout: BlockLayout | GatherLayout) -> int:
    """About what a layout holds with its transpose, on the host or on a device."""
    return 2 * sum(int(x.nbytes) for x in layout.rows.arrays())


def _kept(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    layout = _layouts.get(key)
    if layout is None:
        layout = make()
        layout = _layouts.put(key, layout, bytes_of(layout))
    return layout


class Machine(NamedTuple):
    """How often the lists of a pattern are computed, by heads and batch elements that share them, and by how many."""

    copies: int = 1
    processors: int = 0  # that work at the same time; 0: the longest row is not looked at

    def time(self, total: float, chain: float, cut: bool) -> float:
        """Of all rows, or of the longest one alone where that takes more. `chain` is counted in pairs of one processor,
        of which the device computes `processors` in the time of one.
        """
        one = self.processors / self.copies
        return max(total, one * (START + chain)) + one * JOIN * cut

    def longest(self, steps: int, total: float, rows: int, part: int = 0, most: int = 0) -> tuple[int, bool]:
        """Steps of the longest item, and whether it is a part of a row, as `GatherChoice.part` says.

        Args:
            steps: of the longest row; total: of all `rows` of the lists.
            most: of an item, however many rows there are.
        """
        every, work = rows * self.copies, self.processors
        if part and every >= 16 * work:
            limit = most
        elif part:
            limit = min(most, max(part, int(2 * total) // rows, int(total * self.copies) // (4 * work)))
        elif every <= work // 2:  # a few steps are not cut
            limit = max(4, -(-steps * every // work))
        elif every <= 2 * work or steps <= 2 * max(16.0, total / rows):
            limit = steps
        else:
            limit = -(-steps // 2)
        return min(steps, limit), steps > limit


def costs(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[tuple[int, int, float], ...],
    gathers: tuple[Any, ...] = (),
    q_offset: int,
    machine: Machine = Machine(),  # noqa: B008
) -> tuple[float, ...]:
    """What each option takes, in pairs of a full tile at rate 1, counted on windows of rows without building a layout.

    Small problems take as long as their longest row; see `Machine`.
    Those that need no look are left out at the end: all after the first tile where that executes at most 1.25 pairs
    for each useful one, and the gather layouts where none can be the cheapest or each row keeps one interval.

    Args:
        tiles: (block_q, block_kv, rate) of block layouts, the preferred one first.
        gathers: gather layouts, as `kernels.contract.GatherChoice`.
    """
    key = (pattern, Q, K, q_offset, tiles, gathers, machine)
    known = _costs.get(key)
    if known is None:
        known = _costs.put(key, tuple(_count(pattern, Q, K, tiles, gathers, q_offset, machine)))
    return known


def _count(
    pattern: Pattern,
    Q: int,
    K: int,
    tiles: tuple[tuple[int, int, float], ...],
    gathers: tuple[Any, ...],
    q_offset: int,
    machine: Machine,
) -> list[float]:
    sample, found, useful = Sample(pattern, pattern._sizes(Q, K, q_offset)), [], 0.0
    for block_q, block_kv, rate in tiles:
        work = sample.tiles(block_q, block_kv)
        total = (work.executed + BITS_PAIR * work.bits) / rate + TILE_ROW * Q * pattern.lead[0] * pattern.lead[1]
        steps, cut = machine.longest(work.longest, work.tiles, work.rows)
        step = (
            (TILE_STEP + STEP_PAIR * block_q * block_kv) * (1 + BITS_PAIR * work.bits / max(1.0, work.executed)) / rate
        )
        found.append(machine.time(total, steps * step, cut))
        useful = work.useful
        if len(found) == 1 and work.executed <= WORTH_A_LOOK * useful:
            return found
    if min(found) > WORTH_A_GATHER * useful and not sample.intervals:
        for choice in gathers:
            counts = sample.gathers(choice.block_q)
            total = choice.column * counts.columns + choice.pair * counts.executed + choice.row * counts.rows
            most = max(16, LONGEST_ITEM // WIDTHS[choice.block_q])
            steps, cut = machine.longest(counts.longest, counts.steps, counts.groups, choice.part, most)
            total += START * machine.processors / machine.copies
            cost = machine.time(total, steps * choice.step, cut)
            found.append(cost if useful >= choice.reuse * counts.columns else inf)
    return found


def cheapest(
    pattern: Pattern,
    Q: int,
    K: int,
    *,
    tiles: tuple[tuple[int, int, float], ...],
    gathers: tuple[Any, ...] = (),
    q_offset: int,
    machine: Machine = Machine(),  # noqa: B008
) -> int:
    """Which option takes the least, by `costs`: an index into the tiles, and after them the gather layouts."""
    if len(tiles) == 1 and not gathers:
        return 0
    found = costs(pattern, Q, K, tiles=tiles, gathers=gathers, q_offset=q_offset, machine=machine)
    return found.index(min(found))


def clear_cache() -> None:
    """Forget every layout."""
    _layouts.clear()
    _costs.clear()
