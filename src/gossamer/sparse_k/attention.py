"""`sparsek_attention`: the keys that SparseK keeps, and a window, under one softmax."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from gossamer.checks import boolean, integer
from gossamer.sparse_k.autograd import sparse_k_forward
from gossamer.sparse_k.calls import Call, key_of, known, type_of_scores
from gossamer.sparse_k.launch.problem import Gate, Options
from gossamer.sparse_k.selection import OPERATORS, Keep, Selection
from gossamer.torch.arguments import (
    Arguments,
    AttentionOptions,
    cast_type,
    check_types,
    describe,
    four_dimensional,
    unbatched,
    validate,
)
from gossamer.torch.key import plain
from gossamer.torch.scale import with_number
from gossamer.torch.transforms import refuse_transforms


@overload
def sparsek_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, k_keep: int, window: int = 0, keep: Keep = "topk",
    gate: Gate | None = "v", causal: bool = True, scale: float | Tensor | None = None, straight_through: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def sparsek_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, k_keep: int, window: int = 0, keep: Keep = "topk",
    gate: Gate | None = "v", causal: bool = True, scale: float | Tensor | None = None, straight_through: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def sparsek_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    *,
    k_keep: int,
    window: int = 0,
    keep: Keep = "topk",
    gate: Gate | None = "v",
    causal: bool = True,
    scale: float | Tensor | None = None,
    straight_through: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """SparseK attention: each query sees a window, and the keys that a score of their own keeps until its step.

    Query i attends the keys i - window, ..., i, ungated, and of the keys before these those that SparseK keeps at step
    i, under one softmax. The gate of a kept key is m = clip(u_j - tau_i, 0, 1), with the threshold tau_i of
    `sparsek_causal(u, k_keep)`. A key that has left never returns, also among equal scores: `last_topk`.

    Args:
        q: (B, H, N, D), (H, N, D) or (N, D); float16, bfloat16, float32 or float64.
        k: (B, G, N, D) and so on, H a multiple of G.
        v: (B, G, N, E) and so on.
        u: scores of keys, float32 or float64, whatever q is; (B, G, N), shared by the heads of a group, or (B, H, N);
            without the dimensions that q lacks. A key of -inf is never kept past its window.
        k_keep: how much is kept at each step: of the keys up to the query, those in its window among them.
        window: how many keys before the query, which it sees in any case. Without `causal` as many behind it.
        keep: "topk" attends the k_keep keys of the largest scores, "support" all of m > 0, which are more.
        gate: what m multiplies: "v" the values, "kv" the keys and the values, "logit" the weight before softmax (log m
            is added to the score). None attends the kept keys as they are, and u has no gradient unless
            `straight_through`.
        causal: without it one selection of all keys is seen by every query.
        scale: D ** -0.5 by default; a number, or a tensor of shape () with its gradient, as in `attention`.
        straight_through: u has the gradient of gates of values, with gate None as if m had been 1, and over all keys of
            m > 0: also over those that "topk" left out, as if they were added to a row with weight exp(s - lse). Of
            gate None and "v".
        return_lse: also return the logarithm of the softmax's denominator, differentiable.

    Returns:
        out (B, H, N, E) and so on, in q's dtype; with lse (B, H, N), float32 (float64 for float64), if asked for.
        Gradients go to q, k, v and u: through the gate, and through tau as `sparsek_causal` has it. With "topk" keys
        that are not attended have no gradient through their own gate.

    Raises:
        ValueError: an argument is none of these; `Unsupported` for torch.func, forward mode and a second derivative.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 300, 16) for heads in (4, 2, 2))
        >>> u = torch.randn(1, 2, 300, requires_grad=True)
        >>> out = gs.sparsek_attention(q, k, v, u, k_keep=32, window=16)
        >>> out.sum().backward()
        >>> out.shape, u.grad.shape
        (torch.Size([1, 4, 300, 16]), torch.Size([1, 2, 300]))
        >>> everything = gs.sparsek_attention(q, k, v, u, k_keep=300)
        >>> torch.allclose(everything, gs.attention(q, k, v, gs.Causal()), atol=1e-5)
        True
    """
    key = None
    if not torch.compiler.is_compiling() and plain(q, k, v, u):
        if isinstance(scale, Tensor) and plain(scale):
            q, scale = with_number(q, scale)
        key = key_of((q, k, v, u), (k_keep, window, keep, gate, causal, scale, straight_through, return_lse))
    call = None if key is None else known.get(key)
    if call is None:
        c = check_call(q, k, v, u, k_keep, window, keep, gate, causal, scale, straight_through, return_lse)
        how = Selection(c.k_keep, keep, causal, straight_through, c.u.shape[2])
        options = Options(c.window, gate, causal, c.scale, straight_through, how.room, how.certain)
        if key is None:
            out, lse = _by_operators(c, how, options)
        else:
            call = known.put(key, Call(how, options, c.q, c.k, c.v, c.u, q.ndim))
    if call is not None:
        out, lse = call(q, k, v, u)
    return (out, lse) if return_lse else out


def _by_operators(c: CheckedCall, how: Selection, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), with as many dimensions as q has."""
    kept, wide = how.of(c.u, OPERATORS), type_of_scores(c.q, c.u)
    out, lse = sparse_k_forward(
        c.q, c.k, c.v, c.u.to(wide), kept.tau.to(wide), kept.last, kept.last_gated, *options, None
    )
    return unbatched(out, lse, c.dims)


