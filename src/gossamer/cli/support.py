"""The support table of the documentation, written from the capabilities that dispatch itself reads."""

from __future__ import annotations

from gossamer.plan.capability import Capability
from gossamer.plan.problem import SCORE_TERMS

BEGIN = "<!-- support table: made by docs/make_support_table.py -->"
END = "<!-- end of the support table -->"


def support_table() -> str:
    """The table of what each implementation supports, in Markdown with one column an implementation."""
    from gossamer.plan.table import NAMES, load

    loaded = {name: load(name) for name in NAMES}
    failed = [f"{name}: {reason}" for name, reason in loaded.items() if isinstance(reason, str)]
    if failed:
        raise ValueError(f"the support table needs every implementation: {'; '.join(failed)}")
    limits = [candidate.capability for candidate in loaded.values() if not isinstance(candidate, str)]
    lines = ["| | " + " | ".join(f"`{name}`" for name in NAMES) + " |"]
    lines.append("|---" * (len(limits) + 1) + "|")
    for title, cell in TABLE_ROWS:
        lines.append(f"| {title} | " + " | ".join(cell(limit) for limit in limits) + " |")
    return "\n".join(lines) + "\n"


def replace_table(text: str) -> str:
    """`text` with what stands between the two markers replaced by the present table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no support table: the lines {BEGIN!r} and {END!r} mark its place")
    return f"{head}{BEGIN}\n{support_table()}{END}{tail}"


DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def _devices(limit: Capability) -> str:
    text = ", ".join(DEVICES[device] for device in sorted(limit.devices))
    if limit.min_sm is None:
        return text
    return f"{text} (sm_{limit.min_sm})" if limit.max_sm == limit.min_sm else f"{text} (sm_{limit.min_sm} and later)"


def _all_or(names: frozenset[str], every: tuple[str, ...]) -> str:
    if names == frozenset(every):
        return "all"
    return ", ".join(name for name in every if name in names) or "none"


def _deterministic(limit: Capability) -> str:
    on = sorted(limit.deterministic & limit.devices)  # only the devices it runs on count
    return "yes" if len(on) == len(limit.devices) else ", ".join(DEVICES[device] for device in on) or "no"


def head_sizes(limit: Capability) -> str:
    """The head sizes D and E, in words."""
    if limit.max_head_dim is None:
        return "any"
    narrower = "" if limit.max_float32_head_dim is None else f" (float32: {limit.max_float32_head_dim})"
    return f"1 to {limit.max_head_dim}{narrower}"


TABLE_ROWS = (
    ("devices", _devices),
    ("types", lambda limit: ", ".join(sorted(limit.dtypes))),
    ("head sizes D, E", head_sizes),
    (
        "score terms (" + ", ".join(f"`{term}`" for term in SCORE_TERMS) + ")",
        lambda limit: _all_or(limit.score_terms, SCORE_TERMS),
    ),
    ("backward", lambda limit: "yes" if limit.backward else "no"),
    ("deterministic mode", _deterministic),
)
