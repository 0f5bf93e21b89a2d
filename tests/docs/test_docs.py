"""The documentation is right: its code runs, its links lead somewhere, its tables are those of the rows."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# Their code runs as a whole. That of CONTRIBUTING.md has a test of its own; DESIGN.md shows a shortened text.
NOT_RUN = ("CONTRIBUTING.md", "DESIGN.md")
EXAMPLES = [page for page in PAGES if "```python" in page.read_text() and page.name not in NOT_RUN]


def run(code: str, *options: str, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def blocks(page: Path, language: str) -> str:
    return "".join(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path) -> None:
    """And print what the page says that they print: the blocks of text."""
    code = blocks(page, "python")
    if "import transformers" in code or "from transformers" in code:
        pytest.importorskip("transformers")
    others = ("flex_attention called without torch.compile", "`torch.jit")  # the latter is torch's compiler's own
    done = run(code, "-W", "error", *(part for other in others for part in ("-W", f"ignore:{other}")))
    assert done.returncode == 0, done.stderr
    printed = blocks(page, "text")
    assert not printed or done.stdout == printed


@pytest.mark.gpu
def test_the_quick_start_runs_on_a_gpu() -> None:
    done = run(blocks(ROOT / "README.md", "python"), gpu=True)
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


OPERATION = """
import gossamer, torch
gossamer.__path__.append(FOLDER)
from gossamer.hard import hard_attention
q, k, v = (torch.randn(2, heads, 50, 8) for heads in (4, 2, 2))
v.requires_grad_()
out, key = hard_attention(q, k, v, gossamer.SlidingWindow(9))
assert (key <= torch.arange(50)).all() and (key > torch.arange(50) - 10).all()
scores = q @ k.repeat_interleave(2, 1).mT
near, _ = scores.masked_fill(torch.ones(50, 50).triu(1).bool() | torch.ones(50, 50).tril(-10).bool(), -1e9).max(-1)
assert torch.equal(scores.gather(-1, key[..., None])[..., 0], near)
assert torch.equal(out, v.repeat_interleave(2, 1).gather(2, key[..., None].expand(2, 4, 50, 8)))
(grad,) = torch.autograd.grad(out.sum(), v)
assert grad.sum() == out.numel()
out, key = hard_attention(q, k, v, gossamer.SlidingWindow(-60, 70))
assert (key == -1).all() and (out == 0).all()
try:
    hard_attention(q, k[:, :1].expand(2, 3, 50, 8), v, gossamer.Causal())
except ValueError as error:
    assert "divide those of q, 4; got 3 and 2" in str(error)
else:
    raise AssertionError
"""


def test_the_operation_on_the_contributing_page_runs(tmp_path: Path) -> None:
    (whole,) = re.findall(r"```py\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    _, *files = re.split(r"^# src/gossamer/(\S+)\n", whole, flags=re.MULTILINE)
    for name, text in zip(files[::2], files[1::2], strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    done = run(f"FOLDER = {str(tmp_path)!r}\n{OPERATION}", "-W", "error")
    assert done.returncode == 0, done.stderr


LAYERS = "nnx.MultiHeadAttention", "nn.multihead_attention"  # of gossamer.jax.nn, where they are defined


def test_the_reference_has_every_public_name() -> None:
    """And no other: each is `::: name`, which mkdocstrings takes from the docstrings."""
    written = re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    public = {f"gossamer.{name}" for name in gossamer.__all__ if name not in ("__version__", "nn")}
    public.add("gossamer.memo.forget_all")
    rooms = ("nn", "layouts", "entmax", "sparse_k", "blocks", "particles")
    for module in (f"gossamer.{name}" for name in (*rooms, "integrations.transformers", "integrations.vllm")):
        found = importlib.import_module(module)
        public |= {f"{module}.{n}" for n in found.__all__ if getattr(found, n) is not getattr(gossamer, n, None)}
    # Told from the source: jax is not installed here.
    for module in ("jax", "cosmos"):
        source = (ROOT / f"src/gossamer/{module}/__init__.py").read_text()
        listed = source.partition("__all__ = ")[2].partition("def __getattr__")[0]
        public |= {f"gossamer.{module}.{name}" for name in re.findall(r'"(\w+)"', listed)}
    public = public - {"gossamer.jax.nn"} | {f"gossamer.jax.{name}" for name in LAYERS}
    assert sorted(written) == sorted(public)
    patterns = (ROOT / "docs/patterns.md").read_text()
    assert [name for name in gossamer.patterns.__all__ if not re.search(rf"\b{name}\b", patterns)] == ["Pattern"]


def test_the_site_has_every_page() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def test_pages_keep_their_lengths() -> None:
    text = [line for line in (ROOT / "README.md").read_text().splitlines() if not line.startswith("|")]
    assert len(" ".join(text).split()) < 700
    for page in ROOT.glob("docs/kernels/*.md"):
        assert len(page.read_text().splitlines()) < 150, page.name
    for page in ROOT.glob("docs/lab/*.md"):  # one form
        starts = [page.read_text().find(f"**{part}") for part in ("Question", "Setup", "Result", "Decision")]
        assert -1 not in starts and starts == sorted(starts), page.name


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
