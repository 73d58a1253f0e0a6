"""Node agent: one process per node that starts, watches, stops and restarts the node's ranks. Never imports torch."""
