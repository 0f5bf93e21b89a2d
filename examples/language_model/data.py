"""The demo's text: the source files of the Python standard library of the running interpreter, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Packages of other people, and folders that some distributions leave out.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo", "lib2to3"}
VALIDATION_SHARE = 20  # one file in twenty


@dataclass(frozen=True)
class Text:
    """Train and validation bytes (n,) uint8, split by file, and the number of files in each."""

    train: Tensor
    validation: Tensor
    train_files: int
    validation_files: int


def source_files(root: Path) -> list[Path]:
    """Every .py file under `root` that belongs to the library proper, in a fixed order."""
    found = [p for p in root.rglob("*.py") if not LEFT_OUT.intersection(p.relative_to(root).parts)]
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def is_validation(name: str) -> bool:
    """Whether the file `name` (relative, with slashes) is kept for validation: decided by the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % VALIDATION_SHARE == 0


def load_text(root: Path | None = None) -> Text:
    """Reads the library under `root` (default: the running interpreter's), files joined by a zero byte."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(root):
        parts[is_validation(path.relative_to(root).as_posix())].append(path.read_bytes())
    joined = {held_out: b"\0".join(files) for held_out, files in parts.items()}
    if not joined[False] or not joined[True]:
        raise ValueError(f"no Python source files to train on under {root}; is the standard library installed as .py?")
    train, validation = (torch.frombuffer(bytearray(joined[key]), dtype=torch.uint8) for key in (False, True))
    return Text(train, validation, len(parts[False]), len(parts[True]))


def training_batch(text: Text, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the training bytes: tokens and the bytes that follow each, (batch, context) int64."""
    starts = torch.randint(len(text.train) - context, (batch,), generator=generator)
    windows = torch.stack([text.train[s : s + context + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def validation_windows(text: Text, context: int, total: int) -> Tensor:
    """About `total` validation bytes as windows (n, context + 1) int64, evenly spread; the same for every model."""
    count = max(1, min(total // context, (len(text.validation) - 1) // context))
    starts = torch.linspace(0, len(text.validation) - context - 1, count).long()
    return torch.stack([text.validation[s : s + context + 1] for s in starts.tolist()]).long()
