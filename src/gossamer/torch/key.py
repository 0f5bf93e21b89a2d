"""The key of a call, and what is asked of torch for it: whether a call is eager, and whether it needs a gradient.

A call is looked up by its key before anything else is done. Only where nothing is found, or where something has no
key as it is (numbers of numpy, sinks of 16 bits, masks), is a request made (`torch/request.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad

from gossamer.kernels.launch import ALIGNMENT, Vectors
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.patterns import Pattern

SIMPLE = frozenset({type(None), bool, int, float, str})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# Looked up once: these are asked for in every call.
_wrapped, _interpreter = _C._functorch.is_functorch_wrapped_tensor, _C._functorch.peek_interpreter_stack
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_traced, _autocast_enabled, _profiled = (
    _C._get_tracing_state,
    _C._is_any_autocast_enabled,
    torch.autograd._profiler_enabled,
)

Key = tuple[Any, ...]


def plain(*tensors: Tensor | None, profiled: bool = False) -> bool:
    """Whether these are plain tensors, computed eagerly, and no mode, transform, tracer or profiler is active.

    Crossing the dispatcher costs more than all else that a repeated call does on the host.

    Args:
        profiled: a profiler may be active, of what crosses no dispatcher in any case.
    """
    for x in tensors:  # a negative view's memory is not what it stands for; the dispatcher resolves it
        if x is not None and (type(x) not in _PLAIN or x.is_meta or x.is_nested or x.is_neg() or _wrapped(x)):
            return False
    return not (
        ((_dispatch_modes() or _function_modes()) and not _watched())
        or _interpreter() is not None
        or _traced() is not None
        or _autocast_enabled()
        or (not profiled and _profiled())
        or forward_ad._current_level >= 0
    )


_thread = local()


@contextmanager
def unseen() -> Iterator[None]:
    """Within it one mode of each kind of this thread, which only watches, counts neither for `plain` nor `recorded`."""
    before = getattr(_thread, "watching", 0)
    _thread.watching = before + 1
    try:
        yield
    finally:
        _thread.watching = before


def _watched() -> bool:
    """Whether the modes of this thread only watch."""
    watching: int = getattr(_thread, "watching", 0)
    return max(_dispatch_modes(), _function_modes()) <= watching


def recorded() -> bool:
    """Whether calls are written down to be run later, on memory that a compiler takes again without counting that."""
    if torch.compiler.is_compiling():
        return True
    modes = _dispatch_modes() - getattr(_thread, "watching", 0)
    return modes > 0 or _interpreter() is not None or _traced() is not None


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
    sinks or slopes are not in the type that scores are computed in.

    Args:
        vectors: or nothing.
    """
    if not isinstance(pattern, Pattern) or q is None or k is None or v is None or not plain(q, k, v):
        return None
    if type(deterministic) is not bool or not q.layout is k.layout is v.layout is torch.strided:
        return None
    sinks = None
    if scale is q_offset is softcap is implementation is None and not vectors:
        more: Key = ()
    else:
        options = scale, q_offset, softcap, implementation
        types = tuple(map(type, options))
        if not SIMPLE.issuperset(types):
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


def facts(*tensors: Tensor | None) -> Key | None:
    """What tells tensors apart: shapes, strides, types, devices; None where one of them is not strided."""
    found: list[Any] = []
    for x in tensors:
        if x is None:
            found.append(None)
        elif x.layout is not torch.strided:
            return None
        else:
            found += (x.shape, x.stride(), x.dtype, x.device)
    return tuple(found)


def places(*tensors: Tensor) -> Key:
    """Of each tensor which one is the first that is the same object, and where it begins modulo ALIGNMENT.

    A view of what begins elsewhere may be aligned at one place and not at another.
    """
    found: dict[int, int] = {}
    for at, x in enumerate(tensors):
        found.setdefault(id(x), at)
    return tuple([(found[id(x)], x.data_ptr() % ALIGNMENT) for x in tensors])


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
