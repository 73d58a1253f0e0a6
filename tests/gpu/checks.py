"""The checks of `make test-gpu`: each returns its figure, or raises."""

import json
import statistics
import subprocess
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from tests.end_to_end.user import User, assert_exact
from trainer.protocol.events import Event, EventKind, read_events

STEPS, EVERY, AT = 120, 20, 50
"""Steps of a run, steps between two saves, and the step at which something happens."""
_WAIT = 240.0
LARGE = [
    "model.dim=1024", "model.layers=24", "model.heads=16", "model.kv_heads=8", "model.ffn_dim=4096",
    "train.seq_len=2048", "train.steps=60", "train.dtype=bfloat16", "optimizer.lr=3e-4",
]  # fmt: skip
"""A decoder of 0.4 billion parameters: large enough for rates and for the time that a save takes of training."""


class Failed(Exception):  # noqa: N818  # the outcome of a check
    """What was seen is not what has to be."""


class Impossible(Exception):  # noqa: N818  # no error either
    """This machine lacks what the check needs; the text says what."""


class Bench:
    """The runs of one machine; `gpus` is 0 on the CPU."""

    def __init__(self, user: User, gpus: int, ranks: int) -> None:
        self.user, self.gpus, self.ranks = user, gpus, ranks

    def submit(self, *more: str) -> str:
        """A run of a small model with a rank on each GPU; sharded, or sharded and tensor parallel where four can be."""
        tp = 2 if self.ranks % 4 == 0 else 1
        settings = [
            "cluster.nodes=1", f"cluster.ranks_per_node={self.ranks}", f"cluster.gpus_per_node={self.gpus}",
            f"parallel.tp={tp}", "parallel.dp_shard=0", f"train.steps={STEPS}", f"checkpoint.every={EVERY}",
            "recovery.backoff=0.5", "detection.hang.least=4", "detection.hang.stopped=2",
        ]  # fmt: skip
        run: str = self.user.submit("tiny-gpt", *settings, *more)["run"]
        return run

    def train(self, *more: str) -> str:
        """The same, to its end."""
        run = self.submit(*more)
        if (code := self.user.wait(run, _WAIT)) != 0:
            raise Failed(f"{run} ended with {code}: {self.user.status(run)['reason']}")
        return run

    @cached_property
    def calm(self) -> str:
        """An undisturbed run, which others have to equal bit for bit."""
        return self.train()

    def events(self, run: str, kind: EventKind) -> list[Event]:
        """What the run's job has told of that kind."""
        files = [file for each in self.user.run_dir(run).all_attempts() for file in sorted(each.events.iterdir())]
        return [event for file in files for event in read_events(file)[0] if event.kind == kind]

    def evidence(self, run: str) -> Path:
        """The bundle of the run's first incident."""
        (first, *_) = self.events(run, EventKind.INCIDENT)
        return self.user.run_dir(run).path / str(first.data["evidence"])


def drill(kind: str, rank: int, step: int = AT) -> str:
    return f"drill.events=[{{kind: {kind}, rank: {rank}, step: {step}}}]"


