"""Emulated hosts and links: several machines on this one, for tests and benchmarks."""
