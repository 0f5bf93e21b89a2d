"""`SparseKAttention`: its parallel form, and its step form at every position of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.sparse_k import chunks
from gossamer.sparse_k.cache import Entries, SparseKCache
from gossamer.sparse_k.launch.problem import Options
from tests.support.modes import Largest


def draw(B: int = 2, N: int = 60, dim: int = 16, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, N, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(spread: float | str = 1.0, slope: float = 0.0, **given: Any) -> gs.nn.SparseKAttention:
    """A layer in float64; "ties" of spread gives scores 0, 1/4, 1/2, ..."""
    torch.manual_seed(3)
    layer = gs.nn.SparseKAttention(**{"dim": 16, "heads": 4, "kv_heads": 2, "k_keep": 8, **given}).double()
    with torch.no_grad():
        layer.slope.copy_(torch.tensor([slope, -slope / 2])[: layer.kv_heads])
        if spread == "ties":
            layer.score.weight.zero_()[:, 0] = 0.25
        else:
            layer.score.weight.normal_().mul_(spread / 4)
    return layer


def steps(layer: gs.nn.SparseKAttention, x: Tensor) -> tuple[Tensor, SparseKCache]:
    """(B, N, dim) by steps, and the cache."""
    found, cache = [], None
    for x_t in x.unbind(1):
        y, cache = layer.step(x_t, cache)
        found.append(y)
    assert cache is not None
    return torch.stack(found, 1), cache


def check_cache(cache: SparseKCache, u: Tensor, k_keep: int) -> None:
    """Its threshold and its kept keys are those of the scores (G, n) of each sequence up to now."""
    for b, of_one in enumerate(u):
        n = int(cache.lengths[b])
        if n:
            tau, last = gs.sparsek_causal(of_one[:, :n], k_keep).tau, gs.last_topk(of_one[:, :n], k_keep)
            torch.testing.assert_close(cache.tau[b], tau[:, -1], rtol=1e-12, atol=1e-14)
            for at, kept, wanted in zip(cache.entries.at[b], cache.kept()[b], last >= n - 1, strict=True):
                # Ties to the earlier: in both forms the same.
                assert at[kept].tolist() == wanted.nonzero()[:, 0].tolist()


def test_the_parallel_form() -> None:
    x, layer = draw(), make(slope=30.0, window=5)
    q, k, v = (
        linear(x).view(2, 60, heads, 4).transpose(1, 2) for linear, heads in ((layer.q, 4), (layer.k, 2), (layer.v, 2))
    )
    t = torch.arange(60, dtype=torch.float64)
    u = (x @ layer.score.weight.mT).mT + layer.slope[:, None] * t / 1024
    out = gs.sparsek_attention(q, k, v, u, k_keep=8, window=5)
    torch.testing.assert_close(layer(x), out.transpose(1, 2).reshape(2, 60, 16) @ layer.out.weight.mT)
    torch.testing.assert_close(layer.scores(x), u)


@pytest.mark.parametrize("gate", ["v", "kv", "logit", None])
@pytest.mark.parametrize("window", [0, 3, 80])
@pytest.mark.parametrize("k_keep", [1, 8, 70])
@pytest.mark.parametrize(
    ("spread", "slope"), [(1.0, 0.0), (1e-3, 0.0), (1.0, 50.0), (30.0, 0.0), ("ties", 0.0), (0.0, 0.0)]
)
def test_steps_equal_the_parallel_form(spread: Any, slope: float, k_keep: int, window: int, gate: Any) -> None:
    x, layer = draw(), make(spread, slope, k_keep=k_keep, window=window, gate=gate)
    if spread == "ties":
        x[..., 0] = (2 * x[..., 0]).round()
    wanted, u, cache = layer(x), layer.scores(x), None
    with torch.no_grad():
        for t, x_t in enumerate(x.unbind(1)):
            y, cache = layer.step(x_t, cache)
            torch.testing.assert_close(y, wanted[:, t], rtol=1e-10, atol=1e-12)
            check_cache(cache, u, k_keep)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_any_lengths_in_any_chunks(seed: int) -> None:
    """Sequences that get other numbers of tokens in each call, then steps; what is padding may be NaN."""
    draw_of = random.Random(seed)
    for _ in range(12):
        spread, slope = draw_of.choice([(1.0, 0.0), (1e-3, 0.0), (1.0, 50.0), (1.0, -50.0), (30.0, 0.0), (0.0, 0.0)])
        k_keep, window = draw_of.choice([1, 3, 8, 70]), draw_of.choice([0, 2, 5, 90])
        layer = make(spread, slope, k_keep=k_keep, window=window, gate=draw_of.choice(["v", "kv", "logit", None]))
        B = draw_of.choice([1, 3])
        x = draw(B, draw_of.choice([20, 150]), seed=draw_of.randrange(2**31))
        if draw_of.random() < 0.3:
            x = (2 * x).round() / 2
        N, done, cache = x.shape[1], [0] * B, None
        wanted, u = layer(x), layer.scores(x)
        while min(done) < N:
            m = draw_of.choice([0, 1, 1, 2, 7, 33, 100])
            counts = [min(draw_of.choice([m, draw_of.randint(0, m)]), N - n) for n in done]
            padded = torch.full((B, m, 16), torch.nan, dtype=torch.float64)
            for row, of_one, n, count in zip(padded, x, done, counts, strict=True):
                row[:count] = of_one[n : n + count]
            lengths = draw_of.choice([counts, torch.tensor(counts, dtype=torch.int32)])
            with torch.no_grad():
                y, cache = layer.prefill(padded, cache, None if set(counts) == {m} else lengths)
            for b, count in enumerate(counts):
                of_one = wanted[b, done[b] : done[b] + count]
                torch.testing.assert_close(y[b, :count], of_one, rtol=1e-9, atol=1e-11)
                assert not y[b, count:].any()
                done[b] += count
            assert cache.lengths.tolist() == done
            check_cache(cache, u, k_keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_of_a_cache_are_those_of_all_scores(dtype: torch.dtype) -> None:
    """Of infinite and of equal ones too, whatever was dropped: the same bits, in float64 but for the last ones."""
    draw_of = random.Random(0)
    for seed in range(40):
        torch.manual_seed(seed)
        u = draw_of.choice([1e-2, 1.0, 30.0]) * torch.randn(2, 2, 300, dtype=dtype)
        kind = draw_of.choice(["plain", "ties", "gone", "infinite"])
        if kind == "ties":
            u = (2 * u).round() / 2
        elif kind != "plain":
            u = torch.where(torch.rand_like(u) < 0.3, -torch.inf if kind == "gone" else torch.inf, u)
        k_keep, at, cache = draw_of.choice([1, 5, 40]), 0, None
        tau = gs.sparsek_causal(u, k_keep).tau
        last = gs.last_topk(u, k_keep)
        while at < 300:
            m = min(draw_of.choice([1, 1, 3, 50]), 300 - at)
            k = torch.zeros(2, 2, m, 1, dtype=dtype)
            place = torch.arange(at, at + m).expand(2, 2, m)
            tokens = Entries(k, k, u[..., at : at + m], place)
            cache = SparseKCache(tokens, k_keep, window=3) if cache is None else cache
            call = cache.add(k, tokens, None)
            at += m
            found, true = call.tau[..., -m:], tau[..., at - m : at]
            if dtype == torch.float32:
                assert torch.equal(found.nan_to_num(nan=7), true.nan_to_num(nan=7))
            else:
                torch.testing.assert_close(found, true, rtol=1e-15, atol=1e-15, equal_nan=True)
            for one, kept, wanted in zip(cache.entries.at.flatten(0, 1), cache.kept().flatten(0, 1),
                                         last.flatten(0, 1)[:, :at] >= at - 1, strict=True):  # fmt: skip
                assert one[kept].tolist() == wanted.nonzero()[:, 0].tolist()


def test_steps_write_in_place() -> None:
    """Nothing as large as the keys is made in a step, but where the memory is full."""

    class Made(Largest):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            views = isinstance(result, Tensor) and result.untyped_storage().data_ptr() in places
            return result if views else super().__torch_dispatch__(lambda: result, types)

    def tokens(m: int, at: int) -> tuple[Tensor, Entries]:
        k, place = torch.randn(1, 2, m, 64), torch.arange(at, at + m).expand(1, 2, m)
        return torch.randn(1, 4, m, 64), Entries(k, k, torch.randn(1, 2, m), place)

    q, prompt = tokens(500, 0)
    cache = SparseKCache(prompt, k_keep=200, window=100)
    cache.add(q, prompt, None)
    cache.add(*tokens(1, 500), None)
    places = {one.untyped_storage().data_ptr() for one in cache.entries}
    with Made() as largest:
        for at in range(501, 560):
            call = cache.add(*tokens(1, at), None)
            chunks.forward(call, Options(100, "v", True, 0.125, False, 200, True, call.u.shape[2] - 1))
    assert {one.untyped_storage().data_ptr() for one in cache.entries} == places
    assert 0 < largest.elements < cache.entries.k.numel() / 8


def test_one_head_a_key_head_and_one_token() -> None:
    layer = make(heads=2, kv_heads=2, window=2)
    x = draw(N=30)
    torch.testing.assert_close(steps(layer, x)[0], layer(x))
    y, _ = layer.step(x[:, 0])
    torch.testing.assert_close(y, layer(x[:, :1])[:, 0])


def test_fewer_tokens_than_are_kept_is_causal_attention() -> None:
    x, layer = draw(N=8), make(window=2)
    q, k, v = (
        linear(x).view(2, 8, heads, 4).transpose(1, 2) for linear, heads in ((layer.q, 4), (layer.k, 2), (layer.v, 2))
    )
    out = gs.attention(q, k, v, gs.Causal()).transpose(1, 2).reshape(2, 8, 16)
    torch.testing.assert_close(layer(x), layer.out(out))
    torch.testing.assert_close(steps(layer, x)[0], layer.out(out))


@pytest.mark.parametrize("spread", [4.0, 0.0])
def test_memory_is_constant_but_for_scores_that_lie_close(spread: float) -> None:
    """Of equal scores all are live for ever; each is one number."""
    x, layer = draw(B=1, N=700), make(spread, k_keep=16, window=4, gate="v")
    wanted, most, scores, cache = layer(x), 16 + 4 + 64, [], None
    with torch.no_grad():
        for t, x_t in enumerate(x.unbind(1)):
            y, cache = layer.step(x_t, cache)
            torch.testing.assert_close(y, wanted[:, t], rtol=1e-10, atol=1e-12)
            assert cache.entries.k.shape[2] <= most
            scores.append(cache.live.shape[2])
        _, at_once = layer.prefill(x)
    assert at_once.entries.k.shape[2] <= most
    if spread:
        assert max(scores) <= 2 * 16 + 64
    else:
        assert scores[-1] == 700
    assert cache.nbytes <= 8 * (2 * (most * 9 + max(scores) * 2) + 10)


def test_a_copy_goes_on_from_its_own_token() -> None:
    x, layer = draw(), make(window=3)
    other = draw(seed=1)[:, :5]
    with torch.no_grad():
        _, cache = layer.prefill(x[:, :30])
        copy = cache.copy()
        layer.prefill(x[:, 30:], cache)
        y, _ = layer.prefill(other, copy)
        torch.testing.assert_close(y, layer(torch.cat([x[:, :30], other], 1))[:, 30:])
    assert copy.lengths.tolist() == [35, 35] and cache.lengths.tolist() == [60, 60]


def test_modes_between_calls() -> None:
    """A cache that was written without gradients goes on with them, and in and out of inference mode."""
    x, layer = draw(), make(window=3)
    with torch.inference_mode():
        _, cache = layer.prefill(x[:, :30])
    with torch.no_grad():
        _, cache = layer.prefill(x[:, 30:31], cache)
    y, cache = layer.step(x[:, 31], cache)
    y.sum().backward()
    assert layer.q.weight.grad is not None and layer.q.weight.grad.any()
    with torch.inference_mode():
        y, cache = layer.step(x[:, 32], cache)
    torch.testing.assert_close(y, layer(x)[:, 32])


@pytest.mark.parametrize("straight", [False, True])
def test_differences(straight: bool) -> None:
    """Of the input and of all parameters, w and the slope among them."""
    layer = gs.nn.SparseKAttention(4, 2, 1, k_keep=2, window=1, straight_through=False).double()
    x = 0.7 * draw(B=1, N=7, dim=4)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(call, (x.requires_grad_(), *values))
    layer.straight_through = straight
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("lengths", [None, [20, 13]])
def test_gradients_of_steps_and_prompts(lengths: list[int] | None) -> None:
    x, layer = draw(N=20).requires_grad_(), make(slope=20.0, k_keep=4, window=2)
    counts = lengths or [20, 20]
    there = torch.arange(20) < torch.tensor(counts)[:, None]
    wanted = torch.autograd.grad(layer(x)[there].square().sum(), (x, *layer.parameters()))
    forms = [layer.prefill(x, lengths=lengths)[0][there]]
    if lengths is None:
        forms.append(steps(layer, x)[0][there])
        first, cache = layer.prefill(x[:, :7])
        forms.append(torch.cat([first, layer.prefill(x[:, 7:], cache)[0]], 1)[there])
    for form in forms:
        found = torch.autograd.grad(form.square().sum(), (x, *layer.parameters()))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    """Scores are float32 in both forms, under autocast too."""
    x, layer = draw(dtype=dtype), make(window=3).to(dtype)
    found, cache = steps(layer, x)
    assert found.dtype == layer(x).dtype == dtype and cache.entries.u.dtype == torch.float32
    assert cache.entries.k.dtype == dtype
    rough = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, layer(x), rtol=rough, atol=rough)
    torch.testing.assert_close(layer.prefill(x)[0], layer(x), rtol=rough, atol=rough)
    layer = layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.scores(x.float()).dtype == torch.float32
        parallel, (stepped, _) = layer(x.float()), steps(layer, x.float())
    assert parallel.dtype == stepped.dtype == torch.bfloat16
    torch.testing.assert_close(stepped, parallel, rtol=0.03, atol=0.03)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled() -> None:
    x, layer = draw(), make(window=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 15}, "dim must be a multiple of heads"),
        ({"kv_heads": 3}, "dim must be a multiple of heads, and heads of kv_heads; got dim=16, heads=4, kv_heads=3"),
        ({"k_keep": 0}, "k_keep must be an integer"),
        ({"window": -1}, "window must be an integer"),
        ({"gate": "q"}, "gate must be one of"),
        ({"gate": "kv", "straight_through": True}, "gate must be one of"),
    ],
)
def test_wrong_layers(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**given)


def test_wrong_calls() -> None:
    layer = make()
    with pytest.raises(ValueError, match=r"x must be a tensor \(B, N, dim\) with dim=16"):
        layer(draw()[0])
    with pytest.raises(ValueError, match=r"x must be a tensor \(B, dim\)"):
        layer.step(draw())
    with pytest.raises(ValueError, match=r"x must be a tensor \(B, N, dim\)"):
        layer.prefill(draw()[:, 0])
    for wrong in ([1], [1.0, 2.0], 5, torch.ones(2), torch.ones(2, 1).long()):
        with pytest.raises(ValueError, match="lengths"):
            layer.prefill(draw(), lengths=wrong)
    _, cache = layer.step(draw()[:, 0])
    with pytest.raises(ValueError, match="cache must be of this layer and of a batch of 1; it is of a batch of 2"):
        layer.step(draw(B=1)[:, 0], cache)
    with pytest.raises(ValueError, match="cache must be of this layer"):
        make(window=1).step(draw()[:, 0], cache)
    with pytest.raises(ValueError, match=r"cache must be of this layer.*float64"):
        make().float().step(draw().float()[:, 0], cache)


def test_a_cache_of_another_layer_is_refused() -> None:
    x = torch.randn(2, 16)
    _, cache = gs.nn.SparseKAttention(16, 4, 2, k_keep=4, window=2).step(x)
    with pytest.raises(ValueError, match="4 keys kept"):
        gs.nn.SparseKAttention(16, 4, 2, k_keep=8, window=2).step(x, cache)
