"""`topk_keys`, `gs.nn.SplashAttention`, compiled calls, and arguments that are wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from tests.entmax.test_attention import inputs


@pytest.mark.parametrize("seed", range(12))
def test_topk_against_a_stable_sort(seed: int) -> None:
    """Small integers, whose scores are exact in every type: many ties, rows that see few keys or none, k over K."""
    draw = random.Random(seed)
    B, (H, G) = draw.choice([1, 2]), draw.choice([(1, 1), (4, 2), (2, 2)])
    Q, K = draw.choice([1, 33, 200]), draw.choice([1, 40, 1500])
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    generator = torch.Generator().manual_seed(seed)
    span = draw.choice([1, 3, 40])
    q, k = (
        torch.randint(-span, span + 1, shape, generator=generator).to(dtype) for shape in ((B, H, Q, 3), (B, G, K, 3))
    )
    mask = torch.rand(B, 1, Q, K, generator=generator) < draw.choice([0.02, 0.5, 1.0])
    n, scale = draw.choice([1, 2, 8, 64, 2000]), draw.choice([1.0, 0.125, -2.0])
    causal = draw.random() < 0.5
    found = gs.topk_keys(q, k, mask, k_keep=n, causal=causal, scale=scale)
    assert found.dtype == torch.int32 and found.shape == (B, H, Q, n)
    seen = mask.numpy() & (np.arange(K) <= np.arange(Q)[:, None] + K - Q) if causal else mask.numpy()
    for b, h, r in np.ndindex(B, H, Q):
        (keys,) = np.nonzero(seen[b, 0, r])
        s = scale * (k[b, h // (H // G), keys].double() @ q[b, h, r].double()).numpy()
        expected = np.full(n, -1)
        kept = np.sort(keys[np.argsort(-s, kind="stable")[:n]])
        expected[: len(kept)] = kept
        assert (found[b, h, r].numpy() == expected).all()
    # The same keys carry the weights of top_k: with alpha 1 each of them has one.
    v = torch.eye(K, dtype=torch.float64)[None, None].expand(B, G, K, K) if K <= 40 else None
    if v is not None:
        out = gs.entmax_attention(q.double(), k.double(), v, mask, alpha=1, top_k=n, causal=causal, scale=scale / 64)
        assert (out > 0).sum(-1).tolist() == (found >= 0).sum(-1).tolist()


def test_topk_forms() -> None:
    q, k, _ = inputs(H=2, G=2)
    whole = gs.topk_keys(q, k, gs.Causal(), k_keep=4)
    assert torch.equal(gs.topk_keys(q[0], k[0], causal=True, k_keep=4), whole[0])
    i = torch.arange(40)
    assert torch.equal(gs.topk_keys(q[0, 0], k[0, 0], q_positions=i, k_positions=i, k_keep=4), whole[0, 0])
    assert not gs.topk_keys(q.requires_grad_(), k, k_keep=4).requires_grad


def test_the_module_learns_alpha() -> None:
    Q, K, V = (x.float() for x in inputs(H=4, G=2))
    module = gs.nn.SplashAttention(8, alpha=torch.nn.Parameter(torch.full((4,), 1.5)), k_keep=None)
    module(Q, K, V).square().sum().backward()
    (alpha,) = module.parameters()
    assert alpha.grad is not None and alpha.grad.shape == (4,) and alpha.grad.all()
    assert "k_keep=None" in repr(module)
    fixed = gs.nn.SplashAttention(8, alpha=torch.full((4,), 1.5), k_keep=None)
    assert list(fixed.state_dict()) == ["alpha"] and not list(fixed.parameters())
    torch.testing.assert_close(fixed(Q, K, V), gs.nn.SplashAttention(8, k_keep=None)(Q, K, V))


def test_compiled(fresh_compiler: None) -> None:
    """One graph, forward and backward, with the results of an eager call; patterns, masks, positions."""
    q, k, v = (x.requires_grad_() for x in inputs(B=2, H=4, G=2, Q=70, K=80))
    alpha = torch.tensor([1.2, 1.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    mask = torch.from_numpy(gs.SlidingWindow(20).materialize(70, 80))
    layout = gs.SlidingWindow(20).layout(70, 80, block_q=64, block_kv=64).to("cpu")
    window, i, j = gs.SlidingWindow(20), torch.arange(70), torch.arange(80)

    def call(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> tuple[Tensor, ...]:
        x = gs.entmax_attention(q, k, v, window, alpha=alpha)
        y, aux = gs.entmax_attention(q, k, v, mask, alpha=alpha, top_k=5, return_aux=True)
        z = gs.entmax_attention(q[0], k[0], v[0], q_positions=i, k_positions=j) + gs.entmax_attention(q, k, v, layout)
        return x, y, z, *aux, gs.topk_keys(q, k, window, k_keep=3)

    def all_results(call: Any) -> list[Tensor]:
        x, y, z, *rest = call(q, k, v, alpha)
        loss = x.square().sum() + y.sum() + z.square().sum()
        return [x, y, z, *rest, *torch.autograd.grad(loss, (q, k, v, alpha))]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, expected in zip(all_results(compiled), all_results(call), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


q = torch.zeros(2, 4, 8, 16)
kv = torch.zeros(2, 2, 8, 16)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no tensor": ((np.zeros((2, 2)), kv, kv), {}, "q must be a torch tensor"),
    "rank": ((q, kv[0], kv), {}, "q, k and v must all have 2, 3 or 4 dimensions"),
    "heads": ((q, kv[:, :1].expand(2, 3, 8, 16), kv[:, :1].expand(2, 3, 8, 16)), {}, "number of heads G that divides"),
    "types": ((q, kv.double(), kv), {}, "k must be a tensor of q's dtype"),
    "alpha low": ((q, kv, kv), {"alpha": 0.99}, r"alpha must be a number in \[1, 2\] or a tensor \(H,\); got 0.99"),
    "alpha high": ((q, kv, kv), {"alpha": 2.01}, r"alpha must be a number in \[1, 2\]"),
    "alpha nan": ((q, kv, kv), {"alpha": float("nan")}, "alpha must be a number in"),
    "alpha text": ((q, kv, kv), {"alpha": "1.5"}, "alpha must be a number in"),
    "alphas high": ((q, kv, kv), {"alpha": torch.tensor([1.0, 2.5, 2.0, 0.5])}, r"alpha must lie in.*\[0.5, 2.5\]"),
    "alphas nan": ((q, kv, kv), {"alpha": torch.full((4,), torch.nan)}, "alpha must lie in"),
    "alphas shape": ((q, kv, kv), {"alpha": torch.ones(2)}, r"shape \(H,\) = \(4,\) or \(\) on cpu; got shape \(2,\)"),
    "alphas integers": ((q, kv, kv), {"alpha": torch.ones(4).int()}, "a tensor of floating point"),
    "top_k": ((q, kv, kv), {"top_k": 0}, r"top_k must be an integer in \[1, .*\] or None, got 0"),
    "top_k float": ((q, kv, kv), {"top_k": 2.0}, "top_k must be an integer"),
    "causal": ((q, kv, kv), {"causal": 1}, "causal must be True or False"),
    "positions list": ((q, kv, kv), {"q_positions": [1]}, "q_positions must be a tensor of integers or None"),
    "positions float": ((q, kv, kv), {"q_positions": torch.zeros(8)}, "q_positions must be integers"),
    "positions shape": (
        (q, kv, kv), {"q_positions": torch.zeros(7, dtype=torch.int32)},
        r"q_positions must broadcast to \(2, 4, 8\); got shape \(7,\)",
    ),
    "key positions shape": (
        (q, kv, kv), {"k_positions": torch.zeros(3, 8, dtype=torch.int32)},
        r"k_positions must broadcast to \(2, 4, 8\) or \(2, 2, 8\)",
    ),
    "scale": ((q, kv, kv), {"scale": float("inf")}, "scale must be a finite number"),
    "save": ((q, kv, kv), {"save": "scores"}, 'save must be "lists" or "tau"'),
    "aux": ((q, kv, kv), {"return_aux": 1}, "return_aux must be True or False"),
    "implementation": ((q, kv, kv), {"implementation": "hopper"}, "implementation must be one of .'kernels', 'torch'"),
    "kernels": ((q, kv, kv), {"implementation": "kernels"}, "does not take this call: tensors are on cpu"),
    "pattern": ((q, kv, kv, True), {}, "pattern must be None, a Pattern"),
    "mask": ((q, kv, kv, torch.ones(7, 8, dtype=torch.bool)), {}, "a dense mask, must be boolean"),
    "sizes of the pattern": ((q, kv, kv, gs.PerHead([gs.Causal()] * 3)), {}, "3 query heads, the inputs have 4"),
    "layout": ((q, kv, kv, gs.Causal().layout(9, 9, block_q=32, block_kv=32)), {}, "must have .Q, K. of the inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    given, options, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        gs.entmax_attention(*given, **options)


def test_wrong_arguments_of_the_others() -> None:
    with pytest.raises(ValueError, match=r"k_keep must be an integer in \[1, \d+\], got None"):
        gs.topk_keys(q, kv, k_keep=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k_keep must be an integer"):
        gs.topk_keys(q, kv, k_keep=0)
    with pytest.raises(ValueError, match=r"q must hold numbers.*meta"):
        gs.explain_entmax(*(x.to("meta") for x in (q, kv, kv)))
    with pytest.raises(ValueError, match="Q must have the head size of the module, head_dim=8"):
        gs.nn.SplashAttention(8)(q, kv, kv)
    with pytest.raises(ValueError, match="head_dim must be an integer"):
        gs.nn.SplashAttention(0)
    with pytest.raises(ValueError, match=r"k_keep must be an integer in .* or None"):
        gs.nn.SplashAttention(8, k_keep=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 3}, r"alpha must be a number in \[1, 2\] or a tensor \(H,\); got 3"),
        ({"alpha": [1.5]}, "alpha must be a number in"),
        ({"alpha": torch.ones(4, 1)}, r"shape \(H,\) or \(\); got shape \(4, 1\)"),
        ({"alpha": torch.ones(4).int()}, "a tensor of floating point"),
        ({"alpha": torch.tensor([1.5, 2.5])}, r"alpha must lie in \[1, 2\] in every head; .*\[2.5\]"),
        ({"sm_scale": float("nan")}, "sm_scale must be a finite number or None; got nan"),
        ({"sm_scale": "a"}, "sm_scale must be a finite number or None; got 'a'"),
        ({"sm_scale": True}, "sm_scale must be a finite number"),
    ],
)
def test_wrong_arguments_of_the_module(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gs.nn.SplashAttention(16, **options)


def test_wrong_positions_of_the_module() -> None:
    module = gs.nn.SplashAttention(16, alpha=np.float32(1.5), sm_scale=np.float64(0.5))  # type: ignore[arg-type]
    i = torch.arange(8)
    for given, message in (
        ((None, [1]), "K_idx must be a tensor"),
        ((i.float(), i), "Q_idx must be integers .int8, uint8, int16, int32 or int64."),
        ((i.to(torch.uint16), i), "Q_idx must be integers"),
        ((i, i[:7]), r"K_idx must broadcast to \(2, 4, 8\) or \(2, 2, 8\); got shape \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            module(q, kv, kv, *given)
    assert module(q[0], kv[0], kv[0], i, i).shape == (4, 8, 16)


def test_tensors_without_values() -> None:
    """On the meta device shapes and types come out, of gradients too."""
    x = [y.to("meta").half().requires_grad_() for y in (q, kv, kv)]
    alpha = torch.full((4,), 1.5, device="meta", requires_grad=True)
    i = torch.arange(8, device="meta")
    out, aux = gs.entmax_attention(*x, gs.Causal(), alpha=alpha, q_positions=i, return_aux=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.float16, "meta")
    assert [(y.shape, y.dtype) for y in aux] == [((2, 4, 8), y) for y in (torch.float32, torch.int32, torch.bool)]
    assert [y.shape for y in torch.autograd.grad(out.sum(), (*x, alpha))] == [y.shape for y in (*x, alpha)]
    assert gs.topk_keys(*x[:2], k_keep=3).shape == (2, 4, 8, 3)
    with torch.device("meta"):
        module = gs.nn.SplashAttention(16, alpha=torch.nn.Parameter(torch.full((4,), 1.5)))
    assert module(*x).is_meta
    with pytest.raises(ValueError, match="q_positions must broadcast"):
        gs.entmax_attention(*x, q_positions=i[:7])


def _attended(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Of the positions that a mask chooses, whose number only the data know."""
    q, k, v = (x[:, :, there] for x in (q, k, v))
    out = gs.entmax_attention(q, k, v, gs.SlidingWindow(9), causal=True, top_k=4)
    return out, gs.topk_keys(q, k, k_keep=3)


@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_that_only_the_data_know() -> None:
    """Under a whole compiled graph and in an exported one, also of none."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 2, 30, 8, generator=g, requires_grad=True) for _ in range(3)]
    masks = [torch.rand(30, generator=g) > chance for chance in (0.5, 0.9, 0.0, 1.0)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(_attended, fullgraph=True, backend="aot_eager")
        for mask in masks:
            found, wanted = compiled(*x, mask), _attended(*x, mask)
            assert torch.equal(found[1], wanted[1])
            torch.testing.assert_close(found[0], wanted[0])
            of_both = (torch.autograd.grad(out.sum(), x) for out, _ in (found, wanted))
            for a, b in zip(*of_both, strict=True):
                torch.testing.assert_close(a, b)

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
            return _attended(q, k, v, there)

    fixed = [t.detach() for t in x]
    exported = torch.export.export(Module(), (*fixed, masks[0])).module()
    for mask in masks:
        for a, b in zip(exported(*fixed, mask), _attended(*fixed, mask), strict=True):
            torch.testing.assert_close(a, b)
