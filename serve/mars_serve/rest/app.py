"""The FastAPI application, put together. Reaches models through `Backend`; knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from mars_platform import __version__
from mars_serve.rest.errors import add_error_handlers
from mars_serve.rest.generation import generation_router
from mars_serve.rest.information import information_router
from mars_serve.served import ServedModel
from mars_serve.settings import ServeSettings


def create_app(models: Mapping[str, ServedModel], settings: ServeSettings) -> FastAPI:
    """The REST application over some models."""
    del settings
    app = FastAPI(title="marsray", version=__version__)
    add_error_handlers(app)
    app.include_router(information_router(models))
    app.include_router(generation_router(models))
    return app
