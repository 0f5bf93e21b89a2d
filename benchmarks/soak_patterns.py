"""Random patterns: which are drawn, and how the package's pattern is made of one.

A drawn pattern is a `Spec` of `soak_oracle`: a nested tuple, its name and then its numbers. `spec_of` and `dilated`
draw one, and `pattern_of` makes the package's pattern of it.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import soak_oracle as oracle
import torch
from soak_oracle import Spec

import gossamer as gs

Draw = random.Random
LARGEST = 2**31 - 1  # of int32, the type of positions in kernels


def sometimes(r: Draw, usual: Any, extreme: Any) -> Any:
    """The extreme value in 8 draws of 100, the usual one in the others."""
    return extreme if r.random() < 0.08 else usual


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _segment(r: Draw, K: int) -> Spec:
    dilation = sometimes(r, 1 + r.randrange(6), LARGEST)
    return ("DilatedSegment", sometimes(r, 1 + r.randrange(K), LARGEST), dilation, r.randrange(min(dilation, 9)))


def _neighborhood(r: Draw, K: int) -> Spec:
    first = r.choice(_divisors(K))
    second = r.choice(_divisors(K // first))
    shape = r.choice([(K,), (first, K // first), (first, second, K // first // second)])
    reach, borders, causes = [], [], []
    for n in shape:
        border, causal = r.choice(["cut", "cut", "shift"]), r.random() < 0.3
        before, after = r.randrange(6), 0 if causal else sometimes(r, r.randrange(6), LARGEST)
        if border == "shift" and not causal:  # a window that is moved is as long as its axis at most
            before = min(before, n - 1)
            after = min(after, n - 1 - before)
        reach.append((before, after))
        borders.append(border)
        causes.append(causal)
    return ("Neighborhood", shape, tuple(reach), tuple(borders), tuple(causes))


def _rows(r: Draw, Q: int, K: int) -> Spec:
    each = r.choice([0, 1, 3, 20])
    rows = [sorted(r.sample(range(K), min(K, r.randrange(each + 1)))) for _ in range(Q)]
    for _ in range(r.choice([0, 0, 1, 2])):
        rows[r.randrange(Q)] = list(range(K))
    return ("CSR", rows)


def _ids(r: Draw, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(r.randrange(2**32))
    ids = rng.integers(0, r.choice([1, 3, 9]), shape) * sometimes(r, 1, -(2**62) // 9)
    return np.sort(ids, axis=-1) if r.random() < 0.7 else ids


def _blocks(r: Draw, lead: tuple[int, ...], Q: int, K: int) -> Spec:
    block = r.choice([1, 5, 16, 32, 33, 64, 1000]) if Q * K < 40_000 else r.choice([16, 32, 64, 100])
    shape = (*lead, -(-Q // block), -(-K // block))
    return ("BlockMask", np.random.default_rng(r.randrange(2**32)).random(shape) < r.choice([0.05, 0.4, 0.9]), block)


def _big_bird(r: Draw, N: int) -> Spec:
    block = r.choice([1, 4, 16, 64] if N < 200 else [16, 50, 64])
    numbers = block, r.choice([1, 3, 5]), r.randrange(3), r.randrange(4), r.randrange(9), r.random() < 0.4
    return ("BigBird", *numbers, _random_blocks(numbers, N))


def _random_blocks(numbers: tuple[Any, ...], N: int) -> np.ndarray:
    """The random blocks of a BigBird, which its definition leaves free: their number and places are checked here."""
    block, window, ends, count, _, causal = numbers
    dense, n = gs.BigBird(*numbers).materialize(N, N), -(-N // block)
    edges = np.arange(0, N, block)
    some = np.logical_or.reduceat(np.logical_or.reduceat(dense, edges, axis=0), edges, axis=1)
    must, may, number = oracle.big_bird_rule(n, window, ends, count, causal)
    drawn = some & ~must
    free = np.arange(n)
    free = (free >= ends) & (free < n - ends)
    assert not (drawn & ~may).any(), "BigBird draws a block where none may be"
    assert (drawn.sum(1)[free] == number[free]).all(), "BigBird draws too many blocks, or too few"
    return drawn


# The patterns of one mask, which all batch elements and heads share: functions of a source of numbers, Q and K.
SHARED: dict[str, Any] = {
    "Dense": lambda r, Q, K: ("Dense",),
    "Causal": lambda r, Q, K: ("Causal",),
    "SlidingWindow": lambda r, Q, K: (
        "SlidingWindow", r.choice([None, 0, r.randrange(60), sometimes(r, 9, LARGEST)]),
        r.choice([0, 0, None, r.randrange(20), sometimes(r, 4, LARGEST)]),
        r.choice([0, 0, 3, sometimes(r, 70, LARGEST)]),
    ),
    "Local": lambda r, Q, K: ("Local", sometimes(r, 1 + r.randrange(70), LARGEST)),
    "DilatedSegment": lambda r, Q, K: _segment(r, K),
    "Dilated": lambda r, Q, K: (
        "Dilated", sometimes(r, r.randrange(20), LARGEST), sometimes(r, r.randrange(9), LARGEST),
        sometimes(r, 1 + r.randrange(12), r.choice([K, 100 * K, LARGEST])),
    ),
    "Strided": lambda r, Q, K: (
        "Strided", sometimes(r, 1 + r.randrange(40), LARGEST), sometimes(r, r.randrange(40), LARGEST),
    ),
    "PowerStrided": lambda r, Q, K: ("PowerStrided", sometimes(r, 2 + r.randrange(3), LARGEST), r.randrange(20)),
    "Longformer": lambda r, Q, K: (
        "Longformer", sometimes(r, r.randrange(40), LARGEST),
        tuple(sorted({r.randrange(K) for _ in range(r.randrange(4))})),
        sometimes(r, 1 + r.randrange(8), LARGEST),
    ),
    "BlockMask": lambda r, Q, K: _blocks(r, (), Q, K),
    "Document": lambda r, Q, K: ("Document", _ids(r, (K,))),
    "Neighborhood": lambda r, Q, K: _neighborhood(r, K),
    "CSR": _rows,
    "Predicate": lambda r, Q, K: (
        "Predicate", r.randrange(1, 7), r.randrange(1, 7), r.choice([1, 2, 7, 40]), r.randrange(1, 4),
    ),
    "BigBird": lambda r, Q, K: _big_bird(r, K) if Q == K else ("Causal",),
    "Tree": lambda r, Q, K: ("Tree", [r.randrange(-1, t) for t in range(Q)]) if Q <= K else ("Dense",),
}  # fmt: skip


def spec_of(r: Draw, B: int, H: int, Q: int, K: int, depth: int = 0) -> Spec:
    """One mask for all batch elements and heads, one for each of them, or a composition of such patterns."""
    how = r.random()
    if depth > 1 or how < 0.5:
        return SHARED[r.choice(list(SHARED))](r, Q, K)
    if how < 0.62:
        kinds = r.choice([("SlidingWindow", "Dilated"), tuple(SHARED)])
        return ("PerHead", [SHARED[r.choice(kinds)](r, Q, K) for _ in range(H)])
    if how < 0.70:
        return _long_net(r, H)
    if how < 0.75:
        return _blocks(r, r.choice([(H,), (1, H), (B, H), (B, 1)]), Q, K)
    if how < 0.79:
        return ("Document", _ids(r, (B, K)))
    if how < 0.83:
        return ("PerBatch", [SHARED[r.choice(list(SHARED))](r, Q, K) for _ in range(B)])
    one = spec_of(r, B, H, Q, K, depth + 1)
    if how < 0.87:
        return ("Not", one)
    return (r.choice(["And", "Or", "Or"]), one, spec_of(r, B, H, Q, K, depth + 1))


def _long_net(r: Draw, H: int) -> Spec:
    segments, dilations = r.choice(
        [((8, 24), (1, 3)), ((16, 32, 64), (1, 2, 4)), ((32, 64), (2, 4)), ((10, 7), (3, 2)), ((LARGEST, 5), (2, 1))]
    )
    return ("LongNet", segments, dilations, H, r.random() < 0.5)


def dilated(r: Draw, H: int, Q: int, K: int) -> Spec:
    """A pattern that can be computed in parts: some of its heads or terms are contiguous inside residue classes."""
    how = r.random()
    kinds = "Dilated", "Dilated", "Strided", "Longformer"
    if how < 0.5:
        return SHARED[r.choice(kinds)](r, Q, K)
    if how < 0.65:
        return _long_net(r, H)
    if how < 0.85:
        return ("PerHead", [SHARED[r.choice((*kinds, "SlidingWindow"))](r, Q, K) for _ in range(H)])
    return ("Or", SHARED[r.choice(kinds)](r, Q, K), SHARED[r.choice((*kinds, "SlidingWindow", "Local"))](r, Q, K))


def pattern_of(spec: Spec, Q: int, K: int, r: Draw) -> gs.Pattern:
    """The package's pattern, made in one of the ways in which a user makes it."""
    name, *rest = spec
    if name == "And":
        return pattern_of(rest[0], Q, K, r) & pattern_of(rest[1], Q, K, r)
    if name == "Or":
        return pattern_of(rest[0], Q, K, r) | pattern_of(rest[1], Q, K, r)
    if name == "Not":
        return ~pattern_of(rest[0], Q, K, r)
    if name in ("PerHead", "PerBatch"):
        return getattr(gs, name)([pattern_of(one, Q, K, r) for one in rest[0]])
    if name == "Predicate":
        a, b, m, c = rest
        return gs.Predicate(lambda i, j: (a * i + b * j) % m < c)
    if name == "BigBird":
        return gs.BigBird(*rest[:-1])
    if name == "LongNet":
        return gs.LongNet(*rest[:2], heads=rest[2], causal=rest[3])
    if name == "CSR":
        return _csr(rest[0], K, r)
    if (
        name == "Document"
        and rest[0].ndim == 1
        and rest[0].min() >= 0
        and (np.diff(rest[0]) >= 0).all()
        and r.random() < 0.5
    ):
        return gs.Document.from_cu_seqlens(np.cumsum([0, *np.bincount(rest[0])]))
    return getattr(gs, name)(*rest)


def _csr(rows: list[list[int]], K: int, r: Draw) -> gs.Pattern:
    how, Q = r.choice(["plain", "scipy", "torch", "edges"]), len(rows)
    indptr, indices = np.cumsum([0, *map(len, rows)]), np.array([key for row in rows for key in row], dtype=np.int64)
    of_rows = np.repeat(np.arange(Q), np.diff(indptr))
    if how == "scipy":
        from scipy.sparse import coo_matrix

        return gs.CSR.from_scipy(coo_matrix((np.ones(len(indices)), (of_rows, indices)), shape=(Q, K)))
    if how == "torch":
        pairs = torch.from_numpy(np.stack([of_rows, indices]))
        with warnings.catch_warnings():  # torch 2.11 warns whatever is asked for
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            return gs.CSR.from_torch(torch.sparse_coo_tensor(pairs, torch.ones(len(indices)), (Q, K)))
    if how == "edges":
        return gs.CSR.from_edge_index(np.stack([indices, of_rows]), (K, Q))
    return gs.CSR(indptr, indices, K)


def shortened(spec: Spec) -> str:
    """A pattern in one line."""
    text = " ".join(repr(spec).split())
    return text if len(text) <= 300 else text[:297] + "..."
