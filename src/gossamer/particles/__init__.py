"""Particles: sums over all neighbours within a radius, exactly and with gradients, on arrays of JAX or torch."""

from gossamer.particles.attention import neighbor_attention
from gossamer.particles.cells import Cells
from gossamer.particles.laws import Gaussian, RadialKernel, ShortRangeGravity
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.radial import radial_force, radial_sum

__all__ = ["Cells", "Gaussian", "Neighbors", "ShortRangeGravity", "neighbor_attention", "radial_force"]
__all__ += ["RadialKernel", "radial_sum"]
