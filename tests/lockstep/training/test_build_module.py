"""The module of a run, its weights, and what each rank does first."""

import csv
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

from local_ranks import local_cluster
from lockstep.checkpoints.io import write_checkpoint
from lockstep.checkpoints.load import read_checkpoint
from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.config.instantiate import build
from lockstep.config.suggestions import missing_option
from lockstep.process.errors import UserError
from lockstep.records.batch import Batch
from lockstep.records.folder import RunFolder
from lockstep.runs import join as rank
from lockstep.runs.join import count_threads, prepare_process, set_breakpoints
from lockstep.runs.run import Run
from lockstep.training.build_data import data_facts
from lockstep.training.build_module import build_module, uses_channels_last
from lockstep.training.metrics import compute_metrics, prepare_metrics
from lockstep.training.weights import load_initial_weights
from models.small_cnn import SmallCNN
from models.timm import TimmModel
from runs import succeed
from tasks.image_and_numbers import ImageAndNumbers


def test_channels_last_where_convolutions_are_depthwise_or_uses_tensor_cores():
    assert uses_channels_last(
        TimmModel(3, 32, 3, "tf_efficientnet_lite0", pretrained=False), "auto"
    )
    for net in (TimmModel(3, 32, 3, "resnet10t", pretrained=False), SmallCNN(3, 8, 1)):
        assert not uses_channels_last(net, "auto") and not uses_channels_last(net, False)
        assert uses_channels_last(net, True) and uses_channels_last(
            net, "auto", uses_tensor_cores=True
        )
    vit = TimmModel(3, 32, 3, "vit_tiny_patch16_224", pretrained=False)
    assert not uses_channels_last(vit, "auto", uses_tensor_cores=True)
    with pytest.raises(UserError, match="trainer.channels_last=nhwc: give true, false or auto"):
        uses_channels_last(SmallCNN(3, 8, 1), "nhwc")


@pytest.mark.parametrize(
    ("task", "target", "said"),
    [
        (
            "task=classifier",
            "labels",
            "takes a class .*task=classifier.*data has several labels .*task=multilabel",
        ),
        (
            "task=multilabel",
            "class",
            "takes several labels .*label_columns=.*the data has a class for each image",
        ),
        (
            "task=segmentation",
            "class",
            "takes a mask .*data.target=mask .*the data has a class for each image",
        ),
        (
            "task=regression",
            "labels",
            "takes a number .*data.target=number .*the data has several labels",
        ),
        ("task._target_=plain_task.Lazy", None, "layers.weight belongs to a lazy layer"),
        ("task._target_=collections.Counter", None, "Counter is not a LightningModule"),
    ],
)
def test_a_task_that_cannot_train_is_refused(task, target, said):
    with pytest.raises(UserError, match=said):
        build_module(
            plain(compose("train", [task, "model=small_cnn"])), {"target": target, "num_classes": 2}
        )


def test_the_metric_of_a_suggestion_gives_a_number():
    words = re.search(
        r"\+metrics\.auroc=(\{.*?\})", missing_option("metrics", "auroc", (CONFIGS,))
    )[1]
    auroc = prepare_metrics({"auroc": build(yaml.safe_load(words), {"num_classes": 3})}, 3)["auroc"]
    auroc.update(torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1]))
    assert float(auroc.compute().mean()) == pytest.approx((5 / 6 + 3 / 4 + 1) / 3)


@pytest.mark.parametrize("metric", [MulticlassAUROC, MulticlassAveragePrecision])
def test_a_class_without_images_is_left_out_and_said(metric, capsys):
    """sklearn's roc_auc_score of the four classes that are there gives the same."""
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (200,))
    logits = torch.randn(200, 5) + 2 * torch.nn.functional.one_hot(labels, 5)
    metrics = prepare_metrics({metric.__name__: metric(num_classes=5)}, 5)
    metrics[metric.__name__].update(logits, labels)
    (value,) = compute_metrics(metrics, torch.bincount(labels, minlength=5), "val").values()
    shares = logits.softmax(1)
    score = {MulticlassAUROC: roc_auc_score, MulticlassAveragePrecision: average_precision_score}[
        metric
    ]
    assert value == pytest.approx(
        sum(score(labels == c, shares[:, c]) for c in range(4)) / 4, abs=1e-6
    )
    assert (
        f"val/{metric.__name__} leaves out classes 4, which have no image."
        in capsys.readouterr().out
    )
    metrics[metric.__name__].reset()
    metrics[metric.__name__].update(logits[labels == 1], labels[labels == 1])
    assert compute_metrics(metrics, torch.tensor([0, 9, 0, 0, 0]), "val") == {}
    reason = f"val/{metric.__name__} has no value: it needs images of two classes"
    assert reason in capsys.readouterr().out


