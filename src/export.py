"""Give a trained model away: safetensors, ONNX, torch.export and a model card, each compared with the net itself.

    python src/export.py ckpt_path=<run_id | FILE | s3://…> [out=exports/<run_id>] [formats=safetensors,onnx,pt2]

Without formats= it makes those whose packages are here.

A timm model's safetensors load with timm.create_model(NAME, checkpoint_path="model.safetensors", num_classes=N, …), or
from the folder with timm.create_model("local-dir:" + out). ONNX needs onnx, onnxscript and onnxruntime.
"""

import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.config import model_name
from lockstep.runs.errors import EXIT_FAILED, EXIT_OK, UserError
from lockstep.runs.output import set_up
from lockstep.runs.script import exit_code_of

log = logging.getLogger(__name__)

USAGE = "python src/export.py ckpt_path=…"
FORMATS = ("safetensors", "onnx", "pt2")
OPTIONS: dict[str, str | None] = {
    "ckpt_path": None, "out": "", "formats": "", "log_dir": "", "endpoint_url": "",
}  # fmt: skip
TOLERANCE = 1e-4  # of the largest logit: kernels of another runtime sum in another order
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "safetensors": ("safetensors",), "pt2": ()}


class Differs(Exception):
    """An exported model does not say what the net says."""


def chosen_formats(text: str) -> list[str]:
    """Those that are named; where none is, those that can be made here, and a line says what others need.

    Raises:
        UserError: an unknown format, or a named one whose packages are missing.
    """
    formats = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise UserError(f"formats={text}: there is no {unknown[0]}, but {', '.join(FORMATS)}.")
    for name in formats or FORMATS:
        if missing := missing_packages(name):
            needs = f"needs {', '.join(missing)}: .venv/bin/pip install {' '.join(missing)}"
            if formats:
                raise UserError(f"formats={name} {needs}.")
            log.info(f"{name} left out, it {needs}")
    return formats or [name for name in FORMATS if not missing_packages(name)]


def missing_packages(name: str) -> list[str]:
    from importlib.util import find_spec

    return [package for package in NEEDED[name] if find_spec(package) is None]


def example_images(facts: Mapping[str, Any], num: int) -> Any:
    """(num, C, H, W) float32 of the size of normalised pixels; always the same."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = facts["image_size"]
    return torch.randn((num, facts["channels"], size, size), generator=generator)


def largest_difference(model: Any, answer: Any) -> float:
    """Largest |difference| of the logits over the largest |logit|, for batches of 1 and 3 images.

    Args:
        answer: images → logits by the exported model.
    """
    import torch

    worst = 0.0
    with torch.inference_mode():
        for num in (1, 3):
            images = example_images(model.facts, num)
            wanted = model.net(images)
            worst = max(worst, float((answer(images) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    return worst


def timm_backbone(model: Any) -> Any:
    """The timm model inside, or None for a net of our own."""
    backbone = getattr(model.net, "backbone", None)
    return backbone if hasattr(backbone, "pretrained_cfg") else None


def export_safetensors(model: Any, out: Path) -> Any:
    """model.safetensors and config.json in timm's form; a net of our own keeps its own names of weights."""
    import copy

    from safetensors.torch import load_file, save_file

    net = timm_backbone(model) if timm_backbone(model) is not None else model.net
    state = {name: value.detach().clone().contiguous() for name, value in net.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(timm_config(model), indent=2) + "\n")
    shutil.copymode(out / "config.json", out / "model.safetensors")  # safetensors writes for its owner alone
    again = copy.deepcopy(net)
    again.load_state_dict(load_file(out / "model.safetensors"))
    return again


