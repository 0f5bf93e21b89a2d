"""Thresholds of all prefixes, and the last steps of the hard top-k. Nothing is read back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.prefixes import candidates, gradient, numbers, states

BLOCK = 1024  # places of a program


class Level(NamedTuple):
    """How the states after every `step` steps are found."""

    step: int
    room: int  # candidates of a node
    rows: int  # states of a program; they are of one node of the level before
    keys: int  # that a program reads at once
    warps: int
    listed: int  # keys that are read at once where candidates are listed
    list_warps: int


LEVELS = (
    Level(8192, 3 * 8192, 1, 2048, 8, 2048, 8),
    Level(512, 4 * 512, 1, 512, 4, 512, 4),
    Level(32, 8 * 32, 4, 32, 1, 128, 1),
)
EVERY = Level(1, 0, 32, 8, 1, 0, 0)


class States(NamedTuple):
    """Of rows of scores (rows, N)."""

    key: Tensor  # int64: the order of keys
    theta: Tensor  # int64: the k-th largest key of each step
    tau: Tensor  # float32


class _Nodes(NamedTuple):
    """The nodes of a level."""

    step: int
    theta: Tensor  # (rows, nodes + 1)
    tau: Tensor
    list: Tensor
    counts: Tensor
    sums: Tensor
    room: int


def available(u: Tensor) -> bool:
    """Whether scores are of a type and on a device for which there are kernels."""
    return u.dtype == torch.float32 and (u.is_cuda or bool(triton.knobs.runtime.interpret))


def find_states(u: Tensor, k: int) -> States:
    """The k-th largest key, and the threshold of SparseK, of each step of rows (rows, N)."""
    u = u.contiguous()
    rows, N = u.shape
    one = 1 << min(62 - N.bit_length(), 52)  # which float64 holds
    levels = [level for level in LEVELS if level.step < N]
    filtered = len(levels) == len(LEVELS)
    key, steps = (u.new_empty(rows, N, dtype=torch.int64) for _ in range(2))
    score = torch.empty_like(u)
    list_ = u.new_empty(rows, N if filtered else 1, dtype=torch.int32)
    root = _Nodes(
        N, key.new_empty(rows, 2), u.new_empty(rows, 2), list_, list_.new_empty(rows, 1), key.new_empty(rows, 1, 4), N
    )
    numbers.prepare[(triton.cdiv(N, BLOCK), rows)](
        u, key, score, steps, root.theta, root.tau, root.counts, root.sums, N, 0 if filtered else N + 1,
        one, BLOCK=BLOCK,
    )  # fmt: skip

    def solve(of: Level, nodes: _Nodes, count: int, local: bool = False) -> tuple[Tensor, Tensor]:
        every = of is EVERY
        theta, tau = key.new_empty(rows, count + (not every)), u.new_empty(rows, count + (not every))
        states.solve_states[(triton.cdiv(count, of.rows), rows)](
            key, score, steps, nodes.list, nodes.counts, nodes.sums, nodes.theta, nodes.tau, theta, tau, N, k, of.step,
            count, nodes.step, nodes.counts.shape[1], nodes.room, one, ROWS=of.rows, BLOCK=of.keys, LOCAL=local,
            EVERY=every, num_warps=of.warps,
        )  # fmt: skip
        return theta, tau

    nodes = root
    if filtered:
        # What a part of the keys alone would drop, all of them drop.
        chunks = triton.cdiv(N, levels[0].step)
        _, tau = solve(levels[0], root, chunks, local=True)
        candidates.list_survivors[(chunks, rows)](
            key, score, tau, root.list, root.counts, N, levels[0].step, chunks, BLOCK=BLOCK
        )
    for level in levels:
        count = triton.cdiv(N, level.step)
        found = _Nodes(
            level.step, *solve(level, nodes, count), list_.new_empty(rows, count, level.room),
            list_.new_empty(rows, count), key.new_empty(rows, count, 4), level.room,
        )  # fmt: skip
        candidates.list_candidates[(count, rows)](
            key, score, steps, nodes.list, nodes.counts, nodes.sums, found.theta, found.tau, found.list, found.counts,
            found.sums, N, level.step, count, nodes.step, nodes.counts.shape[1], nodes.room, level.room,
            BLOCK=level.listed, num_warps=level.list_warps,
        )  # fmt: skip
        nodes = found
    return States(key, *solve(EVERY, nodes, N))


def last_largest(found: States) -> Tensor:
    """The last step at which each key is among the k largest so far, (rows, N) int32; one before its own if never."""
    rows, N = found.key.shape
    last = found.key.new_empty(rows, N, dtype=torch.int32)
    states.find_last[(triton.cdiv(N, BLOCK), rows)](found.key, found.theta, last, N, BLOCK=BLOCK)
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