# A new run that starts from a checkpoint: its head follows the class names.


class Task(pl.LightningModule):
    def __init__(self, num_classes, width=5):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.Linear(width, num_classes))


@pytest.fixture
def checkpoint(tmp_path):
    """Of a net for cat, dog and fox, and of a projection head that the next task lacks."""
    before = Task(3)
    state = {**before.state_dict(), "projection.weight": torch.ones(2)}
    own = {"config": {}, "data": {"class_names": ["cat", "dog", "fox"]}}
    write_checkpoint({"state_dict": state, "lockstep": own}, tmp_path / "before.ckpt")
    return before, str(tmp_path / "before.ckpt")


def load(module, path, facts):
    config = {"model": {"_target_": "m"}, "data": {}}
    return load_initial_weights(module, read_checkpoint(path), facts, config, path)


def started(checkpoint, class_names):
    module = Task(len(class_names))
    facts = {"class_names": class_names, "data_hash": "x", "image_size": 2}
    return module.net, load(module, checkpoint[1], facts)


def test_the_same_classes_in_another_order_keep_their_logits(checkpoint):
    net, said = started(checkpoint, ["fox", "cat", "dog"])
    images = torch.randn(3, 4)
    assert torch.equal(net(images), checkpoint[0].net(images)[:, [2, 0, 1]])
    assert "the head's rows are in this run's order of classes; skipped projection" in said


@pytest.mark.parametrize(
    "names", [["cat", "dog", "gnu"], ["cat", "dog"], ["cat", "dog", "fox", "gnu"]]
)
def test_other_classes_get_a_new_head_on_the_trained_body(checkpoint, names):
    net, said = started(checkpoint, names)
    assert (
        torch.equal(net[1].weight, checkpoint[0].net[1].weight) and not net(torch.randn(3, 4)).any()
    )
    assert (
        f"the head is new (net.2.bias, net.2.weight): the classes were cat, dog, fox, now {', '.join(names)}"
        in said
    )


HOOKS = ("adapt_to_image_size", "adapted")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("inherited", [{}, {name: vars(TimmModel)[name] for name in HOOKS}])
def test_a_net_adapts_weights_under_either_name(checkpoint, hook, inherited):
    def halve(net, state):
        return {name: value / 2 for name, value in state.items()}

    module = Task(3)
    module.net.__class__ = type("Net", (nn.Sequential,), {**inherited, hook: halve})
    facts = {"class_names": ["cat", "dog", "fox"], "data_hash": "x", "image_size": 2}
    said = load(module, checkpoint[1], facts)
    assert "position embeddings resampled" in said
    assert torch.equal(module.net[1].weight, checkpoint[0].net[1].weight / 2)


def test_another_net_is_refused(checkpoint):
    facts = {"class_names": ["cat", "dog", "fox"], "data_hash": "x", "image_size": 2}
    with pytest.raises(UserError, match=r"net.1.bias is \(5,\) there, \(6,\) here"):
        load(Task(3, width=6), checkpoint[1], facts)


def test_features_of_another_width_begin_random(checkpoint):
    """Behind a ReLU, as in task=image_and_numbers, zeros would never learn."""
    module = Task(6)
    before = module.net[2].weight.clone()
    facts = {"class_names": ["cat", "dog", "fox"], "num_classes": 3, "data_hash": "x"}
    said = load(module, checkpoint[1], {**facts, "image_size": 2})
    assert torch.equal(module.net[2].weight, before) and before.abs().min() > 0
    assert torch.equal(module.net[1].weight, checkpoint[0].net[1].weight)
    assert "the head is new" in said


