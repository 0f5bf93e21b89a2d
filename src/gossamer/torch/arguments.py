"""The arguments of a call of `attention`: as they may be given, in the one form that is computed, and their checks.

Types are checked in every call, where an operator's schema would refuse them with a less helpful error; sizes and
values (`validate`) when a call is first seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from gossamer import checks
from gossamer.checks import Check, Wording, raise_first
from gossamer.kernels.launch import NO_VECTORS, VECTORS, Vectors, dtype_of
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.plan.arguments import (
    ACCEPTED,
    FLOATS,
    HEAD_SIZES,
    MAX_HEAD,
    MOST,
    POSITIONS,
    check_distance,
    factor_checks,
    listed_lengths,
    offset_check,
    shape_check,
)
from gossamer.plan.arguments import instead as instead_of
from gossamer.plan.table import NAMES
from gossamer.torch.key import differentiable, recorded

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
Layout = Literal["bhnd", "bshd"]  # how q, k, v and out lie: (B, heads, positions, size) or (B, positions, heads, size)
BHND: Layout = "bhnd"
Distance = Literal["signed", "absolute"]  # of `alibi_distance`
Lengths = Tensor | Sequence[int]  # key_lengths as they may be given

OTHER_LAYOUT = (
    '; sizes fit in the other layout: "bhnd", the default, reads (B, H, N, D), layout="bshd" (B, N, H, D); '
    "a function without this argument takes x.transpose(1, 2)"
)
_NESTED = "; pack sequences of several lengths behind one another (Document), or pad them, where there are key_lengths"


class AttentionOptions(NamedTuple):
    """The options of a call of `attention`, as they may be given: its documentation says what they mean."""

    scale: Any = None
    q_offset: Any = None
    key_starts: Any = None
    key_lengths: Any = None
    softcap: Any = None
    sink_logits: Any = None
    alibi_slopes: Any = None
    alibi_distance: Any = None
    implementation: Any = None
    deterministic: Any = None
    layout: Any = BHND


class Arguments(NamedTuple):
    """The arguments of one call, tensors four-dimensional: q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E).

    With `bshd` they are views of (B, Q, H, D) and so on, and so are out, dq, dk and dv.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offset: int | None
    q_offset_tensor: Tensor | None
    key_lengths: Tensor | None
    sink_logits: Tensor | None
    alibi_slopes: Tensor | None
    scale: float | None
    softcap: float | None
    implementation: str | None
    deterministic: bool
    backward: bool
    bshd: bool = False
    counted: bool = False  # torch counts what is written to the data that say what is attended, as it does eagerly
    made: bool = False  # these are a layout that the call made itself
    alibi_distance: str | None = None  # of DISTANCES; None: no key is after its query
    dims: int = 4  # of the q, k and v that were given
    expanded: bool = False  # k or v were given of a batch of 1


def options_of(a: Arguments) -> tuple[Any, ...]:
    """All but q, k and v, and how those were given: in the order of the operators."""
    return (
        a.q_offset, a.q_offset_tensor, a.key_lengths, a.sink_logits, a.alibi_slopes, a.scale, a.softcap,
        a.implementation, a.deterministic, a.backward, a.bshd, a.counted, a.made, a.alibi_distance,
    )  # fmt: skip


def coerced(q: Any, o: AttentionOptions, vectors: Vectors | tuple[()] | None = None) -> AttentionOptions:
    """The options in one form: numbers of Python, and tensors on q's device in the types that are computed with.

    Args:
        vectors: those among the options, where `vectors_of` made them already; empty for none.
    """
    if vectors is None:
        vectors = vectors_of(q, o.key_lengths, o.sink_logits, o.alibi_slopes)
    key_lengths, sinks, slopes = vectors or NO_VECTORS
    deterministic = o.deterministic
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    o = o._replace(key_lengths=key_lengths, sink_logits=sinks, alibi_slopes=slopes, deterministic=deterministic)
    if o.scale is o.q_offset is o.key_starts is o.softcap is None:
        return o
    starts = lengths(o.key_starts, q, "key_starts")
    return o._replace(scale=number(o.scale), q_offset=offset(o.q_offset), key_starts=starts, softcap=number(o.softcap))


