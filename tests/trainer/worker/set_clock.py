"""Clock that a test sets."""


class SetClock:
    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, last: float) -> float:
        return last - first
