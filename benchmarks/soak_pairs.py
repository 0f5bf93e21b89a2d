"""What is right for random calls of particles, from the definition alone: every pair, in float64.

Nothing of gossamer is imported. `pairs` gives all differences to nearest images, `Law` the functions of the distance,
`radial_sum` and `radial_force` the sums, `attention` attention between neighbours; each of these also says how far
rounding may move its results and gradients.

Such a bound is a sum over pairs: a difference of positions is known to a unit in the last place of itself, and of the
box where a position or an image is over its seam; a function to what it is anywhere that r^2 may be; a sum of n terms
to (sqrt(n) + 4) eps of their magnitudes. A pair whose distance is the radius but for rounding may count or not; one
whose distance is 0 but for rounding may be taken to be at one place, and one at one place by an image not to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FITTED = 2e-5  # of Newton's force: how far the documented polynomial of gravity may be off
FUNCTION = 24  # eps of the magnitude of its parts: how far a function may be off, by a GPU's approximations too
Sizes = tuple[float | None, ...]


class Precision(NamedTuple):
    """What a call computes with."""

    eps: float
    tiny: float  # the least normal number
    exact: bool  # differences and their squares are numbers of the type: none is rounded
    frame: bool  # differences are of places in a frame of many, as the kernels of lists take them


class Pairs(NamedTuple):
    """All pairs of N particles: at [i, j] of the difference j - i."""

    steps: Tensor  # (N, N, d), with a graph to the positions
    s: Tensor  # (N, N): r^2
    off: Tensor  # (N, N, d): how far a difference may be off
    ds: Tensor  # (N, N): and r^2
    keep: Tensor  # (N, N): within the radius
    unsure: Tensor  # (N, N): whether a pair counts, and whether it is at one place, is a matter of rounding
    radius: float


def pairs(x: Tensor, box: Sizes, radius: float, p: Precision, unit: float) -> Pairs:
    """All pairs of x (N, d) in float64; r^2 may lose `unit` by underflow."""
    N, _ = x.shape
    steps, off, ds = [], [], x.new_zeros(N, N)
    for axis, size in enumerate(box):
        at = x[:, axis]
        step, here = at - at[:, None], at.detach()
        room = float(here.max() - here.min()) if N and size is None else size or 0.0
        either = torch.zeros(N, N, dtype=torch.bool, device=x.device)
        known = p.eps * step.detach().abs()
        if size is not None:
            turns = (step.detach() / size).round()
            step = step - size * turns
            outside = (here < 0) | (here >= size)
            over = (turns != 0) | outside[:, None] | outside
            known = p.eps * step.detach().abs()
            known = known + 2 * p.eps * over * (here.abs()[:, None] + here.abs() + size)
            # Half the box away are two nearest images, one on each side.
            either = (step.detach().abs() - size / 2).abs() <= 2 * known + 4 * p.eps * size
        known = (known + 2 * p.eps * room * p.frame) * (not p.exact)
        length = step.detach().abs()
        ds = ds + 2 * length * known + known**2
        steps.append(step)
        off.append(known + 2 * either * length)
    together = torch.stack(steps, -1)
    s = (together**2).sum(-1)
    found, square = s.detach(), radius**2
    ds = ds + (0.0 if p.exact else 3 * p.eps) * found + unit
    unsure = ((found - square).abs() <= ds + p.eps * square) & ~((found == square) & p.exact)
    unsure = unsure | ((found <= ds) & ~((found == 0) & p.exact))
    unsure = unsure & (x.detach()[:, None] != x.detach()).any(-1)  # what is given at one place is there
    return Pairs(together, s, torch.stack(off, -1), ds, found <= square, unsure, radius)


class Law(NamedTuple):
    """A function of s = r^2: its name in FUNCTIONS, and its numbers."""

    name: str
    numbers: tuple[float, ...]

    def value(self, s: Tensor) -> Tensor:
        return FUNCTIONS[self.name](s, *self.numbers)

    def both(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """The values and their derivatives."""
        with torch.enable_grad():
            at = s.detach().clone().requires_grad_()
            value = self.value(at)
            if not value.requires_grad:
                return value, torch.zeros_like(s)
            (slope,) = torch.autograd.grad(value.sum(), at)
        return value.detach(), slope


def _gaussian(s: Tensor, h: float) -> Tensor:
    return torch.exp(-s / (2 * h * h))


def _gravity(s: Tensor, split: float, softening: float) -> Tensor:
    """Newton's force less that of a potential filtered by exp(-k^2 split^2)."""
    square = s + softening**2
    u = square.sqrt() / (2 * split)
    return (torch.erfc(u) + 2 * u * torch.exp(-u * u) / math.sqrt(math.pi)) * square**-1.5


