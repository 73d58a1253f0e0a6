"""Copy of orch's packages that jobs mount into an image without orch.

It has only the packages that jobs need: mounting the folder in which orch is installed would also replace the image's
torch. It is in the state folder, named by its content, and never changed, so running jobs keep theirs after an upgrade.
"""

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import checkpointing
import trainer
from orchestrator.home import make_state_home, state_home
from trainer.protocol.messages.agents import installed_release

_PACKAGES = {
    name: Path(package.__path__[0]) for name, package in (("checkpointing", checkpointing), ("trainer", trainer))
}
if (_orch := find_spec("orch")) is not None and _orch.submodule_search_locations:
    _PACKAGES["orch"] = Path(_orch.submodule_search_locations[0])  # for a program that calls it
_ENTRY = _PACKAGES["trainer"] / "agent" / "start_mounted.py"


def agent_folder() -> Path:
    """Return the path of the folder for the installed packages, whether or not it exists. Raises OSError."""
    digest = hashlib.sha256(installed_release().encode())
    for name, package in _PACKAGES.items():
        for file in sorted(package.rglob("*.py")):
            digest.update(f"\0{name}/{file.relative_to(package)}\0".encode() + file.read_bytes())
    return state_home() / "agent" / digest.hexdigest()[:16]


def provide_agent() -> None:
    """Create the folder unless it exists. Raises OSError."""
    folder = agent_folder()
    if folder.is_dir():
        return
    make_state_home()
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for name, package in _PACKAGES.items():
            shutil.copytree(package, unfinished / name, dirs_exist_ok=True)  # with the compiled files
        shutil.copy(_ENTRY, unfinished / "__main__.py")
        if release := installed_release():  # the release that the agents report
            about = unfinished / f"orch-{release}.dist-info"
            about.mkdir(exist_ok=True)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: orch\nVersion: {release}\n")
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():  # else another process has created it
            raise
