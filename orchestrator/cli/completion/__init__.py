"""Shell completion: the scripts, and what they ask `orch` for at every Tab."""
