"""Models of transformers under orch: the same bits after a kill, another layout, an export that transformers loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User, assert_exact, final

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
INTEROP = ROOT / ".venv" / "interop"
SETTINGS = [
    "tiny-gpt", "name=hf", "workload.target=hf", "cluster.nodes=1", "parallel.dp_shard=0", "parallel.tp=1",
    "cluster.ranks_per_node=2", "train.steps=16", "train.batch_size=8", "train.seq_len=32", "train.dtype=float32",
    "checkpoint.every=5", "recovery.backoff=0.2", "+env.HF_HUB_OFFLINE='1'", f"+env.PYTHONPATH={INTEROP}",
]  # fmt: skip
OTHER = {"llama": "parallel.tp=2", "qwen3": "parallel.tp=2", "mistral": "parallel.strategy=ddp"}
"""Layouts on which a run goes on; the others go on with one rank."""
LOAD = """
import json, sys
from transformers import AutoModelForCausalLM
model, found = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
print(json.dumps([type(model).__name__, sum(len(names) for names in found.values())]))
"""


def run_beside_transformers(*words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(INTEROP), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (INTEROP / "transformers").is_dir():
        pytest.skip("transformers is not installed apart: `make .venv/interop/.ready` does that, as `make test` does")
    folder = tmp_path_factory.mktemp("models")
    run_beside_transformers(str(ROOT / "tests" / "trainer" / "models" / "make_hf_models.py"), str(folder), "320")
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "opt"])
def test_a_pretrained_model_survives_a_kill_goes_on_elsewhere_and_is_exported(
    user: User, models: Path, kind: str
) -> None:
    settings = [*SETTINGS, f"+workload.args.name_or_path={models / kind}"]
    drill = "drill.events=[{kind: kill-rank, rank: 1, step: 9}]"
    calm, killed = (user.submit(*settings, *more)["run"] for more in ([], [drill]))
    assert user.wait(calm) == 0
    assert user.wait(killed) == 0
    assert user.show(killed)["attempts"][0]["generations"] == 2
    assert_exact(user, killed, calm)
    assert final(user, killed)["weights_digest"] == final(user, calm)["weights_digest"]
    other = OTHER.get(kind, "cluster.ranks_per_node=1")
    user.ask("resume", killed, "train.steps=20", other, "~drill")
    assert user.wait(killed) == 0
    assert user.show(killed)["attempts"][1]["last_step"] == 20
    (models / kind / "tokenizer_config.json").write_text("{}")
    user.ask("ckpt", "export", f"{killed}@20", str(user.folder / "out"))
    assert (user.folder / "out" / "tokenizer_config.json").read_text() == "{}"
    name, troubles = json.loads(run_beside_transformers("-c", LOAD, str(user.folder / "out")))
    assert name.endswith(("ForCausalLM", "LMHeadModel"))
    assert troubles == 0
