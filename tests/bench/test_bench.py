"""The benchmarks: their check finds wrong numbers, their rows say what was measured."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gossamer as gs
from gossamer.bench import flex as bench_flex
from gossamer.bench import measure as bench_measure
from gossamer.bench import processes as bench_processes
from gossamer.bench import run as bench_run
from gossamer.bench.check import Oracle, compare, draw_samples, row_error
from gossamer.bench.flex import block_mask
from gossamer.bench.measure import ROUNDS, Timing, peak_bytes, reset_peak, time_call, time_in_turns
from gossamer.bench.peer import Peer, Prepared, Refusal
from gossamer.bench.peers import PEERS, block_matrix
from gossamer.bench.processes import run_cases
from gossamer.bench.results import append_records, read_records
from gossamer.bench.rows import Row, append_rows, fill_ratios, refusals, table
from gossamer.bench.workload import Workload, find, make_inputs, workloads
from gossamer.cli import app
from gossamer.kernels.contract import Terms
from gossamer.testing import tolerance
from gossamer.testing.inputs import Inputs

CPU = torch.device("cpu")
runner = CliRunner()


def exact_everything(inputs: Inputs) -> dict[str, Tensor]:
    """Dense float64 attention and its gradients by autograd: the check has formulas of its own for those."""
    kept = torch.from_numpy(inputs.pattern.materialize(inputs.q.shape[2], inputs.k.shape[2], inputs.terms.q_offset))
    assert inputs.dout is not None
    out, _, dq, dk, dv, *_ = tolerance.exact_results(*inputs.qkv, kept, inputs.terms, inputs.dout)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def problem(
    pattern: gs.Pattern, Q: int = 90, K: int = 120, softcap: float | None = None, dtype=torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, Q, 16), (2, 2, K, 16), (2, 2, K, 24), (2, 4, Q, 24))
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return Inputs(pattern, q, k, v, Terms(scale=0.25, q_offset=K - Q, softcap=softcap), dout)


PATTERNS: list[tuple[gs.Pattern, float | None]] = [
    (gs.SlidingWindow(20), None),
    (gs.SlidingWindow(20), 2.0),
    (gs.PerHead([gs.SlidingWindow(9), gs.Dilated(5, 0, 4), gs.Causal(), gs.Dense()]), None),
    (gs.Local(16) & ~gs.SlidingWindow(100), None),  # rows that keep nothing
]


@pytest.mark.parametrize(
    "inputs",
    [*(problem(pattern, softcap=cap) for pattern, cap in PATTERNS), make_inputs(find("all_terms", "cpu"), CPU)],
    ids=lambda inputs: str(inputs.pattern),
)
def test_the_samples_are_exact(inputs: Inputs) -> None:
    exact = exact_everything(inputs)
    samples = draw_samples(inputs, heads=8, rows=40)
    B, H, group = *inputs.q.shape[:2], inputs.q.shape[1] // inputs.k.shape[1]
    assert {sample.index for sample in samples} == {(b, h) for b in range(B) for h in range(H)}
    for sample in samples:
        b, h = sample.index
        for name, own in sample.exact.items():
            at = (b, h // group, sample.keys) if name in ("dk", "dv") else (b, h, sample.rows)
            torch.testing.assert_close(own, exact[name][at], rtol=1e-10, atol=1e-12)
    worst, wrong = compare(samples, exact, group=group)
    assert (worst < 1e-3, wrong) == (True, [])


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_mistake_is_found(name: str, dtype: torch.dtype) -> None:
    inputs = problem(gs.SlidingWindow(20), dtype=dtype)
    right = {key: x.to(dtype) for key, x in exact_everything(inputs).items()}
    samples = draw_samples(inputs, rows=40)
    assert compare(samples, right, group=2)[1] == []
    b, h = samples[0].index
    at = int(samples[0].keys[-1]) if name in ("dk", "dv") else int(samples[0].rows[-1])  # type: ignore[index]
    h = h // 2 if name in ("dk", "dv") else h
    factor = 1.05 if dtype == torch.float32 else 1.3
    for spoil in (lambda x: x * factor, lambda x: x * float("nan")):
        wrong = {key: x.clone() for key, x in right.items()}
        wrong[name][b, h, at] = spoil(wrong[name][b, h, at])
        worst, expected_text = compare(samples, wrong, group=2)
        assert worst > 1
        assert [line.split()[0] for line in expected_text] == [name]


def shifted_window(q: Tensor, k: Tensor, v: Tensor, *_: object, **options: object) -> Tensor:
    """Attention whose window is one key too long: the classic mistake."""
    return gs.attention(q, k, v, gs.SlidingWindow(51))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_implementation_has_no_speed(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "attend", lambda inputs, q, k, v, implementation: shifted_window(q, k, v))
    monkeypatch.setattr(bench_run, "_own_process", lambda *a: None)
    session = bench_run.Session(CPU, {}, budget_s=0.01)
    rows = [row for row in bench_run.run_case(session, find("window", "cpu")) if row.direction == direction]
    assert len(rows) == 1
    assert rows[0].status == "failed"
    assert "limit" in rows[0].reason
    assert rows[0].check is not None
    assert rows[0].check > 1
    assert (rows[0].p50_ms, rows[0].useful_tflops, rows[0].share_of_matmul) == (None, None, None)


def test_a_case_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "window", "--peers", "--device", "cpu", "--budget", "0.02", "--out", str(out)]
    done = runner.invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = read_records(out)
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    ours = [row for row in rows if not row["peer"]]
    assert [row["implementation"] for row in ours] == ["gossamer blocked"] * 2
    for row in ours:
        assert row["status"] == "ok", row["reason"]
        assert 0 < row["check"] <= 1
        assert row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        flop = (
            2 * (row["shape"]["D"] + row["shape"]["E"]) * row["pairs"] * (2.5 if row["direction"] == "backward" else 1)
        )
        assert row["useful_tflops"] == pytest.approx(flop / row["p50_ms"] / 1e9)
        assert row["share_of_matmul"] == pytest.approx(row["useful_tflops"] / row["matmul_tflops"])
        assert row["peak_rss_bytes"] > 2**26
        assert set(row["ratios"]) == {"SDPA dense (dense)", "SDPA mask", "materialised"}
        assert row["turns"] == 4
        assert row["pairs"] == 4 * int(gs.SlidingWindow(50).materialize(200, 200).sum())
        assert row["commit"] and row["versions"]["torch"] == torch.__version__
    refused = [row for row in rows if row["status"] == "refused"]
    known = {"SDPA dense", "SDPA mask", "materialised"}
    assert {row["implementation"] for row in refused} == {p.name for p in PEERS} - known
    why = (
        "needs a GPU",
        "cannot be imported",
        "takes dilated windows alone",
        "takes graphs",
        "takes one length of keys",
    )
    assert all(any(reason in row["reason"] for reason in why) for row in refused)
    assert all(row["p50_ms"] is None for row in refused)
    assert "FA4 left out: needs a GPU (window)" in done.output
    # Rows are added, never overwritten; an implementation that is timed alone takes no turns.
    before = len(rows)
    alone = ["bench", "window", "--device", "cpu", "--budget", "0.02", "--out", str(out)]
    assert runner.invoke(app, alone).exit_code == 0
    rows = read_records(out)
    assert [row["turns"] for row in rows[before:]] == [1, 1]


def test_cases_prepare_in_processes_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    output: list[str] = []
    session = bench_run.Session(CPU, {"torch": "x"}, budget_s=0.01, progress=output.append)
    work = find("window", "cpu")
    unknown = dataclasses.replace(work, case=dataclasses.replace(work.case, name="nowhere"))
    done = run_cases(session, [work, unknown, work], ["SDPA dense"], 3, limit_s=300)
    (first, rows), (second, reason) = next(done), next(done)
    assert (first.name, second.name) == ("window", "nowhere")
    (waiting,) = multiprocessing.active_children()
    waiting.kill()
    waiting.join()
    assert list(done) == [(work, "its process ended with -9")]
    assert isinstance(rows, list)
    assert [(row.implementation, row.direction, row.turns) for row in rows] == [
        (name, way, 2) for way in ("forward", "backward") for name in ("gossamer blocked", "SDPA dense (dense)")
    ]
    assert {row.versions["torch"] for row in rows} == {"x"}
    assert "window: exact numbers" in output
    assert reason == "its process ended with 1"
    assert "case 'nowhere' is not one of" in capfd.readouterr().err
    assert list(run_cases(session, [work], [], 1, limit_s=0.01)) == [(work, "not done after 0 s")]


def ends(names: list[str]) -> None:
    os._exit(3)


def test_a_sweep_goes_on_when_a_process_that_compiles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[str] = []
    session = bench_run.Session(CPU, {}, progress=output.append)
    monkeypatch.setattr(bench_processes, "_call_each", ends)
    bench_processes.warm(session, [find("window", "cpu")], 1)
    assert output == ["a process that compiles in advance ended: cases compile one by one"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.filterwarnings("ignore")  # of the peers: refused backends, deprecations inside torch's compiler
def test_a_case_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = runner.invoke(app, ["bench", "window", "--peers", "--budget", "0.02", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = read_records(out)
    for row in rows:
        if row["peer"]:
            continue
        assert row["status"] == "ok", row["reason"]
        assert row["implementation"] == "gossamer small"
        assert 0 < row["check"] <= 1
        assert row["peak_bytes"] >= 0
        assert row["peak_rss_bytes"] is None
        assert "SDPA mask" in row["ratios"]
    flex = [row for row in rows if row["implementation"] == "FlexAttention Triton"]
    assert {row["status"] for row in flex} == {"ok"}, flex[0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        ([], "name a case or a --tag; cases for cpu: dense,"),
        (["no_such_case"], "no case or tag 'no_such_case' for cpu"),
        (["--tag", "no_such_tag"], "foundation"),
        (["window", "--implementation", "magic"], "--implementation must be one of"),
        (["window", "--device", "tpu"], "--device must be cpu or cuda"),
    ],
)
def test_bench_refuses_in_one_line(arguments: list[str], expected_text: str) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    done = runner.invoke(app, ["bench", *arguments, *device])
    assert done.exit_code == 2
    assert expected_text in done.output


def test_the_listed_cases_are_those_of_the_device() -> None:
    done = runner.invoke(app, ["bench", "--list", "--device", "cpu", "--tag", "foundation"])
    assert done.exit_code == 0
    names = [work.name for work in workloads("cpu") if "foundation" in work.tags]
    assert [line.split(":")[0] for line in done.output.splitlines()] == names
    assert names


def test_ratios_compare_the_same_case_and_direction() -> None:
    rows = [Row(case, name, way, name != "gossamer x") for case in "ab" for way in ("forward", "backward")
            for name in ("gossamer x", "peer")]  # fmt: skip
    for at, row in enumerate(rows):
        row.p50_ms = float(at + 1)
    rows[-1].fail("refused", "for a [reason]")
    fill_ratios(rows)
    assert [row.ratios for row in rows if not row.peer] == [{"peer": 2.0}, {"peer": 4 / 3}, {"peer": 6 / 5}, {}]
    assert refusals(rows) == ["peer left out: for a [reason] (b)"]


def test_types_stay_apart(tmp_path: Path) -> None:
    from rich.console import Console

    rows = []
    for dtype, peer_ms in (("float32", 3.0), ("bfloat16", 7.0)):
        found = [Row("case", name, "forward", name == "peer", dtype=dtype) for name in ("gossamer x", "peer")]
        for row, ms in zip(found, (1.0, peer_ms), strict=True):
            row.p20_ms = row.p50_ms = row.p80_ms = ms
            row.useful_tflops = row.share_of_matmul = 0.5
        fill_ratios(found)
        rows += found
    with (tmp_path / "shown").open("w") as file:
        console = Console(record=True, width=160, file=file)
        console.print(table(rows))
    shown = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]
    assert [cells[-2] for cells in shown if "peer" in cells] == ["3x as fast", "7x as fast"]
    assert [cells[1] for cells in shown if cells[1:2] and "forward" in cells[1]] == [
        "float32, forward",
        "bfloat16, forward",
    ]


@pytest.mark.parametrize(
    ("peer_ms", "expected_text"),
    [
        (2.314, "2.31x as fast"),
        (1.0, "1x as fast"),
        (0.43, "0.43x as fast (slower)"),
        (0.9999, "1x as fast"),
        (1234.0, "1234x as fast"),
    ],
)
def test_the_table_says_who_is_faster(peer_ms: float, expected_text: str) -> None:
    from rich.console import Console

    rows = [Row("case", name, "forward", name == "rival", dtype="float32") for name in ("gossamer x", "rival")]
    for row, ms in zip(rows, (1.0, peer_ms), strict=True):
        row.p20_ms = row.p50_ms = row.p80_ms = ms
        row.useful_tflops = row.share_of_matmul = 0.5
    fill_ratios(rows)
    with open(os.devnull, "w") as file:
        console = Console(record=True, width=160, file=file)
        console.print(table(rows))
    shown = [[cell.strip() for cell in re.split("[│┃]", line)] for line in console.export_text().splitlines()]
    (rival,), (header,) = ([line for line in shown if word in line] for word in ("rival", "gossamer is"))
    assert rival[header.index("gossamer is")] == expected_text
    (ours,) = (line for line in shown if "gossamer x" in line)
    assert ours[header.index("gossamer is")] == ""


@pytest.mark.parametrize("option", ["--out", "--chart"])
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "run_case", lambda *a: pytest.fail("a case is measured"))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder.png").mkdir()
    for path, why in (
        (tmp_path / "folder.png", "Is a directory"),
        (tmp_path / "file" / "a.png", "Not a directory"),
        (Path("/proc/nowhere/a.png"), "No such file or directory"),
    ):
        other = [] if option == "--out" else ["--out", str(tmp_path / "rows.jsonl")]
        done = runner.invoke(app, ["bench", "window", "--device", "cpu", option, str(path), *other])
        assert done.exit_code == 2
        assert done.stderr == f"gossamer: {option} {str(path)!r} cannot be written: {why}\n"
        assert done.stdout == ""
    refused = runner.invoke(app, ["bench", "window", "--device", "cpu", "--chart", "a.svg"])
    assert refused.exit_code == 2
    assert refused.stderr == "gossamer: --chart must name a .png file, got 'a.svg'\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_the_default_file_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "run_case", lambda *a: pytest.fail("a case is measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").write_text("")
    done = runner.invoke(app, ["bench", "window", "--device", "cpu"])
    assert done.exit_code == 2
    output = "gossamer: --out (by default) 'benchmarks/results/cpu.jsonl.gz' cannot be written: Not a directory\n"
    assert done.stderr == output


def test_rows_are_not_added_to_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "run_case", lambda *a: pytest.fail("a case is measured"))
    out = tmp_path / "notes"
    for text in ('{"case": "a"}\n[1]\n', '{"case": "a"}\n{"ca\n'):
        out.write_text(text)
        done = runner.invoke(app, ["bench", "window", "--device", "cpu", "--out", str(out)])
        assert done.exit_code == 2
        why = f"line 2 of {out} is no JSON object"
        assert done.stderr == f"gossamer: --out {str(out)!r} does not hold rows to add to: {why}\n"
        assert out.read_text() == text


def test_what_was_measured_is_shown_where_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def run_case(session: object, work: Workload, peers: object) -> list[Row]:
        measured.append(work.name)
        return [Row(work.name, "gossamer x", "forward", False, reason="none of it")]

    monkeypatch.setattr(bench_run, "run_case", run_case)
    chart = tmp_path / "a.png"
    done = runner.invoke(
        app, ["bench", "window", "causal", "--device", "cpu", "--out", "/dev/full", "--chart", str(chart)]
    )
    assert done.exit_code == 1
    assert len(measured) == 1  # the next one would be lost as well
    assert "none of it" in done.stdout and "added 0 rows to /dev/full" in done.stdout
    lost, bare = done.stderr.splitlines()
    assert lost == (
        f"gossamer bench: the rows of {measured[0]} could not be added to /dev/full: No space left on device"
    )
    assert bare == f"gossamer bench: no row has a time: {chart} is not drawn" and not chart.exists()


def test_rows_are_read_as_they_were_added(tmp_path: Path) -> None:
    """What rows share is written once, whatever lacks a field, has it in another type, or comes from another run."""
    path = tmp_path / "deep" / "rows.jsonl"
    first = {"run": "a", "commit": "x", "case": "window", "shape": {"B": 1}, "ms": 1.0}
    added = [
        [first, first | {"ms": 1}, first | {"ms": True}],
        [first, {name: value for name, value in first.items() if name != "shape"}],
        [first | {"commit": "y", "none": None}, first | {"commit": "y", "none": 0.0}],
        [first],
    ]
    for rows in added:
        append_records(rows, path, ("run", "commit"))
    told = [row for rows in added for row in rows]
    assert [json.dumps(row, sort_keys=True) for row in read_records(path)] == [
        json.dumps(row, sort_keys=True) for row in told
    ]
    assert len(path.read_text().splitlines()) == 3 + len(added)
    assert path.read_text().count("window") == len(added)
    path.write_text("".join(json.dumps(row) + "\n" for row in told))  # a row a line is as good
    assert read_records(path) == told


def test_a_failed_row_is_shown_with_its_reason(tmp_path: Path) -> None:
    from rich.console import Console

    row = Row("case", "gossamer x", "forward", False)
    row.fail("failed", "out of head 0: error [1e-1]")
    console = Console(record=True, width=160, file=(tmp_path / "shown").open("w"))
    console.print(table([row]))
    assert "failed: out of head 0: error [1e-1]" in console.export_text()
    append_rows([row], tmp_path / "deep" / "rows.jsonl")
    assert [told["status"] for told in read_records(tmp_path / "deep" / "rows.jsonl")] == ["failed"]
    console.file.close()


def test_flex_attention_is_given_the_same_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the way out is held by test_flex.py."""
    for pattern, block, by_hand in (
        (gs.BigBird(64), 64, True),
        (gs.SlidingWindow(100) | gs.PowerStrided(2, 4), 128, False),
    ):
        inputs = Inputs(pattern, *(torch.zeros(1, 1, 600, 8) for _ in range(3)), Terms(scale=1.0, q_offset=0))
        mask, looked_up = block_mask(inputs)
        assert looked_up is not by_hand
        assert set(mask.BLOCK_SIZE) == {block}
        assert np.array_equal(gs.from_flex(mask).expand(), pattern.materialize(600, 600))
    # One key a row; and 300 rows of the first 300 keys: full tiles, whole words, rows without a key.
    scattered = np.random.default_rng(0).integers(0, 600, 600)
    graph = gs.CSR(np.arange(601), scattered, 600)
    block = gs.CSR(np.minimum(np.arange(601), 300) * 300, np.tile(np.arange(300), 300), 600)
    for kept in (graph, block):
        inputs = Inputs(kept, *(torch.zeros(1, 1, 600, 1) for _ in range(3)), Terms(scale=1.0, q_offset=0))
        mask, looked_up = block_mask(inputs)
        assert looked_up
        assert np.array_equal(gs.from_flex(mask).expand(), kept.materialize(600, 600))
    assert int(mask.full_kv_num_blocks.sum()) == 4
    monkeypatch.setattr(bench_flex, "BITS_BYTES", 2**15)
    with pytest.raises(ValueError, match=r"this graph would read 0\.0 GiB of bits"):
        block_mask(inputs)


