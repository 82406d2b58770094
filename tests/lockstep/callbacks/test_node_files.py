"""Hardware files of nodes that share no disk with node 0 come to its folder, within limits, and nothing else does."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from local_ranks import meet, run_ranks
from lockstep.callbacks import node_files
from lockstep.callbacks.hardware_stats import HardwareStats
from lockstep.callbacks.node_files import Receiver, Sender
from lockstep.runs.errors import Interrupted
from lockstep.runs.folder import RunFolder
from lockstep.runs.typed_json import WrongValue
from one_card import OneCard


def node_one(tmp_path, shares_folder=False):
    folder = RunFolder(tmp_path / "one")
    folder.path.mkdir()
    return folder, Sender(folder, 1, shares_folder)


def test_lines_and_dumps_are_sent_once(tmp_path):
    folder, sender = node_one(tmp_path)
    receiver = Receiver(RunFolder(tmp_path / "zero"), 1)
    with folder.hardware_samples(1).open("w") as file:
        for text in ("time,a\n1,2\n3", ",4\n", "5,6\n"):
            file.write(text)
            file.flush()
            folder.nvidia_smi(1, "peak").write_text(f"peak of {text}")
            receiver.keep(sender.take())
    assert receiver.folder.hardware_samples(1).read_text() == "time,a\n1,2\n3,4\n5,6\n"
    assert receiver.folder.nvidia_smi(1, "peak").read_text() == "peak of 5,6\n"
    assert sender.take() == {"csv": "", "smi": {}, "points": []}


def test_a_start_after_another_keeps_what_the_other_had_sent(tmp_path):
    receiver = Receiver(RunFolder(tmp_path), 1)
    receiver.keep({"csv": "time,a\n1,2\n"})
    receiver.keep({"csv": "3,4\n"})
    Receiver(RunFolder(tmp_path), 1).keep({"csv": "time,a\n5,6\n"})
    assert (tmp_path / "hardware-node1.0.csv").read_text() == "time,a\n1,2\n3,4\n"
    assert (tmp_path / "hardware-node1.csv").read_text() == "time,a\n5,6\n"


def test_readings_come_with_their_step_and_once(tmp_path):
    _, sender = node_one(tmp_path, shares_folder=True)
    sender.note(7, {"gpu0/memory_gib": 1.5})
    points = Receiver(RunFolder(tmp_path), 1).keep(sender.take())
    assert [(point.step, point.values) for point in points] == [(7, {"gpu0/memory_gib": 1.5})]
    assert sender.take()["points"] == []


@pytest.mark.parametrize(
    "sent",
    [
        {"csv": "a" * 101},
        {"csv": ["a"]},
        {"smi": {"../../run.json": "a"}},
        {"smi": {"peak": "a" * (node_files.MOST_SMI_CHARACTERS + 1)}},
        {"csv": "a\n", "points": [{"step": 1, "values": {"../evil": 1.0}}]},
        {"csv": "a\n", "points": [{"step": 1, "values": {"cpu/percent": float("nan")}}]},
        {"csv": "a\n", "points": [{}] * (node_files.MOST_POINTS + 1)},
        [],
    ],
)
def test_what_no_node_measures_is_refused_and_nothing_written(sent, tmp_path, monkeypatch):
    monkeypatch.setattr(node_files, "MOST_CSV_BYTES", 100)
    with pytest.raises(WrongValue):
        Receiver(RunFolder(tmp_path), 1).keep(sent)
    assert list(tmp_path.iterdir()) == []


def test_the_whole_file_of_a_node_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(node_files, "MOST_CSV_BYTES", 100)
    receiver = Receiver(RunFolder(tmp_path), 1)
    receiver.keep({"csv": "a" * 60})
    with pytest.raises(WrongValue, match="more than 100 bytes"):
        receiver.keep({"csv": "a" * 60})


def train(cluster, folder, shared, ends):
    """What a training calls of HardwareStats, as a node's only rank; returns what went to TensorBoard."""
    meet(cluster)
    written = {}
    logger = SimpleNamespace(name="tensorboard", log_metrics=lambda values, step: written.setdefault(step, values))
    trainer = SimpleNamespace(
        num_nodes=2, node_rank=cluster.node_rank, global_rank=cluster.rank, local_rank=0, num_devices=1,
        is_global_zero=cluster.rank == 0, loggers=[logger], global_step=10 + cluster.rank,
        state=SimpleNamespace(fn="fit"), strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    own = f"{folder}/run" if shared else f"{folder}/node{cluster.node_rank}"
    Path(own).mkdir(exist_ok=True)
    callback = HardwareStats(own, 0.02, 0.0, nvml=OneCard(), nvidia_smi=lambda: f"dump of node {cluster.node_rank}")
    callback.on_fit_start(trainer, None)
    deadline = time.monotonic() + 30
    while not callback.sampler.last:
        assert time.monotonic() < deadline, "no reading"
        time.sleep(0.01)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_epoch_end(trainer, None)
    if ends == "stopped":
        stop = Interrupted("SIGTERM")
        stop.agreed = True
        callback.on_exception(trainer, None, stop)
    elif ends == "dead":
        callback.on_exception(trainer, None, RuntimeError("node 1 is gone"))
    else:
        callback.on_fit_end(trainer, None)
    return written


@pytest.mark.parametrize("ends", ["finished", "stopped", "dead"])
def test_node_zero_has_the_files_of_a_node_with_a_disk_of_its_own(ends, tmp_path):
    written, _ = run_ranks(train, 2, str(tmp_path), False, ends, num_nodes=2)
    zero, one = RunFolder(tmp_path / "node0"), RunFolder(tmp_path / "node1")
    sent, measured = zero.hardware_samples(1).read_text(), one.hardware_samples(1).read_text()
    assert sent.count("\n") >= 2 and "gpu0/memory_gib" in sent
    assert measured.startswith(sent) if ends == "dead" else measured == sent
    moments = ("start", "peak") if ends == "dead" else ("start", "peak", "end")
    for moment in moments:
        assert zero.nvidia_smi(1, moment).read_text() == "dump of node 1"
        assert zero.nvidia_smi(0, moment).read_text() == "dump of node 0"
    assert written[10]["hardware/gpu0/memory_gib"] > 0
    assert written[11]["hardware-node1/gpu0/memory_gib"] > 0
    assert not one.hardware_samples(0).exists() and not list(tmp_path.glob("*/.seen*"))


def test_nodes_that_share_the_folder_send_readings_only(tmp_path):
    written, _ = run_ranks(train, 2, str(tmp_path), True, "finished", num_nodes=2)
    names = sorted(path.name for path in (tmp_path / "run").glob("*"))
    assert names == sorted(
        [f"hardware-node{node}.csv" for node in (0, 1)]
        + [f"nvidia-smi-node{node}-{moment}.txt" for node in (0, 1) for moment in ("start", "peak", "end")]
    )
    times = [line.split(",")[0] for line in (tmp_path / "run/hardware-node1.csv").read_text().splitlines()[1:]]
    assert times == sorted(times) and "hardware-node1/cpu/percent" in written[11]
