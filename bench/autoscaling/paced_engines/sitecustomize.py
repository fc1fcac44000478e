"""Paces the engines of a server, see `bench.autoscaling.paced_engine`.

Python imports this module at its start where this directory is in ``PYTHONPATH``.
"""

import sys

if {"mars_serve.replica.engine_main", "mars_serve.replica.engine_template"} & {*sys.orig_argv}:
    from bench.autoscaling.paced_engine import PacedEngine

    from mars_serve.replica import loading

    loading.Engine = PacedEngine  # type: ignore[misc]
