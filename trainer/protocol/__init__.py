"""Contract between controller, agents and ranks: file names, messages, exit codes. Standard library only."""
