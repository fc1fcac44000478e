"""Every use of Ray that its public API does not cover, to be checked whenever Ray is upgraded.

All of it was seen in Ray 2.60. Each function says what it relies on and why the public API does not
do. Two more things rely on Ray's internals and cannot stand here: `mars_serve.deploy.haproxy` edits
the configuration that Ray Serve writes for HAProxy, as a program that can import no package, and
the manifests in ``k8s`` set the variables of `haproxy_variables` in YAML.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_platform.cluster.processes import lasting_ports

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.handle import DeploymentHandle
    from ray.train.torch import TorchTrainer

_CENTRAL_PROCESSES = ("gcs_server", "raylet")
_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_LATER = ("/bin/sh", "-c", 'sleep 10; exec "$@"', "sh")
"""Beginning of a command that is to run behind a start's busy seconds."""
_START_S, _START_LOOP_S = 30.0, 0.05
"""Seconds that most starts take, and seconds between two looks of Serve's controller during one."""


def job_variables(stop_wait_s: int) -> dict[str, str]:
    """Return environment variables of a job that no argument of ``submit_job`` covers.

    A job that is stopped gets SIGKILL ``stop_wait_s`` seconds after SIGTERM; Ray's default of 3
    ends it in the middle of a checkpoint.
    """
    return {
        "RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s),
        "RAY_LOG_TO_DRIVER": "0",  # workers' logs would bury the job's own output
    }


