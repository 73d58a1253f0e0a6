"""Peak bytes of a step on a rank of a pipeline, activations included. Pure.

In float32. A mixture is counted with the same tokens for each expert: with `parallel.ep` a rank computes what others
send it, and one with popular experts needs more.

Follows the table of a schedule action by action: what a stage keeps of each micro-batch from its forward pass to its
last gradient, what travels between stages, gathered parameters, and gradients, which are whole until the reduction at
the end of the step. Of the built-in model in float32, without recomputing, context parallelism and chunks of the loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from trainer.contract.config import JobConfig, ModelConfig
from trainer.contract.config_sections.parallel_config import place_in
from trainer.contract.model_costs.model_flops import Parameter
from trainer.contract.model_costs.peak_bytes import local_shape, packed, state_bytes
from trainer.contract.pipeline.micro_batches import micro_batch_size
from trainer.contract.pipeline.simulation import Action, Kind, Table
from trainer.contract.pipeline.stage_split import StagePart, has, parameters_of_rank, parts_of_rank

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class FeedForwardMemory:
    """Of one layer."""

    kept: int
    """Floats that autograd keeps of each token, with its input."""

    split: int
    """Floats of each token that wait for the gradients of weights, where these are computed apart."""

    during: int
    """Bytes of gradients within it, beside all that is kept, when its backward pass needs most."""

    weight: int
    """Bytes that the gradient of one of its matrices takes before it is added up."""


def feed_forward_memory(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """For so many tokens of a micro-batch."""
    if model.experts.count:
        return _of_experts(model, tokens, tp, ep)
    matrix = _FLOAT32 * model.ffn_dim * model.dim // tp
    return FeedForwardMemory(
        kept=4 * model.ffn_dim // tp + model.dim,
        split=(2 * model.ffn_dim + model.dim) // tp,
        during=matrix + _FLOAT32 * tokens * model.ffn_dim // tp,
        weight=matrix,
    )


def _of_experts(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """Each token is copied for its experts, whose results are kept to weigh them; orders of rows are int64.

    All matrices of a kind are one stack, whose gradient is put together of those of the experts: when the last expert
    has its gradients, those of all exist, and what the experts have kept is gone. Each of `tp` ranks has its own
    tokens.
    """
    experts, copies = model.experts, model.experts.per_token
    inner, rows = copies * experts.ffn_dim, copies * model.dim
    orders = copies * (3 if ep == 1 else 5) * 2
    here, own = experts.count // ep, _FLOAT32 * tokens // tp
    stack = _FLOAT32 * here * experts.ffn_dim * model.dim
    of_one = (2 * own * inner + stack) // here  # gradients within one expert, the first one or the last one
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
    """What one stage needs for one micro-batch, and of its weights."""

    part: StagePart
    boundary: int
    """What travels to another stage, and back as its gradient."""
    saved: int
    """By autograd, until the last gradient has been computed."""
    behind: int
    """Of that, and of what the loss needs, freed before the last layer's feed-forward computes its gradients."""
    within: int
    """Gradients within a feed-forward, when these need most."""
    split: int
    """Gradients of activations that wait for those of weights, where these are computed apart."""
    result: int
    """Of the forward pass: activations, or logits."""
    weights: int
    """Gathered parameters of this stage; as many bytes of gradients."""
    matrix: int
    """The gradient of one of a feed-forward's, which exists by itself before it is added up."""
    output: int
    """The projection to the vocabulary, in the last stage."""

    @property
    def backward(self) -> int:
        """More than what is kept when the last layer's feed-forward has its gradients."""
        return self.within - self.behind

    @property
    def loss(self) -> int:
        """The same when the logits, of which there are two more then, and later the output have theirs."""
        return max(2 * self.result, self.output + self.boundary) if self.part.is_last else 0


def pipeline_peak_bytes(config: JobConfig, table: Table, rank: int = 0) -> int:
    """The peak of a step on `rank`, from the second step on, when the optimizer's state exists; `table` with sends."""
    parallel, world = config.parallel, config.cluster.world_size
    own = parameters_of_rank(config, rank)
    held = state_bytes(own, parallel, world, rank)
    stages = {stage.part.stage: stage for stage in _stages(config, rank)}
    plain = parallel.has_plain_replicas("float32")
    gathered = 0 if plain else sum(stage.weights for stage in stages.values())
    place, *_ = place_in(parallel.mesh_sizes(world), rank)
    during = gathered + _Step(stages).peak(table[place])
    averaged = held.gradients + (_bucket(config, own, rank) if plain else 0)
    return held.parameters + held.optimizer + max(during, averaged)


