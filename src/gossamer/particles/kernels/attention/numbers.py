"""Numbers that kernels of groups of particles and their launches agree on; no compiler is imported."""

POINT = 4  # numbers of a position, and of a sum of steps: three parts and one more
