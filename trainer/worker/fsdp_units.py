"""Which parts of a model FSDP shards one by one: what it gathers, and frees again, together."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

Places = Mapping[int, list[str]]
"""The names of each parameter, by its id: tied ones have several."""


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """The children with parameters, and the members of module lists one by one; the rest belongs to the whole model.

    A child that shares a parameter with what is outside it (tied embeddings) belongs to the whole model too, since FSDP
    manages a parameter once; members of lists within it are units all the same.
    """
    places = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)].append(name)
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
