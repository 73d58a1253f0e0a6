"""The process that delivers one notification: an order on stdin, what became of it on stdout.

A process of its own: a name server or a program that hangs must not hold up the controller, which kills this one.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.redaction import redacted_url
from orchestrator.notifications import channels
from trainer.contract.secrets.run_secrets import RunSecrets, SecretsRefused

WEBHOOK, MAIL, COMMAND = "webhook", "mail", "command"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is sent, and where to: by channel, a URL, a list of addresses, a list of arguments."""

    targets: dict[str, Any]
    payload: dict[str, Any]
    environ: dict[str, str]
    folder: str
    secrets: str = ""
    """The run's file with the whole URL of its webhook, of which a config has the host alone."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()


def deliver(order: Order) -> dict[str, str]:
    """Send by every channel of the order, one after the other; by channel why it failed, or nothing."""
    given = json.dumps(order.payload, default=str).encode()
    ways: Mapping[str, Callable[[Any], str]] = {
        WEBHOOK: lambda url: _post(url, order),
        MAIL: lambda addresses: channels.mail(addresses, order.payload),
        COMMAND: lambda command: channels.run(command, given, order.environ, order.folder),
    }
    return {name: ways[name](target) for name, target in order.targets.items()}


def _post(url: str, order: Order) -> str:
    """To the whole URL; read here, where a file system that hangs holds up nobody else."""
    if redacted_url(url) == url:
        try:
            url = RunSecrets.read(Path(order.secrets)).webhooks.get(url, "")
        except SecretsRefused as refused:
            return str(refused)
        except OSError as error:
            return f"{order.secrets} cannot be read: {error.strerror or error}"
    if not url:
        hint = f"`orch resume {Path(order.secrets).parent.name} notify.webhook=URL`"
        return f"{order.secrets} has no URL of it; once the run has stopped: {hint}"
    return channels.post(url, order.payload)


def main() -> None:
    """What the controller starts."""
    result = deliver(Order(**json.load(sys.stdin)))
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
