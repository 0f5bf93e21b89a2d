"""The backward, of lists without any score, or of normalisers with the scores computed again.

With u = p^(2 - alpha) on the support, dP = dout v^T and delta = sum u dP / sum u of each row: dS = u (dP - delta),
dV = p^T dout, dQ = scale dS K, dK = scale dS^T Q, and d alpha = sum w (dP - delta), where w is `alpha_terms`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.chunks import Operands, row_alphas
from gossamer.entmax.forward import bag, matrix, weights
from gossamer.entmax.lists import PairLists
from gossamer.entmax.thresholds import alpha_terms

PAIRS_AT_ONCE = 2**16  # whose rows of dout and v are gathered together


class EntmaxGradients(NamedTuple):
    """The gradients of a call; of `Operands` in the type that these have, dq without the scale, dalpha in float64."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dalpha: Tensor | None  # (H,)


def slopes(p: Tensor, a: Tensor) -> Tensor:
    """u = p^(1 - a), 0 where p is 0."""
    return torch.where(p > 0, p ** (1 - a), 0.0)


def list_gradients(o: Operands, lists: PairLists, dout: Tensor, wants_alpha: bool) -> EntmaxGradients:
    """The gradients from the supports alone; sums are in the order of rows and of keys.

    Args:
        dout: (B H Q, E).
    """
    U, R, Q, D = o.q.shape
    BG, K, E = o.v.shape
    rows = U * R * Q // BG  # of a key head
    q, dout = o.q.reshape(BG, rows, D), dout.reshape(BG, rows, E)
    every_a = o.a.reshape(BG, -1).repeat_interleave(Q, 1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(o.k), torch.empty_like(o.v)
    alpha_terms_of_rows = o.a.new_zeros(BG, rows)
    bounds = lists.starts[::rows].tolist()
    for g in range(BG):
        first, last = bounds[g], bounds[g + 1]
        counts = lists.starts[g * rows : (g + 1) * rows + 1].diff()
        row = torch.repeat_interleave(torch.arange(rows, device=q.device), counts)
        key, p = lists.keys[first:last].long(), lists.weights[first:last]
        a = every_a[g].to(p.dtype)[row]
        dP = torch.empty_like(p)
        for at in range(0, len(p), PAIRS_AT_ONCE):
            part = slice(at, at + PAIRS_AT_ONCE)
            dP[part] = (dout[g][row[part]] * o.v[g][key[part]]).sum(1)
        u = slopes(p, a)
        dP -= (row_sums(u * dP, counts) / row_sums(u, counts))[row]
        dS = u * dP
        if wants_alpha:
            alpha_terms_of_rows[g] = row_sums((alpha_terms(p, a) * dP).double(), counts)
        dq[g] = bag(o.k[g], key, dS, counts)
        by_key = torch.sort(key, stable=True).indices
        key_counts, row = torch.bincount(key, minlength=K), row[by_key]
        dk[g] = bag(q[g], row, dS[by_key], key_counts)
        dv[g] = bag(dout[g], row, p[by_key], key_counts)
    return EntmaxGradients(
        dq.view_as(o.q), dk, dv, alpha_terms_of_rows.view(-1, o.heads, Q).sum((0, 2)) if wants_alpha else None
    )


def row_sums(x: Tensor, counts: Tensor) -> Tensor:
    """(rows,) sums over the `counts[r]` entries of each row, one row behind the other."""
    return torch.segment_reduce(x, "sum", lengths=counts, unsafe=True)


def finite(x: Tensor) -> Tensor:
    """x with 0 for what is not finite: of q and k this meets weights of 0 alone, or rows that are NaN already."""
    return x if bool(torch.stack(torch.aminmax(x)).isfinite().all()) else x.nan_to_num(0.0, 0.0, 0.0)


def normaliser_gradients(o: Operands, normaliser: Tensor, dout: Tensor, wants_alpha: bool) -> EntmaxGradients:
    """The gradients by the scores again, from the normalisers (B H Q,) of the forward.

    Args:
        dout: (B H Q, E).
    """
    dq, dk, dv = torch.zeros_like(o.q), torch.zeros_like(o.k), torch.zeros_like(o.v)
    dalpha = o.a.new_zeros(o.a.numel())  # of each batch element and head
    finite_q, finite_k = finite(o.q), finite(o.k)
    for chunk in o.chunks:
        number, n = chunk.rows, chunk.last - chunk.first
        w = weights(o, chunk, normaliser[number].double())
        p = matrix(chunk, w).view(n, -1, len(chunk.keys))
        a = row_alphas(o, chunk).to(p.dtype).view(n, -1, 1)
        chunk_dout = dout[number].view(n, p.shape[1], -1)
        k, v = o.keys_of(finite_k, chunk), o.keys_of(o.v, chunk)
        q = finite_q[chunk.first : chunk.last, :, chunk.start : chunk.stop]
        dP = torch.matmul(chunk_dout, v.mT)
        u = p.sqrt() if o.same == 0.5 else slopes(p, a)
        # Where nothing has a weight both sums are 0.
        dP -= (u * dP).sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp_(min=torch.finfo(u.dtype).tiny)
        if wants_alpha:
            head_sums = (alpha_terms(p, a) * dP).sum(-1, dtype=torch.float64).view(n * q.shape[1], -1).sum(1)
            dalpha[chunk.first * q.shape[1] : chunk.last * q.shape[1]] += head_sums
        dS = dP.mul_(u)
        dq[chunk.first : chunk.last, :, chunk.start : chunk.stop] = torch.matmul(dS, k).view(q.shape)
        units = slice(chunk.first // o.group, (chunk.last - 1) // o.group + 1)
        keys = chunk.run or chunk.keys
        dk[units, keys] += torch.matmul(dS.mT, q.flatten(1, 2))
        dv[units, keys] += torch.matmul(p.mT, chunk_dout)
    return EntmaxGradients(dq, dk, dv, dalpha.view(-1, o.heads).sum(0) if wants_alpha else None)
