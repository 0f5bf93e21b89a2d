"""The dense oracle: attention written as its formulas, over a whole (Q, K) matrix, forward and backward.

Every other implementation is tested against this one. It is the only path that holds an N x N array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.launch import Direction, Operand, Prepared, one_function
from gossamer.kernels.row_formulas import Attended, compute_dtype, row_terms, sink_gradient
from gossamer.plan.capability import Capability
from gossamer.plan.problem import Problem


def kept(mask: Tensor, terms: Terms, K: int) -> Tensor:
    """`mask`, broadcastable to (B, H, Q, K), without the keys at and past `key_lengths`."""
    if terms.key_lengths is None:
        return mask
    j = torch.arange(K, device=mask.device)
    return mask & (j < terms.key_lengths.to(mask.device)[:, None, None, None])


def attended(keep: Tensor, G: int) -> Attended:
    """The rows and keys that a mask (B, H, Q, K) keeps."""
    return Attended(keep.any(-1, keepdim=True), _by_group(keep.any(-2), G).any(2)[..., None])


def scores(q: Tensor, k: Tensor, terms: Terms, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(scores (B, H, Q, K) before masking, tanh(s / softcap) or None); q (B, H, Q, D), k (B, G, K, D).

    Args:
        rows: which rows of the call those of q are; all, where it is not given.
    """
    B, H, Q, _ = q.shape
    G, K = k.shape[1:3]
    s = (_by_group(q, G) @ k.mT.unsqueeze(2)).reshape(B, H, Q, K) * terms.scale
    t = None
    if terms.softcap is not None:
        t = torch.tanh(s / terms.softcap)
        s = terms.softcap * t
    if terms.alibi_slopes is not None:
        i = terms.q_offset + (torch.arange(Q, device=q.device) if rows is None else rows)
        j = torch.arange(K, device=q.device)
        distance = j - i[:, None]
        distance = -distance.abs() if terms.absolute else distance
        s = s + terms.alibi_slopes.to(s.dtype).expand(B, H)[:, :, None, None] * distance
    return s, t


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out (B, H, Q, E), lse (B, H, Q)) in float64 whatever the inputs; plain autograd differentiates it.

    A row that keeps nothing gives out 0, zero gradients, and lse -inf, or the sink where there is one: an empty
    row's denominator is exp(sink) alone, which is what merging by log-sum-exp needs.
    """
    q, k, v = q.double(), k.double(), v.double()
    B, H, Q, _ = q.shape
    G, K = k.shape[1:3]
    keep = kept(mask, terms, K).expand(B, H, Q, K)
    there, some = attended(keep, G), keep.any(-1)
    q, k, v = there.of_rows(q), there.of_keys(k), there.of_keys(v)
    s, _ = scores(q, k, terms)
    s = torch.where(keep, s, -torch.inf)
    if terms.sink_logits is not None:
        sink = terms.sink_logits.double()[:, None, None].expand(B, H, Q, 1)
        s, some = torch.cat([s, sink], -1), torch.ones_like(some)
    s = torch.where(some[..., None], s, 0.0)
    lse = torch.logsumexp(s, -1)
    p = torch.where(keep, torch.exp(s - lse[..., None])[..., :K], 0.0)
    out = there.of_rows((_by_group(p, G) @ v.unsqueeze(2)).reshape(B, H, Q, -1))
    return out, torch.where(some, lse, -torch.inf)


def _by_group(x: Tensor, G: int) -> Tensor:
    """(B, H, ...) -> (B, G, H // G, ...): the query heads of each key head."""
    return x.unflatten(1, (G, x.shape[1] // G))


class Reference:
    """Dense attention on any device; float64 inputs are computed in float64, the others in float32."""

    name = "reference"
    layout = "dense"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        score_terms=frozenset({"q_offset", "key_lengths", "softcap", "sink_logits", "alibi_slopes", "alibi_distance"}),
    )

    def unavailable(self) -> list[str]:
        return []

    def tile_choices(self, problem: Problem) -> tuple[tuple[int, int], ...]:
        return ()

    def tile(self, problem: Problem) -> tuple[int, int]:
        return 128, 128

    def prepare(
        self, problem: Problem, layout: Tensor, direction: Direction, scoring: Scoring, operands: Mapping[str, Operand]
    ) -> Prepared:
        return one_function(self.name, problem, layout, direction, scoring, operands)

    def kernel(self, name: str, problem: Problem, scoring: Scoring) -> Callable[..., tuple[Tensor, ...]]:
        directions: dict[str, Callable[..., tuple[Tensor, ...]]] = {"forward": forward, "backward": backward}
        return partial(directions[name], problem, scoring)


def _attended(problem: Problem, terms: Terms, mask: Tensor) -> tuple[Tensor, Attended]:
    """The pairs of a call that are kept, (B, H, Q, K), and what they read."""
    keep = kept(mask, terms, problem.K).expand(problem.B, problem.H, problem.Q, problem.K)
    return keep, attended(keep, problem.G)


def forward(
    problem: Problem, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *vectors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse); the score vectors are key_lengths, sink_logits and alibi_slopes, or None."""
    terms, dtype = Terms(*scoring, *vectors), compute_dtype(q.dtype)
    keep, there = _attended(problem, terms, mask)
    s, _ = scores(there.of_rows(q.to(dtype)), there.of_keys(k.to(dtype)), terms)
    s = s.masked_fill(~keep, -torch.inf)
    m = s.amax(-1)
    sink = None if terms.sink_logits is None else terms.sink_logits.to(dtype)[:, None]
    if sink is not None:
        m = torch.maximum(m, sink)
    m = m.clamp(min=torch.finfo(dtype).min)
    p = torch.exp(s - m[..., None])
    total = p.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - m)
    out = (_by_group(p, problem.G) @ there.of_keys(v.to(dtype)).unsqueeze(2)).reshape(*q.shape[:3], problem.E)
    # A row that keeps anything has a total of at least 1, its largest term.
    out = out / total.clamp(min=1.0)[..., None]
    return out.to(q.dtype), m + torch.log(total)


def backward(
    problem: Problem, scoring: Scoring, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, mask: Tensor, *vectors: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv), and dsink_logits where there are sinks."""
    terms, dtype, G = Terms(*scoring, *vectors), compute_dtype(q.dtype), problem.G
    keep, there = _attended(problem, terms, mask)
    qc, do = (there.of_rows(x.to(dtype)) for x in (q, dout))
    kc, vc = (there.of_keys(x.to(dtype)) for x in (k, v))
    delta, lse = row_terms(do, dlse, out, lse, dtype)
    s, t = scores(qc, kc, terms)
    s = s.masked_fill(~keep, -torch.inf)
    p = torch.exp(s - lse[..., None])
    dp = (_by_group(do, G) @ vc.mT.unsqueeze(2)).reshape(s.shape)
    ds = p * (dp - delta[..., None])
    if t is not None:
        ds = ds * (1 - t * t)
    ds = _by_group(ds * terms.scale, G)
    dq = (ds @ kc.unsqueeze(2)).reshape(q.shape)
    dk = (ds.mT @ _by_group(qc, G)).sum(2)
    dv = (_by_group(p, G).mT @ _by_group(do, G)).sum(2)
    gradients = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return gradients if terms.sink_logits is None else (*gradients, sink_gradient(delta, lse, terms.sink_logits))


IMPLEMENTATION = Reference()
