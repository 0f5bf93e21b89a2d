"""The kernel that selects candidates of alpha-entmax and of the k largest scores: see docs/kernels/entmax.md."""
