"""Residue classes: a dilated window is a plain window inside each class of positions that are equal modulo d.

Query row r has position i = r + q_offset. Of class c are the queries with i = c + d i' and the keys with j = c + d j'
(0 <= c < d): every d-th row of a tensor, a strided view. i - j is a multiple of d inside a class and never across two,
and i - j = d (i' - j'). Pure arithmetic; nothing here imports a framework.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive classes that are alike in their sizes.

    The class first + n has the query rows row + n, row + n + d, ... (Q of them) and the keys first + n,
    first + n + d, ... (K of them); its first query row has position `q_offset` in the class, which may be negative.
    """

    first: int
    classes: int
    row: int
    Q: int
    K: int
    q_offset: int

    def select(self, start: int, stop: int) -> Run:
        """The classes [start, stop) of the run."""
        return self._replace(first=self.first + start, classes=stop - start, row=self.row + start)


def runs(Q: int, K: int, q_offset: int, dilation: int) -> tuple[Run, ...]:
    """The classes modulo `dilation` of Q query rows and K keys, in at most four runs; each class is in one of them.

    A class without keys, or without queries, is listed too.
    """
    d, shift = dilation, q_offset % dilation
    # The first row of class c is (c - shift) % d: it wraps at `shift`, and is below Q % d up to the last edge.
    edges = sorted({0, shift, K % d, (Q + shift) % d, d})
    slices = []
    for first, stop in pairwise(edges):
        row = (first - shift) % d
        sizes = (max(0, -(-(Q - row) // d)), max(0, -(-(K - first) // d)))
        slices.append(Run(first, stop - first, row, *sizes, (row + q_offset - first) // d))
    return tuple(slices)
