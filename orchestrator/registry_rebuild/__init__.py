"""A new registry made from run directories (`orch db rebuild`)."""