def _stages(config: JobConfig, rank: int) -> Iterator[_StageBytes]:
    """Norms are computed in two products, of which both are kept; inputs of matrices are whole on every rank of tp."""
    model, parallel, tp = config.model, config.parallel, config.parallel.tp
    world = config.cluster.world_size
    tokens = config.train.seq_len * micro_batch_size(
        parallel.pipeline, config.train, parallel.data_parallel_size(world)
    )
    width, keys, rows = model.dim, model.kv_heads * model.dim // model.heads, model.embedding_rows // tp
    inner = feed_forward_memory(model, tokens, tp, parallel.ep)
    layer = (6 * width + 2 * keys + model.heads + 2) // tp + width + inner.kept
    split = (3 * width + 2 * keys) // tp + inner.split
    own = parameters_of_rank(config, rank)
    for part in parts_of_rank(config, rank):
        layers, last = len(part.layers), width // tp + width + rows + 1
        behind = last if part.is_last else 0
        yield _StageBytes(
            part=part,
            boundary=_FLOAT32 * tokens * width // tp,
            # What the last layer returns is sent on; in the last stage only norms need it.
            saved=_FLOAT32 * tokens * (layers * layer + part.is_first * (width // tp) + behind)
            - part.is_last * (_FLOAT32 * tokens * width // tp),
            behind=_FLOAT32 * tokens * behind,
            within=inner.during,
            split=_FLOAT32 * tokens * (layers * split + part.is_last * (rows + width)),
            result=_FLOAT32 * tokens * (rows if part.is_last else width // tp),
            weights=_gathered([parameter for parameter in own if has(part, parameter)], config, rank),
            matrix=inner.weight,
            output=_FLOAT32 * rows * width,
        )


def _gathered(parameters: Sequence[Parameter], config: JobConfig, rank: int) -> int:
    """Of experts that ranks share, this rank's ones."""
    sizes, ep = config.parallel.parameter_sizes(config.cluster.world_size), config.parallel.ep
    whole, of_experts = sizes._replace(dp_shard=1), sizes._replace(dp_shard=ep, tp=1)
    shapes = (local_shape(one, of_experts if one.is_expert and ep > 1 else whole, rank, ep) for one in parameters)
    return sum(_FLOAT32 * prod(shape) for shape in shapes)


def _bucket(config: JobConfig, parameters: Sequence[Parameter], rank: int) -> int:
    """The largest bucket in which plain replicas average; nothing where there is nobody to average with."""
    sizes = config.parallel.parameter_sizes(config.cluster.world_size)
    if sizes.dp_replicate == 1:
        return 0
    gradients = [_FLOAT32 * prod(local_shape(parameter, sizes, rank)) for parameter in reversed(parameters)]
    return max(sum(gradients[place] for place in places) for places in packed((None, size) for size in gradients))


class _Step:
    """One step of a rank: bytes that exist beside its states and its gathered parameters, after each action."""

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

    def peak(self, actions: Sequence[Action]) -> int:
        for action in actions:
            if do := self._does.get(action.kind):
                do(self._stages[action.stage])
        return self._most

    def _needs(self, more: int) -> None:
        """So many bytes more for a moment."""
        self._most = max(self._most, self._bytes + more)

    def _receive(self, stage: _StageBytes) -> None:
        self._bytes += stage.boundary

    def _forward(self, stage: _StageBytes) -> None:
        self._bytes += stage.saved
        self._needs(stage.result)

    def _backward(self, stage: _StageBytes) -> None:
        number = stage.part.stage
        # A gradient that comes from another rank was received into a buffer, which has been counted.
        own = stage.boundary if stage.part.is_last or number + 1 in self._stages else 0
        self._needs(stage.backward + own)
        self._needs(stage.loss)
        self._add_gradients(stage)
        self._forget(stage)

    def _input_gradient(self, stage: _StageBytes) -> None:
        """torch 2.13 computes nothing here in the first stage, and all of it with the weights."""
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
        """What was sent is kept to the end of the step, as torch keeps its sends; a loss keeps what its stage received.

        So a stage in the midst has sent two tensors, and has dropped two that it has received.
        """
        self._bytes -= stage.saved
        self._bytes += stage.boundary if stage.part.is_last else 0
        self._needs(0)
