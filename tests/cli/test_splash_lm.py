"""The example with entmax heads, in twenty steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.splash_lm import entmax_heads, main, make, weights


def test_twenty_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--context", "64", "--width", "32", "--layers", "2", "--heads", "2", "--batch", "2"]
    reached = main(["--steps", "20", "--lr", "0.01", *size, "--picture", str(tmp_path / "weights.png")])
    assert list(reached) == ["softmax", "entmax"]
    for result in reached.values():
        assert 2 < result.bits_per_byte < 7.5  # 8 is chance
    supports = reached["entmax"].supports
    assert [len(line) for line in supports] == [2] * 5 and all(1 <= x <= 33 for line in supports for x in line)
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "entmax  step   20" in told and "layer 1: alpha of each head 1." in told


def test_models_begin_with_the_same_weights_and_learn_alpha() -> None:
    softmax, entmax = (make(kind, layers=2, width=32, heads=2, seed=3) for kind in ("softmax", "entmax"))
    assert not entmax_heads(softmax)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(softmax.embedding.weight, entmax.embedding.weight)
    entmax(tokens).square().mean().backward()
    for heads in entmax_heads(entmax):
        assert heads.logits.grad is not None and heads.logits.grad.all() and (heads.alpha == 1.5).all()


def test_the_weights_that_are_drawn() -> None:
    tokens = torch.randint(256, (1, 30), generator=torch.Generator().manual_seed(0))
    for kind in ("softmax", "entmax"):
        p, alpha = weights(make(kind, layers=2, width=32, heads=2, seed=3), tokens)
        assert p.shape == (30, 30) and alpha == {"softmax": 1.0, "entmax": 1.5}[kind]
        torch.testing.assert_close(p.sum(1), torch.ones(30))
        assert not p.triu(1).any()