def arguments_of(q: Any, k: Any, v: Any, o: AttentionOptions) -> Arguments:
    """The arguments of a call in one form; structure is made of its key_starts, for which there is no place here.

    Args:
        o: `coerced`.

    Raises:
        ValueError: an argument is of a type that nothing accepts.
    """
    check_types(q, k, v, o)
    if o.alibi_distance is not None:
        check_distance(o.alibi_distance, o.alibi_slopes is not None)
    bshd, dims = o.layout is not BHND and is_bshd(o.layout), q.ndim
    backward = not torch.compiler.is_compiling() and differentiable(q, k, v, o.sink_logits)
    q, of_keys, of_values = four_dimensional(q, k, v, bshd)
    k, v = of_batch(of_keys, q.shape[0]), of_batch(of_values, q.shape[0])
    host, in_tensor = (None, o.q_offset) if isinstance(o.q_offset, Tensor) else (o.q_offset, None)
    return Arguments(
        q, k, v, host, in_tensor, o.key_lengths, o.sink_logits, o.alibi_slopes, o.scale, o.softcap, o.implementation,
        o.deterministic, backward, bshd, counted=not recorded(), alibi_distance=o.alibi_distance, dims=dims,
        expanded=k is not of_keys or v is not of_values,
    )  # fmt: skip


def vectors_of(q: Any, key_lengths: Any, sink_logits: Any, alibi_slopes: Any) -> Vectors:
    """The tensors among the score terms, on q's device and in the types that are computed with."""
    # In no_grad mode a copy of slopes would not ask for the gradient that is refused.
    refused = isinstance(alibi_slopes, Tensor) and alibi_slopes.requires_grad
    return Vectors(lengths(key_lengths, q), wide(sink_logits, q), alibi_slopes if refused else wide(alibi_slopes, q))


def lengths(x: Any, q: Any, name: str = "key_lengths") -> Any:
    """Key lengths, or starts, in a list or a tuple as an int32 tensor on q's device; anything else as it is.

    Raises:
        ValueError: the list holds something else than integers, or not one for each batch element.
    """
    if not isinstance(x, (list, tuple)) or not isinstance(q, Tensor):
        return x
    counts = listed_lengths(name, x, [whole(one) for one in x], q.shape[0] if q.ndim == 4 else 1, describe)
    return torch.tensor(counts, dtype=torch.int32, device=q.device)


def wide(x: Any, q: Any) -> Any:
    """A score parameter in the type that scores are computed in, with its gradient; what is no such tensor as it is.

    What is derived from one of 16 bits, such as the slope of a dilated part, would be rounded again.
    """
    if not (isinstance(x, Tensor) and isinstance(q, Tensor) and x.is_floating_point()):
        return x
    return x.to(compute_dtype(q.dtype))


