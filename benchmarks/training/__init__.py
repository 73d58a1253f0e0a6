"""How long a step takes, beside torch's own tools in a bare loop."""
