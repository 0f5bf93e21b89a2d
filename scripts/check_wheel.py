"""Whether an installed wheel holds the package alone, and works without torch: python -P scripts/check_wheel.py FILE"""

import importlib.util
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

NEEDED = (
    "bench/run.py", "cli/bench.py", "kernels/hopper/tuned.json", "plan/devices/cpu.json", "plan/devices/h200.json",
    "py.typed", "testing/cases.py",
)  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`gossamer ARGUMENTS`, by the script that the wheel installs."""
    script = Path(sysconfig.get_path("scripts")) / "gossamer"
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


def check(wheel: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    others = [name for name in names if not name.startswith(("gossamer/", "gossamer-"))]
    assert not others, f"the wheel holds {others}"
    missing = [name for name in NEEDED if f"gossamer/{name}" not in names]
    assert not missing, f"the wheel lacks {missing}"
    assert importlib.util.find_spec("torch") is None, "torch is installed here: this tests a machine without it"

    import gossamer

    assert Path(gossamer.__file__).is_relative_to(sysconfig.get_path("purelib")), gossamer.__file__
    shown = run("show", "SlidingWindow(256) | BigBird(64)", "--q", "4096")
    assert shown.returncode == 0 and "density" in shown.stdout, shown
    refused = run("bench", "window")
    assert refused.returncode == 2 and "gossamer bench needs torch" in refused.stderr, refused
    told = run("info")
    assert told.returncode == 0, told
    print(f"{Path(wheel).name}: {len(names)} files")


check(sys.argv[1])
