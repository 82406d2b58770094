"""The default training takes GPUs: without one it begins only where somebody chose what to train, or on what."""

from lockstep.config.schema import key_of
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError

CHOSEN = (
    "experiment", "debug", "data", "model", "trainer", "trainer.accelerator", "trainer.max_steps",
    "trainer.limit_train_batches", "resume",
)  # fmt: skip


def refuse_days_on_cpu(config: Config, accelerator: str) -> None:
    """
    Args:
        config: with `overrides`.
    Raises:
        UserError: says what the training would take, and what takes a minute.
    """
    chosen = any(key_of(word) in CHOSEN for word in config["overrides"])
    if accelerator == "gpu" or config["task_name"] != "train" or chosen:
        return
    data, epochs = config["data"], config["trainer"]["max_epochs"]
    raise UserError(
        f"This would train {config['model']['name']} on {data['name']} at {data['image_size']} pixels for {epochs} "
        "epochs, days on a machine without a GPU: make train (experiment=quickstart) takes a minute, and trainer=cpu "
        "begins all the same."
    )
