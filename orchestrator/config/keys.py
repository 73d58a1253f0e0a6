"""Config keys, read from the dataclasses, and the nearest key for an unknown one."""

import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from yaml.nodes import MappingNode, Node, SequenceNode

from orchestrator.config import yaml_text
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.near_words import nearest
from trainer.contract.config_sections.moved_keys import moved_from, present_path

Path = tuple[str, ...]


def dotted(path: Sequence[str]) -> str:
    return ".".join(path)


@cache
def section(kind: Any) -> dict[str, Any]:
    """The keys of one dataclass with their types, in the order they are declared."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def is_section(kind: Any) -> bool:
    return is_dataclass(kind)


def is_open(kind: Any) -> bool:
    """Whether users may add keys of their own here."""
    return typing.get_origin(kind) is dict


def item_kind(kind: Any) -> Any:
    """What a tuple or an open map holds."""
    arguments = typing.get_args(kind)
    return arguments[1] if is_open(kind) else arguments[0]


def kind_of(path: Path, where: str) -> Any:
    """The type of the key at `path`; raises ConfigError, with the nearest right key, where there is none."""
    kind: Any = RunConfig
    for depth, name in enumerate(path):
        if is_open(kind):
            kind = item_kind(kind)
        elif kind is Any:
            return kind
        elif is_section(kind) and name in section(kind):
            kind = section(kind)[name]
        elif is_section(kind):
            raise unknown(path[: depth + 1], kind, where, path)
        else:
            parent = dotted(path[:depth])
            hint = f"{parent}=VALUE"
            raise ConfigError(f"`{parent}` is a single value, it has no key `{name}`", where=where, hint=hint)
    return kind


def within_open(path: Path) -> bool:
    """Whether `path` names an entry of an open map."""
    return any(is_open(kind_of(path[:depth], "")) for depth in range(len(path)))


def unknown(path: Path, kind: Any, where: str, whole: Path = ()) -> ConfigError:
    """The error for a key that section `kind` does not have; `whole`: all that was typed, if that is more."""
    prefix, name = path[:-1], path[-1]
    there = list(section(kind))
    typed = whole or path
    if (instead := _INSTEAD.get(typed)) is not None:
        return ConfigError(f"unknown key `{dotted(typed)}`", where=where, hint=instead)
    moved = dotted(present_path(typed)) if present_path(typed) != typed else ""
    near = moved or _below_near_section(typed, len(path)) or _nearest(prefix, name, there)
    meant = f"did you mean `{near}`?  " if near else ""
    place = f"keys in `{dotted(prefix)}`" if prefix else "keys"
    return ConfigError(f"unknown key `{dotted(path)}`", where=where, hint=f"{meant}{place}: {', '.join(there)}")


_ADAMW = "the optimizer is AdamW; another is what the workload's `build_optimizer` returns"
_INCLUDES = "a configuration file brings others in: `includes: [model/tiny]` at its top"
_PLACES = (
    "`checkpoint.tiers=[{path: FOLDER}]` is where orch saves; `checkpoints.path` is where a `command` of yours does"
)
_STEPS = "orch counts optimizer steps, not epochs: train.steps=NUMBER"
_INSTEAD: dict[Path, str] = {
    **{("optimizer", name): _ADAMW for name in ("name", "type", "kind", "class", "algorithm", "target")},
    **{(name,): _INCLUDES for name in ("includes", "include", "defaults")},
    **{("checkpoint", name): _PLACES for name in ("path", "dir", "folder", "root", "directory")},
    **{(*section, name): _STEPS for section in ((), ("train",)) for name in ("epochs", "num_epochs", "max_epochs")},
}
"""Keys of other programs for which there is none here."""
_SECTION_EVERY = frozenset({"interval", "frequency", "freq", "period", "every_steps", "every_n_steps"})
"""What other programs call the `every` of a section."""
_CALLED_HERE: dict[str, str] = {
    word: key
    for key, words in {
        "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
        "optimizer.clip_norm": "grad_clip gradient_clip_val max_grad_norm max_norm clip_grad_norm grad_norm",
        "optimizer.warmup_steps": "warmup num_warmup_steps",
        "train.steps": "max_steps num_steps total_steps max_iters iterations",
        "train.batch_size": "global_batch_size train_batch_size",
        "train.micro_batch_size": "per_device_train_batch_size micro_batch local_batch_size",
        "train.seq_len": "sequence_length seq_length max_length max_seq_len context_length block_size",
        "train.dtype": "precision",
        "train.activation_checkpointing": "gradient_checkpointing",
        "model.dim": "hidden_size d_model n_embd",
        "model.layers": "num_layers n_layers n_layer num_hidden_layers",
        "model.heads": "num_heads n_heads n_head num_attention_heads",
        "model.kv_heads": "num_kv_heads n_kv_heads num_key_value_heads",
        "model.ffn_dim": "intermediate_size d_ff",
        "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint_interval ckpt_interval",
        "checkpoint.keep": "save_total_limit max_to_keep keep_last save_top_k",
        "validation.every": "eval_steps eval_every eval_interval val_interval val_check_interval",
        "cluster.nodes": "num_nodes nnodes",
        "cluster.ranks_per_node": "nproc_per_node ntasks_per_node tasks_per_node",
        "cluster.time": "walltime time_limit timeout",
        "cluster.mem": "memory",
        "cluster.partition": "queue",
        "cluster.cpus_per_task": "cpus",
        "cluster.gpus_per_node": "gpus num_gpus",
    }.items()
    for word in words.split()
}
"""What other programs call a key."""


def _below_near_section(typed: Path, depth: int) -> str:
    """The key whose section is mistyped and the rest right, or nearly so; empty without one."""
    if len(typed) == depth:
        return ""
    return nearest(dotted(typed), map(dotted, every_key()), 0.8)


def _nearest(prefix: Path, name: str, there: list[str]) -> str:
    # A slip of the finger in the right section first, then the right word in the wrong section.
    known_here = [*there, *moved_from(prefix)]
    if name.lower() in _SECTION_EVERY and "every" in there:
        return dotted((*prefix, "every"))
    if name.lower() in _CALLED_HERE:
        return _CALLED_HERE[name.lower()]
    if match := nearest(name, known_here, 0.8):
        return dotted(present_path((*prefix, match)))
    same = [key for key in every_key() if key[-1] == name]
    if same:
        return dotted(same[0])
    if match := nearest(name, known_here):
        return dotted(present_path((*prefix, match)))
    begun = [key for key in every_key() if key[-1].startswith(f"{name}_")]
    if len(begun) == 1:
        return dotted(begun[0])
    return nearest(dotted((*prefix, name)), map(dotted, every_key()))


def meant(name: str) -> str:
    """The key that somebody means by its full name, or by the last part of it; empty where there is none."""
    known = {dotted(key): key for key in every_key()}
    short = [_CALLED_HERE[name]] if name in _CALLED_HERE else [k for k, path in known.items() if path[-1] == name]
    return name if name in known else next(iter(short), "") or nearest(name, known, 0.8)


@cache
def every_key() -> tuple[Path, ...]:
    """The paths of all values and open maps."""
    return tuple(_below(RunConfig, ()))


def _below(kind: Any, path: Path) -> Iterator[Path]:
    for name, inner in section(kind).items():
        if is_section(inner):
            yield from _below(inner, (*path, name))
        else:
            yield (*path, name)


def default_of(path: Path) -> Any:
    """The value of a key that nobody has set; None for an entry of an open map."""
    value: Any = RunConfig()
    for name in path:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def type_words(kind: Any) -> str:
    """A type as one says it to a user."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(kind) is tuple:
        inner = item_kind(kind)
        return "a list of mappings" if is_section(inner) else "a list of texts"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(type_words(inner) for inner in typing.get_args(kind))
    return words.get(kind, "a mapping" if is_section(kind) or is_open(kind) else "a value")


