"""How long a step waits for images of JPEG files at 224 px: the share that a run's record holds.

    python benchmarks/loader_wait.py --images FOLDER [--steps 20]

FOLDER has train/<class>/ and test/<class>/, photographs of some 500 x 400 pixels. A random part of each, mirrored.
"""

import argparse
import tempfile
from pathlib import Path

from measuring import goal_row, run_record, save

MODELS = {"ViT-B/32": "vit_base_patch32_224", "EfficientNet-Lite0": "tf_efficientnet_lite0"}
GOAL = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    goals, figures = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for label, name in MODELS.items():
            record = run_record(scratch, [
                "data=image_folder", f"data.root={options.images.resolve()}", "data.path=loader", "data.val_fraction=0",
                f"data.global_batch_size={options.batch}", "model=timm", f"model.name={name}", "model.pretrained=false",
                "augmentation=resized_crop", "optimizer=adamw", "trainer=cpu", f"trainer.max_steps={options.steps}",
                "test=false",
            ])  # fmt: skip
            found = figures[name] = record["throughput"]
            share = found["data_wait_share"]
            goals.append(goal_row(
                f"{label} at 224 px from JPEG files: a step's wait for images", "≤ 2 %", round(100 * share, 2),
                share <= GOAL, unit="%", detail=f"{options.steps} steps of {options.batch} images",
            ))  # fmt: skip
    save("loader_wait", goals, throughput=figures)


if __name__ == "__main__":
    main()
