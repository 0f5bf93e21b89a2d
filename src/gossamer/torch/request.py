"""What is asked for: the arguments of `attention` in every accepted form, brought to one form, and the key of a call.

A call is looked up by its key before anything else is done. Only where nothing is found, or where something has no
key as it is (numbers of numpy, sinks of 16 bits, masks), is a `Request` made; the operators make theirs from the form
that they were given.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from gossamer.kernels.launch import (
    ALIGNMENT,
    NO_VECTORS,
    VECTORS,
    Direction,
    Operand,
    Vectors,
    compact,
    operand_of,
)
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.patterns import CSR, Dense, Pattern
from gossamer.patterns.handles import pattern_of, token_of
from gossamer.plan.problem import Unsupported
from gossamer.plan.table import RENAMED
from gossamer.torch.block_mask import layout_for
from gossamer.torch.given_layouts import Given, arrays_of, geometry_of
from gossamer.torch.memory import outlasting
from gossamer.torch.registry import constants
from gossamer.torch.structure.base import Structure
from gossamer.torch.structure.make import structured
from gossamer.torch.validate import (
    Arguments,
    check_distance,
    check_types,
    describe,
    four_dimensional,
    instead,
    is_handle,
    number,
    of_batch,
    offset,
    whole,
)

DENSE = Dense()

_SIMPLE = frozenset({type(None), bool, int, float, str})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Looked up once: these are asked for in every call.
_wrapped, _interpreter = _C._functorch.is_functorch_wrapped_tensor, _C._functorch.peek_interpreter_stack
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_traced, _autocast_enabled, _profiled = (
    _C._get_tracing_state,
    _C._is_any_autocast_enabled,
    torch.autograd._profiler_enabled,
)
_from_sparse: dict[int, _Read] = {}

PATTERN = (
    "None, a Pattern or its handle, a BlockLayout, a torch BlockMask, a boolean mask tensor that broadcasts to "
    "(B, H, Q, K), a two-dimensional torch sparse CSR tensor, DocumentIds, BlockIndices, Indices or PackedSequences"
)

Key = tuple[Any, ...]


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, computed eagerly, and no mode, transform, tracer or profiler is active.

    Crossing the dispatcher costs more than all else that a repeated call does on the host.
    """
    for x in tensors:  # a negative view's memory is not what it stands for; the dispatcher resolves it
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_nested or x.is_neg() or _wrapped(x)):
            return False
    return not (
        _dispatch_modes()
        or _function_modes()
        or _interpreter() is not None
        or _traced() is not None
        or _autocast_enabled()
        or _profiled()
        or forward_ad._current_level >= 0
    )


