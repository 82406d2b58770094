"""A test says the same over any number of ranks: each image counted once, with uneven last batches."""

import pytest

from local_ranks import PRELOAD, local_cluster, run_ranks
from metric_runs import IMAGES, evaluated


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("metrics"))
    return folder, evaluated(local_cluster(0, 1, 0), folder)


def test_one_process_counts_each_image_once(of_one):
    _, found = of_one
    values = found["values"]
    assert values["test/images"] == IMAGES and sum(map(sum, found["counts"]["confusion"])) == IMAGES
    assert 0.2 < values["test/acc"] < 0.95 and 0.3 < values["test/auroc"] < 1
    assert values["test/f1_macro"] == pytest.approx(values["test/f1"], abs=1e-6)
    assert values["test/balanced_acc"] == pytest.approx(values["test/recall"], abs=1e-6)
    assert values["test/ece"] == pytest.approx(values["test/ece_of_torchmetrics"], abs=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_ranks_say_what_one_says(of_one, ranks):
    folder, expected = of_one
    for found in run_ranks(evaluated, ranks, folder, preload=(*PRELOAD, "metric_runs"), timeout_s=120):
        assert found["values"] == pytest.approx(expected["values"], abs=1e-7)
        assert found["counts"]["confusion"] == expected["counts"]["confusion"]
