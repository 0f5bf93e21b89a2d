"""Particles from torch: sums and their gradients against the definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.special import erfc

from gossamer import particles as gp
from gossamer.kernels.radial.gravity import coefficients_of, long_root
from gossamer.particles import fused_torch, in_torch, terms
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
    return in_torch.pair_sums(terms.counted(None), cells, cells.radius, none, none)[:, 0]


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
    found = law.both(s, np)
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


@pytest.mark.parametrize("split", [1e-3, 1.0, 3e3])
def test_units_do_not_matter(split: float) -> None:
    """The powers of a split that the polynomial has are not in float32's range for every unit of length."""
    x, m = torch.rand(200, 3), torch.ones(200)
    law, unit = gp.ShortRangeGravity(0.05, 0.001), gp.ShortRangeGravity(split, split / 50)
    wanted = gp.radial_force(gp.Cells.build(x, law.radius, 1.0), m, law)
    scale = split / 0.05
    found = gp.radial_force(gp.Cells.build(x * scale, unit.radius * (1 + 1e-6), scale), m, unit)
    torch.testing.assert_close(found * scale**2, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
