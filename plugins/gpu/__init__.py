"""Kernels in the Triton language: how an operator's launches are declared, and everything that is derived from that."""
