"""The check of a benchmark's numbers: sampled rows and keys in float64, from the pattern's own `keep`.

Everything here follows section 1 of DESIGN.md and the standard gradients of softmax attention:
delta = rowsum(dout * out), dS = P * (dP - delta), dq = scale * dS k, dk = scale * dS^T q, dv = P^T dout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import kept, scores
from gossamer.testing.inputs import Inputs

PAIRS_AT_ONCE = 2**25  # of float64 scores held at a time
# Rows that the sampled keys may need: more than a few for one key (a window of 4096), not many for all.
FEW_ROWS, MANY_ROWS = 2048, 16384

# A rounding of the result; float32 sums of thousands of terms lose a little more than that.
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Sample:
    """The exact numbers of one head's sampled rows and of its key head's sampled keys, and the error allowed."""

    index: tuple[int, int]  # batch element, query head
    rows: Tensor
    keys: Tensor | None
    exact: dict[str, Tensor]  # "out", "dq" (R, .), "dk", "dv" (n, .), float64
    limit: dict[str, float]


class Oracle:
    """Exact rows and keys of one problem in float64; which pairs are kept is asked once for each row."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.group = inputs.q.shape[1] // inputs.k.shape[1]
        self._kept: dict[tuple[int, int, bytes], Tensor] = {}

    def rows(self, b: int, h: int, rows: Tensor, rounding: torch.dtype | None = None) -> dict[str, Tensor]:
        """ "out" (R, E), and "dq" (R, D) when there is a dout, of one head's rows."""
        k = self.inputs.k[b, h // self.group].double()
        results: dict[str, list[Tensor]] = {"out": []}
        for _, _, out, ds in self._chunks(b, h, rows, rounding):
            results["out"].append(out)
            if ds is not None:
                results.setdefault("dq", []).append(self.inputs.terms.scale * _through(ds, rounding) @ k)
        return {name: torch.cat(parts) for name, parts in results.items()}

    def keys(self, b: int, g: int, keys: Tensor, rounding: torch.dtype | None = None) -> dict[str, Tensor]:
        """ "dk" (n, D) and "dv" (n, E) of a key head's keys, from every row that keeps one of them."""
        inputs = self.inputs
        assert inputs.dout is not None
        dk = torch.zeros(len(keys), inputs.k.shape[3], dtype=torch.float64, device=keys.device)
        dv = torch.zeros(len(keys), inputs.v.shape[3], dtype=torch.float64, device=keys.device)
        for h in range(g * self.group, (g + 1) * self.group):
            kept = self.kept(b, h, np.arange(inputs.q.shape[2]), keys.cpu().numpy())
            rows = kept.any(1).nonzero().squeeze(1)
            for chunk, p, _, ds in self._chunks(b, h, rows, rounding):
                assert ds is not None
                dv += _through(p[:, keys], rounding).T @ inputs.dout[b, h, chunk].double()
                dk += inputs.terms.scale * _through(ds[:, keys], rounding).T @ inputs.q[b, h, chunk].double()
        return {"dk": dk, "dv": dv}

    def kept(self, b: int, h: int, rows: np.ndarray, keys: np.ndarray) -> Tensor:
        """The pairs of rows (R,) and keys (n,) that the pattern keeps for one head, (R, n) bool, from `keep` alone."""
        Q, K, q_offset = self.inputs.q.shape[2], self.inputs.k.shape[2], self.inputs.terms.q_offset
        one = self.inputs.pattern.at(*self._own(b, h))
        parts = np.array_split(rows, max(1, min(len(rows), len(rows) * len(keys) // 2**20)))
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            kept = pool.map(lambda part: one.keep(part[:, None] + q_offset, keys[None, :], Q, K, q_offset), parts)
            return torch.from_numpy(np.concatenate(list(kept))).to(self.inputs.q.device)

    def _own(self, b: int, h: int) -> tuple[int, int]:
        """The place of the pattern of a head: heads and batch elements may share it."""
        Bp, Hp = self.inputs.pattern.lead
        return (b if Bp > 1 else 0), (h if Hp > 1 else 0)

    def _kept_rows(self, b: int, h: int, rows: Tensor) -> Tensor:
        row_ids = rows.cpu().numpy()
        key = (*self._own(b, h), row_ids.tobytes())
        if key not in self._kept:
            self._kept[key] = self.kept(b, h, row_ids, np.arange(self.inputs.k.shape[2]))
        return self._kept[key]

    def _chunks(
        self, b: int, h: int, rows: Tensor, rounding: torch.dtype | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """For chunks of a head's rows: (rows, P, out, dS) over all keys; dS is None without a dout.

        With `rounding`, scores pass through float32 and P through that type, as in a kernel of that precision.
        """
        inputs, terms = self.inputs, _head_terms(self.inputs.terms, b, h)
        k, v = inputs.k[b, h // self.group].double(), inputs.v[b, h // self.group].double()
        for chunk in rows.split(max(1, PAIRS_AT_ONCE // len(k))):
            keep = kept(self._kept_rows(b, h, chunk), terms, len(k)).reshape(len(chunk), len(k))
            every, bounded = scores(inputs.q[b, h, chunk].double()[None, None], k[None, None], terms, chunk)
            score = every[0, 0] if rounding is None else every[0, 0].float().double()
            score = score.masked_fill(~keep, -torch.inf)
            lse = score.logsumexp(-1, keepdim=True)
            if terms.sink_logits is not None:
                lse = torch.logaddexp(lse, terms.sink_logits.double())
            p = torch.exp(score - lse.masked_fill(lse.isneginf(), 0.0))
            out = _through(p, rounding) @ v
            ds = None
            if inputs.dout is not None:
                dout = inputs.dout[b, h, chunk].double()
                ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
                ds = ds if bounded is None else ds * (1 - bounded[0, 0] ** 2)
            yield chunk, p, out, ds


def _head_terms(terms: Terms, b: int, h: int) -> Terms:
    """The terms of one head of one batch element, as of a call that has no other."""
    places = (("key_lengths", b), ("sink_logits", h), ("alibi_slopes", h))
    given = {name: at for name, at in places if getattr(terms, name) is not None}
    if terms.alibi_slopes is not None and terms.alibi_slopes.ndim == 2:
        terms = terms._replace(alibi_slopes=terms.alibi_slopes[b])
    return terms._replace(**{name: getattr(terms, name)[at : at + 1] for name, at in given.items()})


def _through(x: Tensor, rounding: torch.dtype | None) -> Tensor:
    return x if rounding is None else x.to(rounding).double()


def draw_samples(inputs: Inputs, *, heads: int = 2, rows: int = 64, keys: int = 8, seed: int = 0) -> list[Sample]:
    """Exact numbers of random rows (the first and the last among them) and keys of some heads.

    The error allowed is twice that of float64 attention whose P, dS and results are rounded to the inputs' type,
    plus a rounding.
    """
    B, H, Q = inputs.q.shape[:3]
    device, dtype = inputs.q.device, inputs.q.dtype
    oracle = Oracle(inputs)
    samples = []
    for at in torch.linspace(0, B * H - 1, min(heads, B * H)).round().long().unique().tolist():
        b, h = divmod(at, H)
        # The same draw for every head: where they share the pattern, its pairs are asked for once.
        generator = torch.Generator().manual_seed(seed)
        picked = torch.randint(Q, (rows,), generator=generator)
        picked = torch.cat((picked, torch.tensor([0, Q - 1]))).unique().to(device)
        exact, rounded = oracle.rows(b, h, picked), oracle.rows(b, h, picked, dtype)
        columns = None
        if inputs.dout is not None and keys:
            columns = _sample_keys(oracle, b, h, keys, generator).to(device)
            exact |= oracle.keys(b, h // oracle.group, columns)
            rounded |= oracle.keys(b, h // oracle.group, columns, dtype)
        limit = {name: 2 * row_error(rounded[name].to(dtype), exact[name]) + FLOOR[dtype] for name in exact}
        samples.append(Sample((b, h), picked, columns, exact, limit))
    return samples


def _sample_keys(oracle: Oracle, b: int, h: int, count: int, generator: torch.Generator) -> Tensor:
    """Random keys of a head, two beside the first, and the last, as long as few rows are needed; at least one."""
    Q, K = oracle.inputs.q.shape[2], oracle.inputs.k.shape[2]
    drawn = torch.randint(K, (count,), generator=generator).tolist()
    near = [min(drawn[0] + 1, K - 1), min(drawn[0] + 5, K - 1)]  # neighbours share most of their rows
    order = np.array(list(dict.fromkeys([drawn[0], *near, K - 1, *drawn, 0])))
    kept = oracle.kept(b, h, np.arange(Q), order).cpu().numpy()
    # A key that very many rows keep (a global column) is taken only where there is no other.
    start = int(np.argmin(np.maximum(kept.sum(0), MANY_ROWS)))
    taken, rows = [start], kept[:, start]
    for at in range(len(order)):
        union = rows | kept[:, at]
        if at != start and len(taken) < count and union.sum() <= max(FEW_ROWS, kept[:, start].sum() + 64):
            taken, rows = [*taken, at], union
    return torch.from_numpy(np.sort(order[taken]))


def row_error(actual: Tensor, exact: Tensor) -> float:
    """The largest error of a row (Euclidean), relative to that row's size or the median row's, the larger."""
    size = exact.norm(dim=-1)
    scale = torch.maximum(size, size.median()).clamp_min(1e-30)
    error = ((actual.double() - exact).norm(dim=-1) / scale).max()
    return float("inf") if error.isnan() else float(error)


def compare(samples: list[Sample], actual: dict[str, Tensor], group: int) -> tuple[float, list[str]]:
    """The largest error over its limit (at most 1 is right), and what is wrong in words.

    `actual` holds "out" (B, H, Q, E) and, of a backward, "dq", "dk" (B, G, K, D), "dv" (B, G, K, E).
    """
    worst, wrong = 0.0, []
    for sample in samples:
        b, h = sample.index
        for name, tensor in actual.items():
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
