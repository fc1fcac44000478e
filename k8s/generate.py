"""Writes what the manifests repeat from elsewhere; run it after a change to one of the sources.

    python k8s/generate.py            writes
    python k8s/generate.py --check    writes nothing; exits 1 where a file is not up to date

Sources: each overlay's serve.yaml, which is a config file of `marsray serve` (its Serve config is
made from it), dashboard.py (Grafana's JSON) and sizing.py (the table in README.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from dashboard import dashboard
from sizing import table

from mars_platform.config import build_settings, read_yaml
from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings

ROOT = Path(__file__).parent
_BEGIN, _END = "<!-- sizing: generated -->\n", "<!-- sizing: end -->\n"
_HEAD = "# Generated from serve.yaml by k8s/generate.py; change that file instead.\n"


def serve_config(source: Path) -> dict[str, Any]:
    """Ray Serve's configuration for a config file of ``marsray serve``.

    Raises:
        UserError: the file is not valid, or gives what a cluster of KubeRay's decides.
    """
    args = read_yaml(source)
    without_effect = {"host", "port", "cluster"} & set(args)
    if without_effect:
        raise UserError(f"{source}: {', '.join(sorted(without_effect))}: no effect here; leave out")
    build_settings({"host": "0.0.0.0", **args}, ServeSettings, source=str(source))  # noqa: S104
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},  # noqa: S104 - of a pod
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "marsray",
                "route_prefix": "/",
                "import_path": "mars_serve.app:application",
                "args": args,
                "deployments": [
                    {
                        "name": "ingress",
                        # Without a CPU of its own it might be put on the head, which takes no
                        # requests. All on a node would fail together; an update, though, starts a
                        # new one before it ends an old one, for which there may be no other node.
                        "ray_actor_options": {"num_cpus": 1},
                        "max_replicas_per_node": 2,
                    }
                ],
            }
        ],
    }


def generated() -> Iterator[tuple[Path, str]]:
    """Every file that is written, with its content."""
    for source in sorted(ROOT.glob("overlays/*/serve.yaml")):
        yield source.with_name("serve-config.yaml"), _patch(serve_config(source))
    yield ROOT / "components" / "monitoring" / "dashboard.json", dashboard()
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    yield readme, f"{before}{_BEGIN}{table()}{_END}{after}"


def _patch(config: dict[str, Any]) -> str:
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return (
        f"{_HEAD}apiVersion: ray.io/v1\nkind: RayService\nmetadata:\n  name: marsray\n"
        f"spec:\n  serveConfigV2: |\n{indented}"
    )


def main(arguments: list[str]) -> int:
    """Write, or check; returns the exit status."""
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
