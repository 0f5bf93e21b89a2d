"""What a call makes, recorded and made again: of other numbers it is what the function itself makes of them."""

from __future__ import annotations

import ctypes
import gc
import linecache
import random
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.launch import Launched, observer
from gossamer.memo import forget_all
from gossamer.torch.arguments import AttentionOptions
from gossamer.torch.recording import Recorded, Repeats, record
from gossamer.torch.request import request_of
from tests.support.modes import Seen

CPU = torch.device("cpu")
PROGRAMS = 200
Make = Callable[..., Any]


def recorded(make: Make, *given: Tensor, together: bool = True) -> Recorded:
    """What is recorded of a function of tensors, which gives one tensor or a tuple."""

    def run() -> tuple[Tensor, ...]:
        found = make(*given)
        return found if isinstance(found, tuple) else (found,)

    return record(run, given, CPU, together)


def check(make: Make, *given: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What is made again of others, twice: the same bits and strides as what the function makes of them.

    Results are parts of few tensors, or each is its own.
    """
    wanted = make(*(x.clone() for x in others))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for together in (False, True):
        again = recorded(make, *(x.clone() for x in given), together=together).again
        assert again is not None
        again(*(x.clone() for x in others))
        found = again(*(x.clone() for x in others))
        assert len(found) == len(wanted)
        for x, want in zip(found, wanted, strict=True):
            assert x.dtype == want.dtype and x.shape == want.shape and x.stride() == want.stride()
            assert torch.equal(x, want)
    return found


def launch(run: Callable[..., None], *arguments: Any, by_address: bool = False) -> None:
    """What `launch_now.launch` does with a launch."""
    launched, through = Launched(run, arguments, by_address), observer()
    launched() if through is None else through(launched)


READS: dict[str, Make] = {
    "item": lambda x: x + x[0].item(),
    "int": lambda x: x + int(x[0]),
    "bool": lambda x: x + 1 if x[0] > 2 else x - 1,
    "range": lambda x: torch.arange(int(x[0])),
    "slice": lambda x: x[: x[0]],
    "tolist": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "array": lambda x: torch.from_numpy(np.asarray(x) + 1),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 2)[0],
    "masked_select": lambda x: x.masked_select(x > 2),
    "mask": lambda x: x[x > 2],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "equal": lambda x: x + 1 if torch.equal(x, x.abs()) else x - 1,
    "allclose": lambda x: x + 1 if torch.allclose(x, x.abs()) else x - 1,
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "in": lambda x: x + 1 if 3 in x else x - 1,
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_numbers_is_not_repeated(name: str) -> None:
    x = torch.tensor([3, 1, 2])
    found = recorded(READS[name], x)
    assert found.again is None
    assert torch.equal(found.made[0], READS[name](x))
    assert recorded(lambda x: x + 1, x).again is not None


def test_repeats_make_once_what_can_be_recorded_and_each_time_what_cannot() -> None:
    ran: list[str] = []

    def by(name: str, function: Make, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (ran.append(name), (function(x),))[1]

    sums, reads = Repeats(), Repeats()
    for at in range(3):
        x = torch.tensor([3, 1, at])
        assert torch.equal(*sums(by("sums", lambda x: x.cumsum(0), x), [x]), x.cumsum(0))
        assert torch.equal(*reads(by("reads", READS["item"], x), [x]), x + 3)
    assert ran == ["sums", "reads", "reads", "reads"]


def test_numbers_of_constants_are_the_same_every_time_but_are_not_looked_into() -> None:
    assert recorded(lambda x: x + int(torch.ones(3).sum()), torch.zeros(2)).again is None


MAKES: dict[str, Make] = {
    "one operation": lambda x: x + 1,
    "constants": lambda x: x + torch.arange(6).mul(2)[None] // 3,
    "writes in order": lambda x: torch.zeros(6).add_(x).mul_(3).sub_(x).copy_(x * 2).add_(1),
    "what is read between writes": lambda x: (lambda z: (z.add_(x), z + 0, z.add_(x))[1:])(torch.zeros(6)),
    "a written view": lambda x: (lambda z: (z[1:4].copy_(x[2:5]), z)[1])(torch.zeros(6)),
    "a view of what is written later": lambda x: (lambda z: (lambda y: (z.add_(x), y * 2)[1])(z[1:]))(torch.zeros(6)),
    "a constant that is written": lambda x: (lambda z: (z.add_(1), z + x)[1])(torch.arange(6.0)),
    "a constant that is written behind": lambda x: (lambda z: (z + x, z.add_(1)))(torch.arange(6.0)),
    "out": lambda x: (lambda z: (torch.add(x, 1, out=z), z * 2)[1])(torch.empty(6)),
    "two outs": lambda x: torch.sort(x, out=(torch.empty(6), torch.empty(6, dtype=torch.int64))),
    "a list": lambda x: torch.cat([x, torch.ones(2), x.flip(0)]),
    "a list that is written": lambda x: (lambda z: (torch._foreach_add_([z, z[:2]], 1), z + x)[1])(torch.zeros(6)),
    "results in a list": lambda x: tuple(x.split(2))[::2],
    "one result in a list": lambda x: tuple(x.split(6)),
    "names": lambda x: torch.searchsorted(torch.arange(6.0), x, right=True, out_int32=True),
    "a result that is an input": lambda x: (x, x + 1),
    "a result that is written": lambda x: (x.add_(1), x),
    "a view as a result": lambda x: x.view(2, 3).mT,
    "a result that is a constant": lambda x: (torch.arange(4), x + 1),
    "a constant view": lambda x: (torch.arange(8)[1::2], x),
    "a constant that is expanded": lambda x: (torch.arange(3)[:, None].expand(3, 4), x),
    "one result twice": lambda x: (lambda z: (z, x + z, z))(x * 2),
    "a result that nothing else reads": lambda x: (x.sort().indices, x.cummax(0).values),
    "other types": lambda x: (x.int().long().clamp(1, 3).to(torch.uint8), x > 1),
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", MAKES)
def test_what_is_made_again_is_that_of_other_numbers(name: str) -> None:
    others = (torch.tensor([5.0, 0, 2, 9, 4, 4]),)
    found = check(MAKES[name], torch.tensor([1.0, 2, 3, 3, 1, 0]), others=others)
    if name == "one result twice":
        assert found[0] is found[2]


def test_inputs_that_are_one_tensor() -> None:
    x, y = torch.arange(3), torch.arange(3) + 5
    found = recorded(lambda x, y: x - 2 * y, x, x)
    assert found.again is not None and torch.equal(found.again(y, y)[0], -y)


def test_constants_are_folded_and_nothing_of_the_caller_is_held() -> None:
    x = torch.arange(5.0)
    held = weakref.ref(x)
    found = recorded(lambda x: x + torch.arange(5).mul(3).cumsum(0).float(), x)
    other = torch.zeros(5)
    with Seen() as seen:
        assert found.again is not None and found.again(other)[0].tolist() == [0, 3, 9, 18, 30]
    assert seen.names == ["aten.add.Tensor"]
    again = found.again
    del found, x
    gc.collect()
    assert held() is None and again is not None


def test_what_nothing_reads_is_not_made() -> None:
    found = recorded(lambda x: (x.sort(), x + 1)[1], torch.zeros(3))
    other = torch.ones(3)
    with Seen() as seen:
        assert found.again is not None and found.again(other)[0].tolist() == [2, 2, 2]
    assert seen.names == ["aten.add.Tensor"]


def test_random_numbers_are_drawn_again() -> None:
    found = recorded(lambda x: x + torch.rand(50), torch.zeros(50))
    assert found.again is not None
    assert not torch.equal(found.again(torch.zeros(50))[0], found.again(torch.zeros(50))[0])


@pytest.mark.parametrize("by_address", [False, True])
def test_launches_are_in_order_with_operations(by_address: bool) -> None:
    """One writes what an operation made, another reads it; one array is a constant with strides."""

    def doubled(source: Any, into: Any, n: int, step: int) -> None:
        if by_address:
            source, into = (ctypes.cast(a, ctypes.POINTER(ctypes.c_int64)) for a in (source, into))
        else:
            source, into = (ctypes.cast(a.data_ptr(), ctypes.POINTER(ctypes.c_int64)) for a in (source, into))
        for at in range(n):
            into[at] += 2 * source[at * step]

    def make(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.zeros(3, dtype=torch.int64)
        launch(doubled, x, y, 3, 1, by_address=by_address)
        z = y + 1
        steps = torch.arange(6)[::2]
        launch(doubled, steps, y, 3, steps.stride(0), by_address=by_address)
        return y, z

    check(make, torch.tensor([1, 2, 3]), others=(torch.tensor([7, 0, -4]),))


def test_what_launches_alone_fill_is_allocated_together() -> None:
    """Results of a type are parts of one memory, and so are small arrays that are read by launches alone."""

    def add(n: int, source: int, into: int, kind: Any) -> None:
        source, into = (ctypes.cast(a, ctypes.POINTER(kind)) for a in (source, into))
        for at in range(n):
            into[at] = source[at] + 1  # type: ignore[index]

    def make(x: Tensor) -> tuple[Tensor, ...]:
        one, two = torch.empty(5, dtype=torch.int32), torch.empty((5, 1), dtype=torch.int32)
        few, read = torch.empty(5, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        large = torch.empty(2**20, dtype=torch.int16)
        for source, into in ((x, one), (one, few), (few, read[:5]), (few[2:], two[2:]), (x, large), (x, two)):
            n = 3 if source.numel() < 5 else 5
            launch(lambda *given: add(*given, ctypes.c_int32), n, source, into, by_address=True)
        return two[1:, 0], read + one, one[::2], two[1:, 0]

    first, others = (torch.randint(9, (5,), dtype=torch.int32) for _ in range(2))
    found = check(make, first, others=(others,))
    assert found[0] is not found[2] and found[0].data_ptr() - found[2].data_ptr() == 256 + 4
    again = recorded(make, first).again
    assert again is not None and len(again.run(others)) == 2
    with Seen() as seen:
        again.run(others)
    assert seen.names == ["aten.add.Tensor"]  # memory and its parts are made past the dispatcher
    text = "".join(linecache.getlines(again.run.__code__.co_filename))  # type: ignore[attr-defined]
    # Of one and two; few is alone; read; large. Then one as a tensor, which is added.
    assert (text.count("= empty("), text.count("= part_at(")) == (4, 1), text


def test_modes_of_the_first_call_are_not_those_of_the_next() -> None:
    """What was recorded in inference mode is used in training, and the other way round."""
    for first, second in ((True, False), (False, True)):
        with torch.inference_mode(first):
            found = recorded(lambda x: (x + torch.arange(3), torch.arange(3)), torch.zeros(3))
        assert found.again is not None
        with torch.inference_mode(second):
            made = found.again(torch.ones(3))
        assert made[0].tolist() == [1, 2, 3] and not made[1].is_inference()
        assert made[0].is_inference() == second


def test_another_threads_operations_are_not_recorded() -> None:
    def other() -> None:
        torch.zeros(3).sum().item()

    def make(x: Tensor) -> Tensor:
        thread = Thread(target=other)
        thread.start()
        thread.join()
        return x + 1

    assert recorded(make, torch.zeros(3)).again is not None


# -- random programs ------------------------------------------------------------------------------------------------

N = 12


def program(seed: int) -> Make:
    """A function of two vectors by some twenty operations: of values, of views, in place, into `out`, of lists."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        r = random.Random(seed)
        known = [*given, torch.arange(N), torch.full((N,), 3)]
        for _ in range(r.randrange(4, 24)):
            x, y = r.choice(known), r.choice(known)
            a, b = sorted(r.sample(range(N + 1), 2))
            known.append(STEPS[r.choice(list(STEPS))](x, y, a, b))
        return (*(r.choice(known[2:]) for _ in range(3)), known[-1])

    return run


def _written(x: Tensor, y: Tensor, a: int, b: int) -> Tensor:
    z = x.clone()
    z[a:b].add_(y[a:b])
    return z


def _out(x: Tensor, y: Tensor, a: int, b: int) -> Tensor:
    z = torch.empty(N, dtype=torch.int64)
    torch.sub(x, y, out=z)
    return z


STEPS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "add": lambda x, y, a, b: x + y,
    "by a number": lambda x, y, a, b: x * a - b,
    "where": lambda x, y, a, b: torch.where(x > a, x, y),
    "cumsum": lambda x, y, a, b: x.clamp(-a, b).cumsum(0),
    "sort": lambda x, y, a, b: x.sort(stable=True).indices,
    "take": lambda x, y, a, b: x.gather(0, y.abs() % N),
    "search": lambda x, y, a, b: torch.searchsorted(x.sort().values, y.contiguous(), right=a > 4),
    "flip": lambda x, y, a, b: x.view(3, 4).mT.reshape(N) if x.is_contiguous() else x.flip(0),
    "every other": lambda x, y, a, b: torch.stack([x, y], 1)[:, a % 2],
    "parts": lambda x, y, a, b: torch.cat([x[a:b], y[: N - (b - a)]]),
    "list": lambda x, y, a, b: torch.stack(list(x.unbind(0))[::-1]),
    "expanded": lambda x, y, a, b: x[a : a + 1].expand(N) if a < N else x,
    "constant": lambda x, y, a, b: torch.arange(a, a + N) * b,
    "in place": lambda x, y, a, b: x.add_(a) if x.stride(0) else x,
    "copied": lambda x, y, a, b: x.copy_(y) if x.stride(0) else x,
    "scattered": lambda x, y, a, b: torch.zeros(N, dtype=torch.int64).scatter_add_(0, x.abs() % N, y),
    "filled": lambda x, y, a, b: x.clone().masked_fill_(y > a, b),
    "put": lambda x, y, a, b: torch.full_like(x, 1).index_put_((y.abs() % N,), x, accumulate=True),
    "types": lambda x, y, a, b: x.clamp(0, 90).to(torch.int8).long(),
    "part in place": _written,
    "out": _out,
}


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, others = (
        tuple(torch.randint(-9, 9, (N,), generator=generator) for _ in range(2)) for _ in range(2)
    )  # fmt: skip
    check(program(seed), *first, others=others)


