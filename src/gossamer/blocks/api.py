"""Key blocks by their scores, for each block of queries."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.blocks.checks import checked
from gossamer.blocks.lists import Taken
from gossamer.blocks.operator import by_kernels, choose, takes
from gossamer.blocks.scores import row_bounds
from gossamer.memo import Memo
from gossamer.patterns.reach import Reach, rule
from gossamer.plan.problem import Unsupported
from gossamer.torch.arguments import (
    Arguments,
    AttentionOptions,
    Layout,
    cast_type,
    check_types,
    describe,
    four_dimensional,
    is_bshd,
    validate,
    whole,
)
from gossamer.torch.key import SIMPLE, Key, facts, places, plain
from gossamer.torch.recording import Repeats
from gossamer.torch.scale import with_number
from gossamer.torch.structure import BlockIndices

CAUSAL = rule(Reach(right=0))


class SelectedBlocks(BlockIndices):
    """The result of `topk_blocks`: `BlockIndices`, causal where they were chosen so, and how much they cover.

    Attributes:
        indices: (B, heads, T, n) int32, T = ceil(Q / block_size), heads H or, where a group shares its list, G. Blocks
            that are always kept come first, then the others by their score; -1 where fewer are kept.
        covered: (B, heads, T) float32, the share of the softmax over the scores of all visible blocks that the chosen
            ones hold. Less than `top_p` where `topk` left no room for more.
    """

    covered: Tensor

    def __init__(self, indices: Tensor, covered: Tensor, choice: Choice) -> None:
        self._take(indices, None, False)
        self.block_size, self.covered, self._choice = choice.block_size, covered, choice
        if choice.causal:
            self.rule = CAUSAL

    def __repr__(self) -> str:
        return f"SelectedBlocks({tuple(self.indices.shape)}, {self.block_size}, causal={self._choice.causal})"

    def kept_mass(self, lse: Tensor) -> Tensor:
        """A certified lower bound of the probability that each row keeps: of its attention over all visible keys.

        With L the lse of the kept keys and b_c the bound of a row's scores in block c, no score in c is over b_c, so
        that the dropped keys weigh at most X = sum of n_c * exp(b_c) over the visible dropped blocks of n_c visible
        keys each, and the row keeps at least exp(L) / (exp(L) + X).

        Rounding is on the safe side. Bounds are computed again, row by row, in float64, some blocks of queries at a
        time. Of `lse` an error of up to u * ((2 D + 64) S + 4 |lse| + K / 16 + 320) is taken off, with u = 2**-24
        (2**-53 of float64) and S = |scale| * sum_d |q_d| max_j |k_jd|: D products and sums of a score of which no part
        is over S, its scale and its exponential, a sum of K terms tile by tile, the logarithm, and as much again.

        Args:
            lse: (B, H, Q), of `attention` of the same q, k and scale over this selection, without other score terms,
                `q_offset` or lengths, and under autocast where they were chosen so; float32, or float64 of float64
                inputs. The tensors q and k are read again.

        Returns:
            Of lse's shape and type, in [0, 1]; 1 of a row that drops nothing that it could see.

        Raises:
            Unsupported: the blocks were chosen with another score than "bound".
            ValueError: `lse` is no such tensor.

        Examples:
            >>> q, k, v = (torch.randn(1, 2, 256, 32) for _ in range(3))
            >>> chosen = gs.topk_blocks(q, k, topk=3, causal=True, score="bound")
            >>> out, lse = gs.attention(q, k, v, chosen, return_lse=True)
            >>> every = gs.attention(q, k, v, gs.Causal(), return_lse=True)[1]
            >>> bool((chosen.kept_mass(lse) <= (lse - every).exp() * (1 + 1e-5)).all())
            True
        """
        choice = self._choice
        if choice.score != "bound":
            raise Unsupported(
                f'kept_mass needs blocks that were chosen with score="bound", which bounds every score; '
                f"these were chosen with score={choice.score!r}"
            )
        q, k, block = choice.q, choice.k, choice.block_size
        (B, H, Q, D), (_, G, K, _) = q.shape, k.shape
        shape = (B, H, Q)[3 - (choice.dims - 1) :]
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if not isinstance(lse, Tensor) or lse.shape != shape or lse.dtype != wanted or lse.device != q.device:
            raise ValueError(f"lse must be a tensor of shape {shape}, {wanted}, on {q.device}; got {describe(lse)}")
        if 0 in q.shape or 0 in k.shape:
            return torch.ones_like(lse)  # nothing is dropped
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            L = lse.detach().double().reshape(B, G, H // G, Q)
            unit = torch.finfo(lse.dtype).eps / 2
            largest = k.abs().amax(2).double()  # (B, G, D)
            # The heads of a group, or 1; blocks as rows have them.
            dropped = ~self._kept(-(-K // block)).unflatten(1, (G, -1))
            shares = []
            for rows in row_bounds(q, k, block, choice.scale, torch.float64):
                seen = self._keys_seen(rows.first, rows.end, Q, K)
                left = dropped[:, :, :, rows.first // block : -(-rows.end // block)].repeat_interleave(block, 3)
                left = left[:, :, :, : rows.end - rows.first] & (seen > 0)
                heaviest = rows.bounds + seen.clamp(min=1).double().log()
                weight = heaviest.masked_fill(~left, -torch.inf).logsumexp(-1)
                part = q[:, :, rows.first : rows.end].double().abs().unflatten(1, (G, -1))
                size = abs(choice.scale) * (part * largest[:, :, None, None]).sum(-1)  # S
                kept = L[..., rows.first : rows.end]
                kept = kept - unit * ((2 * D + 64) * size + 4 * kept.abs() + K / 16 + 320)
                # Bounds and this sum in float64: D products, C terms.
                weight = weight + 2.0**-52 * ((2 * D + 8) * size + weight.abs() + seen.shape[1] + 1024)
                share = torch.sigmoid(kept - weight) * (1 - 16 * unit - 2.0**-40)
                share = torch.where(share >= torch.finfo(lse.dtype).tiny, share, 0.0)  # what is less is rounded up, too
                shares.append(torch.where(left.any(-1), share, 1.0))
            return torch.cat(shares, 3).to(lse.dtype).reshape(shape)

    def _kept(self, C: int) -> Tensor:
        """(B, heads, T, C) bool: the chosen blocks."""
        index = torch.where(self.indices < 0, C, self.indices).long()
        kept = torch.zeros((*index.shape[:3], C + 1), dtype=torch.bool, device=index.device)
        return kept.scatter(3, index, torch.ones_like(index, dtype=torch.bool))[..., :C]

    def _keys_seen(self, first: int, end: int, Q: int, K: int) -> Tensor:
        """(rows, C): the number of keys of each block that each row sees."""
        block, device = self.block_size, self.indices.device
        start = torch.arange(0, K, block, device=device)
        stop = (start + block).clamp(max=K).expand(end - first, -1)
        if self._choice.causal:
            position = torch.arange(first, end, device=device)[:, None] + (K - Q)
            stop = torch.minimum(stop, position + 1)
        return (stop - start).clamp(min=0)


class Choice(NamedTuple):
    """The tensors and options from which blocks were chosen."""

    q: Any  # (B, H, Q, D); None of a call that is kept
    k: Any
    dims: int  # the dimensions of the q that was given
    block_size: int
    causal: bool
    score: str
    scale: float
    cast: torch.dtype | None  # the type of autocast, to which q and k were rounded


def topk_blocks(
    q: Tensor, k: Tensor, *, causal: bool, block_size: int = 64, topk: int | None = None, top_p: float | None = None,
    score: Literal["mean", "bound"] = "mean", local: int = 1, first: int = 1, per: Literal["head", "group"] = "head",
    scale: float | Tensor | None = None, layout: Layout = "bhnd",
) -> SelectedBlocks:  # fmt: skip
    """The key blocks of the highest scores for each block of queries, as a pattern that `attention` takes.

    `per="head"`, a list for every query head, is the choice of video sparse attention (VSA) and, but for whole blocks
    of queries instead of single ones, of MoBA; `per="group"`, one list for the query heads of a key head, that of NSA.
    Kept are first the blocks that always are, then those of the highest scores, equal ones by ascending position:
    `topk` in all or as many as reach `top_p`. Nothing is read back to the host, the result has sizes that follow from
    those of q and k, and it is a constant: no gradient passes through the choice.

    Scores are scaled as those of attention and computed in float32 (of float64 inputs in float64, and compared in
    float32); under autocast q and k are rounded to its type first, as `attention` does. Memory is that of (T, C)
    blocks.

    - "mean": the mean query of a block and the mean key, over the positions that it has. In a group the mean of heads.
    - "bound": an upper bound of every score q_i . k_j of the pair of blocks, from the least and the largest value of
      each dimension of its keys, as in Quest: the largest of its rows, and of the heads of a group. Some blocks of
      queries at a time. With it `kept_mass` of the result says how much probability is kept at least.

    Args:
        q, k: (B, H, Q, D) and (B, G, K, D), or as `attention` takes them; float16, bfloat16, float32, float64.
        causal: whether a row sees keys up to its position alone. Then blocks that no row of the block of queries sees
            are not chosen, and what is returned has `Causal` in it, aligned at the end as that is.
        block_size: of queries and keys: 64 or 128.
        topk: the most key blocks of a list, those that are always kept included; a hard limit, over which `top_p` does
            not go. None, with `top_p`: all.
        top_p: in (0, 1]: the least number of blocks whose part of the softmax over the scores of all visible blocks
            reaches it, after those that are always kept. `covered` of the result says what was reached.
        score: "mean" or "bound".
        local: the key block, or two, at the positions of the block of queries, and `local` - 1 before it (and after it,
            unless causal) are always kept; 0 for none.
        first: so many first blocks are always kept.
        per: "head" or "group".
        scale: of the scores, as in `attention`, whose it is; None for D ** -0.5.
        layout: as `attention` has it.

    Raises:
        ValueError: an argument is none of these, or `topk` leaves no room for the blocks that are always kept.

    Examples:
        >>> q, k, v = (torch.randn(1, 4, 1024, 64) for _ in range(3))
        >>> chosen = gs.topk_blocks(q, k, topk=4, causal=True)
        >>> chosen.indices.shape
        torch.Size([1, 4, 16, 4])
        >>> gs.attention(q, k, v, chosen).shape
        torch.Size([1, 4, 1024, 64])
        >>> most = gs.topk_blocks(q, k, top_p=0.9, topk=8, causal=True)
        >>> bool((most.covered >= 0.9).logical_or((most.indices >= 0).all(-1)).all())
        True
    """
    if isinstance(scale, Tensor):
        with torch.no_grad():
            q, scale = with_number(q, scale)
    options = causal, block_size, topk, top_p, score, local, first, per, scale, layout
    key = None if torch.compiler.is_compiling() or not plain(q, k) else _key(q, k, options)
    call = None if key is None else known.get(key)
    if call is None:
        call = _call(q, k, *options)
        if key is not None:
            call = known.put(key, call.keep(q, k))
    return call(q, k)


def _key(q: Tensor, k: Tensor, options: tuple[Any, ...]) -> Key | None:
    """What tells calls apart, of tensors that are plain; None where options are no numbers of Python."""
    types, of_tensors = tuple(map(type, options)), facts(q, k)
    if of_tensors is None or None in of_tensors or not SIMPLE.issuperset(types):
        return None
    return *of_tensors, places(q, k), *options, *types


class BlocksCall:
    """Chooses the blocks of every call of one key, which was checked; it keeps no tensor."""

    def __init__(self, options: tuple[Any, ...], choice: Choice, bshd: bool) -> None:
        """A call with the `options` of `by_operations`, and a choice without q and k."""
        self.options, self.choice, self.bshd = options, choice, bshd
        self._kernels: Repeats | None = None  # of a call that comes again

    def keep(self, q: Tensor, k: Tensor) -> Self:
        """Itself, which calls like this one find by their key."""
        if self.bshd or self.choice.dims != 4:
            q, k, _ = four_dimensional(q, k, k, self.bshd)
        block, n, *_ = self.options
        if 0 not in q.shape and 0 not in k.shape and takes(q, -(-k.shape[2] // block), n):
            self._kernels = Repeats()
        return self

    def __call__(self, q: Tensor, k: Tensor) -> SelectedBlocks:
        """The chosen blocks, a constant."""
        q, k = q.detach(), k.detach()
        if self.bshd or self.choice.dims != 4:
            q, k, _ = four_dimensional(q, k, k, self.bshd)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            q, k = (x.to(self.choice.cast or x.dtype) for x in (q, k))
            if self._kernels is None:
                chosen = choose(q, k, *self.options)
            else:
                chosen = Taken(*self._kernels(partial(by_kernels, q, k, *self.options), (q, k)))
        return SelectedBlocks(*chosen, self.choice._replace(q=q, k=k))


known: Memo[BlocksCall] = Memo()


def _call(
    q: Any, k: Any, causal: Any, block_size: Any, topk: Any, top_p: Any, score: Any, local: Any, first: Any, per: Any,
    scale: Any, layout: Any,
) -> BlocksCall:  # fmt: skip
    """The call of these arguments.

    Raises:
        ValueError: one of them is wrong.
    """
    check_types(q, k, k, AttentionOptions(scale))
    bshd, dims = is_bshd(layout), q.ndim
    if k.ndim != dims or not 2 <= dims <= 4:
        raise ValueError(
            "q and k must both have 2, 3 or 4 dimensions: (N, D), (H, N, D) or (B, H, N, D); got shapes "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    q, k, _ = four_dimensional(q.detach(), k.detach(), k.detach(), bshd)
    validate(Arguments(q, k, k, None, None, None, None, None, scale, None, None, False, False, bshd))
    block_size, n, local, first = checked(
        q.shape[2], k.shape[2], causal, block_size, topk, top_p, score, local, first, per, whole, describe
    )
    factor = float(q.shape[3] ** -0.5 if scale is None else scale)
    options = (block_size, n, factor, per == "group", score == "bound", causal, local, first, top_p)
    choice = Choice(None, None, dims, block_size, causal, score, factor, cast_type(q))
    return BlocksCall(options, choice, bshd)
