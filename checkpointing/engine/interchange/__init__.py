"""Import and export of checkpoints in other formats: safetensors and torch files."""
