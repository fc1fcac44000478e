"""Options of the loss behind masks, compared with one plain forward pass for each prediction."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

import mars_train.method.objective as objective_module
from decoding.adapters import with_random_head
from mars_platform.checkpoint.adapter.draft_head import attach_draft_head, draft_head_of
from mars_platform.checkpoint.metadata import DraftHeadSettings
from mars_train.method.layout import collate, lay_out, pack
from mars_train.method.objective import MaskLoss, Objective

MASK, PAD, VOCABULARY = 60, 0, 64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # far from uniform predictions
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


@dataclass
class Sequence:
    ids: list[int]
    supervised: list[bool]
    block_size: int
    offset: int
    clean_loss: bool = True

    def begin_of_block(self, position):
        block = (position + self.offset) // self.block_size
        return max(0, block * self.block_size - self.offset)


def sequences(clean_loss=True):
    """Short conversations of one or two turns, in blocks of different sizes."""
    rng = np.random.default_rng(3)
    found = []
    for length, turns, block_size in [
        (13, [(4, 13)], 4),
        (11, [(2, 5), (7, 11)], 8),
        (9, [(3, 9)], 3),
    ]:
        supervised = [any(a <= i < b for a, b in turns) for i in range(length)]
        ids = rng.integers(1, MASK, length).tolist()
        found.append(
            Sequence(ids, supervised, block_size, int(rng.integers(block_size)), clean_loss)
        )
    return found


def batch_of(items):
    layouts = [
        lay_out(
            np.array(item.ids),
            np.array(item.supervised),
            item.block_size,
            MASK,
            item.offset,
            clean_loss=item.clean_loss,
        )
        for item in items
    ]
    return collate(pack(layouts, 64), PAD)


class Naive:
    """The loss of one conversation, from a plain forward pass over each prediction's own prefix."""

    def __init__(self, model, item, loss, plain_share):
        self.model, self.item, self.loss, self.plain_share = model, item, loss, plain_share

    def last(self, tokens):
        """Return the logits behind some tokens."""
        return self.model(torch.tensor([tokens])).logits[0, -1]

    def added(self, tokens, previous):
        """Return what the draft head adds to the logits behind some tokens; 0 without a head."""
        if (head := draft_head_of(self.model)) is None:
            return 0.0
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[0, -1:]
        rows = head.previous[previous] * torch.sigmoid(head.gate @ hidden[0])
        return head.following @ rows

    def hidden_token(self, position):
        return MASK if self.item.supervised[position] else self.item.ids[position]

    def sums(self):
        clean = noisy = torch.zeros(())
        item, loss = self.item, self.loss
        for position in np.flatnonzero(item.supervised[1:]) + 1:
            label = torch.tensor(item.ids[position])
            clean_logits = self.last(item.ids[:position])
            if item.clean_loss:
                clean = clean + F.cross_entropy(clean_logits, label)
            begin = item.begin_of_block(position - 1)
            masks = [self.hidden_token(p) for p in range(begin, position)]
            depth = masks.count(MASK)
            if depth == 0:
                if item.clean_loss:
                    noisy = noisy + F.cross_entropy(clean_logits, label)
                continue
            ours = self.last(item.ids[:begin] + masks)
            share, teacher = loss.teacher_weight, clean_logits.detach()
            added = self.added(item.ids[:begin] + masks, item.ids[position - 1])
            for part, logits in [(1 - self.plain_share, ours + added), (self.plain_share, ours)]:
                if loss.target == "soft":
                    p = teacher.softmax(-1)
                    taught = (p * (p.log() - logits.log_softmax(-1))).sum()
                else:
                    taught = F.cross_entropy(logits, teacher.argmax())
                value = (1 - share) * F.cross_entropy(logits, label) + share * taught
                noisy = noisy + part * value
        return clean, noisy


def naive_sums(model, items, loss, plain_share=0.0):
    pairs = [Naive(model, item, loss, plain_share).sums() for item in items]
    return sum(clean for clean, _ in pairs), sum(noisy for _, noisy in pairs)


