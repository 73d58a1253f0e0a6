"""FSDP puts new parameters in the place of a model's own: what hung on those is taken over, and who still uses them."""

import weakref

from torch import nn

from trainer.worker.parallel.gradient_buckets import CannotAverage

_MARK = "_replaced_parameters"


class ReplacedParameters:
    """The parameters of `model` before it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._before = dict(model.named_parameters(remove_duplicate=False))

    def pass_on(self, model: nn.Module) -> None:
        """Give the new parameters the attributes of the old ones, such as marks for an optimizer; remember the old."""
        replaced = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            old = self._before.get(name, parameter)
            if old is not parameter:
                vars(parameter).update({key: value for key, value in vars(old).items() if key not in vars(parameter)})
                replaced.append((name, weakref.ref(old)))
        vars(model)[_MARK] = replaced


def refuse_used_ones(model: nn.Module) -> None:
    """After a backward pass: raise CannotAverage for a parameter that was replaced and has a gradient all the same."""
    replaced = [pair for module in model.modules() for pair in vars(module).get(_MARK, ())]
    for name, reference in replaced:
        old = reference()
        if old is not None and old.grad is not None:
            raise CannotAverage(
                f"the loss uses {name} as it was before `parallelize`, whose weights are those of the start and are "
                "never trained: take parameters from the model in `loss`, do not keep them from build_model()"
            )
