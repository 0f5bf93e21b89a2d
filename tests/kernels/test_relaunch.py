"""Triton kernels as steps: what is compiled of an argument, and what a bound step passes to the compiled kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

import gossamer as gs
from gossamer.kernels import launch_now, relaunch
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import Builder, Constant, Group, Operand, names_of, operand_of
from gossamer.kernels.relaunch import Blocks, Pointer, Programs
from gossamer.kernels.triton import IMPLEMENTATION, KERNELS
from gossamer.plan.problem import Problem
from tests.support.launches import prepared, run

Call = tuple[str, tuple[int, ...], tuple[Any, ...]]


class Compiled:
    """A compiled kernel, whose grid has three numbers: grid, stream, function, metadata and three of hooks first."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3
        return lambda *arguments: self.calls.append(("hooked", grid, arguments))

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        assert arguments[:6] == ("stream", "function", "metadata", None, None, None)
        self.calls.append(("known", (x, y, z), arguments[6:]))


class Kernel:
    """A Triton kernel that computes nothing and says how it was compiled and launched."""

    @staticmethod
    def fn(size: int, x: Any, scale: float, y: Any, table: Any, FLAG: bool) -> None: ...

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Compiled:
        self.calls.append(("compiled", grid, (*arguments, options)))
        return Compiled(self.calls)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


