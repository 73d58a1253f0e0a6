"""Workers of DataLoaders outlive the signals that Slurm sends to a whole step, so that the last save has its data."""

from collections.abc import Callable

from torch.utils.data._utils import signal_handling

from trainer.contract.ranks.step_signals import outlive_step_signals


def protect_data_loader_workers() -> None:
    """From now on, every worker that is forked outlives them; it still ends when its DataLoader or its rank does.

    Each worker begins with torch's `_set_worker_signal_handlers`, by which a SIGTERM of any process but its rank ends
    it; and a lost worker ends the rank before it has saved.
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
