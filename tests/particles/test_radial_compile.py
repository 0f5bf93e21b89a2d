"""The kernels of sums over neighbours compile without a GPU for what they are said to run on, and keep to registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.kernels.hopper import missing_packages
from gossamer.particles.kernels.compiled import ARCHITECTURES, radial
from gossamer.particles.kernels.radial.configurations import RadialConfig
from tests.support.thorough import more

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages()))

COMPILE = """
import sys
from gossamer.particles.kernels.compiled import radial
from gossamer.particles.kernels.radial.configurations import RadialConfig
from tests.support.thorough import more
kinds = ("sum", 1, 16), ("sum", 4, 8), ("sum_slopes", 1, 8), ("force", 1, 8), ("force_slopes", 1, 8), ("count", 1, 8)
for term, channels, queries in kinds:
    for periodic in (True, False):
        assert radial.object(RadialConfig(term, channels, periodic, periodic, queries, values=periodic))
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90a", *more(*(name for name in ARCHITECTURES if name != "sm_90a"))])
def test_every_term_compiles(architecture: str, tmp_path: Path) -> None:
    environment = {**os.environ, "CUTE_DSL_ARCH": architecture, "GOSSAMER_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
    assert len(list((tmp_path / "particles").glob("radial-*.o"))) == 12


def test_a_file_is_of_its_sources_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {radial.path(RadialConfig("sum", channels)).name for channels in (1, 2, 3)}
    assert len(names) == 3
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    assert radial.path(RadialConfig("sum", 1)).name not in names
