"""Two ranks with models of transformers, compared with transformers itself: `hf_ranks.py FOLDER CASES` (JSON).

Prints the largest difference of weights and gradients per case, or the refusal.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.trainer.models.make_hf_models import TASKS
from trainer.models import hf_workload
from trainer.models.hf_workload import HfWorkload
from trainer.parallel.apply import mesh
from trainer.parallel.apply.data_parallel import GradientSync
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.workload import WorkloadError


class OwnData(HfWorkload):
    """A model that gets its batches from `make_batch`."""

    def build_data(self, layout: mesh.Layout) -> Any:
        raise NotImplementedError


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_batch(kind: str) -> Any:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 128, (8, 17), generator=draw)
    task = TASKS.get(kind)
    if task == "image-classification":
        return {"pixel_values": torch.randn(8, 3, 16, 16, generator=draw), "labels": tokens[:, 0] % 5}
    if task == "seq2seq-lm":
        return {"input_ids": tokens, "labels": tokens[:, :9].contiguous()}
    return {"input_ids": tokens, "labels": tokens} if task == "masked-lm" else tokens


def own_part(batch: Any, rank: int, ranks: int) -> Any:
    if isinstance(batch, dict):
        return {name: value.chunk(ranks)[rank] for name, value in batch.items()}
    return batch.chunk(ranks)[rank]


def difference(
    folder: str, tp: int, strategy: str, pretrained: bool, recompute: bool = False
) -> dict[str, Any]:  # fmt: skip
    import transformers

    kind = Path(folder).name
    task = TASKS.get(kind, "causal-lm")
    factory = getattr(transformers, hf_workload.TASKS[task])
    rank, world = dist.get_rank(), dist.get_world_size()
    config = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": world}, "parallel": {"tp": tp, "strategy": strategy},
            "train": {"dtype": "float32", "seq_len": 16, "batch_size": 8, "activation_checkpointing": recompute},
        },
    )  # fmt: skip
    torch.manual_seed(1)
    workload = OwnData(config, name_or_path=folder, task=task, pretrained=pretrained)
    layout = mesh.build(config.parallel, torch.device("cpu"), rank, world)
    model = workload.build_model()
    if pretrained:
        assert all(parameter.is_meta for parameter in model.parameters()), "no rank holds the whole model"
    else:
        theirs = factory.from_config(model.config)
        theirs.load_state_dict(model.state_dict())
    assert bool(model.is_gradient_checkpointing) == recompute
    model = workload.parallelize(model, layout)
    workload.set_initial_weights(model)
    if pretrained:
        theirs = factory.from_pretrained(folder)
    if kind == "resnet":  # in training, the statistics are those of each rank's own samples
        model.eval()
        theirs.eval()
    batch, theirs_of = make_batch(kind), dict(theirs.named_buffers())
    kept = {name: (whole(one).clone(), theirs_of[name].clone()) for name, one in model.named_buffers()}
    sync = GradientSync(model, layout, config.parallel.reduce, lambda: None)
    sync.backward(workload.loss(model, own_part(batch, layout.dp_rank, layout.dp_size)), is_last=True)
    workload.loss(theirs, batch).backward()
    wanted = dict(theirs.named_parameters())
    found = {name: (whole(one), whole(one.grad)) for name, one in model.named_parameters()}  # type: ignore[arg-type]
    assert found.keys() == wanted.keys()
    # The gradient of a key's bias is zero but for rounding.
    least = 1e-4 * max(float(one.grad.abs().max()) for one in wanted.values())
    worst = max(
        float((grad - wanted[name].grad).abs().max() / wanted[name].grad.abs().max().clamp(min=least))
        for name, (_, grad) in found.items()
    )
    held = sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in model.parameters())
    return {
        "same buffers": all(torch.equal(*pair) for pair in kept.values()),
        "same weights": all(torch.equal(value, wanted[name]) for name, (value, _) in found.items()),
        "gradients": worst, "share": held / sum(one.numel() for one in wanted.values()),
    }  # fmt: skip


def main() -> None:
    from tests.trainer.models import lora_ranks  # it uses functions of this module

    warnings.simplefilter("ignore")
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    found = {}
    for kind, *case in cases:
        name = " ".join(map(str, (kind, *case)))
        try:
            compare = lora_ranks.compare if kind == "lora" else difference
            found[name] = compare(str(folder / kind), *case)
        except WorkloadError as error:
            found[name] = {"refused": str(error)}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
