"""Program that imports a workload at submit and reports its modules and the settings it does not support.

`python -P -m trainer.worker.startup.inspect_workload ANSWER` reads the configuration as JSON from stdin. It writes JSON
objects, one per line, to the descriptor ANSWER: `code`, then `refused` (reason and remedy) and `done`; or `failed`.
"""

import inspect
import json
import os
import sys
from typing import Any, TextIO

import torch
from torch import nn

from trainer.parallel.apply.fsdp_units import CannotShard, chosen_units
from trainer.protocol.config import HF_WORKLOAD, JobConfig
from trainer.protocol.plain_data import build
from trainer.protocol.secrets.secret_redaction import in_use
from trainer.protocol.user_code.record_code import record_imported
from trainer.worker import workload


def main(arguments: list[str]) -> None:
    """Import and inspect the workload, and write the answer."""
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as answer:
        os.set_inheritable(answer.fileno(), False)
        config = build(JobConfig, json.load(sys.stdin))
        assert isinstance(config, JobConfig)
        _inspect(config, answer)


def _inspect(config: JobConfig, answer: TextIO) -> None:
    before = frozenset(sys.modules)
    try:
        with workload.users_code(f"importing {config.workload.target}"):
            kind = workload.find(config.workload)
    except workload.WorkloadError as error:
        is_import = isinstance(error.__cause__, ImportError | SyntaxError)
        _write_answer(answer, failed=in_use().text(str(error)), is_import=is_import, done=True)
        return
    if not config.trains_built_in_workload:
        _write_answer(answer, code=record_imported(sys.modules, before, config).to_json())
    refused = _wrong_arguments(kind, config) or _missing_parallelize(kind, config) or _wrong_wrap(config)
    _write_answer(answer, refused=refused, done=True)


def _write_answer(answer: TextIO, **found: Any) -> None:
    answer.write(f"{json.dumps(found)}\n")
    answer.flush()


def _wrong_arguments(kind: type[Any], config: JobConfig) -> list[str]:
    """Return why `workload.args` do not fit the class, or [] if they do or this is unknown."""
    try:
        inspect.signature(kind).bind(config, **config.workload.args)
        if config.workload.target == HF_WORKLOAD:  # others may need devices or data
            workload.build(config)
    except TypeError as error:
        return [f"workload.args do not fit {kind.__name__}: {error}", "set them as in +workload.args.NAME=VALUE"]
    except workload.WorkloadError as error:
        return [str(error), ""]
    except ValueError:
        return []  # it has no signature
    return []


def _missing_parallelize(kind: type[Any], config: JobConfig) -> list[str]:
    what, _, remedy = workload.missing_parallelize(kind, config).partition(": ")
    return [what, remedy] if what else []


def _wrong_wrap(config: JobConfig) -> list[str]:
    """Return why `parallel.fsdp.wrap` matches no part of the model, or [] if it does or this is unknown."""
    wrap = config.parallel.fsdp.wrap
    if wrap == "auto" or wrap.isdecimal():
        return []
    try:
        with workload.users_code("build_model()"), torch.device("meta"):
            model = workload.build(config).build_model()
    except workload.WorkloadError:
        return []  # it may work once it has its data and devices
    if not isinstance(model, nn.Module):
        return []
    try:
        chosen_units(model, wrap, [])
    except CannotShard as error:
        return [str(error), "set one of these, or parallel.fsdp.wrap=auto"]
    return []


if __name__ == "__main__":
    main(sys.argv[1:])
