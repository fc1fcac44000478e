"""Responses that a model writes to prompts of a token store, compared with a plain loop."""

import json
import shutil

import numpy as np
import pytest
import torch

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_train.data.token_store import TokenStoreWriter, temperatures
from mars_train.recipe import GenerateStage
from mars_train.stage.responses import Responder, prompt_of
from responses import generate_responses
from stage_runs import write_start

MAX_LENGTH = 20
NUM_ROWS = 6
ALL_ROWS = np.arange(NUM_ROWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("model") / "model", initializer_range=0.4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations of one turn or two."""
    rng = np.random.default_rng(0)
    lengths = np.array([10, 12, 9, 20, 15, 8], np.int32)
    supervised = [np.arange(n) >= 5 for n in lengths]
    supervised[1][7:9] = False  # a second turn begins at 9
    supervised[3][:19] = False  # the prompt leaves room for one token
    with TokenStoreWriter(tmp_path_factory.mktemp("data") / "data") as writer:
        writer.append(
            keys=np.stack([np.zeros(NUM_ROWS, np.int64), np.arange(NUM_ROWS)], axis=1),
            lengths=lengths,
            tokens=rng.integers(3, 250, lengths.sum()).astype(np.int32),
            supervised=np.concatenate(supervised),
        )
        return writer.finish()


def stage(**settings):
    return GenerateStage.model_validate({"objective": "generate", "max_num_seqs": 3, **settings})


def mixed(model, data, rows, choices, **settings):
    """Return responses, and the temperature of each by comparison with those of one alone."""
    found = responder_of(model, temperature=choices, **settings).respond(data, rows)
    alone = {t: responder_of(model, temperature=t, **settings).respond(data, rows) for t in choices}
    return found, [
        [t for t in choices if alone[t][place] == response] for place, response in enumerate(found)
    ]


def responder_of(model, **settings):
    return Responder(read_checkpoint(model), stage(**settings), MAX_LENGTH)


@torch.no_grad()
def greedy(model, prompt, most, ends, banned=()):
    """Return the likeliest tokens one after the other, up to an end token."""
    tokens = list(prompt)
    while len(tokens) < most and (len(tokens) == len(prompt) or tokens[-1] not in ends):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        logits[list(banned)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def with_end(model, path, token):
    """Copy a model and give it another end token beside its own."""
    shutil.copytree(model, path)
    config = path / "generation_config.json"
    content = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**content, "eos_token_id": [token]}))
    return path


def test_prompts_end_before_the_last_supervised_turn(data):
    assert [len(prompt_of(data, row)) for row in range(NUM_ROWS)] == [5, 9, 5, 19, 5, 5]
    for row in range(NUM_ROWS):
        prompt = prompt_of(data, row)
        assert prompt.tolist() == data[row][0][: len(prompt)].tolist()


@pytest.fixture
def twice(tmp_path):
    """One conversation twice, which is supervised from its beginning."""
    with TokenStoreWriter(tmp_path / "twice") as writer:
        writer.append(
            keys=np.stack([np.zeros(2, np.int64), np.arange(2)], axis=1),
            lengths=np.array([4, 4], np.int32),
            tokens=np.tile(np.arange(5, 9, dtype=np.int32), 2),
            supervised=np.ones(8, bool),
        )
        return writer.finish()


def test_rows_of_one_prompt_draw_their_own_responses(model, twice):
    one, other = responder_of(model, temperature=1.0).respond(twice, np.arange(2))
    assert one != other


@pytest.mark.parametrize("max_tokens", [None, 6])
def test_responses_are_the_models_own_up_to_its_end_token(model, data, tmp_path, max_tokens):
    plain = load_model(model)
    special = read_checkpoint(model).special
    first = greedy(plain, prompt_of(data, 0), MAX_LENGTH, special.eos, special.never_emitted)
    ending = with_end(model, tmp_path / "ending", first[3])
    special = read_checkpoint(ending).special
    settings = stage(max_tokens=max_tokens)
    store = generate_responses(ending, data, settings, MAX_LENGTH, tmp_path / "responses")
    assert len(store) == NUM_ROWS
    ended = 0
    for row in range(NUM_ROWS):
        prompt = prompt_of(data, row).tolist()
        most = min(MAX_LENGTH, len(prompt) + (max_tokens or MAX_LENGTH))
        expected = greedy(plain, prompt, most, special.eos, special.never_emitted)
        ids, supervised = store[row]
        assert ids.tolist() == prompt + expected
        assert supervised.tolist() == [False] * len(prompt) + [True] * len(expected)
        ended += expected[-1] in special.eos
    assert 1 <= ended < NUM_ROWS


def test_drawn_responses_depend_on_seed_and_row_alone(model, data):
    responder = responder_of(model, temperature=1.0)
    whole = responder.respond(data, ALL_ROWS)
    one_by_one = [responder.respond(data, ALL_ROWS[[row]])[0] for row in (4, 1)]
    assert one_by_one == [whole[4], whole[1]]
    some = responder_of(model, temperature=1.0).respond(data, ALL_ROWS[[1, 4]])
    assert some == [whole[1], whole[4]]
    assert responder_of(model, temperature=1.0, seed=1).respond(data, ALL_ROWS) != whole
    assert responder_of(model).respond(data, ALL_ROWS) != whole


def test_each_response_has_one_of_the_temperatures_drawn_for_its_row(model, data):
    rows, choices = np.array([0, 1, 2, 4, 5]), [0.0, 1.0]  # row 3 has room for one token
    found, candidates = mixed(model, data, rows, choices)
    assert all(len(each) == 1 for each in candidates)
    drawn = [each[0] for each in candidates]
    assert drawn == temperatures(rows, 0, choices).tolist()
    assert {*drawn} == {*choices}
    backwards = responder_of(model, temperature=choices).respond(data, rows[::-1])
    assert backwards == found[::-1]
    _, others = mixed(model, data, rows, choices, seed=1)
    assert others != candidates


def test_a_model_that_knows_masks_writes_what_it_writes_one_by_one(model, data, tmp_path):
    plain, tokenizer = load_model(model), read_checkpoint(model).tokenizer
    mask_id, _ = add_mask_token(plain, tokenizer)
    metadata = MarsMetadata(block_size=4, mask_token_id=mask_id, provenance={})
    save_checkpoint(tmp_path / "mars", plain, tokenizer, metadata)
    ours, theirs = (responder_of(p, temperature=0.7) for p in (tmp_path / "mars", model))
    assert [each._setting.mode for each in (ours, theirs)] == [Mode.EXACT, Mode.AR]
    assert ours.respond(data, ALL_ROWS) == theirs.respond(data, ALL_ROWS)


def test_a_model_with_broken_weights_is_refused_and_leaves_nothing(model, data, tmp_path):
    broken = load_model(model)
    broken.model.norm.weight.data[:] = torch.nan
    tokenizer = read_checkpoint(model).tokenizer
    save_checkpoint(tmp_path / "broken", broken, tokenizer, metadata=None)
    output = tmp_path / "responses"
    with pytest.raises(UserError, match=r"stages.generate: the model cannot respond to row \d"):
        generate_responses(tmp_path / "broken", data, stage(), MAX_LENGTH, output)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_prompt_without_room_for_a_response_is_refused(model, data):
    responder = Responder(read_checkpoint(model), stage(), 19)
    with pytest.raises(UserError, match="19 leaves no room behind the prompt of row 3; raise it"):
        responder.respond(data, ALL_ROWS)


@pytest.mark.parametrize(("most", "rows"), [(2, [0, 3]), (4, [0, 1, 3, 4]), (9, list(range(6)))])
def test_a_limited_number_of_responses_is_spread_over_the_data(model, data, tmp_path, most, rows):
    output = tmp_path / "responses"
    store = generate_responses(model, data, stage(max_responses=most), MAX_LENGTH, output)
    starts = [store[row][0][:5].tolist() for row in range(len(store))]
    assert starts == [data[row][0][:5].tolist() for row in rows]
