"""The calls of a Hopper backward on a CPU: kernels are replaced by plain ones that read the documented arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.kernels.contract import Scoring, Terms
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.hopper.launch.backward import narrow
from gossamer.kernels.reference import oracle
from gossamer.layouts import from_dense
from gossamer.layouts.block import BlockLayout
from gossamer.patterns import BigBird, Causal, Pattern, PerHead, SlidingWindow
from gossamer.plan.problem import Problem
from tests.support import launches
from tests.support.hopper_backward_stand_in import stand_in

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Any:
    return stand_in(monkeypatch)


def scattered(lead: tuple[int, int], block: int = 128) -> BlockLayout:
    mask = np.random.default_rng(0).random((*lead, 300, 400)) < 0.2
    mask[..., :128, :256] = True
    mask[..., 40:60, :] = False
    return from_dense(mask, block_q=block, block_kv=block)


def patterned(pattern: Pattern, Q: int, K: int, block_q: int = 128) -> BlockLayout:
    return pattern.layout(Q, K, block_q=block_q, block_kv=128)


LAYOUTS: dict[str, Callable[[], BlockLayout]] = {
    "causal": lambda: patterned(Causal(), 300, 400),
    "window": lambda: patterned(SlidingWindow(100, 30), 400, 400, 192),
    "global": lambda: patterned(BigBird(64), 1200, 1200),  # split without being asked to be
    "shared": lambda: scattered((1, 1)),
    "by head": lambda: scattered((1, 4)),
    "by batch element": lambda: scattered((2, 1)),
    "by both": lambda: scattered((2, 4)),
    "blocks of 64": lambda: BigBird(64, random_blocks=1).layout(600, 600, block_q=64, block_kv=64),
    "by both, tiles of 64": lambda: scattered((2, 4), 64),
    "other patterns": lambda: patterned(PerHead([SlidingWindow(31), Causal()] * 2), 300, 300),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("D", "E"), [(40, 24), (192, 130)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("given_lengths", [False, True], ids=("all keys", "lengths"))
def test_arguments(launch: Any, name: str, D: int, E: int, deterministic: bool, given_lengths: bool) -> None:
    layout = LAYOUTS[name]()
    if layout.block_q == 192 and D > 128:
        pytest.skip("192-row tiles are those of small heads")
    B, H, G, Q, K = (1, 2, 1, 1200, 1200) if name == "global" else (2, 4, 2, layout.Q, layout.K)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, h, n, d, generator=generator).bfloat16()
        for h, n, d in ((H, Q, D), (G, K, D), (G, K, E), (H, Q, E))
    )
    dlse = torch.randn(B, H, Q, generator=generator)
    sinks, mask = torch.randn(H, generator=generator), torch.from_numpy(layout.expand())
    # One ends within a tile, one keeps nothing.
    lengths = torch.tensor([K - 90, 0][:B]) if given_lengths else None
    terms = Terms(D**-0.5, K - Q, 2.0 if name == "causal" else None, False, lengths, sinks)
    leaves = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = oracle(*leaves[:3], mask, terms._replace(sink_logits=leaves[3]))
    want = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)
    problem = Problem(B, H, G, Q, K, D, E, "bfloat16", "cpu", processors=40, deterministic=deterministic)
    made, saved = layout.to("cpu"), (out.detach().bfloat16(), lse.detach().float())
    if name == "global":
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": saved[0], "lse": saved[1]}
        scoring = Scoring(terms.scale, terms.q_offset)
        steps = launches.prepared(launch, problem, made, "backward", scoring, given).launch.steps
        assert "sum_parts" in [step.kernel.name for step in steps]
    for split in (None, 2) if name in ("causal", "by both") else (None,):
        # The second has no copy on the host.
        for where in (made, BlockLayout(made.rows)) if split is None else (made,):
            found = launches.backward(launch, problem, where, terms, dout, dlse, q, k, v, *saved, split=split)
            for actual, exact in zip(found, want, strict=True):
                assert actual.is_contiguous()
                error = (actual.double() - exact).abs().max() / exact.abs().max()
                assert error < 2e-2, (split, float(error))


def unkept(name: str) -> BlockLayout:
    if name == "rows":
        return Causal().layout(300, 200, block_q=128, block_kv=128)
    if name == "keys":
        return SlidingWindow(40).layout(200, 500, block_q=128, block_kv=128)
    return scattered((2, 4), 64) if name == "bits" else patterned(SlidingWindow(60), 400, 400)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["rows", "keys", "bits", "lengths"])
def test_what_is_not_attended(launch: Any, name: str, deterministic: bool) -> None:
    """The configurations of layouts with such rows or keys clear them."""
    layout = unkept(name)
    B, H, G, Q, K, D = 2, 4, 2, layout.Q, layout.K, 72
    q, k, v, dout = (torch.randn(B, h, n, D).bfloat16() for h, n in ((H, Q), (G, K), (G, K), (H, Q)))
    lengths = torch.tensor([K - 130, 70]) if name == "lengths" else None
    keep = torch.from_numpy(layout.expand()).expand(B, H, Q, K)
    if lengths is not None:
        keep = keep & (torch.arange(K) < lengths[:, None, None, None])
    rows, keys = ~keep.any(-1)[..., None], ~keep.any(2).view(B, G, H // G, K).any(2)[..., None]
    assert rows.any() or keys.any()
    terms = Terms(D**-0.5, K - Q, key_lengths=lengths)
    out, lse = (x.float() for x in oracle(q, k, v, keep, terms))
    problem = Problem(B, H, G, Q, K, D, D, "bfloat16", "cpu", processors=40, deterministic=deterministic)

    def run(value: float) -> tuple[Tensor, ...]:
        given = [x.masked_fill(of, value) for x, of in ((dout, rows), (q, rows), (k, keys), (v, keys))]
        return launches.backward(
            launch, problem, layout.to("cpu"), terms, given[0], None, *given[1:], out.bfloat16(), lse
        )

    want = run(0.0)
    for value in (torch.nan, torch.inf):
        assert all(torch.equal(x, y) for x, y in zip(want, run(value), strict=True)), value


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "global", "by both", "by both, tiles of 64"])
def test_repeated_calls(launch: Any, name: str, deterministic: bool) -> None:
    """A launch serves other arrays that lie alike, also where columns are cut, and into views of other tensors."""
    from gossamer.torch.bind import bind

    layout = LAYOUTS[name]().to("cpu")
    B, H, Q, K, D = (1, 2, 1200, 1200, 64) if name == "global" else (2, 4, layout.Q, layout.K, 64)
    problem = Problem(B, H, H, Q, K, D, D, "bfloat16", "cpu", processors=40, deterministic=deterministic)
    terms = Terms(D**-0.5, K - Q, sink_logits=torch.randn(H))
    scoring = Scoring(terms.scale, terms.q_offset)

    def draw() -> dict[str, Tensor]:
        sizes = {"dout": Q, "q": Q, "k": K, "v": K, "out": Q}
        drawn = {x: torch.randn(B, H, n, D).bfloat16() for x, n in sizes.items()}
        return drawn | {"lse": torch.randn(B, H, Q), "dlse": torch.randn(B, H, Q), "sink_logits": terms.sink_logits}

    def views(room: int) -> dict[str, Tensor]:
        """Room for the gradients; of 2, where TMA can address it."""
        made = {x: torch.full((B, n, H, room, D), torch.nan).bfloat16() for x, n in (("dq", Q), ("dk", K), ("dv", K))}
        return {x: y.flatten(3)[..., 1 - room % 2 :][..., :D].transpose(1, 2) for x, y in made.items()}

    for room in (0, 2, 3):
        first = draw() | (views(room) if room else {})
        launch_of = launches.prepared(launch, problem, layout, "backward", scoring, first)
        call = bind(launch_of, torch.device("cpu"), tuple(first))
        for _ in range(2):
            x = draw()
            order = ("dout", "dlse", "q", "k", "v", "out", "lse")
            want = launches.backward(launch, problem, layout, terms, *[x[y] for y in order])
            there = views(room) if room else {}
            found = call(*x.values(), *there.values())
            assert all(a is b for a, b in zip(found, there.values(), strict=False))
            assert all(torch.equal(*y) for y in zip(found, want, strict=True))


def test_calls_in_graphs_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.torch import memory

    cpu, pool = torch.device("cpu"), torch.zeros((2, memory.APART), dtype=torch.int32)
    tile_counter = memory.stream_array(torch.int32, (1,), 0.0, cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    slots = {(torch.int32, 0.0, cpu.index): memory._GraphArrays(pool, iter(range(2)))}
    monkeypatch.setattr(memory, "_of_graphs", slots)
    found = [tile_counter() for _ in range(3)]
    assert [x.shape for x in found] == [(1,)] * 3 and len({x.data_ptr() for x in found}) == 3
    # The third finds none left, and is zeroed by the graph.
    owners = [x.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for x in found]
    assert owners == [True, True, False] and found[1].data_ptr() - found[0].data_ptr() == 4 * memory.APART
    monkeypatch.setattr(memory, "_of_graphs", {})
    assert tile_counter().tolist() == [0]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [(SlidingWindow(512), True), (SlidingWindow(300, 300), True), (SlidingWindow(4096), False), (Causal(), False)],
    ids=str,
)
def test_narrow_windows_leave_out_edges(pattern: Pattern, found: bool) -> None:
    assert narrow(pattern.layout(8192, 8192, block_q=128, block_kv=128)) == found
