"""Calls of the Hopper gather kernels on a CPU: plain functions that read the documented arguments replace them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import IMPLEMENTATION, missing_packages
from gossamer.kernels.launch import Direction
from gossamer.kernels.reference import oracle
from gossamer.layouts.gather import GatherLayout, build_gather
from gossamer.plan.capability import gathers_alone, reasons
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem
from tests.support import launches

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
LISTS = ("indices", "bits")
ROWS = 64
B, H, G, Q, K = 2, 4, 2, 150, 220


class Arguments(dict[str, Any]):
    """Those of a kernel by name. Lists come in another form, of which plain tensors are made."""

    def __init__(self, names: tuple[str, ...], given: tuple[Any, ...], config: Any) -> None:
        super().__init__(zip(names, given, strict=True))
        for name in ("work", "segments", *LISTS):
            if name in self:
                self[name] = torch.from_dlpack(self[name])
        assert self["work"].shape[0] == self["items"] and 0 < self["blocks"] <= self["items"]
        assert self["tile_counter"].tolist() == [0]
        for name in ("q", "k", "v", "dout") if "dout" in self else ("q", "k", "v"):
            x = self[name]
            # Rows are copied 8 numbers at a time: what follows the last one counts as zero.
            whole = -(-x.shape[-1] // 8) * 8
            assert x.dtype == getattr(torch, config.dtype)
            assert not any(n % 8 for n in x.stride()[:3]) and x.stride(3) == 1
            held = x.as_strided((*x.shape[:3], whole), x.stride())[..., x.shape[-1] :]
            assert (name == "q" and config.direction == "forward") or not held.numel() or (held == 0).all()
        self.config = config

    def step(self, at: int, end: int) -> tuple[Tensor, Tensor]:
        """The places that a step gathers, and which of its pairs are kept: (rows of the walk, places)."""
        places = self["indices"][at * ROWS : min(end, (at + 1) * ROWS)].long()
        assert (places >= 0).all()
        words = self["bits"].view(-1, 2, ROWS)[at]
        keep = (words[:, None] >> torch.arange(32)[:, None] & 1).bool().reshape(ROWS, ROWS).T
        return places, keep[:, : len(places)]

    def attended(self, batch: int, keys: Tensor) -> Tensor:
        """Which keys come before the end of those of a batch element."""
        return keys < (int(self["lengths"][batch]) if self.config.lengths else K)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Powers of two of the scores of queries and keys, and the derivative of the soft cap."""
        s = q.float() @ k.float().T * self["before"]
        slope = torch.ones_like(s)
        if self.config.score == "softcap":
            s = torch.tanh(s)
            slope = 1 - s * s
        return s * self["exponent"], slope


def forward(config: Any) -> Callable[..., None]:
    halves = ("k_halves", "v_halves", "powers") if config.dtype == "float32" else ()
    names = (
        "q", "k", "v", *halves, "out", "lse", "work", *LISTS, "sinks", "part_out", "part_lse", "lengths",
        "tile_counter", "before", "exponent", "items", "has_sinks", "blocks",
    )  # fmt: skip

    def run(*given: Any) -> None:
        a = Arguments(names, given, config)
        for name, size in zip(halves, (2 * config.size, 2 * config.size, 2), strict=False):
            assert a[name].shape == (B, G, K, size) and a[name].is_contiguous()
            assert a[name].dtype == (torch.float32 if name == "powers" else torch.float16)
        # Numbers of float32 are written in pairs.
        assert not halves or not a["out"].shape[3] % 2 or a["out"].stride(2) > a["out"].shape[3]
        for b, h, tile, slot, *_, at, steps, _, valid, _, end, _, _ in a["work"].tolist():
            assert valid == 1
            rows = slice(tile * ROWS, min(Q, (tile + 1) * ROWS))
            count, g = rows.stop - rows.start, h // (H // G)
            powers, values = [torch.full((count, 0), -torch.inf)], [a["v"][b, g, :0].float()]
            for step in range(at, at + steps):
                keys, keep = a.step(step, end)
                kept = keep[:count] & a.attended(b, keys)
                powers.append(torch.where(kept, a.scores(a["q"][b, h, rows], a["k"][b, g, keys])[0], -torch.inf))
                values.append(a["v"][b, g, keys].float())
            s = torch.cat(powers, 1) * math.log(2.0)
            if slot < 0 and a["has_sinks"]:
                s = torch.cat([s, a["sinks"][h].expand(count, 1)], 1)
                values.append(torch.zeros(1, a["v"].shape[-1]))
            lse = torch.logsumexp(s, 1)
            out = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[:, None]) @ torch.cat(values)
            if slot < 0:
                a["out"][b, h, rows], a["lse"][b, h, rows] = out.to(a["out"].dtype), lse
            else:
                a["part_out"][slot, :count, : out.shape[1]], a["part_lse"][slot, :count] = out, lse

    return run


