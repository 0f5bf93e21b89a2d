"""`explain`: the plan of a call as a table, without running it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Implementation
from gossamer.kernels.launch import Direction, dtype_of
from gossamer.kernels.parts import PartitionedCall, Selection
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.patterns import Pattern
from gossamer.patterns.handles import pattern_of
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.plan.advice import Way, advice, all_pairs, executed_by_dense, is_causal, least, of_dense, shown, ways
from gossamer.plan.costs import costs_of
from gossamer.plan.plan import Plan, refusals
from gossamer.plan.problem import Problem
from gossamer.plan.table import NAMES, load
from gossamer.plan.tabular import aligned
from gossamer.torch.arguments import (
    BHND,
    AttentionOptions,
    Distance,
    Layout,
    Lengths,
    cast_type,
    describe,
    four_dimensional,
    is_bshd,
    is_handle,
)
from gossamer.torch.calls import read_q_offset, results_in_bshd
from gossamer.torch.decoding import for_one_query, seen_by_one_query
from gossamer.torch.mask_layouts import unpack
from gossamer.torch.paged import PagedCall, PagedLayout, heads_apart, paged_call
from gossamer.torch.paged_arguments import checked
from gossamer.torch.paged_kernel import is_by_table
from gossamer.torch.parts import TorchEdge
from gossamer.torch.planning import (
    check_distances,
    check_rows,
    check_sizes,
    data_layout,
    plan_for,
    problem_of,
    scoring_of,
    select_layout,
)
from gossamer.torch.reorder import check_order
from gossamer.torch.request import Request, request_of
from gossamer.torch.scale import with_number
from gossamer.torch.structure import PackedSequences, Structure

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SHOWN = 6  # estimates
BY_TABLE = "a kernel reads the table of pages, and computes what each token sees"
NOTHING = "nothing"  # what computes a call of tensors without elements
BACKWARD = 2.5  # floating-point operations of the backward, over those of the forward


@dataclass(frozen=True)
class Explanation:
    """What a call would do. Counts are over all batch elements and query heads, of one forward."""

    problem: Problem
    implementation: str
    backward: str | None  # the implementation of the backward; None without gradients
    reasons: dict[str, list[str]]  # of each implementation that is not chosen
    tile: tuple[int, int]  # (block_q, block_kv)
    density: float  # kept pairs over Q * K; key_lengths are not counted
    tiles: dict[str, float]  # full, interval and bits tiles, and all of the dense matrix, of one head
    useful_flops: float  # kept pairs * 2 * (D + E)
    executed_flops: float  # the same over every pair of the tiles that are visited
    bytes: int  # q, k, v, out and lse
    layout_bytes: int
    parts: tuple[str, ...] = ()  # the calls over strided views that compute it, when it is not computed as one
    estimates: tuple[float, float] | None = None  # seconds of the forward in parts, and as one call
    options: tuple[tuple[str, float], ...] = ()  # what each layout was counted to take, over the least, which is first
    seconds: float | None = None  # estimated of the forward, on the device; None where no rate was measured
    backward_seconds: float | None = None
    backward_bytes: int = 0  # dS of pairs of tiles that the backward keeps for dQ, at a time
    all_pairs: float | None = None  # estimated seconds of a forward that keeps every pair
    faster: tuple[str, ...] = ()  # what would make it so
    copies: dict[str, str] = field(default_factory=dict)  # inputs that are copied before a kernel reads them, and why
    measured: bool = False  # whether what work takes was measured on this kind of device, for this type
    dense: str = "Dense()"  # what the call is compared with: every pair, or every one of a causal call
    dense_pairs: float = 0.0  # pairs of one head that it would execute
    dense_seconds: float | None = None  # estimated of its forward
    structure: str | None = None  # what it is made from, where it is made on the device
    of_dense: float | None = None  # the counted work of the forward over that of dense attention

    @property
    def verdict(self) -> str:
        """What runs the call and what it takes, beside dense attention: a time where the device was measured."""
        p, about = self.problem, self.seconds
        if p.empty:
            sizes = f"B={p.B} H={p.H} Q={p.Q} K={p.K}"
            return f"This call computes nothing: there is no pair ({sizes}); out is 0, lse -inf or the sink."
        if about is None and self.measured and self.estimates is not None:
            about, _ = self.estimates
        text = f"This call runs on {self.implementation}"
        if about is not None and self.dense_seconds is not None:
            text += f", {'forward ' if self.backward else ''}in about {shown(about)}"
            if self.backward:
                later = "" if self.backward_seconds is None else f" in about {shown(self.backward_seconds)}"
                text += f", backward on {self.backward}{later}"
            of = " forward" if self.backward else ""
            return f"{text}; dense attention, {self.dense}, would take about {shown(self.dense_seconds)}{of}."
        if self.backward and self.backward != self.implementation:
            text += f", backward on {self.backward}"
        kept, executed = self.density * p.Q * p.K, self.executed_flops / (2 * (p.D + p.E) * p.B * p.H)
        text += f": it executes {executed:,.0f} of the {p.Q * p.K:,} pairs of a head, to keep {kept:,.0f}"
        text += f"; dense attention, {self.dense}, would execute {self.dense_pairs:,.0f}."
        if self.of_dense is not None:
            text += f" By counted work it takes about {self.of_dense:.2g} of the time of that."
        return text if self.measured else f"{text} Seconds were not measured for {p.dtype} on this {p.device}."

    @property
    def refused(self) -> list[str]:
        """Of each implementation that is not chosen, one reason; `reasons` has all."""
        return [
            f"not {name}: {first}" + (f" (and {len(rest)} more in `reasons`)" if rest else "")
            for name, (first, *rest) in self.reasons.items()
        ]

    def rows(self) -> list[tuple[str, str]]:
        """The table, as (name, value) pairs."""
        p, t = self.problem, self.tiles
        useful, executed = self.useful_flops, self.executed_flops
        pair = 2 * (p.D + p.E) * max(1, p.B * p.H)
        over = f", {executed / useful:.2f} for each kept one" if useful else ""
        block_q, block_kv = self.tile
        lines = [
            ("problem", f"B={p.B} H={p.H} G={p.G} Q={p.Q} K={p.K} D={p.D} E={p.E} {p.dtype} {p.device}"),
            ("score terms", ", ".join(sorted(p.score_terms)) or "none"),
            ("kept pairs", f"{useful / pair:,.0f} a head, a density of {self.density:.4%}"),
            ("executed pairs", f"{executed / pair:,.0f} a head{over}"),
            (f"tiles of {block_q} x {block_kv}", ", ".join(f"{name} {n:g}" for name, n in t.items()) or "none"),
            ("work of kept pairs", f"{useful / 1e9:,.3f} GFLOP forward, {BACKWARD * useful / 1e9:,.3f} backward"),
            ("work executed", f"{executed / 1e9:,.3f} GFLOP forward, {BACKWARD * executed / 1e9:,.3f} backward"),
            ("memory", f"{self.bytes / 2**20:,.2f} MiB of tensors, {self.layout_bytes / 2**20:,.2f} MiB of layout"),
            ("implementation", self.implementation),
        ]
        if self.structure is not None:
            lines.insert(2, ("structure", f"made on the device from {self.structure}; nothing is read back"))
        if p.H > p.Q and p.G > p.K:
            few = f"more heads (H={p.H}) than positions (Q={p.Q}): inputs of (B, N, H, D) are given with layout='bshd'"
            lines.insert(1, ("look again", few))
        lines += [("part", part) for part in self.parts]
        if self.estimates is not None:
            parts, whole = self.estimates
            if self.measured:
                lines.append(("estimated", f"{shown(parts)} in parts, {shown(whole)} as one call"))
            else:
                lines.append(("counted", f"in parts: 1.00, as one call: {whole / parts:.2f}"))
        lines += self._ways()
        if self.backward is not None:
            about = "" if self.backward_seconds is None else f", about {shown(self.backward_seconds)}"
            kept = f", keeps dS for dQ: {self.backward_bytes / 2**20:,.0f} MiB" if self.backward_bytes else ""
            lines.append(("backward by", self.backward + about + kept))
        lines += [("faster", text) for text in self.faster]
        return lines + [(f"copies {name}", why) for name, why in self.copies.items()]

    def _ways(self) -> list[tuple[str, str]]:
        """The estimates, the least first: seconds, or where no rate was measured how many times the least."""
        if self.seconds is None:
            if len(self.options) < 2:
                return []
            return [("counted", ", ".join(f"{name}: {cost:.2f}" for name, cost in self.options))]
        text = ", ".join(f"{shown(cost * self.seconds)} by {name}" for name, cost in self.options[:SHOWN])
        if len(self.options) == 1:
            text += " (its tiles are nearly full: nothing else was counted)"
        return [("estimated", text)]

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return Group(self.verdict, *self.refused, table)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.refused, "", aligned(self.rows())])

    __repr__ = __str__


def unaligned(x: Tensor, alignment: int) -> str | None:
    """Why x (B, heads, rows, columns) cannot be read where it is by a kernel that needs an alignment in bytes."""
    if x.stride(3) != 1:
        return "its last dimension is not contiguous"
    for name, stride in zip(("batch", "head", "row"), x.stride(), strict=False):
        if stride <= 0 or stride * x.element_size() % alignment:
            return f"its {name} stride is {stride * x.element_size()} bytes, not a multiple of {alignment}"
    return f"its address is not a multiple of {alignment}" if x.data_ptr() % alignment else None


class _Work(NamedTuple):
    """What one head of a call visits."""

    useful: float
    executed: float
    tiles: dict[str, float]
    tile: tuple[int, int]
    bytes: int


class _Computed(NamedTuple):
    implementation: Implementation
    layout: Any
    work: _Work
    problem: Problem

    @property
    def heads(self) -> int:
        """Times batch elements."""
        return self.problem.B * self.problem.H

    @property
    def kept_bytes(self) -> int:
        """What its backward keeps of dS."""
        found = getattr(self.implementation, "kept_bytes", None)
        return found(self.problem, self.layout) if found and isinstance(self.layout, BlockLayout) else 0


def _calls(plan: Plan, request: Request, backward: bool) -> list[_Computed]:
    """The calls that compute one direction of a request."""
    a, t, *_ = request
    scoring, device = scoring_of(a, a.k.shape[2]), a.q.device
    if t.data:
        selected = data_layout(plan, a.q, a.k, t.data, t.geometry, counted=a.counted, made=a.made).selected
        return [_computed(plan.problem, selected, None, scoring.q_offset)]
    pattern = pattern_of(t.handle)
    partition = plan.partition(t.handle, scoring.q_offset)
    if partition is None:
        selected = select_layout(plan, pattern, scoring.q_offset, device)
        return [_computed(plan.problem, selected, pattern, scoring.q_offset)]
    direction: Direction = "backward" if backward else "forward"
    operands = request.operands | (results_in_bshd(direction, request.operands) if a.bshd else {})
    partitioned = PartitionedCall(plan, TorchEdge(a.implementation, device), pattern, scoring, operands)
    calls = partitioned.calls(partitioned.fold(), direction)
    return [_computed(call.problem, call.selected, call.part.pattern, call.q_offset) for call in calls]


def _computed(p: Problem, selected: Selection, pattern: Pattern | None, q_offset: int) -> _Computed:
    """What one call visits; a pattern of None is data."""
    layout = selected.layout
    if isinstance(layout, BlockLayout):
        stats = (layout if layout.host is None else layout.host).stats
        tiles = {"full": stats.full_tiles, "interval": stats.interval_tiles, "bits": stats.bits_tiles}
        tile = (layout.block_q, layout.block_kv)
        work = _Work(stats.useful_pairs, stats.executed_pairs, tiles | {"of": stats.all_tiles}, tile, stats.bytes)
    elif isinstance(layout, GatherLayout):
        counts = (layout if layout.host is None else layout.host).stats
        gathered, tile = {"gathered columns": counts.gathered}, (layout.rows.block_rows, layout.rows.width)
        work = _Work(counts.useful_pairs, counts.executed_pairs, gathered, tile, counts.bytes)
    else:
        if pattern is not None:
            density = pattern.density(p.Q, p.K, q_offset)
        elif layout.dtype == torch.bool:
            density = int(layout.count_nonzero()) / layout.numel()
        else:  # a packed mask
            density = int(unpack(layout)[..., : p.K].count_nonzero()) / (layout.shape[:3].numel() * p.K)
        pairs, size = float(p.Q * p.K), 0 if layout is None else layout.nbytes
        work = _Work(density * pairs, pairs, {"dense": 1, "of": 1}, (p.Q, p.K), size)
    return _Computed(selected.implementation, layout, work, p)


def _names(computed: list[_Computed]) -> str:
    return ", ".join(dict.fromkeys(c.implementation.name for c in computed))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | PagedLayout | BlockMask | Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    key_starts: Lengths | None = None,
    key_lengths: Lengths | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_distance: Distance | None = None,
    return_lse: bool = False,
    merge: str | None = None,
    implementation: str | None = None,
    deterministic: bool | None = None,
    layout: Layout = BHND,
) -> Explanation:
    """What `attention` would do with these arguments, and why not otherwise; nothing is computed but the layout.

    Printed, it opens with a verdict: what runs the call, about how long that and dense attention take (where the device
    was measured; else how many pairs are executed, and how their counted work compares), and a reason for each other
    implementation.

    `return_lse` makes no difference. The terms that `merge="lse"` attends to are explained one by one.

    Raises:
        ValueError: as `attention`, or `merge` is given.

    Examples:
        >>> q = torch.randn(1, 2, 256, 16)
        >>> found = gs.explain(q, q, q, gs.SlidingWindow(31))
        >>> found.implementation, round(found.density, 4)
        ('blocked', 0.1174)
        >>> print(found.verdict)  # doctest: +ELLIPSIS
        This call runs on blocked: it executes 28,672 of the 65,536 pairs of a head, to keep 7,696; dense attention, ...
        >>> print(found.refused[-1])
        not reference: comes after the one chosen
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False; got {describe(return_lse)}")
    if merge is not None:
        raise ValueError(f"merge must be None: each term of {describe(pattern)} is a call, to be explained alone")
    if is_handle(pattern):
        pattern = pattern_of(pattern)
    given = q
    if isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    scaled = {"q": "scale, a tensor, is multiplied into it"} if q is not given else {}
    options = AttentionOptions(
        scale, q_offset, key_starts, key_lengths, softcap, sink_logits, alibi_slopes, alibi_distance, implementation,
        deterministic, layout,
    )  # fmt: skip
    if isinstance(pattern, (PackedSequences, PagedLayout)) and pattern.pages is not None:
        if isinstance(pattern, PackedSequences):
            checked(q, k, v, pattern.pages, options)
            if pattern.pages.by_head:  # alike but in the pages
                (q, k, v, pattern, options), *_ = heads_apart(q, k, v, pattern, options)
            if is_by_table(q, k, v, pattern, options):
                return _of_table(q, k, v, pattern, options)
        return _of_pages(paged_call(q, k, v, pattern, options), options)
    if isinstance(q_offset, Tensor) or key_starts is not None:
        bshd = is_bshd(layout)
        seen = seen_by_one_query(q, k, v, pattern, options, bshd)
        if isinstance(seen, Tensor):
            pattern, options = None, options._replace(q_offset=None, key_lengths=seen)
        elif seen is not None and seen.problem(*four_dimensional(q, k, v, bshd)) is not None:
            by_triton = options._replace(implementation="triton")
            return _of_seen_keys(explain(q, k, v, pattern, **by_triton._asdict()), scaled)
    reordered = pattern if isinstance(pattern, ReorderedCSR) else None
    request = request_of(q, k, v, pattern if reordered is None else reordered.inner, options)
    if reordered is not None:
        check_order(reordered, request.arguments.q, request.arguments.k, request.arguments.key_lengths, alibi_slopes)
    request, cast = _after_autocast(request)
    again = planned_again(request, reordered is not None)
    again += ["autocast casts the inputs"] * bool(cast)
    usual = plan_for(request.arguments, request.attended.geometry)
    request = read_q_offset(request)
    a, attended, *_ = request
    q, k, v, backward = a.q, a.k, a.v, a.backward
    plan = usual if again or a.dims != 4 else for_one_query(usual, a, attended.alive)
    scoring, p = scoring_of(a, a.k.shape[2]), plan.problem
    actual = problem_of(a, attended.geometry)
    made_from = None if attended.made_from is None else attended.made_from()
    check_rows(actual, scoring, attended.handle)
    check_distances(a, scoring, attended.handle)
    check_sizes(a, attended.handle)
    if actual.empty:
        return _of_nothing(actual, plan, _tensor_bytes(q, k, v), made_from)
    whole = None if attended.data else pattern_of(attended.handle)
    partition = None if whole is None else plan.partition(attended.handle, scoring.q_offset)
    which = whole if partition is None else None
    computed = _calls(plan, request, backward=False)
    gradient, later, kept_bytes = None, None, 0
    if backward:
        later = usual.gradient
        of_backward = _calls(later, request, backward=True)
        gradient, kept_bytes = _names(of_backward), max(c.kept_bytes for c in of_backward)
    useful, executed, tiles = _of_one_head(computed, p)
    flops = 2.0 * (p.D + p.E) * p.B * p.H
    counts: tuple[Way, ...] = () if which is None else ways(plan, which, scoring.q_offset)
    later_counts = () if which is None or later is None else ways(later, which, scoring.q_offset)
    counted = partition.cost if partition is not None else counts[0].seconds if counts else None
    fill = executed / useful if useful else 1.0
    causal = False if whole is None or reordered is not None else is_causal(whole, p.Q, p.K, scoring.q_offset)
    return Explanation(
        problem=replace(p, backward=backward),
        implementation=_names(computed),
        backward=gradient,
        reasons=_refused(computed, p, implementation, grows=plan is not usual),
        tile=computed[0].work.tile,
        density=useful / (p.Q * p.K),
        tiles=tiles,
        useful_flops=useful * flops,
        executed_flops=executed * flops,
        bytes=_tensor_bytes(q, k, v),
        layout_bytes=sum({id(c.layout): c.work.bytes for c in computed}.values()),
        parts=() if partition is None else tuple(str(part) for part in partition.parts),
        estimates=None if partition is None else (partition.cost, partition.whole),
        options=tuple((way.name, way.seconds / counts[0].seconds) for way in counts),
        seconds=least(plan, counts),
        backward_seconds=None if later is None else least(later, later_counts),
        backward_bytes=kept_bytes,
        all_pairs=None if which is None else all_pairs(plan),
        faster=advice(plan, which, scoring.q_offset, fill, again, reordered=reordered is not None),
        copies=scaled | cast | _copies(computed[0].implementation, {"q": q, "k": k, "v": v}),
        measured=costs_of(p).measured,
        dense="Causal()" if causal else "Dense()",
        dense_pairs=executed_by_dense(plan, causal, scoring.q_offset),
        dense_seconds=all_pairs(plan, causal, scoring.q_offset),
        structure=made_from,
        of_dense=of_dense(plan, counted, causal, scoring.q_offset),
    )


