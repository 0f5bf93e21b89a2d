"""The request of a call: its arguments in one form, and what its `pattern` stands for.

It is made of a call whose key is not known; the operators make theirs from the form that they were given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from gossamer.kernels.launch import NO_VECTORS, VECTORS, Operand, Vectors, operand_of
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.patterns import CSR, Dense, Pattern
from gossamer.patterns.handles import pattern_of, token_of
from gossamer.torch.arguments import Arguments, AttentionOptions, arguments_of, coerced, describe, instead, is_handle
from gossamer.torch.block_mask import layout_for
from gossamer.torch.given_layouts import Given, arrays_of, at_offset_of, geometry_of
from gossamer.torch.key import Key, alignment, facts, places, plain
from gossamer.torch.memory import outlasting
from gossamer.torch.recording import Again
from gossamer.torch.registry import constants
from gossamer.torch.structure.base import Structure
from gossamer.torch.structure.make import structured

DENSE = Dense()

PATTERN = (
    "None, a Pattern or its handle, a BlockLayout, a torch BlockMask, a boolean mask tensor that broadcasts to "
    "(B, H, Q, K), a two-dimensional torch sparse CSR tensor, DocumentIds, BlockIndices, Indices or PackedSequences"
)

_from_sparse: dict[int, _Read] = {}


class ResolvedPattern(NamedTuple):
    """The `pattern` argument: a pattern's handle, or data that may change from call to call."""

    handle: Any  # -1 for data; a number of a compiled graph where one is traced
    data: tuple[Tensor, ...] = ()  # the arrays of a BlockLayout, or one mask; with `again` what its `run` gives
    geometry: tuple[int, ...] = ()  # of a layout: see `given_layouts.geometry_of`
    alive: Any = None  # what must live as long as the handle is used
    made_from: Callable[[], str] | None = None  # where the layout was made on the device: what from, in words
    again: Again | None = None  # and how that of the next tensors is made


class Request(NamedTuple):
    """One call: its arguments in the one form that they are computed in, and what is attended."""

    arguments: Arguments
    attended: ResolvedPattern
    keys: int | None = None  # for how many it is planned, where k and v may have fewer: see `torch.decoding`

    @property
    def key(self) -> Key:
        """What tells it from other requests, of any form."""
        a, t = self.arguments, self.attended
        tensors = (a.q, a.k, a.v, a.key_lengths, a.sink_logits, a.alibi_slopes)
        told = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors]
        arrays: Any = len(t.data)
        if a.made and a.counted:  # the launch is bound once, for arrays as these are
            arrays = facts(*t.data), places(*t.data), t.again
        return (
            t.handle, t.geometry, arrays, *told, alignment(*(x for x in tensors if x is not None)), a.q_offset,
            a.scale, a.softcap, a.implementation, a.deterministic, a.backward, a.bshd, a.counted, a.made,
            a.alibi_distance,
        )  # fmt: skip

    @property
    def vectors(self) -> Vectors | tuple[()]:
        """Those of the call, or nothing where it has none of them."""
        a = self.arguments
        if a.key_lengths is a.sink_logits is a.alibi_slopes is None:
            return ()
        return Vectors(a.key_lengths, a.sink_logits, a.alibi_slopes)

    @property
    def more(self) -> tuple[Tensor | None, ...]:
        """What a call takes behind q, k and v: the vectors, and data that say what is attended."""
        data = self.attended.data
        return (*(self.vectors or NO_VECTORS), *data) if data or self.attended.again else self.vectors

    @property
    def operands(self) -> dict[str, Operand]:
        """What a launch is told of its tensors, by name."""
        given = {name: getattr(self.arguments, name) for name in ("q", "k", "v", *VECTORS)}
        return {name: operand_of(x) for name, x in given.items() if x is not None}


def request_of(
    q: Any, k: Any, v: Any, pattern: Any, options: AttentionOptions, vectors: Vectors | tuple[()] | None = None,
    repeats: bool = False,
) -> Request:  # fmt: skip
    """The request of a call of `attention`, whose sizes and values are checked later.

    Args:
        vectors: those among the options, where `vectors_of` made them already; empty for none.
        repeats: whether calls like it follow, for which `ResolvedPattern.again` is wanted.

    Raises:
        ValueError: an argument is of a type that nothing accepts.
    """
    o = coerced(q, options, vectors)
    a = arguments_of(q, k, v, o)
    source = again = data = None
    if asks_for_structure(pattern, o.q_offset, o.key_starts):
        if is_handle(pattern) and not torch.compiler.is_compiling():
            pattern = pattern_of(pattern)
        read = pattern.tensors if isinstance(pattern, Structure) else ()
        tensors = (q, k, v, o.key_starts, o.key_lengths, a.q_offset_tensor, *read)
        eager = not torch.compiler.is_compiling() and plain(*tensors)
        a, pattern, source, again, data = structured(a, pattern, o.key_starts, eager, repeats and eager)
    elif isinstance(pattern, (BlockLayout, GatherLayout)):
        a = at_offset_of(pattern, a)
    attended = resolve_pattern(pattern, a.q)._replace(made_from=source, again=again)
    return Request(a, attended if data is None else attended._replace(data=data))