def number(x: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    if isinstance(x, np.floating):
        return float(x)
    return int(x) if isinstance(x, np.integer) and not isinstance(x, np.timedelta64) else x


def offset(x: Any) -> Any:
    """A `q_offset` as an int if it is a whole number; a tensor, and what is no offset, as it is."""
    if x is None or isinstance(x, Tensor):
        return x
    known = whole(x)
    return x if known is None else known


def whole(x: Any) -> Any:
    """`x` as an int if it is a whole number of any library; a size of a traced program as it is; None for all else.

    The host waits for no number: one in a tensor on a GPU is none.
    """
    if isinstance(x, Tensor) and x.device.type != "cpu":
        return None
    return x if isinstance(x, torch.SymInt) else checks.whole(x)


def describe(value: Any) -> str:
    """What was given, for a message: the shape and dtype of a tensor, the repr of anything else."""
    if not isinstance(value, Tensor):
        return checks.describe(value)
    return (
        f"{'a nested tensor' if value.is_nested else f'shape {tuple(value.shape)}'}, {dtype_of(value)}, {value.device}"
    )


def is_handle(x: Any) -> TypeGuard[int]:
    """Whether a `pattern` is the number that stands for one, of Python or numpy."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.timedelta64))


def is_bshd(layout: Any) -> bool:
    """Whether `layout` says (B, positions, heads, size).

    Raises:
        ValueError: it is none of those that there are.
    """
    if not isinstance(layout, str) or layout not in ("bhnd", "bshd"):
        raise ValueError(
            'layout must be "bhnd", of q (B, H, Q, D), or "bshd", of q (B, Q, H, D); '
            f"got {describe(layout)}; what is attended is the argument `pattern`"
        )
    return layout == "bshd"


def check_types(q: Any, k: Any, v: Any, o: AttentionOptions) -> None:
    """Raise ValueError for what an operator's schema would refuse with a less helpful error.

    Args:
        o: after coercion.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            of_array = "; torch.from_numpy(array) makes one" if isinstance(x, np.ndarray) else ""
            raise ValueError(f"{name} must be a torch tensor; got {describe(x)}{of_array}")
        if x.is_nested:
            raise ValueError(f"{name} must be a tensor of one shape; got {describe(x)}{_NESTED}")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a strided tensor; got {x.layout}, shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be a tensor on q's device, {q.device}; got {describe(x)}")
    if o.implementation is not None and not isinstance(o.implementation, str):
        raise ValueError(f"implementation must be a name or None; got {describe(o.implementation)}")
    if not isinstance(o.deterministic, (bool, type(None))):
        raise ValueError(f"deterministic must be True, False or None; got {describe(o.deterministic)}")
    tensors = {name: getattr(o, name) for name in ("key_lengths", "key_starts", "sink_logits", "alibi_slopes")}
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            kinds = "a torch tensor, a list of integers or None" if "key" in name else "a torch tensor or None"
            raise ValueError(f"{name} must be {kinds}; got {describe(x)}")
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be a tensor on q's device, {q.device}; got {describe(x)}")
    factors = (("scale", o.scale), ("softcap", o.softcap))
    for name, x in factors:
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float, torch.SymFloat, torch.SymInt))):
            kinds = "a number, a tensor of shape () or None" if name == "scale" else "a number or None"
            raise ValueError(f"{name} must be {kinds}; got {describe(x)}")
    at = o.q_offset
    if at is not None and (isinstance(at, bool) or not isinstance(at, (int, Tensor, torch.SymInt))):
        raise ValueError(
            f"q_offset must be an int, a 0-d integer tensor or None, or an integer tensor (B,); got {describe(at)}"
        )
    for name, x in {"q_offset": at, **tensors}.items():
        if isinstance(x, Tensor) and x.is_nested:
            raise ValueError(f"{name} must be a tensor of one shape; got {describe(x)}")
    if isinstance(at, int) and not -(2**31) < at < 2**31:
        raise ValueError(f"q_offset must be an integer over -2**31 and under 2**31; got {describe(at)}")
    for name, x in factors:
        if isinstance(x, int) and abs(x) > 2**53:
            raise ValueError(f"{name} must be a number of at most 2**53; got {describe(x)}")


