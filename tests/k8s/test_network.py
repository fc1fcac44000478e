"""Connections that the network policies allow, evaluated as a network plugin does."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import pytest

from kustomized import needs_kubectl

pytestmark = needs_kubectl

Policy = dict[str, Any]
NAMESPACE = "kubernetes.io/metadata.name"


class End(NamedTuple):
    """One end of a connection: a pod in a namespace, or an address outside (no namespace)."""

    labels: dict[str, str]
    namespace: str | None = "marsray"
    address: str = ""


SERVING = {
    "app.kubernetes.io/part-of": "marsray",
    "app.kubernetes.io/component": "serving",
}
JOB = {"app.kubernetes.io/part-of": "marsray", "app.kubernetes.io/component": "job"}
HEAD = End({**SERVING, "ray.io/node-type": "head"})
WORKER = End({**SERVING, "ray.io/node-type": "worker"})
CLEANUP = End({**SERVING, "ray.io/node-type": "redis-cleanup"})
JOB_HEAD = End({**JOB, "ray.io/node-type": "head"})
SUBMITTER = End(JOB)
REDIS = End({"app.kubernetes.io/part-of": "marsray", "app.kubernetes.io/component": "redis"})
FILES = End({"app.kubernetes.io/part-of": "marsray", "app.kubernetes.io/component": "files"})
TLS = End({"gateway.networking.k8s.io/gateway-name": "marsray"})
GATEWAY = End({"gateway.networking.k8s.io/gateway-name": "marsray-gateway"})
ISTIO = End({}, "istio-system")
NAMES = {"chart": "kuberay-operator", "kustomization": "kuberay"}
"""The operator's own name by the way in which it was installed."""
OPERATORS = [
    End(
        {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "kuberay-operator"},
        "kuberay-system",
    )
    for name in NAMES.values()
]
PROMETHEUS = End({}, "monitoring")
STRANGER = End({}, "default")
DNS = End({"k8s-app": "kube-dns"}, "kube-system")
INTERNET = End({}, None, "93.184.216.34")
METADATA = End({}, None, "169.254.169.254")
NODE_DNS = End({}, None, "169.254.20.10")
POD_IDENTITY = End({}, None, "169.254.170.23")
PRIVATE = End({}, None, "10.0.0.7")


def reaches(policies: list[Policy], source: End, target: End, port: int) -> bool:
    """Whether the policies of both ends allow a connection; an end without policies allows all."""
    leaves = source.namespace != "marsray" or allows(policies, source, target, port, "egress")
    enters = target.namespace != "marsray" or allows(policies, target, source, port, "ingress")
    return leaves and enters


def allows(policies: list[Policy], own: End, other: End, port: int, way: str) -> bool:
    specs = [each["spec"] for each in policies if way.capitalize() in each["spec"]["policyTypes"]]
    chosen = [spec for spec in specs if selects(spec["podSelector"], own.labels)]
    peers = {"egress": "to", "ingress": "from"}[way]
    return not chosen or any(
        (peers not in rule or any(matches(peer, other) for peer in rule[peers]))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for spec in chosen
        for rule in spec.get(way, [])
    )


def matches(peer: Policy, other: End) -> bool:
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], other.address
        is_cut = within(address, block.get("except", []))
        return within(address, [block["cidr"]]) and not is_cut
    namespace = peer.get("namespaceSelector", {"matchLabels": {NAMESPACE: "marsray"}})
    return other.namespace is not None and (
        selects(namespace, {NAMESPACE: other.namespace})
        and selects(peer.get("podSelector", {}), other.labels)
    )


def within(address: str, blocks: list[str]) -> bool:
    return bool(address) and any(ip_address(address) in ip_network(each) for each in blocks)


