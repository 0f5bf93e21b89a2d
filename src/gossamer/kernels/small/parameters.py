"""What the kernels of small problems take together; Triton compiles for a field as for a parameter of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from gossamer.kernels.relaunch import Strides


class ForwardTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Any  # (B,) or None
    sinks: Any  # (H,) or None
    slopes: Any  # (H,) or (B, H), or None


class BackwardTerms(NamedTuple):
    """Tensors among the score terms that a backward reads."""

    lengths: Any
    slopes: Any


class Rows(NamedTuple):
    """What a backward reads of each query row."""

    dout: Any  # (B, H, Q, E)
    out: Any  # (B, H, Q, E)
    lse: Any  # (B, H, Q)
    dlse: Any  # (B, H, Q) or None


class Results(NamedTuple):
    """Gradients."""

    dq: Any  # (B, H, Q, D)
    dk: Any  # (B, G, K, D)
    dv: Any  # (B, G, K, E)


class InputStrides(NamedTuple):
    """The strides of q, k and v."""

    at_q: Strides
    at_k: Strides
    at_v: Strides


class ForwardNumbers(NamedTuple):
    """Numbers of which Triton compiles for no value."""

    Q: int
    K: int
    q_offset: int
    scale: float
    cap: float


class BackwardNumbers(NamedTuple):
    """The same of a backward."""

    Q: int
    K: int
    q_offset: int
    scale: float
    cap: float
    plain_scale: float


class Heads(NamedTuple):
    """Query heads, and the distances of two batch elements' and of two heads' masks, 0 where they share."""

    mask_b: int
    mask_h: int
    H: int


class Form(NamedTuple):
    """What a kernel is compiled for."""

    GROUP: int
    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    R: int
    C: int
    SOFTCAP: bool
    ALIBI: int
    PRECISION: str
    ONE_ROW: bool  # the grid is one row of programs
