"""From the arguments of a call to the layout that says what is attended, made on the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.layouts.device import empty_layout
from gossamer.memo import Memo
from gossamer.plan.plan import plan_of
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch import device_arrays
from gossamer.torch.arguments import Arguments, cast_type, describe, validate
from gossamer.torch.given_layouts import Given, arrays_of, geometry_of, layout_from
from gossamer.torch.planning import chip_of, problem_of
from gossamer.torch.recording import Again, record
from gossamer.torch.structure.base import Positions, Sizes, Structure, rule_of
from gossamer.torch.structure.groups import ALONE, group_of
from gossamer.torch.structure.inputs import Inputs, Tile, check_vectors, layout_of
from gossamer.torch.structure.operator import arrays_behind, is_unbacked

NO_TILES = (64, 64)  # for an implementation that walks none, which the plan refuses by name
MANY = 4096  # keys of a call that is not small
# Ranges of numbers of queries, and of head sizes, in which implementations want one tile.
QUERIES, SIZES = (32, 64, 128, MANY), (64, 96, 128, 256, MANY)
SOFTCAPS = (1024, 2**64)  # ends of ranges of soft caps that the same implementations compute

_tiles: Memo[Tile] = Memo()


class Structured(NamedTuple):
    """A call whose structure was made on the device."""

    arguments: Arguments  # without what the layout holds: offsets and lengths
    layout: Given
    source: Callable[[], str] | None = None  # what it was made from, in words
    again: Again | None = None  # its arrays, made of the structure's tensors and of the vectors
    data: tuple[Tensor, ...] | None = None  # the memory of its arrays, as `again.run` gives it


def structured(
    a: Arguments, pattern: Any, key_starts: Tensor | None, eager: bool, repeats: bool = False
) -> Structured:  # fmt: skip
    """The layout of a call, and its arguments without what the layout holds.

    Args:
        pattern: a `Structure`, a pattern that goes by positions, or None.
        key_starts: (B,), or None.
        eager: whether all tensors are plain, and what is checked may be known by their shapes and types.
        repeats: whether calls like it follow, for which `Structured.again` is wanted.

    Raises:
        ValueError: an argument is wrong.
        Unsupported: nothing computes the call, or the pattern has no rule on a device.
    """
    offset = a.q_offset_tensor
    check_vectors(a.q.shape[0], a.q.device, offset, key_starts, a.key_lengths)
    if isinstance(pattern, Structure):
        structure = pattern
    else:
        structure = Positions(rule_of(pattern, _advice(pattern, offset, key_starts)))
    structure = structure.placed(a.q.device)
    if structure.own_positions and not a.q_offset is offset is a.alibi_slopes is None:
        name = "alibi_slopes" if a.q_offset is offset is None else "q_offset"
        raise Unsupported(f"{name} must be None with {structure!r}, whose positions are those within each sequence")
    if a.alibi_slopes is not None and offset is not None and offset.ndim:
        raise Unsupported(
            "alibi_slopes must be None with a q_offset of (B,): distances need one offset for all batch elements"
        )
    # The layout holds positions; ALiBi's distances are counted by the kernel.
    keep, distance = a.alibi_slopes is not None, a.alibi_distance
    if keep and distance is None and not structure.rule.ahead:
        distance = "signed"  # as it would be by "absolute"
    rest = a._replace(
        q_offset=a.q_offset if keep else None, q_offset_tensor=offset if keep else None, key_lengths=None, made=True,
        alibi_distance=distance,
    )  # fmt: skip
    compiling = torch.compiler.is_compiling()
    if not (compiling or eager or cast_type(a.q)):  # an operator that casts its inputs checks them then
        validate(rest)
    (B, H, Q, _), (_, G, K, _) = a.q.shape, a.k.shape
    for x in structure.tensors:
        if x.device != a.q.device:
            raise ValueError(f"tensors of {structure!r} must be on q's device, {a.q.device}; got {describe(x)}")
    inputs = Inputs(structure, Sizes(B, H, G, Q, K), a.q.device, a.q_offset, offset, key_starts, a.key_lengths)
    structure.check_numbers(inputs.sizes)
    if compiling and is_unbacked(a.q, a.k, a.v, *inputs.tensors):
        tile = tile_of(rest, structure.block)
        return Structured(rest, layout_from(arrays_behind(inputs, tile), (*tile, Q, K, 1)))
    inputs.check()
    if 0 in inputs.sizes:
        if not compiling:
            validate(rest)
        block_q, block_kv = NO_TILES
        nothing = empty_layout(Q, K, a.q, block_q=block_q, block_kv=block_kv, xp=device_arrays)
        return Structured(rest, nothing, None if compiling else structure.__repr__)
    tile = known_tile(rest, structure.block) if eager else tile_of(rest, structure.block)
    if structure.block == 1 and structure.list_heads is not None:
        tile = group_of(rest, structure.list_heads)

    # Whether gradients are asked for is not known while a function is compiled.
    transpose = a.backward or compiling
    again = data = None
    # Made in inference mode it could not be used in training later.
    with torch.inference_mode(False) if not compiling and torch.is_inference_mode_enabled() else nullcontext():
        if repeats:
            made: list[Given] = []

            def arrays() -> list[Tensor]:
                made.append(layout_of(inputs, tile, transpose))
                return arrays_of(made[0])

            again, (layout,) = record(arrays, inputs.tensors, a.q.device, together=True).again, made
            if again is not None:  # the first call is one of those that follow
                data = again.run(*inputs.tensors)
                layout = layout_from([*again.parts(data)], geometry_of(layout))
        else:
            layout = layout_of(inputs, tile, transpose)
    if compiling:
        return Structured(rest, layout)
    given = {"q_offset": offset, "key_starts": key_starts, "key_lengths": a.key_lengths}
    source = partial(_in_words, structure, [n for n, x in given.items() if x is not None])
    return Structured(rest, layout, source, again, data)


def _in_words(structure: Structure, vectors: list[str]) -> str:
    """What a layout was made from."""
    return ", ".join([repr(structure), *vectors])


def _advice(pattern: Any, offset: Tensor | None, key_starts: Tensor | None) -> str:
    """What a call may be given instead of a pattern without a rule and of what asks for one."""
    names = [name for name, x in (("q_offset", offset), ("key_starts", key_starts)) if x is not None]
    both = " and ".join(names)
    if isinstance(pattern, (BlockLayout, GatherLayout)):
        return f"A layout holds all that is attended: leave out {both}, or make it with them by device_layout"
    if isinstance(pattern, Tensor) and pattern.dtype == torch.bool:
        hint = "Rows of a mask have no positions" if key_starts is None else "Write the starts into the mask"
        return f"{hint}: leave out {both}"
    mask = f"Give a boolean mask (B, 1 or H, Q, K) of all that is attended, without {both}"
    return mask if key_starts is not None else f"{mask}, or a q_offset that all sequences share, an int"


def known_tile(a: Arguments, block: int | None) -> Tile:
    """`tile_of` a plain call that is right, kept by what its checks and its plan look at.

    Raises:
        ValueError: an argument is wrong.
    """
    tensors = (a.q, a.k, a.v, a.sink_logits, a.alibi_slopes, a.q_offset_tensor)
    facts = [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
    key = block, *facts, a.scale, a.softcap, a.q_offset, a.implementation, a.deterministic, a.backward, a.alibi_distance
    found = _tiles.get(key)
    if found is None:
        validate(a)
        found = _tiles.put(key, tile_of(a, block))
    return found


def tile_of(a: Arguments, block: int | None) -> Tile:
    """The tile of the first implementation that would compute a call; of blocks that are listed, theirs."""
    if block is not None:
        return (block, block) if block > 1 else ALONE
    device = a.q.device
    if device.type == "meta":  # nothing is computed there
        return NO_TILES
    dtype = cast_type(a.q) or a.q.dtype
    if not torch.compiler.is_compiling():
        return _tile(replace(problem_of(a, ()), dtype=_name(dtype)), a.implementation)
    # Tiles differ by these ranges of sizes. A number of queries may be one of a graph that is compiled for many.
    few, wide = _known_range(a.q.shape[2], QUERIES), _in_range(max(a.q.shape[3], a.v.shape[3]), SIZES)
    cap = None if a.softcap is None else _in_range(a.softcap, SOFTCAPS)
    terms = ["sink_logits"] * (a.sink_logits is not None) + ["alibi_slopes"] * (a.alibi_slopes is not None)
    terms += ["alibi_distance"] * (a.alibi_distance == "absolute")
    block_q, block_kv = _tile_of_facts(
        few, wide, dtype, device, " ".join(terms), cap, a.implementation, a.deterministic
    )
    return block_q, block_kv


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_range(n: float, ends: tuple[int, ...]) -> int:
    """The first end that n does not exceed, or the last one."""
    for end in ends:
        if n <= end:
            return end
    return ends[-1]


def _known_range(n: int, ends: tuple[int, ...]) -> int:
    """`_in_range` of a number of a graph: of one that the graph leaves open the last end, so that it stays open."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for end in ends:
        if statically_known_true(n <= end):
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
