"""Count every synchronisation of host and device that torch reports, by the line of Python that
asked for it.

The counts go as JSON {"src/train.py:12 < …": n} to $NULLGPU_SYNCS/rank<RANK>.json. The file is
written anew after each synchronisation, because a rank may end by os._exit. Synchronisations within
a training step also go to steps-rank<RANK>.json. If the collectives of the ranks differ, each rank's
stack goes to stack-rank<RANK>.txt.
"""

import collections
import faulthandler
import json
import os
import signal
import traceback
import warnings
from pathlib import Path

import torch

SEEN, IN_STEPS = collections.Counter(), collections.Counter()
REPOSITORY = os.getcwd()
NOT_CALLERS = (
    "/nullgpu/syncs.py",
    "/nullgpu/compute.py",
    "/torch/",
    "/warnings.py",
    "/contextlib.py",
)
STEP = "lightning/pytorch/loops/training_epoch_loop.py"


def start():
    warnings.filterwarnings("always", message="called a synchronizing")
    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
    show_others = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if "called a synchronizing" in str(message):
            stack = traceback.extract_stack()[:-1]
            line = where(stack)
            SEEN[line] += 1
            write(SEEN, "rank")
            if any(f.name == "advance" and f.filename.endswith(STEP) for f in stack):
                IN_STEPS[line] += 1
                write(IN_STEPS, "steps-rank")
        else:
            show_others(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    stack = Path(os.environ["NULLGPU_SYNCS"]) / f"stack-rank{os.environ.get('RANK', 0)}.txt"
    stack.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGRTMIN + 5, stack.open("w"), all_threads=True)
    torch.cuda.set_sync_debug_mode("warn")


def where(stack):
    """Return the innermost line that is not torch's own, and the innermost below the working
    directory.
    """
    frames = [f for f in stack if not any(part in f.filename for part in NOT_CALLERS)]
    ours = [f for f in frames if f.filename.startswith(REPOSITORY) and "/.venv/" not in f.filename]
    lines = dict.fromkeys(f"{short(f.filename)}:{f.lineno}" for f in [frames[-1], *ours[-1:]])
    # The scaler of fp16 checks for an overflow.
    if any(f.filename.endswith("torch/amp/grad_scaler.py") for f in stack):
        return " < ".join(["GradScaler", *lines])
    return " < ".join(lines)


def short(filename):
    return filename.rpartition("site-packages/")[2].removeprefix(REPOSITORY + "/")


def write(counts, name):
    folder = Path(os.environ["NULLGPU_SYNCS"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{os.environ.get('RANK', 0)}.json"
    path.write_text(json.dumps(counts, indent=1))
