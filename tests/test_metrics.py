"""A test has the same values over any number of ranks: each image counts once, with uneven last
batches.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support
from torch import Tensor, nn
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassCohenKappa,
    MulticlassF1Score,
    MulticlassRecall,
)

from data.synthetic import SyntheticDataModule
from local_ranks import local_cluster, meet, run_ranks
from lockstep.logbook.build import class_scores
from lockstep.ranks.find import Cluster
from lockstep.runs.join import StartedRanks
from lockstep.strategies.ddp import DDP
from tasks.classifier import ImageClassifier, scores_of

CLASSES, IMAGES, BATCH = 5, 83, 7


class Guess(nn.Module):
    """Logits that depend on an image and on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return 3 * self.head(images.flatten(1))


def metrics() -> dict[str, Any]:
    return {
        "f1": MulticlassF1Score(CLASSES),
        "recall": MulticlassRecall(CLASSES),
        "ece_of_torchmetrics": MulticlassCalibrationError(CLASSES, n_bins=15),
        "kappa": MulticlassCohenKappa(CLASSES),
        "auroc": MulticlassAUROC(CLASSES),  # keeps every image: lists of unequal length
    }


def evaluated(cluster: Cluster, folder: str) -> dict[str, Any]:
    """What trainer.test says on this rank, and the exact counts."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = SyntheticDataModule(
        image_size=4, num_classes=CLASSES, num_images=60, num_test_images=IMAGES, noise=3.0, eval_batch_size=BATCH,
        global_batch_size=12, cache_dir=Path(folder) / "cache",
    )  # fmt: skip
    data.prepare()
    data.attach_to_ranks(rank=cluster.rank, world_size=cluster.world_size)
    module = ImageClassifier(Guess(), num_classes=CLASSES, metrics=metrics())
    meet(cluster)
    trainer = pl.Trainer(
        accelerator="cpu", devices=cluster.ranks_per_node, strategy=DDP() if cluster.world_size > 1 else "auto",
        plugins=[StartedRanks(cluster)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.test(module, datamodule=data, verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"values": values, "confusion": module.test_confusion}


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("metrics"))
    return folder, evaluated(local_cluster(0, 1, 0), folder)


def test_one_process_counts_each_image_once(of_one):
    _, found = of_one
    values = found["values"]
    assert values["test/images"] == IMAGES and sum(map(sum, found["confusion"])) == IMAGES
    assert 0.2 < values["test/acc"] < 0.95 and 0.3 < values["test/auroc"] < 1
    assert values["test/f1_macro"] == pytest.approx(values["test/f1"], abs=1e-6)
    assert values["test/balanced_acc"] == pytest.approx(values["test/recall"], abs=1e-6)
    assert values["test/ece"] == pytest.approx(values["test/ece_of_torchmetrics"], abs=1e-6)


@pytest.mark.slow
def test_several_ranks_say_what_one_says(of_one):
    folder, expected = of_one
    for found in run_ranks(evaluated, 4, folder, timeout_s=120):
        assert found["values"] == pytest.approx(expected["values"], abs=1e-7)
        assert found["confusion"] == expected["confusion"]


def test_scores_of_classes_are_those_of_scikit_learn():
    """Of 40 classes, some have none of the 60 images, and some are never predicted."""
    torch.manual_seed(40)
    labels, predicted = torch.randint(0, 40, (60,)), torch.randint(0, 40, (60,))
    confusion = torch.zeros(40, 40).index_put_((labels, predicted), torch.ones(60), accumulate=True)
    found, expected = (
        class_scores(confusion.long().tolist()),
        {"labels": range(40), "zero_division": 0},
    )
    for score, row in zip(
        found, zip(*precision_recall_fscore_support(labels, predicted, **expected)), strict=True
    ):
        assert [value or 0 for value in score] == pytest.approx([row[3], *row[:3]])
    scores = scores_of(confusion.double(), torch.zeros(15, 3, dtype=torch.float64))
    for name, place in (("f1_macro", 3), ("balanced_acc", 2)):
        there = [score[place] for score in found if score[place] is not None]
        assert scores[name] == pytest.approx(sum(there) / len(there)) and len(there) < 40
    assert scores_of(torch.zeros(2, 2), torch.zeros(15, 3)) == {}
    assert class_scores([[3, 0], [0, 0]]) == [(3, 1.0, 1.0, 1.0), (0, None, None, None)]
