"""What the gather kernels are compiled from."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cute.configurations import check_memory, queries_of
from gossamer.kernels.hopper.device.configurations import Hold

ROWS = 64  # of a group, and columns that are gathered at a time: the layout's own
SIZES = (64, 128)  # head sizes; a smaller one is padded with zeros
DIRECTIONS = ("forward", "query", "columns", "gradients")
WIDEST = 256  # of kernels of rows alone, whose lists only the device knows
ALIGNED = 1024  # bytes at a multiple of which tiles begin: barriers and descriptions of items take up to half of them
WORD = 4  # bytes of a word of a mask, and of a float32
POINT = 4  # numbers of a position


@dataclass(frozen=True)
class GatherConfig:
    """One compiled gather kernel.

    `stages` is the depth of the rings of what is gathered, two tensors of 64 rows a stage. `blocks` share a
    multiprocessor. Numbers of float32 are split in two of float16 (gather/float32), in the forward alone.

    The rows of a tile are those of `queries` queries, each of which has `heads` heads that share its list: with one
    head 64 queries. What is left of 64 rows is empty.
    """

    direction: str  # "forward", "query": dQ, "columns": dK and dV, "gradients": all three by rows, which add in memory
    dtype: str
    size: int  # D and E after padding
    stages: int
    blocks: int = 2
    lengths: bool = False  # keys at and after a length for each batch element are not attended
    score: str = "fold"  # or "scale" (a factor that is not positive), "softcap"
    heads: int = 1  # query heads whose rows share a tile
    q_stages: int = 2  # of the forward's Q: with one, those that gather begin an item before there is room for its Q
    held_q: bool = False  # Q of an item is read from registers, not from shared memory in each step
    particles: bool = False  # rows of items are particles, which lists name (gather/particles)
    gaussian: bool = False  # of these: scores depend on distances as well

    block_q = block_kv = step = ROWS
    hold = Hold.COMPILER
    keeps = False

    def __post_init__(self) -> None:
        known = self.direction in DIRECTIONS and self.size in SIZES and self.blocks in (2, 3)
        if self.blocks == 1 and self.size in (128, WIDEST):
            known = self.direction in DIRECTIONS and self.direction != "columns"
        if not 1 <= self.heads <= ROWS or (self.heads > 1 and self.direction == "columns"):
            known = False
        of_particles = self.direction != "gradients" and (self.heads, self.score, self.lengths) == (1, "fold", False)
        if (self.particles and not of_particles) or (self.gaussian and not self.particles):
            known = False
        if self.dtype == "float32":
            known = (self.direction, self.size, self.blocks) == ("forward", 64, 2)
        if not known or self.stages < 2:
            raise ValueError(f"no gather kernel as {self}")
        check_memory(self)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the first and of the computing warpgroup."""
        if self.blocks == 3:
            return 40, 120
        if self.blocks == 1:
            return 56, 240
        if self.direction == "columns":
            return (40, 216) if self.size == 64 else (32, 224)
        return 56, 200

    @property
    def clears(self) -> bool:
        """dQ of rows that keep nothing becomes zero at last."""
        return self.direction == "query" and not self.particles

    @property
    def queries(self) -> int:
        """Of a tile."""
        return queries_of(self.heads)

    @property
    def words(self) -> int:
        """Of the mask of a step: of each query two, of 32 columns."""
        return 2 * self.queries

    @property
    def slots(self) -> int:
        """Steps whose mask is held: the forward reads one before it gives back K of the step before."""
        return self.stages if self.direction == "gradients" else 2 * self.stages

    @property
    def D(self) -> int:
        return self.size

    @property
    def E(self) -> int:
        return self.size

    @property
    def k_stages(self) -> int:
        return self.stages

    v_stages = k_stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: rings, barriers and item descriptions; words of steps, for float32 powers too."""
        width, words = (WORD, 4 * ROWS) if self.dtype == "float32" else (2, self.words)
        exchanged = 2 * 2 * ROWS * ROWS if self.direction == "gradients" else 0  # P and dS
        before = WORD * words * self.slots  # the tiles, where the words of steps stand
        if self.particles:  # and the words of rows, and the positions of columns
            before += WORD * ROWS * self.q_stages + WORD * POINT * ROWS * self.slots * self.gaussian
        if self.particles or exchanged or self.q_stages == 1:
            before = -(-max(0, before - ALIGNED // 2) // ALIGNED) * ALIGNED
        rows = (2 if self.direction != "forward" else self.q_stages) + 2 * self.stages
        return width * ROWS * self.size * rows + exchanged + before + ALIGNED
