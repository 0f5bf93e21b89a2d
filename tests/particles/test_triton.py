"""Triton's kernels of particles, against the definitions; and what surrounds the kernels of sums, launch by launch.

`PARTICLE_CASES=400 TRITON_INTERPRET=1 pytest tests/particles/test_triton.py -k random` draws more cases.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import particles as gp
from gossamer.kernels.launch import EDGE, Operand, compact, operand_of
from gossamer.memo import forget_all
from gossamer.particles import fused_torch, groups, in_torch, listed_torch
from gossamer.particles.cells import times_unit
from gossamer.particles.geometry import BITS, hilbert_keys, on_the_grid, unit_of, wrapped
from gossamer.particles.kernels import compiled as kernels
from gossamer.particles.kernels.radial.configurations import RadialConfig
from gossamer.torch.bind import bind
from tests.particles import units
from tests.support.launches import poisoned
from tests.support.processes import INTERPRETING, compiled, in_interpreter
from tests.support.thorough import more

pytest.importorskip("triton")

from gossamer.particles.triton import launch

CASES = int(os.environ.get("PARTICLE_CASES", "12" if INTERPRETING else "24"))
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
interprets = pytest.mark.skipif(not INTERPRETING, reason="interprets")


def cloud(draw: random.Random, N: int, d: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(draw.randrange(2**30))
    x = torch.randn(N, d, generator=g, dtype=torch.float64)
    kind = draw.choice(["normal", "equal", "line", "clustered", "lattice"])
    if kind == "equal":
        x[:] = x[0].clone()
    elif kind == "line":
        x[:, 0] = 0.25
    elif kind == "clustered":
        x = 3 + 1e-3 * x
    elif kind == "lattice":  # on the edges of cells
        x = (4 * x).round() / 4
    return x.to(dtype)


def definition_of_keys(x: Tensor, box: Any, unit: float) -> np.ndarray:
    """The places along the curve, by numpy."""
    with np.errstate(all="ignore"):
        wide = x.dtype == torch.float64
        y = x.to(torch.float64 if wide else torch.float32).numpy() * (np.float64 if wide else np.float32)(unit)
        parts = wrapped(list(y.T), box, np)
        place = [one.astype(np.int32) for one in on_the_grid(parts, box, BITS[y.shape[1]], np)]
        return hilbert_keys(place, BITS[y.shape[1]], np)


def check(x: Tensor, box: Any, unit: float) -> None:
    """Keys, order, positions and boxes are the definition's, bit for bit."""
    prepared = launch.cells(operand_of(x), box, unit)
    wanted = in_torch.runs_of(x, box, unit)
    wanted = wanted.order, wanted.points, wanted.low, wanted.high, *wanted.tree, wanted.known
    names = *prepared.launch.results, "keys"
    with poisoned():
        *found, keys = bind(prepared._replace(launch=replace(prepared.launch, results=names)), x.device, ("x",))(x)
    assert np.array_equal(keys.numpy(), definition_of_keys(x, box, unit))
    for name, one, other in zip(names, found, wanted, strict=False):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=name)


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("part", range(4))
def test_random_cells(part: int) -> None:
    for seed in range(part, CASES, 4):
        draw = random.Random(seed)
        d, dtype = draw.choice([1, 2, 3]), draw.choice(TYPES)
        N = draw.choice([1, 2, 31, 256, 257, 700])
        x = cloud(draw, N, d, dtype)
        box = tuple(draw.choice([None, 1.0, 1.3, 4.0]) for _ in range(d))
        unit = 2.0 ** draw.choice([0, 0, -1, 2])
        if dtype in TYPES[:2] and draw.random() < 0.4:  # the same in another unit of length
            n = draw.randrange(-60, 61)
            x, unit = x * 2.0**n, unit * 2.0**-n
        if draw.random() < 0.3:
            for _ in range(draw.choice([1, 3])):
                x[draw.randrange(N), draw.randrange(d)] = draw.choice([math.nan, math.inf, -math.inf])
        if draw.random() < 0.3:
            x = torch.stack([x, x], -1)[..., 0].T.contiguous().T
        try:
            check(x, box, unit)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {tuple(x.shape)} {x.dtype}, {box}, {unit}")
            raise


