"""The operator `gossamer::structure`: a layout in a compiled function of which only the data know a size.

A compiler can tell nothing of such a size, neither whether it is 0 nor whether a tile divides it, and follows no
operation that asks. The operator makes what an uncompiled call makes. Its fake says how many arrays there are, and that
only the data know their sizes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from gossamer.layouts.device import empty_layout
from gossamer.patterns.reach import Reach, Rule
from gossamer.torch import device_arrays
from gossamer.torch.given_layouts import arrays_of
from gossamer.torch.structure.base import Joined, Positions, Sizes, Structure
from gossamer.torch.structure.chosen import BlockIndices, Indices
from gossamer.torch.structure.documents import DocumentIds
from gossamer.torch.structure.inputs import Inputs, Tile, check_vectors, layout_of
from gossamer.torch.structure.sequences import PackedSequences

TELLS = TorchVersion(torch.__version__) >= "2.13"  # compiled functions may ask torch which sizes only the data know
NONE = -(2**62)  # for None in a list of numbers
# Dimensions of the arrays of a walk, as `Walk.arrays` and `GatherWalk.arrays` give them.
OF_WALK, OF_GATHER = (3, 3, 1) * 3 + (3, 3, 1, 3), (3, 3, 1, 2)

library = torch.library.Library("gossamer", "FRAGMENT")
library.define(
    "structure(Tensor[] tensors, SymInt[] terms, int[] rule, SymInt[] sizes, SymInt? q_offset, Tensor? offset, "
    "Tensor? key_starts, Tensor? key_lengths, int block_q, int block_kv, Device device) -> Tensor[]",
    tags=torch.Tag.flexible_layout,  # it reads tensors of any strides; Inductor copies none to those of an expanded one
)


def is_unbacked(*tensors: Tensor) -> bool:
    """Whether only the data know a size of tensors of a compiled function.

    Of a torch that cannot be asked that holds of a size that may be 0 or 1, which are constants of a graph elsewhere.
    """
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols, statically_known_true

    for x in tensors:
        if TELLS:
            if has_free_unbacked_symbols(x):
                return True
        elif not all(statically_known_true(n >= 2) or statically_known_true(n < 2) for n in x.shape):
            return True
    return False


def arrays_behind(inputs: Inputs, tile: Tile) -> list[Tensor]:
    """The arrays of a layout and of its transpose, by the operator."""
    return torch.ops.gossamer.structure.default(*arguments_of(inputs, tile))


def arguments_of(inputs: Inputs, tile: Tile) -> tuple[Any, ...]:
    """The arguments of the operator."""
    structure, (block_q, block_kv) = inputs.structure, tile
    terms = [n for term in structure.terms for n in _numbers(term)]
    return (
        list(structure.tensors), terms, _rule_numbers(structure.rule), list(inputs.sizes), inputs.q_offset,
        inputs.offset, inputs.key_starts, inputs.key_lengths, block_q, block_kv, inputs.device,
    )  # fmt: skip


def _numbers(term: Structure) -> tuple[int, int, int]:
    """A term as numbers: its kind, its tensors, and what is said beside these."""
    if isinstance(term, DocumentIds):
        kind, more = 1, term.length if term.by_edges else NONE
    elif isinstance(term, PackedSequences):
        kind, more = 2, NONE
    elif isinstance(term, BlockIndices):
        kind, more = 3, term.block_size
    elif isinstance(term, Indices):
        kind, more = 4, NONE
    else:
        kind, more = 0, NONE
    return kind, len(term.tensors), more


def _term(kind: int, tensors: Sequence[Tensor], more: int, rule: Rule) -> Structure:
    """The term that `_numbers` has as numbers."""
    if kind == 0:
        return Positions(rule)
    first, *others = tensors
    if kind == 1:
        return DocumentIds(first) if more == NONE else DocumentIds.from_cu_seqlens(first, more)
    if kind == 2:
        keys, used = others if len(others) == 2 else (*others, None)
        made = PackedSequences(first, keys, seqused_k=used)
        made.rule = rule
        return made
    (counts,) = others or (None,)
    return BlockIndices(first, more, counts) if kind == 3 else Indices(first, counts)


def _rule_numbers(rule: Rule) -> list[int]:
    numbers: list[int] = []
    for reach in rule.reaches:
        ends = [NONE if n is None else n for n in (reach.left, reach.right, reach.first)]
        numbers += [*ends, reach.step, len(reach.blocks), *reach.blocks]
    return numbers


def _rule(numbers: Sequence[int]) -> Rule:
    """The rule that `_rule_numbers` has as numbers."""
    reaches, each = [], iter(numbers)
    for left in each:
        before, after, first = (None if n == NONE else n for n in (left, next(each), next(each)))
        step, blocks = next(each), next(each)
        reaches.append(Reach(before, after, tuple(next(each) for _ in range(blocks)), first, step))
    return Rule(tuple(reaches))


def _structure(
    tensors: list[Tensor], terms: list[int], rule: list[int], sizes: list[int], q_offset: int | None,
    offset: Tensor | None, key_starts: Tensor | None, key_lengths: Tensor | None, block_q: int, block_kv: int,
    device: torch.device,
) -> list[Tensor]:  # fmt: skip
    each, joined, of_all = iter(tensors), [], _rule(rule)
    for at in range(0, len(terms), 3):
        kind, number, more = terms[at : at + 3]
        joined.append(_term(kind, [next(each) for _ in range(number)], more, of_all))
    only, *others = joined
    structure = only if not others and only.rule == of_all else Joined(tuple(joined), of_all)
    inputs = Inputs(structure, Sizes(*sizes), device, q_offset, offset, key_starts, key_lengths)
    check_vectors(inputs.sizes.B, device, offset, key_starts, key_lengths)
    inputs.check()
    made = (
        _nothing(inputs, block_q, block_kv) if 0 in sizes else arrays_of(layout_of(inputs, (block_q, block_kv), True))
    )
    # A result shares memory with no other one: a compiler takes it again, each by itself.
    taken, results = {x.untyped_storage().data_ptr() for x in inputs.tensors}, []
    for x in made:
        memory = x.untyped_storage().data_ptr()
        fresh = memory not in taken and x.is_contiguous()
        results.append(x if fresh else x.clone(memory_format=torch.contiguous_format))
        taken.add(memory)
    return results


def _nothing(inputs: Inputs, block_q: int, block_kv: int) -> list[Tensor]:
    """The arrays of a layout of tensors without elements."""
    Q, K, like = inputs.sizes.Q, inputs.sizes.K, torch.empty(0, dtype=torch.int32, device=inputs.device)
    if block_kv:
        return arrays_of(empty_layout(Q, K, like, block_q=block_q, block_kv=block_kv, xp=device_arrays))
    return [like.new_zeros(shape) for n in (Q, K) for shape in ((1, 1, n), (1, 1, n), (0,), (0, 1))]


def _fake_structure(
    tensors: list[Tensor], terms: list[int], rule: list[int], sizes: list[int], q_offset: int | None,
    offset: Tensor | None, key_starts: Tensor | None, key_lengths: Tensor | None, block_q: int, block_kv: int,
    device: torch.device,
) -> list[Tensor]:  # fmt: skip
    context = torch.library.get_ctx()
    return [
        torch.empty([context.new_dynamic_size() for _ in range(n)], dtype=torch.int32, device=device)
        for n in _dimensions(block_kv)
    ]


def _dimensions(block_kv: int) -> tuple[int, ...]:
    """The numbers of dimensions of a layout's arrays and its transpose's; block_kv is 0 where keys are gathered."""
    return (OF_WALK if block_kv else OF_GATHER) * 2


library.impl("structure", _structure, "CompositeExplicitAutograd")
torch.library.register_fake("gossamer::structure", _fake_structure, lib=library)
