"""The call of a kernel of sums: its configuration, its numbers, and the columns that particles bring.

The order of the arguments is that of `RadialSums` (`radial/device/kernel.py`): particles, three levels of boxes, order,
whether all positions are known; the result; the sizes of the box, the squared radius, a factor of all sums, and eleven
numbers of the law, whose lengths are in the unit of the cells as those before are. The last is the unit in which a
function that a user wrote gets them.
"""

from __future__ import annotations

import math
from typing import Any

from gossamer.particles.geometry import Sizes
from gossamer.particles.kernels.radial.configurations import LEAST, NUMBERS, OPEN, QUERIES, Own, RadialConfig
from gossamer.particles.kernels.radial.functions import digest
from gossamer.particles.kernels.radial.gravity import coefficients_of
from gossamer.particles.laws import Gaussian, RadialKernel, ShortRangeGravity

CHANNELS = {"sum": 4, "sum_slopes": 2}  # the most channels of a call; more take several calls


def call_of(
    term: str, law: Any, radius: float, box: Sizes, channels: int = 1, values: bool = True, factor: float = 1.0
) -> tuple[RadialConfig, tuple[float, ...]]:
    """(configuration, numbers in order) of the kernel of a term, such as "sum": see `RadialConfig`."""
    softened = isinstance(law, ShortRangeGravity) and law.softening**2 >= LEAST
    own = None
    if isinstance(law, RadialKernel):
        own = Own(digest(law.function), len(law.numbers), law.function)
    queries = 2 * QUERIES if term == "sum" and channels == 1 and own is None else QUERIES
    config = RadialConfig(term, channels, any(size is not None for size in box), softened, queries, values, own)
    sizes = [OPEN if size is None else size for size in (*box, *[None] * (3 - len(box)))]
    law_numbers: list[float] = []
    length = 1.0
    if isinstance(law, Gaussian):
        law_numbers = [-math.log2(math.e) / 2 / law.h / law.h, 1 / law.h / law.h]
    elif isinstance(law, RadialKernel):
        law_numbers, length = list(law.numbers), law.length
    elif isinstance(law, ShortRangeGravity):
        gaussian = [-math.log2(math.e) / (4 * law.split**2), -math.log2(2 * math.sqrt(math.pi) * law.split**3)]
        law_numbers = [law.softening**2, *coefficients_of(law.split), *gaussian]
    numbers = [*sizes, radius * radius, factor, *law_numbers, *[0.0] * (NUMBERS - 1 - len(law_numbers)), length]
    return config, tuple(numbers)
