"""Configs of older versions, read in the keys of this one."""

import json

import pytest

from trainer.protocol import config as configs
from trainer.protocol.config_sections.moved_keys import in_present_keys
from trainer.protocol.run_dir import RunDir

OLD = {
    "name": "old",
    "train": {"steps": 9, "lr": 0.5, "warmup_steps": 3},
    "recovery": {"backoff": 1.0, "hang": {"slow": 7.0}, "straggler": {"ratio": 1.5, "replace_after": 4}},
    "workload": {"target": "trainer.worker.llama:LlamaWorkload", "args": {}},
}


def test_an_older_job_is_read_with_all_that_it_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    job = configs.load(RunDir(tmp_path), 0)
    assert (job.train.steps, job.optimizer.lr, job.optimizer.warmup_steps) == (9, 0.5, 3)
    assert (job.recovery.backoff, job.recovery.exclude_slow_after) == (1.0, 4)
    assert (job.detection.hang.slow, job.detection.straggler.ratio) == (7.0, 1.5)
    assert job.trains_built_in_workload


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"train": {"lr": 0.5}, "optimizer": {"lr": 0.25}}, {"train": {}, "optimizer": {"lr": 0.25}}),
        ({"train": {"lr": 1}, "optimizer": 5}, {"train": {}, "optimizer": 5}),
        ({"optimizer": {"lr": 0.5}, "train": None, "recovery": 5, "workload": []}, None),
        ({}, None),
    ],
)
def test_present_keys_win_and_damaged_sections_stay(config, found):
    before = json.dumps(config)
    assert in_present_keys(config) == (config if found is None else found)
    assert json.dumps(config) == before
