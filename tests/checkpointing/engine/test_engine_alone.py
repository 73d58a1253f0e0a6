"""The checkpoint engine in a program without orch's trainer and orchestrator."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, warnings
sys.modules.update(dict.fromkeys(("trainer", "orchestrator", "orch")))  # an import of one of them is an error
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers

def checkpointer(attempt, inherit=()):
    owner = Owner(attempt, "ab12cd34", inherit, lambda: True)
    return Checkpointer(owner, World(), RunTiers.single(sys.argv[1]), lambda kind, data: names.append(data["name"]))

names, model = [], torch.nn.Linear(30, 40)
first = checkpointer(1)
assert first.save(5, model.state_dict(), {"position": 40})
first.close()
target = torch.nn.Linear(30, 40)
second = checkpointer(2, tuple(names[:1]))
restored = second.restore(target.state_dict())
second.close()
assert restored.step == 5 and restored.extra == {"position": 40}
assert torch.equal(target.weight, model.weight)
"""


def test_the_engine_needs_neither_trainer_nor_orchestrator(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoints")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
