"""docs/writing-a-workload.md: the page's example is bit-identical after the kill of a rank."""

import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.user import User, assert_exact, final

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-workload.md"
FILES = re.compile(r"^```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)^```", re.MULTILINE | re.DOTALL)
KILL = "drill.events=[{kind: kill-rank, rank: 1, step: %d}]"
EXAMPLES = PAGE.parents[1] / "examples"


def typed_in(folder: Path) -> dict[str, str]:
    """Write the files of the page into one folder, and return them."""
    found = dict(FILES.findall(PAGE.read_text()))
    for name, text in found.items():
        (folder / name).write_text(text)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_page_shows_the_files_of_the_examples(tmp_path: Path) -> None:
    files = typed_in(tmp_path)
    assert set(files) == {"my_cnn.py", "cnn.yaml"}
    assert files == {name: (EXAMPLES / name).read_text() for name in files}


def shortened(program: Path) -> list[str]:
    """Reduce the page's program to a third of its steps: rates change at steps 10 and 15, an epoch has 5."""
    text = program.read_text()
    assert (text.count("[30, 45]"), text.count("1024")) == (1, 4)
    program.write_text(text.replace("[30, 45]", "[10, 15]").replace("1024", "320"))
    return ["train.steps=16", "validation.every=5", "checkpoint.every=3"]  # a step at each rate


def test_the_example_ends_with_the_same_bits_after_a_kill(user: User) -> None:
    typed_in(user.folder)
    size = ["cluster.nodes=1", "recovery.backoff=0.2", *shortened(user.folder / "my_cnn.py")]
    calm = user.submit("./cnn.yaml", *size)["run"]
    killed = user.submit("./cnn.yaml", *size, KILL % 11)["run"]
    assert user.wait(calm) == 0
    assert user.wait(killed) == 0
    (attempt,) = user.show(killed)["attempts"]
    assert attempt["generations"] == 2
    began = attempt["generation_list"][1]["resumed_from"]
    assert began in (6, 9, 10)

    assert_exact(user, killed, calm)
    there = {run: user.run_dir(run).attempt(1) for run in (calm, killed)}
    rates = {line["step"]: (line["lr"], line["metrics"]) for line in lines(there[calm].metrics)}
    for line in lines(there[killed].metrics):
        assert (line["lr"], line["metrics"]) == rates[line["step"]]
    assert sorted({lr for lr, _ in rates.values()}) == pytest.approx([0.0045, 0.015, 0.05])
    found = {run: {line["step"]: line["metrics"] for line in lines(place.validation)} for run, place in there.items()}
    assert found[calm] == found[killed]
    assert sorted(found[calm]) == [5, 10, 15, 16]
    assert final(user, killed)["loss"] == final(user, calm)["loss"]

    log = user.run("logs", killed, "--rank", "0").stdout
    assert "validation after step 15:  val_loss " in log
    assert f"resumed from step {began}: later steps logged above are trained again" in log
    assert "view tensor" not in log
    best = min(found[calm], key=lambda step: found[calm][step]["val_loss"])
    exported = user.ask("ckpt", "export", f"{calm}@best", str(user.folder / "exported"))
    assert exported["step"] == best


def overrides() -> str:
    """Return the page's methods that follow a changed configuration."""
    (block,) = re.findall(r"^```python\n(def build_optimizer\(.*?)^```", PAGE.read_text(), re.M | re.S)
    return textwrap.indent(block, "    ")


@pytest.mark.proof
def test_the_page_s_overrides_end_with_the_same_bits_and_follow_another_rate(user: User) -> None:
    typed_in(user.folder)
    program = user.folder / "my_cnn.py"
    own = re.sub(r"    def build_(?:optimizer|scheduler)\(.*?\n\n", "", program.read_text(), flags=re.DOTALL)
    program.write_text(f"import math\n{own}\n{overrides()}")
    # As the page says of small models.
    settings = ("recovery.backoff=0.2", "parallel.strategy=ddp")
    calm = user.submit("./cnn.yaml", *settings)["run"]
    killed = user.submit("./cnn.yaml", *settings, KILL % 33)["run"]
    assert (user.wait(calm), user.wait(killed)) == (0, 0)
    assert user.show(killed)["attempts"][0]["generations"] == 2
    assert user.ask("compare", killed, calm)["equality"] == {
        "equal": True, "steps": 60, "validations": 4, "first_difference": None,
    }  # fmt: skip
    # The folder of the program has the runs in it, too.
    user.ask("resume", calm, "train.steps=80", "workload.args.lr=0.01", "--accept", "code.user")
    assert user.wait(calm) == 0
    rates = {line["step"]: line["lr"] for line in user.steps(calm)}
    for step in range(62, 81):
        assert rates[step] == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 80)))
