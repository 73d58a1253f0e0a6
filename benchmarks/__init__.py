"""Benchmarks: ratios to a limit or another program in the same run, including the rows where orch loses."""
