"""Every check of the arguments of `attention`, in one table: (is it right, what the message says)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from gossamer import numbers
from gossamer.kernels.launch import dtype_of
from gossamer.kernels.row_formulas import compute_dtype
from gossamer.patterns import Pattern
from gossamer.patterns.validate import show
from gossamer.plan.problem import DISTANCES, MAX_HEAD, most_offset, within_positions
from gossamer.plan.table import NAMES

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
    dims: int = 4  # of the q, k and v that were given, for messages


def options_of(a: Arguments) -> tuple[Any, ...]:
    """All but q, k and v, in the order of the operators."""
    return (
        a.q_offset, a.q_offset_tensor, a.key_lengths, a.sink_logits, a.alibi_slopes, a.scale, a.softcap,
        a.implementation, a.deterministic, a.backward, a.bshd, a.counted, a.made, a.alibi_distance,
    )  # fmt: skip


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


class Wording(NamedTuple):
    """What was given, explained in words."""

    text: str


def describe(value: Any) -> str:
    """What was given, for a message: the shape and dtype of a tensor, the repr of anything else."""
    if isinstance(value, Wording):
        return value.text
    if isinstance(value, Tensor) and value.is_nested:
        return f"a nested tensor, {dtype_of(value)}, {value.device}"
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {dtype_of(value)}, {value.device}"
    return f"{show(value)} ({type(value).__name__})"


def is_handle(x: Any) -> TypeGuard[int]:
    """Whether a `pattern` is the number that stands for one, of Python or numpy."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.timedelta64))


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
    return x if isinstance(x, torch.SymInt) else numbers.whole(x)


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
    elif isinstance(given, np.ndarray):
        return "; a mask is given as a tensor, torch.from_numpy(array)"
    elif hasattr(given, "tocoo"):
        return "; CSR.from_scipy(matrix) takes a scipy sparse matrix"
    elif isinstance(given, type) and issubclass(given, Pattern):
        return f"; this is a class, {given.__name__}(...) is a pattern"
    elif isinstance(given, (list, tuple)) and given and all(isinstance(p, Pattern) for p in given):
        return "; PerHead(patterns) gives each query head its own, PerBatch(patterns) each batch element"
    elif isinstance(given, (bool, str)):
        return "; causal attention is Causal(), a window SlidingWindow.of_size(W)"
    elif callable(given):
        return "; Predicate(fn) takes a function fn(i, j), from_flex(mask_mod, Q, K) one of FlexAttention"
    return ""


def check_types(
    q: Any, k: Any, v: Any, scale: Any, q_offset: Any, key_lengths: Any, softcap: Any, sink_logits: Any,
    alibi_slopes: Any, implementation: Any, key_starts: Any = None,
) -> None:  # fmt: skip
    """What the operator's schema would refuse with a less helpful error; values and shapes are checked inside it."""
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
    if implementation is not None and not isinstance(implementation, str):
        raise ValueError(f"implementation must be a name or None; got {describe(implementation)}")
    if scale is q_offset is key_lengths is softcap is sink_logits is alibi_slopes is key_starts is None:
        return
    for name, x in (("key_lengths", key_lengths), ("key_starts", key_starts), ("sink_logits", sink_logits),
                    ("alibi_slopes", alibi_slopes)):  # fmt: skip
        if x is not None and not isinstance(x, Tensor):
            kinds = "a torch tensor, a list of integers or None" if "key" in name else "a torch tensor or None"
            raise ValueError(f"{name} must be {kinds}; got {describe(x)}")
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} must be a tensor on q's device, {q.device}; got {describe(x)}")
    for name, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float, torch.SymFloat, torch.SymInt))):
            kinds = "a number, a tensor of shape () or None" if name == "scale" else "a number or None"
            raise ValueError(f"{name} must be {kinds}; got {describe(x)}")
    if q_offset is not None and (isinstance(q_offset, bool) or not isinstance(q_offset, (int, Tensor, torch.SymInt))):
        raise ValueError(
            f"q_offset must be an int, a 0-d integer tensor or None, or an integer tensor (B,); "
            f"got {describe(q_offset)}"
        )
    for name, x in (("q_offset", q_offset), ("key_lengths", key_lengths), ("key_starts", key_starts),
                    ("sink_logits", sink_logits), ("alibi_slopes", alibi_slopes)):  # fmt: skip
        if isinstance(x, Tensor) and x.is_nested:
            raise ValueError(f"{name} must be a tensor of one shape; got {describe(x)}")
    if isinstance(q_offset, int) and not -(2**31) < q_offset < 2**31:
        raise ValueError(f"q_offset must be an integer over -2**31 and under 2**31; got {describe(q_offset)}")
    for name, x in (("scale", scale), ("softcap", softcap)):
        if isinstance(x, int) and abs(x) > 2**53:
            raise ValueError(f"{name} must be a number of at most 2**53; got {describe(x)}")


