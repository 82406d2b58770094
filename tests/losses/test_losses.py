"""Losses equal torch's, take soft targets, weigh classes, and know each image of an evaluation."""

import pytest
import timm.loss
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.process.errors import UserError
from lockstep.training.build_module import build_loss
from losses.bce import BinaryCrossEntropy
from losses.cross_entropy import CrossEntropy
from losses.focal import Focal
from tasks.classifier import losses_of_images, probabilities_of

COUNTS = [60, 30, 10]
torch.manual_seed(0)
LOGITS, LABELS = torch.randn(8, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 2, 0])
ONES = F.one_hot(LABELS, 3).double()
MIXED = 0.7 * ONES + 0.3 * ONES.flip(0)


@pytest.mark.parametrize("targets", [LABELS, MIXED])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_cross_entropy_is_that_of_torch(targets, smoothing):
    own = CrossEntropy(3, COUNTS, label_smoothing=smoothing)
    expected = F.cross_entropy(LOGITS, targets, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(own(LOGITS, targets), expected, rtol=1e-12, atol=1e-12)
    plain = F.cross_entropy(LOGITS, targets, reduction="none")
    torch.testing.assert_close(own.eval()(LOGITS, targets), plain, rtol=1e-12, atol=1e-12)
    assert own.train()(LOGITS.bfloat16(), targets).dtype == torch.float32


def test_focal_without_gamma_is_cross_entropy():
    assert torch.allclose(
        Focal(3, COUNTS, gamma=0)(LOGITS, MIXED), CrossEntropy(3, COUNTS)(LOGITS, MIXED), rtol=1e-12
    )
    share = LOGITS.softmax(1)[torch.arange(8), LABELS]
    torch.testing.assert_close(
        Focal(3, COUNTS, gamma=2)(LOGITS, LABELS), -((1 - share) ** 2) * share.log()
    )


def test_bce_is_the_mean_over_classes():
    own = BinaryCrossEntropy(3, COUNTS, label_smoothing=0.3)
    each = F.binary_cross_entropy_with_logits(LOGITS, 0.7 * ONES + 0.1, reduction="none")
    torch.testing.assert_close(own(LOGITS, LABELS), each.mean(1))
    assert torch.equal(probabilities_of(own, LOGITS), LOGITS.sigmoid())
    assert torch.equal(probabilities_of(nn.CrossEntropyLoss(), LOGITS), LOGITS.softmax(1))


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
def test_bce_counts_mixed_classes_whole_from_a_share_on(threshold):
    own, plain = (
        BinaryCrossEntropy(3, COUNTS, target_threshold=threshold),
        BinaryCrossEntropy(3, COUNTS),
    )
    timms = timm.loss.BinaryCrossEntropy(
        smoothing=0.0, target_threshold=threshold, reduction="none"
    )
    torch.testing.assert_close(own(LOGITS, MIXED), timms(LOGITS, MIXED).mean(1))
    assert torch.equal(own(LOGITS, LABELS), plain(LOGITS, LABELS))
    assert torch.equal(own.eval()(LOGITS, MIXED), plain(LOGITS, MIXED))


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_a_threshold_leaves_the_weight_of_a_mixed_image(threshold):
    options = {"target_threshold": threshold, "label_smoothing": 0.1}
    plain = BinaryCrossEntropy(3, COUNTS, **options)
    weighted = BinaryCrossEntropy(3, COUNTS, class_weights=[1, 2, 0.5], **options)
    weights = MIXED @ torch.tensor([1, 2, 0.5]).double()
    torch.testing.assert_close(weighted(LOGITS, MIXED), plain(LOGITS, MIXED) * weights)


@pytest.mark.parametrize("cls", [CrossEntropy, BinaryCrossEntropy, Focal])
def test_weights_of_classes_count_in_training_alone(cls):
    plain, auto = cls(3, COUNTS), cls(3, COUNTS, class_weights="auto")
    expected = torch.tensor([100 / 180, 100 / 90, 100 / 30], dtype=torch.float64)
    torch.testing.assert_close(auto(LOGITS, LABELS), plain(LOGITS, LABELS) * expected[LABELS])
    assert torch.equal(auto.eval()(LOGITS, LABELS), plain.eval()(LOGITS, LABELS))
    given = cls(3, COUNTS, class_weights=[1, 2, 0.5])
    weights = MIXED @ torch.tensor([1, 2, 0.5]).double()
    torch.testing.assert_close(given(LOGITS, MIXED), plain.train()(LOGITS, MIXED) * weights)
    assert not given.state_dict()


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), timm.loss.LabelSmoothingCrossEntropy(0.0), CrossEntropy(3, COUNTS)],
)
def test_each_image_of_any_loss(loss):
    expected = F.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(losses_of_images(loss, LOGITS, LABELS), expected)


