"""What a call does on the host, without its kernels: what it copies, and how many files and functions it enters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import operand_of
from gossamer.memo import forget_all
from gossamer.torch import repeated
from tests.support.entered import entered
from tests.support.modes import Seen

needs_tvm_ffi = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


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
    from gossamer.kernels.hopper import IMPLEMENTATION
    from gossamer.kernels.hopper.launch.arguments import readable
    from gossamer.plan.table import load
    from gossamer.torch.explain import unaligned

    x = views()[name]
    fine = name in ("compact", "storage (B, N, H, D)", "packed with others", "every other row")
    why = unaligned(x, 16)
    assert (why is None) == fine == readable(operand_of(x))
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
    from gossamer.kernels.hopper.schedule.lists import lists
    from gossamer.kernels.hopper.schedule.words import entries

    layout = pattern.layout(700, 700, block_q=128, block_kv=128).to("cpu")
    walks = [walk.with_arrays(walk.arrays()) for walk in (layout.rows, layout.columns)]
    found, want = lists(layout, transposed), lists(gs.BlockLayout(walks[0], _transpose=walks[1:]), transposed)
    walk = walks[transposed]
    (columns, *entry), (wanted_columns, *wanted_entry) = found.lists, want.lists
    *_, bits = entries(walk).bases  # before them nothing is read of the entries of the pool
    assert torch.equal(columns, wanted_columns) and len(entry) == (walk.pool_index.numel() > 0)
    for x, wanted in zip(entry, wanted_entry, strict=True):
        assert torch.equal(x[bits:], wanted[bits:])
    # What stands where there are no intervals, or no bits, is not read.
    assert not walk.lo.numel() or (torch.equal(found.lo, want.lo) and torch.equal(found.hi, want.hi))
    assert not walk.pool.numel() or torch.equal(found.pool, want.pool)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Iterator[list[tuple[Any, ...]]]:
    """Hopper forward calls on a CPU, without their kernel; the arguments that it got."""
    from gossamer.kernels import hopper
    from gossamer.kernels.hopper import compiled

    got: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hopper.Hopper, "unavailable", lambda self: [])
    limits = dataclasses.replace(
        hopper.Hopper.capability, devices=frozenset({"cpu"}), min_sm=None, max_sm=None, backward=True
    )
    monkeypatch.setattr(hopper.Hopper, "capability", limits)
    monkeypatch.setattr(compiled, "forward", lambda config: lambda *arguments: got.append(arguments))
    forget_all()
    yield got
    forget_all()


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
    """What a call costs on the host, counted: under 50 functions, each a tenth of a microsecond to one."""
    x = [torch.randn(1, 4, 2048, 64).bfloat16() for _ in range(3)]
    pattern = gs.SlidingWindow(100)
    assert events(lambda: gs.attention(*x, pattern, implementation="hopper")) <= 48
    assert len(stubbed) == 2
    leaves = [y.requires_grad_() for y in x]
    assert events(lambda: gs.attention(*leaves, pattern, implementation="hopper")) <= 52
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


@needs_tvm_ffi
def test_the_other_layout_is_read_and_written_in_place(stubbed: list[tuple[Any, ...]]) -> None:
    x = [torch.randn(2, 300, 4, 64).bfloat16() for _ in range(3)]
    pattern = gs.SlidingWindow(100)
    run = lambda: gs.attention(*x, pattern, implementation="hopper", layout="bshd")  # noqa: E731
    assert events(run) <= 62
    out = run()
    q, k, v, written, *_ = stubbed[-1]
    assert all(a.data_ptr() == b.data_ptr() and a.shape == (2, 4, 300, 64) for a, b in zip((q, k, v), x, strict=True))
    assert written.data_ptr() == out.data_ptr() and written.stride() == q.stride() and out.is_contiguous()


@pytest.mark.parametrize("gradient", [False, True])
def test_how_much_of_the_package_a_call_enters(gradient: bool) -> None:
    """On a CPU, with everything imported: the first call of a key and a repeated one, from pattern to arithmetic."""
    x = [torch.randn(1, 4, 256, 32, requires_grad=gradient) for _ in range(3)]
    gs.attention(*(y[:, :, :100] for y in x), gs.Causal())
    forget_all()
    first, repeat = (entered(lambda: gs.attention(*x, gs.SlidingWindow(31))) for _ in range(2))
    assert len(first.files) <= 24 and len(first.functions) <= 160 + gradient, sorted(first.functions)
    assert len(repeat.files) <= 10 and len(repeat.functions) <= 27 + gradient, sorted(repeat.functions)


def with_documents(x: list[Tensor]) -> Any:
    return gs.attention(*x, gs.DocumentIds(torch.arange(256) // 64) & gs.Causal())


def with_listed_keys(x: list[Tensor]) -> Any:
    return gs.attention(*x, gs.Indices(torch.arange(8).expand(1, 1, 256, 8)))


def with_chosen_blocks(x: list[Tensor]) -> Any:
    pytest.importorskip("gossamer.blocks")  # an operation, without which the core runs
    return gs.attention(*x, gs.topk_blocks(x[0], x[1], causal=True, topk=3) & gs.Causal())


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("run", "files", "functions"),
    [(with_documents, 13, 50), (with_listed_keys, 13, 47), (with_chosen_blocks, 22, 80)],
)
def test_how_much_of_the_package_a_call_with_structure_enters(
    run: Any, files: int, functions: int, gradient: bool
) -> None:
    """A repeated call, from its structure to the arithmetic: on a CPU the layout is kept by what tensors hold."""
    x = [torch.randn(1, 4, 256, 32, requires_grad=gradient) for _ in range(3)]
    for _ in range(3):
        run(x)
    repeat = entered(lambda: run(x))
    assert len(repeat.files) <= files and len(repeat.functions) <= functions + gradient, sorted(repeat.functions)


@pytest.mark.parametrize(
    ("run", "files", "functions"),
    [(with_documents, 19, 87), (with_listed_keys, 16, 66), (with_chosen_blocks, 33, 141)],
)
def test_how_much_a_call_with_structure_of_other_numbers_enters(run: Any, files: int, functions: int) -> None:
    """Its layout is made, and planned by the numbers that are read of it."""

    def forgetful(x: list[Tensor]) -> None:
        repeated._came.clear()
        run(x)

    forget_all()
    test_how_much_of_the_package_a_call_with_structure_enters(forgetful, files, functions, False)


VIEW = "aten.as_strided.default"  # takes the place of what goes past the dispatcher where a mode could see it


@pytest.mark.parametrize("pattern", [gs.Causal(), gs.SlidingWindow(30, sinks=4) | gs.Dilated(9, 0, 2)], ids=str)
@pytest.mark.parametrize("devices", [{"cuda"}, {"cpu"}], ids=["copied", "in place"])
def test_structure_over_pages_is_one_launch(
    devices: set[str], pattern: gs.Pattern, monkeypatch: pytest.MonkeyPatch, on_a_cpu: None
) -> None:
    """Of a key that comes again, whatever its numbers; the first one makes what follows from shapes beside it."""
    pytest.importorskip("triton")
    from gossamer.kernels import launch_now
    from gossamer.torch import device_arrays, fused_structure, paged
    from gossamer.torch.key import unseen
    from gossamer.torch.structure import pages, sequences

    launched: list[Any] = []
    monkeypatch.setattr(launch_now, "_kept", lambda *_: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(device_arrays, "fused", lambda like: fused_structure.kernels)
    monkeypatch.setattr(paged, "IN_PLACE", devices)
    for module in (pages, sequences, paged):
        monkeypatch.setattr(module, "is_read", lambda *_: False)
    forget_all()
    q, k = torch.zeros(40, 4, 8), torch.zeros(9, 64, 2, 8)
    table, used, cu = torch.zeros(3, 5, dtype=torch.int32), torch.tensor([9, 0, 300]), torch.tensor([0, 1, 1, 40])

    def make() -> None:
        given = gs.PackedSequences(cu, pages=gs.Pages(table, used, 64), pattern=pattern)
        gs.device_layout(q, k, k, given, layout="bshd")

    for turn in range(3):
        before = len(launched)
        with unseen(), Seen() as seen:
            make()
        assert len(launched) == before + 1
        assert len(seen.names) <= 160 if turn == 0 else set(seen.names) <= {VIEW}, seen.names
    assert events(make) <= 425
    forget_all()