def test_peers_refuse_what_they_do_not_take() -> None:
    inputs = make_inputs(find("all_terms", "cpu"), CPU)
    for peer in PEERS:
        with pytest.raises(Refusal):
            peer.prepare(inputs, 1.0)
    huge = Inputs(gs.Causal(), *(torch.zeros(1, 1, 2**17, 1) for _ in range(3)), Terms(scale=1.0, q_offset=0))
    with pytest.raises(Refusal, match="would take 16 GiB"):
        PEERS[1].prepare(huge, 1.0)
    with pytest.raises(Refusal, match="s a call"):
        PEERS[0].prepare(huge, 1e-3)


def test_a_block_matrix_is_read_from_keep() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.random((10, 10)) < 0.4
    inputs = Inputs(gs.BlockMask(matrix, 64), *(torch.zeros(1, 1, 640, 8) for _ in range(3)), Terms(1.0, 0))
    assert np.array_equal(block_matrix(inputs, 64), matrix)


def test_kept_pairs_are_those_of_the_pattern() -> None:
    pattern = gs.PerHead([gs.SlidingWindow(5), gs.Dilated(3, 0, 2)])
    q, k = torch.zeros(1, 2, 30, 4), torch.zeros(1, 2, 40, 4)
    rows = np.array([3, 0, 29])
    kept = Oracle(Inputs(pattern, q, k, k, Terms(1.0, 10))).kept(0, 1, rows, np.arange(40))
    assert np.array_equal(kept.numpy(), pattern.materialize(30, 40)[0, 1][rows])


