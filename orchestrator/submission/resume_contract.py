"""Differences that are allowed between a checkpoint and the run that continues from it. Pure.

There is one rule for every config key and identity field.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from orchestrator.config.compose import diff
from orchestrator.config.keys import dotted_key, every_key
from orchestrator.errors import ConfigError, Precondition
from orchestrator.near_words import did_you_mean, nearest
from trainer.protocol.user_code.code_record import (
    CodeDecision,
    CodeRecord,
    Occasion,
    changed_files,
    changed_packages,
    judge_code,
    shorten,
)
from trainer.protocol.user_code.installed_packages import COMPUTING, normalize_names


class Rule(StrEnum):
    """Effect of changing one key in a run that continues."""

    HARMLESS = "harmless"  # no effect on the computed numbers
    ACCEPT = "accept"  # training continues differently; the user must accept it
    REFUSED = "refused"  # the checkpoint would not fit, or would mean something else


@dataclass(frozen=True)
class Term:
    """The rule for one key. `why` gives the reason and, for a refused change, an alternative."""

    rule: Rule
    why: str = ""


HARMLESS = Term(Rule.HARMLESS)
_SUMS = Term(Rule.ACCEPT, "sums are added in a different order, so numbers differ in their last bits")
_RECIPE = Term(Rule.ACCEPT, "training continues with a different recipe")
_CODE = Term(Rule.ACCEPT, "training continues with different code")
_STACK = Term(Rule.ACCEPT, "another version may compute different numbers")
_SHAPE = Term(Rule.REFUSED, "the checkpoint's tensors have different shapes; submit a new run")
_OTHER_DATA = Term(Rule.REFUSED, "the same position would refer to different data; submit a new run")
_FOLDER = Term(Rule.REFUSED, "it determines the run's folder; submit a new run")

DATA_PATH, DATA_TEXT = "data.path", "data.text"
OWN_FOLDER = ("name", "cluster.kind", "cluster.root", "workload.snapshot")
"""Keys that a continued run can never change, because they determine its folder."""
_TERMS: Mapping[Term, str] = {
    _FOLDER: "name cluster.kind cluster.root",
    Term(Rule.REFUSED, "another class has different state; submit a new run"): "workload.target",
    _RECIPE: """
        workload.args model.rope_theta model.rope_scaling model.attention.window model.norm_eps model.experts.per_token
        model.experts.scores model.experts.balance_rate optimizer.lr optimizer.min_lr_ratio optimizer.warmup_steps
        optimizer.weight_decay optimizer.clip_norm train.dtype
    """,
    _CODE: "workload.path command launcher",
    Term(Rule.REFUSED, "whether the code is copied was decided when the run was submitted"): "workload.snapshot",
    Term(Rule.ACCEPT, "orch looks for the program's checkpoints elsewhere"): "checkpoints.path",
    Term(Rule.ACCEPT, "orch looks for the program's checkpoints under other names"): "checkpoints.pattern",
    Term(Rule.ACCEPT, "orch checks the program's checkpoints by other rules"): "checkpoints.adapter",
    HARMLESS: """
        progress checkpoints.save_minutes cluster.shared_root cluster.spare_nodes cluster.mem cluster.time
        cluster.interface cluster.signal_lead cluster.gpus cluster.partition cluster.account cluster.qos
        cluster.constraint cluster.exclude
        cluster.sbatch cluster.bind cluster.caches cluster.stage.to cluster.stage.keep_days cluster.stage.seconds
        parallel.tp_across_nodes parallel.fsdp.reshard_after_forward parallel.fsdp.prefetch
        train.recompute train.peak_tflops checkpoint recovery detection watch restore_tests logs notify budgets
    """,
    Term(Rule.ACCEPT, "ranks see different variables"): "env env_from secrets_file",
    _SUMS: """
        parallel cluster.nodes cluster.min_nodes cluster.ranks_per_node cluster.gpus_per_node cluster.cpus_per_task
        train.micro_batch_size train.activation_checkpointing train.compile train.loss_chunks
    """,
    Term(Rule.ACCEPT, "other scripts prepare the node"): "cluster.templates",
    Term(Rule.ACCEPT, "the node is prepared differently"): "cluster.template_args",
    _STACK: "cluster.python cluster.stage.archive cluster.stage.sha256",
    _SHAPE: """
        model.vocab_size model.dim model.layers model.heads model.kv_heads model.ffn_dim model.tie_embeddings
        model.attention.head_dim model.attention.qkv_bias model.attention.qk_norm model.experts.count
        model.experts.ffn_dim
    """,
    Term(Rule.ACCEPT, "the learning rate follows the new number of steps"): "train.steps",
    _OTHER_DATA: "train.seed train.seq_len data.text data.tokenizer data.shuffle validation.batches",
    Term(Rule.REFUSED, "the position in the data is counted in batches; submit a new run"): "train.batch_size",
    Term(Rule.REFUSED, "it does not hold the same tokens; submit a new run"): "data.path",
    Term(Rule.ACCEPT, "a schedule that waits for a plateau sees different validations"): "validation.every",
    Term(Rule.ACCEPT, "checkpoints are kept elsewhere; none of the run's tiers may be left out"): "checkpoint.tiers",
    Term(Rule.ACCEPT, "different batches count as spikes and are skipped"): "detection.spike",
    Term(Rule.ACCEPT, "faults are injected on purpose"): "drill.events",
}
"""The keys and sections that each rule covers. A key's rule takes precedence over its section's."""
_BY_NAME = {name: term for term, names in _TERMS.items() for name in names.split()}


def _above(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


CONFIG: Mapping[str, Term] = {
    key: terms[0]
    for key in map(dotted_key, every_key())
    if (terms := [_BY_NAME[name] for name in _above(key) if name in _BY_NAME])
}
"""The rule for every config key; entries of an open map follow the map's rule."""

