"""The logbook's door: build, compare, publish, note; from folders and from a real S3 server."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import example_config, write_run
from logbook import main
from object_store import shared_store

SRC = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture
def door(tmp_path):
    """Calls the door with its own logs and logbook; returns the exit code."""
    for i, trainer in enumerate(("ddp", "fsdp")):
        started = f"2026-11-20T2{i}:00:00Z"
        write_run(tmp_path / "logs" / "train" / "runs", f"run-{trainer}", trainer=trainer, started_at=started)

    def call(*arguments: str, **options: str) -> int:
        named = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
        return main(
            ["--logbook", str(tmp_path / "logbook"), "--logs", str(tmp_path / "logs"), *named, *map(str, arguments)]
        )

    return call


def test_the_logbook_holds_what_was_kept_until_it_is_removed(door, tmp_path, capsys):
    assert door("build") == 0
    index = tmp_path / "logbook" / "README.md"
    assert "run-ddp" not in index.read_text() and (tmp_path / "logs/train/runs/run-ddp/page.md").exists()
    before = sorted((tmp_path / "logbook").rglob("*"))
    assert door("keep", "run-ddp", tmp_path / "logs/train/runs/run-fsdp") == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/logbook/vit_ddp.md\n")
    assert index.read_text().count("](vit_ddp.md#run-run-") >= 2
    assert door("build") == 0
    assert capsys.readouterr().out.endswith("up to date\n")
    assert door("remove", "ddp", "run-fsdp") == 0
    files = sorted(path for path in (tmp_path / "logbook").rglob("*") if path.is_file())
    assert files == [path for path in before if path.is_file()]
    assert (tmp_path / "logs/train/runs/run-ddp/run.json").exists()


def test_build_looks_again_at_kept_runs_alone(door, tmp_path):
    runs = tmp_path / "logs/train/runs"
    door("keep", "run-ddp")
    shutil.rmtree(runs / "run-ddp")
    write_run(runs, "run-ddp", epochs=77, updated_at="2099-01-01T00:00:00Z")
    assert door("build") == 0
    index = (tmp_path / "logbook" / "README.md").read_text()
    assert "| 77 |" in index and "run-fsdp" not in index


def test_a_damaged_record_keeps_no_other_run_out(door, tmp_path, capsys):
    broken = tmp_path / "logs/train/runs/broken/run.json"
    door("keep", "run-ddp")
    write_run(tmp_path / "logs/train/runs", "broken", experiment="broken")
    door("keep", "broken")
    broken.write_text('{"run_id": "bro')
    (tmp_path / "logs/train/runs/run-ddp/page.md").unlink(missing_ok=True)
    assert door("build") == 0
    assert (tmp_path / "logs/train/runs/run-ddp/page.md").exists()
    assert f"Left out: {broken.parent} (" in capsys.readouterr().err


def test_a_lost_run_that_asked_to_be_kept_is_named(door, tmp_path, capsys):
    dead = {"status": "running", "finished_at": None, "updated_at": "2026-11-20T20:16:00Z"}
    write_run(tmp_path / "logs/train/runs", "dead", config=example_config(logbook="keep"), **dead)
    assert door("build") == 0
    assert "Lost before they could be kept: python src/logbook.py keep dead" in capsys.readouterr().out
    assert door("keep", "dead") == 0
    assert "❔ lost" in (tmp_path / "logbook" / "README.md").read_text()


def test_a_comparison_shows_what_running_runs_have_become(door, tmp_path):
    runs = tmp_path / "logs/train/runs"
    door("keep", "run-ddp", "run-fsdp")
    shutil.rmtree(runs / "run-ddp")
    write_run(runs, "run-ddp", epochs=77, updated_at="2099-01-01T00:00:00Z")
    assert door("compare", "run-ddp", "run-fsdp", "--keep") == 0
    [page] = (tmp_path / "logbook").glob("compare-*.md")
    assert "77" in page.read_text()


def test_build_check_changes_nothing_and_says_what_is_old(door, tmp_path, capsys):
    door("keep", "run-ddp")
    assert door("build", "--check") == 0
    (tmp_path / "logbook" / "README.md").write_text("edited")
    assert door("build", "--check") == 2
    assert "README.md" in capsys.readouterr().err
    assert (tmp_path / "logbook" / "README.md").read_text() == "edited"


def test_compare_prints_both_runs_and_leaves_the_logbook_as_it_is(door, tmp_path, capsys):
    door("note", "run-ddp", "--name", "the good one")
    shutil.rmtree(tmp_path / "logs/train/runs/run-ddp")
    write_run(tmp_path / "logs/train/runs", "run-ddp", updated_at="2099-01-01T00:00:00Z")  # newer than the logbook's
    write_run(tmp_path / "logs/train/runs", "run-late", epochs=24, config=example_config(seed=7), fit_seconds=862.4)
    before = {path: path.read_bytes() for path in (tmp_path / "logbook").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert door("compare", "run-ddp", "run-late") == 0
    lines = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert re.split("  +", lines[0]) == ["", "the good one", "run-late"], "also of a note"
    cells = {name: rest for name, *rest in (re.split("  +", line) for line in lines)}
    assert cells["Status"] == ["✅ finished", "✅ finished"] and cells["Epochs"] == ["12", "24"]
    assert cells["Training time"] == ["7 min 11 s", "14 min 22 s (×2.00)"] and cells["seed"] == ["42", "7"]
    assert lines[1].index("run-late") == lines[0].index("run-late")
    assert lines[3].rindex("✅") == lines[0].index("run-late") - 1, "the ✅ before it takes two columns"
    assert "Not held fixed between these runs: the number of epochs." in lines
    assert {path: path.read_bytes() for path in (tmp_path / "logbook").rglob("*") if path.is_file()} == before


def test_compare_writes_a_page_that_later_builds_keep(door, tmp_path, capsys):
    assert door("compare", "run-ddp", "fsdp", "--keep", "--title", "DDP beside FSDP") == 0
    page = tmp_path / "logbook" / "compare-ddp-beside-fsdp.md"
    assert capsys.readouterr().out.endswith(f"\n\n{page}\n")
    text = page.read_text()
    assert "|  | ddp | fsdp |" in text and "(×1.00)" in text and "figures/compare-ddp-beside-fsdp.svg" in text
    page.unlink()
    door("build")
    assert page.read_text() == text
    assert "[DDP beside FSDP](compare-ddp-beside-fsdp.md)" in (tmp_path / "logbook" / "README.md").read_text()


def test_note_names_and_tags_a_run(door, tmp_path):
    assert door("note", "run-ddp", "Good *curve*.", "--name", "the good one", "--tag", "a|b", "--tag", "c") == 0
    assert door("note", "the good one", "More.") == 0
    page = (tmp_path / "logbook" / "vit_ddp.md").read_text()
    assert "## the good one" in page and "> Good *curve*.\n>\n> More." in page and "<code>a&#124;b</code> `c`" in page
    assert "a\\|b, c" in (tmp_path / "logbook" / "README.md").read_text()


def test_a_note_keeps_no_secret(door, tmp_path):
    door("note", "run-ddp", "used AKIAIOSFODNN7EXAMPLE")
    assert "AKIA" not in (tmp_path / "logbook" / "notes" / "run-ddp.md").read_text()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["compare", "run-ddp"], "takes two runs or more"),
        (["compare", "run", "run-ddp"], "'run' means 2 runs (run-ddp, run-fsdp): give more of the run id."),
        (["compare", "run-ddp", "run-fsdp", "--title", "x"], "give --keep too"),
        (["note", "run-dpd", "x"], "has no run 'run-dpd'; did you mean run-ddp? the newest are: run-ddp, run-fsdp."),
        (["note", "run-ddp"], "Nothing to note"),
        (["keep", "run"], "'run' means 2 runs (run-ddp, run-fsdp): give more of the run id."),
        (["keep", "run-dpd"], "has no run 'run-dpd'; did you mean run-ddp? the newest are: run-ddp, run-fsdp."),
        (
            ["remove", "run-dpd"],
            "The logbook has no run 'run-dpd'; did you mean run-ddp? the newest are: run-ddp, run-fsdp.",
        ),
        (["build", "/no/such/folder"], "holds no run"),
        (["publish", "run-ddp", "--to", "s3:///x"], "cannot name a bucket"),
        (["publish", "run-ddp", "--to", "/dev/null/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(door, capsys, arguments, said):
    door("keep", "run-ddp", "run-fsdp")
    assert door(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_of_many_runs_that_a_word_means_the_last_five_are_named(door, tmp_path, capsys):
    for number in range(6):
        write_run(tmp_path / "logs/train/multiruns/stop", f"stop_{number}")
    assert door("keep", "stop") == 2
    assert "'stop' means 6 runs (…, stop_1, stop_2, stop_3, stop_4, stop_5): give" in capsys.readouterr().err


def test_publish_into_a_folder_links_the_report(door, tmp_path):
    assert door("publish", "run-ddp", "run-fsdp", "--to", tmp_path / "reports", "--title", "Two ways") == 0
    page = (tmp_path / "reports" / "two-ways.html").read_text()
    assert "<title>Two ways</title>" in page
    logbook = tmp_path / "logbook"
    index = (logbook / "README.md").read_text()
    assert "[Two ways](../reports/two-ways.html), 2 runs" in index
    assert "GitHub shows an HTML file as its source: download it" in index
    assert (logbook / "vit_ddp.md").read_text().count("[Two ways](../reports/two-ways.html)") == 2


def test_a_report_outside_of_the_repository_is_one_file_that_no_page_names(door, tmp_path, tmp_path_factory, capsys):
    file = tmp_path_factory.mktemp("elsewhere") / "report.html"
    assert door("build") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "logbook").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert door("publish", "run-ddp", "run-fsdp", "--to", file, "--title", "Two ways") == 0
    assert capsys.readouterr().out == f"{file}\n" and "<title>Two ways</title>" in file.read_text()
    assert {path: path.read_bytes() for path in (tmp_path / "logbook").rglob("*") if path.is_file()} == before
    kept = tmp_path / "logbook" / "reports" / "old.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"title": "Old", "runs": ["run-ddp"], "address": str(file), "uri": str(file)}))
    door("keep", "run-ddp")
    assert not any(str(file.parent) in page.read_text() for page in (tmp_path / "logbook").glob("*.md"))


def test_a_file_s_name_is_the_report_s_also_under_a_base_address(door, tmp_path, tmp_path_factory):
    words = ("--to", tmp_path / "x" / "mine.html", "--title", "One")
    assert door("publish", "run-ddp", *words) == 0 and (tmp_path / "x" / "mine.html").is_file()
    assert "[One](../x/mine.html)" in (tmp_path / "logbook" / "vit_ddp.md").read_text()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.html"
    assert door("publish", "run-ddp", "--to", elsewhere, *words[2:], "--base", "https://pages.example/r") == 0
    assert "[One](https://pages.example/r/mine.html)" in (tmp_path / "logbook" / "vit_ddp.md").read_text()


def test_publish_to_s3_can_be_read_back_and_is_linked_without_a_signature(door, tmp_path, monkeypatch, capsys):
    store = shared_store()
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    bucket = store.new_bucket()
    assert (
        door("publish", "run-ddp", "--to", f"s3://{bucket}/a/b", "--title", "One", endpoint_url=store.endpoint_url) == 0
    )
    address = f"{store.endpoint_url}/{bucket}/a/b/one.html"
    assert capsys.readouterr().out.split() == [f"s3://{bucket}/a/b/one.html", address]
    held = store.client().get_object(Bucket=bucket, Key="a/b/one.html")
    assert held["ContentType"] == "text/html; charset=utf-8" and b"<title>One</title>" in held["Body"].read()
    assert f"[One]({address})" in (tmp_path / "logbook" / "README.md").read_text()


def test_a_base_address_is_what_readers_see(door, tmp_path):
    door("publish", "run-ddp", "--to", tmp_path / "x", "--title", "One", "--base", "https://pages.example/r/?token=abc")
    page = (tmp_path / "logbook" / "README.md").read_text()
    assert "https://pages.example/r/" in page and "abc" not in page


def test_the_door_and_the_pages_import_no_torch():
    code = (
        "import sys, lockstep.pages.build, lockstep.pages.html_report, logbook;"
        "print(sorted({'torch', 'lightning', 'hydra', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("keep", "remove", "build", "compare", "publish", "note"))


def test_two_comparisons_of_the_same_runs_have_two_pages(door, tmp_path):
    door("compare", "run-ddp", "run-fsdp", "--keep", "--title", "one")
    door("compare", "run-fsdp", "run-ddp", "--keep", "--title", "two")
    held = {path.stem: json.loads(path.read_text())["runs"] for path in (tmp_path / "logbook/comparisons").iterdir()}
    assert held == {"one": ["run-ddp", "run-fsdp"], "two": ["run-fsdp", "run-ddp"]}


def test_a_comparison_of_other_runs_leaves_the_earlier_one_with_the_same_title(door, tmp_path):
    write_run(tmp_path / "logs" / "train" / "runs", "run-late", trainer="fsdp", started_at="2026-11-20T23:00:00Z")
    for second in ("run-fsdp", "run-late", "run-fsdp"):
        assert door("compare", "run-ddp", second, "--keep") == 0
    held = {path.stem: json.loads(path.read_text())["runs"] for path in (tmp_path / "logbook/comparisons").iterdir()}
    assert held == {"ddp-beside-fsdp": ["run-ddp", "run-fsdp"], "ddp-beside-fsdp-2": ["run-ddp", "run-late"]}
    assert "[run-late]" in (tmp_path / "logbook" / "compare-ddp-beside-fsdp-2.md").read_text()
    index = (tmp_path / "logbook" / "README.md").read_text()
    assert "[ddp beside fsdp](compare-ddp-beside-fsdp.md)" in index
    assert "[ddp beside fsdp (2)](compare-ddp-beside-fsdp-2.md)" in index


def test_a_report_of_other_runs_leaves_the_earlier_one_with_the_same_title(door, tmp_path, capsys):
    write_run(tmp_path / "logs" / "train" / "runs", "run-late", trainer="fsdp", started_at="2026-11-20T23:00:00Z")
    for second in ("run-fsdp", "run-late", "run-fsdp"):
        assert door("publish", "run-ddp", second, "--to", tmp_path / "x") == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == ["ddp-beside-fsdp.html", "ddp-beside-fsdp-2.html", "ddp-beside-fsdp.html"]
    assert "run-late" not in (tmp_path / "x" / names[0]).read_text()
    assert "run-late" in (tmp_path / "x" / names[1]).read_text()


def test_query_prints_what_was_asked_for_and_a_wrong_column_ends_with_2(door, capsys):
    door("keep", "run-ddp", "run-fsdp")
    capsys.readouterr()
    assert door("query", "status = 'finished' and val/acc > 0.5", "--sort", "trainer", "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert [(run["run_id"], run["trainer"]) for run in records] == [("run-fsdp", "fsdp"), ("run-ddp", "ddp")]
    assert door("query", "trainer = 'ddp'") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 run"
    assert door("query", "trainr = 'ddp'") == 2
