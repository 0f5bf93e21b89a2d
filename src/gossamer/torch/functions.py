"""The functions that steps name and that are no kernels: what an edge does with its framework's own operations.

Each entry of `FUNCTIONS` makes one from the key of its step. What returns nothing writes its last arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import row_terms, sink_gradient
from gossamer.torch.memory import outlasting

MOST_ENDS = 256  # numbers of keys whose bounds are kept
CHUNK = 2**24  # numbers of a product of dout and out at a time


def copy(source: Tensor, target: Tensor) -> None:
    """Write an array, in the target's type."""
    target.copy_(source)


def add(share: Tensor, target: Tensor) -> None:
    """Add to an array."""
    target.add_(share)


def int32_lengths(K: int, lengths: Tensor) -> Tensor:
    """Key lengths (B,) of any integer type as int32, by one launch at most; those of int64 are clamped to [0, K].

    What int32 holds is clamped by the kernel that reads it.
    """
    if lengths.dtype != torch.int64:
        return lengths.to(torch.int32)
    none, every = _ends(lengths.device, K)
    return torch.clamp(lengths, none, every, out=lengths.new_empty(lengths.shape, dtype=torch.int32))


@lru_cache(MOST_ENDS)
def _ends(device: torch.device, K: int) -> tuple[Tensor, ...]:
    """0 and K on a device: a clamp by numbers of Python would not write another type than it reads."""
    return outlasting(device, lambda: torch.tensor([0, K], device="cpu").to(device).unbind())


def class_lengths(first: int, classes: int, step: int, K: int, lengths: Tensor) -> Tensor:
    """Key lengths (B or classes,) of residue classes from those of a call: of L keys, ceil((L - first) / step).

    A class has the keys at its first one, and every `step` from there on.
    """
    of_class = torch.arange(first, first + classes, device=lengths.device, dtype=torch.int32)
    lengths = (lengths if lengths.itemsize > 4 else lengths.int()).clamp(0, K)
    return torch.div(of_class - lengths, step, rounding_mode="floor").neg_().int()


def repeated(times: int, x: Tensor) -> Tensor:
    """A vector, several times."""
    return x.repeat(times)


def scaled(factor: float, x: Tensor) -> Tensor:
    """An array times a number, contiguous."""
    return (x * factor).contiguous()


def sums_of_groups(x: Tensor, result: Tensor) -> None:
    """Write (B, G, rows, size) from the shares of G * n heads."""
    result.copy_(x.unflatten(1, (result.shape[1], -1)).sum(2))


def zero(target: Tensor) -> None:
    """Write zeros."""
    target.zero_()


def empty_rows(sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """What rows that keep nothing have: out 0, and an lse of -inf or their sink."""
    out.zero_()
    lse.copy_(lse.new_full((), -torch.inf) if sinks is None else sinks[:, None])


def sink_gradient_of_rows(rows: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """dsink_logits (H,) from what a kernel wrote, (2, B, H, padded Q): delta is its second; lse (B, H, Q)."""
    # A row is empty only under a sink of -inf; +inf makes its share of the sink 0.
    _, delta = rows
    return sink_gradient(delta[:, :, : lse.shape[2]], lse.masked_fill(lse == -torch.inf, torch.inf), sinks)


def rows_of_results(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(delta, lse), each (B, H, Q) and contiguous: see `kernels.row_formulas.row_terms`."""
    delta, lse = row_terms(dout, dlse, out, lse, lse.dtype, cleared=False)
    return delta.contiguous(), lse.contiguous()


def sink_gradient_of_results(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """dsink_logits (H,) from out, lse and their gradients, some heads at a time."""
    heads = max(1, CHUNK * len(sinks) // max(1, out.numel()))
    found = []
    for h in range(0, len(sinks), heads):
        mine = slice(h, h + heads)
        shares = None if dlse is None else dlse[:, mine]
        terms = row_terms(dout[:, mine], shares, out[:, mine], lse[:, mine], lse.dtype, cleared=False)
        found.append(sink_gradient(*terms, sinks[mine]))
    return found[0] if len(found) == 1 else torch.cat(found)


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Combine the results of another attention over the same rows into out and lse, in place."""
    # Of two weights near 0 and 1, neither is made of the other: it would lose its digits. Without keys both are NaN.
    weight, rest = (torch.sigmoid(x).nan_to_num_(0.0)[..., None] for x in (part_lse - lse, lse - part_lse))
    out.mul_(rest.to(out.dtype)).addcmul_(part_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


def sorted_places(keys: Tensor) -> Tensor:
    """The places (N,) of keys in ascending order, those of equal ones in theirs."""
    return torch.argsort(keys, stable=True)


def _with(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """A function of its key, which comes first, and of arrays."""
    return lambda *key: partial(function, *key) if key else function


FUNCTIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    function.__name__: _with(function)
    for function in (
        copy, add, zero, int32_lengths, class_lengths, repeated, scaled, sums_of_groups, empty_rows,
        sink_gradient_of_rows, rows_of_results, sink_gradient, sink_gradient_of_results, combine,
        sorted_places,
    )
}  # fmt: skip