def check_distance(alibi_distance: Any, alibi_slopes: Any) -> None:
    """Raise ValueError unless it says how slopes count, or nothing.

    Args:
        alibi_slopes: of the call.
    """
    if alibi_distance is None:
        return
    if not isinstance(alibi_distance, str) or alibi_distance not in DISTANCES:
        raise ValueError(
            'alibi_distance must be "signed", slope * (j - i), "absolute", -slope * |i - j|, or None; '
            f"got {describe(alibi_distance)}"
        )
    if alibi_slopes is None:
        raise ValueError(f"alibi_distance must be None without alibi_slopes; got {describe(alibi_distance)}")


def _checks(a: Arguments) -> Iterator[tuple[bool, str, Any, str]]:
    """(right, argument, value given, what it must do); each may rely on the ones before it."""
    q, k, v = a.q, a.k, a.v
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    accepted = "float16, bfloat16, float32 or float64"
    yield q.ndim == 4, "q", q, "be a tensor of 2, 3 or 4 dimensions: (Q, D), (H, Q, D) or (B, H, Q, D)"
    yield q.layout == torch.strided, "q", q.layout, "be a strided tensor"
    yield q.dtype in floats, "q", q, f"be a tensor of {accepted}"
    for name, x in (("k", k), ("v", v)):
        yield x.ndim == 4, name, x, "have as many dimensions as q"
        yield x.layout == torch.strided, name, x.layout, "be a strided tensor"
        yield x.dtype == q.dtype, name, x, f"be a tensor of q's dtype, {dtype_of(q)}"
        yield x.device == q.device, name, x, f"be a tensor on q's device, {q.device}"
        yield x.shape[0] == q.shape[0], name, x, f"have B={q.shape[0]} batch elements, as q has, or 1"
    yield q.shape[3] > 0, "q", q, "have a head size D of at least 1"
    yield k.shape[3] == q.shape[3], "k", k, f"have the head size of q, D={q.shape[3]}"
    yield v.shape[1:3] == k.shape[1:3], "v", v, f"have the heads and positions of k, (G, K) = {tuple(k.shape[1:3])}"
    yield v.shape[3] > 0, "v", v, "have a head size E of at least 1"
    heads = Wording(f"G={k.shape[1]}, {describe(as_given(k, a))}")
    yield (
        q.shape[1] % (k.shape[1] or q.shape[1] + 1) == 0,
        "k",
        heads,
        f"have a number of heads G that divides q's H={q.shape[1]}",
    )
    sizes = q.shape[3], v.shape[3]
    yield max(sizes) <= MAX_HEAD, "q and v", sizes, f"have head sizes D, E up to {MAX_HEAD}"
    most, longest = 2**31 - 2**16, (q.shape[2], k.shape[2])
    yield max(longest) < most, "q and k", longest, f"have fewer than 2**31 - 2**16 = {most} positions Q, K"
    B, H = q.shape[:2]
    if a.scale is not None or a.softcap is not None:
        yield from _factor_checks(a)
    if a.q_offset is not None:
        Q, K = q.shape[2], k.shape[2]
        yield abs(a.q_offset) <= most_offset(Q, K), "q_offset", a.q_offset, within_positions(Q, K)
    t = a.q_offset_tensor
    yield t is None or (t.ndim == 0 and t.dtype in INTEGERS), "q_offset", t, "be an int or a 0-d integer tensor"
    of_lengths = "integers: int8, uint8, int16, int32 or int64"
    for name, vector, size, letter in (
        ("key_lengths", a.key_lengths, B, "B"),
        ("sink_logits", a.sink_logits, H, "H"),
        ("alibi_slopes", a.alibi_slopes, H, "H"),
    ):
        if vector is None:
            continue
        dtypes = INTEGERS if name == "key_lengths" else floats
        shapes: list[tuple[int, ...]] = [(size,)]
        wanted = f"have shape ({letter},) = ({size},)"
        if name == "alibi_slopes":
            shapes, wanted = [(H,), (B, H)], f"{wanted}, or (B, H) = {(B, H)}"
        yield vector.shape in shapes, name, vector, wanted
        yield vector.dtype in dtypes, name, vector, f"be {of_lengths if name == 'key_lengths' else accepted}"
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


