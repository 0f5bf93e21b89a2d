"""Calls over lists of keys that heads share, on a CPU: plain functions replace the Hopper kernels that read them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.contract import Terms
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.hopper.schedule.rows import sharing, work
from gossamer.kernels.reference import oracle
from gossamer.layouts.device import key_list_layout
from gossamer.layouts.gather import GatherLayout, queries_of
from gossamer.plan.capability import GatherChoice, reasons
from gossamer.plan.problem import Problem, Unsupported
from gossamer.torch import device_arrays
from tests.kernels.test_hopper_gather_launch import preprocess, wrong
from tests.support import launches

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
STEP = 64
Q, K = 75, 210


class Arguments(dict[str, Any]):
    """Those of a kernel by name."""

    def __init__(self, names: tuple[str, ...], given: tuple[Any, ...], config: Any) -> None:
        super().__init__(zip(names, given, strict=True))
        for name in ("work", "indices", "bits"):
            self[name] = torch.from_dlpack(self[name])
        assert self["bits"].shape[1] == config.queries and self["tile_counter"].tolist() == [0]
        self.config = config

    def items(self) -> Any:  # type: ignore[override]
        """Of each item its batch element, key head, and of each of its rows (head, query, keys)."""
        c, heads, groups = self.config, self["q"].shape[1] // self.config.heads, self["k"].shape[1]
        for b, h, tile, slot, *_, at, steps, _, valid, _, end, _, _ in self["work"].tolist():
            assert valid == 1 and slot == -1
            places = self["indices"][at * STEP : end].long()
            assert (places >= 0).all() and (self["indices"][end : (at + steps) * STEP] == -1).all()
            bits = self["bits"][2 * at : 2 * (at + steps)].T.repeat_interleave(32, 1)
            keep = (bits >> torch.arange(32).repeat(2 * steps) & 1).bool()  # (queries, columns)
            if c.lengths:
                keep[:, : len(places)] &= places < int(self["lengths"][b])
            rows = []
            for row in range(c.queries * c.heads):
                head, query = h * c.heads + row % c.heads, tile * c.queries + row // c.heads
                if query < self["q"].shape[2]:
                    rows.append((head, query, places[keep[row // c.heads, : len(places)]]))
            yield b, h // (heads // groups), rows

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Powers of two of the scores of a query, and the derivative of the soft cap."""
        s = q.float() @ k.float().T * self["before"]
        if self.config.score != "softcap":
            return s * self["exponent"], torch.ones_like(s)
        return torch.tanh(s) * self["exponent"], 1 - torch.tanh(s) ** 2


def forward(config: Any) -> Callable[..., None]:
    names = (
        "q", "k", "v", "out", "lse", "work", "indices", "bits", "sinks", "part_out", "part_lse", "lengths",
        "tile_counter", "before", "exponent", "items", "has_sinks", "blocks",
    )  # fmt: skip

    def run(*given: Any) -> None:
        a = Arguments(names, given, config)
        for b, g, rows in a.items():
            for h, i, keys in rows:
                s = a.scores(a["q"][b, h, i], a["k"][b, g, keys])[0] * math.log(2.0)
                lse = torch.logsumexp(torch.cat([s, a["sinks"][h : h + 1]]) if a["has_sinks"] else s, 0)
                p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse))
                a["out"][b, h, i] = (p @ a["v"][b, g, keys].float()).to(a["out"].dtype)
                a["lse"][b, h, i] = lse

    return run


