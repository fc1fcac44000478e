import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_platform.method.rules import visibility
from mars_train.method.layout import PADDING_DOCUMENT, collate, lay_out, pack
from mars_train.method.objective import Objective

MASK, PAD = 60, 0


@dataclass
class Sequence:
    ids: np.ndarray
    supervised: np.ndarray
    block_size: int
    offset: int = 0

    def layout(self):
        return lay_out(self.ids, self.supervised, self.block_size, MASK, self.offset)


def sequence(num_prompt, num_response, block_size, offset=0):
    length = num_prompt + num_response
    return Sequence(np.arange(10, 10 + length), np.arange(length) >= num_prompt, block_size, offset)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # far from uniform predictions
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def plain_model(model):
    """Copy the model with eager attention, for the plain computation below."""
    other = Qwen2ForCausalLM._from_config(
        copy.deepcopy(model.config), attn_implementation="eager", dtype=torch.float32
    )
    other.load_state_dict(model.state_dict())
    return other.eval()


# --- single sequences ----------------------------------------------------------------------------

# The example of the module's docstring: slots 0-6 are the clean stream (c0-c6), slots 7-10 the
# noisy one (n3-n6). Rows are queries and columns keys.
EXAMPLE_VISIBILITY = """
    1000 000  0000
    1100 000  0000
    1110 000  0000
    1111 000  0000
    1111 100  0000
    1111 110  0000
    1111 111  0000

    1110 000  1000
    1111 000  0100
    1111 000  0110
    1111 000  0111
"""


def matrix(text):
    rows = [line.replace(" ", "") for line in text.splitlines() if line.strip()]
    return [[cell == "1" for cell in row] for row in rows]


def test_the_example_is_laid_out_as_drawn():
    layout = sequence(3, 5, 4).layout()
    assert layout.tokens.tolist() == [*range(10, 17), *[MASK] * 4]
    assert layout.position_ids.tolist() == [*range(7), 3, 4, 5, 6]
    assert layout.noisy.tolist() == [False] * 7 + [True] * 4
    assert layout.labels.tolist() == [13, 14, 15, 16, 17]
    assert layout.clean_sources.tolist() == [2, 3, 4, 5, 6]
    assert layout.noisy_sources.tolist() == [2, 7, 8, 9, 10]
    assert layout.previous.tolist() == [12, 13, 14, 15, 16]
    assert layout.depths.tolist() == [0, 1, 1, 2, 3]
    batch = collate([[layout]], PAD)
    visible = visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy)
    assert visible[0].tolist() == matrix(EXAMPLE_VISIBILITY)


@pytest.mark.parametrize(
    ("length", "labels", "block_size", "offset", "copied", "depths"),
    [
        # The labels are predicted one position earlier: 6 at 5 without a mask, 7 and 8 at 6 and 7.
        (9, [6, 7, 8], 4, 0, {6: MASK, 7: MASK}, [0, 1, 2]),
        # Label 6 is predicted at 5, which sees the mask at 2 and the clean tokens behind it.
        (8, [2, 6], 8, 0, {2: MASK, 3: 13, 4: 14, 5: 15}, [0, 1]),
        # Label 3 is predicted at 2. Behind the mask at 3 the block has no label to predict.
        (12, [2, 3, 9], 4, 0, {2: MASK}, [0, 1, 0]),
        # Position p lies in block (p + 1) // 4, so positions 3 to 6 are one block.
        (8, [3, 4, 5, 6, 7], 4, 1, {3: MASK, 4: MASK, 5: MASK, 6: MASK}, [0, 1, 2, 3, 4]),
        # The first token has no predecessor to predict it.
        (4, [0, 1, 2, 3], 2, 0, {0: MASK, 1: MASK, 2: MASK}, [1, 2, 1]),
    ],
    ids=["prompt", "gap between labels", "unread masks", "offset", "first token"],
)
def test_a_block_is_copied_from_its_first_mask_to_its_last_source(
    length, labels, block_size, offset, copied, depths
):
    supervised = np.isin(np.arange(length), labels)
    layout = lay_out(np.arange(10, 10 + length), supervised, block_size, MASK, offset)
    num_clean = max(labels)
    assert layout.position_ids.tolist() == [*range(num_clean), *copied]
    assert layout.tokens.tolist() == [*range(10, 10 + num_clean), *copied.values()]
    assert layout.labels.tolist() == [10 + label for label in labels if label > 0]
    assert layout.depths.tolist() == depths
    slots = dict(zip(copied, range(num_clean, num_clean + len(copied)), strict=True))
    assert layout.noisy_sources.tolist() == [
        slots[source] if depth else source
        for source, depth in zip(layout.clean_sources.tolist(), depths, strict=True)
    ]


def test_plain_ar_training_has_the_clean_stream_alone():
    layout = lay_out(np.arange(10, 18), np.arange(8) >= 3, None, MASK)
    assert layout.tokens.tolist() == [*range(10, 17)]
    assert not layout.noisy.any()
    assert layout.noisy_sources.tolist() == layout.clean_sources.tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_sequence_without_labels_takes_one_slot(block_size):
    layout = lay_out(np.arange(10, 18), np.zeros(8, bool), block_size, MASK)
    assert layout.tokens.tolist() == [10]
    assert len(layout.labels) == len(layout.depths) == 0


