"""torch is never imported, the examples of docstrings and of the page run, and what is installed is said."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossamer as gs
import gossamer.jax as gsj

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "cutlass"):
            raise ImportError(f"{name} is blocked by this test")
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_never_imported() -> None:
    out = run(
        BLOCKED + "import jax, jax.numpy as jnp, gossamer as gs, gossamer.jax as gsj\n"
        "x = jnp.ones((1, 100, 2, 8))\n"
        "pattern = gs.SlidingWindow(30) | gs.BigBird(16)\n"
        "jax.grad(lambda x: gsj.attention(x, x, x, pattern, key_lengths=[70], sink_logits=jnp.ones(2)).sum())(x)\n"
        "gsj.explain(x, x, x, pattern)\n"
        "gsj.sparse_attention(x, x, x, gsj.create_sparsity_mask(x[0, :, 0], 1.0))\n"
        "gsj.entmax_attention(x, x, x, gsj.topk_blocks(x, x, topk=2, causal=True))\n"
        "from gossamer import particles as gp\n"
        "neighbors = gp.Neighbors.allocate(x[0, :, 0, :3], 1.0)\n"
        "gp.radial_sum(neighbors.cells, gp.neighbor_attention(x[0], x[0], x[0], neighbors)[:, 0], gp.Gaussian(1.0))\n"
        "print('torch' in sys.modules, sorted(m for m in sys.modules if m.startswith('gossamer.torch')))"
    )
    assert out.strip() == "False []"


def test_gossamer_alone_imports_no_jax() -> None:
    assert run("import sys, gossamer\nprint('jax' in sys.modules)").strip() == "False"


def test_without_jax() -> None:
    out = run(
        "import sys; sys.modules['jax'] = None\ntry: import gossamer.jax\nexcept ImportError as error: print(error)"
    )
    assert out.strip() == "gossamer.jax needs jax; in a checkout of gossamer: pip install '.[jax]'"


@pytest.mark.parametrize("name", [name for name in gsj.__all__ if name != "nn"])
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    thing = getattr(gsj, name)
    module = importlib.import_module(thing.__module__)
    (test,) = [one for one in doctest.DocTestFinder().find(thing, name, module=module) if one.examples]
    test.globs = {"gs": gs, "gsj": gsj, "jax": jax, "jnp": jnp, "np": np}
    failed, _ = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test)
    assert not failed


def test_the_notebook() -> None:
    """Committed without outputs; its cells run in order."""
    cells = json.loads((ROOT / "notebooks" / "jax_quickstart.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    printed = run("\n".join("".join(cell["source"]) for cell in code))
    assert "blocked, in lax" in printed


@pytest.mark.parametrize("page", ["jax", "particles"])
def test_the_page(page: str) -> None:
    """Its blocks of Python run as a whole, and print what it says."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    code = "".join(re.findall(r"```py\n(.*?)```", text, re.DOTALL))
    assert run(code) == "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
