"""One real rank of a flush between tiers: arguments RANK SIZE FOLDER; commits twice, then drains and closes."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch.distributed as dist

from checkpointing.engine.collectives.group import RankGroup  # noqa: E402
from checkpointing.engine.save.flusher import Flusher, TransferTimeouts  # noqa: E402
from checkpointing.tiers.tier import RunTiers  # noqa: E402
from checkpointing.writer.link import WriterLink  # noqa: E402
from tests.checkpointing.made_checkpoint import OWNER, make, tier_at  # noqa: E402
from tests.checkpointing.rank_process import join  # noqa: E402

SIZE = 3 << 20


def flush(rank: int, size: int, folder: Path) -> dict[str, Any]:
    join(rank, size, folder / "store")
    places = (tier_at(folder / "fast"), tier_at(folder / "slow", bandwidth=20.0))
    link, reported = WriterLink.start(), []
    flusher = Flusher(
        RunTiers(places, places[0].storage),
        RankGroup(None),
        OWNER,
        lambda: link,
        lambda kind, data: reported.append([kind, data["step"]]),
        timeouts=TransferTimeouts(look=0.05),
    )
    for step in (10, 20):
        names = [None]
        if rank == 0:
            files = {".metadata": b"m", **{f"__{at}_0.distcp": bytes([step + at]) * SIZE for at in range(size)}}
            names = [make(places[0].storage, step, files=files)]
        dist.barrier()
        flusher.record_commit(names[0] or "")
    drained = flusher.drain(60.0)
    flusher.close()
    link.close()
    dist.destroy_process_group()
    return {"reported": reported, "drained": drained}


def main() -> None:
    sys.stdout.write(json.dumps(flush(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))) + "\n")