def _of_nothing(p: Problem, plan: Plan, size: int, structure: str | None) -> Explanation:
    """What a call of tensors without elements does."""
    return Explanation(
        problem=p, implementation=NOTHING, backward=NOTHING if p.backward else None,
        reasons={name: refusals(name, plan.problem) or ["there is nothing to compute"] for name in NAMES},
        tile=(0, 0), density=0.0, tiles={}, useful_flops=0.0, executed_flops=0.0, bytes=size, layout_bytes=0,
        structure=structure,
    )  # fmt: skip


def _of_pages(paged: PagedCall, options: AttentionOptions) -> Explanation:
    """What a call over pages does: that of its calls which executes most, whose queries are rows of tiles."""
    rest = options._replace(sink_logits=None, layout=BHND)._asdict()
    found = [explain(r.arguments.q, r.arguments.k, r.arguments.v, r.attended.alive, **rest) for r in paged.requests]
    if not found:
        q, k, v = paged.given
        nothing = (x.flatten(0, 1).narrow(0, 0, 0).transpose(0, 1)[None] for x in (k, v))
        found = [explain(q.transpose(0, 1)[None], *nothing, **rest)]
    most = max(found, key=lambda x: x.executed_flops)
    calls = [f"{x.implementation} over {x.problem.K:,} keys, {x.executed_flops / 1e9:,.3f} GFLOP" for x in found]
    return replace(most, structure=paged.layout.source, parts=tuple(calls) if len(calls) > 1 else ())


