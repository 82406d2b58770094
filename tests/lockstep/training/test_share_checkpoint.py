"""All ranks go on from one checkpoint, the newest that any node has; its bytes go where they are missing."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from faults import signal_at_step
from local_ranks import run_ranks
from lockstep.distributed.process_group import join
from lockstep.launch.plan import ResumePoint, RunPlan, read_plan
from lockstep.runs.batch import Batch
from lockstep.runs.files import Checksum
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_record, write_record
from lockstep.storage.checkpoint_files import Sidecar, checkpoint_name, measure, newest_whole, write_sidecar
from lockstep.training import share_checkpoint as module
from lockstep.training.share_checkpoint import newest_offer, share_checkpoint
from object_store import sharded
from ranks import free_port
from runs import Done, start_door

CPU = torch.device("cpu")


def test_the_furthest_checkpoint_wins_and_rank_zero_where_nobody_says():
    assert newest_offer([(None, None), (None, None)]) == 0
    assert newest_offer([("a", None), (None, None)]) == 0
    assert newest_offer([("a", 10), ("b", 10)]) == 0
    assert newest_offer([(None, 0), ("b", 10), ("c", 30)]) == 2
    assert newest_offer([(None, None), (None, 0)]) == 0


FILE = {"bytes": 1, "sha256": "ab" * 32}


def test_what_another_rank_names_stays_in_the_folder():
    files, within = module._told([{"": FILE, "deep/b.pt": FILE}, "checkpoints/last.ckpt"])
    assert files["deep/b.pt"] == Checksum(1, "ab" * 32) and within == "checkpoints/last.ckpt"


@pytest.mark.parametrize(
    "given",
    [
        None, [], [{}, None, None], [{"../up": FILE}, None], [{"/etc/x": FILE}, None], [{"a/../../b": FILE}, None],
        [{"a": FILE}, "../else"], [{"a": FILE}, "/etc"], [{"a": FILE}, 7], [{"a": {"bytes": "x"}}, None], [[1], None],
    ],
    ids=str,
)  # fmt: skip
def test_names_that_lead_elsewhere_and_other_forms_are_refused(given):
    with pytest.raises(RuntimeError, match="a rank names"):
        module._told(given)


@pytest.mark.parametrize("given", [None, [], ["a"], [1, 2], ["a", "b"], {"a": 1}, ["a", 1.5]], ids=str)
def test_an_offer_of_another_form_is_refused(given):
    assert module._offer(["a", 3]) == ("a", 3) and module._offer([None, None]) == (None, None)
    with pytest.raises(RuntimeError, match="offers no checkpoint"):
        module._offer(given)


def write_checkpoint(folder, step, shards):
    path = folder.checkpoints / checkpoint_name("last", step)
    files = {"a": b"x" * 300, "deep/b": os.urandom(5000)} if shards else {"": os.urandom(70_000)}
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    write_sidecar(path, Sidecar.of(measure(path), step=step))
    return path


def shared(here, top, owner, shards):
    """Each node has a folder of its own; only the owner's holds a checkpoint. What each rank goes on from."""
    module.CHUNK_BYTES = 1024
    home = Path(top) / f"node{here.node_rank}"
    home.mkdir(exist_ok=True)
    os.chdir(home)  # the same path names another file on each node
    folder = RunFolder(Path("run"))
    point = ResumePoint(0) if here.node_rank == 0 else None
    if here.rank == 0:
        write_record(folder.record, RunRecord(status="running", started_at="2026-11-21T10:00:00Z", restarts=[],
                                     command="now", steps=0))  # fmt: skip
    if here.node_rank == owner:
        path = folder.checkpoints / checkpoint_name("last", 50)
        if here.local_rank == 0:
            write_checkpoint(folder, 50, shards)
            if owner:
                write_record(folder.record, RunRecord(status="failed", started_at="2026-11-20T10:00:00Z", steps=55,
                                             restarts=[], command="then"))  # fmt: skip
        point = ResumePoint(50, str(path))
    join(here, CPU, 30.0)
    batch = Batch(8, 1, 2) if here.node_rank == owner else Batch(8, 2, 1)  # it alone knows what its devices take
    plan = share_checkpoint(RunPlan({}, {}, (), here, "cpu", folder, batch, resume=point))
    return plan, measure(Path(plan.checkpoint)).sha256


