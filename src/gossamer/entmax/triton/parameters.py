"""What kernels take together: one parameter, a tuple whose fields have names.

Triton compiles for a field as it would for a parameter of its own, and passes it alike. Numbers lie together of whose
values it compiles for none.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.relaunch import Strides


class VisibleKeys(NamedTuple):
    """What says which keys a row may see."""

    lo: Tensor  # (Q,) int32
    hi: Tensor  # (Q,) int32
    q_positions: Tensor  # (B, H, Q)
    k_positions: Tensor  # (B, H, K)


class HeadRows(NamedTuple):
    """What says which keys a row may see, and the rows of each head that are computed."""

    lo: Tensor  # (Q,) int32
    hi: Tensor  # (Q,) int32
    q_positions: Tensor  # (B, H, Q)
    k_positions: Tensor  # (B, H, K)
    listed: Tensor  # (B H, Q) int32: these rows; or (B H, groups), groups of rows
    counts: Tensor  # (B H,) int32


class Candidates(NamedTuple):
    """The candidates of blocks of R rows, C of each row."""

    scores: Tensor  # (blocks, R, C) float32
    keys: Tensor  # (blocks, R, C) int32
    counts: Tensor  # (blocks, R) int32


class RowStats(NamedTuple):
    """What is told of each row."""

    lam: Tensor  # (B, H, Q) float32
    support: Tensor  # (B, H, Q) int32
    certified: Tensor  # (B, H, Q) bool


class SupportLists(NamedTuple):
    """The supports of rows."""

    keys: Tensor  # (rows, L) int32
    weights: Tensor  # (rows, L) float32
    counts: Tensor  # (B, H, Q) int32: -1 of a row that has no list


class Unlisted(NamedTuple):
    """What `tiles.list_rows` writes."""

    row_list: Tensor  # (B H, Q) int32: the rows of a head that have no list, ascending
    row_counts: Tensor  # (B H,) int32
    pair_counts: Tensor  # (B H,) int32: the pairs in lists
    zeros: Tensor  # (n_zeros,) int32: 0, for the kernels that follow


class KeyLists(NamedTuple):
    """The pairs of each key, and where they are: see `transpose.order_keys_kernel`."""

    names: Tensor  # (pairs,) int32, by keys
    begins: Tensor  # (B G K,) int32
    numbers: Tensor
    part_ends: Tensor
    arrived: Tensor
    order: Tensor


class ScoreStrides(NamedTuple):
    """The strides of what gives scores, and says which are seen."""

    at_q: Strides
    at_k: Strides
    at_q_positions: Strides
    at_k_positions: Strides


class ForwardStrides(NamedTuple):
    """Those of a forward by tiles."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_q_positions: Strides
    at_k_positions: Strides


