"""Relative folders: in a file relative to the file's folder, on the command line to the current folder."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.compose import compose, recompose

FILE = """
workload: {target: "m:W", path: [., lib]}
data: {text: [notes.txt, python-stdlib]}
secrets_file: secrets
cluster: {root: runs, templates: [default, ./node.sh]}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "place"
    for folder in (place / "lib", tmp_path / "typed" / "here"):
        folder.mkdir(parents=True)
    (place / "notes.txt").write_text("to be")
    (place / "mine.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path / "typed")
    return place


def made(source: Path, *overrides: str) -> Any:
    return compose(str(source), overrides, environ={"HOME": "/nowhere", "ORCH_SITE_CONFIG": ""}).config


def test_paths_in_a_file_are_relative_to_it(place: Path) -> None:
    config = made(place / "mine.yaml")
    assert config.workload.path == (str(place), str(place / "lib"))
    assert config.data.text == (str(place / "notes.txt"), "python-stdlib")
    assert config.secrets_file == str(place / "secrets")
    assert (config.cluster.root, config.cluster.templates) == (str(place / "runs"), ("default", str(place / "node.sh")))


def test_paths_in_an_included_file_are_relative_to_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "typed" / "top.yaml").write_text("includes: [../place/mine.yaml]\nsecrets_file: own\n")
    config = made(tmp_path / "typed" / "top.yaml")
    assert config.workload.path == (str(place), str(place / "lib"))
    assert config.secrets_file == str(tmp_path / "typed" / "own")


def test_typed_paths_are_relative_to_the_current_folder(place: Path, tmp_path: Path) -> None:
    config = made(place / "mine.yaml", "workload.path=[here]", "cluster.root=runs")
    assert config.workload.path == (str(tmp_path / "typed" / "here"),)
    assert config.cluster.root == str(tmp_path / "typed" / "runs")


def test_references_to_a_folder_use_its_resolved_path(place: Path, tmp_path: Path) -> None:
    (tmp_path / "typed" / "top.yaml").write_text(
        "includes: [../place/mine.yaml]\ndata: {path: '${cluster.root}/tokens'}\n"
        "checkpoint: {tiers: [{path: '${cluster.root}/t'}, {path: run}]}\n"
    )
    config = made(tmp_path / "typed" / "top.yaml", "~data.text")
    assert (config.cluster.root, config.data.path) == (str(place / "runs"), str(place / "runs" / "tokens"))
    assert config.checkpoint.tiers[0].path == str(place / "runs" / "t")
    config = made(tmp_path / "typed" / "top.yaml", "~data.text", "cluster.root=mine")
    assert config.data.path == str(tmp_path / "typed" / "mine" / "tokens")


@pytest.mark.parametrize("name", ["a$b", "$HOME", "x${HOME}y", "${cluster.root}", "a$", "$$1", "back\\${slash}"])
def test_a_dollar_in_the_name_of_a_folder_is_no_variable(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    odd = place.rename(tmp_path / name)
    config = made(odd / "mine.yaml", "+env.TOKENS=${cluster.root}/x", "+env.PRICE=5$")
    assert config.workload.path == (str(odd), str(odd / "lib"))
    assert config.cluster.root == str(odd / "runs")
    assert (config.env["TOKENS"], config.env["PRICE"]) == (f"{odd}/runs/x", "5$")
    monkeypatch.chdir(odd)
    environ = {"HOME": str(tmp_path / "typed")}
    typed = compose("mine.yaml", ["workload.path=[$HOME/here,lib]"], environ=environ)
    assert typed.config.workload.path == (str(tmp_path / "typed" / "here"), str(odd / "lib"))
    again = recompose(typed.data, ["optimizer.lr=0.5"], environ=environ)
    assert again.config.workload.path == typed.config.workload.path
    assert again.config.cluster.root == typed.config.cluster.root
