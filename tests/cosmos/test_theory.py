"""The background, growth and the linear power spectrum, against colossus."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gossamer import cosmos
from gossamer.cosmos.cosmology import expansion

pytest.importorskip("colossus")

COSMOLOGY = cosmos.Cosmology()
CASES = {
    "flat": COSMOLOGY,
    "curved": COSMOLOGY._replace(Omega_k=0.05),
    "dark energy": COSMOLOGY._replace(w0=-0.9, wa=0.2),
    "dense": cosmos.Cosmology(Omega_m=1.0, Omega_b=0.05, h=0.5),
}
A = np.array([0.02, 0.1, 0.3, 0.5, 0.8, 1.0])


def theirs(name: str) -> Any:
    from colossus.cosmology import cosmology

    c = CASES[name]
    dark = {} if name != "dark energy" else {"de_model": "w0wa", "w0": c.w0, "wa": c.wa}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cosmology.setCosmology(
            f"gossamer {name}", persistence="", flat=False, relspecies=False, H0=100 * c.h, Om0=c.Omega_m,
            Ode0=1 - c.Omega_m - c.Omega_k, Ob0=c.Omega_b, sigma8=c.sigma8, ns=c.n_s, Tcmb0=2.7255, **dark,
        )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_expansion_and_growth(name: str) -> None:
    other, at = theirs(name), cosmos.growth(CASES[name], A)
    np.testing.assert_allclose(expansion(CASES[name], A), other.Ez(1 / A - 1), rtol=1e-6)
    np.testing.assert_allclose(at.D, other.growthFactor(1 / A - 1), rtol=1e-4)
    slope = np.log(other.growthFactor(1 / (A * 1.01) - 1) / other.growthFactor(1 / (A / 1.01) - 1)) / np.log(1.01**2)
    np.testing.assert_allclose(at.f[:-1], slope[:-1], rtol=1e-3)  # theirs is interpolated


@pytest.mark.parametrize("name", ["flat", "curved", "dense"])
def test_the_linear_power_spectrum(name: str) -> None:
    k = np.logspace(-3.5, 1.3, 200)
    expected = theirs(name).matterPowerSpectrum(k, model="eisenstein98")
    np.testing.assert_allclose(cosmos.linear_power(CASES[name], k), expected, rtol=2e-3)


def test_growth_of_matter_alone_is_known() -> None:
    at = cosmos.growth(cosmos.Cosmology(Omega_m=1.0), A)
    np.testing.assert_allclose(at.D, A, rtol=2e-6)
    np.testing.assert_allclose(at.f, 1, rtol=2e-6)
    np.testing.assert_allclose(at.D2, -3 / 7 * A**2, rtol=5e-6)
    np.testing.assert_allclose(at.momentum, A**1.5, rtol=2e-6)
    np.testing.assert_allclose(at.momentum2, -6 / 7 * A**2.5, rtol=5e-6)


def test_the_cosmology_of_another_package_is_taken() -> None:
    class Theirs(NamedTuple):  # the fields of jax_cosmo.Cosmology
        Omega_c: float = 0.261
        Omega_b: float = 0.049
        h: float = 0.677
        n_s: float = 0.966
        sigma8: float = 0.81
        Omega_k: float = 0.0
        w0: float = -1.0
        wa: float = 0.0

    assert float(cosmos.growth(Theirs(), 0.5).D) == pytest.approx(float(cosmos.growth(COSMOLOGY, 0.5).D), rel=1e-6)


def test_growth_has_gradients() -> None:
    slope = jax.grad(lambda Omega_m: cosmos.growth(COSMOLOGY._replace(Omega_m=Omega_m), 0.5).D)(0.31)
    up, down = (cosmos.growth(COSMOLOGY._replace(Omega_m=x), 0.5).D for x in (0.32, 0.30))
    assert float(slope) == pytest.approx(float(up - down) / 0.02, rel=1e-2)


UNITS = {
    "k in 1/Mpc and P in Mpc^3": lambda k, P, h: (k * h, P / h**3),
    "k in 1/Mpc": lambda k, P, h: (k * h, P),
    "P in Mpc^3": lambda k, P, h: (k, P / h**3),
    "k in h/kpc and P in (kpc/h)^3": lambda k, P, h: (k / 1e3, P * 1e9),
    "the dimensionless k^3 P": lambda k, P, h: (k, k**3 * P / (2 * np.pi**2)),
}


def table() -> tuple[np.ndarray, np.ndarray]:
    k = np.logspace(-3.5, 1.5, 300)
    return k, np.asarray(cosmos.linear_power(COSMOLOGY, k), np.float64)


@pytest.mark.parametrize("unit", UNITS)
def test_a_table_in_other_units_is_refused_and_its_units_named(unit: str) -> None:
    with pytest.raises(ValueError, match=f"this table has .* It would be right as {re.escape(unit)}"):
        cosmos.linear_power(COSMOLOGY, 0.1, power=UNITS[unit](*table(), COSMOLOGY.h))


def test_a_table_is_what_it_says() -> None:
    k = np.array([0.01, 0.1234, 2.0])
    found = cosmos.linear_power(COSMOLOGY, k, 0.5, power=table())
    np.testing.assert_allclose(found, cosmos.linear_power(COSMOLOGY, k, 0.5), rtol=2e-3)
    box = cosmos.Box(size_mpc_h=64.0, particles=8)
    states = [cosmos.initial_conditions(jax.random.key(0), COSMOLOGY, box, 0.05, power=p) for p in (None, table())]
    one, other = (state.momenta_km_s for state in states)
    assert float(jnp.abs(one - other).max()) < 2e-3 * float(jnp.abs(one).max())


@pytest.mark.parametrize(
    ("power", "message"),
    [
        (3.0, "must be \\(k in h/Mpc"),
        ((np.ones(20), np.ones(19)), "two arrays"),
        ((np.ones(3), np.ones(3)), "at least 16"),
        ((-np.arange(20.0), np.ones(20)), "over 0"),
        ((np.arange(20.0, 0, -1), np.ones(20)), "increasing"),
    ],
)
def test_what_is_no_table_is_refused(power: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosmos.linear_power(COSMOLOGY, 0.1, power=power)


def test_a_table_that_does_not_reach_is_refused() -> None:
    k, P = table()
    part = (k < 1.0) & (k > 1e-3)
    with pytest.raises(ValueError, match=r"power must hold k from .* its table goes from 0.001"):
        cosmos.initial_conditions(
            jax.random.key(0), COSMOLOGY, cosmos.Box(size_mpc_h=16.0, particles=8), 0.05, power=(k[part], P[part])
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": 67.7}, "h must be a number from 0.1 to 2"),
        ({"Omega_b": 0.4}, "cannot be more"),
        ({"sigma8": "x"}, "sigma8"),
    ],
)
def test_a_wrong_cosmology_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosmos.growth(COSMOLOGY._replace(**change), 0.5)
    with pytest.raises(ValueError, match="must be a Cosmology"):
        cosmos.growth(0.3, 0.5)


@pytest.mark.parametrize("name", cosmos.__all__)
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thing = getattr(cosmos, name)
    module = importlib.import_module(thing.__module__)
    found = [one for one in doctest.DocTestFinder().find(thing, name, module=module) if one.examples]
    if not found:  # of what a function returns, which has an example
        assert name in ("Growth", "PowerSpectrum", "PowerTable", "Snapshot", "State")
        return
    (test,) = found
    test.globs = {"cosmos": cosmos, "jax": jax, "jnp": jnp}
    failed, _ = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test)
    assert not failed


def test_torch_is_never_imported() -> None:
    code = "import sys; sys.modules['torch'] = None; import gossamer.cosmos; print('h5py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "False", done.stderr
