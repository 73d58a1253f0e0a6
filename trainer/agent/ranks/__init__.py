"""The ranks of one node: what their agent knows of each, how they end, and how they are made to."""
