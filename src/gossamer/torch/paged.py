"""Attention over a cache in pages: calls over the pool of pages itself, and over a copy of the pages that are listed.

Queries become tiles of one sequence each, whose rows are its tokens and the query heads of a group, so that a page is
read once for each key head. The pool of pages is k and v as one long sequence, a view, and page numbers are numbers of
its tiles, where a page is whole tiles of a GPU's kernel and the queries see all of it. Other pages (the last of a
sequence, behind whose keys anything may lie; pages that no kernel reads as tiles, or only as narrow ones, for many
queries; and all pages on a CPU) are copied, clean of what no query sees. The results of both are merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.layouts.device.walks import MOST_POSITIONS
from gossamer.layouts.walk import ARRAYS_PER_WALK
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import (
    Arguments,
    AttentionOptions,
    arguments_of,
    cast_type,
    coerced,
    is_bshd,
    validate,
)
from gossamer.torch.calls import known as known_calls
from gossamer.torch.given_layouts import arrays_of, geometry_of, layout_from
from gossamer.torch.key import SIMPLE, Key, alignment, facts, places, plain
from gossamer.torch.memory import hold_for_graphs
from gossamer.torch.merge import combined
from gossamer.torch.paged_arguments import Paged, checked, refuse, tensors_over_pages
from gossamer.torch.paged_copy import copied_pages
from gossamer.torch.paged_kernel import is_by_table
from gossamer.torch.planning import problem_of
from gossamer.torch.recording import Again, record
from gossamer.torch.request import Request, request_of
from gossamer.torch.structure.base import is_read, narrow, sorted_edges
from gossamer.torch.structure.fused_pages import fused_tiles
from gossamer.torch.structure.inputs import Tile
from gossamer.torch.structure.make import tile_of
from gossamer.torch.structure.page_tiles import Copied, Part, Sequences, listed_tiles, rows_of_pool
from gossamer.torch.structure.pages import Pages
from gossamer.torch.structure.sequences import PackedSequences

IN_PLACE = {"cuda"}  # devices whose kernels read the pool where it is
ALIGNED = 16  # bytes; kernels copy what is not
NARROW = (64, 64)  # the tile of kernels in which a page of 64 is one of keys
# For many rows of a sequence, tokens and heads of a group, narrow tiles lose more than copies cost; copies take memory.
MANY_ROWS, MOST_COPIED = 2048, 2**29
COPIES = "pages that are seen are copied behind one another"
TILES = "pages are tiles of k and v where they lie; those that are seen in part are copied"


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """The structure of sequences whose keys are in pages, made once for the layers of a step by `device_layout`."""

    pages: Pages
    facts: tuple[Any, ...]
    between: int | None  # rows of the pool from one page to the next; None: nothing is read there
    token: Tensor  # (rows,) int32: of each row of a tile its token,
    head: Tensor  # and its head of a group
    place: Tensor  # (T * H / G,) int32: the row of each token and head of a group
    parts: tuple[Part, ...]
    source: str  # what it was made from, in words


class PagedCall(NamedTuple):
    """The calls that compute one over pages, and what their results become."""

    requests: list[Request]
    given: Paged
    layout: PagedLayout
    sinks: Tensor | None
    bshd: bool
    dims: int  # of the q that was given

    def joined(self, results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """(out, lse) as `attention` gives them, of those of the requests: (1, G, rows, E), (1, G, rows)."""
        q, _, v = self.given
        (T, H, _), E = q.shape, v.shape[3]
        if not results:
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            out, lse = q.new_zeros(H, T, E), q.new_full((H, T), -math.inf, dtype=wide)
        else:
            out, lse = results[0] if len(results) == 1 else combined(*zip(*results, strict=True))
            G, place = out.shape[1], self.layout.place
            out = out.index_select(2, place).view(G, T, H // G, E).transpose(1, 2).reshape(H, T, E)
            lse = lse.index_select(2, place).view(G, T, H // G).transpose(1, 2).reshape(H, T)
        if self.sinks is not None:  # heads of a group are rows of one tile, and kernels take a sink for each head
            sinks = self.sinks.to(lse.dtype)[:, None].expand(H, T)
            out, lse = combined([out, torch.zeros_like(out)], [lse, sinks])
        if self.bshd:
            out = out.transpose(0, 1)
        out = out.contiguous()
        return (out, lse) if self.dims == 3 else (out[None], lse[None])


def paged_call(q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, joining: Any = None) -> PagedCall:
    """What computes a call over pages.

    Args:
        pattern: `PackedSequences` with pages, or what `device_layout` made of them.
        joining: `merge` of `attention`.

    Raises:
        ValueError: an argument is wrong; `Unsupported` for what is not computed over pages.
    """
    bshd, (given, sinks) = is_bshd(options.layout), checked(q, k, v, pattern.pages, options, joining)
    assert not pattern.pages.by_head, "each head is a call of its own"
    options = options._replace(sink_logits=None, layout="bhnd")
    layout = pattern if isinstance(pattern, PagedLayout) else paged_layout(given, pattern, options)
    if layout.facts != given.facts or layout.token.device != q.device:
        raise ValueError(
            f"pattern was made on {layout.token.device} for (T, H, G, pages, page_size) = {layout.facts}; got "
            f"{given.facts} on {q.device}"
        )
    (_, H, _), G = given.q.shape, given.k.shape[2]
    rows = given.q.unflatten(1, (G, H // G))[layout.token, :, layout.head].transpose(0, 1)[None]
    requests = []
    for part in layout.parts:
        keys, values = (_keys(name, x, layout, part) for name, x in (("k", given.k), ("v", given.v)))
        requests.append(request_of(rows, keys, values, part.layout, options, ()))
    return PagedCall(requests, given, layout, sinks, bshd, q.ndim)


def device_layout_of_pages(
    q: Any, k: Any, v: Any, packed: PackedSequences, options: AttentionOptions
) -> PagedLayout | PackedSequences:
    """What layers share of sequences in pages: where a kernel reads the table itself, and where heads have tables of
    their own, the sequences as they are now.

    Raises:
        ValueError: as `paged_call`.
    """
    assert packed.pages is not None
    refuse(options, None)
    given = tensors_over_pages(q, k, v, packed.pages, is_bshd(options.layout))
    if is_by_table(q, k, v, packed, options) or packed.pages.by_head:
        return packed.held(q.device, given.q.shape[0])
    return paged_layout(given, packed, options._replace(sink_logits=None, layout="bhnd"))


class OfHead(NamedTuple):
    """What a call over pages is given, of one key head."""

    q: Tensor
    k: Tensor
    v: Tensor
    packed: PackedSequences
    options: AttentionOptions


def heads_apart(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, options: AttentionOptions
) -> list[OfHead]:  # fmt: skip
    """Of a call that has a table for each key head the calls of each.

    Raises:
        ValueError: as `checked`.
    """
    assert packed.pages is not None
    checked(q, k, v, packed.pages, options)
    of_q, of_k = -2 if is_bshd(options.layout) else -3, 1 if packed.pages.page_layout == "phsd" else 2
    G, ratio = k.shape[of_k], q.shape[of_q] // k.shape[of_k]
    found, sinks = [], options.sink_logits
    for g in range(G):
        heads = slice(g * ratio, (g + 1) * ratio)
        own = options if sinks is None else options._replace(sink_logits=sinks[heads])
        q_of, k_of, v_of = q.narrow(of_q, heads.start, ratio), k.narrow(of_k, g, 1), v.narrow(of_k, g, 1)
        found.append(OfHead(q_of, k_of, v_of, packed.of_head(g), own))
    return found


class Repeated(NamedTuple):
    """What follows from the shapes of a layout, and what makes the rest of its tensors."""

    again: Again
    between: int | None
    parts: tuple[tuple[tuple[int, ...], bool], ...]  # of each the geometry of its layout, and whether pages are copied

    def layout(self, pages: Pages, facts: tuple[Any, ...], told: Sequence[Tensor], source: str) -> PagedLayout:
        """The layout of what is told now."""
        if pages.block_table.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        token, head, place, *arrays = self.again(*told)
        parts = []
        for geometry, copied in self.parts:
            of_layout, arrays = arrays[:ARRAYS_PER_WALK], arrays[ARRAYS_PER_WALK:]
            made: Any = layout_from(of_layout, geometry)
            of_copies = None
            if copied:
                numbers, unseen, *arrays = arrays
                of_copies = Copied(numbers, unseen)
            parts.append(Part(made, of_copies))
        return PagedLayout(pages, facts, self.between, token, head, place, tuple(parts), source)


def paged_layout(given: Paged, packed: PackedSequences, options: AttentionOptions) -> PagedLayout:
    """The layout of sequences in pages. Nothing is read on the host but where numbers are checked, as on a CPU.

    What is not read is made by operations that the first call of a key recorded.
    """
    T, H, G, P, _ = given.facts
    device, (cu_seq_q, pages) = given.q.device, packed.over_pages(given.q.device, T)
    told, (R, n) = (cu_seq_q, *pages.tensors), pages.block_table.shape
    read = pages.read()
    key = None if read or 0 in (T, R, n, P) else _key(given, packed, told, options)
    found: Repeated | None = None if key is None else known_calls.get(key)
    if found is not None:
        how = COPIES if found.between is None else TILES
        return found.layout(pages, given.facts, told, f"{packed!r}: {how}")
    tile, between = _plan(given, -(-T // max(1, R)) * (H // G), R * n, options)
    if pages.batch_invariant and 0 not in (T, R, n, P):
        raise Unsupported(
            "batch_invariant must be False but where one kernel computes the call: on a GPU, in 16 bits or float32, of "
            "heads up to 256, by a rule of one or two intervals, without check, outside of compiled functions"
        )
    if 0 in (T, R, n, P):
        if read:
            pages.check_numbers(torch.zeros_like(pages.block_table, dtype=torch.bool), P)
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return PagedLayout(pages, given.facts, None, nothing, nothing, nothing, (), repr(packed))
    source = f"{packed!r}: {COPIES if between is None else TILES}"
    make = partial(_made, given, packed, pages, cu_seq_q, tile, between, source)
    if key is None:
        return make()
    made: list[PagedLayout] = []

    def arrays() -> list[Any]:
        layout = make()
        made.append(layout)
        of_parts = (x for part in layout.parts for x in (*arrays_of(part.layout), *(part.copied or ())))
        return [layout.token, layout.head, layout.place, *of_parts]

    again, (layout,) = record(arrays, told, device, together=True).again, made
    if again is not None:
        parts = tuple((geometry_of(part.layout), part.copied is not None) for part in layout.parts)
        known_calls.put(key, Repeated(again, between, parts), again.held)
    return layout


def _key(given: Paged, packed: PackedSequences, told: Sequence[Tensor], options: AttentionOptions) -> Key | None:
    """What tells layouts apart that are made without a look at numbers; None for one that has no key as it is."""
    if torch.compiler.is_compiling() or not plain(*given, *told):
        return None
    o = options
    numbers = o.scale, o.softcap, o.implementation, o.deterministic
    if not SIMPLE.issuperset(map(type, numbers)):
        return None
    size = packed.pages.page_size if packed.pages is not None else 0
    return (
        "paged layout", packed.rule, size, *numbers, *map(type, numbers), facts(*given, *told), alignment(*given),
        places(*told), tuple(IN_PLACE),
    )  # fmt: skip


def _made(
    given: Paged, packed: PackedSequences, pages: Pages, cu_seq_q: Tensor, tile: Tile, between: int | None, source: str
) -> PagedLayout:  # fmt: skip
    """The layout; where numbers are read they are checked."""
    facts, table, reaches, read = given.facts, pages.block_table, packed.rule.seeing, pages.read()
    (T, _, _, P, size), (R, n) = facts, table.shape
    exact = is_read("Pages", False, table) and given.q.device.type == "cpu"
    made = None if exact else fused_tiles(cu_seq_q, pages.seqused_k, table, reaches, tile, facts, between)
    if made is None or read:
        used = narrow(pages.seqused_k, 0, n * size)
        if exact:
            n = max(1, -(-int(used.max()) // size))
        sequences = Sequences(sorted_edges(cu_seq_q, T), used, reaches, n * size)
        seen = sequences.seen().view(R, n, size)
        if read:
            pages.check_numbers(torch.nn.functional.pad(seen.any(-1), (0, table.shape[1] - n)), P)
        if made is None:
            made = listed_tiles(sequences, seen, table[:, :n], tile, facts, between, exact)
    return PagedLayout(pages, facts, between, *made, source)


def _plan(given: Paged, rows: int, entries: int, options: AttentionOptions) -> tuple[Tile, int | None]:
    """The tile of the kernel that would compute tiles of so many rows, and the rows of the pool from page to page.

    None where the pool is not read where it is: a page is no whole number of its tiles, or copies are faster.

    Args:
        entries: of the table, which have room in copies.

    Raises:
        ValueError: an argument is wrong; `Unsupported` where nothing computes it.
    """
    q, k, v = given
    P, size, G, _ = k.shape
    rows_like, keys, values = (x.new_empty((1, 1, 1, 1)).expand(1, G, max(1, rows), x.shape[-1]) for x in given)
    a = arguments_of(rows_like, keys, values, coerced(q, options, ()))
    validate(a)
    tile = tile_of(a, None)
    if q.device.type not in IN_PLACE or cast_type(q) not in (None, q.dtype):
        return tile, None
    between = {_between(x) for x in (k, v)}
    step = None if len(between) > 1 else between.pop()
    if step is None or (P - 1) * step + size > MOST_POSITIONS:
        return tile, None
    bytes_copied = entries * size * G * (k.shape[3] + v.shape[3]) * k.element_size()
    narrow_is_slower = rows >= MANY_ROWS and bytes_copied <= MOST_COPIED
    for candidate in (tile,) if narrow_is_slower else (tile, NARROW):
        _, block_kv = candidate
        if size % block_kv == step % block_kv == 0 and (candidate == tile or _able(a, candidate)):
            return candidate, step
    return tile, None


def _between(x: Tensor) -> int | None:
    """Rows of a pool (P, page_size, G, size) from page to page; None where it is no sequence of aligned rows."""
    of_page, row, head, _ = x.stride()
    aligned = not any(n <= 0 or n * x.element_size() % ALIGNED for n in (of_page, row, head))
    if not torch.compiler.is_compiling():  # where addresses are not known
        aligned = aligned and x.data_ptr() % ALIGNED == 0
    if not aligned or of_page % row:
        return None
    return of_page // row


def _able(a: Arguments, tile: Tile) -> bool:
    """Whether tiles other than the preferred ones are computed."""
    if torch.compiler.is_compiling():
        return False
    try:
        plan_of(problem_of(a, (*tile, *a.q.shape[2:3], *a.k.shape[2:3], 1)), a.implementation)
    except Unsupported:
        return False
    return True


def _keys(name: str, x: Tensor, layout: PagedLayout, part: Part) -> Tensor:
    """k or v of a part, (1, G, N, size)."""
    P, size, G, width = x.shape
    if part.copied is not None:
        return copied_pages(x, *part.copied).transpose(0, 1)[None]
    assert layout.between is not None
    if _between(x) != layout.between:
        raise ValueError(
            f"{name} must have pages {layout.between} rows apart, as those that pattern was made for; got strides "
            f"{x.stride()} of (pages, slots, heads, size)"
        )
    rows, (_, row, head, last) = rows_of_pool(P, size, layout.between), x.stride()
    return x.as_strided((1, G, rows, width), (rows * row, head, row, last))
