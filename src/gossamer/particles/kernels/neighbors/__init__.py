"""Kernels that list the neighbours of particles on a device (CuTe DSL): nothing of a framework."""
