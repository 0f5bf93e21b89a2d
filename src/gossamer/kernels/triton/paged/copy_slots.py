"""The slots of listed pages behind one another, by one kernel that reads no slot that is not seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import power

BYTES = 8192  # of a head that a program copies


class PoolStrides(NamedTuple):
    """Strides, of which Triton compiles for no value."""

    page: int
    slot: int
    head: int


@triton.jit(do_not_specialize=["at", "number"])
def copy_slots_kernel(
    pool,  # (P, SIZE, G, width)
    pages,  # (n,)
    unseen,  # (n * SIZE,)
    copies,  # (n * SIZE, G, width)
    at: PoolStrides,
    number,  # n * SIZE
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of a head; 0 for what is not seen."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    m_slot = slot < number
    m_seen = tl.load(unseen + slot, mask=m_slot, other=1) == 0
    page = tl.load(pages + slot // SIZE, mask=m_slot & m_seen, other=0).to(tl.int64)
    begin = page * at.page + (slot % SIZE).to(tl.int64) * at.slot + head * at.head
    o = tl.arange(0, BLOCK)[None, :]
    x = tl.load(pool + begin[:, None] + o, mask=m_seen[:, None] & (o < WIDTH), other=0.0)
    to = (slot.to(tl.int64) * tl.num_programs(1) + head) * WIDTH
    tl.store(copies + to[:, None] + o, x, mask=m_slot[:, None] & (o < WIDTH))


def copy_slots(pool: Tensor, pages: Tensor, unseen: Tensor) -> Tensor:
    """(n * size, G, width) of a pool (P, size, G, width) with the last stride 1: its pages (n,), 0 where unseen."""
    _, size, G, width = pool.shape
    number, block = len(pages) * size, power(width)
    copies = torch.empty((number, G, width), dtype=pool.dtype, device=pool.device)
    page, slot, head, _ = pool.stride()
    slots = max(1, BYTES // (block * pool.element_size()))
    with torch.cuda.device_of(pool):
        launch(
            copy_slots_kernel, (-(-number // slots), G), pool, pages, unseen, copies, PoolStrides(page, slot, head),
            number, size, width, block, slots, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return copies
