"""House rules: imports, sizes, names, and places of printing and broad excepts.

Each test walks the whole tree and reports every violation at once.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orch", "orchestrator", "trainer", "checkpointing")
MAY_IMPORT = {
    "orch": {"orch", "orchestrator", "trainer", "checkpointing"},
    "orchestrator": {"orchestrator", "trainer", "checkpointing"},
    "trainer": {"trainer", "checkpointing"},
    "checkpointing": {"checkpointing"},
}
TORCH_PACKAGES = ("trainer/worker/", "trainer/parallel/apply/", "trainer/models/", "checkpointing/engine/")
STANDARD_ONLY = ("trainer/protocol/", "trainer/costs/", "trainer/parallel/")
IMPORTS_WITHIN_TRAINER = {
    "trainer/protocol/": ("trainer.protocol",),
    "trainer/costs/": ("trainer.protocol", "trainer.costs", "trainer.parallel"),
    "trainer/parallel/": ("trainer.protocol", "trainer.costs", "trainer.parallel", "trainer.worker.reporting"),
    "trainer/worker/": ("trainer.protocol", "trainer.costs", "trainer.parallel", "trainer.worker"),
    "trainer/agent/": ("trainer.protocol", "trainer.costs", "trainer.parallel", "trainer.agent"),
}
EXEMPT = {
    "trainer/agent/fork_server/server.py": "it forks ranks",
    "trainer/protocol/config.py": "it assembles the sections of all owners",
}
"""Allowed imports between folders of `trainer/`; `trainer/models/` may import all but the agent."""
AGENT_LAYERS = (
    "instrument",
    "adapters",
    "control",
    "processes",
    "flight",
    "fork_server",
    "rank_processes",
    "nodes",
    "watch",
    "ladder",
    "attempt_state",
    "user_command",
    "coordination",
    "node_agent",
    "main",
    "start_mounted",
)
"""Each may import those before it."""
BANNED_NAMES = {"utils", "helpers", "common", "misc", "manager"}
MODELS = {"trainer/models/llama.py", "trainer/models/mixture_of_experts.py"}
PICKLE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
UNPICKLERS = {
    "checkpointing/format/torch_record.py": "reads one saved tensor, with stand-ins for every class",
    "checkpointing/engine/interchange/importer.py": "names the errors of torch.load",
    "checkpointing/engine/restore/metadata_reader.py": "reads `.metadata` by an allow-list, after its digest matched",
    "checkpointing/engine/state/save_plan.py": "writes `.metadata`",
    "checkpointing/engine/collectives/group.py": "names the error",
    "trainer/agent/flight/recorder.py": "reads dumps by an allow-list of opcodes",
}
"""Files that may import pickle, with reasons: files are read by allow-lists; processes never exchange pickles."""
CODEC = "trainer/protocol/messages/codec.py"
MESSAGE_TAGS, SENDERS = ("say", "do"), ("send", "send_message", "broadcast", "deliver")
"""Message tags on the wire, which only the codec may use, and senders, which take dataclasses."""
EDGE = "# outermost edge"
LONGEST_FILE, LONGEST_FUNCTION, WIDEST_CONFIG, MOST_PARAMETERS = 500, 60, 12, 8
FEW_PARAMETERS = ("orchestrator/",)
"""Folders whose functions take at most `MOST_PARAMETERS`."""

SOURCES = {str(path.relative_to(ROOT)): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TEXTS = {name: path.read_text() for name, path in SOURCES.items()}

TORCH_FILES = {name for name in SOURCES if name.startswith(TORCH_PACKAGES)}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all files."""
    return {name: ast.parse(text) for name, text in TEXTS.items()}


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the cached result of `ast.walk`."""
    return tuple(ast.walk(tree))


def none_of(violations: Iterable[str]) -> None:
    """Fail with all violations, one per line."""
    found = list(violations)
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute names of all imports, including late ones; relative ones begin with a dot."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def imported_roots(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(tree)}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def for_types(node: ast.stmt) -> bool:
    """Return whether only type checkers execute this statement."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def module_name(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def test_imports_go_one_way() -> None:
    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            relative = [module for module in imported_modules(tree) if module.startswith(".")]
            yield from (f"{name} imports {module}, which is relative" for module in relative)
            foreign = (imported_roots(tree) & set(PACKAGES)) - MAY_IMPORT[name.split("/")[0]]
            yield from (f"{name} imports {package}" for package in sorted(foreign))

    none_of(violations())


def test_torch_is_imported_late_and_in_its_packages_only() -> None:
    packages = tuple(folder.replace("/", ".").rstrip(".") for folder in TORCH_PACKAGES)

    def violations() -> Iterator[str]:
        for name in SOURCES.keys() - TORCH_FILES:
            if "torch" in imported_roots(trees()[name]):
                yield f"{name} imports torch"
            body = [
                node for node in trees()[name].body if not isinstance(node, ast.FunctionDef) and not for_types(node)
            ]
            for module in imported_modules(ast.Module(body=body, type_ignores=[])):
                if module.startswith(packages):
                    yield f"{name} imports {module} when it is imported"

    none_of(sorted(violations()))