def gradients(config: Any) -> Callable[..., None]:
    names = (
        "q", "k", "v", "dout", "terms", "dk_sum", "dv_sum", "dq", "work", "indices", "bits", "part_dq", "lengths",
        "tile_counter", "before", "exponent", "factor", "items", "blocks",
    )  # fmt: skip

    def run(*given: Any) -> None:
        a = Arguments(names, given, config)
        D, E = a["q"].shape[3], a["v"].shape[3]
        assert a["dk_sum"].shape[3] == a["dv_sum"].shape[3] == config.size
        for b, g, rows in a.items():
            for h, i, keys in rows:
                q, k, dout = a["q"][b, h, i].float(), a["k"][b, g, keys].float(), a["dout"][b, h, i].float()
                s, slope = a.scores(q, k)
                lse, delta = a["terms"][:, b, h, i]
                p = torch.exp2(s - lse)
                ds = p * slope * (a["v"][b, g, keys].float() @ dout - delta)
                a["dq"][b, h, i] = (ds @ k * a["factor"]).to(a["dq"].dtype)
                a["dk_sum"][b, g, :, :D].index_add_(0, keys, ds[:, None] * q * a["factor"])
                a["dv_sum"][b, g, :, :E].index_add_(0, keys, p[:, None] * dout)

    return run


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Any:
    from gossamer.kernels.hopper import compiled
    from gossamer.kernels.hopper.launch import gather as module

    kernels = {"forward": forward, "gradients": gradients}
    monkeypatch.setattr(compiled, "gather", lambda config: kernels[config.direction](config))
    monkeypatch.setattr(compiled, "preprocess", preprocess)
    return module


