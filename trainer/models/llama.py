"""The built-in model: a decoder as Llama, Mistral, Qwen 2 and 3 have it.

RMSNorm, rotary embedding, SwiGLU and grouped-query attention, with biases, norms of heads or a sliding window.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.models.mixture_of_experts import MixtureOfExperts, Router
from trainer.parallel.apply.gradient_buckets import own_part
from trainer.parallel.apply.layer_wrappers import Recompute, choose_recompute
from trainer.parallel.apply.sequence_part import SequencePart, causal_attention
from trainer.protocol.config_sections.recipe_config import ModelConfig, RopeScalingConfig, TrainConfig
from trainer.worker.workload import WorkloadError


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum over all trained tokens in float32; a negative target is not trained.

    `logits` [tokens, vocabulary] may be a DTensor split along columns.
    """
    if not isinstance(logits, DTensor):
        return functional.cross_entropy(logits.float(), targets, reduction="sum")
    mesh = logits.device_mesh
    part = logits.to_local()
    # The vocabulary is padded to a multiple of the ranks, so all parts have the same width.
    first = mesh.get_local_rank() * part.shape[-1]
    total: torch.Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        part, targets, first, mesh.get_group()
    )
    return total


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy over columns split among ranks, as in Megatron-LM (Shoeybi et al. 2019, section 3)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        values = logits.float()
        highest = values.amax(dim=-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        exponentials = (values - highest[:, None]).exp_()
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        column = targets - first
        is_mine = (column >= 0) & (column < values.shape[-1])
        column = column.clamp(0, values.shape[-1] - 1)
        chosen = values.gather(1, column[:, None]).squeeze(1).masked_fill(~is_mine, 0.0)
        dist.all_reduce(chosen, dist.ReduceOp.SUM, group)
        is_trained = targets >= 0
        ctx.save_for_backward(exponentials.div_(total[:, None]), column, is_mine, is_trained)
        ctx.dtype = logits.dtype
        return (total.log() + highest - chosen).masked_fill(~is_trained, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        share, column, is_mine, is_trained = ctx.saved_tensors
        share = share.clone()
        share.scatter_add_(1, column[:, None], -is_mine.to(share.dtype)[:, None])
        return (share * (gradient * is_trained)[:, None]).to(ctx.dtype), None, None, None


def generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator that depends only on `seed` and `name`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def fill(name: str, parameter: torch.Tensor, seed: int, deviation: float | None) -> None:
    """Fill `parameter` with its shard of a normal tensor truncated at three deviations; without one, fill it with 1."""
    local = own_part(parameter)
    if not deviation:
        local.fill_(1.0 if deviation is None else 0.0)
        return
    # Every rank generates the whole tensor: no communication, and one parameter is small relative to the model.
    full = torch.empty(parameter.shape, dtype=torch.float32)
    torch.nn.init.trunc_normal_(full, std=deviation, a=-3 * deviation, b=3 * deviation, generator=generator(seed, name))
    local.copy_(local_shard(full, parameter))


def local_shard(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the shard of `full` that this rank holds of the DTensor `like`."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        full = full.narrow(dim, start if length else 0, length)
    return full


def rotary_table(
    length: int, width: int, theta: float, scaling: RopeScalingConfig, device: torch.device
) -> torch.Tensor:
    """Return cosines and sines of RoFormer (Su et al. 2021), shape [2, length, width / 2], float32."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), scale_frequencies(frequencies, scaling))
    return torch.stack([angles.cos(), angles.sin()]).to(device)


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScalingConfig) -> torch.Tensor:
    """Return rotary frequencies for longer sequences, as published with Llama 3.1 (`apply_scaling`)."""
    if scaling.kind == "none":
        return frequencies
    low = frequencies / scaling.factor
    if scaling.kind == "linear":
        return low
    turns = scaling.original_length * frequencies / (2 * math.pi)  # in a sequence of pretraining
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(low, frequencies, share.clamp(0.0, 1.0))


def rotate(heads: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` [batch, length, heads, width] by position; the two halves of the width form the pairs."""
    cos, sin = table[0, :, None, :], table[1, :, None, :]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(heads)


class Attention(nn.Module):
    """Causal grouped-query attention; the local weights determine the number of local heads."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        self.width = config.head_width
        queries, keys = config.heads * self.width, config.kv_heads * self.width
        self.wq = nn.Linear(config.dim, queries, bias=config.attention.qkv_bias)
        self.wk = nn.Linear(config.dim, keys, bias=config.attention.qkv_bias)
        self.wv = nn.Linear(config.dim, keys, bias=config.attention.qkv_bias)
        self.wo = nn.Linear(queries, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.width, eps=config.norm_eps) if config.attention.qk_norm else None
        self.k_norm = nn.RMSNorm(self.width, eps=config.norm_eps) if config.attention.qk_norm else None
        self.attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = partial(
            causal_attention, window=config.window(length)
        )

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (project(x).view(batch, length, -1, self.width) for project in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = self.attend(
            rotate(query, table).transpose(1, 2), rotate(key, table).transpose(1, 2), value.transpose(1, 2)
        )
        joined: torch.Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return joined


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, length: int, *, recompute: Recompute | None) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, length)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = MixtureOfExperts(config) if config.experts.count else FeedForward(config)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        # Inside `forward`, so that FSDP's hooks stay outside and parameters keep their names.
        if self.recompute is not None and torch.is_grad_enabled():
            return self.recompute(self._layer, x, table)
        return self._layer(x, table)

    def _layer(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Decoder: tokens [batch, length] to logits [batch, length, padded vocabulary], or with targets to a mean loss."""

    rotary: torch.Tensor

    def __init__(self, config: ModelConfig, train: TrainConfig) -> None:
        super().__init__()
        self.config, self.seq_len, self.loss_chunks = config, train.seq_len, train.loss_chunks
        self.part: SequencePart | None = None
        """Part of each sequence that this rank computes, or None for all of it."""
        rows = config.embedding_rows
        self.embedding = nn.Embedding(rows, config.dim)
        self.layers = nn.ModuleList(
            [Block(config, self.seq_len, recompute=choose_recompute(number, train)) for number in range(config.layers)]
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, rows, bias=False)
        self.tie()
        self.register_buffer("rotary", torch.empty(2, self.seq_len, config.head_width // 2), persistent=False)

    def tie(self) -> None:
        """Share the embedding with the output again after one of them was replaced."""
        if self.config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def materialize(self, device: torch.device, seed: int, *, offload: bool = False) -> None:
        """Move from the meta device and set initial weights; with `offload`, parameters stay in host memory."""
        self.allocate(device, offload=offload)
        self.set_initial_weights(seed)

    def allocate(self, device: torch.device, *, offload: bool = False) -> None:
        """Move from the meta device with uninitialized weights."""
        self.to_empty(device=torch.device("cpu") if offload else device)
        self.tie()
        config = self.config
        table = rotary_table(self.seq_len, config.head_width, config.rope_theta, config.rope_scaling, device)
        self.rotary = table if self.part is None else self.part.select_rows(table)
        for module in self.modules():
            if isinstance(module, Router):
                module.reset(device)

    def set_initial_weights(self, seed: int) -> None:
        """Set the initial weights from `seed` and names, in 50 ns per parameter of the whole model on every rank."""
        for name, parameter in self.named_parameters():
            fill(name, parameter, seed, self.deviation(name))

    def deviation(self, name: str) -> float | None:
        """Return the deviation of a parameter's initial values (Radford et al. 2019), or None for ones; 0: zeros."""
        if "norm" in name:
            return None
        if name.endswith(".bias"):
            return 0.0
        if name.endswith(("wo.weight", "w2.weight", "experts.w2")):
            return 0.02 / float((2 * self.config.layers) ** 0.5)
        return 0.02

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if self.part is not None and targets is None:
            raise WorkloadError(
                f"{self.part.ranks} ranks share each sequence, and none has all of its logits: call the model with its "
                "targets to get their mean loss"
            )
        return self.result(self.through_layers(self.embed_tokens(tokens)), targets)

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the activations of this rank's part of `tokens`, which contains whole sequences."""
        x: torch.Tensor = self.embedding(tokens if self.part is None else self.part.select_tokens(tokens))
        return x

    def through_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations after the last layer on this rank."""
        for layer in self.layers:
            x = layer(x, self.rotary)
        return x

    def result(self, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Return logits, or with targets their mean loss, from the last layer's output.

        With context parallelism the loss is scaled so that the mean over ranks is the mean over all tokens.
        """
        x = self.norm(x)
        if isinstance(x, DTensor):  # this gives each tensor-parallel rank all tokens
            x = x.redistribute(placements=[Replicate()])
        if targets is not None:
            return self._mean_loss(x, targets)
        logits = self.output(x)
        whole: torch.Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return whole

    def _mean_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        part = self.part
        if part is None:
            return self._summed_loss(x, targets) / targets.numel()
        own = part.select_tokens(targets)
        return self._summed_loss(x[:, : part.real], own[:, : part.real]) * (part.ranks / targets.numel())

    def _summed_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy in float32; the logits of only one chunk of the sequence exist at a time.

        All ranks use the same number of chunks, some possibly empty, because each chunk may gather the output weights.
        """
        if self.loss_chunks == 1:
            return self._chunk_loss(x, targets)
        parts = zip(*(each.tensor_split(self.loss_chunks, dim=1) for each in (x, targets)), strict=True)
        total = torch.zeros((), device=targets.device)
        for part, target in parts:
            total = total + (
                checkpoint(self._chunk_loss, part, target, use_reentrant=False)
                if torch.is_grad_enabled()
                else self._chunk_loss(part, target)
            )
        return total

    def _chunk_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(self.output(x).flatten(0, 1), targets.flatten())