@interprets
def test_groups_of_blocks() -> None:
    """More than 8192 particles: several boxes of the last level, the last of them of a few particles."""
    check(torch.rand(8192 + 300, 2), (1.0, None), 1.0)


@interprets
def test_no_unit_of_length_changes_a_bit() -> None:
    for setting in (units.SETTINGS[0], units.SETTINGS[1]):
        x = torch.from_numpy(units.cloud(seed=3).x)
        first = None
        for n in units.FEW:
            given, radius = x * 2.0**n, units.RADIUS * 2.0**n
            box = units.scaled(setting.box, n) or (None,) * 3
            prepared = launch.cells(operand_of(x), times_unit(box, unit_of(radius)), unit_of(radius))
            found = bind(prepared, x.device, ("x",))(given)
            first = first or found
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


@interprets
def test_names_and_items() -> None:
    g = torch.Generator().manual_seed(1)
    N, T, C, M = 150, 3, 128, 5
    order = torch.randperm(N, generator=g, dtype=torch.int32)
    counts = torch.tensor([0, 200, 65], dtype=torch.int32)
    columns = torch.randint(-1, N, (T * C,), generator=g, dtype=torch.int32)
    sizes = torch.randint(0, 8, (N,), generator=g, dtype=torch.int32)
    for known in (1.0, math.nan):
        arrays = {"order": order, "known": torch.tensor([known]), "columns": columns, "counts": counts, "sizes": sizes}
        b = launch.Builder({name: operand_of(x) for name, x in arrays.items()})
        prepared = b.done(*launch.add_names(b, M))
        with poisoned():
            keys, particles = bind(prepared, order.device, tuple(arrays))(*arrays.values())
        place = torch.arange(64 * T, dtype=torch.int32)
        wanted = groups.named(order, sizes > M, counts > C, torch.tensor(known == 1), place, torch)
        assert torch.equal(particles, wanted)
        assert torch.equal(keys, torch.where(columns < 0, -1, order[columns.clamp(0, N - 1)]))
    lists = groups.Groups(columns, keys, *[columns] * 3, counts, counts, particles)
    for H in (1, 3):
        wanted = groups.items_of(lists, torch.arange(H * T, dtype=torch.int32), torch)
        with poisoned():
            found = bind(launch.items_of(operand_of(counts), C, H), order.device, ("counts",))(counts)
        assert tuple(wanted) == listed_torch.ITEMS
        assert all(torch.equal(a, b) for a, b in zip(found, wanted.values(), strict=True))


