"""`device_layout`: the structure of a call, made on its device once for all calls that share it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.kernels.launch import Vectors
from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.layouts.base import OF_EACH
from gossamer.torch.arguments import BHND, AttentionOptions, Layout, Lengths, offset, vectors_of
from gossamer.torch.paged import PagedLayout, device_layout_of_pages
from gossamer.torch.repeated import layout_by_structure
from gossamer.torch.request import asks_for_structure, request_of
from gossamer.torch.structure import PackedSequences, Structure


def device_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Any = None,
    *,
    q_offset: int | Tensor | None = None,
    key_starts: Lengths | None = None,
    key_lengths: Lengths | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    implementation: str | None = None,
    deterministic: bool | None = None,
    layout: Layout = BHND,
) -> BlockLayout | GatherLayout | PagedLayout | PackedSequences:
    """The layout that `attention` makes on the device from these arguments, to be its pattern in many calls.

    The layers of a model share what is attended, and each call of `attention` would make its own. Offsets, starts and
    lengths are in the layout, as they are now, and are not given to `attention` again; an offset that all sequences
    share is known to `alibi_slopes` given with it, which are refused where each has its own.

    Args:
        q: as in `attention`, whose values do not count here; and so are `k`, `v` and the options, of which the calls
            have the same.
        pattern: `DocumentIds`, `BlockIndices`, `Indices` and what they are joined with; `PackedSequences`; or a pattern
            that goes by positions, with `key_starts` or a `q_offset` of (B,).

    Raises:
        ValueError: an argument is wrong, or nothing in them is made on the device: patterns are laid out on the host,
            once, and are given to `attention` as they are.

    Examples:
        >>> q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
        >>> lengths = torch.tensor([64, 20])  # of two sequences in a static cache
        >>> step = gs.device_layout(q, k, v, gs.SlidingWindow(31), q_offset=lengths - 1, key_lengths=lengths)
        >>> every = [gs.attention(q, k, v, step) for _ in range(2)]  # of each layer its own q, k and v
        >>> want = gs.attention(q, k, v, gs.SlidingWindow(31), q_offset=lengths - 1, key_lengths=lengths)
        >>> torch.equal(every[0], want)
        True
    """
    if not asks_for_structure(pattern, q_offset, key_starts):
        raise ValueError(
            "pattern must be DocumentIds, BlockIndices, Indices or joined with them, or PackedSequences, or key_starts "
            "or a q_offset of (B,) given: nothing in these arguments is made on the device"
        )
    options = AttentionOptions(
        q_offset=q_offset, key_starts=key_starts, key_lengths=key_lengths, softcap=softcap, sink_logits=sink_logits,
        implementation=implementation, deterministic=deterministic, layout=layout,
    )  # fmt: skip
    compiling = torch.compiler.is_compiling()
    if deterministic is None and not compiling:
        options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    if isinstance(pattern, PackedSequences) and pattern.pages is not None:
        return device_layout_of_pages(q, k, v, pattern, options)
    vectors: Vectors | tuple[()] = ()
    if not key_lengths is sink_logits is None:
        vectors = vectors_of(q, key_lengths, sink_logits, None)
    made = (
        request_of(q, k, v, pattern, options, vectors).attended.alive
        if compiling
        else layout_by_structure(q, k, v, pattern, options, vectors)
    )
    assert isinstance(made, (BlockLayout, GatherLayout))
    held: Any = made.K - made.Q if q_offset is None else offset(q_offset)
    if isinstance(q_offset, Tensor):
        held = OF_EACH if q_offset.ndim else q_offset.clone()  # what is written to it later moves no pair of the layout
    if isinstance(pattern, Structure) and pattern.own_positions:
        held = OF_EACH
    return made.at_offset(held)