def differentiable(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> bool:
    """Whether a call needs a gradient."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink_logits is not None and sink_logits.requires_grad)
    )


def key_of(
    q: Any, k: Any, v: Any, pattern: Any, scale: Any, q_offset: Any, softcap: Any, implementation: Any,
    deterministic: bool, vectors: Vectors | tuple[()] = (), bshd: bool = False, alibi_distance: Any = None,
) -> Key | None:  # fmt: skip
    """What tells calls apart: shapes, strides, types, devices, the pattern and the options.

    Everything that is checked and chosen for a call follows from it. None for one that has no key as it is: whose
    pattern is no `Pattern`, whose tensors are not plain or not eager, whose numbers are not those of Python, whose
    implementation has another name now, whose sinks or slopes are not in the type that scores are computed in.

    Args:
        vectors: or nothing.
    """
    if not isinstance(pattern, Pattern) or q is None or k is None or v is None or not plain(q, k, v):
        return None
    if not q.layout is k.layout is v.layout is torch.strided:
        return None
    sinks = None
    if scale is q_offset is softcap is implementation is None and not vectors:
        more: Key = ()
    else:
        options = scale, q_offset, softcap, implementation
        types = tuple(map(type, options))
        if not _SIMPLE.issuperset(types) or implementation in RENAMED:
            return None
        more = options + types
        if vectors:
            facts = _vectors(vectors, compute_dtype(q.dtype))
            if facts is None:
                return None
            more += facts
            if alibi_distance is not None:
                if type(alibi_distance) is not str or vectors.alibi_slopes is None:
                    return None  # which is refused
                more += (alibi_distance,)
            sinks = vectors.sink_logits
    return (
        pattern.handle, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, differentiable(q, k, v, sinks), alignment(q, k, v), deterministic, bshd, *more,
    )  # fmt: skip


def alignment(*tensors: Tensor) -> Any:
    """Which tensors begin at multiples of ALIGNMENT: True for all, else one by one."""
    together = 0
    for x in tensors:
        together |= x.data_ptr()
    return not together % ALIGNMENT or tuple([x.data_ptr() % ALIGNMENT == 0 for x in tensors])


def _vectors(vectors: Vectors, wide: torch.dtype) -> Key | None:
    """What tells lengths, sinks and slopes apart; None unless all are plain, and of the type `wide` if floating."""
    facts: list[Any] = []
    for x in vectors:
        if x is None:
            facts.append(None)
            continue
        if not isinstance(x, Tensor) or not plain(x) or x.layout != torch.strided:
            return None
        if x.is_floating_point() and x.dtype is not wide:
            return None
        facts += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.data_ptr() % ALIGNMENT == 0)
    return tuple(facts)


class ResolvedPattern(NamedTuple):
    """The `pattern` argument: a pattern's handle, or data that may change from call to call."""

    handle: Any  # -1 for data; a number of a compiled graph where one is traced
    data: tuple[Tensor, ...] = ()  # the arrays of a BlockLayout, or one mask
    geometry: tuple[int, ...] = ()  # of a layout: see `given_layouts.geometry_of`
    alive: Any = None  # what must live as long as the handle is used
    made_from: str = ""  # where the layout was made on the device: what from, in words


class Request(NamedTuple):
    """One call: its arguments in the one form that they are computed in, and what is attended."""

    arguments: Arguments
    attended: ResolvedPattern
    dims: int = 4  # of the q, k and v that were given
    keys: int | None = None  # for how many it is planned, where k and v may have fewer: see `torch.decoding`
    expanded: bool = False  # k or v were given of a batch of 1

    @property
    def key(self) -> Key:
        """What tells it from other requests, of any form."""
        a, t = self.arguments, self.attended
        tensors = (a.q, a.k, a.v, a.key_lengths, a.sink_logits, a.alibi_slopes)
        facts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors]
        return (
            t.handle, t.geometry, len(t.data), *facts, alignment(*(x for x in tensors if x is not None)), a.q_offset,
            a.scale, a.softcap, a.implementation, a.deterministic, a.backward, a.bshd, a.counted, a.made,
            a.alibi_distance,
        )  # fmt: skip

    @property
    def vectors(self) -> Vectors | tuple[()]:
        """Those of the call, or nothing where it has none of them."""
        a = self.arguments
        found = Vectors(a.key_lengths, a.sink_logits, a.alibi_slopes)
        return () if all(x is None for x in found) else found

    @property
    def more(self) -> tuple[Tensor | None, ...]:
        """What a call takes behind q, k and v: the vectors, and data that say what is attended."""
        data = self.attended.data
        return (*(self.vectors or NO_VECTORS), *data) if data else self.vectors

    @property
    def operands(self) -> dict[str, Operand]:
        """What a launch is told of its tensors, by name."""
        given = {name: getattr(self.arguments, name) for name in ("q", "k", "v", *VECTORS)}
        return {name: operand_of(x) for name, x in given.items() if x is not None}


