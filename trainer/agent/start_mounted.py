"""Entry point of a mounted copy of orch's packages, for a Python without orch, such as an image's.

Copied to the folder as `__main__.py`, it is started as `python -u FOLDER ATTEMPT RUN_DIR SUBMISSION`, or as
`python FOLDER -m MODULE ARGUMENTS` for further processes. Python 3.6 or newer can read it, to report a version that
is too old.
"""

import os
import runpy
import sys

LEAST_PYTHON = (3, 11)
_NEVER_RETRY = 78  # trainer.protocol.failures.outcome.ExitCode, which an old Python cannot import


def main(arguments):  # type: ignore[no-untyped-def]  # an old Python must be able to read this file
    """Check the Python, and run the agent or another module. Return the exit code."""
    if sys.version_info < LEAST_PYTHON:
        version, least = (".".join(map(str, numbers)) for numbers in (sys.version_info[:3], LEAST_PYTHON))
        sys.stderr.write(
            f"orch-agent: refuses to start: {sys.executable} is Python {version}, and orch needs {least} or newer: "
            "install one in the image, or name it: cluster.python=PATH\n"
        )
        return _NEVER_RETRY
    if arguments[0] == "-m":
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    sys.path[0] = os.path.abspath(sys.path[0])  # this process changes its folder
    from trainer.agent.main import start

    return start(*arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # type: ignore[no-untyped-call]
