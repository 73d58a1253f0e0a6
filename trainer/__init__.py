"""Everything that runs inside the job: agents, ranks, and the files both sides agree on."""
