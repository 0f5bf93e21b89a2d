"""Attention over a cache in pages against its definition: pages of a sequence gathered, a dense softmax in float64.

Whatever a call may not use holds NaN: slots behind a sequence, pages that nobody sees, and what tables name there.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.torch import paged
from tests.support.definition import dense
from tests.torch.test_device_structure import RULES, STEPS, Keep

WILD = (-1, 0, -(2**31), 2**31 - 1)  # in entries that nobody sees; page 0 is the null page, of NaN alone


class Case(NamedTuple):
    """Sequences, their pages, and what is right."""

    q: Tensor  # (T, H, D) float64, as are the others
    k: Tensor  # (P, page, G, D), NaN where no query sees anything
    v: Tensor
    cu: list[int]
    used: list[int]
    table: Tensor
    out: Tensor  # (T, H, E)
    lse: Tensor  # (H, T)
    sinks: Tensor | None
    terms: dict[str, Any]


def drawn(
    draw: random.Random, pattern: str | Keep, *, page: int, lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (2, 1),
    sizes: tuple[int, int] = (4, 6), shared: bool = False, sinks: bool = False, softcap: float | None = None,
) -> Case:  # fmt: skip
    """A case of sequences with (queries, keys) each.

    Args:
        shared: sequences begin with the same pages, and each repeats its first page where it has more than two.
    """
    keep = RULES[pattern][1] if isinstance(pattern, str) else pattern
    (H, G), (D, E), g = heads, sizes, torch.Generator().manual_seed(draw.randrange(2**31))
    width = max([1, *(-(-used // page) for _, used in lengths)]) + draw.choice([0, 1, 3])
    P = 2 + (len(lengths) + shared) * width
    free = list(range(1, P))
    draw.shuffle(free)
    prefix = [free.pop() for _ in range(width)] if shared else []
    T = sum(n for n, _ in lengths)
    behind = draw.choice([0, 0, 3])  # rows of no sequence
    q, k, v = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in ((T + behind, H, D), (P, page, G, D), (P, page, G, E))
    )
    table = np.array([[draw.choice(WILD) for _ in range(width)] for _ in lengths], dtype=np.int64).reshape(-1, width)
    needed = np.zeros((P, page), dtype=bool)
    outs, lses = [], []
    weights = torch.randn(H, generator=g, dtype=torch.float64) if sinks else None
    for r, (Lq, Lk) in enumerate(lengths):
        listed = [prefix[c] if shared and c < (Lk // page) // 2 else free.pop() for c in range(-(-Lk // page))]
        if shared and len(listed) > 2:
            listed[1] = listed[0]
        mask = np.array([[keep(i, j) for j in range(Lk)] for i in range(Lk - Lq, Lk)], dtype=bool).reshape(Lq, Lk)
        seen = [j for j in range(Lk) if mask[:, j].any()]
        if pattern in STEPS and Lq:  # keys between those of a step may be read
            seen = list(range(Lk))
        for j in seen:
            table[r, j // page] = listed[j // page]
            needed[listed[j // page], j % page] = True
        first = sum(n for n, _ in lengths[:r])
        mask = np.pad(mask, ((0, 0), (0, 1)))  # and a key that nobody sees: the definition has no sum over none
        of = [torch.cat([x[listed].flatten(0, 1)[:Lk], x[0, :1]]).transpose(0, 1)[None] for x in (k, v)]
        out, lse = dense(q[first : first + Lq].transpose(0, 1)[None], *of, mask, weights, softcap)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    empty = torch.full((H, behind), -torch.inf, dtype=torch.float64)
    lses.append(empty if weights is None else weights[:, None].expand(H, behind))
    outs.append(torch.zeros(behind, H, E, dtype=torch.float64))
    k[~torch.from_numpy(needed)] = torch.nan
    v[~torch.from_numpy(needed)] = draw.choice([torch.nan, torch.inf])
    q[T:] = torch.nan
    cu = [0, *accumulate(n for n, _ in lengths)]
    terms = {} if softcap is None else {"softcap": softcap}
    used = [n for _, n in lengths]
    return Case(q, k, v, cu, used, torch.from_numpy(table), torch.cat(outs), torch.cat(lses, 1), weights, terms)


def mixed(draw: random.Random, most: int) -> list[tuple[int, int]]:
    """(queries, keys) of sequences: decode, drafts, chunks, whole prompts, none of either, more queries than keys."""
    found = []
    for _ in range(draw.randint(1, 5)):
        keys = draw.choice([0, 1, draw.randint(0, most), draw.randint(0, most)])
        queries = draw.choice([0, 1, 1, min(3, keys), keys, draw.randint(0, keys), keys + draw.choice([0, 2])])
        found.append((queries, keys))
    return found


def laid(x: Tensor, how: str) -> Tensor:
    """Pages (P, page, G, size) with the same numbers in other memory."""
    if how == "phsd":
        return x.transpose(1, 2).contiguous()
    if how == "halves":  # of a last axis
        return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[3]]
    if how == "padded":
        return torch.cat([x, torch.full_like(x[:, :1], torch.nan)], 1)[:, :-1]
    if how == "beside":  # K and V of a page behind one another
        return torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    return x


def check(case: Case, found: tuple[Tensor, Tensor], atol: float = 1e-9) -> None:
    out, lse = found
    torch.testing.assert_close(out.double(), case.out, atol=atol, rtol=atol)
    torch.testing.assert_close(lse.double(), case.lse, atol=atol, rtol=atol)


def run(case: Case, pattern: gs.Pattern | None, how: str = "", **more: Any) -> tuple[Tensor, Tensor]:
    k, v = (laid(x, how) for x in (case.k, case.v))
    return gs.varlen(
        case.q, k, v, torch.tensor(case.cu), pattern=pattern, seqused_k=torch.tensor(case.used), block_table=case.table,
        page_layout="phsd" if how == "phsd" else "pshd", sink_logits=case.sinks, return_lse=True, **case.terms, **more,
    )  # fmt: skip


LAYOUTS = ("", "phsd", "halves", "padded", "beside")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    page, most = draw.choice([(1, 9), (2, 20), (8, 40), (16, 70), (16, 150), (24, 70), (64, 150), (128, 300)])
    case = drawn(
        draw, name, page=page, lengths=mixed(draw, most), heads=draw.choice([(1, 1), (4, 1), (6, 2)]),
        sinks=draw.random() < 0.4, softcap=draw.choice([None, 2.0]), shared=draw.random() < 0.3,
    )  # fmt: skip
    check(case, run(case, RULES[name][0], draw.choice(LAYOUTS)))


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[paged.PagedLayout]:
    """The pool is read where it is, as on a GPU, by tiles of 64 keys; layouts that are made since."""
    made: list[paged.PagedLayout] = []
    make = paged.paged_layout
    monkeypatch.setattr(paged, "IN_PLACE", {"cpu"})
    monkeypatch.setattr(paged, "paged_layout", lambda *given: made.append(make(*given)) or made[-1])
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
def test_pages_as_tiles_where_they_lie(name: str, seed: int, in_place: list[paged.PagedLayout]) -> None:
    draw = random.Random(f"{name} {seed}")
    page, how = draw.choice([64, 64, 128, 256]), draw.choice(LAYOUTS)
    case = drawn(
        draw, name, page=page, lengths=mixed(draw, 3 * page), heads=draw.choice([(1, 1), (4, 1), (6, 2)]),
        sinks=draw.random() < 0.4, softcap=draw.choice([None, 2.0]),
    )  # fmt: skip
    check(case, run(case, RULES[name][0], how))
    # 65 slots of a page with one of padding are no whole tiles.
    assert all(made.between is None if how == "padded" else made.between % 64 == 0 for made in in_place if made.parts)
