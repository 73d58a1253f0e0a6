"""One process per rank: the only part of the trainer that imports torch."""
