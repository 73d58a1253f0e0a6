"""PURE: costs of the built-in model: floating-point operations, stages and micro-batches."""
