"""The endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

import unicodedata

import jsonschema
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars_serve.api.text import encode
from mars_serve.config.served import ServedModel
from rest.rest_server import app_of, client_of

TEXT = "What is 1 plus 2? Größe 日本"
USER = {"role": "user", "content": "Count"}
PROMPT = "<|im_start|>user\nCount<|im_end|>\n"


@pytest.fixture(scope="session")
def alone(models: list[ServedModel]) -> FastAPI:
    """Return an application with one model."""
    return app_of(models[0])


async def test_a_text_is_tokenized_and_detokenized(client, tokenizer):
    body = {"model": "mars", "prompt": TEXT, "return_token_strs": True}
    response = await client.post("/tokenize", json=body)
    found = response.json()
    expected = encode(tokenizer, TEXT, add_special_tokens=True)
    assert found == {
        "count": len(expected),
        "max_model_len": 256,
        "tokens": expected,
        "token_strs": tokenizer.convert_ids_to_tokens(expected),
    }
    response = await client.post("/detokenize", json={"model": "mars", "tokens": expected})
    assert response.json() == {"prompt": TEXT}


async def test_token_names_are_returned_only_on_request(client):
    response = await client.post("/tokenize", json={"model": "mars", "prompt": ""})
    assert response.json() == {"count": 0, "max_model_len": 256, "tokens": [], "token_strs": None}
    response = await client.post("/detokenize", json={"model": "mars", "tokens": []})
    assert response.json() == {"prompt": ""}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40).map(lambda text: unicodedata.normalize("NFC", text)))
async def test_any_text_survives_the_round_trip(client, text):
    body = {"model": "mars", "tokens": await client.ids_of(prompt=text)}
    assert (await client.post("/detokenize", json=body)).json() == {"prompt": text}


async def test_a_conversation_is_rendered_before_it_is_tokenized(client, tokenizer):
    expected = encode(tokenizer, PROMPT + "<|im_start|>assistant\n", add_special_tokens=False)
    assert await client.ids_of(messages=[USER]) == expected
    parts = {"role": "user", "content": [{"type": "text", "text": "Count"}]}
    assert await client.ids_of(messages=[parts]) == expected
    without = await client.ids_of(messages=[USER], add_generation_prompt=False)
    assert without == encode(tokenizer, PROMPT, add_special_tokens=False)


async def test_detokenize_spells_special_tokens(client, tokenizer):
    body = {"model": "mars", "tokens": await client.ids_of(messages=[USER])}
    response = await client.post("/detokenize", json=body)
    assert response.json() == {"prompt": PROMPT + "<|im_start|>assistant\n"}


async def test_the_only_model_needs_no_name(alone):
    async with client_of(alone) as client:
        response = await client.post("/tokenize", json={"prompt": TEXT})
        tokens = response.json()["tokens"]
        assert tokens == await client.ids_of(prompt=TEXT)
        response = await client.post("/detokenize", json={"tokens": tokens})
        assert response.json() == {"prompt": TEXT}
        named = await client.get("/tokenizer_info", params={"model": "mars"})
        assert (await client.get("/tokenizer_info")).json() == named.json()


async def test_tokenizer_info_describes_the_tokenizer(client, tokenizer):
    response = await client.get("/tokenizer_info", params={"model": "mars"})
    assert response.json() == {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": 256,
        "vocab_size": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template,
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model", "there is no 'none'"),
        ("/detokenize", {"model": "none", "tokens": [1]}, 404, "model", "mars, plain"),
        ("/tokenize", {"prompt": "x"}, 400, "model", "it is missing; give one of mars, plain"),
        ("/tokenize", {"model": "mars"}, 400, "prompt", "either prompt or messages"),
        ("/tokenize", {"model": "mars", "prompt": "x", "messages": [USER]}, 400, "prompt",
         "not both"),
        ("/tokenize", {"model": "mars", "prompt": "x", "tools": [{
            "type": "function", "function": {"name": "f"}}]}, 400, "tools", "give messages"),
        ("/tokenize", {"model": "mars", "messages": [USER], "tools": [{
            "type": "function", "function": {"name": "f"}}]}, 400, "tools", "does not know tools"),
        ("/tokenize", {"model": "mars", "messages": []}, 400, "messages", "at least 1 item"),
        ("/tokenize", {"model": "mars", "prompt": 3}, 400, "prompt", "valid string"),
        ("/tokenize", {"model": "mars", "messages": [USER], "chat_template": "x"}, 400,
         "chat_template", "None"),
        ("/tokenize", {"model": "mars", "messages": [USER],
         "chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs",
         "is set by the server"),
        ("/tokenize", {"model": "mars", "messages": [USER], "add_generation_prompt": True,
         "continue_final_message": True}, 400, "continue_final_message",
         "add_generation_prompt: false"),
        ("/detokenize", {"model": "mars"}, 400, "tokens", "Field required"),
        ("/detokenize", {"model": "mars", "tokens": [-1]}, 400, "tokens", "greater than"),
        ("/detokenize", {"model": "mars", "tokens": ["1"]}, 400, "tokens", "integer"),
        ("/detokenize", {"model": "mars", "tokens": [1, 5000]}, 400, "tokens", "id 5000 is not"),
    ],
)  # fmt: skip
async def test_invalid_requests_are_refused_by_field(client, path, body, status, param, message):
    assert message in await client.refusal(path, body, status, param)


async def test_the_record_names_the_model(client, caplog):
    caplog.set_level("INFO", "marsray.requests")
    await client.ids_of(prompt=TEXT)
    (line,) = caplog.messages
    assert '"model": "mars"' in line
    assert "plus" not in line


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": "x", "messages": None}, True),
        ({"messages": [USER], "prompt": None, "tools": []}, True),
        ({}, False),
        ({"prompt": None}, False),
        ({"prompt": "x", "messages": [USER]}, False),
        ({"messages": [{**USER, "role": "human"}]}, False),
    ],
)
async def test_the_schema_describes_exactly_what_is_accepted(client, body, is_valid):
    document = (await client.get("/openapi.json")).json()
    schema = {"$ref": "#/components/schemas/TokenizeRequest", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid({"model": "mars", **body}) == is_valid
    response = await client.post("/tokenize", json={"model": "mars", **body})
    assert (response.status_code == 200) == is_valid
