"""Table of framework adapters.

Each adapter is a file of this folder with two halves. `install` runs in the training program, after the framework has
been imported there. The other functions run in the agent. Both processes load the file by its path, so adapters and
this table need only the standard library (Python 3.9).
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple, Protocol, cast

FOLDER = os.path.dirname(os.path.abspath(__file__))
AGREEMENT = os.path.join(os.path.dirname(FOLDER), "instrument", "stop_agreement.py")


class AdapterRow(NamedTuple):
    """An adapter and the modules whose import in a program selects it."""

    name: str
    modules: tuple[str, ...]
    layout: str = ""
    """Pattern for the paths of files that programs without this framework also write; group 1 is the checkpoint."""


ROWS = (
    AdapterRow("hf", ("transformers.trainer",)),
    AdapterRow("lightning", ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")),
    AdapterRow("accelerate", ("accelerate.accelerator",)),
    AdapterRow("deepspeed", ("deepspeed.runtime.engine",)),
    AdapterRow("megatron", ("megatron.training.checkpointing",), r"(.*/iter_\d{7,18})/mp_rank_\d\d[^/]*/[^/]+"),
    AdapterRow(
        "dcp",
        (
            "torch.distributed.checkpoint.state_dict_saver",
            "torchtitan.components.checkpointer.dcp",
            "torchtitan.components.checkpoint",
        ),
    ),
    AdapterRow("plain", ("torch.serialization",)),
)
"""Adapters by priority: a Trainer uses Accelerate, which uses torch, and only the first of them answers requests."""
NAMES = tuple(row.name for row in ROWS)


class Adapter(Protocol):
    """Functions of an adapter."""

    def install(self, module: Any, host: Any) -> None:
        """Hook the framework in this program. `module` is the imported module, `host` an `AdapterHost`."""

    def checkpoints(self, folder: str) -> list[tuple[int, str]]:
        """Return steps and paths of all checkpoints in a folder, lowest step first. Raises OSError."""

    def damage(self, path: str) -> str:
        """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError.

        Only the framework's own rules are checked, such as missing files; torn files are found by their formats.
        """

    def resume(self, path: str) -> tuple[dict[str, str], list[str]]:
        """Return variables and arguments for a start from this checkpoint; "" stands for a start without one."""


def load(name: str) -> Adapter:
    """Return an adapter. Raises LookupError for an unknown name."""
    if name not in NAMES:
        raise LookupError(f"no adapter {name}: the adapters are {', '.join(NAMES)}")
    return cast("Adapter", load_file(f"orch_adapter_{name}", os.path.join(FOLDER, f"{name}.py")))


def load_file(name: str, path: str) -> Any:
    """Return the module in this file, loaded once per process under this name."""
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(name, module)


def install(name: str, module: Any, rank: Any) -> None:
    """Install an adapter in this program. `rank` is the `ProgramRank`."""
    host = load_file("orch_adapter_host", os.path.join(FOLDER, "host.py"))
    agreement = load_file("orch_stop_agreement", AGREEMENT)
    load(name).install(module, host.start_requests(rank, agreement.start_agreement).make_host(name, NAMES.index(name)))


def choose(frameworks: str) -> str:
    """Return the adapter for the frameworks that a program has imported, separated by commas; plain for others."""
    found = {word.strip() for word in frameworks.split(",")}
    return next((row.name for row in ROWS if row.name in found), "plain")


def recognize_layout(path: str) -> tuple[str, str]:
    """Return the adapter whose layout a saved file has, and the path of its checkpoint; ("", path) for none."""
    for row in ROWS:
        found = re.fullmatch(row.layout, path) if row.layout else None
        if found:
            return row.name, found[1]
    return "", path


def find_damage(name: str, path: str) -> str:
    """Return why a checkpoint is incomplete by its framework's rules, or "" if it is complete. Raises OSError.

    Shards follow their own rules: a Trainer or Accelerate keeps those of FSDP or DeepSpeed in folders, and Megatron
    those of torch.distributed.checkpoint beside its own files.
    """
    reason = load(name).damage(path)
    if reason or not os.path.isdir(path):
        return reason
    for entry in ["", *sorted(os.listdir(path))]:
        inner = os.path.join(path, entry)
        part = _choose_for_shards(os.listdir(inner)) if os.path.isdir(inner) else ""
        if part not in ("", name) and (reason := load(part).damage(inner)):
            return f"{entry} {reason}".lstrip()
    return ""


def _choose_for_shards(names: list[str]) -> str:
    if any(name.endswith(".distcp") for name in names):
        return "dcp"
    return "deepspeed" if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names) else ""
