"""Known solutions: a plane wave, linear growth, conserved quantities, a sound wave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.special import erfc

from gossamer import cosmos
from gossamer.cosmos.forces import pressure
from gossamer.cosmos.mesh import Waves, painted, read

COSMOLOGY = cosmos.Cosmology()


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).sum(-1).mean()))


def lattice(box: cosmos.Box) -> np.ndarray:
    axes = [np.arange(n) * size / n for n, size in zip(box.particles, box.size_mpc_h, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)


def displacement(state: cosmos.State, box: cosmos.Box) -> np.ndarray:
    d = np.asarray(state.positions_mpc_h, np.float64) - lattice(box)
    return d - np.round(d / box.size_mpc_h) * box.size_mpc_h


def test_a_plane_wave_moves_as_it_does_until_it_crosses() -> None:
    """x = q - D(a) sin(k q) / (k D(a_c)) is exact until a_c: Zel'dovich's solution, 32 particles a wavelength."""
    box, crossing, begin = cosmos.Box(size_mpc_h=(64, 8, 8), particles=(64, 8, 8)), 0.5, 0.05
    at = cosmos.growth(COSMOLOGY, jnp.array([begin, crossing]))
    q, k = lattice(box), 2 * np.pi / 32
    psi = np.zeros_like(q)
    psi[:, 0] = -np.sin(k * q[:, 0]) / k / float(at.D[1])
    state = cosmos.State(
        jnp.asarray(np.mod(q + float(at.D[0]) * psi, box.size_mpc_h), jnp.float32),
        jnp.asarray(100 * float(at.momentum[0]) * psi, jnp.float32),
        jnp.asarray(begin),
    )
    for share, steps, limit, speeds in ((0.75, 24, 5e-3, 0.02), (0.9, 8, 1e-2, 0.12)):
        state = cosmos.evolve(state, COSMOLOGY, box, jnp.linspace(state.a, share * crossing, steps + 1))
        now = cosmos.growth(COSMOLOGY, share * crossing)
        expected = float(now.D) * psi
        assert rms(displacement(state, box) - expected) < limit * rms(expected)
        speed = 100 * float(now.momentum) * psi
        assert rms(np.asarray(state.momenta_km_s) - speed) < speeds * rms(speed)


def test_small_perturbations_grow_as_linear_theory_says() -> None:
    box, cosmology = cosmos.Box(size_mpc_h=64.0, particles=32), COSMOLOGY._replace(sigma8=0.05 * COSMOLOGY.sigma8)
    state = cosmos.initial_conditions(jax.random.key(0), cosmology, box, a=0.1)
    k, before, _ = cosmos.power_spectrum(state, box)
    assert float(k[2]) == pytest.approx(3 * box.fundamental_h_mpc, rel=0.05)
    state = cosmos.evolve(state, cosmology, box, jnp.linspace(0.1, 0.3, 25))
    _, after, _ = cosmos.power_spectrum(state, box)
    D = cosmos.growth(cosmology, jnp.array([0.1, 0.3])).D
    np.testing.assert_allclose((after / before * (D[0] / D[1]) ** 2)[:3], 1, atol=0.02)


def test_the_power_of_initial_conditions_is_that_of_theory() -> None:
    """Of many waves; each has a scatter, which the white noise's own power takes out."""
    box = cosmos.Box(size_mpc_h=200.0, particles=32)
    white = jax.random.normal(jax.random.key(5), box.particles)
    state = cosmos.initial_conditions(white, COSMOLOGY, box, a=0.02, order=1)
    k, P, modes = (np.asarray(x) for x in cosmos.power_spectrum(state, box))
    waves = Waves(box.particles, box.size_mpc_h, white.dtype)
    shell = np.round(np.sqrt(np.asarray(waves.squared)) / box.fundamental_h_mpc).astype(int)
    weight = np.where((np.arange(17) == 0) | (np.arange(17) == 16), 1, 2) * np.ones_like(shell)
    power = np.abs(np.asarray(jnp.fft.rfftn(white))) ** 2 / box.num_particles
    theory = power * np.asarray(cosmos.linear_power(COSMOLOGY, jnp.sqrt(waves.squared), 0.02))
    expected = np.bincount(shell.ravel(), (weight * theory).ravel()) / np.bincount(shell.ravel(), weight.ravel())
    np.testing.assert_allclose(P[:8], expected[1:9], rtol=0.02)
    assert modes[0] == 9 and k[0] == pytest.approx(1.29 * box.fundamental_h_mpc, rel=0.02)


