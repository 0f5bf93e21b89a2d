"""Rows without a list: which they are, and their kernels, which pass over all of their scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.entmax.calls import Call, Listed, Stats, precision, seen_by, strides, value_of
from gossamer.kernels.entmax.large import large_kernel, list_groups_kernel
from gossamer.kernels.entmax.large_backward import large_columns_kernel, large_dq_kernel
from gossamer.kernels.relaunch import padded

GROUP_ROWS = 64


class Groups(NamedTuple):
    """The groups of rows of each head among which are rows without a list."""

    list: Tensor  # (B H, groups) int32
    counts: Tensor  # (B H,) int32


def groups_of(c: Call, lists: Listed) -> Groups:
    """By the counts as they are."""
    B, H, Q, _ = c.q.shape
    n = -(-Q // GROUP_ROWS)
    found = Groups(
        torch.empty(B * H, n, dtype=torch.int32, device=c.q.device),
        torch.empty(B * H, dtype=torch.int32, device=c.q.device),
    )
    list_groups_kernel[(B * H,)](lists.counts, *found, Q, R=GROUP_ROWS, STEP=min(64, padded(n)), num_warps=4)
    return found


def large_options(c: Call) -> dict[str, Any]:
    """What the kernels that pass over all scores are compiled for."""
    D, E = c.q.shape[3], c.v.shape[3]
    size = max(padded(D), padded(E)) * c.q.element_size()
    return {
        "D": D, "E": E, "BLOCK_D": padded(D), "BLOCK_E": padded(E), "GROUP": c.group, "R": GROUP_ROWS,
        "STEP": 64 if size <= 256 else 32, "A": value_of(c.same), "BOUNDS": c.bounds,
        "POSITIONS": c.q_positions is not None, "PRECISION": precision(c.q), "num_warps": 4,
        "num_stages": 2 if size <= 256 else 1,
    }  # fmt: skip


def large(
    c: Call, out: Tensor, stats: Stats, lists: Listed, first_head: int, heads: int, first_listed: int,
    with_out: bool, only_keys: bool,
) -> None:  # fmt: skip
    """The rows of some heads that have no list."""
    (_, H, Q, _), K = c.q.shape, c.k.shape[2]
    groups = groups_of(c, lists)
    large_kernel[(-(-Q // GROUP_ROWS), heads)](
        c.q, c.k, c.v, c.steepness, *seen_by(c), *groups, lists.counts, out, stats.lam, stats.support,
        stats.certified, lists.keys, lists.weights, *strides(c.q, c.k, c.v, c.q_positions, c.k_positions), first_head,
        H, Q, K, c.offset, c.top_k or K, first_listed, c.scale, L=c.listed, TOP=c.top_k is not None, KEYS=only_keys,
        OUT=with_out, TOLD=stats.told, **large_options(c),
    )  # fmt: skip


def large_backward(
    c: Call, lists: Listed, lam: Tensor, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, of_rows: Tensor,
    with_alpha: bool,
) -> None:  # fmt: skip
    """What the rows without a list give."""
    (B, H, Q, _), (_, G, K, _) = c.q.shape, c.k.shape
    groups = groups_of(c, lists)
    delta, factor = (torch.empty(B, H, Q, device=c.q.device) for _ in range(2))
    given = (
        c.q, c.k, c.v, dout, c.steepness, *seen_by(c), *groups, lists.counts, lam, delta, factor
    )  # fmt: skip
    rest = *strides(c.q, c.k, c.v, dout, c.q_positions, c.k_positions), H, Q, K, c.offset, c.scale
    options = large_options(c)
    large_dq_kernel[(-(-Q // GROUP_ROWS), B * H)](*given, dq, of_rows, *rest, **options, WITH_ALPHA=with_alpha)
    large_columns_kernel[(-(-K // options["STEP"]), B * G)](
        *given, dk, dv, *rest, **options, MEMBERS=triton.next_power_of_2(c.group)
    )
