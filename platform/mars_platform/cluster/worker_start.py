"""Lets the worker process of Ray Serve that imports this start sooner.

Imports the standard library alone.

Ray Serve imports pandas wherever it is installed, to encode answers that no server here gives. It
costs each process of a server a third of a CPU second and tens of MB. Collecting garbage as often
as by default, among modules that stay, costs a tenth of one.
"""

import gc
import sys

sys.modules["pandas"] = None  # type: ignore[assignment]  # an import fails as if it were not there
gc.set_threshold(20_000)
