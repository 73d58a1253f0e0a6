"""Restores: candidates, read assignment, verified buffers, and delivery into tensors."""
