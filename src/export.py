"""Export a trained model: safetensors, ONNX, torch.export and a model card; each is compared with the net itself.

    python src/export.py ckpt_path=<run_id | FILE | s3://…> [out=exports/<run_id>] [formats=safetensors,onnx,pt2]
        [push_to=ORG/NAME]                  and upload the folder to the Hugging Face hub, as a private repository

By default it makes every format whose packages are installed. A timm model is loaded from the folder by
timm.create_model("local-dir:FOLDER", pretrained=True). ONNX needs onnx, onnxscript and onnxruntime.
"""

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.runs.config import model_name
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import run_with_options

log = logging.getLogger(__name__)

OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "out": "", "formats": "", "log_dir": str(REPOSITORY / "logs"), "endpoint_url": "",
    "push_to": "",
}  # fmt: skip
TOLERANCE = 1e-4  # of the largest logit: kernels of another runtime sum in another order
NEEDED = {"safetensors": ("safetensors",), "onnx": ("onnx", "onnxscript", "onnxruntime"), "pt2": ()}


def chosen_formats(text: str) -> list[str]:
    """Return the formats that are named, or else those that can be made here.

    Raises:
        UserError: an unknown format, or a named one whose packages are missing.
    """
    named = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in named if name not in NEEDED]:
        raise UserError(f"formats={text}: {unknown[0]} is not one of {', '.join(NEEDED)}.")
    missing = {name: [each for each in NEEDED[name] if not find_spec(each)] for name in named or NEEDED}
    for name, packages in missing.items():
        if packages:
            needs = f"needs {', '.join(packages)}: .venv/bin/pip install {' '.join(packages)}"
            if named:
                raise UserError(f"formats={name} {needs}.")
            log.info(f"{name} skipped, it {needs}")
    return [name for name, packages in missing.items() if not packages]


def example_images(facts: Mapping[str, Any], num: int) -> Any:
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

    worst = 0.0
    with torch.inference_mode():
        for images in (example_images(model.facts, num) for num in (1, 3)):
            wanted = model.net(images)
            worst = max(worst, float((exported(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    return worst


def timm_backbone(model: Any) -> Any:
    """Return the timm model inside, or None for a net of the user's own."""
    backbone = getattr(model.net, "backbone", None)
    return backbone if hasattr(backbone, "pretrained_cfg") else None


def write_config(model: Any, out: Path) -> dict[str, Any]:
    """Write config.json and model.safetensors; a net that is not timm's has its class and arguments in config.json."""
    from safetensors.torch import save_file
    from timm.models import save_for_hf

    outputs = model.config["task"].get("outputs") or model.facts["num_classes"]
    facts, framing, backbone = model.facts, model.framing, timm_backbone(model)
    images = {
        "input_size": (facts["channels"], facts["image_size"], facts["image_size"]),
        "interpolation": framing.interpolation, "crop_mode": "squash" if framing.fit == "squash" else "center",
        "crop_pct": framing.crop_pct, "mean": tuple(facts["mean"]), "std": tuple(facts["std"]),
    }  # fmt: skip
    tag = {"tag": model.record.run_id or "local"}
    if backbone is not None:
        config = {"label_names": facts["class_names"], "pretrained_cfg": tag}
        save_for_hf(backbone, str(out), config, safe_serialization=True, data_config=images)
    else:
        config = {
            "architecture": model_name(model.config), "num_classes": outputs,
            "label_names": facts["class_names"], "model": model_arguments(model),
            "pretrained_cfg": {**tag, **images, "num_classes": outputs},
        }  # fmt: skip
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(model.net.state_dict(), out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors writes for its owner alone
    found: dict[str, Any] = json.loads((out / "config.json").read_text())
    return found


def model_arguments(model: Any) -> dict[str, Any]:
    """Return the class and arguments of the net, for a reader: nothing here builds what a file names."""
    from lockstep.config.instantiate import options_of, resolve_target

    own = {key: value for key, value in model.config["model"].items() if key not in ("freeze", "weights", "pretrained")}
    taken, _ = options_of(resolve_target(own["_target_"], "model._target_"))
    shape = {**model.facts, "num_classes": model.config["task"].get("outputs") or model.facts["num_classes"]}
    return {**{key: shape[key] for key in ("num_classes", "image_size", "channels") if key in taken}, **own}


def export_safetensors(model: Any, out: Path) -> Any:
    """Load model.safetensors as its user does; a net of the user's own keeps its own names of weights."""
    import copy

    import timm
    from safetensors.torch import load_file

    if timm_backbone(model) is not None:
        return timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    again = copy.deepcopy(model.net)
    again.load_state_dict(load_file(out / "model.safetensors"))
    return again


def export_pt2(model: Any, out: Path) -> Any:
    """Write model.pt2 by torch.export, for any batch size from 1."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model.net, (example_images(model.facts, 2),), dynamic_shapes=({0: batch},))
    torch.export.save(program, out / "model.pt2")
    return torch.export.load(out / "model.pt2").module()


def export_onnx(model: Any, out: Path) -> Any:
    """Write model.onnx with the input `images` and the output `logits`, for any batch size."""
    import onnxruntime
    import torch

    batch = torch.export.Dim("batch", min=1, max=4096)
    torch.onnx.export(
        model.net, (example_images(model.facts, 2),), str(out / "model.onnx"), dynamo=True, verbose=False,
        input_names=["images"], output_names=["logits"], dynamic_shapes=({0: batch},), external_data=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def export(options: dict[str, str]) -> int:
    from lockstep.logbook.render import card_text
    from lockstep.training.inference import load_finished

    formats = chosen_formats(options["formats"])
    push = pusher(options["push_to"]) if options["push_to"] else None
    s3 = {"endpoint_url": options["endpoint_url"] or None}
    model = load_finished(options["ckpt_path"], Path(options["log_dir"]), s3)
    out = Path(options["out"] or Path("exports") / model.name)
    out.mkdir(parents=True, exist_ok=True)
    config, compared = write_config(model, out), {}
    makers = {"safetensors": export_safetensors, "onnx": export_onnx, "pt2": export_pt2}
    for name in formats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own, about their internals
            compared[name] = largest_difference(model, makers[name](model, out))
        log.info(f"{name}: logits within {compared[name]:.1e} of the net's")
        if not compared[name] <= TOLERANCE:
            log.error(f"{name} differs from the net by {compared[name]:.1e} of the largest logit; do not use {out}.")
            return EXIT_FAILED
    if "safetensors" not in formats:
        (out / "model.safetensors").unlink()
    (out / "README.md").write_text(card_text(model, config, compared))
    log.info(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if push:
        log.info(f"uploaded to {push(out)}")
    return EXIT_OK


def pusher(name: str) -> Callable[[Path], str]:
    """Return what uploads a folder to the hub's repository ORG/NAME and returns its address.

    Raises:
        UserError: the name is no repository's, nobody is logged in, or the hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    if name.count("/") != 1:
        raise UserError(f"push_to={name}: give ORG/NAME, or your user name and a name.")
    if not get_token():
        raise UserError(f"push_to={name} needs a token of the Hugging Face hub: hf auth login, or HF_TOKEN.")

    def push(folder: Path) -> str:
        api = HfApi()
        try:
            address = str(api.create_repo(name, private=True, exist_ok=True))
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Export {folder.name}")
        except Exception as error:  # of the hub, and of whatever HTTP library its client uses
            raise UserError(f"push_to={name}: {str(error).splitlines()[0]} The export is in {folder}.") from None
        return address

    return push


def main(argv: list[str]) -> int:
    return run_with_options(argv, __doc__ or "", OPTIONS, export)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
