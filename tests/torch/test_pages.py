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
from torch._dynamo.testing import CompileCounter

import gossamer as gs
from gossamer.memo import forget_all
from gossamer.torch import paged
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.structure import pages, sequences
from gossamer.torch.structure.base import Sizes
from tests.support.definition import dense
from tests.support.modes import NothingIsRead
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


def test_pages_in_any_order_are_no_run_of_pages(in_place: list[paged.PagedLayout]) -> None:
    """Three pages whose last lies two behind the first: the page between is another's."""
    q, pool = torch.randn(1, 1, 8), torch.randn(9, 64, 1, 8)
    pool[3] = torch.nan
    out = gs.varlen(q, pool, pool, [0, 1], pattern=gs.Causal(), block_table=torch.tensor([[2, 8, 4]]), seqused_k=[192])
    keys = pool[[2, 8, 4]].flatten(0, 1)
    assert in_place and in_place[0].between is not None
    torch.testing.assert_close(out, gs.attention(q, keys, keys, gs.Dense(), layout="bshd"))


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


H, G, D, E = 6, 2, 8, 16


def usual(draw: random.Random, **more: Any) -> Case:
    """Decode, a draft, a chunk of a prompt and a whole one, over pages of 64."""
    lengths = [(1, 200), (3, 65), (40, 150), (70, 70), (1, 64), (0, 90), (2, 0)]
    return drawn(draw, "causal", page=64, lengths=lengths, heads=(H, G), sizes=(D, E), **more)


def packed(case: Case, pattern: gs.Pattern | None = None, page_layout: Any = "pshd", **more: Any) -> gs.PackedSequences:
    size = case.k.shape[1]
    pages = gs.Pages(case.table, torch.tensor(case.used), size, page_layout=page_layout, **more)
    return gs.PackedSequences(torch.tensor(case.cu), pages=pages, pattern=gs.Causal() if pattern is None else pattern)


@pytest.mark.parametrize("where", ["copied", "in place"])
@pytest.mark.parametrize("sinks", [False, True])
def test_layers_share_one_structure(where: str, sinks: bool, request: pytest.FixtureRequest) -> None:
    if where == "in place":
        request.getfixturevalue("in_place")
    case = usual(random.Random(1), sinks=sinks)
    terms = {"sink_logits": case.sinks, "return_lse": True}
    shared = gs.device_layout(case.q, case.k, case.v, packed(case), layout="bshd", sink_logits=case.sinks)
    assert (shared.between is None) == (where == "copied")
    wanted = gs.varlen(
        case.q, case.k, case.v, torch.tensor(case.cu), seqused_k=case.used, block_table=case.table.numpy(),
        pattern=gs.Causal(), **terms,
    )  # fmt: skip
    check(case, wanted)
    for turn in (1, 2):  # another layer
        out, lse = gs.attention(case.q, case.k, case.v * turn, shared, layout="bshd", **terms)
        torch.testing.assert_close(out, wanted[0] * turn)
        assert torch.equal(lse, wanted[1]) and out.is_contiguous()
    turned = [x.transpose(0, 1) for x in (case.q, *wanted)]
    for q, out, lse in ((turned[0], turned[1], wanted[1]), (turned[0][None], turned[1][None], wanted[1][None])):
        for pattern in (shared, packed(case)):
            found = gs.attention(q, case.k, case.v, pattern, **terms)
            assert found[0].is_contiguous() and all(map(torch.equal, found, (out, lse)))
    with pytest.raises(ValueError, match=r"pattern was made on cpu for \(T, H, G, pages, page_size\)"):
        gs.attention(case.q[1:], case.k, case.v, shared, layout="bshd")


