"""The examples in public docstrings: every public name has one, and each is run, on a CPU."""

from __future__ import annotations

import doctest
import importlib
import operator
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gossamer as gs

NEED_TORCH = (
    "BlockIndices", "DocumentIds", "DocumentIds.from_cu_seqlens", "EntmaxAux", "Indices", "PackedSequences",
    "PageBounds", "Pages", "Unsupported", "attention", "attention_forward", "device_layout", "entmax_attention",
    "explain", "explain_entmax", "explain_sparsek", "from_flex", "last_topk", "merge", "nn.SparseKAttention",
    "nn.SparseKCache", "nn.SplashAttention", "sparsek", "sparsek_attention", "sparsek_causal", "to_flex", "topk_blocks",
    "topk_keys", "topk_pages", "varlen", "CSR.from_torch",
)  # fmt: skip
MODULES = [name for name in NEED_TORCH if name.startswith("nn.")]
NAMES = [name for name in gs.__all__ if name not in ("__version__", "nn")] + MODULES


def examples(name: str) -> list[doctest.DocTest]:
    """Those of a public name and of its methods, that show something."""
    thing = operator.attrgetter(name)(gs)
    module = importlib.import_module(thing.__module__)
    return [test for test in doctest.DocTestFinder().find(thing, name, module=module) if test.examples]


def run(test: doctest.DocTest, **more: Any) -> None:
    """Run one, with the names that examples use; its failure is printed where it fails."""
    test.globs = {"gs": gs, "np": np, **more}
    failed, _ = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test)
    assert not failed, test.name


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    import torch

    found = examples(name)
    assert name in [test.name for test in found]
    for test in found:
        run(test, **{"torch": torch} if test.name in NEED_TORCH else {})


def test_examples_of_what_a_function_returns() -> None:
    import torch

    from gossamer.blocks import SelectedBlocks

    found = {test.name: test for test in doctest.DocTestFinder().find(SelectedBlocks) if test.examples}
    run(found["SelectedBlocks.kept_mass"], torch=torch)


def test_every_module_is_among_them() -> None:
    assert sorted(MODULES) == sorted(f"nn.{name}" for name in gs.nn.__all__)


def test_a_wrong_example_fails() -> None:
    (test, *_) = examples("Dense")
    test.examples[0].want = "array([[1, 1, 0]])\n"
    with pytest.raises(AssertionError, match="Dense"):
        run(test)


def test_patterns_are_shown_without_torch() -> None:
    """In a process of its own, where torch cannot be imported."""
    subprocess.run([sys.executable, "-W", "error", __file__], check=True)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    for each in NAMES:
        if each not in NEED_TORCH:
            for one in examples(each):
                if one.name not in NEED_TORCH:
                    run(one)
