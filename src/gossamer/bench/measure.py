"""Times and peak memory of one call, and the dense matrix-product rate that they are held against."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

FLUSH_BYTES = 256 * 2**20  # more than any level-2 cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1536}
ROUNDS = 5
COLD_MS = 20.0  # a call that takes longer needs no other before it to be warm
SLOW_MS = 1000.0  # a call that takes longer is made as often as its budget allows, from its first on

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Quantiles of the time of one call, in milliseconds, over `repeats` calls."""

    p20: float
    p50: float
    p80: float
    repeats: int


def time_call(call: Call, device: torch.device, *, budget_s: float = 0.5, most: int = 50, least: int = 5) -> Timing:
    """Times `call` after two warm-up calls: about `budget_s` of repeats, caches cleared before each on a GPU."""
    measure = _cuda_times if device.type == "cuda" else _cpu_times
    call()
    return _timing(measure(call, _repeats(measure(call, 1)[0], budget_s, most, least)))


def time_in_turns(
    calls: dict[str, Call], device: torch.device, *, budget_s: float = 0.5, most: int = 200, least: int = ROUNDS
) -> dict[str, Timing | Exception]:
    """Times several calls in alternating rounds, so that a clock that drifts falls on all of them alike.

    Each call has about `budget_s` of repeats, spread over the rounds; caches are cleared before each on a GPU. Every
    other round goes backwards, so that none is always behind the same one. Of a call that takes more than `SLOW_MS` the
    first counts, and there may be no other. A call that raises is left out from there on, and its exception stands for
    its times.
    """
    measure = _cuda_times if device.type == "cuda" else _cpu_times
    timings: dict[str, Timing | Exception] = {}
    repeats: dict[str, int] = {}
    cold: dict[str, bool] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        try:
            (once,) = measure(call, 1)
            if once > SLOW_MS:
                times[name] = [once]
                repeats[name] = _repeats(once, budget_s, most, 1) - 1
            else:
                (once,) = measure(call, 1)
                repeats[name] = _repeats(once, budget_s, most, least)
            cold[name] = once < COLD_MS
        except Exception as error:
            timings[name] = error.with_traceback(None)  # whose frames may hold gigabytes
    for turn in range(ROUNDS):
        for name in reversed(calls) if turn % 2 else calls:
            if name in timings:
                continue
            share = repeats[name] * (turn + 1) // ROUNDS - repeats[name] * turn // ROUNDS
            try:
                if cold[name] and share:
                    calls[name]()
                times[name] += measure(calls[name], share)
            except Exception as error:
                timings[name] = error.with_traceback(None)
    return {name: timings[name] if name in timings else _timing(times[name]) for name in calls}


def _repeats(once_ms: float, budget_s: float, most: int, least: int) -> int:
    return int(min(most, max(least, 1000 * budget_s / max(once_ms, 1e-3))))


def medians_in_turns(calls: dict[str, Call], device: torch.device, *, budget_s: float) -> dict[str, float]:
    """The median times of `time_in_turns`, in milliseconds; raises what a call has raised."""
    medians = {}
    for name, taken in time_in_turns(calls, device, budget_s=budget_s).items():
        if isinstance(taken, Exception):
            raise taken
        medians[name] = taken.p50
    return medians


def _timing(times: list[float]) -> Timing:
    ordered = torch.tensor(times, dtype=torch.float64)
    p20, p50, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Timing(p20, p50, p80, len(times))


def _cuda_times(call: Call, repeats: int) -> list[float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _cpu_times(call: Call, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of a large dense matrix product of random numbers: the rate that shares are taken of."""
    n = MATMUL_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * n**3 / (time_call(lambda: a @ b, device).p50 * 1e9)


def reset_peak(device: torch.device) -> int:
    """Starts a new peak and returns the bytes in use now.

    On a CPU whose kernel does not let a process reset its peak, later peaks count from the start of the process.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks that glibc still holds would hide the next peak
    # Linux: 5 sets the high-water mark back to the present size.
    with contextlib.suppress(PermissionError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def device_name(device: torch.device) -> str:
    """The processor in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return f"{next(names, 'CPU')}, {torch.get_num_threads()} threads of {len(os.sched_getaffinity(0))} cores"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
