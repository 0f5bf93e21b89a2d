"""SparseK attention over pages against that of each whole sequence, in memory that is NaN where nothing may be read."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.sparse_k.paged import Kept, ScoredPages, attend_each, attend_rows
from gossamer.sparse_k.scored_keys import bits_of, scores_of, with_scores

TYPES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10}  # and their errors


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_scores_behind_keys_are_equal_to_the_last_bit(dtype: torch.dtype) -> None:
    u = torch.randn(2, 50, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    u[0, :4] = torch.tensor([torch.inf, -torch.inf, 1e-38, -0.0])
    k = torch.randn(2, 50, 5).to(dtype)
    scored = with_scores(k, u)
    assert scored.shape == (2, 50, 13) and torch.equal(scored[..., :5], k)
    assert scores_of(bits_of(scored)).tolist() == u.tolist()


class Drawn:
    """Sequences, and their pages."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = draw.choice(list(TYPES))
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        R, self.G, size = draw.randint(1, 4), draw.choice([1, 2]), draw.choice([1, 3, 16])
        D, E = draw.choice([(8, 8), (16, 5), (24, 32)])
        self.used = [draw.randint(0, 60) for _ in range(R)]
        self.new = [draw.randint(0, min(3, n)) for n in self.used]
        pages = [-(-n // size) for n in self.used]
        table = torch.full((R, max(1, *pages) + draw.randint(0, 2)), draw.choice([0, -7, 10**6]), dtype=torch.int32)
        free = torch.randperm(sum(pages) + 3).tolist()
        cache = torch.full((len(free), self.G, size, D + 8 + E), torch.nan, dtype=self.dtype)
        self.sequences: list[tuple[Tensor, Tensor, Tensor]] = []
        for r, n in enumerate(self.used):
            k, v = (torch.randn(self.G, n, x).to(self.dtype) for x in (D, E))
            u = torch.randn(self.G, n, dtype=wide) * draw.choice([0.1, 1, 10])
            if draw.random() < 0.3:
                u = u.round()  # which ties
            if draw.random() < 0.3:
                u[torch.rand_like(u) < 0.3] = -torch.inf
            self.sequences.append((k, v, u))
            rows = torch.cat([with_scores(k, u), v], -1)
            for j in range(n):
                if j % size == 0:
                    table[r, j // size] = free.pop()
                cache[table[r, j // size], :, j % size] = rows[:, j]
        self.edges = torch.tensor([0, *self.new]).cumsum(0).tolist()
        self.q = torch.randn(self.edges[-1] + draw.randint(0, 2), self.G * draw.choice([1, 3]), D).to(self.dtype)
        self.kept = Kept(draw.choice([1, 4, 12, 100]), draw.choice([0, 3, 70]), draw.choice([0.1, 0.4]))
        self.pages = ScoredPages(cache, table, torch.tensor(self.used, dtype=torch.int32))
        self.out = torch.full((*self.q.shape[:2], E), 7.0).to(self.dtype)


@pytest.mark.parametrize("seed", range(40))
def test_pages_against_whole_sequences(seed: int) -> None:
    x = Drawn(seed)
    by_rows, by_sequence = x.out, x.out.clone()
    attend_rows(x.q, torch.tensor(x.edges, dtype=torch.int32), x.pages, x.kept, by_rows)
    attend_each(x.q, x.edges, x.used, x.pages, x.kept, by_sequence)
    assert not by_rows[x.edges[-1] :].any()
    for r, (k, v, u) in enumerate(x.sequences):
        rows = slice(x.edges[r], x.edges[r + 1])
        if rows.start == rows.stop:
            continue
        q = torch.randn(1, x.q.shape[1], x.used[r], x.q.shape[2], dtype=torch.float64)
        q[0, :, -x.new[r] :] = x.q[rows].transpose(0, 1)
        k, v, u = (each[None].double() for each in (k, v, u))
        whole = gs.sparsek_attention(q, k, v, u, **x.kept._asdict())
        wanted = whole[0, :, -x.new[r] :].transpose(0, 1)
        for found in (by_rows[rows], by_sequence[rows]):
            torch.testing.assert_close(found.double(), wanted, atol=TYPES[x.dtype], rtol=TYPES[x.dtype])
