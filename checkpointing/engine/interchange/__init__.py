"""Checkpoints from and to other formats: safetensors and torch files."""
