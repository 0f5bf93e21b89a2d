"""torch's operations for `gossamer.layouts.device`: the functions of this module are an `Arrays`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.layouts.device.arrays import Fused, Sorted
from gossamer.torch.fused_structure import TRITON, kernels


def fused(like: Tensor) -> Fused | None:
    if torch.compiler.is_compiling():  # the compiler joins the array operations itself
        return None
    return kernels if like.is_cuda and TRITON else None


def arange(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device)


def full(shape: tuple[int, ...], value: int, like: Tensor) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=like.device)


def int32(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def broadcast_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.expand(shape).contiguous()


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, x, y)


def fill(x: Tensor, condition: Tensor, value: int) -> Tensor:
    return x.masked_fill(condition, value)  # `torch.where` would copy the number to the device


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(x, y)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y)


def at_least(x: Tensor, low: int) -> Tensor:
    return x.clamp(min=low)


def total(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=torch.int32)


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1, dtype=torch.int32)


def cummax(x: Tensor) -> Tensor:
    return x.cummax(-1).values


def sort(x: Tensor) -> Tensor:
    return x.sort(-1).values


def stable_sort(x: Tensor) -> Sorted:
    found = torch.sort(x, stable=True)
    return Sorted(found.values, found.indices)


def searchsorted(ordered: Tensor, x: Tensor, right: bool = False) -> Tensor:
    return torch.searchsorted(ordered.contiguous(), x.contiguous(), out_int32=True, right=right)


def take(x: Tensor, places: Tensor) -> Tensor:
    if x.ndim == 1:  # which takes places of 32 bits as they are
        return x.index_select(0, places)
    return x.gather(-1, places.long())


def one_bit(places: Tensor) -> Tensor:
    return torch.bitwise_left_shift(torch.ones_like(places), places)


def bits_below(places: Tensor) -> Tensor:
    part = torch.bitwise_left_shift(torch.ones_like(places), places.clamp(0, 31)) - 1
    return part.masked_fill(places >= 32, -1)


def sums_at(places: Tensor, values: Tensor, size: int) -> Tensor:
    # Integers are added: in any order the sum is the same. Of one dimension, since torch refuses others on a GPU where
    # deterministic algorithms are asked for.
    *lead, m = places.shape
    rows = math.prod(lead)
    at = places.reshape(rows, m) + torch.arange(rows, device=places.device)[:, None] * size
    found = values.new_zeros(rows * size)
    return found.scatter_add_(0, at.reshape(-1), values.reshape(-1)).reshape(*lead, size)


def extend(x: Tensor, n: int) -> Tensor:
    if torch.compiler.is_compiling():  # where no size may be asked for
        # Not by `clamp`: of the formula that torch's compiler makes of it some versions (2.11) cannot find the strides.
        last, places = x.shape[-1] - 1, torch.arange(n, device=x.device)
        return x.index_select(-1, places.masked_fill(places > last, last))
    more = n - x.shape[-1]
    return torch.cat([x, x.narrow(-1, x.shape[-1] - 1, 1).expand(*x.shape[:-1], more)], -1) if more else x


def divides(block: int, n: int) -> bool:
    if not torch.compiler.is_compiling():
        return n % block == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(n % block == 0)


def concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1)
