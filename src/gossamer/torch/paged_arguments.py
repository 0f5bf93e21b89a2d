"""The arguments of a call over pages, checked and in one form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.launch import dtype_of
from gossamer.plan.arguments import ACCEPTED, FLOATS
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import AttentionOptions, describe, is_bshd, known, vectors_of
from gossamer.torch.key import differentiable
from gossamer.torch.structure.pages import Pages


class Paged(NamedTuple):
    """The tensors of a call: q (T, H, D), k (P, page_size, G, D) and v (P, page_size, G, E), all of them views."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def facts(self) -> tuple[Any, ...]:
        """What a layout is made for."""
        (T, H, _), (P, size, G, _) = self.q.shape, self.k.shape
        return T, H, G, P, size


def checked(
    q: Any, k: Any, v: Any, pages: Pages, options: AttentionOptions, joining: Any = None
) -> tuple[Paged, Tensor | None]:
    """The tensors of a call in one form, and its sinks.

    Raises:
        ValueError: an argument is wrong; `Unsupported` for what is not computed over pages.
    """
    refuse(options, joining)
    given = tensors_over_pages(q, k, v, pages, is_bshd(options.layout))
    if differentiable(q, k, v, options.sink_logits):
        raise Unsupported("q, k, v and sink_logits must ask for no gradient with pages; call it under torch.no_grad()")
    sinks = options.sink_logits
    if sinks is not None:
        _, sinks, _ = vectors_of(q, None, sinks, None)
        if not isinstance(sinks, Tensor) or sinks.shape != given.q.shape[1:2] or not sinks.is_floating_point():
            raise ValueError(f"sink_logits must be a float tensor (H,) = ({given.q.shape[1]},); got {describe(sinks)}")
        if sinks.device != q.device:
            raise ValueError(f"sink_logits must be a tensor on q's device, {q.device}; got {describe(sinks)}")
    return given, sinks


def refuse(options: AttentionOptions, joining: Any) -> None:
    """Raise Unsupported for options that say nothing of sequences in pages."""
    names = ("q_offset", "key_starts", "key_lengths", "alibi_slopes", "alibi_distance")
    for name, x in [*((name, getattr(options, name)) for name in names), ("merge", joining)]:
        if x is not None:
            raise Unsupported(f"{name} must be None with pages, whose positions are those within each sequence")


def tensors_over_pages(q: Any, k: Any, v: Any, pages: Pages, bshd: bool) -> Paged:
    """q, k and v in one form.

    Raises:
        ValueError: they do not fit each other and the pages.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
            raise ValueError(f"{name} must be a strided torch tensor; got {describe(x)}")
        if "float8" in dtype_of(x) or (name != "q" and not x.is_floating_point()):
            raise Unsupported(f"{name} must be of {ACCEPTED}: caches of 8 bits are not computed; got {describe(x)}")
        if dtype_of(x) not in FLOATS or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must be a tensor of {ACCEPTED}, of q's dtype and device, {dtype_of(q)} on {q.device}; got "
                f"{describe(x)}"
            )
    form = "(T, H, D) or (1, T, H, D)" if bshd else "(H, T, D) or (1, H, T, D)"
    if q.ndim not in (3, 4) or (q.ndim == 4 and known(q.shape[0] != 1)):
        raise ValueError(f"q must be {form}, the queries of all sequences behind one another; got {describe(q)}")
    one = q.squeeze(0) if q.ndim == 4 else q
    one = one if bshd else one.transpose(0, 1)
    form = "(P, page_size, G, size)" if pages.page_layout == "pshd" else "(P, G, page_size, size)"
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be pages {form}; got {describe(x)}")
        if x.shape[3] and known(x.shape[3] != 1) and x.stride(3) != 1:
            raise ValueError(f"{name} must have a last stride of 1; got strides {x.stride()}")
    if pages.page_layout == "phsd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    H, D, G = one.shape[1], one.shape[2], k.shape[2]
    if known(k.shape[1] != pages.page_size):
        raise ValueError(
            f"k must be pages {form} of page_size={pages.page_size} slots; got shape {tuple(k.shape)} of "
            "(P, page_size, G, size)"
        )
    if known(k.shape[:3] != v.shape[:3]):
        raise ValueError(f"v must have the pages, slots and heads of k, {tuple(k.shape[:3])}; got {tuple(v.shape[:3])}")
    if not G or not H or known(H % G != 0):
        raise ValueError(f"k must have a number of heads G that divides q's H={H}; got G={G}")
    if pages.by_head and known(pages.block_table.shape[1] != G):
        raise ValueError(
            f"block_table must have a table for each of k's heads, G={G}, or one for all; got "
            f"{describe(pages.block_table)}"
        )
    if not D or known(k.shape[3] != D) or not v.shape[3]:
        raise ValueError(
            f"k must have the head size of q, D={D}, and v one of at least 1; got {k.shape[3]} and {v.shape[3]}"
        )
    return Paged(one, k, v)
