"""The recall example, in twenty steps, and the batches that it draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.recall import ASKED, KINDS, MARK, PAIRS, QUESTION, Row, draw, main, table

SIZE = [
    "--lengths",
    "24",
    "150",
    "--width",
    "32",
    "--keys",
    "72",
    "--batch",
    "4",
    "--texts",
    "8",
    "--steps",
    "10",
    "10",
]


def test_twenty_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = main([*SIZE, "--rows", str(tmp_path / "rows.jsonl")])
    assert [row.kind for row in rows] == ["dense"] + ["sparsek"] * 4 + ["blocks"] + ["window"] * 4 + ["random"] * 4
    for row in rows:
        assert 0 < row.share <= 1 and 0 <= row.accuracy < 0.3  # nothing is learned in so few
    assert [row.keys for row in rows if row.kind == "window"] == [72, 18, 36, 108]
    told = capsys.readouterr().out
    assert "all      seed 0  length    24    10 steps  loss" in told
    assert "random   seed 0  length   150    10 steps  loss" in told and "| dense | 174 | 100.0% |" in told

    again = main([*SIZE, "--kinds", "window", "--seeds", "5", "--rows", str(tmp_path / "rows.jsonl")])
    assert again[: len(rows)] == rows and {row.seed for row in again[len(rows) :]} == {5}
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(again)


def test_pairs_are_planted_and_asked() -> None:
    text = torch.randint(65, 70, (5000,), dtype=torch.uint8)
    tokens, values, distances = draw(text, 8, 200, torch.Generator().manual_seed(0))
    assert tokens.shape == (8, 200 + 3 * ASKED) and values.shape == distances.shape == (8, ASKED)
    for row, answers, far in zip(tokens.tolist(), values.tolist(), distances.tolist(), strict=True):
        marks = [i for i, byte in enumerate(row) if byte == MARK]
        planted = {row[i + 1]: (row[i + 2], i + 2) for i in marks}
        assert len(marks) == len(planted) == PAIRS
        for n, (answer, distance) in enumerate(zip(answers, far, strict=True)):
            question, key, value = row[200 + 3 * n : 203 + 3 * n]
            assert question == QUESTION and planted[key][0] == value == answer
            assert planted[key][1] == 200 + 3 * n + 1 - distance


def test_the_table_is_of_medians() -> None:
    rows = [Row("random", s, 64, 1000, 0.064, x, [x] * 4, 1.0) for s, x in enumerate((0.1, 0.3, 0.11))]
    assert table(rows).splitlines()[-1] == "| random | 64 | 6.4% | 0.110 | 0.100, 0.300 | 3 | ## |"
    assert json.loads(json.dumps(rows[0]._asdict())) == rows[0]._asdict() and set(KINDS) >= {"random"}


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--lengths", "24", "100", "--steps", "10"])
    assert "--steps must be as many as --lengths" in capsys.readouterr().err
