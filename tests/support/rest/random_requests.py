"""Random requests, and small models whose outputs have what can go wrong in a text.

The models write bytes of characters that need several tokens, broken ones too, thinking, tool calls
and JSON. An output follows from the token before it and, less, from all others.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chat_families import MASK, tokenizer_of
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.method.mode import Mode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Draft, Request
from rest.rest_requests import CHAT, COMPLETIONS, SHORT_TOOL_TEMPLATE

BLOCK_SIZE = 4
_SCALE = 3e-4
"""Factor of the weights by which earlier tokens count; their logits then differ by some tenths."""
FAMILIES = {"byte-level": "qwen", "byte-fallback": "llama 2"}
"""Families of tokenizers, by how they write the bytes of what has no token of its own."""
_TEMPLATE = SHORT_TOOL_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
_MARKERS = "<tool_call>", "</tool_call>", "<think>", "</think>"
_CALL_HEAD = '{"name": "get", "arguments": {"'
"""A token of the models, as calls begin with it; larger vocabularies have such ones, too."""
_CALL = f'<tool_call>{_CALL_HEAD}city": "Köln", "n": 12}}}}\n</tool_call>'
_CORPUS = [
    "<think>\nHmm, 2 plus 3? 🙂 I think.\n</think>\n\nIt is 5, naïve 東京.<|im_end|>",
    f"<think>\n</think>\n\n{_CALL}<|im_end|>",
    f" I call it. {_CALL}\n{_CALL}<|im_end|>",
    '{"a": 1, "b": ["x", "😀👍é"]}<|im_end|>',
    " It is 12, is it? 🙂🙂 東京大学 café\n\n  and so on. </b> the end<|im_end|>",
]
_STOPS = [" I", "think", "\n\n", "🙂", "e", "</", "京", "it is", "12", ".", "}", "\ufffd"]
_STRUCTURES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"structured_outputs": {"regex": "(ab|🙂|[0-9]{2,3})*"}},
    {"structured_outputs": {"choice": ["café", "東京", "東大"]}},
    {"structured_outputs": {"grammar": 'start: "it is " /[0-9]+/ ("é" | "e")*'}},
]
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 12]}},
    "required": ["city"],
}
_TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": _PARAMETERS}},
    {"type": "function", "function": {"name": "put", "strict": False}},
]
_NAMED = {"type": "function", "function": {"name": "get"}}


def make_checkpoint(kind: str) -> tuple[Checkpoint, PreTrainedModel]:
    """Return a checkpoint with a tokenizer of a kind, and its model."""
    tokenizer = copy.deepcopy(tokenizer_of(FAMILIES[kind]))
    texts = {"<|im_start|>": True, "<|im_end|>": True, **dict.fromkeys(_MARKERS, False)}
    tokenizer.add_tokens(
        [
            AddedToken(text, special=is_special, normalized=False)
            for text, is_special in {**texts, _CALL_HEAD: False}.items()
        ]
    )
    tokenizer.chat_template = _TEMPLATE
    end, mask = tokenizer.convert_tokens_to_ids(["<|im_end|>", MASK])
    model = _bigram_model(tokenizer, mask)
    special = SpecialTokens(frozenset({end}), frozenset({mask}))
    metadata = MarsMetadata(block_size=BLOCK_SIZE, mask_token_id=mask)
    return Checkpoint(None, model.config, tokenizer, metadata, special), model


def _bigram_model(tokenizer: PreTrainedTokenizerBase, mask: int) -> PreTrainedModel:
    """Return a model that mostly writes what follows the last token in the corpus.

    Its masks propose frequent tokens.
    """
    size = len(tokenizer)
    model = build_model(
        "qwen3",
        vocab_size=size,
        hidden_size=size,
        head_dim=8,
        num_hidden_layers=1,
        max_position_embeddings=512,
    )
    counts = torch.full((size, size), 1e-4)
    for text in _CORPUS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for before, behind in pairwise(ids):
            counts[before, behind] += 1
    counts[mask] = counts.sum(0) ** 2
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_((counts / counts.sum(1, keepdim=True)).log().T / size**0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(_SCALE)
            layer.mlp.down_proj.weight.mul_(_SCALE)
    return model


class ForeseeingEngine(Engine):
    """An engine whose drafts in mode exact are right for as long as a draw says.

    The tokens come from the same request in mode ar, which has to have run before. Requests are the
    same if the texts of their ``cache_salt`` are, up to a slash; what is behind it seeds the draws.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.lengths = Counter[tuple[Mode, int]]()
        """Number of passes that gave a number of tokens, by mode."""
        self._outputs = defaultdict[str, list[int]](list)
        super().__init__(*arguments, **options)

    def finish_step(self, step: Any) -> Any:
        """Finish a step, and replace the drafts for the next one."""
        outputs = super().finish_step(step)
        requests = {row.request.id: row.request for row in step.rows} if step is not None else {}
        for output in outputs:
            request = requests[output.request_id]
            self.lengths[request.options.mode, len(output.tokens)] += 1
            same = request.cache_salt.split("/")[0] + request.id.rsplit("-")[-1]
            if request.options.mode is Mode.AR:
                self._outputs[same] += output.tokens
            elif request.options.mode is Mode.EXACT and output.finish_reason is None:
                request.set_drafts(self._drafts(request, self._outputs[same]))
        return outputs

    def _drafts(self, request: Request, known: list[int]) -> list[Draft]:
        source = random.Random(f"{request.cache_salt} {request.num_output}")
        right = known[request.num_output :][: source.randint(0, BLOCK_SIZE)]
        wrong = [source.randrange(100)] * (source.random() < 0.3)
        return [Draft(token, 0.9) for token in [*right, *wrong][:BLOCK_SIZE]]