def merge(dtype: str, size: int, block: int) -> Callable[..., None]:
    def run(out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor, merges: Tensor, sinks: Tensor, has: int) -> None:
        assert parts.shape[1:] == (block, size)
        for b, h, tile, first, number, *_ in torch.from_dlpack(merges).tolist():
            count = min(block, Q - tile * block)
            some = part_lse[first : first + number, :count]
            whole = torch.cat([some, sinks[h].expand(1, count)]) if has else some
            total = torch.logsumexp(whole, 0)
            weights = torch.exp(some - torch.where(total == -torch.inf, 0.0, total))
            found = (weights[..., None] * parts[first : first + number, :count, : out.shape[-1]]).sum(0)
            rows = slice(tile * block, tile * block + count)
            out[b, h, rows], lse[b, h, rows] = found.to(out.dtype), total

    return run


def gradients(a: Arguments, b: int, h: int, i: Tensor, j: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(P, dS) of queries i and keys j."""
    g = h // (H // G)
    s, slope = a.scores(a["q"][b, h, i], a["k"][b, g, j])
    lse, delta = a["terms"][:, b, h, i]
    p = torch.where(keep, torch.exp2(s - lse[:, None]), 0.0)
    return p, p * slope * (a["dout"][b, h, i].float() @ a["v"][b, g, j].float().T - delta[:, None])


def query(config: Any) -> Callable[..., None]:
    names = (
        "q", "k", "v", "dout", "terms", "dq", "work", *LISTS, "part_dq", "lengths", "tile_counter", "before",
        "exponent", "factor", "items", "blocks",
    )  # fmt: skip

    def run(*given: Any) -> None:
        a = Arguments(names, given, config)
        for b, h, tile, slot, *_, at, steps, _, _, _, end, _, _ in a["work"].tolist():
            i = torch.arange(tile * ROWS, min(Q, (tile + 1) * ROWS))
            dq = torch.zeros(len(i), a["q"].shape[-1])
            for step in range(at, at + steps):
                j, keep = a.step(step, end)
                ds = gradients(a, b, h, i, j, keep[: len(i)] & a.attended(b, j))[1]
                dq += ds @ a["k"][b, h // (H // G), j].float()
            if slot < 0:
                a["dq"][b, h, i] = (dq * a["factor"]).bfloat16()
            else:
                a["part_dq"][slot, : len(i), : dq.shape[1]] = dq

    return run


def columns(config: Any) -> Callable[..., None]:
    names = (
        "q", "k", "v", "dout", "terms", "dk", "dv", "work", "segments", *LISTS, "part_dk", "part_dv", "lengths",
        "tile_counter", "before", "exponent", "factor", "items", "blocks",
    )  # fmt: skip

    def run(*given: Any) -> None:
        a = Arguments(names, given, config)
        for b, g, tile, slot, first, number, valid, *_ in a["work"].tolist():
            assert valid == 1
            j = torch.arange(tile * ROWS, min(K, (tile + 1) * ROWS))
            dk, dv = torch.zeros(len(j), a["k"].shape[-1]), torch.zeros(len(j), a["v"].shape[-1])
            for head, _, *_, at, steps in a["segments"][first : first + number].tolist():
                h = g * (H // G) + head
                for step in range(at, at + steps):
                    listed = a["indices"][step * ROWS : (step + 1) * ROWS]
                    i, keep = a.step(step, step * ROWS + int((listed >= 0).sum()))
                    kept = (keep[: len(j)] & a.attended(b, j)[:, None]).T
                    p, ds = gradients(a, b, h, i, j, kept)
                    dk += ds.T @ a["q"][b, h, i].float()
                    dv += p.T @ a["dout"][b, h, i].float()
            if slot < 0:
                a["dk"][b, g, j], a["dv"][b, g, j] = (dk * a["factor"]).bfloat16(), dv.bfloat16()
            else:
                a["part_dk"][slot, : len(j), : dk.shape[1]], a["part_dv"][slot, : len(j), : dv.shape[1]] = dk, dv

    return run


def sum_parts(dtype: str, size: int, block: int) -> Callable[..., None]:
    def run(result: Tensor, parts: Tensor, merges: Tensor, factor: float) -> None:
        assert parts.shape[1:] == (block, size)
        for b, h, tile, first, number, *_ in torch.from_dlpack(merges).tolist():
            some = result[b, h, tile * block : (tile + 1) * block]
            some.copy_((parts[first : first + number].sum(0) * factor)[: len(some), : some.shape[1]])

    return run


def preprocess(dtype: str, size: int, zeroed: int) -> Callable[..., None]:
    def run(
        out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor, rows: Tensor, sums: Tensor, sinks: Tensor, has_dlse: int,
        has_sinks: int,
    ) -> None:  # fmt: skip
        assert sinks.ndim == 1
        assert zeroed == 0 and sums.shape[-1] in (1, ROWS * size)
        empty = lse == -torch.inf
        delta = (out.float() * dout.float()).sum(-1) - (dlse if has_dlse else 0.0)
        rows[0], rows[1] = torch.inf, 0.0
        queries = lse.shape[2]
        rows[0, :, :, :queries] = torch.where(empty, torch.inf, lse / math.log(2.0))
        rows[1, :, :, :queries] = torch.where(empty, 0.0, delta)

    return run


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Any:
    from gossamer.kernels.hopper import compiled
    from gossamer.kernels.hopper.launch import gather as module

    kernels = {"forward": forward, "query": query, "columns": columns}
    monkeypatch.setattr(compiled, "gather", lambda config: kernels[config.direction](config))
    for name, kernel in {"merge": merge, "sum_parts": sum_parts, "preprocess": preprocess}.items():
        monkeypatch.setattr(compiled, name, kernel)
    return module


def layout_of(lead: tuple[int, int]) -> tuple[GatherLayout, Tensor]:
    """Lists of a walk, some long and some empty, and the pairs that they keep."""
    mask = np.random.default_rng(0).random((*lead, Q, K)) < 0.03
    mask[..., 70, :] = mask[..., :, 5] = True
    mask[..., 64:128, 100:] = mask[..., 20:30, :] = False
    return build_gather(gs.BlockMask(mask, 1), Q, K, block_q=ROWS).to("cpu"), torch.from_numpy(mask)


def wrong(found: Any, want: Any) -> float:
    """The largest error, over the largest number of each result; -inf must be where it is wanted."""
    worst = 0.0
    for actual, exact in zip(found, want, strict=True):
        assert actual.is_contiguous() and ((actual == -torch.inf) == (exact == -torch.inf)).all()
        finite = exact != -torch.inf
        assert actual[finite].isfinite().all()  # max passes over NaN
        error = (actual.double() - exact)[finite].abs().max() / exact[finite].abs().max()
        worst = max(worst, float(error))
    return worst


@pytest.mark.parametrize("lead", [(1, 1), (1, H), (B, 1), (B, H)], ids=str)
@pytest.mark.parametrize(("D", "E"), [(64, 64), (40, 20), (128, 72)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=("plain", "terms"))
@pytest.mark.parametrize("split", [None, 1])
def test_calls(launch: Any, lead: tuple[int, int], D: int, E: int, given: bool, split: int | None) -> None:
    layout, mask = layout_of(lead)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, h, n, d, generator=generator).bfloat16()
        for h, n, d in ((H, Q, D), (G, K, D), (G, K, E), (H, Q, E))
    )
    dlse = torch.randn(B, H, Q, generator=generator).masked_fill(~mask.any(-1), 0.0)
    sinks = torch.randn(H, generator=generator) if given else None
    # One ends within a list, one keeps nothing.
    terms = Terms(D**-0.5, K - Q, 2.0, False, torch.tensor([K - 90, 0]), sinks) if given else Terms(D**-0.5, K - Q)
    leaves = [x.double().requires_grad_() for x in ((q, k, v) if sinks is None else (q, k, v, sinks))]
    exact_terms = terms._replace(sink_logits=leaves[3] if given else None)
    out, lse = oracle(leaves[0], leaves[1], leaves[2], mask, exact_terms)
    some = torch.where(lse == -torch.inf, 0.0, lse)
    want = torch.autograd.grad((out * dout).sum() + (some * dlse).sum(), leaves)
    problem = Problem(B, H, G, Q, K, D, E, "bfloat16", "cpu", processors=4, backward=True)
    exact = out.detach(), lse.detach()
    saved = exact[0].bfloat16(), exact[1].float()
    # The second has no copy on the host.
    for where in (layout, GatherLayout(layout.rows)) if split else (layout,):
        assert wrong(launches.forward(launch, problem, where, terms, q, k, v, split=split), exact) < 1e-2
        found = launches.backward(launch, problem, where, terms, dout, dlse, q, k, v, *saved, split=split)
        assert wrong(found, want) < 2e-2
    into = [torch.full_like(x, torch.nan).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    found = launches.backward(
        launch, problem, layout, terms, dout, dlse, q, k, v, *saved, split=split, into=tuple(into)
    )  # fmt: skip
    assert all(a is b for a, b in zip(found, into, strict=False))
    assert wrong([x.contiguous() for x in found], want) < 2e-2


@pytest.mark.parametrize("given", [False, True], ids=("plain", "terms"))
@pytest.mark.parametrize("cut", [False, True])
def test_repeated_calls(launch: Any, given: bool, cut: bool) -> None:
    """A launch serves other arrays that lie alike."""
    from gossamer.torch.bind import bind

    layout, mask = layout_of((1, H))
    D = 64
    problem = Problem(B, H, G, Q, K, D, D, "bfloat16", "cpu", processors=4, backward=True)
    vectors = {"key_lengths": torch.tensor([K - 90, 0]), "sink_logits": torch.randn(H)} if given else {}
    terms, split = Terms(D**-0.5, K - Q, **vectors), 1 if cut else 100
    bound: dict[str, Any] = {}

    def call(direction: Direction, **x: Tensor) -> tuple[Tensor, ...]:
        x |= vectors
        if direction not in bound:
            made = launches.prepared(
                launch, problem, layout, direction, Scoring(D**-0.5, K - Q), x, split=split
            )  # fmt: skip
            joins = {"merge", "sum_parts"} & {step.kernel.name for step in made.launch.steps}
            assert bool(joins) == cut
            bound[direction] = bind(made, torch.device("cpu"), tuple(x))
        return bound[direction](*x.values())

    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (
            torch.randn(B, h, n, D, generator=generator).bfloat16() for h, n in ((H, Q), (G, K), (G, K), (H, Q))
        )
        out, lse = call("forward", q=q, k=k, v=v)
        assert wrong((out, lse), oracle(q, k, v, mask, terms)) < 1e-2
        dlse = torch.randn(B, H, Q)
        want = launches.backward(launch, problem, layout, terms, dout, dlse, q, k, v, out, lse, split=split)
        found = call("backward", dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse)
        assert len(found) == (4 if given else 3)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        into = torch.full((B, Q, H, D), torch.nan).bfloat16().transpose(1, 2), torch.full((B, H, Q), torch.nan)
        again = launches.forward(launch, problem, layout, terms, q, k, v, into=into, split=split)
        assert all(a is b and torch.equal(a, c) for a, b, c in zip(again, into, (out, lse), strict=True))


@pytest.mark.parametrize(("D", "E"), [(64, 64), (40, 20), (7, 33)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=("plain", "terms"))
@pytest.mark.parametrize("split", [None, 1])
def test_float32_calls(launch: Any, D: int, E: int, given: bool, split: int | None) -> None:
    layout, mask = layout_of((1, H))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, n, d, generator=generator) for h, n, d in ((H, Q, D), (G, K, D), (G, K, E)))
    sinks = torch.randn(H, generator=generator) if given else None
    terms = Terms(D**-0.5, K - Q, 2.0, False, torch.tensor([K - 90, 0]), sinks) if given else Terms(D**-0.5, K - Q)
    exact = oracle(q.double(), k.double(), v.double(), mask, terms)
    problem = Problem(B, H, G, Q, K, D, E, "float32", "cpu", processors=4)
    assert wrong(launches.forward(launch, problem, layout, terms, q, k, v, split=split), exact) < 1e-5
    # Rows of the second are followed by other tensors' numbers.
    for width in (E, E + 5):
        room = torch.full((B, Q, H, width), torch.nan)
        into = room.transpose(1, 2)[..., :E], torch.full((B, H, Q), torch.nan)
        found = launches.forward(launch, problem, layout, terms, q, k, v, split=split, into=into)
        assert all(a is b for a, b in zip(found, into, strict=True)) and room[..., E:].isnan().all()
        assert wrong([x.contiguous() for x in found], exact) < 1e-5


def test_float32_is_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused for its type may be gathered, forward alone; one that names hopper is refused."""
    problem = Problem(1, 8, 8, 4096, 4096, 64, 64, "float32", "cuda", 90)
    capability = IMPLEMENTATION.capability
    assert "float32" in reasons(problem, capability)[0] and gathers_alone(problem, capability)
    changes: tuple[dict[str, Any], ...] = (
        {"backward": True}, {"D": 65}, {"sm": 80}, {"score_terms": frozenset({"alibi_slopes"})}, {"tile": (64, 64)},
        {"dtype": "float64"}, {"dtype": "bfloat16"}, {"B": 2**16},
    )  # fmt: skip
    for change in changes:
        assert not gathers_alone(replace(problem, **change), capability), change
    assert gathers_alone(replace(problem, B=2**16 - 1), capability)
    monkeypatch.setattr(type(IMPLEMENTATION), "unavailable", lambda self: [])
    plan = Plan(problem, (), ("hopper",))
    assert [(i.name, gather.choice.block_q) for i, gather in plan.gather_options] == [("hopper", 64)] and not plan.tiles


@pytest.mark.parametrize("dimension", ["B", "H"])
def test_more_than_a_grid_holds(dimension: str) -> None:
    """Kernels beside those of a backward have a grid row for each batch element and head; the forward has none."""
    problem = Problem(1, 1, 1, 4096, 4096, 64, 64, "bfloat16", "cuda", 90)
    most, over = replace(problem, **{dimension: 2**16 - 1}), replace(problem, **{dimension: 2**16})
    capability = IMPLEMENTATION.capability
    assert not reasons(over, capability) and not reasons(replace(most, backward=True), capability)
    (found,) = reasons(replace(over, backward=True), capability)
    assert found.startswith("has a backward for up to 65,535 batch elements and heads, got ")
