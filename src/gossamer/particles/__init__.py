"""Particles: sums over all neighbours within a radius, exactly and with gradients, on arrays of JAX or torch.

`radial.py` and `attention.py`: the functions; `laws.py`: what a pair adds. The definition in arrays of any library:
`terms.py`, `attend.py`; by torch `in_torch.py`, `attend_torch.py`, by JAX `in_jax.py`, `attend_jax.py`. `cells.py`
and `groups.py`: which particles are near. `kernels/`: the kernels, which `fused_*.py` and `listed_*.py` call;
`triton/`: those that sort and gather for them, from torch.
"""

from gossamer.particles.attention import neighbor_attention
from gossamer.particles.cells import Cells
from gossamer.particles.laws import Gaussian, RadialKernel, ShortRangeGravity
from gossamer.particles.neighbors import Neighbors
from gossamer.particles.radial import radial_force, radial_sum

__all__ = ["Cells", "Gaussian", "Neighbors", "ShortRangeGravity", "neighbor_attention", "radial_force"]
__all__ += ["RadialKernel", "radial_sum"]
