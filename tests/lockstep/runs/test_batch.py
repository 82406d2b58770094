"""How a global batch is cut; scores from counts equal those of scikit-learn and torchmetrics."""

import math

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, precision_recall_fscore_support
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_f1_score

from lockstep.runs.batch import Batch, states_accumulation
from lockstep.runs.errors import UserError
from lockstep.runs.scores import class_scores, summary
from tasks.classifier import Counts


def test_a_batch_divides_by_ranks_and_accumulation():
    assert Batch.cut(128, 4, 8) == Batch.of_device(4, 4, 8) == Batch(global_size=128, per_device=4, accumulate=8)
    assert states_accumulation(["a=1", "++trainer.accumulate_grad_batches=2"])
    assert not states_accumulation(["trainer.accumulate_grad_batches_=2", "~trainer.accumulate_grad_batches"])


@pytest.mark.parametrize(
    ("cut", "sizes", "said"),
    [
        (Batch.cut, (100, 3, 2), "into 3 ranks × 2 accumulated batches: the nearest that do are 96 and 102."),
        (Batch.cut, (5, 4, 2), "the nearest that do are 8."),
        (Batch.cut, ("max", 2, 1), "data.global_batch_size='max': give a whole number from 1 on."),
        (Batch.cut, (True, 1, 1), "data.global_batch_size=True: give"),
        (Batch.cut, (8, 1, 0), "trainer.accumulate_grad_batches=0: give"),
        (Batch.within, (0, 2, 8), "data.global_batch_size=0: give"),
        (Batch.within, (64, 3, 32), "over 3 ranks: the nearest numbers of ranks over which it does are 2 and 4."),
        (Batch.within, (8, 9, 8), "over which it does are 8."),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_do(cut, sizes, said):
    with pytest.raises(UserError) as refused:
        cut(*sizes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((64, 2, 32), Batch(64, 32, 1)),
        ((64, 1, 32), Batch(64, 32, 2)),
        ((48, 2, 10), Batch(48, 8, 3)),  # 24 images of each rank: 12 are too many
        ((64, 4, math.inf), Batch(64, 16, 1)),
    ],
)
def test_accumulation_follows_the_number_of_ranks_within_what_a_device_takes(sizes, wanted):
    assert Batch.within(*sizes) == wanted


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("num_classes", [2, 40])
def test_scores_are_those_of_the_libraries(num_classes):
    """With 40 classes some of the 60 images' classes are not there, and some are never predicted."""
    torch.manual_seed(num_classes)
    labels = torch.randint(0, num_classes, (60,))
    logits = 2 * torch.randn(60, num_classes) + 3 * torch.nn.functional.one_hot(labels, num_classes)
    counts = Counts(num_classes, torch.device("cpu"))
    for part in torch.arange(60).split(7):
        counts.add(logits[part].argmax(1), labels[part], logits[part].softmax(1))
    confusion, calibration = counts.confusion.view(num_classes, -1).long().tolist(), counts.calibration.tolist()
    found, predicted = summary(confusion, calibration), logits.argmax(1)
    ece = multiclass_calibration_error(logits, labels, num_classes, n_bins=15).item()
    assert found["f1_macro"] == pytest.approx(multiclass_f1_score(logits, labels, num_classes).item(), abs=1e-6)
    assert found["ece"] == pytest.approx(ece, abs=1e-6)
    assert found["balanced_acc"] == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-12)
    expected = precision_recall_fscore_support(labels, predicted, labels=range(num_classes), zero_division=0)
    for score, precision, recall, f1, images in zip(class_scores(confusion), *expected, strict=True):
        assert (score.precision or 0, score.recall or 0, score.f1 or 0) == pytest.approx((precision, recall, f1))
        assert score.images == images


def test_nothing_counted_says_nothing():
    assert summary([[0, 0], [0, 0]], [[0, 0, 0.0]] * 15) == {}
    (score, other) = class_scores([[3, 0], [0, 0]])
    assert score.f1 == 1.0 and (other.precision, other.recall, other.f1) == (None, None, None)
