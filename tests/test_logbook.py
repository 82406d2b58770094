"""The logbook's command line.

Every record of this repository's logbook can be read, and no link leads nowhere.
"""

import csv
import io
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from example_runs import write_run
from lockstep.logbook import build
from lockstep.logbook.build import summary_of, write_index, write_page
from lockstep.logbook.folders import NOTE_MARKS, read_run
from lockstep.logbook.report import report_html
from lockstep.process.files import utc_now
from lockstep.records.record import update_record
from lockstep.storage.s3 import Bucket
from logbook import main
from object_store import shared_store


@pytest.fixture
def logbook(tmp_path):
    """Calls the script with its own logs and logbook; returns the exit code."""
    for i, trainer in enumerate(("ddp", "fsdp")):
        started = f"2026-11-20T2{i}:00:00Z"
        write_run(
            tmp_path / "logs" / "train" / "runs",
            f"run-{trainer}",
            trainer=trainer,
            started_at=started,
        )
    places = ["--logbook", str(tmp_path / "logbook"), "--logs", str(tmp_path / "logs")]
    return lambda *words: main([*places, *map(str, words)])


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_logbook_holds_what_was_kept_until_it_is_removed(logbook, tmp_path, capsys):
    assert logbook("keep", "run-ddp", tmp_path / "logs/train/runs/run-fsdp") == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/logbook/run-fsdp/page.md\n")
    index = tmp_path / "logbook" / "README.md"
    assert "(run-ddp/page.md)" in index.read_text() and "(run-fsdp/page.md)" in index.read_text()
    assert logbook("build") == 0 and capsys.readouterr().out == f"{tmp_path}/logbook: 2 runs\n"
    capsys.readouterr()
    assert (
        logbook("keep", tmp_path / "logbook/run-ddp") == 2
        and "in the logbook already" in capsys.readouterr().err
    )
    assert logbook("remove", "ddp", tmp_path / "logs/train/runs/run-fsdp") == 0
    assert list(files(tmp_path / "logbook")) == [index] and "No runs yet" in index.read_text()
    assert all(
        (tmp_path / f"logs/train/runs/run-{name}/run.json").exists() for name in ("ddp", "fsdp")
    )


def test_compare_writes_a_page_and_a_report_with_links(logbook, tmp_path, capsys):
    logbook("keep", "run-ddp")
    before = files(tmp_path)
    capsys.readouterr()
    assert logbook("compare", "run-ddp", "fsdp") == 0 and files(tmp_path) == before
    said = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    assert "Training time" in said and "7 min 11 s (×1.00)" in said
    page, report = tmp_path / "logbook" / "two.md", tmp_path / "logbook/two-ways.html"
    assert (
        logbook("compare", "run-ddp", "fsdp", "--md", page, "--html", report, "--title", "Two ways")
        == 0
    )
    assert capsys.readouterr().out.splitlines()[-2:] == [str(page), str(report)]
    assert "# Two ways" in page.read_text() and "<title>Two ways</title>" in report.read_text()
    index = (tmp_path / "logbook/README.md").read_text()
    assert "- **[Two ways](two.md)**" in index and "[Two ways](two-ways.html)" in index
    kept = (tmp_path / "logbook/run-ddp/page.md").read_text()
    assert "Interactive report: [Two ways](../two-ways.html)" in kept
    assert (
        "[Two ways](../../../../logbook/two-ways.html)"
        in (tmp_path / "logs/train/runs/run-fsdp/page.md").read_text()
    )


def test_the_index_has_the_answer_of_a_comparison(logbook, tmp_path):
    page = tmp_path / "logbook/two.md"
    page.parent.mkdir()
    words = ("compare", "run-ddp", "run-fsdp", "--md", page, "--title", "Is FSDP slower?")
    assert logbook(*words) == 0
    note = "Yes, by 7 % on *two* cores. The rest\nis detail."
    page.write_text(page.read_text().replace(NOTE_MARKS[0], f"{NOTE_MARKS[0]}\n\n{note}\n"))
    assert logbook(*words) == 0
    index = (tmp_path / "logbook/README.md").read_text()
    assert "- **[Is FSDP slower?](two.md)** Yes, by 7 % on *two* cores.\n" in index


