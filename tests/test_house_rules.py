"""The house checks itself: import laws, sizes, names, and where printing and broad excepts may stand."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orchestrator", "trainer", "checkpointing")
MAY_IMPORT = {
    "orchestrator": {"orchestrator", "trainer", "checkpointing"},
    "trainer": {"trainer", "checkpointing"},
    "checkpointing": {"checkpointing"},
}
TORCH_ROOMS = ("trainer/worker/", "checkpointing/engine/")
STANDARD_ONLY = "trainer/contract/"
AGENT_ROOMS = (
    "control",
    "flight",
    "processes",
    "fork_server",
    "ranks",
    "nodes",
    "watch",
    "ladder",
    "evidence",
    "attempt_state",
    "user_command",
    "coordination",
    "node_agent",
    "main",
)
"""Each may enter those before it."""
BANNED_NAMES = ("utils", "helpers", "common", "misc", "manager")
PICKLE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
UNPICKLERS = {
    "checkpointing/format/torch_record.py": "reads one saved tensor, with stand-ins for every class",
    "checkpointing/engine/interchange/external_tensors.py": "reads users' files: names the errors of torch.load",
    "checkpointing/engine/interchange/importer.py": "writes `.metadata`",
    "checkpointing/engine/restore/metadata_reader.py": "reads `.metadata` by an allow-list, after its digest matched",
    "checkpointing/engine/state/save_plan.py": "writes `.metadata`",
    "checkpointing/engine/ranks/failure.py": "names the error",
}
"""Who may import pickle, and why: files are read by allow-lists; processes never send it to each other."""
EDGE = "# outermost edge"
LONGEST_FILE, LONGEST_FUNCTION, WIDEST_CONFIG = 400, 60, 12

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
every_source = pytest.mark.parametrize("path", SOURCES, ids=NAMES)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute names of everything a file imports, late imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which way an import goes"
            yield node.module or ""


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


@every_source
def test_imports_go_one_way(path: Path) -> None:
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    ours = {name.split(".")[0] for name in imported_modules(TREES[path])} & set(PACKAGES)
    assert ours <= allowed, f"{place(path)} imports {sorted(ours - allowed)}"


@every_source
def test_torch_lives_in_the_back_rooms(path: Path) -> None:
    if place(path).startswith(TORCH_ROOMS):
        return
    roots = {name.split(".")[0] for name in imported_modules(TREES[path])}
    assert "torch" not in roots, f"{place(path)} imports torch"


@every_source
def test_back_rooms_are_entered_late(path: Path) -> None:
    """Outside the back rooms nothing imports a torch module at its top level."""
    if place(path).startswith(TORCH_ROOMS):
        return
    top = ast.Module(body=[node for node in TREES[path].body if not isinstance(node, ast.FunctionDef)], type_ignores=[])
    rooms = tuple(room.replace("/", ".").rstrip(".") for room in TORCH_ROOMS)
    entered = [name for name in imported_modules(top) if name.startswith(rooms)]
    assert not entered, f"{place(path)} imports {entered} when it is imported"


@every_source
def test_the_contract_needs_the_standard_library_only(path: Path) -> None:
    if not place(path).startswith(STANDARD_ONLY):
        return
    roots = {name.split(".")[0] for name in imported_modules(TREES[path])}
    foreign = roots - set(sys.stdlib_module_names) - {"trainer", "checkpointing"}
    assert not foreign, f"{place(path)} imports {sorted(foreign)}"


@every_source
def test_rooms_of_the_agent_are_entered_one_way(path: Path) -> None:
    if not place(path).startswith("trainer/agent/") or path.name == "__init__.py":
        return
    room = AGENT_ROOMS.index(path.relative_to(ROOT / "trainer/agent").parts[0].removesuffix(".py"))
    entered = {name.split(".")[2] for name in imported_modules(TREES[path]) if name.startswith("trainer.agent.")}
    assert entered <= set(AGENT_ROOMS[: room + 1]), f"{place(path)} enters {sorted(entered)}"


def test_no_import_cycles() -> None:
    modules = {place(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in SOURCES}
    graph = {name: set(_edges(TREES[path], modules)) - {name} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _edges(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in modules else node.module for name in inner if name in modules or node.module in modules
            )


@every_source
def test_file_length(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{place(path)} has {lines} lines: it holds more than one concept"


@every_source
def test_function_length(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{place(path)}:{node.lineno} {node.name} has {length} lines"


@every_source
def test_file_names_say_what_they_hold(path: Path) -> None:
    words = set(path.stem.split("_"))
    assert not words & set(BANNED_NAMES), f"{place(path)}: name the concept"


@every_source
def test_only_render_prints(path: Path) -> None:
    if path.stem.startswith("render") and path.parent.name == "terminal":
        return
    for node in ast.walk(TREES[path]):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        assert not called, f"{place(path)}:{getattr(node, 'lineno', 0)} prints"


@every_source
def test_broad_excepts_stand_at_an_edge_and_say_so(path: Path) -> None:
    lines = path.read_text().splitlines()
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        if caught in ("everything", "Exception", "BaseException"):
            assert EDGE in lines[node.lineno - 1], f"{place(path)}:{node.lineno} catches {caught}"


@every_source
def test_configs_are_small_frozen_and_explained(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
            continue
        fields = [(at, item) for at, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)]
        assert len(fields) <= WIDEST_CONFIG, f"{place(path)} {node.name} has {len(fields)} fields"
        decorators = " ".join(ast.unparse(item) for item in node.decorator_list)
        assert "frozen=True" in decorators, f"{place(path)} {node.name} is not frozen"
        assert "kw_only=True" in decorators, f"{place(path)} {node.name} takes positional arguments"
        for at, item in fields:
            if isinstance(item.annotation, ast.Name) and item.annotation.id.endswith(("Config", "Shape")):
                continue
            following = node.body[at + 1] if at + 1 < len(node.body) else None
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert explained, f"{place(path)} {node.name}.{ast.unparse(item.target)} has no docstring"


def test_functions_are_short_on_the_whole() -> None:
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    median, ninth_decile = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    assert median <= 10, f"median function length {median}"
    assert ninth_decile <= 25, f"90th percentile of function length {ninth_decile}"


@every_source
def test_processes_send_each_other_no_pickles(path: Path) -> None:
    """Whoever can write to a socket or a store would run code in every rank."""
    roots = {name.split(".")[0] for name in imported_modules(TREES[path])} & PICKLE_MODULES
    assert place(path) in UNPICKLERS or not roots, f"{place(path)} imports {sorted(roots)}"
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        at = f"{place(path)}:{node.lineno} {called}"
        last = called.rpartition(".")[2]
        assert not last.endswith(("_object_list", "gather_object", "send_object", "recv_object")), f"{at} unpickles"
        if called.endswith("torch.load"):
            safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            assert safe, f"{at} without weights_only=True"


def test_torch_free_packages_import_without_torch() -> None:
    rooms = [name for name, path in zip(NAMES, SOURCES, strict=True) if not name.startswith(TORCH_ROOMS)]
    modules = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in rooms]
    skipped = [name for name in modules if name.endswith(("__main__", "migrations.env")) or ".versions." in name]
    code = (
        "import importlib, sys\n"
        f"for name in {[name for name in modules if name not in skipped]!r}:\n"
        "    importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
