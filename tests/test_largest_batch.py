"""The largest batch in whole runs: under launchers and trainers, kept when a run goes on, nothing left when stopped."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from hosts import needs_hosts, two_hosts
from ranks import SRC, free_port
from runs import run_door, start_door

LIMITED = ["data=synthetic", "data.num_images=400", "data.num_test_images=20", "data.eval_batch_size=4",
           "model=small_cnn", "optimizer=sgd", "trainer.num_threads=1", "trainer.timeout_s=60"]  # fmt: skip
LIMIT = "trainer.memory_limit_gib=0.06"
MAX = [*LIMITED, LIMIT, "data.global_batch_size=max", "trainer.max_epochs=1", "test=false"]


def check_found(record, ranks=2):
    """What was found has run, and the run trained with it."""
    found = record["largest_batch"]
    assert record["global_batch_size"] == found["global"] == ranks * found["per_device"]
    assert found["bounded_by"] == "memory" and 1 < found["per_device"] < 400 // ranks
    assert found["probes"] <= 6 and found["out_of_memory"] <= 2
    assert 0.9 * found["limit_gib"] < found["peak_memory_gib"] <= found["limit_gib"]
    return found["global"]


def torchrun(tmp_path, *options):
    paths = [f"paths.{name}_dir={tmp_path / name}" for name in ("log", "data", "logbook")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    return subprocess.run([*command, str(SRC / "train.py"), *options, *paths], capture_output=True, text=True)


@pytest.mark.slow
def test_under_torchrun_every_rank_trains_with_the_same_and_a_run_that_goes_on_keeps_it(tmp_path):
    done = torchrun(tmp_path, *MAX, "trainer=ddp_sim", "run_id=night")
    assert done.returncode == 0, done.stdout + done.stderr
    record = tmp_path / "log/train/runs/night/run.json"
    first = json.loads(record.read_text())
    size = check_found(first)
    assert first["launcher"] == "torchrun" and first["status"] == "finished"
    more = [option for option in MAX if option != LIMIT and "max_epochs" not in option]
    again = torchrun(tmp_path, *more, "trainer=ddp_sim", "trainer.max_epochs=2", "resume=night")
    assert again.returncode == 0, again.stdout + again.stderr
    second = json.loads(record.read_text())
    assert (second["global_batch_size"], second["epochs"]) == (size, 2)
    assert second["largest_batch"] == first["largest_batch"] and "Looking for" in done.stdout


@needs_hosts
@pytest.mark.slow
def test_on_two_hosts_all_ranks_probe_together(tmp_path):
    with two_hosts(tmp_path) as hosts:
        started = [
            host.start([".venv/bin/python", "src/train.py", *MAX, "trainer=fsdp_sim", "trainer.devices=1",
                        "trainer.num_nodes=2"], MASTER_ADDR=hosts[0].address, MASTER_PORT="29500",
                       NODE_RANK=str(rank))
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        assert [process.wait(150) for process in started] == [0, 0], "\n".join(host.output() for host in hosts)
        [path] = (hosts[0].project / "logs/train/runs").glob("*/run.json")
        record = json.loads(path.read_text())
        check_found(record)
        assert record["num_nodes"] == 2 and record["status"] == "finished"
        assert all(host.empty_within(5) for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(["trainer=allreduce_sim"], 2, marks=pytest.mark.slow),
        (["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"], 1),
    ],
)
def test_other_trainers(tmp_path, options, ranks):
    done = run_door("find_batch_size", *LIMITED, LIMIT, *options, logs=tmp_path)
    assert done.code == 0, done.output
    found = done.record["largest_batch"]
    assert done.record["world_size"] == ranks
    assert found["bounded_by"] == "memory" and found["peak_memory_gib"] <= found["limit_gib"], done.output


def test_dp_says_why_not(tmp_path):
    done = run_door("find_batch_size", *LIMITED, LIMIT, "trainer=dp", logs=tmp_path)
    assert done.code == 2 and done.output.count("\n") == 1
    assert "trainer=dp asks for 2 GPUs and this machine has no GPU: trainer=ddp_sim works here" in done.output


def test_sigterm_in_the_middle_leaves_no_process_and_no_run(tmp_path):
    started = start_door("train", *MAX, "trainer=ddp_sim", logs=tmp_path)
    own = psutil.Process(started.process.pid)
    started.wait_for(lambda: len(own.children()) == 2)
    children = own.children()
    own.send_signal(signal.SIGTERM)
    done = started.done(20)
    assert done.code in (128 + signal.SIGTERM, -signal.SIGTERM), done.output
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not list(tmp_path.glob("train/runs/*")), done.output
