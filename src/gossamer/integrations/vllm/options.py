"""Options of the backend: `additional_config={"gossamer": {...}}` of an engine."""

from __future__ import annotations

import re
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

from gossamer.checks import show
from gossamer.patterns import Pattern, SlidingWindow

FORM = re.compile(r"window:(?P<window>[1-9]\d*)(,sinks:(?P<sinks>\d+))?")


class Options(NamedTuple):
    """What an engine is made with."""

    restrict: Pattern | None = None  # is intersected with what each layer sees: no longer the model's own attention
    record: str | None = None  # a file, to which the metadata of each step is added


def options_of(config: Any) -> Options:
    """The options of an engine's configuration.

    Raises:
        ValueError: they are none of these.
    """
    given = getattr(config, "additional_config", None)
    given = given.get("gossamer", {}) if isinstance(given, dict) else {}
    unknown = set(given) - set(Options._fields) if isinstance(given, dict) else {show(given)}
    if unknown:
        raise ValueError(f"gossamer in additional_config must have {', '.join(Options._fields)}; got {sorted(unknown)}")
    record, restrict = given.get("record"), given.get("restrict")
    if record is not None and not isinstance(record, str):
        raise ValueError(f"record must be the name of a file; got {show(record)}")
    return Options(None if restrict is None else restriction(restrict), record)


@cache
def restriction(text: str) -> Pattern:
    """The pattern that a restriction names, of which the log says once that it approximates.

    Raises:
        ValueError: it names none.
    """
    found = FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f'restrict must be "window:KEYS" or "window:KEYS,sinks:KEYS"; got {show(text)}')
    pattern = SlidingWindow.of_size(int(found["window"]), sinks=int(found["sinks"] or 0))
    getLogger("vllm.gossamer").warning(
        "gossamer: restrict=%s: layers see no more than this, which approximates the model", text
    )
    return pattern
