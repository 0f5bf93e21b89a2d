"""What an import loads, held in fresh processes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

SRC = Path(__file__).parents[2] / "src"

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is blocked by this test")
sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    """The output of `code` in a fresh process in which some modules cannot be imported."""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(names=blocked) + code],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_gossamer_loads_no_framework() -> None:
    loaded = run(
        "import gossamer, gossamer.patterns, gossamer.layouts, gossamer.plan.table, gossamer.testing.cases\n"
        "names = 'torch', 'transformers', 'jax', 'triton', 'matplotlib', 'scipy', 'typer'\n"
        "print([m for m in names if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_the_torch_edge_does_not_load_the_compiler() -> None:
    assert run("import gossamer.torch, gossamer.torch.varlen\nprint('torch._dynamo' in sys.modules)").strip() == "False"


def test_patterns_and_layouts_without_torch() -> None:
    out = run(
        "import gossamer as gs\n"
        "p = gs.SlidingWindow(5) | gs.BigBird(8)\n"
        "layout = p.layout(70, 70, block_q=32, block_kv=32)\n"
        "assert (layout.expand() == p.materialize(70, 70)).all() and layout.columns.rows == 70\n"
        "from gossamer.plan.table import available\n"
        "print(available('blocked'))",
        blocked=("torch", "jax", "triton"),
    )
    assert "cannot be imported: ImportError: torch is blocked by this test" in out


def test_what_needs_torch_says_so() -> None:
    out = run(
        "import sys; sys.modules['torch'] = None\n"
        "import gossamer as gs\n"
        "try: gs.attention\n"
        "except ImportError as error: print(error)"
    )
    assert out.strip() == "gossamer.attention needs torch; in a checkout of gossamer: pip install '.[torch]'"


def test_torch_without_triton() -> None:
    out = run(
        "import torch, gossamer as gs\n"
        "x = torch.randn(1, 2, 40, 8)\n"
        "gs.attention(x, x, x, gs.Causal())\n"
        "print(gs.explain(x, x, x, gs.Causal()))\n"
        "try: gs.attention(x, x, x, implementation='triton')\n"
        "except gs.Unsupported as error: print(error)",
        blocked=("triton",),
    )
    assert out.count("triton is blocked by this test") == 3 and "implementation" in out and "available: blocked" in out


def test_hopper_kernels_are_chosen_without_the_compiler() -> None:
    """Which kernels ship is known without torch, and their work items are made without the compiler."""
    compilers = ("cutlass", "tvm_ffi", "triton")
    run(
        "from gossamer.kernels.hopper import compiled, shipped\n"
        "assert all(hasattr(compiled, kernel.kind) for kernel in shipped.shipped())",
        blocked=("torch", *compilers),
    )
    run("from gossamer.kernels.hopper.schedule import columns, rows", blocked=compilers)


def test_transformers_is_imported_when_it_is_asked_for() -> None:
    out = run(
        "import sys, gossamer.torch, gossamer.integrations.transformers as integration\n"
        "print('transformers' in sys.modules)\n"
        "try: integration.register()\n"
        "except ImportError as error: print(error)",
        blocked=("transformers",),
    )
    assert out.startswith("False\nregister needs transformers of at least 5.17 (")
    assert "transformers is blocked by this test); in a checkout of gossamer: pip install '.[transformers]'" in out


def test_vllm_is_imported_when_it_is_asked_for() -> None:
    """What computes the attention of its layers needs none of it."""
    out = run(
        "import sys, gossamer.integrations.vllm as integration, gossamer.integrations.vllm.trace\n"
        "try: integration.register()\n"
        "except ImportError as error: print(error)",
        blocked=("vllm",),
    )
    assert out == "register needs vllm of at least 0.32 (vllm is blocked by this test)\n"


def test_public_names() -> None:
    out = run(
        "import gossamer as gs\nfor name in gs.__all__: getattr(gs, name)\nprint(sorted(set(gs.__all__)) == dir(gs))"
    )
    assert out.strip() == "True"


def test_type_checkers_see_the_public_names() -> None:
    source = (SRC / "gossamer" / "__init__.py").read_text()
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    seen = set(gossamer.patterns.__all__)
    for node in imported:  # what is loaded at run time is the same object
        for name in node.names if (node.module or "").startswith("gossamer.") else ():
            if name.name != "*":
                seen.add(name.name)
                assert getattr(importlib.import_module(node.module or ""), name.name) is getattr(gossamer, name.name)
    assert seen == set(gossamer.__all__) - {"__version__", "nn"}  # a module
    assert (SRC / "gossamer" / "py.typed").exists()


def test_no_module_is_hidden() -> None:
    """A name of a package that a module of it has as well hides that module from `package.module`."""
    rooms = {
        "particles": ("in", "fused", "attend", "blocked", "listed", "once"), "blocks": ("in", "lists"),
        "entmax": ("in", "rows", "selection", "thresholds"),
    }  # fmt: skip
    of_jax = [f"gossamer.{room}.{name}_jax" for room, names in rooms.items() for name in names]
    absent = ("gossamer.cosmos", "gossamer.jax", *of_jax) if importlib.util.find_spec("jax") is None else ()
    of_vllm = ("gossamer.integrations.vllm.backend", "gossamer.integrations.vllm.sparsek_model")
    absent += () if importlib.util.find_spec("vllm") else of_vllm
    out = run(
        "import importlib, pkgutil, sys, gossamer\n"
        "for found in pkgutil.walk_packages(gossamer.__path__, 'gossamer.'):\n"
        f"    if found.name.startswith({absent!r}): continue\n"
        "    if not any(x in found.name for x in ('hopper.', 'radial.', 'kernels.neighbors.', '__main__')):\n"
        "        importlib.import_module(found.name)\n"
        "for name, module in list(sys.modules.items()):\n"
        "    package, _, child = name.rpartition('.')\n"
        "    if name.startswith('gossamer.') and getattr(sys.modules[package], child) is not module: print(name)\n"
    )
    assert not out.split()


def test_what_is_of_jax_alone_is_named() -> None:
    """Of an attribute that users of JAX look for here, the error says where it is."""
    for name in ("create_sparsity_mask", "sparse_attention"):
        with pytest.raises(
            AttributeError, match=rf"'{name}'; it is gossamer\.jax\.{name}, after `import gossamer\.jax`"
        ):
            getattr(gossamer, name)
        assert not hasattr(gossamer, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'sparse'$"):
        gossamer.sparse  # noqa: B018
