"""Configs of older versions, read in the keys of this one."""

import json

import pytest

from orchestrator.config import keys
from orchestrator.errors import ConfigError
from trainer.protocol import config as configs
from trainer.protocol.config_sections.moved_keys import MOVED, in_present_keys, present_path
from trainer.protocol.run_dir import RunDir

OLD = {
    "name": "old",
    "train": {"steps": 9, "lr": 0.5, "warmup_steps": 3},
    "recovery": {"backoff": 1.0, "hang": {"slow": 7.0}, "straggler": {"ratio": 1.5, "replace_after": 4}},
}


def test_an_older_job_is_read_with_all_that_it_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    job = configs.load(RunDir(tmp_path), 0)
    assert (job.train.steps, job.optimizer.lr, job.optimizer.warmup_steps) == (9, 0.5, 3)
    assert (job.recovery.backoff, job.recovery.exclude_slow_after) == (1.0, 4)
    assert (job.detection.hang.slow, job.detection.straggler.ratio) == (7.0, 1.5)


def test_what_it_is_read_from_stays_as_it_was():
    before = json.dumps(OLD)
    assert in_present_keys(OLD)["train"] == {"steps": 9}
    assert json.dumps(OLD) == before


def test_a_present_key_wins_over_the_one_that_it_was():
    both = {"train": {"lr": 0.5}, "optimizer": {"lr": 0.25}}
    assert in_present_keys(both) == {"train": {}, "optimizer": {"lr": 0.25}}


def test_sections_of_both_versions_are_filled_key_by_key():
    both = {"recovery": {"hang": {"slow": 1, "factor": 2}}, "detection": {"hang": {"heartbeat": 3, "factor": 4}}}
    assert in_present_keys(both)["detection"] == {"hang": {"heartbeat": 3, "factor": 4, "slow": 1}}


@pytest.mark.parametrize(("there", "found"), [(None, {"lr": 1}), (5, 5), ([], [])])
def test_a_present_section_that_was_edited_by_hand_is_no_crash(there, found):
    assert in_present_keys({"train": {"lr": 1}, "optimizer": there})["optimizer"] == found


def test_the_built_in_workload_is_found_under_its_old_name(tmp_path):
    old = {"workload": {"target": "trainer.worker.llama:LlamaWorkload", "args": {}}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert configs.load(RunDir(tmp_path), 0).trains_built_in_workload
    assert old["workload"]["target"] == "trainer.worker.llama:LlamaWorkload"


@pytest.mark.parametrize("data", [{"optimizer": {"lr": 0.5}}, {}, {"train": None}, {"recovery": 5}])
def test_what_is_not_older_or_no_config_stays(data):
    assert in_present_keys(data) is data


@pytest.mark.parametrize("old", MOVED, ids=keys.dotted_key)
def test_a_moved_key_is_refused_with_the_present_one(old):
    with pytest.raises(ConfigError) as refused:
        keys.key_type(old, "")
    keys.key_type(MOVED[old], "")
    assert refused.value.hint.startswith(f"did you mean `{keys.dotted_key(MOVED[old])}`?")


def test_so_is_one_below_it():
    assert present_path(("recovery", "hang", "slow")) == ("detection", "hang", "slow")
    with pytest.raises(ConfigError) as refused:
        keys.key_type(("recovery", "hang", "slow"), "")
    assert refused.value.hint.startswith("did you mean `detection.hang.slow`?")
