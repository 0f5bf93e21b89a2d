"""What SparseK and its attention must give: from the definitions, by sorting, with nothing of the package imported.

SparseK's threshold is the least tau with sum_j clip(u_j - tau, 0, 1) <= k: the sum is evaluated at every u and u - 1.
Its gradient is the mean over the keys with 0 < u - tau < 1, or over those of u = tau where there are none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from soak_rounding import Results, Rounding, multiplied
from torch import Tensor


def threshold(u: Tensor, k: int) -> Tensor:
    """tau (R,) of u (R, n) float64, differentiable; -inf where there are no more than k keys over -inf."""
    x = u.detach()
    flat = (x > -math.inf).sum(-1) <= k
    there = torch.where(x > -math.inf, x, -1e300)
    points = torch.cat([there - 1, there], -1).sort(-1).values
    f = (there[:, None] - points[..., None]).clamp(0, 1).sum(-1)
    n = points.shape[-1]
    first = torch.where(f <= k, torch.arange(n, device=u.device), n - 1).amin(-1, keepdim=True)
    x0 = points.gather(-1, first)
    # Just below x0 those are inside which are at least x0, but not 1 over it.
    inside = (there >= x0) & (there - 1 < x0)
    rest = f.gather(-1, first) - k
    tau = (x0 + rest / inside.sum(-1, keepdim=True).clamp(min=1)).squeeze(-1)
    over = x - tau[:, None]
    interior = (over > 0) & (over < 1)
    edge = (over == 0) & ~interior.any(-1, keepdim=True)
    shares = torch.where(interior.any(-1, keepdim=True), interior, edge).double()
    mean = torch.where(shares > 0, u - x, 0.0).sum(-1) / shares.sum(-1).clamp(min=1)
    return torch.where(flat, -math.inf, tau + mean)


def causal_thresholds(u: Tensor, k: int) -> Tensor:
    """tau (R, N) of each prefix of u (R, N)."""
    R, N = u.shape
    seen = torch.ones(N, N, dtype=torch.bool, device=u.device).tril()
    prefixes = torch.where(seen, u[:, None], -math.inf)
    return threshold(prefixes.reshape(R * N, N), k).reshape(R, N)


def gates(u: Tensor, tau: Tensor) -> Tensor:
    """m of u (..., n) and tau (..., 1): no gradient at the ends of the clip; 0 of a key of -inf, 1 at tau -inf."""
    there = u > -math.inf
    over = torch.where(there, u, 0.0) - torch.where(tau > -math.inf, tau, -math.inf)
    m = torch.where((over > 0) & (over < 1), over, over.detach().clamp(0, 1))
    return torch.where(there, m, 0.0)


def last_topk(u: Tensor, k: int) -> Tensor:
    """(R, N): until when each key is among the k largest so far, of equal ones the earlier; j - 1 where it never is."""
    R, N = u.shape
    found = torch.arange(N, device=u.device).expand(R, N) - 1
    for t in range(N):
        before = torch.where(u[:, : t + 1] > -math.inf, u[:, : t + 1], -math.inf)
        order = before.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        kept = torch.zeros(R, N, dtype=torch.bool, device=u.device).scatter(1, order, True)
        kept[:, : t + 1] &= before > -math.inf
        found = torch.where(kept, t, found)
    return found


class Selection(NamedTuple):
    """Of each query and key, (B, U, N, N)."""

    kept: Tensor  # bool
    causal: Tensor  # (N, N) bool: pairs that are kept or not
    unsure: Tensor  # (B, U, N) bool: rows that rounding may give other keys
    at_edge: Tensor  # (B, U, N) bool: rows of which a gate is at an end of its clip, so that its gradient is not sure


def select(u: Tensor, k: int, keep: str, causal: bool, error: float) -> Selection:
    """Which keys of u (B, U, N) float64 are kept; `error` is that of u - tau, relative to tau and 1."""
    B, U, N = u.shape
    x = u.detach().reshape(B * U, N)
    tau = causal_thresholds(x, k) if causal else threshold(x, k)[:, None].expand(-1, N)
    over = x[:, None] - tau[..., None]
    i, j = torch.arange(N, device=u.device)[:, None], torch.arange(N, device=u.device)
    pairs = (j <= i) if causal else torch.ones(N, N, dtype=torch.bool, device=u.device)
    noise = error * (tau.abs().nan_to_num(posinf=0.0, neginf=0.0) + 1)[..., None]
    at_end = ((over.abs() <= noise) | ((over - 1).abs() <= noise)) & pairs & (x > -math.inf)[:, None]
    if keep == "topk":
        last = last_topk(x, k) if causal else None
        if last is None:
            order = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
            of_all = torch.zeros_like(x, dtype=torch.bool).scatter(1, order, True) & (x > -math.inf)
            kept = of_all[:, None].expand(-1, N, -1)
        else:
            kept = (i <= last[:, None]) & pairs
        unsure = torch.zeros_like(tau, dtype=torch.bool)
    else:
        kept = (over > 0) & pairs
        unsure = ((over.abs() <= noise) & pairs & (x > -math.inf)[:, None]).any(-1)
    shape = (B, U, N)
    return Selection(
        kept.reshape(*shape, N), pairs, unsure.reshape(shape), at_end.any(-1).reshape(shape)
    )  # fmt: skip


class Given(NamedTuple):
    """The numbers of a call."""

    k_keep: int
    window: int
    keep: str
    gate: str | None
    causal: bool
    scale: float
    straight: bool


def attend(
    inputs: list[Tensor], c: Given, chosen: Selection, dout: Tensor, dlse: Tensor, low: torch.dtype | None,
    rounding: Rounding, error: float,
) -> Results:  # fmt: skip
    """out, lse and the gradients of q, k, v and u, each of the inputs' type but u, which is float64.

    Args:
        low: the type that operands of products are rounded to; None: none.
        error: of u - tau, relative to tau and 1.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v = (rounding.relative(x) for x in leaves[:3])
    u = leaves[3]
    (B, H, N, D), U = q.shape, u.shape[1]
    rows = u.reshape(B * U, N)
    tau = causal_thresholds(rows, c.k_keep) if c.causal else threshold(rows, c.k_keep)[:, None].expand(-1, N)
    if rounding.eps:
        size = torch.where(tau > -math.inf, tau.abs() + 1, 0.0)
        tau = rounding.absolute(tau, size * (error / rounding.eps / 4))
    m = every = gates(rows[:, None], tau[..., None]).reshape(B, U, N, N)
    distance = torch.arange(N, device=q.device)[:, None] - torch.arange(N, device=q.device)
    distance = distance if c.causal else distance.abs()
    near, past = (distance >= 0) & (distance <= c.window), distance > c.window
    kept, support = chosen.kept & past, past & (m.detach() > 0)
    kept, support, m = (x.repeat_interleave(H // U, 1) for x in (kept, support, m))
    m = m.to(q.dtype)
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT) * c.scale
    s = rounding.absolute(s, (q.abs() @ k.abs().mT) * (abs(c.scale) * (math.sqrt(D) / 4 + 2)) + 1)
    plain, opened = s, torch.where(kept, m, 1.0)
    if c.gate == "kv":
        s = s * opened
    elif c.gate == "logit":
        s = s + torch.where(opened > 0, torch.where(opened > 0, opened, 1.0).log(), -math.inf)
    s = s.masked_fill(~(near | kept), -math.inf)
    lse = s.logsumexp(-1)
    p = rounding.relative((s - lse[..., None]).exp(), 8.0)
    weight = p * opened if c.gate in ("v", "kv") else p
    exact_out = (weight @ v).detach()
    weight = multiplied(weight, plain, low)
    out = weight @ v
    kept_out = out.detach() if low is None else out.detach().to(low).to(out.dtype)
    dlse = dlse + (dout * (exact_out - kept_out)).sum(-1)  # a backward reads what was stored
    if rounding.eps:
        dlse = rounding.absolute(dlse, 4 * (p * (dout.abs() @ v.abs().mT)).sum(-1)) + rounding.of_delta(dout, out)
    loss = (out * rounding.relative(dout)).sum() + (lse * dlse).sum()
    if c.straight:
        zero = torch.where(support, m - m.detach(), 0.0)
        of_left = (plain - lse[..., None]).exp().detach()
        more = of_left * torch.where(kept, zero * (c.gate is None), zero)
        loss = loss + ((more @ v.detach()) * dout).sum()
    *found, dm = torch.autograd.grad(loss, [*leaves, every], allow_unused=True)
    of_gates = torch.zeros_like(every) if dm is None else dm.abs()
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    if rounding.eps:
        of_q, of_k = rounding.of_scores(p.detach(), dout, *(x.detach() for x in (v, q, k)), c.scale)
        gradients[0] = gradients[0] + of_q
        gradients[1] = gradients[1] + of_k.unflatten(1, (inputs[1].shape[1], -1)).sum(2)
    of_gradients = dict(zip(("dq", "dk", "dv", "du"), gradients, strict=True))
    # What du is summed of: each key's gates, and each step's, which its threshold shares among keys.
    size = of_gates.sum(2) + of_gates.sum(3).amax(-1, keepdim=True)
    return {"out": out.detach(), "lse": lse.detach(), **of_gradients, "size of du": size.detach()}
