"""`orch drill`: injects a fault into a live run or a demo, and scores the reaction."""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path

import click

from orchestrator.cli.drills.drill_run import DrillRun, extra_cost, why_undetectable
from orchestrator.cli.drills.restore_test_demo import demo_root
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, Scorecard
from orchestrator.cli.drills.small_disk import run_in_namespace, small_disk
from orchestrator.cli.live_jobs.live_attempt import find_live_attempt
from orchestrator.cli.runs.events import RunFollower, following, is_over
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.runs.status import one_row
from orchestrator.cli.terminal.argument_types import NonEmptyPath, timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, RunFailed, WaitTimeout
from orchestrator.near_words import hint_with_choices, nearest
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.run_dir import RunDir

STEP = 25
"""Step of the demo at which a rank is hit."""
SLOWER = 0.3
"""Extra seconds of work per step of a slow rank, far more than a tenth of a demo's step."""


DRILL_JSON = """
{run, kind, struck, rank, node, step, noticed, detected_s, named, culprit_right, failure, kind_right, decision,
back_s, back_step, steps_lost, evidence, over, passed, verdict}
"""


@click.command(cls=Verb, json_data=DRILL_JSON)
@click.argument("words", metavar="RUN KIND | --demo KIND [KEY=VALUE ...]", nargs=-1, required=True)
@click.option("--demo", is_flag=True, help="Use a small run of its own on this machine.")
@click.option(
    "--rank", type=click.IntRange(0), metavar="N", default=None, help="The rank to hit (for node faults: the node)."
)
@click.option("-y", "--yes", is_flag=True, help="Allow faults that cost the run more than a restart.")
@click.option("--root", type=NonEmptyPath(path_type=Path), default=None, help="Folder for the demo's runs.")
@timeout_option(300.0, least=1.0)
@click.pass_obj
def drill(
    screen: Screen, words: tuple[str, ...], demo: bool, rank: int | None, yes: bool, root: Path | None, timeout: float
) -> int:
    """Inject a fault and score the reaction.

    KIND is kill-rank, stop-rank, slow-rank, kill-agent, kill-node, hang-in-collective, desync, nan, full-disk or
    corrupt-checkpoint (docs/watching.md lists the rest). The score: seconds until it was noticed, whether the right
    rank was named, seconds until training continued, steps lost.

    The fault strikes once every rank has trained a step. It counts against no node and uses up no restart. A fault
    that the configuration cannot detect is refused: in a run of a `command:` everything but the kills, hangs
    without `detection.hang.on`, slowness without `detection.straggler.on`. Exit codes: 4 nothing runs, or refused;
    8 something was wrong; 124 the ranks did not train in time.
    """
    if demo:
        kind, overrides = _known(words[0]), words[1:]
        if kind == "full-disk" and (code := run_in_namespace(screen)) is not None:
            return code
        card, run = _in_a_demo(screen, kind, rank, root, overrides, timeout)
    else:
        if len(words) == 1 and words[0] not in EXPECTED:
            find_live_attempt(words[0])  # report a run without a live attempt before the missing kind
        if len(words) != 2:
            raise _not_a_pair(words)
        if words[1] not in EXPECTED and nearest(words[0], EXPECTED, 0.8):
            swapped = f"orch drill {shlex.quote(words[1])} {nearest(words[0], EXPECTED, 0.8)}"
            raise ConfigError("the run comes first, then the kind", where="command line", hint=swapped)
        run, kind = words[0], _known(words[1])
        card, run = _in_a_run(screen, run, kind, rank, yes, timeout)
    _show(screen, run, card)
    if card.passed:
        return 0
    if screen.json:
        return RunFailed.exit_code
    raise RunFailed(f"{kind}: {card.verdict}", where=run, hint=f"orch show {run}   orch logs {run} --rank first-error")


def _not_a_pair(words: tuple[str, ...]) -> ConfigError:
    runs = [word for word in words if word not in EXPECTED]
    kinds = [word for word in words if word in EXPECTED]
    hint = f"orch drill {shlex.quote(next(iter(runs), 'RUN'))} {next(iter(kinds), 'kill-rank')}"
    return ConfigError("a drill takes a run and a kind", where="command line", hint=hint)


def _known(kind: str) -> str:
    if kind not in EXPECTED:
        hint = hint_with_choices(nearest(kind, EXPECTED), f"one of {', '.join(EXPECTED)}")
        raise ConfigError(f"no such fault: {kind}", where="command line", hint=hint)
    return kind


# -- in a user's run


def _in_a_run(
    screen: Screen, name: str, kind: str, rank: int | None, yes: bool, timeout: float
) -> tuple[Scorecard, str]:
    found = find_live_attempt(name)
    if kind == "full-disk":
        raise Precondition(
            "full-disk needs a job on this machine that is nobody else's", where="command line",
            hint="orch drill --demo full-disk",
        )  # fmt: skip
    _check(kind, found.run, found.config)
    # Last, so that --yes is not followed by another refusal.
    cost = extra_cost(kind, found.config, rank)
    if cost is not None and not yes:
        raise Precondition(
            f"{kind} costs {found.run} more than a restart: {cost}", where="command line",
            hint=f"if that is meant:  orch drill {found.run} {kind} --yes      in a demo:  orch drill --demo {kind}",
        )  # fmt: skip
    with following(screen, found.run) as follower:
        follower.skip_existing()
        drill_run = DrillRun(
            follower, found.run, kind, StepLines(found.folder, recent_only=True), command=bool(found.config.command)
        )
        drill_run.inject(screen, found, rank, timeout)
        watched = screen.if_interrupted
        screen.if_interrupted = lambda: f"{kind} is injected and not taken back; {watched()}"
        return drill_run.until_over(timeout), found.run


