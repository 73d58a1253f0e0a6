"""Secrets that a submitter gives to a run: shell variables, a file, and a webhook URL."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import redaction
from orchestrator.config.compose import Composed, flat, without_secrets
from orchestrator.config.redaction import redacted_url
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.run_secrets import RunSecrets, SecretsRefused, export_command, read_list
from trainer.protocol.secrets.secret_redaction import Redactor


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A config that may be stored, and its secrets, which may not."""

    data: dict[str, Any]
    secrets: RunSecrets = field(repr=False)
    redactor: Redactor = field(repr=False)

    def redact(self, value: Any) -> Any:
        """Return plain data with all secret values removed."""
        if isinstance(value, str):
            return self.redactor.record(value)
        if isinstance(value, dict):
            return {key: self.redact(item) for key, item in value.items()}
        return [self.redact(item) for item in value] if isinstance(value, (list, tuple)) else value


def separate_secrets(composed: Composed, environ: Mapping[str, str]) -> Submitted:
    """Return the storable form of a config and its secrets. Raises ConfigError for a missing or misplaced secret."""
    config = without_secrets(composed).config
    values = _from_shell(config, environ, {})
    from_file = _from_file(config)
    data, webhooks = without_webhook(composed.data)
    found = Submitted(
        data=data, secrets=RunSecrets(values=values, webhooks=webhooks), redactor=Redactor({**from_file, **values})
    )
    for name, value in {**from_file, **values}.items():
        one = Redactor({name: value})
        for key in (key for key, item in flat(data).items() if one and one.found(item)):
            raise ConfigError(
                f"{key}: contains the value of {name}, which would be written to config.json and the registry",
                where=redaction.place(composed.origins.get(key, "")),
                hint=f"remove it there: the ranks have {name} in their environment",
            )
    return found


def _from_shell(config: RunConfig, environ: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
    """Return the `env_from` values from the shell, or those stored earlier."""
    known = {**kept, **environ}
    if missing := [name for name in config.env_from if name not in known]:
        what = f"env_from: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in this shell"
        raise ConfigError(what, where="env_from", hint=f"{export_command(missing)}, then run the same command again")
    return {name: known[name] for name in config.env_from}


def _from_file(config: RunConfig) -> dict[str, str]:
    if not config.secrets_file:
        return {}
    try:
        return read_list(Path(config.secrets_file), taken={**config.env, **dict.fromkeys(config.env_from, "")})
    except SecretsRefused as refused:
        raise ConfigError(refused.what, where="secrets_file", hint=refused.hint) from refused


def without_webhook(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a config with only the webhook's host, and the full URL keyed by that redacted URL."""
    url = data["notify"]["webhook"]
    shown = redacted_url(url)
    if shown == url:
        return copy.deepcopy(data), {}
    return {**copy.deepcopy(data), "notify": {**data["notify"], "webhook": shown}}, {shown: url}


def with_webhook(data: dict[str, Any], folder: RunDir) -> dict[str, Any]:
    """Return a run's config with its full webhook URL, for another run. The URL is empty if the secret is lost."""
    url = data["notify"]["webhook"]
    if redacted_url(url) != url or not url:
        return data
    try:
        whole = RunSecrets.read(folder.secrets).webhooks.get(url, "")
    except (OSError, SecretsRefused):
        whole = ""
    return {**data, "notify": {**data["notify"], "webhook": whole}}


def renew(
    folder: RunDir, config: RunConfig, environ: Mapping[str, str], webhooks: dict[str, str]
) -> tuple[RunSecrets | None, list[str]]:
    """Return the new content of a continued run's secrets file (None if unchanged), and the variables that changed.

    This shell's values replace those in the file. Raises ConfigError for a variable that is neither in the
    file nor in the shell, and Precondition for a file that cannot be read.
    """
    _from_file(config)
    try:
        kept = RunSecrets.read(folder.secrets)
    except SecretsRefused as refused:
        if not set(config.env_from) <= set(environ):
            raise Precondition(refused.what, where=str(folder.secrets), hint=refused.hint) from refused
        kept = RunSecrets()
    values = _from_shell(config, environ, kept.values)
    wanted = RunSecrets(values=values, webhooks={**kept.webhooks, **webhooks})
    replaced = [name for name, value in values.items() if kept.values.get(name, value) != value]
    return None if wanted == kept else wanted, replaced
