"""What is kept of an incident before anything is killed."""
