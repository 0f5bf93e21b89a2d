"""The roles of the arrays among a kernel's arguments, in the order of the call, as `entries` has them."""

from __future__ import annotations

from gossamer.cute.parameters import Parameter
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.kernels.hopper.device.parameters import parameters as gather_parameters

LISTS = [Parameter(name, 0, "read") for name in ("particles", "theirs", "mine", "far")]
PULL = Parameter("pull", 0, "made")


def parameters(config: GatherConfig) -> tuple[Parameter, ...]:
    """The arrays of a kernel that gathers columns, with the lists of particles and the pull on their positions."""
    arrays: list[Parameter] = []
    for parameter in gather_parameters("gather", config):
        if parameter.name == "work" and config.direction != "forward":
            arrays.append(PULL)
        arrays += [parameter, *LISTS] if parameter.name == "bits" else [parameter]
    return tuple(arrays)
