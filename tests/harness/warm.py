"""What every run does first, done once in the fork server, so that its children are quicker at
it.
"""

import gc
import tempfile
from pathlib import Path

from example_runs import write_run
from lockstep.config.compose import compose
from lockstep.logbook.build import summarise, write_page

# The check of a config composes its options alone, once in a process and in those forked from it.
for trainer in ("cpu", "ddp_sim", "fsdp_sim"):
    compose("train", ["experiment=quickstart", f"trainer={trainer}"])
    compose("train", ["data=digits", "model=small_cnn", f"trainer={trainer}"])
# A resume looks for its run with the default options.
compose("train", ["resume=r"])
with tempfile.TemporaryDirectory() as folder:
    write_page(summarise(write_run(Path(folder), "run")))
gc.freeze()  # so that the children need not look through the objects of torch
