"""The command line: patterns as text, info, show, and what a user sees when something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import gossamer as gs
from gossamer.cli import app
from gossamer.cli.errors import Refused, check_file
from gossamer.cli.expression import NAMES, parse_pattern
from gossamer.cli.show import COLOURS, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gossamer ARGUMENTS` in a fresh process."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "gossamer.cli", *arguments],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": path} | environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("SlidingWindow(256) | BigBird(64)", gs.SlidingWindow(256) | gs.BigBird(64)),
        ("SlidingWindow(left=4, right=None, sinks=2)", gs.SlidingWindow(4, None, 2)),
        ("~Causal() & (Dense() | Local(8))", ~gs.Causal() & (gs.Dense() | gs.Local(8))),
        ("PerHead([SlidingWindow(63), Dilated(31, 0, 8)])", gs.PerHead([gs.SlidingWindow(63), gs.Dilated(31, 0, 8)])),
        ("Document([0, 0, 1, -1]) & Causal()", gs.Document([0, 0, 1, -1]) & gs.Causal()),
        ("Document.from_cu_seqlens((0, 3, 8))", gs.Document.from_cu_seqlens((0, 3, 8))),
        ("BlockMask([[True, False], [True, True]], 4)", gs.BlockMask(np.array([[True, False], [True, True]]), 4)),
        ("  Longformer( 8 , global_tokens=(0,) ,\n dilation=2 ) ", gs.Longformer(8, (0,), 2)),
        ("CSR([0, 1, 3], [2, 0, 1], 3)", gs.CSR([0, 1, 3], [2, 0, 1], 3)),
        ("Tree([-1, 0, 0, 1])", gs.Tree([-1, 0, 0, 1])),
        ("Neighborhood((5, 8), (2, 1), border='shift')", gs.Neighborhood((5, 8), (2, 1), border="shift")),
        ("Neighborhood((5, 8), 1, causal=(True, False))", gs.Neighborhood((5, 8), ((1, 0), 1))),
        ("Neighborhood((5, 8), (2, 1), ('cut', 'shift'))", gs.Neighborhood((5, 8), (2, 1), ("cut", "shift"))),
    ],
)
def test_a_pattern_reads_as_in_python(text: str, pattern: gs.Pattern) -> None:
    assert parse_pattern(text) == pattern


def test_every_public_pattern_has_a_name_here() -> None:
    classes = {name for name in gs.__all__ if isinstance(getattr(gs, name, None), type)}
    patterns = {name for name in classes if issubclass(getattr(gs, name), gs.Pattern)}
    assert patterns - {"Pattern", "Predicate"} == set(NAMES)


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("SlidngWindow(3)", ["'SlidngWindow'", "did you mean SlidingWindow?", "column 1", "'SlidngWindow(3)'"]),
        ("Dense() | Windw(3)", ["'Windw'", "column 11", "accepted are CSR, BigBird"]),
        ("SlidingWindow(256", ["never closed", "column 14", "'SlidingWindow(256'"]),
        ("SlidingWindow", ["write SlidingWindow(...)"]),
        ("", ["empty pattern"]),
        ("3", ["a pattern is expected, got int 3"]),
        ("Dense() & 3", ["join patterns, got int 3", "column 11"]),
        ("BigBird(blck=3)", ["blck", "accepted is BigBird(block=64"]),
        ("SlidingWindow(4, sinks=-4)", ["got -4", "accepted is SlidingWindow(left, right=0, sinks=0)"]),
        ("SlidingWindow(*[1])", ["* is not accepted"]),
        ("SlidingWindow(**{})", ["** is not accepted"]),
        ("SlidingWindow(left=1, left=2)", ["repeated"]),
        ("Predicate(abs)", ["cannot be written here"]),
        ("Dense() and Causal()", ["not accepted", "&, | and ~"]),
        ("Dense() if 1 else Causal()", ["not accepted"]),
        ("__import__('os').system('true')", ["not the name of a pattern"]),
        ("Dense().__class__()", ["not the name of a pattern"]),
        ("CSR.from_scipy(1)", ["'CSR.from_scipy' is not the name of a pattern"]),
        ("(lambda: Dense())()", ["not the name of a pattern"]),
        ("SlidingWindow('4')", ["not accepted"]),
        ("Neighborhood((5,), (2,), border='move')", ["'move'", "not accepted"]),
        ("é | Dense(", ["never closed"]),
        ("Dense() | ü()", ["'ü'", "column 11"]),
        ("Dense()\x00", ["cannot read the pattern"]),
        ("~" * 5000 + "Dense()", ["nested"]),
        ("|".join(["Dense()"] * 400), ["nested more than 100 deep"]),
        ("Dense() | " * 5000, ["at most 20000"]),
    ],
)
def test_a_wrong_pattern_says_what_and_where(text: str, expected_text: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_pattern(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected_text:
        assert part in message


WORDS = [
    *NAMES,
    "Predicate",
    "(",
    ")",
    "[",
    "]",
    ",",
    "&",
    "|",
    "~",
    "-",
    "=",
    "1",
    "64",
    "None",
    "True",
    "left",
    "*",
    " ",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.text(max_size=40))
def test_any_text_is_a_pattern_or_a_value_error(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(pattern, gs.Pattern)


def test_info_names_the_machine_and_every_implementation() -> None:
    from gossamer.plan.table import NAMES as IMPLEMENTATIONS

    shown = runner.invoke(app, ["info"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for word in ("cpu", "numpy", "torch", gs.__version__, *IMPLEMENTATIONS):
        assert word in shown.output


def test_show_draws_pairs_when_small_and_tiles_when_large(tmp_path: Path) -> None:
    import matplotlib.image

    for name, arguments in {
        "small": ["SlidingWindow(20)", "--q", "100", "--k", "130", "--block-q", "32", "--block-kv", "32"],
        "large": ["SlidingWindow(256) | BigBird(64)", "--q", "131072"],
        "heads": ["PerHead([SlidingWindow(63), Dilated(31, 0, 8)])", "--q", "2048"],
    }.items():
        out = tmp_path / "deep" / f"{name}.png"
        shown = runner.invoke(app, ["show", *arguments, "--out", str(out)])
        assert shown.exit_code == 0, shown.output
        assert matplotlib.image.imread(out).shape[0] > 300
        for word in ("full tiles", "interval tiles", "bits tiles", "density", "executed / kept"):
            assert word in shown.output


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("SlidingWindow(900)", []),
        ("SlidingWindow(9)", []),  # rows of one interval are not gathered
        ("PerHead([Dilated(31, 0, 8), SlidingWindow(99)])", ["or in 8 classes", "or beside"]),
        ("LongNet([64, 256], [1, 4], heads=4)", ["or beside", "or in 4 classes"]),
        ("PowerStrided(2)", ["or gathered for 1, 16, 32, 64 rows"]),
        ("~Dense()", []),
    ],
)
def test_what_is_executed_instead_of_tiles_that_are_mostly_empty(pattern: str, rows: list[str]) -> None:
    from gossamer.cli.show import others

    parsed = parse_pattern(pattern)
    layout = parsed.layout(2000, 2000, block_q=128, block_kv=128)
    found = others(parsed, layout)
    assert [name for name, _ in found] == rows
    if "gathered" in str(rows):
        executed = [float(over) for over in found[0][1].split(", ")]
        assert executed[0] == 1 and executed == sorted(executed) and executed[-1] < layout.stats.overhead
    shown = runner.invoke(app, ["show", pattern, "--q", "2000"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "wrote" not in shown.output
    assert all(name in shown.output for name in rows)


def test_pictures_hold_what_the_pattern_keeps() -> None:
    from gossamer.cli.show import pair_picture, tile_counts
    from gossamer.layouts.walk import KINDS

    pattern = gs.SlidingWindow(20) | gs.Local(32)
    layout = pattern.layout(100, 100, block_q=32, block_kv=32)
    kept = pattern.materialize(100, 100)
    strong = pair_picture(pattern, layout, 0, 0).min(-1) < 0.5
    assert np.array_equal(strong, kept)
    counts = sum(tile_counts(layout, 0, 0, kind, (1, 1)) for kind in KINDS)
    padded = np.pad(kept, ((0, 28), (0, 28))).reshape(4, 32, 4, 32).any((1, 3))
    assert np.array_equal(counts, padded.astype(int))
    # Binned, every listed tile is in its bin.
    binned = sum(tile_counts(layout, 0, 0, kind, (2, 3)) for kind in KINDS)
    assert np.array_equal(binned, np.add.reduceat(np.add.reduceat(padded.astype(int), [0, 2]), [0, 3], axis=1))


def dots(figure: Figure, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The colours that a figure shows at some query rows and keys, (n, 3) of 8 bits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3]
    x, y = figure.axes[0].transData.transform(np.stack([keys, rows], axis=1)).T
    return image[image.shape[0] - 1 - y.astype(int), x.astype(int)]


def colour(kind: str) -> list[int]:
    return [int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5)]


@pytest.mark.parametrize(
    ("Q", "tile"),
    [
        (1000, 128),  # the last tile is cut
        (600, 512),
        (22427, 32),  # 701 tiles in bins of two, the last of which holds one
    ],
)
def test_tiles_are_drawn_where_they_are(Q: int, tile: int) -> None:
    each, near = (tile, 8) if Q <= 1000 else (2 * tile, tile)  # rows of a block, and those to its edge
    pattern = gs.Local(each)
    figure = picture(pattern, pattern.layout(Q, Q, block_q=tile, block_kv=tile), "")
    beside = np.arange(each, Q, each)[:, None] + np.array([-near, near])
    beside = beside[beside < Q]
    rows, keys = (x.ravel() for x in np.meshgrid(beside, beside, indexing="ij"))
    drawn = (dots(figure, rows, keys) != 255).any(1)
    assert np.array_equal(drawn, rows // each == keys // each)
    assert drawn.any() and not drawn.all()


def test_a_tile_that_is_mostly_cut_keeps_its_size() -> None:
    figure = picture(gs.Causal(), gs.Causal().layout(30, 4000, block_q=128, block_kv=128), "")  # the last tile: 32 keys
    found = dots(figure, np.array([15.0, 15.0]), np.array([3955.0, 3980.0]))
    assert np.abs(found - np.array([colour("full"), colour("interval")])).max() <= 1  # of 255: a rounding


def test_every_pair_of_a_small_picture_is_seen() -> None:
    pattern = gs.Local(1)
    figure = picture(pattern, pattern.layout(512, 512, block_q=128, block_kv=128), "")
    at = np.arange(512) + 0.5
    assert (dots(figure, at, at) == colour("interval")).all()


@pytest.mark.parametrize(
    "pattern",
    [
        "SlidingWindow(20)",
        " | ".join(f"Dilated({n}, 0, 8)" for n in range(1, 6)),  # 98 characters
        " | ".join(f"SlidingWindow(left={n}, right={n}, sinks={n})" for n in range(9, 19)),  # too long
        "Document([" + "0," * 99 + "1])",
        "PerHead([" + ",".join(f"SlidingWindow({n})" for n in range(20)) + "])",
        "PerHead([Causal()," + "Local(" + "9" * 9 + ")])",
    ],
)
def test_titles_are_not_clipped(pattern: str, tmp_path: Path) -> None:
    import matplotlib.image

    out = tmp_path / "a.png"
    shown = runner.invoke(app, ["show", pattern, "--q", "100", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    image = matplotlib.image.imread(out)[..., :3]
    assert (image < 0.5).any()
    for edge in (image[:3], image[-3:], image[:, :3], image[:, -3:]):
        assert (edge == 1).all(), "something reaches the edge of the picture"


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["SlidngWindow(3)", "--q", "64", "--out", "a.png"], "unknown pattern 'SlidngWindow'"),
        (["Dense()", "--q", "64", "--out", "a.pdf"], "--out must name a .png file"),
        (["Document([0, 1])", "--q", "64", "--out", "a.png"], "K=64"),
        (["Dense()", "--q", "0", "--out", "a.png"], "--q"),
        (["Dense()", "--q", "64", "--block-kv", "48", "--out", "a.png"], "block_kv"),
    ],
)
def test_show_refuses_with_one_line_and_code_2(arguments: list[str], expected_text: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / word) if word.startswith("a.") else word for word in arguments]
    shown = runner.invoke(app, ["show", *arguments])
    assert shown.exit_code == 2
    assert expected_text in shown.output
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["shwo"], "No such command 'shwo'"),
        (["--nope"], "No such option: --nope"),
        (["show"], "Missing argument"),
        (["show", "Causal()"], "Missing option '--q' (gossamer show --help tells more)"),
        (["show", "Causal()", "--q"], "Option '--q' requires an argument"),
        (["show", "Causal()", "--q", "ten"], "'--q': must be an integer from 1 to 16777216, got 'ten'"),
        (["show", "Causal()", "--q", "0"], "'--q': must be an integer from 1 to 16777216, got '0'"),
        (["show", "Causal()", "--q", "9" * 9999], "got '999999"),
        (["show", "Causal()", "--q", "8", "--block-kv", "2048"], "'--block-kv': must be an integer from 1 to 1024"),
        (["show", "Causal()", "--q", "8", "--block-q", "48"], "block_q must be a positive multiple of 32, got 48"),
        (["show", "Causal()", "--q", "8", "another"], "another"),
        (["show", "Causal()", "--q", "8", "--colour", "red"], "No such option: --colour"),
        (["show", "|\n".join(["Dense()"] * 90), "--q", "8", "--block-q", "48"], "block_q must be"),
        (["info", "--all"], "No such option: --all"),
        (["info", "x" * 5000], "xxx"),
        (["bench", "--budget", "nan"], "'--budget': must be a number from 0.01 to 60, got 'nan'"),
        (["bench", "--prepare", "-1"], "'--prepare': must be an integer from 0 to 1024, got '-1'"),
        (["bench", "--limit", "inf"], "'--limit': must be a number from 1 to 1000000, got 'inf'"),
        (["bench", "--tag"], "Option '--tag' requires an argument"),
        (["bench", "--dtype", "int8"], "--dtype must be one of float16, bfloat16, float32, float64, got 'int8'"),
        (["bench", "--device", "cpu", "x" * 5000], "no case or tag 'xxx"),
        (["compile", "--jobs", "0"], "'--jobs': must be an integer from 1 to 1024, got '0'"),
        (["compile", "--arch"], "Option '--arch' requires an argument"),
        (["bench", "--repeat", "1.5"], "'--repeat': must be an integer from 1 to 100, got '1.5'"),
        (["bench", "--budget", "long"], "'--budget': must be a number from 0.01 to 60, got 'long'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments: list[str], expected_text: str) -> None:
    done = runner.invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gossamer: ") and done.stderr.count("\n") == 1
    assert expected_text in done.stderr
    assert len(done.stderr) < 2500  # the names of cases and tags are all listed


def test_without_a_command_the_help_is_shown() -> None:
    shown = runner.invoke(app, [])
    assert "Usage" in shown.output and "compile" in shown.output


def unwritable(folder: Path, suffix: str) -> list[tuple[Path, str]]:
    """Files that nobody can write, not even root, and the system's reason."""
    (folder / "file").write_text("kept")
    (folder / f"folder{suffix}").mkdir()
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    return [
        (folder / f"folder{suffix}", "Is a directory"),
        (folder / "file" / f"a{suffix}", "Not a directory"),
        (folder / "file" / "deep" / f"a{suffix}", "Not a directory"),
        (folder / f"{'a' * 300}{suffix}", "File name too long"),
        (folder / f"loop{suffix}", "Too many levels of symbolic links"),
        (Path("/proc/nowhere") / f"a{suffix}", "No such file or directory"),
    ]


