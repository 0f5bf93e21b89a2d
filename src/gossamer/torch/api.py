"""`attention`: arguments in every accepted form, brought to the one form of the operator."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.rows import compute_dtype
from gossamer.layouts import BlockLayout
from gossamer.patterns import CSR, Dense, Pattern
from gossamer.patterns.handles import token_of
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.torch.block_mask import layout_for
from gossamer.torch.calls import kind_of, known, remember
from gossamer.torch.decoding import decoding
from gossamer.torch.merge import branches_of
from gossamer.torch.merge import merge as merge_results
from gossamer.torch.operators import differentiable, eager, plain
from gossamer.torch.registry import constants, pattern_of
from gossamer.torch.reorder import orders, permuted
from gossamer.torch.validate import Arguments, describe, fewer, four_dimensional, instead

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_DENSE = Dense()
_forward = torch.ops.gossamer.forward.default
_from_sparse: dict[int, tuple[Any, Any, CSR]] = {}

_NESTED = (
    "; of sequences of several lengths give their padding as key_lengths, or pack them behind one another: Document"
)
_PATTERN = (
    "None, a Pattern or its handle, a BlockLayout, a torch BlockMask, a boolean mask tensor that broadcasts to "
    "(B, H, Q, K), or a two-dimensional torch sparse CSR tensor"
)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | int | BlockLayout | BlockMask | Tensor | None = None, *,
    scale: float | None = None, q_offset: int | Tensor | None = None, key_lengths: Tensor | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None, alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False, merge: str | None = None, implementation: str | None = None,
    deterministic: bool | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | int | BlockLayout | BlockMask | Tensor | None = None, *,
    scale: float | None = None, q_offset: int | Tensor | None = None, key_lengths: Tensor | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None, alibi_slopes: Tensor | None = None,
    return_lse: Literal[True], merge: str | None = None, implementation: str | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | int | BlockLayout | BlockMask | Tensor | None = None, *,
    scale: float | None = None, q_offset: int | Tensor | None = None, key_lengths: Tensor | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None, alibi_slopes: Tensor | None = None,
    return_lse: bool, merge: str | None = None, implementation: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | int | BlockLayout | BlockMask | Tensor | None = None,
    *,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    merge: str | None = None,
    implementation: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the pairs that `pattern` keeps; exact, differentiable, never an N x N array.

    A row that keeps nothing gives 0, an lse of -inf and zero gradients.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D); float16, bfloat16, float32 or float64.
        k: (B, G, K, D) and so on, H a multiple of G: query head h uses key head h // (H // G).
        v: (B, G, K, E) and so on.
        pattern: what is attended: a Pattern; its `handle`, an integer (a compiled function that is given one is not
            compiled again for the next; whoever calls it keeps the pattern until the backward); a BlockLayout (its
            tensors are data: they may change from call to call. On a CPU its indices are checked, on a GPU only its
            shapes); a torch BlockMask of flex_attention, read once (`from_flex`); a boolean tensor that broadcasts to
            (B, H, Q, K), True where a pair is kept, read again when torch counts a write to it (one through numpy or
            `.data` is not seen); a torch sparse CSR tensor (Q, K), of which the stored entries count. None is every
            pair.
        scale: D ** -0.5 by default. A number of Python or numpy (of Python in a compiled function), as are `softcap`
            and `q_offset`, that float32 (float64 for float64 inputs) holds.
        q_offset: position of query row 0, K - Q by default. A 0-d tensor is read when the operator runs, which waits
            for a GPU. Refused where rows have no positions: with a mask, a block mask, a layout or a sparse matrix.
        key_lengths: (B,) integers of any size; keys j >= key_lengths[b] are not attended. Their memory must hold finite
            numbers. Positions do not follow them: with a cache of fixed size, a window needs `q_offset` too.
        softcap: scores become softcap * tanh(score / softcap).
        sink_logits: (H,), any float type, differentiable; exp(sink) joins the denominator and lse. An empty row's lse
            is the sink.
        alibi_slopes: (H,), any float type, constant; slope * (j - i) is added to the scores.
        return_lse: also return lse (B, H, Q), the natural logarithm of the denominators, differentiable; float32,
            or float64 for float64 inputs.
        merge: None is one softmax over all pairs that `pattern` keeps. "lse" attends to each term of a union `a | b`,
            or each branch of a LongNet, alone, and weighs the results by their denominators: a key counts once for
            each term that keeps it.
        implementation: by name, runs or raises `Unsupported`; None is the first that supports the problem.
        deterministic: the same bits every time; torch.are_deterministic_algorithms_enabled() by default.

    Returns:
        out (B, H, Q, E) and so on, in q's dtype; with lse if asked for.

    Raises:
        ValueError: an argument is wrong; `Unsupported` is one.
    """
    kind = None
    if type(pattern) is int and not torch.compiler.is_compiling():
        pattern = pattern_of(pattern)
    if not torch.compiler.is_compiling() and merge is None:
        which = _DENSE if pattern is None else pattern
        options = (scale, q_offset, softcap, implementation)
        deterministic = is_deterministic(deterministic)
        none = scale is q_offset is softcap is implementation is None
        vectors = key_lengths, sink_logits, alibi_slopes
        tensors = () if key_lengths is sink_logits is alibi_slopes is None else vectors
        kind = kind_of(q, k, v, which, deterministic, () if none else options, tensors)
        call: Any = known(kind)
        if call is None and kind is not None and kind[1][-2:-1] == (1,):
            call = decoding(kind, q, k, v, which, (*options, deterministic), tensors)
        if call is not None and (return_lse is False or return_lse is True):
            found = call(q, k, v, which, *tensors)
            return found if return_lse else found[0]
    given = scale, q_offset, softcap, sink_logits, alibi_slopes
    scale, q_offset, softcap = number(scale), number(q_offset), number(softcap)
    sink_logits, alibi_slopes = wide(sink_logits, q), slopes(alibi_slopes, q)
    if any(x is not y for x, y in zip(given, (scale, q_offset, softcap, sink_logits, alibi_slopes), strict=True)):
        return attention(
            q, k, v, pattern, scale=scale, q_offset=q_offset, key_lengths=key_lengths, softcap=softcap,
            sink_logits=sink_logits, alibi_slopes=alibi_slopes, return_lse=return_lse, merge=merge,
            implementation=implementation, deterministic=deterministic,
        )  # fmt: skip
    check_types(q, k, v, scale, q_offset, key_lengths, softcap, sink_logits, alibi_slopes, implementation)
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False; got {describe(return_lse)}")
    if merge is not None:
        return _merged(
            q, k, v, pattern, merge, return_lse, scale=scale, q_offset=q_offset, key_lengths=key_lengths,
            softcap=softcap, sink_logits=sink_logits, alibi_slopes=alibi_slopes, implementation=implementation,
            deterministic=deterministic,
        )  # fmt: skip
    deterministic = is_deterministic(deterministic)
    dims = q.ndim
    q, k, v = four_dimensional(q, k, v)
    back = None
    if isinstance(pattern, ReorderedCSR) and not torch.compiler.is_compiling():
        q, k, v = permuted(pattern, q, k, v, key_lengths, alibi_slopes)
        back, pattern = orders(pattern, q.device)[1], pattern.inner
    handle, layout, blocks, _alive = what(pattern, q)
    offset, offset_tensor = (None, q_offset) if isinstance(q_offset, Tensor) else (q_offset, None)
    if not torch.compiler.is_compiling() and plain(q, k, v, sink_logits):
        a = Arguments(
            q, k, v, offset, offset_tensor, key_lengths, sink_logits, alibi_slopes, scale, softcap, implementation,
            deterministic, differentiable(q, k, v, sink_logits),
        )  # fmt: skip
        out, lse = eager(a, layout, blocks, handle)
        if kind is not None and back is None:
            remember(kind, a, handle, dims)
    else:
        out, lse = _forward(
            q, k, v, layout, blocks, handle, offset, offset_tensor, key_lengths, sink_logits, alibi_slopes, scale,
            softcap, implementation, deterministic, False,
        )  # fmt: skip
    if back is not None:
        out, lse = out.index_select(2, back), lse.index_select(2, back)
    out, lse = fewer(out, lse, dims)
    return (out, lse) if return_lse else out


