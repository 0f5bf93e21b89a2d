"""`entmax_attention` and `topk_keys`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from gossamer.checks import boolean
from gossamer.entmax.arguments import NAMES, Names, given
from gossamer.entmax.calls import EntmaxAttention, EntmaxCall, EntmaxOptions, Results, Told, apply_plain, key_of, known
from gossamer.entmax.operators import entmax_forward, rest_of, topk_op
from gossamer.entmax.topk import TopkCall
from gossamer.layouts import BlockLayout
from gossamer.patterns import Pattern
from gossamer.patterns.handles import pattern_of
from gossamer.torch.arguments import describe
from gossamer.torch.key import Key, plain
from gossamer.torch.scale import with_number
from gossamer.torch.structure import Structure

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Save = Literal["lists", "tau"]
Way = Literal["kernels", "torch"]


class EntmaxAux(NamedTuple):
    """Statistics of each row, from `return_aux=True`: of q's shape without D, without a gradient.

    Examples:
        >>> x = torch.tensor([[2.0], [1.0], [0.0]])
        >>> _, aux = gs.entmax_attention(x[:1], x, x, alpha=2, top_k=1, scale=0.25, return_aux=True)
        >>> aux.tau, aux.support, aux.certified  # scores 1, 0.5 and 0: sparsemax over all keys is 0.75, 0.25, 0
        (tensor([0.]), tensor([1], dtype=torch.int32), tensor([False]))
    """

    tau: Tensor  # the threshold; float32, or float64 for float64 inputs
    support: Tensor  # int32: how many keys have a weight over 0
    certified: Tensor  # bool: whether the weights are those of entmax over all keys that the row may see


@overload
def entmax_attention(
    q: Tensor, k: Tensor, v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None, *,
    alpha: float | Tensor = 1.5, top_k: int | None = None, causal: bool = False, q_positions: Tensor | None = None,
    k_positions: Tensor | None = None, scale: float | Tensor | None = None, save: Save = "lists",
    implementation: Way | None = None, return_aux: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def entmax_attention(
    q: Tensor, k: Tensor, v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None, *,
    alpha: float | Tensor = 1.5, top_k: int | None = None, causal: bool = False, q_positions: Tensor | None = None,
    k_positions: Tensor | None = None, scale: float | Tensor | None = None, save: Save = "lists",
    implementation: Way | None = None, return_aux: Literal[True],
) -> tuple[Tensor, EntmaxAux]: ...  # fmt: skip


@overload
def entmax_attention(
    q: Tensor, k: Tensor, v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None, *,
    alpha: float | Tensor = 1.5, top_k: int | None = None, causal: bool = False, q_positions: Tensor | None = None,
    k_positions: Tensor | None = None, scale: float | Tensor | None = None, save: Save = "lists",
    implementation: Way | None = None, return_aux: bool,
) -> Tensor | tuple[Tensor, EntmaxAux]: ...  # fmt: skip


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None,
    *,
    alpha: float | Tensor = 1.5,
    top_k: int | None = None,
    causal: bool = False,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | Tensor | None = None,
    save: Save = "lists",
    implementation: Way | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, EntmaxAux]:
    """alpha-entmax attention (Peters et al., 2019): exact and differentiable; softmax at alpha 1, sparse over it.

    The weights of a row are p_j = [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)) with s = scale * q k^T and the tau of
    which they sum to 1, over the keys that the row may see: those of `pattern`, `causal` and the positions, all at
    once. A row that may see nothing gives 0 and zero gradients. One with a score of NaN or inf gives NaN; a key of
    score -inf is as one that is not seen.

    It is computed by operations of torch on any device, in chunks of rows, or by kernels; nothing N x N is held.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D); float16, bfloat16, float32 or float64. 16 bits are computed in float32.
        k: (B, G, K, D) and so on, H a multiple of G: query head h uses key head h // (H // G).
        v: (B, G, K, E) and so on.
        pattern: which keys a row may see, in every form that `attention` accepts; None is every key.
        alpha: a number in [1, 2], or a tensor of such numbers, one for each head (H,) or one of shape (); with its
            gradient, also at 1. 1 is softmax, 1.5 entmax-1.5, 2 sparsemax. The values of a tensor are checked, which
            waits for a GPU.
        top_k: the k largest scores of a row, ties to the lowest key, and the entmax over these alone. None is all.
        causal: key j is seen by query row r where j <= r + K - Q; where positions are given, these say it.
        q_positions: integers (int8, uint8, int16, int32 or int64) that broadcast to (B, H, Q): a key is seen where its
            position is at most the query's. K - Q + r for row r by default, where `k_positions` is given.
        k_positions: such integers that broadcast to (B, H, K) or (B, G, K); j for key j by default, where `q_positions`
            is given.
        scale: D ** -0.5 by default; a number, or a tensor of shape () with its gradient, as in `attention`.
        save: what a call with gradients keeps for its backward. "lists" is the key and the weight of each pair of the
            supports, 8 bytes (12 in float64), of which the backward computes no score; supports of over 256 keys a row
            in the mean are kept as "tau". "tau" is 4 bytes a row (8), and the backward computes the scores again. A
            compiled function always keeps tau. Lists of kernels have 96 places a row, or `top_k`.
        implementation: "torch"; "kernels", which read nothing back, and of an alpha outside [1, 2] make NaN; None takes
            kernels for what was checked on a GPU: alpha as a number, in 16 bits, on compute capability 9.0.
        return_aux: also return tau, the sizes of the supports, and whether `top_k` left out no key with a weight.

    Returns:
        out (B, H, Q, E) and so on, contiguous, in q's dtype; with `EntmaxAux` if asked for. Its tau is -1 at alpha 1,
        and inf in a row that may see nothing.

    Raises:
        ValueError: an argument is wrong; `Unsupported` for torch.func, forward mode and a second derivative, and where
            kernels that were asked for do not take the call.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 100, 16) for heads in (4, 2, 2))
        >>> out, aux = gs.entmax_attention(q, k, v, gs.SlidingWindow.of_size(64), alpha=1.5, return_aux=True)
        >>> out.shape, bool(aux.support.max() <= 64)
        (torch.Size([1, 4, 100, 16]), True)
        >>> soft = gs.entmax_attention(q, k, v, alpha=1, causal=True)
        >>> torch.allclose(soft, gs.attention(q, k, v, gs.Causal()), atol=1e-6)
        True
        >>> alpha = torch.full((4,), 1.5, requires_grad=True)  # learned for each head
        >>> out, aux = gs.entmax_attention(q, k, v, alpha=alpha, top_k=8, return_aux=True)
        >>> out.sum().backward()
        >>> alpha.grad.shape, int(aux.support.max()) <= 8
        (torch.Size([4]), True)
    """
    if save not in ("lists", "tau"):
        raise ValueError(f'save must be "lists" or "tau"; got {describe(save)}')
    if type(return_aux) is not bool:
        return_aux = boolean("return_aux", return_aux)
    asked = EntmaxOptions(pattern, alpha, top_k, causal, q_positions, k_positions, scale, implementation)
    results, alphas, dims = attended("entmax_attention", NAMES, q, k, v, asked, save, return_aux)
    out = results.out if dims == 4 else unbatched(results.out, dims)
    if not return_aux:
        return out
    assert results.told is not None
    lam, support, certified = results.told
    a: Any = float(alpha) - 1 if alphas is None else (alphas.detach() - 1).to(lam.dtype)[:, None]
    tau = torch.where(lam < torch.inf, a * lam - 1, lam)
    return out, EntmaxAux(*(unbatched(x, dims) for x in (tau, support, certified)))


class Attended(NamedTuple):
    """The results of a call, of four dimensions."""

    results: Results
    alphas: Tensor | None  # (H,); None for a number
    dims: int  # of the q that was given


def attended(
    name: str, names: Names, q: Tensor, k: Tensor, v: Tensor, asked: EntmaxOptions, save: Save, with_aux: bool = False
) -> Attended:
    """The differentiable results of a call; without `with_aux` or gradients kernels make `out` alone.

    Args:
        name: of the function, for messages, and `names` of its positions.
    """
    key: Key | None = None
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if type(asked.pattern) is int or isinstance(asked.scale, Tensor):
            q, asked = eager(q, k, v, asked)
        key = key_of(q, k, v, asked, name, save, with_aux)
        call: EntmaxCall | None = None if key is None else known.get(key)
        if call is not None:
            if not call.as_given:
                q, k, v = call.as_computed(q, k, v)
            alphas = None if call.number is not None else call.alphas(q, asked.alpha)
            mask = (asked.pattern,) if isinstance(asked.pattern, Tensor) else ()
            results = call(apply_plain, q, k, v, alphas, asked.q_positions, asked.k_positions, *mask)
            return Attended(results, alphas, call.dims)
    found = given(name, q, k, v, *asked, names=names)
    x = found.q, found.k, found.v
    if compiling or found.q.is_meta:
        out, *told = entmax_forward(*x, *rest_of(found))
        return Attended(Results(out, Told(*told)), found.alpha, found.dims)
    call = EntmaxCall(found, None if key is None else (q, k, v), save == "lists", with_aux)
    if key is not None:
        known.put(key, call, call.bytes)
    alphas = None if found.number is not None else found.alpha
    return Attended(call(EntmaxAttention.apply, *x, alphas, *found.options.tensors), alphas, found.dims)


def eager(q: Any, k: Any, v: Any, asked: EntmaxOptions) -> tuple[Any, EntmaxOptions]:
    """q and the arguments of a call as its key has them: a pattern in place of its handle, a number as the scale."""
    if type(asked.pattern) is int:
        asked = asked._replace(pattern=pattern_of(asked.pattern))
    if isinstance(asked.scale, Tensor) and plain(q, k, v, asked.scale):
        q, scale = with_number(q, asked.scale)
        asked = asked._replace(scale=scale)
    return q, asked


def unbatched(x: Tensor, dims: int) -> Tensor:
    """x with as many leading dimensions as a q of `dims` dimensions has."""
    for _ in range(4 - dims):
        x = x.squeeze(0)
    return x


def topk_keys(
    q: Tensor,
    k: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | BlockMask | Tensor | None = None,
    *,
    k_keep: int,
    causal: bool = False,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    scale: float | Tensor | None = None,
    implementation: Way | None = None,
) -> Tensor:
    """The keys of the largest scores scale * q k^T of each row, exactly, ties to the lowest key; without a gradient.

    These are the keys that `entmax_attention` keeps with `top_k=k_keep`.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D), as in `entmax_attention`.
        k: (B, G, K, D) and so on.
        pattern: which keys a row may see, as in `entmax_attention`, and so are `causal` and the positions.
        k_keep: how many keys.
        causal: key j is seen by query row r where j <= r + K - Q.
        q_positions: integers that broadcast to (B, H, Q), of the types of `entmax_attention`.
        k_positions: such integers that broadcast to (B, H, K) or (B, G, K).
        scale: D ** -0.5 by default, as in `attention`; its sign and rounding matter.
        implementation: "torch", which None takes; "kernels" as in `entmax_attention`.

    Returns:
        (B, H, Q, k_keep) and so on, int32: the keys of each row ascending, then -1 where it sees fewer;
        keys of the score -inf are not among them, and a score of NaN counts as the largest.

    Raises:
        ValueError: an argument is wrong.

    Examples:
        >>> q, k = torch.tensor([[1.0], [-1.0]]), torch.tensor([[3.0], [1.0], [2.0]])
        >>> gs.topk_keys(q, k, k_keep=2)
        tensor([[0, 2],
                [1, 2]], dtype=torch.int32)
        >>> gs.topk_keys(q, k, gs.SlidingWindow(0), k_keep=2)
        tensor([[ 1, -1],
                [ 2, -1]], dtype=torch.int32)
    """
    asked = EntmaxOptions(pattern, 1.0, k_keep, causal, q_positions, k_positions, scale, implementation)
    key: Key | None = None
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if type(asked.pattern) is int or isinstance(asked.scale, Tensor):
            q, asked = eager(q, k, k, asked)
        key = key_of(q, k, k, asked, "topk_keys")
        call: TopkCall | None = None if key is None else known.get(key)
        if call is not None:
            if not call.as_given:
                q, k, _ = call.as_computed(q, k, k)
            keys = call(q, k, q_positions, k_positions, *((pattern,) if isinstance(pattern, Tensor) else ()))
            return keys if call.dims == 4 else unbatched(keys, call.dims)
    found = given("topk_keys", q, k, k, *asked, "k_keep")
    if compiling or found.q.is_meta:
        _, *rest = rest_of(found)
        return unbatched(topk_op(found.q, found.k, *rest), found.dims)
    call = TopkCall(found, None if key is None else (q, k, k))
    if key is not None:
        known.put(key, call, call.bytes)
    return unbatched(call(found.q, found.k, *found.options.tensors), found.dims)
