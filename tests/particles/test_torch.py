"""Particles from torch: sums and their gradients against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.special import erfc
from torch.autograd import forward_ad

import gossamer as gs
from gossamer import particles as gp
from gossamer.memo import forget_all
from gossamer.particles import fused_torch, in_torch, terms
from gossamer.particles.kernels.radial.gravity import coefficients_of, long_root
from tests.particles import oracle

CASES = [
    (N, d, box, radius, kind)
    for N, d, radius in ((1, 3, 0.5), (33, 1, 0.02), (700, 3, 0.2), (900, 2, 0.07), (257, 3, 0.5))
    for box, kind in zip((None, 1.0, "mixed", 1.0, 1.0), oracle.KINDS, strict=True)
]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def counts(cells: gp.Cells) -> torch.Tensor:
    if fused_torch.serves(cells):
        return fused_torch.count(cells)
    none = cells.x[:, :0]
    return in_torch.pair_sums(terms.counted(None), cells, cells.reach, none, none)[:, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("N", "d", "box", "radius", "kind"), CASES)
def test_sums_are_those_of_the_definition(N: int, d: int, box: Any, radius: float, kind: str, device: str) -> None:
    rng = np.random.default_rng()
    x = oracle.cloud(rng, N, d, kind)
    sizes = tuple((1.0, None, 1.3)[(n + N) % 3] for n in range(d)) if box == "mixed" else box
    cells = gp.Cells.build(torch.as_tensor(x, device=device), radius, sizes)
    inside = oracle.wrapped(x, cells.box).astype(np.float32)
    tree = cKDTree(inside.astype(float), boxsize=[size or 0 for size in cells.box] if any(cells.box) else None)
    wanted = np.array([len(found) for found in tree.query_ball_point(inside.astype(float), radius)])
    unsure = (np.abs(oracle.pairs(inside, cells.box).s / radius**2 - 1) < 1e-6).sum(1)
    if kind == "clustered":  # coordinates larger than the box around them
        unsure = unsure + (np.abs(oracle.pairs(inside, cells.box).s / radius**2 - 1) < 1e-5).sum(1)
    assert (np.abs(counts(cells).cpu().numpy() - wanted) <= unsure).all()

    values, h = rng.standard_normal((N, 6)).astype(np.float32), radius / 3
    error = gp.radial_sum(cells, torch.as_tensor(values, device=device), gp.Gaussian(h)).cpu().numpy()
    error = np.abs(error - oracle.gaussian_sum(inside, cells.box, radius, h, values))
    scale = oracle.gaussian_sum(inside, cells.box, radius, h, np.abs(values))
    assert (error <= 2e-6 * scale + 0.05 * unsure[:, None]).all()

    law = gp.ShortRangeGravity(radius / 5.5, float(rng.choice([0.0, radius / 50])))
    mass = rng.random(N).astype(np.float32)
    force, newton = oracle.gravity(inside, cells.box, law.split, law.softening, mass)
    masses = torch.as_tensor(mass, device=device)
    found = gp.radial_force(cells, masses, law)
    error = np.linalg.norm(found.cpu().numpy() - force, axis=1)
    assert (error <= 1e-4 * newton + 4e-3 * unsure / radius**2).all()
    assert (found == gp.radial_force(cells, masses, law)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 3, 7])
def test_gradients_are_those_of_float64(channels: int, device: str) -> None:
    """On a CPU in float64 they are those of differences (`gradcheck`), and float32 gives the same."""
    box, law, h = (1.0, None, 0.9), gp.ShortRangeGravity(0.06, 0.01), gp.Gaussian(0.1)
    x, v = torch.rand(40, 3, dtype=torch.float64), torch.randn(40, channels, dtype=torch.float64)
    m = torch.rand(40, dtype=torch.float64)

    def density(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gp.radial_sum(gp.Cells.build(x, 0.4, box), v, h)

    def force(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return gp.radial_force(gp.Cells.build(x, 0.4, box), m, law)

    for f, values in ((density, v), (force, m)):
        inputs = [one.clone().requires_grad_() for one in (x, values)]
        if device == "cpu" and channels != 3:
            # The derivative of gravity is that of the law, which sums of its polynomial follow up to 1e-3 of a term.
            assert torch.autograd.gradcheck(f, inputs, eps=1e-7, atol=1e-2 if f is density else 0.2, rtol=1e-3)
        out = f(*inputs)
        weights = torch.randn_like(out)
        wanted = torch.autograd.grad(out, inputs, weights)
        low = [one.detach().to(device, torch.float32).requires_grad_() for one in inputs]
        for asked in ([0, 1], [0], [1]):
            given = [one if n in asked else one.detach() for n, one in enumerate(low)]
            got = torch.autograd.grad(f(*given), [low[n] for n in asked], weights.to(device, torch.float32))
            for a, n in zip(got, asked, strict=True):
                b = wanted[n]
                torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-4 * b.abs().max().item())


def test_what_is_refused_and_what_is_empty() -> None:
    x = torch.rand(9, 3)
    cells = gp.Cells.build(x, 0.1, 1.0)
    with pytest.raises(TypeError, match="values must be real"):
        gp.radial_sum(cells, torch.ones(9, dtype=torch.bool), gp.Gaussian(0.1))
    with pytest.raises(ValueError, match="mass must be a number or"):
        gp.radial_force(cells, x, gp.ShortRangeGravity(0.01))
    none = gp.Cells.build(x[:0], 0.1, 1.0)
    assert gp.radial_sum(none, 1.0, gp.Gaussian(0.1)).shape == (0,)
    assert gp.radial_force(none, 1.0, gp.ShortRangeGravity(0.01)).shape == (0, 3)
    assert gp.radial_sum(cells, x[:, :0], gp.Gaussian(0.1)).shape == (9, 0)
    x, values = x.clone().requires_grad_(), x[:, :0].clone().requires_grad_()
    out = gp.radial_sum(gp.Cells.build(x, 0.1, 1.0), values, gp.Gaussian(0.1))
    dx, dvalues = torch.autograd.grad(out.sum(), (x, values))
    assert out.shape == dvalues.shape == (9, 0) and not dx.any()
    assert gp.radial_sum(gp.Cells.build(x.half(), 0.1), 1.0, gp.Gaussian(0.1)).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [None, 0, 8])
def test_no_particles(capacity: int | None, device: str) -> None:
    """Nothing, of the right shapes and types, which all gradients reach."""
    x, v = (torch.zeros(0, n, device=device, requires_grad=True) for n in (2, 3))
    neighbors = gp.Neighbors.allocate(x, 0.2, (1.0, None), capacity).update(x)
    assert not neighbors.overflow and neighbors.indices.shape == (0, 8 if capacity is None else capacity)
    heads, cells = v[:, None], neighbors.cells
    found = [
        gp.radial_sum(cells, v, gp.Gaussian(0.1)), gp.radial_sum(cells, v[:, 0], gp.Gaussian(0.1)),
        gp.radial_force(cells, v[:, 0], gp.ShortRangeGravity(0.03)),
        gp.neighbor_attention(None, None, v, neighbors, kernel="gaussian", bandwidth=0.1),
        *gp.neighbor_attention(heads, heads, heads, neighbors, return_residual=True),
        gp.neighbor_attention(v, v, v, neighbors, kernel="dot+gaussian", bandwidth=0.1),
    ]  # fmt: skip
    assert [one.shape for one in found] == [(0, 3), (0,), (0, 2), (0, 3), (0, 1, 3), (0, 1), (0, 3)]
    for one in found:
        assert [g.shape for g in torch.autograd.grad(one.sum(), (x, v), retain_graph=True)] == [(0, 2), (0, 3)]
    low = [one.bfloat16() for one in (v, v, v)]
    out, lse = gp.neighbor_attention(*low, neighbors, return_residual=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_lists_without_room(device: str) -> None:
    """Each particle is its own neighbour: every list is cut, and no number is made of it."""
    x, v = torch.rand(9, 2, device=device, requires_grad=True), torch.rand(9, 3, device=device, requires_grad=True)
    neighbors = gp.Neighbors.allocate(x, 0.2, capacity=0)
    assert neighbors.overflow and neighbors.capacity == 0 and neighbors.indices.shape == (9, 0)
    assert (neighbors.counts == gp.Neighbors.allocate(x, 0.2).counts).all()
    for kernel, width in (("dot", None), ("dot+gaussian", 0.1)):
        out = gp.neighbor_attention(v, v, v, neighbors, kernel=kernel, bandwidth=width)
        (gradient,) = torch.autograd.grad(out.sum(), v)
        assert out.isnan().all() and gradient.isnan().all()


def test_numbers_that_are_arrays() -> None:
    """Of any library, without dimensions, as widths and boxes: the same as numbers of Python."""
    x = torch.rand(50, 2)
    for made in (torch.tensor, np.array, np.float64, lambda n: torch.tensor(n, dtype=torch.float64)):
        half, one, small = made(0.5), made(1.0), made(0.125)
        cells = gp.Cells.build(x, half, one)
        assert (cells.radius, cells.box) == (0.5, (1.0, 1.0))
        assert gp.Cells.build(x, 0.1, [one, None]).box == (1.0, None)
        assert gp.Gaussian(small) == gp.Gaussian(0.125)
        assert gp.ShortRangeGravity(small, made(0.0)) == gp.ShortRangeGravity(0.125, 0.0)
        assert gp.RadialKernel(constant, small) == gp.RadialKernel(constant, 0.125)
        lists = gp.Neighbors.allocate(x, half, one)
        wanted = gp.neighbor_attention(x, x, x, lists, kernel="dot+gaussian", bandwidth=0.125, scale=0.5)
        found = gp.neighbor_attention(x, x, x, lists, kernel="dot+gaussian", bandwidth=small, scale=half)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert gp.Cells.build(x, 0.1, torch.tensor([1.0, 2.0])).box == (1.0, 2.0)
    assert gp.Cells.build(x, torch.tensor(1), 3).radius == 1.0
    for wrong in (torch.tensor(0.1, requires_grad=True), torch.tensor(True), torch.tensor([0.1]), np.array(1j), "1"):
        with pytest.raises(TypeError, match=r"h must be a number that is known .* and has no gradient"):
            gp.Gaussian(wrong)
    with pytest.raises(ValueError, match="box must be a positive number, 2 of them"):
        gp.Cells.build(x, 0.1, torch.ones(3))
    with pytest.raises(ValueError, match="h must be positive and finite; got inf"):
        gp.Gaussian(10**400)


def constant(s: Any, xp: Any, a: float) -> Any:
    return a + 0 * s


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself
def test_transforms_are_refused() -> None:
    """By an error that says what there is not; forward mode too."""
    x, v = torch.rand(9, 2), torch.rand(9, 3)
    lists = gp.Neighbors.allocate(x, 0.2)

    def summed(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gp.radial_sum(gp.Cells.build(x, 0.2), v, gp.Gaussian(0.1)).sum()

    def forced(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gp.radial_force(lists.cells, v[:, 0], gp.ShortRangeGravity(0.03)).sum()

    def attended(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gp.neighbor_attention(None, None, v, lists, kernel="gaussian", bandwidth=0.1).sum()

    for f, at in ((summed, 0), (summed, 1), (forced, 1), (attended, 1)):
        axes = tuple(0 if n == at else None for n in range(2))
        given = tuple(one[None] if n == at else one for n, one in enumerate((x, v)))
        for call in (
            lambda f=f, at=at: torch.func.grad(f, at)(x, v),
            lambda f=f, axes=axes, given=given: torch.func.vmap(f, axes)(*given),
        ):
            with pytest.raises(gs.Unsupported, match=r"no rule inside torch\.func .* backward\(\) and autograd"):
                call()
        with forward_ad.dual_level(), pytest.raises(gs.Unsupported, match="no forward-mode derivative"):
            f(*(forward_ad.make_dual(one, one) if n == at else one for n, one in enumerate((x, v))))


@pytest.mark.parametrize("softening", [0.0, 0.02, 1.0])
def test_the_law_is_within_2e_5_of_newtons_force(softening: float) -> None:
    """And its derivative of that of Newton's force."""
    split = 10 ** np.random.default_rng().uniform(-3, 3)
    law = gp.ShortRangeGravity(split, softening * split)
    s = np.linspace(1e-6, law.radius**2, 100_000)
    square = s + law.softening**2
    u = np.sqrt(square) / (2 * split)
    wanted = (erfc(u) + 2 * u * np.exp(-u * u) / np.sqrt(np.pi)) * square**-1.5
    slope = -1.5 * wanted / square - np.exp(-u * u) / (4 * np.sqrt(np.pi) * split**3 * square)
    found = law.formula.both(s, np)
    assert (np.abs(found.value - wanted) <= 2e-5 * square**-1.5).all()
    assert (np.abs(found.slope - slope) <= 2e-5 * 1.5 * square**-2.5).all()
    root = long_root(square, coefficients_of(split))
    np.testing.assert_allclose(found.value, square**-1.5 - root * root, rtol=0, atol=1e-12 * (square**-1.5).max())


