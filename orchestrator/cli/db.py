"""`orch db`: the registry's location, backup, and rebuild from run directories."""

import shlex
from pathlib import Path

import click

from orchestrator.cli.terminal.argument_types import NonEmptyPath
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.errors import ConfigError, NotFound, RegistryError
from orchestrator.home import registry_path
from orchestrator.registry import fast_queries
from orchestrator.run_view import require_registry


@click.group(cls=Noun)
def db() -> None:
    """Locate, back up or rebuild the registry.

    The registry is an SQLite file and needs locks that every host sees. The file system determines its journal.
    ext4, xfs, btrfs, zfs, tmpfs, overlay and other local file systems: write-ahead log, for one login node. NFS without
    `nolock`, `local_lock=all` or `local_lock=posix`, Lustre with `flock`, GPFS, CephFS, GFS2 without `localflocks`:
    rollback journal. All others (BeeGFS, WekaFS, JuiceFS, GlusterFS, SMB, sshfs, mounted object stores) and other
    mount options are refused.

    A registry on a refused file system can still be read. To write, move it: `orch db backup /local/disk/registry.db`,
    then `export ORCH_REGISTRY=/local/disk/registry.db`.
    """


@db.command("path")
@click.pass_obj
def path(screen: Screen) -> None:
    """Print the registry's file name: ORCH_REGISTRY, or `registry.db` in the state folder (ORCH_HOME)."""
    file = registry_path()
    screen.answer("db.path", {"path": str(file), "exists": file.exists()}, str(file))


@db.command("backup")
@click.argument("to", metavar="FILE", type=NonEmptyPath(path_type=Path))
@click.pass_obj
def backup(screen: Screen, to: Path) -> None:
    """Write a consistent copy of the registry to a file, while it is in use.

    An older backup or an empty file is replaced; any other file is left unchanged (exit code 4). It also copies
    a registry that cannot be opened in place: on a read-only mount, or in a folder without write permission.
    """
    from orchestrator.registry.backup import backup as copy

    require_registry()
    if to.is_dir():
        to = to / registry_path().name
    if to.exists() and to.samefile(registry_path()):
        raise ConfigError("the backup would overwrite the registry", where=str(to), hint="name another file")
    screen.if_interrupted = lambda: f"interrupted: no backup was written to {to}"
    copy(registry_path(), to)
    screen.if_interrupted = lambda: f"interrupted: {to} is complete"
    length = to.stat().st_size
    screen.answer("db.backup", {"path": str(to), "bytes": length}, f"{to}  ({size(length)})")


@db.command("rebuild")
@click.argument("roots", nargs=-1, type=NonEmptyPath(path_type=Path))
@click.option("--root", "more", multiple=True, type=NonEmptyPath(path_type=Path), help="The same as ROOTS, repeatable.")
@click.pass_obj
def rebuild(screen: Screen, roots: tuple[Path, ...], more: tuple[Path, ...]) -> None:
    """Create a new registry from run directories.

    ROOTS are the folders that hold runs (`cluster.root`). An existing registry is renamed, never overwritten; its
    new name is printed. First stop the controllers of this registry, and of any other registry that serves one of
    the runs.

    Two registries may then list the same run. `record.json` in the run's folder names the registry that serves it.
    Once that registry has begun an attempt, the other one holds the run, refuses `orch resume` and `orch rm` (exit
    code 4), and its `orch ckpt gc` keeps the files that the attempt may use. `orch db rebuild` imports the attempts;
    `orch rm --forget` removes the rows. A registry restored from its backup to its original path counts as the same.
    """
    roots += more
    for root in roots:
        if not root.is_dir():
            raise NotFound(f"no such folder: {root}", where="command line: ROOTS", hint="name the `cluster.root`")
    if not roots:
        hint = "name every `cluster.root`:  orch db rebuild --root ~/orch-runs"
        raise ConfigError("no folder with runs was given", where="command line: orch db rebuild", hint=hint)
    from orchestrator.registry_rebuild.rebuild import rebuild as make  # sqlalchemy: after the checks

    screen.if_interrupted = lambda: "interrupted: nothing is lost; run the same command again"
    old: list[Path] = []
    try:
        before = fast_queries.run_folders(registry_path())
    except RegistryError:  # a damaged registry is a reason to rebuild it
        before = {}
    run_count = make(registry_path(), [root.resolve() for root in roots], on_aside=old.append)
    screen.note(f"registry {registry_path()}")
    for path in old:
        screen.note(f"the old registry is now {path}")
    now, named = fast_queries.run_folders(registry_path()), {root.resolve() for root in roots}
    folders = (Path(folder).resolve() for run, folder in before.items() if run not in now)
    if lost := sorted({str(folder.parent) for folder in folders if folder.is_dir() and folder.parent not in named}):
        add = " ".join(f"--root {shlex.quote(root)}" for root in lost)
        screen.warn("runs_left_out", f"known runs are in folders that were not named; to include them, add {add}")
    answer = {"path": str(registry_path()), "runs": run_count, "old": str(old[0]) if old else None}
    screen.answer("db.rebuild", answer, f"rebuilt with {run_count} run{'' if run_count == 1 else 's'}")
