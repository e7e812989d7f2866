"""Real frameworks around the optimizer. A package: its conftest must not take the place of tests/conftest.py."""
