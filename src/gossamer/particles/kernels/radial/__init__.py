"""Sums over all neighbours within a radius, in CuTe DSL: one source for torch and JAX, without matrix products."""
