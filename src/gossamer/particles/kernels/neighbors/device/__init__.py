"""The kernel: what compiled files are made from."""
