"""A 12-bit camera through training, evaluation, prediction and export."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from eval import TrainedCheckpoint, evaluation_config
from export import main as export
from lockstep.config.compose import compose, plain
from lockstep.records.folder import read_config
from predict import main as predict
from runs import succeed

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


@pytest.mark.parametrize(("stored", "limits"), [({}, None), ({"range": [0, 9]}, [0, 9])])
def test_a_resumed_run_of_an_earlier_version_reads_8_bits(stored, limits):
    node = {"_target_": "data.image_folder.ImageFolderDataModule", "root": "x", **stored}
    run = {"data": node, "choices": {"data": "image_folder"}, "overrides": ["data=image_folder"]}
    assert plain(compose("train", [], stored=run))["data"]["range"] == limits


@pytest.mark.slow
def test_the_range_of_the_training_goes_with_the_checkpoint(tmp_path):
    root = discs(tmp_path / "discs")
    options = [f"data.root={root}", "data.channels=1", f"data.image_size={SIDE}", "run_id=discs"]
    options += [
        "data.global_batch_size=8",
        "model=small_cnn",
        "trainer=cpu",
        "trainer.max_epochs=9",
    ]
    run = succeed("train", "data=image_folder", *options, logs=tmp_path)
    assert run.record["metrics"]["test/acc"] == 1
    low, high = run.record["images"]["range"]
    assert 250 <= low < 260 and 350 < high < 360
    assert f"black {low:g} and white {high:g}" in (run.folder.path / "page.md").read_text()

    # Brighter images, whose own range is another one.
    shutil.copytree(root, tmp_path / "others")
    bright = np.full((SIDE, SIDE), 4095, np.uint16)
    Image.fromarray(bright).save(tmp_path / "others" / "none" / "0.png")
    other = succeed("eval", "ckpt_path=discs", f"data.root={tmp_path / 'others'}", logs=tmp_path)
    assert read_config(other.folder.config)["data"]["range"] == [low, high]
    assert other.record["metrics"]["test/acc"] > 0.9

    table = tmp_path / "p.csv"
    place = f"log_dir={tmp_path}"
    assert predict(["ckpt_path=discs", f"images={root}", f"out={table}", place]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert all(row["file"].startswith(row["class"]) for row in rows) and len(rows) == 48
    out = tmp_path / "export"
    assert export(["ckpt_path=discs", f"out={out}", "formats=safetensors", place]) == 0
    assert f"the values {low:g} and {high:g} of the file" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["architecture"]
