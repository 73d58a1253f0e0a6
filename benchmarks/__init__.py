"""Benchmarks: ratios to a limit or a peer in the same run, with losing rows kept."""
