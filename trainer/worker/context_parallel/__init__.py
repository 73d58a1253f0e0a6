"""Ranks that share each sequence: which of its tokens each has, and how attention still sees all of them."""
