"""Writes two pages: `python docs/reference.py`.

docs/configuration.md is made from the docstrings under the config fields, docs/cli.md from the help of the commands.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

ROOT = Path(__file__).resolve().parent.parent
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


def configuration_page() -> str:
    from orchestrator.config.run_config import RunConfig

    table = "\n".join(rows(RunConfig, ""))
    return f"{HEAD}\n## Top level\n\n| key | default | |\n|---|---|---|\n{table}\n{contract()}"


CLI_HEAD = """# Command line

The help of every command, as `orch VERB -h` prints it. `python docs/reference.py` writes this page from the code.

| I want to | command |
|---|---|
| start a run and watch it | `orch submit CONFIG --follow` |
| see what runs and what needs me | `orch` |
| get a message when a run stops | `notify: {webhook, mail, command}` ([notifications.md](notifications.md)) |
| know what happened to a run, and why | `orch show RUN`, `orch events RUN`, `orch logs RUN --rank first-error` |
| look into a live job | `orch top RUN`, `orch attach RUN --stack` |
| save, stop, continue | `orch save RUN`, `orch cancel RUN`, `orch resume RUN` |
| continue with other settings | `orch resume RUN optimizer.lr=1e-4` |
| branch off a second run | `orch submit --from RUN@STEP optimizer.lr=1e-4` |
| start from trained weights | `orch submit CONFIG --from RUN@STEP --weights-only` |
| compare runs | `orch compare RUN RUN`, `orch compare -t TAG` |
| check checkpoints | `orch ckpt ls RUN`, `orch ckpt verify RUN@all` |
| prove that a run can resume | `orch ckpt restore-test RUN@STEP --wait` |
| check this machine and cluster | `orch doctor --root FOLDER` |
| try a failure | `orch demo`, `orch drill --demo KIND` |

## What holds for every verb
RUN is a name (`tiny-gpt-3`), a unique prefix of one, or `@last`; `cancel`, `resume` and `rm` need the whole name.
CONFIG is a preset (`tiny-gpt`) or a YAML file. SECONDS may have a unit: `90s`, `10m`, `2h`, `1d`.

Answers go to stdout, everything else to stderr. On a terminal, tables drop columns to fit its width. In a pipe, lists
are complete, tab-separated and unformatted.

These options stand before or after the verb:

{options}

### JSON
An answer is `{"schema": "orch.status/1", "time": ..., "data": ..., "warnings": [{"code", "message"}]}`; each verb's
section below has its data. An error is `{"schema": "orch.error/1", "error": {"code", "message", "where", "hint"}}`,
also on stdout. Times are UTC, durations are seconds, sizes are bytes. NaN and infinities are the words `nan`, `inf`,
`-inf`. A schema may get new keys; existing keys never change under the same schema name. Verbs with a verdict (`wait`,
`submit --wait`, `ckpt verify`, `ckpt restore-test --wait`, `doctor`, `demo`, `drill`) print data and return the verdict
as the exit code.

### Exit codes
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a defect in orch; the traceback, without the values of `env`, is in `last-error.txt` of the state folder |
| 2 | wrong usage or configuration |
| 3 | no such run, checkpoint or file; or a prefix matches several runs |
| 4 | something outside must be fixed first: no Slurm, a folder that is not writable, a full disk |
| 5 | Slurm did not answer; orch assumed nothing |
| 6 | the registry is locked, damaged, or of a newer version; for commands that only read, of an older one |
| 7 | a checkpoint is not valid |
| 8 | the run failed or is held |
| 10 | the run was cancelled |
| 124 | timeout |
| 130 | Ctrl-C; the last lines name what exists and what continues |
| 141 | the reader of the pipe has ended (`orch show RUN \\| head`) |

Ranks and agents exit with 0 finished, 74 storage failed, 75 retry, 76 stopped after a save, 77 this node is suspect, 78
never retry. A script of yours may use the same codes.

### Moved folders and PYTHONPATH
If a run's folder was moved, verbs that need it end with 4. Move it back, put a link there, or register the new place
(`orch db rebuild`).

