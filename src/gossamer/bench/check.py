"""The check of a benchmark's numbers: sampled rows and keys in float64, from the pattern's own `keep`.

Everything here follows section 1 of DESIGN.md and the standard gradients of softmax attention:
delta = rowsum(dout * out), dS = P * (dP - delta), dq = scale * dS k, dk = scale * dS^T q, dv = P^T dout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.contract import Terms

if TYPE_CHECKING:
    from gossamer import Pattern

PAIRS_AT_ONCE = 2**25  # of float64 scores held at a time
ROWS_FOR_KEYS = 4608  # the rows that the sampled keys may need: enough for one key in a window of 4096

# A rounding of the result; float32 sums of thousands of terms lose a little more than that.
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Inputs:
    """One attention problem: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E), dout like the output, or None."""

    pattern: Pattern
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    dout: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """The exact numbers of one head's sampled rows and of its key head's sampled keys, and the error allowed."""

    index: tuple[int, int]  # batch element, query head
    rows: Tensor
    keys: Tensor | None
    exact: dict[str, Tensor]  # "out", "dq" (R, .), "dk", "dv" (n, .), float64
    limit: dict[str, float]


def plain_rows(
    inputs: Inputs, b: int, h: int, rows: Tensor, rounding: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """For chunks of query rows of a head: (rows, P, out, dS) in float64 over all keys; dS without a dout is None.

    With `rounding`, scores pass through float32 and P through that type, as in a kernel of that precision.
    """
    pattern, terms = inputs.pattern, inputs.terms
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    g = h // (inputs.q.shape[1] // inputs.k.shape[1])
    k, v = inputs.k[b, g].double(), inputs.v[b, g].double()

    for chunk in rows.split(max(1, PAIRS_AT_ONCE // K)):
        kept = kept_pairs(pattern, b, h, chunk.cpu().numpy(), np.arange(K), Q, K, terms.q_offset).to(k.device)
        q = inputs.q[b, h, chunk].double()
        score = terms.scale * q @ k.T
        score = score if rounding is None else score.float().double()
        slope = torch.ones((), dtype=torch.float64, device=k.device)
        if terms.softcap is not None:
            bounded = torch.tanh(score / terms.softcap)
            score, slope = terms.softcap * bounded, 1 - bounded**2
        if terms.alibi_slopes is not None:
            distance = torch.arange(K, device=k.device) - (chunk[:, None] + terms.q_offset)
            score = score + terms.alibi_slopes[h].double() * distance
        if terms.key_lengths is not None:
            kept &= torch.arange(K, device=k.device) < terms.key_lengths[b]
        score = score.masked_fill(~kept, -torch.inf)
        lse = score.logsumexp(-1, keepdim=True)
        if terms.sink_logits is not None:
            lse = torch.logaddexp(lse, terms.sink_logits[h].double())
        p = torch.exp(score - lse.masked_fill(lse.isneginf(), 0.0))
        out = _through(p, rounding) @ v
        ds = None
        if inputs.dout is not None:
            dout = inputs.dout[b, h, chunk].double()
            ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True)) * slope
        yield chunk, p, out, ds


def _through(x: Tensor, rounding: torch.dtype | None) -> Tensor:
    return x if rounding is None else x.to(rounding).double()


def kept_pairs(
    pattern: Pattern, b: int, h: int, rows: np.ndarray, keys: np.ndarray, Q: int, K: int, q_offset: int
) -> Tensor:
    """Which pairs of rows (R,) and keys (n,) the pattern keeps for one head, (R, n) bool, from `keep` alone."""
    one = pattern.at(b if pattern.lead[0] > 1 else 0, h if pattern.lead[1] > 1 else 0)
    parts = np.array_split(rows, max(1, min(len(rows), len(rows) * len(keys) // 2**20)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        kept = pool.map(lambda part: one.keep(part[:, None] + q_offset, keys[None, :], Q, K, q_offset), parts)
        return torch.from_numpy(np.concatenate(list(kept)))


def exact_rows(inputs: Inputs, b: int, h: int, rows: Tensor, rounding: torch.dtype | None = None) -> dict[str, Tensor]:
    """ "out" (R, E), and "dq" (R, D) when there is a dout, of one head's rows in float64."""
    g = h // (inputs.q.shape[1] // inputs.k.shape[1])
    found: dict[str, list[Tensor]] = {"out": []}
    for _, _, out, ds in plain_rows(inputs, b, h, rows, rounding):
        found["out"].append(out)
        if ds is not None:
            found.setdefault("dq", []).append(inputs.terms.scale * _through(ds, rounding) @ inputs.k[b, g].double())
    return {name: torch.cat(parts) for name, parts in found.items()}


