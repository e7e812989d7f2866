"""Triton kernels, installed as ``fusedaccum.triton_kernels``: ``triton_kernels`` is the name of another project."""
