"""The pages of a cache that few queries of each sequence attend to, chosen by bounds of their scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.checks import show
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import describe, number, whole
from gossamer.torch.decoding import WIDEST, sees_on
from gossamer.torch.key import differentiable
from gossamer.torch.structure import Pages
from gossamer.torch.structure.base import Edges, narrow, sorted_edges, vector_of
from gossamer.torch.structure.page_tiles import numbers
from gossamer.torch.structure.pages import PageLayout


class PageBounds:
    """The least and the largest number of each dimension of the keys of each page, kept beside a cache.

    Attributes:
        low, high: (P, G, D), of k's type.

    Examples:
        >>> bounds = gs.PageBounds.of(torch.arange(6.0).view(1, 3, 1, 2))  # a page of 3 keys
        >>> bounds.low.tolist(), bounds.high.tolist()
        ([[[0.0, 1.0]]], [[[4.0, 5.0]]])
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        right = isinstance(low, Tensor) and isinstance(high, Tensor) and low.ndim == 3 and low.is_floating_point()
        if not right or (low.shape, low.dtype, low.device) != (high.shape, high.dtype, high.device):
            raise ValueError(
                f"low and high must be float tensors (P, G, D), alike; got {describe(low)} and {describe(high)}"
            )
        self.low, self.high = low.contiguous(), high.contiguous()

    def __repr__(self) -> str:
        return f"PageBounds({tuple(self.low.shape)})"

    @classmethod
    def of(cls, k: Tensor, page_layout: PageLayout = "pshd") -> PageBounds:
        """The bounds of pages all of whose slots hold keys.

        Args:
            k: (P, page_size, G, D), or with page_layout="phsd" (P, G, page_size, D).
        """
        x = _by_slot(k, page_layout)
        return cls(x.amin(1), x.amax(1))

    @classmethod
    def empty(cls, k: Tensor, page_layout: PageLayout = "pshd") -> PageBounds:
        """The bounds of pages that hold no keys yet, to be updated with each key that is written."""
        P, _, G, D = _by_slot(k, page_layout).shape
        return cls(k.new_zeros(P, G, D), k.new_zeros(P, G, D))

    def update(self, k: Tensor, slots: Tensor, page_layout: PageLayout = "pshd") -> None:
        """Take in the keys that were written to some slots; nothing waits for a device.

        A page is filled from its slot 0 on, by tokens that follow one another: of each page that a slot lies in, the
        keys up to that slot are read, and count. So a page that is used again begins anew, and drafts that were
        rejected count until their slots are written again.

        Args:
            slots: (T,) integers: slot s is slot s % page_size of page s // page_size; none where it is under 0.

        Raises:
            ValueError: k is not that of the bounds.
        """
        x = _by_slot(k, page_layout)
        P, size, G, D = x.shape
        if tuple(self.low.shape) != (P, G, D) or x.dtype != self.low.dtype or x.device != self.low.device:
            raise ValueError(
                f"k must have the pages, heads, size and type of the bounds, {describe(self.low)}; got {describe(k)}"
            )
        vector_of("slots", slots, slots.shape[0] if isinstance(slots, Tensor) and slots.ndim else None)
        if not len(slots) or not P:
            return
        if sees_on(x.device.type) and x.dtype != torch.float64 and x.stride(3) == 1:
            from gossamer.blocks.triton.page_kernels import update_bounds

            update_bounds(x, slots, self.low, self.high)
            return
        slot = slots.long()
        page = torch.where(slot < 0, -1, slot // size)
        ends = (page >= 0) & (page != torch.cat([page[1:], page.new_full((1,), -1)]))
        page, number_of = page[ends], slot[ends] % size + 1
        behind = (torch.arange(size, device=x.device) >= number_of[:, None])[..., None, None]
        keys = x[page]
        self.low[page] = keys.masked_fill(behind, torch.inf).amin(1)
        self.high[page] = keys.masked_fill(behind, -torch.inf).amax(1)


class _Asked(NamedTuple):
    """What pages were chosen for."""

    q: Tensor  # (T, H, D)
    page_bounds: PageBounds
    scale: float
    sequence: Tensor  # (T,) of each token; R of none
    counts: Tensor  # (R, n), keys of each page
    own: Tensor  # (R,) pages that are always kept


@dataclass(frozen=True, eq=False)
class TopkPages:
    """The pages that each key head of each sequence attends to, as `varlen` and `Pages` take them.

    Attributes:
        block_table: (R, G, m) int32, m = min(topk, n), in the order of positions; -1 behind the last.
        seqused_k: (R, G) int32: the keys in these pages.
        chosen: (R, G, n) whether a page is attended to.
        bounds: (T, H, n) what the scores of a query in a page are at most; -inf where the sequence has no such page.
    """

    block_table: Tensor
    seqused_k: Tensor
    chosen: Tensor
    bounds: Tensor
    asked: _Asked = field(repr=False)

    def kept_mass(self, lse: Tensor) -> Tensor:
        """A certified lower bound of the probability that each row keeps: of its attention over all its keys.

        As `SelectedBlocks.kept_mass`: with L the lse of the attention to the chosen pages, and b the bound of a page of
        n keys that is not chosen, a row keeps at least exp(L) / (exp(L) + sum of n exp(b)). Rounding is on the safe
        side. q and the bounds of pages are read again: call it before they are written.

        Args:
            lse: (H, T), of `varlen` of the same q and scale over these pages, without a soft cap or sinks.

        Returns:
            Of lse's shape and type, in [0, 1]; 1 of a row that drops nothing.

        Raises:
            ValueError: lse is no such tensor.
        """
        (T, H, _), (R, G, _), a = self.bounds.shape, self.chosen.shape, self.asked
        if not isinstance(lse, Tensor) or lse.shape != (H, T) or lse.dtype != self.bounds.dtype:
            raise ValueError(f"lse must be a tensor of shape {(H, T)}, {self.bounds.dtype}; got {describe(lse)}")
        if not T or not R:
            return torch.ones_like(lse)
        D, unit = a.q.shape[2], torch.finfo(lse.dtype).eps / 2
        low, high = a.page_bounds.low, a.page_bounds.high
        of_key = torch.maximum(low.abs().amax(0), high.abs().amax(0)).double().repeat_interleave(H // G, 0)
        size = abs(a.scale) * (a.q.abs().double() * of_key).sum(-1)  # (T, H): no part of a score is larger
        of = a.sequence.clamp(max=R - 1)
        dropped = ~self.chosen[of].repeat_interleave(H // G, 1) & (self.bounds > -torch.inf)
        counts, L = a.counts[of, None].double(), lse.T.double()
        most = self.bounds.double() + (unit * (2 * D + 64) * size)[..., None] + counts.log()
        L = L - unit * ((2 * D + 64) * size + 4 * L.abs() + counts.sum(-1) / 16 + 320)
        kept = (L - most.masked_fill(~dropped, -torch.inf).logsumexp(-1)).sigmoid()
        # Of tokens whose own pages are left out other keys count as seen.
        kept = kept.masked_fill((a.own > self.block_table.shape[2])[of][:, None], 0.0)
        kept = torch.where(dropped.any(-1), kept * (1 - 2 * unit), 1.0)
        return kept.to(lse.dtype).T


def topk_pages(
    q: Tensor, bounds: PageBounds, cu_seq_q: Edges, block_table: Tensor, seqused_k: Edges, page_size: int, *, topk: int,
    first: int = 1, local: int = 2, scale: float | None = None,
) -> TopkPages:  # fmt: skip
    """The pages of the largest bounds, for each sequence and key head: those that its last tokens attend to.

    A page's bound is what no score of its keys with a query exceeds: with the least and the largest number m and M of
    each dimension of its keys, scale * sum of max(q_d m_d, q_d M_d) (Quest, arXiv:2406.10774). The largest of the
    tokens of a sequence and of the query heads that share keys counts. Nothing is read on the host, no size follows
    from a number, and a captured graph chooses again in each replay.

    Args:
        q: (T, H, D), the last tokens of all sequences behind one another, a few of each.
        bounds: of the cache's keys, H a multiple of their heads G.
        cu_seq_q: (R + 1,) integers, edges of the tokens, as `varlen` takes them.
        block_table: (R, n) integers, and `seqused_k` (R,): the pages and keys of each sequence, as `Pages` takes them.
        page_size: slots of a page.
        topk: pages of a sequence that are kept; all, where it has no more.
        first: pages at its begin that are always kept, and count.
        local: at its end likewise, at least 1, and those that the sequence's tokens lie in. Where these are more than
            topk the first of them are left out.
        scale: of the scores; None: D ** -0.5.

    Returns:
        `TopkPages`, for `varlen(q, k, v, cu_seq_q, block_table=, seqused_k=, pattern=)` with `Causal`, or of one token
        a sequence `Dense`: positions are counted among the kept keys, so that windows mean something else.

    Raises:
        ValueError: an argument is wrong; `Unsupported` where q asks for a gradient.

    Examples:
        >>> k, v = torch.randn(40, 16, 2, 8), torch.randn(40, 16, 2, 8)  # 40 pages of 16 slots
        >>> q, table, used = torch.randn(2, 4, 8), torch.arange(40).view(2, 20), [320, 300]
        >>> bounds = gs.PageBounds.of(k)
        >>> pages = gs.topk_pages(q, bounds, [0, 1, 2], table, used, 16, topk=6)
        >>> given = {"block_table": pages.block_table, "seqused_k": pages.seqused_k, "return_lse": True}
        >>> out, lse = gs.varlen(q, k, v, [0, 1, 2], pattern=gs.Causal(), **given)
        >>> bool((pages.kept_mass(lse) > 0).all())
        True
    """
    if not isinstance(bounds, PageBounds):
        raise ValueError(f"bounds must be PageBounds; got {describe(bounds)}")
    low, high = bounds.low, bounds.high
    _, G, D = low.shape
    if not isinstance(q, Tensor) or q.ndim != 3 or q.dtype != low.dtype or q.device != low.device:
        raise ValueError(f"q must be a tensor (T, H, D) of {low.dtype} on {low.device}; got {describe(q)}")
    T, H, _ = q.shape
    if q.shape[2] != D or not G or not H or H % G:
        raise ValueError(f"q must have heads of {D}, in a multiple of G={G} of them; got {describe(q)}")
    if differentiable(q, low, high, None):
        raise Unsupported("q must ask for no gradient: a choice has none; call it under torch.no_grad()")
    pages = Pages(block_table, seqused_k, page_size).placed(q.device)
    if pages.by_head:
        raise ValueError(f"block_table must be (sequences, pages of each); got {describe(block_table)}")
    edges = vector_of("cu_seq_q", cu_seq_q).to(q.device)
    (R, n), size = pages.block_table.shape, pages.page_size
    if edges.shape[0] != R + 1:
        raise ValueError(f"cu_seq_q must have R + 1 = {R + 1} edges; got {describe(cu_seq_q)}")
    kept, begin, near = whole(topk), whole(first), whole(local)
    for name, x, given, least in (("topk", kept, topk, 1), ("first", begin, first, 0), ("local", near, local, 1)):
        if x is None or x < least:
            raise ValueError(f"{name} must be an integer of at least {least}; got {show(given)}")
    assert kept is not None and begin is not None and near is not None
    if kept < begin + near:
        raise ValueError(f"topk must be at least first + local = {begin + near}, which are always kept; got {kept}")
    scale = D**-0.5 if scale is None else float(number(scale))
    used = narrow(pages.seqused_k, 0, n * size)
    edges = sorted_edges(edges, T)
    of = _score(q, bounds, edges, pages.block_table, used, size, begin, near, scale)
    there = -(-used // size)
    m = min(kept, n)
    at = torch.where(of.scores > -torch.inf, numbers(n, used), n)  # n: no page of the sequence
    best = of.scores.topk(m, -1).indices
    place = at.gather(-1, best).sort(-1).values
    listed = place < n
    table = pages.block_table[:, None].expand(R, G, n).gather(-1, place.clamp(max=max(0, n - 1))).int()
    number_of = listed.sum(-1)
    # The last page is always kept, and alone may hold fewer keys than it has slots.
    rest = (used - (there - 1) * size)[:, None]
    keys = torch.where(number_of > 0, (number_of - 1) * size + rest, 0).int()
    chosen = torch.zeros((R, G, n + 1), dtype=torch.bool, device=q.device).scatter_(-1, place, True)[..., :n]
    begin_of = numbers(n, used) * size
    counts = (used[:, None] - begin_of).clamp(0, size)
    own = there - torch.minimum((used - edges.diff()).clamp(min=0) // size, there - near).clamp(min=0)
    asked = _Asked(q.detach(), bounds, scale, of.sequence, counts, torch.minimum(own + begin, there))
    return TopkPages(table.masked_fill(~listed, -1), keys, chosen, of.bounds, asked)


class _Scores(NamedTuple):
    """Bounds of scores, and what they belong to."""

    bounds: Tensor  # (T, H, n)
    scores: Tensor  # (R, G, n): inf of a page that is always kept, -inf of none
    sequence: Tensor  # (T,)


def _score(
    q: Tensor, bounds: PageBounds, edges: Tensor, table: Tensor, used: Tensor, size: int, first: int, local: int,
    scale: float,
) -> _Scores:  # fmt: skip
    """The bounds, by a kernel or by operations of torch, which define them."""
    (T, H, D), (P, G, _), (R, n) = q.shape, bounds.low.shape, table.shape
    sequence = torch.searchsorted(edges[1:].contiguous(), numbers(T, edges), right=True)
    sequence = torch.where(numbers(T, edges) < edges[0], R, sequence)
    if sees_on(q.device.type) and q.dtype != torch.float64 and D <= WIDEST and q.stride(2) == 1 and T and R and n and P:
        from gossamer.blocks.triton.page_kernels import score_pages

        low, high = bounds.low, bounds.high
        return _Scores(*score_pages(q, low, high, edges, table, used, size, first, local, scale), sequence)
    page, there_are = numbers(n, used), -(-used // size)
    entry = narrow(table, -1, P)
    there = (page < there_are[:, None]) & (entry >= 0) & (entry < P)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not T or not R or not n or not P:
        return _Scores(
            q.new_full((T, H, n), -torch.inf, dtype=wide), q.new_full((R, G, n), -torch.inf, dtype=wide), sequence
        )
    of, entry = sequence.clamp(max=R - 1), entry.clamp(0, P - 1)
    rows = (q if scale >= 0 else -q).to(wide).view(T, G, H // G, D)
    low, high = (x[entry[of]].permute(0, 2, 3, 1).to(wide) for x in (bounds.low, bounds.high))  # (T, G, D, n)
    made = abs(scale) * (rows.clamp(min=0) @ high + rows.clamp(max=0) @ low)
    made = made.masked_fill(~(there[of] & (sequence < R)[:, None])[:, None, None], -torch.inf)
    scores = made.new_full((R + 1, G, n), -torch.inf)
    most, under = 2.0**127, 2.0**126  # scores of what is always kept, and of the rest at most
    largest = made.amax(2).nan_to_num(nan=under, posinf=under, neginf=-torch.inf).clamp(max=under)
    scores = scores.scatter_reduce(0, sequence[:, None, None].expand(T, G, n), largest, "amax")[:R]
    own = torch.minimum((used - edges.diff()).clamp(min=0) // size, there_are - local)
    always = there & ((page < first) | (page >= own[:, None])) & (edges.diff() > 0)[:, None]
    scores = scores.masked_fill(always[:, None], most)
    scores = scores.masked_fill((always & (page == there_are[:, None] - 1))[:, None], torch.inf)
    return _Scores(made.view(T, H, n), scores, sequence)


def _by_slot(k: Any, page_layout: Any) -> Tensor:
    """Pages (P, page_size, G, D), of either layout."""
    if not isinstance(k, Tensor) or k.ndim != 4 or not k.is_floating_point():
        raise ValueError(f"k must be a float tensor of pages, of 4 dimensions; got {describe(k)}")
    if page_layout not in ("pshd", "phsd"):
        raise ValueError(f'page_layout must be "pshd" or "phsd"; got {describe(page_layout)}')
    return k.transpose(1, 2) if page_layout == "phsd" else k
