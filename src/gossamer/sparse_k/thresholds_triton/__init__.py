"""What SparseK keeps of each prefix of a row of scores, by Triton kernels."""
