"""Begin and end of programs that are one real rank each."""

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def begin() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    torch.set_num_threads(1)


def join(rank: int, size: int, meeting: Path) -> None:
    """Join the ranks that meet at this file."""
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=patience)


def end(results: Any) -> NoReturn:
    """Print the results and exit without shutting the interpreter down: threads of gloo may still free tensors."""
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()
    os._exit(0)
