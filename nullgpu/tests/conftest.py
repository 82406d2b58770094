"""The lines of a run on stdout, warnings and errors on stderr, as a script shows them."""

import pytest

from lockstep.process.output import configure_logging


@pytest.fixture(autouse=True)
def console():
    configure_logging()