def results_in_bshd(direction: Direction, operands: Mapping[str, Operand]) -> dict[str, Operand]:
    """The results of a direction as they lie in memory of (B, positions, heads, size), by name."""
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    (*rows, _), (*_, columns) = q.shape, v.shape
    of = {"out": (*rows, columns)} if direction == "forward" else {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    found = {}
    for name, (B, heads, N, size) in of.items():
        batch, row, head, one = compact((B, N, heads, size))
        found[name] = Operand(q.dtype, (B, heads, N, size), (batch, head, row, one))
    return found


def request_of(
    q: Any, k: Any, v: Any, pattern: Any, *, scale: Any, q_offset: Any, key_lengths: Any, softcap: Any,
    sink_logits: Any, alibi_slopes: Any, implementation: Any, deterministic: Any, bshd: bool = False,
    key_starts: Any = None, alibi_distance: Any = None,
) -> Request:  # fmt: skip
    """The request of a call of `attention`, whose values are checked later, with its key.

    Args:
        bshd: q, k and v are (B, positions, heads, size).

    Raises:
        ValueError: an argument is of a type that nothing accepts.
    """
    scale, q_offset, softcap = number(scale), offset(q_offset), number(softcap)
    implementation = current_name(implementation)
    key_lengths, sink_logits, alibi_slopes = lengths(key_lengths, q), wide(sink_logits, q), slopes(alibi_slopes, q)
    key_starts = lengths(key_starts, q, "key_starts")
    check_types(q, k, v, scale, q_offset, key_lengths, softcap, sink_logits, alibi_slopes, implementation, key_starts)
    check_distance(alibi_distance, alibi_slopes)
    deterministic, dims = is_deterministic(deterministic), q.ndim
    q, of_keys, of_values = four_dimensional(q, k, v, bshd)
    k, v = of_batch(of_keys, q.shape[0]), of_batch(of_values, q.shape[0])
    expanded = k is not of_keys or v is not of_values
    host, offset_tensor = (None, q_offset) if isinstance(q_offset, Tensor) else (q_offset, None)
    backward = not torch.compiler.is_compiling() and differentiable(q, k, v, sink_logits)
    a = Arguments(
        q, k, v, host, offset_tensor, key_lengths, sink_logits, alibi_slopes, scale, softcap, implementation,
        deterministic, backward, bshd, counted=not _recorded(), dims=dims, alibi_distance=alibi_distance,
    )  # fmt: skip
    if asks_for_structure(pattern, q_offset, key_starts):
        if is_handle(pattern) and not torch.compiler.is_compiling():
            pattern = pattern_of(pattern)
        read = pattern.tensors if isinstance(pattern, Structure) else ()
        eager = not torch.compiler.is_compiling() and plain(q, k, v, key_starts, key_lengths, offset_tensor, *read)
        a, layout, source = structured(a, pattern, key_starts, eager)
        return Request(a, resolve_pattern(layout, q)._replace(made_from=source), dims, expanded=expanded)
    if isinstance(pattern, (BlockLayout, GatherLayout)):
        a = _at_offset_of(pattern, a)
    return Request(a, resolve_pattern(pattern, q), dims, expanded=expanded)


def _recorded() -> bool:
    """Whether calls are written down to be run later, on memory that a compiler takes again without counting that."""
    return torch.compiler.is_compiling() or _dispatch_modes() > 0 or _interpreter() is not None or _traced() is not None


def _at_offset_of(layout: Given, a: Arguments) -> Arguments:
    """The arguments of a call with the offset that its layout was made with, which only distances read.

    Raises:
        ValueError: another one is given; `Unsupported` for distances where each sequence has its own.
    """
    held, given = layout.q_offset, a.q_offset if a.q_offset_tensor is None else a.q_offset_tensor
    if held is None:
        return a
    slopes, of_each = a.alibi_slopes is not None, isinstance(held, str)
    if slopes and of_each:
        raise Unsupported(
            "alibi_slopes must be None with a BlockLayout in which each sequence has an offset of its own: distances "
            "need one for all"
        )
    known = not of_each and not isinstance(held, Tensor)
    if known and isinstance(given, Tensor) and a.counted and not given.is_meta and given.numel() == 1:
        given = int(given)  # as it would be, when the call runs
    if given is not None and (not known or isinstance(given, Tensor) or given != held):
        raise ValueError(
            f"q_offset must be left out with a BlockLayout that was made with {held if known else 'offsets in tensors'}"
            f"; got {describe(given)}"
        )
    if not slopes:
        return a._replace(q_offset=None, q_offset_tensor=None)
    return a._replace(q_offset=held, q_offset_tensor=None) if known else a._replace(q_offset_tensor=held)


def asks_for_structure(pattern: Any, q_offset: Any, key_starts: Any) -> bool:
    """Whether the structure of a call is made on the device."""
    of_each = isinstance(q_offset, Tensor) and q_offset.ndim > 0
    return of_each or key_starts is not None or isinstance(pattern, Structure)


def current_name(implementation: Any) -> Any:
    """The name of an implementation, for one of its names of before with a warning; anything else as it is."""
    if not isinstance(implementation, str) or implementation not in RENAMED:
        return implementation
    name = RENAMED[implementation]
    if not torch.compiler.is_compiling():  # no tracer follows a warning
        # Of the line that calls `attention` or `explain`.
        warnings.warn(f'implementation="{implementation}" is now called "{name}"', DeprecationWarning, stacklevel=4)
    return name


def wide(x: Any, q: Any) -> Any:
    """A score parameter in the type that scores are computed in, with its gradient; what is no such tensor as it is.

    What is derived from one of 16 bits, such as the slope of a dilated part, would be rounded again.
    """
    if not (isinstance(x, Tensor) and isinstance(q, Tensor) and x.is_floating_point()):
        return x
    return x.to(compute_dtype(q.dtype))


def lengths(x: Any, q: Any, name: str = "key_lengths") -> Any:
    """Key lengths, or starts, in a list or a tuple as an int32 tensor on q's device; anything else as it is.

    Raises:
        ValueError: the list holds something else than integers, or not one for each batch element.
    """
    if not isinstance(x, (list, tuple)) or not isinstance(q, Tensor):
        return x
    B, every = q.shape[0] if q.ndim == 4 else 1, []
    wanted = f"{name}, a list, must hold B={B} integers, one for each batch element"
    for one in x:
        number = whole(one)
        if number is None:
            raise ValueError(f"{wanted}; it holds {describe(one)}")
        every.append(number)
    if len(every) != B:
        raise ValueError(f"{wanted}; got {describe(x)}")
    held = torch.iinfo(torch.int32).max  # lengths over K are K, those under 0 are 0
    return torch.tensor([max(0, min(one, held)) for one in every], dtype=torch.int32, device=q.device)


def slopes(x: Any, q: Any) -> Any:
    """ALiBi slopes, `wide` but where they ask for a gradient: in no_grad mode a copy would not, and is refused too."""
    return x if isinstance(x, Tensor) and x.requires_grad else wide(x, q)


def is_deterministic(deterministic: Any) -> bool:
    """The option, or torch's setting where it is None."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True, False or None; got {describe(deterministic)}")
    return deterministic


def resolve_pattern(pattern: Any, q: Tensor) -> ResolvedPattern:
    """What the `pattern` argument stands for."""
    if pattern is None:
        pattern = DENSE
    if isinstance(pattern, Pattern):
        if constants and torch.compiler.is_compiling():
            return ResolvedPattern(pattern._compiled_handle())  # type: ignore[attr-defined]
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
