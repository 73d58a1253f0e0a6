"""Entry point of the `orch` program, with few imports, so that Ctrl-C exits quietly while the others load."""

import os
import signal
import sys


def main() -> None:
    """Load the program, then run it. Until then Ctrl-C kills the process; there is nothing to report."""
    before = signal.getsignal(signal.SIGINT)  # a script's background jobs ignore Ctrl-C and must go on doing so
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _use_utf8()
    from orchestrator.cli.main import main as run  # slow on a busy login node

    signal.signal(signal.SIGINT, before)
    run()


def _use_utf8() -> None:
    """Restart in Python's UTF-8 mode if the locale has another encoding.

    Nodes may have other locales, but a name must have the same bytes everywhere. Output keeps the terminal's encoding.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
