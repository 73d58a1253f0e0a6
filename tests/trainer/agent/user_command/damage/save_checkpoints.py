"""Program that saves checkpoints of steps 10, 20 and 30 with a real framework: LAYOUT FOLDER, as one of the ranks.

DeepSpeed's and Megatron's files are written with torch.save under their names, because neither is a dependency.
"""

import os
import sys
from pathlib import Path

import torch

STEPS = (10, 20, 30)
RANK = int(os.environ.get("RANK", "0"))


def _state(step: int, seed: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(100 * step + seed)
    return {"step": step, "weights": torch.randn(4096, generator=generator)}


def plain(out: Path) -> None:
    for step in STEPS:
        torch.save(_state(step), out / f"step_{step}.pt")


def dcp(out: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    for step in STEPS:
        dcp.save({"model": model.state_dict(), "step": step}, checkpoint_id=out / f"step-{step}")
    dist.destroy_process_group()


def deepspeed(out: Path) -> None:
    for step in STEPS:
        folder = out / f"global_step{step}"
        folder.mkdir(exist_ok=True)
        if RANK == 0:
            torch.save(_state(step), folder / "mp_rank_00_model_states.pt")
        torch.save(_state(step, 1 + RANK), folder / f"zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt")
    (out / "latest").write_text("global_step30")


def megatron(out: Path) -> None:
    for step in STEPS:
        folder = out / f"iter_{step:07d}" / f"mp_rank_{RANK:02d}"
        folder.mkdir(parents=True)
        torch.save(_state(step, RANK), folder / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text("30")


def megatron_dist(out: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    for step in STEPS:
        folder = out / f"iter_{step:07d}"
        dcp.save({f"layer-{RANK}": _state(step, RANK)["weights"]}, checkpoint_id=folder)
        if RANK == 0:
            torch.save({"iteration": step}, folder / "common.pt")
            (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
            (out / "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.destroy_process_group()


def accelerate(out: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(str(out), automatic_checkpoint_naming=True))
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in STEPS:
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
        accelerator.project_configuration.iteration = step
        accelerator.save_state()


def hf(out: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=30, save_steps=10, per_device_train_batch_size=1, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data).train()


def lightning(out: Path) -> None:
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    keep = ModelCheckpoint(dirpath=out, every_n_train_steps=10, save_top_k=-1)
    pl.Trainer(
        max_steps=30, callbacks=[keep], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 16), batch_size=2))  # fmt: skip


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
