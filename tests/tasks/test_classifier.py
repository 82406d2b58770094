"""The module's choice of an optimizer's kernel, its counts, and what it refuses of a net."""

import logging
import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC

from lockstep.process.errors import UserError
from lockstep.training.parameter_groups import GroupRules
from models.small_cnn import SmallCNN
from optimizers.airbench import AirbenchMuon
from schedulers.cosine import linear
from tasks.classifier import ImageClassifier, check_logits
from tasks.segmentation import Segmentation


def module(optimizer, precision="32-true"):
    torch.manual_seed(0)
    classifier = ImageClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), optimizer, num_classes=3
    )
    loop = SimpleNamespace(setup_data=lambda: None)
    classifier._trainer = SimpleNamespace(
        precision=precision, strategy=SimpleNamespace(), fit_loop=loop
    )
    return classifier


def step(classifier, optimizer):
    optimizer.zero_grad()
    classifier.training_step((torch.ones(2, 1, 2, 2).double(), torch.tensor([0, 2])), 0).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("optimizer", "precision", "is_sharded", "kernel"),
    [
        (partial(torch.optim.SGD, lr=0.1), "32-true", False, ["fused"]),
        (torch.optim.Adam, "32-true", False, ["fused"]),
        (torch.optim.AdamW, "32-true", False, ["fused"]),
        (partial(torch.optim.AdamW, fused=False), "32-true", False, []),
        (partial(torch.optim.AdamW, foreach=True), "32-true", False, ["foreach"]),
        (torch.optim.AdamW, "16-mixed", False, []),  # clipping needs gradients without their scale
        (torch.optim.Adadelta, "32-true", False, []),
        (AirbenchMuon, "32-true", False, []),
        (torch.optim.AdamW, "32-true", True, ["fused"]),
        (torch.optim.AdamW, "16-mixed", True, ["foreach"]),
        (partial(torch.optim.SGD, lr=0.1), "32-true", True, ["foreach"]),
        (torch.optim.Adadelta, "32-true", True, ["foreach"]),
    ],
)
def test_one_kernel_steps_all_parameters_where_torch_has_it(
    optimizer, precision, is_sharded, kernel
):
    classifier = module(partial(optimizer), precision)
    if is_sharded:
        classifier.net[1].weight.full_tensor = lambda: None  # what tells a DTensor
    group = classifier.configure_optimizers().param_groups[0]
    assert [name for name in ("fused", "foreach") if group.get(name)] == kernel


def test_what_the_optimizer_refuses_is_one_sentence():
    with pytest.raises(
        UserError, match="optimizer: AdamW refuses its options .Invalid learning rate: -1"
    ):
        module(partial(torch.optim.AdamW, lr=-1)).configure_optimizers()


@pytest.mark.parametrize(
    ("schedule", "interval", "rates"),
    [
        (partial(ExponentialLR, gamma=0.5), "epoch", [1.0, 0.5, 0.25]),
        (
            partial(OneCycleLR, max_lr=4.0, pct_start=0.6, anneal_strategy="linear"),
            "step",
            [0.16, 2.08, 4.0],
        ),
        (
            partial(CyclicLR, base_lr=0.0, max_lr=1.0, step_size_up=2, cycle_momentum=False),
            "step",
            [0.0, 0.5, 1.0],
        ),
        (linear, "step", [1.0, 0.8, 0.6]),
    ],
)
def test_a_schedule_of_torch_is_told_what_it_takes(schedule, interval, rates):
    classifier = module(partial(torch.optim.SGD, lr=1.0))
    classifier.scheduler_factory, found = partial(schedule), []
    classifier.trainer.estimated_stepping_batches = classifier.trainer.num_training_batches = 5
    classifier.trainer.accumulate_grad_batches = 1
    stepped = classifier.configure_optimizers()
    for _ in rates:
        found.append(stepped["optimizer"].param_groups[0]["lr"])
        stepped["optimizer"].step()
        stepped["lr_scheduler"]["scheduler"].step()
    assert stepped["lr_scheduler"]["interval"] == interval and found == pytest.approx(rates)


