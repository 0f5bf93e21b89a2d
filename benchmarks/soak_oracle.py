"""What a call of attention must give: written from the definitions, without the package, of which nothing is imported.

A pattern is a nested tuple, its name and then its numbers: ("SlidingWindow", 5, 0, 2), ("Or", a, b). `kept` reads one
by the published definition. `exact` is attention in float64, which autograd differentiates; `plain` is dense
attention as a fused kernel rounds it: sums in float32, probabilities and dS in the type of the inputs. `rounding` says
how far rounding alone may move each number, from magnitudes: a score of size |s| is known to eps * |s|, and its
probability to as much, relatively.

Shapes: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E); query head h uses key head h // (H // G).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Spec = tuple[Any, ...]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink_logits", "dscale")


class Terms(NamedTuple):
    """The score terms of a call; lengths are integers of Python, which hold every integer type."""

    scale: Any  # a number, or of `exact` a tensor with a gradient
    offset: int  # position of query row 0
    softcap: float | None = None
    lengths: list[int] | None = None  # of each batch element
    sinks: Tensor | None = None  # (H,)
    slopes: Tensor | None = None  # (H,) or (B, H)
    distance: str = "signed"  # j - i, or "absolute": -|i - j|


class Positions(NamedTuple):
    """Positions i (Q, 1) and j (1, K) of the pairs of one batch element and head."""

    i: Tensor
    j: Tensor
    b: int
    h: int

    @property
    def row(self) -> Tensor:
        """Query rows, counted from 0."""
        return torch.arange(len(self.i), device=self.i.device)[:, None]

    @property
    def K(self) -> int:
        return self.j.shape[1]


# -- which pairs are kept --------------------------------------------------------------------------------------------


def lead(spec: Spec) -> tuple[bool, bool]:
    """Whether a pattern differs by batch element, and by query head."""
    name, *rest = spec
    if name in ("And", "Or", "Not", "PerHead", "PerBatch"):
        inner = rest[0] if name.startswith("Per") else rest
        found = [lead(one) for one in inner]
        by_batch, by_head = any(b for b, _ in found), any(h for _, h in found)
        return by_batch or name == "PerBatch", by_head or name == "PerHead"
    if name == "BlockMask":
        return rest[0].ndim == 4, rest[0].ndim > 2
    return name == "Document" and rest[0].ndim == 2, name == "LongNet"


def kept(spec: Spec, B: int, H: int, Q: int, K: int, offset: int, device: str = "cpu", merge: bool = False) -> Tensor:
    """(B or 1, H or 1, Q, K): how often each pair is kept, 0 or 1; with `merge` once for each term of a
    union, or branch of a LongNet, that keeps it."""
    i = torch.arange(Q, device=device)[:, None] + offset
    j = torch.arange(K, device=device)[None, :]
    by_batch, by_head = lead(spec)
    count = _each_branch if merge and spec[0] == "LongNet" else _each_term if merge else _kept
    rows = [
        torch.stack([count(spec, Positions(i, j, b, h)).long().expand(Q, K) for h in range(H if by_head else 1)])
        for b in range(B if by_batch else 1)
    ]
    return torch.stack(rows)


def _each_term(spec: Spec, p: Positions) -> Tensor:
    if spec[0] == "Or":
        return _each_term(spec[1], p) + _each_term(spec[2], p)
    return _kept(spec, p).long()


def _each_branch(spec: Spec, p: Positions) -> Tensor:
    return torch.stack([x.long() for x in _branches(p, *spec[1:])]).sum(0)


def _kept(spec: Spec, p: Positions) -> Tensor:
    name, *rest = spec
    if name == "And":
        return _kept(rest[0], p) & _kept(rest[1], p)
    if name == "Or":
        return _kept(rest[0], p) | _kept(rest[1], p)
    if name == "Not":
        return ~_kept(rest[0], p)
    if name == "PerHead":
        return _kept(rest[0][p.h], p)
    if name == "PerBatch":
        return _kept(rest[0][p.b], p)
    return DEFINITIONS[name](p, *rest).expand(len(p.i), p.K)


def _window(p: Positions, left: int | None, right: int | None, sinks: int) -> Tensor:
    near = p.i == p.i
    near = near & (p.j >= p.i - left) if left is not None else near
    near = near & (p.j <= p.i + right) if right is not None else near
    first = p.j < sinks
    return near | (first & (p.j <= p.i) if right == 0 else first)


def _block_mask(p: Positions, mask: np.ndarray, block: int) -> Tensor:
    one = mask if mask.ndim == 2 else mask[p.h] if mask.ndim == 3 else mask[p.b % len(mask), p.h % mask.shape[1]]
    return torch.from_numpy(one).to(p.i.device)[p.row // block, p.j // block]


def _longformer(p: Positions, window: int, tokens: tuple[int, ...], dilation: int) -> Tensor:
    distance = p.i - p.j
    near = (distance.abs() <= window // 2 * dilation) & (distance % dilation == 0)
    are_global = torch.tensor(tokens, dtype=torch.int64, device=p.i.device)
    return near | torch.isin(p.i, are_global) | torch.isin(p.j, are_global)


def _dilated(p: Positions, left: int, right: int, dilation: int) -> Tensor:
    m = (p.i - p.j) // dilation
    return (m * dilation == p.i - p.j) & (m >= -right) & (m <= left)


def _strided(p: Positions, stride: int, local: int) -> Tensor:
    distance = p.i - p.j
    return (distance >= 0) & ((distance <= local) | (distance % stride == 0))


def _power_strided(p: Positions, base: int, local: int) -> Tensor:
    distance, powers = p.i - p.j, [1]
    while powers[-1] < 2**33:
        powers.append(powers[-1] * base)
    there = torch.isin(distance, torch.tensor(powers, dtype=torch.int64, device=p.i.device))
    return ((distance >= 0) & (distance <= local)) | there


def _segment(p: Positions, segment: int, dilation: int, offset: int) -> Tensor:
    inside = (p.i % segment % dilation == offset) & (p.j % segment % dilation == offset)
    return inside & (p.i // segment == p.j // segment)


def _branches(p: Positions, segments: Any, dilations: Any, heads: int, causal: bool) -> list[Tensor]:
    every = [_segment(p, w, r, p.h % r) for w, r in zip(segments, dilations, strict=True)]
    return [here & (p.j <= p.i) if causal else here for here in every]


def _document(p: Positions, ids: np.ndarray) -> Tensor:
    mine = torch.from_numpy(ids if ids.ndim == 1 else ids[p.b % len(ids)]).to(p.i.device)
    inside = (p.i >= 0) & (p.i < p.K)
    return inside & (mine[p.i.clamp(0, p.K - 1)] == mine[p.j])


def _neighborhood(
    p: Positions, shape: tuple[int, ...], reach: tuple[tuple[int, int], ...], border: tuple[str, ...],
    causal: tuple[bool, ...],
) -> Tensor:  # fmt: skip
    near, i, j = (p.i >= 0) & (p.i < math.prod(shape)), p.i, p.j
    for n, (before, after), how, cause in reversed(list(zip(shape, reach, border, causal, strict=True))):
        at, there = i % n, j % n
        first, last = at - before, at + after
        if how == "shift" and not cause:  # by as much as it hangs over an end of the axis
            over = (-first).clamp(min=0) - (last - (n - 1)).clamp(min=0)
            first, last = first + over, last + over
        near = near & (there >= first) & (there <= last)
        near = near & (there <= at) if cause else near
        i, j = i // n, j // n
    return near


def _graph(p: Positions, rows: list[list[int]]) -> Tensor:
    found = torch.zeros(len(rows), p.K, dtype=torch.bool)
    for r, keys in enumerate(rows):
        found[r, keys] = True
    return found.to(p.i.device)


def _tree(p: Positions, parents: list[int]) -> Tensor:
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for t, parent in enumerate(parents):
        if parent >= 0:
            ancestors[t] = ancestors[parent]
        ancestors[t, t] = True
    offset = int(p.i[0])
    node = p.j - offset
    inside = (node >= 0) & (node < len(parents))
    return (node < 0) | (inside & ancestors.to(p.i.device)[p.row, node.clamp(0, len(parents) - 1)])


def _big_bird(
    p: Positions, block: int, window: int, ends: int, random: int, seed: int, causal: bool, drawn: Any
) -> Tensor:
    must, _, _ = big_bird_rule(-(-p.K // block), window, ends, random, causal)
    here = torch.from_numpy(must | drawn).to(p.i.device)[p.row // block, p.j // block]
    return here & (p.j <= p.i) if causal else here


DEFINITIONS: dict[str, Any] = {
    "Dense": lambda p: p.i == p.i,
    "Causal": lambda p: p.j <= p.i,
    "SlidingWindow": _window,
    "Local": lambda p, block: p.i // block == p.j // block,
    "BlockMask": _block_mask,
    "BigBird": _big_bird,
    "Longformer": _longformer,
    "Dilated": _dilated,
    "DilatedSegment": _segment,
    "Strided": _strided,
    "PowerStrided": _power_strided,
    "LongNet": lambda p, *rest: torch.stack(_branches(p, *rest)).any(0),
    "Document": _document,
    "Neighborhood": _neighborhood,
    "CSR": _graph,
    "Tree": _tree,
    "Predicate": lambda p, a, b, m, c: (a * p.i + b * p.j) % m < c,
}


def big_bird_rule(
    n: int, window: int, ends: int, random: int, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of n x n blocks: what every draw keeps, where the random blocks may lie, and how many each block row has."""
    row, column = np.ogrid[:n, :n]
    of_rows = (row < ends) | (row >= n - ends)
    must = of_rows | (column < ends) | (column >= n - ends) | (abs(row - column) <= window // 2)
    may = ~must & (column <= row - 2) if causal else ~must
    return must, may, np.minimum(may.sum(1), random)


# -- what attention gives --------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, t: Terms) -> tuple[Tensor, Tensor, Tensor | None]:
    """(scale * q.k, scores, slope * distance or None), (B, H, Q, K), in the type of q; k as many heads as q."""
    x = (q @ k.mT) * t.scale
    s = x if t.softcap is None else t.softcap * torch.tanh(x / t.softcap)
    if t.slopes is None:
        return x, s, None
    i = torch.arange(q.shape[2], device=q.device)[:, None] + t.offset
    distance = (torch.arange(k.shape[2], device=q.device) - i).to(q.dtype)
    distance = -distance.abs() if t.distance == "absolute" else distance
    a = t.slopes.to(q.dtype)[..., None, None] * distance
    return x, s + a, a


def _heads(x: Tensor, H: int) -> Tensor:
    return x.repeat_interleave(H // x.shape[1], 1)


def within(counts: Tensor, t: Terms) -> Tensor:
    """`counts` without the keys at and past the lengths."""
    if t.lengths is None:
        return counts
    K = counts.shape[-1]
    ends = torch.tensor([min(max(n, 0), K) for n in t.lengths], device=counts.device)
    return torch.where(torch.arange(K, device=counts.device) < ends[:, None, None, None], counts, 0)


def exact(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, t: Terms) -> tuple[Tensor, Tensor]:
    """(out (B, H, Q, E), lse (B, H, Q)) of float64 tensors; a row that keeps nothing gives 0, and -inf or its sink.

    Args:
        counts: of `within`.
    """
    H = q.shape[1]
    _, s, _ = _scores(q, _heads(k, H), t)
    s = torch.where(counts > 0, s, -math.inf)
    sink = s.new_full((H, 1), -math.inf) if t.sinks is None else t.sinks.double()[:, None]
    m = torch.maximum(s.detach().amax(-1), sink.detach())
    m = torch.where(m == -math.inf, 0.0, m)
    e = torch.exp(s - m[..., None]) * counts
    total = e.sum(-1) + torch.exp(sink - m)
    some = total > 0
    total = torch.where(some, total, 1.0)
    out = (e / total[..., None]) @ _heads(v, H)
    return out, torch.where(some, m + torch.log(total), -math.inf)


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, t: Terms, dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """Results and gradients of dense attention in the type of the inputs, of which float16 and bfloat16 sum in float32.

    Args:
        dout, dlse: of out and lse, in their types.
    """
    low, H = q.dtype, q.shape[1]
    wide = torch.float64 if low == torch.float64 else torch.float32
    qw, kw, vw, dow = q.to(wide), _heads(k, H).to(wide), _heads(v, H).to(wide), dout.to(wide)
    x, s, _ = _scores(qw, kw, t)
    s = torch.where(counts > 0, s + torch.log(counts.to(wide)), -math.inf)
    sink = s.new_full((H, 1), -math.inf) if t.sinks is None else t.sinks.to(wide)[:, None]
    m = torch.maximum(s.amax(-1), sink)
    m = torch.where(m == -math.inf, 0.0, m)
    lse = m + torch.log(torch.exp(s - m[..., None]).sum(-1) + torch.exp(sink - m))
    base = torch.where(lse == -math.inf, math.inf, lse)
    p = torch.exp(s - base[..., None])
    out = (p.to(low).to(wide) @ vw).to(low)
    delta = (dow * out.to(wide)).sum(-1) - torch.where(lse == -math.inf, 0.0, dlse.to(wide))
    ds = p * (dow @ vw.mT - delta[..., None])
    if t.softcap is not None:
        ds = ds * (1 - torch.tanh(x / t.softcap) ** 2)
    ds = ds.to(low).to(wide)
    found = {"out": out, "lse": lse, "dq": (ds @ kw * t.scale).to(low)}
    found["dscale"] = (ds @ kw * qw).sum()
    found["dk"] = _by_key_head(ds.mT @ qw * t.scale, k.shape[1]).to(low)
    found["dv"] = _by_key_head(p.to(low).to(wide).mT @ dow, k.shape[1]).to(low)
    if t.sinks is not None:
        found["dsink_logits"] = (torch.exp(sink - base) * -delta).sum((0, 2)).to(t.sinks.dtype)
    return found


def _by_key_head(x: Tensor, G: int) -> Tensor:
    return x.unflatten(1, (G, -1)).sum(2)


# -- how far rounding may move it ------------------------------------------------------------------------------------


def rounding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    t: Terms,
    dout: Tensor,
    dlse: Tensor,
    low: torch.dtype,
    merge: bool,
    scaled: bool = False,
    rough: bool = False,
) -> dict[str, Tensor]:
    """Of every number, how far it may be from float64 by rounding alone: the formulas again, over errors.

    A sum of n products is known to (sqrt(n) + 4) eps of the sum of their magnitudes, an exp or tanh to 4 eps.

    Args:
        q, k, v, dout, dlse: in float64, of the values that the call has.
        low: the dtype of the call.
        merge: terms of a union are attended to one by one, each rounded to `low`.
        scaled: q is multiplied by the scale, and rounded to `low`.
        rough: tanh may be 1 - 2 / (exp(2 x) + 1), which near 0 is off by what exp, the sum and the reciprocal, numbers
            near 1, 2 and 1/2, are rounded by: together by 2 eps, however small it is.
    """
    wide = torch.float64 if low == torch.float64 else torch.float32
    eps, stored = torch.finfo(wide).eps, torch.finfo(low).eps / 2
    short = 0.0 if low == wide else stored  # of probabilities and dS, which are rounded where the inputs have 16 bits
    normal = torch.finfo(low).smallest_normal  # below it 16 bits have steps, and wider numbers may be 0
    least = 2 * normal * (1.0 if low == wide else torch.finfo(low).eps)
    H, G, K, D, E = q.shape[1], k.shape[1], k.shape[2], q.shape[3], v.shape[3]
    Q = q.shape[2]

    def summed(n: int) -> float:
        return eps * (math.sqrt(n) + 4)

    k, v = _heads(k, H), _heads(v, H)
    x, s, alibi = _scores(q, k, t)
    some = counts > 0
    s = torch.where(some, s + torch.log(counts.double()), -math.inf)
    once = stored if scaled else 0.0
    dx = (summed(D) + once) * abs(t.scale) * (q.abs() @ k.abs().mT)
    slope, dslope, capped = torch.ones(()), torch.zeros(()), x
    if t.softcap is not None:
        nearest = (x.abs() - dx).clamp(min=0) / t.softcap
        steepest = 1 - torch.tanh(nearest) ** 2
        tanh = torch.tanh(x / t.softcap)
        slope, dslope = 1 - tanh**2, 4 * eps + 2 * (dx / t.softcap * steepest).clamp(max=1)
        capped = t.softcap * tanh
        dx = dx * steepest + 4 * eps * capped.abs() + 2 * eps * t.softcap * rough
    size = capped.abs() if alibi is None else capped.abs() + alibi.abs()
    sink = s.new_full((H, 1), -math.inf) if t.sinks is None else t.sinks.double()[:, None]
    m = torch.maximum(s.amax(-1), sink)
    m = torch.where(m == -math.inf, 0.0, m)
    total = torch.exp(s - m[..., None]).sum(-1) + torch.exp(sink - m)
    empty = total == 0
    lse = torch.where(empty, 0.0, m + torch.log(total))
    ds = torch.where(some, dx + 6 * eps * (size + m.abs()[..., None] + 1), 0.0)
    p = torch.where(some, torch.exp(s - lse[..., None]), 0.0)
    worst = torch.maximum(ds.amax(-1), 6 * eps * (m.abs() + torch.where(sink == -math.inf, 0.0, sink).abs()))
    mean = torch.where(worst < 0.1, (p * ds).sum(-1) + 6 * eps * (m.abs() + 1), worst)
    of_lse = torch.where(empty, 0.0, 2 * mean + summed(K) + 2 * eps * lse.abs())
    # exp(s - lse) of scores that are off by ds; near 1, a probability is off by no more than the others together.
    grown = torch.expm1((2 * (ds + of_lse[..., None])).clamp(max=600))
    of_others = torch.expm1((4 * worst).clamp(max=600))[..., None] * (1 - p)
    # Parts are weighed by exp(lse of the part - lse), each known to the rounding of its exponent.
    weighed = summed(K) + 4 * eps * (m.abs() + lse.abs())[..., None]
    dp = torch.minimum(torch.minimum(p * grown, of_others), torch.ones_like(p)) * some + p * weighed
    tiny = (least + torch.finfo(wide).smallest_normal) * some
    rounded = short * 2 + summed(K)
    factor = 2.0 if merge else 1.0
    dout_ = factor * ((dp + rounded * p + tiny) @ v.abs())
    out = p @ v
    found = {"out": dout_ + stored * factor * out.abs() + least, "lse": factor * of_lse}
    if merge:  # each term's result is rounded, and may be larger than the joint one
        found["out"] = found["out"] + 2 * stored * (p @ v.abs())
    # Where the rounding of scores is more than exp can bear, the largest of a row may become infinite.
    unbearable = worst > math.log(torch.finfo(wide).max)
    found["out"] = torch.where(unbearable[..., None], math.inf, torch.where(empty[..., None], 0.0, found["out"]))
    found["lse"] = torch.where(unbearable, math.inf, found["lse"])

    dlse = torch.where(empty, 0.0, dlse)
    products = dout.abs() @ v.abs().mT
    g = dout @ v.mT - ((dout * out).sum(-1) - dlse)[..., None]
    of_delta = (dout.abs() * found["out"]).sum(-1) + summed(E) * (dout * out).abs().sum(-1) + 2 * eps * dlse.abs()
    if merge:
        of_delta = of_delta + 4 * stored * (dout.abs() * v.abs().amax(2, keepdim=True)).sum(-1)
        products = products * (1 + stored / eps)
    of_g = summed(E) * products + of_delta[..., None] + 2 * eps * g.abs()
    exponent = ds + of_lse[..., None] + 4 * eps * (size + lse.abs()[..., None])
    # The backward's exp(s - lse) overflows where rounding moves the exponent that far: anything is right there.
    grown = torch.where(exponent > math.log(torch.finfo(wide).max), math.inf, torch.expm1(exponent.clamp(max=700)))
    of_p = p * (grown + 8 * eps)
    of_p = torch.where(some, factor * of_p, 0.0)
    magnitude = p * g.abs() * slope
    of_ds = (of_p * (g.abs() + of_g) + p * of_g) * slope + (p + of_p) * (g.abs() + of_g) * dslope
    # P is rounded before dS in some kernels: what 16 bits do to a tiny one is multiplied by dP - delta.
    of_ds = of_ds + (short * 4 * factor + 8 * eps) * magnitude + tiny * (1 + g.abs())
    scale = abs(t.scale)
    dq = scale * ((of_ds + (summed(K) + 2 * short) * magnitude) @ k.abs())
    found["dq"] = dq + (stored + once) * scale * ((p * g * slope) @ k).abs() + least
    n = Q * (H // G)
    dk = scale * (of_ds + (summed(n) + 2 * short + once) * magnitude).mT @ q.abs()
    dv = (of_p + tiny + (summed(n) + 2 * short * factor) * p).mT @ dout.abs()
    found["dk"] = _by_key_head(dk, G) + stored * scale * _by_key_head((p * g * slope).mT @ q, G).abs() + least
    found["dv"] = _by_key_head(dv, G) + stored * _by_key_head(p.mT @ dout, G).abs() + least
    if scaled and scale:
        # dscale = sum(dq * q) / scale.
        found["dscale"] = (
            2 * (q.abs() * found["dq"]).sum() / scale
            + summed(q.numel()) * (q.abs() * (scale * (magnitude @ k.abs()))).sum() / scale
        )
    if t.sinks is not None:
        share = torch.where(empty, 0.0, torch.exp(sink - lse))
        delta = ((dout * out).sum(-1) - dlse).abs()
        of_share = share * torch.expm1((of_lse + 6 * eps * (sink.abs() + lse.abs() + 2)).clamp(max=600))
        of_share = torch.where(share > 0, of_share, 0.0)
        each = of_share * (delta + of_delta) + share * (of_delta + summed(q.shape[0] * Q) * delta)
        resolution = torch.finfo(t.sinks.dtype).eps / 2
        found["dsink_logits"] = each.sum((0, 2)) * factor + resolution * (share * delta).sum((0, 2))
        found["dsink_logits"] = torch.where(unbearable.any(2).any(0), math.inf, found["dsink_logits"])
        if torch.finfo(t.sinks.dtype).bits == 16:
            found["dsink_logits"] = found["dsink_logits"] + torch.finfo(t.sinks.dtype).smallest_normal
    return found


def wrong(name: str, actual: Tensor, true: Tensor, low: Tensor, moved: Tensor) -> str | None:
    """What is wrong with a result; None where each number is within twice plain attention's error and rounding.

    Plain attention's error is that of the row that the number is in. Where it overflows, or the allowed error reaches
    what the type cannot hold, anything is right.

    Args:
        actual: the result.
        true: in float64.
        low: plain attention's.
        moved: `rounding`.
    """
    if actual.shape != true.shape:
        return f"{name} has shape {tuple(actual.shape)}, not {tuple(true.shape)}"
    most = torch.finfo(actual.dtype).max
    actual, low = actual.double(), low.double()
    of_plain = _difference(low, true).nan_to_num(nan=math.inf, posinf=math.inf)
    of_plain = of_plain if name == "lse" or true.ndim == 1 else of_plain.amax(-1, keepdim=True)
    allowed = 2 * of_plain + moved.nan_to_num(nan=math.inf, posinf=math.inf)
    allowed = torch.where(true.isfinite() & (true.abs() + allowed > most), math.inf, allowed)
    found = _difference(actual, true)
    bad = ~((found <= allowed) | (allowed == math.inf))
    if not bad.any():
        return None
    over = torch.where(bad, (found / allowed.clamp(min=1e-300)).nan_to_num(nan=math.inf), 0.0)
    at = np.unravel_index(int(over.argmax()), tuple(true.shape))
    place, limit = ", ".join(str(int(n)) for n in at), float(allowed.expand_as(true)[at])
    numbers = f"{int(bad.sum())} of {bad.numel()} numbers"
    return f"{name}[{place}] is {float(actual[at]):.9g}, not {float(true[at]):.9g} within {limit:.2e} ({numbers})"


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == b) & a.isinf(), 0.0, (a - b).abs())
