"""Who reaches whom, decided from the policies as a network plugin decides it."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

import pytest

Policy = dict[str, Any]


class End(NamedTuple):
    """Who sends or receives: a pod, in a namespace, or an address outside (no namespace)."""

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
GATEWAY = End({"gateway.networking.k8s.io/gateway-name": "marsray-gateway"})
OPERATOR = End({"app.kubernetes.io/name": "kuberay-operator"}, "kuberay-system")
INGRESS = End({}, "ingress-nginx")
PROMETHEUS = End({}, "monitoring")
STRANGER = End({}, "default")
DNS = End({"k8s-app": "kube-dns"}, "kube-system")
INTERNET = End({}, None, "93.184.216.34")
METADATA = End({}, None, "169.254.169.254")
NODE_DNS = End({}, None, "169.254.20.10")
POD_IDENTITY = End({}, None, "169.254.170.23")
PRIVATE = End({}, None, "10.0.0.7")


def reaches(policies: list[Policy], source: End, target: End, port: int) -> bool:
    """Whether both ends' policies allow it; an end without policies allows all."""
    leaves = source.namespace != "marsray" or allows(policies, source, target, port, "egress")
    enters = target.namespace != "marsray" or allows(policies, target, source, port, "ingress")
    return leaves and enters


def allows(policies: list[Policy], own: End, other: End, port: int, way: str) -> bool:
    specs = [each["spec"] for each in policies]
    chosen = [
        spec
        for spec in specs
        if way.capitalize() in spec["policyTypes"] and selects(spec["podSelector"], own.labels)
    ]
    peers = {"egress": "to", "ingress": "from"}[way]
    return not chosen or any(
        any(matches(peer, other) for peer in rule[peers])
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for spec in chosen
        for rule in spec.get(way, [])
    )


def matches(peer: Policy, other: End) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        return (
            other.namespace is None
            and ip_address(other.address) in ip_network(block["cidr"])
            and not any(
                ip_address(other.address) in ip_network(each) for each in block.get("except", [])
            )
        )
    namespace = peer.get("namespaceSelector")
    if namespace is None:
        return other.namespace == "marsray" and selects(peer["podSelector"], other.labels)
    return other.namespace is not None and (
        selects(namespace, {"kubernetes.io/metadata.name": other.namespace})
        and selects(peer.get("podSelector", {}), other.labels)
    )


def selects(selector: Policy, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


@pytest.fixture
def policies(render: Callable[[str], Any]) -> Callable[[str], list[Policy]]:
    def of(name: str) -> list[Policy]:
        shared = render("setup/common").of_kind("NetworkPolicy")
        return [*shared, *render(name).of_kind("NetworkPolicy")]

    return of


ALLOWED = [
    (INGRESS, WORKER, 8000),
    (OPERATOR, HEAD, 8265),
    (OPERATOR, HEAD, 8000),
    (OPERATOR, JOB_HEAD, 8265),
    (WORKER, HEAD, 6379),
    (HEAD, WORKER, 30000),
    (WORKER, WORKER, 30001),
    (SUBMITTER, JOB_HEAD, 8265),
    *((HEAD, INTERNET, port) for port in (443, 6443, 8443)),  # the Kubernetes API, wherever it is
    *((end, dns, 53) for end in (HEAD, WORKER, JOB_HEAD, SUBMITTER) for dns in (DNS, NODE_DNS)),
]
DENIED = [
    (INGRESS, HEAD, 8000),
    *((INGRESS, WORKER, port) for port in (6379, 8080, 8265, 8404, 9101, 30000)),
    *((STRANGER, end, port) for end in (HEAD, WORKER, JOB_HEAD) for port in (6379, 8000, 8265)),
    (OPERATOR, WORKER, 8265),
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


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_open(policies: Any, source: End, target: End, port: int) -> None:
    assert reaches(policies("overlays/gpu"), source, target, port)


@pytest.mark.parametrize("overlay", ["overlays/gpu", "overlays/ha"])
@pytest.mark.parametrize(("source", "target", "port"), DENIED)
def test_closed(policies: Any, overlay: str, source: End, target: End, port: int) -> None:
    assert not reaches(policies(overlay), source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port", "is_open"),
    [
        (HEAD, REDIS, 6379, True),
        (CLEANUP, REDIS, 6379, True),
        (WORKER, REDIS, 6379, False),
        (JOB_HEAD, REDIS, 6379, False),
        (STRANGER, REDIS, 6379, False),
        (REDIS, INTERNET, 443, False),
        (REDIS, HEAD, 6379, False),
        (INGRESS, GATEWAY, 80, True),
        (STRANGER, GATEWAY, 80, False),
        (GATEWAY, WORKER, 8000, True),
        (GATEWAY, HEAD, 8265, False),
        (INGRESS, WORKER, 8000, False),  # all of it through the gateway
        (GATEWAY, End({}, "istio-system"), 15012, True),
        (PROMETHEUS, WORKER, 8080, True),
        (PROMETHEUS, HEAD, 8000, True),
        (PROMETHEUS, WORKER, 8000, False),
        (PROMETHEUS, HEAD, 8265, False),
    ],
)
def test_ha(policies: Any, source: End, target: End, port: int, is_open: bool) -> None:
    assert reaches(policies("overlays/ha"), source, target, port) is is_open


@pytest.mark.parametrize(
    ("source", "target", "port", "is_open"),
    [
        *((end, INTERNET, 443, True) for end in (JOB_HEAD, FILES)),
        *((end, POD_IDENTITY, 80, True) for end in (JOB_HEAD, FILES)),
        (JOB_HEAD, INTERNET, 80, False),
        (JOB_HEAD, PRIVATE, 443, False),
        *((JOB_HEAD, METADATA, port, False) for port in (80, 443)),
        (WORKER, INTERNET, 443, False),
    ],
)
def test_an_object_store_for_jobs(
    policies: Any, source: End, target: End, port: int, is_open: bool
) -> None:
    assert reaches(policies("setup/object-store"), source, target, port) is is_open


@pytest.mark.parametrize(
    ("source", "target", "port", "is_open"),
    [
        (WORKER, INTERNET, 443, True),
        (WORKER, POD_IDENTITY, 80, True),
        *((WORKER, METADATA, port, False) for port in (80, 443)),
        (HEAD, POD_IDENTITY, 80, False),
        (JOB_HEAD, INTERNET, 443, False),
    ],
)
def test_an_object_store_for_the_service(
    policies: Any, source: End, target: End, port: int, is_open: bool
) -> None:
    assert reaches(policies("../tests/k8s/object-store"), source, target, port) is is_open


def test_the_pods_have_the_labels_that_the_policies_choose(manifests: Any) -> None:
    known = [SERVING, JOB, REDIS.labels, FILES.labels]
    for pod in manifests.pods():
        assert pod.labels in known, pod.where
