"""Names of Ray that are not public API stand in one file."""

import ast
import asyncio
import re
from pathlib import Path

from mars_platform.cluster import ray_private

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ["platform/mars_platform", "train/mars_train", "serve/mars_serve"]
PACKAGES += ["autoscale/mars_autoscale", "k8s/setup"]
HOME = Path(ray_private.__file__)
SOURCES = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file != HOME]
LAUNCHER = ROOT / "k8s" / "setup" / "common" / "scripts" / "haproxy_launcher.py"
PRIVATE = re.compile(r"\bray(\.\w+)*\.(_(?!_)\w+|v2\b)|\bRAY_(SERVE_\w+|[a-z]\w+)")


def names_in(file):
    """Dotted names that a file imports or uses, and its texts other than docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (prefix + each.name for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in docstrings else node.value


def private_names_in(file):
    return {found[0] for name in names_in(file) if (found := PRIVATE.search(name))}


def test_no_private_name_of_ray_stands_outside_its_file():
    found = {file: names for file in SOURCES if (names := private_names_in(file))}
    # this program clears a variable of Ray Serve's, on a node without a cluster
    assert found == {LAUNCHER: {"RAY_SERVE_HAPROXY_BINARY_PATH"}}


def test_the_helpers_of_a_node_are_back_after_the_block():
    from ray._private import services
    from ray._private.node import Node

    def helpers():
        agents = services._build_python_executable_command_memory_profileable
        return (Node.start_monitor, Node.start_log_monitor, Node.start_api_server, agents)

    before = helpers()
    with ray_private.clusters_without_helpers():
        assert not set(before) & set(helpers())
    assert helpers() == before


def test_the_period_of_serves_client_is_read_by_its_wait():
    from ray.serve._private import client

    source = Path(client.__file__).read_text(encoding="utf-8")
    assert "time.sleep(CLIENT_POLLING_INTERVAL_S)" in source


def test_the_controller_looks_often_at_first_and_then_as_usual(monkeypatch):
    from ray.serve._private import controller

    source = Path(controller.__file__).read_text(encoding="utf-8")
    assert "asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in source  # the loop reads it each time
    monkeypatch.setattr(controller, "CONTROL_LOOP_INTERVAL_S", 0.5)
    monkeypatch.setattr(ray_private, "_START_S", 0.0)

    async def start():
        ray_private.hurry_controller()
        hurried = controller.CONTROL_LOOP_INTERVAL_S
        await asyncio.sleep(0.01)
        return hurried

    assert asyncio.run(start()) < controller.CONTROL_LOOP_INTERVAL_S == 0.5
