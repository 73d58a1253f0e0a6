"""The coordinator of a large job, fed by agents that only seem to have ranks."""
