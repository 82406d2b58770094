"""Each example of src/tasks learns small pictures, on one process and under DDP and FSDP, and
everything works with it.

docs/tasks.md shows CASES and CHECKS as a table.
"""

import csv
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import shapes
from faults import signal_at_step
from lockstep.checkpoints.files import newest_whole
from lockstep.checkpoints.load import read_checkpoint
from lockstep.data.reading import Reading
from lockstep.process.errors import UserError
from lockstep.records.record import RunRecord
from lockstep.training.inference import FinishedModel, load_finished
from lockstep.training.task import Task
from models.small_cnn import SmallCNN
from object_store import shared_store
from plain_task import fit
from predict import main as predict
from predict import prediction_rows
from runs import run_script, succeed
from tasks.classifier import ImageClassifier
from tasks.distillation import Distillation, compute_rescaling
from tasks.manual_optimization import SharpnessAware
from tasks.multilabel import MultiLabel
from tasks.regression import Regression
from tasks.segmentation import Segmentation

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model=small_cnn", "data._target_=shapes.Shapes", "trainer.num_threads=1", "trainer.log_every_n_steps=4",
         "optimizer.lr=0.003", "augmentation=none")  # fmt: skip
UNET = ("model=unet", "model.width=8", "model.depth=2", "optimizer.lr=0.02")
# task: (target that it learns, options, epochs, monitored metric, value of it that is reached or
# better)
CASES = {
    "classifier": ("class", (), 3, "val/acc", 0.95),
    "multilabel": ("labels", (), 3, "val/map", 0.95),
    "regression": ("number", ("task.mean=15", "task.std=3"), 4, "val/mae", 1.0),
    "segmentation": ("mask", UNET, 3, "val/miou", 0.9),
    "distillation": ("class", ("task.teacher=teacher",), 3, "val/acc", 0.95),
    "simclr": ("views", ("task.outputs=32",), 2, "train/loss", None),
    "manual_optimization": ("class", (), 3, "val/acc", 0.95),
    "image_and_numbers": ("inputs", ("task.outputs=32",), 5, "val/acc", 0.9),
}
CHECKS = ("cpu", "ddp_sim", "fsdp_sim", "resume", "eval", "predict", "S3", "page")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder with a run that may teach."""
    logs = tmp_path_factory.mktemp("logs")
    succeed("train", *SMALL, "trainer=cpu", "trainer.max_epochs=3", "run_id=teacher", logs=logs)
    return logs


def trained(task, trainer, logs, *more, **options):
    kind, words, epochs, *_ = CASES[task]
    argv = [*SMALL, f"task={task}", f"+data.kind={kind}", *words, f"trainer={trainer}", f"run_id={task}-{trainer}",
            f"trainer.max_epochs={epochs}"]  # fmt: skip
    done = succeed("train", *argv, *more, logs=logs, **options)
    return done


def check_learned(task, done):
    _, _, _, monitor, reached = CASES[task]
    record = done.record
    assert record["status"] == "finished" and record["monitor"] == monitor
    with done.folder.metrics.open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < losses[0]
    if reached is not None:
        best = record["metrics"][f"{monitor}_best"]
        assert best <= reached if monitor in ("val/loss", "val/mae") else best >= reached
        assert (
            f"{monitor.replace('/', ' ')} " in done.output
            and f"finished · {monitor}_best" in done.output
        )
        assert f"test/{monitor.partition('/')[2]}" in done.output


QUICK = ("segmentation",)


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=[pytest.mark.slow] * (t not in QUICK)) for t in CASES]
)
def test_it_learns_and_everything_works_with_it(task, logs, tmp_path, monkeypatch):
    """cpu, S3, page, eval, predict and resume."""
    store = shared_store()
    s3 = [f"s3.uri=s3://{store.new_bucket()}/x", f"s3.endpoint_url={store.endpoint_url}"]
    done = trained(task, "cpu", logs, *s3, environment=store.environment())
    check_learned(task, done)
    assert done.record["upload"]["uri"] and not done.record["upload"]["error"]
    assert "chooses the best checkpoint" in done.folder.page.read_text() or task == "simclr"
    run_id = f"{task}-cpu"
    if task != "simclr":
        evaluated = succeed("eval", f"ckpt_path={run_id}", logs=logs)
        tests = {
            name: value
            for name, value in done.record["metrics"].items()
            if name.startswith("test/")
        }
        assert tests and {
            name: evaluated.record["metrics"][name] for name in tests
        } == pytest.approx(tests, rel=1e-6)
    out = tmp_path / "p.pt"
    succeed("predict", f"ckpt_path={run_id}", f"out={out}", logs=logs)
    answers = torch.cat(torch.load(out))
    made = shapes.pictures(64, 1)
    wanted = {
        "multilabel": (64, 2),
        "regression": (64,),
        "segmentation": (64, 16, 16),
        "simclr": (64, 32),
    }
    assert answers.shape == wanted.get(task, (64, 2))
    if task == "regression":
        error = float((answers - made["number"]).abs().mean())
        assert error == pytest.approx(done.record["metrics"]["test/mae"], rel=1e-5)
    epochs = CASES[task][2] + 1
    resumed = succeed("train", f"resume={run_id}", f"trainer.max_epochs={epochs}", logs=logs,
                       environment=store.environment())  # fmt: skip
    assert resumed.record["steps"] == 16 * epochs, resumed.output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("task", "task_class", "options"),
    [
        ("classifier", ImageClassifier, {"num_classes": 2}),
        ("regression", Regression, {"mean": 15, "std": 3}),
    ],
)
def test_a_checkpoint_loads_into_a_plain_trainer(task, task_class, options, tmp_path):
    done = trained(task, "cpu", tmp_path, "trainer.max_epochs=1")
    path = newest_whole(done.folder.checkpoints, "best")
    num_outputs = options.get("num_classes", 1)
    net = SmallCNN(num_outputs, shapes.SIZE, channels=1)
    loaded = task_class.load_from_checkpoint(path, net=net, **options).eval()

    images = shapes.pictures(8)["images"]
    finished = load_finished(str(path), tmp_path).module
    assert torch.equal(loaded.predict_step(images, 0), finished.predict_step(images, 0))

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    [results] = trainer.test(loaded, datamodule=shapes.Shapes(CASES[task][0]))
    metrics = done.record["metrics"]
    assert results == pytest.approx({name: metrics[name] for name in results}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp_sim", "fsdp_sim"])
@pytest.mark.parametrize("task", CASES)
def test_it_learns_under_ddp_and_fsdp(task, trainer, logs):
    check_learned(task, trained(task, trainer, logs, "trainer.max_epochs=9"))


def exact(kind, logs, *words, **options):
    """Train in float64, with Lockstep's order of images and without dropout."""
    own = ["data=digits", "data._target_=shapes.ShapeImages", f"+data.kind={kind}", "data.image_size=16",
           "data.name=shapes", f"data.cache_dir={logs}/cache", "data.global_batch_size=32", "augmentation=none",
           "trainer.precision=64-true", "trainer.max_epochs=2", "trainer.num_threads=1",
           "~callbacks.hardware"]  # fmt: skip
    net = (
        ()
        if "model=unet" in words
        else ("model=small_cnn", "model.dropout=0", "model.head_dropout=0")
    )
    done = run_script("train", *own, *net, *words, logs=logs, **options)
    return done, {} if done.code else read_checkpoint(
        newest_whole(done.folder.checkpoints, kind="last")
    )["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("task", CASES)
def test_two_ranks_and_a_resume_give_one_processs_weights(task, logs):
    kind, words, *_ = CASES[task]
    kind, more = (
        ("class", ["data.views=2"]) if kind == "views" else (kind, ["trainer.sync_batchnorm=true"])
    )
    if kind == "inputs":
        more.append("data.inputs=[age]")
    words = [f"task={task}", *words, *more]
    one, expected = exact(kind, logs, *words, "trainer=cpu", f"run_id={task}-1")
    assert one.code == 0 and expected, one.output
    two, found = exact(kind, logs, *words, "trainer=ddp_sim", f"run_id={task}-2")
    assert two.code == 0, two.output
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    resumed = [*words, "trainer=cpu", "resume=auto", f"run_id={task}-3"]
    stopped, _ = exact(kind, logs, *resumed, before=partial(signal_at_step, 5))
    assert stopped.code == 75, stopped.output
    again, found = exact(kind, logs, *resumed)
    assert again.code == 0 and all(
        torch.equal(found[name], value) for name, value in expected.items()
    ), again.output


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("ddp_sim", marks=pytest.mark.slow)])
def test_a_dict_of_targets_reaches_a_task(trainer, logs):
    words = [
        "task._target_=shapes.ClassAndNumber",
        "+task.outputs=3",
        "task.monitor=val/mae",
        "task.mode=min",
    ]
    done, _ = exact("dict", logs, *words, f"trainer={trainer}", f"run_id=dict-{trainer}")
    assert done.code == 0, done.output
    assert (
        0 < done.record["metrics"]["test/mae"] < 15
        and 0.4 < done.record["metrics"]["test/acc"] <= 1
    )