USER_CODE = "code.user"
PACKAGES, TORCH = "env.packages", "env.torch"
IDENTITY: Mapping[str, Term] = {
    "code.orch": _CODE,
    USER_CODE: _CODE,  # compared by its files
    "code.files": HARMLESS,
    "env.python": _STACK,
    "env.executable": HARMLESS,
    "env.system": HARMLESS,
    TORCH: _STACK,
    PACKAGES: _STACK,
    "env.slurm": HARMLESS,
    "env.driver": HARMLESS,  # the login node's driver
    "env.variables": HARMLESS,  # jobs inherit these from their submitter's shell
    "data.path": HARMLESS,
    "data.fingerprint": _OTHER_DATA,
    "data.tokens": HARMLESS,
    "data.shards": HARMLESS,
    "job": HARMLESS,
    "slurm_client": HARMLESS,
    "submit_dir": HARMLESS,
    "host": HARMLESS,
    "imported": HARMLESS,
    "restore_test": HARMLESS,
}
"""The rule for every identity field (`orchestrator/submission/run_identity.py`)."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key whose values differ."""

    key: str
    before: Any
    now: Any
    term: Term


def config_changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Return the differences between two resolved configs, each with its rule."""
    changes = [
        Change(key=key, before=old, now=new, term=_term(key, now)) for key, (old, new) in diff(before, now).items()
    ]
    # If an open map became empty or non-empty, its entries already show the change.
    return [
        change
        for change in changes
        if {} not in (change.before, change.now) or not any(other.key.startswith(f"{change.key}.") for other in changes)
    ]


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences in code, environment or data; fields missing on either side are not compared."""
    return [
        Change(key=key, before=old, now=new, term=term)
        for key, term in IDENTITY.items()
        for old, new in [_values(before, now, key)]
        if None not in (old, new) and _is_other(key, old, new)
    ]


