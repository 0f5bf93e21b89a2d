"""A table of pages for each key head: as where each head chooses pages of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.plan.problem import Unsupported
from gossamer.torch import paged
from tests.support.processes import INTERPRETING, in_interpreter, triton_on_a_cpu
from tests.support.thorough import more

PATTERNS = {"causal": gs.Causal(), "dense": None, "window": gs.SlidingWindow(20, sinks=3)}
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Drawn(NamedTuple):
    """A call, and where the keys of a sequence and a head lie."""

    q: Tensor  # (T, H, D)
    k: Tensor  # (P, size, G, D)
    v: Tensor
    cu: Tensor
    table: Tensor  # (R, G, n)
    used: Tensor  # (R, G)


def drawn(seed: int, dtype: torch.dtype, device: str = "cpu", G: int = 2, ratio: int = 3) -> Drawn:
    """Sequences of a few tokens, of which a head has at least as many keys; what nobody sees is NaN."""
    r = random.Random(seed)
    size, lengths = r.choice([4, 16, 64]), [r.choice([0, 1, 1, 3]) for _ in range(3)]
    n = r.choice([2, 3, 5])
    used = torch.tensor([[r.randint(length, n * size) for _ in range(G)] for length in lengths])
    P = 3 * G * n + 2
    table = torch.randperm(P, generator=torch.Generator().manual_seed(seed))[: 3 * G * n].view(3, G, n)
    k, v = (torch.full((P, size, G, 8), torch.nan, dtype=torch.float64) for _ in range(2))
    for s in range(3):
        for g in range(G):
            for page, number in enumerate(table[s, g].tolist()):
                there = max(0, min(size, int(used[s, g]) - page * size))
                for x in (k, v):
                    x[number, :there, g] = torch.randn(there, 8, dtype=torch.float64)
                if not there:
                    table[s, g, page] = r.choice([-1, P, 2**31 - 1])
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    q = torch.randn(int(cu[-1]), G * ratio, 8, dtype=torch.float64)
    kind = r.choice([torch.int32, torch.int64])
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    return Drawn(q, k, v, cu.int().to(device), table.to(kind).to(device), used.to(kind).to(device))


def exact(x: Drawn, pattern: gs.Pattern | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64: each sequence and each head apart."""
    q, k, v = (y.double().cpu() for y in x[:3])
    out, lse = torch.zeros_like(q), torch.full(q.shape[1::-1], -torch.inf, dtype=torch.float64)
    size, ratio, cu, used, table = (
        k.shape[1],
        q.shape[1] // k.shape[2],
        x.cu.tolist(),
        x.used.tolist(),
        x.table.tolist(),
    )
    for s, (first, end) in enumerate(pairwise(cu)):
        for g in range(k.shape[2]):
            keys = [(table[s][g][j // size], j % size) for j in range(used[s][g])]
            at = torch.arange(len(keys) - (end - first), len(keys))[:, None]
            j = torch.arange(len(keys))
            keep = torch.ones(end - first, len(keys), dtype=torch.bool)
            if pattern is not None:
                keep = j <= at
            if isinstance(pattern, gs.SlidingWindow):
                keep &= (j >= at - 20) | (j < 3)
            ks, vs = (torch.stack([y[n, t, g] for n, t in keys]) if keys else y.new_zeros(0, 8) for y in (k, v))
            for h in range(g * ratio, (g + 1) * ratio):
                scores = (q[first:end, h] @ ks.T * 8**-0.5).masked_fill(~keep, -torch.inf)
                sum_ = scores.logsumexp(-1)
                if sinks is not None:
                    sum_ = torch.logaddexp(sum_, sinks[h].double().cpu())
                weight = torch.where(keep, (scores - sum_[:, None]).exp(), 0.0)
                out[first:end, h], lse[h, first:end] = weight @ vs, sum_
    return out, lse


def check(seed: int, name: str, dtype: torch.dtype, device: str = "cpu", *, shared: bool, sinks: bool) -> None:
    torch.manual_seed(seed)
    x, pattern = drawn(seed, dtype, device), PATTERNS[name]
    logits = torch.randn(x.q.shape[1], device=device) if sinks else None
    layout: Any = random.Random(seed).choice(["pshd", "phsd"])
    k, v = (y.transpose(1, 2).contiguous() if layout == "phsd" else y for y in (x.k, x.v))
    if shared:
        pages = gs.Pages(x.table, x.used, x.k.shape[1], page_layout=layout)
        packed = gs.PackedSequences(x.cu, pages=pages, pattern=pattern)
        step = gs.device_layout(x.q, k, v, packed, layout="bshd")
        out, lse = gs.attention(x.q, k, v, step, sink_logits=logits, return_lse=True, layout="bshd")
    else:
        out, lse = gs.varlen(
            x.q, k, v, x.cu, pattern=pattern, block_table=x.table, seqused_k=x.used, page_layout=layout,
            sink_logits=logits, return_lse=True, out=torch.full_like(x.q, torch.nan),
        )  # fmt: skip
    for found, wanted in zip((out, lse), exact(x, pattern, logits), strict=True):
        found = found.double().cpu()
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), finite)
        assert torch.allclose(found[finite], wanted[finite], atol=LIMITS[dtype], rtol=LIMITS[dtype])


if INTERPRETING:

    @pytest.fixture
    def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        yield from triton_on_a_cpu(monkeypatch, paged, "paged_layout")

    @pytest.mark.parametrize("name", PATTERNS)
    @pytest.mark.parametrize("seed", range(3))
    def test_by_the_kernel(on_a_cpu: None, seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def apart(*_: Any) -> Any:
            raise AssertionError("heads were computed apart")

        monkeypatch.setattr("gossamer.torch.api.heads_apart", apart)
        check(seed, name, torch.float32, shared=seed % 2 == 0, sinks=seed == 1)

else:

    @pytest.mark.parametrize("dtype", LIMITS, ids=str)
    @pytest.mark.parametrize("name", PATTERNS)
    @pytest.mark.parametrize("seed", [0, 1, 2, *more(*range(3, 12))])
    def test_heads_apart(seed: int, name: str, dtype: torch.dtype) -> None:
        check(seed, name, dtype, shared=seed % 2 == 0, sinks=seed % 3 == 1)

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        in_interpreter(__file__, "test_by_the_kernel")


def test_errors() -> None:
    x = drawn(0, torch.float32)
    given: dict[str, Any] = {"block_table": x.table, "seqused_k": x.used}
    for change, message in (
        ({"seqused_k": x.used[:, 0]}, r"seqused_k must be a tensor \(sequences, key heads\) = \(3, 2\)"),
        ({"seqused_k": x.used.tolist()}, r"seqused_k must be a tensor \(sequences, key heads\) = \(3, 2\)"),
        ({"block_table": x.table[:, :1], "seqused_k": x.used[:, :1]}, "block_table must have a table for each of k's"),
        ({"block_table": x.table[None], "seqused_k": x.used}, "block_table must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            gs.varlen(x.q, x.k, x.v, x.cu, **given | change)
    with pytest.raises(ValueError, match="block_table must name pages in"):
        table = torch.full_like(x.table, len(x.k))
        gs.varlen(x.q, x.k, x.v, x.cu, block_table=table, seqused_k=x.used.clamp(min=3))
    with pytest.raises(Unsupported, match="batch_invariant must be False"):
        gs.varlen(x.q, x.k, x.v, x.cu, batch_invariant=True, **given)


def test_explained_by_a_head() -> None:
    x = drawn(0, torch.float32)
    pages = gs.Pages(x.table, x.used, x.k.shape[1])
    packed = gs.PackedSequences(x.cu, pages=pages, pattern=gs.Causal())
    assert "Pages(3 x " in str(gs.explain(x.q, x.k, x.v, packed, layout="bshd").structure)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        check(seed, name, dtype, "cuda", shared=seed % 2 == 0, sinks=seed % 3 == 1)
