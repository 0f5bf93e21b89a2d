"""From the arguments of a call to a plan, and from a plan to the layout that a call reads, on its device."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.checks import show
from gossamer.kernels.contract import Implementation, Scoring
from gossamer.kernels.launch import dtype_of
from gossamer.kernels.parts import Selection
from gossamer.layouts import cached_gather, cached_layout
from gossamer.layouts.cache import bytes_of
from gossamer.memo import Memo
from gossamer.patterns import Dense, Pattern
from gossamer.patterns.handles import pattern_of
from gossamer.plan.arguments import check_ahead
from gossamer.plan.plan import Plan, choose, plan_of, refusals
from gossamer.plan.problem import SCORE_TERMS, Problem, Unsupported
from gossamer.torch.arguments import OTHER_LAYOUT, Arguments, check_mask, is_empty, validate
from gossamer.torch.given_layouts import check_layout, layout_from
from gossamer.torch.mask_layouts import dense_of, layout_of, packed_mask_of
from gossamer.torch.recording import Again

logger = logging.getLogger("gossamer")

KEPT_DENSE = 4
MOST_BOUND = 16  # functions that are kept with data of the user's, by the key of their call

_dense: Memo[Tensor] = Memo(KEPT_DENSE)
_packed_masks: Memo[Tensor] = Memo()
_logged: set[tuple[Any, ...]] = set()


def plan_for(a: Arguments, geometry: tuple[int, ...], keys: int | None = None) -> Plan:
    """The plan of a call's forward, with that of its backward.

    Args:
        geometry: of a layout that is given, else empty.
        keys: for how many it is planned, where k and v may have fewer: see `torch.decoding`.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: nothing, or not the one named, computes the problem; the message has every reason.
    """
    validate(a)
    problem = problem_of(a, geometry)
    if is_empty(a):
        problem = problem.with_elements()
    return plan_of(problem, a.implementation) if keys is None else growing(problem, a.implementation, keys)


def growing(problem: Problem, implementation: str | None, keys: int) -> Plan:
    """The plan of up to so many keys, by implementations that take any number of them, told by `key_lengths`.

    Raises:
        Unsupported: there are none.
    """
    terms = (problem.score_terms - {"q_offset"}) | {"key_lengths"}
    plan = plan_of(replace(problem, K=keys, score_terms=terms), implementation)
    able = tuple(found for found in plan.implementations if problem.device in found.capability.grows)
    if not able:
        raise Unsupported("no implementation computes this problem for a number of keys that grows")
    return replace(plan, implementations=able)


class Chip(NamedTuple):
    """What a plan asks of a GPU."""

    sm: int  # compute capability, 10 * major + minor
    processors: int


@cache
def chip_of(device: torch.device) -> Chip:
    """The facts of a CUDA device."""
    facts = torch.cuda.get_device_properties(device)
    return Chip(10 * facts.major + facts.minor, facts.multi_processor_count)


def problem_of(a: Arguments, geometry: tuple[int, ...]) -> Problem:
    """The static facts of a call."""
    q, k = a.q, a.k
    tensors_and_numbers = set(SCORE_TERMS) - {"q_offset", "alibi_distance"}
    terms = {name for name in tensors_and_numbers if getattr(a, name) is not None}
    if a.alibi_distance == "absolute":
        terms.add("alibi_distance")
    if a.q_offset not in (None, k.shape[2] - q.shape[2]):
        terms.add("q_offset")
    chip = chip_of(q.device)._asdict() if q.device.type == "cuda" else {}
    tile = gather = None
    heads = 1
    if geometry:
        block_q, block_kv, _, _, heads = geometry
        tile, gather = ((block_q, block_kv), None) if block_kv else (None, block_q)
    return Problem(
        B=q.shape[0], H=q.shape[1], G=k.shape[1], Q=q.shape[2], K=k.shape[2], D=q.shape[3], E=a.v.shape[3],
        dtype=dtype_of(q), device=q.device.type, **chip, score_terms=frozenset(terms),
        backward=a.backward, deterministic=a.deterministic, tile=tile, gather=gather, gather_heads=heads,
        softcap=a.softcap,
    )  # fmt: skip


def scoring_of(a: Arguments, K: int) -> Scoring:
    """The numbers among the score terms of a call that is planned for K keys."""
    return Scoring(
        a.q.shape[3] ** -0.5 if a.scale is None else float(a.scale),
        K - a.q.shape[2] if a.q_offset is None else a.q_offset,
        None if a.softcap is None else float(a.softcap),
        a.alibi_distance == "absolute",
    )


def check_rows(problem: Problem, scoring: Scoring, handle: int) -> None:
    """Raise ValueError for a `q_offset` that nothing would read: rows of a mask, a layout or a matrix have no position.

    Args:
        handle: of a pattern, or -1 for a mask or a layout.
    """
    p = problem
    if "q_offset" not in p.score_terms or "alibi_slopes" in p.score_terms:
        return
    if handle >= 0 and pattern_of(handle).reads_positions:
        return
    which = show(pattern_of(handle)) if handle >= 0 else "a mask, BlockMask or BlockLayout"
    raise ValueError(
        f"q_offset must be left out with {which}, whose rows are counted from 0, not by their positions; "
        f"got {scoring.q_offset}"
    )


def check_distances(a: Arguments, scoring: Scoring, handle: int) -> None:
    """Raise ValueError where slopes meet a key after its query, and nothing says how they count it.

    Args:
        handle: of a pattern, or -1 for a mask or a layout, of which only the sizes say that there is no such key.
    """
    if a.alibi_slopes is None or a.alibi_distance is not None:
        return
    pattern = pattern_of(handle) if handle >= 0 else None
    check_ahead(pattern, a.q.shape[2], a.k.shape[2], scoring.q_offset, "a mask or a layout")


def check_sizes(a: Arguments, handle: int) -> None:
    """Raise ValueError for a pattern that describes other sizes than those of the inputs.

    Args:
        handle: of a pattern, or -1 for a mask or a layout, which are checked when they are read.
    """
    if handle < 0:
        return
    pattern, (B, H, Q, _), (_, G, K, _) = pattern_of(handle), a.q.shape, a.k.shape
    try:
        pattern.check(Q, K, H, B)
    except ValueError as error:
        try:
            pattern.check(H, G, Q, B)
            turned = K > 0 and Q % K == 0
        except ValueError:
            turned = False
        if turned or a.q_offset is None:
            raise ValueError(f"{error}{OTHER_LAYOUT if turned else ''}") from None
        pattern.check(Q, K, H, B, placed=True)


def select_layout(plan: Plan, pattern: Pattern, q_offset: int, device: torch.device) -> Selection:
    """The implementation that computes a plan for a pattern, and the layout that it reads.

    It is the first of the plan; for a pattern that leaves most of its tiles empty, the one whose tile, or gather
    layout, takes the least time by counted work.
    """
    p = plan.problem
    pattern.check(p.Q, p.K, p.H, p.B, placed=True)
    chosen = choose(plan, pattern, q_offset)
    layout: Any
    if chosen.form == "dense":
        layout = _dense_pattern(pattern, p, q_offset, device)
    elif chosen.form == "packed_mask":
        layout = _packed_mask_pattern(pattern, p, q_offset, device)
    elif chosen.form == "gather":
        layout = cached_gather(pattern, p.Q, p.K, block_q=chosen.block_q, q_offset=q_offset, device=device)
    else:
        layout = cached_layout(
            pattern, p.Q, p.K, block_q=chosen.block_q, block_kv=chosen.block_kv, q_offset=q_offset, device=device
        )
    log_choice(chosen.implementation.name, plan)
    return Selection(cast(Implementation, chosen.implementation), layout)


def layout_bytes(layout: Any) -> int:
    """About the bytes of a layout or of a mask, packed or not."""
    if layout is None:
        return 0
    return layout.nbytes if isinstance(layout, Tensor) else bytes_of(layout)


class DataLayout:
    """What the user's data stand for, and the functions that were bound to it: kept as long as the data."""

    def __init__(self, selected: Selection) -> None:
        self.selected = selected
        self.bound: Memo[Any] = Memo(MOST_BOUND)


