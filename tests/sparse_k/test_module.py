"""`SparseKAttention`: its parallel form, and its step form at every position of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.sparse_k.cache import SparseKCache


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


def steps(layer: gs.nn.SparseKAttention, x: Tensor) -> tuple[Tensor, list[SparseKCache]]:
    """(B, N, dim) by steps, and every cache."""
    found, caches, cache = [], [], None
    for x_t in x.unbind(1):
        y, cache = layer.step(x_t, cache)
        found.append(y)
        caches.append(cache)
    return torch.stack(found, 1), caches


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
    found, caches = steps(layer, x)
    torch.testing.assert_close(found, layer(x), rtol=1e-10, atol=1e-12)
    u = layer.scores(x)
    tau, last = gs.sparsek_causal(u, k_keep).tau, gs.last_topk(u, k_keep)
    torch.testing.assert_close(torch.stack([c.tau for c in caches], 2), tau, rtol=1e-12, atol=1e-14)
    for t, cache in enumerate(caches):
        # Which keys are kept, ties to the earlier: in both forms the same.
        kept = torch.zeros(2, 2, 61, dtype=torch.bool).scatter(2, cache.kept.at.where(cache.kept.at >= 0, 60), True)
        assert torch.equal(kept[..., : t + 1], last[..., : t + 1] >= t)


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
    found, caches = steps(layer, x)
    torch.testing.assert_close(found, layer(x), rtol=1e-10, atol=1e-12)
    others = {c.nbytes - c.live.nbytes for c in caches}
    assert len(others) == 1
    places = [c.live.shape[2] for c in caches]
    if spread:
        assert set(places) == {2 * 16 + 64}
    else:
        assert places[-1] == 768 and sorted(set(places)) == [96, 192, 384, 768]


def test_an_older_cache_goes_on_from_its_own_token() -> None:
    x, layer = draw(), make(window=3)
    _, caches = steps(layer, x)
    other = draw(seed=1)[:, :5]
    cache = caches[29]
    for x_t in other.unbind(1):
        y, cache = layer.step(x_t, cache)
    torch.testing.assert_close(y, layer(torch.cat([x[:, :30], other], 1))[:, -1])
    y, _ = layer.step(x[:, 30], caches[29])
    torch.testing.assert_close(y, layer(x[:, :31])[:, -1])


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


def test_gradients_of_steps() -> None:
    x, layer = draw(N=20).requires_grad_(), make(slope=20.0, k_keep=4, window=2)
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    found = torch.autograd.grad(steps(layer, x)[0].square().sum(), (x, *layer.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    """Scores are float32 in both forms, under autocast too."""
    x, layer = draw(dtype=dtype), make(window=3).to(dtype)
    found, caches = steps(layer, x)
    assert found.dtype == layer(x).dtype == dtype and caches[-1].kept.u.dtype == torch.float32
    assert caches[-1].near_k.dtype == dtype
    rough = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, layer(x), rtol=rough, atol=rough)
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
    _, cache = layer.step(draw()[:, 0])
    with pytest.raises(ValueError, match="cache must be of this layer and of a batch of 1; it is of a batch of 2"):
        layer.step(draw(B=1)[:, 0], cache)
    with pytest.raises(ValueError, match="cache must be of this layer"):
        make(window=1).step(draw()[:, 0], cache)


def test_a_cache_of_another_layer_is_refused() -> None:
    x = torch.randn(2, 16)
    _, cache = gs.nn.SparseKAttention(16, 4, 2, k_keep=4, window=2).step(x)
    with pytest.raises(ValueError, match="4 keys kept"):
        gs.nn.SparseKAttention(16, 4, 2, k_keep=8, window=2).step(x, cache)
