"""eval.py goes by the checkpoint's own options, with what the command line changes on top."""

import shutil

import numpy as np
import pytest
from PIL import Image

from lockstep.callbacks.checkpoint_io import read_checkpoint, write_checkpoint
from lockstep.runs.folder import read_config
from runs import run_door

SMALL = ["trainer=cpu", "trainer.max_steps=2", "scheduler=none", "run_id=r"]


def images(folder, shade=0):
    """Two classes of ten 8 px images, told apart by their brightness."""
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.full((8, 8, 3), level + number + shade, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of a folder of images that is gone afterwards."""
    place = tmp_path_factory.mktemp("trained")
    words = [f"data.root={images(place / 'images')}", "data.image_size=8", "data.global_batch_size=4"]
    extra = "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 3}"
    done = run_door("train", "data=image_folder", *words, "data.test_fraction=0.5", extra, *SMALL, logs=place)
    assert done.code == 0, done.output
    return done


@pytest.mark.slow
def test_a_key_of_the_checkpoints_data_is_taken_as_typed(trained, tmp_path):
    other = images(tmp_path / "others", shade=3)
    done = run_door("eval", "ckpt_path=r", f"data.root={other}", "data.test_fraction=0.25", logs=trained.logs)
    assert done.code == 0, done.output
    config = read_config(done.folder.config)
    assert config["data"]["root"] == str(other) and config["data"]["name"] == "image_folder"
    assert config["data"]["image_size"] == 8 and done.record["metrics"]["test/images"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.rooot=x", "take data.root."),
        ("+data.rooot=x", "take data.root."),
        ("batch_size=3", "take data.global_batch_size."),
        ("experiment=quickstart", "leave experiment= out"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(word, said, trained):
    done = run_door("eval", "ckpt_path=r", word, logs=trained.logs)
    assert done.code == 2 and said in done.output, done.output


def test_callbacks_that_were_asked_for_are_kept(trained):
    more = "+callbacks.device={_target_: lightning.pytorch.callbacks.Timer}"
    done = run_door("eval", "ckpt_path=r", more, logs=trained.logs)
    assert done.code == 0, done.output
    assert list(read_config(done.folder.config)["callbacks"]) == ["early", "device"]


def test_of_anothers_checkpoint_only_those_of_the_command_line(trained, tmp_path):
    best = trained.folder.path / trained.record["best_checkpoint"]["path"]
    path = shutil.copy(best, tmp_path / "anothers.ckpt")
    root = images(tmp_path / "images")
    words = [f"ckpt_path={path}", f"data.root={root}", "data.global_batch_size=4", "callbacks=spot"]
    done = run_door("eval", *words, logs=tmp_path / "logs")
    assert done.code == 0, done.output
    assert list(read_config(done.folder.config)["callbacks"]) == ["spot"]


def test_a_checkpoint_of_a_version_without_a_key_is_tested(trained, tmp_path):
    from lockstep.callbacks.checkpoint_io import read_checkpoint, write_checkpoint

    content = read_checkpoint(trained.folder.path / trained.record["best_checkpoint"]["path"])
    config = content["lockstep"]["config"]
    for key in ("verbose", "quiet", "choices"):
        config.pop(key, None)
    config["trainer"].pop("memory_fraction")
    write_checkpoint(content, tmp_path / "old.ckpt")
    root = images(tmp_path / "images")
    words = [f"ckpt_path={tmp_path / 'old.ckpt'}", "data=image_folder", f"data.root={root}", "data.image_size=8"]
    done = run_door("eval", *words, "data.test_fraction=0.5", logs=tmp_path / "logs")
    assert done.code == 0 and done.record["metrics"]["test/images"] == 10, done.output


def test_a_checkpoint_of_this_machine_that_says_nothing_of_itself_is_tested_by_its_runs_config(trained, tmp_path):
    logs = shutil.copytree(trained.logs, tmp_path / "logs")
    best = logs / "train" / "runs" / "r" / trained.record["best_checkpoint"]["path"]
    content = read_checkpoint(best)
    write_checkpoint({key: value for key, value in content.items() if key != "lockstep"}, best)
    root = images(tmp_path / "images")
    done = run_door("eval", f"ckpt_path={best}", f"data.root={root}", "data.test_fraction=0.25", logs=logs)
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert list(read_config(done.folder.config)["callbacks"]) == ["early"], "by the run's own config"
