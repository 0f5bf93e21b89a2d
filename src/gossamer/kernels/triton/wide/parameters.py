"""What the kernels of wide heads take together: `arguments.step` fills each field with the value of its name."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.relaunch import Strides


class ProductRows(NamedTuple):
    """What a backward reads of each query row."""

    dout: Tensor  # (B, H, Q, E)
    lse: Tensor  # (B, H, Q) natural, +inf for an empty row
    delta: Tensor  # (B, H, Q)


class ProductLists(NamedTuple):
    """The listed tiles of a pass, and what masks them."""

    tiles: Tensor  # (n, 4)
    begins: Tensor  # (leads,) of the first tile of each lead's list
    counts: Tensor  # (leads,) of its tiles
    lo: Tensor  # (leads, Q)
    hi: Tensor  # (leads, Q)
    pool: Tensor


class OutputLists(NamedTuple):
    """The listed tiles of a pass by tile row."""

    tiles: Tensor
    begins: Tensor
    row_starts: Tensor  # (leads, tile rows here + 1) within the list


class GradientLists(NamedTuple):
    """The listed tiles of a pass by tile row of a gradient."""

    tiles: Tensor
    begins: Tensor
    order: Tensor  # slots by tile row of the result, of each lead
    order_begins: Tensor  # (leads,)
    starts: Tensor  # (leads, n_rows + 1) within the order


class ProductTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Tensor  # (B,) or None
    slopes: Tensor  # (H,) or (B, H), or None


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
