"""The cache of `SparseKAttention`: the keys and scores of a sequence that a later token needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.sparse_k.operator import sparsek


class CachedKeys(NamedTuple):
    """The keys of the largest scores so far, in no order; empty places have the score -inf and the position -1."""

    k: Tensor  # (B, G, k_keep, D)
    v: Tensor  # (B, G, k_keep, E)
    u: Tensor  # (B, G, k_keep)
    at: Tensor  # (B, G, k_keep) int64: positions


class SparseKCache(NamedTuple):
    """The keys that a later token can still see: `window` of them, and `k_keep`.

    SparseK's threshold depends on the scores of all live keys, u > tau, which are more than the kept ones: `live`
    holds one number for each, with room for `2 * k_keep + 64`, and grows where scores lie so close that more
    are live. Tensors are never written again, so that an older cache continues from its own token.

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
    kept: CachedKeys
    live: Tensor  # (B, G, places): scores of live keys, and of some that are dead; -inf in empty places
    tau: Tensor  # (B, G): the threshold of the last token
    room: int  # the number of tokens that surely fit

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(x.nbytes for x in (self.near_k, self.near_v, *self.kept, self.live, self.tau))


def empty(k: Tensor, v: Tensor, u: Tensor, k_keep: int, window: int) -> SparseKCache:
    """An empty cache for tokens like k (B, G, D), v (B, G, E) and u (B, G)."""
    B, G = u.shape
    kept = CachedKeys(
        k.new_zeros(B, G, k_keep, k.shape[-1]), v.new_zeros(B, G, k_keep, v.shape[-1]),
        u.new_full((B, G, k_keep), -torch.inf), torch.full((B, G, k_keep), -1, device=u.device),
    )  # fmt: skip
    near_k, near_v = (x.new_zeros(B, G, window + 1, x.shape[-1]) for x in (k, v))
    places = 2 * k_keep + 64
    return SparseKCache(
        0, near_k, near_v, kept, u.new_full((B, G, places), -torch.inf), u.new_full((B, G), -torch.inf), places
    )


def add(cache: SparseKCache, k: Tensor, v: Tensor, u: Tensor, k_keep: int) -> SparseKCache:
    """The cache with one more token."""
    t, ring = cache.position, cache.near_k.shape[2]
    slot = torch.full((), t % ring, device=u.device)
    near_k, near_v = (x.index_copy(2, slot[None], new[:, :, None]) for x, new in ((cache.near_k, k), (cache.near_v, v)))
    live, room = _with_room(cache.live, cache.tau, cache.room)
    # The least score is that of a dead key, or of an empty place.
    live = live.scatter(2, live.argmin(2, keepdim=True), u[..., None])
    tau = sparsek(live, k_keep).tau
    return SparseKCache(t + 1, near_k, near_v, _replace_least(cache.kept, k, v, u, t), live, tau, room - 1)


def _replace_least(kept: CachedKeys, k: Tensor, v: Tensor, u: Tensor, t: int) -> CachedKeys:
    """The kept keys, with that of token t instead of the least one if its score is larger; of equals the last goes."""
    least = kept.u.amin(2, keepdim=True)
    place = torch.where(kept.u == least, kept.at, -2).argmax(2, keepdim=True)  # (B, G, 1)
    enters = u[..., None] > least

    def put(x: Tensor, new: Tensor) -> Tensor:
        at = place if x.ndim == 3 else place[..., None].expand(-1, -1, -1, x.shape[3])
        into = enters if x.ndim == 3 else enters[..., None]
        return x.scatter(2, at, torch.where(into, new, x.gather(2, at)))

    at = torch.full_like(place, t)
    return CachedKeys(
        put(kept.k, k[:, :, None]), put(kept.v, v[:, :, None]), put(kept.u, u[..., None]), put(kept.at, at)
    )


def _with_room(live: Tensor, tau: Tensor, room: int) -> tuple[Tensor, int]:
    """(scores with a free place, how many more surely fit); the host reads the number of live keys where it must."""
    if room:
        return live, room
    # The places of dead scores are free for later ones: tau never falls.
    count = int((live > tau[..., None]).sum(2).max())
    if 2 * count > live.shape[2]:
        more = live.new_full((*live.shape[:2], live.shape[2]), -torch.inf)
        live = torch.cat([live, more], 2)
    return live, live.shape[2] - count
