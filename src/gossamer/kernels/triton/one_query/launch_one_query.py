"""One query of each sequence that sees a run of keys, of which the device alone knows the first and the last.

No structure is made: the kernel computes both ends. Of how many keys there may be the host knows the number, and so
into how many parts they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import BYTES, Builder, Operand, Prepared
from gossamer.kernels.launch_now import launch
from gossamer.kernels.relaunch import Strides, padded
from gossamer.kernels.triton.arguments import LARGEST_ROW_STRIDE, arrays, operand, row_results, terms, vector
from gossamer.kernels.triton.block.config import config
from gossamer.kernels.triton.config import architecture
from gossamer.kernels.triton.one_query.kernels import Form, ends_kernel, one_query_kernel
from gossamer.kernels.triton.split_rows import SplitRows
from gossamer.layouts.items import COUNT, MERGE
from gossamer.plan.arguments import most_offset
from gossamer.plan.problem import Problem

LEAST_ROWS, MOST_ROWS = 16, 64  # of a program: the fewest that a product has, and the most
STEP_BYTES = 2**14  # of keys that are read at a time,
LEAST_COLUMNS, MOST_COLUMNS = 16, 128  # and how many these are
BLOCKS = 2  # of a multiprocessor at the same time, which read as fast as there is memory for: estimated, not timed
STAGES = {89: 2}  # of GPUs of little shared memory; 3 elsewhere
START, MERGING, MERGED_PART = 1.0, 1.5, 0.25  # what an item, a merge and each part cost, in steps: estimated too
MOST_REACH = 2**31 - 1  # a distance that reaches over all positions
OF_ENDS = 128  # sequences of a program


class Seen(NamedTuple):
    """What a query sees at a position i: the keys i - left <= j <= i + right with j < first; None is unbounded."""

    left: int | None
    right: int | None
    first: int | None
    position: int  # of all queries that have no offsets

    def most(self, K: int) -> int:
        """No query sees more of K keys."""
        ends = [K] if self.first is None else [K, self.first]
        if self.left is not None and self.right is not None:
            ends.append(self.left + self.right + 1)
        return max(0, min(ends))


def ends_of(offsets: Tensor, key_lengths: Tensor | None, behind: int, K: int) -> Tensor:
    """How many keys each query sees whose rule has no left end (B,) int32, `behind` of them from its position on."""
    offsets = offsets.contiguous()
    lengths = offsets if key_lengths is None else key_lengths.contiguous()
    ends = torch.empty_like(offsets, dtype=torch.int32)
    with torch.cuda.device_of(offsets):
        launch(
            ends_kernel, (triton.cdiv(len(ends), OF_ENDS),), offsets, lengths, ends, behind, most_offset(1, K),
            len(ends), K, key_lengths is not None, OF_ENDS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return ends


def forward(
    problem: Problem, seen: Seen, scoring: Scoring, operands: Mapping[str, Operand], device: torch.device, *,
    parts: int | None = None,
) -> Prepared:  # fmt: skip
    """out and lse.

    Args:
        operands: q, k and v, and where there are any q_offset, key_starts, key_lengths and sink_logits.
        parts: replaces the automatic number of parts of the keys.
    """
    b, heads = Builder(operands), problem.H // problem.G
    p = replace(problem, H=problem.G, Q=heads)
    q, k, v = (operand(b, name) for name in ("q", "k", "v"))
    if b[q].strides[1] > LARGEST_ROW_STRIDE:
        q = b.copied(q)
    values = arrays(b, q=q, k=k, v=v) | row_results(b, problem)
    for name in ("at_q", "at_out", "at_lse"):  # the heads that share keys are rows
        at: Strides = values[name]
        values[name] = Strides(at.b, heads * at.h, at.h)
    values |= terms(b, p, scoring, "lse") | {"sinks": vector(b, "sink_logits", "lse")}
    values |= {"offsets": vector(b, "q_offset", "lse"), "starts": vector(b, "key_starts", "lse")}
    tile_rows, K = triton.next_power_of_2(heads), problem.K
    rows = min(max(tile_rows, LEAST_ROWS), MOST_ROWS)
    size = max(padded(p.D), padded(p.E)) * BYTES[p.dtype]
    columns = min(max(STEP_BYTES // size, LEAST_COLUMNS), MOST_COLUMNS)
    most, sub = seen.most(K), -(-tile_rows // rows)
    limit, count = _cut(most, columns, p.B * p.G * sub, BLOCKS * p.processors, parts)
    values |= {
        "position": seen.position, "most": most_offset(1, K), "left": min(seen.left or 0, MOST_REACH),
        "right": min(seen.right or 0, MOST_REACH), "first": min(seen.first or 0, K), "parts": count, "chunk": limit,
        "OFFSETS": "q_offset" in b, "STARTS": "key_starts" in b, "LEFT": seen.left is not None,
        "RIGHT": seen.right is not None, "FIRST": seen.first is not None, "R": rows, "C": columns,
        "PRECISION": config("forward", 8 * BYTES[p.dtype], p.D, p.E, p.sm or 80).precision,
    }  # fmt: skip
    merges = torch.zeros((1, MERGE), dtype=torch.int32, device=device)
    merges[:, COUNT] = count
    split = SplitRows(merges, count if count > 1 else 0, p.B * p.G, tile_rows, 1, b_from_grid=True, h_from_grid=True)
    options = {"num_warps": 4, "num_stages": STAGES.get(architecture(p.sm or 80), 3)}
    split.step(b, "forward", one_query_kernel, (sub * count * split.copies,), values, Form, options)
    return b.done("out", "lse")


def _cut(most: int, columns: int, lists: int, blocks: int, parts: int | None) -> tuple[int, int]:
    """(keys of a part, parts) of up to `most` keys, in as many rounds of blocks as take least."""
    steps = max(1, -(-most // columns))

    def time(parts: int) -> float:
        of_part = -(-steps // parts)
        return -(-lists * parts // blocks) * (of_part + START) + (parts > 1) * (MERGING + MERGED_PART * parts)

    of_part = -(-steps // (parts or min(range(1, steps + 1), key=time)))
    return of_part * columns, -(-steps // of_part)
