"""A rank's state on its way into the arena: the plan, the layout, the copies, and what is seen of the values."""
