"""Which rows gather their keys together where each query has a list of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from gossamer.layouts.gather import TILE, queries_of
from gossamer.memo import Memo
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch.arguments import Arguments, cast_type
from gossamer.torch.planning import problem_of

Group = tuple[int, int]  # queries, and query heads of a key head; 0 heads: each row gathers for itself
ALONE = (1, 0)
# What has run on a GPU, and is taken where no implementation is named (docs/limits.md).
HEADS, LARGEST, DTYPES = (2, 8, 16, 64), 128, ("bfloat16",)

_groups: Memo[Group] = Memo()


def group_of(a: Arguments, list_heads: int) -> Group:
    """The rows that gather together: 64, of few queries, where the query heads of a key head share a list.

    `implementation="hopper"` takes all that its kernels are compiled for, one head too; compiled functions gather for
    each row alone.

    Args:
        list_heads: heads that have lists of their own.
    """
    if a.q.device.type != "cuda" or torch.compiler.is_compiling():
        return ALONE
    H, G, widest = a.q.shape[1], a.k.shape[1], max(a.q.shape[3], a.v.shape[3])
    heads = 1 if list_heads not in (1, G) else _most_heads(H // G)
    dtype = str(cast_type(a.q) or a.q.dtype).removeprefix("torch.")
    ran = heads in HEADS and heads == H // G and widest <= LARGEST and dtype in DTYPES
    if not ran and a.implementation != "hopper":
        return ALONE
    problem = replace(problem_of(a, ()), dtype=dtype, gather=queries_of(heads), gather_heads=heads)
    key = problem, a.implementation
    found = _groups.get(key)
    if found is None:
        found = _groups.put(key, (queries_of(heads), heads) if _computed(problem, a.implementation) else ALONE)
    return found


def _most_heads(ratio: int) -> int:
    """Of the query heads of a key head, the most of a tile that divide them."""
    return next(heads for heads in range(min(TILE, ratio), 0, -1) if ratio % heads == 0)


def _computed(problem: Problem, implementation: str | None) -> bool:
    try:
        plan_of(problem, implementation)
    except Unsupported:
        return False
    return True
