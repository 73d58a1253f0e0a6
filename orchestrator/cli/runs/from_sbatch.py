"""`orch submit --from-sbatch`: show and write the configuration made from an sbatch script, and ask before a submit."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from checkpointing.storage.durable import write_durably
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError
from orchestrator.submission.from_sbatch.convert import ConvertedScript, convert
from orchestrator.submission.from_sbatch.launch import Remark


def make_config(
    screen: Screen, script: Path, overrides: Sequence[str], *, only_print: bool, yes: bool, ask: bool
) -> Path | None:  # fmt: skip
    """Return the configuration to submit, or None if nothing is to be submitted.

    Writes it beside the script, unless `only_print`. `ask`: a submit follows, which needs a confirmation or `yes`.
    """
    converted = convert(script, os.environ)
    if only_print:
        _print(screen, converted)
        return None
    config, setup = script.with_suffix(".yaml"), script.with_name(f"{script.stem}.setup.sh")
    screen.note(converted.config)
    _list_remarks(screen, converted)
    files = {config: converted.config, **({setup: converted.setup} if converted.setup else {})}
    if script in files:
        what = f"the configuration would replace the script: both are {script}"
        raise ConfigError(what, where=str(script), hint="give the script another name: job.sh")
    _write(files, script)
    screen.note(f"written: {' '.join(map(str, files))}")
    _require_open_keys(converted, config, overrides)
    if not ask or yes:
        return config
    return config if _is_confirmed(screen, config, overrides) else None


def _print(screen: Screen, converted: ConvertedScript) -> None:
    if screen.json:
        rows = {
            name: [{"line": item.line, "text": item.text, "why": item.why} for item in remarks]
            for name, remarks in (("left_out", converted.left_out), ("not_understood", converted.unclear))
        }
        answer = {"config": converted.config, "setup": converted.setup, "to_set": converted.open_keys, **rows}
        screen.data("submit.from_sbatch", answer)
        return
    for line in converted.config.splitlines():
        screen.raw(line)
    if converted.setup:
        screen.note(f"setup file:\n{converted.setup}")
    _list_remarks(screen, converted)


def _list_remarks(screen: Screen, converted: ConvertedScript) -> None:
    if converted.left_out:
        screen.note("left out:\n" + "\n".join(_remark_lines(converted.left_out)))
    for item in converted.unclear:
        screen.warn("not_understood", f"line {item.line} is not in the configuration: {_one_line(item)}: {item.why}")
    for key, why in converted.open_keys.items():
        screen.warn("not_set", f"{key} is not set: {why}")


def _remark_lines(remarks: Iterable[Remark]) -> list[str]:
    return [f"  line {item.line}: {_one_line(item)} ({item.why})" for item in remarks]


def _one_line(item: Remark) -> str:
    text = " ".join(item.text.split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def _write(files: dict[Path, str], script: Path) -> None:
    """Write the files. Raises ConfigError, and writes nothing, if one exists with other contents."""
    for path, text in files.items():
        if path.exists() and (not path.is_file() or path.read_text(errors="replace") != text):
            again = f"orch submit {shlex.quote(_as_file(path.with_suffix('').with_suffix('.yaml')))}"
            what = f"{path} exists and differs from what {script.name} gives"
            hint = f"if you have edited it: `{again}`; to make it anew, remove it, and type the same command again"
            raise ConfigError(what, where=str(path), hint=hint)
    for path, text in files.items():
        write_durably(path, text.encode())


def _as_file(path: Path) -> str:
    return str(path) if "/" in str(path) else f"./{path}"


def _require_open_keys(converted: ConvertedScript, config: Path, overrides: Sequence[str]) -> None:
    given = {word.lstrip("+~").partition("=")[0] for word in overrides}
    missing = [key for key in converted.open_keys if key not in given]
    if missing:
        values = " ".join(f"{key}=VALUE" for key in missing)
        what = f"the script leaves open: {', '.join(missing)}"
        hint = f"add to the command: {values}"
        raise ConfigError(what, where=str(config), hint=hint)


def _is_confirmed(screen: Screen, config: Path, overrides: Sequence[str]) -> bool:
    again = shlex.join(["orch", "submit", _as_file(config), *overrides])
    if not sys.stdin.isatty() or screen.json:
        hint = f"{again}   or the same command with -y"
        raise ConfigError("the submission cannot be confirmed", where="stdin is not a terminal", hint=hint)
    if click.confirm("Submit it?", err=True):
        return True
    screen.note(f"nothing was submitted; to submit it later: {again}")
    return False
