"""What the kernels of single rows share: their items, and rows of which eight lanes hold a piece each.

A lane holds 16 bytes of each 128 of a row. What a loop changes is in tensors of registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gossamer.cute.common import Opaque
from gossamer.cute.instructions import LOG2E, assembly
from gossamer.kernels.hopper.device.backward.around import VECTOR, move
from gossamer.kernels.hopper.device.rows.configurations import ITEMS, LANES, WARPS, RowsConfig
from gossamer.kernels.hopper.device.rows.words import Word

LINE = LANES * VECTOR  # numbers of a row that lie together
THREADS = 32 * WARPS
CARVEOUT = 8  # percent of the memory of a multiprocessor that is shared: the rest is cache


@cute.jit
def select(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    return x if condition else y


class RowsKernel:
    """The kernel of one configuration, over items that are each computed by one of a `kind`."""

    def __init__(self, config: RowsConfig, kind: Any) -> None:
        self.config, self.kind = config, kind

    def launch(self, arguments: Any, copies: Any, stream: Any) -> None:
        """`copies`: of the items, for batch elements and heads that share them."""
        self.kernel(arguments).launch(
            grid=(blocks_of(arguments.items), copies, 1), block=(THREADS, 1, 1), stream=stream,
            min_blocks_per_mp=self.config.blocks, preferred_smem_carveout=CARVEOUT,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        a = arguments
        item = Item(self.config, a.items, a.indices, a.lead_heads, a.copy_heads, a.slots)
        self.kind(self.config, a, item).run()


class Item(Opaque):
    """What eight lanes compute: a row of the walk and a range of its columns; of no row past the last item."""

    def __init__(
        self, config: RowsConfig, items: cute.Tensor, indices: cute.Tensor, lead_heads: Int32, copy_heads: Int32,
        slots: Int32,
    ) -> None:  # fmt: skip
        """As in the kernels' arguments."""
        self.config, self.indices = config, indices.iterator.toint()
        block, copy, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        self.lane = lane % LANES
        place = block * ITEMS + cute.arch.warp_idx() * (32 // LANES) + lane // LANES
        last = cute.size(items, mode=[0]) - 1
        self.there = place <= last
        place = cutlass.min(place, last)
        lead = items[place, Word.LEAD]
        # Lists that batch elements or heads share have copies of their items; the others say whose they are.
        self.batch = lead // lead_heads + copy // copy_heads
        self.head = lead % lead_heads + copy % copy_heads
        self.row = items[place, Word.TILE]
        slot = items[place, Word.SLOT]
        self.cut = slot >= 0
        self.slot = slot + copy * slots
        self.begin = items[place, Word.BEGIN]
        self.count = select(self.there, items[place, Word.END] - self.begin, Int32(0))
        self.last = cutlass.max(self.begin + self.count - 1, Int32(0))

    def steps(self) -> Any:
        """Of the longest list of the warp, so that its lanes stay together."""
        steps = (self.count + (self.config.at_once - 1)) // self.config.at_once
        offset = LANES
        while offset < 32:
            steps = cutlass.max(steps, cute.arch.shuffle_sync_bfly(steps, offset=offset))
            offset *= 2
        return steps

    def listed(self, step: Any, columns: Any) -> None:
        """The columns of a step; past the end the last one once more."""
        first = self.begin + step * self.config.at_once
        for c in range(self.config.at_once):
            columns[c] = word(Int32, self.indices, cutlass.min(first + c, self.last))

    def columns(self) -> Any:
        """Registers for the columns of a step."""
        return cute.make_rmem_tensor((self.config.at_once,), Int32)


class Table(Opaque):
    """The rows of a head, of which this lane reads its pieces."""

    def __init__(self, config: RowsConfig, tensor: cute.Tensor, batch: Any, head: Any, lane: Any) -> None:
        self.config, self.tensor, self.lane = config, tensor, lane
        strides = tensor.stride
        self.width = tensor.element_type.width // 8
        offset = Int64(batch) * strides[0] + Int64(head) * strides[1] + Int64(lane * VECTOR)
        self.start = tensor.iterator.toint() + self.width * offset
        self.stride = Int32(self.width * strides[2])  # in bytes
        columns = cute.size(tensor, mode=[3])
        self.inside = [lane * VECTOR + line * LINE < columns for line in range(config.lines)]

    def address(self, row: Any) -> Any:
        """Of this lane's first piece of a row."""
        return assembly(Int64, "mad.wide.s32 $0, $1, $2, $3;", row, self.stride, self.start, effects=False)

    def of_step(self) -> Any:
        """Registers for the pieces of the rows of a step, zeros."""
        c = self.config
        found = cute.make_rmem_tensor((VECTOR, c.lines, c.at_once), self.tensor.element_type)
        found.fill(0.0)
        return found

    @cute.jit
    def fetch(self, row: Int32, to: cute.Tensor):
        """Load this lane's pieces of a row; past the last column registers stay as they are."""
        at = self.address(row)
        for line in cutlass.range_constexpr(self.config.lines):
            first = cute.make_ptr(
                self.tensor.element_type, at + self.width * line * LINE, cute.AddressSpace.gmem, assumed_align=16
            )
            source = cute.make_tensor(first, cute.make_layout((VECTOR,)))
            if const_expr(self.config.whole) or self.inside[line]:
                cute.autovec_copy(source, to[None, line])

    def fetch_step(self, columns: Any, to: Any) -> None:
        """Load the rows of a step."""
        for c in range(self.config.at_once):
            self.fetch(columns[c], to[None, None, c])

    def read(self, row: Any, factor: Any) -> Any:
        """A row times a number, in float32."""
        raw, found = pieces(self.config, self.tensor.element_type), pieces(self.config)
        self.fetch(row, raw)
        for at in places(self.config):
            found[at] = Float32(raw[at]) * factor
        return found


@cute.jit
def write(to: cute.Tensor, item: Item, values: cute.Tensor, factor: Float32):
    """Store the float32 numbers of a whole row times a factor: `to` is (B, heads, rows, columns)."""
    if item.there & ~item.cut:
        packed = cute.make_rmem_tensor((VECTOR, item.config.lines), to.element_type)
        for at in places(item.config):
            packed[at] = to.element_type(values[at] * factor)
        for line in cutlass.range_constexpr(item.config.lines):
            chunk = item.lane + line * LANES
            if chunk * VECTOR < cute.size(to, mode=[3]):
                move(to[item.batch, item.head, item.row, None], chunk, packed[None, line], True)


def word(dtype: Any, start: Int64, at: Int32) -> Any:
    """The 32-bit number `at` numbers behind an address; nothing writes there meanwhile."""
    letter = "f" if dtype is Float32 else "s"
    code = f"{{ .reg .b64 a; mad.wide.s32 a, $1, 4, $2; ld.global.nc.{letter}32 $0, [a]; }}"
    return assembly(dtype, code, Int32(at), Int64(start), effects=False)


def pieces(config: RowsConfig, dtype: Any = Float32) -> Any:
    """Registers for the pieces of a row, zeros."""
    found = cute.make_rmem_tensor((VECTOR, config.lines), dtype)
    found.fill(0.0)
    return found


def places(config: RowsConfig) -> list[tuple[int, int]]:
    """The numbers of a lane's pieces."""
    return [(i, line) for line in range(config.lines) for i in range(VECTOR)]


def blank(there: Any, row: Any) -> None:
    """Make the pieces of a row zero unless it is `there`: what it holds may be no number, which zero times stays."""
    words = cute.recast_tensor(row, Int32)
    for at in range(cute.size(words)):
        words[at] = select(there, words[at], Int32(0))


def dot(config: RowsConfig, own: Any, row: Any) -> Any:
    """The product of two rows, the same in all of their lanes. `own`: in float32."""
    total = Float32(0.0)
    for at in places(config):
        total = total + own[at] * Float32(row[at])
    offset = 1
    while offset < LANES:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        offset *= 2
    return total


def add(config: RowsConfig, total: Any, factor: Any, row: Any) -> None:
    """total + factor * row."""
    for at in places(config):
        total[at] = total[at] + factor * Float32(row[at])


@cute.jit
def write_part(parts: cute.Tensor, item: Item, values: cute.Tensor, factor: Float32):
    """Store the float32 part of a row that is cut: `parts` is (slots, 1, size)."""
    if item.cut & item.there:
        for line in cutlass.range_constexpr(item.config.lines):
            piece = cute.make_rmem_tensor((VECTOR,), Float32)
            for i in cutlass.range_constexpr(VECTOR):
                piece[i] = values[i, line] * factor
            target = cute.local_tile(parts[item.slot, 0, None], (VECTOR,), (item.lane + line * LANES,))
            cute.autovec_copy(piece, target)


class Score:
    """From the product of a query, times `of_rows`, and a key to a score in base 2."""

    def __init__(self, config: RowsConfig, before: Any, exponent: Any) -> None:
        """Factors of a score before its soft cap, and of the exponent: see `launch.arguments.factors`."""
        self.capped = config.score == "softcap"
        self.of_rows = before if self.capped else before * exponent
        self.exponent = exponent

    def __call__(self, product: Any) -> tuple[Any, Any]:
        """The score, and its derivative by the product over the scale."""
        if not self.capped:
            return product, Float32(1.0)
        grown = cute.math.exp2(product * (2.0 * LOG2E), fastmath=True)
        t = 1.0 - 2.0 * cute.arch.rcp_approx(grown + 1.0)
        return t * self.exponent, 1.0 - t * t


def blocks_of(items: Any) -> Any:
    """Of a launch, for one copy of the items."""
    return (cute.size(items, mode=[0]) + ITEMS - 1) // ITEMS
