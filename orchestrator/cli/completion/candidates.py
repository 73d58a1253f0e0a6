"""Candidates for shell completion: runs, checkpoints, configurations, keys, tags and nodes."""

import typing
from collections.abc import Callable, Iterable, Iterator

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from orchestrator.errors import OrchError
from orchestrator.home import registry_path
from orchestrator.registry import fast_queries
from orchestrator.states import ENDED_RUNS, LIVE_RUNS, RunState
from trainer.protocol.config_sections.scheduler_kinds import choices

VARIABLE = "_ORCH_COMPLETE"
"""Variable in which the completion scripts pass the command line up to the cursor; orch then only prints candidates."""
OPEN, FILE = "open", "file"
"""Candidate types other than `plain`: an incomplete word (no space after it), and a file name."""


def answer(program: click.Command, line: str) -> Iterator[str]:
    """Yield `KIND<tab>VALUE<tab>TEXT` for each candidate; KIND is `word`, `open` (no space after it) or `file`."""
    words = split_arg_string(line)
    incomplete = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
    try:
        found = ShellComplete(program, {}, "orch", VARIABLE).get_completions(words[1:], incomplete)
    except click.UsageError:  # the line is already invalid
        return
    for item in found:
        kind = {FILE: FILE, "dir": FILE, OPEN: OPEN}.get(item.type, "word")
        yield "\t".join((kind, *(" ".join(str(text or "").split()) for text in (item.value, item.help))))


Item: typing.TypeAlias = "CompletionItem[str]"  # no type arguments before click 8.5
Source = Callable[[click.Context, str], Iterable["Item"]]

_STOPPED = {*ENDED_RUNS, RunState.HELD}
_STATES: dict[str, typing.Collection[str]] = {
    "top": LIVE_RUNS, "attach": LIVE_RUNS, "save": LIVE_RUNS, "drill": LIVE_RUNS, "cancel": {*LIVE_RUNS, RunState.HELD},
    "resume": _STOPPED, "rm": _STOPPED,
}  # fmt: skip
"""States of the runs that a verb accepts; other verbs accept all runs."""


def candidates(context: click.Context, parameter: str, incomplete: str) -> list[Item]:
    """Return the candidates that begin with `incomplete`; empty for free text or an unreadable registry."""
    source = find_source(context, parameter)
    if source is None:
        return []
    try:
        found = [item for item in source(context, incomplete) if item.value.startswith(incomplete) or item.type == FILE]
    except OrchError:
        return []
    return list({item.value: item for item in found}.values())


def find_source(context: click.Context, parameter: str) -> Source | None:
    """Return the source of candidates for this parameter of a verb; None for free text."""
    verb = context.command_path.partition(" ")[2]
    return _SOURCES.get(f"{verb} {parameter}") or _SOURCES.get(parameter)


def _runs(context: click.Context, incomplete: str) -> Iterator[Item]:
    typed = {word for value in context.params.values() if isinstance(value, tuple) for word in value}
    wanted = _STATES.get(str(context.info_name))
    for name, state in fast_queries.run_names(registry_path()):
        if name not in typed and (wanted is None or state in wanted):
            yield CompletionItem(name, help=state)


def _checkpoints(context: click.Context, incomplete: str) -> Iterator[Item]:
    """Yield run names, or the steps of a run after the `@`."""
    run, mark, _ = incomplete.partition("@")
    names = dict(fast_queries.run_names(registry_path()))
    if mark or run in names:
        words = {"verify": ["latest", "all"], "unpin": []}.get(str(context.info_name), ["latest"])
        if words and fast_queries.has_best(registry_path(), run):
            words.insert(1, "best")
        yield from (CompletionItem(f"{run}@{word}") for word in words)
        for step, trust in fast_queries.saved_steps(registry_path(), run):
            yield CompletionItem(f"{run}@{step}", help=trust)
    for name, state in names.items():
        if not mark and name != run:
            yield CompletionItem(name, type=OPEN, help=state)


def _configs(context: click.Context, incomplete: str) -> Iterator[Item]:
    """Yield matching presets, or else file names; with `--from`, also keys."""
    from orchestrator.config import yaml_text

    if context.params.get("begin"):
        yield from _keys(context, incomplete)
    found = [name for name in yaml_text.names() if name.startswith(incomplete)]
    found = [name for name in found if "/" not in name or "/" in incomplete]
    yield from map(CompletionItem, found)
    if not found:
        yield CompletionItem(incomplete, type=FILE)


