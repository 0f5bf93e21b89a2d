"""The family `particles`: random sums and forces over neighbours, each compared with `soak_pairs`.

Everything is drawn: clouds (`soak_clouds.py`), units of length from 2^-60 to 2^60, functions of the distance, values
and masses of all types, gradients of any of them. A call is right when out and gradients are those of a sum over all
pairs in float64, when a second call gives the same bits, and when what is asked for wrongly is refused by name.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import soak_oracle
import soak_pairs
import torch
from soak_arguments import laid_out
from soak_clouds import PLACES, Cloud, Made, cloud, make, precision
from soak_outcomes import Outcome, options_of, outcome_of_mistakes
from soak_pairs import Law
from torch import Tensor

from gossamer import particles as gp
from gossamer.particles import fused_torch

__all__ = ["draw", "radial_force", "radial_sum", "run"]

SIZES = {
    "cpu": (0, 1, 2, 3, 7, 31, 32, 33, 64, 65, 100, 129, 200, 255, 256, 257, 300, 400),
    "cuda": (0, 1, 2, 7, 8, 9, 31, 32, 33, 64, 100, 255, 256, 257, 300, 700, 1000, 2100),
}
UNITS = 60  # the largest power of two of a unit of length; of a function that is written, whose s is r^2, a third
REAL = (torch.float32,) * 4 + (torch.float64,) * 2 + (torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8)


def radial_sum(*args: Any) -> Any:
    """What is tested; tests of this script replace it by a wrong one."""
    return gp.radial_sum(*args)


def radial_force(*args: Any) -> Any:
    """Likewise."""
    return gp.radial_force(*args)


def spline(s: Any, xp: Any, h: float) -> Any:
    u = xp.sqrt(s) / h
    return xp.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, xp.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))


def wendland(s: Any, xp: Any, h: float) -> Any:
    u = xp.sqrt(s) / h
    return xp.maximum(1 - u, 0.0) ** 4 * (1 + 4 * u)


def plummer(s: Any, xp: Any, h: float) -> Any:
    return xp.rsqrt(1 + s / h**2) ** 3


def newton(s: Any, xp: Any, h: float) -> Any:
    return xp.rsqrt(s / h**2) ** 3


def waves(s: Any, xp: Any, h: float, a: float) -> Any:
    t = s / h**2
    return xp.cos(a * t) * xp.exp(-t) + 0.5 * xp.sin(t) / (1 + t) + xp.tanh(a - t)


def bent(s: Any, xp: Any, h: float, a: float) -> Any:
    t = s / h**2
    return xp.abs(t - a) - xp.minimum(t, 2 * a) + xp.maximum(0.5 * a, t) * xp.log(2 + t)


def stepped(s: Any, xp: Any, h: float) -> Any:
    return xp.where(s < h**2, 1.0, 0.25)


def constant(s: Any, xp: Any, a: float) -> Any:
    return a


OWN: dict[str, Callable[..., Any]] = {
    "spline": spline, "wendland": wendland, "plummer": plummer, "newton": newton, "waves": waves, "bent": bent,
    "stepped": stepped, "constant": constant,
}  # fmt: skip
LAWS = {  # of sums and of forces; few on a GPU, where each is compiled
    "cpu": {
        "sum": ("Gaussian",) * 7 + ("spline", "wendland", "plummer", "waves", "bent", "stepped", "constant"),
        "force": ("gravity",) * 8 + ("spline", "wendland", "plummer", "newton", "waves", "bent", "constant"),
    },
    "cuda": {"sum": ("Gaussian",) * 6 + ("spline", "waves"), "force": ("gravity",) * 7 + ("plummer",)},
}
MISTAKES: dict[str, tuple[type[Exception], str]] = {
    "values of one more": (ValueError, "must be"),
    "values that are true or false": (TypeError, "must be real"),
    "complex values": (TypeError, "must be real"),
    "a radius of 0": (ValueError, "radius"),
    "a radius of nan": (ValueError, "radius"),
    "a radius of text": (TypeError, "radius"),
    "a radius over half the box": (ValueError, "radius"),
    "a box of 0": (ValueError, "box"),
    "a box of more axes": (ValueError, "box"),
    "x of four dimensions": (ValueError, "x must be"),
    "x of integers": (ValueError, "x must be"),
    "x of numpy": (TypeError, "jax or torch"),
    "another function": (TypeError, "must be a"),
    "positions for cells": (TypeError, "cells must be Cells"),
    "a gradient of a gradient": (ValueError, "differentiated again"),
}


class Call(NamedTuple):
    """One sum or force, but for its numbers, which its seed makes as well."""

    seed: int
    device: str
    operation: str  # sum or force
    cloud: Cloud
    law: Law  # its lengths in radii
    wider: bool  # cells of a larger radius than that of gravity
    channels: int | None  # of values; None: (N,)
    form: str  # of values: a tensor, a number, or a tensor of one number
    values: str  # what numbers they are
    dtype: torch.dtype  # of values
    place: str
    power: int  # values are multiplied by the unit of length to this power
    wanted: str  # gradients of which of x and v
    mode: str
    cotangent: str
    mistake: str | None

    implementation = None

    @property
    def kind(self) -> str:
        return f"{self.operation} {self.law.name}"

    def description(self) -> str:
        """The call in two lines of text."""
        of, text = self.cloud, options_of(self, "seed", "cloud", "operation", "law")
        return f"{self.operation} {self.law} of {of}\n    {text}"


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    r = random.Random(seed)
    operation = r.choice(["sum", "force"])
    name = r.choice(LAWS[device][operation])
    own = name in OWN
    of = cloud(r, SIZES[device], UNITS // 3 if own else UNITS)
    h = r.choice([0.05, 0.2, 1 / 3, 0.5, 1.0, 4.0])
    numbers: tuple[float, ...] = (h,)
    if name == "gravity":
        numbers = (1 / 5.5, r.choice([0.0, 0.0, 1e-6, 1e-3, 0.05, 0.3, 1.0]) / 5.5)
        if of.kind == "lattice" and r.random() < 0.5:
            of = of._replace(radius=5.5 * 2.0 ** math.floor(math.log2(of.radius / 5.5)))
    elif name == "constant":
        numbers = (r.choice([1.0, -0.3, 0.0]),)
    elif name in ("waves", "bent"):
        numbers = (max(h, 0.5), r.choice([0.3, 1.0, 2.0]))
    elif own:
        numbers = (max(h, 0.2),)
    channels = r.choice([None, None, 1, 1, 2, 3, 4, 5, 7, 0] if device == "cpu" else [None, 1, 3, 7, 0])
    channels = None if operation == "force" or (own and device == "cuda" and channels) else channels
    form = r.choice(["tensor"] * 7 + ["number", "whole number", "one"])
    mistake = r.choice(list(MISTAKES)) if r.random() < 0.04 else None
    if form != "tensor" or (mistake is not None and mistake.startswith(("values", "complex"))):
        channels = None
    if mistake is not None:
        of = of._replace(N=max(of.N, 9), bad=None)
    power = r.choice([0, 2, 2]) if operation == "force" else r.choice([0, 0, 1])
    return Call(
        seed, device, operation, of, Law(name, numbers), r.random() < 0.3, channels, form,
        r.choice(["normal", "normal", "normal", "positive", "ones", "zeros", "one", "wide"]),
        r.choice(REAL + WHOLE) if power == 0 or of.exponent == 0 else r.choice((torch.float32, torch.float64)),
        r.choice((*PLACES, "one")), power, r.choice(["", "x", "xv", "xv", "xv", "v"]),
        r.choice(["no_grad", "inference_mode", "plain"]), r.choice(["random", "random", "expanded"]), mistake,
    )  # fmt: skip


def run(c: Call) -> Outcome:
    """Compute a call twice, and compare it with the sum over all pairs."""
    return outcome_of_mistakes("particles", c, _run, MISTAKES)


def _run(c: Call, outcome: Outcome) -> Outcome:
    rng = np.random.default_rng(c.seed)
    of, gravity = c.cloud, c.law.name == "gravity"
    made = make(of, rng, c.device)
    limit = min((size for size in made.sizes if size is not None), default=math.inf) / 2
    cut, radius = float(made.radius), made.radius
    lengths = [n * cut for n in c.law.numbers]
    if gravity and c.wider:
        radius = min(2 * cut, limit)
    x, values = made.x, _values(c, rng)
    arguments = {"x": x, "radius": radius, "box": made.box, "values": values, "law": _law(c, cut)}
    arguments |= _mistake(c, made, arguments)
    x, values = arguments["x"], arguments["values"]
    function = radial_sum if c.operation == "sum" else radial_force
    if "x" in c.wanted and isinstance(x, Tensor) and x.is_floating_point():
        x.requires_grad_()
    if "v" in c.wanted and isinstance(values, Tensor) and values.is_floating_point():
        values.requires_grad_()
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "plain": torch.enable_grad}
    twice = c.mistake == "a gradient of a gradient"
    with torch.enable_grad() if c.wanted or twice else modes[c.mode]():
        cells = gp.Cells.build(x, arguments["radius"], arguments["box"])
        outcome = outcome._replace(implementation="kernels" if fused_torch.serves(cells) else "operations")
        given = x if c.mistake == "positions for cells" else cells
        out = function(given, values, arguments["law"])
        again = function(cells, values, arguments["law"])
    if twice:
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        dx.sum().backward()
    if c.mistake is not None:
        return outcome._replace(wrong=f"not refused: {c.mistake}")
    p = precision(of)
    wide = torch.float64 if of.dtype == torch.float64 else torch.float32
    if out.dtype != wide:
        return outcome._replace(wrong=f"out is of {out.dtype}")
    if not torch.equal(out.nan_to_num(nan=1.5), again.nan_to_num(nan=1.5)):
        return outcome._replace(wrong="a second call gives other bits")
    leaves = {"dx": x, "dvalues": values}
    leaves = {name: one for name, one in leaves.items() if isinstance(one, Tensor) and one.requires_grad}
    actual = {"out": out}
    g = None
    if leaves and out.requires_grad:
        g = _cotangent(c, out, rng)
        actual |= dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g), strict=True))
        for name, one in leaves.items():
            if actual[name].dtype != one.dtype or actual[name].shape != one.shape:
                return outcome._replace(wrong=f"{name} is {tuple(actual[name].shape)} of {actual[name].dtype}")
    if of.bad is not None and of.N:
        known = [name for name, one in actual.items() if not one.isnan().all()]
        return (
            outcome._replace(wrong=f"{', '.join(known)}: numbers, of positions that are not finite")
            if known
            else outcome
        )
    law = c.law if c.law.name == "constant" else Law(c.law.name, _lengths(c, lengths))
    reach = 5.5 * law.numbers[0] if gravity else cut
    wrong = _compared(c, made, reach, law, values, g, actual, p)
    return outcome._replace(wrong=wrong)


def _lengths(c: Call, lengths: list[float]) -> tuple[float, ...]:
    """The numbers of a law: lengths, but the last of two of a function that is written."""
    if c.law.name in ("waves", "bent"):
        return lengths[0], c.law.numbers[1]
    return tuple(lengths)


def _law(c: Call, radius: float) -> Any:
    lengths = [n * radius for n in c.law.numbers]
    if c.law.name == "Gaussian":
        return gp.Gaussian(*lengths)
    if c.law.name == "gravity":
        return gp.ShortRangeGravity(*lengths)
    numbers = c.law.numbers if c.law.name == "constant" else _lengths(c, lengths)
    return gp.RadialKernel(OWN[c.law.name], *numbers)


def _values(c: Call, rng: np.random.Generator) -> Any:
    """What is summed, of one number for all or one for each particle and channel."""
    N, C = c.cloud.N, 1 if c.channels is None else c.channels
    shape = (N, C) if c.form == "tensor" else (1, 1)
    x = rng.standard_normal(shape)
    if c.values == "positive":
        x = np.abs(x) + 0.1
    elif c.values in ("ones", "zeros"):
        x = np.full(shape, 1.0 if c.values == "ones" else 0.0)
    elif c.values == "one" and x.size:
        x = x * (np.arange(x.size).reshape(shape) == rng.integers(x.size))
    elif c.values == "wide":
        x = x * 10 ** rng.uniform(-3, 3, shape)
    x = x * c.cloud.unit**c.power
    if c.form == "number":
        return float(x[0, 0])
    if c.form == "whole number":
        return int(np.clip(np.round(3 * x[0, 0]), -100, 100))
    whole = torch.as_tensor(np.clip(3 * x, -100, 100) if c.dtype in WHOLE else x).to(c.dtype).to(c.device)
    if c.form == "one":
        return whole[0, 0].clone()
    if c.place == "one" and N:
        return (whole[:1].expand(N, C) if c.channels is not None else whole[0, 0].expand(N)).detach()
    place = "plain" if c.place == "one" or c.dtype in WHOLE else c.place
    laid = laid_out(place, whole[None, None])[0, 0]
    return laid if c.channels is not None else laid[:, 0]


def _cotangent(c: Call, out: Tensor, rng: np.random.Generator) -> Tensor:
    g = torch.as_tensor(rng.standard_normal(tuple(out.shape)), dtype=out.dtype, device=out.device)
    return g if c.cotangent == "random" else g.new_full((), 0.7).expand(out.shape)


def _mistake(c: Call, made: Made, given: dict[str, Any]) -> dict[str, Any]:
    """What the mistake of a call changes of its arguments."""
    N, d, x = c.cloud.N, c.cloud.d, made.x
    ones = torch.ones(N, device=c.device)
    if c.mistake == "a gradient of a gradient":
        return {"x": x.detach().clone().requires_grad_()}
    changed: dict[str, dict[str, Any]] = {
        "values of one more": {"values": torch.ones(N + 1, device=c.device)},
        "values that are true or false": {"values": ones > 0},
        "complex values": {"values": torch.complex(ones, ones)},
        "a radius of 0": {"radius": 0},
        "a radius of nan": {"radius": math.nan},
        "a radius of text": {"radius": "1"},
        "a radius over half the box": {"box": 1.9 * float(given["radius"])},
        "a box of 0": {"box": 0.0},
        "a box of more axes": {"box": (1.0,) * (d + 1)},
        "x of four dimensions": {"x": torch.zeros(5, 4, device=c.device)},
        "x of integers": {"x": torch.zeros(x.shape, dtype=torch.int32, device=c.device)},
        "x of numpy": {"x": np.zeros(tuple(x.shape))},
        "another function": {"law": math.exp},
    }
    return changed.get(c.mistake or "", {})


def _compared(
    c: Call, made: Made, reach: float, law: Law, values: Any, g: Tensor | None, actual: dict[str, Tensor],
    p: soak_pairs.Precision,
) -> str | None:  # fmt: skip
    """What is wrong with out and gradients; None where nothing is."""
    of = c.cloud
    x = made.x.detach().double().clone().requires_grad_()
    with torch.enable_grad():
        unit = p.tiny * (max(1.0, reach**2) if law.name in OWN else reach**2)
        found = soak_pairs.pairs(x, made.sizes, reach, p, unit)
    given = torch.as_tensor(values, device=c.device).detach().double()
    every = given if given.ndim else given.expand(of.N)
    if c.operation == "sum":
        flat = every.ndim == 1
        every = every[:, None] if flat else every
        cotangent = None if g is None else (g[:, None] if flat else g).double()
        true, moved = soak_pairs.radial_sum(x, found, law, every, cotangent, p)
        if flat:
            of_one = {"out", "dvalues"}
            true, moved = ({n: one[:, 0] if n in of_one else one for n, one in part.items()} for part in (true, moved))
    else:
        cotangent = None if g is None else g.double()
        true, moved = soak_pairs.radial_force(x, found, law, every, cotangent, p)
        true, moved = ({n.replace("mass", "values"): one for n, one in part.items()} for part in (true, moved))
    if given.ndim == 0 and "dvalues" in true:
        size = true["dvalues"].abs().sum()
        true["dvalues"], moved["dvalues"] = true["dvalues"].sum(), moved["dvalues"].sum() + p.eps * 30 * size
    differences = []
    most = torch.finfo(torch.float64 if of.dtype == torch.float64 else torch.float32).max
    for name, one in actual.items():
        kept = torch.finfo(one.dtype)
        allowed = moved[name] + kept.eps * true[name].abs() + kept.smallest_normal
        # A gradient of wider values leaves the type of the arithmetic before it is of theirs.
        allowed = torch.where(true[name].abs() + allowed > most, math.inf, allowed)
        if one.numel() or one.shape != true[name].shape:
            differences.append(soak_oracle.wrong(name, one.detach(), true[name], true[name], allowed))
    return "; ".join(one for one in differences if one is not None) or None
