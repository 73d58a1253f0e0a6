"""The global order of sequences is a permutation that does not depend on the number of ranks."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tokenization import shard_writer
from orchestrator.tokenization.tokenizers import SEPARATOR
from tests.trainer.worker.my_workload import Epochs, Points
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.protocol.token_shards import TokensError
from trainer.worker.data import NOT_TRAINED, Permutation, Positions, TokenData, TokenStream


def reader(folder: Path, dp_rank: int = 0, dp_size: int = 1, **over) -> TokenData:
    settings = {"seq_len": 16, "batch_size": 8, "micro_batch_size": 0, "seed": 3, "shuffle": True, **over}
    place = {"shuffle": settings.pop("shuffle"), "dp_rank": dp_rank, "dp_size": dp_size, "device": torch.device("cpu")}
    place["held_out"] = settings.pop("held_out", 0)
    return TokenData(folder, TrainConfig(**settings), **place)


@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_a_permutation_visits_everything_once(size, seed):
    order = Permutation(size, seed)
    assert sorted(order[index] for index in range(size)) == list(range(size))


def test_seeds_give_different_orders():
    orders = {tuple(Permutation(50, seed)[index] for index in range(50)) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(text_tokens, dp_size):
    one = reader(text_tokens)
    many = [reader(text_tokens, rank, dp_size) for rank in range(dp_size)]
    for _ in range(3):
        expected = torch.cat(one.take())
        assert torch.equal(torch.cat([torch.cat(rank.take()) for rank in many]), expected)


@pytest.fixture
def masked_tokens(tmp_path: Path) -> Path:
    """Shards of rows that are trained in different parts, some not at all within a sequence."""
    rows = [{"prompt": "x" * (7 * number % 40), "completion": "y" * (5 * number % 23)} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shard_writer.prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    return tmp_path / "out"


def test_tokens_that_are_not_trained_are_read_but_are_no_targets(masked_tokens):
    data, plain = reader(masked_tokens, shuffle=False), TokenStream(masked_tokens)
    (batch,) = data.take()
    rows = torch.stack([plain.slice(16 * number, 17) for number in range(8)])
    assert bool((rows < 0).any())
    assert bool((rows >= 0).any())
    assert torch.equal(batch.inputs, torch.where(rows < 0, -1 - rows, rows)[:, :-1])
    assert int(batch.inputs.max()) <= 256
    assert torch.equal(batch.targets == NOT_TRAINED, rows[:, 1:] < 0)
    assert batch.trained == (rows[:, 1:] >= 0).sum()


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 2), (2, 2), (4, 1)])
def test_the_loss_weights_each_trained_token_alike_on_any_number_of_ranks(masked_tokens, dp_size, micro):
    (whole,) = reader(masked_tokens).take()
    ranks = [reader(masked_tokens, rank, dp_size, micro_batch_size=micro).take() for rank in range(dp_size)]
    parts = [part for batches in ranks for part in batches]
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    # As a workload divides by `trained`, and the loop averages over micro-batches and ranks.
    shares = [(part.targets != NOT_TRAINED).sum() / part.trained for part in parts]
    assert torch.stack(shares).mean().item() == pytest.approx(1.0)


@pytest.fixture
def mixed_tokens(tmp_path: Path) -> Path:
    """Three folders with different bytes, sizes and weights."""
    weights = []
    for letter, size, weight in (("a", 40_000, 0.7), ("b", 3_000, 0.28), ("c", 9_000, 0.02)):
        (tmp_path / f"{letter}.txt").write_text(letter * size)
        shard_writer.prepare([tmp_path / f"{letter}.txt"], tmp_path / letter)
        weights.append((tmp_path / letter, weight))
    shard_writer.mix_folders(weights, tmp_path / "mixed")
    return tmp_path / "mixed"


def test_a_mixture_has_its_shares_and_reads_every_sequence_of_an_epoch_once(mixed_tokens):
    data = reader(mixed_tokens)
    found = [data.sequence(position) for position in range(10 * 1024)]
    counts = Counter(part for part, _ in found)
    assert [counts[part] / 10_240 for part in range(3)] == pytest.approx([0.7, 0.28, 0.02], abs=0.0005)
    for part, total in enumerate((2500, 187, 562)):  # sequences of 16 tokens
        times = Counter(number for which, number in found if which == part)
        assert set(times) <= set(range(total))
        assert max(times.values()) - min(times[number] for number in range(total)) <= 1
    rows = [data.row(*sequence) for sequence in found[:200]]
    assert all(set(row.tolist()) <= {ord("abc"[part]), 256} for row, (part, _) in zip(rows, found, strict=False))


def test_a_mixture_does_not_depend_on_the_number_of_ranks_and_goes_on(mixed_tokens):
    one, ranks = reader(mixed_tokens), [reader(mixed_tokens, rank, 4) for rank in range(4)]
    for rank in ranks:
        rank.seek(8 * 500)
    one.seek(8 * 500)
    for _ in range(3):
        assert torch.equal(torch.cat([torch.cat(rank.take()) for rank in ranks]), torch.cat(one.take()))


def test_what_a_mixture_holds_out_is_not_trained(mixed_tokens):
    data = reader(mixed_tokens, held_out=3)
    held = [tuple(row.tolist()) for batch in data.held_out() for part in batch for row in part]
    assert len(held) == 3 * 8
    trained = {data.sequence(position) for position in range(5000)}
    assert data.sequences == reader(mixed_tokens).sequences - 3 * 8
    rows = {tuple(data.row(*sequence).tolist()) for sequence in trained}
    assert max(number for part, number in trained if part == 0) < 2500 - sum(ord("a") in row for row in held)
    assert len(rows) >= 3


def test_a_mixture_whose_folder_was_prepared_again_is_refused(mixed_tokens):
    shutil.rmtree(mixed_tokens.parent / "b")
    (mixed_tokens.parent / "b.txt").write_text("other" * 900)
    shard_writer.prepare([mixed_tokens.parent / "b.txt"], mixed_tokens.parent / "b")
    with pytest.raises(TokensError, match="b has other tokens than when .*mixed was mixed: mix it again"):
        reader(mixed_tokens)


def test_seek_goes_on_where_another_reader_stood(text_tokens):
    first = reader(text_tokens)
    for _ in range(5):
        first.take()
    second = reader(text_tokens)
    second.seek(first.consumed)
    assert torch.equal(first.take()[0], second.take()[0])


def test_what_is_left_out_is_exactly_the_batch_at_its_position(text_tokens):
    whole, partial = reader(text_tokens), reader(text_tokens)
    batches = {position: whole.take()[0] for position in range(0, 48, 8)}
    positions = Positions(partial)
    taken = [positions.take({8, 16, 40, 99}) for _ in range(3)]
    assert [position for position, _ in taken] == [0, 24, 32]
    assert all(torch.equal(batch[0], batches[position]) for position, batch in taken)
    assert partial.consumed == 40


def test_data_of_a_users_own_is_left_out_by_its_own_positions():
    data = Points(rank=1, of=3)
    position, _ = Positions(data).take({0, 3})
    assert (position, data.consumed) == (6, 9)
    data.consumed = torch.tensor(9)
    assert type(Positions(data).next) is int


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("length", [1, 4])
def test_a_position_is_one_batch_where_consumed_begins_anew_with_each_epoch(early, length):
    whole = Positions(Epochs(early=early, length=length))
    batches = dict(whole.take(()) for _ in range(12))
    assert list(batches) == sorted(batches)
    assert len(batches) == 12
    skip = list(batches)[3:10:3]
    partial = Positions(Epochs(early=early, length=length))
    assert dict(partial.take(skip) for _ in range(9)) == {at: one for at, one in batches.items() if at not in skip}


@pytest.mark.parametrize("early", [True, False])
def test_positions_go_on_after_a_restart(early):
    first = Positions(whole := Epochs(early=early))
    for _ in range(6):
        first.take(())
    again = Positions(data := Epochs(early=early))
    data.load_state_dict(whole.state_dict())
    again.seek(first.next)
    assert [again.take(()) for _ in range(6)] == [first.take(()) for _ in range(6)]


def test_every_epoch_sees_every_sequence_once_in_another_order(text_tokens):
    data = reader(text_tokens)
    first = [data.sequence(position)[1] for position in range(data.sequences)]
    second = [data.sequence(data.sequences + position)[1] for position in range(data.sequences)]
    assert sorted(first) == sorted(second) == list(range(data.sequences))
    assert first != second


def test_without_shuffling_the_text_is_read_in_order(text_tokens):
    data = reader(text_tokens, shuffle=False, batch_size=2)
    rows = data.take()[0]
    assert torch.equal(rows.flatten()[:17], TokenStream(text_tokens).slice(0, 17))
    assert rows[0, -1] == rows[1, 0]  # the last target of one sequence is the first input of the next


def test_micro_batches_are_the_batch_cut_in_pieces(text_tokens):
    whole = reader(text_tokens).take()[0]
    pieces = reader(text_tokens, micro_batch_size=2).take()
    assert [len(piece) for piece in pieces] == [2, 2, 2, 2]
    assert torch.equal(torch.cat(pieces), whole)


def test_sequences_cross_shard_borders(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(bytes(range(1, 101)))
    monkeypatch.setattr(shard_writer, "SHARD_TOKENS", 7)
    shard_writer.prepare([tmp_path / "text"], tmp_path / "out")
    stream = TokenStream(tmp_path / "out")
    assert stream.slice(3, 30).tolist() == list(range(4, 34))
    assert stream.slice(99, 2).tolist() == [100, SEPARATOR]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"batch_size": 9, "dp_size": 2}, "must be a multiple of the 2 data-parallel ranks"),
        ({"micro_batch_size": 3}, "must divide the 8 sequences"),
        ({"seq_len": 10**9}, "too few"),
    ],
)
def test_what_does_not_fit_is_said(text_tokens, over, message):
    with pytest.raises(ValueError, match=message):
        reader(text_tokens, **over)


@pytest.mark.parametrize("dp_size", [1, 4])
def test_what_is_held_out_is_the_end_of_the_data_and_is_not_trained_on(text_tokens, dp_size):
    whole = reader(text_tokens)
    ranks = [reader(text_tokens, rank, dp_size, held_out=2) for rank in range(dp_size)]
    assert ranks[0].sequences == whole.sequences - 2 * 8
    assert {ranks[0].sequence(position)[1] for position in range(ranks[0].sequences)} == set(range(ranks[0].sequences))
    batches = zip(*(rank.held_out() for rank in ranks), strict=True)
    found = torch.cat([torch.cat([part for share in batch for part in share]) for batch in batches])
    rows = [TokenStream(text_tokens).slice(number * 16, 17) for number in range(ranks[0].sequences, whole.sequences)]
    assert torch.equal(found, torch.stack(rows))


def test_data_of_which_nothing_is_left_to_train_on_is_refused(text_tokens):
    with pytest.raises(ValueError, match=r"too few for one sequence of 16 \+ 1 and the 9000 held-out batches"):
        reader(text_tokens, held_out=9000)
