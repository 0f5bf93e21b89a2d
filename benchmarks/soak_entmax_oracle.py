"""What `entmax_attention` and `topk_keys` must give: from the definitions, without the package, nothing of it imported.

The weights of a row are p_j = exp_a(s_j - lam), a = alpha - 1, exp_a(t) = [1 + a t]_+^(1 / a) (exp at a = 0), with the
lam of which they sum to 1, by bisection; tau = a lam - 1. One step of Newton makes it differentiable by autograd.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from soak_rounding import Results, Rounding, exact, multiplied
from torch import Tensor

HALVINGS = 70


class Rows(NamedTuple):
    """What a row keeps, in float64, and which rows are within rounding of keeping something else."""

    kept: Tensor  # (B, H, Q, K) bool
    tau: Tensor  # (B, H, Q): inf in empty rows, -1 at alpha 1
    support: Tensor  # (B, H, Q)
    certified: Tensor  # (B, H, Q) bool
    unsure: Tensor  # (B, H, Q) bool: of kept keys
    at_edge: Tensor  # (B, H, Q) bool: of the support
    close: Tensor  # (B, H, Q) bool: of the certificate


def scores(q: Tensor, k: Tensor, scale: float, rounding: Rounding) -> Tensor:
    """(B, H, Q, K)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q @ k.mT) * scale
    return rounding.absolute(s, size_of_scores(q, k, scale) + 1)  # and of their distance to the threshold


def size_of_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Of what scores are summed of, times how often it is rounded."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.abs() @ k.abs().mT) * (abs(scale) * (math.sqrt(q.shape[3]) / 4 + 2))