@pytest.mark.parametrize("device", DEVICES)
def test_queries_whose_masses_are_nothing(device: str) -> None:
    """Gradients of particles that bring 0, next to others and among themselves: those divide by nothing."""
    x, law = torch.rand(600, 3, device=device), gp.ShortRangeGravity(0.03, 0.001)
    mass, push = torch.rand(600, device=device), torch.randn(600, 3, device=device)
    mass[torch.rand(600, device=device) < 0.05] = 0
    mass[200:300] = 1e-30
    results = []
    for dtype in (torch.float64, torch.float32):
        given = [one.to(dtype).requires_grad_() for one in (x, mass)]
        cells = gp.Cells.build(given[0], 0.17, 1.0)
        total = (gp.radial_force(cells, given[1], law) * push).sum()
        total = total + (gp.radial_sum(cells, given[1], gp.Gaussian(0.05)) * push[:, 0]).sum()
        results.append(torch.autograd.grad(total, given))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_position_that_is_not_finite_leaves_no_number(wrong: float, device: str) -> None:
    x = torch.rand(300, 3, device=device)
    x[7, 1] = wrong
    x.requires_grad_()
    cells = gp.Cells.build(x, 0.2, 1.0)
    for out in (gp.radial_sum(cells, 1.0, gp.Gaussian(0.1)), gp.radial_force(cells, 1.0, gp.ShortRangeGravity(0.03))):
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert out.isnan().all()
        assert gradient.isnan().all()


