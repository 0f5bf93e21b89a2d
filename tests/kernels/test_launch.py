"""Launches as data, and what binding makes of them."""

from __future__ import annotations

import gc
import linecache
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import gossamer as gs
from gossamer.kernels.contract import Scoring
from gossamer.kernels.launch import EDGE, Builder, Direction, Kernel, Launch, Operand, Prepared, compact, operand_of
from gossamer.layouts import build_gather
from gossamer.memo import forget_all
from gossamer.plan.plan import Plan
from gossamer.plan.problem import Problem
from gossamer.plan.table import NAMES, load
from gossamer.torch import calls
from gossamer.torch.bind import _Writer, bind
from gossamer.torch.functions import FUNCTIONS
from gossamer.torch.mask_layouts import packed_mask_of

CPU = torch.device("cpu")
VECTORS = {
    "key_lengths": torch.tensor([90, 40], dtype=torch.int16), "sink_logits": torch.zeros(4),
    "alibi_slopes": torch.zeros(4),
}  # fmt: skip


def every_launch(direction: Direction) -> Iterator[tuple[str, Prepared]]:
    """One of each implementation that can be imported here and of each layout that it reads."""
    pattern, N = gs.BigBird(32, random_blocks=1), 100
    x = {"q": (2, 4, N, 64), "k": (2, 2, N, 64), "v": (2, 2, N, 64)}
    if direction == "backward":
        x |= {"dout": (2, 4, N, 64), "out": (2, 4, N, 64)}
    for name in NAMES:
        implementation: Any = load(name)
        if isinstance(implementation, str):
            continue
        dtype = "float32" if "float32" in implementation.capability.dtypes else "bfloat16"
        operands = {n: Operand(dtype, shape, compact(shape)) for n, shape in x.items()}
        if direction == "backward":
            operands |= {n: Operand("float32", (2, 4, N), compact((2, 4, N))) for n in ("lse", "dlse")}
        operands |= {n: operand_of(t) for n, t in VECTORS.items() if n in implementation.capability.score_terms}
        terms = frozenset(operands.keys() & VECTORS.keys())
        problem = Problem(2, 4, 2, N, N, 64, 64, dtype, "cuda", 90, 132, terms, direction == "backward")
        mask = torch.from_numpy(pattern.materialize(N, N))
        if implementation.layout == "block":
            block_q, block_kv = implementation.tile(problem)
            layouts: list[Any] = [pattern.layout(N, N, block_q=block_q, block_kv=block_kv).to("cpu")]
            rows = {choice.block_q for choice in implementation.capability.gathers if choice.reads(problem)}
            layouts += [build_gather(pattern, N, N, block_q=n).to("cpu") for n in sorted(rows)]
        else:
            layouts = [packed_mask_of(mask, N, N) if implementation.layout == "packed_mask" else mask.view(1, 1, N, N)]
        for layout in layouts:
            yield name, implementation.prepare(problem, layout, direction, Scoring(0.125, 0), operands)


def held(x: Any) -> Iterator[Any]:
    """Everything inside a launch."""
    yield x
    if isinstance(x, Launch):
        yield from held(vars(x))
    elif isinstance(x, dict):
        for pair in x.items():
            yield from held(pair)
    elif isinstance(x, tuple):
        for y in x:
            yield from held(y)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_launch_is_data(direction: Direction) -> None:
    """It holds names and numbers alone, and means the same in another process; arrays of the layout lie beside it."""
    names = set()
    for name, (launch, layout) in every_launch(direction):
        names.add(name)
        plain = (str, int, float, bool, type(None), tuple, dict, Launch, frozenset)
        strange = {type(x) for x in held(launch) if not isinstance(x, plain)}
        # What a kernel is compiled for, which its key holds: frozen dataclasses.
        assert all(hasattr(kind, "__dataclass_params__") for kind in strange), strange
        again = pickle.loads(pickle.dumps(launch))
        assert again == launch and set(launch.layout) == set(layout)
        made = {*launch.arrays, *launch.views, *launch.layout, *launch.arguments}
        for step in launch.steps:
            assert {x for x in step.arguments if isinstance(x, str)} <= made, step
            assert hash(step.kernel) is not None
            made |= {returned.name for returned in step.returns}
        assert made.issuperset(launch.results)
    assert {"reference", "blocked"} <= names


