"""Weights exported from one run start another."""

import pytest

from tests.end_to_end.user import User, final

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

SETTINGS = [
    "train.steps=8", "checkpoint.every=4", "train.batch_size=4", "train.seq_len=32", "cluster.nodes=1",
    "cluster.ranks_per_node=2", "parallel.tp=1", "parallel.dp_shard=2", "model.layers=2",
]  # fmt: skip


@pytest.mark.proof
def test_a_run_goes_on_bit_for_bit_from_an_export_and_begins_anew_from_weights(user: User) -> None:
    (user.folder / "text").mkdir()
    (user.folder / "text" / "a.txt").write_text("to be or not to be, that is the question. " * 500)
    settings = [*SETTINGS, f"data.text=[{user.folder / 'text'}]"]
    first = user.submit("tiny-gpt", *settings)["run"]
    assert user.wait(first) == 0
    user.ask("ckpt", "export", f"{first}@4", "half", "--to", "torch", "--with-optimizer")
    user.ask("ckpt", "export", first, "whole")
    more = [*settings, f"cluster.root={user.root}", f"cluster.kind={user.cluster}"]
    second = user.ask("ckpt", "import", "half", "tiny-gpt", *more)
    third = user.ask(
        "ckpt", "import", "whole", "tiny-gpt", *more, "train.steps=2", "parallel.tp=2", "parallel.dp_shard=1"
    )
    assert (second["step"], second["optimizer"]) == (4, True)
    assert (third["step"], third["optimizer"]) == (0, False)
    assert user.wait(second["run"]) == 0
    assert [line["step"] for line in user.steps(second["run"])] == [5, 6, 7, 8]
    assert final(user, second["run"])["weights_digest"] == final(user, first)["weights_digest"]
    assert user.wait(third["run"]) == 0
    assert [line["step"] for line in user.steps(third["run"])] == [1, 2]
    before, after = user.steps(first), user.steps(third["run"])
    assert after[0]["loss"] < before[0]["loss"] - 0.1, "it begins with what was learned"
