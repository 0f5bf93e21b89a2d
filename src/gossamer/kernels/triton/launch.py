"""From tensors and a layout to kernel arguments: forward and backward of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.devices import processors
from gossamer.kernels.relaunch import strides
from gossamer.kernels.rows import sink_gradient
from gossamer.kernels.scores import scales
from gossamer.kernels.triton.config import Direction, TileConfig, config, padded
from gossamer.kernels.triton.forward import forward_kernel
from gossamer.kernels.triton.key_gradients import dkdv_kernel
from gossamer.kernels.triton.merge import merge_kernel, sum_kernel
from gossamer.kernels.triton.query_gradient import dq_kernel
from gossamer.kernels.triton.row_terms import row_terms_kernel
from gossamer.kernels.triton.walks import Items, facts, items
from gossamer.layouts.block import BlockLayout, Walk

# Offsets inside a tile are 32-bit: 256 rows (the largest tile) times this stride stay below 2**31.
LARGEST_ROW_STRIDE = 2**22
# Rows of a program of the merge and row-terms kernels.
MERGE_ROWS = 32
ROW_TERMS_ROWS = 32


@dataclass(frozen=True)
class Schedule:
    """Which programs run for one walk: the grid order of `tiles.decode`, the work items, and where lists are."""

    size: int  # items, or tile rows without them, of one broadcast copy
    copies: int
    work: Items | None
    pointers: dict[str, Tensor]
    constants: dict[str, Any]
    list_b: int
    list_h: int
    lead_heads: int

    @property
    def slots(self) -> int:
        return self.work.slots if self.work is not None else 0


def schedule(layout: BlockLayout, transposed: bool, B: int, heads: int, group: int, split: int | None) -> Schedule:
    """`heads` is the number of heads that programs run over: H for the rows, G for the columns of a layout.

    `split` caps the tiles of a work item instead of the automatic limit.
    """
    known = facts(layout, transposed)
    key = (B, heads, group, split)
    found = known.plans.get(key)
    if found is None:
        found = known.plans[key] = _schedule(layout, transposed, B, heads, group, split)
    return found


def _schedule(layout: BlockLayout, transposed: bool, B: int, heads: int, group: int, split: int | None) -> Schedule:
    walk: Walk = layout.columns if transposed else layout.rows
    known = facts(layout, transposed)
    Bl, Hl = walk.lead
    # dK and dV of a per-head layout under grouped queries: the program loops over the heads of its group, whose
    # lists differ, so the key heads come from the grid and no item can describe the row.
    grouped_lists = transposed and Hl > 1 and group > 1
    b_from_grid, h_from_grid = Bl == 1, Hl == 1 or grouped_lists
    copies = (B if b_from_grid else 1) * (heads if h_from_grid else 1)
    work = None
    if not grouped_lists:
        work = items(layout, transposed, copies, processors(known.arrays[0].device), split)
    lead_heads = 1 if h_from_grid else Hl
    size = work.items.shape[0] if work is not None else (1 if b_from_grid else Bl) * lead_heads * walk.tiles
    names = ("starts", "counts", "indices")
    kinds = ("full", "interval", "bits")
    pointers = dict(zip([f"{kind}_{name}" for kind in kinds for name in names], known.arrays[:9], strict=True))
    pointers |= dict(zip(("lo", "hi", "pool_index", "pool"), known.arrays[9:], strict=True))
    # An unused pointer still needs a tensor.
    pointers["items"] = work.items if work is not None else known.arrays[0]
    constants = {
        "TILE_ROWS": walk.block_rows,
        "TILE_COLUMNS": walk.block_columns,
        "GROUP": group,
        "B_FROM_GRID": b_from_grid,
        "H_FROM_GRID": h_from_grid,
        "HAS_ITEMS": work is not None,
        "HAS_SLOTS": work is not None and work.slots > 0,
    }
    for kind, has, contiguous in zip(kinds, known.has, known.contiguous, strict=True):
        constants[f"HAS_{kind.upper()}"] = has
        constants[f"{kind.upper()}_CONTIGUOUS"] = contiguous
    return Schedule(size, copies, work, pointers, constants, Hl if Bl > 1 else 0, 1 if Hl > 1 else 0, lead_heads)


def operand(x: Tensor) -> Tensor:
    """The tensor itself when the kernels can read it: last dimension contiguous, 32-bit offsets inside a tile."""
    readable = (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) <= LARGEST_ROW_STRIDE
    return x if readable else x.contiguous()


def describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can be made: 16-byte alignment of the base and of every stride."""
    unit = 16 // x.element_size()
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in x.stride()[:3])


