import torch

from models.airbench import Airbench


def patches(images):
    return images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1] * 4)


def correlated_images(count=64, channels=3):
    images = torch.randn(count, channels, 12, 12)
    return images.cumsum(2).cumsum(3) / 8 + 0.3 * images.mean(1, keepdim=True)


def test_whitening_gives_uncorrelated_outputs_of_equal_power_is_the_same_each_time_and_is_not_trained():
    torch.manual_seed(0)
    images = correlated_images()
    net, again = (Airbench(num_classes=10, image_size=12, channels=3) for _ in range(2))
    for each in (net, again):
        each.init_from_images(images)
    out = patches(images) @ net.whiten.weight.flatten(1).T
    half = out[:, :12]
    second_moment = half.T @ half / len(half)
    assert torch.allclose(second_moment, torch.diag(second_moment.diag()), atol=1e-2)
    assert second_moment.diag().min() > 0.5 and second_moment.diag().max() < 1.01
    assert torch.equal(out[:, 12:], -half) and torch.equal(net.whiten.weight, again.whiten.weight)
    rows = net.whiten.weight.flatten(1)[:12]  # an eigenvector's sign is fixed by its largest entry
    assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()
    assert not net.whiten.weight.requires_grad and net.whiten.bias.requires_grad
