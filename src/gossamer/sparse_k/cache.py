"""What `SparseKAttention` keeps of a sequence from one token to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.sparse_k.operator import sparsek


class Kept(NamedTuple):
    """The keys of the largest scores so far, in no order; empty places have the score -inf and the position -1."""

    k: Tensor  # (B, G, k_keep, D)
    v: Tensor  # (B, G, k_keep, E)
    u: Tensor  # (B, G, k_keep)
    at: Tensor  # (B, G, k_keep) int64: positions


class SparseKCache(NamedTuple):
    """The keys that a later token can still see: `window` of them, and `k_keep`.

    SparseK's threshold follows from the scores of all live keys, u > tau, which are more: of those that are not kept
    the score alone is, in `live`. It holds `k_keep` and more numbers, and grows where the scores lie so close that more
    are live. Tensors are never written again: an older cache goes on from its own token.

    Examples:
        >>> layer = gs.nn.SparseKAttention(dim=32, heads=4, k_keep=8, window=4)
        >>> y, cache = layer.step(torch.randn(1, 32))
        >>> y, cache = layer.step(torch.randn(1, 32), cache)
        >>> cache.position, cache.near_k.shape
        (2, torch.Size([1, 4, 5, 8]))
    """

    position: int  # tokens so far
    near_k: Tensor  # (B, G, window + 1, D): key j at j modulo window + 1
    near_v: Tensor  # (B, G, window + 1, E)
    kept: Kept
    live: Tensor  # (B, G, places): scores, those that are dead among them, and -inf
    tau: Tensor  # (B, G): of the last token
    room: int  # so many tokens fit surely

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(x.nbytes for x in (self.near_k, self.near_v, *self.kept, self.live, self.tau))


def empty(k: Tensor, v: Tensor, u: Tensor, k_keep: int, window: int) -> SparseKCache:
    """That of no tokens; k (B, G, D), v (B, G, E) and u (B, G) are those of any token."""
    B, G = u.shape
    kept = Kept(
        k.new_zeros(B, G, k_keep, k.shape[-1]), v.new_zeros(B, G, k_keep, v.shape[-1]),
        u.new_full((B, G, k_keep), -torch.inf), torch.full((B, G, k_keep), -1, device=u.device),
    )  # fmt: skip
    near_k, near_v = (x.new_zeros(B, G, window + 1, x.shape[-1]) for x in (k, v))
    places = 2 * k_keep + 64
    return SparseKCache(
        0, near_k, near_v, kept, u.new_full((B, G, places), -torch.inf), u.new_full((B, G), -torch.inf), places
    )


def add(cache: SparseKCache, k: Tensor, v: Tensor, u: Tensor, k_keep: int) -> SparseKCache:
    """The cache with one token more."""
    t, ring = cache.position, cache.near_k.shape[2]
    slot = torch.full((), t % ring, device=u.device)
    near_k, near_v = (x.index_copy(2, slot[None], new[:, :, None]) for x, new in ((cache.near_k, k), (cache.near_v, v)))
    live, room = _with_room(cache.live, cache.tau, cache.room)
    # The least score is a dead one, or of an empty place.
    live = live.scatter(2, live.argmin(2, keepdim=True), u[..., None])
    tau = sparsek(live, k_keep).tau
    return SparseKCache(t + 1, near_k, near_v, _kept(cache.kept, k, v, u, t), live, tau, room - 1)


def _kept(kept: Kept, k: Tensor, v: Tensor, u: Tensor, t: int) -> Kept:
    """With the key of token t, where its score is over the least; of equal scores the last key leaves."""
    least = kept.u.amin(2, keepdim=True)
    place = torch.where(kept.u == least, kept.at, -2).argmax(2, keepdim=True)  # (B, G, 1)
    enters = u[..., None] > least

    def put(x: Tensor, new: Tensor) -> Tensor:
        at = place if x.ndim == 3 else place[..., None].expand(-1, -1, -1, x.shape[3])
        into = enters if x.ndim == 3 else enters[..., None]
        return x.scatter(2, at, torch.where(into, new, x.gather(2, at)))

    at = torch.full_like(place, t)
    return Kept(put(kept.k, k[:, :, None]), put(kept.v, v[:, :, None]), put(kept.u, u[..., None]), put(kept.at, at))


def _with_room(live: Tensor, tau: Tensor, room: int) -> tuple[Tensor, int]:
    """Scores with a place for one more, and how many fit surely; the number of live ones is read where none does."""
    if room:
        return live, room
    # The places of dead scores are free for later ones: tau never falls.
    count = int((live > tau[..., None]).sum(2).max())
    if 2 * count > live.shape[2]:
        more = live.new_full((*live.shape[:2], live.shape[2]), -torch.inf)
        live = torch.cat([live, more], 2)
    return live, live.shape[2] - count