def _merged(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, merge: str, return_lse: bool, sink_logits: Tensor | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` with `merge`; the sinks join once, with the first term."""
    if merge != "lse":
        raise ValueError(f'merge must be None or "lse"; got {describe(merge)}')
    outs, lses = [], []
    for term in branches_of(pattern):
        found = attention(q, k, v, term, sink_logits=sink_logits, return_lse=True, **options)
        outs.append(found[0])
        lses.append(found[1])
        sink_logits = None
    out, lse = merge_results(outs, lses)
    return (out, lse) if return_lse else out


def number(x: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    if isinstance(x, np.floating):
        return float(x)
    return int(x) if isinstance(x, np.integer) and not isinstance(x, np.timedelta64) else x


def wide(x: Any, q: Any) -> Any:
    """A score parameter in the type that scores are computed in, with its gradient; what is no such tensor as it is.

    What is derived from one of 16 bits, such as the slope of a dilated part, would be rounded again.
    """
    if not (isinstance(x, Tensor) and isinstance(q, Tensor) and x.is_floating_point()):
        return x
    return x.to(compute_dtype(q.dtype))


def slopes(x: Any, q: Any) -> Any:
    """ALiBi slopes, `wide` but where they ask for a gradient: in no_grad mode a copy would not, and is refused too."""
    return x if isinstance(x, Tensor) and x.requires_grad else wide(x, q)


def check_types(
    q: Any, k: Any, v: Any, scale: Any, q_offset: Any, key_lengths: Any, softcap: Any, sink_logits: Any,
    alibi_slopes: Any, implementation: Any,
) -> None:  # fmt: skip
    """What the operator's schema would refuse with a less helpful error; values and shapes are checked inside it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch tensor; got {describe(x)}")
        if x.is_nested:
            raise ValueError(f"{name} must be a tensor of one shape; got {describe(x)}{_NESTED}")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a strided tensor; got {x.layout}, shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be a tensor on q's device, {q.device}; got {describe(x)}")
    if implementation is not None and not isinstance(implementation, str):
        raise ValueError(f"implementation must be a name or None; got {describe(implementation)}")
    if scale is q_offset is key_lengths is softcap is sink_logits is alibi_slopes is None:
        return
    for name, x in (("key_lengths", key_lengths), ("sink_logits", sink_logits), ("alibi_slopes", alibi_slopes)):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch tensor or None; got {describe(x)}")
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be a tensor on q's device, {q.device}; got {describe(x)}")
    for name, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float, torch.SymFloat, torch.SymInt))):
            raise ValueError(f"{name} must be a number or None; got {describe(x)}")
    if q_offset is not None and (isinstance(q_offset, bool) or not isinstance(q_offset, (int, Tensor, torch.SymInt))):
        raise ValueError(f"q_offset must be an int, a 0-d integer tensor or None; got {describe(q_offset)}")
    for name, x in (("q_offset", q_offset), ("key_lengths", key_lengths), ("sink_logits", sink_logits),
                    ("alibi_slopes", alibi_slopes)):  # fmt: skip
        if isinstance(x, Tensor) and x.is_nested:
            raise ValueError(f"{name} must be a tensor of one shape; got {describe(x)}")
    if isinstance(q_offset, int) and not -(2**31) < q_offset < 2**31:
        raise ValueError(f"q_offset must be an integer within 2**31; got {describe(q_offset)}")
    for name, x in (("scale", scale), ("softcap", softcap)):
        if isinstance(x, int) and abs(x) > 2**53:
            raise ValueError(f"{name} must be a number of at most 2**53; got {describe(x)}")


def is_deterministic(deterministic: Any) -> bool:
    """The option, or torch's setting where it is None."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True, False or None; got {describe(deterministic)}")
    return deterministic


def what(pattern: Any, q: Tensor) -> tuple[Any, list[Tensor], list[int], Any]:
    """(handle or -1, layout tensors or a mask, its geometry, what must stay alive) of the `pattern` argument."""
    if pattern is None:
        pattern = _DENSE
    if isinstance(pattern, Pattern):
        if constants and torch.compiler.is_compiling():
            return pattern._compiled_handle(), [], [], None  # type: ignore[attr-defined]
        return pattern.handle, [], [], pattern
    if isinstance(pattern, torch.SymInt) or type(pattern) is int:
        return pattern, [], [], None if torch.compiler.is_compiling() else token_of(int(pattern))
    if isinstance(pattern, Tensor):
        if pattern.is_nested:
            raise ValueError(f"pattern must be {_PATTERN}; got {describe(pattern)}")
        if pattern.layout == torch.sparse_csr and pattern.ndim == 2:
            csr = _sparse(pattern)
            return csr.handle, [], [], csr
        if pattern.dtype != torch.bool or pattern.layout != torch.strided:
            raise ValueError(f"pattern must be {_PATTERN}; got {describe(pattern)}, {pattern.layout}{instead(pattern)}")
        if pattern.device != q.device:
            raise ValueError(f"pattern must be a tensor on q's device, {q.device}; got {describe(pattern)}")
        return -1, [pattern], [], None
    if isinstance(pattern, BlockLayout):
        layout = _tensors_of(pattern, q.device) if pattern.device is None else pattern
        arrays = layout.rows.arrays()
        if layout._transpose:
            arrays = arrays + layout._transpose[0].arrays()
        for at, x in enumerate(arrays):
            if not isinstance(x, Tensor) or x.device != q.device:
                raise ValueError(
                    f"pattern, a BlockLayout, must hold tensors on {q.device}; array {at} is {describe(x)}"
                )
        return -1, arrays, [layout.block_q, layout.block_kv, layout.Q, layout.K], layout
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # whoever has a BlockMask has imported it
    if flex is not None and isinstance(pattern, flex.BlockMask):
        return what(layout_for(pattern, q), q)
    raise ValueError(f"pattern must be {_PATTERN}; got {describe(pattern)}{instead(pattern)}")


def _tensors_of(layout: BlockLayout, device: torch.device) -> BlockLayout:
    """The kept copy of a numpy layout on a device; made in inference mode, it could not be used in training later."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return layout.to(device)
    with torch.inference_mode(False):
        return layout.to(device)


def _sparse(tensor: Tensor) -> CSR:
    """The pattern of a sparse tensor, read once as long as it lives and is not written to."""
    if torch.compiler.is_compiling():
        raise ValueError("pattern, a sparse tensor, must be turned into CSR.from_torch(tensor) outside torch.compile")
    number, version = id(tensor), -1 if tensor.is_inference() else tensor._version
    known = _from_sparse.get(number)
    if known is not None and known[0]() is tensor and known[1] == version >= 0:
        return known[2]
    csr = CSR.from_torch(tensor)
    forget = partial(_from_sparse.pop, number)  # called with the dead reference, which `pop` takes as its default
    _from_sparse[number] = ref(tensor, forget), version, csr
    return csr
