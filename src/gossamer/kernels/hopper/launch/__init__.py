"""From tensors and a layout to kernel calls."""
