"""The documentation is right: its code runs, its links lead somewhere, its tables are those of the rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# Sizes of the examples that are there for a GPU: a CPU runs the same code on shorter sequences.
SMALLER = {
    '"cuda"': '"cpu"',
    "16384": "1024",
    "12000": "700",
    "5000": "300",
    "4096": "256",
    "torch.bfloat16": "torch.float32",
}


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def examples(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md", "docs/patterns.md"])
def test_examples_run(page: str) -> None:
    code = examples(page)
    assert code
    if page != "docs/recipes.md":
        for large, small in SMALLER.items():
            code = code.replace(large, small)
    if page == "docs/patterns.md":
        code = "import torch\nimport gossamer as gs\nq = k = v = torch.randn(1, 2, 256, 16)\n" + code.replace(
            "256, 256)", '256, 256, device="cpu")'
        )
    others = ("flex_attention called without torch.compile", "`torch.jit")  # the latter is torch's compiler's own
    done = run(code, "-W", "error", *(part for other in others for part in ("-W", f"ignore:{other}")))
    assert done.returncode == 0, done.stderr


IMPLEMENTATION = """
import sys, types
from gossamer.plan import table
table.NAMES = (*table.NAMES[:-1], "eager", table.NAMES[-1])  # before any module takes the names
module = sys.modules["gossamer.kernels.eager"] = types.ModuleType("gossamer.kernels.eager")
exec(WHOLE, vars(module))

import torch
import gossamer as gs
from gossamer.kernels.launch import Builder, Kernel
from gossamer.memo import forget_all

def compare():
    found = gs.attention(q, k, v, P, implementation="eager", return_lse=True)
    torch.testing.assert_close(found, gs.attention(q, k, v, P, implementation="reference", return_lse=True))

q, k, v = (torch.randn(2, heads, 70, 16, dtype=torch.float64) for heads in (4, 2, 2))
P = gs.SlidingWindow(9) & ~gs.Local(3)  # some rows keep nothing
compare()
assert gs.explain(q, k, v, P, implementation="eager").implementation == "eager"
assert "eager" in gs.explain(q, k, v, P).reasons

def write(group, q, k, v, mask, out, lse, scale):
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = (scale * q @ k.mT).masked_fill(~mask, -torch.inf)
    lse.copy_(torch.logsumexp(s, -1))
    out.copy_(torch.exp(s - lse[..., None]).masked_fill(~mask, 0.0) @ v)
    runs.append(out)

runs = []
exec("def prepare(self, problem, layout, direction, scoring, operands):\\n" + DESCRIBED)
module.Eager.prepare, module.Eager.kernel = prepare, lambda self, name, group: lambda *x: write(group, *x)
forget_all()
compare()
assert runs
"""


def test_the_implementation_on_the_contributing_page_runs() -> None:
    whole, described = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    done = run(f"WHOLE, DESCRIBED = {whole!r}, {described!r}\n{IMPLEMENTATION}", "-W", "error")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    public = set(gossamer.__all__) - {"__version__"}
    assert [name for name in public if not re.search(rf"\b{name}\b", text)] == []
    patterns = (ROOT / "docs/patterns.md").read_text()
    assert [name for name in gossamer.patterns.__all__ if not re.search(rf"\b{name}\b", patterns)] == ["Pattern"]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, fragment = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not fragment or fragment in anchors(found), target


def test_files_that_are_named_exist() -> None:
    """Paths in backticks, from the repository's root or from a folder of it."""
    places = ("src", "tests", "docs", "benchmarks", "constraints", "scripts", "examples")
    files = ["/" + str(path.relative_to(ROOT)) for place in places for path in (ROOT / place).rglob("*")]
    files += ["/" + path.name for path in PAGES]
    for page in PAGES:
        for name in re.findall(r"`([\w/]+\.(?:py|sh))(?::\w+)?`", page.read_text()):
            assert any(file.endswith("/" + name) for file in files), (page.name, name)


def test_scripts_are_named() -> None:
    written = (ROOT / "docs/benchmarks.md").read_text()
    for script in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/*.sh")]:
        assert f"`{script.name}`" in written, script.name


def test_tables_are_those_of_the_rows() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/make_tables.py"), "--check"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_command_line_page_names_every_command_and_option() -> None:
    from typer.main import get_command

    from gossamer.cli import app

    written = "\n".join((ROOT / "docs" / name).read_text() for name in ("cli.md", "benchmarks.md", "compilation.md"))
    group = get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"gossamer {name}" in written
        for parameter in command.params:
            for option in parameter.opts:
                assert option == "--help" or option in written, (name, option)
