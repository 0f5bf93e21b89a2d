"""What a call does on the host: through the operator where something wants to see it, past it otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gossamer as gs
from gossamer.kernels.hopper import missing_packages
from gossamer.layouts.kept import Kept
from gossamer.torch import calls, operators

needs_tvm_ffi = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


class Seen(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 24, 8, generator=g, requires_grad=True) for _ in range(3)]


def gradients(x: list[Tensor]) -> tuple[Tensor, ...]:
    out = gs.attention(*x, gs.SlidingWindow(5))
    return (out, *torch.autograd.grad(out.square().sum(), x))


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

    monkeypatch.setattr(operators, "_forward_op", crossed)
    monkeypatch.setattr(operators, "backward_op", crossed)
    monkeypatch.setattr("gossamer.torch.api._forward", crossed)
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
    """Each with a pattern of its own, asked for in turn: none is forgotten before it comes again."""
    calls.forget()
    x, made = [y.detach() for y in inputs()], []
    patterns = [gs.SlidingWindow(left, right) for left in range(10) for right in range(10)]
    init = calls.Call.__init__
    monkeypatch.setattr(calls.Call, "__init__", lambda self, *rest: (made.append(1), init(self, *rest))[1])
    for _ in range(3):
        for pattern in patterns:
            gs.attention(*x, pattern)
    assert len(made) == 100
    calls.forget()


def test_no_memory_to_bind_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has succeeded, and so do its repetitions."""
    from gossamer.kernels.table import load

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


