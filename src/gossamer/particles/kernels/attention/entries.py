"""The entry of the kernels, as the compiler is called for it."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from gossamer.cute.entry import Entry, compact
from gossamer.kernels.hopper.device.entries import gather_arguments
from gossamer.kernels.hopper.device.gather.configurations import GatherConfig
from gossamer.particles.kernels.attention.columns import ParticleColumns
from gossamer.particles.kernels.attention.forward import ParticleForward
from gossamer.particles.kernels.attention.numbers import POINT
from gossamer.particles.kernels.attention.query import ParticleQuery

KERNELS = {"forward": ParticleForward, "query": ParticleQuery, "columns": ParticleColumns}


def attention(config: GatherConfig) -> Entry:
    """A kernel over the lists of groups of particles: the forward, dQ, or dK and dV."""
    s = cute.sym_int
    lists = compact(Int32, s()), *[compact(Float32, s(), POINT) for _ in range(2)], compact(Int32, s())
    arguments = gather_arguments(config, lists, (compact(Float32, s(), s(), POINT),))
    return Entry(KERNELS[config.direction](config), *arguments, *[Float32(1)] * 3)
