"""What trainer.record_hashes=true costs: the hashes of a step beside the step itself, in the same process.

    python benchmarks/hash_cost.py [--rounds 3]

CPU seconds of one thread, so that what else the machine does counts little. Writes results/hash_cost.json.
"""

import argparse
import statistics
import time
from typing import Any

import measuring
import timm
import torch
from torch import nn

from lockstep.callbacks.tensor_hashes import hash_of_each, hashes

NETS = (  # of timm, side of the images, images in a step
    ("vit_tiny_patch16_224", 32, 64),
    ("vit_base_patch32_224", 224, 32),
    ("vit_base_patch32_224", 224, 64),
)


def measure(name: str, side: int, batch: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a step of AdamW in float32, and of all its hashes: medians over the rounds after the first."""
    own = {"img_size": side, "patch_size": 4} if side == 32 else {}
    net = timm.create_model(name, num_classes=10, **own)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    steps, costs = [], []
    for _ in range(rounds + 1):
        started = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        stepped = time.process_time()
        hash_of_each(images) + hash_of_each(labels)
        hashes([parameter.grad for parameter in net.parameters()])
        hashes([*net.parameters(), *net.buffers()])
        steps.append(stepped - started)
        costs.append(time.process_time() - stepped)
    shares = [cost / step for cost, step in zip(costs[1:], steps[1:], strict=True)]
    return {
        "net": name, "side": side, "batch": batch, "step_s": statistics.median(steps[1:]),
        "hashes_s": statistics.median(costs[1:]), "share": statistics.median(shares), "shares": shares,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for net in NETS:
        row = measure(*net, given.rounds)
        print(
            f"{row['net']} {row['side']} px, batch {row['batch']}: {row['share']:.2%} of {row['step_s']:.2f} s",
            flush=True,
        )
        rows.append(row)
    measuring.save("hash_cost", [], rows=rows)


if __name__ == "__main__":
    main()
