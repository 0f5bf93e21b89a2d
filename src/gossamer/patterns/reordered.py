"""A sparse matrix whose rows and keys are computed in another order, in which neighbours are near each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.patterns.csr import CSR
from gossamer.patterns.validate import digest


class ReorderedCSR(CSR):
    """The same pairs as the CSR pattern it was made from: see `CSR.reordered`.

    `attention` permutes q, k and v by `order`, computes `inner`, and puts the rows of its results back.
    """

    inner: CSR  # the pattern of the permuted tensors
    order: np.ndarray  # (Q,) int64: which node comes at each place

    def __init__(self, source: CSR, order: np.ndarray) -> None:
        super().__init__(source.indptr, source.indices, source.num_keys)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        rows = np.repeat(np.arange(len(order)), np.diff(source.indptr))
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "inner", CSR._from_pairs(place[rows], place[source.indices], len(order), len(order)))

    def __repr__(self) -> str:
        return f"{super().__repr__()}.reordered()"

    def _key(self) -> tuple[Any, ...]:
        return *super()._key(), digest(self.order)


def bandwidth_order(csr: CSR) -> np.ndarray:
    """Reverse Cuthill-McKee order (Cuthill and McKee, 1969) of a square matrix, made symmetric; needs scipy."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    shape = (csr.num_keys, csr.num_keys)
    matrix = csr_matrix((np.ones(len(csr.indices), dtype=np.int8), csr.indices, csr.indptr), shape=shape)
    return np.asarray(reverse_cuthill_mckee((matrix + matrix.T).tocsr(), symmetric_mode=True), dtype=np.int64)
