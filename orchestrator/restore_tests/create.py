"""Create a restore test as a separate run, and write its marks next to the checkpoints.

The controller writes these marks; the test itself writes none.
"""

import copy
import errno
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from checkpointing.config import CheckpointConfig
from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import pin, remove_pin
from checkpointing.storage.backends import LocalStorage, open_storage
from checkpointing.storage.trusted_path import can_be_exchanged
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verdicts import (
    RESTORE_TESTED,
    CopyVerdict,
    forget,
    read_manifest_digest,
    record,
    withdraw,
)
from orchestrator.config.compose import Composed, recompose
from orchestrator.config.restore_tests_config import OFF, SAME, RestoreTestsConfig, with_layout
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, NotFound, Precondition
from orchestrator.registry.records import Attempt, Checkpoint, NewRun, RestoreTest, Run
from orchestrator.registry.store import Store
from orchestrator.run_dirs.inheritable_checkpoints import shared_places
from orchestrator.scheduler.available_schedulers import make_instance, resolve
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.script import mounts_orch
from orchestrator.scheduler.slurm.sbatch_values import minutes
from orchestrator.submission.resume_contract import PACKAGES, TORCH, Rule, identity_changes
from orchestrator.submission.resume_request import current_identity, trained_identity
from trainer.protocol import restore_test
from trainer.protocol.config import NEVER
from trainer.protocol.config_sections.watch_config import OFF as WATCH_OFF
from trainer.protocol.launchers import PER_RANK
from trainer.protocol.plain_data import build
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, RESTORE_PROGRAM, TRAIN, UNDECIDED, Outcome
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeRecord

_NOTE = "restore test"


def hold(run: Run, test: RestoreTest) -> None:
    """Protect the checkpoint from retention until the test has ended. Raises OSError."""
    if _is_ours(test):
        pin(_own(run), test.checkpoint, f"{_NOTE} {test.test}", time.time(), holder=test.test)


def release(run: Run, test: RestoreTest) -> None:
    """Remove the test's own pin; pins of other tests, readers and users stay. Raises OSError."""
    remove_pin(_own(run), test.checkpoint, test.test)


def write_verdict(run: Run, test: RestoreTest, place: str, outcome: Outcome, reason: str, now: float) -> None:
    """Write the verdict next to the checkpoints, for retention; drop verdicts on deleted copies. Raises OSError."""
    if outcome in UNDECIDED or not _is_ours(test):
        return
    if outcome is Outcome.SUSPECT:  # its bytes are intact, but an earlier proof no longer holds
        withdraw(_own(run), test.checkpoint, place)
        return
    good = outcome is Outcome.RESTORED
    found = CopyVerdict(
        name=test.checkpoint, place=place, manifest=read_manifest_digest(open_storage(place), test.checkpoint),
        ok=good, level=RESTORE_TESTED, at=now, reason="" if good else reason,
    )  # fmt: skip
    record(_own(run), found)
    forget(_own(run), place, Catalog(place).names())


def _is_ours(test: RestoreTest) -> bool:
    """Return whether orch wrote the checkpoint and may delete it. Checkpoints of a user's program are not touched."""
    return parse_name(test.checkpoint) is not None


def _own(run: Run) -> LocalStorage:
    """Return the run's checkpoint storage. Raises FileNotFoundError if it is missing; it must not be recreated."""
    folder = RunDir(Path(run.run_dir)).checkpoints
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run's folder is not there", str(folder))
    return LocalStorage(folder)


LEAST_MINUTES = 30
"""Time limit in minutes for a small checkpoint.

A shorter limit set by the run, or `restore_tests.cluster.time`, takes precedence.
"""
BYTES_PER_MINUTE = 2 << 30
"""Checkpoint bytes per additional minute of time limit; a test reads them three times, at 100 MB/s or faster."""
LOW_PRIORITY = 10000
"""`--nice` value of tests, which any user may set. It makes tests queue behind all other jobs."""
NAME_ROOM = 48


