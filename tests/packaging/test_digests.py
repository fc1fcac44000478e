"""Images are pinned by digest, and the script that pins them writes what the registry says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "k8s" / "image" / "digests.py"
UNKNOWN = {"rayproject/ray:2.60.0-py311-cpu", "rayproject/ray:2.60.0-py311-gpu"}
"""Images whose digests could not be looked up; .github/workflows/release.yml refuses to go on."""
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


def run(script, *arguments, path=os.environ["PATH"]):
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_image_but_the_known_ones_is_pinned():
    status, output = run(SCRIPT, "--check")
    missing = set(re.findall(r": (\S+) has no digest", output))
    assert missing <= UNKNOWN
    assert status == bool(missing)


def test_a_release_is_refused_while_a_digest_is_missing():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "run: python3 k8s/image/digests.py --check" in text.partition("\n  ci:")[0]


@pytest.fixture
def checkout(tmp_path):
    """A k8s directory with the script, and a registry that has the digest `NEW` for everything."""
    (tmp_path / "k8s" / "image").mkdir(parents=True)
    script = tmp_path / "k8s" / "image" / "digests.py"
    script.write_text(SCRIPT.read_text())
    (tmp_path / "k8s" / "image" / "Dockerfile").write_text(
        f"FROM python:3.11@{OLD} AS wheel\nFROM example/ray:1-cpu AS ray-cpu\n"
        "FROM ray-${VARIANT}\n"
    )
    (tmp_path / "k8s" / "redis.yaml").write_text("  - image: redis:7.4\n    name: image\n")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho \'{{"digest": "{NEW}"}}\'\n')
    docker.chmod(0o755)
    return tmp_path


def asked(checkout):
    lines = (checkout / "asked").read_text().splitlines()
    return [line.split()[3] for line in lines]


def test_missing_digests_are_written_and_others_kept(checkout):
    script, path = checkout / "k8s" / "image" / "digests.py", f"{checkout / 'bin'}:/usr/bin:/bin"
    status, output = run(script, "--check", path=path)
    assert status == 1
    assert "redis.yaml: redis:7.4 has no digest" in output
    assert run(script, path=path)[0] == 0
    assert asked(checkout) == ["example/ray:1-cpu", "redis:7.4"]
    assert (checkout / "k8s" / "image" / "Dockerfile").read_text() == (
        f"FROM python:3.11@{OLD} AS wheel\nFROM example/ray:1-cpu@{NEW} AS ray-cpu\n"
        "FROM ray-${VARIANT}\n"
    )
    pinned = (checkout / "k8s" / "redis.yaml").read_text()
    assert pinned == f"  - image: redis:7.4@{NEW}\n    name: image\n"
    assert run(script, "--check", path=path) == (0, "")


def test_an_update_asks_for_all(checkout):
    script, path = checkout / "k8s" / "image" / "digests.py", f"{checkout / 'bin'}:/usr/bin:/bin"
    assert run(script, "--update", path=path)[0] == 0
    assert asked(checkout) == ["python:3.11", "example/ray:1-cpu", "redis:7.4"]
    assert OLD not in (checkout / "k8s" / "image" / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo no such image >&2; exit 1", "no such image"),
        ('echo \'{"digest": "sha256:1"}\'', "1'"),
    ],
)
def test_a_registry_without_the_image_is_an_error_and_changes_nothing(checkout, answer, message):
    (checkout / "bin" / "docker").write_text(f"#!/bin/sh\n{answer}\n")
    file = checkout / "k8s" / "image" / "Dockerfile"
    before = file.read_text()
    path = f"{checkout / 'bin'}:/usr/bin:/bin"
    status, output = run(checkout / "k8s" / "image" / "digests.py", path=path)
    assert status == 1
    assert message in output
    assert file.read_text() == before
