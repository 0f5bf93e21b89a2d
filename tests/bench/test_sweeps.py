"""Sweeps: their cases, their tables and charts from rows, and the peers that are written in plain operations."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gossamer as gs
from gossamer.bench import plain_peers, summary
from gossamer.bench.check import compare, draw_samples
from gossamer.bench.peer import Refusal, backward_call
from gossamer.bench.rows import Row, append_rows
from gossamer.bench.workload import find
from gossamer.cli import app
from gossamer.kernels.contract import Terms
from gossamer.testing.inputs import Inputs
from gossamer.testing.sweeps import BREAKEVEN, LADDER, MOST_EDGES


def test_names_are_unique_and_say_what_is_kept() -> None:
    names = [case.name for case in BREAKEVEN + LADDER]
    assert len(set(names)) == len(names)
    for case in BREAKEVEN:
        if not 200 <= case.Q <= 1024:
            continue
        _, _, N, nominal = case.name.split("_")
        pattern, wanted = case.pattern(), float(nominal)
        assert int(N) == case.Q
        found = pattern.density(case.Q, case.K)
        # Whole keys and blocks round; drawn edges meet.
        assert abs(found - wanted) <= max(0.35 * wanted, 5 / case.Q), case.name
        assert pattern.materialize(case.Q, case.K).any()
    assert {case.Q for case in BREAKEVEN} >= {26, 200, 512, 131072}
    assert all(float(c.name.split("_")[3]) * c.Q**2 <= MOST_EDGES for c in BREAKEVEN if "_csr_" in c.name)


def test_the_ladder_has_single_and_split_heads() -> None:
    shapes = {(case.Q, case.H, case.D) for case in LADDER}
    assert (4096, 1, 4096) in shapes and (4096, 32, 128) in shapes and (1024, 1, 128) in shapes
    case = next(c for c in LADDER if c.name == "ladder_causal_1024_512x4")
    kept = case.pattern().materialize(1024, 1024)
    block = np.arange(1024) // 128
    assert np.array_equal(kept, block[:, None] >= block[None, :])


def graph_inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    rng = np.random.default_rng(0)
    mask = rng.random((60, 70)) < 0.1
    mask[:, 3] = True
    indptr = np.concatenate(([0], np.cumsum(mask.sum(1))))
    pattern = gs.CSR(indptr, np.nonzero(mask)[1], 70)
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 4, 60, 16), (1, 2, 70, 16), (1, 2, 70, 24), (1, 4, 60, 24))
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return Inputs(pattern, q, k, v, Terms(scale=0.25, q_offset=10), dout)


def scatter_softmax(x: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    """What torch_geometric.utils.softmax computes, a row at a time."""
    return torch.cat([torch.softmax(x[index == n], 0) for n in range(num_nodes)])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("peer", plain_peers.PLAIN_PEERS, ids=lambda peer: peer.name)
def test_plain_peers_are_right(peer, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_geometric.utils")
    module.softmax = scatter_softmax  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_geometric", ModuleType("torch_geometric"))
    monkeypatch.setitem(sys.modules, "torch_geometric.utils", module)
    inputs = graph_inputs()
    if peer.name == "SDPA slice":
        terms = inputs.terms._replace(key_lengths=torch.tensor([13], dtype=torch.int32))
        inputs = inputs._replace(pattern=gs.Dense(), terms=terms)
    prepared = peer.prepare(inputs, 1.0)
    samples = draw_samples(inputs, heads=4, rows=20)
    out = prepared.attend(inputs.q, inputs.k, inputs.v)
    assert compare(samples, {"out": out}, group=2)[1] == []
    if peer.name == "torch.sparse":
        with pytest.raises(Refusal, match="no backward as written"):
            backward_call(prepared, inputs)
        return
    gradients = dict(zip(("dq", "dk", "dv"), backward_call(prepared, inputs)(), strict=True))
    assert compare(samples, gradients, group=2)[1] == []


def test_plain_peers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = graph_inputs()
    peers = {peer.name: peer for peer in plain_peers.PLAIN_PEERS}
    monkeypatch.setitem(sys.modules, "torch_geometric.utils", None)
    with pytest.raises(Refusal, match=r"torch_geometric.* cannot be imported"):
        peers["PyG scatter softmax"].prepare(inputs, 1.0)
    lengths = inputs.terms._replace(key_lengths=torch.tensor([3, 4]))
    for refused, why in (
        (inputs, "the window of one query"),
        (inputs._replace(pattern=gs.Dense(), terms=lengths), "one length for all"),
    ):
        with pytest.raises(Refusal, match=why):
            peers["SDPA slice"].prepare(refused, 1.0)
    window = Inputs(gs.SlidingWindow(4), inputs.q, inputs.k, inputs.v, inputs.terms)
    with pytest.raises(Refusal, match="takes graphs"):
        plain_peers.TORCH_SPARSE.prepare(window, 1.0)
    nothing = Inputs(~gs.Dense(), inputs.q, inputs.k, inputs.v, inputs.terms)
    with pytest.raises(Refusal, match="keeps nothing becomes NaN"):
        plain_peers.NAIVE.prepare(nothing, 1.0)


def made(case: str, name: str, device_ms: float, call_ms: float = 0.02, **shape: int) -> dict:
    row = Row(case, name, "forward", not name.startswith("gossamer"), p50_ms=device_ms, device_ms=device_ms)
    row.call_ms, row.relative_error, row.useful_tflops = call_ms, 2e-3, 1.0
    row.shape = {"Q": 1, "H": 1, "D": 1} | shape
    return asdict(row)


def breakeven_rows() -> list[dict]:
    rows = []
    for N, sparse, dense in ((26, 3, 2), (200, 4, 5), (512, 6, 10), (1024, 8, 40)):
        rows.append(made(f"breakeven_window_{N}_0.1", "gossamer triton", sparse / 1000))
        rows.append(made(f"breakeven_window_{N}_0.5", "SDPA causal (flash)", dense / 1000, 0.015))
        rows.append(made(f"breakeven_window_{N}_0.5", "materialised", 2 * dense / 1000))
    rows.append(made("breakeven_csr_1024_0.01", "gossamer gather", 0.01))
    rows.append(made("breakeven_csr_1024_0.01", "torch.sparse (float32)", 0.3))
    return rows


def test_where_sparse_overtakes() -> None:
    assert summary.overtakes({1: 3, 2: 2, 4: 1}, {1: 2, 2: 2, 4: 2, 8: 2}) == "from 2"
    assert summary.overtakes({1: 1, 2: 3}, {1: 2, 2: 2}) == "not up to 2"
    assert summary.overtakes({1: 1}, {1: 2}) == "always (from 1)"
    assert summary.overtakes({1: 1}, {2: 2}) == "-"
    table = summary.breakeven_table(breakeven_rows())
    assert "| window | 10 % | from 200 | always (from 26) | - | 5 x SDPA causal at 1,024 |" in table
    assert "| csr | 1 % | - | always (from 1,024) | always (from 1,024) | - |" in table
    # A peer of a size may have rows of several cases, of several runs.
    new = [row | {"time": "2"} for row in breakeven_rows()]
    old = made("breakeven_window_26_0.1", "SDPA causal (flash)", 9.0) | {"time": "1"}
    for rows in ([old, *new], [*new, old]):
        assert summary.breakeven_table(rows) == table


def test_the_ladder_as_a_table() -> None:
    rows = [
        made("ladder_dense_1024_512x4", name, ms, Q=1024, H=4, D=128)
        for name, ms in (("materialised", 1.0), ("fused (float32)", 0.5), ("gossamer hopper", 0.1))
    ] + [made("ladder_local_1024_512x4", "gossamer triton", 0.05, Q=1024, H=4, D=128)]
    table = summary.ladder_table(rows)
    assert "| 1024 | 4 x 128 | 1 ms, 2e-03 | 0.5 ms, 2e-03, 2.0 x | 0.1 ms, 2e-03, 10.0 x |" in table
    assert "0.05 ms, 2e-03, 20.0 x | - |" in table


def test_the_last_row_counts_unless_a_peer_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [Row("a", name, "forward", name != "gossamer x", p50_ms=1.0) for name in ("gossamer x", "PyG (float32)")]
    later = [
        Row("a", "gossamer y", "forward", False, p50_ms=2.0),
        Row("a", "PyG", "forward", True),
        Row("b", "PyG", "forward", True),
    ]
    later[1].fail("refused", "out of memory")
    later[2].fail("refused", "out of memory")
    append_rows(rows + later, path)
    assert [(row["case"], row["implementation"], row["p50_ms"]) for row in summary.read(path)] == [
        ("a", "gossamer y", 2.0), ("a", "PyG (float32)", 1.0), ("b", "PyG", None),
    ]  # fmt: skip


def test_ratios_are_of_the_last_run_in_turns() -> None:
    def row(way: str, turns: int | None, **ratios: float) -> dict:
        names = {"fa4": "FA4", "flash": "FlexAttention FLASH", "triton": "FlexAttention Triton"}
        named_ratios = {names[name]: ratio for name, ratio in ratios.items()}
        return asdict(Row("a", "gossamer x", way, False, dtype="bfloat16", turns=turns, ratios=named_ratios))

    rows = [
        row("forward", 3, fa4=2.0, flash=3.0, triton=2.5),
        row("forward", 2, fa4=1.25),
        row("forward", None, fa4=9.0),
        row("backward", 2, fa4=0.5),
    ]
    header, _, line = summary.ratio_table(rows, ["a", "b"]).splitlines()
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert (cells["| case"], cells["FA4"], cells["FlexAttention"]) == ("| `a`", "1.25, 0.5", "2.5, -")
    assert {cells[name].strip(" |") for name in ("plain window", "cuDNN", "PyG |")} == {""}


def test_charts_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gossamer.bench.charts import chart

    ladder = [made("ladder_dense_1024_512x4", "gossamer hopper", 0.1, Q=1024, H=4, D=128)]
    bars = [made("window_4096", "gossamer hopper", 0.1), made("window_4096", "FA4", 0.2)]
    for name, rows in (("breakeven", breakeven_rows()), ("ladder", ladder), ("bars", bars)):
        chart(rows, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="nothing to draw"):
        chart([made("a", "b", 1.0) | {"p50_ms": None}], tmp_path / "none.png")


def test_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for name, ms in (("gossamer triton", 2.0), ("gossamer hopper", 1.0), ("FA4", 3.0)):
        row = Row("case", name, "forward", name == "FA4", p50_ms=ms)
        row.useful_tflops = 1.0
        append_rows([row], path)
    rows = summary.read(path)
    assert [(row["implementation"], row["p50_ms"]) for row in rows] == [("gossamer hopper", 1.0), ("FA4", 3.0)]
    table = summary.case_table(rows, ["case"])
    assert table.splitlines()[2:] == ["| `case` | forward | **gossamer hopper 1** (1 TFLOP/s), FA4 3 |"]


def test_bench_draws_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, chart = tmp_path / "rows.jsonl", tmp_path / "rows.png"
    arguments = ["bench", "dense", "--device", "cpu", "--budget", "0.01", "--out", str(out), "--chart", str(chart)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert chart.stat().st_size > 5000


def test_pairs_within_the_lengths_of_a_case() -> None:
    """A row's useful work is of the pairs that lengths leave."""
    for name in ("key_lengths", "key_lengths_cpu"):
        work = find(name, "cpu")
        c, kept = work.case, 0
        for length in c.key_lengths or ():
            of_all = work.pattern.materialize(c.Q, c.K, work.q_offset)
            kept += c.H * int(of_all[:, :length].sum())
        assert work.pairs == kept > 0
