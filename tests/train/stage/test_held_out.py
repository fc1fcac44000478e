import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model
from mars_platform.errors import UserError
from mars_train.data.token_store import TokenStoreWriter
from mars_train.recipe import DataSettings, EvaluationSettings
from mars_train.stage.held_out import read_held_out, score_held_out, warnings_of
from mars_train.stage.history import HeldOutScore, ThresholdScore
from mars_train.stage.parallel import Workers
from stage_runs import build_job, run_group, run_stage, write_start

BLOCK_SIZE = 3
DATA = DataSettings(train=["unused"], max_length=64)


def conversation(question, response, **columns):
    turns = [("user", question), ("assistant", response)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, **columns}


ROWS = [
    conversation(f"{n} and one?", f"It is Answer: {n + 1}"[: 40 if n % 2 else 9], answer=str(n + 1))
    for n in range(7)
]
LEARNED = [conversation(f"{n}?", f"Answer: {9 - n}", answer=f"{9 - n}") for n in range(6)]
LEARNED += [conversation("a?", "b")]  # nothing to check


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    texts = [message["content"] for row in ROWS + LEARNED for message in row["messages"]]
    return write_start(tmp_path_factory.mktemp("start") / "start", texts=texts)


def settings_of(file, **changes):
    return EvaluationSettings(data=[file], max_tokens=12, **changes)


def mars_model(start):
    """Load the start model and add a mask token, as a MARS stage does."""
    checkpoint, model = read_checkpoint(start), load_model(start)
    mask_id, _ = add_mask_token(model, checkpoint.tokenizer)
    metadata = MarsMetadata(block_size=BLOCK_SIZE, mask_token_id=mask_id)
    return model, checkpoint.with_metadata(metadata)


# --- reading --------------------------------------------------------------------------------------


def test_the_set_holds_prompts_and_labels_of_the_same_rows(tmp_path, start):
    checkpoint = read_checkpoint(start)
    file = write(tmp_path / "a.jsonl", ROWS)
    held_out = read_held_out(settings_of(file, max_items=5), DATA, checkpoint)
    assert len(held_out.items) == len(held_out.rows) == 5
    assert [item.answer for item in held_out.items] == ["1", "2", "3", "4", "5"]
    for item, (input_ids, supervised), row in zip(
        held_out.items, held_out.rows, ROWS, strict=False
    ):
        length = len(item.prompt)
        assert tuple(input_ids[:length]) == item.prompt
        assert not supervised[:length].any()
        response = checkpoint.tokenizer.decode(input_ids[supervised], skip_special_tokens=True)
        assert response.strip() == row["messages"][-1]["content"].strip()


def test_files_are_read_in_order_up_to_the_limit(tmp_path, start):
    files = [
        write(tmp_path / f"{name}.jsonl", rows) for name, rows in [("a", ROWS[:2]), ("b", LEARNED)]
    ]
    settings = EvaluationSettings(data=files, max_items=4)
    held_out = read_held_out(settings, DATA, read_checkpoint(start))
    assert [item.answer for item in held_out.items] == ["1", "2", "9", "8"]
    assert len(held_out.rows) == 4


def test_the_set_is_read_by_the_names_of_columns_that_training_data_has(tmp_path, start):
    file = write(tmp_path / "a.jsonl", [{"chat": row["messages"]} for row in ROWS[:2]])
    data = DATA.model_copy(update={"columns": {"messages": "chat"}})
    assert len(read_held_out(settings_of(file), data, read_checkpoint(start)).rows) == 2


def test_a_bad_row_is_refused_by_its_line(tmp_path, start):
    file = write(tmp_path / "a.jsonl", [ROWS[0], {"messages": []}])
    with pytest.raises(UserError, match=r"a\.jsonl:2: "):
        read_held_out(settings_of(file), DATA, read_checkpoint(start))


# --- scoring --------------------------------------------------------------------------------------


def score_set(start, file, masked):
    settings = settings_of(file, thresholds=(0.02, 0.9))
    if masked:
        model, checkpoint = mars_model(start)
    else:
        model, checkpoint = load_model(start), read_checkpoint(start)
    held_out = read_held_out(settings, DATA, checkpoint)
    workers = Workers("ddp", use_gpu=False, precision="no")
    return score_held_out(held_out, settings, checkpoint, model, workers, step=7)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("held-out") / "a.jsonl", ROWS)


@pytest.fixture(scope="module")
def scored(start, file):
    (score,) = run_group(score_set, 1, start, file, True)
    return score


