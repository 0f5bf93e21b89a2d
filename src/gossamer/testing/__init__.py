"""Cases, inputs and tolerances, shared by the tests, the benchmarks and users; `cases` needs numpy alone."""