def asks_for_structure(pattern: Any, q_offset: Any, key_starts: Any) -> bool:
    """Whether the structure of a call is made on the device."""
    of_each = isinstance(q_offset, Tensor) and q_offset.ndim > 0
    return of_each or key_starts is not None or isinstance(pattern, Structure)


def resolve_pattern(pattern: Any, q: Tensor) -> ResolvedPattern:
    """What the `pattern` argument stands for."""
    if pattern is None:
        pattern = DENSE
    if isinstance(pattern, Pattern):
        if torch.compiler.is_compiling():
            if constants:
                return ResolvedPattern(pattern._compiled_handle())  # type: ignore[attr-defined]
            if not hasattr(pattern, "handle"):
                raise ValueError(
                    "a pattern may be made inside a compiled function with torch 2.13 or newer; make it outside"
                )
        return ResolvedPattern(pattern.handle, alive=pattern)
    if isinstance(pattern, torch.SymInt) or is_handle(pattern):
        if torch.compiler.is_compiling():
            return ResolvedPattern(pattern)
        return ResolvedPattern(int(pattern), alive=token_of(int(pattern)))
    if isinstance(pattern, Tensor):
        if pattern.is_nested:
            raise ValueError(f"pattern must be {PATTERN}; got {describe(pattern)}")
        if pattern.layout == torch.sparse_csr and pattern.ndim == 2:
            csr = _sparse(pattern)
            return ResolvedPattern(csr.handle, alive=csr)
        if pattern.dtype != torch.bool or pattern.layout != torch.strided:
            raise ValueError(f"pattern must be {PATTERN}; got {describe(pattern)}, {pattern.layout}{instead(pattern)}")
        if pattern.device != q.device:
            raise ValueError(f"pattern must be a tensor on q's device, {q.device}; got {describe(pattern)}")
        return ResolvedPattern(-1, (pattern,))
    if isinstance(pattern, (BlockLayout, GatherLayout)):
        if isinstance(pattern, GatherLayout) and not pattern.apart:
            raise ValueError(
                "pattern, a GatherLayout, must be one that device_layout made of Indices; give the pattern itself, or "
                "a BlockLayout"
            )
        layout = _tensors_of(pattern, q.device) if pattern.device is None else pattern
        arrays = arrays_of(layout)
        for at, x in enumerate(arrays):
            if not isinstance(x, Tensor) or x.device != q.device:
                raise ValueError(
                    f"pattern, a {type(layout).__name__}, must hold tensors on {q.device}; array {at} is {describe(x)}"
                )
        return ResolvedPattern(-1, tuple(arrays), geometry_of(layout), layout)
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # whoever has a BlockMask has imported it
    if flex is not None and isinstance(pattern, flex.BlockMask):
        return resolve_pattern(layout_for(pattern, q), q)
    raise ValueError(f"pattern must be {PATTERN}; got {describe(pattern)}{instead(pattern)}")


def _tensors_of(layout: Given, device: torch.device) -> Given:
    """The kept copy of a numpy layout on a device."""
    return layout.to(device) if torch.compiler.is_compiling() else outlasting(device, lambda: layout.to(device))


class _Read(NamedTuple):
    """A sparse tensor that was read."""

    tensor: ref[Tensor]
    version: int
    pattern: CSR


def _sparse(tensor: Tensor) -> CSR:
    """The pattern of a sparse tensor, read once as long as it lives and is not written to."""
    if torch.compiler.is_compiling():
        raise ValueError("pattern, a sparse tensor, must be turned into CSR.from_torch(tensor) outside torch.compile")
    number, version = id(tensor), -1 if tensor.is_inference() else tensor._version
    known = _from_sparse.get(number)
    if known is not None and known.tensor() is tensor and known.version == version >= 0:
        return known.pattern
    csr = CSR.from_torch(tensor)
    forget = partial(_from_sparse.pop, number)  # called with the dead reference, which `pop` takes as its default
    _from_sparse[number] = _Read(ref(tensor, forget), version, csr)
    return csr
