"""A 12-bit camera through training, evaluation, prediction and export."""

import csv
import json
import shutil
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image

from eval import TrainedCheckpoint, evaluation_config
from export import main as export
from faults import signal_at_step
from kills import differences, weights
from lockstep.config.compose import compose, plain
from lockstep.records.folder import read_config
from predict import main as predict
from runs import run_script, succeed

SIDE = 8


def discs(root, high=360):
    """Faint discs in values of 250 to 290, which 8 bits would show in one grey level."""
    rng = np.random.default_rng(0)
    for label, height in (("disc", 70), ("none", 0)):
        (root / label).mkdir(parents=True)
        for i in range(24):
            values = rng.integers(250, 290, (SIDE, SIDE))
            values[2:6, 2:6] += height
            Image.fromarray(values.astype(np.uint16)).save(root / label / f"{i}.png")
    return root


def evaluated(facts, overrides):
    config = plain(compose("train", ["data=image_folder", "data.root=x", *overrides]))
    config["choices"] = {"data": "image_folder"}
    checkpoint = TrainedCheckpoint("last.ckpt", {"choices": config["choices"]}, facts)
    return evaluation_config(config, checkpoint, overrides)["data"]


def test_an_evaluation_has_the_range_and_normalisation_of_the_training():
    facts = {"range": [244, 360], "channels": 1, "mean": [0.3], "std": [0.1]}
    data = evaluated(facts, [])
    assert (data["range"], data["mean"], data["std"]) == ([244, 360], [0.3], [0.1])
    assert evaluated(facts, ["data.range=image"])["range"] == "image"


def test_an_evaluation_of_an_earlier_version_reads_8_bits():
    data = evaluated({"channels": 3, "mean": [0.3] * 3}, [])
    assert (data["range"], data["mean"]) == (None, "auto")


def test_the_composed_config_of_an_evaluation_stays_as_it_is():
    overrides = ["trainer=cpu", "trainer.accumulate_grad_batches=2"]
    composed = plain(compose("train", overrides)) | {"choices": {}}
    config = evaluation_config(composed, TrainedCheckpoint("last.ckpt", {}, {}), overrides)
    assert config["trainer"]["accumulate_grad_batches"] == 1
    assert composed["trainer"]["accumulate_grad_batches"] == 2


@pytest.mark.parametrize(("stored", "limits"), [({}, None), ({"range": [0, 9]}, [0, 9])])
def test_a_resumed_run_of_an_earlier_version_reads_8_bits(stored, limits):
    node = {"_target_": "data.image_folder.ImageFolderDataModule", "root": "x", **stored}
    run = {"data": node, "choices": {"data": "image_folder"}, "overrides": ["data=image_folder"]}
    assert plain(compose("train", [], stored=run))["data"]["range"] == limits


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return discs(tmp_path_factory.mktemp("images") / "discs")


@pytest.fixture(scope="module")
def options(images):
    return [
        "data=image_folder",
        f"data.root={images}",
        "data.channels=1",
        f"data.image_size={SIDE}",
        "data.global_batch_size=8",
        "model=small_cnn",
        "trainer=cpu",
        "trainer.max_epochs=9",
        "run_id=discs",
    ]


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    return succeed("train", *options, logs=tmp_path_factory.mktemp("trained"))


@pytest.mark.slow
def test_the_run_records_the_range_of_its_images(trained):
    assert trained.record["metrics"]["test/acc"] == 1
    low, high = trained.record["images"]["range"]
    assert 250 <= low < 260 and 350 < high < 360
    assert f"black {low:g} and white {high:g}" in (trained.folder.path / "page.md").read_text()


@pytest.mark.slow
def test_other_images_are_evaluated_by_the_trainings_range(trained, images, tmp_path):
    # Brighter images, whose own range is another one.
    shutil.copytree(images, tmp_path / "others")
    bright = np.full((SIDE, SIDE), 4095, np.uint16)
    Image.fromarray(bright).save(tmp_path / "others" / "none" / "0.png")
    address = f"ckpt_path={trained.folder.path}"
    other = succeed("eval", address, f"data.root={tmp_path / 'others'}", logs=tmp_path)
    assert (
        read_config(other.folder.config_path)["data"]["range"] == trained.record["images"]["range"]
    )
    assert other.record["metrics"]["test/acc"] > 0.9


@pytest.mark.slow
def test_a_resume_within_an_epoch_gives_equal_weights(trained, options, tmp_path):
    steps_per_epoch = trained.record["steps"] // 9
    assert 13 % steps_per_epoch
    stop = partial(signal_at_step, 13)
    stopped = run_script("train", *options, logs=tmp_path, before=stop)
    assert stopped.code == 75 and stopped.record["steps"] == 13
    resumed = succeed("train", "resume=discs", logs=tmp_path)
    assert resumed.record["restarts"][0]["resumed_step"] == 13
    assert resumed.record["images"] == trained.record["images"]
    assert differences(weights(resumed.folder), weights(trained.folder)) == []


def logits_of_files(net_of_format, facts, files):
    """Return what an exported net says of files that are read as its card says."""
    low, high = facts["range"]
    pixels = np.stack([np.asarray(Image.open(file), np.float32) for file in files])[:, None]
    inputs = ((pixels - low) / (high - low)).clip(0, 1)
    inputs = (inputs - facts["mean"][0]) / facts["std"][0]
    return net_of_format(inputs.astype(np.float32))


@pytest.mark.slow
def test_exported_nets_say_what_predict_says(trained, images, tmp_path):
    log_dir = f"log_dir={trained.logs}"
    table = tmp_path / "p.csv"
    assert predict(["ckpt_path=discs", f"images={images}", f"out={table}", log_dir]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert all(row["file"].startswith(row["class"]) for row in rows) and len(rows) == 48

    has_onnx = find_spec("onnxruntime") is not None
    formats = "safetensors,pt2,onnx" if has_onnx else "safetensors,pt2"
    out = tmp_path / "export"
    assert export(["ckpt_path=discs", f"out={out}", f"formats={formats}", log_dir]) == 0
    assert json.loads((out / "config.json").read_text())["architecture"]
    facts = trained.record["images"]
    low, high = facts["range"]
    assert f"the values {low:g} and {high:g} of the file" in (out / "README.md").read_text()

    files = [images / row["file"] for row in rows]
    program = torch.export.load(out / "model.pt2").module()
    said = {"pt2": logits_of_files(lambda inputs: program(torch.from_numpy(inputs)), facts, files)}
    if has_onnx:
        import onnxruntime

        session = onnxruntime.InferenceSession(out / "model.onnx")
        said["onnx"] = logits_of_files(
            lambda inputs: torch.from_numpy(session.run(None, {"images": inputs})[0]), facts, files
        )
    for logits in said.values():
        shares = logits.detach().softmax(1).amax(1).tolist()
        assert shares == pytest.approx([float(row["probability"]) for row in rows], abs=1e-4)