def test_a_loss_without_single_values_counts_its_batch_mean(caplog):
    class OfSure(nn.Module):
        def forward(self, logits, labels):
            losses = F.cross_entropy(logits, labels, reduction="none")
            return losses[losses < losses.max()].mean()

    loss = OfSure()
    expected = loss(LOGITS, LABELS).expand(len(LABELS))
    for _ in range(2):
        torch.testing.assert_close(losses_of_images(loss, LOGITS, LABELS), expected)
    assert len(caplog.messages) == 1 and "OfSure" in caplog.text


def built(**loss):
    return build_loss({"loss": loss}, {"num_classes": 3, "class_counts": COUNTS})


def test_a_loss_of_another_library_replaces_the_options():
    unset = {"label_smoothing": 0.0, "class_weights": None}
    assert (
        built(_target_="timm.loss.LabelSmoothingCrossEntropy", smoothing=0.2, **unset).smoothing
        == 0.2
    )
    assert (
        built(
            _target_="torch.nn.CrossEntropyLoss", **{**unset, "label_smoothing": 0.1}
        ).label_smoothing
        == 0.1
    )
    assert (
        built(_target_="losses.cross_entropy.CrossEntropy", class_weights="auto").weights[2]
        == 100 / 30
    )
    with pytest.raises(UserError, match="has no option 'class_weights'"):
        built(_target_="torch.nn.CrossEntropyLoss", class_weights="auto")
    assert build_loss({}, {"num_classes": 3}) is None


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (
            CrossEntropy,
            {"class_weights": "balanced"},
            "balanced: give auto, or one positive number for each of 3",
        ),
        (CrossEntropy, {"class_weights": [1, 2, 0]}, "loss.class_weights"),
        (CrossEntropy, {"class_weights": True}, "loss.class_weights=True: give auto"),
        (CrossEntropy, {"label_smoothing": 1.5}, "loss.label_smoothing=1.5"),
        (Focal, {"gamma": -1}, "loss.gamma=-1"),
        (BinaryCrossEntropy, {"target_threshold": 1.0}, "loss.target_threshold=1.0"),
    ],
)
def test_bad_options_are_refused(cls, options, says):
    with pytest.raises(UserError, match=says):
        cls(3, COUNTS, **options)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_certain_image_has_a_gradient_under_focal_loss(gamma):
    logits = torch.tensor([[40.0, 0.0]], requires_grad=True)
    Focal(2, [1, 1], gamma=gamma)(logits, torch.tensor([0])).mean().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().max() < 1e-3


def test_a_softmax_of_16_bits_tells_near_certain_images_apart():
    logits = torch.tensor([[6.5, 0.0], [7.5, 0.0]], dtype=torch.bfloat16)
    for loss in (CrossEntropy(2, [1, 1]), torch.nn.CrossEntropyLoss()):
        first, second = probabilities_of(loss, logits)[:, 0]
        assert first == pytest.approx(0.9985, abs=1e-4) and first < second < 1


def test_probabilities_of_16_bits_keep_their_order():
    loss = BinaryCrossEntropy(2, [1, 1])
    probabilities = loss.probabilities(torch.tensor([[8.0, 12.0]], dtype=torch.bfloat16))
    assert probabilities[0, 0] < probabilities[0, 1] < 1