@torch.no_grad()
def losses_by_depth(start, file):
    """Compute each block separately: its clean past, then its tokens with the labels masked."""
    model, checkpoint = mars_model(start)
    held_out = read_held_out(settings_of(file), DATA, checkpoint)
    losses = [[] for _ in range(BLOCK_SIZE + 1)]
    for input_ids, supervised in held_out.rows:
        clean = torch.tensor(input_ids)
        hidden = clean.masked_fill(torch.tensor(supervised), checkpoint.metadata.mask_token_id)
        logits = model(clean[None]).logits[0]
        for label in np.flatnonzero(supervised[1:]) + 1:
            losses[0].append(float(F.cross_entropy(logits[label - 1], clean[label])))
            begin = (label - 1) // BLOCK_SIZE * BLOCK_SIZE
            depth = int(supervised[begin:label].sum())
            if depth:
                tokens = torch.cat([clean[:begin], hidden[begin:label]])
                noisy = model(tokens[None]).logits[0, -1]
                losses[depth].append(float(F.cross_entropy(noisy, clean[label])))
    return [sum(each) / len(each) for each in losses]


def test_losses_by_depth_equal_those_of_each_block_computed_separately(scored, start, file):
    assert scored.step == 7
    np.testing.assert_allclose(scored.loss_by_depth, losses_by_depth(start, file), rtol=1e-5)


def assert_same_score(ours, expected):
    np.testing.assert_allclose(ours.loss_by_depth, expected.loss_by_depth, rtol=1e-6)
    assert ours.thresholds == expected.thresholds


def test_thresholds_are_decoded_in_falling_order_from_1(scored):
    assert [each.threshold for each in scored.thresholds] == [1.0, 0.9, 0.02]
    assert scored.one_token.tokens_per_forward == 1.0
    assert 1.0 <= scored.thresholds[1].tokens_per_forward < scored.thresholds[2].tokens_per_forward
    assert [each.accuracy for each in scored.thresholds] == [0.0] * 3  # the model is untrained


def test_scores_do_not_depend_on_the_number_of_workers(scored, start, file):
    for score in run_group(score_set, 2, start, file, True):
        assert_same_score(score, scored)


def test_a_worker_without_a_conversation_has_the_scores_of_all(start, tmp_path):
    file = write(tmp_path / "a.jsonl", ROWS[:1])
    (expected,) = run_group(score_set, 1, start, file, True)
    for score in run_group(score_set, 2, start, file, True):
        assert_same_score(score, expected)


def test_a_model_without_masks_is_decoded_one_token_at_a_time(scored, start, file):
    (score,) = run_group(score_set, 1, start, file, False)
    assert [each.threshold for each in score.thresholds] == [1.0]
    (loss,) = score.loss_by_depth  # the mask token takes a little of the probability
    assert 0.999 * scored.loss_by_depth[0] < loss < scored.loss_by_depth[0]


# --- warnings -------------------------------------------------------------------------------------


def score_of(accuracy=0.5, loss=1.0, step=40):
    thresholds = [ThresholdScore(1.0, accuracy, 1.0), ThresholdScore(0.7, 0.0, 2.0)]
    return HeldOutScore(step, [loss, 9.0], thresholds)


LIMITS = EvaluationSettings(data=["unused"], max_accuracy_drop=0.25, max_loss_rise=0.5)


ACCURACY_WARNING = (
    "step 40: one-token accuracy is 25.0%, 31.2 points below the 56.2% that the stage began "
    "with; lower learning_rate or raise ar_weight"
)
LOSS_WARNING = (
    "step 40: the AR loss on held-out data is 1.7500 nats, 0.7500 above that of the model that "
    "the stage began with; lower learning_rate or raise ar_weight"
)


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({"accuracy": 0.25}, [ACCURACY_WARNING]),
        ({"accuracy": 0.5625, "loss": 1.75}, [LOSS_WARNING]),
        ({"accuracy": 0.25, "loss": 1.75}, [ACCURACY_WARNING, LOSS_WARNING]),
    ],
)
def test_lower_accuracy_and_higher_loss_give_warnings(changes, warnings):
    assert warnings_of(score_of(**changes), score_of(accuracy=0.5625), LIMITS) == warnings


@pytest.mark.parametrize(
    ("score", "start"),
    [
        (score_of(), score_of()),
        (score_of(accuracy=0.25, loss=1.5), score_of()),  # exactly the limits
        (score_of(accuracy=1.0, loss=0.1), score_of()),
        (score_of(accuracy=None), score_of(accuracy=None)),
    ],
)
def test_changes_within_the_limits_give_no_warning(score, start):
    assert warnings_of(score, start, LIMITS) == []


# --- during training ------------------------------------------------------------------------------

STAGE = {"block_size": BLOCK_SIZE, "batch_size": 7, "micro_batch_size": 7, "epochs": 1000}


