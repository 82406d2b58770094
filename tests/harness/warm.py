"""What every run does first, done once in the fork server, so that its children are quicker at
it.
"""

import gc
import tempfile
from pathlib import Path

from example_runs import write_run
from lockstep.config.compose import compose
from lockstep.logbook.build import summarise, write_page

compose("train", ["experiment=quickstart"])
with tempfile.TemporaryDirectory() as folder:
    write_page(summarise(write_run(Path(folder), "run")))
gc.freeze()  # so that the children need not look through the objects of torch