def _of_table(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, options: AttentionOptions
) -> Explanation:  # fmt: skip
    """What a call over pages does whose kernel reads the table, by what it would do over structure."""
    over, pages = copy(packed), copy(packed.pages)
    assert pages is not None
    pages.batch_invariant, over.pages = False, pages  # which the kernel alone is
    made = _of_pages(paged_call(q, k, v, over, options._replace(implementation="triton")), options)
    no = ["reads no table of pages"]
    return replace(
        made, implementation="triton", structure=f"{packed!r}: {BY_TABLE}", layout_bytes=0, parts=(), faster=(),
        reasons={name: refusals(name, made.problem) or no for name in NAMES if name != "triton"},
    )  # fmt: skip


def _of_seen_keys(structured: Explanation, copies: dict[str, str]) -> Explanation:
    """What a call of one query does whose keys have a first one, by what it would do over structure.

    Args:
        copies: made before it.
    """
    p, no = structured.problem, ["reads no first key of each sequence"]
    return replace(
        structured, structure=None, layout_bytes=0, tile=(1, 1), executed_flops=structured.useful_flops, faster=(),
        tiles={"full": structured.density * p.K, "interval": 0.0, "bits": 0.0, "of": float(p.K)},
        reasons={name: refusals(name, p) or no for name in structured.reasons}, copies=copies | structured.copies,
    )  # fmt: skip


