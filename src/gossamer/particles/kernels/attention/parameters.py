"""The roles of the arrays among a kernel's arguments, in the order of the call, as `entries` has them."""

from __future__ import annotations

from gossamer.cute.parameters import Parameter, parameters_of
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig

_GRADIENT = "q/4 k/4 v/4 dout/4 terms"
_LISTS = "indices bits particles theirs mine far"
_END = "lengths tile_counter+"
DIRECTIONS = {
    "forward": f"q/4 k/4 v/4 out/4! lse/3! work {_LISTS} sinks part_out! part_lse! {_END}",
    "query": f"{_GRADIENT} dq/4! pull! work {_LISTS} part_dq! {_END}",
    "columns": f"{_GRADIENT} dk/4! dv/4! pull! work segments {_LISTS} part_dk! part_dv! {_END}",
}


def parameters(config: GatherConfig) -> tuple[Parameter, ...]:
    """The arrays among the arguments of a kernel of a configuration."""
    return parameters_of(DIRECTIONS[config.direction])
