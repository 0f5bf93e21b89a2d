"""The forward of gated attention: windows, and gathered keys that live in a tile of queries."""
