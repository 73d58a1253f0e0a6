"""Node agent: one process per node that starts, watches, stops and restarts ranks. It never imports torch."""
