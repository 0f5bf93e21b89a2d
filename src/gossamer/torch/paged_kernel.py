"""Few queries of each sequence over pages, on a GPU: one look-up and one kernel, which reads the table itself.

No structure is made, and a captured graph reads lengths and tables again in each replay. Calls with gradients, in
compiled functions, of many queries, of other devices, and of rules of more than two intervals go the usual way
(`torch/paged.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import operand_of
from gossamer.patterns.reach import Reach
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch.arguments import Arguments, AttentionOptions, is_bshd, number
from gossamer.torch.bind import bind
from gossamer.torch.calls import known
from gossamer.torch.decoding import WIDEST, sees_on
from gossamer.torch.key import Key, alignment, differentiable, plain
from gossamer.torch.memory import hold_for_graphs, outlasting
from gossamer.torch.paged_arguments import checked
from gossamer.torch.planning import plan_for
from gossamer.torch.structure.fused_bounds import reach_numbers
from gossamer.torch.structure.sequences import PackedSequences

FEW, MORE = 8, 512  # tokens of each sequence, and beside them of a chunk: more are computed faster over structure
MOST_REACHES = 2  # of a rule
REQUIRED = 6  # tensors of a call
NAMES = ("q", "k", "v", "cu_seq_q", "block_table", "seqused_k", "sink_logits", "out")
WITHOUT_OUT = tuple(name for name in NAMES if name != "out")  # which the launch then makes
_NUMBERS = (type(None), int, float)


class Given(NamedTuple):
    """The tensors of a call as they are given, in the order of NAMES."""

    q: Tensor
    k: Tensor
    v: Any  # a tensor; None where values lie behind keys: see `call_by_table`
    cu_seq_q: Tensor
    block_table: Tensor
    seqused_k: Tensor
    sink_logits: Tensor | None
    out: Tensor | None


def is_by_table(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, o: AttentionOptions) -> bool:
    """Whether the kernel computes a call over pages, of q, k and v that were checked."""
    pages = packed.pages
    assert pages is not None
    if not _reads_table(q, packed, o):
        return False
    given = Given(q, k, v, packed.cu_seq_q, *pages.tensors, None, None)
    numbers = pages.page_size, pages.page_layout, is_bshd(o.layout), o.scale, o.softcap
    key = "is by table", q.shape, k.shape, v.shape, pages.block_table.shape, q.dtype, q.device, *numbers
    found = known.get(key)
    return known.put(key, problem_over_pages(given, packed, o) is not None) if found is None else found


def _reads_table(q: Any, packed: PackedSequences, o: AttentionOptions) -> bool:
    """Whether the kernel computes a call over pages, as far as its key says it."""
    pages = packed.pages
    assert pages is not None
    if torch.compiler.is_compiling() or not isinstance(q, Tensor) or q.ndim not in (3, 4) or not sees_on(q.device.type):
        return False
    reaches = packed.rule.reaches
    if len(reaches) > MOST_REACHES or any(len(reach.blocks) > 1 for reach in reaches):
        return False
    if packed.checked or pages.checked or o.implementation is not None:
        return False
    (R, *_, n), T = pages.block_table.shape, q.shape[-3 if is_bshd(o.layout) else -2]
    return bool(R and n and T) and (pages.batch_invariant or T <= FEW * R + MORE)


class ByTable(NamedTuple):
    """What calls of one key do."""

    run: Any
    alive: Any  # what the key names by a handle lives as long

    def __call__(self, given: Given) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        if given.q.is_cuda and is_current_stream_capturing():
            hold_for_graphs(self)
        *always, out = given
        found: tuple[Tensor, Tensor] = self.run(*always) if out is None else self.run(*given)
        return found


def key_by_table(given: Given, which: tuple[Any, ...], scale: Any, softcap: Any) -> Key | None:
    """What tells calls apart; None for one that goes the usual way.

    Args:
        given: tensors, or what stands in their place.
        which: the rest of what a call is given, hashable.
    """
    always, more = given[:REQUIRED], given[REQUIRED:]
    tensors: Any = (*always, *(x for x in more if x is not None))
    if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in tensors):
        return None
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS or not plain(*tensors, profiled=True):
        return None
    if differentiable(given.q, given.k, given.v, given.sink_logits):
        return None
    if any(x.layout is not torch.strided for x in tensors):
        return None
    facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given]
    return ("by table", *which, scale, type(scale), softcap, type(softcap), *facts, alignment(*tensors))


def again(key: Key | None, given: Given) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call of which there was one before; else None."""
    call = None if key is None else known.get(key)
    return None if call is None else call(given)


