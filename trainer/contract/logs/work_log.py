"""The ranks' own proof of which rank trained which step, when: one line each, in a file for each node."""

import json
from typing import Any

from trainer.contract.logs.line_file import read_new_lines
from trainer.contract.run_dir import AttemptDir


def work_lines(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Every whole line of every rank, each rank's in the order of its steps; what is torn is skipped."""
    found = []
    for path in attempt.work_logs():
        for line in read_new_lines(path, 0)[0]:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return found