def four_dimensional(q: Tensor, k: Tensor, v: Tensor, bshd: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (B, heads, positions, features), from two, three or four dimensions."""
    if not (q.ndim == k.ndim == v.ndim and 2 <= q.ndim <= 4):
        forms = "(N, D), (N, H, D) or (B, N, H, D)" if bshd else "(N, D), (H, N, D) or (B, H, N, D)"
        raise ValueError(
            f"q, k and v must all have 2, 3 or 4 dimensions: {forms}; "
            f"got shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if bshd and q.ndim > 2:
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    if q.ndim == 4:
        return q, k, v
    if q.ndim == 3:
        return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    return q[None, None], k[None, None], v[None, None]


def of_batch(x: Tensor, B: int) -> Tensor:
    """k or v (B or 1, G, K, size) for B batch elements; its gradient is their sum, added in float32 in one order."""
    return x.expand(B, -1, -1, -1) if known(x.shape[0] == 1) and not known(B == 1) else x


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds; in a traced program, whether it surely does, without asking for more."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def may_hold(condition: torch.SymBool) -> bool:
    """Whether a condition on sizes holds, or only the data know: then it is asked again when the call runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def unbatched(out: Tensor, lse: Tensor, dims: int, bshd: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse with as many dimensions as q had, and out in the order of q's."""
    for _ in range(4 - dims):
        out, lse = out.squeeze(0), lse.squeeze(0)
    return out.transpose(-3, -2) if bshd and dims > 2 else out, lse


def is_empty(a: Arguments) -> bool:
    """Whether there is no pair: B, H, Q or K is 0."""
    return 0 in a.q.shape or 0 in a.k.shape


def cast_type(x: Tensor) -> torch.dtype | None:
    """The type to which autocast casts q, k or v in the operator; None where it stays as it is."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() and x.dtype != torch.float64 else None


def validate(a: Arguments) -> None:
    """Raise ValueError for the first argument that is wrong."""
    open_too = ((may_hold(x) if isinstance(x, torch.SymBool) else x, *rest) for x, *rest in _checks(a))
    raise_first(open_too, lambda given: describe(as_given(given, a)) + _other_layout(a))


def _checks(a: Arguments) -> Iterator[Check]:
    q, k, v, at, dtype = a.q, a.k, a.v, a.q_offset_tensor, dtype_of(a.q)
    yield q.ndim == 4, "q", q, "be a tensor of 2, 3 or 4 dimensions: (Q, D), (H, Q, D) or (B, H, Q, D)"
    B, H, Q, D = q.shape
    yield q.layout == torch.strided, "q", q.layout, "be a strided tensor"
    yield dtype in FLOATS, "q", q, f"be a tensor of {ACCEPTED}"
    for name, x in (("k", k), ("v", v)):
        yield x.ndim == 4, name, x, "have as many dimensions as q"
        yield x.layout == torch.strided, name, x.layout, "be a strided tensor"
        yield x.dtype == q.dtype, name, x, f"be a tensor of q's dtype, {dtype}"
        yield x.device == q.device, name, x, f"be a tensor on q's device, {q.device}"
        yield x.shape[0] == B, name, x, f"have B={B} batch elements, as q has, or 1"
    _, G, K, E = v.shape
    yield D > 0, "q", q, "have a head size D of at least 1"
    yield k.shape[3] == D, "k", k, f"have the head size of q, D={D}"
    for of_keys, n in zip(k.shape[1:3], (G, K), strict=True):  # a graph may leave one open
        yield of_keys == n, "v", v, f"have the heads and positions of k, (G, K) = {tuple(k.shape[1:3])}"
    yield E > 0, "v", v, "have a head size E of at least 1"
    if H % (G or H + 1):
        given = f"G={G}, {describe(as_given(k, a))}"
        yield False, "k", Wording(given), f"have a number of heads G that divides q's H={H}"
    yield max(D, E) <= MAX_HEAD, "q and v", (D, E), HEAD_SIZES
    for n in (Q, K):
        yield n < MOST, "q and k", (Q, K), POSITIONS
    if not a.scale is a.softcap is None:
        yield from factor_checks(a.scale, a.softcap, D, dtype)
    if a.q_offset is not None:
        longest = torch.sym_max(Q, K)
        yield offset_check(a.q_offset, longest, longest)
    yield at is None or (at.ndim == 0 and at.dtype in INTEGERS), "q_offset", at, "be an int or a 0-d integer tensor"
    for name, vector in zip(VECTORS, (a.key_lengths, a.sink_logits, a.alibi_slopes), strict=True):
        if vector is None:
            continue
        yield shape_check(name, vector, B, H)
        if name == "key_lengths":
            yield vector.dtype in INTEGERS, name, vector, "be integers: int8, uint8, int16, int32 or int64"
        else:
            yield dtype_of(vector) in FLOATS, name, vector, f"be {ACCEPTED}"
        yield vector.device == q.device, name, vector, f"be a tensor on q's device, {q.device}"
    yield (
        a.alibi_slopes is None or not a.alibi_slopes.requires_grad,
        "alibi_slopes", Wording("a tensor that requires grad; give alibi_slopes.detach()"),
        "be a constant, for which no gradient is computed",
    )  # fmt: skip
    yield (
        a.implementation is None or a.implementation in NAMES,
        "implementation", a.implementation, f"be None or one of {', '.join(NAMES)}",
    )  # fmt: skip


def as_given(x: Any, a: Arguments) -> Any:
    """One of q, k and v with the dimensions that were given, in their order; anything else as it is."""
    if not any(x is y for y in (a.q, a.k, a.v)) or x.ndim != 4:
        return x
    x = x.transpose(1, 2) if a.bshd else x
    if a.dims == 4:
        return x
    return x.squeeze(0) if a.dims == 3 else x.squeeze(0).squeeze(1 if a.bshd else 0)


def _other_layout(a: Arguments) -> str:
    """For the end of a message: that all would be right in the other layout, where it would."""
    if not a.q.ndim == a.k.ndim == a.v.ndim == 4 or a.q.shape[1] == a.k.shape[1] == 1:
        return ""  # one head is most often none, of (N, D)
    turned = a._replace(q=a.q.transpose(1, 2), k=a.k.transpose(1, 2), v=a.v.transpose(1, 2))
    return OTHER_LAYOUT if all(not isinstance(right, torch.SymBool) and right for right, *_ in _checks(turned)) else ""


def check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless a boolean mask broadcasts to (B, H, Q, K) and lies on q's device."""
    (B, H, Q, _), (_, G, K, _) = q.shape, k.shape
    shape = (B, H, Q, K)
    fits, turned = (
        0 < mask.ndim <= 4
        and all(n in (1, want) for n, want in zip(reversed(mask.shape), reversed(sizes), strict=False))
        for sizes in (shape, (B, Q, H, G))
    )
    of_keys = "; a mask of keys (B, K) is given as mask[:, None, None], and lengths are faster as key_lengths"
    if mask.dtype != torch.bool or mask.device != q.device or not fits:
        raise ValueError(
            f"pattern, a dense mask, must be boolean, on {q.device}, and broadcast to (B, H, Q, K) = {shape}; "
            f"got {describe(mask)}{of_keys if mask.shape == (B, K) else OTHER_LAYOUT if turned and not fits else ''}"
        )


def instead(given: Any) -> str:
    """What to give instead of something that is no pattern, for the end of a message."""
    if isinstance(given, Tensor):
        if given.ndim == 3 and given.layout in (torch.sparse_coo, torch.sparse_csr):
            return "; of a batch give PerBatch([CSR.from_torch(one) for one in tensor])"
        if given.layout == torch.sparse_coo:
            return "; CSR.from_torch(tensor) takes a sparse COO tensor"
        if given.is_floating_point() and given.layout == torch.strided and given.ndim > 1:
            return "; of an additive mask give the pairs that it keeps, mask == 0"
        if given.ndim == 2 and given.shape[0] == 2:
            return "; CSR.from_edge_index(edges, num_nodes) takes the edges of a graph"
        if given.dtype in INTEGERS and given.layout == torch.strided and given.ndim > 1:
            return "; of a mask of integers give mask != 0"
        return ""
    if isinstance(given, np.ndarray):
        return "; a mask is given as a tensor, torch.from_numpy(array)"
    functions = "; Predicate(fn) takes a function fn(i, j), from_flex(mask_mod, Q, K) one of FlexAttention"
    return instead_of(given) or functions * callable(given)
