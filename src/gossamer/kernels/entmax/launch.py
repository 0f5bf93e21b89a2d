"""How the kernels of a call are run: choices, memory between them, and the parts in which a call is computed.

Nothing is read back: sizes follow from shapes, and what depends on the scores is a list on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from gossamer.kernels.entmax.columns import LONG, columns_kernel, long_parts_kernel, long_sums_kernel
from gossamer.kernels.entmax.finish import finish_kernel
from gossamer.kernels.entmax.gather import gather_dq_kernel, gather_out_kernel
from gossamer.kernels.entmax.large import large_kernel, list_groups_kernel
from gossamer.kernels.entmax.large_backward import large_columns_kernel, large_dq_kernel
from gossamer.kernels.entmax.select import order_contenders_kernel, select_kernel
from gossamer.kernels.entmax.transpose import SEGMENTS, count_kernel, order_kernel, place_kernel
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.hopper.device.select.configurations import SelectConfig
from gossamer.kernels.relaunch import padded
from gossamer.kernels.triton.config import X3, Direction
from gossamer.kernels.triton.gather.config import piece, row_config

MOST_LISTED = 96  # keys of a row whose weights are kept as a list, where top_k does not say how many
BUFFER = 128  # contenders of a row
PAIRS_OF_A_PART = 2**30  # that a part of a call sees at least: fewer would not fill a GPU
ROWS_OF_A_PART = 132 * 128
BOUNDS: tuple[Literal["every", "causal", "intervals"], ...] = ("every", "causal", "intervals")
MOST_SELECTED = 64  # of the k largest: with more, all rows are computed as those that were given up
GROUP_ROWS = 64  # of the kernels that pass over all scores


class Call(NamedTuple):
    """A call as the kernels take it."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, E)
    steepness: Tensor  # (H,) float32, alpha - 1
    same: float | None  # that of all heads, where the host knows it
    scale: float
    top_k: int | None
    bounds: int  # 0: every key, 1: causal, 2: intervals
    offset: int  # of causal: key j is seen by row r where j <= r + offset
    lo: Tensor | None  # (Q,) int32
    hi: Tensor | None  # (Q,) int32
    q_positions: Tensor | None  # (B, H, Q)
    k_positions: Tensor | None  # (B, H, K)

    @property
    def rows(self) -> int:
        B, H, Q, _ = self.q.shape
        return B * H * Q

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def listed(self) -> int:
        """The most keys of a list."""
        return self.top_k or MOST_LISTED


class Sizes(NamedTuple):
    """Of the kernel that selects."""

    rows: int
    step: int
    buffer: int
    config: SelectConfig | None = None  # of the Hopper kernel, where that one selects


class Stats(NamedTuple):
    """What is known of each row; (B, H, Q)."""

    lam: Tensor  # float32
    support: Tensor  # int32
    certified: Tensor  # bool


class Listed(NamedTuple):
    """The supports of rows: a row with a list has `counts` keys and weights, one without has a count of -1."""

    keys: Tensor  # (rows, L) int32
    weights: Tensor  # (rows, L) float32
    counts: Tensor  # (B, H, Q) int32


class Forward(NamedTuple):
    """What a forward gives."""

    out: Tensor  # (B, H, Q, E), in q's type
    stats: Stats
    lists: Listed


class Gradients(NamedTuple):
    """In the types of q, k and v; that of alpha (H,) in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None


class Part(NamedTuple):
    """Blocks of rows that are computed together: whole heads, or rows of one head."""

    first_block: int
    blocks: int
    first_row: int  # counted over (B, H, Q)
    rows: int
    first_head: int
    heads: int


def selection_sizes(c: Call, weighed: bool) -> Sizes:
    """A bound of the k largest needs more groups of keys than k."""
    config = hopper_config(c, weighed)
    if config is not None:
        return Sizes(128, config.step, config.contenders, config)
    few = c.top_k is None or c.top_k < 32
    return Sizes(64 if padded(c.q.shape[3]) * c.q.element_size() <= 512 else 32, 64 if few else 128, BUFFER)


def hopper_config(c: Call, weighed: bool) -> SelectConfig | None:
    """That of the Hopper kernel for a call; None where it is selected by the Triton kernel."""
    D = c.q.shape[3]
    if (
        D > 128
        or c.q.element_size() != 2
        or c.scale <= 0
        or c.q_positions is not None
        or (c.top_k or 0) > MOST_SELECTED
    ):
        return None
    if not hopper_here(c.q.device) or not all(by_tma(x) for x in (c.q, c.k)):
        return None
    dtype = str(c.q.dtype).removeprefix("torch.")
    wide = D > 64
    return SelectConfig(
        dtype, 128 if wide else 64, 24 if wide else 32, BUFFER, stages=2 if wide else 3,
        same=c.same if c.same in (0.5, 1.0) else -1.0, top=c.top_k is not None, weighed=weighed,
        bounds=BOUNDS[c.bounds],
    )  # fmt: skip


@cache
def hopper_here(device: torch.device) -> bool:
    """Whether kernels for compute capability 9.0 run on a device."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return capable and not missing_packages()


