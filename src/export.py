"""Export a trained model: safetensors, ONNX, torch.export and a model card; each is compared with the net itself.

    python src/export.py ckpt_path=<run_id | FILE | s3://…> [out=exports/<run_id>] [formats=safetensors,onnx,pt2]
        [push_to=ORG/NAME]                  and upload the folder to the Hugging Face hub, as a private repository

By default it makes every format whose packages are installed. A timm model is loaded from the folder by
timm.create_model("local-dir:FOLDER", pretrained=True). ONNX needs onnx, onnxscript and onnxruntime.
"""

import copy
import json
import logging
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.process.errors import EXIT_FAILED, EXIT_OK, UserError, no_room
from lockstep.process.files import sha256_of
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text
from lockstep.process.script import run_with_options
from lockstep.records.config import data_name, model_name
from lockstep.records.folder import RUN_ID_PATTERN

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "out": "", "formats": "", "log_dir": str(REPOSITORY / "logs"), "push_to": "",
}  # fmt: skip
TOLERANCE = 1e-4  # of the largest logit: kernels of another runtime sum in another order
NEEDED = {"safetensors": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": ()}


def chosen_formats(text: str) -> list[str]:
    """Return the formats that are named, or else those that can be made here.

    Raises:
        UserError: an unknown format, or a named one whose packages are missing.
    """
    named = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(named) - NEEDED.keys():
        raise UserError(f"formats={text}: {unknown.pop()} is not one of {', '.join(NEEDED)}.")
    missing = {name: [each for each in NEEDED[name] if not find_spec(each)] for name in named or NEEDED}
    for name, packages in missing.items():
        needs = f"needs {', '.join(packages)}: .venv/bin/pip install {' '.join(packages)}"
        if packages and named:
            raise UserError(f"formats={name} {needs}.")
        if packages:
            log.info(f"{name} skipped, it {needs}")
    return [name for name, packages in missing.items() if not packages]


def example_images(facts: Any, num: int) -> Any:
    """Return (num, C, H, W) float32 of the size of normalised pixels, always the same."""
    import torch

    shape = (num, facts["channels"], facts["image_size"], facts["image_size"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def largest_difference(model: Any, exported: Any) -> float:
    """Return the largest |difference| of the logits over the largest |logit|, for batches of 1 and 3 images.

    Args:
        exported: images → logits.
    """
    import torch

    found = []
    with torch.inference_mode():
        for images in (example_images(model.facts, num) for num in (1, 3)):
            wanted = model.net(images)
            found.append(float((exported(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    return max(found)


def write_weights(model: Any, out: Path) -> Any:
    """Write config.json and model.safetensors, and load them as their user does.

    A timm model gets timm's config; the config of any other net has its class and its arguments.
    """
    import timm
    from safetensors.torch import load_file, save_file
    from timm.models import save_for_hf

    from lockstep.config.instantiate import options_of, resolve_target

    facts, framing, own = model.facts, model.framing, dict(model.config["model"])
    size, outputs = facts["image_size"], model.config["task"].get("outputs") or facts["num_classes"]
    images = {
        "input_size": (facts["channels"], size, size), "interpolation": framing.interpolation,
        "crop_mode": "squash" if framing.fit == "squash" else "center", "crop_pct": framing.crop_pct,
        "mean": tuple(facts["mean"]), "std": tuple(facts["std"]),
    }  # fmt: skip
    names, tag = {"label_names": facts["class_names"]}, {"tag": model.record.run_id or "local"}
    backbone: Any = getattr(model.net, "backbone", None)
    if hasattr(backbone, "pretrained_cfg"):
        save_for_hf(backbone, str(out), {**names, "pretrained_cfg": tag}, safe_serialization=True, data_config=images)
        loaded = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    else:
        taken, _ = options_of(resolve_target(own["_target_"], "model._target_"))
        shape = {"num_classes": outputs, "image_size": size, "channels": facts["channels"]}
        given = {key: value for key, value in shape.items() if key in taken}
        arguments = {key: value for key, value in own.items() if key not in ("freeze", "weights", "pretrained")}
        config = {
            "architecture": model_name(model.config), "num_classes": outputs, **names, "model": {**given, **arguments},
            "pretrained_cfg": {**tag, **images, "num_classes": outputs},
        }  # fmt: skip
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(model.net.state_dict(), out / "model.safetensors", metadata={"format": "pt"})
        loaded = copy.deepcopy(model.net)
        loaded.load_state_dict(load_file(out / "model.safetensors"))
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors writes for its owner alone
    return loaded


def write_pt2(model: Any, out: Path) -> Any:
    """Write model.pt2 by torch.export, for any batch size."""
    import torch

    images = (example_images(model.facts, 2),)
    program = torch.export.export(model.net, images, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},))
    torch.export.save(program, out / "model.pt2")
    return torch.export.load(out / "model.pt2").module()


def write_onnx(model: Any, out: Path) -> Any:
    """Write model.onnx with the input `images` and the output `logits`, for any batch size."""
    import onnxruntime
    import torch

    torch.onnx.export(
        model.net, (example_images(model.facts, 2),), str(out / "model.onnx"), dynamo=True, verbose=False,
        input_names=["images"], output_names=["logits"], external_data=False,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def card_text(model: Any, out: Path, compared: dict[str, float]) -> str:
    """Return the README.md of the exported model whose config.json is in `out`.

    Args:
        compared: the largest difference of the logits of each exported format.
    """
    from lockstep.logbook.render import render

    record, config, written = model.record, model.config, json.loads((out / "config.json").read_text())
    # Only a test of this very checkpoint on all images is a result of it.
    sha256 = sha256_of(model.path)
    metrics = record.metrics if record.best_checkpoint.sha256 == sha256 else {}
    whole = metrics.get("test/images", record.num_test) == record.num_test
    tested = {k: v for k, v in metrics.items() if k.startswith("val/acc") or (whole and k.startswith("test/"))}
    net = written.get("model") or {"num_classes": written["num_classes"], **written["model_args"]}
    return render(
        "model_card.md.j2", name=model_name(config), data=data_name(config), model=model, record=record,
        metrics={k: v for k, v in tested.items() if isinstance(v, float)}, timm=written, compared=compared,
        command=redact_text(record.command or ""), sha256=sha256, target=config["model"]["_target_"].rpartition("."),
        arguments=", ".join(f"{key}={value!r}" for key, value in net.items() if key != "_target_"),
        parameters=sum(p.numel() for p in model.net.parameters()),
    )  # fmt: skip


def hub(push_to: str, method: str, **arguments: Any) -> Any:
    """Call the Hugging Face hub; raise UserError with its reason if it refuses, as without a token."""
    from huggingface_hub import HfApi

    try:
        return getattr(HfApi(), method)(**arguments)
    except Exception as error:  # of the hub, and of whatever HTTP library its client uses
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"push_to={push_to}: {reason} (hf auth login, or HF_TOKEN, gives a token).") from None


def export(options: dict[str, str]) -> int:
    """Write the formats, compare each with the net, write the card; upload the folder for push_to=."""
    from lockstep.training.inference import load_finished

    formats, push_to = chosen_formats(options["formats"]), options["push_to"]
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]))
    if not {"image_size", "mean"} <= model.facts.keys():
        raise UserError("The run's data module does not define how images are made, which an export writes down.")
    repository = hub(push_to, "create_repo", repo_id=push_to, private=True, exist_ok=True) if push_to else None
    run_id = str(model.record.run_id)  # names a folder, so it must not climb
    name = run_id if RUN_ID_PATTERN.fullmatch(run_id) and ".." not in run_id else model.path.stem
    out = Path(options["out"] or Path("exports") / name)
    out.mkdir(parents=True, exist_ok=True)
    try:
        made = {"safetensors": write_weights(model, out)}
    except Exception as error:  # safetensors does not name the file
        raise no_room(error, out) or error from None
    compared: dict[str, float] = {}
    for name in formats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own, about their internals
            exported = made.get(name) or {"onnx": write_onnx, "pt2": write_pt2}[name](model, out)
            compared[name] = largest_difference(model, exported)
        log.info(f"{name}: logits within {compared[name]:.1e} of the net's")
        if not compared[name] <= TOLERANCE:
            log.error(f"{name} differs from the net by {compared[name]:.1e} of the largest logit; do not use {out}.")
            return EXIT_FAILED
    if "safetensors" not in formats:
        (out / "model.safetensors").unlink()
    (out / "README.md").write_text(card_text(model, out, compared))
    log.info(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if repository:
        hub(push_to, "upload_folder", repo_id=repository.repo_id, folder_path=out, commit_message=f"Export {out.name}")
        log.info(f"uploaded to {repository}")
    return EXIT_OK


def main(argv: list[str]) -> int:
    return run_with_options(argv, __doc__ or "", OPTIONS, export)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
