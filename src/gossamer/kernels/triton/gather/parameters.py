"""What the kernels of gathered columns take together: the lists of a walk, the numbers of a call, what is compiled."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.kernels.arrays import Array


class RowLists(NamedTuple):
    """A walk of single rows and its work items."""

    items: Array  # (n, ITEM) of `layouts.items`
    longest: Array  # (programs,), as `schedule_gather.Work.longest` has it
    indices: Array


class TileLists(NamedTuple):
    """A walk of groups of rows and its work items."""

    items: Array  # (n, ITEM) of `layouts.items`
    indices: Array
    bits: Array


class ForwardNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    n_items: int
    n_programs: int  # of one copy of the walk
    n_slots: int
    Q: int
    K: int
    q_offset: int
    scale: float
    cap: float


class BackwardNumbers(NamedTuple):
    """The same of a backward, and where the terms of its query rows are."""

    n_items: int
    n_programs: int
    n_slots: int
    Q: int
    K: int
    q_offset: int
    scale: float
    cap: float
    plain_scale: float
    padded_Q: int
    delta_offset: int  # from the lse of a row to its delta


class Shares(NamedTuple):
    """How query heads share keys and lists."""

    H: int
    G: int
    lead_heads: int


class RowForm(NamedTuple):
    """What a kernel of single rows is compiled for."""

    D: int
    E: int
    SD: int  # numbers of a row of q or k in one piece
    SE: int  # of a row of v or dout
    RP: int  # items of a program
    C: int  # columns gathered in one step, for each item
    STREAMED: tuple[int, int]  # strides of the rows that are gathered: of k and v, or of q and dout
    GROUP: int
    MEMBERS: int  # query heads that a program of dK and dV sums
    B_FROM_GRID: bool
    H_FROM_GRID: bool
    FLAT: bool  # all programs are in the first dimension of the grid; else heads and batch elements are the others
    HAS_SLOTS: bool
    SOFTCAP: bool
    ALIBI: int
    SINK: bool
    LENGTHS: bool


class TileForm(NamedTuple):
    """What a kernel of groups of rows is compiled for."""

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    R: int  # rows of a group
    C: int  # columns gathered in one step
    GROUP: int
    MEMBERS: int  # query heads that a program of dK and dV sums
    B_FROM_GRID: bool
    H_FROM_GRID: bool
    HAS_SLOTS: bool
    SOFTCAP: bool
    ALIBI: int
    SINK: bool
    LENGTHS: bool
    PRECISION: str
