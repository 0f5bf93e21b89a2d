"""New keys and values into the slots of a cache in pages, by one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.relaunch import launch, power


class SlotStrides(NamedTuple):
    """Strides, of which Triton compiles for no value."""

    page: int  # of the cache
    head: int
    slot: int
    key: int  # of the keys from token to token
    key_head: int
    value: int
    value_head: int
    told: int  # of the slots


@triton.jit(do_not_specialize=["at"])
def write_slots_kernel(
    cache,  # (P, G, SIZE, D + E)
    key,  # (T, G, D)
    value,  # (T, G, E)
    slots,  # (T,)
    at: SlotStrides,
    SIZE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The key and value of a token and a head; none for a slot under 0."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token * at.told).to(tl.int64)
    if slot >= 0:
        to = cache + slot // SIZE * at.page + head * at.head + slot % SIZE * at.slot
        o_d = tl.arange(0, BLOCK_D)
        b_key = tl.load(key + token * at.key + head * at.key_head + o_d, mask=o_d < D)
        tl.store(to + o_d, b_key, mask=o_d < D)
        o_e = tl.arange(0, BLOCK_E)
        b_value = tl.load(value + token * at.value + head * at.value_head + o_e, mask=o_e < E)
        tl.store(to + D + o_e, b_value, mask=o_e < E)


def write_slots(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write keys (T, G, D) and values (T, G, E), of last strides 1, to slots (T,) of a cache (P, G, size, D + E)."""
    (T, G, D), E, size = key.shape, value.shape[2], cache.shape[2]
    page, head, slot, _ = cache.stride()
    at = SlotStrides(page, head, slot, *key.stride()[:2], *value.stride()[:2], *slots.stride())
    with torch.cuda.device_of(cache):
        launch(
            write_slots_kernel, (T, G), cache, key, value, slots, at, size, D, E, power(D), power(E), num_warps=1,
            enable_fp_fusion=True,
        )  # fmt: skip
