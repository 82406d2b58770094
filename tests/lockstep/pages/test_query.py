"""Runs of the logbook by an SQL condition: what is found, in what order and form, and what is refused."""

import csv
import io
import json
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

import lockstep.pages.query as module
from example_runs import write_run
from lockstep.pages.build import build
from lockstep.pages.query import find_runs, listing, query
from lockstep.runs.errors import UserError


@pytest.fixture(scope="module")
def logbook(tmp_path_factory):
    place = tmp_path_factory.mktemp("query")
    runs = {
        "a": {"metrics": {"val/acc": 0.5, "test/acc": 0.4}, "model": "vit_tiny_32"},
        "b": {"metrics": {"val/acc": 0.9, "Val/Acc": 0.1}, "model": "it's", "num_parameters": 2**40},
        "c": {"metrics": {"val/acc": "nan"}, "status": "failed", "tags": ["x", "y"]},
        "d": {"metrics": {}, "code": {"commit": "abc", "dirty": True}},
    }
    started = (f"2026-11-20T2{hour}:00:00Z" for hour in range(4))
    folders = [
        write_run(place / "logs", run_id, **{"started_at": next(started), **changes})
        for run_id, changes in runs.items()
    ]
    build(place / "logbook", folders)
    return place / "logbook"


def ids(logbook, *arguments, **options):
    return [run["run_id"] for run in find_runs(logbook, *arguments, **options)]


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("1", "abcd"),
        ("status = 'finished'", "abd"),
        ("val/acc > 0.45", "ab"),  # nan is no number, and above none
        ('"val/acc" > 0.45 and [test/acc] < 1', "a"),
        ("VAL/ACC >= 0.9", "b"),
        ("model = 'it''s'", "b"),
        ("model = 'val/acc'", ""),  # a text stays a text
        ("code.dirty and code.commit = 'abc'", "d"),
        ("num_parameters > 1e12", "b"),
        ("tags like '%\"y\"%'", "c"),
        ("epochs/2 = 6 and run_id in (select max(run_id) from runs)", "d"),
        ("throughput.step_seconds.p50 = 0.205 and trainer.devices is not null and run_id = 'a' -- so", "a"),
    ],
)
def test_a_condition_finds_its_runs(logbook, where, wanted):
    assert "".join(ids(logbook, where)) == wanted


def test_runs_are_sorted_and_those_without_a_value_come_last(logbook):
    assert "".join(ids(logbook, "1", "val/acc")) == "bacd"
    assert "".join(ids(logbook, "1", "val/acc", ascending=True)) == "abcd"


def test_a_sorted_list_says_how_many_had_no_value(logbook):
    assert listing(find_runs(logbook, "1", "test/acc"), "text", "test/acc").endswith(
        "4 runs, 3 of them without test/acc: last"
    )
    assert listing(find_runs(logbook, "1", "run_id"), "text", "run_id").endswith("\n4 runs")


def test_memory_is_what_the_pages_show_of_a_run(tmp_path):
    """A run on CPUs has its peak in the statistics of its ranks, and none in the record."""
    nodes = {"nodes": [{"node_rank": 0, "stats": {"rank0/memory_gib": {"max": 1.5}, "rank1/memory_gib": {"max": 2.5}}}]}
    run = write_run(tmp_path / "logs", "r", hardware=nodes, peak_memory_gib=None, accelerator="cpu")
    build(tmp_path / "logbook", [run])
    assert find_runs(tmp_path / "logbook", "peak_memory_gib > 2")[0]["peak_memory_gib"] == 2.5


@pytest.mark.parametrize(
    ("where", "sort", "said"),
    [
        ("modl = 1", None, "No run has 'modl': take model"),
        ('"val/ac" > 0', None, "No run has 'val/ac': take val/acc"),
        ("val > 0", None, "val/acc"),
        ("commit_ = 1", None, "take code.commit|take comm"),
        ("1", "val/ac", "take val/acc"),
        ("model =", None, "is no SQL that reads runs"),
        ("1); drop table runs; --", None, "no SQL"),
        ("load_extension('x')", None, "not authorized"),
        ("exists (select 1 from pragma_table_info('runs'))", None, "not authorized"),
        ("randomblob(1e9)", None, "not authorized"),
    ],
)
def test_what_is_no_condition_is_one_sentence(logbook, where, sort, said):
    with pytest.raises(UserError, match=said) as refused:
        find_runs(logbook, where, sort)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("where", "sort"), [("data = 'garden'", "val/acc_best"), ("1", "val/acc"), ("model = 'x'", None)]
)
def test_of_an_empty_logbook_no_name_is_offered(tmp_path, where, sort):
    with pytest.raises(
        UserError, match=r"^The logbook keeps no run yet: python src/logbook\.py keep RUN takes one in\.$"
    ):
        find_runs(tmp_path, where, sort)
    assert find_runs(tmp_path, "status = 'finished'") == []


def test_a_whole_number_too_large_for_sql_is_compared_as_a_float():
    with closing(module.in_memory([{"n": 2**70}], ["n"])) as table:
        assert table.execute("SELECT number FROM runs WHERE n > 1e21").fetchall() == [(0,)]


def test_nothing_but_reading_is_allowed():
    with closing(module.in_memory([{"run_id": "a"}], ["run_id"])) as table:
        assert table.execute("SELECT run_id FROM runs").fetchall() == [("a",)]
        for sql in ("ATTACH ':memory:' AS x", "PRAGMA user_version", "DELETE FROM runs", "CREATE TABLE x (y)"):
            with pytest.raises(module.sqlite3.DatabaseError, match="not authorized"):
                table.execute(sql)


def test_records_keep_their_types_and_columns_that_none_has_are_left_out(logbook):
    (run,) = json.loads(listing(find_runs(logbook, "run_id = 'd'"), "json"))
    assert run["code.dirty"] is True and run["num_nodes"] == 1 and run["versions.torch"] == "2.14.1"
    assert not [name for name in run if name.startswith(("val/", "hardware"))]
    (run,) = find_runs(logbook, "run_id = 'b'")
    assert run["val/acc"] == 0.9 and run["num_parameters"] == 2**40


def test_each_form_says_the_same(logbook):
    found = find_runs(logbook, "val/acc is not null", "val/acc")
    rows = list(csv.DictReader(io.StringIO(listing(found, "csv"))))
    assert [row["val/acc"] for row in rows] == ["0.9", "0.5"] and rows[0].keys() == found[0].keys()
    assert listing(found, "md", "val/acc").splitlines() == [
        "| run_id | status | model | data | trainer | epochs | test/acc | val/acc |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: |",
        "| b | finished | it's | cifar10 | ddp | 12 |  | 0.9 |",
        "| a | finished | vit_tiny_32 | cifar10 | ddp | 12 | 0.4 | 0.5 |",
    ]
    assert listing(found, "text", "val/acc").splitlines() == [
        "run_id  status    model        data     trainer  epochs  test/acc  val/acc",
        "b       finished  it's         cifar10  ddp          12                0.9",
        "a       finished  vit_tiny_32  cifar10  ddp          12       0.4      0.5",
        "2 runs",
    ]
    assert [listing([], form) for form in ("text", "json", "csv", "md")] == ["0 runs", "[]", "", ""]


def test_a_notebook_gets_a_frame_where_pandas_is_installed(logbook, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert query("run_id = 'a'", logbook=logbook)[0]["val/acc"] == 0.5
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: ("frame", len(rows))))
    assert query("val/acc > 0", sort="val/acc", logbook=logbook) == ("frame", 2)