def test_where_pages_lie_moves_no_bit() -> None:
    case = usual(random.Random(2))
    order = torch.randperm(len(case.k), generator=torch.Generator().manual_seed(0))
    to = order.argsort()
    inside = (case.table >= 0) & (case.table < len(to))
    table = torch.where(inside, to[case.table.clamp(0, len(to) - 1)], case.table)
    other = case._replace(k=case.k[order], v=case.v[order], table=table)
    found = [run(x, gs.Causal()) for x in (case, other)]
    assert all(map(torch.equal, *found))
    check(case, found[0])


def test_tiles_are_listed_in_the_order_of_positions(in_place: list[paged.PagedLayout]) -> None:
    case = drawn(random.Random(0), "causal", page=128, lengths=[(1, 500), (30, 300)])
    run(case, gs.Causal())
    pool, ends = (part.layout.rows for part in in_place[0].parts)
    lists = [pool.full.indices[pool.full.starts[0, 0, t] :][: pool.full.counts[0, 0, t]].tolist() for t in range(3)]
    first, second = case.table[:, :3].tolist()
    assert lists[:2] == [[2 * c + s for c in pages for s in (0, 1)] for pages in (first, second[:2])] and not lists[2]
    assert ends.columns == 2 * 128, "the last page of each"


@pytest.mark.parametrize("where", ["copied", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, where: str, request: pytest.FixtureRequest) -> None:
    """Errors are at most twice those of plain attention in the same type."""
    made = request.getfixturevalue("in_place") if where == "in place" else []
    for D, E in ((64, 64), (128, 64), (40, 80)):
        lengths = [(1, 300), (5, 70), (60, 130), (33, 33)]
        draw = random.Random(D)
        case = drawn(draw, "sinks", page=64, lengths=lengths, heads=(4, 2), sizes=(D, E), sinks=True)
        low = case._replace(q=case.q.to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))
        out, lse = run(low, RULES["sinks"][0])
        assert out.dtype == dtype and lse.dtype == torch.float32
        plain = []
        for r, (Lq, Lk) in enumerate(lengths):
            first, n = case.cu[r], -(-Lk // 64)
            rows = low.table[r, :n].clamp(0, len(low.k) - 1)
            k, v = (x[rows].flatten(0, 1)[:Lk].nan_to_num(0, 0, 0) for x in (low.k, low.v))
            mask = torch.tensor([[RULES["sinks"][1](i, j) for j in range(Lk)] for i in range(Lk - Lq, Lk)])
            k, v = (x.transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
            s = (low.q[first : first + Lq].transpose(0, 1) @ k.mT).float() * D**-0.5
            assert case.sinks is not None
            s = torch.cat([s.masked_fill(~mask, -torch.inf), case.sinks.float()[:, None, None].expand(4, Lq, 1)], -1)
            plain.append((s.softmax(-1)[..., :-1].to(dtype) @ v).transpose(0, 1))
        T = case.cu[-1]
        wrong = (torch.cat(plain).double() - case.out[:T]).abs().max()
        assert (out.double() - case.out).abs().max() <= 2 * wrong + 1e-7
    assert all(layout.between == 64 for layout in made)


@pytest.mark.parametrize("where", ["copied", "in place"])
def test_nothing_is_read_on_the_host(where: str, request: pytest.FixtureRequest) -> None:
    """As on a GPU: there is room for all lengths, and what is made is the same."""
    if where == "in place":
        request.getfixturevalue("in_place")
    for seed, name in enumerate(["causal", "sinks", "strided", "local", "union"]):
        case = drawn(random.Random(seed), name, page=64, lengths=[(1, 200), (30, 100), (0, 7), (2, 64)])
        sequences = packed(case, RULES[name][0])
        with NothingIsRead():
            shared = gs.device_layout(case.q, case.k, case.v, sequences, layout="bshd")
        check(case, gs.attention(case.q, case.k, case.v, shared, layout="bshd", return_lse=True))


@pytest.mark.parametrize("where", ["copied", "in place"])
@pytest.mark.parametrize("name", ["causal", "sinks", "strided", "local"])
def test_layouts_are_made_again_as_they_were_recorded(
    name: str, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where no number is read: calls of other numbers, and of the same shapes, make the same steps."""
    if where == "in place":
        request.getfixturevalue("in_place")
    for module in (pages, sequences, paged):
        monkeypatch.setattr(module, "is_read", lambda *_: False)
    forget_all()
    lengths = [(1, 200), (30, 100), (0, 7), (2, 64)]
    cases = [drawn(random.Random(0), name, page=64, lengths=lengths) for _ in range(2)]
    first, same = cases
    order = torch.randperm(len(same.k), generator=torch.Generator().manual_seed(0))
    to, inside = order.argsort(), (same.table >= 0) & (same.table < len(order))
    table = torch.where(inside, to[same.table.clamp(0, len(to) - 1)], same.table)
    other = same._replace(k=same.k[order], v=same.v[order], table=table)
    check(first, run(first, RULES[name][0]))
    monkeypatch.setattr(paged, "_made", None)  # no layout is made but by what was recorded
    check(other, run(other, RULES[name][0]))
    k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (other.k, other.v))  # shorter sequences see other keys
    used, table = [n - (n > 60) for n in other.used], other.table.clamp(0, len(k) - 1)
    shorter = other._replace(used=used, table=table, k=k, v=v)
    found = run(shorter, RULES[name][0])
    monkeypatch.undo()
    torch.testing.assert_close(found, run(shorter, RULES[name][0]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("devices", [{"cuda"}, {"cpu"}], ids=["copied", "in place"])
def test_compiled_for_any_lengths(devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "IN_PLACE", devices)
    torch._dynamo.reset()
    frames = CompileCounter()

    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, used: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        pages = gs.Pages(table, used, 64)
        shared = gs.device_layout(q, k, v, gs.PackedSequences(cu, pages=pages, pattern=gs.Causal()), layout="bshd")
        out, lse = gs.attention(q, k, v, shared, layout="bshd", return_lse=True)
        return out + 0 * gs.attention(q, k, v, shared, layout="bshd"), lse

    compiled = torch.compile(step, fullgraph=True, backend=frames)
    draw = random.Random(3)
    for lengths in ([(1, 200), (3, 100), (4, 4)], [(0, 3), (8, 129), (0, 192)], [(1, 1), (1, 64), (6, 65)]):
        case = drawn(draw, "causal", page=64, lengths=lengths, sizes=(8, 8))
        case = case._replace(table=torch.nn.functional.pad(case.table, (0, 9))[:, :8].contiguous())
        rows, P = 8, 40
        k, v = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, P - len(x)), value=torch.nan) for x in (case.k, case.v)
        )
        found = compiled(case.q[:rows], k, v, torch.tensor(case.cu), torch.tensor(case.used), case.table)
        check(case._replace(out=case.out[:rows], lse=case.lse[:, :rows]), found)
    assert frames.frame_count == 1


def test_out_is_written_and_max_k_is_the_most_that_is_looked_at() -> None:
    case = usual(random.Random(4))
    out = torch.full_like(case.out, torch.nan)
    found, lse = run(case, gs.Causal(), out=out, max_k=200)
    assert found is out
    check(case, (out, lse))
    with pytest.raises(ValueError, match=r"seqused_k must be in \[0, 192\], the room of block_table; got 0 to 200"):
        run(case, gs.Causal(), max_k=192)
    assert (run(case, gs.SlidingWindow(None, -1), max_k=np.int64(200))[0][case.cu[-2] : case.cu[-1]] == 0).all()


def test_a_pool_of_more_than_2_31_elements() -> None:
    """Memory that nobody touches is not there."""
    P, size = 2**31 // (64 * 2 * 64) + 5, 64
    k, v = (torch.empty(P, size, 2, 64, dtype=torch.float16) for _ in range(2))
    assert k.numel() > 2**31
    g = torch.Generator().manual_seed(0)
    table = torch.tensor([[P - 1, 1, P - 2]])
    for x in (k, v):
        x[table[0]] = torch.randn(3, size, 2, 64, generator=g).half()
    q = torch.randn(2, 2, 64, generator=g).half()
    found = gs.varlen(q, k, v, [0, 2], seqused_k=[150], block_table=table, pattern=gs.Causal())
    of = [x[table[0]].flatten(0, 1)[:150] for x in (k, v)]
    torch.testing.assert_close(found, gs.attention(q, *of, gs.Causal(), layout="bshd"), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
@pytest.mark.parametrize("T, R, n, P", [(0, 2, 3, 4), (5, 0, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0), (0, 0, 0, 0)])
def test_nothing_to_compute(T: int, R: int, n: int, P: int, sinks: Tensor | None) -> None:
    q, k, v = torch.randn(T, 2, 8), torch.randn(P, 16, 1, 8), torch.randn(P, 16, 1, 4)
    cu, used = torch.tensor([0] * R + [T if R else 0]), torch.zeros(R, dtype=torch.int32)
    table = torch.zeros(R, n, dtype=torch.int32)
    out, lse = gs.varlen(q, k, v, cu, seqused_k=used, block_table=table, sink_logits=sinks, return_lse=True)
    assert out.shape == (T, 2, 4) and (out == 0).all()
    wanted = torch.full((2, T), -torch.inf) if sinks is None else sinks[:, None].expand(2, T)
    assert torch.equal(lse, wanted)
    pages = gs.Pages(table, used, 16)
    said = gs.explain(q, k, v, gs.PackedSequences(cu, pages=pages), layout="bshd")
    assert said.implementation == "nothing" and f"Pages({R} x {n}, 16, pshd)" in str(said)


def test_explained(in_place: list[paged.PagedLayout]) -> None:
    case = usual(random.Random(5))
    found = gs.explain(case.q, case.k, case.v, packed(case), layout="bshd")
    assert found.implementation == "blocked" and len(found.parts) == 2
    assert "Pages(7 x" in str(found) and paged.TILES in str(found)
    paged.IN_PLACE.clear()
    shared = gs.device_layout(case.q, case.k, case.v, packed(case), layout="bshd")
    found = gs.explain(case.q, case.k, case.v, shared, layout="bshd")
    assert not found.parts and paged.COPIES in str(found)


def test_memory_of_the_pool_is_not_copied(in_place: list[paged.PagedLayout]) -> None:
    """k and v of the call over the pool are views of it."""
    case = usual(random.Random(6))
    for how in ("", "phsd", "halves", "beside"):
        k, v = (laid(x, how) for x in (case.k, case.v))
        sequences = packed(case, page_layout="phsd" if how == "phsd" else "pshd")
        options = AttentionOptions(layout="bshd")
        for over, copies in [paged.paged_call(case.q, k, v, sequences, options).requests]:
            a = over.arguments
            assert a.k.data_ptr() == k.data_ptr() and a.v.data_ptr() == v.data_ptr()
            assert copies.arguments.k.shape[2] <= 64 * len(case.used)


q, kv, cu = torch.zeros(6, 4, 8), torch.zeros(3, 16, 2, 8), torch.tensor([0, 2, 6])
table, used = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([30, 40])
RIGHT: dict[str, Any] = {"seqused_k": used, "block_table": table}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no lengths": ({"seqused_k": None}, "seqused_k must be given with block_table"),
    "edges of keys": ({"cu_seq_k": cu}, "cu_seq_k must be None with block_table; got shape"),
    "no pages": ({"k": kv[0]}, "k must be a tensor of pages, of 4 dimensions of packed sequences; got shape"),
    "pages without a table": ({"block_table": None}, "k must be a tensor .positions, heads, size.*with block_table"),
    "table of floats": ({"block_table": table.float()}, r"block_table must be a tensor \(sequences, pages of each\)"),
    "table of one dimension": ({"block_table": table[0]}, r"block_table must be a tensor \(sequences, pages of each\)"),
    "table of fewer": ({"block_table": table[:1], "seqused_k": used[:1]}, "cu_seq_q and pages must tell of as many"),
    "lengths of fewer": ({"seqused_k": used[:1]}, r"seqused_k must be a tensor of one dimension of shape \(2,\)"),
    "lengths over the room": ({"seqused_k": [30, 49]}, r"seqused_k must be in \[0, 48\].*got 30 to 49"),
    "lengths under 0": ({"seqused_k": [-1, 49]}, r"seqused_k must be in \[0, 48\].*got -1 to 49"),
    "no such page": ({"block_table": table + 3}, r"block_table must name pages in \[0, 3\) where keys are seen; got 3"),
    "a negative page": ({"block_table": table - 1}, r"block_table must name pages in \[0, 3\) where .* got -1"),
    "edges": ({"cu_seq_q": torch.tensor([0, 4, 2])}, "cu_seq_q must not decrease"),
    "layout": ({"page_layout": "hpsd"}, 'page_layout must be "pshd", of k'),
    "layout without a table": (
        {"block_table": None, "k": kv[0], "v": kv[0], "page_layout": "phsd", "seqused_k": None},
        'page_layout must be "pshd" without block_table',
    ),
    "heads": ({"k": kv[:, :, :1].expand(3, 16, 3, 8), "v": kv[:, :, :1].expand(3, 16, 3, 8)}, "q's H=4; got G=3"),
    "pages of v": ({"v": kv[:2]}, r"v must have the pages, slots and heads of k, \(3, 16, 2\); got \(2, 16, 2\)"),
    "head size": ({"k": kv[..., :4]}, "k must have the head size of q, D=8"),
    "strides": ({"k": kv.mT.contiguous().mT}, "k must have a last stride of 1; got strides"),
    "type": ({"v": kv.half()}, "v must be a tensor of .* of q's dtype and device, float32 on cpu; got .*float16"),
    "fp8": ({"k": kv.to(torch.float8_e4m3fn)}, "k must be of .*: caches of 8 bits are not computed; got .*float8"),
    "bytes": ({"v": kv.to(torch.uint8)}, "v must be of .*: caches of 8 bits are not computed; got .*uint8"),
    "device": ({"block_table": table.to("meta")}, "block_table must be on q's device, cpu; got"),
    "gradient": ({"k": kv.clone().requires_grad_()}, "must ask for no gradient with pages; call it under"),
    "gradient of sinks": ({"sink_logits": torch.zeros(4).requires_grad_()}, "must ask for no gradient with pages"),
    "sinks": ({"sink_logits": torch.zeros(2)}, r"sink_logits must be a float tensor \(H,\) = \(4,\); got shape \(2,\)"),
    "pattern": ({"pattern": gs.BigBird(64)}, "go by positions alone.*Dilated, Strided.*BigBird.* has no rule"),
    "out": ({"out": q[:5]}, r"out must be a tensor \(6, 4, 8\) of"),
    "most keys": ({"max_k": 2.5}, "max_k must be None or an integer of at least 0"),
    "cap": ({"softcap": -1.0}, "softcap must"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    wrong, message = WRONG[name]
    given = {"q": q, "k": kv, "v": kv, "cu_seq_q": cu, **RIGHT}
    gs.varlen(**given)
    with pytest.raises(ValueError, match=message):
        gs.varlen(**(given | wrong))


def test_what_pages_refuse() -> None:
    pages = gs.Pages(table, used, 16)
    sequences = gs.PackedSequences(cu, pages=pages)
    assert repr(sequences) == "PackedSequences(2, Pages(2 x 3, 16, pshd))"
    shared = gs.device_layout(q, kv, kv, sequences, layout="bshd")
    for pattern in (sequences, shared):
        for name, x in {
            "q_offset": 0, "key_starts": [0], "key_lengths": [3], "alibi_slopes": torch.zeros(4), "merge": "lse",
        }.items():  # fmt: skip
            with pytest.raises(gs.Unsupported, match=f"{name} must be None with pages"):
                gs.attention(q, kv, kv, pattern, layout="bshd", **{name: x})
        with torch.no_grad():
            gs.attention(q.clone().requires_grad_(), kv, kv, pattern, layout="bshd")
        with pytest.raises(gs.Unsupported, match="implementation='triton' cannot compute this problem"):
            gs.attention(q, kv, kv, pattern, layout="bshd", implementation="triton")
    with pytest.raises(ValueError, match=r"k must be pages \(P, page_size, G, size\) of page_size=16 slots; got"):
        gs.attention(q, kv[:, :8], kv[:, :8], sequences, layout="bshd")
    with pytest.raises(ValueError, match=r"k must be pages \(P, page_size, G, size\); got shape \(48, 2, 8\)"):
        gs.attention(q, kv.flatten(0, 1), kv.flatten(0, 1), sequences, layout="bshd")
    with pytest.raises(ValueError, match=r"q must be \(T, H, D\) or \(1, T, H, D\), the queries of all sequences"):
        gs.attention(q.expand(2, 6, 4, 8), kv, kv, sequences, layout="bshd")
    for name, x in {"cu_seq_k": cu, "seqused_k": used}.items():
        with pytest.raises(ValueError, match=f"{name} must be None with pages"):
            gs.PackedSequences(cu, pages=pages, **{name: x})
    with pytest.raises(ValueError, match=r"pages must be Pages or None; got shape \(2, 3\)"):
        gs.PackedSequences(cu, pages=table)  # type: ignore[arg-type]
    with pytest.raises(gs.Unsupported, match="is taken by attention, varlen, device_layout and explain alone"):
        sequences.check(Sizes(1, 4, 2, 6, 48))  # what takes any structure as a pattern
    with pytest.raises(ValueError, match="page_size must be a positive integer; got 0"):
        gs.Pages(table, used, 0)
    with pytest.raises(ValueError, match=r"at most 2\*\*31 - 2\*\*16 keys of a sequence; got 3 pages of 1000000000"):
        gs.Pages(table, used, 10**9)
    in_compiled = torch.compile(
        lambda used: gs.attention(
            q, kv, kv, gs.PackedSequences(cu, pages=gs.Pages(table, used, 16, check=True)), layout="bshd"
        ),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    with pytest.raises(Exception, match="check of Pages must be False in a compiled function"):
        in_compiled(used)


def test_layers_whose_pages_lie_otherwise(in_place: list[paged.PagedLayout]) -> None:
    case = usual(random.Random(7))
    shared = gs.device_layout(case.q, case.k, case.v, packed(case), layout="bshd")
    check(case, gs.attention(case.q, laid(case.k, "halves"), case.v, shared, layout="bshd", return_lse=True))
    with pytest.raises(ValueError, match=r"v must have pages 64 rows apart, as those that pattern was made for; got"):
        gs.attention(case.q, case.k, laid(case.v, "beside"), shared, layout="bshd")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("where", ["copied", "in place"])
def test_a_table_of_bytes_and_more_pages_than_they_count(
    dtype: torch.dtype, where: str, request: pytest.FixtureRequest
) -> None:
    if where == "in place":
        request.getfixturevalue("in_place")
    case = drawn(random.Random(8), "causal", page=64, lengths=[(3, 90), (1, 64)])
    k, v = (torch.cat([x, x.new_full((256 - len(x), *x.shape[1:]), torch.nan)]) for x in (case.k, case.v))
    check(case, run(case._replace(k=k, v=v, table=case.table.clamp(0, 100).to(dtype)), gs.Causal()))
