"""Other libraries' forms of the same things: each module converts in and out, and imports its library alone."""