def by_tma(x: Tensor) -> bool:
    """Whether TMA can read a tensor: addresses and strides are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and all(s % 8 == 0 and s > 0 for s in x.stride()[:3]) and x.stride(3) == 1


def parts(c: Call, rows: int) -> Iterator[Part]:
    """All blocks of so many rows, in parts that see enough pairs each."""
    B, H, Q, _ = c.q.shape
    blocks = -(-Q // rows)
    most = max(ROWS_OF_A_PART, PAIRS_OF_A_PART // c.k.shape[2]) // rows
    if most >= blocks:
        heads = min(B * H, most // blocks)
        for first in range(0, B * H, heads):
            n = min(heads, B * H - first)
            yield Part(first * blocks, n * blocks, first * Q, n * Q, first, n)
        return
    for head in range(B * H):
        for first in range(0, blocks, most):
            n = min(most, blocks - first)
            # The blocks of a head are counted from its last rows on.
            start, stop = (blocks - first - n) * rows, min(Q, (blocks - first) * rows)
            yield Part(head * blocks + first, n, head * Q + start, stop - start, head, 1)


def value_of(same: float | None) -> float:
    """alpha - 1 as kernels are compiled for it."""
    return same if same in (0.0, 0.5, 1.0) else -1.0


def precision(x: Tensor) -> str:
    """Of products: those of float32 have its error."""
    return X3 if x.dtype == torch.float32 else "ieee"


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """The strides of (B, heads, rows)."""
    return tuple(s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3]))


def row_options(x: Tensor, direction: Direction, D: int, E: int) -> dict[str, Any]:
    """Choices of a kernel that gathers rows: those of the gather kernels, with rows of a single warp."""
    bits = 8 * x.element_size()
    found = row_config(direction, bits, D, E)
    options = {"RP": max(1, found.items // found.warps), "N": found.columns, "num_warps": 1}
    if x.device.type == "cuda" and found.registers:
        options["maxnreg"] = found.registers
    return options


def seen_by(c: Call) -> tuple[Any, ...]:
    """What says which keys a row may see: lo, hi and the positions; any tensor where there is none."""
    unread = c.steepness
    return tuple(unread if x is None else x for x in (c.lo, c.hi, c.q_positions, c.k_positions))


def select(c: Call, sizes: Sizes, part: Part, scores: Tensor, keys: Tensor, counts: Tensor, weighed: bool) -> None:
    """The contenders of a part of a call."""
    (_, H, Q, D), K = c.q.shape, c.k.shape[2]
    keep = 1 if c.top_k is None else c.top_k + 1
    if keep > MOST_SELECTED + 1:
        counts.fill_(-1)
        return
    if sizes.config is not None:
        from gossamer.kernels.hopper import compiled

        unread = counts
        compiled.select(sizes.config)(
            c.q, c.k, c.steepness, unread if c.lo is None else c.lo, unread if c.hi is None else c.hi, scores, keys,
            counts, c.scale, part.first_block, c.offset, keep, part.blocks,
        )  # fmt: skip
        return
    counts.zero_()
    select_kernel[(part.blocks,)](
        c.q, c.k, c.steepness, *seen_by(c), scores, keys, counts,
        *strides(c.q, c.k, c.q_positions, c.k_positions),
        part.first_block, H, Q, K, c.offset, keep, c.scale,
        D=D, BLOCK_D=padded(D), GROUP=c.group, R=sizes.rows, STEP=sizes.step, C=sizes.buffer, A=value_of(c.same),
        TOP=c.top_k is not None, WEIGHED=weighed, BOUNDS=c.bounds, POSITIONS=c.q_positions is not None,
        PRECISION=precision(c.q), PTX=not triton.knobs.runtime.interpret, num_warps=4, num_stages=2,
    )  # fmt: skip
    n = part.blocks * sizes.rows
    order_contenders_kernel[(-(-n // 8),)](scores, keys, counts, n, C=sizes.buffer, RP=8, num_warps=1)


def forward(
    c: Call, *, keep_lists: bool, with_out: bool = True, only_keys: bool = False, complete: bool = True
) -> Forward:
    """Everything of a call.

    Args:
        keep_lists: whether the lists of all rows are wanted; else they are made in parts.
        with_out: whether out is.
        only_keys: the keys of the k largest alone, as lists.
        complete: whether rows without a list are computed; else they are only told by their counts.
    """
    (B, H, Q, _), (_, _, K, E) = c.q.shape, c.v.shape
    L, top, device = c.listed, c.top_k is not None, c.q.device
    sizes = selection_sizes(c, not only_keys)
    every = list(parts(c, sizes.rows))
    most = max(part.blocks for part in every)
    # Buffers never lie in memory together with lists of more than a part.
    scores = torch.empty(most * sizes.rows, sizes.buffer, device=device)
    keys = torch.empty(most * sizes.rows, sizes.buffer, dtype=torch.int32, device=device)
    counts = torch.empty(most * sizes.rows, dtype=torch.int32, device=device)
    held = c.rows if keep_lists else max(part.rows for part in every)
    lists = Listed(
        torch.empty(held, L, dtype=torch.int32, device=device),
        torch.empty((1, 1) if only_keys else (held, L), device=device),
        torch.zeros(B, H, Q, dtype=torch.int32, device=device),
    )
    stats = Stats(
        torch.empty(B, H, Q, device=device), torch.empty(B, H, Q, dtype=torch.int32, device=device),
        torch.empty(B, H, Q, dtype=torch.bool, device=device),
    )  # fmt: skip
    out = torch.empty(B, H, Q, E if with_out else 0, dtype=c.q.dtype, device=device)
    for part in every:
        first_listed = 0 if keep_lists else part.first_row
        rows = 8
        select(c, sizes, part, scores, keys, counts, not only_keys)
        finish_kernel[(-(-part.blocks * sizes.rows // rows),)](
            scores, keys, counts, c.steepness, *stats, *lists, part.first_block, part.blocks * sizes.rows, H, Q,
            c.top_k or K, first_listed, L=L, R=sizes.rows, RP=rows, C=sizes.buffer, SHORT=min(64, sizes.buffer),
            A=value_of(c.same), TOP=top, KEYS=only_keys, num_warps=1,
        )  # fmt: skip
        if top and complete:
            large(c, out, stats, lists, part.first_head, part.heads, first_listed, with_out, only_keys)
        if with_out and not only_keys:
            gather_out(c, out, lists, part, first_listed)
    if not top and complete:
        large(c, out, stats, lists, 0, B * H, 0, with_out, only_keys)
    return Forward(out, stats, lists)


def gather_out(c: Call, out: Tensor, lists: Listed, part: Part, first_listed: int) -> None:
    """Out of the rows of a part that have lists."""
    (_, H, Q, _), E = c.q.shape, c.v.shape[3]
    options = row_options(c.v, "forward", E, E)
    at = part.first_row - first_listed
    gather_out_kernel[(-(-part.rows // options["RP"]),)](
        c.v, out, lists.keys[at:], lists.weights[at:], lists.counts, *strides(c.v), part.first_row, part.rows, H, Q,
        L=c.listed, E=E, SE=piece(E, 8 * c.v.element_size()), GROUP=c.group, **options,
    )  # fmt: skip


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
        c.q, c.k, c.v, c.steepness, *seen_by(c), *groups, lists.counts, out, *stats, lists.keys, lists.weights,
        *strides(c.q, c.k, c.v, c.q_positions, c.k_positions), first_head, H, Q, K, c.offset, c.top_k or K,
        first_listed, c.scale, L=c.listed, TOP=c.top_k is not None, KEYS=only_keys, OUT=with_out, **large_options(c),
    )  # fmt: skip


def backward(
    c: Call, lists: Listed, lam: Tensor, dout: Tensor, with_alpha: bool, complete: bool = True
) -> Gradients:  # fmt: skip
    """All gradients, from the lists and from the normalisers of the rows that have none.

    Args:
        complete: as in `forward`; without it the list of a key is computed as one, however long it is.
    """
    (B, H, Q, D), (_, G, K, E) = c.q.shape, c.v.shape
    device, L, top = c.q.device, c.listed, c.top_k is not None
    dq = torch.empty(B, H, Q, D, dtype=c.q.dtype, device=device)
    dk = torch.empty(B, G, K, D, dtype=c.q.dtype, device=device)
    dv = torch.empty(B, G, K, E, dtype=c.q.dtype, device=device)
    of_rows = torch.empty((B, H, Q) if with_alpha else (1, 1, 1), device=device)
    slopes = torch.empty_like(lists.weights)
    bits = 8 * c.k.element_size()
    sizes = {"D": D, "E": E, "SD": piece(D, bits), "SE": piece(E, bits)}
    options = row_options(c.k, "dq", D, E)
    gather_dq_kernel[(-(-c.rows // options["RP"]),)](
        c.k, c.v, dout, c.steepness, dq, slopes, of_rows, *lists, *strides(c.k, c.v, dout), c.rows, H, Q, c.scale,
        L=L, **sizes, VECTOR=min(32, padded(L)), GROUP=c.group, A=value_of(c.same), WITH_ALPHA=with_alpha, **options,
    )  # fmt: skip
    columns(c, lists, slopes, dout, dk, dv, sizes, LONG if complete else c.rows)
    if not top and complete:
        large_backward(c, lists, lam, dout, dq, dk, dv, of_rows, with_alpha)
    return Gradients(dq, dk, dv, of_rows.sum((0, 2), dtype=torch.float64) if with_alpha else None)


def columns(
    c: Call, lists: Listed, slopes: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, sizes: dict[str, int],
    long: int,
) -> None:  # fmt: skip
    """dK and dV of the pairs in lists.

    Args:
        long: keys with more pairs are computed in parts.
    """
    (B, H, Q, D), (_, G, K, E) = c.q.shape, c.v.shape
    device, L, n_keys = c.q.device, c.listed, B * G * K
    cells = torch.zeros(n_keys * SEGMENTS + 1, dtype=torch.int32, device=device)
    vector = min(32, padded(L))
    grid = (-(-c.rows // 16), -(-L // vector))
    options = {"L": L, "RP": 16, "VECTOR": vector, "GROUP": c.group, "SEGMENTS": SEGMENTS, "num_warps": 4}
    names, in_order = (torch.empty(c.rows * L, dtype=torch.int32, device=device) for _ in range(2))
    of_lists = lists.keys, lists.counts
    count_kernel[grid](*of_lists, cells, H, Q, K, c.rows, **options)
    begins = torch.cumsum(cells, 0, dtype=torch.int32)
    place_kernel[grid](*of_lists, begins, names, H, Q, K, c.rows, **options)
    order_kernel[grid](*of_lists, begins, names, in_order, H, Q, K, c.rows, **options)
    of_keys = c.q, dout, in_order, begins
    gather = row_options(c.k, "dkdv", D, E)
    columns_kernel[(-(-n_keys // gather["RP"]),)](
        *of_keys, lists.weights, slopes, dk, dv, *strides(c.q, dout), H, Q, K, n_keys, c.scale, L=L, **sizes,
        GROUP=c.group, SEGMENTS=SEGMENTS, LONG=long, **gather,
    )  # fmt: skip
    # A key with so many pairs has at most twice as many parts as `long` goes into them.
    most = 2 * c.rows * L // long
    if c.group * Q <= long or not most:
        return
    number = torch.diff(begins[::SEGMENTS])
    ends = torch.cumsum(torch.where(number > long, (number + long - 1) // long, 0), 0, dtype=torch.int32)
    part_dk, part_dv = (torch.empty(most, size, device=device) for size in (D, E))
    long_parts_kernel[(min(most, 1056),)](
        *of_keys, ends, lists.weights, slopes, part_dk, part_dv, *strides(c.q, dout), H, Q, K, n_keys, L=L, **sizes,
        RP=4 * gather["RP"], N=2, GROUP=c.group, SEGMENTS=SEGMENTS, LONG=long,
        HALVINGS=max(1, math.ceil(math.log2(n_keys)) + 1), num_warps=4,
    )  # fmt: skip
    rows = gather["RP"]
    long_sums_kernel[(-(-n_keys // rows),)](
        ends, part_dk, part_dv, dk, dv, n_keys, c.scale, **sizes, RP=rows, num_warps=1
    )


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


def again(c: Call, complete: bool = True) -> Listed:
    """The lists that a forward made, without its out."""
    return forward(c, keep_lists=True, with_out=False, complete=complete).lists


def top_keys(c: Call) -> Tensor:
    """The keys (B, H, Q, top_k) int32 of the k largest scores of each row, ascending, then -1."""
    B, H, Q, _ = c.q.shape
    found = forward(c, keep_lists=True, with_out=False, only_keys=True).lists
    K = c.k.shape[2]
    place = torch.arange(c.listed, device=c.q.device)
    keys = torch.where(place < found.counts.view(-1, 1), found.keys, K).sort(1).values
    return torch.where(keys == K, -1, keys).view(B, H, Q, c.listed)
