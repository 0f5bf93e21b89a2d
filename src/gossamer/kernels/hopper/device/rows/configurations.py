"""What the kernels of single rows are compiled from. No compiler is imported."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 8  # of a warp that share a row: 128 bytes of it at a time
WARPS = 1  # of a block: what ends early gives its place to others
SIZES = (64, 128)
DIRECTIONS = ("forward", "query", "columns")
ITEMS = WARPS * 32 // LANES  # of a block, each a row and some of its columns


@dataclass(frozen=True)
class RowsConfig:
    """One compiled kernel.

    Raises:
        ValueError: a direction or a size that there is no kernel for.
    """

    direction: str  # "forward", "query": dQ, "columns": dK and dV
    dtype: str
    size: int  # D and E after padding
    whole: bool  # D and E are that
    score: str = "plain"  # or "softcap"
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    shares: bool = False  # dK and dV are shares of a query head, in float32

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS or self.size not in SIZES:
            raise ValueError(f"no kernel of single rows as {self}")

    @property
    def lines(self) -> int:
        """Of 128 bytes, in a row."""
        return self.size // 64

    @property
    def at_once(self) -> int:
        """Columns whose rows are loaded before the first of them is used."""
        return 2 if self.size == 128 and self.direction != "forward" else 4

    @property
    def blocks(self) -> int:
        """Of a multiprocessor at least, which bounds the registers of a thread."""
        # Measured: they wait for memory, so that more warps gain until registers do not hold what a step loads.
        of_64, of_128 = {"forward": (24, 16), "query": (20, 16), "columns": (16, 12)}[self.direction]
        return of_64 if self.size == 64 else of_128
