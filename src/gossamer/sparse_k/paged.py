"""SparseK attention over a cache in pages whose keys bring their scores along, by operations of torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.kernels.row_formulas import compute_dtype
from gossamer.sparse_k.attention import sparsek_attention
from gossamer.sparse_k.scored_keys import CHANNELS, bits_of, scores_of


class ScoredPages(NamedTuple):
    """A cache in pages, and what each of R sequences has in it."""

    cache: Tensor  # (P, G, page_size, D + 8 + W): keys with their scores, and values in the first E of W
    table: Tensor  # (R, n) integers
    used: Tensor  # (R,) integers: keys of each sequence


class Kept(NamedTuple):
    """What SparseK attention keeps: options of `sparsek_attention`."""

    k_keep: int
    window: int
    scale: float


def attend_each(q: Tensor, edges: list[int], used: list[int], pages: ScoredPages, kept: Kept, out: Tensor) -> None:
    """Write the attention of the last tokens of each sequence: `sparsek_attention` of one sequence after another.

    Args:
        q: (T, H, D), tokens of all sequences behind one another.
        edges: R + 1 of them.
        used: R, the numbers of pages.used.
        out: (T, H, E).
    """
    D, E, size = q.shape[2], out.shape[2], pages.cache.shape[2]
    for r, n in enumerate(used):
        rows = slice(edges[r], edges[r + 1])
        if rows.start == rows.stop:
            continue
        listed = pages.table[r, : -(-n // size)].long()
        x = pages.cache[listed].transpose(0, 1).flatten(1, 2)[None, :, :n]  # (1, G, n, D + 8 + W)
        u = scores_of(bits_of(x[..., : D + CHANNELS]))
        found = sparsek_attention(
            q[rows].transpose(0, 1)[None], x[..., :D], x[..., D + CHANNELS :][..., :E], u,
            k_keep=kept.k_keep, window=kept.window, scale=kept.scale,
        )  # fmt: skip
        out[rows] = found[0].transpose(0, 1)


def attend_rows(q: Tensor, edges: Tensor, pages: ScoredPages, kept: Kept, out: Tensor) -> None:
    """Write the same for few tokens a sequence, each for itself; rows of no sequence become 0.

    No size follows from a number, so that a captured graph replays it.

    It reads the scores of all keys, and keys and values of the kept ones and the window.

    Args:
        q: (T, H, D).
        edges: (R + 1,) integers.
        out: (T, H, E).
    """
    (T, H, D), (_, G, size, _), E = q.shape, pages.cache.shape, out.shape[2]
    device, n = q.device, pages.table.shape[1] * size
    row = torch.arange(T, device=device)
    of = torch.searchsorted(edges[1:].long().contiguous(), row, right=True).clamp(max=len(pages.used) - 1)
    last = (pages.used.long()[of] - edges.long()[of + 1] + row)[:, None, None]  # the position of each token
    there = (row >= edges[0]) & (row < edges[-1])
    last = torch.where(there[:, None, None], last, -1)

    table, heads = pages.table.long()[of], torch.arange(G, device=device)[:, None]  # (T, n / size)
    j = torch.arange(n, device=device)
    page = torch.where(j <= last[:, 0], table[:, j // size], 0).clamp(0, len(pages.cache) - 1)  # (T, n)
    bits = bits_of(pages.cache[..., : D + CHANNELS])
    u = scores_of(bits[page[:, None], heads, j % size])  # (T, G, n), of all keys
    u = u.masked_fill(j > last, -torch.inf)
    k_keep = min(kept.k_keep, n)
    tau = torch.ops.gossamer.sparsek(u, k_keep)[1][..., None]
    ranked = torch.where(u > -torch.inf, u, -torch.inf).sort(dim=-1, descending=True, stable=True)
    chosen, score = ranked.indices[..., :k_keep], ranked.values[..., :k_keep]
    window = min(kept.window, n)
    begin = last - window
    near = begin + torch.arange(window + 1, device=device)
    index = torch.cat([chosen, near.expand(T, G, -1)], -1)  # (T, G, L)
    seen = torch.cat([(chosen < begin) & (score > -torch.inf), (near >= 0).expand(T, G, -1)], -1)
    gate = torch.cat([(score - tau).clamp(0, 1), torch.ones_like(near, dtype=u.dtype).expand(T, G, -1)], -1)

    safe = torch.where(seen, index, 0)
    page = table[row[:, None, None], safe // size].clamp(0, len(pages.cache) - 1)
    x = pages.cache[page, heads, safe % size].to(compute_dtype(q.dtype))
    x = torch.where(seen[..., None], x, 0)  # (T, G, L, ...): what is not seen may be NaN
    k, v = x[..., :D], x[..., D + CHANNELS :][..., :E]
    s = torch.einsum("tghd,tgld->tghl", q.unflatten(1, (G, H // G)).to(k.dtype), k) * kept.scale
    s = s.masked_fill(~seen[:, :, None], -torch.inf)
    weights = s.softmax(-1) * torch.where(seen, gate, 0)[:, :, None].to(s.dtype)
    found = torch.einsum("tghl,tgle->tghe", weights, v).flatten(1, 2)
    out.copy_(torch.where(there[:, None, None], found, 0))
