"""The coordinator of a large job, with agents whose ranks are synthetic."""
