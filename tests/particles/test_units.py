"""Particles from torch in any unit of length: results differ by a power of two, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import particles as gp
from gossamer.particles.geometry import times, unit_of
from tests.particles import units
from tests.particles.test_own_functions import gaussian, plummer
from tests.particles.test_torch import DEVICES
from tests.particles.units import Result

N = 60


def numbers(x: Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def gradients(call: Callable[..., Any], *given: Tensor, weights: Tensor, names: str, powers: Any) -> dict[str, Result]:
    """Results and their gradients, with the power of length of the first."""
    inputs = [one.clone().requires_grad_() for one in given]
    out = call(*inputs)
    found = {names: Result(numbers(out), powers[0])}
    for one, gradient, power in zip("xv", torch.autograd.grad(out, inputs, weights), powers[1:], strict=True):
        found[f"{names} {one}"] = Result(numbers(gradient), power)
    return found


def sums(c: units.Cloud, setting: units.Setting, n: int, device: str) -> dict[str, Result]:
    x, values, mass, of_sums, of_forces = (torch.as_tensor(one, device=device) for one in c)
    x, scale = x * 2.0**n, 2.0**n
    box, radius = units.scaled(setting.box, n), units.RADIUS * scale

    def force(law: gp.ShortRangeGravity | gp.RadialKernel, radius: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, mass: gp.radial_force(gp.Cells.build(x, radius, box), mass, law)

    def total(law: gp.Gaussian | gp.RadialKernel) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, values: gp.radial_sum(gp.Cells.build(x, radius, box), values, law)

    split = radius / 5.5
    law = gp.ShortRangeGravity(split, setting.softening * split)
    small = gp.ShortRangeGravity(units.NARROW * split, setting.softening * units.NARROW * split)
    found = {}
    for name, kernel in (
        ("sum", gp.Gaussian(units.H * scale)),
        ("narrow sum", gp.Gaussian(units.NARROW * scale)),
        ("own sum", gp.RadialKernel(gaussian, units.H * scale)),
    ):
        found |= gradients(total(kernel), x, values, weights=of_sums, names=name, powers=(0, -1, 0))
    for name, one in (("force", law), ("narrow force", small)):
        found |= gradients(force(one, radius), x, mass, weights=of_forces, names=name, powers=(-2, -3, -2))
    own = gp.RadialKernel(gaussian, units.H * scale)
    return found | gradients(force(own, radius), x, mass, weights=of_forces, names="own force", powers=(1, 0, 1))


def test_sums_and_forces_of_any_unit() -> None:
    c = units.cloud()
    for place, setting in enumerate(units.SETTINGS):
        first = sums(c, setting, 0, "cpu")
        for n in units.EXPONENTS[place :: len(units.SETTINGS)]:
            units.check(sums(c, setting, n, "cpu"), first, n)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("setting", units.SETTINGS[:2])
def test_kernels_of_any_unit(setting: units.Setting) -> None:
    """And the numbers are those of the operations."""
    c = units.cloud()
    first = sums(c, setting, 0, "cuda")
    for n in units.FEW:
        units.check(sums(c, setting, n, "cuda"), first, n)
    for name, right in sums(c, setting, 0, "cpu").items():
        size = np.abs(right.value)  # where terms cancel, their rounding is that of the largest
        near = 2e-4 * size.max(axis=-1, keepdims=True) + 1e-6 * size.max()
        assert (np.abs(first[name].value - right.value) <= near).all(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", units.SETTINGS[:2])
def test_lists_and_attention_of_any_unit(setting: units.Setting, device: str) -> None:
    """On a GPU in bfloat16 too, which kernels compute."""
    c = units.cloud()
    q, k, v, dout = torch.randn(4, N, 2, 64, device=device).unbind()
    dtypes = [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]

    def results(n: int, dtype: torch.dtype) -> dict[str, Result]:
        x = torch.as_tensor(c.x, device=device) * 2.0**n
        lists = gp.Neighbors.allocate(x, units.RADIUS * 2.0**n, units.scaled(setting.box, n))
        found = {"lists": Result(lists.update(x).indices.cpu().numpy(), 0)}
        found["counts"] = Result(lists.counts.cpu().numpy(), 0)

        def attend(x: Tensor, v: Tensor) -> Tensor:
            lists = gp.Neighbors.allocate(x, units.RADIUS * 2.0**n, units.scaled(setting.box, n))
            out: Tensor = gp.neighbor_attention(
                q.to(dtype), k.to(dtype), v, lists, kernel="dot+gaussian", bandwidth=units.H * 2.0**n
            )
            return out

        given = {"weights": dout.to(dtype), "names": "attention", "powers": (0, -1, 0)}
        return found | gradients(attend, x, v.to(dtype), **given)

    for dtype in dtypes:
        first = results(0, dtype)
        for n in units.EXPONENTS[::4] if device == "cpu" else units.FEW:
            units.check(results(n, dtype), first, n, exact=device == "cpu")


def of_pairs(x: Tensor, mass: Tensor, law: gp.ShortRangeGravity, size: bool = False) -> Tensor:
    """The force of an open box from its definition; with `size` the sums of the sizes of its terms."""
    step = x[None] - x[:, None]
    s = (step * step).sum(-1)
    near = (s > 0) & (s <= law.radius**2)
    R = torch.where(near, s + law.softening**2, torch.ones_like(s)).sqrt()
    u = R / (2 * law.split)
    w = torch.where(near, torch.erfc(u) + 2 * u * torch.exp(-u * u) / np.pi**0.5, torch.zeros_like(s))
    unit = step / R[..., None]
    terms = (w / R / R * mass)[..., None] * unit
    return terms.abs().sum(1) if size else terms.sum(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softening", [0.0, 1e-3])
def test_particles_next_to_one_another(softening: float, device: str) -> None:
    """Pairs 1e-6 to 1e-17 splits apart: a force, or its gradient, that float32 has is that of the definition."""
    for split in (1.0, 2.0**40, 2.0**-30):
        law = gp.ShortRangeGravity(split, softening * split)
        rng = np.random.default_rng()
        for distance in 10.0 ** -np.arange(6, 18):
            x = 2 * rng.random((40, 3))
            step = rng.standard_normal(3)
            x[0], x[1] = 0, distance * step / np.linalg.norm(step)
            places = torch.as_tensor((x * split).astype(np.float32), device=device)
            mass = torch.as_tensor(rng.random(40).astype(np.float32), device=device)
            push = torch.as_tensor(rng.standard_normal((40, 3)).astype(np.float32), device=device)
            exact = [one.double().cpu().requires_grad_() for one in (places, mass)]
            wanted = of_pairs(*exact, law)
            size = of_pairs(*exact, law, size=True).detach()
            right = torch.autograd.grad(wanted, exact, push.double().cpu())
            given = [one.clone().requires_grad_() for one in (places, mass)]
            out = gp.radial_force(gp.Cells.build(given[0], law.radius), given[1], law)
            assert not out.isnan().any()
            error = (out.detach().double().cpu() - wanted.detach()).abs()
            held = size < 1e38
            assert (error <= 1e-4 * size + 1e-37)[held].all(), (split, distance)
            assert out.isinf().cpu()[size > 1e39].all()
            dx, dm = (one.double().cpu() for one in torch.autograd.grad(out, given, push))
            rest = torch.arange(40) >= 2
            most = right[0][rest].abs().max() + 1e-37
            if most < 1e38:
                assert ((dx - right[0])[rest].abs() <= 1e-3 * most).all(), (split, distance)
            most = right[0][:2].abs().max()
            if most < 1e37:
                assert ((dx - right[0])[:2].abs() <= 1e-3 * most + 1e-37).all(), (split, distance)
            most = right[1].abs().max()
            if most < 1e37:
                assert ((dm - right[1]).abs() <= 1e-3 * most + 1e-37).all(), (split, distance)


@pytest.mark.parametrize("exponent", [-36, -12, 0, 21, 36])
def test_masses_and_lengths_of_other_units(exponent: int) -> None:
    """Masses of stars in kilograms and of atoms, lengths in metres: sums that float32 has, though parts are not."""
    c, scale = units.cloud(3), 2.0**exponent
    law = gp.ShortRangeGravity(units.RADIUS / 5.5 * scale)
    x = torch.as_tensor(c.x).clone()
    x[:12] = torch.rand(12, 3)  # none next to one another
    wanted = of_pairs(x.double() * scale, torch.as_tensor(c.mass).double(), law)
    for factor in (2.0**-90, 2.0**60, 2.0**100):
        mass = torch.as_tensor(c.mass) * factor
        found = gp.radial_force(gp.Cells.build(x * scale, law.radius), mass, law).double()
        right = wanted * factor
        if right.abs().max() < 1e38 and right.abs().max() > 1e-30:
            torch.testing.assert_close(found, right, rtol=0, atol=1e-4 * right.abs().max().item())


def test_a_written_function_gets_squares_in_its_own_unit() -> None:
    """Plummer's force by hand is what a softened one without a mesh is, in units of metres too."""
    c = units.cloud(5)
    for n in (-20, 0, 20):
        scale = 2.0**n
        cells = gp.Cells.build(torch.as_tensor(c.x) * scale, units.RADIUS * scale)
        found = gp.radial_force(cells, torch.as_tensor(c.mass), gp.RadialKernel(plummer, 0.1 * scale))
        x = torch.as_tensor(c.x).double() * scale
        step = x[None] - x[:, None]
        s = (step * step).sum(-1)
        w = torch.where(s <= (units.RADIUS * scale) ** 2, (s + 0.01 * scale**2) ** -1.5, 0)
        wanted = torch.einsum("ij,ijd,j->id", w, step, torch.as_tensor(c.mass).double())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-5 * wanted.abs().max().item())


