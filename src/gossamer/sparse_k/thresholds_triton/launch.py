"""Thresholds of all prefixes, and the last steps of the hard top-k, from one sort of each row. Nothing is read back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.launch_now import launch
from gossamer.sparse_k.thresholds_triton import gradient, order, starts, walks

NODE = 16  # steps of a walk
CHUNK = 1024  # steps that share a table of sums
EDGES = 1024  # places of a prefix at which a walk may begin
LEAST = 2048  # keys of the shortest prefix, a multiple of CHUNK
BLOCK = 1024  # places of a program
LANES = 32  # walks of a program


class Prefixes(NamedTuple):
    """The sorted prefixes of rows of scores (rows, N), from which `thresholds` and `last_largest` start."""

    u: Tensor  # float32; -inf of a key that is not there
    k: int
    keys: Tensor  # (prefixes, rows, N) int32: in ascending order of scores, of equal ones the earlier last
    scores: Tensor  # the same of their scores
    place: Tensor  # (rows, N) int32: of each key, in the shortest prefix that has it
    absent: Tensor  # (prefixes, rows) int32
    starts: Tensor  # (6, rows, nodes) int32 and (rows, nodes) int64: of `find_starts`
    sum: Tensor
    one: int  # steps of a score of 1


def available(u: Tensor) -> bool:
    """Whether there are kernels for the type and the device of scores."""
    return u.dtype == torch.float32 and (u.is_cuda or bool(triton.knobs.runtime.interpret))


def prefixes(u: Tensor, k: int) -> Prefixes:
    """Sort rows of scores (rows, N), and find where walks start."""
    rows, N = u.shape
    u = u.nan_to_num(-torch.inf, torch.inf, -torch.inf)  # NaN is not there
    sorted_scores, sorted_from = u.flip(-1).sort(stable=True)
    sorted_keys = torch.sub(
        torch.tensor(N - 1, device="cpu"), sorted_from, out=u.new_empty(rows, N, dtype=torch.int32)
    )  # fmt: skip
    lengths = [LEAST]
    while lengths[-1] < N:
        lengths.append(2 * lengths[-1])
    blocks = triton.cdiv(N, BLOCK)
    grid = (blocks, rows, len(lengths))
    counts = u.new_empty(len(lengths), rows, blocks, dtype=torch.int32)
    launch(order.count_places, grid, sorted_keys, counts, N, LEAST, blocks, BLOCK=BLOCK)
    ends = counts.cumsum(-1, dtype=torch.int32)
    keys = sorted_keys.new_empty(len(lengths), rows, N)
    scores = u.new_empty(len(lengths), rows, N)
    place = sorted_keys.new_empty(rows, N)
    absent = place.new_zeros(len(lengths), rows)
    launch(
        order.write_prefixes,
        grid,
        sorted_keys,
        sorted_scores,
        ends,
        keys,
        scores,
        place,
        absent,
        N,
        LEAST,
        blocks,
        BLOCK=BLOCK,
    )

    one = 1 << (62 - N.bit_length())
    begin = place.new_empty(len(lengths), rows)
    entering = place.new_empty(len(lengths), rows, EDGES)
    edges = {"EDGES": EDGES, "num_warps": 8}
    launch(starts.find_edges, (rows, len(lengths)), scores, absent, begin, entering, N, LEAST, k, **edges)
    chunks, nodes = triton.cdiv(N, CHUNK), triton.cdiv(N, NODE)
    table = place.new_zeros(rows, chunks, 2, EDGES)
    sums = place.new_zeros(rows, chunks, 2, EDGES, dtype=torch.int64)
    launch(
        starts.add_keys,
        grid,
        keys,
        scores,
        begin,
        entering,
        table,
        sums,
        N,
        LEAST,
        chunks,
        ONE=one,
        CHUNK=CHUNK,
        EDGES=EDGES,
        BLOCK=BLOCK,
    )
    part = min(2 * EDGES, 64)
    launch(
        starts.sum_chunks,
        (2 * EDGES // part, rows, len(lengths)),
        table,
        sums,
        N,
        LEAST,
        chunks,
        CHUNK=CHUNK,
        COLUMNS=2 * EDGES,
        BLOCK=16,
        PART=part,
    )
    starting = place.new_empty(6, rows, nodes)
    sum_ = sums.new_empty(rows, nodes)
    launch(starts.find_starts, (chunks, rows),
        u, scores, place, table, sums, begin, entering, starting, sum_, N, LEAST, nodes, k,
        ONE=one, CHUNK=CHUNK, NODE=NODE, EDGES=EDGES, num_warps=4,
    )  # fmt: skip
    return Prefixes(u, k, keys, scores, place, absent, starting, sum_, one)


def thresholds(p: Prefixes) -> Tensor:
    """The threshold of SparseK of each prefix, (rows, N) float32: -inf where it has no more than k keys."""
    tau, (rows, N), nodes = torch.empty_like(p.u), p.u.shape, p.starts.shape[2]
    launch(walks.walk_thresholds, (triton.cdiv(nodes, LANES), rows),
        p.u, p.keys, p.scores, p.place, p.absent, p.starts, p.sum, tau, N, LEAST, nodes, p.k, ONE=p.one, NODE=NODE,
        LANES=LANES, num_warps=1,
    )  # fmt: skip
    return tau


def last_largest(p: Prefixes) -> Tensor:
    """The last step at which each key is among the k largest so far, (rows, N) int32; one before its own if never."""
    last, (rows, N), nodes = torch.full_like(p.place, p.u.shape[1] - 1), p.u.shape, p.starts.shape[2]
    launch(
        walks.walk_largest,
        (triton.cdiv(nodes, LANES), rows),
        p.keys,
        p.place,
        p.absent,
        p.starts,
        last,
        N,
        LEAST,
        nodes,
        p.k,
        NODE=NODE,
        LANES=LANES,
        num_warps=1,
    )
    return last


class ThresholdsAndLast(NamedTuple):
    """The thresholds and last steps of all prefixes: both (rows, N)."""

    tau: Tensor
    last: Tensor


def kept(p: Prefixes) -> ThresholdsAndLast:
    """`thresholds` and `last_largest`."""
    (rows, N), nodes = p.u.shape, p.starts.shape[2]
    tau, last = torch.empty_like(p.u), torch.full_like(p.place, N - 1)
    grid = (triton.cdiv(nodes, LANES), rows, 2)
    launch(walks.walk_both, grid,
        p.u, p.keys, p.scores, p.place, p.absent, p.starts, p.sum, tau, last, N, LEAST, nodes, p.k, ONE=p.one,
        NODE=NODE, LANES=LANES, num_warps=1,
    )  # fmt: skip
    return ThresholdsAndLast(tau, last)


def thresholds_backward(u: Tensor, tau: Tensor, dtau: Tensor) -> Tensor:
    """du (rows, N) of the gradient of thresholds; all (rows, N) float32. The same inputs give the same bits."""
    u, tau, dtau = u.contiguous(), tau.contiguous(), dtau.float().contiguous()
    rows, N = u.shape
    blocks = triton.cdiv(N, BLOCK)
    grid = (blocks, rows)
    ranges = u.new_empty(3, rows, N, dtype=torch.int32)
    changes = u.new_zeros(2, rows, N, dtype=torch.int32)
    launch(gradient.find_ranges, grid, u, tau, ranges, changes, N, rows, BLOCK=BLOCK)
    counts = changes.cumsum(-1, dtype=torch.int32)
    shares = u.new_empty(2, rows, N, dtype=torch.float64)
    totals = u.new_empty(2, rows, blocks, dtype=torch.float64)
    launch(gradient.sum_shares, grid, dtau, counts, shares, totals, N, rows, blocks, BLOCK=BLOCK)
    launch(gradient.sum_totals, (2 * rows,), totals, blocks, BLOCK=256)
    du = torch.empty_like(u)
    launch(gradient.add_ranges, grid, ranges, shares, totals, du, N, rows, blocks, SUMMED=BLOCK, BLOCK=BLOCK)
    return du
