"""The gateway where TLS ends: its routes, and that nobody else gets in by them."""

from __future__ import annotations

import re

import pytest
import yaml

from kustomized import K8S, Document, Rendered, needs_kubectl, rendered

pytestmark = needs_kubectl

WITH_TLS = ["overlays/gpu", "overlays/ha"]


@pytest.fixture(params=WITH_TLS)
def with_tls(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


def gateway_and_routes(manifests: Rendered) -> tuple[Document, dict[str, Document]]:
    (gateway,) = manifests.of_kind("Gateway")
    routes = {each["metadata"]["name"]: each["spec"] for each in manifests.of_kind("HTTPRoute")}
    return gateway["spec"], routes


def test_nothing_needs_the_retired_ingress(manifests):
    assert not manifests.of_kind("Ingress")
    assert "nginx" not in yaml.safe_dump_all(manifests.documents)
    assert manifests.name in WITH_TLS or not manifests.of_kind("Gateway")


def test_requests_come_through_tls_alone(with_tls):
    gateway, routes = gateway_and_routes(with_tls)
    listeners = {each["name"]: each for each in gateway["listeners"]}
    assert {name: each["protocol"] for name, each in listeners.items()} == {
        "https": "HTTPS",
        "http": "HTTP",
    }
    assert listeners["https"]["tls"]["certificateRefs"][0]["name"] == "marsray-tls"
    assert "tls" not in listeners["http"]
    assert routes["marsray"]["parentRefs"] == [{"name": "marsray", "sectionName": "https"}]
    plain = routes["marsray-redirect"]
    assert plain["parentRefs"] == [{"name": "marsray", "sectionName": "http"}]
    assert [set(rule) for rule in plain["rules"]] == [{"filters"}], "it answers by itself"


def test_the_host_is_the_same_everywhere_and_no_wildcard(with_tls):
    gateway, routes = gateway_and_routes(with_tls)
    hosts = {each["hostname"] for each in gateway["listeners"]}
    hosts |= {host for route in routes.values() for host in route["hostnames"]}
    assert hosts == {"marsray.example.com"}, "the guide tells users to replace it"


def test_only_public_paths_are_routed(with_tls):
    _, routes = gateway_and_routes(with_tls)
    (rule,) = routes["marsray"]["rules"]
    paths = {each["path"]["value"]: each["path"]["type"] for each in rule["matches"]}
    assert paths.pop("/v1") == "PathPrefix"
    assert set(paths.values()) == {"Exact"}
    assert not {"/", "/metrics", "/admin"} & set(paths)
    is_ha = with_tls.name == "overlays/ha"
    service, port = ("marsray-gateway-istio", 80) if is_ha else ("marsray-serve-svc", 8000)
    assert rule["backendRefs"] == [{"name": service, "port": port}]


def test_a_stream_may_last_as_long_as_a_wait_and_the_longest_generation(with_tls):
    _, routes = gateway_and_routes(with_tls)
    (rule,) = routes["marsray"]["rules"]
    (seconds,) = re.fullmatch(r"(\d+)s", rule["timeouts"]["request"]).groups()
    settings = yaml.safe_load((K8S / with_tls.name / "serve.yaml").read_text(encoding="utf-8"))
    longest = settings["drain_s"] + settings["limits"]["queue_wait_s"]
    assert longest <= int(seconds) <= 2 * longest


def test_only_the_gateway_that_ends_tls_gets_a_load_balancer(with_tls, guide):
    (gateway,) = with_tls.of_kind("Gateway")
    named = gateway["spec"]["infrastructure"]["parametersRef"]["name"]
    (pods,) = (each for each in with_tls.of_kind("ConfigMap") if each["metadata"]["name"] == named)
    parts = {name: yaml.safe_load(text)["spec"] for name, text in pods["data"].items()}
    assert parts["service"] == {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    assert parts["horizontalPodAutoscaler"]["minReplicas"] > 1
    assert parts["podDisruptionBudget"] == {"minAvailable": 1}
    assert "gatewayClasses.istio.service.spec.type=ClusterIP" in guide
    assert gateway["spec"]["gatewayClassName"] == "istio"


@pytest.mark.parametrize("overlay", WITH_TLS)
def test_the_gateways_address_may_have_every_connection(overlay):
    variable = {"name": "MARSRAY_PROXY_CONNECTIONS_PER_ADDRESS", "value": "0"}
    ray = [each for _, each in rendered(overlay).containers() if each["name"].startswith("ray-")]
    assert len(ray) == 2
    assert all(variable in each["env"] for each in ray)