def test_the_index_begins_with_questions_and_ends_with_all_runs(logbook, tmp_path):
    runs = tmp_path / "logs/train/runs"
    write_run(runs, "silent")
    write_run(runs, "alone")
    for name, note in (
        ("alone", "Best *so far* ([why](curves.svg)). More."),
        ("run-ddp", "Linked."),
    ):
        (runs / name / "page.md").write_text(
            f"# {name}\n{NOTE_MARKS[0]}\n- {note}\n{NOTE_MARKS[1]}\n"
        )
    page = tmp_path / "logbook/two.md"
    assert logbook("keep", "run-ddp", "run-fsdp", "alone", "silent") == 0
    assert logbook("compare", "ddp", "fsdp", "--md", page, "--title", "Is <it> slower?") == 0
    index = (tmp_path / "logbook/README.md").read_text()
    head, questions, others, table = index.split("\n## ")
    assert questions.splitlines()[2:5] == [
        "- **[Is &#60;it&#62; slower?](two.md)**",
        "",
        "  Runs: [run-ddp](run-ddp/page.md), [run-fsdp](run-fsdp/page.md)",
    ]
    alone = "- [alone](alone/page.md): Best *so far* ([why](alone/curves.svg))."
    assert others.splitlines()[2:] == [alone]
    assert table.startswith("All runs\n") and table.count("/page.md)") == 4


def test_answered_questions_come_first(logbook, tmp_path):
    for name, note in (("a", ""), ("b", "Yes.")):
        page = tmp_path / f"logbook/{name}.md"
        logbook("compare", "run-ddp", "run-fsdp", "--md", page, "--title", name)
        page.write_text(page.read_text().replace(NOTE_MARKS[0], f"{NOTE_MARKS[0]}\n{note}"))
    assert logbook("build") == 0
    index = (tmp_path / "logbook/README.md").read_text()
    assert index.index("**[b](b.md)** Yes.") < index.index("[a](a.md)")


def test_the_page_of_groups_says_what_is_not_held_fixed(logbook, tmp_path):
    write_run(tmp_path / "logs/train/runs", "longer", epochs=99, tags=["longer"])
    page = tmp_path / "groups.md"
    assert logbook("compare", "tags=example,trainer=ddp", "tags=longer", "--md", page) == 0
    assert "**Not held fixed between these runs: the number of epochs.**" in page.read_text()


def test_a_run_without_summary_has_its_error_in_a_comparison(logbook, capsys):
    assert logbook("compare", "run-ddp", "run-fsdp") == 0
    assert "86.43 % ± 0.34 %" in capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")


def test_a_kept_page_links_no_report_outside_of_the_logbook(logbook, tmp_path):
    logbook("keep", "run-ddp")
    report = tmp_path / "elsewhere.html"
    assert logbook("compare", "run-ddp", "run-fsdp", "--html", report) == 0
    assert "elsewhere.html" not in (tmp_path / "logbook/run-ddp/page.md").read_text()
    assert "elsewhere.html" in (tmp_path / "logs/train/runs/run-ddp/page.md").read_text()


