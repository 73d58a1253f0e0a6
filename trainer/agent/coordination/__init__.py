"""The coordinator, one per job: gathers agents, starts generations and ends the attempt."""
