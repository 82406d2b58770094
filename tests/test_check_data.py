"""check_data.py, and the report of the data that every run logs."""

import json

import numpy as np
import pytest
from PIL import Image

from check_data import main
from runs import run_script


def picture(folder, name, seed, change=0, suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(20, 200, (6, 6, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((24, 20), Image.Resampling.BICUBIC)).astype(
        int
    )
    noise = np.random.default_rng(seed + 999).integers(-change, change + 1, pixels.shape)
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(
        folder / f"{name}.{suffix}"
    )


@pytest.fixture
def photos(tmp_path):
    """Sixty images, a copy and a noisy copy of training images in the test, and a cat among the
    dogs.
    """
    root = tmp_path / "photos"
    for split, first in (("train", 0), ("test", 40)):
        for number in range(first, first + (40 if split == "train" else 20)):
            picture(root / split / ("cat" if number % 2 else "dog"), str(number), number)
    picture(root / "test" / "cat", "copy", 1)
    picture(root / "test" / "dog", "near", 2, change=6)
    picture(root / "train" / "dog", "wrong", 3)
    (root / "train" / "cat" / ".hidden.png").write_bytes(b"")
    (root / "train" / "cat" / "notes.txt").write_text("x")
    return root


def ask(root, tmp_path, *words):
    return [
        f"data.root={root}",
        "data=image_folder",
        "data.name=photos",
        f"paths.log_dir={tmp_path / 'logs'}",
        *words,
    ]


def test_copies_near_copies_and_two_labels_are_found(photos, tmp_path, capsys):
    assert main(ask(photos, tmp_path, "data.val_fraction=0")) == 1
    said = capsys.readouterr()
    assert "1 test image is identical to a training image (data_report.txt)." in said.err
    assert "1 image occurs under two labels (data_report.txt)." in said.err
    assert "nearly identical, test and train, same label: 2 pairs" in said.out
    assert "nearly identical, train, two labels: 1 pairs" in said.out
    assert "left out: 1 hidden images, 1 .txt files (data_report.txt)" in said.out
    assert "sizes: 24×20 to 24×20 px" in said.out
    folder = tmp_path / "logs" / "check_data" / "photos"
    lines = (folder / "data_report.txt").read_text().splitlines()
    assert (
        "test/cat/copy.png = train/cat/1.png  # 1 test image is identical to a training image"
        in lines
    )
    assert any(line.startswith("train/dog/2.png = test/dog/near.png  # nearly") for line in lines)
    with Image.open(folder / "pairs.png") as sheet:
        assert sheet.width == 3 * 264 + 8


def test_clean_data_and_a_damaged_image_are_no_failure(tmp_path, capsys):
    root = tmp_path / "photos"
    for number in range(30):
        picture(root / ("cat" if number % 2 else "dog"), str(number), number)
    (root / "cat" / "broken.png").write_bytes(b"no image")
    assert main(ask(root, tmp_path)) == 0
    said = capsys.readouterr()
    assert (
        "1 images are damaged" in said.err
        and "broken.png" in said.err
        and "identical" not in said.out
    )


def test_files_that_are_missing_are_listed(photos, tmp_path, capsys):
    rows = [
        f"{path.relative_to(photos)},{path.parent.name}" for path in photos.glob("train/*/*.png")
    ]
    rows[3:3] = ["train/cat/gone.png,cat", "train/cat/lost.png,cat"]
    (photos / "list.csv").write_text("\n".join(["path,label", *rows]))
    words = [
        f"data.root={photos / 'list.csv'}",
        "data=csv",
        "data.name=photos",
        f"paths.log_dir={tmp_path / 'logs'}",
    ]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "2 images cannot be used: " in said.err and "the weights say" not in said.out
    lines = (tmp_path / "logs" / "check_data" / "photos" / "data_report.txt").read_text()
    assert "line 5: " in lines and "gone.png cannot be read" in lines and "lost.png cannot" in lines


@pytest.mark.slow
def test_a_run_logs_and_records_the_report_of_its_data(photos, tmp_path):
    words = ["data=image_folder", f"data.root={photos}", "data.image_size=16", "data.global_batch_size=8",
             "model=small_cnn", "trainer=cpu", "trainer.max_steps=1", "augmentation=none",
             "run_id=r"]  # fmt: skip
    done = run_script("train", *words, logs=tmp_path / "logs")
    assert done.code == 0, done.output
    assert "data: 2 classes: cat, dog · " in done.output
    assert "left out: 1 hidden images, 1 .txt files (data_report.txt)" in done.output
    assert "1 test image is identical to a training image (data_report.txt)." in done.output
    report = json.loads((done.folder.path / "run.json").read_text())["data_report"]
    assert report == {
        "images_per_class": report["images_per_class"], "left_out": {"hidden images": 1, ".txt files": 1},
        "identical_images": [
            "1 test image is identical to a training image", "1 validation image is identical to a training image",
            "1 image occurs under two labels",
        ],
        "smallest_image": "24×20", "largest_image": "24×20",
    }  # fmt: skip
    assert report["images_per_class"]["cat"]["test"] == 11
    assert (
        "test/cat/copy.png = train/cat/1.png" in (done.folder.path / "data_report.txt").read_text()
    )
    assert "1 test image is identical" in (done.folder.path / "page.md").read_text()


def test_a_batch_is_drawn_as_the_net_sees_it(photos, tmp_path, capsys):
    more = ("--augmented", "augmentation=trivial_augment", "augmentation.mixup_alpha=0.5")
    main(ask(photos, tmp_path, "data.image_size=16", *more))
    picture = tmp_path / "logs" / "check_data" / "photos" / "batch.png"
    assert f"{picture}: training images" in capsys.readouterr().out
    with Image.open(picture) as sheet:
        assert sheet.size == (8 * 136 + 8, 2 * 168 + 8)


def test_files_of_an_earlier_check_go_and_others_stay(photos, tmp_path):
    folder = tmp_path / "logs" / "check_data" / "photos"
    main(ask(photos, tmp_path, "--augmented", "data.image_size=16", "augmentation=none"))
    written = {path.name for path in folder.iterdir()}
    assert written == {"data_report.txt", "pairs.png", "batch.png"}
    (folder / "notes.txt").write_text("mine")
    other = folder.with_name("other") / "pairs.png"
    other.parent.mkdir()
    other.write_bytes(b"of another data set")

    clean = tmp_path / "clean"
    for number in range(30):
        picture(clean / ("cat" if number % 2 else "dog"), str(number), number)
    assert main(ask(clean, tmp_path)) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert other.exists()
