"""Tiny models with random weights, and packed batches for them."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mars_train.method.layout import collate, lay_out, pack

MASK, PAD, VOCABULARY = 60, 0, 64


def build_model(family="qwen2", head_dim=8, num_hidden_layers=2, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=48,
        head_dim=head_dim,
        intermediate_size=48,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=6,  # not a power of two; three per key-value head
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **settings,
    )
    return AutoModelForCausalLM.from_config(config)


def build_batch(num=8, row_slots=128, multiple_of=1, block_size=4, seed=0):
    rng = np.random.default_rng(seed)
    layouts = [
        lay_out(
            rng.integers(1, MASK, length),
            np.arange(length) >= rng.integers(1, length),
            block_size,
            MASK,
            block_offset=int(rng.integers(block_size or 1)),
        )
        for length in rng.integers(4, 40, num)
    ]
    return collate(pack(layouts, row_slots, multiple_of), PAD, multiple_of)


def silent_layout():
    return lay_out(np.arange(1, 9), np.zeros(8, bool), 4, MASK)


def checkpoint_layers(model):
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
