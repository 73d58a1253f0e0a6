"""Restores: candidates, read assignment, verified buffers, delivery into tensors."""
