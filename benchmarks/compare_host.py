"""Host time of small calls beside another version of gossamer, in alternating rounds of one process.

python benchmarks/compare_host.py COMMIT           # or a folder or an archive that holds src/gossamer
python benchmarks/compare_host.py COMMIT --empty   # on a CPU, with kernels that do nothing
python benchmarks/compare_host.py COMMIT --implementations hopper dense

B1 H8 D128, causal, forward, with gradients, and with the backward; and one query (H32 G8 D128) whose keys grow by one
each call, in a cache with room and in one that is copied each time. Microseconds of a call: of each round the median
call of five queues of 40, each queue empty when it begins; of the rounds the median, and of the difference the median
of theirs. Every other round begins with the other version. Results of both are compared with attention in float64
first, except with --empty, where there are none.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CALLS, QUEUES = 40, 5
LENGTHS, FIRST_KEYS = (26, 200, 512), 300
ALLOWED_US, ALLOWED_SHARE = 0.5, 0.03  # whichever is more
LOOSE = 2**-5  # of the largest result: two roundings of bfloat16 and their order

Call = Callable[[], Any]


@dataclass(frozen=True)
class Side:
    """A version: `load` gives its modules, by their names inside of the package."""

    package: Any
    load: Callable[[str], Any]

    def named(self, implementation: str | None) -> str | None:
        """What the version calls an implementation."""
        from gossamer.bench.against import name_among

        return name_among(self.load("plan.table").NAMES, implementation)

    def attention(self, *x: Tensor, **options: Any) -> Callable[..., Tensor]:
        """A causal call, by a pattern of the version's own that is kept."""
        attention, pattern = self.package.attention, self.package.Causal()
        return lambda q, k, v: attention(q, k, v, pattern, **options)


@dataclass(frozen=True)
class Row:
    """`queue(call, at)`: the calls of a queue, the `at`-th of its row, given what `Side.attention` returns."""

    name: str
    queue: Callable[[Callable[..., Tensor], int], list[Call]]
    check: Callable[[Callable[..., Tensor]], None]


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> tuple[Tensor, ...]:
    """Causal attention and its gradients in float64; one query is the last."""
    x = [y.detach().double().requires_grad_(dout is not None) for y in (q, k, v)]
    out = F.scaled_dot_product_attention(*x, is_causal=q.shape[2] > 1, enable_gqa=True)
    return (out,) if dout is None else (out, *torch.autograd.grad(out, x, dout.double()))