def draw_request(source: random.Random, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Draw a request that can run: its path, and the body without mode and ``stream``."""

    def maybe(chance: float, **fields: Any) -> dict[str, Any]:
        return fields if source.random() < chance else {}

    def pick(*values: Any) -> Any:
        return source.choice(values)

    def tokens(most: int) -> list[int]:
        return [pick(*tokenizer(pick(*_CORPUS))["input_ids"]) for _ in range(pick(1, most))]

    is_chat = source.random() < 0.65
    has_grammar = source.random() < 0.2
    has_tools = is_chat and not has_grammar and source.random() < 0.5
    max_tokens = source.randint(1, 40) + 20 * has_tools
    text = pick("What is 2 plus 3?", "Call get.", "🙂 東京", "It is")
    body = {
        "model": "mars",
        "max_tokens": max_tokens,
        "temperature": pick(0, 0.7, 1, 1.3),
        "seed": source.randrange(1000),
        **maybe(0.2, n=pick(2, 3)),
        **maybe(0.2, top_p=pick(0.5, 0.9)),
        **maybe(0.1, top_k=pick(1, 5)),
        **maybe(0.1, min_p=0.05),
        **maybe(0.2, repetition_penalty=pick(0.8, 1.3)),
        **maybe(0.15, presence_penalty=pick(-0.5, 1)),
        **maybe(0.15, frequency_penalty=pick(-0.3, 0.7)),
        **maybe(0.15, logit_bias={str(token): pick(-100, 3) for token in tokens(4)}),
        **maybe(0.2, min_tokens=source.randint(0, max_tokens)),
        **maybe(0.05, allowed_token_ids=tokens(30)),
        **maybe(0.15, bad_words=source.sample([" I", "think", "a", "🙂", "it is"], 2)),
        **maybe(0.3, stop=source.sample(_STOPS, pick(1, 2, 3))),
        **maybe(0.1, stop_token_ids=tokens(2)),
        **maybe(0.2, include_stop_str_in_output=True),
        **maybe(0.2, truncate_prompt_tokens=source.randint(1, 20)),
        **maybe(0.1, truncation_side=pick("left", "right")),
        **maybe(0.1, return_tokens_as_token_ids=True),
        **maybe(0.1, add_special_tokens=pick(True, False)),
        "stream_options": {"include_usage": True},
    }
    if has_grammar:
        body |= pick(*_STRUCTURES)
    else:
        body |= maybe(0.15, ignore_eos=not has_tools)
        spans = {"thinking": pick(0.05, 0.3), "answer": pick(0.02, 0.2)}
        spans |= {"tool_arguments": 0.1} if has_tools else {}
        body["confidence_threshold"] = pick(0.05, 0.2, spans)
    body.setdefault("confidence_threshold", 0.1)
    body |= {} if has_tools else maybe(0.15, skip_special_tokens=False)
    if not is_chat:
        prompt = pick(text, [text, "It"], f"<|im_start|>user\n{text}<|im_end|>\n<think>\n")
        return {
            "path": COMPLETIONS,
            **body,
            "prompt": prompt,
            "parse_special_tokens": True,
            **maybe(0.3, logprobs=pick(0, 2)),
            **maybe(0.2, echo=True),
            **maybe(0.5, return_token_ids=True),
        }
    if has_tools:
        body |= {"tools": _TOOLS, "tool_choice": pick("auto", "auto", "required", _NAMED, "none")}
        body |= maybe(0.3, parallel_tool_calls=False)
    messages = [{"role": "user", "content": text}]
    continued = maybe(0.15, continue_final_message=True, echo=pick(True, False))
    if continued:
        messages.append({"role": "assistant", "content": "It is 🙂"})
    return {
        "path": CHAT,
        **body,
        **continued,
        "messages": messages,
        **({} if continued else maybe(0.4, chat_template_kwargs={"enable_thinking": True})),
        **maybe(0.3, logprobs=True, top_logprobs=pick(0, 2)),
        **maybe(0.2, thinking_token_budget=source.randint(0, 12)),
        **pick({"return_token_ids": True}, {"include_reasoning": False}, {}),
    }