def fields(name: str, kind: Any, argument: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, what it is compiled for, what is passed) of an argument, or of all that is in its tuples."""
    if not isinstance(kind, tuple):
        yield name, kind, argument
        return
    for field, x, y in zip(getattr(kind, "_fields", range(len(kind))), kind, argument, strict=True):
        yield from fields(f"{name}.{field}", x, y)


def described(kernel: Kernel, grid: tuple[int, ...] = (3, 2)) -> Builder:
    b = Builder({"x": Operand("float16", (2, 3), (8, 1), False), "t": Operand("int32", (4,), (1,))})
    values = {"FLAG": True, "table": "t", "y": None, "x": "x", "scale": 0.5, "size": 7}  # in any order
    relaunch.step(b, "triton", "name", kernel, grid, values, {"num_warps": 4})
    return b


def test_arguments_are_ordered_by_the_kernel() -> None:
    kernel = Kernel()
    (step,) = described(kernel).done().launch.steps
    assert step.arguments == (Constant(7), "x", Constant(0.5), Constant(None), "t", Constant(True))
    signature = (7, Pointer("float16", False), 0.5, None, Pointer("int32", True), True)
    assert step.kernel.key == ((3, 2), (("num_warps", 4),), signature)
    assert hash(step.kernel) and not kernel.calls
    assert described(kernel, (0, 2)).done().launch.steps == ()


def test_a_step_passes_what_it_is_given(streams: None) -> None:
    kernel = Kernel()
    (step,) = described(kernel).done().launch.steps
    launch = relaunch.launcher(kernel, Programs(*step.kernel.key))
    (_, grid, (size, x, scale, y, table, flag, options)) = kernel.calls.pop()
    assert (grid, size, scale, y, flag, options) == ((3, 2), 7, 0.5, None, True, {"num_warps": 4})
    assert [(a.dtype, a.data_ptr() % 16) for a in (x, table)] == [("float16", 8), ("int32", 0)]
    launch(7, 4096, 0.5, None, 8192, True)
    assert kernel.calls == [("known", (3, 2, 1), (7, 4096, 0.5, None, 8192, True))]


class Sizes(NamedTuple):
    """Numbers of which a kernel is compiled for none."""

    rows: int
    scale: float


class Memory(NamedTuple):
    """An array beside a number, in a tuple that is in a tuple."""

    at: Any
    sizes: Sizes


class GroupedKernel(Kernel):
    """A kernel that takes tuples."""

    do_not_specialize = ("sizes",)

    @staticmethod
    def fn(x: Any, memory: Memory, sizes: Sizes, FORM: Any) -> None: ...


def grouped(kernel: GroupedKernel, rows: int = 16) -> Any:
    b = Builder({"x": Operand("float16", (2, 3), (8, 1), False), "t": Operand("int32", (4,), (1,))})
    sizes = Sizes(rows, 0.5)
    values = {"x": "x", "memory": Memory("t", sizes), "sizes": sizes, "FORM": Sizes(8, 1.0)}
    relaunch.step(b, "triton", "name", kernel, (1,), values, {})
    return b.done().launch.steps[0]


def test_a_tuple_is_one_argument(streams: None) -> None:
    kernel = GroupedKernel()
    step = grouped(kernel)
    group = Group(("t", Constant(Sizes(16, 0.5))))
    assert step.arguments == ("x", group, Constant(Sizes(16, 0.5)), Constant(Sizes(8, 1.0)))
    assert list(names_of(step.arguments)) == ["x", "t"]
    _, memory, sizes, form = step.kernel.key[2]
    # Of integers in a tuple that the kernel says so of nothing is compiled; Triton leaves that out for whole arguments.
    assert memory == Memory(Pointer("int32", True), Sizes(16, 0.5)) and sizes == Sizes(relaunch.PLAIN, 0.5)
    assert form == Sizes(8, 1.0) and isinstance(memory.sizes, Sizes)
    assert grouped(kernel, 32).kernel.key[2][2] == sizes
    launch = relaunch.launcher(kernel, Programs(*step.kernel.key))
    _, _, (_, memory, _, form, _) = kernel.calls.pop()
    assert memory.at.data_ptr() % 16 == 0 and memory.sizes == Sizes(16, 0.5)
    # Triton before 3.9 takes the fields of a constant for constants where they are told to be.
    assert all(isinstance(x, tl.constexpr) for x in form) and [x.value for x in form] == [8, 1.0]
    launch(1, (2, (16, 0.5)), (16, 0.5), (8, 1.0))
    assert kernel.calls == [("known", (1, 1, 1), (1, (2, (16, 0.5)), (16, 0.5), (8, 1.0)))]


def test_integers_that_a_kernel_is_not_compiled_for_keep_their_bits() -> None:
    """A stride of a large tensor takes 64."""

    class Numbers(NamedTuple):
        n: int
        stride: int

    class Kernel:
        do_not_specialize = ("numbers",)

        @staticmethod
        def fn(x: Any, numbers: Any, FORM: Any) -> None: ...

    form = Numbers(2**40, 1)
    for stride in (0, 1, 16, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**40)):
        wide = not -(2**31) <= stride < 2**31
        _, numbers, kept = relaunch.without_values(Kernel, (Pointer("float32", True), Numbers(1, stride), form))
        assert type(numbers) is Numbers and kept == form
        assert (numbers.n, numbers.stride.bit_length() > 31) == (relaunch.PLAIN, wide)
        assert numbers.stride % 16 and numbers.stride != 1


def test_the_interpreter_gets_the_names_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    got: list[Any] = []

    class Interpreted(GroupedKernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: got.extend(arguments)

    kernel = Interpreted()
    relaunch.launcher(kernel, Programs(*grouped(kernel).kernel.key))("x", ("t", (16, 0.5)), (16, 0.5), (8, 1.0))
    assert got == ["x", ("t", (16, 0.5)), (16, 0.5), (8, 1.0)]
    assert got[1].sizes.rows == got[2].rows == 16


def test_a_profiler_sees_bound_steps(streams: None) -> None:
    kernel = Kernel()
    launch = relaunch.launcher(kernel, Programs((1,), (), ()))
    seen = knobs.runtime.launch_enter_hook

    def called() -> str:
        launch()
        return kernel.calls[-1][0]

    def hook(metadata: object) -> None: ...

    assert called() == "known"
    seen.add(hook)
    try:
        assert called() == "hooked"
    finally:
        seen.remove(hook)
    assert called() == "known"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int8", "int64"])
def test_triton_sees_in_a_stand_in_what_it_sees_in_a_tensor(dtype: str) -> None:
    """Else the kernel that is compiled ahead would be another than that of the call."""

    def specialised(x: Any) -> Any:
        return native_specialize_impl(CUDABackend, x, False, True, True)

    kind = getattr(torch, dtype)
    whole = torch.zeros(64, dtype=kind)
    for x in (whole, whole[1:]):
        known = operand_of(x)
        assert specialised(relaunch._stand_in(Pointer(known.dtype, known.aligned))) == specialised(x)
    if kind.is_floating_point:
        x, block = torch.zeros(1, 2, 30, 64, dtype=kind), [1, 1, 16, 64]
        argument = Blocks(dtype, tuple(x.shape), x.stride(), tuple(block))
        assert specialised(relaunch._stand_in(argument)) == specialised(TensorDescriptor.from_tensor(x, block))


def test_addresses_of_a_whole_call(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of both directions gets an address for each array, a descriptor where it loads by TMA."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    calls: list[Call] = []
    compiled: list[tuple[str, tuple[Any, ...]]] = []

    def warmup(name: str) -> Any:
        def warmed(*arguments: Any, grid: tuple[int, ...], **options: Any) -> Compiled:
            compiled.append((name, arguments))
            return Compiled(calls)

        return warmed

    for name, function in KERNELS.items():
        monkeypatch.setattr(function, "warmup", warmup(name))
    problem = Problem(1, 2, 1, 200, 200, 64, 64, "bfloat16", "cpu", sm=90)
    layout = gs.SlidingWindow(150).layout(200, 200, block_q=128, block_kv=128).to("cpu")
    q, k, v, dout, out = (torch.zeros(1, h, 200, 64, dtype=torch.bfloat16) for h in (2, 1, 1, 2, 2))
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": torch.zeros(1, 2, 200)}
    dq, dk, dv = run(IMPLEMENTATION, problem, layout, "backward", Scoring(0.125, 0), given)
    assert [name for name, _ in compiled] == ["row_terms_kernel", "dq_kernel", "dkdv_kernel"]
    for (name, stand_ins), (how, _, arguments) in zip(compiled, calls, strict=True):
        passed: dict[str, Any] = {}
        for parameter, compiled_for, argument in zip(
            relaunch.parameters(KERNELS[name]), stand_ins, arguments, strict=True
        ):
            for path, stand_in, given_it in fields(parameter, compiled_for, argument):
                passed[path.split(".")[-1]] = given_it
                if isinstance(stand_in, TensorDescriptor):
                    assert name == "dq_kernel" and path in ("k", "v")
                    assert given_it.base is given[path]
                elif isinstance(stand_in, relaunch._Memory):
                    assert isinstance(given_it, int) and given_it % 16 == stand_in.address
                elif path.startswith("numbers.") and isinstance(given_it, int):
                    assert stand_in == relaunch.PLAIN
                else:
                    assert given_it is stand_in or given_it == stand_in
        own = {"q": q, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "lse": given["lse"]}
        pointers = {n: x for n, x in own.items() if isinstance(passed.get(n), int)}
        assert how == "known" and pointers and all(passed[n] == x.data_ptr() for n, x in pointers.items())


@pytest.mark.parametrize("change", ["stride", "offset", "dtype"])
def test_the_launch_tells_what_triton_compiles_for(change: str) -> None:
    x = torch.zeros(1, 2, 20, 17)
    changed = {"stride": x.transpose(1, 2), "offset": x[..., 1:], "dtype": x.half()}[change]
    layout = gs.SlidingWindow(5).layout(20, 20, block_q=64, block_kv=64).to("cpu")

    def steps(k: torch.Tensor) -> Any:
        problem = Problem(1, 2, 2, 20, 20, 16, 16, "float32", "cpu", sm=80)
        q = torch.zeros(1, 2, 20, 16)
        given = {"q": q, "k": k, "v": q}
        return prepared(IMPLEMENTATION, problem, layout, "forward", Scoring(1.0, 0), given).launch.steps

    assert steps(x) == steps(torch.ones_like(x)) != steps(changed)


def test_threads_share_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound launch holds addresses of a schedule's tensors: one made at the same time must not take its place."""
    from gossamer.kernels.triton.block import schedule_block as block
    from gossamer.kernels.triton.gather import schedule_gather as gather
    from gossamer.layouts import build_gather

    pattern = gs.SlidingWindow(9) | gs.Dilated(3, 0, 40)
    blocks = pattern.layout(300, 300, block_q=64, block_kv=64).to("cpu")
    gathers = build_gather(pattern, 300, 300, block_q=16).to("cpu")
    problem = Problem(1, 2, 1, 300, 300, 16, 16, "float32", "cpu")
    both = threading.Barrier(2)

    def late(make):
        def made(*arguments):
            both.wait(timeout=30)  # both threads have found nothing
            return make(*arguments)

        return made

    for module, name in (
        (block, "_make_schedule"),
        (block, "work_items"),
        (gather, "_make_schedule"),
        (gather, "_make_work"),
    ):
        monkeypatch.setattr(module, name, late(getattr(module, name)))
    for ask in (
        lambda: block.schedule_of(problem, blocks, False, 2),
        lambda: gather.schedule_of(problem, gathers, "forward", None, 2),
    ):
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: ask(), range(2))  # noqa: B023
        assert first is second is ask() and first.split_rows.slots > 0


