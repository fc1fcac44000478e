"""Chat templates with the structure of published ones, as far as it matters for what is learned.

Source: the families' published chat templates; these are written anew, and shorter.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A chat template and the tokens of its model."""

    template: str
    special: tuple[str, ...]
    """Special tokens; the first of them begins a text."""
    ends: tuple[str, ...]
    """Tokens at which the model's output ends, all of them listed in its generation config."""


_CALLS = """\
{%- for call in m.tool_calls %}{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"""
_RESULTS = """\
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"""
_TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
_SPLIT = """\
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- set content = m.content %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"""
_LAST_QUESTION = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}"""
_QWEN_OPENING = """\
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}"""

_PARTS = {
    "@CALLS@": _CALLS,
    "@RESULTS@": _RESULTS,
    "@TOOLS@": _TOOLS,
    "@SPLIT@": _SPLIT,
    "@LAST_QUESTION@": _LAST_QUESTION,
    "@QWEN_OPENING@": _QWEN_OPENING,
}


def _filled(template: str) -> str:
    for name, part in _PARTS.items():
        template = template.replace(name, part)
    return template


QWEN_2 = _filled(
    """\
@TOOLS@{%- for m in messages %}{%- if m.role == 'tool' %}@RESULTS@
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}@CALLS@{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""Knows no thinking and keeps all that was written."""
_QWEN_3 = _filled(
    """\
@TOOLS@@LAST_QUESTION@{%- for m in messages %}{%- if m.role == 'tool' %}@RESULTS@
{%- elif m.role == 'assistant' %}@SPLIT@{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (OFTEN or loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}@CALLS@{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}@QWEN_OPENING@
{%- else %}{{- OPENING }}{%- endif %}{%- endif %}"""
)
QWEN_3 = _QWEN_3.replace("OFTEN", "false").replace("OPENING", "''")
"""Drops the thinking before the last question, and lets the model open it."""
QWEN_3_6 = _QWEN_3.replace("OFTEN", "true").replace("OPENING", "'<think>\\n'")
"""Opens the thinking in the generation prompt."""
GLM = _filled(
    """\
{{- '[gMASK]' }}{%- if tools %}{{- '<|system|>\\n' + tools | tojson }}{%- endif %}
@LAST_QUESTION@{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|observation|>' if loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}@SPLIT@{{- '<|assistant|>\\n<think>' }}
{%- if loop.index0 > ns.last %}{{- thought.strip() }}{%- endif %}{{- '</think>' }}
{{- '\\n' + content.strip() if content.strip() }}
{%- for call in m.tool_calls %}{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n' + key + '=' + value | string }}{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}
{%- endif %}{%- endif %}"""
)
"""Ends no turn: the token that begins the next message does."""
DEEPSEEK_R1 = """\
{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end｜>' }}
{%- else %}{{- '<｜User｜>' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""
"""Drops all thinking, and knows no system turn's place and no tools."""
DEEPSEEK_V3 = """\
{{- bos_token }}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if loop.previtem.role == 'tool' %}{{- m.content }}
{%- else %}{{- '<｜Assistant｜></think>' + m.content.split('</think>')[-1] }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '<｜call｜>' + call.function.name + '<｜sep｜>' + call.function.arguments }}{%- endfor %}
{{- '<｜end｜>' }}
{%- elif m.role == 'tool' %}{{- '<｜output｜>' + m.content }}
{%- else %}{{- '<｜User｜>' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<｜Assistant｜>' + ('<think>' if enable_thinking else '</think>') }}{%- endif %}"""
"""Joins arguments as texts, opens or closes the thinking, and needs no header behind results."""
GPT_OSS = """\
{%- if tools %}{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set has_final = messages[loop.index:] | rejectattr('tool_calls') | selectattr('role', 'equalto', 'assistant') | list %}
{%- if 'tool_calls' in m %}{%- set thought = m.thinking or m.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' if thought and not has_final }}
{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|channel|>commentary<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if 'thinking' in m }}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}{{- '<|start|>' + m.name + '<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""  # noqa: E501
"""Ends the last turn otherwise than those before it, and drops thinking once there is an answer."""
NEMOTRON = """\
{%- for m in messages %}{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n' if loop.last else '') }}
{{- m.content if loop.last else m.content.split('</think>')[-1].strip() }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n' }}{%- endif %}"""
"""Opens the thinking before the last content, whatever that begins with."""
MARKED = """\
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- generation %}{{- '<|im_start|>assistant\\n' + m.content }}{%- endgeneration %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Marks the header as generated, too, and forgets the end."""

_CHATML, _OUTPUT = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<|endoftext|>", "<|im_end|>")
_DEEPSEEK = (
    "<｜begin｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end｜>",
    "<｜call｜>",
    "<｜sep｜>",
    "<｜output｜>",
)
_GLM = ("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_GPT_OSS = ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>")

FAMILIES = {
    "qwen 2": Family(QWEN_2, _CHATML, _OUTPUT),
    "qwen 3": Family(QWEN_3, _CHATML, _OUTPUT),
    "qwen 3.6": Family(QWEN_3_6, _CHATML, _OUTPUT),
    "glm": Family(GLM, _GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek r1": Family(DEEPSEEK_R1, _DEEPSEEK, ("<｜end｜>",)),
    "deepseek v3": Family(DEEPSEEK_V3, _DEEPSEEK, ("<｜end｜>",)),
    "gpt-oss": Family(GPT_OSS, (*_GPT_OSS, "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
    "nemotron": Family(NEMOTRON, _CHATML, _OUTPUT),
    "marked": Family(MARKED, _CHATML, _OUTPUT),
}
