"""`attention`: one look-up and one run; where nothing is found, what computes the call is made first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from gossamer.kernels.launch import Vectors
from gossamer.layouts import BlockLayout
from gossamer.patterns import Pattern
from gossamer.patterns.handles import pattern_of, token_of
from gossamer.patterns.reordered import ReorderedCSR
from gossamer.torch.arguments import (
    BHND,
    AttentionOptions,
    Distance,
    Layout,
    Lengths,
    describe,
    is_bshd,
    is_handle,
    options_of,
    unbatched,
    vectors_of,
)
from gossamer.torch.calls import call_of, known, read_q_offset
from gossamer.torch.decoding import growing_call, seen_by_one_query
from gossamer.torch.key import Key, key_of, plain
from gossamer.torch.merge import branches_of
from gossamer.torch.merge import merge as merge_results
from gossamer.torch.operators import forward_op
from gossamer.torch.paged import PagedLayout, heads_apart, paged_call
from gossamer.torch.paged_kernel import by_table
from gossamer.torch.reorder import orders, permuted
from gossamer.torch.repeated import by_structure
from gossamer.torch.request import DENSE, Request, request_of, resolve_pattern
from gossamer.torch.scale import with_number
from gossamer.torch.structure import PackedSequences, Structure

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | PagedLayout | BlockMask | Tensor | None = None, *,
    scale: float | Tensor | None = None, q_offset: int | Tensor | None = None, key_starts: Lengths | None = None,
    key_lengths: Lengths | None = None, softcap: float | None = None, sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None, alibi_distance: Distance | None = None,
    return_lse: Literal[False] = False, merge: str | None = None, implementation: str | None = None,
    deterministic: bool | None = None, layout: Layout = BHND,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | PagedLayout | BlockMask | Tensor | None = None, *,
    scale: float | Tensor | None = None, q_offset: int | Tensor | None = None, key_starts: Lengths | None = None,
    key_lengths: Lengths | None = None, softcap: float | None = None, sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None, alibi_distance: Distance | None = None,
    return_lse: Literal[True], merge: str | None = None, implementation: str | None = None,
    deterministic: bool | None = None, layout: Layout = BHND,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Structure | int | BlockLayout | PagedLayout | BlockMask | Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    key_starts: Lengths | None = None,
    key_lengths: Lengths | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_distance: Distance | None = None,
    return_lse: bool = False,
    merge: str | None = None,
    implementation: str | None = None,
    deterministic: bool | None = None,
    layout: Layout = BHND,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the pairs that `pattern` keeps; exact, differentiable, never an N x N array.

    A row that keeps nothing gives 0, an lse of -inf and zero gradients. B, H, Q and K may be 0.

    Args:
        q: (B, H, Q, D), (H, Q, D) or (Q, D); float16, bfloat16, float32 or float64.
        k: (B, G, K, D) and so on, H a multiple of G: query head h uses key head h // (H // G).
        v: (B, G, K, E) and so on.
        pattern: what is attended: a Pattern; its `handle`, an integer (a compiled function that is given one is not
            compiled again for the next; whoever calls it keeps the pattern until the backward); a BlockLayout (its
            tensors are data: they may change from call to call. On a CPU its indices are checked, on a GPU only its
            shapes); a torch BlockMask of flex_attention, read once (`from_flex`); a boolean tensor that broadcasts to
            (B, H, Q, K), True where a pair is kept, read again, as a layout is, when torch counts a write to it (one
            through numpy or `.data` is not seen) and in each call of a compiled function; a torch sparse CSR tensor
            (Q, K), of which the stored entries count; `DocumentIds`, `BlockIndices`, `Indices` or `PackedSequences`,
            whose structure is made on the device in each call (`device_layout` shares it). None is every pair. With
            `PackedSequences` that have `Pages`, and what `device_layout` makes of them, q is (T, H, D) with
            layout="bshd" and k and v are pages, without gradients.
        scale: D ** -0.5 by default. A number of Python or numpy (of Python in a compiled function), as are `softcap`
            and `q_offset`, that float32 (float64 for float64 inputs) holds. Or a tensor of shape () of any float type,
            with its gradient (a learned temperature), which no host waits for and a captured graph reads again: q is
            multiplied by it and rounded to q's type once (2**-9 of bfloat16, 2**-12 of float16; a power of two rounds
            nothing), so that |scale| q D ** 0.5 must be within that type. Outside of compiled functions one on the CPU
            without a gradient is read, as the number that it is.
        q_offset: position of query row 0, K - Q by default. A 0-d tensor is read when the operator runs, which waits
            for a GPU. A tensor (B,) of integers gives each batch element its own; the structure is then made on the
            device and nothing is read: for patterns that go by positions alone (`Dense`, `Causal`, `Local`,
            `SlidingWindow`, `Dilated`, `Strided`, a `Longformer` without global tokens, any `&` and `|` of them).
            Entries past 2**31 - 2**16 - max(Q, K) in magnitude count as that. Refused where rows have no positions:
            with a mask, a block mask or a sparse matrix, and with a layout, which knows the one that it was made with.
            What is written to such a tensor, or to `key_starts` or `key_lengths`, after the call changes neither its
            results nor its gradients.
        key_starts: (B,) integers, or a list of them; keys j < key_starts[b] are not attended (padding on the left), and
            keys stay at their positions j. The structure is made on the device, for the patterns that `q_offset` of
            (B,) is for.
        key_lengths: (B,) integers of any size; keys j >= key_lengths[b] are not attended, and their memory may hold
            anything. Positions do not follow them: with a cache of fixed size, a window needs `q_offset` too. Of a list
            or a tuple of B integers each call makes a tensor on q's device.
        softcap: scores become softcap * tanh(score / softcap).
        sink_logits: (H,), any float type, differentiable; exp(sink) joins the denominator and lse. An empty row's lse
            is the sink.
        alibi_slopes: (H,), or (B, H), any float type, constant; slope * (j - i) is added to the scores.
        alibi_distance: how slopes count keys after the query, j > i, of which two forms are published: "signed" adds
            slope * (j - i), which favours keys further ahead, "absolute" -slope * |i - j|, as flash-attn does. For keys
            up to the query both are the same. It has to be given where the pattern keeps keys after the query, and with
            masks and layouts, which are not looked into, unless no key is after the first query (q_offset >= K - 1).
        return_lse: also return lse (B, H, Q), the natural logarithm of the denominators, differentiable; float32,
            or float64 for float64 inputs.
        merge: None is one softmax over all pairs that `pattern` keeps. "lse" attends to each term of a union `a | b`,
            or each branch of a LongNet, alone, and weighs the results by their denominators: a key counts once for
            each term that keeps it.
        implementation: by name, runs or raises `Unsupported`; None is the first that supports the problem.
        deterministic: the same bits every time; torch.are_deterministic_algorithms_enabled() by default.
        layout: how q, k, v and out lie: "bhnd" is (B, heads, positions, size); "bshd" is (B, positions, heads, size),
            or (positions, heads, size), read in place where an implementation takes strides. Masks and lse are
            (B, H, Q, K) and (B, H, Q) in both. Sizes that fit both cannot be told apart.

    Returns:
        out (B, H, Q, E), or (B, Q, H, E) with layout="bshd", and so on, contiguous, in q's dtype; with lse if asked
        for.

    Raises:
        ValueError: an argument is wrong; `Unsupported` is one.

    Examples:
        >>> q, k, v = (torch.randn(1, heads, 100, 16) for heads in (4, 2, 2))
        >>> out, lse = gs.attention(q, k, v, gs.SlidingWindow.of_size(32), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 4, 100, 16]), torch.Size([1, 4, 100]))
        >>> packed = gs.Document([0] * 60 + [1] * 40) & gs.Causal()
        >>> x = [x.transpose(1, 2) for x in (q, k, v)]  # (B, N, heads, size), as flash-attn has them
        >>> gs.attention(*x, packed, layout="bshd").shape
        torch.Size([1, 100, 4, 16])
        >>> mask = torch.from_numpy(packed.materialize(100, 100))
        >>> torch.allclose(gs.attention(q, k, v, packed), gs.attention(q, k, v, mask), atol=1e-6)
        True
        >>> gs.attention(q, k, v, key_lengths=[80]).shape
        torch.Size([1, 4, 100, 16])
        >>> temperature = torch.nn.Parameter(torch.tensor(0.25))
        >>> gs.attention(q, k, v, packed, scale=temperature).sum().backward()
        >>> temperature.grad.shape
        torch.Size([])
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be True or False; got {describe(return_lse)}")
    bshd = layout is not BHND and is_bshd(layout)
    compiling = torch.compiler.is_compiling()
    if type(pattern) is int and not compiling:
        pattern = pattern_of(pattern)
    if scale is not None and isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    if merge is None and (isinstance(q_offset, Tensor) or key_starts is not None):
        options = AttentionOptions(
            scale, q_offset, key_starts, key_lengths, softcap, sink_logits, alibi_slopes, alibi_distance,
            implementation, deterministic, layout,
        )  # fmt: skip
        seen = seen_by_one_query(q, k, v, pattern, options, bshd)
        if isinstance(seen, Tensor):
            pattern, q_offset, key_lengths = DENSE, None, seen
        else:
            results = None if seen is None else seen(q, k, v)
            if results is not None:
                out, lse = results
                return (out, lse) if return_lse else out
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    key: Key | None = None
    vectors: Vectors | tuple[()] = ()
    if merge is None and not key_lengths is sink_logits is alibi_slopes is None:
        vectors = vectors_of(q, key_lengths, sink_logits, alibi_slopes)
    if not compiling and merge is key_starts is None and (vectors or alibi_distance is None):
        which = DENSE if pattern is None else pattern
        numbers = scale, q_offset, softcap, implementation, deterministic
        key = key_of(q, k, v, which, *numbers, vectors, bshd, alibi_distance)
        call: Any = None if key is None else known.get(key)
        if call is None and key is not None and q.ndim == 4 and q.shape[1 if bshd else 2] == 1:
            call = growing_call(q, k, v, which, *numbers, vectors, bshd)
        if call is not None:
            out, lse = call(q, k, v, *vectors)
            return (out, lse) if return_lse else out
    options = AttentionOptions(
        scale, q_offset, key_starts, key_lengths, softcap, sink_logits, alibi_slopes, alibi_distance, implementation,
        deterministic, layout,
    )  # fmt: skip
    if isinstance(pattern, (PackedSequences, PagedLayout)) and pattern.pages is not None:
        out, lse = over_pages(q, k, v, pattern, options, merge)
    elif merge is None:
        found = None if compiling or key is not None else by_structure(q, k, v, pattern, options, vectors)
        out, lse = _run(request_of(q, k, v, pattern, options, vectors), key) if found is None else found
    else:
        out, lse = _merged(q, k, v, pattern, merge, options)
    return (out, lse) if return_lse else out


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, options: AttentionOptions, joining: Any = None,
    out: Tensor | None = None, key: Key | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of a call over pages.

    Args:
        pattern: `PackedSequences` with pages, or what `device_layout` made of them.
        joining: `merge` of `attention`.
        out: is written, where it is given.
        key: of `varlen`, under which the call was not found.
    """
    if joining is None and isinstance(pattern, PackedSequences):
        alive = token_of(pattern.pattern.handle) if key is not None and pattern.pattern is not None else None
        found = by_table(q, k, v, pattern, options, out, key, alive)
        if found is not None:
            return found
        if pattern.pages is not None and pattern.pages.by_head:
            outs, sums = zip(*(over_pages(*of_head) for of_head in heads_apart(q, k, v, pattern, options)), strict=True)
            joined, lse = torch.cat(outs, -2 if is_bshd(options.layout) else -3), torch.cat(sums, -2)
            return joined if out is None else out.copy_(joined), lse
    paged = paged_call(q, k, v, pattern, options, joining)
    made, lse = paged.joined([_run(request, None) for request in paged.requests])
    return made if out is None else out.copy_(made), lse