@pytest.fixture(scope="module")
def data(tmp_path_factory, start):
    """Write a store of conversations to be memorised."""
    path = tmp_path_factory.mktemp("learned")
    file = write(path / "learned.jsonl", LEARNED)
    rows = read_held_out(settings_of(file), DATA, read_checkpoint(start)).rows
    with TokenStoreWriter(path / "data") as writer:
        writer.append(
            np.stack([np.zeros(len(rows), np.int64), np.arange(len(rows))], axis=1),
            np.array([len(ids) for ids, _ in rows], np.int32),
            np.concatenate([ids for ids, _ in rows]).astype(np.int32),
            np.concatenate([supervised for _, supervised in rows]),
        )
        writer.finish()
    return path


@pytest.fixture
def job_of(tmp_path, start, data):
    def build(name, *, steps, evaluation=(), stage=(), **rest):
        evaluation = {"every_steps": 2, "max_tokens": 12, "thresholds": [0.7], **dict(evaluation)}
        files = {"data": [str(data / "learned.jsonl")]}
        job = build_job(
            tmp_path / name,
            start,
            data / "data",
            stage={**STAGE, "max_steps": steps, **dict(stage)},
            evaluation=evaluation | files,
            **rest,
        )
        settings = job.recipe.evaluation
        return replace(job, held_out=read_held_out(settings, DATA, read_checkpoint(start)))

    return build


def test_scores_follow_what_the_model_learns(job_of):
    stage = {"learning_rate": 2e-2, "warmup_ratio": 0.1}
    outcome = run_stage(job_of("run", steps=70, stage=stage, evaluation={"every_steps": 50}))
    first, middle, last = outcome.history.scores
    assert (first.step, middle.step, last.step) == (0, 50, 70)
    assert first.one_token.accuracy == 0.0
    assert [each.accuracy for each in last.thresholds] == [1.0, 1.0]
    assert last.thresholds[1].tokens_per_forward > 1.5
    assert last.loss_by_depth[0] < 0.1 < 3 < first.loss_by_depth[0]
    assert outcome.reporter.warned == []
    metrics = [m for m in outcome.reporter.reported if "eval/accuracy_1" in m]
    assert metrics == [{"step": score.step, **score.metrics()} for score in outcome.history.scores]
    assert outcome.reporter.said[-1] == (
        f"stage mars, step 70, held-out: AR loss {last.loss_by_depth[0]:.4f}; "
        f"τ=1: 100.0% correct, 1.00 tokens/forward; "
        f"τ=0.7: 100.0% correct, {last.thresholds[1].tokens_per_forward:.2f} tokens/forward"
    )


def test_scoring_does_not_change_training(job_of):
    scored = run_stage(job_of("scored", steps=3))
    job = job_of("plain", steps=3)
    plain = run_stage(replace(job, held_out=None))
    assert [score.step for score in scored.history.scores] == [0, 2, 3]
    assert plain.history.scores == []
    assert scored.history.steps == plain.history.steps
    assert all(torch.equal(scored.weights[k], v) for k, v in plain.weights.items())


def test_a_resumed_run_scores_each_step_once(job_of):
    straight = run_stage(job_of("straight", steps=4))
    run_stage(job_of("resumed", steps=4), stop_at=2)
    resumed = run_stage(job_of("resumed", steps=4))
    assert [score.step for score in resumed.history.scores] == [0, 2, 4]
    assert resumed.history == straight.history
    assert [m["step"] for m in resumed.reporter.reported if "eval/accuracy_1" in m] == [4]


def test_workers_share_the_scoring_whether_the_model_is_sharded_or_not(job_of):
    one = run_stage(job_of("1", steps=2)).history.scores
    for strategy in ("ddp", "fsdp2"):
        two = run_stage(job_of(strategy, steps=2, workers=2, strategy=strategy)).history.scores
        for ours, expected in zip(two, one, strict=True):
            np.testing.assert_allclose(ours.loss_by_depth, expected.loss_by_depth, atol=1e-5)
            assert ours.thresholds == expected.thresholds


def test_a_run_that_falls_behind_its_start_gives_warnings(job_of):
    outcome = run_stage(job_of("run", steps=4, stage={"learning_rate": 3.0}))
    assert outcome.reporter.warned
    for warning in outcome.reporter.warned:
        assert "stage mars, step " in warning
        assert "the AR loss on held-out data is " in warning


def test_scores_of_broken_weights_are_recorded(job_of):
    outcome = run_stage(
        job_of("run", steps=2, stage={"learning_rate": 1e30}, max_nonfinite_steps=9)
    )
    assert outcome.finished
    assert not math.isfinite(outcome.history.scores[-1].loss_by_depth[0])
