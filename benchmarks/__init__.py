"""Programs that measure: ratios against a limit or a peer in the same run, losing rows kept."""
