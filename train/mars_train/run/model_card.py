"""Writes the card of a trained model or adapter from the files beside its weights.

A card says what the model is, how to serve it, how it was trained and what was measured. Paths of
the machine that trained it are left out. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, read_frontier
from mars_platform.checkpoint.metadata import ADAPTER_FILE, METADATA_FILE
from mars_platform.config import read_json
from mars_platform.method.mode import Mode
from mars_train.stage.history import HISTORY_FILE, read_history

_REMEDY = "copy it again"
_SHOWN = ("epochs", "batch_size", "learning_rate", "block_size", "ar_weight", "responses")
_PLACEHOLDER = "OWNER/NAME"


def model_card(directory: Path, repository: str = _PLACEHOLDER) -> str:
    """Return the card of a checkpoint or adapter directory, with the hub's front matter."""
    metadata = _content(directory / METADATA_FILE)
    recipe: dict[str, Any] = metadata.get("provenance", {}).get("recipe", {})
    base = _hub_id(recipe.get("model", {}).get("base"))
    is_adapter = (directory / ADAPTER_FILE).is_file()
    scope = metadata.get("scope", "masks") if metadata else "all"
    data = ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["marsray", *(["mars"] if metadata else [])],
    )
    sections = [
        f"# {repository.rpartition('/')[2]}",
        _description(metadata, is_adapter=is_adapter),
        _usage(repository, base, scope if is_adapter else None),
        *_training(directory, recipe, metadata.get("provenance", {}).get("stage", "ar")),
        *_measured(directory),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


def _content(file: Path) -> dict[str, Any]:
    return read_json(file, _REMEDY) if file.is_file() else {}


def _hub_id(base: str | None) -> str | None:
    """Return a base that has a place on the hub; None for a directory, whose path says nothing."""
    is_id = base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~"))
    return base if is_id else None


def _description(metadata: Mapping[str, Any], *, is_adapter: bool) -> str:
    kind = "An adapter" if is_adapter else "A causal language model"
    if not metadata:
        return f"{kind}, fine-tuned with [marsray](https://pypi.org/project/marsray)."
    head = (
        " Its draft head lets each of them depend on the one before."
        if metadata.get("draft_head")
        else ""
    )
    return (
        f"{kind}, trained by marsray with MARS ([arXiv 2604.07023](https://arxiv.org/abs/2604.07023"
        f")): behind up to {metadata['block_size']} placeholders `<|mask|>` it predicts the tokens "
        "to come, so that an answer takes fewer forward "
        f"passes.{head} Without placeholders it is an ordinary autoregressive model."
    )


def _usage(repository: str, base: str | None, scope: str | None) -> str:
    """Return how to serve a model, or an adapter that acts at positions of a scope."""
    name, base = repository.rpartition("/")[2], base or "BASE"
    serve = [f"marsray serve --model {name}={repository}"]
    if scope is not None:
        serve = [f"marsray pull {repository} {name}"]
    if scope == "masks":
        serve.append(f"marsray serve --model {base} --adapter {name}")
    elif scope == "all":
        model = f"{{name: base, path: {base}, loras: [{{name: {name}, path: {name}}}]}}"
        serve += [f"echo 'models: [{model}]' > serve.yaml", "marsray serve serve.yaml"]
    commands = "\n".join(["pip install marsray", *serve])
    return f"## Serve it\n\n```sh\n{commands}\n```"


def _training(directory: Path, recipe: Mapping[str, Any], name: str) -> Iterator[str]:
    file = directory / HISTORY_FILE
    if not file.is_file():
        return
    history = read_history(file)
    stages = [stage for stage in recipe.get("stages", []) if stage.get("name") == name]
    losses = [f"{step.loss:.4f}" for step in history.steps]
    rows = [
        ("stage", name),
        ("steps", f"{len(losses):,}"),
        ("tokens", f"{sum(step.num_tokens for step in history.steps):,}"),
        ("loss of the first and the last step", ", ".join(losses[:1] + losses[-1:])),
        *((key, stage[key]) for stage in stages for key in _SHOWN if stage.get(key)),
    ]
    yield "## Training\n\n" + _table(("", ""), rows)
    for score in history.scores[-1:]:
        found = [
            (
                f"{each.threshold:g}",
                "not measured" if each.accuracy is None else f"{each.accuracy:.1%}",
                f"{each.tokens_per_forward:.2f}",
            )
            for each in score.thresholds
        ]
        table = _table(("τ", "accuracy", "tokens a pass"), found)
        yield f"Held-out conversations after step {score.step}:\n\n{table}"


def _measured(directory: Path) -> Iterator[str]:
    if (directory / FRONTIER_FILE).is_file():
        yield "## Measured\n\n" + _frontier_text(read_frontier(directory))


def _frontier_text(frontier: Frontier) -> str:
    quality = "right answers" if frontier.measure == "accuracy" else "likelihood, against mode ar"
    points = sorted(frontier.points, key=lambda point: (point.mode is Mode.EXACT, -point.threshold))
    rows = [
        (
            f"τ = {point.threshold:g}" if point.mode is Mode.THRESHOLD else f"mode {point.mode}",
            f"{point.quality:.1f}%",
            f"{point.tokens_per_forward:.2f}",
        )
        for point in points
    ]
    return (
        f"By `marsray calibrate` on {frontier.num_items:,} conversations, {frontier.dtype}, "
        f"{frontier.hardware}.\n\n" + _table(("", quality, "tokens a pass"), rows)
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
