"""Costs of the built-in model: parameters, floating-point operations and bytes. Pure functions."""
