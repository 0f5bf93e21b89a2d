"""dS of pairs of tiles of 64 x 64 kept in memory, as the kernel of dQ (kept.py) copies it to shared memory.

A pair is 64 rows of 128 bytes, one a key, as a product reads its first factor transposed: eight times 16 bytes, of
which the c-th lies at place c ^ (key % 8). A thread holds queries 8 j + 2 t and the next one, t its place of four. So
that it stores 16 bytes at once and exchanges no number, queries are in another order: see `query_of`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gossamer.cute import instructions
from gossamer.cute.common import ROWS

PAIR = ROWS * ROWS  # numbers of a pair of tiles
# Shape and strides of the queries by their places in a row: the second and the third digit change places.
QUERIES = (2, 4, 4, 2), (1, 8, 2, 32)


def query_of(place: Any) -> Any:
    """The query of 64 whose dS lies at a place of a row."""
    return place % 2 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place // 32 * 32


def pair_of(ds: cute.Tensor, n: Any) -> cute.Tensor:
    """One of the pairs (n, 64 * 64), of a size that the compiler knows."""
    return cute.make_tensor(ds[n, None].iterator, cute.make_layout(PAIR))


@cute.jit
def put_pair(ds, pair, thread, fragment):
    """Store dS of 64 keys and 64 queries.

    Args:
        ds: (pairs, 64 * 64), of which number `pair` is written.
        fragment: dS as the first factor of a product that sums over queries.
    """
    words, to = cute.recast_tensor(fragment, Int32), cute.recast_tensor(pair_of(ds, pair), Int32)
    key = thread.row % ROWS
    chunk = key * (ROWS // 8) + (thread.quad // 2 ^ key % 8)
    for r in cutlass.range_constexpr(instructions.ROWS):
        for half in cutlass.range_constexpr(2):
            found = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                found[i] = words[2 * (4 * half + i) + r]
            cute.autovec_copy(found, cute.local_tile(to, (4,), ((chunk ^ 4 * half) + 64 * r,)))
