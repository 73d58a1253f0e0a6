"""Hugging Face Trainer on a tiny Llama with random weights, as in its documentation. It saves every ten steps."""

import argparse
import hashlib
import os
import time

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--deepspeed", help="JSON file with DeepSpeed's settings")
parser.add_argument("--save-strategy", default="steps", help="every ten steps, or every epoch, which has ten steps too")
args = parser.parse_args()


class Tokens(Dataset):
    def __init__(self):
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.rows = torch.randint(64, (20 * ranks, 16), generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Report(TrainerCallback):
    def on_train_begin(self, arguments, state, control, **kwargs):
        if state.is_world_process_zero:
            print("start after step", state.global_step, flush=True)

    def on_log(self, arguments, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']}", flush=True)

    def on_step_end(self, arguments, state, control, **kwargs):
        time.sleep(args.pause)


def main():
    os.makedirs(args.folder, exist_ok=True)
    set_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=args.folder, max_steps=args.steps, save_steps=10, save_strategy=args.save_strategy, logging_steps=1,
        per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, seed=1, learning_rate=1e-3,
        deepspeed=args.deepspeed,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Report()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.folder))
    if trainer.is_world_process_zero():
        weights = str([value.tolist() for value in model.state_dict().values()])
        loss = [line["loss"] for line in trainer.state.log_history if "loss" in line][-1]
        print("final loss", loss, "weights", hashlib.sha256(weights.encode()).hexdigest()[:16], flush=True)


main()
