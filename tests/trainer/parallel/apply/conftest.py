"""A world of one rank in the process of the test; short runs that were killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import Ranks, Run, hang, new_run
from tests.trainer.parallel.apply.layout_table import Layout, check_retrained
from tests.trainer.worker.train_loop.one_rank import world

__all__ = ["world"]


@pytest.fixture(scope="session")
def killed(ranks: Ranks, text_tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Run]:
    """A short run of a layout with a killed rank, shared by all tests: read only."""
    ended: dict[str, Run] = {}

    def get(layout: Layout) -> Run:
        if (key := str(layout)) not in ended:
            given = layout.short.settings
            over = {**given, "drill": hang(layout.world // 2, step=layout.short.steps)}
            run = new_run(ranks, tmp_path_factory.mktemp("killed") / "run", text_tokens, over.pop("world"), over)
            check_retrained(run, layout.short)
            ended[key] = run
        return ended[key]

    return get
