"""The page of a real run, which runs the logbook holds, and that a page leaves the exit code alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import write_run
from runs import run_door

SRC = Path(__file__).resolve().parents[1] / "src"
SMALL = ("experiment=quickstart", "trainer.max_steps=2", "test=false", "run_id=r")


def test_a_real_run_writes_its_page_into_its_folder_and_nothing_else(tmp_path):
    words = ("optimizer=sgd", "trainer.limit_test_batches=1", "test=true", "metrics=[f1,kappa]")
    done = run_door("train", *SMALL, *words, logs=tmp_path)
    assert done.code == 0, done.output
    own = [f"test/{name} {done.record['metrics'][f'test/{name}']:.4g}" for name in ("f1", "kappa")]
    assert " · ".join(own) in done.output.splitlines()[-1]
    assert done.output.strip().endswith("train/runs/r/page.md") and done.output.count("\n") <= 5
    text = done.folder.page.read_text()
    assert text.startswith("# r\n") and "trainer.max_steps=2" in text and "Confusion matrix" in text
    assert re.search(rf"\| kappa \| \S+ \| {done.record['metrics']['test/kappa']:.4g} \|", text)
    assert done.record["summary"]["changed"][:2] == [["trainer.max_steps", -1, 2], ["optimizer", "adamw", "sgd"]]
    assert not (tmp_path / "logbook").exists()


def test_a_run_that_is_to_be_kept_has_its_row_and_a_debugging_run_has_none(tmp_path):
    done = run_door("train", *SMALL, "logbook=keep", logs=tmp_path)
    assert done.code == 0 and done.output.strip().endswith("logbook/r/page.md"), done.output
    assert "| ✅ [r](r/page.md) | digits |" in (tmp_path / "logbook" / "README.md").read_text()
    words = ("experiment=quickstart", "debug=fast_dev_run", "run_id=d", "logbook=keep")
    debugged = run_door("train", *words, logs=tmp_path)
    assert (
        debugged.code == 0
        and debugged.folder.page.exists()
        and len(list((tmp_path / "logbook").glob("*/page.md"))) == 1
    )
    evaluated = run_door("eval", "ckpt_path=r", logs=tmp_path)
    assert (
        evaluated.code == 0
        and evaluated.folder.page.exists()
        and len(list((tmp_path / "logbook").glob("*/page.md"))) == 1
    )


@pytest.mark.parametrize("words", [["trainer.max_epochs=-3"], ["data.val_fraction=1", "trainer=ddp_sim"]])
def test_input_that_is_refused_leaves_no_folder(tmp_path, words):
    done = run_door("train", *SMALL, "logbook=keep", *words, logs=tmp_path)
    assert done.code == 2 and "error: " in done.output, done.output
    assert not (tmp_path / "train/runs/r").exists() and not (tmp_path / "logbook").exists()


@pytest.mark.slow
def test_a_resumed_run_whose_input_is_refused_keeps_its_folder(tmp_path):
    first = run_door("train", *SMALL, logs=tmp_path)
    assert first.code == 0, first.output
    words = ("resume=r", "trainer.max_steps=4", "trainer.limit_val_batches=1", "callbacks.checkpoints.monitor=val/f1")
    again = run_door("train", *words, logs=tmp_path)
    assert again.code == 2, again.output
    assert any(first.folder.checkpoints.iterdir()) and first.folder.record.exists()


def no_page() -> None:
    import lockstep.logbook.build

    def refuse(*_):
        raise MemoryError("no page today")

    lockstep.logbook.build.write_run_page = refuse


def test_a_failing_page_is_said_and_changes_no_exit_code(tmp_path):
    done = run_door("train", *SMALL, logs=tmp_path, before=no_page)
    assert done.code == 0, done.output
    assert (
        "The run's page was not written (MemoryError: no page today); python src/logbook.py build tries again."
        in done.output
    )


CONCLUDE = """
import sys
from pathlib import Path
from lockstep.launch.finish import conclude
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import set_up
set_up()
conclude(RunFolder(Path(sys.argv[1])), None, 0, [])
sys.exit(7)
"""


@pytest.mark.parametrize(("record", "screen"), [("broken", "read"), ("whole", "closed")])
def test_whatever_fails_after_a_run_leaves_its_exit_code(tmp_path, record, screen):
    folder = write_run(tmp_path, "run-1")
    if record == "broken":
        (folder / "run.json").write_text('{"status": ')
    read, write = os.pipe()
    if screen == "closed":
        os.close(read)
    arguments = [sys.executable, "-c", CONCLUDE, str(folder), str(tmp_path / "logbook")]
    done = subprocess.run(arguments, cwd=SRC, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 7 and done.stderr.count("The run's page was not written") == (record != "whole")
    assert (folder / "page.md").exists() == (record == "whole")