def test_an_error_is_relative_to_the_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    assert row_error(exact, exact) == 0
    assert row_error(exact + torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]), exact) == pytest.approx(0.1)
    assert row_error(exact + torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.0]]), exact) == pytest.approx(0.1)
    assert row_error(exact * float("nan"), exact) == float("inf")


def test_calls_take_turns() -> None:
    order: list[str] = []

    def calls(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def breaks() -> None:
        order.append("c")
        if order.count("c") > 4:
            raise RuntimeError("out of luck")

    output = time_in_turns({"a": calls("a"), "b": calls("b"), "c": breaks}, CPU, budget_s=1.0, most=11)
    # Two calls to begin with, and one in each round before those that count.
    assert order.count("a") == order.count("b") == 2 + ROUNDS + 11
    assert [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name] == [*"abcabcbabab"]
    for name in "ab":
        timing = output[name]
        assert isinstance(timing, Timing)
        assert timing.repeats == 11
    assert str(output["c"]) == "out of luck"


def test_slow_calls_are_made_as_often_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_measure, "SLOW_MS", 5.0)
    monkeypatch.setattr(bench_measure, "COLD_MS", 5.0)
    count = 0

    def slow() -> None:
        nonlocal count
        count += 1
        time.sleep(0.01)

    for budget, calls in ((0.001, 1), (0.045, 4)):
        count = 0
        output = time_in_turns({"slow": slow}, CPU, budget_s=budget)["slow"]
        assert isinstance(output, Timing)
        assert output.repeats == count <= calls
        assert output.p50 >= 10


