"""What a start does for the first tier beside training: what died half-written there is collected."""

import threading

from checkpointing.engine.ranks.background_thread import start_background_thread
from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.save.saver import EmitEvent, Owner
from checkpointing.retention.policy import collect_debris
from checkpointing.tiers.tier import ResolvedTier


class DebrisCollector:
    """One pass at a time; whoever else deletes in this tier holds `alone` meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, place: ResolvedTier, owner: Owner, emit: EmitEvent) -> None:
        """Start a pass; no save must be under way at this moment, so that what is unfinished now is nobody's."""
        there = result_or_failed(place.catalog.names)
        if isinstance(there, Failed) or not there:
            return
        # No save takes a name that is there, and none of these goes by other hands before this is done.
        self.lock.acquire()

        def collect() -> None:
            try:
                collect_debris(place, owner, there, owner.fence, emit)
            finally:
                self.lock.release()

        self._thread = start_background_thread(collect, "checkpoint-tidying")

    def wait(self, patience: float = 10.0) -> None:
        """Until the pass is done; one that hangs is left to itself."""
        if self._thread is not None:
            self._thread.join(patience)
