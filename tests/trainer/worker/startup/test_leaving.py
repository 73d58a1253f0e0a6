"""Ranks leave their world in an order that fails none of them."""

from tests.warm_programs import WarmPrograms


def test_rank_0_hosts_the_store_until_the_last_rank_has_left(programs: WarmPrograms) -> None:
    (ended,) = programs.run("tests.trainer.worker.startup.leaving_ranks", [()])
    assert ended.code == 0, ended.err
    assert ended.result() == [0, 0, 0, 0], ended.err