def _run(request: Request, key: Key | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a request, with as many dimensions as were given; what computes it is kept by the key."""
    a, attended, *_ = request
    pattern, back = attended.alive, None
    if isinstance(pattern, ReorderedCSR):
        q, k, v = permuted(pattern, a.q, a.k, a.v, a.key_lengths, a.alibi_slopes)
        a, back, key = a._replace(q=q, k=k, v=v), orders(pattern, q.device).back, None
        attended = resolve_pattern(pattern.inner, q)
    if a.expanded:  # what is kept by the key would be run with k and v as they were given
        key = None
    if not torch.compiler.is_compiling() and (key is not None or plain(a.q, a.k, a.v, a.sink_logits)):
        request = Request(a, attended)
        if a.q_offset_tensor is not None:
            request = read_q_offset(request)
        out, lse = call_of(request, key)(a.q, a.k, a.v, *request.more)
    else:
        out, lse = forward_op(
            a.q, a.k, a.v, list(attended.data), list(attended.geometry), attended.handle, *options_of(a)
        )
    if a.dims != 4 or a.bshd:
        out, lse = unbatched(out, lse, a.dims, a.bshd)
    if back is not None:
        rows = -3 if a.bshd and a.dims > 2 else -2
        out, lse = out.index_select(rows, back), lse.index_select(-1, back)
    return out, lse


def _merged(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, merge: str, options: AttentionOptions
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of `attention` with `merge`; the sinks join once, with the first term."""
    if merge != "lse":
        raise ValueError(f'merge must be None or "lse"; got {describe(merge)}')
    if is_handle(pattern) and not torch.compiler.is_compiling():
        pattern = pattern_of(pattern)
    outs, lses = [], []
    for term in branches_of(pattern):
        out, lse = attention(q, k, v, term, return_lse=True, **options._asdict())
        turned = lse.ndim > 1 and is_bshd(options.layout)  # `merge` wants lse in the order of out's rows
        outs.append(out)
        lses.append(lse.mT if turned else lse)
        options = options._replace(sink_logits=None)
    out, lse = merge_results(outs, lses)
    return out, lse.mT if turned else lse
