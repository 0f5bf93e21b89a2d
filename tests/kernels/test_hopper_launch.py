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

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))
SHARED = ("work", "segments", "lists", "lo", "hi", "pool", "part_dk", "part_dv", "lengths", "tile_counter")
NUMBERS = ("before", "exponent", "factor", "items", "blocks")


def tile_mask(a: dict[str, Any], kind: int, at: int, lead: int, tile: int, rows: int, columns: int) -> Tensor:
    """Which pairs of a listed tile are kept: rows x columns, positions of `tile` and of the list's tile column."""
    if kind == 0:
        return torch.ones(rows, columns, dtype=torch.bool)
    if kind == 2:
        words = a["pool"].view(-1, rows, columns // 32)[a["lists"][1, at]]
        return (words[..., None] >> torch.arange(32) & 1).bool().flatten(1)
    positions = (tile * rows + torch.arange(rows)).clamp(max=a["lo"].shape[1] - 1)
    column = a["lists"][0, at] * columns + torch.arange(columns)
    return (a["lo"][lead, positions][:, None] <= column) & (column < a["hi"][lead, positions][:, None])


def attended(a: dict[str, Any], batch: int, keys: slice) -> Tensor:
    """Which of the keys come before the end of those of a batch element."""
    assert (a["lengths"] is not None) == a["has_lengths"]
    positions = torch.arange(keys.start, keys.stop)
    return positions < (a["lengths"][batch] if a["has_lengths"] else keys.stop)


def padded(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[-2] % rows))


def gradients(a: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, row: Tensor, keep: Tensor) -> Any:
    """(P, dS) of a tile of queries and keys; `row` (2, queries)."""
    s = q @ k.T * a["before"]
    slope = torch.ones_like(s)
    if a["score"] == "softcap":
        s = torch.tanh(s)
        slope = 1 - s * s
    p = torch.where(keep, torch.exp2(s * a["exponent"] - row[0][:, None]), 0.0)
    return p, p * slope * (dout @ v.T - row[1][:, None])


def columns(config: Any, block_kv: int) -> Callable[..., None]:
    """The kernel of dK and dV, and of dQ's sums where the configuration has them, or of dS."""
    names = ("q", "k", "v", "dout", "terms", "dq_sum", "ds", "dk", "dv", *SHARED, *NUMBERS)

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"score": config.score, "has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in SHARED[:6]}
        q, dout = padded(a["q"], config.block_q), padded(a["dout"], config.block_q)
        k, v = padded(a["k"], block_kv), padded(a["v"], block_kv)
        rows = torch.nn.functional.pad(a["terms"], (0, -a["terms"].shape[-1] % config.block_q), value=torch.inf)
        rows[1] = rows[1].nan_to_num(posinf=0.0)
        ratio = q.shape[1] // k.shape[1]
        assert a["work"].shape[0] == a["items"]
        for item in a["work"].tolist():
            b, g, tile, slot = item[:4]
            keys = slice(tile * block_kv, (tile + 1) * block_kv)
            dk, dv = torch.zeros(block_kv, config.D), torch.zeros(block_kv, config.E)
            for head, lead, *ranges in a["segments"][item[4] : item[4] + item[5]].tolist():
                h = g * ratio + head
                for kind in range(3):
                    for at in range(ranges[2 * kind], ranges[2 * kind] + ranges[2 * kind + 1]):
                        first = int(a["lists"][0, at]) * config.block_q
                        queries = slice(first, first + config.block_q)
                        keep = tile_mask(a, kind, at, lead, tile, block_kv, config.block_q).T & attended(a, b, keys)
                        x = q[b, h, queries], k[b, g, keys], v[b, g, keys], dout[b, h, queries]
                        p, ds = gradients(a, *x, rows[:, b, h, queries], keep)
                        dv[:, : v.shape[-1]] += p.T @ x[3]
                        dk[:, : k.shape[-1]] += ds.T @ x[0]
                        if getattr(config, "with_dq", False):
                            add(a["dq_sum"][b, h], first, ds @ x[1], config.D)
                        if config.keeps:
                            pairs(a["ds"], item[8] + item[9] * head + int(a["lists"][2, at]), *ds.shape)[:] = ds
            if slot < 0:
                some = a["dk"][b, g, keys], a["dv"][b, g, keys]
                some[0].copy_(dk[: len(some[0]), : k.shape[-1]] * a["factor"])
                some[1].copy_(dv[: len(some[1]), : v.shape[-1]])
            else:
                a["part_dk"][slot] = dk
                a["part_dv"][slot] = dv

    return run


def pairs(ds: Tensor, place: int, queries: int, keys: int) -> Tensor:
    """dS of a pair of tiles, plain here: what matters is where it lies."""
    each = queries * keys // 64**2
    return ds[place * each : (place + 1) * each].view(queries, keys)


