"""Structure made on a GPU: without waiting for it, in captured graphs, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.bench.latency import captured
from gossamer.layouts.device import block_list_layout, interval_layout, key_list_layout
from gossamer.layouts.gather import expand_gather, queries_of
from gossamer.layouts.walk import KINDS, TileList, Walk, expand
from gossamer.torch import device_arrays
from tests.support.host_reads import nothing_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

B, H, G, N, D = 2, 4, 2, 640, 64
CUDA = torch.device("cuda")


class Structure(NamedTuple):
    """A kind of call, and the tensors that say what is attended in it."""

    shapes: tuple[tuple[int, ...], ...]  # of q, k and v
    draw: Callable[[torch.Generator], list[Tensor]]
    run: Callable[..., Any]


def integers(least: int, most: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(least, most, shape, device=CUDA, generator=generator, dtype=torch.int32)


def edges(sequences: int, most: int, generator: torch.Generator) -> Tensor:
    """(sequences + 1,) ascending from 0 to at most `most`; sequences may be empty."""
    inner = integers(0, most + 1, (sequences,), generator).sort().values
    return torch.cat([inner.new_zeros(1), inner])


SQUARE = ((B, H, N, D), (B, G, N, D), (B, G, N, D))
STEP = ((B, H, 1, D), (B, G, N, D), (B, G, N, D))
PACKED = ((N, H, D), (N, G, D), (N, G, D))
STRUCTURES = {
    "lengths": Structure(
        SQUARE,
        lambda g: [integers(-300, 300, (B,), g), integers(-9, N // 2, (B,), g), integers(-9, N + 50, (B,), g)],
        lambda x, offset, start, end: gs.attention(
            *x, gs.SlidingWindow(100), q_offset=offset, key_starts=start, key_lengths=end, deterministic=True
        ),
    ),
    "union": Structure(
        SQUARE,
        lambda g: [integers(-300, 300, (B,), g), integers(-9, N + 50, (B,), g)],
        lambda x, offset, end: gs.attention(
            *x,
            gs.Strided(70, 40) | gs.SlidingWindow(100, sinks=5),
            q_offset=offset,
            key_lengths=end,
            deterministic=True,
        ),
    ),
    "decoding": Structure(
        STEP,
        lambda g: [integers(0, N + 1, (B,), g)],
        lambda x, end: gs.attention(*x, gs.SlidingWindow(300), q_offset=end - 1, key_lengths=end, deterministic=True),
    ),
    "documents": Structure(
        SQUARE,
        lambda g: [integers(0, 2, (B, N), g).cumsum(1) // 40],
        lambda x, ids: gs.attention(*x, gs.DocumentIds(ids) & gs.Causal(), deterministic=True),
    ),
    "blocks": Structure(
        SQUARE,
        lambda g: [integers(-3, 13, (B, G, N // 64, 5), g), integers(-1, 6, (B, G, N // 64), g)],
        lambda x, lists, counts: gs.attention(*x, gs.BlockIndices(lists, 64, counts) & gs.Causal(), deterministic=True),
    ),
    "keys": Structure(
        SQUARE,
        lambda g: [integers(-9, N + 9, (B, G, N, 50), g), integers(-1, 60, (B, G, N), g)],
        lambda x, lists, counts: gs.attention(*x, gs.Indices(lists, counts) & gs.Causal(), deterministic=True),
    ),
    "varlen": Structure(
        PACKED,
        lambda g: [edges(7, N, g), edges(7, N, g)],
        lambda x, cu_q, cu_k: gs.varlen(*x, cu_q, cu_k, pattern=gs.Causal(), deterministic=True),
    ),
}


def step(structure: Structure, x: list[Tensor], dout: Tensor, data: list[Tensor]) -> list[Tensor]:
    """out, dq, dk and dv."""
    out = structure.run(x, *data)
    return [out.detach(), *torch.autograd.grad(out, x, dout)]


def inputs(structure: Structure, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    x = [torch.randn(s, device=CUDA, dtype=dtype, requires_grad=True) for s in structure.shapes]
    return x, torch.randn(structure.shapes[0], device=CUDA, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", STRUCTURES)
def test_nothing_waits_for_the_device(name: str, dtype: torch.dtype) -> None:
    structure = STRUCTURES[name]
    generator = torch.Generator(CUDA).manual_seed(1)
    x, dout = inputs(structure, dtype)
    step(structure, x, dout, structure.draw(generator))  # compiles
    drawn = [structure.draw(generator) for _ in range(5)]
    torch.cuda.synchronize()
    with nothing_waits():
        for data in drawn:
            step(structure, x, dout, data)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_graph_over_changing_structure(name: str) -> None:
    """One captured graph, replayed over 100 sets of data, gives the bits of eager calls on the same."""
    structure = STRUCTURES[name]
    generator = torch.Generator(CUDA).manual_seed(2)
    x, dout = inputs(structure)
    held = structure.draw(generator)
    graph, results = captured(partial(step, structure, x, dout, held))
    for _ in range(100):
        data = structure.draw(generator)
        want = step(structure, x, dout, data)
        for y, new in zip(held, data, strict=True):
            y.copy_(new)
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_same_bits_every_time(name: str) -> None:
    structure = STRUCTURES[name]
    x, dout = inputs(structure)
    data = structure.draw(torch.Generator(CUDA).manual_seed(4))
    want = step(structure, x, dout, data)
    for _ in range(50):
        found = step(structure, x, dout, [y.clone() for y in data])
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler itself
@pytest.mark.parametrize("way", ["eager", "compiled", "float32"])
def test_the_same_as_on_a_cpu(name: str, way: str) -> None:
    structure = STRUCTURES[name]
    generator = torch.Generator(CUDA).manual_seed(5)
    x, dout = inputs(structure, torch.float32 if way == "float32" else torch.bfloat16)
    there = [y.detach().cpu().double().requires_grad_() for y in x]
    on_gpu = structure
    if way == "compiled":
        torch._dynamo.reset()
        on_gpu = structure._replace(run=torch.compile(structure.run, fullgraph=True))
    for _ in range(3):
        data = structure.draw(generator)
        found = step(on_gpu, x, dout, data)
        want = step(structure, there, dout.cpu().double(), [y.cpu() for y in data])
        for a, b in zip(found, want, strict=True):
            assert torch.allclose(a.cpu().double(), b, atol=0.06, rtol=0.03)


def test_layouts_are_those_of_a_cpu() -> None:
    """Random bounds and lists: the arrays made on a GPU keep what those made on a CPU keep, in both directions."""
    generator = torch.Generator(CUDA).manual_seed(6)
    for round in range(150):
        Q, K = (int(n) for n in torch.randint(1, 500, (2,)))
        lead = (1 + round % 2, 1 + round // 2 % 3)
        lo, hi = (integers(0, K + 1, (*lead, Q), generator).sort(-1).values for _ in range(2))
        hi = torch.maximum(lo, hi)
        T = -(-Q // 64)
        lists, counts = integers(-2, K // 64 + 3, (*lead, T, 4), generator), integers(-1, 6, (*lead, T), generator)
        keys, group = integers(-2, K + 3, (*lead, Q, 11), generator), (1, 16, 32, 64)[round % 4]
        made = [
            [
                interval_layout(lo, hi, K, block_q=64, block_kv=128, xp=device_arrays),
                block_list_layout(lists, counts, lo, hi, Q, K, block=64, xp=device_arrays),
                block_list_layout(lists, None, None, None, Q, K, block=64, xp=device_arrays),
                key_list_layout(keys, None, lo, hi, Q, K, block_q=group, xp=device_arrays),
            ]
            for lo, hi, lists, counts, keys in (
                (lo, hi, lists, counts, keys), (lo.cpu(), hi.cpu(), lists.cpu(), counts.cpu(), keys.cpu())
            )
        ]  # fmt: skip
        for here, there in zip(*made, strict=True):
            for one, other in ((here.rows, there.rows), (here.columns, there.columns)):
                expanded = expand if isinstance(one, Walk) else expand_gather
                assert (expanded(one.on_host()) == expanded(other.on_host())).all()


class WithoutKernels:
    """torch's operations alone, which define what the kernels give."""

    def __getattr__(self, name: str) -> Any:
        return getattr(device_arrays, name)

    def fused(self, like: Tensor) -> None:
        return None


