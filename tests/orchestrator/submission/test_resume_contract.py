"""Allowed changes of a continued run: every key and identity field has a rule, which is applied."""

import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import canonical
from orchestrator.config.compose import compose, flat, recompose
from orchestrator.config.keys import dotted_key, every_key
from orchestrator.errors import ConfigError, Precondition
from orchestrator.submission.resume_contract import (
    CONFIG,
    IDENTITY,
    USER_CODE,
    Rule,
    config_changes,
    identity_changes,
    require,
)
from orchestrator.submission.run_identity import identify
from tests.orchestrator.tiny_config import tiny_config
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord

KEYS = sorted(CONFIG)


@pytest.fixture
def submitted(tmp_path: Path) -> dict[str, Any]:
    data = tiny_config(tmp_path, "+env.A=1")
    data["data"]["path"] = str(tmp_path)
    return data


def other(value: Any) -> Any:
    """Return another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case list():
            return [*value, "x"]
    return {**value, "x": "y"}


def test_every_key_of_a_config_has_a_rule_and_no_other() -> None:
    assert {dotted_key(key) for key in every_key()} == set(CONFIG)


def test_every_field_of_an_identity_has_a_rule_and_no_other() -> None:
    composed = compose("tiny-gpt")
    data = {"path": "/d", "fingerprint": "f", "tokens": 1, "shards": 1}
    later = {"host": socket.gethostname(), "imported": {}, "restore_test": {}}
    told = {**identify(composed.config, "slurm", data=data), **later}
    fields = {
        f"{name}.{field}" if name in ("code", "env", "data") else name
        for name, value in told.items()
        for field in (value if name in ("code", "env", "data") else [""])
    }
    assert fields == set(IDENTITY)


@pytest.mark.parametrize("key", KEYS)
def test_a_changed_key_is_judged_by_its_rule(submitted: dict[str, Any], key: str) -> None:
    before = submitted
    after = {name: (dict(part) if isinstance(part, dict) else part) for name, part in before.items()}
    *above, last = key.split(".")
    part: Any = after
    for name in above:
        part[name] = dict(part[name])
        part = part[name]
    part[last] = other(part[last])
    (change,) = config_changes(before, after)
    assert change.key == key or change.key.startswith(f"{key}.")
    rule = CONFIG[key].rule
    assert change.term.rule is rule
    if rule is Rule.HARMLESS:
        require([change], [])
        return
    with pytest.raises(Precondition, match=change.key) as caught:
        require([change], [])
    assert CONFIG[key].why in caught.value.what
    if rule is Rule.ACCEPT:
        assert caught.value.hint == f"--accept {change.key}"
        require([change], [change.key])
    else:
        with pytest.raises(Precondition, match="cannot change"):
            require([change], [change.key])


def test_what_moves_work_between_ranks_changes_last_bits() -> None:
    same_numbers = {"tp_across_nodes", "fsdp.reshard_after_forward", "fsdp.prefetch"}
    harmless = {key for key in KEYS if key.startswith("parallel.") and CONFIG[key].rule is Rule.HARMLESS}
    assert harmless == {f"parallel.{name}" for name in same_numbers}


def recorded(**files: str) -> dict[str, Any]:
    return CodeRecord(files={name: CodeFile(path=name, sha256=text) for name, text in files.items()}).to_json()


@pytest.mark.parametrize("key", sorted({*IDENTITY} - {"code.files"}))
def test_a_changed_identity_is_judged_by_its_rule(key: str) -> None:
    name, _, field = key.partition(".")
    values: list[Any] = [{"torch": "2.12"}, {"torch": "2.13"}]
    if key == USER_CODE:  # its files are compared
        field, values = "files", [recorded(model=digest) for digest in "ab"]
    sides = [{name: {field: value} if field else value} for value in values]
    found = identity_changes(*sides)
    assert {change.key: change.term for change in found}[key] == IDENTITY[key]
    assert {change.key for change in found} <= {key, "code.files", USER_CODE}
    assert identity_changes(sides[0], sides[0]) == []
    assert identity_changes({}, sides[0]) == [], "what was not known then is no difference"


def test_packages_that_do_not_compute_may_come_and_go() -> None:
    sides = [{"env": {"packages": {"torch": "2.13", "pytest": version}}} for version in ("1", "2")]
    assert identity_changes(*sides) == []


def test_all_that_must_be_accepted_is_named_at_once() -> None:
    def identity(word: str, numpy: dict[str, str]) -> dict[str, Any]:
        files = recorded(model=word, data="same")
        return {"code": {"orch": word, "files": files}, "env": {"torch": word, "packages": {"triton": "3", **numpy}}}

    sides = identity("a", {}), identity("b", {"numpy": "2.4"})
    with pytest.raises(Precondition) as caught:
        require(identity_changes(*sides), ["code.orch"], "orch resume r-1 train.steps=9")
    keys = "--accept code.user --accept env.torch --accept env.packages"
    assert caught.value.hint == f"orch resume r-1 train.steps=9 {keys}"
    assert caught.value.where == "code.user: model changed; env.torch: a -> b; env.packages: numpy none -> 2.4"


def test_a_submitted_config_with_nothing_changed_is_the_same(submitted: dict[str, Any]) -> None:
    same = recompose(submitted, [])
    assert same.data == submitted
    assert same.digest == hashlib.sha256(canonical(submitted)).hexdigest()


def test_overrides_change_a_submitted_config_as_they_would_a_preset(submitted: dict[str, Any]) -> None:
    data = submitted
    changed = recompose(data, ["optimizer.lr=0.5", "+env.B=2", "env.A=3"]).data
    found = {change.key: change.now for change in config_changes(data, changed)}
    assert found == {"optimizer.lr": 0.5, "env.B": "2", "env.A": "3"}
    assert flat(changed)["train.steps"] == flat(data)["train.steps"]
    with pytest.raises(ConfigError, match="unknown key `train.lrr`"):
        recompose(data, ["train.lrr=1"])


def test_names_with_dots_references_and_empty_maps_stay_as_they_are(submitted: dict[str, Any]) -> None:
    submitted["workload"]["args"] = {"layer.norm": 1, "opt": {}, "list": [{"a": "${x}"}]}
    submitted["env"] = {"WHERE": "${HOME}/x", "BACK": "\\${HOME}"}
    assert recompose(submitted, ["optimizer.lr=0.5"]).data == {
        **submitted,
        "optimizer": {**submitted["optimizer"], "lr": 0.5},
    }


@pytest.mark.parametrize(
    ("override", "before", "now"),
    [
        ("workload.args.opt=1", True, 1),
        ("workload.args.opt=null", 3, None),
        ("workload.args.opt={}", 3, {}),
        ("+workload.args.new=null", None, None),
    ],
)
def test_every_change_of_an_open_map_is_one(submitted: dict[str, Any], override: str, before: Any, now: Any) -> None:
    submitted["workload"]["args"] = {"opt": True if before is True else 3}
    changed = recompose(submitted, [override]).data
    (change,) = config_changes(submitted, changed)
    assert change.now == now
    assert type(change.now) is type(now)
    assert change.term is CONFIG["workload.args"]


def test_a_key_that_is_known_no_more_is_left_out(submitted: dict[str, Any]) -> None:
    submitted["recovery"]["max_attempts"] = 5
    changed = recompose(submitted, ["optimizer.lr=0.5"])
    assert "max_attempts" not in changed.data["recovery"]
    require(config_changes(submitted, changed.data), ["optimizer.lr"])


def test_the_folders_of_copied_code_do_not_change(submitted: dict[str, Any], tmp_path: Path) -> None:
    submitted["workload"] |= {"snapshot": True, "path": ["/old"]}
    changes = config_changes(submitted, recompose(submitted, [f"workload.path=[{tmp_path}]"]).data)
    with pytest.raises(Precondition, match=r"workload.path cannot change: whether the code is copied was decided"):
        require(changes, ["workload.path"])
