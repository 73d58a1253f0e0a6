"""Has ranks share the experts of the built-in model, or the tokens that these compute."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.contract.config import JobConfig
from trainer.worker.experts.exchange import TokenExchange
from trainer.worker.experts.expert_weights import Experts
from trainer.worker.parallel.data_parallel import fsdp_options
from trainer.worker.parallel.mesh import Layout


def expert_parallel(model: Any, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """Share the experts of `model` (a Llama on the meta device) among the ranks of `layout.ep`."""
    exchange = TokenExchange(layout.ep.get_group())
    for layer in model.layers:
        mixture = layer.feed_forward
        mixture.dispatch = exchange
        _split(mixture.experts, layout.ep)
        _shard(mixture.experts, layout, config, policy)


def share_tokens(model: Any, layout: Layout) -> None:
    """Tensor-parallel ranks have a part of each sequence for the mixtures of `model`, and all of what computes it.

    A gradient of that is a sum over them, as of norms. Of experts that ranks share (`layout.ep`) these ranks are as any
    others, and each has its own.
    """
    for layer in model.layers:
        mixture = layer.feed_forward
        _replicate(mixture.router, layout.tp)
        if layout.expert_mesh is None:
            _replicate(mixture.experts, layout.tp)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """On the meta device, so that nothing is sent."""
    for name, weight in list(module.named_parameters()):
        whole = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    """Replace stacks by this rank's part; on the meta device, so that nothing is sent."""
    for name, weight in list(experts.named_parameters()):
        part = weight.new_empty((weight.shape[0] // mesh.size(), *weight.shape[1:]))
        experts.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))


def _shard(experts: Experts, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """FSDP along the inner width, so that no dimension is split twice.

    A rank has the gradient of what its experts computed for all ranks of `ep`, each of which has a mean of its own, or
    with tensor parallelism a part of one: the mean over all means is the sum over the ranks that have the same experts,
    divided by the number of means.
    """
    mesh = layout.fsdp_of_experts
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1), **fsdp_options(layout, config, policy))
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(mesh.size() * layout.ep.size() / layout.sizes.tp)
    # gloo cannot divide while it sums; of one shard torch 2.13 would then divide twice.
    shards = mesh.size(mesh.ndim - 1)
    experts.set_force_sum_reduction_for_comms(layout.device.type == "cpu" and shards > 1)
