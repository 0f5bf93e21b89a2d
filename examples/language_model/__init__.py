"""A small language model on real text, with sparse and with dense attention side by side."""
