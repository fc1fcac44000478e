"""Starts Ray Serve and the application on a cluster, side by side as far as they allow it."""

import time
from concurrent.futures import Future
from functools import partial
from threading import Thread

from ray import serve
from ray.exceptions import RayError
from rich.console import Console

from mars_platform.cli.progress import working
from mars_platform.cli.report import say
from mars_platform.cluster.processes import attempt
from mars_platform.cluster.ray_private import poll_serve_often
from mars_platform.cluster.session import quieten_ray
from mars_platform.errors import UserError, one_line
from mars_serve.config.served import find_thinking
from mars_serve.config.settings import ServeSettings
from mars_serve.control.governor_actor import end_governor, find_or_start_governor
from mars_serve.deploy.app import build_application
from mars_serve.deploy.stages import Stages

_APPLICATION = "marsray"
_PROXY_S = 60.0
"""Longest wait in seconds for a proxy of Ray Serve, in each of several attempts."""
_POLL_S = 0.2


def deploy(settings: ServeSettings, console: Console, stages: Stages) -> None:
    """Start the proxies and the models, and return when requests reach them.

    Raises:
        UserError: no proxy becomes ready, or the models do not start.
    """
    quieten_ray()
    poll_serve_often(_POLL_S)
    proxies = _start_aside(settings, console)
    _await_controller(proxies)
    stages.end("Serve")
    with working("starting the models", console):
        try:
            serve.run(build_application(settings), name=_APPLICATION, route_prefix="/")
        except TimeoutError:  # the models run, and the proxies do not know of them yet
            _start_proxies(settings, console)
        except (RuntimeError, RayError) as error:
            _refuse_unreadable(settings)
            raise UserError(f"models: they did not start ({one_line(error)})") from error
    proxies.result()
    stages.end("models")
    say(console, _start_line(settings, stages))


def _start_line(settings: ServeSettings, stages: Stages) -> str:
    names = ", ".join(model.name for model in settings.models)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{settings.port}"
    playground = f", playground at {address}/" if settings.pages else ""
    return f"serving {names} on {address}, ready after {stages.summary()}{playground}"


def end() -> None:
    """End the application; others on a shared cluster keep running."""
    serve.delete(_APPLICATION)
    end_governor(_APPLICATION)


def _start_aside(settings: ServeSettings, console: Console) -> Future[None]:
    """Start proxies and governor in a thread, for which an interrupt does not wait."""
    started = Future[None]()

    def start() -> None:
        try:
            _start_proxies(settings, console)
            find_or_start_governor(_APPLICATION)  # or replicas would wait for it at their end
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)

    Thread(target=start, daemon=True).start()
    return started


def _await_controller(proxies: Future[None]) -> None:
    """Wait until Ray Serve's controller has begun to start proxies.

    Raises:
        UserError: no proxy becomes ready.
    """
    while not proxies.done() and not serve.status().proxies:
        time.sleep(_POLL_S)
    if proxies.done():
        proxies.result()


def _start_proxies(settings: ServeSettings, console: Console) -> None:
    """Start Ray Serve where it does not run, and wait until a proxy takes requests.

    Serve ends a proxy that is not ready in time and starts another; the first call then fails.

    Raises:
        UserError: no proxy becomes ready.
    """

    def start() -> None:
        serve.start(
            http_options={"host": settings.host, "port": settings.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        _await_proxy()  # where Serve runs already, the call above does not wait

    attempt(
        start,
        name="Ray Serve's proxy",
        remedy="end other programs on this machine, or look into the logs of Ray Serve",
        tell=partial(say, console),
        errors=(RayError, TimeoutError),
    )


def _await_proxy() -> None:
    end_s = time.monotonic() + _PROXY_S
    while (proxies := serve.status().proxies) and "HEALTHY" not in proxies.values():
        if time.monotonic() > end_s:
            raise TimeoutError(f"it was not ready within {_PROXY_S:g} s")
        time.sleep(_POLL_S)


def _refuse_unreadable(settings: ServeSettings) -> None:
    """Refuse a checkpoint that cannot be read, by the reason that a replica or the ingress failed.

    Raises:
        UserError: a model cannot be read, or its reasoning parser does not fit it.
    """
    from mars_platform.checkpoint.adapted import read_model  # takes seconds

    for model in settings.models:
        find_thinking(model, read_model(model.path, model.adapter))