def test_show_refuses_a_picture_that_cannot_be_written_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gs.Pattern, "layout", lambda *a, **k: pytest.fail("the pattern is counted"))
    before = sorted(tmp_path.iterdir())
    for path, why in unwritable(tmp_path, ".png"):
        before = before or sorted(tmp_path.iterdir())
        shown = runner.invoke(app, ["show", "Dense()", "--q", "64", "--out", str(path)])
        assert shown.exit_code == 2
        assert shown.stderr.startswith("gossamer: --out '") and shown.stderr.endswith(f" cannot be written: {why}\n")
        assert shown.stderr.count("\n") == 1 and shown.stdout == "" and len(shown.stderr) < 300
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "kept"


def test_a_pattern_that_memory_does_not_hold_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(*sizes: int, **tile: int) -> None:
        raise MemoryError

    monkeypatch.setattr(gs.Pattern, "layout", layout)
    shown = runner.invoke(app, ["show", "Causal()", "--q", "16777216"])
    assert shown.exit_code == 2
    assert shown.stderr.startswith(
        "gossamer: 'Causal()' with --q 16777216 --k 16777216 has more tiles than fit into memory"
    )


def test_a_file_is_checked_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    check_file("--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    check_file("--out", tmp_path / "new" / "file")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "link").symlink_to("behind")
    check_file("--out", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "behind").exists()
    check_file("--out", Path("/dev/null"))
    with pytest.raises(Refused, match=r"^--chart '/dev/null/a' cannot be written: Not a directory$"):
        check_file("--chart", Path("/dev/null/a"))


def test_a_picture_that_fails_late_is_one_line_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "full.png").symlink_to("/dev/full")  # can be opened, and takes nothing
    shown = runner.invoke(app, ["show", "Dense()", "--q", "64", "--out", str(tmp_path / "full.png")])
    assert shown.exit_code == 1
    assert shown.stderr.startswith("gossamer: --out ") and shown.stderr.count("\n") == 1
    assert "No space left on device" in shown.stderr and "wrote" not in shown.stdout