def test_negative_views_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an implementation gets may be read by its address."""
    q, k, v = (x.detach() for x in inputs())
    pattern = gs.SlidingWindow(5)
    want = gs.attention(q, k, v, pattern)
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg() and torch.equal(negative, q)
    got: list[bool] = []
    compute = operators.compute

    def see(plan: Any, a: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        got.append(a.q.is_neg())
        return compute(plan, a, *rest)

    monkeypatch.setattr(operators, "compute", see)
    assert torch.equal(gs.attention(negative, k, v, pattern), want)  # type: ignore[arg-type]
    assert got == [False]


class Own(Tensor):
    """A subclass, which may want to see operators."""


def test_what_is_plain() -> None:
    x = torch.zeros(2)
    assert operators.plain(x, None, torch.nn.Parameter(x))
    assert not operators.plain(x, x.as_subclass(Own))
    assert not operators.plain(x.to("meta"))
    assert not operators.plain(torch.zeros(2, dtype=torch.complex64).conj().imag)  # its memory has the other sign
    with Seen():
        assert not operators.plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not operators.plain(x)
    with torch.device("cpu"):  # a function mode
        assert not operators.plain(x)
    with torch.autograd.profiler.profile():
        assert not operators.plain(x)
    assert not torch.func.vmap(lambda y: y + operators.plain(y))(x).any()
    escaped: list[Tensor] = []
    torch.func.grad(lambda y: (escaped.append(y), y.sum())[1])(x)
    assert not operators.plain(*escaped)  # it has no address
    assert operators.plain(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_call_is_not_plain() -> None:
    found = []
    torch.jit.trace(lambda y: (found.append(operators.plain(y)), y + 1)[1], torch.zeros(2), check_trace=False)
    assert found == [False]


def views() -> dict[str, Tensor]:
    """(B, H, N, D) tensors whose strides and addresses differ, in bfloat16."""
    x = torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16)
    return {
        "compact": x,
        "storage (B, N, H, D)": x.reshape(2, 40, 3, 64).transpose(1, 2),
        "packed with others": torch.zeros(2, 40, 3, 3, 64, dtype=torch.bfloat16)[:, :, 1].transpose(1, 2),
        "every other row": x[:, :, ::2],
        "last dimension": x.transpose(2, 3),
        "row stride": torch.zeros(2, 3, 40, 65, dtype=torch.bfloat16)[..., :64],
        "head stride": torch.zeros(2, 4 * (40 * 64 + 4), dtype=torch.bfloat16).as_strided(
            (2, 3, 40, 64), (4 * (40 * 64 + 4), 40 * 64 + 4, 64, 1)
        ),
        "batch stride": x[:1].expand(2, 3, 40, 64),
        "address": torch.zeros(40 * 64 * 6 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 40, 64),
    }


@pytest.mark.parametrize("name", views())
def test_explain_says_what_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.kernels.hopper import IMPLEMENTATION, launch
    from gossamer.kernels.table import load
    from gossamer.torch.explain import unaligned

    x = views()[name]
    fine = name in ("compact", "storage (B, N, H, D)", "packed with others", "every other row")
    why = unaligned(x, 16)
    assert (why is None) == fine == launch.readable(x)
    assert fine or name.replace("dimension", "dimension is not contiguous") in str(why)
    q = k = views()["compact"][:, :, : x.shape[2]]
    if name == "last dimension":
        return
    blocked = load("blocked")
    assert not isinstance(blocked, str)
    assert not gs.explain(q, k, x, implementation="blocked").copies
    limits = dataclasses.replace(blocked.capability, alignment=IMPLEMENTATION.capability.alignment)
    monkeypatch.setattr(type(blocked), "capability", limits)
    found = gs.explain(q, k, x, implementation="blocked")
    assert found.copies == ({} if fine else {"v": why})
    assert fine or ("copies v", why) in found.rows()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "pattern", [gs.Causal(), gs.BigBird(64), gs.PerHead([gs.Causal(), gs.Dilated(15, 0, 8)])], ids=str
)
def test_lists_are_the_same_from_the_host_and_from_the_device(pattern: gs.Pattern, transposed: bool) -> None:
    """From the host where there is a copy, since that is complete for every stream at once."""
    from gossamer.kernels.hopper.schedule import lists

    layout = pattern.layout(700, 700, block_q=128, block_kv=128).to("cpu")
    walks = [walk.with_arrays(walk.arrays()) for walk in (layout.rows, layout.columns)]
    found, want = lists(layout, transposed), lists(gs.BlockLayout(walks[0], _transpose=walks[1:]), transposed)
    assert (
        torch.equal(found.lists, want.lists) and torch.equal(found.lo, want.lo) and torch.equal(found.pool, want.pool)
    )


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Hopper forward calls on a CPU, without their kernel; the arguments that it got."""
    from gossamer.kernels import hopper
    from gossamer.kernels.hopper import compile as compiled
    from gossamer.kernels.hopper import launch
    from gossamer.torch import plan

    got: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper.Hopper, "unavailable", lambda self: [])
    limits = dataclasses.replace(
        hopper.Hopper.capability, devices=frozenset({"cpu"}), min_sm=None, max_sm=None, backward=True
    )
    monkeypatch.setattr(hopper.Hopper, "capability", limits)
    monkeypatch.setattr(compiled, "forward", lambda config: lambda *arguments: got.append(arguments))
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    # What is kept for other tests is left alone.
    monkeypatch.setattr(launch, "_prepared", type(launch._prepared)())
    for module, name in ((plan, "_plans"), (plan, "_placed"), (calls, "_calls")):
        monkeypatch.setattr(module, name, Kept(64))
    return got


def events(run: Any) -> int:
    """Functions that a call enters, of Python and of C."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@needs_tvm_ffi
def test_a_repeated_call_does_little(stubbed: list[tuple[Any, ...]]) -> None:
    """What a call costs on the host, counted: about 50 functions, each a tenth of a microsecond to one."""
    x = [torch.randn(1, 4, 2048, 64).bfloat16() for _ in range(3)]
    pattern = gs.SlidingWindow(100)
    assert events(lambda: gs.attention(*x, pattern, implementation="hopper")) <= 50
    assert len(stubbed) == 2
    leaves = [y.requires_grad_() for y in x]
    assert events(lambda: gs.attention(*leaves, pattern, implementation="hopper")) <= 55
    # The inputs themselves, no copies of them.
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(stubbed[-1][:3], x, strict=True))


@needs_tvm_ffi
def test_inputs_are_copied_once_where_they_must_be(stubbed: list[tuple[Any, ...]]) -> None:
    for name, x in views().items():
        if name != "last dimension":
            q = torch.zeros(2, 3, x.shape[2], 64, dtype=torch.bfloat16)
            gs.attention(q, x, q, gs.Causal(), implementation="hopper")
            passed = stubbed[-1][1]
            fine = name in ("compact", "storage (B, N, H, D)", "packed with others", "every other row")
            assert (passed.data_ptr() == x.data_ptr()) == fine and torch.equal(passed, x)
