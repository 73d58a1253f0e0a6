"""Time of a training step, compared with torch's own tools in a bare loop."""
