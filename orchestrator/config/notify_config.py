"""Who is told when the state of a run changes, and how."""

import re
from dataclasses import dataclass

from orchestrator.states import RunState

_ADDRESS = re.compile(r"[^\s<>,;:\"'\\]+")
_STATES = tuple(str(state) for state in RunState)


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Messages about this run, sent by the controller once for each change of state."""

    webhook: str = ""
    """URL that gets a POST with JSON; its `text` is a sentence, as Slack, Mattermost and others show it."""

    mail: str = ""
    """Mail addresses, separated by commas; sent by `sendmail`, or else by SMTP on localhost."""

    command: tuple[str, ...] = ()
    """A program with arguments, or one line for `sh`; it gets `ORCH_*` variables, and the JSON on stdin."""

    on: tuple[str, ...] = ("HELD", "FAILED", "SUCCEEDED")
    """States of the run that are told."""

    def __post_init__(self) -> None:
        if self.webhook and not re.fullmatch(r"https?://[^\s/?#@]+([/?#]\S*)?", self.webhook, re.ASCII):
            raise ValueError("notify.webhook: must be a http:// or https:// URL without spaces, user and password")
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address) or address.startswith("-"):
                raise ValueError(f"notify.mail={self.mail}: must be addresses, separated by commas")
        object.__setattr__(self, "on", tuple(state.upper() for state in self.on))
        for state in self.on:
            if state not in _STATES:
                raise ValueError(f"notify.on: {state}: must be one of {', '.join(_STATES)}")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.mail.split(",")) if self.mail else ()
