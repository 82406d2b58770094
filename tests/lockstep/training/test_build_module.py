"""What build_module decides of a net: its memory format."""

import re

import pytest
import torch
import yaml
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.config.instantiate import build
from lockstep.config.schema import missing_option
from lockstep.runs.errors import UserError
from lockstep.training.build_module import build_module, uses_channels_last
from lockstep.training.metrics import averaged_here, values_of
from models.small_cnn import SmallCNN
from models.timm import TimmModel


def test_channels_last_where_convolutions_are_depthwise_or_on_tensor_cores():
    assert uses_channels_last(TimmModel(3, 32, 3, "tf_efficientnet_lite0", pretrained=False), "auto")
    for net in (TimmModel(3, 32, 3, "resnet10t", pretrained=False), SmallCNN(3, 8, 1)):
        assert not uses_channels_last(net, "auto") and not uses_channels_last(net, False)
        assert uses_channels_last(net, True) and uses_channels_last(net, "auto", on_tensor_cores=True)
    vit = TimmModel(3, 32, 3, "vit_tiny_patch16_224", pretrained=False)
    assert not uses_channels_last(vit, "auto", on_tensor_cores=True)
    with pytest.raises(UserError, match="trainer.channels_last=nhwc: give true, false or auto"):
        uses_channels_last(SmallCNN(3, 8, 1), "nhwc")


@pytest.mark.parametrize(
    ("task", "target", "said"),
    [
        ("classifier", "labels", "takes a class .*task=classifier.*the data has several labels .*task=multilabel"),
        ("multilabel", "class", "takes several labels .*label_columns=.*the data has a class for each image"),
        ("segmentation", "class", "takes a mask .*data.target=mask .*the data has a class for each image"),
        ("regression", "labels", "takes a number .*data.target=number .*the data has several labels"),
    ],
)
def test_targets_that_the_task_does_not_take_are_refused(task, target, said):
    with pytest.raises(UserError, match=said):
        build_module(plain(compose("train", [f"task={task}", "model=small_cnn"])), {"target": target, "num_classes": 2})


def test_a_lazy_layer_is_named():
    with pytest.raises(UserError, match="layers.weight is of a lazy layer"):
        build_module(plain(compose("train", ["task._target_=plain_task.Lazy"])), {})


def test_the_metric_that_an_unknown_name_is_answered_with_gives_a_number():
    words = re.search(r"\+metrics\.auroc=(\{.*?\})", missing_option("metrics", "auroc", (CONFIGS,)))[1]
    auroc = averaged_here({"auroc": build(yaml.safe_load(words), {"num_classes": 3})}, 3)["auroc"]
    auroc.update(torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1]))
    assert float(auroc.compute().mean()) == pytest.approx((5 / 6 + 3 / 4 + 1) / 3)


@pytest.mark.parametrize("metric", [MulticlassAUROC, MulticlassAveragePrecision])
def test_a_class_without_images_is_left_out_and_said(metric, capsys):
    """sklearn's roc_auc_score of the four classes that are there gives the same."""
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (200,))
    logits = torch.randn(200, 5) + 2 * torch.nn.functional.one_hot(labels, 5)
    metrics = averaged_here({metric.__name__: metric(num_classes=5)}, 5)
    metrics[metric.__name__].update(logits, labels)
    (value,) = values_of(metrics, torch.bincount(labels, minlength=5), "val").values()
    shares = logits.softmax(1)
    score = {MulticlassAUROC: roc_auc_score, MulticlassAveragePrecision: average_precision_score}[metric]
    assert value == pytest.approx(sum(score(labels == c, shares[:, c]) for c in range(4)) / 4, abs=1e-6)
    assert f"val/{metric.__name__} leaves out classes 4, which have no image." in capsys.readouterr().out
    metrics[metric.__name__].reset()
    metrics[metric.__name__].update(logits[labels == 1], labels[labels == 1])
    assert values_of(metrics, torch.tensor([0, 9, 0, 0, 0]), "val") == {}