def _factor_checks(a: Arguments) -> Iterator[tuple[bool, str, Any, str]]:
    limits = torch.finfo(compute_dtype(a.q.dtype))
    most, capped = limits.max / 4, limits.max**0.5  # kernels multiply by up to 2 log2(e); s / softcap keeps its digits
    scale = a.q.shape[3] ** -0.5 if a.scale is None else a.scale
    of_scale = f"be a finite number up to {most:.1e} in magnitude, as {limits.dtype} holds, or None for D ** -0.5"
    yield abs(scale) <= most, "scale", scale, of_scale
    of_cap = f"be a finite number over 0, from {1 / capped:.1e} to {capped:.1e} in {limits.dtype}, or None"
    of_none = "be a finite number over 0, or None for no cap"
    yield a.softcap != 0, "softcap", a.softcap, of_none
    yield a.softcap is None or 1 / capped <= a.softcap <= capped, "softcap", a.softcap, of_cap
    if a.softcap is not None:
        yield abs(scale) / a.softcap <= most, "scale / softcap", scale / a.softcap, f"be up to {most:.1e}"


def cast_type(x: Tensor) -> torch.dtype | None:
    """The type to which autocast casts q, k or v in the operator; None where it stays as it is."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() and x.dtype != torch.float64 else None


def validate(a: Arguments) -> None:
    """Raise ValueError for the first argument that is wrong."""
    for right, name, given, accepted in _checks(a):
        if not right:
            raise ValueError(f"{name} must {accepted}; got {describe(as_given(given, a))}{_other_layout(a)}")


def as_given(x: Any, a: Arguments) -> Any:
    """One of q, k and v with the dimensions that were given, in their order; anything else as it is."""
    if not any(x is y for y in (a.q, a.k, a.v)) or x.ndim != 4:
        return x
    x = x.transpose(1, 2) if a.bshd else x
    if a.dims == 4:
        return x
    return x.squeeze(0) if a.dims == 3 else x.squeeze(0).squeeze(1 if a.bshd else 0)


def is_empty(a: Arguments) -> bool:
    """Whether there is no pair: B, H, Q or K is 0."""
    return 0 in a.q.shape or 0 in a.k.shape


def _other_layout(a: Arguments) -> str:
    """For the end of a message: that all would be right in the other layout, where it would."""
    if not a.q.ndim == a.k.ndim == a.v.ndim == 4 or a.q.shape[1] == a.k.shape[1] == 1:
        return ""  # one head is most often none, of (N, D)
    turned = a._replace(q=a.q.transpose(1, 2), k=a.k.transpose(1, 2), v=a.v.transpose(1, 2))
    return OTHER_LAYOUT if all(right for right, *_ in _checks(turned)) else ""


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


def unbatched(out: Tensor, lse: Tensor, dims: int, bshd: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse with as many dimensions as q had, and out in the order of q's."""
    for _ in range(4 - dims):
        out, lse = out.squeeze(0), lse.squeeze(0)
    return out.transpose(-3, -2) if bshd and dims > 2 else out, lse


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
