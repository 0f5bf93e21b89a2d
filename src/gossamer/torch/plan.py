"""From the arguments of a call to a plan: what is computed, by which implementation, and why not by the others.

Plans are kept by a cheap key, so that a repeated call validates nothing and chooses nothing.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.kernels.contract import Implementation, Terms
from gossamer.kernels.devices import processors
from gossamer.layouts import BlockLayout, cached_gather, cached_layout
from gossamer.layouts.cache import bytes_of
from gossamer.layouts.kept import KEPT_BYTES, LEAST_KEPT, MOST_KEPT, Kept
from gossamer.patterns import Dense, Pattern
from gossamer.patterns.validate import show
from gossamer.plan.choice import choose
from gossamer.plan.plan import Plan, plan_of
from gossamer.plan.problem import Problem
from gossamer.torch.masks import dense_of, layout_of, words_of
from gossamer.torch.registry import pattern_of
from gossamer.torch.validate import (
    Arguments,
    check_layout,
    check_mask,
    layout_from,
    most_offset,
    validate,
    within_positions,
)

logger = logging.getLogger("gossamer")

KEPT_DENSE = 4


_plans: Kept[Plan] = Kept(LEAST_KEPT, MOST_KEPT)
_dense: Kept[Tensor] = Kept(KEPT_DENSE)
_words: Kept[tuple[Tensor | None]] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)
# By the id of a plan, which is held with what it places.
_placed: Kept[tuple[Plan, Implementation, Any]] = Kept(LEAST_KEPT, MOST_KEPT, KEPT_BYTES)
_given: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_logged: set[tuple[Any, ...]] = set()
_in_graphs: dict[int, Any] = {}


def hold_for_graphs(what: Any) -> None:
    """Keep for good what a captured graph reads: it is replayed long after the call, which may be forgotten."""
    _in_graphs[id(what)] = what


def plan_for(a: Arguments, geometry: list[int]) -> Plan:
    """The plan of a call's forward, with that of its backward.

    Validated and chosen once for each combination of shapes, types and options.
    """
    q, k, v, t, n, s, w = a.q, a.k, a.v, a.q_offset_tensor, a.key_lengths, a.sink_logits, a.alibi_slopes
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, a[8:], a.q_offset,
        None if t is None else (t.shape, t.dtype),
        None if n is None else (n.shape, n.dtype, n.device),
        None if s is None else (s.shape, s.dtype, s.device),
        None if w is None else (w.shape, w.dtype, w.device, w.requires_grad),
        tuple(geometry),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.put(key, make_plan(a, geometry, backward=False))
    return plan


def make_plan(a: Arguments, geometry: list[int], backward: bool) -> Plan:
    """Validate and choose: see `plan.plan.plan_of`.

    Args:
        geometry: of a BlockLayout that the user made, else empty: see `placed`.
        backward: the plan is that of the backward.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: nothing, or not the one named, computes the problem; the message has every reason.
    """
    validate(a)
    return plan_of(problem_of(a, geometry), a.implementation, backward)


def problem_of(a: Arguments, geometry: list[int]) -> Problem:
    """The static facts of a call."""
    q, k = a.q, a.k
    terms = {name for name in ("key_lengths", "softcap", "sink_logits", "alibi_slopes") if getattr(a, name) is not None}
    if a.q_offset_tensor is not None or a.q_offset not in (None, k.shape[2] - q.shape[2]):
        terms.add("q_offset")
    sm = None
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        sm = 10 * major + minor
    return Problem(
        B=q.shape[0], H=q.shape[1], G=k.shape[1], Q=q.shape[2], K=k.shape[2], D=q.shape[3], E=a.v.shape[3],
        dtype=str(q.dtype)[6:], device=q.device.type, sm=sm, score_terms=frozenset(terms),
        backward=a.backward, deterministic=a.deterministic, tile=(geometry[0], geometry[1]) if geometry else None,
        softcap=a.softcap,
    )  # fmt: skip


def terms_of(a: Arguments) -> Terms:
    """The score terms; a `q_offset` tensor is read here, which waits for a GPU."""
    Q, K, q_offset = a.q.shape[2], a.k.shape[2], a.q_offset
    if a.q_offset_tensor is not None:
        q_offset = int(a.q_offset_tensor)
        if abs(q_offset) > most_offset(Q, K):
            raise ValueError(f"q_offset must {within_positions(Q, K)}; got a tensor of {q_offset}")
    if q_offset is None:
        q_offset = K - Q
    terms = _numbers(a.q.shape[3], a.scale, q_offset, a.softcap)
    if a.key_lengths is None and a.sink_logits is None and a.alibi_slopes is None:
        return terms
    vectors = (a.key_lengths, a.sink_logits, a.alibi_slopes)
    return terms.having(*(None if x is None else x.contiguous() for x in vectors))  # kernels read them one by one


@lru_cache(MOST_KEPT)
def _numbers(D: int, scale: float | None, q_offset: int, softcap: float | None) -> Terms:
    return Terms(
        scale=D**-0.5 if scale is None else float(scale),
        q_offset=q_offset,
        softcap=None if softcap is None else float(softcap),
    )


def check_rows(problem: Problem, terms: Terms, pattern: int) -> None:
    """Raise ValueError for a `q_offset` that nothing would read: rows of a mask, a layout or a matrix have no position.

    Args:
        pattern: a handle, or -1 for a mask or a layout.
    """
    p = problem
    if terms.q_offset == p.K - p.Q or terms.alibi_slopes is not None:
        return
    if pattern >= 0 and pattern_of(pattern).reads_positions:
        return
    which = show(pattern_of(pattern)) if pattern >= 0 else "a mask, BlockMask or BlockLayout"
    raise ValueError(
        f"q_offset must be left out with {which}, whose rows are counted from 0, not by their positions; "
        f"got {terms.q_offset}"
    )


def placed(
    plan: Plan, a: Arguments, terms: Terms, pattern: int, given: list[Tensor], geometry: list[int]
) -> tuple[Implementation, Any]:
    """The implementation that computes a call, and what it reads: a layout, a dense boolean tensor, or words.

    It is the first of the plan; for a pattern that leaves most of its tiles empty, the one whose tile, or gather
    layout, takes the least time by counted work.

    Args:
        pattern: a handle, or -1 when `given` says what is attended.
        given: the tensors of a BlockLayout, or one dense boolean mask.
        geometry: (block_q, block_kv, Q, K) of a BlockLayout; empty for a mask.
    """
    p, first = plan.problem, cast(Implementation, plan.implementations[0])
    if pattern < 0:
        layout = _given_layout(p, first, a, given, geometry)
        _log(first.name, plan)
        return first, layout
    key = (id(plan), pattern, terms.q_offset)
    kept = _placed.get(key)
    if kept is None:
        kept = plan, *_placed_pattern(plan, a, terms, pattern)
        if kept[1].layout != "dense":  # these are large, and few are kept
            kept = _placed.put(key, kept, held(kept[2]))
    if p.device == "cuda" and is_current_stream_capturing():
        hold_for_graphs(kept)
    return kept[1:]


def held(where: Any) -> int:
    """About the bytes of what `placed` says that a call reads."""
    if where is None:
        return 0
    return where.nbytes if isinstance(where, Tensor) else bytes_of(where)


def _placed_pattern(plan: Plan, a: Arguments, terms: Terms, pattern: int) -> tuple[Implementation, Any]:
    p, which, device, q_offset = plan.problem, pattern_of(pattern), a.q.device, terms.q_offset
    which.check(p.Q, p.K, p.H, p.B)
    chosen = choose(plan, which, q_offset, processors_of(p, device))
    where: Any
    if chosen.form == "dense":
        where = _dense_pattern(which, p, q_offset, device)
    elif chosen.form == "words":
        where = _words_pattern(which, p, q_offset, device)
    elif chosen.form == "gather":
        where = cached_gather(which, p.Q, p.K, block_q=chosen.block_q, q_offset=q_offset, device=device)
    else:
        where = cached_layout(
            which, p.Q, p.K, block_q=chosen.block_q, block_kv=chosen.block_kv, q_offset=q_offset, device=device
        )
    _log(chosen.implementation.name, plan)
    return cast(Implementation, chosen.implementation), where


def processors_of(problem: Problem, device: torch.device) -> int:
    """The multiprocessors of a GPU; 0 on a CPU, where the longest row is not looked at."""
    return processors(device) if problem.device == "cuda" else 0


def _given_layout(
    p: Problem, implementation: Implementation, a: Arguments, given: list[Tensor], geometry: list[int]
) -> Any:
    """What an implementation reads when tensors say what is attended."""
    dense = implementation.layout == "dense"
    block_q, block_kv = implementation.tile(p)
    if not geometry:
        mask = given[0]
        check_mask(mask, a)
        # A graph reads the mask again in every replay.
        keep = _anew if p.device == "cuda" and is_current_stream_capturing() else _remember
        if dense:
            return mask
        if implementation.layout == "words":
            return keep([mask], (p.Q, p.K, "words"), lambda: words_of(mask, p.Q, p.K))
        # The blocked implementation walks rows alone; building columns on a CPU would be for nothing.
        columns = p.backward and p.device != "cpu"
        make = (p.Q, p.K, block_q, block_kv, columns)
        return keep(
            [mask], make, lambda: layout_of(mask, p.Q, p.K, block_q=block_q, block_kv=block_kv, transpose=columns)
        )

    def checked() -> BlockLayout:
        # Aliases: what is remembered under a tensor must not keep that tensor alive.
        layout = layout_from([x.detach() for x in given], geometry)
        check_layout(layout.rows, a)
        return layout

    layout = _remember(given, (p.B, p.H, p.Q, p.K, tuple(geometry)), checked)
    if p.device == "cuda" and is_current_stream_capturing():
        hold_for_graphs(layout)
    return dense_of(layout.rows) if dense else layout


def _anew(tensors: list[Tensor], more: tuple[Any, ...], make: Any) -> Any:
    """`_remember` that remembers nothing."""
    return make()


def _remember(tensors: list[Tensor], more: tuple[Any, ...], make: Any) -> Any:
    """A layout or words made from tensors, kept as long as the first of them lives and none has been written to."""
    if any(x.is_inference() for x in tensors):  # these do not count their writes
        return make()
    key = (more, tuple((id(x), x._version) for x in tensors))
    maker, kept = _maker(tensors[0].device), _given.get(tensors[0])
    known = kept is not None and kept[0] == key and maker in (None, kept[1])
    if known and all(a() is b for a, b in zip(kept[2], tensors[1:], strict=True)):
        return kept[3]
    layout = make()
    _given[tensors[0]] = key, maker, [ref(x) for x in tensors[1:]], layout
    return layout


def _maker(device: torch.device) -> int | None:
    """The stream whose kernels make what is kept now: another stream would not wait for them.

    None while a graph is captured: that begins when all streams are done, and nothing can be read back in it.
    """
    if device.type != "cuda":
        return 0
    return None if is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(device.index)


def _dense_pattern(pattern: Pattern, p: Problem, q_offset: int, device: torch.device) -> Tensor:
    key = (pattern, p.Q, p.K, q_offset, device)
    mask = _dense.get(key)
    if mask is None:
        mask = _dense.put(key, torch.from_numpy(pattern.materialize(p.Q, p.K, q_offset)).to(device))
    return mask


def _words_pattern(pattern: Pattern, p: Problem, q_offset: int, device: torch.device) -> Tensor | None:
    """The bits of a small problem's pairs, made once; None where the pattern keeps them all."""
    key = (pattern, p.B, p.H, p.Q, p.K, q_offset, device)
    kept = _words.get(key)
    if kept is None:
        words = None
        if not isinstance(pattern, Dense):
            words = words_of(torch.from_numpy(pattern.materialize(p.Q, p.K, q_offset)), p.Q, p.K).to(device)
        kept = _words.put(key, (words,), held(words))
    return kept[0]


def _log(name: str, plan: Plan) -> None:
    """Say once which implementation computes a kind of problem."""
    key = (name, plan.problem.device, plan.problem.dtype, plan.problem.backward)
    if key in _logged:
        return
    _logged.add(key)
    text = "; ".join(f"not {other}: {', '.join(found)}" for other, found in plan.refused.items() if other != name)
    problem = plan.problem
    logger.info(f"attention on {problem.device} in {problem.dtype} runs by {name}" + (f" ({text})" if text else ""))