# --- the loss against a full computation ---------------------------------------------------------


def random_sequence(rng, block_size):
    length = int(rng.integers(2, 34))
    supervised = np.zeros(length, bool)
    for _ in range(rng.integers(1, 4)):  # turns
        begin = int(rng.integers(1, length))
        supervised[begin : begin + int(rng.integers(1, 12))] = True
    ids = rng.integers(1, MASK, length)
    return Sequence(ids, supervised, block_size, int(rng.integers(block_size)))


def random_sequences(block_size, num=7):
    rng = np.random.default_rng(block_size)
    return [random_sequence(rng, block_size) for _ in range(num)]


def sees(query, key, length, block):
    """Apply the paper's rule to slots 0..length-1 (clean) and length..2*length-1 (noisy)."""
    query_noisy, key_noisy = query >= length, key >= length
    i, j = query % length, key % length
    if not query_noisy:
        return not key_noisy and j <= i
    if key_noisy:
        return block(i) == block(j) and j <= i
    return block(j) < block(i)


def naive_logits(model, item):
    """Return the logits of the clean and the noisy stream, [length, vocabulary] each."""
    length = len(item.ids)
    noisy = [MASK if hide else int(t) for t, hide in zip(item.ids, item.supervised, strict=True)]
    mask = torch.full((2 * length, 2 * length), torch.finfo(torch.float32).min)
    for query in range(2 * length):
        for key in range(2 * length):
            if sees(query, key, length, lambda p: (p + item.offset) // item.block_size):
                mask[query, key] = 0.0
    output = model(
        input_ids=torch.tensor([item.ids.tolist() + noisy]),
        position_ids=torch.tensor([[*range(length), *range(length)]]),
        attention_mask=mask[None, None],
        use_cache=False,
    )
    return output.logits[0, :length], output.logits[0, length:]


def naive_sums(model, items):
    sums = {"clean": torch.zeros(()), "noisy": torch.zeros(())}
    for item in items:
        clean, noisy = naive_logits(model, item)
        for t in range(1, len(item.ids)):
            if item.supervised[t]:
                label = torch.tensor(int(item.ids[t]))
                sums["clean"] = sums["clean"] + F.cross_entropy(clean[t - 1], label)
                sums["noisy"] = sums["noisy"] + F.cross_entropy(noisy[t - 1], label)
    return sums


def packed(items, row_slots=96):
    return collate(pack([item.layout() for item in items], row_slots), PAD)


def assert_gradients_equal(model, plain_model):
    pairs = zip(model.named_parameters(), plain_model.named_parameters(), strict=True)
    for (name, parameter), (_, plain) in pairs:
        scale = float(plain.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            parameter.grad,
            plain.grad,
            rtol=1e-3,
            atol=1e-4 * max(scale, 1e-2),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_loss_and_gradients_equal_those_of_two_full_streams(model, plain_model, block_size):
    items = random_sequences(block_size)
    ends = [int(np.flatnonzero(item.supervised)[0]) + item.offset for item in items]
    assert any(end % block_size for end in ends)  # a prompt ends inside a block
    batch = packed(items)
    assert batch.tokens.shape[0] > 1
    assert batch.documents.max() >= 1  # a row holds more than one sequence
    assert (batch.documents == PADDING_DOCUMENT).any()
    model.zero_grad()
    plain_model.zero_grad()
    ours, expected = Objective(model, masked=True)(batch), naive_sums(plain_model, items)
    (ours.noisy + 0.7 * ours.clean).backward()
    (expected["noisy"] + 0.7 * expected["clean"]).backward()
    torch.testing.assert_close(ours.clean, expected["clean"], rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.noisy, expected["noisy"], rtol=1e-5, atol=0)
    num_labels = sum(int(item.supervised[1:].sum()) for item in items)
    assert batch.num_clean == batch.num_noisy == num_labels
    assert abs(float(ours.noisy.detach() - ours.clean.detach())) > 1.0  # the two terms differ
    assert_gradients_equal(model, plain_model)


def test_plain_ar_loss_equals_the_clean_term(model, plain_model):
    items = random_sequences(4)
    layouts = [lay_out(item.ids, item.supervised, None, MASK) for item in items]
    with torch.no_grad():
        ours = Objective(model, masked=False)(collate(pack(layouts, 64), PAD))
        expected = naive_sums(plain_model, items)
    torch.testing.assert_close(ours.clean, expected["clean"], rtol=1e-4, atol=0)
    assert float(ours.noisy) == 0.0


# --- training sees what decoding sees -------------------------------------------------------------


def noisy_logits(model, layout):
    """Return the logits of a layout's noisy slots, by position."""
    batch = collate([[layout]], PAD)
    hidden = Objective(model, masked=True)._hidden_states(batch)
    logits = model.get_output_embeddings()(hidden)
    slots = np.flatnonzero(layout.noisy)
    return {int(layout.position_ids[slot]): logits[slot] for slot in slots}


@pytest.mark.parametrize(("block_size", "offset"), [(4, 0), (4, 3), (8, 0), (8, 5)])
def test_noisy_logits_and_depths_equal_those_of_decoding(model, block_size, offset):
    item = sequence(9, 20, block_size, offset)
    layout = item.layout()
    sources = layout.position_ids[layout.noisy_sources].tolist()
    depth_at = dict(zip(sources, layout.depths.tolist(), strict=True))
    with torch.no_grad():
        ours = noisy_logits(model, layout)
        for position, logits in ours.items():
            start = max(position - (position + offset) % block_size, 0)
            known = min(max(start, 9), position + 1)  # the prompt has 9 tokens
            num_masks = position + 1 - known
            context = [*item.ids[:known].tolist(), *[MASK] * num_masks]
            expected = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert depth_at[position] == num_masks
    assert {9, 16, 24} < set(ours)
    assert {position for position, depth in depth_at.items() if depth} == set(ours)


# --- packing --------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=25),
    row_slots=st.integers(1, 90),
    block_size=st.sampled_from([None, 1, 2, 4, 16]),
)
@settings(max_examples=100)
def test_pack_keeps_every_layout_and_the_limit_of_a_row(lengths, row_slots, block_size):
    layouts = [sequence(a, b, block_size).layout() for a, b in lengths]
    rows = pack(layouts, row_slots)
    assert sorted(id(layout) for row in rows for layout in row) == sorted(map(id, layouts))
    for row in rows:
        assert row
        longest = max(len(layout.tokens) for layout in layouts)
        assert sum(len(layout.tokens) for layout in row) <= max(row_slots, longest)


def packed_sizes(sizes, row_slots, multiple_of=1):
    layouts = [lay_out(np.arange(n + 1), np.ones(n + 1, bool), None, MASK) for n in sizes]
    rows = pack(layouts, row_slots, multiple_of)
    return [[len(layout.tokens) for layout in row] for row in rows]


@pytest.mark.parametrize(
    ("sizes", "row_slots", "rows"),
    [
        ([3, 6, 4, 7], 10, [[7, 3], [6, 4]]),
        ([6, 2, 3] * 3, 16, [[6, 3, 2]] * 3),  # rather than rows of 16, 15 and 2
        ([7, 3] * 4, 16, [[7, 3]] * 4),  # three rows would be 14, 13 and 13
        ([5] * 8, 20, [[5]] * 8),
        ([20, 4, 6, 10], 8, [[20], [10, 6, 4]]),
    ],
    ids=["full", "even", "less padding", "shortest for equal padding", "long layout"],
)
def test_pack_chooses_the_rows_of_least_padding(sizes, row_slots, rows):
    assert packed_sizes(sizes, row_slots) == rows


def test_pack_accounts_for_the_rounding_of_rows():
    assert len(packed_sizes([9] * 6, 32, multiple_of=1)) == 6
    assert len(packed_sizes([9] * 6, 32, multiple_of=32)) == 2


def test_sources_of_a_batch_point_into_their_own_row_and_document():
    rows = [[sequence(3, 5, 4).layout(), sequence(2, 2, 4).layout()], [sequence(6, 3, 4).layout()]]
    batch = collate(rows, PAD)
    tokens, clean = batch.tokens.flatten(), batch.clean_sources
    # clean tokens count upwards, so a label is its source's token plus one
    assert (tokens[clean] + 1).tolist() == batch.labels.tolist()
    deep = batch.depths > 0
    noisy = batch.noisy.flatten()[batch.noisy_sources]
    assert noisy.tolist() == deep.tolist()
    positions, documents = batch.position_ids.flatten(), batch.documents.flatten()
    assert torch.equal(positions[batch.noisy_sources], positions[clean])
    assert torch.equal(documents[batch.noisy_sources], documents[clean])


def test_padding_sees_and_is_seen_by_no_sequence():
    batch = collate([[sequence(3, 5, 4).layout()], [sequence(1, 1, 4).layout()]], PAD)
    assert batch.documents[0].tolist() == [0] * 11
    assert batch.documents[1].tolist() == [0] + [PADDING_DOCUMENT] * 10
    assert batch.tokens[1, 1:].tolist() == [PAD] * 10
    visible = visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy)
    assert not visible[1, :1, 1:].any()
    assert not visible[1, 1:, :1].any()
    assert visible.any(dim=-1).all()  # a query without keys would give NaN


def test_rows_are_rounded_up_to_a_multiple():
    layouts = [sequence(3, 5, 4).layout(), sequence(6, 3, 4).layout()]
    batch = collate([[layout] for layout in layouts], PAD, multiple_of=8)
    assert batch.tokens.shape == (2, 16)
    assert batch.documents[0].tolist() == [0] * 11 + [PADDING_DOCUMENT] * 5
    assert batch.clean_sources.tolist() == [2, 3, 4, 5, 6, 16 + 5, 16 + 6, 16 + 7]
