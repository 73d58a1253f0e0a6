"""Registry queries that use only the standard library, so that `orch status` takes only a few milliseconds."""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number
from orchestrator.registry import sqlite_errors, versions
from orchestrator.registry.records import Lease
from orchestrator.states import Trust
from trainer.protocol.config_sections.scheduler_kinds import traits

_UNUSABLE = (Trust.WRITING, Trust.CORRUPT, Trust.DELETED)
"""Trust levels of checkpoints from which a run would not resume."""

_BAD, _FINISHED = "('SUSPECT', 'CORRUPT')", "('RESTORED', 'SUSPECT', 'CORRUPT')"
"""Values of trainer.protocol.restore_test.Outcome, whose import takes 10 ms. Its two other values are not verdicts."""

_SAVED_AT = "SELECT coalesce(max(committed_at), 0) FROM checkpoints WHERE run = {0}.run AND name = {0}.checkpoint"
_TESTED_AT = f"({_SAVED_AT}), {{0}}.step, {{0}}.ended_at"
"""Sort key of a run's tests: newest checkpoint first, then newest test."""

_NEWEST = f"""
SELECT run.name AS run, run.state, run.reason, run.cluster, run.run_dir, run.config_digest, run.step,
    run.total_steps, run.loss, run.created_at, run.updated_at, run.not_before, run.scheduler,
    run.tags, run.notified, run.removal, run.predecessor AS after, run.sweep,
    NOT EXISTS (SELECT 1 FROM runs AS before WHERE before.name = run.predecessor
        AND run.predecessor_created_at IN (0, before.created_at)) AS after_removed,
    (SELECT count(*) FROM attempts WHERE attempts.run = run.name) AS attempts,
    (SELECT count(*) FROM generations WHERE generations.run = run.name) AS generations,
    attempt.number AS attempt, attempt.job_id, attempt.job_state, attempt.nodes, attempt.failure,
    attempt.expected_start AS start_at, attempt.expected_at AS start_noted_at,
    saved.step AS saved_step, saved.trust AS saved_trust, saved.committed_at AS saved_at,
    saved.path AS saved_path,
    tested.step AS tested_step, tested.layout AS tested_layout, tested.verdict AS tested_verdict,
    tested.ended_at AS tested_ended_at,
    bad.step AS bad_step, bad.layout AS bad_layout, bad.verdict AS bad_verdict, bad.ended_at AS bad_ended_at,
    bad.reason AS bad_reason, own.run AS own_run, own.step AS own_step, own.layout AS own_layout,
    coalesce(first.step, generation.resumed_from, 0) AS since_step,
    coalesce(first.committed_at, generation.started_at) AS since_at, first.step IS NOT NULL AS since_saved
FROM (SELECT * FROM runs {{where}} ORDER BY id DESC LIMIT ?) AS run
LEFT JOIN attempts AS attempt ON attempt.run = run.name
    AND attempt.number = (SELECT max(number) FROM attempts WHERE attempts.run = run.name)
LEFT JOIN checkpoints AS saved ON saved.rowid = (
    SELECT rowid FROM checkpoints WHERE run = run.name AND trust NOT IN (?, ?, ?)
    ORDER BY step DESC, committed_at DESC, name DESC LIMIT 1)
LEFT JOIN restore_tests AS own ON own.test = run.name
LEFT JOIN generations AS generation ON generation.run = run.name AND generation.attempt = attempt.number
    AND generation.number = (SELECT max(number) FROM generations WHERE run = run.name AND attempt = attempt.number)
LEFT JOIN checkpoints AS first ON first.rowid = (
    SELECT rowid FROM checkpoints WHERE run = run.name AND attempt = attempt.number AND step < run.step
    AND committed_at >= generation.started_at ORDER BY step LIMIT 1)
LEFT JOIN restore_tests AS tested ON tested.rowid = (
    SELECT rowid FROM restore_tests WHERE run = run.name AND verdict IN {_FINISHED}
    ORDER BY ended_at DESC, test DESC LIMIT 1)
LEFT JOIN restore_tests AS bad ON bad.rowid = (
    SELECT one.rowid FROM restore_tests AS one WHERE one.run = run.name AND one.verdict IN {_BAD}
    ORDER BY ({_SAVED_AT.format("one")}) DESC, one.step DESC, one.ended_at DESC LIMIT 1)
    AND NOT EXISTS (SELECT 1 FROM restore_tests AS good
        WHERE good.run = run.name AND good.verdict = 'RESTORED'
        AND ({_TESTED_AT.format("good")}) > ({_TESTED_AT.format("bad")}))
ORDER BY run.id DESC
"""
_TAGGED = "EXISTS (SELECT 1 FROM json_each(runs.tags) WHERE value = ?)"
_IN_SWEEP = "json_extract(runs.sweep, '$.name') = ?"
_NO_TEST = "NOT EXISTS (SELECT 1 FROM restore_tests WHERE restore_tests.test = runs.name)"


