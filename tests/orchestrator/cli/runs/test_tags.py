"""Tags: added, removed, looked for, shown, and kept when the registry is lost."""

import json
from pathlib import Path

import pytest

from orchestrator.registry.run_record import RunRecord
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Seeds, Type
from trainer.protocol.run_dir import RunDir


def test_signs_say_what_happens_to_a_tag(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    assert orch("tag", run).out == f"{run}: no tag\n"
    assert orch("tag", run, "+slow", "baseline", "lr=3e-4").out == f"{run}: baseline, lr=3e-4, slow\n"
    assert orch("tag", run, "-slow", "+team/ann", "--json").data == {
        "run": run, "tags": ["baseline", "lr=3e-4", "team/ann"],
    }  # fmt: skip
    assert orch("tag", run, "baseline", "absent", "--remove").out == f"{run}: lr=3e-4, team/ann\n"
    assert orch("--json", "tag", run).data["tags"] == ["lr=3e-4", "team/ann"]


@pytest.mark.parametrize("options", [("-q",), ("-v",), ("-qv",)])
def test_short_options_are_not_tags(orch: Type, seeds: Seeds, options: tuple[str, ...]) -> None:
    run = seeds.run()
    orch("tag", run, "qv", "q")
    left = orch("tag", run, *options, "--json").data["tags"]
    assert left == (["q"] if options == ("-qv",) else ["q", "qv"])


@pytest.mark.parametrize("word", ["+", "a b", "a,b", "_a", "x" * 64, "ä"])
def test_what_cannot_be_a_tag_is_refused(orch: Type, seeds: Seeds, word: str) -> None:
    run = seeds.run()
    for words in (("tag", run, word), ("status", "-t", word), ("submit", "tiny-gpt", "-t", word)):
        refused = orch(*words)
        assert (refused.code, "cannot be a tag" in refused.err) == (2, True), words
    assert orch("tag", run, "+a", "-a").code == 2
    assert orch("tag", run, "--json").data["tags"] == []


def test_runs_are_found_by_all_tags_that_are_asked_for(orch: Type, seeds: Seeds) -> None:
    first, second, third = seeds.run(), seeds.run(state=RunState.HELD), seeds.run()
    orch("tag", first, "sweep", "a")
    orch("tag", second, "sweep")

    def found(*words: str) -> list[str]:
        return [row["run"] for row in orch("status", *words, "--json").data]

    assert found("-t", "sweep") == [second, first]
    assert found("-t", "sweep", "--tag", "a") == [first]
    assert found("-t", "sweep", "--state", "HELD") == [second]
    assert found("-t", "sweep", first, third) == [first]
    assert found("-t", "swee") == []


def test_tags_are_shown(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    orch("tag", run, "b", "a")
    title, row = orch("status").out.splitlines()
    assert dict(zip(title.split("\t"), row.split("\t"), strict=True))["TAGS"] == "a,b"
    assert orch("show", run, "--json").data["tags"] == ["a", "b"]
    assert "tags     a, b\n" in orch("show", run).out


def test_a_tag_is_in_the_record_at_once(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = seeds.root / run
    (folder / "run.json").write_text(json.dumps({}))
    orch("tag", run, "kept")
    assert RunRecord.read(Path(folder / "record.json")).run.tags == ("kept",)


def test_unwritable_record_is_warned_of(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    place = RunDir(Path(seeds.store.run(run).run_dir))
    place.run.touch()
    place.record.unlink(missing_ok=True)
    (place.record / "in the way").mkdir(parents=True)
    said = orch("tag", run, "+a")
    assert (said.code, said.out) == (0, f"{run}: a\n")
    words = (
        f"warning: the change to {run} is in the registry, but not in the record in the run's folder: Is a directory"
    )
    assert " ".join(said.err.split()).startswith(words)
    assert "Errno" not in said.err