LOSSES = {
    "none": MaskLoss(),
    "soft": MaskLoss(teacher_weight=0.4),
    "soft alone": MaskLoss(teacher_weight=1.0),
    "argmax": MaskLoss(teacher_weight=0.4, target="argmax"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clean_loss", [True, False])
def test_losses_and_gradients_equal_a_pass_for_each_prediction(model, name, clean_loss):
    loss = LOSSES[name]
    items = sequences() + (sequences(clean_loss=False) if not clean_loss else [])
    batch, other = batch_of(items), copy.deepcopy(model)
    assert {0, 1, 2, 3, 4} <= set(batch.depths.tolist())
    objective = Objective(model, masked=True, mask_loss=loss)
    model.zero_grad()
    ours, expected = objective(batch), naive_sums(other, items, loss)
    torch.testing.assert_close(torch.stack(list(ours)), torch.stack(expected), rtol=1e-5, atol=0)
    (ours.noisy + 0.7 * ours.clean).backward()
    (expected[1] + 0.7 * expected[0]).backward()
    for (key, ours_of), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        assert scale > 0, key
        torch.testing.assert_close(ours_of.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["soft", "argmax"])
def test_logits_in_memory_are_bounded_forward_and_backward(model, name, monkeypatch):
    batch = batch_of(sequences())
    objective = Objective(model, masked=True, mask_loss=LOSSES[name])

    def gradient():
        model.zero_grad()
        sums = objective(batch)
        (sums.noisy + sums.clean).backward()
        return sums.noisy.detach(), model.lm_head.weight.grad.clone()

    expected, seen = gradient(), []
    monkeypatch.setattr(objective_module, "MAX_LOGITS", 4 * VOCABULARY)
    handle = model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].numel()))
    ours = gradient()
    handle.remove()
    assert max(seen) <= 4 * VOCABULARY
    assert len(seen) > 20
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_draft_head_adds_to_logits_is_bounded_with_them(model, monkeypatch):
    headed = with_random_head(copy.deepcopy(model), DraftHeadSettings(rank=3))
    objective = Objective(headed, masked=True, mask_loss=LOSSES["soft"])
    expected, seen = objective(batch_of(sequences()), plain_share=0.3), []
    monkeypatch.setattr(objective_module, "MAX_LOGITS", 8 * VOCABULARY)
    draft_head_of(headed).register_forward_hook(lambda *call: seen.append(call[2].numel()))
    ours = objective(batch_of(sequences()), plain_share=0.3)
    assert max(seen) == 2 * VOCABULARY  # beside two tables of logits, and a sum
    torch.testing.assert_close(torch.stack(list(ours)), torch.stack(list(expected)))


@pytest.mark.parametrize(("name", "plain_share"), [("none", 0.3), ("soft", 0.0), ("argmax", 0.3)])
def test_a_draft_head_knows_the_token_before_the_label(model, name, plain_share):
    ours = with_random_head(copy.deepcopy(model), DraftHeadSettings(rank=3))
    theirs, loss = copy.deepcopy(ours), LOSSES[name]
    objective = Objective(ours, masked=True, mask_loss=loss)
    sums = objective(batch_of(sequences()), plain_share=plain_share)
    expected = naive_sums(theirs, sequences(), loss, plain_share)
    torch.testing.assert_close(torch.stack(list(sums)), torch.stack(expected), rtol=1e-5, atol=0)
    sums.noisy.backward()
    expected[1].backward()
    for (key, each), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        scale = float(other.grad.abs().max())
        torch.testing.assert_close(each.grad, other.grad, rtol=1e-3, atol=1e-4 * scale, msg=key)


def test_a_new_draft_head_leaves_losses_as_they_are(model):
    headed, batch = copy.deepcopy(model), batch_of(sequences())
    attach_draft_head(headed, DraftHeadSettings(rank=3))
    for loss in LOSSES.values():
        ours, theirs = (Objective(m, masked=True, mask_loss=loss)(batch) for m in (headed, model))
        assert torch.equal(torch.stack(ours), torch.stack(theirs))


def test_a_batch_without_labels_gives_zeros(model):
    loss = MaskLoss(teacher_weight=0.5)
    batch = collate([[lay_out(np.arange(1, 9), np.zeros(8, bool), 4, MASK)]], PAD)
    model.zero_grad()
    sums = Objective(model, masked=True, mask_loss=loss)(batch)
    (sums.noisy + sums.clean).backward()
    assert (float(sums.clean.detach()), float(sums.noisy.detach())) == (0, 0)
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_the_loss_compiles_as_one_graph_of_any_shape():
    student, teacher = torch.randn(2, 9, VOCABULARY)
    labels = torch.arange(9)
    eager = objective_module._taught_losses
    compiled = torch.compile(eager, dynamic=True, fullgraph=True, backend="aot_eager")
    for soft in (True, False):
        for num in (9, 5):
            given = {"labels": labels[:num], "teacher": teacher[:num], "share": 0.3, "soft": soft}
            ours, expected = compiled(student[:num], **given), eager(student[:num], **given)
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("max_logits", [4 * VOCABULARY, 2**26])
def test_autocast_keeps_every_gradient(model, max_logits, monkeypatch):
    """Autocast keeps its copy of a weight, which has no gradient if it was made without one."""
    batch = batch_of(sequences())
    objective = Objective(model, masked=True, mask_loss=LOSSES["soft"])
    monkeypatch.setattr(objective_module, "MAX_LOGITS", max_logits)

    def gradient(*, half):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            sums = objective(batch)
        (sums.noisy + sums.clean).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours, expected = gradient(half=True), gradient(half=False)
    assert ours.keys() == expected.keys()
    for key, theirs in expected.items():
        similarity = F.cosine_similarity(ours[key].flatten(), theirs.flatten(), dim=0)
        assert similarity > 0.95, key
