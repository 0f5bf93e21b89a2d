"""What kernels take together: one parameter, a tuple whose fields have names.

Triton compiles for a field as it would for a parameter of its own, and passes it alike. Numbers lie together of whose
values it compiles for none.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

from torch import Tensor


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


# The strides of what gives scores, and says which are seen.
ScoreStrides = namedtuple("ScoreStrides", "at_q at_k at_q_positions at_k_positions")
# Those of a forward by tiles.
ForwardStrides = namedtuple("ForwardStrides", "at_q at_k at_v at_q_positions at_k_positions")
# Those of a backward by tiles.
BackwardStrides = namedtuple("BackwardStrides", "at_q at_k at_v at_dout at_q_positions at_k_positions")
# Those of rows that are computed from their lists; what is gathered lies at distances that are compiled in.
QueryStrides = namedtuple("QueryStrides", "k_b k_h v_b v_h at_dout")
# Those of what keys gather.
KeyStrides = namedtuple("KeyStrides", "at_q at_dout")
SelectNumbers = namedtuple("SelectNumbers", "first_block Q K offset keep scale")
LargeNumbers = namedtuple("LargeNumbers", "Q K offset keep first_listed scale")
TileNumbers = namedtuple("TileNumbers", "Q K offset scale")
# heads: as many first programs list rows; 0: nothing is listed
GatherNumbers = namedtuple("GatherNumbers", "n_zeros heads first_row n_rows Q")
QueryNumbers = namedtuple("QueryNumbers", "n_zeros heads n_rows Q scale")
ColumnNumbers = namedtuple("ColumnNumbers", "Q K n_keys halvings part_programs part_places scale")


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


TileSizes = namedtuple("TileSizes", "tiles H")


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


# What `select_kernel` is compiled for; so the others.
SelectForm = namedtuple("SelectForm", "D BLOCK_D GROUP R STEP C A TOP WEIGHED BOUNDS POSITIONS PRECISION PTX")
FinishForm = namedtuple("FinishForm", "L R RP C SHORT A TOP KEYS TOLD")
LargeForm = namedtuple("LargeForm", "L D BLOCK_D GROUP R STEP A KEYS TOLD BOUNDS POSITIONS PRECISION")
# Those of tiles of rows; what only some of them read is behind.
TileForm = namedtuple(
    "TileForm",
    "D E BLOCK_D BLOCK_E GROUP R A BOUNDS POSITIONS PRECISION STEP SAMPLE NEAR OUT TOLD WITH_ALPHA COLUMNS "
    "MEMBERS SPAN",
    defaults=(0, 0, 0.0, False, False, False, 0, 0, 0),
)
# STREAMED: the distance of the rows of v
GatherForm = namedtuple("GatherForm", "L E SE STREAMED RP N GROUP STEP")
# STREAMED: the distances of the rows of k and v
QueryForm = namedtuple("QueryForm", "L D E SD SE STREAMED RP N VECTOR GROUP A WITH_ALPHA STEP")
KeyForm = namedtuple("KeyForm", "L D E SD SE RP N GROUP LONG HALF")
OrderForm = namedtuple("OrderForm", "GROUP SEGMENTS LONG HALF STEP")
PairForm = namedtuple("PairForm", "L RP VECTOR GROUP SEGMENTS")
