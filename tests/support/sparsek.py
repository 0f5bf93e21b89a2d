"""SparseK attention written from its definition, N x N, by operations of torch that autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gossamer as gs


def kept_by_definition(u: Tensor, k: int, keep: str, causal: bool) -> tuple[Tensor, Tensor]:
    """Of each query and key (..., N, N) whether it is kept, and its gate, step by step."""
    N = u.shape[-1]
    kept = torch.zeros(*u.shape, N, dtype=torch.bool)
    tau = []
    for t in range(N):
        end = t + 1 if causal else N
        tau.append(gs.sparsek(u[..., :end], k).tau)
        before = u.detach()[..., :end]
        if keep == "topk":
            largest = before.sort(dim=-1, descending=True, stable=True).indices[..., :k]
            kept[..., t, :end].scatter_(-1, largest, True)
            kept[..., t, :end] &= before > -torch.inf
        else:
            kept[..., t, :end] = before > tau[-1].detach()[..., None]
    over = u[..., None, :] - torch.stack(tau, -1)[..., None]
    # At the ends of the clip, where it has no derivative, SparseK's gradient is 0.
    m = torch.where((over > 0) & (over < 1), over, over.detach().clamp(0, 1))
    return kept, torch.where(u[..., None, :] > -torch.inf, m, 0)


def attention_by_definition(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, k_keep: int, window: int = 0, keep: str = "topk",
    gate: str | None = "v", causal: bool = True, scale: float | None = None, straight_through: bool = False,
    q_offset: int | None = None, key_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of tensors of four dimensions."""
    (Q, D), N = q.shape[2:], k.shape[2]
    rows = slice(N - Q if q_offset is None else q_offset, N if q_offset is None else q_offset + Q)
    there = torch.arange(N) < torch.tensor(key_lengths or [N] * len(q))[:, None, None]
    k, v = (torch.where(there[..., None], x, 0) for x in (k, v))
    u = torch.where(there, u, -torch.inf)
    kept, m = (x[..., rows, :] for x in kept_by_definition(u, k_keep, keep, causal))
    distance = (torch.arange(N)[:, None] - torch.arange(N))[rows]
    if not causal:
        distance = distance.abs()
    near, past = (distance >= 0) & (distance <= window) & there[:, :, None], distance > window
    kept = kept & past
    support = past & (m > 0)
    kept, support, m, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (kept, support, m, k, v))
    attended = near | kept
    gates = torch.where(kept, m, 1)
    plain = s = q @ k.mT * (D**-0.5 if scale is None else scale)
    if gate == "kv":
        s = s * gates
    elif gate == "logit":
        s = s + gates.log()
    s = s.masked_fill(~attended, -torch.inf)
    lse = s.logsumexp(-1)
    of_weights = lse.masked_fill(lse == -torch.inf, 0)[..., None]  # nothing is attended: all weights are 0
    p = (s - of_weights).exp()
    of_values = gates if gate in ("v", "kv") else torch.ones_like(gates)
    out = (p * of_values) @ v
    if straight_through:
        # Nothing is added but a gradient: of kept keys' gates where values have none, and of gates that are left out.
        zero = torch.where(support, m - m.detach(), 0)
        weight = (plain - of_weights).exp().detach()
        more = weight * torch.where(kept, zero * (gate is None), zero)
        out = out + more @ v.detach()
    return out, lse


def inputs(
    draw: Any, dtype: torch.dtype = torch.float64, device: str = "cpu", prefix: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v, u and the options of a random call, of what a user can pass; with `prefix` also fewer queries than keys,
    and keys that are not there."""
    N = draw.choice([1, 2, 5, 17, 33, 50])
    B, G = draw.choice([1, 2]), draw.choice([1, 2])
    H = G * draw.choice([1, 2, 3])
    D, E = draw.choice([(1, 1), (4, 4), (8, 3), (5, 16)])
    torch.manual_seed(draw.randrange(2**31))
    q, k, v = (torch.randn(B, h, N, d, dtype=dtype, device=device) for h, d in ((H, D), (G, D), (G, E)))
    u = torch.randn(B, draw.choice([G, H]), N, dtype=dtype, device=device)
    kind = draw.choice(["plain", "slope", "fall", "ties", "equal", "far", "narrow", "gone"])
    if kind in ("slope", "fall"):
        u = u + (0.1 if kind == "slope" else -0.1) * torch.arange(N, device=device)
    elif kind == "ties":
        u = (2 * u).round() / 2
    elif kind == "equal":
        u = torch.ones_like(u)
    elif kind == "far":
        u = torch.where(torch.rand_like(u) < 0.2, 1e6 * u, u)
    elif kind == "narrow":
        u = 1e-3 * u
    elif kind == "gone":
        u = torch.where(torch.rand_like(u) < 0.4, -torch.inf, u)
    gate = draw.choice(["v", "kv", "logit", None])
    options = {
        "k_keep": draw.choice([1, 2, 5, max(1, N // 3), N, N + 3]),
        "window": draw.choice([0, 0, 1, 4, N, 2**31 - 1]),
        "keep": draw.choice(["topk", "support"]),
        "gate": gate,
        "causal": draw.random() < 0.8,
        "scale": draw.choice([None, 0.0, -0.7, 3.0]),
        "straight_through": gate in ("v", None) and draw.random() < 0.5,
    }
    if prefix:
        Q = draw.choice([0, 1, min(N, 3), N - 1, N])
        options["q_offset"] = draw.choice([None, 0, N - Q, draw.randint(0, N - Q)])
        q = q[:, :, :Q]
    if prefix and draw.random() < 0.4:
        options["key_lengths"] = lengths = [draw.choice([0, 1, N // 2, N - 1, N]) for _ in range(B)]
        for b, length in enumerate(lengths):
            for x in (k[b], v[b], u[b].unsqueeze(-1)):
                x[:, length:] = torch.nan
    return [q, k, v, u], options
