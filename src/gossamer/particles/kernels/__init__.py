"""Kernels of particles, in CuTe DSL: one source for torch and JAX."""