@pytest.mark.slow
def test_a_linear_probe_starts_from_the_features_of_simclr(logs):
    trained("simclr", "cpu", logs, "run_id=features")
    words = [
        "task=classifier",
        "ckpt_path=features",
        "model.freeze=backbone",
        "trainer=cpu",
        "trainer.max_epochs=1",
    ]
    done = succeed("train", *SMALL, *words, "run_id=probe", logs=logs)
    assert (
        "the head is new (net.head.3.bias, net.head.3.weight)" in done.output
        and "skipped projection" in done.output
    )
    assert done.record["num_trained_parameters"] < done.record["num_parameters"] / 10


@pytest.mark.slow
def test_a_student_is_saved_and_evaluated_without_its_teacher(logs):
    done = trained("distillation", "cpu", logs, "run_id=student", "trainer.max_epochs=1")
    best = read_checkpoint(done.folder.path / done.record["best_checkpoint"]["path"])
    teacher = read_checkpoint(newest_whole(logs / "train/runs/teacher/checkpoints", kind="best"))
    assert best["state_dict"].keys() == teacher["state_dict"].keys()
    evaluated = succeed("eval", "ckpt_path=student", "task.teacher=gone", logs=logs)
    assert evaluated.record["metrics"]["test/acc"] == done.record["metrics"]["test/acc"]


