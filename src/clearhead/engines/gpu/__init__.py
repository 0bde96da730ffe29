"""Engines for a GPU. None of them has run on one yet: the Triton kernels are tested in an
interpreter and compiled."""
