"""What a process holds after calls of ever new lengths: what is kept of them is bounded, and freed memory goes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROWTH = 64  # MiB over what the process holds after the first calls
CALLS = """
import resource
import torch
import gossamer as gs

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20

for n in range({first}, {last}):
    q = torch.randn(1, 1, n, 8, requires_grad=True)
    gs.attention(q, q, q, gs.SlidingWindow(63)).sum().backward()
    if n == {first} + 500:
        held = resident()
print(resident() - held)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_ever_new_lengths_do_not_grow_the_process() -> None:
    code = CALLS.format(first=1500, last=3500)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert float(done.stdout) < GROWTH, done.stdout
