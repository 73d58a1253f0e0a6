"""An ordinary script around Hugging Face's Trainer: a tiny Llama on random tokens, its own checkpoints and resume.

    torchrun --nproc-per-node 2 trainer_program.py --folder DIR [--steps N] [--every N] [--pause S]

Goes on from the newest FOLDER/out/checkpoint-N. Rank 0 writes one line a step to FOLDER/losses.jsonl, and the step and
a digest of the weights to FOLDER/final.json when all steps are trained. Knows nothing of orch.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps while DIR/slow exists")
    return parser.parse_args()


class Tokens(Dataset):
    """Sequences of random tokens, the same ones in every process."""

    def __init__(self, count: int) -> None:
        self._rows = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Note(TrainerCallback):
    """Writes down the steps, and takes its time."""

    def __init__(self, path: Path, pause: float) -> None:
        self._path, self._pause = path, pause

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ANN001, ANN003, ANN201
        time.sleep(self._pause if self._path.with_name("slow").exists() else 0.0)
        if state.is_world_process_zero:
            with self._path.open("a") as stream:
                stream.write(json.dumps({"step": state.global_step}) + "\n")


def model() -> LlamaForCausalLM:
    set_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    out = args.folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(out), max_steps=args.steps, save_steps=args.every, per_device_train_batch_size=2, use_cpu=True,
        logging_steps=1, report_to=[], disable_tqdm=True, seed=1, learning_rate=1e-3, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(
        model=model(),
        args=settings,
        train_dataset=Tokens(512),
        callbacks=[Note(args.folder / "losses.jsonl", args.pause)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    if trainer.is_world_process_zero():
        digest = hashlib.sha256()
        for _, tensor in sorted(trainer.accelerator.unwrap_model(trainer.model).state_dict().items()):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        final = {"step": trainer.state.global_step, "digest": digest.hexdigest()}
        (args.folder / "final.json").write_text(json.dumps(final))


if __name__ == "__main__":
    main()
