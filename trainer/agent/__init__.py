"""One process per node: starts, watches, stops and restarts the node's ranks. No torch in here."""
