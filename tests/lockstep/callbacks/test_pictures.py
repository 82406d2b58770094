"""batch.png and mistakes.png: what they show, on any ranks, and that the training is as without."""

import csv
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lockstep.callbacks.pictures import MAX_SHEET_IMAGES, Pictures, gather_largest_losses
from lockstep.checkpoints.load import read_checkpoint
from plain_task import Small, fit
from runs import succeed

SMALL = ("experiment=quickstart", "augmentation=trivial_augment", "trainer.max_steps=3")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A short run on the digits."""
    return succeed("train", *SMALL, "run_id=drawn", logs=tmp_path_factory.mktemp("logs"))


def test_weights_and_metrics_are_the_same_without_pictures(drawn):
    plain = succeed("train", *SMALL, "pictures=false", "run_id=plain", logs=drawn.logs)
    assert (drawn.folder.path / "batch.png").exists()
    assert not list(plain.folder.path.glob("*.png"))
    states = []
    for done in (drawn, plain):
        [path] = done.folder.checkpoints.glob("last-*.ckpt")
        states.append(read_checkpoint(path))
    for name, weights in states[0]["state_dict"].items():
        assert torch.equal(weights, states[1]["state_dict"][name]), name
    assert losses(drawn) == losses(plain)
    tests = [
        {name: value for name, value in done.record["metrics"].items() if name.startswith("test/")}
        for done in (drawn, plain)
    ]
    assert tests[0] and tests[0] == tests[1]


def losses(done):
    with done.folder.metrics.open() as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def test_both_pictures_are_on_the_page_and_small(drawn):
    page = drawn.folder.page.read_text()
    for name in ("batch.png", "mistakes.png"):
        path = drawn.folder.path / name
        assert f"]({name})" in page and path.stat().st_size < 40_000
        with Image.open(path) as picture:
            assert picture.width == 8 * 136 + 8


@pytest.mark.slow
def test_two_ranks_draw_the_mistakes_of_one(drawn):
    pictures = []
    for trainer in ("cpu", "ddp_sim"):
        words = (f"trainer={trainer}", f"run_id={trainer}")
        done = succeed("eval", "ckpt_path=drawn", *words, logs=drawn.logs)
        pictures.append((done.folder.path / "mistakes.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0] == (drawn.folder.path / "mistakes.png").read_bytes()


def kept_of(*batches):
    """Return the losses and positions that a callback keeps of batches of losses."""
    callback = Pictures("nowhere")
    loader = SimpleNamespace(positions=lambda i: torch.arange(len(batches[i])) + 100 * i)
    trainer = SimpleNamespace(test_dataloaders=loader)
    for i, numbers in enumerate(batches):
        losses = torch.tensor(numbers)
        images = torch.zeros(len(losses), 1, 300, 200)
        outputs = {"losses": losses, "predictions": torch.zeros(len(losses))}
        callback.on_test_batch_end(trainer, None, outputs, (images, losses), i)
    kept, positions, images, *_ = callback.worst_images
    assert images.shape[1:] == (1, 128, 128)
    return kept.tolist(), positions.tolist()


def test_the_sixteen_largest_losses_of_all_batches_are_kept():
    kept, positions = kept_of([float(i) for i in range(40)], [38.5, -1.0])
    assert kept == [39.0, 38.5, *(float(i) for i in range(38, 24, -1))]
    assert positions[:3] == [39, 100, 38]


def test_a_loss_that_is_nan_comes_first():
    assert kept_of([1.0, float("nan")], [2.0])[1] == [1, 100, 0]


def test_an_empty_batch_of_a_rank_is_taken():
    assert kept_of([], [2.0])[0] == [2.0]


def test_images_of_another_rank_take_their_place_by_loss():
    of_rank_zero = torch.zeros(2 * MAX_SHEET_IMAGES + 1)
    of_rank_zero[:MAX_SHEET_IMAGES] = -torch.inf
    of_rank_zero[0] = 3.0
    of_rank_zero[-1] = 1  # it has tested an image

    def reduce(tensor, reduce_op):
        return tensor + of_rank_zero if tensor.shape == of_rank_zero.shape else tensor

    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=reduce)
    trainer = SimpleNamespace(world_size=2, global_rank=1, strategy=strategy)
    worst = [torch.tensor([5.0, 1.0]), torch.tensor([7, 8])]
    losses, positions = gather_largest_losses(trainer, worst)
    assert losses.tolist() == [5.0, 0.0, 1.0] and positions.tolist() == [7, 0, 8]


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path, caplog):
    (tmp_path / "batch.png").mkdir()
    data = torch.ones(2, 1, 2, 2)
    images = [(image, torch.tensor(1)) for image in data]

    class Images(Small):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0].flatten(1)[:, :2]).sum()

    fit(Images(), Pictures(tmp_path), data=images, default_root_dir=tmp_path)
    assert "batch.png was not written" in caplog.text


def test_a_batch_without_images_is_passed_over(tmp_path, caplog):
    fit(Small(), Pictures(tmp_path), default_root_dir=tmp_path)
    assert not list(tmp_path.glob("*.png")) and "not written" not in caplog.text
