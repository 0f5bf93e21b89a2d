"""The cache of `SparseKAttention`: the keys and scores of sequences that a later token needs, in memory that is written
in place.

Entries are appended in the order of their positions, so that the last ones are the window. One that has left it and is
not among the k largest scores never returns: it stays where it is, with no weight, until the memory is full. Then the
entries that are needed move together. A sequence that got fewer tokens than others has empty entries before its first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.checks import integer
from gossamer.sparse_k.launch.problem import Operands

MORE = 64  # places beside those that are needed, and the fewest


class Entries(NamedTuple):
    """Keys with their scores and positions; an empty one has the score -inf and the position -1."""

    k: Tensor  # (B, G, n, D)
    v: Tensor  # (B, G, n, E)
    u: Tensor  # (B, G, n)
    at: Tensor  # (B, G, n) int64

    def picked(self, index: Tensor) -> Entries:
        """Those of an index (B, G, m), or one that expands to it; empty ones where it is negative."""
        index = index.expand(*self.u.shape[:2], -1)
        none, safe = index < 0, index.clamp(min=0)

        def of(x: Tensor, empty: float) -> Tensor:
            if x.ndim == 3:
                return x.gather(2, safe).masked_fill(none, empty)
            return x.gather(2, safe[..., None].expand(-1, -1, -1, x.shape[3])).masked_fill(none[..., None], empty)

        return Entries(of(self.k, 0), of(self.v, 0), of(self.u, -torch.inf), of(self.at, -1))


class SparseKCache:
    """The keys that a later token can still see: those of the window, and `k_keep` before these.

    SparseK's threshold depends on the scores of all live keys, u > tau, which are more than the kept ones: one number
    is held for each, with room for `2 * k_keep + 64`, which doubles where scores lie so close that more are live.

    A call that is given a cache writes into its memory: the cache then holds the new tokens, and what it was before is
    `copy()`, made before that call.

    Examples:
        >>> layer = gs.nn.SparseKAttention(dim=32, heads=4, k_keep=8, window=4)
        >>> with torch.no_grad():
        ...     y, cache = layer.prefill(torch.randn(2, 50, 32), lengths=[50, 7])
        ...     y, cache = layer.step(torch.randn(2, 32), cache)
        >>> cache.lengths
        tensor([51,  8])
    """

    lengths: Tensor  # (B,) int64: the tokens of each sequence so far
    tau: Tensor  # (B, G): the threshold of the last token

    def __init__(self, like: Entries, k_keep: int, window: int) -> None:
        """An empty cache for tokens like these."""
        k_keep, window = integer("k_keep", k_keep, minimum=1), integer("window", window, minimum=0)
        self.k_keep, self.window = k_keep, window
        self._entries, self._filled = Entries(*(x[:, :, :0].detach() for x in like)), 0
        self._live, self._scored, self._room = self._entries.u, 0, 2 * k_keep + MORE
        self._most = k_keep + window + max(MORE, (k_keep + window) // 4)
        self._ragged = False
        self.tau = like.u.new_full(like.u.shape[:2], -torch.inf)
        self.lengths = like.at.new_zeros(len(like.at))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(x.nbytes for x in (*self._entries, self._live, self.tau, self.lengths))

    @property
    def entries(self) -> Entries:
        """The keys in memory, in the order of their positions: those that a later token can see, and some others."""
        return Entries(*(x[:, :, : self._filled] for x in self._entries))

    @property
    def live(self) -> Tensor:
        """(B, G, n): the scores of live keys, and of some that are dead; -inf in empty places."""
        return self._live[:, :, : self._scored]

    def kept(self) -> Tensor:
        """(B, G, n) bool: which entries are among the `k_keep` largest scores so far; of equal ones the earlier is."""
        u = self.entries.u.detach()
        u = torch.where(u > -torch.inf, u, -torch.inf)  # NaN is not kept
        largest = u.sort(dim=2, descending=True, stable=True).indices[..., : self.k_keep]
        return torch.zeros_like(u, dtype=torch.bool).scatter_(2, largest, True) & (u > -torch.inf)

    def copy(self) -> SparseKCache:
        """A cache of the same tokens with memory of its own."""
        made = SparseKCache(self._entries, self.k_keep, self.window)
        made.__dict__.update(self.__dict__)
        made._entries, made._live = Entries(*(x.clone() for x in self._entries)), self._live.clone()
        return made

    def add(self, q: Tensor, tokens: Entries, lengths: Tensor | None) -> Operands:
        """Append tokens, and give the call of their queries over all that is held; its last queries are these.

        Args:
            q: (B, H, m, D).
            tokens: (B, G, m), m at least 1.
            lengths: (B,) in [0, m]: how many of its tokens each sequence has; None: all. As the queries of the call the
                last ones of each sequence are its tokens.
        """
        m, before, shift = q.shape[2], self.tau, None
        held = (q, *tokens, *self._entries, self._live, self.tau)
        fresh = torch.is_grad_enabled() and any(x.requires_grad for x in held)  # autograd keeps what was there
        u = tokens.u
        if lengths is None:
            self._append(tokens, fresh)
            self.lengths = self.lengths + m
        else:
            shift = (m - lengths)[:, None, None]
            both = Entries(*(torch.cat(x, 2) for x in zip(self.entries, tokens, strict=True)))
            place = torch.arange(both.u.shape[2], device=q.device) - shift
            self._entries, self._filled, self._ragged = both.picked(place), both.u.shape[2], True
            of_query = torch.arange(m, device=q.device) - shift
            u = self.entries.u[:, :, -m:].masked_fill(of_query < 0, -torch.inf)
            q = q.gather(2, of_query.clamp(min=0)[..., None].expand(q.shape))
            self.lengths = self.lengths + lengths
        tau = torch.maximum(self._thresholds(u, fresh), before[..., None])
        self.tau = tau[..., -1]
        x = self.entries
        n = x.u.shape[2]
        if m == 1:
            last = torch.where(self.kept(), n - 1, -1).int()
        else:
            last = torch.ops.gossamer.last_topk(x.u.detach().contiguous(), min(self.k_keep, n))
        of_steps = torch.cat([tau.new_zeros(*tau.shape[:2], n - m), tau], 2)
        self._shorten()
        return Operands(q, x.k, x.v, x.u, of_steps, last, last, x.at < 0 if self._ragged else None)

    def _append(self, tokens: Entries, fresh: bool) -> None:
        if self._filled + tokens.u.shape[2] > self._most:
            self._entries = self._needed()
            self._filled = self._entries.u.shape[2]
        pairs = zip(self._entries, tokens, strict=True)
        self._entries = Entries(*(_put(x, self._filled, new, self._most, fresh) for x, new in pairs))
        self._filled += tokens.u.shape[2]

    def _shorten(self) -> None:
        """Drop what no later token sees where there is no room for more."""
        if self._filled > self._most:
            self._entries = self._needed()
            self._filled = self._entries.u.shape[2]
        if self._scored >= self._room:
            # tau never falls, and of a dead score nothing is needed. NaN stays, so that it shows.
            alive = ~(self.live <= self.tau[..., None]) & (self.live != -torch.inf)
            count = int(alive.sum(2).max()) if alive.numel() else 0
            while 2 * count > self._room:
                self._room *= 2
            self._live = self.live.masked_fill(~alive, -torch.inf).sort(2, descending=True).values[..., :count]
            self._scored = count

    def _needed(self) -> Entries:
        """The entries that a later token may see: `k_keep` before the window, and the window."""
        n = self._filled
        begin = max(n - self.window, 0)
        if begin <= self.k_keep:
            return self.entries
        place = torch.arange(n, device=self.tau.device)
        kept = torch.where(self.kept()[..., :begin], place[:begin], -1).sort(2).values[..., begin - self.k_keep :]
        return self.entries.picked(torch.cat([kept, place[begin:].expand(*kept.shape[:2], -1)], 2))

    def _thresholds(self, u: Tensor, fresh: bool) -> Tensor:
        """(B, G, m) of new scores (B, G, m), from these and the live ones."""
        self._live = _put(self._live, self._scored, u, self._room, fresh)
        self._scored += u.shape[2]
        scores, k = self.live.contiguous(), min(self.k_keep, self._scored)
        if u.shape[2] == 1:
            tau: Tensor = torch.ops.gossamer.sparsek(scores, k)[1][..., None]
        else:
            tau = torch.ops.gossamer.sparsek_causal(scores, k)[0][..., -u.shape[2] :]
        return tau


def _put(x: Tensor, filled: int, new: Tensor, most: int, fresh: bool) -> Tensor:
    """x with new entries from `filled` on: in its own memory, or where that is full, in twice of it, up to `most`."""
    n = filled + new.shape[2]
    if fresh:
        return torch.cat([x[:, :, :filled], new], 2)
    if n > x.shape[2] or (x.is_inference() and not torch.is_inference_mode_enabled()):
        places = max(n, min(most, max(2 * n, MORE)))
        grown = x.new_empty(*x.shape[:2], places, *x.shape[3:])
        grown[:, :, :filled] = x[:, :, :filled]
        x = grown
    x[:, :, filled:n] = new
    return x
