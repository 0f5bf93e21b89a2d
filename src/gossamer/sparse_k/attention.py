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
    Lengths,
    cast_type,
    check_types,
    describe,
    four_dimensional,
    lengths,
    unbatched,
    validate,
    whole,
)
from gossamer.torch.key import plain
from gossamer.torch.scale import with_number
from gossamer.torch.transforms import refuse_transforms


@overload
def sparsek_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, k_keep: int, window: int = 0, keep: Keep = "topk",
    gate: Gate | None = "v", causal: bool = True, scale: float | Tensor | None = None, q_offset: int | None = None,
    key_lengths: Lengths | None = None, straight_through: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def sparsek_attention(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, *, k_keep: int, window: int = 0, keep: Keep = "topk",
    gate: Gate | None = "v", causal: bool = True, scale: float | Tensor | None = None, q_offset: int | None = None,
    key_lengths: Lengths | None = None, straight_through: bool = False, return_lse: Literal[True],
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
    q_offset: int | None = None,
    key_lengths: Lengths | None = None,
    straight_through: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """SparseK attention: each query sees a window, and the keys that a score of their own keeps until its step.

    Query i attends the keys i - window, ..., i, ungated, and of the keys before these those that SparseK keeps at step
    i, under one softmax. The gate of a kept key is m = clip(u_j - tau_i, 0, 1), with the threshold tau_i of
    `sparsek_causal(u, k_keep)`. A key that has left never returns, also among equal scores: `last_topk`.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D); float16, bfloat16, float32 or float64.
        k: (B, G, K, D) and so on, H a multiple of G and K at least Q.
        v: (B, G, K, E) and so on.
        u: scores of keys, float32 or float64, whatever q is; (B, G, K), shared by the heads of a group, or (B, H, K);
            without the dimensions that q lacks. A key of -inf is never kept past its window.
        k_keep: how much is kept at each step: of the keys up to the query, those in its window among them.
        window: how many keys before the query, which it sees in any case. Without `causal` as many behind it.
        keep: "topk" attends the k_keep keys of the largest scores, "support" all of m > 0, which are more.
        gate: what m multiplies: "v" the values, "kv" the keys and the values, "logit" the weight before softmax (log m
            is added to the score). None attends the kept keys as they are, and u has no gradient unless
            `straight_through`.
        causal: without it one selection of all keys is seen by every query.
        scale: D ** -0.5 by default; a number, or a tensor of shape () with its gradient, as in `attention`.
        q_offset: position of query row 0, K - Q by default: the keys before it are a prefix. The step of row r is
            r + q_offset, one of the K; what a row gives does not depend on which other rows there are.
        key_lengths: (B,) integers, a tensor or a list: of batch element b the keys from key_lengths[b] on are not
            there, whatever their k, v and u hold. Positions do not follow them. A query that attends no key then has
            out 0 and lse -inf.
        straight_through: u has the gradient of gates of values, with gate None as if m had been 1, and over all keys of
            m > 0: also over those that "topk" left out, as if they were added to a row with weight exp(s - lse). Of
            gate None and "v".
        return_lse: also return the logarithm of the softmax's denominator, differentiable.

    Returns:
        out (B, H, Q, E) and so on, in q's dtype; with lse (B, H, Q), float32 (float64 for float64), if asked for.
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
        >>> last = gs.sparsek_attention(q[:, :, -10:], k, v, u, k_keep=32, window=16)  # behind a prefix of 290 keys
        >>> torch.allclose(last, out[:, :, -10:], atol=1e-5)
        True
    """
    key = None
    if key_lengths is None and not torch.compiler.is_compiling() and plain(q, k, v, u):
        if isinstance(scale, Tensor) and plain(scale):
            q, scale = with_number(q, scale)
        key = key_of((q, k, v, u), (k_keep, window, keep, gate, causal, scale, q_offset, straight_through, return_lse))
    call = None if key is None else known.get(key)
    if call is None:
        c = check_call(
            q, k, v, u, k_keep, window, keep, gate, causal, scale, q_offset, key_lengths, straight_through, return_lse
        )
        how = Selection(c.k_keep, keep, causal, straight_through, c.u.shape[2])
        options = Options(c.window, gate, causal, c.scale, straight_through, how.room, how.certain, c.q_offset)
        if key is None:
            out, lse = _by_operators(c, how, options)
        else:
            call = known.put(key, Call(how, options, c.q, c.k, c.v, c.u, q.ndim))
    if call is not None:
        out, lse = call(q, k, v, u)
    return (out, lse) if return_lse else out


def _by_operators(c: CheckedCall, how: Selection, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), with as many dimensions as q has."""
    k, v, u, hidden = c.k, c.v, c.u, None
    if c.key_lengths is not None:
        past = torch.arange(u.shape[2], device=u.device) >= c.key_lengths[:, None, None]
        k, v = (x.masked_fill(past[..., None], 0) for x in (k, v))
        u, hidden = u.masked_fill(past, -torch.inf), past.expand(u.shape)
    kept, wide = how.of(u, OPERATORS), type_of_scores(c.q, u)
    out, lse = sparse_k_forward(
        c.q, k, v, u.to(wide), kept.tau.to(wide), kept.last, kept.last_gated, hidden, *options, None
    )
    return unbatched(out, lse, c.dims)


class CheckedCall(NamedTuple):
    """The arguments of a call in one form."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, G, K, D)
    v: Tensor  # (B, G, K, E)
    u: Tensor  # (B, U, K)
    k_keep: int
    window: int
    scale: float
    q_offset: int
    key_lengths: Tensor | None  # (B,)
    dims: int  # of the q that was given


def check_call(
    q: Any, k: Any, v: Any, u: Any, k_keep: Any, window: Any, keep: Any, gate: Any, causal: Any, scale: Any,
    q_offset: Any, key_lengths: Any, straight_through: Any, return_lse: Any,
) -> CheckedCall:  # fmt: skip
    """The arguments of `sparsek_attention` in one form.

    Raises:
        ValueError: one of them is wrong.
        Unsupported: a transform of torch.func, or forward mode, looks at the call.
    """
    number = None if isinstance(scale, Tensor) else scale
    key_lengths = lengths(key_lengths, q)
    check_types(q, k, v, AttentionOptions(number, key_lengths=key_lengths))
    refuse_transforms("sparsek_attention", q, k, v, u, scale, key_lengths)
    dims = q.ndim
    q, k, v = (x.to(cast_type(x) or x.dtype) for x in four_dimensional(q, k, v))
    if isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    validate(
        Arguments(q, k, v, None, None, key_lengths, None, None, scale, None, None, deterministic=False, backward=False)
    )
    (B, H, Q, D), (G, K) = q.shape, k.shape[1:3]
    if K < Q:
        raise ValueError(f"k must have at least as many positions as q, Q={Q}; got {describe(k)}")
    offset = K - Q if q_offset is None else whole(q_offset)
    if offset is None or not 0 <= offset <= K - Q:
        raise ValueError(
            f"q_offset must be an integer in [0, K - Q] = [0, {K - Q}], so that every query has a key of its own, or "
            f"None (K - Q); got {describe(q_offset)}"
        )
    right = isinstance(u, Tensor) and not u.is_nested and u.layout == torch.strided and u.device == q.device
    if right and u.ndim == dims - 1:
        u = u.reshape((1,) * (3 - u.ndim) + u.shape)
    if not right or u.dtype not in (torch.float32, torch.float64) or u.shape not in ((B, G, K), (B, H, K)):
        raise ValueError(
            f"u must be scores of keys, float32 or float64 on {q.device}, for each key head, (B, G, K) = {(B, G, K)}, "
            f"or query head, (B, H, K) = {(B, H, K)}; got {describe(u)}"
        )
    k_keep = integer("k_keep", k_keep, minimum=1)
    window = integer("window", window, minimum=0)
    boolean("causal", causal)
    boolean("return_lse", return_lse)
    _check_choice("keep", keep, ("topk", "support"))
    _check_choice("gate", gate, ("v", "kv", "logit", None))
    if boolean("straight_through", straight_through) and gate not in ("v", None):
        raise ValueError(f'straight_through must be False with gate {describe(gate)}; it is of gate "v" and None')
    factor = D**-0.5 if scale is None else float(scale)
    return CheckedCall(q, k, v, u, k_keep, min(window, K), factor, offset, key_lengths, dims)


def _check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if (value is not None and not isinstance(value, str)) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {describe(value)}")