Versions = tuple[tuple[int, int], ...]  # of tensors, with their identities


class _Remembered(NamedTuple):
    """What was made from tensors, in which versions, and by the kernels of which stream."""

    versions: Versions
    maker: int | None
    others: list[ref[Tensor]]
    given: DataLayout


_data_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def data_layout(
    plan: Plan, q: Tensor, k: Tensor, data: tuple[Tensor, ...], geometry: tuple[int, ...], *, counted: bool, made: bool,
    again: Again | None = None,
) -> DataLayout:  # fmt: skip
    """What an implementation reads when data say what is attended: the arrays of a BlockLayout, or one mask.

    Args:
        counted: torch counts what is written to the data, so that what was made of them is known by their versions.
        made: they are a layout that the call made itself, and need no check.
        again: where they are its memory alone, what gives its arrays.
    """
    p, implementation = plan.problem, cast(Implementation, plan.implementations[0])
    form, columns = implementation.layout, p.backward and p.device != "cpu"
    # Both directions read one layout that is given, and what is made of it: the work items of rows.
    tiles: tuple[Any, ...] = () if geometry else (*implementation.tile(p), columns)
    which = (implementation.name, form, *tiles, p.B, p.H, p.Q, p.K, geometry, again)
    versions: Versions = ()
    if counted and not any(x.is_inference() for x in data):  # these do not count their writes
        versions = tuple([(id(x), x._version) for x in data])
    if not geometry:
        check_mask(data[0], q, k)
        if form != "dense" and p.device == "cuda" and is_current_stream_capturing():
            versions = ()  # a graph reads the mask again in every replay
    found = _remembered(data, which, versions) if versions else None
    if found is not None:
        return found
    # Aliases: what is remembered under a tensor must not keep that tensor alive. One that comes twice stays one.
    once = {id(x): x.detach() for x in data}
    aliases = [once[id(x)] for x in data]
    layout: Any
    if geometry:
        layout = layout_from(aliases if again is None else [*again.parts(aliases)], geometry)
        if not made:
            check_layout(layout.rows, q, k)
        layout = dense_of(layout.rows) if form == "dense" else layout
    elif form == "dense":
        (layout,) = aliases
    elif form == "packed_mask":
        layout = packed_mask_of(aliases[0], p.Q, p.K)
    else:
        # The blocked implementation walks rows alone; building columns on a CPU would be for nothing.
        block_q, block_kv, _ = tiles
        layout = layout_of(aliases[0], p.Q, p.K, block_q=block_q, block_kv=block_kv, transpose=columns)
    given = DataLayout(Selection(implementation, layout))
    if versions:
        maker, others = _maker(data[0].device), [ref(x) for x in data[1:]]
        _data_layouts.setdefault(data[0], {})[which] = _Remembered(versions, maker, others, given)
    return given