@pytest.mark.parametrize("shards", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("owner", [0, 1])
def test_nodes_without_the_newest_checkpoint_get_its_bytes(tmp_path, owner, shards):
    answers = run_ranks(shared, 4, str(tmp_path), owner, shards, num_nodes=2)
    assert len({sha256 for _, sha256 in answers}) == 1
    assert [(plan.resume_step, plan.batch) for plan, _ in answers] == [(50, Batch(8, 1, 2))] * 4
    for rank, (plan, _) in enumerate(answers):
        node = rank // 2
        parent = "checkpoints" if node == owner else "from-rank-0"
        wanted = tmp_path / f"node{node}/run/{parent}/last-step00000050.ckpt"
        assert Path(plan.checkpoint).absolute() == wanted or tmp_path / f"node{node}" / plan.checkpoint == wanted
    record = read_record(tmp_path / "node0/run/run.json")
    if owner == 1:
        assert record.started_at == "2026-11-20T10:00:00Z"
        assert record.restarts[0].resumed_step == 50 and record.restarts[0].lost_steps == 5
        assert record.per_device_batch_size == record.restarts[0].per_device_batch_size == 1


def torn(here, top, steps, lost):
    """Each node holds only its own rank's shards; node 0 also the rest, the manifest and the sidecar. Of the newest
    step the shards of `lost` are on no node. What each rank goes on from, and whether all files are there."""
    home = Path(top) / f"node{here.node_rank}"
    home.mkdir(exist_ok=True)
    os.chdir(home)
    folder = RunFolder(Path("run"))
    write_record(folder.record, RunRecord(status="running", started_at="2026-11-21T10:00:00Z", restarts=[]))
    for step in steps:
        path = folder.checkpoints / checkpoint_name("last", step)
        files = sharded(path)
        for name in files:
            owner = 1 if name.startswith("shard-00002") else 0
            if owner != here.node_rank or (step == max(steps) and name == lost):
                (path / name).unlink()
        if here.rank == 0:
            write_sidecar(path, Sidecar.of(measure(path), step=step))
        else:
            (path / "manifest.json").unlink()
    offer = newest_whole(folder.checkpoints)
    point = ResumePoint(max(steps), str(offer)) if offer else None
    join(here, CPU, 30.0)
    plan = share_checkpoint(RunPlan({}, {}, (), here, "cpu", folder, Batch(2, 1, 1), resume=point))
    found = Path(plan.checkpoint)
    return plan, sorted(path.name for path in found.iterdir()), {n: measure(found / n).sha256 for n in files}


def test_shards_that_lie_on_their_own_nodes_come_together_on_each(tmp_path):
    answers = run_ranks(torn, 2, str(tmp_path), [10], None, num_nodes=2)
    wanted = sharded(tmp_path / "whole")
    for node, (plan, names, hashes) in enumerate(answers):
        assert plan.resume_step == 10 and plan.checkpoint == "run/from-rank-0/last-step00000010.ckpt", node
        assert names == sorted([*wanted, "manifest.json"])
        assert hashes == {name: facts["sha256"] for name, facts in wanted.items()}


def test_a_checkpoint_of_which_a_shard_is_nowhere_is_passed_over(tmp_path):
    lost = "shard-00002-model-00001-of-00001.safetensors"
    answers = run_ranks(torn, 2, str(tmp_path), [10, 20], lost, num_nodes=2)
    for plan, names, _ in answers:
        assert plan.resume_step == 10 and plan.checkpoint.endswith("last-step00000010.ckpt")
        assert lost in names


WORDS = ["experiment=quickstart", "trainer.max_epochs=6", "data.global_batch_size=128", "trainer.num_threads=1",
         "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2", "~callbacks.hardware"]  # fmt: skip


def on_two_nodes(words: list[str], logs: list[Path], before=None) -> list[Done]:
    port, nodes = str(free_port()), []
    for node, folder in enumerate(logs):
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node), "WORLD_SIZE": "2",
                       "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        nodes.append(start_door("train", *WORDS, *words, logs=folder, environment=environment, before=before))
    return [node.done() for node in nodes]


@pytest.mark.slow
def test_shards_on_two_nodes_that_share_no_disk(tmp_path):
    """The run is stopped, goes on and is tested from its best, though no node has a whole checkpoint."""
    words = ["trainer=fsdp", "trainer.sharded_checkpoint=true", "run_id=r"]
    logs = [tmp_path / "node0", tmp_path / "node1"]
    first = on_two_nodes(words, logs, partial(signal_at_step, 25, signal.SIGTERM))
    assert [done.code for done in first] == [75, 75], [done.output for done in first]
    stopped = first[0].record["steps"]
    second = on_two_nodes([*words, "resume=auto"], logs)
    assert [done.code for done in second] == [0, 0], [done.output for done in second]
    record = second[0].record
    assert record["restarts"][0]["resumed_step"] == stopped >= 25
    assert record["metrics"]["test/acc"] > 0.8
    for node in logs:
        names = sorted(path.name for path in (node / "train/runs/r/checkpoints").glob("*.ckpt"))
        assert [name[:4] for name in names] == ["best", "last"], "older ones are gone on both"


@pytest.mark.slow
def test_two_nodes_that_share_the_log_folder_go_on_by_the_runs_name(tmp_path):
    """Node 1's options, which name no checkpoint, must not be what node 0's ranks read."""
    words, logs = ["trainer=ddp", "test=false"], [tmp_path, tmp_path]
    first = on_two_nodes([*words, "run_id=r"], logs, partial(signal_at_step, 25, signal.SIGTERM))
    assert [done.code for done in first] == [75, 75], [done.output for done in first]
    stopped = first[0].record["steps"]  # the ranks agree on a step soon after the signal
    second = on_two_nodes([*words, "resume=r"], logs)
    assert [done.code for done in second] == [0, 0], [done.output for done in second]
    record = second[0].record
    assert record["restarts"][0]["resumed_step"] == stopped >= 25 and record["restarts"][0]["lost_steps"] == 0
    for node in (0, 1):
        assert read_plan(second[0].folder.plan(node)).checkpoint.endswith(f"{stopped:08d}.ckpt"), node
    steps = [int(line.split(",")[0]) for line in second[0].folder.metrics.read_text().splitlines()[1:]]
    assert steps == sorted(set(steps)) and steps[0] <= stopped < steps[-1]
