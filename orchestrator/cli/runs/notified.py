"""Notifications in status output: undelivered messages, and the newest message."""

from typing import Any

from orchestrator.cli.terminal.render import Screen, iso

SHOWN = 3
"""Maximum number of runs that a warning names."""


def warn_of_untold(screen: Screen, rows: list[dict[str, Any]]) -> None:
    """Print one warning for all runs with a message that not all channels have delivered."""
    untold = {row["run"]: why for row in rows if (why := _trouble(row))}
    if len(untold) == 1:
        screen.warn("not_notified", "".join(f"{run}: {why}" for run, why in untold.items()))
    elif untold:
        names = ", ".join(list(untold)[:SHOWN]) + (", ..." if len(untold) > SHOWN else "")
        words = f"{len(untold)} runs could not tell everybody of their state: {names}"
        screen.warn("not_notified", f"{words}; `orch show RUN` says why")


def _trouble(row: dict[str, Any]) -> str:
    if not row["notified"].get("newest"):
        return ""
    from orchestrator.notifications.delivery import NotificationState  # only if a message was sent

    return NotificationState.from_json(row["notified"]).trouble


def notified_json(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest message of a run as plain JSON data; None if none was sent."""
    told = row["notified"].get("newest")
    if not told:
        return None
    kept = {key: told[key] for key in ("state", "delivered", "failed", "tries")}
    return {**kept, "at": iso(told["at"]), "next_at": iso(told["next_at"] or None)}


def notified_words(row: dict[str, Any]) -> str:
    """Describe the newest message for the head of `orch show`; empty until a channel has delivered it."""
    told = row["notified"].get("newest") or {}
    return f"that it is {told['state']}, by {', '.join(told['delivered'])}" if told.get("delivered") else ""
