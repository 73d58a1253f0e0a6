"""Whether Linux can start a program with the arguments and variables of a config."""

from collections.abc import Iterator

from orchestrator.config.run_config import RunConfig
from trainer.contract.program_limits import MAX_STRING_BYTES, MAX_TOTAL_BYTES, excess_bytes, total_bytes


def complaints(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Values that are too long, each with what to type."""
    variables = [f"{name}={value}" for name, value in config.env.items()]
    for name, variable in zip(config.env, variables, strict=True):
        if excess_bytes(variable):
            yield f"env.{name}: {_too_long(variable)}", f"put the value into a file, and +env.{name}_FILE=PATH"
    for place, argument in enumerate(config.command):
        if excess_bytes(argument):
            yield (
                f"command: word {place + 1} {_too_long(argument)}",
                "put it into a file, and give the program its path",
            )
    total = total_bytes([*variables, *config.command])
    if total > MAX_TOTAL_BYTES:
        what = f"command and env: have {total} bytes together, and Linux allows {MAX_TOTAL_BYTES} for a program"
        yield what, "put the longest values into files"


def _too_long(text: str) -> str:
    return f"is {excess_bytes(text)} bytes longer than the {MAX_STRING_BYTES} that Linux allows"
