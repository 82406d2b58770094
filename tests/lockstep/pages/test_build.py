"""From run folders to pages: what changes, what does not, what two writers do to each other."""

import json
import os
import shutil
import subprocess
import threading

import pytest

from example_runs import example_config, write_run
from lockstep.pages.build import build, keep_run, kept_folders, lost_folders, remove_runs, run_folders_under
from lockstep.pages.comparison_page import save_comparison
from lockstep.pages.facts import RunFacts
from lockstep.pages.notes import add_note, run_note_path
from lockstep.pages.page_set import archived
from lockstep.pages.publish import Report, save_report
from lockstep.pages.source import dump, read_source
from lockstep.runs.errors import UserError
from lockstep.runs.files import utc_now

NOW = "2026-11-21T00:00:00Z"


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rows(logbook):
    lines = (logbook / "README.md").read_text().split("## All runs")[1].strip().split("\n")
    return [line for line in lines[2:] if line.startswith("|")]


def test_a_rebuild_without_news_changes_nothing(logbook, tmp_path):
    before = snapshot(logbook)
    stamps = {path: path.stat().st_mtime_ns for path in logbook.rglob("*")}
    assert build(logbook, [], NOW) == []
    assert snapshot(logbook) == before
    assert {path: path.stat().st_mtime_ns for path in logbook.rglob("*")} == stamps


def test_pages_come_from_the_sources_alone(logbook, tmp_path):
    before = snapshot(logbook)
    shutil.rmtree(tmp_path / "runs")
    for path in [*logbook.glob("*.md"), *logbook.glob("figures/*")]:
        path.unlink()
    build(logbook, [], NOW)
    assert snapshot(logbook) == before


def test_recording_runs_one_by_one_equals_building_them_at_once(tmp_path):
    folders = [write_run(tmp_path / "runs", f"run-{i}", started_at=f"2026-11-20T1{i}:00:00Z") for i in range(4)]
    for folder in (folders[2], folders[0], folders[3], folders[1], folders[2]):
        keep_run(folder, tmp_path / "one")
    build(tmp_path / "all", folders)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "all")


def test_newest_first_and_failed_runs_keep_their_rows(logbook):
    found = rows(logbook)
    assert [row.split("](")[0].split("[")[1] for row in found] == [
        "2026-11-20_22-40-00_ee33ff", "2026-11-20_21-40-00_cc22dd", "DDP baseline",
    ]  # fmt: skip
    assert "❌ out of memory" in found[0] and "1 (12 steps lost, 31 s down)" in found[0]
    assert "a\\|b, &lt;b&gt;" in found[0]


def test_the_best_run_is_chosen_by_validation(tmp_path):
    """By the accuracy of the checkpoint that the monitor chose: not by the test, nor by another epoch."""
    by_loss = {"monitor": "val/loss", "monitor_mode": "min"}
    metrics = {"val/acc_best": 0.5, "val/acc": 0.99, "test/acc": 0.9, "test/images": 10_000}
    folders = [
        write_run(tmp_path / "runs", "lucky", metrics=metrics, **by_loss),
        write_run(tmp_path / "runs", "sound", metrics={**metrics, "val/acc_best": 0.7, "test/acc": 0.8}, **by_loss),
    ]
    build(tmp_path / "logbook", folders, NOW)
    best = (tmp_path / "logbook" / "README.md").read_text().split("## All runs")[0].replace("\N{NO-BREAK SPACE}", " ")
    assert "[sound]" in best and "[lucky]" not in best and "| **80.00 %** | 70.00 % ± 0.65 of 5,000 |" in best


def test_a_run_that_is_removed_leaves_nothing(tmp_path):
    logbook = tmp_path / "logbook"
    runs = [write_run(tmp_path / "runs", name, experiment=name) for name in ("one", "two", "three")]
    build(logbook, [runs[0], runs[1]], NOW)
    save_comparison(logbook, "both", ["one", "two"])
    build(logbook, now=NOW)
    before = snapshot(logbook)
    build(logbook, [runs[2]], NOW)
    add_note(run_note_path(logbook, "three"), "A note.")
    save_comparison(logbook, "with three", ["one", "three"])
    save_comparison(logbook, "all", ["one", "two", "three"])
    save_report(logbook, Report("shown", "Shown", ("three",), "reports/shown.html", "reports/shown.html"))
    (logbook / "reports" / "shown.html").write_text("")
    remove_runs(["three"], logbook)
    page = logbook / "compare-all.md"
    assert "No longer in the logbook: `three`." in page.read_text()
    for path in (page, logbook / "figures/compare-all.svg", logbook / "comparisons/all.json"):
        path.unlink()
    build(logbook, now=NOW)
    assert snapshot(logbook) == before


