"""The README.md of an exported model: metadata that the hub's tools read, and what a reader must know."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lockstep.pages.facts import commands_of
from lockstep.pages.markdown import blocks, code, code_block, plain, table
from lockstep.runs.config import Config
from lockstep.runs.old_configs import data_name, model_name
from lockstep.runs.record import Node, RunRecord
from lockstep.runs.redact import redact_text


def card_text(model: Any, timm_config: Config, compared: dict[str, float]) -> str:
    """
    Args:
        model: finished_model.FinishedModel.
        compared: format → largest difference of its logits.
    """
    import yaml

    head = yaml.safe_dump(metadata(model), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{body(model, timm_config, compared)}"


def metadata(model: Any) -> Mapping[str, object]:
    """With the result of the test in the hub's `model-index` form where the record holds one."""
    config = model.config
    data, name = data_name(config), model_name(config)
    accuracy = tested(model).get("test/acc")
    held: dict[str, Any] = {
        "library_name": "timm" if config["model"]["_target_"].startswith("models.timm.") else "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", name],
        "datasets": [data],
        "metrics": ["accuracy"],
    }
    if isinstance(accuracy, float):
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data, "type": data, "split": "test"},
            "metrics": [{"type": "accuracy", "value": round(accuracy, 6)}],
        }
        held["model-index"] = [{"name": name, "results": [result]}]
    return held


def body(model: Any, timm_config: Config, compared: dict[str, float]) -> str:
    config, facts, framing = model.config, model.facts, model.framing
    sides = "both sides" if framing.fit == "squash" else "the short side"
    rows = {
        "Architecture": plain(timm_config["architecture"]),
        "Parameters": f"{sum(p.numel() for p in model.net.parameters()):,}",
        "Data": f"{plain(data_name(config))}, hash {code(facts['data_hash'][:16])}",
        "Classes": f"{facts['num_classes']}: {plain(', '.join(facts['class_names']))}",
        "Input": f"{facts['channels']} × {facts['image_size']} × {facts['image_size']}: {sides} resized to "
        f"{framing.resize} ({framing.interpolation}), the centre of it, "
        f"minus mean {facts['mean']} over std {facts['std']} of pixels from 0 to 1",
        **{plain(key): f"{value:.6g}" for key, value in sorted(tested(model).items())},
        **record_rows(model.record),
        "Checkpoint": f"{code(model.path.name)}, sha256 {code(model.sha256())}",
        **{f"Logits of {name}": f"within {value:.1e} of the net's" for name, value in compared.items()},
    }
    if config["classifier"].get("test_time_flip"):
        rows["Test"] = "the run's test took the mean over an image and its mirror image; the exported net does not"
    title = f"# {plain(model_name(config))} on {plain(data_name(config))}"
    shown = [(name, value) for name, value in rows.items() if value]
    return blocks([title, table(("", ""), shown), *loading(timm_config, compared)])


def tested(model: Any) -> dict[str, float]:
    """What the run reached with this very checkpoint: nothing where another is its best; a whole test alone counts."""
    metrics = {key: value for key, value in model.record.metrics.items() if isinstance(value, float)}
    if model.record.best_checkpoint.sha256 != model.sha256():
        return {}
    images, there = metrics.get("test/images"), model.record.num_test
    whole = images is None or there is None or images >= there
    return {k: v for k, v in metrics.items() if k.startswith("val/acc") or (whole and k.startswith("test/"))}


def record_rows(record: RunRecord) -> dict[str, str]:
    """Command, commit and hardware of the run."""
    nodes = [one_machine(node) for node in record.hardware.nodes] or [
        f"CPU, {host.cores} cores" for host in record.hosts
    ]
    return {
        "Run": code(record.run_id),
        "Command": code(redact_text(", then ".join(commands_of(record))), 1000),
        "Commit": code(record.code.commit) + (" with uncommitted changes" if record.code.dirty else ""),
        "Trained on": plain(redact_text("; ".join(nodes))),
    }


def one_machine(node: Node) -> str:
    return ", ".join(gpu.name or "GPU" for gpu in node.gpus) or f"{node.cpu or 'CPU'}, {node.cores} cores"


def loading(config: Config, formats: Iterable[str]) -> Iterator[str]:
    """How each file becomes a net again."""
    ways = {
        "safetensors": timm_example(config) if "model_args" in config else own_example(config),
        "pt2": 'import torch\n\nnet = torch.export.load("model.pt2").module()',
        "onnx": 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("model.onnx")\n'
        'logits = session.run(["logits"], {"images": images})[0]',
    }
    yield "`images`, float32 (batch, channels, height, width) prepared as *Input* says, give `logits` (batch, classes)."
    for name in formats:
        yield code_block(ways[name], "python")


def timm_example(config: Config) -> str:
    given = arguments({"num_classes": config["num_classes"], **config["model_args"]})
    call = f'timm.create_model("{config["architecture"]}", checkpoint_path="model.safetensors", {given})'
    return f"import timm\n\nnet = {call}.eval()"


def own_example(config: Config) -> str:
    module, _, name = config["model"]["_target_"].rpartition(".")
    given = arguments({key: value for key, value in config["model"].items() if key != "_target_"})
    origin = f"from {module} import {name}  # in src/ of that commit"
    return (
        f"from safetensors.torch import load_file\n\n{origin}\n\n"
        f'net = {name}({given})\nnet.load_state_dict(load_file("model.safetensors"))\nnet.eval()'
    )


def arguments(given: Config) -> str:
    return ", ".join(
        f"{key}={json.dumps(value) if isinstance(value, str) else repr(value)}" for key, value in given.items()
    )