@dataclass(frozen=True, kw_only=True)
class RestoreTestRequest:
    """Request for a restore test; None means the value from the run's `restore_tests`."""

    checkpoint: Checkpoint
    layout: str = SAME
    steps: int | None = None
    level: int | None = None
    tier: str | None = None
    kind: str = ""  # kind of cluster; empty: the run's
    forced: bool = False


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Test plan: config, location of the checkpoint, and the attempt that saved it."""

    composed: Composed
    settings: RestoreTestsConfig
    config: RunConfig  # of the tested run
    place: str
    saved_digest: str
    saved_by_run: bool


def check_test(store: Store, run: Run, asked: RestoreTestRequest) -> _Plan:
    """Return the test plan without writing anything. Raises the same errors as `create_test`."""
    saved_by = _attempt(store, run, asked.checkpoint)
    config: RunConfig = build(RunConfig, store.config(run.config_digest))
    settings = config.restore_tests
    # An imported checkpoint is tested with the config of the first attempt, which trained from it.
    first = run.config_digest if config.command else store.attempt(run.name, 1).config_digest or run.config_digest
    saved_digest = saved_by.config_digest if saved_by else first
    return _Plan(
        composed=_compose_test(store.config(saved_digest), run, settings, asked),
        settings=settings,
        config=config,
        place=choose_copy(store, run, config, asked.checkpoint, settings.tier if asked.tier is None else asked.tier),
        saved_digest=saved_digest,
        saved_by_run=saved_by is not None,
    )


def create_test(store: Store, run: Run, asked: RestoreTestRequest, now: float) -> RestoreTest:
    """Write the run that executes the test; the next pass of a controller launches it.

    Raises ConfigError for a layout that does not fit the run, and Precondition for a checkpoint that no job can reach
    or, for scheduled tests, if another test of the run is in progress.
    """
    plan = check_test(store, run, asked)
    kind = resolve(asked.kind or run.cluster)
    order = restore_test.RestoreTestOrder(
        run=run.name,
        run_dir=run.run_dir,
        place=plan.place,
        checkpoint=asked.checkpoint.name,
        step=asked.checkpoint.step,
        layout=asked.layout,
        same_layout=asked.layout == SAME,
        level=plan.settings.level if asked.level is None else asked.level,
        steps=plan.settings.steps if asked.steps is None else asked.steps,
        manifest=asked.checkpoint.manifest,
        config_digest=plan.saved_digest if plan.saved_by_run else "",
        steps_digest=plan.saved_digest,
        agreed=_find_exact_test(store.restore_tests(run.name), asked.layout),
        differs=_changes_since_training(run, plan.config),
    )
    identity = {key: value for key, value in run.identity.items() if key != "imported"}
    composed = plan.composed
    new = NewRun(
        slug=composed.config.name,
        cluster=kind,
        root=Path(run.run_dir).parent,
        config_digest=composed.digest,
        total_steps=0 if composed.config.command else order.last_step(composed.config.train.steps),
        identity={**identity, "restore_test": asdict(order)},
        scheduler=make_instance(kind)(),
    )

    def write_test() -> RestoreTest:
        if not asked.forced and store.restore_tests(run.name, going_on=True):
            # A controller that was suspended must not duplicate its successor's test.
            hint = f"orch restore-tests history {run.name}"
            raise Precondition(f"a restore test of {run.name} is under way", where=run.name, hint=hint)
        store.put_config(composed.data)
        made, _ = store.create_run(new, now=now, nonce=token_hex(4))
        test = RestoreTest(
            test=made.name, run=run.name, checkpoint=order.checkpoint, layout=asked.layout, step=order.step,
            begun_at=now, forced=asked.forced,
        )  # fmt: skip
        store.put_restore_test(test)
        return test

    return store.together(write_test)


def _find_exact_test(tests: Iterable[RestoreTest], layout: str) -> str:
    """Return the name of a test on this layout whose steps were identical to the run's, or ""."""
    exact = (test for test in tests if test.layout == layout and test.evidence.get("exact"))
    good = (test for test in exact if test.verdict == Outcome.RESTORED and test.evidence.get("compared"))
    return next((test.test for test in good), "")


def _changes_since_training(run: Run, config: RunConfig) -> tuple[str, ...]:
    """Return the changes since the last training that affect the computation.

    The test's job compares the packages recorded by the run's attempts with its own.
    """
    trained = trained_identity(run)
    record = CodeRecord.from_identity(trained)
    by_job = (PACKAGES, TORCH) if record is not None and record.packages is not None else ()
    changes = identity_changes(trained, current_identity(run, config))
    return tuple(item.key for item in changes if item.term.rule is not Rule.HARMLESS and item.key not in by_job)


def shared_paths(run: Run, config: RunConfig | None) -> list[str]:
    """Return the paths of the tiers that all nodes share; without a config, the run's own folder."""
    folder = RunDir(Path(run.run_dir))
    return [place.path for place in shared_places(config.checkpoint if config else CheckpointConfig(), folder)]


