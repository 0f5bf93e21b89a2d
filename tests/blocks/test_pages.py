"""Pages that are chosen by bounds of scores: `topk_pages`, `PageBounds`, and the mass that is kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.problem import Unsupported
from gossamer.torch import paged
from tests.support.modes import NothingIsRead
from tests.support.processes import INTERPRETING, LAUNCHES, compiled, in_interpreter, triton_on_a_cpu
from tests.support.thorough import more

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Drawn(NamedTuple):
    """A step of a few tokens of each sequence, over a cache that holds NaN where no key is."""

    q: Tensor  # (T, H, D)
    k: Tensor  # (P, size, G, D)
    v: Tensor
    cu: Tensor
    table: Tensor  # (R, n)
    used: Tensor
    slots: list[Tensor]  # of the keys of each sequence


def drawn(seed: int, dtype: torch.dtype, device: str = "cpu") -> Drawn:
    r = random.Random(seed)
    size, G, ratio, D = r.choice([4, 16, 64]), r.choice([1, 2]), r.choice([1, 3, 8]), r.choice([8, 20])
    lengths, n = [r.choice([0, 1, 1, 3]) for _ in range(r.choice([1, 4]))], r.choice([1, 4, 9, 20])
    R = len(lengths)
    used = [r.randint(max(1, length), n * size) for length in lengths]
    used[0] = n * size if R == 1 else 0
    lengths[0] = 1 if R == 1 else 0
    generator = torch.Generator().manual_seed(seed)
    P = R * n + 3
    table = torch.randperm(P, generator=generator)[: R * n].view(R, n)
    k, v = (torch.full((P, size, G, D), torch.nan, dtype=torch.float64) for _ in range(2))
    slots = []
    for s in range(R):
        j = torch.arange(used[s])
        slots.append(table[s, j // size] * size + j % size)
        for x in (k, v):
            x.view(P * size, G, D)[slots[-1]] = torch.randn(used[s], G, D, dtype=torch.float64, generator=generator)
        table[s, -(-used[s] // size) :] = r.choice([-1, P, 0])
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    T = int(cu[-1]) + r.choice([0, 2])  # the last tokens may be of no sequence
    q = torch.randn(T, G * ratio, D, dtype=torch.float64, generator=generator)
    kind = r.choice([torch.int32, torch.int64])
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    told = (x.to(kind).to(device) for x in (cu, table, torch.tensor(used)))
    return Drawn(q, k, v, *told, [x.to(device) for x in slots])


def bounds_of(x: Drawn, page_layout: Any = "pshd") -> gs.PageBounds:
    """The bounds as a cache keeps them, which is filled in chunks."""
    k = x.k.transpose(1, 2) if page_layout == "phsd" else x.k
    made = gs.PageBounds.empty(k, page_layout)
    r = random.Random(len(x.q))
    for slots in x.slots:
        at = 0
        while at < len(slots):
            step = r.choice([1, 5, 40, 200])
            made.update(k, slots[at : at + step], page_layout)
            at += step
    return made


def exact_bounds(x: Drawn) -> tuple[Tensor, Tensor]:
    """(low, high) in loops; 0 of pages without keys."""
    P, size, G, D = x.k.shape
    low, high = torch.zeros(P, G, D, dtype=x.k.dtype), torch.zeros(P, G, D, dtype=x.k.dtype)
    for slots in x.slots:
        for page in {int(s) // size for s in slots}:
            keys = x.k.cpu()[page, [int(s) % size for s in slots if int(s) // size == page]]
            low[page], high[page] = keys.amin(0), keys.amax(0)
    return low, high


def exact_scores(x: Drawn, scale: float) -> tuple[Tensor, Tensor]:
    """(bounds (T, H, n), the largest of each sequence and key head (R, G, n)) in float64, in loops."""
    (T, H, _), (R, n), (_, size, G, _) = x.q.shape, x.table.shape, x.k.shape
    low, high = (y.double() for y in exact_bounds(x))
    q = x.q.double().cpu()
    bounds = torch.full((T, H, n), -torch.inf, dtype=torch.float64)
    largest = torch.full((R, G, n), -torch.inf, dtype=torch.float64)
    for s, (first, end) in enumerate(pairwise(x.cu.tolist())):
        for t in range(first, end):
            for h in range(H):
                for p in range(-(-int(x.used[s]) // size)):
                    g, page = h // (H // G), int(x.table[s, p])
                    one, other = scale * q[t, h] * low[page, g], scale * q[t, h] * high[page, g]
                    bounds[t, h, p] = torch.maximum(one, other).sum()
                    largest[s, g, p] = torch.maximum(largest[s, g, p], bounds[t, h, p])
    return bounds, largest


def check(seed: int, dtype: torch.dtype, device: str = "cpu", *, waits: bool = True) -> None:
    """What is chosen, by its definition; the attention to it; and its mass beside the true one."""
    x, r = drawn(seed, dtype, device), random.Random(f"{seed} options")
    (T, H, D), (R, n), (_, size, G, _) = x.q.shape, x.table.shape, x.k.shape
    layout = r.choice(["pshd", "phsd"])
    scale = r.choice([None, 0.3, -0.4])
    first, local = r.choice([0, 1, 2]), r.choice([1, 2])
    topk = first + local + r.choice([0, 1, 5, 100])
    page_bounds = bounds_of(x, layout)
    for found, wanted in zip((page_bounds.low, page_bounds.high), exact_bounds(x), strict=True):
        assert torch.equal(found.cpu(), wanted)
    told: Any = (x.q, page_bounds, x.cu, x.table, x.used, size)
    options: Any = {"topk": topk, "first": first, "local": local, "scale": scale}
    if waits:
        with NothingIsRead():
            chosen = gs.topk_pages(*told, **options)
    else:
        chosen = gs.topk_pages(*told, **options)
    bounds, largest = exact_scores(x, D**-0.5 if scale is None else scale)
    close = 1e-12 if dtype == torch.float64 else 2e-5
    found = chosen.bounds.double().cpu()
    assert torch.equal(found.isinf(), bounds.isinf())
    assert torch.allclose(found.nan_to_num(neginf=0.0), bounds.nan_to_num(neginf=0.0), atol=close, rtol=close)
    m, left_out = min(topk, n), torch.zeros(T, dtype=torch.bool)
    assert chosen.block_table.shape == (R, G, m)
    for s in range(R):
        there = -(-int(x.used[s]) // size) if x.cu[s + 1] > x.cu[s] else 0
        for g in range(G):
            kept = chosen.chosen[s, g].nonzero().flatten().tolist()
            assert len(kept) == min(m, there)
            assert chosen.block_table[s, g].tolist() == [int(x.table[s, p]) for p in kept] + [-1] * (m - len(kept))
            assert int(chosen.seqused_k[s, g]) == sum(min(size, int(x.used[s]) - p * size) for p in kept)
            tokens = int(x.cu[s + 1] - x.cu[s])
            own = min(there - local, max(0, int(x.used[s]) - tokens) // size)
            always = {*range(min(first, there)), *range(max(0, own), there)}
            assert always <= set(kept) or (len(always) > m and max(always) in kept)
            left_out[x.cu[s] : x.cu[s + 1]] |= not always <= set(kept)
            others = [float(largest[s, g, p]) for p in range(there) if p not in kept]
            free = [float(largest[s, g, p]) for p in kept if p not in always]
            if others and free and always <= set(kept):
                assert min(free) >= max(others) - 1e-4
    k, v = (y.transpose(1, 2) if layout == "phsd" else y for y in (x.k, x.v))
    given: Any = {"pattern": gs.Causal(), "page_layout": layout, "scale": scale, "return_lse": True}
    of_all = gs.varlen(x.q, k, v, x.cu, block_table=x.table, seqused_k=x.used, **given)
    of_some = gs.varlen(
        x.q, k, v, x.cu, block_table=chosen.block_table, seqused_k=chosen.seqused_k, **given
    )  # fmt: skip
    whole = (chosen.bounds == -torch.inf) | chosen.chosen[
        torch.searchsorted(x.cu[1:].contiguous(), torch.arange(T, device=device), right=True).clamp(max=R - 1)
    ].repeat_interleave(H // G, 1)
    nothing_dropped = whole.all(-1).T
    limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    same = nothing_dropped & of_all[1].isfinite()
    assert torch.allclose(of_some[1][same], of_all[1][same], atol=limit)
    assert torch.allclose(of_some[0].transpose(0, 1)[same], of_all[0].transpose(0, 1)[same], atol=limit)
    mass = chosen.kept_mass(of_some[1])
    true = torch.where(of_all[1].isfinite(), (of_some[1].double() - of_all[1].double()).exp(), 1.0)
    assert bool(((mass >= 0) & (mass.double() <= true * (1 + limit))).all())
    assert bool((mass[nothing_dropped] == 1).all()) and not bool(mass[:, left_out].any())


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from triton_on_a_cpu(monkeypatch, paged, "fused_tiles")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("seed", range(6))
    def test_by_kernels(on_a_cpu: None, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_torch(*_: Any, **__: Any) -> Any:
            raise AssertionError("operations of torch computed")

        monkeypatch.setattr(torch.Tensor, "scatter_reduce", by_torch)
        check(seed, dtype)

else:

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("seed", [*range(12), *more(*range(12, 200))])
    def test_choices(seed: int, dtype: torch.dtype) -> None:
        check(seed, dtype, waits=False)

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_by_kernels")


def test_bounds_of_full_pages_and_of_pages_that_begin_anew() -> None:
    k = torch.randn(5, 8, 2, 16)
    bounds = gs.PageBounds.of(k)
    assert torch.equal(bounds.low, k.amin(1)) and torch.equal(bounds.high, k.amax(1))
    k[3, :3] = torch.randn(3, 2, 16)  # another sequence has the page now
    bounds.update(k, torch.tensor([-1, 24, 25, 26, -1]))
    assert torch.equal(bounds.low[3], k[3, :3].amin(0)) and torch.equal(bounds.high[4], k[4].amax(0))


def test_errors() -> None:
    k = torch.randn(5, 8, 2, 16)
    bounds, q = gs.PageBounds.of(k), torch.randn(1, 4, 16)
    table, given = torch.arange(5)[None], {"topk": 3}
    right: Any = (q, bounds, [0, 1], table, [33], 8)
    for at, value, message in (
        (0, q[0], r"q must be a tensor \(T, H, D\)"), (0, q[..., :8], "q must have heads of 16"),
        (0, q[:, :3], "in a multiple of G=2"), (0, q.double(), "q must be a tensor"),
        (1, k, "bounds must be PageBounds"),
        (2, [0, 1, 1], r"cu_seq_q must have R \+ 1 = 2 edges"), (3, table[None], "seqused_k must be a tensor"),
        (4, [1, 2], "seqused_k must be"), (5, 0, "page_size must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gs.topk_pages(*right[:at], value, *right[at + 1 :], **given)
    for name, value, message in (
        ("topk", 0, "topk must be an integer of at least 1; got 0"), ("topk", 2.5, "topk must be an integer"),
        ("topk", 2, "topk must be at least first [+] local = 3"),
        ("first", -1, "first must be an integer of at least 0"), ("local", 0, "local must be an integer of at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gs.topk_pages(*right, **given | {name: value})
    with pytest.raises(Unsupported, match="q must ask for no gradient"):
        gs.topk_pages(q.clone().requires_grad_(), *right[1:], topk=3)
    with pytest.raises(ValueError, match="k must have the pages, heads, size and type of the bounds"):
        bounds.update(k[:4], torch.tensor([0]))
    with pytest.raises(ValueError, match="slots must be"):
        bounds.update(k, torch.tensor([0.5]))
    with pytest.raises(ValueError, match="low and high must be float tensors"):
        gs.PageBounds(k[:, 0], k[:, 0].double())
    with pytest.raises(ValueError, match="page_layout must be"):
        gs.PageBounds.of(k, "hspd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lse must be a tensor of shape \(4, 1\)"):
        gs.topk_pages(*right, **given).kept_mass(torch.zeros(1, 4))


def test_nan_in_a_page_does_not_displace_what_is_always_kept() -> None:
    k = torch.randn(20, 4, 1, 8)
    k[2:18] = torch.nan
    bounds = gs.PageBounds.of(k)
    chosen = gs.topk_pages(torch.randn(1, 1, 8), bounds, [0, 1], torch.arange(20)[None], [79], 4, topk=5)
    assert bool(chosen.chosen[0, 0, [0, 18, 19]].all()) and int(chosen.seqused_k) == 19


COMPILE = """
from gossamer.blocks.triton import page_kernels as module
module.launch = launch
for dtype, size, D in ((torch.bfloat16, 64, 128), (torch.float32, 1, 72)):
    k = torch.zeros(3, size, 2, D, dtype=dtype)
    low, high = torch.zeros(3, 2, D, dtype=dtype), torch.zeros(3, 2, D, dtype=dtype)
    module.update_bounds(k, torch.zeros(2, dtype=torch.int64), low, high)
    told = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    module.score_pages(torch.zeros(1, 8, D, dtype=dtype), low, high, *told, size, 1, 2, 0.1)
