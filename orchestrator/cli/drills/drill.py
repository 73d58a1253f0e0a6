"""`orch drill`: inject a fault into a live run or a demo, and score the reaction."""

import shlex
from dataclasses import asdict
from pathlib import Path

import click

from orchestrator.cli.drills.demo import demo_root, launch_demo
from orchestrator.cli.drills.drill_run import DrillRun, extra_cost, why_undetectable
from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, Scorecard
from orchestrator.cli.live_jobs.live_attempt import find_live_attempt
from orchestrator.cli.runs.events import RunFollower, following
from orchestrator.cli.runs.run_reader import StepLines
from orchestrator.cli.terminal.argument_types import NonEmptyPath, timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, RunFailed, WaitTimeout
from orchestrator.near_words import hint_with_choices, nearest
from orchestrator.run_view import find_run
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import KINDS
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
@click.option("--demo", is_flag=True, help="Use a small separate run on this machine.")
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
        kind = _require_kind(words[0])
        card, run = _in_a_demo(screen, kind, rank, root, words[1:], timeout)
    else:
        run, kind = _run_and_kind(words)
        card, run = _in_a_run(screen, run, kind, rank, yes, timeout)
    if screen.json:
        screen.data("drill", {"run": run, **asdict(card)})
        return 0 if card.passed else RunFailed.exit_code
    _show(screen, run, card)
    if not card.passed:
        hint = f"orch show {run}   orch logs {run} --rank first-error"
        raise RunFailed(f"{kind}: {card.verdict}", where=run, hint=hint)
    return 0


def _run_and_kind(words: tuple[str, ...]) -> tuple[str, str]:
    """Return the run and the kind of fault. Raises ConfigError with the corrected command."""
    if len(words) == 1 and words[0] not in EXPECTED:
        find_live_attempt(words[0])  # report a run without a live attempt before the missing kind
    if len(words) != 2:
        run = next((word for word in words if word not in EXPECTED), "RUN")
        kind = next((word for word in words if word in EXPECTED), "kill-rank")
        hint = f"orch drill {shlex.quote(run)} {kind}"
        raise ConfigError("a drill takes a run and a kind", where="command line", hint=hint)
    if words[1] not in EXPECTED and (kind := nearest(words[0], EXPECTED, 0.8)):
        hint = f"orch drill {shlex.quote(words[1])} {kind}"
        raise ConfigError("the run comes first, then the kind", where="command line", hint=hint)
    return words[0], _require_kind(words[1])


def _require_kind(kind: str) -> str:
    if kind not in EXPECTED:
        hint = hint_with_choices(nearest(kind, EXPECTED), f"one of {', '.join(EXPECTED)}")
        raise ConfigError(f"no such fault: {kind}", where="command line", hint=hint)
    return kind


def _in_a_run(
    screen: Screen, name: str, kind: str, rank: int | None, yes: bool, timeout: float
) -> tuple[Scorecard, str]:
    found = find_live_attempt(name)
    if kind == "full-disk":
        raise Precondition(
            "full-disk needs a private job on this machine", where="command line",
            hint="orch drill --demo full-disk",
        )  # fmt: skip
    _check(kind, found.run, found.config)
    # Last, so that --yes is not followed by another refusal.
    cost = extra_cost(kind, found.config, rank)
    if cost is not None and not yes:
        raise Precondition(
            f"{kind} costs {found.run} more than a restart: {cost}", where="command line",
            hint=f"to do it anyway:  orch drill {found.run} {kind} --yes      in a demo:  orch drill --demo {kind}",
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
        raise Precondition(f"{kind} has no effect in {run}: {why}", where=run, hint=f"orch drill --demo {kind}")
    # A spare would continue from memory and never read the damaged checkpoint.
    if kind == "corrupt-checkpoint" and config.cluster.spare_nodes:
        spares = config.cluster.spare_nodes
        raise Precondition(
            f"{kind} needs a job that ends with a node, and this one has cluster.spare_nodes={spares}",
            where="command line", hint=f"orch drill --demo {kind}",
        )  # fmt: skip


def _in_a_demo(
    screen: Screen, kind: str, rank: int | None, root: Path | None, overrides: tuple[str, ...], timeout: float
) -> tuple[Scorecard, str]:
    note = f"drill: 2 simulated nodes x 2 ranks train on this machine; {kind} strikes on the way"
    settings = (f"cluster.root={demo_root(root)}", f"name=drill-{kind}", *_settings(kind, rank))
    run, run_dir = launch_demo(screen, overrides, settings, note, lambda config: _check(kind, "this demo", config))
    with following(screen, run) as follower:
        drill_run = DrillRun(follower, run, kind, StepLines(RunDir(run_dir)))
        if not _injected_by_rank(kind):
            drill_run.until_saved(timeout)
            drill_run.inject(screen, find_live_attempt(run), rank, timeout)
        card = drill_run.until_over(timeout)
        _await_demo_end(screen, follower, run, timeout)
    return card, run


def _await_demo_end(screen: Screen, follower: RunFollower, run: str, timeout: float) -> None:
    """Wait for the end of a demo, since no other command watches it. The score does not depend on it."""
    try:
        if not find_run(run).is_over:
            follower.until(lambda view: view.is_over, timeout)
    except WaitTimeout as late:
        screen.warn("goes_on", f"{late}; end it:  orch cancel {run}")


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
    right = {True: ", which is right", False: ", which is wrong", None: ""}
    where = "its ranks run again" if card.back_step is None else f"at step {card.back_step}"
    lines = {
        "struck": card.struck,
        "noticed": f"after {card.detected_s:.2f} s: {card.noticed}" if card.detected_s is not None else "never",
        "blamed": (card.named or "no culprit") + right[card.culprit_right] if card.culprit_right is not None else "",
        "taken for": (card.failure or "nothing") + right[card.kind_right] if card.kind_right is not None else "",
        "decided": card.decision,
        "back": f"{where} after {card.back_s:.2f} s" if card.back_s is not None else "",
        "lost": f"{card.steps_lost} steps trained again" if card.steps_lost is not None else "",
        "evidence": card.evidence,
    }
    screen.say(f"\n{card.kind} in {run}: {card.verdict}")
    for name, text in lines.items():
        if text:
            screen.say(f"  {name:<10} {text}")
