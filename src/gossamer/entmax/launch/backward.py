"""The launches of a backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.entmax.backward import EntmaxGradients
from gossamer.entmax.launch.calls import KernelCall, hopper_here, row_options, strides, value_of
from gossamer.entmax.launch.overflow_rows import long_rows_backward
from gossamer.entmax.lists import RowLists
from gossamer.entmax.triton.columns import (
    HALF,
    LONG,
    columns_kernel,
    long_parts_kernel,
    long_sums_kernel,
    order_keys_kernel,
)
from gossamer.entmax.triton.gather import gather_dq_kernel
from gossamer.entmax.triton.transpose import SEGMENTS, before_kernel, count_kernel, order_kernel, place_kernel
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.gather.config import piece


def backward(
    c: KernelCall, lists: RowLists, lam: Tensor, dout: Tensor, with_alpha: bool
) -> EntmaxGradients:  # fmt: skip
    """The gradients of a call: from the lists, and for rows without one from their normalisers."""
    (B, H, Q, D), (_, G, K, E) = c.q.shape, c.v.shape
    device, L, top = c.q.device, c.listed, c.top_k is not None
    dq = torch.empty(B, H, Q, D, dtype=c.q.dtype, device=device)
    dk = torch.empty(B, G, K, D, dtype=c.q.dtype, device=device)
    dv = torch.empty(B, G, K, E, dtype=c.q.dtype, device=device)
    alpha_terms = torch.empty((B, H, Q) if with_alpha else (1, 1, 1), device=device)
    # p and dS of each pair lie side by side, where the sums of a key read both.
    gradients = torch.empty(*lists.weights.shape, 2, device=device)
    bits = 8 * c.k.element_size()
    sizes = {"D": D, "E": E, "SD": piece(D, bits), "SE": piece(E, bits)}
    options = row_options(c.k, "dq", D, E)
    gather_dq_kernel[(-(-c.rows // options["RP"]),)](
        c.k, c.v, dout, c.steepness, dq, gradients, alpha_terms, *lists, *strides(c.k, c.v, dout), c.rows, H, Q,
        c.scale, L=L, **sizes, VECTOR=min(32, padded(L)), GROUP=c.group, A=value_of(c.same),
        WITH_ALPHA=with_alpha, **options,
    )  # fmt: skip
    columns(c, key_lists(c, lists), gradients, dout, dk, dv, sizes)
    if not top:
        long_rows_backward(c, lists, lam, dout, dq, dk, dv, alpha_terms, with_alpha)
    return EntmaxGradients(dq, dk, dv, alpha_terms.sum((0, 2), dtype=torch.float64) if with_alpha else None)


class KeyLists(NamedTuple):
    """The pairs of each key in a fixed order."""

    begins: Tensor  # (B G K + 1,) int32: where those of each begin
    names: Tensor  # (pairs,) int32


def key_lists(c: KernelCall, lists: RowLists) -> KeyLists:
    """The lists of keys from those of rows."""
    (_, H, Q, _), (B, G, K, _) = c.q.shape, c.k.shape
    L, device = c.listed, c.q.device
    names = torch.empty(c.rows * L, dtype=torch.int32, device=device)
    row_lists = lists.keys, lists.counts
    if hopper_here(device):
        from gossamer.entmax.hopper import compiled

        form = min(max(1024, triton.next_power_of_2(K)), 16384), -(-L // 32)
        cells = torch.empty(B * G * SEGMENTS * K, dtype=torch.int32, device=device)
        ends = torch.empty(B * G * K + 1, dtype=torch.int32, device=device)
        given = lists.keys, lists.counts.view(-1), cells
        compiled.column_lists(*form, False)(*given, ends, names, K, c.group * Q)
        before_kernel[(-(-K // 256), B * G)](cells, ends, K, SEGMENTS=SEGMENTS, STEP=256, num_warps=4)
        begins = torch.cumsum(ends, 0, dtype=torch.int32)
        compiled.column_lists(*form, True)(*given, begins, names, K, c.group * Q)
        return KeyLists(begins, names)
    cells = torch.zeros(B * G * K * SEGMENTS + 1, dtype=torch.int32, device=device)
    vector = min(32, padded(L))
    grid = (-(-c.rows // 16), -(-L // vector))
    options = {"L": L, "RP": 16, "VECTOR": vector, "GROUP": c.group, "SEGMENTS": SEGMENTS, "num_warps": 4}
    in_order = torch.empty_like(names)
    count_kernel[grid](*row_lists, cells, H, Q, K, c.rows, **options)
    begins = torch.cumsum(cells, 0, dtype=torch.int32)
    place_kernel[grid](*row_lists, begins, names, H, Q, K, c.rows, **options)
    order_kernel[grid](*row_lists, begins, names, in_order, H, Q, K, c.rows, **options)
    return KeyLists(begins[::SEGMENTS].contiguous(), in_order)


def columns(
    c: KernelCall, keys: KeyLists, gradients: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, sizes: dict[str, int]
) -> None:  # fmt: skip
    """dK and dV of the pairs in lists, whose p and dS are `gradients` (rows, L, 2)."""
    (_, H, Q, D), (B, G, K, E) = c.q.shape, c.v.shape
    device, L, n_keys = c.q.device, c.listed, B * G * K
    order, parts = (torch.empty(n_keys, dtype=torch.int32, device=device) for _ in range(2))
    part_sizes = {"LONG": LONG, "HALF": HALF}
    order_keys_kernel[(-(-n_keys // 256),)](keys.begins, order, parts, n_keys, **part_sizes, STEP=256, num_warps=1)
    gather = row_options(c.k, "dkdv", D, E)
    given = c.q, dout, keys.names, keys.begins
    common = {"L": L, **sizes, "GROUP": c.group, **part_sizes}
    columns_kernel[(-(-n_keys // gather["RP"]),)](
        *given, gradients, order, dk, dv, *strides(c.q, dout), H, Q, K, n_keys, c.scale, **common, **gather,
    )  # fmt: skip
    most = min(2 * HALF, 2 * c.rows * L // LONG)
    if c.group * Q <= LONG or not most:
        return
    ends = torch.cumsum(parts, 0, dtype=torch.int32)
    part_dk, part_dv = (torch.empty(most, size, device=device) for size in (D, E))
    long_parts_kernel[(min(most, 1056),)](
        *given, ends, gradients, part_dk, part_dv, *strides(c.q, dout), H, Q, K, n_keys, n_keys.bit_length(), **common,
        RP=4 * gather["RP"], N=2, num_warps=4,
    )  # fmt: skip
    rows = gather["RP"]
    long_sums_kernel[(min(-(-n_keys // rows), 1056),)](
        ends, part_dk, part_dv, dk, dv, n_keys, c.scale, **sizes, RP=rows, num_warps=1
    )
