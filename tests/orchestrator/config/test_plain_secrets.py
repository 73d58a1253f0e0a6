"""Secrets in a config are refused before they are written, with a remedy, and never shown."""

import json
import shlex
from pathlib import Path

import pytest

from orchestrator.config.compose import compose, recompose
from orchestrator.errors import ConfigError

HF = "hf_canaryCANARY1234567890"
REFUSED = [
    ("+env.HF_TOKEN=canary12", "env.HF_TOKEN: looks like a secret", "HF_TOKEN"),
    ("+env.MY_API_KEY=canary-canary", "env.MY_API_KEY: looks like a secret", "MY_API_KEY"),
    ("+env.DB_PASSWORD=canary%canary", "env.DB_PASSWORD: looks like a secret", "DB_PASSWORD"),
    ("+env.DB_PASSWORD=canary", "env.DB_PASSWORD: looks like a secret", "DB_PASSWORD"),
    ("+env.DB_PASSWORD=canary horse", "env.DB_PASSWORD: looks like a secret", "DB_PASSWORD"),
    ("+env.PGPASSWORD=/canary", "env.PGPASSWORD: looks like a secret", "PGPASSWORD"),
    ("+env.MYSQL_PWD=123", "env.MYSQL_PWD: looks like a secret", "MYSQL_PWD"),
    ("+env.AWS_SECRET_ACCESS_KEY=/canary/K7MDENG", "looks like a secret", "AWS_SECRET_ACCESS_KEY"),
    ("+workload.args.db_password=canary", "workload.args.db_password: looks like a secret", "DB_PASSWORD"),
    ("command=[python,a.py,--db-password,canary]", "command: --db-password looks like a secret", "DB_PASSWORD"),
    (f"+env.MODEL={HF}", "env.MODEL: looks like a Hugging Face token", "MODEL"),
    (f"+workload.args.where={HF}", "workload.args.where: looks like a Hugging Face token", "HF_TOKEN"),
    ("+workload.args.k=sk-proj-canary1234567890", "workload.args.k: looks like an API key", "API_KEY"),
    ("+workload.args.k=ghp_canary1234567890canary", "looks like a GitHub token", "GITHUB_TOKEN"),
    ("+workload.args.k=AKIACANARYCANARY1234", "looks like an AWS access key", "AWS_ACCESS_KEY_ID"),
    ("+workload.args.k=xoxb-1234-canary12345", "looks like a Slack token", "SLACK_TOKEN"),
    ("+workload.args.k=eyJhbGciOiJI.canarycanary.sig", "looks like a JSON web token", "ACCESS_TOKEN"),
    ("+workload.args.db=postgres://ann:canary@db/x", "looks like a URL with a password", "SERVICE_URL"),
    ("command=[python,a.py,--wandb-api-key=canary1234]", "command: --wandb-api-key looks", "WANDB_API_KEY"),
    ("command=[python,a.py,--api-key,canarycanary]", "command: --api-key looks like a secret", "API_KEY"),
    ("command=[python,a.py,--password,canary%1]", "command: --password looks like a secret", "PASSWORD"),
    (f"command=[sh,-c,'HF={HF} python a.py']", "command: looks like a Hugging Face token", "HF_TOKEN"),
    (f"notify.command=[post,{HF}]", "notify.command: looks like a Hugging Face token", "HF_TOKEN"),
]
TAKEN = [
    "+env.TOKENIZERS_PARALLELISM=disabled", "+env.HF_TOKEN_PATH=/home/ann/token", "+env.MAX_TOKENS=123456789",
    "+env.SORT_KEY=short", "+env.PAD_TOKEN=<|endoftext|>", "+env.USE_AUTH=disabled", "+env.X=hf_transformers",
    "+workload.args.name=task-disk-sk-learn-something-long", "+workload.args.url=http://host:8080/path@x",
    "+env.DB_PASSWORD=", "+env.DB_PASSWORD=$DB", "+env.USE_PASSWORD=0", "+env.PWD=/home/ann", "+env.ACCESS_KEY_FILE=/x",
    "+env.GOOGLE_APPLICATION_CREDENTIALS=/home/ann/key.json", "+env.TWO_PASS=2", "+workload.args.passes=3",
    "command=[python,a.py,--sort-key=timestamp,--token-file,/home/ann/token,--max-token,123456789]",
    "command=[python,a.py,--api-key,$API_KEY,--tokenizer=llama-tokenizer]", "command=[python,a.py,--auth,--resume-it]",
]  # fmt: skip


@pytest.mark.parametrize(("override", "what", "variable"), REFUSED)
def test_a_secret_is_refused_and_not_shown(override: str, what: str, variable: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("tiny-gpt", ["env_from=[OTHER]", override])
    error = refused.value
    assert what in error.what
    assert "would be written to config.json and the registry" in error.what
    assert "canary" not in f"{error.what} {error.where} {error.hint}".lower()
    assert error.where.startswith("override #2: ")
    typed = error.hint.split("`")[3]
    assert typed == f"env_from=[OTHER,{variable}]"
    assert compose("tiny-gpt", [typed]).config.env_from == ("OTHER", variable)


@pytest.mark.parametrize("override", TAKEN)
def test_values_that_are_no_secrets_are_accepted(override: str) -> None:
    compose("tiny-gpt", [override])


def test_one_in_a_file_is_taken_out_of_the_map_by_what_is_offered(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("includes: [tiny-gpt]\nenv: {HF_TOKEN: canary-12345}\n")
    with pytest.raises(ConfigError) as refused:
        compose(str(file))
    assert refused.value.where == f"{file}:2"
    words = shlex.split(refused.value.hint.split("`")[3])
    assert words == ["~env.HF_TOKEN", "env_from=[HF_TOKEN]"]
    assert "canary" not in json.dumps(compose(str(file), words).data)


def test_an_override_of_env_is_never_quoted() -> None:
    for override in ("env.HF_TOKEN=canary-12345", "+env.7=hf_canary12345", "env={HF_TOKEN: [canary-12345]}"):
        with pytest.raises(ConfigError) as refused:
            compose("tiny-gpt", [override])
        assert "canary" not in refused.value.where


def test_the_config_of_an_older_run_is_read_as_it_is_until_a_person_changes_it() -> None:
    data = compose("tiny-gpt").data
    data["env"] = {"HF_TOKEN": "canary-12345"}
    assert recompose(data, []).data["env"] == data["env"]
    with pytest.raises(ConfigError, match="env.HF_TOKEN: looks like a secret"):
        recompose(data, ["train.steps=7"])
    words = ["train.steps=7", "~env.HF_TOKEN", "env_from=[HF_TOKEN]"]
    assert recompose(data, words).config.env == {}


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["env_from=[7A]"], "env_from: 7A is not a valid name"),
        (["env_from=[ORCH_SECRETS]"], "env_from: ORCH_SECRETS is not a valid name"),
        (["env_from=[PATH]"], "env_from: a job has its submitter's PATH anyway"),
        (["env_from=[A]", "+env.A=1"], "env_from: A is also in env"),
    ],
)
def test_names_that_cannot_be_taken(overrides: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("tiny-gpt", overrides)
    assert refused.value.what.startswith(what)
