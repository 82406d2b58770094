"""Each augmentation is torchvision's own on the same draw.

Its yaml states its options; grey images pass through it.
"""

import inspect
from importlib import import_module

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.config.compose import CONFIGS
from lockstep.config.instantiate import build, parameters_of
from lockstep.data.augmentation import Augmentation
from lockstep.data.framing import Framing
from lockstep.process.errors import UserError


def with_defaults(name):
    option = yaml.safe_load((CONFIGS / f"augmentation/{name}.yaml").read_text())
    return {
        key: value
        for base in option.pop("defaults", ())
        for key, value in with_defaults(base).items()
    } | option


OPTIONS = {
    path.stem: with_defaults(path.stem)
    for path in sorted((CONFIGS / "augmentation").glob("*.yaml"))
}
SHARED = OPTIONS.pop("default")
FRAMING = Framing(
    24, 28, interpolation="bicubic", crop_padding=3, flip=True, mean=(0.5, 0.25, 0.75)
)
FILL = [128, 64, 191]
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8))
CROP = [
    v2.RandomResizedCrop(24, interpolation=InterpolationMode.BICUBIC),
    v2.RandomHorizontalFlip(),
]
WHOLE = [
    v2.Resize(28, InterpolationMode.BICUBIC),
    v2.CenterCrop(28),
    v2.RandomCrop(24, 3),
    v2.RandomHorizontalFlip(),
]
THEIRS = {
    "none": [WHOLE[0], v2.CenterCrop(24)],
    "crop_flip": WHOLE,
    "crop_flip color_jitter=[0.4,0.3,0.2,0.1] erasing_prob=0.7": [
        *WHOLE, v2.ColorJitter(0.4, 0.3, 0.2, 0.1), v2.RandomErasing(0.7, value=FILL),
    ],
    "resized_crop": CROP,
    "rand_augment": [*CROP, v2.RandAugment(2, 9, fill=FILL)],
    "rand_augment scale=null": [*WHOLE, v2.RandAugment(2, 9, fill=FILL)],
    "trivial_augment": [*CROP, v2.TrivialAugmentWide(fill=FILL)],
    "auto_augment": [*CROP, v2.AutoAugment(AutoAugmentPolicy.IMAGENET, fill=FILL)],
    "three_augment": [
        v2.Resize(24, InterpolationMode.BICUBIC), v2.RandomCrop(24, 4, padding_mode="reflect"),
        v2.RandomHorizontalFlip(),
        v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(128, p=1), v2.GaussianBlur(13, (0.1, 2.0))]),
        v2.ColorJitter(0.3, 0.3, 0.3),
    ],
}  # fmt: skip


def built(words):
    name, *stated = words.split()
    return build(
        OPTIONS[name]
        | {key: yaml.safe_load(value) for key, value in (word.split("=") for word in stated)}
    )


def drawn(operations, seed, image=IMAGE):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return np.asarray(operations(image))


@pytest.mark.parametrize("name", THEIRS)
def test_pixels_are_torchvisions_on_the_same_draw(name):
    ours, theirs = built(name).pipeline(FRAMING), v2.Compose(THEIRS[name])
    found = [drawn(ours, seed) for seed in range(20)]
    assert found[0].shape == (24, 24, 3) and found[0].dtype == np.uint8
    assert all(np.array_equal(image, drawn(theirs, seed)) for seed, image in enumerate(found))
    different = len({image.tobytes() for image in found})
    assert different == 1 if name == "none" else different > 15


@pytest.mark.parametrize("name", OPTIONS)
def test_grey_images_and_every_option_together(name):
    augmentation = built(f"{name} color_jitter=[0.4,0.4,0.4,0.1] erasing_prob=0.5")
    pipeline = augmentation.pipeline(Framing(24, 28, channels=1, mean=(0.5,)))
    images = [drawn(pipeline, seed, IMAGE.convert("L")) for seed in range(10)]
    assert {image.shape for image in images} == {(24, 24)} and len(
        {image.tobytes() for image in images}
    ) == 10
    assert isinstance(augmentation, Augmentation)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_yaml_states_every_option_with_its_default(name):
    option = OPTIONS[name]
    module, _, cls = option["_target_"].rpartition(".")
    parameters, _ = parameters_of(getattr(import_module(module), cls))
    assert set(option) - {"_target_"} == set(parameters)
    for key, parameter in parameters.items():
        default = (
            list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        )
        if parameter.default is not inspect.Parameter.empty and name != "none":
            assert option[key] == default, key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("resized_crop scale=[0.5]", "augmentation.scale=.* must be two numbers"),
        ("resized_crop scale=[0.5,1.5]", "to 1"),
        ("rand_augment magnitude=31", "augmentation.magnitude=31 must be from 0 to 30"),
        ("rand_augment num_ops=0", "augmentation.num_ops=0 must be at least 1"),
        (
            "auto_augment found_on=mnist",
            "augmentation.found_on=mnist must be one of imagenet, cifar10, svhn",
        ),
        ("three_augment", "data.image_size=6 must be at least 7"),
        ("crop_flip erasing_prob=1.1", "erasing_prob=1.1: .* in the interval .0.0, 1.0..$"),
        (
            "crop_flip mixup_alpha=-1",
            "augmentation.mixup_alpha=-1 and cutmix_alpha=0.0 must be from 0",
        ),
        (
            "crop_flip color_jitter=[1,1,1,1,1]",
            r"color_jitter=\[1, 1, 1, 1, 1\] .*takes from 1 to 5 positional",
        ),
        ("crop_flip color_jitter=0.4", "color_jitter=0.4 must be up to four numbers, as "),
        ("resized_crop scale=0.5", "augmentation.scale=0.5 must be two numbers"),
        ("crop_flip color_jitter=[0,0,0,0.6]", "hue values should be between"),
    ],
)
def test_options_that_are_none(words, message):
    with pytest.raises(UserError, match=message):
        built(words).pipeline(Framing(6, 6))
