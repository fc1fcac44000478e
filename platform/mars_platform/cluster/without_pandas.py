"""Keeps the worker process that imports this from loading pandas.

Ray Serve imports pandas wherever it is installed, to encode answers that no server here gives. It
costs each process of a server a third of a CPU second and tens of MB. Imports nothing else.
"""

import sys

sys.modules["pandas"] = None  # type: ignore[assignment]  # an import fails as if it were not there
