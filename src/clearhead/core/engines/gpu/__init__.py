"""Engines for a GPU. None has run on a GPU yet; the Triton kernels are tested in Triton's
interpreter, and compiled."""
