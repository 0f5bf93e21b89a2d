"""What an implementation computes: the values of a call's score terms, a forward and a backward.

Its limits and the problem that it is given are those of the plan (`plan/capability.py`, `plan/problem.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from gossamer.plan.capability import Candidate
from gossamer.plan.problem import Problem


@dataclass(frozen=True)
class Terms:
    """The values of the score terms of one call (section 1 of DESIGN.md); tensors are on the inputs' device."""

    scale: float
    q_offset: int  # position of query row 0
    softcap: float | None = None
    key_lengths: Any = None  # (B,) integer: keys j >= key_lengths[b] are not attended
    sink_logits: Any = None  # (H,) float32: adds exp(sink) to the denominator
    alibi_slopes: Any = None  # (H,) float32: adds slope * (j - i) to the score

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """key_lengths, sink_logits and alibi_slopes; None where there are none."""
        return self.key_lengths, self.sink_logits, self.alibi_slopes

    @property
    def has_tensors(self) -> bool:
        """Whether there is any of them."""
        return self.key_lengths is not None or self.sink_logits is not None or self.alibi_slopes is not None

    def having(self, key_lengths: Any, sink_logits: Any, alibi_slopes: Any) -> Terms:
        """The same with these tensors."""
        if not self.has_tensors and key_lengths is sink_logits is alibi_slopes is None:
            return self
        return replace(self, key_lengths=key_lengths, sink_logits=sink_logits, alibi_slopes=alibi_slopes)


class Implementation(Candidate, Protocol):
    """One backend. It sees layouts, never patterns; `layout` says which form it reads."""

    def forward(
        self,
        problem: Problem,
        q: Any,
        k: Any,
        v: Any,
        layout: Any,
        terms: Terms,
        into: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Any]:
        """(out (B, H, Q, E) in the inputs' dtype, lse (B, H, Q) float32).

        Inputs may have any strides. Where `into` is given, both are written there and returned: tensors of any
        strides, but for the last dimension of out, which is contiguous.
        """

    def backward(
        self,
        problem: Problem,
        dout: Any,
        dlse: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        layout: Any,
        terms: Terms,
        into: tuple[Any, Any, Any] | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """(dq, dk, dv, dsink_logits or None). `dlse` (B, H, Q) float32 may be None.

        Where `into` is given, dq, dk and dv are written there and returned: tensors of any strides, but for the last
        dimension, which is contiguous.
        """


@runtime_checkable
class Binding(Protocol):
    """An implementation that can bind a call to all that its repetitions have in common, so that they look up nothing.

    Both methods are given what a call was computed with just before, q, k and v at multiples of 16 bytes, and tensors
    among its terms contiguous and at such addresses. What they return holds the layout but none of these tensors, and
    computes calls whose tensors have the same shapes, strides, types and device, at such addresses too, and whose terms
    have tensors where the bound call has. A backward looks at strides and addresses itself: what was saved may have
    been moved meanwhile. None where there is nothing to gain.
    """

    def bound_forward(
        self, problem: Problem, q: Any, k: Any, v: Any, layout: Any, terms: Terms, into: tuple[Any, Any] | None = None
    ) -> Callable[..., tuple[Any, Any]] | None:
        """(q, k, v, lengths=None, sinks=None, slopes=None, into=None) -> (out, lse).

        Where `into` is given, calls get results of its strides to write, as `forward` does, whose addresses are as far
        from a multiple of 16 bytes.
        """

    def bound_backward(
        self, problem: Problem, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, layout: Any, terms: Terms,
        into: tuple[Any, Any, Any] | None = None,
    ) -> Callable[..., tuple[Any, ...]] | None:  # fmt: skip
        """(dout, dlse or None, q, k, v, out, lse, lengths=None, sinks=None, slopes=None, into=None) -> gradients.

        They are (dq, dk, dv), and with sinks (dq, dk, dv, dsink_logits). `into` as for the forward.
        """
