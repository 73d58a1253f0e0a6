"""Canary secrets: real ranks print them and fail with them, but only the run's own secrets file contains them."""

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.canaries import FILE, HOOK, SHELL, command_lines_watched, find_canaries, find_leaking_files
from tests.end_to_end.user import ONE_NODE, User
from tests.slurm.warm_fork_servers import warm_python
from tests.trainer.agent.warm_agents import WarmAgents

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
MINE = ("tokens", "mine.yaml")
"""Files written by the user."""


def test_secrets_leak_nowhere(cold_user: User, agents: WarmAgents) -> None:
    user = cold_user
    (user.folder / "tokens").write_text(f"# mine\nWANDB_API_KEY='{FILE}'\n")
    (user.folder / "tokens").chmod(0o600)
    (user.folder / "mine.yaml").write_text(
        f"includes: [tiny-gpt]\nnotify: {{webhook: 'http://127.0.0.1:9/{HOOK}', on: [RUNNING, FAILED]}}\n"
    )
    (user.folder / "tmp").mkdir()
    user.environment |= {"HF_TOKEN": SHELL, "TMPDIR": str(user.folder / "tmp")}
    words = [
        *ONE_NODE, "train.steps=8", "train.dtype=float32", "checkpoint.every=2", "+workload.args.width=8",
        "workload.target=tests.end_to_end.leaking_workload:Leaking", f"workload.path=[{ROOT}]",
        "env_from=[HF_TOKEN]", f"secrets_file={user.folder / 'tokens'}", "detection.hang.stopped=1",
        "detection.hang.evidence=3", "drill.events=[{kind: stop-rank, rank: 1, step: 3}]",
        warm_python(user, agents.orders),
    ]  # fmt: skip
    with command_lines_watched() as lines:
        run = user.submit(str(user.folder / "mine.yaml"), *words)["run"]
    assert lines == set()
    del user.environment["HF_TOKEN"]
    assert user.wait(run) == 8
    allowed = {f"runs/{run}/secrets.json", *MINE}
    assert set(find_leaking_files(user.folder)) == allowed

    # The ranks did have them.
    attempt = user.run_dir(run).attempt(1)
    log = attempt.rank_log(0).read_text()
    assert log.count("***HF_TOKEN***") > 4
    assert log.count("***WANDB_API_KEY***") > 4
    assert "***HF_TOKEN*** and ***WANDB_API_KEY***" in attempt.agent_log(0).read_text()
    kept = [path for path in attempt.evidence.rglob("rank-*") if "***HF_TOKEN***" in path.read_text()]
    assert kept, "the evidence of the stopped rank"
    failure = user.show(run)["attempts"][-1]["failure"]
    assert (failure["kind"], "HTTP 401 for ***HF_TOKEN***" in failure["reason"]) == ("user_error", True)
    shown = [user.run(*verb, run, "--json") for verb in (("show",), ("status",), ("events",), ("config", "show"))]
    shown += [user.run("logs", run, "--rank", rank, "--tail", "1000") for rank in ("all", "first-error")]
    for one in shown:
        assert find_canaries((one.stdout + one.stderr).encode()) == []
    assert "***HF_TOKEN***" in shown[-1].stdout
    assert json.loads(shown[1].stdout)["data"][0]["state"] == "FAILED"
    assert re.search(r'"webhook": ?"http://127.0.0.1:9/\*\*\*"', user.run_dir(run).config.read_text())


def test_a_command_of_ones_own_has_them_and_secrets_in_a_config_are_refused(user: User) -> None:
    user.environment |= {"HF_TOKEN": SHELL}
    for words in ([f"+env.HF_TOKEN={SHELL}"], ["env_from=[HF_TOKEN]", f"+workload.args.a={SHELL}"]):
        refused = user.run("submit", "tiny-gpt", f"cluster.root={user.root}", "cluster.kind=local", *words)
        assert refused.returncode == 2
        assert "would be written to config.json and the registry" in refused.stderr
        assert find_canaries((refused.stdout + refused.stderr).encode()) == []
    look = "[sh, -c, 'test $ORCH_SECRETS = HF_TOKEN && echo it is $HF_TOKEN']"
    shape = ["cluster.nodes=1", "cluster.ranks_per_node=1", "env_from=[HF_TOKEN]", f"command={look}"]
    run = user.submit("torchrun-script", *shape)["run"]
    assert user.wait(run) == 0
    assert "it is ***HF_TOKEN***" in user.run("logs", run, "--rank", "0").stdout
    assert set(find_leaking_files(user.folder)) == {f"runs/{run}/secrets.json"}
