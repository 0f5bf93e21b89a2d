"""`device_layout`: the structure of a call, made on its device once for all calls that share it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.layouts import BlockLayout, GatherLayout
from gossamer.torch.request import asks_for_structure, request_of
from gossamer.torch.validate import BHND, Layout, Lengths, is_bshd


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
) -> BlockLayout | GatherLayout:
    """The layout that `attention` makes on the device from these arguments, to be its pattern in many calls.

    The layers of a model share what is attended: in a captured graph or a compiled function each call would make its
    own, since what tensors hold is not known there. Offsets, starts and lengths are in the layout, and are not given
    to `attention` again.

    Args:
        q: as in `attention`, whose values do not count here; and so are `k`, `v` and the options, of which the calls
            have the same.
        pattern: `DocumentIds`, `BlockIndices`, `Indices` and what they are joined with; or a pattern that goes by
            positions, with `key_starts` or a `q_offset` of (B,).

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
            "pattern must be DocumentIds, BlockIndices, Indices or joined with them, or key_starts or a q_offset of "
            "(B,) given: nothing in these arguments is made on the device"
        )
    request = request_of(
        q, k, v, pattern, scale=None, q_offset=q_offset, key_starts=key_starts, key_lengths=key_lengths,
        softcap=softcap, sink_logits=sink_logits, alibi_slopes=None, implementation=implementation,
        deterministic=deterministic, bshd=is_bshd(layout),
    )  # fmt: skip
    made = request.attended.alive
    assert isinstance(made, (BlockLayout, GatherLayout))
    return made
