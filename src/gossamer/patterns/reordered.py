"""A sparse matrix whose rows and keys are computed in another order, in which neighbours are near each other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from gossamer.checks import digest, show
from gossamer.patterns.base import Pattern, above
from gossamer.patterns.compose import And, Or
from gossamer.patterns.csr import CSR, MOST_PAIRS, _listed

# Pairs that another pattern may add to those of a graph: more are no list.
MOST_JOINED = 2**26


class ReorderedCSR(CSR):
    """The same pairs as the CSR pattern it was made from: see `CSR.reordered`.

    `attention` permutes q, k and v by `order`, computes `inner`, and puts the rows of its results back.
    """

    inner: CSR  # the pattern of the permuted tensors
    order: np.ndarray  # (Q,) int64: which node comes at each place
    terms: tuple[Pattern, ...]  # of a union, what was joined: see `merge="lse"`
    _ordered: ClassVar[bool] = True

    def __init__(self, source: CSR, order: np.ndarray, terms: tuple[Pattern, ...] = ()) -> None:
        super().__init__(source.indptr, source.indices, source.num_keys)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        rows = np.repeat(np.arange(len(order)), np.diff(source.indptr))
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "inner", CSR._from_pairs(place[rows], place[source.indices], len(order), len(order)))

    def __repr__(self) -> str:
        return f"{super().__repr__()}.reordered()"

    def _key(self) -> tuple[Any, ...]:
        return *super()._key(), digest(self.order), self.terms

    def __and__(self, other: Any) -> Pattern:
        return _joined(self, other, And) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Any) -> Pattern:
        return _joined(self, other, Or) if isinstance(other, Pattern) else NotImplemented

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Pattern:
        raise ValueError(
            f"~ of {show(self)} would lose its order, which is of no use where nearly all pairs are kept: take ~ of "
            f"the CSR pattern itself"
        )


@lru_cache(maxsize=4)
def _joined(one: ReorderedCSR, other: Pattern, kind: type[And | Or]) -> ReorderedCSR:
    """The pairs of both, or of either, in the order of the first: as a list of its own."""
    n = one.num_keys
    if isinstance(other, ReorderedCSR) and not np.array_equal(one.order, other.order):
        raise ValueError(
            f"{show(one)} and {show(other)} are in two orders: join the CSR patterns themselves, and take "
            f"CSR.from_pattern(joined, {n}, {n}).reordered()"
        )
    name = f"a pattern that is joined with {show(one)}, in its order,"
    if kind is And:
        return ReorderedCSR(_listed(name, And(one, other), n, n, None, MOST_PAIRS), one.order)
    # Listed alone: looked into by tiles, a graph has nearly empty ones.
    added = _listed(name, other, n, n, None, MOST_JOINED)
    rows = [np.repeat(np.arange(n), np.diff(part.indptr)) for part in (one, added)]
    union = CSR._from_pairs(np.concatenate(rows), np.concatenate([one.indices, added.indices]), n, n)
    terms = tuple(term for part in (one, other) for term in (getattr(part, "terms", ()) or (part,)))
    return ReorderedCSR(union, one.order, terms)


def bandwidth_order(csr: CSR) -> np.ndarray:
    """Reverse Cuthill-McKee order (Cuthill and McKee, 1969) of a square matrix, made symmetric; needs scipy."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    shape = (csr.num_keys, csr.num_keys)
    matrix = csr_matrix((np.ones(len(csr.indices), dtype=np.int8), csr.indices, csr.indptr), shape=shape)
    return np.asarray(reverse_cuthill_mckee((matrix + matrix.T).tocsr(), symmetric_mode=True), dtype=np.int64)


def _reordered(csr: CSR) -> ReorderedCSR:
    try:
        order = bandwidth_order(csr)
    except ImportError as error:
        raise ValueError(f"reordered() needs scipy: {error}") from error
    return ReorderedCSR(csr, order)


above.reordered = _reordered
