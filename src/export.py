"""Export a trained model: safetensors, ONNX, torch.export and a model card.

    python src/export.py ckpt_path=<run_id | FILE | s3://…> [out=exports/<run_id>]
        [formats=safetensors,onnx,pt2] [push_to=ORG/NAME] [trainer=gpu | cpu] [overwrite=false]

By default it makes every format whose packages are installed. ONNX needs onnx, onnxscript and
onnxruntime. Each format is compared with the net itself, on a GPU where there is one, or on the
device that trainer= names.

The files of an earlier export in the folder are removed. In a folder that out= names, this needs
overwrite=true. push_to= uploads the files of the export to the Hugging Face hub, as a private
repository. A timm model is loaded from the folder by
timm.create_model("local-dir:FOLDER", pretrained=True).
"""

import copy
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.config.keys import root_of
from lockstep.config.schema import key_of
from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError, as_disk_full_error
from lockstep.process.files import sha256_of
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text
from lockstep.process.script import is_true, run_with_options
from lockstep.records.config import Config, data_name, model_name
from lockstep.records.record import RunRecord

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None,
    "out": "",
    "formats": "",
    "log_dir": str(REPOSITORY / "logs"),
    "push_to": "",
    "overwrite": "false",
}
# All files that an export may write.
EXPORT_FILES = ("README.md", "config.json", "model.onnx", "model.pt2", "model.safetensors")
# The largest difference as a share of the largest logit. Another runtime sums in another order.
TOLERANCE = 1e-4
PACKAGES_OF_FORMAT = {"safetensors": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": ()}
MAX_BATCH = 4096
CUDA_PROVIDER = "CUDAExecutionProvider"  # of onnxruntime
# These options of a model choose its weights. An export has weights and does not name them.
WEIGHT_OPTIONS = ("freeze", "weights", "pretrained")


def choose_formats(text: str) -> list[str]:
    """Return the formats that `text` names. If it names none, return those that can be made here.

    Raises:
        UserError: a format is unknown, or `text` names it and its packages are missing.
    """
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in PACKAGES_OF_FORMAT:
            raise UserError(
                f"formats={text}: {name} is not one of {', '.join(PACKAGES_OF_FORMAT)}."
            )

    formats = []
    for name in named or PACKAGES_OF_FORMAT:
        packages = [package for package in PACKAGES_OF_FORMAT[name] if not find_spec(package)]
        if not packages:
            formats.append(name)
            continue
        needs = f"needs {', '.join(packages)}: .venv/bin/pip install {' '.join(packages)}"
        if named:
            raise UserError(f"formats={name} {needs}.")
        log.info(f"{name} skipped, it {needs}")
    return formats


def example_images(facts: Any, num: int) -> Any:
    """Return random images as the net gets them, (num, C, H, W) float32, always the same ones."""
    import torch

    shape = (num, facts["channels"], facts["image_size"], facts["image_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def device_of_check(overrides: list[str]) -> Any:
    """Return the torch.device on which formats are compared with the net.

    Args:
        overrides: those of trainer=.

    Raises:
        UserError: the trainer has several ranks, or needs a GPU and this machine has none.
    """
    import torch

    from lockstep.ranks.find import find_ranks
    from lockstep.ranks.gpus import refuse_unusable_gpus
    from lockstep.training.prediction import prediction_config

    cluster = find_ranks(prediction_config(overrides))
    if cluster.world_size > 1:
        raise UserError("An export is checked in one process: give trainer=gpu or trainer=cpu.")
    if cluster.accelerator != "gpu":
        return torch.device("cpu")
    refuse_unusable_gpus([0])
    return torch.device("cuda", 0)


def largest_difference(model: Any, exported: Any, device: Any) -> float:
    """Return the largest |difference| of the logits over the largest |logit|.

    Batches of 1 and of 3 images are computed on the device.

    Args:
        exported: a function that returns the logits of images; both lie on the device.
    """
    import torch

    net = copy.deepcopy(model.net).to(device)
    differences = []
    # TF32 differs from float32 by more than the tolerance.
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for num in (1, 3):
            images = example_images(model.facts, num).to(device)
            logits = net(images)
            difference = (exported(images) - logits).abs().max()
            differences.append(float(difference / logits.abs().max().clamp(min=1e-6)))
    return max(differences)


def write_weights(model: Any, out: Path) -> Any:
    """Write config.json and model.safetensors, and return the net that a user loads from them.

    A timm model gets timm's config; the config of any other net has its class and its arguments.
    """
    if _is_timm_model(model.net):
        loaded = _write_timm_weights(model, model.net.backbone, out)
    else:
        loaded = _write_own_weights(model, out)
    # safetensors writes a file that only its owner can read.
    shutil.copymode(out / "config.json", out / "model.safetensors")
    return loaded


def _is_timm_model(net: Any) -> bool:
    """Return whether a net is a model of timm alone, and not one with a head of its own."""
    from models.timm import TimmModel

    if not isinstance(net, TimmModel) or type(net).forward is not TimmModel.forward:
        return False
    return len(net.state_dict()) == len(net.backbone.state_dict())


def _write_timm_weights(model: Any, backbone: Any, out: Path) -> Any:
    import timm
    from timm.models import save_for_hf

    config = {"label_names": _label_names(model), "pretrained_cfg": _run_tag(model)}
    images = _images_config(model)
    save_for_hf(backbone, str(out), config, safe_serialization=True, data_config=images)
    return timm.create_model(f"local-dir:{out}", pretrained=True).eval()


def _write_own_weights(model: Any, out: Path) -> Any:
    from safetensors.torch import load_file, save_file

    facts = model.facts
    num_outputs = model.config["task"].get("outputs") or facts["num_classes"]
    config = {
        "architecture": model_name(model.config),
        "num_classes": num_outputs,
        "label_names": _label_names(model),
        "model": _model_arguments(model, num_outputs),
        "pretrained_cfg": {**_run_tag(model), **_images_config(model), "num_classes": num_outputs},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    weights = out / "model.safetensors"
    save_file(model.net.state_dict(), weights, metadata={"format": "pt"})
    loaded = copy.deepcopy(model.net)
    loaded.load_state_dict(load_file(weights))
    return loaded


def _label_names(model: Any) -> list[str]:
    """Return the names of the outputs; features have none."""
    return [] if _prediction_kind(model) == "features" else model.facts["class_names"]


def _run_tag(model: Any) -> dict[str, str]:
    return {"tag": model.record.run_id or "local"}


def _images_config(model: Any) -> dict[str, Any]:
    """Return how images are prepared, in timm's words."""
    facts = model.facts
    framing = model.framing
    size = facts["image_size"]
    return {
        "input_size": (facts["channels"], size, size),
        "interpolation": framing.interpolation,
        "crop_mode": "squash" if framing.fit == "squash" else "center",
        "crop_pct": framing.crop_pct,
        "mean": tuple(facts["mean"]),
        "std": tuple(facts["std"]),
    }


def _model_arguments(model: Any, num_outputs: int) -> dict[str, Any]:
    """Return the class of the net and the arguments that build it again."""
    from lockstep.config.instantiate import parameters_of, resolve_target

    options = dict(model.config["model"])
    names, _ = parameters_of(resolve_target(options["_target_"], "model._target_"))
    shape = {
        "num_classes": num_outputs,
        "image_size": model.facts["image_size"],
        "channels": model.facts["channels"],
    }
    arguments = {key: value for key, value in shape.items() if key in names}
    for key, value in options.items():
        if key not in WEIGHT_OPTIONS:
            arguments[key] = value
    return arguments


def _any_batch_size() -> tuple[dict[int, Any]]:
    """Return the dynamic shape of `images` for torch.export: the batch size is free."""
    import torch

    return ({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},)


def write_pt2(model: Any, out: Path, device: Any) -> Any:
    """Write model.pt2 by torch.export, for any batch size; return it on the device."""
    import torch
    from torch.export.passes import move_to_device_pass

    images = example_images(model.facts, 2)
    program = torch.export.export(model.net, (images,), dynamic_shapes=_any_batch_size())
    torch.export.save(program, out / "model.pt2")
    loaded = torch.export.load(out / "model.pt2")
    return move_to_device_pass(loaded, device).module()


def write_onnx(model: Any, out: Path, device: Any) -> Any:
    """Write model.onnx with the input `images` and the output `logits`, for any batch size.

    A build of onnxruntime without CUDA computes on the CPU.
    """
    import onnxruntime
    import torch

    path = str(out / "model.onnx")
    torch.onnx.export(
        model.net,
        (example_images(model.facts, 2),),
        path,
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        external_data=False,
        dynamic_shapes=_any_batch_size(),
    )
    providers = ["CPUExecutionProvider"]
    if device.type == "cuda" and CUDA_PROVIDER in onnxruntime.get_available_providers():
        providers.insert(0, CUDA_PROVIDER)
    session = onnxruntime.InferenceSession(path, providers=providers)

    def run(images: Any) -> Any:
        (logits,) = session.run(["logits"], {"images": images.cpu().numpy()})
        return torch.from_numpy(logits).to(device)

    return run


def card_text(model: Any, out: Path, compared: dict[str, float]) -> str:
    """Return the README.md of the exported model whose config.json is in `out`.

    Args:
        compared: the largest difference of the logits of each exported format.
    """
    from lockstep.logbook.render import render

    exported_config = json.loads((out / "config.json").read_text())
    net = exported_config.get("model")
    if not net:
        net = {"num_classes": exported_config["num_classes"], **exported_config["model_args"]}
    arguments = [f"{key}={value!r}" for key, value in net.items() if key != "_target_"]
    sha256 = sha256_of(model.path)
    return render(
        "model_card.md.j2",
        name=model_name(model.config),
        data=data_name(model.config),
        model=model,
        record=model.record,
        kind=_prediction_kind(model),
        metrics=_results_of_checkpoint(
            model.record, sha256, is_test_whole=_tests_all_batches(model.config)
        ),
        exported_config=exported_config,
        compared=compared,
        command=redact_text(model.record.command or ""),
        sha256=sha256,
        target=model.config["model"]["_target_"].rpartition("."),
        arguments=", ".join(arguments),
        parameters=sum(parameter.numel() for parameter in model.net.parameters()),
    )


def _prediction_kind(model: Any) -> str:
    """Return the kind of a prediction: class, labels, number, mask, features or another word."""
    from tasks.classifier import ImageClassifier
    from tasks.multilabel import MultiLabel

    if isinstance(model.module, ImageClassifier):
        return "class"
    if isinstance(model.module, MultiLabel):
        return "labels"
    target = model.facts.get("target") or "class"
    # Only a task that makes more of the net's outputs has this option.
    num_outputs = model.config["task"].get("outputs")
    if target == "class" and num_outputs and num_outputs != model.facts["num_classes"]:
        return "features"
    return target


def _results_of_checkpoint(
    record: RunRecord, sha256: str, *, is_test_whole: bool
) -> dict[str, float]:
    """Return the metrics that were measured with this very checkpoint.

    These are the best values in validation, and the test if it took all test images.
    """
    if record.best_checkpoint.sha256 != sha256:
        return {}
    num_tested = record.metrics.get("test/images", record.num_test)
    has_whole_test = num_tested == record.num_test and is_test_whole
    return {
        name: value
        for name, value in record.metrics.items()
        if isinstance(value, float)
        and (name.endswith("_best") or (has_whole_test and name.startswith("test/")))
    }


def _tests_all_batches(config: Config) -> bool:
    """Return whether trainer.limit_test_batches limits nothing. The number 1 is one batch."""
    limit = config.get("trainer", {}).get("limit_test_batches")
    return limit is None or (isinstance(limit, float) and limit == 1.0)


def call_hub(push_to: str, method: str, **arguments: Any) -> Any:
    """Call a method of the Hugging Face hub.

    Raises:
        UserError: the hub refuses the call, for example because there is no token.
    """
    from huggingface_hub import HfApi

    # The hub raises its own errors, and those of the HTTP library that its client uses.
    try:
        return getattr(HfApi(), method)(**arguments)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"push_to={push_to}: {reason} (hf auth login, or HF_TOKEN, gives a token)."
        ) from None


def export(options: dict[str, str], overrides: list[str]) -> int:
    """Write the formats, compare each with the net, and write the card. Upload all for push_to=.

    Args:
        overrides: those of trainer=, which choose the device of the comparison.
    """
    from lockstep.training.inference import load_finished

    formats = choose_formats(options["formats"])
    device = device_of_check(overrides)
    refuse_other_files(options)
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]))
    check_exportable(model)
    if hasattr(model.module, "fold_scale"):
        model.module.fold_scale(example_images(model.facts, 2))

    push_to = options["push_to"]
    repository = None
    if push_to:
        repository = call_hub(push_to, "create_repo", repo_id=push_to, private=True, exist_ok=True)

    out = Path(options["out"] or Path("exports") / model.name)
    out.mkdir(parents=True, exist_ok=True)
    remove_earlier_export(out)
    compared: dict[str, float] = {}
    for name, difference in write_formats(model, formats, out, device):
        compared[name] = difference
        # A difference of nan is too large as well.
        if not difference <= TOLERANCE:
            log.error(
                f"{name} differs from the net by {difference:.1e} of the largest logit; "
                f"do not use {out}."
            )
            return EXIT_FAILED

    (out / "README.md").write_text(card_text(model, out, compared))
    names = sorted(path.name for path in out.iterdir())
    log.info(f"{out}: {', '.join(names)}")
    if repository:
        # The folder of out= may hold other files, such as secrets or data.
        call_hub(
            push_to,
            "upload_folder",
            repo_id=repository.repo_id,
            folder_path=out,
            commit_message=f"Export {out.name}",
            allow_patterns=list(EXPORT_FILES),
            # A format that is not exported this time would be of an earlier net.
            delete_patterns=list(EXPORT_FILES),
        )
        log.info(f"uploaded to {repository}")
    return EXIT_OK