@pytest.mark.parametrize("skipped", [False, pytest.param(True, id="pairs are skipped")])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_nor_do_gradients_of_values(
    wrong: float, device: str, skipped: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also those of particles without a neighbour, of which kernels, that skip pairs, have the sum 0."""
    if skipped:

        def nothing(self: Any, term: str, runs: Any, *rest: Any, **more: Any) -> tuple[torch.Tensor, ...]:
            """Sums of no pair, times `known`, as the kernels write them."""
            shape = {"sum": (9,), "sum_slopes": (9, 4), "force": (9, 3), "force_slopes": (9, 4)}[term]
            return (runs.points.new_zeros(shape) * runs.known,)

        monkeypatch.setattr(fused_torch, "serves", lambda cells: True)
        monkeypatch.setattr(fused_torch.Sums, "_run", nothing)
        forget_all()
        request.addfinalizer(forget_all)  # calls that are kept run no kernel
    x = torch.rand(9, 3, device=device)
    x[4, 1] = wrong
    for asked in ("v", "xv"):
        for of_force in (False, True):
            x = x.detach().requires_grad_("x" in asked)
            values = torch.ones(9, device=device, requires_grad=True)
            cells = gp.Cells.build(x, 1e-3, 1.0)
            if of_force:
                out = gp.radial_force(cells, values, gp.ShortRangeGravity(1e-4))
            else:
                out = gp.radial_sum(cells, values, gp.Gaussian(1e-3))
            given = [values, x] if "x" in asked else [values]
            for one in (out, *torch.autograd.grad(out.sum(), given)):
                assert one.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("box", [None, (1.0, None, 0.9), 1.3])
def test_differences_are_of_positions_wherever_others_are(box: Any, device: str) -> None:
    """Pairs near 0, near the seam and across it, whose differences are far under the last place of their neighbours'
    positions: the force of each on the other is Newton's."""
    sizes = box if isinstance(box, tuple) else (box,) * 3
    for radius in (0.05, 0.2, 0.4):
        law, rng = gp.ShortRangeGravity(radius / 5.5), np.random.default_rng()
        x = np.empty((160, 3), np.float32)
        x[::2] = 10 ** rng.uniform(-6, -0.4, (80, 3))
        x[1::2] = x[::2] * (1 + 1e-5 * rng.uniform(1, 2, (80, 3)))
        for axis, size in enumerate(sizes):
            if size is not None:
                turned = rng.random(80) < 0.5  # in pairs, which are far enough from 0 there
                place = size - 10 ** rng.uniform(-4, -0.4, 80)
                x[::2, axis] = np.where(turned, place, x[::2, axis])
                x[1::2, axis] = np.where(turned, place + 3e-6, x[1::2, axis])
                across = rng.random(80) < 0.1
                x[::2, axis] = np.where(across, size - 1e-6, x[::2, axis])
                x[1::2, axis] = np.where(across, 1e-6, x[1::2, axis])
        given = torch.as_tensor(x, device=device)
        found = gp.radial_force(gp.Cells.build(given, radius, box), 1.0, law).double().cpu()
        places = given.cpu().double()
        step = places[None] - places[:, None]
        for axis, size in enumerate(sizes):
            if size is not None:  # as float32 has it
                step[..., axis] -= float(np.float32(size)) * (step[..., axis] / size).round()
        s = (step * step).sum(-1)
        near = (s > 0) & (s <= radius**2)
        R = torch.where(near, s, 1.0).sqrt()
        u = R / (2 * law.split)
        w = torch.where(near, (torch.erfc(u) + 2 * u * torch.exp(-u * u) / np.pi**0.5) / R**3, 0.0)
        wanted = (w[..., None] * step).sum(1)
        newton = (torch.where(near, R**-2, 0.0)).sum(1)
        assert ((found - wanted).norm(dim=1) <= 3e-5 * newton).all(), radius


@pytest.mark.parametrize("split", [1e-3, 1.0, 3e3])
def test_units_do_not_matter(split: float) -> None:
    """The powers of a split that the polynomial has are not in float32's range for every unit of length."""
    x, m = torch.rand(200, 3), torch.ones(200)
    law, unit = gp.ShortRangeGravity(0.05, 0.001), gp.ShortRangeGravity(split, split / 50)
    wanted = gp.radial_force(gp.Cells.build(x, law.radius, 1.0), m, law)
    scale = split / 0.05
    found = gp.radial_force(gp.Cells.build(x * scale, unit.radius * (1 + 1e-6), scale), m, unit)
    torch.testing.assert_close(found * scale**2, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
