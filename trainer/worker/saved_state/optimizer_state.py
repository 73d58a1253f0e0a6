"""State of an optimizer in a checkpoint, and checks for unsupported optimizers.

Tensors in a parameter's state are named `optimizer/<parameter>/<key>`, tensors in the groups `groups/<group>/<key>`,
and tensors in further parts of `state_dict()` `entries/<part>`. The JSON (`facts`) contains Python values, and the
positions of tensors in nested values.
"""

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import object_state
from trainer.worker.saved_state.checkpoint_contents import TensorMetadata, tensor_metadata, zeros
from trainer.worker.saved_state.group_values import GroupValues
from trainer.worker.saved_state.model_state import cannot_be_filled
from trainer.worker.saved_state.object_state import Names, UnsavableValue
from trainer.worker.workload import WorkloadError

_SHARDING_MESSAGES = ("Sharding propagation", "sharding strategy", "DTensor", "redistribut")


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `state_dict()` may contain more than torch's own entries."""
    changed = "state_dict" in vars(optimizer) or bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))
    return changed or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `load_state_dict()` runs code outside torch."""
    hooks = [getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    code = [getattr(optimizer, name) for name in ("load_state_dict", "__setstate__") if hasattr(optimizer, name)]
    return any(hooks) or any(str(each.__module__).partition(".")[0] != "torch" for each in code)


def refuse_hidden_state(optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Raise WorkloadError for state outside `optimizer.state[parameter]`. Call this once all state exists."""
    kind = type(optimizer).__name__
    for key, held in optimizer.state.items():
        of_parameter = isinstance(key, torch.Tensor) and key in names
        if held and not of_parameter and not isinstance(key, str):
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
            raise WorkloadError(
                f"{kind} keeps state for {what}, which is not a parameter of the model, so it would not be saved: "
                "keep it in `optimizer.state[parameter]`, or under a name such as `optimizer.state['masters']`"
            )
    if _has_state_elsewhere(optimizer):
        raise WorkloadError(
            f"{kind} keeps state in other optimizers, not in its own `state`, so it would not be saved: share their "
            "state, as in `self.state[parameter] = inner.state[parameter]`, or use a single optimizer"
        )


def _has_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    state = optimizer.state
    if has_own_state_dict(optimizer):
        packed = optimizer.state_dict().get("state") or {}
        return (bool(packed) and not state) or _tensors(packed) > _tensors(state)
    inside = (inner for inner in optimizers.find_optimizers(vars(optimizer).values()) if inner is not optimizer)
    return any(held and state.get(key) is not held for inner in inside for key, held in inner.state.items())


def _tensors(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_tensors, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensors, value))
    return int(isinstance(value, torch.Tensor))


