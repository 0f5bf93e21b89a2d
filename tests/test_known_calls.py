"""Calls of a kind that was computed before: what tells kinds apart, what is kept, and that nothing is forgiven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_cases import gradients, inputs

import gossamer as gs
from gossamer.layouts.kept import Kept
from gossamer.torch import calls


def test_the_second_call_is_known_and_the_same() -> None:
    calls.forget()
    x, pattern = inputs(), gs.SlidingWindow(5)
    first, second = gradients(x), gradients(x)
    assert len(calls._calls) == 1 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    kinds: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"q_offset": 3}, {"softcap": 2.0}, {"deterministic": True}]
    with torch.no_grad():
        found = [[gs.attention(*x, pattern, return_lse=True, **kind) for kind in kinds] for _ in range(2)]
    assert len(calls._calls) == 1 + len(kinds)
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(y, z) for y, z in zip(a, b, strict=True))
    assert len({float(out.detach().sum()) for out, _ in found[0]}) == len(kinds) - 1  # the mode changes no result here


@pytest.mark.parametrize("dims", [2, 3])
def test_calls_of_fewer_dimensions_are_known(dims: int) -> None:
    calls.forget()
    x, pattern = [y.detach()[0] if dims == 3 else y.detach()[0, 0] for y in inputs()], gs.SlidingWindow(5)
    leaves = [y.requires_grad_() for y in x]
    found = []
    for _ in range(2):
        out, lse = gs.attention(*leaves, pattern, return_lse=True)
        found.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)))
    assert len(calls._calls) == 1 and out.shape == x[0].shape and lse.shape == x[0].shape[:-1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_kind_is_told_by_all_that_matters() -> None:
    q, k, v = (torch.randn(2, 2, 24, 8) for _ in range(3))
    pattern = gs.SlidingWindow(5)
    options = (None, None, None, None)
    lengths, sinks = torch.tensor([9, 24]), torch.zeros(2)
    others = {
        "pattern": (q, k, v, gs.SlidingWindow(6), False, options),
        "shape": (q[:1], k[:1], v[:1], pattern, False, options),
        "q's strides": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, pattern, False, options),
        "v's strides": (q, k, v.transpose(1, 2).contiguous().transpose(1, 2), pattern, False, options),
        "type": (q.double(), k.double(), v.double(), pattern, False, options),
        "device": (q, k.to("meta"), v, pattern, False, options),
        "gradient": (q, k.clone().requires_grad_(), v, pattern, False, options),
        "scale": (q, k, v, pattern, False, (1.0, None, None, None)),
        "a bool is no number": (q, k, v, pattern, False, (True, None, None, None)),
        "offset": (q, k, v, pattern, False, (None, 1, None, None)),
        "mode": (q, k, v, pattern, True, options),
        "lengths": (q, k, v, pattern, False, options, (lengths, None, None)),
        "type of lengths": (q, k, v, pattern, False, options, (lengths.int(), None, None)),
        "sinks": (q, k, v, pattern, False, options, (None, sinks, None)),
        "gradient of sinks": (q, k, v, pattern, False, options, (None, sinks.clone().requires_grad_(), None)),
        "slopes": (q, k, v, pattern, False, options, (None, None, sinks)),
    }
    kind = calls.kind_of(q, k, v, pattern, False, options)
    assert kind is not None and kind == calls.kind_of(
        q.clone(), k.clone(), v.clone(), gs.SlidingWindow(5), False, options
    )
    found = [kind, *(calls.kind_of(*other) for other in others.values())]
    assert len(set(found)) == len(found)
    assert found[1 + list(others).index("device")] is None  # tensors without data have no kind
    for none in (
        (None, k, v, pattern, False, options),
        (q, k, v, torch.ones(24, 24, dtype=torch.bool), False, options),
        (q, k, v, pattern, False, (None, torch.tensor(0), None, None)),
        (q, k, v, pattern, False, ([1.0], None, None, None)),
        (q, k, v.to_sparse(), pattern, False, options),
        (q, k, v, pattern, False, options, (lengths.repeat(2)[::2], None, None)),
        (q, k, v, pattern, False, options, (None, torch.zeros(3)[1:], None)),
        (q, k, v, pattern, False, options, (None, None, [0.1, 0.2])),
    ):
        assert calls.kind_of(*none) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": True}, "scale must be a number"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"softcap": -1.0}, "softcap must be a finite number over 0"),
        ({"q_offset": True}, "q_offset must be an int"),
        ({"return_lse": 1}, "return_lse must be True or False"),
        ({"deterministic": 0}, "deterministic must be True, False or None"),
        ({"implementation": "none"}, "implementation must be"),
        ({"k": torch.zeros(1, 2, 24, 9)}, "the head size of q"),
        ({"k": torch.zeros(1, 2, 24, 8).double()}, "q's dtype"),
        ({"k": torch.zeros(1, 2, 24, 8).to_sparse()}, "k must be a strided tensor"),
        ({"v": None}, "v must be a torch tensor"),
        ({"v": torch.zeros(1, 2, 24, 8, device="meta")}, "q's device"),
    ],
)
def test_a_known_call_forgives_nothing(change: dict[str, Any], message: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    good = {"q": q, "k": k, "v": v, "pattern": gs.SlidingWindow(5), "scale": 1.0, "q_offset": 1, "softcap": 1.0}
    for _ in range(2):
        gs.attention(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        gs.attention(**good | change)  # type: ignore[arg-type]


def test_few_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.forget()
    monkeypatch.setattr(calls, "_calls", Kept(3))
    x = [y.detach() for y in inputs()]
    for left in range(6):
        gs.attention(*x, gs.SlidingWindow(left))
    assert len(calls._calls) == 3


def test_a_hundred_layers_are_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a pattern of its own, asked for in turn: in the second round there is room for all, and it stays."""
    calls.forget()
    x, made = [y.detach() for y in inputs()], []
    patterns = [gs.SlidingWindow(left, right) for left in range(10) for right in range(10)]
    init = calls.Call.__init__
    monkeypatch.setattr(calls.Call, "__init__", lambda self, *rest: (made.append(1), init(self, *rest))[1])
    rounds = []
    for _ in range(4):
        for pattern in patterns:
            gs.attention(*x, pattern)
        rounds.append(len(made))
    assert rounds[0] == 100 and rounds[1] <= 200 and rounds[1] == rounds[2] == rounds[3]
    calls.forget()


def test_no_memory_to_bind_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has succeeded, and so do its repetitions."""
    from gossamer.plan.table import load

    tried: list[str] = []

    def full(name: str) -> Any:
        def bind(*arguments: Any) -> None:
            tried.append(name)
            raise torch.OutOfMemoryError

        return bind

    x = inputs()
    want = gradients(x)
    for name in ("bound_forward", "bound_backward"):
        monkeypatch.setattr(type(load("blocked")), name, full(name), raising=False)
    calls.forget()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(x), want, strict=True))
    assert tried == ["bound_forward", "bound_backward"]
    calls.forget()


def test_a_known_call_is_seen_where_one_looks() -> None:
    x = inputs()
    gradients(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert gs.attention(*x, gs.SlidingWindow(5)).dtype == torch.bfloat16  # type: ignore[union-attr]
    (dq,) = torch.autograd.grad(gs.attention(*x, gs.SlidingWindow(5)).sum(), x[0], create_graph=True)  # type: ignore[union-attr]
    with pytest.raises(gs.Unsupported, match="differentiated once"):
        dq.sum().backward()
