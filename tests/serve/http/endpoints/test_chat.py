from __future__ import annotations

from mars_serve.api.text import decode, encode
from rest_requests import CHAT, MESSAGES, PROMPT


async def test_a_chat_equals_the_reference_decoder(official, mars, oracle):
    rendered = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = encode(mars.tokenizer, rendered, add_special_tokens=False)
    expected = oracle(ids, 0.05)
    response = await official.chat.completions.create(
        model="mars",
        messages=MESSAGES,
        max_completion_tokens=24,
        extra_body={"confidence_threshold": 0.05},
    )
    assert response.id.startswith("chatcmpl-")
    assert response.object == "chat.completion"
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == decode(mars.tokenizer, expected.tokens)
    assert choice.finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids), 24)
    assert response.mars["forward_passes"] == len(expected.passes)


async def test_a_chat_may_fill_the_models_context_by_default(client):
    body = await client.answer(CHAT, {"model": "mars", "messages": MESSAGES})
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if body["choices"][0]["finish_reason"] == "length":
        assert usage["total_tokens"] == 256
    else:
        assert usage["total_tokens"] < 256
