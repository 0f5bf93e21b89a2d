"""Few queries of each sequence over a cache in pages: one kernel, and one that merges the parts of the keys.

The kernel finds keys through the table and computes which of them a token sees: no structure is made. Of how many keys
there may be the host knows the number, and so into how many parts they may be cut; a sequence is cut by how many it
has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import BYTES, Builder, Operand, Prepared
from gossamer.kernels.reaches import Reaching
from gossamer.kernels.relaunch import Strides, padded, power
from gossamer.kernels.scores import scales
from gossamer.kernels.triton.arguments import readable, step
from gossamer.kernels.triton.block.config import config
from gossamer.kernels.triton.config import architecture
from gossamer.kernels.triton.paged.kernels import MergeForm, PagedForm, merge_pages_kernel, paged_kernel
from gossamer.plan.problem import Problem

LEAST_ROWS, MOST_ROWS = 16, 32  # of a program: the fewest that a product has, and the most
WIDEST_ROWS = 128  # heads up to which there may be more than the fewest rows
STEP_BYTES = 2**15  # of keys and values that all slices read at a time,
LEAST_COLUMNS, MOST_COLUMNS = 16, 32  # and how many these are of a slice
BLOCKS = 1  # of a multiprocessor: as many do all the work, where sequences are alike, and read as fast as two
MOST_KEYS = 8192  # of a part, where that leaves no more parts than
MOST_PARTS = 128
FEW_EDGES, MANY_EDGES = 32, 128  # that are looked at at a time: by each warp, and by all
MERGED = 16  # parts that are merged at a time: of every call, so that sums do not depend on how many there may be
INVARIANT_KEYS, INVARIANT_PARTS = 1024, 64  # how a sequence is cut, whatever the others are
WARPS = 4
STAGES = 4
MOST_BYTES, LESS_BYTES = 98304, 49152  # of keys and values that wait, and of GPUs of little shared memory


class PagedCall(NamedTuple):
    """What a call says beside its arrays."""

    reaches: tuple[Reaching, ...]  # one or two
    steps: tuple[int, ...]  # of each
    most: int  # keys that a token sees at most
    page_size: int
    bshd: bool  # q and out are (T, H, size), else (H, T, size)
    phsd: bool  # k and v are (pages, G, slots, size), else (pages, slots, G, size)
    invariant: bool  # a sequence's results do not depend on the others


class Cut(NamedTuple):
    """How the keys of a tile of rows are cut."""

    parts: int  # that there may be
    of_most: int  # the keys are cut into so many,
    least: int  # of at least so many keys


def forward(
    problem: Problem, call: PagedCall, scoring: Scoring, operands: Mapping[str, Operand], *, cut: Cut | None = None
) -> Prepared:
    """out and lse.

    Args:
        problem: of T tokens of one batch element, and the slots of a sequence as its keys.
        operands: q, k, v, cu_seq_q, block_table, seqused_k, and where there are any sink_logits and out. Without v a
            value lies behind its key in the rows of a cache, at k.
        cut: replaces the automatic one.
    """
    b, p, heads = Builder(operands), problem, problem.H // problem.G
    (sequences, *_), (pages, *_) = b["block_table"].shape, b["k"].shape
    if "v" not in b:
        b.view("v", "k", (*b["k"].shape[:-1], p.E), b["k"].strides, p.D)
    q = readable(b, "q")
    out = b.result("out", p.dtype, (*b["q"].shape[:-1], p.E), in_place=_rows(operands.get("out")))
    lse = b.result("lse", "float32", (*b["q"].shape[:-3], p.H, p.Q))
    size = max(padded(p.D), padded(p.E))
    tokens = 1 if call.invariant else -(-p.Q // sequences)
    rows = power(heads * tokens, LEAST_ROWS, MOST_ROWS if size <= WIDEST_ROWS else LEAST_ROWS)
    of_key = 2 * size * BYTES[p.dtype]  # and of its value
    most = LESS_BYTES if architecture(p.sm or 80) == 89 else MOST_BYTES
    slices = WARPS if 2 * WARPS * LEAST_COLUMNS * of_key <= most else WARPS // 2
    columns = power(STEP_BYTES // (slices * of_key), LEAST_COLUMNS, MOST_COLUMNS)
    stages = min(STAGES, 1 + most // (slices * columns * of_key))
    if cut is None:
        cut = cut_of(call, slices * columns, sequences * p.G, BLOCKS * p.processors)
    scale, cap = scales(scoring)
    (reach, *_), (*_, other) = call.reaches, call.reaches
    (edge_step,), (used_step, *used_head) = b["cu_seq_q"].strides, b["seqused_k"].strides
    table_row, *table_head, table_step = b["block_table"].strides  # a step of heads where each has a table
    split, edges = cut.parts > 1, FEW_EDGES if sequences <= 2 * FEW_EDGES else MANY_EDGES
    part_acc = part_ml = lse
    if split:
        part_acc = b.array("part_acc", "float32", (p.Q, p.G, cut.parts, heads, p.E))
        part_ml = b.array("part_ml", "float32", (2, p.Q, p.G, cut.parts, heads))
    values = {
        "q": q, "k": readable(b, "k"), "v": readable(b, "v"), "out": out, "lse": lse, "part_acc": part_acc,
        "part_ml": part_ml, "edges": "cu_seq_q", "used": "seqused_k", "table": "block_table",
        "sinks": b.contiguous("sink_logits") if "sink_logits" in b else lse,
        "at_q": _of_tokens(b[q], call.bshd, heads), "at_out": _of_tokens(b[out], call.bshd, heads),
        "at_lse": Strides(1, heads * p.Q, p.Q), "sequences": sequences, "T": p.Q, "G": p.G, "heads": heads,
        "pages": pages, "slots": p.K, "edge_step": edge_step, "used_step": used_step,
        "used_head": sum(used_head), "table_row": table_row, "table_head": sum(table_head), "table_step": table_step,
        "parts": cut.parts, "of_most": cut.of_most, "least": cut.least, "scale": scale,
        "cap": cap, "reach": reach, "other": other, "steps": call.steps, "D": p.D, "E": p.E, "BLOCK_D": padded(p.D),
        "BLOCK_E": padded(p.E), "R": rows, "W": slices, "C": columns, "PAGE": call.page_size, "EDGES": edges,
        "HAS_PARTS": split,
        "HAS_OTHER": len(call.reaches) > 1, "HAS_STEPS": max(call.steps) > 1, "HAS_BLOCK": reach.block > 0,
        "OTHER_HAS_BLOCK": other.block > 0, "FOLD": scoring.scale > 0 and scoring.softcap is None,
        "SOFTCAP": scoring.softcap is not None, "SINK": "sink_logits" in b, "PARTS": MERGED,
        "PRECISION": config("forward", 8 * BYTES[p.dtype], p.D, p.E, p.sm or 80).precision,
    }  # fmt: skip
    for name in ("k", "v"):
        page, one, two, _ = b[values[name]].strides
        head, slot = (one, two) if call.phsd else (two, one)
        values[f"at_{name}"] = Strides(page, head, slot)
    options = {"num_warps": slices, "num_stages": stages}
    # Each sequence may end within a tile, and so may the tokens of none, before them and behind them.
    tiles = min(p.Q * heads // rows + sequences + 2, p.Q * -(-heads // rows))
    step(b, paged_kernel, (tiles * cut.parts * p.G,), values, options, PagedForm)
    if split:
        step(b, merge_pages_kernel, (p.Q * p.H,), values, {"num_warps": 4}, MergeForm)
    return b.done("out", "lse")


def cut_of(call: PagedCall, columns: int, lists: int, blocks: int) -> Cut:
    """How keys are cut where a GPU holds so many blocks, which lists of keys for key heads of sequences wait for."""
    if call.invariant:
        return Cut(min(INVARIANT_PARTS, -(-call.most // INVARIANT_KEYS)), INVARIANT_PARTS, INVARIANT_KEYS)
    of_all = -(-call.most // max(1, blocks // lists))
    least = -(-min(of_all, MOST_KEYS) // columns) * columns
    parts = min(-(-call.most // least), MOST_PARTS)
    return Cut(parts, parts, least)


def _rows(x: Operand | None) -> bool:
    """Whether a kernel writes the rows of a result where they are."""
    return x is None or x.strides[-1] == 1


def _of_tokens(x: Operand, bshd: bool, heads: int) -> Strides:
    """The strides of a token, a key head and the heads that share it."""
    *_, one, two, _ = x.strides
    token, head = (one, two) if bshd else (two, one)
    return Strides(token, heads * head, head)
