"""Restores: candidates, who reads what, verified buffers, delivery into tensors."""
