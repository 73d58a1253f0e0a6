"""Peak bytes of a step on a pipeline rank, including activations. Pure functions.

Covers the built-in model in float32, without recomputation, context parallelism and loss chunks. A mixture of experts
is modelled with equally loaded experts; with `parallel.ep` a rank computes tokens sent by others, so a rank with
popular experts needs more.

Follows the schedule's table action by action: activations of each micro-batch from its forward pass to its last
gradient, messages between stages, gathered parameters, and gradients, which are whole until the reduction at the end of
the step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from trainer.costs.micro_batches import micro_batch_size
from trainer.costs.model_flops import Parameter, parameters
from trainer.costs.peak_bytes import FLOAT32, local_shape, pack_buckets, state_bytes
from trainer.costs.simulation import Kind, PipelineAction, Table
from trainer.costs.stage_split import StagePart, has, split_model, stages_of_rank
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig


def parameters_of_rank(config: JobConfig, rank: int) -> list[Parameter]:
    """Return the parameters of all stages on `rank` in model order, or of the whole model if there is no pipeline."""
    known = list(parameters(config.model))
    if config.parallel.pipeline.stages == 1:
        return known
    parts = parts_of_rank(config, rank)
    return [parameter for parameter in known if any(has(part, parameter) for part in parts)]


def parts_of_rank(config: JobConfig, rank: int) -> list[StagePart]:
    """Return the stages of `rank`. Raises ValueError if the model cannot be split into them."""
    pipeline = config.parallel.pipeline
    place = config.parallel.locate_work(config.cluster.world_size, rank)[0]
    parts = split_model(pipeline, config.model, config.train).parts
    return [parts[stage] for stage in stages_of_rank(pipeline, place)]


@dataclass(frozen=True, kw_only=True)
class FeedForwardMemory:
    """Memory of one layer's feed-forward block."""

    kept: int
    """Floats per token that autograd keeps, including the block's input."""

    split: int
    """Floats per token kept for weight gradients, if these are computed separately."""

    during: int
    """Peak bytes of gradients inside its backward pass, in addition to all kept activations."""

    weight: int
    """Bytes of one matrix gradient before it is accumulated."""