def test_a_student_trains_on_images_as_they_are(monkeypatch):
    images, targets = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 1, 0])
    net, teacher = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)) for _ in range(2)
    )
    monkeypatch.setattr(Distillation, "count", lambda *_, **__: None)
    losses = []
    for flips in (False, True):
        student = Distillation(
            net, num_classes=2, channels=1, teacher=None, log_dir="", test_time_flip=flips
        )
        student._unregistered_teacher = [teacher]
        losses.append(student.training_step((images, targets), 0))
    assert losses[0] == losses[1]


def test_a_teacher_sees_images_in_its_own_normalisation(
    monkeypatch,
):
    facts = {"class_names": ["cat", "dog"], "channels": 1, "mean": [0.25], "std": [0.5]}
    data = SimpleNamespace(class_names=["cat", "dog"], channels=1, mean=[0.5], std=[0.25])
    student = Distillation(torch.nn.Flatten(), num_classes=2, channels=1, teacher="t", log_dir="")
    student._check_teacher(facts, data)
    student.rescale = compute_rescaling(facts, data, torch.device("cpu"))
    pixels, seen = torch.rand(3, 1, 1, 2), []
    student._unregistered_teacher = [torch.nn.Flatten()]
    student._unregistered_teacher[0].register_forward_hook(
        lambda _, images, __: seen.append(images[0])
    )
    monkeypatch.setattr(Distillation, "count", lambda *_, **__: None)
    student.training_step(((pixels - 0.5) / 0.25, torch.tensor([0, 1, 1])), 0)
    torch.testing.assert_close(seen[0], (pixels - 0.25) / 0.5)
    for other in ({"class_names": ["dog", "cat"]}, {"channels": 3}):
        with pytest.raises(UserError, match="task.teacher=t has other c[lh]"):
            student._check_teacher({**facts, **other}, data)


def test_a_teacher_of_another_image_size_is_named(caplog):
    student = Distillation(torch.nn.Flatten(), num_classes=2, channels=1, teacher="t", log_dir="")
    student._check_teacher({"image_size": 224}, SimpleNamespace(image_size=224))
    assert caplog.text == ""
    student._check_teacher({"image_size": 224}, SimpleNamespace(image_size=32))
    assert "task.teacher=t was trained at 224 pixels, and gets images of 32" in caplog.text


@pytest.mark.parametrize(
    ("limits", "said"), [(None, r"give data.range=\[0, 9\]"), ((0.0, 9.0), "")]
)
def test_a_teacher_of_another_range_is_refused(limits, said):
    student = Distillation(torch.nn.Flatten(), num_classes=2, channels=1, teacher="t", log_dir="")
    data = SimpleNamespace(source=SimpleNamespace(reading=Reading(1, limits)))
    message = ""
    try:
        student._check_teacher({"range": [0, 9]}, data)
    except UserError as error:
        message = str(error)
    assert bool(re.search(said, message)) and bool(message) == bool(said)


