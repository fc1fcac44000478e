import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import mars_train.method.attention as attention_module
import mars_train.method.objective as objective_module
from mars_platform.errors import UserError
from mars_platform.method.rules import oldest_visible, visibility
from mars_platform.mixing.probe import Probe
from mars_platform.mixing.specs import AttentionSpec
from mars_train.method.attention import (
    FLEX_MULTIPLE,
    block_mask,
    choose_attention,
    compiled_flex_attention,
    mask_between,
    slots_of,
)
from mars_train.method.layout import PADDING_DOCUMENT, collate, lay_out
from mars_train.method.objective import Objective
from packed import MASK, PAD, VOCABULARY, build_batch, build_model, checkpoint_layers, silent_layout
from stage_runs import run_group

FAMILIES = ["qwen2", "qwen3", "llama", "mistral"]


def gradients(objective, batch):
    """Return the loss, and the gradients by name."""
    objective.zero_grad()
    sums = objective(batch)
    loss = sums.noisy + 0.7 * sums.clean
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in objective.named_parameters()}


def assert_same(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=0)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(
            ours[1][name],
            gradient,
            rtol=1e-4,
            atol=2e-5 * scale,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def blocks_of(batch, oldest=None):
    return block_mask(slots_of(batch), slots_of(batch), oldest)


@pytest.fixture
def logits_seen(monkeypatch):
    """Record the number of logits in each call of an objective's output layer."""

    def watch(objective, max_logits):
        monkeypatch.setattr(objective_module, "MAX_LOGITS", max_logits)
        seen = []
        objective.model.lm_head.register_forward_hook(
            lambda layer, inputs, output: seen.append(output.numel())
        )
        return seen

    return watch


# --- transformers' own forward pass ---------------------------------------------------------------


@pytest.mark.parametrize(("attention", "block_size"), [("sdpa", None), ("sdpa", 4), ("flex", 4)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_rows_give_the_logits_of_the_own_forward_pass(family, block_size, attention):
    model = build_model(family).eval()
    own = Probe.of(model, avoided={MASK})
    objective = Objective(model, masked=block_size is not None, attention=attention)
    logits = objective.clean_logits(own.tokens, block_size, MASK)
    assert len(logits) == len(own.tokens) - 1
    own.check("in packed rows", lambda: logits)
    with pytest.raises(
        UserError, match=f"^model: .*'{family}'.* differ .*, first behind token 12 "
    ):
        own.check("in packed rows", lambda: logits.index_fill(0, torch.arange(11, 23), 0.0))


# --- the losses -----------------------------------------------------------------------------------


def test_label_losses_add_up_to_the_sums():
    objective, batch = Objective(build_model(), masked=True), build_batch()
    with torch.no_grad():
        clean, noisy = objective.label_losses(batch)
        sums = objective(batch)
    assert clean.shape == noisy.shape == batch.labels.shape
    torch.testing.assert_close((clean.sum(), noisy.sum()), (sums.clean, sums.noisy))
    shallow = batch.depths == 0
    assert shallow.any()
    assert torch.equal(clean[shallow], noisy[shallow])
    assert not torch.isclose(clean[~shallow], noisy[~shallow]).any()


def test_losses_of_a_bfloat16_model_are_float32():
    objective = Objective(build_model().bfloat16(), masked=True)
    clean, noisy = objective.label_losses(build_batch())
    assert clean.dtype == noisy.dtype == torch.float32


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_without_labels_gives_zero_gradients(masked):
    objective = Objective(build_model(), masked=masked)
    batch = collate([[silent_layout()], [silent_layout(), silent_layout()]], PAD)
    sums = objective(batch)
    (sums.noisy + sums.clean).backward()
    assert (float(sums.clean.detach()), float(sums.noisy.detach())) == (0, 0)
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


# --- logits in chunks -----------------------------------------------------------------------------


def test_chunks_change_neither_loss_nor_gradients(logits_seen):
    objective, batch = Objective(build_model(), masked=True), build_batch()
    whole = gradients(objective, batch)
    max_logits = 10 * VOCABULARY
    seen = logits_seen(objective, max_logits)
    assert_same(gradients(objective, batch), whole)
    predictions = len(batch.labels) + int((batch.depths > 0).sum())
    assert sum(seen) == 2 * predictions * VOCABULARY  # once forward, once backward
    assert max(seen) <= max_logits
    assert len(seen) == 2 * -(-predictions // 10)


def test_a_single_chunk_is_not_recomputed(logits_seen):
    objective, batch = Objective(build_model(), masked=True), build_batch()
    seen = logits_seen(objective, 2**20)
    gradients(objective, batch)
    assert len(seen) == 2  # one for each stream


def test_a_chunk_holds_at_least_one_label(logits_seen):
    objective, batch = Objective(build_model(), masked=False), build_batch(2, block_size=None)
    seen = logits_seen(objective, VOCABULARY - 1)
    assert_same(gradients(objective, batch), gradients(objective, batch))
    assert set(seen) == {VOCABULARY}


# --- gradient checkpointing, compilation and sharding ---------------------------------------------


INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.full,  # builds C++ for a minute
        pytest.mark.skipif(shutil.which("g++") is None, reason="it needs a C++ compiler"),
    ],
)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.filterwarnings("ignore")  # torch's own warnings
def test_the_compiled_objective_equals_the_eager_one_at_every_shape(backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    eager, compiled = (
        Objective(build_model(num_hidden_layers=1), masked=True, compile=compiled)
        for compiled in (False, True)
    )
    batches = [build_batch(num, seed=num) for num in (8, 11, 5)]
    assert len({batch.tokens.shape for batch in batches}) == 3
    assert_same(gradients(compiled, batches[0]), gradients(eager, batches[0]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in batches[1:]:
            assert_same(gradients(compiled, batch), gradients(eager, batch))
    assert compiled.state_dict().keys() == eager.state_dict().keys()


def compare_sharded_with_whole():
    """Run by each of two workers: compare loss and gradients under FSDP2 with the whole model's."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    objective_module.MAX_LOGITS = 10 * VOCABULARY
    batches = [build_batch(seed=seed) for seed in range(size)]
    whole = Objective(build_model(), masked=True)
    expected = [gradients(whole, batch) for batch in batches]
    for reshard, checkpointing in [(None, False), (True, True)]:
        objective = Objective(build_model().train(), masked=True)
        if checkpointing:
            checkpoint_layers(objective.model)
        mesh = init_device_mesh("cpu", (size,))
        for layer in objective.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh, reshard_after_forward=reshard)
        loss, ours = gradients(objective, batches[rank])
        torch.testing.assert_close(loss, expected[rank][0])
        for name, gradient in ours.items():
            mean = sum(part[name] for _, part in expected) / size
            assert mean.any(), name
            atol = 2e-5 * float(mean.abs().max())
            torch.testing.assert_close(gradient.full_tensor(), mean, rtol=1e-4, atol=atol)


def test_sharded_objective_over_two_processes_equals_the_whole_one():
    run_group(compare_sharded_with_whole, 2)


# --- attention ------------------------------------------------------------------------------------


def flex_batch(num=9, **settings):
    batch = build_batch(num, row_slots=256, multiple_of=FLEX_MULTIPLE, **settings)
    assert batch.tokens.shape[1] % FLEX_MULTIPLE == 0
    assert batch.documents.amax() >= 2
    assert (batch.documents == PADDING_DOCUMENT).any()
    return batch


@pytest.mark.parametrize(
    ("block_size", "window", "chunk"), [(None, None, None), (2, 5, None), (16, None, 10)]
)
def test_the_block_mask_equals_the_dense_mask(block_size, window, chunk):
    batch = flex_batch(block_size=block_size)
    dense = visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy)
    query, key = batch.position_ids[:, :, None], batch.position_ids[:, None]
    if window is not None:
        dense &= query - key < window
    if chunk is not None:
        dense &= query // chunk == key // chunk
    blocks = blocks_of(batch, oldest_visible(batch.position_ids, window, chunk))
    rows, slots = batch.tokens.shape
    by_element = create_mask(blocks.mask_mod, rows, 1, slots, slots, device="cpu")
    assert torch.equal(by_element.squeeze(1), dense)
    side = slots // FLEX_MULTIPLE
    tiles = dense.view(rows, side, FLEX_MULTIPLE, side, FLEX_MULTIPLE)
    assert torch.equal(blocks.to_dense().squeeze(1).bool(), tiles.any(dim=4).any(dim=2))


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage().nbytes() // leaf.itemsize
                self.elements = max(self.elements, storage)
        return result


def long_batch(slots, rows=1):
    layouts = [[lay_out(np.arange(slots) % MASK, np.arange(slots) > 0, None, MASK)]] * rows
    return collate(layouts, PAD, FLEX_MULTIPLE)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_block_mask_never_holds_all_pairs_of_slots(rows, monkeypatch):
    monkeypatch.setattr(attention_module, "_MOST_AT_ONCE", 2**18)
    largest = {}
    for slots in (1024, 2048, 4096):
        with LargestTensor() as noted:
            blocks_of(long_batch(slots, rows))
        largest[slots] = noted.elements
        assert noted.elements <= max(2**18, rows * slots * FLEX_MULTIPLE)
    assert largest[4096] < rows * 4096**2 / 16


@pytest.mark.parametrize("at_once", [1, 2**16, 2**24])
def test_the_block_mask_does_not_depend_on_the_pairs_at_once(at_once, monkeypatch):
    batch = flex_batch(num=30)
    rows, slots = batch.tokens.shape
    theirs = create_block_mask(blocks_of(batch).mask_mod, rows, None, slots, slots, device="cpu")
    monkeypatch.setattr(attention_module, "_MOST_AT_ONCE", at_once)
    ours = blocks_of(batch)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)
    assert ours.seq_lengths == theirs.seq_lengths


@pytest.mark.filterwarnings("ignore")  # torch's own warnings
def test_flex_attention_is_never_run_unfused_past_the_limit_of_recompilations():
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    attend = compiled_flex_attention(0.25, backend=count)
    shapes = [(rows, blocks) for rows in (3, 1) for blocks in (2, 1, 3)]
    calls = [*((True, *shape) for shape in shapes), (False, *shapes[0])]
    with torch._dynamo.config.patch(recompile_limit=2):
        for grad, rows, blocks in calls:
            batch = long_batch(blocks * FLEX_MULTIPLE, rows)
            query = torch.randn(rows, 6, batch.tokens.shape[1], 16)
            key = value = query[:, :2]
            with torch.set_grad_enabled(grad):
                output = attend(query, key, value, None, blocks_of(batch))
            mask = mask_between(slots_of(batch), slots_of(batch), "sdpa")
            expected = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=0.25, enable_gqa=True
            )
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert 2 < len(graphs) < len(calls)  # behind the limit here, yet not one for each shape


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch's own warnings
def test_compiled_flex_attention_takes_caps_sinks_and_windows():
    batch = long_batch(FLEX_MULTIPLE)
    oldest = oldest_visible(batch.position_ids, 7, None)
    query, sinks = torch.randn(1, 6, FLEX_MULTIPLE, 16), torch.randn(6)
    key = value = query[:, :2]
    attend = compiled_flex_attention(0.25, 2.0, backend="eager")
    output = attend(query, key, value, sinks, blocks_of(batch, oldest))
    scores = torch.tanh(query @ key.repeat_interleave(3, 1).mT * 0.25 / 2.0) * 2.0
    mask = mask_between(slots_of(batch), slots_of(batch), "sdpa", oldest)
    terms = scores.exp() * mask
    weights = terms / (terms.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    expected = weights @ value.repeat_interleave(3, 1)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", ["auto", "flex"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 16), (64, 8), (512, 512)])
def test_flex_attention_is_refused_for_heads_of_other_sizes_on_a_gpu(
    wanted, key_dim, value_dim, caplog
):
    config, cuda = build_model().config, torch.device("cuda")
    usual = AttentionSpec(layer=0, heads=6, kv_heads=2, key_dim=24, value_dim=16)
    odd = replace(usual, layer=1, key_dim=key_dim, value_dim=value_dim)
    size = {8, 512} & {key_dim, value_dim}
    assert choose_attention(wanted, config, [usual], cuda) == "flex"
    if wanted == "auto":
        assert choose_attention(wanted, config, [usual, odd], cuda) == "sdpa"
        assert f"heads have {size.pop()} numbers" in caplog.text
        return
    with pytest.raises(
        UserError, match=rf"attention: .* heads have {size.pop()} numbers .* 16 to 256; use sdpa"
    ):
        choose_attention(wanted, config, [usual, odd], cuda)


def test_flex_attention_is_refused_on_a_cpu_and_with_dropout():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", build_model().config, (), cpu) == "sdpa"
    with pytest.raises(UserError, match="attention: flex trains on CUDA only"):
        choose_attention("flex", build_model().config, (), cpu)
    model = build_model(head_dim=16, attention_dropout=0.1)
    assert choose_attention("auto", model.config, (), cuda) == "sdpa"
    with pytest.raises(UserError, match=r"attention: .* attention_dropout"):
        Objective(model, masked=True, attention="flex")
    with pytest.raises(UserError, match=r"attention: .* attn_pdrop"):
        choose_attention("flex", build_model("gpt2").config, (), cuda)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_losses_equal_sdpa_losses(family):
    batch, model = flex_batch(), build_model(family)
    with torch.no_grad():
        expected = Objective(model, masked=True).label_losses(batch)
        flex = Objective(model, masked=True, attention="flex")
        ours = flex.label_losses(batch)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation != "sdpa"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention trains on CUDA only")
@pytest.mark.parametrize("compile_", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_gradients_equal_sdpa_gradients(family, compile_):
    batch = flex_batch().to(torch.device("cuda"))
    head_dim = 16  # the least that the compiled kernel takes
    plain, other = (build_model(family, head_dim).cuda() for _ in range(2))
    expected = gradients(Objective(plain, masked=True), batch)
    flex = Objective(other, masked=True, attention="flex", compile=compile_)
    ours = gradients(flex, batch)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-4, atol=0)
    for name, gradient in expected[1].items():
        atol = 1e-3 * float(gradient.abs().max())
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=atol)


def test_attention_is_not_saved_with_the_model(tmp_path):
    model = build_model()
    Objective(model, masked=True, attention="flex")
    model.save_pretrained(tmp_path)
    assert "flex" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
