"""The largest batch: searched by training, and estimated."""

import math
import re
import signal

import psutil
import pytest
from PIL import Image

import runs
from lockstep.config.compose import compose, plain
from lockstep.process.errors import UserError
from lockstep.ranks.find import LAUNCHER_VARIABLES, Cluster, detect_launcher
from lockstep.records.batch import Batch
from lockstep.runs import batch_search as search
from lockstep.runs.batch_search import BatchProbes
from lockstep.training.build_data import build_prepared_data
from lockstep.training.memory_estimate import MARGIN, estimate, peak_bytes
from runs import run_script, start_script

SMALL = ["data=synthetic", "data.num_images=20000", "data.num_test_images=20", "model=small_cnn", "optimizer=sgd",
         "data.eval_batch_size=4", "trainer.num_threads=1"]  # fmt: skip


def searched(memory, limit=16.0, bound=100_000, unit=1):
    """The probes where `memory` is the peak of a batch, or None where it runs out."""
    probes = BatchProbes(1, unit, limit, bound)
    while (batch := probes.choose_next()) is not None:
        probes.peaks[batch] = memory(batch)
    return probes


CURVES = {
    **{f"a line from {held} by {each}": lambda batch, held=held, each=each: held + each * batch
       for held, each in ((0.5, 0.02), (2.0, 0.2), (0.1, 0.001), (3.0, 1.0), (6.0, 4.0))},
    "bends upwards": lambda batch: 1 + 0.01 * batch + 0.00001 * batch**2,
    "constant, then less for each image": lambda batch: max(3.0, 1.7 + 0.0047 * batch - 4e-7 * batch**2),
    "in steps": lambda batch: 0.4 + math.ceil(0.1 * batch) / 8,
    "a jump": lambda batch: 0.4 + 0.01 * batch + 2 * (batch > 600),
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("runs_out", [True, False])
def test_the_search_ends_near_the_largest_batch_in_few_runs(name, runs_out):
    def memory(batch):
        return None if runs_out and CURVES[name](batch) > 16.2 else CURVES[name](batch)

    probes = searched(memory)
    largest = max(batch for batch in range(1, 20000) if CURVES[name](batch) <= 16)
    assert probes.largest > 0.9 * largest, probes
    assert len(probes.peaks) <= (5 if "line" in name else 8), probes


def test_the_data_set_and_the_unit_bound_the_search():
    assert searched(lambda batch: 0.001 * batch, bound=777).largest == 777
    assert all(batch % 6 == 0 for batch in searched(lambda batch: 0.1 * batch, unit=6).peaks)
    with pytest.raises(UserError, match="Not even 1 images per device fit into 16 GiB"):
        searched(lambda batch: None).find_largest()


@pytest.mark.parametrize("peak", [None, 9.0])
def test_where_not_even_two_images_fit_memory_is_the_cause(peak, monkeypatch):
    """BatchNorm refuses a single image, which is tried last."""
    config = plain(compose("train", [*SMALL, "trainer=cpu", "trainer.memory_limit_gib=1"]))
    cluster = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)

    def train(*arguments):
        batch = arguments[-1]
        if batch == 1:
            raise search.BatchRefused("BatchNorm cannot normalise one image at a time")
        return {"peak_memory_gib": peak, "usable_memory_gib": 1.0, "num_train": 100}

    monkeypatch.setattr(search, "_train_two_steps", train)
    with pytest.raises(UserError, match="Not even 2 images per device fit into 1 GiB"):
        search.search_largest_batch(config, cluster, Batch(1, 1, 1))


@pytest.mark.parametrize(
    ("words", "num_nodes", "per_device"),
    [
        (["data.num_images=60", "data.val_fraction=0.2"], 1, 48),
        (["data.epoch_size=100"], 1, 100),
        (["data.epoch_size=6"], 1, 6),
        # The first probe, of 8 images, fits the epoch of one node.
        (["data.epoch_size=11"], 2, 5),
        (["data.epoch_size=5", "augmentation.mixup_alpha=0.2"], 1, 4),
        # 66 is within 5 % of 64.
        (["data.epoch_size=66"], 1, 64),
    ],
)
def test_the_epoch_bounds_the_search(words, num_nodes, per_device, monkeypatch):
    config = plain(compose("train", [*SMALL, "trainer=cpu", *words]))
    cluster = Cluster("none", num_nodes, 1, 0, 0, "127.0.0.1", None)

    def train(config, cluster, smallest, batch):
        options = {**config["data"], "path": "loader", "global_batch_size": batch}
        try:
            data = build_prepared_data(config, options)
        except UserError as error:
            raise search.BatchRefused(str(error)) from None
        return {"peak_memory_gib": batch / 100, "usable_memory_gib": 9, "num_train": data.num_train}

    monkeypatch.setattr(search, "_train_two_steps", train)
    largest = search.search_largest_batch(config, cluster, Batch(1, 1, 1))
    assert largest["per_device"] == per_device and largest["bounded_by"] == "data set"