def test_torch_free_packages_import_without_torch() -> None:
    modules = [module_name(name) for name in SOURCES.keys() - TORCH_FILES]
    skipped = [name for name in modules if name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(set(modules) - set(skipped))!r}:\n"
        "    importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_protocol_needs_the_standard_library_only() -> None:
    known = set(sys.stdlib_module_names) | {"trainer", "checkpointing"}
    protocol = [name for name in SOURCES if name.startswith(STANDARD_ONLY) and not name.startswith(TORCH_PACKAGES)]
    none_of(f"{name} imports {root}" for name in protocol for root in sorted(imported_roots(trees()[name]) - known))


def test_imports_within_the_trainer() -> None:
    none_of(
        f"{name} imports {module}"
        for name, tree in trees().items()
        for folder, allowed in IMPORTS_WITHIN_TRAINER.items()
        if name.startswith(folder) and name not in EXEMPT
        for module in imported_modules(tree)
        if module.startswith("trainer.") and not module.startswith(allowed)
    )


def test_agent_layers_import_one_way() -> None:
    def violations() -> Iterator[str]:
        for name in SOURCES:
            if not name.startswith("trainer/agent/") or name.endswith("__init__.py"):
                continue
            own = AGENT_LAYERS.index(name.split("/")[2].removesuffix(".py"))
            modules = [module for module in imported_modules(trees()[name]) if module.startswith("trainer.agent.")]
            imported = {module.split(".")[2] for module in modules} - set(AGENT_LAYERS[: own + 1])
            yield from (f"{name} imports {layer}" for layer in sorted(imported))

    none_of(violations())


def test_the_login_node_imports_nothing_of_the_agent() -> None:
    modules = {module_name(name) for name in SOURCES}
    none_of(
        f"{name} imports {module}"
        for name, tree in trees().items()
        if name.startswith(("orch/", "orchestrator/"))
        for module in sorted(set(_edges(tree, modules)))
        if module.startswith("trainer.agent")
    )


def test_no_import_cycles() -> None:
    modules = {module_name(name): tree for name, tree in trees().items()}
    graph = {name: set(_edges(tree, modules.keys())) - {name} for name, tree in modules.items()}
    done: set[str] = set()
    cycles: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            cycles.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    none_of(cycles)


def _edges(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                name if name in modules else node.module for name in inner if name in modules or node.module in modules
            )


def test_scheduler_kinds_are_not_compared_by_name() -> None:
    def compared(tree: ast.AST) -> Iterator[int]:
        for node in nodes(tree):
            if isinstance(node, ast.Compare):
                constants = (one for side in (node.left, *node.comparators) for one in ast.walk(side))
                if any(isinstance(one, ast.Constant) and one.value in ("slurm", "local") for one in constants):
                    yield node.lineno

    submitit = "trainer/agent/main.py"  # submitit's name of what started this process
    none_of(f"{name}:{line}" for name, tree in trees().items() if name != submitit for line in compared(tree))


def test_files_and_functions_are_short() -> None:
    def violations() -> Iterator[str]:
        for name, text in TEXTS.items():
            lines = len(text.splitlines())
            if lines > LONGEST_FILE:
                yield f"{name} has {lines} lines: it holds more than one concept"
            for node in functions(trees()[name]):
                if length(node) > LONGEST_FUNCTION:
                    yield f"{name}:{node.lineno} {node.name} has {length(node)} lines"

    none_of(violations())


def test_most_functions_are_short() -> None:
    lengths = sorted(length(node) for tree in trees().values() for node in functions(tree))
    median, ninth_decile = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    assert median <= 10, f"median function length {median}"
    assert ninth_decile <= 25, f"90th percentile of function length {ninth_decile}"


def test_file_names_name_a_concept() -> None:
    def violations() -> Iterator[str]:
        for name in SOURCES:
            stem = set(Path(name).stem.split("_"))
            yield from (f"{name}: name the concept, not {word}" for word in sorted(stem & BANNED_NAMES))

    none_of(violations())


