from __future__ import annotations

import io
import math

from chai_eval.report import Difference, Header, Row, render, render_sweep

FACTS = (("model", "tiny, float32 on cpu"), ("method", "chai, clusters " + "9×1 " * 60))
ROWS = [
    Row("piqa", "acc_norm", 100, 0.69, 0.67, Difference(-2.0, -6.124, 2.125), paper=-2.0),
    Row("arc_challenge", "acc_norm", 1172, 0.31, 0.31, Difference(-0.001, -0.5, 0.5), paper=None),
    Row("wikitext", "word_perplexity", 62, 12.3456, 13.0, Difference(65.44, math.nan, math.nan), percent=False),
]


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def printed(header: Header, rows: list[Row], *, terminal: bool = False) -> str:
    stream = Stream(terminal)
    render(header, rows, stream)
    return stream.getvalue()


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_pipe_gets_whole_lines_of_markdown_with_every_cell() -> None:
    text = printed(Header("chai", FACTS, in_paper=True), ROWS)
    assert "9×1 " * 60 in text
    found = cells(text)
    assert found[0] == ["task", "metric", "n", "MHA", "CHAI", "difference (pp)", "95 % interval", "paper (pp)"]
    assert found[2] == ["piqa", "acc_norm", "100", "69.00", "67.00", "-2.00", "-6.12 to +2.12", "-2.00"]
    assert found[3][5:] == ["+0.00", "-0.50 to +0.50", "–"]


def test_columns_line_up() -> None:
    table = [line for line in printed(Header("chai"), ROWS).splitlines() if line.startswith("|")]
    bars = [[index for index, character in enumerate(line) if character == "|"] for line in table]
    assert all(each == bars[0] for each in bars)


def test_a_metric_that_is_no_share_is_shown_as_it_is_and_without_points() -> None:
    assert cells(printed(Header("chai"), ROWS))[4][3:] == ["12.35", "13", "+0.6544 (raw)", "–"]


def test_a_model_that_the_paper_does_not_have_gets_no_column_for_it() -> None:
    assert "paper" not in printed(Header("chai", FACTS), ROWS)


def test_the_baseline_alone_has_no_second_score() -> None:
    found = cells(printed(Header("mha", in_paper=True), [Row("piqa", "acc_norm", 100, 0.798, paper=79.8)]))
    assert found[0] == ["task", "metric", "n", "MHA", "paper (%)"]
    assert found[2] == ["piqa", "acc_norm", "100", "79.80", "79.8"]


def test_where_a_row_has_fidelity_all_have_its_columns_before_the_papers() -> None:
    close = [
        Row("piqa", "acc_norm", 100, 0.69, 0.67, Difference(-2.0, -6.1, 2.1), True, -2.0, 0.4, 0.8125),
        Row("boolq", "acc", 100, 0.69, 0.67, Difference(-2.0, -6.1, 2.1), True, None, 0.000012345, 1.0),
        Row("arc_easy", "acc", 100, 0.69, 0.67, Difference(-2.0, -6.1, 2.1), True, None, 123.4, None),
        ROWS[0],
    ]
    found = cells(printed(Header("chai", in_paper=True), close))
    assert found[0][-4:] == ["95 % interval", "KL", "same token (%)", "paper (pp)"]
    assert [row[-3:] for row in found[2:]] == [
        ["0.400", "81.2", "-2.00"],
        ["1.23e-05", "100.0", "–"],
        ["123", "–", "–"],
        ["–", "–", "-2.00"],
    ]
    assert "KL" not in printed(Header("chai"), ROWS)


def test_a_terminal_gets_the_same_cells() -> None:
    text = printed(Header("chai", FACTS, in_paper=True), ROWS, terminal=True)
    for cell in ("piqa", "69.00", "67.00", "-2.00"):
        assert cell in text


def test_a_sweep_is_one_table_with_what_was_swept_over_in_front() -> None:
    runs = [
        ("method=mha", Header("mha", in_paper=True), [Row("piqa", "acc_norm", 100, 0.69, paper=79.8)]),
        ("method=chai task=[piqa,boolq]", Header("chai", in_paper=True), ROWS[:1]),
    ]
    for terminal in (False, True):
        stream = Stream(terminal)
        render_sweep(runs, stream)
        assert "method=chai task=[piqa,boolq]" in stream.getvalue()
    stream = Stream(terminal=False)
    render_sweep(runs, stream)
    found = cells(stream.getvalue())
    assert found[0][:6] == ["run", "task", "metric", "n", "MHA", "score"]
    assert found[2] == ["method=mha", "piqa", "acc_norm", "100", "69.00", "–", "–", "–", "–"]
    assert found[3][1:] == cells(printed(Header("chai", in_paper=True), ROWS[:1]))[2]