def described(shape: tuple[int, ...] = (2, 3)) -> Prepared:
    """total = x + y, written over z."""
    b = Builder({name: Operand("float32", shape, compact(shape)) for name in ("x", "y")})
    b.array("total", "float32", shape, fill=0.0)
    b.step(Kernel(EDGE, "add"), "x", "total")
    b.step(Kernel(EDGE, "add"), "y", "total")
    b.function(Kernel(EDGE, "scaled", (2.0,)), "total", returns={"twice": None})
    return b.done("total", "twice")


def test_a_bound_launch_runs() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    run = bind(described(), CPU, ("y", "unread", "x"))
    for _ in range(2):
        total, twice = run(y, None, x)
        assert torch.equal(total, x + y) and torch.equal(twice, 2 * (x + y))


def test_launches_of_one_form_share_their_text() -> None:
    """What differs in shapes and numbers alone is compiled once."""
    one, other = (bind(described(shape), CPU, ("x", "y")) for shape in ((2, 3), (70, 1)))
    assert one.__code__ is other.__code__ and one is not other


def test_a_traceback_shows_the_line() -> None:
    run = bind(described(), CPU, ("x", "y"))
    with pytest.raises(RuntimeError) as raised:
        run(torch.zeros(5), torch.zeros(2, 3))
    shown = "".join(traceback.format_tb(raised.value.__traceback__))
    assert "run_add" in shown and linecache.getline(run.__code__.co_filename, 1).startswith("def make(")


def test_views_and_included_launches() -> None:
    """A launch inside another one, over every other column and from the second row on, twice; names do not meet."""
    shape = (4, 6)
    b = Builder({name: Operand("float32", shape, compact(shape)) for name in ("x", "y")})
    b.array("all", "float32", shape, fill=-1.0)
    inner = described((3, 3))
    for n, column in enumerate((0, 1)):
        given = {}
        for name, of in (("x", "x"), ("y", "y"), ("total", "all")):
            given[name] = b.view(f"{n}.{name}", of, (3, 3), (6, 2), 6 + column)
        b.step(Kernel(EDGE, "zero"), given["total"])
        b.include(inner, given, f"{n}.inner.")
    x, y = torch.randn(shape), torch.randn(shape)
    (found,) = bind(b.done("all"), CPU, ("x", "y"))(x, y)
    assert torch.equal(found[1:], (x + y)[1:]) and (found[0] == -1).all()


def test_a_bound_launch_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a kernel gets addresses alone: whoever holds the function may run it, a captured graph for example."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setitem(FUNCTIONS, "probe", lambda: lambda *addresses: seen.append(addresses))
    array, b = torch.arange(5), Builder({"x": Operand("float32", (2,), (1,))})
    b.layout(lists=array)
    b.step(Kernel(EDGE, "probe", (), "addresses"), "x", "lists")
    run, x, alive = bind(b.done("x"), CPU, ("x",)), torch.zeros(2), ref(array)
    address = array.data_ptr()
    del array, b
    gc.collect()
    assert alive() is not None
    run(x)
    assert seen == [(x.data_ptr(), address)]
    del run
    gc.collect()
    assert alive() is None


