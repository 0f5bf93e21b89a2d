"""Runs one training process and gathers what it says; nothing it said is lost when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.language_model.settings import Settings

ROOT = Path(__file__).parents[2]
ERROR_LINES = 12


@dataclass
class Run:
    """Everything one process reported, by kind of event, and its error if it failed."""

    settings: Settings
    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Files one event."""
        kind = event.pop("event")
        match kind:
            case "step":
                self.steps.append(event)
            case "validation":
                self.validation.append(event)
            case "length":
                self.lengths.append(event)
            case "start" | "check" | "result":
                setattr(self, kind, event)
            case _:
                raise ValueError(f"the training process sent an unknown event {kind!r}")


def train_in_process(settings: Settings, progress: Callable[[Run], None]) -> Run:
    """Trains in a fresh process; calls `progress` after every event. A failure is in the run's `error`."""
    found = Run(settings)
    command = [sys.executable, "-m", "examples.language_model.train", settings.to_json()]
    # Threads that wait by spinning cost far more than they gain as soon as anything else runs on the machine.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, env=environment,
            cwd=ROOT,
        ) as child,
    ):  # fmt: skip
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('{"event"'):
                    found.take(json.loads(line))
                    progress(found)
            code = child.wait()
        except BaseException:
            child.kill()  # Ctrl-C, or an error of ours: no orphan goes on training
            raise
        if code or not found.result:
            errors.seek(0)
            last = "".join(errors.readlines()[-ERROR_LINES:]).strip()
            found.error = f"exit code {code}" + (f"\n{last}" if last else ", without a message")
    return found
