"""What comes of random calls: outcomes, counts of them, and errors that are refusals. No framework is imported.

A family of calls is a module `soak_<family>.py` of two functions: `draw(seed, device)` gives a `Drawn`, and `run(call)`
its `Outcome`. `run` gives what computes and compares a call to `outcome_of`, which turns an error into an outcome:
a refusal that the family lists, or else something wrong.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

Mistake = tuple[type[Exception], str]  # the error that refuses it, and what its message holds


class Outcome(NamedTuple):
    """What came of a call."""

    seed: int
    kind: str  # within its family: of a pattern, or a form
    implementation: str
    refused: str | None  # the reason
    wrong: str | None  # what is wrong
    description: str  # of the call
    family: str = "attention"


class Drawn(Protocol):
    """What `draw` of a family gives: a call that is told by its seed and device alone."""

    @property
    def seed(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def implementation(self) -> str | None: ...
    def description(self) -> str: ...


def options_of(call: Any, *skip: str) -> str:
    """What a call is drawn with beside some of its fields, as text; what is None, False or empty is left out."""
    given = {name: x for name, x in call._asdict().items() if name not in skip}
    return ", ".join(f"{name}={x}" for name, x in given.items() if not (x is None or x is False or x == ""))


def begun(family: str, call: Drawn) -> Outcome:
    """The outcome of a call of which nothing is wrong yet."""
    return Outcome(call.seed, call.kind, call.implementation or "None", None, None, call.description(), family)


def outcome_of(
    outcome: Outcome, compute: Callable[[Outcome], Outcome], refusal: Callable[[ValueError], str | None]
) -> Outcome:
    """What `compute` says of a call, or what its error means.

    Args:
        outcome: of `begun`.
        compute: computes and compares a call; gives the outcome with what is wrong, or how it was computed.
        refusal: the reason for which the call may be refused with such an error; None where there is none.
    """
    try:
        return compute(outcome)
    except ValueError as error:
        name = refusal(error)
        if name is not None:
            return outcome._replace(refused=name)
        return outcome._replace(wrong=f"refused: {type(error).__name__}: {raised(error)}")
    except Exception as error:
        return outcome._replace(wrong=f"{type(error).__name__}: {raised(error)}")


def outcome_of_mistakes(
    family: str, call: Any, compute: Callable[[Any, Outcome], Outcome], mistakes: Mapping[str, Mistake],
    refused: Callable[[Any, Exception], str | None] = lambda call, error: None,
) -> Outcome:  # fmt: skip
    """What `compute` says of a call that may be given a mistake, which has to be refused by its own error.

    Args:
        refused: the reason for which a call without one may be refused with such an error.
    """
    expected, message = mistakes.get(call.mistake or "", (None, ""))

    def checked(outcome: Outcome) -> Outcome:
        try:
            return compute(call, outcome)
        except (TypeError, ValueError) as error:
            if expected is not None and isinstance(error, expected) and re.search(message, str(error)):
                return outcome._replace(refused=f"mistake: {call.mistake}")
            reason = refused(call, error)
            if reason is None:
                raise
            return outcome._replace(refused=reason)

    return outcome_of(begun(family, call), checked, lambda error: None)


def raised(error: Exception) -> str:
    """The message of an error, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    # The name of code that was made at run time has no folder.
    return f"{message[:400]} ({'/'.join(last.filename.split('/')[-2:])}:{last.lineno})"


class Counts:
    """What came of the calls so far."""

    def __init__(self) -> None:
        self.calls, self.refused, self.wrong = 0, Counter[str](), 0
        self.by: dict[str, dict[str, Counter[str]]] = {"family": {}, "implementation": {}, "kind": {}}

    def add(self, one: Outcome) -> None:
        """Count an outcome."""
        self.calls += 1
        outcome = "wrong" if one.wrong else "refused" if one.refused else "right"
        self.wrong += one.wrong is not None
        if one.refused:
            self.refused[one.refused] += 1
        for group, name in (("family", one.family), ("implementation", one.implementation), ("kind", one.kind)):
            self.by[group].setdefault(name, Counter())[outcome] += 1

    def text(self) -> str:
        """The counts as text."""
        lines = [f"{self.calls} calls, {sum(self.refused.values())} refused by name, {self.wrong} wrong"]
        for group, found in self.by.items():
            lines.append(f"by {group}:")
            for name, n in sorted(found.items()):
                lines.append(f"  {name:24} {n['right']:7} right {n['refused']:6} refused {n['wrong']:6} wrong")
        if self.refused:
            lines.append("refused:")
            lines += [f"  {n:7} {name}" for name, n in self.refused.most_common()]
        return "\n".join(lines)
