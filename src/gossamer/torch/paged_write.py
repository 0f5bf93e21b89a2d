"""New keys and values into a cache in pages, as a CUDA graph can capture it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch import operand_of
from gossamer.torch.arguments import describe
from gossamer.torch.bind import bind
from gossamer.torch.calls import known
from gossamer.torch.decoding import sees_on
from gossamer.torch.key import alignment

NAMES = ("cache", "key", "value", "slots")


def write_pages(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the keys and values of tokens to their slots; nothing waits for a device.

    Args:
        cache: (P, G, page_size, D + E), of any strides whose last is 1.
        key: (T, G, D), of the cache's dtype; rows behind the slots are not written.
        value: (T, G, E), likewise.
        slots: (n,) integers, n at most T: slot s is slot s % page_size of page s // page_size; one under 0 is of a
            token of padding, for which nothing is written.

    Raises:
        ValueError: types differ.
    """
    if not sees_on(cache.device.type):
        _check(cache, key, value)
        _by_operations(cache, key, value, slots)
        return
    tensors = cache, key, value, slots
    which = "write", cache.device, alignment(*tensors), *[(x.shape, x.stride(), x.dtype) for x in tensors]
    run: Any = known.get(which)
    if run is None:
        _check(cache, key, value)
        run = known.put(which, _bound(*tensors))
    run(*tensors)


def _check(cache: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("key", key), ("value", value)):
        if x.dtype != cache.dtype:
            raise ValueError(f"{name} must be of the cache's dtype, {cache.dtype}; got {describe(x)}")


def _bound(*tensors: Tensor) -> Any:
    """The function of the kernel's launch."""
    from gossamer.kernels.triton.paged.write_slots import write

    cache, *_ = tensors
    return bind(write(dict(zip(NAMES, map(operand_of, tensors), strict=True))), cache.device, NAMES)


def _by_operations(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    n = slots.shape[0]
    if not n:
        return
    key, value = key[:n], value[:n]
    new, there = torch.cat([key, value], -1), slots >= 0
    # A token of padding writes what the first one that is none writes, where that does; if all are padding, what is
    # in slot 0 already: no shape follows from a value.
    row = torch.where(there, torch.arange(n, device=slots.device), there.int().argmax())
    found, pages, size = slots[row], cache.transpose(1, 2), cache.shape[2]
    slot = found.clamp(min=0)
    page, slot = slot // size, slot % size
    pages[page, slot] = torch.where((found >= 0)[:, None, None], new[row], pages[page, slot])
