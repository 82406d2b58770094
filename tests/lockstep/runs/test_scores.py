"""Scores from counts equal those of scikit-learn and torchmetrics."""

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, precision_recall_fscore_support
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_f1_score

from lockstep.runs.scores import class_scores, summary
from tasks.classifier import Counts


def counted(logits, labels, num_classes):
    counts = Counts(num_classes, torch.device("cpu"))
    for part in torch.arange(len(labels)).split(7):
        counts.add(logits[part].argmax(1), labels[part], logits[part].softmax(1))
    return counts.confusion.view(num_classes, -1).long().tolist(), counts.calibration.tolist()


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("num_classes", [2, 5, 40])
def test_scores_are_those_of_the_libraries(num_classes):
    """With 40 classes some of the 60 images' classes are not there, and some are never predicted."""
    torch.manual_seed(num_classes)
    labels = torch.randint(0, num_classes, (60,))
    logits = 2 * torch.randn(60, num_classes) + 3 * torch.nn.functional.one_hot(labels, num_classes)
    confusion, calibration = counted(logits, labels, num_classes)
    found, predicted = summary(confusion, calibration), logits.argmax(1)
    assert found["f1_macro"] == pytest.approx(multiclass_f1_score(logits, labels, num_classes).item(), abs=1e-6)
    assert found["ece"] == pytest.approx(
        multiclass_calibration_error(logits, labels, num_classes, n_bins=15).item(), abs=1e-6
    )
    assert found["balanced_acc"] == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-12)
    expected = precision_recall_fscore_support(labels, predicted, labels=range(num_classes), zero_division=0)
    for score, precision, recall, f1, images in zip(class_scores(confusion), *expected, strict=True):
        assert (score.precision or 0, score.recall or 0, score.f1 or 0) == pytest.approx((precision, recall, f1))
        assert score.images == images
    assert sum(row[0] for row in calibration) == 60


def test_nothing_counted_says_nothing():
    assert summary([[0, 0], [0, 0]], [[0, 0, 0.0]] * 15) == {}
    (score, other) = class_scores([[3, 0], [0, 0]])
    assert score.f1 == 1.0 and (other.precision, other.recall, other.f1) == (None, None, None)


def test_a_bin_holds_its_upper_end():
    counts = Counts(2, torch.device("cpu"))
    sure = torch.tensor([[0.55, 0.45], [0.4, 0.6], [1.0, 0.0]], dtype=torch.float64)
    counts.add(sure.argmax(1), torch.tensor([0, 0, 0]), sure)
    assert {i: row for i, row in enumerate(counts.calibration.tolist()) if row[0]} == {
        8: [2, 1, pytest.approx(1.15)],  # from 8/15 to 9/15
        14: [1, 1, 1.0],
    }
