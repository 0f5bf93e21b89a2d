"""`python -m gossamer.cli`: the same as `gossamer`."""

from gossamer.cli import main

main()
