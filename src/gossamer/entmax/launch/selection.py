"""The lists of a part of a call: by the Hopper kernel in one pass, or by Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.launch.calls import (
    BOUNDS,
    CallPart,
    KernelCall,
    Stats,
    for_hopper,
    intervals,
    precision,
    seen_by,
    strides,
    value_of,
)
from gossamer.entmax.lists import RowLists
from gossamer.entmax.triton.finish import finish_kernel
from gossamer.entmax.triton.select import order_contenders_kernel, select_kernel
from gossamer.kernels.launch import dtype_of
from gossamer.kernels.relaunch import padded

BUFFER = 128  # candidates of a row, in the Triton kernel
LONG = 16384  # keys, of which fewer tiles give the first bounds
FEW = 16  # of the k largest
MOST_TOP_KEYS = 64  # with a larger top_k every row is an overflow row


class Triton(NamedTuple):
    """The sizes of the Triton kernel of candidates."""

    rows: int
    step: int
    buffer: int


def support_kernel(c: KernelCall, only_keys: bool) -> SupportConfig | Triton:
    """The kernel that makes lists: the Hopper kernel where it takes a call."""
    config = support_config(c, not only_keys)
    if config is not None:
        return config
    # A bound of the k largest needs more groups of keys than k.
    step = 64 if c.top_k is None or c.top_k < 32 else 128
    # Products of float32 hold their operands in two parts.
    held = padded(c.q.shape[3]) * step * c.q.element_size() * (2 if c.q.dtype == torch.float32 else 1)
    return Triton(64 if held <= 2**16 else 32, step, BUFFER)


def support_config(c: KernelCall, weighed: bool) -> SupportConfig | None:
    """The configuration of the Hopper kernel for a call; None where it does not take it."""
    D = c.q.shape[3]
    if D > 128 or (c.top_k or 0) > MOST_TOP_KEYS or not for_hopper(c, c.q, c.k):
        return None
    wide = D > 64
    return SupportConfig(
        dtype_of(c.q), 128 if wide else 64, 29, step=64 if wide else 128,
        same=c.same if c.same in (0.5, 1.0) else -1.0, top=c.top_k is not None, weighed=weighed,
        bounds=BOUNDS[c.bounds],
    )  # fmt: skip


def sample_stride(c: KernelCall) -> int:
    """The sample of key tiles that gives the first bounds: one tile of so many.

    A smaller sample leaves more candidates, which is cheap for a few largest scores. The products of the sample cost
    more than candidates where rows are long.
    """
    stride = 2 if c.top_k is not None and c.top_k <= FEW else 1
    return stride if c.k.shape[2] <= LONG else 2 * stride


def support_lists(
    c: KernelCall, way: SupportConfig | Triton, part: CallPart, lists: RowLists, stats: Stats, first_listed: int,
    only_keys: bool,
) -> None:  # fmt: skip
    """Make the lists of a part of a call, and the statistics of its rows."""
    if isinstance(way, Triton):
        by_triton(c, way, part, lists, stats, first_listed, only_keys)
        return
    from gossamer.entmax.hopper import compiled

    compiled.support_lists(way)(
        c.q, c.k, c.steepness, *intervals(c), lists.keys, lists.weights, lists.counts.view(-1), *stats.flat, c.scale,
        part.first_block, c.offset, 1 + (c.top_k or 1), sample_stride(c), first_listed,
        int(stats.requested), part.blocks,
    )  # fmt: skip


def by_triton(
    c: KernelCall, way: Triton, part: CallPart, lists: RowLists, stats: Stats, first_listed: int, only_keys: bool
) -> None:  # fmt: skip
    """`support_lists` by kernels that write candidates to memory between them."""
    (_, H, Q, D), K, device = c.q.shape, c.k.shape[2], c.q.device
    n, top = part.blocks * way.rows, c.top_k is not None
    scores = torch.empty(n, way.buffer, device=device)
    keys = torch.empty(n, way.buffer, dtype=torch.int32, device=device)
    counts = torch.zeros(n, dtype=torch.int32, device=device)
    keep = 1 + (c.top_k or 0)
    if keep > MOST_TOP_KEYS + 1:
        counts.fill_(-1)
    else:
        select_kernel[(part.blocks,)](
            c.q, c.k, c.steepness, *seen_by(c), scores, keys, counts,
            *strides(c.q, c.k, c.q_positions, c.k_positions), part.first_block, H, Q, K, c.offset, keep, c.scale,
            D=D, BLOCK_D=padded(D), GROUP=c.group, R=way.rows, STEP=way.step, C=way.buffer, A=value_of(c.same),
            TOP=top, WEIGHED=not only_keys, BOUNDS=c.bounds, POSITIONS=c.q_positions is not None,
            PRECISION=precision(c.q), PTX=not triton.knobs.runtime.interpret, num_warps=4, num_stages=2,
        )  # fmt: skip
        order_contenders_kernel[(-(-n // 8),)](scores, keys, counts, n, C=way.buffer, RP=8, num_warps=1)
    finish_kernel[(-(-n // 8),)](
        scores, keys, counts, c.steepness, stats.lam, stats.support, stats.certified, *lists, part.first_block, n, H, Q,
        c.top_k or K, first_listed, L=c.listed, R=way.rows, RP=8, C=way.buffer, SHORT=min(64, way.buffer),
        A=value_of(c.same), TOP=top, KEYS=only_keys, TOLD=stats.requested, num_warps=1,
    )  # fmt: skip
