"""The documentation site builds without a warning, and its references name all there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi import FastAPI
from pydantic import BaseModel

from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_autoscale.simulation.config import SimulationConfig
from mars_platform.cli.main import build_cli
from mars_serve.config.key_file import KeyEntry
from mars_serve.config.settings import ModelSettings, ServeSettings
from mars_serve.http.app import create_app
from mars_train.recipe import Recipe
from marsray_docs import build

Schema = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
FILES = {"server": ServeSettings, "recipe": Recipe, "simulation": SimulationConfig}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a broken link or anchor, or a page outside the menu, fails the build."""
    directory = tmp_path_factory.mktemp("site")
    build.main(directory)
    return directory / "site"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app({}, ServeSettings(models=[ModelSettings(name="mine", path="model")]))


def codes(site: Path, name: str) -> set[str]:
    """Return all pieces of code in a built page's tables and headings."""
    html = (site / f"{name}.html").read_text(encoding="utf-8")
    return {unescape(found) for found in re.findall(r"<code>([^<]*)</code>", html)}


def commands(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield every command with its options, and with its arguments as the help names them."""
    yield (
        name,
        {
            (each.metavar or option) if option == each.name else option
            for each in command.params
            for option in (*each.opts, *each.secondary_opts)
            if option != "--help"
        },
    )
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", below)


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    html = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    parts = re.split(r"<h[2-4] [^>]*><code>([^<]*)</code>", html)
    sections = {name: unescape(part) for name, part in zip(parts[1::2], parts[2::2], strict=True)}
    found = dict(commands("marsray", typer.main.get_command(build_cli())))
    assert found.keys() == sections.keys()
    assert len(found) > 15
    for name, options in found.items():
        assert {option for option in options if option not in sections[name]} == set(), name


def keys(model: type[BaseModel]) -> Iterator[tuple[str, bool]]:
    """Yield every key that a model's JSON schema has, and whether its meaning is told."""
    schema = model.model_json_schema()
    yield from _keys(schema, schema.get("$defs", {}), "")


def _keys(node: Schema, models: Schema, path: str) -> Iterator[tuple[str, bool]]:
    for name, each in node["properties"].items():
        below = f"{path}.{name}" if path else name
        inner = list(_inner(each, models, is_listed=False))
        yield below, "description" in each or any("description" in one for one, _ in inner)
        for one, is_listed in inner:
            yield from _keys(one, models, below + ("[]" if is_listed else ""))


def _inner(node: Schema, models: Schema, *, is_listed: bool) -> Iterator[tuple[Schema, bool]]:
    """Yield the models that a key holds, each with whether it stands in a list."""
    named = models.get(node.get("$ref", "").rpartition("/")[2], {})
    if "properties" in named:
        yield named, is_listed
    for key in ("anyOf", "oneOf", "allOf"):
        for each in node.get(key, ()):
            yield from _inner(each, models, is_listed=is_listed)
    if "items" in node:
        yield from _inner(node["items"], models, is_listed=True)


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_is_in_its_reference_with_its_meaning(site: Path, name: str) -> None:
    found = dict(keys(FILES[name]))
    told = codes(site, f"reference/{name}")
    # keys that another section tells are named there by their last part
    lacking = {key for key in found.keys() - told if key.rpartition(".")[2] not in told}
    assert len(found) > 10
    assert lacking == set()
    assert [key for key, is_told in found.items() if not is_told] == []


def test_the_keys_of_a_key_file_are_among_the_servers(site: Path) -> None:
    told = codes(site, "reference/server")
    assert {f"keys.entries[].{key}" for key, _ in keys(KeyEntry)} <= told


def test_every_endpoint_and_error_is_in_the_reference(site: Path, app: FastAPI) -> None:
    document, told = app.openapi(), codes(site, "reference/rest")
    endpoints = {
        f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each
    }
    assert endpoints - told == set()
    html = (site / "reference" / "rest.html").read_text(encoding="utf-8")
    statuses = {
        status
        for each in document["paths"].values()
        for operation in each.values()
        for status in operation["responses"]
        if int(status) >= 400
    }
    assert len(statuses) > 5
    assert {each for each in statuses if f"<td>{each}</td>" not in html} == set()


def test_every_metric_is_in_the_reference(site: Path) -> None:
    told = codes(site, "reference/metrics")
    sources = (ROOT / root for root in ("serve", "autoscale"))
    literals = {
        name
        for source in sources
        for file in source.rglob("*.py")
        for name in re.findall(r"\"(marsray_\w+[a-z])\",", file.read_text(encoding="utf-8"))
    }
    autoscaler = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in AutoscalerMetrics({}).collect()
    }
    assert len(literals) > 20
    assert len(autoscaler) > 10
    assert literals | autoscaler <= told


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//[^\"]*\"")
    styles = re.compile(r"<link[^>]*href=\"(?:https?:)?//")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for each in pages:
        html = each.read_text(encoding="utf-8")
        assert loaded.findall(html) == [], each
        assert styles.findall(html) == [], each
    assert "fonts.googleapis" not in "".join(
        each.read_text(encoding="utf-8") for each in site.rglob("*.css")
    )


def test_code_in_tables_shows_pipes_without_backslashes(site: Path) -> None:
    glossary, device = codes(site, "reference/glossary"), "--device <auto|cpu|cuda>"
    assert "<|mask|>" in glossary
    assert device in codes(site, "reference/commands")
    assert not [each for each in glossary if r"\|" in each]
