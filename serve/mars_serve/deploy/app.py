"""The Ray Serve application: one ingress deployment, and one deployment of replicas per model.

`application` is the builder for ``serve run`` and for Serve's config files (``import_path:
mars_serve.app:application``); `build_application` takes settings instead.
"""

import gc
import re
import sys
import time
from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, metrics
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle

from mars_autoscale.policy.reports import IngressReport
from mars_autoscale.ray.ray_policy import JointPolicy
from mars_platform.config import build_settings
from mars_platform.imports import uncollected, without_torch
from mars_serve.config.loras import LoraChanges, LoraNames
from mars_serve.config.served import ServedModel, read_served, with_dtype
from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.control.reporting import report_in_thread
from mars_serve.deploy.backend import ReplicaBackend
from mars_serve.engine.request import LoraReference
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.observability.ray_metrics import RayMirror
from mars_serve.replica.replica import ModelReplica

_MAX_ONGOING = 100_000
"""Concurrency limit of a replica in Ray Serve, never reached: requests wait in ingress replicas for
the credits of engines, which alone know their load."""
_UNKNOWN_HOST = "0.0.0.0"  # noqa: S104 - assumed only; nothing is bound to it
_SWITCH_S = 0.0005
"""Seconds after which a thread that reads a text lets the event loop run. Python's default is 5 ms,
which each of the event loop's turns may have to wait."""
_DRAIN_POLL_S = 0.2
"""Seconds between two checks whether a replica that shuts down still runs requests."""


class Ingress:
    """The ingress deployment, which serves the REST application over the models' handles."""

    def __init__(self, settings: ServeSettings, handles: list[DeploymentHandle]) -> None:
        _import_modules(settings.models)
        created, context = int(time.time()), serve.get_replica_context()
        models = [with_dtype(model) for model in settings.models]
        self._settings = settings = settings.model_copy(update={"models": models})
        self._replica: str = context.replica_id.unique_id
        self._application = context.app_name
        # A handle that was passed in takes its transport from the environment of the process that
        # deployed it, which may differ from the cluster's.
        self._backends = {
            model.name: ReplicaBackend(
                serve.get_deployment_handle(handle.deployment_name, context.app_name),
                model,
                context.app_name,
            )
            for model, handle in zip(settings.models, handles, strict=True)
        }
        self._models = {
            model.name: ServedModel(
                model,
                read_served(model),
                self._backends[model.name],
                created,
                LoraNames(
                    {each.name: LoraReference.to(each.name, each.path) for each in model.loras}
                ),
            )
            for model in settings.models
        }

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Create the application; Ray Serve calls this once the replica is constructed."""
        from mars_serve.http.app import create_app
        from mars_serve.http.middleware.recording import write_logs_to_stderr

        write_logs_to_stderr()
        sys.setswitchinterval(_SWITCH_S)
        app = create_app(self._models, self._settings, replica=self._replica)
        RayMirror(app.state.telemetry, metrics).start()
        self._report(app.state.telemetry)
        # The garbage collector would look through all that is loaded by now, and stays, again and
        # again; that stops the event loop for a fifth of a second each time.
        gc.collect()
        gc.freeze()
        return app

    def _report(self, telemetry: IngressTelemetry) -> None:
        """Report what this ingress replica knows of requests to the governor, from now on."""
        telemetry.watch_queues(
            {name: backend.waiting_by_tier for name, backend in self._backends.items()}
        )

        def reports() -> list[tuple[str, IngressReport]]:
            return [
                (name, telemetry.report(name, *backend.arrivals()))
                for name, backend in self._backends.items()
            ]

        report_in_thread(self._application, "report_ingress", reports)
        self._follow_loras()

    def _follow_loras(self) -> None:
        """Hear of LoRA adapters that are loaded and unloaded by way of any ingress replica."""
        models = [each for each in self._models.values() if each.settings.engine.max_loras]

        def known() -> list[tuple[str, LoraChanges]]:
            return [(model.settings.name, model.loras.changes) for model in models]

        def take(found: list[LoraChanges]) -> None:
            for model, changes in zip(models, found, strict=True):
                model.loras.take(changes)

        if models:
            report_in_thread(self._application, "loras", known, take)


def _import_modules(models: list[ModelSettings]) -> None:
    """Import what an ingress replica needs; it needs torch only to check the layers of adapters."""
    needs_torch = any(each.adapter or each.engine.max_loras for each in models)
    with uncollected(), nullcontext() if needs_torch else without_torch():
        import mars_serve.http.app  # noqa: F401 - transformers is among it


def application(args: dict[str, Any]) -> Application:
    """Build the application from the content of a config file of ``marsray serve``.

    The cluster is already running, so ``port``, ``cluster`` and ``proxy.kind`` have no effect;
    Serve's own ``http_options`` and environment apply. Without ``host`` the server is assumed to be
    reachable from the network, so it needs keys.

    Raises:
        UserError: a setting is unknown or invalid, or there are no keys.
    """
    content = {"host": _UNKNOWN_HOST, **args}
    return build_application(build_settings(content, ServeSettings, source="args"))


def build_application(settings: ServeSettings) -> Application:
    """Build the application graph for ``serve.run``, with keys from the environment.

    All replicas get the same checkpoints; see `ServeSettings.pinned`.
    """
    settings = settings.pinned().model_copy(update={"keys": settings.keys.captured()})
    handles = [_bind_model(settings, index) for index in range(len(settings.models))]
    options = {
        **_common_options(settings),
        "name": "ingress",
        "num_replicas": settings.proxy.num_replicas,
        "ray_actor_options": {"num_cpus": 0},
    }
    ingress = serve.deployment(serve.ingress()(Ingress), **options)
    return ingress.bind(settings, handles)


def _bind_model(settings: ServeSettings, index: int) -> Application:
    model = settings.models[index]
    options = {
        **_common_options(settings),
        "name": deployment_name(settings.models, index),
        **_replicas(model),
        "ray_actor_options": {"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        "health_check_period_s": 1,  # Serve replaces a replica after three checks that failed
    }
    return serve.deployment(ModelReplica, **options).bind(model, settings.share_of_cores)


def deployment_name(models: list[ModelSettings], index: int) -> str:
    """Return a name that does not depend on other models.

    An update would end replicas at once whose deployment has been renamed.
    """
    names = [re.sub(r"[^A-Za-z0-9._-]", "-", model.name) for model in models]
    return f"model-{names[:index].count(names[index])}-{names[index]}"


def _replicas(model: ModelSettings) -> dict[str, Any]:
    autoscaling = model.autoscaling
    if autoscaling is None:
        return {"num_replicas": model.num_replicas}
    policy = AutoscalingPolicy(policy_function=JointPolicy, policy_kwargs={"model": model.name})
    # the policy has already waited before it decides
    no_delays = {"upscale_delay_s": 0, "downscale_delay_s": 0}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            **no_delays,
            policy=policy,
        )
    }


def _common_options(settings: ServeSettings) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "max_surge_percent": settings.surge_percent,
    }
