"""Assembles the FastAPI application; its endpoints reach models through `Backend`."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

from fastapi import FastAPI

from mars_platform import __version__
from mars_serve.api.keys import KeyRing
from mars_serve.api.limits import Places
from mars_serve.api.text_threads import TextThreads
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ServeSettings
from mars_serve.http.batches.records import BatchStore
from mars_serve.http.batches.run import Means
from mars_serve.http.batches.runner import BatchRunner
from mars_serve.http.endpoints.about import about_router
from mars_serve.http.endpoints.admin import admin_router
from mars_serve.http.endpoints.batches import batches_router
from mars_serve.http.endpoints.dashboard import dashboard_router
from mars_serve.http.endpoints.files import files_router
from mars_serve.http.endpoints.generation import generation_router
from mars_serve.http.endpoints.generator import Generator
from mars_serve.http.endpoints.information import information_router
from mars_serve.http.endpoints.loras import loras_router
from mars_serve.http.endpoints.messages import messages_router
from mars_serve.http.endpoints.metrics import metrics_router
from mars_serve.http.endpoints.responses import responses_router
from mars_serve.http.endpoints.tokens import tokens_router
from mars_serve.http.in_process import OwnRequests
from mars_serve.http.middleware.errors import add_error_handlers
from mars_serve.http.middleware.recording import RecordMiddleware
from mars_serve.http.middleware.security import add_security
from mars_serve.http.page_files import pages_router
from mars_serve.http.stored_responses import StoredResponses
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.storage.files import FileStore
from mars_serve.storage.objects import ObjectStorage

_LARGE_BODIES = 16
"""Bodies of the largest size for which there is room until their texts are read."""


def create_app(
    models: Mapping[str, ServedModel], settings: ServeSettings, *, replica: str | None = None
) -> FastAPI:
    """Create the REST application over models by the names that requests give.

    ``replica`` is the name of the Ray Serve replica that runs the application; metrics bear it, and
    Serve returns X-Request-Id itself. Outside Serve it is None.

    Raises:
        UserError: the keys or packages that the settings require are missing, or the storage cannot
            be used.
    """
    telemetry = IngressTelemetry(models, replica or "ingress")
    storage = ObjectStorage(settings.storage) if settings.storage.path else None
    batches = BatchStore(FileStore(storage)) if storage else None

    # A redirect would contain the host name that the request sent.
    # FastAPI's own pages would load scripts of other hosts into the origin of /admin
    app = FastAPI(
        title="marsray",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    add_error_handlers(app, Random().random)
    places = _places(models, settings)
    threads = TextThreads(_LARGE_BODIES * settings.limits.body_bytes)
    keys = add_security(app, settings, places, threads)
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
    app.state.batches = _runner(app, batches, keys, threads, settings) if batches else None
    app.include_router(information_router(models))
    app.include_router(about_router(models, settings))
    app.include_router(admin_router(models))
    app.include_router(loras_router(models))
    app.include_router(dashboard_router(models, app.state.batches))
    app.include_router(metrics_router(models, telemetry))
    generator = Generator(models, settings.limits, threads, places)
    app.include_router(generation_router(generator))
    app.include_router(messages_router(generator))
    kept = None
    if storage is not None:
        kept = StoredResponses(storage, OwnRequests(app), keys.named, threads, settings.limits)
    app.state.responses = kept
    app.include_router(responses_router(generator, kept))
    app.include_router(tokens_router(models, settings.limits, threads))
    app.include_router(files_router(batches.files if batches else None, settings.limits))
    app.include_router(batches_router(batches))
    if settings.pages:
        app.include_router(pages_router())
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Run batches, and generate responses in the background, while the application runs."""
    async with AsyncExitStack() as stack:
        for each in filter(None, (app.state.batches, app.state.responses)):
            await stack.enter_async_context(each.running())
        yield


def _runner(
    app: FastAPI, batches: BatchStore, keys: KeyRing, threads: TextThreads, settings: ServeSettings
) -> BatchRunner:
    num_slots = settings.storage.batch_concurrency
    slots = asyncio.Semaphore(num_slots)
    telemetry = app.state.telemetry
    means = Means(
        OwnRequests(app), keys.named, settings.limits, telemetry, num_slots, slots, threads
    )
    return BatchRunner(batches, means)


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
