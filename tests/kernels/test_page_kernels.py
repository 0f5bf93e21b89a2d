"""The kernel that makes the structure of sequences over pages, against the operations of torch that define it.

`PAGE_CASES=4000 TRITON_INTERPRET=1 pytest tests/kernels/test_page_kernels.py -k random` draws more cases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.memo import forget_all
from gossamer.patterns.reach import Reach, Rule
from gossamer.torch import device_arrays, fused_structure, paged
from gossamer.torch.structure import pages, sequences
from gossamer.torch.structure.base import narrow, sorted_edges
from gossamer.torch.structure.fused_pages import fused_tiles
from gossamer.torch.structure.page_tiles import Made, Sequences, listed_tiles, query_tiles
from tests.kernels.test_bound_kernels import draw_edges, draw_reach, extreme, typed
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter
from tests.support.thorough import more
from tests.torch import test_pages
from tests.torch.test_device_structure import RULES

pytest.importorskip("triton")

from gossamer.kernels.structure import pages as page_kernels

CASES = int(os.environ.get("PAGE_CASES", "16" if INTERPRETING else "40"))
WILD = (-1, -(2**31), 2**31 - 1)


class Given(NamedTuple):
    """What `fused_tiles` takes."""

    edges: Tensor
    used: Tensor
    table: Tensor
    reaches: tuple[Reach, ...]
    tile: tuple[int, int]
    facts: tuple[int, ...]
    between: int | None


def draw(rng: np.random.Generator, device: torch.device) -> Given:
    """Sequences over pages, of which tables name some that do not exist."""
    tile = int(rng.choice([32, 64, 64, 96, 128])), int(rng.choice([32, 32, 64, 64, 96, 128]))
    size = int(rng.choice([1, 16, 24, 32, 64, 64, 128, 128, 20]))
    R, n, P = (int(rng.integers(1, most)) for most in (rng.choice([3, 6, 9]), min(16, 200 // size + 3), 30))
    P = 300 if rng.random() < 0.2 else P  # more than the numbers of a table of bytes
    slots, G, ratio = n * size, 2, int(rng.choice([1, 2, 3, 4, 6]))
    T = int(rng.choice([1, rng.integers(1, 20), rng.integers(1, 150)]))
    if rng.random() < 0.6:  # lengths of a usual step
        lengths = rng.choice([0, 1, 1, 3, rng.integers(0, 50)], R)
        edges = np.concatenate([[0], lengths.cumsum()])
        T = max(1, int(edges[-1]) + int(rng.choice([0, 0, 3])))
    else:
        edges = draw_edges(rng, R + 1, T)
    used = rng.integers(0, slots + 1, R) if rng.random() < 0.7 else extreme(rng, slots, R)
    table = rng.integers(0, min(P, 256), (R, n))
    table = np.where(rng.random((R, n)) < rng.choice([0, 0.1]), rng.choice(WILD, (R, n)), table)
    reaches = tuple(
        draw_reach(rng, slots)._replace(step=int(rng.choice([1, 1, 1, 2, 3, 8, 31, 32, 33, 70, slots])))
        for _ in range(int(rng.choice([1, 1, 2, 3])))
    )
    if rng.random() < 0.5:  # a window, which may have sinks and meet them
        left = int(rng.choice([rng.integers(0, slots + 1), max(0, min(slots, int(used.max())) - rng.integers(0, 99))]))
        reaches = (Reach(left, 0), Reach(None, 0, first=int(rng.integers(0, 80))))[: int(rng.integers(1, 3))]
    _, block_kv = tile
    in_place = size % block_kv == 0 and rng.random() < 0.8
    between = size + block_kv * int(rng.choice([0, 0, 1, 3])) if in_place else None
    told = (typed(rng, x, device) for x in (edges, used, table))
    return Given(*told, Rule(reaches).seeing, tile, (T, G * ratio, G, P, size), between)


def by_operations(given: Given) -> tuple[Made, Tensor]:
    """The same by operations, and which tiles have queries."""
    (T, H, G, _, size), (R, n), (block_q, _) = given.facts, given.table.shape, given.tile
    of = Sequences(sorted_edges(given.edges, T), narrow(given.used, 0, n * size), given.reaches, n * size)
    seen = of.seen().view(R, n, size)
    made = listed_tiles(of, seen, given.table, given.tile, given.facts, given.between, False)
    return made, query_tiles(of, T, H // G, block_q).there


def entries(starts: Tensor, counts: Tensor, n: int) -> Tensor:
    """The entries that lists refer to, of n."""
    which = torch.arange(n, device=starts.device)[:, None]
    starts, counts = starts.view(-1), counts.view(-1)
    return ((which >= starts) & (which < starts + counts)).any(1)


def check(given: Given) -> None:
    """All that a list refers to is the same, and so is all else."""
    found, (want, there) = fused_tiles(*given), by_operations(given)
    assert found is not None and torch.equal(found.place, want.place)
    T, H, G, _, _ = given.facts
    for one, other, most in ((found.token, want.token, T), (found.head, want.head, H // G)):
        (rows,) = one.shape
        of_tiles = there.repeat_interleave(rows // len(there))
        assert one.dtype == torch.int32 and torch.equal(one[of_tiles], other[of_tiles])
        assert other.shape == one.shape and bool(((one >= 0) & (one < most)).all())
    assert len(found.parts) == len(want.parts) == 1 + (given.between is not None)
    for one, other in zip(found.parts, want.parts, strict=True):
        assert (one.copied is None) == (other.copied is None)
        for x, y in zip(one.copied or (), other.copied or (), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)
        rows, wanted = one.layout.rows, other.layout.rows
        assert (rows.rows, rows.columns) == (wanted.rows, wanted.columns)
        for x, y in zip(rows.arrays(), wanted.arrays(), strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype == torch.int32
        for kind in ("full", "bits"):
            lists, of_lists = rows.lists[kind], wanted.lists[kind]
            assert torch.equal(lists.starts, of_lists.starts) and torch.equal(lists.counts, of_lists.counts)
            named = entries(lists.starts, lists.counts, len(lists.indices))
            assert torch.equal(lists.indices[named], of_lists.indices[named])
        assert torch.equal(rows.pool_index, wanted.pool_index)
        assert torch.equal(rows.pool[named], wanted.pool[named])


@contextmanager
def small_programs(patch: pytest.MonkeyPatch, rng: np.random.Generator) -> Iterator[None]:
    """Few elements for each program, so that there are many of them."""
    with patch.context() as m:
        m.setattr(page_kernels, "EDGES", (2, int(rng.choice([4, 16]))))
        m.setattr(page_kernels, "TILES", (1, int(rng.choice([8, 32]))))
        m.setattr(page_kernels, "CHUNK", int(rng.choice([256, 1024])))
        m.setattr(page_kernels, "BITS", int(rng.choice([1, 4])))
        m.setattr(page_kernels, "SPLIT", int(rng.choice([1, 1, 3])))
        yield


def draws(numbers: range, monkeypatch: pytest.MonkeyPatch, device: str, small: bool = True) -> None:
    for seed in numbers:
        rng = np.random.default_rng(seed)
        try:
            if small:
                with small_programs(monkeypatch, rng):
                    check(draw(rng, torch.device(device)))
            else:
                check(draw(rng, torch.device(device)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU: kernels make structure, and no number is read."""
    monkeypatch.setattr(device_arrays, "fused", lambda like: fused_structure.kernels)
    for module in (pages, sequences, paged):
        monkeypatch.setattr(module, "is_read", lambda *_: False)
    forget_all()
    yield
    forget_all()


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("chunk", range(4))
def test_random_structures(by_kernels: None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(range(chunk, CASES, 4), monkeypatch, "cpu")


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize("turn", [1, -1])
def test_a_page_that_two_reaches_cover(by_kernels: None, turn: int) -> None:
    """Whichever comes first, it is read where it lies."""
    reaches = (Reach(60, 0), Reach(None, 0, first=45))[::turn]
    edges, used, table = torch.tensor([0, 1]), torch.tensor([100]), torch.tensor([[1, 2]])
    given = Given(edges, used, table, reaches, (64, 64), (1, 2, 1, 3, 64), 64)
    check(given)
    want, _ = by_operations(given)
    over_pool, _ = want.parts
    assert over_pool.layout.rows.bits.counts.flatten().tolist() == [1, 0]


@pytest.mark.skipif(not INTERPRETING, reason="interprets")
@pytest.mark.parametrize(("name", "devices"), [("sinks", {"cpu"}), ("strided", {"cuda"})], ids=["in place", "copied"])
def test_calls(by_kernels: None, name: str, devices: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a key that is new, and of the same key and other numbers, whose structure was recorded."""
    monkeypatch.setattr(paged, "IN_PLACE", devices)
    lengths = [(1, 130), (30, 100), (0, 7), (2, 64)]
    case = test_pages.drawn(random.Random(0), name, page=64, lengths=lengths)
    test_pages.check(case, test_pages.run(case, RULES[name][0]))
    with monkeypatch.context() as m:
        m.setattr(paged, "_made", None)  # no layout is made but by what was recorded
        test_pages.check(case, test_pages.run(case, RULES[name][0]))
        k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (case.k, case.v))  # shorter sequences see other keys
        used, table = [n - (n > 60) for n in case.used], case.table.clamp(0, len(k) - 1).flip(1)
        other = case._replace(used=used, table=table, k=k, v=v)
        found = test_pages.run(other, RULES[name][0])
    monkeypatch.setattr(device_arrays, "fused", lambda like: None)
    forget_all()
    for x, wanted in zip(found, test_pages.run(other, RULES[name][0]), strict=True):
        assert torch.equal(x, wanted)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
def test_in_interpreter() -> None:
    in_interpreter(__file__, "test_random_structures", "test_a_page_that_two_reaches_cover", "test_calls")


COMPILE = f"""{LAUNCHES}
from gossamer.kernels.structure import pages

pages.launch = launch
wide, vector, table = torch.zeros(9, dtype=torch.int64), torch.zeros(8).int(), torch.zeros(8, 11).int()
causal, block = (2**31 - 1, 2**31 - 1, -5, -1, 10, 1, 700, 0), (0, 700, 0, 0, 0, 700, 700, 64)
in_place, copied = (300, 4, 11, 64, 99, 64, 64, 4, 128, 64, 4, 4), (300, 4, 11, 24, 99, 0, 192, 2, 128, 64, 4)
pages.page_tiles(wide, vector, table, in_place, causal, (1,))
pages.page_tiles(vector, wide[:8], table.long(), in_place, causal + block, (3, 1))
pages.page_tiles(vector, vector, table, copied, causal, (1,))
compile_all(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, *more(80)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


def test_shapes_under_a_mode() -> None:
    """There the operator is seen, which tells shapes alone."""
    in_place = set()
    for seed in range(6):
        given = draw(np.random.default_rng(seed), torch.device("cpu"))
        want, _ = by_operations(given)
        with FakeTensorMode() as mode:
            told = (x.new_empty(x.shape, device="cuda") for x in map(mode.from_tensor, given[:3]))
            found = fused_tiles(*told, *given[3:])
        assert found is not None and len(found.parts) == len(want.parts)
        for one, other in zip(tensors(found), tensors(want), strict=True):
            assert one.device.type == "cuda" and (one.shape, one.dtype) == (other.shape, other.dtype)
        in_place.add(given.between is not None)
    assert in_place == {False, True}


def tensors(made: Made) -> Iterator[Tensor]:
    yield from (made.token, made.head, made.place)
    for part in made.parts:
        yield from (*part.layout.rows.arrays(), *(part.copied or ()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("small", [True, False])
def test_random_structures_on_a_gpu(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(range(CASES), monkeypatch, "cuda", small)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("page", [16, 64])
def test_a_graph_reads_lengths_and_tables_again(page: int) -> None:
    n, shape = 640 // page, (2 * 640 // page, page, 2, 64)
    q = torch.randn(600, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    edges, used = torch.tensor([0, 500, 600], device="cuda"), torch.tensor([500, 333], device="cuda")
    table = torch.randperm(2 * n, device="cuda").view(2, n)

    def run() -> tuple[Tensor, ...]:
        given = gs.PackedSequences(edges, pages=gs.Pages(table, used, page), pattern=gs.SlidingWindow(200, sinks=4))
        return gs.attention(q, k, v, gs.device_layout(q, k, v, given, layout="bshd"), layout="bshd", return_lse=True)

    graph, held = captured(run)
    edges.copy_(torch.tensor([3, 90, 580]))
    used.copy_(torch.tensor([640, 501]))
    table.copy_(torch.randperm(2 * n, device="cuda").view(2, n))
    want = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, held, want))
    forget_all()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(device_arrays, "fused", lambda like: None)
        assert all(map(torch.equal, held, run()))
