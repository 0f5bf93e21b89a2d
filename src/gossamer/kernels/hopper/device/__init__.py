"""All that kernels are compiled from: its text, with the compiler's version, is in the name of a compiled kernel.

Nothing here imports anything of gossamer but what is here, so that an edit of what calls the kernels compiles none
again. Configurations are data and import no compiler.
"""