def test_a_report_in_a_bucket_can_be_read_back(logbook, tmp_path, monkeypatch, capsys):
    store = shared_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "logs/train/runs/run-ddp/config.yaml").open(
        "a"
    ) as config:  # the store that the run used
        config.write(f"s3: {{endpoint_url: '{store.endpoint_url}'}}\n")
    bucket = store.new_bucket()
    words = ("--html", f"s3://{bucket}/a/b/one.html", "--title", "One")
    assert logbook("compare", "run-ddp", *words) == 0
    address = f"{store.endpoint_url}/{bucket}/a/b/one.html"
    assert capsys.readouterr().out.splitlines()[-1] == address
    held = store.client().get_object(Bucket=bucket, Key="a/b/one.html")
    assert (
        held["ContentType"] == "text/html; charset=utf-8"
        and b"<title>One</title>" in held["Body"].read()
    )
    assert f"[One]({address})" in (tmp_path / "logs/train/runs/run-ddp/page.md").read_text()


@pytest.fixture
def bucket(monkeypatch):
    """The address of an empty bucket, which boto3's own variables lead to."""
    store = shared_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.endpoint_url)
    return Bucket(f"s3://{store.new_bucket()}/runs")


def test_a_run_that_only_its_bucket_has_is_kept(logbook, bucket, tmp_path):
    folder = tmp_path / "logs/train/runs/run-ddp"
    for name in ("run.json", "config.yaml", "metrics.csv", "page.md"):
        if (folder / name).exists():
            bucket.upload(f"run-ddp/{name}", folder / name)
    bucket.write("run-ddp/tensorboard/events.out.tfevents.1", b"1")
    bucket.write("run-ddp/checkpoints/best-step00000001-00000000.ckpt", b"1")
    shutil.rmtree(folder)
    assert logbook("keep", f"{bucket.uri}/run-ddp") == 0
    kept = read_run(tmp_path / "logbook/run-ddp")
    assert kept.record.summary["folder"] == f"{bucket.uri}/run-ddp"
    assert kept.value("optimizer.lr") == 0.0005 and kept.metrics["val/acc"]
    page = (kept.folder / "page.md").read_text()
    assert f"tensorboard --logdir {bucket.uri}/run-ddp/tensorboard" in page
    assert "](run-ddp/page.md)" in (tmp_path / "logbook/README.md").read_text()
    assert {path.name for path in kept.folder.iterdir()} == {
        "page.md", "run.json", "metrics.csv", "curves.svg",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("below", "message"), [("", "no run at"), ("/..", "cannot name"), ("/a run", "cannot name")]
)
def test_an_address_without_a_run_is_refused(logbook, bucket, below, message, capsys, tmp_path):
    assert logbook("keep", f"{bucket.uri}{below}") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "logbook").exists()


def test_a_table_has_any_field_metric_or_option(logbook, tmp_path, capsys):
    logbook("keep", "run-ddp")
    write_run(tmp_path / "logs/train/runs", "run-late", metrics={"test/acc": 0.75})
    write_run(tmp_path / "logs/train/runs", "run-nan", metrics={"test/acc": "nan"})
    capsys.readouterr()
    columns = ("test/acc", "optimizer.lr", "throughput.step_seconds.p50", "status")
    assert logbook("table", "--csv", "--sort", "test/acc", *columns) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["run_id"] for row in rows][2:] == ["run-late", "run-nan"] and len(rows) == 4
    assert list(rows[2].values()) == ["run-late", "0.75", "0.0005", "0.205", "finished"]
    assert logbook("table") == 0 and "run-fsdp" in capsys.readouterr().out
    assert logbook("table", "optimizer.rl") == 2 and "optimizer.lr" in capsys.readouterr().err


def test_the_kept_diff_has_the_bytes_of_the_runs(logbook, tmp_path):
    diff = b"-# caf\xe9\r\n+# coffee\r\n"
    (tmp_path / "logs/train/runs/run-ddp/code.diff").write_bytes(diff)
    assert logbook("keep", "run-ddp") == 0
    assert (tmp_path / "logbook/run-ddp/code.diff").read_bytes() == diff
    assert "coffee" in (tmp_path / "logbook/run-ddp/page.md").read_text()


