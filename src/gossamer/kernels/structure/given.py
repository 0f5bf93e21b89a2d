"""What kernels of lists are given beside the entries: how many of each list are read, and between which keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Limits(NamedTuple):
    """Limits of lists as a kernel takes them."""

    arrays: tuple[Tensor, Tensor, Tensor]  # counts, lo and hi
    strides: tuple[int, ...]  # of counts and of both bounds, 0 where lists share them
    counted: bool  # whether there are counts
    bounded: bool  # and bounds


def limits_of(counts: Tensor | None, lo: Tensor | None, hi: Tensor | None, unread: Tensor) -> Limits:
    """The limits of lists; a pointer that is not read still needs an array, which is `unread`."""
    count_strides = (0, 0, 0) if counts is None else counts.stride()
    bound_strides: tuple[int, ...] = (0, 0, 0)
    if lo is not None and hi is not None:
        lo, hi = lo.contiguous(), hi.contiguous()
        bound_strides = tuple(0 if size == 1 else stride for size, stride in zip(lo.shape, lo.stride(), strict=True))
    given = [unread if x is None else x for x in (counts, lo, hi)]
    return Limits((given[0], given[1], given[2]), (*count_strides, *bound_strides), counts is not None, lo is not None)
