"""What the kernels of wide heads take together: `arguments.step` fills each field with the value of its name."""

from __future__ import annotations

from typing import NamedTuple

from gossamer.kernels.arrays import Array
from gossamer.kernels.relaunch import Strides


class ProductRows(NamedTuple):
    """What a backward reads of each query row."""

    dout: Array  # (B, H, Q, E)
    lse: Array  # (B, H, Q) natural, +inf for an empty row
    delta: Array  # (B, H, Q)


class ProductLists(NamedTuple):
    """The listed tiles of a pass, and what masks them."""

    tiles: Array  # (n, 4)
    begins: Array  # (leads,) of the first tile of each lead's list
    counts: Array  # (leads,) of its tiles
    lo: Array  # (leads, Q)
    hi: Array  # (leads, Q)
    pool: Array


class OutputLists(NamedTuple):
    """The listed tiles of a pass by tile row."""

    tiles: Array
    begins: Array
    row_starts: Array  # (leads, tile rows here + 1) within the list


class GradientLists(NamedTuple):
    """The listed tiles of a pass by tile row of a gradient."""

    tiles: Array
    begins: Array
    order: Array  # slots by tile row of the result, of each lead
    order_begins: Array  # (leads,)
    starts: Array  # (leads, n_rows + 1) within the order


class ProductTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Array  # (B,) or None
    slopes: Array  # (H,) or (B, H), or None


class ProductStrides(NamedTuple):
    """Strides of what products are of."""

    at_q: Strides
    at_k: Strides
    at_v: Strides


class OutputStrides(NamedTuple):
    """Strides of values and results."""

    at_v: Strides
    at_out: Strides
    at_lse: Strides


class GradientStrides(NamedTuple):
    """Strides of what weights multiply, and of the gradient."""

    at_x: Strides
    at_result: Strides


class ProductNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    Q: int
    K: int
    q_offset: int
    slots: int
    scale: float
    cap: float


class OutputNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    Q: int
    K: int
    slots: int
    first_row: int


class GradientNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    rows: int
    columns: int
    slots: int
    first_row: int
    factor: float


class Leads(NamedTuple):
    """Heads, and the leads between two batch elements and between two heads: 0 where they share."""

    H: int
    lead_b: int
    lead_h: int


class ProductForm(NamedTuple):
    """What the kernel of products is compiled for."""

    GROUP: int
    D: int
    E: int
    R: int
    C: int
    STEP: int  # of D or E, that one product takes
    TILE_ROWS: int
    TILE_COLUMNS: int
    SOFTCAP: bool
    ALIBI: int
    BACKWARD: bool
    PRECISION: str


class OutputForm(NamedTuple):
    """What the kernel of the output is compiled for."""

    GROUP: int
    E: int
    R: int
    C: int
    BLOCK: int  # of E
    TILE_ROWS: int
    TILE_COLUMNS: int
    CLEAR: bool  # there may be keys that no query keeps, whose values may be NaN
    PRECISION: str


class GradientForm(NamedTuple):
    """What the kernel of a gradient is compiled for."""

    MEMBERS: int  # query heads of a program: 1 for dQ, the group for dK and dV
    X_GROUP: int  # query heads of a head of x
    SIZE: int
    R: int
    C: int
    BLOCK: int
    TILE_ROWS: int
    TILE_COLUMNS: int
    TRANSPOSED: bool  # the result's rows are the tiles' columns
    CLEAR: bool  # there may be rows of x that no pair has
    ADD: bool
    PRECISION: str
