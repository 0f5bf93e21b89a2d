"""Where the warps of a kernel wait: the source page of an Nsight Compute report, instruction by instruction.

    ncu --import REPORT.ncu-rep --page source --csv > report.csv
    python benchmarks/stalls.py report.csv                # instructions with at least 0.4 % of the samples
    python benchmarks/stalls.py report.csv --least 1

Samples of instructions that are not printed are counted to the next one that is. A wait is told at the instruction that
could not issue, which is the one after its cause: behind HGMMA without a reason the warp waits for the tensor cores.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

LANDMARKS = ("HGMMA", "DEPBAR", "SYNCS", "BAR.", "STSM", "FENCE", "UBLKRED", "UTMALDG")


def number(row: dict[str, str], name: str) -> float:
    try:
        return float(row.get(name) or 0)
    except ValueError:  # "n/a"
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="CSV of the source page")
    parser.add_argument("--least", type=float, default=0.4, help="per cent of all samples")
    a = parser.parse_args()
    lines = a.report.read_text().splitlines()
    try:
        head = next(i for i, line in enumerate(lines) if line.startswith('"Address"'))
    except StopIteration:
        parser.error(f"{a.report} has no line of column names that begins with Address: not a source page as CSV?")
    rows = list(csv.DictReader(lines[head:]))
    total = sum(number(row, "# Samples") for row in rows) or 1.0
    reasons = [name for name in rows[0] if name.startswith("stall_") and "Not Issued" not in name]
    carried = 0.0
    for at, row in enumerate(rows):
        samples, code = number(row, "# Samples"), row["Source"].strip()
        carried += samples
        seen = any(mark in code for mark in LANDMARKS) and number(row, "Instructions Executed") > 0
        if 100 * carried / total < a.least or not (seen or 100 * samples / total >= a.least):
            continue
        why = {name[6:]: number(row, name) / total for name in reasons if number(row, name) > max(0.15 * samples, 20)}
        shares = " ".join(f"{name} {100 * share:.1f}" for name, share in sorted(why.items(), key=lambda x: -x[1]))
        print(f"{at:5d} {100 * carried / total:6.2f} %  {code[:72]:72s} {shares}")
        carried = 0.0
    sums = {name[6:]: sum(number(row, name) for row in rows) / total for name in reasons}
    print(
        "all:",
        ", ".join(f"{name} {100 * s:.1f} %" for name, s in sorted(sums.items(), key=lambda x: -x[1]) if s > 0.005),
    )


if __name__ == "__main__":
    main()
