"""Exchange of weights with other programs: imports, exports, Hugging Face names."""