compile_all(4)
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    compiled(LAUNCHES + COMPILE, 90, cache=tmp_path)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    for seed in range(12):
        check(seed, dtype, "cuda", waits=False)


@pytest.mark.gpu
@gpu
def test_a_captured_step_chooses_again() -> None:
    """A graph of writes, choice and attention over what lengths and the table are in each replay."""
    from tests.support.host_reads import nothing_waits

    R, n, size, G, H, D = 4, 30, 16, 2, 8, 64
    k, v = (torch.randn(R * n, size, G, D, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(R, H, D, device="cuda").bfloat16()
    table, used = torch.arange(R * n, device="cuda").view(R, n).int(), torch.full((R,), 400, device="cuda")
    cu, bounds = torch.arange(R + 1, device="cuda", dtype=torch.int32), gs.PageBounds.of(k)

    def step() -> tuple[Tensor, Tensor]:
        slots = table.gather(1, ((used - 1) // size)[:, None])[:, 0] * size + (used - 1) % size
        bounds.update(k, slots)
        pages = gs.topk_pages(q, bounds, cu, table, used, size, topk=7)
        given: Any = {"block_table": pages.block_table, "seqused_k": pages.seqused_k, "return_lse": True}
        found = gs.varlen(q, k, v, cu, pattern=gs.Causal(), **given)
        return found[0], found[1]

    step()
    with nothing_waits():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for seed in range(5):
        torch.manual_seed(seed)
        q.copy_(torch.randn_like(q))
        used.copy_(torch.randint(1, n * size, (R,), device="cuda"))
        table.copy_(torch.randperm(R * n, device="cuda").view(R, n))
        low, high = bounds.low.clone(), bounds.high.clone()
        graph.replay()
        captured = [x.clone() for x in held]
        bounds.low.copy_(low), bounds.high.copy_(high)
        for found, wanted in zip(captured, step(), strict=True):
            assert torch.equal(found, wanted)
