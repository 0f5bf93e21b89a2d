"""One query behind keys that grow: planned once for many numbers of keys, and as exact as any other call."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.hopper import missing_packages
from gossamer.memo import forget_all
from gossamer.plan.table import available
from gossamer.torch import calls, decoding

B, H, G, D, N = 2, 4, 2, 64, 700
PATTERNS = {
    "all": None, "causal": gs.Causal(), "window": gs.SlidingWindow(99), "unbounded": gs.SlidingWindow(None),
    "both sides": gs.SlidingWindow(260, 5), "last": gs.SlidingWindow(0),
}  # fmt: skip


def caches(device: str = "cpu", storage: str = "room") -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each step; keys lie in a cache with room, or are copied each time."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, G, N, D, generator=g).bfloat16().to(device) for _ in range(2))
    for n in (1, 2, 99, 100, 101, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, N):
        q = torch.randn(B, H, 1, D, generator=g).bfloat16().to(device)
        some = k[:, :, :n], v[:, :, :n]
        yield q, *(x.contiguous() if storage == "copied" else x for x in some)


def right(q: Tensor, k: Tensor, v: Tensor, pattern: Any, **terms: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64."""
    sinks = terms.pop("sink_logits", None)
    given = {} if sinks is None else {"sink_logits": sinks.double()}
    return gs.attention(
        q.double(), k.double(), v.double(), pattern, implementation="reference", return_lse=True, **given, **terms
    )


