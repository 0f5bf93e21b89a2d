"""Generated graphs as CSR patterns: random, power-law, and neighbours in space along a Hilbert curve."""

from __future__ import annotations

import numpy as np

from gossamer.patterns import CSR
from gossamer.patterns.grid import distinct


def random_graph(nodes: int, each: int, *, seed: int = 0) -> CSR:
    """Every node sees `each` nodes, drawn alike; one that is drawn twice counts once."""
    columns = np.random.default_rng(seed).integers(0, nodes, (nodes, each))
    return CSR._from_pairs(np.repeat(np.arange(nodes), each), columns.reshape(-1), nodes, nodes)


def power_law_graph(nodes: int, edges: int, *, seed: int = 0, rows: float = 0.5, columns: float = 0.75) -> CSR:
    """Exactly `edges` pairs, drawn with probability rank ** -rows times rank ** -columns, of two random rankings.

    With the defaults and the size of ogbn-arxiv (169,343 nodes, 1,166,243 edges) the most cited node has about 10^4
    edges, as there.
    """
    rng = np.random.default_rng(seed)
    ends = []
    for power in (rows, columns):
        weight = np.cumsum(np.arange(1, nodes + 1, dtype=float) ** -power)
        ends.append((rng.permutation(nodes), weight / weight[-1]))
    cells = np.zeros(0, dtype=np.int64)
    while len(cells) < edges:
        row, column = (order[np.searchsorted(weight, rng.random(edges))] for order, weight in ends)
        cells = distinct(np.concatenate([cells, row * nodes + column]))
    kept = rng.choice(cells, edges, replace=False)
    return CSR._from_pairs(kept // nodes, kept % nodes, nodes, nodes)


def proximity_graph(bits: tuple[int, int, int], radius: float, *, seed: int = 0) -> CSR:
    """Points in a periodic box, one in each of 2^a x 2^b x 2^c unit cells, numbered along a Hilbert curve.

    Every point sees the points within `radius`, itself included.
    """
    shape = tuple(2**b for b in bits)
    rng = np.random.default_rng(seed)
    cells = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    jitter = rng.random((*shape, 3))
    number = np.empty(cells[..., 0].size, dtype=np.int64)
    number[np.argsort(hilbert(cells.reshape(-1, 3), max(bits)), kind="stable")] = np.arange(len(number))
    number = number.reshape(shape)
    reach = int(np.ceil(radius))
    rows, columns = [], []
    for step in np.ndindex(2 * reach + 1, 2 * reach + 1, 2 * reach + 1):
        move = tuple(s - reach for s in step)
        back = tuple(-m for m in move)
        difference = np.roll(jitter, back, axis=(0, 1, 2)) + np.array(move) - jitter
        near = (difference**2).sum(-1) <= radius**2
        rows.append(number[near])
        columns.append(np.roll(number, back, axis=(0, 1, 2))[near])
    return CSR._from_pairs(np.concatenate(rows), np.concatenate(columns), number.size, number.size)


def hilbert(cells: np.ndarray, bits: int) -> np.ndarray:
    """Places (n,) of integer cells (n, 3) in [0, 2^bits) along a Hilbert curve (Skilling, AIP Conf. 707, 2004)."""
    x = cells.astype(np.int64).T.copy()
    high = 1 << (bits - 1)
    bit = high
    while bit > 1:
        for axis in range(3):
            set_ = (x[axis] & bit) != 0
            swap = np.where(set_, 0, (x[0] ^ x[axis]) & (bit - 1))
            x[0] ^= np.where(set_, bit - 1, swap)
            x[axis] ^= swap
        bit >>= 1
    for axis in (1, 2):
        x[axis] ^= x[axis - 1]
    turn = np.zeros_like(x[0])
    bit = high
    while bit > 1:
        turn ^= np.where((x[2] & bit) != 0, bit - 1, 0)
        bit >>= 1
    x ^= turn
    place = np.zeros_like(x[0])
    for at in range(bits - 1, -1, -1):
        for axis in range(3):
            place = (place << 1) | ((x[axis] >> at) & 1)
    return place