_SBATCH = "sbatch"
_WORKLOAD = "workload"


def value(node: Node, path: Path, where: str) -> Any:
    """Return an entry of an open map as data: options for Slurm as they were typed, arguments as YAML reads them.

    Raises ConfigError for a word that most programs read as true or false, outside of Slurm's options, and for a number
    that is not finite: JSON has none, and `config.json` is what a job reads.
    """
    if path[0] != _WORKLOAD and _SBATCH in path:
        return yaml_text.as_typed(node)
    if isinstance(node, SequenceNode):
        return [value(item, path, where) for item in node.value]
    if isinstance(node, MappingNode):
        return {key.value: value(below, (*path, key.value), where) for key, below in node.value}
    if meant := yaml_text.old_boolean(node):
        what = f"`{dotted(path)}` is the word {node.value}, which YAML 1.2 reads as text"
        hint = f'write {meant}, or "{node.value}" in quotes for the word'
        raise ConfigError(what, where=yaml_text.place_of(node, where), hint=hint)
    found = yaml_text.plain(node) if path[0] == _WORKLOAD else yaml_text.as_typed(node)
    if isinstance(found, float) and not math.isfinite(found):
        what = f"`{dotted(path)}` is {node.value}: must be a finite number"
        hint = f'write "{found}" in quotes, and have the workload call float() on it'
        raise ConfigError(what, where=yaml_text.place_of(node, where), hint=hint)
    return found
