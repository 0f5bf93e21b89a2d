"""Calls from torch that come again: found by a key, they do what the first one did, whatever happened in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer import particles as gp
from gossamer.kernels import relaunch
from gossamer.memo import LEAST, forget_all
from gossamer.particles import edges, fused_torch, listed_torch
from gossamer.particles.kernels import compiled as kernels
from gossamer.torch import bind, functions
from tests.support.modes import NothingIsRead
from tests.torch.test_host_cost import entered

H, LAW = gp.Gaussian(0.1), gp.ShortRangeGravity(0.03, 0.001)


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


def particles(N: int = 60, d: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(N, d), torch.rand(N), torch.randn(N, 2)


def results(x: Tensor, mass: Tensor, values: Tensor) -> list[Tensor]:
    """Everything that is computed of particles."""
    cells = gp.Cells.build(x, 0.3, (1.0, None, 2.0))
    neighbors = gp.Neighbors.allocate(x, 0.3, (1.0, None, 2.0), capacity=64)
    found = [gp.radial_sum(cells, values, H), gp.radial_sum(cells, mass, H), gp.radial_sum(cells, 2.5, H)]
    found += [gp.radial_force(cells, mass, LAW), gp.radial_force(cells, 1, LAW)]
    found += gp.neighbor_attention(values, values, values, neighbors, return_residual=True)
    kernel = {"kernel": "dot+gaussian", "bandwidth": 0.1}
    return [*found, gp.neighbor_attention(values, values, values, neighbors.update(x + 0.01), **kernel)]


def gradients(given: tuple[Tensor, ...], asked: tuple[bool, ...]) -> list[Tensor]:
    of = [x.detach().clone().requires_grad_(one) for x, one in zip(given, asked, strict=True)]
    found = results(*of)
    wanted = [x for x in of if x.requires_grad]
    return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), wanted)] if wanted else found


def test_a_later_call_is_the_first_one() -> None:
    """With gradients to any of the arguments, without, and in inference mode, in any order."""
    asked = [(bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8)]
    given = particles()
    wanted = []
    for which in asked:
        forget_all()
        wanted.append(gradients(given, which))
    forget_all()
    for n in torch.randperm(24).tolist():
        with torch.inference_mode():
            for a, b in zip(results(*given), wanted[0], strict=True):
                assert torch.equal(a, b)
        with torch.no_grad():
            assert not any(x.requires_grad for x in results(*(x.clone().requires_grad_() for x in given)))
        results(*particles())  # others of the same shapes
        found = gradients(given, asked[n % 8])
        assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(found, wanted[n % 8], strict=True))


def test_positions_and_values_are_read_in_each_call() -> None:
    x, mass, values = particles()
    first = results(x, mass, values)
    moved, heavier = x.clone(), mass.clone()
    x.copy_(torch.rand_like(x))
    assert not torch.equal(results(x, mass, values)[0], first[0])
    x.copy_(moved)
    mass.mul_(2)
    assert torch.equal(results(x, mass, values)[3], 2 * first[3])
    mass.copy_(heavier)
    assert all(torch.equal(a, b) for a, b in zip(results(x, mass, values), first, strict=True))
    x[3] = float("nan")
    assert all(y.isnan().all() for y in results(x, mass, values)[:5])
    strided = torch.stack([moved, moved], -1)[..., 0], torch.stack([mass, mass], -1)[..., 0], values.T.contiguous().T
    assert all(torch.equal(a, b) for a, b in zip(results(*strided), first, strict=True))


def test_errors_are_those_of_the_first_call() -> None:
    x, mass, _ = particles(9)
    cells, lists = gp.Cells.build(x, 1.0, 4.0), gp.Neighbors.allocate(x, 1.0, 4.0, capacity=16)
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: gp.Cells.build(x, True, 4.0)),  # which equals 1.0
        (ValueError, lambda: gp.Cells.build(x, 0, 4.0)),
        (ValueError, lambda: gp.Cells.build(x, 3.0, 4.0)),
        (ValueError, lambda: gp.Cells.build(x, 1.0, (4.0, 4.0))),
        (TypeError, lambda: gp.Cells.build(x, torch.tensor(1.0, requires_grad=True), 4.0)),
        (ValueError, lambda: gp.Cells.build(x.int(), 1.0, 4.0)),
        (TypeError, lambda: gp.radial_sum(cells, True, H)),
        (TypeError, lambda: gp.radial_sum(cells, mass > 0, H)),
        (ValueError, lambda: gp.radial_sum(cells, mass[:5], H)),
        (TypeError, lambda: gp.radial_sum(cells, mass, LAW)),
        (TypeError, lambda: gp.radial_sum(lists, mass, H)),
        (ValueError, lambda: gp.radial_force(cells, x, LAW)),
        (ValueError, lambda: gp.radial_force(cells, mass, gp.ShortRangeGravity(1.0))),
        (ValueError, lambda: gp.neighbor_attention(x, x, x, lists, kernel="gauss")),
        (ValueError, lambda: gp.neighbor_attention(x, x, x, lists, scale=-1.0)),
        (TypeError, lambda: gp.neighbor_attention(x, x, x, lists, scale=True)),
        (ValueError, lambda: gp.neighbor_attention(x, x, x, lists, kernel="dot+gaussian", bandwidth=0.0)),
        (ValueError, lambda: lists.update(x[:5])),
    ]
    said: dict[int, str] = {}
    for _ in range(3):
        for n, (kind, call) in enumerate(wrong):
            with pytest.raises(kind) as error:
                call()
            assert said.setdefault(n, str(error.value)) == str(error.value)
        for one in (1.0, 1):  # what is right stays so
            gp.Cells.build(x, one, 4.0), gp.radial_sum(cells, one, H), gp.radial_sum(cells, mass, H)
        gp.radial_force(cells, mass, LAW), gp.neighbor_attention(x, x, x, lists, scale=1.0)


def test_numbers_of_other_libraries_are_not_kept_by() -> None:
    """They are read in each call: an array may hold another number in the next one."""
    x, mass, _ = particles()
    radius, box = torch.tensor(0.3), [1.0, None, 2.0]
    first = gp.radial_sum(gp.Cells.build(x, radius, box), mass, H)
    assert torch.equal(gp.radial_sum(gp.Cells.build(x, 0.3, tuple(box)), mass, H), first)
    radius.fill_(0.2)
    box[1] = 1.5
    found = gp.radial_sum(gp.Cells.build(x, radius, box), mass, H)
    assert torch.equal(found, gp.radial_sum(gp.Cells.build(x, float(radius), (1.0, 1.5, 2.0)), mass, H))
    number = np.float32(2)
    cells = gp.Cells.build(x, 0.3)
    assert torch.equal(gp.radial_sum(cells, number, H), gp.radial_sum(cells, 2.0, H))


factor = 1.0


def flat(s: Any, xp: Any) -> Any:
    return factor + 0 * s


def test_a_function_may_read_what_changes() -> None:
    global factor
    x, mass, _ = particles()
    cells, kernel = gp.Cells.build(x, 0.3), gp.RadialKernel(flat)
    first = gp.radial_sum(cells, mass, kernel)
    try:
        factor = 2.0
        assert torch.equal(gp.radial_sum(cells, mass, kernel), 2 * first)
        assert len([key for key in edges.known._entries if key[0] == "radial_sum"]) == 2
    finally:
        factor = 1.0


def test_what_is_kept() -> None:
    """No tensor of the user, and no more calls than there is room for."""
    given = particles()
    results(*given)
    kept = [weakref.ref(x) for x in given]
    del given
    gc.collect()
    assert not any(one() is not None for one in kept)
    for n in range(300):
        gp.Cells.build(torch.rand(5 + n, 2), 0.1)
    assert len(edges.known) == LEAST


def test_nothing_is_read_of_values() -> None:
    """Under a mode, which takes the path of no key; lists of a CPU are made by operations that read their lengths."""
    x, _, _ = particles()
    with NothingIsRead():
        gp.Cells.build(x, 0.3, 1.0)
    gp.Cells.build(x, 0.3, 1.0)
    assert [key[0] for key in edges.known._entries] == ["cells"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Iterator[list[str]]:
    """Calls on a CPU take the launches of a GPU, whose kernels do nothing: the names of those that ran."""
    pytest.importorskip("triton")
    ran: list[str] = []

    def nothing(name: str) -> Any:
        def kernel(*_: Any) -> Any:
            return lambda *_: ran.append(name)

        kernel.name = name  # type: ignore[attr-defined]
        return kernel

    def launcher(function: Any, programs: Any) -> Any:
        return nothing(function.fn.__name__)()

    def sort(*_: Any) -> Any:
        return lambda keys: (ran.append("sort"), torch.arange(len(keys)))[1]

    monkeypatch.setattr(fused_torch, "_able", lambda device: True)
    monkeypatch.setattr(fused_torch, "available", lambda device: True)
    monkeypatch.setattr(listed_torch, "serves", lambda cells: True)
    monkeypatch.setattr(listed_torch, "processors", lambda device: 132)
    monkeypatch.setattr(relaunch, "launcher", launcher)
    monkeypatch.setitem(functions.FUNCTIONS, "sorted_places", sort)
    real = bind.kernel_of
    monkeypatch.setattr(
        bind, "kernel_of", lambda kernel: nothing(kernel.name)() if kernel.implementation == "hopper" else real(kernel)
    )
    for name in ("radial", "lists", "attention"):
        monkeypatch.setattr(kernels, name, nothing(name))
    yield ran


def test_what_a_repeated_call_launches_and_enters(launched: list[str]) -> None:
    """In files and functions of the package; a step is a build or an update with a call, as in a simulation."""
    x, mass, _ = particles(1000)
    q = torch.rand(1000, 4, 64, dtype=torch.bfloat16)
    given = [one.clone().requires_grad_() for one in (x, mass, q)]
    lists = gp.Neighbors.allocate(x, 0.2, 1.0, capacity=40)
    build = ["extents_kernel", "keys_kernel", "sort", "boxes_kernel"]

    def attend(x: Tensor, q: Tensor, lists: gp.Neighbors = lists) -> Tensor:
        return gp.neighbor_attention(q, q, q, lists, kernel="dot+gaussian", bandwidth=0.1)

    def step(f: Any, *of: Tensor) -> Any:
        (found,) = torch.autograd.grad(f(*of).sum(), of[:1])
        return found

    def sums(x: Tensor, mass: Tensor) -> Tensor:
        return gp.radial_sum(gp.Cells.build(x, 0.2, 1.0), mass, H)

    def forces(x: Tensor, mass: Tensor) -> Tensor:
        return gp.radial_force(gp.Cells.build(x, 0.2, 1.0), mass, LAW)

    rows: list[tuple[Callable[[], Any], list[str], int, int]] = [
        (lambda: gp.Cells.build(x, 0.2, 1.0), build, 6, 8),
        (lambda: sums(x, mass), [*build, "records_kernel", "radial"], 7, 17),
        (lambda: sums(x, 1.0), [*build, "records_kernel", "radial"], 7, 18),
        (lambda: forces(x, mass), [*build, "records_kernel", "radial"], 7, 17),
        (lambda: step(sums, *given[:2]), [*build, *["records_kernel", "radial"] * 2], 9, 22),
        (lambda: lists.update(x), [*build, "records_kernel", "lists", "names_kernel"], 9, 17),
        (lambda: attend(x, q), ["attention"], 11, 21),
        (
            lambda: torch.autograd.grad(attend(x, given[2]).sum(), given[2]),
            ["attention", "preprocess", *["attention"] * 2],
            12,
            25,
        ),
    ]
    for n, (run, names, files, called) in enumerate(rows):
        run()
        launched.clear()
        found = entered(run)
        assert launched == names, n
        assert len(found.files) <= files and len(found.functions) <= called, (n, sorted(found.functions))
    attend(x, q, lists.update(x))  # new lists: their items too
    assert launched[-2:] == ["items_kernel", "attention"]
