"""What a start does for the first tier beside training: what died half-written there is collected."""

import threading

from checkpointing.engine.background import background
from checkpointing.engine.failure import Failed, attempt
from checkpointing.engine.saving import Owner, Tell
from checkpointing.retention import tidy
from checkpointing.tiers import TierPlace


class Tidying:
    """One pass at a time; whoever else deletes in this tier holds `alone` meanwhile."""

    def __init__(self) -> None:
        self.alone = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, place: TierPlace, owner: Owner, tell: Tell) -> None:
        """Start a pass; no save must be under way at this moment, so that what is unfinished now is nobody's."""
        there = attempt(place.catalog.names)
        if isinstance(there, Failed) or not there:
            return
        # No save takes a name that is there, and none of these goes by other hands before this is done.
        self.alone.acquire()

        def tidied() -> None:
            try:
                tidy(place, owner, there, owner.fence, tell)
            finally:
                self.alone.release()

        self._thread = background(tidied, "checkpoint-tidying")

    def wait(self, patience: float = 10.0) -> None:
        """Until the pass is done; one that hangs is left to itself."""
        if self._thread is not None:
            self._thread.join(patience)
