"""Rehearse a training on null GPUs before a machine is rented: what fails and where, memory, an estimate of the cost.

    python src/rehearse.py <options of train.py> hardware=p4d.24xlarge
    python src/rehearse.py … hardware=p4d.24xlarge --mfu=0.4 --gbit-s=5

Exit code 0 only if all of it held. Needs Linux on x86-64, cc, and torch's build with CUDA; no GPU.
"""

import logging
import sys

from lockstep.config.command_line import run_script
from lockstep.rehearsal.rehearse import rehearse
from lockstep.runs.errors import EXIT_USER_ERROR

log = logging.getLogger(__name__)

ASSUMED = {"--mfu": 0.3, "--gbit-s": 1.0}


def main(argv: list[str]) -> int:
    assumed, words = dict(ASSUMED), []
    for word in argv:
        name, _, value = word.partition("=")
        if name not in ASSUMED:
            words.append(word)
            continue
        try:
            assumed[name] = float(value)
        except ValueError:
            assumed[name] = 0.0
        if assumed[name] <= 0 or (name == "--mfu" and assumed[name] > 1):
            log.error(f"{word}: give {name} a number above 0{', at most 1' if name == '--mfu' else ''}.")
            return EXIT_USER_ERROR
    return run_script("train", words, lambda cfg: rehearse(cfg, *assumed.values()), __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
