"""A trained model on a simulated GPU: predictions and exports are those of the CPU."""

import csv

import numpy as np
import pytest
from PIL import Image

from null_gpus import needs_null_gpus, run_on_null_gpus
from runs import run_script

pytestmark = needs_null_gpus
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The logs of a run, and a folder of images beside them."""
    logs = tmp_path_factory.mktemp("trained")
    done = run_script(
        "train",
        "experiment=quickstart",
        "trainer=cpu",
        "trainer.max_epochs=1",
        "run_id=r",
        logs=logs / "logs",
    )
    assert done.code == 0, done.output
    (logs / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(logs / "images" / f"{number:02d}.png")
    return logs


def predicted(run, trained, out, *words, **options):
    ask = ("ckpt_path=r", f"images={trained}/images", f"log_dir={trained}/logs", f"out={out}")
    done = run("predict", *ask, *words, logs=trained / "logs", **options)
    assert done.code == 0, done.output
    with out.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("words", "devices"), [((), 1), (("trainer=ddp",), 2)])
def test_predictions_are_those_of_the_cpu(words, devices, trained, tmp_path):
    precision = "trainer.precision=32-true"
    on_cpu = predicted(run_script, trained, tmp_path / "cpu.csv", "trainer=cpu", precision)
    out = tmp_path / "gpu.csv"
    on_gpu = predicted(run_on_null_gpus, trained, out, *words, precision, devices=devices)
    assert len(on_gpu) == 12
    for row, expected in zip(on_gpu, on_cpu, strict=True):
        assert (row["file"], row["class"]) == (expected["file"], expected["class"])
        assert float(row["probability"]) == pytest.approx(
            float(expected["probability"]), abs=TOLERANCE
        )


@pytest.mark.parametrize(("words", "is_on_gpu"), [((), True), (("trainer=cpu",), False)])
def test_exports_are_compared_on_the_device_of_the_trainer(words, is_on_gpu, trained, tmp_path):
    ask = ("ckpt_path=r", f"log_dir={trained}/logs", f"out={tmp_path}", "formats=safetensors,pt2")
    done = run_on_null_gpus("export", *ask, *words, logs=trained / "logs", devices=1)
    assert done.code == 0, done.output
    for name in ("safetensors", "pt2"):
        [line] = [line for line in done.output.splitlines() if line.startswith(f"{name}: logits")]
        assert line.endswith("on the GPU") is is_on_gpu
