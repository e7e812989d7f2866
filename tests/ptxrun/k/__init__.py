"""Sample kernels for the interpreter's own tests."""