def test_a_head_for_numbers_says_that_there_are_no_classes(checkpoint):
    facts = {"class_names": [], "num_classes": 1, "data_hash": "x"}
    said = load(Task(1), checkpoint[1], facts)
    assert "the classes were cat, dog, fox, now none;" in said


def joined(class_names):
    """A task with a head beside its net, and the facts about its data."""
    torch.manual_seed(len(class_names))
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6))
    options = {"outputs": 6, "inputs": ["age"], "hidden": 5, "loss": nn.CrossEntropyLoss()}
    module = ImageAndNumbers(net, num_classes=len(class_names), **options)
    facts = {"class_names": class_names, "num_classes": len(class_names)}
    return module, {**facts, "data_hash": "x", "image_size": 2}


@pytest.fixture
def joined_checkpoint(tmp_path):
    before, facts = joined(["cat", "dog", "fox"])
    state = {"state_dict": before.state_dict(), "lockstep": {"config": {}, "data": facts}}
    write_checkpoint(state, tmp_path / "joined.ckpt")
    return before, str(tmp_path / "joined.ckpt")


@pytest.mark.parametrize("names", [["cat", "dog", "gnu"], ["cat", "dog"]])
def test_a_head_beside_the_net_is_new_for_other_classes(joined_checkpoint, names):
    before, path = joined_checkpoint
    module, facts = joined(names)
    said = load(module, path, facts)
    assert not module.head[2].weight.any() and not module.head[2].bias.any()
    assert torch.equal(module.head[0].weight, before.head[0].weight)
    assert torch.equal(module.net[1].weight, before.net[1].weight)
    assert "the head is new (head.2.bias, head.2.weight): the classes were cat, dog, fox" in said
    assert said.count("the head") == 1


@pytest.mark.parametrize(
    ("names", "counts", "is_warned"),
    [
        (["fox", "cat", "dog"], [7, 5, 6], False),
        (["cat", "dog", "fox"], [5, 6, 8], True),
        (["ant", "bee", "fly"], [1, 2, 3], False),
    ],
)
def test_another_split_of_the_same_classes_is_warned_of(tmp_path, names, counts, is_warned):
    before, facts = joined(["cat", "dog", "fox"])
    facts["class_counts"] = [5, 6, 7]
    state = {"state_dict": before.state_dict(), "lockstep": {"config": {}, "data": facts}}
    write_checkpoint(state, tmp_path / "split.ckpt")
    module, facts = joined(names)
    said = load(module, str(tmp_path / "split.ckpt"), {**facts, "class_counts": counts})
    assert ("the split differs" in said) == is_warned


def test_a_head_beside_the_net_follows_the_order_of_classes(joined_checkpoint):
    before, path = joined_checkpoint
    module, facts = joined(["fox", "cat", "dog"])
    load(module, path, facts)
    inputs = torch.randn(3, 1, 2, 2), {"age": torch.randn(3)}
    assert torch.equal(module.joint_logits(*inputs), before.joint_logits(*inputs)[:, [2, 0, 1]])


def test_a_head_beside_the_net_stays_for_equal_classes(joined_checkpoint):
    before, path = joined_checkpoint
    module, facts = joined(["cat", "dog", "fox"])
    assert "the head" not in load(module, path, facts)
    assert torch.equal(module.head[2].weight, before.head[2].weight)


# What a rank sets up before it meets the others.