def _remembered(data: tuple[Tensor, ...], which: tuple[Any, ...], versions: Versions) -> DataLayout | None:
    """What was made from tensors, kept as long as the first of them lives and none has been written to.

    Only writes that torch counts are seen.
    """
    kept = _data_layouts.get(data[0], {}).get(which)
    if kept is None or kept.versions != versions or _maker(data[0].device) not in (None, kept.maker):
        return None
    same = all(a() is b for a, b in zip(kept.others, data[1:], strict=True))
    return kept.given if same else None


def _maker(device: torch.device) -> int | None:
    """The stream whose kernels make what is kept now: another stream would not wait for them.

    None while a graph is captured: that begins when all streams are done, and nothing can be read back in it.
    """
    if device.type != "cuda":
        return 0
    return None if is_current_stream_capturing() else torch._C._cuda_getCurrentRawStream(device.index)


def _dense_pattern(pattern: Pattern, p: Problem, q_offset: int, device: torch.device) -> Tensor:
    key = (pattern, p.Q, p.K, q_offset, device)
    return _dense.get_or_make(key, lambda: torch.from_numpy(pattern.materialize(p.Q, p.K, q_offset)).to(device))


def _packed_mask_pattern(pattern: Pattern, p: Problem, q_offset: int, device: torch.device) -> Tensor | None:
    """The bits of a small problem's pairs, made once; None where the pattern keeps them all."""
    if isinstance(pattern, Dense):
        return None
    key = (pattern, p.Q, p.K, q_offset, device)

    def make() -> Tensor:
        return packed_mask_of(torch.from_numpy(pattern.materialize(p.Q, p.K, q_offset)), p.Q, p.K).to(device)

    return _packed_masks.get_or_make(key, make, layout_bytes)


def log_choice(name: str, plan: Plan) -> None:
    """Say once which implementation computes a kind of problem."""
    key = (name, plan.problem.device, plan.problem.dtype, plan.problem.backward)
    if key in _logged or not logger.isEnabledFor(logging.INFO):
        return
    _logged.add(key)
    problem = plan.problem
    reasons_of = {other: refusals(other, problem) for other in plan.refused if other != name}
    text = "; ".join(f"not {other}: {', '.join(found)}" for other, found in reasons_of.items())
    logger.info(f"attention on {problem.device} in {problem.dtype} runs by {name}" + (f" ({text})" if text else ""))
