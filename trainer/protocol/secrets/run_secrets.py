"""Secrets of a run. Their values are only in one private file and in the environment of the run's processes.

`env_from` names variables whose values `orch submit` takes from its environment and stores in the run's private file.
`secrets_file` is the user's own file, which is read whenever agents start.
"""

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import write_durably
from trainer.protocol.config import JobConfig
from trainer.protocol.program_limits import excess_bytes
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.secret_redaction import LISTED

_SCHEMA = "orch.secrets/1"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MOST = 1 << 20
"""Maximum size of a secrets file in bytes."""


class SecretsRefused(Exception):  # noqa: N818  # the name says what was refused
    """Secrets are unavailable, or readable by other users. The message never contains a value."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; {hint}")
        self.what, self.hint = what, hint


@dataclass(frozen=True, kw_only=True)
class RunSecrets:
    """Content of the run's private file: values by variable, and webhook URLs by their redacted form in the config."""

    values: dict[str, str] = field(default_factory=dict, repr=False)
    webhooks: dict[str, str] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return bool(self.values or self.webhooks)

    def create(self, path: Path) -> None:
        """Create a file that only its owner can read. Raises OSError, including if the path exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
            stream.write(self._encode())
            stream.flush()
            os.fsync(stream.fileno())

    def replace(self, path: Path) -> None:
        """Replace an existing file. Raises OSError."""
        write_durably(path, self._encode())

    def _encode(self) -> bytes:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}).encode()

    @classmethod
    def read(cls, path: Path) -> "RunSecrets":
        """Read the file, or return empty secrets if it is missing. Raises SecretsRefused or OSError."""
        try:
            data = read_private(path, follow=False)
        except FileNotFoundError:
            return cls()
        try:
            found: Any = json.loads(data)
            return cls(values=dict(found["values"]), webhooks=dict(found.get("webhooks") or {}))
        except (ValueError, TypeError, KeyError):
            raise SecretsRefused(f"{path} is damaged", f"delete it, then {_resume(path.parent.name)}") from None


def values_for_job(run: RunDir, config: JobConfig) -> dict[str, str]:
    """Return all secret variables for the run's processes. Raises SecretsRefused or OSError."""
    own = RunSecrets.read(run.secrets).values if config.env_from else {}
    if missing := [name for name in config.env_from if name not in own]:
        hint = f"{export_command(missing)}, then {_resume(run.name)}"
        raise SecretsRefused(f"{run.secrets} has no value for {', '.join(missing)}", hint)
    chosen = {name: own[name] for name in config.env_from}
    if not config.secrets_file:
        return chosen
    return chosen | read_list(Path(config.secrets_file), taken={**config.env, **chosen})


def export_command(names: Sequence[str]) -> str:
    """Return the command that provides these variables."""
    return f"`export {' '.join(f'{name}=...' for name in names)}`"


def _resume(run: str) -> str:
    return f"`orch resume {run}`"


def enter(values: dict[str, str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Add secrets, with the list of their names, to the environment of this process and its children."""
    environ.pop(LISTED, None)  # set if a run starts another run
    if values:
        environ.update(values)
        environ[LISTED] = ",".join(sorted(values))


def read_list(path: Path, taken: dict[str, str] | None = None) -> dict[str, str]:
    """Parse a file of NAME=VALUE lines. Raises SecretsRefused, including for a name in `taken`."""
    try:
        text = read_private(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        raise SecretsRefused(f"secrets_file={path}: no such file here", "~secrets_file drops it") from None
    except OSError as error:
        raise SecretsRefused(f"secrets_file={path}: {error.strerror or error}", "~secrets_file drops it") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, mark, value = line.strip().removeprefix("export ").partition("=")
        if not mark or not is_name(name.strip()):
            raise SecretsRefused(f"secrets_file={path}: line {number} is not NAME=VALUE", "write HF_TOKEN=...")
        found[name.strip()] = _unquote(value.strip())
    for name in found:
        if name in (taken or {}):
            raise SecretsRefused(f"secrets_file={path}: {name} is also in the configuration", "keep one of them")
        if excess := excess_bytes(f"{name}={found[name]}"):
            what = f"secrets_file={path}: {name} is {excess} bytes longer than Linux allows"
            raise SecretsRefused(what, "let the program read that value from a separate file")
    return found


def is_name(text: str) -> bool:
    """Return whether a secret may have this name."""
    return _NAME.fullmatch(text) is not None and text != LISTED


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def read_private(path: Path, *, follow: bool = True) -> bytes:
    """Read a file that only its owner can read. Raises OSError, or SecretsRefused for any other file."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SecretsRefused(f"{path} is a link", "keep secrets in a file of your own") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise SecretsRefused(f"{path} is not a regular file", "keep secrets in a file of your own")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_uid != os.geteuid():
            raise SecretsRefused(f"{path} belongs to another user", "keep secrets in a file of your own")
        if status.st_mode & 0o077:
            shown = f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o})"
            raise SecretsRefused(shown, f"chmod 600 {shlex.quote(str(path))}")
        data = stream.read(_MOST + 1)
    if len(data) > _MOST:
        raise SecretsRefused(f"{path} is larger than {_MOST} bytes", "it is not a secrets file")
    return data
