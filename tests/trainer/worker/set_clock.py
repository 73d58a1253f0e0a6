"""A clock that a test sets, for what measures time between marks."""


class SetClock:
    """Stands still until `now` is changed; seconds."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, last: float) -> float:
        return last - first
