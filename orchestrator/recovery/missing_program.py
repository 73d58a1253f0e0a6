"""The program that starts the agents and that nodes lack, such as a container runtime, from a job's logs. Pure."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_BY_SLURM = re.compile(r"execve\(\): (\S.{0,300}): No such file or directory")
_BY_SHELL = re.compile(r"^\S*bash: (?:line \d+: )?exec: (\S.{0,300}): not found$")
_AT_THE_END = re.compile(r"^\S*bash: (?:line \d+: )?(/.{1,300}): No such file or directory$")
"""The shell of a job's task; unless it is the last line, another program may be missing."""
_EXITED = re.compile(r"^srun: error: (\S{1,300}): tasks? ([\d,-]{1,300}): Exited with exit code")
_TASK = re.compile(r"_(\d{1,6})_log\.\w+$")
_TAKES_PATH = ("apptainer", "singularity", "podman-hpc")
"""Programs of the templates that have the value `program`."""


@dataclass(frozen=True, kw_only=True)
class MissingProgram:
    """A program, and the nodes that lack it as Slurm writes them, `n[1-2]`; empty if its log does not name them."""

    program: str
    nodes: str

    def describe(self, job_nodes: tuple[str, ...]) -> str:
        """Return what is missing, where, and what to do."""
        named = self.nodes or ", ".join(job_nodes)
        return f"{self.program} was not found on {named or 'its nodes'}; {self._remedy}"

    def only_node(self, job_nodes: tuple[str, ...]) -> str | None:
        """Return the node that lacks it, if other nodes of the job have it."""
        return self.nodes if self.nodes in job_nodes and len(job_nodes) > 1 else None

    @property
    def _remedy(self) -> str:
        if os.path.isabs(self.program):
            return "check that every node sees that path"
        own = ", or cluster.template_args.program=PATH" if self.program in _TAKES_PATH else ""
        return f"install it there, or load its module (template `modules`){own}"


def find_missing_program(tails: Mapping[str, str]) -> MissingProgram | None:
    """Return the program that tasks could not start; None if the logs name none. `tails` has their ends by file."""
    program, tasks = "", set()
    for name, text in tails.items():
        found = _program(text)
        program = program or found
        if found and found == program and (task := _TASK.search(name)) is not None:
            tasks.add(int(task[1]))
    if not program:
        return None
    exits = (_EXITED.match(line) for text in tails.values() for line in text.splitlines())
    nodes = {found[1] for found in exits if found and _numbers(found[2]) & tasks}
    return MissingProgram(program=program, nodes=", ".join(sorted(nodes)))


def _program(text: str) -> str:
    lines = text.rstrip().splitlines()
    found = (_BY_SLURM.search(line) or _BY_SHELL.match(line) for line in lines)
    first = next((one for one in found if one), None) or (_AT_THE_END.match(lines[-1]) if lines else None)
    return first[1] if first else ""


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list such as `0-2,5`."""
    spans = (part.partition("-") for part in text.split(",") if part)
    pairs = ((int(first), int(last or first)) for first, _, last in spans if first)
    return {number for first, last in pairs for number in range(first, min(last, first + 100_000) + 1)}