def described(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (B, heads, N, size) for blocks of `rows` rows of one head."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded(x.shape[-1])])


def term_arguments(terms: Terms, like: Tensor) -> tuple[dict[str, Any], dict[str, bool]]:
    """Score terms as kernel arguments and flags. A missing tensor is replaced by one that is never read."""
    softcap, alibi = terms.softcap is not None, terms.alibi_slopes is not None
    scale, cap = scales(terms)
    arguments = {
        "q_offset": terms.q_offset,
        "scale": scale,
        "cap": cap,
        "slopes": terms.alibi_slopes.contiguous() if alibi else like,
        "lengths": terms.key_lengths.contiguous() if terms.key_lengths is not None else like,
    }
    flags = {
        # One multiply-add takes the products to the exponent; the maximum commutes with a positive scale alone.
        "FOLD": terms.scale > 0 and not softcap and not alibi,
        "SOFTCAP": softcap,
        "ALIBI": alibi,
        "LENGTHS": terms.key_lengths is not None,
    }
    return arguments, flags


def sizes(
    problem: Problem, walk: Walk, direction: Direction, chosen: TileConfig | None, streamed: dict[str, Tensor]
) -> tuple[dict[str, Any], int]:
    """Block sizes and launch options of a kernel with its streamed operands, and its programs for each tile row."""
    bits = 32 if problem.dtype == "float32" else 16
    if chosen is None:
        tile = (walk.block_rows, walk.block_columns)
        chosen = config(direction, bits, problem.D, problem.E, problem.sm or 80, tile)
    fitted = chosen.fit(walk.block_rows, walk.block_columns)
    tma = fitted.tma and all(describable(x) for x in streamed.values())
    options = {
        **{name: described(x, fitted.columns) if tma else x for name, x in streamed.items()},
        "TMA": tma,
        "D": problem.D,
        "E": problem.E,
        "BLOCK_D": padded(problem.D),
        "BLOCK_E": padded(problem.E),
        "R": fitted.rows,
        "C": fitted.columns,
        "PRECISION": fitted.precision,
        "num_warps": fitted.warps,
        "num_stages": fitted.stages,
        # Scores become exponents by one multiply-add; Triton 3.10 stops fusing unless asked.
        "enable_fp_fusion": True,
    }
    return options, walk.block_rows // fitted.rows


def workspace(plan: Schedule, tile_rows: int, size: int, like: Tensor) -> Tensor:
    """Partial results of split rows, (copies, slots, tile_rows, size) float32; `like` where no row is split."""
    if not plan.slots:
        return like
    return torch.empty((plan.copies, plan.slots, tile_rows, size), dtype=torch.float32, device=like.device)


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). `tiles` and `split` replace the shipped configuration and the automatic split of long rows."""
    p, walk = problem, layout.rows
    q, k, v = operand(q), operand(k), operand(v)
    if into is None:
        out = torch.empty((p.B, p.H, p.Q, p.E), dtype=q.dtype, device=q.device)
        lse = torch.empty((p.B, p.H, p.Q), dtype=torch.float32, device=q.device)
    else:
        out, lse = into
    plan = schedule(layout, False, p.B, p.H, p.H // p.G, split)
    arguments, flags = term_arguments(terms, lse)
    options, parts = sizes(p, walk, "forward", tiles, {"k": k, "v": v})
    part_acc = workspace(plan, walk.block_rows, p.E, lse)
    part_ml = workspace(plan, walk.block_rows, 2, lse)
    grid = (parts * plan.size * plan.copies,)
    if grid[0]:
        forward_kernel[grid](
            q=q, out=out, lse=lse, part_acc=part_acc, part_ml=part_ml,
            sinks=terms.sink_logits.contiguous() if terms.sink_logits is not None else lse,
            n_items=plan.size, n_slots=plan.slots, n_tiles=walk.tiles, H=p.H, G=p.G, Q=p.Q, K=p.K,
            list_b=plan.list_b, list_h=plan.list_h, lead_heads=plan.lead_heads,
            SINK=terms.sink_logits is not None,
            **plan.pointers, **strides("q", q), **strides("k", k), **strides("v", v), **strides("o", out),
            **strides("l", lse), **arguments, **flags, **plan.constants, **options,
        )  # fmt: skip
    if plan.work is not None and plan.slots:
        merges = plan.work.merges
        merge_kernel[(walk.block_rows // MERGE_ROWS * merges.shape[0] * plan.copies,)](
            out, lse, part_acc, part_ml, merges, *out.stride()[:3], *lse.stride(), merges.shape[0], plan.slots,
            p.H, p.Q, plan.lead_heads, E=p.E, BLOCK_E=padded(p.E), R=MERGE_ROWS, TILE_ROWS=walk.block_rows,
            B_FROM_GRID=plan.constants["B_FROM_GRID"], H_FROM_GRID=plan.constants["H_FROM_GRID"], num_warps=4,
        )  # fmt: skip
    return out, lse


def row_terms(problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, padded_Q: int) -> Tensor:
    """(2, B, H, padded_Q) float32: lse in base 2, and delta = rowsum(dout * out) - dlse."""
    p, out = problem, operand(out)
    terms = torch.empty((2, p.B, p.H, padded_Q), dtype=torch.float32, device=lse.device)
    if terms.numel():
        given = lse if dlse is None else dlse
        row_terms_kernel[(p.B * p.H * padded_Q // ROW_TERMS_ROWS,)](
            dout, out, lse, given, terms,
            *dout.stride()[:3], *out.stride()[:3], *lse.stride(), *given.stride(), p.B, p.H, p.Q, padded_Q,
            E=p.E, BLOCK_E=padded(p.E), R=ROW_TERMS_ROWS, DLSE=dlse is not None, num_warps=4,
        )  # fmt: skip
    return terms


def query_gradient(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """dq (B, H, Q, D)."""
    p, walk = problem, layout.rows
    dq = torch.empty((p.B, p.H, p.Q, p.D), dtype=q.dtype, device=q.device) if into is None else into
    plan = schedule(layout, False, p.B, p.H, p.H // p.G, split)
    arguments, flags = term_arguments(terms, rows)
    options, parts = sizes(p, walk, "dq", tiles, {"k": k, "v": v})
    part = workspace(plan, walk.block_rows, p.D, rows)
    grid = (parts * plan.size * plan.copies,)
    if grid[0]:
        dq_kernel[grid](
            q=q, dout=dout, row_terms=rows, dq=dq, part=part, plain_scale=terms.scale,
            padded_Q=rows.shape[-1], delta_offset=rows.stride(0),
            n_items=plan.size, n_slots=plan.slots, n_tiles=walk.tiles, H=p.H, G=p.G, Q=p.Q, K=p.K,
            list_b=plan.list_b, list_h=plan.list_h, lead_heads=plan.lead_heads,
            **plan.pointers, **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout),
            **strides("dq", dq), **arguments, **flags, **plan.constants, **options,
        )  # fmt: skip
    add_parts(plan, walk, part, dq)
    return dq


def key_gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """dk (B, G, K, D) and dv (B, G, K, E)."""
    p, walk = problem, layout.columns
    if into is None:
        dk = torch.empty((p.B, p.G, p.K, p.D), dtype=k.dtype, device=k.device)
        dv = torch.empty((p.B, p.G, p.K, p.E), dtype=v.dtype, device=v.device)
    else:
        dk, dv = into
    plan = schedule(layout, True, p.B, p.G, p.H // p.G, split)
    arguments, flags = term_arguments(terms, rows)
    options, parts = sizes(p, walk, "dkdv", tiles, {"q": q, "dout": dout})
    part_dk = workspace(plan, walk.block_rows, p.D, rows)
    part_dv = workspace(plan, walk.block_rows, p.E, rows)
    grid = (parts * plan.size * plan.copies,)
    if grid[0]:
        dkdv_kernel[grid](
            k=k, v=v, row_terms=rows, dk=dk, dv=dv, part_dk=part_dk, part_dv=part_dv,
            plain_scale=terms.scale, padded_Q=rows.shape[-1], delta_offset=rows.stride(0),
            n_items=plan.size, n_slots=plan.slots, n_tiles=walk.tiles, H=p.H, G=p.G, Q=p.Q, K=p.K,
            list_b=plan.list_b, list_h=plan.list_h, lead_heads=plan.lead_heads,
            **plan.pointers, **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout),
            **strides("dk", dk), **strides("dv", dv), **arguments, **flags, **plan.constants, **options,
        )  # fmt: skip
    add_parts(plan, walk, part_dk, dk)
    add_parts(plan, walk, part_dv, dv)
    return dk, dv


def add_parts(plan: Schedule, walk: Walk, part: Tensor, result: Tensor) -> None:
    """Write the rows of `result` (B, heads, rows, size) whose work was split."""
    if plan.work is None or not plan.slots:
        return
    merges, size = plan.work.merges, result.shape[-1]
    sum_kernel[(walk.block_rows // MERGE_ROWS * merges.shape[0] * plan.copies,)](
        result, part, merges, *result.stride()[:3], merges.shape[0], plan.slots, result.shape[1], walk.rows,
        plan.lead_heads, SIZE=size, BLOCK_SIZE=padded(size), R=MERGE_ROWS, TILE_ROWS=walk.block_rows,
        B_FROM_GRID=plan.constants["B_FROM_GRID"], H_FROM_GRID=plan.constants["H_FROM_GRID"], num_warps=4,
    )  # fmt: skip


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    terms: Terms,
    *,
    tiles: TileConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None)."""
    q, k, v, dout = operand(q), operand(k), operand(v), operand(dout)
    rows = row_terms(problem, dout, dlse, out, lse, layout.rows.tiles * layout.block_q)
    into_q, into_kv = (None, None) if into is None else (into[0], into[1:])
    dq = query_gradient(problem, q, k, v, dout, rows, layout, terms, tiles=tiles, split=split, into=into_q)
    dk, dv = key_gradients(problem, q, k, v, dout, rows, layout, terms, tiles=tiles, split=split, into=into_kv)
    dsink = None
    if terms.sink_logits is not None:
        # A row is empty only under a sink of -inf; +inf makes its share of the sink 0.
        dsink = sink_gradient(rows[1, :, :, : problem.Q], lse.masked_fill(lse == -math.inf, math.inf), terms)
    return dq, dk, dv, dsink
