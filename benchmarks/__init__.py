"""Benchmarks: ratios to a limit or a peer in the same run, including the rows that lose."""
