"""Jobs in a scheduler: their specifications, states and owners."""
