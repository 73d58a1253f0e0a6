"""Program whose forked ranks compare small computations with those of one rank."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.warm_programs import WarmPrograms

Case = dict[str, Any]


def found(programs: WarmPrograms, program: str, ranks: int, cases: list[Case], patience: float = 300.0) -> list[Any]:
    (ended,) = programs.run(program, [(ranks, json.dumps(cases))], patience)
    assert ended.code == 0, ended.err
    return [list(of_case) for of_case in zip(*ended.result(), strict=True)]


def report(differences: Callable[[Case], Any], times: int = 2) -> None:
    def of_case(case: Case) -> list[Any]:
        return [differences(case) for _ in range(case.get("times", times))]

    sys.stdout.write(json.dumps(_found(int(sys.argv[1]), json.loads(sys.argv[2]), of_case)))


def _found(ranks: int, cases: list[Case], of_case: Callable[[Case], list[Any]]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                _be_rank(rank, ranks, Path(folder), cases, of_case)
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * ranks, codes
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _be_rank(rank: int, ranks: int, folder: Path, cases: list[Case], of_case: Callable[[Case], list[Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    (folder / f"{rank}.json").write_text(json.dumps([of_case(case) for case in cases]))
    dist.destroy_process_group()
