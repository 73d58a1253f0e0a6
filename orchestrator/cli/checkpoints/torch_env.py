"""What must be said to torch before a verb imports it on a login node."""

import os
import warnings


def prepare() -> None:
    """One thread: many that wait for few cores are slower, and a login node is not ours alone. No word about NumPy."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