def test_dilation_is_measured_against_the_plain_window() -> None:
    peer = next(peer for peer in PEERS if peer.name == "plain window")
    inputs = problem(gs.Dilated(9, 2, 4))
    prepared = peer.prepare(inputs, 1.0)
    assert prepared.computes == gs.SlidingWindow(9, 2)
    plain = inputs._replace(pattern=prepared.computes)
    assert compare(draw_samples(plain), {"out": prepared.attend(inputs.q, inputs.k, inputs.v)}, group=2)[1] == []
    with pytest.raises(Refusal, match="takes dilated windows alone"):
        peer.prepare(plain, 1.0)


def test_what_breaks_off_took_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Timing(1.0, 1.0, 1.0, 5)
    monkeypatch.setattr(bench_run, "time_in_turns", lambda calls, *a, **b: {"gossamer": times, "x": OSError("gone")})
    monkeypatch.setattr(bench_run, "_own_process", lambda *a: None)
    other = Peer("x", lambda inputs, rate: Prepared(lambda q, k, v: gs.attention(q, k, v, inputs.pattern)))
    session = bench_run.Session(CPU, {}, rates={torch.float32: 1.0})
    rows = bench_run.run_case(session, find("window", "cpu"), [other])
    assert [(row.status, row.turns, row.reason) for row in rows] == [
        ("ok", 1, ""),
        ("refused", None, "OSError: gone"),
    ] * 2


def test_what_does_not_fit_into_memory_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    entries = []
    for name, takes in (("small", 10), ("huge", 95), ("middling", 80)):
        entry = bench_run.Entry(Peer(name, lambda inputs, rate: pytest.fail("not called")), rows={}, samples=[])
        entry.takes["forward"] = takes
        entries.append(entry)
    groups = bench_run._fitting(entries, "forward", torch.device("cuda"))
    assert [[entry.peer.name for entry in group] for group in groups] == [["small", "middling"], ["huge"]]
    assert bench_run._fitting([], "forward", torch.device("cuda")) == []


def test_times_and_peaks_are_of_the_call() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    timing = time_call(call, CPU, budget_s=0.01, most=20)
    assert timing.repeats == 20
    assert calls == 22
    assert 0 <= timing.p20 <= timing.p50 <= timing.p80
    base = reset_peak(CPU)
    allocate: Callable[[], Tensor] = lambda: torch.ones(2**24)  # noqa: E731
    allocate()
    assert 0.9 * 2**26 < peak_bytes(CPU) - base < 1.5 * 2**26
