"""`explain_entmax`: the way a call is computed, its passes over the scores, and the sizes of its supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.entmax.api import Save, Way
from gossamer.entmax.arguments import given
from gossamer.entmax.calls import MEAN_LISTED, EntmaxCall
from gossamer.entmax.launches import Launch, described, tensors_of
from gossamer.entmax.options import Options
from gossamer.entmax.ways import reasons
from gossamer.kernels.launch import dtype_of
from gossamer.layouts import BlockLayout
from gossamer.patterns import Pattern
from gossamer.plan.tabular import aligned
from gossamer.torch.arguments import describe
from gossamer.torch.structure import Structure

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


NOT_CHECKED = 'by default for a number as alpha, in 16 bits, on sm_90; implementation="kernels" asks for them'


@dataclass(frozen=True)
class EntmaxExplanation:
    """The way a call of `entmax_attention` is computed, as a table."""

    problem: str
    weights: str  # the function of the scores
    implementation: str
    reasons: list[str]  # why kernels do not take it
    forward: str  # passes over the scores
    backward: str
    mean_support: float  # keys with a weight, of a row
    largest_support: int
    certified: float  # the part of the rows whose weights are the entmax of all of their keys
    unlisted: int  # rows whose supports are longer than a list; kernels have no list for some shorter ones either
    saved_bytes: int  # for the backward, beside the inputs

    def rows(self) -> list[tuple[str, str]]:
        """The table, as (name, value) pairs."""
        lines = [
            ("problem", self.problem),
            ("weights", self.weights),
            ("supports", f"{self.mean_support:,.1f} keys a row, at most {self.largest_support:,}"),
            ("certified", f"{self.certified:.2%} of the rows"),
            ("implementation", self.implementation),
            ("forward", self.forward + (f"; {self.unlisted:,} rows or more have no list" if self.unlisted else "")),
            ("backward", self.backward),
            ("saved", f"{self.saved_bytes / 2**20:,.1f} MiB"),
        ]
        return lines + [("not kernels", "; ".join(self.reasons))] * bool(self.reasons)

    def __str__(self) -> str:
        """The table."""
        return aligned(self.rows())


def explain_entmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None,
    *,
    alpha: float | Tensor = 1.5,
    top_k: int | None = None,
    causal: bool = False,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | Tensor | None = None,
    save: Save = "lists",
    implementation: Way | None = None,
) -> EntmaxExplanation:
    """The way a call of `entmax_attention` is computed, and the sizes of its supports, for which the call runs once.

    Args:
        q: and all others as for `entmax_attention`.

    Returns:
        An explanation, which prints as a table.

    Raises:
        ValueError: as `entmax_attention` does.

    Examples:
        >>> q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
        >>> found = gs.explain_entmax(q, k, v, alpha=1.5, top_k=8, causal=True)
        >>> found.largest_support <= 8, found.implementation
        (True, 'operations of torch, in chunks of rows')
        >>> found.reasons
        ['tensors are on cpu, the kernels run on cuda']
    """
    call = given(
        "explain_entmax", q, k, v, pattern, alpha, top_k, causal, q_positions, k_positions, scale, implementation
    )
    if call.q.is_meta:
        raise ValueError(f"q must hold numbers, of which the supports are; got {describe(call.q)}")
    x, alphas = (call.q, call.k, call.v), None if call.number is not None else call.alpha
    with torch.no_grad():
        run = EntmaxCall(call, None, False, True)
        _, told = run.forward(*x, alphas, *call.options.tensors).results
    assert told is not None
    taken, support = run.kernels, told.support.long()
    (B, H, Q, D), (_, G, K, _), E = call.q.shape, call.k.shape, call.v.shape[3]
    rows, pairs = B * H * Q, int(support.sum())
    unlisted = 0
    forward, backward = "one pass over the scores", "none where supports are saved, else one"
    saved = rows * told.normaliser.element_size()
    if taken:
        from gossamer.entmax.launch.selection import Triton, sample_stride, support_kernel

        launch = Launch("out", run.same, run.scale, run.options)
        kernel_arguments = described(launch, tensors_of(*x, alphas, call.options), call.q.device)
        way = support_kernel(kernel_arguments, only_keys=False)
        if top_k is None:
            unlisted = int((support > kernel_arguments.listed).sum())
        stride = sample_stride(kernel_arguments)
        forward = (
            "Triton kernels, two passes over the scores" if isinstance(way, Triton)
            else "a Hopper kernel, two passes over the scores" if stride == 1
            else f"a Hopper kernel, one pass over the scores after one over 1/{stride} of them"
        )  # fmt: skip
        if save == "lists":
            saved += rows * (8 * kernel_arguments.listed + 4)
    elif save == "lists" and pairs <= MEAN_LISTED * rows:
        saved = pairs * (4 + told.normaliser.element_size()) + 8 * (rows + 1)
    return EntmaxExplanation(
        problem=f"B={B} H={H} G={G} Q={Q} K={K} D={D} E={E} {dtype_of(call.q)} {call.q.device}",
        weights=_weights(call.number, call.options),
        implementation="kernels" if taken else "operations of torch, in chunks of rows",
        reasons=[] if taken else reasons(call.q, call.k, call.v, call.options) or [NOT_CHECKED],
        forward=forward,
        backward=backward,
        mean_support=pairs / max(rows, 1),
        largest_support=int(support.max()) if rows else 0,
        certified=float(told.certified.double().mean()) if rows else 1.0,
        unlisted=unlisted,
        saved_bytes=saved,
    )


def _weights(number: float | None, options: Options) -> str:
    alpha = "of each head's own alpha" if number is None else f"of alpha {number:g}"
    return f"entmax {alpha}, of " + ("all keys" if options.top_k is None else f"the {options.top_k} largest scores")
