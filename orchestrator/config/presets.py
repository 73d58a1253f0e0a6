"""The folders of presets and templates that orch brings along."""

from pathlib import Path

from orchestrator.near_words import nearest


def folder(name: str) -> Path:
    """`configs` or `sbatch_templates`: beside the packages in a source tree, inside `orchestrator` in a wheel."""
    here = Path(__file__).resolve().parent.parent
    packed = here / "data" / name
    return packed if packed.is_dir() else here.parent / name


def names() -> list[str]:
    """Every preset as one writes it: `tiny-gpt`, `model/tiny`."""
    root = folder("configs")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def nearest_part(section: str, name: str) -> str:
    """The preset for this section that `name` means, with or without the section before it; empty without one."""
    parts = {part.partition("/")[2]: part for part in names() if part.startswith(f"{section}/")}
    wanted = name.rpartition("/")[2].removesuffix(".yaml")
    return parts.get(wanted if wanted in parts else nearest(wanted, parts), "")
