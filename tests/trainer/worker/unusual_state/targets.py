"""All cases by name, as ranks import them (`targets:LateBuffer`); importing these modules fills the tables."""

from tests.trainer.worker.unusual_state import layers, objects, optimizers, refusals  # noqa: F401
from tests.trainer.worker.unusual_state.cases import KEPT, REFUSED, Usual


def __getattr__(name: str) -> type[Usual]:
    if name in KEPT:
        return KEPT[name]
    if name in REFUSED:
        return REFUSED[name][0]
    raise AttributeError(name)