def multilabel_alone(num_classes, monkeypatch):
    """Return a multi-label task without a trainer, which counts precision alone."""
    task = MultiLabel(torch.nn.Identity(), num_classes=num_classes)
    task._trainer = SimpleNamespace(
        strategy=SimpleNamespace(reduce=lambda counts, reduce_op: counts)
    )
    monkeypatch.setattr(Task, "count", lambda *_, **__: None)
    monkeypatch.setattr(Task, "evaluation_values", lambda *_: {})
    return task


@pytest.mark.filterwarnings("ignore:No positive samples")
def test_a_label_that_never_occurs_has_no_precision(monkeypatch):
    task = multilabel_alone(3, monkeypatch)
    logits = torch.tensor([[2.0, -1, 0], [-1, 2, 1], [1, 0, -1]])
    for _ in range(2):
        task.validation_step((logits, 0.9 * (logits > 0.5) * torch.tensor([1.0, 1, 0])), 0)  # soft
        assert task.evaluation_values("val") == {"val/map": 1.0}
    with pytest.raises(UserError, match="labels from 0 to 1, and one is -1.0 or 1.0"):
        task.validation_step((logits, torch.tensor([[-1.0, 0, 1]] * 3)), 0)


def test_precision_ranks_batches_of_small_logits_with_others(monkeypatch):
    task = multilabel_alone(2, monkeypatch)
    # 0.1 stands before the sigmoid below that of 0, and after it above.
    for logits, labels in (([[0.1, 0.1]], [[1.0, 1]]), ([[0.0, -1]], [[0.0, 0]])):
        task.validation_step((torch.tensor(logits), torch.tensor(labels)), 0)
    assert task.evaluation_values("val") == {"val/map": 1.0}


@pytest.mark.filterwarnings("ignore:No positive samples")
def test_labels_that_are_not_known_have_no_part(monkeypatch):
    task = MultiLabel(torch.nn.Identity(), num_classes=2)
    reduce = lambda counts, reduce_op: counts  # noqa: E731
    task._trainer = SimpleNamespace(strategy=SimpleNamespace(reduce=reduce))
    counted = {}
    monkeypatch.setattr(Task, "count", lambda _, **values: counted.update(values))
    monkeypatch.setattr(Task, "evaluation_values", lambda *_: {})
    logits = torch.tensor([[2.0, -1], [-1, 2], [1, 3]], requires_grad=True)
    labels = torch.tensor([[1.0, 0], [0, 1], [torch.nan, 1]])
    loss = task.training_step((logits, labels), 0)
    of_images = [
        torch.nn.functional.binary_cross_entropy_with_logits(logits[i, known], labels[i, known])
        for i, known in enumerate(~labels.isnan())
    ]
    torch.testing.assert_close(loss, sum(of_images) / 3)
    loss.backward()
    assert logits.grad[2, 0] == 0 and logits.grad.isfinite().all()
    task.validation_step((logits.detach(), labels), 0)
    assert len(counted["loss"]) == len(counted["acc"]) == 5 and counted["acc"].all()
    assert task.evaluation_values("val") == {"val/map": 1.0}