def test_units_are_powers_of_two() -> None:
    for radius in (3e-38, 0.7, 1.0, 3e20, 4e37):
        unit = unit_of(radius)
        mantissa, _ = np.frexp(unit)
        assert mantissa == 0.5
        assert 1e-38 < unit < 1e38
        assert 0.5 <= radius * unit < 1
    assert times(np.float32(2.0**100), 2.0**-200) == np.float32(2.0**-100)
    assert times(np.float32(2.0**-100), 2.0**220) == np.float32(2.0**120)
    assert times(np.float32(3.0), 1 / 3.0) == 1


def test_a_radius_out_of_range() -> None:
    """Near its ends all particles, or those at one place, are neighbours; positions out of range leave no numbers."""
    x = torch.rand(40, 3)
    x[3] = x[4]
    for radius in (3e-38, 4e37):
        counts = gp.Neighbors.allocate(x, radius).counts
        wanted = 40 if radius > 1 else (x[None] == x[:, None]).all(-1).sum(1)
        assert (counts == wanted).all()
        force = gp.radial_force(gp.Cells.build(x, radius), 1.0, gp.ShortRangeGravity(radius / 5.5))
        assert force.isfinite().all()
    near = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    for unit in (1e-140, 1e140):
        law = gp.ShortRangeGravity(unit)
        force = gp.radial_force(gp.Cells.build(near * unit, law.radius), 1.0, law) * unit**2
        torch.testing.assert_close(force, gp.radial_force(gp.Cells.build(near, 5.5), 1.0, gp.ShortRangeGravity(1.0)))
    for radius in (1e-39, 1e39, 1e-300):
        with pytest.raises(ValueError, match=r"radius must be from 2.4e-38 to 4.3e\+37 for positions of torch\."):
            gp.Cells.build(x, radius)
    with pytest.raises(ValueError, match=r"the radius of the function must be from 2\.4e-38"):
        gp.radial_sum(gp.Cells.build(x, 1.0), 1.0, gp.Gaussian(1e-40))
    for h in (1e-30, 1e30, 1e300):
        found = gp.radial_sum(gp.Cells.build(x, 0.5), 1.0, gp.Gaussian(h))
        wanted = ((x[None] - x[:, None]).norm(dim=-1) <= (0 if h < 1 else 0.5)).sum(1)
        assert (found == wanted).all()
    out = gp.radial_sum(gp.Cells.build(x * 1e38, 1e-20), 1.0, gp.Gaussian(1e-20))
    assert out.isnan().all()
    with pytest.raises(ValueError, match=r"box must be at most 1\.3e\+36 times the radius"):
        gp.Cells.build(x, 1e-30, 1e20)
    with pytest.raises(ValueError, match=r"bandwidth must be at least 8\.7e-19 times the radius"):
        gp.neighbor_attention(None, None, x, gp.Neighbors.allocate(x, 0.1), kernel="gaussian", bandwidth=1e-20)
