"""Benchmarks and the demo. ``python -m bench`` measures, ``python -m bench.demo`` shows; nothing here is installed."""
