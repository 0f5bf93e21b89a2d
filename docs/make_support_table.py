"""Writes the support table between its markers in README.md, or with no argument prints it."""

from __future__ import annotations

import sys
from pathlib import Path

from gossamer.cli.support import replace_table, support_table

README = Path(__file__).parent.parent / "README.md"


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        README.write_text(replace_table(README.read_text()))
    else:
        print(support_table(), end="")


main()