@pytest.fixture
def run(monkeypatch):
    """A run of one of two ranks on a GPU, on a machine of four cores."""
    monkeypatch.setattr(rank, "cores_of_rank", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    trainer = {
        "num_threads": "auto",
        "matmul_precision": "high",
        "deterministic": "auto",
        "launch": "process_per_device",
    }
    cluster = replace(local_cluster(0, 2, 29500), accelerator="gpu")
    yield Run({"seed": 1, "trainer": trainer}, cluster, RunFolder(Path("r")), Batch(2, 1, 1))
    torch.set_float32_matmul_precision("highest")


def test_a_gpu_rank_with_few_cores_warns(run, monkeypatch, caplog):
    monkeypatch.setattr(rank, "refuse_unusable_gpus", lambda indices: None)
    prepare_process(run)
    assert torch.backends.cudnn.benchmark and "Each rank has 2 CPU core(s)" in caplog.text
    run.config["trainer"]["deterministic"] = True
    prepare_process(run)
    assert not torch.backends.cudnn.benchmark


def test_only_an_explicit_true_fills_new_memory(run, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    run.cluster = replace(run.cluster, accelerator="cpu")
    for stated, is_filled in (("auto", False), (True, True), ("warn", False)):
        run.config["trainer"]["deterministic"] = stated
        prepare_process(run)
        assert torch.utils.deterministic.fill_uninitialized_memory is is_filled


def test_the_seed_reaches_every_generator_and_lightnings_samplers(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    run.cluster = replace(run.cluster, accelerator="cpu")

    def drawn(seed):
        run.config["seed"] = seed
        prepare_process(run)
        return [
            random.random(),
            np.random.rand(),
            torch.rand(1).item(),
            os.environ["PL_GLOBAL_SEED"],
        ]

    first, again, other = map(drawn, (1, 1, 2))
    assert first == again and not set(first) & set(other)


def test_breakpoint_is_of_rank_zero_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    set_breakpoints(local_cluster(0, 2, 29500))
    assert sys.breakpointhook is sys.__breakpointhook__, "the debugger of rank 0"
    set_breakpoints(local_cluster(1, 2, 29500))
    breakpoint()  # goes on
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    set_breakpoints(local_cluster(0, 2, 29500))
    with pytest.raises(UserError, match="needs a terminal: debug with trainer=cpu"):
        breakpoint()


@pytest.mark.parametrize(
    ("stated", "environ", "threads"),
    [
        ("auto", {}, 12),
        ("auto", {"OMP_NUM_THREADS": "3"}, 3),
        (2, {"OMP_NUM_THREADS": "3"}, 2),
        ("auto", {"LOCAL_WORLD_SIZE": "4"}, 3),
        # torchrun sets 1 where the user has set nothing.
        (
            "auto",
            {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"},
            6,
        ),
        ("auto", {"OMP_NUM_THREADS": "5", "TORCHELASTIC_RUN_ID": "none"}, 5),
        # Four jobs of a sweep side by side
        ("auto", {"LOCKSTEP_JOBS": "4"}, 3),
        ("auto", {"LOCKSTEP_JOBS": "4", "LOCAL_WORLD_SIZE": "2"}, 1),
        # A task that SLURM binds to no cores, its node's only one; its agent's ranks share them
        ("auto", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_CPUS_PER_TASK": "4"}, 4),
        ("auto", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_CPUS_PER_TASK": "4"}, 4),
        (
            "auto",
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_CPUS_PER_TASK": "4",
                "LOCKSTEP_AGENT": "1",
                "LOCAL_WORLD_SIZE": "2",
            },
            2,
        ),
    ],
)
def test_a_rank_takes_the_threads_that_are_its_own(stated, environ, threads, monkeypatch):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCKSTEP_AGENT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lockstep.process.environment.available_cores", lambda: 12)
    assert count_threads({"num_threads": stated}) == threads


PLATEAU = "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"


def module_of(*overrides):
    facts = {"num_classes": 10, "class_names": [], "image_size": 8, "channels": 1}
    config = plain(compose("train", ["model=small_cnn", *overrides]))
    return build_module({"choices": {}, **config}, facts)


@pytest.mark.parametrize(
    ("overrides", "monitor", "mode"),
    [
        ([], "val/acc", "max"),
        (["scheduler.monitor=train/loss"], "train/loss", "min"),
        (["+scheduler.monitor=train/acc"], "train/acc", "max"),
        (["scheduler.monitor=val/loss", "+scheduler.mode=max"], "val/loss", "max"),
        (["task=simclr", "data.views=2"], "train/loss", "min"),
    ],
)
def test_a_schedule_of_plateaus_has_its_own_metric(overrides, monitor, mode):
    module = module_of(PLATEAU, *overrides)
    assert (module.monitor, module.scheduler_factory.keywords["mode"]) == (monitor, mode)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["scheduler.monitor=val/loss"], "remove scheduler.monitor="),
        (
            [PLATEAU, "scheduler.monitor=val/loss", "task._target_=plain_task.Regression"],
            "Regression says in configure_optimizers",
        ),
    ],
)
def test_a_metric_that_no_schedule_goes_by_is_refused(overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        module_of(*overrides)


def test_a_plateau_schedule_goes_by_the_metric_over_a_resume(tmp_path):
    """val/acc does not improve at optimizer.lr=1e-30: the rate halves after each second epoch."""
    schedule = ["scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"]
    schedule += ["+scheduler.patience=1", "+scheduler.factor=0.5", "optimizer.lr=1e-30"]
    short = ["trainer.limit_train_batches=2", "trainer.log_every_n_steps=1", "seed=1"]
    start = ["experiment=quickstart", "run_id=r", "trainer.max_epochs=2"]
    succeed("train", *start, *schedule, *short, logs=tmp_path)
    done = succeed("train", "resume=r", "trainer.max_epochs=5", logs=tmp_path)
    with done.folder.metrics.open() as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file) if row["lr"]]
    expected = [1.0] * 6 + [0.5] * 4
    assert rates == pytest.approx([rate * 1e-30 for rate in expected])
    assert (
        torch.load(next(done.folder.checkpoints.glob("last*.ckpt")))["lr_schedulers"][0]["mode"]
        == "max"
    )


def test_weights_of_classes_that_nobody_counted_are_refused():
    with pytest.raises(UserError, match="loss.class_weights=auto needs the number"):
        module_of("loss.class_weights=auto")
    counted = SimpleNamespace(num_classes=2, class_counts=torch.tensor([90, 10]))
    assert data_facts(counted)["class_counts"] == [90, 10]


@pytest.mark.parametrize(
    ("attributes", "facts"),
    [
        ({"image_size": (8, 8), "num_classes": None}, {}),
        ({"num_classes": np.int64(3)}, {"num_classes": 3}),
        ({"class_names": ("a", "b"), "class_counts": None}, {"class_names": ["a", "b"]}),
        ({"num_classes": property(lambda self: len(self.later))}, {}),
    ],
)
def test_attributes_of_own_data_spoil_no_checkpoint(attributes, facts, tmp_path):
    data = type("Data", (pl.LightningDataModule,), attributes)()
    assert data_facts(data) == facts
    content = {"state_dict": {}, "lockstep": {"config": {}, "data": data_facts(data)}}
    write_checkpoint(content, tmp_path / "c.ckpt")
    assert read_checkpoint(tmp_path / "c.ckpt")["lockstep"]["data"] == facts


def built(name, *, trainable):
    config = plain(compose("train", [f"task._target_=plain_task.{name}", "data=synthetic"]))
    facts = {"num_classes": 10, "image_size": 8, "channels": 3}
    return build_module({"choices": {}, **config}, facts, trainable=trainable)


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("name", "typed", "sentence"),
    [
        ("Regression", "optimizer.lr=1e-4", "does not take optimizer=: remove optimizer.lr=1e-4"),
        ("Regression", "+model.freeze=head", "does not take model=.* add the parameter net"),
        ("Configured", "+optimizer.layer_decay=0.75", "add the parameter rules"),
    ],
)
def test_an_option_that_the_task_would_ignore_is_refused(name, typed, sentence, has_checkpoint):
    words = [f"task._target_=plain_task.{name}", "data=synthetic", typed]
    config = {"choices": {}, **plain(compose("train", words)), "overrides": words}
    with pytest.raises(UserError, match=sentence):
        build_module(config, {}, has_checkpoint=has_checkpoint)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_text_as_default_is_the_users_own_option(trainable):
    assert built("Worded", trainable=trainable).said == ("sgd", False)


def test_an_evaluation_builds_a_module_that_needs_an_optimizer():
    assert built("Needy", trainable=False).said == (None, None)
    assert built("Needy", trainable=True).said[0] is not None
