"""The kernels: what compiled files are made from."""
