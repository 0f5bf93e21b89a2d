"""The operator that chooses blocks on a GPU, by kernels where they can. A compiler sees its shapes alone."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.blocks.lists import Taken, by_operations
from gossamer.kernels.packages import has_triton

MOST_HEAD_SIZE = 256
LEAST_CAPABILITY = (8, 0)

library = torch.library.Library("gossamer", "FRAGMENT")
library.define(
    "choose_blocks(Tensor q, Tensor k, int block, SymInt n, float scale, bool group, bool bound, bool causal, "
    "SymInt local, SymInt first, float? top_p) -> (Tensor indices, Tensor covered)"
)


def choose(q: Tensor, k: Tensor, *options: Any) -> Taken:
    """The lists of blocks, by kernels or by operations; `options` are those of `by_operations`."""
    if 0 in q.shape or 0 in k.shape:
        (B, H, Q, _), G = q.shape, k.shape[1]
        block, n, _, group, *_ = options
        nothing = torch.full((B, G if group else H, -(-Q // block), n), -1, dtype=torch.int32, device=q.device)
        return Taken(nothing, torch.zeros(nothing.shape[:3], device=q.device))
    if q.is_cuda:
        return Taken(*torch.ops.gossamer.choose_blocks.default(q, k, *options))
    return by_operations(q, k, *options)


def takes(q: Tensor, C: int, n: int) -> bool:
    """Whether kernels choose n of C blocks."""
    if not q.is_cuda or q.dtype == torch.float64 or q.shape[3] > MOST_HEAD_SIZE:
        return False
    launch = _launch()
    return launch is not None and _able(q.device.index) and C <= launch.MOST_BLOCKS and n <= launch.MOST_LISTED


@cache
def _launch() -> Any:
    """The module that launches the kernels; None without Triton."""
    return importlib.import_module("gossamer.blocks.triton.launch") if has_triton() else None


@cache
def _able(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


def by_kernels(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """What `choose` gives where kernels take the call."""
    with torch.cuda.device_of(q):
        lists: tuple[Tensor, Tensor] = _launch().choose_blocks(q, k, *options)
    return lists


def _choose_blocks(q: Tensor, k: Tensor, block: int, n: int, *options: Any) -> tuple[Tensor, Tensor]:
    choose_here = by_kernels if takes(q, -(-k.shape[2] // block), n) else by_operations
    return choose_here(q, k, block, n, *options)


def _fake_choose_blocks(
    q: Tensor, k: Tensor, block: int, n: int, scale: float, group: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    (B, H, Q, _), G = q.shape, k.shape[1]
    shape = (B, G if group else H, -(-Q // block))
    return q.new_empty((*shape, n), dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)


library.impl("choose_blocks", _choose_blocks, "CUDA")
torch.library.register_fake("gossamer::choose_blocks", _fake_choose_blocks, lib=library)
