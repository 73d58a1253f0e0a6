"""Extra state of modules besides their tensors: torch's `get_extra_state` and `set_extra_state`."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from trainer.worker.workload import WorkloadError


def extra_prefix(rank: int) -> str:
    """Return the key prefix of a rank's extra state, which may differ between ranks."""
    return f"extra/rank-{rank:05d}"


class ModuleExtraState:
    """The extra state of all modules of a model, by module name."""

    def __init__(self, model: nn.Module) -> None:
        """Raise WorkloadError for a module with `get_extra_state` but without `set_extra_state`."""
        self._model = model
        for name, module in _with_state(model):
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise WorkloadError(
                    f"{name or 'the model'} ({type(module).__name__}) has get_extra_state() and no set_extra_state(), "
                    "so that a restart could not restore it: add set_extra_state(state)"
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in _with_state(self._model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of every module; raises WorkloadError unless exactly the same modules have one."""
        modules = dict(_with_state(self._model))
        for name in sorted(state.keys() ^ modules.keys()):
            where = "the checkpoint" if name in state else "the model"
            raise WorkloadError(
                f"only {where} has an extra state of module {name or 'the model itself'}: put the code back as it was"
            )
        for name, module in modules.items():
            module.set_extra_state(state[name])


def _with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