def calm(bench: Bench) -> str:
    rates = [line["tokens_per_s"] for line in bench.user.steps(bench.calm)[STEPS // 2 :]]
    return f"{statistics.median(rates):.0f} tokens/s"


def kill(bench: Bench) -> str:
    run = bench.train(drill("kill-rank", bench.ranks - 1))
    assert_exact(bench.user, run, bench.calm)
    ended, trained = bench.events(run, EventKind.RANK_EXITED)[0], bench.events(run, EventKind.GENERATION_FIRST_STEP)[-1]
    return f"bit-equal; a step {trained.time - ended.time:.1f} s after the kill"


def hang(bench: Bench) -> str:
    """A rank that computes for ever while its peers wait in a collective."""
    _require(bench, 2)
    return _named(bench, "hang-in-forward")


def stopped(bench: Bench) -> str:
    return _named(bench, "stop-rank")


def desync(bench: Bench) -> str:
    """A bug of the program: the run is held, and the rank that left the others' order is named."""
    _require(bench, 2)
    run = bench.submit(drill("desync-shape", bench.ranks - 1))
    bench.user.wait(run, _WAIT)
    status = bench.user.status(run)
    if status["state"] != "HELD" or "different collectives" not in status["reason"]:
        raise Failed(f"{run} is {status['state']}: {status['reason']}")
    if f"rank {bench.ranks - 1}" not in status["reason"]:
        raise Failed(f"rank {bench.ranks - 1} is not named: {status['reason']}")
    return f"HELD; rank {bench.ranks - 1} named"


def _named(bench: Bench, kind: str) -> str:
    culprit = bench.ranks - 1
    run = bench.train(drill(kind, culprit))
    (incident, *_) = bench.events(run, EventKind.INCIDENT)
    if incident.data["rank"] != culprit:
        raise Failed(f"rank {incident.data['rank']} was named, not {culprit}: {incident.data['reason']}")
    assert_exact(bench.user, run, bench.calm)
    return f"rank {culprit} named: {incident.data['kind']}; bit-equal after the restart"


def records(bench: Bench) -> str:
    """What the backend's flight recorder holds of ranks that wait in a collective."""
    _require(bench, 2)
    run = bench.train(drill("hang-in-collective", bench.ranks - 1))
    found = [json.loads(file.read_text()) for file in sorted((bench.evidence(run) / "flight").glob("rank-*.json"))]
    entries = [entry for dump in found for entry in dump["entries"]]
    if not entries:
        raise Failed(f"the flight records of {len(found)} ranks have no entry")
    library = sorted({str(entry["profiling_name"]).partition(":")[0] for entry in entries})
    (incident, *_) = bench.events(run, EventKind.INCIDENT)
    whose = f"{len(entries)} entries of {len(found)} ranks ({', '.join(library)})"
    return f"{whose}; {incident.data['kind']} of rank {incident.data['rank']}"


def resume(bench: Bench) -> str:
    """A new job goes on from a checkpoint on disk."""
    run = bench.submit("drill.events=[{kind: slow-rank, rank: 0, step: 30, attempt: 1, generation: 0, value: 0.2}]")
    bench.user.until(lambda: bench.user.step(run) >= AT, _WAIT, f"{run} is at step {AT}")
    bench.user.ask("cancel", run)
    bench.user.until(lambda: bench.user.status(run)["state"] == "CANCELLED", _WAIT, f"{run} is CANCELLED")
    done = bench.user.run("resume", run, "--accept", "drill.events")
    if done.returncode != 0 or (code := bench.user.wait(run, _WAIT)) != 0:
        raise Failed(done.stderr or f"{run} ended with {code}")
    assert_exact(bench.user, run, bench.calm)
    layout = "FSDP2 x TP" if bench.ranks % 4 == 0 else "FSDP2" if bench.ranks > 1 else "one rank"
    return f"{layout}; bit-equal"


def staging(bench: Bench) -> str:
    """Copies that are made during the next step, and a rank that is killed beside them."""
    run = bench.train("checkpoint.staging.mode=lazy", drill("kill-rank", 0, AT + 1))
    assert_exact(bench.user, run, bench.calm)
    waits = {name: _waited(bench, name) for name in (run, bench.calm)}
    return f"bit-equal; training waited {waits[run]:.1f} ms for a lazy copy, {waits[bench.calm]:.1f} ms for another"


def _waited(bench: Bench, run: str) -> float:
    """Milliseconds, the median over the run's saves."""
    return 1e3 * statistics.median(event.data["stall"] for event in bench.events(run, EventKind.CHECKPOINT_COMMITTED))


def large(bench: Bench) -> str:
    """Rates of a model that fills a GPU, what its saves take of training, and its bits after a kill."""
    if not bench.gpus:
        raise Impossible("needs a GPU")
    settings = [*LARGE, f"train.batch_size={8 * bench.ranks}", "parallel.tp=1"]
    calm, run = bench.train(*settings), bench.train(*settings, drill("kill-rank", bench.ranks - 1))
    assert_exact(bench.user, run, calm)
    lines = bench.user.steps(calm)[20:]
    rate, share = (statistics.median(line.get(key, 0.0) for line in lines) for key in ("tokens_per_s", "mfu"))
    most = max(line["memory"]["allocated"] for line in lines) / 2**30
    ended, trained = bench.events(run, EventKind.RANK_EXITED)[0], bench.events(run, EventKind.GENERATION_FIRST_STEP)[-1]
    saves = f"training waited {_waited(bench, calm):.0f} ms for a save"
    after = f"a step {trained.time - ended.time:.1f} s after the kill"
    return f"{rate:.0f} tokens/s, {share:.0%} of the peak, {most:.1f} GiB at most; {saves}; bit-equal, {after}"


def contexts(bench: Bench) -> str:
    """Every rank has a context on its own GPU and on no other: one more costs half a GiB of each rank on GPU 0."""
    if not bench.gpus:
        raise Impossible("needs a GPU")
    run = bench.submit(
        "checkpoint.staging.mode=lazy", "drill.events=[{kind: slow-rank, rank: 0, step: 30, value: 0.2}]"
    )
    bench.user.until(lambda: bench.user.step(run) >= AT, _WAIT, f"{run} is at step {AT}")
    asked = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    ranks = {process.pid for process in bench.user.processes("orch-rank")}
    mine = [line.split(", ") for line in lines if int(line.split(", ")[0]) in ranks]
    bench.user.wait(run, _WAIT)
    if not mine:
        raise Impossible("nvidia-smi shows no process of this user (a container hides them)")
    if len(mine) != bench.ranks or len({gpu for _, gpu, _ in mine}) != bench.ranks:
        raise Failed(f"{len(mine)} contexts of {bench.ranks} ranks: {json.dumps(mine)}")
    return f"{len(mine)} contexts of {bench.ranks} ranks; {max(int(used) for *_, used in mine)} MiB at most"


def _require(bench: Bench, ranks: int) -> None:
    if bench.ranks < ranks:
        raise Impossible(f"needs {ranks} GPUs")


CHECKS: dict[str, Callable[[Bench], str]] = {
    "calm": calm,
    "kill": kill,
    "hang": hang,
    "stopped": stopped,
    "desync": desync,
    "records": records,
    "resume": resume,
    "staging": staging,
    "contexts": contexts,
    "large": large,
}
