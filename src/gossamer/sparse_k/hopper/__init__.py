"""The forward of SparseK attention: windows, and gathered keys that live in a tile of queries."""