def potential(state: cosmos.State, box: cosmos.Box) -> float:
    """Half the sum over particles of phi, grad^2 phi = density contrast, for the softened pair force that is used."""
    x, split, soft = np.asarray(state.positions_mpc_h, np.float64), box.split_mpc_h, box.softening_kpc_h / 1000
    waves = Waves(box.mesh, box.size_mpc_h, jnp.float32)
    mesh = np.prod(box.mesh)
    cells = state.positions_mpc_h * jnp.asarray(np.divide(box.mesh, box.size_mpc_h), jnp.float32)
    contrast = painted(box.mesh, cells, jnp.full((len(x), 1), mesh / len(x)))[..., 0]
    filtered = -jnp.fft.rfftn(contrast) * waves.inverse * jnp.exp(-(split**2) * waves.squared) / waves.window**2
    far = np.asarray(read(box.mesh, cells, jnp.fft.irfftn(filtered, box.mesh)[..., None]), np.float64).sum() / 2
    tree = cKDTree(np.mod(x, box.size_mpc_h), boxsize=box.size_mpc_h)
    pairs = tree.query_pairs(box.cut_mpc_h, output_type="ndarray")
    d = x[pairs[:, 0]] - x[pairs[:, 1]]
    d -= np.round(d / box.size_mpc_h) * box.size_mpc_h
    R = np.sqrt((d**2).sum(1) + soft**2)
    return far - box.volume_mpc3_h3 / (4 * np.pi * len(x)) * (erfc(R / (2 * split)) / R).sum()


def test_energy_and_momentum_are_conserved() -> None:
    """Layzer and Irvine: d(a E) / da = -T, for E = T + W; constants of W / a, as each particle's own, cancel."""
    box = cosmos.Box(size_mpc_h=50.0, particles=32)
    state = cosmos.initial_conditions(jax.random.key(2), COSMOLOGY, box, a=0.02)
    unit = 1.5 * COSMOLOGY.Omega_m * 100**2
    kinetic = lambda s: 0.5 * (np.asarray(s.momenta_km_s, np.float64) ** 2).sum() / float(s.a) ** 2  # noqa: E731
    at, speeds, before = [0.02], [kinetic(state)], potential(state, box)
    begin = 0.02 * kinetic(state)
    for a in np.linspace(0.02, 1.0, 97)[1:]:
        state = cosmos.evolve(state, COSMOLOGY, box, jnp.asarray([float(state.a), a]))
        at.append(float(state.a))
        speeds.append(kinetic(state))
    W = unit * (potential(state, box) - before)  # a = 1
    left = speeds[-1] + W - begin + np.trapezoid(speeds, at)
    assert abs(left) < 0.01 * abs(W)
    p = np.asarray(state.momenta_km_s, np.float64)
    assert (np.abs(p.sum(0)) < 1e-6 * np.abs(p).sum(0)).all()


@pytest.mark.parametrize("waves", [1, 2, 4])
def test_sound_is_as_fast_as_it_is_with_a_gaussian(waves: int) -> None:
    """c exp(-k^2 h^2 / 4), for c = 1: a standing wave without gravity, by its phase after two thirds of a period."""
    size, n = 32.0, 32
    box, gas = cosmos.Box(size_mpc_h=(size, 16, 16), particles=(n, 16, 16)), cosmos.Gas(1.0, 0.8)
    h = gas.smoothing_mpc_h
    k = 2 * np.pi * waves / size
    q = lattice(box)
    x, v = q.copy(), np.zeros_like(q)
    x[:, 0] += 0.02 * np.sin(k * q[:, 0])
    speed = np.exp(-(k**2) * h**2 / 4)
    dt = 2 * np.pi / (k * speed) / 96
    push = jax.jit(lambda x: pressure(x, box, gas))
    for _ in range(64):
        x += dt / 2 * v
        v += dt * np.asarray(push(jnp.asarray(x, jnp.float32)), np.float64)
        x += dt / 2 * v
    wave = np.sin(k * q[:, 0])
    amplitude = 2 * np.mean(wave * (x - q)[:, 0]), 2 * np.mean(wave * v[:, 0]) / (k * speed)
    phase = np.arctan2(-amplitude[1], amplitude[0]) % (2 * np.pi)
    assert phase == pytest.approx(2 * np.pi * 64 / 96, rel=0.01)
