"""The flight records of collectives: asked of ranks, read, and compared."""