class CheckedCall(NamedTuple):
    """The arguments of a call in one form."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, G, N, D)
    v: Tensor  # (B, G, N, E)
    u: Tensor  # (B, U, N)
    k_keep: int
    window: int
    scale: float
    dims: int  # of the q that was given


def check_call(
    q: Any, k: Any, v: Any, u: Any, k_keep: Any, window: Any, keep: Any, gate: Any, causal: Any, scale: Any,
    straight_through: Any, return_lse: Any,
) -> CheckedCall:  # fmt: skip
    """The arguments of `sparsek_attention` in one form.

    Raises:
        ValueError: one of them is wrong.
        Unsupported: a transform of torch.func, or forward mode, looks at the call.
    """
    number = None if isinstance(scale, Tensor) else scale
    check_types(q, k, v, AttentionOptions(number))
    refuse_transforms("sparsek_attention", q, k, v, u, scale)
    dims = q.ndim
    q, k, v = (x.to(cast_type(x) or x.dtype) for x in four_dimensional(q, k, v))
    if isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    validate(Arguments(q, k, v, None, None, None, None, None, scale, None, None, deterministic=False, backward=False))
    (B, H, N, D), G = q.shape, k.shape[1]
    if k.shape[2] != N:
        raise ValueError(f"k must have as many positions as q, N={N}; got {describe(k)}")
    right = isinstance(u, Tensor) and not u.is_nested and u.layout == torch.strided and u.device == q.device
    if right and u.ndim == dims - 1:
        u = u.reshape((1,) * (3 - u.ndim) + u.shape)
    if not right or u.dtype not in (torch.float32, torch.float64) or u.shape not in ((B, G, N), (B, H, N)):
        raise ValueError(
            f"u must be scores of keys, float32 or float64 on {q.device}, for each key head, (B, G, N) = {(B, G, N)}, "
            f"or query head, (B, H, N) = {(B, H, N)}; got {describe(u)}"
        )
    k_keep = integer("k_keep", k_keep, minimum=1)
    window = integer("window", window, minimum=0)
    boolean("causal", causal)
    boolean("return_lse", return_lse)
    _check_choice("keep", keep, ("topk", "support"))
    _check_choice("gate", gate, ("v", "kv", "logit", None))
    if boolean("straight_through", straight_through) and gate not in ("v", None):
        raise ValueError(f'straight_through must be False with gate {describe(gate)}; it is of gate "v" and None')
    return CheckedCall(q, k, v, u, k_keep, min(window, N), D**-0.5 if scale is None else float(scale), dims)


def _check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if (value is not None and not isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}")
