"""PURE: costs of the built-in model: parameters, floating-point operations, bytes."""
