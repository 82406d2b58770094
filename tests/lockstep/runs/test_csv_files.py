"""CSV: no cell is a formula, and a damaged line costs itself only."""

import io

import pytest

from lockstep.runs.csv_files import MAX_LINE, guarded, unguarded, whole_lines


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-x", "@SUM(A1)", "\t=1", "\r=1", "=", "-"])
def test_a_text_that_begins_like_a_formula(text):
    assert guarded(text) == "'" + text and unguarded(guarded(text)) == text


@pytest.mark.parametrize("value", ["-1.5", "+3", "-inf", "a=b", "", "'quoted'", -2.5, 7, None])
def test_numbers_and_other_texts_stay(value):
    assert guarded(value) == value


def test_names_with_an_apostrophe_stay():
    assert [unguarded(text) for text in ("'t hooft", "'", "x")] == ["'t hooft", "'", "x"]


def test_a_line_without_end_or_with_an_open_quote_is_left_out():
    long = "x" * (3 * MAX_LINE)
    text = f'a,b\n1,"2\n3,"4,5"\n{long}\n6,\x007\n8'
    assert list(whole_lines(io.StringIO(text))) == ["a,b\n", '3,"4,5"\n', "6,7\n", "8"]
    assert list(whole_lines(io.StringIO(long))) == []
