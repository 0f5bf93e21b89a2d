"""Compiled kernels as targets of XLA's foreign function interface, named by what they are made from.

Those in CuTe DSL are targets of their own; those in Triton are attributes of the one target that JAX has for them.

A target is registered once in a process, for all calls of its kernel, of any sizes: numbers are attributes. Programs
that are exported hold the name alone: the process that runs them registers what they name by `register`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import RLock
from typing import Any, NamedTuple, cast

import jax

from gossamer.cute import store
from gossamer.cute.parameters import Parameter, Role
from gossamer.kernels.hopper import missing_packages
from gossamer.kernels.launch import ALIGNMENT, Kernel, Step
from gossamer.plan.table import load

PACKAGE = "jax-tvm-ffi"
INSTALL = "in a checkout of gossamer: pip install '.[jax,hopper]'"
PROCESSORS = 132  # of an H100 or H200, where JAX does not say how many a GPU has
MOST = 1024  # handlers of that package in a process, those of others among them


class Driver(NamedTuple):
    """Where kernels run, and what makes them."""

    platform: str  # as `lax.platform_dependent` calls it
    registry: str  # as a registration does
    function: Callable[..., Any]  # of (kernel of a step, roles): what TVM-FFI calls
    name: Callable[..., str]  # likewise


HOPPER, TRITON = "hopper", "triton"


def kind_of(kernel: Kernel) -> store.Kernel:
    """The kind of a kernel that a step runs: one of attention for Hopper, or of an operation's module."""
    module = "gossamer.kernels.hopper.compiled" if kernel.implementation == HOPPER else kernel.implementation
    kind = getattr(importlib.import_module(module), kernel.name, None)
    assert isinstance(kind, store.Kernel), f"no kernel {kernel.name} of {kernel.implementation} runs from JAX"
    return kind


def arrays(kernel: Kernel) -> tuple[Parameter, ...]:
    """The roles of the arrays among the arguments of a kernel that a step runs."""
    of_key = kind_of(kernel).arrays
    assert of_key is not None, f"{kernel.name} of {kernel.implementation} is not called from JAX"
    return of_key(*kernel.key)


def _function(kernel: Kernel, roles: tuple[Role, ...]) -> Any:
    return kind_of(kernel).flat(roles)(*kernel.key)


def _name(kernel: Kernel, roles: tuple[Role, ...]) -> str:
    return f"gossamer_{kernel.name}_{kind_of(kernel).flat(roles).digest(*kernel.key)}"


driver = Driver("cuda", "gpu", _function, _name)
_lock = RLock()
_registered: dict[str, int] = {}  # with how many numbers


class Chip(NamedTuple):
    """What a plan asks of a GPU."""

    sm: int  # compute capability, 10 * major + minor
    processors: int


@cache
def chip() -> Chip | None:
    """The facts of the first CUDA device that this process computes on; None where it has none."""
    try:
        device, *_ = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    major, minor = str(device.compute_capability).split(".")
    return Chip(10 * int(major) + int(minor), int(getattr(device, "core_count", PROCESSORS)))


class TritonCall(NamedTuple):
    """A call of a kernel in Triton."""

    target: str
    attributes: dict[str, Any]


def triton(step: Step, places: Mapping[str, int], pointers: int) -> TritonCall:
    """The call of a kernel in Triton that a step runs: of its arrays, then of its results, which are `pointers`.

    Args:
        places: of each array of the step, which of them it is.
    """
    from jaxlib import gpu_triton as library

    from gossamer.kernels.ptx import call_of

    gpu = chip()
    assert gpu is not None, "a kernel in Triton is compiled for a GPU that is there"
    call = call_of(cast(Any, load(TRITON)).function(step.kernel.name), step, gpu.sm, places, pointers)
    kernel = library.TritonKernel(call.name, call.warps, 1, call.shared, call.text, "", gpu.sm)
    given = [library.create_array_parameter(0, ALIGNMENT)] * pointers
    given += [library.create_scalar_parameter(x.value, x.type) for x in call.numbers]
    opaque = zlib.compress(library.TritonKernelCall(kernel, *call.grid, given).to_proto(call.name, b""))
    return TritonCall("triton_kernel_call_ffi", {"name": call.name, "opaque": opaque})


@cache
def missing_for_triton() -> list[str]:
    """What of the packages that run kernels in Triton from JAX is not installed."""
    loaded = load(TRITON)
    if isinstance(loaded, str):
        return [f"needs the package triton, which compiles them: {loaded}"]
    from jaxlib import gpu_triton

    return [] if hasattr(gpu_triton, "TritonKernel") else ["jaxlib's CUDA plugin has no target for kernels in Triton"]


@cache
def missing() -> list[str]:
    """What of the packages that run kernels from JAX is not installed."""
    found = list(missing_packages())
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found.append(f"needs the package {PACKAGE} ({INSTALL}), which is not installed")
    return found


def target(kernel: Kernel, roles: Sequence[Role], numbers: int) -> str:
    """The name of a kernel's target, compiled and registered where it was not.

    Args:
        numbers: how many it takes behind its arrays: attributes `number(0)`, `number(1)` and so on.

    Raises:
        RuntimeError: the process has registered as many as there can be.
    """
    of = tuple(roles)
    return registered(driver.name(kernel, of), lambda: driver.function(kernel, of), numbers)


def registered(name: str, make: Callable[[], Callable[..., Any]], numbers: int) -> str:
    """The name, by which the function is registered that `make` gives: it is asked where none was.

    Args:
        numbers: as for `target`.

    Raises:
        RuntimeError: as `target` does.
    """
    if name not in _registered:
        with _lock:
            if name not in _registered:
                _register(name, make(), numbers)
    assert _registered[name] == numbers, f"{name} takes {_registered[name]} numbers, got {numbers}"
    return name


def number(at: int) -> str:
    """The name of an attribute."""
    return f"n{at:03d}"


def _register(name: str, function: Any, numbers: int) -> None:
    from jax_tvm_ffi import register_ffi_target, registered_count

    if registered_count() >= MOST:
        raise RuntimeError(
            f"{MOST} functions are registered with {PACKAGE} in this process, which is all that it takes: "
            f"this kernel, {name}, cannot be called"
        )
    spec = ["args", "rets", *(f"attrs.{number(at)}" for at in range(numbers))]
    register_ffi_target(name, function, spec, platform=driver.registry, allow_cuda_graph=True)
    _registered[name] = numbers
