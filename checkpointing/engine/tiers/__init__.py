"""Copies from tier to tier beside training, and the removal of debris."""
