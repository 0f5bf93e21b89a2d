"""Runs on disk: the same bits after an interruption, and what is said when something is wrong; nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from gossamer import cosmos

pytest.importorskip("h5py")
pytest.importorskip("matplotlib")

from gossamer.cli import app

ROOT = Path(__file__).parents[2]
SMALL = ["cosmos", "--particles", "8", "--box", "32", "--steps", "6", "--snapshots", "3", "--start", "0.1"]
BOX, COSMOLOGY = cosmos.Box(size_mpc_h=32.0, particles=8), cosmos.Cosmology()
runner = CliRunner()


def command(out: Path, *more: str) -> Any:
    return runner.invoke(app, [*SMALL, "--out", str(out), *more])


def process(out: Path, *more: str, most_kib: int | None = None) -> subprocess.Popen[str]:
    """The command in a process of its own; where it says so no file may be larger, as on a disk that is full."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    confined = [] if most_kib is None else ["bash", "-c", f'ulimit -f {most_kib}; exec "$@"', "bash"]
    return subprocess.Popen(
        [*confined, sys.executable, "-m", "gossamer.cli", *SMALL, "--out", str(out), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a run but the report, which has times."""
    files = (path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "report.json")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    done = command(out)
    assert done.exit_code == 0, done.output
    for word in ("512", "all pairs", "pairs within the cut", "web.gif"):
        assert word in done.output
    return out


def test_a_run_writes_what_it_says(whole: Path) -> None:
    names = set(contents(whole))
    assert {"web.png", "slice.png", "power.png", "web.gif", "settings.json"} <= names
    assert sum(name.startswith("snapshots") for name in names) == 4
    assert (whole / "web.gif").read_bytes().startswith(b"GIF") and (whole / "web.gif").stat().st_size < 4e6
    assert (whole / "web.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(whole: Path, tmp_path: Path, how: signal.Signals) -> None:
    for attempt in range(10):  # one whose signal comes after its end says nothing
        out = tmp_path / str(attempt)
        running = process(out)
        while not (out / "snapshots" / "snapshot_0002.hdf5").exists():
            assert running.poll() is None, running.communicate()
            time.sleep(0.005)
        running.send_signal(how)
        _, told = running.communicate(timeout=100)
        if not (out / "report.json").exists():
            break
    else:
        pytest.fail("every run ended before its signal")
    if how == signal.SIGINT:
        assert running.returncode == 1 and "interrupted; the same command goes on" in told
    done = command(out)
    assert done.exit_code == 0 and "goes on from step" in done.output, done.output
    expected, found = contents(whole), contents(out)
    assert all(found[name] == content for name, content in expected.items())


def test_a_damaged_snapshot_is_said_and_the_one_before_it_taken(whole: Path, tmp_path: Path) -> None:
    assert command(tmp_path).exit_code == 0
    last = tmp_path / "snapshots" / "snapshot_0006.hdf5"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    done = command(tmp_path)
    assert done.exit_code == 0 and "is damaged" in done.output and "goes on from step 4" in done.output
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("keep", [0, 100, 3000, -1000])
def test_a_snapshot_that_was_cut_is_refused(whole: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes((whole / "snapshots" / "snapshot_0006.hdf5").read_bytes()[:keep])
    with pytest.raises(ValueError, match="is damaged"):
        cosmos.load(cut)


def test_every_flipped_bit_of_the_numbers_is_found(whole: Path, tmp_path: Path) -> None:
    content = (whole / "snapshots" / "snapshot_0006.hdf5").read_bytes()
    state = cosmos.load(whole / "snapshots" / "snapshot_0006.hdf5").state
    begin = content.index(np.asarray(state.momenta_km_s).tobytes())
    for at in (0, 100, 6143):
        changed = bytearray(content)
        changed[begin + at] ^= 128
        (tmp_path / "changed.hdf5").write_bytes(changed)
        with pytest.raises(ValueError, match="its numbers are not those that were written"):
            cosmos.load(tmp_path / "changed.hdf5")


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path) -> None:
    """The first snapshot fits, a picture of a later step does not; then there is room."""
    running = process(tmp_path, most_kib=40)
    _, told = running.communicate(timeout=200)
    assert running.returncode == 1 and "could not be written" in told and told.count("\n") == 1, told
    assert not list(tmp_path.rglob("*.part")) and list(tmp_path.glob("snapshots/*"))
    assert command(tmp_path).exit_code == 0
    assert contents(tmp_path) == contents(whole)


def test_a_full_disk_leaves_the_snapshot_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = cosmos.initial_conditions(jax.random.key(0), COSMOLOGY, BOX, a=0.1)
    path = tmp_path / "snapshot.hdf5"
    cosmos.save(state, BOX, COSMOLOGY, path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device\); what was there before is as it was"):
        cosmos.save(state, BOX, COSMOLOGY, path)
    assert path.read_bytes() == before and [path] == list(tmp_path.iterdir())


def test_snapshots_are_in_the_layout_of_gadget(whole: Path) -> None:
    import h5py

    found = cosmos.load(whole / "snapshots" / "snapshot_0006.hdf5")
    with h5py.File(whole / "snapshots" / "snapshot_0006.hdf5") as file:
        header, group = file["Header"].attrs, file["PartType1"]
        assert list(header["NumPart_ThisFile"]) == [0, 512, 0, 0, 0, 0] and header["BoxSize"] == 32.0
        # All of the matter of the box.
        assert 512 * header["MassTable"][1] == pytest.approx(27.7537 * 0.31 * 32**3, rel=1e-5)
        assert header["Time"] == 1 and abs(header["Redshift"]) < 1e-6
        assert group["ParticleIDs"][0] == 1 and len(set(group["ParticleIDs"])) == 512
        np.testing.assert_array_equal(group["Coordinates"], found.state.positions_mpc_h)
        np.testing.assert_allclose(group["Velocities"], found.state.momenta_km_s)  # sqrt(a) dx/dt at a = 1
        units = group["Coordinates"].attrs  # comoving Mpc/h
        assert (
            units["a_scaling"] == 1
            and units["h_scaling"] == -1
            and units["to_cgs"] == pytest.approx(3.08568e24, rel=1e-5)
        )
        assert group["Velocities"].attrs["a_scaling"] == 0.5
    assert found.box == BOX and found.cosmology == COSMOLOGY


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["PartType1/Coordinates"] = np.zeros((8, 3))
    with pytest.raises(ValueError, match="not written by gossamer"):
        cosmos.load(tmp_path / "other.hdf5")
    with pytest.raises(FileNotFoundError):
        cosmos.load(tmp_path / "none.hdf5")


def table(path: Path, k_unit: float, P_unit: float) -> str:
    k = np.logspace(-3.5, 1.5, 200)
    P = np.asarray(cosmos.linear_power(COSMOLOGY, k), np.float64)
    np.savetxt(path, np.stack([k * k_unit, P * P_unit], 1))
    return str(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--end", "0.05"], "--end must be over --start"),
        (["--particles", "3"], "must be an integer from 8 to 1024, got '3'"),
        (["--softening", "1e5"], "softening_kpc_h must be a number over 0"),
        (["--power", "none.txt"], "--power 'none.txt' cannot be read"),
        (["--mesh", "14"], ""),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, more: list[str], message: str) -> None:
    done = command(tmp_path, *more)
    if not message:  # the coarsest mesh runs
        assert done.exit_code == 0, done.output
        return
    assert done.exit_code == 2 and message in done.output and done.output.count("\n") == 1, done.output


def test_a_table_in_a_wrong_unit_is_one_line(tmp_path: Path) -> None:
    done = command(tmp_path / "run", "--power", table(tmp_path / "p.txt", 0.677, 0.677**-3))
    assert done.exit_code == 2 and done.output.count("\n") == 1, done.output
    assert "It would be right as k in 1/Mpc and P in Mpc^3" in done.output
    done = command(tmp_path / "run", "--power", table(tmp_path / "q.txt", 1, 1))
    assert done.exit_code == 0, done.output


def test_a_folder_of_another_run_is_refused(whole: Path) -> None:
    before = contents(whole)
    done = command(whole, "--seed", "5")
    assert done.exit_code == 2 and "holds another run: seed 4, not 5" in done.output, done.output
    assert contents(whole) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_mpc_h": -1.0, "particles": 8}, "size_mpc_h must be a number"),
        ({"size_mpc_h": 32.0, "particles": 2.5}, "particles must be an integer"),
        ({"size_mpc_h": (32.0, 32.0), "particles": 8}, "or three"),
        ({"size_mpc_h": 32.0, "particles": 4}, "mesh must be 14 to 2048"),
        ({"size_mpc_h": (32.0, 32.0, 8.0), "particles": 8}, "over half of the box"),
        ({"size_mpc_h": 32.0, "particles": 8, "softening_kpc_h": 1e4}, "softening_kpc_h must be"),
    ],
)
def test_a_wrong_box_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosmos.Box(**options)


def test_wrong_arguments_are_refused() -> None:
    state = cosmos.initial_conditions(jax.random.key(0), COSMOLOGY, BOX, a=0.1)
    other = cosmos.Box(size_mpc_h=32.0, particles=9)
    times = jnp.linspace(0.1, 1.0, 5)
    for wrong, message in (
        (lambda: cosmos.evolve(state, COSMOLOGY, other, times), r"positions_mpc_h must be \(729, 3\)"),
        (lambda: cosmos.evolve(state, COSMOLOGY, BOX, times[1:]), "must begin at the state's own, 0.1"),
        (lambda: cosmos.evolve(state, COSMOLOGY, BOX, times[::-1]), "must increase"),
        (lambda: cosmos.evolve(state, COSMOLOGY, BOX, 1.0), "must be an array"),
        (lambda: cosmos.evolve(state, COSMOLOGY, BOX, times, gas=3), "gas must be a Gas"),
        (lambda: cosmos.evolve(state, COSMOLOGY, BOX, times, gas=cosmos.Gas(10.0, 4.0)), "smoothing_mpc_h must be"),
        (lambda: cosmos.initial_conditions(3, COSMOLOGY, BOX, 0.1), "noise must be a key"),
        (lambda: cosmos.initial_conditions(jnp.zeros((8, 8, 9)), COSMOLOGY, BOX, 0.1), "noise must be a key"),
        (lambda: cosmos.initial_conditions(jax.random.key(0), COSMOLOGY, BOX, 0.1, order=3), "order must be 1 or 2"),
        (lambda: cosmos.initial_conditions(jax.random.key(0), COSMOLOGY, BOX, 10.0), "a must be a number"),
        (lambda: cosmos.power_spectrum(3, BOX), "state must be a State"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
