"""Pins of commands that read a checkpoint: each command removes its own only, and a killed one holds nothing."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing.retention.garbage import pin, pinned_names, read_pins
from checkpointing.storage.backends import LocalStorage
from orchestrator.cli.checkpoints.target import Target, kept_while_read
from orchestrator.registry.lease import Holder, host_name
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from trainer.protocol.node_identity import boot_time
from trainer.protocol.run_dir import RunDir

READ = """
import sys
from pathlib import Path
from checkpointing.storage.backends import LocalStorage
from orchestrator.run_dirs.reader_pins import pin_for_reading
pin_for_reading(LocalStorage(Path(sys.argv[1])), sys.argv[2])
print("reads", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def target(seeds: Seeds) -> Target:
    run = seeds.run()
    storage = LocalStorage(seeds.root / run / "checkpoints")
    storage.root.mkdir(parents=True)
    name = make(storage, 50, nonce="0123abcd", now=time.time())
    return Target(storage, name, f"{storage.root}/{name}", run=run, run_dir=RunDir(seeds.root / run))


@pytest.fixture
def reader(target: Target) -> Iterator[subprocess.Popen[str]]:
    assert isinstance(target.storage, LocalStorage)
    with subprocess.Popen(
        [sys.executable, "-c", READ, str(target.storage.root), target.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "reads\n"
        yield process
        process.kill()


def test_a_pin_that_a_person_sets_meanwhile_stays(orch: Type, target: Target) -> None:
    with kept_while_read(target):
        assert orch("ckpt", "pin", f"{target.run}@50", "--note", "for the paper").code == 0
    assert {name: held.note for name, held in read_pins(target.storage).items()} == {target.name: "for the paper"}


def test_removed_pin_is_not_rewritten(orch: Type, target: Target) -> None:
    assert orch("ckpt", "pin", f"{target.run}@50").code == 0
    with kept_while_read(target):
        assert orch("ckpt", "unpin", f"{target.run}@50").code == 0
    assert pinned_names(target.storage) == frozenset()


def test_each_of_several_readers_keeps_it(target: Target) -> None:
    with kept_while_read(target):
        with kept_while_read(target, target):
            pass
        assert pinned_names(target.storage) == {target.name}
    assert pinned_names(target.storage) == frozenset()


def test_a_reader_that_was_killed_pins_nothing(orch: Type, target: Target, reader: subprocess.Popen[str]) -> None:
    (living,) = orch("ckpt", "ls", target.run, "--json").data
    assert (living["pinned"], f"process {reader.pid} on {host_name()}" in living["pin"]) == (True, True)
    reader.kill()
    reader.wait()
    (killed,) = orch("ckpt", "ls", target.run, "--json").data
    assert (killed["pinned"], killed["pin"]) == (False, None)
    assert pinned_names(target.storage) == frozenset()


@pytest.mark.parametrize(
    ("reader_host", "before_boot", "stays"),
    [("elsewhere", True, True), (host_name(), False, True), (host_name(), True, False)],
)
def test_invisible_reader_counts_until_reboot(target: Target, reader_host: str, before_boot: bool, stays: bool) -> None:
    process = Holder(host=reader_host, pid=1, started="1", space="0badcafe")
    at = boot_time() - 60 if before_boot else time.time()
    pin(target.storage, target.name, "being read", at, holder="0badcafe", process=str(process))
    remove_dead_readers(target.storage)
    assert (target.name in pinned_names(target.storage)) is stays