def uncertain(tmp_path):
    """A table of several labels, some of them −1."""
    lines = ["path,a,b"]
    for i in range(40):
        Image.new("RGB", (8, 8), (200 * (i % 2), 5 * i, 0)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{i % 2},{-1 if i % 5 == 0 else int(i > 20)}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return ["task=multilabel", "data=csv", f"data.root={tmp_path / 'table.csv'}", "data.label_columns=[a,b]",
            "data.image_size=8", "data.global_batch_size=8", "model=small_cnn", "trainer=cpu",
            "trainer.max_epochs=1", "run_id=r"]  # fmt: skip


def test_a_label_of_minus_one_ends_a_run_early(tmp_path):
    done = run_script("train", *uncertain(tmp_path), logs=tmp_path / "logs")
    assert done.code == 2, done.output
    assert "0.png (line 2): the label b is -1" in done.output
    assert "data.unknown=-1" in done.output


@pytest.mark.slow
def test_labels_of_minus_one_may_be_unknown(tmp_path):
    done = succeed("train", *uncertain(tmp_path), "data.unknown=-1", logs=tmp_path / "logs")
    metrics = done.record["metrics"]
    assert 0 < metrics["test/loss"] < 5 and 0 <= metrics["test/map"] <= 1


def test_masks_without_a_known_pixel_cost_nothing():
    task = Segmentation(torch.nn.Conv2d(1, 2, 1), num_classes=2)
    unknown = torch.full((2, 4, 4), -1)
    assert task.training_step((torch.rand(2, 1, 4, 4), unknown), 0) == 0


def sparse_masks():
    masks = torch.randint(0, 2, (4, 4, 4))
    masks[2:, 1:] = -1
    return Segmentation(torch.nn.Conv2d(1, 2, 1), num_classes=2), masks


def sparse_labels():
    labels = torch.randint(0, 2, (4, 3)).float()
    labels[2:, 1:] = float("nan")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    return MultiLabel(net, num_classes=3), labels


@pytest.mark.parametrize("make", [sparse_masks, sparse_labels])
def test_unlabelled_targets_weigh_the_same_on_two_ranks(make):
    """Two ranks train on the mean of their losses."""
    torch.manual_seed(0)
    task, targets = make()
    images = torch.rand(4, 1, 4, 4)
    halves = [
        task.training_step((images[part], targets[part]), 0) for part in (slice(2), slice(2, 4))
    ]
    whole = task.training_step((images, targets), 0)
    torch.testing.assert_close(whole, (halves[0] + halves[1]) / 2)


def test_predictions_of_16_bits_keep_the_unit_of_the_targets():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    task = Regression(net, mean=298_588, std=70_000)
    images = torch.rand(3, 1, 2, 2)
    expected = task.predict_step(images, 0)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            predicted = task.predict_step(images, 0)
        torch.testing.assert_close(predicted, expected, rtol=0, atol=500)


def test_a_gradient_that_overflows_leaves_the_weights(monkeypatch):
    task = SharpnessAware(torch.nn.Linear(2, 2), num_classes=2)
    task.net.weight.grad = torch.tensor([[float("inf"), 1.0], [1.0, 1.0]])
    before = task.net.weight.clone()
    task._climb()
    assert torch.equal(task.net.weight, before)
    task.net.weight.grad = torch.ones(2, 2)
    task._climb()
    torch.testing.assert_close(task.net.weight, before + 0.05 / 2)


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_counts_epochs_in_manual_optimization():
    net, schedule = (
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)),
        partial(ExponentialLR, gamma=0.5),
    )
    task = SharpnessAware(
        net, num_classes=2, optimizer=partial(torch.optim.SGD, lr=1.0), scheduler=schedule
    )
    items = [(torch.rand(1, 2, 2), i % 2) for i in range(6)]
    assert (
        fit(task, data=items, batch_size=2, max_epochs=2).optimizers[0].param_groups[0]["lr"]
        == 0.25
    )


def test_one_label_alone_is_no_multilabel_task():
    with pytest.raises(UserError, match="needs two labels or more"):
        MultiLabel(torch.nn.Linear(2, 1), num_classes=1)


def test_predictions_of_files_are_columns_numbers_and_masks(tmp_path):
    model = SimpleNamespace(module=None, facts={"class_names": ["cat", "dog"]})
    names = ["a/1.png", "a/1.jpg"]
    assert prediction_rows(model, torch.tensor([[0.25, 0.5], [1.0, 0.0]]), names, tmp_path, 1) == [
        {"cat": 0.25, "dog": 0.5}, {"cat": 1.0, "dog": 0.0}
    ]  # fmt: skip
    assert prediction_rows(model, torch.tensor([1.5, 2.5]), names, tmp_path, 1) == [
        {"value": 1.5},
        {"value": 2.5},
    ]
    masks = torch.tensor([[[0, 1]], [[2, 0]]])
    rows = prediction_rows(model, masks, names, tmp_path / "p", 1)
    assert [np.array(Image.open(row["mask"])).tolist() for row in rows] == masks.tolist(), (
        "one stem, two files"
    )
    model.facts["class_names"] = ["0", "255"]
    prediction_rows(model, masks[:1], names[:1], tmp_path / "p", 1)
    assert np.array(Image.open(rows[0]["mask"])).tolist() == [[0, 255]], (
        "as in the masks of the training"
    )
    assert [row["mask"] for row in rows] == [str(tmp_path / f"p/{name}.png") for name in names]