def _of_one_head(computed: list[_Computed], p: Problem) -> tuple[float, float, dict[str, float]]:
    """(useful pairs, executed pairs, tiles by kind) of one head of a call, whatever heads its views have."""
    useful = executed = 0.0
    tiles: dict[str, float] = {}
    for c in computed:
        share = c.heads / (p.B * p.H)
        useful += share * c.work.useful
        executed += share * c.work.executed
        for kind, count in c.work.tiles.items():
            tiles[kind] = tiles.get(kind, 0) + share * count
    return useful, executed, tiles


def _refused(computed: list[_Computed], p: Problem, asked_for: str | None, grows: bool) -> dict[str, list[str]]:
    """Why each of the other implementations is not taken; `grows`: one that takes any number of keys comes first."""
    named = {c.implementation.name for c in computed}
    first = min(NAMES.index(name) for name in named)
    found = {}
    for at, other in enumerate(NAMES):
        candidate = load(other)
        walks = not isinstance(candidate, str) and candidate.layout == "block"
        unused = "its tiles would execute more pairs" if walks and at < first else "comes after the one chosen"
        if at < first and grows:
            unused = "plans one query again for each number of keys"
        if other not in named:
            found[other] = refusals(other, p) or [unused if asked_for is None else "not asked for"]
    return found


