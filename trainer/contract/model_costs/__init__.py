"""PURE: what the built-in model costs: parameters, floating-point operations, bytes."""
