"""What the kernels of small problems take together; Triton compiles for a field as for a parameter of its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.kernels.relaunch import Strides


class ForwardTerms(NamedTuple):
    """Tensors among the score terms."""

    lengths: Tensor  # (B,) or None
    sinks: Tensor  # (H,) or None
    slopes: Tensor  # (H,) or (B, H), or None


class BackwardTerms(NamedTuple):
    """Tensors among the score terms that a backward reads."""

    lengths: Tensor
    slopes: Tensor


class Rows(NamedTuple):
    """What a backward reads of each query row."""

    dout: Tensor  # (B, H, Q, E)
    out: Tensor  # (B, H, Q, E)
    lse: Tensor  # (B, H, Q)
    dlse: Tensor  # (B, H, Q) or None


class Results(NamedTuple):
    """Gradients."""

    dq: Tensor  # (B, H, Q, D)
    dk: Tensor  # (B, G, K, D)
    dv: Tensor  # (B, G, K, E)


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