def test_the_name_of_a_picture_is_printed_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "[red]" / f"{'a' * 80}.png"
    shown = runner.invoke(app, ["show", "Dense()", "--q", "64", "--out", str(out)], env={"COLUMNS": "80"})
    assert shown.exit_code == 0 and out.exists()
    assert shown.stdout.endswith(f"\nwrote {out}\n")


def test_the_process_starts_fast_and_refuses_plainly(tmp_path: Path) -> None:
    refused = command("show", "Window(3)", "--q", "64", "--out", str(tmp_path / "a.png"))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("gossamer: unknown pattern 'Window'")
    assert refused.stderr.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from gossamer.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print([m for m in ('torch', 'matplotlib', 'scipy', 'triton') if m in sys.modules])"
    )
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=True
    )
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize(("module", "extra"), [("torch", "torch"), ("matplotlib", "plot")])
def test_a_missing_package_names_its_extra(module: str, extra: str, tmp_path: Path) -> None:
    # A package of that name that cannot be imported stands before the real one.
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module} here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    refused = command("bench", "window", "--chart", str(tmp_path / "rows.png"), PYTHONPATH=path)
    assert refused.returncode == 2
    assert f"in a checkout of gossamer: pip install '.[{extra}]'" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_info_works_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    shown = command("info", PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT / "src")]), COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert "in a checkout of gossamer: pip install '.[torch]'" in shown.stdout


