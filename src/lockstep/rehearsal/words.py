"""The user's config → the command lines of its rehearsal: few steps, few images, as many ranks as a laptop carries.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.compose import CONFIGS
from lockstep.config.schema import key_of
from lockstep.runs.batch import Batch
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import read_yaml

STEPS = 3
MOST_RANKS = 4
FEW_IMAGES, FEW_LARGE_IMAGES = 4, 2  # of a device, where values are computed
LARGE = 64  # side from which on an image is large
LEAST_CAPABILITY = 7.5  # that torch's CUDA 13 build has kernels for
RUN_ID = "rehearsal"
DOWNLOADED = {  # images that train and validate, of each data set that would be downloaded
    "data.cifar10.CIFAR10DataModule": (50_000, 3),
    "data.mnist.MNISTDataModule": (60_000, 1),
    "data.fashion_mnist.FashionMNISTDataModule": (60_000, 1),
}
LEFT_OUT = ("resume", "run_id", "sweep_dir", "logbook", "ckpt_path")


@dataclass(frozen=True)
class Rehearsal:
    """
    Args:
        words: the user's own, but for those that the rehearsal says itself.
        ranks: processes that are run.
        devices: null GPUs.
        world_size: ranks of the whole run.
        batch: of the whole run.
        synthetic: words for made-up images in place of a download; none where the user's own data are read.
        num_images: of the data that are not downloaded, where they are known.
        notes: what is not as in the run, a sentence each.
    """

    config: Config
    words: list[str]
    ranks: int
    devices: int
    world_size: int
    batch: Batch
    synthetic: list[str]
    num_images: int | None
    notes: list[str]

    def command(self, folder: str, per_device: int, eval_batch: int | None) -> list[str]:
        """Words of train.py for the first start.

        Args:
            folder: that everything is written below.
            per_device: images of one micro-batch of one rank.
            eval_batch: images of one evaluation batch of one device, at most; None: as the data have it.
        """
        batch, accumulate = Batch.of_device(per_device, self.ranks, self.batch.accumulate), self.batch.accumulate
        changes = {
            **self._data(
                batch.global_size, self.ranks * (eval_batch or self.config["data"].get("eval_batch_size", 64))
            ),
            "data.global_batch_size": batch.global_size,
            **({"data.eval_batch_size": eval_batch} if eval_batch and "eval_batch_size" in self.config["data"] else {}),
            **self._processes(),
            "trainer.max_epochs": 1,
            "trainer.max_steps": -1,
            "trainer.limit_train_batches": STEPS * accumulate,
            "trainer.limit_val_batches": 1,
            "trainer.limit_test_batches": 1,
            "trainer.num_sanity_val_steps": 0,
            "trainer.check_val_every_n_epoch": 1,
            "trainer.val_check_interval": 1.0,
            "trainer.max_time": "null",
            "trainer.log_every_n_steps": 1000,
            "trainer.compile": False,
            "trainer.timeout_s": 60,
            "run_id": RUN_ID,
            "paths.log_dir": f"{folder}/logs",
            "paths.logbook_dir": f"{folder}/logbook",  # an experiment may say logbook=keep
            "logbook": "null",
            "+callbacks.rehearsal._target_": "lockstep.rehearsal.watch.Watch",
            "+callbacks.rehearsal.folder": folder,
        }
        changes |= {f"model.{key}": value for key, value in _without_download(self.config["model"]).items()}
        if self.synthetic:
            changes["paths.data_dir"] = f"{folder}/data"
        if self.config["s3"].get("uri"):
            changes["s3.uri"] = "null"
        return [*without(self.words, changes), *self.synthetic, *(f"{key}={value}" for key, value in changes.items())]

    @property
    def few(self) -> int:
        """Images of a device where values are computed: at most what it has in the run."""
        large = self.config["data"].get("image_size", 0) > LARGE
        return min(self.batch.per_device, FEW_LARGE_IMAGES if large else FEW_IMAGES)

    def _data(self, images: int, eval_images: int) -> dict[str, int]:
        """As many made-up images as three steps and a batch of evaluation on each rank take."""
        if not self.synthetic:
            return {}
        kept = {"data.num_val": eval_images, "data.num_test_images": eval_images}
        return {"data.num_images": STEPS * images + eval_images, **kept}

    def _processes(self) -> dict[str, int]:
        alone = self.config["trainer"]["launch"] == "one_process"
        return {} if alone else {"trainer.devices": self.ranks, "trainer.num_nodes": 1}


def rehearsal_of(config: Config, choices: Mapping[str, Any], words: list[str]) -> Rehearsal:
    """
    Args:
        config: composed, as train.py would have it.
        choices: the option of each config group.
        words: the command line.
    Raises:
        UserError: no machine is named or its GPUs are not known, the trainer uses none, or train.py would refuse it.
    """
    trainer, hardware = config["trainer"], config["hardware"]
    _check(config, choices)
    alone = trainer["launch"] == "one_process"
    every = trainer["devices"] == "auto" or (alone and trainer["strategy"])  # DataParallel and stages: one process
    devices = hardware["gpus"] if every else trainer["devices"]
    if devices > hardware["gpus"]:
        raise UserError(f"trainer.devices={devices}: a {hardware['name']} has {hardware['gpus']} GPUs.")
    num_nodes = 1 if trainer["num_nodes"] == "auto" else trainer["num_nodes"]
    world_size = 1 if alone else devices * num_nodes
    ranks = min(world_size, MOST_RANKS)
    size = config["data"].get("global_batch_size")
    accumulate = trainer["accumulate_grad_batches"]
    if size == "max":
        raise UserError("data.global_batch_size=max: find_batch_size.py --estimate says a number, give that.")
    batch = Batch.cut(size, world_size, accumulate)
    notes = []
    if ranks < world_size:
        notes.append(f"{ranks} of the {world_size} ranks are run, on this machine, as one node.")
    if trainer["compile"]:
        notes.append("The net is not compiled: trainer.compile is left out.")
    if choices.get("logger"):
        notes.append("logger= is left out: nothing leaves this machine.")
    for key in _without_download(config["model"]):
        notes.append(f"model.{key} is left out: nothing is downloaded.")
    own = [word for word in words if key_of(word) not in (*LEFT_OUT, "logger") and not word.startswith("logger.")]
    known = DOWNLOADED.get(str(config["data"]["_target_"]))
    synthetic, num_images = [], None
    if known and not config["data"].get("root"):
        num_images, channels = known
        synthetic = _made_up(config["data"], channels)
        own = [word for word in own if key_of(word).partition(".")[0] != "data"]
        notes.append(f"The images are made up, as large as those of {config['data']['name']}: nothing is downloaded.")
    return Rehearsal(
        config, own, ranks, ranks if not alone else devices, world_size, batch, synthetic, num_images, notes
    )


def _check(config: Config, choices: Mapping[str, Any]) -> None:
    hardware = config["hardware"]
    if not hardware.get("gpus") or not hardware.get("gpu_memory_gib") or not hardware.get("gpu_capability"):
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("hardware/*.yaml") if "." in p.stem))
        raise UserError(f"A rehearsal needs a machine with GPUs: hardware= one of {names}.")
    if float(hardware["gpu_capability"]) < LEAST_CAPABILITY:
        raise UserError(
            f"{hardware['name']}: torch's CUDA 13 build has no kernels for capability {hardware['gpu_capability']} "
            f"({hardware['gpu']}); it wants {LEAST_CAPABILITY}, a T4, or newer."
        )
    if config["trainer"]["accelerator"] == "cpu" or choices["trainer"] == "hivemind":
        raise UserError(f"trainer={choices['trainer']} has nothing to rehearse on GPUs: trainer=gpu, ddp or fsdp has.")
    if config.get("resume"):
        raise UserError("A rehearsal starts and resumes a run of its own: leave resume= out.")


def _made_up(data: Config, channels: int) -> list[str]:
    """data=synthetic with what the two have in common."""
    options: Any = read_yaml(CONFIGS / "data" / "synthetic.yaml")
    shared = [key for key in options if key in data and key not in ("_target_", "cache_dir", "seed")]
    own = [f"data.{key}={_written(data[key])}" for key in shared]
    return ["data=synthetic", f"data.channels={channels}", "data.fold=null", "data.num_folds=null", *own]


def _written(value: Any) -> str:
    return "null" if value is None else str(value).replace(" ", "")


def _without_download(model: Config) -> Config:
    """What keeps a net from fetching weights."""
    found = {"pretrained": False, "weights": "null"}
    return {key: value for key, value in found.items() if model.get(key)}


def without(words: list[str], changes: Mapping[str, Any]) -> list[str]:
    """The words that none of the changes says anew."""
    return [word for word in words if key_of(word) not in changes]
