"""Which rows gather their keys together where each query has a list of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from gossamer.layouts.gather import TILE, queries_of
from gossamer.memo import Memo
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch.planning import chip_of, problem_of
from gossamer.torch.structure.base import Listed
from gossamer.torch.validate import Arguments, cast_type

Group = tuple[int, int]  # queries, and query heads of a key head; 0 heads: each row gathers for itself
ALONE = (1, 0)
# A column that 64 rows gather takes as long as so many pairs that a row gathers for itself: 82 and 55 ps on an H200,
# 64 x 512 operations at 400 TFLOP/s, and 512 bytes at 9.3 TB/s (docs/lab/2026-11-23-packed-lists.md).
PAIRS_OF_COLUMN = 1.5
MANY = 4096  # keys of a call that is not small

_groups: Memo[Group] = Memo()


def group_of(a: Arguments, listed: Listed) -> Group:
    """The rows that gather together: the first implementation that would compute a call with them decides.

    The query heads of a key head share a list: 64 rows are those of few queries. Rows of one head gather together where
    even lists at random would gain.
    """
    if a.q.device.type != "cuda":
        return ALONE
    (_, H, _, D), (_, G, K, _), E = a.q.shape, a.k.shape, a.v.shape[3]
    if torch.compiler.is_compiling():
        heads = _known_heads(H, G, listed.heads)
        if heads == 1 or not _known(max(D, E) <= TILE * 4):
            return ALONE
        terms = ["sink_logits"] * (a.sink_logits is not None) + ["alibi_slopes"] * (a.alibi_slopes is not None)
        cap = None if a.softcap is None else float(a.softcap)
        facts = str(cast_type(a.q) or a.q.dtype), a.q.device, " ".join(terms), cap, a.implementation, a.deterministic
        return (queries_of(heads), heads) if _able(heads, *facts) else ALONE
    heads = 1 if listed.heads not in (1, G) else _most_heads(H // G)
    gains = heads > 1 or a.implementation == "hopper" or pays(listed.entries, K)
    dtype = str(cast_type(a.q) or a.q.dtype).removeprefix("torch.")
    problem = replace(problem_of(a, ()), dtype=dtype, gather=queries_of(heads), gather_heads=heads)
    key = problem, a.implementation, gains
    found = _groups.get(key)
    if found is None:
        together = gains and _computed(problem, a.implementation)
        found = _groups.put(key, (queries_of(heads), heads) if together else ALONE)
    return found


def pays(entries: int, K: int) -> bool:
    """Whether 64 queries of one head gather faster together, if each listed so many of K keys at random."""
    union = K * (1.0 - (1.0 - min(entries, K) / K) ** TILE)
    return union * PAIRS_OF_COLUMN <= TILE * entries


def _most_heads(ratio: int) -> int:
    """Of the query heads of a key head, the most of a tile that divide them."""
    return next(heads for heads in range(min(TILE, ratio), 0, -1) if ratio % heads == 0)


def _known_heads(H: int, G: int, of_lists: int) -> int:
    """As `_most_heads`, of numbers of a graph; 1 where it leaves them open."""
    if not (_known(of_lists == 1) or _known(of_lists == G)):
        return 1
    ratio = H // G
    return next((heads for heads in range(TILE, 1, -1) if _known(ratio % heads == 0)), 1)


def _known(condition: bool) -> bool:
    """Whether a condition on sizes of a graph holds for all that it is compiled for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def _able(
    heads: int, dtype: str, device: torch.device, terms: str, softcap: float | None, implementation: str | None,
    deterministic: bool,
) -> bool:  # fmt: skip
    """Whether both directions are computed so, of what is constant while a function is compiled."""
    names = {*terms.split(), *["softcap"] * (softcap is not None)}
    problem = Problem(
        1, heads, 1, MANY, MANY, 1, 1, dtype.removeprefix("torch."), device.type, **chip_of(device)._asdict(),
        score_terms=frozenset(names), backward=True, deterministic=deterministic, softcap=softcap,
        gather=queries_of(heads), gather_heads=heads,
    )  # fmt: skip
    return _computed(problem, implementation)


# What torch.compiler.assume_constant_result does, which would import the compiler with gossamer.
_able._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _computed(problem: Problem, implementation: str | None) -> bool:
    try:
        plan_of(problem, implementation)
    except Unsupported:
        return False
    return True
