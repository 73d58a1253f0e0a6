"""How evenly tokens are spread over the experts of each layer, once in many steps."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from trainer.worker.reporting.rank_comparison import EVERY


def expert_loads(step: int, loads: Sequence[float], layers: int) -> dict[str, Any]:
    """Tokens of each expert beside the mean of its layer: the least, the median, the most, and whose that is.

    `loads`: of all ranks, for one layer after the other. Empty but at every EVERYth step of the run.
    """
    if step % EVERY or not loads or not sum(loads):
        return {}
    experts = len(loads) // layers
    rows = [loads[first : first + experts] for first in range(0, len(loads), experts)]
    shares = [load * experts / sum(row) for row in rows for load in row]
    most = max(shares)
    layer, expert = divmod(shares.index(most), experts)
    return {
        "experts": {
            "least": round(min(shares), 4), "median": round(median(shares), 4), "most": round(most, 4),
            "layer": layer, "expert": expert,
        }
    }  # fmt: skip
