"""Flight records of collectives: queried from ranks, parsed and compared."""