def test_predicted_masks_have_the_grey_levels_of_the_training(tmp_path):
    model = SimpleNamespace(module=None, facts={"class_names": ["0", "127", "254"]})
    masks = torch.tensor([[[0, 1, 2]]], dtype=torch.uint8)
    (row,) = prediction_rows(model, masks, ["a.png"], tmp_path, 1)
    assert np.array(Image.open(row["mask"])).tolist() == [[0, 127, 254]]


def test_masks_of_files_have_a_folder_of_their_own(tmp_path, monkeypatch):
    class Dark(torch.nn.Module):
        def predict_step(self, images, number):
            return (images[:, 0] < 0).long()

    facts = {"image_size": 4, "channels": 1, "mean": [0.5], "std": [1.0], "resize": 4}
    model = FinishedModel(Dark(), {"data": {}}, facts, tmp_path, RunRecord())
    monkeypatch.setattr("lockstep.training.inference.load_finished", lambda *_: model)
    (tmp_path / "photos").mkdir()
    for name, grey in (("a.png", 0), ("a.jpg", 255)):
        Image.new("L", (4, 4), grey).save(tmp_path / "photos" / name)
    before = (tmp_path / "photos/a.png").read_bytes()
    for out in ("photos.csv", "preds"):
        assert (
            predict(["ckpt_path=r", f"images={tmp_path / 'photos'}", f"out={tmp_path / out}"]) == 0
        )
        with (tmp_path / out).open() as file:
            masks = {
                row["file"]: np.array(Image.open(row["mask"])).mean()
                for row in csv.DictReader(file)
            }
        assert masks == {"a.png": 1, "a.jpg": 0}
    assert (tmp_path / "photos/a.png").read_bytes() == before and len(
        list((tmp_path / "photos").iterdir())
    ) == 2


def test_the_table_of_the_page_is_what_is_tested_here():
    page = (ROOT / "docs/tasks.md").read_text()
    lines = re.findall(r"^\| `task=(\w+)` \|.*?\| (.*) \|$", page, re.MULTILINE)
    [header] = re.findall(r"^\| task \|.*", page, re.MULTILINE)
    assert [cell.strip() for cell in header.split("|")][3:-1] == list(CHECKS)
    assert [name for name, *_ in lines] == list(CASES)
    for name, cells in lines:
        marks = [cell.strip() for cell in cells.split("|")]
        assert marks == ["✓"] * 4 + ["–" if name == "simclr" else "✓", "✓", "✓", "✓"], name


def price_table(folder):
    """Write images and their prices, from 200,000 to 400,000; return the table and the prices."""
    made = shapes.pictures(240)
    prices = (20_000 * made["number"]).round()
    (folder / "images").mkdir()
    lines = ["path,label"]
    for number, image in enumerate(made["images"]):
        pixels = (100 + 50 * image[0]).clamp(0, 255).to(torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        lines.append(f"images/{number}.png,{prices[number]:.0f}")
    (folder / "table.csv").write_text("\n".join(lines))
    return folder / "table.csv", prices


@pytest.mark.slow
def test_raw_prices_are_learned_better_than_by_their_mean(tmp_path):
    table, prices = price_table(tmp_path)
    done = succeed(
        "train",
        "task=regression",
        "data=csv",
        f"data.root={table}",
        "data.target=number",
        "data.image_size=16",
        "data.global_batch_size=16",
        "augmentation=none",
        "trainer=cpu",
        "trainer.max_epochs=6",
        "optimizer.lr=0.003",
        "run_id=prices",
        logs=tmp_path,
    )
    error_of_mean = float((prices - prices.mean()).abs().mean())
    assert done.record["metrics"]["test/mae"] < 0.7 * error_of_mean, done.output
    assert done.record["images"]["target_mean"] == pytest.approx(prices.mean().item(), rel=0.02)
    assert "Targets | mean" in done.folder.page.read_text()

    evaluated = succeed("eval", "ckpt_path=prices", logs=tmp_path)
    tested = done.record["metrics"]["test/mae"]
    assert evaluated.record["metrics"]["test/mae"] == pytest.approx(tested, rel=1e-6)

    out = tmp_path / "p.csv"
    succeed(
        "predict", "ckpt_path=prices", f"images={tmp_path / 'images'}", f"out={out}", logs=tmp_path
    )
    with out.open() as file:
        values = {int(Path(row["file"]).stem): float(row["value"]) for row in csv.DictReader(file)}
    errors = [abs(value - prices[number].item()) for number, value in values.items()]
    assert len(errors) == 240 and sum(errors) / 240 < 0.7 * error_of_mean


def test_an_export_of_a_regression_gives_the_targets_unit():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1))
    module = Regression(net, target_mean=298_588.0, target_std=100_000.0).eval()
    images = torch.randn(5, 3, 2, 2)
    with torch.no_grad():
        predicted = module.predict_step(images, 0)
        module.fold_scale(images)
        assert (module.mean, module.std) == (0.0, 1.0)
        torch.testing.assert_close(net(images).squeeze(1), predicted)
        torch.testing.assert_close(module.predict_step(images, 0), predicted)


