"""Collection of evidence about an incident before any process is killed."""
