"""A call in the order of a reordered sparse matrix: inputs permuted, results put back."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.patterns.reordered import ReorderedCSR
from gossamer.torch.arguments import describe
from gossamer.torch.memory import hold_for_graphs, outlasting


class Orders(NamedTuple):
    """int64, on a device."""

    order: Tensor  # which row comes at each place
    back: Tensor  # where each row went


_orders: WeakKeyDictionary[ReorderedCSR, dict[torch.device, Orders]] = WeakKeyDictionary()


def orders(pattern: ReorderedCSR, device: torch.device) -> Orders:
    """The orders of a pattern on a device; kept with the pattern."""
    kept = _orders.setdefault(pattern, {})
    if device not in kept:
        kept[device] = outlasting(device, partial(_orders_on, pattern, device))
    if device.type == "cuda" and is_current_stream_capturing():
        hold_for_graphs(kept[device])
    return kept[device]


def _orders_on(pattern: ReorderedCSR, device: torch.device) -> Orders:
    order = torch.from_numpy(pattern.order.copy())
    # Copies are done when they return: a kernel would be waited for by the stream of this call alone.
    return Orders(order.to(device), torch.argsort(order).to(device))


def check_order(
    pattern: ReorderedCSR, q: Tensor, k: Tensor, key_lengths: Tensor | None, alibi_slopes: Tensor | None
) -> None:
    """Raise ValueError where the sizes of q and k (B, heads, N, D) are others, or a term speaks of positions."""
    pattern.check(q.shape[2], k.shape[2])
    for name, x in (("key_lengths", key_lengths), ("alibi_slopes", alibi_slopes)):
        if x is not None:
            raise ValueError(f"{name} must be None with a reordered pattern, which moves positions; got {describe(x)}")


def permuted(
    pattern: ReorderedCSR, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, alibi_slopes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, heads, N, size) in the order of the pattern.

    Raises:
        ValueError: as `check_order`.
    """
    check_order(pattern, q, k, key_lengths, alibi_slopes)
    order = orders(pattern, q.device).order
    return q.index_select(2, order), k.index_select(2, order), v.index_select(2, order)
