"""The launches of a forward.

Nothing is read back: sizes follow from shapes, and what depends on the scores is a list on the device.
"""

from __future__ import annotations

from typing import Literal

from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.launch.calls import CallPart, KernelCall, ListNames, parts, row_options, stats_of
from gossamer.entmax.launch.kernels import step
from gossamer.entmax.launch.overflow_rows import LISTING_STEP, OverflowRows, large, long_rows, rows_of
from gossamer.entmax.launch.selection import support_kernel, support_lists
from gossamer.entmax.triton.gather import gather_out_kernel
from gossamer.kernels.launch import Prepared
from gossamer.kernels.triton.gather.config import piece

Wanted = Literal["out", "lists", "keys"]  # out and what the backward reads; the lists alone; the keys of the k largest


def prepare(c: KernelCall, wanted: Wanted, keep_lists: bool, stats: tuple[str, ...] = ()) -> Prepared:
    """A forward: of out, then `stats`, then the lists if they are kept.

    Args:
        keep_lists: whether the lists of all rows are wanted; else they are made in parts.
        stats: what is wanted of each row of what `Stats` has.
    """
    lists = made(c, wanted, keep_lists, bool(stats))
    of_lists = tuple(lists)[:: 2 if wanted == "keys" else 1] if keep_lists else ()
    return c.b.done(*(("out",) if wanted == "out" else ()), *stats, *of_lists)


def made(c: KernelCall, wanted: Wanted, keep_lists: bool, with_stats: bool) -> ListNames:
    """Add the launches of a forward; the names of its lists."""
    b, L, top, only_keys = c.b, c.listed, c.top_k is not None, wanted == "keys"
    way = support_kernel(c, only_keys)
    # Saved lists are made in one part: each part would wait for its longest rows. Candidates in memory need parts.
    in_memory = 0 if isinstance(way, SupportConfig) else 8 * way.buffer
    whole = keep_lists and not in_memory
    every = [CallPart(0, c.B * c.H * -(-c.Q // way.rows), 0, c.rows, 0, c.B * c.H)]
    if not whole:
        every = list(parts(c, way.rows, 8 * L + in_memory))
    held = c.rows if keep_lists else max(part.rows for part in every)
    # Every count is written before it is read, but where groups of a head are listed whose other parts come later.
    counts = b.array("list_counts", "int32", (c.rows,), 0 if top and len(every) > 1 else None)
    weights = b.array("list_weights", "float32", (1, 1) if only_keys else (held, L))
    lists = ListNames(b.array("list_keys", "int32", (held, L)), weights, counts)
    stats = stats_of(c, with_stats)
    rows: OverflowRows | None = None
    if wanted == "out":
        b.array("out", c.dtype, (c.B, c.H, c.Q, c.E))
    for part in every:
        first_listed = 0 if keep_lists else part.first_row
        support_lists(c, way, part, lists, stats, first_listed, only_keys)
        if top:
            large(c, stats, lists, part.first_head, part.heads, first_listed, only_keys)
        if wanted == "out":
            if not top and part is every[-1]:  # all counts are known
                rows = rows_of(c, 2)
            gather_out(c, lists, part, first_listed, rows)
    if rows is not None:
        long_rows(c, rows, stats)
    return lists


def gather_out(c: KernelCall, lists: ListNames, part: CallPart, first_listed: int, rows: OverflowRows | None) -> None:
    """Out of the rows of a part that have lists; list those that have none in `rows`."""
    b, E = c.b, c.E
    options = row_options(c, "forward", E, E)
    at, heads = part.first_row - first_listed, 0 if rows is None else c.B * c.H
    keys, weights = (listed_from(c, name, at, part.rows) for name in (lists.keys, lists.weights))
    unlisted, n_zeros = (("unread",) * 4, 0) if rows is None else (rows, b[rows.zeros].shape[0])
    ((stride_b, stride_h, streamed),) = c.strides(c.v)
    step(
        b, gather_out_kernel, (heads + -(-part.rows // options["RP"]),),
        (
            c.v, "out", (keys, weights, lists.counts), unlisted, stride_b, stride_h, c.H,
            (n_zeros, heads, part.first_row, part.rows, c.Q),
        ),
        {"L": c.listed, "E": E, "SE": piece(E, 16 if c.half else 32), "STREAMED": streamed, "GROUP": c.group,
         "STEP": LISTING_STEP} | options,
    )  # fmt: skip


def listed_from(c: KernelCall, name: str, row: int, rows: int) -> str:
    """The lists from a row on."""
    if row == 0:
        return name
    return c.b.view(f"{name}_{row}", name, (rows, c.listed), (c.listed, 1), row * c.listed)
