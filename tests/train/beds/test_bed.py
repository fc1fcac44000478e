import shutil

import pytest
import torch
from bench.beds.code import measure, tables
from bench.beds.models import AR, Bed, Sizes
from bench.beds.report import closed_gap, table
from bench.beds.run import chosen, generate, main, read_results, with_blocks
from bench.beds.scores import distributions
from bench.beds.variants import BASELINE, VARIANTS
from typer import Exit

from decoding.tiny_models import build_model
from mars_platform.errors import UserError
from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_short
from mars_train.data.token_store import TokenStore


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    """A bed of one seed that was run with one step, for today's recipe and another variant."""
    sizes = Sizes(examples=40, items=2, ar_steps=1, mars_steps=1, responses=3)
    bed = Bed(tmp_path_factory.mktemp("bed"), sizes)
    main(
        bed.work, seeds=1, jobs=1, only=[BASELINE, "decay-.8"], examples=40, items=2,
        ar_steps=1, mars_steps=1,
    )  # fmt: skip
    return bed


def test_each_variant_is_trained_from_the_ar_checkpoint_and_scored(bed):
    results = read_results(bed)
    assert [*results] == [AR, BASELINE, "decay-.8"]
    for name in (BASELINE, "decay-.8"):
        found = results[name][0]
        assert len(found["exact"]["right"]) == bed.window == 8
        assert found["exact"]["tokens"] == found["settings"]["one-token"]["tokens"]
        assert all(
            least <= passes <= tokens
            for least, passes, tokens in zip(
                *(found["exact"][key] for key in ("ideal_passes", "passes", "tokens")), strict=True
            )
        )
        assert found["train"]["cpu_s"] > 0
    assert sum(results[AR][0]["distributions"]["divergence"]) == 0


def test_a_finished_run_repeats_nothing(bed, capsys):
    results = bed.work / "results"
    before = {file.name: file.stat().st_mtime_ns for file in results.iterdir()}
    main(bed.work, seeds=1, jobs=1, only=[BASELINE], examples=40, items=2, ar_steps=1, mars_steps=1)
    assert {file.name: file.stat().st_mtime_ns for file in results.iterdir()} == before
    assert "| decay-.8 |" in capsys.readouterr().out


def test_responses_are_those_of_the_ar_checkpoint(bed):
    generate("greedy", bed)
    store = TokenStore(bed.responses("greedy"))
    assert len(store) == 3
    generate("greedy", bed)  # they are there


def test_the_table_has_paired_differences(bed):
    results = read_results(bed)
    text = table(results, BASELINE, AR)
    *_, last = [line for line in text.splitlines() if line.startswith("| decay-.8 |")]
    assert last.count("to") >= 6
    same = table({BASELINE: results[BASELINE], "copy": results[BASELINE]}, BASELINE, AR)
    *_, last = [line for line in same.splitlines() if line.startswith("| copy |")]
    assert "| +0.000 (+0.000 to +0.000) | 0.0 |" in last


def test_the_ideal_drafter_closes_the_whole_gap():
    assert closed_gap(4.0, 3.0, 5.0) == 0.5
    assert closed_gap(5.0, 3.0, 5.0) == 1.0


def refusal(capsys, *arguments, **options):
    """Return the line in which a command refuses what it was given."""
    with pytest.raises(Exit):
        main(*arguments, seeds=1, jobs=1, **options)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_unknown_variants_are_refused(tmp_path, capsys):
    assert chosen([]) == VARIANTS
    line = refusal(capsys, tmp_path / "work", only=["nothing"])
    assert "no variant nothing; name one of baseline" in line
    assert not (tmp_path / "work").exists()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal(capsys, tmp_path / "file")
    write_demo_data(tmp_path / "data", draw_short, num_train=16, num_eval=2, seed=0)
    line = refusal(capsys, tmp_path, examples=16, items=2)
    assert "not this bed's with 16 training conversations and 2 held-out ones" in line


