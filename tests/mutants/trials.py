"""Trials of mutants in a copy of the tree, in forks of a process that has imported torch."""

import ast
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.mutants.areas import ROOT, test_files
from tests.mutants.mutations import Mutant
from tests.mutants.tested_lines import TREE, TestRun, copy_tree, environment

MOST_SECONDS = 40.0
"""Maximum seconds of a mutant's tests in the recorded run; the slowest are left out."""
PATIENCE = 60.0
"""Seconds of a mutant's tests in addition to five times what they took in the recorded run."""
IMPORT_ONLY = "<import>"


@dataclass(frozen=True)
class Trial:
    """Result of one mutant's tests."""

    mutant: Mutant
    caught_by: str
    """First failed test, or empty."""
    seconds: float
    tests: int
    """Number of tests that run the line."""


def tests_of(mutant: Mutant, tests: Mapping[str, TestRun]) -> list[str]:
    """Return the folder's fast tests that run the line: shortest first, real ranks last.

    A line that runs at import counts for all tests that run any line of the file, or else for all tests; tests without
    ranks are preferred.
    """
    files = set(test_files(mutant.file))
    own = {name: test for name, test in tests.items() if name.partition("::")[0] in files and test.passed}
    if _is_in_a_function(mutant):
        first, last = _statement(mutant)
        found = [
            name for name, test in own.items() if any(first <= at <= last for at in test.lines.get(mutant.file, ()))
        ]
    else:
        own = {name: test for name, test in own.items() if not test.ranks} or own
        found = [name for name, test in own.items() if mutant.file in test.lines] or list(own)
    chosen = sorted(found, key=lambda name: (own[name].ranks, own[name].seconds))
    until = accumulate(own[name].seconds for name in chosen)
    return [name for name, seconds in zip(chosen, until, strict=True) if seconds <= MOST_SECONDS or name == chosen[0]]


def _is_in_a_function(mutant: Mutant) -> bool:
    functions = [node for node in ast.walk(_tree(mutant)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(node.body[0].lineno <= mutant.line <= (node.end_lineno or 0) for node in functions)


def _statement(mutant: Mutant) -> tuple[int, int]:
    """Return the first and last line of the smallest enclosing statement; coverage may not record all of its lines.

    A statement's body does not count.
    """
    statements = [node for node in ast.walk(_tree(mutant)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= mutant.line <= (node.end_lineno or 0)]
    smallest = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(smallest, "body", None)
    return smallest.lineno, max(smallest.lineno, body[0].lineno - 1 if body else smallest.end_lineno or 0)


def _tree(mutant: Mutant) -> ast.Module:
    return ast.parse((ROOT / mutant.file).read_text())


class Slot:
    """A copy of the tree for one mutant at a time."""

    def __init__(self) -> None:
        self.tree = Path(tempfile.mkdtemp(prefix="orch-mutants-"))
        copy_tree(self.tree)
        self._pid, self._began, self._limit = 0, 0.0, 0.0
        self._mutant: Mutant | None = None
        self._before, self._time = "", 0.0
        self._tests: Sequence[str] = ()

    @property
    def is_free(self) -> bool:
        return self._mutant is None

    def broken(self, files: Sequence[str]) -> set[str]:
        """Return test files that cannot be imported even without a mutant."""
        note = self.tree / "broken"
        note.write_text("")
        pid = os.fork()
        if not pid:
            _run(self.tree, ("--collect-only", *files), _Broken(note))
        os.waitpid(pid, 0)
        return set(note.read_text().split())

    def begin(self, mutant: Mutant, tests: Mapping[str, TestRun]) -> None:
        """Plant a mutant and start its tests."""
        self._mutant, self._tests = mutant, tests_of(mutant, tests)
        path = self.tree / mutant.file
        self._before, self._time = path.read_text(), path.stat().st_mtime
        path.write_text(mutant.planted(self._before))
        # Bytecode is valid for a time of its source and a size: no two mutants have the same.
        os.utime(path, (mutant.begin, mutant.begin))
        (self.tree / "caught").write_text("")
        self._began = time.monotonic()
        self._limit = PATIENCE + 5 * sum(tests[name].seconds for name in self._tests)
        if not self._tests:
            return
        self._pid = os.fork()
        if not self._pid:
            options = ("-x", "--timeout=60", *self._tests)
            _run(self.tree, options, _FirstFailure(self.tree / "caught", self._tests))
        os.setpgid(self._pid, self._pid)

    def poll(self) -> Trial | None:
        """Return the trial once it has ended, with the file restored; None before."""
        assert self._mutant is not None
        seconds = time.monotonic() - self._began
        caught = (self.tree / "caught").read_text()
        if self._pid:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not ended and not caught and seconds < self._limit:
                return None
            # Its ranks and writers too, before its number may be another process's; a test that hangs has noticed.
            os.killpg(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            caught = caught or self._other_end(os.waitstatus_to_exitcode(status), seconds)
        path = self.tree / self._mutant.file
        path.write_text(self._before)
        os.utime(path, (self._time, self._time))
        trial = Trial(self._mutant, caught, seconds, len(self._tests))
        self._mutant, self._pid = None, 0
        return trial

    def _other_end(self, code: int, seconds: float) -> str:
        """Return why the tests ended without a failure. Raises RuntimeError if pytest itself failed."""
        if seconds >= self._limit:
            return "time limit"
        if code == pytest.ExitCode.USAGE_ERROR:
            assert self._mutant is not None
            raise RuntimeError(f"{self._mutant.name}: pytest ended with {code}:\n{(self.tree / 'out').read_text()}")
        return f"pytest ended with {code}" if code else ""

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if self._pid:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
        shutil.rmtree(self.tree, ignore_errors=True)


class _Broken:
    """Plugin that records files that cannot be collected."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note.write_text(f"{self._note.read_text()}{report.nodeid}\n")


class _FirstFailure:
    """Plugin that runs tests in the given order, and records the first failure."""

    def __init__(self, note: Path, tests: Sequence[str]) -> None:
        # Opened now: a test may go on as another user.
        self._note = os.open(note, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._place = {name: place for place, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._place.get(item.nodeid, len(self._place)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(f"{IMPORT_ONLY} {report.nodeid}")

    def _write(self, name: str) -> None:
        if not os.fstat(self._note).st_size:
            os.write(self._note, name.encode())


def _run(tree: Path, arguments: Sequence[str], plugin: object) -> NoReturn:
    """Run pytest in this forked child, with `tree` as its only tree."""
    code: Any = 70
    try:
        output = os.open(tree / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.chdir(tree)
        os.environ.clear()
        os.environ.update(_ENVIRONMENT | environment(tree))
        sys.path[:] = [str(tree), *(one for one in sys.path if one and Path(one).resolve() != ROOT)]
        for name in [name for name in sys.modules if name.partition(".")[0] in TREE]:
            del sys.modules[name]
        plugins = ("-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist")
        options = ["-q", "-x", "--timeout=60", *plugins, *_IMPORTED_EARLY]
        code = pytest.main([*options, *arguments], plugins=[plugin])
    except BaseException:  # noqa: BLE001  # outermost edge of a forked child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


_ENVIRONMENT = dict(os.environ)
_IMPORTED_EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Options for plugins whose assertions cannot be rewritten, because they were imported before the fork."""
