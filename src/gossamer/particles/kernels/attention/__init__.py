"""Kernels of groups of 64 particles: lists name the rows of q and of results, so that nothing is moved for them."""
