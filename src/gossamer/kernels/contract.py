"""The contract of an implementation: the score terms of a call, and each direction of a call as a launch.

Its limits and the problem that it is given are those of the plan (`plan/capability.py`, `plan/problem.py`).

What no kept pair has reaches no result: NaN and infinities in rows of q, dout, and without sinks dlse, of queries that
keep nothing, and in rows of k and v that no query of the call keeps (past lengths, before starts, outside of documents,
not listed; where a capability says so, past lengths alone) give the bits that zeros in these places give, in out, lse
and every gradient. So loads of such rows are cleared, or their products are chosen and not multiplied by 0:
`tests/kernels/test_contract.py` holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from gossamer.kernels.launch import Direction, Operand, Prepared
from gossamer.plan.capability import Candidate
from gossamer.plan.problem import Problem


class Scoring(NamedTuple):
    """The numbers among the score terms of a call (DESIGN.md, Semantics)."""

    scale: float
    q_offset: int  # position of query row 0
    softcap: float | None = None
    absolute: bool = False  # of ALiBi's distances


class Terms(NamedTuple):
    """The values of all score terms of a call, `Scoring` and then `Vectors`; tensors are on the inputs' device."""

    scale: float
    q_offset: int
    softcap: float | None = None
    absolute: bool = False  # of ALiBi's distances
    key_lengths: Any = None  # (B,) integer: keys j >= key_lengths[b] are not attended
    sink_logits: Any = None  # (H,) float32: adds exp(sink) to the denominator
    alibi_slopes: Any = None  # (H,) or (B, H) float32: adds slope * (j - i), or slope * -|i - j|, to the score


class Implementation(Candidate, Protocol):
    """One backend. It sees layouts, never patterns; `layout` says which form it reads."""

    def prepare(
        self, problem: Problem, layout: Any, direction: Direction, scoring: Scoring, operands: Mapping[str, Operand]
    ) -> Prepared:
        """One direction of a call as data, and the arrays of its layout: see `kernels.launch`.

        Args:
            operands: what the caller gives, by name. Forward: q, k and v. Backward: dout, dlse (left out where there
                is none), q, k, v, out and lse. Both: key_lengths, sink_logits and alibi_slopes where the problem has
                them. Strides are any. Results may be among them, to be written where they are: out (B, H, Q, E), of
                any strides but for its last dimension, which is contiguous, and of float32 where the capability has
                `float32_results`, and lse (B, H, Q); or dq, dk and dv.

        Returns:
            A launch whose results are out (B, H, Q, E) in the inputs' type and lse (B, H, Q) float32 (float64 for
            float64), or dq, dk, dv and, where there are sinks, dsink_logits (H,).
        """

    def kernel(self, name: str, *key: Any) -> Callable[..., Any]:
        """The function of a `Kernel` that `prepare` has named."""
