"""`gossamer bench --tag particles`: sums over neighbours from torch, checked against float64, and what they take."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from gossamer import particles as gp
from gossamer.bench.measure import peak_bytes, reset_peak, time_call
from gossamer.bench.peer import first_line
from gossamer.bench.results import append_records
from gossamer.bench.rows import RUN
from gossamer.particles import fused_torch

if TYPE_CHECKING:
    from rich.table import Table

    from gossamer.bench.run import Session

SIZES = {"cpu": (4096, 16384), "cuda": (64_000, 256_000, 1_000_000, 4_000_000)}
KINDS: tuple[Literal["uniform", "clustered"], ...] = ("uniform", "clustered")
NEIGHBORS = 747  # of a uniform cloud
SAMPLES = 32
PUSH = torch.tensor([1.0, -0.5, 0.25])  # the gradient of the total that is differentiated, to every acceleration
LIMITS = {"density": 1e-5, "gravity": 1e-4, "density gradient": 1e-4, "gravity gradient": 2e-4}  # of relative errors


@dataclass
class ParticleRow:
    """One sum over the neighbours of all particles of a cloud. A row whose check failed has no time.

    `error` is the largest of sampled particles, relative to the sum of the sizes of their terms (of gravity those of
    Newton's force). A gradient includes its sum.
    """

    case: str
    kind: str
    particles: int
    neighbors: float  # mean, each itself included
    status: Literal["ok", "failed"] = "ok"
    reason: str = ""
    error: float | None = None
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    interactions_per_second: float | None = None
    bytes_a_particle: float | None = None  # beyond inputs and results, on a GPU
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    time: str = ""


class Case(NamedTuple):
    """A cloud and what is computed of it."""

    x: Tensor
    mass: Tensor
    radius: float
    law: gp.ShortRangeGravity
    h: float


def cloud(N: int, kind: str, device: torch.device) -> Tensor:
    """N particles in the unit box, every time the same."""
    g = torch.Generator(device).manual_seed(0)
    x = torch.rand(N, 3, device=device, generator=g)
    if kind == "uniform":
        return x
    centres = x[: max(1, min(2000, N // 30))]
    of = torch.randint(len(centres), (N,), device=device, generator=g)
    return (centres[of] + 0.03 * torch.randn(N, 3, device=device, generator=g)) % 1


def case_of(N: int, kind: str, device: torch.device) -> Case:
    radius = min(0.45, (NEIGHBORS / N * 3 / (4 * math.pi)) ** (1 / 3))
    mass = torch.rand(N, device=device, generator=torch.Generator(device).manual_seed(1))
    return Case(cloud(N, kind, device), mass, radius, gp.ShortRangeGravity(radius / 5.5, radius / 200), radius / 3)


def exact(c: Case, rows: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sums of sampled particles in float64, sums of the sizes of their terms), of each case and the counts."""
    x, mass = c.x.double(), c.mass.double()
    samples: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in (*LIMITS, "count")}
    for i in rows:
        d = x - x[i]
        d = d - d.round()
        s = (d * d).sum(1)
        near = s <= c.radius**2
        d, s, m = d[near], s[near], mass[near]
        w = torch.exp(-s / (2 * c.h**2))
        samples["count"].append((near.sum(), near.sum()))
        samples["density"].append((w @ m, w @ m))
        slope = (mass[i] + m) * w / c.h**2  # of the sum of all densities, in which each is a query and a source
        samples["density gradient"].append((slope @ d, slope @ s.sqrt()))
        apart = s > 0
        d, s, m = d[apart], s[apart], m[apart]
        square = s + c.law.softening**2
        u = square.sqrt() / (2 * c.law.split)
        f = (1 - torch.erf(u) + 2 * u * torch.exp(-u * u) / math.sqrt(math.pi)) * square**-1.5
        samples["gravity"].append(((f * m) @ d, (square**-1.5 * s.sqrt()) @ m))
        # Of sum_i a_i . p_i with p = (x, y, z): what is pushed along the axes, by the derivative of f as well.
        long = (1 - torch.erf(u) + 2 * u * torch.exp(-u * u) / math.sqrt(math.pi)) * square**-2.5
        df = -1.5 * long - torch.exp(-u * u) / (4 * math.sqrt(math.pi) * c.law.split**3 * square)
        push = (m - mass[i]).neg()[:, None] * PUSH.to(d)
        along = (d * push).sum(1)
        sizes = push.norm(dim=1) * (f.abs() + 2 * df.abs() * s)
        samples["gravity gradient"].append(((f[:, None] * push + 2 * (df * along)[:, None] * d).sum(0), sizes.sum()))
    return {name: (torch.stack([a for a, _ in of]), torch.stack([b for _, b in of])) for name, of in samples.items()}


