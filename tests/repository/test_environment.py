"""environment.yml, for users of conda, asks for what pyproject.toml asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_it_lists_what_the_extras_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    }
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, wheels = environment["dependencies"]
    assert environment["name"] == project["name"] and environment["channels"] == ["conda-forge", "nodefaults"]
    assert python == f"python{project['requires-python']}" and pip == "pip"
    *listed, checkout = wheels["pip"]
    assert checkout == "--editable ." and len(listed) == len(set(listed)) and set(listed) == wanted