def choose_copy(store: Store, run: Run, config: RunConfig, checkpoint: Checkpoint, tier: str) -> str:
    """Return the folder or URL of the copy to test. Raises Precondition if no copy is visible to every node."""
    folder = RunDir(Path(run.run_dir))
    shared = shared_paths(run, config)
    home = checkpoint.tier or str(folder.checkpoints)
    copies = [copy_.tier for copy_ in store.copies(run.name) if copy_.name == checkpoint.name]
    seen = [place for place in (home, *copies) if place in shared or config.command]
    if tier:
        wanted = [place for place in (home, *copies) if tier in (place, place.rpartition("/")[0])]
        if tier == "run" and str(folder.checkpoints) in (home, *copies):
            wanted = [str(folder.checkpoints)]
        seen = [place for place in wanted if place in shared]
    if not seen:
        where = f"tier {tier}" if tier else "a tier that every node sees"
        raise Precondition(
            f"{checkpoint.name} is not in {where}",
            where=f"it is in {', '.join((home, *copies))}",
            hint="add a shared tier to checkpoint.tiers",
        )
    return seen[0]


def _attempt(store: Store, run: Run, checkpoint: Checkpoint) -> Attempt | None:
    parts = parse_name(checkpoint.name)
    if parts is None:
        return None
    try:
        attempt = store.attempt(run.name, parts.attempt)
    except NotFound:
        return None
    return attempt if attempt.nonce == parts.nonce and attempt.config_digest else None


def _compose_test(
    saved_with: dict[str, Any], run: Run, settings: RestoreTestsConfig, asked: RestoreTestRequest
) -> Composed:
    """Return the test config: no saves, drills or retries, and hang limits that allow for slow reads."""
    data = recompose(saved_with, []).data
    data = {**copy.deepcopy(data), **with_layout(data, asked.layout)}
    data["name"] = f"{run.name[:NAME_ROOM]}-test"
    data["cluster"]["sbatch"] = {"nice": LOW_PRIORITY, **data["cluster"]["sbatch"]}
    longest = LEAST_MINUTES + asked.checkpoint.bytes // BYTES_PER_MINUTE
    data["cluster"] |= {"time": _time(data["cluster"]["time"], longest), **settings.cluster}
    if asked.kind:
        data["cluster"]["kind"] = asked.kind
    data["checkpoint"] |= {"every": 0, "tiers": [], "max_unsaved_steps": 0}
    data["recovery"] |= {"restarts_in_place": 0, "max_failures": 0, "requeue": NEVER}
    data["detection"]["spike"]["deviations"] = 0.0
    hang = data["detection"]["hang"]
    hang["slow"] = hang["most"] = max(hang["most"], 60.0 * longest)  # ranks wait for the slowest reader
    data["drill"]["events"] = []
    data["restore_tests"] |= {"every": OFF}
    if data["command"]:
        data |= _command(data, run, settings, asked.checkpoint)
    workload, code = data["workload"], RunDir(Path(run.run_dir)).code
    if workload["snapshot"]:  # the copy used for training
        workload["path"] = [str(code / str(index)) for index in range(len(workload["path"]))]
        # On a shared root the test uses its own copy, because other users could replace the original before it starts.
        workload["snapshot"] = can_be_exchanged(code.parent)
    try:
        return recompose(data, [], environ=os.environ)
    except ConfigError as error:
        hint = "choose a layout that fits the run's configuration: same, 1, or NODESxRANKS"
        raise ConfigError(
            f"layout {asked.layout}: {error.what}", where=f"a restore test of {run.name}", hint=hint
        ) from error


def _command(data: dict[str, Any], run: Run, settings: RestoreTestsConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config changes for a user's program. Raises ConfigError if no program can restore the checkpoint."""
    if not settings.command and data["watch"]["instrument"] == WATCH_OFF:
        raise ConfigError(
            f"{run.name} runs your own program, whose steps are unknown: its start-up module is off",
            where="restore_tests.command", hint="restore_tests.command=[python, restore.py] in the run's configuration",
        )  # fmt: skip
    python = data["cluster"]["python"] or _submitters_python(data["cluster"]["templates"], run)
    variables = {
        CHECKPOINT_VARIABLE: checkpoint.path, "ORCH_CHECKPOINT_STEP": str(checkpoint.step),
        "ORCH_RESUME_PATH": checkpoint.path, **({} if settings.command else _NO_TRACKERS),
    }  # fmt: skip
    return {
        "command": [python, str(RESTORE_PROGRAM), *(settings.command or (TRAIN, *data["command"]))],
        "launcher": PER_RANK if settings.command else data["launcher"],
        "checkpoints": {**data["checkpoints"], "path": ""},
        "env": {**data["env"], **variables},
    }


_NO_TRACKERS = {
    "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "mlruns", "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
"""Variables that keep a program from reporting the steps of a test to a tracker's server."""


def _submitters_python(templates: Sequence[str], run: Run) -> str:
    """Return the submitter's interpreter, or the image's if the job runs in a container."""
    own = "" if mounts_orch(templates) else Submitter.from_identity(run.identity).python
    return own or "python"


def _time(limit: str, longest: int) -> str:
    try:
        return limit if minutes("cluster.time", limit) <= longest else str(longest)
    except ConfigError:
        return str(longest)
