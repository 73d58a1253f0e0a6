"""Secrets in a configuration: redaction and refusal."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError

SECRET_KEYS = ("notify.webhook",)


def leaves(value: Any) -> Iterator[Any]:
    """Yield all values in nested dicts, lists and tuples."""
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


_WEBHOOK = re.compile(r"(https?://)(?:[^\s/@\"']*@)?([^\s/?#\"']+)(?:[/?#][^\s\"',}\]]*)?")


def redacted_url(url: str) -> str:
    """Return a URL reduced to its scheme and host."""
    return _WEBHOOK.sub(r"\1\2/***", url)


def redacted_value(key: str, value: Any) -> Any:
    """Return a flat configuration's value in a form that is safe to show."""
    return redacted_url(value) if key in SECRET_KEYS and isinstance(value, str) else value


def redact_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration in a form that is safe to show."""
    webhook = config.get("notify", {}).get("webhook")
    return {**config, "notify": {**config["notify"], "webhook": redacted_url(webhook)}} if webhook else config


def redacted_origins(origins: dict[str, str]) -> dict[str, str]:
    """Return the origins of values, without the secrets in command-line overrides."""
    return {key: redacted_url(origin) if key in SECRET_KEYS else origin for key, origin in origins.items()}


_WORDS = frozenset(
    {
        "KEY", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS",
        "AUTH", "JWT",
    }
)  # fmt: skip
"""Words that mark the name of a secret. Only whole words match, so TOKENIZERS does not."""
_SECRET_NAME = re.compile(
    r".*(PASSWORD|PASSWD|PASSPHRASE|(^|[^A-Z0-9])(SECRETS?|PWD|PASS)|(API|ACCESS|SECRET)[^A-Z0-9]?KEY)", re.DOTALL
)
"""Names that always mean a secret, whatever the value (SECRET_ACCESS_KEY, PGPASSWORD)."""
_PLAIN_WORD = re.compile(r"[a-z_-]+")
_VALUE = re.compile(r"[^\s<>\[\]{}|$/~.][^\s<>\[\]{}|]{7,}")
"""Pattern for a possible secret; excludes paths, placeholders and shell variables."""
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.]*([eE][-+]?[0-9]+)?")
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w-]*)(?:=(?P<value>.*))?", re.DOTALL)
_TYPED = "override "
"""Prefix of a command-line value's origin."""
_ARGUMENTS = ("workload.args.", "cluster.template_args.")
_COMMANDS = ("command", "notify.command", "restore_tests.command")


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Pattern for one kind of credential, and the environment variable that usually holds it."""

    what: str
    variable: str
    pattern: re.Pattern[str]


_FORMS = tuple(
    _Form(what=what, variable=variable, pattern=re.compile(pattern))
    for what, variable, pattern in (
        ("a Hugging Face token", "HF_TOKEN", r"(?<![A-Za-z0-9])hf_(?=[a-zA-Z]*[0-9A-Z])[A-Za-z0-9]{10,}"),
        ("an API key", "API_KEY", r"(?<![A-Za-z0-9])sk-(?=[a-zA-Z_-]*[0-9])[A-Za-z0-9_-]{16,}"),
        ("a GitHub token", "GITHUB_TOKEN", r"(?<![A-Za-z0-9])(gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,})"),
        ("a GitLab token", "GITLAB_TOKEN", r"(?<![A-Za-z0-9])glpat-[\w-]{16,}"),
        ("an AWS access key", "AWS_ACCESS_KEY_ID", r"(?<![A-Za-z0-9])A[KS]IA[0-9A-Z]{16}(?![A-Za-z0-9])"),
        ("a Slack token", "SLACK_TOKEN", r"(?<![A-Za-z0-9])xox[abeprs]-[A-Za-z0-9-]{10,}"),
        ("a JSON web token", "ACCESS_TOKEN", r"(?<![A-Za-z0-9])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
        ("a private key", "PRIVATE_KEY", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
        ("a URL with a password", "SERVICE_URL", r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/:@$]*:[^\s/@$]+@"),
    )
)


def require_none(values: Mapping[str, Any], origins: Mapping[str, str], named: Sequence[str]) -> None:
    """Raise ConfigError for the first secret in a flat config, without showing it.

    `origins` has the origin of each value, and `named` the variables already in `env_from`.
    """
    for key, what, variable in _find_secrets(values):
        names, origin = ",".join(dict.fromkeys([*named, variable])), origins.get(key, "")
        # A value from an override disappears with the override, so `~key` is not needed.
        without = f"~{key} " if key == f"env.{variable}" and not origin.startswith(_TYPED) else ""
        hint = f"use `export {variable}=...` and `{without}env_from=[{names}]` instead: ranks then have {variable}"
        secret = f"{key}: {what}, which would be written to config.json and the registry"
        raise ConfigError(secret, where=place(origin), hint=hint)


def shown_override(text: str) -> str:
    """Return an override in a form that is safe to show: a secret in `env` is masked."""
    match = re.match(r"\+?env(?:\.[^=]*)?=", text)
    secret = is_secret_name(text) or any(form.pattern.search(text) for form in _FORMS)
    return f"{match[0]}***" if match and secret else text


def place(origin: str) -> str:
    """Return the origin of a value, without the value of an override."""
    return origin.partition("=")[0] if origin.startswith(_TYPED) else origin


def _find_secrets(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each secret's key, the complaint, and the variable to use instead."""
    for key, value in values.items():
        if key in SECRET_KEYS:  # other code moves these out of the config
            continue
        name = key.removeprefix("env.")
        variable = key.rpartition(".")[2]
        is_argument = key.startswith(_ARGUMENTS) and _SECRET_NAME.fullmatch(variable.upper()) is not None
        if name != key and is_secret_name(name) and _may_be_secret(value, name):
            yield key, "looks like a secret", name
        elif is_argument and _may_be_secret(value, variable):
            yield key, "looks like a secret", re.sub(r"\W", "_", variable.upper())
        texts = [text for text in leaves(value) if isinstance(text, str)]
        for form in (form for text in texts for form in _FORMS if form.pattern.search(text)):
            yield key, f"looks like {form.what}", _variable(name, key, form)
        if key in _COMMANDS and isinstance(value, (list, tuple)):
            yield from ((key, f"{option} looks like a secret", variable) for option, variable in _options(value))


