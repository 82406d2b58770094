"""predict.py: the run's own test images get the run's own answers."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import predict
from data.digits import DigitsDataModule
from lockstep.process.errors import UserError
from lockstep.records.record import RunRecord
from lockstep.training.inference import FinishedModel
from lockstep.training.task import Task
from predict import default_output_name, main
from runs import run_script, succeed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the digits, and its 360 test images as files named after their class."""
    root = tmp_path_factory.mktemp("trained")
    done = succeed("train", "experiment=quickstart", "trainer.max_epochs=2", logs=root / "logs")
    held = DigitsDataModule(name="digits", image_size=8).read()
    (root / "images" / "part").mkdir(parents=True)
    for i in range(len(held.images) - held.num_test, len(held.images)):
        folder = root / "images" / ("part" if i % 2 else ".")
        label = held.targets[""][i]
        Image.fromarray(np.asarray(held.images[i])[:, :, 0]).save(folder / f"{i:04d}_{label}.png")
    return done, root


def test_as_many_test_images_are_right_as_in_the_run(trained, tmp_path, capsys):
    done, root = trained
    out = tmp_path / "found" / "p.csv"
    ask = [f"ckpt_path={done.record['run_id']}", f"images={root / 'images'}", f"out={out}", "top=3"]
    assert main([*ask, f"log_dir={done.logs}", "batch=50"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("360 images · ")
    ask[0] = f"ckpt_path={done.folder.path}"  # a run's folder is as good as its id
    assert main([*ask, "batch=50", "overwrite=true"]) == 0 and capsys.readouterr().out == said
    rows = read(out)
    right = sum(row["file"].removesuffix(".png").split("_")[-1] == row["class"] for row in rows)
    assert said.endswith("p.png: the first 48 images; captions below 50% are red\n")
    assert len(rows) == 360 and right == done.record["metrics"]["test/correct"]
    assert list(rows[0]) == [
        "file",
        "class",
        "probability",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
    ]
    first, second = float(rows[0]["probability"]), float(rows[0]["probability_2"])
    assert 1 >= first >= second >= 0 and sum(row["file"].startswith("part/") for row in rows) == 180
    with Image.open(out.with_suffix(".png")) as sheet:
        assert sheet.size == (6 * 136 + 8, 8 * 168 + 8)
        assert any(red > 150 > green for _, (red, green, _) in sheet.getcolors(1 << 20))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"images": "~/no such folder"}, f"images={Path.home()}/no such folder is not a folder"),
        ({"images": "{root}/empty"}, "holds no image"),
        ({"top": "0"}, "top=0 must be a whole number from 1"),
        ({"images": ""}, "images= is missing"),
        ({"colour": "red"}, "'colour=red' is not understood; it takes ckpt_path=, images="),
        ({"images": "{root}/broken"}, "cannot be decoded"),
        ({"ckpt_path": ""}, "ckpt_path= is missing"),
        ({"out": "result.png"}, "out=result.png: with images= it is a table"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(trained, tmp_path, capsys, change, said):
    done, root = trained
    (root / "empty").mkdir(exist_ok=True)
    (root / "broken").mkdir(exist_ok=True)
    (root / "broken" / "x.png").write_bytes(b"no image")
    words = {
        "ckpt_path": done.record["run_id"],
        "images": str(root / "images"),
        "log_dir": str(done.logs),
        **change,
    }
    words.setdefault("out", str(tmp_path / "p.csv"))
    assert main([f"{key}={value.format(root=root)}" for key, value in words.items()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broken_image_has_a_row(trained, tmp_path, capsys):
    done, root = trained
    files = sorted((root / "images").rglob("*.png"))[:3]
    for folder, file in (("a", files[0]), ("b", files[1])):  # two files of one name
        (tmp_path / "new" / folder).mkdir(parents=True)
        shutil.copy(file, tmp_path / "new" / folder / "same.png")
    (tmp_path / "new" / "._same.png").write_bytes(b"hidden")
    (tmp_path / "new" / "a" / "broken.png").write_bytes(files[2].read_bytes()[:60])
    digit = Image.open(files[0]).convert("L")
    hidden = Image.merge(
        "LA", [Image.new("L", digit.size, 0), digit]
    )  # black everywhere, the shape is the alpha
    hidden.save(tmp_path / "new" / "transparent.png")
    Image.eval(digit, lambda value: 255 - value).save(tmp_path / "new" / "white.png")
    ask = [
        f"ckpt_path={done.record['run_id']}",
        f"log_dir={done.logs}",
        f"images={tmp_path / 'new'}",
    ]
    assert main([*ask, f"out={tmp_path / 'p.csv'}", "top=2", "batch=1"]) == 1
    said = capsys.readouterr()
    assert (
        said.err.startswith("error: 1 of 5 images cannot be decoded") and "broken.png" in said.err
    )
    rows = read(tmp_path / "p.csv")
    names = ["a/broken.png", "a/same.png", "b/same.png", "transparent.png", "white.png"]
    assert [row["file"] for row in rows] == names
    assert list(rows[0]) == ["file", "class", "probability", "class_2", "probability_2", "error"]
    assert rows[0]["class"] == "" and "broken.png" in rows[0]["error"]
    assert all(
        row["error"] == "" and row["class"].isdigit() and row["class_2"].isdigit()
        for row in rows[1:]
    )
    assert (rows[3]["class"], rows[3]["probability"]) == (rows[4]["class"], rows[4]["probability"])
    assert main([*ask[:2], f"images={root / 'images'}", f"out={tmp_path / 'all.csv'}"]) == 0
    whole = {row["file"]: row["class"] for row in read(tmp_path / "all.csv")}
    assert [row["class"] for row in rows[1:3]] == [
        whole[str(file.relative_to(root / "images"))] for file in files[:2]
    ]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_images_lists_and_folders_are_predicted(trained, tmp_path, monkeypatch):
    done, root = trained
    monkeypatch.chdir(tmp_path)
    first, second = sorted((root / "images").glob("*.png"))[:2]
    ask = [f"ckpt_path={done.record['run_id']}", f"log_dir={done.logs}"]
    assert main([*ask, f"images={first}"]) == 0
    [row] = read(tmp_path / f"predictions-{done.record['run_id']}.csv")
    assert row["file"] == first.name
    assert main([*ask, f"images={first},{second},{root / 'images/part'}", "out=list.csv"]) == 0
    names = [row["file"] for row in read(tmp_path / "list.csv")]
    assert names[:2] == [str(first), str(second)] and len(names) == 2 + 180


def test_files_that_are_left_out_are_named(trained, tmp_path, capsys):
    done, root = trained
    (tmp_path / "new").mkdir()
    shutil.copy(next((root / "images").glob("*.png")), tmp_path / "new" / "a.png")
    for name in ("notes.txt", "b.heic"):
        (tmp_path / "new" / name).write_text("")
    ask = [
        f"ckpt_path={done.record['run_id']}",
        f"log_dir={done.logs}",
        f"images={tmp_path / 'new'}",
    ]
    assert main([*ask, f"out={tmp_path / 'p.csv'}"]) == 0
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")
    ]
    assert "1 .txt files (notes.txt)" in line and "1 .heic files (b.heic)" in line


@pytest.mark.parametrize("name", ["p.csv", "p.png", "p_masks"])
def test_a_file_of_another_run_is_not_overwritten(trained, tmp_path, capsys, name):
    done, root = trained
    (tmp_path / name).write_text("of another run")
    ask = [
        f"ckpt_path={done.record['run_id']}",
        f"log_dir={done.logs}",
        f"images={root / 'images'}",
    ]
    assert main([*ask, f"out={tmp_path / 'p.csv'}"]) == 2
    assert (
        f"{name} exists" in capsys.readouterr().err
        and (tmp_path / name).read_text() == "of another run"
    )


class HeadBeside(Task):
    def __init__(self, net):
        super().__init__(net)
        self.head = torch.nn.Linear(2, 3)


def test_a_task_without_predict_step_is_refused():
    class Predicts(HeadBeside):
        def predict_step(self, batch, batch_idx):
            return self.head(self.net(batch))

    class Forwards(HeadBeside):
        def forward(self, images):
            return self.head(self.net(images))

    for task in (Predicts, Forwards):
        FinishedModel(task(torch.nn.Linear(2, 2)), {}, {}, Path(), RunRecord()).check_prediction()
    with pytest.raises(UserError, match="HeadBeside has no predict_step"):
        FinishedModel(
            HeadBeside(torch.nn.Linear(2, 2)), {}, {}, Path(), RunRecord()
        ).check_prediction()


def asked(trained, tmp_path, *words):
    """Return the rows of a prediction of the run's test images."""
    done, root = trained
    out = tmp_path / "p.csv"
    run = [
        f"ckpt_path={done.record['run_id']}",
        f"log_dir={done.logs}",
        f"images={root / 'images'}",
    ]
    assert main([*run, f"out={out}", "overwrite=true", *words]) == 0
    return read(out)


def test_test_time_flip_changes_the_probabilities(trained, tmp_path):
    plain = asked(trained, tmp_path, "trainer=cpu")
    assert asked(trained, tmp_path, "task.test_time_flip=false") == plain
    flipped = asked(trained, tmp_path, "task.test_time_flip=true")
    assert [row["file"] for row in flipped] == [row["file"] for row in plain]
    assert flipped != plain


def test_the_number_of_workers_changes_nothing(trained, tmp_path):
    plain = asked(trained, tmp_path, "data.num_workers=0", "batch=50")
    assert asked(trained, tmp_path, "data.num_workers=2", "batch=50") == plain


@pytest.mark.parametrize(
    "words, said",
    [
        (["trainer=gpu"], "trainer=cpu"),
        (["trainer=nosuch"], "nosuch"),
        (["task.test_time_flip=maybe"], "must be true or false"),
        (["data.num_workers=some"], "must be auto or a whole number"),
        (["trainer=ddp_sim", "images="], "only one process can predict"),
    ],
)
def test_what_a_machine_or_a_task_lacks_is_refused(trained, tmp_path, capsys, words, said):
    done, root = trained
    run = [
        f"ckpt_path={done.record['run_id']}",
        f"log_dir={done.logs}",
        f"images={root / 'images'}",
    ]
    assert main([*run, f"out={tmp_path / 'p.csv'}", *words]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_write_the_file_of_one(trained, tmp_path):
    done, root = trained
    shutil.copytree(root / "images", tmp_path / "images")
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    tables = []
    for trainer in ("cpu", "ddp_sim"):
        out = tmp_path / f"{trainer}.csv"
        words = (f"images={tmp_path / 'images'}", f"out={out}", f"trainer={trainer}", "batch=50")
        run = (f"ckpt_path={done.record['run_id']}", f"log_dir={done.logs}")
        predicted = run_script("predict", *run, *words, logs=done.logs)
        assert predicted.code == 1 and "1 of 361 images cannot be decoded" in predicted.output
        assert predicted.output.count("error:") == 1
        tables.append(out.read_bytes())
    assert tables[0] == tables[1]


def test_a_small_number_keeps_its_digits(tmp_path):
    rows = {"a.png": {"value": 2.345678e-7}, "b.png": {"value": 0.5}}
    predict.write_table(tmp_path / "p.csv", rows)
    small, half = read(tmp_path / "p.csv")
    assert float(small["value"]) == pytest.approx(2.345678e-7, rel=1e-5)
    assert half["value"] == "0.500000"


def test_checkpoints_of_one_name_have_outputs_of_their_own(tmp_path):
    """Two runs of one length save best-step00000390.ckpt, and a file alone has no run id."""
    models = []
    for name in ("a", "b"):
        path = tmp_path / name / "best-step00000390.ckpt"
        path.parent.mkdir()
        path.write_text(name)
        models.append(FinishedModel(None, {}, {}, path, RunRecord()))
    names = [default_output_name(model, ".csv") for model in models]
    assert names[0].startswith("predictions-best-step00000390-ca978112") and names[0] != names[1]
    models[0].record.run_id = "night"
    assert default_output_name(models[0], ".csv") == "predictions-night.csv"
    models[0].record.run_id = "../night"
    assert default_output_name(models[0], ".csv") == names[0]
