"""The cosmic web: a differentiable P3M N-body code on arrays of JAX, with its short-range force from `particles`."""

try:
    import jax as _jax  # noqa: F401  (what is missing is said before anything else fails)
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError(
        "gossamer.cosmos needs jax; in a checkout of gossamer: pip install '.[jax,cosmos]'", name="jax"
    ) from error

from gossamer.cosmos.box import Box, State
from gossamer.cosmos.cosmology import Cosmology, Growth, growth
from gossamer.cosmos.forces import Gas
from gossamer.cosmos.initial import initial_conditions
from gossamer.cosmos.power import PowerTable, linear_power
from gossamer.cosmos.snapshot import Snapshot, load, save
from gossamer.cosmos.spectrum import PowerSpectrum, power_spectrum
from gossamer.cosmos.steps import evolve

__all__ = ["Box", "Cosmology", "Gas", "Growth", "PowerSpectrum", "PowerTable", "Snapshot", "State", "evolve"]
__all__ += ["growth", "initial_conditions", "linear_power", "load", "power_spectrum", "save"]
