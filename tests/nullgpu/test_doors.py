"""Doors, nodes, inputs and statistics on null GPUs."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from spot import Service

import export
import predict
from lockstep.runs.folder import RunFolder
from null_gpus import TESTS, call_on_null_gpus, needs_null_gpus, nodes_on_null_gpus, null_gpus, run_on_null_gpus
from null_runs import FLOAT32, SMALL, agree, losses

pytestmark = [needs_null_gpus, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    done = run_on_null_gpus("train", *SMALL, "trainer=gpu", "run_id=r", logs=tmp_path_factory.mktemp("trained"))
    assert done.code == 0, done.output
    return done


def pictures(folder, number=40, size=24):
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for index in range(number):
            Image.fromarray(np.full((size, size, 3), level + index % 20, np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.mark.parametrize("trainer", ["ddp", "fsdp", "fsdp trainer.shard_within_node=true", "allreduce"])
def test_two_nodes_of_two_find_the_losses_of_one_device(trainer, tmp_path):
    one = losses(f"{FLOAT32} trainer=gpu", 1, tmp_path / "one")
    words = [*SMALL, FLOAT32, *f"trainer={trainer}".split()]
    first, second = nodes_on_null_gpus(*words, logs=tmp_path)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.record["world_size"] == 4 and agree(first.record["metrics"], one)
    page = first.folder.page.read_text()
    for node, done in enumerate((first, second)):  # each has a disk of its own
        own = RunFolder(done.logs / "train/runs" / first.folder.run_id)
        assert "gpu1/memory_gib" in own.hardware_samples(node).read_text()
        assert "gpu1/memory_gib" in first.record["hardware"]["nodes"][node]["stats"]
        assert "NVIDIA-SMI" in first.folder.nvidia_smi(node, "end").read_text()
        assert f"nvidia-smi, node{node}-end" in page


def test_a_compiled_net_trains(tmp_path):
    """With the graph captured and nothing computed: Triton's kernels are launched and do nothing."""
    words = ["trainer=gpu", "trainer.compile=true", "callbacks=none"]
    done = run_on_null_gpus("train", *SMALL, *words, logs=tmp_path, compute=False)
    assert done.code == 0, done.output


@pytest.mark.parametrize("path", ["array", "loader"])
def test_a_folder_of_images_decoded_before_and_streamed_through_pinned_memory(path, tmp_path):
    words = [
        "data=image_folder", f"data.root={pictures(tmp_path / 'images')}", "data.image_size=16",
        f"data.path={path}", "data.global_batch_size=8", "model=small_cnn", "trainer=gpu",
        "trainer.max_epochs=1",
    ]  # fmt: skip
    done = run_on_null_gpus("train", *words, logs=tmp_path)
    assert done.code == 0 and done.record["steps"] == 8, done.output


def test_statistics_and_nvidia_smi_of_a_run(trained):
    gpus = trained.record["hardware"]["nodes"][0]["gpus"]
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA A100-SXM4-80GB"]
    rows = list(csv.DictReader(trained.folder.path.joinpath("hardware-node0.csv").read_text().splitlines()))
    assert float(rows[-1]["gpu0/memory_gib"]) > 0.4
    assert "NVIDIA-SMI" in next(trained.folder.path.glob("nvidia-smi-node0-*.txt")).read_text()


def test_evaluation_finds_the_counts_of_the_run(trained):
    done = run_on_null_gpus("eval", "ckpt_path=r", logs=trained.logs)
    assert done.code == 0, done.output
    assert done.record["metrics"]["test/correct"] == trained.record["metrics"]["test/correct"]


def test_predictions_and_export(trained, tmp_path):
    images, out = pictures(tmp_path / "images", number=3, size=16), tmp_path / "p.csv"
    ask = ["ckpt_path=r", f"log_dir={trained.logs}"]
    assert call_on_null_gpus(predict.main, [*ask, f"images={images}", f"out={out}"]) == 0
    assert len(out.read_text().splitlines()) == 7
    folder = tmp_path / "out"
    assert call_on_null_gpus(export.main, [*ask, f"out={folder}", "formats=safetensors"]) == 0
    assert any(folder.rglob("*.safetensors"))


def test_the_doctor_sees_the_gpus():
    command = [sys.executable, str(TESTS.parent / "src/doctor.py"), "trainer=ddp"]
    done = subprocess.run(command, env=null_gpus(devices=2), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU 1 NVIDIA A100-SXM4-80GB: 16 of 16 GiB free" in done.stdout


def test_a_spot_notice_saves_and_a_start_goes_on(tmp_path):
    words = [*SMALL, FLOAT32, "trainer=ddp", "run_id=r", "scheduler=none"]
    with Service("none") as service:
        service.notice.set()
        notice = [
            "callbacks=[default,spot]",
            "callbacks.spot.interval_s=0.1",
            f"callbacks.spot.address={service.address}",
        ]
        first = run_on_null_gpus("train", *words, *notice, "trainer.max_epochs=1000", logs=tmp_path, devices=2)
    assert first.code == 75 and first.record["status"] == "interrupted", first.output
    assert json.loads(next(tmp_path.rglob("last-*.ckpt.json")).read_text())["step"] == first.record["steps"]
    epochs = first.record["steps"] // 4 + 1
    second = run_on_null_gpus("train", "resume=r", f"trainer.max_epochs={epochs}", logs=tmp_path, devices=2)
    assert second.code == 0 and second.record["epochs"] == epochs, second.output