def test_every_hint_installs_from_a_checkout() -> None:
    """There is no release on an index: `pip install gossamer[torch]` would find nothing, or another package."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [(page.name, what) for page in pages for what in re.findall(r"pip install (\S+)", page.read_text())]
    assert {page for page, _ in found} >= {"errors.py", "info.py", "__init__.py", "README.md", "compilation.md"}
    for page, what in found:
        named = re.match(r"""["']\.\[([a-z,]+|\{extra\})\]["']""", what)
        assert named, f"{page}: pip install {what}"
        assert named[1] == "{extra}" or set(named[1].split(",")) <= extras, f"{page}: {what}"


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_the_hopper_extra_is_recommended_where_its_kernels_could_run(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gossamer.kernels import hopper

    monkeypatch.setattr(hopper, "NEEDED", {"no-such-package": (1, 0)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("gossamer.cli.info.devices", lambda: ["cpu: of this test"])
    hopper.missing_packages.cache_clear()
    try:
        shown = runner.invoke(app, ["info"], env={"COLUMNS": "400"})
    finally:
        hopper.missing_packages.cache_clear()
    assert shown.exit_code == 0, shown.output
    assert ("pip install '.[hopper]'" in shown.output) == (capability == (9, 0))


def test_the_readme_has_the_present_support_table() -> None:
    from gossamer.cli.support import replace_table, support_table

    readme = (ROOT / "README.md").read_text()
    assert support_table() in readme, "run `make docs`"
    assert replace_table(readme) == readme
