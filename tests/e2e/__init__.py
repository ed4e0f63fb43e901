"""Tests on the real engine, of every promise in the README."""
