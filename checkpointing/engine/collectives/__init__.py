"""Rank communication: process group, messages, and failures of ranks."""
