"""`varlen`: sequences packed behind one another, whose lengths are tensors on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gossamer.patterns import Pattern
from gossamer.torch.api import attention, over_pages
from gossamer.torch.arguments import AttentionOptions, describe, known, whole
from gossamer.torch.key import differentiable
from gossamer.torch.paged_kernel import Given, again, key_by_table
from gossamer.torch.scale import with_number
from gossamer.torch.structure.base import Edges
from gossamer.torch.structure.pages import PageLayout, Pages
from gossamer.torch.structure.sequences import PackedSequences


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Edges,
    cu_seq_k: Edges | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    pattern: Pattern | None = None,
    *,
    seqused_k: Edges | None = None,
    block_table: Tensor | np.ndarray | None = None,
    page_layout: PageLayout = "pshd",
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within sequences that are packed behind one another, each with its own lengths; differentiable.

    Arguments have the names of `torch.nn.attention.varlen.varlen_attn`. Sequence n has the query rows
    [cu_seq_q[n], cu_seq_q[n + 1]) and the keys [cu_seq_k[n], cu_seq_k[n + 1]), aligned at the end: row r of Lq, of a
    sequence with Lk keys, is at position r + Lk - Lq among them, so that with `Causal()` the last row sees all keys.
    Rows that see nothing give 0, and so do those of no sequence. The structure is made on the device, in each call:
    lengths may change in a compiled function and in a captured graph. Layers that share them share one structure by
    `attention` with the `device_layout` of `PackedSequences`, of which this is the short form for one call; where all
    lengths are lists or arrays, calls of the same numbers share it by themselves, outside of both.

    With `block_table` k and v are a cache in pages, and no gradients are computed; layers share the `device_layout` of
    `PackedSequences` with `Pages`. What no query sees is not used, whatever it holds: see there.

    Args:
        q: (T, H, D), the queries of all sequences.
        k: (S, G, D), their keys, H a multiple of G; with block_table (P, page_size, G, D), or (P, G, page_size, D).
        v: (S, G, E), and so on.
        cu_seq_q: (sequences + 1,) integers from 0 to T (of cu_seq_k: to S) that do not decrease, as `PackedSequences`
            takes them; those of the host are checked, and those of a GPU clamped.
        cu_seq_k: (sequences + 1,) likewise; None is cu_seq_q.
        max_q: not used; sizes are those of q.
        max_k: with block_table the most keys that a sequence has; the rest of a wider table is not looked at, for
            which there would be room in what is copied. Else not used; sizes are those of k.
        pattern: Dense, Causal, Local, SlidingWindow (whose sinks are the first keys of each sequence), any `&` and `|`
            of them, and over pages Dilated and Strided too; None is every key of the sequence.
        seqused_k: (sequences,) integers: of each sequence only so many keys are there, from its first one on. Lk is
            then this number, where it is less than the room of the sequence. With block_table it has to be given.
        block_table: (sequences, n) integers: the pages of each sequence, as `Pages` takes them, or (sequences, G, n),
            those of each key head. cu_seq_k is then None.
        page_layout: "pshd", of k (P, page_size, G, D), or "phsd", of k (P, G, page_size, D).
        scale: as in `attention`, and so are `softcap`, `sink_logits` and `deterministic`.
        batch_invariant: with block_table, as `Pages` takes it.
        out: (T, H, E) of q's dtype, which the result is written to; without gradients only.
        return_lse: also return lse (H, T).

    Returns:
        out (T, H, E) in q's dtype; with lse (H, T) if asked for.

    Raises:
        ValueError: an argument is wrong; `Unsupported` where the pattern does not go by positions alone, or where a
            gradient is asked for over pages.

    Examples:
        >>> q, k, v = torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
        >>> cu_q, cu_k = torch.tensor([0, 2, 7]), torch.tensor([0, 4, 9])
        >>> out, lse = gs.varlen(q, k, v, cu_q, cu_k, pattern=gs.Causal(), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([7, 4, 8]), torch.Size([4, 7]))
        >>> same = gs.varlen(q, k, v, cu_q, cu_k, pattern=gs.Causal(), deterministic=True)  # and so are its gradients
        >>> torch.allclose(out, same)
        True
        >>> first = gs.attention(q[:2], k[:4], v[:4], gs.Causal(), layout="bshd")
        >>> torch.allclose(out[:2], first, atol=1e-6)
        True
        >>> pool_k, pool_v = torch.randn(6, 16, 2, 8), torch.randn(6, 16, 2, 8)  # six pages of 16 slots
        >>> table, used = torch.tensor([[5, 0], [2, -1]]), torch.tensor([18, 9])
        >>> gs.varlen(q, pool_k, pool_v, cu_q, seqused_k=used, block_table=table, pattern=gs.Causal()).shape
        torch.Size([7, 4, 8])
    """
    paged, key = block_table is not None, None
    simple = {type(max_k), type(page_layout), type(batch_invariant)} <= {type(None), int, str, bool}
    if paged and simple and cu_seq_k is None and (pattern is None or isinstance(pattern, Pattern)):
        given = Given(q, k, v, cu_seq_q, block_table, seqused_k, sink_logits, out)  # type: ignore[arg-type]
        numbers = max_k, type(max_k), page_layout, batch_invariant, type(batch_invariant)
        key = key_by_table(given, (None if pattern is None else pattern.handle, *numbers), scale, softcap)
        results = again(key, given)
        if results is not None:
            found, lse = results
            return (found, lse) if return_lse else found
    for name, x in (("q", q), ("k", k), ("v", v)):
        pages = paged and name != "q"
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3 + pages:
            form = "a tensor of pages, of 4 dimensions" if pages else "a tensor (positions, heads, size)"
            without = "; keys in pages are given with block_table" * (not paged and getattr(x, "ndim", 0) == 4)
            raise ValueError(f"{name} must be {form} of packed sequences; got {describe(x)}{without}")
    if paged:
        told = block_table, seqused_k, page_layout, batch_invariant
        sequences = _of_pages(k, cu_seq_q, cu_seq_k, max_k, pattern, *told)
    else:
        if batch_invariant is not False:
            raise ValueError(f"batch_invariant must be False without block_table; got {describe(batch_invariant)}")
        if page_layout != "pshd":
            raise ValueError(f'page_layout must be "pshd" without block_table; got {describe(page_layout)}')
        sequences = PackedSequences(cu_seq_q, cu_seq_k, seqused_k=seqused_k, pattern=pattern)
    if isinstance(scale, Tensor):
        q, scale = with_number(q, scale)
    if out is not None:
        check_out(out, q, v)
        if differentiable(q, k, v, sink_logits):
            raise ValueError("out must be None where a gradient is asked for; call it under torch.no_grad()")
    if paged:
        options = AttentionOptions(
            scale=scale, softcap=softcap, sink_logits=sink_logits, deterministic=deterministic, layout="bshd"
        )
        found, lse = over_pages(q, k, v, sequences, options, out=out, key=key)
    else:
        found, lse = attention(
            q, k, v, sequences, scale=scale, softcap=softcap, sink_logits=sink_logits, deterministic=deterministic,
            return_lse=True, layout="bshd",
        )  # fmt: skip
        found = found if out is None else out.copy_(found)
    return (found, lse) if return_lse else found


