"""Stop requests: read from the progress cell at a step boundary, and served once."""

from trainer.contract.ranks.progress import ProgressCell, StopReason


class StopFlag:
    """One rank's view of what its agent asks for.

    A request to save and go on stays in the cell until the agent has seen the save's event, many steps
    later perhaps; `served` makes sure that it is answered by one save only.
    """

    def __init__(self, cell: ProgressCell) -> None:
        self._cell = cell
        self._served: tuple[StopReason, float] | None = None

    def asked(self) -> StopReason:
        """What this rank puts into the step's reduction."""
        request = self._cell.read_stop_request()
        if request != self._served:
            self._served = None
        return StopReason.NONE if self._served else request[0]

    def served(self) -> None:
        """Every rank has agreed on a save: do not ask for the same one again."""
        request = self._cell.read_stop_request()
        self._served = request if request[0] == StopReason.SAVE_AND_GO_ON else None