def test_a_table_has_groups_and_counts_of_both_folders(logbook, tmp_path, capsys):
    logbook("keep", "run-ddp", "run-fsdp")
    shutil.rmtree(tmp_path / "logs/train/runs/run-fsdp")
    with (tmp_path / "logs/train/runs/run-ddp/config.yaml").open("a") as config:
        config.write("choices: {augmentation: trivialaugment}\n")
    capsys.readouterr()
    assert logbook("table", "augmentation") == 0
    head, first, second, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["run_id", "augmentation"]
    assert ["run-ddp", "trivialaugment"] in (first.split(), second.split())
    assert last == f"1 runs of {tmp_path}/logs, 1 only of {tmp_path}/logbook"


def test_a_comparison_that_is_typed_again_keeps_title_and_words(logbook, tmp_path):
    page = tmp_path / "logbook" / "two.md"
    typed = ("compare", "run-ddp", "run-fsdp", "--md", page)
    assert logbook(*typed) == 0
    assert page.read_text().startswith("# run-ddp beside run-fsdp\n")
    text = page.read_text().replace("run-ddp beside run-fsdp", "Is FSDP <slower>?")
    page.write_text(text.replace(NOTE_MARKS[1], f"It **is**: 2×.\n{NOTE_MARKS[1]}"))
    assert logbook(*typed) == 0
    text = page.read_text()
    assert text.startswith("# Is FSDP &#60;slower&#62;?\n")
    assert f"{NOTE_MARKS[0]}\n\nIt **is**: 2×.\n\n{NOTE_MARKS[1]}" in text
    assert logbook(*typed, "--title", "Two") == 0
    assert page.read_text().startswith("# Two\n") and "It **is**" in page.read_text()


