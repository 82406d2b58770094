import torch
from torchvision.models import alexnet

from models.alexnet import AlexNet, AlexNetBN


def test_logits_equal_torchvision_with_its_weights():
    torch.manual_seed(0)
    reference = alexnet(num_classes=7).eval()
    ours = AlexNet(num_classes=7, image_size=224, channels=3).eval()
    ours.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(images), reference(images))


def test_alexnet_bn_pools_after_1_2_3_5_and_ends_each_block_with_batch_norm():
    kinds = [type(layer).__name__ for layer in AlexNetBN(num_classes=2, image_size=224, channels=3).features]
    pooled = ["Conv2d", "ReLU", "MaxPool2d", "BatchNorm2d"]
    assert kinds == pooled * 3 + ["Conv2d", "ReLU", "BatchNorm2d"] + pooled
