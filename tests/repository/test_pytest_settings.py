"""The settings of pytest: warnings are errors, and other people's plug-ins still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# As pytest-benchmark warns under xdist, from the hook that configures: as an error that would end pytest itself.
PLUGIN = """
import warnings

import pytest


class PytestBenchmarkWarning(pytest.PytestWarning):
    pass


def pytest_configure(config):
    if config.getoption("dist", "no") != "no":
        warnings.warn(PytestBenchmarkWarning({expected_text!r}))
"""
TEST = """
import warnings


def test_that_warns():
    warnings.warn("of the test")


def test_that_does_not():
    pass
"""
DISABLED = (
    "Benchmarks are automatically disabled because xdist plugin is active."
    "Benchmarks cannot be performed reliably in a parallelized environment."
)


@pytest.mark.parametrize(("expected_text", "runs"), [(DISABLED, True), ("The plug-in has no benchmarks.", False)])
def test_a_plug_in_that_disables_itself_under_xdist(expected_text: str, runs: bool, tmp_path: Path) -> None:
    (tmp_path / "plugin_that_warns.py").write_text(PLUGIN.format(expected_text=expected_text))
    (tmp_path / "test_one.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    options = ["-p", "no:cacheprovider", "-p", "plugin_that_warns", "-n", "1", str(tmp_path / "test_one.py")]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env=own | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert ("INTERNALERROR" in output) == (not runs), output
    # Any other warning is an error still.
    assert ("1 failed, 1 passed" in output and "UserWarning: of the test" in output) == runs, output