def test_launches_at_once(streams: None) -> None:
    """Arguments by place or by name, in the kernel's order; compiled once for equal numbers, types and alignment."""
    kernel = Kernel()
    x, y = torch.zeros(8), torch.zeros(9)[1:]  # the second begins 4 bytes behind a multiple of 16

    def launch(size: int, x: torch.Tensor, y: torch.Tensor, grid: tuple[int, ...] = (3,), **more: Any) -> None:
        given = {"scale": 0.5, "FLAG": True, "num_warps": 4} | more
        launch_now.launch(kernel, grid, size, x, table=x, y=y, **given)

    def compiled() -> int:
        return sum(kind == "compiled" for kind, _, _ in kernel.calls)

    launch(7, x, y)
    (_, grid, (*stand_ins, options)), (kind, programs, passed) = kernel.calls
    assert grid == (3,) and options == {"num_warps": 4} and (kind, programs) == ("known", (3, 1, 1))
    assert [x if isinstance(x, (int, float)) else x.data_ptr() for x in stand_ins] == [7, 0, 0.5, 8, 0, True]
    assert passed == (7, x.data_ptr(), 0.5, y.data_ptr(), x.data_ptr(), True)
    launch(7, x + 1, y.clone().repeat(2)[4:])  # others of the same facts
    assert compiled() == 2, "an aligned y is another kernel"
    launch(7, x + 1, torch.zeros(9)[1:])
    assert compiled() == 2 and len(kernel.calls) == 5
    for more in ({"size": 8}, {"grid": (4,)}, {"scale": 0.25}, {"FLAG": False}, {"num_warps": 8}, {"x": x.int()}):
        before = compiled()
        launch(**({"size": 7, "x": x, "y": y} | more))
        assert compiled() == before + 1, more
