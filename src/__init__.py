"""`python -m src.train` finds its neighbours, also in a Python where nothing is installed."""

import sys

sys.path.insert(0, __path__[0])
