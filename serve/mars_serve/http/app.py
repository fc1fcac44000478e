"""Assembles the FastAPI application; its endpoints reach models through `Backend`."""

from collections.abc import Mapping
from random import Random

from fastapi import FastAPI

from mars_platform import __version__
from mars_serve.api.limits import Places
from mars_serve.api.text_threads import TextThreads
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ServeSettings
from mars_serve.http.endpoints.about import about_router
from mars_serve.http.endpoints.admin import admin_router
from mars_serve.http.endpoints.dashboard import dashboard_router
from mars_serve.http.endpoints.generation import generation_router
from mars_serve.http.endpoints.generator import Generator
from mars_serve.http.endpoints.information import information_router
from mars_serve.http.endpoints.loras import loras_router
from mars_serve.http.endpoints.metrics import metrics_router
from mars_serve.http.endpoints.tokens import tokens_router
from mars_serve.http.middleware.errors import add_error_handlers
from mars_serve.http.middleware.recording import RecordMiddleware
from mars_serve.http.middleware.security import add_security
from mars_serve.http.page_files import pages_router
from mars_serve.observability.ingress_telemetry import IngressTelemetry

_LARGE_BODIES = 16
"""Bodies of the largest size for which there is room until their texts are read."""


def create_app(
    models: Mapping[str, ServedModel], settings: ServeSettings, *, replica: str | None = None
) -> FastAPI:
    """Create the REST application over models by the names that requests give.

    ``replica`` is the name of the Ray Serve replica that runs the application; metrics bear it, and
    Serve returns X-Request-Id itself. Outside Serve it is None.

    Raises:
        UserError: the keys or packages that the settings require are missing.
    """
    telemetry = IngressTelemetry(models, replica or "ingress")
    # A redirect would contain the host name that the request sent.
    # FastAPI's own pages would load scripts of other hosts into the origin of /admin
    app = FastAPI(
        title="marsray", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    add_error_handlers(app, Random().random)
    places = _places(models, settings)
    threads = TextThreads(_LARGE_BODIES * settings.limits.body_bytes)
    add_security(app, settings, places, threads)
    tracer = None
    if settings.telemetry.tracing:
        from mars_serve.http.middleware.tracing import tracer_from_environment

        tracer = tracer_from_environment()
    app.add_middleware(  # added last, so outermost
        RecordMiddleware,
        telemetry=telemetry,
        logs=settings.telemetry.log_requests,
        tracer=tracer,
        is_id_echoed=replica is not None,
    )
    app.state.telemetry = telemetry
    app.include_router(information_router(models))
    app.include_router(about_router(models, settings.limits))
    app.include_router(admin_router(models))
    app.include_router(loras_router(models))
    app.include_router(dashboard_router(models))
    app.include_router(metrics_router(models, telemetry))
    app.include_router(generation_router(Generator(models, settings.limits, threads, places)))
    app.include_router(tokens_router(models, settings.limits, threads))
    if settings.pages:
        app.include_router(pages_router())
    return app


def _places(models: Mapping[str, ServedModel], settings: ServeSettings) -> dict[str, Places]:
    """Return the places in each model's queue that this one of several ingress replicas gives."""
    return {
        name: Places(
            model.settings.engine.max_requests
            * model.settings.most_replicas
            // settings.proxy.num_replicas,
            settings.limits.choices_per_key,
        )
        for name, model in models.items()
    }
