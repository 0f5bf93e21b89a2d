"""Results of several attentions as one: a key counts once for each."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs


def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Softmax in which key j counts count[..., i, j] times in row i."""
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    weight = count * torch.exp(s)
    total = weight.sum(-1)
    return weight @ v / total.clamp(min=1e-300)[..., None], torch.log(total)


def test_merge_by_lse_counts_a_key_for_each_branch() -> None:
    pattern = gs.LongNet((8, 16, 48), (1, 2, 3), heads=3)
    leaves = [torch.randn(2, 3, 48, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    count = sum(torch.from_numpy(b.materialize(48, 48)) * 1.0 for b in pattern.branches())
    assert float(count.max()) > 1
    found = gs.attention(*leaves, pattern, merge="lse", return_lse=True)
    exact = counted(*leaves, count)
    douts = [torch.randn_like(x) for x in exact]
    pairs = []
    for results in (found, exact):
        pairs.append([*results, *torch.autograd.grad(list(results), leaves, douts)])
    for actual, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_merge_of_unions_and_its_errors() -> None:
    x = torch.randn(1, 2, 40, 8)
    union = gs.SlidingWindow(3) | gs.Dilated(3, 0, 4) | gs.SlidingWindow(1)
    sinks = torch.randn(2)
    out, lse = gs.attention(x, x, x, union, merge="lse", return_lse=True, sink_logits=sinks)
    ones = [gs.SlidingWindow(3), gs.Dilated(3, 0, 4), gs.SlidingWindow(1)]
    results = [
        gs.attention(x, x, x, p, return_lse=True, sink_logits=s) for p, s in zip(ones, (sinks, None, None), strict=True)
    ]
    again = gs.merge([r[0] for r in results], [r[1] for r in results])
    torch.testing.assert_close((out, lse), again)
    named = gs.attention(x, x, x, union.handle, merge="lse", return_lse=True, sink_logits=sinks)
    assert all(torch.equal(*y) for y in zip(named, (out, lse), strict=True))
    with pytest.raises(ValueError, match="must be a union"):
        gs.attention(x, x, x, gs.SlidingWindow(3), merge="lse")
    with pytest.raises(ValueError, match="merge must be"):
        gs.attention(x, x, x, union, merge="sum")
    with pytest.raises(ValueError, match="as many"):
        gs.merge([out], [])
    with pytest.raises(ValueError, match="of one shape"):
        gs.merge([out, out[:, :1]], [lse, lse])


def test_merge_of_what_is_no_list_of_results() -> None:
    out, lse = torch.zeros(2, 5, 3), torch.zeros(2, 5)
    for outs, lses, message in (
        (None, None, "outs must be a list of tensors; got None"),
        ([out], 3, "lses must be a list of tensors; got 3"),
        ([None], [None], "outs must be a list of tensors of floating point; it holds None"),
        ([out], [lse.int()], r"lses must be .* floating point; it holds shape \(2, 5\), int32"),
        ([torch.tensor(1.0)], [lse], "outs must be of one shape"),
        ([out, out.to("meta")], [lse, lse], "all on one device; got .*meta"),
    ):
        with pytest.raises(ValueError, match=message):
            gs.merge(outs, lses)  # type: ignore[arg-type]
    stacked = gs.merge(torch.stack([out, out]), torch.stack([lse, lse]))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(stacked, gs.merge([out, out], [lse, lse]), strict=True))


def test_merge_gradient_with_rows_that_keep_nothing() -> None:
    outs = [torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, 5, dtype=torch.float64) for _ in range(3)]
    lses[1][0, 0] = lses[2][1, 1] = -torch.inf
    for x in lses:
        x[0, 3] = -torch.inf
        x.requires_grad_()
    out, lse = gs.merge(outs, lses)
    assert lse[0, 3] == -torch.inf and (out[0, 3] == 0).all()
    finite = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: gs.merge(x[:3], x[3:]), (*outs, *finite))
    grads = torch.autograd.grad((out.sum(), torch.where(lse.isinf(), 0.0, lse).sum()), (*outs, *lses))
    assert all(bool(g.isfinite().all()) for g in grads)
