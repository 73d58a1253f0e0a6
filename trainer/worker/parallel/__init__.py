"""The mesh of ranks, and how models are wrapped for their data-parallel ranks."""
