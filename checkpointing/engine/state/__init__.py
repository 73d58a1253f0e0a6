"""A rank's state before it is written: plan, layout, copies in the arena, and checks on the values."""
