"""Limits of accounts, users and QOS with their current use, and the limit that a pending job waits for. Pure.

Sources: the output of `scontrol show assoc_mgr` (src/scontrol/info_assoc_mgr.c in Slurm's tree) and the names of
pending reasons (src/common/job_state_reason.c).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.scheduler.interface import Resources


@dataclass(frozen=True, kw_only=True)
class LimitUse:
    """A limit and its use. `used` is None if Slurm reports only the limit."""

    owner: str  # "QOS debug", "account x", "user ann in account x"
    name: str  # GrpTRES, MaxJobsPU, ...
    resource: str  # gres/gpu, cpu, ...; empty for limits on jobs or time
    allowed: float
    used: float | None
    jobs: int | None = None  # running jobs that count
    user: str = ""  # name or uid whose use this is, for a QOS's limit on each user

    def describe(self) -> str:
        """Return the limit with its use: `QOS debug: GrpTRES=gres/gpu=8, 8 in use by 2 jobs`."""
        limit = f"{self.owner}: {self.name}={f'{self.resource}=' if self.resource else ''}{self.allowed:g}"
        if self.used is None:
            return limit
        if "Mins" in self.name or "Wall" in self.name:
            return f"{limit}, {self.used:g} used" + (" or promised" if "RunMins" in self.name else "")
        by = f" by {self.jobs} job{'' if self.jobs == 1 else 's'}" if self.jobs is not None and self.resource else ""
        return f"{limit}, {self.used:g} in use{by}"


@dataclass(frozen=True, kw_only=True)
class LimitRecord:
    """An association or QOS with its limits, including those of single users and accounts in a QOS."""

    qos: str = ""
    account: str = ""
    user: str = ""
    partition: str = ""
    parent: str = ""
    limits: tuple[LimitUse, ...] = ()

    @property
    def owner(self) -> str:
        if self.qos:
            return f"QOS {self.qos}"
        place = f"account {self.account}" + (f" on partition {self.partition}" if self.partition else "")
        return f"user {self.user} in {place}" if self.user else place


_TOKEN = re.compile(r"([A-Za-z/]+)=(\S*)")
_USE = re.compile(r"(N|[\d.]+)(?:\(([\d.]+)\))?")
_NAME = re.compile(r"[^(\s]*")
_TRES = re.compile(r"((?:Grp|Max)TRES(?:Mins|RunMins)?(?:PU|PA)?)")
_COUNTS = re.compile(r"(?:Grp|Max)(?:Jobs|SubmitJobs|Wall)(?:PU|PA)?")
_SECTIONS = {"Account Limits": "account", "User Limits": "user"}
"""Headings of a QOS's limits on each account and each user; a name follows on a line of its own."""


def read_limits(text: str) -> list[LimitRecord]:
    """Return the records printed by `scontrol show assoc_mgr flags=assoc,qos`; unknown lines are ignored."""
    return [_record(block) for block in _blocks(text.splitlines())]


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in lines:
        if line.startswith(("ClusterName=", "QOS=")):
            if block:
                yield block
            block = [line]
        elif block and line.startswith(" "):
            block.append(line)
    if block:
        yield block


def _record(lines: Sequence[str]) -> LimitRecord:
    head = dict(_TOKEN.findall(lines[0]))
    whole = dict(_TOKEN.findall(" ".join(lines)))
    names = {key: _bare(head.get(key, "")) for key in ("QOS", "Account", "UserName", "Partition")}
    record = LimitRecord(
        qos=names["QOS"], account=names["Account"], user=names["UserName"], partition=names["Partition"],
        parent=_bare(whole.get("ParentAccount", "")),
    )  # fmt: skip
    found: list[LimitUse] = []
    section, user, tokens = "", "", dict[str, str]()
    for line in [*lines[1:], ""]:
        if "=" in line:
            tokens |= dict(_TOKEN.findall(line))
            continue
        found += _limits(record.owner, user, tokens)
        tokens = {}
        section = _SECTIONS.get(line.strip(), section)
        user = _bare(line.strip()) if section == "user" else ""
    return LimitRecord(**{**vars(record), "limits": tuple(found)})


def _bare(value: str) -> str:
    """Return a name without the id in parentheses that follows it."""
    match = _NAME.match(value)
    return match[0] if match else ""


