"""What the `orch` program begins with: few imports, so that Ctrl-C ends it without a word while more are read."""

import os
import signal
import sys


def main() -> None:
    """Load the program, then run it; nothing has been done that would have to be told of before."""
    before = signal.getsignal(signal.SIGINT)  # ignored in the background of a script: it stays so
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _use_utf8()
    from orchestrator.cli.main import main as run  # the slow part, on a busy login node

    signal.signal(signal.SIGINT, before)
    run()


def _use_utf8() -> None:
    """Begin again in Python's UTF-8 mode, where the locale has another encoding.

    A node may have another locale, and a name has the same bytes everywhere. Output keeps the terminal's encoding.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding() == "utf-8" or not sys.executable:
        return
    os.environ["PYTHONUTF8"] = "1"
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
