"""Partitions, accounts and QOS that this user may use, as Slurm reports them."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.slurm.command_output import run_command, unreachable
from orchestrator.scheduler.slurm.node_capacity import count_gpus

ANSWER_WITHIN = 10.0
PARTITIONS = ("sinfo", "-h", "-a", "-o", "%P|%a|%l|%L|%D|%c|%m|%G")
ASSOCIATIONS = ("sacctmgr", "-n", "-P", "show", "assoc", "format=Cluster,Account,Partition,QOS,DefaultQOS")
DEFAULT_ACCOUNT = ("sacctmgr", "-n", "-P", "show", "user", "format=DefaultAccount")
_NO_TIME = frozenset({"n/a", "infinite", "UNLIMITED", ""})


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """Nodes of a partition that are alike; memory is in MiB."""

    nodes: int
    cores: int
    memory: int
    gpus: int

    def words(self) -> str:
        """Describe the nodes: `8 nodes with 96 cores, 1000 GiB, 8 GPUs`."""
        gpus = f", {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else ""
        plural = "s" if self.nodes != 1 else ""
        return f"{self.nodes} node{plural} with {self.cores} cores, {self.memory / 1024:.0f} GiB{gpus}"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Partition with the shapes of its nodes. A time is empty if there is none."""

    name: str
    is_default: bool
    is_up: bool
    longest: str
    default_time: str
    shapes: tuple[NodeShape, ...]

    @property
    def main_shape(self) -> NodeShape:
        """Return the shape of most of its nodes."""
        return max(self.shapes, key=lambda shape: shape.nodes)


@dataclass(frozen=True, kw_only=True)
class SiteSurvey:
    """Answers of Slurm. Accounts and QOS are empty if accounting does not answer or does not know the user."""

    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...] = ()
    default_account: str = ""
    qos: tuple[str, ...] = ()


def survey(user: str) -> SiteSurvey:
    """Ask Slurm. Raises SlurmUnreachable if sinfo gets no answer."""
    partitions = read_partitions(_answer(PARTITIONS))
    rows: list[tuple[str, ...]] = []
    default = ""
    with suppress(SlurmUnreachable):  # without accounting, Slurm needs neither
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", _answer(("scontrol", "show", "config")), re.MULTILINE)
        where = ("where", f"user={user}", *([f"cluster={cluster[1]}"] if cluster else []))
        rows = read_rows(_answer((*ASSOCIATIONS, *where)))
        default = _answer((*DEFAULT_ACCOUNT, "where", f"user={user}")).strip().partition("\n")[0]
    accounts = tuple(dict.fromkeys(row[1] for row in rows if len(row) == 5 and row[1]))
    qos = tuple(dict.fromkeys(name for row in rows if len(row) == 5 for name in row[3].split(",") if name))
    return SiteSurvey(
        partitions=partitions, accounts=accounts, default_account=default if default in accounts else "", qos=qos
    )


def _answer(command: Sequence[str]) -> str:
    done = run_command(list(command), ANSWER_WITHIN)
    if done.returncode != 0:
        raise unreachable(command[0], done.stderr)
    return done.stdout


def read_rows(text: str) -> list[tuple[str, ...]]:
    """Return the rows that `sacctmgr -n -P` prints."""
    return [tuple(line.split("|")) for line in text.splitlines() if line.strip()]


def read_partitions(text: str) -> tuple[Partition, ...]:
    """Parse the output of `PARTITIONS`. sinfo prints one row for each kind of node in a partition."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in text.splitlines():
        row = tuple(part.strip() for part in line.split("|"))
        if len(row) == 8 and row[4].isdigit() and row[5].rstrip("+").isdigit() and row[6].rstrip("+").isdigit():
            found.setdefault(row[0].rstrip("*"), []).append(row)
    return tuple(_partition(name, rows) for name, rows in found.items())


def _partition(name: str, rows: list[tuple[str, ...]]) -> Partition:
    first = rows[0]
    longest, default = ("" if time in _NO_TIME else time for time in first[2:4])
    shapes: dict[tuple[int, int, int], int] = {}
    for row in rows:  # rows that differ in other ways are added up
        shape = (int(row[5].rstrip("+")), int(row[6].rstrip("+")), count_gpus(row[7]))
        shapes[shape] = shapes.get(shape, 0) + int(row[4])
    return Partition(
        name=name, is_default=first[0].endswith("*"), is_up=first[1] == "up", longest=longest, default_time=default,
        shapes=tuple(
            NodeShape(nodes=nodes, cores=cores, memory=memory, gpus=gpus)
            for (cores, memory, gpus), nodes in shapes.items()
        ),
    )  # fmt: skip
