"""Benchmarks: tables of ratios within one run, never assertions about time."""
