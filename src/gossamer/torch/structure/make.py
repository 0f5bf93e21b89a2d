"""From the arguments of a call to the layout that says what is attended, made on the device of its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from gossamer.layouts import BlockLayout, TileList, Walk
from gossamer.layouts.device import block_list_layout, interval_layout, key_list_layout
from gossamer.memo import Memo
from gossamer.patterns.reach import Bounds
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch import device_arrays
from gossamer.torch.given_layouts import Given
from gossamer.torch.planning import chip_of, problem_of, remembered_layout
from gossamer.torch.structure.base import Lists, Positions, Sizes, Structure, narrow, rule_of
from gossamer.torch.validate import INTEGERS, Arguments, describe, most_offset, validate, within_positions

NO_TILES_OF_KEYS = (1, 0)  # each query gathers for itself
NO_TILES = (64, 64)  # for an implementation that walks none, which the plan refuses by name
MANY = 4096  # keys of a call that is not small
# Ranges of numbers of queries, and of head sizes, in which implementations want one tile.
QUERIES, SIZES = (32, 64, 128, MANY), (64, 96, 128, 256, MANY)
Tile = tuple[int, int]

_tiles: Memo[Tile] = Memo()


class Structured(NamedTuple):
    """A call whose structure was made on the device."""

    arguments: Arguments  # without what the layout holds: offsets and lengths
    layout: Given
    source: str  # what it was made from, in words


def structured(a: Arguments, pattern: Any, key_starts: Tensor | None, remember: bool) -> Structured:
    """The layout of a call, and its arguments without what the layout holds.

    Args:
        pattern: a `Structure`, a pattern that goes by positions, or None.
        key_starts: (B,), or None.
        remember: whether the same tensors may give the layout of before: they are plain, and not written to since.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: nothing computes the call, or the pattern has no rule on a device.
    """
    offset = a.q_offset_tensor
    check_vectors(a, key_starts)
    if a.alibi_slopes is not None and offset is not None and offset.ndim:
        raise Unsupported(
            "alibi_slopes must be None with a q_offset of (B,): distances need one offset for all batch elements"
        )
    # The layout holds positions; ALiBi's distances are counted by the kernel.
    keep = a.alibi_slopes is not None
    rest = a._replace(q_offset=a.q_offset if keep else None, q_offset_tensor=offset if keep else None, key_lengths=None)
    structure = pattern if isinstance(pattern, Structure) else Positions(rule_of(pattern))
    compiling = torch.compiler.is_compiling()
    if not (compiling or remember or _cast(a.q)):
        validate(rest)
    tile = known_tile(rest, structure.block) if remember else tile_of(rest, structure.block)
    (B, H, Q, _), (_, G, K, _) = a.q.shape, a.k.shape
    if a.q_offset is not None and abs(a.q_offset) > most_offset(Q, K):
        raise ValueError(f"q_offset must {within_positions(Q, K)}; got {describe(a.q_offset)}")
    for x in structure.tensors:
        if x.device != a.q.device:
            raise ValueError(f"tensors of {structure!r} must be on q's device, {a.q.device}; got {describe(x)}")
    sizes = Sizes(B, H, G, Q, K)
    structure.check(sizes)

    # Whether gradients are asked for is not known while a function is compiled.
    transpose = a.backward or compiling

    def make() -> Given:
        return layout_of(structure, positions(a, Q, K), sizes, tile, key_starts, a.key_lengths, transpose)

    tensors = tuple(x for x in (*structure.tensors, offset, key_starts, a.key_lengths) if x is not None)
    given = tuple(x is not None for x in (offset, key_starts, a.key_lengths))
    if compiling:
        return Structured(rest, make(), "")
    names = [name for name, there in zip(("q_offset", "key_starts", "key_lengths"), given, strict=True) if there]
    source = ", ".join([f"{structure!r}", *names])
    # Made in inference mode it could not be used in training later.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        # A captured graph reads the tensors again in every replay.
        if not remember or (a.q.is_cuda and is_current_stream_capturing()):
            return Structured(rest, make(), source)
        more = (structure.static, given, a.q_offset, tile, transpose, B, H, G, Q, K)
        return Structured(rest, remembered_layout(tensors, more, make), source)


def check_vectors(a: Arguments, key_starts: Any) -> None:
    """Raise ValueError unless q_offset, key_starts and key_lengths are what a structure is made from."""
    B, device = a.q.shape[0], a.q.device
    for name, x in (("q_offset", a.q_offset_tensor), ("key_starts", key_starts), ("key_lengths", a.key_lengths)):
        if x is None:
            continue
        if x.dtype not in INTEGERS or not (x.shape == (B,) or (name == "q_offset" and x.ndim == 0)):
            also = "an int or a 0-d integer tensor, or one " if name == "q_offset" else "integers "
            raise ValueError(f"{name} must be {also}of shape (B,) = ({B},); got {describe(x)}")
        if x.ndim and x.device != device:
            raise ValueError(f"{name} must be a tensor on q's device, {device}; got {describe(x)}")


def positions(a: Arguments, Q: int, K: int) -> Tensor:
    """Positions of query rows, (B or 1, 1, Q) int32; offsets past the limit of `q_offset` count as it."""
    row = torch.arange(Q, dtype=torch.int32, device=a.q.device)
    offset = a.q_offset_tensor
    if offset is None:
        return (row + (K - Q if a.q_offset is None else a.q_offset))[None, None]
    most = most_offset(Q, K)
    return row + narrow(offset, -most, most).to(a.q.device).reshape(-1, 1, 1)


def layout_of(
    structure: Structure, position: Tensor, sizes: Sizes, tile: Tile, key_starts: Tensor | None,
    key_lengths: Tensor | None, transpose: bool,
) -> Given:  # fmt: skip
    """The layout of a structure over the keys [key_starts[b], key_lengths[b])."""
    K, bounds, lists = sizes.K, structure.bounds(position, sizes), structure.lists(sizes)
    block_q, block_kv = tile
    if bounds is None and not key_starts is key_lengths is None:
        bounds = Bounds(torch.zeros_like(position), torch.full_like(position, K))
    if bounds is not None:
        lo, hi = bounds
        if key_starts is not None:
            lo = torch.maximum(lo, narrow(key_starts, 0, K)[:, None, None])
        if key_lengths is not None:
            hi = torch.minimum(hi, narrow(key_lengths, 0, K)[:, None, None])
        hi = torch.maximum(lo, hi)
        bounds = Bounds(lo.expand(hi.shape).contiguous(), hi)
    if lists is None:
        assert bounds is not None
        return interval_layout(*bounds, K, block_q=block_q, block_kv=block_kv, xp=device_arrays, transpose=transpose)
    lo, hi = (None, None) if bounds is None else bounds
    if lo is not None and lists.indices.shape[0] < lo.shape[0]:
        B = lo.shape[0]
        counts = None if lists.counts is None else lists.counts.expand(B, -1, -1)
        lists = Lists(lists.indices.expand(B, -1, -1, -1), counts)
    given = lists.indices, lists.counts, lo, hi, sizes.Q, K
    _, heads, _, _ = lists.indices.shape
    if structure.block == 1:
        return key_list_layout(*given, block_q=block_q, xp=device_arrays, transpose=transpose)
    times = 1 if heads == 1 else sizes.H // heads
    blocks = block_list_layout(*given, block=block_q, xp=device_arrays, transpose=transpose)
    return for_query_heads(blocks, times) if times > 1 else blocks


def for_query_heads(layout: BlockLayout, times: int) -> BlockLayout:
    """The layout of key heads for the query heads of each, which share its entries."""
    return BlockLayout(_repeated(layout.rows, times), _transpose=[_repeated(walk, times) for walk in layout._transpose])


def _repeated(walk: Walk, times: int) -> Walk:
    def each(x: Tensor) -> Tensor:
        return x if x.shape[-1] == 0 else x.repeat_interleave(times, 1)

    full, interval, bits = (
        TileList(x.starts.repeat_interleave(times, 1), x.counts.repeat_interleave(times, 1), x.indices)
        for x in walk.lists.values()
    )
    return replace(walk, full=full, interval=interval, bits=bits, lo=each(walk.lo), hi=each(walk.hi))


def known_tile(a: Arguments, block: int | None) -> Tile:
    """`tile_of` a plain call that is right, kept by what its checks and its plan look at.

    Raises:
        ValueError: an argument is wrong.
    """
    tensors = (a.q, a.k, a.v, a.sink_logits, a.alibi_slopes, a.q_offset_tensor)
    facts = [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
    key = block, *facts, a.scale, a.softcap, a.q_offset, a.implementation, a.deterministic, a.backward
    found = _tiles.get(key)
    if found is None:
        validate(a)
        found = _tiles.put(key, tile_of(a, block))
    return found


def tile_of(a: Arguments, block: int | None) -> Tile:
    """The tile of the first implementation that would compute a call; of blocks that are listed, theirs."""
    if block is not None:
        return (block, block) if block > 1 else NO_TILES_OF_KEYS
    device = a.q.device
    dtype = torch.get_autocast_dtype(device.type) if _cast(a.q) else a.q.dtype
    if not torch.compiler.is_compiling():
        return _tile(replace(problem_of(a, ()), dtype=_name(dtype)), a.implementation)
    # Sizes may be numbers of a graph that is compiled for many; tiles differ by these ranges of them.
    few, wide = _in_range(a.q.shape[2], QUERIES), _in_range(max(a.q.shape[3], a.v.shape[3]), SIZES)
    terms = ["sink_logits"] * (a.sink_logits is not None) + ["alibi_slopes"] * (a.alibi_slopes is not None)
    block_q, block_kv = _tile_of_facts(
        few, wide, dtype, device, " ".join(terms), a.softcap, a.implementation, a.deterministic
    )
    return block_q, block_kv


def _cast(q: Tensor) -> bool:
    """Whether the operator casts its inputs, and checks them then."""
    return torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_range(n: int, ends: tuple[int, ...]) -> int:
    """The first end that n does not exceed, or the last one."""
    for end in ends:
        if n <= end:
            return end
    return ends[-1]


def _tile_of_facts(
    Q: int, D: int, dtype: torch.dtype, device: torch.device, terms: str, softcap: float | None,
    implementation: str | None, deterministic: bool,
) -> Tile:  # fmt: skip
    """`tile_of`, of what is constant while a function is compiled."""
    chip = chip_of(device)._asdict() if device.type == "cuda" else {}
    names = {*terms.split(), *["softcap"] * (softcap is not None)}
    problem = Problem(
        1, 1, 1, Q, MANY, D, D, _name(dtype), device.type, **chip, score_terms=frozenset(names),
        deterministic=deterministic, softcap=softcap,
    )  # fmt: skip
    return _tile(problem, implementation)


# What torch.compiler.assume_constant_result does, which would import the compiler with gossamer.
_tile_of_facts._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tile(problem: Problem, implementation: str | None) -> Tile:
    plan = plan_of(problem, implementation)
    for found in plan.implementations:
        if found.layout != "packed_mask":
            return found.tile(plan.problem)
    return NO_TILES
