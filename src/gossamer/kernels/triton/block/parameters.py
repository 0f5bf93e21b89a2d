"""What the kernels of tiles take together: the lists of a walk, the numbers of a call, and what it is compiled for."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.kernels.arrays import Array


class TileList(NamedTuple):
    """One list of a walk, as `layouts.walk.TileList`: a run of packed tile columns for each tile row."""

    starts: Array
    counts: Array
    indices: Array


class Lists(NamedTuple):
    """A walk and its work items."""

    items: Array  # (n, ITEM) of `layouts.items`
    tiles: tuple[TileList, ...]  # by mode: full, interval, bits
    lo: Array
    hi: Array
    pool_index: Array
    pool: Array


class Numbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    n_items: int
    n_slots: int
    n_tiles: int
    Q: int
    K: int
    q_offset: int
    scale: float
    cap: float
    plain_scale: float


class Heads(NamedTuple):
    """How heads share keys and lists.

    `list_b` and `list_h` are the strides, in lists, of a batch element and a head (0 where they share).
    """

    H: int
    G: int
    list_b: int
    list_h: int
    lead_heads: int


class BackwardHeads(NamedTuple):
    """How heads share keys and lists, as `Heads` has it, and where their row terms are."""

    H: int
    G: int
    padded_Q: int
    delta_offset: int  # from the lse of a row to its delta
    list_b: int
    list_h: int
    lead_heads: int


class Form(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    R: int  # resident rows of a program
    C: int  # rows streamed in one step
    TILE_ROWS: int
    TILE_COLUMNS: int
    GROUP: int
    B_FROM_GRID: bool
    H_FROM_GRID: bool
    HAS_ITEMS: bool
    HAS_SLOTS: bool
    HAS: tuple[bool, ...]  # by mode: whether the list has any entry
    CONTIGUOUS: tuple[bool, ...]  # by mode: whether every row's list is a run of consecutive tiles
    FOLD: bool
    SOFTCAP: bool
    ALIBI: int
    SINK: bool
    LENGTHS: bool
    PRECISION: str
    TMA: bool  # what is streamed is loaded through a tensor descriptor
    CLEAR: bool  # there may be streamed rows that no pair has, which may be NaN