def refuse_other_files(options: dict[str, str]) -> None:
    """Refuse a folder of out= that holds files of an export, unless overwrite=true is given."""
    if is_true(options, "overwrite") or not options["out"]:
        return
    names = [name for name in EXPORT_FILES if Path(options["out"], name).exists()]
    if names:
        raise UserError(
            f"{options['out']} holds {', '.join(names)}, perhaps of another net: give another "
            "out=, or overwrite=true."
        )


def remove_earlier_export(out: Path) -> None:
    """Remove the files of an earlier export, because all formats in a folder are of one net."""
    names = [name for name in EXPORT_FILES if (out / name).exists()]
    for name in names:
        (out / name).unlink()
    if names:
        log.info(f"{out}: removed {', '.join(names)} of an earlier export")


def check_exportable(model: Any) -> None:
    """Refuse a model if the format of its images is unknown, or its net alone cannot predict."""
    if not {"image_size", "mean"} <= model.facts.keys():
        raise UserError(
            "The run's data module does not define how images are made, "
            "which an export writes down."
        )
    model.check_prediction()
    inputs = model.facts.get("inputs")
    if inputs:
        raise UserError(
            f"The task takes {', '.join(inputs)} beside an image, and an export takes images "
            "alone. Predict with `python src/predict.py`."
        )
    parts = model.parts_beside_net(example_images(model.facts, 2))
    if parts:
        raise UserError(
            f"The task predicts by {', '.join(parts)} beside its net, and an export is the net "
            "alone: make the layers a part of the net, which the task gets as net."
        )


