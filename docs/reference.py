"""Writes docs/configuration.md from the docstrings under the config fields: `python docs/reference.py`."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

Every key, its default and what it does. `orch config show PRESET` prints the resolved values and where each came from.
This page is written by `python docs/reference.py` from the docstrings in the code.

Values come from these places, the weakest first: the defaults below; presets (`tiny-gpt`, `cluster/slurm-cpu`); the
site's file (`$ORCH_SITE_CONFIG`, or `/etc/orch/site.yaml`); yours (`$ORCH_USER_CONFIG`, or
`~/.config/orch/config.yaml`); a file of your own that you submit, and the files of yours that it includes; what you
type. So `cluster: {mem: 2G}` in your file beats a preset's `mem`. In `orch demo` and `orch drill --demo`, presets beat
the site's file and yours.

A relative folder or file in a file (`workload.path: [.]`, `data.path`, `data.text`, `cluster.root`,
`cluster.templates`, `secrets_file`) is meant from the folder of that file; one that you type, from the folder where you
type it.
"""


def explanations(kind: type[Any]) -> dict[str, str]:
    """Field name -> the docstring under it, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, following in zip(body.body, body.body[1:], strict=False):
            named = isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[item.target.id] = " ".join(str(following.value.value).split())
    return found


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    else:
        assert field.default_factory is not dataclasses.MISSING
        value = field.default_factory()
    if isinstance(value, tuple):
        return str(list(value))
    return repr(str(value) if isinstance(value, str) else value)  # of a member of an enum, its word


def rows(kind: type[Any], prefix: str) -> Iterator[str]:
    hints, texts = typing.get_type_hints(kind), explanations(kind)
    nested = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if dataclasses.is_dataclass(hint):
            nested.append((f"{prefix}{field.name}", hint))
            continue
        yield f"| `{prefix}{field.name}` | `{default(field)}` | {texts[field.name]} |"
        if dataclasses.is_dataclass(item):
            yield from rows(item, f"{prefix}{field.name}[].")
    for name, hint in nested:
        yield f"\n## {name}\n{(hint.__doc__ or '').strip()}\n\n| key | default | |\n|---|---|---|"
        yield from rows(hint, f"{name}.")


CONTRACT = """
## What `orch resume RUN KEY=VALUE` may change
A run that goes on is compared with what it was trained with: its configuration, the code, the environment and the
data. A harmless key changes no result. One that is *accepted* changes how training goes on: typing it accepts it, and
`--accept KEY` accepts what differs without being typed (your code, another torch). A refused one would not fit the
checkpoint, or would give it another meaning. Every key has one of the three rules.
Code differs if a file that was there changed or is gone, or if new code (`.py`, `.so`, ...) lies beside it; other new
files do not count. Packages differ if a distribution that the newest attempt's code imports, directly or through another
one, has another version, is new or is gone; so do `torch`, `nvidia-*`, `triton`, `cuda*`, `numpy`, `transformers`,
`flash*`, `apex`, `xformers` and `deepspeed`, imported or not. They are read again in the folders in which that attempt
found them (`attempts/NNN/code.json`), also with `cluster.python`, or in a shell with another Python. If a folder cannot be
read here, `orch resume` prints that packages could not be compared, and goes on. A run that has trained no step yet needs
no `--accept` for code and environment. After some failures changed code needs none, either
([which failures](writing-a-workload.md#which-code-trains)).
Token data is compared by the fingerprint in its `index.json` and the sizes of its shards. `orch submit` and
`orch resume` also read shards that were written after the index, up to 2 GiB of them, and refuse changed ones. Restore
tests read all shards.

| | rule | |
|---|---|---|
"""


def contract() -> str:
    """The keys of every rule, with the reason where there is one."""
    from orchestrator.submission.resume_contract import CONFIG, IDENTITY, Rule

    lines = []
    for name, terms in (("configuration", CONFIG), ("code, environment, data", IDENTITY)):
        for rule in Rule:
            reasons: dict[str, list[str]] = {}
            for key, term in terms.items():
                if term.rule is rule:
                    reasons.setdefault(term.why, []).append(f"`{key}`")
            said = "; ".join(", ".join(keys) + (f" ({why})" if why else "") for why, keys in reasons.items())
            lines.append(f"| {name} | {rule} | {said} |")
    return CONTRACT + "\n".join(lines) + "\n"


def page() -> str:
    sys.path.insert(0, str(ROOT))
    from orchestrator.config.run_config import RunConfig

    table = "\n".join(rows(RunConfig, ""))
    return f"{HEAD}\n## Top level\n\n| key | default | |\n|---|---|---|\n{table}\n{contract()}"


if __name__ == "__main__":
    TARGET.write_text(page())
