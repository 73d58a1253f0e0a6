"""Versions of Python and torch that `make proof` runs tests with; each row is an environment that is installed once.

A row with a Debian suite is a root folder with that suite's Python, entered by chroot, which needs root. All pins are
exact, and pip resolves nothing: with torch, it would fetch gigabytes of other packages.
"""

import fcntl
import os
import re
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.debian_suites import cached, run, unpack

ROOT = Path(__file__).resolve().parents[1]
ENTER = ROOT / "tests" / "fakes" / "enter_image.sh"
PACKAGES = (
    "ca-certificates",
    "e2fsprogs",
    "git",
    "iproute2",
    "libgomp1",
    "procps",
    "python3",
    "python3-venv",
    "util-linux-extra",
)
"""Debian packages of every root folder."""
INSIDE = Path("/opt/env")
"""Virtual environment in a root folder."""
REQUIREMENTS = "opt/requirements.txt"
"""File with a row's pins, below its folder."""
RECIPE = 1
"""Number of this recipe; folders of other ones are not used."""


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """A Python with a torch and versions of the other dependencies."""

    name: str
    python: str
    torch: str
    suite: str = ""
    """Debian suite with this Python; empty: the Python that runs the tests."""
    packages: tuple[str, ...] = ()
    """Further Debian packages; `python3-torch` is used instead of pip's torch."""
    pins: tuple[str, ...] = ()
    """Files with pins, which replace those of constraints.txt."""

    demo: tuple[str, ...] = ()
    """Settings for `orch demo`."""

    def requirements(self) -> str:
        """Return all pins, as a file for pip."""
        versions: dict[str, str] = {}
        for name in ("constraints.txt", *self.pins):
            found = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
            versions |= {key.lower().replace("_", "-"): version for key, version in found}
        if "python3-torch" in self.packages:
            del versions["torch"]
        return "".join(f"{name}=={version}\n" for name, version in versions.items())


VERSIONS = (
    VersionRow(name="lowest", python="3.11", torch="2.13", pins=("tests/lowest/requirements.txt",)),
    VersionRow(name="trixie", python="3.13", torch="2.12", suite="trixie",
               pins=("tests/lowest/torch-requirements.txt",)),
    VersionRow(name="forky", python="3.14", torch="2.14", suite="forky", packages=("python3-torch",),
               demo=("train.dtype=float32",)),  # the gloo of Debian's torch cannot reduce bfloat16
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InstalledRow:
    """An installed row."""

    row: VersionRow
    folder: Path

    def run(self, *words: str, seconds: float) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment in the checkout, with few environment variables."""
        places = f"{self.environment}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        variables = [f"PATH={places}", "LANG=C.UTF-8", f"HOME={Path.home()}", f"VIRTUAL_ENV={self.environment}"]
        command = ["env", "--ignore-environment", f"--chdir={ROOT}", *variables, *_pip_settings(), *words]
        return subprocess.run(
            [*enter(self.row, self.folder), *command], cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
            capture_output=True, timeout=seconds, check=False,
        )  # fmt: skip

    @property
    def environment(self) -> Path:
        return INSIDE if self.row.suite else self.folder


def enter(row: VersionRow, folder: Path) -> list[str]:
    """Return the words before a command that enter the row's root folder."""
    if not row.suite:
        return []
    return ["unshare", "--mount", "--propagation=private", str(ENTER), str(folder), str(ROOT), "--"]


@contextmanager
def installed(row: VersionRow) -> Iterator[InstalledRow]:
    """Yield the row with this checkout, for one test run at a time. Raises SuiteError if that is impossible."""
    folder = cached(f"python-{row.name}-{RECIPE}", partial(_build, row))
    made = InstalledRow(row=row, folder=folder)
    with (folder.with_name(f"{folder.name}.used")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pip = ("python", "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        done = made.run(*pip, seconds=300)
        assert done.returncode == 0, done.stderr
        yield made


def _build(row: VersionRow, folder: Path, final: Path) -> None:
    if row.suite:
        unpack(row.suite, folder, *PACKAGES, *row.packages, variant="minbase")
        _add_network_settings(folder)
        run(*enter(row, folder), "python3", "-m", "venv", "--system-site-packages", str(INSIDE))
    else:
        venv.create(folder, with_pip=True)
    (folder / "opt").mkdir(exist_ok=True)
    (folder / REQUIREMENTS).write_text(row.requirements())
    place, file = (INSIDE, f"/{REQUIREMENTS}") if row.suite else (folder, str(folder / REQUIREMENTS))
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-compile", "-r", file)
    run(*enter(row, folder), "env", *_pip_settings(), str(place / "bin" / "python"), *pip, seconds=1800)


def _add_network_settings(root: Path) -> None:
    """Copy the files that pip needs into a root folder."""
    for name in ("hosts", "resolv.conf", "pip.conf", "ssl/certs/ca-certificates.crt"):
        if (file := Path("/etc", name)).exists():
            (root / "etc" / name).write_bytes(file.read_bytes())


def _pip_settings() -> list[str]:
    return [
        f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_") or "_proxy" in name.lower()
    ]
