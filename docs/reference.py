"""Write the reference pages: `python docs/reference.py`.

docs/configuration.md comes from the docstrings under the config fields, docs/cli.md from the help of the commands, and
docs/failure-kinds.md from the docstrings under the failure kinds and their traits.
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

Every key. `python docs/reference.py` writes this page from the docstrings in the code.

```
orch config show my.yaml          # every value, and where it came from
orch submit my.yaml train.steps=500 '~cluster.mem' +env.NCCL_DEBUG=INFO    # set, restore the default, add to a map
```
A later place beats an earlier one: the defaults below; presets (`tiny-gpt`, `cluster/slurm-cpu`); the site's file
(`$ORCH_SITE_CONFIG`, or `/etc/orch/site.yaml`); yours (`$ORCH_USER_CONFIG`, or `~/.config/orch/config.yaml`); files
that you submit, with your files that they include; the command line. `orch demo` and `orch drill --demo` put presets
above the site's file and yours.

A relative path in a file is relative to that file's folder; on the command line, to the working directory.

The column *resume* shows what `orch resume RUN KEY=VALUE` may change:
[yes, accept or no](#what-orch-resume-run-keyvalue-may-change).
"""


def explanations(kind: type[Any]) -> dict[str, str]:
    """Return the docstring under each field or member, inherited ones included."""
    found: dict[str, str] = {}
    for base in (base for base in reversed(kind.__mro__) if base.__module__ not in ("builtins", "enum")):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, following in zip(body.body, body.body[1:], strict=False):
            targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
            if targets and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[targets[0].id] = inspect.cleandoc(str(following.value.value))
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
    from orchestrator.submission.resume_contract import find_rule

    hints, texts = typing.get_type_hints(kind), explanations(kind)
    nested = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if dataclasses.is_dataclass(hint):
            nested.append((f"{prefix}{field.name}", hint))
            continue
        key = f"{prefix}{field.name}"
        text = linked(" ".join(texts[field.name].split()))
        yield f"| `{key}` | `{default(field)}` | {RESUME[find_rule(key.replace('[]', ''))]} | {text} |"
        if dataclasses.is_dataclass(item):
            yield from rows(item, f"{prefix}{field.name}[].")
    for name, hint in nested:
        yield f"\n## {name}\n{(hint.__doc__ or '').strip()}"
        lines = list(rows(hint, f"{name}."))
        yield from [f"\n{COLUMNS}", *lines] if lines[0].startswith("|") else lines


COLUMNS = "| key | default | resume | |\n|---|---|---|---|"
RESUME = {"harmless": "yes", "accept": "accept", "refused": "no"}
CONTRACT = """
## What `orch resume RUN KEY=VALUE` may change
orch compares configuration, code, environment and data with those that the run was trained with.

| resume | a change of the key |
|---|---|
| yes | changes no result |
| accept | changes how training continues. Typing the key accepts it, `--accept KEY` one that you did not type |
| no | does not fit the checkpoint: submit a new run |

Differences that are not in the configuration:

{identity}

- Before the run's first checkpoint, all but its name, root, kind of cluster and `workload.snapshot` may change. Before
  its first step, code and environment need no `--accept`.
- After some failures, [changed code needs no `--accept`](writing-a-workload.md#which-code-trains).
- Code differs if a file has changed or is gone, or if new code (`.py`, `.so`, ...) lies beside it.
- Packages differ if a distribution that the newest attempt's code imports, directly or not, was added, removed or
  updated; so do `torch`, `nvidia-*`, `triton`, `cuda*`, `numpy`, `transformers`, `flash*`, `apex`, `xformers` and
  `deepspeed`, imported or not. orch reads them in the folders that `attempts/NNN/code.json` records. If a folder cannot
  be read, `orch resume` reports that packages were not compared, and continues.
- Token data is compared by the fingerprint in `index.json` and the sizes of its shards. `orch submit` and
  `orch resume` also read shards written after the index, up to 2 GiB. Restore tests read all shards.
"""


def contract() -> str:
    """Return the rules of `orch resume`; those of the keys are in their tables."""
    from orchestrator.submission.resume_contract import IDENTITY, Rule

    names = {rule: ", ".join(f"`{key}`" for key, term in IDENTITY.items() if term.rule is rule) for rule in Rule}
    identity = "\n".join(f"- {RESUME[rule]}: {keys}" for rule, keys in names.items() if rule is not Rule.HARMLESS)
    return CONTRACT.replace("{identity}", identity)


def configuration_page() -> str:
    from orchestrator.config.run_config import RunConfig

    table = "\n".join(rows(RunConfig, ""))
    return f"{HEAD}\n## Top level\n\n{COLUMNS}\n{table}\n{contract()}"


