"""Protection of DataLoader workers from the signals that Slurm sends to a whole step, so that the last save works."""

from collections.abc import Callable

from torch.utils.data._utils import signal_handling

from trainer.contract.ranks.step_signals import outlive_step_signals


def protect_data_loader_workers() -> None:
    """Make every worker forked from now on ignore these signals; it still ends with its DataLoader or its rank.

    Each worker begins with torch's `_set_worker_signal_handlers`. They end the worker at a SIGTERM of any process but
    its rank, and a lost worker ends the rank before it has saved.
    """
    original = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]
    if not isinstance(original, _Protected):
        signal_handling._set_worker_signal_handlers = _Protected(original)  # type: ignore[attr-defined]


class _Protected:
    def __init__(self, original: Callable[[], None]) -> None:
        self._original = original

    def __call__(self) -> None:
        self._original()
        outlive_step_signals()