def largest(s: Tensor, seen: Tensor, n: int) -> Tensor:
    """(B, H, Q, K) bool: the n largest scores of seen keys, of equal ones the first."""
    order = torch.where(seen, s, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(seen).scatter(-1, order, True) & seen


def log_weight(t: Tensor, a: Tensor) -> Tensor:
    """log(1 + a t) / a, which is t at a = 0; of 1 + a t > 0."""
    x = a * t
    near = x.abs() < 1e-2
    series = sum((-x) ** n / (n + 1) for n in range(12)) * t
    away = torch.where(near, 1.0, x)
    return torch.where(near, series, torch.log1p(away) / torch.where(a == 0, 1.0, a))


def weights(s: Tensor, a: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """p (B, H, Q, K) and lam (B, H, Q), differentiable in s and a (H, 1, 1); of an empty row 0, and inf."""
    some = kept.any(-1, keepdim=True)
    x = torch.where(kept, s, -math.inf).detach()
    low = torch.where(some, x.amax(-1, keepdim=True), 0.0)
    high = low + math.log(max(2, s.shape[-1])) + 1e-9

    def of(lam: Tensor, s: Tensor, a: Tensor) -> Tensor:
        t = s - lam
        inside = kept & (1 + a.detach() * t.detach() > 0)
        return torch.where(inside, log_weight(torch.where(inside, t, 0.0), a).exp(), 0.0)

    with torch.no_grad():
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            over = of(middle, s, a).sum(-1, keepdim=True) >= 1
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        p = of(low, s, a)
        slope = torch.where(p > 0, p ** (1 - a), 0.0).sum(-1, keepdim=True)  # of the sum, by -lam
    lam = low + (of(low, s, a).sum(-1, keepdim=True) - 1) / torch.where(some, slope, 1.0)
    p = of(lam, s, a)
    p = p / torch.where(some, p.sum(-1, keepdim=True), 1.0).detach()
    return p, torch.where(some, lam, math.inf).squeeze(-1)


def rows(
    q: Tensor, k: Tensor, a: Tensor, seen: Tensor, scale: float, top_k: int | None, eps: float, sure: bool
) -> Rows:
    """What rows keep, of float64 tensors; `sure` says that scores are computed without rounding."""
    zero = exact()
    s = scores(q, k, scale, zero)
    error = 0 * s if sure else 8 * eps * (size_of_scores(q, k, scale) + s.abs())
    error = torch.where(seen, error, 0.0).amax(-1)
    kept, unsure = seen, torch.zeros_like(seen[..., 0])
    rest = torch.full_like(error, -math.inf)
    if top_k is not None:
        kept = largest(s, seen, top_k)
        rest = torch.where(seen & ~kept, s, -math.inf).amax(-1)
        unsure = (rest > -math.inf) & (torch.where(kept, s, math.inf).amin(-1) - rest <= error) & (error > 0)
    p, lam = weights(s, a, kept)
    some = kept.any(-1)
    tau = torch.where(some, a[..., 0] * lam - 1, math.inf)
    heads = a[..., 0]
    noise = error * heads + 16 * eps * (1 + heads * lam.nan_to_num(posinf=0.0).abs())
    over = heads[..., None] * s - tau[..., None].nan_to_num(posinf=0.0)
    at_edge = (kept & (over.abs() <= noise[..., None]) & (heads[..., None] > 0)).any(-1)
    # Near alpha 1 weights are so small that they are 0 in a type, and counts of them mean nothing.
    at_edge = at_edge | ((p > 0) & (p < 1e-30)).any(-1) | (kept & (p == 0) & (heads[..., None] == 0)).any(-1)
    gap = tau - heads * rest
    certified = (rest == -math.inf) | ((heads > 0) & (gap >= 0))
    close = (rest > -math.inf) & (heads > 0) & (gap.abs() <= noise)
    return Rows(kept, tau, (p > 0).sum(-1), certified, unsure, at_edge, close)


def attend(
    inputs: list[Tensor], kept: Tensor, scale: float, dout: Tensor, low: torch.dtype | None, rounding: Rounding
) -> Results:
    """out and the gradients of inputs q, k, v and alpha (H,), in the type of these.

    Args:
        low: the type that operands of products are rounded to; None: none.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v = (rounding.relative(x) for x in leaves[:3])
    s = scores(q, k, scale, rounding)
    p, _ = weights(s, (leaves[3] - 1)[:, None, None], kept)
    p = rounding.relative(p, 8.0)
    p = multiplied(p, s, low)
    out = p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    found = list(torch.autograd.grad(out, leaves, rounding.relative(dout)))
    if rounding.eps:
        H, G = q.shape[1], k.shape[1]
        x = [t.detach() for t in (v.repeat_interleave(H // G, 1), q, k.repeat_interleave(H // G, 1))]
        a = (leaves[3].detach() - 1)[:, None, None]
        u = torch.where(p.detach() > 0, p.detach() ** (1 - a), 0.0)
        of_q, of_k = rounding.of_scores(u, dout, *x, scale)
        # The gradient of alpha is a sum of w (dP - delta), of which delta is off alike for a whole row.
        weight = p.detach() * torch.where(p.detach() > 0, p.detach(), 1.0).log() ** 2
        size = dout.abs() @ x[0].abs().mT
        of_delta = (u * size).sum(-1) / u.sum(-1).clamp(min=1e-30) * weight.sum(-1)
        found[3] = found[3] + (rounding.absolute(of_delta, 4 * of_delta) - of_delta).sum((0, 2))
        found[0], found[1] = found[0] + of_q, found[1] + of_k.unflatten(1, (G, -1)).sum(2)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dalpha"), found, strict=True))}


def of_operands(inputs: list[Tensor], kept: Tensor, scale: float, dout: Tensor, low: torch.dtype) -> Results:
    """How far gradients move where each weight and each dS is off by half a unit in its last place, as in 16 bits.

    Plain attention's own errors say that of most rows, but in some they happen to cancel, and a kernel rounds other
    numbers: it takes sums in another order, and may know the delta of the keys so far alone.

    Args:
        inputs: q, k, v and alpha (H,) in float64.
    """
    q, k, v, alpha = inputs
    if torch.finfo(low).bits > 16:
        return {name: torch.zeros_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    (H, G), unit = (q.shape[1], k.shape[1]), torch.finfo(low).eps / 2
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    a = (alpha - 1)[:, None, None]
    p, _ = weights(scores(q, k, scale, exact()), a, kept)
    u = torch.where(p > 0, p ** (1 - a), 0.0)
    dp = dout @ v.mT
    delta = (u * dp).sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=1e-30)
    size = unit * abs(scale) * (u * (dp - delta)).abs()
    dk, dv = size.mT @ q.abs(), unit * p.mT @ dout.abs()
    return {"dq": size @ k.abs(), "dk": dk.unflatten(1, (G, -1)).sum(2), "dv": dv.unflatten(1, (G, -1)).sum(2)}