FAILURES_HEAD = """# Failure kinds

`orch show RUN` prints the kind of every failure. `python docs/reference.py` writes this page from the code.
[How failures are counted](failures.md#how-failures-are-counted) explains the last column.

| kind | signs | response | counted |
|---|---|---|---|
"""
COUNTED = {"person": "-", "tries": "in tries", "time": "in time", "nothing": "not at all"}


def failures_page() -> str:
    """Return a row for every failure kind: the two paragraphs of its docstring, and its budget."""
    from trainer.protocol.failures.outcome import TRAITS, FailureKind

    lines = []
    for name, text in explanations(FailureKind).items():
        signs, response = (linked(" ".join(part.split())) for part in text.split("\n\n"))
        traits = TRAITS[FailureKind[name]]
        counted = COUNTED[traits.budget]
        counted += ", once the job is given up" if traits.restarts_in_place else ""
        counted += ", while there is no new checkpoint" if traits.free else ""
        lines.append(f"| `{FailureKind[name]}` | {signs.rstrip('.')} | {response.rstrip('.')} | {counted} |")
    return FAILURES_HEAD + "\n".join(lines) + "\n"


CLI_HEAD = """# Command line

Every command. `orch VERB -h` prints the same text. `python docs/reference.py` writes this page from the code.

| I want to | command |
|---|---|
| start a run and watch it | `orch submit CONFIG --follow` |
| see my runs, and what needs me | `orch` |
| know what happened, and why | `orch show RUN`, `orch events RUN`, `orch logs RUN --rank first-error` |
| look into a live job | `orch top RUN`, `orch attach RUN --stack`, `orch shell RUN` |
| start ranks by hand on a node | `orch debug CONFIG` |
| vary values | `orch sweep CONFIG -p optimizer.lr=1e-4,3e-4 --max 4`, `orch status --sweep NAME` |
| start a run after another | `orch submit CONFIG --after RUN` |
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
RUN is a name (`tiny-gpt-3`), a unique prefix, or `@last`; `cancel`, `resume` and `rm` need the full name. CONFIG is a
preset (`tiny-gpt`) or a YAML file. SECONDS may have a unit: `90s`, `10m`, `2h`, `1d`.

Answers go to stdout, everything else to stderr. In a pipe, lists are complete, tab-separated and unformatted.

These options stand before or after the verb:

{options}

### JSON
With `--json` stdout has one object. An answer is
`{"schema": "orch.status/1", "time": ..., "data": ..., "warnings": [{"code", "message"}]}`, an error
`{"schema": "orch.error/1", "error": {"code", "message", "where", "hint"}}`. Times are UTC, durations seconds, sizes
bytes. NaN and infinities are the words `nan`, `inf`, `-inf`. Keys of a schema may be added, but do not change. Verbs
with a verdict (`wait`, `ckpt verify`, `doctor`, `demo`, ...) print data and return the verdict as the exit code.

### Exit codes
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a defect in orch; the traceback, without the values of `env`, is in `last-error.txt` of the state folder |
| 2 | wrong usage or configuration |
| 3 | no such run, checkpoint or file; or a prefix matches several runs |
| 4 | something outside must be fixed first: no Slurm, a folder that is not writable, a full disk |
| 5 | Slurm did not answer; orch assumed nothing |
| 6 | the registry is locked, damaged or of another version |
| 7 | a checkpoint is not valid |
| 8 | the run failed or is held |
| 10 | the run was cancelled |
| 124 | timeout |
| 130 | Ctrl-C; the last lines name what exists and what continues |
| 141 | the reader of the pipe has ended (`orch show RUN \\| head`) |

Ranks and agents exit with 0 finished, 74 storage failed, 75 retry, 76 stopped after a save, 77 this node is suspect, 78
never retry. A script of yours may use the same codes.

### Moved folders and PYTHONPATH
If a run's folder was moved, its verbs exit with 4: move it back, put a link there, or register the new place
(`orch db rebuild`). If a module in `PYTHONPATH` hides orch's or Python's own, `unset PYTHONPATH` or rename the file.
Jobs do not get this shell's `PYTHONPATH`.
"""
VERBS_BY_SECTION = {
    "Every day": "init submit sweep debug status show compare wait events logs top attach shell save cancel resume "
    "priority tag rm drill demo doctor",
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


def linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        linked(" ".join(text.split())), 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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


PAGES = {
    ROOT / "docs" / "cli.md": cli_page,
    ROOT / "docs" / "configuration.md": configuration_page,
    ROOT / "docs" / "failure-kinds.md": failures_page,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for target, page in PAGES.items():
        target.write_text(page())
