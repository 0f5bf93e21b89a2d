"""New keys and values into the slots of a cache in pages, by one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl

from gossamer.kernels.launch import Builder, Operand, Prepared
from gossamer.kernels.relaunch import power
from gossamer.kernels.triton.arguments import readable, step


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


def write(operands: Mapping[str, Operand]) -> Prepared:
    """Keys (T, G, D) and values (T, G, E) go to the slots (n,), n at most T, of a cache (P, G, size, D + E).

    Args:
        operands: cache, of a last stride of 1, key, value, slots.
    """
    b = Builder(operands)
    (_, G, D), (*_, E), (T,), size = b["key"].shape, b["value"].shape, b["slots"].shape, b["cache"].shape[2]
    key, value = readable(b, "key"), readable(b, "value")
    page, head, slot, _ = b["cache"].strides
    at = SlotStrides(page, head, slot, *b[key].strides[:2], *b[value].strides[:2], *b["slots"].strides)
    values = {
        "cache": "cache", "key": key, "value": value, "slots": "slots", "at": at, "SIZE": size, "D": D, "E": E,
        "BLOCK_D": power(D), "BLOCK_E": power(E),
    }  # fmt: skip
    step(b, write_slots_kernel, (T, G), values, {"num_warps": 1})
    return b.done()
