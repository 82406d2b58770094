"""The README.md of an exported model, from templates/model_card.md.j2."""

from typing import Any

from lockstep.logbook.render import render
from lockstep.runs.config import Config, data_name, model_name
from lockstep.runs.redact import redact_text


def card_text(model: Any, timm_config: Config, compared: dict[str, float]) -> str:
    """Return the card.

    Args:
        model: finished_model.FinishedModel.
        compared: the largest difference of the logits of each exported format.
    """
    record, config = model.record, model.config
    # Only a test of this very checkpoint on all images is a result of it.
    metrics = record.metrics if record.best_checkpoint.sha256 == model.sha256() else {}
    whole = metrics.get("test/images", record.num_test) == record.num_test
    tested = {k: v for k, v in metrics.items() if k.startswith("val/acc") or (whole and k.startswith("test/"))}
    if "model_args" in timm_config:
        given = {"num_classes": timm_config["num_classes"], **timm_config["model_args"]}
    else:
        given = {key: value for key, value in timm_config["model"].items() if key != "_target_"}
    return render(
        "model_card.md.j2", name=model_name(config), data=data_name(config), model=model, record=record,
        metrics={k: v for k, v in tested.items() if isinstance(v, float)}, timm=timm_config, compared=compared,
        command=redact_text(record.command or ""), target=config["model"]["_target_"].rpartition("."),
        arguments=", ".join(f"{key}={value!r}" for key, value in given.items()),
        parameters=sum(p.numel() for p in model.net.parameters()),
    )  # fmt: skip
