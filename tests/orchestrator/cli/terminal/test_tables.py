"""Tables and sentences at every width: what is dropped first, and that no word is broken."""

from collections.abc import Sequence

import pytest

from orchestrator.cli.runs.status import TABLE
from orchestrator.cli.terminal.render import Screen
from orchestrator.cli.terminal.tables import MOST, Column, cell_width, folded_text, shorten_text, table_lines, wrap_line

HELD = (
    "saves fail since step 1500: No space left on device (/shared/home/someone/runs); make room there, or choose "
    "another folder; when it is fixed: orch resume finetune-ablation-seed7-1"
)


@pytest.mark.parametrize("value", ["/out put\n/a\x1b[31m\tb", ["/out put\n/a\x1b[31m\tb"]])
def test_a_row_is_one_line_in_a_pipe_whatever_a_path_contains(
    value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    Screen().listing("ckpt.ls", [Column("STEP", "step"), Column("WHERE", "where")], [{"step": 7, "where": value}])
    assert capsys.readouterr().out == "STEP\tWHERE\n7\t/out put /a b\n"


def drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    return table_lines(columns, cells, width, lambda piece, _: piece)


def status(width: int, run: str = "tiny-gpt-3", why: str = "") -> list[str]:
    shown = {
        "RUN": run, "STATE": "SUCCEEDED", "STEP": "2000/2000", "LOSS": "3.0102", "SAVED": "1h27m ago", "ETA": "12m05s",
        "CHECKPOINT": "2000 VERIFIED", "ATT.GEN": "1.1", "JOB": "481517", "NODES": "gpu[001-016]",
        "UPDATED": "4m22s ago", "TAGS": "sweep", "WHY": why,
    }  # fmt: skip
    return drawn(TABLE, [[shown[column.title] for column in TABLE]], width)


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (80, "RUN STATE STEP SAVED WHY"),
        (100, "RUN STATE STEP LOSS SAVED CHECKPOINT WHY"),
        (120, "RUN STATE STEP LOSS SAVED CHECKPOINT ATT.GEN UPDATED WHY"),
        (200, "RUN STATE STEP LOSS SAVED ETA CHECKPOINT ATT.GEN JOB NODES UPDATED TAGS WHY"),
    ],
)
def test_columns_are_dropped_in_order(width: int, titles: str) -> None:
    head, *_ = status(width, why="a node failed: a new job without gpu017 in 12 s")
    assert head.split() == titles.split()


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200, 400])
@pytest.mark.parametrize("run", ["a-1", "llama-70b-long-context-32k-warmup-1"])
def test_no_line_is_too_long_and_no_word_is_broken(width: int, run: str) -> None:
    lines = status(width, run, HELD)
    assert max(map(cell_width, lines)) <= width
    assert {*HELD.split(), run} <= {word for line in lines for word in line.split()}
    assert any(f"orch resume {HELD.split()[-1]}" in line for line in lines)


def test_long_reason_is_printed_below_its_row() -> None:
    lines = drawn(
        [Column("RUN", "run"), Column("STATE", "state"), Column("WHY", "why")],
        [("a-1", "HELD", HELD), ("b-1", "RUNNING", "job 7 is RUNNING")],
        80,
    )
    assert lines[0].split() == ["RUN", "STATE", "WHY"]
    assert lines[1] == "a-1  HELD"
    assert lines[2].startswith("    saves fail since")
    assert lines[-1] == "b-1  RUNNING  job 7 is RUNNING"


def test_narrow_table_prints_reasons_below() -> None:
    name = "n" * 50
    lines = drawn(
        [Column("RUN", "run"), Column("LOSS", "loss", drop_order=1), Column("WHY", "why")],
        [(name, "2.5", "a node failed: a new job without gpu017 in 12 s"), (name, "-", "-")],
        70,
    )
    assert lines == [
        f"RUN{' ' * 49}LOSS", f"{name}  2.5", "    a node failed: a new job without gpu017 in 12 s", f"{name}  -",
    ]  # fmt: skip


def test_empty_columns_go_and_numbers_stand_at_the_right() -> None:
    lines = drawn(
        [Column("STEP", "step", right=True), Column("PIN", "pin"), Column("NAME", "name")],
        [("7", "", "a"), ("1200", "-", "b")],
        80,
    )
    assert lines == ["STEP  NAME", "   7  a", "1200  b"]


@pytest.mark.parametrize("width", range(1, 60))
def test_folded_text_has_all_of_the_text_and_fits(width: int) -> None:
    text = f"{HELD} `orch submit x`, /a/very/long/path/without/any/space/in/it=and,more:{'x' * 70}"
    lines = folded_text(text, width)
    assert " ".join(lines) == text
    assert all(cell_width(line) <= width or " " not in line for line in lines)
    assert all(line == line.strip() for line in lines)


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_name_is_whole_on_the_narrowest_terminal(width: int) -> None:
    lines = status(width, "llama-70b-long-context-32k-warmup-1", HELD)
    assert {*HELD.split(), "llama-70b-long-context-32k-warmup-1"} <= {word for line in lines for word in line.split()}


def test_paths_and_commands_are_kept_whole() -> None:
    assert folded_text("see /shared/home/someone/runs", 14) == ["see", "/shared/home/someone/runs"]
    assert folded_text("then type orch resume tiny-1", 20) == ["then type", "orch resume tiny-1"]
    assert folded_text("then type `orch ckpt ls x`, please", 20) == ["then type", "`orch ckpt ls x`,", "please"]
    assert folded_text("orch resume a-very-long-name-1", 20) == ["orch resume", "a-very-long-name-1"]


def test_sentences_keep_their_indentation_and_hang_beside_a_label() -> None:
    assert wrap_line("  status   orch status x", 80) == ["  status   orch status x"]
    assert wrap_line("  one two three", 9) == ["  one two", "  three"]
    assert wrap_line("run      aa bb cc dd", 18, 9) == ["run      aa bb cc", "         dd"]
    assert wrap_line("run      aa bb cc dd", 14, 9) == ["run      aa bb cc dd"]
    assert wrap_line("", 80) == [""]


def test_wide_and_combining_characters_are_counted_as_they_are_drawn() -> None:
    assert [cell_width(text) for text in ("abc", "日本", "é", "e\u0301")] == [3, 4, 1, 1]


def test_long_sentence_is_cut_between_words() -> None:
    text = "word " * 100
    cut = shorten_text(text.strip())
    kept, _, more = cut.partition(" ... ")
    assert text.startswith(kept)
    assert len(kept) <= MOST
    assert kept.endswith("word")
    assert more == f"({len(text.strip()) - len(kept)} more characters: orch show)"
    assert shorten_text("x" * MOST) == "x" * MOST
    assert shorten_text("x" * 2 * MOST).startswith("x" * MOST + " ...")


def test_the_reasons_of_many_runs_are_cut() -> None:
    why = next(column for column in TABLE if column.key == "reason")
    assert len(why.show("word " * 1000)) < 2 * MOST
    assert why.show(None) == "-"
