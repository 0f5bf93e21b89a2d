"""Calls of a kind that was computed before: what tells kinds apart, what is kept, and that nothing is forgiven."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.kernels.launch import Vectors
from gossamer.memo import Memo, forget_all
from gossamer.plan.table import load
from gossamer.torch import api, calls
from gossamer.torch.key import key_of
from tests.support.call_cases import gradients, inputs


def test_the_second_call_is_known_and_the_same() -> None:
    forget_all()
    x, pattern = inputs(), gs.SlidingWindow(5)
    first, second = gradients(x), gradients(x)
    assert len(calls.known) == 1 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    kinds: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"q_offset": 3}, {"softcap": 2.0}, {"deterministic": True}]
    with torch.no_grad():
        found = [[gs.attention(*x, pattern, return_lse=True, **kind) for kind in kinds] for _ in range(2)]
    assert len(calls.known) == 1 + len(kinds)
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(y, z) for y, z in zip(a, b, strict=True))
    assert len({float(out.detach().sum()) for out, _ in found[0]}) == len(kinds) - 1  # the mode changes no result here


@pytest.mark.parametrize("dims", [2, 3])
def test_calls_of_fewer_dimensions_are_known(dims: int) -> None:
    forget_all()
    x, pattern = [y.detach()[0] if dims == 3 else y.detach()[0, 0] for y in inputs()], gs.SlidingWindow(5)
    leaves = [y.requires_grad_() for y in x]
    found = []
    for _ in range(2):
        out, lse = gs.attention(*leaves, pattern, return_lse=True)
        found.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)))
    assert len(calls.known) == 1 and out.shape == x[0].shape and lse.shape == x[0].shape[:-1]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_key_is_told_by_all_that_matters() -> None:
    q, k, v = (torch.randn(2, 2, 24, 8) for _ in range(3))
    pattern, options = gs.SlidingWindow(5), (None, None, None, None, False)
    lengths, sinks = torch.tensor([9, 24]), torch.zeros(2)
    others = {
        "pattern": (q, k, v, gs.SlidingWindow(6), *options),
        "shape": (q[:1], k[:1], v[:1], pattern, *options),
        "q's strides": (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, pattern, *options),
        "v's strides": (q, k, v.transpose(1, 2).contiguous().transpose(1, 2), pattern, *options),
        "address": (q, k, torch.zeros(2 * 2 * 24 * 8 + 1)[1:].view(2, 2, 24, 8), pattern, *options),
        "type": (q.double(), k.double(), v.double(), pattern, *options),
        "device": (q, k.to("meta"), v, pattern, *options),
        "gradient": (q, k.clone().requires_grad_(), v, pattern, *options),
        "scale": (q, k, v, pattern, 1.0, None, None, None, False),
        "a bool is no number": (q, k, v, pattern, True, None, None, None, False),
        "offset": (q, k, v, pattern, None, 1, None, None, False),
        "mode": (q, k, v, pattern, None, None, None, None, True),
        "lengths": (q, k, v, pattern, *options, Vectors(lengths)),
        "type of lengths": (q, k, v, pattern, *options, Vectors(lengths.int())),
        "strides of lengths": (q, k, v, pattern, *options, Vectors(lengths.repeat(2)[::2])),
        "sinks": (q, k, v, pattern, *options, Vectors(sink_logits=sinks)),
        "gradient of sinks": (q, k, v, pattern, *options, Vectors(sink_logits=sinks.clone().requires_grad_())),
        "address of sinks": (q, k, v, pattern, *options, Vectors(sink_logits=torch.zeros(3)[1:])),
        "slopes": (q, k, v, pattern, *options, Vectors(alibi_slopes=sinks)),
    }
    key = key_of(q, k, v, pattern, *options)
    assert key is not None and key == key_of(q.clone(), k.clone(), v.clone(), gs.SlidingWindow(5), *options)
    found = {name: key_of(*other) for name, other in others.items()}
    assert len({key, *found.values()}) == len(found) + 1
    assert found["device"] is None  # tensors without data have no key
    for none in (
        (None, k, v, pattern, *options),
        (q, k, v, torch.ones(24, 24, dtype=torch.bool), *options),
        (q, k, v, pattern, None, torch.tensor(0), None, None, False),
        (q, k, v, pattern, [1.0], None, None, None, False),
        (q, k, v.to_sparse(), pattern, *options),
        (q, k, v, pattern, *options, Vectors(sink_logits=sinks.half())),
        (q, k, v, pattern, *options, Vectors(alibi_slopes=[0.1, 0.2])),
    ):
        assert key_of(*none) is None


def test_requests_of_other_forms_are_known_as_well() -> None:
    """Masks, numbers of numpy, sinks of 16 bits, an offset in a tensor: made once, like calls that have a key."""
    x, mask = [y.detach() for y in inputs()], torch.rand(24, 24) < 0.5
    half = torch.zeros(2, dtype=torch.bfloat16)
    for kind in (
        {"pattern": mask},
        {"pattern": gs.SlidingWindow(5), "scale": np.float32(0.5)},
        {"pattern": gs.SlidingWindow(5), "sink_logits": half},
        {"pattern": gs.SlidingWindow(5), "q_offset": torch.tensor(3)},
    ):
        forget_all()
        found = [gs.attention(*x, **kind) for _ in range(3)]  # type: ignore[arg-type]
        assert len(calls.known) == 1 and all(torch.equal(y, found[0]) for y in found)  # type: ignore[arg-type]
    gs.attention(*x, mask)
    before = gs.attention(*x, mask)
    mask.logical_not_()  # a write is seen
    assert not torch.equal(gs.attention(*x, mask), before)  # type: ignore[arg-type]


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
    forget_all()
    few: Memo[Any] = Memo(3)
    for module in (api, calls):
        monkeypatch.setattr(module, "known", few)
    x = [y.detach() for y in inputs()]
    for left in range(6):
        gs.attention(*x, gs.SlidingWindow(left))
    assert len(few) == 3


def test_a_hundred_layers_are_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a pattern of its own, asked for in turn: in the second round there is room for all, and it stays."""
    forget_all()
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
    forget_all()


def test_a_call_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, for example: the next one is made again."""
    x, blocked = inputs(), load("blocked")
    want = gradients(x)
    forget_all()
    with monkeypatch.context() as patch:

        def full(*arguments: Any) -> None:
            raise torch.OutOfMemoryError

        patch.setattr(type(blocked), "prepare", full)
        with pytest.raises(torch.OutOfMemoryError):
            gradients(x)
    assert not len(calls.known)
    assert all(torch.equal(a, b) for a, b in zip(gradients(x), want, strict=True))


def test_a_backward_reads_what_was_saved_wherever_it_lies() -> None:
    """Hooks may give back tensors of other strides and addresses than those of the forward."""
    x = inputs()
    want = gradients(x)

    def moved(y: torch.Tensor) -> torch.Tensor:
        room = torch.empty(y.numel() + 1, dtype=y.dtype)[1:]
        return room.view(y.transpose(1, 2).shape).transpose(1, 2).copy_(y)

    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, moved):
        found = gradients(x)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_known_call_is_seen_where_one_looks() -> None:
    x = inputs()
    gradients(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert gs.attention(*x, gs.SlidingWindow(5)).dtype == torch.bfloat16  # type: ignore[union-attr]
    (dq,) = torch.autograd.grad(gs.attention(*x, gs.SlidingWindow(5)).sum(), x[0], create_graph=True)  # type: ignore[union-attr]
    with pytest.raises(gs.Unsupported, match="differentiated once"):
        dq.sum().backward()
