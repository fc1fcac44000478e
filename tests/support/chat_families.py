"""Tiny tokenizers that divide text, add control tokens and render chats as published families do.

Source: the families' published tokenizers and chat templates, shortened.
"""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_TEXTS = [
    "What is 1 plus 2? It is three, I think, and that is that.\n\n",
    'def add(a, b):\n    return a + b  # <b>im_start</b> |>\n{"name": "get", "arguments": {}}',
    "user system assistant model tool start_of_turn INST mask think think tool_call s > <",
] * 20
_WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"

_QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall with <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- set content = message.content %}{%- set thought = '' %}
  {%- if '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if loop.last and thought %}
    {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
  {%- endif %}
  {{- content }}
  {%- for call in message.tool_calls %}
  {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
  {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
  {%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
  {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
  {{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.content.startswith('<tool_response>') %}
  {{- '<|im_start|>user\\nraw ' + message.content[15:] + '<|im_end|>\\n' }}
{%- else %}
  {{- '<|im_start|>' + message.role + (message.name | default('')) + '\\n' }}
  {{- message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if hint is defined %}{{- '<think>' + hint + '</think>' }}{%- endif %}{%- endif %}"""
_LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) }}
{{- '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
{%- if hint is defined %}{{- hint }}{%- endif %}"""
_MISTRAL = """\
{{- bos_token }}{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{%- if tools and loop.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last }}
{%- endfor %}{{- ']' + eos_token }}
{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}{%- endfor %}
{%- if hint is defined %}{{- hint }}{%- endif %}"""
_GEMMA = """\
{{ bos_token }}{% for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- for call in message.tool_calls %}
{{- call.function.name }}{{ call.function.arguments }}{%- endfor %}
{%- endfor %}{%- if tools %}{{- tools }}{%- endif %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
{%- if hint is defined %}{{- hint }}{%- endif %}"""
_LLAMA_2 = """\
{% for message in messages %}{% if message.role == 'assistant' %}
{{- ' ' ~ (message.content | trim) ~ ' ' ~ eos_token }}
{%- else %}{{ bos_token ~ message.role ~ ': ' ~ (message.content | trim) }}{% endif %}
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- if hint is defined %}{{ hint }}{% endif %}"""
_PHI = """\
{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- for call in message.tool_calls %}{{- '<|' + call.function.name + '|>' }}
{{- call.function.arguments | tojson }}{% endfor %}
{%- if message.name %}{{ '<|' ~ message.name ~ '|>' }}{% endif %}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- if hint is defined %}{{ hint }}{% endif %}"""

TEMPLATES = {
    "qwen": _QWEN,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "llama 2": _LLAMA_2,
    "phi": _PHI,
}
MASK = "<|mask|>"
_SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": [
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
    ],
    "mistral": [
        *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "llama 2": [],
    "phi": ["<|endoftext|>", "<|user|>", "<|system|>", "<|assistant|>", "<|tool|>", "<|end|>"],
}
_FURTHER = {
    "qwen": [
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>", "<|fim_prefix|>"),
    ],
    "gemma": ["\n\n", "\n\n\n", "<table>"],
}
"""Added tokens that the tokenizer does not call special."""
ORDINARY = {"\n\n", "\n\n\n", "<table>"}
"""Added tokens that are no control tokens."""


def control_texts(family: str) -> list[str]:
    """Return the texts of a family's control tokens."""
    own = ["<s>", "</s>", "<unk>"] if family in BYTE_FALLBACK else []
    further = [text for text in _FURTHER.get(family, []) if text not in ORDINARY]
    return [*own, *_SPECIAL[family], *further, MASK]


BYTE_FALLBACK = {"mistral", "gemma", "llama 2"}
"""Families whose tokenizers come from SentencePiece: a text without a piece becomes bytes."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a family, with its chat template and a mask token."""
    if family in BYTE_FALLBACK:
        tokenizer, bos, eos = _from_pieces(family), "<s>", "</s>"
    else:
        tokenizer = _byte_level(family)
        bos, eos = _SPECIAL[family][:2]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        chat_template=TEMPLATES[family],
        clean_up_tokenization_spaces=False,
    )
    added = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL[family]]
    made.add_tokens(added, special_tokens=True)
    further = _FURTHER.get(family, [])
    made.add_tokens([AddedToken(text, normalized=False) for text in further])
    made.add_special_tokens({"additional_special_tokens": [MASK]})
    return made


def _byte_level(family: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if family == "llama":
        tokenizer.add_special_tokens([AddedToken("<|begin_of_text|>", normalized=False)])
        token = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", token)]
        )
    return tokenizer


def _from_pieces(family: str) -> Tokenizer:
    """Return a tokenizer of pieces with a byte for what has none, whose vocabulary has ``<s>``.

    Its decoder is the published one, which but for Gemma leaves out a space that begins a text.
    """
    space = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = space
    base.train_from_iterator(
        [text[:40] for text in _TEXTS], BpeTrainer(vocab_size=160, show_progress=False)
    )
    model = json.loads(base.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*first, *sorted(model["vocab"], key=model["vocab"].get)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(each) for each in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=first[0], fuse_unk=True, byte_fallback=True)
    )
    if family == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif family == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    strip = [] if family == "gemma" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
