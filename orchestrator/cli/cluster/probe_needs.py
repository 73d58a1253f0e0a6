"""A configuration's demands on network and storage, compared with measured rates. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.config.run_config import RunConfig
from trainer.costs.model_flops import parameters
from trainer.costs.peak_bytes import FLOAT32
from trainer.protocol.probe import CollectiveRate, ProbeResult, StorageRate

_STATES = 3  # weights and both Adam moments are saved
_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that one step or one save moves. None: unknown, because the model is the user's own."""

    gradient_bytes: int | None
    checkpoint_bytes: int | None
    data_bytes: int
    save_every: int | None  # steps; None: chosen at run time


def find_needs(config: RunConfig) -> Needs:
    """Return a configuration's needs; the sizes of a model are known for the built-in one."""
    built_in = config.trains_built_in_workload
    elements = sum(parameter.elements for parameter in parameters(config.model)) if built_in else None
    every = config.checkpoint.every
    return Needs(
        gradient_bytes=None if elements is None else FLOAT32 * elements,
        checkpoint_bytes=None if elements is None else _STATES * FLOAT32 * elements,
        data_bytes=0 if config.command else config.train.batch_size * config.train.seq_len * _TOKEN_BYTES,
        save_every=every if isinstance(every, int) and every > 0 else None,
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredNeed:
    """One need with the measured rate: the time that it takes, and its share of the time available."""

    what: str
    bytes: int
    seconds: float
    available: float | None = None  # seconds, if the step time is known

    @property
    def enough(self) -> bool | None:
        return None if self.available is None else self.seconds <= self.available


def compare_needs(needs: Needs, result: ProbeResult, step_seconds: float | None) -> list[MeasuredNeed]:
    """Compare a configuration's needs with a result; needs of unknown size are left out."""
    return [*_network(needs, result.collectives, step_seconds), *_storage(needs, result.storage, step_seconds)]


def _network(
    needs: Needs, collectives: Sequence[CollectiveRate], step_seconds: float | None
) -> Iterator[MeasuredNeed]:  # fmt: skip
    rates = [one for one in collectives if one.scope == "world" and one.operation == "all-reduce"]
    if rates and needs.gradient_bytes:
        largest = max(rates, key=lambda one: one.bytes)
        seconds = needs.gradient_bytes * 2 * (largest.ranks - 1) / largest.ranks / largest.bus_bytes_per_s
        what = f"all-reduce of all gradients, once per step, on {largest.ranks} ranks"
        yield MeasuredNeed(what=what, bytes=needs.gradient_bytes, seconds=seconds, available=step_seconds)


def _storage(needs: Needs, rates: Sequence[StorageRate], step_seconds: float | None) -> Iterator[MeasuredNeed]:
    most = max((rate.nodes for rate in rates), default=0)
    interval = step_seconds * needs.save_every if step_seconds and needs.save_every else None
    for rate in (rate for rate in rates if rate.nodes == most):
        if rate.write_bytes_per_s and needs.checkpoint_bytes:
            yield MeasuredNeed(
                what=f"checkpoint to {rate.place}, every {needs.save_every or '?'} steps", available=interval,
                bytes=needs.checkpoint_bytes, seconds=needs.checkpoint_bytes / rate.write_bytes_per_s,
            )  # fmt: skip
        elif rate.read_bytes_per_s and needs.data_bytes and rate.place == "data.path":
            yield MeasuredNeed(
                what="tokens of one step from data.path", available=step_seconds,
                bytes=needs.data_bytes, seconds=needs.data_bytes / rate.read_bytes_per_s,
            )  # fmt: skip
