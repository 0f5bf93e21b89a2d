"""The work of a launch: items and lists that the kernels read, made once for a layout and kept."""
