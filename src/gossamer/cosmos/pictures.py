"""Pictures of a run: slices of the density, the web forming, an animation, power spectra; by matplotlib and pillow."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.cosmos.box import Box, State
from gossamer.cosmos.snapshot import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

ALONG = 2  # points of the sheet for a particle along the line of sight; across it as many as there are pixels
DEPTH = 0.2  # of a slice, in units of the box
FAINT, BRIGHT = 0.15, 60.0  # densities in units of the mean, at the ends of the colours
COLOURS = "magma"
MOST_BYTES = 4_000_000  # of an animation
FRAME_MS, LAST_MS = 90, 2500


def slice_density(state: State, box: Box, pixels: int, depth: float = DEPTH) -> np.ndarray:
    """(pixels, pixels) density in units of the mean: the first `depth` of the box along its last axis.

    Matter is the sheet that the lattice has become. It is drawn by more points than there are particles, which are on
    straight lines between them as the lattice says (Abel, Hahn and Kaehler 2012): few particles make a smooth picture.
    """
    size = np.asarray(box.size_mpc_h, np.float32)
    first, second, _ = box.particles
    times = (-(-pixels // first), -(-pixels // second), ALONG)
    moved = np.asarray(state.positions_mpc_h, np.float32).reshape(*box.particles, 3) - _lattice(box, (1, 1, 1))
    moved -= np.round(moved / size) * size
    for axis, more in enumerate(times):
        moved = _refined(moved, axis, more)
    x = np.mod(_lattice(box, times) + moved, size).reshape(-1, 3)
    across, down, along = x.T
    inside = along < depth * size[2]
    counts = np.zeros(pixels * pixels)
    at = [part[inside] * np.float32(pixels / length) for part, length in ((across, size[0]), (down, size[1]))]
    column, row = (part.astype(np.int32) for part in at)
    right, up = (part - np.floor(part) for part in at)
    for to_right, to_up in ((0, 0), (0, 1), (1, 0), (1, 1)):  # shares of the four nearest pixels: no moire
        place = (row + to_up) % pixels * pixels + (column + to_right) % pixels
        share = (right if to_right else 1 - right) * (up if to_up else 1 - up)
        counts += np.bincount(place, share, pixels * pixels)
    return counts.reshape(pixels, pixels) / (len(x) * depth / pixels**2)


def _lattice(box: Box, times: tuple[int, int, int]) -> np.ndarray:
    """The lattice with so many points for one along each axis, (..., 3)."""
    counts = [n * more for n, more in zip(box.particles, times, strict=True)]
    axes = [np.arange(n, dtype=np.float32) * (size / n) for n, size in zip(counts, box.size_mpc_h, strict=True)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).astype(np.float32)


def _refined(field: np.ndarray, axis: int, times: int) -> np.ndarray:
    """A periodic field with so many points for one along an axis."""
    step = np.roll(field, -1, axis) - field
    parts = [field + np.float32(i / times) * step for i in range(times)]
    shape = list(field.shape)
    shape[axis] *= times
    return np.stack(parts, axis + 1).reshape(shape)


def image(density: np.ndarray) -> Image:
    """A picture of 256 colours of the logarithm of a density."""
    import matplotlib
    from PIL import Image

    level = np.log(np.maximum(density, FAINT) / FAINT) / np.log(BRIGHT / FAINT)
    picture = Image.fromarray((255 * np.clip(level, 0, 1)).astype(np.uint8)[::-1], "P")
    palette = matplotlib.colormaps[COLOURS](np.arange(256))[:, :3]
    picture.putpalette((255 * palette).round().astype(np.uint8).tobytes())
    return picture


def animation(frames: Sequence[Image], path: Path) -> int:
    """Write a GIF under 4 MB, of smaller frames where they are too many, and say how many bytes it has."""
    from PIL import Image

    first, *_ = frames
    width, height = first.size
    while True:
        shown = [
            frame if frame.size == (width, height) else frame.resize((width, height), Image.Resampling.NEAREST)
            for frame in frames
        ]
        start, *rest = shown
        memory = BytesIO()
        times = [FRAME_MS] * len(rest) + [LAST_MS]
        start.save(memory, "GIF", save_all=True, append_images=rest, duration=times, loop=0, optimize=False)
        if memory.tell() <= MOST_BYTES:
            whole_file(path, memory.getvalue())
            return memory.tell()
        width, height = int(width * 0.85), int(height * 0.85)


def panel(images: Sequence[Image], labels: Sequence[str], title: str) -> Figure:
    """Pictures side by side, each with its label."""
    from matplotlib.figure import Figure

    width = max(picture.width for picture in images) / 100 + 0.1  # about a pixel for a pixel
    figure = Figure((width * len(images), width + 0.6), dpi=100, layout="constrained", facecolor="black")
    for axis, picture, label in zip(
        figure.subplots(1, len(images), squeeze=False).ravel(), images, labels, strict=True
    ):
        axis.imshow(np.asarray(picture.convert("RGB")), interpolation="bilinear")
        axis.set_title(label, fontsize=9, color="white")
        axis.set_axis_off()
    figure.suptitle(title, fontsize=9, color="white")
    return figure


def spectrum(k: Any, measured: dict[str, Any], linear: dict[str, Any]) -> Figure:
    """Power spectra at some times beside linear theory, both by labels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(5.2, 3.8), dpi=110, layout="constrained")
    axis = figure.subplots()
    for number, (label, power) in enumerate(measured.items()):
        axis.loglog(k, power, "o-", color=f"C{number}", markersize=3, linewidth=1, label=label)
        axis.loglog(k, linear[label], "--", color=f"C{number}", linewidth=1)
    axis.plot([], [], "--", color="grey", label="linear theory")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set(xlabel="k [h/Mpc]", ylabel="P(k) [(Mpc/h)^3]")
    axis.legend(frameon=False, fontsize=8)
    return figure


def small_png(figure: Figure) -> bytes:
    """A figure as a PNG of 256 colours."""
    from PIL import Image

    memory, small = BytesIO(), BytesIO()
    figure.savefig(memory, format="png", facecolor=figure.get_facecolor())
    with Image.open(memory) as picture:
        picture.convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return small.getvalue()
