"""Weights from and for other programs: imports, exports, Hugging Face's names."""
