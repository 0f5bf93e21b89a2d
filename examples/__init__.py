"""What gossamer is used for, as programs: run from the root of the repository."""
