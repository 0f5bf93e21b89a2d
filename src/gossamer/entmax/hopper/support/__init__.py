"""The kernel that selects contenders of alpha-entmax and of the k largest scores: see docs/kernels/entmax.md."""
