"""The structure of sequences over pages in one launch: `torch.structure.page_tiles`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.reaches import Reaching
from gossamer.kernels.relaunch import power
from gossamer.kernels.structure.block_lists import WORD
from gossamer.kernels.structure.page_kernels import PageForm, PageNumbers, page_tiles_kernel

EDGES = 32, 1024  # that are looked at at a time: the fewest, and the most
TILES, ENTRIES = (16, 512), 2048  # of keys at a time, likewise; the most entries of the table that name their pages
CHUNK = 512  # pages or slots of copies at a time
BITS, SPLIT = 8, 8  # tiles of bits of a program, where no more programs share a list than that
UNSEEN, LISTS = 4, 5  # the place of what has truth values, and the arrays of lists over one thing


class PageSizes(NamedTuple):
    """The sizes of a structure."""

    T: int  # tokens
    heads: int  # that share keys
    n: int  # pages of a sequence
    size: int  # slots of a page
    pages: int
    between: int  # rows of the pool from one page to the next; 0: all pages are copied
    unit: int  # slots that are copied together: whole pages and tiles,
    units: int  # and how many such of a sequence
    block_q: int
    block_kv: int
    copied_room: int  # for tiles of bits of a list over copies,
    room: int = 0  # and over the pool

    def tiles(self, R: int) -> int:
        """Of the queries of R sequences: one more than there may be."""
        return -(-self.T * self.heads // self.block_q) + R

    def shapes(self, R: int) -> Iterator[tuple[int, ...]]:
        """Of what `page_tiles` gives."""
        tiles, copied = self.tiles(R), R * self.units * self.unit
        yield from ((tiles * self.block_q,), (tiles * self.block_q,), (self.T * self.heads,))
        yield from ((copied // self.size,), (copied,))
        of_copies, of_pool = self.units * self.unit // self.block_kv, self.n * self.size // self.block_kv
        for listed, room in ((of_copies, self.copied_room), (of_pool, self.room))[: 1 + (self.between > 0)]:
            yield from ((tiles,), (tiles * listed,), (tiles,), (tiles * room,))
            yield tiles * room, self.block_q, self.block_kv // WORD

    def made(self, R: int, device: torch.device) -> list[Tensor]:
        """The tensors that `page_tiles` writes."""
        return [
            torch.empty(shape, dtype=torch.bool if at == UNSEEN else torch.int32, device=device)
            for at, shape in enumerate(self.shapes(R))
        ]


def page_tiles(
    edges: Tensor, used: Tensor, table: Tensor, sizes: Sequence[int], reaches: Sequence[int], steps: Sequence[int]
) -> list[Tensor]:
    """The token and the head of each row of a tile, and the row of each token and head; the pages that are copied, and
    which of their slots are unseen, truth values; lists over copies, and over the pool where it is read in place.

    Lists are the number of full tiles of each tile of queries, these tiles, likewise those with bits, and the bits.
    What no list refers to is undefined.

    Args:
        edges: (R + 1,) of the tokens, of any integers and strides, as the others are.
        used: (R,), keys.
        table: (R, n).
        sizes: a `PageSizes`.
        reaches, steps: of each reach the numbers of `Reaching`, and its step.
    """
    of, (R,) = PageSizes(*sizes), used.shape
    made = of.made(R, edges.device)
    token, *_ = made
    unread = () if of.between else (token,) * LISTS  # a pointer that is not read still needs an array
    numbers_of_each = len(reaches) // len(steps)
    each = [Reaching(*reaches[at : at + numbers_of_each]) for at in range(0, len(reaches), numbers_of_each)]
    of_unit = of.unit // of.size
    chunks = 1 if of.between else -(-of.units * of.unit // CHUNK)
    split = min(SPLIT, -(-max(of.room, of.copied_room) // BITS))
    numbers = PageNumbers(
        R, of.T, of.heads, of.n, of.size, of.n * of.size, of.pages, of.tiles(R), of.between // of.block_kv, of_unit,
        of.unit // of.block_kv, of.units, of.room, of.copied_room, chunks, edges.stride(0), used.stride(0),
        *table.stride(),
    )  # fmt: skip
    pages_at_once, tiles = power(of_unit), -(-of.n * of.size // of.block_kv)
    form = PageForm(
        of.block_q, of.block_kv, power(of.block_q), power(of.block_kv // WORD), of.between > 0, pages_at_once,
        len(steps), tuple(x.block > 0 for x in each), tuple(step > 1 for step in steps), split, power(R, *EDGES),
        power(min(tiles, ENTRIES // pages_at_once), *TILES), CHUNK,
    )  # fmt: skip
    launch(
        page_tiles_kernel, ((numbers.tiles + 1) * split + R * chunks,), edges, used, table, *made, *unread, numbers,
        tuple(reaches), tuple(steps), tuple(map(_each_nth, steps)), FORM=form, num_warps=4,
    )  # fmt: skip
    return made


def _each_nth(step: int) -> int:
    """The word, as an int32, of which each step-th bit is set, from the first one on."""
    word = sum(1 << bit for bit in range(0, WORD, step))
    return word - (word >> (WORD - 1) << WORD)