def check_walks(found: Walk, expected: Walk) -> None:
    """The same lists, at the same places but for those of intervals."""
    for kind in KINDS:
        one, other = found.lists[kind], expected.lists[kind]
        assert torch.equal(one.counts, other.counts)
        assert listed(one) == listed(other)
    assert torch.equal(found.lo, expected.lo)
    assert torch.equal(found.hi, expected.hi)


def listed(tiles: TileList) -> list[int]:
    """The entries of all lists, one list after the other."""
    indices = tiles.indices.cpu().numpy()
    _, at = TileList(tiles.starts.cpu().numpy(), tiles.counts.cpu().numpy(), indices).listed()
    return indices[at].tolist()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_lists_of_kernels_are_those_of_array_operations(bounded: bool, counted: bool) -> None:
    """11 calls of 256 lists each: unsorted, repeated, missing, out of range, some of 64 bits, of one block or many."""
    for seed in range(11):
        generator = torch.Generator(CUDA).manual_seed(seed)
        rng = np.random.default_rng(seed)
        Q, K = (int(x) for x in rng.choice([64, 100, 1000, 1472], 2))
        T, C, n = -(-Q // 64), -(-K // 64), int(rng.choice([1, 5, 33, 60]))
        lists = integers(-2, C + 2, (16, 16, T, n), generator)
        anywhere = integers(-(2**31), 2**31 - 1, (16, 16, T, n), generator)
        lists = torch.where(integers(0, 9, lists.shape, generator) == 0, anywhere, lists)
        if seed % 5 == 0:
            lists = lists.long() + (integers(0, 4, lists.shape, generator) == 0).long() * 2**32
        counts = integers(-1, n + 3, (16, 16, T), generator) if counted else None
        lo = hi = None
        if bounded:
            lo, hi = (integers(0, K + 1, (16, 16, Q), generator).sort(-1).values for _ in range(2))
            hi = torch.maximum(lo, hi)
        found, expected = (
            block_list_layout(lists, counts, lo, hi, Q, K, block=64, xp=xp) for xp in (device_arrays, WithoutKernels())
        )
        check_walks(found.rows, expected.rows)
        check_walks(found.columns, expected.columns)


@pytest.mark.parametrize("tile", [(64, 64), (128, 128), (64, 128)])
def test_intervals_of_kernels_are_those_of_array_operations(tile: tuple[int, int]) -> None:
    block_q, block_kv = tile
    for seed in range(20):
        generator = torch.Generator(CUDA).manual_seed(seed)
        Q, K = (int(x) for x in np.random.default_rng(seed).choice([1, 64, 100, 1000, 2500], 2))
        lo, hi = (integers(0, K + 1, (8, 8, Q), generator).sort(-1).values for _ in range(2))
        found, expected = (
            interval_layout(lo, torch.maximum(lo, hi), K, block_q=block_q, block_kv=block_kv, xp=xp)
            for xp in (device_arrays, WithoutKernels())
        )
        check_walks(found.rows, expected.rows)
        check_walks(found.columns, expected.columns)


@pytest.mark.parametrize("heads", [1, 2, 16, 48, 64])
def test_unions_of_kernels_are_those_of_array_operations(heads: int) -> None:
    for seed in range(10):
        generator = torch.Generator(CUDA).manual_seed(seed)
        rng = np.random.default_rng(seed)
        Q, K = (int(x) for x in rng.choice([64, 100, 1000, 3333], 2))
        n = int(rng.choice([1, 5, 100, K]))
        keys = integers(-2, K + 2, (2, 2, Q, n), generator)
        if seed % 3 == 0:
            keys = keys.long() + (integers(0, 4, keys.shape, generator) == 0).long() * 2**32
        counts = integers(-1, n + 3, (2, 2, Q), generator) if seed % 2 else None
        lo = hi = None
        if rng.random() < 0.5:
            lo, hi = (integers(0, K + 1, (2, 1, Q), generator).sort(-1).values for _ in range(2))
        block = int(rng.choice([16, 32, 64])) if heads == 1 else queries_of(heads)
        found, expected = (
            key_list_layout(keys, counts, lo, hi, Q, K, block_q=block, heads=heads, xp=xp, transpose=False).rows
            for xp in (device_arrays, WithoutKernels())
        )
        assert all(torch.equal(a, b) for a, b in zip(found.arrays(), expected.arrays(), strict=True))


@pytest.mark.parametrize("chunk", range(4))
def test_items_of_kernels_are_those_of_array_operations(chunk: int) -> None:
    """The layouts and the comparison are those of the kernels in the interpreter."""
    kernels = pytest.importorskip("tests.kernels.test_structure_kernels")
    for seed in range(chunk, 40, 4):
        rng = np.random.default_rng(seed)
        layout = kernels.draw_layout(rng)
        known: dict[int, Tensor] = {}  # arrays that two kinds of tiles share stay one

        def there(walk: Any, known: dict[int, Tensor] = known) -> Any:
            return walk.with_arrays([known.setdefault(id(x), x.to(CUDA)) for x in walk.arrays()])

        kernels.check_items(layout, rng, there)


def test_layers_of_a_captured_step_share_their_structure() -> None:
    generator = torch.Generator(CUDA).manual_seed(7)
    x, _ = inputs(STRUCTURES["decoding"])
    lengths = integers(1, N + 1, (B,), generator)

    def run() -> list[Tensor]:
        with torch.no_grad():
            made = gs.device_layout(*x, gs.Causal(), q_offset=lengths - 1, key_lengths=lengths)
            return [gs.attention(*x, made) for _ in range(3)]

    graph, results = captured(run)
    for _ in range(20):
        lengths.copy_(integers(1, N + 1, (B,), generator))
        want = run()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
