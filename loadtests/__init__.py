"""Long runs: attacks, chaos and benchmarks. Each prints a table; none is a timed test."""
