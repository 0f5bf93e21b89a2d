"""From tensors and a gather layout to kernel arguments: forward and backward of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.contract import Problem, Terms
from gossamer.kernels.devices import processors
from gossamer.kernels.relaunch import Known, launch, strides
from gossamer.kernels.rows import sink_gradient
from gossamer.kernels.triton import gather_rows, gather_tiles
from gossamer.kernels.triton.config import Direction, padded
from gossamer.kernels.triton.gather_config import GroupConfig, RowConfig, group_config, piece, row_config
from gossamer.kernels.triton.launch import merged, operand, row_terms, term_arguments
from gossamer.kernels.triton.merge import merge_kernel, sum_kernel
from gossamer.layouts.gather import GatherLayout, GatherWalk
from gossamer.layouts.schedule import FEWEST_TILES, PARTS_PER_PROCESSOR, cut

# Query rows of the row terms are padded to this: the largest group of rows.
PADDED_ROWS = 64
# The longest list that one item gathers, in columns.
LONGEST_ITEM = 1024


@dataclass(frozen=True)
class Work:
    """The items of a walk, on its device: (n, 6) int32 lead, group, begin, end, slot, part; longest first.

    begin and end count columns from the start of `indices`, in units of the walk's width.
    """

    items: Tensor
    merges: Tensor  # (m, 4) int32: lead, group, first slot, number of slots
    slots: int

    def longest(self, each: int) -> Tensor:
        """(groups,) int32: units of the longest of each `each` items; negative where one is a part of a cut list."""
        groups = -(-len(self.items) // each)
        length, slot = self.items.new_zeros(groups * each), self.items.new_full((groups * each,), -1)
        length[: len(self.items)] = self.items[:, 3] - self.items[:, 2]
        slot[: len(self.items)] = self.items[:, 4]
        longest = length.view(groups, each).amax(1)
        return torch.where(slot.view(groups, each).amax(1) < 0, longest, -longest)


_work: WeakKeyDictionary[GatherWalk, dict[int, Work]] = WeakKeyDictionary()


def work_of(layout: GatherLayout, transposed: bool, copies: int, split: int | None) -> Work:
    """The items of one direction, made once; a layout that was made on a device is read back for it."""
    walk = layout.columns if transposed else layout.rows
    known = _work.setdefault(walk, {})
    if split is None:
        programs = processors(walk.indices.device) * PARTS_PER_PROCESSOR
        split = max(FEWEST_TILES, LONGEST_ITEM // walk.width)
        groups = len(walk.counts.reshape(-1))
        if groups * copies < 4 * programs:
            # Few groups: their lists are cut until every processor has a part, and those much longer than the others,
            # for which all would wait, in shorter parts.
            listed = int(walk.indices.shape[0]) // walk.width
            split = min(split, max(FEWEST_TILES // 2, 2 * listed // groups, listed * copies // programs))
    if split not in known:
        source = (layout.host.columns if transposed else layout.host.rows) if layout.host is not None else walk
        known[split] = _make_work(source.on_host(), split, walk.indices.device)
    return known[split]


def _make_work(walk: GatherWalk, limit: int, device: torch.device) -> Work:
    lengths = -(-walk.counts.astype(np.int64) // walk.width).reshape(-1)
    of, begin, end, slot, pieces = cut(lengths, limit)
    start = walk.starts.astype(np.int64).reshape(-1)[of] // walk.width
    length = end - begin
    # Lengths that differ little stay in the order of rows, whose columns are likely to be near each other.
    steps = -(-length // 4)
    near = np.where(steps <= 16, steps, 16 + np.ceil(np.log2(np.maximum(steps, 1))))
    lead, tile = np.divmod(of, walk.tiles)
    items = np.stack([lead, tile, start + begin, start + end, slot, begin > 0], axis=1)
    items = items[np.lexsort((begin, of, -near))]
    split = np.flatnonzero(pieces > 1)
    first = np.cumsum(pieces[split]) - pieces[split]
    merges = np.stack([split // walk.tiles, split % walk.tiles, first, pieces[split]], axis=1)

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array.astype(np.int32))).to(device)

    return Work(move(items), move(merges), int(pieces[split].sum()))


@dataclass(frozen=True)
class Launch:
    """What the three kernels of one walk have in common."""

    rows: int  # of the walk, which is not held: what is known of it must not keep it alive
    block_rows: int
    work: Work
    copies: int
    heads: int  # that programs run over
    constants: dict[str, Any]
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int]
    known: Known = field(default_factory=dict)  # launches of before

    @property
    def rest(self) -> dict[str, Any]:
        """The arguments that are the same in every call."""
        return self.arguments | self.constants | self.options

    def part(self, size: int, like: Tensor) -> Tensor:
        """Partial results (copies, slots, block_rows, size) float32; `like` where no list is cut."""
        if not self.work.slots:
            return like
        shape = (self.copies, self.work.slots, self.block_rows, size)
        return like.new_empty(shape, dtype=torch.float32)


_launches: WeakKeyDictionary[GatherWalk, dict[Any, Launch]] = WeakKeyDictionary()


def launch_of(
    problem: Problem,
    layout: GatherLayout,
    direction: Direction,
    config: RowConfig | GroupConfig | None,
    split: int | None,
) -> Launch:
    """The programs of one kernel, worked out once for a walk and a kind of problem."""
    p = problem
    known = _launches.setdefault(layout.columns if direction == "dkdv" else layout.rows, {})
    key = direction, p.B, p.H, p.G, p.D, p.E, p.dtype, config, split
    if key not in known:
        known[key] = _make_launch(problem, layout, direction, config, split)
    return known[key]


def _make_launch(
    problem: Problem,
    layout: GatherLayout,
    direction: Direction,
    config: RowConfig | GroupConfig | None,
    split: int | None,
) -> Launch:
    """Which items, how many copies of them, and with which sizes."""
    p, transposed = problem, direction == "dkdv"
    walk = layout.columns if transposed else layout.rows
    Bl, Hl = walk.lead
    group = p.H // p.G
    # Heads that share a key head but not their lists get gradients of their own, which are summed afterwards.
    members = group if transposed and Hl == 1 else 1
    heads = p.H // members
    copies = (p.B if Bl == 1 else 1) * (heads if Hl == 1 else 1)
    work = work_of(layout, transposed, copies, split)
    constants: dict[str, Any] = {
        "D": p.D, "E": p.E, "GROUP": group, "B_FROM_GRID": Bl == 1, "H_FROM_GRID": Hl == 1,
        "HAS_SLOTS": work.slots > 0,
    }  # fmt: skip
    if transposed:
        constants["MEMBERS"] = members
    n_items, bits = int(work.items.shape[0]), 32 if p.dtype == "float32" else 16
    arguments: dict[str, Any] = {
        "items": work.items, "indices": walk.indices, "n_items": n_items, "n_slots": work.slots,
        "K": p.K, "lead_heads": Hl,
    }  # fmt: skip
    if walk.block_rows == 1:
        rows = config if isinstance(config, RowConfig) else row_config(direction, bits, p.D, p.E)
        constants |= {"RP": rows.items, "C": rows.columns, "SD": piece(p.D, bits), "SE": piece(p.E, bits)}
        arguments["longest"] = work.longest(rows.items)
        programs = arguments["n_groups"] = -(-n_items // rows.items)
        options = {"num_warps": rows.warps, "num_stages": 1}
        if rows.registers is not None:
            options["maxnreg"] = rows.registers
    else:
        groups = config if isinstance(config, GroupConfig) else group_config(direction, bits, p.D, p.E, walk.block_rows)
        constants |= {
            "R": walk.block_rows, "C": walk.width, "BLOCK_D": padded(p.D), "BLOCK_E": padded(p.E),
            "PRECISION": groups.precision,
        }  # fmt: skip
        arguments["bits"] = walk.bits
        if not transposed:
            arguments["G"] = p.G
        programs, options = n_items, {"num_warps": groups.warps, "num_stages": groups.stages}
    options["enable_fp_fusion"] = True
    return Launch(walk.rows, walk.block_rows, work, copies, heads, constants, arguments, options, (programs * copies,))


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse). `config` and `split` (units of an item) replace the shipped configuration."""
    p = problem
    q, k, v = operand(q), operand(k), operand(v)
    if into is None:
        out = q.new_empty((p.B, p.H, p.Q, p.E))
        lse = q.new_empty((p.B, p.H, p.Q), dtype=torch.float32)
    else:
        out, lse = into
    run = launch_of(p, layout, "forward", config, split)
    parts = run.part(p.E, lse), run.part(2, lse)
    if run.grid[0]:
        launch(
            run.known, forward_kernel_of(layout), run.grid,
            *forward_arguments(q, k, v, out, lse, parts, terms),
            lambda: {
                "SINK": terms.sink_logits is not None, "H": p.H, "Q": p.Q, "q_offset": terms.q_offset,
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("o", out), **strides("l", lse),
                **_terms(terms, lse)[-1], **run.rest,
            },
        )  # fmt: skip
    if run.work.slots:
        merges = run.work.merges
        launch(
            run.known, merge_kernel, (merges.shape[0] * run.copies,), None, merged(out, lse, parts), {},
            lambda: {
                "merges": merges, **strides("o", out), **strides("l", lse), "H": p.H, "Q": p.Q, "E": p.E,
                "BLOCK_E": padded(p.E), **_merging(run),
            },
        )  # fmt: skip
    return out, lse