def test_a_scale_is_not_folded_through_a_sigmoid():
    layers = torch.nn.Flatten(), torch.nn.Linear(12, 1), torch.nn.Sigmoid()
    module = Regression(torch.nn.Sequential(*layers), target_mean=50.0, target_std=20.0).eval()
    images, before = torch.randn(5, 3, 2, 2), layers[1].weight.clone()
    module.fold_scale(images)
    assert torch.equal(layers[1].weight, before) and (module.mean, module.std) == (50.0, 20.0)


@pytest.mark.slow
def test_two_views_come_from_the_datas_own_augmentation(tmp_path):
    words = [
        "experiment=quickstart",
        "task=simclr",
        "task.outputs=32",
        "trainer.max_epochs=1",
        "trainer.num_threads=1",
    ]
    assert succeed("train", *words, "data.views=2", logs=tmp_path).record["steps"] == 20
    done = run_script("train", *words, logs=tmp_path)
    assert (
        done.code == 2
        and "task=simclr needs two views of each image: add data.views=2" in done.output
    )


def test_precisions_that_round_targets_and_counts():
    net = torch.nn.Conv2d(3, 4, 1)
    module = Segmentation(net, num_classes=4).to(torch.bfloat16)
    module.trainer = SimpleNamespace(testing=False, sanity_checking=False)
    images = torch.zeros(2, 3, 5, 5, dtype=torch.bfloat16)
    module.validation_step((images, torch.zeros(2, 5, 5, dtype=torch.long)), 0)
    assert module.confusion.sum() == 50

    regression = Regression(net)
    regression.trainer = SimpleNamespace(precision="bf16-true")
    with pytest.raises(UserError, match="rounds the targets of task=regression to 16 bits"):
        regression.setup("fit")


def test_probabilities_of_16_bits_keep_their_order():
    """In bfloat16 the sigmoid of 8 and of 12 are both 1."""
    task = MultiLabel(torch.nn.Identity(), num_classes=2)
    probabilities = task.predict_step(torch.tensor([[8.0, 12.0]], dtype=torch.bfloat16), 0)
    assert probabilities.dtype == torch.float32 and probabilities[0, 0] < probabilities[0, 1] < 1


@pytest.mark.parametrize(
    ("task", "batch", "said"),
    [
        (
            Segmentation(torch.nn.Flatten(), num_classes=2),
            (torch.rand(2, 1, 2, 2), torch.zeros(2, 2, 2, dtype=torch.long)),
            r"logits \(images, 2, height, width\).*outputs of the shape \(4,\).*model=unet",
        ),
        (
            Regression(torch.nn.Flatten(), mean=0.0, std=1.0),
            (torch.rand(2, 1, 2, 2), torch.zeros(2)),
            r"one number for each image.*the shape \(2, 4\)",
        ),
        (
            MultiLabel(torch.nn.Flatten(), num_classes=2),
            (torch.rand(2, 1, 2, 2), torch.zeros(2, 2)),
            "gives 4 logits for an image and the data have 2 classes",
        ),
    ],
)
def test_a_net_of_another_task_is_refused(task, batch, said):
    with pytest.raises(UserError, match=said):
        task.training_step(batch, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_plateau_is_refused_in_manual_optimization():
    task = SharpnessAware(
        torch.nn.Linear(2, 2),
        num_classes=2,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=partial(ReduceLROnPlateau),
    )
    with pytest.raises(UserError, match="without a metric, which ReduceLROnPlateau needs"):
        fit(task, data=[(torch.rand(2), i % 2) for i in range(4)], batch_size=2, max_epochs=1)
