"""`explain_sparsek`: the way a call would be computed, and the keys that it would keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.kernels.launch import dtype_of
from gossamer.plan.tabular import aligned
from gossamer.sparse_k.attention import check_call
from gossamer.sparse_k.calls import type_of_scores
from gossamer.sparse_k.launch.implementations import implementations
from gossamer.sparse_k.launch.problem import Gate, Operands, Options
from gossamer.sparse_k.operator import has_kernels
from gossamer.sparse_k.selection import Keep, Selection
from gossamer.torch.arguments import Lengths


@dataclass(frozen=True)
class SparseKExplanation:
    """The way a call of `sparsek_attention` would be computed, as a table."""

    problem: str
    kept: str  # which keys a query attends
    gated: str  # what their gates do, and the gradient of u
    implementation: str
    reasons: dict[str, list[str]]  # of each implementation that is not taken
    thresholds: str  # how these are computed
    pairs: int  # the most pairs of a row; supports may be larger than a list
    lists_bytes: int  # lists of live keys in the forward
    sums_bytes: int  # that the backward holds besides gradients and lists

    def rows(self) -> list[tuple[str, str]]:
        """The table, as (name, value) pairs."""
        lines = [
            ("problem", self.problem),
            ("kept", self.kept),
            ("gates", self.gated),
            ("thresholds", self.thresholds),
            ("pairs of a row", f"up to {self.pairs:,}"),
            ("memory", f"{self.lists_bytes / 2**20:,.1f} MiB of lists; backward {self.sums_bytes / 2**20:,.1f} MiB"),
            ("implementation", self.implementation),
        ]
        return lines + [(f"not {name}", "; ".join(why)) for name, why in self.reasons.items()]

    def __str__(self) -> str:
        """The table."""
        return aligned(self.rows())


def explain_sparsek(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    k_keep: int,
    window: int = 0,
    keep: Keep = "topk",
    gate: Gate | None = "v",
    causal: bool = True,
    scale: float | Tensor | None = None,
    q_offset: int | None = None,
    key_lengths: Lengths | None = None,
    straight_through: bool = False,
    return_lse: bool = False,
) -> SparseKExplanation:
    """The way a call of `sparsek_attention` is computed, and the keys that it keeps; no number of u is read.

    Args:
        q: and all others as for `sparsek_attention`; return_lse makes no difference.

    Returns:
        An explanation, which prints as a table.

    Raises:
        ValueError: as `sparsek_attention` does.

    Examples:
        >>> q = torch.empty(1, 8, 4096, 64)
        >>> plan = gs.explain_sparsek(q, q, q, torch.empty(1, 8, 4096), k_keep=256, window=127)
        >>> plan.implementation, plan.pairs
        ('chunks: operations of torch, up to 256 queries at a time', 384)
        >>> plan.reasons["triton"]
        ['needs a GPU, not cpu']
    """
    call = check_call(
        q, k, v, u, k_keep, window, keep, gate, causal, scale, q_offset, key_lengths, straight_through, return_lse
    )
    q, k, v, u = call.q, call.k, call.v, call.u
    (B, H, Q, D), G, E, (_, U, K) = q.shape, k.shape[1], v.shape[3], u.shape
    how = Selection(call.k_keep, keep, causal, straight_through, K)
    scores = u.detach().to(type_of_scores(q, u))
    steps = torch.empty(u.shape, dtype=torch.int32, device="meta")
    options = Options(call.window, gate, causal, call.scale, straight_through, how.room, how.certain, call.q_offset)
    hidden = None if call.key_lengths is None else steps.bool()
    operands = Operands(q, k, v, scores, scores, steps, steps, hidden)
    reasons = {}
    for one in implementations():
        if not (why := one.reasons(operands, options)):
            break
        reasons[one.name] = why
    memory = one.memory(operands, options)
    sides = "before" if causal else "before and behind"
    largest = f"the {call.k_keep} largest scores so far" if keep == "topk" else "m > 0"
    if not causal:
        largest = largest.replace(" so far", "")
    gated = {"v": "multiply values", "kv": "multiply keys and values", "logit": "multiply weights", None: "none"}
    gradient = "; no gradient of u" if gate is None else ""
    if straight_through:
        gradient = "; straight-through gradient of u, over all keys of m > 0"
    return SparseKExplanation(
        problem=f"B={B} H={H} G={G} heads of u {U} {_sizes(Q, K, call.q_offset)} D={D} E={E} {dtype_of(q)} {q.device}",
        kept=f"the query, {call.window} keys {sides} it; of the others those of {largest}",
        gated=gated[gate] + gradient,
        implementation=f"{one.name}: {one.description}",
        reasons=reasons,
        thresholds=_thresholds(u, causal),
        pairs=min(K, _window_keys(call.window, causal) + how.room),
        lists_bytes=memory.lists,
        sums_bytes=memory.sums,
    )


def _sizes(Q: int, K: int, q_offset: int) -> str:
    return f"N={K}" if Q == K else f"Q={Q} K={K} q_offset={q_offset}"


def _window_keys(window: int, causal: bool) -> int:
    return 1 + window * (1 if causal else 2)


def _thresholds(u: Tensor, causal: bool) -> str:
    if not causal:
        return "one for all queries, from sorted breakpoints"
    if has_kernels(u):
        return "Triton kernels: a sort of each row, and a walk for each 128 steps"
    return "operations of torch: bisection of sorted breakpoints, all steps at once"