def refuse_foreign(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Raise WorkloadError if a parameter of the optimizer is not in the model."""
    for group in optimizer.param_groups:
        foreign = [parameter for parameter in group["params"] if parameter not in names]
        if foreign:
            raise WorkloadError(
                f"{type(optimizer).__name__} trains a parameter of shape {tuple(foreign[0].shape)} that the model does "
                "not have, so neither it nor its state would be saved: register it with the model"
            )


def refuse_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise WorkloadError for an optimizer whose steps the training loop cannot run."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise WorkloadError(
            f"{kind} computes the loss several times in one step (`step(closure)`), but the training loop computes it "
            "once: choose an optimizer whose `step()` needs no closure"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise WorkloadError(f"{kind} needs sparse gradients, which cannot be reduced and clipped here: choose Adam")


def refuse_sharding(optimizer: torch.optim.Optimizer, names: Names, error: Exception) -> None:
    """Raise WorkloadError if `error` shows that the optimizer needs unsharded parameters."""
    sharded = any(isinstance(parameter, DTensor) for parameter in names)
    if sharded and any(word in str(error) for word in _SHARDING_MESSAGES):
        kind = type(optimizer).__name__
        raise WorkloadError(
            f"{kind} cannot step sharded parameters ({str(error).splitlines()[0]}): choose an optimizer "
            "that works element by element, or give the workload a `parallelize` that does not shard"
        ) from error


PREFIXES = ("optimizer/", "groups/", "entries/")
"""Name prefixes of all optimizer tensors."""

_STATE = PREFIXES[0]
_NAMED = "state:"
_MISSING = object()
_COUNTERS = (bool, int, float, str, type(None))
"""Types of attributes that an optimizer may use to count its steps."""


class OptimizerState:
    """State of one optimizer, collected for a save and filled at a restore."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the groups of a new optimizer as the configured values.

        Raises WorkloadError for an optimizer that is not supported.
        """
        self._model, self._optimizer = model, optimizer
        self._refresh_names()
        refuse_foreign(optimizer, self._names)
        optimizers.train_mode(optimizer)  # before reading its settings, which include the mode
        self.groups = GroupValues(optimizer, self._names)
        self._unsaved: dict[str, str] = {}
        # Adagrad creates its state only in its constructor.
        self._first_state = {parameter: copy.deepcopy(dict(held)) for parameter, held in self._parameter_states()}
        self._first_tensors: dict[str, torch.Tensor] = {}
        self._first_entries = self._entries(self._first_tensors)
        self._first_tensors = copy.deepcopy(self._first_tensors)
        self._first_attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._metadata: dict[str, TensorMetadata] = {}
        self._targets: dict[str, torch.Tensor] = {}

    def _refresh_names(self) -> None:
        """Update the parameter names, because parameters may have been replaced."""
        self._parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}

    def prime(self) -> None:
        """Create every state tensor. Groups and state are not in their initial state until `reset` or `restore`."""
        refuse_step(self._optimizer)
        inner = optimizers.find_optimizers(vars(self._optimizer).values())
        self._first_attributes = [(vars(one), dict(vars(one))) for one in (self._optimizer, *inner)]
        try:
            optimizers.prime(self._optimizer)
        except (RuntimeError, NotImplementedError) as error:
            refuse_sharding(self._optimizer, self._names, error)
            raise
        refuse_hidden_state(self._optimizer, self._names)
        self._metadata = {name: tensor_metadata(tensor) for name, tensor in self.tensors().items()}

    def reset(self) -> None:
        """Reset the optimizer to its initial state."""
        self._forget(list(self._parameters.values()))
        self.groups.reset()
        self._load_entries(self._first_entries, self._first_tensors)
        for now, first in self._first_attributes:
            for key in [key for key, value in now.items() if type(value) in _COUNTERS and value != first.get(key)]:
                if key in first:
                    now[key] = first[key]
                else:
                    del now[key]

    def _forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Restore the initial state of these parameters, which is usually empty."""
        for parameter in parameters:
            self._optimizer.state.pop(parameter, None)
            if parameter in self._first_state:
                self._optimizer.state[parameter] = copy.deepcopy(self._first_state[parameter])

    # ---- saving

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the optimizer. Raises WorkloadError for parameter state that cannot be saved."""
        self._refresh_names()
        found: dict[str, torch.Tensor] = {}
        for name, held in self._holders():
            for key, value in held.items():
                self._refuse_key(name, key)
                if isinstance(value, torch.Tensor):
                    found[_tensor_key(name, key)] = value
                else:
                    self._encode_value(name, key, value, found)
        return {**found, **self.tensors_elsewhere()}

    def tensors_elsewhere(self) -> dict[str, torch.Tensor]:
        """Return tensors outside parameter state, which may appear at any step."""
        found = dict(self.groups.tensors())
        self._entries(found)
        return found

    def facts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return all other state as JSON, without empty parts. `tensors` is the result of `tensors()`."""
        metadata = {key: tensor_metadata(tensor) for key, tensor in tensors.items() if key.startswith(PREFIXES)}
        found = {
            "groups": self.groups.changed_values(),
            "values": self._values(),
            # Memory is allocated before the checkpoint is read; these are the differences from a fresh, primed state.
            "late": {key: self._relate(key, now) for key, now in metadata.items() if self._metadata.get(key) != now},
            "gone": self._missing_tensors(metadata),
            "entries": self._entries(),
        }
        return {"holders": self._describe_holders(), **{key: value for key, value in found.items() if value}}

    def _relate(self, key: str, metadata: TensorMetadata) -> TensorMetadata:
        """Return the metadata, with None for sharding that matches the parameter's, which depends on the layout."""
        parameter = self._parameters.get(_owner(key) or "")
        if parameter is None or metadata[1] != list(parameter.shape) or metadata[3] != isinstance(parameter, DTensor):
            return metadata
        return [*metadata[:3], None]

    def _parameter_states(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        for parameter in self._parameters.values():
            if held := self._optimizer.state.get(parameter):
                yield parameter, held

    def unsaved_values(self) -> list[str]:
        """Return descriptions of changed values that could not be saved because of their type."""
        return [*self.groups.unsaved.values(), *self._unsaved.values()]

    def _holders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((self._names[parameter], held) for parameter, held in self._parameter_states())

    def _describe_holders(self) -> dict[str, list[str]]:
        """Return the names of the parameters with state, or of those without if there are fewer."""
        there = {name for name, _ in self._holders()}
        trained = self._trained_names()
        if 2 * len(there) > len(trained):
            return {"without": sorted(trained - there)}
        return {"only": sorted(there)}

    def _trained_names(self) -> set[str]:
        return {self._names.get(p, "") for group in self._optimizer.param_groups for p in group["params"]}

    def _missing_tensors(self, metadata: Mapping[str, TensorMetadata]) -> list[str]:
        """Return the primed tensors that are now missing from parameters with state."""
        there = {name for name, _ in self._holders()}
        return sorted(key for key in self._metadata.keys() - metadata.keys() if _owner(key) in there)

    def _values(self) -> dict[str, Any]:
        """Return non-tensor values under their keys. A value that is equal for all parameters is listed once."""
        found: dict[str, dict[str, Any]] = {}
        count = 0
        for name, held in self._holders():
            count += 1
            for key, value in held.items():
                if not isinstance(value, torch.Tensor):
                    found.setdefault(object_state.path_part(key), {})[name] = self._encode_value(name, key, value, {})
        return {
            key: _merge_equal_values(values) if len(values) == count else {"of": values}
            for key, values in found.items()
        }

    def _refuse_key(self, name: str, key: object) -> None:
        if type(key) not in (str, int):
            raise WorkloadError(
                f"the state of {type(self._optimizer).__name__} cannot be saved: the state for {name} has key {key!r} "
                f"of type {type(key).__name__}; keys must be strings or integers"
            )

    def _encode_value(self, name: str, key: str | int, value: object, found: dict[str, torch.Tensor]) -> Any:
        try:
            return object_state.encode(value, _tensor_key(name, key), found, self._names)
        except UnsavableValue as reason:
            kind = type(self._optimizer).__name__
            raise WorkloadError(
                f"the state of {kind} cannot be saved: {reason}; only tensors, numbers, strings, and lists, tuples, "
                "sets and dicts of them can be saved"
            ) from reason

    def _entries(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return the JSON of entries outside parameter state and groups, and add their tensors to `tensors`."""
        found: dict[str, Any] = {}
        for key, value in {**_named_state(self._optimizer), **_extra_entries(self._optimizer)}.items():
            try:
                held = {} if tensors is None else tensors
                found[key] = object_state.encode(value, _entry_key(key), held, self._names)
            except UnsavableValue as reason:
                self._unsaved[key] = f"{key} of its state_dict ({reason})"
        return found

    # ---- restoring

    def targets(self, facts: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
        """Return the tensors to fill from a checkpoint. `facts` is None for an imported one. Raises WorkloadError."""
        live = self.tensors()
        if facts is None:
            self._targets = {key: tensor for key, tensor in live.items() if key.startswith(_STATE)}
            return self._targets
        self.groups.check(facts.get("groups", ()))
        late, gone = facts.get("late", {}), set(facts.get("gone", ()))
        there = {name for name in self._trained_names() if _has_state(name, facts["holders"])}
        state = [key for key in live if _owner(key) in there and key not in gone and key not in late]
        named = object_state.references([facts.get("groups", []), list(facts.get("entries", {}).values())])
        fresh = {
            key: late.get(key) or self._metadata.get(key)
            for key in [*named, *late]
            if key in named or key.startswith(_STATE)
        }
        self._targets = {
            key: self._scratch(key, tensor_metadata(live[key]), {}) if cannot_be_filled(live[key]) else live[key]
            for key in state
        }
        self._targets.update({key: self._scratch(key, wanted, live) for key, wanted in fresh.items()})
        return self._targets

    def _scratch(self, key: str, wanted: TensorMetadata | None, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Allocate a tensor that exists only in the checkpoint or must not be changed yet."""
        parameter = self._parameters.get(_owner(key) or "")
        device = next(iter(self._parameters.values())).device
        made = zeros(wanted, (live.get(key), parameter), device) if wanted is not None else None
        if made is None:
            kind = type(self._optimizer).__name__
            raise WorkloadError(f"the checkpoint has {key} {wanted or ''}, which {kind} does not have now")
        return made

    def restore(self, facts: Mapping[str, Any] | None, absent: Collection[str]) -> list[str]:
        """Apply the filled targets and facts. Return messages. An imported checkpoint lacks the targets `absent`."""
        if facts is None:
            return self._restore_imported(absent)
        self._restore_state(facts)
        overruled = self.groups.restore(facts.get("groups", ()), self._targets)
        saved = facts.get("entries", {})
        self._load_entries(saved, self._targets, itself=_loads_itself(self._optimizer))
        now = self._entries()
        other = [key for key in saved if object_state.text(now.get(key)) != object_state.text(saved[key])]
        return [*overruled, *(f"{key} of the optimizer's state_dict differs from its saved value" for key in other)]

    def _restore_imported(self, absent: Collection[str]) -> list[str]:
        counted = sorted({key for group in self.groups.changed_values() for key in group["values"]})
        counted += sorted(self._values())
        self._forget([self._parameters[name] for name in map(_owner, absent) if name in self._parameters])
        self.groups.reset()
        if _loads_itself(self._optimizer):
            self._load({})
        return [f"the checkpoint lacks the optimizer's {', '.join(counted)}: set to initial values"] if counted else []

    def _restore_state(self, facts: Mapping[str, Any]) -> None:
        values = facts.get("values", {})
        nested = set(object_state.references(list(map(list, map(dict.values, values.values())))))
        trained = self._trained_names()
        tensors: dict[str | None, dict[str | int, Any]] = {}
        for key, tensor in self._targets.items():
            if key not in nested:
                tensors.setdefault(_owner(key), {})[object_state.parse_path_part(key.rpartition("/")[2])] = tensor
        for name, parameter in self._parameters.items():
            if name not in trained or not _has_state(name, facts["holders"]):
                self._forget([parameter])
                continue
            held = tensors.get(name, {})
            for key, value in values.items():
                encoded = value["same"] if "same" in value else value["of"].get(name, _MISSING)
                if encoded is not _MISSING:
                    held[object_state.parse_path_part(key)] = object_state.decode(
                        encoded, self._targets, self._parameters
                    )
            there = self._optimizer.state[parameter]
            there.clear()
            there.update(held)

    def _load_entries(
        self, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, itself: bool = False
    ) -> None:
        """Load entries. If `itself`, always call `load_state_dict()`, because it may derive values."""
        found = {key: object_state.decode(value, tensors, self._parameters) for key, value in entries.items()}
        named_entries = {key: value for key, value in found.items() if key.startswith(_NAMED)}
        named: dict[Any, Any] = self._optimizer.state  # torch's own state has tensors as keys
        for key in list(_named_state(self._optimizer)):
            del named[key.removeprefix(_NAMED)]
        named.update({key.removeprefix(_NAMED): value for key, value in named_entries.items()})
        extra = {key: value for key, value in found.items() if key not in named_entries}
        if extra or itself:
            self._load(extra)

    def _load(self, extra: Mapping[str, Any]) -> None:
        """Make the optimizer load `extra` and its own state, and restore values that torch converts or replaces."""
        held = {parameter: dict(state) for parameter, state in self._parameter_states()}
        groups = [dict(group) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), **extra})
        for parameter, values in held.items():
            there = self._optimizer.state.setdefault(parameter, {})
            there.clear()
            there.update(values)
        for group, given in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(given)


def _tensor_key(name: str, key: str | int) -> str:
    return f"{_STATE}{name}/{object_state.path_part(key)}"


def _owner(key: str) -> str | None:
    """Return the parameter whose state includes this tensor. A parameter's name may contain slashes."""
    return key.removeprefix(_STATE).rpartition("/")[0] if key.startswith(_STATE) else None


def _has_state(name: str, held_by: Mapping[str, list[str]]) -> bool:
    return name in held_by["only"] if "only" in held_by else name not in held_by["without"]


def _merge_equal_values(values: Mapping[str, Any]) -> dict[str, Any]:
    first = next(iter(values.values()))
    same = object_state.text(first)
    return {"same": first} if all(object_state.text(value) == same for value in values.values()) else {"of": values}


def _entry_key(key: str) -> str:
    named_entries = _NAMED if key.startswith(_NAMED) else ""
    return f"entries/{named_entries}{object_state.path_part(key.removeprefix(named_entries))}"


def _named_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state under string keys, which torch allows in addition to parameters."""
    return {f"{_NAMED}{key}": value for key, value in optimizer.state.items() if isinstance(key, str)}


def _extra_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries that the optimizer's own method or hooks add to `state_dict`."""
    if not has_own_state_dict(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}
