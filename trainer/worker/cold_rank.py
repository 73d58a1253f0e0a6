"""Program of a cold-started rank. It installs handlers for Slurm's signals before it imports torch."""

import os

from trainer.protocol.messages.ranks import SPEC_VARIABLE, RankSpec
from trainer.protocol.rank_progress.progress import outlive_step_signals


def main() -> int:
    """Train as the rank described in the environment and return its exit code."""
    outlive_step_signals()
    from trainer.worker.main import rank_main  # importing torch takes seconds, during which a signal may arrive

    return rank_main(RankSpec.from_json(os.environ[SPEC_VARIABLE]))


if __name__ == "__main__":
    # Threads of a process group that lost its peers must not delay the exit.
    os._exit(main())
