"""Misspelled methods of a workload, which orch would never call."""

from pathlib import Path

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code
from orchestrator.submission.user_code import near_methods
from trainer.protocol.config import WorkloadConfig

HEAD = "import orch\nclass X(orch.BaseWorkload):\n"
MODEL, LOSS = "    def build_model(self): ...\n", "    def loss(self, model, batch): ...\n"


def config(folder: Path, text: str) -> RunConfig:
    (folder / "mine.py").write_text(text)
    return RunConfig(workload=WorkloadConfig(target="mine:X", path=(str(folder),)))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("    def buidl_data(self, layout): ...\n", "X.buidl_data(): did you mean build_data()?"),
        ("    def vaildate(self, model): ...\n", "X.vaildate(): did you mean validate()?"),
        ("    def buidl_data(self): ...\n    def build_data(self, layout): ...\n", ""),
        ("    def metric(self): ...\n    def metrics(self): return self.metric()\n", ""),
        ("    def metric(self): ...\n    def other(self): return self.metric()\n", ""),
        ("    def losses(self): ...\n", ""),
        ("    def accuracy(self): ...\n", ""),
        ("    def _build_data(self): ...\n", ""),
    ],
)
def test_only_unused_similar_names_are_reported(tmp_path: Path, method: str, told: str) -> None:
    made = config(tmp_path, HEAD + MODEL + LOSS + method)
    assert [words for words in near_methods(made) if told in words] == near_methods(made)
    assert bool(near_methods(made)) == bool(told)
    user_code.check(made)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (HEAD + "    def buidl_model(self): ...\n" + LOSS, "no build_model()", "where you wrote buidl_model?"),
        (HEAD + MODEL + "    def los(self, model, batch): ...\n", "no loss()", "where you wrote los?"),
        (HEAD + MODEL, "no loss()", "def loss(self, model, batch): ..."),
        (
            "from orch import BaseWorkload as B\nclass X(B):\n" + LOSS,
            "no build_model()", "def build_model(self): ...",
        ),
    ],
)  # fmt: skip
def test_a_class_without_what_every_workload_needs_is_refused(
    tmp_path: Path, text: str, what: str, hint: str
) -> None:  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        user_code.check(config(tmp_path, text))
    assert what in refused.value.what
    assert refused.value.hint.endswith(hint)
    assert refused.value.where.startswith(str(tmp_path / "mine.py:"))


@pytest.mark.parametrize(
    "text",
    [
        "from base import BaseWorkload\nclass X(BaseWorkload):\n" + MODEL,
        "import orch\nfrom a import Losses\nclass X(Losses, orch.BaseWorkload):\n" + MODEL,
        "from orch import Workload\nclass X(Workload):\n" + MODEL,
        HEAD + MODEL + "from a import f\nX.loss = f\n",
        HEAD + MODEL + "from a import f\nsetattr(X, 'lo' + 'ss', f)\n",
        HEAD + MODEL + "    def __getattr__(self, name): ...\n",
        HEAD + MODEL + "    from a import loss\n",
    ],
)
def test_a_class_that_may_have_it_from_elsewhere_is_not(tmp_path: Path, text: str) -> None:
    user_code.check(config(tmp_path, text))
