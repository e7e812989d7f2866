"""Benchmarks and the demo. ``python -m bench`` measures, ``python -m bench.demo`` shows; nothing here is installed."""

import os

# torch's profiler, which counts bytes, tells of its every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
