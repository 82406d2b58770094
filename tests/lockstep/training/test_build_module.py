"""What build_module decides of a net: its memory format."""

import re

import pytest
import torch
import yaml

from lockstep.config.compose import CONFIGS
from lockstep.config.schema import missing_option
from lockstep.runs.errors import UserError
from lockstep.training.build import build_metrics, pays_channels_last
from models.small_cnn import SmallCNN
from models.timm import TimmModel


def test_channels_last_where_convolutions_are_depthwise():
    assert pays_channels_last(TimmModel(3, 32, 3, "tf_efficientnet_lite0", pretrained=False), "auto")
    for net in (TimmModel(3, 32, 3, "resnet10t", pretrained=False), SmallCNN(3, 8, 1)):
        assert not pays_channels_last(net, "auto") and not pays_channels_last(net, False)
        assert pays_channels_last(net, True)
    with pytest.raises(UserError, match="trainer.channels_last=nhwc: give true, false or auto"):
        pays_channels_last(SmallCNN(3, 8, 1), "nhwc")


def test_the_metric_that_an_unknown_name_is_answered_with_gives_a_number():
    words = re.search(r"\+metrics\.auroc=(\{.*?\})", missing_option("metrics", "auroc", (CONFIGS,)))[1]
    (auroc,) = build_metrics({"metrics": {"auroc": yaml.safe_load(words)}}, 3).values()
    auroc.update(torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1]))
    assert float(auroc.compute()) == pytest.approx((5 / 6 + 3 / 4 + 1) / 3)