def _spline(s: Tensor, h: float) -> Tensor:
    u = s.sqrt() / h
    return torch.where(u < 1, 1 - 1.5 * u**2 + 0.75 * u**3, torch.where(u < 2, 0.25 * (2 - u) ** 3, 0.0))


def _wendland(s: Tensor, h: float) -> Tensor:
    u = s.sqrt() / h
    return (1 - u).clamp(min=0) ** 4 * (1 + 4 * u)


def _plummer(s: Tensor, h: float) -> Tensor:
    return (1 + s / h**2) ** -1.5


def _newton(s: Tensor, h: float) -> Tensor:
    return (s / h**2) ** -1.5


def _waves(s: Tensor, h: float, a: float) -> Tensor:
    t = s / h**2
    return torch.cos(a * t) * torch.exp(-t) + 0.5 * torch.sin(t) / (1 + t) + torch.tanh(a - t)


def _bent(s: Tensor, h: float, a: float) -> Tensor:
    t = s / h**2
    return (t - a).abs() - torch.minimum(t, 2 * a + 0 * t) + torch.maximum(0.5 * a + 0 * t, t) * torch.log(2 + t)


def _stepped(s: Tensor, h: float) -> Tensor:
    return torch.where(s < h**2, 1.0, 0.25) + 0 * s


def _constant(s: Tensor, a: float) -> Tensor:
    return torch.full_like(s, a)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Gaussian": _gaussian, "gravity": _gravity, "spline": _spline, "wendland": _wendland, "plummer": _plummer,
    "newton": _newton, "waves": _waves, "bent": _bent, "stepped": _stepped, "constant": _constant,
}  # fmt: skip


class Known(NamedTuple):
    """A function at all pairs, and how far it may be off."""

    value: Tensor  # (N, N)
    slope: Tensor
    off: Tensor
    slope_off: Tensor


def known(law: Law, found: Pairs, p: Precision) -> Known:
    """The law at all pairs; its derivative at those that may be at different places, else 0."""
    s = found.s.detach()
    apart = _apart(found)
    value, slope = law.both(s)
    off, slope_off = torch.zeros_like(s), torch.zeros_like(s)
    ds = found.ds + 8 * p.eps * s  # a function may jump, or bend, at a number that is rounded
    for moved in (torch.maximum(s - ds, 1e-12 * s), s + ds):
        other, steep = law.both(moved)
        off = torch.maximum(off, (other - value).abs())
        slope_off = torch.maximum(slope_off, (steep - slope).abs())
    size, steep = value.abs(), slope.abs()
    eps = FUNCTION * p.eps
    if law.name == "Gaussian":  # exp(-t) of a t that is rounded
        (h,) = law.numbers
        eps = eps * (1 + s / (2 * h * h))
    elif law.name == "gravity":
        split, softening = law.numbers
        square = s + softening**2
        size = square**-1.5
        off = off + FITTED * size
        steep = (3 * size + 2 * (4 * split**2) ** -1.5) / (2 * square)
        slope_off = slope_off + 2 * FITTED * size / square
    elif law.name != "constant":
        h, *_ = law.numbers
        t = s / h**2
        size = {"newton": size, "plummer": size * (1 + 0 * t), "stepped": 1 + 0 * t}.get(law.name, 4 * (1 + t) ** 2)
        steep = {"newton": steep, "plummer": steep}.get(law.name, (8 * (1 + t) + 4 * (1 + t) ** 2) / h**2)
        if law.name in ("spline", "wendland"):  # of a square root
            steep = steep + 1 / (h * h * t.sqrt())
    if law.name not in ("Gaussian", "gravity"):  # what a user writes may overflow in the type
        slope_off = torch.where(slope.abs() * p.tiny > 0.01, math.inf, slope_off)
        off = torch.where(value.abs() * p.tiny > 0.01, math.inf, off)
    slopes = (torch.where(apart, one, 0.0) for one in (slope, slope_off + eps * steep))
    return Known(value, next(slopes), off + eps * size, next(slopes))


