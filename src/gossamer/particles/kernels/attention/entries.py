"""The entry of the kernels, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.column_items import SEGMENT
from gossamer.cute.common import NUMBERS
from gossamer.cute.entry import Entry, compact, loose, strided
from gossamer.cute.row_items import ITEM
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.particles.kernels.attention.columns import ParticleColumns
from gossamer.particles.kernels.attention.forward import ParticleForward
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.query import ParticleQuery


def attention(config: GatherConfig) -> Entry:
    """A kernel over the lists of groups of particles: the forward, dQ, or dK and dV."""
    n, c, s = NUMBERS[config.dtype], config, cute.sym_int
    B, H, G, Q, K = s(), s(), s(), s(), s()
    inputs = strided(n, B, H, Q), strided(n, B, G, K), strided(n, B, G, K), strided(n, B, H, Q)
    items, sizes, pull = compact(Int32, s(), ITEM), [Float32(1)] * 3, compact(Float32, s(), s(), POINT)
    lists = (
        compact(Int32, s()), compact(Int32, s(), c.queries), compact(Int32, s()),
        *[compact(Float32, s(), POINT) for _ in range(2)], compact(Int32, s()),
    )  # fmt: skip
    terms, part, lengths = compact(Float32, 2, B, H, s()), compact(Float32, s(), 64, c.size), compact(Int32, s())
    tile_counter = compact(Int32, 1)
    if c.direction == "forward":
        return Entry(
            ParticleForward(c), *inputs, loose(Float32, B, H, Q), items, *lists, compact(Float32, s()), part,
            compact(Float32, s(), 64), lengths, tile_counter, *[Float32(1)] * 2, *[Int32(1)] * 3, *sizes,
        )  # fmt: skip
    numbers = [Float32(1)] * 3 + [Int32(1)] * 2
    if c.direction == "query":
        return Entry(
            ParticleQuery(c), *inputs, terms, strided(n, B, H, Q), pull, items, *lists, part, lengths, tile_counter,
            *numbers, *sizes,
        )  # fmt: skip
    return Entry(
        ParticleColumns(c), *inputs, terms, strided(n, B, G, K), strided(n, B, G, K), pull, items,
        compact(Int32, s(), SEGMENT), *lists, part, compact(Float32, s(), 64, c.size), lengths, tile_counter, *numbers,
        *sizes,
    )  # fmt: skip