def test_data_in_other_numbers_or_a_damaged_result_is_refused(bed, tmp_path, capsys):
    shutil.copytree(bed.work / "data", tmp_path / "data")
    assert "has data that is not" in refusal(capsys, tmp_path, examples=40, items=1)
    assert "has data that is not" in refusal(capsys, tmp_path, examples=39, items=2)
    damaged = tmp_path / "results" / f"seed0-{BASELINE}.json"
    damaged.parent.mkdir()
    damaged.write_text('{"train":')
    assert f"{damaged} is damaged" in refusal(capsys, tmp_path, examples=40, items=2)


def test_other_steps_than_those_of_the_results_are_refused(bed, capsys):
    line = refusal(capsys, bed.work, examples=40, items=2, ar_steps=1, mars_steps=2)
    assert "1 steps of stage ar and 1 of stage mars, not 1 and 2" in line


def test_a_run_that_was_stopped_makes_its_data_anew(tmp_path):
    bed = Bed(tmp_path, Sizes(examples=16, items=2))
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "eval.jsonl").write_text("half a line")
    bed.make_ready()
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 16
    assert len(TokenStore(bed.filled_tokens)) == len(TokenStore(bed.tokens)) == 16
    bed.make_ready()
    assert not list(tmp_path.glob("*.partial"))


def test_another_block_size_has_a_name_of_its_own():
    baseline, mixed = chosen([BASELINE, "mixed-blocks-2-4-8"])
    assert with_blocks(baseline, 16).stage == {"block_size": [16]}
    variant = with_blocks(mixed, 16)
    assert variant.name == "mixed-blocks-2-4-8-b16"
    assert variant.stage == {**mixed.stage, "block_size": [4, 8, 16]}
    assert variant.responses == mixed.responses
    assert with_blocks(mixed, 2).stage["block_size"] == [1, 2]


def test_every_variant_is_a_valid_stage(bed):
    names = [variant.name for variant in VARIANTS]
    assert len({*names}) == len(names)
    for variant in VARIANTS:
        recipe = bed.recipe_of(0, bed.stage_of(variant), bed.ar_model)
        (found,) = recipe.trained_stages
        assert found.block_sizes[-1] == bed.window


def test_distributions_are_those_of_the_models():
    ours, theirs = build_model(seed=0), build_model(seed=1)
    ids = torch.tensor([4, 5, 6, 7, 8, 9])
    supervised = torch.tensor([False, False, False, True, True, True])
    found = distributions(ours, theirs, [(ids.numpy(), supervised.numpy())])
    with torch.no_grad():
        p, q = (each(ids[None]).logits[0, 2:5].softmax(-1) for each in (ours, theirs))
    assert found["labels"] == [3]
    loss = -sum(p[place, ids[place + 3]].log() for place in range(3))
    assert found["loss"] == pytest.approx([float(loss)], rel=1e-5)
    entropy = torch.distributions.Categorical(p).entropy().sum()
    assert found["entropy"] == pytest.approx([float(entropy)], rel=1e-5)
    assert found["divergence"] == pytest.approx([float((q * (q / p).log()).sum())], rel=1e-4)


def test_real_text_is_measured_greedy_and_sampled(bed):
    found = measure(
        str(bed.model(0, BASELINE)), bed.held_out, num_items=2, max_tokens=12, num_timed=1,
        rounds=1, batches=[1, 2], dtype="bfloat16", num_lookup_drafts=4,
    )  # fmt: skip
    assert [*found["outputs"]] == ["0", "0.7", "1"]
    assert len(found["speed"]) == 2 * 3 * 3
    for each in found["speed"]:
        median, low, high = each["over_ar"]
        assert 0 < low <= median <= high
        assert (each["drafts"] == "none") == (each["mode"] == "ar")
    for each in found["outputs"].values():
        assert len(each["right"]) == found["block_size"] == 8
        assert all(tokens <= 12 for tokens in each["tokens"])
    fit = found["likelihood"]
    assert fit["nats_per_token"] > fit["bits_per_byte"] > 0  # a token has several bytes
    text = tables(found)
    assert len([line for line in text.splitlines() if line.startswith("| greedy |")]) == 1 + 2 * 3


def test_a_plain_checkpoint_is_refused(bed):
    with pytest.raises(UserError, match="is a plain AR checkpoint"):
        measure(
            str(bed.model(0, AR)), bed.held_out, num_items=1, max_tokens=8, num_timed=1,
            rounds=1, batches=[1], dtype="float32",
        )  # fmt: skip
