import hashlib
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import frontiers
from mars_autoscale.model.capacity import AR as PLAIN
from mars_autoscale.model.capacity import Rung, Window
from mars_autoscale.model.frontier import FRONTIER_FILE, read_frontier, write_frontier
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode

REMEDY = "run marsray calibrate again"


# Frontiers for these tests

point = partial(frontiers.point, half=1.0)
AR = point("ar", 1.0, 80.0, 1.0, 1.0)
POINTS = (
    AR,
    point("exact", 1.0, 80.0, 1.9, 16.0),
    point("threshold", 0.95, 79.5, 1.5, 4.5),
    point("threshold", 0.9, 79.0, 1.8, 4.75),
    point("threshold", 0.7, 75.0, 2.4, 5.25),
)


def save_model(path, value=0.0):
    """Save weights in a directory; returns their fingerprint."""
    save_file({"embed.weight": torch.full((2, 3), value)}, path / "model.safetensors")
    return weights_fingerprint(path)


def frontier_of(*points, weights="none", **more):
    seconds = ((0.010, 0.012), (0.030, 0.035))
    return frontiers.frontier_of(
        *(points or POINTS), weights=weights, **{"seconds": seconds, "window": 3, **more}
    )


def content_of(frontier):
    return frontier.model_dump(mode="json", exclude_none=True)


