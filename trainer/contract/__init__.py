"""What controller, agents and ranks agree on: file names, messages, exit codes. Standard library only."""
