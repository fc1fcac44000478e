"""The blocks of the documentation run as they stand, and its configuration files are valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from mars_autoscale.simulation.config import SimulationConfig
from mars_platform.config import Settings, build_settings
from mars_platform.data.conversations import validate_conversation
from mars_serve.api.protocol import ChatCompletionRequest
from mars_serve.config.key_file import parse_keys
from mars_serve.config.settings import ServeSettings
from mars_train.recipe import Recipe
from marsray_docs.blocks import Block, blocks, script
from shell import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "k8s" / "README.md"]
WITH_A_MODEL = {"docs/start/quickstart.md", "docs/start/your-model.md"}
"""Pages whose blocks train and serve; `test_user_path.py` runs them."""
RUN = {
    name: found
    for page in PAGES
    for name, found in ((str(page.relative_to(ROOT)), blocks(page)),)
    if any(block.is_run for block in found)
}
MODELS: dict[str, type[Settings]] = {
    "serve": ServeSettings,
    "recipe": Recipe,
    "simulate": SimulationConfig,
}
TITLED = [
    (name, block)
    for page in PAGES
    for name, block in ((str(page.relative_to(ROOT)), each) for each in blocks(page))
    if block.title
]


JSON = [
    (str(page.relative_to(ROOT)), line)
    for page in PAGES
    for block in blocks(page)
    if block.language == "json"
    for line in block.code.splitlines()
]


def is_python(block: Block) -> bool:
    return block.language == "python" or not block.is_run


@pytest.mark.parametrize("page", sorted(RUN.keys() - WITH_A_MODEL))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    found = RUN[page]
    if all(is_python(block) for block in found):
        for block in found:
            if block.is_run:
                exec(compile(block.code, page, "exec"), {})  # noqa: S102 - our own page
    else:
        run_script(script(found), tmp_path)


def test_pages_with_a_model_are_run_elsewhere() -> None:
    assert RUN.keys() >= WITH_A_MODEL
    assert len(RUN) >= 6


@pytest.mark.parametrize(("page", "line"), JSON)
def test_json_in_pages_is_a_request_or_a_conversation(page: str, line: str) -> None:
    content = json.loads(line)
    if "answer" in content or set(content) == {"messages"}:
        assert validate_conversation(content).messages
        return
    body = {"model": "mine", "messages": [{"role": "user", "content": "?"}], **content}
    ChatCompletionRequest.model_validate(body).refuse_unsupported()


@pytest.mark.parametrize(
    ("page", "block"), TITLED, ids=[f"{name}:{block.title}" for name, block in TITLED]
)
def test_a_file_that_a_page_shows_is_valid(page: str, block: Block, tmp_path: Path) -> None:
    assert block.title
    stem = Path(block.title).stem
    if stem == "keys":
        assert len(parse_keys(block.code, page)) > 1
    elif stem == "ray-serve":
        (found,) = ServeDeploySchema.model_validate(yaml.safe_load(block.code)).applications
        assert found.import_path == "mars_serve.app:application"
        build_settings({"insecure": True, **found.args}, ServeSettings, source=block.title)
    elif block.language == "yaml":
        (model,) = (each for name, each in MODELS.items() if stem.startswith(name))
        content = yaml.safe_load(block.code)
        (tmp_path / "keys.yaml").write_text("keys: []")
        build_settings(content, model, source=block.title)
