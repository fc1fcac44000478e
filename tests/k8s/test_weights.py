from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kustomized import needs_kubectl
from mars_platform.checkpoint.manifest import MANIFEST


@pytest.fixture
def weights(script: Any) -> Any:
    return script("weights")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "sub" / "weights.bin").write_bytes(b"\0" * 100)
    return path


def test_a_stored_checkpoint_is_verified_through_a_link(weights, source, tmp_path, capsys):
    place = tmp_path / "models" / "candidates" / "a"
    assert weights.main(["store", str(source), str(place)]) == 0
    assert (place / MANIFEST).is_file()
    assert not (source / MANIFEST).exists()
    link = tmp_path / "models" / "current"
    link.symlink_to(place)
    assert weights.main(["verify", str(link)]) == 0
    assert str(place) in capsys.readouterr().out


def test_a_damaged_checkpoint_stops_the_worker(weights, source, tmp_path, capsys):
    place = tmp_path / "models" / "a"
    weights.main(["store", str(source), str(place)])
    (place / "frontier.json").write_text("{}")  # calibration may write it later
    assert weights.main(["verify", str(place)]) == 0
    (place / "config.json").write_text("[]")
    assert weights.main(["verify", str(place)]) == 2
    assert "config.json does not match" in capsys.readouterr().err


def test_a_checkpoint_is_downloaded_whole_and_once(weights, source, tmp_path, monkeypatch):
    monkeypatch.setattr(weights.tempfile, "tempdir", None)
    url = "memory://bucket/models/a"
    target = tmp_path / "models" / "current"
    assert weights.main(["store", str(source), url]) == 0
    assert weights.main(["fetch", url, str(target)]) == 0
    assert (target / "sub" / "weights.bin").read_bytes() == b"\0" * 100
    (source / "config.json").write_text("[1]")
    assert weights.main(["fetch", url, str(target)]) == 0  # a container that is restarted
    assert (target / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "missing"], "is no directory"),
        (["store", "missing", "place"], "is no directory"),
        (["store", "source", "source"], "exists already"),
        (["fetch", "source", "target"], "give a URL"),
        (["fetch", "memory://bucket/missing", "target"], "store it again"),
        (["nothing"], "verify DIRECTORY"),
        ([], "verify DIRECTORY"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    weights, source, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights.tempfile, "tempdir", None)
    assert weights.main(arguments) == 2
    assert message in capsys.readouterr().err


@needs_kubectl
def test_the_object_store_replaces_the_disk(render, tmp_path):
    """An overlay adds the component as a user's would."""
    service = render("../tests/k8s/object-store")
    spec = service.workers["template"]["spec"]
    check = spec["initContainers"][0]
    assert check["command"][2:] == ["fetch", "$(WEIGHTS_URL)", "/models/current"]
    head = service.cluster["headGroupSpec"]["template"]["spec"]
    named = [*head["volumes"], *head["containers"][0]["volumeMounts"]]
    assert "models" not in {each["name"] for each in named}
    (volume,) = (each for each in spec["volumes"] if each["name"] == "models")
    assert "emptyDir" in volume
    for container in [*spec["containers"], check]:
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "models")
        assert mount.get("readOnly", False) == (container is not check)
