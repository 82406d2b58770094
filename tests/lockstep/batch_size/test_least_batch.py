"""The smallest batch that a net takes, for nets with and without BatchNorm over single values."""

import pytest
import torch

from lockstep.batch_size.least_batch import least_batch
from memory_runs import changed, planned

REFUSING = ["model=alexnet_bn", "data=synthetic", "data.image_size=127"]


@pytest.mark.parametrize(
    ("options", "own", "world_size", "least"),
    [
        (["model=small_cnn", "data=synthetic"], {}, 1, 1),
        (["model=vit_tiny_32", "data=synthetic", "data.image_size=32"], {}, 2, 1),
        (REFUSING, {}, 1, 2),
        (REFUSING, {}, 2, 2),
        (REFUSING, {"sync_batchnorm": True}, 2, 1),
        (REFUSING, {"sync_batchnorm": True}, 1, 2),
        (REFUSING, {"precision": "64-true"}, 1, 2),
        (REFUSING, {"micro_batches": 3}, 1, 6),
        (REFUSING, {"num_gpus": 4}, 1, 8),
        (["model=alexnet_bn", "data=synthetic", "data.image_size=224"], {}, 1, 1),
    ],
)
def test_nets_that_refuse_a_single_image(options, own, world_size, least, tmp_path):
    config = changed(planned([*options, "trainer=cpu"], tmp_path), "trainer", **own).config
    facts = {"num_classes": 10, "image_size": config["data"]["image_size"], "channels": 3}
    drawn = torch.get_rng_state()
    assert least_batch(config, facts, world_size) == least
    assert torch.equal(torch.get_rng_state(), drawn)
