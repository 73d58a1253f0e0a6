"""How ranks and attempts end, and what a failure means."""
