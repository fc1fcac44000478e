"""Request bodies, and a chat template with tools, for the tests of the REST endpoints."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 3 plus 4?"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETION = {"model": "mars", "prompt": PROMPT, "max_tokens": 24}
CONVERSATION = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
BODIES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}
_TURNS = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL_TEMPLATE = (
    """\
{%- if tools %}<|im_start|>system
You may call functions. Their signatures are within <tools></tools> tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return each call as an object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <arguments-json-object>}
</tool_call><|im_end|>
{% endif %}
"""
    + _TURNS
)
"""Chat template with tools, in the manner of the Qwen2.5 models."""
SHORT_TOOL_TEMPLATE = (
    "{%- if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}\n{% endif %}\n"
    + _TURNS
)
"""Chat template with tools that is short enough for the small model's context."""


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice, whole or streamed, of either endpoint."""
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content", part.get("text"))