def test_what_asked_to_be_kept_and_died_is_found(tmp_path):
    runs = tmp_path / "train/runs"
    dead = {"status": "running", "finished_at": None, "updated_at": "2026-11-20T20:16:00Z"}
    keep = example_config(logbook="keep")
    lost = write_run(runs, "lost", config=keep, **dead)
    write_run(runs, "unasked", **dead)
    write_run(runs, "finished", config=keep)
    kept = write_run(runs, "kept", config=keep, **dead)
    build(tmp_path / "logbook", [kept])
    assert lost_folders(tmp_path, tmp_path / "logbook") == [lost]
    assert kept_folders(tmp_path, tmp_path / "logbook") == [kept]


def test_only_a_test_on_all_images_can_be_the_best(tmp_path):
    few = {"test/acc": 1.0, "test/correct": 10, "test/images": 10}
    folders = [write_run(tmp_path / "runs", "all"), write_run(tmp_path / "runs", "few", metrics=few)]
    save_comparison(tmp_path / "logbook", "both", ["all", "few"])
    build(tmp_path / "logbook", folders, NOW)
    text = (tmp_path / "logbook" / "README.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    best = text.split("## All runs")[0]
    assert "**86.43 %**" in best and "[few]" not in best
    assert "| 100.00 % of 10 |" in text and "| 86.43 % |" in text
    page = (tmp_path / "logbook" / "vit_ddp.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "**100.00 %** (10 of 10 images), a part of the 10,000 test images" in page
    assert "**86.43 %** (8,643 of 10,000 images) |" in page
    page = (tmp_path / "logbook" / "compare-both.md").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| Test accuracy | 86.43 % | 100.00 % of 10 |" in page
    assert "the number of test images" in page


def test_an_evaluation_is_neither_the_best_run_nor_the_one_before(tmp_path):
    metrics = {"test/acc": 1.0, "test/correct": 10_000, "test/images": 10_000}
    at = [f"2026-11-20T1{hour}:00:00Z" for hour in range(3)]
    runs = tmp_path / "logs/train/runs"
    write_run(runs, "one", started_at=at[0])
    write_run(tmp_path / "logs/eval/runs", "again", started_at=at[1], task_name="eval", metrics=metrics)
    write_run(runs, "two", started_at=at[2], metrics={"test/acc": 0.5})
    logbook = tmp_path / "logbook"
    build(logbook, run_folders_under(tmp_path / "logs"), NOW)
    text = (logbook / "README.md").read_text()
    assert len(rows(logbook)) == 3 and "[again]" not in text.split("## All runs")[0]
    assert "**50.00" in text.split("## All runs")[0], "the better one by validation"
    page = (logbook / "vit_ddp.md").read_text()
    assert "[one]" in page.split("## ")[1] and "[again]" not in page.split("## ")[1], page


def test_a_best_that_never_arrived_is_not_at_the_address_of_the_one_before(tmp_path):
    best = {"path": "checkpoints/best-step00000900.ckpt", "sha256": "ab" * 32, "step": 900, "epoch": 9}
    for name, step, shown in (("sent", 900, "s3://b/best-900"), ("left", 100, "checkpoints/best-step00000900.ckpt")):
        upload = {"uri": f"s3://b/best-{step}", "step": step, "error": "unreachable" if step == 100 else None}
        run = write_run(tmp_path / name, name, best_checkpoint=best, upload=upload, metrics={"test/acc": 1.0})
        build(tmp_path / f"logbook-{name}", [run], NOW)
        index = (tmp_path / f"logbook-{name}" / "README.md").read_text().split("## All runs")[0]
        assert shown in index and ("s3://b/best-100" not in index)


def test_a_run_that_the_logbook_shows_as_running_is_looked_at_again(tmp_path):
    runs, logbook = tmp_path / "runs", tmp_path / "logbook"
    now = utc_now()
    live = write_run(runs, "live", status="running", finished_at=None, updated_at="2026-11-20T20:16:00Z", epochs=1)
    build(logbook, [live])
    assert "❔ lost" in rows(logbook)[0]
    shutil.rmtree(live)
    write_run(runs, "live", status="running", finished_at=None, updated_at=now, epochs=2)
    keep_run(write_run(runs, "other"), logbook)
    assert any("▶ running" in row and "[live]" in row for row in rows(logbook))


def test_a_start_with_other_code_is_named(tmp_path):
    code = {"commit": "1a2b3c4d5e6f7", "dirty": True, "tree_hash": "x"}
    restart = {"at": "2026-11-20T20:19:00Z", "resumed_step": 700, "lost_steps": 5, "downtime_s": 60, "code": code}
    build(tmp_path / "logbook", [write_run(tmp_path / "runs", "run-1", restarts=[restart])], NOW)
    page = (tmp_path / "logbook" / "vit_ddp.md").read_text()
    assert "| with other code |" in page and "commit `1a2b3c4d5e6f` with uncommitted changes" in page


def test_the_gpus_of_dp_share_a_batch_in_one_process():
    record = {"world_size": 1, "num_gpus": 4, "global_batch_size": 256, "per_device_batch_size": 256}
    facts = RunFacts({"run_id": "r", "record": {**record, "trainer": "dp"}})
    assert facts.batch_formula == "256 = 64 per device × 4 devices × 1 accumulated" and facts.world == "1 with 4 GPUs"


def test_the_memory_of_a_process_is_not_that_of_a_gpu():
    stats = {"node_rank": 0, "stats": {"rank0/memory_gib": {"max": 3.0}}}
    known = {"hardware": {"nodes": [stats]}, "accelerator": "gpu"}
    assert RunFacts({"run_id": "r", "record": known}).peak_memory_gib is None
    assert RunFacts({"run_id": "r", "record": {**known, "accelerator": "cpu"}}).peak_memory_gib == 3.0


def test_a_run_that_went_on_stays_one_row(tmp_path):
    folder = write_run(tmp_path / "runs", "run-1", status="interrupted", updated_at="2026-11-20T20:18:00Z")
    keep_run(folder, tmp_path / "logbook")
    assert "⏸ interrupted" in rows(tmp_path / "logbook")[0]
    record = json.loads((folder / "run.json").read_text())
    restart = {"at": "2026-11-20T20:19:00Z", "resumed_step": 700, "lost_steps": 5, "downtime_s": 60}
    record.update(status="finished", updated_at="2026-11-20T20:30:00Z", restarts=[restart])
    (folder / "run.json").write_text(json.dumps(record))
    keep_run(folder, tmp_path / "logbook")
    (row,) = rows(tmp_path / "logbook")
    assert "✅ finished" in row and "1 (5 steps lost, 60 s down)" in row


def test_an_older_copy_of_a_run_folder_does_not_undo_its_page(tmp_path):
    new = write_run(tmp_path / "new", "run-1", updated_at="2026-11-20T21:00:00Z")
    old = write_run(tmp_path / "old", "run-1", updated_at="2026-11-20T20:00:00Z", status="running")
    build(tmp_path / "logbook", [new])
    before = snapshot(tmp_path / "logbook")
    build(tmp_path / "logbook", [old])
    assert snapshot(tmp_path / "logbook") == before


def test_a_clock_that_was_set_back_leaves_no_page_behind(tmp_path):
    """The run went on a month earlier, says its clock: it has restarted since, or done more steps, or ended."""
    logbook, before, earlier = tmp_path / "logbook", "2026-11-20T21:00:00Z", "2026-10-20T21:00:00Z"
    later_states = (
        {"steps": 100, "restarts": [{"at": earlier, "resumed_step": 90}], "status": "running"},
        {"steps": 150, "restarts": [{"at": earlier, "resumed_step": 90}], "status": "running"},
        {"steps": 150, "restarts": [{"at": earlier, "resumed_step": 90}], "status": "finished"},
    )
    build(logbook, [write_run(tmp_path / "first", "run-1", steps=120, status="failed", updated_at=before)])
    for number, state in enumerate(later_states):
        folder = write_run(tmp_path / str(number), "run-1", updated_at=earlier, **state)
        build(logbook, [folder])
        assert read_source(logbook / "runs" / "run-1.json")["record"]["steps"] == state["steps"]
        assert read_source(logbook / "runs" / "run-1.json")["record"]["status"] == state["status"]
    build(logbook, [tmp_path / "first" / "run-1"])
    assert read_source(logbook / "runs" / "run-1.json")["record"]["steps"] == 150


def test_a_neighbour_that_ended_is_seen_whatever_the_time_of_its_file(tmp_path):
    runs, logbook = tmp_path / "runs", tmp_path / "logbook"
    live = write_run(runs, "live", status="running", finished_at=None)
    build(logbook, [live])
    shutil.rmtree(live)
    live = write_run(runs, "live", status="finished")
    os.utime(live / "run.json", (1, 1))
    keep_run(write_run(runs, "other"), logbook)
    assert any("✅ finished" in row and "[live]" in row for row in rows(logbook))


def test_a_running_source_reads_as_lost_once_its_heartbeat_is_old():
    record = {"status": "running", "updated_at": "2026-11-21T00:00:00Z"}
    source = {"run_id": "r", "record": record}
    assert RunFacts(source, "2026-11-21T00:04:00Z").status == "running"
    assert RunFacts(source, "2026-11-21T00:06:00Z").status == "lost"


def test_runs_that_end_at_once_on_one_machine(tmp_path):
    folders = [write_run(tmp_path / "runs", f"run-{i}", started_at=f"2026-11-20T1{i}:00:00Z") for i in range(8)]
    threads = [threading.Thread(target=keep_run, args=(folder, tmp_path / "logbook")) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows(tmp_path / "logbook")) == 8
    assert build(tmp_path / "logbook") == []
    assert not list((tmp_path / "logbook").rglob("*.part"))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_runs_on_two_branches_merge_without_conflict(tmp_path):
    repository, names = tmp_path / "repository", ["run-1", "run-2", "run-3"]
    folders = [write_run(tmp_path / "runs", name, started_at=f"2026-11-2{i}T10:00:00Z") for i, name in enumerate(names)]

    def git(*arguments):
        done = subprocess.run(
            ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    repository.mkdir()
    git("init", "-q", "-b", "main")
    for branch, folder in [("main", folders[0]), ("left", folders[1]), ("right", folders[2])]:
        if branch != "main":
            git("checkout", "-q", "-b", branch, "main")
        keep_run(folder, repository / "logbook")
        git("add", ".")
        git("commit", "-q", "-m", branch)
    git("merge", "-q", "--no-edit", "left")
    build(repository / "logbook")
    build(tmp_path / "at-once", folders)
    assert snapshot(repository / "logbook") == snapshot(tmp_path / "at-once")


def test_notes_survive_and_stale_files_go(logbook):
    (logbook / "runs" / "2026-11-20_22-40-00_ee33ff.json").unlink()
    (logbook / "mine.md").write_text("# a page of my own\n")
    (logbook / "figures" / "mine.svg").write_text("<svg/>")
    add_note(run_note_path(logbook, "2026-11-20_20-15-00_aa11bb"), "Second thought.")
    build(logbook, [], NOW)
    assert len(rows(logbook)) == 2
    assert not list(logbook.glob("figures/*ee33ff*")) and (logbook / "mine.md").exists()
    assert (logbook / "figures" / "mine.svg").exists()
    page = (logbook / "vit_ddp.md").read_text()
    assert "> Baseline of the *report*.\n>\n> Second thought." in page and "`paper`" in page


def test_no_secret_of_a_run_folder_reaches_the_logbook(tmp_path):
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    folder = write_run(
        tmp_path / "runs", "run-1", config=example_config(s3={"secret_key": "hunter2", "uri": f"https://a:{secret}@h/"}),
        command=f"AWS_SECRET_ACCESS_KEY={secret} python src/train.py s3.password=hunter2", tags=[secret],
        code={"commit": "c", "dirty": True}, error={"message": f"GET https://h/k?X-Amz-Signature=hunter2 {secret}"},
    )  # fmt: skip
    (folder / "code.diff").write_text(f"+api_key = 'hunter2'\n+# {secret}\n")
    (folder / "nvidia-smi-node0-end.txt").write_text(f"python --token hunter2 {secret}")
    keep_run(folder, tmp_path / "logbook")
    for name, data in snapshot(tmp_path / "logbook").items():
        assert b"hunter2" not in data and secret.encode() not in data, name


def test_older_runs_move_to_pages_that_never_change_again():
    assert archived([], 3) == ([], [])
    assert archived(list(range(5)), 3) == ([], [0, 1, 2, 3, 4])
    assert archived(list(range(7)), 3) == ([[0, 1, 2]], [3, 4, 5, 6])
    assert archived(list(range(12)), 3)[0][:2] == archived(list(range(10)), 3)[0]


def test_a_comparison_follows_a_run_that_moves_to_an_older_page(tmp_path):
    logbook = tmp_path / "logbook"
    build(logbook, [write_run(tmp_path / "runs", "run-00")])
    source = json.loads((logbook / "runs" / "run-00.json").read_text())
    for i in range(1, 39):
        source["record"]["started_at"] = f"2026-11-20T20:15:{i:02d}Z"
        (logbook / "runs" / f"run-{i:02d}.json").write_text(dump(source))
    save_comparison(logbook, "both", ["run-00", "run-38"])
    build(logbook)
    page = logbook / "compare-both.md"
    assert "(vit_ddp.md#run-run-00)" in page.read_text()
    keep_run(write_run(tmp_path / "runs", "run-39", started_at="2026-11-20T20:16:00Z"), logbook)
    assert "(vit_ddp-older-1.md#run-run-00)" in page.read_text()
    assert "(vit_ddp.md#run-run-38)" in page.read_text() and build(logbook) == []


@pytest.mark.slow
def test_a_thousand_runs(tmp_path):
    """Timed in benchmarks/logbook_build.py; here: all of them are there, on pages that GitHub still renders."""
    logbook = tmp_path / "logbook"
    folder = write_run(tmp_path / "runs", "run-0")
    build(logbook, [folder])
    source = json.loads((logbook / "runs" / "run-0.json").read_text())
    for i in range(1, 1000):
        source["run_id"] = f"run-{i}"
        source["record"]["started_at"] = f"2026-01-{1 + i // 60:02d}T10:{i % 60:02d}:00Z"
        (logbook / "runs" / f"run-{i}.json").write_text(dump(source))
    build(logbook)
    pages = [logbook / "README.md", *logbook.glob("older-runs-*.md")]
    links = [line for page in pages for line in page.read_text().split("\n") if line.startswith("| 2026")]
    assert len(links) == 1000 and len(pages) == 3
    assert max(page.stat().st_size for page in logbook.glob("*.md")) < 500_000
    assert len(list(logbook.glob("figures/*.svg"))) == 2000


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="is no run folder"):
        build(tmp_path / "logbook", [tmp_path / "runs"])
    (tmp_path / "logbook" / "runs").mkdir(parents=True)
    (tmp_path / "logbook" / "runs" / "x.json").write_text("<<<<<<< HEAD")
    with pytest.raises(UserError, match="restore it from git"):
        build(tmp_path / "logbook")


def test_run_folders_of_runs_and_sweeps_are_found(tmp_path):
    one = write_run(tmp_path / "train" / "runs", "run-1")
    two = write_run(tmp_path / "train" / "multiruns" / "sweep", "run-2")
    assert run_folders_under(tmp_path) == sorted([one, two])
    assert run_folders_under(one) == [one]


def test_a_logbook_that_cannot_be_written_raises_for_the_caller_to_log(tmp_path):
    folder = write_run(tmp_path / "runs", "run-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        keep_run(folder, tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "runs"]


def test_measurements_stand_in_the_index(logbook):
    (logbook / "measurements").mkdir()
    (logbook / "measurements" / "parity.md").write_text("# Parity | of all\n\ntext\n")
    build(logbook, [], NOW)
    text = (logbook / "README.md").read_text()
    assert "## Measurements\n\n- [Parity \\| of all](measurements/parity.md)" in text
