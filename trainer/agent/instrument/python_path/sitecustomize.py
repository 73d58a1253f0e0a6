"""Start orch's instrumentation in a user's program, and then the program's own `sitecustomize`.

Python imports this file at start-up, because the agent puts its folder first in PYTHONPATH. It needs only the standard
library and Python 3.9, and never raises an error of its own.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    if not os.environ.get("ORCH_CELLS") or os.environ.get("ORCH_INSTRUMENT") == "off":
        return
    try:
        path = os.path.join(os.path.dirname(_FOLDER), "import_hook.py")
        spec = importlib.util.spec_from_file_location("orch_import_hook", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["orch_import_hook"] = module
        spec.loader.exec_module(module)
        module.install()
        module.load_file("orch_package_finder", os.path.join(os.path.dirname(path), "orch_package.py")).install()
    except Exception as error:  # noqa: BLE001  # outermost edge: the program starts without instrumentation
        sys.modules.pop("orch_import_hook", None)
        if sys.stderr is not None:
            sys.stderr.write(f"orch: this program is not instrumented: {type(error).__name__}: {error}\n")


def _run_next() -> None:
    """Run the `sitecustomize` that Python would have imported without this one. Its errors are the program's."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_run_next()