def forward_kernel_of(layout: GatherLayout) -> Any:
    """Rows alone need no tiles."""
    return gather_rows.rows_forward_kernel if layout.block_q == 1 else gather_tiles.tiles_forward_kernel


def forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: tuple[Tensor, Tensor], terms: Terms
) -> tuple[Any, dict[str, Tensor | None], dict[str, float]]:
    """(key, tensors, numbers) of a launch of the forward."""
    more, floats, key, _ = _terms(terms, lse)
    sinks = lse if terms.sink_logits is None else terms.sink_logits.contiguous()
    tensors = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "lengths": more["lengths"], "sinks": sinks,
        "slopes": more["slopes"], "part_acc": parts[0], "part_ml": parts[1],
    }  # fmt: skip
    return (key, terms.sink_logits is None), tensors, floats


def _terms(terms: Terms, like: Tensor) -> tuple[dict[str, Tensor], dict[str, float], tuple[Any, ...], dict[str, bool]]:
    """As `term_arguments`, without the flag that these kernels do not have."""
    tensors, floats, key, flags = term_arguments(terms, like)
    del flags["FOLD"]
    return tensors, floats, key, flags


def _merging(run: Launch) -> dict[str, Any]:
    """Arguments of the kernels that join the parts of a list."""
    R = run.block_rows
    return {
        "n_merges": run.work.merges.shape[0], "n_slots": run.work.slots, "lead_heads": run.arguments["lead_heads"],
        "R": R, "TILE_ROWS": R, "B_FROM_GRID": run.constants["B_FROM_GRID"],
        "H_FROM_GRID": run.constants["H_FROM_GRID"], "num_warps": 1 if R == 1 else 4,
    }  # fmt: skip


