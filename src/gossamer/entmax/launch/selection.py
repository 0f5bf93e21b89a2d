"""The lists of a part of a call: by the Hopper kernel in one pass, or by Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton

from gossamer.entmax.hopper.support.configurations import SupportConfig
from gossamer.entmax.launch.calls import (
    BOUNDS,
    CallPart,
    KernelCall,
    ListNames,
    Stats,
    for_hopper,
    precision,
    value_of,
)
from gossamer.entmax.launch.kernels import step
from gossamer.entmax.triton.finish import finish_kernel
from gossamer.entmax.triton.select import order_contenders_kernel, select_kernel
from gossamer.kernels.launch import BYTES
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
    keys = 64 if c.top_k is None or c.top_k < 32 else 128
    # Products of float32 hold their operands in two parts.
    held = padded(c.D) * keys * BYTES[c.dtype] * (2 if c.dtype == "float32" else 1)
    return Triton(64 if held <= 2**16 else 32, keys, BUFFER)


def support_config(c: KernelCall, weighed: bool) -> SupportConfig | None:
    """The configuration of the Hopper kernel for a call; None where it does not take it."""
    D = c.D
    if D > 128 or (c.top_k or 0) > MOST_TOP_KEYS or not for_hopper(c, c.q, c.k):
        return None
    wide = D > 64
    return SupportConfig(
        c.dtype, 128 if wide else 64, 29, step=64 if wide else 128,
        same=c.same if c.same in (0.5, 1.0) else -1.0, top=c.top_k is not None, weighed=weighed,
        bounds=BOUNDS[c.bounds],
    )  # fmt: skip


def sample_stride(c: KernelCall) -> int:
    """The sample of key tiles that gives the first bounds: one tile of so many.

    A smaller sample leaves more candidates, which is cheap for a few largest scores. The products of the sample cost
    more than candidates where rows are long.
    """
    stride = 2 if c.top_k is not None and c.top_k <= FEW else 1
    return stride if c.K <= LONG else 2 * stride


def support_lists(
    c: KernelCall, way: SupportConfig | Triton, part: CallPart, lists: ListNames, stats: Stats, first_listed: int,
    only_keys: bool,
) -> None:  # fmt: skip
    """Make the lists of a part of a call, and the statistics of its rows."""
    if isinstance(way, Triton):
        by_triton(c, way, part, lists, stats, first_listed, only_keys)
        return
    lo, hi, *_ = c.seen_by
    c.b.step(
        c.hopper("support_lists", way), c.q, c.k, "steepness", lo, hi, *lists, *stats.arrays, c.scale,
        part.first_block, c.offset, 1 + (c.top_k or 1), sample_stride(c), first_listed, int(stats.requested),
        part.blocks,
    )  # fmt: skip


def by_triton(
    c: KernelCall, way: Triton, part: CallPart, lists: ListNames, stats: Stats, first_listed: int, only_keys: bool
) -> None:  # fmt: skip
    """`support_lists` by kernels that write candidates to memory between them."""
    b, n, top = c.b, part.blocks * way.rows, c.top_k is not None
    keep = 1 + (c.top_k or 0)
    scores, keys, counts = (f"{name}_{part.first_block}" for name in ("scores", "keys", "counts"))
    b.array(scores, "float32", (n, way.buffer))
    b.array(keys, "int32", (n, way.buffer))
    b.array(counts, "int32", (n,), -1 if keep > MOST_TOP_KEYS + 1 else 0)
    if keep <= MOST_TOP_KEYS + 1:
        step(
            b, select_kernel, (part.blocks,),
            (
                c.q, c.k, "steepness", c.seen_by, (scores, keys, counts),
                c.strides(c.q, c.k, "q_positions", "k_positions"), c.H,
                (part.first_block, c.Q, c.K, c.offset, keep, c.scale),
            ),
            {"D": c.D, "BLOCK_D": padded(c.D), "GROUP": c.group, "R": way.rows, "STEP": way.step, "C": way.buffer,
             "A": value_of(c.same), "TOP": top, "WEIGHED": not only_keys, "BOUNDS": c.bounds,
             "POSITIONS": c.positions, "PRECISION": precision(c), "PTX": not triton.knobs.runtime.interpret,
             "num_warps": 4, "num_stages": 2},
        )  # fmt: skip
        options = {"C": way.buffer, "RP": 8, "num_warps": 1}
        step(b, order_contenders_kernel, (-(-n // 8),), (scores, keys, counts, n), options)
    step(
        b, finish_kernel, (-(-n // 8),),
        (
            (scores, keys, counts), "steepness", stats.arrays, lists, part.first_block, n, c.H, c.Q, c.top_k or c.K,
            first_listed,
        ),
        {"L": c.listed, "R": way.rows, "RP": 8, "C": way.buffer, "SHORT": min(64, way.buffer), "A": value_of(c.same),
         "TOP": top, "KEYS": only_keys, "TOLD": stats.requested, "num_warps": 1},
    )  # fmt: skip
