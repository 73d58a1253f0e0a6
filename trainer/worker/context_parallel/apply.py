"""Has the built-in model compute on this rank's part of each sequence."""

from typing import Any

from trainer.contract.config import JobConfig
from trainer.contract.config_sections.parallel_config import CpMethod
from trainer.contract.layout.context_parallel import cp_method
from trainer.worker.context_parallel.ring import RingAttention
from trainer.worker.context_parallel.sequence_part import SequencePart, sequence_part
from trainer.worker.context_parallel.ulysses import UlyssesAttention
from trainer.worker.parallel.mesh import Layout


def context_parallel(model: Any, layout: Layout, config: JobConfig) -> None:
    """Share the sequences of `model` (a Llama) among the ranks of `layout.cp`."""
    method, group = cp_method(config.model.heads, config.parallel), layout.cp.get_group()
    model.part = sequence_part(config.train.seq_len, config.parallel, method, layout.place.cp)
    attend = RingAttention(group) if method is CpMethod.RING else UlyssesAttention(group)
    for layer in model.layers:
        layer.attention.attend = attend
        if config.model.experts.count:  # padding must not be counted among the tokens of an expert
            layer.feed_forward.real = _real_of_tp(model.part, layout)


def _real_of_tp(part: SequencePart, layout: Layout) -> int:
    """Tokens without padding of those that this rank has for its experts: tensor-parallel ranks share the part."""
    each = len(part.positions) // layout.sizes.tp
    return min(max(part.real - layout.place.tp * each, 0), each)
