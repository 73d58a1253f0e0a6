"""Reports of a running rank: progress ticks, work times, metric lines, flight records, stderr."""
