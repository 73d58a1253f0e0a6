"""What people see of notifications: whom a run could not tell, and what was told last."""

from typing import Any

from orchestrator.cli.terminal.render import Screen, iso

SHOWN = 3
"""Runs that a warning names."""


def warn_of_untold(screen: Screen, rows: list[dict[str, Any]]) -> None:
    """One line for all runs whose newest message has not reached everybody."""
    untold = [row for row in rows if row["notified"].get("failed")]
    if len(untold) == 1:
        screen.warn("not_notified", f"{untold[0]['run']}: {_trouble(untold[0])}")
    elif untold:
        names = ", ".join(row["run"] for row in untold[:SHOWN]) + (", ..." if len(untold) > SHOWN else "")
        screen.warn(
            "not_notified", f"{len(untold)} runs could not tell everybody of their state: {names}; see orch show RUN"
        )


def _trouble(row: dict[str, Any]) -> str:
    from orchestrator.notifications.record import Notified  # only where something is wrong

    return Notified.of(row["notified"]).trouble


def notified_json(row: dict[str, Any]) -> dict[str, Any] | None:
    """The newest message of a run as programs see it; None where none was sent."""
    told = row["notified"]
    if not told.get("state"):
        return None
    kept = {key: told[key] for key in ("state", "delivered", "failed", "tries")}
    return {**kept, "at": iso(told["at"]), "next_at": iso(told["next_at"] or None)}


def notified_words(row: dict[str, Any]) -> str:
    """The newest message that has reached somebody, for the head of `orch show`."""
    told = row["notified"]
    return f"that it is {told['state']}, by {', '.join(told['delivered'])}" if told.get("delivered") else ""