class BackwardStrides(NamedTuple):
    """Those of a backward by tiles."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_dout: Strides
    at_q_positions: Strides
    at_k_positions: Strides


class QueryStrides(NamedTuple):
    """Those of rows that are computed from their lists; what is gathered lies at distances that are compiled in."""

    k_b: int
    k_h: int
    v_b: int
    v_h: int
    at_dout: Strides


class KeyStrides(NamedTuple):
    """Those of what keys gather."""

    at_q: Strides
    at_dout: Strides


class SelectNumbers(NamedTuple):
    first_block: int
    Q: int
    K: int
    offset: int
    keep: int
    scale: float


class LargeNumbers(NamedTuple):
    Q: int
    K: int
    offset: int
    keep: int
    first_listed: int
    scale: float


class TileNumbers(NamedTuple):
    Q: int
    K: int
    offset: int
    scale: float


class GatherNumbers(NamedTuple):
    n_zeros: int
    heads: int  # as many first programs list rows; 0: nothing is listed
    first_row: int
    n_rows: int
    Q: int


class QueryNumbers(NamedTuple):
    n_zeros: int
    heads: int
    n_rows: int
    Q: int
    scale: float


class ColumnNumbers(NamedTuple):
    Q: int
    K: int
    n_keys: int
    halvings: int
    part_programs: int
    part_places: int
    scale: float


class LargeResults(NamedTuple):
    """The lists and the statistics that `large_kernel` writes."""

    list_counts: Tensor  # (B, H, Q) int32: -1 of a row to compute
    lam: Tensor
    support: Tensor
    certified: Tensor
    list_keys: Tensor
    list_weights: Tensor


class TileResults(NamedTuple):
    out: Tensor  # (B, H, Q, E) contiguous
    lam: Tensor  # (B, H, Q) float32
    support: Tensor  # (B, H, Q) int32
    certified: Tensor  # (B, H, Q) bool


class TileQueryResults(NamedTuple):
    delta: Tensor  # (B, H, Q) float32
    dq: Tensor  # (B, H, Q, D) contiguous
    row_alpha: Tensor  # (B, H, Q) float32


class ColumnTerms(NamedTuple):
    """What the gradients of keys read of rows."""

    lam: Tensor  # (B, H, Q) float32
    delta: Tensor  # (B, H, Q) float32
    ranges: Tensor  # (B H, tiles, 4) int32: of `tiles.tile_ranges_kernel`


class TileSizes(NamedTuple):
    tiles: int
    H: int


class TileKeyResults(NamedTuple):
    dk: Tensor  # (B, G, K, D) contiguous, to add to
    dv: Tensor  # (B, G, K, E) contiguous, to add to


class QueryResults(NamedTuple):
    dq: Tensor  # (B, H, Q, D), contiguous
    gradients: Tensor  # (rows, L, 2) float32: p and dS of each listed pair
    row_alpha: Tensor  # (B, H, Q) float32: the gradient of alpha of each row


class KeyResults(NamedTuple):
    dk: Tensor  # (B, G, K, D) contiguous
    dv: Tensor  # (B, G, K, E) contiguous
    part_dk: Tensor  # (B G, part_places, D) float32
    part_dv: Tensor  # (B G, part_places, E) float32


class SelectForm(NamedTuple):
    """What `select_kernel` is compiled for; so the others."""

    D: int
    BLOCK_D: int
    GROUP: int
    R: int
    STEP: int
    C: int
    A: float
    TOP: bool
    WEIGHED: bool
    BOUNDS: int
    POSITIONS: bool
    PRECISION: str
    PTX: bool


class FinishForm(NamedTuple):
    L: int
    R: int
    RP: int
    C: int
    SHORT: int
    A: float
    TOP: bool
    KEYS: bool
    TOLD: bool


class LargeForm(NamedTuple):
    L: int
    D: int
    BLOCK_D: int
    GROUP: int
    R: int
    STEP: int
    A: float
    KEYS: bool
    TOLD: bool
    BOUNDS: int
    POSITIONS: bool
    PRECISION: str


class TileForm(NamedTuple):
    """Those of tiles of rows; what only some of them read is behind."""

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    GROUP: int
    R: int
    A: float
    BOUNDS: int
    POSITIONS: bool
    PRECISION: str
    STEP: int = 0
    SAMPLE: int = 0
    NEAR: float = 0.0
    OUT: bool = False
    TOLD: bool = False
    WITH_ALPHA: bool = False
    COLUMNS: int = 0
    MEMBERS: int = 0
    SPAN: int = 0


class GatherForm(NamedTuple):
    L: int
    E: int
    SE: int
    STREAMED: int  # the distance of the rows of v
    RP: int
    N: int
    GROUP: int
    STEP: int


class QueryForm(NamedTuple):
    L: int
    D: int
    E: int
    SD: int
    SE: int
    STREAMED: tuple[int, int]  # the distances of the rows of k and v
    RP: int
    N: int
    VECTOR: int
    GROUP: int
    A: float
    WITH_ALPHA: bool
    STEP: int


class KeyForm(NamedTuple):
    L: int
    D: int
    E: int
    SD: int
    SE: int
    RP: int
    N: int
    GROUP: int
    LONG: int
    HALF: int


class OrderForm(NamedTuple):
    GROUP: int
    SEGMENTS: int
    LONG: int
    HALF: int
    STEP: int


class PairForm(NamedTuple):
    L: int
    RP: int
    VECTOR: int
    GROUP: int
    SEGMENTS: int
