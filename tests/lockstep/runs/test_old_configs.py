"""What commit 1658469 stored, in today's words; and what a model is called."""

import pytest
import yaml

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.runs.old_configs import model_name, today

SIZES = {"patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3, "drop_path_rate": None}
LATER = {"freeze": None}
OLD = {
    "vit_tiny_32": {
        "_target_": "models.timm_vit.TimmViT", "name": "vit_tiny_32", "timm_name": "vit_tiny_patch16_224",
        "pretrained": False, "weights": None, **SIZES,
    },
    "timm_vit": {
        "_target_": "models.timm_vit.TimmViT", "name": "resnet18", "timm_name": "vit_base_patch32_224",
        "pretrained": True, "weights": None, "drop_rate": None, "drop_path_rate": None,
    },
    "small_cnn": {"_target_": "models.small_cnn.SmallCNN", "name": "mine", "dropout": 0.25, "head_dropout": 0.5},
}  # fmt: skip
TODAY = {
    "vit_tiny_32": {"_target_": "models.timm.vit_tiny_32", "pretrained": False, "weights": None, **SIZES},
    "timm_vit": {
        "_target_": "models.timm.TimmModel", "name": "vit_base_patch32_224", "pretrained": True, "weights": None,
        "drop_rate": None, "drop_path_rate": None,
    },
    "small_cnn": {"_target_": "models.small_cnn.SmallCNN", "dropout": 0.25, "head_dropout": 0.5},
}  # fmt: skip
NAMES = {"vit_tiny_32": "vit_tiny_32", "timm_vit": "vit_base_patch32_224", "small_cnn": "small_cnn"}


@pytest.mark.parametrize("option", OLD)
def test_a_stored_config_is_what_this_version_would_have_composed(option):
    words = ["model=timm_vit", "model.timm_name=vit_base_patch32_224", "model.name=resnet18", "seed=3"]
    old = {"model": OLD[option], "choices": {"model": option, "data": "digits"}, "overrides": words}
    found = today(old)
    assert found["model"] == {**TODAY[option], **LATER} and old["model"] is OLD[option]
    assert found["overrides"] == ["model=vit", "model.name=vit_base_patch32_224", "seed=3"]
    assert found["choices"]["data"] == "digits" and "timm_vit" not in str(found)
    assert model_name(found) == NAMES[option]


def test_keys_that_came_later_are_there():
    found = today({"model": OLD["small_cnn"], "classifier": {"label_smoothing": 0.1}, "optimizer": {"lr": 0.1}})
    assert found["optimizer"] == {"lr": 0.1, "layer_decay": None, "head_lr_factor": 1.0, "decay_norms": True}
    assert found["classifier"] == {"_target_": "classifier.ImageClassifier", "label_smoothing": 0.1}
    assert found["verbose"] is found["quiet"] is False


def test_a_config_of_today_stays():
    own = {"model": {"_target_": "models.mine.Mine", "name": "kept", **LATER}, "choices": {"model": "mine"}}
    assert today(own) is own and model_name(own) == "mine"
    timm = {"model": {"_target_": "models.timm.TimmModel", "name": "resnet18", **LATER}, "choices": {"model": "timm"}}
    assert today(timm) is timm
    displayed = {"model": {"_target_": "models.mine.Mine", "name": "mine"}, "choices": {"model": "mine"}}
    assert today(displayed)["model"] == {"_target_": "models.mine.Mine", **LATER}, "as the howto showed it"
    assert today({"other": 1}) == {"other": 1}


def test_a_model_is_called_what_it_is():
    node = {"_target_": "models.timm.TimmModel", "name": "resnet18"}
    assert model_name({"model": node, "choices": {"model": "timm"}}) == "resnet18"
    assert model_name({"model": {"_target_": "models.alexnet.AlexNet"}}) == "AlexNet"


def test_a_config_from_before_fine_tuning_and_losses_is_as_composed_today():
    now = plain(compose("train", ["classifier.label_smoothing=0.1"]))
    old = {key: value for key, value in now.items() if key not in ("loss", "metrics")}
    old["model"] = {key: value for key, value in now["model"].items() if key != "freeze"}
    came_later = ("layer_decay", "head_lr_factor", "decay_norms")
    old["optimizer"] = {key: value for key, value in now["optimizer"].items() if key not in came_later}
    assert today(old) == now


def test_images_of_old_runs_go_on_as_they_were_trained():
    data = {"_target_": "data.image_folder.ImageFolderDataModule", "mean": None, "std": [0.5], "resize": 70}
    old = {"model": OLD["small_cnn"], "data": data, "choices": {"data": "image_folder"},
           "overrides": ["data=image_folder", "data.std=[0.5]"]}  # fmt: skip
    found = today(old)
    same = {"fit": "squash", "crop_pct": 1.0, "interpolation": "bilinear", "fold": None, "num_folds": None}
    assert found["data"] == {**data, **same}
    assert found["augmentation"] == yaml.safe_load((CONFIGS / "augmentation" / "crop_flip.yaml").read_text())
    assert found["choices"] == {"data": "image_folder", "augmentation": "crop_flip", "model": None}
    assert found["overrides"] == [
        "data=image_folder", "data.std=[0.5]", "++data.mean=null", "++data.crop_pct=1.0",
        "++data.interpolation=bilinear", "++data.fit=squash",
    ]  # fmt: skip
    assert today(found) == found, "once is enough"
    assert "fit" not in today({**old, "data": {"_target_": "data.digits.DigitsDataModule"}})["data"]
