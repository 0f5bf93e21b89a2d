"""`gossamer bench --tag particles`: sums that are right are timed, wrong ones are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gossamer.bench import particles
from gossamer.bench.results import read_records
from gossamer.bench.run import Session
from gossamer.cli import app

runner = CliRunner()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(particles, "SIZES", {"cpu": (700,)})
    monkeypatch.setattr(particles, "NEIGHBORS", 60)


def test_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["bench", "--tag", "particles", "--device", "cpu", "--budget", "0.01", "--out", str(out)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = read_records(out)
    assert [(row["kind"], row["case"]) for row in rows] == [
        (kind, case) for kind in particles.KINDS for case in ("order and boxes", *particles.LIMITS)
    ]
    assert all(row["status"] == "ok" and row["p50_ms"] > 0 for row in rows)
    assert all(row["error"] <= particles.LIMITS.get(row["case"], 0) for row in rows if row["error"] is not None)
    assert "700 clustered" in done.output and json.dumps(rows)


def test_a_wrong_sum_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer import particles as gp

    right = gp.radial_sum
    monkeypatch.setattr(gp, "radial_sum", lambda *given: right(*given) * 1.001)
    rows = particles.rows_of(Session(torch.device("cpu"), {}, budget_s=0.01), 700, "uniform")
    failed = {row.case for row in rows if row.status == "failed"}
    assert failed == {"density", "density gradient"}
    assert all((row.p50_ms is None) == (row.status == "failed") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--dtype", "float32"], "no --dtype"), (["window"], "no a case"), (["--tag", "graph"], "no another --tag")],
)
def test_what_says_nothing_here_is_refused(arguments: list[str], said: Any) -> None:
    done = runner.invoke(app, ["bench", "--tag", "particles", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert said.removeprefix("no ") in done.output


def test_the_list() -> None:
    done = runner.invoke(app, ["bench", "--tag", "particles", "--device", "cpu", "--list"])
    assert done.exit_code == 0
    assert "700 uniform: order and boxes, density, gravity" in done.output
