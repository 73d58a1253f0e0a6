"""What a job of ours bears of the attempt it was submitted for: its name, its comment, the paths of its files."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.scheduler.interface import JobStatus

PREFIX = "orch-"
TAG_VARIABLE = "ORCH_JOB"
"""The job's script exports its name under this variable: no site changes it, and people find it there, too."""

_EXPORT = re.compile(rf"^export {TAG_VARIABLE}=(\S+)$", re.MULTILINE)

_NAME = re.compile(r"orch-(\S+)-(\d+)-([0-9a-f]{8})(?!\S)", re.ASCII)
_COMMENT = re.compile(r"orch:([^\s/]+)/(\d+)(?:/([0-9a-f]{8}))?(?![\w/])", re.ASCII)
_FOLDER = re.compile(r"(.*/([^/]+)/attempts/(\d+)/submission)/[^/]*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class JobTag:
    """The attempt that one mark of a job names; a path tells the folder in place of the nonce."""

    run: str
    attempt: int
    nonce: str = ""
    folder: str = ""

    def matches(self, name_prefix: str) -> bool:
        """Whether a job of this attempt may have a name that starts so."""
        name = f"{PREFIX}{self.run}-{self.attempt}-{self.nonce}"
        return name.startswith(name_prefix) or (not self.nonce and name_prefix.startswith(name))


def comment_of(run: str, attempt: int, nonce: str) -> str:
    """The comment with which a job is submitted: as unique as its name."""
    return f"orch:{run}/{attempt}/{nonce}"


def tags(job: JobStatus) -> tuple[JobTag, ...]:
    """Every mark of ours that the job bears, the surest first; that of its script, where it has no other.

    Name and comment must begin with ours: somebody's job that is called `eval-` and then a name of ours is none.
    """
    return _tags_in(job.name, job.comment, tuple(job.files), job.script_tag)


@lru_cache(maxsize=4096)  # every pass asks for those of every job several times
def _tags_in(name: str, comment: str, files: tuple[str, ...], script_tag: str | None) -> tuple[JobTag, ...]:
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


def tag_in(script: str) -> str:
    """The name of the job that a batch script exports; "" for a script that is none of ours."""
    found = _EXPORT.search(script)
    return found[1] if found else ""


def names_in(text: str) -> tuple[str, str]:
    """What looks like a name and a comment of ours in a text that cannot be read otherwise; "" for none."""
    name, comment = _NAME.search(text), _COMMENT.search(text)
    return name[0] if name else "", comment[0] if comment else ""


def is_marked(job: JobStatus, name_prefix: str, known: Collection[str]) -> bool:
    """Whether the job may be one of ours whose name, as it was submitted, starts so; ids in `known` always are."""
    return (
        job.job_id in known
        or job.name.startswith(name_prefix)
        or any(tag.matches(name_prefix) for tag in tags(job))
    )  # fmt: skip
