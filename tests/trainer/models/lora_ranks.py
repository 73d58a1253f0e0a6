"""LoRA beside frozen bases on the ranks of `hf_ranks.py`, compared with peft itself."""

from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.models.hf_ranks import make_batch, own_part, whole
from trainer.models import base_precision
from trainer.models.hf_workload import HfWorkload
from trainer.models.llama import fill
from trainer.models.pretrained_weights import is_adapter
from trainer.parallel.apply import mesh
from trainer.parallel.apply.data_parallel import GradientSync
from trainer.parallel.apply.frozen_base import frozen_base
from trainer.parallel.apply.gradient_buckets import own_part as shard
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.saved_state.checkpoint_contents import model_tensors

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def reference(folder: str, base: str, adapters: dict[str, torch.Tensor]) -> Any:
    """Return peft's model in one process, with the values that the frozen weights stand for."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if base == "bfloat16":
                parameter.copy_(parameter.bfloat16())
            elif base in base_precision.QUANTIZERS and ".layers." in name and name.endswith("proj.weight"):
                parameter.copy_(base_precision.dequantize(base_precision.QUANTIZERS[base](parameter)))
    peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model)
    with torch.no_grad():
        for name, values in adapters.items():
            model.get_parameter(name).copy_(values)
    return model


def held_bytes(parameter: torch.Tensor) -> int:
    part: Any = shard(parameter)
    if not base_precision.is_quantized(parameter):
        return int(part.nbytes)
    return sum(int(getattr(part, name).nbytes) for name in part.__tensor_flatten__()[0])


def compare(folder: str, strategy: str, dtype: str, base: str | None) -> dict[str, Any]:
    """Return the largest relative difference of the adapters' gradients, the saved keys, and this rank's share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = build(
        JobConfig,
        {
            "cluster": {"ranks_per_node": world}, "parallel": {"strategy": strategy},
            "train": {"dtype": dtype, "seq_len": 16, "batch_size": 8},
        },
    )  # fmt: skip
    torch.manual_seed(1)
    workload = HfWorkload(config, name_or_path=folder, lora=LORA, base=base)
    layout = mesh.build(config.parallel, torch.device("cpu"), rank, world)
    model = workload.build_model()
    assert all(parameter.is_meta for parameter in model.parameters()), "no rank holds the whole model"
    model = workload.parallelize(model, layout)
    workload.set_initial_weights(model)
    begins_as_base = all(not whole(one).any() for name, one in model.named_parameters() if ".lora_B." in name)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:  # zero at first, when the other matrix has no gradient
            fill(name, parameter, 7, 0.1)
    adapters = {name: whole(one.detach()).clone() for name, one in model.named_parameters() if is_adapter(name)}
    batch = make_batch("llama")
    sync = GradientSync(model, layout, config.parallel.reduce, lambda: None)
    sync.backward(workload.loss(model, own_part(batch, layout.dp_rank, layout.dp_size)), is_last=True)
    theirs = reference(folder, base or dtype, adapters)
    workload.loss(theirs, batch).backward()
    wanted = {name: one.grad for name, one in theirs.named_parameters() if one.requires_grad}
    found = {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == wanted.keys() == adapters.keys()
    worst = max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in wanted.items())
    base_held = sum(held_bytes(one) for name, one in model.named_parameters() if not is_adapter(name))
    in_float32 = sum(4 * one.numel() for name, one in theirs.named_parameters() if not is_adapter(name))
    kept = frozen_base(model)
    assert kept is not None
    return {
        "gradients": worst, "saved": sorted(model_tensors(model)), "adapters": sorted(adapters),
        "share": base_held / in_float32, "digest": kept.digest, "begins as base": begins_as_base,
    }  # fmt: skip