def test_a_run_that_the_kernel_kills_has_no_memory(monkeypatch):
    words = [*SMALL, "trainer=cpu"]
    config = {**plain(compose("train", words)), "overrides": words}
    cluster = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)

    def killed(overrides, variables, output):
        output.write_text("")
        return -signal.SIGKILL

    monkeypatch.setattr(search, "run_train", killed)
    record = search._train_two_steps(config, cluster, Batch(1, 1, 1), 8)
    assert record == {"peak_memory_gib": None}


def test_memory_bounds_a_batch_below_one_that_failed():
    probes = searched(lambda batch: batch / (20 if batch <= 64 else 10), limit=9.6, bound=100)
    assert probes.largest == 95 and probes.bounded_by == "memory", probes


def test_an_epoch_without_a_step_is_refused():
    with pytest.raises(UserError, match="at least 16 images, but an epoch has 15"):
        BatchProbes(8, unit=2).bound_by_epoch(15)


def test_an_estimate_ends_at_the_number_of_training_images(tmp_path, monkeypatch, capsys):
    for number in range(40):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    words = ["data=image_folder", f"data.root={tmp_path / 'photos'}", "data.test_fraction=0.2"]
    words += ["data.val_fraction=0.25", "trainer=ddp", "trainer.devices=2", "model=small_cnn"]
    monkeypatch.setattr("lockstep.training.memory_estimate.peak_bytes", lambda *_: 2**20)
    assert estimate(plain(compose("train", [*words, "trainer.memory_limit_gib=16"]))) == 0
    said = capsys.readouterr().out
    assert "largest batch 12 per device, 24 global = 12 × 2 × 1 · limited by the data set" in said


def test_an_estimate_ends_at_the_images_of_an_epoch(monkeypatch, capsys):
    monkeypatch.setattr("lockstep.training.memory_estimate.peak_bytes", lambda *_: 2**20)
    words = [*SMALL, "trainer=cpu", "data.epoch_size=100", "trainer.memory_limit_gib=16"]
    assert estimate(plain(compose("train", words))) == 0
    assert "largest batch 100 per device" in capsys.readouterr().out


@pytest.mark.parametrize(("devices", "ranks"), [("auto", 8), (4, 4), (0, None), (-1, None)])
def test_an_estimate_counts_devices_as_a_training_does(devices, ranks, monkeypatch, capsys):
    monkeypatch.setattr("lockstep.training.memory_estimate.peak_bytes", lambda *_: 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    words = [*SMALL, "trainer=ddp", f"trainer.devices={devices}", "trainer.memory_limit_gib=16"]
    config = plain(compose("train", words))
    if ranks is None:
        with pytest.raises(UserError, match=f"devices={devices}: give a number from 1 on, or auto"):
            estimate(config)
        return
    assert estimate(config) == 0
    assert f" × {ranks} × 1 · " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_batch_that_is_found_trains_within_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "TIMEOUT_S", 500.0)  # each run that is tried imports torch
    limit = [
        "trainer=ddp_sim",
        "trainer.memory_limit_gib=1.2",
        "data.global_batch_size=max",
        "test=false",
    ]
    done = run_script("train", *SMALL, *limit, "trainer.max_steps=3", "run_id=r", logs=tmp_path)
    assert done.code == 0, done.output
    found = done.record["largest_batch"]
    assert done.record["global_batch_size"] == found["global"] == 2 * found["per_device"]
    assert found["bounded_by"] == "memory" and found["probes"] <= 8 and found["limit_gib"] == 1.2
    assert 0.7 < done.record["peak_memory_gib"] < 1.25
    again = run_script("train", "resume=r", "trainer.max_steps=4", logs=tmp_path)
    assert again.code == 0 and again.record["largest_batch"] == found, again.output


