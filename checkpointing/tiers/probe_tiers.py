"""Checks before a submit that this machine can use the tiers of a run.

`python -P -m checkpointing.tiers.probe_tiers ANSWER` reads `{tiers: [path ...]}` from stdin. It writes JSON objects, a
line each, to the descriptor ANSWER: `trying` before each tier, `refused` (tier, reason, remedy) for an unusable tier,
and `done`.
"""

import json
import os
import sys
from secrets import token_hex
from typing import Any, TextIO

from checkpointing.storage.backends import storage_at, without_secrets

_EXTRAS = {"s3": "pip install 'orch[s3]'", "s3a": "pip install 'orch[s3]'"}

HINT = "check its name, the network, and the credentials: a job has those of files, and of variables in env_from"


def main(arguments: list[str]) -> None:
    """Try the tiers in order and stop at the first unusable one."""
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as answer:
        for path in json.load(sys.stdin)["tiers"]:
            _write_line(answer, trying=path)
            if refused := refusal(path):
                _write_line(answer, refused=[path, *refused])
                break
        _write_line(answer, done=True)


def _write_line(answer: TextIO, **found: Any) -> None:
    answer.write(f"{json.dumps(found)}\n")
    answer.flush()


def refusal(url: str) -> tuple[str, str] | None:
    """Return why listing, writing or deleting fails there, and the remedy; None if all three work."""
    probe = f".orch-probe-{token_hex(6)}"
    kind = url.partition("://")[0]
    try:
        storage = storage_at(url)
        storage.list("")
        storage.publish(probe, b"orch")
        storage.delete(probe)
    except ImportError as error:
        return f"a library is missing: {error}", _EXTRAS.get(kind, "install it for this interpreter")
    except ValueError as error:
        return without_secrets(str(error)), f"`{kind}://` must be a kind of place that fsspec knows"
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return without_secrets(reason), HINT
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