def _limits(owner: str, user: str, tokens: Mapping[str, str]) -> list[LimitUse]:
    jobs = next((use for name in ("GrpJobs", "MaxJobsPU", "MaxJobsPA") if (use := _use(tokens.get(name, ""))[1])), None)
    running = None if jobs is None else int(jobs)
    found = []
    for name, value in tokens.items():
        parts = value.split(",") if _TRES.fullmatch(name) else [value] if _COUNTS.fullmatch(name) else []
        for part in parts:
            resource, _, amount = part.rpartition("=")
            allowed, used = _use(amount)
            if allowed is not None:
                of = {"owner": owner, "name": name, "resource": resource, "user": user}
                found.append(LimitUse(**of, allowed=allowed, used=used, jobs=running))
    return found


def _use(text: str) -> tuple[float | None, float | None]:
    """Return the limit and the use in `8(6)`, `N(6)` or `8`; N is no limit."""
    match = _USE.fullmatch(text)
    if match is None:
        return None, None
    return None if match[1] == "N" else float(match[1]), None if match[2] is None else float(match[2])


_REASON = re.compile(
    r"(?P<owner>QOS|Assoc)?(?P<scope>Grp|Max)"
    r"(?P<what>Cpu|CPU|Node|Mem|Memory|GRES|License|BB|Energy|Billing|Unknown|SubmitJobs?|Jobs|Wall)"
    r"(?P<time>RunMinutes|Minutes)?(?P<per>PerUser|PerAccount)?(?:Limit)?"
)
_RESOURCES = {
    "Cpu": "cpu", "CPU": "cpu", "Node": "node", "Mem": "mem", "Memory": "mem", "GRES": "gres/", "License": "license/",
    "BB": "bb/", "Energy": "energy", "Billing": "billing",
}  # fmt: skip
_TIMES = {"": "", "Minutes": "Mins", "RunMinutes": "RunMins"}
_PER = {"": "", "PerUser": "PU", "PerAccount": "PA"}


@dataclass(frozen=True, kw_only=True)
class LimitReason:
    """The limit that a pending reason names: `QOSGrpGRES` is GrpTRES on resources that begin with gres/ of a QOS."""

    is_qos: bool
    name: str
    resource: str

    @classmethod
    def parse(cls, reason: str) -> "LimitReason | None":
        """Return the limit named by a pending reason; None for other reasons."""
        match = _REASON.fullmatch(reason)
        if match is None or (match["owner"] is None and match["per"] != "PerAccount"):
            return None
        what = match["what"]
        if what.startswith(("Jobs", "SubmitJob", "Wall")):
            name = f"{match['scope']}{what.removesuffix('s') + 's' if what != 'Wall' else what}"
        else:
            name = f"{match['scope']}TRES{_TIMES[match['time'] or '']}"
        return cls(
            is_qos=match["owner"] != "Assoc", name=name + _PER[match["per"] or ""], resource=_RESOURCES.get(what, "")
        )


def find_limits(
    reason: LimitReason, records: Iterable[LimitRecord], me: Collection[str], asked: Resources
) -> list[LimitUse]:  # fmt: skip
    """Return the limits that the reason may mean, only the exhausted ones if there are any.

    `records` are the job's QOS, or the associations of its account and the accounts above it. `me` has the user's name
    and uid, because Slurm prints either.
    """
    known = [
        limit
        for record in records
        if bool(record.qos) == reason.is_qos and (not record.user or record.user in me)
        for limit in record.limits
        if limit.name == reason.name and limit.resource.startswith(reason.resource)
        and (not limit.user or limit.user in me)
    ]  # fmt: skip
    exhausted = [one for one in known if one.used is not None and one.used + job_request(one, asked) > one.allowed]
    return exhausted or known


def job_request(limit: LimitUse, asked: Resources) -> float:
    """Return how much of a limit's resource the job requests; at least 1 of a resource that orch does not request."""
    amounts = {
        "cpu": asked.nodes * asked.cpus_per_task, "node": asked.nodes, "gres/gpu": asked.nodes * asked.gpus_per_node,
    }  # fmt: skip
    return max(1, amounts.get(limit.resource, 1)) if "Mins" not in limit.name else 1


def describe_limits(reason: str, records: Iterable[LimitRecord], me: Collection[str], asked: Resources) -> str:
    """Return the limits that a pending reason names, with their use and the job's request; "" if none is known."""
    named = LimitReason.parse(reason)
    if named is None:
        return ""
    words = []
    for limit in find_limits(named, records, me, asked):
        share = (
            f"; this job requests {job_request(limit, asked):g}" if limit.resource and "Mins" not in limit.name else ""
        )
        words.append(f"{limit.describe()}{share}")
    return "; ".join(dict.fromkeys(words))
