"""The code that mutants are made of, by area, and the tests that must notice them.

Of `checkpointing/` it is what a save runs on its way to a commit.
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
"""A package with tests of its own, beside those of its folders: its loops and checkpoints as a whole."""


def sources(area: str) -> Iterator[str]:
    """Paths of its files, relative to the tree."""
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