def calls_of(c: Case) -> dict[str, Callable[[], Tensor]]:
    """The cases, as calls of cells that are made before."""
    cells = gp.Cells.build(c.x, c.radius, 1.0)
    x = c.x.clone().requires_grad_()
    moving = gp.Cells(x, cells.runs, cells.radius, cells.box)
    push = PUSH.to(x)

    def gradient(total: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(total(), x)[0]

    return {
        "density": lambda: gp.radial_sum(cells, c.mass, gp.Gaussian(c.h)),
        "gravity": lambda: gp.radial_force(cells, c.mass, c.law),
        "density gradient": gradient(lambda: gp.radial_sum(moving, c.mass, gp.Gaussian(c.h)).sum()),
        "gravity gradient": gradient(lambda: (gp.radial_force(moving, c.mass, c.law) @ push).sum()),
    }


def rows_of(session: Session, N: int, kind: str) -> list[ParticleRow]:
    """The rows of one cloud."""
    c = case_of(N, kind, session.device)
    rows = torch.randint(N, (SAMPLES,), generator=torch.Generator().manual_seed(2)).to(session.device)
    known = exact(c, rows)
    neighbors = known["count"][0].double().mean().item() if kind == "clustered" else N * c.radius**3 * 4 * math.pi / 3
    run = {"device": session.name, "versions": session.versions, "commit": session.commit}
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def row(name: str) -> ParticleRow:
        return ParticleRow(name, kind, N, neighbors, time=time, **run)  # type: ignore[arg-type]

    measured = [_timed(session, row("order and boxes"), lambda: gp.Cells.build(c.x, c.radius, 1.0).order, None)]
    for name, call in calls_of(c).items():
        wanted, size = known[name]
        session.progress(f"{N} {kind}: {name}")

        def error(out: Tensor, wanted: Tensor = wanted, size: Tensor = size) -> float:
            off = out[rows].double() - wanted
            return float(((off if off.ndim == 1 else off.norm(dim=1)).abs() / size).max())

        measured.append(_timed(session, row(name), call, error))
    return measured


def _timed(
    session: Session, row: ParticleRow, call: Callable[[], Tensor], error: Callable[[Tensor], float] | None
) -> ParticleRow:
    try:
        call()  # kernels are compiled
        base = reset_peak(session.device)
        out = call()
        if session.device.type == "cuda":
            beyond = peak_bytes(session.device) - base - out.numel() * out.element_size()
            row.bytes_a_particle = beyond / row.particles
        if error is not None:
            row.error = error(out)
            if not row.error <= LIMITS[row.case]:  # or no number
                row.status, row.reason = "failed", f"an error of {row.error:.2g}, over {LIMITS[row.case]:g}"
                return row
        del out
        timing = time_call(call, session.device, budget_s=session.budget_s)
    except Exception as problem:  # the other rows still count
        row.status, row.reason = "failed", first_line(problem)
        return row
    row.p20_ms, row.p50_ms, row.p80_ms = timing.p20, timing.p50, timing.p80
    if error is not None:
        row.interactions_per_second = row.particles * row.neighbors / timing.p50 * 1e3
    return row


def run(session: Session, target: Path | None) -> Iterator[list[ParticleRow]]:
    """The rows of all clouds of the device, cloud by cloud; each is kept as soon as it is there."""
    for N in SIZES[session.device.type]:
        for kind in KINDS:
            rows = rows_of(session, N, kind)
            if target is not None:
                append_records([asdict(one) for one in rows], target, RUN)
            yield rows


def table(rows: list[ParticleRow]) -> Table:
    """The rows of a run."""
    from rich.table import Table

    shown = Table(title="particles", caption="interactions: of each particle with each within the radius")
    for column in ("particles", "case"):
        shown.add_column(column)
    for column in ("ms (p20 - p80)", "G interactions/s", "bytes a particle", "error"):
        shown.add_column(column, justify="right")
    for row in rows:
        rate, memory = row.interactions_per_second, row.bytes_a_particle
        shown.add_row(
            f"{row.particles:,} {row.kind}",
            row.case,
            row.reason if row.p50_ms is None else f"{row.p50_ms:.3g} ({row.p20_ms:.3g} - {row.p80_ms:.3g})",
            "" if rate is None else f"{rate / 1e9:.3g}",
            "" if memory is None else f"{memory:.0f}",
            "" if row.error is None else f"{row.error:.1e}",
        )
    return shown


def launch(term: str) -> None:
    """The kernel of a term on a million uniform particles, two times: for a profiler."""
    c = case_of(1_000_000, "uniform", torch.device("cuda"))
    cells = gp.Cells.build(c.x, c.radius, 1.0)
    sums, forces = (
        fused_torch.sums_of(law, reach, cells.sizes)
        for law, reach in ((gp.Gaussian(c.h), cells.reach), (c.law, c.law.radius))
    )
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: sums.weighted(cells.runs, c.mass),
        "sum_slopes": lambda: sums.weighted_slopes(cells.runs, c.mass, c.mass),
        "force": lambda: forces.force(cells.runs, c.mass),
        "force_slopes": lambda: forces.force_slopes(cells.runs, c.x, c.mass),
    }
    for _ in range(2):
        calls[term]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(*sys.argv[1:])
