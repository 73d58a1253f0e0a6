"""Which parts of a model FSDP shards one by one: what it gathers, and frees again, together."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

CLASSES = "_classes_of_whole_model"
"""Attribute of a part of a model: the names of all classes of modules in the whole of it."""
Places = Mapping[int, list[str]]
"""The names of each parameter, by its id: tied ones have several."""


class CannotShard(ValueError):
    """FSDP cannot do what is asked with this model; the text says why and what to do."""


def chosen_units(model: nn.Module, wrap: str, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """What `parallel.fsdp.wrap` asks for, inner modules before those around them; `auto`: `layers`.

    A module that shares a parameter with what is outside it (tied embeddings) is never one. Raises CannotShard.
    """
    if wrap == "auto":
        return list(layers)
    places = _places(model)
    closed = [module for name, module in _inner_first(model) if _is_closed(module, name, places)]
    if wrap.isdecimal():
        return _large_units(closed, int(wrap))
    return _units_of_classes(model, closed, {name.strip() for name in wrap.split(",")})


def _units_of_classes(model: nn.Module, closed: Sequence[nn.Module], wanted: set[str]) -> list[nn.Module]:
    # A stage of a pipeline has some of the classes of its model.
    known = sorted({class_name(module) for _, module in _inner_first(model)} | set(vars(model).get(CLASSES, ())))
    if unknown := sorted(wanted - set(known)):
        raise CannotShard(f"parallel.fsdp.wrap: the model has no module of class {unknown[0]}, only {', '.join(known)}")
    return [module for module in closed if class_name(module) in wanted]


def class_name(module: nn.Module) -> str:
    """As it was before FSDP2 gave the module a class of its own (FSDPModule, the class)."""
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    return kind.__name__


def _large_units(closed: Sequence[nn.Module], least: int) -> list[nn.Module]:
    """Modules with at least so many parameters that no unit inside them has."""
    found: list[nn.Module] = []
    taken: set[int] = set()
    for module in closed:
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if sum(own.values()) >= least:
            found.append(module)
            taken |= set(own)
    return found


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that can be called, by name, without the model itself, in the order in which they were made."""
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
    """The children with parameters, and the members of module lists one by one; the rest belongs to the whole model.

    A child that shares a parameter with what is outside it (tied embeddings) belongs to the whole model too, since FSDP
    manages a parameter once; members of lists within it are units all the same.
    """
    places = _places(model)
    found: list[nn.Module] = []
    for name, child in _children(model):
        found += [child] if _is_closed(child, name, places) else _list_members(child, name, places)
    return found


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children by name; instead of a list its members, and theirs where these are lists."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{key}", member) for key, member in _children(child))
        else:
            yield name, child


def _list_members(module: nn.Module, prefix: str, places: Places) -> Iterator[nn.Module]:
    """Members of the outermost lists within a module that is no unit itself."""
    for name, child in _children(module):
        path = f"{prefix}.{name}"
        if "." in name and _is_closed(child, path, places):
            yield child
        else:
            yield from _list_members(child, path, places)


def _is_closed(module: nn.Module, prefix: str, places: Places) -> bool:
    """Whether it has parameters, none of which is used outside it."""
    names = [name for parameter in module.parameters() for name in places[id(parameter)]]
    return bool(names) and all(name.startswith(f"{prefix}.") for name in names)
