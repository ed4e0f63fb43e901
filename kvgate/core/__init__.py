"""The rules, as values and functions: no IO, no clock, no log, standard library alone."""