CLAUSE = re.compile(r"^(What|How|Who|Whom|Whose|Which|Those|Where|The same|That)\b")
FRAGMENT = re.compile(r"^(Of|For|As|By|In|On|From|To|With|So|None|No|Beside|Until|Before|After)\b")
SPEECH = re.compile(r"\b(tells?|told|hears?|heard|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
PARTICIPLE = re.compile(
    r"^_?[a-z]+(ed|told|said|found|made|kept|left|held|sent|given|shown|known|taken|laid|brought|meant|seen|done|gone|lost)$"
)
PREPOSITION = re.compile(r"^_?(of|over|again|perhaps|here|there|apart|beside)$|_(of|by|for|from|in|at|on|with|as)$")
PARTICIPLES = {
    "closed": "the name in file objects", "started": "a state", "stopped": "a state", "finished": "a state",
    "saved": "the name in the API of programs",
}  # fmt: skip
"""Functions that may be named by a participle."""


def test_docstrings_are_sentences() -> None:
    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            for node in nodes(tree):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                    continue
                text, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
                if begins := CLAUSE.match(text) or FRAGMENT.match(text):
                    yield f"{name}:{line} begins with {begins.group()}: {text.splitlines()[0]}"
                prose = re.sub(r"`[^`]*`", "", text)
                yield from (f"{name}:{line} says {word}" for word in SPEECH.findall(prose))

    none_of(violations())


def test_functions_are_named_by_verbs_or_nouns() -> None:
    none_of(
        f"{name}:{node.lineno} {node.name}: a verb and its object, a noun, or is_ and has_"
        for name, tree in trees().items()
        for node in functions(tree)
        if node.name.lstrip("_") not in PARTICIPLES and (PARTICIPLE.match(node.name) or PREPOSITION.search(node.name))
    )


def test_functions_take_few_parameters() -> None:
    def violations() -> Iterator[str]:
        for name in SOURCES:
            for node in functions(trees()[name]) if name.startswith(FEW_PARAMETERS) else ():
                if any("command(" in ast.unparse(item) for item in node.decorator_list):
                    continue  # options of a command are its parameters
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                named = [one.arg for one in arguments if one.arg not in ("self", "cls")]
                if len(named) > MOST_PARAMETERS:
                    yield f"{name}:{node.lineno} {node.name} takes {len(named)} parameters"

    none_of(violations())


def test_only_render_prints() -> None:
    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            if Path(name).stem.startswith("render") and Path(name).parent.name == "terminal":
                continue
            for node in nodes(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    yield f"{name}:{node.lineno} prints"

    none_of(violations())


def test_broad_excepts_are_marked_as_outermost_edge() -> None:
    def violations() -> Iterator[str]:
        for name, text in TEXTS.items():
            lines = text.splitlines()
            for node in nodes(trees()[name]):
                if isinstance(node, ast.ExceptHandler):
                    caught = ast.unparse(node.type) if node.type else "everything"
                    broad = caught in ("everything", "Exception", "BaseException")
                    if broad and EDGE not in lines[node.lineno - 1]:
                        yield f"{name}:{node.lineno} catches {caught}"

    none_of(violations())


def test_configs_are_small_frozen_and_explained() -> None:
    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            for node in nodes(tree):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                    yield from (f"{name} {node.name}{fault}" for fault in _config_faults(node))

    none_of(violations())


def _config_faults(node: ast.ClassDef) -> Iterator[str]:
    fields = [(at, item) for at, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)]
    if len(fields) > WIDEST_CONFIG:
        yield f" has {len(fields)} fields"
    decorators = " ".join(ast.unparse(item) for item in node.decorator_list)
    if "frozen=True" not in decorators:
        yield " is not frozen"
    if "kw_only=True" not in decorators:
        yield " takes positional arguments"
    for at, item in fields:
        if isinstance(item.annotation, ast.Name) and item.annotation.id.endswith(("Config", "Shape")):
            continue
        following = node.body[at + 1] if at + 1 < len(node.body) else None
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            yield f".{ast.unparse(item.target)} has no docstring"


def test_processes_exchange_no_pickles() -> None:
    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            if name not in UNPICKLERS:
                yield from (f"{name} imports {root}" for root in sorted(imported_roots(tree) & PICKLE_MODULES))
            for node in nodes(tree):
                fault = _unpickles(node) if isinstance(node, ast.Call) else None
                if isinstance(node, ast.Call) and fault:
                    yield f"{name}:{node.lineno} {ast.unparse(node.func)} {fault}"

    none_of(violations())


def test_tensors_name_their_device() -> None:
    makers = {f"torch.{name}" for name in ("arange", "as_tensor", "empty", "full", "ones", "randn", "tensor", "zeros")}

    def violations() -> Iterator[str]:
        for name, tree in trees().items():
            calls = [node for node in nodes(tree) if isinstance(node, ast.Call)] if name not in MODELS else []
            for call in calls:
                if ast.unparse(call.func) in makers and not any(given.arg == "device" for given in call.keywords):
                    yield f"{name}:{call.lineno} {ast.unparse(call.func)} without a device"

    none_of(violations())


def test_messages_between_processes_are_dataclasses() -> None:
    def violations() -> Iterator[str]:
        for name in SOURCES.keys() - {CODEC}:
            for node in nodes(trees()[name]) if name.startswith("trainer/") else ():
                if isinstance(node, ast.Constant) and node.value in MESSAGE_TAGS:
                    yield f"{name}:{node.lineno} has the tag {node.value!r}"
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SENDERS:
                    untyped = [one for one in node.args if isinstance(one, (ast.Dict, ast.JoinedStr, ast.Constant))]
                    yield from (f"{name}:{node.lineno} sends {ast.unparse(one)}" for one in untyped)

    none_of(sorted(violations()))


def _unpickles(node: ast.Call) -> str | None:
    called = ast.unparse(node.func)
    if called.rpartition(".")[2].endswith(("_object_list", "gather_object", "send_object", "recv_object")):
        return "unpickles"
    safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    return None if safe or not called.endswith("torch.load") else "without weights_only=True"
