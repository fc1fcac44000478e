from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from frontiers import frontier_of, point
from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, write_frontier
from mars_platform.checkpoint.calibration import Calibration, DepthCalibration, write_calibration
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.manifest import MANIFEST, describe_all, verify
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_serve.measure.options import Gate
from mars_serve.measure.promote import PointPair, compare, promote
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model
from waiting import wait_until

Array = np.ndarray[Any, Any]
Content = dict[str, Any]
Make = Callable[..., Path]
WEIGHTS = "model.safetensors"
FORCED = None
"""A gate that compares nothing."""


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MARS checkpoint; all others are copies of it with other weights."""
    plain, mars = (tmp_path_factory.mktemp("models") / name for name in ("plain", "mars"))
    config = {"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    texts = ["Count a box of 12 apples"] * 5
    create_model(ScratchModel(config=config, vocabulary_size=300), texts, 64, plain, seed=0)
    model, tokenizer = load_model(plain), AutoTokenizer.from_pretrained(plain)
    mask_id, _ = add_mask_token(model, tokenizer)
    save_checkpoint(mars, model, tokenizer, MarsMetadata(block_size=1, mask_token_id=mask_id))
    return mars


@pytest.fixture
def checkpoint(complete: Path) -> Make:
    """Make checkpoints with weights of their own, a manifest, and a frontier measured later."""

    def make(path: Path, quality: float = 80.0, tokens: float = 1.5, **more: Any) -> Path:
        shutil.copytree(complete, path)
        own = torch.tensor([[quality, tokens, float(len(path.name))], [1.0, 2.0, 3.0]])
        save_file({"weight": own}, path / WEIGHTS)
        (path / FRONTIER_FILE).write_text("{}")  # an earlier frontier, which the manifest lists
        (path / MANIFEST).write_text(describe_all(path).text)
        frontier = frontier_of(
            point("ar", 1.0, quality, 1.0, 1.0),
            point("threshold", 0.9, quality - 1, tokens, 2.0, plain_quality=quality),
            weights=weights_fingerprint(path),
            seconds=0.01,
            **{"items": "the same", **more},
        )
        write_frontier(path, frontier)
        return path

    return make


@pytest.fixture
def link(checkpoint: Make, tmp_path: Path) -> Path:
    """A link to checkpoint ``a``, which is in service."""
    place = tmp_path / "current"
    promote(checkpoint(tmp_path / "a"), place, Gate())
    return place


def test_a_checkpoint_that_is_not_worse_is_put_in_service(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    compared = promote(checkpoint(tmp_path / "b", 79.2, 1.44), link, Gate())
    assert link.resolve() == tmp_path / "b"
    assert [each.current.threshold for each in compared] == [1.0, 0.9]
    promote(tmp_path / "a", link, Gate())  # back again
    assert link.resolve() == tmp_path / "a"


@pytest.mark.parametrize(
    ("quality", "tokens", "message"),
    [
        (
            78.4,
            1.5,
            r"mode ar: quality 78.4 is 1.6 points below 80.0, and on these conversations 1.2 are "
            r"allowed; τ 0.9: quality 77.4",
        ),
        (80.0, 1.4, r"τ 0.9: 1.40 tokens a pass are 7% fewer than 1.50; train"),
    ],
)
def test_a_worse_checkpoint_is_refused(
    checkpoint: Make, link: Path, tmp_path: Path, quality: float, tokens: float, message: str
) -> None:
    worse = checkpoint(tmp_path / "b", quality, tokens)
    with pytest.raises(UserError, match=message):
        promote(worse, link, Gate())
    assert link.resolve() == tmp_path / "a"
    promote(worse, link, Gate(max_loss=3, max_slower=0.1))
    assert link.resolve() == tmp_path / "b"


@pytest.mark.parametrize(
    ("current", "candidate", "message"),
    [
        ({}, {"items": "others"}, r"same conversations; .* one in service .*, or .* --force"),
        ({}, {"items": None}, r"same conversations; .* one in service .*, or .* --force"),
        (
            {"measure": "likelihood"},
            {"measure": "likelihood"},
            r'quality of both is likelihood .* on both .* have an "answer" each, or .* --force',
        ),
        ({}, {"measure": "likelihood"}, r'of the candidate is likelihood .* "answer" .* --force'),
        (
            {"measure": "likelihood"},
            {},
            r'of the one in service is likelihood .* "answer" .*--force',
        ),
    ],
)
def test_frontiers_that_were_measured_differently_are_not_compared(
    checkpoint: Make, tmp_path: Path, current: Content, candidate: Content, message: str
) -> None:
    link = tmp_path / "current"
    promote(checkpoint(tmp_path / "a", **current), link, Gate())
    other = checkpoint(tmp_path / "b", **candidate)
    with pytest.raises(UserError, match=message):
        promote(other, link, Gate(max_loss=100, max_slower=0.99))
    assert link.resolve() == tmp_path / "a"
    assert promote(other, link, FORCED) == []
    assert link.resolve() == tmp_path / "b"


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
def test_an_unreadable_checkpoint_in_service_is_replaced_only_by_force(
    checkpoint: Make, link: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path / "a" / FRONTIER_FILE)
    worse = checkpoint(tmp_path / "b", 10.0)
    with pytest.raises(UserError, match=r"current/frontier\.json: .* again, or promote with --for"):
        promote(worse, link, Gate())
    assert promote(worse, link, FORCED) == []
    assert link.resolve() == tmp_path / "b"


SETTINGS = (("ar", 1.0), *(("threshold", value) for value in (0.95, 0.9, 0.8, 0.7)))


def drawn_frontier(quality: float, difficulty: Array, rng: np.random.Generator) -> Frontier:
    """Draw which items a model gets right in five settings; some are difficult for all models.

    ``quality`` is the percentage of all the items of such difficulty that there are.
    """
    noise = 0.3
    ability = NormalDist(sigma=math.hypot(1, noise)).inv_cdf(quality / 100)
    points = []
    for mode, threshold in SETTINGS:
        is_right = difficulty + noise * rng.standard_normal(len(difficulty)) < ability
        right = "".join("1" if each else "0" for each in is_right)
        points.append(point(mode, threshold, quality, 1.5, 2.0) | {"right": right})
    return frontier_of(
        *points, weights="w", seconds=0.01, items="the same", num_items=len(difficulty)
    )


def drawn_comparisons(quality: float, num_items: int, num_runs: int) -> list[list[PointPair]]:
    """Compare candidates of a quality with checkpoints in service of quality 80."""
    rng = np.random.default_rng(num_items)
    drawn = []
    for _ in range(num_runs):
        difficulty = rng.standard_normal(num_items)
        candidate = drawn_frontier(quality, difficulty, rng)
        drawn.append(compare(candidate, drawn_frontier(80.0, difficulty, rng), Gate()))
    return drawn


@pytest.mark.parametrize("num_items", [100, 600])
def test_equal_models_pass_the_gate_and_much_worse_ones_do_not(num_items: int) -> None:
    equal = drawn_comparisons(80.0, num_items, 400)
    refused = [any(each.problem(Gate()) for each in compared) for compared in equal]
    assert np.mean(refused) <= 0.05
    # the bare figures of equal models, with the gate's point of tolerance
    bare = [max(each.loss.value for each in compared) > Gate().max_loss for compared in equal]
    assert np.mean(bare) > 0.2
    worse = drawn_comparisons(65.0, num_items, 100)
    assert np.mean([compared[0].problem(Gate()) is not None for compared in worse]) >= 0.75


def damage_later_row(path: Path) -> None:
    """Damage a tensor where no fingerprint looks, keeping the size, as a bad disk might."""
    weights = load_file(path / WEIGHTS)
    weights["weight"][1, 2] = 4.0
    save_file(weights, path / WEIGHTS)


def calibrate_another(path: Path) -> None:
    depths = (DepthCalibration(temperature=1, num_fitted=0, num_checked=0),) * 2
    calibration = Calibration(weights="of another model", num_items=2, depths=depths)
    write_calibration(path, calibration)


@pytest.mark.parametrize("gate", [Gate(), FORCED], ids=["compared", "forced"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_later_row, r"b is not what its manifest says \(model\.safetensors does not match"),
        (lambda path: (path / "mars.json").unlink(), r"\(mars\.json is missing\); copy it again"),
        (lambda path: (path / MANIFEST).write_text("{"), r"cannot be read .* delete its manifest"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer"),
        (
            lambda path: (path / "own.py").write_text("x"),
            r"b: own\.py is not listed in manifest\.json; remove the file, or",
        ),
        (lambda path: (path / FRONTIER_FILE).unlink(), r"b/frontier\.json: cannot be read"),
        (calibrate_another, r"b/calibration\.json: weights: it was made for another model's"),
        (
            lambda path: save_file({"weight": torch.zeros(2, 3)}, path / WEIGHTS),
            r"b/frontier\.json: weights: it was measured on another model's",
        ),
    ],
)
def test_a_checkpoint_that_no_server_could_use_is_refused(
    checkpoint: Make,
    link: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    gate: Gate | None,
) -> None:
    bad = checkpoint(tmp_path / "b")
    damage(bad)
    with pytest.raises(UserError, match=message):
        promote(bad, link, gate)
    assert link.resolve() == tmp_path / "a"


def test_a_checkpoint_that_was_calibrated_again_matches_its_manifest(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    listed = json.loads((tmp_path / "a" / MANIFEST).read_text())["files"]
    assert listed[FRONTIER_FILE]["num_bytes"] < (tmp_path / "a" / FRONTIER_FILE).stat().st_size
    promote(tmp_path / "a", link, Gate())


def test_a_checkpoint_without_a_manifest_gets_one(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    bare = checkpoint(tmp_path / "b")
    (bare / MANIFEST).unlink()
    promote(bare, link, Gate())
    assert link.resolve() == bare
    verify(LocalFileSystem(), str(link))
    assert WEIGHTS in json.loads((bare / MANIFEST).read_text())["files"]
    damage_later_row(bare)
    with pytest.raises(UserError, match="is not what its manifest says"):
        promote(bare, link, Gate())


def test_a_checkpoint_of_links_gets_no_manifest(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    """Whoever changes the targets would change what is served."""
    bare = checkpoint(tmp_path / "b")
    (bare / MANIFEST).unlink()
    (bare / WEIGHTS).rename(tmp_path / "blob")
    (bare / WEIGHTS).symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match=r"model\.safetensors is a link that leads out"):
        promote(bare, link, FORCED)
    assert not (bare / MANIFEST).exists()


def test_an_incomplete_checkpoint_gets_no_manifest(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    bare = checkpoint(tmp_path / "b")
    for name in (MANIFEST, "tokenizer.json"):
        (bare / name).unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        promote(bare, link, Gate())
    assert not (bare / MANIFEST).exists()


def test_links_to_files_elsewhere_are_followed_in_neither_checkpoint(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    other = checkpoint(tmp_path / "b")
    (other / "README.md").symlink_to("/proc/self/environ")
    with pytest.raises(UserError, match=r"b: README\.md is a link that leads out"):
        promote(other, link, FORCED)
    (other / "README.md").rename(tmp_path / "a" / "README.md")
    with pytest.raises(UserError, match=r"current: README\.md is a link .* promote with --force"):
        promote(other, link, Gate())
    promote(other, link, FORCED)


def test_a_link_that_leads_nowhere_is_turned_only_by_force(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").rename(tmp_path / "moved")
    worse = checkpoint(tmp_path / "b", 10.0)
    with pytest.raises(UserError, match=r"^--service: .*current leads to .*/a, .* --force"):
        promote(worse, link, Gate())
    assert link.readlink() == tmp_path / "a"
    promote(worse, link, FORCED)
    assert link.resolve() == worse


def test_no_checkpoint_is_compared_while_another_is_being_promoted(
    checkpoint: Make, link: Path, tmp_path: Path
) -> None:
    """Otherwise the slow one would replace the better one, with which it was not compared."""
    slow, better = checkpoint(tmp_path / "b", 79.2), checkpoint(tmp_path / "c", 90.0)
    (slow / MANIFEST).unlink()
    pipe = slow / "more.index.json"  # read after the comparison
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(promote, slow, link, Gate())
        with os.fdopen(opened_once_read(pipe), "w") as content:
            pipe.unlink()
            with pytest.raises(UserError, match=r"^--service: .* \(another marsray promote"):
                promote(better, link, Gate())
            content.write('{"weight_map": {}}')
        assert len(first.result()) == 2
    assert link.resolve() == slow
    promote(better, link, Gate())
    with pytest.raises(UserError, match="is not promoted"):
        promote(slow, link, Gate())


def opened_once_read(pipe: Path) -> int:
    opened = list[int]()

    def is_read() -> bool:
        with suppress(OSError):
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    wait_until(is_read, 60, lambda: f"nothing reads {pipe}")
    return opened[0]


def test_a_link_is_made_in_a_directory_that_exists(checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--service: there is no directory .*/modles; check"):
        promote(checkpoint(tmp_path / "a"), tmp_path / "modles" / "current", FORCED)


def test_a_directory_is_not_replaced(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(UserError, match="no symbolic link"):
        promote(checkpoint(tmp_path / "a"), tmp_path / "current", FORCED)


def test_the_command_names_the_old_and_the_new_checkpoint(
    checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "current"
    for name in ("a", "b"):
        arguments = ["promote", str(checkpoint(tmp_path / name)), "--service", str(link)]
        assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert f"before, it was {tmp_path / 'a'}" in printed
    worse = checkpoint(tmp_path / "c", 10.0)
    assert run(["promote", str(worse), "--service", str(link)]) == 2
    assert "is not promoted" in capsys.readouterr().err
    assert run(["promote", str(worse), "--service", str(link), "--force"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        f"{link} is now {worse}",
        f"before, it was {tmp_path / 'b'}",
    ]