def stand_in(config: RadialConfig) -> Any:
    """The kernel of sums of a Gaussian, from its own arguments, as operations."""

    def run(records: Tensor, clusters: Tensor, blocks: Tensor, groups: Tensor, order: Tensor, known: Tensor,
            out: Tensor, *numbers: float) -> None:  # fmt: skip
        assert records.shape == (len(clusters) * 8, config.width) and len(blocks) * 32 == len(clusters)
        assert out.shape == (len(order), config.outputs) and len(groups) == -(-len(blocks) // 32)
        sizes, (square, along, slope) = numbers[:3], (numbers[3], *numbers[5:7])
        x, brought = records[:, :3].double(), records[:, 3 : 3 + config.payload].double()
        step = x[None] - x[:, None]
        for axis, size in enumerate(sizes):
            if size < 1e38:
                step[..., axis] -= size * (step[..., axis] / size).round()
        s = (step * step).sum(-1)
        f = torch.where(s <= square, torch.exp2(along * s), 0.0)
        if config.term == "sum":
            made = f @ brought
        else:
            values, g = brought.split(config.channels, 1)
            both = slope * f * (g @ values.T + values @ g.T)
            made = (both[..., None] * step).sum(1)
            made = torch.cat([made, f @ g], 1) if config.values else made
        out[order.long()] = (made[: len(order)] * known.double()).float()

    return run


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on a CPU take the launches of a GPU, whose kernels of Triton are interpreted."""
    forget_all()
    monkeypatch.setattr(fused_torch, "_able", lambda device: True)
    monkeypatch.setattr(fused_torch, "available", lambda device: True)
    monkeypatch.setattr(kernels, "radial", stand_in)
    yield
    forget_all()


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize(("d", "channels"), [(3, None), (2, 1), (3, 3), (1, 6)])
def test_sums_by_launches(d: int, channels: int | None) -> None:
    """Sums and all their gradients: the number of channels of a launch, other strides, a number for all."""
    g = torch.Generator().manual_seed(d)
    box, h = (1.0, None, 0.9)[:d], gp.Gaussian(0.1)
    x = torch.rand(300, d, generator=g)
    values = torch.randn((300,) if channels is None else (300, channels), generator=g)
    weights = torch.randn(values.shape, generator=g)
    for asked in ("", "x", "v", "xv"):
        found = []
        for dtype in (torch.float32, torch.float64):  # which no kernel takes
            one = x.to(dtype).requires_grad_("x" in asked)
            v = torch.stack([values, values], -1).to(dtype)[..., 0].requires_grad_("v" in asked)
            out = gp.radial_sum(gp.Cells.build(one, 0.3, box), v, h)
            given = [y for y in (one, v) if y.requires_grad]
            found.append([out, *torch.autograd.grad(out, given, weights.to(dtype))] if given else [out])
        for a, b in zip(*found, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * b.abs().max().item())
    assert fused_torch._sorting.values() and fused_torch._sums.values()
    cells = gp.Cells.build(x, 0.3, box)
    for number in (2, 2.0, 3.5):
        torch.testing.assert_close(gp.radial_sum(cells, number, h), number * gp.radial_sum(cells, 1, h))
    out = gp.radial_sum(cells, values, h)
    out += 1  # no view that was made without gradients


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("on_kernels")
def test_a_position_that_is_not_finite() -> None:
    x = torch.rand(40, 2)
    x[3, 1] = math.nan
    x.requires_grad_()
    out = gp.radial_sum(gp.Cells.build(x, 1e-3), 1.0, gp.Gaussian(1e-3))
    assert out.isnan().all() and torch.autograd.grad(out.sum(), x)[0].isnan().all()


@interprets
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("n", [0, -5, 4, 42, -42])
def test_factors_of_forces(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of masses by the step that makes records, of sums by the kernel: no operation around them, and in any unit."""
    x, mass = torch.rand(40, 2), torch.rand(40)
    law = gp.ShortRangeGravity(0.05 * 2.0**n, 0.001 * 2.0**n)
    cells = gp.Cells.build(x * 2.0**n, 0.3 * 2.0**n)
    scaled = law.scaled(cells.within(law.radius).unit)

    def kernel(config: RadialConfig) -> Any:
        def run(records: Tensor, *rest: Any) -> None:
            _, _, _, order, known, out, *numbers = rest
            step = records[None, :, :3] - records[:, None, :3]
            s = (step * step).sum(-1)
            near = (s > 0) & (s <= numbers[3])
            w = torch.where(near, scaled.formula.of(torch.where(near, s, 1.0), torch), 0.0) * records[:, 3]
            out[order.long()] = (w[..., None] * step).sum(1)[: len(order)] * known * numbers[4]

        return run

    monkeypatch.setattr(kernels, "radial", kernel)
    found = gp.radial_force(cells, mass, law)
    wide = gp.Cells.build(x.double() * 2.0**n, 0.3 * 2.0**n)
    wanted = gp.radial_force(wide, mass.double(), law)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_launches_of_a_sum() -> None:
    """Six: extents, keys, one call that sorts, boxes; records and sums. Of gradients two more."""
    for box in ((None,) * 3, (1.0,) * 3):
        made = launch.cells(Operand("float32", (64_000, 3), (3, 1)), box, 1.0).launch
        assert [step.kernel.name for step in made.steps] == ["extents", "keys", "sorted_places", "boxes"]
        assert [step.kernel.implementation == EDGE for step in made.steps] == [False, False, True, False]
        shapes = {"points": (3, 2000, 32), "order": (64_000,), "clusters": (8000, 8), "blocks": (250, 8)}
        shapes |= {"groups": (8, 8), "known": (1,), "a": (64_000,), "b": (64_000,)}
        operands = {
            name: Operand("int32" if name == "order" else "float32", shape, compact(shape))
            for name, shape in shapes.items()
        }  # fmt: skip
        sums = fused_torch.Sums(gp.Gaussian(0.1), 0.3, box)
        for term in ("sum", "sum_slopes", "force", "force_slopes", "count"):
            given = {"sum": 1, "force": 1, "count": 0}.get(term, 2)
            few = dict(list(operands.items())[: len(operands) - 2 + given])
            steps = sums._described(term, few, True).launch.steps
            assert [step.kernel.name for step in steps] == ["records", "radial"]


COMPILE = """
import sys
from gossamer.kernels import relaunch
from gossamer.kernels.launch import Builder, Operand, compact
from gossamer.particles.triton import launch
sm = int(sys.argv[1])
def operand(dtype, *shape):
    return Operand(dtype, shape, compact(shape))
def made(prepared):
    for step in prepared.launch.steps:
        if step.kernel.implementation == launch.MODULE:
            programs = relaunch.Programs(*step.kernel.key)
            function = getattr(launch, step.kernel.name).args[0]
            yield relaunch.compiled_for(function, programs.signature, dict(programs.options), sm)
for dtype, d in (("float32", 3), ("float64", 1), ("float64", 3), ("bfloat16", 2)):
    box = (1.0, None, 2.0)[:d]
    for compiled in made(launch.cells(operand(dtype, 64000, d), box, 0.5)):
        # What the definition rounds twice no instruction rounds once.
        assert not any(word in compiled.asm["ptx"] for word in ("fma.rn", "div.full", "div.approx"))
N, T, C = 1000, 16, 192
names = {"order": N, "columns": T * C, "counts": T, "sizes": N}
b = Builder({"known": operand("float32", 1), **{name: operand("int32", n) for name, n in names.items()}})
assert len(list(made(b.done(*launch.add_names(b, 40))))) == 1
assert len(list(made(launch.items_of(operand("int32", T), C, 4)))) == 1
for brought, width in (((), 4), (("a",), 4), (("a", "b"), 8)):
    b = Builder({
        "points": operand("float32", 3, 32, 32), "order": operand("int32", N), "a": operand("float32", N, 1),
        "b": Operand("float32", (N, 3), (0, 1)),
    })
    assert len(list(made(b.done(launch.add_records(b, brought, width))))) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, *more(90)])
def test_kernels_compile(sm: int, tmp_path: Path) -> None:
    compiled(COMPILE, sm, cache=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="is interpreting")
@pytest.mark.parametrize("part", range(3))
def test_in_interpreter(part: int) -> None:
    sums = [
        "test_sums_by_launches",
        "test_factors_of_forces",
        "test_a_position_that_is_not_finite",
        "test_names_and_items",
    ]
    cells = ["test_names_and_items", "test_groups_of_blocks", "test_no_unit_of_length_changes_a_bit"]
    tests = {0: ["test_random_cells"], 1: sums, 2: cells}
    in_interpreter(__file__, *tests[part])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_on_a_gpu_as_on_a_cpu(d: int, dtype: torch.dtype) -> None:
    """All bits of what `Cells.build` makes; a repeated build waits for nothing."""
    from tests.support.host_reads import nothing_waits

    for N, box in ((64_000, 1.0), (8193, None), (100, None), (300_000, [1.0, None, 1.3][:d])):
        x = torch.randn(N, d, dtype=torch.float64).to(dtype)
        wanted = gp.Cells.build(x, 0.1, box).runs
        x = x.cuda()
        gp.Cells.build(x, 0.1, box)
        torch.cuda.synchronize()
        with nothing_waits():
            found = gp.Cells.build(x, 0.1, box).runs
        flat = zip((*found[:4], *found.tree, found.known), (*wanted[:4], *wanted.tree, wanted.known), strict=True)
        assert all(torch.equal(a.cpu(), b) for a, b in flat)