def test_random_programs_have_everything() -> None:
    drawn = set()
    for seed in range(PROGRAMS):
        r = random.Random(seed)
        for _ in range(r.randrange(4, 24)):
            r.choice(range(4)), r.choice(range(4)), r.sample(range(N + 1), 2)
            drawn.add(r.choice(list(STEPS)))
    assert drawn == set(STEPS)


# -- what tells calls apart -----------------------------------------------------------------------------------------


def test_calls_whose_layouts_have_other_arrays_have_other_keys() -> None:
    """A launch is bound for the arrays of one layout: for their shapes, and for which lists have entries."""
    q, k, v = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8)
    ids = torch.zeros(200, dtype=torch.int64)
    patterns = [
        gs.BlockIndices(torch.zeros((*lead, 4, n), dtype=torch.int64)) for lead in ((1, 1), (2, 1)) for n in (1, 2)
    ]
    patterns += [gs.DocumentIds(ids), gs.DocumentIds(ids.expand(2, -1)), gs.DocumentIds(ids) & gs.Strided(3, 3)]
    options = AttentionOptions()
    keys = [request_of(q, k, v, pattern, options).key for pattern in patterns]
    assert len(set(keys)) == len(keys)
    assert [request_of(q, k, v, pattern, options).key for pattern in patterns] == keys


