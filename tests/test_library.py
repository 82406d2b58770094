"""The script of docs/library.md: Lockstep's parts in a plain pl.Trainer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.checkpoints.files import complete_checkpoints
from object_store import shared_store
from ranks import free_port

ROOT = Path(__file__).resolve().parents[1]
(SCRIPT,) = re.findall(
    r"```python\n# train_script.py\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL
)

READ = """
import sys, torch
from plain_task import Regression
module = Regression.load_from_checkpoint(sys.argv[1], map_location="cpu")
state = torch.load(sys.argv[1], weights_only=True)
assert all(torch.equal(value, state["state_dict"][name]) for name, value in module.state_dict().items())
assert {"optimizer_states", "loops"} <= state.keys() and not any(name.startswith("lockstep") for name in sys.modules)
"""


def run_train_script(folder, *words, ranks=1):
    (folder / "train_script.py").write_text(SCRIPT)
    (folder / "my_project.py").write_text(
        "from plain_task import Numbers as Data, Regression as Model\n"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/harness"), str(folder)])
    start = [sys.executable]
    if ranks > 1:
        start += [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            f"--master_port={free_port()}",
        ]
    environment = {
        **os.environ,
        **shared_store().environment(),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([*start, "train_script.py", "run", *words], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "run/run.json").read_text())


@pytest.mark.slow
def test_it_trains_records_uploads_and_goes_on(tmp_path, monkeypatch):
    store = shared_store()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.endpoint_url)
    bucket = store.new_bucket()
    record = run_train_script(tmp_path, "auto", "1", f"s3://{bucket}/runs")
    assert (record["status"], record["steps"], record["model"], record["monitor"]) == (
        "finished", 30, "Regression", "val_loss"
    )  # fmt: skip
    assert (
        record["metrics"]["val_loss_best"] < 4
        and record["upload"]["uri"]
        and not record["upload"]["error"]
    )
    names = [found["Key"] for found in store.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert any("best" in name for name in names) and "runs/run/metrics.csv" in names
    assert record["hardware"]["nodes"][0]["stats"] and len(complete_of(tmp_path, "best")) == 1
    reader = [sys.executable, "-c", READ, str(complete_of(tmp_path, "best")[0][0])]
    subprocess.run(
        reader,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/harness")},
        check=True,
    )
    script = SCRIPT.replace("max_epochs=3", "max_epochs=4")
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", script)
    assert run_train_script(tmp_path, "auto", "1")["steps"] == 40


def complete_of(folder, kind):
    return list(complete_checkpoints(folder / "run/checkpoints", kind))


@pytest.mark.slow
def test_it_trains_in_two_processes_under_torchrun(tmp_path):
    record = run_train_script(tmp_path, "fsdp", "2", ranks=2)
    assert (record["status"], record["steps"], record["world_size"]) == ("finished", 15, 2)
    [(_, sidecar)] = complete_of(tmp_path, "last")
    assert sidecar.step == 15
