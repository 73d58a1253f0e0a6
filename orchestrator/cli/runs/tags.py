"""`orch tag`, and the parsing of tags for `orch submit -t` and `orch status -t`."""

import re
from collections.abc import Iterable

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError
from orchestrator.home import registry_path

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=@-]{0,62}")
_TAKEN_AWAY = re.compile(r"-(?![qvh]$)[A-Za-z0-9].*")
"""Pattern that matches `-baseline`, but not `-q`, `-v` and `-h`, which every verb takes."""


def check_tags(words: Iterable[str]) -> tuple[str, ...]:
    """Return the tags, sorted and unique. Raises ConfigError for an invalid tag."""
    tags = tuple(sorted(set(words)))
    for word in tags:
        if not _TAG.fullmatch(word):
            where = "a tag has up to 63 letters, digits and . _ : / = @ -, and begins with a letter or a digit"
            raise ConfigError(f"`{word}` cannot be a tag", where=where, hint="for example: baseline, lr=3e-4, team/ann")
    return tags


def warn_of_unknown_tags(screen: Screen, tags: Iterable[str]) -> None:
    """Warn about tags that no run has, suggesting a similar tag or listing some existing ones."""
    from orchestrator.near_words import hint_with_choices, nearest  # needed only after a mistake
    from orchestrator.registry import fast_queries

    known = fast_queries.tag_names(registry_path()) if tags else set()
    listed = f"tags: {', '.join(sorted(known)[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}"
    for tag in tags:
        if tag not in known:
            offer = hint_with_choices(nearest(tag, known), listed if known else "no run has any tag")
            screen.warn("no_such_tag", f"no run has the tag {tag}; {offer}")


_SHOWN = 12


class _TagVerb(Verb):
    """A verb whose arguments may begin with a minus sign."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `-baseline` as a tag to remove, not as short options, by rewriting it as `~baseline`.

        No tag begins with `~`.
        """
        return super().parse_args(ctx, [f"~{word[1:]}" if _TAKEN_AWAY.fullmatch(word) else word for word in args])


@click.command(cls=_TagVerb, json_data="{run, tags}")
@click.argument("run")
@click.argument("words", metavar="[+TAG|-TAG|TAG ...]", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove the tags given without a sign, instead of adding them.")
@click.pass_obj
def tag(screen: Screen, run: str, words: tuple[str, ...], remove: bool) -> None:
    """Add tags to a run, or remove them; without TAG, print them.

    `orch tag RUN +a -b` adds a and removes b. Without a sign a tag is added. A tag has up to 63 letters, digits and
    `._:/=@-`. To remove a tag named q, v or h, use --remove. Tags are also kept in the run's folder and survive the
    loss of the registry.
    """
    away = [word for word in words if word.startswith("~") or (remove and not word.startswith("+"))]
    added = check_tags(word.removeprefix("+") for word in words if word not in away)
    removed = check_tags(word.removeprefix("~") for word in away)
    if both := sorted({*added} & {*removed}):
        raise ConfigError(f"{both[0]} cannot be both added and removed", where=" ".join(words), hint="choose one")
    with open_store(readonly=not words) as store:
        found = store.run(run)
        now = store.change_tags(found.name, added, removed) if words else found.tags
    screen.answer("tag", {"run": found.name, "tags": list(now)}, f"{found.name}: {', '.join(now) or 'no tag'}")
