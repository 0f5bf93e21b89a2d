"""Options of the backend: `additional_config={"gossamer": {...}}` of an engine."""

from __future__ import annotations

import re
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

from gossamer.checks import show
from gossamer.patterns import Pattern, SlidingWindow

FORM = re.compile(r"window:(?P<window>[1-9]\d*)(,sinks:(?P<sinks>\d+))?")
PAGES = re.compile(r"topk_pages:(?P<topk>[1-9]\d*)(,first:(?P<first>\d+))?(,local:(?P<local>[1-9]\d*))?")


class PageChoice(NamedTuple):
    """What each key head of a sequence of few new tokens attends to: pages that `topk_pages` chooses."""

    topk: int
    first: int = 1
    local: int = 2


class Options(NamedTuple):
    """What an engine is made with."""

    # What layers see less than the model's own: a pattern is intersected with that of each, pages are chosen.
    restrict: Pattern | PageChoice | None = None
    kept_mass: bool = False  # whether the mass that chosen pages keep is added up
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
    record, restrict, mass = given.get("record"), given.get("restrict"), given.get("kept_mass", False)
    if record is not None and not isinstance(record, str):
        raise ValueError(f"record must be the name of a file; got {show(record)}")
    found = None if restrict is None else restriction(restrict)
    if not isinstance(mass, bool) or (mass and not isinstance(found, PageChoice)):
        raise ValueError(f"kept_mass must be True or False, and False without topk_pages; got {show(mass)}")
    return Options(found, mass, record)


@cache
def restriction(text: str) -> Pattern | PageChoice:
    """What a restriction names, of which the log says once that it approximates.

    Raises:
        ValueError: it names none.
    """
    window, pages = (form.fullmatch(text) if isinstance(text, str) else None for form in (FORM, PAGES))
    made: Pattern | PageChoice
    if window is not None:
        made = SlidingWindow.of_size(int(window["window"]), sinks=int(window["sinks"] or 0))
    elif pages is not None:
        made = PageChoice(**{name: int(x) for name, x in pages.groupdict().items() if x is not None})
        if made.topk < made.first + made.local:
            raise ValueError(
                f"topk_pages must be at least first + local = {made.first + made.local}, which are always kept; got "
                f"{show(text)}"
            )
    else:
        raise ValueError(
            'restrict must be "window:KEYS", "window:KEYS,sinks:KEYS" or "topk_pages:PAGES,first:PAGES,local:PAGES"; '
            f"got {show(text)}"
        )
    getLogger("vllm.gossamer").warning(
        "gossamer: restrict=%s: layers see no more than this, which approximates the model", text
    )
    return made
