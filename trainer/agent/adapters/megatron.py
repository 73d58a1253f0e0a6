"""Megatron-LM and loops in its style: folders `iter_0000100`, and the number of the newest one in a tracker file.

There are two layouts. In the older one, each model-parallel rank has a folder `mp_rank_00` or `mp_rank_00_000` with
`model_optim_rng.pt`. In the newer one, the folder is a checkpoint of torch.distributed.checkpoint; `torch_dist` adds
`common.pt` first and `metadata.json` last. The tracker file is written after all of these, and Megatron loads what it
names. With `--exit-signal-handler`, Megatron saves and exits after a SIGTERM.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

_TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,18})", re.ASCII)
_RANK = re.compile(r"mp_rank_(\d\d+)(?:_(\d{3,}))?(?:_(\d{3,}))?", re.ASCII)
"""Tensor rank, then pipeline or expert rank, then expert rank."""
_STATE, _OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


def install(module: Any, host: AdapterHost) -> None:
    """Report saves. `module` is `megatron.training.checkpointing`."""
    save = module.save_checkpoint
    begin = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    end = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))

    def report(iteration: Any, *_: Any, **named: Any) -> None:
        arguments = module.get_args()
        if not host.leads or named.get("non_persistent_ckpt") or getattr(arguments, "async_save", False):
            return
        host.lead()
        host.saved(int(iteration), os.path.abspath(os.path.join(arguments.save, f"iter_{int(iteration):07d}")))

    saved = host.guard(report)

    @functools.wraps(save)
    def save_and_report(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            result = save(*args, **kwargs)
        finally:
            end()
        saved(*args, **kwargs)
        return result

    module.save_checkpoint = save_and_report


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return the folders `iter_NUMBER`, lowest step first. Raises OSError."""
    found = [(_NAME.fullmatch(entry.name), entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    names = set(os.listdir(path))
    folders = sorted(name for name in names if _RANK.fullmatch(name))
    if folders:
        reason = _check_ranks(path, folders)
    elif names & {"common.pt", "metadata.json", ".metadata"} or any(name.endswith(".distcp") for name in names):
        reason = _check_shards(path, names)
    else:
        reason = "has no files of Megatron"
    return reason or _check_tracker(path)


def _check_ranks(path: str, folders: list[str]) -> str:
    """Each model-parallel rank has the same files; the numbers of ranks have no gaps."""
    matches = [match for match in map(_RANK.fullmatch, folders) if match]
    for place in range(1, 4):
        there = {int(match[place]) for match in matches if match[place] is not None}
        missing = sorted(set(range(max(there, default=-1) + 1)) - there)
        if missing:
            return f"lacks the files of model-parallel rank {missing[0]} (number {place} of mp_rank_...)"
    if all(match[3] is None and match[2] is None for match in matches):
        wanted = [_STATE, *([_OPTIMIZER] if _has(path, folders, _OPTIMIZER) else [])]
    else:  # ranks of experts may have an optimizer file elsewhere
        wanted = [_STATE]
    for folder in folders:
        for name in wanted:
            if not os.path.isfile(os.path.join(path, folder, name)):
                return f"lacks {folder}/{name}"
    return ""


def _has(path: str, folders: list[str], name: str) -> bool:
    return any(os.path.isfile(os.path.join(path, folder, name)) for folder in folders)


def _check_shards(path: str, names: set[str]) -> str:
    """Return what `torch_dist` lacks. The shards follow the rules of torch.distributed.checkpoint."""
    if "common.pt" in names and "metadata.json" not in names:
        return "lacks metadata.json, which is written last"
    if "metadata.json" in names:
        try:
            with open(os.path.join(path, "metadata.json"), encoding="utf-8") as stream:
                backend = json.load(stream)["sharded_backend"]
        except (ValueError, LookupError, TypeError) as error:
            return f"metadata.json is unreadable: {type(error).__name__}"
        if "common.pt" not in names:
            return "lacks common.pt"
        if backend != "torch_dist":  # zarr: one folder per tensor, without a list of them
            return ""
    return "" if ".metadata" in names else "lacks .metadata"


def _check_tracker(path: str) -> str:
    """Megatron loads the checkpoint that the tracker names. A save that ended before its last write is newer."""
    place, match = os.path.join(os.path.dirname(os.path.abspath(path)), _TRACKER), _NAME.fullmatch(_base(path))
    try:
        with open(place, encoding="utf-8") as stream:
            named = stream.read(64).strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    if match is None or not (named.isascii() and named.isdigit()) or int(named) >= int(match[1]):
        return ""
    return f"is newer than {int(named)}, which {_TRACKER} names"


def _base(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable that a program may read; Megatron's `--load` follows the tracker, which orch keeps right."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
