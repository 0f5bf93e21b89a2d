"""The family `lists`: random calls of attention over `Indices` and `BlockIndices`, joined with others."""

from __future__ import annotations

import random
from typing import Any

import soak_structure
import torch
from soak_outcomes import Outcome
from soak_structure import Call, Profile, Told, integers, joined, kept_by, rule
from torch import Tensor

import gossamer as gs

PROFILE = Profile(
    ("Indices", "Indices", "BlockIndices"), (1, 2, 7, 31, 33, 64, 65, 100, 130, 200), 60_000,
    ("indices of floats", "indices of another length", "counts of another shape", "an entry that does not exist"),
)  # fmt: skip


def draw(seed: int, device: str) -> Call:
    """The call of a seed, which is the same on every machine."""
    return soak_structure.draw("lists", PROFILE, seed, device)


def run(c: Call) -> Outcome:
    """Compute a call and compare it with the definition."""
    return soak_structure.run(c, _told)


def _told(c: Call, r: random.Random, four: list[Tensor], _: list[Tensor]) -> Told:
    B, H, G, Q, K, _, _ = c.shape
    block = 1 if c.kind == "Indices" else r.choice([64, 128])
    rows, entries = -(-Q // block), -(-K // block)
    heads, batch = r.choice([1, G, G, H]), r.choice([1, B])
    n = r.choice([0, 1, 2, 5, 12, 40]) if block == 1 else r.choice([1, 2, 4])
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    index = torch.randint(-1, entries, (batch, heads, rows, n), generator=generator)
    kind = r.choice(["any", "any", "distinct", "same", "absent", "none"])
    if kind == "distinct":
        order = torch.rand((batch, heads, rows, entries), generator=generator).argsort(-1)[..., :n]
        index = torch.cat([order, order.new_full((batch, heads, rows, n - order.shape[-1]), -1)], -1)
    elif kind == "same":
        index = index[..., :1].expand(index.shape).clone() if n else index
    elif kind == "absent":  # what does not exist is left out
        index = torch.where(torch.rand(index.shape, generator=generator) < 0.3, entries + 3 * index.abs(), index)
    elif kind == "none":
        index = torch.where(torch.rand((batch, heads, rows, 1), generator=generator) < 0.5, -1, index)
    counts = None
    if r.random() < 0.35:
        counts = torch.randint(0, n + 3, (batch, heads, rows), generator=generator)
    there = (index >= 0) & (index < entries)
    if counts is not None:
        there = there & (torch.arange(n) < counts[..., None])
    chosen = torch.zeros((batch, heads, rows, entries + 1), dtype=torch.bool)
    chosen = chosen.scatter(-1, torch.where(there, index, entries), True)[..., :entries]
    kept = chosen.repeat_interleave(block, 2)[:, :, :Q].repeat_interleave(block, 3)[..., :K]
    kept = kept.repeat_interleave(H // heads, 1).expand(B, H, Q, K).to(c.device)

    index = index.to(r.choice([torch.int32, torch.int64])).to(c.device)
    if r.random() < 0.2:
        index = index.mT.contiguous().mT
    if counts is not None:
        counts = counts.to(r.choice([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])).to(c.device)
    drop = 0
    while drop < 2 and index.shape[0] == 1 and (drop or r.random() < 0.5) and index.ndim > 2:
        if drop and (index.shape[0] != 1 or r.random() < 0.5):
            break
        index, drop = index[0], drop + 1
        counts = None if counts is None else counts[0]
    if c.mistake == "indices of floats":
        index = index.float()
    elif c.mistake == "indices of another length":
        index = torch.cat([index, index], -2)
        counts = None if counts is None else torch.cat([counts, counts], -1)
    elif c.mistake == "counts of another shape":
        counts = torch.ones((*index.shape[:-1], 2), dtype=torch.int32, device=c.device)
    check = c.mistake == "an entry that does not exist"
    if check:
        index = torch.cat([index, index.new_full((*index.shape[:-1], 1), entries)], -1)
        counts = None
    structure: Any
    if block == 1:
        structure = gs.Indices(index, counts, check=check)
    else:
        structure = gs.BlockIndices(index, block, counts, check=check)
    spec, options = rule(r, True), {}
    offset = K - Q
    if r.random() < 0.25:
        offset = options["q_offset"] = r.choice([0, 5, -3, K, r.randrange(-K, 2 * K)])
    pattern = joined(r, structure, spec, Q, K)
    kept = kept & (kept_by(spec, Q, K, [offset], c.device) > 0)
    if r.random() < 0.15:
        ids = torch.randint(0, 2, (r.choice([1, B]), K), generator=generator).cumsum(1)
        ids = ids[0] if len(ids) == 1 and r.random() < 0.5 else ids
        i = torch.arange(Q) + offset
        inside = (i >= 0) & (i < K)
        mine = ids.expand(B, K)
        at = mine[:, i.clamp(0, K - 1)]
        same = (at[:, :, None] == mine[:, None]) & inside[:, None]
        kept = kept & same[:, None].to(c.device)
        pattern = pattern & gs.DocumentIds(ids.to(c.device))
    if r.random() < 0.2:
        lengths = [r.choice([0, 1, K // 2, K, K + 3, -2]) for _ in range(B)]
        options["key_lengths"] = integers(r, lengths, c.device)
        j, end = torch.arange(K, device=c.device), torch.tensor(lengths, device=c.device).clamp(0, K)
        kept = kept & (j < end[:, None, None, None])
    if r.random() < 0.15:
        starts = [r.choice([0, 1, K // 2, K, -2]) for _ in range(B)]
        options["key_starts"] = integers(r, starts, c.device)
        j, begin = torch.arange(K, device=c.device), torch.tensor(starts, device=c.device).clamp(0, K)
        kept = kept & (j >= begin[:, None, None, None])
    text = f"{pattern!r}, {kind}, {spec}, {options}"
    return Told(pattern, options, kept.long(), text, four)