A module in `PYTHONPATH` that is named `orchestrator`, or as one of Python's own, ends `orch` with an error from Python:
`unset PYTHONPATH`, or rename the file. Jobs do not get this shell's `PYTHONPATH`.
"""
VERBS_BY_SECTION = {
    "Every day": "submit status show compare wait events logs top attach save cancel resume tag rm drill demo doctor",
    "Checkpoints": "ckpt",
    "Restore tests": "restore-tests",
    "Nodes": "nodes",
    "Configurations": "config",
    "Data": "data",
    "The shell": "completion",
    "The registry": "db",
    "The controller": "controller",
}


def paragraphs(text: str) -> str:
    """Return a help text as Markdown, with links to the pages that it names."""
    blocks = inspect.cleandoc(text).split("\n\n")
    shown = [
        "```\n" + block.removeprefix("\b\n") + "\n```" if block.startswith("\b") else wrapped(block) for block in blocks
    ]
    return "\n\n".join(shown)


def wrapped(text: str, indent: str = "") -> str:
    linked = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", " ".join(text.split()))
    return textwrap.fill(linked, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def option_list(options: "Iterable[click.Parameter]", context: "click.Context") -> str:
    import click

    records = [item.get_help_record(context) for item in options if isinstance(item, click.Option)]
    return "\n".join(wrapped(f"- `{names}`: {plain(text)}", "  ") for names, text in filter(None, records))


def plain(text: str) -> str:
    """Return the help of an option with its default, without the range of its values."""
    return re.sub(
        r"\s*\[(?:(default: [^];]+)(?:; )?)?[^]]*\]$", lambda found: f" ({found[1]})" if found[1] else "", text
    )


def json_line(data: str) -> str:
    """Return the shape of a verb's JSON answer with its braces as code."""
    shape, *notes = " ".join(data.split()).split("; ")
    return wrapped("; ".join(["JSON data: " + re.sub(r"\{.*\}", r"`\g<0>`", shape), *notes]) + ".")


def verb_section(path: str, command: "click.Command", context: "click.Context") -> str:
    from orchestrator.cli.terminal.command_classes import global_options

    shared = {option.name for option in global_options()}
    usage = " ".join([path, *command.collect_usage_pieces(context)]).replace(" [OPTIONS]", "")
    own = [option for option in command.params if option.name not in shared]
    parts = [paragraphs(command.help or "")]
    if options := option_list(own, context):
        parts.append(options)
    if data := getattr(command, "json_data", ""):
        parts.append(json_line(data))
    return f"### `{usage}`\n" + "\n\n".join(parts)


def sections_of(path: str, command: "click.Command", context: "click.Context") -> Iterator[str]:
    """The section of a verb; for a group its text without the first line, and the sections of its verbs."""
    import click

    if not isinstance(command, click.Group):
        yield verb_section(path, command, context)
        return
    if text := "\n\n".join(inspect.cleandoc(command.help or "").split("\n\n")[1:]):
        yield paragraphs(text)
    for word in command.list_commands(context):
        inner = command.get_command(context, word)
        assert inner is not None
        yield verb_section(f"{path} {word}", inner, context)


def cli_page() -> str:
    import click

    from orchestrator.cli.main import VERBS, orch
    from orchestrator.cli.terminal.command_classes import global_options

    placed = " ".join(VERBS_BY_SECTION.values()).split()
    assert sorted(placed) == sorted(VERBS), f"VERBS_BY_SECTION: {set(placed) ^ set(VERBS)}"
    context = click.Context(orch, **orch.context_settings)  # click caches the names of `-h`
    parts = [CLI_HEAD.replace("{options}", option_list(global_options(), context)).rstrip()]
    for title, words in VERBS_BY_SECTION.items():
        parts.append(f"## {title}")
        if title == "Every day":
            parts.append(f"### `orch`\n{wrapped(orch.epilog or '')}")
        for word in words.split():
            command = orch.get_command(context, word)
            assert command is not None
            parts += sections_of(f"orch {word}", command, context)
    return "\n\n".join(parts) + "\n"


PAGES = {ROOT / "docs" / "configuration.md": configuration_page, ROOT / "docs" / "cli.md": cli_page}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for target, page in PAGES.items():
        target.write_text(page())
