"""Read the user's crontab or scrontab, and replace orch's lines in it."""

import os
import shlex
import shutil
import subprocess
import sys
from string import Template

from orchestrator.errors import Precondition, SlurmUnreachable
from orchestrator.home import make_state_home, registry_path, shipped_folder, state_home

MARK = "# orch controller:"
LOG = "controller-tick.log"
TEMPLATE, OPTIONS = "controller.scrontab", "#SCRON"
"""Template in `sbatch_templates/` for our lines, and the prefix of lines that only Slurm reads."""
PROGRAMS = {"cron": "crontab", "scrontab": "scrontab"}
TIMEOUT = 30.0
SPREAD = 50  # seconds over which the passes of all users are spread, by their ids


def lines(via: str, every: int) -> list[str]:
    """Return our lines: the mark that identifies them, options (only in a scrontab), and the command."""
    words = [sys.executable, "-P", "-m", "orchestrator.cli.main", "controller", "tick", "--quiet"]
    registry = str(registry_path().absolute())
    places = {"ORCH_HOME": str(state_home().resolve()), "ORCH_REGISTRY": registry, **_search_paths()}
    variables = [f"{name}={shlex.quote(value)}" for name, value in places.items()]
    filled = Template((shipped_folder("sbatch_templates") / TEMPLATE).read_text()).substitute(
        mark=f"{MARK} keeps runs going and begins restore tests; {registry}; written by `orch controller install`",
        minute="*" if every == 1 else f"{os.getuid() % every}-59/{every}",
        command=" ".join(["umask 077;", f"sleep {os.getuid() % SPREAD};", *variables, shlex.join(words)]),
        log=shlex.quote(str(state_home().resolve() / LOG)),
    )
    wanted = [line for line in filled.splitlines() if via == "scrontab" or not line.startswith(OPTIONS)]
    # In a crontab an unescaped percent sign ends the command.
    return [*wanted[:-1], wanted[-1].replace("%", "\\%")]


def _search_paths() -> dict[str, str]:
    """Return the variables needed to find Slurm; cron sets only a PATH with two folders."""
    folders = dict.fromkeys(name for name in os.environ.get("PATH", "").split(":") if os.path.isdir(name))
    names = ("SLURM_CONF", "SLURM_CLUSTERS", "LD_LIBRARY_PATH")
    others = {name: os.environ[name] for name in names if os.environ.get(name)}
    # Some crons accept at most 1000 characters, so missing folders are left out.
    return {"PATH": ":".join(folders), **others}


def read(via: str) -> list[str]:
    """Return all lines of the user's table; empty if it does not exist yet."""
    done = _run(via, "-l")
    if done.returncode == 0:
        return done.stdout.splitlines()
    # Any other error must not count as an empty table, because the result replaces the whole table.
    if "no crontab" in done.stderr.lower():
        return []
    what = f"{PROGRAMS[via]} -l failed: {done.stderr.strip() or f'exit code {done.returncode}, no output'}"
    raise Precondition(what, where=via, hint=f"the other table may work: --via {_other(via)}")


def without(table: list[str]) -> list[str]:
    """Return the table without our lines: the mark, the options below it, and the command."""
    kept: list[str] = []
    ours = False
    for line in table:
        if line.startswith(MARK):
            ours = True
        elif ours and not line.startswith(OPTIONS):
            ours = False
        elif not ours:
            kept.append(line)
    return kept


def write(via: str, table: list[str]) -> None:
    """Replace the user's whole table."""
    (make_state_home() / LOG).touch(mode=0o600)  # Slurm would create a job's `--output` with a different umask
    done = _run(via, "-", text="".join(f"{line}\n" for line in table))
    if done.returncode:
        hint = f"`orch controller install --via {via} --print` prints the lines, so that you can add them by hand"
        raise Precondition(f"{PROGRAMS[via]} rejected the table: {done.stderr.strip()}", where=via, hint=hint)


def _other(via: str) -> str:
    return "scrontab" if via == "cron" else "cron"


def _run(via: str, argument: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    program = PROGRAMS[via]
    if shutil.which(program) is None:
        hint = f"try --via {_other(via)}, or leave `orch controller run` in a screen or tmux"
        where = f"PATH={os.environ.get('PATH', '')}"
        raise Precondition(f"there is no `{program}` on this machine", where=where, hint=hint)
    try:
        return subprocess.run(
            [program, argument], input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachable(f"{program} gave no answer in {TIMEOUT:.0f} s", where=via, hint="try again") from error
