"""The documentation keeps up with the code: verbs, failure kinds, config keys, and the paths and names it mentions."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

import orch
from orchestrator.cli.main import verbs
from orchestrator.states import RunState
from tests.orchestrator.cli.printed_commands import commands_in, why_not_typed
from trainer.protocol.failures.outcome import FailureKind, select_kinds

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SKILL.md")),
    *sorted(DOCS.glob("*.md")),
]
PACKAGES = ("orchestrator", "trainer", "checkpointing", "benchmarks", "tests")
MOST_HELP_LINES = 12
"""Longest description of a verb in its help, in lines of 80 characters."""
FOLDERS = (*PACKAGES, "orch", "examples", "docs", "configs", "sbatch_templates")
every_page = pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])

_PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?")
_MODULE = re.compile(rf"(?<![\w./-])((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?::(\w+))?")
_SOURCE = re.compile(r"`([\w./-]+\.py)(?:::\w+)?`")
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")


def defined_names(path: Path) -> set[str]:
    """What a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def why_missing(path: str, name: str) -> str:
    """Why `path`, or `path::name`, is not in the tree; empty when it is there."""
    place = ROOT / path.rstrip(".")
    if not place.exists():
        return f"there is no {path}"
    if name and name not in defined_names(place):
        return f"{path} defines no {name}"
    return ""


def why_no_module(dotted: str, name: str) -> str:
    """The same for `package.module`, `package.module.name` and `package.module:name`."""
    parts = dotted.split(".")
    module = next((n for n in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:n]).with_suffix(".py").exists()), None)
    if module is None:
        return "" if ROOT.joinpath(*parts).is_dir() else f"there is no module {dotted}"
    wanted = [*parts[module : module + 1], *([name] if name else [])]
    names = defined_names(ROOT.joinpath(*parts[:module]).with_suffix(".py")) if wanted else set()
    return "".join(f"{dotted} has no {one}; " for one in wanted if one not in names)


@every_page
def test_every_name_of_the_public_api_exists(page: Path) -> None:
    blocks = "".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"\borch\.(\w+)", blocks)) <= set(orch.__all__)


def test_the_public_api_page_documents_every_name() -> None:
    documented = re.findall(r"`(\w+)[(`]", (DOCS / "python.md").read_text())
    assert set(orch.__all__) - {"__version__", "LastCheckpoint"} <= set(documented)


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have on GitHub."""
    lines = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in lines}


@every_page
def test_every_path_that_is_named_exists(page: Path) -> None:
    found = [why_missing(path, name) for path, name in _PATH.findall(page.read_text())]
    assert not [why for why in found if why]


@every_page
def test_every_module_that_is_named_exists(page: Path) -> None:
    found = [why_no_module(dotted, name) for dotted, name in _MODULE.findall(page.read_text())]
    assert not [why for why in found if why]


@every_page
def test_source_files_are_named_with_their_folder(page: Path) -> None:
    bare = [path for path in _SOURCE.findall(page.read_text()) if not path.startswith(tuple(f"{x}/" for x in FOLDERS))]
    assert not bare


def test_lines_of_the_changelog_are_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == []


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), f"{target}#{anchor}"


def load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return reference


@pytest.mark.parametrize("name", ["configuration.md", "cli.md", "failure-kinds.md"])
def test_generated_pages_are_current(name: str) -> None:
    assert load_reference().PAGES[DOCS / name]() == (DOCS / name).read_text(), "run: python docs/reference.py"


@every_page
def test_every_yaml_example_is_a_valid_configuration(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.config.compose import compose

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # for cluster/local-gpu
    for number, text in enumerate(_YAML.findall(page.read_text())):
        example = tmp_path / f"{number}.yaml"
        example.write_text(text)
        compose(str(example), ("data.text=[python-stdlib]",), environ={"HOME": str(tmp_path)})


def places_of_keys() -> set[str]:
    """Every key and section of a configuration, by its full name and by each end of it (`spike.window`)."""
    from orchestrator.config import keys

    names = {path[first:last] for path in keys.every_key() for last in range(1, len(path) + 1) for first in range(last)}
    return {keys.dotted_key(name) for name in names}


def dead_keys(text: str) -> list[str]:
    """What stands between backticks like a key of a section (`spike.window=9`), and is none."""
    from orchestrator.config import keys
    from orchestrator.submission.resume_contract import IDENTITY
    from trainer.protocol.events import EventKind

    sections = {name for path in keys.every_key() for name in path[:-1]}
    others = {*IDENTITY, *map(str, EventKind), *places_of_keys()}
    open_maps = ("env.", "workload.args.", "cluster.sbatch.", "cluster.template_args.", "restore_tests.cluster.")
    return [
        name
        for name in re.findall(r"`[+~]?([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text)
        if name.partition(".")[0] in sections and name not in others and not name.startswith(open_maps)
        if name.rpartition(".")[2] not in ("py", "pt", "jsonl", "safetensors", "json")
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_key_that_is_named_exists(page: Path) -> None:
    assert not dead_keys(page.read_text())


def test_every_failure_kind_is_documented() -> None:
    text = (DOCS / "failure-kinds.md").read_text()
    missing = [kind for kind in FailureKind if f"`{kind}`" not in text]
    assert not missing


def test_the_failures_after_which_changed_code_is_accepted_are_documented() -> None:
    text = (DOCS / "writing-a-workload.md").read_text()
    named = text.partition("Changed code needs no `--accept` after ")[2].partition(". ")[0]
    assert {kind for kind in FailureKind if f"`{kind}`" in named} == select_kinds(lambda traits: traits.fixed_by_code)


def commands(group: click.Group, path: str = "orch") -> Iterator[tuple[str, click.Command]]:
    """Yield every verb and group below `group`, with its command line."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        yield f"{path} {word}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {word}")


def test_every_verb_has_a_section() -> None:
    text = (DOCS / "cli.md").read_text()
    assert not [verb for verb in verbs() if not re.search(rf"^### `orch {verb}[ `]", text, re.MULTILINE)]


def test_every_option_has_a_help_text() -> None:
    from orchestrator.cli.main import orch

    assert not [
        f"{path} {option.name}"
        for path, command in commands(orch)
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]


def test_the_help_of_a_verb_fits_on_a_screen() -> None:
    from orchestrator.cli.main import orch

    for path, command in commands(orch):
        formatter = click.HelpFormatter(width=80)
        command.format_help_text(click.Context(command), formatter)
        lines = [line for line in formatter.getvalue().splitlines() if line.strip()]
        assert len(lines) <= MOST_HELP_LINES, path


def commands_of_blocks(text: str) -> list[list[str]]:
    """Return the commands in a page's code blocks, without comments."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (shlex.split(line, comments=True) for block in blocks for line in block.splitlines())
    return [words[1:] for words in lines if words[:1] == ["orch"]]


def test_every_command_for_coding_agents_can_be_typed() -> None:
    text = (ROOT / "SKILL.md").read_text()
    typed = commands_of_blocks(text)
    prose = re.sub(r"^```\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(typed) >= 15
    assert not [(words, why) for words in typed if (why := why_not_typed(words))]
    named = {words[0] for words in commands_in(prose) if words[0].islower()}
    assert named <= {verb.partition(" ")[0] for verb in verbs()}
    assert set(map(str, RunState)) <= set(re.findall(r"[A-Z]{4,}", text)), "every state is explained"
    assert {str(code) for code in (2, 3, 4, 5, 8, 10, 124)} <= set(re.findall(r"\d+", text))