def _check(kind: str, run: str, config: JobConfig) -> None:
    """Raise Precondition if the fault would have no effect in a run of this configuration."""
    why = why_undetectable(kind, config)
    if why is not None:
        raise Precondition(f"{kind} tells nothing in {run}: {why}", where=run, hint=f"orch drill --demo {kind}")
    # A spare would continue from memory and never read the damaged checkpoint.
    if kind == "corrupt-checkpoint" and config.cluster.spare_nodes:
        spares = config.cluster.spare_nodes
        raise Precondition(
            f"{kind} needs a job that ends with a node, and this one has cluster.spare_nodes={spares}",
            where="command line", hint=f"orch drill --demo {kind}",
        )  # fmt: skip


# -- in a demo


def _in_a_demo(
    screen: Screen, kind: str, rank: int | None, root: Path | None, overrides: tuple[str, ...], timeout: float
) -> tuple[Scorecard, str]:
    from orchestrator.cli.runs.submit import launch
    from orchestrator.config.compose import compose  # omegaconf: only for the verbs that read configurations

    folder = demo_root(root)
    words = ("cluster.kind=local", f"name=drill-{kind}", *_settings(kind, rank))
    with small_disk(screen, folder / "full-disk") if kind == "full-disk" else nullcontext() as disk:
        place = (f"cluster.root={disk.path}", *_data_beside(folder)) if disk else (f"cluster.root={folder}",)
        composed = compose("demo", overrides, environ=os.environ, preset_wins=True, settings=(*place, *words))
        _check(kind, "this demo", composed.config)
        screen.note(f"drill: 2 simulated nodes x 2 ranks train on this machine; {kind} strikes on the way")
        launched = launch(screen, composed, LOCAL, no_controller=False)
        run = launched["run"]
        screen.note(f"{run}: job {launched['job_id']}, folder {launched['run_dir']}")
        with following(screen, run) as follower:
            drill_run = DrillRun(follower, run, kind, StepLines(RunDir(Path(launched["run_dir"]))), disk=disk)
            if not _injected_by_rank(kind):
                drill_run.until_saved(timeout)
                drill_run.inject(screen, find_live_attempt(run), rank, timeout)
            card = drill_run.until_over(timeout)
            over = _await_demo_end(screen, follower, run, timeout)
        if disk and over:
            disk.keep(Path(launched["run_dir"]))
    return card, run


def _data_beside(folder: Path) -> tuple[str, ...]:
    """Return settings that keep the demo's data off the small disk, which has no room for its tokens."""
    from orchestrator.config.compose import compose  # omegaconf: see above
    from trainer.protocol.token_shards import prepare_under

    text = compose("demo", (f"cluster.root={folder}",), environ=os.environ).config.data.text
    return "data.text=[]", f"data.path={prepare_under(text, folder / '.data')[0]}"


def _await_demo_end(screen: Screen, follower: RunFollower, run: str, timeout: float) -> bool:
    """Wait for the end of a demo, since no other command watches it. The score does not depend on it.

    Returns whether it has ended.
    """
    if is_over(one_row(run)):
        return True
    try:
        follower.until(is_over, timeout)
    except WaitTimeout as late:
        screen.warn("goes_on", f"{late}; end it:  orch cancel {run}")
        return False
    return True


def _injected_by_rank(kind: str) -> bool:
    """Return whether the rank injects the fault itself, by `drill.events` of its configuration."""
    return ALIASES.get(kind, kind) in KINDS


def _settings(kind: str, rank: int | None) -> tuple[str, ...]:
    """Return the demo's settings for the fault."""
    if not _injected_by_rank(kind):
        unsaved = ("checkpoint.max_unsaved_steps=20",) if kind == "full-disk" else ()
        return ("drill.events=[]", "train.steps=120", *unsaved)
    value = f", value: {SLOWER}" if kind == "slow-rank" else ""
    event = f"kind: {ALIASES.get(kind, kind)}, rank: {1 if rank is None else rank}, step: {STEP}{value}"
    # Four ranks with the same work: with two, the slow one cannot be identified quickly.
    steps = ("train.steps=80", "parallel.tp=1", "parallel.dp_shard=4") if kind == "slow-rank" else ()
    return (f"drill.events=[{{{event}}}]", *steps)


def _show(screen: Screen, run: str, card: Scorecard) -> None:
    if screen.json:
        screen.data("drill", {"run": run, **card.to_json()})
        return
    screen.say(f"\n{card.kind} in {run}: {card.verdict}")
    for name, text in _lines(card).items():
        if text:
            screen.say(f"  {name:<10} {text}")


def _lines(card: Scorecard) -> dict[str, str]:
    right = {True: ", which is right", False: ", which is wrong", None: ""}
    return {
        "struck": card.struck,
        "noticed": f"after {card.detected_s:.2f} s: {card.noticed}" if card.detected_s is not None else "never",
        "blamed": (card.named or "nobody") + right[card.culprit_right] if card.culprit_right is not None else "",
        "taken for": (card.failure or "nothing") + right[card.kind_right] if card.kind_right is not None else "",
        "decided": card.decision or "",
        "back": _back(card),
        "lost": f"{card.steps_lost} steps trained again" if card.steps_lost is not None else "",
        "evidence": card.evidence or "",
    }


def _back(card: Scorecard) -> str:
    if card.back_s is None:
        return ""
    where = "its ranks run again" if card.back_step is None else f"at step {card.back_step}"
    return f"{where} after {card.back_s:.2f} s"
