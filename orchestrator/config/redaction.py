"""What of a configuration is a secret, and must not be shown: the path of a webhook is its password."""

import re
from typing import Any

SECRET_KEYS = ("notify.webhook",)
_WEBHOOK = re.compile(r"(https?://)(?:[^\s/@\"']*@)?([^\s/?#\"']+)(?:[/?#][^\s\"',}\]]*)?")


def redacted_url(url: str) -> str:
    """A URL with nothing but its host."""
    return _WEBHOOK.sub(r"\1\2/***", url)


def redacted_value(key: str, value: Any) -> Any:
    """A value of a flat configuration as it may be shown."""
    return redacted_url(value) if key in SECRET_KEYS and isinstance(value, str) else value


def redacted(config: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it may be shown."""
    webhook = config.get("notify", {}).get("webhook")
    return {**config, "notify": {**config["notify"], "webhook": redacted_url(webhook)}} if webhook else config


def redacted_origins(origins: dict[str, str]) -> dict[str, str]:
    """Where values came from, without the secret that an override on a command line has."""
    return {key: redacted_url(origin) if key in SECRET_KEYS else origin for key, origin in origins.items()}
