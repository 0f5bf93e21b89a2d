"""The soak of particles: what is right is written apart, everything is drawn, and what is wrong is found and said."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer import particles as gp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The folder of the scripts, which import one another by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_what_is_right_imports_nothing_of_the_package() -> None:
    tree = ast.parse((BENCHMARKS / "soak_pairs.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {str(name).split(".")[0] for name in names} == {"__future__", "collections", "math", "typing", "torch"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_is_drawn(device: str) -> None:
    import soak_clouds
    import soak_neighbors
    import soak_pairs
    import soak_particles

    sums = [soak_particles.draw(seed, device) for seed in range(3000)]
    laws = soak_particles.LAWS[device]
    assert {(c.operation, c.law.name) for c in sums} == {(name, law) for name, of in laws.items() for law in of}
    assert {c.mistake for c in sums} == {None, *soak_particles.MISTAKES}
    calls = [soak_neighbors.draw(seed, device) for seed in range(3000)]
    assert {c.mistake for c in calls} == {None, *soak_neighbors.MISTAKES}
    assert {c.form for c in calls} == {"dot", "gaussian", "dot+gaussian"}
    for c in (sums, calls):
        clouds = [one.cloud for one in c]
        assert {of.kind for of in clouds} == set(soak_clouds.KINDS) and {of.d for of in clouds} == {1, 2, 3}
        assert {of.dtype for of in clouds} == set(soak_clouds.TYPES)
        assert {type(size) for of in clouds for size in of.box} == {float, type(None)}
        assert any(of.exact for of in clouds) and any(of.bad is not None for of in clouds)
    assert set(soak_particles.OWN) | {"Gaussian", "gravity"} == set(soak_pairs.FUNCTIONS)


def test_functions_are_those_of_the_oracle() -> None:
    """Written twice: as a user would, and by the definition."""
    import soak_pairs
    import soak_particles

    s = torch.rand(1000, dtype=torch.float64) * 4 + 1e-3
    for name, function in soak_particles.OWN.items():
        numbers = {"waves": (0.7, 1.3), "bent": (0.7, 1.3)}.get(name, (0.7,))
        value, slope = soak_pairs.Law(name, numbers).both(s)
        mine = gp.RadialKernel(function, *numbers).formula.both(s, torch)
        torch.testing.assert_close(mine.value + 0 * s, value + 0 * s, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(mine.slope + 0 * s, slope, rtol=1e-10, atol=1e-12)


def scaled(x: Any, factor: float) -> Any:
    return tuple(scaled(one, factor) for one in x) if isinstance(x, tuple) else x * factor


class Bent(torch.autograd.Function):
    """A number as it is, whose gradient is off by a part in a thousand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 1.001


def nearer(cells: gp.Cells, *rest: Any) -> gp.Cells:
    """Cells of a radius that leaves out a few of the pairs."""
    return gp.Cells.build(cells.x, 0.8 * cells.radius, cells.box)


FAULTS: dict[str, Callable[..., Callable[..., Any]]] = {
    "out is off": lambda right: lambda *a, **k: scaled(right(*a, **k), 1 + 1e-3),
    "gradients are off": lambda right: lambda *a, **k: bent(right(*a, **k)),
}


def bent(x: Any) -> Any:
    return tuple(bent(one) for one in x) if isinstance(x, tuple) else Bent.apply(x)


def plain(c: Any) -> bool:
    """A call whose rounding is small, of more than one particle, with gradients."""
    of = c.cloud
    few = of.kind == "uniform" and of.N >= 64 and of.bad is None and of.dtype == torch.float32 and c.mistake is None
    return few and of.exponent == 0 and of.radius > 0.1 and of.d > 1 and len(c.wanted) > 1


def some(c: Any) -> bool:
    """A sum or force of values that are not 0."""
    return c.values in ("normal", "positive") and c.form == "tensor" and c.channels != 0


@pytest.mark.parametrize("softening", [0.0, 0.01])
def test_an_image_at_one_place_may_be_apart(softening: float) -> None:
    """2.59375 - -1.90625 is 5 times 0.9, but not in float32: then the pair has a force. One given twice has none."""
    import soak_pairs

    p = soak_pairs.Precision(2.0**-23, 2.0**-126, exact=False, frame=False)
    law, mass, g = soak_pairs.Law("gravity", (0.01, softening)), torch.tensor([3.0, 0.0, 0.0]), torch.ones(3, 1)
    for other, apart in ((2.59375, True), (-1.90625, False)):
        given = torch.tensor([[-1.90625], [other], [0.2]], dtype=torch.float64, requires_grad=True)
        found = soak_pairs.pairs(given, (0.9,), 0.055, p, 0.0)
        assert found.s[1, 0] == 0 and bool(found.unsure[1, 0]) == apart
        true, moved = soak_pairs.radial_force(given, found, law, mass.double(), g.double(), p)
        x = given.detach().float().requires_grad_()
        out = gp.radial_force(gp.Cells.build(x, 0.055, 0.9), mass, gp.ShortRangeGravity(0.01, softening))
        (dx,) = torch.autograd.grad(out, x, g)
        for name, one in (("out", out.detach()), ("dx", dx)):
            off = (one - true[name]).abs()
            assert (off <= moved[name].nan_to_num(nan=torch.inf)).all(), name
            assert bool(off[1] > 1e-3 * true[name].abs().max()) == apart