def _apart(found: Pairs) -> Tensor:
    """Pairs that may be taken to be at different places."""
    return (found.s.detach() > 0) | found.unsure


class Bound(NamedTuple):
    """A sum over neighbours, term by term: what its terms may be off by, and their magnitudes."""

    off: Tensor  # (N, N, ...)
    size: Tensor

    def total(self, found: Pairs, p: Precision, lengths: float = 1.0) -> Tensor:
        """How far the sum may be off; what underflows is in units of `lengths`."""
        counted, loose = (m.reshape(*m.shape, *[1] * (self.off.ndim - 2)) for m in (found.keep, found.unsure))
        n = found.keep.sum(1).reshape(-1, *[1] * (self.off.ndim - 2)).double()
        size = torch.where(counted, self.size, 0.0).sum(1)
        off = torch.where(counted | loose, self.off, 0.0).nan_to_num(nan=math.inf).sum(1)
        off = off + p.eps * (n.sqrt() + 4) * size + torch.where(loose, self.size, 0.0).nan_to_num(nan=math.inf).sum(1)
        return off + p.tiny * (4 + n) * max(1.0, lengths)


def radial_sum(
    x: Tensor, found: Pairs, law: Law, values: Tensor, g: Tensor | None, p: Precision
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """out, and with g also dx and dvalues, in float64; and how far each may be off.

    Args:
        x: (N, d), of which `found` are the pairs, with a graph.
        values: (N, C).
        g: (N, C), the gradient of out.
    """
    values = values.detach().double().requires_grad_()
    with torch.enable_grad():
        apart = found.s.detach() > 0
        # Pairs at one place have no derivative: the function's there is not used.
        f = law.value(torch.where(apart, found.s, found.s.detach()))
        out = torch.where(found.keep, f, 0.0) @ values
    k, v = known(law, found, p), values.detach().abs()
    off = Bound((k.off + p.eps * k.value.abs())[..., None] * v + p.tiny * v, k.value.abs()[..., None] * v)
    true, moved = {"out": out.detach()}, {"out": off.total(found, p)}
    if g is None:
        return true, moved
    true["dx"], true["dvalues"] = _gradients(out, (x, values), g)
    g = g.abs()
    off = Bound((k.off + p.eps * k.value.abs())[..., None] * g + p.tiny * g, k.value.abs()[..., None] * g)
    moved["dvalues"] = off.total(found, p)
    inner, n = g @ v.mT + v @ g.mT, v.shape[1]
    slope, slope_off = 2 * k.slope.abs(), 2 * (k.slope_off + p.eps * (n + 4) * k.slope.abs())
    # The derivative of a Gaussian is its value over h^2, and sums may be divided at last: in a unit of length that is
    # up to two radii, and after the value, products g v and theirs with the value lost what underflows.
    steep = law.numbers[0] ** -2 if law.name == "Gaussian" else 0.0
    lost = p.tiny * steep * (inner + 2 * n + 1)
    lengths = max(1 / found.radius, 2 * found.radius * steep)
    moved["dx"] = _along(slope * inner, slope_off * inner + lost, found, p, lengths)
    return true, moved


def radial_force(
    x: Tensor, found: Pairs, law: Law, mass: Tensor, g: Tensor | None, p: Precision
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """out (N, d), and with g (N, d) also dx and dmass, in float64; and how far each may be off."""
    mass = mass.detach().double().requires_grad_()
    apart = found.s.detach() > 0
    with torch.enable_grad():
        w = law.value(torch.where(apart, found.s, 1.0))
        out = torch.einsum("ij,ijd,j->id", torch.where(found.keep & apart, w, 0.0), found.steps, mass)
    k, m = known(law, found, p), mass.detach().abs()
    apart = _apart(found)
    w, w_off = (torch.where(apart, one, 0.0) for one in (k.value.abs(), k.off))
    true, moved = {"out": out.detach()}, {"out": _along(w * m, (w_off + 4 * p.eps * w) * m, found, p)}
    if g is None:
        return true, moved
    true["dx"], true["dmass"] = _gradients(out, (x, mass), g)
    g, length = g.abs(), found.steps.detach().abs()
    dot, dot_off = (torch.einsum("ijd,jd->ij", one, g) for one in (length, found.off))
    moved["dmass"] = Bound((w_off + 4 * p.eps * w) * dot + w * dot_off, w * dot).total(found, p)
    turned = m[:, None, None] * g + m[:, None] * g[:, None]  # of m_i g_j - m_j g_i
    along, along_off = (length * turned).sum(-1), (found.off * turned).sum(-1)
    slope, slope_off = (2 * torch.where(apart, one, 0.0) for one in (k.slope.abs(), k.slope_off))
    off = (w_off + 4 * p.eps * w)[..., None] * turned
    off = off + ((slope_off + 8 * p.eps * slope) * along + slope * along_off)[..., None] * length
    off = off + (slope * along)[..., None] * found.off
    moved["dx"] = Bound(off, w[..., None] * turned + (slope * along)[..., None] * length).total(
        found, p, 1 / found.radius
    )
    return true, moved


def _along(w: Tensor, off: Tensor, found: Pairs, p: Precision, lengths: float = 1.0) -> Tensor:
    """How far the sum of w times differences may be off."""
    length = found.steps.detach().abs()
    return Bound(off[..., None] * length + w[..., None] * found.off, w[..., None] * length).total(found, p, lengths)


def _gradients(out: Tensor, inputs: tuple[Tensor, ...], g: Tensor) -> list[Tensor]:
    if not out.requires_grad:
        return [torch.zeros_like(one) for one in inputs]
    found = torch.autograd.grad(out, inputs, g.double(), allow_unused=True)
    return [torch.zeros_like(one) if d is None else d for one, d in zip(inputs, found, strict=True)]


class Attention(NamedTuple):
    """A call of attention between neighbours; of features in float64, (H, N, size)."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    scale: float
    bandwidth: float | None


class Stored(NamedTuple):
    """How features and results are kept."""

    eps: float  # half a unit of the last place of results, 0 where they have the type of the arithmetic
    short: float  # likewise of probabilities and dS, which kernels round
    least: float  # what underflow may lose


def attention(
    x: Tensor, found: Pairs, a: Attention, dout: Tensor, dlse: Tensor, p: Precision, kept: Stored
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """out (H, N, E), lse (H, N), dq, dk, dv and dx in float64, and how far each may be off.

    Args:
        x: (N, d), of which `found` are the pairs, with a graph.
        dout, dlse: gradients of out and lse.
    """
    q, k, v = (None if one is None else one.detach().double().requires_grad_() for one in (a.q, a.k, a.v))
    assert v is not None
    s, keep = found.s, found.keep
    with torch.enable_grad():
        S = torch.zeros(len(v), *s.shape, dtype=s.dtype, device=s.device)
        if q is not None and k is not None:
            S = S + a.scale * q @ k.mT
        if a.bandwidth is not None:
            S = S - s / (2 * a.bandwidth**2)
        S = S.masked_fill(~keep, -math.inf)
        lse = S.logsumexp(-1)
        P = torch.exp(S - lse[..., None])
        out = P @ v
        leaves = {"dx": x, "dq": q, "dk": k, "dv": v}
        leaves = {name: one for name, one in leaves.items() if one is not None}
        gradients = torch.autograd.grad(
            (out * dout).sum() + (lse * dlse).sum(), list(leaves.values()), allow_unused=True
        )  # fmt: skip
    true = {"out": out.detach(), "lse": lse.detach()}
    true |= {n: torch.zeros_like(leaves[n]) if d is None else d for n, d in zip(leaves, gradients, strict=True)}
    with torch.no_grad():
        given = (None if one is None else one.detach() for one in (q, k))
        q, k, v, S, P, out, lse = (*given, v.detach(), S.detach(), P.detach(), out.detach(), lse.detach())
        return true, _attention_moved(found, a._replace(q=q, k=k, v=v), S, P, out, lse, dout, dlse, p, kept)


def _attention_moved(
    found: Pairs, a: Attention, S: Tensor, P: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor,
    p: Precision, kept: Stored,
) -> dict[str, Tensor]:  # fmt: skip
    """How far results may be off: the formulas again, over errors, as in `soak_oracle.rounding`."""
    eps, keep = p.eps, found.keep
    N = len(keep)
    n = int(keep.sum(1).max())

    def summed(n: int) -> float:
        return eps * (math.sqrt(n) + 4)

    dS = torch.zeros_like(S)
    if a.q is not None and a.k is not None:
        dS = dS + summed(a.q.shape[-1]) * a.scale * (a.q.abs() @ a.k.abs().mT)
    if a.bandwidth is not None:
        dS = dS + (found.ds + 4 * eps * found.s.detach()) / (2 * a.bandwidth**2)
    size = torch.where(keep, S, 0.0).abs()
    m = S.amax(-1)
    dS = torch.where(keep, dS + 6 * eps * (size + m.abs()[..., None] + 1), 0.0)
    # Whether a pair counts may be a matter of rounding: then nothing is known of its row.
    lost = (found.unsure & (found.s.detach() > found.ds)).any(1)
    dS = torch.where(lost[:, None] & keep, math.inf, dS)
    mean = (P * dS).nan_to_num(nan=math.inf).sum(-1) + 6 * eps * (m.abs() + 1)
    worst = torch.maximum(dS.amax(-1), 6 * eps * m.abs())
    of_lse = 2 * torch.where(worst < 0.1, mean, worst) + summed(n) + 2 * eps * lse.abs()
    grown = torch.expm1((2 * (dS + of_lse[..., None])).clamp(max=600))
    of_others = torch.expm1((4 * worst).clamp(max=600))[..., None] * (1 - P)
    dP = torch.minimum(torch.minimum(P * grown, of_others), torch.ones_like(P)) * keep
    dP = dP + P * (summed(n) + 4 * eps * (m.abs() + lse.abs())[..., None])
    tiny = (kept.least + p.tiny) * keep
    v, dout_ = a.v.abs(), dout.abs()
    moved = {
        "out": (dP + (2 * kept.short + summed(n)) * P + tiny) @ v + kept.eps * out.abs() + kept.least, "lse": of_lse
    }  # fmt: skip
    products = dout_ @ v.mT
    g = dout @ a.v.mT - ((dout * out).sum(-1) - dlse)[..., None]
    E = out.shape[-1]
    of_delta = (dout_ * moved["out"]).sum(-1) + summed(E) * (dout * out).abs().sum(-1) + 2 * eps * dlse.abs()
    of_g = summed(E) * products + of_delta[..., None] + 2 * eps * g.abs()
    exponent = dS + of_lse[..., None] + 4 * eps * (size + lse.abs()[..., None])
    of_P = torch.where(keep, P * (torch.expm1(exponent.clamp(max=700)) + 8 * eps), 0.0)
    magnitude = P * g.abs()
    of_dS = of_P * (g.abs() + of_g) + P * of_g + (4 * kept.short + 8 * eps) * magnitude + tiny * (1 + g.abs())
    of_dS = torch.where(lost[:, None] & keep, math.inf, of_dS)
    of_P = torch.where(lost[:, None] & keep, math.inf, of_P)
    whole = of_dS + (summed(n) + 2 * kept.short) * magnitude
    if a.q is not None and a.k is not None:
        q, k = a.q, a.k
        dq, dk = (P * g @ k).abs(), ((P * g).mT @ q).abs()
        moved["dq"] = a.scale * (_times(whole, k.abs()) + kept.eps * dq) + kept.least
        moved["dk"] = a.scale * (_times(whole.mT, q.abs()) + kept.eps * dk) + kept.least
    of_dv = of_P + tiny + (summed(n) + 2 * kept.short) * P
    moved["dv"] = _times(of_dv.mT, dout_) + kept.eps * (P.mT @ dout).abs() + kept.least
    if a.bandwidth is None:  # no score reads positions
        moved["dx"] = torch.zeros_like(found.steps[0].detach())
        return moved
    both, of_both = (one.sum(0) + one.sum(0).mT for one in (magnitude, whole))
    length = found.steps.detach().abs()
    of_both = of_both + summed(n * len(S)) * both
    off = (of_both[..., None] * length).nan_to_num(nan=0.0) + both[..., None] * found.off
    off = torch.where((of_both == math.inf)[..., None], math.inf, off)
    moved["dx"] = off.sum(1) / a.bandwidth**2 + N * p.tiny * max(1.0, 1 / found.radius)
    return moved


def _times(x: Tensor, y: Tensor) -> Tensor:
    """A product of bounds, in which infinity times 0 is infinite."""
    return (x @ y).nan_to_num(nan=math.inf)
