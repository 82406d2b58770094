"""Peak memory of the quickstart's process against the same work as a bare PyTorch loop.

    python benchmarks/memory.py

Resident bytes at their highest, as the kernel counts them for a finished process; beside them a process that only
imports the libraries, because most of it is theirs.
"""

import argparse
import sys
import tempfile

from measuring import HERE, TRAIN, goal_row, in_turns, median, paired_ratio, peak_mib, places, save

BARE = [sys.executable, str(HERE / "peers" / "bare_digits.py")]
IMPORTS = [sys.executable, "-c", "import torch, lightning.pytorch, hydra, numpy"]
LIMIT = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args().repetitions
    with tempfile.TemporaryDirectory() as scratch:
        quickstart = [*TRAIN, "experiment=quickstart", "trainer=cpu", *places(scratch)]
        ours, bare, imports = in_turns(
            repetitions, lambda: peak_mib(quickstart), lambda: peak_mib(BARE), lambda: peak_mib(IMPORTS)
        )
    ratio = paired_ratio(ours, bare)
    save(
        "memory",
        [
            goal_row(11, "peak memory of the quickstart's process ÷ a bare loop's", f"≤ {LIMIT}", ratio, ratio <= LIMIT,
                     detail=f"{median(ours, 0):.0f} MiB, bare loop {median(bare, 0):.0f} MiB, "
                     f"only importing Lightning and Hydra {median(imports, 0):.0f} MiB")
        ],
        mib={"quickstart": median(ours, 1), "bare_loop": median(bare, 1), "imports_only": median(imports, 1)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
