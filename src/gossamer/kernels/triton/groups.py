"""What the kernels of this folder take together: one parameter, a tuple whose fields have names.

`arguments.step` fills each field with the value of its name. Triton compiles for a field as it would for a parameter
of its own, and passes it alike.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.relaunch import Strides


class ForwardStrides(NamedTuple):
    """The strides of what a forward reads and writes."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_out: Strides
    at_lse: Strides


class ResultStrides(NamedTuple):
    """The strides of the results of a forward."""

    at_out: Strides
    at_lse: Strides


class QueryStrides(NamedTuple):
    """The strides of what a kernel of dQ reads and writes."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_dout: Strides
    at_dq: Strides


class KeyStrides(NamedTuple):
    """The strides of what a kernel of dK and dV reads and writes."""

    at_q: Strides
    at_k: Strides
    at_v: Strides
    at_dout: Strides
    at_dk: Strides
    at_dv: Strides


class ForwardResults(NamedTuple):
    """What a forward writes: results, and the parts of rows whose list is split."""

    out: Tensor  # (B, H, Q, E)
    lse: Tensor  # (B, H, Q)
    part_acc: Tensor  # (copies, slots, TILE_ROWS, E)
    part_ml: Tensor  # (copies, slots, 2, TILE_ROWS)


class QueryResults(NamedTuple):
    """dQ, and the parts of rows whose list is split."""

    dq: Tensor  # (B, H, Q, D)
    part: Tensor  # (copies, slots, TILE_ROWS, D)


class KeyResults(NamedTuple):
    """dK and dV, and the parts of rows whose list is split."""

    dk: Tensor  # (B, heads, K, D)
    dv: Tensor  # (B, heads, K, E)
    part_dk: Tensor  # (copies, slots, TILE_ROWS, D)
    part_dv: Tensor  # (copies, slots, TILE_ROWS, E)


class ForwardTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Tensor  # (B,)
    sinks: Tensor  # (H,)
    slopes: Tensor  # (H,) or (B, H)


class BackwardTerms(NamedTuple):
    """Tensors among the score terms, and what a backward needs of each query row."""

    row_terms: Tensor  # (2, B, H, padded_Q): lse in base 2, delta
    lengths: Tensor  # (B,)
    slopes: Tensor  # (H,) or (B, H)
