"""Files of results: JSON objects, one a line, that say once what many rows share.

`{"run": {...}}` holds fields of all rows after it, up to the next such line: the device, the versions. Any other
line holds rows that were measured together, in `records`, beside the fields that they share; without `records` it is
one row:

    {"run": {"device": "NVIDIA H200", "commit": "43bf8e62af82"}}
    {"case": "window", "records": [{"direction": "forward", "ms": 1.0}, {"direction": "backward", "ms": 2.5}]}
    {"case": "dense", "direction": "forward", "ms": 4.0}

A file whose name ends with .gz is compressed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]

RENAMED = {"dense": "small"}  # implementations, by the names in older versions and in the rows that those wrote


def read_records(path: Path) -> list[Record]:
    """The rows of a file, each with every field that was added, in the order in which they were added.

    Raises:
        ValueError: a line is no JSON object.
    """
    run: Record = {}
    rows: list[Record] = []
    for shared in _lines(path):
        if list(shared) == ["run"]:
            run = shared["run"]
        else:
            rows += [run | shared | own for own in shared.pop("records", [{}])]
    return rows


def append_records(rows: Sequence[Record], path: Path, run: Iterable[str]) -> None:
    """Adds rows that were measured together; makes the file and its folder.

    Args:
        rows: one or more, of values that JSON has.
        path: of the file.
        run: names of the fields that all rows of a run have and share.
    """
    run_facts = {name: rows[0][name] for name in run}
    before = _lines(path) if path.is_file() else []  # a pipe is not read
    last = next((line["run"] for line in reversed(before) if list(line) == ["run"]), None)
    lines = [] if last == run_facts else [{"run": run_facts}]
    lines.append(_grouped([{name: row[name] for name in row if name not in run_facts} for row in rows]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, "at") as file:
        file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _grouped(rows: Sequence[Record]) -> Record:
    first, *others = rows
    if not others:
        return first
    shared = {name: value for name, value in first.items() if all(_has(row, name, value) for row in others)}
    return shared | {"records": [{name: row[name] for name in row if name not in shared} for row in rows]}


def _has(row: Record, name: str, value: Any) -> bool:
    """Whether a field would be written the same: 1, 1.0 and true are equal, but not the same."""
    return name in row and json.dumps(row[name]) == json.dumps(value)


def _opened(path: Path, mode: str) -> IO[str]:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)  # type: ignore[return-value]


def _lines(path: Path) -> list[Record]:
    lines = []
    with _opened(path, "rt") as file:
        texts = file.read().splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise ValueError(f"line {number} of {path} is no JSON object")
        lines.append(line)
    return lines