def _keys(context: click.Context, incomplete: str) -> Iterator[Item]:
    """Yield sections, then their keys; after `=` the values. `~KEY` restores a default."""
    from orchestrator.config import keys

    sign = incomplete[:1] if incomplete[:1] in ("~", "+") else ""
    typed, mark, _ = incomplete.removeprefix(sign).partition("=")
    if mark:
        yield from _values(tuple(typed.split(".")), f"{sign}{typed}=")
        return
    above = tuple(typed.split(".")[:-1])
    for path in keys.every_key():
        if path[: len(above)] != above:
            continue
        whole = len(path) == len(above) + 1
        end = "." if not whole or keys.is_open(keys.key_type(path, "")) else "" if sign == "~" else "="
        yield CompletionItem(
            f"{sign}{keys.dotted_key(path[: len(above) + 1])}{end}", type=OPEN if end else "plain",
            help=str(keys.key_default(path)) if whole else "",
        )  # fmt: skip


def _values(path: tuple[str, ...], before: str) -> Iterator[Item]:
    from orchestrator.config import keys

    if path not in keys.every_key():
        return
    kind, default = keys.key_type(path, ""), keys.key_default(path)
    if kind is bool:
        yield from (CompletionItem(f"{before}{word}") for word in ("true", "false"))
    elif path in _CHOICES:
        yield from (CompletionItem(f"{before}{word}") for word in _CHOICES[path])
    elif path[-1] in ("root", "path"):
        yield CompletionItem(before, type=FILE)
    elif isinstance(default, (int, float, str)) and str(default):
        yield CompletionItem(f"{before}{default}", help="default")


_CHOICES = {
    ("cluster", "kind"): choices(),
    ("train", "dtype"): ("bfloat16", "float16", "float32"),
    ("restore_tests", "sample"): ("unproven", "newest", "oldest", "random"),
}


def _runs_and_keys(context: click.Context, incomplete: str) -> Iterator[Item]:
    yield from _runs(context, incomplete)
    if context.params.get("words"):
        yield from _keys(context, incomplete)


def _drill(context: click.Context, incomplete: str) -> Iterator[Item]:
    """Yield runs, then fault kinds; with --demo, fault kinds, then keys."""
    from orchestrator.cli.drills.scorecard import EXPECTED

    demo, words = context.params.get("demo"), context.params.get("words") or ()
    if len(words) == (0 if demo else 1):
        yield from map(CompletionItem, EXPECTED)
    elif not words:
        yield from _runs(context, incomplete)
    elif demo:
        yield from _keys(context, incomplete)


def _signed_tags(context: click.Context, incomplete: str) -> Iterator[Item]:
    sign = incomplete[:1] if incomplete[:1] == "+" else ""
    yield from (CompletionItem(f"{sign}{name}") for name in fast_queries.tag_names(registry_path()))


def _words(read: Callable[[], Iterable[str]]) -> Source:
    return lambda context, incomplete: map(CompletionItem, read())


def _acceptable_keys(context: click.Context, incomplete: str) -> Iterator[Item]:
    """Yield the settings that `orch resume --accept` may change."""
    from orchestrator.submission.resume_contract import CONFIG, IDENTITY, Rule

    yield from (CompletionItem(key) for key, term in {**IDENTITY, **CONFIG}.items() if term.rule is Rule.ACCEPT)


def _configs_and_runs(context: click.Context, incomplete: str) -> Iterator[Item]:
    yield from _runs(context, incomplete)
    yield from _configs(context, incomplete)


_SOURCES: dict[str, Source] = {
    "run": _runs, "runs": _runs, "target": _checkpoints, "begin": _checkpoints, "source": _configs, "preset": _configs,
    "overrides": _keys, "tags": _words(lambda: fast_queries.tag_names(registry_path())),
    "sweep": _words(lambda: fast_queries.sweep_names(registry_path())), "after": _runs,
    "names": _words(lambda: fast_queries.node_names(registry_path())),
    "paths": lambda context, incomplete: [CompletionItem(incomplete, type=FILE)], "accept": _acceptable_keys,
    "tokenizer": lambda context, incomplete: [CompletionItem(incomplete, type=FILE)],
    "folders": lambda context, incomplete: [CompletionItem(incomplete, type=FILE)],
    "resume words": _runs_and_keys, "drill words": _drill, "demo words": _keys, "tag words": _signed_tags,
    "config diff first": _configs_and_runs, "config diff second": _configs_and_runs, "ckpt diff first": _checkpoints,
    "ckpt diff second": _checkpoints,
}  # fmt: skip
"""Sources by parameter name, or by verb and name if the name has a different meaning in that verb."""
