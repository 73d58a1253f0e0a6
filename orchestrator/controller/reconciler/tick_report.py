"""What one pass of a controller did."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TickReport:
    """What one pass did; `errors` names runs that could not be served.

    `unreachable` names the kinds of schedulers that gave no answer at some moment, `silence` says so in their words.
    """

    live: int
    changed: bool
    actions: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    silence: tuple[str, ...] = ()

    def plus(self, other: "TickReport") -> "TickReport":
        """Both as one."""
        return TickReport(
            live=self.live + other.live,
            changed=self.changed or other.changed,
            actions=self.actions + other.actions,
            errors=self.errors + other.errors,
            unreachable=self.unreachable + other.unreachable,
            silence=self.silence + other.silence,
        )