def test_a_launch_on_a_gpu_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on its own device whichever is the current one, and goes, with its lists, without garbage collection."""
    changes: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", changes.append)
    b = Builder({"x": Operand("float32", (2,), (1,))})
    b.step(Kernel(EDGE, "zero"), "x")
    run, x = _Writer(b.done("x"), torch.device("cuda", 0)).function(("x",)), torch.ones(2)
    (found,) = run(x)
    assert found is x and not x.any() and changes == [0, 1]
    alive = ref(run)
    gc.disable()
    try:
        del run
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_misaligned_inputs_have_a_launch_of_their_own(which: str) -> None:
    """Aligned calls test nothing again; the same numbers come from any address."""
    forget_all()
    x = {name: torch.randn(1, 2, 70, 16) for name in ("q", "k", "v")}
    want = gs.attention(**x, pattern=gs.SlidingWindow(9))  # type: ignore[arg-type]
    room = torch.empty(x[which].numel() + 1)[1:].view(x[which].shape).copy_(x[which])
    assert room.data_ptr() % 16
    for _ in range(2):
        found = gs.attention(**x | {which: room}, pattern=gs.SlidingWindow(9))  # type: ignore[arg-type]
        assert isinstance(found, Tensor) and isinstance(want, Tensor) and torch.equal(found, want)
    assert len(calls.known) == 2


def test_what_cannot_be_read_in_place_is_copied_by_a_step() -> None:
    implementation: Any = load("small")
    if isinstance(implementation, str):
        pytest.skip(implementation)
    shape = (1, 2, 70, 16)
    problem = Problem(1, 2, 2, 70, 70, 16, 16, "float32", "cuda", 90, 132)
    given = {name: Operand("float32", shape, compact(shape)) for name in ("q", "k", "v")}
    turned = given | {"k": Operand("float32", shape, (2240, 1120, 1, 70))}
    plain, copied = (
        implementation.prepare(problem, None, "forward", Scoring(1.0, 0), operands).launch
        for operands in (given, turned)
    )
    assert [step.kernel.name for step in plain.steps] == ["forward"]
    assert [step.kernel.name for step in copied.steps] == ["copy", "forward"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda out, lse: (out,), r"lse \(1, 2, 70\) float32; got \(1, 2, 70, 16\) float32$"),
        (lambda out, lse: torch.stack((out, out)), r"; got \(2, 1, 2, 70, 16\) float32$"),
        (lambda out, lse: (out.double(), lse), "got .* float64, "),
        (lambda out, lse: (lse, out), r"got \(1, 2, 70\) float32, "),
        (lambda out, lse: (out.transpose(1, 2).contiguous().transpose(1, 2), lse), "float32 not contiguous"),
    ],
)  # fmt: skip
def test_what_an_implementation_returns_is_looked_at(found: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would reach the user as it is."""
    from gossamer.kernels import reference

    forward = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *given: found(*forward(*given)))
    forget_all()
    x = torch.randn(1, 2, 70, 16)
    must = "forward of reference must return contiguous tensors, in a tuple: "
    with pytest.raises(AssertionError, match=f"{must}.*{message}"):
        gs.attention(x, x, x, gs.Causal(), implementation="reference")
    forget_all()


def test_a_name_that_nothing_has() -> None:
    b = Builder({"x": Operand("float32", (2,), (1,))})
    with pytest.raises(AssertionError, match=r"edge.add is given \['y'\], and nothing is named so"):
        b.step(Kernel(EDGE, "add"), "x", "y")
    with pytest.raises(AssertionError, match=r"edge.scaled is given \['y'\]"):
        b.function(Kernel(EDGE, "scaled", (2.0,)), "y", returns={"z": None})


def test_a_launch_gives_the_results_of_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: Any = load("blocked")
    prepare = type(blocked).prepare

    def swapped(*given: Any) -> Prepared:
        launch, layout = prepare(*given)
        return Prepared(replace(launch, results=launch.results[::-1]), layout)

    monkeypatch.setattr(type(blocked), "prepare", swapped)
    forget_all()
    x = torch.randn(1, 2, 70, 16)
    with pytest.raises(AssertionError, match=r"a launch must give \('out', 'lse'\), not \('lse', 'out'\)"):
        gs.attention(x, x, x, gs.Causal(), implementation="blocked")


def test_limits_are_of_names_that_exist() -> None:
    for name, wrong in (("score_terms", "soft_cap"), ("dtypes", "fp32"), ("devices", "gpu")):
        with pytest.raises(ValueError, match=f"{name} of a capability must be among .*; got {wrong}"):
            replace(load("blocked").capability, **{name: frozenset({wrong})})  # type: ignore[union-attr]


def test_tiles_that_nobody_measured_are_not_chosen_for_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer to the table computes nobody's calls because its tiles are small; where it is first, it does."""
    blocked: Any = load("blocked")

    class Newcomer(type(blocked)):  # type: ignore[misc]
        name = "newcomer"

        def tile(self, problem: Problem) -> tuple[int, int]:
            return 32, 32

    made = Newcomer()
    problem = Problem(1, 2, 2, 512, 512, 16, 16, "float32", "cpu")
    for order, tiles in (((blocked, made), [(64, 64)]), ((made, blocked), [(32, 32), (64, 64)])):
        found = Plan(problem, order, ())
        assert [(tile.block_q, tile.block_kv) for tile in found.tiles] == tiles
