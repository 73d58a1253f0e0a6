"""Names, shapes and types of the parameters that `build_model` made. A restart can only restore these."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state.buffer_state import cannot_be_filled
from trainer.worker.saved_state.tensor_metadata import tensor_metadata
from trainer.worker.workload import WorkloadError


class ParameterForms:
    """Names, shapes and types of the parameters of a new model."""

    def __init__(self, model: nn.Module) -> None:
        """Raise WorkloadError for a parameter that no checkpoint could be loaded into."""
        self._model = model
        self._built = _forms(model)
        for name, parameter in model.named_parameters():
            if cannot_be_filled(parameter):
                raise WorkloadError(
                    f"several values of parameter {name} share one place in memory (expand), or are kept as their "
                    "conjugates, so that it could not be restored: make it of value.clone()"
                )

    def refuse_changed(self) -> None:
        """Raise WorkloadError if the parameters have changed since the model was built."""
        now = _forms(self._model)
        if now == self._built:
            return
        for name in sorted(now.keys() | self._built.keys()):
            if name not in self._built:
                raise _error(f"parameter {name} was made after build_model()")
            if name not in now:
                raise _error(f"parameter {name} of build_model() is gone")
            if now[name] != self._built[name]:
                built, form = (f"torch.{dtype} of shape {shape}" for dtype, shape in (self._built[name], now[name]))
                raise _error(f"parameter {name} was {built} after build_model() and is {form} now")


def _error(what: str) -> WorkloadError:
    return WorkloadError(
        f"{what}, so that a restart, which builds the model anew, could not restore it: make all parameters in "
        "build_model() with their final shape and type"
    )


def _forms(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    forms = {name: tensor_metadata(parameter) for name, parameter in model.named_parameters()}
    return {name: (dtype, tuple(shape)) for name, (dtype, shape, *_) in forms.items()}


def nan_weights(model: nn.Module) -> frozenset[str]:
    """Return the keys of this rank's weights that hold NaN before training, such as uninitialized memory."""
    weights = {
        f"model/{name}": (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel()
    }
    return frozenset(key for key, weight in weights.items() if bool(torch.isnan(_widen(weight)).any()))


def _widen(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.itemsize > 1 else weight.to(torch.float32)  # 8-bit floats support few operations