def selects(selector: Policy, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


OPEN_IN_GPU = [
    (TLS, WORKER, 8000),
    *(
        (operator, head, port)
        for operator in OPERATORS
        for head, port in ((HEAD, 8265), (HEAD, 8000), (JOB_HEAD, 8265))
    ),
    (WORKER, HEAD, 6379),
    (HEAD, WORKER, 30000),
    (WORKER, WORKER, 30001),
    (SUBMITTER, JOB_HEAD, 8265),
    *((HEAD, INTERNET, port) for port in (443, 6443, 8443)),  # the Kubernetes API at any address
    *((end, dns, 53) for end in (HEAD, WORKER, JOB_HEAD, SUBMITTER) for dns in (DNS, NODE_DNS)),
]
OPEN_IN_BOTH = [
    *((end, TLS, port) for end in (INTERNET, STRANGER) for port in (443, 80)),
    (TLS, ISTIO, 15012),
    (TLS, DNS, 53),
]
CLOSED_IN_BOTH = [
    (TLS, HEAD, 8000),
    *((TLS, WORKER, port) for port in (6379, 8080, 8265, 8404, 9101, 30000)),
    *((TLS, end, 443) for end in (INTERNET, METADATA, PRIVATE, ISTIO)),
    (INTERNET, TLS, 15021),
    *((end, WORKER, 8000) for end in (INTERNET, ISTIO, FILES, JOB_HEAD)),
    *((STRANGER, end, port) for end in (HEAD, WORKER, JOB_HEAD) for port in (6379, 8000, 8265)),
    (OPERATORS[0], WORKER, 8265),
    (STRANGER, HEAD, 10001),
    (JOB_HEAD, HEAD, 8265),
    (SUBMITTER, WORKER, 8000),
    (FILES, HEAD, 8265),
    (WORKER, INTERNET, 443),
    (JOB_HEAD, INTERNET, 443),
    (FILES, INTERNET, 443),
    (WORKER, INTERNET, 53),
    (WORKER, NODE_DNS, 443),
    (HEAD, METADATA, 443),
    (WORKER, STRANGER, 443),
]
OPEN_IN_HA = [
    (HEAD, REDIS, 6379),
    (CLEANUP, REDIS, 6379),
    (TLS, GATEWAY, 80),
    (GATEWAY, WORKER, 8000),
    (GATEWAY, ISTIO, 15012),
    (PROMETHEUS, WORKER, 8080),
    (PROMETHEUS, HEAD, 8000),
]
CLOSED_IN_HA = [
    (WORKER, REDIS, 6379),
    (JOB_HEAD, REDIS, 6379),
    (STRANGER, REDIS, 6379),
    (REDIS, INTERNET, 443),
    (REDIS, HEAD, 6379),
    *((end, GATEWAY, 80) for end in (STRANGER, INTERNET)),
    (GATEWAY, HEAD, 8265),
    (TLS, WORKER, 8000),  # all requests come through KubeRay's gateway
    (PROMETHEUS, WORKER, 8000),
    (PROMETHEUS, HEAD, 8265),
]
JOBS_STORE, SERVICE_STORE = "setup/object-store", "../tests/k8s/object-store"
CONNECTIONS = [
    *(("overlays/gpu", *ends, True) for ends in OPEN_IN_GPU),
    *(
        (overlay, *ends, is_open)
        for overlay in ("overlays/gpu", "overlays/ha")
        for is_open, connections in ((True, OPEN_IN_BOTH), (False, CLOSED_IN_BOTH))
        for ends in connections
    ),
    *(("overlays/ha", *ends, True) for ends in OPEN_IN_HA),
    *(("overlays/ha", *ends, False) for ends in CLOSED_IN_HA),
    *((JOBS_STORE, end, INTERNET, 443, True) for end in (JOB_HEAD, FILES)),
    *((JOBS_STORE, end, POD_IDENTITY, 80, True) for end in (JOB_HEAD, FILES)),
    (JOBS_STORE, JOB_HEAD, INTERNET, 80, False),
    (JOBS_STORE, JOB_HEAD, PRIVATE, 443, False),
    *((JOBS_STORE, JOB_HEAD, METADATA, port, False) for port in (80, 443)),
    (JOBS_STORE, WORKER, INTERNET, 443, False),
    (SERVICE_STORE, WORKER, INTERNET, 443, True),
    (SERVICE_STORE, WORKER, POD_IDENTITY, 80, True),
    *((SERVICE_STORE, WORKER, METADATA, port, False) for port in (80, 443)),
    (SERVICE_STORE, HEAD, POD_IDENTITY, 80, False),
    (SERVICE_STORE, JOB_HEAD, INTERNET, 443, False),
]


@pytest.mark.parametrize(("manifests", "source", "target", "port", "is_open"), CONNECTIONS)
def test_a_connection_is_open_only_if_the_manifests_need_it(
    render, manifests, source, target, port, is_open
):
    shared, own = (render(name).of_kind("NetworkPolicy") for name in ("setup/common", manifests))
    assert reaches([*shared, *own], source, target, port) is is_open


def test_every_pod_has_labels_that_the_policies_select(manifests):
    known = [SERVING, JOB, REDIS.labels, FILES.labels]
    for pod in manifests.pods():
        assert pod.labels in known, pod.where
