"""The code to mutate, by area, and the tests that must catch the mutants.

`checkpointing/` is limited to the path of a save to its commit.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = {
    "training": ("trainer/worker/train_loop",),
    "parallel": ("trainer/parallel/apply", "trainer/parallel/apply", "trainer/models/mixture_of_experts.py"),
    "saved_state": ("trainer/worker/saved_state",),
    "recovery": ("orchestrator/recovery",),
    "commit": (
        "checkpointing/engine/save",
        "checkpointing/format/commit.py",
        "checkpointing/format/manifest.py",
        "checkpointing/writer",
        "checkpointing/storage/direct_io.py",
        "checkpointing/storage/durable.py",
    ),
}
WHOLE_WORKERS = "trainer/worker"
"""A package with its own tests in addition to those of its folders."""


def sources(area: str) -> Iterator[str]:
    """Yield the paths of an area's files, relative to the tree."""
    for name in AREAS[area]:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (str(one.relative_to(ROOT)) for one in found if one.name != "__init__.py")


def test_files(source: str) -> list[str]:
    folder = str(Path(source).parent)
    found = set((ROOT / "tests" / folder).glob("test_*.py" if folder == WHOLE_WORKERS else "**/test_*.py"))
    if folder.startswith(WHOLE_WORKERS):
        found |= set((ROOT / "tests" / WHOLE_WORKERS).glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in sorted(found)]
