"""The operands and options of a call of SparseK attention."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Gate = Literal["v", "kv", "logit"]


class Options(NamedTuple):
    """The numbers of a call.

    Query r is at the step i = r + offset. The pair (i, j) is one of the window where 0 <= i - j <= window, without
    `causal` where |i - j| <= window. Another pair that causality allows is kept where i <= last[j], and counts for the
    gradient of the gate alone up to last_gated[j]. Its gate is m = clip(u[j] - tau[i], 0, 1); that of the window is 1.
    """

    window: int
    gate: Gate | None  # m multiplies values, keys and values, or exp(score)
    causal: bool
    scale: float
    straight: bool  # whether u has the gradient of gates of values, also where the gate is None
    live: int  # the number of keys that live at any step
    certain: bool  # whether no more than `live` can; else that depends on the scores
    offset: int = 0  # the step of the first query


class Operands(NamedTuple):
    """The tensors of a call. U is G or H: the heads of a group share the kept keys, or do not.

    N is the number of keys, which is that of steps; Q of them have a query.
    """

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, N, D)
    v: Tensor  # (B, G, N, E)
    u: Tensor  # (B, U, N), in the type that the call is computed in, or in float64: u - tau is computed in its own
    tau: Tensor  # (B, U, N) likewise, non-decreasing with `causal`
    last: Tensor  # (B, U, N) int32: the last step that keeps each key
    last_gated: Tensor  # (B, U, N) int32, at least `last`
    hidden: Tensor | None = None  # (B, U, N) bool: keys of a score -inf that no window shows either


class SparseKGradients(NamedTuple):
    """The gradients of the operands."""

    q: Tensor
    k: Tensor
    v: Tensor
    u: Tensor
    tau: Tensor


class Memory(NamedTuple):
    """The bytes that a call takes besides operands and results."""

    lists: int  # in the forward
    sums: int  # in the backward, besides lists