@pytest.mark.slow
def test_a_wrong_option_is_told_in_the_words_of_train(tmp_path):
    done = run_script(
        "find_batch_size", *SMALL, "trainer=cpu", "trainer.precision=bf17", logs=tmp_path
    )
    assert done.code == 2 and re.search(r"^error: .*bf17", done.output, re.MULTILINE), done.output


@pytest.mark.slow
def test_a_signal_ends_the_run_that_is_tried(tmp_path):
    started = start_script("find_batch_size", *SMALL, "trainer=cpu", logs=tmp_path)
    own = psutil.Process(started.process.pid)
    started.wait_for(lambda: len(own.children()) == 1)
    children = own.children()
    own.send_signal(signal.SIGTERM)
    assert started.done(30).code == 128 + signal.SIGTERM
    assert not any(
        child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children
    )


# Estimates on fake tensors against what the CUDA allocator reserved for the same steps.

MIB = 2**20


def peak_mib(batch, *words, ranks=1, devices=1):
    config = plain(compose("train", ["data=synthetic", "trainer.precision=bf16-mixed", *words]))
    return MARGIN * peak_bytes(config, batch, ranks, devices) / MIB


VIT = ("model=vit", "data.image_size=224")
RESNET = ("model=timm", "model.name=resnet18", "data.image_size=96", "trainer=ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "words", "ranks", "reserved_mib"),
    [
        (128, RESNET, 2, 534),
        (736, (*VIT, "trainer=ddp"), 4, 14510),
        (910, (*VIT, "trainer=fsdp"), 4, 14612),
    ],
)
def test_an_estimate_is_within_ten_percent_of_the_allocator(batch, words, ranks, reserved_mib):
    assert peak_mib(batch, *words, ranks=ranks, devices=ranks) == pytest.approx(
        reserved_mib, rel=0.1
    )


@pytest.mark.slow
def test_more_ranks_hold_less_each_under_fsdp():
    def fsdp(ranks, *words):
        return peak_mib(
            8,
            "model=vit_tiny_32",
            "model.embed_dim=384",
            "trainer=fsdp",
            *words,
            ranks=ranks,
            devices=2,
        )

    assert fsdp(2) > 1.2 * fsdp(8) and fsdp(8, "trainer.shard_within_node=true") == pytest.approx(
        fsdp(2)
    )


@pytest.mark.slow
def test_recomputed_activations_take_less_memory_and_an_average_more():
    words = ("model=vit_tiny_32", "trainer=gpu")
    assert peak_mib(256, *words, "trainer.activation_checkpointing=true") < 0.6 * peak_mib(
        256, *words
    )
    assert peak_mib(8, *words, "trainer.ema_decay=0.9") > peak_mib(8, *words)


@pytest.mark.slow
def test_the_command_prints_the_largest_batch_of_all_ranks(tmp_path):
    words = [
        "model=small_cnn",
        "data=digits",
        "trainer=ddp",
        "trainer.devices=4",
        "trainer.num_nodes=2",
    ]
    done = run_script(
        "find_batch_size", "--estimate", *words, "trainer.memory_limit_gib=0.01", logs=tmp_path
    )
    assert done.code == 0 and " × 8 × 1 · " in done.output and "nothing was run" in done.output, (
        done.output
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer=ddp"], "pass trainer.memory_limit_gib=16"),
        (["trainer=dp", "trainer.memory_limit_gib=16"], "use trainer=gpu, ddp, fsdp or allreduce"),
        (
            ["trainer=gpu", "trainer.memory_limit_gib=16", "model.freeze=backbone"],
            "does not know frozen parameters",
        ),
        (
            ["trainer=gpu", "trainer.memory_limit_gib=16", "task=simclr", "data.views=2"],
            "does not know data.views=2",
        ),
        (
            ["trainer=gpu", "trainer.memory_limit_gib=16", "task=segmentation"],
            "does not know tasks.segmentation",
        ),
    ],
)
def test_what_it_cannot_estimate_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        estimate(compose("train", ["model=small_cnn", "data=synthetic", *words]))


@pytest.mark.parametrize("name", LAUNCHER_VARIABLES)
def test_a_tried_run_knows_no_launcher(name):
    environ = dict.fromkeys([*LAUNCHER_VARIABLES[name], "PATH"], "2")
    assert detect_launcher(environ) == name
    assert search.remove_launcher_variables(environ) == {"PATH": "2"}