def _variable(name: str, key: str, form: _Form) -> str:
    return name if key.startswith("env.") and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else form.variable


def is_secret_name(name: str) -> bool:
    """Return whether any word in the variable's name marks a secret."""
    return _SECRET_NAME.fullmatch(name.upper()) is not None or any(
        word in _WORDS for word in re.split(r"[^A-Z0-9]", name.upper())
    )


def _may_be_secret(value: Any, name: str) -> bool:
    """Return whether a variable whose name suggests a secret may have a secret value."""
    text = "" if value is None or isinstance(value, bool | dict | list | tuple) else str(value)
    if _SECRET_NAME.fullmatch(name.upper()):
        return bool(text.strip()) and text.lower() not in _NO_SECRETS and not _is_elsewhere(name, text)
    return _VALUE.fullmatch(text) is not None and _NUMBER.fullmatch(text) is None and text.lower() not in _BOOLEANS


def _is_elsewhere(name: str, text: str) -> bool:
    """Return whether a value is only a placeholder, a shell variable, the current folder or a pass number."""
    word = re.split(r"[^A-Z0-9]", name.upper())[-1]
    is_folder = word == "PWD" and text.startswith(("/", "~", "."))
    return bool(_PLACEHOLDER.fullmatch(text)) or is_folder or (word == "PASS" and text.isdigit())


_PLACEHOLDER = re.compile(r"<[^<>]*>|\$\w+|\$?\{+[^{}]*\}+|\*+")
_NO_SECRETS = frozenset({"0", "1", "true", "false", "yes", "no", "on", "off", "none", "null", "disabled", "enabled"})
_BOOLEANS = ("disabled",)
"""On/off values with 8 or more letters, which would pass for secrets."""


def _options(words: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield command options whose value may be a secret, each with the variable to use instead."""
    texts = [word for word in words if isinstance(word, str)]
    for word, following in zip(texts, [*texts, ""][1:], strict=True):
        match = _OPTION.fullmatch(word)
        if match is None:
            continue
        value = following if match["value"] is None else match["value"]
        *_, last = parts = re.split(r"[_-]", match["name"].upper())
        # `--sort-key=timestamp` is a sort order, not a secret.
        plain = parts[-2:] not in (["API", last], ["ACCESS", last], ["SECRET", last]) and _PLAIN_WORD.fullmatch(value)
        name = "_".join(parts)
        if (
            is_secret_name(last)
            and _may_be_secret(value, name)
            and not (last == "KEY" and plain)
            and not value.startswith("-")
        ):
            yield f"{match[0].partition('=')[0]}", name
