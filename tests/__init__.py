"""The tests of kvgate."""