def compare(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for result, want in zip(found, right, strict=True):
        error = (result.double() - want).abs().max() / want.abs().max()
        if not error <= LOOSE:
            raise SystemExit(f"compare_host.py: a result is wrong: error {error:.3f}")


def fixed_rows(N: int, device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Rows of one number of positions."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (torch.randn((1, 8, N, 128), device=device, generator=generator).to(dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def backward(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = call(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    runs: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "forward": lambda call: call(q, k, v),
        "with gradients": lambda call: call(*leaves),
        "and backward": backward,
    }
    for name, run in runs.items():
        yield Row(
            f"N {N}, {name}",
            lambda call, at, run=run: [lambda: run(call)] * CALLS,  # type: ignore[misc]
            lambda call: compare(backward(call), exact(q, k, v, dout)),
        )


def growing_rows(device: str, dtype: torch.dtype, most: int) -> Iterator[Row]:
    """One query that sees a key more in each call, up to `most` keys."""
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn((1, 32, 1, 128), device=device, generator=generator).to(dtype)
    k, v = (torch.randn((1, 8, most, 128), device=device, generator=generator).to(dtype) for _ in range(2))

    def some(x: Tensor, keys: int, copied: bool) -> Tensor:
        return x[:, :, :keys].clone(memory_format=torch.contiguous_format) if copied else x[:, :, :keys]

    for name, copied in (("with room", False), ("copied", True)):

        def queue(call: Callable[..., Tensor], at: int, copied: bool = copied) -> list[Call]:
            numbers = range(FIRST_KEYS + at * CALLS, FIRST_KEYS + (at + 1) * CALLS)
            given = [(q, some(k, n, copied), some(v, n, copied)) for n in numbers]
            return [lambda x=x: call(*x) for x in given]  # type: ignore[misc]

        def check(call: Callable[..., Tensor], copied: bool = copied) -> None:
            x = q, some(k, FIRST_KEYS - 1, copied), some(v, FIRST_KEYS - 1, copied)
            compare((call(*x),), exact(*x))

        yield Row(f"one query, keys grow, cache {name}", queue, check)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spent_us(calls: list[Call], device: str) -> tuple[list[float], bool]:
    """(microseconds of each call, whether the device then went on for longer than all of them took)."""
    times = []
    wait(device)
    clock = time.perf_counter
    for call in calls:
        begin = clock()
        call()
        times.append(clock() - begin)
    end = clock()
    wait(device)
    return [1e6 * spent for spent in times], clock() - end > sum(times)


def measured(row: Row, sides: list[Callable[..., Tensor]], device: str, rounds: int) -> tuple[list[list[float]], bool]:
    """(of each side the median of each round, whether the device was what took the time)."""
    found: list[list[float]] = [[] for _ in sides]
    drained = []
    for side in sides:
        spent_us(row.queue(side, 0), device)
    gc.disable()
    try:
        for turn in range(rounds):
            gc.collect()
            for at in (0, 1) if turn % 2 == 0 else (1, 0):
                times: list[float] = []
                for number in range(QUEUES):
                    more, longer = spent_us(row.queue(sides[at], 1 + turn * QUEUES + number), device)
                    times += more
                    drained.append(longer)
                found[at].append(statistics.median(times))
    finally:
        gc.enable()
    return found, sum(drained) > len(drained) / 2


def refusal(row: Row, call: Callable[..., Tensor], rounds: int) -> str:
    """Why a version does not compute the row, from the first queue to one after the last; empty where it does."""
    try:
        for at in (0, 1 + rounds * QUEUES):
            row.queue(call, at)[0]()
    except ValueError as error:  # each version has an `Unsupported` of its own
        return str(error)
    return ""


def without_device() -> None:
    """What the Hopper launches and Triton ask of a GPU, answered without one. Before gossamer is imported."""
    from triton.runtime.jit import JITFunction, KernelInterface

    torch.cuda.current_device = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda index: 0

    class Launched(SimpleNamespace):
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self.run

    launched = Launched(run=lambda *a, **k: None, function=0, packed_metadata=())
    KernelInterface.__getitem__ = lambda self, grid: lambda *a, **k: launched  # type: ignore[method-assign]
    JITFunction.warmup = lambda self, *a, **k: launched  # type: ignore[method-assign]


def without_kernels(side: Side) -> None:
    """Makes `hopper` and `small` of a version run on a CPU, by kernels that do nothing."""
    from tvm_ffi.testing import nop

    for name in ("hopper", side.named("small")):
        kind = type(side.load(f"kernels.{name}").IMPLEMENTATION)
        kind.unavailable = lambda self: []
        kind.capability = replace(kind.capability, devices=frozenset({"cpu"}), min_sm=None, max_sm=None)
    for name in ("blocked", "reference"):  # which would compute
        type(side.load(f"kernels.{name}").IMPLEMENTATION).unavailable = lambda self: ["left out"]
    type(side.load("kernels.hopper.compiled").merge).__call__ = lambda self, *key: nop


def report(name: str, found: list[list[float]], device_bound: bool) -> bool:
    """Prints a row; whether it is within what is allowed."""
    now, before = (statistics.median(times) for times in found)
    differences = [a - b for a, b in zip(*found, strict=True)]
    more = statistics.median(differences)
    within = more <= max(ALLOWED_US, ALLOWED_SHARE * before)
    verdict = "within" if within else "SLOWER"
    spread = " ".join(f"{x:+.2f}" for x in differences)
    print(
        f"{name:48s} {now:9.2f} {before:9.2f} {more:+9.2f} {100 * more / before:+7.1f} %  {verdict}"
        f"{' (the device took longer than the host)' * device_bound}  rounds: {spread}", flush=True,
    )  # fmt: skip
    return within


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", metavar="COMMIT", help="a commit, or a folder or archive that holds src/gossamer")
    parser.add_argument("-N", "--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--implementations", nargs="+", default=[None], help="by name; by default the one chosen")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--empty", action="store_true", help="on a CPU, with kernels that do nothing")
    a = parser.parse_args(given)
    if a.empty:
        without_device()
    import gossamer
    from gossamer.bench.against import Version, source_of

    device = "cuda" if torch.cuda.is_available() and not a.empty else "cpu"
    dtype = torch.bfloat16 if device == "cuda" or a.empty else torch.float32
    with source_of(a.against) as source:
        version = Version(source)
        sides = [
            Side(gossamer, lambda name: importlib.import_module(f"gossamer.{name}")),
            Side(version.package, version.load),
        ]
        if a.empty:
            for side in sides:
                without_kernels(side)
        print(f"{'microseconds on the host':48s} {'now':>9s} {'before':>9s} {'more':>9s}   against {source.label}")
        slower = []
        for implementation in a.implementations:
            calls = [side.attention(implementation=side.named(implementation)) for side in sides]
            rows = [row for N in a.lengths for row in fixed_rows(N, device, dtype)]
            for row in (*rows, *growing_rows(device, dtype, FIRST_KEYS + (a.rounds * QUEUES + 2) * CALLS)):
                name = row.name + (f", {implementation}" if implementation else "")
                refused = [refusal(row, call, a.rounds) for call in calls]
                if any(refused):
                    print(f"{name:48s} left out; now: {refused[0] or 'runs'}; before: {refused[1] or 'runs'}")
                    if not all(refused):
                        slower.append(f"{name} (one version alone runs)")
                    continue
                for call in [] if a.empty else calls:
                    row.check(call)
                if not report(name, *measured(row, calls, device, a.rounds)):
                    slower.append(name)
    allowed = f"{ALLOWED_US} us or {100 * ALLOWED_SHARE:g} %"
    print(f"slower by more than {allowed}: {'; '.join(slower)}" if slower else f"all rows within {allowed}")
    return 1 if slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
