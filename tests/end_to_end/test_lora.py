"""LoRA on frozen, quantized bases: the same bits after a kill, two ranks after four, merged exports, a changed base."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User, assert_exact, final

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PARTS = [ROOT / ".venv" / name for name in ("interop", "finetuning")]
LIBRARIES = ":".join(map(str, PARTS))
SETTINGS = [
    "tiny-gpt", "name=lora", "workload.target=hf", "cluster.nodes=1", "parallel.dp_shard=0", "parallel.tp=1",
    "cluster.ranks_per_node=4", "train.steps=12", "train.batch_size=8", "train.seq_len=32", "train.dtype=float32",
    "checkpoint.every=4", "recovery.backoff=0.2", "+env.HF_HUB_OFFLINE='1'", f"+env.PYTHONPATH={LIBRARIES}",
    "+workload.args.lora={r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj, down_proj]}",
]  # fmt: skip
MAKE = """
import sys, torch, transformers
torch.manual_seed(3)
sizes = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, vocab_size=320)
config = transformers.AutoConfig.for_model("llama", num_key_value_heads=4, max_position_embeddings=64, **sizes)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
"""
COMPARE = """
import json, sys, peft, torch, transformers
from trainer.models.base_precision import QUANTIZERS, dequantize
base, kind, merged, adapters = sys.argv[1:]
load = transformers.AutoModelForCausalLM.from_pretrained
whole, found = load(merged, output_loading_info=True)
model = load(base)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            parameter.copy_(dequantize(QUANTIZERS[kind](parameter)))
plain = model(torch.arange(1, 33)[None]).logits
beside = peft.PeftModel.from_pretrained(model, adapters)(torch.arange(1, 33)[None]).logits
given = whole(torch.arange(1, 33)[None]).logits
size = beside.abs().max()
print(json.dumps([
    sum(len(names) for names in found.values()), float((given - beside).abs().max() / size),
    float((given - plain).abs().max() / size),
]))
"""


def run_beside_libraries(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{LIBRARIES}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


def succeed(*words: str) -> str:
    done = run_beside_libraries(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    if not all((part / ".ready").is_file() for part in PARTS):
        pytest.skip("transformers and peft are not installed apart: `make test` does that")
    succeed(sys.executable, "-c", MAKE, str(tmp_path / "base"))
    return tmp_path / "base"


def export(user: User, target: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    orch = str(Path(sys.executable).with_name("orch"))
    environ = {**user.environment, "PYTHONPATH": LIBRARIES}
    words = [orch, "ckpt", "export", target, str(folder), *more]
    return subprocess.run(words, env=environ, cwd=user.folder, capture_output=True, text=True, check=False)


def flip_one_bit(base: Path) -> None:
    with (base / "model.safetensors").open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1000, os.SEEK_END)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_adapters_survive_kills_and_other_layouts_and_fit_only_their_base(user: User, base: Path, kind: str) -> None:
    settings = [*SETTINGS, f"+workload.args.name_or_path={base}", f"+workload.args.base={kind}"]
    drill = "drill.events=[{kind: kill-rank, rank: 3, step: 7}]"
    calm, killed = (user.submit(*settings, *more)["run"] for more in ([], [drill]))
    assert user.wait(calm) == 0
    assert user.wait(killed) == 0
    assert user.show(killed)["attempts"][0]["generations"] == 2
    assert_exact(user, killed, calm)
    for run in (calm, killed):
        user.ask("resume", run, "train.steps=16", "cluster.ranks_per_node=2", "~drill")
    assert user.wait(calm) == 0
    assert user.wait(killed) == 0
    assert final(user, killed)["weights_digest"] == final(user, calm)["weights_digest"]
    checkpoint = user.run_dir(killed).checkpoints
    newest = sorted(checkpoint.glob("step-*"))[-1]
    saved = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    assert saved < 0.02 * (base / "model.safetensors").stat().st_size
    merged, adapters = user.folder / "merged", user.folder / "adapters"
    assert (done := export(user, f"{killed}@16", merged)).returncode == 0, done.stderr
    assert (done := export(user, f"{killed}@16", adapters, "--to", "peft")).returncode == 0, done.stderr
    told = succeed(sys.executable, "-c", COMPARE, *map(str, (base, kind, merged, adapters)))
    troubles, difference, trained = json.loads(told.splitlines()[-1])
    assert troubles == 0
    assert difference < 1e-5 < trained
    flip_one_bit(base)
    done = export(user, f"{killed}@16", user.folder / "other")
    assert done.returncode != 0
    assert "was trained beside another base model" in done.stderr
    user.ask("resume", killed, "train.steps=20")
    assert user.wait(killed) != 0
    assert "is not the one that this run was trained with" in json.dumps(user.show(killed))
