"""Compute one attention call, its steps, its statistics, its matrix or its plan."""