def lists_of(B: int, groups: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Lists (B, groups, Q, n), unsorted, with repeated, missing and wrong entries, and the pairs that they keep."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.randint(-20, K + 20, (B, groups, Q, n), generator=generator, dtype=torch.int32)
    lists[:, :, 3], lists[:, :, 4, 1:] = -1, lists[:, :, 4, :1]
    listed = torch.where((lists >= 0) & (lists < K), lists, K).long()
    mask = torch.zeros(B, groups, Q, K + 1, dtype=torch.bool).scatter_(3, listed, True)[..., :K]
    return lists, mask


def layout_of(lists: Tensor, heads: int) -> GatherLayout:
    queries = queries_of(heads)
    return key_list_layout(
        lists, None, None, None, Q, K, block_q=queries, heads=heads, xp=device_arrays, transpose=False
    )  # fmt: skip


@pytest.mark.parametrize("given", [False, True], ids=("plain", "terms"))
@pytest.mark.parametrize(("D", "E"), [(64, 64), (40, 20), (136, 200)], ids=str)
@pytest.mark.parametrize(("R", "heads"), [(1, 1), (2, 2), (3, 3), (16, 16), (6, 3)], ids=str)
@pytest.mark.parametrize("lead", ["own", "shared"])
def test_calls(launch: Any, lead: str, R: int, heads: int, D: int, E: int, given: bool) -> None:
    B, G = (2, 2) if R < 16 else (1, 1)
    lists, mask = lists_of(B, G, 40) if lead == "own" else lists_of(1, 1, 40)
    layout, H = layout_of(lists, heads), R * G
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, h, n, d, generator=generator).bfloat16()
        for h, n, d in ((H, Q, D), (G, K, D), (G, K, E), (H, Q, E))
    )
    mask = mask.expand(B, G, Q, K).repeat_interleave(R, 1)
    sinks = torch.randn(H, generator=generator) if given else None
    lengths = torch.tensor([K - 90, 0][:B])
    terms = Terms(D**-0.5, K - Q, 2.0, False, lengths, sinks) if given else Terms(D**-0.5, K - Q)
    leaves = [x.double().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]
    exact = oracle(leaves[0], leaves[1], leaves[2], mask, terms._replace(sink_logits=leaves[3] if given else None))
    out, lse = exact
    dlse = torch.randn(B, H, Q, generator=generator).masked_fill(lse == -torch.inf, 0.0)
    some = torch.where(lse == -torch.inf, 0.0, lse)
    want = torch.autograd.grad((out * dout).sum() + (some * dlse).sum(), leaves)
    problem = Problem(B, H, G, Q, K, D, E, "bfloat16", "cpu", processors=4, backward=True)
    assert wrong(launches.forward(launch, problem, layout, terms, q, k, v), (out.detach(), lse.detach())) < 1e-2
    saved = out.detach().bfloat16(), lse.detach().float()
    found = launches.backward(launch, problem, layout, terms, dout, dlse, q, k, v, *saved)
    assert wrong(found, want) < 2e-2
    into = tuple(torch.full_like(x, torch.nan).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    again = launches.backward(launch, problem, layout, terms, dout, dlse, q, k, v, *saved, into=into)
    assert all(a is b for a, b in zip(again, into, strict=False))
    assert wrong([x.contiguous() for x in again], want) < 2e-2


@pytest.mark.parametrize(("R", "heads"), [(2, 2), (16, 16), (6, 3), (64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_items_cover_the_lists(lead: tuple[int, int], R: int, heads: int) -> None:
    """Each head of items, of all batch elements, walks each group's steps once."""
    B, G = 2, 2
    layout = layout_of(lists_of(*lead, 40)[0], heads)
    tiles = R * G // heads
    walk = layout.rows.for_heads(tiles)
    items = work(replace(layout, rows=walk), *sharing(tiles, B, walk), 264).items.tolist()
    host, found = walk.on_host(), defaultdict(list)
    for batch, head, group, slot, *_, first, count, _, valid, _, end, _, _ in items:
        assert slot == -1 and valid == 1 and end <= (first + count) * 64
        found[batch, head, group] += list(range(first, first + count))
    assert len(found) == B * tiles * walk.tiles
    for (batch, head, group), steps in found.items():
        Bl, Hl = host.lead
        at = (batch if Bl > 1 else 0, head if Hl > 1 else 0, group)
        start, count = int(host.starts[at]) // 64, -(-int(host.counts[at]) // 64)
        assert steps == list(range(start, start + count))


@pytest.mark.parametrize("R", [1, 16])
def test_through_attention(launch: Any, R: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public call makes such a layout, its kernels read it, and so does a layout that is made before."""
    from gossamer.torch.structure import make

    cpu = frozenset({"cpu"})
    here = GatherChoice(64, frozenset({"bfloat16"}), max_head_dim=256, devices=cpu)
    able = replace(IMPLEMENTATION.capability, devices=cpu, unions=(here,))
    monkeypatch.setattr(type(IMPLEMENTATION), "capability", able)
    monkeypatch.setattr(type(IMPLEMENTATION), "unavailable", lambda self: [])
    monkeypatch.setattr(make, "group_of", lambda a, list_heads: (queries_of(R), R))
    lists, mask = lists_of(2, 2, 30)
    mask = (mask & (torch.arange(K) <= torch.arange(Q)[:, None] + K - Q)).repeat_interleave(R, 1)
    q, k, v = (torch.randn(2, h, n, 24).bfloat16().requires_grad_() for h, n in ((2 * R, Q), (2, K), (2, K)))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = gs.attention(*exact, mask)
    dout = torch.randn_like(want)
    want_gradients = torch.autograd.grad(want, exact, dout)
    chosen = gs.Indices(lists) & gs.Causal()
    made = gs.device_layout(q, k, v, chosen, implementation="hopper")
    assert made.rows.heads == R and not made._transpose  # type: ignore[union-attr]
    for pattern in (chosen, made, chosen):
        out = gs.attention(q, k, v, pattern, implementation="hopper")
        found = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
        assert wrong([out.detach(), *found], [want.detach(), *want_gradients]) < 2e-2
    plan = gs.explain(q, k, v, chosen, implementation="hopper")
    assert plan.implementation == plan.backward == "hopper"
    with pytest.raises(Unsupported, match="adds dK and dV of groups of queries in memory, in any order"):
        gs.attention(q, k, v, made, implementation="hopper", deterministic=True)


def test_who_computes_lists() -> None:
    """Groups are refused by name where nothing adds their gradients, or where they must be the same bits each time."""
    capability = IMPLEMENTATION.capability
    problem = Problem(1, 16, 1, 100, 100, 256, 256, "bfloat16", "cuda", 90, 132, gather=4, gather_heads=16)
    assert not reasons(problem, capability)
    assert not reasons(replace(problem, backward=True), capability)
    found = reasons(replace(problem, backward=True, deterministic=True), capability)
    assert found == ["adds dK and dV of groups of queries in memory, in any order: deterministic are single queries"]
    for other in (replace(problem, dtype="float32"), replace(problem, sm=80), replace(problem, D=257)):
        assert "gathers no listed keys for groups of 4 of these queries of 16 heads" in reasons(other, capability)
    alone = replace(problem, gather=1, gather_heads=1)
    assert "gathers no listed keys for groups of 1 of these queries" in reasons(alone, capability)