def feed_forward_memory(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """Return the memory of a feed-forward block for a micro-batch of `tokens` tokens."""
    if model.experts.count:
        return _of_experts(model, tokens, tp, ep)
    matrix = FLOAT32 * model.ffn_dim * model.dim // tp
    return FeedForwardMemory(
        kept=4 * model.ffn_dim // tp + model.dim,
        split=(2 * model.ffn_dim + model.dim) // tp,
        during=matrix + FLOAT32 * tokens * model.ffn_dim // tp,
        weight=matrix,
    )


def _of_experts(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """Return the memory of a layer's experts.

    Each token is copied for each of its experts, and the results are kept for weighting. The row orders are int64. All
    matrices of one kind form a stack, whose gradient is assembled from the experts' gradients. When the last expert
    finishes, the gradients of all experts exist, and their activations have been freed. Each `tp` rank has its own
    tokens.
    """
    experts, copies = model.experts, model.experts.per_token
    inner, rows = copies * experts.ffn_dim, copies * model.dim
    orders = copies * (3 if ep == 1 else 5) * 2
    here, own = experts.count // ep, FLOAT32 * tokens // tp
    stack = FLOAT32 * here * experts.ffn_dim * model.dim
    of_one = (2 * own * inner + stack) // here  # gradients within a single expert, the first or the last
    return FeedForwardMemory(
        kept=(4 * inner + 2 * rows + experts.count + orders + 2 * copies + 1 + model.dim) // tp,
        split=(2 * inner + rows + experts.count) // tp,
        during=max(
            own * 2 * rows,
            of_one,
            of_one + (here - 1) * (3 * stack - own * (4 * inner - rows)) // here,
            4 * stack - own * (4 * inner + rows),
        ),
        weight=2 * stack,
    )


@dataclass(frozen=True, kw_only=True)
class _StageBytes:
    """Bytes of one stage: tensors per micro-batch, and weights."""

    part: StagePart
    boundary: int
    """Bytes of a tensor sent to another stage; its gradient has the same size."""
    saved: int
    """Bytes that autograd keeps until the last gradient has been computed."""
    behind: int
    """Part of `saved` and of the loss's memory that is freed before the last feed-forward computes its gradients."""
    within: int
    """Peak bytes of gradients within a feed-forward."""
    split: int
    """Bytes of activation gradients kept for weight gradients, if these are computed separately."""
    result: int
    """Bytes of the forward pass's result: activations or logits."""
    weights: int
    """Bytes of this stage's gathered parameters; their gradients have the same size."""
    matrix: int
    """Bytes of one feed-forward matrix's gradient, which exists separately before it is accumulated."""
    output: int
    """Bytes of the output projection, in the last stage."""

    @property
    def backward(self) -> int:
        """Return the peak in the backward pass of the last layer's feed-forward, in addition to the kept bytes."""
        return self.within - self.behind

    @property
    def loss(self) -> int:
        """Return the peak of the loss: two copies of the logits' gradients, or later the output's gradient."""
        return max(2 * self.result, self.output + self.boundary) if self.part.is_last else 0


def pipeline_peak_bytes(config: JobConfig, table: Table, rank: int = 0) -> int:
    """Return the peak bytes of a step on `rank` from the second step on; `table` includes sends."""
    parallel, world = config.parallel, config.cluster.world_size
    own = parameters_of_rank(config, rank)
    held = state_bytes(own, parallel, world, rank)
    stages = {stage.part.stage: stage for stage in _stages(config, rank)}
    plain = parallel.has_plain_replicas("float32")
    gathered = 0 if plain else sum(stage.weights for stage in stages.values())
    place = parallel.locate_work(world, rank)[0]
    during = gathered + _Step(stages).peak(table[place])
    averaged = held.gradients + (_bucket(config, own, rank) if plain else 0)
    return held.parameters + held.optimizer + max(during, averaged)


def _stages(config: JobConfig, rank: int) -> Iterator[_StageBytes]:
    """Yield the stages of `rank`. A norm keeps both of its products; each tp rank has every matrix's whole input."""
    model, parallel, tp = config.model, config.parallel, config.parallel.tp
    world = config.cluster.world_size
    tokens = config.train.seq_len * micro_batch_size(
        parallel.pipeline, config.train, parallel.data_parallel_size(world)
    )
    width, keys, rows = model.dim, model.kv_heads * model.head_width, model.embedding_rows // tp
    inner = feed_forward_memory(model, tokens, tp, parallel.ep)
    layer = (6 * width + 2 * keys + model.heads + 2) // tp + width + inner.kept
    split = (3 * width + 2 * keys) // tp + inner.split
    own = parameters_of_rank(config, rank)
    for part in parts_of_rank(config, rank):
        layers, last = len(part.layers), width // tp + width + rows + 1
        behind = last if part.is_last else 0
        yield _StageBytes(
            part=part,
            boundary=FLOAT32 * tokens * width // tp,
            # The last layer's output is sent on; in the last stage only the norms need it.
            saved=FLOAT32 * tokens * (layers * layer + part.is_first * (width // tp) + behind)
            - part.is_last * (FLOAT32 * tokens * width // tp),
            behind=FLOAT32 * tokens * behind,
            within=inner.during,
            split=FLOAT32 * tokens * (layers * split + part.is_last * (rows + width)),
            result=FLOAT32 * tokens * (rows if part.is_last else width // tp),
            weights=_gathered_bytes([parameter for parameter in own if has(part, parameter)], config, rank),
            matrix=inner.weight,
            output=FLOAT32 * rows * width,
        )


def _gathered_bytes(parameters: Sequence[Parameter], config: JobConfig, rank: int) -> int:
    """Return the bytes of gathered parameters, without other ranks' part of shared experts."""
    sizes, ep = config.parallel.parameter_sizes(config.cluster.world_size), config.parallel.ep
    whole, of_experts = {**sizes, "dp_shard": 1}, {**sizes, "dp_shard": ep, "tp": 1}
    shapes = (local_shape(one, of_experts if one.is_expert and ep > 1 else whole, rank, ep) for one in parameters)
    return sum(FLOAT32 * prod(shape) for shape in shapes)


def _bucket(config: JobConfig, parameters: Sequence[Parameter], rank: int) -> int:
    """Return the size of the largest bucket that plain replicas average; 0 for a single replica."""
    sizes = config.parallel.parameter_sizes(config.cluster.world_size)
    if sizes["dp_replicate"] == 1:
        return 0
    gradients = [FLOAT32 * prod(local_shape(parameter, sizes, rank)) for parameter in reversed(parameters)]
    return max(sum(gradients[place] for place in places) for places in pack_buckets((None, size) for size in gradients))


class _Step:
    """Simulated step of a rank: bytes after each action, in addition to its states and gathered parameters."""

    def __init__(self, stages: Mapping[int, _StageBytes]) -> None:
        self._stages = stages
        self._bytes = self._most = 0
        self._with_gradients: set[int] = set()
        self._does: dict[Kind, Callable[[_StageBytes], None]] = {
            Kind.RECEIVE_ACTIVATION: self._receive,
            Kind.RECEIVE_GRADIENT: self._receive,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
        }

    def peak(self, actions: Sequence[PipelineAction]) -> int:
        for action in actions:
            if do := self._does.get(action.kind):
                do(self._stages[action.stage])
        return self._most

    def _needs(self, more: int) -> None:
        """Record a temporary use of `more` bytes."""
        self._most = max(self._most, self._bytes + more)

    def _receive(self, stage: _StageBytes) -> None:
        self._bytes += stage.boundary

    def _forward(self, stage: _StageBytes) -> None:
        self._bytes += stage.saved
        self._needs(stage.result)

    def _backward(self, stage: _StageBytes) -> None:
        number = stage.part.stage
        # A gradient from another rank was received into a buffer that is already counted.
        own = stage.boundary if stage.part.is_last or number + 1 in self._stages else 0
        self._needs(stage.backward + own)
        self._needs(stage.loss)
        self._add_gradients(stage)
        self._forget(stage)

    def _input_gradient(self, stage: _StageBytes) -> None:
        """Record a pass. In the first stage, torch 2.13 computes everything along with the weight gradients instead."""
        if not stage.part.is_first:
            self._bytes += stage.split + stage.boundary
            self._needs(stage.boundary if stage.part.is_last or stage.part.stage + 1 in self._stages else 0)

    def _weight_gradient(self, stage: _StageBytes) -> None:
        if stage.part.is_first:
            self._backward(stage)
            return
        self._needs(stage.matrix)
        self._add_gradients(stage)
        self._bytes -= stage.split + stage.boundary
        self._forget(stage)

    def _add_gradients(self, stage: _StageBytes) -> None:
        if stage.part.stage not in self._with_gradients:
            self._with_gradients.add(stage.part.stage)
            self._bytes += stage.weights

    def _forget(self, stage: _StageBytes) -> None:
        """Free the activations of a micro-batch after its last gradient.

        torch keeps its sends, and with them the sent tensors, until the end of the step; a loss keeps its stage's
        input. In a middle stage, the two sent tensors replace the two received ones.
        """
        self._bytes -= stage.saved
        self._bytes += stage.boundary if stage.part.is_last else 0
        self._needs(0)
