"""Grids of cases that are measured as a whole: where sparse overtakes dense (`breakeven`), and what each step of a
kernel's development gave (`ladder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from gossamer.patterns import CSR, BigBird, BlockMask, Dense, Dilated, Local, Pattern, SlidingWindow, Tree
from gossamer.testing.cases import Case, square

LENGTHS = (26, 200, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DENSITIES = (0.5, 0.1, 0.01, 0.001)
MOST_EDGES, MOST_BLOCKS = 2**23, 2**18  # of a generated graph, of a generated block matrix
BLOCK = 128

# The draft tree of EAGLE (arXiv:2401.15077): 25 candidates after the last token.
EAGLE = (-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21)

LADDER_LENGTHS = (1024, 4096)
LADDER_WIDTHS = (128, 512, 1024, 4096)


def window(N: int, density: float) -> Pattern | None:
    """A causal window that keeps about `density` of all N x N pairs; everything causal at one half."""
    left = round(N * (1 - math.sqrt(1 - 2 * density)))
    return SlidingWindow(left) if left or density * N >= 1 else None


def bigbird(N: int, density: float) -> Pattern | None:
    """BigBird whose random blocks make up for what its windows and global blocks leave of `density`."""
    block = 64 if N >= 4096 else 16 if N >= 200 else 4
    across = -(-N // block)
    random_blocks = round(density * across) - 5
    fits = random_blocks >= 0 and density * across**2 <= MOST_BLOCKS
    return BigBird(block, random_blocks=random_blocks) if fits else None


def dilated(N: int, density: float) -> Pattern | None:
    """A causal dilated window; the dilation is the largest power of two up to 16 that the density allows."""
    if 4 * density > 1:
        return None
    dilation = 2 ** min(4, math.floor(math.log2(1 / (2 * density))))
    keys = round(N / dilation * (1 - math.sqrt(max(0.0, 1 - 2 * density * dilation))))
    return Dilated(keys - 1, 0, dilation) if keys >= 1 and dilation < N else None


def graph(N: int, density: float) -> Pattern | None:
    """Random neighbours."""
    edges = round(density * N * N)
    if not N <= edges <= MOST_EDGES:
        return None
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.integers(0, N * N, edges))
    rows, keys = np.divmod(pairs[np.concatenate(([True], pairs[1:] > pairs[:-1]))], N)
    return CSR(np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=N)))), keys, N)


KINDS: dict[str, Callable[[int, float], Pattern | None]] = {
    "window": window, "bigbird": bigbird, "dilated": dilated, "csr": graph
}  # fmt: skip


def _breakeven() -> Iterator[Case]:
    kept = Tree(EAGLE).density(len(EAGLE), len(EAGLE))
    yield _point("tree", len(EAGLE), round(kept, 2), lambda: Tree(EAGLE))
    for N in LENGTHS:
        for kind, make in KINDS.items():
            for density in DENSITIES:
                # Graphs are large: whether there is one is known without making it.
                possible = N <= density * N * N <= MOST_EDGES if kind == "csr" else make(N, density) is not None
                if possible:
                    yield _point(kind, N, density, lambda make=make, N=N, d=density: make(N, d))  # type: ignore[misc]


def _point(kind: str, N: int, density: float, make: Callable[[], Pattern]) -> Case:
    gpu = {"dtypes": ("bfloat16",), "devices": frozenset({"cuda"})}
    return square(f"breakeven_{kind}_{N}_{density:g}", N, make, "breakeven", H=8, D=128, **gpu)  # type: ignore[arg-type]


def _block_causal(N: int) -> BlockMask:
    across = -(-N // BLOCK)
    return BlockMask(np.tril(np.ones((across, across), dtype=bool)), BLOCK)


def _ladder() -> Iterator[Case]:
    patterns: dict[str, Callable[[int], Pattern]] = {
        "dense": lambda N: Dense(), "local": lambda N: Local(BLOCK), "causal": _block_causal
    }  # fmt: skip
    for N in LADDER_LENGTHS:
        for width in LADDER_WIDTHS:
            for heads in dict.fromkeys((1, width // BLOCK)):
                for name, make in patterns.items():
                    yield square(
                        f"ladder_{name}_{N}_{width}x{heads}", N, lambda make=make, N=N: make(N), "ladder",  # type: ignore[misc]
                        H=heads, D=width // heads, dtypes=("bfloat16",), devices=frozenset({"cuda"}),
                    )  # fmt: skip


BREAKEVEN = tuple(_breakeven())
LADDER = tuple(_ladder())
SWEEPS = frozenset({"breakeven", "ladder"})
