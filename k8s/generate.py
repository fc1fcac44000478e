"""Generates files of the manifests from their sources; run it after a source has changed.

    python k8s/generate.py            writes the files and prints the changed ones
    python k8s/generate.py --check    writes nothing; exits 1 if a file is out of date

Sources are each overlay's serve.yaml, a config file of `marsray serve` from which the overlay's Ray
Serve config is made, and dashboard.py for Grafana's JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from dashboard import dashboard

from mars_platform.config import build_settings, read_yaml
from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy.app import deployment_name

ROOT = Path(__file__).parent
_HEAD = "# Generated from serve.yaml by k8s/generate.py; change that file instead.\n"


def serve_config(source: Path) -> dict[str, Any]:
    """Return Ray Serve's configuration for a config file of ``marsray serve``.

    Raises:
        UserError: the file is invalid, or sets something that is up to KubeRay's cluster.
    """
    args = read_yaml(source)
    without_effect = {"host", "port", "cluster"} & set(args)
    if without_effect:
        raise UserError(f"{source}: {', '.join(sorted(without_effect))}: no effect here; leave out")
    given = {"host": "0.0.0.0", **args}  # noqa: S104 - a pod's address
    models = build_settings(given, ServeSettings, source=str(source)).models
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},  # noqa: S104 - a pod's address
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "marsray",
                "route_prefix": "/",
                "import_path": "mars_serve.app:application",
                "args": args,
                "deployments": [
                    # A worker holds one replica, and always has room for an ingress from a worker
                    # that drains. Where there are GPUs, their number sees to it.
                    *(
                        {"name": deployment_name(models, index), "max_replicas_per_node": 1}
                        for index, model in enumerate(models)
                        if not model.num_gpus
                    ),
                    {
                        "name": "ingress",
                        # Without a CPU it could run on the head, which takes no requests. One node
                        # gets at most two: they would fail together, but an update may have to run
                        # a new one beside an old one for a while.
                        "ray_actor_options": {"num_cpus": 1},
                        "max_replicas_per_node": 2,
                    },
                ],
            }
        ],
    }


def generated() -> Iterator[tuple[Path, str]]:
    """Yield the path and content of every generated file."""
    for source in sorted(ROOT.glob("overlays/*/serve.yaml")):
        yield source.with_name("serve-config.yaml"), _patch(serve_config(source))
    yield ROOT / "components" / "monitoring" / "dashboard.json", dashboard()


def _patch(config: dict[str, Any]) -> str:
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return (
        f"{_HEAD}apiVersion: ray.io/v1\nkind: RayService\nmetadata:\n  name: marsray\n"
        f"spec:\n  serveConfigV2: |\n{indented}"
    )


def main(arguments: list[str]) -> int:
    """Write or check the files and return the exit status."""
    old = [
        (path, content)
        for path, content in generated()
        if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    for path, content in old:
        if "--check" not in arguments:
            path.write_text(content, encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT.parent)}\n")
    return int(bool(old) and "--check" in arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"generate: {error}")
