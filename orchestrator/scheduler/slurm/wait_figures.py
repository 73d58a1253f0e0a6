"""Figures for a pending job: its place in the queue, its fair share, and the limit it waits for with its current use.

Slurm is asked rarely: at most one question within `GAP` seconds, and only about jobs that wait for `LEAST_WAIT`. Jobs
of one partition, account and QOS share an answer for `KEEP` seconds.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from checkpointing.storage.trusted_path import user_name
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import JobStatus, Resources
from orchestrator.scheduler.slurm.account_limits import (
    LimitReason,
    LimitRecord,
    describe_limits,
    find_limits,
    read_limits,
)
from orchestrator.scheduler.slurm.command_output import run_command
from orchestrator.scheduler.slurm.fair_share import (
    SPRIO_FORMAT,
    SSHARE_FIELDS,
    FairShare,
    JobPriority,
    describe_place,
    read_fair_shares,
    read_priorities,
)
from trainer.protocol.time_spans import stored_moment

LEAST_WAIT, GAP, KEEP = 60.0, 120.0, 300.0
ANSWER_WITHIN = 10.0
_MOST_ACCOUNTS = 6  # accounts looked up above a job's own, at most
_PARTITION_QOS = re.compile(r"\bQoS=(\S+)")
log = logging.getLogger("orch.controller")

Ask = Callable[[list[str]], str]
"""Function that runs a Slurm command and returns its output, or "" if Slurm refuses. Raises SlurmUnreachable."""


class Question(NamedTuple):
    """Jobs that an answer is about."""

    limit: str  # reason that names a limit; empty: the job's priority
    partition: str
    account: str
    qos: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Facts from Slurm for all jobs of one question."""

    asked_at: float  # seconds since the epoch
    records: tuple[LimitRecord, ...] = ()
    queue: tuple[JobPriority, ...] = ()
    share: FairShare | None = None


def _me() -> tuple[str, str]:
    """Return this user's name and uid."""
    return user_name(os.geteuid()), str(os.geteuid())


def ask_slurm(command: list[str]) -> str:
    """Return a command's output, or "" if Slurm refuses it. Raises SlurmUnreachable."""
    done = run_command(command, ANSWER_WITHIN)
    return done.stdout if done.returncode == 0 else ""


def ask_question(question: Question, asked: Resources, now: float, ask: Ask = ask_slurm) -> Answer:
    """Return Slurm's facts. Raises SlurmUnreachable."""
    if not question.limit:
        queue = _queue(question.partition, ask)
        return Answer(asked_at=now, queue=queue, share=_fair_share(question.account, ask) if queue else None)
    reason = LimitReason.parse(question.limit)
    assert reason is not None
    records = _qos(question, ask) if reason.is_qos else _associations(question, reason, asked, ask)
    return Answer(asked_at=now, records=tuple(records))


def _queue(partition: str, ask: Ask) -> tuple[JobPriority, ...]:
    """Return the pending jobs of a partition; no jobs on a site without priority factors (priority/basic).

    WARNING: squeue would list them there, but slurmctld would send the full records of all users' jobs.
    """
    return tuple(read_priorities(ask(["sprio", "-h", "-p", partition, "-o", SPRIO_FORMAT])))


def _fair_share(account: str, ask: Ask) -> FairShare | None:
    words = ["sshare", "-h", "-P", "-A", account, "-u", _me()[0], "-o", ",".join(SSHARE_FIELDS)]
    return next((row for row in read_fair_shares(ask(words)) if row.account == account), None)


def _qos(question: Question, ask: Ask) -> list[LimitRecord]:
    """Return the limits of the job's QOS and of its partition's QOS."""
    found = _PARTITION_QOS.search(ask(["scontrol", "-o", "show", "partition", question.partition]))
    names = dict.fromkeys(name for name in (question.qos, found[1] if found else "") if name not in ("", "N/A"))
    if not names:
        return []
    return read_limits(
        ask(["scontrol", "show", "assoc_mgr", "flags=qos", f"qos={','.join(names)}", f"users={_me()[0]}"])
    )


def _associations(question: Question, reason: LimitReason, asked: Resources, ask: Ask) -> list[LimitRecord]:
    """Return the associations of the job's account and of the accounts above it, up to the first exhausted limit."""
    found: list[LimitRecord] = []
    account, me = question.account, _me()
    for _ in range(_MOST_ACCOUNTS):
        records = read_limits(ask(["scontrol", "show", "assoc_mgr", "flags=assoc", f"accounts={account}"]))
        records = [one for one in records if one.user in ("", *me) and one.account == account]
        records = [one for one in records if one.partition in ("", question.partition)]
        found += records
        limits = find_limits(reason, records, me, asked)
        account = next((one.parent for one in records if not one.user), "")
        if not account or any(limit.used is not None and limit.used >= limit.allowed for limit in limits):
            break
    return found


class WaitFigures:
    """Sentences about pending jobs. `__call__` asks Slurm if a question is due, and otherwise uses its last answer."""

    def __init__(
        self, ask: Ask = ask_slurm, mono: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._ask, self._mono, self._wall = ask, mono, wall
        self._answers: dict[Question, tuple[float, Answer]] = {}
        self._last = -GAP

    def __call__(self, job: JobStatus, asked: Resources, waited: float) -> str:
        """Return the figures for a job that has waited for `waited` seconds, or "" if none are known."""
        question = _question(job)
        if question is None or waited < LEAST_WAIT:
            return ""
        now = self._mono()
        known = self._answers.get(question)
        if (known is None or now - known[0] >= KEEP) and now - self._last >= GAP:
            self._last = now
            try:
                known = now, ask_question(question, asked, self._wall(), self._ask)
            except SlurmUnreachable as error:
                log.warning("no figures for pending jobs: %s", error.what)
            kept = {key: one for key, one in self._answers.items() if now - one[0] < 10 * KEEP}
            self._answers = kept | ({question: known} if known else {})
        return describe(job, asked, known[1]) if known else ""


def _question(job: JobStatus) -> Question | None:
    """Return the question that a pending job's reason raises; None if no figure would help."""
    words = {name: job.settings.get(name, "") for name in ("partition", "account", "qos")}
    if job.reason == "Priority":
        return Question(limit="", **words)
    return Question(limit=job.reason, **words) if LimitReason.parse(job.reason) else None


def describe(job: JobStatus, asked: Resources, answer: Answer) -> str:
    """Return the sentence for a job, with the time of the answer; "" if the answer has no figures for it."""
    if answer.records:
        text = describe_limits(job.reason, answer.records, _me(), asked)
    else:
        text = describe_place(job.job_id, answer.queue, answer.share)
    return f"{text} (at {stored_moment(answer.asked_at)})" if text else ""
