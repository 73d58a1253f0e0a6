"""Choice of FSDP units, replaced parameters, and layers that cannot be sharded."""

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.parallel.apply.gradient_buckets import CannotAverage

_MARK = "_replaced_parameters"


class ReplacedParameters:
    """The parameters of `model` before it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._before = dict(model.named_parameters(remove_duplicate=False))

    def copy_attributes(self, model: nn.Module) -> None:
        """Copy the old parameters' attributes, such as optimizer marks, to the new ones, and remember the old ones."""
        replaced = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            old = self._before.get(name, parameter)
            if old is not parameter:
                vars(parameter).update({key: value for key, value in vars(old).items() if key not in vars(parameter)})
                replaced.append((name, weakref.ref(old)))
        vars(model)[_MARK] = replaced


def refuse_stale_parameters(model: nn.Module) -> None:
    """Raise CannotAverage for a replaced parameter that has a gradient; call after a backward pass."""
    replaced = [pair for module in model.modules() for pair in vars(module).get(_MARK, ())]
    for name, reference in replaced:
        old = reference()
        if old is not None and old.grad is not None:
            raise CannotAverage(
                f"the loss uses {name} from before `parallelize`, which keeps its initial weights and is never "
                "trained: take parameters from the model in `loss`, do not keep them from build_model()"
            )


def refuse_recomputed_twice(model: nn.Module, loss: torch.Tensor) -> None:
    """Raise CannotAverage if the graph of `loss` has two reentrant checkpoints of one module.

    FSDP2 of torch 2.13 reduces after the first one, which gives wrong gradients without an error.
    """
    seen: set[int] = set()
    for node in _nodes(loss):
        layer = _module(getattr(node, "run_function", None))
        if layer is None:
            continue
        if id(layer) in seen:
            name = next((name for name, module in model.named_modules() if module is layer), type(layer).__name__)
            raise CannotAverage(
                f"{name} is used twice in a forward pass and recomputed with use_reentrant=True, which gives sharded "
                "layers wrong gradients: recompute activations with use_reentrant=False"
            )
        seen.add(id(layer))


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    seen: set[Any] = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def _module(function: Any) -> nn.Module | None:
    """Return the layer behind a function: a module, a module's method, or either with bound arguments."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


CLASSES = "_classes_of_whole_model"
"""Attribute of a model part that has the class names of all modules in the whole model."""
Places = Mapping[int, list[str]]
"""All names of each parameter, keyed by id; tied parameters have several."""


class CannotShard(ValueError):
    """FSDP does not support this model with these settings; the text gives the reason and the remedy."""


def chosen_units(model: nn.Module, wrap: str, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units selected by `parallel.fsdp.wrap`, inner modules before outer ones; `auto` selects `layers`.

    A module that shares a parameter with the rest of the model (tied embeddings) is never a unit. Raises CannotShard.
    """
    if wrap == "auto":
        return list(layers)
    places = _places(model)
    closed = [module for name, module in _inner_first(model) if _is_closed(module, name, places)]
    if wrap.isdecimal():
        return _large_units(closed, int(wrap))
    return _units_of_classes(model, closed, {name.strip() for name in wrap.split(",")})


def units_of_known_classes(model: nn.Module, classes: Collection[str]) -> list[nn.Module]:
    """Return the modules of these classes that may be units, inner modules before outer ones."""
    places = _places(model)
    return [
        module
        for name, module in _inner_first(model)
        if class_name(module) in classes and _is_closed(module, name, places)
    ]


def _units_of_classes(model: nn.Module, closed: Sequence[nn.Module], wanted: set[str]) -> list[nn.Module]:
    # A pipeline stage has only some of the classes of its model.
    known = sorted({class_name(module) for _, module in _inner_first(model)} | set(vars(model).get(CLASSES, ())))
    if unknown := sorted(wanted - set(known)):
        raise CannotShard(f"parallel.fsdp.wrap: the model has no module of class {unknown[0]}, only {', '.join(known)}")
    return [module for module in closed if class_name(module) in wanted]


def class_name(module: nn.Module) -> str:
    """Return the class name before FSDP2 replaced the module's class (bases: FSDPModule, original class)."""
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    return kind.__name__


def _large_units(closed: Sequence[nn.Module], least: int) -> list[nn.Module]:
    """Return modules with at least `least` parameters of their own, outside the units that they contain."""
    found: list[nn.Module] = []
    taken: set[int] = set()
    for module in closed:
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if sum(own.values()) >= least:
            found.append(module)
            taken |= set(own)
    return found


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield callable modules with their names, except the model itself: inner modules first, in order of creation."""
    for name, child in model.named_children():
        yield from ((f"{name}.{inner}", module) for inner, module in _inner_first(child))
        if not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name, child


def _places(model: nn.Module) -> Places:
    places = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)].append(name)
    return places


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Return the children with parameters, and members of module lists; the rest is the root unit.

    A child with a shared parameter (tied embeddings) belongs to the root, but members of its lists are units.
    """
    places = _places(model)
    found: list[nn.Module] = []
    for name, child in _children(model):
        found += [child] if _is_closed(child, name, places) else _list_members(child, name, places)
    return found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield children with their names; lists are recursively replaced by their members."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{key}", member) for key, member in _children(child))
        else:
            yield name, child


def _list_members(module: nn.Module, prefix: str, places: Places) -> Iterator[nn.Module]:
    """Yield members of the outermost lists within a module that is not a unit."""
    for name, child in _children(module):
        path = f"{prefix}.{name}"
        if "." in name and _is_closed(child, path, places):
            yield child
        else:
            yield from _list_members(child, path, places)


def _is_closed(module: nn.Module, prefix: str, places: Places) -> bool:
    names = [name for parameter in module.parameters() for name in places[id(parameter)]]
    return bool(names) and all(name.startswith(f"{prefix}.") for name in names)


_MIXED = "mixed torch.Tensor and DTensor"
_MOST = 6
WITHOUT_SHARDS = "type parallel.strategy=ddp train.dtype=float32"


@contextmanager
def explain_uncalled_units(model: nn.Module) -> Iterator[None]:
    """Replace torch's error about an operation on whole and sharded tensors with CannotShard."""
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise CannotShard(_reason(model)) from error


def _reason(model: nn.Module) -> str:
    units = [name or "the whole model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    layers = {
        class_name(module)
        for module in model.modules()
        # A list or dict of parameters is never called, so FSDP would never gather it as a unit.
        if type(module).forward is not nn.Module.forward
        and any(isinstance(parameter, DTensor) for parameter in module._parameters.values())
    }
    by_itself = f", or shard each layer separately (type parallel.fsdp.wrap={','.join(sorted(layers)[:_MOST])})"
    return (
        "a layer was used without calling the part that it is sharded with, which gathers its parameters "
        f"({_join_names(units)}): call these parts{by_itself if layers else ''}, or do not shard ({WITHOUT_SHARDS})"
    )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