def made() -> int:
    """Plans that calls of one query share."""
    return sum(key[0] == "one query" for key in calls.known._entries)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Iterator[list[int]]:
    """Hopper on a CPU, whose kernel is plain attention to as many keys as it is told; the numbers of tiles it got."""
    from gossamer.kernels import hopper
    from gossamer.kernels.hopper import compiled

    listed: list[int] = []

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any) -> None:
        items, lengths, exponent = torch.from_dlpack(given[0]), torch.from_dlpack(given[9]), given[12]
        listed.append(int(items[:, [5, 7, 9]].sum(1).max()))
        ratio = q.shape[1] // k.shape[1]
        for b, n in enumerate(lengths.tolist()):
            keys, values = (x[b, :, :n].float().repeat_interleave(ratio, 0) for x in (k, v))
            assert keys.shape[1] == n  # it has them all
            scores = q[b].float() @ keys.mT * exponent * math.log(2)
            lse[b], out[b] = scores.logsumexp(-1), scores.softmax(-1) @ values

    monkeypatch.setattr(hopper.Hopper, "unavailable", lambda self: [])
    limits = dataclasses.replace(hopper.Hopper.capability, devices=frozenset({"cpu"}), min_sm=None, max_sm=None)
    limits = dataclasses.replace(limits, grows=frozenset({"cpu"}))
    monkeypatch.setattr(hopper.Hopper, "capability", limits)
    monkeypatch.setattr(compiled, "forward", lambda config: run)
    for forget in (forget_all, decoding.grows_on.cache_clear):
        forget()
    yield listed
    for forget in (forget_all, decoding.grows_on.cache_clear):
        forget()


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
@pytest.mark.parametrize("storage", ["room", "copied"])
@pytest.mark.parametrize("name", PATTERNS)
def test_keys_that_grow(kernel: list[int], name: str, storage: str) -> None:
    pattern = PATTERNS[name]
    for step, x in enumerate(caches(storage=storage)):
        out, lse = gs.attention(*x, pattern, implementation="hopper", return_lse=True)
        assert len(kernel) == step + 1
        want = right(*x, pattern)
        torch.testing.assert_close(lse.double(), want[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(out.double(), want[0], atol=2e-2, rtol=0)
    assert made() == {"window": 1, "both sides": 3, "last": 1}.get(name, 6)  # ranges of keys, not numbers of them


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
@pytest.mark.parametrize("name", PATTERNS)
def test_keys_that_grow_in_the_other_layout(kernel: list[int], name: str) -> None:
    """(B, N, heads, D): the same launches, since one query lies alike in both."""
    steps = list(caches())
    for x in steps:
        gs.attention(*x, PATTERNS[name], implementation="hopper")
    plans = made()
    for x in steps:
        turned = [y.transpose(1, 2).contiguous() for y in x]
        found = gs.attention(*turned, PATTERNS[name], implementation="hopper", layout="bshd", return_lse=True)
        want = right(*x, PATTERNS[name])
        torch.testing.assert_close(found[1].double(), want[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(found[0].double(), want[0].transpose(1, 2), atol=2e-2, rtol=0)
        assert found[0].is_contiguous()
    assert len(kernel) == 2 * len(steps) and made() == plans > 0


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_cache_of_fixed_size(kernel: list[int], name: str) -> None:
    q, k, v = list(caches())[-1]
    for step, at in enumerate((0, 1, 98, 99, 127, 300, N - 1, *[N + 40] * (name != "last"))):
        out, lse = gs.attention(q, k, v, PATTERNS[name], q_offset=at, implementation="hopper", return_lse=True)
        assert len(kernel) == step + 1
        want = right(q, k, v, PATTERNS[name], q_offset=at)
        torch.testing.assert_close(lse.double(), want[1], atol=1e-4, rtol=0)
        torch.testing.assert_close(out.double(), want[0], atol=2e-2, rtol=0)
    assert made() <= 5


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_what_goes_the_usual_way(kernel: list[int]) -> None:
    q, k, v = list(caches())[-1]
    named = {"implementation": "hopper"}
    usual: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v, gs.SlidingWindow(99, sinks=4)), named),
        ((q, k, v, gs.Causal()), {"q_offset": -1, **named}),
        ((q, k, v, gs.SlidingWindow(9)), {"q_offset": torch.tensor(300), **named}),
        ((q, k, v, None), {"key_lengths": torch.tensor([3, 600]), **named}),
        ((q.expand(B, H, 2, D).contiguous(), k, v, gs.Causal()), named),
        ((q.requires_grad_(), k, v, gs.Causal()), {}),
        ((q.detach()[0], k[0], v[0], gs.Causal()), named),
        ((q.detach(), k, v, gs.Causal()), {"implementation": "reference"}),
        ((q.detach(), k.mT.contiguous().mT, v, gs.Causal()), {}),
    ]
    for args, options in usual:
        gs.attention(*args, **options)
        assert not made()


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_explained(kernel: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys, which `small` would take if there were more queries."""
    from gossamer.kernels import small

    monkeypatch.setattr(small.Small, "unavailable", lambda self: [])
    limits = dataclasses.replace(small.Small.capability, devices=frozenset({"cpu"}), min_sm=None)
    monkeypatch.setattr(small.Small, "capability", limits)
    q, k, v = (x[:, :, :200] for x in list(caches())[-1])
    explanation = gs.explain(q, k, v, gs.Causal())
    assert explanation.implementation == "hopper"
    assert explanation.reasons["small"] == ["plans one query again for each number of keys"]
    gs.attention(q, k, v, gs.Causal())
    assert made() == 1 and len(kernel) == 1
    assert gs.explain(q.expand(B, H, 2, D).contiguous(), k, v, gs.Causal()).implementation == "small"
    assert gs.explain(q[0], k[0], v[0], gs.Causal()).implementation == "small"


@pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
def test_errors_stay_what_they_are(kernel: list[int]) -> None:
    q, k, v = list(caches())[-1]
    for _ in range(2):
        gs.attention(q, k, v, None, implementation="hopper")
        with pytest.raises(ValueError, match="v must"):
            gs.attention(q, k, v[:, :, :-1], None, implementation="hopper")
        with pytest.raises(ValueError, match="q_offset must"):
            gs.attention(q, k, v, None, q_offset=2**31, implementation="hopper")
        with pytest.raises(ValueError, match="scale must"):
            gs.attention(q, k, v, None, scale="large", implementation="hopper")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="heads"):
            gs.attention(q[:, :3], k, v, None, implementation="hopper")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("storage", ["room", "copied"])
@pytest.mark.parametrize("name", PATTERNS)
def test_keys_that_grow_on_a_cpu(name: str, storage: str, dtype: torch.dtype) -> None:
    forget_all()
    pattern, sinks, steps = PATTERNS[name], torch.randn(H), 0
    for terms in ({}, {"sink_logits": sinks}, {"softcap": 20.0, "scale": 0.1}):
        for given in caches(storage=storage):
            q, k, v = (x.to(dtype) for x in given)
            if storage == "room":  # what lies behind the keys
                bad = torch.full((B, G, N + 128, D), float("nan"), dtype=dtype)
                k, v = (torch.cat((x, bad[:, :, x.shape[2] :]), 2)[:, :, : x.shape[2]] for x in (k, v))
            out, lse = gs.attention(q, k, v, pattern, return_lse=True, **terms)
            want = right(q, k, v, pattern, **terms)
            torch.testing.assert_close(lse.double(), want[1], atol=1e-4, rtol=0)
            torch.testing.assert_close(out.double(), want[0], atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=0)
            steps += 1
    assert 0 < made() < steps / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("storage", ["room", "copied"])
@pytest.mark.parametrize("name", PATTERNS)
def test_keys_that_grow_on_a_gpu(name: str, storage: str) -> None:
    if available("hopper"):
        pytest.skip("; ".join(available("hopper")))
    pattern, sinks = PATTERNS[name], torch.randn(H, device="cuda")
    for terms in ({}, {"sink_logits": sinks}, {"softcap": 20.0, "scale": 0.1}):
        for q, k, v in caches("cuda", storage):
            if storage == "room":  # what lies behind the keys
                bad = torch.full((B, G, N + 128, D), float("nan"), device="cuda", dtype=torch.bfloat16)
                k, v = (torch.cat((x, bad[:, :, x.shape[2] :]), 2)[:, :, : x.shape[2]] for x in (k, v))
            found = [gs.attention(q, k, v, pattern, return_lse=True, **terms) for _ in range(2)]
            assert all(torch.equal(*x) for x in zip(*found, strict=True))
            want = right(q, k, v, pattern, **terms)
            torch.testing.assert_close(found[0][1].double(), want[1], atol=1e-3, rtol=0)
            torch.testing.assert_close(found[0][0].double(), want[0], atol=2e-2, rtol=0)
    assert made()


UP_TO = {
    "all": (None, None), "dense": (gs.Dense(), None), "causal": (gs.Causal(), 0),
    "past": (gs.SlidingWindow(None, -3), -3), "ahead": (gs.SlidingWindow(None, 5), 5),
    "joined": (gs.Causal() & gs.SlidingWindow(None, -1), -1),
    "far ahead": (gs.SlidingWindow(None, 2**29), 2**29),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["bhnd", "bshd"])
@pytest.mark.parametrize("name", UP_TO)
def test_one_query_at_an_offset_of_its_own_needs_no_structure(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the keys up to one: `key_lengths` says which, and what lies behind may be anything."""
    from gossamer.torch import request

    def structured(*_: Any) -> Any:
        raise AssertionError("structure was made")

    monkeypatch.setattr(request, "structured", structured)
    pattern, right = UP_TO[name]
    draw = random.Random(name + layout)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        K, limits = draw.choice([1, 7, 100]), torch.iinfo(dtype)
        near = [0, 1, K - 1, K, K + 3, draw.randint(0, K), limits.max, limits.min]
        offsets = [min(limits.max, draw.choice(near)) for _ in range(3)]
        lengths = [draw.choice([0, K, K + 2, draw.randint(0, K)]) for _ in range(3)]
        listed = name in ("all", "dense") or draw.random() < 0.5
        more = {"key_lengths": torch.tensor(lengths, dtype=draw.choice([torch.int32, torch.int64]))} if listed else {}
        most = 2**31 - 2**16 - K
        ends = [K if right is None else max(-most, min(most, at)) + right + 1 for at in offsets]
        ends = [max(0, min(K, end, n if listed else K)) for end, n in zip(ends, lengths, strict=True)]
        q, k, v = (torch.randn(3, heads, n, 8, dtype=torch.float64) for heads, n in ((4, 1), (2, K), (2, K)))
        for b, end in enumerate(ends):
            k[b, :, end:], v[b, :, end:] = math.nan, math.inf
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        turned = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bshd" else [q, k, v]
        out = gs.attention(*turned, pattern, q_offset=torch.tensor(offsets, dtype=dtype), layout=layout, **more)
        out = out.transpose(1, 2) if layout == "bshd" else out
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        for b, end in enumerate(ends):
            own = [x[b : b + 1, :, :n].detach().requires_grad_() for x, n in ((q, 1), (k, end), (v, end))]
            alone = gs.attention(*own, implementation="reference")
            torch.testing.assert_close(out[b : b + 1], alone, atol=1e-12, rtol=0)
            wanted = torch.autograd.grad(alone.square().sum(), own)
            for x, y in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(x[b : b + 1, :, : y.shape[2]], y, atol=1e-12, rtol=0)
                assert not x[b, :, y.shape[2] :].any()


def test_lengths_of_one_query_follow_what_is_written() -> None:
    """Offsets are read in each call, also by one that is compiled; what is written later changes no gradient."""
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (1, 40, 40))
    at = torch.tensor([3, 30])

    def run(at: Tensor) -> Tensor:
        return gs.attention(q, k, v, gs.Causal(), q_offset=at)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for offsets in ([3, 30], [39, 0], [-1, 12]):
        at.copy_(torch.tensor(offsets))
        wanted = [gs.attention(q, k[:, :, : n + 1], v[:, :, : n + 1], implementation="reference") for n in offsets]
        for out in (run(at), compiled(at)):
            for b in range(2):
                torch.testing.assert_close(out[b], wanted[b][b])
    out = run(at)
    at.fill_(39)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert not dk[0].any() and dk[1, :, 12].any() and not dk[1, :, 13:].any()


def test_what_a_wrong_offset_of_one_query_says() -> None:
    q, k, v = (torch.randn(2, 2, n, 8) for n in (1, 40, 40))
    wrong = (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0]), torch.tensor([[1], [2]]))
    for offset in wrong:
        with pytest.raises(ValueError, match="q_offset must be"):
            gs.attention(q, k, v, gs.Causal(), q_offset=offset)
    with pytest.raises(ValueError, match="key_lengths must be"):
        gs.attention(q, k, v, gs.Causal(), q_offset=torch.tensor([1, 2]), key_lengths=torch.tensor([1.0, 2.0]))
    explained = gs.explain(q, k, v, gs.Causal(), q_offset=torch.tensor([1, 2]))
    assert explained.structure is None and "key_lengths" in str(explained.problem.score_terms)