def timm_config(model: Any) -> dict[str, Any]:
    """config.json as timm writes it for the hub; of a net of our own the model's arguments in place of timm's."""
    facts, framing = model.facts, model.framing
    backbone = timm_backbone(model)
    size = [facts["channels"], facts["image_size"], facts["image_size"]]
    config = {
        "architecture": model.net.name if backbone is not None else model_name(model.config),
        "num_classes": facts["num_classes"],
        "num_features": int(getattr(backbone, "num_features", 0)),
        "label_names": facts["class_names"],
        "pretrained_cfg": {
            "tag": model.record.run_id or "local", "custom_load": False, "input_size": size,
            "fixed_input_size": True, "interpolation": framing.interpolation,
            "crop_mode": "squash" if framing.fit == "squash" else "center",
            "crop_pct": framing.crop_pct, "mean": facts["mean"], "std": facts["std"],
            "num_classes": facts["num_classes"],
        },
    }  # fmt: skip
    if backbone is not None:
        arguments = {key: value for key, value in model.net.timm_arguments.items() if value is not None}
        for key in ("first_conv", "classifier"):
            config["pretrained_cfg"][key] = backbone.pretrained_cfg.get(key)
        config["model_args"] = {"img_size": facts["image_size"], "in_chans": facts["channels"], **arguments}
    else:
        config["model"] = model_arguments(model)
    return config


def model_arguments(model: Any) -> dict[str, Any]:
    """Class and arguments that the net was built with. For a reader: nothing here builds what a file names."""
    from lockstep.config.instantiate import options_of, resolve_target

    own = {key: value for key, value in model.config["model"].items() if key not in ("freeze", "weights", "pretrained")}
    taken, _ = options_of(resolve_target(own["_target_"], "model._target_"))
    said = {key: model.facts[key] for key in ("num_classes", "image_size", "channels") if key in taken}
    return {**said, **own}


def export_pt2(model: Any, out: Path) -> Any:
    """model.pt2: torch.export, any batch size from 1."""
    import torch

    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model.net, (example_images(model.facts, 2),), dynamic_shapes=({0: batch},))
    torch.export.save(program, out / "model.pt2")
    return torch.export.load(out / "model.pt2").module()


def export_onnx(model: Any, out: Path) -> Any:
    """model.onnx: input `images`, output `logits`, any batch size."""
    import numpy as np
    import onnxruntime
    import torch

    batch = torch.export.Dim("batch", min=1, max=4096)
    torch.onnx.export(
        model.net, (example_images(model.facts, 2),), str(out / "model.onnx"), dynamo=True, verbose=False,
        input_names=["images"], output_names=["logits"], dynamic_shapes=({0: batch},), external_data=False,
    )  # fmt: skip
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(np.asarray(session.run(["logits"], {"images": images.numpy()})[0]))


def export(argv: list[str]) -> None:
    import warnings

    from lockstep.logbook.model_card import card_text
    from lockstep.runs.provenance import REPOSITORY
    from lockstep.training.inference import load_finished, read_words

    options = read_words(argv, OPTIONS, USAGE)
    formats = chosen_formats(options["formats"])
    logs = Path(options["log_dir"] or REPOSITORY / "logs")
    model = load_finished(options["ckpt_path"], logs, {"endpoint_url": options["endpoint_url"] or None})
    out = Path(options["out"] or Path("exports") / model.name)
    out.mkdir(parents=True, exist_ok=True)
    makers = {"safetensors": export_safetensors, "onnx": export_onnx, "pt2": export_pt2}
    compared = {}
    for name in formats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own, about their internals
            compared[name] = largest_difference(model, makers[name](model, out))
        log.info(f"{name}: logits within {compared[name]:.1e} of the net's")
    worst = max(compared, key=lambda name: compared[name])
    if not compared[worst] <= TOLERANCE:
        raise Differs(
            f"{worst} differs from the net by {compared[worst]:.1e} of the largest logit; nothing in {out} is good."
        )
    (out / "README.md").write_text(card_text(model, timm_config(model), compared))
    log.info(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def main(argv: list[str]) -> int:
    set_up()
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return EXIT_OK
    try:
        return exit_code_of(lambda: export(argv))
    except Differs as error:
        log.error(f"{error}")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
