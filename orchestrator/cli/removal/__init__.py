"""`orch rm`: what of a run lies where, whether it may go, and how it goes."""