def kept(config: Any) -> Callable[..., None]:
    """The kernel of dQ from dS that is kept."""
    names = ("ds", "k", "dq", "work", "lists", "part_dq", "lengths", "tile_counter", "factor", "items", "blocks")

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in ("work", "lists")}
        block_q, block_kv, k = config.block_q, config.block_kv, padded(a["k"], config.block_kv)
        ratio = a["dq"].shape[1] // k.shape[1]
        assert a["work"].shape[0] == a["items"]
        for item in a["work"].tolist():
            b, h, tile, slot = item[:4]
            dq = torch.zeros(block_q, config.D)
            for at in (at for n in (4, 6, 8) for at in range(item[n], item[n] + item[n + 1])):
                first = int(a["lists"][0, at]) * block_kv
                keys = slice(first, first + block_kv)
                if attended(a, b, keys).any():  # else nothing is kept there
                    ds = pairs(a["ds"], item[14] + at, block_q, block_kv).float()
                    dq[:, : k.shape[-1]] += ds @ k[b, h // ratio, keys]
            if slot < 0:
                some = a["dq"][b, h, tile * block_q : (tile + 1) * block_q]
                some.copy_(dq[: len(some), : k.shape[-1]] * a["factor"])
            else:
                a["part_dq"][slot] = dq

    return run


def add(sums: Tensor, first: int, dq: Tensor, D: int) -> None:
    """Add rows of dQ to tiles of 64, plain here: what matters is which tile they go to."""
    for i in range(0, len(dq), 64):
        if (first + i) // 64 < len(sums):
            sums[(first + i) // 64].view(64, D)[:, : dq.shape[1]] += dq[i : i + 64]


def by_rows(config: Any) -> Callable[..., None]:
    """The kernel of dQ by rows."""
    arrays = ("work", "lists", "lo", "hi", "pool")
    names = ("q", "k", "v", "dout", "terms", "dq", *arrays, "part_dq", "lengths", "tile_counter", *NUMBERS)

    def run(*given: Any) -> None:
        a = dict(zip(names, given, strict=True)) | {"score": config.score, "has_lengths": config.lengths}
        a |= {name: torch.from_dlpack(a[name]) for name in arrays}
        block_q, block_kv = config.block_q, config.block_kv
        k, v = padded(a["k"], block_kv), padded(a["v"], block_kv)
        q, dout = padded(a["q"], block_q), padded(a["dout"], block_q)
        rows = torch.nn.functional.pad(a["terms"], (0, -a["terms"].shape[-1] % block_q), value=torch.inf)
        rows[1] = rows[1].nan_to_num(posinf=0.0)
        ratio = q.shape[1] // k.shape[1]
        for item in a["work"].tolist():
            b, h, tile, slot = item[:4]
            queries = slice(tile * block_q, (tile + 1) * block_q)
            dq = torch.zeros(block_q, config.D)
            for kind in range(3):
                for at in range(item[4 + 2 * kind], item[4 + 2 * kind] + item[5 + 2 * kind]):
                    first = int(a["lists"][0, at]) * block_kv
                    keys = slice(first, first + block_kv)
                    keep = tile_mask(a, kind, at, item[10], tile, block_q, block_kv) & attended(a, b, keys)
                    x = q[b, h, queries], k[b, h // ratio, keys], v[b, h // ratio, keys], dout[b, h, queries]
                    dq[:, : q.shape[-1]] += gradients(a, *x, rows[:, b, h, queries], keep)[1] @ x[1]
            if slot < 0:
                some = a["dq"][b, h, queries]
                some.copy_(dq[: len(some), : q.shape[-1]] * a["factor"])
            else:
                a["part_dq"][slot] = dq

    return run


def preprocess(dtype: str, E: int, zeroed: int) -> Callable[..., None]:
    def run(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor, rows: Tensor, sums: Tensor, has_dlse: int) -> None:
        Q, empty = out.shape[2], lse == -torch.inf
        delta = (out.float() * dout.float()).sum(-1) - (dlse if has_dlse else 0.0)
        rows[0], rows[1] = torch.inf, 0.0
        rows[0, :, :, :Q] = torch.where(empty, torch.inf, lse * 1.4426950408889634)
        rows[1, :, :, :Q] = torch.where(empty, 0.0, delta)
        if zeroed:
            assert sums.shape == (*lse.shape[:2], rows.shape[-1] // 64, 64 * zeroed)
            sums.zero_()

    return run


def postprocess(dtype: str, D: int) -> Callable[..., None]:
    def run(sums: Tensor, dq: Tensor, factor: float) -> None:
        plain = sums.view(*sums.shape[:2], -1, D)
        dq.copy_(plain[:, :, : dq.shape[2], : dq.shape[3]] * factor)

    return run


def sum_parts(dtype: str, size: int, block: int) -> Callable[..., None]:
    def run(result: Tensor, parts: Tensor, merges: Any, factor: float) -> None:
        assert parts.shape[1:] == (block, size)
        for b, h, tile, first, count, *_ in torch.from_dlpack(merges).tolist():
            some = result[b, h, tile * block : (tile + 1) * block]
            total = parts[first : first + count].sum(0) * factor
            some.copy_(total[: len(some), : some.shape[1]])

    return run


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, on_a_cpu: None) -> Any:
    from gossamer.kernels.hopper import compiled
    from gossamer.kernels.hopper.launch import backward as module

    kernels = {
        "preprocess": preprocess,
        "postprocess": postprocess,
        "sum_parts": sum_parts,
        "backward": lambda config: columns(config, config.block_kv),
        "wide": lambda config: columns(config, config.tile_kv),
        "query_gradient": by_rows,
        "kept": kept,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(compiled, name, kernel)
    return module


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
    terms = Terms(D**-0.5, K - Q, 2.0 if name == "causal" else None, lengths, sinks)
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "global", "by both", "by both, tiles of 64"])
def test_repeated_calls(launch: Any, name: str, deterministic: bool) -> None:
    """A launch serves other arrays that lie alike, also where columns are cut, and into views of other tensors."""
    from gossamer.torch.bind import bind

    layout = LAYOUTS[name]().to("cpu")
    B, H, Q, K, D = (1, 2, 1200, 1200, 64) if name == "global" else (2, 4, layout.Q, layout.K, 64)
    problem = Problem(B, H, H, Q, K, D, D, "bfloat16", "cpu", processors=40, deterministic=deterministic)
    terms = Terms(D**-0.5, K - Q, None, None, torch.randn(H))
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
