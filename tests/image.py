"""Image for container tests: a root folder with this machine's programs, a Python and torch, but not orch.

Its runtime is chroot in a mount namespace of its own, chosen by a template that a user might write.
"""

import os
import re
import sys
import venv
from importlib import metadata
from pathlib import Path

ENTER = Path(__file__).parent / "fakes" / "enter_image.sh"
PROGRAM = Path(__file__).parent / "fakes" / "image_program.py"
PYTHON = "/opt/env/bin/python"
TEMPLATE = """\
#---
# about: runs the agents in a root folder
# args:
#   image: {help: "root folder", kind: path}
#   binds: {help: "folders", kind: words}
# python: >-
#   unshare --mount --propagation private {enter} {{ image }} /usr:ro /etc:ro {{ binds }} {{ run_dir }} {{ agent }}:ro
#   -- {{ python }}
# orch: mounted
#---
"""


def is_possible() -> bool:
    """Return whether this process may create mount namespaces."""
    return os.geteuid() == 0


def make_image(root: Path, *extra: str) -> None:
    """Create the root folder. Its Python has torch and its requirements, and these distributions."""
    for name in ("proc", "dev", "tmp", "usr", "etc", "opt"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):  # links into /usr
        (root / name).symlink_to(f"usr/{name}")
    (root / "image-mark").touch()
    venv.create(root / "opt/env", symlinks=True)
    (site,) = (root / "opt/env/lib").glob("python*/site-packages")
    for name in sorted({name for wanted in ("torch", *extra) for name in _with_requirements(wanted)}):
        for top in {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(_packages() / top)


def settings(image: Path, folder: Path) -> list[str]:
    """Return overrides that run agents in the image, which sees `folder`."""
    template = folder / "image.sh"
    template.write_text(TEMPLATE.replace("{enter}", str(ENTER)))
    seen = [f"{sys.base_prefix}:ro", f"{_packages()}:ro", f"{PROGRAM.parent}:ro", str(folder)]
    return [
        f"cluster.templates=[default, {template}]", f"cluster.python={PYTHON}",
        f"+cluster.template_args.image={image}", f"+cluster.template_args.binds={' '.join(seen)}",
        f"command=[python, {PROGRAM}, {folder}]", r"progress.pattern='step (?P<step>\d+)/(?P<total>\d+)'",
    ]  # fmt: skip


def _packages() -> Path:
    return Path(metadata.distribution("torch").locate_file("")).resolve()  # type: ignore[arg-type]


def _with_requirements(name: str) -> set[str]:
    found = {name}
    for line in metadata.requires(name) or ():
        wanted = re.match(r"[\w.-]+", line)
        assert wanted is not None
        try:
            metadata.distribution(wanted[0])
        except metadata.PackageNotFoundError:  # not for this platform, or an extra
            continue
        if "extra ==" not in line:
            found |= _with_requirements(wanted[0])
    return found
