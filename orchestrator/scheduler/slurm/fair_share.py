"""A pending job's place in the queue: priority factors of the jobs before it, and its account's fair share. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

SEPARATOR = "|"
FACTORS = {
    "%A": "age", "%B": "association", "%F": "fair share", "%J": "job size", "%P": "partition", "%Q": "QOS",
    "%S": "site factor", "%N": "nice",
}  # fmt: skip
"""Priority factors by their letter in sprio's format. Nice is subtracted, the others are added."""
SPRIO_FORMAT = SEPARATOR.join(("%i", "%Y", *FACTORS))
SSHARE_FIELDS = ("Account", "User", "NormShares", "EffectvUsage", "FairShare")


@dataclass(frozen=True, kw_only=True)
class JobPriority:
    """Priority of a pending job."""

    job_id: str
    priority: float
    factors: tuple[tuple[str, float], ...]


def read_priorities(text: str) -> list[JobPriority]:
    """Return the jobs printed by `sprio -h -o SPRIO_FORMAT`; skip unreadable rows."""
    found = []
    for line in text.splitlines():
        job_id, *values = (part.strip() for part in line.split(SEPARATOR))
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            continue
        if job_id and numbers:
            factors = dict(zip(FACTORS.values(), numbers[1:], strict=False))
            factors = {name: -value if name == "nice" else value for name, value in factors.items()}
            found.append(JobPriority(job_id=job_id, priority=numbers[0], factors=tuple(factors.items())))
    return found


@dataclass(frozen=True, kw_only=True)
class FairShare:
    """Fair share of a user in an account. Values are None if the site reports none."""

    account: str
    user: str
    shares: float | None  # share of the machine that was promised
    usage: float | None  # share of the recent usage
    factor: float | None  # 0 to 1; the higher, the sooner a job starts

    def describe(self) -> str:
        """Return it in words: `account x: fair share 0.12 (40 % of the usage, 10 % of the shares)`."""
        factor = "unknown" if self.factor is None else f"{self.factor:.2f}"
        text = f"account {self.account}: fair share {factor}"
        if self.usage is None or self.shares is None:
            return text
        return f"{text} ({100 * self.usage:.0f} % of the usage, {100 * self.shares:.0f} % of the shares)"


def read_fair_shares(text: str) -> list[FairShare]:
    """Return the users printed by `sshare -h -P -o SSHARE_FIELDS`; rows of accounts and unreadable rows are skipped."""
    found = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(SEPARATOR)]
        if len(fields) >= len(SSHARE_FIELDS) and fields[1]:
            account, user, *numbers = fields
            shares, usage, factor = (_number(value) for value in numbers[:3])
            found.append(FairShare(account=account, user=user, shares=shares, usage=usage, factor=factor))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def describe_place(job_id: str, queue: Sequence[JobPriority], share: FairShare | None) -> str:
    """Return a pending job's priority, the jobs before it, and the factor that makes most of the difference.

    Empty if the queue does not list the job.
    """
    own = next((job for job in queue if job.job_id == job_id), None)
    if own is None:
        return ""
    before = [job for job in queue if job.priority > own.priority]
    text = f"priority {own.priority:,.0f}"
    if not before:
        return f"{text}; no job that Slurm shows here has more"
    least = min(job.priority for job in before)
    text = f"{text}, behind {len(before)} job{'' if len(before) == 1 else 's'} of at least {least:,.0f}"
    gaps = {
        name: fmean(dict(job.factors).get(name, 0.0) for job in before) - value for name, value in own.factors
    }  # fmt: skip
    name = max(gaps, key=lambda each: gaps[each], default="")
    if name and gaps[name] > 0:
        mine = dict(own.factors)[name]
        text = f"{text}, mostly by {name} ({mine:,.0f} here, {mine + gaps[name]:,.0f} on average there)"
    return f"{text}; {share.describe()}" if share is not None else text