def exact_keys(inputs: Inputs, b: int, g: int, keys: Tensor, rounding: torch.dtype | None = None) -> dict[str, Tensor]:
    """ "dk" (n, D) and "dv" (n, E) of a key head's sampled keys in float64, from every row that keeps one of them."""
    assert inputs.dout is not None
    H, Q, K = inputs.q.shape[1], inputs.q.shape[2], inputs.k.shape[2]
    group = H // inputs.k.shape[1]
    dk = torch.zeros(len(keys), inputs.k.shape[3], dtype=torch.float64, device=keys.device)
    dv = torch.zeros(len(keys), inputs.v.shape[3], dtype=torch.float64, device=keys.device)
    for h in range(g * group, (g + 1) * group):
        kept = kept_pairs(inputs.pattern, b, h, np.arange(Q), keys.cpu().numpy(), Q, K, inputs.terms.q_offset)
        rows = kept.any(1).nonzero().squeeze(1).to(keys.device)
        for chunk, p, _, ds in plain_rows(inputs, b, h, rows, rounding):
            assert ds is not None
            p, ds = _through(p[:, keys], rounding), _through(ds[:, keys], rounding)
            dv += p.T @ inputs.dout[b, h, chunk].double()
            dk += inputs.terms.scale * ds.T @ inputs.q[b, h, chunk].double()
    return {"dk": dk, "dv": dv}


def draw_samples(inputs: Inputs, *, heads: int = 2, rows: int = 64, keys: int = 8, seed: int = 0) -> list[Sample]:
    """Exact numbers of random rows (the first and the last among them) and keys of some heads.

    The error allowed is twice that of float64 attention whose P, dS and results are rounded to the inputs' type,
    plus a rounding.
    """
    B, H, Q = inputs.q.shape[:3]
    generator = torch.Generator().manual_seed(seed)
    device, dtype = inputs.q.device, inputs.q.dtype
    chosen = torch.linspace(0, B * H - 1, min(heads, B * H)).round().long().unique().tolist()
    samples = []
    for at in chosen:
        b, h = divmod(at, H)
        picked = torch.randint(Q, (rows,), generator=generator)
        picked = torch.cat((picked, torch.tensor([0, Q - 1]))).unique().to(device)
        exact = exact_rows(inputs, b, h, picked)
        rounded = exact_rows(inputs, b, h, picked, dtype)
        columns = None
        if inputs.dout is not None and keys:
            g = h // (H // inputs.k.shape[1])
            columns = _sample_keys(inputs, b, g, keys, generator).to(device)
            exact |= exact_keys(inputs, b, g, columns)
            rounded |= exact_keys(inputs, b, g, columns, dtype)
        limit = {name: 2 * row_error(rounded[name].to(dtype), exact[name]) + FLOOR[dtype] for name in exact}
        samples.append(Sample((b, h), picked, columns, exact, limit))
    return samples


def _sample_keys(inputs: Inputs, b: int, g: int, count: int, generator: torch.Generator) -> Tensor:
    """Random keys of a key head, and the last one, as many as few enough rows keep; at least one."""
    Q, K = inputs.q.shape[2], inputs.k.shape[2]
    h = g * (inputs.q.shape[1] // inputs.k.shape[1])
    centre = int(torch.randint(K, (1,), generator=generator))
    near = [centre, min(centre + 1, K - 1), min(centre + 5, K - 1)]  # neighbours share most of their rows
    drawn = list(dict.fromkeys([*near, K - 1, *torch.randint(K, (count,), generator=generator).tolist(), 0]))
    kept = kept_pairs(inputs.pattern, b, h, np.arange(Q), np.array(drawn), Q, K, inputs.terms.q_offset).numpy()
    # Keys that too many rows keep (global columns) come last, and are taken only where there are no others.
    order = np.argsort(np.maximum(kept.sum(0), ROWS_FOR_KEYS), kind="stable")
    taken, rows = [order[0]], kept[:, order[0]]
    for at in order[1:]:
        union = rows | kept[:, at]
        if len(taken) < count and union.sum() <= ROWS_FOR_KEYS:
            taken, rows = [*taken, at], union
    return torch.tensor(sorted(drawn[at] for at in taken))


def row_error(found: Tensor, exact: Tensor) -> float:
    """The largest error of a row (Euclidean), relative to that row's size or the median row's, the larger."""
    size = exact.norm(dim=-1)
    scale = torch.maximum(size, size.median()).clamp_min(1e-30)
    error = ((found.double() - exact).norm(dim=-1) / scale).max()
    return float("inf") if error.isnan() else float(error)


def compare(samples: list[Sample], found: dict[str, Tensor], group: int) -> tuple[float, list[str]]:
    """The largest error over its limit (at most 1 is right), and what is wrong in words.

    `found` holds "out" (B, H, Q, E) and, of a backward, "dq", "dk" (B, G, K, D), "dv" (B, G, K, E).
    """
    worst, wrong = 0.0, []
    for sample in samples:
        b, h = sample.index
        for name, tensor in found.items():
            if name not in sample.exact:  # keys are not sampled of a dense peer
                continue
            own = tensor[b, h // group, sample.keys] if name in ("dk", "dv") else tensor[b, h, sample.rows]
            error = row_error(own.detach(), sample.exact[name])
            worst = max(worst, error / sample.limit[name])
            if not error <= sample.limit[name]:
                wrong.append(
                    f"{name} of head {h}, batch element {b}: error {error:.1e}, limit {sample.limit[name]:.1e}"
                )
    return worst, wrong
