"""Process of one row, and of the small processes that some rows start; started only by the benchmark."""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.rows import ROWS, Setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=4, metavar=("NAME", "FOLDER", "ROUNDS", "SCALE"))
    parser.add_argument("--starts", nargs=4, metavar=("SIDE", "SET", "SCALE", "FOLDER"))
    parser.add_argument("--rank", nargs=6, metavar=("TURN", "ACT", "SCALE", "FOLDER", "RANK", "SIZE"))
    print(json.dumps(_answer(parser.parse_args())))
    sys.stdout.flush()
    # gloo's threads may still be releasing tensors, and interpreter shutdown would end them noisily.
    os._exit(0)


def _answer(asked: argparse.Namespace) -> Any:
    if asked.starts:
        from benchmarks.checkpoint.first import starts

        side, set_name, scale, folder = asked.starts
        return starts(side, set_name, float(scale), Path(folder))
    if asked.rank:
        from benchmarks.checkpoint.ranks import rank_main

        turn, act, scale, folder, rank, size = asked.rank
        return rank_main(turn, act, float(scale), Path(folder), int(rank), int(size))
    name, folder, rounds, scale = asked.row
    row = next(row for row in ROWS if row.name == name)
    measured = row.measure(Setting(folder=Path(folder), rounds=int(rounds), scale=float(scale)))
    return dataclasses.asdict(measured)


if __name__ in ("__main__", "__mp_main__"):
    # DCP's process mode imports this file again in its child, which needs the same setup.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from benchmarks.checkpoint.torch_own import without_numpy

    without_numpy()

if __name__ == "__main__":
    main()
