"""The parts that all kernels in CuTe DSL share: instructions, tiles, rings, items, and the store of compiled kernels.

An edit here compiles every kernel again; an edit of an operation's own sources compiles its kernels alone: see `store`.
"""
