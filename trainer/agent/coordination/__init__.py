"""The coordinator: one per job, it gathers agents, orders generations and ends the attempt."""
