"""What the kernels of this folder take together: one parameter, a tuple whose fields have names.

`arguments.step` fills each field with the value of its name. Triton compiles for a field as it would for a parameter
of its own, and passes it alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

    out: Any  # (B, H, Q, E)
    lse: Any  # (B, H, Q)
    part_acc: Any  # (copies, slots, TILE_ROWS, E)
    part_ml: Any  # (copies, slots, 2, TILE_ROWS)


class QueryResults(NamedTuple):
    """dQ, and the parts of rows whose list is split."""

    dq: Any  # (B, H, Q, D)
    part: Any  # (copies, slots, TILE_ROWS, D)


class KeyResults(NamedTuple):
    """dK and dV, and the parts of rows whose list is split."""

    dk: Any  # (B, heads, K, D)
    dv: Any  # (B, heads, K, E)
    part_dk: Any  # (copies, slots, TILE_ROWS, D)
    part_dv: Any  # (copies, slots, TILE_ROWS, E)


class ForwardTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Any  # (B,)
    sinks: Any  # (H,)
    slopes: Any  # (H,) or (B, H)


class BackwardTerms(NamedTuple):
    """Tensors among the score terms, and what a backward needs of each query row."""

    row_terms: Any  # (2, B, H, padded_Q): lse in base 2, delta
    lengths: Any  # (B,)
    slopes: Any  # (H,) or (B, H)
