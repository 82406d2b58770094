"""Facts for the record of a run, about its module and its data once they are built."""

from typing import Any

from lockstep.callbacks.run_recorder import parameter_counts
from lockstep.config.instantiate import options_of
from lockstep.data.report import settings_of
from lockstep.records.config import model_name
from lockstep.runs.run import Run


def facts_of_module(run: Run, trainer: Any, module: Any) -> dict[str, Any]:
    """Return the model's name, the precision that `auto` came to, and the numbers of parameters."""
    constructor, _ = options_of(type(module))
    takes_model = "net" in constructor and "net" not in run.config["task"]
    return {
        "model": model_name(run.config) if takes_model else type(module).__name__,
        "precision": str(trainer.precision),
        **parameter_counts(module),
    }


def facts_of_data(run: Run, data: Any) -> dict[str, Any]:
    """Return the numbers of images, their hash and how they are preprocessed."""
    if not hasattr(data, "attach_to_ranks"):
        # The loaders of a data module of Lightning's own kind decide the batch.
        return {"global_batch_size": None, "per_device_batch_size": None}
    left_out = 0 if data.sampling else data.num_train % data.global_batch_size
    return {
        "num_train": data.num_train,
        "num_val": data.num_val,
        "num_test": data.num_test,
        "left_out_per_epoch": left_out,
        "data_hash": data.data_hash,
        "data_report": run.data_report.fields if run.data_report else {},
        "images": settings_of(data, run.choices.get("augmentation")),
    }