@pytest.mark.parametrize(
    "schedule",
    [
        partial(OneCycleLR, max_lr=4.0, total_steps=4, pct_start=0.5),
        partial(CyclicLR, base_lr=1.0, max_lr=4.0, step_size_up=1, cycle_momentum=False),
    ],
)
def test_a_cycle_scales_the_rate_of_each_group(schedule):
    classifier = module(partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    classifier.net = SmallCNN(3, 8, 1)
    classifier.rules = GroupRules(layer_decay=0.5, head_lr_factor=10.0)
    classifier.scheduler_factory = schedule
    classifier.trainer.estimated_stepping_batches = classifier.trainer.num_training_batches = 4
    classifier.trainer.accumulate_grad_batches = 1
    made = classifier.configure_optimizers()
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    rates = [group["lr"] for group in made["optimizer"].param_groups]
    assert rates == pytest.approx([0.5, 1.0, 2.0, 40.0])


def test_an_epoch_has_as_many_steps_as_lightning_makes():
    def schedule(optimizer, steps_per_epoch):
        told.append(steps_per_epoch)
        return ExponentialLR(optimizer, 1)

    classifier, told = module(partial(torch.optim.SGD, lr=1.0)), []
    classifier.scheduler_factory = partial(schedule)
    classifier.trainer.estimated_stepping_batches = classifier.trainer.num_training_batches = 5
    classifier.trainer.accumulate_grad_batches = 2
    classifier.configure_optimizers()
    assert told == [3]
    classifier.trainer.num_training_batches = 50
    classifier.configure_optimizers()
    assert told.pop() == 25, "the training ends within the first epoch"
    classifier.trainer.num_training_batches = math.inf  # data without a length
    classifier.configure_optimizers()
    assert told == [3, 5], "the steps of the training"
    classifier.trainer.estimated_stepping_batches = math.inf
    with pytest.raises(UserError, match="give trainer.max_steps="):
        classifier.configure_optimizers()


@pytest.mark.parametrize("saved, loaded", [("16-mixed", "32-true"), ("32-true", "16-mixed")])
def test_a_checkpoint_does_not_bring_its_kernel(saved, loaded):
    first, second = (
        module(partial(torch.optim.AdamW, lr=0.1), precision) for precision in (saved, loaded)
    )
    one, other = first.configure_optimizers(), second.configure_optimizers()
    step(first, one)
    second.load_state_dict(first.state_dict())
    own = other.param_groups[0]["fused"]
    other.load_state_dict(deepcopy(one.state_dict()))  # it would share the moments
    assert other.param_groups[0]["fused"] == own != one.param_groups[0]["fused"]
    step(first, one)
    step(second, other)
    torch.testing.assert_close(first.net[1].weight, second.net[1].weight, rtol=1e-13, atol=1e-13)


def test_metrics_rank_batches_of_small_logits_with_others():
    torch.manual_seed(0)
    metric = MulticlassAUROC(num_classes=3)
    classifier = ImageClassifier(nn.Flatten(), num_classes=3, metrics={"auroc": metric}).eval()
    classifier._trainer = SimpleNamespace(testing=False)
    classifier.on_validation_epoch_start()
    labels = torch.arange(12) % 3
    logits = torch.cat([torch.rand(6, 3), 4 * torch.randn(6, 3)])
    for rows in (slice(6), slice(6, 12)):
        classifier.validation_step((logits[rows].view(6, 1, 1, 3), labels[rows]), 0)
    expected = MulticlassAUROC(num_classes=3, average="none")(logits.softmax(1), labels)
    torch.testing.assert_close(metric.compute(), expected)


def test_hits_before_a_checkpoint_count_after_it():
    strategy = SimpleNamespace(reduce=lambda counts, reduce_op: 2 * counts, root_device="cpu")
    classifier = ImageClassifier(nn.Flatten(), num_classes=3)
    classifier._trainer = SimpleNamespace(strategy=strategy, interrupted=False)
    logits = torch.eye(3)[[0, 1, 2, 2]].view(4, 1, 1, 3).requires_grad_()
    classifier.training_step((logits, torch.tensor([0, 1, 1, 2])), 0)
    mixed = 0.6 * torch.eye(3)[[0, 0, 0, 2]] + 0.4 * torch.eye(3)[[1, 1, 1, 1]]
    classifier.training_step((logits, mixed), 1)
    checkpoint = {}
    classifier.on_save_checkpoint(checkpoint)
    assert checkpoint == {"train_sums": {"train/acc": [10, 16]}}
    assert (
        classifier.pop_sums("train")["train/acc"].tolist() == [5, 8]
        and classifier.pop_sums("train") == {}
    )
    for is_zero, expected in ((True, [10, 16]), (False, [0, 0])):
        other = ImageClassifier(nn.Flatten(), num_classes=3)
        state = SimpleNamespace(fn="fit")
        other._trainer = SimpleNamespace(strategy=strategy, is_global_zero=is_zero, state=state)
        other.on_load_checkpoint(checkpoint)
        assert other.pop_sums("train")["train/acc"].tolist() == expected
        state.fn = "test"
        other.on_load_checkpoint(checkpoint)
        assert not other.sums


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (torch.zeros(4, 10), "gives 10 logits for an image and the data have 3 classes"),
        (torch.zeros(4, 3, 1, 1), r"gives outputs of the shape \(3, 1, 1\)"),
        (torch.zeros(4), r"gives outputs of the shape \(\)"),
        (
            (torch.zeros(4, 3), torch.zeros(4, 3)),
            "The model returns a tuple: let its forward return",
        ),
        ({"logits": torch.zeros(4, 3)}, "The model returns a dict: let its forward return"),
    ],
)
def test_a_net_with_other_outputs_is_refused(outputs, said):
    with pytest.raises(UserError, match=said):
        check_logits(outputs, 3)
    check_logits(torch.zeros(4, 3), 3)


