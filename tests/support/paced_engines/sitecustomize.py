"""Paces the engines of a server, see `paced_engine`.

Python imports this module at its start where this directory is in ``PYTHONPATH``.
"""

import sys

if {"mars_serve.replica.engine_main", "mars_serve.replica.engine_template"} & {*sys.orig_argv}:
    from mars_serve.replica import loading
    from paced_engine import PacedEngine

    loading.Engine = PacedEngine  # type: ignore[misc]
