"""Marks that tie a job to its attempt: name, comment and file paths."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.scheduler.interface import JobStatus

PREFIX = "orch-"
TAG_VARIABLE = "ORCH_JOB"
"""Variable under which the job's script exports its name. Sites do not change it, and users can read it too."""

_EXPORT = re.compile(rf"^export {TAG_VARIABLE}=(\S+)$", re.MULTILINE)

_NAME = re.compile(r"orch-(\S+)-(\d+)-([0-9a-f]{8})(?!\S)", re.ASCII)
_COMMENT = re.compile(r"orch:([^\s/]+)/(\d+)(?:/([0-9a-f]{8}))?(?![\w/])", re.ASCII)
_FOLDER = re.compile(r"(.*/([^/]+)/attempts/(\d+)/submission)/[^/]*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class JobTag:
    """The attempt named by one mark of a job; a path gives the folder instead of the nonce."""

    run: str
    attempt: int
    nonce: str = ""
    folder: str = ""

    def matches(self, name_prefix: str) -> bool:
        """Return whether a job of this attempt may have a name with this prefix."""
        name = f"{PREFIX}{self.run}-{self.attempt}-{self.nonce}"
        return name.startswith(name_prefix) or (not self.nonce and name_prefix.startswith(name))


def job_comment(run: str, attempt: int, nonce: str) -> str:
    """Return the comment of a submitted job, as unique as its name."""
    return f"orch:{run}/{attempt}/{nonce}"


def tags(job: JobStatus) -> tuple[JobTag, ...]:
    """Return all orch marks of the job, the most reliable first; its script's mark counts only without others.

    Name and comment must begin with the mark: a user's job named `eval-` plus an orch name is not orch's.
    """
    return _parse_tags(job.name, job.comment, tuple(job.files), job.script_tag)


@lru_cache(maxsize=4096)  # each pass needs these several times per job
def _parse_tags(name: str, comment: str, files: tuple[str, ...], script_tag: str | None) -> tuple[JobTag, ...]:
    found = []
    for pattern, text in ((_NAME, name), (_COMMENT, comment)):
        if (match := pattern.match(text)) is not None:
            found.append(JobTag(run=match[1], attempt=int(match[2]), nonce=match[3] or ""))
    for path in files:
        if (match := _FOLDER.fullmatch(path)) is not None:
            found.append(JobTag(run=match[2], attempt=int(match[3]), folder=match[1]))
    if script_tag and (match := _NAME.match(script_tag)) is not None:
        found.append(JobTag(run=match[1], attempt=int(match[2]), nonce=match[3]))
    return tuple(found)


def find_script_tag(script: str) -> str:
    """Return the job name that a batch script exports; "" for a script that is not orch's."""
    found = _EXPORT.search(script)
    return found[1] if found else ""


def find_name_and_comment(text: str) -> tuple[str, str]:
    """Return a possible job name and comment within unparsable text; "" if absent."""
    name, comment = _NAME.search(text), _COMMENT.search(text)
    return name[0] if name else "", comment[0] if comment else ""


def is_marked(job: JobStatus, name_prefix: str, known: Collection[str]) -> bool:
    """Return whether this may be an orch job submitted under a name with this prefix; ids in `known` always are."""
    return (
        job.job_id in known
        or job.name.startswith(name_prefix)
        or any(tag.matches(name_prefix) for tag in tags(job))
    )  # fmt: skip
