"""What build_module decides of a net: its memory format."""

import pytest

from lockstep.runs.errors import UserError
from lockstep.training.build import pays_channels_last
from models.small_cnn import SmallCNN
from models.timm import TimmModel


def test_channels_last_where_convolutions_are_depthwise():
    assert pays_channels_last(TimmModel(3, 32, 3, "tf_efficientnet_lite0", pretrained=False), "auto")
    for net in (TimmModel(3, 32, 3, "resnet10t", pretrained=False), SmallCNN(3, 8, 1)):
        assert not pays_channels_last(net, "auto") and not pays_channels_last(net, False)
        assert pays_channels_last(net, True)
    with pytest.raises(UserError, match="trainer.channels_last=nhwc: give true, false or auto"):
        pays_channels_last(SmallCNN(3, 8, 1), "nhwc")
