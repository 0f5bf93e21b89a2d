"""Attention over a window and over keys that live for a while, each under a gate: SparseK's."""