class _Cast(NamedTuple):
    request: Request
    copies: dict[str, str]  # of the inputs that are cast: to what


def _after_autocast(request: Request) -> _Cast:
    """The request as the operator sees it under autocast, where inputs may have several types; nothing is cast."""
    a = request.arguments
    inputs, copies = {"q": a.q, "k": a.k, "v": a.v}, {}
    for name, x in inputs.items():
        dtype = cast_type(x)
        if dtype not in (None, x.dtype):
            inputs[name] = torch.empty_like(x, dtype=dtype)
            copies[name] = f"autocast casts it from {dtype_of(x)} to {dtype_of(inputs[name])}"
    q, k, v = inputs.values()
    return _Cast(request._replace(arguments=a._replace(q=q, k=k, v=v)), copies)


def _copies(implementation: Implementation, inputs: dict[str, Tensor]) -> dict[str, str]:
    """The inputs that are copied before a kernel reads them, and why; views keep the alignment of what they show."""
    alignment = implementation.capability.alignment
    if alignment is None:
        return {}
    found = {name: unaligned(x, alignment) for name, x in inputs.items()}
    return {name: why for name, why in found.items() if why is not None}


def _tensor_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of q, k, v, out and lse."""
    rows = q.shape[:3].numel()
    elements = q.numel() + k.numel() + v.numel() + rows * v.shape[3]
    return elements * q.element_size() + rows * (8 if q.dtype == torch.float64 else 4)


def planned_again(request: Request, reordered: bool) -> list[str]:
    """Why repetitions of a call are looked at from the beginning on the host."""
    found = []
    if request.attended.made_from:
        found.append("the structure is made on the device")
    elif request.attended.data:
        found.append("pattern is a tensor or a BlockLayout, which may have been written to")
    if reordered:
        found.append("the rows of a reordered graph are permuted")
    if request.arguments.q_offset_tensor is not None:
        found.append("q_offset is a tensor")
    return found
