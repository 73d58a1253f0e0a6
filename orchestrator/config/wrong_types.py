"""Plain-language versions of OmegaConf's type errors: key, value, remedy."""

import re
from collections.abc import Container
from typing import Any

from orchestrator.config import keys

_SHELL_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}", re.ASCII)
_OTHER_FOLDERS = (("checkpoints", "path"), ("checkpoint", "tiers"))


def complaint(error: Any, values: dict[str, Any], folders: Container[keys.Path]) -> tuple[str, keys.Path, str]:
    """Return the error, its key, and the remedy; `folders`: keys that may hold `$VARIABLE`."""
    path, given = _refused_value(str(error.full_key or ""), values)
    what, name = str(error).splitlines()[0], keys.dotted_key(path)
    if "nterpolation" in type(error).__name__ or isinstance(given, str) and "${" in given:
        is_folder = path in folders or path in _OTHER_FOLDERS
        hint = _variable_meant(given, is_folder) or "write the full key, as in ${train.steps}; a literal one is \\${"
        return f"`{name}`={given}: {what}", path, hint
    kind = keys.key_type(path, "")
    hint = f"write {name}={int(given)}" if kind in (int, int | str) and _is_whole(given) else ""
    shown = f"`{name}`={given}: must be {keys.type_words(kind)}"
    return shown, path, hint or f"its default is {keys.key_default(path)}"


def _refused_value(full_key: str, values: dict[str, Any]) -> tuple[keys.Path, Any]:
    """Return the key and value of OmegaConf's `a.b[0].c`, which may be a list element."""
    path = tuple(re.sub(r"\[\d+\].*", "", full_key).split("."))
    given: Any = values
    for name in re.findall(r"[^.\[\]]+", full_key):
        if isinstance(given, list | tuple) and name.isdigit() and int(name) < len(given):
            given = given[int(name)]
        else:
            given = given.get(name) if isinstance(given, dict) else None
    return path, given


def _variable_meant(given: Any, is_folder: bool) -> str:
    """Return the remedy for `${HOME}`, a shell variable; empty for a reference to a key."""
    found = _SHELL_VARIABLE.search(given) if isinstance(given, str) else None
    if found is None:
        return ""
    if is_folder:
        meant = _SHELL_VARIABLE.sub(r"$\1", given)
        return f"did you mean {meant}?  ${{...}} refers to a key"
    return f"${{...}} refers to a key; write the value of {found[1]} out, or \\{found[0]} for these very characters"


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
