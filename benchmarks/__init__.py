"""Benchmarks against the engines themselves and against TorchRL: `make bench`."""