def _values(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """Return a field of both identities; packages come from the newest attempt's record, or else the submitter's."""
    trained = CodeRecord.from_identity(before) if key in (PACKAGES, TORCH) else None
    if trained is None or trained.packages is None:
        return _field(before, key), _field(now, key)
    present = CodeRecord.from_identity(now)
    if present is None or present.packages is None:
        return None, None
    if key == TORCH:
        return trained.packages.get("torch"), present.packages.get("torch")
    changed = changed_packages(trained, present).items()
    return {name: old for name, (old, _) in changed}, {name: new for name, (_, new) in changed}


def why_packages_unknown(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return why the packages of a trained run cannot be compared, or "" if they can."""
    trained, present = CodeRecord.from_identity(before), CodeRecord.from_identity(now)
    if trained is None or trained.packages is None:
        return "" if "env" in now else "its attempts have not recorded them, and its jobs use another interpreter"
    if present is not None and present.packages is not None:
        return ""
    return f"{', '.join(trained.site_folders)} cannot be read here"


def _is_other(key: str, old: Any, new: Any) -> bool:
    if key != USER_CODE:
        return bool(old != new)
    decision, _ = judge_code(old, new, Occasion.RESUME, "the run trained last")
    return decision is CodeDecision.REFUSE


def check_keys(accepted: Collection[str]) -> None:
    """Raise ConfigError for a key that does not exist, with a hint that suggests the nearest key."""
    known = sorted({*CONFIG, *IDENTITY})
    for key in accepted:
        if not any(name in CONFIG for name in _above(key)) and key not in IDENTITY:
            near = nearest(key, known)
            hint = did_you_mean(near and f"--accept {near}", "the error from a refused resume names the key")
            raise ConfigError(f"there is no key {key} to accept", where="--accept", hint=hint)


def relax_without_checkpoints(changes: Collection[Change]) -> list[Change]:
    """Relax changes for a run without checkpoints: refused ones become harmless, except those to its folder."""
    return [
        replace(change, term=HARMLESS) if change.term.rule is Rule.REFUSED and change.key not in OWN_FOLDER else change
        for change in changes
    ]


def refuse(changes: Collection[Change]) -> None:
    """Raise Precondition for a change that is never allowed."""
    refused = [change for change in changes if change.term.rule is Rule.REFUSED]
    if refused:
        raise Precondition(
            f"{refused[0].key} cannot change: {refused[0].term.why}",
            where="; ".join(map(describe_change, refused)),
            hint="keep the old value",
        )


def require(changes: Collection[Change], accepted: Collection[str], command: str = "") -> None:
    """Raise Precondition for a refused change, or a difference that the user has not accepted.

    `command` is the command as typed, for the hint.
    """
    refuse(changes)
    asked = [change for change in changes if change.term.rule is Rule.ACCEPT and change.key not in accepted]
    if asked:
        raise Precondition(
            f"{asked[0].key} differs from the run's training: {asked[0].term.why}",
            where="; ".join(map(describe_change, asked)),
            hint=" ".join([*([command] if command else []), *(f"--accept {change.key}" for change in asked)]),
        )


def find_rule(key: str) -> Rule:
    """Return the rule for a config key; unknown keys are harmless."""
    return _term(key).rule


def _term(key: str, now: Mapping[str, Any] | None = None) -> Term:
    """Return the rule for a key, or for the open map that contains it; unknown keys have no effect."""
    if key == "workload.path" and now is not None and now["workload"]["snapshot"]:
        return CONFIG["workload.snapshot"]
    return next((CONFIG[name] for name in _above(key) if name in CONFIG), HARMLESS)


def _field(identity: Mapping[str, Any], key: str) -> Any:
    if key == USER_CODE:
        return CodeRecord.from_identity(identity)
    value: Any = identity
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if key == PACKAGES and isinstance(value, Mapping):
        return {name: version for name, version in normalize_names(value).items() if name.startswith(COMPUTING)}
    return value


def describe_change(change: Change) -> str:
    """Describe a change in one line; values that are too long to print are omitted."""
    if change.key == USER_CODE:
        return f"{change.key}: {shorten(changed_files(change.before, change.now))}"
    if isinstance(change.before, Mapping) and isinstance(change.now, Mapping):
        names = [name for name in {**change.before, **change.now} if change.before.get(name) != change.now.get(name)]
        versions = [f"{name} {change.before.get(name, 'none')} -> {change.now.get(name, 'none')}" for name in names]
        return f"{change.key}: {shorten(versions)}"
    before, now = str(change.before), str(change.now)
    return f"{change.key}: {before} -> {now}" if len(before) + len(now) <= 100 else f"{change.key} differs"
