"""Lets the engines of a server draw how many tokens each pass accepts, see `bench.serving`.

Python imports this module at its start where this directory is in ``PYTHONPATH``.
"""

import sys

if {"mars_serve.replica.engine_main", "mars_serve.replica.engine_template"} & {*sys.orig_argv}:
    from mars_serve.bench.decode.drawing import DrawingEngine
    from mars_serve.replica import loading

    loading.Engine = DrawingEngine  # type: ignore[misc]
