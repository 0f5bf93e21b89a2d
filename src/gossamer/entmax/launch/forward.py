"""The launches of a forward.

Nothing is read back: sizes follow from shapes, and what depends on the scores is a list on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.launch.calls import CallPart, KernelCall, Stats, parts, row_options, strides
from gossamer.entmax.launch.overflow_rows import large, long_rows
from gossamer.entmax.launch.selection import support_kernel, support_lists
from gossamer.entmax.lists import RowLists
from gossamer.entmax.triton.gather import gather_out_kernel
from gossamer.kernels.triton.gather.config import piece


class KernelForward(NamedTuple):
    """The results of the kernels of a forward."""

    out: Tensor  # (B, H, Q, E), in q's type
    stats: Stats
    lists: RowLists


def forward(
    c: KernelCall,
    *,
    keep_lists: bool,
    with_out: bool = True,
    only_keys: bool = False,
    with_stats: bool = True,
) -> KernelForward:
    """The forward of a call by kernels.

    Args:
        keep_lists: whether the lists of all rows are wanted; else they are made in parts.
        with_out: whether out is.
        only_keys: the keys of the k largest alone, as lists.
        with_stats: whether the normaliser, the size of the support and the certificate of each row are.
    """
    (B, H, Q, _), E = c.q.shape, c.v.shape[3]
    L, top, device = c.listed, c.top_k is not None, c.q.device
    way = support_kernel(c, only_keys)
    # Saved lists are made in one part: each part would wait for its longest rows. Candidates in memory need parts.
    in_memory = 0 if isinstance(way, SupportConfig) else 8 * way.buffer
    whole = keep_lists and not in_memory
    every = [CallPart(0, B * H * -(-Q // way.rows), 0, c.rows, 0, B * H)]
    if not whole:
        every = list(parts(c, way.rows, 8 * L + in_memory))
    held = c.rows if keep_lists else max(part.rows for part in every)
    lists = RowLists(
        torch.empty(held, L, dtype=torch.int32, device=device),
        torch.empty((1, 1) if only_keys else (held, L), device=device),
        torch.zeros(B, H, Q, dtype=torch.int32, device=device),
    )
    shape = (B, H, Q) if with_stats and not only_keys else (1,)
    stats = Stats(
        torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.bool, device=device),
    )  # fmt: skip
    out = torch.empty(B, H, Q, E if with_out else 0, dtype=c.q.dtype, device=device)
    for part in every:
        first_listed = 0 if keep_lists else part.first_row
        support_lists(c, way, part, lists, stats, first_listed, only_keys)
        if top:
            large(c, stats, lists, part.first_head, part.heads, first_listed, only_keys)
        if with_out and not only_keys:
            gather_out(c, out, lists, part, first_listed)
    if not top and (with_out or with_stats):
        long_rows(c, out, stats, lists, with_out)
    return KernelForward(out, stats, lists)


def gather_out(c: KernelCall, out: Tensor, lists: RowLists, part: CallPart, first_listed: int) -> None:
    """Out of the rows of a part that have lists."""
    (_, H, Q, _), E = c.q.shape, c.v.shape[3]
    options = row_options(c.v, "forward", E, E)
    at = part.first_row - first_listed
    gather_out_kernel[(-(-part.rows // options["RP"]),)](
        c.v, out, lists.keys[at:], lists.weights[at:], lists.counts, *strides(c.v), part.first_row, part.rows, H, Q,
        L=c.listed, E=E, SE=piece(E, 8 * c.v.element_size()), GROUP=c.group, **options,
    )  # fmt: skip


def again(c: KernelCall) -> RowLists:
    """The lists that a forward made, without its out."""
    return forward(c, keep_lists=True, with_out=False, with_stats=False).lists


def top_keys(c: KernelCall) -> Tensor:
    """The keys (B, H, Q, top_k) int32 of the k largest scores of each row, ascending, then -1."""
    B, H, Q, _ = c.q.shape
    lists = forward(c, keep_lists=True, with_out=False, only_keys=True).lists
    K = c.k.shape[2]
    place = torch.arange(c.listed, device=c.q.device)
    keys = torch.where(place < lists.counts.view(-1, 1), lists.keys, K).sort(1).values
    return torch.where(keys == K, -1, keys).view(B, H, Q, c.listed)
