"""How the kernels of a backward are run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.entmax.calls import Call, Listed, hopper_here, precision, strides, value_of
from gossamer.kernels.entmax.columns import HALF, KEYS, LONG, columns_kernel, part_sums_kernel, parts_kernel
from gossamer.kernels.entmax.gather import gather_dq_kernel
from gossamer.kernels.entmax.transpose import SEGMENTS, count_kernel, order_kernel, place_kernel
from gossamer.kernels.entmax.unlisted import tiled_backward
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.config import X3


class Gradients(NamedTuple):
    """In the types of q, k and v; that of alpha (H,) in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None


def backward(
    c: Call, lists: Listed, lam: Tensor, dout: Tensor, with_alpha: bool
) -> Gradients:  # fmt: skip
    """All gradients, from the lists and from the normalisers of the rows that have none."""
    (B, H, Q, D), (_, G, K, E) = c.q.shape, c.v.shape
    device, top = c.q.device, c.top_k is not None
    dq = torch.empty(B, H, Q, D, dtype=c.q.dtype, device=device)
    dk = torch.empty(B, G, K, D, dtype=c.q.dtype, device=device)
    dv = torch.empty(B, G, K, E, dtype=c.q.dtype, device=device)
    of_rows = torch.empty((B, H, Q) if with_alpha else (1, 1, 1), device=device)
    # p and dS of each pair, side by side: what the sums of a key read of it is in one place.
    gradients = torch.empty(*lists.weights.shape, 2, device=device)
    form = of_pairs(c)
    gather_dq_kernel[(B * H * -(-Q // KEYS),)](
        c.k, c.v, dout, c.steepness, dq, gradients, of_rows, *lists, *strides(c.k, c.v, dout), H, Q, c.scale, **form,
        ROWS=KEYS, A=value_of(c.same), WITH_ALPHA=with_alpha,
    )  # fmt: skip
    columns(c, key_lists(c, lists), gradients, dout, dk, dv, form)
    if not top:
        tiled_backward(c, lists, lam, dout, dq, dk, dv, of_rows, with_alpha)
    return Gradients(dq, dk, dv, of_rows.sum((0, 2), dtype=torch.float64) if with_alpha else None)


def of_pairs(c: Call) -> dict[str, Any]:
    """What the kernels that gather the rows of pairs are compiled for: a warp to 128 bytes of a row."""
    D, E = c.q.shape[3], c.v.shape[3]
    size = max(padded(D), padded(E)) * c.q.element_size()
    return {
        "L": c.listed, "D": D, "E": E, "BLOCK_D": padded(D), "BLOCK_E": padded(E), "GROUP": c.group, "CHUNK": 32,
        "STAGES": 1, "SPLIT": True, "PRECISION": precision(c.q) if c.q.dtype == torch.bfloat16 else X3,
        "num_warps": max(1, size // 128),
    }  # fmt: skip


class KeyLists(NamedTuple):
    """The pairs of each key in a fixed order."""

    begins: Tensor  # (B G K SEGMENTS + 1,) int32: where each cell begins
    names: Tensor  # (pairs,) int32


def key_lists(c: Call, lists: Listed) -> KeyLists:
    """The lists of keys from those of rows."""
    (_, H, Q, _), (B, G, K, _) = c.q.shape, c.k.shape
    L, device = c.listed, c.q.device
    names = torch.empty(c.rows * L, dtype=torch.int32, device=device)
    n_cells = B * G * K * SEGMENTS + 1
    if hopper_here(device):
        from gossamer.kernels.hopper import compiled

        form = min(max(1024, triton.next_power_of_2(K)), 16384), -(-L // 32)
        cells = torch.empty(n_cells, dtype=torch.int32, device=device)
        given = lists.keys, lists.counts.view(-1)
        compiled.column_lists(*form, False)(*given, cells, names, K, c.group * Q)
        begins = torch.cumsum(cells, 0, dtype=torch.int32)
        compiled.column_lists(*form, True)(*given, begins, names, K, c.group * Q)
        return KeyLists(begins, names)
    cells = torch.zeros(n_cells, dtype=torch.int32, device=device)
    vector = min(32, padded(L))
    grid = (-(-c.rows // 16), -(-L // vector))
    options = {"L": L, "RP": 16, "VECTOR": vector, "GROUP": c.group, "SEGMENTS": SEGMENTS, "num_warps": 4}
    in_order = torch.empty_like(names)
    of_lists = lists.keys, lists.counts
    count_kernel[grid](*of_lists, cells, H, Q, K, c.rows, **options)
    begins = torch.cumsum(cells, 0, dtype=torch.int32)
    place_kernel[grid](*of_lists, begins, names, H, Q, K, c.rows, **options)
    order_kernel[grid](*of_lists, begins, names, in_order, H, Q, K, c.rows, **options)
    return KeyLists(begins, in_order)


def columns(
    c: Call, of_keys: KeyLists, gradients: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, form: dict[str, Any]
) -> None:  # fmt: skip
    """dK and dV of the pairs in lists, whose p and dS are `gradients` (rows, L, 2)."""
    (_, H, Q, D), (B, G, K, E) = c.q.shape, c.v.shape
    blocks = -(-K // KEYS)
    sizes = K, blocks, B * G * blocks
    begins = of_keys.begins
    pairs = c.rows * c.listed
    most = 0 if pairs <= LONG else min(2 * HALF, 2 * pairs // LONG)
    ends = torch.empty(B * G * blocks, dtype=torch.int32, device=c.q.device)
    part_dk, part_dv = (torch.empty(max(1, most), KEYS, size, device=c.q.device) for size in (D, E))
    common = {"KEYS": KEYS, "SEGMENTS": SEGMENTS, "LONG": LONG, "HALF": HALF}
    parts_kernel[(1,)](begins, ends, *sizes, **common, STEP=4096, num_warps=8)
    for parts in (False, True) if most else (False,):
        columns_kernel[(min(most, 1056) if parts else B * G * blocks,)](
            c.q, dout, of_keys.names, begins, gradients, ends, part_dk, part_dv, dk, dv, *strides(c.q, dout), H, Q,
            *sizes, (B * G * blocks).bit_length(), c.scale, **form, **common, PARTS=parts,
        )  # fmt: skip
    if most:
        part_sums_kernel[(min(B * G * blocks, 1056),)](
            ends, part_dk, part_dv, dk, dv, *sizes, c.scale, D=D, E=E, BLOCK_D=padded(D), BLOCK_E=padded(E), KEYS=KEYS,
            num_warps=4,
        )  # fmt: skip
