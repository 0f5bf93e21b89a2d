"""Which calls go through the operators, because something wants to see them, and which past them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.torch import calls, operators, planning, request
from tests.support.call_cases import gradients, inputs
from tests.support.modes import Seen


def test_a_mode_sees_the_operators_and_changes_nothing() -> None:
    x = inputs()
    want = gradients(x)
    with Seen() as seen:
        found = gradients(x)
    ours = [name for name in seen.names if name.startswith("gossamer")]
    assert ours == ["gossamer.forward.default", "gossamer.backward.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("seen", ["forward", "backward"])
def test_a_mode_sees_one_direction(seen: str) -> None:
    x, pattern = inputs(), gs.SlidingWindow(5)
    want = gradients(x)
    modes = {way: Seen() if way == seen else contextlib.nullcontext() for way in ("forward", "backward")}
    with modes["forward"]:
        out = gs.attention(*x, pattern)
    loss = out.square().sum()
    with modes["backward"]:
        found = torch.autograd.grad(loss, x)
    assert f"gossamer.{seen}.default" in modes[seen].names  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(found, want[1:], strict=True))


def test_a_profile_names_the_operators() -> None:
    x = inputs()
    with torch.autograd.profiler.profile() as found:
        gradients(x)
    assert {"gossamer::forward", "gossamer::backward"} <= {event.name for event in found.function_events}


def test_a_plain_call_crosses_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossed(*arguments: Any) -> None:
        raise AssertionError("went through the operator")

    monkeypatch.setattr(operators, "forward_op", crossed)
    monkeypatch.setattr(calls, "gradients_by_operator", crossed)
    monkeypatch.setattr("gossamer.torch.api.forward_op", crossed)
    x = inputs()
    gradients(x)
    gradients([torch.nn.Parameter(y) for y in x])
    with torch.no_grad():
        gs.attention(*x, gs.SlidingWindow(5))
    with torch.inference_mode():
        gs.attention(*x, gs.SlidingWindow(5))


def test_tensors_without_data_have_a_shape() -> None:
    x = [y.detach().to("meta").requires_grad_() for y in inputs()]
    out, dq, dk, dv = gradients(x)
    assert out.is_meta and [y.shape for y in (out, dq, dk, dv)] == [x[0].shape, *(y.shape for y in x)]


def test_negative_views_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an implementation gets may be read by its address."""
    q, k, v = (x.detach() for x in inputs())
    pattern = gs.SlidingWindow(5)
    want = gs.attention(q, k, v, pattern)
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg() and torch.equal(negative, q)
    got: list[bool] = []
    call_of = calls.call_of

    def see(asked: request.Request, *rest: Any) -> calls.Call:
        got.append(asked.arguments.q.is_neg())
        return call_of(asked, *rest)

    monkeypatch.setattr(operators, "call_of", see)
    assert torch.equal(gs.attention(negative, k, v, pattern), want)  # type: ignore[arg-type]
    assert got == [False]


class Own(Tensor):
    """A subclass, which may want to see operators."""


def test_what_is_plain() -> None:
    x = torch.zeros(2)
    assert request.plain(x, None, torch.nn.Parameter(x))
    assert not request.plain(x, x.as_subclass(Own))
    assert not request.plain(x.to("meta"))
    assert not request.plain(torch.zeros(2, dtype=torch.complex64).conj().imag)  # its memory has the other sign
    with Seen():
        assert not request.plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not request.plain(x)
    with torch.device("cpu"):  # a function mode
        assert not request.plain(x)
    with torch.autograd.profiler.profile():
        assert not request.plain(x)
    assert not torch.func.vmap(lambda y: y + request.plain(y))(x).any()
    escaped: list[Tensor] = []
    torch.func.grad(lambda y: (escaped.append(y), y.sum())[1])(x)
    assert not request.plain(*escaped)  # it has no address
    assert request.plain(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_call_is_not_plain() -> None:
    found = []
    torch.jit.trace(lambda y: (found.append(request.plain(y)), y + 1)[1], torch.zeros(2), check_trace=False)
    assert found == [False]


def test_lists_belong_to_the_stream_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream makes its own; a graph, which begins when all streams are done, takes what there is."""
    x, made, stream = torch.randn(1, 2, 64, 8), [], [7]
    layout = gs.SlidingWindow(9).layout(64, 64, block_q=32, block_kv=32).to("cpu")
    make = planning.layout_from
    monkeypatch.setattr(planning, "layout_from", lambda *given: made.append(stream[0]) or make(*given))
    monkeypatch.setattr(planning, "_maker", lambda device: stream[0])
    for now in (7, 7, None, 8, None, 8, 7):
        stream[0] = now
        gs.attention(x, x, x, layout)
    assert made == [7, 8, 7]
