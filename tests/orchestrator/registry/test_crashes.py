"""Writers that are killed, and writers that write at once: what was acknowledged is there."""

import multiprocessing
import multiprocessing.connection
import sqlite3
from pathlib import Path
from typing import Any

from orchestrator.registry.store import Store

Desk = Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["orchestrator.registry.store"])
Pipe = multiprocessing.connection.Connection


def write(path: Path, run: str, epoch: int, tag: str, count: int, told: Pipe) -> None:
    """Advance the run's step by one `count` times, telling each number once it is acknowledged."""
    with Store.open(path) as store:
        for number in range(count):

            def step(number: int = number) -> None:
                # A write that reads first: what deferred transactions lose when two writers meet.
                seen = store.run(run).step
                store.note_run(run, epoch=epoch, now=1.0, step=seen + 1)
                store.set_cursor(run, f"{tag}-{number}", number + 1, epoch=epoch)

            store.together(step)
            told.send(number)


def writer(desk: Desk, run: str, tag: str, count: int) -> tuple[Any, Pipe]:
    ours, theirs = SERVER.Pipe(duplex=False)
    arguments = (desk.path, run, desk.lease.epoch, tag, count, theirs)
    child = SERVER.Process(target=write, args=arguments, daemon=True)
    child.start()
    theirs.close()
    return child, ours


def received(told: Pipe, count: int) -> list[int]:
    """Up to `count` acknowledgements, fewer when the writer is gone."""
    found: list[int] = []
    while len(found) < count and told.poll(30):
        try:
            found.append(told.recv())
        except EOFError:
            break
    return found


def test_what_a_killed_writer_acknowledged_is_there(desk: Desk) -> None:
    run, _ = desk.run()
    acknowledged = 0
    for round_ in range(4):
        child, told = writer(desk, run.name, f"r{round_}", 10_000)
        # Killed after a different number of acknowledgements each time, in whatever it is doing then.
        numbers = received(told, 1 + round_)
        assert len(numbers) == 1 + round_
        child.kill()
        child.join(30)
        numbers += received(told, 10_000)
        told.close()
        kept = {name for name in desk.store.cursors(run.name) if name.startswith(f"r{round_}-")}
        assert {f"r{round_}-{number}" for number in numbers} <= kept
        # At most the one that was committed and not told yet.
        assert len(kept) <= len(numbers) + 1
        acknowledged += len(kept)
    assert desk.store.run(run.name).step == acknowledged
    raw = sqlite3.connect(desk.path)
    assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert raw.execute("PRAGMA foreign_key_check").fetchall() == []
    raw.close()


def test_two_processes_writing_at_once_lose_nothing(desk: Desk) -> None:
    run, _ = desk.run()
    writers = [writer(desk, run.name, tag, 100) for tag in ("x", "y")]
    for child, told in writers:
        assert received(told, 100) == list(range(100))
        child.join(30)
        assert child.exitcode == 0
        told.close()
    assert desk.store.run(run.name).step == 200
    assert len(desk.store.cursors(run.name)) == 200


def put_config(path: Path, number: int) -> None:
    with Store.open(path) as store:
        store.put_config({"n": number})


def test_two_processes_may_make_the_registry_at_once(tmp_path: Path) -> None:
    children = [SERVER.Process(target=put_config, args=(tmp_path / "new.db", number)) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 2
    raw = sqlite3.connect(tmp_path / "new.db")
    assert raw.execute("SELECT count(*) FROM configs").fetchone() == (2,)
    raw.close()
