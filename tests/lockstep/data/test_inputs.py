"""Numbers beside images: data.inputs gives batches of ((images, numbers), targets)."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from data.predicted import read_listed_images
from data.table import CSVDataModule
from lockstep.config.instantiate import build
from lockstep.data.augmentation import CropFlip
from lockstep.process.errors import UserError
from lockstep.training.build_data import _apply_training_facts, data_facts
from lockstep.training.build_module import check_target
from lockstep.training.inference import load_data
from runs import run_script, succeed
from shapes import ShapeImages

COUNT = 24


def table(place, **changes):
    """Write a CSV of 24 images; the grey level of an image is 10 × its number."""
    columns = {
        "path": [f"{i}.png" for i in range(COUNT)],
        "label": ["cat" if i % 2 else "dog" for i in range(COUNT)],
        "split": ["test" if i % 6 == 5 else "train" for i in range(COUNT)],
        "age": [20 + i for i in range(COUNT)],
        "dose": [f"{i / 4:.2f}" for i in range(COUNT)],
    }
    columns |= changes
    place.mkdir(exist_ok=True)
    for i in range(COUNT):
        Image.fromarray(np.full((6, 6, 3), 10 * i, np.uint8)).save(place / f"{i}.png")
    with (place / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return place / "list.csv"


def module(root, inputs=("age", "dose"), rank=0, world_size=1, **options):
    dm = CSVDataModule(
        root=root,
        cache_dir=root.parent / "cache",
        image_size=6,
        global_batch_size=4,
        val_fraction=0,
        mean=0,
        std=1,
        inputs=inputs,
        **options,
    )
    dm.attach_to_ranks(rank=rank, world_size=world_size)
    return dm


def numbered(dm, loader):
    """Return the number of each image by its grey level, and its age and dose as they were."""
    rows = []
    for batch in loader:
        (images, inputs), _ = dm.on_after_batch_transfer(batch, 0)
        numbers = (images[:, 0, 0, 0] * 25.5).round()
        values = [
            inputs[name] * dm.inputs[name][1] + dm.inputs[name][0] for name in ("age", "dose")
        ]
        rows += torch.stack([numbers, *values], 1).tolist()
    return rows


@pytest.mark.parametrize("options", [{"path": "array"}, {"path": "loader", "num_workers": 1}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_image_has_its_own_numbers(options, world_size, tmp_path):
    root = table(tmp_path)
    seen = []
    for rank in range(world_size):
        dm = module(root, rank=rank, world_size=world_size, **options)
        assert dm.choose_path()[0] == options["path"]
        for loader in (dm.train_dataloader(), dm.test_dataloader()):
            seen += numbered(dm, loader)
    assert len(seen) == COUNT
    expected = [[i, 20 + i, i / 4] for i in range(COUNT)]
    np.testing.assert_allclose(sorted(seen), expected, atol=1e-4)


def test_numbers_are_standardised_by_the_training_rows(tmp_path):
    dm = module(table(tmp_path))
    ages = np.array([20 + i for i in range(COUNT) if i % 6 != 5], float)
    assert dm.inputs["age"] == pytest.approx([ages.mean(), ages.std()])
    assert data_facts(dm)["inputs"] == dm.inputs
    drawn = [dm.on_after_batch_transfer(batch, 0)[0][1]["age"] for batch in dm.train_dataloader()]
    drawn = torch.cat(drawn)
    assert drawn.dtype == torch.float32 and abs(drawn.mean()) < 1e-6
    assert drawn.std(correction=0) == pytest.approx(1)


def test_other_numbers_are_other_data(tmp_path):
    first = module(table(tmp_path))
    assert module(table(tmp_path), inputs=["age"]).data_hash != first.data_hash
    ages = [21, *range(21, 20 + COUNT)]
    assert module(table(tmp_path, age=ages)).data_hash != first.data_hash
    plain = module(table(tmp_path), inputs=())
    assert plain.inputs == {} and "inputs" not in data_facts(plain)


@pytest.mark.parametrize(
    ("changes", "inputs", "said"),
    [
        ({"age": ["north"] * COUNT}, ["age"], "column age is north, which is not a number .line"),
        ({}, ["age", "weight"], "no column weight.*data.inputs=COLUMN"),
        ({}, "age", r"data.inputs=\[age\]"),
    ],
)
def test_what_is_no_number_is_refused(changes, inputs, said, tmp_path):
    with pytest.raises(UserError, match=said):
        module(table(tmp_path, **changes), inputs=inputs)


def test_an_evaluation_standardises_as_the_training_did(tmp_path):
    dm = CSVDataModule(root=table(tmp_path), image_size=6, mean=0, std=1, inputs=["age", "dose"])
    dm.stage = "test"
    dm.prepare()
    run = SimpleNamespace(config={"overrides": []}, cluster=SimpleNamespace(is_rank_zero=False))
    scales = {"age": [10.0, 5.0], "dose": [0.0, 1.0]}
    _apply_training_facts(dm, {"inputs": scales}, run)
    dm.attach_to_ranks()
    (_, inputs), _ = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    assert inputs["age"].tolist() == pytest.approx([(10 + i) / 5 for i in (5, 11, 17, 23)])


def test_images_in_arrays_need_columns_of_their_own():
    with pytest.raises(UserError, match="no column age"):
        ShapeImages(image_size=16, inputs=["age"]).prepare()
    dm = ShapeImages(kind="inputs", image_size=16, inputs=["age"], global_batch_size=8)
    dm.attach_to_ranks()
    assert dm.sample_images(3).shape == (3, 1, 16, 16)


def test_numbers_are_not_mixed(tmp_path):
    dm = CSVDataModule(root=table(tmp_path), image_size=6, global_batch_size=4, inputs=["age"])
    dm.set_augmentation(CropFlip(mixup_alpha=0.2))
    with pytest.raises(UserError, match="cannot mix the numbers"):
        dm.attach_to_ranks()


def test_a_task_of_images_alone_refuses_numbers():
    facts = {"target": "class", "inputs": {"age": [0.0, 1.0]}}
    with pytest.raises(UserError, match="task=image_and_numbers"):
        check_target("tasks.classifier.ImageClassifier", facts)
    check_target("tasks.image_and_numbers.ImageAndNumbers", facts)


def test_the_task_needs_numbers():
    node = {"_target_": "tasks.image_and_numbers.ImageAndNumbers", "outputs": 4, "num_classes": 2}
    with pytest.raises(UserError, match="data.inputs"):
        build(node, values={"net": torch.nn.Identity()})


def test_a_table_to_predict_needs_its_numbers(tmp_path):
    files, numbers = read_listed_images(table(tmp_path), ["age"])
    assert files["3.png"] == tmp_path / "3.png" and numbers["3.png"] == {"age": 23.0}
    with pytest.raises(UserError, match="no column weight"):
        read_listed_images(table(tmp_path), ["weight"])
    with pytest.raises(UserError, match="line 2: age is old"):
        read_listed_images(table(tmp_path, age=["old"] * COUNT), ["age"])


def test_errors_of_a_table_to_predict_name_its_option(tmp_path):
    with pytest.raises(UserError, match="^images=.*none.csv cannot be read"):
        read_listed_images(tmp_path / "none.csv", [])
    other = tmp_path / "other.csv"
    other.write_text("bild,age\n0.png,3\n")
    with pytest.raises(UserError, match="^images=.*has bild, age. Rename"):
        read_listed_images(other, ["age"])
    other.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="^images=.*is not a CSV file"):
        read_listed_images(other, [])


@pytest.mark.slow
def test_a_run_is_evaluated_and_predicts_with_its_numbers(tmp_path):
    root = table(tmp_path)
    logs = tmp_path / "logs"
    options = [
        "data=csv", f"data.root={root}", "data.inputs=[age,dose]", "data.image_size=6",
        "data.global_batch_size=4", "task=image_and_numbers", "task.outputs=8", "run_id=r",
        "augmentation=none", "trainer.max_epochs=2", "trainer=cpu", "metrics=f1",
    ]  # fmt: skip
    done = succeed("train", *options, logs=logs)
    assert "| inputs | age: mean" in done.folder.page.read_text()
    tested = done.record["metrics"]["test/loss"]
    evaluated = succeed("eval", "ckpt_path=r", logs=logs)
    assert evaluated.record["metrics"]["test/loss"] == pytest.approx(tested)

    out = tmp_path / "own.pt"
    succeed("predict", "ckpt_path=r", f"out={out}", logs=logs)
    own = torch.cat(torch.load(out))
    out = tmp_path / "p.csv"
    succeed("predict", "ckpt_path=r", f"images={root}", f"out={out}", "top=2", logs=logs)
    with out.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["file"][:-4]) % 6 == 5]
    shares = [
        float(row["probability"] if row["class"] == "cat" else row["probability_2"]) for row in rows
    ]
    np.testing.assert_allclose(shares, own[:, 0].numpy(), atol=1e-5)
    exchanged = [*options[:-6], "data.inputs=[dose,age]", "trainer=cpu", "ckpt_path=r"]
    refused = run_script("train", *exchanged, logs=logs)
    assert refused.code == 2 and "takes data.inputs=[age,dose] in this order" in refused.output
    ages = [60 + 2 * i for i in range(COUNT)]
    older = table(tmp_path / "older", age=ages)
    more = [f"data.root={older}", "trainer.max_epochs=1", "ckpt_path=r", "run_id=s"]
    went_on = succeed("train", *options[:1], *options[2:-5], "trainer=cpu", *more, logs=logs)
    assert load_data("s", logs).inputs == load_data("r", logs).inputs, went_on.output

    refused = run_script("predict", "ckpt_path=r", f"images={tmp_path}", logs=logs)
    assert refused.code == 2 and "images=FILE.csv" in refused.output
    assert run_script("export", "ckpt_path=r", logs=logs).code == 2


def test_one_image_with_two_numbers_is_refused(tmp_path):
    root = table(tmp_path, path=["0.png"] * COUNT)
    with pytest.raises(UserError, match="line 3: 0.png is listed before with other numbers"):
        read_listed_images(root, ["age"])