def test_a_title_that_nobody_wrote_follows_the_runs(logbook, tmp_path):
    write_run(tmp_path / "logs" / "train" / "runs", "run-dp", trainer="dp")
    page = tmp_path / "logbook" / "two.md"
    logbook("compare", "run-ddp", "run-fsdp", "--md", page)
    logbook("compare", "run-ddp", "run-dp", "--md", page)
    assert page.read_text().startswith("# run-ddp beside run-dp\n")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["compare", "run-ddp"], "needs at least two runs"),
        (
            ["compare", "run", "run-ddp"],
            "'run' means 2 runs (run-ddp, run-fsdp): give more of the run id.",
        ),
        (["remove", "run-dpd"], "No run 'run-dpd'"),
        (["compare", "run-ddp", "--html", "s3:///x"], "An S3 address is"),
        (["compare", "run-ddp", "--html", "/dev/null/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(logbook, capsys, arguments, said):
    logbook("keep", "run-ddp", "run-fsdp")
    assert logbook(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


# The logbook of this repository
LOGBOOK = Path(__file__).resolve().parents[1] / "logbook"
FOLDERS = sorted(path.parent for path in LOGBOOK.glob("*/run.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_of_every_run_is_that_of_its_record(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.logbook.folders.REPOSITORY", tmp_path)
    copy = shutil.copytree(folder, tmp_path / "logbook" / folder.name)
    for report in LOGBOOK.glob("*.html"):
        shutil.copy(report, tmp_path / "logbook")
    text = write_page(read_run(copy)).read_text()
    assert text == (folder / "page.md").read_text()
    assert (copy / "curves.svg").exists() == (folder / "curves.svg").exists()


def test_a_report_takes_all_runs_of_the_logbook():
    assert 10 <= len(FOLDERS) <= 32, "not too many"
    report = report_html("all", [read_run(folder) for folder in FOLDERS])
    assert all(folder.name in report for folder in FOLDERS)


def test_the_index_is_that_of_the_runs(tmp_path):
    copy = shutil.copytree(LOGBOOK, tmp_path / "logbook")
    write_index(copy)
    assert (copy / "README.md").read_text() == (LOGBOOK / "README.md").read_text()


def test_every_link_leads_somewhere():
    for page in sorted(LOGBOOK.rglob("*.md")):
        text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^()\s]+)\)", text):
            assert (
                re.match(r"[a-z]+:", target) or (page.parent / target.partition("#")[0]).exists()
            ), (page, target)


# A run that is alive: its trainer alone writes its run.json.


@pytest.fixture
def live(tmp_path):
    now = utc_now()
    return write_run(
        tmp_path / "logs/train/runs", "live", status="running", started_at=now, updated_at=now
    )


@pytest.mark.parametrize(
    "words", [("keep", "live"), ("compare", "live", "run-ddp", "--html", "r.html"), ("build",)]
)
def test_a_command_writes_nothing_into_a_live_run(logbook, live, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files(live)
    assert logbook(*words) == 0
    assert files(live) == before


def test_a_kept_copy_of_a_live_run_has_its_summary(logbook, live, tmp_path):
    assert logbook("keep", "live") == 0
    kept = read_run(tmp_path / "logbook/live")
    assert kept.record.status == "running"
    assert kept.record.summary["best"] == {"val/loss": 0.412, "val/acc": 0.871}


def test_a_record_written_during_keep_loses_nothing(logbook, tmp_path, monkeypatch):
    path = tmp_path / "logs/train/runs/run-ddp/run.json"
    writers = []

    def begin_to_write():
        with update_record(path) as record:
            record.best_checkpoint.step = 2100

    def slow_summary(run):
        writers.append(threading.Thread(target=begin_to_write))
        writers[0].start()
        time.sleep(0.3)
        return summary_of(run)

    monkeypatch.setattr(build, "summary_of", slow_summary)
    assert logbook("keep", "run-ddp") == 0
    writers[0].join()
    record = read_run(path.parent).record
    assert record.best_checkpoint.step == 2100 and record.summary["best"]["val/acc"] == 0.871


def test_a_kept_run_is_not_replaced_by_another(logbook, tmp_path, capsys):
    path = tmp_path / "logs/train/runs/run-ddp/run.json"

    def set_uuid(uuid):
        with update_record(path) as record:
            record.uuid = uuid

    set_uuid("a")
    # A run that goes on is kept again.
    assert logbook("keep", "run-ddp") == 0 and logbook("keep", "run-ddp") == 0
    set_uuid("b")
    assert logbook("keep", "run-ddp") == 2
    assert "another run of this id" in capsys.readouterr().err
    assert read_run(tmp_path / "logbook/run-ddp").record.uuid == "a"

    kept = (tmp_path / "logbook/run-ddp/page.md").read_bytes()
    page = tmp_path / "logbook/two.md"
    assert logbook("compare", "ddp", "fsdp", "--md", page, "--html", page.with_suffix(".html")) == 0
    assert "](run-ddp/page.md)" not in page.read_text()
    assert (tmp_path / "logbook/run-ddp/page.md").read_bytes() == kept


def test_the_logbook_gets_no_lock_files(logbook, tmp_path):
    logbook("keep", "run-ddp")
    logbook("compare", "run-ddp", "run-fsdp", "--html", tmp_path / "logbook/r.html")
    assert not list((tmp_path / "logbook").rglob("*.lock"))


@pytest.mark.parametrize(("folder", "name"), [("runs", "run-ddp"), ("runs/run-ddp", ".")])
def test_remove_never_removes_a_run_in_logs(folder, name, logbook, tmp_path, monkeypatch):
    logbook("keep", "run-ddp")
    monkeypatch.chdir(tmp_path / "logs" / "train" / folder)
    assert logbook("remove", name) == 0
    assert (tmp_path / "logs/train/runs/run-ddp/run.json").exists()
    assert not (tmp_path / "logbook/run-ddp").exists()


def test_the_run_of_the_working_folder_is_kept(logbook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "logs/train/runs/run-ddp")
    assert logbook("keep", ".") == 0
    assert (tmp_path / "logbook/run-ddp/page.md").exists()
    assert not (tmp_path / "logbook/run.json").exists()
