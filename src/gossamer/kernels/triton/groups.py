"""What the kernels of this folder take together: one parameter, a tuple whose fields have names.

`arguments.step` fills each field with the value of its name. Triton compiles for a field as it would for a parameter
of its own, and passes it alike.
"""

from __future__ import annotations

from typing import NamedTuple

from gossamer.kernels.arrays import Array
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

    out: Array  # (B, H, Q, E)
    lse: Array  # (B, H, Q)
    part_acc: Array  # (copies, slots, TILE_ROWS, E)
    part_ml: Array  # (copies, slots, 2, TILE_ROWS)


class QueryResults(NamedTuple):
    """dQ, and the parts of rows whose list is split."""

    dq: Array  # (B, H, Q, D)
    part: Array  # (copies, slots, TILE_ROWS, D)


class KeyResults(NamedTuple):
    """dK and dV, and the parts of rows whose list is split."""

    dk: Array  # (B, heads, K, D)
    dv: Array  # (B, heads, K, E)
    part_dk: Array  # (copies, slots, TILE_ROWS, D)
    part_dv: Array  # (copies, slots, TILE_ROWS, E)


class ForwardTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Array  # (B,)
    sinks: Array  # (H,)
    slopes: Array  # (H,) or (B, H)


class BackwardTerms(NamedTuple):
    """Tensors among the score terms, and what a backward needs of each query row."""

    row_terms: Array  # (2, B, H, padded_Q): lse in base 2, delta
    lengths: Array  # (B,)
    slopes: Array  # (H,) or (B, H)
