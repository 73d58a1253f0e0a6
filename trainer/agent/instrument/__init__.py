"""Start-up module for users' programs: it reports their progress to the agent, with the standard library alone."""
