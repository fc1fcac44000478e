"""The gateway where TLS ends: its fields, its routes, and that nobody else gets in by them."""

from __future__ import annotations

import copy
import re
from typing import Any

import jsonschema
import pytest
import yaml

from kustomized import K8S, Document, Rendered, needs_kubectl, rendered

pytestmark = needs_kubectl

WITH_TLS = ["overlays/gpu", "overlays/ha"]
HOST = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)+$", "maxLength": 253}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 63}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def object_of(required: str, /, **properties: Any) -> Document:
    """The schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def list_of(item: Document, most: int) -> Document:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


def reference(group: str, kind: str) -> Document:
    return object_of("kind name", group={"const": group}, kind={"const": kind}, name=NAME)


LISTENER = object_of(
    "name port protocol hostname allowedRoutes",
    name=NAME,
    port=PORT,
    protocol={"enum": ["HTTP", "HTTPS"]},
    hostname=HOST,
    tls=object_of(
        "mode certificateRefs",
        mode={"const": "Terminate"},
        certificateRefs=list_of(reference("", "Secret"), 64),
    ),
    allowedRoutes=object_of(
        "namespaces kinds",
        namespaces=object_of("from", **{"from": {"const": "Same"}}),
        kinds=list_of(
            object_of(
                "group kind",
                group={"const": "gateway.networking.k8s.io"},
                kind={"const": "HTTPRoute"},
            ),
            8,
        ),
    ),
)
RULE = object_of(
    "",
    matches=list_of(
        object_of(
            "path",
            path=object_of(
                "type value",
                type={"enum": ["Exact", "PathPrefix"]},
                value={"type": "string", "pattern": r"^/([\w.-]+/?)*$"},
            ),
        ),
        64,
    ),
    filters=list_of(
        object_of(
            "type requestRedirect",
            type={"const": "RequestRedirect"},
            requestRedirect=object_of(
                "scheme statusCode", scheme={"const": "https"}, statusCode={"enum": [301, 302]}
            ),
        ),
        16,
    ),
    timeouts=object_of("request", request=DURATION),
    backendRefs=list_of(object_of("name port", name=NAME, port=PORT), 16),
)
SPECS = {
    "Gateway": object_of(
        "gatewayClassName infrastructure listeners",
        gatewayClassName=NAME,
        infrastructure=object_of("parametersRef", parametersRef=reference("", "ConfigMap")),
        listeners=list_of(LISTENER, 64),
    ),
    "HTTPRoute": object_of(
        "parentRefs hostnames rules",
        parentRefs=list_of(object_of("name sectionName", name=NAME, sectionName=NAME), 32),
        hostnames=list_of(HOST, 16),
        rules=list_of(RULE, 16),
    ),
}
"""The fields of the Gateway API that are used, as its v1 defines them; all others are refused."""


@pytest.fixture(params=WITH_TLS)
def with_tls(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


def check(document: Document) -> None:
    assert document["apiVersion"] == "gateway.networking.k8s.io/v1"
    jsonschema.validate(document["spec"], SPECS[document["kind"]])


def gateway_and_routes(manifests: Rendered) -> tuple[Document, dict[str, Document]]:
    (gateway,) = manifests.of_kind("Gateway")
    routes = {each["metadata"]["name"]: each["spec"] for each in manifests.of_kind("HTTPRoute")}
    return gateway["spec"], routes


def test_gateway_and_routes_have_known_fields_only(with_tls):
    documents = [each for each in with_tls.documents if each["kind"] in SPECS]
    assert len(documents) == 3
    for document in documents:
        check(document)
        misspelt = copy.deepcopy(document)
        misspelt["spec"]["timeout"] = "1s"
        with pytest.raises(jsonschema.ValidationError):
            check(misspelt)


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
    assert hosts == {"marsray.example.com"}, "README.md tells users to replace it"


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


def test_only_the_gateway_that_ends_tls_gets_a_load_balancer(with_tls, readme):
    (gateway,) = with_tls.of_kind("Gateway")
    named = gateway["spec"]["infrastructure"]["parametersRef"]["name"]
    (pods,) = (each for each in with_tls.of_kind("ConfigMap") if each["metadata"]["name"] == named)
    parts = {name: yaml.safe_load(text)["spec"] for name, text in pods["data"].items()}
    assert parts["service"] == {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    assert parts["horizontalPodAutoscaler"]["minReplicas"] > 1
    assert parts["podDisruptionBudget"] == {"minAvailable": 1}
    assert "gatewayClasses.istio.service.spec.type=ClusterIP" in readme
    assert gateway["spec"]["gatewayClassName"] == "istio"


@pytest.mark.parametrize("overlay", WITH_TLS)
def test_the_gateways_address_may_have_every_connection(overlay):
    variable = {"name": "MARSRAY_PROXY_CONNECTIONS_PER_ADDRESS", "value": "0"}
    ray = [each for _, each in rendered(overlay).containers() if each["name"].startswith("ray-")]
    assert len(ray) == 2
    assert all(variable in each["env"] for each in ray)
