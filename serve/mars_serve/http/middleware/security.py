"""Adds the middleware that guards every endpoint: keys, limits, bodies and error responses."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from mars_platform.errors import UserError
from mars_serve.api.keys import KeyRing
from mars_serve.api.limits import KeyLimits, Places
from mars_serve.api.text_threads import TextThreads
from mars_serve.config.settings import ServeSettings
from mars_serve.http.middleware.admission import AdmissionMiddleware, QueueMiddleware
from mars_serve.http.middleware.authentication import PUBLIC_PATHS, KeyMiddleware
from mars_serve.http.middleware.bodies import BodyMiddleware
from mars_serve.http.middleware.errors import ErrorMiddleware
from mars_serve.http.middleware.headers import HeaderMiddleware, OwnMachineMiddleware


def add_security(
    app: FastAPI, settings: ServeSettings, places: Mapping[str, Places], threads: TextThreads
) -> KeyRing:
    """Guard an application's endpoints with keys and limits, and report errors of both.

    Returns the keys in force.

    Raises:
        UserError: the keys cannot be read, or are required and missing.
    """
    keys = KeyRing(settings.keys, trusts_anyone=settings.is_local)
    if keys.is_open and not (settings.is_local or settings.insecure):
        raise UserError(
            "keys: the process that takes requests has none, and other machines reach it; give "
            f"keys.file, or set {settings.keys.environment} there"
        )
    limits = KeyLimits(num_shares=settings.proxy.num_replicas)
    # the middleware added last runs first
    bodies = settings.limits
    app.add_middleware(
        BodyMiddleware,
        threads=threads,
        max_bytes=bodies.body_bytes,
        max_values=bodies.body_values,
        wait_s=bodies.body_wait_s,
    )
    app.add_middleware(QueueMiddleware, places=places)
    app.add_middleware(AdmissionMiddleware, limits=limits)
    app.add_middleware(KeyMiddleware, keys=keys)
    if keys.is_open and settings.is_local:
        app.add_middleware(OwnMachineMiddleware, allowed=settings.allowed_hosts)
    app.add_middleware(HeaderMiddleware)
    app.add_middleware(ErrorMiddleware)
    if not keys.is_open:
        _describe_keys(app)
    return keys


def _describe_keys(app: FastAPI) -> None:
    without_keys = app.openapi

    def openapi() -> dict[str, Any]:
        document = without_keys()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"key": []}]
        for path in PUBLIC_PATHS & document["paths"].keys():
            document["paths"][path]["get"]["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's way of extending it
