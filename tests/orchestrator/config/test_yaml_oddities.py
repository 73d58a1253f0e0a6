"""Valid YAML that a configuration does not allow: one error with its line and a remedy."""

from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError

ODD = [
    (f"train: {{steps: {'9' * 5000}}}\n", "a number has 5000 digits", ":1", "put it in quotes"),
    (f"train: {{steps: 0x{'F' * 5000}}}\n", "a number has 5002 digits", ":1", "put it in quotes"),
    ("train:\n\tsteps: 1\n", "not YAML: found a tab", ":2", "indent with spaces"),
    ("train:\n  <<: {steps: 1}\n", "merge keys (`<<`) are not supported", ":2", "write out the keys"),
    ("a: 1\n---\nb: 2\n", "expected a single document in the stream, but found", ":2", "to a file of its own"),
    ('includes: [tiny-gpt]\nenv: {A: "\\udc80"}\n', "env.A=\udc80: is not UTF-8 text", ":2", "UTF-8 terminal"),
]


@pytest.mark.parametrize(("text", "what", "line", "hint"), ODD)
def test_an_oddity_is_refused_at_its_line(text: str, what: str, line: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(str(file), environ={"HOME": str(tmp_path), "ORCH_SITE_CONFIG": ""})
    assert what in caught.value.what
    assert f"{file}{line}" in caught.value.where
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("path", "what"), [("s3://bucket/tokens", "is a URL"), ("/etc/passwd", "is a file, but must be a folder")]
)
def test_data_that_is_in_no_folder_is_called_what_it_is(path: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        compose("tiny-gpt", ["~data.text", f"data.path={path}"], environ={"HOME": str(tmp_path)})
    assert path not in caught.value.hint