def clone_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def moved(x: Tensor) -> Tensor:
    """The numbers at another place of another memory."""
    return torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape)


@pytest.mark.parametrize("hook", [clone_of, moved])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_go_by_the_strides_of_what_hooks_return(
    hook: Callable[[Tensor], Tensor], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved tensors, the memory of a layout among them, lie otherwise behind a hook that copies them.

    Of a layout that each call makes, and of one that is kept by its numbers.
    """
    from gossamer.torch import repeated
    from gossamer.torch.calls import MadeCall

    forget_all()
    if not kept:
        monkeypatch.setattr(repeated, "MOST_READ_BYTES", 0)
    q, k, v = (torch.randn(2, 200, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    ids = torch.stack([torch.arange(200) // 64, torch.zeros(200, dtype=torch.int64)])
    calls: list[MadeCall] = []

    def gradients() -> tuple[Tensor, ...]:
        out = gs.attention(q, k, v, gs.DocumentIds(ids))
        assert out.grad_fn is not None
        calls.append(out.grad_fn.call)  # type: ignore[attr-defined]
        return torch.autograd.grad(out.sin().sum(), (q, k, v))

    wanted = gradients()
    with torch.autograd.graph.saved_tensors_hooks(hook, lambda x: x):
        found = gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert isinstance(calls[0], MadeCall) and (calls[0] is calls[1]) is not kept
    assert kept or len(calls[0]._backwards) == 2