def _of_pages(
    k: Tensor, cu_seq_q: Any, cu_seq_k: Any, max_k: Any, pattern: Any, block_table: Any, seqused_k: Any,
    page_layout: Any, batch_invariant: Any,
) -> PackedSequences:  # fmt: skip
    """The sequences of a call over pages."""
    if seqused_k is None:
        raise ValueError("seqused_k must be given with block_table: the number of keys of each sequence; got None")
    if cu_seq_k is not None:
        raise ValueError(f"cu_seq_k must be None with block_table; got {describe(cu_seq_k)}")
    size = k.shape[2 if page_layout == "phsd" else 1]
    pages = Pages(block_table, seqused_k, size, page_layout=page_layout, batch_invariant=batch_invariant)
    if max_k is not None:
        most = whole(max_k)
        if most is None or known(most < 0):
            raise ValueError(f"max_k must be None or an integer of at least 0; got {describe(max_k)}")
        pages = pages.up_to(most)
    return PackedSequences(cu_seq_q, pages=pages, pattern=pattern)


def check_out(out: Any, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless results can be written to `out`."""
    shape = (*q.shape[:2], v.shape[-1])
    if not isinstance(out, Tensor) or out.shape != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(f"out must be a tensor {shape} of {q.dtype} on {q.device}; got {describe(out)}")
