"""`explain`: the plan of a call as a table, without running it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.contract import Implementation, Terms
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.patterns import Pattern
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.plan.advice import advice, all_pairs, pairs_per_second, shown, ways
from gossamer.plan.plan import Plan, refusals
from gossamer.plan.problem import Problem
from gossamer.plan.split import Split
from gossamer.plan.table import NAMES
from gossamer.torch.api import check_types, is_deterministic, number, slopes, what, wide
from gossamer.torch.decoding import for_one_query
from gossamer.torch.parts import calls, folded, split_for
from gossamer.torch.plan import check_rows, make_plan, placed, processors_of, terms_of
from gossamer.torch.registry import pattern_of
from gossamer.torch.reorder import check_order
from gossamer.torch.validate import Arguments, describe, four_dimensional

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SHOWN = 6  # estimates
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
    all_pairs: float | None = None  # estimated seconds of a forward that keeps every pair
    faster: tuple[str, ...] = ()  # what would make it so
    copies: dict[str, str] = field(default_factory=dict)  # inputs that are copied before a kernel reads them, and why

    def rows(self) -> list[tuple[str, str]]:
        """The table, as (name, value) pairs."""
        p, t = self.problem, self.tiles
        useful, executed = self.useful_flops, self.executed_flops
        over = f" ({executed / useful:.2f} x)" if useful else ""
        lines = [
            ("problem", f"B={p.B} H={p.H} G={p.G} Q={p.Q} K={p.K} D={p.D} E={p.E} {p.dtype} {p.device}"),
            ("score terms", ", ".join(sorted(p.score_terms)) or "none"),
            ("density", f"{self.density:.4%}"),
            (f"tiles of {self.tile[0]} x {self.tile[1]}", ", ".join(f"{name} {n:g}" for name, n in t.items())),
            ("useful", f"{useful / 1e9:,.3f} GFLOP forward, {BACKWARD * useful / 1e9:,.3f} backward"),
            ("executed", f"{executed / 1e9:,.3f} GFLOP forward{over}"),
            ("bytes", f"{self.bytes / 2**20:,.2f} MiB of tensors, {self.layout_bytes / 2**20:,.2f} MiB of layout"),
            ("implementation", self.implementation),
        ]
        lines += [("part", part) for part in self.parts]
        if self.estimates is not None:
            lines.append(
                ("estimated", "{:.3g} ms in parts, {:.3g} ms as one call".format(*(1e3 * x for x in self.estimates)))
            )
        lines += self._ways()
        if self.backward is not None:
            about = "" if self.backward_seconds is None else f", about {shown(self.backward_seconds)}"
            lines.append(("backward by", self.backward + about))
        lines += [("faster", text) for text in self.faster]
        lines += [(f"copies {name}", why) for name, why in self.copies.items()]
        return lines + [(f"not {name}", "; ".join(found)) for name, found in self.reasons.items()]

    def _ways(self) -> list[tuple[str, str]]:
        """The estimates, the least first: seconds, or where no rate was measured how many times the least."""
        if self.seconds is None:
            if len(self.options) < 2:
                return []
            return [("counted", ", ".join(f"{name}: {cost:.2f}" for name, cost in self.options))]
        text = ", ".join(f"{shown(cost * self.seconds)} by {name}" for name, cost in self.options[:SHOWN])
        if len(self.options) == 1:
            text += " (its tiles are nearly full: nothing else was counted)"
        every = [] if self.all_pairs is None else [("of all pairs", f"{shown(self.all_pairs)} (as with Dense())")]
        return [("estimated", text), *every]

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title="gossamer.explain", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

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
    heads: int  # times batch elements


def _calls(
    plan: Plan, split: Split | None, a: Arguments, terms: Terms, handle: int, tensors: list[Tensor],
    geometry: list[int], backward: bool,
) -> tuple[list[_Computed], tuple[str, ...]]:  # fmt: skip
    """The calls that compute a call, and what its parts are called."""
    if split is None:
        implementation, layout = placed(plan, a, terms, handle, tensors, geometry)
        work = _work(plan.problem, layout, handle, terms.q_offset, tensors, geometry)
        return [_Computed(implementation, layout, work, plan.problem.B * plan.problem.H)], ()
    split, a = folded(split, a, plan, terms, handle)
    found = []
    for call in calls(split, a, terms.q_offset, backward):
        p, inner = call.plan.problem, call.part.pattern.handle
        work = _work(p, call.where, inner, call.terms.q_offset, [], [])
        found.append(_Computed(call.implementation, call.where, work, p.B * p.H))
    return found, tuple(str(part) for part in split.parts)


def _work(p: Problem, layout: Any, handle: int, q_offset: int, tensors: list[Tensor], geometry: list[int]) -> _Work:
    if isinstance(layout, BlockLayout):
        stats = (layout if layout.host is None else layout.host).stats
        tiles = {"full": stats.full_tiles, "interval": stats.interval_tiles, "bits": stats.bits_tiles}
        tile = (layout.block_q, layout.block_kv)
        return _Work(stats.useful_pairs, stats.executed_pairs, tiles | {"of": stats.all_tiles}, tile, stats.bytes)
    if isinstance(layout, GatherLayout):
        counts = (layout if layout.host is None else layout.host).stats
        gathered, tile = {"gathered columns": counts.gathered}, (layout.rows.block_rows, layout.rows.width)
        return _Work(counts.useful_pairs, counts.executed_pairs, gathered, tile, counts.bytes)
    if handle >= 0:
        density = pattern_of(handle).density(p.Q, p.K, q_offset)
    else:  # a mask, or a layout that was made dense
        mask = layout if geometry else tensors[0]
        density = int(mask.count_nonzero()) / mask.numel()
    pairs = float(p.Q * p.K)
    return _Work(density * pairs, pairs, {"dense": 1, "of": 1}, (p.Q, p.K), 0 if layout is None else layout.nbytes)


def _names(computed: list[_Computed]) -> str:
    return ", ".join(dict.fromkeys(c.implementation.name for c in computed))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | int | BlockLayout | BlockMask | Tensor | None = None,
    *,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    merge: str | None = None,
    implementation: str | None = None,
    deterministic: bool | None = None,
) -> Explanation:
    """What `attention` would do with these arguments, and why not otherwise; nothing is computed but the layout.

    `return_lse` makes no difference. The terms that `merge="lse"` attends to are explained one by one.

    Raises:
        ValueError: as `attention`, or `merge` is given.
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False; got {describe(return_lse)}")
    if merge is not None:
        raise ValueError(f"merge must be None: each term of {describe(pattern)} is a call, to be explained alone")
    scale, q_offset, softcap = number(scale), number(q_offset), number(softcap)
    sink_logits, alibi_slopes = wide(sink_logits, q), slopes(alibi_slopes, q)
    check_types(q, k, v, scale, q_offset, key_lengths, softcap, sink_logits, alibi_slopes, implementation)
    if type(pattern) is int:
        pattern = pattern_of(pattern)
    inputs, given = (q, k, v, sink_logits), (q, k, v, pattern)
    backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    q, k, v = four_dimensional(q, k, v)
    reordered = isinstance(pattern, ReorderedCSR)
    if isinstance(pattern, ReorderedCSR):
        check_order(pattern, q, k, key_lengths, alibi_slopes)
        pattern = pattern.inner
    handle, tensors, geometry, _alive = what(pattern, q)
    offset, offset_tensor = (None, q_offset) if isinstance(q_offset, Tensor) else (q_offset, None)
    a = Arguments(
        q, k, v, offset, offset_tensor, key_lengths, sink_logits,
        alibi_slopes, scale, softcap, implementation,
        is_deterministic(deterministic), backward,
    )  # fmt: skip
    options = scale, q_offset, softcap, implementation, a.deterministic
    usual = make_plan(a, geometry, backward=False)
    plan = for_one_query(usual, *given, options, (key_lengths, sink_logits, alibi_slopes))
    terms = terms_of(a)
    p = plan.problem
    check_rows(p, terms, handle)
    split, where = split_for(plan, terms, handle), (handle, tensors, geometry)
    computed, parts = _calls(plan, split, a, terms, *where, backward=False)
    gradient = later = None
    if backward:
        later = make_plan(a, geometry, backward=True)
        gradient = _names(_calls(later, split_for(later, terms, handle), a, terms, *where, backward=True)[0])
    useful, executed, tiles = _of_one_head(computed, p)
    flops = 2.0 * (p.D + p.E) * p.B * p.H
    which = None if handle < 0 or split is not None else pattern_of(handle)
    multiprocessors = processors_of(p, q.device)
    counts = () if which is None else ways(plan, which, terms.q_offset, multiprocessors)
    later_counts = () if which is None or later is None else ways(later, which, terms.q_offset, multiprocessors)
    fill = executed / useful if useful else 1.0
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
        parts=parts,
        estimates=None if split is None else (split.cost, split.whole),
        options=tuple((way, cost / counts[0][1]) for way, cost in counts),
        seconds=_seconds(plan, counts),
        backward_seconds=None if later is None else _seconds(later, later_counts),
        all_pairs=None if which is None else all_pairs(plan, multiprocessors),
        faster=advice(
            plan, which, terms.q_offset, multiprocessors, fill, planned_again(a, handle, reordered), reordered=reordered
        ),
        copies=_copies(computed[0].implementation, {"q": q, "k": k, "v": v}),
    )


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
        unused = "comes after the one chosen" if at > first else "its tiles hold more pairs of this pattern"
        if at < first and grows:
            unused = "plans one query again for each number of keys"
        if other not in named:
            found[other] = refusals(other, p) or [unused if asked_for is None else "not asked for"]
    return found


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


def _seconds(plan: Plan, counts: tuple[tuple[str, float], ...]) -> float | None:
    """Of the least of the ways that were counted."""
    rate = pairs_per_second(plan.problem)
    return counts[0][1] / rate if counts and rate is not None else None


def planned_again(a: Arguments, handle: int, reordered: bool) -> list[str]:
    """Why repetitions of a call are looked at from the beginning on the host: see `torch.calls`."""
    found = []
    if handle < 0:
        found.append("pattern is a tensor or a BlockLayout, which may have been written to")
    if reordered:
        found.append("the rows of a reordered graph are permuted")
    if a.q_offset_tensor is not None:
        found.append("q_offset is a tensor")
    return found
