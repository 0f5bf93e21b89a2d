"""Running random calls: what comes of one, memory in which they run, and counts.

A family of calls is a module `soak_<family>.py` of two functions: `draw(seed, device)` gives a `Drawn`, and `run(call)`
its `Outcome`. `run` gives what computes and compares a call to `outcome_of`, which turns an error into an outcome:
a refusal that the family lists, or else something wrong. Every process that runs calls enters `prepared` first.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.plan import partition

IN_PARTS = [False]  # whether the call of `attention` that is run is computed in parts; read by `prepared`


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
        return outcome._replace(wrong=f"refused: {type(error).__name__}: {_raised(error)}")
    except Exception as error:
        return outcome._replace(wrong=f"{type(error).__name__}: {_raised(error)}")


def _raised(error: Exception) -> str:
    """The message of an error, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{message[:400]} ({last.filename.rsplit('/', 2)[-2]}/{last.filename.rsplit('/', 1)[-1]}:{last.lineno})"


@contextmanager
def prepared() -> Iterator[None]:
    """Fill new memory with NaN, and choose parts, whatever they cost, for the calls for which `run` says so."""
    kept: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        kept.append((owner, name, original))
        setattr(owner, name, make(original))

    def fill(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.fill_(math.nan)
        return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

    def poisoned(original: Any) -> Any:
        return lambda *a, **k: fill(original(*a, **k))

    def cheap(original: Any) -> Any:
        return lambda *a: 0.0 if IN_PARTS[0] else original(*a)

    def parted(original: Any) -> Any:
        def cheaper(found: Any, pattern: Any, p: Any, sizes: Any, cost: Any) -> Any:
            if IN_PARTS[0]:
                cost.call = lambda *a, **k: math.inf
            return original(found, pattern, p, sizes, cost)

        return cheaper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        replace(owner, name, poisoned)
    replace(partition, "_classes_cost", cheap)
    replace(partition, "_cheaper", parted)
    try:
        yield
    finally:
        for owner, name, original in reversed(kept):
            setattr(owner, name, original)


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
