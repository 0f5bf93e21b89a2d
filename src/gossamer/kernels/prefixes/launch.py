"""Thresholds of all prefixes, and the last steps of the hard top-k, from one sort of each row. Nothing is read back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.prefixes import gradient, order, starts, walks

NODE = 64  # steps of a walk
BUCKETS = 512  # of the keys of a prefix, at which a walk may begin
LEAST = 2048  # keys of the shortest prefix
BLOCK = 1024  # places of a program
LANES = 32  # walks of a program


class Prefixes(NamedTuple):
    """Of rows of scores, (rows, N), what `thresholds` and `last_largest` start from."""

    u: Tensor  # float32; -inf of a key that is not there
    k: int
    keys: Tensor  # (prefixes, rows, N) int32: in ascending order of scores, of equal ones the earlier last
    scores: Tensor  # the same of their scores
    place: Tensor  # (rows, N) int32: of each key, in the shortest prefix that has it
    absent: Tensor  # (prefixes, rows) int32
    bucket: Tensor  # (rows, nodes), and so on: of `find_starts`
    top_bucket: Tensor
    interior: Tensor
    sum: Tensor
    top_count: Tensor
    total: Tensor
    one: int  # steps of a score of 1


def available(u: Tensor) -> bool:
    """Whether scores are of a type and on a device for which there are kernels."""
    return u.dtype == torch.float32 and (u.is_cuda or bool(triton.knobs.runtime.interpret))


def prefixes(u: Tensor, k: int) -> Prefixes:
    """Sort rows of scores (rows, N), and find where walks start."""
    rows, N = u.shape
    # NaN is not there.
    u = torch.where(u > -torch.inf, u, -torch.inf)
    sorted_scores, order_of = u.flip(-1).sort(stable=True)
    sorted_keys = (N - 1 - order_of).int()
    lengths = [LEAST]
    while lengths[-1] < N:
        lengths.append(2 * lengths[-1])
    blocks = triton.cdiv(N, BLOCK)
    grid = (blocks, rows, len(lengths))
    counts = u.new_empty(len(lengths), rows, blocks, dtype=torch.int32)
    order.count_places[grid](sorted_keys, counts, N, LEAST, blocks, BLOCK=BLOCK)
    ends = counts.cumsum(-1, dtype=torch.int32)
    keys = sorted_keys.new_empty(len(lengths), rows, N)
    scores = u.new_empty(len(lengths), rows, N)
    place = sorted_keys.new_empty(rows, N)
    absent = place.new_zeros(len(lengths), rows)
    order.write_prefixes[grid](
        sorted_keys, sorted_scores, ends, keys, scores, place, absent, N, LEAST, blocks, BLOCK=BLOCK
    )

    nodes = triton.cdiv(N, NODE)
    one = 1 << (62 - N.bit_length())
    table = u.new_zeros(rows, nodes, 2, BUCKETS, dtype=torch.int32)
    sums = u.new_zeros(rows, nodes, 2, BUCKETS, dtype=torch.int64)
    starts.add_keys[grid](keys, scores, table, sums, N, LEAST, nodes, ONE=one, NODE=NODE, BUCKETS=BUCKETS, BLOCK=BLOCK)
    part = min(2 * BUCKETS, 64)
    starts.sum_nodes[(2 * BUCKETS // part, rows, len(lengths))](
        table, sums, N, LEAST, nodes, NODE=NODE, COLUMNS=2 * BUCKETS, BLOCK=16, PART=part
    )
    bucket, top_bucket, count, top_count, total = (place.new_empty(rows, nodes) for _ in range(5))
    sum_ = sums.new_empty(rows, nodes)
    starts.find_starts[(nodes, rows)](
        scores, table, sums, absent, bucket, top_bucket, count, sum_, top_count, total, N, LEAST, nodes, k,
        ONE=one, NODE=NODE, BUCKETS=BUCKETS, num_warps=2,
    )  # fmt: skip
    return Prefixes(u, k, keys, scores, place, absent, bucket, top_bucket, count, sum_, top_count, total, one)


def thresholds(p: Prefixes) -> Tensor:
    """The threshold of SparseK of each prefix, (rows, N) float32: -inf where it has no more than k keys."""
    (rows, N), nodes = p.u.shape, p.bucket.shape[1]
    tau = torch.empty_like(p.u)
    walks.walk_thresholds[(triton.cdiv(nodes, LANES), rows)](
        p.u, p.keys, p.scores, p.place, p.absent, p.bucket, p.interior, p.sum, p.total, tau, N, LEAST, nodes, p.k,
        ONE=p.one, NODE=NODE, BUCKETS=BUCKETS, LANES=LANES, num_warps=1,
    )  # fmt: skip
    return tau


def last_largest(p: Prefixes) -> Tensor:
    """The last step at which each key is among the k largest so far, (rows, N) int32; one before its own if never."""
    (rows, N), nodes = p.u.shape, p.bucket.shape[1]
    last = torch.full_like(p.place, N - 1)
    walks.walk_largest[(triton.cdiv(nodes, LANES), rows)](
        p.keys, p.place, p.absent, p.top_bucket, p.top_count, last, N, LEAST, nodes, p.k,
        NODE=NODE, BUCKETS=BUCKETS, LANES=LANES, num_warps=1,
    )  # fmt: skip
    return last


def thresholds_backward(u: Tensor, tau: Tensor, dtau: Tensor) -> Tensor:
    """du (rows, N) of the gradient of thresholds; all (rows, N) float32. The same inputs give the same bits."""
    u, tau, dtau = u.contiguous(), tau.contiguous(), dtau.float().contiguous()
    rows, N = u.shape
    blocks = triton.cdiv(N, BLOCK)
    grid = (blocks, rows)
    ranges = u.new_empty(3, rows, N, dtype=torch.int32)
    changes = u.new_zeros(2, rows, N, dtype=torch.int32)
    gradient.find_ranges[grid](u, tau, ranges, changes, N, rows, BLOCK=BLOCK)
    counts = changes.cumsum(-1, dtype=torch.int32)
    shares = u.new_empty(2, rows, N, dtype=torch.float64)
    totals = u.new_empty(2, rows, blocks, dtype=torch.float64)
    gradient.sum_shares[grid](dtau, counts, shares, totals, N, rows, blocks, BLOCK=BLOCK)
    gradient.sum_totals[(2 * rows,)](totals, blocks, BLOCK=256)
    du = torch.empty_like(u)
    gradient.add_ranges[grid](ranges, shares, totals, du, N, rows, blocks, SUMMED=BLOCK, BLOCK=BLOCK)
    return du