def sealed(content):
    """Return a content with the checksum of it, as in a frontier's file."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return content | {"checksum": hashlib.sha256(canonical.encode()).hexdigest()}


@pytest.fixture(name="model")
def _model(tmp_path):
    save_model(tmp_path)
    return tmp_path


def write_content(model, edit=lambda content: None):
    """Write a frontier file with an edited content and the checksum of that; returns its path."""
    content = content_of(frontier_of(weights=weights_fingerprint(model)))
    edit(content)
    file = model / FRONTIER_FILE
    file.write_text(json.dumps(sealed(content)))
    return file


Numbers = st.floats(0.001, 1e6)


@st.composite
def rising(draw, start=0.0):
    steps = draw(st.lists(st.floats(0.5, 1000), min_size=2, max_size=5))
    grid = [start]
    for step in steps:
        grid.append(grid[-1] + step)
    return grid


@st.composite
def noisy_points(draw):
    """Draw points whose quality and speed rise and fall with τ, as far as a frontier allows."""
    thresholds = draw(st.lists(st.floats(0.01, 0.99), unique=True, max_size=8))
    points = []
    speed, limit = 1.0, 100.0
    for i, threshold in enumerate([1.0, *sorted(thresholds, reverse=True)]):
        quality = draw(st.floats(0, 100))
        low = min(max(quality - draw(st.floats(0, 20)), 0.0), limit)
        high = min(quality + draw(st.floats(0, 20)), 100.0)
        limit = min(limit, high)
        given_speed = max(speed * (1 - draw(st.floats(0, 0.0199))), 1.0)
        speed = max(speed, given_speed + draw(st.sampled_from([0.0, 0.5])))
        tokens = draw(st.sampled_from([given_speed, speed]))
        mode = "threshold" if i else "ar"
        one = point(mode, threshold, quality, tokens, draw(st.floats(1, 20)))
        points.append(one | {"quality_low": low, "quality_high": high})
    if draw(st.booleans()):
        points.append(point("exact", 1.0, 50.0, 1.5, 9.0))
    return draw(st.permutations(points))


@st.composite
def drawn_frontiers(draw, weights):
    positions, stored = draw(rising()), draw(rising())
    row = st.lists(Numbers, min_size=len(stored), max_size=len(stored))
    seconds = draw(st.lists(row, min_size=len(positions), max_size=len(positions)))
    return frontier_of(
        *draw(noisy_points()),
        weights=weights,
        hardware=draw(st.text()),
        dtype=draw(st.text()),
        measure=draw(st.sampled_from(["accuracy", "likelihood"])),
        num_items=draw(st.integers(1, 1000)),
        window=draw(st.integers(1, 64)),
        prefill_tokens_per_s=draw(Numbers),
        step_seconds={"positions": positions, "stored": stored, "seconds": seconds},
    )


@pytest.fixture(name="shared", scope="module")
def _shared():
    """Return a model that all examples of a property share."""
    with TemporaryDirectory() as path:
        save_model(Path(path))
        yield Path(path)


# The file


@settings(derandomize=True)
@given(data=st.data())
def test_any_frontier_is_read_as_it_was_written(shared, data):
    frontier = data.draw(drawn_frontiers(weights_fingerprint(shared)))
    assert write_frontier(shared, frontier) == shared / FRONTIER_FILE
    assert read_frontier(shared) == frontier


@pytest.fixture
def written(shared):
    """A frontier, and the bytes of its file."""
    frontier = frontier_of(weights=weights_fingerprint(shared))
    return frontier, write_frontier(shared, frontier).read_bytes()


@settings(
    derandomize=True,
    max_examples=500,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # nothing changes what it gives
)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(shared, written, place, byte):
    frontier, whole = written
    file, raw = shared / FRONTIER_FILE, bytearray(whole)
    raw[int(place * len(raw))] = byte
    file.write_bytes(raw)
    try:
        found = read_frontier(shared)
    except UserError as error:
        assert str(error).startswith(f"{file}: ")  # noqa: PT017
        assert str(error).endswith(REMEDY)  # noqa: PT017
    else:
        assert found == frontier


def test_the_checksum_is_of_json_without_spaces_and_with_sorted_keys(model):
    frontier = frontier_of(weights=weights_fingerprint(model))
    file = write_frontier(model, frontier)
    assert json.loads(file.read_text()) == sealed(content_of(frontier))


# Refusals


def at(*keys):
    """Return a function of a value that returns an edit, which sets that value at the keys."""

    def to(value):
        def edit(content):
            *parents, last = keys
            target = content
            for key in parents:
                target = target[key]
            target[last] = value

        return edit

    return to


def points_are(*points):
    right = frontiers.right_of(80.0, frontiers.NUM_ITEMS)
    return at("points")([{"right": right, **one} for one in points])


in_window = partial(at, "points", 2, "windows", 0)


REFUSED = [
    ("format_version", at("format_version")(1), "it is 1, but only 2 is read, in which losses are"),
    ("format_version", lambda content: content.pop("format_version"), "it is None, but only 2"),
    ("weights", at("weights")("0" * 64), "another model's"),
    ("weights", lambda content: content.pop("weights"), "required"),
    ("scale", at("scale")(1), "unknown key"),
    ("measure", at("measure")("loss"), "'accuracy' or 'likelihood'"),
    ("points.0.right", at("measure")("likelihood"), "belongs to measure accuracy"),
    ("points.3.right", lambda content: content["points"][3].pop("right"), "belongs to measure"),
    ("points.2.right", at("points", 2, "right")("0110"), "a digit for each of num_items"),
    ("points.2.right", at("points", 2, "right")("2" * 500), "should match pattern"),
    ("points.2.loss", lambda content: content["points"][2].pop("loss"), "mode ar, which alone"),
    ("points.0.loss", at("points", 0, "loss")(POINTS[1]["loss"]), "mode ar, which alone"),
    ("points.2.loss", at("points", 2, "loss", "low")(0.6), "must enclose value, 0.5"),
    ("points.2.loss.high", at("points", 2, "loss", "high")(float("inf")), "finite"),
    (
        "points.2.divergence",
        at("points", 2, "divergence")({"num_outputs": 2, "num_diverged": 3, "num_tokens": 9}),
        "must be at most num_outputs, 2",
    ),
    ("points.2.windows", at("points", 2, "windows")([]), "at least 1"),
    (
        "points.2.windows",
        lambda content: content["points"][2]["windows"].append(POINTS[2]["windows"][0]),
        "num_masks must rise",
    ),
    ("num_items", at("num_items")(0), "greater than or equal to 1"),
    ("points.0.right", at("num_items")(499), "a digit for each"),
    ("window", at("window")(0), "greater than or equal to 1"),
    ("prefill_tokens_per_s", at("prefill_tokens_per_s")(0.0), "greater than 0"),
    ("prefill_tokens_per_s", at("prefill_tokens_per_s")(float("inf")), "finite"),
    ("step_seconds", at("step_seconds")([]), "dictionary"),
    ("step_seconds.positions", at("step_seconds", "positions")([1.0, 64.0, 64.0]), "above the one"),
    ("step_seconds.stored", at("step_seconds", "stored")([9.0, 0.0]), "above the one before"),
    ("step_seconds.stored", at("step_seconds", "stored")([0.0]), "at least 2"),
    ("step_seconds.seconds", at("step_seconds", "positions")([1.0, 2.0, 3.0]), "3 rows"),
    ("step_seconds.seconds", at("step_seconds", "seconds", 1)([0.1]), "of 2 times"),
    ("step_seconds.seconds.1.0", at("step_seconds", "seconds", 1, 0)(0.0), "greater than 0"),
    ("step_seconds.seconds.0.1", at("step_seconds", "seconds", 0, 1)(float("nan")), "finite"),
    ("points", points_are(), "mode ar"),
    ("points", points_are(point("threshold", 0.9, 80.0, 1.5, 4.0)), "mode ar"),
    ("points.1", points_are(AR, AR), "mode and threshold of points.0"),
    ("points.5", lambda content: content["points"].append(POINTS[1]), "of points.1"),
    ("points.5", lambda content: content["points"].append(POINTS[3]), "of points.3"),
    ("points.0.mode", at("points", 0, "mode")("plain"), "'threshold', 'exact' or 'ar'"),
    ("points.0.threshold", at("points", 0, "threshold")(0.9), "must be 1 in mode ar"),
    ("points.1.threshold", at("points", 1, "threshold")(0.9), "must be 1 in mode exact"),
    ("points.2.threshold", at("points", 2, "threshold")(1.0), "below 1 in mode threshold"),
    ("points.2.threshold", at("points", 2, "threshold")(0.0), "greater than 0"),
    ("points.2.threshold", at("points", 2, "threshold")(1.1), "less than or equal to 1"),
    ("points.2.quality", at("points", 2, "quality")(float("nan")), "equal to 100"),
    ("points.2.quality_high", at("points", 2, "quality_high")(100.5), "less than or equal to 100"),
    ("points.2.quality_high", at("points", 2, "quality_high")(79.4), "must hold quality, 79.5"),
    ("points.2.quality_low", at("points", 2, "quality_low")(79.6), "must hold quality, 79.5"),
    ("points.2.windows.0.tokens_per_forward", in_window("tokens_per_forward")(0.9), "equal to 1"),
    ("points.2.windows.0.positions_per_row", in_window("positions_per_row")(0.0), "equal to 1"),
    # a fall of 3% at once, and twice of 1.9%
    (
        "points.1.windows",
        points_are(
            AR,
            point("threshold", 0.7, 79.0, 1.94, 4.0),
            point("threshold", 0.9, 79.0, 2.0, 4.0),
        ),
        "more than 2% below 2, that of τ 0.9",
    ),
    (
        "points.3.windows",
        points_are(
            AR,
            point("threshold", 0.9, 79.0, 2.0, 4.0),
            point("threshold", 0.8, 79.0, 1.962, 4.0),
            point("threshold", 0.7, 79.0, 1.924722, 4.0),
        ),
        "more than 2% below 2, that of τ 0.9",
    ),
    (
        "points.1.quality_low",
        points_are(AR, point("threshold", 0.9, 82.1, 2.0, 4.0)),
        "not be above 81, the quality_high of τ 1",
    ),
    (
        "points.3.quality_low",
        points_are(
            AR,
            point("threshold", 0.9, 70.0, 2.0, 4.0),
            point("threshold", 0.8, 71.5, 2.0, 4.0),
            point("threshold", 0.7, 72.1, 2.0, 4.0),
        ),
        "not be above 71, the quality_high of τ 0.9",
    ),
]


@pytest.mark.parametrize(("field", "edit", "reason"), REFUSED)
def test_a_refusal_names_file_field_and_remedy(model, field, edit, reason):
    file = write_content(model, edit)
    with pytest.raises(UserError) as caught:
        read_frontier(model)
    message = str(caught.value)
    assert message.startswith(f"{file}: {field}: ")
    assert reason in message
    assert message.endswith(REMEDY)


def test_a_contradiction_within_the_noise_is_accepted(model):
    lower = point("threshold", 0.8, 81.9, 1.97, 4.0)
    write_content(model, points_are(AR, point("threshold", 0.9, 80.0, 2.0, 4.0), lower))
    assert len(read_frontier(model).points) == 3


@pytest.mark.parametrize(
    "checksum", [{}, {"checksum": None}, {"checksum": ""}, {"checksum": 7}, {"checksum": "0" * 64}]
)
def test_a_wrong_or_missing_checksum_is_refused(model, checksum):
    file = write_content(model)
    content = json.loads(file.read_text())
    del content["checksum"]
    file.write_text(json.dumps(content | checksum))
    with pytest.raises(UserError, match=f"{FRONTIER_FILE}: checksum: .*; {REMEDY}"):
        read_frontier(model)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "as JSON"),
        (b'{"format_version": 1', "as JSON"),
        (b'{"hardware": "\xff"}', "as JSON"),
        (b"[" * 100_000, "as JSON"),
        (b"[]", "top level must be an object"),
    ],
    ids=["empty", "cut", "latin", "deep", "list"],
)
def test_a_file_without_a_json_object_is_refused(model, raw, reason):
    (model / FRONTIER_FILE).write_bytes(raw)
    with pytest.raises(UserError, match=f"{FRONTIER_FILE}: .*{reason}.*; {REMEDY}"):
        read_frontier(model)


def test_a_missing_file_is_refused(model):
    with pytest.raises(UserError, match=rf"{FRONTIER_FILE}: .*\(No such file.*; {REMEDY}"):
        read_frontier(model)


# Rungs


def rung_of(mode, threshold, loss, tokens, positions):
    return Rung(Mode(mode), threshold, (Window(tokens, positions),), loss)


def test_rungs_are_plain_ar_and_exact_and_then_the_falling_thresholds():
    """A loss is the upper end of its interval, a point above what was measured."""
    assert frontier_of(*reversed(POINTS)).rungs() == (
        PLAIN,
        rung_of("exact", 1.0, 0.0, 1.9, 16.0),
        rung_of("threshold", 0.95, 1.5, 1.5, 4.5),
        rung_of("threshold", 0.9, 2.0, 1.8, 4.75),
        rung_of("threshold", 0.7, 6.0, 2.4, 5.25),
    )


def test_falling_figures_are_averaged():
    rungs = frontier_of(
        AR,
        point("threshold", 0.9, 81.5, 2.0, 4.0),
        point("threshold", 0.8, 77.0, 1.98, 5.0, half=4.0),
        point("threshold", 0.7, 78.0, 1.99, 6.0),
        point("threshold", 0.6, 70.0, 3.0, 7.0),
    ).rungs()
    assert [rung.loss for rung in rungs] == [0.0, 0.0, 5.0, 5.0, 11.0]
    windows = [rung.windows[0] for rung in rungs]
    assert [each.tokens_per_forward for each in windows] == pytest.approx([1, 1.99, 1.99, 1.99, 3])
    assert [each.positions for each in windows] == [1.0, 4.0, 5.0, 6.0, 7.0]


@settings(derandomize=True)
@given(points=noisy_points())
def test_rungs_are_monotone(points):
    rungs = frontier_of(*points).rungs()
    assert len(rungs) == len(points)
    rungs = [rung for rung in rungs if rung.mode is not Mode.EXACT]
    assert rungs[0] == PLAIN
    for above, below in pairwise(rungs):
        assert above.threshold > below.threshold
        assert above.loss <= below.loss
        assert above.windows[-1].tokens_per_forward <= below.windows[-1].tokens_per_forward + 1e-9


def test_the_exact_rung_loses_nothing():
    worse = point("exact", 1.0, 78.0, 1.9, 16.0)
    assert frontier_of(AR, worse).rungs() == (PLAIN, rung_of("exact", 1.0, 0.0, 1.9, 16.0))


def test_a_rung_has_all_windows_that_were_measured():
    narrow = {"num_masks": 1, "tokens_per_forward": 1.4, "positions_per_row": 2.4}
    low = point("threshold", 0.9, 79.0, 2.0, 5.0)
    frontier = frontier_of(AR, low | {"windows": (narrow, *low["windows"])})
    rung = frontier.rungs()[1]
    assert rung.windows == (Window(1.4, 2.4), Window(2.0, 5.0))
    # a step takes 10 ms and 0.2 ms for each position: many rows are faster with fewer masks
    capacity = frontier.capacity(4, 0.0)
    assert capacity.window(rung) == Window(2.0, 5.0)
    assert capacity.window(rung, 200) == Window(1.4, 2.4)


# Capacity


def test_step_times_are_interpolated_bilinearly():
    positions, stored = [0.0, 10.0, 40.0], [0.0, 1000.0, 5000.0]

    def seconds(p, s):
        return 0.01 + 0.001 * p + 1e-6 * s + 1e-7 * p * s

    table = [[seconds(p, s) for s in stored] for p in positions]
    frontier = frontier_of(
        step_seconds={"positions": positions, "stored": stored, "seconds": table}
    )
    # between measured values, at them, and beyond the last of positions and of cached tokens
    for rows, mean in [(4, 100.0), (4, 250.0), (4, 700.0), (10, 900.0), (1, 0.0)]:
        step_time = frontier.capacity(rows, mean).step_time
        for p in [0.0, 3.0, 10.0, 25.0, 100.0]:
            assert step_time.at(p) == pytest.approx(seconds(p, rows * mean))


def test_speeds_follow_from_the_measured_positions_of_rows():
    frontier = frontier_of()
    capacity = frontier.capacity(8)
    assert capacity == frontier.capacity(8, 512.0)
    assert (capacity.max_num_seqs, capacity.prefill_tokens_per_s) == (8, 10_000.0)
    assert capacity.rungs == frontier.rungs()
    rung = capacity.rung(Mode.THRESHOLD, 0.9)
    expected = 8 * 1.8 / capacity.step_time.at(8 * 4.75)
    assert capacity.tokens_per_s(rung) == pytest.approx(expected)
    exact = capacity.rung(Mode.EXACT, 1.0)
    expected = 8 * 1.9 / capacity.step_time.at(8 * 16.0)
    assert capacity.tokens_per_s(exact) == pytest.approx(expected)
