"""Jobs in a scheduler: what is asked for, what is known, whose they are."""
