"""The demo at its smallest size, end to end, and its parts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import gossamer as gs
from examples.language_model.__main__ import main
from examples.language_model.data import is_validation, load_text, source_files, training_batch, validation_windows
from examples.language_model.model import ModelConfig, Transformer, demo_pattern
from examples.language_model.report import write_report
from examples.language_model.runner import train_in_process
from examples.language_model.settings import settings
from examples.language_model.train import learning_rate

SMALLEST = ["--steps", "6", "--context", "64", "--width", "32", "--layers", "1", "--heads", "2", "--batch", "2"]


def test_the_smallest_demo_reports_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*SMALLEST, "--device", "cpu", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for word in ("validation bits per byte", "tokens per second", "peak memory", "float64 oracle", "report.png"):
        assert word in told
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["gossamer"] == gs.__version__
    for kind in ("dense", "sparse"):
        model = report["models"][kind]
        assert model["error"] is None
        assert model["settings"]["attention"] == kind
        assert [step["step"] for step in model["steps"]] == [1, 2, 3, 4, 5, 6]
        assert 1 < model["result"]["bits_per_byte"] < 9
        assert model["result"]["tokens_per_s"] > 0
        assert model["result"]["peak_bytes"] > 2**26
        assert [row["length"] for row in model["lengths"]] == [512, 1024]
        assert f"{model['result']['bits_per_byte']:.4f}" in told
    # Same seed: both start from the same weights and see the same first batch.
    first = [report["models"][kind]["steps"][0]["bits_per_byte"] for kind in ("dense", "sparse")]
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    check = report["models"]["sparse"]["check"]
    assert check["wrong"] == []
    assert 0 < check["error_over_limit"] <= 1
    assert check["rows"] > 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_smallest_demo_on_a_gpu(tmp_path: Path) -> None:
    small = ["--steps", "6", "--context", "1024", "--width", "64", "--layers", "1", "--heads", "2"]
    assert main([*small, "--device", "cuda", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["models"]["sparse"]["check"]["wrong"] == []
    assert [row["length"] for row in report["models"]["dense"]["lengths"]] == [8192, 16384]


def test_a_failing_process_gives_its_error_and_loses_nothing(tmp_path: Path) -> None:
    # A learning rate at the edge of what is accepted, and a process that is told to use a device it has not.
    good = settings("dense", "cpu", steps=2, context=32, width=16, layers=1, heads=2, batch=1)
    bad = settings("sparse", "meta", steps=2, context=32, width=16, layers=1, heads=2, batch=1)
    seen: list[int] = []
    runs = {
        "dense": train_in_process(good, lambda r: seen.append(len(r.steps))),
        "sparse": train_in_process(bad, lambda r: None),
    }
    assert runs["dense"].error is None
    assert max(seen) == 2
    assert runs["sparse"].error is not None
    assert runs["sparse"].error.startswith("exit code 1\n")
    assert "Error" in runs["sparse"].error
    json_path, png_path = write_report(runs, tmp_path)
    report = json.loads(json_path.read_text())
    assert len(report["models"]["dense"]["steps"]) == 2
    assert report["models"]["sparse"]["error"] == runs["sparse"].error
    assert png_path.exists()


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["--heads", "3"], "--heads must be even"),
        (["--width", "30"], "--width must be a multiple"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--steps", "1.5"], "argument --steps: invalid int value: '1.5'"),
        (["--lr", "0"], "--lr must lie between"),
        (["--seed", "9" * 30], "--seed must lie between"),
        (["--context", "1000000"], "--context is at most"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--out", "/dev/null/x"], "Not a directory: '/dev/null/x'"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], expected_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments])
    assert expected_text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_split_is_by_file_and_by_name_alone() -> None:
    text = load_text()
    assert text.train_files > 10 * text.validation_files > 0
    assert len(text.train) > 2_000_000
    names = [f"package/module_{n}.py" for n in range(2000)]
    share = sum(map(is_validation, names)) / len(names)
    assert 0.03 < share < 0.07
    assert b"def " in bytes(text.train[:100_000].tolist())


def test_other_peoples_packages_are_no_part_of_the_text(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "json/c.py", "site-packages/x.py", "test/y.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert [p.relative_to(tmp_path).as_posix() for p in source_files(tmp_path)] == ["a.py", "b.py", "json/c.py"]
    with pytest.raises(ValueError, match="no Python source files"):
        load_text(tmp_path / "site-packages")


def test_batches_are_bytes_and_the_bytes_after_them() -> None:
    text = load_text()
    tokens, targets = training_batch(text, 3, 40, torch.Generator().manual_seed(1))
    again, _ = training_batch(text, 3, 40, torch.Generator().manual_seed(1))
    assert tokens.shape == targets.shape == (3, 40)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, again)
    assert validation_windows(text, 100, 1000).shape == (10, 101)
    assert validation_windows(text, 100, 1).shape == (1, 101)


def test_the_sparse_model_sees_only_its_pattern() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig("sparse", layers=1, width=32, heads=4))
    reach = 31 * 8  # the farthest key of the dilated heads
    tokens = torch.randint(256, (1, 300))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 256
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert (difference[:64] > 0).all()
    assert difference[reach] > 0
    assert difference[reach + 1 :].max() == 0


def test_half_of_the_heads_take_each_pattern() -> None:
    pattern = demo_pattern(4)
    assert pattern == gs.PerHead([gs.SlidingWindow(63)] * 2 + [gs.Dilated(31, 0, 8)] * 2)
    kept = pattern.materialize(400, 400)[0]
    assert kept[0, -1].sum() == 64
    assert kept[3, -1].sum() == 32


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[9] == pytest.approx(1.0)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert all(0 < learning_rate(step, 1, 1.0) <= 1 and math.isfinite(step) for step in range(1))