def test_a_single_class_is_refused():
    with pytest.raises(UserError, match="a single class, and a classifier needs two"):
        ImageClassifier(nn.Identity(), num_classes=1)


def test_a_confusion_matrix_is_counted_where_it_is_asked_for():
    """21,841 classes would take 3.8 GB in every validation, and as much in the test."""
    many = ImageClassifier(nn.Identity(), num_classes=21_841)
    many.on_validation_epoch_start()
    assert many.counts.confusion is None and len(many.counts.images) == 21_841
    many.on_test_epoch_start()
    assert many.counts.confusion is None
    few = ImageClassifier(nn.Identity(), num_classes=3)
    few.on_validation_epoch_start()
    assert few.counts.confusion is None
    few.on_test_epoch_start()
    assert few.counts.confusion.shape == (9,)


class Sure(nn.Module):
    """Take the brightest of the channels for the class."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images):
        return self.scale * images.flatten(1)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class CutShort(pl.Callback):
    def on_test_batch_end(self, *_, **__):
        raise RuntimeError("cut short")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("task", "net", "shape"),
    [(ImageClassifier, nn.Flatten(), (4,)), (Segmentation, nn.Identity(), (4, 1, 1))],
)
def test_a_test_counts_nothing_of_one_cut_short(task, net, shape):
    images = torch.eye(3)[[0, 1, 2, 0]][..., None, None]
    labels = torch.tensor([0, 1, 0, 1]).reshape(shape)
    loader = DataLoader(list(zip(images, labels, strict=True)), batch_size=2)
    module = task(net, num_classes=3)
    with pytest.raises(RuntimeError, match="cut short"):
        pl.Trainer(**QUIET, callbacks=[CutShort()]).test(module, loader)
    trainer = pl.Trainer(**QUIET)
    trainer.test(module, loader, verbose=False)
    expected = nn.functional.cross_entropy(images[..., 0, 0], labels.flatten())
    assert trainer.callback_metrics["test/loss"].item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("classes", "warns"), [(3, True), (2, False)])
def test_a_perfect_first_epoch_is_reported(classes, warns, caplog):
    labels = torch.arange(30) % classes
    images = nn.functional.one_hot(labels).float()[..., None, None]
    loader = DataLoader(list(zip(images, labels, strict=True)), batch_size=10)
    classifier = ImageClassifier(Sure(), partial(torch.optim.SGD, lr=0.1), num_classes=classes)
    trainer = pl.Trainer(**QUIET, max_epochs=2)
    with caplog.at_level(logging.WARNING, "tasks.classifier"):
        trainer.fit(classifier, loader, loader)
    said = [record.message for record in caplog.records if record.name == "tasks.classifier"]
    assert len(said) == warns and all("100 % in the first epoch" in each for each in said)


def test_label_smoothing_is_of_the_training_alone():
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])
    smooth = ImageClassifier(nn.Identity(), num_classes=2, label_smoothing=0.2)
    plain = ImageClassifier(nn.Identity(), num_classes=2)
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(smooth.train().loss(logits, labels), expected)
    torch.testing.assert_close(
        smooth.eval().loss(logits, labels), plain.eval().loss(logits, labels)
    )