def test_what_a_gaussian_loses_to_underflow_is_allowed() -> None:
    """A narrow one at its end: a value under the least normal number is 0, and its derivative that over h^2."""
    import soak_pairs

    h, radius = 0.015, 0.3
    reached = [h * (-2 * exponent * np.log(2)) ** 0.5 for exponent in (-125.5, -126.5, -130)]  # f is 2^exponent there
    x = torch.tensor([[0.0], *[[one] for one in reached]], dtype=torch.float64, requires_grad=True)
    values, g = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.tensor([[0.0], [0.7], [0.7], [0.7]])
    p = soak_pairs.Precision(2.0**-23, 2.0**-126, exact=False, frame=False)
    found = soak_pairs.pairs(x, (None,), radius, p, 0.0)
    true, moved = soak_pairs.radial_sum(x, found, soak_pairs.Law("Gaussian", (h,)), values.double(), g.double(), p)
    given = x.detach().float().requires_grad_()
    torch.set_flush_denormal(True)
    try:
        out = gp.radial_sum(gp.Cells.build(given, radius), values, gp.Gaussian(h))
        (dx,) = torch.autograd.grad(out, given, g)
    finally:
        torch.set_flush_denormal(False)
    assert dx[1] and not dx[2:].any()  # as by kernels
    off = (dx - true["dx"]).abs()
    assert (off <= moved["dx"]).all()
    assert off.max() > 100 * p.tiny / radius
    assert (moved["dx"] < 1e-32).all()


def test_a_gradient_of_wider_values_leaves_the_arithmetic() -> None:
    """-4.2e38 of float64 masses, summed in float32."""
    import soak_particles

    c = soak_particles.draw(700383, "cuda")._replace(device="cpu")
    assert c.dtype == torch.float64 and c.cloud.dtype == torch.float32
    assert soak_particles.run(c).wrong is None


def seeds_of(family: Any, also: Callable[[Any], bool], n: int) -> list[int]:
    return [seed for seed in range(20_000) if plain(c := family.draw(seed, "cpu")) and also(c)][:n]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_sum_is_found(fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import soak
    import soak_particles

    for operation in ("sum", "force"):
        name = f"radial_{operation}"
        laws = ("Gaussian", "gravity")
        of = lambda c: c.operation == operation and c.law.name in laws and some(c)  # noqa: B023, E731
        seeds = seeds_of(soak_particles, of, 2)
        found(soak, "particles", seeds, 0, capsys)
        with monkeypatch.context() as m:
            m.setattr(soak_particles, name, FAULTS[fault](getattr(gp, name)))
            assert "out[" in found(soak, "particles", seeds, 1, capsys) or fault == "gradients are off"


def test_a_pair_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import soak
    import soak_particles

    of = lambda c: c.operation == "sum" and some(c) and c.law.name == "Gaussian" and c.law.numbers[0] > 0.4  # noqa: E731
    seeds = seeds_of(soak_particles, of, 2)
    monkeypatch.setattr(soak_particles, "radial_sum", lambda cells, *rest: gp.radial_sum(nearer(cells), *rest))
    assert "out[" in found(soak, "particles", seeds, 1, capsys)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import soak
    import soak_neighbors

    of = lambda c: c.dtype == torch.float32 and c.cotangents == "both" and c.capacity != "small"  # noqa: E731
    seeds = seeds_of(soak_neighbors, of, 3)
    found(soak, "neighbors", seeds, 0, capsys)
    monkeypatch.setattr(soak_neighbors, "neighbor_attention", FAULTS[fault](gp.neighbor_attention))
    found(soak, "neighbors", seeds, 1, capsys)


def test_lists_that_are_cut_in_silence_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers for a particle whose list lacks neighbours, and a flag that is not set."""
    import soak
    import soak_neighbors

    seeds = seeds_of(soak_neighbors, lambda c: c.capacity == "small" and c.dtype == torch.float32, 2)
    found(soak, "neighbors", seeds, 0, capsys)
    with monkeypatch.context() as m:
        m.setattr(gp.Neighbors, "cut", property(lambda self: self.sizes < 0))
        assert "overflow is False" in found(soak, "neighbors", seeds, 1, capsys)

    def numbers(*a: Any, **k: Any) -> Any:
        out = gp.neighbor_attention(*a, **k)
        return tuple(one.nan_to_num() for one in out) if isinstance(out, tuple) else out.nan_to_num()

    monkeypatch.setattr(soak_neighbors, "neighbor_attention", numbers)
    assert "numbers of lists that are cut" in found(soak, "neighbors", seeds, 1, capsys)


def found(soak: Any, family: str, seeds: list[int], wrong: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed of some calls, of which all are wrong, or none."""
    assert seeds
    printed = ""
    for seed in seeds:
        assert soak.main(["--family", family, "--one", str(seed)]) == wrong, capsys.readouterr().out
        message = capsys.readouterr().out
        assert (f"WRONG python benchmarks/soak.py --family {family} --one {seed} --device cpu" in message) == bool(
            wrong
        )
        printed += message
    return printed
