"""export.py: what is given away says what the net says, and others' tools take it."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import export
from export import card_text, choose_formats, example_images, main
from lockstep.process.errors import UserError
from lockstep.records.record import RunRecord
from lockstep.training.inference import FinishedModel, load_finished
from lockstep.training.task import Task
from models.timm import TimmModel
from runs import succeed
from tasks.classifier import ImageClassifier
from tasks.regression import Regression
from template_task import BackboneAndHead

HAS_ONNX = all(find_spec(name) for name in export.PACKAGES_OF_FORMAT["onnx"])
SMALL_NET = [
    "data=synthetic",
    "data.num_images=300",
    "data.num_test_images=100",
    "trainer=cpu",
    "trainer.max_epochs=1",
]
SMALL_VIT = [
    "model=vit_tiny_32",
    "model.depth=2",
    "model.embed_dim=48",
    "data.image_size=16",
    *SMALL_NET,
]


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    done = succeed("train", *SMALL_VIT, "tags=[a|b]", logs=tmp_path_factory.mktemp("vit"))
    return done


@pytest.fixture(scope="module")
def exported(vit, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    formats = "safetensors,pt2" + (",onnx" if HAS_ONNX else "")
    ask = [
        f"ckpt_path={vit.record['run_id']}",
        f"log_dir={vit.logs}",
        f"out={out}",
        f"formats={formats}",
    ]
    assert main(ask) == 0
    return out


def test_the_export_alone_goes_to_the_hub(vit, tmp_path, monkeypatch, capsys):
    from huggingface_hub.utils import filter_repo_objects

    calls = []

    class Address(str):
        repo_id = "me/birds"

    class Hub:
        def create_repo(self, repo_id, **options):
            if repo_id == "refused":
                raise OSError("Token is required\nand more")
            calls.append((repo_id, options["private"]))
            return Address(f"https://hub/me/{repo_id}")

        def upload_folder(self, repo_id, folder_path, **options):
            names = [path.name for path in folder_path.iterdir()]
            uploaded = filter_repo_objects(names, allow_patterns=options.get("allow_patterns"))
            # A format of an earlier net goes.
            assert "model.onnx" in options["delete_patterns"]
            calls.append((repo_id, sorted(uploaded)))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    ask = [
        f"ckpt_path={vit.record['run_id']}",
        f"log_dir={vit.logs}",
        f"out={tmp_path / 'out'}",
        "formats=safetensors",
    ]
    assert main([*ask, "push_to=refused"]) == 2 and not (tmp_path / "out").exists()
    assert (
        "push_to=refused: Token is required (hf auth login, or HF_TOKEN," in capsys.readouterr().err
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.env").write_text("TOKEN=secret")
    assert (
        main([*ask, "push_to=birds"]) == 0
        and "uploaded to https://hub/me/birds" in capsys.readouterr().out
    )
    assert calls == [
        ("birds", True),
        ("me/birds", ["README.md", "config.json", "model.safetensors"]),
    ]


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("resnet10t", 48, {}),
        ("convnext_atto", 64, {"drop_path_rate": 0.1}),
        ("vit_tiny_patch16_224", 32, {"patch_size": 8, "embed_dim": 48, "depth": 2}),
        ("mobilenetv3_small_050", 48, {}),
        ("swin_tiny_patch4_window7_224", 56, {"embed_dim": 24, "depths": [1, 1, 1, 1]}),
        ("mixer_s32_224", 64, {}),
    ],
)
def test_timm_loads_any_of_its_models_as_the_card_says(
    tmp_path, monkeypatch, name, size, arguments
):
    net = TimmModel(
        num_classes=3, image_size=size, channels=3, name=name, pretrained=False, **arguments
    ).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    facts = {"class_names": ["a", "b", "c"], "num_classes": 3, "image_size": size, "channels": 3, "mean": [0.5] * 3,
             "std": [0.2] * 3, "resize": size, "fit": "crop", "interpolation": "bicubic",
             "data_hash": "0" * 64}  # fmt: skip
    config = {
        "model": {"_target_": "models.timm.TimmModel", "name": name},
        "data": {"name": "d"},
        "task": {},
    }
    path = tmp_path / "best.ckpt"
    path.write_bytes(b"")
    model = FinishedModel(
        ImageClassifier(net, num_classes=facts["num_classes"]), config, facts, path, RunRecord()
    )
    # Not 0: weights in a mapped file may lie at other addresses, for which PyTorch takes another
    # kernel
    assert export.largest_difference(model, export.write_weights(model, tmp_path), "cpu") < 1e-5
    written = json.loads((tmp_path / "config.json").read_text())
    (lines,) = re.findall(
        "```python\n(.*?)```", card_text(model, tmp_path, {"safetensors": 0.0}), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(lines, found)
    images = example_images(facts, 2)
    with torch.inference_mode():
        torch.testing.assert_close(found["net"](images), net(images))
    assert written["pretrained_cfg"]["mean"] == [0.5] * 3 and written["label_names"] == [
        "a",
        "b",
        "c",
    ]


def test_a_net_of_our_own_is_built_from_its_card(tmp_path, monkeypatch):
    words = [*SMALL_NET, "model.dropout=0.125", "data.image_size=12"]
    done = succeed("train", *words, logs=tmp_path / "logs")
    out = tmp_path / "out"
    run_id = done.record["run_id"]
    assert (
        main(
            [f"ckpt_path={run_id}", f"log_dir={done.logs}", f"out={out}", "formats=safetensors,pt2"]
        )
        == 0
    )
    assert json.loads((out / "config.json").read_text())["model"] == {
        "_target_": "models.small_cnn.SmallCNN", "num_classes": 10, "image_size": 12, "channels": 3, "dropout": 0.125,
        "head_dropout": 0.5,
    }  # fmt: skip
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    model = load_finished(run_id, done.logs)
    images = example_images(model.facts, 5)
    examples = re.findall("```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    monkeypatch.chdir(out)
    for example in examples:
        found = {}
        exec(example, found)
        with torch.inference_mode():
            torch.testing.assert_close(
                found["net"](images), model.net(images), rtol=1e-4, atol=1e-5
            )


def test_a_head_behind_a_timm_model_is_exported_with_it(tmp_path):
    facts = {"class_names": ["a", "b", "c"], "num_classes": 3, "image_size": 32, "channels": 3, "mean": [0.5] * 3,
             "std": [0.2] * 3, "resize": 32, "fit": "crop", "interpolation": "bicubic"}  # fmt: skip
    config = {
        "model": {"_target_": "template_task.BackboneAndHead"},
        "data": {"name": "d"},
        "task": {},
    }
    module = ImageClassifier(BackboneAndHead(3).eval(), num_classes=3)
    model = FinishedModel(module, config, facts, tmp_path / "best.ckpt", RunRecord())
    assert export.largest_difference(model, export.write_weights(model, tmp_path), "cpu") < 1e-5
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architecture"] == "BackboneAndHead" and written["num_classes"] == 3
    assert written["model"] == {
        "_target_": "template_task.BackboneAndHead", "num_classes": 3, "channels": 3,
    }  # fmt: skip


def test_timm_loads_the_exported_folder(exported, vit):
    import timm
    from huggingface_hub import ModelCard

    net, model = (
        timm.create_model(f"local-dir:{exported}", pretrained=True).eval(),
        load_finished(str(vit.folder.path)),
    )
    images = example_images(model.facts, 5)
    with torch.inference_mode():
        torch.testing.assert_close(net(images), model.net(images))
    config = json.loads((exported / "config.json").read_text())
    assert (
        config["pretrained_cfg"]["input_size"] == [3, 16, 16] and len(config["label_names"]) == 10
    )

    card = ModelCard.load(exported / "README.md")
    assert card.data.library_name == "timm" and card.data.pipeline_tag == "image-classification"
    (result,) = card.data.eval_results
    assert result.metric_type == "accuracy" and result.dataset_name == "synthetic"
    assert result.metric_value == pytest.approx(vit.record["metrics"]["test/acc"], abs=1e-6)
    text = card.text
    for fact in (
        vit.record["run_id"],
        vit.record["data_hash"][:16],
        vit.record["best_checkpoint"]["sha256"],
        "Commit",
    ):
        assert fact in text
    assert "timm.create_model(" in text and 'torch.export.load("model.pt2")' in text
    assert ('InferenceSession("model.onnx")' in text) == HAS_ONNX


@pytest.mark.parametrize(
    ("kind", "says", "is_silent"),
    [
        ("number", "The number is `logits` × 3 + 15.", "classification"),
        ("mask", "image-segmentation", "accuracy"),
    ],
)
def test_the_card_of_another_task_says_what_its_outputs_mean(tmp_path, kind, says, is_silent):
    facts = {"class_names": [], "num_classes": 1, "image_size": 8, "channels": 3, "mean": [0.5] * 3, "std": [0.2] * 3,
             "resize": 8, "fit": "crop", "interpolation": "bicubic", "data_hash": "0", "target": kind}  # fmt: skip
    config = {"model": {"_target_": "a.B"}, "data": {"name": "d"}, "task": {}}
    (tmp_path / "config.json").write_text('{"architecture": "b", "model": {"a": 1}}')
    module = Regression(torch.nn.Linear(1, 1), mean=15, std=3)
    model = FinishedModel(module, config, facts, tmp_path / "config.json", RunRecord())
    text = card_text(model, tmp_path, {})
    assert says in text and is_silent not in text


def test_a_card_of_other_targets_is_no_image_classification(tmp_path):
    facts = {"class_names": ["a", "b"], "num_classes": 2, "image_size": 8, "channels": 3, "mean": [0.5] * 3,
             "std": [0.2] * 3, "resize": 8, "fit": "crop", "interpolation": "bicubic", "data_hash": "0",
             "target": "dict"}  # fmt: skip
    config = {"model": {"_target_": "a.B"}, "data": {"name": "d"}, "task": {}}
    (tmp_path / "config.json").write_text('{"architecture": "b", "model": {"a": 1}}')
    record = RunRecord(code={"commit": "abc", "dirty": True})
    for module, tag in (
        (ImageClassifier(torch.nn.Linear(1, 2), num_classes=2), "image-classification"),
        (torch.nn.Linear(1, 1), "B"),
    ):
        text = card_text(
            FinishedModel(module, config, facts, tmp_path / "config.json", record), tmp_path, {}
        )
        assert f'tags: ["{tag}"' in text and "image-regression" not in text
        assert "| Commit | `abc` with uncommitted changes |" in text


def test_a_head_beside_the_net_is_refused():
    class Headed(Task):
        def __init__(self, net):
            super().__init__(net)
            self.head = torch.nn.Linear(2, 3)
            self.unused = torch.nn.Linear(2, 2)

        def predict_step(self, batch, batch_idx):
            return self.head(self.net(batch))

    facts = {"image_size": 2, "channels": 3, "mean": [0.5] * 3}
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    with pytest.raises(UserError, match="The task predicts by head beside its net"):
        export.check_exportable(FinishedModel(Headed(net), {}, facts, Path(), RunRecord()))
    export.check_exportable(
        FinishedModel(ImageClassifier(net, num_classes=2), {}, facts, Path(), RunRecord())
    )


def test_an_export_that_differs_is_not_good(vit, tmp_path, monkeypatch, capsys):
    def fail(model, out):
        raise ValueError("I/O error: No space left on device (os error 28)")

    ask = [
        f"ckpt_path={vit.record['run_id']}",
        f"log_dir={vit.logs}",
        f"out={tmp_path}",
        "formats=pt2",
        "overwrite=true",
    ]
    monkeypatch.setattr(
        export, "write_pt2", lambda model, out, device: lambda images: model.net(images) * 1.01
    )
    assert main(ask) == 1 and "pt2 differs from the net by" in capsys.readouterr().err
    monkeypatch.setattr(export, "write_weights", fail)
    assert main(ask) == 1 and f"no room on {tmp_path} (" in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_a_trainer_of_several_ranks_is_refused(vit, capsys):
    ask = [f"ckpt_path={vit.record['run_id']}", f"log_dir={vit.logs}", "trainer=ddp_sim"]
    assert main(ask) == 2 and "trainer=gpu or trainer=cpu" in capsys.readouterr().err


def test_a_run_whose_data_module_defines_no_images_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(
        "lockstep.training.inference.load_finished", lambda *_: SimpleNamespace(facts={})
    )
    assert (
        main(["ckpt_path=r"]) == 2
        and "does not define how images are made" in capsys.readouterr().err
    )


def test_missing_packages_are_named_with_what_works_here(monkeypatch, caplog):
    monkeypatch.setitem(export.PACKAGES_OF_FORMAT, "onnx", ("no_such_package",))
    with pytest.raises(
        UserError, match="formats=onnx needs no_such_package: .venv/bin/pip install no_such_package"
    ):
        choose_formats("safetensors,onnx,pt2")
    caplog.set_level("INFO")
    assert choose_formats("") == ["safetensors", "pt2"], "without a word: what can be made here"
    assert caplog.messages == [
        "onnx skipped, it needs no_such_package: .venv/bin/pip install no_such_package"
    ]
    with pytest.raises(
        UserError, match="formats=tflite: tflite is not one of safetensors, onnx, pt2"
    ):
        choose_formats("tflite")


def test_an_export_leaves_no_format_of_another_net(vit, tmp_path, capsys):
    (tmp_path / "model.onnx").write_bytes(b"another net")
    ask = [f"ckpt_path={vit.record['run_id']}", f"log_dir={vit.logs}", f"out={tmp_path}"]
    ask.append("formats=safetensors")
    assert main(ask) == 2 and "holds model.onnx, perhaps of another net" in capsys.readouterr().err
    assert main([*ask, "overwrite=true"]) == 0
    assert not (tmp_path / "model.onnx").exists() and (tmp_path / "model.safetensors").exists()


def test_a_model_that_is_loaded_changes_no_random_state(vit):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    load_finished(vit.record["run_id"], vit.logs)
    assert torch.equal(before, torch.get_rng_state())


def test_features_are_no_classes(tmp_path):
    """As those of task=simclr, whose data have classes all the same."""
    facts = {"class_names": ["a", "b"], "num_classes": 2, "image_size": 8, "channels": 3, "mean": [0.5] * 3,
             "std": [0.2] * 3, "resize": 8, "fit": "crop", "interpolation": "bicubic", "data_hash": "0",
             "target": "class"}  # fmt: skip
    config = {"model": {"_target_": "a.B"}, "data": {"name": "d"}, "task": {"outputs": 512}}
    (tmp_path / "config.json").write_text('{"architecture": "b", "model": {"a": 1}}')
    path = tmp_path / "config.json"
    model = FinishedModel(torch.nn.Linear(1, 512), config, facts, path, RunRecord())
    text = card_text(model, tmp_path, {})
    assert "give `logits` (batch, features)" in text and "Classes" not in text
    assert "image-classification" not in text and export._label_names(model) == []
    model.config["task"] = {}
    assert export._label_names(model) == ["a", "b"] and "Classes" in card_text(model, tmp_path, {})


@pytest.mark.parametrize(
    ("limit", "is_whole"), [(1.0, True), (None, True), (1, False), (0.5, False)]
)
def test_the_card_has_the_metrics_of_this_checkpoint(limit, is_whole):
    """Those of the last validation may be of later weights."""
    metrics = {"val/acc": 0.7, "val/acc_best": 0.8, "val/loss": 1.0, "test/map": 0.75}
    record = RunRecord(metrics=metrics, num_test=10)
    record.best_checkpoint.sha256 = "0"
    tests_all = export._tests_all_batches({"trainer": {"limit_test_batches": limit}})
    results = export._results_of_checkpoint(record, "0", is_test_whole=tests_all)
    assert results == {"val/acc_best": 0.8, **({"test/map": 0.75} if is_whole else {})}
