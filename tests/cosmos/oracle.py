"""What the simulation is compared with, written from the definitions in float64: forces, and a plane wave."""

from __future__ import annotations

import numpy as np
from scipy.special import erf, erfc

ALPHA = 10.0  # of the Ewald sum, in units of 1 / box: pairs beyond half the box are 1e-12 of it


def nearest(d: np.ndarray, size: float) -> np.ndarray:
    return d - size * np.round(d / size)


def ewald(x: np.ndarray, targets: np.ndarray, size: float) -> np.ndarray:
    """-grad phi at x[targets], grad^2 phi = density contrast of equal particles in a periodic cube; no softening."""
    N, a = len(x), ALPHA / size
    mass = size**3 / (4 * np.pi * N)
    found = np.zeros((len(targets), 3))
    for part in np.array_split(np.arange(len(targets)), 32):
        d = nearest(x[None] - x[targets[part], None], size)  # (targets, N, 3)
        r = np.sqrt((d**2).sum(-1))
        r[r == 0] = 1e6 * size
        w = (erfc(a * r) + 2 * a * r / np.sqrt(np.pi) * np.exp(-((a * r) ** 2))) / r**3
        found[part] = mass * (w[..., None] * d).sum(1)
    n = np.arange(-17, 18)
    kx, ky, kz = (2 * np.pi / size * axis for axis in np.meshgrid(n, n, n, indexing="ij"))
    k2 = kx**2 + ky**2 + kz**2
    kernel = np.where(k2 > 0, np.exp(-k2 / (4 * a * a)) / np.where(k2 > 0, k2, 1), 0)
    waves = [np.exp(-2j * np.pi / size * np.outer(n, x[:, axis])) for axis in range(3)]
    contrast = np.einsum("ap,bp,cp->abc", *waves, optimize=["einsum_path", (0, 1), (0, 1)]) / N  # of the density
    back = [np.exp(2j * np.pi / size * np.outer(n, x[targets, axis])) for axis in range(3)]
    for axis, k in enumerate((kx, ky, kz)):
        field = 1j * k * kernel * contrast
        along = np.einsum("abc,ap->bcp", field, back[0], optimize=True)
        found[:, axis] += np.real(np.einsum("bcp,bp,cp->p", along, back[1], back[2], optimize=False))
    return found


def softened(x: np.ndarray, targets: np.ndarray, size: float, split: float, softening: float) -> np.ndarray:
    """What softening changes of the short-range force at x[targets]: the difference of its exact forms."""
    mass = size**3 / (4 * np.pi * len(x))
    found = np.zeros((len(targets), 3))
    for row, target in enumerate(targets):
        d = nearest(x - x[target], size)
        r2 = (d**2).sum(-1)
        keep = (r2 > 0) & (r2 < (5.5 * split) ** 2)
        d, r2 = d[keep], r2[keep]
        found[row] = mass * ((_short(r2 + softening**2, split) - _short(r2, split))[:, None] * d).sum(0)
    return found


def _short(s: np.ndarray, split: float) -> np.ndarray:
    r = np.sqrt(s)
    u = r / (2 * split)
    return (1 - erf(u) + 2 * u / np.sqrt(np.pi) * np.exp(-u * u)) / r**3
