"""The error that a result may have: measured, not chosen.

The error against float64 may be at most twice the error of plain attention, computed in the same low precision from
the same inputs, plus the rounding of the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.kernels.contract import Terms
from gossamer.kernels.reference import kept, oracle, scores
from gossamer.kernels.row_formulas import compute_dtype


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out, lse) by dense attention in the dtype of the inputs, which are four-dimensional; autograd differentiates it.

    An empty row gives 0 and -inf.
    """
    B, H, Q, _ = q.shape
    K = k.shape[2]
    keep = kept(mask, terms, K).expand(B, H, Q, K)
    s, _ = scores(q, k, terms)
    some = keep.any(-1)
    s = torch.where(keep, s, -torch.inf)
    if terms.sink_logits is not None:
        sink = terms.sink_logits.to(s.dtype)[:, None, None].expand(B, H, Q, 1)
        s, some = torch.cat([s, sink], -1), torch.ones_like(some)
    s = torch.where(some[..., None], s, 0.0)
    p = torch.softmax(s, -1)[..., :K] * keep
    out = p @ v.repeat_interleave(H // v.shape[1], 1)
    return out, torch.where(some, torch.logsumexp(s, -1), -torch.inf)


def exact_results(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms, dout: Tensor, *dlse: Tensor
) -> list[Tensor]:
    """out, lse, dq, dk, dv, and dsink_logits where there are sinks, by dense attention in float64.

    Args:
        mask: broadcasts to (B, H, Q, K).
        dout: the gradient of out.
        dlse: that of lse, or nothing.
    """
    sinks = None if terms.sink_logits is None else terms.sink_logits.double()
    return _results(oracle, [q.double(), k.double(), v.double()], mask, terms._replace(sink_logits=sinks), dout, *dlse)


def plain_results(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms, dout: Tensor, *dlse: Tensor
) -> list[Tensor]:
    """The results of plain attention in the dtype of the inputs, in the form of `exact_results`."""
    return _results(plain, [q, k, v], mask, terms, dout, *dlse)


def _results(
    attend: Callable[..., tuple[Tensor, Tensor]], qkv: list[Tensor], mask: Tensor, terms: Terms, dout: Tensor,
    dlse: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    given = qkv if terms.sink_logits is None else [*qkv, terms.sink_logits]
    leaves = [x.detach().requires_grad_() for x in given]
    out, lse = attend(*leaves[:3], mask, terms if len(leaves) == 3 else terms._replace(sink_logits=leaves[3]))
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isinf(), 0.0, lse) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference; infinite when one has a NaN, or an infinity that the other has not."""
    actual, exact = actual.double(), exact.double()
    same = (actual == exact) & actual.isinf()
    difference = torch.where(same, 0.0, (actual - exact).abs())
    return float(torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf).max()) if difference.numel() else 0.0


def bound(exact: Tensor, low: Tensor, dtype: torch.dtype) -> float:
    """The error allowed to a result in `dtype`.

    Args:
        exact: in float64.
        low: plain attention's, from the same inputs in `dtype`.
    """
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    # Stored once in `dtype`. Probabilities are read back from an lse that was rounded before: an error of a few
    # units in it is an error of a few units in every one of them.
    stored, computed = torch.finfo(dtype).eps / 2, torch.finfo(compute_dtype(dtype)).eps
    return 2 * error(low, exact) + stored * largest + 8 * computed * max(largest, 1.0)


def check(name: str, actual: Tensor, exact: Tensor, low: Tensor) -> None:
    """Raise AssertionError when a result is further from float64 than `bound` allows."""
    deviation, allowed = error(actual, exact), bound(exact, low, actual.dtype)
    if not deviation <= allowed:
        raise AssertionError(
            f"{name}: error {deviation:.3e} is over {allowed:.3e}, twice plain attention's and rounding"
        )
