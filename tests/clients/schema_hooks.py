"""Changes the requests that schemathesis generates, so that they name a model and stay short.

The schema allows any text as a model's name, and long outputs. Without these changes nearly every
request would fail with "no such model", and the others would generate for minutes.
"""

from __future__ import annotations

import schemathesis

_MOST_TOKENS, _MOST_CHOICES = 6, 3
_LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": None,  # it demands a length
}


@schemathesis.hook
def before_call(context, case, kwargs):
    """Change fields that do not decide whether a body is valid; values of wrong types stay."""
    body = case.body
    if not isinstance(body, dict) or "model" not in body:
        return
    is_valid = case.meta.generation.mode.is_positive
    if isinstance(body["model"], str) and (body["model"] or is_valid):
        body["model"] = "mars"
    if case.path not in _LENGTHS:
        return
    if field := _LENGTHS[case.path]:
        body.setdefault(field, _MOST_TOKENS)
    for field, most in (
        ("max_tokens", _MOST_TOKENS),
        ("max_completion_tokens", _MOST_TOKENS),
        ("max_output_tokens", _MOST_TOKENS),
        ("n", _MOST_CHOICES),
        ("best_of", _MOST_CHOICES),
    ):
        if is_valid and type(body.get(field)) is int:
            body[field] = min(body[field], most)