def newest(
    path: Path,
    limit: int | None = 50,
    states: Iterable[str] | None = None,
    *,
    tests: bool = False,
    tags: Iterable[str] = (),
    sweep: str = "",
) -> list[dict[str, Any]]:
    """Return the fields of `orchestrator.run_view.RunView` for the newest runs.

    `tests`: include restore tests. `tags`: only runs with all of these tags. `sweep`: only runs of this sweep.
    """
    where, wanted = _among("state", states)
    tagged, named = list(tags), [sweep] if sweep else []
    conditions = [*([] if tests else [_NO_TEST]), *[_TAGGED] * len(tagged), *[_IN_SWEEP] * len(named)]
    return _newest(path, limit, [*where, *conditions], [*wanted, *tagged, *named])


def runs_by_name(path: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the fields of `newest` for the runs with exactly these names; unknown names are omitted."""
    return _newest(path, None, *_among("name", names))


def found_bad(path: Path, since: float) -> list[str]:
    """Return the runs with a checkpoint that a restore test has found bad since `since`."""
    query = f"SELECT DISTINCT run FROM restore_tests WHERE ended_at >= ? AND verdict IN {_BAD} ORDER BY run"
    return [row["run"] for row in select_rows(path, query, (since,))]


def run_names(path: Path, limit: int = 1000) -> list[tuple[str, str]]:
    """Return the names and states of the newest runs."""
    query = "SELECT name, state FROM runs ORDER BY id DESC LIMIT ?"
    return [(row["name"], row["state"]) for row in select_rows(path, query, (limit,))]


def saved_steps(path: Path, run: str) -> list[tuple[int, str]]:
    """Return the step and the trust of a run's existing checkpoints, newest first."""
    query = "SELECT step, trust FROM checkpoints WHERE run = ? AND trust <> 'DELETED' ORDER BY step DESC"
    return [(row["step"], row["trust"]) for row in select_rows(path, query, (run,))]


def has_best(path: Path, run: str) -> bool:
    """Return whether a run's configuration defines which checkpoint is best."""
    query = (
        "SELECT json_extract(configs.data, '$.checkpoint.best.metric') AS metric "
        "FROM runs JOIN configs ON configs.digest = runs.config_digest WHERE runs.name = ?"
    )
    return any(row["metric"] for row in select_rows(path, query, (run,)))


def tag_names(path: Path) -> list[str]:
    """Return every tag in use."""
    query = "SELECT DISTINCT value FROM runs, json_each(runs.tags) ORDER BY value"
    return [row["value"] for row in select_rows(path, query, ())]


def sweep_names(path: Path) -> list[str]:
    """Return the name of every sweep, newest first."""
    names = "SELECT json_extract(sweep, '$.name') AS sweep_name FROM runs WHERE sweep <> '{}'"  # `name` is the run's
    rows = select_rows(path, f"{names} GROUP BY sweep_name ORDER BY max(id) DESC", ())
    return [row["sweep_name"] for row in rows]


def node_names(path: Path) -> list[str]:
    """Return every node on which an attempt has run."""
    query = "SELECT DISTINCT name FROM nodes ORDER BY name"
    return [row["name"] for row in select_rows(path, query, ())]


def leases(path: Path, *, any_version: bool = False) -> list[Lease]:
    """Return each scheduler instance's lease, newest first, including expired and dropped (no holder) ones.

    `any_version` also reads registries of other versions, because one with a live controller must not be replaced.
    """
    columns = ", ".join(item.name for item in fields(Lease))
    query = f"SELECT {columns} FROM lease ORDER BY holder = '', renewed_at DESC, epoch DESC"
    return [Lease(**dict(row)) for row in select_rows(path, query, (), any_version=any_version)]


def lease(path: Path, scheduler: str | None = None) -> Lease | None:
    """Return the lease covering an instance's runs (default: the most recently held lease); None if none does."""
    found = leases(path)
    return next(iter(found), None) if scheduler is None else covering_lease(found, scheduler)


def covering_lease(found: Iterable[Lease], scheduler: str) -> Lease | None:
    """Return the lease that covers an instance's runs: the lease for all runs if it is held, else the instance's."""
    of = {item.scheduler: item for item in found}
    whole = of.get("")
    return whole if whole is not None and whole.holder else of.get(scheduler)


def _among(column: str, values: Iterable[str] | None) -> tuple[list[str], list[str]]:
    """Return a condition for rows with one of the values, and its bound parameters."""
    if values is None:
        return [], []
    wanted = [str(value) for value in values]
    return [f"{column} IN ({', '.join('?' * len(wanted))})"], wanted


def _newest(path: Path, limit: int | None, conditions: list[str], values: list[str]) -> list[dict[str, Any]]:
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    bound = (*values, -1 if limit is None else limit, *_UNUSABLE)
    return [_answer(row) for row in select_rows(path, _NEWEST.format(where=where), bound)]


def _answer(row: sqlite3.Row) -> dict[str, Any]:
    answer = dict(row)
    step, trust, at = answer.pop("saved_step"), answer.pop("saved_trust"), answer.pop("saved_at")
    answer["checkpoint"] = None if step is None else {"step": step, "trust": trust, "committed_at": at}
    answer["restore_test"] = _pop_columns(answer, "tested", ("step", "layout", "verdict", "ended_at"))
    answer["bad_test"] = _pop_columns(answer, "bad", ("step", "layout", "verdict", "ended_at", "reason"))
    answer["test_of"] = _pop_columns(answer, "own", ("run", "step", "layout"))
    step, at = answer.pop("since_step"), answer.pop("since_at")
    saved = bool(answer.pop("since_saved"))
    answer["speed_since"] = None if at is None else {"step": step, "at": at, "saved": saved}
    answer["failure"] = json.loads(answer["failure"]) if answer["failure"] else None
    answer["slurm_cluster"] = None if traits(answer["cluster"]).simulated_nodes else answer["scheduler"] or None
    answer["nodes"] = json.loads(answer["nodes"] or "[]")
    answer["tags"], answer["notified"] = json.loads(answer["tags"]), json.loads(answer["notified"])
    answer["after_removed"] = bool(answer["after"] and answer["after_removed"])
    answer["sweep"] = json.loads(answer["sweep"])
    answer["loss"] = None if answer["loss"] is None else number(answer["loss"])
    return answer


def _pop_columns(answer: dict[str, Any], prefix: str, keys: Iterable[str]) -> dict[str, Any] | None:
    """Remove the columns of a joined table from the answer and return them; None if no row was joined."""
    found = {key: answer.pop(f"{prefix}_{key}") for key in keys}
    return None if found["step"] is None else found


def config(path: Path, digest: str) -> dict[str, Any] | None:
    """Return the resolved configuration with this digest, or None."""
    found = select_rows(path, "SELECT data FROM configs WHERE digest = ?", (digest,), any_version=True)
    return dict(json.loads(found[0]["data"])) if found else None


def run_folders(path: Path) -> dict[str, str]:
    """Return the folder of every run in this registry; empty if there is no registry."""
    return {
        row["name"]: row["run_dir"] for row in select_rows(path, "SELECT name, run_dir FROM runs", (), any_version=True)
    }


def select_rows(path: Path, query: str, values: tuple[Any, ...], *, any_version: bool = False) -> list[sqlite3.Row]:
    """Return the rows of a query; no rows if there is no registry. Raises RegistryError.

    An older registry is upgraded first, unless the query can read `any_version`.
    """
    if not path.exists():
        return []
    try:
        with closing(versions.connect_readonly(path)) as connection:
            found = versions.find_version(connection, path)
            if found is None:
                return []
            if any_version or found == versions.HEAD:
                return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise sqlite_errors.explain(error, path) from error
    versions.require_known(found, path)
    from orchestrator.registry import migrate  # sqlalchemy: only for an older registry

    migrate.upgrade_to_read(path, found)
    return select_rows(path, query, values, any_version=True)
