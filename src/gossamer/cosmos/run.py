"""A run on disk, as `gossamer cosmos` makes it: resumed from its snapshots, with pictures and a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossamer.cosmos import pictures
from gossamer.cosmos.box import Box, State
from gossamer.cosmos.cosmology import Cosmology
from gossamer.cosmos.initial import initial_conditions
from gossamer.cosmos.power import linear_power
from gossamer.cosmos.snapshot import Snapshot, load, save, whole_file
from gossamer.cosmos.spectrum import power_spectrum
from gossamer.cosmos.steps import evolve
from gossamer.cosmos.timing import Timing, time_a_step

PIXELS = 256  # of a frame
FRAMES = 40  # at most, beside the first and the last
SHOWN = 4  # times in the panel, and of power spectra


@dataclass(frozen=True)
class Settings:
    """The settings that decide the numbers of a run."""

    size_mpc_h: float
    particles: int
    mesh: int
    softening_kpc_h: float
    steps: int
    start: float  # scale factors
    end: float
    seed: int
    snapshots: int  # beside the first
    power: tuple[tuple[float, float], ...] | None = None  # (k, P) of a table

    @property
    def box(self) -> Box:
        return Box(self.size_mpc_h, self.particles, self.mesh, self.softening_kpc_h)

    @property
    def scale_factors(self) -> np.ndarray:
        return np.linspace(self.start, self.end, self.steps + 1)

    @property
    def saved(self) -> list[int]:
        """The steps after which a snapshot is written."""
        return sorted({round(self.steps * part / self.snapshots) for part in range(self.snapshots + 1)})

    @property
    def drawn(self) -> list[int]:
        """The steps after which a frame is drawn."""
        return sorted({*range(0, self.steps + 1, -(-self.steps // FRAMES)), self.steps})

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.power is None:
            return None
        k, P = np.asarray(self.power).T
        return k, P


class AnotherRun(ValueError):
    """The folder holds a run of other settings."""


class Run:
    """A run in a folder.

    Args:
        folder: where it is, or will be.
        settings: which run; a folder that holds another one is refused.

    Raises:
        AnotherRun: see above.
        ValueError: a table of linear power is in other units, or does not reach.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings, self.cosmology = folder, settings, Cosmology()
        self.box = settings.box
        if settings.table is not None:  # a wrong one is told before anything is written
            highest = 3**0.5 * np.pi * settings.particles / settings.size_mpc_h
            linear_power(self.cosmology, np.array([self.box.fundamental_h_mpc, highest]), 1.0, settings.table)
        (folder / "frames").mkdir(parents=True, exist_ok=True)
        (folder / "snapshots").mkdir(exist_ok=True)
        self._claim()

    def _claim(self) -> None:
        known = self.folder / "settings.json"
        mine = json.loads(json.dumps(asdict(self.settings)))
        if known.exists():
            try:
                there = json.loads(known.read_text())
            except ValueError:
                raise AnotherRun(f"{str(known)!r} is damaged; delete the folder, or name another one") from None
            changed = [name for name in mine if there.get(name) != mine[name]]
            if changed:
                words = [f"{name} {_short(there.get(name))}, not {_short(mine[name])}" for name in changed]
                raise AnotherRun(
                    f"{str(self.folder)!r} holds another run: {'; '.join(words)}. Delete it, or name another folder"
                )
        else:
            whole_file(known, json.dumps(mine).encode())

    def snapshot(self, step: int) -> Path:
        return self.folder / "snapshots" / f"snapshot_{step:04}.hdf5"

    def frame(self, step: int) -> Path:
        return self.folder / "frames" / f"frame_{step:04}.png"

    def begin(self, tell: Callable[[str], None]) -> tuple[int, State]:
        """The step to go on from, and the state there: of the last snapshot that is whole."""
        steps = (int(path.stem.partition("_")[2]) for path in self.folder.glob("snapshots/snapshot_*.hdf5"))
        for step in sorted(steps, reverse=True):
            try:
                snapshot = load(self.snapshot(step))
            except ValueError as error:
                tell(f"{error}; the one before it is taken")
                continue
            tell(f"goes on from step {step}")
            return step, snapshot.state
        s = self.settings
        state = initial_conditions(jax.random.key(s.seed), self.cosmology, self.box, s.start, power=s.table)
        self._keep(0, state)
        return 0, state

    def _keep(self, step: int, state: State) -> None:
        if step in self.settings.drawn:
            whole_file(self.frame(step), _png(pictures.image(pictures.slice_density(state, self.box, PIXELS))))
        if step in self.settings.saved:
            save(state, self.box, self.cosmology, self.snapshot(step))

    def evolve(self, progress: Callable[[int], None], tell: Callable[[str], None]) -> State:
        """Run all steps that are left. A step is a call of its own: it has the same bits wherever a run begins."""
        first, state = self.begin(tell)
        progress(first)
        times = self.settings.scale_factors
        for step in range(first + 1, self.settings.steps + 1):
            before = state
            try:
                state = evolve(before, self.cosmology, self.box, jnp.asarray([before.a, times[step]]))
                self._keep(step, state)
                progress(step)
            except KeyboardInterrupt:
                save(before, self.box, self.cosmology, self.snapshot(step - 1))
                raise
        return state

    def report(self, state: State) -> dict[str, Any]:
        """Writes the pictures and report.json, of a run that is done; what the latter holds."""
        s = self.settings
        frames = {step: _read(self.frame(step)) for step in s.drawn}
        size = pictures.animation(list(frames.values()), self.folder / "web.gif")
        shown = _spread(s)
        times = [float(s.scale_factors[step]) for step in shown]
        labels = [f"z = {1 / a - 1:.1f}" for a in times]
        depth = pictures.DEPTH * s.size_mpc_h
        title = f"{s.particles}^3 particles, {s.size_mpc_h:g} Mpc/h, a slice of {depth:g} Mpc/h"
        self._figure("web.png", pictures.panel([frames[step] for step in shown], labels, title))
        final = pictures.image(pictures.slice_density(state, self.box, 2 * PIXELS))
        self._figure("slice.png", pictures.panel([final], labels[-1:], title))
        timing = time_a_step(state, self.box)
        report = self._spectra() | {"settings": asdict(s), "gif_bytes": size, "timing": timing._asdict()}
        whole_file(self.folder / "report.json", json.dumps(report, indent=1).encode())
        return report

    def _figure(self, name: str, figure: Any) -> None:
        whole_file(self.folder / name, pictures.small_png(figure))

    def _spectra(self) -> dict[str, Any]:
        k, measured, linear = np.zeros(0), {}, {}
        saved = self.settings.saved
        for step in sorted({saved[round(part)] for part in np.linspace(0, len(saved) - 1, SHOWN)}):
            state = load(self.snapshot(step)).state
            spectrum = power_spectrum(state, self.box)
            k = np.asarray(spectrum.k_h_mpc, np.float64)
            label = f"z = {1 / float(state.a) - 1:.1f}"
            measured[label] = np.asarray(spectrum.power_mpc3_h3, np.float64).tolist()
            theory = linear_power(self.cosmology, k, float(state.a), self.settings.table)
            linear[label] = np.asarray(theory, np.float64).tolist()
        self._figure("power.png", pictures.spectrum(k, measured, linear))
        return {"k_h_mpc": k.tolist(), "power_mpc3_h3": measured, "linear_mpc3_h3": linear}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else "a table"


def _spread(s: Settings) -> list[int]:
    """Steps whose pictures show the web forming: from a fifth of the growth on."""
    wanted = np.linspace(s.start + 0.15 * (s.end - s.start), s.end, SHOWN)
    return [min(s.drawn, key=lambda step: abs(float(s.scale_factors[step]) - a)) for a in wanted]


def _png(picture: Any) -> bytes:
    from io import BytesIO

    memory = BytesIO()
    picture.save(memory, "PNG")
    return memory.getvalue()


def _read(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()
        return picture


__all__ = ["AnotherRun", "Run", "Settings", "Snapshot", "Timing"]
