"""Kernels that gather the columns which rows keep, for patterns whose tiles would be nearly empty."""