def write_formats(
    model: Any, formats: list[str], out: Path, device: Any
) -> Iterator[tuple[str, float]]:
    """Write each format, and yield its name with the largest difference of its logits.

    config.json is always written. It comes with the weights, which go if no format asked for them.
    """
    # If the disk is full, the error of safetensors does not name the file.
    try:
        net_of_weights = write_weights(model, out)
    except Exception as error:
        full_disk = as_disk_full_error(error, out)
        if full_disk is None:
            raise
        raise full_disk from None

    for name in formats:
        # The exporters warn of their internals.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = _write_format(name, model, net_of_weights, out, device)
            difference = largest_difference(model, exported, device)
        where = " on the GPU" if device.type == "cuda" else ""
        log.info(f"{name}: logits within {difference:.1e} of the net's{where}")
        yield name, difference

    if "safetensors" not in formats:
        (out / "model.safetensors").unlink()


def _write_format(name: str, model: Any, net_of_weights: Any, out: Path, device: Any) -> Any:
    """Write a format, load it again, and return a function from images to logits on the device."""
    if name == "onnx":
        return write_onnx(model, out, device)
    if name == "pt2":
        return write_pt2(model, out, device)
    return net_of_weights.to(device)


def main(argv: list[str]) -> int:
    overrides = [word for word in argv if root_of(key_of(word)) == "trainer"]
    others = [word for word in argv if word not in overrides]
    return run_with_options(
        others, __doc__ or "", OPTIONS, lambda options: export(options, overrides)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
