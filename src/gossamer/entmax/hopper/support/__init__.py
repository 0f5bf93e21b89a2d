"""The kernel of candidates, supports and the k largest scores: see docs/kernels/entmax.md."""
