"""Slurm's commands as shell scripts with answers chosen by the test."""

import os
import shlex
from pathlib import Path

SINFO = """
case "$*" in
*%P*%c*) printf 'n1|low*|8|4000|(null)|idle\\nn2|low*|8|4000|(null)|idle\\nn1|high|8|4000|(null)|idle\\n' ;;
*%P*) printf 'low*\\nhigh\\n' ;;
*%N*) printf 'n1\\nn2\\n' ;;
esac
"""
"""Two nodes of 8 cores and 4 GB; `low` has both, `high` has one."""
SCONTROL = """
printf 'ClusterName = lab\\nSlurmctldHost[0] = head\\nSlurmctldPort = 6817\\nStateSaveLocation = /state\\n'
"""


def refusing(said: str, code: int = 1) -> str:
    """Return the script of an sbatch that refuses every job."""
    return f"cat > /dev/null; printf '%s\\n' {shlex.quote(said)} >&2; exit {code}"


def write_commands(folder: Path, sbatch: str, *, sinfo: str = SINFO, **others: str) -> str:
    """Write sbatch, sinfo, scontrol and `others` by name; return a PATH that begins with their folder."""
    folder.mkdir(exist_ok=True)
    for name, body in {"sbatch": sbatch, "sinfo": sinfo, "scontrol": SCONTROL, **others}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    return f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
