"""The thresholds and the kept keys of all prefixes of a row of scores, by Triton kernels."""
