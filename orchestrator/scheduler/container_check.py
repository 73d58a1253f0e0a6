"""Checks, on the login node, of what the container templates of a configuration need."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.home import expand_home
from orchestrator.scheduler.script import Fragment, load

_SRUN_OPTIONS = {
    "pyxis": ("--container-image", "the pyxis plugin"),
    "edf": ("--environment", "the container engine's plugin"),
    "oci": ("--container=", "support for OCI containers"),
}
"""Option of `srun --help` that a template needs, and what provides it."""
_PROGRAMS = {"apptainer": "apptainer", "podman-hpc": "podman-hpc", "shifter": "shifter"}
_PATHS = ("image", "bundle", "environment")


def container_problems(
    templates: Sequence[str], args: Mapping[str, str], srun_help: Callable[[], str], *, here: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield problems of the container templates, each with a hint. Templates that cannot be read are left out.

    `srun_help` returns the output of `srun --help`, or "" if there is none. `here`: runs use this machine, not nodes.
    """
    for name in templates:
        try:
            fragment = load(name)
        except ConfigError:  # reported elsewhere
            continue
        if fragment.mounted:
            yield from _missing_option(name, srun_help, here=here)
            yield from _missing_program(fragment, args, here=here)
            yield from _missing_files(fragment, args, here=here)


def _missing_option(name: str, srun_help: Callable[[], str], *, here: bool) -> Iterator[tuple[str, str]]:
    if name not in _SRUN_OPTIONS:
        return
    option, provider = _SRUN_OPTIONS[name]
    if here:
        yield f"template {name} needs srun, which cluster.kind=local does not have", f"use {', '.join(_PROGRAMS)}"
    elif (text := srun_help()) and option not in text:
        yield f"template {name}: `srun --help` does not list {option}", f"ask the site for {provider}"


def _missing_program(fragment: Fragment, args: Mapping[str, str], *, here: bool) -> Iterator[tuple[str, str]]:
    program = args.get("program", _PROGRAMS.get(fragment.name, ""))
    if not program or shutil.which(expand_home(program)) is not None:
        return
    hint = "install it, or cluster.template_args.program=PATH" if "program" in fragment.args else "install it"
    hint = hint if here else f"check a compute node: srun -N1 sh -c 'command -v {program}'"
    yield f"template {fragment.name}: there is no {program} on this machine", hint


def _missing_files(fragment: Fragment, args: Mapping[str, str], *, here: bool) -> Iterator[tuple[str, str]]:
    for argument in _PATHS:
        value = expand_home(args.get(argument, "")) if argument in fragment.args else ""
        if os.path.isabs(value) and not Path(value).exists():
            key = f"cluster.template_args.{argument}"
            hint = f"{key}=PATH" if here else f"{key}=PATH, or check it on a compute node"
            yield f"{key}: {value} does not exist on this machine", hint
