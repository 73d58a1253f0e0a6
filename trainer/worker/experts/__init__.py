"""Layers whose feed-forward is a mixture of experts: routing, exchange of tokens, and even loads."""