def by_table(
    q: Any, k: Any, v: Any, packed: PackedSequences, o: AttentionOptions, out: Tensor | None = None,
    key: Key | None = None, alive: Any = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out, lse) of a call that the kernel computes; None where it goes the usual way.

    Args:
        out: is written, where it is given.
        key: under which the call was not found, and `alive` what it names by a handle; None: its own.
    """
    found = call_by_table(q, k, v, packed, o, out, key, alive)
    return None if found is None else found.call(found.given)


class Found(NamedTuple):
    """A call that the kernel computes; it computes all whose tensors differ in values and places alone."""

    call: ByTable
    given: Given


def call_by_table(
    q: Any, k: Any, v: Any, packed: PackedSequences, o: AttentionOptions, out: Tensor | None = None,
    key: Key | None = None, alive: Any = None, together: bool = False,
) -> Found | None:  # fmt: skip
    """What `by_table` runs, without running it.

    Args:
        together: v lies behind k in the rows of a cache, of a last stride of 1: the call is given that cache as k, and
            no v. Then the key says so.
    """
    if not _reads_table(q, packed, o):
        return None
    if not o.q_offset is o.key_starts is o.key_lengths is o.alibi_slopes is o.alibi_distance is None:
        return None
    o = o._replace(scale=number(o.scale), softcap=number(o.softcap))
    cu_seq_q, pages = packed.over_pages(q.device, q.shape[-3 if is_bshd(o.layout) else -2])
    given = Given(q, k, v, cu_seq_q, *pages.tensors, o.sink_logits, out)
    if key is None:
        which = packed.rule, pages.page_size, pages.page_layout, pages.batch_invariant, is_bshd(o.layout)
        key = key_by_table(given, which, o.scale, o.softcap)
        if key is None:
            return None
        call: ByTable | None = known.get(key)
        if call is not None:
            return Found(call, given)
    run = _bound(given, packed, o, together)
    return None if run is None else Found(known.put(key, ByTable(run, alive)), given)


def problem_over_pages(given: Given, packed: PackedSequences, o: AttentionOptions) -> Problem | None:
    """What the kernel computes: tokens of one batch element, and the slots of a sequence as its keys; None: not this.

    Args:
        given: tensors that were checked.
    """
    pages, bshd = packed.pages, is_bshd(o.layout)
    assert pages is not None
    *_, one, two, D = given.q.shape
    T, H = (one, two) if bshd else (two, one)
    P, G, E = given.k.shape[0], given.k.shape[1 if pages.page_layout == "phsd" else 2], given.v.shape[3]
    slots = pages.block_table.shape[-1] * pages.page_size
    if not P or max(D, E) > WIDEST:
        return None
    # Of the arguments of a call that is planned shapes and types count.
    like = given.q.new_empty((1, 1, 1, 1))
    q, k, v = (like.expand(1, heads, N, size) for heads, N, size in ((H, T, D), (G, slots, D), (G, slots, E)))
    a = Arguments(q, k, v, None, None, None, given.sink_logits, None, o.scale, o.softcap, "triton", False, False)
    try:
        return plan_for(a, ()).problem
    except Unsupported:
        return None


def _bound(given: Given, packed: PackedSequences, o: AttentionOptions, together: bool) -> Any:
    """The function of a launch of the tensors; None where the call goes the usual way."""
    from gossamer.kernels.reaches import Reaching
    from gossamer.kernels.triton.paged.launch_paged import MOST_ROWS, PagedCall, forward

    pages: Any = packed.pages
    checked(given.q, given.k, given.v, pages, o)
    problem = problem_over_pages(given, packed, o)
    if problem is None:
        return None
    slots, reaches = problem.K, packed.rule.seeing  # what no token sees is not read
    call = PagedCall(
        tuple(Reaching(*reach_numbers(reach, slots)) for reach in reaches), tuple(reach.step for reach in reaches),
        min(slots, sum(_most(reach, slots) for reach in reaches) + MOST_ROWS), pages.page_size, is_bshd(o.layout),
        pages.page_layout == "phsd", pages.batch_invariant,
    )  # fmt: skip
    scale = problem.D**-0.5 if o.scale is None else float(o.scale)
    scoring = Scoring(scale, 0, None if o.softcap is None else float(o.softcap))
    operands = {name: operand_of(x) for name, x in zip(NAMES, given, strict=True) if x is not None}
    device = given.q.device
    names = NAMES if given.out is not None else WITHOUT_OUT
    if together:  # the launch has a view by that name
        del operands["v"]
        names = tuple("none" if name == "v" else name for name in names)
    return bind(outlasting(device, lambda: forward(problem, call, scoring, operands)), device, names)


def _most(reach: Reach, slots: int) -> int:
    """No token sees more keys by a reach."""
    return min([slots, *(n for n in (reach.longest, reach.first) if n is not None)])
