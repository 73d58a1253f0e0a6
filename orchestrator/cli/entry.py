"""What the `orch` program begins with: few imports, so that Ctrl-C ends it without a word while more are read."""

import signal


def main() -> None:
    """Load the program, then run it; nothing has been done that would have to be told of before."""
    before = signal.getsignal(signal.SIGINT)  # ignored in the background of a script: it stays so
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from orchestrator.cli.main import main as run  # the slow part, on a busy login node

    signal.signal(signal.SIGINT, before)
    run()