def padded_rows(Q: int) -> int:
    """Queries padded to whole groups, of any size that a layout has."""
    return -(-Q // PADDED_ROWS) * PADDED_ROWS


def query_gradient(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """dq (B, H, Q, D)."""
    p = problem
    dq = q.new_empty((p.B, p.H, p.Q, p.D)) if into is None else into
    run = launch_of(p, layout, "dq", config, split)
    more, floats, key, flags = _terms(terms, rows)
    part = run.part(p.D, rows)
    kernel = gather_rows.rows_dq_kernel if layout.block_q == 1 else gather_tiles.tiles_dq_kernel
    if run.grid[0]:
        tensors = {"q": q, "k": k, "v": v, "dout": dout, "row_terms": rows, "dq": dq, "part": part, **more}
        launch(
            run.known, kernel, run.grid, key, tensors, {"plain_scale": terms.scale, **floats},
            lambda: {
                "H": p.H, "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0), "q_offset": terms.q_offset,
                **({} if layout.block_q == 1 else {"Q": p.Q}),
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout), **strides("dq", dq),
                **flags, **run.rest,
            },
        )  # fmt: skip
    _add_parts(run, part, dq)
    return dq


def key_gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """dk (B, G, K, D) and dv (B, G, K, E)."""
    p = problem
    run = launch_of(p, layout, "dkdv", config, split)
    if into is None:
        dk, dv = k.new_empty((p.B, p.G, p.K, p.D)), v.new_empty((p.B, p.G, p.K, p.E))
    else:
        dk, dv = into
    own_k, own_v = dk, dv
    if run.heads != p.G:
        own_k, own_v = (
            x.new_empty((p.B, run.heads, p.K, size), dtype=torch.float32) for x, size in ((k, p.D), (v, p.E))
        )
    more, floats, key, flags = _terms(terms, rows)
    part_dk, part_dv = run.part(p.D, rows), run.part(p.E, rows)
    kernel = gather_rows.rows_dkdv_kernel if layout.block_q == 1 else gather_tiles.tiles_dkdv_kernel
    if run.grid[0]:
        tensors = {
            "q": q, "k": k, "v": v, "dout": dout, "row_terms": rows, "dk": own_k, "dv": own_v, "part_dk": part_dk,
            "part_dv": part_dv, **more,
        }  # fmt: skip
        launch(
            run.known, kernel, run.grid, key, tensors, {"plain_scale": terms.scale, **floats},
            lambda: {
                "heads": run.heads, "padded_Q": rows.shape[-1], "delta_offset": rows.stride(0),
                "q_offset": terms.q_offset,
                **strides("q", q), **strides("k", k), **strides("v", v), **strides("g", dout),
                **strides("dk", own_k), **strides("dv", own_v), **flags, **run.rest,
            },
        )  # fmt: skip
    _add_parts(run, part_dk, own_k)
    _add_parts(run, part_dv, own_v)
    if run.heads != p.G:
        dk.copy_(own_k.unflatten(1, (p.G, -1)).sum(2))
        dv.copy_(own_v.unflatten(1, (p.G, -1)).sum(2))
    return dk, dv


def _add_parts(run: Launch, part: Tensor, result: Tensor) -> None:
    """Write the rows of `result` (B, heads, rows, size) whose lists were cut."""
    if not run.work.slots:
        return
    merges, size = run.work.merges, result.shape[-1]
    launch(
        run.known, sum_kernel, (merges.shape[0] * run.copies,), size,
        {"result": result, "part": part}, {},
        lambda: {
            "merges": merges, **{f"stride_{axis}": result.stride(i) for i, axis in enumerate("bhn")},
            "heads": run.heads, "rows": run.rows, "SIZE": size, "BLOCK_SIZE": padded(size),
            **_merging(run),
        },
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
    layout: GatherLayout,
    terms: Terms,
    *,
    config: RowConfig | GroupConfig | None = None,
    split: int | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits or None)."""
    q, k, v, dout = operand(q), operand(k), operand(v), operand(dout)
    rows = row_terms(problem, dout, dlse, out, lse, padded_rows(problem.Q))
    into_q, into_kv = (None, None) if into is None else (into[0], into[1:])
    dq = query_gradient(problem, q, k, v, dout, rows, layout, terms, config=config, split=split, into=into_q)
    dk, dv = key_gradients(problem, q, k, v, dout, rows, layout, terms, config=config, split=split, into=into_kv)
    dsink = None
    if terms.sink_logits is not None:
        # A row is empty only under a sink of -inf; +inf makes its share of the sink 0.
        dsink = sink_gradient(rows[1, :, :, : problem.Q], lse.masked_fill(lse == -math.inf, math.inf), terms)
    return dq, dk, dv, dsink
