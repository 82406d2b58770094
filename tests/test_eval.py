"""eval.py goes by the checkpoint's own options, with what the command line changes on top."""

import csv
import shutil

import numpy as np
import pytest
from PIL import Image

from eval import inherited_config
from lockstep.checkpoints.files import Sidecar, write_sidecar
from lockstep.checkpoints.io import write_checkpoint
from lockstep.checkpoints.load import read_checkpoint
from lockstep.commands.command_line import read_command
from lockstep.records.folder import read_config
from runs import run_script, succeed

SAME = {name: name for name in ("cat", "dog", "fox")}
SHADES = {"cat": (200, 40, 40), "dog": (40, 200, 40), "fox": (40, 40, 200), "gnu": (200, 200, 40)}


def photographs(folder, names, number=10, split=""):
    """8 px images whose class is a colour; `names` gives the colour of each class folder."""
    for name, shade in names.items():
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            pixels = np.random.default_rng(i).integers(0, 40, (8, 8, 3)) + SHADES[shade]
            Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{split}{i}.png")
    return folder


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A small net that tells cat, dog and fox apart, trained at 8 px with a mean of its own."""
    place = tmp_path_factory.mktemp("animals")
    root = photographs(place / "photos", SAME, 20)
    words = [f"data.root={root}", "data.image_size=8", "data.mean=0.25", "data.global_batch_size=9", "model=small_cnn",
             "data.test_fraction=0.2", "augmentation=none", "trainer=cpu", "trainer.max_epochs=12",
             "optimizer.lr=0.003", "run_id=animals", "+callbacks.early={_target_: "
             "lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 99}"]  # fmt: skip
    done = succeed("train", "data=image_folder", *words, logs=place)
    assert done.record["metrics"]["test/acc"] == 1, done.output
    return done


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+data.rooot=x", "There is no data.rooot: use data.root"),
        ("experiment=quickstart", "leave experiment= out"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(word, said, animals):
    done = run_script("eval", "ckpt_path=animals", word, logs=animals.logs)
    assert done.code == 2 and said in done.output, done.output


def test_trainer_and_labels_of_an_experiment_are_not_taken():
    """experiment=vit_ddp asks for GPUs and for a page in the logbook, whatever the run did."""
    stored = read_command("train", ["experiment=vit_ddp", "trainer=ddp_sim"], "").compose()
    assert stored["logbook"] == "keep" and stored["trainer"]["accelerator"] == "cpu"
    config = read_command("train", [], "").compose(stored=inherited_config(stored))
    assert config["choices"]["experiment"] == "vit_ddp"
    trainer = config["trainer"]
    assert (trainer["accelerator"], trainer["launch"]) == ("auto", "process_per_device")
    assert trainer["precision"] == stored["trainer"]["precision"]
    assert config["logbook"] is None


def test_keys_are_taken_as_typed_and_foreign_callbacks_not(animals, tmp_path):
    other = photographs(tmp_path / "others", SAME)
    more = "+callbacks.device={_target_: lightning.pytorch.callbacks.Timer}"
    words = [f"data.root={other}", "data.test_fraction=0.2"]
    done = succeed("eval", "ckpt_path=animals", *words, more, logs=animals.logs)
    config = read_config(done.folder.config_path)
    assert config["data"]["root"] == str(other) and config["data"]["name"] == "image_folder"
    assert config["data"]["image_size"] == 8 and done.record["metrics"]["test/images"] == 6
    assert list(config["callbacks"]) == ["early", "device"]
    best = animals.folder.path / animals.record["best_checkpoint"]["path"]
    words.append(f"ckpt_path={shutil.copy(best, tmp_path / 'anothers.ckpt')}")
    done = succeed("eval", *words, "callbacks=spot", logs=tmp_path / "logs")
    assert list(read_config(done.folder.config_path)["callbacks"]) == ["spot"], done.output


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_tested(animals, tmp_path):
    logs, root = (
        shutil.copytree(animals.logs, tmp_path / "logs"),
        photographs(tmp_path / "new", SAME),
    )
    best = logs / "train" / "runs" / "animals" / animals.record["best_checkpoint"]["path"]
    content = read_checkpoint(best)
    write_checkpoint({key: value for key, value in content.items() if key != "lockstep"}, best)
    write_sidecar(best, Sidecar(step=4))
    done = succeed("eval", f"ckpt_path={best}", f"data.root={root}", logs=logs)
    assert list(read_config(done.folder.config_path)["callbacks"]) == ["early"], (
        "by the run's own config"
    )
    config = content["lockstep"]["config"]
    del config["verbose"], config["quiet"], config["trainer"]["max_time"]
    write_checkpoint(content, tmp_path / "old.ckpt")
    words = [
        f"ckpt_path={tmp_path / 'old.ckpt'}",
        "data=image_folder",
        f"data.root={root}",
        "data.image_size=8",
    ]
    done = succeed("eval", *words, "data.test_fraction=0.2", logs=tmp_path / "elsewhere")
    assert done.record["metrics"]["test/images"] == 6, done.output


def evaluated(run, root, *words, data="image_folder"):
    return run_script("eval", f"ckpt_path={run.record['run_id']}", f"data={data}", f"data.root={root}", *words,
                    logs=run.logs)  # fmt: skip


def confusion(done):
    with (done.folder.path / "confusion_matrix.csv").open() as file:
        return list(csv.reader(file))


def test_all_images_of_another_folder_are_tested(animals, tmp_path):
    done = evaluated(animals, photographs(tmp_path / "new", SAME, 30))
    assert done.code == 0 and "testing on all 90 images" in done.output, done.output
    metrics, data = done.record["metrics"], read_config(done.folder.config_path)["data"]
    assert (metrics["test/images"], metrics["test/acc"], done.record["num_test"]) == (90, 1, 90)
    assert (data["image_size"], data["mean"]) == (8, 0.25)
    done = evaluated(
        animals, shutil.copytree(animals.logs / "photos", tmp_path / "moved"), "data.path=loader"
    )
    assert done.code == 0 and "testing on 12 images" in done.output, done.output


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ({"fox": "fox", "dog": "dog"}, [["cat", 0, 0, 0], ["dog", 0, 10, 0], ["fox", 0, 0, 10]]),
        pytest.param(
            {"cat": "dog", "dog": "cat", "fox": "fox"},
            [["cat", 0, 10, 0], ["dog", 10, 0, 0], ["fox", 0, 0, 10]],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_labels_are_matched_by_class_name(animals, tmp_path, names, rows):
    done = evaluated(animals, photographs(tmp_path / "new", names))
    assert done.code == 0, done.output
    assert confusion(done) == [
        ["true \\ predicted", "cat", "dog", "fox"],
        *([str(cell) for cell in r] for r in rows),
    ]


def test_an_unknown_class_is_refused_by_name(animals, tmp_path):
    done = evaluated(animals, photographs(tmp_path / "new", {name: name for name in SHADES}))
    assert done.code == 2 and "Traceback" not in done.output, done.output
    assert (
        "the class gnu, which the checkpoint does not know; it knows cat, dog, fox" in done.output
    )
    done = evaluated(
        animals, photographs(tmp_path / "other", {"dog": "dog", "cat": "cat"}, split="test")
    )
    assert done.code == 0 and "testing on all 20 images" in done.output, done.output
    assert [row[0] for row in confusion(done)[1:]] == ["cat", "dog", "fox"] and done.record[
        "metrics"
    ]["test/acc"] == 1


@pytest.mark.slow
def test_a_table_of_test_rows_has_the_checkpoints_classes(animals, tmp_path):
    photographs(tmp_path / "new", {"a": "fox", "b": "cat"})
    lines = [
        f"new/{place}/{i}.png,{name},test"
        for place, name in (("a", "fox"), ("b", "cat"))
        for i in range(10)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    done = evaluated(animals, tmp_path / "list.csv", data="csv")
    assert (
        done.code == 0
        and "testing on all 20 images" in done.output
        and done.record["metrics"]["test/acc"] == 1
    )
    data = read_config(done.folder.config_path)["data"]
    assert (data["image_size"], data["mean"]) == (8, [0.25] * 3)
    done = evaluated(animals, tmp_path / "list.csv", "data.mean=0.5", "data.fit=squash", data="csv")
    data = read_config(done.folder.config_path)["data"]
    assert (data["image_size"], data["mean"], data["fit"]) == (8, 0.5, "squash"), (
        "the command line wins"
    )
