"""`orch doctor --nodes N`: a short job that measures the network and the storage of the cluster."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

from checkpointing.config import RUN
from checkpointing.storage.durable import dump_line
from orchestrator.cli.cluster.probe_needs import MeasuredNeed, compare_needs, find_needs
from orchestrator.cli.runs.events import wait_until_end
from orchestrator.cli.runs.submit import launch
from orchestrator.cli.terminal.render import Column, Screen, size
from orchestrator.config.compose import Composed, compose, recompose
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition, RunFailed
from orchestrator.home import registry_path
from orchestrator.registry.probe_results import StoredProbe, save_probe
from orchestrator.run_view import find_run
from orchestrator.submission.create_run import RunOrigin
from trainer.protocol.plain_data import build
from trainer.protocol.probe import RESULT, ProbeOrder, ProbePlace, ProbeResult

TAG = "probe"
_PROGRAM = "trainer.worker.probe.main"
_SIZES = tuple(1 << power for power in (10, 14, 18, 22, 26))
_GPU_SIZES = (*_SIZES, 1 << 30)
_TIME = "10"  # minutes


def probe_cluster(
    screen: Screen, source: str, nodes: int, *, step_seconds: float | None, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:  # fmt: skip
    """Run the probe with this configuration's cluster, store and print its result, and return it as JSON data.

    Raises RunFailed if the job fails, and the errors of `orch submit`.
    """
    config = compose(source, overrides, environ=os.environ).config
    folder = _make_folder(Path(config.cluster.root).expanduser().absolute())
    try:
        order = ProbeOrder(
            folder=str(folder), places=tuple(places(config)),
            message_bytes=_GPU_SIZES if config.cluster.gpus_per_node else _SIZES,
        )  # fmt: skip
        (folder / "order.json").write_text(dump_line(asdict(order)))
        composed = probe_config(source, overrides, nodes, folder)
        launched = launch(screen, composed, None, no_controller=False, origin=RunOrigin(tags=(TAG,)))
        screen.note(f"{launched['run']}: measures network and storage on {nodes} nodes, for about a minute")
        view = wait_until_end(screen, launched["run"])
        if view.end_error is not None:
            raise view.end_error
        result = _read(folder, launched["run"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stored = StoredProbe(
        scheduler=find_run(launched["run"]).scheduler, partition=config.cluster.partition, run=launched["run"],
        result=result,
    )  # fmt: skip
    path = save_probe(registry_path(), stored)
    compared = compare_needs(find_needs(config), result, step_seconds)
    if not screen.json:
        _show(screen, result, compared)
        screen.note(f"stored in {path}")
    rows = [{**asdict(one), "enough": one.enough} for one in compared]
    return {**asdict(result), "run": launched["run"], "needs": rows, "file": str(path)}


def _make_folder(root: Path) -> Path:
    """Create a private folder for the order and the result on the file system that all nodes share."""
    folder = root / f".orch-probe-{token_hex(6)}"
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        what = f"the folder for the probe cannot be created: {error.strerror}"
        raise Precondition(what, where=str(folder), hint="cluster.root=FOLDER names another") from error
    return folder


def places(config: RunConfig) -> list[ProbePlace]:
    """Return the folders to measure: training data, run root and checkpoint tiers. Object stores are left out."""
    root = str(Path(config.cluster.root).expanduser().absolute())
    found = [ProbePlace(name="run root", path=root)]
    for tier in config.checkpoint.tiers:
        if tier.path != RUN and "://" not in tier.path and tier.path.startswith(("/", "~")):
            found.append(ProbePlace(name=f"tier {tier.path}", path=str(Path(tier.path).expanduser())))
    data = [ProbePlace(name="data.path", path=config.data.path, read_only=True)] if config.data.path else []
    return [*data, *found]


def probe_config(source: str, overrides: tuple[str, ...], nodes: int, folder: Path) -> Composed:
    """Return the configuration of the probe's run: the user's cluster and environment, and the probe's program."""
    data = compose(source, overrides, environ=os.environ).data
    cluster = {**data["cluster"], "nodes": nodes, "spare_nodes": 0, "min_nodes": 0, "time": _TIME}
    if not cluster["gpus_per_node"]:
        cluster["ranks_per_node"] = max(2, cluster["ranks_per_node"])
        cluster["cpus_per_task"] = max(2, cluster["cpus_per_task"])
    kept = {name: data[name] for name in ("env", "env_from", "secrets_file")}
    run = {
        **kept, "name": TAG, "cluster": cluster, "command": ["python", "-m", _PROGRAM, str(folder / "order.json")],
        "recovery": {"max_failures": 1, "restarts_in_place": 0}, "restore_tests": {"every": "off"},
    }  # fmt: skip
    return recompose(run, ())


def _read(folder: Path, run: str) -> ProbeResult:
    try:
        return build(ProbeResult, json.loads((folder / RESULT).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        what = f"{run} ended without a result: {error}"
        raise RunFailed(what, where=str(folder), hint=f"orch logs {run}") from error


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{size(int(value))}/s"


COLLECTIVES = [
    Column("OPERATION", "operation"),
    Column("RANKS", "ranks", right=True),
    Column("WHERE", "scope"),
    Column("MESSAGE", "bytes", size, right=True),
    Column("LATENCY", "seconds", lambda seconds: f"{1e6 * seconds:,.0f} us", right=True),
    Column("BUS BANDWIDTH", "bus_bytes_per_s", _rate, right=True),
]
STORAGE = [
    Column("PLACE", "place"),
    Column("NODES", "nodes", right=True),
    Column("WRITE", "write_bytes_per_s", _rate, right=True),
    Column("READ", "read_bytes_per_s", _rate, right=True),
    Column("FILES/S", "metadata_per_s", lambda value: "-" if value is None else f"{value:,.0f}", right=True),
    Column("ERROR", "error"),
]


def _show(screen: Screen, result: ProbeResult, compared: list[MeasuredNeed]) -> None:
    screen.say(f"transport  {result.transport}; {result.ranks} ranks on {result.nodes} nodes", hang=11)
    screen.table(COLLECTIVES, [asdict(one) for one in result.collectives], aligned=True)
    screen.say("")
    screen.table(STORAGE, [asdict(one) for one in result.storage], aligned=True)
    screen.say("")
    for one in compared:
        room = "" if one.available is None else f" of {one.available:.3g} s available"
        mark = {True: "ok  ", False: "warn", None: "note"}[one.enough]
        screen.say(f"{mark}  {one.what}: {size(one.bytes)} take {one.seconds:.3g} s{room}", hang=6)
    if compared and all(one.available is None for one in compared):
        screen.note("--step-seconds S compares these times with a step of S seconds")