@contextmanager
def clusters_on_loopback() -> Iterator[None]:
    """Start clusters within the block on the loopback interface, exporters of metrics included.

    Ray's processes otherwise listen on all interfaces, and its exporters ask for no token. Relies
    on the constant that makes Ray do so on macOS and Windows: ``ray.init`` and ``ray start``
    replace a loopback address that they are given by one that other machines reach.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def clusters_without_helpers() -> Iterator[None]:
    """Start clusters within the block without three processes, each up to a CPU second.

    The monitor would add nodes, which a cluster of one machine never does; the log monitor would
    send the workers' logs to this process, which does not ask for them; the API server, for which
    the start waits, does nothing where the dashboard is off. Nor does the raylet wait until its
    agents, whose modules take seconds to read, have chosen their ports. One of these would be that
    of any other cluster on this machine, too. The agent that exports metrics, which takes a further
    CPU second, begins 10 s later. Relies on the methods of ``Node`` that start the three, on its
    parameters, on the files for ports, and on the function that builds the agents' commands:
    ``ray.init`` has no option for any.
    """
    from ray._private import ray_constants, services
    from ray._private.node import Node
    from ray._raylet import persist_port  # type: ignore[attr-defined]  # its stub lacks it

    def start_no_api_server(node: Node, **_options: object) -> None:
        # a node's agent would ask for the address once a second, and log each time
        key, space = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
        node.get_gcs_client().internal_kv_put(key.encode(), b"127.0.0.1:0", True, space)
        for name, port in zip(_AGENT_PORTS, lasting_ports(len(_AGENT_PORTS)), strict=True):
            setattr(node._ray_params, name, port)
            persist_port(node._session_dir, node._node_id, name, port)

    def command_of(component: str, *others: Any) -> list[str]:
        is_late = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [*(_LATER if is_late else ()), *build(component, *others)]

    before = Node.start_monitor, Node.start_log_monitor, Node.start_api_server
    build = services._build_python_executable_command_memory_profileable
    services._build_python_executable_command_memory_profileable = command_of
    Node.start_monitor = Node.start_log_monitor = lambda _node: None
    Node.start_api_server = start_no_api_server
    try:
        yield
    finally:
        Node.start_monitor, Node.start_log_monitor, Node.start_api_server = before
        services._build_python_executable_command_memory_profileable = build


def poll_serve_often(period_s: float) -> None:
    """Make ``serve.run`` in this process look for a running application at this period.

    Relies on a constant of Serve's client, 1 s otherwise.
    """
    from ray.serve._private import client

    client.CLIENT_POLLING_INTERVAL_S = period_s


def hurry_controller() -> None:
    """Let Serve's controller, which calls this at its start, look often at what it starts.

    Each of a start's steps otherwise waits for the next of its looks. Relies on a constant that its
    loop reads each time.
    """
    from ray.serve._private import controller

    usual = controller.CONTROL_LOOP_INTERVAL_S
    controller.CONTROL_LOOP_INTERVAL_S = _START_LOOP_S
    loop = asyncio.get_running_loop()
    loop.call_later(_START_S, setattr, controller, "CONTROL_LOOP_INTERVAL_S", usual)


def local_cluster_has_failed() -> bool:
    """Return whether this process started a cluster whose central processes have ended since.

    Relies on ``Node.dead_processes``. Without its raylet, Ray neither ends nor returns from a call.
    """
    from ray._private import worker

    node = worker._global_node
    return node is not None and any(name in _CENTRAL_PROCESSES for name, _ in node.dead_processes())


def worker_start_variables(num_at_once: int) -> dict[str, str]:
    """Return the variable that lets a node start this many worker processes at the same time.

    Relies on an internal setting of the raylet. Its default is the number of CPUs, so that a
    machine with few cores starts Serve's actors one after the other.
    """
    return {"RAY_worker_maximum_startup_concurrency": str(num_at_once)}


def busy_node_variables() -> dict[str, str]:
    """Return the environment in which a node starts and works on a machine with other work.

    Relies on internal settings. ``ray.init`` waits 30 s for a node's processes, and all workers get
    the niceness 15, so that two busy programs leave a server or a training a tenth of their speed.
    A node reports its resources ten times a second, which takes 1% of a core. It would start
    workers as soon as a first job connects, and the job would wait for them. A raylet that asks its
    object store a moment too early waits a second until it asks again. A node's processes wait a
    minute for a head that has ended, as one does whose whole process group gets a signal.
    """
    return {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "RAY_gcs_server_port_wait_time_s": "120",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_client_connect_timeout_milliseconds": "50",
        "RAY_raylet_client_num_connect_attempts": "200",
        "RAY_worker_niceness": "0",
        "RAY_raylet_report_resources_period_milliseconds": "1000",
    }


def _serve_variables(guard: str) -> dict[str, str]:
    """Return the part of Serve's environment that does not depend on the kind of proxy.

    RAY_SERVE_THROUGHPUT_OPTIMIZED is documented, the other variables are internal settings.
    ``guard`` is the import path of a function that Serve calls wherever it starts an HTTP server.
    It returns middleware that runs before Serve reads a request.
    """
    return {
        # the option ``middlewares`` of ``serve.start`` was removed
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": guard,
        # By default Serve ends a proxy that is not ready in 5 s, and a proxy gives its HAProxy
        # 30 s; ``serve.start`` itself waits for 60 s, which no setting changes.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "55",
        # By default unhealthy replicas are drained, for as long as ``drain_s`` allows, and a
        # replica that hangs never drains.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # With .1 s, the default, an idle controller takes 4% of a core. All threads of an engine's
        # step wait for the one that it interrupts.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": f"{__name__}:hurry_controller",
        "RAY_preload_python_modules": "mars_platform.cluster.worker_start",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    }


def python_proxy_variables(*, guard: str) -> dict[str, str]:
    """Return the environment of a cluster whose requests come in through Serve's Python proxies.

    RAY_SERVE_ENABLE_DIRECT_INGRESS, which is internal, turns off what
    RAY_SERVE_THROUGHPUT_OPTIMIZED turns on. ``guard`` is explained at `_serve_variables`.
    """
    return {**_serve_variables(guard), "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


def haproxy_variables(
    launcher: Path,
    *,
    guard: str,
    hard_stop_s: int,
    num_threads: int,
    min_draining_s: float,
    fallback_port: int,
) -> dict[str, str]:
    """Return the environment of a cluster whose requests come in through HAProxy.

    RAY_SERVE_ENABLE_HA_PROXY is documented, the other variables here are internal: Serve's public
    options have neither the place of HAProxy's files nor its timeouts.

    Args:
        launcher: program that Serve starts as HAProxy; HAProxy's files are put beside it.
        guard: explained at `_serve_variables`.
        hard_stop_s: seconds that a HAProxy process replaced by a reload may finish its streams in.
        num_threads: threads of a HAProxy process.
        min_draining_s: seconds that an ingress replica told to stop still accepts requests.
        fallback_port: port of the Python proxy that HAProxy falls back to; two servers on one
            machine need different ones.
    """
    directory = launcher.parent
    return {
        **_serve_variables(guard),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(num_threads),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(min_draining_s),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
    }


def names_of_replicas(handle: DeploymentHandle) -> frozenset[str]:
    """Return the names of the replicas that a handle knows to run; none before its first use.

    Relies on the handle's router. The public API calls replicas but does not name them, and calling
    all of them several times a second takes far more time.
    """
    router: Any = handle._router
    chooser = router._asyncio_router.request_router if router is not None else None
    replicas = chooser.curr_replicas if chooser is not None else ()
    return frozenset(each.unique_id for each in replicas)


async def answers_of_replicas(handle: DeploymentHandle, method: str, timeout_s: float) -> list[Any]:
    """Call a method of every replica, and return the answers that come in time and are no errors.

    Relies on ``DeploymentBroadcastResponse._fetch_replica_results_async``: the public
    ``results_async`` returns nothing if one replica is silent.
    """
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        asked = await handle.broadcast(method)._fetch_replica_results_async()
    except DeploymentUnavailableError:
        return []
    answers = [asyncio.ensure_future(each.get_async()) for each in asked]
    if not answers:
        return []
    await asyncio.wait(answers, timeout=timeout_s)
    for late in answers:
        late.cancel()
    results = await asyncio.gather(*answers, return_exceptions=True)
    return [result for result in results if not isinstance(result, BaseException)]


def autoscaled(
    num_desired: float,
    num_current: int,
    config: AutoscalingConfig,
    state: dict[str, Any],
    now_s: float,
) -> tuple[int, dict[str, Any]]:
    """Apply Ray Serve's scaling factors and delays to a number of replicas, as its controller does.

    Relies on two internal functions of ``ray.serve.autoscaling_policy``: the public API runs them
    only inside Serve's controller, on real replicas and the wall clock.

    Args:
        num_desired: replicas that the load calls for.
        num_current: replicas that were last asked for.
        config: factors and delays.
        state: state returned by the previous call; empty at first.
        now_s: time of the decision, in seconds.

    Returns:
        The number of replicas to ask for, at least 1, and the new state.
    """
    from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors

    scaled = max(_apply_scaling_factors(num_desired, num_current, config), 1)
    decided: tuple[int, dict[str, Any]] = _apply_delay_logic(
        scaled, num_current, config, state, now_s
    )
    return decided


@contextmanager
def signal_handler_kept(number: signal.Signals) -> Iterator[None]:
    """Restore the handler of a signal after the block, unless it was the system's default.

    ``ray.init`` replaces the handler of SIGTERM by one that prints a stack and exits with status
    15, and has no option against that.
    """
    before = signal.getsignal(number)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
        if is_main and before is not signal.SIG_DFL:
            signal.signal(number, before)


def with_own_interrupts(trainer: TorchTrainer) -> TorchTrainer:
    """Let ``trainer.fit()`` keep the handler of SIGINT, and return the trainer.

    Ray Train replaces it by one that aborts the workers and exits without a word, with no option
    against that. Relies on the method that installs it.
    """
    trainer._register_sigint_handler = lambda _controller: None
    return trainer


def without_data_sets(trainer: TorchTrainer) -> TorchTrainer:
    """Let ``trainer.fit()`` start no actor for data sets, and return the trainer, which has none.

    The actor takes two CPU seconds to start, in each stage, and 200 MB. Relies on the method that
    makes the callbacks.
    """
    from ray.train.v2._internal.callbacks import DatasetsCallback

    usual = trainer._create_default_callbacks
    trainer._create_default_callbacks = lambda: [
        each for each in usual() if not isinstance(each, DatasetsCallback)
    ]
    return trainer
