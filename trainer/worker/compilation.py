"""torch.compile of parts of a model, and how one sees that a model has been compiled."""

import torch
from torch import nn


def compile_forward(module: nn.Module) -> None:
    """Compile what `module` computes, without its hooks: those of FSDP gather and free parameters around it."""
    module.forward = torch.compile(module.forward, dynamic=False)


def is_compiled(model: nn.Module) -> bool:
    """Whether `model`, or a part of it, has been given to torch.compile."""
    return any(_is_compiled(part) for part in model.modules())


def _is_compiled(part: nn.Module) -> bool:
    own = vars(part).get("forward")
    wrapped = type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
    return wrapped or hasattr(own, "_torchdynamo_orig_callable")
